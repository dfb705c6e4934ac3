"""The loop of finetuning: its steps beside plain torch, batches, predictions, numbers of few bits."""

import math
from dataclasses import replace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from toys import LENGTH, VOCABULARY, encoder, machine_of

from model import bert, finetuning
from model.errors import InputError
from model.finetuning import Classifier
from model.settings import Finetuning, Kind

HERE = machine_of()
QUICK = Finetuning(learning_rate=3e-3, epochs=5)


def tune(model: Classifier, given: finetuning.Examples, settings: Finetuning = QUICK, seed: int = 0, **changes):
    """Finetune on the CPU; `changes`: other arguments than the usual."""
    usual = {"machine": HERE, "report": lambda *_: None}
    return finetuning.finetune(model, given, settings, seed=seed, **usual | changes)


def classifier(classes: int, seed: int = 0, dropout: float = 0.1, kind: Kind = "classes", **axes) -> Classifier:
    return Classifier(encoder(**axes), classes, dropout, seed, kind=kind)


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


def examples_of(kind: Kind, count: int, seed: int, classes: int = 3) -> finetuning.Examples:
    """The same inputs. Several labels: which of 6 to 8 are in them. Tokens: one of three by the token before; [CLS],
    [SEP] and a quarter of the others have none."""
    given = examples(count, seed, classes)
    if kind == "multilabel":
        labels = np.array([[(given.input(row) == which).any() for which in (6, 7, 8)] for row in range(count)])
        return replace(given, labels=labels.astype(np.float32))
    if kind == "tokens":
        without = (given.tokens < 5) | (given.tokens % 4 == 0)
        return replace(given, labels=np.where(without, -100, np.roll(given.tokens, 1) % 3).astype(np.int32))
    return given


def test_the_seed_gives_the_predictions():
    train = examples(64, 0, classes=3)
    unseen = examples(50, 1, classes=3)
    scores = []
    for drawn, seed in enumerate((0, 0, 1)):
        torch.randn(drawn + 1)  # whatever was drawn before
        model = classifier(3, seed)
        tune(model, train, Finetuning(epochs=2), seed)
        scores.append(finetuning.predict(model, unseen, HERE))
    assert scores[0].tobytes() == scores[1].tobytes()
    assert not np.allclose(scores[0], scores[2])


@pytest.mark.parametrize("work", [tune, finetuning.predict])
def test_cudnns_attention_which_plans_for_every_shape_is_off_and_stays_so_for_runs_in_other_threads(work):
    model = classifier(2)
    enabled = []
    before = torch.backends.cuda.cudnn_sdp_enabled()
    model.register_forward_pre_hook(lambda *_: enabled.append(torch.backends.cuda.cudnn_sdp_enabled()))
    torch.backends.cuda.enable_cudnn_sdp(True)
    try:
        work(model, examples(32, 0, classes=2), *(() if work is tune else (HERE,)))
        assert {*enabled} == {torch.backends.cuda.cudnn_sdp_enabled()} == {False}
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


@pytest.mark.parametrize("kind", ["classes", "tokens"])
def test_predictions_are_in_the_order_given_whatever_the_lengths(kind: Kind):
    model = classifier(3, kind=kind).eval()
    given = examples_of(kind, 150, 2)
    scores = finetuning.predict(model, given, HERE)
    with torch.no_grad():
        alone = torch.cat([model(torch.tensor(given.input(row)[None])).view(-1, 3) for row in range(150)]).numpy()
    alone = alone[given.labels >= 0] if kind == "tokens" else alone
    assert (scores.shape, scores.dtype, max(given.lengths)) == (alone.shape, np.float32, LENGTH)
    np.testing.assert_allclose(scores, alone, rtol=1e-5, atol=1e-6)
    assert len(np.unique(alone[:, 0])) > 100


@pytest.mark.parametrize("kind", ["classes", "multilabel", "tokens"])
def test_labels_go_with_their_inputs_and_stay_when_embeddings_are_dropped(kind: Kind):
    given = examples_of(kind, 40, 4)
    order = np.random.default_rng(5).permutation(40)
    shuffled = given.take(order)
    again = shuffled.take(np.argsort(order))
    for field in ("tokens", "ends", "labels"):
        assert np.array_equal(getattr(again, field), getattr(given, field)), field
    assert not np.array_equal(shuffled.labels, given.labels)
    model = classifier(3, kind=kind)
    before = finetuning.predict(model, given, HERE)
    kept = finetuning.keep_used(model.bert, {"validation": given})["validation"]
    assert np.array_equal(kept.labels, given.labels)
    assert model.bert.vocabulary < VOCABULARY
    np.testing.assert_allclose(finetuning.predict(model, kept, HERE), before, rtol=1e-5, atol=1e-6)
    for count in (0, 1):
        assert finetuning.predict(model, kept.take(np.arange(count)), HERE).shape[1:] == (3,)


def test_a_batch_whose_tokens_have_no_label_leaves_a_model_as_it_is():
    model = classifier(3, kind="tokens", dropout=0.0)
    given = examples_of("tokens", 16, 0)
    before = [parameter.clone() for parameter in model.parameters()]
    outcome = tune(model, replace(given, labels=np.full_like(given.labels, -100)))
    assert [epoch["loss"] for epoch in outcome.epochs] == [0.0] * 5
    assert all(map(torch.equal, before, model.parameters()))


def test_what_scores_say_is_by_kind():
    scores = np.array([[0.5, -1.0], [0.0, 2.0]], dtype=np.float32)
    expected = {"classes": [0, 1], "tokens": [0, 1], "multilabel": [[1, 0], [0, 1]], "regression": [0.5, 0.0]}
    assert {kind: finetuning.predictions(scores, kind).tolist() for kind in expected} == expected


def test_a_regression_on_standardised_labels_predicts_in_the_labels_units():
    model = classifier(1)
    given = examples(30, 0, classes=1)
    standardised = finetuning.predict(model, given, HERE)
    model.rescale(scale=25_000.0, shift=1.5e6)
    np.testing.assert_allclose(finetuning.predict(model, given, HERE), 25_000 * standardised + 1.5e6, rtol=1e-6)


def test_gradients_that_fp16_cannot_hold_are_not_lost(monkeypatch):
    means = {}
    step = torch.optim.AdamW.step

    def recording(self, *args):
        step(self, *args)
        means.setdefault(dtype, [state["exp_avg"].clone() for state in self.state.values()])

    monkeypatch.setattr(torch.optim.AdamW, "step", recording)
    for dtype in (torch.float32, torch.float16):
        model = classifier(2, dropout=0.0)
        with torch.no_grad():
            model.classifier.out.weight *= 1e-3
        tune(model, examples(16, 0, classes=2), Finetuning(epochs=1), machine=machine_of(dtype))
    for exact, ours in zip(means[torch.float32], means[torch.float16], strict=True):
        assert (exact - ours).norm() < 0.05 * exact.norm()


def test_an_epoch_has_each_example_once_in_an_order_of_its_own_and_little_padding():
    lengths = np.random.default_rng(1).integers(3, 40, 4008)
    seeded = np.random.default_rng(0)
    again = np.random.default_rng(0)
    first, second = (finetuning.batches(lengths, 16, seeded) for _ in range(2))
    assert (first.shape, len(np.unique(first))) == ((250, 16), 4000)
    assert (first == finetuning.batches(lengths, 16, again)).all()
    assert set(second.ravel()) != set(first.ravel()), "other examples are left out"
    assert not {frozenset(batch) for batch in first.tolist()} & {frozenset(batch) for batch in second.tolist()}
    widths = lengths[first].max(axis=1)
    assert 16 * widths.sum() < 1.05 * lengths[first].sum()
    assert abs(np.corrcoef(widths[1:], widths[:-1])[0, 1]) < 0.2


PLAIN_LOSSES = {
    "classes": F.cross_entropy,
    "regression": lambda scores, labels: ((scores[:, 0] - labels) ** 2).mean(),
    "multilabel": lambda scores, labels: -(labels * 2 - 1).mul(scores).sigmoid().log().mean(),
    "tokens": lambda scores, labels: F.cross_entropy(scores[labels >= 0], labels[labels >= 0].long()),
}


@pytest.mark.parametrize(
    ("kind", "axes"),
    [
        ("classes", {}),
        ("regression", {"positions": "rotary", "bias": True, "qkv_bias": True}),
        ("classes", {"norm_order": "post", "final_norm": False}),
        ("multilabel", {}),
        ("tokens", {}),
    ],
)
def test_training_is_that_of_a_plain_loop_with_torchs_adamw(kind, axes):
    """One input at a time, so without padding; the whole encoder for all tokens; AdamW without fused kernels."""
    classes = 1 if kind == "regression" else 3
    given = examples_of(kind, 45, 3, classes)
    settings = Finetuning(batch_size=8, epochs=2, learning_rate=1e-3, weight_decay=0.1, warmup=0.3)
    ours, plain = (classifier(classes, dropout=0.0, kind=kind, **axes) for _ in range(2))
    tune(ours, given, settings, seed=5)

    matrices, vectors = ([p for p in plain.parameters() if (p.ndim > 1) == wide] for wide in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, betas=(0.9, 0.98), eps=1e-6, fused=False, foreach=False)
    shuffle = np.random.default_rng(5)
    step = 0
    for _ in range(2):
        for rows in finetuning.batches(given.lengths, 8, shuffle):
            step += 1
            spent = step / 10 / 0.3
            left = (1 - step / 10) / 0.7
            falling = 0.5 - 0.5 * math.cos(math.pi * left)
            for group in adamw.param_groups:
                group["lr"] = 1e-3 * min(spent, falling if spent > 1 else 1)
            scores = []
            for row in rows:
                states = plain.bert.encode(torch.tensor(given.input(row)[None]))[0]
                read = states if kind == "tokens" else states[:1]
                scores.append(plain.classifier.out(torch.tanh(plain.classifier.dense(read))))
            PLAIN_LOSSES[kind](torch.cat(scores), torch.tensor(given.take(rows).labels)).backward()
            adamw.step()
            adamw.zero_grad()
    for (name, found), expected in zip(ours.state_dict().items(), plain.state_dict().values(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=2e-5, msg=name)


def test_an_outcome_has_steps_speed_and_each_epochs_mean_loss():
    reports = []
    given = examples(64, 0, classes=2)
    settings = Finetuning(epochs=3, learning_rate=1e-30)
    outcome = tune(classifier(2, dropout=0.0), given, settings, report=lambda *report: reports.append(report))
    assert outcome.examples_per_second == pytest.approx(12 * 16 / outcome.seconds)
    untrained = torch.tensor(finetuning.predict(classifier(2), given, HERE))
    expected = pytest.approx(F.cross_entropy(untrained, torch.tensor(given.labels)).item(), rel=1e-4)
    assert outcome.epochs == [{"epoch": epoch, "loss": expected} for epoch in (1, 2, 3)]
    assert [done for done, _ in reports] == [12 * 16]
    assert outcome.steps == finetuning.steps_of(64, settings) == 12


def test_answers_in_bf16_are_as_fine_as_in_fp32():
    model = classifier(1)
    given = examples(300, 0, classes=1)
    halves, exact = (
        finetuning.predict(model, given, replace(HERE, dtype=kind))[:, 0] for kind in (torch.bfloat16, torch.float32)
    )
    assert len(np.unique(halves)) > 0.9 * len(np.unique(exact)), "rounded to bf16 many would be the same"
    assert np.abs(halves - exact).max() < 0.05 * np.ptp(exact)


@pytest.mark.parametrize(("dtype", "measured"), [("bfloat16", 3.8), ("float32", 5.4)])
def test_the_memory_of_a_run_of_the_papers_model_is_not_underrated_nor_twice_what_it_is(dtype, measured):
    """GiB at the peak of a process on a CPU, of which some 0.4 are there before the model."""
    here = machine_of(getattr(torch, dtype))
    found = finetuning.memory(4 * 120_000_000, 16 * 128, 16 * 768, here) / 2**30
    assert measured - 0.4 < found < 2 * measured


def test_inputs_of_one_length_need_no_mask(monkeypatch):
    attend = Mock(wraps=bert.attend)
    monkeypatch.setattr(bert, "attend", attend)
    same = finetuning.Examples.of([[2, 7, 8, 3]] * 16, np.zeros(16, dtype=int))
    tune(classifier(2), same, Finetuning(epochs=1))
    assert [call.args[3] for call in attend.call_args_list] == [None]
