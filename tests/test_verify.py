"""`cram verify` and `cram lineage`: damage of every kind, what follows from it, and what came from what."""

import json
import os
import random
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from flows.cli.main import app
from model.errors import InputError
from tasks.reports.trees import as_text, mermaid
from tasks.stage import Params, StageTask, stage
from tasks.store.artifacts import LINEAGE, WORK, Artifact
from tasks.store.lineage import origins
from tasks.store.locks import lock_artifact
from tasks.store.manifests import MANIFEST
from tasks.store.verify import find_damage, reruns

CALLS: list[str] = []  # stages that ran


class Toy(Params):
    """What to write."""

    number: int = 0


def made(name: str, varies: bool = False) -> StageTask:
    """A stage of this name with any inputs; `varies`: it writes something else each time."""

    @stage(version=1, varies=varies, name=name)
    def toy(params: Toy, given: list[Artifact], out: Path) -> dict:
        CALLS.append(name)
        for part in ("part-00000.txt", "part-00001.txt"):
            (out / part).write_text(f"{name} {random.random() if varies else params.number}" * 50)
        return {"documents": 2}

    return toy


text, model = made("download"), made("pretrain", varies=True)
run, page = made("finetune", varies=True), made("report")


@pytest.fixture
def chain(store: Path) -> dict[str, Artifact]:
    """A text, a model of it, two finetuning runs, their report."""
    corpus = text.fn(Toy(), [])
    pretrained = model.fn(Toy(), [corpus])
    runs = [run.fn(Toy(number=n), [pretrained]) for n in range(2)]
    found = {"text": corpus, "model": pretrained, "run": runs[0], "other": runs[1], "report": page.fn(Toy(), runs)}
    CALLS.clear()
    return found


def again() -> list[str]:
    """The stages that run when the report is asked for once more."""
    CALLS.clear()
    pretrained = model.fn(Toy(), [text.fn(Toy(), [])])
    page.fn(Toy(), [run.fn(Toy(number=n), [pretrained]) for n in range(2)])
    return CALLS


def cram(*arguments: str) -> Result:
    result = CliRunner().invoke(app, arguments)
    assert not result.exception or isinstance(result.exception, SystemExit), result.exception
    return result


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def rewritten(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | changes), encoding="utf-8")


DAMAGE: dict[str, tuple[str, Callable[[Path], object]]] = {
    "is missing": ("part-00001.txt", Path.unlink),
    "has 7 bytes": ("part-00001.txt", lambda path: os.truncate(path, 7)),
    "its SHA-256": ("part-00001.txt", flip),
    "can't be read": (MANIFEST, lambda path: path.write_text("[" * 100_000)),
    "missing or": (MANIFEST, Path.unlink),
    "or can't be": (MANIFEST, lambda path: rewritten(path, files=[{"path": "part-00000.txt", "bytes": "7"}])),
    "or can't be read": (MANIFEST, lambda path: rewritten(path, stats=7)),
    "is not in stage.json": ("notes.txt", Path.touch),
}


def test_a_sound_store_is_said_to_be_sound_with_status_0(chain, store: Path):
    (chain["model"].path / WORK).mkdir()
    (chain["model"].path / WORK / "state").touch()  # of a stage that was killed as it published
    assert re.fullmatch(rf"15 files of 5 artifacts in {store}, [\d.]+ kB: intact\.\n", cram("verify").output)
    assert cram("verify").exit_code == 0
    assert "3 files of 1 artifact" in cram("verify", "pretrain/latest").output
    assert "6 files of 2 artifacts" in cram("verify", "finetune").output


@pytest.mark.parametrize("words", DAMAGE)
def test_damage_of_every_kind_is_listed_with_status_1(words: str, chain):
    file, damage = DAMAGE[words]
    damage(chain["text"].path / file)
    result = cram("verify")
    assert result.exit_code == 1
    first, *_ = result.output.splitlines()
    assert first.startswith(f"{chain['text'].name}: {file} ")
    assert words in first
    assert cram("verify", "report").exit_code == 0
    assert cram("verify", chain["text"].key[:6]).exit_code == 1


@pytest.mark.parametrize("words", [words for words in DAMAGE if words != "is not in stage.json"])
@pytest.mark.parametrize("which", ["text", "model", "run"])
def test_what_is_said_to_run_again_does_and_nothing_else(words: str, which: str, chain):
    file, damage = DAMAGE[words]
    damage(chain[which].path / file)
    output = cram("verify").output
    said = {stage: stage in " ".join(line for line in output.splitlines() if line.startswith("Rebuilt"))
            for stage in ("download/", "pretrain/", "finetune/", "report/")}  # fmt: skip
    if words == "its SHA-256":
        assert "after you delete" in output
        for path in chain[which].path.iterdir():
            path.unlink()
    ran = again()
    assert {stage: stage.strip("/") in ran for stage in said} == said
    assert ran.count("finetune") == {"text": 0, "model": 2, "run": 1}[which]
    assert cram("verify").exit_code == 0


def test_a_flipped_byte_alone_makes_no_stage_run_and_stops_the_one_that_reads_it(chain):
    flip(chain["model"].path / "part-00000.txt")
    assert again() == []
    with pytest.raises(InputError, match=r"part-00000\.txt"):
        run.fn(Toy(number=7), [chain["model"]])


def test_cards_and_pictures_that_were_changed_are_listed_but_make_nothing_run_and_stop_no_stage(store: Path):
    @stage(version=1, name="pretrain")
    def with_card(params: Toy, given: list[Artifact], out: Path) -> dict:
        CALLS.append("pretrain")
        for name in ("README.md", "loss.png", "kept/README.md", "config.json"):
            (out / name).parent.mkdir(exist_ok=True)
            (out / name).write_text(name)
        return {}

    CALLS.clear()
    pretrained = with_card.fn(Toy(), [])
    (pretrained.path / "README.md").write_text("edited, and longer than it was")
    (pretrained.path / "kept" / "README.md").unlink()
    flip(pretrained.path / "loss.png")
    page.fn(Toy(), [with_card.fn(Toy(), [])])
    assert CALLS == ["pretrain", "report"]
    result = cram("verify")
    assert result.exit_code == 1
    assert all(f"{pretrained.name}: {name} " in result.stdout for name in ("README.md", "loss.png", "kept/README.md"))
    assert "\nRebuilt" not in result.stdout
    (pretrained.path / "config.json").write_text("longer than it was")
    with_card.fn(Toy(), [])
    assert CALLS == ["pretrain", "report", "pretrain"], "any other file counts"


def test_dropped_files_are_passed_over_and_counted(chain):
    rewritten(chain["text"].path / MANIFEST, hollow=["part-00000.txt", "part-00001.txt"])
    (chain["text"].path / "part-00000.txt").unlink()  # the other one is left by a gc that was killed
    result = cram("verify")
    assert result.exit_code == 0
    assert "13 files of 5 artifacts" in result.output
    assert "1 artifact hollow" in result.output


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


def test_an_artifact_that_a_run_is_making_is_left_out(chain):
    (chain["model"].path / "part-00000.txt").unlink()
    with lock_artifact(chain["model"]):
        result = cram("verify")
    assert result.exit_code == 0
    assert f"{chain['model'].name} was left out" in result.output


def test_a_store_that_can_only_be_read_is_verified(chain, monkeypatch: pytest.MonkeyPatch):
    def refused(*_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("tasks.store.locks.lock_artifact", refused)
    flip(chain["text"].path / "part-00000.txt")
    damages, _ = find_damage([*chain.values()])
    assert [damage.file for damage in damages] == ["part-00000.txt"]


def test_lineage_goes_both_ways_and_shows_each_branch_once(chain):
    lines = cram("lineage", "pretrain").output.splitlines()
    names = [
        line.split()[-1] if line.endswith(("made from", "used for")) else line.strip("│├└─ ").split()[0]
        for line in lines
    ]
    runs = sorted([chain["run"].name, chain["other"].name])
    assert names[:3] == [chain["model"].name, "from", chain["text"].name]
    assert names[3] == "for"
    assert sorted(names[4:]) == sorted([*runs, chain["report"].name, chain["report"].name])
    above = cram("lineage", "report").output
    assert above.count(chain["text"].name) == 1
    assert above.count("(see above)") == 1


def test_lineage_says_what_is_damaged_hollow_or_elsewhere(chain, store: Path):
    manifests = {chain["text"].name: json.loads((chain["text"].path / MANIFEST).read_text())}
    (chain["model"].path / LINEAGE).write_text(json.dumps(manifests))
    (chain["other"].path / "part-00000.txt").unlink()
    rewritten(chain["report"].path / MANIFEST, hollow=["part-00000.txt"])
    chain["text"].path.rename(store / "away")
    lines = cram("lineage", chain["model"].key).output.splitlines()
    [elsewhere] = [line for line in lines if chain["text"].name in line]
    assert "2 documents" in elsewhere
    assert "not in this store" in elsewhere
    assert ["damaged" in line for line in lines if chain["other"].name in line] == [True]
    assert all("hollow" in line for line in lines if chain["report"].name in line)


def test_the_flowchart_has_every_link_of_the_lineage_and_no_other(chain):
    apart = text.fn(Toy(number=9), [])
    lines = cram("lineage", "finetune", "--mermaid").output.splitlines()
    boxes = {line.split("[")[0].strip(): line.split('"')[1] for line in lines if "[" in line}
    arrows = {tuple(boxes[end] for end in line.split(" --> ")) for line in map(str.strip, lines) if "-->" in line}
    newest = chain["other"].name
    assert lines[0] == "flowchart LR"
    assert arrows == {
        (chain["text"].name, chain["model"].name), (chain["model"].name, newest), (newest, chain["report"].name)
    }  # fmt: skip
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


@pytest.mark.parametrize("name", ["", "nothing", "pretrain/0bad", "filtre/a", "finetune/latest/x"])
@pytest.mark.parametrize("command", ["verify", "lineage"])
def test_a_name_of_nothing_is_refused(command: str, name: str, chain):
    error = CliRunner().invoke(app, [command, name]).exception
    assert isinstance(error, InputError)
    assert repr(name.partition("/")[2] or name) in str(error) or "Did you mean filter" in str(error)


def test_lineage_wants_one_artifact(store: Path):
    keys = []
    while len({key[0] for key in keys}) == len(keys):  # until two keys begin alike
        keys.append(text.fn(Toy(number=len(keys)), []).key)
    error = CliRunner().invoke(app, ["lineage", f"download/{keys[-1][0]}"]).exception
    assert isinstance(error, InputError)
    assert all(key in str(error) for key in keys if key[0] == keys[-1][0])
    assert keys[-1] in cram("lineage", "download").output
