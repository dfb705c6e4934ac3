"""Where documents come from: file formats, damage, losses, paths, installed packages."""

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
from importlib import metadata
from pathlib import Path

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
from tasks.store import artifacts

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


def read(data: bytes, name: str, limit: int = 10**8) -> tuple[list[Document], list[Loss], str]:
    """The documents of a file, what was lost, and the damage."""
    found, damaged = [], ""
    layout = Layout(local.shard_family(name), limit)
    try:
        for record in formats.read_file(io.BytesIO(data), name, layout):
            found.append(record)
    except Damage as damage:
        damaged = str(damage)
    return [r for r in found if isinstance(r, Document)], [r for r in found if isinstance(r, Loss)], damaged


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
    texts = [rng.randbytes(n // 2).hex() for n in (10, 3 * formats.CHUNK, 0, 7, formats.CHUNK, 200)]
    texts = [text or "x" * (formats.CHUNK - len(json_lines([""])) % formats.CHUNK) for text in texts]
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


@pytest.mark.parametrize("suffix", [".jsonl.zst", ".jsonl.gz"])
def test_no_altered_document_of_a_corrupt_shard_is_kept(suffix: str):
    rng = random.Random(4)
    texts = [" ".join(rng.choices(["alpha", "beta", "gamma", "delta", str(i)], k=30)) for i in range(6000)]
    first, second = (packed(json_lines(some), suffix) for some in (texts[:3000], texts[3000:]))
    for trial in range(60):
        flipped = bytearray(first + second)
        place = rng.randrange(len(first) if trial % 2 else 0, len(flipped))
        flipped[place] ^= 1 << rng.randrange(8)
        found, damage = [], None
        layout = Layout("a", 10**8, keep=True)
        try:
            for record in formats.read_file(io.BytesIO(bytes(flipped)), f"a{suffix}", layout):
                found.append(record)
        except Damage as error:
            damage = error
        if damage is None:  # a bit that means nothing, as in the header of gzip
            assert [d.text for d in found] == texts
            continue
        assert [d.text for d in found] == texts[: len(found)], (trial, place)
        assert damage.line in (0, len(found) + 1)
        if place >= len(first) and damage.kind == "corrupt":
            assert len(found) >= 3000, "a whole frame before it has a checksum of its own"


def test_the_line_of_a_damaged_parquet_file_counts_lost_rows(store: Path, data: Path):
    texts = [None, *noise(300)]
    whole = parquet(
        pa.table({"text": texts}),
        compression="none",
        write_page_checksum=True,
        use_dictionary=False,
        data_page_size=2000,
        write_batch_size=10,
    )
    (data / "a.parquet").write_bytes(whole.replace(texts[200].encode(), texts[200][::-1].encode()))
    made = download.fn(Download(source="files", files=[str(data)], documents=0, damaged="keep", max_lost=1))
    lost = [json.loads(line) for line in (made.path / "lost.jsonl").read_text().splitlines()]
    kept = [d.text for d in documents_of(made)]
    assert kept == texts[1 : len(kept) + 1]
    assert [(loss["line"], loss["reason"]) for loss in lost[1:]] == [(len(kept) + 2, "corrupt shard")]


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


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.binary(), pa.large_binary()])
def test_a_row_that_is_not_utf_8_is_lost_alone(kind: pa.DataType):
    rows = pa.array([b"good", b"\xff\xfe", None, "é".encode()], pa.binary())
    column = rows.cast(pa.large_binary()).view(kind) if "large" in str(kind) else rows.view(kind)
    documents, losses, damage = read(parquet(pa.table({"text": column})), "a.parquet")
    assert [(d.id, d.text) for d in documents] == [("a.parquet:1", "good"), ("a.parquet:4", "é")]
    reasons = [("a.parquet", 2, "not UTF-8"), ("a.parquet", 3, "text is not a string but NoneType")]
    assert [loss[:3] for loss in losses] == reasons
    assert not damage


def test_a_parquet_file_is_not_read_before_it_is_needed():
    sink = io.BytesIO()
    pq.write_table(pa.table({"text": noise(5000), "id": range(5000)}), sink, row_group_size=50)

    class Counting(io.BytesIO):
        count = 0

        def read(self, size: int = -1) -> bytes:
            data = super().read(size)
            self.count += len(data)
            return data

    file = Counting(sink.getvalue())
    records = formats.read_file(file, "a.parquet", Layout("a", 10**8))
    next(records)
    footer = file.count
    assert footer < len(sink.getvalue()) / 4
    for _ in range(499):
        next(records)
    assert file.count - footer < len(sink.getvalue()) / 8


@pytest.mark.parametrize("column", ["text", "source", "meta"])
def test_a_parquet_file_with_two_columns_of_a_name_is_refused(store: Path, data: Path, column: str):
    table = pa.table([["a"], ["b"], ["c"]], names=[column, column, "text" if column != "text" else "source"])
    pq.write_table(table, data / "twice.parquet")
    with pytest.raises(InputError, match=rf"twice\.parquet has 2 columns named {column}"):
        fetch(data)


def huge(rows: int, column: str) -> pa.Table:
    """A table with one name of 40 MB in all rows, which takes some kilobytes as Parquet."""
    names = pa.DictionaryArray.from_arrays(pa.array([0] * rows, pa.int32()), pa.array(["n" * 40_000_000]))
    meta = pa.StructArray.from_arrays([names], names=["pile_set_name"])
    return pa.table({"text": [f"text {i}" for i in range(rows)], column: meta if column == "meta" else names})


@pytest.mark.parametrize("rows", [50, 200_000])
@pytest.mark.parametrize("column", ["source", "meta"])
def test_huge_names_of_sources_in_a_small_parquet_file_are_refused(store: Path, data: Path, column: str, rows: int):
    pq.write_table(huge(rows, column), data / "bomb.parquet", compression="zstd")
    assert (data / "bomb.parquet").stat().st_size < 2_000_000
    with pytest.raises(InputError, match=rf"{column}.*bomb\.parquet"):
        fetch(data)


def test_a_dictionary_of_long_texts_is_unpacked_a_few_rows_at_a_time(data: Path, monkeypatch: pytest.MonkeyPatch):
    texts = pa.array(["x" * 30_000_000, "short"]).take(pa.array([0, 1] * 40, pa.int32())).dictionary_encode()
    path = data / "a.parquet"
    pq.write_table(pa.table({"text": texts}), path, compression="zstd")
    with path.open("rb") as file:
        columns = ["text"]
        assert parquet_shards.rows_at_once(file, pq.ParquetFile(path).metadata, "a", columns) == (1 << 28) // 30_000_013
        file.seek(0)
        lengths = [len(d.text) for d in formats.read_file(file, "a.parquet", Layout("a", 10**8))]
    assert lengths == [30_000_000, 5] * 40


def test_texts_of_any_kind_of_column_are_read():
    plain = pa.array(["one", "two", "one"])
    for column in (plain.dictionary_encode(), plain.cast(pa.string_view()), plain.cast(pa.large_string())):
        assert [d.text for d in read(parquet(pa.table({"text": column})), "a.parquet")[0]] == [
            "one",
            "two",
            "one",
        ]
    documents, losses, _ = read(parquet(pa.table({"text": [1, 2]})), "a.parquet")
    assert not documents
    assert {loss.reason for loss in losses} == {"text is not a string but int"}


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
    assert all(len(loss["sample"]) <= 200 for loss in found)
    reasons = [reason for _, _, reason in expected]
    assert made.stats["lost"] == {reason: reasons.count(reason) for reason in set(reasons)}
    assert [d.text for d in documents_of(made)] == [*(f"good {i}" for i in range(len(BAD_LINES))), "fine"]


def test_too_many_lost_records_are_refused_with_file_and_reason(store: Path, data: Path):
    write_jsonl(data / "good.jsonl", [f"text {i}" for i in range(96)])
    write_jsonl(data / "bad.jsonl", [None, None, None, "one"])
    with pytest.raises(InputError, match=r"3 of 100 .*NoneType.*max_lost.*2\.0%.*bad\.jsonl") as refused:
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


ROWS = [{"text": f"text {i}"} for i in range(3)]


@pytest.mark.parametrize("suffix", [".json", ".jsonl", ".json.gz", ".jsonl.zst"])
@pytest.mark.parametrize(
    "text",
    [
        json.dumps(ROWS),
        json.dumps(ROWS, indent=2),
        json.dumps(["text", "more"], indent=1),
        f"\ufeff \r\n {json.dumps(ROWS)}",
        json.dumps([{"text": "x" * 2_000_000}]),
    ],
)
def test_a_file_that_is_one_json_array_is_refused_with_what_to_do(store: Path, data: Path, text: str, suffix: str):
    (data / f"a{suffix}").write_bytes(packed(text.encode(), suffix))
    write_jsonl(data / "b.jsonl", ["one", "two"])
    with pytest.raises(InputError) as refused:
        fetch(data, max_document_megabytes=1)
    said = f"a{suffix} is a JSON array: expected one object a line, after 0 documents. Convert it (jq -c '.[]'), or "
    assert str(refused.value) == f"{said}set download.damaged to 'keep' to go on without it."
    made = download.fn(Download(source="files", files=[str(data)], documents=0, damaged="keep", max_lost=0.5))
    assert made.stats["lost"] == {"a JSON array shard": 1}
    assert [d.text for d in documents_of(made)] == ["one", "two"]


@pytest.mark.parametrize("line", ["[]", "[1, 2]", '["text"]', "[[", "{}"])
def test_a_first_line_that_is_but_an_array_loses_no_more_than_itself(line: str):
    documents, losses, damage = read(f"{line}\n".encode() + json_lines(["one"]), "a.jsonl")
    assert [d.text for d in documents] == ["one"]
    assert len(losses) == 1
    assert not damage


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
        ("data/train-00000-of-01650-f70471ee3deb09c0.parquet", "train"),
        ("part-3of5.txt", "part"),
        ("notes 3.txt", "notes"),
        ("urllib.request.txt", "urllib.request"),
        ("urllib.request-2.json.gz", "urllib.request"),
        ("proof3.txt", "proof"),
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
        ("t*", ["table.csv", "kind that cram doesn't read"]),
        ("broken.jsonl", ["broken.jsonl is a broken link, to gone.jsonl", "correct the link"]),
        ("circle.jsonl", ["circle.jsonl is a broken link, to circle.jsonl"]),
        ("with-link", ["with-link/broken.jsonl is a broken link, to gone.jsonl"]),
        ("with-*", ["with-link/broken.jsonl is a broken link, to gone.jsonl"]),
        ("pipe.jsonl", ["pipe.jsonl is not a regular file", "pipe"]),
        ("with-pipe", ["with-pipe/pipe.jsonl is not a regular file"]),
    ],
)
def test_a_path_that_cannot_be_read_gets_one_sentence(store: Path, data: Path, pattern: str, words: list[str]):
    write_jsonl(data / "a.jsonl", ["text"])
    (data / "table.csv").write_text("a,b\n")
    for folder in ("hollow", "with-link", "with-pipe"):
        (data / folder).mkdir()
    write_jsonl(data / "with-link/a.jsonl", ["text"])
    write_jsonl(data / "with-pipe/a.jsonl", ["text"])
    for link, to in {"broken": "gone", "with-link/broken": "gone", "circle": "circle"}.items():
        (data / f"{link}.jsonl").symlink_to(f"{to}.jsonl")
    for pipe in ("pipe.jsonl", "with-pipe/pipe.jsonl"):
        os.mkfifo(data / pipe)
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
    monkeypatch.setattr(pydocs, "installed", lambda: {"toy": found})
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
    made = download.fn(Download(source="python-docs", documents=0, megabytes=1.5))
    assert {"docstrings", "readmes", "licences"} <= set(made.stats["by_source"])
    assert made.stats["bytes"] >= 300_000
    assert not [d for d in documents_of(made) if d.id.startswith("cram/")], "not our own"


def test_the_key_of_python_docs_follows_the_versions_installed(toy_package: metadata.Distribution):
    first = download.target(Download(source="python-docs"))
    assert first == download.target(Download(source="python-docs"))
    about = Path(str(toy_package.locate_file("toy-1.0.dist-info/METADATA")))
    about.write_text(about.read_text().replace("Version: 1.0", "Version: 1.1"))
    assert first != download.target(Download(source="python-docs"))


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
    documents, losses, damage = read(line * 2, "a.jsonl")
    assert documents == [Document(f"a.jsonl:{i}", "wiki", "good é") for i in (1, 2)]
    assert (losses, damage) == ([], "")


def test_half_a_surrogate_pair_in_the_name_of_a_source_is_replaced():
    for line in (b'{"text": "a", "source": "\\udc00x"}', b'{"text": "a", "meta": {"pile_set_name": "\\udc00x"}}'):
        assert read(line, "a.jsonl")[0] == [Document("a.jsonl:1", "?x", "a")]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_names_of_sources_are_printable_and_short(store: Path, data: Path, suffix: str):
    names = {
        "\x1b[31mred\x9b": "\\u001b[31mred\\u009b",
        "two\nlines": "two\\u000alines",
        "n" * 256: "n" * 256,
        "n" * 257: "other",
    }
    rows = [{"text": f"text {i}", "source": name} for i, name in enumerate(names)]
    if suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), data / "a.parquet")
    else:
        (data / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert [d.source for d in fetch(data)] == list(names.values())
    assert [d.source for d in fetch(data, sets=["two\nlines"])] == ["two\\u000alines"]


def test_a_first_line_that_ends_in_a_bare_carriage_return_loses_no_others(store: Path, data: Path):
    first, *others = json_lines([f"text {i}" for i in range(50)]).splitlines()
    for end in (b"\n", b"\r\n", b"\r"):
        (data / "a.jsonl").write_bytes(first + b"\r" + end.join(others))
        assert [(d.id, d.text) for d in fetch(data)] == [(f"a.jsonl:{i + 1}", f"text {i}") for i in range(50)]


CHANGES = {
    "in place": lambda path: path.write_bytes(path.read_bytes().replace(b"old", b"new")),
    "at its end": lambda path: path.open("ab").write(json_lines(["more"])),
    "replaced": lambda path: write_jsonl(path.with_name("b"), ["other"]).replace(path),
    "gone": lambda path: path.unlink(),
}


@pytest.mark.parametrize("at", [1, 2000, 2999])
@pytest.mark.parametrize("change", CHANGES)
def test_a_file_that_changes_while_it_is_read_is_not_published(
    store: Path, data: Path, monkeypatch, change: str, at: int
):
    path = write_jsonl(data / "a.jsonl", [f"old {i}" for i in range(3000)])
    whole, settings = path.read_bytes(), Download(source="files", files=[str(data)], documents=0, part_megabytes=0.005)
    taken, take = [], download_stage.Reading.take

    def changing(*given) -> None:
        take(*given)
        taken.append(1)
        if len(taken) == at:
            CHANGES[change](path)

    with monkeypatch.context() as patch:
        patch.setattr(download_stage.Reading, "take", changing)
        with pytest.raises(InputError, match=r"a\.jsonl"):
            download.fn(settings)
    assert artifacts("download") == []
    path.write_bytes(whole)
    assert [d.text for d in documents_of(download.fn(settings))] == [f"old {i}" for i in range(3000)]


def test_a_file_that_was_changed_before_it_is_read_is_not_published(store: Path, data: Path, monkeypatch):
    path, init = write_jsonl(data / "a.jsonl", ["old"]), download_stage.Reading.__init__

    def changing(*given) -> None:
        CHANGES["in place"](path)
        init(*given)

    monkeypatch.setattr(download_stage.Reading, "__init__", changing)
    with pytest.raises(InputError, match="changed"):
        fetch(data)
    assert artifacts("download") == []


def test_a_file_that_is_only_touched_by_its_rights_is_read(store: Path, data: Path, monkeypatch):
    path, take = write_jsonl(data / "a.jsonl", ["old", "older"]), download_stage.Reading.take
    monkeypatch.setattr(download_stage.Reading, "take", lambda *given: (take(*given), path.chmod(0o600)))
    assert [d.text for d in fetch(data)] == ["old", "older"]


def test_nothing_in_a_text_is_taken_for_anything_but_text(store: Path, data: Path):
    texts = [
        "[MASK] [SEP] [CLS] [PAD] [UNK]",
        "<s> </s> <pad>",
        "a NUL \0 in it",
        "\r\n",
        "{}",
        "\ufeffa mark",
        "\u2028 and \x85",
    ]
    texts = [text for text in texts if text.strip()]
    for suffix in (".jsonl", ".parquet"):
        write_shard(data / f"a{suffix}", texts)
        assert [d.text for d in fetch(data / f"a{suffix}")] == texts


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.zst", ".jsonl.gz"])
def test_too_long_a_line_is_lost_alone(suffix: str):
    rng = random.Random(1)
    texts = ["before", rng.randbytes(50_000).hex(), "between", "x" * 3_000_000, "x" * 99_988, "after", "y" * 100_000]
    data = json_lines(texts, source="").replace(b', "meta": {"pile_set_name": ""}', b"").removesuffix(b"\n")
    sizes = [len(line) for line in data.split(b"\n")]
    assert sizes[4] == 100_000 < sizes[1]
    documents, losses, damage = read(packed(data, suffix), f"a{suffix}", limit=100_000)
    assert [d.text for d in documents] == ["before", "between", texts[4], "after"]
    assert losses == [Loss(f"a{suffix}", line, "longer than 0.1 MB") for line in (2, 4, 7)]
    assert not damage


def test_too_long_a_text_of_other_files_is_lost_alone():
    texts = ["ä" * 50_000, "ä" * 50_001, "x" * 100_001, "short"]
    documents, losses, _ = read(parquet(pa.table({"text": texts})), "a.parquet", limit=100_000)
    assert [d.text for d in documents] == [texts[0], "short"]
    assert losses == [Loss("a.parquet", row, "longer than 0.1 MB") for row in (2, 3)]
    for text, kept in ((texts[0], True), (texts[1], False), ("é" * 50_001, False)):
        documents, losses, _ = read(text.encode(), "a.txt", limit=100_000)
        assert [d.text for d in documents] == [text] * kept
        assert losses == [Loss("a.txt", 1, "longer than 0.1 MB")] * (not kept)


BOMB = """
import json, re, sys
from tasks.corpus import formats, records
with open(sys.argv[1], "rb") as file:
    print(json.dumps(list(formats.read_file(file, sys.argv[1], records.Layout("a", 10**8)))))
print(int(re.search("VmHWM:[^0-9]+([0-9]+) kB", open("/proc/self/status").read())[1]) / 1024)  # its own, not its parent's
"""


def test_a_small_file_that_unpacks_to_a_line_of_a_gibibyte_takes_little_memory(tmp_path: Path):
    stream = zstandard.ZstdCompressor().compressobj()
    with (tmp_path / "bomb.jsonl.zst").open("wb") as file:
        file.write(stream.compress(b'{"text": "first"}\n{"text": "'))
        for _ in range(1024):
            file.write(stream.compress(b"x" * (1 << 20)))
        file.write(stream.compress(b'"}\n{"text": "last"}\n') + stream.flush())
    assert (tmp_path / "bomb.jsonl.zst").stat().st_size < 200_000
    command = [sys.executable, "-c", BOMB, "bomb.jsonl.zst"]
    home = str(Path(__file__).parents[1])
    env = {**os.environ, "PYTHONPATH": home}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    found, peak = done.stdout.splitlines()
    name = "bomb.jsonl.zst"
    assert json.loads(found) == [
        [f"{name}:1", "a", "first"],
        [name, 2, "longer than 100 MB", ""],
        [f"{name}:3", "a", "last"],
    ]
    assert float(peak) < 600


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.zst", ".jsonl.gz", ".parquet"])
def test_a_long_line_and_a_long_word_are_read_whole(store: Path, data: Path, suffix: str):
    texts = ["short", "many words é " * 1_500_000, "w" * 5_000_000, "after"]
    write_shard(data / f"a{suffix}", texts)
    assert [d.text for d in fetch(data / f"a{suffix}")] == texts


FORMATS = {
    "zstd": lambda data: zstandard.ZstdCompressor().compress(data),
    "gzip": gzip.compress,
    "bzip2": bz2.compress,
    "xz": lzma.compress,
    "plain JSON": lambda data: data,
    "something else": lambda data: b"text,source\n",
}
MISTAKES = [(suffix, form) for suffix in (".jsonl", ".jsonl.zst", ".json.gz", ".parquet", ".txt") for form in FORMATS]
RIGHT = {".jsonl": "plain JSON", ".jsonl.zst": "zstd", ".json.gz": "gzip"}


@pytest.mark.parametrize(("suffix", "form"), [m for m in MISTAKES if RIGHT.get(m[0]) != m[1] and m[0] != ".txt"])
def test_a_file_of_another_format_than_its_name_says_is_refused_with_both(
    store: Path, data: Path, suffix: str, form: str
):
    (data / f"a{suffix}").write_bytes(FORMATS[form](json_lines(TEXTS)))
    if (suffix, form) == (".jsonl", "something else"):
        assert [loss.reason for loss in read((data / "a.jsonl").read_bytes(), "a.jsonl")[1]] == ["broken JSON"]
        return
    expected = {".jsonl": "plain text", ".parquet": "Parquet"}.get(suffix) or RIGHT[suffix]
    with pytest.raises(InputError) as refused:
        fetch(data)
    said = f"a{suffix} is mislabelled: it looks like {form}, but its name says {expected}, after 0 documents. Rename it, or "
    assert str(refused.value).startswith(said)
    write_shard(data / "b.jsonl", TEXTS)
    made = download.fn(Download(source="files", files=[str(data)], documents=0, max_lost=0.2, damaged="keep"))
    assert made.stats["lost"] == {"mislabelled shard": 1}
    assert made.stats["documents"] == len(TEXTS)


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.zst", ".jsonl.gz", ".txt"])
def test_utf_16_is_refused_with_what_to_do(store: Path, data: Path, suffix: str, encoding: str):
    text = "\ufeff" + json_lines(TEXTS).decode()
    (data / f"a{suffix}").write_bytes(packed(text.encode(encoding), suffix))
    with pytest.raises(
        InputError, match=rf"a{suffix} is UTF-16: expected UTF-8, after 0 documents\. Convert it.*iconv"
    ):
        fetch(data)
    write_shard(data / "b.jsonl", TEXTS)
    made = download.fn(Download(source="files", files=[str(data)], documents=0, max_lost=0.2, damaged="keep"))
    assert made.stats["lost"] == {"UTF-16 shard": 1}
    assert made.stats["documents"] == len(TEXTS)


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.zst", ".jsonl.gz"])
def test_lines_may_end_as_on_any_system(suffix: str, end: bytes):
    texts = [*TEXTS, "x" * 3 * formats.CHUNK, *TEXTS]
    data = json_lines(texts).replace(b"\n", end)
    for stored in (data, data.removesuffix(end), data.replace(end, end + end)):
        documents, losses, damage = read(packed(stored, suffix), f"a{suffix}")
        assert [d.text for d in documents] == texts
        assert (losses, damage) == ([], "")


def naive_lines(data: bytes, limit: int) -> list[bytes | None]:
    first = re.search(rb"\r\n|\n|\r", data)
    found = re.split(rb"\r\n|\r|\n" if first and first[0] == b"\r" else rb"\n", data)
    return [line if len(line) <= limit else None for line in (found if found[-1] else found[:-1])]


def test_lines_do_not_depend_on_how_the_bytes_come():
    rng = random.Random(5)
    for case in range(600):
        alphabet = [b"ab\n", b"ab\r\n", b"ab\r", b"a\n\r"][case % 4]
        data = bytes(rng.choices(alphabet, k=rng.randrange(60)))
        if data.endswith(b"\r") and not re.search(rb"\n|\r.", data, re.DOTALL):
            continue  # one line, whichever it is
        cuts = sorted(rng.choices(range(len(data) + 1), k=rng.randrange(9)))
        chunks = [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]
        assert list(formats.lines(chunks, 7)) == naive_lines(data, 7), (data, chunks)


ODD_NAMES = [
    "with spaces.jsonl",
    "ünï \N{GRINNING FACE}.jsonl",
    "two\nlines.jsonl",
    "-rf.jsonl",
    "[a-z]*?.jsonl",
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
        made = download.fn(Download(source="files", files=[str(pattern)], documents=0, max_lost=0.5))
        found = [d for d in documents_of(made) if d.text == "found"]
        [lost] = (made.path / "lost.jsonl").read_text().splitlines()
        assert len(found) == 1
        assert found[0].id == json.loads(lost)["file"] + ":1"
        assert found[0].id.isprintable()
        assert name.isprintable() <= (found[0].id == f"{name}:1")


def test_names_that_look_alike_are_told(store: Path, data: Path):
    for name in ("a\nb.jsonl", "a\\u000ab.jsonl"):
        write_jsonl(data / name, ["text"])
    with pytest.raises(InputError, match="names that differ only in characters that can't be printed"):
        fetch(data)


def test_a_directory_with_the_name_of_a_shard_is_looked_into(store: Path, data: Path):
    (data / "train-0.jsonl.zst").mkdir()
    write_jsonl(data / "train-0.jsonl.zst" / "inner.jsonl", ["inner"])
    (data / "hollow.parquet").mkdir()
    write_jsonl(data / "train-1.jsonl", ["outer"])
    assert sorted(d.text for d in fetch(data)) == ["inner", "outer"]
    assert [d.text for d in fetch(data / "train-0.jsonl.zst")] == ["inner"]
    with pytest.raises(InputError, match=r"hollow.parquet' holds no file that cram reads"):
        fetch(data / "hollow.parquet")


@pytest.mark.parametrize("pattern", [".", "*", "**/*.jsonl", "*/*.jsonl", "*/a.jsonl", "locked", "locked/a.jsonl"])
def test_a_folder_that_may_not_be_read_is_told_with_its_path(data: Path, monkeypatch, pattern: str):
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

    for name in ("listdir", "lstat", "stat"):  # whoever runs the tests may read every folder, if that is root
        monkeypatch.setattr(os, name, guarded(getattr(os, name)))
    with pytest.raises(
        InputError, match=rf"{data}/locked(/a\.jsonl)? can't be read: Permission denied\. .*change their rights"
    ):
        local.local_files([f"{data}/{pattern}"])


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
    names = [
        "a-1.jsonl",
        "a-2.jsonl",
        "b[1].jsonl",
        ".hidden.jsonl",
        "x/a.jsonl",
        "x/y/a.jsonl",
        ".git/a.jsonl",
        "x/.a.jsonl",
    ]
    for name in names:
        (data / name).parent.mkdir(parents=True, exist_ok=True)
        write_jsonl(data / name, [name])
    monkeypatch.chdir(data)
    patterns = [
        "*",
        "*.jsonl",
        "a-[!1].jsonl",
        "b[[]1].jsonl",
        "?-?.jsonl",
        "*/a.jsonl",
        "*/*",
        "**/*.jsonl",
        "**/a.jsonl",
    ]
    patterns += [
        "x/**/*.jsonl",
        "**/y/*",
        ".*",
        ".*/*",
        "*/.a*",
        "**/.*",
        "*/",
        "**/**/*.jsonl",
        "./*",
        "x/../a-*",
        "*//a*",
    ]
    for pattern in [*patterns, *(f"{data}/{p}" for p in patterns)]:
        found = [os.path.normpath(p) for p in local.expand(pattern)]
        assert sorted(found) == sorted(os.path.normpath(p) for p in set(glob.glob(pattern, recursive=True))), pattern


@pytest.mark.parametrize("suffix", [".JSONL", ".Jsonl.ZST", ".json.GZ", ".PARQUET", ".TXT"])
def test_endings_are_read_in_capitals_too(store: Path, data: Path, suffix: str):
    plain = parquet(pa.table({"text": ["some text"]})) if suffix == ".PARQUET" else json_lines(["some text"])
    (data / f"shard-00{suffix}").write_bytes(packed(plain, suffix.lower()))
    for pattern in (data, data / f"shard-00{suffix}"):
        [document] = fetch(pattern)
        assert document.text == (plain.decode() if suffix == ".TXT" else "some text")
    assert local.shard_family(f"shard-00{suffix}") == "shard"


def test_what_is_not_read_of_a_directory_is_told_once(data: Path, caplog: pytest.LogCaptureFixture):
    write_jsonl(data / "a.jsonl", ["text"])
    local.local_files([str(data)])
    assert not caplog.messages
    (data / "deep").mkdir()
    for name in ("b.csv", "c.jsonl.bak", "deep/d.md", "deep/e.md"):
        (data / name).write_text("not read")
    (data / "unmounted").symlink_to("/gone")
    for _ in range(2):
        assert list(local.local_files([str(data), f"{data}/deep/../*.jsonl"])) == ["a.jsonl"]
    [told] = caplog.messages
    assert re.search(
        rf"unsupported extensions .*: 5 \({data}/b\.csv, {data}/c\.jsonl\.bak, {data}/deep/d\.md, …\)", told
    )


@pytest.mark.parametrize("method", ["stat", "open"])
def test_a_file_that_may_not_be_read_is_told_with_its_path(data: Path, monkeypatch, method: str):
    path = write_shard(data / "a.jsonl", TEXTS)
    assert local.file_digest(path) == hashlib.sha256(path.read_bytes()).hexdigest()
    local._digest.cache_clear()

    def forbidden(path: Path, *_, **__) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, method, forbidden)
    with pytest.raises(InputError, match=rf"{path} can't be read: Permission denied\. .*change their rights"):
        local.file_digest(path)
