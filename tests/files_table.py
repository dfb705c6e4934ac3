"""One table of files for every door through which rows are read: the row reader, `download` and a task's own data.

FILES has the same ROWS in every format, layout and line end, with the numbers that the rows have there.
"""

import bz2
import csv
import gzip
import io
import json
import lzma
import mailbox
import random
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from email.message import EmailMessage
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import zstandard

Rows = list[dict[str, str]]


def write(folder: Path, files: dict[str, bytes]) -> Path:
    """A folder with these files, by their paths in it."""
    folder.mkdir(exist_ok=True)
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


TEXTS = [
    'Plain, with a comma;\ta tab | and "quotes".',
    "Two\nFrom lines, then\n\nFrom a third.",
    "تحتوي هذه الصفحة على مقدمة.",
    "第一章 入门指南",
    "Grüße aus Köln \N{GRINNING FACE}",
    *(f"Document {i} of the toy corpus." for i in range(20)),
]
ROWS = [{"text": text, "of": f"set {i % 3}", "note": ("", '"2"', "é")[i % 3]} for i, text in enumerate(TEXTS)]


class File(NamedTuple):
    """The bytes of a file; the number of each row: of its first line in JSON lines and CSV, else its place, from 1."""

    data: bytes
    numbers: list[int]


def csv_of(rows: Rows, delimiter: str = ",", end: str = "\r\n") -> bytes:
    file = io.StringIO(newline="")
    quoting = csv.QUOTE_ALL if end == "\r" else csv.QUOTE_MINIMAL  # the writer leaves line feeds without quotes there
    writer = csv.writer(file, delimiter=delimiter, lineterminator=end, quoting=quoting)
    writer.writerow(rows[0])
    writer.writerows(row.values() for row in rows)
    return file.getvalue().encode()


def lines_of_csv(rows: Rows) -> list[int]:
    """The number of each row's first line, below a header."""
    numbers = []
    line = 2
    for row in rows:
        numbers.append(line)
        line += 1 + sum(value.count("\n") for value in row.values())
    return numbers


def jsonl_of(rows: Rows, between: str = "\n") -> bytes:
    return between.join(json.dumps(row) for row in rows).encode() + between.encode()


def json_lines(texts: list, field: str = "text") -> bytes:
    """Lines as those of the Pile."""
    return jsonl_of([{field: text, "meta": {"pile_set_name": "toy"}} for text in texts])


def noise(documents: int = 3000, seed: int = 3) -> list[str]:
    """Texts that compress little, so that a shard has many chunks."""
    rng = random.Random(seed)
    return [f"{i} {rng.randbytes(100).hex()}" for i in range(documents)]


def parquet_of(table: pa.Table | Rows, **settings) -> bytes:
    file = io.BytesIO()
    pq.write_table(table if isinstance(table, pa.Table) else pa.Table.from_pylist(table), file, **settings)
    return file.getvalue()


def arrow_of(table: pa.Table | Rows, opened: Callable = pa.ipc.new_stream, size: int = 2) -> bytes:
    """`opened`: pa.ipc.new_stream or new_file; `size`: rows of a batch."""
    file = io.BytesIO()
    stored = table if isinstance(table, pa.Table) else pa.Table.from_pylist(table)
    with opened(file, stored.schema) as writer:
        writer.write_table(stored, max_chunksize=size)
    return file.getvalue()


def feather_of(rows: Rows) -> bytes:
    file = io.BytesIO()
    pyarrow.feather.write_feather(pa.Table.from_pylist(rows), file)
    return file.getvalue()


def files_of(rows: Rows) -> dict[str, File]:
    """Files by name, each with these rows."""
    numbers = list(range(1, len(rows) + 1))
    lines = lines_of_csv(rows)
    unquoted = jsonl_of(rows).decode()
    wrapped = {"version": "1", "tags": ["x"], "data": rows}
    return {
        "a.csv": File(csv_of(rows), lines),
        "semicolons.csv": File(csv_of(rows, ";"), lines),
        "bars.csv": File(csv_of(rows, "|"), lines),
        "tabs.csv": File(csv_of(rows, "\t"), lines),
        "a.tsv": File(csv_of(rows, "\t"), lines),
        "unix.csv": File(csv_of(rows, end="\n"), lines),
        "old mac.csv": File(csv_of(rows, end="\r"), lines),
        "mark.csv": File(b"\xef\xbb\xbf" + csv_of(rows), lines),
        "utf-16.csv": File(csv_of(rows).decode().encode("utf-16"), lines),
        "blank.csv": File(b"\r\n" + csv_of(rows).replace(b"\n", b"\n\r\n", 1), [line + 2 for line in lines]),
        "a.jsonl": File(jsonl_of(rows), numbers),
        "mark.jsonl": File(b"\xef\xbb\xbf" + jsonl_of(rows), numbers),
        "windows.jsonl": File(jsonl_of(rows, "\r\n"), numbers),
        "without an end.jsonl": File(jsonl_of(rows).rstrip(b"\n"), numbers),
        "blank.ndjson": File(jsonl_of(rows, "\n\n"), [2 * number - 1 for number in numbers]),
        "old mac.jsonl": File(jsonl_of(rows, "\r"), numbers),
        "array.json": File(json.dumps(rows).encode(), numbers),
        "array of lines.json": File(f"[\n{unquoted.strip()}\n]\n".replace("}\n{", "},\n{").encode(), numbers),
        "indented.json": File(json.dumps(rows, indent=2).encode(), numbers),
        "objects.json": File("\n".join(json.dumps(row, indent=2) for row in rows).encode(), numbers),
        "in one line.json": File(unquoted.replace("\n", "").encode(), numbers),
        "wrapped.json": File(json.dumps(wrapped).encode(), numbers),
        "wrapped and indented.json": File(json.dumps({"version": "1", "data": rows}, indent=1).encode(), numbers),
        "utf-16.json": File(json.dumps(rows, ensure_ascii=False).encode("utf-16"), numbers),
        "a.parquet": File(parquet_of(rows), numbers),
        "a.feather": File(feather_of(rows), numbers),
        "stream.arrow": File(arrow_of(rows), numbers),
        "file.arrow": File(arrow_of(rows, pa.ipc.new_file), numbers),
    }


FILES = files_of(ROWS)


def lz4(data: bytes) -> bytes:
    return pa.compress(data, codec="lz4", asbytes=True)


def gz(data: bytes) -> bytes:
    return gzip.compress(data, mtime=0)


def zst(data: bytes) -> bytes:
    return zstandard.ZstdCompressor(write_checksum=True).compress(data)


COMPRESSIONS = {".gz": gz, ".bz2": bz2.compress, ".xz": lzma.compress, ".zst": zst, ".lz4": lz4}


def packed(data: bytes, name: str) -> bytes:
    """Compressed as the end of a name says, or as it is."""
    suffix = name[name.rfind(".") :]
    return COMPRESSIONS[suffix](data) if suffix in COMPRESSIONS else data


def zip_of(files: dict[str, bytes]) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return file.getvalue()


def tar_of(files: dict[str, bytes], mode: str = "w") -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode=mode) as archive:
        for name, data in files.items():
            about = tarfile.TarInfo(name)
            about.size = len(data)
            archive.addfile(about, io.BytesIO(data))
    return file.getvalue()


PICTURE = bytes(range(256)) * 20


def mail_of(text: str, subtype: str = "plain", **settings: str) -> EmailMessage:
    message = EmailMessage()
    for name, value in {"From": "a@x.org", "Subject": "Größe", "Message-ID": "<1@x.org>"}.items():
        message[name] = value
    message.set_content(text, subtype=subtype, **settings)
    return message


def mails_of(texts: list[str]) -> list[EmailMessage]:
    """Messages in several encodings, some with attachments, some with their text as a page too."""
    messages = []
    for i, text in enumerate(texts):
        charset = "iso-8859-1" if i % 2 and max(text) <= "\xff" else "utf-8"
        message = mail_of(text, charset=charset, cte=("base64", "quoted-printable")[i // 2 % 2])
        if i % 3 == 0:
            message.add_alternative(f"<p>{text}</p>", subtype="html")
        if i % 4 == 0:
            message.add_attachment(PICTURE, maintype="image", subtype="png", filename="a.png")
            message.add_attachment("a list of words", subtype="plain", filename="words.txt")
        messages.append(message)
    return messages


def mbox_of(messages: list[EmailMessage]) -> bytes:
    with tempfile.NamedTemporaryFile() as file:
        box = mailbox.mbox(file.name)
        for message in messages:
            box.add(message)
        box.close()
        return Path(file.name).read_bytes()
