"""Which recipe reaches a lower held-out loss with the same budget, on the same text?

    python benchmarks/recipes.py --recipe pocket pocket-modern --tokens 1e7 --data TOKENIZE_DIR --folder race
    python benchmarks/recipes.py --recipe pocket b=pocket --set b.learning_rate=0.008 --hours 0.1 --data … --folder race

Needs torch, numpy, safetensors and pydantic; a picture needs matplotlib too. The data is what the tokenize stage
writes, such as artifacts/tokenize/latest; --data NAME=DIR gives a recipe another vocabulary's, with the same held-out
documents. A seed decides initialisation, masks, dropout and the order of the sequences, so recipes with the same data
read the same in the same order.

The first recipe is the baseline: the table says at which fraction of its tokens, operations and seconds each recipe
passes its final held-out loss of the same seed, in nats per byte. Seconds compare only on a quiet machine. With --set
NAME.budget=… another recipe has less (or more) to spend, and its schedule ends there. Losses are measured at tenths of
a run's own budget, or at the first step after, on a part of the held-out tokens, with straight lines between them. At
the end all held-out tokens are measured, and the difference to the first recipe is given with its standard error over
documents.

Results are kept in the folder. A run of the same settings, data, device and threads (OMP_NUM_THREADS) is not repeated,
and an interrupted run continues. Changes of the code are not noticed: use another folder. With --keep the last
checkpoint of each run stays there too, so that score.py can measure it again on other held-out text.
"""

import argparse
import fcntl
import hashlib
import json
import logging
import sys
from dataclasses import replace
from pathlib import Path
from unittest import mock

import common
import curves
import numpy as np
import torch
from common import CpuClock, positive
from loops import MASK_ID, SPECIALS

from model import InputError, heldout, machine
from model.bert import Bert
from model.checkpoint import CHECKPOINT
from model.clock import Clock
from model.heldout import Heldout
from model.masking import Corpus
from model.pretraining import EVALUATIONS, Pretraining
from model.settings import Architecture, Training

ROWS = 512  # sequences that enter the digest of the data
RESULT = "result.json"
MEASURED = {"seed", "tokens", "seconds", "evaluations", "heldout"}  # what differs between the seeds of a setting
FIXED = ("architecture", "budget_unit", "seed")  # what `--set` can't change
UNITS = ("tokens", "hours", "flops", "cpu_seconds")


class Shuffled:
    """Sequences read in a random order."""

    def __init__(self, sequences: np.ndarray, seed: int) -> None:
        self.sequences, self.shape = sequences, sequences.shape
        self.order = np.random.default_rng(seed).permutation(len(sequences))

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, rows: np.ndarray) -> np.ndarray:
        return self.sequences[self.order[rows]]


def read(folder: Path) -> Corpus:
    """What the tokenize stage has written. Raises InputError where something is missing."""
    try:
        sequences = np.load(folder / "sequences.npy", mmap_mode="r")
        held = Heldout.load(folder)
        entries = json.loads((folder / "stage.json").read_text())["stats"]["entries"]
        if held.sequences.max() >= entries:
            raise ValueError(f"token {held.sequences.max()} of {entries} entries")
    except (OSError, KeyError, ValueError) as error:
        raise InputError(
            f"{folder} is not what the tokenize stage writes ({error}). Give such a folder, made by this version."
        ) from error
    return Corpus(sequences, held, entries, MASK_ID, SPECIALS)


def identity(corpus: Corpus) -> str:
    """A digest of the data: of its size, of rows spread over it, and of the held-out text."""
    rows = corpus.sequences[:: max(1, len(corpus.sequences) // ROWS)]
    size = f"{corpus.sequences.shape} {corpus.vocabulary}".encode()
    held = corpus.heldout.sequences.tobytes() + corpus.heldout.documents.tobytes()
    return hashlib.sha256(size + rows.tobytes() + held).hexdigest()


def sizes_of(corpus: Corpus) -> np.ndarray:
    """(d, 3): words, characters and bytes of each held-out document, whatever the vocabulary."""
    return corpus.heldout.documents[:, 1:4]


def corpora(texts: list[str], names: list[str]) -> dict[str, Corpus]:
    """The data of each recipe, from DIR for all and NAME=DIR for one. Raises InputError if held-out documents differ."""
    given = {name: folder for name, _, folder in (text.rpartition("=") for text in texts)}
    if len(given) < len(texts):
        raise InputError(f"--data names one recipe twice: {', '.join(texts)}. Give each one folder.")
    if unknown := sorted(given.keys() - {"", *names}):
        raise InputError(f"--data names {', '.join(unknown)}, which is no recipe here: {', '.join(names)}.")
    if missing := [name for name in names if name not in given and "" not in given]:
        raise InputError(f"There is no data for {', '.join(missing)}. Add --data DIR.")
    folders = {folder: read(Path(folder)) for folder in set(given.values())}
    chosen = {name: folders[given.get(name, given.get(""))] for name in names}
    sizes = [sizes_of(corpus) for corpus in chosen.values()]
    if not all(np.array_equal(sizes[0], other) for other in sizes):
        raise InputError("The folders of --data hold out different documents. Tokenize the same corpus.")
    return chosen


def measured(bert: Bert, corpus: Corpus, here: machine.Machine, every: int = 1) -> dict:
    """The held-out loss and the nats of each document; of each `every`-th part, as if all words had their mean."""
    held = corpus.heldout
    nats_D, predicted_D = heldout.measure(bert, held, corpus.mask_id, here, every=every)
    nats_D *= (held.lengths > 0).sum() / predicted_D.sum()
    return heldout.summary(held, nats_D) | {"nats_of_documents": nats_D.tolist()}


def changes(texts: list[str], names: list[str]) -> dict[str, dict]:
    """The fields that `--set` changes, by the name of the recipe."""
    changed: dict[str, dict] = {name: {} for name in names}
    for text in texts:
        field, equals, value = text.partition("=")
        name, *above, last = field.split(".")
        if not equals or name not in changed or above not in ([], ["architecture"]) or last in FIXED:
            raise InputError(
                f"--set {text}: expected NAME.FIELD=VALUE with a name of {', '.join(names)} and a field of pretrain, "
                f"or of its architecture as architecture.FIELD, except {', '.join(FIXED)}."
            )
        place = changed[name].setdefault("architecture", {}) if above else changed[name]
        try:
            place[last] = json.loads(value)
        except json.JSONDecodeError:
            place[last] = value
    return changed


def home_of(folder: Path, about: dict) -> Path:
    """The folder of a run, named by its recipe and a digest of all that identifies it."""
    return folder / f"{about['recipe']}-{common.digest(about)}"


def train(name: str, about: dict, corpus: Corpus, here: machine.Machine, folder: Path, keep: bool) -> dict:
    """The result of a run: from the folder, or else trained, from its checkpoint if it was interrupted."""
    home, training = home_of(folder, about), Training(**about["training"])
    if (home / RESULT).exists():
        return json.loads((home / RESULT).read_text())
    home.mkdir(exist_ok=True)
    bert = Bert(Architecture(**about["architecture"]), corpus.vocabulary, corpus.length, seed=training.seed)
    ordered, tenth = replace(corpus, sequences=Shuffled(corpus.sequences, training.seed)), 0

    def report(fraction: float, note: str) -> None:
        nonlocal tenth
        if int(EVALUATIONS * fraction) > tenth:
            tenth = int(EVALUATIONS * fraction)
            print(f"{name}, seed {training.seed}: {min(fraction, 1):.0%} of the budget, {note}", file=sys.stderr)

    try:
        spent = Pretraining(bert, training, ordered, here, home).run(report)
    except InputError as error:
        raise InputError(f"{name}, seed {training.seed}: {error}") from error
    result = about | {"tokens": spent.tokens, "seconds": spent.seconds, "evaluations": spent.evaluations}
    result["heldout"] = measured(bert, corpus, here)
    common.write_whole(home / RESULT, json.dumps(result, indent=2) + "\n")
    if not keep:
        (home / CHECKPOINT).unlink()
    return result


def others(folder: Path, held: Heldout, expected: dict, seeds: int | None = None) -> list[dict]:
    """The results of outside.py in a folder, by seed. Raises InputError unless they are of one setting, on this text.

    `expected`: their machine and budget (cpu_seconds or minutes). `seeds`: how many there must be; None: at least one.
    """
    runs = [json.loads(path.read_text()) for path in folder.glob(f"*/{RESULT}")]
    settings = {json.dumps({name: run[name] for name in run.keys() - MEASURED}, sort_keys=True) for run in runs}
    same = all(run["heldout"][name] == held.totals[name] for run in runs for name in ("words", "characters", "bytes"))
    for name, value in expected.items():
        if wrong := [run[name] for run in runs if run[name] != value]:
            raise InputError(f"{folder} has results with {name} {wrong[0]}; the others have {value}. Make them alike.")
    if len(settings) != 1 or (seeds and len(runs) != seeds) or not same:
        raise InputError(
            f"{folder} has {len(runs)} results of {len(settings)} settings{'' if same else ', on other text'}. Give a "
            f"folder of outside.py with {seeds or 'the'} seeds of one setting, on the same held-out documents."
        )
    return sorted(runs, key=lambda run: run["seed"])


def beside(texts: list[str], first: dict, held: Heldout, seeds: int | None = None) -> dict[str, list[dict]]:
    """The results of outside.py in the folders of --beside, by name. `first`: a run that they stand beside."""
    if not texts:
        return {}
    if first["training"]["budget_unit"] != "hours":
        raise InputError("--beside compares runs of the same time. Give runs of --cpu-seconds or --hours.")
    seconds = round(3600 * first["training"]["budget"], 6)  # as given: the budget is a fraction of an hour
    expected = {"cpu_seconds": seconds} if "clock" in first else {"minutes": seconds / 60}
    expected["machine"] = first["machine"]
    folders = {name or Path(folder).name: Path(folder) for name, _, folder in (text.rpartition("=") for text in texts)}
    return {name: others(folder, held, expected, seeds) for name, folder in folders.items()}


def run_all(given: argparse.Namespace) -> dict:
    """Train what is not trained yet; the comparison, with all runs."""
    names = {name or recipe: recipe for name, _, recipe in (text.rpartition("=") for text in given.recipe)}
    if len(names) < len(given.recipe):
        raise InputError(f"Two of {', '.join(given.recipe)} have the same name; write NAME=RECIPE.")
    unit = next(unit for unit in UNITS if getattr(given, unit) is not None)
    budget, here = {"budget": getattr(given, unit), "budget_unit": unit}, machine.detect()
    where, clock = {"machine": here.describe(), "torch": torch.__version__}, Clock
    if unit == "cpu_seconds":
        common.check_cpu(here)
        where, clock = where | {"clock": "CPU seconds"}, CpuClock
        budget = {"budget": given.cpu_seconds / 3600, "budget_unit": "hours"}
    changed = changes(given.set, list(names))
    chosen = {name: common.settings(recipe, budget | changed[name]) for name, recipe in names.items()}
    corpus_of = corpora(given.data, list(names))
    results: dict[str, list[dict]] = {name: [] for name in names}
    for seed in range(given.seeds):  # with the recipes in turn, in case the machine changes its speed
        for name, recipe in names.items():
            architecture, training = chosen[name]
            training = training.model_copy(update={"seed": seed})
            about = {"recipe": recipe, "architecture": architecture.identity(), "training": training.model_dump()}
            corpus = corpus_of[name]
            about |= {"data": identity(corpus)} | where
            with mock.patch("model.pretraining.Clock", clock):
                results[name].append(train(name, about, corpus, here, given.folder, given.keep))
    results |= beside(given.beside, next(iter(results.values()))[0], corpus.heldout, given.seeds)
    comparison = {"recipes": curves.compare(results), "ends": curves.ends(results, corpus.heldout)}
    return {"budget": getattr(given, unit), "budget_unit": unit} | where | {"seeds": given.seeds} | comparison


def main() -> None:
    """Train what is not trained yet, print the comparison, write comparison.json and comparison.png."""
    several = {"nargs": "+", "action": "extend"}
    parser = common.parser(
        __doc__,
        recipe={**several, "required": True, "help": "RECIPE, or NAME=RECIPE to give it another name"},
        set={**several, "default": [], "metavar": "NAME.FIELD=VALUE", "help": "change a field of pretrain"},
        data={**several, "required": True, "metavar": "[NAME=]DIR", "help": "folders of the tokenize stage"},
        beside={**several, "default": [], "metavar": "[NAME=]DIR", "help": "folders of outside.py, for the table"},
        seeds={"type": positive, "default": 3, "help": "the number of runs of each"},
        folder={"type": Path, "required": True, "help": "for the results"},
        keep={"action": "store_true", "help": "keep checkpoints, for score.py"},
    )
    budget = parser.add_mutually_exclusive_group(required=True)
    for unit in UNITS:
        budget.add_argument(f"--{unit.replace('_', '-')}", type=float, help="the budget of each run")
    given = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    given.folder.mkdir(parents=True, exist_ok=True)
    with common.input_errors(parser), (given.folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            parser.error(f"{given.folder} is in use by another comparison. Wait for it, or use another folder.")
        comparison = run_all(given)
    common.write_json(given.folder / "comparison.json", comparison)
    print(curves.table(comparison))
    print(f"\nOn all held-out text:\n{curves.end_table(comparison['ends'])}")
    try:
        curves.picture(comparison, given.folder / "comparison.png")
    except ImportError:
        print("There is no picture, since matplotlib is not installed.")


if __name__ == "__main__":
    main()
