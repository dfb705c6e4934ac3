"""Reading sources: file formats, damage, losses, hostile input, paths, installed packages."""

import bz2
import errno
import glob
import gzip
import hashlib
import io
import json
import lzma
import os
import random
import re
import subprocess
import sys
import zlib
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from conftest import write_jsonl

from model import InputError
from tasks import download as download_stage
from tasks.corpus import formats, local, parquet_shards, pydocs
from tasks.corpus.parts import Document, documents_of
from tasks.corpus.records import Damage, Layout, Loss
from tasks.download import Download, download
from tasks.store import Artifact, artifacts

TEXTS = [
    "plain",
    "two\nlines\r\n",
    "accents: é ü ñ",
    "emoji \N{GRINNING FACE} and \N{HIRAGANA LETTER A}",
    '"quoted" \\ \t',
]
COMPRESSED = (".jsonl.zst", ".jsonl.gz")
LINES = (".jsonl", *COMPRESSED)


class Content(NamedTuple):
    """What a file gives."""

    documents: list[Document]
    losses: list[Loss]
    damage: Damage | None

    @property
    def texts(self) -> list[str]:
        return [document.text for document in self.documents]


def packed(data: bytes, suffix: str) -> bytes:
    if suffix.endswith(".zst"):
        return zstandard.ZstdCompressor(write_checksum=True).compress(data)
    return gzip.compress(data, mtime=0) if suffix.endswith(".gz") else data


def json_lines(texts: list[str]) -> bytes:
    rows = [json.dumps({"text": text, "meta": {"pile_set_name": "toy"}}) for text in texts]
    return "".join(f"{row}\n" for row in rows).encode()


def parquet(table: pa.Table, **settings) -> bytes:
    file = io.BytesIO()
    pq.write_table(table, file, **settings)
    return file.getvalue()


def write_shard(path: Path, texts: list[str]) -> Path:
    meta = pa.array([{"pile_set_name": "toy"}] * len(texts))
    table = pa.table({"text": pa.array(texts, pa.large_string()), "meta": meta})
    path.write_bytes(parquet(table) if path.suffix == ".parquet" else packed(json_lines(texts), path.name))
    return path


def content(data: bytes, name: str, limit: int = 10**8, keep: bool = False) -> Content:
    """What the bytes of a file give."""
    found, damaged = [], None
    try:
        for record in formats.read_file(io.BytesIO(data), name, Layout(local.shard_family(name), limit, keep=keep)):
            found.append(record)
    except Damage as damage:
        damaged = damage
    return Content([r for r in found if isinstance(r, Document)], [r for r in found if isinstance(r, Loss)], damaged)


def read(*patterns: Path | str, **settings) -> Artifact:
    return download.fn(Download(source="files", files=[str(p) for p in patterns], **{"documents": 0} | settings))


def documents(*patterns: Path | str, **settings) -> list[Document]:
    return list(documents_of(read(*patterns, **settings)))


def texts_of(*patterns: Path | str, **settings) -> list[str]:
    return [d.text for d in documents(*patterns, **settings)]


def losses_of(made: Artifact) -> list[dict]:
    return [json.loads(line) for line in (made.path / "lost.jsonl").read_text().splitlines()]


def refusal(*patterns: Path | str, **settings) -> str:
    """The one sentence with which `download` refuses."""
    with pytest.raises(InputError) as refused:
        read(*patterns, **settings)
    assert "\n" not in str(refused.value)
    assert artifacts("download") == []
    return str(refused.value)


def noise(documents: int = 3000, seed: int = 3) -> list[str]:
    """Texts that compress little, so that a shard has many chunks."""
    rng = random.Random(seed)
    return [f"{i} {rng.randbytes(100).hex()}" for i in range(documents)]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A directory for the files to read, beside the store."""
    (tmp_path / "data").mkdir()
    return tmp_path / "data"


@pytest.mark.parametrize(
    "suffix", [*LINES, ".json", ".json.zst", ".json.gz", ".parquet", ".JSONL", ".json.GZ", ".PARQUET"]
)
def test_every_format_gives_the_same_documents(store: Path, data: Path, suffix: str):
    write_shard(data / f"shard-0{suffix.lower()}", TEXTS).rename(data / f"shard-0{suffix}")
    expected = [Document(f"shard-0{suffix}:{i}", "toy", text) for i, text in enumerate(TEXTS, 1)]
    assert documents(data / f"shard-0{suffix}") == documents(data) == expected
    assert local.shard_family(f"shard-0{suffix}") == "shard"


def test_a_txt_file_is_one_document(store: Path, data: Path):
    for i, text in enumerate(TEXTS):
        (data / f"book-{i}.{'txt' if i else 'TXT'}").write_bytes(text.encode())
    found = {(d.source, d.text) for d in documents(data)}
    assert found == {("book", text) for text in TEXTS}
    assert content(b"\xef\xbb\xbfwith a mark", "a.txt").documents == [Document("a.txt:1", "a", "with a mark")]
    assert content(b"good line\nbad \xff byte", "a.txt")[:2] == ([], [Loss("a.txt", 2, "not UTF-8", r"b'\xff byte'")])
    assert content(b" \n", "a.txt")[:2] == ([], [Loss("a.txt", 1, "empty text")])


def test_all_frames_of_zst_and_all_members_of_gz_are_read():
    first, second = json_lines(TEXTS[:2]), json_lines(TEXTS[2:])
    half = len(first) // 2  # a frame may end within a line
    skippable = (0x184D2A50).to_bytes(4, "little") + (5).to_bytes(4, "little") + b"notes"
    for suffix, extra in ((".jsonl.zst", skippable), (".jsonl.zst", b""), (".jsonl.gz", b"")):
        frames = [packed(part, suffix) for part in (first[:half], first[half:], second)]
        found = content(extra + frames[0] + extra + frames[1] + frames[2] + extra, f"a{suffix}")
        assert (found.texts, found.losses, found.damage) == (TEXTS, [], None)


def test_a_zst_file_with_a_long_window_is_read():
    settings = zstandard.ZstdCompressionParameters(window_log=28, chain_log=6, hash_log=6, strategy=1)
    stream = zstandard.ZstdCompressor(compression_params=settings).compressobj()  # its length is not in the header
    data = stream.compress(json_lines(TEXTS)) + stream.flush()
    with pytest.raises(zstandard.ZstdError, match="memory"):
        zstandard.ZstdDecompressor().decompressobj().decompress(data)
    assert content(data, "a.jsonl.zst").texts == TEXTS


@pytest.mark.parametrize("suffix", LINES)
def test_lines_longer_than_a_chunk_and_lines_at_its_edges_stay_whole(suffix: str):
    rng = random.Random(1)
    texts = [rng.randbytes(n // 2).hex() for n in (10, 3 * formats.CHUNK, 0, 7, formats.CHUNK, 200)]
    texts = [text or "x" * (formats.CHUNK - len(json_lines([""])) % formats.CHUNK) for text in texts]
    data = json_lines(texts).removesuffix(b"\n")  # the last line need not end
    assert content(packed(data, suffix), f"a{suffix}").texts == texts


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
@pytest.mark.parametrize("suffix", LINES)
def test_any_line_end_and_a_byte_order_mark_are_accepted(suffix: str, end: bytes):
    texts = [*TEXTS, "x" * 3 * formats.CHUNK, *TEXTS]
    data = json_lines(texts).replace(b"\n", end)
    for stored in (data, data.removesuffix(end), data.replace(end, end + end), b"\xef\xbb\xbf" + data):
        found = content(packed(stored, suffix), f"a{suffix}")
        assert (found.texts, found.losses, found.damage) == (texts, [], None)


def naive_lines(data: bytes, limit: int) -> list[bytes | None]:
    first = re.search(rb"\r\n|\n|\r", data)
    found = re.split(rb"\r\n|\r|\n" if first and first[0] == b"\r" else rb"\n", data)
    return [line if len(line) <= limit else None for line in (found if found[-1] else found[:-1])]


def test_lines_do_not_depend_on_how_the_bytes_are_divided():
    rng = random.Random(5)
    for case in range(600):
        alphabet = [b"ab\n", b"ab\r\n", b"ab\r", b"a\n\r"][case % 4]
        data = bytes(rng.choices(alphabet, k=rng.randrange(60)))
        if data.endswith(b"\r") and not re.search(rb"\n|\r.", data, re.DOTALL):
            continue  # one line of either kind
        cuts = sorted(rng.choices(range(len(data) + 1), k=rng.randrange(9)))
        chunks = [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]
        assert list(formats.lines(chunks, 7)) == naive_lines(data, 7), (data, chunks)


def truncated(data: bytes) -> bytes:
    return data[: len(data) * 3 // 4]


def short_of_a_byte(data: bytes) -> bytes:
    return data[:-1]


def bit_flipped(data: bytes) -> bytes:
    place = len(data) * 3 // 4
    return data[:place] + bytes([data[place] ^ 0x10]) + data[place + 1 :]


def emptied(data: bytes) -> bytes:
    return b""


@pytest.mark.parametrize("harm", [truncated, short_of_a_byte])
@pytest.mark.parametrize("suffix", COMPRESSED)
def test_all_whole_lines_before_a_truncation_are_found(suffix: str, harm: Callable):
    texts = noise()
    data = harm(packed(json_lines(texts), suffix))
    unpack = zlib.decompressobj(31) if suffix.endswith(".gz") else zstandard.ZstdDecompressor().decompressobj()
    whole_lines = unpack.decompress(data).count(b"\n")
    found = content(data, f"a{suffix}")
    assert 1000 < whole_lines <= len(texts)
    assert (found.damage.kind, found.losses, found.texts) == ("truncated", [], texts[:whole_lines])


@pytest.mark.parametrize("suffix", COMPRESSED)
def test_garbage_after_a_frame_and_an_empty_file_are_damage_but_no_lines_are_not(suffix: str):
    found = content(packed(json_lines(TEXTS), suffix) + b"garbage", f"a{suffix}")
    assert (found.damage.kind, found.texts) == ("corrupt", TEXTS)
    assert content(b"", f"a{suffix}").damage.kind == "truncated"
    assert content(packed(b"", suffix), f"a{suffix}") == ([], [], None)


@pytest.mark.parametrize("harm", [truncated, bit_flipped, emptied])
@pytest.mark.parametrize("suffix", COMPRESSED)
def test_a_damaged_shard_is_refused_with_its_name(store: Path, data: Path, suffix: str, harm: Callable):
    write_shard(data / f"good-0{suffix}", TEXTS)
    bad = write_shard(data / f"bad-1{suffix}", noise(400))
    bad.write_bytes(harm(bad.read_bytes()))
    assert re.match(rf"bad-1{suffix} is (truncated|corrupt).*'keep'", refusal(data))


@pytest.mark.parametrize("suffix", COMPRESSED)
def test_a_damaged_shard_is_kept_up_to_the_damage_on_request(store: Path, data: Path, suffix: str):
    texts = noise(2000)
    bad = write_shard(data / f"bad-1{suffix}", texts)
    bad.write_bytes(truncated(bad.read_bytes()))
    write_shard(data / f"good-2{suffix}", TEXTS)
    made = read(data, damaged="keep")
    found = [d.text for d in documents_of(made)]
    before = len(found) - len(TEXTS)
    assert 1000 < before < 2000
    assert found == texts[:before] + TEXTS
    assert losses_of(made) == [{"file": bad.name, "line": before + 1, "reason": "truncated shard", "sample": ""}]
    assert made.stats["lost"] == {"truncated shard": 1}


@pytest.mark.parametrize("suffix", COMPRESSED)
def test_no_altered_document_of_a_corrupt_shard_is_kept(suffix: str):
    rng = random.Random(4)
    texts = [" ".join(rng.choices(["alpha", "beta", "gamma", "delta", str(i)], k=30)) for i in range(6000)]
    first, second = (packed(json_lines(some), suffix) for some in (texts[:3000], texts[3000:]))
    for trial in range(60):
        flipped = bytearray(first + second)
        place = rng.randrange(len(first) if trial % 2 else 0, len(flipped))
        flipped[place] ^= 1 << rng.randrange(8)
        found = content(bytes(flipped), f"a{suffix}", keep=True)
        assert found.texts == texts[: len(found.texts)], (trial, place)
        if found.damage is None:  # a bit without a meaning, as in the header of gzip
            assert found.texts == texts
            continue
        assert found.damage.line in (0, len(found.texts) + 1)
        if place >= len(first) and found.damage.kind == "corrupt":
            assert len(found.texts) >= 3000, "a whole frame before it has a checksum of its own"


def test_a_damaged_parquet_file_is_damage_at_the_line_that_counts_lost_rows(store: Path, data: Path):
    texts = [None, *noise(300)]
    pages = {"use_dictionary": False, "data_page_size": 2000, "write_batch_size": 10}
    whole = parquet(pa.table({"text": texts}), compression="none", write_page_checksum=True, **pages)
    for harm in (truncated, short_of_a_byte, emptied):
        assert content(harm(whole), "a.parquet").damage.kind == "corrupt"
    (data / "a.parquet").write_bytes(whole.replace(texts[200].encode(), texts[200][::-1].encode()))
    made = read(data, damaged="keep", max_lost=1)
    kept = [d.text for d in documents_of(made)]
    assert kept == texts[1 : len(kept) + 1]
    assert [(loss["line"], loss["reason"]) for loss in losses_of(made)[1:]] == [(len(kept) + 2, "corrupt shard")]


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.binary(), pa.large_binary()])
def test_rows_of_parquet_without_a_text_are_lost_alone(kind: pa.DataType):
    rows = pa.array([b"good", b"\xff\xfe", None, "é".encode(), b"  "], pa.binary())
    column = rows.cast(pa.large_binary()).view(kind) if "large" in str(kind) else rows.view(kind)
    found = content(parquet(pa.table({"text": column})), "a.parquet")
    assert found.documents == [Document("a.parquet:1", "a", "good"), Document("a.parquet:4", "a", "é")]
    assert [(loss.line, loss.reason) for loss in found.losses] == [
        (2, "not UTF-8"), (3, "text is not a string but NoneType"), (5, "empty text"),
    ]  # fmt: skip
    assert not found.damage


def test_columns_of_any_kind_are_read():
    plain = pa.array(["one", "two", "one"])
    for column in (plain.dictionary_encode(), plain.cast(pa.string_view()), plain.cast(pa.large_string())):
        assert content(parquet(pa.table({"text": column})), "a.parquet").texts == ["one", "two", "one"]
    found = content(parquet(pa.table({"text": [1, 2]})), "a.parquet")
    assert {loss.reason for loss in found.losses} == {"text is not a string but int"}


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        (["text", "text", "source"], "text"),
        (["source", "source", "text"], "source"),
        (["meta", "meta", "text"], "meta"),
        (["content", "url", "source"], "content, url"),
    ],
)
def test_parquet_columns_that_are_missing_or_doubled_are_named(store: Path, data: Path, columns: list, words: str):
    pq.write_table(pa.table([["a"], ["b"], ["c"]], names=columns), data / "a.parquet")
    assert re.match(rf"a\.parquet .*{words}", refusal(data))


@pytest.mark.parametrize(("column", "rows"), [("source", 50), ("source", 100_000), ("meta", 50)])
def test_huge_names_of_sources_in_a_small_parquet_file_are_refused(store: Path, data: Path, column: str, rows: int):
    names = pa.DictionaryArray.from_arrays(pa.array([0] * rows, pa.int32()), pa.array(["n" * 40_000_000]))
    meta = pa.StructArray.from_arrays([names], names=["pile_set_name"])
    table = pa.table({"text": [f"text {i}" for i in range(rows)], column: meta if column == "meta" else names})
    pq.write_table(table, data / "bomb.parquet", compression="zstd")
    assert (data / "bomb.parquet").stat().st_size < 2_000_000
    assert re.search(rf"{column}.*bomb\.parquet", refusal(data))


def test_a_dictionary_of_long_texts_is_unpacked_a_few_rows_at_a_time(data: Path):
    texts = pa.array(["x" * 15_000_000, "short"]).take(pa.array([0, 1] * 20, pa.int32())).dictionary_encode()
    path = data / "a.parquet"
    pq.write_table(pa.table({"text": texts}), path, compression="zstd")
    with path.open("rb") as file:
        about = pq.ParquetFile(path).metadata
        assert parquet_shards.rows_at_once(file, about, "a", ["text"]) == (1 << 28) // 15_000_013
        file.seek(0)
        lengths = [len(d.text) for d in formats.read_file(file, "a.parquet", Layout("a", 10**8))]
    assert lengths == [15_000_000, 5] * 20


BAD_LINES = [
    (b'{"text": "cut off', "broken JSON"),
    (b'{"text": "half a pair \\ud800"}', "half a surrogate pair in the text"),
    (b'{"text": "not UTF-8 \xff"}', "not UTF-8"),
    (b'{"text": "one"}{"text": "two"}', "more than one value in a line"),
    (b'{"text": "a tab\tas it is"}', "broken JSON"),
    (b'{"text": "a NUL \x00 as it is"}', "broken JSON"),
    (b"\x00" * 100, "broken JSON"),
    (b'{"deep": ' + b"[" * 100_000 + b"]" * 100_000 + b', "text": "a"}', "nested too deeply"),
    (b'{"inner": {"text": "a"}}', "no field 'text'"),
    (b'{"text": NaN}', "text is not a string but float"),
    (b'{"text": 12345678901234567890}', "text is not a string but int"),
    (b'{"text": {"text": "a"}}', "text is not a string but dict"),
    (b"plain text", "broken JSON"),
    (b'["text", "a"]', "not a JSON object"),
    (b'"text"', "not a JSON object"),
    (b"null", "not a JSON object"),
    (b'{"txt": "a"}', "no field 'text'"),
    (b"{}", "no field 'text'"),
    (b'{"text": null}', "text is not a string but NoneType"),
    (b'{"text": ["a"]}', "text is not a string but list"),
    (b'{"text": ""}', "empty text"),
    (b'{"text": " \\n\\t\\u00a0"}', "empty text"),
]


def test_losses_are_listed_by_file_line_and_reason(store: Path, data: Path):
    rows: list[tuple[bytes, str]] = []
    for i, bad in enumerate(BAD_LINES):
        rows += [(b'{"text": "good %d"}' % i, ""), bad, (b"", "")]  # an empty line is no loss
    (data / "a.jsonl").write_bytes(b"\n".join(line for line, _ in rows))
    write_jsonl(data / "b.jsonl", ["fine", None])
    made = read(data, max_lost=0.6)
    expected = [("a.jsonl", i, reason) for i, (_, reason) in enumerate(rows, 1) if reason]
    expected.append(("b.jsonl", 2, "text is not a string but NoneType"))
    found = losses_of(made)
    assert [(loss["file"], loss["line"], loss["reason"]) for loss in found] == expected
    assert found[0]["sample"] == BAD_LINES[0][0].decode()
    assert all(len(loss["sample"]) <= 200 for loss in found)
    reasons = [reason for _, _, reason in expected]
    assert made.stats["lost"] == {reason: reasons.count(reason) for reason in set(reasons)}
    assert [d.text for d in documents_of(made)] == [*(f"good {i}" for i in range(len(BAD_LINES))), "fine"]


@pytest.mark.parametrize(
    "field",
    [
        '"score": NaN',
        '"score": -Infinity',
        '"id": 123456789012345678901234567890',
        '"id": -1' + "0" * 5000,
        '"url": "half a pair \\ud800"',
        '"deep": ' + "[" * 500 + "]" * 500,
        '"meta": null',
    ],
)
def test_odd_values_of_other_fields_lose_no_document(field: str):
    line = f'{{{field}, "text": "good é", "source": "wiki"}}\n'.encode()
    expected = [Document(f"a.jsonl:{i}", "wiki", "good é") for i in (1, 2)]
    assert content(line * 2, "a.jsonl") == (expected, [], None)


def test_too_many_lost_records_are_refused_with_file_and_reason(store: Path, data: Path):
    write_jsonl(data / "good.jsonl", [f"text {i}" for i in range(96)])
    write_jsonl(data / "bad.jsonl", [None, None, None, "one"])
    said = refusal(data, max_lost=0.02)
    assert re.match(r"3 of 100 .*NoneType.*max_lost.*2\.0%.*bad\.jsonl", said)
    listed = Path(said.split("listed in ")[1].removesuffix("."))
    assert len(listed.read_text().splitlines()) == 3, "the list can be read after the failure"
    assert len(documents(data, max_lost=0.03)) == 97


def test_a_source_without_any_document_is_refused_with_what_was_lost(store: Path, data: Path):
    write_jsonl(data / "a.jsonl", ["", None])
    assert "1 x empty text; 1 x text is not a string" in refusal(data, max_lost=1)


ROWS = [{"text": f"text {i}"} for i in range(3)]
FORMATS = {
    "zstd": zstandard.compress,
    "gzip": gzip.compress,
    "bzip2": bz2.compress,
    "xz": lzma.compress,
    "plain JSON": bytes,
    "something else": lambda data: b"text,source\n",
}
RIGHT = {".jsonl": "plain JSON", ".jsonl.zst": "zstd", ".json.gz": "gzip", ".parquet": "Parquet"}
# (suffix, bytes of the file, kind of damage, words of the sentence)
WRONG_FILES = [
    *(
        (suffix, packed(text.encode(), suffix), "a JSON array", ["jq -c"])
        for suffix in (".json", ".jsonl.gz", ".jsonl.zst")
        for text in (
            json.dumps(ROWS),
            json.dumps(ROWS, indent=2),
            json.dumps(["text", "more"], indent=1),
            f"\ufeff \r\n {json.dumps(ROWS)}",
            json.dumps([{"text": "x" * 2_000_000}]),
        )
    ),
    *(
        (suffix, packed(("\ufeff" + json_lines(TEXTS).decode()).encode(encoding), suffix), "UTF-16", ["UTF-8", "iconv"])
        for suffix in (*LINES, ".txt")
        for encoding in ("utf-16-le", "utf-16-be")
    ),
    *(
        (suffix, pack(json_lines(TEXTS)), "mislabelled", [form, "plain text" if suffix == ".jsonl" else right])
        for suffix, right in RIGHT.items()
        for form, pack in FORMATS.items()
        if form != right and (suffix, form) != (".jsonl", "something else")
    ),
]


@pytest.mark.parametrize(
    ("suffix", "stored", "kind", "words"),
    WRONG_FILES,
    ids=[f"{i}-{kind}" for i, (_, _, kind, _) in enumerate(WRONG_FILES)],
)
def test_a_file_of_another_format_is_refused_with_what_to_do_or_left_out(
    store: Path, data: Path, suffix: str, stored: bytes, kind: str, words: list[str]
):
    (data / f"a{suffix}").write_bytes(stored)
    write_jsonl(data / "b.jsonl", ["one", "two"])
    said = refusal(data, max_document_megabytes=1)
    assert said.startswith(f"a{suffix} is {kind}: ")
    assert [word for word in (*words, "after 0 documents", "download.damaged", "'keep'") if word not in said] == []
    made = read(data, damaged="keep", max_lost=0.5)
    assert made.stats["lost"] == {f"{kind} shard": 1}
    assert [d.text for d in documents_of(made)] == ["one", "two"]


@pytest.mark.parametrize("line", ["[]", "[1, 2]", '["text"]', "[[", "{}", "text,source"])
def test_a_wrong_first_line_loses_no_more_than_itself(line: str):
    found = content(f"{line}\n".encode() + json_lines(["one"]), "a.jsonl")
    assert (found.texts, len(found.losses), found.damage) == (["one"], 1, None)


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
        ({"source": "\x1b[31mred\x9b"}, "\\u001b[31mred\\u009b"),
        ({"source": "two\nlines"}, "two\\u000alines"),
        ({"source": "n" * 256}, "n" * 256),
        ({"source": "n" * 257}, "other"),
        ({"source": "\udc00x"}, "?x"),
        ({"meta": {"pile_set_name": "\udc00x"}}, "?x"),
    ],
)
def test_a_document_belongs_to_the_source_it_names_or_else_to_the_family_of_its_file(record: dict, source: str):
    name = "train-00003-of-00010"
    row = {"text": "a", **record}
    assert content(json.dumps(row).encode(), f"{name}.jsonl").documents == [Document(f"{name}.jsonl:1", source, "a")]
    if source != "?x":  # Parquet holds no half pairs
        found = content(parquet(pa.Table.from_pylist([row])), f"{name}.parquet")
        assert [d.source for d in found.documents] == [source]


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("train-00003-of-00010.jsonl.zst", "train"),
        ("train/00.jsonl.zst", "00"),
        ("en/c4-train.00000-of-01024.json.gz", "c4-train"),
        ("book_12.txt", "book"),
        ("pile7.jsonl", "pile"),
        ("data/train-00000-of-01650-f70471ee3deb09c0.parquet", "train"),
        ("notes 3of5.txt", "notes"),
        ("urllib.request-2.json.gz", "urllib.request"),
        ("v2.report.txt", "v2.report"),
        (".txt", ".txt"),
    ],
)
def test_the_family_of_a_file_is_its_name_without_its_suffix_and_the_number_of_its_shard(name: str, family: str):
    assert local.shard_family(name) == family


def test_globs_and_directories_give_files_in_order_each_once(store: Path, data: Path):
    for name in ("b-2.jsonl", "b-1.jsonl", "a/deep/z.jsonl", "a/c.jsonl"):
        (data / name).parent.mkdir(parents=True, exist_ok=True)
        write_jsonl(data / name, [name])
    (data / "a/README.md").write_text("not read")
    for patterns, names in (
        (["b-*.jsonl"], ["b-1.jsonl", "b-2.jsonl"]),
        (["b-2.jsonl", "b-1.jsonl"], ["b-2.jsonl", "b-1.jsonl"]),
        (["a"], ["a/c.jsonl", "a/deep/z.jsonl"]),
        (["**/*.jsonl"], ["a/c.jsonl", "a/deep/z.jsonl", "b-1.jsonl", "b-2.jsonl"]),
        (["b-2.jsonl", ".", "a/../b-?.jsonl"], ["b-2.jsonl", "a/c.jsonl", "a/deep/z.jsonl", "b-1.jsonl"]),
    ):
        assert texts_of(*(data / pattern for pattern in patterns)) == names, patterns


def test_links_and_a_home_directory_are_followed(store: Path, data: Path, monkeypatch: pytest.MonkeyPatch):
    (data / "blobs").mkdir()
    (data / "snapshot").mkdir()
    write_shard(data / "blobs/shard.jsonl.zst", TEXTS).rename(data / "blobs/0a1b2c3d")
    (data / "snapshot/00.jsonl.zst").symlink_to("../blobs/0a1b2c3d")  # as in the cache of the hub
    monkeypatch.setenv("HOME", str(data))
    assert [d.id for d in documents("~/snapshot")] == [f"00.jsonl.zst:{i}" for i in range(1, 6)]


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("gone.jsonl", ["gone.jsonl", "matches nothing", ".jsonl.zst", "download.files"]),
        ("gone-*.parquet", ["gone-*.parquet", "matches nothing"]),
        ("hollow", ["hollow", "holds no file that cram reads"]),
        ("hollow.parquet", ["hollow.parquet", "holds no file that cram reads"]),
        ("table.csv", ["table.csv", "kind that cram doesn't read", ".parquet"]),
        ("t*", ["table.csv", "kind that cram doesn't read"]),
        ("broken.jsonl", ["broken.jsonl is a broken link, to gone.jsonl", "correct the link"]),
        ("circle.jsonl", ["circle.jsonl is a broken link, to circle.jsonl"]),
        ("with-link", ["with-link/broken.jsonl is a broken link, to gone.jsonl"]),
        ("with-*", ["with-link/broken.jsonl is a broken link, to gone.jsonl"]),
        ("pipe.jsonl", ["pipe.jsonl is not a regular file", "pipe"]),
        ("with-pipe", ["with-pipe/pipe.jsonl is not a regular file"]),
    ],
)
def test_a_path_that_cannot_be_read_is_named(store: Path, data: Path, pattern: str, words: list[str]):
    write_jsonl(data / "a.jsonl", ["text"])
    (data / "table.csv").write_text("a,b\n")
    for folder in ("hollow", "hollow.parquet", "with-link", "with-pipe"):
        (data / folder).mkdir()
    write_jsonl(data / "with-link/a.jsonl", ["text"])
    write_jsonl(data / "with-pipe/a.jsonl", ["text"])
    for link, to in {"broken": "gone", "with-link/broken": "gone", "circle": "circle"}.items():
        (data / f"{link}.jsonl").symlink_to(f"{to}.jsonl")
    for pipe in ("pipe.jsonl", "with-pipe/pipe.jsonl"):
        os.mkfifo(data / pipe)
    said = refusal(data / "a.jsonl", data / pattern)
    assert [word for word in words if word not in said] == []


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
THING = "A thing.\n\nIt has a docstring of more than one paragraph, with lines that are indented as the class is."
WAIT = "Wait for the thing, which may take quite a while, depending on the thing; see ? for half a character."


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
    for name, stored in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(stored)
    (tmp_path / "toy-1.0.dist-info/RECORD").write_text("".join(f"{name},,\n" for name in [*files, "toy/gone.py"]))
    found = metadata.Distribution.at(tmp_path / "toy-1.0.dist-info")
    monkeypatch.setattr(pydocs, "installed", lambda: {"toy": found})
    return found


def test_a_package_gives_its_description_licences_texts_and_docstrings(toy_package: metadata.Distribution, store: Path):
    made = download.fn(Download(source="python-docs", documents=0, max_lost=0.5))
    assert [tuple(d) for d in documents_of(made)] == [
        ("toy/METADATA", "readmes", "A toy for tests.\n"),
        ("toy/toy-1.0.dist-info/licenses/LICENSE", "licences", "Do what you like."),
        ("toy/toy/__init__.py:1", "docstrings", MODULE.split('"""')[1]),
        ("toy/toy/__init__.py:7", "docstrings", THING),
        ("toy/toy/__init__.py:13", "docstrings", WAIT),
        ("toy/toy/guide.md", "texts", "# Guide\n\nHow to use the toy."),
    ]
    lost = {(loss["file"], loss["reason"]) for loss in losses_of(made)}
    assert lost == {("toy/toy/broken.py", "not Python of this version"), ("toy/toy/latin.py", "not UTF-8")}


def test_the_documentation_of_the_installed_packages_is_prose_of_several_kinds(store: Path):
    made = download.fn(Download(source="python-docs", documents=0, megabytes=0.5))
    assert {"docstrings", "readmes", "licences"} <= set(made.stats["by_source"])
    assert made.stats["bytes"] >= 300_000
    assert not [d for d in documents_of(made) if d.id.startswith("cram/")], "not our own"


def test_the_key_of_python_docs_follows_the_versions_installed(toy_package: metadata.Distribution):
    first = download.target(Download(source="python-docs"))
    assert first == download.target(Download(source="python-docs"))
    about = Path(str(toy_package.locate_file("toy-1.0.dist-info/METADATA")))
    about.write_text(about.read_text().replace("Version: 1.0", "Version: 1.1"))
    assert first != download.target(Download(source="python-docs"))


CHANGES = {
    "in place": lambda path: path.write_bytes(path.read_bytes().replace(b"old", b"new")),
    "at its end": lambda path: path.open("ab").write(json_lines(["more"])),
    "replaced": lambda path: write_jsonl(path.with_name("b"), ["other"]).replace(path),
    "gone": lambda path: path.unlink(),
}


@pytest.mark.parametrize("at", [0, 1, 2000, 2999])
@pytest.mark.parametrize("change", CHANGES)
def test_a_file_that_changes_before_or_while_it_is_read_is_not_published(
    store: Path, data: Path, monkeypatch, change: str, at: int
):
    path = write_jsonl(data / "a.jsonl", [f"old {i}" for i in range(3000)])
    whole, calls = path.read_bytes(), []
    function = download_stage.Reading.take if at else download_stage.Reading.__init__

    def changing(*given) -> None:
        function(*given)
        calls.append(1)
        if len(calls) == max(at, 1):
            CHANGES[change](path)

    with monkeypatch.context() as patch:
        patch.setattr(download_stage.Reading, "take" if at else "__init__", changing)
        refusal(data, part_megabytes=0.005)
    path.write_bytes(whole)
    assert texts_of(data, part_megabytes=0.005) == [f"old {i}" for i in range(3000)]


def test_a_file_whose_rights_change_while_it_is_read_is_read(store: Path, data: Path, monkeypatch):
    path, take = write_jsonl(data / "a.jsonl", ["old", "older"]), download_stage.Reading.take
    monkeypatch.setattr(download_stage.Reading, "take", lambda *given: (take(*given), path.chmod(0o600)))
    assert texts_of(data) == ["old", "older"]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_nothing_in_a_text_is_taken_for_anything_but_text(store: Path, data: Path, suffix: str):
    tokens = ["[MASK] [SEP] [CLS] [PAD] [UNK]", "<s> </s> <pad>", "{}"]
    texts = [*tokens, "a NUL \0 in it", "\ufeffa mark", "\u2028 and \x85"]
    assert texts_of(write_shard(data / f"a{suffix}", texts)) == texts


@pytest.mark.parametrize("suffix", LINES)
def test_too_long_a_line_is_lost_alone(suffix: str):
    rng = random.Random(1)
    texts = ["before", rng.randbytes(50_000).hex(), "between", "x" * 3_000_000, "x" * 99_988, "after", "y" * 100_000]
    data = "\n".join(json.dumps({"text": text}) for text in texts).encode()
    sizes = [len(line) for line in data.split(b"\n")]
    assert sizes[4] == 100_000 < sizes[1]
    found = content(packed(data, suffix), f"a{suffix}", limit=100_000)
    assert found.texts == ["before", "between", texts[4], "after"]
    assert found.losses == [Loss(f"a{suffix}", line, "longer than 0.1 MB") for line in (2, 4, 7)]
    assert not found.damage


def test_too_long_a_text_of_other_files_is_lost_alone():
    texts = ["ä" * 50_000, "ä" * 50_001, "x" * 100_001, "short"]
    found = content(parquet(pa.table({"text": texts})), "a.parquet", limit=100_000)
    assert found.texts == [texts[0], "short"]
    assert found.losses == [Loss("a.parquet", row, "longer than 0.1 MB") for row in (2, 3)]
    for text, kept in ((texts[0], True), (texts[1], False), ("é" * 50_001, False)):
        found = content(text.encode(), "a.txt", limit=100_000)
        assert found.texts == [text] * kept
        assert found.losses == [Loss("a.txt", 1, "longer than 0.1 MB")] * (not kept)


BOMB = """
import json, re, sys
from tasks.corpus import formats, records
with open(sys.argv[1], "rb") as file:
    print(json.dumps(list(formats.read_file(file, sys.argv[1], records.Layout("a", 10**8)))))
print(int(re.search("VmHWM:[^0-9]+([0-9]+) kB", open("/proc/self/status").read())[1]) / 1024)  # its own, not its parent's
"""


def test_a_small_file_that_unpacks_to_a_line_of_a_gibibyte_takes_little_memory(tmp_path: Path):
    stream, name = zstandard.ZstdCompressor().compressobj(), "bomb.jsonl.zst"
    with (tmp_path / name).open("wb") as file:
        file.write(stream.compress(b'{"text": "first"}\n{"text": "'))
        for _ in range(1024):
            file.write(stream.compress(b"x" * (1 << 20)))
        file.write(stream.compress(b'"}\n{"text": "last"}\n') + stream.flush())
    assert (tmp_path / name).stat().st_size < 200_000
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    command = [sys.executable, "-c", BOMB, name]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    found, peak = done.stdout.splitlines()
    expected = [[f"{name}:1", "a", "first"], [name, 2, "longer than 100 MB", ""], [f"{name}:3", "a", "last"]]
    assert json.loads(found) == expected
    assert float(peak) < 600


ODD_NAMES = [
    "with spaces.jsonl",
    "ünï \N{GRINNING FACE}.jsonl",
    "two\nlines.jsonl",
    "-rf.jsonl",
    "[a-z]*?.jsonl",
    "text[1].jsonl",
    "'quoted\".jsonl",
    "back\\slash.jsonl",
    ".hidden.jsonl",
    "%41#?&.jsonl",
    os.fsdecode(b"latin-\xe9.jsonl"),
]


@pytest.mark.parametrize("name", ODD_NAMES)
def test_a_file_may_have_any_name(store: Path, data: Path, name: str):
    write_jsonl(data / name, ["found", None])
    write_jsonl(data / "other.jsonl", ["other"])
    for pattern in (data / name, data):
        made = read(pattern, max_lost=0.5)
        [document] = [d for d in documents_of(made) if d.text == "found"]
        [lost] = losses_of(made)
        assert document.id == lost["file"] + ":1"
        assert document.id.isprintable()
        assert name.isprintable() <= (document.id == f"{name}:1")


def test_names_that_look_alike_are_refused(store: Path, data: Path):
    for name in ("a\nb.jsonl", "a\\u000ab.jsonl"):
        write_jsonl(data / name, ["text"])
    assert "names that differ only in characters that can't be printed" in refusal(data)


def test_a_directory_with_the_name_of_a_shard_is_read(store: Path, data: Path):
    (data / "train-0.jsonl.zst").mkdir()
    write_jsonl(data / "train-0.jsonl.zst" / "inner.jsonl", ["inner"])
    write_jsonl(data / "train-1.jsonl", ["outer"])
    assert sorted(texts_of(data)) == ["inner", "outer"]
    assert texts_of(data / "train-0.jsonl.zst") == ["inner"]


@pytest.mark.parametrize("pattern", [".", "*", "**/*.jsonl", "*/*.jsonl", "*/a.jsonl", "locked", "locked/a.jsonl"])
def test_a_folder_that_may_not_be_read_is_named(data: Path, monkeypatch, pattern: str):
    (data / "locked").mkdir()
    (data / "open").mkdir()
    for name in ("locked/a.jsonl", "open/a.jsonl", "b.jsonl"):
        write_jsonl(data / name, [name])

    def guarded(call):
        def guard(path: Path | str, *given, **named):
            if (Path(path) == data / "locked" and call is os.listdir) or Path(path).parent == data / "locked":
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
            return call(path, *given, **named)

        return guard

    for name in ("listdir", "lstat", "stat"):  # root may read every folder
        monkeypatch.setattr(os, name, guarded(getattr(os, name)))
    with pytest.raises(InputError, match=rf"{data}/locked(/a\.jsonl)? .*Permission denied"):
        local.local_files([f"{data}/{pattern}"])


@pytest.mark.parametrize("method", ["stat", "open"])
def test_a_file_that_may_not_be_read_is_named(data: Path, monkeypatch, method: str):
    path = write_shard(data / "a.jsonl", TEXTS)
    assert local.file_digest(path) == hashlib.sha256(path.read_bytes()).hexdigest()
    local._digest.cache_clear()

    def forbidden(path: Path, *_, **__) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, method, forbidden)
    with pytest.raises(InputError, match=rf"{path} .*Permission denied"):
        local.file_digest(path)


def test_links_to_folders_are_followed_and_each_folder_is_read_once(data: Path):
    for name in ("z/a.jsonl", "z/deep/b.jsonl", "../outside/c.jsonl", "../outside/more/d.jsonl"):
        (data / name).parent.mkdir(parents=True, exist_ok=True)
        write_jsonl(data / name, [name])
    for link, to in {"again": "z", "elsewhere": "../outside", "z/up": "..", "z/round": "../again"}.items():
        (data / link).symlink_to(to)
    (data.parent / "outside/back").symlink_to(data)
    expected = ["elsewhere/c.jsonl", "elsewhere/more/d.jsonl", "z/a.jsonl", "z/deep/b.jsonl"]
    for pattern in ("", "/**", "/**/*.jsonl", "/**/*"):
        found = local.local_files([f"{data}{pattern}"]).values()
        assert sorted(str(p.relative_to(data)) for p in found) == expected, pattern


def test_globs_match_what_those_of_python_match(data: Path, monkeypatch: pytest.MonkeyPatch):
    names = "a-1.jsonl a-2.jsonl b[1].jsonl .hidden.jsonl x/a.jsonl x/y/a.jsonl .git/a.jsonl x/.a.jsonl"
    for name in names.split():
        (data / name).parent.mkdir(parents=True, exist_ok=True)
        write_jsonl(data / name, [name])
    monkeypatch.chdir(data)
    patterns = "* *.jsonl a-[!1].jsonl b[[]1].jsonl ?-?.jsonl */a.jsonl */* **/*.jsonl **/a.jsonl x/**/*.jsonl **/y/*"
    patterns += " .* .*/* */.a* **/.* */ **/**/*.jsonl ./* x/../a-* *//a*"
    for pattern in [*patterns.split(), *(f"{data}/{p}" for p in patterns.split())]:
        found = [os.path.normpath(p) for p in local.expand(pattern)]
        assert sorted(found) == sorted(os.path.normpath(p) for p in set(glob.glob(pattern, recursive=True))), pattern


def test_other_files_of_a_directory_are_warned_of_once(data: Path, caplog: pytest.LogCaptureFixture):
    write_jsonl(data / "a.jsonl", ["text"])
    local.local_files([str(data)])
    assert not caplog.messages
    (data / "deep").mkdir()
    for name in ("b.csv", "c.jsonl.bak", "deep/d.md", "deep/e.md"):
        (data / name).write_text("not read")
    (data / "unmounted").symlink_to("/gone")
    for _ in range(2):
        assert list(local.local_files([str(data), f"{data}/deep/../*.jsonl"])) == ["a.jsonl"]
    [warning] = caplog.messages
    assert f"5 ({data}/b.csv, {data}/c.jsonl.bak, {data}/deep/d.md, …)" in warning
