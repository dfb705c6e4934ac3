"""What travels to a machine without a network: `pack` writes it, with all of cram's packages; the rest reads it there.

heldout.npz             the held-out text of a tokenize stage, as it wrote it
stage.json              how many sequences there are, and the entries of the vocabulary
glue.npz                the encoded examples of tasks: NAME/SPLIT/ARRAY
pairs.npz               the encoded sentences of a set of minimal pairs, and which pairs are in which part of the set
N/sequences-NNN.npy.xz  training text: sequences of token ids; a folder for each call in which they travel
"""

import argparse
import io
import lzma
from pathlib import Path
from typing import NamedTuple

import common
import numpy as np
import recipes

from model import heldout
from model.errors import InputError
from model.finetuning import Examples
from model.likelihood import FRAME, Sentences
from model.settings import Finetuning

TASKS = ("cola", "sst2", "mrpc", "stsb", "rte")
ROWS_A_FILE = 1 << 15  # sequences; some 4.5 MB of 128 tokens each
# tokens are two bytes each; one byte of context before them says little
FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 6, "lc": 0, "lp": 1, "pb": 1}]
GLUE = "glue.npz"
PAIRS = "pairs.npz"
STAGE = "stage.json"
ARRAYS = ("tokens", "ends", "labels")  # of finetuning.Examples
PART = "part/"  # before the names of a set's parts


def pack(given: argparse.Namespace) -> None:
    """Write text spread over that of a tokenize stage, and the encoded examples of GLUE and of minimal pairs.

    Prints which files travel in which call.
    """
    if not given.tokenized:
        raise InputError("pack reads what the tokenize stage has written; give its folder as --tokenized.")
    corpus = recipes.read(given.tokenized)
    count = min(len(corpus.sequences), max(1, int(given.tokens) // corpus.length))
    rows = np.linspace(0, len(corpus.sequences) - 1, count).astype(np.int64)
    given.data.mkdir(parents=True, exist_ok=True)
    (given.data / heldout.FILE).write_bytes((given.tokenized / heldout.FILE).read_bytes())
    common.write_json(given.data / STAGE, {"stats": {"entries": corpus.vocabulary, "sequences": count}})
    if given.glue:
        most = min(corpus.length, Finetuning().max_tokens)
        np.savez_compressed(given.data / GLUE, **encoded(given.tokenized, given.glue, given.task or TASKS, most))
    if given.pairs:
        most = corpus.length - FRAME
        np.savez_compressed(given.data / PAIRS, **encoded_pairs(given.tokenized, given.pairs, given.per_group, most))
    small = sorted(given.data.glob("*.*"))
    calls = write_sequences(given, corpus.sequences, rows, sum(path.stat().st_size for path in small))
    print(f"{count * corpus.length:,} tokens and {len(corpus.heldout.documents):,} held-out documents")
    for folder, size in calls.items():
        travels = [*small, folder] if folder.name == "1" else [folder]
        print(f"call {folder.name}, {size / 1e6:.1f} MB: {' '.join(map(str, travels))}")


def write_sequences(
    given: argparse.Namespace, sequences: np.ndarray, rows: np.ndarray, first_has: int
) -> dict[Path, int]:
    """Write rows of the sequences into a folder for each call. Returns the bytes of each call by its folder.

    first_has: bytes of what travels in the first call besides.
    """
    for old in recipes.packed(given.data):
        old.unlink()  # of an earlier call, which may have packed more, or into other folders
    folder = given.data / "1"
    sizes = {folder: first_has}
    folder.mkdir(exist_ok=True)
    for number, first in enumerate(range(0, len(rows), ROWS_A_FILE)):
        packed = io.BytesIO()
        with lzma.open(packed, "wb", filters=FILTERS) as file:
            np.save(file, sequences[rows[first : first + ROWS_A_FILE]])
        if sizes[folder] + packed.tell() > 1e6 * given.call_megabytes:
            folder = given.data / str(len(sizes) + 1)
            folder.mkdir(exist_ok=True)
            sizes[folder] = 0
        (folder / f"sequences-{number:03}.npy.xz").write_bytes(packed.getvalue())
        sizes[folder] += packed.tell()
    return sizes


def encoded(tokenized: Path, data: Path, tasks: list[str], most: int) -> dict[str, np.ndarray]:
    """The encoded training and validation examples of the tasks, by task, split and array."""
    from tasks.glue.inputs import encode
    from tasks.glue.own import by_name
    from tasks.glue.reading import read
    from tasks.text.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(tokenized)
    arrays = {}
    for task in tasks:
        tables = read(by_name(task, str(data))).tables
        for split in ("train", "validation"):
            ids, _ = encode(tables[split], tokenizer, most)
            examples = Examples.of(ids, tables[split]["label"].to_numpy())
            for name in ARRAYS:
                arrays[f"{task}/{split}/{name}"] = getattr(examples, name)
    return arrays


def encoded_pairs(tokenized: Path, data: Path, per_group: int, most: int) -> dict[str, np.ndarray]:
    """A set of minimal pairs in arrays, drawn and encoded as the stage does: the good sentences, then the bad ones."""
    from tasks.glue import pairs as sets
    from tasks.glue.pair_scores import parts_of
    from tasks.minimal_pairs import check_lengths, encode, facts_of

    every = sets.read(sets.PairSet(data=str(data)))
    table = sets.draw(every.assign(**facts_of(every)), per_group)
    texts = [*table["good"], *table["bad"]]
    sentences = encode(texts, tokenized)
    check_lengths(sentences, texts, most, str(tokenized))
    arrays = {name: getattr(sentences, name) for name in ("tokens", "words", "ends")}
    arrays["groups"] = table["group"].to_numpy(dtype=str)
    for part, rows in parts_of(table).items():
        arrays[PART + part] = rows
    return arrays


def read_examples(folder: Path) -> dict[str, dict[str, Examples]]:
    """The packed examples of each task and split. Raises InputError if there are none."""
    if not (folder / GLUE).exists():
        raise InputError(f"There is no {GLUE} in {folder}. Pack the data with --glue.")
    tasks: dict[str, dict[str, Examples]] = {}
    with np.load(folder / GLUE) as arrays:
        for name in arrays.files[:: len(ARRAYS)]:
            task, split, _ = name.split("/")
            examples = Examples(*(arrays[f"{task}/{split}/{array}"] for array in ARRAYS))
            tasks.setdefault(task, {})[split] = examples
    return tasks


class Pairs(NamedTuple):
    """Minimal pairs: of all arrays but those of the sentences, a value is that of a pair."""

    sentences: Sentences  # the good ones, then the bad ones
    groups: np.ndarray  # names
    parts: dict[str, np.ndarray]  # of the set, by name: whether the pair is in it


def read_pairs(folder: Path) -> Pairs:
    """The packed minimal pairs. Raises InputError if there are none."""
    if not (folder / PAIRS).exists():
        raise InputError(f"There is no {PAIRS} in {folder}. Pack the data with --pairs.")
    with np.load(folder / PAIRS) as arrays:
        sentences = Sentences(arrays["tokens"], arrays["words"], arrays["ends"])
        parts = {name.removeprefix(PART): arrays[name] for name in arrays.files if name.startswith(PART)}
        return Pairs(sentences, arrays["groups"], parts)
