import functools
import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from model import InputError, bert, training
from model import checkpoint as saving
from model.machine import Machine
from model.settings import Architecture, Finetuning, Training

SMALL = Architecture(layers=1, hidden=16, heads=2, intermediate=32)
VOCABULARY, SPECIALS, MASK_ID = 40, 5, 4
LENGTH = 16
TIMES = ("seconds", "tokens_per_second")
torch.set_num_threads(1)  # for so small a model; several that wait for a busy core take a hundred times as long


class Stop(BaseException):
    """What a user or a scheduler sends: no Exception."""


def corpus(sequences: int = 50, heldout: int = 5, length: int = LENGTH) -> training.Corpus:
    """Sequences that begin with their own number, then count up, from some number on, over and over."""
    starts = np.random.default_rng(0).integers(0, 20, sequences + heldout)
    rows = SPECIALS + (starts[:, None] + np.arange(length)) % 20
    rows = rows.astype(np.uint16)
    return training.Corpus(rows[:sequences], rows[sequences:], VOCABULARY, MASK_ID, SPECIALS)


def numbered(sequences: int) -> training.Corpus:
    """Sequences that hold their own number only."""
    rows = SPECIALS + np.repeat(np.arange(sequences)[:, None], LENGTH, axis=1).astype(np.uint16)
    return training.Corpus(rows, rows[:3], SPECIALS + sequences, MASK_ID, SPECIALS)


def pretraining(
    folder: Path, data: training.Corpus | None = None, micro_batch: int = 2, **changes
) -> training.Pretraining:
    """A run of a small model: about 12 steps of up to 8 sequences, unless told otherwise."""
    data = data or corpus()
    folder.mkdir(exist_ok=True)
    settings = {"budget": 70 * LENGTH, "budget_unit": "tokens", "batch_size": 8, "learning_rate": 0.01} | changes
    model = bert.Bert(SMALL, data.vocabulary, data.length, seed=1)
    cpu = Machine(torch.device("cpu"), torch.float32, False, micro_batch)
    return training.Pretraining(model, Training(**settings), data, cpu, folder)


def quiet(fraction: float, note: str) -> None:
    """Report to nobody."""


def metrics(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / saving.METRICS).read_text().splitlines()]


def outcome(run: training.Pretraining) -> tuple[dict, list, list]:
    """All that a run leaves, but for its times: weights as bytes, metrics, evaluations."""
    weights = {name: value.numpy().tobytes() for name, value in run.bert.state_dict().items()}
    timeless = [
        [{k: v for k, v in row.items() if k not in TIMES} for row in rows]
        for rows in (metrics(run.folder), run.spent.evaluations)
    ]
    return weights, *timeless


def stop_at(step: int):
    """A report that stops the run after this step."""
    calls = iter(range(1, 1000))

    def report(fraction: float, note: str) -> None:
        if next(calls) == step:
            raise Stop

    return report


def raise_at(call: int, function, error: BaseException):
    """The function, but its call of this number raises the error; the calls after it do not."""
    calls = iter(range(1, 100_000))

    @functools.wraps(function)
    def raising(*args, **kwargs):
        if next(calls) == call:
            raise error
        return function(*args, **kwargs)

    return raising


@pytest.fixture(scope="module")
def unstopped(tmp_path_factory) -> tuple[dict, list, list]:
    """The outcome of the run that `pretraining` describes, never stopped."""
    run = pretraining(tmp_path_factory.mktemp("unstopped"))
    run.run(quiet)
    return outcome(run)


class FakeTime:
    """A clock that moves when it is told to."""

    def __init__(self) -> None:
        self.now = 5000.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch) -> FakeTime:
    """Time in which a micro-batch of training takes 1 s, a held-out loss 1,000 s, and nothing else any."""
    time, mask, heldout_loss = FakeTime(), training.masking.mask, training.heldout_loss

    def slow_mask(*args):
        time.now += 1 if len(args) == 6 else 0
        return mask(*args)

    def slow_heldout_loss(*args):
        time.now += 1000
        return heldout_loss(*args)

    monkeypatch.setattr(training, "time", time)
    monkeypatch.setattr(training.masking, "mask", slow_mask)
    monkeypatch.setattr(training, "heldout_loss", slow_heldout_loss)
    return time


@pytest.fixture
def seen(monkeypatch) -> list[list[int]]:
    """The first token of each sequence of each micro-batch that is masked for training, as the run goes on."""
    batches, mask = [], training.masking.mask

    def recording(tokens, *args):
        if len(args) == 5:
            batches.append(tokens[:, 0].tolist())
        return mask(tokens, *args)

    monkeypatch.setattr(training.masking, "mask", recording)
    return batches


# Resume


def test_a_run_stopped_after_any_step_ends_as_if_never_stopped(tmp_path, unstopped):
    steps = len(unstopped[1])
    assert steps >= 10
    for step in range(1, steps + 1):
        folder = tmp_path / str(step)
        with pytest.raises(Stop):
            pretraining(folder).run(stop_at(step))
        resumed = pretraining(folder)
        assert resumed.spent.step == step
        resumed.run(quiet)
        assert outcome(resumed) == unstopped


def test_a_run_stopped_after_every_step_ends_as_if_never_stopped(tmp_path, unstopped):
    for _ in unstopped[1]:
        with pytest.raises(Stop):
            pretraining(tmp_path).run(stop_at(1))
    last = pretraining(tmp_path)
    last.run(quiet)
    assert outcome(last) == unstopped


@pytest.mark.parametrize(
    ("place", "call"),
    [
        ("training.masking.mask", 13),
        ("torch.Tensor.backward", 12),
        ("torch.nn.utils.clip_grad_norm_", 5),
        ("torch.optim.AdamW.step", 5),
        ("torch.optim.AdamW.zero_grad", 5),
        ("training.heldout_loss", 4),
        ("training.json.dumps", 5),
        ("saving.save_file", 1),
    ],
)
@pytest.mark.parametrize("checkpoints", ["each step", "on stop only"])
def test_a_run_stopped_within_a_step_ends_as_if_never_stopped(tmp_path, unstopped, place, call, checkpoints):
    owner, name = place.rsplit(".", 1)
    owner = functools.reduce(
        getattr, owner.split(".")[1:], {"training": training, "saving": saving}.get(owner.split(".")[0], torch)
    )
    seconds = 0.0 if checkpoints == "each step" else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, raise_at(call, getattr(owner, name), Stop()))
        with pytest.raises(Stop):
            pretraining(tmp_path).run(stop_at(6), seconds)
    resumed = pretraining(tmp_path)
    assert [row["step"] for row in metrics(tmp_path)] == list(range(1, resumed.spent.step + 1))
    resumed.run(quiet)
    assert outcome(resumed) == unstopped


KILLED = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import test_training as t

def half_a_save(tensors, path, metadata):
    global saves
    saves += 1
    if saves == 5:
        path.write_bytes(b"half")
        os.kill(os.getpid(), signal.SIGKILL)
    return save_file(tensors, path, metadata)

saves, save_file = 0, t.saving.save_file
t.saving.save_file = half_a_save
t.pretraining(Path(sys.argv[2])).run(t.quiet, 0.0)
"""


def test_a_run_killed_while_it_saves_ends_as_if_never_stopped(tmp_path, unstopped):
    command = [sys.executable, "-c", KILLED, str(Path(__file__).parent), str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    killed = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert len(metrics(tmp_path)) == 5  # the checkpoint has 4
    resumed = pretraining(tmp_path)
    assert resumed.spent.step == len(metrics(tmp_path)) == 4
    resumed.run(quiet)
    assert outcome(resumed) == unstopped


def test_a_failed_save_keeps_the_old_checkpoint(tmp_path, monkeypatch):
    with pytest.raises(Stop):
        pretraining(tmp_path).run(stop_at(3))
    before = (tmp_path / saving.CHECKPOINT).read_bytes()
    save_file = saving.save_file

    def disk_full(tensors, path, metadata):
        path.write_bytes(b"junk")
        raise OSError("No space left on device")

    monkeypatch.setattr(saving, "save_file", disk_full)
    with pytest.raises(OSError, match="No space left"):
        pretraining(tmp_path).run(quiet, 0.0)
    assert (tmp_path / saving.CHECKPOINT).read_bytes() == before
    assert {path.name for path in tmp_path.iterdir()} == {saving.CHECKPOINT, saving.METRICS}
    monkeypatch.setattr(saving, "save_file", save_file)
    assert pretraining(tmp_path).spent.step == 3


def test_a_finished_run_trains_no_further(tmp_path, unstopped, seen):
    run = pretraining(tmp_path)
    run.run(quiet)
    training.checkpoint(tmp_path, run.bert, run.adamw, run.spent)
    seen.clear()
    again = pretraining(tmp_path)
    again.run(quiet)
    assert not seen
    assert outcome(again) == unstopped


def test_a_resumed_run_keeps_its_micro_batch_and_reads_on_where_it_stopped(tmp_path, seen):
    with pytest.raises(Stop):
        pretraining(tmp_path, numbered(50), micro_batch=2).run(stop_at(4))
    read = [number for batch in seen for number in batch]
    seen.clear()
    pretraining(tmp_path, numbered(50), micro_batch=8).run(quiet)
    assert {len(batch) for batch in seen} == {2}
    read += [number for batch in seen for number in batch]
    assert read == [SPECIALS + index % 50 for index in range(len(read))]


# Budget, schedules, data


def test_a_run_ends_within_one_step_of_its_token_budget(tmp_path):
    for budget in (LENGTH, 70 * LENGTH, 70 * LENGTH + 1, 100 * LENGTH):
        run = pretraining(tmp_path / str(budget), budget=budget)
        spent = run.run(quiet)
        last = metrics(run.folder)[-1]
        assert spent.tokens == last["tokens"] >= budget > last["tokens"] - last["batch"] * LENGTH


def test_hours_are_on_the_clock_without_heldout_evaluation(tmp_path, clock):
    run = pretraining(tmp_path, budget=200 / 3600, budget_unit="hours")
    spent = run.run(quiet)
    rows = metrics(tmp_path)
    batches = sum(row["batch"] // 2 for row in rows)
    assert len(spent.evaluations) > 5
    assert spent.seconds == rows[-1]["seconds"] == batches  # one second each, and nothing else
    assert 200 <= spent.seconds < 200 + rows[-1]["batch"] // 2
    assert [row["tokens_per_second"] for row in rows] == [2 * LENGTH] * len(rows)


def test_a_resumed_run_has_the_hours_that_were_left(tmp_path, clock):
    settings = {"budget": 100 / 3600, "budget_unit": "hours"}
    whole = pretraining(tmp_path / "whole", **settings)
    whole.run(quiet)
    steps = len(metrics(tmp_path / "whole"))
    for step in (1, steps // 2, steps - 1):
        folder = tmp_path / str(step)
        with pytest.raises(Stop):
            pretraining(folder, **settings).run(stop_at(step))
        clock.now += 10_000  # while nothing runs
        resumed = pretraining(folder, **settings)
        assert resumed.spent.seconds == metrics(folder)[-1]["seconds"]
        resumed.run(quiet)
        assert outcome(resumed) == outcome(whole)
        assert resumed.spent.seconds == whole.spent.seconds


def test_the_clock_stands_still_when_a_heldout_evaluation_is_stopped(tmp_path, clock, monkeypatch):
    def stopped(*args):
        clock.now += 1000
        raise Stop

    run = pretraining(tmp_path, budget=100 / 3600, budget_unit="hours")
    monkeypatch.setattr(training, "heldout_loss", stopped)
    with pytest.raises(Stop):
        run.run(quiet)
    assert pretraining(tmp_path).spent.seconds == 0


def test_checkpoints_and_reports_are_on_the_clock(tmp_path, clock, monkeypatch):
    checkpoint = training.checkpoint

    def slow_checkpoint(*args):
        clock.now += 7
        checkpoint(*args)

    def slow_report(fraction: float, note: str) -> None:
        clock.now += 3

    monkeypatch.setattr(training, "checkpoint", slow_checkpoint)
    run = pretraining(tmp_path, budget=100 / 3600, budget_unit="hours", batch_ramp=0.0)
    spent = run.run(slow_report, 0.0)
    assert spent.step == math.ceil(100 / (4 + 7 + 3))
    assert spent.seconds == 14 * spent.step - 10  # to the end of the last step


def test_checkpoints_are_a_tenth_of_the_budget_apart(tmp_path, clock, monkeypatch):
    saved = []
    monkeypatch.setattr(training, "checkpoint", lambda *args: saved.append(clock.now))
    pretraining(tmp_path, budget=400 / 3600, budget_unit="hours").run(quiet)
    assert 8 <= len(saved) <= 10


def test_the_learning_rate_is_the_triangle_of_the_budget_spent_before_each_step(tmp_path):
    run = pretraining(tmp_path, budget=400 * LENGTH)
    run.run(quiet)
    rows = metrics(tmp_path)
    before = [0, *(row["tokens"] for row in rows[:-1])]
    spent = [tokens / (400 * LENGTH) for tokens in before]
    assert [row["lr"] for row in rows] == pytest.approx([0.01 * min(0.25 + s, 4 - 4 * s) for s in spent])
    assert min(row["lr"] for row in rows) > 0
    assert rows[-1]["lr"] <= 0.01 * 4 * 8 / 400
    assert max(row["lr"] for row in rows) > 0.0097


def test_the_learning_rate_used_is_the_one_recorded(tmp_path, monkeypatch):
    used, step = [], torch.optim.AdamW.step

    def recording(self, *args):
        used.append([group["lr"] for group in self.param_groups])
        return step(self, *args)

    monkeypatch.setattr(torch.optim.AdamW, "step", recording)
    pretraining(tmp_path).run(quiet)
    assert used == [[row["lr"]] * 2 for row in metrics(tmp_path)]


def test_the_learning_rate_is_not_negative_when_the_clock_runs_out_within_a_step(tmp_path, clock):
    run = pretraining(tmp_path, budget=33.5 / 3600, budget_unit="hours")
    run.run(quiet)
    assert all(0 < row["lr"] <= 0.01 for row in metrics(tmp_path))


def test_metrics_have_one_row_a_step(tmp_path, unstopped):
    rows = unstopped[1]
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    assert [row["tokens"] for row in rows] == np.cumsum([row["batch"] * LENGTH for row in rows]).tolist()
    assert all(row["gradient_norm"] > 0 for row in rows)
    assert abs(rows[0]["loss"] - math.log(VOCABULARY)) < 0.2


def test_the_batch_grows_micro_batch_by_micro_batch_to_the_recipes(tmp_path):
    run = pretraining(tmp_path, budget=200 * LENGTH)
    run.run(quiet)
    rows = metrics(tmp_path)
    spent = np.array([row["tokens"] - row["batch"] * LENGTH for row in rows]) / (200 * LENGTH)
    assert [row["batch"] for row in rows] == [2 * min(4, math.floor(4 * s / 0.6) + 1) for s in spent]
    assert {row["batch"] for row in rows} == {2, 4, 6, 8}


@pytest.mark.parametrize(("batch", "micro_batch", "used"), [(6, 4, 3), (7, 5, 1), (8, 100, 8), (8, 8, 8), (1, 4, 1)])
def test_the_batch_is_the_recipes_whatever_the_machines_micro_batch(tmp_path, seen, batch, micro_batch, used):
    run = pretraining(tmp_path, micro_batch=micro_batch, batch_size=batch, batch_ramp=0.0, budget=30 * LENGTH)
    run.run(quiet)
    assert {row["batch"] for row in metrics(tmp_path)} == {batch}
    assert {len(rows) for rows in seen} == {used}
    assert len(seen) == batch // used * math.ceil(30 / batch)


def test_the_micro_batch_does_not_change_the_step(tmp_path, monkeypatch):
    def first_tokens(tokens, count, *args):  # masks that do not depend on how the batch is cut
        positions = torch.arange(count).expand(len(tokens), -1)
        return tokens.scatter(1, positions, MASK_ID), positions, tokens[:, :count]

    monkeypatch.setattr(training.masking, "mask", first_tokens)
    runs = [pretraining(tmp_path / str(n), micro_batch=n, batch_ramp=0.0, budget=32 * LENGTH) for n in (1, 2, 8)]
    for run in runs:
        run.run(quiet)
    for run in runs[1:]:
        for mine, theirs in zip(metrics(runs[0].folder), metrics(run.folder), strict=True):
            assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
            assert mine["gradient_norm"] == pytest.approx(theirs["gradient_norm"], rel=1e-4)


def test_gradients_are_clipped(tmp_path, monkeypatch):
    norms, step = [], torch.optim.AdamW.step

    def recording(self, *args):
        norms.append(math.sqrt(sum(p.grad.square().sum().item() for g in self.param_groups for p in g["params"])))
        return step(self, *args)

    monkeypatch.setattr(torch.optim.AdamW, "step", recording)
    pretraining(tmp_path, clip=0.05).run(quiet)
    assert all(row["gradient_norm"] > 0.05 for row in metrics(tmp_path))  # as they were before
    assert norms == pytest.approx([0.05] * len(norms), rel=1e-3)


def test_sequences_are_read_in_order_and_again_from_the_first(tmp_path, seen):
    run = pretraining(tmp_path, numbered(19), budget=100 * LENGTH)
    spent = run.run(quiet)
    read = [number for batch in seen for number in batch]
    assert len(read) == spent.tokens // LENGTH > 5 * 19
    assert read == [SPECIALS + index % 19 for index in range(len(read))]


def test_a_corpus_smaller_than_a_batch_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"7 sequences of 16 tokens, fewer than one batch of 8\. Give more text"):
        pretraining(tmp_path, corpus(sequences=7))


def test_a_corpus_with_nothing_held_out_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"No sequence of 16 tokens is held out\. Raise"):
        pretraining(tmp_path, corpus(heldout=0))


def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_checkpoint(tmp_path):
    run = pretraining(tmp_path)
    kept = []

    def spoil(fraction: float, note: str) -> None:
        if run.spent.step == 3:
            kept.append((tmp_path / saving.CHECKPOINT).read_bytes())
            with torch.no_grad():
                run.bert.norm.weight[0] = float("nan")

    with pytest.raises(InputError, match=r"At step 4 the loss is nan .*Lower pretrain\.learning_rate"):
        run.run(spoil, 0.0)
    assert (tmp_path / saving.CHECKPOINT).read_bytes() == kept[0]
    assert [row["step"] for row in metrics(tmp_path)] == [1, 2, 3]
    resumed = pretraining(tmp_path)
    assert resumed.spent.step == 3
    assert all(value.isfinite().all() for value in resumed.bert.state_dict().values())


# Held-out loss


def test_the_heldout_loss_goes_down(tmp_path):
    run = pretraining(tmp_path, corpus(sequences=64, heldout=20), micro_batch=16, batch_size=16, budget=20_000 * LENGTH)
    spent = run.run(quiet)
    losses = [row["heldout_loss"] for row in spent.evaluations]
    assert len(losses) == training.EVALUATIONS + 1
    assert abs(losses[0] - math.log(VOCABULARY)) < 0.2
    assert losses[-1] < 0.5 < losses[0] / 2
    fractions = [row["fraction"] for row in spent.evaluations]
    assert fractions[0] == 0
    assert fractions[-1] == 1
    assert all(0 <= f - due / 10 < 0.02 for due, f in enumerate(fractions))


def test_the_heldout_loss_is_the_same_each_time_and_for_every_micro_batch_and_after_loading(tmp_path):
    data = corpus(heldout=training.HELDOUT_BATCH + 6)
    run = pretraining(tmp_path, data)
    run.run(quiet)
    machines = [Machine(torch.device("cpu"), torch.float32, False, n) for n in (1, 2, 64)]
    losses = {training.heldout_loss(run.bert, data, here) for here in machines}
    bert.save(run.bert, tmp_path)
    losses.add(training.heldout_loss(bert.load(tmp_path), data, machines[0]))
    assert losses == {run.spent.evaluations[-1]["heldout_loss"]}


def test_the_heldout_loss_is_the_mean_over_sequences_with_15_percent_masked(monkeypatch):
    data, masked, mask = corpus(heldout=training.HELDOUT_BATCH + 6), [], training.masking.mask
    model = bert.Bert(SMALL, VOCABULARY, LENGTH).train()
    model.set_dropout(0.5)
    monkeypatch.setattr(training.masking, "mask", lambda *args: masked.append(mask(*args)) or masked[-1])
    loss = training.heldout_loss(model, data, Machine(torch.device("cpu"), torch.float32, False, 1))
    assert model.training
    model.eval()
    inputs, positions, labels = (torch.cat(parts) for parts in zip(*masked, strict=True))
    original = torch.from_numpy(data.heldout.astype(np.int64))
    assert ((inputs == MASK_ID).sum(dim=1) == round(0.15 * LENGTH)).all()
    assert torch.equal(inputs.scatter(1, positions, labels), original)
    with torch.no_grad():
        scores = model.logits(model.encode(inputs))
    each = F.cross_entropy(scores.transpose(1, 2), original, reduction="none")[inputs == MASK_ID]
    assert loss == pytest.approx(each.mean().item(), rel=1e-5)


# Finetuning

CPU = Machine(torch.device("cpu"), torch.float32, False, 32)
QUICK = Finetuning(learning_rate=3e-3, epochs=5)


def classifier(classes: int, seed: int = 0, length: int = LENGTH) -> bert.Classifier:
    return bert.Classifier(bert.Bert(SMALL, VOCABULARY, length, seed=1), classes, dropout=0.1, seed=seed)


def examples(count: int, seed: int, classes: int) -> training.Examples:
    """Inputs of 4 to 14 tokens; the label is which of the ids 6 to 10 is in them, as a class or a number."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, classes if classes > 1 else 5, count)
    tokens = []
    for label in labels:
        ids = rng.integers(15, VOCABULARY, rng.integers(2, 12)).tolist()
        ids.insert(int(rng.integers(len(ids) + 1)), 6 + int(label))
        tokens.append([2, *ids, 3])
    return training.Examples(tokens, labels if classes > 1 else labels / 2 - 1)


def test_finetuning_learns_classes():
    model = classifier(2)
    training.finetune(model, examples(400, 0, classes=2), QUICK, CPU, 0, lambda *_: None)
    unseen = examples(200, 1, classes=2)
    assert (training.predict(model, unseen, CPU).argmax(axis=1) == unseen.labels).mean() > 0.95


def test_finetuning_learns_numbers():
    model = classifier(1)
    training.finetune(model, examples(600, 0, classes=1), QUICK, CPU, 0, lambda *_: None)
    unseen = examples(200, 1, classes=1)
    scores = training.predict(model, unseen, CPU)[:, 0]
    assert np.corrcoef(scores, unseen.labels)[0, 1] > 0.95
    assert ((scores - unseen.labels) ** 2).mean() < 0.1  # of 0.5 for the mean


def test_each_task_warms_up_over_a_tenth_of_its_own_steps(monkeypatch):
    rates, set_learning_rate = [], training.optimizer.set_learning_rate

    def recording(adamw, rate):
        rates.append(rate)
        set_learning_rate(adamw, rate)

    monkeypatch.setattr(training.optimizer, "set_learning_rate", recording)
    settings = Finetuning(batch_size=4, epochs=5)
    for count in (80, 16, 43):  # one after the other, as tasks are
        rates.clear()
        training.finetune(classifier(2), examples(count, 0, classes=2), settings, CPU, 0, lambda *_: None)
        steps = 5 * (count // 4)
        assert len(rates) == steps
        peak = rates.index(max(rates))
        assert peak + 1 == round(0.1 * steps)
        assert rates[peak] == pytest.approx(4e-5)
        assert rates[:peak] == pytest.approx([4e-5 * (n + 1) / (0.1 * steps) for n in range(peak)])
        assert rates[peak:] == sorted(rates[peak:], reverse=True)
        assert rates[-1] == pytest.approx(0, abs=1e-12)
        assert min(rates) >= 0


def test_every_epoch_has_its_own_order_and_no_example_twice(monkeypatch):
    chosen, batch = [], training.Examples.batch

    def recording(self, rows, *args):
        chosen.append(rows.tolist())
        return batch(self, rows, *args)

    monkeypatch.setattr(training.Examples, "batch", recording)
    settings = Finetuning(batch_size=8, epochs=2)
    training.finetune(classifier(2), examples(35, 0, classes=2), settings, CPU, 0, lambda *_: None)
    assert [len(rows) for rows in chosen] == [8] * 8
    epochs = [[row for rows in part for row in rows] for part in (chosen[:4], chosen[4:])]
    assert all(len(set(epoch)) == 32 and set(epoch) <= set(range(35)) for epoch in epochs)
    assert epochs[0] != epochs[1]
    assert epochs[0] != sorted(epochs[0])


def test_the_seed_gives_the_predictions():
    train, unseen = examples(64, 0, classes=3), examples(50, 1, classes=3)

    def scores(seed: int) -> np.ndarray:
        torch.randn(seed + 1 + len(results))  # whatever was drawn before
        model = classifier(3, seed)
        training.finetune(model, train, Finetuning(epochs=2), CPU, seed, lambda *_: None)
        return training.predict(model, unseen, CPU)

    results: list[np.ndarray] = []
    for seed in (0, 0, 1):
        results.append(scores(seed))
    assert results[0].tobytes() == results[1].tobytes()
    assert not np.allclose(results[0], results[2])


def test_fewer_examples_than_a_batch_are_refused():
    with pytest.raises(InputError, match="15 training examples, fewer than one batch of 16"):
        training.finetune(classifier(2), examples(15, 0, classes=2), QUICK, CPU, 0, lambda *_: None)


def test_a_finetuning_loss_that_is_not_finite_is_refused():
    model = classifier(2)
    with torch.no_grad():
        model.out.bias[0] = float("inf")
    with pytest.raises(InputError, match=r"The loss is nan at step 5 of 5\. Lower finetune\.learning_rate"):
        training.finetune(model, examples(16, 0, classes=2), QUICK, CPU, 0, lambda *_: None)


def test_predictions_are_in_the_order_given_whatever_the_lengths():
    model, given = classifier(3).eval(), examples(150, 2, classes=3)
    scores = training.predict(model, given, CPU)
    assert scores.shape == (150, 3)
    with torch.no_grad():
        alone = torch.cat([model(torch.tensor([ids])) for ids in given.tokens]).numpy()
    np.testing.assert_allclose(scores, alone, rtol=1e-5, atol=1e-6)
    assert len({row.tobytes() for row in alone}) > 100


@pytest.mark.parametrize("length", [16, 20])
def test_inputs_may_be_as_long_as_the_model(length):
    model = classifier(2, length=length)
    tokens = [[2, *range(10, 10 + length - 2), 3], [2, 7, 3]] * 8
    given = training.Examples(tokens, np.array([0, 1] * 8))
    training.finetune(model, given, QUICK, CPU, 0, lambda *_: None)
    scores = training.predict(model, given, CPU)
    assert (scores[::2] == scores[0]).all()
    assert (scores[1::2] == scores[1]).all()


def test_inputs_are_padded_to_a_multiple_of_eight():
    given = training.Examples([[2, 7, 3], [2, 7, 8, 9, 10, 11, 12, 13, 3]], np.array([0, 1]))
    batch = given.batch(np.array([1, 0]), 128, torch.device("cpu"))
    assert batch.tolist() == [[2, 7, 8, 9, 10, 11, 12, 13, 3, *[0] * 7], [2, 7, 3, *[0] * 13]]


# Compiling


def test_a_run_goes_on_without_a_compiler_that_fails(tmp_path, monkeypatch, caplog, unstopped):
    def refuses(*args, **kwargs):
        raise RuntimeError("raised:\nno compiler here" + "\nand more" * 50)

    def fails_when_called(*args, **kwargs):
        return refuses

    for number, compiler in enumerate((refuses, fails_when_called)):
        caplog.clear()
        monkeypatch.setattr(torch, "compile", compiler)
        run = pretraining(tmp_path / str(number))
        run.machine = Machine(torch.device("cpu"), torch.float32, True, 2, compiles_always=True)
        run.run(quiet)
        assert "torch.compile failed here (raised: no compiler here and more" in caplog.text
        assert len(caplog.text) < 500
        assert run.forward is run.bert
        assert outcome(run) == unstopped


def test_trying_the_compiler_changes_nothing_that_is_trained(tmp_path, monkeypatch, unstopped):
    called = SimpleNamespace(count=0)

    def compiles(module, **settings):
        assert settings == {"fullgraph": True, "dynamic": False}
        called.count += 1
        return module

    monkeypatch.setattr(torch, "compile", compiles)
    run = pretraining(tmp_path)
    run.machine = Machine(torch.device("cpu"), torch.float32, True, 2, compiles_always=True)
    run.run(quiet)
    assert called.count == 1
    assert outcome(run) == unstopped


@pytest.mark.parametrize(
    ("machine", "budget", "compiles"),
    [
        (Machine(torch.device("cpu"), torch.float32, True, 2), {"budget": 0.4, "budget_unit": "hours"}, False),
        (Machine(torch.device("cpu"), torch.float32, True, 2), {"budget": 0.5, "budget_unit": "hours"}, True),
        (Machine(torch.device("cpu"), torch.float32, True, 2), {"budget": 1e7, "budget_unit": "tokens"}, False),
        (Machine(torch.device("cpu"), torch.float32, True, 2), {"budget": 2e7, "budget_unit": "tokens"}, True),
        (Machine(torch.device("cpu"), torch.float32, False, 2), {"budget": 24, "budget_unit": "hours"}, False),
        (Machine(torch.device("cpu"), torch.float32, True, 2, True), {"budget": 1.0, "budget_unit": "tokens"}, True),
    ],
)
def test_a_cpu_compiles_where_it_pays_or_where_it_is_told_to(tmp_path, machine, budget, compiles):
    run = pretraining(tmp_path, **budget)
    run.machine = machine
    assert run.compiles() is compiles


def test_a_checkpoint_that_cannot_be_read_is_told(tmp_path):
    with pytest.raises(Stop):
        pretraining(tmp_path).run(stop_at(3))
    (tmp_path / saving.CHECKPOINT).write_bytes(b"junk")
    with pytest.raises(InputError, match=r"checkpoint\.safetensors is no checkpoint .* refresh"):
        pretraining(tmp_path)
