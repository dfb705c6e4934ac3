"""Vocabulary: WordPiece, trained from scratch on the corpus, or that of a model; always the same bytes from a corpus.

Reads   the parts of a corpus.
Writes  tokenizer.json and tokenizer_config.json, which transformers.AutoTokenizer loads
        entries.parquet   id, entry, kind, and how often it occurs in the text it was trained on
"""

import json
import string
import unicodedata
from collections.abc import Iterable, Iterator
from itertools import chain, islice, repeat
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pydantic import Field
from tokenizers import AddedToken, Tokenizer, pre_tokenizers
from tokenizers.models import WordPiece
from tokenizers.trainers import WordPieceTrainer

from model.errors import InputError
from tasks import adopt
from tasks.corpus.parts import in_batches, parts_of, tables, unit_hash
from tasks.stage import Params, stage
from tasks.store.artifacts import WORK, Artifact
from tasks.text import words
from tasks.text.tokenizer import (
    ALPHABET,
    FILES,
    KNOWN_WORDS,
    SPECIALS,
    UNK,
    load_tokenizer,
    portions,
    save_tokenizer,
    tokenizer_of,
)
from tasks.text.wordpiece import CONTINUES, LONGEST_WORD, NONE, WordPieces
from tasks.text.words import ASCII, Normaliser
from tasks.workers.jobs import over_parts
from tasks.workers.processes import library_threads, one_library_thread

SUMMED_AT_ONCE = 1 << 20  # counts of words
TRAINING_WORDS = 8_000_000  # the trainer reads each word as often as it occurs, so counts are scaled down to this total
LINE_WORDS = 1000  # that the trainer is given at once
FED_AT_ONCE = 1 << 16  # different words that are strings of Python at a time; each takes some hundred bytes
BEGINNINGS = 64  # of words, by the first six bits
FEWEST_ENTRIES = 256
MIN_FREQUENCY = 2  # in those words, of a pair that is merged
CODES = 0x110000  # of characters
KINDS = ("letters", "mixed", "digits", "punctuation", "special")  # of entries


class Vocabulary(Normaliser, Params):
    """The vocabulary (section 4.1): WordPiece, trained on the corpus."""

    entries: int = Field(
        32_768,
        ge=FEWEST_ENTRIES,
        le=131_072,
        description="Size, with special tokens. Up to 65,536, ids are stored in 16 bits, beyond in 32.",
    )
    sample_megabytes: float = Field(
        1000, gt=0, description="Text to train on, 10^6 characters; of a larger corpus, a fixed sample."
    )
    start: str = Field(
        "", description="A model whose vocabulary to take instead of training one; that of pretrain.start if it is set."
    )

    def normaliser(self) -> Normaliser:
        """Which characters it reads."""
        return Normaliser(**{name: getattr(self, name) for name in Normaliser.model_fields})

    later = ("punctuation",)

    def identity(self) -> dict:
        """The normaliser's settings but punctuation enter it only for Unicode; of a model, its tokenizer's digest."""
        left = {"start"}
        if self.characters == "ascii":
            left |= set(Normaliser.model_fields).difference(self.later)
        given = {"start": adopt.digest_of_files(self.start, FILES[0])} if self.start else {}
        return {name: value for name, value in super().identity().items() if name not in left} | given

    @classmethod
    def usual(cls) -> dict:
        """All defaults, so that a card shows those that are changed."""
        return cls().model_dump(mode="json")


def counted(texts: list[str], how: Normaliser = ASCII) -> Iterator[pa.Table]:
    """How often each word of at most LONGEST_WORD characters occurs in the texts: words.COUNTS of some of them each."""
    for some, _ in portions(texts):
        counts = words.count(some, how)
        yield counts.filter(pc.less_equal(pc.utf8_length(counts["word"]), LONGEST_WORD))


def count_words(texts: list[str], how: Normaliser = ASCII) -> pa.Table:
    """The same of all texts, in the order of words."""
    return summed(counted(texts, how)).sort_by("word")


def added(counts: list[pa.Table]) -> pa.Table:
    """The sum of counts of words."""
    joined = pa.concat_tables(counts)
    different = joined["word"].combine_chunks().dictionary_encode()  # several times as fast as Arrow's group_by
    sums = np.bincount(different.indices.to_numpy(), joined["count"].to_numpy(), len(different.dictionary))
    return pa.table([different.dictionary, sums.astype(np.int64)], schema=words.COUNTS)


def summed(counts: Iterable[pa.Table]) -> pa.Table:
    """The same of any number, with at most as many rows waiting as there are different words, or SUMMED_AT_ONCE."""
    total, waiting = words.COUNTS.empty_table(), []
    for table in counts:
        waiting.append(table)
        if sum(map(len, waiting)) > max(len(total), SUMMED_AT_ONCE):
            total, waiting = added([total, *waiting]), []
    return added([total, *waiting])


def write_counts(counts: pa.Table, out: Path) -> None:
    """Write counts in BEGINNINGS batches by the first byte of words: all words of one come before those of the next."""
    edges, data = np.zeros(1, dtype=np.int64), b""
    if len(counts):
        data, edges = words.in_buffers(counts["word"].combine_chunks())
    beginnings = np.frombuffer(data, dtype=np.uint8)[edges[:-1]] >> 2
    ordered = counts.take(np.argsort(beginnings, kind="stable")).combine_chunks()
    ends = np.cumsum(np.bincount(beginnings, minlength=BEGINNINGS)).tolist()
    with pa.ipc.new_file(out, words.COUNTS, options=pa.ipc.IpcWriteOptions(compression="lz4")) as file:
        for start, end in zip([0, *ends[:-1]], ends, strict=True):
            (batch,) = ordered.slice(start, end - start).to_batches() or [pa.RecordBatch.from_pylist([], words.COUNTS)]
            file.write_batch(batch)


def count_batch(batch: list[Path], fraction: float, how: Normaliser, out: Path) -> dict:
    """Write the counts of the words in a fraction of the documents of some parts, always the same ones."""
    used = {"documents": 0, "characters": 0}

    def counts() -> Iterator[pa.Table]:
        for table in (table for part in batch for table in tables(part, ("text",))):
            every = table["text"].to_pylist()
            texts = [text for text in every if fraction >= 1 or unit_hash(text, salt=1) < fraction]
            used["documents"] += len(texts)
            used["characters"] += sum(map(len, texts))
            yield from counted(texts, how)

    write_counts(summed(counts()), out)
    return used


def count_sample(
    corpus: Artifact, megabytes: float, work: Path, label: str, how: Normaliser = ASCII
) -> tuple[pa.Table, dict]:
    """How often each word occurs in a sample of about so much text, 10^6 characters; and the size of the sample.

    The words are in order. Those with one beginning are summed at a time, which takes a tenth of the memory of all.
    """
    fraction = 1e6 * megabytes / max(1, corpus.stats["characters"])
    batches = in_batches(parts_of(corpus))
    jobs = [(batch, fraction, how, work / f"{i:05d}.words.arrow") for i, batch in enumerate(batches)]
    used = over_parts(count_batch, jobs, work / "counted", label)

    def beginning(number: int) -> Iterator[pa.Table]:
        for *_, path in jobs:
            with pa.ipc.open_file(path) as file:
                yield pa.Table.from_batches([file.get_batch(number)])

    counts = pa.concat_tables(summed(beginning(number)).sort_by("word") for number in range(BEGINNINGS))
    return counts, {name: sum(u[name] for u in used) for name in ("documents", "characters")}


def scaled(counts: pa.Table) -> Iterator[str]:
    """The words, each as often as it was counted, a line at a time; scaled down to TRAINING_WORDS if there are more.

    The word's digest decides whether its count is rounded up or down, so that rare words keep their share of the total.
    counts: in the order of words, so that a vocabulary does not depend on the order of texts.
    """
    scale = min(1.0, TRAINING_WORDS / max(1, pc.sum(counts["count"]).as_py() or 0))

    def every() -> Iterator[str]:
        for start in range(0, len(counts), FED_AT_ONCE):
            some = counts.slice(start, FED_AT_ONCE)
            different, numbers = some["word"].to_pylist(), some["count"].to_numpy()
            rounded = numbers * scale + np.fromiter(map(unit_hash, different), np.float64, len(different))
            yield from chain.from_iterable(map(repeat, different, rounded.astype(np.int64).tolist()))

    all_words = every()
    while line := list(islice(all_words, LINE_WORDS)):
        yield " ".join(line)


def characters_of(counts: pa.Table) -> np.ndarray:
    """(2, 0x110000): how often each character occurs within the counted words, and at their beginnings."""
    times = np.zeros(2 * CODES, dtype=np.int64)
    for start in range(0, len(counts), KNOWN_WORDS):
        some = counts.slice(start, KNOWN_WORDS)
        places = np.frombuffer("".join(some["word"].to_pylist()).encode("utf-32-le"), dtype=np.int32).copy()
        lengths = pc.utf8_length(some["word"]).to_numpy()
        places[np.cumsum(lengths) - lengths] += CODES
        times += np.bincount(places, np.repeat(some["count"].to_numpy(), lengths), len(times)).astype(np.int64)
    return times.reshape(2, CODES)


def alphabet_of(counts: pa.Table, entries: int, how: Normaliser) -> tuple[list[str], list[str]]:
    """The characters with entries of their own within words, and where a word begins: where they occur there.

    All of ASCII that the normaliser leaves, and the most frequent others, until they take half of the entries.
    """
    plain = [*ALPHABET, *([] if how.lowercase else string.ascii_uppercase)]
    if how.characters == "ascii":
        return plain, plain
    times = characters_of(counts)
    times[:, :128] = 0
    order = np.argsort(-times.sum(axis=0), kind="stable")[: how.alphabet]
    taken = np.cumsum((times[:, order] > 0).sum(axis=0))
    chosen = order[(times.sum(axis=0)[order] >= MIN_FREQUENCY) & (taken <= entries // 2 - 2 * len(plain))]
    within, begin = (sorted([*plain, *map(chr, chosen[own[chosen] > 0].tolist())]) for own in times)
    return within, begin


def train_wordpiece(counts: pa.Table, entries: int, how: Normaliser = ASCII) -> Tokenizer:
    """Train a vocabulary of at most so many entries on counted words.

    The trainer breaks ties by the order in which it first sees the characters within words, which differs from run to
    run. So these characters get ids beforehand, as special tokens, and become plain entries afterwards. It takes no
    character that isn't in its alphabet as the beginning of a word: such an entry is dropped afterwards.
    Nothing depends on the number of threads.
    """
    within, begin = alphabet_of(counts, entries, how)
    alphabet = sorted({*within, *begin})
    unused = set(alphabet) - set(begin)
    if how.characters == "unicode":  # the trainer passes over other characters, and would learn of what is left
        letters = "".join(f"\\x{{{ord(character):x}}}" for character in alphabet)
        counts = counts.filter(pc.match_substring_regex(counts["word"], f"^[{letters}]*$"))

    def lines() -> Iterator[str]:  # several threads count the words in them
        yield from scaled(counts)
        one_library_thread()  # the merges are too little work for more

    learner = Tokenizer(WordPiece(unk_token="[UNK]"))
    learner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    trainer = WordPieceTrainer(
        vocab_size=entries + len(unused),
        min_frequency=MIN_FREQUENCY,
        special_tokens=[*SPECIALS, *(CONTINUES + c for c in within)],
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
        show_progress=False,
    )
    with library_threads():
        learner.train_from_iterator(lines(), trainer)
    learned = json.loads(learner.to_str())["model"]["vocab"]
    if unused:
        used = (entry for entry in sorted(learned, key=learned.__getitem__) if entry not in unused)
        learned = {entry: number for number, entry in enumerate(used)}
    tokenizer = tokenizer_of(WordPiece(learned, unk_token="[UNK]", max_input_chars_per_word=LONGEST_WORD), how)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    return tokenizer


def kind_of(entry: str) -> str:
    """What an entry consists of: one of KINDS."""
    text = entry.removeprefix(CONTINUES) or entry
    if not text.isascii():  # vowel signs and accents are letters
        text = "".join("a" if unicodedata.category(c)[0] == "M" else c for c in text)
    if entry in SPECIALS:
        return "special"
    if text.isalpha():
        return "letters"
    if text.isdigit():
        return "digits"
    return "mixed" if any(map(str.isalnum, text)) else "punctuation"


def entries_table(tokenizer: Tokenizer, counts: pa.Table) -> pa.Table:
    """Every entry with its kind, and how often it occurs in the counted words."""
    pieces, times = WordPieces(tokenizer.get_vocab()), np.zeros(tokenizer.get_vocab_size(), dtype=np.int64)
    for batch in counts.to_batches(KNOWN_WORDS):
        data, edges = words.in_buffers(batch["word"])
        ids, lengths = pieces.divide(data, edges[:-1], edges[1:])
        weights = np.repeat(batch["count"].to_numpy(), lengths)
        times += np.bincount(np.where(ids == NONE, UNK, ids), weights, len(times)).astype(np.int64)
    entries = sorted(tokenizer.get_vocab(), key=tokenizer.token_to_id)
    return pa.table(
        {"id": range(len(entries)), "entry": entries, "kind": [kind_of(e) for e in entries], "occurrences": times}
    )


def kinds_table(used: pa.Table) -> list[dict]:
    """The entries as a table, a row for each kind: how many, how many are rare, and their share of all tokens."""
    kinds, occurrences = np.array(used["kind"].to_pylist()), used["occurrences"].to_numpy()
    table = []
    for kind in KINDS:
        times = occurrences[kinds == kind]
        table.append(
            {
                "kind": kind,
                "entries": len(times),
                "unused": int((times == 0).sum()),
                "in fewer than 100 places": int((times < 100).sum()),
                "% of tokens": round(100 * int(times.sum()) / max(1, int(occurrences.sum())), 2),
            }
        )
    return table


@stage(version=3, resumes=True)
def vocabulary(params: Vocabulary, corpus: Artifact, out: Path) -> dict:
    """Train the vocabulary, or take a model's. Raises InputError if it has not as many entries as asked for."""
    how = params.normaliser()
    counts, used = count_sample(corpus, params.sample_megabytes, out / WORK, "count words", how)
    taken = load_tokenizer(adopt.find_model(params.start).path) if params.start else None
    tokenizer = taken or train_wordpiece(counts, params.entries, how)
    size = tokenizer.get_vocab_size()
    if size != params.entries:
        read = pc.sum(pc.multiply(pc.utf8_length(counts["word"]), counts["count"])).as_py() or 0
        raise InputError(
            f"The corpus of {used['characters']:,} characters gives a vocabulary of {size:,} entries; "
            f"{params.entries:,} were asked for. It reads {read:,} of the characters, in words of at most "
            f"{LONGEST_WORD}. Give more text (download), drop less of it (cram show filter), divide longer words, or "
            f"lower vocabulary.entries, to {FEWEST_ENTRIES} at the least."
        )
    save_tokenizer(tokenizer, out)
    entries = entries_table(tokenizer, counts)
    pq.write_table(entries, out / "entries.parquet", compression="zstd")
    continuations = sum(entry.startswith(CONTINUES) for entry in entries["entry"].to_pylist())
    return {
        "entries": size,
        "whole_words": size - len(SPECIALS) - continuations,
        "continuations": continuations,
        "unused": int((entries["occurrences"].to_numpy() == 0).sum()) - len(SPECIALS),
        "trained_on": used | {"words": pc.sum(counts["count"]).as_py() or 0, "different_words": len(counts)},
        "table": kinds_table(entries),
    }
