"""The scripts of characters beyond ASCII, and those that a normaliser deletes: each character is looked up once."""

import functools
import unicodedata
from collections.abc import Callable

import numpy as np

from tasks.text.words import Normaliser, normalise

NOTHING, LATIN = "", "LATIN"
OTHERS = {"P": "punctuation", "S": "symbols", "N": "digits", "C": "unassigned or private use"}
SAME = {"HIRAGANA": "KANA", "KATAKANA": "KANA", "KATAKANA-HIRAGANA": "KANA", "IDEOGRAPHIC": "CJK"}
BEGINNING = 10_000  # characters, by which the script of a text is known
LATIN_LETTERS = 8  # ASCII characters that count as one of another script: any text has names and code in them


def counts(texts: list[str], label: Callable[[str], str]) -> tuple[list[str], np.ndarray]:
    """NOTHING, LATIN and the other labels; and (labels, texts) how many characters beyond ASCII have each of them."""
    beyond = [np.zeros(0, dtype=np.uint32)]
    for text in texts:
        codes = np.frombuffer(b"" if text.isascii() else text.encode("utf-32-le"), dtype=np.uint32)
        beyond.append(codes[codes > 0x7F])
    owners, codes = np.repeat(np.arange(len(texts)), list(map(len, beyond[1:]))), np.concatenate(beyond)
    labels = {code: label(chr(code)) for code in np.flatnonzero(np.bincount(codes)).tolist()}
    names, numbers = sorted({NOTHING, LATIN, *labels.values()}), np.zeros(0x110000, dtype=np.int64)
    numbers[list(labels)] = [names.index(name) for name in labels.values()]
    found = np.bincount(numbers[codes] * len(texts) + owners, minlength=len(names) * len(texts))
    return names, found.reshape(len(names), -1)


@functools.cache
def script(letter: str) -> str:
    """The script of a letter or mark, as its name in Unicode begins: LATIN, CJK …, KANA for both of Japanese."""
    if unicodedata.category(letter)[0] not in "LM":
        return NOTHING
    first = unicodedata.name(letter, "UNNAMED").split()[0]
    return SAME.get(first, first)


def main_scripts(texts: list[str]) -> list[str]:
    """The script of most letters at the beginning of each text; LATIN without others."""
    begins = [text[:BEGINNING] for text in texts]
    names, found = counts(begins, script)
    ascii_characters = np.array(list(map(len, begins)), dtype=np.int64) - found.sum(axis=0)
    found[names.index(NOTHING)] = 0
    found[names.index(LATIN)] += ascii_characters // LATIN_LETTERS + 1
    return [names[number] for number in found.argmax(axis=0)]  # of ties the first name


@functools.lru_cache(maxsize=4)
def deleted_by(how: Normaliser) -> Callable[[str], str]:
    """What tells the scripts or kinds of the characters that a normaliser deletes.

    Not of white space, control characters and accents: the letter of an accent stays, or is counted itself.
    """

    @functools.cache
    def label(character: str) -> str:
        category, name = unicodedata.category(character), unicodedata.name(character, "")
        invisible = category[0] == "Z" or category in ("Cc", "Cf") or name.startswith("VARIATION SELECTOR")
        if normalise(character, how).strip() or invisible or unicodedata.combining(character):
            return NOTHING
        return "U+FFFD" if character == "\ufffd" else OTHERS.get(category[0]) or script(character)

    return label


def deleted(texts: list[str], how: Normaliser) -> tuple[list[str], np.ndarray]:
    """Scripts or kinds of characters; and (kinds, texts) how many of each a normaliser deletes."""
    names, found = counts(texts, deleted_by(how))
    return names[1:], found[1:]  # all but NOTHING
