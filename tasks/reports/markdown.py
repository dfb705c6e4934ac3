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
from typing import TYPE_CHECKING

from model.wording import budget, counted, duration, printable, span

if TYPE_CHECKING:
    from jinja2 import Environment
    from markdown_it.token import Token

TEMPLATES = Path(__file__).with_name("templates")
SPECIAL = re.compile(r"([\\`*\[\]<>|~&!#]|(?<![^\W_])_|_(?![^\W_]))")  # an underscore within a word means nothing
NUMBER = re.compile(r"[-+–]?\d[\d.,]*( %)?|–")


class Marked(str):
    """Text that is Markdown already and is not escaped again."""

    __slots__ = ()

    def __html__(self) -> "Marked":  # tells Jinja not to escape it
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


def short(number: float) -> str:
    """A large number in a few characters, as in `119.6 M`."""
    for unit, size in ((" B", 1e9), (" M", 1e6), (" k", 1e3)):
        if number >= size:
            return f"{number / size:.1f}{unit}"
    return f"{number:g}"


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
    return escape(span(*value) if isinstance(value, list | tuple) else value)


def table(header: Sequence[object], rows: Iterable[Sequence[object]]) -> Marked:
    """A table; columns of numbers are aligned right, except the first. Headers may be empty."""
    from tabulate import tabulate

    def is_number(text: str) -> bool:
        return bool(NUMBER.match(text.replace("\\", "").lstrip("*")))

    cells = [[cell(value) for value in row] for row in rows]
    columns = list(zip(*cells, strict=True))
    align = ["right" if i and all(map(is_number, column)) else "left" for i, column in enumerate(columns)]
    names = [cell(name) for name in header]
    return Marked(tabulate(cells, names, tablefmt="pipe", disable_numparse=True, colalign=align or None))


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

    made = Environment(  # `finalize` escapes for Markdown, so nothing is left for Jinja to escape for HTML
        loader=FileSystemLoader(TEMPLATES), autoescape=True, finalize=cell, undefined=StrictUndefined
    )
    made.filters |= {"code": code, "items": items, "records": records}
    made.globals |= {"budget": budget, "counted": counted, "duration": duration, "short": short, "span": span}
    made.globals["table"] = table
    return made


def render(template: str, values: Mapping[str, object]) -> str:
    """The Markdown of a template; values are escaped, and empty lines between blocks are reduced to one."""
    text = _environment().get_template(f"{template}.md.j2").render(values)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def _name_sections(tokens: "list[Token]") -> list[tuple[str, str]]:
    """Give each heading of the second level an id; returns the ids and texts."""
    sections = []
    for opened, text in itertools.pairwise(tokens):
        if opened.type == "heading_open" and opened.tag == "h2":
            parts = (part for part in text.children or [] if part.type in ("text", "code_inline", "text_special"))
            plain = "".join(part.content for part in parts)
            name = re.sub(r"\W+", "-", plain.lower()).strip("-") or "section"
            opened.attrSet("id", name)
            sections.append((name, plain))
    return sections


def page(markdown: str, title: str, pictures: Mapping[str, str] | None = None) -> str:
    """The Markdown as a page.

    `![words](name)` becomes the picture of that name, an SVG; without one, its words. Links are reduced to their text.
    """
    from jinja2 import Environment, FileSystemLoader
    from markdown_it import MarkdownIt
    from markupsafe import Markup

    def image(self: object, tokens: "list[Token]", i: int, options: object, env: object) -> str:
        words, svg = html.escape(tokens[i].content), (pictures or {}).get(str(tokens[i].attrGet("src")))
        if svg is None:
            return words
        return f'<figure><svg role="img" aria-label="{words}" {svg.partition("<svg ")[2]}</figure>'

    md = MarkdownIt("commonmark", {"html": False}).enable("table")
    md.add_render_rule("table_open", lambda *_: '<div class="scroll" tabindex="0"><table>')
    md.add_render_rule("table_close", lambda *_: "</table></div>")
    md.add_render_rule("image", image)
    tokens = [token for token in md.parse(markdown) if token.info != "mermaid"]  # which only a script can draw
    for inline in (token for token in tokens if token.children):  # the page is sent without the files beside it
        inline.children = [part for part in inline.children if part.type not in ("link_open", "link_close")]
    sections = _name_sections(tokens)
    content = md.renderer.render(tokens, md.options, {})
    content = re.sub(r"<p>(<figure>.*?</figure>)</p>", r"\1", content, flags=re.S)
    head, heading, rest = content.partition("<h2")
    parts = {"head": Markup(head), "sections": sections, "body": Markup(heading + rest)}
    frame = Environment(loader=FileSystemLoader(TEMPLATES), autoescape=True).get_template("page.html.j2")
    return frame.render(title=printable(title), **parts) + "\n"
