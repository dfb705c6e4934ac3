"""Markdown, in which reports and cards are written, by Jinja templates; and Markdown as a page of HTML.

Everything that a template or a table inserts is escaped unless it is `Marked`, so text from data is shown literally. A
page is one file without scripts that loads nothing else; its pictures are part of it.
"""

import functools
import html
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from model.wording import budget, counted, duration, printable, span

if TYPE_CHECKING:
    from jinja2 import Environment
    from markdown_it import MarkdownIt
    from markdown_it.token import Token

TEMPLATES = Path(__file__).with_name("templates")
SPECIAL = re.compile(r"([\\`*\[\]<>|~&!#]|(?<![^\W_])_|_(?![^\W_]))")  # an underscore within a word means nothing
MARKS = {"✓": "right", "✗": "wrong"}  # at the beginning of a paragraph in a quotation: its class on a page
NUMBER = re.compile(r"[-+–]?\d[\d.,]*( %)?|–")


class Marked(str):
    """Text that is Markdown already and is not escaped again."""

    __slots__ = ()

    def __html__(self) -> "Marked":  # so that Jinja doesn't escape it
        return self


def escape(text: object) -> Marked:
    """Any text as Markdown that shows it literally, on one line."""
    if hasattr(text, "__html__"):
        return Marked(text)
    return Marked(SPECIAL.sub(r"\\\1", printable(" ".join(str(text).split()))))


def code(text: object) -> Marked:
    """Any text in the font of code; escaped text if it contains backticks."""
    if "`" in str(text):
        return escape(text)
    return Marked(f"`{printable(' '.join(str(text).split()))}`".replace("|", "\\|"))


def codes(texts: Iterable[object]) -> Marked:
    """Several texts in the font of code, with commas between them."""
    return Marked(", ".join(code(text) for text in texts))


def short(number: float) -> str:
    """A large number in a few characters, as in `119.6 M`."""
    for unit, size in ((" B", 1e9), (" M", 1e6), (" k", 1e3)):
        if number >= size:
            return f"{number / size:.1f}{unit}"
    return f"{number:g}"


def shortened(text: str, most: int = 240) -> str:
    """A text on one line, of at most so many characters."""
    line = " ".join(text.split())
    return line if len(line) <= most else line[:most].rstrip() + " …"


def percent(share: float) -> str:
    """A probability: `31 %`, `2.4 %`, `< 0.1 %`, `99.8 %`."""
    if share < 0.001:
        return "< 0.1 %"
    if share > 0.999:
        return "> 99.9 %"
    digits = 0 if 0.095 <= share <= 0.99 else 1
    return f"{100 * share:.{digits}f} %"


def cell(value: object) -> Marked:
    """A value as tables and templates show it: two numbers as a range, None and NaN as a dash."""
    if value is None or value != value:
        return Marked("–")
    if isinstance(value, bool):
        return escape(value)
    if isinstance(value, int):
        return Marked(f"{value:,}")
    if isinstance(value, float):
        return Marked(f"{value:,.1f}")
    if isinstance(value, list | tuple):
        return escape(span(*value))
    return escape(value)


def table(header: Sequence[object], rows: Iterable[Sequence[object]]) -> Marked:
    """A table; columns of numbers are aligned right, except the first. Headers may be empty."""
    from tabulate import tabulate

    cells = [[cell(value) for value in row] for row in rows]
    align: list[str] = []
    for column in zip(*cells, strict=True):
        is_right = align and all(is_number(text) for text in column)
        align.append("right" if is_right else "left")
    names = [cell(name) for name in header]
    return Marked(tabulate(cells, names, tablefmt="pipe", disable_numparse=True, colalign=align or None))


def is_number(text: str) -> bool:
    """Whether a cell begins with a number, or is a dash."""
    return bool(NUMBER.match(text.replace("\\", "").lstrip("*")))


def records(rows: Iterable[Mapping[str, object]], columns: Iterable[str] = ()) -> Marked:
    """A table of rows by column. `columns`: the names of those to show, in order; all of the first row's by default."""
    rows = list(rows)
    columns = list(columns or rows[0])
    return table(columns, [[row.get(name) for name in columns] for row in rows])


def items(lines: Iterable[object]) -> Marked:
    """A list of texts."""
    return Marked("\n".join(f"- {escape(line)}" for line in lines))


@functools.cache
def _environment() -> "Environment":
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        finalize=cell,  # escapes for Markdown, so nothing is left for Jinja to escape for HTML
        undefined=StrictUndefined,
    )
    environment.filters |= {"code": code, "codes": codes, "items": items, "records": records}
    environment.globals |= {"budget": budget, "counted": counted, "duration": duration, "short": short, "span": span}
    environment.globals["percent"] = percent
    environment.globals["table"] = table
    return environment


def render(template: str, values: Mapping[str, object]) -> str:
    """The Markdown of a template; values are escaped, and empty lines between blocks are reduced to one."""
    text = _environment().get_template(f"{template}.md.j2").render(values)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


# Pages


class Section(NamedTuple):
    """A heading of the second level."""

    id: str
    text: str


def page(markdown: str, title: str, pictures: Mapping[str, str] | None = None) -> str:
    """The Markdown as a page.

    `![words](name)` becomes the picture of that name, an SVG; without one, its words. Links are reduced to their text.
    A first list above all sections that begins with a bold number becomes cards: that number is large, and what is
    in italics stands below. The sections after a rule (`---`) are folded. Text of any direction is shown in its own.
    """
    from jinja2 import Environment, FileSystemLoader
    from markupsafe import Markup

    md = _parser(pictures or {})
    tokens = [token for token in md.parse(markdown) if token.info != "mermaid"]  # which only a script can draw
    for token in tokens:
        if token.children:  # the page is sent without the files beside it
            token.children = [part for part in token.children if part.type not in ("link_open", "link_close")]
    open_tokens, folded_tokens = _divide(tokens)
    _mark_cards(open_tokens)
    _mark_quotes(tokens)
    sections = _name_sections(open_tokens)
    _name_sections(folded_tokens)
    _set_directions(tokens)
    content = _without_paragraphs(md.renderer.render(open_tokens, md.options, {}))
    folded = _without_paragraphs(md.renderer.render(folded_tokens, md.options, {}))
    head, heading, rest = content.partition("<h2")
    rest += _fold(folded)
    frame = Environment(loader=FileSystemLoader(TEMPLATES), autoescape=True).get_template("page.html.j2")
    shown = frame.render(title=printable(title), head=Markup(head), sections=sections, body=Markup(heading + rest))
    return shown + "\n"


def _divide(tokens: "list[Token]") -> "tuple[list[Token], list[Token]]":
    """The tokens before the first rule, and those after it."""
    for place, token in enumerate(tokens):
        if token.type == "hr" and token.level == 0:
            return tokens[:place], tokens[place + 1 :]
    return tokens, []


def _without_paragraphs(content: str) -> str:
    """The HTML with its figures outside of paragraphs."""
    return re.sub(r"<p[^>]*>(<figure>.*?</figure>)</p>", r"\1", content, flags=re.S)


def _fold(content: str) -> str:
    """HTML whose sections of the second level are folded, each under its heading."""
    before, *sections = re.split(r"(?=<h2 )", content)
    folded = [before]
    for section in sections:
        heading, end, rest = section.partition("</h2>")
        folded.append(f"<details><summary>{heading}{end}</summary>{rest}</details>\n")
    return "".join(folded)


def _mark_cards(tokens: "list[Token]") -> None:
    """Set the class of the first list, if it is above all sections and begins with something bold."""
    for place, token in enumerate(tokens):
        if token.tag == "h2":
            return
        if token.type == "bullet_list_open":
            _, _, first_line = tokens[place + 1 : place + 4]
            if first_line.content.startswith("**"):
                token.attrSet("class", "cards")
            return


def _mark_quotes(tokens: "list[Token]") -> None:
    """Set the class of each quotation whose text has a mark of being right or wrong."""
    quote = None
    for token in tokens:
        if token.type == "blockquote_open":
            quote = token
        elif token.type == "blockquote_close":
            quote = None
        elif quote and token.type == "inline" and token.content.startswith(tuple(MARKS)):
            quote.attrSet("class", MARKS[token.content[0]])


def _set_directions(tokens: "list[Token]") -> None:
    """Let paragraphs and cells that may hold text from data run in the direction of its script."""
    for token in tokens:
        if token.type in ("paragraph_open", "td_open", "list_item_open"):
            token.attrSet("dir", "auto")


def _parser(pictures: Mapping[str, str]) -> "MarkdownIt":
    """A parser of Markdown whose tables scroll, and whose images are these pictures."""
    from markdown_it import MarkdownIt

    def image(self: object, tokens: "Sequence[Token]", i: int, options: object, env: object) -> str:
        words = html.escape(tokens[i].content)
        svg = pictures.get(str(tokens[i].attrGet("src")))
        if svg is None:
            return words
        return f'<figure><svg role="img" aria-label="{words}" {svg.partition("<svg ")[2]}</figure>'

    md = MarkdownIt("commonmark", {"html": False}).enable("table")
    md.add_render_rule("table_open", lambda *_: '<div class="scroll" tabindex="0"><table>')
    md.add_render_rule("table_close", lambda *_: "</table></div>")
    md.add_render_rule("image", image)
    return md


def _name_sections(tokens: "list[Token]") -> list[Section]:
    """Set the id of each heading of the second level. Returns the ids and texts."""
    sections = []
    for opened, text in itertools.pairwise(tokens):
        if opened.type == "heading_open" and opened.tag == "h2":
            shown = [part for part in text.children or [] if part.type in ("text", "code_inline", "text_special")]
            plain = "".join(part.content for part in shown)
            section = Section(re.sub(r"\W+", "-", plain.lower()).strip("-") or "section", plain)
            opened.attrSet("id", section.id)
            sections.append(section)
    return sections
