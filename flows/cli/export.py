"""`cram export` and `cram push`: a model for others, without what its artifact has of text and of input files."""

import json
import re
import shutil
import tempfile
import textwrap
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flows.cli.common import say
from flows.cli.pipelines import model_folder, read_json
from model.errors import InputError, Unreachable, explain_errors

if TYPE_CHECKING:
    from tasks.reports.model_card import Published
    from tasks.reports.model_folder import Source
    from tasks.store.artifacts import Artifact

STAGES = ("pretrain", "finetune")
TOKENS = "https://huggingface.co/settings/tokens"
Model = Annotated[
    str,
    typer.Argument(
        metavar="KEY", help="Model: pretrain/KEY, finetune/KEY, a key, its start, `latest`, or a task's name."
    ),
]
WithCode = Annotated[
    bool | None,
    typer.Option(
        "--with-code/--without-code",
        help="Add the code of the model's classes, so that it opens without cram, by trust_remote_code=True. "
        "Default: if transformers doesn't have its layout.",
        show_default=False,
    ),
]
Licence = Annotated[
    str,
    typer.Option(
        "--license", metavar="ID", help="The model's licence for its card, by the hub's name for it, such as mit."
    ),
]
Embeds = Annotated[
    bool,
    typer.Option(
        "--sentence-transformers",
        help="Add the files that open it there; its sentence embedding is the mean of its states.",
    ),
]
Onnx = Annotated[bool, typer.Option("--onnx", help="Add onnx/model.onnx, for onnxruntime. Needs the extra onnx.")]


def export(
    model: Model,
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder to write; absent or empty.")],
    with_code: WithCode = None,
    licence: Licence = "",
    embeds: Embeds = False,
    onnx: Onnx = False,
) -> None:
    """Write a folder to publish: weights, config, tokenizer and card, with a pretrained model's newest scores.

    It contains nothing of the text or of the names of input files, which are in an artifact's own folder. The last
    line that is printed is the Python that opens it.
    """
    from tasks.reports.model_card import Published
    from tasks.reports.model_folder import write_folder

    source = find_source(model)
    has_code = needs_code(source) and with_code is not False
    how = Published(has_code, licence=licence, embeds=embeds, onnx=onnx)
    card, about_scores = card_of(source, how)
    folder = folder.resolve()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".export-") as scratch:
            draft = Path(scratch, "model")
            write_folder(draft, source, card, how, shutil.copyfile)
            draft.rename(folder)  # refused unless it is absent or empty
    except OSError as error:
        raise InputError(
            f"{folder} can't be written: {error.strerror}. Name another folder, or free some space."
        ) from error
    say(f"{folder}: {', '.join(sizes_in(folder))}. {about_scores}")
    say(about_class(source, has_code, with_code))
    say(python_line(source, str(folder), has_code))


def push(
    model: Model,
    repository: Annotated[str, typer.Argument(metavar="OWNER/NAME", help="Model on the hub; created if it is absent.")],
    public: Annotated[bool, typer.Option("--public", help="Let everybody see it. Default: private.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List the files and push nothing; needs no token.")
    ] = False,
    checkpoints: Annotated[
        bool,
        typer.Option("--checkpoints", help="Also push the weights that training kept on its way, a branch each."),
    ] = False,
    with_code: WithCode = None,
    licence: Licence = "",
    embeds: Embeds = False,
    onnx: Onnx = False,
) -> None:
    """Push a model to the Hugging Face hub: the files that `cram export` writes, which are listed first, and no others.

    A second push uploads what differs. It needs a token with write access, from HF_TOKEN or `hf auth login`.
    """
    from tasks.reports.model_card import Published

    if not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", repository, re.ASCII):
        raise InputError(f"{repository!r} is not the name of a model on the hub. Expected OWNER/NAME.")
    source = find_source(model)
    has_code = needs_code(source) and with_code is not False
    kept = source.kept() if checkpoints else []
    if checkpoints and not kept:
        raise InputError(
            f"{source.name} kept no weights on its way. Train it with CRAM_KEEP_TOKENS=1 or CRAM_KEEP_TENTHS=1 (and "
            "--refresh pretrain), or omit --checkpoints."
        )
    main = Published(has_code, repository, None, tuple(kept), licence, embeds, onnx)
    branches = [main, *(main._replace(kept=each, onnx=False) for each in kept)]
    with tempfile.TemporaryDirectory(prefix="cram-push-") as scratch:
        folders = {}
        for how in branches:
            folders[how.branch] = Path(scratch, how.branch)
            about_scores = write_and_list(folders[how.branch], source, how)
        say(f"{about_scores} {about_class(source, has_code, with_code)}")
        print_terms(source, licence)
        if dry_run:
            say(f"Nothing was pushed to {repository}, since this is a dry run.")
        else:
            upload(source.name, repository, folders, public)
            say(python_line(source, repository, has_code))


def print_terms(source: "Source", licence: str) -> None:
    """Print the terms of the text that a model was made from, and its own licence."""
    from tasks.reports.model_card import sources

    terms = "; ".join(f"{text['name']}: {text['terms']}" for text in sources(source.lineage)) or "unknown"
    say(f"Terms of the text: {terms}. Licence of the model: {licence or 'not set (--license)'}.")


def find_source(name: str) -> "Source":
    """The model of that name; of a task's, the newest kept. Raises InputError for a folder without a manifest."""
    from tasks.reports.model_folder import Source
    from tasks.store.artifacts import LINEAGE, artifacts_of
    from tasks.store.manifests import MANIFEST

    stages = []
    for stage in STAGES:
        made = artifacts_of(stage)
        has_key = any(artifact.key.startswith(name) for artifact in made)
        has_task = any(artifact.manifest["params"].get("task") == name for artifact in made)
        if name.startswith(f"{stage}/") or has_key or has_task:
            stages.append(stage)
    if len(stages) > 1:
        raise InputError(f"{name!r} names models of two stages. Name it as pretrain/KEY or finetune/KEY.")
    folder = model_folder(stages[0] if stages else STAGES[0], name).resolve()
    about = read_json(folder / MANIFEST)
    config = read_json(folder / "config.json")
    if not about:
        raise InputError(f"{name} is not an artifact: it has no {MANIFEST}. Expected a KEY.")
    return Source(f"{about['stage']}/{about['key']}", folder, about, read_json(folder / LINEAGE), config)


def card_of(source: "Source", how: "Published") -> tuple[str, str]:
    """The card of a model, and a sentence about the scores in it."""
    from tasks.report import for_people, for_programs
    from tasks.reports.model_card import card, finetuned_card
    from tasks.store.artifacts import artifact_named, is_made

    about = source.about
    lineage = source.lineage
    if about["stage"] == "finetune":
        return finetuned_card(about["params"], about["stats"], lineage, how), "The card has its scores."
    report = newest_report(source)
    if report is None:
        filled = card(about, lineage, how=how)
        return filled, "The card has no scores, since no report of this model is in the store."
    every = lineage | {source.name: about}
    runs = inputs_of(report, "runs")
    model = artifact_named(source.name)
    judged = [one for one in inputs_of(report, "judged") if is_made(one, {"model": model})]
    content = for_programs(report.manifest["params"]["title"], runs, judged, source.name, every)
    values = for_people(content, every, runs)
    filled = card(about, lineage, values["glue"], values["own"], content["minimal_pairs"].values(), how)
    return filled, f"The card has the scores of {report.name}."


def newest_report(source: "Source") -> "Artifact | None":
    """The newest report of this very model, or None."""
    from tasks.store.artifacts import artifact_named, artifacts_of, digests_of_contents, is_made

    model = artifact_named(source.name)
    for report in reversed(artifacts_of("report")):
        runs = inputs_of(report, "runs")
        recorded = report.manifest.get("made_from", {}).items()  # of later versions with minimal pairs
        is_current = recorded >= digests_of_contents({"runs": runs}).items()
        if is_current and all(is_made(run, {"start": model}) for run in runs):
            return report
    return None


def inputs_of(report: "Artifact", name: str) -> "list[Artifact]":
    """The artifacts that a report was made from, of its input of this name."""
    from tasks.store.artifacts import artifact_named

    return [artifact_named(given) for given in report.manifest["inputs"].get(name, [])]


def needs_code(source: "Source") -> bool:
    """Whether transformers doesn't have the model's layout, so that it needs the code of cram's classes."""
    return source.config["model_type"] == "cram"


def about_class(source: "Source", has_code: bool, asked: bool | None) -> str:
    """A sentence about what transformers needs to open the model. `asked`: whether its code was asked for."""
    if not needs_code(source):
        nothing = ", so there is no code to add" if asked else ""
        return f"transformers has its layout ({source.config['model_type']}){nothing}."
    lacks = "transformers has no class for its layout or head"
    if has_code:
        return f"{lacks}. hf.py and layers.py in the folder define it: trust_remote_code=True runs these two files."
    return f"{lacks}, which `import model.hf` defines where cram is installed."


def python_line(source: "Source", place: str, has_code: bool) -> str:
    """The line of Python that opens the model. `place`: its folder, or its name on the hub."""
    from tasks.reports.model_folder import auto_class

    name = auto_class(source.config)
    imports = ["from transformers import " + name]
    arguments = json.dumps(place, ensure_ascii=False)
    if has_code:
        arguments += ", trust_remote_code=True"
    elif needs_code(source):
        imports.insert(0, "import model.hf")
    return "; ".join([*imports, f"model = {name}.from_pretrained({arguments})"])


def write_and_list(folder: Path, source: "Source", how: "Published") -> str:
    """Write the folder of a branch and print its files. Returns a sentence about the scores in its card."""
    from tasks.reports.model_folder import write_folder
    from tasks.store.errors import written_in

    card, about_scores = card_of(source, how)
    with written_in(str(folder.parent)):
        write_folder(folder, source, card, how, link)
    branch = f"{how.branch}: " if how.kept else ""
    for name, size in sizes_in(folder).items():
        say(f"{size:>15,}  {branch}{name}")
    return about_scores


def link(source: Path, target: Path) -> None:
    """Link to a file, or copy it where the file system has no symbolic links."""
    try:
        target.symlink_to(source)
    except OSError:
        shutil.copyfile(source, target)


def sizes_in(folder: Path) -> dict[str, int]:
    """The bytes of a folder's files, by path."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.stat().st_size for path in files}


def upload(name: str, repository: str, folders: dict[str, Path], public: bool) -> None:
    """Upload each folder to its branch of a model on the hub, which is created if it is absent."""
    from huggingface_hub import HfApi, get_token

    from tasks.reports.model_folder import OPTIONAL

    if not get_token():
        raise InputError(
            f"There is no token for the Hugging Face hub. Create one with write access at {TOKENS}, and set HF_TOKEN "
            "to it or run `hf auth login`. --dry-run and `cram export` need no token."
        )
    api = HfApi(library_name="cram")
    with hub_errors_as_input_errors(repository):
        url = api.create_repo(repository, private=not public, exist_ok=True)
        private = api.model_info(repository).private
        if not private and not public:
            raise InputError(
                f"{repository} exists and is public. Add --public, or choose another name. Nothing was pushed."
            )
        for branch, folder in folders.items():
            if branch != "main":
                api.create_branch(repository, branch=branch, exist_ok=True)
            before = api.model_info(repository, revision=branch).sha
            after = api.upload_folder(
                repo_id=repository,
                folder_path=folder,
                revision=branch,
                delete_patterns=OPTIONAL,
                commit_message=f"{name} of cram",
            ).oid
            say(f"{branch}: {'unchanged' if before == after else f'commit {after}'}")
    as_before = ", as it was before" if public else ""
    say(f"{url}: {f'private{as_before}' if private else 'public'}.")


def hub_errors_as_input_errors(repository: str) -> AbstractContextManager[None]:
    """Raise InputError for what the hub's client raises: its own errors, those of httpx and of sockets."""
    from huggingface_hub import constants

    def explain(problem: BaseException) -> InputError | None:
        if not isinstance(problem, Exception):
            return None
        status = getattr(getattr(problem, "response", None), "status_code", None)
        message = getattr(problem, "server_message", "") or str(problem).strip() or type(problem).__name__
        message = textwrap.shorten(message, 300, placeholder=" …").rstrip(".:")
        if status or isinstance(problem, ValueError):
            advice = ""
            if status in (401, 403):
                advice = f" Check that {repository} is yours and that your token has write access ({TOKENS})."
            return InputError(f"The hub refused {repository}: {message}.{advice}")
        return Unreachable(
            f"The hub can't be reached at {constants.ENDPOINT}: {message}. Check the network, HF_ENDPOINT and "
            "HF_HUB_OFFLINE; then run the same command again, which continues from what is there."
        )

    return explain_errors(explain)
