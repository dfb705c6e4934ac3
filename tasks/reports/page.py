"""A page: Markdown as one HTML file without scripts, which loads nothing else; its pictures are part of it."""

import functools
import itertools
import re
from collections.abc import Mapping
from html import escape
from typing import TYPE_CHECKING

from tasks.reports.markdown import TEMPLATES
from tasks.text.printable import printable

if TYPE_CHECKING:
    from jinja2 import Template
    from markdown_it.token import Token


@functools.cache
def _frame() -> "Template":
    from jinja2 import Environment, FileSystemLoader

    return Environment(loader=FileSystemLoader(TEMPLATES), autoescape=True).get_template("page.html.j2")


def _name_headings(tokens: "list[Token]") -> list[tuple[str, str]]:
    """Give each heading an id; the ids and texts of the second level."""
    sections, used = [], set()
    for opened, text in itertools.pairwise(tokens):
        if opened.type == "heading_open":
            words = (part for part in text.children or [] if part.type in ("text", "code_inline", "text_special"))
            plain = "".join(part.content for part in words)
            name = re.sub(r"\W+", "-", plain.lower()).strip("-") or "section"
            name = name if name not in used else f"{name}-{len(used)}"
            used.add(name)
            opened.attrSet("id", name)
            if opened.tag == "h2":
                sections.append((name, plain))
    return sections


def page(markdown: str, title: str, pictures: Mapping[str, str] | None = None) -> str:
    """The Markdown as a page.

    `![words](name)` becomes the picture of that name, an SVG; without one, its words. Links are reduced to their text.
    """
    from markdown_it import MarkdownIt
    from markupsafe import Markup

    def image(self: object, tokens: "list[Token]", i: int, options: object, env: object) -> str:
        words, svg = escape(tokens[i].content), (pictures or {}).get(str(tokens[i].attrGet("src")))
        if svg is None:
            return words
        return f'<figure><svg role="img" aria-label="{words}" {svg.partition("<svg ")[2]}</figure>'

    md = MarkdownIt("commonmark", {"html": False}).enable("table")
    md.add_render_rule("table_open", lambda *_: '<div class="scroll" tabindex="0"><table>')
    md.add_render_rule("table_close", lambda *_: "</table></div>")
    md.add_render_rule("image", image)
    tokens = md.parse(markdown)
    for inline in (token for token in tokens if token.children):  # the page is sent without the files beside it
        inline.children = [part for part in inline.children if part.type not in ("link_open", "link_close")]
    sections = _name_headings(tokens)
    content = md.renderer.render(tokens, md.options, {})
    content = re.sub(r"<p>(<figure>.*?</figure>)</p>", r"\1", content, flags=re.S)
    head, heading, rest = content.partition("<h2")
    parts = {"head": Markup(head), "sections": sections, "body": Markup(heading + rest)}
    return _frame().render(title=printable(title), **parts) + "\n"
