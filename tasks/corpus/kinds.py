"""What a file is, by its name and by its first bytes; and the kinds that cram doesn't read."""

import codecs
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from model.errors import InputError

COMPRESSIONS = {".zst": "zstd", ".gz": "gzip", ".bz2": "bzip2", ".xz": "xz", ".lz4": "lz4"}
SHORT = {".tgz": ".tar.gz", ".tbz2": ".tar.bz2", ".txz": ".tar.xz"}
LINES = (".jsonl", ".ndjson")
TABLES = {".parquet": "Parquet", ".arrow": "Arrow", ".feather": "Arrow"}
ROWS = {**dict.fromkeys((*LINES, ".json"), "JSON"), ".csv": "CSV", ".tsv": "CSV", **TABLES}
TEXT = dict.fromkeys((".txt", ".text", ".md", ".rst", ".tex"), "text")
MARKUP = {".html": "HTML", ".htm": "HTML", ".xhtml": "HTML", ".xml": "XML"}  # read with download.extract only
ARCHIVES = {".zip": "zip", ".tar": "tar"}
MAIL = {".mbox": "mail", ".eml": "mail"}
SUBTITLES = {".srt": "subtitles", ".vtt": "subtitles"}
FORMATS = ROWS | TEXT | MARKUP | ARCHIVES | MAIL | SUBTITLES  # by suffix, in small letters
NO_TEXT = {*TABLES.values(), *ARCHIVES.values(), *MAIL.values()}  # they have no one encoding
KINDS = "text, JSON, CSV, Parquet, Arrow, HTML, mail, subtitles, or a zip or tar of these, compressed or not"

# How mail begins: with a header that little else has, or with others before such a one
HEADERS = (
    rb"(?i:return-path|received|delivered-to|message-id|mime-version|x-original-to|x-gm-\w+|x-mozilla-\w+):"
    rb" [^\r\n]+\r?\n([\w-]+:|[ \t])"
    rb"|(?:[\w-]+:[^\r\n]*\r?\n(?:[ \t][^\r\n]*\r?\n)*){1,40}?(?i:message-id|mime-version): "
)
BINARY = [  # the first bytes of formats
    (rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18", "zstd"),
    (rb"\x1f\x8b", "gzip"),
    (rb"PAR1", "Parquet"),
    (rb"ARROW1|\xff{4}.{4}\x10\0\0\0", "Arrow"),
    (rb"BZh[1-9](1AY&SY|\x17rE8P\x90)", "bzip2"),
    (rb"\xfd7zXZ\0", "xz"),
    (rb"PK(\x03\x04|\x05\x06)", "zip"),
    (rb"\x04\x22\x4d\x18", "lz4"),
    (rb".{257}ustar", "tar"),
]
BINARY_FORMS = {form for _, form in BINARY}
TEXTUAL = [
    (rb"(\xef\xbb\xbf)?\s*(\{\s*[\"}]|\[\s*[{\"])", "JSON"),
    (rb"(\xef\xbb\xbf)?\s*<(?i:!doctype html|html)\b", "HTML"),
    (rb"(\xef\xbb\xbf)?\s*<\?xml\b", "XML"),
    (rb"From [^\r\n]*\d:\d\d[^\r\n]*\b(19|20)\d\d\b[^\r\n]*\r?\n>?[\w-]+[: ]", "mail"),
    (HEADERS, "mail"),
    (rb"(\xef\xbb\xbf)?WEBVTT\b|(\xef\xbb\xbf)?\s*\d+\s*[\r\n](\d+:)?\d\d:\d\d[,.]\d+\s*-->", "subtitles"),
]
MARKS = {
    codecs.BOM_UTF8: "utf-8",
    codecs.BOM_UTF32_LE: "utf-32-le",
    codecs.BOM_UTF16_LE: "utf-16-le",
    codecs.BOM_UTF16_BE: "utf-16-be",
}
TEXT_BYTES = bytes([*range(7, 14), 27, *range(32, 256)])
CONVERT = "Save its text as .txt, .csv or .jsonl."
FOREIGN = [  # the beginning of a file, what it is, what to do
    (rb"version https://git-lfs", "a Git LFS pointer and not the file itself", "Get the file: git lfs pull."),
    (rb"%PDF-", "a PDF", "Convert it: pdftotext FILE.pdf."),
    (rb"PK\x03\x04.{26}(\[Content_Types\]|_rels/|mimetype)", "a document of an office program or an e-book", CONVERT),
    (rb"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1|\{\\rtf", "a document of an office program", CONVERT),
    (rb"SQLite format 3\0", "an SQLite database", "Export it: sqlite3 -header -csv FILE 'SELECT …' > FILE.csv."),
    (rb"\x80[\x02-\x05][\x8a\x95c(}\]]", "a pickle", f"A pickle can run code, so cram opens none. {CONVERT}"),
    (rb"\x93NUMPY|\x89HDF|Obj\x01", "a file of arrays or records (NumPy, HDF5, Avro)", CONVERT),
    (
        rb"\x89PNG|\xff\xd8\xff|GIF8[79]a|RIFF.{4}[A-Z]|OggS\0|ID3[\2-\4]",
        "an image, a sound or a film",
        "Delete it, or leave it out.",
    ),
    (rb"!BDN", "a mailbox of Outlook", "Export it: readpst FILE.pst."),
    (rb"\d+ *\r?\n(" + HEADERS + rb")", "a mail of Apple Mail", "Export it as .mbox."),
    (
        rb"(\xef\xbb\xbf)?(\[Script Info\]|\{\d+\}\{\d+\}|\d+:\d\d:\d\d\.\d+,\d+:\d\d:\d\d\.\d+\r?\n)",
        "subtitles in another form than .srt and .vtt",
        "Convert them: ffmpeg -i FILE FILE.srt.",
    ),
    (rb"\s*(<\?xml[^>]*>\s*)?<mediawiki\b", "a dump of MediaWiki", "Turn it into text with WikiExtractor."),
]
# The end of a stem that numbers a shard; on the hub, a digest may follow
SHARD = re.compile(r"[-_. ]?\d+([-_. ]?of[-_. ]?\d+(-[0-9a-f]{16})?)?$")
SUFFIX = re.compile(r"\.[a-z_-]{1,12}\d?|\.7z")  # that names a kind; the number of a shard doesn't
HIDDEN = re.compile(r"(^|/)(\.|__MACOSX/)")
ABOUT = re.compile(
    r"(readme|licen[cs]e|notice|citation|changelog)(\.(md|rst|cff))?"
    r"|_[a-z_]+(_\d+)?|(state|dataset_(dict|infos?))\.json"
    r"|(v\d+|\d+-[0-9a-f-]+)\.metadata\.json",  # the last of Iceberg
    re.I,
)
# Folders in which Delta Lake and Spark keep records about a table
BOOKS = re.compile(r"(^|/)_(delta_log|delta_index|change_data|spark_metadata|temporary)/")


class Damage(InputError):
    """A shard is not what it should be. None of it is used, and a rerun must not rely on what was read of it."""


class Mislabelled(Damage):
    """A file is of another format than its name says."""


class Layers(NamedTuple):
    """A file's name without the suffixes of compressions, and these compressions, the outermost first."""

    name: str
    compressions: list[str]


def layers(name: str) -> Layers:
    """What the suffixes of a file's name say."""
    last = Path(name).suffix
    name = name.removesuffix(last) + SHORT.get(last.lower(), last)
    compressions: list[str] = []
    while True:
        suffix = Path(name).suffix
        form = COMPRESSIONS.get(suffix.lower())
        if not form:
            return Layers(name, compressions)
        compressions.append(form)
        name = name.removesuffix(suffix)


def ending(name: str) -> str:
    """The suffix that names the format of a file, in small letters, without those of compressions."""
    return Path(layers(name).name).suffix.lower()


def family(name: str) -> str:
    """A file's name without suffix and shard number, for example `train` for `train-00003-of-00010.jsonl.zst`."""
    whole = Path(name).name
    stem = layers(whole).name
    suffix = ending(whole)
    if suffix in FORMATS:
        stem = stem[: -len(suffix)]
    return SHARD.sub("", stem) or stem or whole


def reason_to_skip(path: str, extract: str) -> str:
    """The kind of a file in a folder or archive that isn't read, by its path there; empty if it may be read."""
    name = path.rsplit("/", 1)[-1]
    suffix = ending(name)
    if HIDDEN.search(path):
        return "hidden"
    is_cache = name.startswith("cache-") and suffix == ".arrow"  # of map(), beside the data
    if ABOUT.fullmatch(name) or BOOKS.search(path) or is_cache:
        return "about the data"
    if suffix in MARKUP:
        return "" if extract else suffix
    is_other = suffix not in FORMATS and SUFFIX.fullmatch(suffix)
    return suffix if is_other else ""


def unmarked_utf_16(head: bytes) -> str:
    """The kind of UTF-16 that the NUL bytes at the start of a file without a mark show; empty if it isn't UTF-16."""
    odd = head[1::2].count(0)
    even = head[::2].count(0)
    if odd + even <= max(4, len(head) / 50) or (odd and even):
        return ""
    encoding = "utf-16-le" if odd else "utf-16-be"
    text = head.decode(encoding, errors="ignore")
    readable = sum(c.isprintable() or c.isspace() for c in text)
    return encoding if readable > len(text) * 0.9 else ""


def sniff(head: bytes) -> str:
    """The format of a file by its beginning alone, of BINARY or TEXTUAL, or text; empty if it isn't known."""
    for pattern, form in BINARY + TEXTUAL:
        if re.match(pattern, head, re.DOTALL):
            return form
    if head.startswith(tuple(MARKS)) or unmarked_utf_16(head):
        return "text"
    others = len(head.translate(None, TEXT_BYTES))
    return "text" if head and others <= len(head) / 50 else ""


def refuse_foreign(head: bytes, name: str) -> None:
    """Raise InputError, with what to do, if a file begins as one of a kind that cram doesn't read."""
    for pattern, what, advice in FOREIGN:
        if re.match(pattern, head, re.DOTALL):
            raise InputError(f"{name} is {what}. {advice}")


def counted_kinds(kinds: Iterable[str]) -> str:
    """Kinds of files with their counts, the most frequent first."""
    return ", ".join(f"{n:,} {kind}" for kind, n in Counter(kinds).most_common()) or "nothing"


def form_of(head: bytes, name: str, extract: str = "") -> str:
    """The format of a file by its suffix, or else by its beginning. Raises InputError if cram doesn't read it."""
    refuse_foreign(head, name)
    form = FORMATS.get(ending(name)) or sniff(head)
    if form in MARKUP.values() and not extract:
        raise InputError(f"{name} is {form}. Set download.extract to trafilatura to take the text out of it.")
    if form not in FORMATS.values():
        raise InputError(f"{name} is a kind of file that cram doesn't read. Expected {KINDS}.")
    return form


def expect(head: bytes, name: str, expected: str) -> None:
    """Raise Damage if a file does not begin as files of the format in its name do."""
    if expected in BINARY_FORMS and not head:
        raise Damage(f"{name} is truncated: it is empty. Get it again.")
    found = sniff(head)
    if found == expected or not is_clash(found, expected):
        return
    suffixes = " or ".join(suffix for suffix, form in (FORMATS | COMPRESSIONS).items() if form == found)
    advice = f"Rename it, with {suffixes} at its end" if suffixes else "Rename it"
    looks = found or "something else"
    raise Mislabelled(f"{name} is mislabelled: it looks like {looks}, but its name says {expected}. {advice}.")


def is_clash(found: str, expected: str) -> bool:
    """Whether a file that looks like one format can't be of another one.

    Text may look like other formats, and JSON may look like text.
    """
    if found in BINARY_FORMS or expected in BINARY_FORMS or found == "HTML":
        return True
    if expected == "text":
        return found in MAIL.values() or found in SUBTITLES.values()
    return (found, expected) == ("JSON", "CSV")
