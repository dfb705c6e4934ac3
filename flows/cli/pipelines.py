"""Models for commands: found by the name that a user wrote, and opened as pipelines of transformers."""

import json
import os
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flows.cli.common import all_stage_names
from model.errors import InputError
from model.wording import age, printable

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from tasks.store.artifacts import Artifact

TASKS = {  # of transformers' pipelines, by the head in the name of a model's class
    "MaskedLM": "fill-mask",
    "SequenceClassification": "text-classification",
    "TokenClassification": "token-classification",
}
MODELS_SHOWN = 8  # of those that were kept
LONGEST_REASON = 500  # characters


# Finding a model


def find_kept_model(stage: str, name: str, kept: "list[Artifact]") -> "Artifact":
    """The artifact with this name: [STAGE/]KEY, the start of a key, `latest`, or a task, for its newest `kept` model.

    It may be of another stage, if that is named. Raises InputError for other names, and for `latest` if several tasks
    have models.
    """
    from tasks.store.artifacts import LATEST, find

    given, slash, key = name.rpartition("/")
    if slash and given not in all_stage_names():
        raise InputError(
            f"There is no folder {name!r}. Expected a folder with a model, {stage}/KEY, a key, or `latest`."
        )
    if given not in ("", stage):
        return find(given, key)
    newest = {artifact.manifest["params"].get("task"): artifact for artifact in kept}
    if key in newest:
        return newest[key]
    if key != LATEST or not kept:
        return find(stage, key)
    if len(newest) > 1:
        names = ", ".join(f"{task} ({artifact.name})" for task, artifact in newest.items())
        raise InputError(f"{len(newest)} tasks have models: {names}. Name a task or an artifact instead of {name}.")
    return kept[-1]


def model_folder(stage: str, name: str) -> Path:
    """The folder of a model: `name` is this folder, or names an artifact of the stage, as in `find_kept_model`.

    Raises InputError for other names, for artifacts without a model and for changed files.
    """
    from tasks.adopt import has_weights
    from tasks.store.artifacts import artifacts_of
    from tasks.store.manifests import MANIFEST, decisive_files, verify_files

    kept = [artifact for artifact in artifacts_of(stage) if has_weights(artifact.path)]
    folder = Path(name) if means_folder(name) else find_kept_model(stage, name, kept).path
    about = read_json(folder / MANIFEST)
    if about:
        check_model(stage, name, folder, about, kept)
    # a copied folder may lack what a pipeline doesn't read
    files = [file for file in decisive_files(about) if (folder / file["path"]).is_file()]
    verify_files(folder, files, name)
    print_note(f"Model: {model_facts(stage, folder, about)}")
    return folder


def means_folder(name: str) -> bool:
    """Whether a name is that of a folder; a bare one only if a model is in it, since a task may have its name too."""
    from tasks.store.manifests import MANIFEST

    # os.path.isdir is False for a name that is too long, where Path.is_dir raises an error
    if not os.path.isdir(name):
        return False
    is_bare = os.path.basename(name) == name
    return not is_bare or any((Path(name) / file).exists() for file in (MANIFEST, "config.json", "adapter_config.json"))


def check_model(stage: str, name: str, folder: Path, about: dict, kept: "list[Artifact]") -> None:
    """Raise InputError if an artifact is of another stage, or has no model or no weights. `about`: its manifest."""
    from tasks.adopt import has_weights

    made_by = about.get("stage", stage)
    if made_by != stage:
        raise InputError(
            f"{name} was made by the stage {made_by}; expected a model of the stage {stage}: {stage}/KEY, a key, or a "
            f"folder. `cram ls {stage}` lists them."
        )
    if not (folder / "config.json").exists():
        models = [f"{one.key} ({one.manifest['params'].get('task', stage)})" for one in kept[-MODELS_SHOWN:]]
        raise InputError(
            f"The model of {name} was not kept. Kept models: {', '.join(models) or 'none yet'}. To keep others, run "
            'the recipe with finetune.keep set to "first" (seed 0 of each task) or "all".'
        )
    if about.get("hollow") and not has_weights(folder):
        raise InputError(
            f"{name} is hollow: its weights are not here. Fetch them with `cram pull {stage}/{about['key']}`, or "
            f"delete {folder} and run its recipe again, which rebuilds the model."
        )


def model_facts(stage: str, folder: Path, about: dict) -> str:
    """The name of a model, its task and seed, and how old it is."""
    if not about:
        return f"folder {folder.name}"
    params = about.get("params", {})
    facts = [f"{stage}/{about.get('key', folder.name)}"]
    facts += [f"{field} {params[field]}" for field in ("task", "seed") if field in params]
    since = age(about.get("finished", ""))
    if since:
        facts.append(f"made {since} ago")
    return ", ".join(facts)


def read_json(path: Path) -> dict:
    """The JSON object in a file; empty if there is none."""
    with suppress(OSError, ValueError, RecursionError):
        content = json.loads(path.read_text(encoding="utf-8"))
        return content if isinstance(content, dict) else {}
    return {}


def print_note(note: str) -> None:
    """Print a note to standard error, apart from the answers."""
    print(printable(note), file=sys.stderr)


# Opening a model


@dataclass(frozen=True)
class Opened:
    """A model in a folder, opened as a pipeline of transformers for a task."""

    folder: Path
    task: str
    tokenizer: "PreTrainedTokenizerBase"
    config: "PreTrainedConfig"
    about: dict  # what cram wrote about the model's inputs; empty if others trained it since
    run: Callable[..., Any]  # the pipeline

    def ids(self, text: str | list[str], **options: Any) -> list:
        """The token ids of a text, or of several. Raises InputError if the tokenizer fails."""
        from tasks.text.tokenizer import name_failures

        with name_failures(self.folder):
            return self.tokenizer(text, **options).input_ids


def open_pipeline(folder: Path, *tasks: str) -> Opened:
    """Open the model in a folder as a pipeline for one of these tasks, by the head that its config.json names.

    Raises InputError if the folder has no such model, or only a part of it.
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import transformers

    from model import machine

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    with opening_errors_as_input_errors(folder):
        saved = read_json(folder / "config.json")
        head = find_head(folder, saved, tasks)
        task = TASKS[head]
        model = load_model(folder, head)
        # Once transformers has saved a classifier, it may have been trained on other inputs than cram's.
        is_changed = "transformers_version" in saved and saved.get("classifier_pooling") != "compare"
        about = {} if is_changed else saved.get("cram") or {}
        tokenizer = load_tokenizer(folder, task, model.config, about.get("max_tokens"))
    make: Callable[..., Any] = transformers.pipeline  # its types have an overload for each task
    pipeline = make(task, model=model, tokenizer=tokenizer, device=machine.detect().device)
    return Opened(folder, task, tokenizer, model.config, about, pipeline)


@contextmanager
def opening_errors_as_input_errors(folder: Path) -> Iterator[None]:
    """Raise InputError, which names the folder, for what is wrong with the model in it."""
    from huggingface_hub.errors import StrictDataclassError

    try:
        yield
    except (OSError, ValueError, TypeError, LookupError, AttributeError, RuntimeError, StrictDataclassError) as error:
        reason = textwrap.shorten(str(error), LONGEST_REASON, placeholder=" …").rstrip(".")
        raise InputError(f"The model in {folder} can't be opened: {reason}.") from error


def find_head(folder: Path, saved: dict, tasks: tuple[str, ...]) -> str:
    """The head in a config.json. Raises ValueError unless it is one for these tasks."""
    from model import layouts

    if not saved and (folder / "adapter_config.json").exists():
        raise ValueError(
            "the folder has only an adapter of PEFT; merge it (merge_and_unload), and save the whole model"
        )
    if not saved:
        raise ValueError("the folder has no config.json with a JSON object")
    head = layouts.head_of(saved)
    if TASKS.get(head) not in tasks:
        raise ValueError(f"its head is {head or 'none'}; expected one for {' or '.join(tasks)}")
    return head


def load_model(folder: Path, head: str) -> "PreTrainedModel":
    """The model in a folder, in fp32. Raises ValueError if weights are missing, left over or of other shapes."""
    import torch
    import transformers

    from model import hf  # noqa: F401, since it registers cram's layouts with transformers

    opener = getattr(transformers, f"AutoModelFor{head}")
    model, report = opener.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    wrong = []
    for what, names in report.items():
        if names:
            wrong.append(f"{what} {', '.join(map(str, sorted(names)))}")
    if wrong:
        raise ValueError("; ".join(wrong))
    return model


def load_tokenizer(
    folder: Path, task: str, config: "PreTrainedConfig", max_tokens: int | None
) -> "PreTrainedTokenizerBase":
    """The tokenizer in a folder, which truncates to the model's length. Raises ValueError if it is another model's.

    `max_tokens`: the length to which inputs were truncated in training; None: unknown.
    """
    import transformers

    from tasks.text.tokenizer import SPECIALS, name_failures

    if not (folder / "tokenizer.json").exists():  # transformers would make an empty one
        raise ValueError("the folder has no tokenizer.json; copy that of the model that it was trained from")
    with name_failures(folder):
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    entries = config.vocab_size
    if len(tokenizer) > entries:
        raise ValueError(f"its tokenizer has {len(tokenizer):,} entries, but the model only {entries:,}")
    limits = [max_tokens, config.max_position_embeddings, tokenizer.model_max_length]
    tokenizer.model_max_length = min(limit for limit in limits if limit)
    # A literal [SEP] in a text to classify is text, unless the user has added special tokens.
    special = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
    tokenizer.split_special_tokens = task != "fill-mask" and special <= set(SPECIALS)
    return tokenizer
