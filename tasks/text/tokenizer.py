"""The tokenizer: text to tokens of a vocabulary, in files that transformers.AutoTokenizer loads."""

import json
import shutil
import string
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE, Unigram, WordPiece

from model import InputError

SPECIALS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")  # their ids are their places
PAD, UNK, CLS, SEP, MASK = range(len(SPECIALS))
FILES = ("tokenizer.json", "tokenizer_config.json")
# the characters that the normaliser keeps, except white space: printable ASCII without capitals
ALPHABET = sorted(set(string.printable) - set(string.whitespace) - set(string.ascii_uppercase))
LONGEST_WORD = 100  # characters; a longer one is [UNK] in WordPiece, as in BERT, and is left out of training
# characters; BPE and Unigram could divide longer words, but in a hundred times their memory
LONGEST_DIVIDED = 100_000
UNWRITTEN = "\N{REPLACEMENT CHARACTER}"  # a word that is in no vocabulary
WORD_START = "▁"  # marks the beginning of a word in Unigram, as in SentencePiece


def normalizer() -> normalizers.Normalizer:
    """The release's: plain quotes, no accents, lower case, printable ASCII only."""
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
    """The pre-tokenizers that a model needs for a single word."""
    return [pre_tokenizers.Metaspace(WORD_START, "always", split=False)] if isinstance(model, Unigram) else []


def tokenizer_of(model: WordPiece | BPE | Unigram) -> Tokenizer:
    """The tokenizer of a model: it divides words and runs of punctuation; [CLS] A [SEP] B [SEP]."""
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


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write the files that transformers expects."""
    (folder / FILES[0]).write_text(tokenizer.to_str(pretty=True))
    names = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), SPECIALS, strict=True))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **names}
    config |= {"model_input_names": ["input_ids", "attention_mask"]}
    (folder / FILES[1]).write_text(json.dumps(config, indent=2) + "\n")


def copy_tokenizer(source: Path, folder: Path, length: int) -> None:
    """Copy a tokenizer, for models with sequences of this length."""
    shutil.copyfile(source / FILES[0], folder / FILES[0])
    config = json.loads((source / FILES[1]).read_text()) | {"model_max_length": length}
    (folder / FILES[1]).write_text(json.dumps(config, indent=2) + "\n")


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
    return tokenizer


def inner(entry: str) -> str:
    """The characters of an entry, without the mark that it begins or continues a word."""
    return entry.removeprefix("##").removeprefix(WORD_START) or entry
