"""`cram export`: the folder of a model for others, without what its artifact has of text and of input files."""

import json
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from flows.cli.common import say
from flows.cli.predict import model_folder, read_json
from model import InputError

STAGES = ("pretrain", "finetune")
HERE, CODE = Path(__file__).parents[2] / "model", ("hf.py", "layers.py")  # these import nothing else of cram


def export(
    model: Annotated[
        str, typer.Argument(metavar="KEY", help="Model: pretrain/KEY, finetune/KEY, a key, its start, or `latest`.")
    ],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder to write; absent or empty.")],
    with_code: Annotated[
        bool, typer.Option("--with-code", help="Add the model's code, for trust_remote_code=True where cram is not.")
    ] = False,
) -> None:
    """Write a folder to publish: weights, config, tokenizer and card, with a pretrained model's newest scores.

    It has nothing of the text and of the names of input files, which are in an artifact's own folder.
    """
    from tasks.models import WEIGHTS
    from tasks.store import LINEAGE, MANIFEST, artifacts
    from tasks.text.tokenizer import FILES

    stages = [s for s in STAGES if model.startswith(f"{s}/") or any(a.key.startswith(model) for a in artifacts(s))]
    if len(stages) > 1:
        raise InputError(f"Models of two stages begin with {model!r}. Give pretrain/KEY or finetune/KEY.")
    source, folder = model_folder((stages or STAGES)[0], model), folder.resolve()
    about, lineage, config = (read_json(source / name) for name in (MANIFEST, LINEAGE, "config.json"))
    if not about or (with_code and config["model_type"] != "cram"):
        kind = f"a {config['model_type']}, which transformers opens as it is. Omit --with-code."
        raise InputError(f"{model} is {kind if about else f'no artifact: it has no {MANIFEST}. Give a KEY.'}")
    card, scores = card_of(about, lineage, with_code)
    files = [*sorted(source.glob(f"{WEIGHTS}*")), *(source / name for name in FILES)]
    files += [HERE / name for name in CODE if with_code]
    config.pop("_name_or_path", None)  # older versions of transformers wrote it, and a model may be adopted
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".export-") as scratch:
            draft = Path(scratch, "model")
            draft.mkdir()
            for path in files:
                shutil.copyfile(path, draft / path.name)
            (draft / "config.json").write_text(json.dumps(config | auto_map(with_code), indent=2) + "\n")
            (draft / "README.md").write_text(card)
            draft.rename(folder)  # refused unless it is absent or empty
    except OSError as error:
        raise InputError(f"{folder} can't be written: {error.strerror}. Name another folder, or free space.") from error
    say(f"{folder}: {', '.join(sorted(os.listdir(folder)))}. {scores}")


def auto_map(with_code: bool) -> dict[str, dict]:
    """The field of config.json with the classes in CODE that transformers' Auto classes take; empty without code."""
    heads = re.findall(r"^class Cram(For\w+|Model)\(", (HERE / CODE[0]).read_text(), re.MULTILINE)
    classes = {f"AutoModel{head.removeprefix('Model')}": f"hf.Cram{head}" for head in heads}
    return {"auto_map": {"AutoConfig": "hf.CramConfig"} | classes} if with_code else {}


def card_of(about: dict, lineage: dict, with_code: bool) -> tuple[str, str]:
    """The card of a model, and a sentence about its scores. `about`: its manifest; `lineage`: those that led to it."""
    from tasks.report import for_people, for_programs
    from tasks.reports.model_card import card, finetuned_card
    from tasks.store import Artifact, artifacts, is_made, named

    if about["stage"] == "finetune":
        return finetuned_card(about["params"], about["stats"], lineage, with_code), "The card has its scores."
    model = Artifact(stage=about["stage"], key=about["key"])
    for report in reversed(artifacts("report")):
        runs = [named(name) for name in report.manifest["inputs"]["runs"]]
        if is_made(report, {"runs": runs}) and all(is_made(run, {"start": model}) for run in runs):
            every = lineage | {model.name: about}
            content = for_programs(report.manifest["params"]["title"], runs, model.name, every)
            values = for_people(content, every, runs)
            filled = card(about, lineage, values["glue"], values["own"], with_code)
            return filled, f"The card has the scores of {report.name}."
    return card(about, lineage, with_code=with_code), "The card has no scores: no report of this model is in the store."
