"""The disk: parts that don't change are kept once, and a run that doesn't fit is refused before it starts."""

import os
import shutil
from bisect import bisect_left
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import bytes_of, corpus_of, texts_of, tiny_override, write_jsonl

from flows import disk
from flows.cram import add, cram, planned
from flows.plan import Plan
from flows.recipes import resolve
from model import InputError
from tasks.corpus.parts import link, parts_of, tables, writer
from tasks.decontaminate import Decontaminate, decontaminate
from tasks.deduplicate import Deduplicate, deduplicate
from tasks.download import Download
from tasks.store import Artifact, discard, draft_of, verify

SAME = {
    "no method": (deduplicate, Deduplicate(methods=[])),
    "no search": (decontaminate, Decontaminate(data="probes")),
}


@pytest.mark.parametrize("kind", SAME)
def test_parts_that_stay_as_they_are_are_kept_once(store: Path, tmp_path: Path, toy_texts, monkeypatch, kind: str):
    (stage, params), corpus = SAME[kind], corpus_of(tmp_path, toy_texts)
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
    link(part := parts_of(corpus)[0], out := tmp_path / "part.parquet")
    assert out.samefile(part)
    with writer(out) as file:
        file.write_table(next(tables(part)).slice(0, 1))
    verify(corpus)


def test_a_run_that_does_not_fit_is_refused_and_what_is_there_is_not_counted(
    store: Path, tmp_path: Path, toy_texts: list[str], monkeypatch, caplog
):
    shard, there = write_jsonl(tmp_path / "toy.jsonl", toy_texts * 40), SimpleNamespace()
    monkeypatch.setattr(disk, "SHOWN", 0)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: there)
    caplog.set_level("INFO", "flows.disk")
    plan = planned("demo", tiny_override(shard), "tokenize", {}, [])

    def said(free: int) -> str:
        there.free = free
        try:
            disk.check(plan)
        except InputError as error:
            return str(error)
        return caplog.records[-1].levelname

    def fewest() -> int:
        free = bisect_left(range(10**8), True, key=lambda free: len(said(free)) < 10)
        assert [said(free), said(int(free / 0.81)), said(int(free / 0.79))] == ["WARNING", "WARNING", "INFO"]
        return free

    free = fewest()
    # download, deduplicate and filter (the probes need no search), and the sequences, which are first in parts too
    assert free == pytest.approx(shard.stat().st_size * (3 * 0.38 + 2 * 0.45), rel=0.01)
    for words in ("about 11", "download 2", str(store), '--override \'{"download": {"megabytes": 4}}\''):
        assert words in said(free - 1)
    with pytest.raises(InputError, match="needs about 11"):
        cram.fn("demo", tiny_override(shard), "tokenize")
    first, second, *_ = plan.made
    half = draft_of(plan.made[first]) / "part-00000.parquet"
    half.parent.mkdir(parents=True)
    half.write_bytes(bytes(100_000))
    assert fewest() == pytest.approx(free - 100_000, abs=2)
    for step in (first, second):
        step.task.fn(*plan.arguments(step))
    parts = sum(part.stat().st_size for part in parts_of(plan.made[second]))
    assert fewest() == pytest.approx(parts * (0.38 + 2 * 0.45) / 0.38, rel=0.01), "filter and tokenize are left"


FILES = {"source": "files", "documents": 0, "files": ["a.txt", "b.jsonl.zst", "c.CSV.gz", "d.parquet"]}


@pytest.mark.parametrize(
    ("source", "text"), [({}, 45.6e9), ({"source": "c4", "documents": 9000, "megabytes": 2}, 2e6), (FILES, 10_500)]
)
def test_the_text_is_known_by_limits_or_by_the_sizes_of_files(tmp_path, monkeypatch, source: dict, text: float):
    monkeypatch.chdir(tmp_path)
    for name in source.get("files", ()):
        Path(name).write_bytes(b"text " * 200)
    assert disk.text_of(Download(**source)) == text


def test_models_are_counted_by_their_parameters(store: Path):
    plan, weights = Plan("report", {}, []), 4 * 119.6e6
    bert = add(plan, resolve("crammed-bert", {}))["pretrain"]
    plan.made = {step: Artifact(stage=step.stage, key="none") for step in plan.steps}
    assert disk.need(plan, bert) == pytest.approx((weights, 2 * 3 * weights), rel=0.01), "two checkpoints of AdamW"
    models = [disk.need(plan, step)[0] for step in plan.steps if step.stage == "finetune"]
    assert sorted(models) == pytest.approx([0] * 32 + [weights] * 8, rel=0.01), "of each task that of the first seed"
