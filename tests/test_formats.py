"""What people have: each kind of file or folder is read to the document, or refused with what helps."""

import bz2
import gzip
import io
import json
from collections.abc import Callable
from pathlib import Path

import datasets
import pyarrow as pa
import pytest
import zstandard
from conftest import documents_of, downloaded, texts_of
from files_table import arrow_of, csv_of, feather_of, files_of, jsonl_of, parquet_of, tar_of, zip_of

from model.errors import InputError
from tasks.corpus import documents, rows, survey, texts
from tasks.corpus.documents import Options
from tasks.corpus.kinds import Damage

TEXTS = [
    'Plain, with a comma; and "quotes".',
    "Two\nlines, then\n\na third.",
    "تحتوي هذه الصفحة على مقدمة.",
    "第一章 入门指南",
    "Grüße aus Köln \N{GRINNING FACE}",
    *(f"Document {i} of the toy corpus." for i in range(20)),
]
LINES = [" ".join(text.split()) for text in TEXTS]  # texts of one line
FILES = files_of([{"text": text, "of": f"set {i % 3}"} for i, text in enumerate(TEXTS)])


def jsonl(texts: list, column: str = "text", **more: object) -> bytes:
    return jsonl_of([{column: text, **more} for text in texts])


def csv(texts: list[str], column: str = "text") -> bytes:
    return csv_of([{"id": str(i), column: text} for i, text in enumerate(texts)])


def changed(data: bytes, place: int) -> bytes:
    return data[:place] + bytes([data[place] ^ 16]) + data[place + 1 :]


def parquet(**columns: list) -> bytes:
    return parquet_of(pa.table(columns))


def saved(folder: Path) -> None:
    """What `datasets` saves, and the caches that it puts beside it."""
    made = datasets.Dataset.from_dict({"text": TEXTS, "label": list(range(len(TEXTS)))})
    datasets.DatasetDict({"train": made}).save_to_disk(folder / "saved", num_shards={"train": 2})
    opened = datasets.load_from_disk(folder / "saved")["train"]
    opened.map(lambda row: {"length": len(row["text"])}, cache_file_name=str(folder / "saved/train/cache-0a1b.arrow"))


WIKI = "".join(
    f'<doc id="{i}" url="https://x.org/?curid={i}" title="A > B">\n{text}\n\n</doc>\n' for i, text in enumerate(TEXTS)
)
INNER = {f"d/{i:02d}.txt": text.encode() for i, text in enumerate(TEXTS)}
HALVES = {"a.jsonl": jsonl(TEXTS[:9]), "b/c.csv.gz": gzip.compress(csv(TEXTS[9:]))}
INPUTS: dict[str, tuple[dict[str, bytes] | Callable, dict]] = {  # files, and the parameters that they need
    "json array of texts": ({"a.json": json.dumps(TEXTS).encode()}, {}),
    "a json document a file": (
        {f"{i:02d}.json": json.dumps({"text": t}, indent=1).encode() for i, t in enumerate(TEXTS)},
        {},
    ),
    "column raw_content": ({"a.parquet": parquet(url=TEXTS, raw_content=TEXTS)}, {}),
    "column asked": ({"a.jsonl": jsonl(TEXTS, "abstract", text="x")}, {"column": "abstract"}),
    "nested": ({"a.jsonl": jsonl([{"text": t} for t in TEXTS], "doc")}, {"column": "doc.text"}),
    "nested in parquet": ({"a.parquet": parquet(doc=[{"n": 1, "text": t} for t in TEXTS])}, {"column": "doc.text"}),
    "a dot in the name": (
        {
            "a.feather": feather_of([{"x.y": t} for t in TEXTS[:7]]),
            "b.arrow": arrow_of([{"x.y": t} for t in TEXTS[7:]]),
        },
        {"column": "x.y"},
    ),
    "lists": ({"a.jsonl": jsonl([t.split("\n") for t in TEXTS])}, {}),
    "lists in parquet": ({"a.parquet": parquet(text=[t.split("\n") for t in TEXTS])}, {}),
    "mixed schemas": (
        {"a.jsonl": jsonl(TEXTS[:5]), "b.csv": csv(TEXTS[5:9], "body"), "c.parquet": parquet(content=TEXTS[9:])},
        {},
    ),
    "save_to_disk": (saved, {}),
    "zip": ({"a.zip": zip_of(INNER)}, {}),
    "zip of tables in a folder": ({"sub/a.zip": zip_of(HALVES)}, {}),
    "tar": ({"a.tar": tar_of(INNER)}, {}),
    "tar of a folder's dot": ({"a.tar": tar_of({f"./{name}": data for name, data in INNER.items()})}, {}),
    "tar.gz": ({"a.tar.gz": tar_of(HALVES, "w:gz")}, {}),
    "tgz": ({"a.tgz": tar_of(INNER, "w:gz")}, {}),
    "tar.xz with parquet": ({"a.tar.xz": tar_of({"x.parquet": parquet(text=TEXTS)}, "w:xz")}, {}),
    "tar.zst": ({"a.tar.zst": zstandard.compress(tar_of(INNER))}, {}),
    "md": ({f"{i:02d}.md": t.encode() for i, t in enumerate(TEXTS)}, {}),
    "txt.gz": ({f"{i:02d}.txt.gz": gzip.compress(t.encode()) for i, t in enumerate(TEXTS)}, {}),
    "utf-16 with a mark": ({f"{i:02d}.txt": t.encode("utf-16") for i, t in enumerate(TEXTS)}, {}),
    "no extension": ({f"{i:02d}": t.encode() for i, t in enumerate(TEXTS)}, {}),
    "jsonl without extension": ({"part-00000": jsonl(TEXTS)}, {}),
    "gz without extension": ({"part-00000": gzip.compress(jsonl(TEXTS))}, {}),
    "wiki": ({"AA/wiki_00": WIKI.encode()}, {}),
    "wiki.bz2": ({"AA/wiki_00.bz2": bz2.compress(WIKI.encode())}, {}),
    "wiki of json": ({"AA/wiki_00": jsonl(TEXTS, title="T")}, {}),
    "a line a document": ({"a.txt": "\n".join(LINES).encode()}, {"documents_by": "line"}),
    "a line with CR a document": ({"a.txt": "\r".join(["", *LINES]).encode()}, {"documents_by": "line"}),
    "a paragraph a document": ({"a.txt": "\n\n\n".join(LINES).encode()}, {"documents_by": "blank-line"}),
    "hidden files": (
        {"a.jsonl": jsonl(TEXTS), "._a.jsonl": b"\0\5\x16\7", ".ipynb_checkpoints/a.jsonl": jsonl(TEXTS), "_OK": b""},
        {},
    ),
}  # fmt: skip


def made(folder: Path, files: dict[str, bytes] | Callable) -> Path:
    folder.mkdir(exist_ok=True)
    if callable(files):
        files(folder)
        return folder
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


@pytest.mark.parametrize("name", FILES)
def test_the_rows_of_every_shape_are_documents_with_their_places_and_sources(store: Path, tmp_path: Path, name: str):
    (tmp_path / name).write_bytes(FILES[name].data)
    corpus = downloaded(tmp_path / name, source_column="of")
    found = [
        (f"{name}:{n}", f"set {i % 3}", t) for i, (n, t) in enumerate(zip(FILES[name].numbers, TEXTS, strict=True))
    ]
    assert list(documents_of(corpus)) == found
    assert corpus.stats["lost"] == {}


@pytest.mark.parametrize("name", INPUTS)
def test_the_documents_of_each_kind_of_input_are_read_and_nothing_else(store: Path, tmp_path: Path, name: str):
    files, settings = INPUTS[name]
    folder = made(tmp_path / "data", files)
    corpus = downloaded(folder, **settings)
    found = texts_of(corpus)
    assert [" ".join(t.split()) for t in found] == LINES
    assert found in (TEXTS, LINES)
    assert len({d.id for d in documents_of(corpus)}) == len(TEXTS), "ids of their own"
    assert corpus.stats["lost"] == {}
    assert sum(n for form in corpus.stats["formats"].values() for n in form.values()) == len(TEXTS)


PAGE = "<!DOCTYPE html>\n<html><head><title>T</title></head><body><nav>menu</nav><article>{}</article></body></html>"
PARAGRAPHS = "".join(f"<p>{line} It is a paragraph of some length, as an article has.</p>" for line in LINES)
LATIN = "Größe und Maß, naïve cafés.\n"
BOTH = b'{"url": "x", "body": "b", "content": "c"}\n'
REFUSED: dict[str, tuple[dict[str, bytes], dict, str]] = {  # files, parameters, what the sentence names
    "column that isn't there": ({"a.csv": csv(TEXTS, "abstract")}, {}, r"a\.csv .*download\.column.*id, abstract"),
    "asked column that isn't there": ({"a.csv": csv(TEXTS)}, {"column": "x.y"}, r"no column x\.y\. .*column.*id, text"),
    "field that isn't there": ({"a.jsonl": jsonl(TEXTS, "abstract")}, {}, r"no field 'text'.*'abstract'.*column"),
    "asked field that isn't there": ({"a.jsonl": jsonl(TEXTS)}, {"column": "x"}, r"no field 'x'.*'text'.*column"),
    "two candidate columns": ({"a.jsonl": BOTH}, {}, r"a\.jsonl .*body and content.*download\.column.*url"),
    "no such source column": ({"a.csv": csv(TEXTS)}, {"source_column": "lang"}, r"lang.*download\.source_column"),
    "no such source field": ({"a.jsonl": jsonl(TEXTS)}, {"source_column": "lang"}, r"lang.*download\.source_column"),
    "large text": ({"a.txt": b"line\n\n" * 200_000}, {}, r"a\.txt .*1\.2 MB.*400,000 lines, 200,000 .*documents_by"),
    "windows-1252": ({"a.txt": (LATIN * 9).encode("cp1252")}, {}, r"not UTF-8.*download\.encoding.*windows-1252"),
    "wrong encoding": ({"a.txt": "Größe\x81".encode("latin-1")}, {"encoding": "cp1252"}, r"a\.txt .*0x81.*encoding"),
    "utf-16": ({"a.txt": ("Plain text. " * 99).encode("utf-16-le")}, {}, r"a\.txt .*download\.encoding to utf-16-le"),
    "html": ({"a.html": PAGE.encode()}, {}, r"1 \.html.*download\.extract"),
    "html named text": ({"a.txt": PAGE.encode()}, {}, r"a\.txt .*HTML"),
    "json named text": ({"a.txt": jsonl(TEXTS)}, {}, r"a\.txt is JSON.*\.jsonl"),
    "json named csv": ({"a.csv": jsonl(TEXTS)}, {}, r"a\.csv .*JSON"),
    "pointer": ({"a.parquet": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n"}, {}, "LFS.*git lfs pull"),
    "dump": ({"a.xml": b'<mediawiki xmlns="http://">'}, {"extract": "trafilatura"}, "MediaWiki.*WikiExtractor"),
    "pdf": ({"a.txt": b"%PDF-1.4\n"}, {}, "PDF.*pdftotext"),
    "docx": ({"a.zip": zip_of({"[Content_Types].xml": b"", "word/document.xml": b""})}, {}, "office"),
    "sqlite": ({"a.json": b"SQLite format 3\0"}, {}, "SQLite"),
    "pickle": ({"a.jsonl": b"\x80\x04\x95\x20"}, {}, "pickle"),
    "image": ({"a.txt": b"\x89PNG\r\n"}, {}, "image"),
    "other files": ({"a.pdf": b"%PDF-1", "b.py": b"", "c.py": b"", ".d": b"x"}, {}, r"2 \.py, 1 hidden, 1 \.pdf"),
    "nothing": ({}, {}, "nothing"),
    "wiki that is cut": ({"wiki_00": WIKI.encode()[:-9]}, {}, "wiki_00 is truncated"),
    "zip that is cut": ({"a.zip": zip_of(INNER)[:-30]}, {}, r"a\.zip is corrupt"),
    "zip with a changed byte": ({"a.zip": changed(zip_of(INNER), 50)}, {}, "corrupt"),
    "tar that is cut between files": ({"a.tar": tar_of(INNER)[:4 * 1024]}, {}, r"a\.tar is truncated"),
    "archive of nothing": ({"a.zip": zip_of({"a.exe": b"MZ"})}, {}, r"no document.*1 \.exe"),
    "utf-16 that says no order": ({"a.txt": "Text. ".encode("utf-16-le")}, {"encoding": "utf-16"}, r"a\.txt.*encoding"),
    "lists in lines": (
        {"a.jsonl": b"".join(b'{"title": "a", "comments": [{"text": "b"}]}\n' for _ in range(9))}, {},
        "'comments': .*'title'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_read_is_refused_with_what_helps(store: Path, tmp_path: Path, name: str):
    files, settings, said = REFUSED[name]
    with pytest.raises(InputError, match=f"(?s){said}"):
        downloaded(made(tmp_path / "data", files), **settings)


def test_files_that_are_skipped_are_counted_by_kind_in_folders_and_in_archives(store: Path, tmp_path: Path, caplog):
    inside = {
        "a.jsonl": jsonl(TEXTS),
        "__MACOSX/._a.jsonl": b"\0",
        "in.zip": zip_of({}),
        "b.html": b"<html>",
        "x.exe": b"",
    }
    beside = {"README.md": b"About", "LICENSE": b"MIT", "b.py": b"", ".git/c.txt": b"x", "a.tar": tar_of(inside)}
    corpus = downloaded(made(tmp_path / "data", {**beside, "blob": b"\0\1\2\3" * 99}))
    assert texts_of(corpus) == TEXTS
    assert corpus.stats["skipped"] == {
        "about the data": 2, "hidden": 2, ".py": 1, "no text": 1, "archive in an archive": 1, ".html": 1, ".exe": 1,
    }  # fmt: skip
    assert "1 archive in an archive" in caplog.text
    assert corpus.stats["formats"] == {"JSON": {"text": len(TEXTS)}}
    [document, *_] = documents_of(corpus)
    assert (document.id, document.source) == ("a.tar/a.jsonl:1", "a")


def test_a_file_is_read_whatever_its_name_is_if_it_is_given_itself(store: Path, tmp_path: Path):
    made(
        tmp_path, {".hidden.txt": b"hidden", "README.md": b"readme", "notes.log": b"a log", "data.bak": jsonl(["json"])}
    )
    for name, text in ((".hidden.txt", "hidden"), ("README.md", "readme"), ("notes.log", "a log"), ("*.bak", "json")):
        assert texts_of(downloaded(tmp_path / name)) == [text]
    (tmp_path / "blob.bin").write_bytes(b"\0\1\2\3" * 99)
    with pytest.raises(InputError, match=r"blob\.bin is a kind"):
        downloaded(tmp_path / "blob.bin")
    (tmp_path / "page.html").write_text(PAGE)
    with pytest.raises(InputError, match=r"page\.html .*download\.extract"):
        downloaded(tmp_path / "page.html")


def test_sources_are_named_by_the_column_that_is_asked(store: Path, tmp_path: Path):
    rows = [{"text": t, "meta": {"lang": f"l{i % 3}", "pile_set_name": "x"}, "n": i % 2} for i, t in enumerate(TEXTS)]
    made(tmp_path, {"a.parquet": parquet_of(rows), "a.jsonl": jsonl_of(rows)})
    for name, column in (("a.parquet", "meta.lang"), ("a.jsonl", "meta.lang"), ("a.jsonl", "n")):
        found = [d.source for d in documents_of(downloaded(tmp_path / name, source_column=column))]
        assert found == [str(row["n"]) if column == "n" else row["meta"]["lang"] for row in rows]
    (tmp_path / "b.jsonl").write_bytes(jsonl(TEXTS, lang=None))
    assert {d.source for d in documents_of(downloaded(tmp_path / "b.jsonl", source_column="lang"))} == {"b"}


def test_rows_without_text_are_lost_with_their_lines_whatever_the_format(store: Path, tmp_path: Path):
    (tmp_path / "a.csv").write_text('text,n\none,1\n"",2\ntwo,3\nthree\n')
    (tmp_path / "b.json").write_text('[\n{"text": ""},\n{"text": null}, 3, {"text": "four"}]')
    (tmp_path / "c.txt").write_text("five\n\n   \nsix")
    corpus = downloaded(tmp_path, max_lost=1, documents_by="line")
    assert texts_of(corpus) == ["one", "two", "four", "five", "six"]
    lost = [json.loads(line) for line in (corpus.path / "lost.jsonl").read_text().splitlines()]
    assert [(loss["file"], loss["line"], loss["reason"]) for loss in lost] == [
        ("a.csv", 3, "empty text"),
        ("a.csv", 5, "wrong number of fields"),
        ("b.json", 1, "empty text"),
        ("b.json", 2, "text is not a string but NoneType"),
        ("b.json", 3, "not a JSON object"),
    ]
    assert [d.id for d in documents_of(corpus)][-2:] == ["c.txt:1", "c.txt:4"]


def test_documents_of_a_text_file_are_what_was_asked(store: Path, tmp_path: Path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"\r\none\r\ntwo\r\n \r\nthree\r\n\xc2\xa0\r\n")
    for by, expected in (
        ("file", [("a.txt:1", "\r\none\r\ntwo\r\n \r\nthree\r\n\xa0\r\n")]),
        ("line", [("a.txt:2", "one"), ("a.txt:3", "two"), ("a.txt:5", "three")]),
        ("blank-line", [("a.txt:2", "one\ntwo"), ("a.txt:5", "three\n\xa0")]),
    ):
        corpus = downloaded(path, documents_by=by)
        assert [(d.id, d.text) for d in documents_of(corpus)] == expected
        assert corpus.stats["formats"] == {"text": {by: len(expected)}}
    path.write_bytes(b"x" * (texts.LARGE + 1))
    assert len(texts_of(downloaded(path, documents_by="file"))) == 1
    path.write_bytes(b"first\n" + b"one\rtwo\x0cthree\n\r\n" * (texts.LARGE // 10))
    with pytest.raises(InputError, match="200,001 lines, 100,000 of them blank"):  # as `wc -l` counts them
        downloaded(path)


def test_pages_are_read_by_the_extractor_that_is_asked_and_named_in_the_key(store: Path, tmp_path: Path):
    trafilatura = pytest.importorskip("trafilatura")
    made(
        tmp_path,
        {"a.html": PAGE.format(PARAGRAPHS).encode(), "b.xml": b"<r><t>Ein Text</t> mit <b>Ende</b></r>"},
    )
    corpus = downloaded(tmp_path, extract="trafilatura")
    page, xml = texts_of(corpus)
    assert page == trafilatura.extract(PAGE.format(PARAGRAPHS))
    assert all(line in page for line in LINES[1:])
    assert "menu" not in page
    assert xml == "Ein Text\nmit\nEnde"
    assert corpus.manifest["params"]["extract"] == f"trafilatura {trafilatura.__version__}"


def test_options_at_their_defaults_are_not_in_the_key(store: Path, tmp_path: Path):
    path = made(tmp_path / "data", {"a.jsonl": jsonl(TEXTS)})
    usual = downloaded(path)
    assert not {"column", "source_column", "documents_by", "encoding", "extract"} & set(usual.manifest["params"])
    assert downloaded(path, column="").key == usual.key != downloaded(path, column="text").key
    for settings in ({"encoding": "utf-99"}, {"encoding": "base64"}, {"source": "pile", "files": [], "column": "x"}):
        with pytest.raises(ValueError, match=list(settings)[-1]):
            downloaded(*([] if "source" in settings else [path]), **settings)


def test_an_option_that_no_file_needs_is_said_to_have_no_effect(store: Path, tmp_path: Path, caplog):
    path = made(tmp_path / "data", {"a.jsonl": jsonl(TEXTS)})
    for expected in (True, False):
        caplog.clear()
        downloaded(path, documents_by="line")
        assert ("download.documents_by had no effect" in caplog.text) == expected
        (path / "b.txt").write_text("text")


def test_a_value_that_is_too_long_is_lost_alone_or_ends_the_file(monkeypatch: pytest.MonkeyPatch):
    long = "x" * 3000
    monkeypatch.setattr(rows, "MOST_BYTES", 1000)

    def found(name: str, data: bytes) -> list[str]:
        options = Options(documents_by="blank-line" if name == "a.txt" else "")
        return [
            getattr(r, "text", "") or r.reason
            for r in documents.read_file(io.BufferedReader(io.BytesIO(data)), name, "a", options)
        ]

    lost = "longer than 100 MB"
    assert found("a.txt", f"one\n\n{long}\nmore\n\ntwo\n\n{'y' * 600}\n{'z' * 600}\n\nthree".encode()) == [
        "one",
        f"line {lost}",
        "two",
        f"paragraph {lost}",
        "three",
    ]
    assert found("a.jsonl", jsonl(["one", long, "two"])) == ["one", lost, "two"]
    assert found("a.parquet", parquet(text=["one", long])) == ["one", lost]
    assert found("a.json", json.dumps(["one", long, "two"]).encode()) == ["one", lost, "two"]
    with pytest.raises(Damage, match=rf"a\.csv has .*{lost}"):
        found("a.csv", csv(["one", long]))


def test_json_of_many_lines_is_refused_above_its_limit(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = made(tmp_path, {"a.json": json.dumps([{"text": t} for t in TEXTS], indent=1).encode()}) / "a.json"
    monkeypatch.setattr(rows, "MOST_JSON", 1000)
    with pytest.raises(InputError, match=r"a\.json .*jsonl"):
        downloaded(path)
    monkeypatch.setattr(rows, "MOST_JSON", len(path.read_text()))
    survey.survey_of.cache_clear()  # as nobody changes the limit of a running program
    assert texts_of(downloaded(path)) == TEXTS
