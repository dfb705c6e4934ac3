"""Words, runs and pieces of them, and passages, in plain Python, to compare those of `tasks.text` with."""

import functools
import re
import unicodedata
from itertools import groupby
from operator import itemgetter

import regex

HALF = regex.compile(r"[\p{scx=Han}\p{scx=Hira}\p{scx=Kana}]|\p{Thai}|\p{Lao}|\p{Khmer}|\p{Myanmar}|\p{Tibetan}")


@functools.cache
def letter(char: str) -> str:
    """What a character of a text in lower case becomes, from Python's tables."""
    kind = unicodedata.category(char)
    gone = kind in ("Cf", "Me") or (kind == "Cc" and not char.isspace()) or "\x1c" <= char <= "\x1f"
    gone |= kind[0] == "M" and unicodedata.combining(char) not in (0, 9)
    if gone or regex.match(r"\p{Default_Ignorable_Code_Point}", char):
        return ""
    if kind[0] not in "LNM":
        return " "
    return f" {char} " if HALF.match(char) else char


def words(text: str) -> list[str]:
    """The words of a text."""
    lower = regex.sub("[^가-힣]+", lambda run: unicodedata.normalize("NFKD", run.group()).casefold(), text)
    return [word for word in "".join(map(letter, lower)).split(" ") if word]


def runs(text: str, n: int, by_halves: bool = True, short: bool = False) -> list[tuple[str, ...]]:
    """The run of n words that begins at each word of a text, in order; as `matching.hash_ngrams`."""
    every = words(text)
    sizes = [1 if by_halves and HALF.match(word) else 2 for word in every]
    found = []
    for first in range(len(every)):
        size = 0
        for end in range(first, len(every)):
            size += sizes[end]
            if size >= 2 * n:
                found.append(tuple(every[first : end + 1]))
                break
    if short and every and not found:
        found.append(tuple(every))
    return found


def jaccard(first: set, second: set) -> float:
    """The similarity of two sets."""
    return len(first & second) / len(first | second) if first or second else 0.0


def ascii_words(text: str) -> list[str]:
    """The words that a vocabulary of ASCII reads in a text."""
    text = unicodedata.normalize("NFD", text.replace("``", '"').replace("''", '"')).lower()
    text = "".join(char for char in text if not unicodedata.category(char).startswith("M"))
    return re.findall(r"\w+|[^\w\s]+", re.sub(r"[^\x09-\x0d\x20-\x7e]", "", text), re.ASCII)


def word_pieces(text: str, entries: dict[str, int], unknown: int) -> list[int]:
    """WordPiece: of what is left of a word, always the longest entry."""
    found = []
    for word in ascii_words(text):
        ids = []
        start = 0
        while start < len(word) and len(word) <= 100:
            ends = range(len(word), start, -1)
            pieces = (("##" if start else "") + word[start:end] for end in ends)
            end, piece = next((e, w) for e, w in zip(ends, pieces, strict=True) if w in entries)
            ids.append(entries[piece])
            start = end
        found += ids or [unknown]
    return found


def without_repeats(texts: list[str], size: int) -> list[str | None]:
    """Texts without the characters that are wholly in windows that occurred, and ended, before; None: dropped."""
    first: dict[bytes, int] = {}
    begin = 0
    left = []
    for text in texts:
        data = text.encode()
        cut = [False] * len(data)
        for i in range(len(data) - size + 1):
            if begin + i - first.setdefault(data[i : i + size], begin + i) >= size:
                cut[i : i + size] = [True] * size
        begin += len(data) + size  # windows in different documents never overlap
        gone = []
        at = 0
        for character in text:
            start = at
            at = at + len(character.encode())
            gone.append(all(cut[start:at]))
        joined = ""
        for is_gone, run in groupby(zip(text, gone, strict=True), key=itemgetter(1)):
            piece = "" if is_gone else "".join(character for character, _ in run)
            if joined and piece and joined[-1] not in " \t\n\r\v\f" and piece[0] not in " \t\n\r\v\f":
                joined += "\n"
            joined += piece
        left.append(joined if joined.strip() or not any(cut) else None)
    return left
