"""The disk: parts that don't change are kept once, and a run that doesn't fit is refused before it starts."""

import math
import os
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import bytes_of, corpus_of, texts_of, tiny_override, write_jsonl

from flows import disk
from flows.cram import checked_plan, cram, pipeline
from flows.plan import Plan, Step
from flows.recipes.recipe import resolve
from model.errors import InputError
from tasks.corpus.parts import link, parts_of, tables, writer
from tasks.decontaminate import Decontaminate, decontaminate
from tasks.deduplicate import Deduplicate, deduplicate
from tasks.download import Download, download
from tasks.pretrain import Pretrain, pretrain
from tasks.stage import Params, stage
from tasks.store import gc
from tasks.store.artifacts import Artifact, draft_of
from tasks.store.manifests import verify
from tasks.store.publish import discard

SAME = {
    "no method": (deduplicate, Deduplicate(methods=[])),
    "no search": (decontaminate, Decontaminate(data="probes")),
}


@pytest.mark.parametrize("kind", SAME)
def test_parts_that_stay_as_they_are_are_kept_once(store: Path, tmp_path: Path, toy_texts, monkeypatch, kind: str):
    stage, params = SAME[kind]
    corpus = corpus_of(tmp_path, toy_texts)
    parts_of(corpus)[0].chmod(0o640)  # as after a change of the umask
    made = stage.fn(params, corpus)
    assert parts_of(corpus)[0].stat().st_mode & 0o777 == 0o640
    assert len(parts_of(made)) == len(parts_of(corpus)) > 9
    assert all(part.samefile(corpus.path / part.name) for part in parts_of(made))
    files = bytes_of(made)
    discard(made)
    verify(corpus)
    monkeypatch.setattr(os, "link", lambda *_: os.stat("/nowhere"))  # an error of the system
    copied = stage.fn(params, corpus)
    assert bytes_of(copied) == files
    discard(corpus)
    assert texts_of(copied) == toy_texts


def test_what_is_written_in_place_of_a_linked_part_leaves_the_other_name_alone(store, tmp_path: Path, toy_texts):
    corpus = corpus_of(tmp_path, toy_texts)
    part = parts_of(corpus)[0]
    out = tmp_path / "part.parquet"
    link(part, out)
    assert out.samefile(part)
    with writer(out) as file:
        file.write_table(next(tables(part)).slice(0, 1))
    verify(corpus)


def test_a_run_that_does_not_fit_is_refused_and_what_is_there_is_not_counted(
    store: Path, tmp_path: Path, toy_texts: list[str], monkeypatch, caplog
):
    shard = write_jsonl(tmp_path / "toy.jsonl", toy_texts * 40)
    there = SimpleNamespace()
    monkeypatch.setattr(disk, "SHOWN", 0)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: there)
    caplog.set_level("INFO", "flows.disk")
    plan = checked_plan("demo", tiny_override(shard), "tokenize", {}, [])

    def said(free: int) -> str:
        there.free = free
        try:
            disk.check(plan)
        except InputError as error:
            return str(error)
        return caplog.records[-1].levelname

    def fewest() -> int:
        there.free = 10**9
        free = math.ceil(disk.check(plan))
        assert "needs about" in said(free - 1)
        assert [said(free), said(int(free / 0.81)), said(int(free / 0.79))] == ["WARNING", "WARNING", "INFO"]
        return free

    free = fewest()
    # download, deduplicate and filter (the probes need no search), and the sequences, which are first in parts too
    assert free == pytest.approx(shard.stat().st_size * (3 * 0.38 + 2 * 0.45), rel=0.01)
    for words in ("about 11", "download 2", str(store), "--set download.megabytes=4"):
        assert words in said(free - 1)
    with pytest.raises(InputError, match="of disk"):
        cram.fn("demo", tiny_override(shard), "tokenize")
    first, second, *_ = plan.steps
    half = draft_of(first.artifact) / "part-00000.parquet"
    half.parent.mkdir(parents=True)
    half.write_bytes(bytes(100_000))
    assert fewest() == pytest.approx(free - 100_000, abs=2)
    for step in (first, second):
        step.task.fn(*step.arguments)
    parts = sum(part.stat().st_size for part in parts_of(second.artifact))
    assert fewest() == pytest.approx(parts * (0.38 + 2 * 0.45) / 0.38, rel=0.01), "filter and tokenize are left"
    assert gc.make_hollow(second.artifact, [part.name for part in parts_of(second.artifact)], tmp_path / "trash")
    assert fewest() == pytest.approx(parts * (0.38 + 2 * 0.45) / 0.38, rel=0.01), "also if it is hollow"
    before = fewest()
    old = sum(file.stat().st_size for file in second.artifact.path.iterdir())
    second.is_anew = True  # as by --refresh, which deletes its artifact first
    assert fewest() == pytest.approx(before + disk.need(second)[0] - old, abs=2)


FILES = {"source": "files", "documents": 0, "files": ["a.txt", "b.jsonl.zst", "c.CSV.gz", "d.parquet"]}
MIXTURE = {"wikipedia": 3, "books": 1}


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ({}, 45.6e9),
        ({"source": "c4", "documents": 9000, "megabytes": 2}, 2e6),
        ({"source": MIXTURE, "documents": 1000}, 1000 * 4 / (3 / 3200 + 1 / 400_000)),  # three quarters of the text
        ({"source": MIXTURE}, 33e9),
        ({"source": "books"}, 12e9),
        ({"source": "pile", "documents": 0, "words": 10_000_000}, 66e6),
        (FILES, 10_500),
    ],
)
def test_the_text_is_known_by_limits_or_by_the_sizes_of_files(tmp_path, monkeypatch, source: dict, text: float):
    monkeypatch.chdir(tmp_path)
    for name in source.get("files", ()):
        Path(name).write_bytes(b"text " * 200)
    assert disk.text_of(Download(**source)) == pytest.approx(text)


def planned_without_sources(*overrides: dict) -> tuple[Plan, Step]:
    """A plan of runs of which nothing is made, and the last one's pretraining; no source is looked at."""
    plan = Plan("report", {}, [])
    for override in overrides:
        page = plan.trace(pipeline, resolve("crammed-bert", override), run=(str(override),))
    for step in plan.steps:
        step.artifact = Artifact(stage=step.stage, key="none")
    return plan, page.find_upstream("pretrain")


def test_models_are_counted_by_their_parameters_or_by_the_files_of_the_one_that_is_given(store: Path):
    plan, bert = planned_without_sources({})
    weights = 4 * 119.6e6
    assert disk.need(bert) == pytest.approx((weights, 2 * 3 * weights), rel=0.01), "two checkpoints of AdamW"
    tuned = [step for step in plan.steps if step.stage == "finetune"]
    models = [disk.need(step)[0] for step in tuned]
    assert sorted(models) == pytest.approx([0] * 32 + [weights] * 8, rel=0.01), "of each task that of the first seed"
    given = Artifact(stage="pretrain", key="given")
    given.path.mkdir(parents=True)
    (given.path / "model.safetensors").write_bytes(bytes(500))
    bert.given = (given,)
    assert {disk.need(step)[0] for step in tuned} == {0, 500}


@pytest.mark.parametrize("sources", [["pile"], ["pile", "c4"]], ids=len)
def test_less_text_is_advised_only_where_it_helps(store: Path, monkeypatch: pytest.MonkeyPatch, sources: list[str]):
    monkeypatch.setattr(Step, "is_made", False)

    def check(free: float, **download: int) -> None:
        monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=int(free)))
        disk.check(planned_without_sources(*({"download": {"source": source} | download} for source in sources))[0])

    with pytest.raises(InputError) as advice:
        check(12e9 * len(sources))
    check(12e9 * len(sources), megabytes=int(re.search(r"megabytes=(\d+)", str(advice.value))[1]))
    with pytest.raises(InputError, match="Free some, or set CRAM_ARTIFACTS"):
        check(4e9)  # the models alone need more


def test_other_stages_are_passed_over(store: Path):
    @stage(version=1)
    def own(params: Params, given: list[Artifact], out: Path) -> dict:
        return {}

    plan = Plan("report", {}, [])
    joined = plan.trace(lambda: own(Params(), [download(Download(megabytes=size)) for size in (1, 2)]))
    unique, bert = plan.trace(lambda: (deduplicate(Deduplicate(), joined), pretrain(Pretrain(), joined)))
    for step in plan.recorded:
        step.artifact = Artifact(stage=step.stage, key="none")
    assert disk.need(unique)[0] == pytest.approx(0.38 * 3e6)
    assert disk.need(bert) == (0, 0)


def test_a_store_that_may_not_be_read_is_an_input_error(store: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: os.listdir("/dev/null/store"))  # root may read all
    with pytest.raises(InputError, match="This run can't continue: Not a directory"):
        disk.check(Plan("report", {}, []))
