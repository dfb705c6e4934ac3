"""`cram init`: what the recipe file says of text and labels in many forms, and that `cram run` takes it."""

import json
import random
import tomllib
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest
from conftest import check_golden, document, sentence
from files_table import write, zip_of
from typer.testing import CliRunner

from flows.cli.main import app
from flows.recipes.files import read_recipe_file
from flows.recipes.recipe import resolve
from model.errors import InputError
from tasks.corpus import overview
from tasks.corpus.overview import look_at_dataset, look_at_files
from tasks.glue.overview import look_at_labels
from tasks.text.writing import writing_of

ROWS = 200
RNG = random.Random(3)
TEXTS = [document(RNG, 3) for _ in range(ROWS)]
SENTENCES = [sentence(RNG) for _ in range(ROWS)]
GERMAN = [f"Das Gerät Nummer {i} lässt sich für größere Räume nicht öffnen." for i in range(ROWS)]
CYRILLIC = [f"Это письмо номер {i} о старом мосте через реку." for i in range(ROWS)]
CLASSES = [("billing", "login", "speed")[i % 3] for i in range(ROWS)]
MEASURES = [round(0.37 * i % 10, 2) for i in range(ROWS)]


def csv(columns: dict[str, list], separator: str = ",", encoding: str = "utf-8") -> bytes:
    return pd.DataFrame(columns).to_csv(index=False, sep=separator).encode(encoding)


def lines(columns: dict[str, list]) -> bytes:
    return pd.DataFrame(columns).to_json(orient="records", lines=True, force_ascii=False).encode()


def conll(separator: str = " ") -> bytes:
    """Sentences with a tag for each token."""
    sentences = []
    for text in SENTENCES:
        tokens = [f"{word}{separator}{'B-PER' if word[0].isupper() else 'O'}" for word in text.split()]
        sentences.append("\n".join(tokens))
    return "\n\n".join(sentences).encode()


def cram_init(*arguments: str | Path, code: int = 0) -> str:
    """What the command prints."""
    result = CliRunner().invoke(app, ["init", *map(str, arguments)])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result.output


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def made_of(folder: Path, files: dict[str, bytes], *arguments: str) -> dict:
    """The recipe file for these files."""
    write(folder, files)
    cram_init(*arguments)
    return tomllib.loads((folder / "my.toml").read_text(encoding="utf-8"))


def letters(texts: list[str], encoding: str = "utf-8") -> dict[str, bytes]:
    return {f"letters/{i}.txt": text.encode(encoding) for i, text in enumerate(texts)}


PARAGRAPHS = "\n\n".join(f"{text}\n{text.lower()}" for text in TEXTS).encode()
WRAPPED = "\n".join("and so on to the end of the line" for _ in range(ROWS)).encode()
PAGE = "<html><body><article><p>{}</p></article></body></html>"
TEXT_FILES: dict[str, tuple[dict[str, bytes], str, dict]] = {
    "a folder of texts": (letters(TEXTS), "letters", {}),
    "texts in German": (letters(GERMAN), "letters", {"characters": "unicode"}),
    "texts in windows-1252": (letters(GERMAN, "windows-1252"), "letters", {"encoding": "windows-1252"}),
    "texts in UTF-16": (letters(GERMAN, "utf-16-le"), "letters", {"encoding": "utf-16-le"}),
    "two scripts": ({"a.jsonl": lines({"text": TEXTS + CYRILLIC})}, "a.jsonl", {"characters": "unicode"}),
    "a line for each document": ({"a.txt": "\n".join(TEXTS).encode()}, "a.txt", {"documents_by": "line"}),
    "blank lines between": ({"a.txt": PARAGRAPHS}, "a.txt", {"documents_by": "blank-line"}),
    "lines that are parts of sentences": ({"a.txt": WRAPPED}, "a.txt", {}),
    "an unusual column": ({"a.csv": csv({"id": CLASSES, "letter": TEXTS})}, "a.csv", {"column": "letter"}),
    "a column in another": ({"a.jsonl": lines({"doc": [{"t": t} for t in TEXTS]})}, "a.jsonl", {"column": "doc.t"}),
    "two usual columns": ({"a.csv": csv({"body": TEXTS, "content": CLASSES})}, "a.csv", {"column": "body"}),
    "a usual column": ({"a.jsonl": lines({"id": CLASSES, "Body": TEXTS})}, "a.jsonl", {}),
    "an archive": ({"a.zip": zip_of({f"{i}.txt": text.encode() for i, text in enumerate(TEXTS)})}, "a.zip", {}),
    "pages": (
        {f"p/{i}.html": PAGE.format(t).encode() for i, t in enumerate(TEXTS[:3])},
        "p",
        {"extract": "trafilatura"},
    ),
}


@pytest.mark.parametrize("name", TEXT_FILES)
def test_text_is_read_as_its_files_need_it(folder: Path, name: str):
    if name == "pages":
        pytest.importorskip("trafilatura")
    files, path, expected = TEXT_FILES[name]
    made = made_of(folder, files, path)
    characters = expected.get("characters", "unicode" if "encoding" in expected else "ascii")
    assert made["vocabulary"]["characters"] == characters
    settings = {field: value for field, value in expected.items() if field != "characters"}
    assert made["download"] == {"source": "files", "files": [path], **settings}
    assert made["until"] == "pretrain"
    assert "finetune" not in made


LABELLED: dict[str, tuple[str, bytes, dict]] = {
    "classes": ("t.csv", csv({"body": TEXTS, "topic": CLASSES}), {"text": "body", "label": "topic"}),
    "the usual name of a label comes first": (
        "t.csv",
        csv({"genre": CLASSES[1:] + CLASSES[:1], "text": TEXTS, "label": [i % 2 for i in range(ROWS)]}),
        {"text": "text", "label": "label"},
    ),
    "no numbers of rows, dates and names": (
        "t.jsonl",
        lines({"no": list(range(ROWS)), "day": ["2024-01-05", "2024-02-07"] * 100, "q": TEXTS, "what": CLASSES}),
        {"text": "q", "label": "what"},
    ),
    "Excel's CSV in German": (
        "t.csv",
        csv({"Nachricht": GERMAN, "Thema": CLASSES}, ";", "windows-1252"),
        {"text": "Nachricht", "label": "Thema", "encoding": "windows-1252"},
    ),
    "true and false": (
        "t.jsonl",
        lines({"question": SENTENCES, "passage": TEXTS, "answer": [i % 2 == 0 for i in range(ROWS)]}),
        {"text": "question", "pair": "passage", "label": "answer"},
    ),
    "many classes": (
        "t.csv",
        csv({"text": TEXTS, "code": [f"C{i % 60}" for i in range(ROWS)]}),
        {"text": "text", "label": "code"},
    ),
    "pairs": (
        "t.tsv",
        csv({"sentence1": SENTENCES, "sentence2": TEXTS, "same": [i % 2 for i in range(ROWS)]}, "\t"),
        {"text": "sentence1", "pair": "sentence2", "label": "same"},
    ),
    "pairs with numbers": (
        "t.csv",
        csv({"premise": SENTENCES, "hypothesis": TEXTS, "score": MEASURES}),
        {"text": "premise", "pair": "hypothesis", "label": "score", "kind": "regression"},
    ),
    "numbers": (
        "t.csv",
        csv({"text": TEXTS, "price": MEASURES}),
        {"text": "text", "label": "price", "kind": "regression"},
    ),
    "lists": (
        "t.jsonl",
        lines({"text": TEXTS, "about": [[name] if i % 2 else [] for i, name in enumerate(CLASSES)]}),
        {"text": "text", "label": "about", "kind": "multilabel"},
    ),
    "lists as text": (
        "t.csv",
        csv({"text": TEXTS, "about": [f"['{name}', 'other']" for name in CLASSES]}),
        {"text": "text", "label": "about", "kind": "multilabel"},
    ),
    "several names with commas between": (
        "t.csv",
        csv({"text": TEXTS, "tags": [f"{name}, {CLASSES[-i]}" if i % 2 else name for i, name in enumerate(CLASSES)]}),
        {"text": "text", "label": "tags", "kind": "multilabel"},
    ),
    "lists of tokens and tags": (
        "t.jsonl",
        lines(
            {"words": [t.split() for t in SENTENCES], "ner": [["O"] * len(t.split()[1:]) + ["B-X"] for t in SENTENCES]}
        ),
        {"text": "words", "label": "ner", "kind": "tokens"},
    ),
    "a column named as one of its classes": (
        "t.csv",
        csv({"text": TEXTS, "spam": [("spam", "ham")[i % 2] for i in range(ROWS)]}),
        {"text": "text", "label": "spam"},
    ),
    "objects whose field is named as one of its classes": (
        "t.jsonl",
        lines({"the whole text": TEXTS, "spam": [("spam", "ham")[i % 2] for i in range(ROWS)]}),
        {"text": "the whole text", "label": "spam"},
    ),
    "codes that Python would read as numbers": (
        "t.csv",
        csv({"text": TEXTS, "code": [f"{i % 8}_{i % 7}" for i in range(ROWS)]}),
        {"text": "text", "label": "code"},
    ),
    "numbers of classes with semicolons between": (
        "t.jsonl",
        lines({"text": TEXTS, "codes": [f"{i % 3};{i % 4}" if i % 2 else str(i % 3) for i in range(ROWS)]}),
        {"text": "text", "label": "codes", "kind": "multilabel"},
    ),
    "numbers of classes with commas between": (
        "t.csv",
        csv({"text": TEXTS, "codes": [f"{i % 3},{3 + i % 4},{8 + i % 2}" for i in range(ROWS)]}),
        {"text": "text", "label": "codes", "kind": "multilabel"},
    ),
    "short classes with many accents in another encoding": (
        "t.csv",
        csv({"text": TEXTS, "level": ["Élevé", "Modéré", "Évalué", "Léger"] * (ROWS // 4)}, encoding="windows-1252"),
        {"text": "text", "label": "level", "encoding": "windows-1252"},
    ),
    "a class beside prices with a comma": (
        "t.csv",
        csv({"text": TEXTS, "price": [f"{i % 9},5" for i in range(ROWS)], "topic": CLASSES}),
        {"text": "text", "label": "topic"},
    ),
    "CoNLL": ("t.conll", conll(), {"kind": "tokens"}),
    "CoNLL in .tsv": ("t.tsv", conll("\t"), {"kind": "tokens"}),
    "few labels": (
        "t.csv",
        csv({"text": TEXTS, "topic": [name if i % 5 == 0 else "" for i, name in enumerate(CLASSES)]}),
        {"text": "text", "label": "topic", "max_unlabelled": 0.85},
    ),
}


@pytest.mark.parametrize("name", LABELLED)
def test_labels_are_found_and_their_kind(folder: Path, name: str):
    file, data, expected = LABELLED[name]
    made = made_of(folder, letters(TEXTS) | {file: data}, "letters", "--labels", file)
    assert made["finetune"]["tasks"] == [{"name": "t", "data": file, **expected}]
    assert made["finetune"]["baseline"] is True
    assert "until" not in made


def test_a_folder_with_files_for_each_split_is_one_task(folder: Path):
    table = {"text": TEXTS, "label": CLASSES}
    files = {f"t/{split}.csv": csv(table) for split in ("train", "dev", "test")}
    made = made_of(folder, letters(TEXTS) | files, "letters", "--labels", "t")
    assert made["finetune"]["tasks"] == [{"name": "t", "data": "t", "text": "text", "label": "label"}]


def test_labels_alone_are_the_text_too(folder: Path):
    data = csv({"Nachricht": GERMAN, "Thema": CLASSES}, ";", "windows-1252")
    made = made_of(folder, {"t.csv": data}, "--labels", "t.csv")
    expected = {"source": "files", "files": ["t.csv"], "column": "Nachricht", "encoding": "windows-1252"}
    assert made["download"] == expected


@pytest.mark.parametrize(("text", "use"), [([], {"pretrain": "a/b"}), (["letters"], None)])
def test_a_model_to_start_from_is_adapted_or_without_text_only_finetuned(folder: Path, text: list, use: dict | None):
    files = letters(TEXTS) | {"t.csv": csv({"text": TEXTS, "label": CLASSES})}
    made = made_of(folder, files, *text, "--labels", "t.csv", "--start", "a/b")
    assert made["recipe"] == "pocket-adapt"
    assert made.get("use") == use
    assert made.get("pretrain", {}).get("start") == (None if use else "a/b")
    assert made.get("finetune", {}).get("baseline", False) is False, "a whole encoder untrained takes too long"
    assert "vocabulary" not in made  # which is the model's


def test_paths_count_from_the_folder_of_the_recipe_file(folder: Path):
    write(folder, letters(TEXTS) | {"t.csv": csv({"text": TEXTS, "label": CLASSES}), "to/a.txt": b""})
    cram_init("letters/*.txt", folder / "letters", "--labels", "t.csv", "--out", "to/my.toml")
    recipe = read_recipe_file(Path("to/my.toml"))
    files = recipe.override["download"]["files"]
    assert [Path(path).resolve() for path in files] == [folder / "letters" / "*.txt", folder / "letters"]
    [task] = recipe.override["finetune"]["tasks"]
    assert Path(task["data"]).resolve() == folder / "t.csv"


@pytest.mark.parametrize("name", ["classes", "pairs with numbers", "CoNLL", "few labels"])
def test_a_run_accepts_the_file(folder: Path, store: Path, name: str):
    file, data, _ = LABELLED[name]
    made_of(folder, letters(GERMAN) | {file: data}, "letters", "--labels", file)
    recipe = read_recipe_file(Path("my.toml"))
    resolved = resolve(recipe.recipe, recipe.override)
    resolved.download.check()
    for run in resolved.finetune.runs():
        run.check()
    result = CliRunner().invoke(app, ["run", "my.toml", "--plan"])
    assert result.exit_code == 3, result.output  # something would run


def test_what_is_written_is_commented_in_plain_english(folder: Path):
    rare = ["speed" if i % 40 else "refund" for i in range(ROWS)]
    files = letters(TEXTS + TEXTS[:20]) | {"tickets.csv": csv({"title": SENTENCES, "body": TEXTS, "topic": rare})}
    made_of(folder, files, "letters", "--labels", "tickets.csv")
    check_golden("init.toml", (folder / "my.toml").read_text(encoding="utf-8"))


def test_findings_doubts_and_the_next_command_are_printed(folder: Path):
    write(folder, letters(TEXTS) | {"letters/x.pdf": b"%PDF-1.4"})
    write(folder, {"t.csv": csv({"title": SENTENCES, "text": TEXTS, "topic": CLASSES, "place": CLASSES[::-1]})})
    said = cram_init("letters", "--labels", "t.csv")
    for words in ("200 documents", "Latin", "billing (67)", "1 .pdf", "it could also be place", "cram run my.toml"):
        assert words in said


@pytest.mark.parametrize(("every", "characters"), [(1, "unicode"), (50, "ascii")])
def test_what_ascii_would_delete_from_labelled_texts_is_said_and_kept_if_it_is_much(folder: Path, every, characters):
    texts = [f"{text} 😀" if i % every == 0 else text for i, text in enumerate(TEXTS)]
    write(folder, letters(TEXTS) | {"t.csv": csv({"text": texts, "label": CLASSES})})
    said = cram_init("letters", "--labels", "t.csv")
    assert "such as 😀" in said
    made = tomllib.loads((folder / "my.toml").read_text(encoding="utf-8"))
    assert made["vocabulary"]["characters"] == characters


def test_typographic_punctuation_in_labelled_texts_needs_no_unicode(folder: Path):
    texts = [f"“{text}” – it’s" for text in TEXTS]
    made = made_of(
        folder, letters(TEXTS) | {"t.csv": csv({"text": texts, "label": CLASSES})}, "letters", "--labels", "t.csv"
    )
    assert made["vocabulary"]["characters"] == "ascii"


def test_many_whole_numbers_that_repeat_may_be_codes_and_it_is_said(folder: Path):
    write(folder, letters(TEXTS) | {"t.csv": csv({"text": TEXTS, "intent": [i % 60 for i in range(ROWS)]})})
    assert "60 different whole numbers" in cram_init("letters", "--labels", "t.csv")
    write(folder, {"t.csv": csv({"text": TEXTS, "price": [1000 + 37 * i % ROWS for i in range(ROWS)]})})
    assert "whole numbers" not in cram_init("letters", "--labels", "t.csv", "--force")


DOUBTS: dict[str, tuple[Callable[[], list[str]], str]] = {
    "repeated documents": (lambda: TEXTS[:100] + TEXTS[:100], "50 % of the documents"),
    "short documents": (lambda: [f"Text {i}" for i in range(ROWS)], "fewer than"),
    "little text": (lambda: TEXTS, "little text"),
}


@pytest.mark.parametrize("name", DOUBTS)
def test_doubts_about_text_are_said(folder: Path, name: str):
    make, words = DOUBTS[name]
    write(folder, letters(make()))
    assert words in cram_init("letters")


def test_labels_in_other_words_than_the_text_and_among_it_are_said(folder: Path):
    write(folder, {"a.txt": "\n".join(CYRILLIC).encode(), "t.csv": csv({"text": TEXTS, "label": CLASSES})})
    said = cram_init("a.txt", "--labels", "t.csv")
    assert "of the words in the labelled texts occur" in said
    assert "t: its rows" not in said
    said = cram_init("t.csv", "--labels", "t.csv", "--force")
    assert "t: its rows are also among the text" in said
    assert "of the words in the labelled texts occur" not in said


def test_a_log_among_the_text_is_said(folder: Path):
    log = "\n".join(f"2024-03-05 10:12:{i % 60:02d} INFO {text}" for i, text in enumerate(TEXTS))
    write(folder, letters(TEXTS) | {"letters/server.txt": log.encode()})
    assert "a date and a time in front of its lines" in cram_init("letters")


def test_an_existing_file_stays_unless_forced(folder: Path):
    write(folder, letters(TEXTS) | {"my.toml": b"mine"})
    with pytest.raises(InputError, match=r"my\.toml exists"):
        cram_init("letters")
    assert (folder / "my.toml").read_bytes() == b"mine"
    cram_init("letters", "--force")
    assert b"recipe = " in (folder / "my.toml").read_bytes()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["gone"], "'gone'"),
        (["letters", "--labels", "gone.csv"], "gone.csv"),
        (["letters", "--labels", "empty.csv"], "empty.csv"),
        (["letters", "--labels", "same.csv"], "same.csv has no column with labels"),
        (["letters", "--out", "my.yaml"], "my.yaml"),
        (["letters", "--out", "gone/my.toml"], "gone"),
        (["--labels", "t.conll"], "t.conll"),
        (["numbers.csv"], "numbers.csv"),
        (["letters", "--labels", "nameless.csv"], r"nameless\.csv.* names of the columns"),
        (["cyrillic.txt"], r"cyrillic\.txt.*iconv"),
        (["letters", "--labels", "cyrillic.csv"], r"cyrillic\.csv.*iconv"),
        (["letters", "--labels", "classes.csv"], r"classes\.csv.*iconv"),
        (["letters", "--labels", "comma.csv"], r"comma\.csv: the labels in Bewertung .* such as 1,5"),
        (["--labels", "tokens.csv"], "tokens.csv"),
        (["letters", "--labels", "table.txt"], r"table\.txt is read as CoNLL"),
        (["letters", "--labels", "letters/gone"], "no file or folder letters/gone"),
    ],
)
def test_bad_input_is_refused_with_its_name_and_nothing_is_written(folder: Path, arguments: list[str], words: str):
    files = {"empty.csv": b"", "same.csv": csv({"text": TEXTS}), "t.conll": conll(), "numbers.csv": b"a,b\n1,2\n3,4\n"}
    files["nameless.csv"] = csv({"text": TEXTS, "label": CLASSES}).partition(b"\n")[2]
    cyrillic = {"text": CYRILLIC, "label": CLASSES}
    files["cyrillic.csv"] = csv(cyrillic, encoding="windows-1251")
    files["classes.csv"] = csv({"text": TEXTS, "label": ["мост", "река"] * 100}, encoding="windows-1251")
    files["comma.csv"] = csv({"Text": TEXTS, "Bewertung": [f"{i % 5},{5 * (i % 2)}" for i in range(1, ROWS + 1)]}, ";")
    tokens = [text.split() for text in SENTENCES]
    files["tokens.csv"] = csv({"tokens": tokens, "tags": [["O"] * len(row[1:]) + ["B-X"] for row in tokens]})
    files["table.txt"] = csv({"text": TEXTS, "label": CLASSES}, "\t")
    files["cyrillic.txt"] = "\n".join(CYRILLIC).encode("windows-1251")
    write(folder, letters(TEXTS) | files)
    before = sorted(folder.rglob("*"))
    with pytest.raises(InputError, match=words):
        cram_init(*arguments)
    assert sorted(folder.rglob("*")) == before


def test_without_arguments_and_a_terminal_it_explains_itself(folder: Path):
    said = cram_init(code=2)
    assert said.count("\n") == 3
    assert "cram init my/letters --labels my/tickets.csv" in said


def test_of_a_large_text_a_sample_of_each_file_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(overview, "LOOKED_AT", 20_000)
    write(folder, {f"{i}.jsonl": lines({"text": TEXTS}) for i in range(4)})
    found = look_at_files(["*.jsonl"])
    whole = 4 * sum(map(len, TEXTS))
    assert not found.is_all
    assert sum(map(len, found.texts)) < 0.5 * whole
    assert found.characters == pytest.approx(whole, rel=0.5)
    assert found.documents == pytest.approx(4 * ROWS, rel=0.5)


def test_of_a_data_set_the_beginning_is_read_and_the_column_is_found(folder: Path):
    write(folder, {"set/train.jsonl": lines({"letter": TEXTS, "id": CLASSES})})
    found = look_at_dataset("set")  # a folder stands for a data set of the hub
    assert found.settings == {"dataset": "set", "column": "letter"}
    assert sorted(found.texts) == sorted(TEXTS)


def test_what_is_neither_here_nor_on_the_hub_is_said_to_be_both(folder: Path, monkeypatch: pytest.MonkeyPatch):
    def unknown(name: str) -> None:
        raise InputError(f"{name} is not on the hub.")

    monkeypatch.setattr(overview, "look_at_dataset", unknown)
    with pytest.raises(InputError, match=r"no file or folder some/set, .*not on the hub"):
        cram_init("some/set")
    write(folder, letters(TEXTS))
    with pytest.raises(InputError, match="'letters/gone' matches nothing"):
        cram_init("letters/gone")  # a misspelt path isn't looked for on the hub


def test_scripts_are_shares_of_letters_and_ascii_counts_what_it_loses():
    found = writing_of(["abcd", "жжж", "äbc", "字!"])
    assert {name: round(share * 11) for name, share in found.scripts.items()} == {"LATIN": 7, "CYRILLIC": 3, "CJK": 1}
    assert found.deleted == pytest.approx(4 / 12)
    assert found.accented == pytest.approx(1 / 12)


def test_real_text_and_labels(folder: Path, real_data: Path):
    assert writing_of(look_at_files([str(real_data / "scripts")]).texts).needs_unicode
    assert not writing_of(look_at_files([str(real_data / "pile-like" / "train*")]).texts).needs_unicode
    for task in ("cola", "stsb", "mrpc"):
        table = pd.read_parquet(real_data / "glue" / task / "train.parquet")
        table.to_csv(folder / f"{task}.csv", index=False)
        found = look_at_labels(f"{task}.csv").definition
        assert (found.label, found.kind) == ("label", "regression" if task == "stsb" else "classes")
        assert bool(found.pair) == (task != "cola")


def test_the_settings_of_a_task_are_json_that_reads_the_same(folder: Path):
    name = 'a "b" \\ ü'
    write(folder, letters(TEXTS) | {"t.csv": csv({name: TEXTS, "label": CLASSES})})
    cram_init("letters", "--labels", "t.csv")
    made = tomllib.loads((folder / "my.toml").read_text(encoding="utf-8"))
    assert json.dumps(made["finetune"]["tasks"][0]["text"]) == json.dumps(name)
