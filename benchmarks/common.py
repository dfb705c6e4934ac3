"""What the benchmarks share: the command line, recipes' settings, turns, tables and JSON files."""

import argparse
import hashlib
import importlib.util
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # cram of this checkout
from model.errors import InputError  # before torch, as it sets how torch's threads wait

# isort: split
import card
import torch
from pydantic import ValidationError

from flows.recipes.deltas import DELTAS
from model import machine
from model.clock import Clock
from model.settings import Architecture, Training

ENTRIES = 32_768  # of recipes that name none
LENGTH = 128  # of these too
SIZES = ("layers", "hidden", "heads", "intermediate")


class CpuClock(Clock):
    """Counts CPU seconds, of this process and of the compilers that it started: other programs don't shorten them."""

    beats = False  # a stopped process takes no CPU time

    @staticmethod
    def now() -> float:
        """The CPU time until now, in seconds."""
        return time.process_time() + sum(os.times()[2:4])  # of children only in ticks of 10 ms


def check_cpu(here: machine.Machine) -> None:
    """Raise InputError on a GPU, whose work takes no CPU time."""
    if here.device.type != "cpu":
        raise InputError("--cpu-seconds counts the work of CPUs. Give another budget, or set CRAM_DEVICE=cpu.")


def parser(about: str, **options: dict) -> argparse.ArgumentParser:
    """A command line with these options, described by the script's docstring."""
    made = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, settings in options.items():
        made.add_argument(f"--{name.replace('_', '-')}", **settings)
    return made


def positive(text: str) -> int:
    """A whole number above 0."""
    value = int(text)
    if value < 1:
        raise ValueError
    return value


def new_file(text: str) -> Path:
    """The path of a file to be written, from an option: in a folder that exists, since the numbers come at the end."""
    path = Path(text)
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {path.parent}; create it")
    return path


SIZE_OPTIONS = {name: {"type": positive, "help": "instead of the recipe's"} for name in (*SIZES, "vocabulary")}
JSON_OPTION = {"type": new_file, "help": "where to write all numbers as JSON"}


def measure_with(script: Callable[[], None], *options: object) -> None:
    """Run the `main` of another script with these options."""
    sys.argv = [script.__module__, *map(str, options)]
    script()


@contextmanager
def input_errors(commands: argparse.ArgumentParser) -> Iterator[None]:
    """Print an InputError as an error of the command line."""
    try:
        yield
    except InputError as error:
        commands.error(str(error))


def installed(*packages: str) -> bool:
    """Whether the peers' packages are installed; prints those that are missing."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        print(f"No peers are measured: {', '.join(missing)} not installed.")
    return not missing


def digest(values: object) -> str:
    """Short, of values as JSON: for the names of files."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:10]


def settings(recipe: str, changes: dict) -> tuple[Architecture, Training]:
    """What a recipe pretrains, with other values for some fields. Raises InputError for impossible ones."""
    if recipe not in DELTAS:
        raise InputError(f"There is no recipe {recipe!r}. Recipes: {', '.join(DELTAS)}.")
    fields = DELTAS[recipe].get("pretrain", {})
    architecture = fields.get("architecture", {}) | changes.get("architecture", {})
    training = {name: value for name, value in (fields | changes).items() if name != "architecture"}
    try:
        return Architecture(**architecture), Training(**training)
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(map(str, (recipe, *problem["loc"])))
        message = problem["msg"].removeprefix("Value error, ")
        value = f" (found {problem['input']!r})" if problem["loc"] else ""
        raise InputError(f"{where}: {message}{value}.") from error


def sizes_given(given: argparse.Namespace) -> dict:
    """The architecture's fields that the command line names."""
    return {name: getattr(given, name) for name in SIZES if getattr(given, name)}


def entries(recipe: str, given: argparse.Namespace) -> int:
    """The size of the vocabulary."""
    return given.vocabulary or DELTAS[recipe].get("vocabulary", {}).get("entries", ENTRIES)


def take_turns(cases: dict[str, Any], rounds: int, measure: Callable[[Any], dict], rate: str) -> list[list[dict]]:
    """Measure all cases in turn, several times, so that a change of the machine's speed affects all."""
    turns: dict[str, list[dict]] = {name: [] for name in cases}
    for _ in range(rounds):
        for name, case in cases.items():
            turns[name].append(measure(case))
            print(f"{name}: {turns[name][-1][rate]:,.1f} {rate.replace('_', ' ')}", file=sys.stderr)
    return list(turns.values())


def medians(turns: list[dict], first: list[dict], rate: str, fields: tuple[str, ...]) -> dict:
    """Medians over the turns, and of the rate relative to the first case's in the same round."""
    relative = [turn[rate] / other[rate] for turn, other in zip(turns, first, strict=True)]
    middle = {name: statistics.median(turn[name] for turn in turns) for name in (rate, *fields)}
    return middle | {"relative": statistics.median(relative), "turns": turns}


def spread(values: list[float]) -> dict:
    """Mean and sample standard deviation (None for a single value)."""
    return {"mean": statistics.fmean(values), "deviation": statistics.stdev(values) if len(values) > 1 else None}


def cell(value: dict, digits: int) -> str:
    """A mean, with its deviation if there is one."""
    deviation = "" if value["deviation"] is None else f" ± {value['deviation']:.{digits}f}"
    return f"{value['mean']:,.{digits}f}{deviation}"


def about(here: machine.Machine) -> dict:
    """The machine: device, dtype and torch."""
    return here.describe() | {"torch": torch.__version__}


def aligned(rows: list[list[str]]) -> str:
    """A table as text: the first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(f"{text:{'>' if i else '<'}{width}}" for i, (text, width) in enumerate(zip(row, widths, strict=True)))
        for row in rows
    )


def write_json(path: Path | None, content: dict) -> None:
    """Write the numbers if a file is given; it is complete or not there, since a result is not made again."""
    if path:
        half = path.with_name(f"{path.name}.half")
        half.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        half.replace(path)


def keep(folder: Path, part: str, about: dict, make: Callable[[], dict]) -> dict:
    """The row of a case: from the folder, or made, and written there with its seconds and the card's numbers.

    A failure is its `problem`, and is tried again the next time. The row is printed.
    """
    path = folder / f"{part}-{digest(about)}.json"
    if not path.exists() or "problem" in read_json(path):
        began = time.perf_counter()
        with card.watched() as seen:
            try:
                row = make()
            except RuntimeError as error:  # of the compiler, or a full GPU
                row = {"right": False, "problem": f"{type(error).__name__}: {error}".splitlines()[0]}
        write_json(path, about | row | {"took_seconds": time.perf_counter() - began} | seen)
    row = read_json(path)
    print(", ".join(f"{name} {shown(value)}" for name, value in row.items() if value is not None), flush=True)
    return row


def shown(value: object) -> str:
    """A number with four digits, or whatever else."""
    if isinstance(value, dict):
        return "(" + ", ".join(f"{name} {shown(inner)}" for name, inner in value.items()) + ")"
    return f"{value:,.4g}" if isinstance(value, float) else str(value)


def read_json(path: Path) -> Any:
    """What a file says."""
    return json.loads(path.read_text(encoding="utf-8"))
