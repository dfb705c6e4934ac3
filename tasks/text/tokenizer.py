"""Text to tokens: the tokenizer of a vocabulary, a fast encoder of many documents, and the words of held-out text.

The tokenizer's files are those that transformers.AutoTokenizer loads.
"""

import json
import re
import shutil
import string
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import regex
from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import WordPiece

from model.errors import InputError, explain_errors
from model.settings import SPECIALS as IDS
from model.settings import Specials
from tasks.text import words
from tasks.text.wordpiece import CONTINUES, LONGEST_WORD
from tasks.text.words import ASCII, Normaliser

if TYPE_CHECKING:
    from model.heldout import Heldout

SPECIALS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")  # their ids in cram's vocabularies are their places
PAD, UNK, CLS, SEP, MASK = IDS
FILES = ("tokenizer.json", "tokenizer_config.json")
# the characters that the normaliser keeps, except white space: printable ASCII without capitals
ALPHABET = sorted(set(string.printable) - set(string.whitespace) - set(string.ascii_uppercase))
PIECE_CHARACTERS = 4_000_000  # of text split at once, which takes ten times their memory
# A word is what is between white space and punctuation, or a run of punctuation; no token reaches beyond one. `_` is
# a letter, as for the tokenizer. Ideographs are words by themselves, as in BERT, since no space divides them.
ALONE = r"\p{Han}"
MARKS = r"[\p{P}\p{S}--[_\p{Han}]]"
WORD = regex.compile(rf"[{ALONE}]|{MARKS}+|[^\s{ALONE}{MARKS}]+", regex.V1)
CUT = regex.compile(rf"[ \n\t{ALONE}]")


def normalizer(how: Normaliser = ASCII) -> normalizers.Normalizer:
    """The release's: plain quotes, no accents, lower case, printable ASCII only. For Unicode as `how` says."""
    steps: list[normalizers.Normalizer] = []
    if how.punctuation == "plain":
        steps += [normalizers.Replace(Regex(f"[{some}]"), to) for some, to in words.PLAIN.items()]
    if how.characters == "ascii":
        steps += [
            normalizers.Replace("``", '"'),
            normalizers.Replace("''", '"'),
            normalizers.NFD(),
            normalizers.Lowercase(),
            normalizers.StripAccents(),
            normalizers.Replace(Regex(r"[^\x09-\x0d\x20-\x7e]+"), ""),
        ]
        return normalizers.Sequence(steps)
    steps.append(getattr(normalizers, how.form)())
    if how.lowercase:
        steps.append(normalizers.Lowercase())
    if how.strip_accents:
        steps += [normalizers.NFD(), normalizers.StripAccents(), normalizers.NFC()]
    steps.append(normalizers.Replace(Regex(words.GONE), ""))
    return normalizers.Sequence(steps)


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
    frame_inputs(tokenizer, IDS, second=0)
    return tokenizer


def frame_inputs(tokenizer: Tokenizer, specials: Specials, second: int = 1) -> None:
    """Make it add special tokens: [CLS] A [SEP], [CLS] A [SEP] B [SEP]. `second`: the type of the second text."""
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair=f"[CLS] $A [SEP] $B:{second} [SEP]:{second}",
        special_tokens=[("[CLS]", specials.cls), ("[SEP]", specials.sep)],
    )


def normaliser_of(tokenizer: Tokenizer) -> Normaliser:
    """What a tokenizer of `tokenizer_of` was made with, but for its alphabet. Raises InputError for any other."""
    how = likely_normaliser(tokenizer)
    model = tokenizer.model
    rules = (getattr(model, "continuing_subword_prefix", None), getattr(model, "max_input_chars_per_word", None))
    is_ours = (
        rules == (CONTINUES, LONGEST_WORD)
        and has_state(tokenizer.normalizer, normalizer(how))
        and has_state(tokenizer.pre_tokenizer, pre_tokenizer(how))
    )
    if not is_ours:
        raise InputError("The tokenizer is not a vocabulary of cram: it normalises or divides text in another way.")
    return how


def is_trained_here(tokenizer: Tokenizer) -> bool:
    """Whether it is a vocabulary of cram, not another program's."""
    try:
        normaliser_of(tokenizer)
    except InputError:
        return False
    return specials_of(tokenizer) == IDS


def reading_of(tokenizer: Tokenizer) -> Normaliser:
    """Which characters a tokenizer reads. Of another program's, the nearest: all, perhaps in lower case."""
    if is_trained_here(tokenizer):
        return normaliser_of(tokenizer)
    lowercase = tokenizer.normalizer is not None and tokenizer.normalizer.normalize_str("A") == "a"
    return Normaliser(characters="unicode", form="NFC", lowercase=lowercase)


def specials_of(tokenizer: Tokenizer) -> Specials:
    """The ids of its special tokens. Raises InputError if it isn't WordPiece, or lacks one of them."""
    number_of = tokenizer.get_vocab()
    kind = type(tokenizer.model).__name__
    missing = [special for special in SPECIALS if special not in number_of]
    if kind != "WordPiece" or missing:
        lacks = f" without {', '.join(missing)}" if missing else ""
        raise InputError(
            f"The tokenizer is {kind}{lacks}; expected WordPiece with {', '.join(SPECIALS)}, as BERT has. Choose "
            "another model, or train one from scratch."
        )
    return Specials(*(number_of[special] for special in SPECIALS))


def likely_normaliser(tokenizer: Tokenizer) -> Normaliser:
    """The one whose steps have the names that a tokenizer's have, if it is a tokenizer of `tokenizer_of`."""
    state = tokenizer.normalizer.__getstate__() if tokenizer.normalizer else ""
    names = re.findall(r'"type":\s*"(\w+)"', str(state))
    settings: dict[str, Any] = {}
    if names.count("Replace") > len(words.PLAIN):
        settings["punctuation"] = "plain"
    forms = [name for name in names if name in ("NFKC", "NFC")]
    if forms:
        settings |= {
            "characters": "unicode",
            "form": forms[0],
            "lowercase": "Lowercase" in names,
            "strip_accents": "StripAccents" in names,
        }
    return Normaliser(**settings)


def has_state(theirs: Any, own: Any) -> bool:
    """Whether two parts of tokenizers do the same; there may be none."""
    return theirs is not None and theirs.__getstate__() == own.__getstate__()


def save_tokenizer(tokenizer: Tokenizer, folder: Path, has_types: bool = False) -> None:
    """Write the files that transformers expects. `has_types`: whether the model marks the second text of a pair."""
    (folder / FILES[0]).write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    pad, unknown, begin, separator, mask = SPECIALS
    inputs = ["input_ids", "attention_mask"]
    if has_types:
        inputs.insert(1, "token_type_ids")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "pad_token": pad,
        "unk_token": unknown,
        "cls_token": begin,
        "sep_token": separator,
        "mask_token": mask,
        "model_input_names": inputs,
    }
    (folder / FILES[1]).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def copy_files(source: Path, folder: Path) -> None:
    """Copy a tokenizer."""
    for file in FILES:
        shutil.copyfile(source / file, folder / file)


def copy_tokenizer(source: Path, folder: Path, length: int) -> None:
    """Copy a tokenizer, for models with sequences of this length."""
    shutil.copyfile(source / FILES[0], folder / FILES[0])
    config = json.loads((source / FILES[1]).read_text(encoding="utf-8"))
    config["model_max_length"] = length
    (folder / FILES[1]).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def name_failures(folder: Path) -> AbstractContextManager[None]:
    """Raise InputError with the tokenizer's file for any failure of `tokenizers`, such as a pattern without end."""

    def explain(error: BaseException) -> InputError | None:
        is_panic = type(error).__name__ == "PanicException"  # of Rust; it has no module
        if not is_panic and not isinstance(error, Exception):
            return None
        return InputError(f"{folder / FILES[0]} is not a tokenizer: {error}. Run its stage again.")

    return explain_errors(explain)


def load_tokenizer(folder: Path) -> Tokenizer:
    """Read a tokenizer for raw text: a literal [MASK] in a document is text, not the special token."""
    with name_failures(folder):
        tokenizer = Tokenizer.from_file(str(folder / FILES[0]))
    tokenizer.encode_special_tokens = True
    tokenizer.no_truncation()  # transformers saves how it was last called
    tokenizer.no_padding()
    return tokenizer


def type_of_ids(tokenizer: Tokenizer) -> type[np.uint16] | type[np.uint32]:
    """The smallest type that holds all ids."""
    return np.uint16 if tokenizer.get_vocab_size() <= 1 << 16 else np.uint32


def pieces(text: str) -> Iterator[str]:
    """A long text in pieces of some million characters, cut where a word begins or white space."""
    start = 0
    while len(text) - start > PIECE_CHARACTERS:
        found = CUT.search(text, start + PIECE_CHARACTERS)
        end = found.start() if found else len(text)
        yield text[start:end]
        start = end
    yield text[start:]


class Spans(NamedTuple):
    """Stretches of a text: stretch i is `text[begins[i]:ends[i]]`."""

    begins: np.ndarray
    ends: np.ndarray

    def cover(self, length: int) -> np.ndarray:
        """(length,): whether each character of a text is in one of them."""
        edges = np.bincount(self.begins, minlength=length + 1) - np.bincount(self.ends, minlength=length + 1)
        return np.cumsum(edges)[:length] > 0


def words_in(text: str) -> Spans:
    """The words of a text."""
    every = chain.from_iterable(match.span() for match in WORD.finditer(text))
    spans = np.fromiter(every, dtype=np.int64).reshape(-1, 2)
    return Spans(spans[:, 0], spans[:, 1])


def encode(text: str, tokenizer: Tokenizer) -> tuple[np.ndarray, Spans]:
    """The ids of a text, without special tokens, and where each token is in the text."""
    ids = []
    offsets = []
    first = 0
    for piece in pieces(text):
        encoding = tokenizer.encode(piece, add_special_tokens=False)
        ids.append(np.array(encoding.ids, dtype=np.int64))
        offsets.append(np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2) + first)
        first += len(piece)
    spans = np.concatenate(offsets)
    return np.concatenate(ids), Spans(spans[:, 0], spans[:, 1])


def divide_text(text: str, tokenizer: Tokenizer, unknown: int = UNK) -> tuple[np.ndarray, np.ndarray, tuple[int, ...]]:
    """The ids of a text, without special tokens; the number of the word of each; and its sizes (model.heldout.SIZES).

    A token that reaches over two words, because what is between them is deleted, is a piece of the second.
    """
    length = len(text)
    ids, tokens = encode(text, tokenizer)
    of_words = words_in(text)
    owners = np.searchsorted(of_words.begins, np.maximum(tokens.begins, tokens.ends - 1), side="right") - 1
    known = ids != unknown
    is_word = of_words.cover(length)
    is_unread = is_word & ~Spans(tokens.begins[known], tokens.ends[known]).cover(length)
    if length:  # so is the white space after an unread character
        last_of_a_word = np.maximum.accumulate(np.where(is_word, np.arange(length), 0))
        is_unread = is_unread[last_of_a_word]
    sizes = sizes_in_utf8(text)
    return ids, owners, (len(ids), len(of_words.begins), length, int(sizes.sum()), int(sizes[is_unread].sum()))


def sizes_in_utf8(text: str) -> np.ndarray:
    """(characters,): the bytes of each character in UTF-8."""
    codes = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
    return 1 + (codes > 0x7F) + (codes > 0x7FF) + (codes > 0xFFFF)


def heldout_of(
    texts: Iterable[str],
    tokenizer: Tokenizer,
    length: int,
    specials: Specials | None = None,
    begin: int | None = None,
) -> "Heldout":
    """The texts as held-out documents: one after another in sequences of `length`, each with its separator.

    `specials`: ids of the tokenizer's special tokens, if they have other names than BERT's; `begin`: an id before each
    document, which is not predicted.
    """
    from model.heldout import SIZES, Heldout  # loads torch, which encoding doesn't need

    specials = specials or specials_of(tokenizer)
    kind = type_of_ids(tokenizer)
    before_each = [] if begin is None else [begin]
    ids = [np.zeros(0, kind)]
    owners = [np.zeros(0, np.int32)]
    sizes = [np.zeros((0, len(SIZES)), np.int64)]
    words_before = 0
    for text in texts:
        of_text, numbers, of_sizes = divide_text(text, tokenizer, specials.unk)
        ids.append(np.concatenate([before_each, of_text, [specials.sep]]))
        owners.append(np.concatenate([[-1] * len(before_each), numbers + words_before, [-1]]))
        sizes.append(np.array([of_sizes], dtype=np.int64))
        words_before += of_sizes[SIZES.index("words")]
    return Heldout(
        in_sequences(np.concatenate(ids).astype(kind), length, specials.pad),
        in_sequences(np.concatenate(owners).astype(np.int32), length, -1),
        np.concatenate(sizes),
    )


def in_sequences(values: np.ndarray, length: int, pad: int) -> np.ndarray:
    """(m, length): the values one after another, `pad` after the last."""
    return np.pad(values, (0, -len(values) % length), constant_values=pad).reshape(-1, length)
