import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from model import InputError, bert, finetuning
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


def classifier(classes: int, seed: int = 0, length: int = LENGTH, dropout: float = 0.1, **axes) -> bert.Classifier:
    encoder = bert.Bert(SMALL.model_copy(update=axes), VOCABULARY, length, seed=1)
    return bert.Classifier(encoder, classes, dropout, seed)


def examples(count: int, seed: int, classes: int) -> finetuning.Examples:
    """Inputs of 4 to 14 tokens; the label is which of the ids 6 to 10 is in them, as a class or a number."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, classes if classes > 1 else 5, count)
    tokens = []
    for label in labels:
        ids = rng.integers(15, VOCABULARY, rng.integers(2, 12)).tolist()
        ids.insert(int(rng.integers(len(ids) + 1)), 6 + int(label))
        tokens.append([2, *ids, 3])
    return finetuning.Examples.of(tokens, labels if classes > 1 else labels / 2 - 1)


@pytest.mark.parametrize("classes", [2, 1])
def test_finetuning_learns_classes_and_numbers(classes: int):
    model, unseen = classifier(classes), examples(200, 1, classes)
    tune(model, examples(600, 0, classes))
    scores = finetuning.predict(model, unseen, CPU)
    if classes == 2:
        assert (finetuning.predictions(scores) == unseen.labels).mean() > 0.95
    else:
        assert np.corrcoef(scores[:, 0], unseen.labels)[0, 1] > 0.95
        assert ((finetuning.predictions(scores) - unseen.labels) ** 2).mean() < 0.1, "0.5 for the mean"


def test_each_task_warms_up_over_a_tenth_of_its_own_steps(monkeypatch):
    rates, set_rates = [], finetuning.optimizer.set_rates

    def recording(optimizers, multiplier):
        set_rates(optimizers, multiplier)
        ((rate,),) = ({group["lr"] for group in optimizer.param_groups} for optimizer in optimizers)
        rates.append(rate)

    monkeypatch.setattr(finetuning.optimizer, "set_rates", recording)
    for count in (80, 16, 43):  # one after the other, as tasks are
        rates.clear()
        tune(classifier(2), examples(count, 0, classes=2), Finetuning(batch_size=4, epochs=5))
        steps = 5 * (count // 4)
        peak = round(0.1 * steps)
        assert rates[:peak] == pytest.approx([4e-5 * (n + 1) / (0.1 * steps) for n in range(peak)])
        assert rates[peak - 1 :] == sorted(rates[peak - 1 :], reverse=True)
        assert (len(rates), rates[-1]) == (steps, pytest.approx(0, abs=1e-12))
        assert min(rates) >= 0


def test_the_seed_gives_the_predictions():
    train, unseen, scores = examples(64, 0, classes=3), examples(50, 1, classes=3), []
    for drawn, seed in enumerate((0, 0, 1)):
        torch.randn(drawn + 1)  # whatever was drawn before
        model = classifier(3, seed)
        tune(model, train, Finetuning(epochs=2), seed)
        scores.append(finetuning.predict(model, unseen, CPU))
    assert scores[0].tobytes() == scores[1].tobytes()
    assert not np.allclose(scores[0], scores[2])


@pytest.mark.parametrize(
    ("count", "settings", "words"),
    [
        (15, {}, "15 training examples.*batch of 16"),
        (16, {"choose": "best"}, "15 training examples.*batch of 16"),
        (9, {"batch_size": 4, "choose": "best"}, "9 training examples.*tenth"),
    ],
)
def test_too_few_examples_are_refused(count: int, settings: dict, words: str):
    with pytest.raises(InputError, match=words):
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
    assert scores.shape == (150, 3)
    with torch.no_grad():
        alone = torch.cat([model(torch.tensor(given.input(row)[None])) for row in range(150)]).numpy()
    np.testing.assert_allclose(scores, alone, rtol=1e-5, atol=1e-6)
    assert len({row.tobytes() for row in alone}) > 100


@pytest.mark.parametrize("length", [16, 20])
def test_inputs_may_be_as_long_as_the_model(length):
    model, tokens = classifier(2, length=length), [[2, *range(10, 10 + length - 2), 3], [2, 7, 3]] * 8
    given = finetuning.Examples.of(tokens, np.array([0, 1] * 8))
    tune(model, given)
    scores = finetuning.predict(model, given, CPU)
    assert (scores[::2] == scores[0]).all()
    assert (scores[1::2] == scores[1]).all()


def test_examples_are_taken_in_order_and_padded_to_the_longest_of_a_batch():
    tokens = [[2, 7, 3], [2, 7, 8, 9, 3], [2, 8, 3]]
    given = finetuning.Examples.of(tokens, np.array([0, 1, 2]))
    batch, padded = given.batch(np.array([1, 0]), torch.device("cpu"))
    assert (batch.tolist(), padded) == ([[2, 7, 8, 9, 3], [2, 7, 3, 0, 0]], True)
    batch, padded = given.batch(np.array([2, 0]), torch.device("cpu"))
    assert (batch.tolist(), padded) == ([[2, 8, 3], [2, 7, 3]], False)
    taken = given.take(np.array([2, 1]))
    assert [taken.input(row).tolist() for row in range(2)] == [tokens[2], tokens[1]]
    assert (taken.labels.tolist(), len(given.take(np.array([], int)))) == ([2, 1], 0)


def test_gradients_that_fp16_cannot_hold_are_not_lost(monkeypatch):
    means, step = {}, torch.optim.AdamW.step

    def recording(self, *args):
        step(self, *args)
        means.setdefault(dtype, [state["exp_avg"].clone() for state in self.state.values()])

    monkeypatch.setattr(torch.optim.AdamW, "step", recording)
    for dtype in (torch.float32, torch.float16):
        model = classifier(2)
        model.bert.set_dropout(0.0)
        model.classifier.dropout.p = 0.0
        with torch.no_grad():
            model.classifier.out.weight *= 1e-3
        here = Machine(torch.device("cpu"), dtype, False, 32)
        tune(model, examples(16, 0, classes=2), Finetuning(epochs=1), machine=here)
    for exact, ours in zip(means[torch.float32], means[torch.float16], strict=True):
        assert (exact - ours).norm() < 0.05 * exact.norm()


@pytest.mark.parametrize("kind", ["length", "random"])
def test_each_epoch_has_its_own_order_and_each_example_once_but_for_a_last_smaller_batch(kind):
    lengths, settings = np.random.default_rng(1).integers(3, 40, 2005), Finetuning(batch_size=10, batches=kind)
    seeded, again = np.random.default_rng(0), np.random.default_rng(0)
    first, second = (finetuning.batches(lengths, settings, seeded) for _ in range(2))
    assert (first.shape, len(np.unique(first))) == ((200, 10), 2000)
    assert (first == finetuning.batches(lengths, settings, again)).all()
    assert set(second.ravel()) != set(first.ravel()), "other examples are left out"


def test_batches_by_length_pad_little_and_come_in_random_order():
    lengths = np.random.default_rng(1).integers(3, 40, 4000)
    rows, others = (finetuning.batches(lengths, Finetuning(), np.random.default_rng(seed)) for seed in (0, 2))
    widths = lengths[rows].max(axis=1)
    assert 16 * widths.sum() < 1.05 * lengths[rows].sum()
    assert abs(np.corrcoef(widths[1:], widths[:-1])[0, 1]) < 0.2
    assert not {frozenset(batch) for batch in rows.tolist()} & {frozenset(batch) for batch in others.tolist()}


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
@pytest.mark.parametrize(
    "axes", [{}, {"positions": "rotary", "bias": True, "qkv_bias": True}, {"norm_order": "post", "final_norm": False}]
)
def test_training_is_that_of_a_plain_loop_with_torchs_adamw(schedule, axes):
    """One input at a time, so without padding; the whole encoder for all tokens; AdamW without fused kernels."""
    given = examples(45, 3, classes=3)
    settings = Finetuning(
        batch_size=8, epochs=2, learning_rate=1e-3, weight_decay=0.1, schedule=schedule, warmup=0.3, batches="random"
    )
    ours, plain = (classifier(3, dropout=0.0, **axes) for _ in range(2))
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
            F.cross_entropy(torch.cat(scores), torch.tensor(given.labels[order[start : start + 8]])).backward()
            adamw.step()
            adamw.zero_grad()
    for (name, found), expected in zip(ours.state_dict().items(), plain.state_dict().values(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=2e-5, msg=name)


def scored(scores: list[float], model: bert.Classifier, given: finetuning.Examples, seed: int = 0, **changes):
    """Finetune, choosing the epoch by these scores: the outcome, the weights after each epoch, and what was scored."""
    left, states, asked = iter(scores), [], []

    def score(labels: np.ndarray, predictions: np.ndarray) -> float:
        asked.append((labels, predictions))
        states.append({name: value.clone() for name, value in model.state_dict().items()})
        return next(left)

    settings = Finetuning(**{"choose": "best", "epochs": len(scores), "learning_rate": 1e-3} | changes)
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


@pytest.mark.parametrize("classes", [1, 3])
def test_what_is_held_back_is_a_tenth_that_is_not_trained_on(classes, monkeypatch):
    trained, loss_of = [], finetuning.loss_of

    def recording(model, given, rows, here):
        trained.extend(tuple(given.input(row)) for row in rows)
        return loss_of(model, given, rows, here)

    monkeypatch.setattr(finetuning, "loss_of", recording)
    model, given = classifier(classes), examples(177, 0, classes=classes)
    (_, _, asked), inputs = scored([1.0], model, given), [tuple(given.input(row)) for row in range(177)]
    ((labels, predictions),) = asked
    assert len(set(inputs)) == 177
    assert (len(labels), len(trained), len(set(trained))) == (17, 160, 160)
    held = sorted(given.labels[row] for row in range(177) if inputs[row] not in set(trained))
    assert held == sorted(labels)
    assert predictions.shape == (17,)
    assert predictions.dtype.kind == ("f" if classes == 1 else "i")


def test_what_is_held_back_is_drawn_by_the_seed_and_the_same_for_all_epochs():
    given = replace(examples(200, 0, classes=1), labels=np.arange(200) / 200)  # a label gives the row

    def held(seed: int) -> list[int]:
        asked = scored([0.0, 0.0], classifier(1), given, seed, batch_size=60)[2]
        first, second = (np.round(labels * 200).astype(int).tolist() for labels, _ in asked)
        assert first == second
        assert len(set(first)) == 20
        return first

    drawn = [held(seed) for seed in (*range(10), 0)]
    assert drawn[0] == drawn[10]
    assert len(set().union(*drawn)) > 100, "130 for ten independent draws, with a deviation of 4"


def test_an_outcome_has_steps_speed_and_each_epochs_mean_loss():
    reports, given = [], examples(64, 0, classes=2)
    settings = Finetuning(epochs=3, learning_rate=1e-30)
    outcome = tune(classifier(2, dropout=0.0), given, settings, report=lambda *report: reports.append(report))
    assert (outcome.steps, outcome.chosen_epoch) == (12, 3)
    assert outcome.examples_per_second == pytest.approx(12 * 16 / outcome.seconds)
    untrained = torch.tensor(finetuning.predict(classifier(2), given, CPU))
    expected = F.cross_entropy(untrained, torch.tensor(given.labels)).item()
    assert [each["epoch"] for each in outcome.epochs] == [1, 2, 3]
    assert [each["loss"] for each in outcome.epochs] == pytest.approx([expected] * 3, rel=1e-4)
    assert [done for done, _ in reports] == [12 * 16]
    assert finetuning.steps_of(64, settings) == 12


def test_the_embedding_keeps_the_rows_of_the_examples_and_gets_them_back_tuned():
    model, given = classifier(2), examples(64, 0, classes=2)
    given = replace(given, tokens=np.where(given.tokens > 20, 20, given.tokens))
    train, validation = given.take(np.arange(32)), given.take(np.arange(32, 64))
    before = model.bert.embedding.word.weight.detach().clone()
    expected = finetuning.predict(model, validation, CPU)
    kept = finetuning.keep_used(model.bert, {"train": train, "validation": validation})
    used = np.union1d([0], given.tokens)
    assert model.bert.embedding.word.weight.shape == (len(used), 16)
    assert (used[kept["train"].tokens] == train.tokens).all()
    np.testing.assert_array_equal(finetuning.predict(model, kept["validation"], CPU), expected)
    tune(model, kept["train"])
    tuned = finetuning.predict(model, kept["validation"], CPU)
    model.bert.restore_tokens()
    changed = (model.bert.embedding.word.weight.detach() != before).any(dim=1).numpy()
    assert (model.bert.vocabulary, model.bert.kept) == (VOCABULARY, None)
    assert set(np.flatnonzero(changed)) == set(train.tokens.tolist()) - {0}
    np.testing.assert_array_equal(finetuning.predict(model, validation, CPU), tuned)


@pytest.mark.parametrize("probability", [0.1, 0.5, 0.001])
def test_dropout_has_its_probability_and_scale_wherever_the_bits_come_from(probability):
    torch.manual_seed(0)
    x = torch.full((1000, 1001), 2.0, requires_grad=True)
    y = bert.drop(x, probability)
    assert (y == 0).logical_or(y == torch.tensor(2.0 / (1 - probability))).all() or probability == 0.001
    gone = (y == 0).detach().double().flatten()
    deviation = math.sqrt(probability * (1 - probability))
    for lane in range(4):  # of each 64 bits that are drawn
        part = gone[lane::4]
        assert part.mean().item() == pytest.approx(probability, abs=5 * deviation / math.sqrt(len(part)))
    for distance in (1, 2, 3, 4, 1001):
        both = (gone[distance:] * gone[:-distance]).mean().item()
        assert both == pytest.approx(probability**2, abs=6 * probability / math.sqrt(len(gone)))
    y.sum().backward()
    assert torch.equal(x.grad == 0, y == 0)
    torch.manual_seed(0)
    assert torch.equal(bert.drop(x, probability), y)
    assert torch.equal(bert.drop(x, 0.0), x)
    assert torch.equal(bert.drop(x, 1.0), x * 0)


def test_a_run_is_compiled_if_told_to_and_learns_the_same(monkeypatch):
    compiled, traced, compiler = [], [], torch.compile

    def tracing(graph, _):
        traced.append(graph)
        return graph.forward

    def compile_for_any_length(module, dynamic):
        compiled.append(module)
        return compiler(module, dynamic=dynamic, backend=tracing)  # not to wait for C++

    monkeypatch.setattr(torch, "compile", compile_for_any_length)

    def losses(here: Machine, words: int) -> list[float]:
        model = bert.Classifier(bert.Bert(SMALL, words, LENGTH, seed=1), 2, 0.0, seed=0)
        outcome = tune(model, examples(64, 0, classes=2), machine=here)
        return [epoch["loss"] for epoch in outcome.epochs]

    eager = losses(CPU, VOCABULARY)
    assert losses(replace(CPU, compiles=True), VOCABULARY) == eager
    assert not compiled
    always = replace(CPU, compiles=True, compiles_always=True)
    assert losses(always, VOCABULARY) == pytest.approx(eager, rel=1e-4)
    once = len(traced)
    assert 1 <= once <= 4, "with and without padding; not once for each length"
    for run in range(1, 10):  # more than torch compiles of one module
        losses(always, VOCABULARY + run)
        assert len(traced) == (run + 1) * once, "what others compiled does not keep it from being compiled"


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
    masks, attend = [], bert.attend

    def recording(q, k, v, mask, dropout):
        masks.append(mask)
        return attend(q, k, v, mask, dropout)

    monkeypatch.setattr(bert, "attend", recording)
    same = finetuning.Examples.of([[2, 7, 8, 3]] * 16, np.zeros(16, dtype=int))
    tune(classifier(2), same, Finetuning(epochs=1))
    assert masks == [None]
