"""Text to tokens: the tokenizer of a vocabulary, a fast encoder of many documents, and the words of held-out text.

The tokenizer's files are those that transformers.AutoTokenizer loads.
"""

import functools
import json
import re
import shutil
import string
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pyarrow as pa
import regex
from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import WordPiece

from model.errors import InputError
from tasks.text import words
from tasks.text.wordpiece import CONTINUES, LONGEST_WORD, NONE, WordPieces
from tasks.text.words import ASCII, Normaliser

if TYPE_CHECKING:
    from model.heldout import Heldout

SPECIALS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")  # their ids are their places
PAD, UNK, CLS, SEP, MASK = range(len(SPECIALS))
FILES = ("tokenizer.json", "tokenizer_config.json")
# the characters that the normaliser keeps, except white space: printable ASCII without capitals
ALPHABET = sorted(set(string.printable) - set(string.whitespace) - set(string.ascii_uppercase))
PIECE_CHARACTERS = 4_000_000  # of text split at once, which takes ten times their memory
KNOWN_WORDS, SLOT_BITS = 1 << 20, 22  # at so many the encoder forgets all words: about 70 MB
# A word is what lies between white space and punctuation, or a run of punctuation; no token reaches beyond one. `_` is
# a letter, as for the tokenizer. Ideographs are words by themselves, as in BERT, since no space divides them.
ALONE, MARKS = r"\p{Han}", r"[\p{P}\p{S}--[_\p{Han}]]"
WORD = regex.compile(rf"[{ALONE}]|{MARKS}+|[^\s{ALONE}{MARKS}]+", regex.V1)
CUT = regex.compile(rf"[ \n\t{ALONE}]")


def normalizer(how: Normaliser = ASCII) -> normalizers.Normalizer:
    """The release's: plain quotes, no accents, lower case, printable ASCII only. For Unicode as `how` says."""
    steps = [normalizers.Replace(Regex(f"[{some}]"), to) for some, to in words.PLAIN.items()]
    steps *= how.punctuation == "plain"
    if how.characters == "unicode":
        steps += [getattr(normalizers, how.form)()]
        steps += [normalizers.Lowercase()] * how.lowercase
        steps += [normalizers.NFD(), normalizers.StripAccents(), normalizers.NFC()] * how.strip_accents
        return normalizers.Sequence([*steps, normalizers.Replace(Regex(words.GONE), "")])
    return normalizers.Sequence(
        [
            *steps,
            normalizers.Replace("``", '"'),
            normalizers.Replace("''", '"'),
            normalizers.NFD(),
            normalizers.Lowercase(),
            normalizers.StripAccents(),
            normalizers.Replace(Regex(r"[^\x09-\x0d\x20-\x7e]+"), ""),
        ]
    )


def pre_tokenizer(how: Normaliser = ASCII) -> pre_tokenizers.PreTokenizer:
    """What divides normalised text at white space and punctuation; in Unicode also at ideographs, each a word."""
    if how.characters == "ascii":
        return pre_tokenizers.Sequence([pre_tokenizers.Whitespace()])
    marks = Regex(f"{words.IDEOGRAPHS}|{words.SIGNS}+")
    return pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Split(marks, "isolated")])


def tokenizer_of(model: WordPiece, how: Normaliser = ASCII) -> Tokenizer:
    """The tokenizer of a vocabulary: it splits text at white space and punctuation; [CLS] A [SEP] B [SEP]."""
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizer(how)
    tokenizer.pre_tokenizer = pre_tokenizer(how)
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B [SEP]",
        special_tokens=[("[CLS]", CLS), ("[SEP]", SEP)],
    )
    return tokenizer


def normaliser_of(tokenizer: Tokenizer) -> Normaliser:
    """What a tokenizer of `tokenizer_of` was made with, but for its alphabet. Raises InputError for any other."""
    names, settings = re.findall(r'"type":\s*"(\w+)"', str(tokenizer.normalizer.__getstate__())), {}
    if forms := [name for name in names if name in ("NFKC", "NFC")]:
        settings = {"characters": "unicode", "form": forms[0], "lowercase": "Lowercase" in names}
        settings["strip_accents"] = "StripAccents" in names
    how = Normaliser(**settings, punctuation="plain" if names.count("Replace") > len(words.PLAIN) else "raw")
    ours = normalizer(how), pre_tokenizer(how)
    model = tokenizer.model
    rules = getattr(model, "continuing_subword_prefix", None), getattr(model, "max_input_chars_per_word", None)
    for theirs, own in zip((tokenizer.normalizer, tokenizer.pre_tokenizer), ours, strict=True):
        if theirs is None or theirs.__getstate__() != own.__getstate__() or rules != (CONTINUES, LONGEST_WORD):
            raise InputError("The tokenizer is no vocabulary of cram: it normalises or divides text in another way.")
    return how


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write the files that transformers expects."""
    (folder / FILES[0]).write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    names = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), SPECIALS, strict=True))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **names}
    config |= {"model_input_names": ["input_ids", "attention_mask"]}
    (folder / FILES[1]).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def copy_tokenizer(source: Path, folder: Path, length: int) -> None:
    """Copy a tokenizer, for models with sequences of this length."""
    shutil.copyfile(source / FILES[0], folder / FILES[0])
    config = json.loads((source / FILES[1]).read_text(encoding="utf-8")) | {"model_max_length": length}
    (folder / FILES[1]).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


@contextmanager
def failures_named(folder: Path) -> Iterator[None]:
    """Raise InputError with the tokenizer's file for any failure of `tokenizers`, such as a pattern without end."""
    try:
        yield
    except BaseException as error:  # tokenizers raises plain Exception
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":  # Rust's; it has no module
            raise
        raise InputError(f"{folder / FILES[0]} is not a tokenizer: {error}. Run its stage again.") from error


def load_tokenizer(folder: Path) -> Tokenizer:
    """Read a tokenizer for raw text: a literal [MASK] in a document is text, not the special token."""
    with failures_named(folder):
        tokenizer = Tokenizer.from_file(str(folder / FILES[0]))
    tokenizer.encode_special_tokens = True
    tokenizer.no_truncation()  # transformers saves how it was last called
    tokenizer.no_padding()
    return tokenizer


def pieces(text: str) -> Iterator[str]:
    """A long text in pieces of some million characters, cut where a word begins or white space."""
    start = 0
    while len(text) - start > PIECE_CHARACTERS:
        found = CUT.search(text, start + PIECE_CHARACTERS)
        end = found.start() if found else len(text)
        yield text[start:end]
        start = end
    yield text[start:]


class Encoded(NamedTuple):
    """The ids of some texts, one after the other: those of text i are `ids[ends[i - 1]:ends[i]]`."""

    ids: np.ndarray  # (tokens,) uint16, or uint32 for more than 65,536 entries
    ends: np.ndarray  # (texts,) int64


class Encoder:
    """Encodes texts as the tokenizer does, without special tokens, but divides every different word only once.

    A word's tokens don't depend on the words around it, so this is exact, and several times as fast. Words are known by
    hashes of 64 bits: among 10^8 words of more than eight bytes, one is taken for another with a probability of 10^-5.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.how, self.pieces = normaliser_of(tokenizer), WordPieces(tokenizer.get_vocab())
        self.type = np.uint16 if tokenizer.get_vocab_size() <= 1 << 16 else np.uint32
        self.forget()
        self.unknown: Counter[str] = Counter()  # words that were encoded as [UNK]; the beginning of long ones

    def forget(self) -> None:
        """Forget all words."""
        self.numbers, self.undivided = words.Numbers(SLOT_BITS), {}  # the latter by number, those that are [UNK]
        self.ids, self.edges, self.costs = np.zeros(0, self.type), np.zeros(1, np.int64), np.zeros(0, np.int32)

    def known(self, found: words.Words) -> np.ndarray:
        """The number of each word among the known ones; new ones are learned first."""
        if self.numbers.size > KNOWN_WORDS:
            self.forget()
        hashed = words.hashes_of(*found[:3])
        places = self.numbers.find(hashed)
        unknown = np.flatnonzero(places < 0)
        new, first, which = np.unique(hashed[unknown], return_index=True, return_inverse=True)
        places[unknown] = which + self.numbers.size
        self.numbers.add(new)
        self._learn(found.data, found.starts[unknown[first]], found.stops[unknown[first]])
        return places

    def _learn(self, data: bytes, starts: np.ndarray, stops: np.ndarray) -> None:
        ids, lengths = self.pieces.divide(data, starts, stops)
        ends = np.cumsum(lengths)
        for i in np.flatnonzero(ids[ends - 1] == NONE).tolist():
            word = data[starts[i] : stops[i]].decode()
            self.undivided[len(self.costs) + i] = word[: LONGEST_WORD + 1]
            lengths[i] = len(word) if len(word) > LONGEST_WORD else 1
        self.costs = np.append(self.costs, lengths.astype(np.int32))
        self.edges = np.append(self.edges, ends + len(self.ids))
        self.ids = np.append(self.ids, np.where(ids == NONE, UNK, ids).astype(self.type))

    def __call__(self, texts: list[str]) -> Encoded:
        """The ids of the texts."""
        ids, ends, before = [], [], 0
        for some, last in portions(texts):
            found = words.split(some, self.how)
            places = self.known(found)
            self._count_unknown(places)
            size = self.ids.itemsize
            buffers = [None, pa.py_buffer(self.edges * size), pa.py_buffer(self.ids)]
            lists = pa.LargeBinaryArray.from_buffers(pa.large_binary(), len(self.costs), buffers)
            _, edges, tokens = lists.take(pa.array(places)).buffers()  # twice as fast as by numpy
            edges = np.frombuffer(edges, np.int64, len(places) + 1) // size
            ids.append(np.frombuffer(tokens, self.type, edges[-1]))
            ends.append(edges[found.ends][last] + before)
            before += len(ids[-1])
        return Encoded(np.concatenate(ids), np.concatenate(ends))

    def _count_unknown(self, places: np.ndarray) -> None:
        if self.undivided:
            unread = np.zeros(len(self.costs), dtype=bool)
            unread[list(self.undivided)] = True
            self.unknown.update(map(self.undivided.__getitem__, places[unread[places]].tolist()))

    def tokens(self, texts: list[str]) -> np.ndarray:
        """(texts,) the number of tokens of each text; a word longer than LONGEST_WORD counts as its characters."""
        ends, before = [], 0
        for some, last in portions(texts):
            found = words.split(some, self.how)
            places = self.known(found)
            sums = np.append(0, np.cumsum(self.costs[places], dtype=np.int64))
            ends.append(sums[found.ends][last] + before)
            before += int(sums[-1])
        return np.diff(np.concatenate(ends), prepend=0)


def encoder_of(folder: Path) -> Encoder:
    """The encoder of a vocabulary. A worker keeps it from part to part, since it then knows most words."""
    about = (folder / FILES[0]).stat()
    return _encoder(folder, about.st_mtime_ns, about.st_ino, threading.get_ident())


@functools.lru_cache(maxsize=1)
def _encoder(folder: Path, *_: int) -> Encoder:
    return Encoder(load_tokenizer(folder))


def portions(texts: list[str]) -> Iterator[tuple[list[str], np.ndarray]]:
    """The texts, long ones in pieces, some million characters at a time; and which of the pieces end a text."""
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


def divided(text: str, tokenizer: Tokenizer, unknown: int = UNK) -> tuple[np.ndarray, np.ndarray, tuple[int, ...]]:
    """The ids of a text, without special tokens; the number of the word of each; and its sizes (model.heldout.SIZES).

    A token that reaches over two words, because what lies between them is deleted, is a piece of the second.
    """
    ids, offsets, first = [], [], 0
    for part in pieces(text):
        encoding = tokenizer.encode(part, add_special_tokens=False)
        ids.append(np.array(encoding.ids, dtype=np.int64))
        offsets.append(np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2) + first)
        first += len(part)
    every = (match.span() for match in WORD.finditer(text))
    spans = np.fromiter(chain.from_iterable(every), dtype=np.int64).reshape(-1, 2)
    ids, (begins, ends) = np.concatenate(ids), np.concatenate(offsets).T
    owners = np.searchsorted(spans[:, 0], np.maximum(begins, ends - 1), side="right") - 1
    codes = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
    sizes = 1 + (codes > 0x7F) + (codes > 0x7FF) + (codes > 0xFFFF)  # bytes of a character in UTF-8
    known, within = ids != unknown, covered(spans[:, 0], spans[:, 1], len(text))
    unread = within & ~covered(begins[known], ends[known], len(text))
    # so is the white space after an unread character
    unread = unread[np.maximum.accumulate(np.where(within, np.arange(len(text)), 0))] if len(text) else unread
    return ids, owners, (len(ids), len(spans), len(text), int(sizes.sum()), int(sizes[unread].sum()))


def covered(begins: np.ndarray, ends: np.ndarray, length: int) -> np.ndarray:
    """(length,): whether each character is in one of the spans."""
    edges = np.bincount(begins, minlength=length + 1) - np.bincount(ends, minlength=length + 1)
    return np.cumsum(edges)[:length] > 0


def heldout_of(
    texts: Iterable[str],
    tokenizer: Tokenizer,
    length: int,
    unknown: int = UNK,
    separator: int = SEP,
    pad: int = PAD,
    begin: int | None = None,
) -> "Heldout":
    """The texts as held-out documents: one after another in sequences of `length`, each with its separator.

    `begin`: an id before each document, which is not predicted.
    """
    from model.heldout import SIZES, Heldout  # loads torch, which encoding doesn't need

    before_each = [] if begin is None else [begin]
    ids, owners, sizes, before = [], [], [np.zeros((0, len(SIZES)), np.int64)], 0
    for text in texts:
        of_text, numbers, size = divided(text, tokenizer, unknown)
        ids.append(np.concatenate([before_each, of_text, [separator]]))
        owners.append(np.concatenate([[-1] * len(before_each), numbers + before, [-1]]))
        sizes.append(np.array([size], dtype=np.int64))
        before += size[SIZES.index("words")]
    kind = np.uint16 if tokenizer.get_vocab_size() <= 1 << 16 else np.uint32
    return Heldout(
        in_sequences(np.concatenate([np.zeros(0, kind), *ids]).astype(kind), length, pad),
        in_sequences(np.concatenate([np.zeros(0, np.int32), *owners]).astype(np.int32), length, -1),
        np.concatenate(sizes),
    )


def in_sequences(values: np.ndarray, length: int, pad: int) -> np.ndarray:
    """(m, length): the values one after another, `pad` after the last."""
    return np.pad(values, (0, -len(values) % length), constant_values=pad).reshape(-1, length)
