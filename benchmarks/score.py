"""What is the held-out loss of finished runs of recipes.py, with several vocabularies or on other held-out text?

    python benchmarks/score.py --folder race --data TOKENIZE_DIR… [--beside NAME=OUTSIDE_DIR] [--picture FILE]

Scores every run below the folder that has a checkpoint.safetensors beside its result.json (recipes.py --keep). Each is
measured on the folder of --data that has its vocabulary. The data may come from another version of the tokenize stage
than the runs read, but with the same vocabulary and sequence length, and its documents must have been held out of the
runs' training too. Runs whose settings differ only by the seed form one column; the others are compared with the first
column. Results of outside.py may stand beside them. The picture shows the loss of every run.
"""

import json
import sys
from pathlib import Path

import common
import curves
import numpy as np
from recipes import RESULT, beside, measured, read, sizes_of
from safetensors import SafetensorError, safe_open

from model import InputError, machine
from model.bert import Bert
from model.checkpoint import CHECKPOINT
from model.detection import with_detector
from model.masking import Corpus
from model.settings import Architecture, Training

UNNAMED = ("budget", "budget_unit", "seed")  # fields of a run that its label leaves out


def entries_of(home: Path) -> int:
    """The size of the vocabulary of a run's last checkpoint. Raises InputError if that can't be read."""
    try:
        with safe_open(home / CHECKPOINT, "pt") as file:
            [name] = [name for name in file.keys() if name.endswith("embedding.word.weight")]  # noqa: SIM118, not a dict
            return file.get_slice(name).get_shape()[0]
    except (OSError, SafetensorError, ValueError) as error:
        raise InputError(f"{home / CHECKPOINT} is no checkpoint of a model ({error}).") from error


def label(about: dict, entries: int) -> str:
    """The recipe of a run, its vocabulary, and what it changes; not its budget and seed."""
    recipe = dict(zip(("architecture", "training"), common.settings(about["recipe"], {}), strict=True))
    changes = [
        f"{name} {value}"
        for part, usual in recipe.items()
        for name, value in about[part].items()
        if name not in UNNAMED and getattr(usual, name) != value
    ]
    return ", ".join([about["recipe"], f"{entries:,} entries", *changes])


def runs_below(folder: Path) -> dict[str, list[Path]]:
    """The folders of kept runs by label, each in the order of seeds."""
    homes_of: dict[str, list[tuple[int, Path]]] = {}
    for result in sorted(folder.rglob(RESULT)):
        if (result.parent / CHECKPOINT).exists():
            about = json.loads(result.read_text())
            name = label(about, entries_of(result.parent))
            homes_of.setdefault(name, []).append((about["training"]["seed"], result.parent))
    if not homes_of:
        raise InputError(f"There is no {RESULT} with a {CHECKPOINT} below {folder}. recipes.py keeps them with --keep.")
    return {name: [home for _, home in sorted(homes)] for name, homes in homes_of.items()}


def load(home: Path, corpus: Corpus) -> Bert:
    """The model of a run's last checkpoint. Raises InputError if it does not fit the data."""
    about = json.loads((home / RESULT).read_text())
    bert = Bert(Architecture(**about["architecture"]), corpus.vocabulary, corpus.length)
    trained = with_detector(bert, Training(**about["training"]))
    try:
        with safe_open(home / CHECKPOINT, "pt") as file:
            names = [name for name in file.keys() if name.startswith("model.")]  # noqa: SIM118, not a dict
            trained.load_state_dict({name.removeprefix("model."): file.get_tensor(name) for name in names})
    except (OSError, SafetensorError, RuntimeError) as error:
        raise InputError(
            f"{home / CHECKPOINT} is no model for {corpus.vocabulary:,} entries and {corpus.length} tokens, which the "
            f"data has ({' '.join(str(error).split())})."
        ) from error
    return bert


def score(home: Path, corpus: Corpus, here: machine.Machine, every: int) -> dict:
    """The result of a run with the held-out loss of its last checkpoint."""
    bert = load(home, corpus).to(here.device)
    return json.loads((home / RESULT).read_text()) | {"heldout": measured(bert, corpus, here, every)}


def corpus_for(home: Path, corpora: dict[int, Corpus]) -> Corpus:
    """The data with a run's vocabulary. Raises InputError if there is none."""
    if (entries := entries_of(home)) not in corpora:
        sizes = ", ".join(f"{size:,}" for size in corpora)
        raise InputError(f"{home} has a vocabulary of {entries:,} entries; --data has {sizes}. Add its data.")
    return corpora[entries]


def by_vocabulary(folders: list[Path]) -> dict[int, Corpus]:
    """The data by size of vocabulary. Raises InputError if two have one size, or hold out different documents."""
    corpora = [read(folder) for folder in folders]
    made = {corpus.vocabulary: corpus for corpus in corpora}
    if len(made) < len(folders):
        raise InputError("Two folders of --data have vocabularies of the same size. Give one of each.")
    if not all(np.array_equal(sizes_of(corpora[0]), sizes_of(corpus)) for corpus in corpora):
        raise InputError("The folders of --data hold out different documents. Tokenize the same corpus.")
    return made


def main() -> None:
    """Score all runs, print the table, write it to the --json file, and draw the picture."""
    parser = common.parser(
        __doc__,
        folder={"type": Path, "required": True, "help": "with kept runs, at any depth"},
        data={"type": Path, "nargs": "+", "required": True, "help": "folders of the tokenize stage, one a vocabulary"},
        beside={"nargs": "+", "default": [], "metavar": "[NAME=]DIR", "help": "folders of outside.py"},
        every={"type": common.positive, "default": 1, "help": "measure only each N-th part of the held-out text"},
        picture={"type": Path, "help": "where to draw the losses, as PNG"},
        json=common.JSON_OPTION,
    )
    given = parser.parse_args()
    results: dict[str, list[dict]] = {}
    with common.input_errors(parser):
        corpora, here = by_vocabulary(given.data), machine.detect()
        held = next(iter(corpora.values())).heldout
        for name, homes in runs_below(given.folder).items():
            for home in homes:
                result = score(home, corpus_for(home, corpora), here, given.every)
                results.setdefault(name, []).append(result)
                losses = [f"{result['heldout'][f'nats_per_{unit}']['value']:.4f} per {unit}" for unit in curves.UNITS]
                print(f"{name}, seed {result['training']['seed']}: {', '.join(losses)}", file=sys.stderr)
        results |= beside(given.beside, next(iter(results.values()))[0], held)
    ends = curves.ends(results, held)
    sizes = {"documents": len(held.documents)} | {unit: held.totals[unit] for unit in ("words", "characters", "bytes")}
    counts = ", ".join(f"{count:,} {unit}" for unit, count in sizes.items())
    part = f", estimated from each {given.every}th part" if given.every > 1 else ""
    print(f"{counts}{part}; mean ± sample standard deviation over runs")
    print(curves.end_table(ends))
    common.write_json(given.json, sizes | {"ends": ends, "runs": results})
    if given.picture:
        curves.end_picture(results, given.picture)


if __name__ == "__main__":
    main()
