"""Mail and subtitles: what is read of them; mail in every packing is in the table of test_formats."""

from pathlib import Path

import pytest
from conftest import asked_for, documents_of, downloaded, refusal, texts_of
from files_table import PICTURE, TEXTS, mail_of, mails_of, mbox_of

from tasks.corpus.mail import body_of, speech_in


def test_the_place_of_a_message_is_the_line_of_its_envelope(store: Path, tmp_path: Path):
    (tmp_path / "a.mbox").write_bytes(mbox_of(mails_of(TEXTS)))
    lines = (tmp_path / "a.mbox").read_text(encoding="utf-8").splitlines()
    ids = [f"a.mbox:{i}" for i, line in enumerate(lines, 1) if line.startswith("From ")]
    made = downloaded(tmp_path / "a.mbox")
    assert [document.id for document in documents_of(made)] == ids
    assert made.stats["formats"] == {"mail": {"message": len(TEXTS)}}


def test_mail_and_archives_of_it_have_keys_of_their_own_and_other_files_keep_theirs(store: Path, tmp_path: Path):
    for name, form in {"a.mbox": "mail", "b.srt": "subtitles", "c.zip": "zip", "d.txt": "", "e.jsonl": ""}.items():
        (tmp_path / name).write_text("{}", encoding="utf-8")
        [file] = asked_for(tmp_path / name).identity()["sources"]["files"]["files"]
        assert file[2:] == ([form] if form else [])


def test_mail_in_html_needs_an_extractor(store: Path, tmp_path: Path):
    path = tmp_path / "a.eml"
    path.write_bytes(bytes(mail_of("<p>Only <b>a page</b></p>", "html")))
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


def test_half_a_surrogate_pair_in_a_message_doesn_t_end_the_run(store: Path, tmp_path: Path):
    broken = b"From: a\nContent-Type: text/plain; charset=utf-7\n\nHi +2AE- %s there.\n"
    (tmp_path / "a.mbox").write_bytes(mbox_of([broken % b"", broken % b"\xe9", *mails_of(TEXTS[:1])]))
    made = downloaded(tmp_path / "a.mbox", max_lost=0.5)
    assert texts_of(made) == ["Hi +2AE-  there.", TEXTS[0]], "as if it named no encoding"
    assert made.stats["lost"] == {"not UTF-8": 1}


def test_a_message_without_text_is_counted_and_no_loss(store: Path, tmp_path: Path):
    empty = mail_of("")
    empty.add_attachment(PICTURE, maintype="image", subtype="png", filename="a.png")
    (tmp_path / "a.mbox").write_bytes(mbox_of([*mails_of(TEXTS[:2]), empty]))
    made = downloaded(tmp_path / "a.mbox")
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
