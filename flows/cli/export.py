"""`cram export` and `cram push`: a model for others, without what its artifact has of text and of input files."""

import json
import re
import shutil
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from flows.cli.common import say
from flows.cli.predict import model_folder, read_json
from model.errors import InputError, Unreachable
from model.files import TENTHS

if TYPE_CHECKING:
    from tasks.reports.model_card import Published

STAGES = ("pretrain", "finetune")
HERE, CODE = Path(__file__).parents[2] / "model", ("hf.py", "layers.py")  # these import nothing else of cram
MODULES, POOLING, ONNX = "modules.json", "1_Pooling/config.json", "onnx/model.onnx"
MODELS = ("model.safetensors", "model.safetensors.index.json", "model-*-of-*.safetensors")
WRITTEN = [*MODELS, *CODE, MODULES, POOLING, ONNX]  # by a former push: deleted where the new one has none
TOKENS = "https://huggingface.co/settings/tokens"
Model = Annotated[
    str, typer.Argument(metavar="KEY", help="Model: pretrain/KEY, finetune/KEY, a key, its start, or `latest`.")
]
WithCode = Annotated[
    bool, typer.Option("--with-code", help="Add the model's code, for trust_remote_code=True where cram is not.")
]
Licence = Annotated[
    str,
    typer.Option("--license", metavar="ID", help="The model's licence, for its card: the hub's name of it, as mit."),
]
Embeds = Annotated[
    bool, typer.Option("--sentence-transformers", help="Add what opens it there: the mean of its states, as it is.")
]
Onnx = Annotated[bool, typer.Option("--onnx", help=f"Add {ONNX}, for onnxruntime. Needs the extra onnx.")]


class Found(NamedTuple):
    """A model in the store."""

    name: str
    folder: Path
    files: list[str]  # of its manifest
    about: dict  # its manifest
    lineage: dict  # of those that led to it
    config: dict  # its config.json


def export(
    model: Model,
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder to write; absent or empty.")],
    with_code: WithCode = False,
    licence: Licence = "",
    embeds: Embeds = False,
    onnx: Onnx = False,
) -> None:
    """Write a folder to publish: weights, config, tokenizer and card, with a pretrained model's newest scores.

    It has nothing of the text and of the names of input files, which are in an artifact's own folder.
    """
    from tasks.reports.model_card import Published

    found, folder = model_of(model, with_code), folder.resolve()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".export-") as scratch:
            draft = Path(scratch, "model")
            said = fill(draft, found, Published(with_code, licence=licence, embeds=embeds, onnx=onnx), shutil.copyfile)
            draft.rename(folder)  # refused unless it is absent or empty
    except OSError as error:
        raise InputError(f"{folder} can't be written: {error.strerror}. Name another folder, or free space.") from error
    say(f"{folder}: {', '.join(sizes(folder))}. {said}")


def push(
    model: Model,
    repository: Annotated[str, typer.Argument(metavar="OWNER/NAME", help="Model on the hub; made if it is absent.")],
    public: Annotated[bool, typer.Option("--public", help="Let everybody see it. Default: private.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List the files and push nothing; needs no token.")
    ] = False,
    checkpoints: Annotated[
        bool, typer.Option("--checkpoints", help="Also its weights at tenths of the budget, a branch each.")
    ] = False,
    with_code: WithCode = False,
    licence: Licence = "",
    embeds: Embeds = False,
    onnx: Onnx = False,
) -> None:
    """Push a model to the Hugging Face hub: the files that `cram export` writes, which are listed first, and no others.

    A second push uploads what differs. It needs a token that may write, in HF_TOKEN or of `hf auth login`.
    """
    from tasks.reports.model_card import Published, sources
    from tasks.store.errors import written_in

    if not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", repository, re.ASCII):
        raise InputError(f"{repository!r} is no name of a model on the hub. Expected OWNER/NAME.")
    found = model_of(model, with_code)
    tenths = [Path(name).parent for name in found.files if name.startswith(f"{TENTHS}/") and checkpoints]
    percents = sorted({int(folder.name) for folder in tenths})
    if checkpoints and not percents:
        how = "Train it with CRAM_KEEP_TENTHS=1 (and --refresh pretrain)"
        raise InputError(f"{found.name} has no weights at tenths of its budget. {how}, or omit --checkpoints.")
    main = Published(with_code, repository, 0, tuple(percents), licence, embeds, onnx)
    with tempfile.TemporaryDirectory(prefix="cram-push-") as scratch:
        folders = {}
        for how in (main, *(main._replace(percent=percent, onnx=False) for percent in percents)):
            folders[how.branch] = folder = Path(scratch, how.branch)
            with written_in(scratch):
                said = fill(folder, found, how, link)
            for name, size in sizes(folder).items():
                say(f"{size:>15,}  {f'{how.branch}: ' * bool(how.percent)}{name}")
        say(said)
        terms = "; ".join(f"{source['name']}: {source['terms']}" for source in sources(found.lineage)) or "unknown"
        say(f"Terms of the text: {terms}. Licence of the model: {licence or 'none is given (--license)'}.")
        if dry_run:
            say(f"Nothing was pushed to {repository}: this is a dry run.")
        else:
            upload(found, repository, folders, public)


def model_of(name: str, with_code: bool) -> Found:
    """The model of that name. Raises InputError for a folder that is no artifact, or code that nobody needs."""
    from tasks.store.artifacts import LINEAGE, artifacts_of
    from tasks.store.manifests import MANIFEST

    stages = [s for s in STAGES if name.startswith(f"{s}/") or any(a.key.startswith(name) for a in artifacts_of(s))]
    if len(stages) > 1:
        raise InputError(f"Models of two stages begin with {name!r}. Give pretrain/KEY or finetune/KEY.")
    source = model_folder((stages or STAGES)[0], name).resolve()
    about, lineage, config = (read_json(source / file) for file in (MANIFEST, LINEAGE, "config.json"))
    if not about or (with_code and config["model_type"] != "cram"):
        kind = f"a {config['model_type']}, which transformers opens as it is. Omit --with-code."
        raise InputError(f"{name} is {kind if about else f'no artifact: it has no {MANIFEST}. Give a KEY.'}")
    files = [file["path"] for file in about["files"]]
    return Found(f"{about['stage']}/{about['key']}", source, files, about, lineage, config)


def fill(draft: Path, found: Found, how: "Published", place: Callable[[Path, Path], object]) -> str:
    """Write the folder of a model for others. `place` copies or links a file.

    Returns what there is to say about it.
    """
    from tasks.adopt import WEIGHTS
    from tasks.text.tokenizer import FILES

    card, said = card_of(found.about, found.lineage, how)
    weights = f"{TENTHS}/{how.percent}/{WEIGHTS}*" if how.percent else f"{WEIGHTS}*"
    names = [name for name in found.files if name in FILES or fnmatch(name, weights)]
    if lost := [name for name in names if not (found.folder / name).is_file()]:
        raise InputError(
            f"{found.folder} has no {lost[0]}, which its manifest lists. Copy it there, or run its stage again."
        )
    files = [found.folder / name for name in names] + [HERE / name for name in CODE if how.with_code]
    config = dict(found.config) | auto_map(bool(how.with_code))
    config.pop("_name_or_path", None)  # older versions of transformers wrote it, and a model may be adopted
    draft.mkdir()
    for path in files:
        place(path, draft / path.name)
    (draft / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (draft / "README.md").write_text(card, encoding="utf-8")
    if how.embeds:
        write_modules(draft, config.get("hidden_size") or config["hidden"])
    if how.onnx:
        write_onnx(draft, config["architectures"][0])
    if config["model_type"] == "cram":
        needs = "with trust_remote_code=True" if how.with_code else "after `import model.hf`, where cram is installed"
        said += f" transformers has no class for its layout or head, and opens it {needs}."
    return said


def link(source: Path, target: Path) -> None:
    """Link to a file, or copy it where the file system has no symbolic links."""
    try:
        target.symlink_to(source)
    except OSError:
        shutil.copyfile(source, target)


def write_modules(draft: Path, width: int) -> None:
    """Write what opens a model in sentence-transformers: its encoder, then the mean of the states of this width."""
    kinds = {"Transformer": "", "Pooling": Path(POOLING).parent.name}  # with their folders
    rows = [(f"sentence_transformers.models.{kind}", path) for kind, path in kinds.items()]
    modules = [{"idx": n, "name": str(n), "path": path, "type": kind} for n, (kind, path) in enumerate(rows)]
    (draft / MODULES).write_text(json.dumps(modules, indent=2) + "\n", encoding="utf-8")
    (draft / POOLING).parent.mkdir()
    pooling = {"word_embedding_dimension": width, "pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}
    (draft / POOLING).write_text(json.dumps(pooling, indent=2) + "\n", encoding="utf-8")


def write_onnx(draft: Path, architecture: str) -> None:
    """Write the model in the folder for onnxruntime, for texts of any number and length."""
    try:
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise InputError(f"{error.name} is not installed, which --onnx needs: pip install 'cram[onnx]'.") from error
    import torch
    import transformers

    import model.hf  # noqa: F401

    head = getattr(transformers, f"AutoModel{architecture[architecture.index('For') :]}")
    ids = torch.tensor([[2, 5, 3, 6, 3], [2, 5, 3, 3, 0]])  # two texts each, which some heads compare
    inputs = {"input_ids": ids, "attention_mask": (ids != 0).long()}
    sizes = {name: dict.fromkeys((0, 1), torch.export.Dim.DYNAMIC) for name in inputs}
    (draft / ONNX).parent.mkdir()
    torch.onnx.export(
        head.from_pretrained(draft).eval(), (), draft / ONNX, kwargs=inputs, input_names=list(inputs),
        output_names=["logits"], dynamic_shapes=sizes, external_data=False, dynamo=True, verbose=False,
    )  # fmt: skip


def auto_map(with_code: bool) -> dict[str, dict]:
    """The field of config.json with the classes in CODE that transformers' Auto classes take; empty without code."""
    heads = re.findall(r"^class Cram(For\w+|Model)\(", (HERE / CODE[0]).read_text(encoding="utf-8"), re.MULTILINE)
    classes = {f"AutoModel{head.removeprefix('Model')}": f"hf.Cram{head}" for head in heads}
    return {"auto_map": {"AutoConfig": "hf.CramConfig"} | classes} if with_code else {}


def card_of(about: dict, lineage: dict, how: "Published") -> tuple[str, str]:
    """The card of a model, and a sentence about its scores. `about`: its manifest; `lineage`: those that led to it."""
    from tasks.report import for_people, for_programs
    from tasks.reports.model_card import card, finetuned_card
    from tasks.store.artifacts import Artifact, artifact_named, artifacts_of, is_made

    if about["stage"] == "finetune":
        return finetuned_card(about["params"], about["stats"], lineage, how), "The card has its scores."
    model = Artifact(stage=about["stage"], key=about["key"])
    for report in reversed(artifacts_of("report")):
        runs = [artifact_named(name) for name in report.manifest["inputs"]["runs"]]
        if is_made(report, {"runs": runs}) and all(is_made(run, {"start": model}) for run in runs):
            every = lineage | {model.name: about}
            content = for_programs(report.manifest["params"]["title"], runs, model.name, every)
            values = for_people(content, every, runs)
            filled = card(about, lineage, values["glue"], values["own"], how)
            return filled, f"The card has the scores of {report.name}."
    filled = card(about, lineage, how=how)
    return filled, "The card has no scores: no report of this model is in the store."


def sizes(folder: Path) -> dict[str, int]:
    """The bytes of a folder's files, by path."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.stat().st_size for path in files}


def upload(found: Found, repository: str, folders: dict[str, Path], public: bool) -> None:
    """Upload each folder to its branch of a model on the hub, which is made if it is absent."""
    from huggingface_hub import HfApi, get_token

    if not get_token():
        raise InputError(
            f"There is no token for the Hugging Face hub. Create one that may write at {TOKENS}, and set HF_TOKEN to "
            "it or run `hf auth login`. --dry-run and `cram export` need none."
        )
    api = HfApi(library_name="cram")
    with asking(repository):
        url = api.create_repo(repository, private=not public, exist_ok=True)
        private = api.model_info(repository).private
        if not private and not public:
            raise InputError(f"{repository} is there and public. Give --public, or another name. Nothing was pushed.")
        for branch, folder in folders.items():
            if branch != "main":
                api.create_branch(repository, branch=branch, exist_ok=True)
            before = api.model_info(repository, revision=branch).sha
            after = api.upload_folder(
                repo_id=repository, folder_path=folder, revision=branch, delete_patterns=WRITTEN,
                commit_message=f"{found.name} of cram",
            ).oid  # fmt: skip
            say(f"{branch}: {'as it was' if before == after else f'commit {after}'}")
    seen = "everybody sees it" if not private else "private, as it was before" if public else "private"
    say(f"{url}: {seen}.")


@contextmanager
def asking(repository: str) -> Iterator[None]:
    """Raise InputError for what the hub's client raises: errors of its own, of httpx and of sockets."""
    from huggingface_hub import constants

    try:
        yield
    except InputError:
        raise
    except Exception as problem:
        status = getattr(getattr(problem, "response", None), "status_code", None)
        said = getattr(problem, "server_message", "") or str(problem).strip() or type(problem).__name__
        said = textwrap.shorten(said, 300, placeholder=" …").rstrip(".:")
        if status or isinstance(problem, ValueError):
            what = f" Is {repository} yours, and the token one that may write ({TOKENS})?" * (status in (401, 403))
            raise InputError(f"The hub refuses {repository}: {said}.{what}") from problem
        what = "Check the network, HF_ENDPOINT and HF_HUB_OFFLINE; the same command then goes on from what is there."
        raise Unreachable(f"The hub can't be reached at {constants.ENDPOINT}: {said}. {what}") from problem
