"""Files of every kind: the same rows at every door, the same documents in every packing, or a refusal that helps."""

import bz2
import gzip
import io
import json
import random
import re
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import datasets
import pandas as pd
import pyarrow as pa
import pytest
import zstandard
from conftest import documents_of, downloaded, losses_of, texts_of
from files_table import (
    COMPRESSIONS,
    FILES,
    ROWS,
    TEXTS,
    arrow_of,
    csv_of,
    feather_of,
    json_lines,
    jsonl_of,
    mails_of,
    mbox_of,
    noise,
    packed,
    parquet_of,
    tar_of,
    write,
    zip_of,
    zst,
)

from model.errors import InputError
from tasks.corpus import containers, documents, rows, survey, texts
from tasks.corpus.documents import Found, Options
from tasks.corpus.kinds import Damage, family
from tasks.corpus.losses import Loss
from tasks.corpus.rows import records
from tasks.glue import reading
from tasks.glue.own import Definition

LINES = [" ".join(text.split()) for text in TEXTS]  # texts of one line
ODD = [
    "plain",
    "two\nlines\r\n",
    '"quoted" \\ \t é',
    "[MASK] [SEP] [CLS] [PAD] [UNK] <s> </s> <pad> {}",
    "a NUL \0 in it",
    "\ufeffa mark",
    "\u2028 and \x85",
]


def read(data: bytes, name: str, limit: int = 10**8, **options: str) -> list[Found | Loss]:
    """What the bytes of a file give, where a line may have so many bytes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows, "MOST_BYTES", limit)
        file = io.BufferedReader(io.BytesIO(data))
        return list(documents.read_file(file, name, family(name), Options(**options)))


def text_in(found: list[Found | Loss]) -> list[str]:
    return [record.text for record in found]


def in_short(found: list[Found | Loss]) -> list[tuple[int, str]]:
    """The number of each record, with its text or why it has none."""
    return [(r.line, r.reason) if isinstance(r, Loss) else (int(r.id.rpartition(":")[2]), r.text) for r in found]


def rows_in(folder: Path, name: str, data: bytes, encoding: str = "") -> list:
    """What the row reader finds."""
    (folder / name).write_bytes(data)
    return list(records(folder / name, name, encoding))


def jsonl(texts: list, column: str = "text", **more: object) -> bytes:
    return jsonl_of([{column: text, **more} for text in texts])


def csv(texts: list[str], column: str = "text") -> bytes:
    return csv_of([{"id": str(i), column: text} for i, text in enumerate(texts)])


def parquet(**columns: list) -> bytes:
    return parquet_of(pa.table(columns))


@pytest.mark.parametrize("name", FILES)
def test_every_shape_gives_the_same_rows_at_every_door(store: Path, tmp_path: Path, name: str):
    data, numbers = FILES[name]
    assert rows_in(tmp_path, name, data) == list(zip(numbers, ROWS, strict=True))
    corpus = downloaded(tmp_path / name, source_column="of")
    found = [(f"{name}:{number}", row["of"], row["text"]) for number, row in zip(numbers, ROWS, strict=True)]
    assert list(documents_of(corpus)) == found
    assert corpus.stats["lost"] == {}
    task = reading.read(Definition(name="mine", data=str(tmp_path / name), label="of", validation=0.3))
    rows_of_task = pd.concat(task.tables.values())
    labels = [task.task.labels[number] for number in rows_of_task["label"]]
    assert sorted(zip(rows_of_task["text"], labels, strict=True)) == sorted((row["text"], row["of"]) for row in ROWS)


@pytest.mark.parametrize("suffix", COMPRESSIONS)
def test_every_shape_is_read_in_every_compression(tmp_path: Path, suffix: str):
    for name, (data, numbers) in FILES.items():
        found = rows_in(tmp_path, name + suffix, packed(data, suffix))
        assert found == list(zip(numbers, ROWS, strict=True)), name


SKIPPABLE = bytes.fromhex("502a4d18 05000000") + b"notes"  # a frame of zst that decoders skip
ZEROS = [bytes(count) for count in (0, 4, 512, 4 * containers.MORSEL)]


@pytest.mark.parametrize(
    ("suffix", "paddings"),
    [(".zst", [b"", SKIPPABLE]), (".gz", ZEROS), (".bz2", ZEROS), (".xz", ZEROS), (".lz4", [b""])],
)
def test_all_frames_of_a_file_and_the_padding_between_and_after_them_are_read(suffix: str, paddings: list[bytes]):
    first = json_lines(ODD[:2])
    second = json_lines(ODD[2:])
    half = len(first) // 2  # a frame may end within a line
    frames = [packed(part, suffix) for part in (first[:half], first[half:], b"", second)]
    for padding in paddings:
        stored = padding.join(frames)
        assert text_in(read(stored + padding, f"a.jsonl{suffix}")) == ODD
        with pytest.raises(Damage, match="truncated"):
            read(stored[:-9], f"a.jsonl{suffix}")
    assert text_in(read(SKIPPABLE * (suffix == ".zst") + frames[0] + frames[1], f"a.jsonl{suffix}")) == ODD[:2]
    assert read(frames[2], f"a.jsonl{suffix}") == []


def test_a_zst_file_with_a_long_window_is_read():
    settings = zstandard.ZstdCompressionParameters(window_log=28, chain_log=6, hash_log=6, strategy=1)
    stream = zstandard.ZstdCompressor(compression_params=settings).compressobj()  # its length is not in the header
    data = stream.compress(json_lines(ODD)) + stream.flush()
    with pytest.raises(zstandard.ZstdError, match="memory"):
        zstandard.ZstdDecompressor().decompressobj().decompress(data)
    assert text_in(read(data, "a.jsonl.zst")) == ODD


def flipped(data: bytes, place: int, bit: int = 4) -> bytes:
    return data[:place] + bytes([data[place] ^ 1 << bit]) + data[place + 1 :]


HARMS = {
    "short of a byte": ("truncated", lambda data: data[:-1]),
    "halved": ("truncated", lambda data: data[: len(data) // 2]),
    "emptied": ("truncated", lambda data: b""),
    "cut in its first bytes": ("truncated|corrupt|mislabelled", lambda data: data[:3]),
    "followed by a part of another": ("truncated", lambda data: data + data[:-1]),
    "followed by garbage": ("corrupt", lambda data: data + b"garbage"),
    "with a bit flipped": ("corrupt", lambda data: flipped(data, len(data) * 3 // 4)),
}


@pytest.mark.parametrize("harm", HARMS)
@pytest.mark.parametrize("name", [*(f"a.jsonl{suffix}" for suffix in COMPRESSIONS if suffix != ".lz4"), "a.parquet"])
def test_a_damaged_file_is_refused_by_its_name_and_kind(name: str, harm: str):
    kind, damaged = HARMS[harm]
    texts = noise(600)
    whole = packed(json_lines(texts), name)
    if name == "a.parquet":
        whole = parquet_of(pa.table({"text": texts}), compression="none", write_page_checksum=True)
        kind = kind if harm in ("emptied", "cut in its first bytes") else "corrupt"
    with pytest.raises(Damage, match=rf"^{re.escape(name)} is ({kind})"):
        read(damaged(whole), name)
    assert text_in(read(whole, name)) == texts


@pytest.mark.parametrize("suffix", [".zst", ".gz"])
def test_any_flipped_bit_of_a_compressed_file_is_noticed(suffix: str):
    rng = random.Random(4)
    whole = packed(json_lines(noise(100)), suffix)
    for _ in range(200):
        place = rng.randrange(10, len(whole))  # behind the header, which in gzip holds a time and a flag of no meaning
        with pytest.raises(Damage):
            read(flipped(whole, place, rng.randrange(8)), f"a.jsonl{suffix}")


def test_a_small_file_that_unpacks_to_a_huge_line_takes_little_memory():
    stream = zstandard.ZstdCompressor().compressobj()
    data = stream.compress(b'{"text": "first"}\n{"text": "')
    for _ in range(300):
        data += stream.compress(b"x" * (1 << 20))
    data += stream.compress(b'"}\n{"text": "last"}\n') + stream.flush()
    assert len(data) < 50_000
    tracemalloc.start()
    try:
        found = in_short(read(data, "a.jsonl.zst", limit=1 << 20))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert found == [(1, "first"), (2, "longer than 100 MB"), (3, "last")]
    assert peak < 160 << 20


def naive_lines(data: bytes) -> list[bytes]:
    first = re.search(rb"\r\n|\n|\r", data)
    return re.split(rb"\r\n|\r|\n" if first and first[0] == b"\r" else rb"\n", data)


def test_lines_do_not_depend_on_how_the_bytes_are_divided_and_too_long_ones_are_lost_alone():
    rng = random.Random(5)
    for case in range(400):
        data = bytes(rng.choices([b"ab\n", b"ab\r\n", b"ab\r", b"a\n\r"][case % 4], k=rng.randrange(60)))
        if data.endswith(b"\r") and not re.search(rb"\n|\r.", data, re.DOTALL):
            continue  # one line of either kind
        cuts = sorted(rng.choices(range(len(data) + 1), k=rng.randrange(9)))
        frames = [zstandard.compress(data[a:b]) for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]
        lines = {i: line for i, line in enumerate(naive_lines(data), 1) if len(line) > 7 or line.strip()}
        expected = [(i, line.decode() if len(line) <= 7 else "") for i, line in lines.items()]
        for name, stored in {"a.jsonl": data, "a.jsonl.zst": b"".join(frames)}.items():
            assert [(loss.line, loss.sample) for loss in read(stored, name, 7)] == expected, (data, cuts)


def numbered(suffix: str, texts: list[bytes]) -> dict[str, bytes]:
    """A file for each text."""
    return {f"{i:02d}{suffix}": text for i, text in enumerate(texts)}


PLAIN = [text.encode() for text in TEXTS]
WIKI = "".join(
    f'<doc id="{i}" url="https://x.org/?curid={i}" title="A > B">\n{text}\n\n</doc>\n' for i, text in enumerate(TEXTS)
).encode()
INNER = {f"d/{name}": data for name, data in numbered(".txt", PLAIN).items()}
HALVES = {"a.jsonl": jsonl(TEXTS[:9]), "b/c.csv.gz": gzip.compress(csv(TEXTS[9:]))}
HIDDEN = {"._a.jsonl": b"\0\5\x16\7", ".ipynb_checkpoints/a.jsonl": jsonl(TEXTS), "_OK": b""}
MIXED = {"a.jsonl": jsonl(TEXTS[:5]), "b.csv": csv(TEXTS[5:9], "body"), "c.parquet": parquet(content=TEXTS[9:])}
MAILS = [bytes(message) for message in mails_of(TEXTS)]
BOX = mbox_of(mails_of(TEXTS))
DOTTED = [{"x.y": text} for text in TEXTS]
INPUTS: dict[str, tuple[dict[str, bytes], dict]] = {  # files, and the parameters that they need
    "json array of texts": ({"a.json": json.dumps(TEXTS).encode()}, {}),
    "a json document a file": (numbered(".json", [json.dumps({"text": t}, indent=1).encode() for t in TEXTS]), {}),
    "column raw_content": ({"a.parquet": parquet(url=TEXTS, raw_content=TEXTS)}, {}),
    "column asked": ({"a.jsonl": jsonl(TEXTS, "abstract", text="x")}, {"column": "abstract"}),
    "nested": ({"a.jsonl": jsonl([{"text": t} for t in TEXTS], "doc")}, {"column": "doc.text"}),
    "nested in parquet": ({"a.parquet": parquet(doc=[{"n": 1, "text": t} for t in TEXTS])}, {"column": "doc.text"}),
    "a dot in the name": ({"a.feather": feather_of(DOTTED[:7]), "b.arrow": arrow_of(DOTTED[7:])}, {"column": "x.y"}),
    "lists": ({"a.jsonl": jsonl([t.split("\n") for t in TEXTS])}, {}),
    "lists in parquet": ({"a.parquet": parquet(text=[t.split("\n") for t in TEXTS])}, {}),
    "mixed schemas": (MIXED, {}),
    "zip": ({"a.zip": zip_of(INNER)}, {}),
    "zip of tables in a folder": ({"sub/a.zip": zip_of(HALVES)}, {}),
    "tar": ({"a.tar": tar_of(INNER)}, {}),
    "tar of a folder's dot": ({"a.tar": tar_of({f"./{name}": data for name, data in INNER.items()})}, {}),
    "tar.gz": ({"a.tar.gz": tar_of(HALVES, "w:gz")}, {}),
    "tgz": ({"a.tgz": tar_of(INNER, "w:gz")}, {}),
    "tar.xz with parquet": ({"a.tar.xz": tar_of({"x.parquet": parquet(text=TEXTS)}, "w:xz")}, {}),
    "tar.zst": ({"a.tar.zst": zst(tar_of(INNER))}, {}),
    "md": (numbered(".md", PLAIN), {}),
    "txt.gz": (numbered(".txt.gz", [gzip.compress(text) for text in PLAIN]), {}),
    "utf-16 with a mark": (numbered(".txt", [text.encode("utf-16") for text in TEXTS]), {}),
    "no extension": (numbered("", PLAIN), {}),
    "jsonl without extension": ({"part-00000": jsonl(TEXTS)}, {}),
    "gz without extension": ({"part-00000": gzip.compress(jsonl(TEXTS))}, {}),
    "wiki": ({"AA/wiki_00": WIKI}, {}),
    "wiki.bz2": ({"AA/wiki_00.bz2": bz2.compress(WIKI)}, {}),
    "wiki of json": ({"AA/wiki_00": jsonl(TEXTS, title="T")}, {}),
    "a line a document": ({"a.txt": "\n".join(LINES).encode()}, {"documents_by": "line"}),
    "a line with CR a document": ({"a.txt": "\r".join(["", *LINES]).encode()}, {"documents_by": "line"}),
    "a paragraph a document": ({"a.txt": "\n\n\n".join(LINES).encode()}, {"documents_by": "blank-line"}),
    "mailbox": ({"a.mbox": BOX}, {}),
    "mailbox without extension": ({"a": BOX}, {}),
    "mailbox.gz": ({"a.mbox.gz": gzip.compress(BOX)}, {}),
    "maildir": (numbered(".M1P2.host,S=123:2,S", MAILS), {}),
    "maildir with paths": (numbered(".M1P2.host,S=123:2,S", [b"Return-Path: <a@x.org>\n" + m for m in MAILS]), {}),
    "tar of mail": ({"a.tar": tar_of(numbered(".eml", MAILS) | {"empty.mbox": b""})}, {}),
    "hidden files": ({"a.jsonl": jsonl(TEXTS)} | HIDDEN, {}),
}


@pytest.mark.parametrize("name", INPUTS)
def test_the_documents_of_each_kind_of_input_are_read_and_nothing_else(store: Path, tmp_path: Path, name: str):
    files, settings = INPUTS[name]
    folder = write(tmp_path / "data", files)
    corpus = downloaded(folder, **settings)
    found = texts_of(corpus)
    assert [" ".join(t.split()) for t in found] == LINES
    assert found in (TEXTS, LINES)
    assert len({d.id for d in documents_of(corpus)}) == len(TEXTS), "ids of their own"
    assert corpus.stats["lost"] == {}
    assert sum(n for form in corpus.stats["formats"].values() for n in form.values()) == len(TEXTS)


def test_what_datasets_saved_is_read_without_the_caches_beside_it(store: Path, tmp_path: Path):
    whole = datasets.Dataset.from_dict({"text": TEXTS, "label": list(range(len(TEXTS)))})
    datasets.DatasetDict({"train": whole}).save_to_disk(tmp_path / "saved", num_shards={"train": 2})
    opened = datasets.load_from_disk(tmp_path / "saved")["train"]
    opened.map(lambda row: {"n": len(row["text"])}, cache_file_name=str(tmp_path / "saved/train/cache-0a1b.arrow"))
    assert texts_of(downloaded(tmp_path / "saved")) == TEXTS


PAGE = "<!DOCTYPE html>\n<html><head><title>T</title></head><body><nav>menu</nav><article>{}</article></body></html>"
PARAGRAPHS = "".join(f"<p>{line} It is a paragraph of some length, as an article has.</p>" for line in LINES)
LATIN = "Größe und Maß, naïve cafés.\n"
BOTH = b'{"url": "x", "body": "b", "content": "c"}\n'
JSON = json.dumps([{"text": text} for text in TEXTS[5:8]], indent=2)
TWICE = parquet_of(pa.table([["a"], ["b"]], names=["text", "text"]))
SRT = b"1\r\n00:00:01,000 --> 00:00:04,000\r\nHello\r\n"
REFUSED: dict[str, tuple[dict[str, bytes], dict, str]] = {  # files, parameters, what the sentence names
    "column that isn't there": ({"a.csv": csv(TEXTS, "abstract")}, {}, r"a\.csv .*download\.column.*id, abstract"),
    "asked column that isn't there": ({"a.csv": csv(TEXTS)}, {"column": "x.y"}, r"no column x\.y\. .*column.*id, text"),
    "no column of a table": ({"a.parquet": parquet(title=["a"], url=["b"])}, {}, r"a\.parquet .*column.*title, url"),
    "field that isn't there": ({"a.jsonl": jsonl(TEXTS, "abstract")}, {}, r"no field 'text'.*'abstract'.*column"),
    "asked field that isn't there": ({"a.jsonl": jsonl(TEXTS)}, {"column": "x"}, r"no field 'x'.*'text'.*column"),
    "two candidate columns": ({"a.jsonl": BOTH}, {}, r"a\.jsonl .*body and content.*download\.column.*url"),
    "a column twice": ({"a.csv": b"text,text\n1,2\n"}, {}, r"a\.csv .*text"),
    "a column of a table twice": ({"a.parquet": TWICE}, {}, r"a\.parquet .*text"),
    "no such source column": ({"a.csv": csv(TEXTS)}, {"source_column": "lang"}, r"lang.*download\.source_column"),
    "no such source field": ({"a.jsonl": jsonl(TEXTS)}, {"source_column": "lang"}, r"lang.*download\.source_column"),
    "large text": ({"a.txt": b"line\n\n" * 200_000}, {}, r"a\.txt .*1\.2 MB.*400,000 lines, 200,000 .*documents_by"),
    "windows-1252": ({"a.txt": (LATIN * 9).encode("cp1252")}, {}, r"not UTF-8.*download\.encoding.*windows-1252"),
    "wrong encoding": ({"a.txt": "Größe\x81".encode("latin-1")}, {"encoding": "cp1252"}, r"a\.txt .*0x81.*encoding"),
    "json in latin-1": ({"a.json": '[\n{"text": "é"}]'.encode("latin-1")}, {}, r"a\.json .*download\.encoding"),
    "utf-16": ({"a.txt": ("Plain text. " * 99).encode("utf-16-le")}, {}, r"a\.txt .*download\.encoding to utf-16-le"),
    "jsonl in utf-16": ({"a.jsonl": jsonl(["one two"]).decode().encode("utf-16-le")}, {}, r"a\.jsonl .*utf-16-le"),
    "csv in utf-16": ({"a.csv": ("слово,число\nраз,два\n" * 9).encode("utf-16-be")}, {}, r"a\.csv .*utf-16-be"),
    "utf-16 that says no order": ({"a.txt": "Text. ".encode("utf-16-le")}, {"encoding": "utf-16"}, r"a\.txt.*encoding"),
    "html": ({"a.html": PAGE.encode()}, {}, r"1 \.html.*download\.extract"),
    "html named text": ({"a.txt": PAGE.encode()}, {}, r"a\.txt .*HTML"),
    "json named text": ({"a.txt": jsonl(TEXTS)}, {}, r"a\.txt is JSON.*\.jsonl"),
    "pointer": ({"a.parquet": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n"}, {}, "LFS.*git lfs pull"),
    "dump": ({"a.xml": b'<mediawiki xmlns="http://">'}, {"extract": "trafilatura"}, "MediaWiki.*WikiExtractor"),
    "pdf": ({"a.txt": b"%PDF-1.4\n"}, {}, "PDF.*pdftotext"),
    "docx": ({"a.zip": zip_of({"[Content_Types].xml": b"", "word/document.xml": b""})}, {}, "office"),
    "sqlite": ({"a.json": b"SQLite format 3\0"}, {}, "SQLite"),
    "pickle": ({"a.jsonl": b"\x80\x04\x95\x20"}, {}, "pickle"),
    "image": ({"a.txt": b"\x89PNG\r\n"}, {}, "image"),
    "other files": ({"a.pdf": b"%PDF-1", "b.py": b"", "c.py": b"", ".d": b"x"}, {}, r"2 \.py, 1 hidden, 1 \.pdf"),
    "nothing": ({}, {}, "nothing"),
    "json that is cut in a value": ({"a.json": JSON[:-15].encode()}, {}, r"a\.json is truncated"),
    "json that is cut between values": ({"a.json": JSON[:-2].encode()}, {}, r"a\.json is truncated"),
    "json without a colon": ({"a.json": JSON.replace('"text":', '"text"', 1).encode()}, {}, r"a\.json .*line 3"),
    "json with an end too much": ({"a.json": JSON.encode() + b"\n]"}, {}, r"a\.json .*not JSON"),
    "deep json": ({"a.json": b"[\n" + b"[" * 100_000}, {}, r"a\.json .*nested"),
    "an open quote": ({"a.csv": b'text,b\n1,2\n"open,3\n4,5\n'}, {}, r"a\.csv .*line 3"),
    "arrow stream that is cut": ({"a.arrow": arrow_of(ROWS)[:-8]}, {}, r"a\.arrow .*truncated"),
    "arrow file that is cut": ({"a.arrow": arrow_of(ROWS, pa.ipc.new_file)[:-8]}, {}, r"a\.arrow .*corrupt"),
    "wiki that is cut": ({"wiki_00": WIKI[:-9]}, {}, "wiki_00 is truncated"),
    "zip that is cut": ({"a.zip": zip_of(INNER)[:-30]}, {}, r"a\.zip is corrupt"),
    "zip with a changed byte": ({"a.zip": flipped(zip_of(INNER), 50)}, {}, "corrupt"),
    "tar that is cut between files": ({"a.tar": tar_of(INNER)[: 4 * 1024]}, {}, r"a\.tar is truncated"),
    "archive of nothing": ({"a.zip": zip_of({"a.exe": b"MZ"})}, {}, r"no document.*1 \.exe"),
    "lists in lines": (
        {"a.jsonl": b'{"title": "a", "comments": [{"text": "b"}]}\n' * 9}, {}, "'comments': .*'title'",
    ),
    "mail named text": (
        {"a.txt": b"From a@x.org Mon Jan  1 10:00:00 2024\nSubject: x\n\ntext\n"}, {}, r"a\.txt .*mail.*\.mbox",
    ),
    "message named text": ({"a.txt": b"Received: from x\nSubject: x\n\ntext\n"}, {}, r"a\.txt .*mail.*\.eml"),
    "message that was sent": (
        {"a.txt": b"From: a@x\nTo: b,\n\tc\nMIME-Version: 1.0\n\ntext\n"}, {}, r"a\.txt .*mail.*\.eml",
    ),
    "text named mail": ({"a.mbox": b"Once upon a time.\n"}, {}, r"a\.mbox .*header"),
    "subtitles named text": ({"a.txt": SRT}, {}, r"a\.txt .*subtitles.*\.srt"),
    "text named subtitles": ({"a.vtt": b"Once upon a time.\n"}, {}, r"a\.vtt .*times"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_read_is_refused_with_what_helps(store: Path, tmp_path: Path, name: str):
    files, settings, said = REFUSED[name]
    with pytest.raises(InputError, match=f"(?s){said}"):
        downloaded(write(tmp_path / "data", files), **settings)


FORMATS: dict[str, Callable[[bytes], bytes]] = {
    "zstd": zst,
    "gzip": gzip.compress,
    "bzip2": bz2.compress,
    "xz": COMPRESSIONS[".xz"],
    "Parquet": lambda data: parquet_of(ROWS),
    "JSON": bytes,
    "text": lambda data: b"text,source\n",
}
RIGHT = {  # the formats that a file of this suffix may have
    ".jsonl": ("JSON", "text"),
    ".jsonl.zst": ("zstd",),
    ".json.gz": ("gzip",),
    ".csv": ("text",),
    ".parquet": ("Parquet",),
    ".arrow": (),
}


def test_a_file_of_another_format_is_recognised_with_what_to_do():
    for suffix, right in RIGHT.items():
        for form in FORMATS.keys() - set(right):
            with pytest.raises(Damage, match=rf"^a{suffix} is mislabelled.*{form}"):
                read(FORMATS[form](json_lines(ODD)), f"a{suffix}", limit=10**6)
    with pytest.raises(InputError, match=r"a\.txt .*not a table"):
        list(records(Path("a.txt"), "a.txt"))


@pytest.mark.parametrize("line", ["[1, 2]", '["text"]', "[[", "{}", "text,source"])
def test_a_wrong_first_line_loses_no_more_than_itself(line: str):
    [first, second] = read(f"{line}\n".encode() + json_lines(["one"]), "a.jsonl")
    assert (type(first), second.text) == (Loss, "one")


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
LONG = "longer than 100 MB"
LOST: dict[str, tuple[bytes, list[tuple[int, str]]]] = {  # a file, and what it gives by its numbers
    "a.csv": (
        b'text,b\r\none\r\n1,2,3\r\n"q"x,2\r\n"two\r\nlines",4\r\n\xff,5\r\n\r\n"",7\r\nlast,6\r\n',
        [(2, "wrong number of fields"), (3, "wrong number of fields"), (4, "a quote within a quoted field"),
         (5, "two\r\nlines"), (7, "not UTF-8"), (9, "empty text"), (10, "last")],
    ),
    "a.json": (
        b'[\n{"text": ""},\n{"text": null}, 3, {"text": "four"}]',
        [(1, "empty text"), (2, "text is not a string but NoneType"), (3, "not a JSON object"), (4, "four")],
    ),
    "long.json": (json.dumps(["one", "x" * 3000, "two"]).encode(), [(1, "one"), (2, LONG), (3, "two")]),
    "long.jsonl": (jsonl(["one", "x" * 3000, "two"]), [(1, "one"), (2, LONG), (3, "two")]),
    "paragraphs.txt": (
        b"one\n\n" + b"x" * 3000 + b"\nmore\n\ntwo\n\n" + b"y" * 600 + b"\n" + b"z" * 600 + b"\n\nthree",
        [(1, "one"), (3, f"line {LONG}"), (6, "two"), (8, f"paragraph {LONG}"), (11, "three")],
    ),
    "bad byte.txt": (b"good line\nbad \xff byte", [(2, "not UTF-8")]),
    "blank.txt": (b" \n", [(0, "empty file")]),
    "long enough.txt": ("é".encode() * 500, [(1, "é" * 500)]),
    "too long.txt": ("é".encode() * 501, [(1, f"line {LONG}")]),
}  # fmt: skip


@pytest.mark.parametrize("name", LOST)
def test_what_is_not_text_or_too_long_is_lost_alone_with_its_number(name: str):
    data, expected = LOST[name]
    options = {"documents_by": "blank-line"} if name == "paragraphs.txt" else {}
    assert in_short(read(data, name, limit=1000, **options)) == expected


def test_a_csv_with_a_field_that_is_too_long_is_refused():
    with pytest.raises(Damage, match=rf"a\.csv has .*{LONG}"):
        read(csv(["one", "x" * 3000]), "a.csv", limit=1000)


def test_losses_are_listed_by_file_line_and_reason(store: Path, tmp_path: Path):
    lines: list[tuple[bytes, str]] = []
    for i, bad in enumerate(BAD_LINES):
        lines += [(b'{"text": "good %d"}' % i, ""), bad, (b"", "")]  # an empty line is no loss
    stored = b"\n".join(line for line, _ in lines)
    corpus = downloaded(write(tmp_path / "data", {"a.jsonl": stored, "b.jsonl": jsonl(["fine", None])}), max_lost=0.6)
    expected = [("a.jsonl", i, reason) for i, (_, reason) in enumerate(lines, 1) if reason]
    expected.append(("b.jsonl", 2, "text is not a string but NoneType"))
    found = losses_of(corpus)
    assert [(loss["file"], loss["line"], loss["reason"]) for loss in found] == expected
    assert found[0]["sample"] == BAD_LINES[0][0].decode()
    assert all(len(loss["sample"]) <= 200 for loss in found)
    reasons = [reason for _, _, reason in expected]
    assert corpus.stats["lost"] == {reason: reasons.count(reason) for reason in set(reasons)}
    assert texts_of(corpus) == [*(f"good {i}" for i in range(len(BAD_LINES))), "fine"]


def test_rows_with_strings_that_are_not_unicode_or_that_are_no_objects_are_lost(tmp_path: Path):
    found = rows_in(tmp_path, "a.jsonl", b'{"a": 1}\n[]\n{"a": "\\ud800"}\n{\n{"a": NaN}')
    assert [(type(row) is Loss, row[1] if type(row) is Loss else row[0]) for row in found] == [
        (False, 1), (True, 2), (True, 3), (True, 4), (False, 5),
    ]  # fmt: skip


def test_odd_values_of_other_fields_lose_no_document():
    values = ("NaN", "-Infinity", "-1" + "0" * 5000, '"half a pair \\ud800"', "[" * 500 + "]" * 500, "null")
    lines = "".join(f'{{"meta": {value}, "text": "good é", "source": "wiki"}}\n' for value in values)
    found = read(lines.encode(), "a.jsonl")
    assert [record[:3] for record in found] == [(f"a.jsonl:{i}", "wiki", "good é") for i in range(1, 7)]


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.binary(), pa.large_binary()])
def test_rows_of_parquet_without_a_text_are_lost_alone(kind: pa.DataType):
    texts = [b"good", b"\xff\xfe", None, "é".encode(), b"  ", "ä".encode() * 500, "ä".encode() * 501]
    column = pa.array(texts, pa.large_binary() if "large" in str(kind) else pa.binary()).view(kind)
    assert in_short(read(parquet_of(pa.table({"text": column})), "a.parquet", limit=1000)) == [
        (1, "good"),
        (2, "not UTF-8 in a table"),
        (3, "text is not a string but NoneType"),
        (4, "é"),
        (5, "empty text"),
        (6, "ä" * 500),
        (7, LONG),
    ]


def test_columns_of_any_kind_are_read():
    plain = pa.array(["one", "two", "one"])
    for column in (plain.dictionary_encode(), plain.cast(pa.string_view()), plain.cast(pa.large_string())):
        assert text_in(read(parquet_of(pa.table({"text": column})), "a.parquet")) == ["one", "two", "one"]
    numbers = read(parquet_of(pa.table({"text": [1, 2]})), "a.parquet")
    assert {loss.reason for loss in numbers} == {"text is not a string but int"}


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
    name = "train-00003-of-00010"
    stored = [{"text": "a", **record} for record, _ in SOURCES]
    sources = [source for _, source in SOURCES]
    assert [record.source for record in read(jsonl_of(stored), f"{name}.jsonl")] == sources
    for row, source in zip(stored[:-1], sources, strict=False):
        [record] = read(parquet_of([row]), f"{name}.parquet")
        assert record.source == source
    rows = [{"text": f"text {i}", "meta": {"pile_set_name": f"set {i % 2}"}} for i in range(300)]
    over_groups = read(parquet_of(pa.Table.from_pylist(rows), row_group_size=100), "a.parquet")
    assert [record.source for record in over_groups] == ["set 0", "set 1"] * 150


def test_sources_are_named_by_the_column_that_is_asked():
    rows = [{"text": t, "meta": {"lang": f"l{i % 3}", "pile_set_name": "x"}, "n": i % 2} for i, t in enumerate(TEXTS)]
    for name, stored in (("a.parquet", parquet_of(rows)), ("a.jsonl", jsonl_of(rows))):
        by_field = [record.source for record in read(stored, name, source_column="meta.lang")]
        assert by_field == [row["meta"]["lang"] for row in rows]
        assert [record.source for record in read(stored, name, source_column="n")] == [str(row["n"]) for row in rows]
    assert {record.source for record in read(jsonl(TEXTS, lang=None), "b.jsonl", source_column="lang")} == {"b"}


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


TSV = 'a\t0\n"Hello," he said.\t1\nHe said "no".\t2\nplain\t3\n"unbalanced\t4\n'
QUOTED = ['"Hello," he said.', 'He said "no".', "plain", '"unbalanced']
CSV: dict[str, tuple[str, list]] = {  # a file, and its rows
    "quotes that enclose no field.tsv": (TSV, [(i, {"a": text, "0": str(i - 1)}) for i, text in enumerate(QUOTED, 2)]),
    "delimiters in quoted names.csv": ('"a, b, c";"d, e"\n1;2\n', [(2, {"a, b, c": "1", "d, e": "2"})]),
    "a tab that Excel names.csv": ("sep=\t\nx,y\tz\n1\t2\n", [(3, {"x,y": "1", "z": "2"})]),
    "a header that begins so.csv": ("sep=a,b\n1,2\n", [(2, {"sep=a": "1", "b": "2"})]),
}


@pytest.mark.parametrize("name", CSV)
def test_the_delimiter_and_the_quotes_of_a_csv_file_are_found(tmp_path: Path, name: str):
    text, expected = CSV[name]
    assert rows_in(tmp_path, name, text.encode()) == expected


@pytest.mark.parametrize("line", ["sep=;", '"sep=;"', "\ufeffsep=;", "sep=;;"])
@pytest.mark.parametrize("end", ["\r\n", "\n", "\r"])
def test_the_line_in_which_excel_names_the_delimiter_is_no_row(tmp_path: Path, line: str, end: str):
    stored = end.join([line, "text;label,", "a, b;c", "d;,,,"]).encode()
    expected = [(3, {"text": "a, b", "label,": "c"}), (4, {"text": "d", "label,": ",,,"})]
    assert rows_in(tmp_path, "a.csv", stored) == expected


@pytest.mark.parametrize("encoding", ["windows-1252", "utf-16-le", "utf-16-be", "utf-8"])
def test_text_in_another_encoding_is_read_if_it_is_named(tmp_path: Path, encoding: str):
    found = rows_in(tmp_path, "a.csv", "a,b\ncafé,“x”\n".encode(encoding), encoding)
    assert found == [(2, {"a": "café", "b": "“x”"})]
    utf_8 = rows_in(tmp_path, "b.csv", "a,b\ncafé,1\n".encode(), "windows-1252")
    assert utf_8 == [(2, {"a": "café", "b": "1"})]


def test_values_of_any_characters_are_read_in_any_layout(tmp_path: Path):
    rng = random.Random(2)
    for _ in range(60):
        rows = [
            {"a": "".join(rng.choices('ab",;\t\\é\n1', k=rng.randrange(30))) + "x", "n": str(rng.randrange(10**9))}
            for _ in range(5)
        ]
        indent = rng.choice([None, 0, 3])
        end = rng.choice(["", "\n"])
        layouts = {
            "array.json": json.dumps(rows, indent=indent).encode(),
            "a.json": end.join(json.dumps(row, indent=indent) for row in rows).encode(),
            "a.csv": csv_of(rows, rng.choice(",;\t|")),
        }
        for name, stored in layouts.items():
            assert [row for _, row in rows_in(tmp_path, name, stored)] == rows, stored


def test_a_txt_file_is_one_document(store: Path, tmp_path: Path):
    files = {
        f"book-{i}.{'txt' if i else 'TXT'}": text.encode("utf-8-sig" if i else "utf-8") for i, text in enumerate(ODD)
    }
    corpus = downloaded(write(tmp_path / "data", files))
    assert {(d.source, d.text) for d in documents_of(corpus)} == {("book", text) for text in ODD}


def test_documents_of_a_text_file_are_what_was_asked(store: Path, tmp_path: Path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"\r\none\r\ntwo\r\n \r\nthree\r\n\xc2\xa0\r\n")
    for by, expected in (
        ("file", [("a.txt:1", "\r\none\r\ntwo\r\n \r\nthree\r\n\xa0\r\n")]),
        ("line", [("a.txt:2", "one"), ("a.txt:3", "two"), ("a.txt:5", "three")]),
        ("blank-line", [("a.txt:2", "one\ntwo"), ("a.txt:5", "three")]),
    ):
        corpus = downloaded(path, documents_by=by)
        assert [(d.id, d.text) for d in documents_of(corpus)] == expected
        assert corpus.stats["formats"] == {"text": {by: len(expected)}}
    assert texts.is_blank("\u3000\n".encode())
    assert not texts.is_blank(b"\xff \n"), "it is lost, which is counted"
    path.write_bytes(b"x" * (texts.LARGE + 1))
    assert len(texts_of(downloaded(path, documents_by="file"))) == 1
    path.write_bytes(b"first\n" + b"one\rtwo\x0cthree\n\r\n" * (texts.LARGE // 10))
    with pytest.raises(InputError, match="200,001 lines, 100,000 of them blank"):  # as `wc -l` counts them
        downloaded(path)


def test_pages_are_read_by_the_extractor_that_is_asked_and_named_in_the_key(store: Path, tmp_path: Path):
    trafilatura = pytest.importorskip("trafilatura")
    page = PAGE.format(PARAGRAPHS)
    write(tmp_path, {"a.html": page.encode(), "b.xml": b"<r><t>Ein Text</t> mit <b>Ende</b></r>"})
    corpus = downloaded(tmp_path, extract="trafilatura")
    text, xml = texts_of(corpus)
    assert text == trafilatura.extract(page)
    assert all(line in text for line in LINES[1:])
    assert "menu" not in text
    assert xml == "Ein Text\nmit\nEnde"
    assert corpus.manifest["params"]["extract"] == f"trafilatura {trafilatura.__version__}"


def test_options_at_their_defaults_are_not_in_the_key(store: Path, tmp_path: Path):
    path = write(tmp_path / "data", {"a.jsonl": jsonl(TEXTS)})
    usual = downloaded(path)
    assert not {"column", "source_column", "documents_by", "encoding", "extract"} & set(usual.manifest["params"])
    assert downloaded(path, column="").key == usual.key != downloaded(path, column="text").key
    assert "blank_lines" not in downloaded(path, documents_by="line").manifest["params"]
    assert "blank_lines" in downloaded(path, documents_by="blank-line").manifest["params"]
    for settings in ({"encoding": "utf-99"}, {"encoding": "base64"}, {"source": "pile", "files": [], "column": "x"}):
        with pytest.raises(ValueError, match=list(settings)[-1]):
            downloaded(*([] if "source" in settings else [path]), **settings)


def test_an_option_that_no_file_needs_is_said_to_have_no_effect(store: Path, tmp_path: Path, caplog):
    path = write(tmp_path / "data", {"a.jsonl": jsonl(TEXTS)})
    for expected in (True, False):
        caplog.clear()
        downloaded(path, documents_by="line")
        assert ("download.documents_by had no effect" in caplog.text) == expected
        (path / "b.txt").write_text("text")


def test_files_that_are_skipped_are_counted_by_kind_in_folders_and_in_archives(store: Path, tmp_path: Path, caplog):
    inside = {
        "a.jsonl": jsonl(TEXTS),
        "__MACOSX/._a.jsonl": b"\0",
        "in.zip": zip_of({}),
        "b.html": b"<html>",
        "x.exe": b"",
    }
    beside = {"README.md": b"About", "LICENSE": b"MIT", "b.py": b"", ".git/c.txt": b"x", "a.tar": tar_of(inside)}
    corpus = downloaded(write(tmp_path / "data", {**beside, "blob": b"\0\1\2\3" * 99}))
    assert texts_of(corpus) == TEXTS
    assert corpus.stats["skipped"] == {
        "about the data": 2, "hidden": 2, ".py": 1, "no text": 1, "archive in an archive": 1, ".html": 1, ".exe": 1,
    }  # fmt: skip
    assert "1 archive in an archive" in caplog.text
    assert corpus.stats["formats"] == {"JSON": {"text": len(TEXTS)}}
    [document, *_] = documents_of(corpus)
    assert (document.id, document.source) == ("a.tar/a.jsonl:1", "a")


@pytest.mark.parametrize(
    ("name", "data"),
    [(".hidden.txt", b"text"), ("README.md", b"text"), ("notes.log", b"text"), ("data.bak", jsonl(["text"]))],
)
def test_a_file_is_read_whatever_its_name_is_if_it_is_given_itself(store, tmp_path: Path, name: str, data: bytes):
    write(tmp_path, {name: data})
    assert texts_of(downloaded(tmp_path / name)) == ["text"]


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("blob.bin", b"\0\1\2\3" * 99, "kind"),
        ("page.html", PAGE.encode(), "download.extract"),
        ("a.ass", b"[Script Info]\nTitle: x\n", "subtitles.*ffmpeg"),
        ("a.pst", b"!BDN\0\0", "Outlook.*readpst"),
        ("sent.emlx", b"1234\nFrom: a@x\nMessage-ID: <1>\n\ntext\n", "mail of Apple"),
        ("a.emlx", b"1234\nReceived: from x\nSubject: x\n\ntext\n", r"mail of Apple.*\.mbox"),
    ],
)
def test_a_file_that_is_given_itself_is_refused_if_cram_reads_no_such_kind(store, tmp_path, name, data, said):
    write(tmp_path, {name: data})
    with pytest.raises(InputError, match=f"{name} .*{said}"):
        downloaded(tmp_path / name)


def test_json_of_many_lines_is_refused_above_its_limit(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = write(tmp_path, {"a.json": json.dumps([{"text": t} for t in TEXTS], indent=1).encode()}) / "a.json"
    monkeypatch.setattr(rows, "MOST_JSON", 1000)
    with pytest.raises(InputError, match=r"a\.json .*jsonl"):
        downloaded(path)
    monkeypatch.setattr(rows, "MOST_JSON", len(path.read_text()))
    survey.survey_of.cache_clear()  # as nobody changes the limit of a running program
    assert texts_of(downloaded(path)) == TEXTS
