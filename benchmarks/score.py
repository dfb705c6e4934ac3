"""Measure the held-out loss of finished runs of recipes.py again: of all tokens of the documents that tokenize chose.

    python benchmarks/score.py --folder race --data artifacts/tokenize/latest [--json FILE]

Scores every run below the folder that has its checkpoint.safetensors beside its result.json (recipes.py --keep); the result says
which recipe it is and what its settings are. The data may be made by another version of the tokenize stage than the runs read,
but with the same vocabulary and length of sequences, and the documents must have been held out of their training too. Runs
whose settings differ by the seed alone are one column; the first column is the one that others are compared with.
"""

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import curves
import torch
from recipes import RESULT, measured, read
from safetensors import SafetensorError, safe_open
from train import positive

from model import InputError, machine
from model.bert import Bert
from model.checkpoint import CHECKPOINT
from model.masking import Corpus
from model.settings import Architecture


def runs_below(folder: Path) -> dict[str, list[Path]]:
    """The folders of kept runs by recipe, in the order of seeds; other settings are recipes of their own."""
    found: dict[str, list[tuple[int, Path]]] = {}
    for result in sorted(folder.rglob(RESULT)):
        if (result.parent / CHECKPOINT).exists():
            about = json.loads(result.read_text())
            settings = [about["recipe"], about["architecture"], about["training"] | {"seed": None}]
            found.setdefault(json.dumps(settings), []).append((about["training"]["seed"], result.parent))
    if not found:
        raise InputError(
            f"No {RESULT} with a {CHECKPOINT} beside it lies below {folder}. recipes.py keeps them with --keep."
        )
    names = [json.loads(settings)[0] for settings in found]
    return {
        name if names.count(name) == 1 else f"{name} ({homes[0][1].name})": [home for _, home in sorted(homes)]
        for name, homes in zip(names, found.values(), strict=True)
    }


def score(home: Path, corpus: Corpus, here: machine.Machine) -> dict:
    """The result of a run, with the held-out loss of its last checkpoint. Raises InputError where they don't go together."""
    about = json.loads((home / RESULT).read_text())
    bert = Bert(Architecture(**about["architecture"]), corpus.vocabulary, corpus.length)
    try:
        with safe_open(home / CHECKPOINT, "pt") as file:
            names = [name for name in file.keys() if name.startswith("model.")]  # noqa: SIM118, not a dict
            bert.load_state_dict({name.removeprefix("model."): file.get_tensor(name) for name in names})
    except (OSError, SafetensorError, RuntimeError) as error:
        raise InputError(
            f"{home / CHECKPOINT} is no model of {corpus.vocabulary:,} entries and {corpus.length} tokens, as the data is "
            f"({' '.join(str(error).split())})."
        ) from error
    return about | {"heldout": measured(bert.to(here.device), corpus, here)}


def main() -> None:
    """Score all runs, print the table, and write it as JSON if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="with kept runs, at any depth")
    parser.add_argument("--data", type=Path, required=True, help="a folder of the tokenize stage")
    parser.add_argument("--vocabulary", type=positive, help="entries, where no stage.json says it")
    parser.add_argument("--threads", type=positive, help="of the CPU; else torch's choice")
    parser.add_argument("--json", type=Path, help="where to write all numbers")
    given = parser.parse_args()
    if given.threads:
        torch.set_num_threads(given.threads)
    try:
        corpus, here, results = read(given.data, given.vocabulary), machine.detect(), {}
        for name, homes in runs_below(given.folder).items():
            for home in homes:
                results.setdefault(name, []).append(score(home, corpus, here))
                one = results[name][-1]
                loss = ", ".join(
                    f"{one['heldout'][f'nats_per_{unit}']['value']:.4f} per {unit}" for unit in curves.UNITS
                )
                print(f"{name}, seed {one['training']['seed']}: {loss}", file=sys.stderr)
    except InputError as error:
        parser.error(str(error))
    found = curves.ends(results, corpus.heldout)
    about = {unit: one for unit, one in next(iter(results.values()))[0]["heldout"].items() if isinstance(one, int)}
    print(
        f"{', '.join(f'{count:,} {unit}' for unit, count in about.items())}; mean ± sample standard deviation over runs"
    )
    print(curves.end_table(found))
    if given.json:
        given.json.write_text(json.dumps(about | {"ends": found, "runs": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
