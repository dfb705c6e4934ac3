"""Reading sources: file formats, damage, losses, hostile input, paths, installed packages."""

import bz2
import errno
import glob
import gzip
import io
import json
import lzma
import os
import random
import re
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pytest
import zstandard
from conftest import asked_for, documents_of, downloaded, refusal, texts_of, write_jsonl
from files_table import gz, parquet_of

from model.errors import InputError
from tasks import download as download_stage
from tasks.corpus import containers, documents, hub, local, pydocs, rows, sources
from tasks.corpus.documents import Found, Options
from tasks.corpus.kinds import Damage, family
from tasks.corpus.losses import Loss
from tasks.corpus.parts import Document
from tasks.download import download
from tasks.store.artifacts import Artifact

TEXTS = [
    "plain",
    "two\nlines\r\n",
    "accents: é ü ñ",
    "emoji \N{GRINNING FACE} and \N{HIRAGANA LETTER A}",
    '"quoted" \\ \t',
    "[MASK] [SEP] [CLS] [PAD] [UNK] <s> </s> <pad> {}",
    "a NUL \0 in it",
    "\ufeffa mark",
    "\u2028 and \x85",
]
COMPRESSED = (".jsonl.zst", ".jsonl.gz")
LINES = (".jsonl", *COMPRESSED)


class Content(NamedTuple):
    """What a file gives."""

    documents: list[Document]
    losses: list[Loss]
    damage: str = ""

    @property
    def texts(self) -> list[str]:
        return [document.text for document in self.documents]


def content(data: bytes, name: str, limit: int = 10**8) -> Content:
    """What the bytes of a file give."""
    found, file = Content([], []), io.BufferedReader(io.BytesIO(data))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows, "MOST_BYTES", limit)
        try:
            for record in documents.read_file(file, name, family(name), Options()):
                if isinstance(record, Found):
                    found.documents.append(Document(*record[:3]))
                else:
                    found.losses.append(record)
        except Damage as damage:
            return found._replace(damage=str(damage))
    return found


def packed(data: bytes, suffix: str) -> bytes:
    if suffix.endswith(".zst"):
        return zstandard.ZstdCompressor(write_checksum=True).compress(data)
    return gz(data) if suffix.endswith(".gz") else data


def json_lines(texts: list[str], field: str = "text") -> bytes:
    return "".join(json.dumps({field: text, "meta": {"pile_set_name": "toy"}}) + "\n" for text in texts).encode()


def losses_of(made: Artifact) -> list[dict]:
    return [json.loads(line) for line in (made.path / "lost.jsonl").read_text().splitlines()]


def noise(documents: int = 3000, seed: int = 3) -> list[str]:
    """Texts that compress little, so that a shard has many chunks."""
    rng = random.Random(seed)
    return [f"{i} {rng.randbytes(100).hex()}" for i in range(documents)]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A directory for the files to read, beside the store."""
    (tmp_path / "data").mkdir()
    return tmp_path / "data"


def plant(folder: Path, *names: str, **links: str) -> None:
    """Files that each hold their name, and links to other paths."""
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        write_jsonl(folder / name, [name])
    for link, to in links.items():
        (folder / link).symlink_to(to)


def test_a_txt_file_is_one_document(store: Path, data: Path):
    for i, text in enumerate(TEXTS):  # a byte order mark is no text
        (data / f"book-{i}.{'txt' if i else 'TXT'}").write_bytes(text.encode("utf-8-sig" if i else "utf-8"))
    assert {(d.source, d.text) for d in documents_of(downloaded(data))} == {("book", text) for text in TEXTS}
    for stored, expected in {
        b"good line\nbad \xff byte": Loss("a.txt", 2, "not UTF-8", r"b'\xff byte'"),
        b" \n": Loss("a.txt", 0, "empty file"),
        "é".encode() * 50_000: Document("a.txt:1", "a", "é" * 50_000),
        "é".encode() * 50_001: Loss("a.txt", 1, "line longer than 100 MB", repr("é".encode() * 20)),
    }.items():
        found = content(stored, "a.txt", limit=100_000)
        assert found.documents + found.losses == [expected]


def test_all_frames_of_zst_and_all_members_of_gz_are_read():
    first, second = json_lines(TEXTS[:2]), json_lines(TEXTS[2:])
    half = len(first) // 2  # a frame may end within a line
    skippable = (0x184D2A50).to_bytes(4, "little") + (5).to_bytes(4, "little") + b"notes"
    for suffix, extra in ((".jsonl.zst", skippable), (".jsonl.zst", b""), (".jsonl.gz", b"")):
        frames = [packed(part, suffix) for part in (first[:half], first[half:], b"", second)]
        assert content(extra + extra.join(frames) + extra, f"a{suffix}").texts == TEXTS
        assert content(frames[2], f"a{suffix}") == ([], [], "")


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress, lzma.compress], ids=["gz", "bz2", "xz"])
def test_streams_and_the_padding_between_and_after_them_are_read(pack: Callable[[bytes], bytes]):
    name = f"a.jsonl.{ {gzip.compress: 'gz', bz2.compress: 'bz2', lzma.compress: 'xz'}[pack] }"
    first, second = pack(json_lines(TEXTS[:2])), pack(json_lines(TEXTS[2:]))
    for between, after in ((0, 4), (4, 0), (512, 4096), (4 * containers.MORSEL, 4 * containers.MORSEL)):
        assert content(first + bytes(between) + second + bytes(after), name).texts == TEXTS
    assert "truncated" in content(first + bytes(8) + second[:-9], name).damage
    assert "corrupt" in content(first + bytes(8) + b"garbage", name).damage


def test_a_zst_file_with_a_long_window_is_read():
    settings = zstandard.ZstdCompressionParameters(window_log=28, chain_log=6, hash_log=6, strategy=1)
    stream = zstandard.ZstdCompressor(compression_params=settings).compressobj()  # its length is not in the header
    data = stream.compress(json_lines(TEXTS)) + stream.flush()
    with pytest.raises(zstandard.ZstdError, match="memory"):
        zstandard.ZstdDecompressor().decompressobj().decompress(data)
    assert content(data, "a.jsonl.zst").texts == TEXTS


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
@pytest.mark.parametrize("suffix", LINES)
def test_any_line_end_and_a_byte_order_mark_are_accepted(suffix: str, end: bytes):
    texts = [*TEXTS, "x" * 3 * containers.BUFFER, *TEXTS]
    data = json_lines(texts).replace(b"\n", end)
    for stored in (data, data.removesuffix(end), data.replace(end, end + end), b"\xef\xbb\xbf" + data):
        found = content(packed(stored, suffix), f"a{suffix}")
        assert found[1:] == ([], "")
        assert found.texts == texts


def naive_lines(data: bytes) -> list[bytes]:
    first = re.search(rb"\r\n|\n|\r", data)
    return re.split(rb"\r\n|\r|\n" if first and first[0] == b"\r" else rb"\n", data)


def test_lines_do_not_depend_on_how_the_bytes_are_divided_and_too_long_ones_are_lost_alone():
    rng = random.Random(5)
    for case in range(600):
        data = bytes(rng.choices([b"ab\n", b"ab\r\n", b"ab\r", b"a\n\r"][case % 4], k=rng.randrange(60)))
        if data.endswith(b"\r") and not re.search(rb"\n|\r.", data, re.DOTALL):
            continue  # one line of either kind
        cuts = sorted(rng.choices(range(len(data) + 1), k=rng.randrange(9)))
        frames = [zstandard.compress(data[a:b]) for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]
        lines = {i: line for i, line in enumerate(naive_lines(data), 1) if len(line) > 7 or line.strip()}
        expected = [(i, line.decode() if len(line) <= 7 else "") for i, line in lines.items()]
        for name, stored in {"a.jsonl": data, "a.jsonl.zst": b"".join(frames)}.items():
            assert [(loss.line, loss.sample) for loss in content(stored, name, 7).losses] == expected, (data, cuts)


def bit_flipped(data: bytes, place: int, bit: int = 4) -> bytes:
    return data[:place] + bytes([data[place] ^ 1 << bit]) + data[place + 1 :]


HARMS = {
    "shortened": ("truncated", lambda data: data[: len(data) * 3 // 4]),
    "short of a byte": ("truncated", lambda data: data[:-1]),
    "emptied": ("truncated", lambda data: b""),
    "with garbage": ("corrupt", lambda data: data + b"garbage"),
    "with a bit flipped": ("corrupt", lambda data: bit_flipped(data, len(data) * 3 // 4)),
}


@pytest.mark.parametrize("harm", HARMS)
@pytest.mark.parametrize("suffix", [".jsonl.zst", ".parquet"])
def test_a_damaged_shard_is_refused_by_its_name_and_kind(store: Path, data: Path, suffix: str, harm: str):
    texts, bad, (kind, damaged) = noise(), data / f"bad-1{suffix}", HARMS[harm]
    whole = packed(json_lines(texts), suffix)
    if suffix == ".parquet":
        whole = parquet_of(pa.table({"text": texts}), compression="none", write_page_checksum=True)
        kind = "truncated" if harm == "emptied" else "corrupt"
    bad.write_bytes(damaged(whole))
    write_jsonl(data / "good.jsonl", TEXTS)
    assert refusal(data, part_megabytes=0.01).startswith(f"{bad.name} is {kind}: ")
    bad.write_bytes(whole)
    assert texts_of(downloaded(data, part_megabytes=0.01)) == texts + TEXTS


@pytest.mark.parametrize("suffix", COMPRESSED)
def test_any_flipped_bit_of_a_compressed_shard_is_noticed(suffix: str):
    rng, texts = random.Random(4), noise(100)
    whole = packed(json_lines(texts), suffix)
    for _ in range(200):
        place = rng.randrange(10, len(whole))  # behind the header, which in gzip holds a time and a flag of no meaning
        assert content(bit_flipped(whole, place, rng.randrange(8)), f"a{suffix}").damage, place


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.binary(), pa.large_binary()])
def test_rows_of_parquet_without_a_text_are_lost_alone(kind: pa.DataType):
    texts = [b"good", b"\xff\xfe", None, "é".encode(), b"  ", "ä".encode() * 50_000, "ä".encode() * 50_001]
    column = pa.array(texts, pa.large_binary() if "large" in str(kind) else pa.binary()).view(kind)
    found = content(parquet_of(pa.table({"text": column})), "a.parquet", limit=100_000)
    assert [d.id for d in found.documents] == ["a.parquet:1", "a.parquet:4", "a.parquet:6"]
    assert found.texts == [texts[i].decode() for i in (0, 3, 5)]
    reasons = {
        2: "not UTF-8 in a table",
        3: "text is not a string but NoneType",
        5: "empty text",
        7: "longer than 100 MB",
    }
    assert {loss.line: loss.reason for loss in found.losses} == reasons


def test_columns_of_any_kind_are_read():
    plain = pa.array(["one", "two", "one"])
    for column in (plain.dictionary_encode(), plain.cast(pa.string_view()), plain.cast(pa.large_string())):
        assert content(parquet_of(pa.table({"text": column})), "a.parquet").texts == ["one", "two", "one"]
    found = content(parquet_of(pa.table({"text": [1, 2]})), "a.parquet")
    assert {loss.reason for loss in found.losses} == {"text is not a string but int"}


def test_parquet_columns_that_are_missing_or_doubled_are_named():
    for columns, named in {
        ("text", "text", "source"): "text",
        ("source", "source", "text"): "source",
        ("meta", "meta", "text"): "meta",
        ("title", "url", "source"): "title, url",
    }.items():
        with pytest.raises(InputError, match=rf"a\.parquet .*{named}"):
            content(parquet_of(pa.table([["a"], ["b"], ["c"]], names=columns)), "a.parquet")


def test_a_source_within_a_column_is_read_over_the_borders_of_row_groups():
    rows = [{"text": f"text {i}", "meta": {"pile_set_name": f"set {i % 2}"}} for i in range(300)]
    found = content(parquet_of(pa.Table.from_pylist(rows), row_group_size=100), "a.parquet")
    assert [d.source for d in found.documents] == ["set 0", "set 1"] * 150


BAD_LINES = [
    (b'{"text": "cut off', "broken JSON"),
    (b'{"text": "half a pair \\ud800"}', "half a surrogate pair in the text"),
    (b'{"text": "not UTF-8 \xff"}', "not UTF-8"),
    (b'{"text": "one"}{"text": "two"}', "more than one value in a line"),
    (b'{"text": "a NUL \x00 as it is"}', "broken JSON"),
    (b"\x00" * 100, "broken JSON"),
    (b'{"deep": ' + b"[" * 100_000 + b"]" * 100_000 + b', "text": "a"}', "nested too deeply"),
    (b'{"inner": {"text": "a"}}', "no field 'text'"),
    (b'{"text": NaN}', "text is not a string but float"),
    (b'{"text": 12345678901234567890}', "text is not a string but int"),
    (b'{"text": {"text": "a"}}', "text is not a string but dict"),
    (b'["text", "a"]', "not a JSON object"),
    (b"null", "not a JSON object"),
    (b'{"text": ""}', "empty text"),
    (b'{"text": " \\n\\t\\u00a0"}', "empty text"),
]


def test_losses_are_listed_by_file_line_and_reason(store: Path, data: Path):
    rows: list[tuple[bytes, str]] = []
    for i, bad in enumerate(BAD_LINES):
        rows += [(b'{"text": "good %d"}' % i, ""), bad, (b"", "")]  # an empty line is no loss
    (data / "a.jsonl").write_bytes(b"\n".join(line for line, _ in rows))
    write_jsonl(data / "b.jsonl", ["fine", None])
    made = downloaded(data, max_lost=0.6)
    expected = [("a.jsonl", i, reason) for i, (_, reason) in enumerate(rows, 1) if reason]
    expected.append(("b.jsonl", 2, "text is not a string but NoneType"))
    found = losses_of(made)
    assert [(loss["file"], loss["line"], loss["reason"]) for loss in found] == expected
    assert found[0]["sample"] == BAD_LINES[0][0].decode()
    assert all(len(loss["sample"]) <= 200 for loss in found)
    reasons = [reason for _, _, reason in expected]
    assert made.stats["lost"] == {reason: reasons.count(reason) for reason in set(reasons)}
    assert texts_of(made) == [*(f"good {i}" for i in range(len(BAD_LINES))), "fine"]


def test_odd_values_of_other_fields_lose_no_document():
    values = ("NaN", "-Infinity", "-1" + "0" * 5000, '"half a pair \\ud800"', "[" * 500 + "]" * 500, "null")
    lines = "".join(f'{{"meta": {value}, "text": "good é", "source": "wiki"}}\n' for value in values)
    expected = [Document(f"a.jsonl:{i}", "wiki", "good é") for i in range(1, 7)]
    assert content(lines.encode(), "a.jsonl") == (expected, [], "")


def test_too_many_lost_records_are_refused_with_file_and_reason(store: Path, data: Path):
    write_jsonl(data / "good.jsonl", [f"text {i}" for i in range(96)])
    bad = write_jsonl(data / "bad.jsonl", [None, None, None, "one"])
    said = refusal(data, max_lost=0.02)
    assert re.match(r"3 of 100 .*NoneType.*bad\.jsonl, line 1.*max_lost", said)
    listed = Path(said.split("listed in ")[1].removesuffix("."))
    assert len(listed.read_text(encoding="utf-8").splitlines()) == 3, "the list can be read after the failure"
    assert len(texts_of(downloaded(data, max_lost=0.03))) == 97
    write_jsonl(bad, ["", None])
    with pytest.raises(InputError, match="1 x empty text; 1 x text is not a string"):
        downloaded(bad, max_lost=1)


FORMATS = {
    "zstd": zstandard.compress,
    "gzip": gzip.compress,
    "bzip2": bz2.compress,
    "xz": lzma.compress,
    "JSON": bytes,
    "text": lambda data: b"text,source\n",
}
RIGHT = {".jsonl": ("JSON", "text"), ".jsonl.zst": ("zstd",), ".json.gz": ("gzip",), ".parquet": ("Parquet",)}


def test_a_file_of_another_format_is_recognised_with_what_to_do():
    for suffix, right in RIGHT.items():
        for form, pack in FORMATS.items():
            if form not in right:
                found, losses, damage = content(pack(json_lines(TEXTS)), f"a{suffix}", limit=10**6)
                assert (found, losses) == ([], [])
                assert damage.startswith(f"a{suffix} is mislabelled")
                assert form in damage


@pytest.mark.parametrize("line", ["[1, 2]", '["text"]', "[[", "{}", "text,source"])
def test_a_wrong_first_line_loses_no_more_than_itself(line: str):
    found = content(f"{line}\n".encode() + json_lines(["one"]), "a.jsonl")
    assert (found.texts, len(found.losses), found.damage) == (["one"], 1, "")


SOURCES = [  # other fields of a record, the source of its document
    ({"meta": {"pile_set_name": "Pile-CC"}, "source": "wiki"}, "Pile-CC"),
    ({"meta": {"url": "x"}, "source": "wiki"}, "wiki"),
    ({"meta": {"url": "x"}}, "train"),
    ({"meta": {"pile_set_name": ""}}, "train"),
    ({"meta": {"pile_set_name": 3}}, "train"),
    ({"meta": "x", "source": None}, "train"),
    ({"source": 3}, "train"),
    ({}, "train"),
    ({"source": "\x1b[31mred\x9b"}, "\\u001b[31mred\\u009b"),
    ({"source": "n" * 256}, "n" * 256),
    ({"source": "n" * 257}, "other"),
    ({"meta": {"pile_set_name": "\udc00x"}}, "?x"),  # the last: Parquet holds no half pairs
]


def test_a_document_belongs_to_the_source_it_names_or_else_to_the_family_of_its_file():
    name, rows = "train-00003-of-00010", [{"text": "a", **record} for record, _ in SOURCES]
    stored = "\n".join(map(json.dumps, rows)).encode()
    found = [
        content(stored, f"{name}.jsonl"),
        *(content(parquet_of(pa.Table.from_pylist([row])), f"{name}.parquet") for row in rows[:-1]),
    ]
    sources = [source for _, source in SOURCES]
    assert [d.source for d in found[0].documents] == sources
    assert [d.source for one in found[1:] for d in one.documents] == sources[:-1]


def test_the_family_of_a_file_is_its_name_without_its_suffix_and_the_number_of_its_shard():
    families = {
        "train/00.jsonl.zst": "00",
        "en/c4-train.00000-of-01024.json.gz": "c4-train",
        "pile7.jsonl": "pile",
        "data/train-00000-of-01650-f70471ee3deb09c0.parquet": "train",
        "notes 3of5.txt": "notes",
        "urllib.request-2.json.gz": "urllib.request",
        ".txt": ".txt",
    }
    assert {name: family(name) for name in families} == families


def test_globs_directories_and_links_give_files_in_order_each_once(store: Path, data: Path, monkeypatch):
    monkeypatch.setenv("HOME", str(data))
    b1, b2, b3, c, z = "b-1.jsonl", "b-2.jsonl", "b-3.jsonl", "a.jsonl/c.jsonl", "a.jsonl/deep/z.jsonl"
    plant(data, b2, b1, z, c)  # a directory may have the name of a shard
    (data / b3).symlink_to(write_jsonl(data.parent / "0a1b2c3d", [b3]))  # as in the cache of the hub
    for patterns, names in (
        ([b2, b1], [b2, b1]),
        (["a.jsonl"], [c, z]),
        (["**/*.jsonl"], [c, z, b1, b2, b3]),
        ([b2, ".", "a.jsonl/../b-?.jsonl"], [b2, c, z, b1, b3]),
    ):
        assert texts_of(downloaded(*(data / pattern for pattern in patterns))) == names, patterns
    assert texts_of(downloaded("~/b-*.jsonl")) == [b1, b2, b3]
    monkeypatch.chdir(data)
    relative = [data / path for path in local.expand("**/*.jsonl")]
    assert relative == local.expand(f"{data}/**/*.jsonl"), "in the same order"


def test_a_path_that_cannot_be_read_is_named(data: Path):
    plant(data, "a.jsonl", "hollow/table.bin", "hollow.parquet/.txt.bak")
    (data / "hollow/table.bin").write_bytes(bytes(99))
    plant(data, "alike/a\nb.jsonl", "alike/a\\u000ab.jsonl")
    plant(data, **{"broken.jsonl": "gone", "circle.jsonl": "circle.jsonl"})
    os.mkfifo(data / "pipe.jsonl")
    for pattern, words in {
        "gone.jsonl": "gone.jsonl' matches nothing",
        "gone-*.parquet": "gone-*.parquet' matches nothing",
        "hollow": "hollow' holds no file",
        "hollow.parquet": "hollow.parquet' holds no file",
        "hollow/table.bin": "table.bin is a kind of file",
        "broken.jsonl": "broken.jsonl is not a regular file",
        "circle.jsonl": "circle.jsonl is not a regular file",
        "pipe.jsonl": "pipe.jsonl is not a regular file",
        "alike": "names that differ only in characters that can't be printed",
    }.items():
        with pytest.raises(InputError, match=re.escape(words)):
            local.local_files([f"{data}/a.jsonl", f"{data}/{pattern}"])


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
'''  # noqa: E501
THING = "A thing.\n\nIt has a docstring of more than one paragraph, with lines that are indented as the class is."
WAIT = "Wait for the thing, which may take quite a while, depending on the thing; see ? for half a character."


PACKAGE = {
    "toy/__init__.py": MODULE.encode(),
    "toy/broken.py": b"print 'Python 2'\n",
    "toy/latin.py": b"# \xe9\n",
    "toy/guide.md": b"# Guide\n\nHow to use the toy.",
    "toy/empty.txt": b"\n",
    "toy/stopwords.txt": "# Words\nund\nкоторый\n\nby and large\nover\n".encode(),
    "toy/data.bin": b"\x00",
    "toy/tests/test_toy.py": MODULE.encode(),
    "toy-1.0.dist-info/METADATA": b"Metadata-Version: 2.1\nName: toy\nVersion: 1.0\n\nA toy for tests.\n",
    "toy-1.0.dist-info/licenses/LICENSE": b"Do what you like.",
    "toy-1.0.dist-info/top_level.txt": b"toy\n",
}


def test_a_package_gives_its_description_licences_texts_and_docstrings(store: Path, tmp_path: Path, monkeypatch):
    info = tmp_path / "toy-1.0.dist-info"
    for name, stored in PACKAGE.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(stored)
    (info / "RECORD").write_text("".join(f"{name},,\n" for name in [*PACKAGE, "toy/gone.py", f"{info.name}/RECORD"]))
    monkeypatch.setattr(pydocs, "installed", lambda: {"toy": metadata.Distribution.at(info)})
    asked = asked_for(source="python-docs", max_lost=0.5)
    made = download.fn(asked)
    assert list(documents_of(made)) == [
        ("toy/METADATA", "readmes", "A toy for tests.\n"),
        ("toy/toy-1.0.dist-info/licenses/LICENSE", "licences", "Do what you like."),
        ("toy/toy/__init__.py:1", "docstrings", MODULE.split('"""')[1]),
        ("toy/toy/__init__.py:7", "docstrings", THING),
        ("toy/toy/__init__.py:13", "docstrings", WAIT),
        ("toy/toy/guide.md", "texts", "# Guide\n\nHow to use the toy."),
    ]
    lost = {(loss["file"], loss["reason"]) for loss in losses_of(made)}
    assert lost == {("toy/toy/broken.py", "not Python of this version"), ("toy/toy/latin.py", "not UTF-8")}
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toy\nVersion: 1.1\n\nA toy for tests.\n")
    assert download.target(asked) != made, "the key has its version"


CHANGES = {
    "in place": lambda path: path.write_bytes(path.read_bytes().replace(b"old", b"new")),
    "at its end": lambda path: path.open("ab").write(json_lines(["more"])),
    "replaced": lambda path: write_jsonl(path.with_name("b"), ["other"]).replace(path),
    "gone": lambda path: path.unlink(),
}


@pytest.mark.parametrize("at", [0, 1, 2999])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_file_that_changes_before_or_while_it_is_read_is_not_published(store, data, monkeypatch, change, at: int):
    path = write_jsonl(data / "a.jsonl", [f"old {i}" for i in range(3000)])
    whole, calls, name = path.read_bytes(), [], "add" if at else "__init__"
    function = getattr(download_stage.Counts, name)

    def changing(*given) -> None:
        function(*given)
        calls.append(1)
        if len(calls) == max(at, 1):
            change(path)

    with monkeypatch.context() as patch:
        patch.setattr(download_stage.Counts, name, changing)
        refusal(data, part_megabytes=0.005)
    path.write_bytes(whole)
    assert texts_of(downloaded(data, part_megabytes=0.005)) == [f"old {i}" for i in range(3000)]


def test_a_file_whose_rights_change_while_it_is_read_is_read(store: Path, data: Path, monkeypatch):
    path, add = write_jsonl(data / "a.jsonl", ["old", "older"]), download_stage.Counts.add
    monkeypatch.setattr(download_stage.Counts, "add", lambda *given: (add(*given), path.chmod(0o600)))
    assert texts_of(downloaded(data)) == ["old", "older"]


BOMB = """
import json, re, sys
from tasks.corpus.documents import Found, Options, read_file
records = read_file(open(sys.argv[1], "rb"), sys.argv[1], "a", Options())
print(json.dumps([record[:3] if isinstance(record, Found) else record for record in records]))
print(int(re.search("VmHWM:[^0-9]+([0-9]+) kB", open("/proc/self/status").read())[1]) / 1024)  # its own, not its parent's
"""  # noqa: E501


def test_a_small_file_that_unpacks_to_a_huge_line_takes_little_memory(tmp_path: Path):
    stream, name = zstandard.ZstdCompressor().compressobj(), "bomb.jsonl.zst"
    with (tmp_path / name).open("wb") as file:
        file.write(stream.compress(b'{"text": "first"}\n{"text": "'))
        for _ in range(400):
            file.write(stream.compress(b"x" * (1 << 20)))
        file.write(stream.compress(b'"}\n{"text": "last"}\n') + stream.flush())
    assert (tmp_path / name).stat().st_size < 100_000
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    command = [sys.executable, "-c", BOMB, name]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    found, peak = done.stdout.splitlines()
    expected = [[f"{name}:1", "a", "first"], [name, 2, "longer than 100 MB", ""], [f"{name}:3", "a", "last"]]
    assert json.loads(found) == expected
    assert float(peak) < 500


ODD_NAMES = [
    "with spaces.jsonl",
    "ünï \N{GRINNING FACE}.jsonl",
    "two\nlines.jsonl",
    "-rf.jsonl",
    "[a-z]*?.jsonl",
    "text[1].jsonl",
    "'quoted\".jsonl",
    "back\\slash.jsonl",
    "%41#?&.jsonl",
    os.fsdecode(b"latin-\xe9.jsonl"),
]


def test_a_file_may_have_any_name(store: Path, data: Path):
    for i, name in enumerate(sorted(ODD_NAMES)):
        write_jsonl(data / name, [f"text {i}", None])
    made = downloaded(data, max_lost=0.5)
    found = zip(sorted(ODD_NAMES), documents_of(made), losses_of(made), strict=True)
    for i, (name, document, lost) in enumerate(found):
        assert texts_of(downloaded(data / name, max_lost=0.5)) == [document.text] == [f"text {i}"]
        assert document.id == lost["file"] + ":1"
        assert document.id.isprintable()
        assert name.isprintable() <= (document.id == f"{name}:1")


def test_a_folder_or_file_that_may_not_be_read_is_named(data: Path, monkeypatch: pytest.MonkeyPatch):
    plant(data, "locked/a.jsonl", "open/a.jsonl", "b.jsonl")

    def guarded(call):
        def guard(path: Path | str, *given, **named):
            if (Path(path) == data / "locked" and call is os.listdir) or Path(path).parent == data / "locked":
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
            return call(path, *given, **named)

        return guard

    for name in ("listdir", "lstat", "stat"):  # root may read every folder
        monkeypatch.setattr(os, name, guarded(getattr(os, name)))
    for pattern in (".", "*", "**/*.jsonl", "*/*.jsonl", "*/a.jsonl", "locked", "locked/a.jsonl"):
        with pytest.raises(InputError, match=rf"download .*Permission denied: {data}/locked(/a\.jsonl)?\."):
            downloaded(f"{data}/{pattern}")

    def forbidden(path: Path, *_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, "open", forbidden)
    with pytest.raises(InputError, match=rf"download .*Permission denied: {data}/b\.jsonl\."):
        downloaded(data / "b.jsonl")


def test_links_to_folders_are_followed_and_each_folder_is_read_once(data: Path):
    plant(data, "z/a.jsonl", "z/deep/b.jsonl", "../outside/c.jsonl", "../outside/more/d.jsonl")
    plant(data, **{"again": "z", "elsewhere": "../outside", "z/up": "..", "z/round": "../again"})
    (data.parent / "outside/back").symlink_to(data)
    expected = ["elsewhere/c.jsonl", "elsewhere/more/d.jsonl", "z/a.jsonl", "z/deep/b.jsonl"]
    for pattern in ("", "/**", "/**/*.jsonl", "/**/*"):
        found = local.local_files([f"{data}{pattern}"])[0].values()
        assert sorted(str(p.relative_to(data)) for p in found) == expected, pattern


def test_globs_match_what_those_of_python_match(data: Path, monkeypatch: pytest.MonkeyPatch):
    names = "a-1.jsonl a-2.jsonl b[1].jsonl .hidden.jsonl x/a.jsonl x/y/a.jsonl .git/a.jsonl x/.a.jsonl"
    plant(data, *names.split())
    monkeypatch.chdir(data)
    patterns = "* *.jsonl a-[!1].jsonl b[[]1].jsonl ?-?.jsonl */a.jsonl */* **/*.jsonl **/a.jsonl x/**/*.jsonl **/y/*"
    patterns += " .* .*/* */.a* **/.* */ **/**/*.jsonl ./* x/../a-* *//a*"
    for pattern in [*patterns.split(), *(f"{data}/{p}" for p in patterns.split())]:
        found = [os.path.normpath(p) for p in local.expand(pattern)]
        assert sorted(found) == sorted(os.path.normpath(p) for p in set(glob.glob(pattern, recursive=True))), pattern


def test_other_files_of_a_directory_are_warned_of_once(data: Path, caplog: pytest.LogCaptureFixture):
    plant(data, "a.jsonl")
    local.local_files([str(data)])
    assert not caplog.messages
    plant(data, "b.py", "c.jsonl.bak", ".d.jsonl", unmounted="/gone")
    for _ in range(2):
        assert list(local.local_files([str(data), f"{data}/../data/*.jsonl"])[0]) == ["a.jsonl"]
    [warning] = caplog.messages
    assert all(
        part in warning for part in ("4 files", "1 hidden, 1 .py, 1 .bak, 1 no regular file", f"({data}/.d.jsonl")
    )


def test_shards_are_reached_once_a_record_of_them_is_read():
    shards = [hub.File(name) for name in "abc"]
    reached = {}
    for at in ((0, 0), (0, 1), (1, 0), (1, 2), (3, 0)):
        reached[at] = "".join(sources.Reader("files", shards, at, Options(), {}).reached)
    assert reached == {(0, 0): "", (0, 1): "a", (1, 0): "a", (1, 2): "ab", (3, 0): "abc"}
