"""Carry what pretraining and finetuning need to a machine without a network, in compressed files of some 25 MB.

    python benchmarks/carry.py pack --data artifacts/tokenize/latest --tokens 6.5e7 --glue GLUE_DIR --folder carried
    python benchmarks/carry.py unpack --folder carried --data data

`pack` takes sequences spread evenly over those of a tokenize stage, its held-out text and, with --glue, the encoded
examples of GLUE tasks. It needs cram's packages. `unpack` needs what gpu.py needs. Until all files are there it names
those that are missing; then it writes a folder that recipes.py and gpu.py read.
"""

import argparse
import hashlib
import json
import lzma
from pathlib import Path

import common
import numpy as np
import recipes

from model import InputError, finetuning, heldout

TOKENS_A_FILE = 1 << 24
# tokens are two bytes each; one byte of context before them says little
FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 6, "lc": 0, "lp": 1, "pb": 1}]
CONTENTS, GLUE = "contents.json", "glue.npz"
TASKS = ("cola", "sst2", "mrpc", "stsb", "rte")
PARTS = ("tokens", "ends", "labels")  # of finetuning.Examples


def examples(data: Path, glue: Path, tasks: list[str], most: int) -> dict[str, np.ndarray]:
    """The encoded training and validation examples of the tasks, by task, split and part."""
    from tasks.finetune import encode
    from tasks.glue import data as glue_data
    from tasks.text.tokenizer import load_tokenizer

    tokenizer, arrays = load_tokenizer(data), {}
    for task in tasks:
        tables = glue_data.read(str(glue), task).tables
        for split in ("train", "validation"):
            table = tables[split]
            encoded = finetuning.Examples.of(encode(table, tokenizer, most)[0], table["label"].to_numpy())
            arrays |= {f"{task}/{split}/{part}": getattr(encoded, part) for part in PARTS}
    return arrays


def carried_examples(folder: Path) -> dict[str, dict[str, finetuning.Examples]]:
    """The examples of each task and split that `unpack` has left in a folder. InputError if there are none."""
    if not (folder / GLUE).exists():
        raise InputError(f"There is no {GLUE} in {folder}. Pack the data with --glue.")
    with np.load(folder / GLUE) as arrays:
        tasks: dict[str, dict[str, finetuning.Examples]] = {}
        for name in arrays.files[:: len(PARTS)]:
            task, split, _ = name.split("/")
            parts = (arrays[f"{task}/{split}/{part}"] for part in PARTS)
            tasks.setdefault(task, {})[split] = finetuning.Examples(*parts)
    return tasks


def pack(given: argparse.Namespace) -> None:
    """Write the files and their table of contents."""
    corpus = recipes.read(given.data)
    count = min(len(corpus.sequences), max(1, int(given.tokens) // corpus.length))
    rows = np.linspace(0, len(corpus.sequences) - 1, count).astype(np.int64)
    given.folder.mkdir(parents=True, exist_ok=True)
    names = []
    for number, some in enumerate(np.array_split(rows, -(-count * corpus.length // TOKENS_A_FILE))):
        names.append(f"sequences-{number:03}.xz")
        data = np.ascontiguousarray(corpus.sequences[some]).tobytes()
        (given.folder / names[-1]).write_bytes(lzma.compress(data, filters=FILTERS))
    (given.folder / heldout.FILE).write_bytes((given.data / heldout.FILE).read_bytes())
    if given.glue:
        most = min(corpus.length, finetuning.Finetuning().max_tokens)
        np.savez_compressed(given.folder / GLUE, **examples(given.data, given.glue, given.tasks, most))
    contents = {
        "shape": [count, corpus.length],
        "dtype": str(corpus.sequences.dtype),
        "entries": corpus.vocabulary,
        "sequences": names,
        "files": {
            name: digest(given.folder / name) for name in [*names, heldout.FILE, *([GLUE] if given.glue else [])]
        },
    }
    common.write_json(given.folder / CONTENTS, contents)
    size = sum((given.folder / name).stat().st_size for name in contents["files"]) / 1e6
    print(
        f"{count * corpus.length:,} tokens and {len(corpus.heldout.documents):,} held-out documents in {size:,.1f} MB"
    )


def digest(path: Path) -> str:
    """The SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def unpack(given: argparse.Namespace) -> None:
    """Write the folder of the data. Raises InputError for files that are missing or differ from those packed."""
    try:
        contents = json.loads((given.folder / CONTENTS).read_text())
    except (OSError, ValueError) as error:
        raise InputError(f"{given.folder / CONTENTS} can't be read ({error}). Give what `pack` has written.") from error
    wrong = [
        name
        for name, known in contents["files"].items()
        if not (given.folder / name).exists() or digest(given.folder / name) != known
    ]
    if wrong:
        raise InputError(f"Missing from {given.folder}, or not as packed: {', '.join(wrong)}. Carry them again.")
    given.data.mkdir(parents=True, exist_ok=True)
    shape, begin = tuple(contents["shape"]), 0
    sequences = np.lib.format.open_memmap(given.data / "sequences.npy", "w+", np.dtype(contents["dtype"]), shape)
    for name in contents["sequences"]:
        data = lzma.decompress((given.folder / name).read_bytes())
        rows = np.frombuffer(data, sequences.dtype).reshape(-1, shape[1])
        sequences[begin : begin + len(rows)] = rows
        begin += len(rows)
    sequences.flush()
    for name in contents["files"].keys() - set(contents["sequences"]):
        (given.data / name).write_bytes((given.folder / name).read_bytes())
    common.write_json(given.data / "stage.json", {"stats": {"entries": contents["entries"]}})
    print(f"{sequences.size:,} tokens in {given.data}")


def main() -> None:
    """Pack or unpack."""
    parser = common.parser(
        __doc__,
        data={"type": Path, "required": True, "help": "a folder of the tokenize stage; for unpack, where to write it"},
        folder={"type": Path, "required": True, "help": "of the compressed files"},
        tokens={"type": float, "default": 6.5e7, "help": "at most this many tokens of training text"},
        glue={"type": Path, "help": "a folder of GLUE, whose tasks are encoded and packed too"},
        tasks={"nargs": "+", "default": list(TASKS), "choices": TASKS, "help": "of GLUE"},
    )
    parser.add_argument("action", choices=["pack", "unpack"])
    given = parser.parse_args()
    with common.input_errors(parser):
        {"pack": pack, "unpack": unpack}[given.action](given)


if __name__ == "__main__":
    main()
