"""Recipes against each other: held-out loss over the same budget, on the same sequences in the same order.

    python benchmarks/recipes.py --recipe pocket pocket-modern --tokens 1e7 --data artifacts/tokenize/latest --folder race
    python benchmarks/recipes.py --recipe pocket tuned=pocket --set tuned.learning_rate=0.008 --hours 0.1 --synthetic --folder race

Needs torch, numpy, safetensors and pydantic; a picture needs matplotlib too. The data is what the tokenize stage writes. A seed
decides initialisation, masks, dropout and the order of the sequences, which is thus the same for all recipes. The first recipe
is the one to beat: the table says at which fraction of its budget each passes its final held-out loss of the same seed. With
--set NAME.budget=… another has less (or more) to spend, and its schedule ends there. Losses are measured at tenths of the
own budget, or at the first step after, on a part of the held-out tokens; between them a straight line is assumed. At the end
all of these tokens are measured, and the difference to the first recipe is given with its standard error over documents.

Results are kept in the folder. A run of the same settings, data, device and threads is not run again, and goes on if it was
interrupted. Changes of the code are not noticed: take another folder. With --keep the last checkpoint of each run stays there
too, so that score.py can measure it again on other held-out text.
"""

import argparse
import fcntl
import hashlib
import json
import logging
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import curves
import numpy as np
import torch
from loops import MASK_ID, SPECIALS
from train import positive, settings

from model import InputError, heldout, machine
from model.bert import Bert
from model.checkpoint import CHECKPOINT
from model.heldout import Heldout
from model.masking import Corpus
from model.pretraining import EVALUATIONS, Pretraining
from model.settings import Architecture, Training

ROWS = 512  # sequences that enter the digest of the data
SYNTHETIC, ENTRIES = (4096, 64, 64), 512  # sequences, those held out, tokens of each; vocabulary if not told
RESULT, HALF = "result.json", "result.json.half"
SAME = ("architecture", "budget_unit", "seed")  # what `--set` can't change
UNITS = ("tokens", "hours", "flops")


class Shuffled:
    """Sequences in a random order, left where they are."""

    def __init__(self, sequences: np.ndarray, seed: int) -> None:
        self.sequences, self.shape = sequences, sequences.shape
        self.order = np.random.default_rng(seed).permutation(len(sequences))

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, rows: np.ndarray) -> np.ndarray:
        return self.sequences[self.order[rows]]


def synthetic(vocabulary: int) -> Corpus:
    """Sequences of tokens that each are a little above the one before."""
    count, held, length = SYNTHETIC
    random = np.random.default_rng(0)
    rows = random.integers(0, vocabulary, (count + held, 1)) + random.integers(0, 3, (count + held, length)).cumsum(1)
    rows = (SPECIALS + rows % (vocabulary - SPECIALS)).astype(np.uint16)
    return Corpus(rows[held:], Heldout.of_rows(rows[:held]), vocabulary, MASK_ID, SPECIALS)


def read(folder: Path, entries: int | None) -> Corpus:
    """What the tokenize stage has written. Raises InputError where something is missing."""
    try:
        sequences = np.load(folder / "sequences.npy", mmap_mode="r")
        held = Heldout(np.load(folder / "heldout.npy"), np.load(folder / "heldout_documents.npy"))
        entries = entries or json.loads((folder / "stage.json").read_text())["stats"]["entries"]
        if held.sequences.max() >= entries:
            raise ValueError(f"token {held.sequences.max()} of {entries} entries")
    except (OSError, KeyError, ValueError) as error:
        raise InputError(
            f"{folder} is not what the tokenize stage writes ({error}). Give such a folder, made by this version; where "
            "there are only sequences.npy, heldout.npy and heldout_documents.npy, give --vocabulary too."
        ) from error
    return Corpus(sequences, held, entries, MASK_ID, SPECIALS)


def identity(corpus: Corpus) -> str:
    """A digest of the data: of its size, of rows spread over it, and of all that is held out."""
    rows = corpus.sequences[:: max(1, len(corpus.sequences) // ROWS)]
    size = f"{corpus.sequences.shape} {corpus.vocabulary}".encode()
    held = corpus.heldout.sequences.tobytes() + corpus.heldout.documents.tobytes()
    return hashlib.sha256(size + rows.tobytes() + held).hexdigest()


def measured(bert: Bert, corpus: Corpus, here: machine.Machine) -> dict:
    """The held-out loss on all tokens, with the nats of each document."""
    nats_D, _ = heldout.measure(bert, corpus.heldout, corpus.mask_id, here)
    return heldout.summary(corpus.heldout, nats_D) | {"nats_of_documents": nats_D.tolist()}


def changes(texts: list[str], names: list[str]) -> dict[str, dict]:
    """What `--set` says, by the name of the recipe."""
    found: dict[str, dict] = {name: {} for name in names}
    for text in texts:
        field, equals, value = text.partition("=")
        name, *above, last = field.split(".")
        if not equals or name not in found or above not in ([], ["architecture"]) or last in SAME:
            raise InputError(
                f"--set {text}: expected NAME.FIELD=VALUE, with a name of {', '.join(names)}, and a field of pretrain, or of its "
                f"architecture as architecture.FIELD, but none of {', '.join(SAME)}."
            )
        place = found[name].setdefault("architecture", {}) if above else found[name]
        try:
            place[last] = json.loads(value)
        except json.JSONDecodeError:
            place[last] = value
    return found


def train(name: str, about: dict, corpus: Corpus, here: machine.Machine, folder: Path, keep: bool) -> dict:
    """The result of a run: the one in the folder, or else trained, from where it was interrupted if it was."""
    key = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:8]
    home, training = folder / f"{about['recipe']}-{key}", Training(**about["training"])
    if (home / RESULT).exists():
        return json.loads((home / RESULT).read_text())
    home.mkdir(exist_ok=True)
    bert = Bert(Architecture(**about["architecture"]), corpus.vocabulary, corpus.length, seed=training.seed)
    ordered, told = replace(corpus, sequences=Shuffled(corpus.sequences, training.seed)), 0

    def report(fraction: float, note: str) -> None:
        nonlocal told
        if int(EVALUATIONS * fraction) > told:
            told = int(EVALUATIONS * fraction)
            print(f"{name}, seed {training.seed}: {min(fraction, 1):.0%} of the budget, {note}", file=sys.stderr)

    try:
        spent = Pretraining(bert, training, ordered, here, home).run(report)
    except InputError as error:
        raise InputError(f"{name}, seed {training.seed}: {error}") from error
    result = about | {"tokens": spent.tokens, "seconds": spent.seconds, "evaluations": spent.evaluations}
    result["heldout"] = measured(bert, corpus, here)
    (home / HALF).write_text(json.dumps(result, indent=2) + "\n")
    (home / HALF).replace(home / RESULT)
    if not keep:
        (home / CHECKPOINT).unlink()
    return result


def run_all(given: argparse.Namespace) -> dict:
    """Train what is not trained yet; the comparison, with all that led to it."""
    names = {name or recipe: recipe for name, _, recipe in (text.rpartition("=") for text in given.recipe)}
    if len(names) < len(given.recipe):
        raise InputError(f"Of {', '.join(given.recipe)} two have the same name; write NAME=RECIPE to tell them apart.")
    unit = next(unit for unit in UNITS if getattr(given, unit) is not None)
    common = {"budget": getattr(given, unit), "budget_unit": unit}
    changed = changes(given.set, list(names))
    chosen = {name: settings(recipe, common | changed[name]) for name, recipe in names.items()}
    entries, here = given.vocabulary, machine.detect()
    corpus = synthetic(entries or ENTRIES) if given.synthetic else read(given.data, entries)
    where = {"data": identity(corpus), "machine": here.describe(), "torch": torch.__version__}
    results: dict[str, list[dict]] = {name: [] for name in names}
    for seed in range(given.seeds):  # and the recipes within, in case the machine changes its speed
        for name, recipe in names.items():
            architecture, training = chosen[name]
            training = training.model_copy(update={"seed": seed})
            about = {"recipe": recipe, "architecture": architecture.model_dump(), "training": training.model_dump()}
            results[name].append(train(name, about | where, corpus, here, given.folder, given.keep))
    found = {"recipes": curves.compare(results), "ends": curves.ends(results, corpus.heldout)}
    return {**common, **where, "seeds": given.seeds, **found}


def main() -> None:
    """Train what is not trained yet, print the comparison, write comparison.json and comparison.png."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--recipe", nargs="+", action="extend", required=True, help="RECIPE, or NAME=RECIPE to call it otherwise"
    )
    parser.add_argument(
        "--set", nargs="+", action="extend", default=[], metavar="NAME.FIELD=VALUE", help="change a field of pretrain"
    )
    data = parser.add_mutually_exclusive_group(required=True)
    data.add_argument("--data", type=Path, help="a folder of the tokenize stage")
    data.add_argument("--synthetic", action="store_true", help="made up, to try this out")
    parser.add_argument("--vocabulary", type=positive, help="entries, where no stage.json says it")
    budget = parser.add_mutually_exclusive_group(required=True)
    for unit in UNITS:
        budget.add_argument(f"--{unit}", type=float, help="the budget of each run")
    parser.add_argument("--seeds", type=positive, default=3, help="how many")
    parser.add_argument("--threads", type=positive, help="of the CPU; else torch's choice")
    parser.add_argument("--folder", type=Path, required=True, help="for the results")
    parser.add_argument("--keep", action="store_true", help="keep checkpoints, for score.py")
    given = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if given.threads:
        torch.set_num_threads(given.threads)
    given.folder.mkdir(parents=True, exist_ok=True)
    try:
        lock = (given.folder / "lock").open("w")  # until the process ends
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        found = run_all(given)
    except BlockingIOError:
        parser.error(f"{given.folder} is in use by another run of this; wait for it, or take another folder.")
    except InputError as error:
        parser.error(str(error))
    (given.folder / "comparison.json").write_text(json.dumps(found, indent=2) + "\n")
    print(curves.table(found))
    print(f"\nOn all held-out text:\n{curves.end_table(found['ends'])}")
    try:
        curves.picture(found, given.folder / "comparison.png")
    except ImportError:
        print("There is no picture, since matplotlib is not installed.")


if __name__ == "__main__":
    main()
