"""Blanks: sentences of a model's held-out text with a word hidden, and the words that the model expects there.

Which sentences and words follows from the text and the vocabulary alone, by digests, never from what the model does
with them. A word that the vocabulary has whole is preferred. All pieces of another are hidden, and filled in from left
to right, as for the held-out loss (model.heldout).
"""

import hashlib
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypedDict

import numpy as np
import regex

from tasks.reports.markdown import Marked, escape
from tasks.text.tokenizer import Spans, divide_text, load_tokenizer, specials_of, words_in
from tasks.text.wordpiece import CONTINUES

if TYPE_CHECKING:
    import torch
    from tokenizers import Tokenizer

    from model.bert import Bert
    from model.settings import Specials

GAP = "____"
BLANKS = 6  # to show
GUESSES = 4  # to show of each
BEAM = 16  # beginnings of words that are followed up
PARAGRAPH = regex.compile(r"\s*\n\s*\n\s*")
ENDS = r"[.!?…؟۔።।॥。！？]"
STOP = regex.compile(rf"(?<={ENDS}[\"'”’»)\]]*)\s+|(?<=[。！？][」』”]*)(?=\p{{L}})")
AT_END = regex.compile(rf"{ENDS}[\"'”’»)\]」』]*$")
BEGIN = regex.compile(r"[\"'“‘„«»「『¿¡(]*[\p{L}\p{N}]")
CODE = regex.compile(r"[`_=<>{}|\\\\#@]|://")
LETTERS = regex.compile(r"[\p{L}\p{M}\u200c\u200d]+")
IDEOGRAPH = regex.compile(r"\p{Han}")
BEGINNING = 20_000  # characters of a document that are searched
FEWEST_CHARACTERS = 20  # of a sentence
MOST_CHARACTERS = 220
FEWEST_WORDS = 6
LEAST_LETTERS = 0.85  # of the characters, with spaces: so that it is prose
FEWEST_LETTERS = 4  # of a hidden word, but of ideographs, so that most are not the likes of 'the'
MOST_PIECES = 4  # of a hidden word
TOO_LITTLE = (
    f"no sentence of the held-out text is prose of {FEWEST_CHARACTERS} to {MOST_CHARACTERS} characters with a word of "
    f"{FEWEST_LETTERS} or more letters that the vocabulary writes in up to {MOST_PIECES} pieces"
)


class Guess(TypedDict):
    """A word that a model expects, as its vocabulary writes it."""

    word: str
    probability: float  # of all of its pieces


class Blank(TypedDict):
    """A sentence with a hidden word, and what a model expects there."""

    before: str
    word: str
    after: str
    pieces: int  # of the hidden word
    probability: float  # of the hidden word
    right: bool  # it is the first guess
    guesses: list[Guess]  # the most likely words of as many pieces, best first


class Hidden(NamedTuple):
    """A sentence with a word to hide."""

    sentence: str
    begin: int
    end: int
    ids: list[int]  # of the sentence's tokens
    first: int  # of them, the word's first
    pieces: int


def fill_blanks(folder: Path, texts: Iterable[str]) -> list[Blank]:
    """Hide a word in some sentences of these texts and let the model in a folder fill it in; empty if none is fit.

    Raises InputError if the folder has no model with a head that predicts words.
    """
    from model import export
    from model.layouts import HEADS

    bert = export.load(folder, HEADS).eval()
    tokenizer = load_tokenizer(folder)
    chosen = choose(texts, tokenizer, bert.length)
    return [fill(bert, tokenizer, hidden) for hidden in chosen]


def with_gap(blank: Blank) -> Marked:
    """The sentence as Markdown, with a gap for the hidden word."""
    before = blank["before"]
    after = blank["after"]
    left = " " if before.endswith(" ") else ""
    right = " " if after.startswith(" ") else ""
    return Marked(f"{escape(before)}{left}`{GAP}`{right}{escape(after)}")


# Sentences


def choose(texts: Iterable[str], tokenizer: "Tokenizer", length: int) -> list[Hidden]:
    """The sentences, each with its word: from as many documents as possible. `length`: of the model, in tokens."""
    documents = sorted(set(texts), key=digest)
    for divide in (whole_sentences, lines):
        found = first_of_documents(documents, divide, tokenizer, length)
        if found:
            return found
    return []


def first_of_documents(
    documents: list[str], divide: Callable[[str], Iterable[str]], tokenizer: "Tokenizer", length: int
) -> list[Hidden]:
    """A sentence of each of the first documents that have one; of fewer documents, more of each."""
    ranked: list[tuple[int, int, Hidden]] = []
    seen: set[str] = set()
    with_one = 0
    for number, document in enumerate(documents):
        found = hidden_in(document, divide, tokenizer, length, seen)
        ranked += [(rank, number, hidden) for rank, hidden in enumerate(found)]
        with_one += bool(found)
        if with_one == BLANKS:
            break
    ranked.sort(key=lambda entry: entry[:2])
    return [hidden for _, _, hidden in ranked[:BLANKS]]


def hidden_in(
    document: str, divide: Callable[[str], Iterable[str]], tokenizer: "Tokenizer", length: int, seen: set[str]
) -> list[Hidden]:
    """The first sentences of a document, by digest, that can have a blank. `seen`: those to leave out; grows."""
    found: list[Hidden] = []
    unknown = specials_of(tokenizer).unk
    for sentence in sorted(set(divide(document[:BEGINNING])), key=digest):
        if sentence in seen or not is_prose(sentence):
            continue
        hidden = hide(sentence, tokenizer, unknown)
        if hidden and len(hidden.ids) <= length - 2:
            seen.add(sentence)
            found.append(hidden)
        if len(found) == BLANKS:
            break
    return found


def digest(text: str) -> bytes:
    """By which documents, sentences and words are chosen."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()


def whole_sentences(text: str) -> Iterator[str]:
    """The sentences of a text that have an end, on one line each."""
    for paragraph in PARAGRAPH.split(text):
        for sentence in STOP.split(" ".join(paragraph.split())):
            if AT_END.search(sentence):
                yield sentence


def lines(text: str) -> Iterator[str]:
    """The lines of a text: of writing without full stops."""
    for line in text.splitlines():
        yield " ".join(line.split())


def is_prose(sentence: str) -> bool:
    """Whether it is as long as a sentence, and nearly all letters."""
    if not FEWEST_CHARACTERS <= len(sentence) <= MOST_CHARACTERS:
        return False
    if sentence[0].islower() or not BEGIN.match(sentence):
        return False
    if CODE.search(sentence):
        return False
    letters = sum(unicodedata.category(char)[0] in "LMZ" for char in sentence)
    return letters >= LEAST_LETTERS * len(sentence)


def hide(sentence: str, tokenizer: "Tokenizer", unknown: int) -> Hidden | None:
    """The sentence with the word to hide; None if it has none, or a word that is `unknown`, [UNK]."""
    ids, owners, _ = divide_text(sentence, tokenizer, unknown)
    spans = words_in(sentence)
    words = texts_in(sentence, spans)
    if len(words) < FEWEST_WORDS or unknown in ids:
        return None
    sizes = np.bincount(owners[owners >= 0], minlength=len(words))
    number = word_to_hide(sentence, words, sizes)
    if number is None:
        return None
    places = np.flatnonzero(owners == number)
    first = int(places[0])
    entry = str(tokenizer.id_to_token(int(ids[first])))
    if entry.startswith(CONTINUES) or has_gaps(places):
        return None
    return Hidden(sentence, int(spans.begins[number]), int(spans.ends[number]), ids.tolist(), first, pieces=len(places))


def has_gaps(places: np.ndarray) -> bool:
    """Whether places, in order, don't follow one another."""
    return bool(places[-1] - places[0] + 1 != len(places))


def texts_in(sentence: str, spans: Spans) -> list[str]:
    """The words of a sentence that stand in these spans."""
    begins = spans.begins.tolist()
    ends = spans.ends.tolist()
    return [sentence[begin:end] for begin, end in zip(begins, ends, strict=True)]


def word_to_hide(sentence: str, words: list[str], sizes: np.ndarray) -> int | None:
    """The number of the word to hide, one of the fewest pieces; None if none is fit. `sizes`: of words, in pieces."""
    fit = [i for i, word in enumerate(words) if i > 0 and can_hide(word, words) and 0 < sizes[i] <= MOST_PIECES]
    if not fit:
        return None
    return min(fit, key=lambda i: (sizes[i], digest(words[i] + sentence)))


def can_hide(word: str, words: list[str]) -> bool:
    """Whether a word may be hidden: letters, not too few, that stand once in the sentence."""
    if words.count(word) > 1 or not LETTERS.fullmatch(word):
        return False
    return len(word) >= FEWEST_LETTERS or bool(IDEOGRAPH.search(word))


# The model's words


def fill(bert: "Bert", tokenizer: "Tokenizer", hidden: Hidden) -> Blank:
    """What a model expects in the place of the hidden word."""
    import torch

    specials = specials_of(tokenizer)
    ids = torch.tensor([specials.cls, *hidden.ids, specials.sep])
    places = torch.arange(hidden.pieces) + 1 + hidden.first
    right = ids[places].clone()
    ids[places] = specials.mask
    found = most_likely(bert, ids, places, kinds_of_entries(tokenizer, specials))
    log_right = log_probability(bert, ids, places, right)
    guesses = [guess_of(tokenizer, pieces, log_share) for pieces, log_share in found[:GUESSES]]
    return {
        "before": hidden.sentence[: hidden.begin],
        "word": hidden.sentence[hidden.begin : hidden.end],
        "after": hidden.sentence[hidden.end :],
        "pieces": hidden.pieces,
        "probability": rounded(log_right),
        "right": found[0][0] == right.tolist(),
        "guesses": guesses,
    }


def log_probability(bert: "Bert", ids: "torch.Tensor", places: "torch.Tensor", pieces: "torch.Tensor") -> float:
    """Of a word in these places, (K,), by its pieces, (K,): of each piece after those before it. `ids`: (S,)."""
    logs = []
    for i, place in enumerate(places):
        filled = with_pieces(ids, places, pieces[None, :i])
        scores_1V = scores_at(bert, filled, place)
        logs.append(float(scores_1V[0, pieces[i]]))
    return sum(logs)


def kinds_of_entries(tokenizer: "Tokenizer", specials: "Specials") -> "torch.Tensor":
    """(2, V) bool: whether an entry of the vocabulary begins a word, and whether it continues one."""
    import torch

    entries = [tokenizer.id_to_token(number) or "" for number in range(tokenizer.get_vocab_size())]
    continues_V = torch.tensor([entry.startswith(CONTINUES) for entry in entries])
    kinds_2V = torch.stack([~continues_V, continues_V])
    kinds_2V[:, list(specials)] = False
    return kinds_2V


def most_likely(
    bert: "Bert", ids: "torch.Tensor", places: "torch.Tensor", kinds_2V: "torch.Tensor"
) -> list[tuple[list[int], float]]:
    """The most likely words in these places, by a search of the BEAM best beginnings: pieces and log-probability.

    ids       (S,) token ids, with [MASK] in the places
    kinds_2V  bool: which entries begin a word, and which continue one
    """
    import torch

    found = torch.zeros((1, 0), dtype=torch.long)
    total_B = torch.zeros(1)
    for i, place in enumerate(places):
        allowed_V = kinds_2V[min(i, 1)]
        scores_BV = scores_at(bert, with_pieces(ids, places, found), place)[:, : len(allowed_V)]
        scores_BV = scores_BV.masked_fill(~allowed_V, -torch.inf) + total_B[:, None]
        total_B, best = scores_BV.flatten().topk(min(BEAM, int(allowed_V.sum())))
        rows = best // scores_BV.shape[1]
        found = torch.cat([found[rows], best[:, None] % scores_BV.shape[1]], dim=1)
    return list(zip(found.tolist(), total_B.tolist(), strict=True))


def with_pieces(ids: "torch.Tensor", places: "torch.Tensor", pieces_BK: "torch.Tensor") -> "torch.Tensor":
    """(B, S): the ids with the first of the places filled in by each row of pieces."""
    rows = ids.repeat(len(pieces_BK), 1)
    rows[:, places[: pieces_BK.shape[1]]] = pieces_BK
    return rows


def scores_at(bert: "Bert", ids_BS: "torch.Tensor", place: "torch.Tensor") -> "torch.Tensor":
    """(B, V): the log-probability of each entry in a place."""
    import torch

    with torch.inference_mode():
        states_BSD = bert.encode(ids_BS)
        return bert.logits(states_BSD[:, place]).float().log_softmax(dim=-1)


def guess_of(tokenizer: "Tokenizer", pieces: list[int], log_share: float) -> Guess:
    """A guess from its pieces."""
    entries = [str(tokenizer.id_to_token(number)).removeprefix(CONTINUES) for number in pieces]
    return {"word": "".join(entries), "probability": rounded(log_share)}


def rounded(log_share: float) -> float:
    """A probability, to four digits: more of them differ between machines."""
    return round(float(np.exp(log_share)), 4)
