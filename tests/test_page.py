"""The page in a real browser, on a telephone, light and dark; and that what is on it is escaped and asks no network."""

import html
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest
from conftest import store_of_its_own
from test_report import BERT, MODEL, counts, finetuned, lineage, with_scores, written

from tasks.reports.markdown import code, escape, page, table

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-background-networking", "--dump-dom",
    "--disable-component-update", "--disable-sync", "--hide-scrollbars", "--no-first-run",
)  # fmt: skip
PHONE = (390, 844)
DESKTOP = (1280, 900)
FRAME = """<!doctype html><html style="color-scheme: light dark"><body style="margin: 0">
<iframe width="{width}" height="{height}" style="border: 0" srcdoc="{page}"></iframe><script>
window.onload = () => {{
  const page = document.querySelector("iframe").contentDocument, view = page.defaultView, root = page.documentElement;
  const boxes = [...page.querySelectorAll(".scroll")];
  const found = {{
    width: root.clientWidth, needed: root.scrollWidth,
    inside: boxes.filter(box => box.scrollWidth > box.clientWidth).length,
    outside: boxes.filter(box => box.getBoundingClientRect().right > root.clientWidth).length,
    paper: view.getComputedStyle(page.body).backgroundColor,
    ink: view.getComputedStyle(page.querySelector("svg text")).fill,
  }};
  document.title = JSON.stringify(found);
}};</script></body></html>"""  # a window can't be as narrow as a telephone, a frame can
HOSTILE = (
    "<script>document.title='taken'</script><img src=http://a.org/a.png>![b](http://a.org/b.png)"
    "<style>@import 'http://a.org/c.css'</style>|`x`|&amp;*"
)
NETWORK = {"script", "link", "img", "iframe", "object", "video", "audio"}  # tags that may ask it


@pytest.fixture(scope="module")
def browser_program() -> str:
    """The path of a browser."""
    names = ("chromium", "chromium-browser", "google-chrome")
    program = next(filter(None, map(shutil.which, names)), None)
    if program is None:
        pytest.skip(f"no browser: none of {', '.join(names)} is on the path")
    return program


@pytest.fixture(scope="module")
def browser(browser_program, tmp_path_factory):
    """Opens a document, and returns it as the browser has it then."""

    def look(text: str, dark: bool = False) -> str:
        folder = tmp_path_factory.mktemp("browser")
        (folder / "page.html").write_text(text)
        scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
        command = [browser_program, *FLAGS, scheme, f"--user-data-dir={folder / 'profile'}", "--window-size=1400,1000"]
        done = subprocess.run([*command, f"file://{folder / 'page.html'}"], capture_output=True, text=True, timeout=300)
        assert "<html" in done.stdout, done.stderr[-2000:]
        return done.stdout

    return look


def measured(browser, text: str, size: tuple[int, int], dark: bool = False) -> dict:
    """What a page measures in a frame of this size."""
    shown = browser(FRAME.format(width=size[0], height=size[1], page=html.escape(text)), dark)
    return json.loads(html.unescape(re.search("<title>(.*?)</title>", shown)[1]))


@pytest.fixture(scope="module")
def report_page(tmp_path_factory) -> str:
    """The page of a report."""
    with store_of_its_own(tmp_path_factory.mktemp("report") / "artifacts"):
        _, _, folder = written(with_scores(BERT, seeds=2, spread=1.0))
        yield (folder / "report.html").read_text()


@pytest.mark.parametrize(("size", "dark"), [(PHONE, False), (DESKTOP, True)], ids=["light telephone", "dark desktop"])
def test_the_page_fits_the_screen_and_its_tables_scroll_by_themselves(browser, report_page, size, dark):
    found = measured(browser, report_page, size, dark)
    assert found["needed"] == found["width"]
    assert size[0] - 20 <= found["width"] <= size[0]  # a scroll bar for the length may take some
    assert found["outside"] == 0
    paper, ink = (sum(map(int, re.findall(r"\d+", found[name])[:3])) for name in ("paper", "ink"))
    assert (paper < 100 and ink > 600) if dark else (paper > 700 and ink < 200)
    if size == PHONE:
        assert found["inside"] > 3
        wide = report_page.replace("<main>", '<main><p style="width: 700px; max-width: none">x</p>')
        assert measured(browser, wide, PHONE)["needed"] > PHONE[0], "a page too wide would be noticed"


class Tags(HTMLParser):
    """Collects tags with their attributes, and text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_is_one_file_without_scripts_and_with_words_for_pictures(report_page):
    found = Tags(report_page).found
    names = [name for name, _ in found]
    assert not NETWORK & set(names)
    assert not [about for _, about in found if "src" in about or any(name.startswith("on") for name in about)]
    assert "url(" not in report_page.split("</style>")[0]
    assert names.count("table") == names.count("thead") > 10
    pictures = [about for name, about in found if name == "svg"]
    assert len(pictures) >= 2
    assert all(about["role"] == "img" and about["aria-label"] for about in pictures)
    ids = [about["id"] for _, about in found if "id" in about]
    assert len(set(ids)) == len(ids) > 8
    links = {about["href"] for name, about in found if name == "a"}
    folded = names.index("details")
    assert links == {f"#{about['id']}" for name, about in found[:folded] if name == "h2"}
    assert names.count("details") > 5
    assert f"── {MODEL}\n" in report_page, "the tree of the lineage"
    assert "flowchart" not in report_page


MARKUP = ["*a* _b_ __c__ `d`", "[a](b) ![a](b) <b>", "a|b \\| c", "&amp; &lt;", "# a", "~~a~~", "a\nb", "a_b_c", "\\"]


@pytest.mark.parametrize("text", [*MARKUP, HOSTILE])
def test_text_from_data_is_shown_as_it_is(text):
    shown = page(f"# {escape(text)}\n\n" + table(["a", "b"], [[text, code(text)]]), "x")
    body = Tags(shown.split("<main>")[1])
    assert body.text.count(" ".join(text.split())) == 3
    assert {name for name, _ in body.found} <= {"h1", "div", "table", "thead", "tbody", "tr", "th", "td", "code"}


def test_templates_escape_what_they_insert_for_markdown_and_html(store):
    hostile = HOSTILE + "\x1b[31m"
    model = lineage()
    stats = {about["stage"]: about["stats"] for about in model.values()}
    stats["pretrain"]["machine"]["device"] = hostile
    stats["deduplicate"]["dropped"]["duplicate"]["by_source"] = {hostile: counts(9, 90)}
    stats["decontaminate"] |= {"checked": False, "why": hostile}
    markdown, _, folder = written([finetuned("cola", 50.0, model=model, notes=(hostile,))], title=hostile)
    text = (folder / "report.html").read_text()
    shown = Tags(text)
    assert shown.text.count(" ".join(hostile.replace("\x1b", "\\u001b").split())) >= 8
    names = [name for name, _ in shown.found]
    assert not NETWORK & set(names)
    assert names.count("style") == 1 + names.count("svg"), "each picture has its own"
    assert not [about for _, about in shown.found if "src" in about], "nothing on the page asks a network"
    assert "\x1b" not in markdown + text


def test_a_picture_that_is_not_given_is_its_words():
    markdown = "![what it shows](http://example.org/a.svg) ![own](a.svg)"
    shown = page(markdown, "x", {"a.svg": '<?xml version="1.0"?>\n<svg id="a"/>'})
    assert "what it shows" in shown
    assert "example.org" not in shown
    assert '<svg role="img" aria-label="own" id="a"/>' in shown
    assert "<?xml" not in shown


def test_a_table_without_rows_has_its_header():
    assert table(["first", "second"], []).split()[:5] == ["|", "first", "|", "second", "|"]


FOLDED = "# t\n\nfirst\n\n- **1** card\n\n## a\n\n- **2** no card\n\n> ✗ wrong\n\n---\n\n## b\n\nlast\n\n## c\n\nend\n"


def test_sections_after_a_rule_are_folded_and_a_first_list_of_numbers_is_cards():
    found = Tags(page(FOLDED, "x")).found
    names = [name for name, _ in found]
    first_fold = names.index("details")
    assert names.count("details") == names.count("summary") == 2
    assert [about["id"] for name, about in found[first_fold:] if name == "h2"] == ["b", "c"]
    assert [about["href"] for name, about in found if name == "a"] == ["#a"], "what is folded stands below, all of it"
    assert [about.get("class") for name, about in found if name == "ul"] == ["cards", None]
    assert [about["class"] for name, about in found if name == "blockquote"] == ["wrong"]


def test_folded_sections_are_open_in_print(browser_program, tmp_path):
    lines = "\n\n".join(f"line {number}" for number in range(400))
    sizes = {}
    for name, folded in (("closed", ""), ("folded", f"---\n\n## a\n\n{lines}\n")):
        (tmp_path / "page.html").write_text(page(f"# t\n\nfirst\n\n{folded}", "x"))
        flags = [flag for flag in FLAGS if flag != "--dump-dom"]
        command = [browser_program, *flags, f"--user-data-dir={tmp_path}/profile"]
        printed = tmp_path / f"{name}.pdf"
        done = subprocess.run(
            [*command, f"--print-to-pdf={printed}", f"file://{tmp_path}/page.html"], capture_output=True, timeout=300
        )
        assert printed.exists(), done.stderr[-2000:]
        sizes[name] = len(re.findall(rb"/Type\s*/Page\b", printed.read_bytes()))
    assert sizes["closed"] == 1
    assert sizes["folded"] > 5


def test_text_runs_in_the_direction_of_its_script():
    found = Tags(page("# t\n\nمرحبا\n\n> سلام\n\n" + table(["a"], [["שלום"]]), "x")).found
    assert [about.get("dir") for name, about in found if name in ("p", "td")] == ["auto"] * 3
