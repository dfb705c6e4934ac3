"""Which documents are held out, and on which of them the loss is measured: by their texts alone."""

import hashlib
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tasks.corpus.parts import Document, unit_hash
from tasks.corpus.parts import table as documents_table
from tasks.store.artifacts import HELDOUT_TEXT

# A document is long if it is longer than all that is to be held out, than LARGE of the text and than SHORT characters.
# Its pieces have a tenth of the greatest of the three.
LARGE = 0.02
SHORT = 10_000
PIECES = 10
MEASURED_CHARACTERS = 1_000_000  # of held-out text that the loss is measured on, or all if there is less
# Of those characters, the part that must share nothing with the training text. With less, the standard error is more
# than three times as large, and what is left may be unlike the rest.
ENOUGH = 0.1
FEWEST = 2  # documents: a standard error needs two


def pieces_of(text: str, size: int) -> Iterator[str]:
    """A text in pieces of at least `size` characters, cut after a line where there is one, else after a word."""
    start = 0
    while len(text) - start > 2 * size:
        least = start + size
        end = least
        for character in ("\n", " "):
            found = text.find(character, least, least + size)
            if found >= 0:
                end = found + 1
                break
        yield text[start:end]
        start = end
    yield text[start:]


class Divided(NamedTuple):
    """The documents of a table, with long ones in pieces, and (documents,) which of them are held out."""

    table: pa.Table
    is_held: np.ndarray

    @property
    def held(self) -> pa.Table:
        """The documents that are held out."""
        return self.table.filter(pa.array(self.is_held))

    @property
    def trained(self) -> pa.Table:
        """The others."""
        return self.table.filter(pa.array(~self.is_held))


def is_chosen(text: str, fraction: float) -> bool:
    """Whether a text is held out: by its digest, whatever the other texts are."""
    return unit_hash(text) < fraction


def divide_long(document: Document, fraction: float, longest: int) -> Iterator[tuple[Document, bool]]:
    """The pieces of a document that are held out, and what is between them, each with whether it is held out.

    A piece has a tenth of `longest` characters. The id of one that is held out ends in its place.
    """
    place = 0
    pieces = pieces_of(document.text, longest // PIECES)
    for chosen, some in groupby(pieces, key=lambda piece: is_chosen(piece, fraction)):
        for text in some if chosen else ["".join(some)]:
            name = f"{document.id}+{place}" if chosen else document.id
            yield Document(name, document.source, text), chosen
            place += len(text)


def divide(table: pa.Table, fraction: float, longest: int) -> Divided:
    """Choose the documents of a table that are held out.

    A document of more than `longest` characters may alone be more than the fraction of the text. Of such a one, pieces
    are held out, each as a document, and what is between them is trained on.
    """
    texts = table["text"].to_pylist()
    if max(map(len, texts), default=0) <= longest:
        return Divided(table, np.array([is_chosen(text, fraction) for text in texts], dtype=bool))
    rows: list[Document] = []
    is_held: list[bool] = []
    for name, source, text in zip(table["id"].to_pylist(), table["source"].to_pylist(), texts, strict=True):
        document = Document(name, source, text)
        if len(text) <= longest:
            rows.append(document)
            is_held.append(is_chosen(text, fraction))
            continue
        for piece, chosen in divide_long(document, fraction, longest):
            rows.append(piece)
            is_held.append(chosen)
    return Divided(documents_table(rows), np.array(is_held, dtype=bool))


def choose_measured(texts: Iterable[str], characters: int) -> np.ndarray:
    """The indices of the documents that the held-out loss is measured on, in the order of their digests.

    The last is the one that completes that many characters. So the choice depends on these texts alone: not on the
    vocabulary, on the length of sequences, or on the order and the parts of the corpus.
    """
    keys = [(unit_hash(text), len(text), hashlib.sha256(text.encode()).digest()) for text in texts]
    order = sorted(range(len(keys)), key=keys.__getitem__)
    total = np.cumsum([keys[index][1] for index in order])
    return np.array(order, dtype=np.int64)[: np.searchsorted(total, characters) + 1]


def may_be_measured(held: pa.Table) -> np.ndarray:
    """Which held-out documents the loss may be measured on: those that share nothing with the training text.

    All of them if these are too few, or if an earlier version, which made no such comparison, has written the table.
    """
    every = np.ones(len(held), dtype=bool)
    if "shared_words" not in held.column_names:
        return every
    alone = held["shared_words"].to_numpy() == 0
    characters = held["characters"].to_numpy()
    enough = characters[alone].sum() >= ENOUGH * min(MEASURED_CHARACTERS, characters.sum())
    return alone if enough and alone.sum() >= FEWEST else every


def measured_texts(folder: Path) -> list[str]:
    """The documents that the held-out loss is measured on, in their order, of a tokenize or pretrain artifact."""
    table = pq.read_table(folder / HELDOUT_TEXT, columns=["text", "measured"])
    return table.filter(pc.is_valid(table["measured"])).sort_by("measured")["text"].to_pylist()


def digest_of(texts: Iterable[str]) -> str:
    """A digest of the measured documents in their order."""
    digest = hashlib.sha256()
    for text in texts:
        digest.update(hashlib.sha256(text.encode()).digest())
    return digest.hexdigest()
