"""Tokenize: encode, pack into sequences of fixed length, hold some documents out, sort.

Reads   the parts of a corpus, and a vocabulary.
Writes  sequences.npy     (n, S) uint16, in the order of training (uint32 for more than 65,536 entries)
        heldout.parquet   the documents that are never trained on: id, source, text, characters, bytes, tokens; words
                          (tasks/text/matching.py), and how many of them are in passages of 13 words or more that the
                          training text has too (shared_words); and their place among those that the held-out loss is
                          measured on (measured; null for others)
        heldout.npz       the tokens of the measured documents, and of which word each is a piece (model.heldout)
        tokenizer.json, tokenizer_config.json

The held-out loss is measured on documents that share no 13 words in a row with the training text. That is all text that
isn't held out, also the sequences beyond `max_sequences`: so the choice doesn't depend on how many are kept.
"""

import logging
import math
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pydantic import Field
from tokenizers import Tokenizer

from model.errors import InputError
from model.settings import Specials
from model.wording import counted
from tasks.corpus.parts import SCHEMA, parts_of, tables
from tasks.stage import Params, stage
from tasks.store.artifacts import HELDOUT_TEXT, SEQUENCES, WORK, Artifact
from tasks.text import matching, overlap
from tasks.text.encoder import Encoded, encoder_of
from tasks.text.holdout import (
    LARGE,
    MEASURED_CHARACTERS,
    SHORT,
    Divided,
    choose_measured,
    digest_of,
    divide,
    may_be_measured,
)
from tasks.text.ngrams import Known
from tasks.text.sequences import Sort, draw_rows, order_of, write_sequences
from tasks.text.tokenizer import (
    LONGEST_WORD,
    copy_tokenizer,
    heldout_of,
    is_trained_here,
    load_tokenizer,
    specials_of,
)
from tasks.workers.jobs import over_parts

MOST_SEQUENCES = 85_000_000  # the release's limit
MOST_UNKNOWN = 0.01  # of the tokens, before there is a warning
UNKNOWN_OF_A_PART = 1000  # most frequent words that are [UNK]
SHOWN_WORDS = 10  # of these, in a warning and in the statistics
SHOWN_CHARACTERS = 30  # of each
log = logging.getLogger(__name__)
SIZES = [pa.field(name, pa.int64()) for name in ("characters", "bytes", "tokens")]
HELD_SCHEMA = pa.schema([*SCHEMA, *SIZES])
HELD_RUNS = "runs.npy"  # in the draft: the hashes of all runs of words in held-out documents
VERSION = 4 + matching.VERSION  # with other words, other documents are measured


class Tokenize(Params):
    """How text becomes sequences."""

    length: int = Field(128, ge=16, le=2048, description="Tokens per sequence.")
    heldout_fraction: float = Field(
        0.0005, gt=0, lt=0.5, description="Fraction of documents that are never trained on."
    )
    sort: Sort = Field(
        "sentence-length",
        description="sentence-length: sequences of short sentences first (most full stops, the released recipe); "
        "unigram: of likely words first (mean log-probability, the paper's text); "
        "random: in random order; none: in the order of the corpus.",
    )
    max_sequences: int = Field(
        MOST_SEQUENCES,
        ge=1,
        description="Keep at most this many sequences, drawn at random before sorting. "
        "The default is the release's limit.",
    )
    seed: int = Field(0, ge=0, lt=2**31, description="Seed of that draw, and of the order if sort is random.")


def find_runs(part: Path, fraction: float, longest: int, out: Path) -> dict[str, int]:
    """Write the hashes of the runs of words in the held-out documents of a part; the arguments are as for `divide`."""
    held: list[str] = []
    for table in tables(part):
        held += divide(table, fraction, longest).held["text"].to_pylist()
    np.save(out / f"{part.stem}.{HELD_RUNS}", overlap.ngrams_in(held))
    return {"documents": len(held)}


class PartCounts(TypedDict):
    """What `tokenize_part` counts of the documents that are trained on, and their tokens."""

    documents: int
    characters: int
    unknown: int  # tokens, also of the held-out documents
    tokens: int
    lost: int  # tokens at the end of the part, which fill no sequence


class PartResult(TypedDict):
    """What `tokenize_part` returns."""

    counts: PartCounts
    unknown_words: dict[str, int]


class Gathered:
    """What the documents of a part become, a table after the other."""

    def __init__(self, kind: type[np.unsignedinteger], specials: Specials) -> None:
        self.specials = specials
        self.train = [np.zeros(0, kind)]  # tokens
        self.held = [HELD_SCHEMA.empty_table()]
        self.shared = [np.zeros(0, np.uint64)]
        self.documents = 0  # that are trained on; so are the characters
        self.characters = 0
        self.unknown = 0  # tokens of all documents

    def add(self, divided: Divided, encoded: Encoded, known: Known) -> None:
        """Add the documents of a table with their tokens. `known`: the runs of words in all held-out documents."""
        is_held = divided.is_held
        trained = divided.trained
        lengths = np.diff(encoded.ends, prepend=0)
        closed = np.insert(encoded.ids, encoded.ends, self.specials.sep)  # a separator after every document
        self.train.append(closed[~np.repeat(is_held, lengths + 1)])
        self.held.append(with_sizes(divided.held, lengths[is_held]))
        self.shared.append(overlap.ngrams_in_common(known, trained["text"].to_pylist()))
        self.documents += pc.count_distinct(trained["id"]).as_py()
        self.characters += pc.sum(pc.utf8_length(trained["text"])).as_py() or 0
        self.unknown += int((encoded.ids == self.specials.unk).sum())

    def write(self, out: Path, stem: str, length: int) -> PartCounts:
        """Write the sequences, the held-out documents and the shared runs of words."""
        ids = np.concatenate(self.train)
        used = len(ids) // length * length
        np.save(out / f"{stem}.npy", ids[:used].reshape(-1, length))
        np.save(out / f"{stem}.shared.npy", np.unique(np.concatenate(self.shared)))
        pq.write_table(pa.concat_tables(self.held), out / f"{stem}.held.parquet", compression="zstd")
        return {
            "documents": self.documents,
            "characters": self.characters,
            "unknown": self.unknown,
            "tokens": len(ids),
            "lost": len(ids) - used,
        }


def tokenize_part(part: Path, tokenizer_folder: Path, params: Tokenize, longest: int, out: Path) -> PartResult:
    """Write the sequences of a part, its held-out documents, and which runs of HELD_RUNS its other documents have.

    `longest`: as for `divide`.
    """
    encoder = encoder_of(tokenizer_folder)
    encoder.unknown.clear()
    known = Known(np.load(out / HELD_RUNS, mmap_mode="r"))
    gathered = Gathered(encoder.type, encoder.specials)
    for table in tables(part):
        divided = divide(table, params.heldout_fraction, longest)
        encoded = encoder(divided.table["text"].to_pylist())
        gathered.add(divided, encoded, known)
    counts = gathered.write(out, part.stem, params.length)
    return {"counts": counts, "unknown_words": dict(encoder.unknown.most_common(UNKNOWN_OF_A_PART))}


def with_sizes(documents: pa.Table, tokens: np.ndarray) -> pa.Table:
    """Documents as HELD_SCHEMA has them; `tokens`: how many each has."""
    text = documents["text"]
    return pa.table([*documents.columns, pc.utf8_length(text), pc.binary_length(text), tokens], schema=HELD_SCHEMA)


def read_heldout(stems: list[str], work: Path) -> pa.Table:
    """The held-out documents of all parts, with their words and how many of them the training text shares."""
    found = [np.load(work / f"{stem}.shared.npy") for stem in stems]
    shared = Known(np.unique(np.concatenate(found)))
    held = []
    for stem in stems:
        table = pq.read_table(work / f"{stem}.held.parquet", schema=HELD_SCHEMA)
        words, shared_words = overlap.words_in_common(shared, table["text"].to_pylist())
        table = table.append_column("words", pa.array(words, pa.int64()))
        table = table.append_column("shared_words", pa.array(shared_words, pa.int64()))
        held.append(table)
    return pa.concat_tables(held)


class Overlap(TypedDict):
    """How much of some held-out documents the training text has too."""

    words_in_a_row: int
    documents: int
    characters: int
    share_of_documents: float
    share_of_words: float


def overlap_of(held: pa.Table) -> Overlap:
    """How many of these documents share text with the training text, and the share of their words in such passages."""
    words = int(held["words"].to_numpy().sum())
    shared_words = held["shared_words"].to_numpy()
    is_shared = shared_words > 0
    documents = int(is_shared.sum())
    return {
        "words_in_a_row": overlap.WORDS_IN_A_ROW,
        "documents": documents,
        "characters": int(held["characters"].to_numpy()[is_shared].sum()),
        "share_of_documents": round(documents / max(1, len(held)), 6),
        "share_of_words": round(int(shared_words.sum()) / max(1, words), 6),
    }


def log_heldout(held: dict[str, Any], asked: float, short: int) -> None:
    """Log the statistics of held-out documents; warn if the loss is measured on text that was trained on.

    `short`: how many documents have too few words to be compared with the training text.
    """
    of_all = held["shared"]
    of_measured = held["measured"]["shared"]
    log.info(
        "Held out %s, %.3g%% of the text (%.3g%% asked for). %.3g%% of these documents share %d words in a row with "
        "the training text; %.3g%% of the held-out words are in such passages.",
        counted(held["documents"], "document"), 100 * held["share"], 100 * asked, 100 * of_all["share_of_documents"],
        of_all["words_in_a_row"], 100 * of_all["share_of_words"],
    )  # fmt: skip
    if short:
        log.info(
            "%s of fewer than %d words: too few to compare with the training text.",
            counted(short, "held-out document"), of_all["words_in_a_row"],
        )  # fmt: skip
    if of_measured["documents"]:
        log.warning(
            "The held-out loss will look too low: the model is trained on passages of %d words or more that make up "
            "%.3g%% of the text it is measured on. Too few held-out documents have no such passage (%s of %s). "
            "Download more text, hold out more (tokenize.heldout_fraction), or cut what repeats "
            "(deduplicate.methods: substring).",
            of_measured["words_in_a_row"], 100 * of_measured["share_of_words"],
            held["documents"] - of_all["documents"], counted(held["documents"], "document"),
        )  # fmt: skip


def find_measured(held: pa.Table) -> np.ndarray:
    """The rows of the held-out documents that the loss is measured on, in their order."""
    rows = np.flatnonzero(may_be_measured(held))
    texts = [held["text"][row].as_py() for row in rows]
    return rows[choose_measured(texts, MEASURED_CHARACTERS)]


def write_heldout(held: pa.Table, measured: np.ndarray, out: Path) -> None:
    """Write the held-out documents. `measured`: the rows of those that the loss is measured on, in their order."""
    places = np.full(len(held), -1, dtype=np.int64)
    places[measured] = np.arange(len(measured))
    column = pa.array(places, pa.int64(), mask=places < 0)
    pq.write_table(held.append_column("measured", column), out / HELDOUT_TEXT, compression="zstd")


def hold_out(stems: list[str], work: Path, params: Tokenize, trained: int, out: Path) -> dict[str, Any]:
    """Write the held-out documents of all parts, and the tokens of the measured ones; count both.

    `trained`: the characters of all other documents.
    """
    held = read_heldout(stems, work)
    measured = find_measured(held)
    write_heldout(held, measured, out)
    characters = pc.sum(held["characters"]).as_py() or 0
    found = {
        "documents": len(held),
        "characters": characters,
        "share": round(characters / max(1, characters + trained), 6),
        "tokens": (pc.sum(held["tokens"]).as_py() or 0) + len(held),
        "shared": overlap_of(held),
        "measured": write_measured(held.take(pa.array(measured)), params.length, out),
    }
    short = sum(overlap.count_short(texts.to_pylist()) for texts in held["text"].iterchunks())
    log_heldout(found, params.heldout_fraction, short)
    return found


def write_measured(documents: pa.Table, length: int, out: Path) -> dict[str, Any]:
    """Write the tokens of the documents that the held-out loss is measured on; count them."""
    texts = documents["text"].to_pylist()
    tokenizer = load_tokenizer(out)
    heldout = heldout_of(texts, tokenizer, length)
    heldout.save(out)
    return {
        "documents": len(texts),
        **heldout.totals,
        "unknown_tokens": int((heldout.sequences == specials_of(tokenizer).unk).sum()),
        "sequences": len(heldout.sequences),
        "digest": digest_of(texts),
        "shared": overlap_of(documents),
    }


def warn_of_unknown(unknown: dict[str, int], share: float, is_own: bool) -> None:
    """Log a warning if too many tokens are [UNK], with the most frequent such words and what helps.

    `is_own`: the vocabulary is trained by cram, and not that of a public model.
    """
    if share <= MOST_UNKNOWN:
        return
    most = list(unknown.items())[:SHOWN_WORDS]
    shown = ", ".join(f"{word[:SHOWN_CHARACTERS]!r} ({number:,})" for word, number in most)
    long = sum(number for word, number in unknown.items() if len(word) > LONGEST_WORD)
    if 2 * long > sum(unknown.values()):
        helps = f"Words of more than {LONGEST_WORD} characters are [UNK]: put spaces in them, or drop such documents."
    elif is_own:
        helps = "They have characters without an entry: raise vocabulary.alphabet, or vocabulary.entries."
    else:
        helps = "Choose a model that reads the script of these words, or drop such documents."
    log.warning("%.1f %% of the tokens are [UNK], most often the words %s. %s", 100 * share, shown, helps)


def tokenize_parts(params: Tokenize, parts: list[Path], longest: int, work: Path, out: Path) -> list[PartResult]:
    """The results of `tokenize_part` for all parts, after the runs of words in held-out documents are known."""
    work.mkdir(exist_ok=True)
    over_parts(find_runs, [(part, params.heldout_fraction, longest, work) for part in parts], work / "held", "hold out")
    runs = [np.load(work / f"{part.stem}.{HELD_RUNS}") for part in parts]
    np.save(work / HELD_RUNS, np.unique(np.concatenate(runs)))
    jobs = [(part, out, params, longest, work) for part in parts]
    return over_parts(tokenize_part, jobs, work / "done", "tokenize")


class Totals(NamedTuple):
    """What `tokenize_part` counts, of all parts."""

    counts: Counter[str]  # the keys are those of PartCounts
    unknown_words: dict[str, int]  # the most frequent words that are [UNK], in that order


def sum_up(results: list[PartResult]) -> Totals:
    """The sums of the counts of all parts."""
    counts: Counter[str] = Counter()
    unknown: Counter[str] = Counter()
    for result in results:
        counts.update(result["counts"])
        unknown.update(result["unknown_words"])
    ordered = sorted(unknown.items(), key=lambda item: (-item[1], item[0]))
    return Totals(counts, dict(ordered[:UNKNOWN_OF_A_PART]))


class Drawn(NamedTuple):
    """Sequences that are trained on."""

    sequences: int
    of: int  # sequences that the corpus has
    length: int  # tokens of each


def write_training(params: Tokenize, encoded: list[np.memmap], tokenizer: Tokenizer, out: Path) -> Drawn:
    """Draw sequences from those of all parts, and write them in the order of training."""
    every = sum(map(len, encoded))
    rows = draw_rows(every, params.max_sequences, params.seed)
    order = order_of(encoded, rows, params.sort, params.seed, tokenizer)
    write_sequences(out / SEQUENCES, encoded, rows, order)
    return Drawn(len(rows), every, params.length)


def statistics(totals: Totals, drawn: Drawn, held: dict[str, Any], entries: int) -> dict[str, Any]:
    """What the stage returns. `held`: the counts of held-out documents; `entries`: those of the vocabulary."""
    counts = totals.counts
    characters = counts["characters"] + held["characters"]
    tokens = counts["tokens"] + held["tokens"]
    return {
        "documents": counts["documents"],
        "characters": counts["characters"],
        "tokens": drawn.sequences * drawn.length,
        "sequences": drawn.sequences,
        "drawn_from": {"tokens": counts["tokens"], "sequences": drawn.of},
        "tokens_lost_at_part_ends": counts["lost"],
        "unknown_tokens": counts["unknown"],
        "unknown_words": dict(list(totals.unknown_words.items())[:SHOWN_WORDS]),
        "characters_per_token": round(characters / max(1, tokens), 4),
        "entries": entries,
        "heldout": held,
    }


@stage(version=VERSION, resumes=True)
def tokenize(params: Tokenize, corpus: Artifact, words: Artifact, out: Path) -> dict:
    """Write the training and the held-out sequences; count tokens, and those lost at the ends of parts."""
    copy_tokenizer(words.path, out, params.length)
    tokenizer = load_tokenizer(out)
    parts = parts_of(corpus)
    work = out / WORK
    longest = max(SHORT, math.ceil(max(LARGE, params.heldout_fraction) * corpus.stats["characters"]))
    totals = sum_up(tokenize_parts(params, parts, longest, work, out))
    counts = totals.counts
    encoded = [np.load(work / f"{part.stem}.npy", mmap_mode="r") for part in parts]
    if not any(map(len, encoded)):
        raise InputError(
            f"The corpus has {counted(counts['tokens'], 'token')}, less than one sequence of {params.length}. "
            "Download more text, or set a looser filter."
        )
    drawn = write_training(params, encoded, tokenizer, out)
    held = hold_out([part.stem for part in parts], work, params, counts["characters"], out)
    share = counts["unknown"] / max(1, counts["tokens"] + held["tokens"])
    warn_of_unknown(totals.unknown_words, share, is_trained_here(tokenizer))
    return statistics(totals, drawn, held, tokenizer.get_vocab_size())
