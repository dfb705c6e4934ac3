"""CoNLL files: a line for each token, with its tags in columns, and a blank line between sentences."""

import io
import logging
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, dropwhile, pairwise
from pathlib import Path
from typing import NamedTuple

from model.errors import InputError
from model.wording import counted
from tasks.corpus.containers import content_of, open_raw, reading
from tasks.glue.tags import OUTSIDE

TOKENS = "tokens"
TAGS = "tags"
DOCUMENT = "-DOCSTART-"  # a line between documents
COMMENT = re.compile(r"#(?:$|\s| ?\w+ ?=)")  # how a comment begins that has as many fields as a token, `# id = 1`
INDEX = re.compile(r"\d+")
NO_TOKEN = re.compile(r"\d+[-.]\d+")  # in CoNLL-U, of a word that the next lines divide, or that isn't written
UNIVERSAL = ("id", "form", "lemma", "upos", "xpos", "feats", "head", "deprel", "deps", "misc")  # of CoNLL-U, by name
SAMPLED = 2_000  # sentences that show what the columns hold
TREEBANK = 6  # columns; with an index and more of them, the last one isn't the usual tag
MORE = 3  # times as many different values as the tokens have; then the other column may be theirs
SHOWN = 40  # characters of a field in a message
SPAN = re.compile(r"[BIESLU]-(.+)")
HEADERS = {"tag", "tags", "label", "labels", "ner", "ner_tag", "ner_tags", "pos", "upos"}  # names of a column of tags
BRACKETS = re.compile(r"(?:\(([^()*]+))?(\*?)(\)?)")  # a span in CoNLL-2012: (ORG* on its first token, *) on its last
log = logging.getLogger(__name__)


class Line(NamedTuple):
    """A line of a sentence."""

    number: int
    fields: list[str]
    text: str


@dataclass(frozen=True)
class Columns:
    """What the columns of a file hold, by a sample of its sentences."""

    where: str
    width: int  # the smallest number of fields
    even: bool  # whether all lines have as many
    values: list[list[list[str]]]  # of each column, by sentence
    first: Line

    @property
    def names(self) -> Sequence[str]:
        """The names of the columns; none if the format has none."""
        return UNIVERSAL if self.width == len(UNIVERSAL) and self.is_index(0) else ()

    def column(self, place: int) -> Iterator[str]:
        """The values of a column."""
        return chain.from_iterable(self.values[place])

    def is_index(self, place: int) -> bool:
        """Whether a column has numbers only."""
        return all(INDEX.fullmatch(value) for value in self.column(place))

    def mostly_repeats(self, place: int) -> bool:
        """Whether a column mostly says what it said in the line before, as the name of a document does."""
        same = [one == other for values in self.values[place] for one, other in pairwise(values)]
        return bool(same) and sum(same) > len(same) / 2

    def different(self, place: int) -> set[str]:
        """The different values of a column."""
        return set(self.column(place))

    def spans(self, place: int) -> set[str]:
        """The types of the spans that a column marks, as PER for B-PER."""
        matches = [SPAN.fullmatch(value) for value in self.different(place)]
        return {match[1] for match in matches if match}

    def is_mostly_outside(self, place: int) -> bool:
        """Whether most lines of a column are outside of spans, as with names; phrases leave little outside."""
        counts = Counter(self.column(place))
        return counts[OUTSIDE] > counts.total() / 2

    def refusal(self, what: str, do: str) -> InputError:
        """An error that shows the columns."""
        names = [f" ({name.upper()})" for name in self.names] or [""] * self.width
        shown = []
        for number, (name, field) in enumerate(zip(names, self.first.fields, strict=False), 1):
            cut = field if len(field) <= SHOWN else field[:SHOWN] + "…"
            shown.append(f"{number}{name} {cut!r}")
        line = f"Line {self.first.number:,} has {', '.join(shown)}."
        return InputError(f"{self.where}: {what}. {do} (finetune.tasks). {line}")

    def shown(self, place: int) -> str:
        """The number of a column, or its name."""
        if place < 0 and not self.even:
            return str(place)
        return self.names[place].upper() if self.names else str(place % self.width + 1)

    def find(self, field: str, name: str) -> int:
        """The place of a column by its number, from 1 or backwards from -1, or its name. Raises InputError for others.

        Counted from the end it is below 0.
        """
        if name.lower() in self.names:
            return self.names.index(name.lower())
        number = int(name) if re.fullmatch(r"-?\d+", name) else 0
        if not 1 <= abs(number) <= self.width:
            or_name = " or its name" if self.names else ""
            expected = f"the number of a column, 1 to {self.width}{or_name}"
            raise self.refusal(f"{field} is {name!r}; expected {expected}", f"Correct {field}")
        return number - 1 if number > 0 else number

    def tags(self) -> int:
        """The place of the tags: the last column that isn't empty. Raises InputError if it isn't clear."""
        do = "Set label to the number of the column with the tags"
        has_index = any(self.is_index(place) for place in range(self.width))
        if not self.even or (self.width > TREEBANK and has_index):
            raise self.refusal("it isn't clear which column has the tags", do)
        last = max(place for place in range(self.width) if place == 0 or self.different(place) != {""})
        for place in range(1, last):
            shared = self.spans(place) & self.spans(last)
            both_name = self.is_mostly_outside(place) and self.is_mostly_outside(last)
            if shared or (both_name and self.spans(place)):
                of = f" of {sorted(shared)[0]}" if shared else ""
                raise self.refusal(
                    f"columns {place + 1} and {last + 1} both have tags{of}, and either may be meant", do
                )
        return last

    def tokens(self, tags: int) -> int:
        """The place of the tokens: the first column that is neither numbers nor mostly the same from line to line.

        Raises InputError if it isn't clear.
        """
        if self.names:
            return UNIVERSAL.index("form")
        do = "Set text to the number of the column with the tokens, and label to that of the tags"
        texts = []
        for place in range(self.width):
            if place != tags % self.width and not self.is_index(place) and not self.mostly_repeats(place):
                texts.append(place)
        if not texts:
            raise self.refusal("no column looks like tokens", do)
        first, *others = texts
        found = len(self.different(first))
        has_more = any(len(self.different(place)) > MORE * found for place in others)
        if has_more or found < len(self.different(tags)):
            what = f"it isn't clear which column has the tokens; column {first + 1} has {found:,} different ones, and "
            raise self.refusal(what + "another has more", do)
        return first


def sentences(
    path: Path, where: str, encoding: str = "", text: str = "", label: str = ""
) -> Iterator[tuple[int, dict]]:
    """The sentences of a CoNLL file, as rows of tokens and tags, each with its number.

    `text` and `label` are numbers of columns from 1 (-1: the last), or names of CoNLL-U's, and the names in the rows;
    without them the columns are found. Lines with -DOCSTART- and comments are left out. Raises InputError for lines
    with one field or another number of them than the sentence has, and for columns that aren't clear.
    """
    found = without_comments(list(blocks(path, where, encoding)), where)
    for sentence in found:
        refuse_ragged(sentence, where)
    if not found:
        return
    tokens, tags = find_columns(columns_of(found, where), text, label)
    found = without_header(found, tags, where)
    given = without_brackets([[line.fields[tags] for line in sentence] for sentence in found])
    for number, (sentence, of_sentence) in enumerate(zip(found, given, strict=True), 1):
        words = [line.fields[tokens] for line in sentence]
        yield number, {text or TOKENS: words, label or TAGS: of_sentence}


class Places(NamedTuple):
    """The columns of a file that are read, from 0; counted from the end they are below 0."""

    tokens: int
    tags: int


def find_columns(about: Columns, text: str, label: str) -> Places:
    """The columns of the tokens and of the tags, by their names as in `sentences`; logged."""
    tags = about.tags() if label in ("", TAGS) else about.find("label", label)
    tokens = about.tokens(tags) if text in ("", TOKENS) else about.find("text", text)
    if tokens % about.width == tags % about.width and (about.even or tokens == tags):
        raise about.refusal(f"column {tokens + 1} can't have both the tokens and the tags", "Set text and label")
    log.info("%s: tokens are in column %s, tags in column %s.", about.where, about.shown(tokens), about.shown(tags))
    return Places(tokens, tags)


def without_header(found: list[list[Line]], tags: int, where: str) -> list[list[Line]]:
    """The sentences without a first line that names the columns.

    In the column of the tags it has one of HEADERS, which isn't a tag elsewhere.
    """
    (header, *rest), *others = found
    name = header.fields[tags]
    is_tag = any(line.fields[tags] == name for block in (rest, *others) for line in block)
    if is_tag or name.lower() not in HEADERS:
        return found
    log.info("%s: line %s names the columns and is left out.", where, f"{header.number:,}")
    return [rest, *others] if rest else others


def without_brackets(of_tags: list[list[str]]) -> list[list[str]]:
    """The tags of sentences, with B-ORG and I-ORG for CoNLL-2012's brackets, if they are such without any nested."""
    every = set(chain.from_iterable(of_tags))
    matches = {}
    for tag in every:
        match = BRACKETS.fullmatch(tag)
        if match is None:
            return of_tags
        matches[tag] = match
    if "*" not in every:
        return of_tags
    return [in_iob2([matches[tag] for tag in tags]) for tags in of_tags]


def in_iob2(brackets: list[re.Match[str]]) -> list[str]:
    """The tags of a sentence, from matches of BRACKETS."""
    tags = []
    inside = ""
    for match in brackets:
        begins, _, ends = match.groups()
        inside = begins or inside
        mark = "B-" if begins else "I-"
        tags.append(mark + inside if inside else OUTSIDE)
        if ends:
            inside = ""
    return tags


def blocks(path: Path, where: str, encoding: str) -> Iterator[list[Line]]:
    """The lines between blank lines, with their fields: between tabs, or blanks if a line has no tab within."""
    with reading(where), open_raw(path) as file:
        _, content = content_of(file, where, encoding)
        text = io.TextIOWrapper(content, "utf-8").read()
    block: list[Line] = []
    for number, line in enumerate([*text.split("\n"), ""], 1):  # `splitlines` knows more ends
        if line.startswith(DOCUMENT) or not line.strip("\t "):
            if block:
                yield block
            block = []
            continue
        has_tabs = "\t" in line.strip("\t ")
        fields = line.split("\t" if has_tabs else " ")
        block.append(Line(number, [field.strip(" ") for field in fields if field or has_tabs], line))


def without_comments(found: list[list[Line]], where: str) -> list[list[Line]]:
    """The blocks without comments and without lines that aren't separate tokens; blocks then empty are left out.

    Comments are lines before a sentence that start with `#` and have another number of fields; or as many, if they
    begin as a comment does and their last field is nowhere a tag.
    """
    lines: list[Line] = []
    for block in found:
        lines += dropwhile(starts_with_hash, block)
    sizes = Counter(len(line.fields) for line in lines)
    usual = sizes.most_common(1)[0][0] if lines else 0
    tags = {line.fields[-1] for line in lines}
    kept = []
    left_out = 0
    for block in found:
        widths = [len(line.fields) for line in block if not starts_with_hash(line)]
        width = widths[0] if widths else usual
        start = 0
        while start < len(block) and is_comment(block[start], width, tags):
            start += 1
        sentence = without_ranges(block[start:])
        left_out += len(block) - len(sentence)
        if sentence:
            kept.append(sentence)
    if left_out:
        log.info("%s: %s without a token left out, such as comments.", where, counted(left_out, "line"))
    return kept


def starts_with_hash(line: Line) -> bool:
    """Whether a line may be a comment."""
    return line.text.startswith("#")


def is_comment(line: Line, width: int, tags: set[str]) -> bool:
    """Whether a line before a sentence, whose lines have `width` fields, is a comment. `tags`: tokens' last fields."""
    if not starts_with_hash(line):
        return False
    looks_like_one = COMMENT.match(line.text) and line.fields[-1] not in tags
    return len(line.fields) != width or bool(looks_like_one)


def without_ranges(block: list[Line]) -> list[Line]:
    """The lines of a sentence without those of CoNLL-U that the first column numbers as 1-2 or 1.1."""
    plain = [line for line in block if not NO_TOKEN.fullmatch(line.fields[0])]
    numbered = all(INDEX.fullmatch(line.fields[0]) for line in plain)
    return plain if plain and numbered else block


def refuse_ragged(sentence: list[Line], where: str) -> None:
    """Raise InputError for a line with one field, or with another number of fields than the first of its sentence."""
    width = len(sentence[0].fields)
    for line in sentence:
        count = len(line.fields)
        if count != width or count == 1:
            others = "" if line is sentence[0] else f"; line {sentence[0].number:,} has {width}"
            raise InputError(
                f"{where}: line {line.number:,} has {counted(count, 'field')}, {line.text.strip()[:SHOWN]!r}{others}. "
                "Expected a token and its tag on each line, as many fields on each line of a sentence, and a blank "
                "line between sentences. Correct it, or set kind (finetune.tasks)."
            )


def columns_of(found: list[list[Line]], where: str) -> Columns:
    """What the columns of these sentences hold."""
    widths = {len(sentence[0].fields) for sentence in found}
    width = min(widths)
    sample = found[:SAMPLED]
    values = []
    for place in range(width):
        values.append([[line.fields[place] for line in sentence] for sentence in sample])
    return Columns(where, width, len(widths) == 1, values, found[0][0])
