"""A page: Markdown as one HTML file that needs nothing else. No scripts, nothing from a network; pictures stand in it."""

import itertools
import re
from collections.abc import Mapping
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from markdown_it.token import Token

POLICY = "default-src 'none'; style-src 'unsafe-inline'"  # so that a browser asks nobody for anything, whatever the data says
STYLE = """
:root { color-scheme: light dark; --ink: #1c2430; --soft: #5c6778; --paper: #fff; --band: #f4f6f9; --line: #d9dfe7;
  --accent: #2f6fb3; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e8ee; --soft: #9aa5b5; --paper: #14181e; --band: #1c222b; --line: #333c48; --accent: #7db3ea; }
}
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body { margin: 0; background: var(--paper); color: var(--ink); overflow-wrap: anywhere;
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
main { max-width: 75rem; margin: 0 auto; padding: 1.5rem 1rem 4rem; }
h1 { font-size: 2rem; line-height: 1.2; margin: 0.5rem 0; }
h2 { font-size: 1.35rem; margin: 3rem 0 0.75rem; padding-top: 0.75rem; border-top: 1px solid var(--line); }
h3 { font-size: 1.05rem; margin: 2rem 0 0.5rem; }
p, li { max-width: 46rem; }
h1 + p { font-size: 1.1rem; color: var(--soft); }
h1 + p + ul { list-style: none; padding: 0; margin: 1.5rem 0; display: grid; gap: 0.75rem;
  grid-template-columns: repeat(auto-fit, minmax(9.5rem, 1fr)); }
h1 + p + ul li { background: var(--band); border-radius: 0.6rem; padding: 0.8rem 1rem; font-size: 0.85rem; line-height: 1.35;
  color: var(--soft); }
h1 + p + ul li strong { display: block; font-size: 2rem; line-height: 1.2; color: var(--accent); }
nav { display: flex; flex-wrap: wrap; gap: 0.35rem 1.1rem; font-size: 0.9rem; margin-top: 1rem; }
a { color: var(--accent); text-decoration: none; }
a:hover { text-decoration: underline; }
code { font: 0.88em ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; background: var(--band); padding: 0.1em 0.3em;
  border-radius: 0.25em; }
pre { overflow-x: auto; background: var(--band); padding: 0.8rem; border-radius: 0.5rem; }
.scroll { overflow-x: auto; margin: 0.75rem 0; border: 1px solid var(--line); border-radius: 0.5rem; max-width: fit-content; }
table { border-collapse: collapse; font-size: 0.875rem; line-height: 1.4; font-variant-numeric: tabular-nums; }
th, td { padding: 0.4rem 0.65rem; text-align: left; vertical-align: top; white-space: nowrap; overflow-wrap: normal; }
td:first-child, td:last-child:not([style]) { white-space: normal; min-width: 7rem; }
th { background: var(--band); font-weight: 600; }
tr + tr td { border-top: 1px solid var(--line); }
th:first-child, td:first-child { position: sticky; left: 0; background: var(--paper); max-width: 17rem; }
th:first-child { background: var(--band); }
thead:not(:has(th:not(:empty))) { display: none; }
td em { font-style: normal; color: var(--soft); }
figure { margin: 1rem 0; }
figure svg { width: 100%; max-width: 40rem; height: auto; display: block; }
footer { color: var(--soft); font-size: 0.85rem; margin-top: 3rem; }
@media (min-width: 60rem) { td:first-child:not(:last-child) { min-width: 11rem; } }
@media (max-width: 30rem) { h1 { font-size: 1.6rem; } table { font-size: 0.8rem; } th:first-child, td:first-child { max-width: 9rem; } }
@media print { nav { display: none; } .scroll { border: 0; overflow: visible; } }
"""


def _ids(tokens: "list[Token]") -> list[tuple[str, str]]:
    """Give each heading an id; the ids and texts of the second level."""
    found, used = [], set()
    for opened, text in itertools.pairwise(tokens):
        if opened.type == "heading_open":
            plain = "".join(
                part.content for part in text.children or [] if part.type in ("text", "code_inline", "text_special")
            )
            name = re.sub(r"\W+", "-", plain.lower()).strip("-") or "section"
            name = name if name not in used else f"{name}-{len(used)}"
            used.add(name)
            opened.attrSet("id", name)
            if opened.tag == "h2":
                found.append((name, plain))
    return found


def page(markdown: str, title: str, pictures: Mapping[str, str] | None = None) -> str:
    """The Markdown as a page; `![what it shows](name)` becomes the picture of that name, an SVG, and any other its words."""
    from markdown_it import MarkdownIt

    def image(self: object, tokens: "list[Token]", i: int, options: object, env: object) -> str:
        what, svg = escape(tokens[i].content), (pictures or {}).get(str(tokens[i].attrGet("src")))
        if svg is None:
            return what
        return f'<figure><svg role="img" aria-label="{what}" {svg.partition("<svg ")[2]}</figure>'

    md = MarkdownIt("commonmark", {"html": False}).enable("table")
    md.add_render_rule("table_open", lambda *_: '<div class="scroll" tabindex="0"><table>')
    md.add_render_rule("table_close", lambda *_: "</table></div>")
    md.add_render_rule("image", image)
    tokens = md.parse(markdown)
    for inline in (token for token in tokens if token.children):  # the page goes elsewhere without what lies beside it
        inline.children = [part for part in inline.children if part.type not in ("link_open", "link_close")]
    links = "".join(f'<a href="#{name}">{escape(text)}</a>' for name, text in _ids(tokens))
    body = md.renderer.render(tokens, md.options, {})
    body = re.sub(r"<p>(<figure>.*?</figure>)</p>", r"\1", body, flags=re.S)
    start = body.find("<h2")
    nav = f'<nav aria-label="Sections">{links}</nav>' if links else ""
    body = body[:start] + nav + body[start:] if start >= 0 else body
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>\n{body}</main>\n</body>\n</html>\n"
    )
