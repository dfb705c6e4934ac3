"""What is the held-out loss of finished runs of recipes.py, on other held-out text?

    python benchmarks/score.py --folder race --data artifacts/tokenize/latest [--json FILE]

Scores every run below the folder that has a checkpoint.safetensors beside its result.json (recipes.py --keep). The data
may come from another version of the tokenize stage than the runs read, but with the same vocabulary and sequence
length, and its documents must have been held out of the runs' training too. Runs whose settings differ only by the seed
form one column; the others are compared with the first column.
"""

import json
import sys
from pathlib import Path

import common
import curves
from recipes import RESULT, measured, read
from safetensors import SafetensorError, safe_open

from model import InputError, machine
from model.bert import Bert
from model.checkpoint import CHECKPOINT
from model.detection import with_detector
from model.masking import Corpus
from model.settings import Architecture, Training


def runs_below(folder: Path) -> dict[str, list[Path]]:
    """The folders of kept runs by recipe, in the order of seeds; runs with other settings are recipes of their own."""
    homes_of: dict[str, list[tuple[int, Path]]] = {}
    for result in sorted(folder.rglob(RESULT)):
        if (result.parent / CHECKPOINT).exists():
            about = json.loads(result.read_text())
            settings = [about["recipe"], about["architecture"], about["training"] | {"seed": None}]
            homes_of.setdefault(json.dumps(settings), []).append((about["training"]["seed"], result.parent))
    if not homes_of:
        raise InputError(f"There is no {RESULT} with a {CHECKPOINT} below {folder}. recipes.py keeps them with --keep.")
    names = [json.loads(settings)[0] for settings in homes_of]
    return {
        name if names.count(name) == 1 else f"{name} ({homes[0][1].name})": [home for _, home in sorted(homes)]
        for name, homes in zip(names, homes_of.values(), strict=True)
    }


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


def score(home: Path, corpus: Corpus, here: machine.Machine) -> dict:
    """The result of a run with the held-out loss of its last checkpoint."""
    bert = load(home, corpus).to(here.device)
    return json.loads((home / RESULT).read_text()) | {"heldout": measured(bert, corpus, here)}


def main() -> None:
    """Score all runs, print the table, and write it to the --json file."""
    parser = common.parser(
        __doc__,
        folder={"type": Path, "required": True, "help": "with kept runs, at any depth"},
        data={"type": Path, "required": True, "help": "a folder of the tokenize stage"},
        json=common.JSON_OPTION,
    )
    given = parser.parse_args()
    results: dict[str, list[dict]] = {}
    with common.input_errors(parser):
        corpus, here = read(given.data), machine.detect()
        for name, homes in runs_below(given.folder).items():
            for home in homes:
                result = score(home, corpus, here)
                results.setdefault(name, []).append(result)
                losses = [f"{result['heldout'][f'nats_per_{unit}']['value']:.4f} per {unit}" for unit in curves.UNITS]
                print(f"{name}, seed {result['training']['seed']}: {', '.join(losses)}", file=sys.stderr)
    ends = curves.ends(results, corpus.heldout)
    sizes = {unit: n for unit, n in next(iter(results.values()))[0]["heldout"].items() if isinstance(n, int)}
    counts = ", ".join(f"{count:,} {unit}" for unit, count in sizes.items())
    print(f"{counts}; mean ± sample standard deviation over runs")
    print(curves.end_table(ends))
    common.write_json(given.json, sizes | {"ends": ends, "runs": results})


if __name__ == "__main__":
    main()
