"""Mail and subtitles: what people wrote or said in them, without headers, attachments and times."""

import html
import io
import re
from collections.abc import Iterator
from email import message_from_bytes
from email.message import Message
from typing import Any, NamedTuple

from model.errors import InputError
from tasks.corpus import rows
from tasks.corpus.losses import NOT_UTF8, NOTHING, TOO_LONG, Loss, Skipped, Unreadable
from tasks.corpus.rows import SURROGATE, Row, Rows, lines_of
from tasks.corpus.texts import whole_file

# What divides the messages of a mailbox: a sender and a date after a blank line. Prose may begin a line with "From".
ENVELOPE = re.compile(rb"From [^\r\n]*\d:\d\d[^\r\n]*\b(19|20)\d\d\b")
QUOTED = re.compile(rb"^>(>*From )")  # how a mailbox writes a line of text that begins so
HEADER = re.compile(rb"[!-9;-~]+:|From ")  # of a message
BODIES = ("text/plain", "text/html")  # types of a message's text, the best first
TIME = r"(?:\d+:)?\d{1,2}:\d\d[.,]\d{1,3}"
CUE = re.compile(rf"(?:^\d+[ \t]*\n)?^[ \t]*{TIME}[ \t]*-->[ \t]*{TIME}[^\n]*\n?", re.MULTILINE)  # with its number
NOTICE = re.compile(r"(WEBVTT|NOTE|STYLE|REGION)\b")  # blocks of WebVTT that aren't speech
TAG = re.compile(r"</?[a-zA-Z][^>\n]*>|<[\d:.]+>|\{\\[^}\n]*\}")  # styles, voices and times within a cue


def messages(file: io.BufferedReader) -> Iterator[tuple[int, bytes]]:
    """Each message of a mailbox, or the one that the file is, with the number of its first line.

    Of one of more than MOST_BYTES, a beginning that is longer too.
    """
    if not ENVELOPE.match(file.peek()):
        yield 1, file.read(rows.MOST_BYTES + 1)
        return
    message: list[bytes] = []
    start = 1
    size = 0
    after_blank = True
    for number, line in lines_of(file):
        if after_blank and ENVELOPE.match(line):
            if message:
                yield start, b"".join(message)
            message = []
            start = number
            size = 0
        elif size <= rows.MOST_BYTES:
            message.append(QUOTED.sub(rb"\1", line))
            size += len(line)
        after_blank = not line.strip()
    yield start, b"".join(message)


def message_rows(file: io.BufferedReader, name: str, encoding: str, extract: str) -> Iterator[Row | Loss | Skipped]:
    """The text of each message, without headers and attachments. Raises InputError if the file holds no message.

    `encoding`: as in `body_of`; `extract`: the package that takes the text out of HTML, if one may.
    """
    head = file.peek()
    if head and not HEADER.match(head):  # an empty mailbox has no messages
        raise InputError(f"{name} is not mail: it doesn't begin with a header such as `From: …`. Rename it.")
    for line, data in messages(file):
        try:
            text = text_of_message(data, encoding, extract)
        except Unreadable as reason:
            yield Loss(name, line, str(reason), repr(data[:40]))
        else:
            yield Row(line, text) if text else Skipped("mail without text")


def text_of_message(data: bytes, encoding: str, extract: str) -> str:
    """The text of a message; empty if it has none. Raises Unreadable."""
    if len(data) > rows.MOST_BYTES:
        raise Unreadable(f"message {TOO_LONG}")
    kind, text = body_of(data, encoding)
    if kind == "text/html":
        if not extract:
            raise Unreadable("mail in HTML only")
        text = text_of_page(text)
    return text


def text_of_page(page: str) -> str:
    """The text of a mail in HTML, which has no menus around an article."""
    import trafilatura

    whole = page if "<html" in page.lower() else f"<html><body>{page}</body></html>"
    return trafilatura.extract(whole) or trafilatura.html2txt(whole)


class Body(NamedTuple):
    """The type of a message's text, one of BODIES, and the text; two empty strings if it has none."""

    kind: str
    text: str


def body_of(data: bytes, encoding: str) -> Body:
    """The text of a message.

    `encoding`: of text that isn't UTF-8 and names none, or a wrong one. Raises Unreadable if it can't be decoded.
    """
    try:
        message = message_from_bytes(data)
        for kind in BODIES:
            pieces = [decode(part, encoding).replace("\r\n", "\n").strip("\n") for part in parts_of(message, kind)]
            text = "\n\n".join(piece for piece in pieces if piece.strip())
            if text:
                return Body(kind, text)
    except RecursionError:
        raise Unreadable("nested too deeply") from None
    return Body("", "")


def parts_of(message: Message, kind: str) -> Iterator[Message]:
    """The parts of a message of this type, in order, without attachments."""
    content: Any = message.get_payload()
    if message.get_content_disposition() == "attachment":
        return
    if isinstance(content, list):
        for part in content:
            yield from parts_of(part, kind)
    elif message.get_content_type() == kind:
        yield message


def decode(part: Message, encoding: str) -> str:
    """The text of a part, in the encoding that it names, in UTF-8 or in `encoding`. Raises Unreadable if in none."""
    data: Any = part.get_payload(decode=True)
    for name in filter(None, (part.get_content_charset(), "utf-8", encoding)):
        try:
            text = str(data, name)
        except (LookupError, ValueError):  # no such encoding; it isn't in this one
            continue
        if not SURROGATE.search(text):  # with which UTF-7 may be broken
            return text
    raise Unreadable(NOT_UTF8)


def subtitle_rows(file: io.BufferedReader, name: str) -> Rows:
    """What is said in a file of subtitles, as one text. Raises InputError if it has no times."""
    row = whole_file(file.read(rows.MOST_BYTES + 1), name)
    if isinstance(row, Loss):
        yield row
        return
    text = str(row.record)
    if not CUE.search("\n".join(text.splitlines())):
        raise InputError(
            f"{name} has the suffix of subtitles, but no line has times such as 00:01,0 --> 00:02,5. Rename it."
        )
    speech = speech_in(text)
    yield Row(1, speech) if speech else Loss(name, 0, NOTHING)


def speech_in(text: str) -> str:
    """The lines of subtitles (SRT, WebVTT) without numbers, times, styles and notes; empty if there are none.

    A line that repeats the one before it, as in captions that scroll, is left out.
    """
    lines: list[str] = []
    is_begun = False
    for block in re.split(r"\n[ \t]*\n", "\n".join(text.splitlines())):
        _, *cues = CUE.split(block)
        is_begun = is_begun or bool(cues)
        if is_begun and not cues and not NOTICE.match(block.lstrip()):  # a blank line within a cue
            cues = [block]
        for line in "\n".join(cues).splitlines():
            words = html.unescape(TAG.sub("", line)).strip()
            if words and lines[-1:] != [words]:
                lines.append(words)
    return "\n".join(lines)
