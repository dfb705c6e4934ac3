"""What a file is, by its name and by its first bytes; and the kinds that cram doesn't read."""

import codecs
import re
from pathlib import Path

from model import InputError

COMPRESSIONS = {".zst": "zstd", ".gz": "gzip", ".bz2": "bzip2", ".xz": "xz", ".lz4": "lz4"}
SHORT = {".tgz": ".tar.gz", ".tbz2": ".tar.bz2", ".txz": ".tar.xz"}
LINES = (".jsonl", ".ndjson")
TABLES = {".parquet": "Parquet", ".arrow": "Arrow", ".feather": "Arrow"}
ROWS = {**dict.fromkeys((*LINES, ".json"), "JSON"), ".csv": "CSV", ".tsv": "CSV", **TABLES}
TEXT = dict.fromkeys((".txt", ".text", ".md", ".rst", ".tex"), "text")
MARKUP = {".html": "HTML", ".htm": "HTML", ".xhtml": "HTML", ".xml": "XML"}  # read with download.extract only
ARCHIVES = {".zip": "zip", ".tar": "tar"}
FORMATS = ROWS | TEXT | MARKUP | ARCHIVES  # by suffix, in small letters
KINDS = "text, JSON, CSV, Parquet, Arrow, HTML, or a zip or tar of these, compressed or not"

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
TEXTUAL = [
    (rb"(\xef\xbb\xbf)?\s*(\{\s*[\"}]|\[\s*[{\"])", "JSON"),
    (rb"(\xef\xbb\xbf)?\s*<(?i:!doctype html|html)\b", "HTML"),
    (rb"(\xef\xbb\xbf)?\s*<\?xml\b", "XML"),
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
    (rb"\x89PNG|\xff\xd8\xff|GIF8[79]a|RIFF.{4}[A-Z]|OggS\0|ID3[\2-\4]", "an image, a sound or a film", "Delete it."),
    (rb"\s*(<\?xml[^>]*>\s*)?<mediawiki\b", "a dump of MediaWiki", "Make text of it with WikiExtractor."),
]
# The end of a stem that numbers a shard; on the hub, a digest may follow
SHARD = re.compile(r"[-_. ]?\d+([-_. ]?of[-_. ]?\d+(-[0-9a-f]{16})?)?$")
SUFFIX = re.compile(r"\.[a-z_-]{1,12}\d?|\.7z")  # that tells a kind, other than the number of a shard
HIDDEN = re.compile(r"(^|/)(\.|__MACOSX/)")
ABOUT = re.compile(
    r"(readme|licen[cs]e|notice|citation|changelog)(\.(md|rst|cff))?|_[a-z]+|(state|dataset_(dict|infos?))\.json", re.I
)


class Damage(InputError):
    """A shard is not what it should be. Nothing of it is used, and a rerun must not rely on what was read of it."""


def layers(name: str) -> tuple[str, list[str]]:
    """A file's name without the suffixes of compressions, and these compressions, the outermost first."""
    forms, suffix = [], Path(name).suffix
    name = name.removesuffix(suffix) + SHORT.get(suffix.lower(), suffix)
    while form := COMPRESSIONS.get((suffix := Path(name).suffix).lower()):
        forms.append(form)
        name = name.removesuffix(suffix)
    return name, forms


def ending(name: str) -> str:
    """The suffix that tells the format of a file, in small letters, without those of compressions."""
    return Path(layers(name)[0]).suffix.lower()


def family(name: str) -> str:
    """A file's name without suffix and shard number, for example `train` for `train-00003-of-00010.jsonl.zst`."""
    whole = Path(name).name
    stem = layers(whole)[0]
    stem = stem[: -len(end)] if (end := ending(whole)) in FORMATS else stem
    return SHARD.sub("", stem) or stem or whole


def unread(path: str, extract: str) -> str:
    """The kind of a file in a folder or archive that isn't read, by its path there; empty if it may be read."""
    name = path.rsplit("/", 1)[-1]
    end = ending(name)
    if HIDDEN.search(path):
        return "hidden"
    if ABOUT.fullmatch(name) or (name.startswith("cache-") and end == ".arrow"):  # of map(), beside the data
        return "about the data"
    return end if (end not in FORMATS and SUFFIX.fullmatch(end)) or (end in MARKUP and not extract) else ""


def utf_16(head: bytes) -> str:
    """The kind of UTF-16 that the NUL bytes at the beginning of a file without a mark tell; empty if it is none."""
    odd, even = head[1::2].count(0), head[::2].count(0)
    if odd + even <= max(4, len(head) / 50) or (odd and even):
        return ""
    encoding = "utf-16-le" if odd else "utf-16-be"
    text = head.decode(encoding, errors="ignore")
    return encoding if sum(c.isprintable() or c.isspace() for c in text) > len(text) * 0.9 else ""


def sniffed(head: bytes) -> str:
    """The format of a file by its beginning alone, of BINARY or TEXTUAL, or text; empty if it is none."""
    for pattern, form in BINARY + TEXTUAL:
        if re.match(pattern, head, re.DOTALL):
            return form
    if head.startswith(tuple(MARKS)) or utf_16(head):
        return "text"
    return "text" if head and len(head.translate(None, TEXT_BYTES)) <= len(head) / 50 else ""


def refuse_foreign(head: bytes, name: str) -> None:
    """Raise InputError, with what to do, if a file begins as one of a kind that cram doesn't read."""
    for pattern, what, advice in FOREIGN:
        if re.match(pattern, head, re.DOTALL):
            raise InputError(f"{name} is {what}. {advice}")


def form_of(head: bytes, name: str, extract: str = "") -> str:
    """The format of a file by its suffix, or else by its beginning. Raises InputError if cram doesn't read it."""
    refuse_foreign(head, name)
    form = FORMATS.get(ending(name)) or sniffed(head)
    if form in MARKUP.values() and not extract:
        raise InputError(f"{name} is {form}. Set download.extract to trafilatura to take the text out of it.")
    if form not in FORMATS.values():
        raise InputError(f"{name} is of a kind that cram doesn't read. Expected {KINDS}.")
    return form


def expect(head: bytes, name: str, expected: str) -> None:
    """Raise Damage if a file does not begin as the format that its name tells."""
    found, binary = sniffed(head), {form for _, form in BINARY}
    if expected in binary and not head:
        raise Damage(f"{name} is truncated: it is empty. Get it again.")
    clash = {found, expected} & binary or found == "HTML" or (found, expected) == ("JSON", "CSV")
    if found != expected and clash:
        found = found or "something else"
        raise Damage(f"{name} is mislabelled: it looks like {found}, but its name says {expected}. Rename it.")
