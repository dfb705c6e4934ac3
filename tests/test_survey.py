"""What of local files can't be read: found before a run, skipped up to a share, and named all at once above it."""

import base64
import io
import json
import random
import zipfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import asked_for, downloaded, refusal, texts_of, write_jsonl

from flows.cram import checked_plan
from model.errors import InputError, warn_once
from tasks.corpus import rows, survey, texts
from tasks.corpus.texts import no_prose


@pytest.fixture
def letters(tmp_path: Path) -> Path:
    """A folder of eighty letters."""
    warn_once.cache_clear()
    folder = tmp_path / "letters"
    folder.mkdir()
    for i in range(80):
        (folder / f"{i:02d}.txt").write_text(f"Letter {i} of the harbour.", encoding="utf-8")
    return folder


def large(folder: Path, name: str = "large.txt") -> None:
    (folder / name).write_bytes(b"A line of a novel.\n" * (texts.LARGE // 19 + 1))


FLAWS = {
    "empty file": lambda folder: (folder / "empty.txt").touch(),
    "no regular file": lambda folder: (folder / "link.txt").symlink_to("/gone"),
}


@pytest.mark.parametrize(("reason", "pattern"), [("empty file", ""), ("no regular file", "/*.txt")])
def test_one_file_without_text_is_skipped_and_listed(store, letters: Path, caplog, reason: str, pattern: str):
    FLAWS[reason](letters)
    made = downloaded(f"{letters}{pattern}")
    assert len(texts_of(made)) == 80
    assert made.stats["lost"] == {reason: 1}
    [lost] = map(json.loads, (made.path / "lost.jsonl").read_text(encoding="utf-8").splitlines())
    assert lost["reason"] == reason
    assert f"1 {reason}" in caplog.text


def test_files_that_cannot_be_read_are_skipped_up_to_the_share_that_is_allowed(store: Path, letters: Path):
    large(letters)
    assert "large.txt has 1.0 MB" in refusal(letters)
    made = downloaded(letters, max_lost=0.02)
    assert len(texts_of(made)) == 80
    [lost] = map(json.loads, (made.path / "lost.jsonl").read_text(encoding="utf-8").splitlines())
    assert (lost["file"], lost["reason"]) == ("large.txt", "unreadable file")
    assert "documents_by" in lost["sample"]


def flawed(letters: Path) -> list[str]:
    """Files of the folder that can't be read, each for another reason."""
    for reason in FLAWS:
        FLAWS[reason](letters)
    large(letters)
    (letters / "report.txt").write_bytes(b"%PDF-1.4\n")
    (letters / "rows.csv").write_text("a,b\n1,2\n", encoding="utf-8")
    (letters / "cut.txt.zst").write_bytes(b"\x28\xb5\x2f\xfd")
    return ["empty.txt", "link.txt", "large.txt", "report.txt", "rows.csv", "cut.txt.zst"]


def test_all_flaws_are_named_at_once_by_a_plan_and_by_a_run(store: Path, letters: Path):
    names = flawed(letters)
    override = {"download": {"source": "files", "files": [str(letters)], "megabytes": 0}}
    with pytest.raises(InputError) as by_plan:
        checked_plan("demo", override, "download", {}, [])
    with pytest.raises(InputError) as by_run:
        downloaded(letters)
    assert str(by_plan.value) == str(by_run.value)
    assert "6 of 86 files" in str(by_run.value)
    assert all(name in str(by_run.value) for name in names)
    assert len(texts_of(downloaded(letters, max_lost=0.07))) == 80


def test_a_plan_says_that_all_there_is_is_empty(store: Path, tmp_path: Path):
    (tmp_path / "a.txt").write_bytes(b"")
    with pytest.raises(InputError, match=r"no document .*1 x empty file; for example a\.txt\)"):
        asked_for(tmp_path / "a.txt").check()


def test_a_file_that_was_given_itself_is_never_skipped(store: Path, letters: Path):
    large(letters)
    assert "large.txt has 1.0 MB" in refusal(letters, letters / "large.txt", max_lost=0.5)


def test_with_a_limit_only_the_files_that_are_reached_count(store: Path, letters: Path):
    large(letters, "50.txt")
    asked_for(letters, documents=50).check()
    assert len(texts_of(downloaded(letters, documents=50))) == 50
    with pytest.raises(InputError, match=r"50\.txt has 1\.0 MB"):
        downloaded(letters, documents=60)
    assert len(texts_of(downloaded(letters, documents=60, max_lost=0.02))) == 60


def test_a_plan_finds_that_too_many_records_are_lost_as_far_as_the_beginnings_tell(tmp_path: Path, monkeypatch):
    path = write_jsonl(tmp_path / "a.jsonl", ["good", None, "good", ""])
    with pytest.raises(InputError, match=r"(?s)2 of 4 .*max_lost.*line 2: .*line 4: "):
        asked_for(path).check()
    asked_for(path, max_lost=0.5).check()
    (tmp_path / "b.jsonl").write_text('{"abstract": "a"}\n' * 9, encoding="utf-8")
    with pytest.raises(InputError, match=r"no document.*download\.column"):
        asked_for(tmp_path / "b.jsonl").check()
    asked_for(path, documents=1).check()  # then it may not come to them
    monkeypatch.setattr(survey, "LOOKED_AT", 0)
    survey.survey_of.cache_clear()
    asked_for(path).check()  # what follows may be good


def test_an_archive_with_flaws_is_read_without_them(store: Path, tmp_path: Path):
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        for i in range(200):  # of which the limit allows two
            archive.writestr(f"{i:03d}.txt", f"Letter {i} of the harbour.")
        for name, text in {"empty.txt": "", "large.txt": "line\n" * 250_000, "page.txt": "<html>"}.items():
            archive.writestr(name, text)
    made = downloaded(tmp_path / "a.zip")
    assert len(texts_of(made)) == 200
    assert made.stats["lost"] == {"unreadable file": 2}
    assert made.stats["skipped"] == {"empty file": 1}


def test_what_is_no_prose_is_refused_unless_it_is_asked_for(store: Path, tmp_path: Path, caplog):
    rng = random.Random(1)
    numbers = "\n".join(",".join(f"{rng.gauss(0, 3):.4f}" for _ in range(8)) for _ in range(60))
    dump = base64.encodebytes(rng.randbytes(3000)).decode()
    hexadecimal = "\n".join(rng.randbytes(32).hex() for _ in range(60))
    for text in (numbers, dump, hexadecimal):
        (tmp_path / "a.txt").write_text(text, encoding="utf-8")
        assert "expected prose" in refusal(tmp_path / "a.txt")
        survey.survey_of.cache_clear()
        (tmp_path / "b.txt").write_text(text, encoding="utf-8")
    assert texts_of(downloaded(tmp_path / "b.txt", documents_by="file")) == [hexadecimal]
    assert "base64 or hexadecimal" in caplog.text


def test_a_log_is_warned_of(store: Path, tmp_path: Path, caplog):
    lines = [f"2024-01-01 12:00:{i:02d},123 INFO The harbour was reached." for i in range(30)]
    (tmp_path / "a.log").write_text("\n".join(lines), encoding="utf-8")
    assert len(texts_of(downloaded(tmp_path / "a.log"))) == 1
    assert "a date and a time in front of its lines" in caplog.text
    assert "a.log" in caplog.text


PROSE = {
    "Chinese": "第一章 入门指南。这本书讲的是港口和旧灯。" * 40,
    "Thai": "สวัสดีครับผมชื่อจอห์นและผมอยู่ที่ท่าเรือ" * 40,
    "Hindi": "यह पुस्तक बंदरगाह और पुराने दीपक के बारे में है। " * 40,
    "Arabic": "هذا الكتاب عن الميناء والمصباح القديم. " * 40,
    "a poem": "The sea, the sea,\n\nand nothing else\n" * 40,
    "code": "for (int i = 0; i < 10; i++) { total += prices[i] * 3; }\n" * 20,
    "a table": "| harbour | ships | tons |\n|---|---|---|\n| Hamburg | 12 | 340 |\n" * 20,
    "telephone numbers": "Hans Müller +49 30 1234567\nEva Li +49 40 7654321\n" * 20,
    "a calendar": "1.12.2024 Arzt\n24.12.2024 Ferien\n" * 30,
    "a genome": "ACGTACGTTAGCTAGCTAGCATCGATCGATCGATCGACTAGCATCGACTAGCATCAGC\n" * 30,
    "long words": "Donaudampfschifffahrtselektrizitätenhauptbetriebswerkbauunterbeamtengesellschaft\n" * 20,
    "Braille": "⠠⠓⠑⠇⠇⠕ ⠺⠕⠗⠇⠙ " * 60,
    "addresses": "See [it](https://play.example.org/#eNp9kUFLwzAUx7/KI5dtMFtBT6M) at the harbour.\n" * 20,
    "a chess game": "1. e4 e5 2. Nf3 Nc6 3. Bb5 a6 4. Ba4 Nf6 5. O-O Be7 6. Re1 b5 7. Bb3 d6\n" * 20,
}


@pytest.mark.parametrize("name", PROSE)
def test_text_of_any_kind_is_taken_for_prose(name: str):
    assert no_prose(PROSE[name].encode()) == ""


@pytest.mark.parametrize("documents_by", ["", "line", "blank-line"])
def test_a_line_that_is_too_long_is_to_be_broken_whatever_was_set(
    store, tmp_path: Path, monkeypatch, documents_by: str
):
    monkeypatch.setattr(rows, "MOST_BYTES", 2_000_000)
    (tmp_path / "a.txt").write_bytes(b"x" * 3_000_000)
    said = refusal(tmp_path / "a.txt", documents_by=documents_by)
    assert "fold " in said
    assert "blank-line" not in said
    assert ("documents_by" in said) == (documents_by == ""), "it was set, and that didn't help"


def without_text(path: Path, number: int, **fields: object) -> Path:
    path.write_text((json.dumps({"contents": "some words", **fields}) + "\n") * number, encoding="utf-8")
    return path


@pytest.mark.parametrize(("settings", "named"), [({}, "content, "), ({"column": "doc.body"}, "doc.body")])
def test_a_large_json_file_without_the_text_is_refused_before_it_is_read(store: Path, tmp_path: Path, settings, named):
    path = without_text(tmp_path / "large.jsonl", survey.FIRST + 1, doc={"id": 1})
    for limited in (0, 5):
        said = refusal(path, documents=limited, **settings)
        assert named in said
        assert "download.column" in said
        assert "Its columns: contents, doc" in said
    lost = [line for file in store.rglob("lost.jsonl") for line in file.read_text().splitlines()]
    assert len(lost) <= 2, "the file, and not its records"


def test_a_json_file_that_begins_without_text_is_read(store: Path, tmp_path: Path):
    path = without_text(tmp_path / "a.jsonl", survey.FIRST - 1)
    with path.open("a") as file:
        file.write('{"text": "one"}\n')
    assert texts_of(downloaded(path, max_lost=1)) == ["one"]


def test_many_records_without_a_document_are_refused_before_the_rest_is_read(store: Path, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(survey, "LOOKED_AT", survey.LOSS * survey.FIRST)
    path = without_text(tmp_path / "a.jsonl", survey.FIRST + 10, text=5)
    with pytest.raises(InputError, match="text is not a string"):
        asked_for(path).check()


@pytest.mark.parametrize("limited", [0, 5])
def test_a_source_column_that_json_lacks_is_refused_with_a_limit_too(store: Path, tmp_path: Path, limited, monkeypatch):
    monkeypatch.setattr(survey, "LOOKED_AT", 0)
    path = without_text(tmp_path / "a.jsonl", 50, topic="law")
    said = refusal(path, documents=limited, column="contents", source_column="topik")
    assert "topik" in said
    assert "Its columns: contents, topic" in said
    made = downloaded(path, documents=limited, column="contents", source_column="topic")
    assert list(made.stats["by_source"]) == ["law"]


def test_columns_have_no_effect_on_text_files(store: Path, tmp_path: Path, caplog):
    (tmp_path / "a.txt").write_text("Some words.", encoding="utf-8")
    downloaded(tmp_path / "a.txt", column="body", source_column="topic")
    assert "download.column had no effect" in caplog.text
    assert "download.source_column had no effect" in caplog.text


def test_bytes_in_a_table_that_are_not_utf_8_bring_no_advice_that_a_table_does_not_take(store, tmp_path: Path, caplog):
    table = pa.table({"text": pa.array([b"caf\xe9"] * 3, pa.binary()).view(pa.string())})
    pq.write_table(table, tmp_path / "a.parquet")
    assert "Set download.encoding" not in refusal(tmp_path / "a.parquet")
    pq.write_table(
        table.append_column("source", table["text"]).set_column(0, "text", [["a"] * 3]), tmp_path / "b.parquet"
    )
    said = refusal(tmp_path / "b.parquet")
    assert "b.parquet" in said
    assert "encoding" not in said
    pq.write_table(pa.table({"text": ["good"]}), tmp_path / "c.parquet")
    downloaded(tmp_path / "c.parquet", encoding="cp1252")
    assert "download.encoding had no effect" in caplog.text


def test_the_books_of_table_formats_are_no_text(store: Path, tmp_path: Path):
    folder = tmp_path / "table"
    folder.mkdir()
    pq.write_table(pa.table({"text": ["good"]}), folder / "part-0.parquet")
    for name in (
        "_delta_log/00000000000000000000.json", "_spark_metadata/0", "_committed_123", "metadata/v1.metadata.json",
        "_delta_log/00000000000000000010.checkpoint.parquet",
    ):  # fmt: skip
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text('{"commitInfo": {"timestamp": 1}}\n', encoding="utf-8")
    made = downloaded(folder)
    assert texts_of(made) == ["good"]
    assert (made.stats["lost"], made.stats["skipped"]) == ({}, {"about the data": 5})


def test_an_encrypted_archive_is_named_itself(store: Path, tmp_path: Path):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("letter.txt", "text")
    data = bytearray(file.getvalue())
    data[6] |= 1  # the flag, in the header of the file and in the directory at the end
    data[data.index(b"PK\x01\x02") + 8] |= 1
    (tmp_path / "letters.zip").write_bytes(data)
    assert refusal(tmp_path / "letters.zip").startswith("letters.zip is encrypted: letter.txt")
