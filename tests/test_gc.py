"""`cram gc` and `cram pin`: what stays, what goes, hollow artifacts, and what a killed process leaves."""

import json
import os
import signal
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from chain import CALLS, CHAIN, CLEAN, PAGE, PARTS, TEXT, TOKENS, TUNED, Kind, chain, cram, forked, refusal_of
from test_workers import wait_for

from flows.execute import execute
from flows.plan import Plan
from model.errors import InputError
from tasks.stage import StageTask
from tasks.store import gc
from tasks.store.artifacts import Artifact, is_hollow, read_manifest
from tasks.store.gc import collect, keep_while_running, pin, survey
from tasks.store.locks import lock_artifact
from tasks.store.manifests import verify
from tasks.store.publish import discard


@pytest.fixture(autouse=True)
def _nothing_called() -> None:
    CALLS.clear()


def plan_of(number: int, shared: int = 0, until: StageTask = PAGE) -> Plan:
    """The plan of a run of these stages."""
    plan = Plan(until.name, {}, [])
    plan.trace(chain, number, shared, until)
    return plan


def run(plan: Plan) -> Artifact:
    """Carry out a plan, as the flow does."""
    plan.check()
    for error in plan.problems.values():
        raise error
    with keep_while_running(plan.needed()):
        execute(plan)
    return plan.results()[0]


def there(*some: Artifact) -> list[bool]:
    """Which of the artifacts are complete."""
    return [read_manifest(artifact) is not None for artifact in some]


def bytes_in(folder: Path) -> int:
    """The bytes of the files below a folder, each once."""
    sizes = {}
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            about = path.lstat()
            sizes[about.st_ino] = about.st_size
    return sum(sizes.values())


def test_the_last_reports_stay_with_all_they_were_made_from_and_so_does_what_is_newer(store: Path):
    first = chain(1)
    second = chain(2, shared=2)
    third = chain(3, shared=2)
    newer = chain(4, until=TOKENS)
    found, _ = collect(keep=1, hollow=False, models=False)
    assert there(*third, *newer) == [True] * 9
    assert there(*first) == [False, False, False, True, False, False], "of the others, the models stay"
    assert there(*second) == [True, True, False, True, False, False], "and text that the last one was made from"
    assert found.kept["made since"] == {artifact.name for artifact in newer}
    assert set(found.models) == {first[3].name, second[3].name}
    collect(keep=1, hollow=False, models=True)
    assert there(first[3], second[3], third[3]) == [False, False, True]
    collect(keep=0, hollow=False, models=True)
    assert not [path for path in store.glob("[!.]*/*") if not path.is_symlink()], "nothing is pinned or in use"


def test_what_was_pulled_since_the_last_report_stays_with_what_it_was_made_from(store, tmp_path, monkeypatch):
    pulled = chain(1, until=TOKENS)
    cram("push-artifact", pulled[-1].name, str(tmp_path / "remote"))
    monkeypatch.setenv("CRAM_ARTIFACTS", str(tmp_path / "second"))
    old = chain(3, until=TEXT)
    own = chain(2)
    assert cram("pull", "tokenize", str(tmp_path / "remote")).count(f"--use tokenize={pulled[-1].key}") == 1
    collect(keep=1, hollow=True, models=False)
    assert there(*old, *own, *pulled) == [False] + [True] * 9
    chain(4)
    found = survey(keep=1, hollow=False, models=False)
    assert found.goes.keys() >= {artifact.name for artifact in pulled}


def test_without_a_report_or_a_study_nothing_goes(store: Path):
    some = chain(1, until=TUNED)
    (store / ".partial" / "filter-0123").mkdir()
    found, freed = collect(keep=5, hollow=False, models=True)
    assert all(there(*some))
    assert not found.goes
    assert sum(freed.values()) == 0


def test_what_is_pinned_stays_whole_with_all_it_was_made_from(store: Path):
    old = chain(1)
    new = chain(2)
    pin(old[2])
    assert cram("pin").count("tokenize/") == 1
    collect(keep=1, hollow=True, models=True)
    assert there(*old) == [True, True, True, False, False, False]
    assert [is_hollow(artifact) for artifact in (*old[:3], *new[:3])] == [True, True, False, True, True, True]
    assert "no longer pinned" in cram("pin", old[2].key[:6], "--remove")
    pin(new[2])
    assert f"{new[2].name} is no longer pinned" in cram("pin", "tokenize/latest", "--remove")
    collect(keep=1, hollow=False, models=True)
    assert not any(there(*old))
    assert all(there(*new))


def test_the_preview_changes_nothing_and_says_what_is_then_freed_of_linked_files_too(store: Path):
    chain(1)
    chain(2, shared=1)
    stays = chain(3, shared=2)
    before = {path: path.lstat().st_mtime_ns for path in store.rglob("*") if ".locks" not in path.parts}
    found = survey(keep=1, hollow=False, models=True)
    expected = gc.sizes(found.paths())
    assert {path: path.lstat().st_mtime_ns for path in store.rglob("*") if ".locks" not in path.parts} == before
    size = bytes_in(store)
    done, freed = collect(keep=1, hollow=False, models=True)
    assert freed == expected
    assert done.goes.keys() == found.goes.keys()
    assert size - bytes_in(store) == sum(freed.values())
    assert freed["download"] > 0, "of the first text, all links went"
    size = bytes_in(store)
    _, freed = collect(keep=1, hollow=True, models=True)
    assert 0 <= sum(freed.values()) - (size - bytes_in(store)) < 1000, "manifests name what was dropped"
    assert all(there(*stays))
    assert (store / "report" / "latest").resolve() == stays[-1].path


def test_abandoned_drafts_go_if_they_are_older_than_the_newest_report_and_hold_no_checkpoint(store: Path):
    names = ("filter", "pretrain", "measure", "discarded")
    drafts = {name: store / ".partial" / f"{name}-0123456789ab" for name in names}
    for name in ("filter", "pretrain", "discarded"):
        drafts[name].mkdir(parents=True)
        (drafts[name] / "half").write_text("x" * 50)
    chain(1)
    drafts["measure"].mkdir()
    held = Artifact(stage="filter", key="0123456789ab")
    with lock_artifact(held):
        collect(keep=5, hollow=False, models=False)
        assert [draft.exists() for draft in drafts.values()] == [True, True, True, False], "one is in progress"
    shown = cram("gc")
    assert f"draft {held.stage}-{held.key}" in shown
    assert "pretrain-" not in shown
    collect(keep=5, hollow=False, models=False)
    assert [draft.exists() for draft in drafts.values()] == [False, True, True, False]
    collect(keep=5, hollow=False, models=True)
    assert [draft.exists() for draft in drafts.values()] == [False, False, True, False]


def test_what_a_running_process_reads_or_will_need_stays_and_goes_once_it_is_killed(store: Path):
    read = chain(1)
    planned = chain(2)
    chain(3)

    def hold() -> None:
        with (
            keep_while_running([planned[1], Artifact(stage="filter", key="of the future")]),
            lock_artifact(read[2], shared=True),
        ):
            (store / "holding").touch()
            signal.pause()

    process = forked(hold)
    wait_for((store / "holding").exists)
    for _ in range(2):
        collect(keep=1, hollow=True, models=True)
        assert there(*read[:4], *planned[:3]) == [True, True, True, False, True, True, False]
        assert not any(map(is_hollow, (*read[:3], *planned[:2])))
    process.kill()
    process.join()
    collect(keep=1, hollow=True, models=True)
    assert not any(there(*read, *planned))
    assert list((store / ".locks" / "runs").iterdir()) == [], "what the killed process said is forgotten"


def test_a_run_that_begins_during_a_collection_waits_until_what_goes_is_known_and_makes_it_again(store: Path, caplog):
    caplog.set_level("INFO", "tasks.store")
    old = chain(1)
    chain(2)
    plan = plan_of(1)
    plan.check()
    assert not plan.problems
    with ThreadPoolExecutor(1) as thread:
        with lock_artifact(gc.GATE):
            running = thread.submit(run, plan)
            wait_for(lambda: f"using {gc.GATE.name}; waiting" in caplog.text)
            discard(old[1])
            discard(old[5])
        assert running.result(600) == old[5]
    assert all(there(*old))


def test_collections_beside_runs_never_make_one_fail(store: Path):
    chain(9)
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(lambda: [run(plan_of(number)) for number in range(6)])
        while not running.done():
            collect(keep=1, hollow=True, models=True)
        pages = running.result(0)
    assert there(*pages)[-1:] == [True]
    assert not [path for path in (store / ".partial").iterdir() if any(path.iterdir())]


def test_a_hollow_artifact_counts_as_made_until_a_stage_needs_its_files(store: Path, caplog):
    caplog.set_level("INFO")
    old = chain(0)
    sums = {artifact: read_manifest(artifact)["files"] for artifact in old}
    CALLS.clear()
    collect(keep=1, hollow=True, models=False)
    assert [is_hollow(artifact) for artifact in old] == [True, True, True, False, False, False]
    assert {path.name for path in old[0].path.iterdir()} == {"stage.json", "stats.json", "lost.jsonl"}
    assert (old[3].path / "heldout.npz").exists(), "a model keeps its held-out text"
    assert all(there(*old))
    assert run(plan_of(0)) == old[5]
    run(plan_of(1, shared=4))
    assert CALLS == ["finetune", "report"], "a finetuning run needs the model alone"
    CALLS.clear()
    run(plan_of(1, shared=2))
    assert CALLS == ["download", "deduplicate", "tokenize", "pretrain", "finetune", "report"]
    assert [read_manifest(artifact)["files"] for artifact in old[:2]] == [sums[artifact] for artifact in old[:2]]
    assert caplog.text.count("was rebuilt, with the same contents as before") == 2
    assert f"a later stage needs: {old[0].name}, {old[1].name}." in caplog.text
    assert is_hollow(old[2]), "nothing had to read it"
    for artifact in old[:2]:
        verify(artifact)


def test_a_hollow_artifact_stays_if_it_cannot_be_made_again_and_made_otherwise_it_is_a_warning(store: Path, caplog):
    text, *_ = chain(0)
    collect(keep=1, hollow=True, models=False)
    CALLS.append("no source")
    with pytest.raises(InputError, match="The source of the text is gone"):
        run(plan_of(1, shared=1))
    assert is_hollow(text)
    assert text.stats == {"documents": 1}
    CALLS[:] = ["other"]
    run(plan_of(1, shared=1))
    [warning] = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert text.name in warning
    assert "lost.jsonl differs" in warning


def test_a_hollow_input_is_a_sentence_wherever_it_is_read(store: Path):
    text, clean, *_ = chain(0)
    collect(keep=1, hollow=True, models=False)
    with pytest.raises(InputError, match=f"{text.name} is hollow"):
        CLEAN.fn(Kind(number=5), [text])
    with pytest.raises(InputError, match=f"{clean.name} is hollow"):
        Plan("report", {"deduplicate": "latest"}, []).check()
    assert TEXT.fn(Kind(), refill=True) == text
    assert not is_hollow(text)
    assert "hollow: 2 files with" in cram("show", "deduplicate")
    assert "hollow" in next(line for line in cram("ls").splitlines() if line.startswith(clean.name))
    assert "differing statistics" in cram("diff", "deduplicate", "latest", "latest")


def is_sound(store: Path, stays: list[Artifact]) -> None:
    """What is there is complete, what must stay is there, and links lead somewhere."""
    folders = [path for path in store.glob("[!.]*/[!.]*") if path.is_dir() and not path.is_symlink()]
    every = [Artifact(stage=path.parent.name, key=path.name) for path in folders]
    assert all(there(*every, *stays))
    for artifact in every:
        listed = {file["path"] for file in artifact.manifest["files"]} - set(artifact.manifest.get("hollow", ()))
        assert all((artifact.path / file).is_file() for file in listed)
    for artifact in stays:
        assert (artifact.path.parent / "latest").exists()


def interrupted_collection(step: int) -> None:
    """End a collection by SIGKILL before its step of this number, of those that move files; 0: as it deletes all."""
    steps = []

    def killing(act: Callable) -> Callable:
        def counted(*arguments: object) -> object:
            steps.append(act)
            if len(steps) == step or (step == 0 and act is deletion):
                os.kill(os.getpid(), signal.SIGKILL)
            return act(*arguments)

        return counted

    deletion = tempfile.TemporaryDirectory.__exit__
    tempfile.TemporaryDirectory.__exit__ = killing(deletion)
    for name in ("rename", "replace", "unlink"):
        setattr(Path, name, killing(getattr(Path, name)))
    collect(keep=1, hollow=True, models=True)


@pytest.mark.parametrize("step", [0, 1, 2, 4, 8, 12, 14, 16])
def test_a_collection_that_is_killed_at_any_step_leaves_a_sound_store_and_the_next_one_ends_it(store, step: int):
    chain(1)
    stays = chain(2)
    process = forked(lambda: interrupted_collection(step))
    process.join()
    assert process.exitcode == -signal.SIGKILL
    is_sound(store, stays)
    _, freed = collect(keep=1, hollow=True, models=True)
    assert freed.get("drafts", 0) > 0 or step > 0
    is_sound(store, stays)
    assert [is_hollow(artifact) for artifact in stays] == [True, True, True, False, False, False]
    names = {path.name for path in stays[0].path.iterdir()}
    assert names - {".stage.json"} == {"stage.json", "stats.json", "lost.jsonl"}
    assert len([path for path in store.glob("[!.]*/*") if not path.is_symlink()]) == len(CHAIN)
    assert not [path for path in (store / ".partial").iterdir() if any(path.iterdir())]
    assert survey(keep=1, hollow=True, models=True).paths() == {}


def test_what_is_no_complete_artifact_is_left_alone(store: Path):
    broken, *_ = chain(1)
    chain(2)
    (broken.path / PARTS[0]).unlink()
    (store / "filter" / "copied").mkdir(parents=True)
    (store / "filter" / "junk").mkdir()
    (store / "filter" / "junk" / "stage.json").write_text(json.dumps({"files": [], "stats": {}, "inputs": None}))
    collect(keep=0, hollow=True, models=True)
    assert {path.parent.name for path in store.glob("[!.]*/[!.]*") if path.is_dir()} == {"download", "filter"}


def test_a_manifest_from_elsewhere_names_no_file_outside_its_artifact(store: Path, tmp_path: Path):
    text, *_ = chain(1)
    names = ["../../../mine.txt", str(tmp_path / "part-00000.parquet")]
    for name in names:
        (text.path / name).write_text("mine")
    about = text.manifest
    about["files"] += [{"path": name, "bytes": 4, "sha256": ""} for name in names]
    (text.path / "stage.json").write_text(json.dumps(about | {"hollow": names}))
    collect(keep=1, hollow=True, models=True)
    assert read_manifest(text) is None, "it counts as damaged"
    assert all((text.path / name).read_text() == "mine" for name in names)


@pytest.mark.parametrize("name", ["", "zz", "download/zz", "nothing/abc", "x*", "download/"])
def test_only_one_complete_artifact_can_be_pinned(store: Path, name: str):
    chain(1)
    refusal_of("pin", name)
    assert refusal_of("pin", "zz", "--remove").endswith("Pinned artifacts: none.")
    assert "Nothing is pinned" in cram("pin")


def test_ls_has_the_bytes_of_each_stage_and_of_all(store: Path):
    pin(chain(1)[0])
    chain(2)
    lines = [line.split() for line in cram("ls").splitlines()]
    rows = {line[0]: line[1:] for line in lines if line and line[0] in ("download", "deduplicate", "all")}
    assert [rows[name][0] for name in ("download", "deduplicate", "all")] == ["2", "2", "12"]
    assert float(rows["deduplicate"][1]) < 200, "its parts are those of download"
    assert sum("pinned" in line for line in lines) == 1


def test_the_command_lists_what_goes_and_discards_it_only_with_yes(store: Path):
    old = chain(1)
    new = chain(2)
    for shown in (cram("gc", "--keep", "1"), cram("gc", "--keep", "1", "--models")):
        assert old[0].name in shown
        assert old[3].name in shown
        assert new[3].name not in shown
    assert all(there(*old, *new))
    shown = cram("gc", "--keep", "1", "--yes")
    assert "(last reports and studies 1; 5 that these were made from; other models 1)" in " ".join(shown.split())
    assert there(*old) == [False, False, False, True, False, False]
    assert all(there(*new))
    assert "2 artifacts" in cram("gc", "--keep", "0")
    assert "(other models 2)" in cram("gc", "--keep", "0")
    assert old[0].name not in cram("gc", "--keep", "1")


def test_a_model_that_came_without_its_weights_is_trained_again_only_if_asked_for(store: Path):
    old = chain(0)
    model = old[3]
    about = model.manifest | {"hollow": ["model.safetensors"]}  # as `cram pull` leaves it
    (model.path / "stage.json").write_text(json.dumps(about))
    (model.path / "model.safetensors").unlink()
    CALLS.clear()
    assert run(plan_of(0)) == old[5], "nothing needs the weights"
    with pytest.raises(InputError, match=rf"`cram pull {model.name}` fetches .*--refresh pretrain trains it again"):
        run(plan_of(1, shared=4))
    with pytest.raises(InputError, match=f"{model.name} is hollow"):
        Plan("report", {"pretrain": model.key}, []).check(thoroughly=False)
    assert CALLS == []
    assert is_hollow(model)
    again = plan_of(1, shared=4)
    again.refresh = {"pretrain"}
    run(again)
    assert CALLS == ["pretrain", "finetune", "report"]
    verify(model)


def test_what_a_damaged_artifact_was_made_from_stays(store: Path):
    *_, text, tokens, model, _, _ = chain(1)
    (model.path / "heldout.npz").unlink()
    collect(keep=1, hollow=False, models=True)
    pin(tokens)
    (tokens.path / "tokenizer.json").unlink()
    collect(keep=0, hollow=False, models=True)
    assert there(text, tokens) == [True, False]
    assert (tokens.path / "sequences.npy").exists()
    assert (model.path / "model.safetensors").exists()
