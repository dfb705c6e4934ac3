"""Evaluate: the loss of a pretrained model on another text.

Reads   a pretrain artifact; a text: the held-out documents of a tokenize or pretrain artifact, or a corpus;
        optionally other artifacts: only documents that they hold out too are measured
Writes  documents.parquet   the measured documents: id, source, tokens, words, characters, bytes, unread bytes, nats

Losses per character and per byte can be compared between models with different vocabularies. Whether a model was
trained on the text is not checked; of held-out documents, those that share passages with the training text of their own
artifact are left out, as they are when it is measured (tasks/text/holdout.py). Documents are held out by the digest of
their text, so a held-out document of one corpus is held out of every other that has it unchanged and holds out as large
a fraction, or a larger one.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pydantic import Field

from model.errors import InputError
from tasks.corpus.parts import parts_of, row_name, tables
from tasks.stage import Params, stage
from tasks.store.artifacts import FREQUENCIES, HELDOUT_TEXT, Artifact
from tasks.text.holdout import MEASURED_CHARACTERS, choose_measured, digest_of, may_be_measured
from tasks.text.tokenizer import load_tokenizer, specials_of

if TYPE_CHECKING:
    from model.heldout import Heldout

COLUMNS = ("id", "source", "text")


class Evaluate(Params):
    """How much of the text is read."""

    characters: int = Field(
        MEASURED_CHARACTERS,
        ge=1,
        description="Stop after the document that completes this number of characters, in order of digests.",
    )


def texts_of(text: Artifact) -> Iterator[pa.Table]:
    """The documents of a text that may be measured, some at a time: all of a corpus."""
    path = text.path / HELDOUT_TEXT
    if path.exists():
        held = pq.read_table(path)
        yield held.filter(pa.array(may_be_measured(held))).select(COLUMNS)
    else:
        for part in parts_of(text):
            yield from tables(part, COLUMNS)


def documents_in_common(text: Artifact, others: list[Artifact]) -> Iterator[pa.Table]:
    """The documents of a text that all of the others have, too, and that may be measured in each."""
    kept = [pa.concat_tables(texts_of(other))["text"].combine_chunks() for other in others]
    for table in texts_of(text):
        for known in kept:
            table = table.filter(pc.is_in(table["text"], known))
        yield table


def share_in_common(text: Artifact, other: Artifact) -> float:
    """The fraction of the documents to measure of a text that are to be measured in another artifact too."""
    everything = sum(map(len, texts_of(text)))
    return sum(map(len, documents_in_common(text, [other]))) / max(1, everything)


def choose_documents(text: Artifact, others: list[Artifact], characters: int) -> pa.Table:
    """The documents to measure: the same whatever the order and the parts of the text."""
    texts = (one.as_py() for table in documents_in_common(text, others) for one in table["text"])
    order = choose_measured(texts, characters)
    if not len(order):
        which = "to measure"
        if others:
            which = f"that are held out of {', '.join(other.name for other in others)} too"
        raise InputError(
            f"{text.name} has no documents {which}. Pass a corpus, or an artifact with more held-out text."
        )
    places = np.sort(order)
    picked = []
    first = 0
    for table in documents_in_common(text, others):
        within = places[(places >= first) & (places < first + len(table))] - first
        picked.append(table.take(within))
        first += len(table)
    ranks = np.argsort(np.argsort(order))
    return pa.concat_tables(picked).take(ranks)


def predict(texts: list[str], model: Artifact, name: str) -> tuple["Heldout", np.ndarray]:
    """The texts as held-out documents of a model, and (documents,) the nats of each. `name`: of the text."""
    from model import export, heldout, machine
    from model.layouts import HEADS
    from tasks.text.tokenizer import heldout_of

    here = machine.detect()
    if model.stats.get("new_head"):
        raise InputError(
            f"{model.name} came without a head that predicts masked words, so it has no loss. Pretrain it first "
            "(pretrain.start), or name another model."
        )
    bert = export.load(model.path, HEADS)
    tokenizer = load_tokenizer(model.path)
    specials = specials_of(tokenizer)
    held = heldout_of(texts, tokenizer, bert.length).without(specials.unk)
    if not held.read_bytes.sum():
        raise InputError(f"{name} has no word that {model.name} can read. Pass text in the model's script.")
    nats_D, _ = heldout.document_losses(bert.to(here.device), held, specials.mask, here)
    return held, nats_D


@stage(version=5)
def evaluate(params: Evaluate, model: Artifact, text: Artifact, others: list[Artifact], out: Path) -> dict:
    """Predict every word of the documents once; nats per word, character and byte, of all and by source."""
    from model import heldout

    documents = choose_documents(text, others, params.characters)
    texts = documents["text"].to_pylist()
    held, nats_D = predict(texts, model, text.name)
    sizes = dict(zip(heldout.SIZES, held.documents.T, strict=True))
    columns = {name: documents[name] for name in COLUMNS[:2]} | sizes | {"nats": nats_D}
    pq.write_table(pa.table(columns), out / "documents.parquet", compression="zstd")
    counts = [np.load(path) for path in model.path.glob(FREQUENCIES)]  # an adopted model has none
    about = heldout.summary(held, nats_D, *counts)
    sources = [row_name(source) for source in documents["source"].to_pylist()]
    return about | {"digest": digest_of(texts), "table": by_source(np.array(sources), sizes, held.read_bytes, nats_D)}


def by_source(sources: np.ndarray, sizes: dict[str, np.ndarray], read_bytes: np.ndarray, nats_D: np.ndarray) -> list:
    """A row for each source of documents: how large it is, and its loss per word, character and byte."""
    from model import heldout

    units = {unit: sizes[f"{unit}s"] for unit in heldout.UNITS} | {"byte": read_bytes}
    rows = []
    for name in sorted(set(sources)):
        own = sources == name
        unread = 100 * sizes["unread_bytes"][own].sum() / max(1, sizes["bytes"][own].sum())
        row = {
            "source": name,
            "documents": int(own.sum()),
            "characters": int(sizes["characters"][own].sum()),
            "unread, % of bytes": round(unread, 2),
        }
        for unit, size in units.items():
            row[f"nats per {unit}"] = round(float(nats_D[own].sum() / max(1, size[own].sum())), 4)
        rows.append(row)
    return rows
