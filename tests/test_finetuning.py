"""The loop of finetuning: its steps beside plain torch, batches, predictions, numbers of few bits."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from model import InputError, attention, bert, finetuning
from model.classifier import Classifier
from model.machine import Machine
from model.settings import Architecture, Finetuning

SMALL = Architecture(layers=1, hidden=16, heads=2, intermediate=48)
VOCABULARY, LENGTH = 40, 16
CPU = Machine(torch.device("cpu"), torch.float32, False, 32)
QUICK = Finetuning(learning_rate=3e-3, epochs=5)
torch.set_num_threads(1)  # for so small a model


def tune(model: Classifier, given: finetuning.Examples, settings: Finetuning = QUICK, seed: int = 0, **changes):
    """Finetune on the CPU; `changes`: other arguments than the usual."""
    usual = {"machine": CPU, "report": lambda *_: None}
    return finetuning.finetune(model, given, settings, seed=seed, **usual | changes)


def classifier(classes: int, seed: int = 0, dropout: float = 0.1, **axes) -> Classifier:
    encoder = bert.Bert(SMALL.model_copy(update=axes), VOCABULARY, LENGTH, seed=1)
    return Classifier(encoder, classes, dropout, seed)


def examples(count: int, seed: int, classes: int) -> finetuning.Examples:
    """Inputs of 5 to LENGTH tokens; the label is which of the ids 6 to 10 is in them, as a class or a number."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, classes if classes > 1 else 5, count)
    tokens = []
    for label in labels:
        ids = rng.integers(15, VOCABULARY, rng.integers(2, LENGTH - 2)).tolist()
        ids.insert(int(rng.integers(len(ids) + 1)), 6 + int(label))
        tokens.append([2, *ids, 3])
    return finetuning.Examples.of(tokens, labels if classes > 1 else labels / 2 - 1)


def test_the_seed_gives_the_predictions():
    train, unseen, scores = examples(64, 0, classes=3), examples(50, 1, classes=3), []
    for drawn, seed in enumerate((0, 0, 1)):
        torch.randn(drawn + 1)  # whatever was drawn before
        model = classifier(3, seed)
        tune(model, train, Finetuning(epochs=2), seed)
        scores.append(finetuning.predict(model, unseen, CPU))
    assert scores[0].tobytes() == scores[1].tobytes()
    assert not np.allclose(scores[0], scores[2])


@pytest.mark.parametrize("work", [tune, finetuning.predict])
def test_cudnns_attention_which_plans_for_every_shape_is_off_and_stays_so_for_runs_in_other_threads(work, monkeypatch):
    forward, enabled, before = Classifier.forward, [], torch.backends.cuda.cudnn_sdp_enabled()

    def watched(self, *batch):
        enabled.append(torch.backends.cuda.cudnn_sdp_enabled())
        return forward(self, *batch)

    monkeypatch.setattr(Classifier, "forward", watched)
    torch.backends.cuda.enable_cudnn_sdp(True)
    try:
        work(classifier(2), examples(32, 0, classes=2), *(() if work is tune else (CPU,)))
        assert {*enabled, torch.backends.cuda.cudnn_sdp_enabled()} == {False}
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def test_fewer_examples_than_a_batch_are_refused():
    with pytest.raises(InputError, match=r"15 training examples.*finetune\.batch_size"):
        tune(classifier(2), examples(15, 0, classes=2))


def test_a_finetuning_loss_that_is_not_finite_is_refused():
    model = classifier(2)
    with torch.no_grad():
        model.classifier.out.bias[0] = float("inf")
    with pytest.raises(InputError, match=r"loss is nan at step 5 of 5.*finetune\.learning_rate"):
        tune(model, examples(16, 0, classes=2))


def test_predictions_are_in_the_order_given_whatever_the_lengths():
    model, given = classifier(3).eval(), examples(150, 2, classes=3)
    scores = finetuning.predict(model, given, CPU)
    assert (scores.shape, max(given.lengths)) == ((150, 3), LENGTH)
    with torch.no_grad():
        alone = torch.cat([model(torch.tensor(given.input(row)[None])) for row in range(150)]).numpy()
    np.testing.assert_allclose(scores, alone, rtol=1e-5, atol=1e-6)
    assert len(np.unique(alone[:, 0])) > 100


def test_gradients_that_fp16_cannot_hold_are_not_lost(monkeypatch):
    means, step = {}, torch.optim.AdamW.step

    def recording(self, *args):
        step(self, *args)
        means.setdefault(dtype, [state["exp_avg"].clone() for state in self.state.values()])

    monkeypatch.setattr(torch.optim.AdamW, "step", recording)
    for dtype in (torch.float32, torch.float16):
        model = classifier(2, dropout=0.0)
        with torch.no_grad():
            model.classifier.out.weight *= 1e-3
        here = Machine(torch.device("cpu"), dtype, False, 32)
        tune(model, examples(16, 0, classes=2), Finetuning(epochs=1), machine=here)
    for exact, ours in zip(means[torch.float32], means[torch.float16], strict=True):
        assert (exact - ours).norm() < 0.05 * exact.norm()


def test_an_epoch_has_each_example_once_in_an_order_of_its_own_and_little_padding():
    lengths = np.random.default_rng(1).integers(3, 40, 4008)
    seeded, again = np.random.default_rng(0), np.random.default_rng(0)
    first, second = (finetuning.batches(lengths, 16, seeded) for _ in range(2))
    assert (first.shape, len(np.unique(first))) == ((250, 16), 4000)
    assert (first == finetuning.batches(lengths, 16, again)).all()
    assert set(second.ravel()) != set(first.ravel()), "other examples are left out"
    assert not {frozenset(batch) for batch in first.tolist()} & {frozenset(batch) for batch in second.tolist()}
    widths = lengths[first].max(axis=1)
    assert 16 * widths.sum() < 1.05 * lengths[first].sum()
    assert abs(np.corrcoef(widths[1:], widths[:-1])[0, 1]) < 0.2


@pytest.mark.parametrize(
    ("classes", "axes"),
    [
        (3, {}),
        (1, {"positions": "rotary", "bias": True, "qkv_bias": True}),
        (3, {"norm_order": "post", "final_norm": False}),
    ],
)
def test_training_is_that_of_a_plain_loop_with_torchs_adamw(classes, axes):
    """One input at a time, so without padding; the whole encoder for all tokens; AdamW without fused kernels."""
    given = examples(45, 3, classes)
    settings = Finetuning(batch_size=8, epochs=2, learning_rate=1e-3, weight_decay=0.1, warmup=0.3)
    ours, plain = (classifier(classes, dropout=0.0, **axes) for _ in range(2))
    tune(ours, given, settings, seed=5)

    matrices, vectors = ([p for p in plain.parameters() if (p.ndim > 1) == wide] for wide in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, betas=(0.9, 0.98), eps=1e-6, fused=False, foreach=False)
    shuffle, step = np.random.default_rng(5), 0
    for _ in range(2):
        for rows in finetuning.batches(given.lengths, 8, shuffle):
            step += 1
            spent, left = step / 10 / 0.3, (1 - step / 10) / 0.7
            falling = 0.5 - 0.5 * math.cos(math.pi * left)
            for group in adamw.param_groups:
                group["lr"] = 1e-3 * min(spent, falling if spent > 1 else 1)
            scores = []
            for row in rows:
                state = plain.bert.encode(torch.tensor(given.input(row)[None]))[:, 0]
                scores.append(plain.classifier.out(torch.tanh(plain.classifier.dense(state))))
            found, labels = torch.cat(scores), torch.tensor(given.labels[rows])
            (F.cross_entropy(found, labels) if classes > 1 else ((found[:, 0] - labels) ** 2).mean()).backward()
            adamw.step()
            adamw.zero_grad()
    for (name, found), expected in zip(ours.state_dict().items(), plain.state_dict().values(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=2e-5, msg=name)


def test_an_outcome_has_steps_speed_and_each_epochs_mean_loss():
    reports, given = [], examples(64, 0, classes=2)
    settings = Finetuning(epochs=3, learning_rate=1e-30)
    outcome = tune(classifier(2, dropout=0.0), given, settings, report=lambda *report: reports.append(report))
    assert outcome.examples_per_second == pytest.approx(12 * 16 / outcome.seconds)
    untrained = torch.tensor(finetuning.predict(classifier(2), given, CPU))
    expected = pytest.approx(F.cross_entropy(untrained, torch.tensor(given.labels)).item(), rel=1e-4)
    assert outcome.epochs == [{"epoch": epoch, "loss": expected} for epoch in (1, 2, 3)]
    assert [done for done, _ in reports] == [12 * 16]
    assert outcome.steps == finetuning.steps_of(64, settings) == 12


def test_answers_in_bf16_are_as_fine_as_in_fp32():
    model, given = classifier(1), examples(300, 0, classes=1)
    halves, exact = (
        finetuning.predict(model, given, replace(CPU, dtype=kind))[:, 0] for kind in (torch.bfloat16, torch.float32)
    )
    assert len(np.unique(halves)) > 0.9 * len(np.unique(exact)), "rounded to bf16 many would be the same"
    assert np.abs(halves - exact).max() < 0.05 * np.ptp(exact)


@pytest.mark.parametrize(
    ("dtype", "batch", "measured"), [("bfloat16", 16, 3.8), ("bfloat16", 48, 7.9), ("float32", 16, 5.4)]
)
def test_the_memory_of_a_run_of_the_papers_model_is_not_underrated_nor_twice_what_it_is(dtype, batch, measured):
    """GiB at the peak of a process on a CPU, of which some 0.4 are there before the model."""
    here = replace(CPU, dtype=getattr(torch, dtype))
    found = finetuning.memory(4 * 120_000_000, batch * 128, 16 * 768, here) / 2**30
    assert measured - 0.4 < found < 2 * measured


def test_inputs_of_one_length_need_no_mask(monkeypatch):
    masks, attend = [], attention.attend

    def recording(q, k, v, mask, dropout):
        masks.append(mask)
        return attend(q, k, v, mask, dropout)

    monkeypatch.setattr(attention, "attend", recording)
    same = finetuning.Examples.of([[2, 7, 8, 3]] * 16, np.zeros(16, dtype=int))
    tune(classifier(2), same, Finetuning(epochs=1))
    assert masks == [None]
