"""CoNLL files: a line for each token, with its tags in columns, and a blank line between sentences."""

import io
import logging
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import dropwhile, pairwise
from pathlib import Path
from typing import NamedTuple

from model.errors import InputError
from model.wording import counted
from tasks.corpus.containers import BUFFER, content_of, reading

TOKENS, TAGS = "tokens", "tags"
DOCUMENT = "-DOCSTART-"  # a line between documents
COMMENT = re.compile(r"#(?:$|\s| ?\w+ ?=)")  # how a comment begins that has as many fields as a token, `# id = 1`
INDEX = re.compile(r"\d+")
NO_TOKEN = re.compile(r"\d+[-.]\d+")  # in CoNLL-U, of a word that the next lines divide, or that isn't written
UNIVERSAL = ("id", "form", "lemma", "upos", "xpos", "feats", "head", "deprel", "deps", "misc")  # of CoNLL-U, by name
SAMPLED = 2_000  # sentences that the columns are told by
TREEBANK = 6  # columns; with an index and more of them, the last one isn't the usual tag
MORE = 3  # times as many different values as the tokens have; then the other column may be theirs
SHOWN = 40  # characters of a field in a message
SPAN = re.compile(r"[BIESLU]-(.+)")
OUTSIDE = "O"
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

    def is_index(self, place: int) -> bool:
        """Whether a column has numbers only."""
        return all(INDEX.fullmatch(value) for values in self.values[place] for value in values)

    def stays(self, place: int) -> bool:
        """Whether a column mostly says what it said in the line before, as the name of a document does."""
        same = [one == other for values in self.values[place] for one, other in pairwise(values)]
        return bool(same) and sum(same) > len(same) / 2

    def different(self, place: int) -> set[str]:
        """The different values of a column."""
        return {value for values in self.values[place] for value in values}

    def spans(self, place: int) -> set[str]:
        """The types of the spans that a column marks, as PER for B-PER."""
        return {match[1] for value in self.different(place) if (match := SPAN.fullmatch(value))}

    def is_mostly_outside(self, place: int) -> bool:
        """Whether most lines of a column are outside of spans, as with names; phrases leave little outside."""
        counts = Counter(value for values in self.values[place] for value in values)
        return counts[OUTSIDE] > counts.total() / 2

    def refusal(self, what: str, do: str) -> InputError:
        """An error that shows the columns."""
        names = [f" ({name.upper()})" for name in self.names] or [""] * self.width
        fields = [field if len(field) <= SHOWN else field[:SHOWN] + "…" for field in self.first.fields]
        shown = ", ".join(f"{n}{name} {field!r}" for n, (name, field) in enumerate(zip(names, fields, strict=False), 1))
        return InputError(f"{self.where}: {what}. {do} (finetune.tasks). Line {self.first.number:,} has {shown}.")

    def shown(self, place: int) -> str:
        """The number of a column, or its name."""
        if place < 0 and not self.even:
            return str(place)
        return self.names[place].upper() if self.names else str(place % self.width + 1)

    def asked(self, field: str, name: str) -> int:
        """The place of a column by its number, from 1 or backwards from -1, or its name. Raises InputError for others.

        Counted from the end it is below 0.
        """
        if name.lower() in self.names:
            return self.names.index(name.lower())
        number = int(name) if re.fullmatch(r"-?\d+", name) else 0
        if not 1 <= abs(number) <= self.width:
            expected = f"the number of a column, 1 to {self.width}{' or its name' if self.names else ''}"
            raise self.refusal(f"{field} is {name!r}; expected {expected}", f"Correct {field}")
        return number - 1 if number > 0 else number

    def tags(self) -> int:
        """The place of the tags: the last column that isn't empty. Raises InputError if it can't be told."""
        do = "Set label to the number of the column with the tags"
        if not self.even or (self.width > TREEBANK and any(map(self.is_index, range(self.width)))):
            raise self.refusal("it can't be told which column has the tags", do)
        last = max(place for place in range(self.width) if place == 0 or self.different(place) != {""})
        for place in range(1, last):
            shared = self.spans(place) & self.spans(last)
            both_name = self.is_mostly_outside(place) and self.is_mostly_outside(last)
            if shared or (both_name and self.spans(place)):
                of = f" of {sorted(shared)[0]}" if shared else ""
                raise self.refusal(f"columns {place + 1} and {last + 1} both have tags{of}, and each may be meant", do)
        return last

    def tokens(self, tags: int) -> int:
        """The place of the tokens: the first column that is neither numbers nor mostly the same from line to line.

        Raises InputError if it can't be told.
        """
        if self.names:
            return UNIVERSAL.index("form")
        others = [place for place in range(self.width) if place != tags % self.width]
        texts = [place for place in others if not self.is_index(place) and not self.stays(place)]
        do = "Set text to the number of the column with the tokens, and label to that of the tags"
        if not texts:
            raise self.refusal("no column looks like tokens", do)
        first, *rest = texts
        found, of_tags = len(self.different(first)), len(self.different(tags))
        if found < of_tags or any(len(self.different(place)) > MORE * found for place in rest):
            raise self.refusal(f"it can't be told which column has the tokens; column {first + 1} has {found:,} "
                               f"different ones, and another has more", do)  # fmt: skip
        return first


def sentences(
    path: Path, where: str, encoding: str = "", text: str = "", label: str = ""
) -> Iterator[tuple[int, dict]]:
    """The sentences of a CoNLL file, as rows of tokens and tags, each with its number.

    `text` and `label` are numbers of columns from 1 (-1: the last), or names of CoNLL-U's, and the names in the rows;
    without them the columns are found. Lines with -DOCSTART- and comments are left out. Raises InputError for lines
    with one field or another number of them than the sentence has, and for columns that can't be told.
    """
    found = without_comments([*blocks(path, where, encoding)], where)
    for sentence in found:
        refuse_ragged(sentence, where)
    if not found:
        return
    about = columns_of(found, where)
    tags = about.tags() if label in ("", TAGS) else about.asked("label", label)
    tokens = about.tokens(tags) if text in ("", TOKENS) else about.asked("text", text)
    if tokens % about.width == tags % about.width and (about.even or tokens == tags):
        raise about.refusal(f"column {tokens + 1} can't have both the tokens and the tags", "Set text and label")
    log.info("%s: tokens are in column %s, tags in column %s.", where, about.shown(tokens), about.shown(tags))
    found = without_header(found, tags, where)
    of_tags = [[line.fields[tags] for line in sentence] for sentence in found]
    for number, (sentence, given) in enumerate(zip(found, without_brackets(of_tags), strict=True), 1):
        yield number, {text or TOKENS: [line.fields[tokens] for line in sentence], label or TAGS: given}


def without_header(found: list[list[Line]], tags: int, where: str) -> list[list[Line]]:
    """The sentences without a first line that names the columns: the tags' name is one of HEADERS, and no tag."""
    (header, *rest), *others = found
    name = header.fields[tags]
    if name.lower() not in HEADERS or any(line.fields[tags] == name for block in (rest, *others) for line in block):
        return found
    log.info("%s: line %s names the columns and is left out.", where, f"{header.number:,}")
    return [rest, *others] if rest else others


def without_brackets(of_tags: list[list[str]]) -> list[list[str]]:
    """The tags of sentences, with B-ORG and I-ORG for CoNLL-2012's brackets, if they are such without any nested."""
    every = {tag for tags in of_tags for tag in tags}
    if "*" not in every or not all(map(BRACKETS.fullmatch, every)):
        return of_tags
    made = []
    for tags in of_tags:
        inside, of_sentence = "", []
        for begins, _, ends in (BRACKETS.fullmatch(tag).groups() for tag in tags):
            inside = begins or inside
            prefix = "B-" if begins else "I-"
            of_sentence.append(prefix + inside if inside else "O")
            inside = "" if ends else inside
        made.append(of_sentence)
    return made


def blocks(path: Path, where: str, encoding: str) -> Iterator[list[Line]]:
    """The lines between blank lines, with their fields: between tabs, or blanks if a line has no tab within."""
    with reading(where), path.open("rb", BUFFER) as file:
        text = io.TextIOWrapper(content_of(file, where, encoding)[1], "utf-8").read()
    block: list[Line] = []
    for number, line in enumerate([*text.split("\n"), ""], 1):  # `splitlines` knows more ends
        if line.startswith(DOCUMENT) or not line.strip("\t "):
            if block:
                yield block
            block = []
            continue
        fields = line.split("\t") if "\t" in line.strip("\t ") else list(filter(None, line.split(" ")))
        block.append(Line(number, [field.strip(" ") for field in fields], line))


def without_comments(found: list[list[Line]], where: str) -> list[list[Line]]:
    """The blocks without comments and without lines that are no tokens of their own; none that is empty then.

    Comments are lines before a sentence that start with `#` and have another number of fields; or as many, if they
    begin as a comment does and their last field is nowhere a tag.
    """
    lines = [line for block in found for line in dropwhile(lambda line: line.text.startswith("#"), block)]
    usual = Counter(len(line.fields) for line in lines).most_common(1)[0][0] if lines else 0
    tags = {line.fields[-1] for line in lines}
    kept, left_out = [], 0
    for block in found:
        width = next((len(line.fields) for line in block if not line.text.startswith("#")), usual)

        def is_comment(line: Line, width: int = width) -> bool:
            alike = len(line.fields) == width and (not COMMENT.match(line.text) or line.fields[-1] in tags)
            return line.text.startswith("#") and not alike

        rest = list(dropwhile(is_comment, block))
        sentence = without_ranges(rest)
        left_out += len(block) - len(sentence)
        if sentence:
            kept.append(sentence)
    if left_out:
        log.info("%s: %s without a token left out, such as comments.", where, counted(left_out, "line"))
    return kept


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
                "Expected a token and its tag on each line, as many fields on each line of a sentence, and a blank line "
                "between sentences. Correct it, or set kind (finetune.tasks)."
            )


def columns_of(found: list[list[Line]], where: str) -> Columns:
    """What the columns of these sentences hold."""
    widths = {len(sentence[0].fields) for sentence in found}
    width, sample = min(widths), found[:SAMPLED]
    values = [[[line.fields[place] for line in sentence] for sentence in sample] for place in range(width)]
    return Columns(where, width, len(widths) == 1, values, found[0][0])
