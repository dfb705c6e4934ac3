"""Models that pretraining keeps on its way, at numbers of tokens. Those at tenths of the budget: test_cli_export."""

import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from test_pretraining import (  # fixtures among them
    CONSTANT,
    Stop,
    build,
    clock,  # noqa: F401
    forked,
    outcome,
    seconds_of_budget,
    sending,
    stop,
    stopped,
    trained,
    unmeasured_machine,  # noqa: F401
)
from toys import LENGTH, encoder

from model import export, files, kept
from model.bert import Bert
from model.files import TOKENS
from model.settings import Training

NUMBERS = [0, 1, 2, 4, 8]  # that the runs here keep
WEIGHTS = "model.safetensors"


@pytest.fixture(autouse=True)
def small_million(monkeypatch):
    """A million is as many tokens as 8 sequences have, and a run keeps models at so many."""
    monkeypatch.setattr(files, "MILLION", 8 * LENGTH)
    monkeypatch.setenv("CRAM_KEEP_TOKENS", "1")


def numbers_in(folder: Path) -> list[int]:
    """The numbers of the models that were kept in the folder of a run."""
    return sorted(int(path.name) for path in (folder / TOKENS).glob("*"))


def weights(folder: Path) -> dict[int, bytes]:
    """The files of the models that were kept, by number."""
    return {number: (folder / TOKENS / str(number) / WEIGHTS).read_bytes() for number in numbers_in(folder)}


def test_a_run_keeps_the_models_of_the_first_steps_that_reach_so_many_tokens_and_is_the_same(tmp_path, monkeypatch):
    run = build(tmp_path / "run")
    after = {0: encoder(run.corpus.vocabulary).state_dict()}

    def remember(fraction: float, note: str) -> None:
        after[run.spent.tokens] = {name: value.clone() for name, value in run.bert.state_dict().items()}

    run.run(remember)
    assert numbers_in(run.folder) == NUMBERS
    for number in NUMBERS:
        model = export.load(run.folder / TOKENS / str(number)).state_dict()
        expected = after[min(tokens for tokens in after if tokens >= number * files.MILLION)]
        assert all(torch.equal(value, expected[name]) for name, value in model.items())
    monkeypatch.delenv("CRAM_KEEP_TOKENS")
    other = trained(tmp_path / "other")
    assert outcome(other) == outcome(run)
    assert numbers_in(other.folder) == []


def test_a_run_stopped_after_every_step_keeps_the_same_models(tmp_path):
    expected = weights(trained(tmp_path / "whole").folder)
    steps = len((tmp_path / "whole" / "metrics.jsonl").read_text().splitlines())
    for _ in range(steps - 1):
        stopped(tmp_path / "run", 1)
    assert weights(trained(tmp_path / "run").folder) == expected


def half_written_at(call: int, end: Callable) -> Callable:
    """`export.save`, which at its call of this number writes half a file and ends the run."""
    save = export.save
    calls = iter(range(1, 100))

    def save_or_end(bert: Bert, folder: Path) -> None:
        if next(calls) == call:
            (folder / WEIGHTS).write_bytes(b"half")
            end()
        save(bert, folder)

    return save_or_end


@pytest.mark.parametrize("call", [1, 2, 4])
@pytest.mark.parametrize("is_killed", [False, True])
def test_a_run_that_ends_as_it_writes_a_model_keeps_it_when_it_resumes(
    tmp_path, monkeypatch, call: int, is_killed: bool
):
    expected = weights(trained(tmp_path / "whole").folder)
    folder = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(export, "save", half_written_at(call, sending(signal.SIGKILL) if is_killed else stop))
        if is_killed:
            assert forked(lambda: trained(folder, seconds=0.0)) == [-signal.SIGKILL]
        else:
            with pytest.raises(Stop):
                trained(folder, seconds=0.0)
    assert (folder / TOKENS / str(NUMBERS[call - 1]) / WEIGHTS).read_bytes() == b"half"
    assert weights(trained(folder).folder) == expected


def test_a_half_written_model_is_dropped_by_a_run_that_resumes_and_keeps_none(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(export, "save", half_written_at(4, stop))
        with pytest.raises(Stop):
            trained(tmp_path, seconds=0.0)
    assert numbers_in(tmp_path) == [0, 1, 2, 4]
    monkeypatch.delenv("CRAM_KEEP_TOKENS")
    assert numbers_in(trained(tmp_path).folder) == [0, 1, 2]


def test_a_run_that_resumes_keeps_none_of_the_numbers_that_it_has_passed(tmp_path, monkeypatch):
    monkeypatch.delenv("CRAM_KEEP_TOKENS")
    stopped(tmp_path, 6)
    monkeypatch.setenv("CRAM_KEEP_TOKENS", "1")
    passed = kept.millions_reached(build(tmp_path).spent.tokens)
    assert passed in NUMBERS[1:-1]
    assert numbers_in(trained(tmp_path).folder) == [number for number in NUMBERS if number > passed]


def test_writing_a_model_is_off_the_clock(tmp_path, clock, monkeypatch):  # noqa: F811
    monkeypatch.setattr(export, "save", clock.taking(500, export.save))
    settings = seconds_of_budget(100) | CONSTANT
    spent = trained(tmp_path / "kept", **settings).spent
    assert len(numbers_in(tmp_path / "kept")) > 3
    monkeypatch.delenv("CRAM_KEEP_TOKENS")
    other = trained(tmp_path / "other", **settings).spent
    assert (spent.seconds, spent.step, spent.tokens) == (other.seconds, other.step, other.tokens)


@pytest.mark.parametrize(
    ("tokens", "reached", "most"), [(0, 0, 1), (7, 0, 1), (8, 1, 2), (16, 2, 3), (31, 2, 3), (32, 4, 4), (64, 8, 5)]
)
def test_as_many_models_are_expected_as_a_budget_of_tokens_keeps(tokens: int, reached: int, most: int):
    assert kept.millions_reached(tokens * LENGTH) == reached
    assert kept.most_by_tokens(Training(budget=tokens * LENGTH, budget_unit="tokens"), 1000) == most
