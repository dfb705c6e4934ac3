import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Event

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from model import InputError, attention, bert, finetuning
from model.machine import Machine
from model.settings import Architecture, Finetuning

SMALL = Architecture(layers=1, hidden=16, heads=2, intermediate=48)
VOCABULARY, LENGTH = 40, 16
CPU = Machine(torch.device("cpu"), torch.float32, False, 32)
QUICK = Finetuning(learning_rate=3e-3, epochs=5)
torch.set_num_threads(1)  # for so small a model


def tune(model: bert.Classifier, given: finetuning.Examples, settings: Finetuning = QUICK, seed: int = 0, **changes):
    """Finetune on the CPU; `changes`: other arguments than the usual."""
    usual = {"machine": CPU, "report": lambda *_: None}
    return finetuning.finetune(model, given, settings, seed=seed, **usual | changes)


def classifier(classes: int, seed: int = 0, dropout: float = 0.1, **axes) -> bert.Classifier:
    encoder = bert.Bert(SMALL.model_copy(update=axes), VOCABULARY, LENGTH, seed=1)
    return bert.Classifier(encoder, classes, dropout, seed)


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


@pytest.fixture
def cudnn_attention() -> Iterator[None]:
    """Torch may choose cuDNN's attention, as in a new process."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(True)
    yield
    torch.backends.cuda.enable_cudnn_sdp(before)


@pytest.mark.parametrize("work", [tune, finetuning.predict])
def test_cudnns_attention_which_plans_for_every_shape_is_not_used(work: Callable, cudnn_attention, monkeypatch):
    forward, enabled, longer_run = bert.Classifier.forward, [], []
    first, longer, given = classifier(2), classifier(2, seed=1), examples(32, 0, classes=2)
    rest = () if work is tune else (CPU,)
    both_run, first_ended = Event(), Event()

    def watched(self, *batch):
        if self is longer:
            both_run.set()
            first_ended.wait(60)
        elif not both_run.is_set():
            longer_run.append(beside.submit(work, longer, given, *rest))
            both_run.wait(60)
        enabled.append(torch.backends.cuda.cudnn_sdp_enabled())
        return forward(self, *batch)

    monkeypatch.setattr(bert.Classifier, "forward", watched)
    with ThreadPoolExecutor(1) as beside:
        try:
            work(first, given, *rest)
        finally:
            first_ended.set()
        longer_run[0].result()
    assert set(enabled) == {False}


@pytest.mark.parametrize(
    ("count", "settings"), [(15, {}), (16, {"choose": "best"}), (9, {"batch_size": 4, "choose": "best"})]
)
def test_too_few_examples_are_refused(count: int, settings: dict):
    with pytest.raises(InputError, match=r"(15|9) training examples.*finetune\.(batch_size|choose)"):
        tune(classifier(2), examples(count, 0, classes=2), Finetuning(**settings))


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


@pytest.mark.parametrize("kind", ["length", "random"])
def test_an_epoch_has_each_example_once_in_an_order_of_its_own_and_by_length_pads_little(kind):
    lengths, settings = np.random.default_rng(1).integers(3, 40, 4008), Finetuning(batches=kind)
    seeded, again = np.random.default_rng(0), np.random.default_rng(0)
    first, second = (finetuning.batches(lengths, settings, seeded) for _ in range(2))
    assert (first.shape, len(np.unique(first))) == ((250, 16), 4000)
    assert (first == finetuning.batches(lengths, settings, again)).all()
    assert set(second.ravel()) != set(first.ravel()), "other examples are left out"
    assert not {frozenset(batch) for batch in first.tolist()} & {frozenset(batch) for batch in second.tolist()}
    widths = lengths[first].max(axis=1)
    assert (16 * widths.sum() < 1.05 * lengths[first].sum()) == (kind == "length")
    assert abs(np.corrcoef(widths[1:], widths[:-1])[0, 1]) < 0.2


@pytest.mark.parametrize(
    ("classes", "schedule", "axes"),
    [
        (3, "cosine", {}),
        (1, "linear", {"positions": "rotary", "bias": True, "qkv_bias": True}),
        (3, "linear", {"norm_order": "post", "final_norm": False}),
    ],
)
def test_training_is_that_of_a_plain_loop_with_torchs_adamw(classes, schedule, axes):
    """One input at a time, so without padding; the whole encoder for all tokens; AdamW without fused kernels."""
    given = examples(45, 3, classes)
    settings = Finetuning(
        batch_size=8, epochs=2, learning_rate=1e-3, weight_decay=0.1, schedule=schedule, warmup=0.3, batches="random"
    )
    ours, plain = (classifier(classes, dropout=0.0, **axes) for _ in range(2))
    tune(ours, given, settings, seed=5)

    matrices, vectors = ([p for p in plain.parameters() if (p.ndim > 1) == wide] for wide in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, betas=(0.9, 0.98), eps=1e-6, fused=False, foreach=False)
    shuffle, step = np.random.default_rng(5), 0
    for _ in range(2):
        order = shuffle.permutation(45)
        for start in range(0, 40, 8):
            step += 1
            spent, left = step / 10 / 0.3, (1 - step / 10) / 0.7
            falling = 0.5 - 0.5 * math.cos(math.pi * left) if schedule == "cosine" else left
            for group in adamw.param_groups:
                group["lr"] = 1e-3 * min(spent, falling if spent > 1 else 1)
            scores = []
            for row in order[start : start + 8]:
                state = plain.bert.encode(torch.tensor(given.input(row)[None]))[:, 0]
                scores.append(plain.classifier.out(torch.tanh(plain.classifier.dense(state))))
            found, labels = torch.cat(scores), torch.tensor(given.labels[order[start : start + 8]])
            (F.cross_entropy(found, labels) if classes > 1 else ((found[:, 0] - labels) ** 2).mean()).backward()
            adamw.step()
            adamw.zero_grad()
    for (name, found), expected in zip(ours.state_dict().items(), plain.state_dict().values(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=2e-5, msg=name)


def scored(scores: list[float], model: bert.Classifier, given: finetuning.Examples, seed: int = 0):
    """Choose the epoch by these scores. Returns the outcome, the weights after each epoch, and the labels scored."""
    left, states, asked = iter(scores), [], []

    def score(labels: np.ndarray, predictions: np.ndarray) -> float:
        assert predictions.shape == labels.shape
        asked.append(labels.tolist())
        states.append({name: value.clone() for name, value in model.state_dict().items()})
        return next(left)

    settings = Finetuning(choose="best", epochs=len(scores), learning_rate=1e-3)
    return tune(model, given, settings, seed, score=score), states, asked


@pytest.mark.parametrize(
    ("scores", "best"), [([1.0, 3.0, 2.0], 1), ([0.5, 0.5, 0.5], 0), ([-2.0, -1.0, 0.0], 2), ([4.0, 3.0, 3.5], 0)]
)
def test_the_epoch_that_scores_best_is_kept_and_of_several_the_first(scores, best):
    model = classifier(2)
    outcome, states, _ = scored(scores, model, examples(64, 0, classes=2))
    assert outcome.chosen_epoch == best + 1
    assert [each["score"] for each in outcome.epochs] == scores
    for name, value in model.state_dict().items():
        assert torch.equal(value, states[best][name])
    assert not torch.equal(states[0]["classifier.out.weight"], states[1]["classifier.out.weight"])


def test_a_tenth_is_held_back_for_all_epochs_by_the_seed_and_not_trained_on(monkeypatch):
    given, loss_of, drawn = replace(examples(177, 0, classes=1), labels=np.arange(177)), finetuning.loss_of, []

    def recording(model, given, rows, *others):
        trained.extend(given.labels[rows].tolist())  # a label is the number of the example
        return loss_of(model, given, rows, *others)

    monkeypatch.setattr(finetuning, "loss_of", recording)
    for seed in (*range(10), 0):
        trained: list[int] = []
        first, second = scored([0.0, 0.0], classifier(1), given, seed)[2]
        assert first == second
        assert (len(first), len(trained)) == (17, 2 * 160)
        assert sorted(set(first) | set(trained)) == list(range(177))
        drawn.append(first)
    assert drawn[0] == drawn[10]
    assert len(set().union(*drawn)) > 90, "112 for ten independent draws, with a deviation of 4"


def test_an_outcome_has_steps_speed_and_each_epochs_mean_loss():
    reports, given = [], examples(64, 0, classes=2)
    settings = Finetuning(epochs=3, learning_rate=1e-30)
    outcome = tune(classifier(2, dropout=0.0), given, settings, report=lambda *report: reports.append(report))
    assert outcome.examples_per_second == pytest.approx(12 * 16 / outcome.seconds)
    untrained = torch.tensor(finetuning.predict(classifier(2), given, CPU))
    expected = pytest.approx(F.cross_entropy(untrained, torch.tensor(given.labels)).item(), rel=1e-4)
    assert outcome.epochs == [{"epoch": epoch, "loss": expected} for epoch in (1, 2, 3)]
    assert [done for done, _ in reports] == [12 * 16]
    assert (outcome.steps, outcome.chosen_epoch, finetuning.steps_of(64, settings)) == (12, 3, 12)


@pytest.mark.parametrize(("graphs", "fewest", "most"), [((), 1, 4), (("cpu",), 2, 2)], ids=["dynamic", "graphs"])
def test_a_run_is_compiled_if_told_to_and_learns_the_same(graphs, fewest, most, monkeypatch):
    """Of any length, with and without padding; or as CUDA graphs, once for each of two static lengths."""
    monkeypatch.setattr(finetuning, "WITH_GRAPHS", graphs)
    traced, compiler = [], torch.compile

    def tracing(graph, _, **__):
        traced.append(graph)
        return graph.forward  # not to wait for C++

    def losses(here: Machine, words: int = VOCABULARY) -> list[float]:
        model = bert.Classifier(bert.Bert(SMALL, words, LENGTH, seed=1), 2, 0.0, seed=0)
        return [epoch["loss"] for epoch in tune(model, examples(64, 0, classes=2), machine=here).epochs]

    monkeypatch.setattr(torch, "compile", lambda *given, **named: compiler(*given, **named, backend=tracing))
    eager = losses(CPU)
    assert losses(replace(CPU, compiles=True)) == eager
    assert not traced
    always = replace(CPU, compiles=True, compiles_always=True)
    assert losses(always) == pytest.approx(eager, rel=1e-4)
    once = len(traced)
    assert fewest <= once <= most
    with torch._dynamo.config.patch(recompile_limit=once):  # of one module
        for run in (1, 2):
            losses(always, VOCABULARY + run)
            assert len(traced) == (run + 1) * once, "what others compiled does not keep it from being compiled"


@pytest.mark.parametrize("longest", [1, 8, 9, 60, 64, 65, 127, 128, 500, 512])
def test_compiled_batches_have_few_lengths_that_hold_every_input(longest: int):
    for most in (longest, 512):
        widths = finetuning.compiled_widths(longest, most)
        assert len(widths) <= 8, "torch compiles no more shapes of a function"
        assert (np.diff(widths) > 0).all()
        assert longest <= widths[-1] <= most
        assert (widths[:-1] % 8 == 0).all()


def test_a_batch_is_padded_to_the_first_width_that_holds_it():
    given = finetuning.Examples.of([[2, 7, 3], [2, 7, 8, 9, 3], [2] * 8], np.zeros(3))
    for rows, width in (([0, 1], 5), ([0], 5), ([2], 8)):
        tokens_BS, padded = given.batch(np.array(rows), CPU.device, np.array([5, 8, 16]))
        assert tokens_BS.shape == (len(rows), width)
        assert padded, "whether or not it is, so that each width is compiled once"
        assert [ids[ids != bert.PAD].tolist() for ids in tokens_BS] == [given.input(row).tolist() for row in rows]


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
