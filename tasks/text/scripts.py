"""The scripts of characters beyond ASCII, and those that a normaliser deletes: each character is looked up once."""

import functools
import unicodedata
from collections.abc import Callable

import numpy as np

from tasks.text.words import Normaliser, normalise

NOTHING = ""
LATIN = "LATIN"
OTHERS = {"P": "punctuation", "S": "symbols", "N": "digits", "C": "unassigned or private use"}
SAME = {"HIRAGANA": "KANA", "KATAKANA": "KANA", "KATAKANA-HIRAGANA": "KANA", "IDEOGRAPHIC": "CJK"}
WIDTHS = ("FULLWIDTH", "HALFWIDTH")  # in names of other forms of letters, in front of their scripts
BEGINNING = 10_000  # characters, by which the script of a text is known
LATIN_LETTERS = 8  # ASCII characters that count as one of another script: any text has names and code in them


def count_labels(texts: list[str], label: Callable[[str], str]) -> tuple[list[str], np.ndarray]:
    """NOTHING, LATIN and the other labels; and (labels, texts) how many characters beyond ASCII have each of them."""
    owners, codes = beyond_ascii(texts)
    different = np.flatnonzero(np.bincount(codes)).tolist()
    label_of = {code: label(chr(code)) for code in different}
    names = sorted({NOTHING, LATIN, *label_of.values()})
    numbers = np.zeros(0x110000, dtype=np.int64)  # of characters' labels
    numbers[different] = [names.index(label_of[code]) for code in different]
    places = numbers[codes] * len(texts) + owners
    found = np.bincount(places, minlength=len(names) * len(texts))
    return names, found.reshape(len(names), -1)


def beyond_ascii(texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """(characters,): of all characters beyond ASCII, the place of the text that each is in, and its code."""
    beyond = [np.zeros(0, dtype=np.uint32)]
    for text in texts:
        codes = np.frombuffer(b"" if text.isascii() else text.encode("utf-32-le"), dtype=np.uint32)
        beyond.append(codes[codes > 0x7F])
    sizes = [len(codes) for codes in beyond[1:]]
    return np.repeat(np.arange(len(texts)), sizes), np.concatenate(beyond)


@functools.cache
def script(letter: str) -> str:
    """The script of a letter or mark, as its name in Unicode begins: LATIN, CJK …, KANA for both of Japanese.

    NOTHING for other characters, and for accents that letters of several scripts take.
    """
    if unicodedata.category(letter)[0] not in "LM":
        return NOTHING
    first = unicodedata.name(letter, "UNNAMED").split()[0]
    if first == "COMBINING":
        return NOTHING
    if first in WIDTHS:
        return script(unicodedata.normalize("NFKC", letter)[0])
    return SAME.get(first, first)


def main_scripts(texts: list[str]) -> list[str]:
    """The script of most letters at the beginning of each text; LATIN without others."""
    begins = [text[:BEGINNING] for text in texts]
    names, found = count_labels(begins, script)
    sizes = np.array([len(text) for text in begins], dtype=np.int64)
    ascii_characters = sizes - found.sum(axis=0)
    found[names.index(NOTHING)] = 0
    found[names.index(LATIN)] += ascii_characters // LATIN_LETTERS + 1
    return [names[number] for number in found.argmax(axis=0)]  # of ties the first name


@functools.lru_cache(maxsize=4)
def deleted_by(how: Normaliser) -> Callable[[str], str]:
    """A function that returns the script or kind of a character if a normaliser deletes it.

    Not of white space, control characters and accents: the letter of an accent stays, or is counted itself.
    """

    @functools.cache
    def label(character: str) -> str:
        category = unicodedata.category(character)
        is_selector = unicodedata.name(character, "").startswith("VARIATION SELECTOR")
        is_invisible = category[0] == "Z" or category in ("Cc", "Cf") or is_selector
        if is_invisible or unicodedata.combining(character) or normalise(character, how).strip():
            return NOTHING
        if character == "\ufffd":
            return "U+FFFD"
        return OTHERS.get(category[0]) or script(character)

    return label


def count_deleted(texts: list[str], how: Normaliser) -> tuple[list[str], np.ndarray]:
    """Scripts or kinds of characters; and (kinds, texts) how many of each a normaliser deletes."""
    names, found = count_labels(texts, deleted_by(how))
    return names[1:], found[1:]  # all but NOTHING
