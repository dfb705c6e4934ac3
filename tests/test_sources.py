"""Where documents come from: file formats, damage, losses, paths, installed packages, the hub."""

import contextlib
import gzip
import hashlib
import io
import json
import os
import random
import subprocess
import sys
import threading
import zlib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import metadata
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from conftest import write_jsonl

from model import InputError
from tasks import sources
from tasks.corpus import Download, documents_of, download
from tasks.sources import Damage, Document, Loss
from tasks.stage import artifacts

TEXTS = [
    "plain",
    "two\nlines\r\n",
    "accents: é ü ñ",
    "emoji \N{GRINNING FACE} and \N{HIRAGANA LETTER A}",
    '"quoted" \\ \t',
]
COMPRESSED = (".jsonl.zst", ".json.zst", ".jsonl.gz", ".json.gz")


def packed(data: bytes, suffix: str) -> bytes:
    if suffix.endswith(".zst"):
        return zstandard.ZstdCompressor(write_checksum=True).compress(data)
    return gzip.compress(data, mtime=0) if suffix.endswith(".gz") else data


def json_lines(texts: list[str], source: str = "toy") -> bytes:
    rows = [json.dumps({"text": text, "meta": {"pile_set_name": source}}) for text in texts]
    return "".join(f"{row}\n" for row in rows).encode()


def write_shard(path: Path, texts: list[str]) -> Path:
    if path.suffix == ".parquet":
        meta = pa.array([{"pile_set_name": "toy"}] * len(texts))
        pq.write_table(pa.table({"text": pa.array(texts, pa.large_string()), "meta": meta}), path)
    else:
        path.write_bytes(packed(json_lines(texts), path.name))
    return path


def read(data: bytes, name: str) -> tuple[list[Document], list[Loss], str]:
    """The documents of a file, what was lost, and the damage."""
    documents, losses = [], []
    try:
        for document in sources.read_file(io.BytesIO(data), name, losses.append):
            documents.append(document)
    except Damage as damage:
        return documents, losses, str(damage)
    return documents, losses, ""


def fetch(*patterns: Path | str, **settings) -> list[Document]:
    made = download.fn(Download(source="files", files=[str(p) for p in patterns], **{"documents": 0} | settings))
    return list(documents_of(made))


def noise(documents: int = 3000, seed: int = 3) -> list[str]:
    """Texts that compress little, so that a shard has many chunks."""
    rng = random.Random(seed)
    return [f"{i} {rng.randbytes(100).hex()}" for i in range(documents)]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Where the files to read lie, beside the store."""
    (tmp_path / "data").mkdir()
    return tmp_path / "data"


@pytest.mark.parametrize("suffix", [".jsonl", ".json", *COMPRESSED, ".parquet"])
def test_every_format_gives_the_same_documents(store: Path, data: Path, suffix: str):
    write_shard(data / f"shard{suffix}", TEXTS)
    expected = [Document(f"shard{suffix}:{i}", "toy", text) for i, text in enumerate(TEXTS, 1)]
    assert fetch(data / f"shard{suffix}") == expected


def test_a_txt_file_is_one_document(store: Path, data: Path):
    for i, text in enumerate(TEXTS):
        (data / f"book-{i}.txt").write_bytes(text.encode())
    expected = [Document(f"book-{i}.txt:1", "book", text) for i, text in enumerate(TEXTS)]
    assert fetch(data / "*.txt") == expected
    assert read(b"\xef\xbb\xbfwith a mark", "a.txt")[0] == [Document("a.txt:1", "a", "with a mark")]
    assert read(b"good line\nbad \xff byte", "a.txt")[:2] == ([], [Loss("a.txt", 2, "not UTF-8", r"b'\xff byte'")])
    assert read(b" \n", "a.txt")[:2] == ([], [Loss("a.txt", 1, "empty text")])


def test_all_frames_of_a_zst_file_are_read():
    first, second = json_lines(TEXTS[:2]), json_lines(TEXTS[2:])
    half = len(first) // 2  # a frame may end within a line
    skippable = (0x184D2A50).to_bytes(4, "little") + (5).to_bytes(4, "little") + b"notes"
    frames = [packed(part, ".zst") for part in (first[:half], first[half:], second)]
    for data in (b"".join(frames), skippable + frames[0] + skippable + frames[1] + frames[2] + skippable):
        documents, losses, damage = read(data, "a.jsonl.zst")
        assert [d.text for d in documents] == TEXTS
        assert not losses
        assert not damage


def test_all_members_of_a_gz_file_are_read():
    data = packed(json_lines(TEXTS[:2]), ".gz") + packed(json_lines(TEXTS[2:]), ".gz")
    assert [d.text for d in read(data, "a.jsonl.gz")[0]] == TEXTS


def test_a_zst_file_with_a_long_window_is_read():
    settings = zstandard.ZstdCompressionParameters(window_log=28, chain_log=6, hash_log=6, strategy=1)
    stream = zstandard.ZstdCompressor(compression_params=settings).compressobj()  # its length is not in the header
    data = stream.compress(json_lines(TEXTS)) + stream.flush()
    with pytest.raises(zstandard.ZstdError, match="memory"):
        zstandard.ZstdDecompressor().decompressobj().decompress(data)
    assert [d.text for d in read(data, "a.jsonl.zst")[0]] == TEXTS


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.zst", ".jsonl.gz"])
def test_lines_longer_than_a_chunk_and_lines_at_its_edges_stay_whole(suffix: str):
    rng = random.Random(1)
    texts = [rng.randbytes(n // 2).hex() for n in (10, 3 * sources.CHUNK, 0, 7, sources.CHUNK, 200)]
    texts = [text or "x" * (sources.CHUNK - len(json_lines([""])) % sources.CHUNK) for text in texts]
    data = json_lines(texts).removesuffix(b"\n")  # nor need the last line end
    assert [d.text for d in read(packed(data, suffix), f"a{suffix}")[0]] == texts


def truncated(data: bytes) -> bytes:
    return data[: len(data) * 3 // 4]


def short_of_a_byte(data: bytes) -> bytes:
    return data[:-1]


def bit_flipped(data: bytes) -> bytes:
    changed = bytearray(data)
    changed[len(data) * 3 // 4] ^= 0x10
    return bytes(changed)


def prefix_of_gz(data: bytes) -> bytes:
    return zlib.decompressobj(31).decompress(data)


def prefix_of_zst(data: bytes) -> bytes:
    """What stream_reader, which takes a truncated file for a whole one, makes of it."""
    return zstandard.ZstdDecompressor().stream_reader(io.BytesIO(data)).readall()


@pytest.mark.parametrize("harm", [truncated, short_of_a_byte])
@pytest.mark.parametrize(("suffix", "prefix_of"), [(".jsonl.zst", prefix_of_zst), (".jsonl.gz", prefix_of_gz)])
def test_all_whole_lines_before_a_truncation_are_found(suffix: str, prefix_of, harm):
    texts = noise()
    data = harm(packed(json_lines(texts), suffix))
    documents, losses, damage = read(data, f"a{suffix}")
    assert damage.startswith("truncated")
    assert not losses
    whole_lines = prefix_of(data).count(b"\n")
    assert 1000 < whole_lines <= len(texts)
    assert [d.text for d in documents] == texts[:whole_lines]


def block_headers(frame: bytes) -> list[int]:
    """Where the blocks of a zst frame begin."""
    places, at, last = [], zstandard.frame_header_size(frame), False
    while not last:
        places.append(at)
        header = int.from_bytes(frame[at : at + 3], "little")
        last, kind, size = bool(header & 1), header >> 1 & 3, header >> 3
        at += 3 + (1 if kind == 1 else size)
    return places


def test_the_lines_before_a_corrupt_place_of_a_zst_file_are_found():
    texts = noise()
    lines = json_lines(texts)
    frame = packed(lines, ".zst")
    place = block_headers(frame)[3]
    corrupt = frame[:place] + bytes([frame[place] | 0b110]) + frame[place + 1 :]  # a kind of block that there is not
    documents, losses, damage = read(corrupt, "a.jsonl.zst")
    assert damage.startswith("corrupt")
    assert not losses
    assert [d.text for d in documents] == texts[: len(documents)]
    two_blocks = lines[: 2 << 17].count(b"\n")
    assert two_blocks <= len(documents) < lines[: 3 << 17].count(b"\n") + 1


def test_garbage_behind_a_frame_is_damage():
    for suffix in (".jsonl.zst", ".jsonl.gz"):
        documents, _, damage = read(packed(json_lines(TEXTS), suffix) + b"garbage", f"a{suffix}")
        assert damage.startswith("corrupt")
        assert [d.text for d in documents] == TEXTS


@pytest.mark.parametrize("suffix", COMPRESSED)
def test_an_empty_compressed_file_is_damage_and_one_of_no_lines_is_not(suffix: str):
    assert read(b"", f"a{suffix}")[2].startswith("truncated")
    assert read(packed(b"", suffix), f"a{suffix}") == ([], [], "")


@pytest.mark.parametrize("harm", [truncated, bit_flipped, lambda data: b""])
@pytest.mark.parametrize("suffix", [".jsonl.zst", ".jsonl.gz"])
def test_a_damaged_shard_is_refused_with_its_name(store: Path, data: Path, suffix: str, harm):
    write_shard(data / f"good-0{suffix}", TEXTS)
    bad = write_shard(data / f"bad-1{suffix}", noise(400))
    bad.write_bytes(harm(bad.read_bytes()))
    with pytest.raises(InputError, match=rf"bad-1{suffix} is (truncated|corrupt).*'keep'") as refused:
        fetch(data)
    assert "\n" not in str(refused.value)
    assert artifacts("download") == []
    assert not (store / "download").exists()


@pytest.mark.parametrize("suffix", [".jsonl.zst", ".jsonl.gz"])
def test_a_damaged_shard_is_kept_up_to_the_damage_when_asked_for(store: Path, data: Path, suffix: str):
    texts = noise(2000)
    bad = write_shard(data / f"bad-1{suffix}", texts)
    bad.write_bytes(truncated(bad.read_bytes()))
    write_shard(data / f"good-2{suffix}", TEXTS)
    made = download.fn(Download(source="files", files=[str(data)], documents=0, damaged="keep"))
    found = [d.text for d in documents_of(made)]
    before = len(found) - len(TEXTS)
    assert 1000 < before < 2000
    assert found == texts[:before] + TEXTS
    lost = [json.loads(line) for line in (made.path / "lost.jsonl").read_text().splitlines()]
    assert lost == [{"file": f"bad-1{suffix}", "line": before + 1, "reason": "truncated shard", "sample": ""}]
    assert made.stats["lost"] == {"truncated shard": 1}


def parquet(table: pa.Table, **settings) -> bytes:
    file = io.BytesIO()
    pq.write_table(table, file, **settings)
    return file.getvalue()


def test_a_damaged_parquet_file_is_damage():
    texts = noise(200)
    whole = parquet(pa.table({"text": texts}), compression="none", write_page_checksum=True)
    for harm in (truncated, short_of_a_byte, lambda data: b""):
        assert read(harm(whole), "a.parquet")[2].startswith("corrupt")
    changed = whole.replace(texts[100].encode(), texts[100][::-1].encode())
    assert changed != whole
    assert read(changed, "a.parquet")[2].startswith("corrupt"), "its page checksums are checked"
    no_utf8 = pa.array([b"good", b"\xff\xfe"], pa.binary()).view(pa.string())
    assert read(parquet(pa.table({"text": no_utf8})), "a.parquet")[2].startswith("corrupt")


def test_a_parquet_file_without_a_column_text_is_refused_with_the_columns_it_has(store: Path, data: Path):
    pq.write_table(pa.table({"content": ["a"], "url": ["b"]}), data / "web.parquet")
    with pytest.raises(InputError, match=r"web.parquet has the columns content, url; expected one named text"):
        fetch(data)


def test_rows_of_a_parquet_file_without_text_are_lost_with_their_number():
    table = pa.table({"text": ["a", None, "  ", "b"]})
    documents, losses, _ = read(parquet(table), "a.parquet")
    assert documents == [Document("a.parquet:1", "a", "a"), Document("a.parquet:4", "a", "b")]
    assert [loss[:3] for loss in losses] == [
        ("a.parquet", 2, "text is not a string but NoneType"),
        ("a.parquet", 3, "empty text"),
    ]


BAD_LINES = [
    (b'{"text": "cut off', "broken JSON"),
    (b'{"text": "half a pair \\ud800"}', "broken JSON"),
    (b'{"text": "not UTF-8 \xff"}', "broken JSON"),
    (b"plain text", "broken JSON"),
    (b'["text", "a"]', "not a JSON object"),
    (b'"text"', "not a JSON object"),
    (b"null", "not a JSON object"),
    (b'{"txt": "a"}', "no field 'text'"),
    (b"{}", "no field 'text'"),
    (b'{"text": null}', "text is not a string but NoneType"),
    (b'{"text": 3}', "text is not a string but int"),
    (b'{"text": ["a"]}', "text is not a string but list"),
    (b'{"text": ""}', "empty text"),
    (b'{"text": " \\n\\t\\u00a0"}', "empty text"),
]


def test_what_is_lost_is_listed_by_file_line_and_reason(store: Path, data: Path):
    rows: list[tuple[bytes, str]] = []
    for i, bad in enumerate(BAD_LINES):
        rows += [(b'{"text": "good %d"}' % i, ""), bad, (b"", "")]  # an empty line is nothing lost
    (data / "a.jsonl").write_bytes(b"\n".join(line for line, _ in rows))
    write_jsonl(data / "b.jsonl", ["fine", None])
    made = download.fn(Download(source="files", files=[str(data)], documents=0, max_lost=0.6))
    expected = [("a.jsonl", i, reason) for i, (_, reason) in enumerate(rows, 1) if reason]
    expected.append(("b.jsonl", 2, "text is not a string but NoneType"))
    found = [json.loads(line) for line in (made.path / "lost.jsonl").read_text().splitlines()]
    assert [(loss["file"], loss["line"], loss["reason"]) for loss in found] == expected
    assert found[0]["sample"] == BAD_LINES[0][0].decode()
    reasons = [reason for _, _, reason in expected]
    assert made.stats["lost"] == {reason: reasons.count(reason) for reason in set(reasons)}
    assert [d.text for d in documents_of(made)] == [*(f"good {i}" for i in range(len(BAD_LINES))), "fine"]


def test_too_many_lost_records_are_refused_with_file_and_reason(store: Path, data: Path):
    write_jsonl(data / "good.jsonl", [f"text {i}" for i in range(96)])
    write_jsonl(data / "bad.jsonl", [None, None, None, "one"])
    with pytest.raises(InputError, match=r"3 of 100 .*NoneType.*2\.0%.*mostly in bad\.jsonl.*max_lost") as refused:
        fetch(data, max_lost=0.02)
    listed = Path(str(refused.value).split("listed in ")[1].removesuffix("."))
    assert len(listed.read_text().splitlines()) == 3, "the list is there to be read after the failure"
    assert artifacts("download") == []
    assert len(fetch(data, max_lost=0.03)) == 97


def test_a_source_without_any_document_is_refused(store: Path, data: Path):
    (data / "a.jsonl").write_text("\n\n")
    with pytest.raises(InputError, match="no document that cram can read"):
        fetch(data, max_lost=1)
    write_jsonl(data / "a.jsonl", ["", None])
    with pytest.raises(InputError, match=r"no document .*1 x empty text; 1 x text is not a string"):
        fetch(data, max_lost=1)


def test_a_byte_order_mark_and_windows_line_ends_do_no_harm():
    data = b"\xef\xbb\xbf" + json_lines(["one", "two\r\nlines"]).replace(b"\n", b"\r\n")
    for suffix in (".jsonl", ".jsonl.zst"):
        documents, losses, _ = read(packed(data, suffix), f"a{suffix}")
        assert [d.text for d in documents] == ["one", "two\r\nlines"]
        assert not losses


@pytest.mark.parametrize(
    ("record", "source"),
    [
        ({"meta": {"pile_set_name": "Pile-CC"}}, "Pile-CC"),
        ({"source": "wiki"}, "wiki"),
        ({"meta": {"pile_set_name": "Pile-CC"}, "source": "wiki"}, "Pile-CC"),
        ({"meta": {"url": "x"}, "source": "wiki"}, "wiki"),
        ({"meta": {"url": "x"}}, "train"),
        ({"meta": {"pile_set_name": ""}}, "train"),
        ({"meta": {"pile_set_name": 3}}, "train"),
        ({"meta": "x", "source": None}, "train"),
        ({"source": 3}, "train"),
        ({}, "train"),
    ],
)
def test_a_document_belongs_to_the_source_it_names_or_else_to_the_family_of_its_file(record: dict, source: str):
    name = "train-00003-of-00010"
    row = {"text": "a", **record}
    expected = [Document(f"{name}.jsonl:1", source, "a")]
    assert read(json.dumps(row).encode(), f"{name}.jsonl")[0] == expected
    assert [d.source for d in read(parquet(pa.Table.from_pylist([row])), f"{name}.parquet")[0]] == [source]


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("train-00003-of-00010.jsonl.zst", "train"),
        ("train/00.jsonl.zst", "00"),
        ("en/c4-train.00000-of-01024.json.gz", "c4-train"),
        ("val.jsonl.zst", "val"),
        ("book_12.txt", "book"),
        ("2024.parquet", "2024"),
        ("pile7.jsonl", "pile"),
    ],
)
def test_the_family_of_a_file_is_its_name_without_numbers(name: str, family: str):
    assert sources.shard_family(name) == family


def test_globs_and_directories_give_files_in_order_each_once(store: Path, data: Path):
    for name in ("b-2.jsonl", "b-1.jsonl", "a/deep/z.jsonl", "a/c.jsonl"):
        (data / name).parent.mkdir(parents=True, exist_ok=True)
        write_jsonl(data / name, [name])
    (data / "a/README.md").write_text("not read")

    def names(*patterns: str) -> list[str]:
        return [d.text for d in fetch(*(data / p for p in patterns))]

    assert names("b-*.jsonl") == ["b-1.jsonl", "b-2.jsonl"]
    assert names("b-2.jsonl", "b-1.jsonl") == ["b-2.jsonl", "b-1.jsonl"]
    assert names("a") == ["a/c.jsonl", "a/deep/z.jsonl"]
    assert names("**/*.jsonl") == ["a/c.jsonl", "a/deep/z.jsonl", "b-1.jsonl", "b-2.jsonl"]
    assert names("b-2.jsonl", ".", "a/../b-?.jsonl") == ["b-2.jsonl", "a/c.jsonl", "a/deep/z.jsonl", "b-1.jsonl"]


def test_a_file_with_brackets_in_its_name_is_found(store: Path, data: Path):
    write_jsonl(data / "text[1].jsonl", ["found"])
    assert [d.id for d in fetch(data / "text[1].jsonl")] == ["text[1].jsonl:1"]


def test_a_home_directory_is_expanded(store: Path, data: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", str(data))
    write_jsonl(data / "a.jsonl", ["found"])
    assert [d.text for d in fetch("~/a.jsonl")] == ["found"]


def test_a_link_is_read_under_its_own_name_as_in_the_cache_of_the_hub(store: Path, data: Path):
    (data / "blobs").mkdir()
    (data / "snapshot").mkdir()
    write_shard(data / "blobs/shard.jsonl.zst", TEXTS).rename(data / "blobs/0a1b2c3d")
    (data / "snapshot/00.jsonl.zst").symlink_to("../blobs/0a1b2c3d")
    assert [d.text for d in fetch(data / "snapshot")] == TEXTS


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("gone.jsonl", ["gone.jsonl", "matches nothing", ".jsonl.zst", "download.files"]),
        ("gone-*.parquet", ["gone-*.parquet", "matches nothing"]),
        ("hollow", ["hollow", "holds no file that cram reads"]),
        ("table.csv", ["table.csv", "kind that cram doesn't read", ".parquet"]),
        ("*", ["table.csv", "kind that cram doesn't read"]),
    ],
)
def test_a_path_that_cannot_be_read_gets_one_sentence(store: Path, data: Path, pattern: str, words: list[str]):
    write_jsonl(data / "a.jsonl", ["text"])
    (data / "table.csv").write_text("a,b\n")
    (data / "hollow").mkdir()
    with pytest.raises(InputError) as refused:
        fetch(data / "a.jsonl", data / pattern)
    for word in words:
        assert word in str(refused.value)
    assert "\n" not in str(refused.value)
    assert artifacts("download") == []


MODULE = '''
"""A module of the toy package. Its docstring is long enough to be taken for prose, as it has a few sentences."""

def short():
    """Too short."""

class Thing:
    """A thing.

    It has a docstring of more than one paragraph, with lines that are indented as the class is.
    """

    async def wait(self):
        """Wait for the thing, which may take quite a while, depending on the thing; see \\ud800 for half a character."""
'''


@pytest.fixture
def toy_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> metadata.Distribution:
    """An installed package; nothing else is installed."""
    files = {
        "toy/__init__.py": MODULE.encode(),
        "toy/broken.py": b"print 'Python 2'\n",
        "toy/latin.py": b"# \xe9\n",
        "toy/guide.md": b"# Guide\n\nHow to use the toy.",
        "toy/empty.txt": b"\n",
        "toy/data.bin": b"\x00",
        "toy/tests/test_toy.py": MODULE.encode(),
        "toy-1.0.dist-info/METADATA": b"Metadata-Version: 2.1\nName: toy\nVersion: 1.0\n\nA toy for tests.\n",
        "toy-1.0.dist-info/licenses/LICENSE": b"Do what you like.",
        "toy-1.0.dist-info/top_level.txt": b"toy\n",
        "toy-1.0.dist-info/RECORD": b"",
    }
    for name, data in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(data)
    (tmp_path / "toy-1.0.dist-info/RECORD").write_text("".join(f"{name},,\n" for name in [*files, "toy/gone.py"]))
    found = metadata.Distribution.at(tmp_path / "toy-1.0.dist-info")
    monkeypatch.setattr(sources, "installed", lambda: {"toy": found})
    return found


def test_a_package_gives_its_description_licences_texts_and_docstrings(toy_package: metadata.Distribution, store: Path):
    made = download.fn(Download(source="python-docs", documents=0, max_lost=0.5))
    expected = [
        ("toy/METADATA", "readmes", "A toy for tests.\n"),
        ("toy/toy-1.0.dist-info/licenses/LICENSE", "licences", "Do what you like."),
        ("toy/toy/__init__.py:1", "docstrings", MODULE.split('"""')[1]),
        (
            "toy/toy/__init__.py:7",
            "docstrings",
            "A thing.\n\nIt has a docstring of more than one paragraph, with lines that are indented as the class is.",
        ),
        (
            "toy/toy/__init__.py:13",
            "docstrings",
            "Wait for the thing, which may take quite a while, depending on the thing; see ? for half a character.",
        ),
        ("toy/toy/guide.md", "texts", "# Guide\n\nHow to use the toy."),
    ]
    assert [tuple(d) for d in documents_of(made)] == expected
    lost = [json.loads(line) for line in (made.path / "lost.jsonl").read_text().splitlines()]
    assert {(loss["file"], loss["reason"]) for loss in lost} == {
        ("toy/toy/broken.py", "not Python of this version"),
        ("toy/toy/latin.py", "not UTF-8"),
    }


def test_the_documentation_of_the_installed_packages_is_prose_of_several_kinds(store: Path):
    made = download.fn(Download(source="python-docs", documents=0, megabytes=0.3))
    assert {"docstrings", "readmes", "licences"} <= set(made.stats["by_source"])
    assert made.stats["bytes"] >= 300_000
    assert not [d for d in documents_of(made) if d.id.startswith("cram/")], "not our own"


def test_the_key_of_python_docs_follows_the_versions_installed(toy_package: metadata.Distribution):
    first = download.target(Download(source="python-docs"))
    assert first == download.target(Download(source="python-docs"))
    about = Path(str(toy_package.locate_file("toy-1.0.dist-info/METADATA")))
    about.write_text(about.read_text().replace("Version: 1.0", "Version: 1.1"))
    assert first != download.target(Download(source="python-docs"))


class Hub(ThreadingHTTPServer):
    """A double of the Hugging Face hub: its listing, its revisions, its files with ranges. `log` has the requests."""

    daemon_threads = True

    def __init__(self, files: dict[tuple[str, str], dict[str, bytes]]) -> None:
        super().__init__(("127.0.0.1", 0), HubHandler)
        self.files, self.log, self.breaks = files, [], {}


class HubHandler(BaseHTTPRequestHandler):
    """Answers one request. Paths in `breaks` are cut off in the middle, so many times."""

    server: Hub

    def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in ({"Content_Length": str(len(body))} | headers).items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            with contextlib.suppress(ConnectionError):  # who reads a prefix hangs up
                self.wfile.write(body)

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.server.log.append((self.command, path, self.headers.get("Range", "")))
        owner, _, rest = path.removeprefix("/api").removeprefix("/datasets/").partition("/")
        name, action, revision, *inner = rest.split("/", 3)
        repository = f"{owner}/{name}"
        if (repository, revision) not in self.server.files:
            self.answer(404, X_Error_Code="RevisionNotFound", X_Error_Message=f"Invalid rev id: {revision}")
            return
        files = self.server.files[repository, revision]
        if action == "tree":
            rows = [{"type": "file", "path": n, "size": len(d), "oid": "0" * 40} for n, d in files.items()]
            self.answer(200, json.dumps(rows).encode(), Content_Type="application/json")
        elif action == "revision":
            about = {"id": repository, "sha": revision, "siblings": [], "private": False, "tags": []}
            self.answer(200, json.dumps(about).encode(), Content_Type="application/json")
        else:
            self.send_file(inner[0], files[inner[0]], revision)

    do_HEAD = do_GET

    def send_file(self, name: str, data: bytes, revision: str) -> None:
        about = {"X_Repo_Commit": revision, "ETag": f'"{hashlib.sha256(data).hexdigest()}"', "Accept_Ranges": "bytes"}
        start = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").split("-")[0])
        if start:
            about["Content_Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        body = data[start:]
        if self.command == "GET" and self.server.breaks.get(name, 0):
            self.server.breaks[name] -= 1
            self.answer(206 if start else 200, body[: len(body) // 2], **about, Content_Length=str(len(body)))
            self.close_connection = True
        else:
            self.answer(206 if start else 200, body, **about)

    def log_message(self, *_: object) -> None:
        """Say nothing on the terminal."""


PILE, C4 = sources.HUB["pile"], sources.HUB["c4"]
SHARDS = {
    "train/00.jsonl.zst": noise(2000, seed=1),
    "train/01.jsonl.zst": noise(2000, seed=2),
    "en/c4-train.00000-of-01024.json.gz": noise(50, seed=3),
    "en/c4-train.00001-of-01024.json.gz": noise(50, seed=4),
}


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    pile = {n: packed(json_lines(t), n) for n, t in SHARDS.items() if n.startswith("train")}
    c4 = {
        n: packed("".join(json.dumps({"text": t, "timestamp": "2019", "url": "x"}) + "\n" for t in texts).encode(), n)
        for n, texts in SHARDS.items()
        if n.startswith("en")
    }
    other = packed(json_lines(["never read"]), ".zst")
    pile = {
        "README.md": b"#",
        "test.jsonl.zst": other,
        **dict(sorted(pile.items(), reverse=True)),
        "val.jsonl.zst": other,
    }
    c4 |= {"en/c4-validation.00000-of-00008.json.gz": b"", "realnewslike/c4-train.00000-of-00512.json.gz": b""}
    server = Hub({(PILE.repository, PILE.revision): pile, (C4.repository, C4.revision): c4})
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


# the hub's client reads HF_ENDPOINT when it is imported, and waits between its attempts
SCRIPT = """
import dataclasses, json, sys, time
time.sleep = lambda seconds: None
from model import InputError
from tasks import sources
from tasks.corpus import Download, documents_of, download

answers = []
for settings, change in json.load(sys.stdin):
    if "revision" in change:
        sources.HUB["pile"] = dataclasses.replace(sources.HUB["pile"], **change)
    try:
        made = download.fn(Download(**settings))
        answers.append([made.stats["shards"], list(documents_of(made))])
    except InputError as error:
        answers.append(str(error))
print(json.dumps(answers))
"""


def address_of(server: ThreadingHTTPServer) -> str:
    return f"http://127.0.0.1:{server.server_address[1]}"


def from_hub(address: str, home: Path, *runs: tuple[dict, dict]) -> list:
    """What each run gave, in a process of its own: (shards, documents) or the sentence."""
    own = {"HF_ENDPOINT": address, "HF_HOME": str(home / "hf"), "HF_HUB_DISABLE_XET": "1", "NO_PROXY": "127.0.0.1"}
    own |= {"CRAM_ARTIFACTS": str(home / "artifacts")}
    kept = {k: v for k, v in os.environ.items() if not k.startswith("HF_") and not k.lower().endswith("_proxy")}
    command = [sys.executable, "-c", SCRIPT]
    folder = Path(__file__).parents[1]
    done = subprocess.run(
        command,
        input=json.dumps(runs),
        env=kept | own,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def asked_for(server: Hub) -> set[tuple[str, str]]:
    """The files that were asked for since the last time, and how."""
    found = {(method, path.split("/")[-1]) for method, path, _ in server.log if "/resolve/" in path}
    server.log.clear()
    return found


def expected_of(names: list[str], source: str, documents: int | None = None) -> list[list[str]]:
    return [[f"{n}:{i}", source, t] for n in names for i, t in enumerate(SHARDS[n], 1)][:documents]


def test_whole_shards_of_the_pile_come_from_the_hub_and_no_other_file(hub: Hub, tmp_path: Path):
    names = ["train/00.jsonl.zst", "train/01.jsonl.zst"]
    [[shards, documents]] = from_hub(address_of(hub), tmp_path, ({"source": "pile", "documents": 0}, {}))
    assert shards == 2
    assert documents == expected_of(names, "toy")
    assert asked_for(hub) == {(method, f"0{i}.jsonl.zst") for method in ("HEAD", "GET") for i in (0, 1)}


def test_a_prefix_is_streamed_from_the_hub_and_what_follows_is_not_asked_for(hub: Hub, tmp_path: Path):
    hub.breaks["train/01.jsonl.zst"] = 1  # the client asks for the rest of a shard that breaks off
    hub.breaks["en/c4-train.00000-of-01024.json.gz"] = 1
    pile, short, c4 = from_hub(
        address_of(hub),
        tmp_path,
        ({"source": "pile", "documents": 3990}, {}),
        ({"source": "pile", "documents": 0, "megabytes": 0.01}, {}),
        ({"source": "c4", "documents": 60}, {}),
    )
    assert pile == [2, expected_of(["train/00.jsonl.zst", "train/01.jsonl.zst"], "toy", 3990)]
    assert short[0] == 1
    size = sum(len(text) for _, _, text in short[1])
    assert size >= 10_000 > size - len(short[1][-1][2])
    assert short[1] == pile[1][: len(short[1])]
    c4_names = [f"en/c4-train.0000{i}-of-01024.json.gz" for i in (0, 1)]
    assert c4 == [2, expected_of(c4_names, "c4-train", 60)]
    ranges = [r for _, path, r in hub.log if path.endswith(("01.jsonl.zst", "00000-of-01024.json.gz"))]
    assert sum(bool(r) for r in ranges) == 2
    names = [*(n.split("/")[-1] for n in c4_names), "00.jsonl.zst", "01.jsonl.zst"]
    assert asked_for(hub) == {("GET", name) for name in names}
    assert not list((tmp_path / "hf").rglob("*.zst")), "a prefix leaves no shard behind"


def test_a_hub_that_fails_gives_one_sentence(hub: Hub, tmp_path: Path):
    hub.breaks["train/01.jsonl.zst"] = 99
    broken, no_revision, no_files = from_hub(
        address_of(hub),
        tmp_path,
        ({"source": "pile", "documents": 3990}, {}),
        ({"source": "pile"}, {"revision": "0" * 40}),
        ({"source": "pile"}, {"revision": PILE.revision, "pattern": "train/[a-z]+"}),
    )
    hub.breaks.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as closed:
        nobody = address_of(closed)
    [no_hub] = from_hub(nobody, tmp_path, ({"source": "pile"}, {}))
    for answer in (broken, no_revision, no_hub):
        assert answer.startswith(f"{PILE.repository} could not be read from the Hugging Face hub: ")
        assert "HF_ENDPOINT" in answer
        assert "\n" not in answer
    assert "RevisionNotFound" in no_revision
    assert "ConnectError" in no_hub
    assert "no file like train/[a-z]+" in no_files
