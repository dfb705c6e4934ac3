"""`cram verify` and `cram lineage`: damage of every kind, what follows from it, and what came from what."""

import json
import os
import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from chain import CALLS, PAGE, PARTS, TEXT, TUNED, Kind, chain, cram, made, refusal_of

from model.errors import InputError
from tasks.reports.trees import as_text, mermaid
from tasks.store.artifacts import LINEAGE, WORK, Artifact
from tasks.store.lineage import origins
from tasks.store.locks import lock_artifact
from tasks.store.manifests import MANIFEST
from tasks.store.verify import find_damage, reruns

FILE = "lost.jsonl"  # of the text; its parts are those of the copy too


@pytest.fixture
def toy(store: Path) -> dict[str, Artifact]:
    """A text, copies of its parts, its tokens, a model, two finetuning runs, and their report."""
    found = dict(zip(("text", "clean", "tokens", "model", "run"), chain(0, until=TUNED), strict=True))
    found["other"] = TUNED.fn(Kind(number=1), [found["model"]])
    found["report"] = PAGE.fn(Kind(), [found["run"], found["other"]])
    CALLS.clear()
    return found


def again() -> list[str]:
    """The stages that run when the report is asked for once more."""
    CALLS.clear()
    *_, model, run = chain(0, until=TUNED)
    PAGE.fn(Kind(), [run, TUNED.fn(Kind(number=1), [model])])
    return CALLS


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def rewritten(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | changes), encoding="utf-8")


DAMAGE: dict[str, tuple[str, Callable[[Path], object]]] = {  # which file, and what is done to it
    "deleted": (FILE, Path.unlink),
    "cut": (FILE, lambda path: os.truncate(path, 7)),
    "a flipped bit": (FILE, flip),
    "nested deeply": (MANIFEST, lambda path: path.write_text("[" * 100_000)),
    "no manifest": (MANIFEST, Path.unlink),
    "a size in words": (MANIFEST, lambda path: rewritten(path, files=[{"path": FILE, "bytes": "7"}])),
    "a number for statistics": (MANIFEST, lambda path: rewritten(path, stats=7)),
    "a file too many": ("notes.txt", Path.touch),
}


def test_a_sound_store_is_said_to_be_sound_with_status_0(toy, store: Path):
    (toy["model"].path / WORK).mkdir()
    (toy["model"].path / WORK / "state").touch()  # of a stage that was killed as it published
    assert re.fullmatch(rf"22 files of 7 artifacts in {store}, [\d.]+ kB: intact\.\n", cram("verify"))
    assert "3 files of 1 artifact" in cram("verify", "pretrain/latest")
    assert "4 files of 2 artifacts" in cram("verify", "finetune")


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_of_every_kind_is_listed_with_status_1_and_what_is_said_to_run_again_does(kind: str, toy):
    file, damage = DAMAGE[kind]
    text = toy["text"]
    damage(text.path / file)
    shown = cram("verify", status=1)
    first, *_ = shown.splitlines()
    assert first.startswith(f"{text.name}: {file} ")
    cram("verify", "report")
    cram("verify", text.key[:6], status=1)
    rebuilt = [line for line in shown.splitlines() if line.startswith("Rebuilt")]
    if kind == "a file too many":
        assert rebuilt == again() == []
        return
    [line] = rebuilt
    assert re.findall(r"\w+/[0-9a-f]{12}", line.partition(": ")[2]) == [text.name], "and nothing else"
    if kind == "a flipped bit":
        assert again() == [], "no size differs"
        with pytest.raises(InputError, match=re.escape(file)):
            chain(7, shared=1)
        assert f"after you delete {text.path}" in line
        for path in text.path.iterdir():
            path.unlink()
    assert again() == ["download"]
    cram("verify")


@pytest.mark.parametrize(
    ("which", "file", "then"),
    [
        ("model", "model.safetensors", ["pretrain", "finetune", "finetune", "report"]),
        ("run", "scores.json", ["finetune", "report"]),
    ],
)
def test_what_was_made_from_what_varies_runs_again_too_as_is_said(which: str, file: str, then: list[str], toy):
    (toy[which].path / file).unlink()
    rebuilt = " ".join(line for line in cram("verify", status=1).splitlines() if line.startswith("Rebuilt"))
    assert {stage for stage in ("download", "pretrain", "finetune", "report") if f"{stage}/" in rebuilt} == set(then)
    assert again() == then
    cram("verify")


def test_cards_and_pictures_that_were_changed_are_listed_but_make_nothing_run_and_stop_no_stage(store: Path):
    names = ("README.md", "loss.png", "kept/README.md")
    with_card = made("download", *names, "config.json")
    model = with_card.fn(Kind())
    (model.path / "README.md").write_text("edited, and shorter than it was")
    (model.path / "kept" / "README.md").unlink()
    flip(model.path / "loss.png")
    CALLS.clear()
    PAGE.fn(Kind(), [with_card.fn(Kind())])
    assert CALLS == ["report"]
    shown = cram("verify", status=1)
    assert all(f"{model.name}: {name} " in shown for name in names)
    assert "\nRebuilt" not in shown
    (model.path / "config.json").write_text("shorter than it was")
    with_card.fn(Kind())
    assert CALLS == ["report", "download"], "any other file counts"


def test_dropped_files_are_passed_over_and_counted(toy):
    rewritten(toy["text"].path / MANIFEST, hollow=[*PARTS])
    (toy["text"].path / PARTS[0]).unlink()  # the other one is left by a gc that was killed
    shown = cram("verify")
    assert "20 files of 7 artifacts" in shown
    assert "1 artifact hollow" in shown


def test_hollow_inputs_of_what_runs_again_go_first():
    manifests = {
        "download/a": {"inputs": {}, "hollow": ["part-00000.parquet"]},
        "filter/b": {"inputs": {"corpus": "download/a"}, "hollow": ["part-00000.parquet"]},
        "tokenize/c": {"inputs": {"corpus": "filter/b"}},
    }
    assert reruns(["tokenize/c"], manifests) == {
        "tokenize/c": "", "filter/b": "first, for tokenize/c", "download/a": "first, for filter/b"
    }  # fmt: skip
    assert [*reruns(["filter/b"], manifests)] == ["filter/b", "download/a"]


def test_an_artifact_that_a_run_is_making_is_left_out(toy):
    (toy["model"].path / "model.safetensors").unlink()
    with lock_artifact(toy["model"]):
        assert f"{toy['model'].name} was left out" in cram("verify")


def test_a_store_that_can_only_be_read_is_verified(toy, monkeypatch: pytest.MonkeyPatch):
    def refused(*_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("tasks.store.locks.lock_artifact", refused)
    flip(toy["text"].path / FILE)
    damages, _ = find_damage([*toy.values()])
    assert [damage.file for damage in damages] == [FILE]


def test_lineage_goes_both_ways_and_shows_each_branch_once(toy):
    shown = re.findall(r"(?:\w+/\w+|made from|used for)", cram("lineage", "pretrain"))
    assert shown[:6] == [
        toy["model"].name,
        "made from",
        *(toy[key].name for key in ("tokens", "clean", "text")),
        "used for",
    ]
    assert sorted(shown[6:]) == sorted(toy[key].name for key in ("run", "other", "report", "report"))
    above = cram("lineage", "report")
    assert above.count(toy["text"].name) == 1
    assert above.count("(see above)") == 1


def test_lineage_says_what_is_damaged_hollow_or_elsewhere(toy, store: Path):
    manifests = {toy["text"].name: json.loads((toy["text"].path / MANIFEST).read_text())}
    (toy["model"].path / LINEAGE).write_text(json.dumps(manifests))
    (toy["other"].path / "scores.json").unlink()
    rewritten(toy["report"].path / MANIFEST, hollow=["report.html"])
    toy["text"].path.rename(store / "away")
    lines = cram("lineage", toy["model"].key).splitlines()
    [elsewhere] = [line for line in lines if toy["text"].name in line]
    assert "1 document" in elsewhere
    assert "not in this store" in elsewhere
    assert ["damaged" in line for line in lines if toy["other"].name in line] == [True]
    assert all("hollow" in line for line in lines if toy["report"].name in line)


def test_the_flowchart_has_every_link_of_the_lineage_and_no_other(toy):
    apart = TEXT.fn(Kind(number=9))
    lines = cram("lineage", "finetune", "--mermaid").splitlines()
    boxes = {line.split("[")[0].strip(): line.split('"')[1] for line in lines if "[" in line}
    arrows = {tuple(boxes[end] for end in line.split(" --> ")) for line in map(str.strip, lines) if "-->" in line}
    names = [toy[key].name for key in ("text", "clean", "tokens", "model", "other", "report")]
    assert lines[0] == "flowchart LR"
    assert arrows == set(pairwise(names))
    assert apart.name not in boxes.values()


def test_a_model_that_training_went_on_from_is_part_of_the_lineage():
    about = {"inputs": {"tokens": "tokenize/a"}, "stats": {"start": {"name": "pretrain/b", "start": None}}}
    assert origins({"pretrain/c": about}) == {"pretrain/c": ["tokenize/a", "pretrain/b"]}
    assert as_text("this", {"pretrain/c": about}).splitlines()[1:] == [
        "└── pretrain/c", "    ├── tokenize/a", "    └── pretrain/b"
    ]  # fmt: skip


def test_names_from_files_stay_text():
    odd = 'filter/[red]"\x1b]0;x'
    shown = as_text("this", {odd: {"inputs": {}}}) + mermaid({odd: []})
    assert "\x1b" not in shown
    assert "filter/[red]" in shown
    assert "#quot;" in shown


@pytest.mark.parametrize("command", ["verify", "lineage"])
def test_a_name_of_nothing_is_refused(command: str, toy):
    for name in ("", "nothing", "pretrain/0bad", "finetune/latest/x"):
        assert repr(name.partition("/")[2] or name) in refusal_of(command, name)
    assert "filter" in refusal_of(command, "filtre/a")


def test_lineage_wants_one_artifact(store: Path):
    keys: list[str] = []
    while len({key[0] for key in keys}) == len(keys):  # until two keys begin alike
        keys.append(TEXT.fn(Kind(number=len(keys))).key)
    refused = refusal_of("lineage", f"download/{keys[-1][0]}")
    assert all(key in refused for key in keys if key[0] == keys[-1][0])
    assert keys[-1] in cram("lineage", "download")
