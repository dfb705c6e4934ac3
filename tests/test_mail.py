"""Mail and subtitles: what is read of them, in files, compressions and archives."""

import gzip
import mailbox
from email.message import EmailMessage
from pathlib import Path

import pytest
from conftest import asked_for, documents_of, downloaded, refusal, texts_of
from files_table import tar_of

from tasks.corpus.mail import body_of, messages, speech_in

BODY = "Liebe Anna,\n\nFrom the harbour I write to you: die Größe {} ist da.\n\nFrom here on, nothing.\n\nGruß"
PICTURE = bytes(range(256)) * 20


def mail(text: str, subtype: str = "plain", **settings: str) -> EmailMessage:
    made = EmailMessage()
    for name, value in {"From": "a@x.org", "Subject": "Größe", "Message-ID": "<1@x.org>"}.items():
        made[name] = value
    made.set_content(text, subtype=subtype, **settings)
    return made


def mails(count: int = 12) -> list[EmailMessage]:
    """Messages in several encodings, some with attachments, some with their text as a page too."""
    made = []
    for i in range(count):
        one = mail(
            BODY.format(i), charset=("utf-8", "iso-8859-1")[i % 2], cte=("base64", "quoted-printable")[i // 2 % 2]
        )
        if i % 3 == 0:
            one.add_alternative(f"<p>{BODY.format(i)}</p>", subtype="html")
        if i % 4 == 0:
            one.add_attachment(PICTURE, maintype="image", subtype="png", filename="a.png")
            one.add_attachment("a list of words", subtype="plain", filename="words.txt")
        made.append(one)
    return made


def mbox(path: Path, made: list[EmailMessage]) -> Path:
    box = mailbox.mbox(path)
    for each in made:
        box.add(each)
    box.close()
    return path


TEXTS = [BODY.format(i) for i in range(12)]


def test_each_message_of_a_mailbox_is_a_document_without_headers_and_attachments(store: Path, tmp_path: Path):
    made = downloaded(mbox(tmp_path / "a.mbox", mails()))
    assert texts_of(made) == TEXTS
    assert made.stats["formats"] == {"mail": {"message": 12}}
    assert made.stats["lost"] == {}
    lines = (tmp_path / "a.mbox").read_text(encoding="utf-8").splitlines()
    ids = [f"a.mbox:{i}" for i, line in enumerate(lines, 1) if line.startswith("From ")]
    assert [document.id for document in documents_of(made)] == ids


def test_the_messages_of_a_mailbox_are_those_that_python_finds(tmp_path: Path):
    path = mbox(tmp_path / "a.mbox", mails())
    with path.open("rb") as file:
        found = [data for _, data in messages(file)]
    box = mailbox.mbox(path)
    expected = [box.get_bytes(key).replace(b"\n>From ", b"\nFrom ") for key in range(len(box))]
    assert [data.strip() for data in found] == [data.strip() for data in expected]


def test_mail_is_read_by_its_content_compressed_and_in_archives(store: Path, tmp_path: Path):
    one, box = bytes(mail(TEXTS[0])), mbox(tmp_path / "a", mails()).read_bytes()
    assert texts_of(downloaded(tmp_path / "a")) == TEXTS
    maildir = tmp_path / "maildir"
    maildir.mkdir()
    for received in (b"Return-Path: <a@x.org>\n", b""):
        (maildir / "1700000000.M1P2.host,S=123:2,S").write_bytes(received + one)
        assert texts_of(downloaded(maildir)) == TEXTS[:1]
    (tmp_path / "b.mbox.gz").write_bytes(gzip.compress(box))
    assert texts_of(downloaded(tmp_path / "b.mbox.gz")) == TEXTS
    (tmp_path / "c.tar").write_bytes(tar_of({"x/a.eml": one, "b.mbox": box, "empty.mbox": b""}))
    assert texts_of(downloaded(tmp_path / "c.tar")) == [TEXTS[0], *TEXTS]


def test_mail_and_archives_of_it_have_keys_of_their_own_and_other_files_keep_theirs(store: Path, tmp_path: Path):
    for name, form in {"a.mbox": "mail", "b.srt": "subtitles", "c.zip": "zip", "d.txt": "", "e.jsonl": ""}.items():
        (tmp_path / name).write_text("{}", encoding="utf-8")
        [file] = asked_for(tmp_path / name).identity()["sources"]["files"]["files"]
        assert file[2:] == ([form] if form else [])


def test_mail_in_html_needs_an_extractor(store: Path, tmp_path: Path):
    path = tmp_path / "a.eml"
    path.write_bytes(bytes(mail("<p>Only <b>a page</b></p>", "html")))
    assert "download.extract" in refusal(path)
    pytest.importorskip("trafilatura")
    assert texts_of(downloaded(path, extract="trafilatura")) == ["Only a page"]


def test_text_that_names_a_wrong_encoding_is_read_in_utf_8_or_the_one_that_is_asked(store: Path, tmp_path: Path):
    head = b"From: a@x.org\nContent-Type: text/plain; charset=us-ascii\n\n"
    assert body_of(head + "Größe".encode(), "") == ("text/plain", "Größe")
    assert body_of(head.replace(b"us-ascii", b"x-none") + "Größe".encode(), "") == ("text/plain", "Größe")
    (tmp_path / "a.eml").write_bytes(head + "Größe".encode("cp1252"))
    assert "download.encoding" in refusal(tmp_path / "a.eml")
    assert texts_of(downloaded(tmp_path / "a.eml", encoding="cp1252")) == ["Größe"]


def test_a_message_without_text_is_counted_and_no_loss(store: Path, tmp_path: Path):
    empty = mail("")
    empty.add_attachment(PICTURE, maintype="image", subtype="png", filename="a.png")
    made = downloaded(mbox(tmp_path / "a.mbox", [*mails(2), empty]))
    assert texts_of(made) == TEXTS[:2]
    assert (made.stats["lost"], made.stats["skipped"]) == ({}, {"mail without text": 1})


SRT = "\ufeff1\r\n00:00:01,000 --> 00:00:04,000\r\n<i>Hello</i> there,\r\nfriend.\r\n\r\n"
SRT += "2\r\n00:00:05,000 --> 00:00:06,000\r\n"
SRT += "{\\an8}It is 1984 &amp; cold.\r\n\r\nAfter a gap.\r\n\r\n3\r\n00:00:07,000 --> 00:00:08,000\r\n42\r\n"
VTT = "WEBVTT - A title\nKind: captions\n\nNOTE a note\nof two lines\n\nSTYLE\n::cue { color: red }\n\nintro\n"
VTT += "00:01.000 --> 00:04.000 align:start\n<v Bob>Hello\n\nNOTE\nmore\n\n1:00:04.000 --> 1:00:05.000\nHello\n"
VTT += "world <00:00:04.500><c.red>today</c>\n"
SPOKEN = {SRT: "Hello there,\nfriend.\nIt is 1984 & cold.\nAfter a gap.\n42", VTT: "Hello\nworld today"}


def test_subtitles_are_what_is_said_in_them(store: Path, tmp_path: Path):
    for (text, expected), name in zip(SPOKEN.items(), ("a.srt", "b.vtt"), strict=True):
        (tmp_path / name).write_bytes(text.encode())
        assert speech_in(text.removeprefix("\ufeff")) == expected
        made = downloaded(tmp_path / name)
        assert texts_of(made) == [expected]
        assert made.stats["formats"] == {"subtitles": {"file": 1}}
    assert texts_of(downloaded(tmp_path / "?.*t")) == list(SPOKEN.values())
    (tmp_path / "a.srt").write_bytes(SRT.replace("\r\n", "\r").encode())
    assert texts_of(downloaded(tmp_path / "a.srt")) == [SPOKEN[SRT]]
