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
from typing import NamedTuple

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
from tasks.corpus.parts import Salt, in_batches, parts_of, tables, unit_hash
from tasks.stage import Params, stage
from tasks.store.artifacts import WORK, Artifact
from tasks.text import words
from tasks.text.encoder import KNOWN_WORDS, LibraryEncoder, portions
from tasks.text.tokenizer import (
    ALPHABET,
    FILES,
    SPECIALS,
    UNK,
    copy_files,
    is_trained_here,
    load_tokenizer,
    save_tokenizer,
    tokenizer_of,
)
from tasks.text.wordpiece import CONTINUES, LONGEST_WORD, NONE, WordPieces
from tasks.text.words import ASCII, Normaliser
from tasks.workers.jobs import over_parts
from tasks.workers.processes import library_threads, one_library_thread

SUMMED_AT_ONCE = 1 << 20  # counts of words
TRAINING_WORDS = 8_000_000  # the trainer reads each word as often as it occurs, so counts are scaled down to this total
LINE_WORDS = 1000  # that the trainer takes at once
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
        decisive = {name: value for name, value in super().identity().items() if name not in left}
        if self.start:
            decisive["start"] = adopt.digest_of_files(self.start, FILES[0])
        return decisive

    @classmethod
    def usual(cls) -> dict:
        """All defaults, so that a card shows those that are changed."""
        return cls().model_dump(mode="json")


def count_portions(texts: list[str], how: Normaliser) -> Iterator[pa.Table]:
    """How often each word of at most LONGEST_WORD characters occurs in the texts: words.COUNTS of some of them each."""
    for some, _ in portions(texts):
        counts = words.count(some, how)
        yield counts.filter(pc.less_equal(pc.utf8_length(counts["word"]), LONGEST_WORD))


def add_counts(counts: list[pa.Table]) -> pa.Table:
    """The sum of counts of words."""
    joined = pa.concat_tables(counts)
    different = joined["word"].combine_chunks().dictionary_encode()  # several times as fast as Arrow's group_by
    sums = np.bincount(different.indices.to_numpy(), joined["count"].to_numpy(), len(different.dictionary))
    return pa.table([different.dictionary, sums.astype(np.int64)], schema=words.COUNTS)


def sum_counts(counts: Iterable[pa.Table]) -> pa.Table:
    """The same of any number, with at most as many rows waiting as there are different words, or SUMMED_AT_ONCE."""
    total = words.COUNTS.empty_table()
    waiting: list[pa.Table] = []
    for table in counts:
        waiting.append(table)
        if sum(map(len, waiting)) > max(len(total), SUMMED_AT_ONCE):
            total = add_counts([total, *waiting])
            waiting = []
    return add_counts([total, *waiting])


def write_counts(counts: pa.Table, out: Path) -> None:
    """Write counts in BEGINNINGS batches by the first byte of words: all words of one come before those of the next."""
    beginnings = np.zeros(0, dtype=np.uint8)
    if len(counts):
        data, edges = words.in_buffers(counts["word"].combine_chunks())
        beginnings = np.frombuffer(data, dtype=np.uint8)[edges[:-1]] >> 2
    ordered = counts.take(np.argsort(beginnings, kind="stable")).combine_chunks()
    sizes = np.bincount(beginnings, minlength=BEGINNINGS).tolist()
    options = pa.ipc.IpcWriteOptions(compression="lz4")
    with pa.ipc.new_file(out, words.COUNTS, options=options) as file:
        start = 0
        for size in sizes:
            batches = ordered.slice(start, size).to_batches()
            (batch,) = batches or [pa.RecordBatch.from_pylist([], words.COUNTS)]
            file.write_batch(batch)
            start += size


def count_batch(batch: list[Path], fraction: float, how: Normaliser, out: Path) -> dict[str, int]:
    """Write the counts of the words in a fraction of the documents of some parts, always the same ones."""
    used = {"documents": 0, "characters": 0}

    def counts() -> Iterator[pa.Table]:
        for part in batch:
            for table in tables(part, ("text",)):
                texts = table["text"].to_pylist()
                if fraction < 1:
                    texts = [text for text in texts if unit_hash(text, Salt.TRAIN_VOCABULARY) < fraction]
                used["documents"] += len(texts)
                used["characters"] += sum(map(len, texts))
                yield from count_portions(texts, how)

    write_counts(sum_counts(counts()), out)
    return used


def count_sample(
    corpus: Artifact, megabytes: float, work: Path, label: str, how: Normaliser = ASCII
) -> tuple[pa.Table, dict[str, int]]:
    """How often each word occurs in a sample of about so much text, 10^6 characters; and the size of the sample.

    The words are in order. Those with one beginning are summed at a time, which takes a tenth of the memory of all.
    """
    fraction = 1e6 * megabytes / max(1, corpus.stats["characters"])
    batches = in_batches(parts_of(corpus))
    files = [work / f"{number:05d}.words.arrow" for number in range(len(batches))]
    jobs = [(batch, fraction, how, file) for batch, file in zip(batches, files, strict=True)]
    used = over_parts(count_batch, jobs, work / "counted", label)

    def beginning(number: int) -> Iterator[pa.Table]:
        for path in files:
            with pa.ipc.open_file(path) as file:
                yield pa.Table.from_batches([file.get_batch(number)])

    counts = pa.concat_tables(sum_counts(beginning(number)).sort_by("word") for number in range(BEGINNINGS))
    return counts, {name: sum(of_batch[name] for of_batch in used) for name in ("documents", "characters")}


def total_of(counts: pa.Table) -> int:
    """How many words were counted."""
    return pc.sum(counts["count"]).as_py() or 0


def training_lines(counts: pa.Table) -> Iterator[str]:
    """The words, each as often as it was counted, a line at a time; scaled down to TRAINING_WORDS if there are more.

    The word's digest decides whether its count is rounded up or down, so that rare words keep their share of the total.
    counts: in the order of words, so that a vocabulary does not depend on the order of texts.
    """
    scale = min(1.0, TRAINING_WORDS / max(1, total_of(counts)))

    def every() -> Iterator[str]:
        for start in range(0, len(counts), FED_AT_ONCE):
            some = counts.slice(start, FED_AT_ONCE)
            different = some["word"].to_pylist()
            digests = np.fromiter(map(unit_hash, different), np.float64, len(different))
            rounded = some["count"].to_numpy() * scale + digests
            repeated = map(repeat, different, rounded.astype(np.int64).tolist())
            yield from chain.from_iterable(repeated)

    all_words = every()
    line = list(islice(all_words, LINE_WORDS))
    while line:
        yield " ".join(line)
        line = list(islice(all_words, LINE_WORDS))


def characters_of(counts: pa.Table) -> np.ndarray:
    """(2, 0x110000): how often each character occurs within the counted words, and at their beginnings."""
    times = np.zeros(2 * CODES, dtype=np.int64)
    for start in range(0, len(counts), KNOWN_WORDS):
        some = counts.slice(start, KNOWN_WORDS)
        text = "".join(some["word"].to_pylist())
        places = np.frombuffer(text.encode("utf-32-le"), dtype=np.int32).copy()
        lengths = pc.utf8_length(some["word"]).to_numpy()
        beginnings = np.cumsum(lengths) - lengths
        places[beginnings] += CODES
        weights = np.repeat(some["count"].to_numpy(), lengths)
        times += np.bincount(places, weights, len(times)).astype(np.int64)
    return times.reshape(2, CODES)


class Alphabet(NamedTuple):
    """The characters with their own entries, in order."""

    within: list[str]  # words
    begin: list[str]  # words

    @property
    def all(self) -> list[str]:
        """Those within words and those that begin them."""
        return sorted({*self.within, *self.begin})


def alphabet_of(counts: pa.Table, entries: int, how: Normaliser) -> Alphabet:
    """The characters that get entries: within words, and as the beginnings of words, where they occur there.

    All of ASCII that the normaliser leaves, and the most frequent others, until they take half of the entries.
    """
    plain = [*ALPHABET]
    if not how.lowercase:
        plain += string.ascii_uppercase
    if how.characters == "ascii":
        return Alphabet(plain, plain)
    times = characters_of(counts)
    times[:, :128] = 0
    total = times.sum(axis=0)
    order = np.argsort(-total, kind="stable")[: how.alphabet]
    entries_so_far = np.cumsum((times[:, order] > 0).sum(axis=0))
    fits = entries_so_far <= entries // 2 - 2 * len(plain)
    chosen = order[fits & (total[order] >= MIN_FREQUENCY)]

    def with_plain(occurrences: np.ndarray) -> list[str]:
        return sorted([*plain, *map(chr, chosen[occurrences[chosen] > 0].tolist())])

    within, begin = times
    return Alphabet(with_plain(within), with_plain(begin))


def readable(counts: pa.Table, alphabet: Alphabet) -> pa.Table:
    """The counts of words of these characters: the trainer passes over others, and would learn of what is left."""
    letters = "".join(f"\\x{{{ord(character):x}}}" for character in alphabet.all)
    return counts.filter(pc.match_substring_regex(counts["word"], f"^[{letters}]*$"))


def learn_entries(counts: pa.Table, size: int, alphabet: Alphabet) -> dict[str, int]:
    """Train on counted words; returns at most that many entries with their ids.

    The trainer breaks ties by the order in which it first sees the characters within words, which differs from run to
    run. So these characters get ids beforehand, as special tokens. Nothing depends on the number of threads.
    """

    def lines() -> Iterator[str]:  # several threads count the words in them
        yield from training_lines(counts)
        one_library_thread()  # the merges are too little work for more

    learner = Tokenizer(WordPiece(unk_token="[UNK]"))
    learner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    trainer = WordPieceTrainer(
        vocab_size=size,
        min_frequency=MIN_FREQUENCY,
        special_tokens=[*SPECIALS, *(CONTINUES + character for character in alphabet.within)],
        initial_alphabet=alphabet.all,
        limit_alphabet=len(alphabet.all),
        show_progress=False,
    )
    with library_threads():
        learner.train_from_iterator(lines(), trainer)
    return json.loads(learner.to_str())["model"]["vocab"]


def train_wordpiece(counts: pa.Table, entries: int, how: Normaliser = ASCII) -> Tokenizer:
    """Train a vocabulary of at most that many entries on counted words.

    The trainer takes no character that isn't in its alphabet as the beginning of a word: those that only occur within
    words are dropped from its entries.
    """
    alphabet = alphabet_of(counts, entries, how)
    unused = set(alphabet.all) - set(alphabet.begin)
    if how.characters == "unicode":
        counts = readable(counts, alphabet)
    learned = learn_entries(counts, entries + len(unused), alphabet)
    if unused:
        used = [entry for entry in sorted(learned, key=learned.__getitem__) if entry not in unused]
        learned = {entry: number for number, entry in enumerate(used)}
    tokenizer = tokenizer_of(WordPiece(learned, unk_token="[UNK]", max_input_chars_per_word=LONGEST_WORD), how)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    return tokenizer


def kind_of(entry: str) -> str:
    """What an entry consists of: one of KINDS."""
    text = entry.removeprefix(CONTINUES) or entry
    if not text.isascii():  # vowel signs and accents are letters
        text = "".join("a" if unicodedata.category(character)[0] == "M" else character for character in text)
    if entry in SPECIALS:
        return "special"
    if text.isalpha():
        return "letters"
    if text.isdigit():
        return "digits"
    return "mixed" if any(map(str.isalnum, text)) else "punctuation"


Divisions = Iterator[tuple[pa.RecordBatch, tuple[np.ndarray, np.ndarray]]]


def divide_by_cram(tokenizer: Tokenizer, counts: pa.Table) -> Divisions:
    """Some of the counted words at a time; the ids of their tokens, one word after the other, and how many each has."""
    pieces = WordPieces(tokenizer.get_vocab())
    for batch in counts.to_batches(KNOWN_WORDS):
        data, edges = words.in_buffers(batch["word"])
        ids, lengths = pieces.divide(data, edges[:-1], edges[1:])
        yield batch, (np.where(ids == NONE, UNK, ids), lengths)


def divide_by_library(tokenizer: Tokenizer, counts: pa.Table) -> Divisions:
    """The same for another program's tokenizer."""
    encoder = LibraryEncoder(tokenizer)
    for batch in counts.to_batches(FED_AT_ONCE):
        ids, ends = encoder(batch["word"].to_pylist())
        yield batch, (ids, np.diff(ends, prepend=0))


def entries_table(tokenizer: Tokenizer, counts: pa.Table) -> pa.Table:
    """Every entry with its kind, and how often it occurs in the counted words."""
    number_of = tokenizer.get_vocab()
    entries = sorted(number_of, key=number_of.__getitem__)
    divide = divide_by_cram if is_trained_here(tokenizer) else divide_by_library
    times = np.zeros(len(entries), dtype=np.int64)
    for batch, (ids, lengths) in divide(tokenizer, counts):
        weights = np.repeat(batch["count"].to_numpy(), lengths)
        times += np.bincount(ids, weights, len(times)).astype(np.int64)
    kinds = [kind_of(entry) for entry in entries]
    return pa.table({"id": range(len(entries)), "entry": entries, "kind": kinds, "occurrences": times})


def unused_entries(used: pa.Table) -> int:
    """How many entries occur nowhere, without special ones, of which [UNK] may occur."""
    is_special = pc.equal(used["kind"], "special")
    is_unused = pc.equal(used["occurrences"], 0)
    return pc.sum(pc.and_not(is_unused, is_special)).as_py()


def kinds_table(used: pa.Table) -> list[dict[str, object]]:
    """The entries as a table, a row for each kind: how many, how many are rare, and their share of all tokens."""
    kinds = np.array(used["kind"].to_pylist())
    occurrences = used["occurrences"].to_numpy()
    total = max(1, int(occurrences.sum()))
    table: list[dict[str, object]] = []
    for kind in KINDS:
        times = occurrences[kinds == kind]
        table.append(
            {
                "kind": kind,
                "entries": len(times),
                "unused": int((times == 0).sum()),
                "in fewer than 100 places": int((times < 100).sum()),
                "% of tokens": round(100 * int(times.sum()) / total, 2),
            }
        )
    return table


def check_size(size: int, params: Vocabulary, counts: pa.Table, used: dict[str, int]) -> None:
    """Raise InputError if a vocabulary has not as many entries as asked for. `used`: the size of the sample."""
    if size == params.entries:
        return
    read = pc.sum(pc.multiply(pc.utf8_length(counts["word"]), counts["count"])).as_py() or 0
    raise InputError(
        f"The corpus of {used['characters']:,} characters yields a vocabulary of {size:,} entries; {params.entries:,} "
        f"were asked for. It reads {read:,} of the characters, in words of at most {LONGEST_WORD}. Download more text, "
        "drop less of it (cram show filter), divide longer words, or lower vocabulary.entries, to "
        f"{FEWEST_ENTRIES} at the least."
    )


@stage(version=3, resumes=True)
def vocabulary(params: Vocabulary, corpus: Artifact, out: Path) -> dict:
    """Train the vocabulary, or take a model's. Raises InputError if it has not as many entries as asked for."""
    how = params.normaliser()
    counts, used = count_sample(corpus, params.sample_megabytes, out / WORK, "count words", how)
    if params.start:
        first = adopt.find_model(params.start).path
        tokenizer = load_tokenizer(first)
    else:
        tokenizer = train_wordpiece(counts, params.entries, how)
    size = tokenizer.get_vocab_size()
    check_size(size, params, counts, used)
    if is_trained_here(tokenizer):
        save_tokenizer(tokenizer, out)
    else:
        copy_files(first, out)
    entries = entries_table(tokenizer, counts)
    pq.write_table(entries, out / "entries.parquet", compression="zstd")
    continuations = sum(entry.startswith(CONTINUES) for entry in entries["entry"].to_pylist())
    return {
        "entries": size,
        "whole_words": size - len(SPECIALS) - continuations,
        "continuations": continuations,
        "unused": unused_entries(entries),
        "trained_on": {**used, "words": total_of(counts), "different_words": len(counts)},
        "table": kinds_table(entries),
    }
