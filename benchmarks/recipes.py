"""Which recipe reaches a lower held-out loss with the same budget, on the same text?

    python benchmarks/recipes.py --recipe pocket pocket-modern --tokens 1e7 --data TOKENIZE_DIR --folder race
    python benchmarks/recipes.py --recipe pocket b=pocket --set b.learning_rate=0.008 --hours 0.1 --data … --folder race

Needs torch, numpy, safetensors and pydantic; a picture needs matplotlib too. The data is what the tokenize stage
writes, such as artifacts/tokenize/latest; --data NAME=DIR gives a recipe another vocabulary's, with the same held-out
documents. A seed decides initialisation, masks, dropout and the order of the sequences, so recipes with the same data
read the same in the same order.

The first recipe is the baseline: the table says at which fraction of its tokens, operations and seconds each recipe
passes its final held-out loss of the same seed, in nats per byte. Seconds compare only on a quiet machine;
--cpu-seconds compares on any. With --set NAME.budget=… another recipe has less (or more) to spend, and its schedule
ends there. Losses are measured at tenths of a run's own budget, or at the first step after, on a part of the held-out
tokens, with straight lines between them. At the end all held-out tokens are measured, and the difference to the first
recipe is given with its standard error over documents. --beside adds the results of outside.py with the same budget.

Results are kept in the folder. A run of the same settings, data, device and threads (OMP_NUM_THREADS) is not repeated,
and an interrupted run continues. Changes of the code are not noticed: use another folder. With --keep the model of each
run stays there too.
"""

import argparse
import hashlib
import io
import json
import logging
import lzma
import statistics
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from unittest import mock

import card
import common
import numpy as np
import torch
from common import CpuClock, aligned, cell, positive, spread

from model import export, heldout, machine
from model.bert import Bert
from model.checkpoint import CHECKPOINT, METRICS
from model.clock import Clock
from model.errors import InputError
from model.heldout import UNITS, Heldout
from model.masking import Corpus
from model.pretraining import EVALUATIONS, Pretraining
from model.settings import SPECIALS, Architecture, Training

ROWS = 512  # sequences that enter the digest of the data
RESULT = "result.json"
SPENT = ("tokens", "seconds", "compile_seconds", "evaluations")  # of a run's progress
RATE = "tokens_per_second"  # the median of all steps
MEASURED = {"seed", "heldout", "card", RATE, *SPENT}  # what differs between the seeds of a setting
FIXED = ("architecture", "budget_unit", "seed")  # what `--set` can't change
BUDGETS = ("tokens", "hours", "epochs", "flops", "cpu_seconds")
TENTHS = [number / EVALUATIONS for number in range(EVALUATIONS + 1)]
AXES = ("tokens", "operations", "seconds")


def read(folder: Path) -> Corpus:
    """What the tokenize stage has written, or `gpu.py pack`. Raises InputError where something is missing."""
    try:
        files = packed(folder)
        if files:
            sequences = np.concatenate([np.load(io.BytesIO(lzma.decompress(path.read_bytes()))) for path in files])
        else:
            sequences = np.load(folder / "sequences.npy", mmap_mode="r")
        held = Heldout.load(folder).without(SPECIALS.unk)
        stats = json.loads((folder / "stage.json").read_text(encoding="utf-8"))["stats"]
        if held.sequences.max() >= stats["entries"] or len(sequences) != stats["sequences"]:
            found = f"{len(sequences)} sequences, token {held.sequences.max()}"
            raise ValueError(f"{found}; expected {stats['sequences']} sequences, {stats['entries']} entries")
    except Exception as error:  # of compressed files and the arrays in them, too
        raise InputError(
            f"{folder} is not what the tokenize stage writes ({error}). Give such a folder, made by this version."
        ) from error
    return Corpus(sequences, held, stats["entries"])


def packed(folder: Path) -> list[Path]:
    """The files with the text that `gpu.py pack` has written, in their order."""
    return sorted(folder.glob("**/sequences-*.npy.xz"), key=lambda path: path.name)


def identity(corpus: Corpus) -> str:
    """A digest of the data: of its size, of rows spread over it, and of the held-out text."""
    rows = corpus.sequences[:: max(1, len(corpus.sequences) // ROWS)]
    size = f"{corpus.sequences.shape} {corpus.vocabulary}".encode()
    held = corpus.heldout.sequences.tobytes() + corpus.heldout.documents.tobytes()
    return hashlib.sha256(size + rows.tobytes() + held).hexdigest()


def corpora(texts: list[str], names: list[str]) -> dict[str, Corpus]:
    """The data of each recipe, from DIR for all, NAME=DIR for one. Raises InputError if held-out documents differ."""
    given = {name: folder for name, _, folder in (text.rpartition("=") for text in texts)}
    unknown = sorted(given.keys() - {"", *names})
    if unknown:
        raise InputError(f"--data names {', '.join(unknown)}, which is no recipe here: {', '.join(names)}.")
    missing = [name for name in names if name not in given and "" not in given]
    if missing:
        raise InputError(f"There is no data for {', '.join(missing)}. Add --data DIR.")
    folders = {folder: read(Path(folder)) for folder in set(given.values())}
    chosen = {name: folders[given.get(name, given.get(""))] for name in names}
    sizes = [corpus.heldout.documents[:, 1:4] for corpus in chosen.values()]  # the same for every vocabulary
    if not all(np.array_equal(sizes[0], other) for other in sizes):
        raise InputError("The folders of --data hold out different documents. Tokenize the same corpus.")
    return chosen


def measured(bert: torch.nn.Module, held: Heldout, mask_id: int, here: machine.Machine) -> dict:
    """The held-out loss, and the nats of each document."""
    nats_D, _ = heldout.document_losses(bert, held, mask_id, here)
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


def train(name: str, about: dict, corpus: Corpus, here: machine.Machine, folder: Path, keep: bool) -> dict:
    """The result of a run: from the folder, or else trained, from its checkpoint if it was interrupted."""
    home = folder / f"{about['recipe']}-{common.digest(about)}"
    training = Training(**about["training"])
    if (home / RESULT).exists():
        return json.loads((home / RESULT).read_text(encoding="utf-8"))
    home.mkdir(exist_ok=True)
    bert = Bert(Architecture(**about["architecture"]), corpus.vocabulary, corpus.length, seed=training.seed)
    order = np.random.default_rng(training.seed).permutation(len(corpus.sequences))
    shuffled = replace(corpus, sequences=corpus.sequences[order])
    tenth = 0

    def report(fraction: float, note: str) -> None:
        nonlocal tenth
        if int(EVALUATIONS * fraction) > tenth:
            tenth = int(EVALUATIONS * fraction)
            print(f"{name}, seed {training.seed}: {min(fraction, 1):.0%} of the budget, {note}", file=sys.stderr)

    try:
        with card.watched() as seen:
            spent = Pretraining(bert, training, shuffled, here, home).run(report)
    except InputError as error:
        raise InputError(f"{name}, seed {training.seed}: {error}") from error
    if keep:
        export.save(bert, home)
    result = about | {name: getattr(spent, name) for name in SPENT} | {RATE: median_rate(home), "card": seen}
    result["heldout"] = measured(bert, corpus.heldout, SPECIALS.mask, here)
    common.write_json(home / RESULT, result)
    (home / CHECKPOINT).unlink()
    return result


def median_rate(home: Path) -> float:
    """The median of a run's steps, tokens per second: neither compiling nor the first steps count."""
    lines = (home / METRICS).read_text(encoding="utf-8").splitlines()
    return statistics.median(json.loads(line)[RATE] for line in lines)


def beside(texts: list[str], first: dict, held: Heldout, seeds: int) -> dict[str, list[dict]]:
    """The results of outside.py in the folders of --beside, by name and seed. `first`: a run that they stand beside.

    Raises InputError unless a folder's results are of one setting, as many as `seeds`, and comparable with ours.
    """
    if texts and first["training"]["budget_unit"] != "hours":
        raise InputError("--beside compares runs of the same time. Give runs of --cpu-seconds or --hours.")
    # as given: the budget is a fraction of an hour
    seconds = round(3600 * first["training"]["budget"], 6)
    results = {}
    expected = {"cpu_seconds": seconds} if "clock" in first else {"minutes": seconds / 60}
    expected["machine"] = first["machine"]
    for name, _, folder in (text.rpartition("=") for text in texts):
        runs = [json.loads(path.read_text(encoding="utf-8")) for path in Path(folder).glob(f"*/{RESULT}")]
        settings = {json.dumps({field: run[field] for field in run.keys() - MEASURED}, sort_keys=True) for run in runs}
        same = all(run["heldout"][size] == held.totals[size] for run in runs for size in ("words", "bytes"))
        same = same and all(run[field] == value for run in runs for field, value in expected.items())
        if len(settings) != 1 or len(runs) != seeds or not same:
            raise InputError(
                f"{folder} has {len(runs)} results of {len(settings)} settings{'' if same else ', not all like ours'}. "
                f"Give a folder of outside.py with {seeds} seeds of one setting, on the same held-out documents, with "
                f"{json.dumps(expected)}."
            )
        results[name or Path(folder).name] = sorted(runs, key=lambda run: run["seed"])
    return results


def per_byte(run: dict) -> list[float]:
    """The held-out losses of a run's evaluations, nats per byte, with whole words masked."""
    return [evaluation["heldout_nats_per_byte"] for evaluation in run["evaluations"]]


def passes(run: dict, loss: float, axis: str) -> float | None:
    """The tokens, operations or seconds at which the held-out loss first is so low, by straight lines; or None."""
    for (before, high), (after, low) in pairwise(zip(run["evaluations"], per_byte(run), strict=True)):
        if low <= loss:
            part = (high - loss) / (high - low) if high > loss else 0.0
            return before[axis] + part * (after[axis] - before[axis])
    return None


def passing(runs: list[dict], first: list[dict], axis: str) -> dict:
    """Where each run passes the end of the first recipe's of the same seed, as a fraction of what that one spent."""
    fractions = []
    for run, other in zip(runs, first, strict=True):
        passed = passes(run, per_byte(other)[-1], axis)
        fractions.append(None if passed is None else passed / other["evaluations"][-1][axis])
    there = [fraction for fraction in fractions if fraction is not None]
    return (spread(there) if there else {}) | {"seeds": len(there), "fractions": fractions}


def compare(results: dict[str, list[dict]], bytes_D: np.ndarray) -> dict[str, dict]:
    """Compare recipes with the first one. `bytes_D`: of the held-out documents.

    For each recipe: the loss at each tenth of its budget (nats per byte), where it passes the first one's last loss,
    by each axis, and what it spent. On all held-out text: nats per word, character and byte, what of the latter is for
    the numbers of pieces, and the difference to the first recipe with its standard error over documents.
    """
    first = next(iter(results.values()))
    compared = {}
    means = {name: np.mean([r["heldout"]["nats_of_documents"] for r in runs], axis=0) for name, runs in results.items()}
    for name, runs in results.items():
        places = [[evaluation["fraction"] for evaluation in run["evaluations"]] for run in runs]
        losses = np.array([np.interp(TENTHS, at, per_byte(run)) for at, run in zip(places, runs, strict=True)])
        held = [run["heldout"] for run in runs]
        compared[name] = {
            "curve": [spread(column) for column in losses.T.tolist()],
            "passes": {axis: passing(runs, first, axis) for axis in AXES},
            **{axis: spread([run["evaluations"][-1][axis] for run in runs]) for axis in AXES},
            **{f"nats_per_{unit}": spread([each[f"nats_per_{unit}"]["value"] for each in held]) for unit in UNITS},
            "length_nats_per_byte": held[0]["length_nats_per_byte"],
            "difference": heldout.ratio(means[name] - next(iter(means.values())), bytes_D),
            "runs": runs,
        }
    return compared


def table(comparison: dict) -> str:
    """The comparison as text, with a column for each recipe."""
    recipes = comparison["recipes"]
    seeds = comparison["seeds"]
    rows = [["nats per byte after", *recipes]]
    for number, tenth in enumerate(TENTHS):
        rows.append([f"{tenth:.0%}", *(cell(one["curve"][number], 4) for one in recipes.values())])
    for axis in AXES:
        rows.append([f"passes the first's end at, of its {axis}"])
        for where in (one["passes"][axis] for one in recipes.values()):
            of = "" if where["seeds"] == seeds else f" ({where['seeds']} of {seeds})"
            rows[-1].append(cell(where, 3) + of if where["seeds"] else "never")
    rows += [[axis, *(cell(one[axis], 0) for one in recipes.values())] for axis in ("tokens", "seconds")]
    for unit in UNITS:
        rows.append([f"nats per {unit} of all", *(cell(one[f"nats_per_{unit}"], 4) for one in recipes.values())])
    lengths = (f"{one['length_nats_per_byte']:.4f}" for one in recipes.values())
    rows.append(["of it for the numbers of pieces, at most", *lengths])
    away = [one["difference"].values() for one in recipes.values()][1:]
    cells = [f"{value:+.4f}" + ("" if error is None else f" ± {error:.4f}") for value, error in away]
    rows.append(["difference per byte, ± over documents", "", *cells])
    about = f"{comparison['budget']:g} {comparison['budget_unit']} on {comparison['machine']['device']}"
    seeds = f"{seeds} seeds: mean ± sample standard deviation" if seeds > 1 else "one seed"
    return "\n".join([f"{about}; {seeds}; straight lines between evaluations", aligned(rows)])


def picture(results: dict[str, list[dict]], path: Path) -> None:
    """Plot the losses of all runs: a line for each recipe, with a dot for each run and a mark at the mean.

    A thin line goes to the left by what the numbers of pieces cost at most: the loss lies on it (model.heldout).
    """
    from matplotlib.figure import Figure  # not pyplot: no display

    figure = Figure(figsize=(10, 0.8 + 0.4 * len(results)))
    panel = figure.subplots()
    for row, runs in enumerate(results.values()):
        losses = [run["heldout"]["nats_per_byte"]["value"] for run in runs]
        panel.plot(losses, [row] * len(losses), "o", color=f"C{row}", alpha=0.6)
        mean = statistics.fmean(losses)
        lengths = runs[0]["heldout"]["length_nats_per_byte"]
        panel.plot([mean], [row], "|", color=f"C{row}", markersize=18)
        panel.plot([mean - lengths, mean], [row, row], color=f"C{row}", linewidth=1)
    panel.set_yticks(range(len(results)), list(results))
    panel.margins(y=0.12)
    panel.invert_yaxis()
    panel.grid(axis="x", alpha=0.3)
    panel.set_xlabel("held-out loss, nats per byte")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def run_all(given: argparse.Namespace) -> tuple[dict, dict[str, list[dict]]]:
    """Train what is not trained yet; the comparison, and all runs by recipe."""
    names = {name or recipe: recipe for name, _, recipe in (text.rpartition("=") for text in given.recipe)}
    if len(names) < len(given.recipe):
        raise InputError(f"Two of {', '.join(given.recipe)} have the same name; write NAME=RECIPE.")
    unit = next(unit for unit in BUDGETS if getattr(given, unit) is not None)
    amount = getattr(given, unit)
    here = machine.detect()
    clock = Clock
    budget = {"budget": amount, "budget_unit": unit}
    where = {"machine": here.describe(), "torch": torch.__version__}
    if unit == "cpu_seconds":
        common.check_cpu(here)
        where = where | {"clock": "CPU seconds"}
        clock = CpuClock
        budget = {"budget": amount / 3600, "budget_unit": "hours"}
    changed = changes(given.set, list(names))
    corpus_of = corpora(given.data, list(names))
    chosen = {name: common.settings(recipe, budget | changed[name]) for name, recipe in names.items()}
    results: dict[str, list[dict]] = {name: [] for name in names}
    for seed in range(given.seeds):  # with the recipes in turn, in case the machine changes its speed
        for name, recipe in names.items():
            architecture, training = chosen[name]
            training = training.model_copy(update={"seed": seed})
            about = {"recipe": recipe, "architecture": architecture.model_dump(), "training": training.model_dump()}
            about |= {"data": identity(corpus_of[name])} | where
            with mock.patch("model.pretraining.Clock", clock):
                results[name].append(train(name, about, corpus_of[name], here, given.folder, given.keep))
    held = next(iter(corpus_of.values())).heldout
    results |= beside(given.beside, next(iter(results.values()))[0], held, given.seeds)
    about = {"budget": amount, "budget_unit": unit, "seeds": given.seeds} | where
    return about | {"recipes": compare(results, held.read_bytes)}, results


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
        keep={"action": "store_true", "help": "keep the models"},
    )
    budget = parser.add_mutually_exclusive_group(required=True)
    for unit in BUDGETS:
        budget.add_argument(f"--{unit.replace('_', '-')}", type=float, help="the budget of each run")
    given = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    given.folder.mkdir(parents=True, exist_ok=True)
    with common.input_errors(parser):
        comparison, results = run_all(given)
    common.write_json(given.folder / "comparison.json", comparison)
    print(table(comparison))
    try:
        picture(results, given.folder / "comparison.png")
    except ImportError:
        print("There is no picture, since matplotlib is not installed.")


if __name__ == "__main__":
    main()
