"""Vocabulary: WordPiece, BPE or Unigram, trained from scratch on the corpus; the same bytes from the same corpus every time.

Reads   the parts of a corpus.
Writes  tokenizer.json and tokenizer_config.json, which transformers.AutoTokenizer loads
        entries.parquet   id, entry, kind, and how often it occurs in the text it was trained on
"""

import functools
import json
import shutil
import string
import threading
from collections.abc import Iterable, Iterator
from io import BytesIO
from itertools import chain, islice, pairwise, repeat
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import xxhash
from pydantic import Field, model_validator
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE, Unigram, WordPiece
from tokenizers.trainers import BpeTrainer, WordPieceTrainer

from model import InputError
from tasks.corpus import parts
from tasks.download import batches
from tasks.stage import WORK, Artifact, Params, stage
from tasks.text import words
from tasks.workers.pool import library_threads, one_library_thread, over_parts

SPECIALS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")  # their ids are their places
PAD, UNK, CLS, SEP, MASK = range(len(SPECIALS))
FILES = ("tokenizer.json", "tokenizer_config.json")
# what the normaliser leaves, but for white space: printable ASCII without capitals
ALPHABET = sorted(set(string.printable) - set(string.whitespace) - set(string.ascii_uppercase))
LONGEST_WORD = 100  # characters; WordPiece makes a longer one [UNK], as in BERT, and none is trained on
LONGEST_DIVIDED = (
    100_000  # BPE and Unigram divide longer ones too, but in a hundred times their memory: they are not given them
)
UNWRITTEN = "\N{REPLACEMENT CHARACTER}"  # a word that no vocabulary here has
WORD_START = "▁"  # what Unigram marks the beginning of a word with, as SentencePiece does
TRAINING_WORDS = 8_000_000  # the trainers read every word as often as it occurs, so the counts are scaled down to this
LINE_WORDS = 1000  # given to a trainer at once; SentencePiece skips lines of more than a megabyte
PIECE_CHARACTERS = 4_000_000  # of text split at once: it takes ten times its size in memory
LEARNED_AT_ONCE = 1 << 16  # words; dividing one takes some hundred bytes
DIVIDED_AT_ONCE = 1 << 12  # words, in one of some threads
BATCHES_AT_ONCE = 32  # of so many words each
KNOWN_WORDS = 1 << 20  # the encoder forgets all when it has met so many: about 200 MB
DIGEST_RANGE = 2**64
Model = Literal["wordpiece", "bpe", "unigram"]


class Vocabulary(Params):
    """The vocabulary (section 4.1)."""

    model: Model = Field("wordpiece", description="How a word is divided: the paper found all three alike.")
    entries: int = Field(
        32_768, ge=256, le=131_072, description="With special tokens. Ids are stored in 16 bits up to 65,536."
    )
    sample_megabytes: float = Field(
        1000, gt=0, description="Train on the words of so much text, 10^6 characters; of more, a fixed sample is taken."
    )
    min_frequency: int = Field(
        2, ge=1, description="Pairs seen less often are not merged (wordpiece, bpe), in eight million words."
    )

    @model_validator(mode="after")
    def _no_idle_setting(self) -> "Vocabulary":
        if self.model == "unigram" and self.min_frequency != 2:
            raise ValueError("min_frequency has no meaning for the model unigram, which merges nothing: leave it out")
        return self


def normalizer() -> normalizers.Normalizer:
    """The reference's: plain quotes, no accents, lower case, printable ASCII only."""
    return normalizers.Sequence(
        [
            normalizers.Replace("``", '"'),
            normalizers.Replace("''", '"'),
            normalizers.NFD(),
            normalizers.Lowercase(),
            normalizers.StripAccents(),
            normalizers.Replace(Regex(r"[^\x09-\x0d\x20-\x7e]+"), ""),
        ]
    )


def marking(model: object) -> list[pre_tokenizers.PreTokenizer]:
    """What a model wants done to a word before it divides it."""
    return [pre_tokenizers.Metaspace(WORD_START, "always", split=False)] if isinstance(model, Unigram) else []


def tokenizer_of(model: WordPiece | BPE | Unigram) -> Tokenizer:
    """The tokenizer around a model: words and runs of punctuation, each divided; [CLS] A [SEP] B [SEP]."""
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Whitespace(), *marking(model)])
    tokenizer.decoder = decoders.Metaspace(WORD_START) if isinstance(model, Unigram) else decoders.WordPiece()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B [SEP]",
        special_tokens=[("[CLS]", CLS), ("[SEP]", SEP)],
    )
    return tokenizer


def scaled(counts: pa.Table) -> Iterator[str]:
    """The words, each as often as it was counted, a line at a time; scaled down where that is more than TRAINING_WORDS.

    A count is rounded up or down by the word's digest, so that rare words keep their share among all of them.
    """
    ranked = counts.sort_by("word")
    found, numbers = ranked["word"].to_pylist(), ranked["count"].to_numpy()
    scale = min(1.0, TRAINING_WORDS / max(1, numbers.sum()))
    times = (numbers * scale + np.fromiter(map(share, found), np.float64, len(found))).astype(np.int64)
    all_words = chain.from_iterable(map(repeat, found, times.tolist()))
    while line := list(islice(all_words, LINE_WORDS)):
        yield " ".join(line)


def train(counts: pa.Table, entries: int, min_frequency: int = 2, kind: Model = "wordpiece") -> Tokenizer:
    """Train a vocabulary of at most so many entries on counted words."""
    model = _unigram(counts, entries) if kind == "unigram" else _merged(counts, entries, min_frequency, kind)
    tokenizer = tokenizer_of(model)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    return tokenizer


def _merged(counts: pa.Table, entries: int, min_frequency: int, kind: Model) -> WordPiece | BPE:
    """WordPiece and BPE, which are trained alike: the most frequent pair becomes an entry, again and again.

    The trainer breaks ties by the order in which it meets the characters within words, which differs from run to
    run; so these are given ids beforehand, as if they were special tokens, and made plain entries afterwards.
    Nothing depends on the number of threads.
    """

    def lines() -> Iterator[str]:  # to be read by several threads, which count the words in them
        yield from scaled(counts)
        one_library_thread()  # for the merges: each is too little work for more

    wordpiece = kind == "wordpiece"
    learner = Tokenizer(WordPiece(unk_token="[UNK]") if wordpiece else BPE(unk_token="[UNK]"))
    learner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    trainer = (WordPieceTrainer if wordpiece else BpeTrainer)(
        vocab_size=entries,
        min_frequency=min_frequency,
        special_tokens=[*SPECIALS, *(f"##{c}" for c in ALPHABET)],
        initial_alphabet=ALPHABET,
        limit_alphabet=len(ALPHABET),
        continuing_subword_prefix="##",
        show_progress=False,
    )
    with library_threads():
        learner.train_from_iterator(lines(), trainer)
    learned = json.loads(learner.to_str())["model"]
    if wordpiece:
        return WordPiece(learned["vocab"], unk_token="[UNK]", max_input_chars_per_word=LONGEST_WORD)
    merges = [tuple(pair) for pair in learned["merges"]]
    return BPE(learned["vocab"], merges, unk_token="[UNK]", continuing_subword_prefix="##")


def _unigram(counts: pa.Table, entries: int) -> Unigram:
    """Unigram, trained by SentencePiece: that of tokenizers gives other scores, and other ties, in every run."""
    from sentencepiece import SentencePieceProcessor, SentencePieceTrainer

    learned = BytesIO()
    try:
        SentencePieceTrainer.train(
            sentence_iterator=scaled(counts),
            model_writer=learned,
            model_type="unigram",
            vocab_size=entries - len(SPECIALS) + 3,  # its own <unk>, <s> and </s> give way to ours
            hard_vocab_limit=False,
            normalization_rule_name="identity",
            required_chars="".join(ALPHABET),
            character_coverage=1.0,
            max_sentence_length=1 << 20,
            num_threads=1,  # sums don't depend on how many there are
            minloglevel=2,
        )
    except RuntimeError as error:  # too few words for anything
        raise InputError(
            f"No Unigram vocabulary of {entries:,} entries can be trained on this text: {error}"
        ) from error
    found = SentencePieceProcessor(model_proto=learned.getvalue())
    scored = [(found.id_to_piece(i), found.get_score(i)) for i in range(3, found.get_piece_size())]
    return Unigram([*((token, 0.0) for token in SPECIALS), *scored], unk_id=UNK)


def save(tokenizer: Tokenizer, folder: Path) -> None:
    """Write it as transformers expects it."""
    (folder / FILES[0]).write_text(tokenizer.to_str(pretty=True))
    names = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), SPECIALS, strict=True))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **names}
    config |= {"model_input_names": ["input_ids", "attention_mask"]}
    (folder / FILES[1]).write_text(json.dumps(config, indent=2) + "\n")


def copy(source: Path, folder: Path, length: int) -> None:
    """Copy it for models that take so many tokens."""
    shutil.copyfile(source / FILES[0], folder / FILES[0])
    config = json.loads((source / FILES[1]).read_text()) | {"model_max_length": length}
    (folder / FILES[1]).write_text(json.dumps(config, indent=2) + "\n")


def load(folder: Path) -> Tokenizer:
    """Read it for raw text: a literal [MASK] in a document is text, not the special token."""
    try:
        tokenizer = Tokenizer.from_file(str(folder / FILES[0]))
    except Exception as error:  # tokenizers raises plain Exception
        raise InputError(f"{folder / FILES[0]} is no tokenizer: {error}. Run its stage again.") from error
    tokenizer.encode_special_tokens = True
    return tokenizer


def pieces(text: str) -> Iterator[str]:
    """A long text in pieces of some million characters, cut at white space, so that its words stay the same."""
    start = 0
    while len(text) - start > PIECE_CHARACTERS:
        ends = [end for end in (text.find(c, start + PIECE_CHARACTERS) for c in " \n\t") if end >= 0]
        end = min(ends, default=len(text))
        yield text[start:end]
        start = end
    yield text[start:]


class Encoded(NamedTuple):
    """The ids of some texts, one after the other: those of text i are `ids[ends[i - 1]:ends[i]]`."""

    ids: np.ndarray  # (tokens,) uint16, or uint32 for more than 65,536 entries
    ends: np.ndarray  # (texts,) int64


class Encoder:
    """Encodes texts as the tokenizer does, without special tokens, but every different word only once.

    A word's tokens don't depend on what stands around it, so this is exact, and several times as fast. A word of more than
    LONGEST_DIVIDED characters is [UNK] in every model.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.words = Tokenizer(tokenizer.model)  # divides words; nothing in them is normalised or special
        self.words.pre_tokenizer = pre_tokenizers.Sequence(marking(tokenizer.model))
        self.type = np.uint16 if tokenizer.get_vocab_size() <= 1 << 16 else np.uint32
        self.forget()

    def forget(self) -> None:
        """Begin with no words."""
        self.places: dict[str, int] = {}
        self.lengths, self.starts, self.ids = np.zeros(0, np.int32), np.zeros(0, np.int64), np.zeros(0, self.type)

    def known(self, different: list[str]) -> np.ndarray:
        """The place of each word among those known, having learned the new ones."""
        if len(self.places) > KNOWN_WORDS:
            self.forget()
        places = np.fromiter(map(self.places.get, different, repeat(-1)), np.int64, len(different))
        unknown = np.flatnonzero(places < 0)
        places[unknown] = np.arange(len(unknown)) + len(self.places)
        new = [different[i] for i in unknown.tolist()]
        for start in range(0, len(new), LEARNED_AT_ONCE):
            self._learn(new[start : start + LEARNED_AT_ONCE])
        return places

    def _learn(self, new: list[str]) -> None:
        divided = [word if len(word) <= LONGEST_DIVIDED else UNWRITTEN for word in new]
        encoding = self.words.encode(divided, is_pretokenized=True, add_special_tokens=False)
        lengths = np.bincount(np.array(encoding.word_ids, dtype=np.int64), minlength=len(new)).astype(np.int32)
        starts = np.cumsum(lengths, dtype=np.int64) - lengths + len(self.ids)
        self.places.update(zip(new, range(len(self.places), len(self.places) + len(new)), strict=True))
        self.lengths, self.starts = np.append(self.lengths, lengths), np.append(self.starts, starts)
        self.ids = np.append(self.ids, np.array(encoding.ids, dtype=self.type))

    def __call__(self, texts: list[str]) -> Encoded:
        """The ids of the texts."""
        ids, ends, before = [], [], 0
        for some, last in portions(texts):
            found = words.split(some)
            places = self.known(found.different)
            counts = self.lengths[places][found.indices]
            word_ends = np.cumsum(counts, dtype=np.int64)
            shift = self.starts[places][found.indices] - (
                word_ends - counts
            )  # from a token's place here to that in self.ids
            ids.append(self.ids[np.repeat(shift, counts) + np.arange(len(shift) and word_ends[-1])])
            ends.append(np.append(0, word_ends)[found.ends][last] + before)
            before += len(ids[-1])
        return Encoded(np.concatenate(ids), np.concatenate(ends))

    def tokens(self, texts: list[str]) -> np.ndarray:
        """(texts,) how many tokens each text has; a word of more than LONGEST_WORD characters counts as its characters."""
        ends, before = [], 0
        for some, last in portions(texts):
            found = words.split(some)
            letters = np.fromiter(map(len, found.different), np.int64, len(found.different))
            places = self.known(found.different)
            costs = np.where(letters > LONGEST_WORD, letters, self.lengths[places])
            sums = np.append(0, np.cumsum(costs[found.indices]))
            ends.append(sums[found.ends][last] + before)
            before += int(sums[-1])
        return np.diff(np.concatenate(ends), prepend=0)


def encoder_of(folder: Path) -> Encoder:
    """The encoder of a vocabulary. A worker goes on with the same one from part to part, since it knows most words by then."""
    about = (folder / FILES[0]).stat()
    return _encoder(folder, about.st_mtime_ns, about.st_ino, threading.get_ident())


@functools.lru_cache(maxsize=1)
def _encoder(folder: Path, *_: int) -> Encoder:
    return Encoder(load(folder))


def portions(texts: list[str]) -> Iterator[tuple[list[str], np.ndarray]]:
    """The texts, long ones in pieces, some million characters at a time; and which of them end a text."""
    some, last, size = [], [], 0
    for text in texts:
        for piece in pieces(text):
            if some and size + len(piece) > PIECE_CHARACTERS:
                yield some, np.array(last)
                some, last, size = [], [], 0
            some.append(piece)
            last.append(False)
            size += len(piece)
        last[-1] = True
    yield some, np.array(last, dtype=bool)


def share(text: str, salt: int = 0) -> float:
    """A number in [0, 1) that depends on the text alone: below p for a fraction p of all texts."""
    return xxhash.xxh3_64_intdigest(text.encode(errors="surrogatepass"), seed=salt) / DIGEST_RANGE


def count_words(texts: list[str]) -> pa.Table:
    """How often each word that is not too long occurs in the texts: words.COUNTS."""
    found = pa.concat_tables(words.count(some) for some, _ in portions(texts))
    return summed([found.filter(pc.less_equal(pc.binary_length(found["word"]), LONGEST_WORD))])


def summed(counts: Iterable[pa.Table]) -> pa.Table:
    """The sum of counts of words."""
    found = pa.concat_tables([words.COUNTS.empty_table(), *counts])
    different = found["word"].combine_chunks().dictionary_encode()  # several times as fast as Arrow's group_by
    sums = np.bincount(different.indices.to_numpy(), found["count"].to_numpy(), len(different.dictionary))
    return pa.table([different.dictionary, sums.astype(np.int64)], schema=words.COUNTS)


def count_part(part: Path, fraction: float, out: Path) -> dict:
    """Count the words of a fraction of a part's documents: always the same ones."""
    counts, used = [], {"documents": 0, "characters": 0}
    for batch in batches(part):
        texts = [d.text for d in batch if fraction >= 1 or share(d.text, salt=1) < fraction]
        used["documents"] += len(texts)
        used["characters"] += sum(map(len, texts))
        counts.append(count_words(texts))
    pq.write_table(summed(counts), out, compression="zstd")
    return used


def count(corpus: Artifact, megabytes: float, work: Path, label: str) -> tuple[pa.Table, dict]:
    """How often each word occurs in about so much text, 10^6 characters; and how much that was."""
    fraction = 1e6 * megabytes / max(1, corpus.stats["characters"])
    work.mkdir(exist_ok=True)
    jobs = [(part, fraction, work / f"{part.stem}.words.parquet") for part in parts(corpus)]
    used = over_parts(count_part, jobs, work / "counted", label)
    counts = summed(pq.read_table(file, schema=words.COUNTS) for _, _, file in jobs)
    return counts, {name: sum(u[name] for u in used) for name in ("documents", "characters")}


def inner(entry: str) -> str:
    """The characters of an entry, without the mark that it begins or continues a word."""
    return entry.removeprefix("##").removeprefix(WORD_START) or entry


def kind_of(entry: str) -> str:
    """What an entry consists of: letters, digits, punctuation, or several of these."""
    text = inner(entry)
    if entry in SPECIALS:
        return "special"
    if text.isalpha():
        return "letters"
    if text.isdigit():
        return "digits"
    return "mixed" if any(map(str.isalnum, text)) else "punctuation"


def usage(tokenizer: Tokenizer, counts: pa.Table) -> pa.Table:
    """Every entry with its kind, and how often it occurs in the words that were counted."""
    ranked, divider = counts.sort_by("count"), Encoder(tokenizer).words
    found, numbers = ranked["word"].to_pylist(), ranked["count"].to_numpy()
    # words that occur as often are divided together
    starts = np.union1d(np.flatnonzero(np.diff(numbers, prepend=0)), np.arange(0, len(found), DIVIDED_AT_ONCE))
    batches = list(pairwise([*starts.tolist(), len(found)]))
    times = np.zeros(tokenizer.get_vocab_size(), dtype=np.int64)
    with library_threads():
        for i in range(0, len(batches), BATCHES_AT_ONCE):
            some = batches[i : i + BATCHES_AT_ONCE]
            given = [found[start:end] for start, end in some]
            divided = divider.encode_batch_fast(given, is_pretokenized=True, add_special_tokens=False)
            ids = [np.array(encoding.ids, dtype=np.int64) for encoding in divided]
            weights = np.repeat([numbers[start] for start, _ in some], [len(of_batch) for of_batch in ids])
            times += np.bincount(np.concatenate(ids), weights, len(times)).astype(np.int64)
    entries = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    return pa.table(
        {
            "id": [place for _, place in entries],
            "entry": [entry for entry, _ in entries],
            "kind": [kind_of(entry) for entry, _ in entries],
            "occurrences": times,
        }
    )


def rows(used: pa.Table) -> list[dict]:
    """Entries by kind as a table: how many, how many of these hardly occur, and their share of all tokens."""
    entries, total = used.to_pylist(), max(1, sum(used["occurrences"].to_pylist()))
    found = []
    for kind in dict.fromkeys(("letters", "mixed", "digits", "punctuation", "special")):
        times = [e["occurrences"] for e in entries if e["kind"] == kind]
        found.append(
            {
                "kind": kind,
                "entries": len(times),
                "unused": sum(n == 0 for n in times),
                "in fewer than 100 places": sum(n < 100 for n in times),
                "% of tokens": round(100 * sum(times) / total, 2),
            }
        )
    return found


@stage(version=3, resumes=True, name="vocabulary")
def train_vocabulary(params: Vocabulary, corpus: Artifact, out: Path) -> dict:
    """Train the vocabulary; fails if the text doesn't give as many entries as asked for."""
    if not corpus.stats["characters"]:
        raise InputError(
            "There is no text left to make a vocabulary of: the stages before (deduplicate, decontaminate, filter) dropped all of it. "
            "Look at what they dropped (cram show filter), and drop less."
        )
    counts, used = count(corpus, params.sample_megabytes, out / WORK, "count words")
    tokenizer = train(counts, params.entries, params.min_frequency, params.model)
    found = tokenizer.get_vocab_size()
    if found != params.entries:
        raise InputError(
            f"The corpus of {used['characters']:,} characters gives a vocabulary of {found:,} entries; "
            f"{params.entries:,} were asked for. Give more text (download), or lower vocabulary.entries."
        )
    save(tokenizer, out)
    entries = usage(tokenizer, counts)
    pq.write_table(entries, out / "entries.parquet", compression="zstd")
    names = [name for name in entries["entry"].to_pylist() if name not in SPECIALS]
    starts = [
        name for name in names if (name.startswith(WORD_START) if params.model == "unigram" else name[:2] != "##")
    ]
    return {
        "entries": found,
        "whole_words": len(starts),
        "continuations": len(names) - len(starts),
        "unused": sum(n == 0 for n in entries["occurrences"].to_pylist()) - len(SPECIALS),
        "trained_on": used | {"words": pc.sum(counts["count"]).as_py() or 0, "different_words": len(counts)},
        "table": rows(entries),
    }
