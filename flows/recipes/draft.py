"""A draft of a recipe file for somebody's own text and labels: fields that fit what was found, each with a comment."""

import json
import math
import os
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from flows.recipes.deltas import DELTAS
from flows.recipes.findings import Found, doubts_on, first, percent, task_in_words, text_in_words
from model.wording import printable
from tasks.corpus.overview import TextOverview
from tasks.glue.overview import TaskOverview
from tasks.text import words
from tasks.text.encoder import portions
from tasks.text.scripts import LATIN
from tasks.text.words import ASCII, Normaliser
from tasks.text.writing import Writing, writing_of
from tasks.vocabulary import FEWEST_ENTRIES, add_counts, train_wordpiece

LITTLE = 2e6  # characters of text, below which the smallest recipe learns more
HUGE = 1e9  # characters, from which a day of a GPU pays off
BUDGETS = {"pocket-mini": "3 minutes"}
USUAL_BUDGET = "20 minutes"
ENTRIES = {name: DELTAS[name]["vocabulary"]["entries"] for name in ("pocket-frontier", "pocket-mini")}
HELD_OUT = {name: DELTAS[name]["tokenize"]["heldout_fraction"] for name in (*ENTRIES, "pocket-adapt", "adapt")}
SHARES = (0.005, 0.01, 0.02, 0.05, 0.1)  # of the documents, to hold out
HELD_DOCUMENTS = 20  # of which a loss means something; and characters
HELD_CHARACTERS = 50_000
ENOUGH = 3e6  # characters, which yield the entries of any pocket recipe
MARGIN = 1.5  # times as many entries as are asked for, which the whole text should yield: some of it will be dropped
LENGTHS = (128, 256, 512)  # tokens of a sequence; the first is the recipes'
MOST_CUT = 0.2  # of the labelled texts
TOKENS_A_CHARACTER = {LATIN: 0.25, "CYRILLIC": 0.25, "CJK": 0.7, "KANA": 0.5, "HANGUL": 0.5, "THAI": 0.5}
USUAL_TOKENS = 0.3  # a character, of other scripts
WIDTH = 110  # characters of a line of the file
UNITS = {"line": "each line is a document", "blank-line": "blank lines divide documents", "file": "each file is one"}
OTHER_METRICS = {"classes": "macro_f1", "regression": "spearman"}
ABOUT_KINDS = {
    "regression": "the labels are numbers",
    "multilabel": "a text has several labels, or none",
    "tokens": "each token has a tag",
}


class Setting(NamedTuple):
    """A field with its value and a comment. `off`: it stands there as a comment, for somebody who needs it."""

    name: str
    value: Any
    note: str = ""
    off: bool = False


@dataclass
class Section:
    """A table of the file, with comments above its fields."""

    title: str  # in brackets; empty: the top of the file
    comments: list[str] = field(default_factory=list)
    settings: list[Setting] = field(default_factory=list)

    def set(self, name: str, value: Any, note: str = "", off: bool = False) -> None:
        """Add a field."""
        self.settings.append(Setting(name, value, note, off))

    @property
    def is_empty(self) -> bool:
        """Whether it says nothing."""
        return not self.settings and not self.comments


@dataclass(frozen=True)
class Draft:
    """A recipe file, and what to say about it."""

    recipe: str
    budget: str
    sections: list[Section]
    text: list[str]  # what was found, in words
    labels: list[str]
    doubts: list[str]

    def toml(self, file: str) -> str:
        """The file's content."""
        head = [
            "# What `cram init` found in your text and labels, and settings that fit. Change what you like.",
            f"#   cram run {file} --plan    shows what the run would take, and runs nothing",
            f"#   cram run {file}",
            "# `cram params STAGE` explains the fields of a table, also those that are not here.",
        ]
        if self.doubts:
            head += ["#", "# Please check:"]
            for doubt in self.doubts:
                head += commented(doubt, "- ")
        blocks = ["\n".join(head), *map(render, (section for section in self.sections if not section.is_empty))]
        return "\n\n".join(blocks) + "\n"


# TOML


def render(section: Section) -> str:
    """A section as TOML. A comment stands behind its field if there is room, else above it."""
    lines = [section.title] if section.title else []
    for comment in section.comments:
        lines += commented(comment)
    for name, value, note, off in section.settings:
        line = f"{'# ' if off else ''}{name} = {toml_value(value)}"
        behind = f"{line}  # {printable(note)}" if note else line
        if not note or len(behind) <= WIDTH:
            lines.append(behind)
        else:
            lines += [*commented(note[0].upper() + note[1:]), line]
    return "\n".join(lines)


def commented(text: str, bullet: str = "") -> list[str]:
    """A text as lines of comments."""
    indent = " " * len(bullet)
    return textwrap.wrap(
        printable(text),
        WIDTH,
        initial_indent=f"# {bullet}",
        subsequent_indent=f"# {indent}",
        break_long_words=False,
        break_on_hyphens=False,
    )


def toml_value(value: Any) -> str:
    """A value as TOML, which for strings, numbers, booleans and lists is nearly JSON."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def path_from(folder: Path, given: str) -> str:
    """A path or glob, given from the working directory, as it counts from a folder; absolute ones stay."""
    path = os.path.expanduser(given)
    if os.path.isabs(path):
        return path
    return os.path.relpath(path, folder).replace(os.sep, "/")


# The draft


def draft(found: Found, folder: Path) -> Draft:
    """A recipe file in this folder for what was found."""
    recipe = recipe_for(found)
    budget = BUDGETS.get(recipe, USUAL_BUDGET)
    top = Section("")
    top.set("recipe", recipe, about_recipe(found, recipe))
    sections = [top]
    if found.only_finetunes:
        sections.append(use_section(found, folder))
    else:
        if not found.tasks:
            top.set("until", "pretrain", "there are no labels; with labels, delete this line")
        sections += [
            download_section(found, folder),
            vocabulary_section(found, recipe),
            tokenize_section(found, recipe),
            pretrain_section(found, folder, budget),
        ]
    if found.tasks:
        sections += [finetune_section(found), *(task_section(task, folder) for task in found.tasks)]
    labels = [task_in_words(task) for task in found.tasks]
    return Draft(recipe, budget, sections, text_in_words(found), labels, doubts_on(found))


def recipe_for(found: Found) -> str:
    """The recipe that fits the text."""
    if found.start:
        return "adapt" if found.has_gpu else "pocket-adapt"
    return "pocket-mini" if found.characters < LITTLE else "pocket-frontier"


def about_recipe(found: Found, recipe: str) -> str:
    """What to say of the choice of a recipe."""
    if found.only_finetunes:
        return "a public encoder, finetuned on your labels"
    if found.start:
        return "a public encoder, trained further on your text"
    if recipe == "pocket-mini":
        return 'for little text; from some megabytes on: "pocket-frontier" with a budget of "20 minutes"'
    if found.characters >= HUGE and found.has_gpu:
        return 'for a first look; with this much text and a day of the GPU: "frontier" with a budget of "24 hours"'
    return '"pocket-mini" for a quick try, "frontier" for a day of a GPU'


def download_section(found: Found, folder: Path) -> Section:
    """Where the text is, and how it is read."""
    section = Section("[download]")
    text = found.text
    if text is None:
        read_labelled_rows(section, found.tasks[0], folder)
        return section
    section.comments += text_in_words(found)
    settings = dict(text.settings)
    dataset = settings.pop("dataset", "")
    section.set("source", "hub" if dataset else "files")
    if dataset:
        section.set("dataset", dataset)
    else:
        section.set("files", [path_from(folder, path) for path in found.files])
    is_asked = "column" in settings
    if text.column:
        others = f"; others that may be meant: {first(text.others)}" if text.others else ""
        section.set("column", settings.pop("column", text.column), f"of the text{others}", off=not is_asked)
    set_documents_by(section, settings.pop("documents_by", ""), text)
    for name, value in settings.items():
        section.set(name, value, "a guess" if name == "encoding" else "")
    section.set("megabytes", 100, "read no more than this much text", off=True)
    return section


def set_documents_by(section: Section, unit: str, text: TextOverview) -> None:
    """Say what a document of text files is; of other files, nothing."""
    if unit:
        section.set("documents_by", unit, f'{UNITS[unit]}; or "line", "blank-line", "file"')
    elif any(source.startswith("text") for source in text.sources):
        section.set("documents_by", "line", 'if each line, or "blank-line": each paragraph, is a document', off=True)


def read_labelled_rows(section: Section, task: TaskOverview, folder: Path) -> None:
    """Take the text from the training rows of a task."""
    section.comments += [
        "There is no text but that of the labelled rows. Add files with more of its kind.",
        "Held-out rows are taken out of the text, but for those of fewer than 13 words.",
    ]
    section.set("source", "files")
    section.set("files", [path_from(folder, path) for path in train_files(task)])
    section.set("column", task.definition.text, "of the text")
    if task.definition.encoding:
        section.set("encoding", task.definition.encoding, "a guess")


def train_files(task: TaskOverview) -> list[str]:
    """The files with the training rows of a task, from the working directory if its data was given so."""
    is_absolute = os.path.isabs(os.path.expanduser(task.definition.data))
    return [str(path) if is_absolute else os.path.relpath(path) for path in task.train]


def model_from(folder: Path, start: str) -> str:
    """The model to begin from: a folder here, as it counts from the recipe file's folder, or another name."""
    return path_from(folder, start) if Path(start).expanduser().exists() else start


def vocabulary_section(found: Found, recipe: str) -> Section:
    """Which characters the vocabulary reads, and its size; a public encoder brings its own."""
    section = Section("[vocabulary]")
    if recipe not in ENTRIES:
        return section
    how = Normaliser(characters="unicode") if found.needs_unicode else ASCII
    note = about_ascii(found.writing)
    if found.needs_unicode and not found.writing.needs_unicode:
        note = f"for the labelled texts of {first(found.tasks_beyond_ascii)}"
    section.set("characters", how.characters, note)
    usual = ENTRIES[recipe]
    entries = usual
    note = ""
    if found.characters < ENOUGH:
        most = entries_of(found.texts, int(MARGIN * usual), how)
        entries = min(usual, largest_power(most / MARGIN))
        note = f"the text yields {most:,} at the most"
    is_usual = entries == usual
    section.set("entries", entries, "" if is_usual else note, off=is_usual)
    return section


def about_ascii(writing: Writing) -> str:
    """What ASCII would do to text; empty if nothing."""
    lost = []
    if writing.deleted:
        lost.append(f"delete {percent(writing.deleted)} of the characters")
    if writing.accented:
        lost.append(f"strip the accents of {percent(writing.accented)}")
    return f"ASCII would {' and '.join(lost)}" if lost else ""


def entries_of(texts: Sequence[str], most: int, how: Normaliser) -> int:
    """How many entries a vocabulary of texts gets, up to `most`."""
    counts = [words.COUNTS.empty_table()]
    for some, _ in portions(list(texts)):
        counts.append(words.count(some, how))
    return train_wordpiece(add_counts(counts).sort_by("word"), most, how).get_vocab_size()


def largest_power(most: float) -> int:
    """The largest power of two up to `most`, of those that a vocabulary may have."""
    return max(FEWEST_ENTRIES, 2 ** math.floor(math.log2(max(1.0, most))))


def tokenize_section(found: Found, recipe: str) -> Section:
    """The length of sequences, and what is held out."""
    section = Section("[tokenize]")
    length, note = length_for(found.tasks)
    section.set("length", length, note, off=length == LENGTHS[0])
    share = share_to_hold_out(found, HELD_OUT[recipe])
    section.set("heldout_fraction", share, "of the documents, to measure the loss on", off=share == HELD_OUT[recipe])
    return section


def share_to_hold_out(found: Found, usual: float) -> float:
    """The share of the documents of which a loss means something: the recipe's, or more of little text."""
    documents = HELD_DOCUMENTS / max(1, found.documents)
    characters = HELD_CHARACTERS / max(1, found.characters)
    enough = [share for share in SHARES if share >= max(documents, characters, usual)]
    return enough[0] if enough else SHARES[-1]


def length_for(tasks: Sequence[TaskOverview]) -> tuple[int, str]:
    """The length of sequences that fits the labelled texts, with a note."""
    sizes = [size for task in tasks for size in token_counts(task)]
    if not sizes:
        return LENGTHS[0], "tokens of a sequence; 512 for long texts"

    def longer(length: int) -> float:
        return sum(size > length for size in sizes) / len(sizes)

    usual, *more = LENGTHS
    if longer(usual) <= MOST_CUT:
        if longer(usual) == 0:
            return usual, "tokens; the labelled texts fit in"
        return usual, f"tokens; of the labelled texts, {percent(longer(usual))} may be longer and are cut"
    length = next((length for length in more if longer(length) <= MOST_CUT), more[-1])
    return length, f"tokens; of the labelled texts, about {percent(longer(usual))} are longer than {usual}"


def token_counts(task: TaskOverview) -> list[float]:
    """About how many tokens the labelled texts have."""
    texts = task.texts
    ratio = TOKENS_A_CHARACTER.get(writing_of(texts).main, USUAL_TOKENS) if texts else 0
    return [len(text) * ratio + 2 for text in texts]


def use_section(found: Found, folder: Path) -> Section:
    """The model that is only finetuned."""
    section = Section("[use]")
    section.set("pretrain", model_from(folder, found.start), "as it is: it is only finetuned")
    return section


def pretrain_section(found: Found, folder: Path, budget: str) -> Section:
    """How long to train, and from which model."""
    section = Section("[pretrain]")
    if found.start:
        section.set("start", model_from(folder, found.start), "the model to begin from")
    section.set("budget", budget, "of training; the data stages and finetuning come on top")
    return section


def finetune_section(found: Found) -> Section:
    """What is common to all tasks."""
    section = Section("[finetune]")
    if found.start and not found.only_finetunes:
        section.set("baseline", False, "`cram study adapt` compares with the encoder as it is")
    elif not found.only_finetunes:
        section.set("baseline", True, "also without pretraining, so that you see what your text brings")
    length, _ = length_for(found.tasks)
    if length != LENGTHS[0]:
        section.set("max_tokens", length, "of a labelled text, up to the length of sequences")
    section.set("seeds", 3, "runs of each task, so that you see the spread", off=True)
    return section


def task_section(task: TaskOverview, folder: Path) -> Section:
    """The definition of a task."""
    own = task.definition
    section = Section("[[finetune.tasks]]")
    if task.data:
        section.comments.append(task_in_words(task))
        if any("there is no validation split" in note for note in task.data.notes):
            section.comments.append("A part of the training rows is held out for validation, chosen by a digest.")
    section.set("name", own.name)
    section.set("data", own.data if own.repository() else path_from(folder, own.data))
    set_columns(section, task)
    set_kind(section, task)
    if own.encoding:
        section.set("encoding", own.encoding, "a guess")
    if "max_unlabelled" in own.model_fields_set:
        section.set("max_unlabelled", own.max_unlabelled, "share of the rows that may have no label")
    if own.kind in OTHER_METRICS:
        section.set("metric", OTHER_METRICS[own.kind], "the score", off=True)
    return section


def set_columns(section: Section, task: TaskOverview) -> None:
    """Set the columns of texts and label; of data that nobody looked at, show how they are set."""
    own = task.definition
    if task.data is None and not own.label:
        section.set("text", "text", "the column", off=True)
        section.set("label", "label", "the column", off=True)
        return
    for name, column in (("text", own.text), ("pair", own.pair), ("label", own.label)):
        others = task.others.get(name, [])
        if column:
            section.set(name, column, f"others that may be meant: {first(others)}" if others else "")
    others = task.others.get("text", [])
    if others and not own.pair:
        section.set("pair", others[0], "the second text, if a row has two that are compared", off=True)


def set_kind(section: Section, task: TaskOverview) -> None:
    """Set what a label is, or show how it is set where it may be something else."""
    kind = task.definition.kind
    is_usual = kind == "classes"
    are_numbers = all(name.lstrip("-").isdigit() for name in task.classes)
    if task.data is None and is_usual:
        section.set("kind", kind, 'or "regression", "multilabel", "tokens"', off=True)
    elif not is_usual:
        section.set("kind", kind, ABOUT_KINDS[kind])
    elif are_numbers and len(task.classes) > 2:
        section.set("kind", "regression", "if the numbers measure something, as stars do", off=True)
