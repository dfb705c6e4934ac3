"""The scripts of characters beyond ASCII, and those that a normaliser deletes: each code point is looked up once."""

import functools
import threading
import unicodedata
from collections.abc import Callable

import numpy as np

from tasks.text.words import Normaliser, normalise

NOTHING, LATIN = "", "LATIN"
OTHERS = {"P": "punctuation", "S": "symbols", "N": "digits", "C": "unassigned or private use"}
SAME = {"HIRAGANA": "KANA", "KATAKANA": "KANA", "KATAKANA-HIRAGANA": "KANA", "IDEOGRAPHIC": "CJK"}
BEGINNING = 10_000  # characters, by which the script of a text is known
LATIN_LETTERS = 8  # ASCII characters that count as one of another script: any text has names and code in them


class Labels:
    """A label for every character beyond ASCII, made when it is first asked for."""

    def __init__(self, label: Callable[[str], str]) -> None:
        self.label, self.names, self.lock = label, [NOTHING, LATIN], threading.Lock()
        self.table = np.full(0x110000, -1, dtype=np.int16)

    def count(self, texts: list[str]) -> np.ndarray:
        """(texts, labels): how many characters beyond ASCII of each text have each of `names`, which may grow."""
        codes = [np.zeros(0, dtype=np.uint32)]
        for text in texts:
            of_text = np.frombuffer(b"" if text.isascii() else text.encode("utf-32-le"), dtype=np.uint32)
            codes.append(of_text[of_text > 0x7F])
        owners, codes = np.repeat(np.arange(len(texts)), list(map(len, codes[1:]))), np.concatenate(codes)
        with self.lock:  # a worker of Dask can have several threads
            for code in np.unique(codes[self.table[codes] < 0]).tolist():
                if (name := self.label(chr(code))) not in self.names:
                    self.names.append(name)
                self.table[code] = self.names.index(name)
            width = len(self.names)
        return np.bincount(owners * width + self.table[codes], minlength=len(texts) * width).reshape(-1, width)


def script(letter: str) -> str:
    """The script of a letter or mark, as its name in Unicode begins: LATIN, CJK …, KANA for both of Japanese."""
    if unicodedata.category(letter)[0] not in "LM":
        return NOTHING
    first = unicodedata.name(letter, "UNNAMED").split()[0]
    return SAME.get(first, first)


SCRIPTS = Labels(script)


def main_scripts(texts: list[str]) -> list[str]:
    """The script of most letters at the beginning of each text; LATIN without others."""
    begins = [text[:BEGINNING] for text in texts]
    counts = SCRIPTS.count(begins)
    ascii_characters = np.array(list(map(len, begins)), dtype=np.int64) - counts.sum(axis=1)
    counts[:, 0] = 0
    counts[:, 1] += ascii_characters // LATIN_LETTERS + 1
    order = np.argsort(SCRIPTS.names[: counts.shape[1]])  # or ties would depend on which script was seen first
    return [SCRIPTS.names[number] for number in order[counts[:, order].argmax(axis=1)]]


@functools.lru_cache(maxsize=4)
def deleted_by(how: Normaliser) -> Labels:
    """The scripts or kinds of the characters that a normaliser deletes.

    Not of white space, control characters and accents: the letter of an accent stays, or is counted itself.
    """

    def label(character: str) -> str:
        category, name = unicodedata.category(character), unicodedata.name(character, "")
        invisible = category[0] == "Z" or category in ("Cc", "Cf") or name.startswith("VARIATION SELECTOR")
        if normalise(character, how).strip() or invisible or unicodedata.combining(character):
            return NOTHING
        return "U+FFFD" if character == "\ufffd" else OTHERS.get(category[0]) or script(character)

    return Labels(label)
