import numpy as np
import pytest
import torch

from model import InputError, bert, finetuning
from model.machine import Machine
from model.settings import Architecture, Finetuning

SMALL = Architecture(layers=1, hidden=16, heads=2, intermediate=48)
VOCABULARY, LENGTH = 40, 16
CPU = Machine(torch.device("cpu"), torch.float32, False, 32)
QUICK = Finetuning(learning_rate=3e-3, epochs=5)
torch.set_num_threads(1)  # for so small a model


def classifier(classes: int, seed: int = 0, length: int = LENGTH) -> bert.Classifier:
    return bert.Classifier(bert.Bert(SMALL, VOCABULARY, length, seed=1), classes, dropout=0.1, seed=seed)


def examples(count: int, seed: int, classes: int) -> finetuning.Examples:
    """Inputs of 4 to 14 tokens; the label is which of the ids 6 to 10 is in them, as a class or a number."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, classes if classes > 1 else 5, count)
    tokens = []
    for label in labels:
        ids = rng.integers(15, VOCABULARY, rng.integers(2, 12)).tolist()
        ids.insert(int(rng.integers(len(ids) + 1)), 6 + int(label))
        tokens.append([2, *ids, 3])
    return finetuning.Examples(tokens, labels if classes > 1 else labels / 2 - 1)


def test_finetuning_learns_classes():
    model = classifier(2)
    finetuning.finetune(model, examples(400, 0, classes=2), QUICK, CPU, 0, lambda *_: None)
    unseen = examples(200, 1, classes=2)
    assert (finetuning.predict(model, unseen, CPU).argmax(axis=1) == unseen.labels).mean() > 0.95


def test_finetuning_learns_numbers():
    model = classifier(1)
    finetuning.finetune(model, examples(600, 0, classes=1), QUICK, CPU, 0, lambda *_: None)
    unseen = examples(200, 1, classes=1)
    scores = finetuning.predict(model, unseen, CPU)[:, 0]
    assert np.corrcoef(scores, unseen.labels)[0, 1] > 0.95
    assert ((scores - unseen.labels) ** 2).mean() < 0.1  # of 0.5 for the mean


def test_each_task_warms_up_over_a_tenth_of_its_own_steps(monkeypatch):
    rates, set_rates = [], finetuning.optimizer.set_rates

    def recording(optimizers, multiplier):
        set_rates(optimizers, multiplier)
        ((rate,),) = ({group["lr"] for group in optimizer.param_groups} for optimizer in optimizers)
        rates.append(rate)

    monkeypatch.setattr(finetuning.optimizer, "set_rates", recording)
    settings = Finetuning(batch_size=4, epochs=5)
    for count in (80, 16, 43):  # one after the other, as tasks are
        rates.clear()
        finetuning.finetune(classifier(2), examples(count, 0, classes=2), settings, CPU, 0, lambda *_: None)
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
    chosen, batch = [], finetuning.Examples.batch

    def recording(self, rows, *args):
        chosen.append(rows.tolist())
        return batch(self, rows, *args)

    monkeypatch.setattr(finetuning.Examples, "batch", recording)
    settings = Finetuning(batch_size=8, epochs=2)
    finetuning.finetune(classifier(2), examples(35, 0, classes=2), settings, CPU, 0, lambda *_: None)
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
        finetuning.finetune(model, train, Finetuning(epochs=2), CPU, seed, lambda *_: None)
        return finetuning.predict(model, unseen, CPU)

    results: list[np.ndarray] = []
    for seed in (0, 0, 1):
        results.append(scores(seed))
    assert results[0].tobytes() == results[1].tobytes()
    assert not np.allclose(results[0], results[2])


def test_fewer_examples_than_a_batch_are_refused():
    with pytest.raises(InputError, match="15 training examples, fewer than one batch of 16"):
        finetuning.finetune(classifier(2), examples(15, 0, classes=2), QUICK, CPU, 0, lambda *_: None)


def test_a_finetuning_loss_that_is_not_finite_is_refused():
    model = classifier(2)
    with torch.no_grad():
        model.out.bias[0] = float("inf")
    with pytest.raises(InputError, match=r"The loss is nan at step 5 of 5\. Lower finetune\.learning_rate"):
        finetuning.finetune(model, examples(16, 0, classes=2), QUICK, CPU, 0, lambda *_: None)


def test_predictions_are_in_the_order_given_whatever_the_lengths():
    model, given = classifier(3).eval(), examples(150, 2, classes=3)
    scores = finetuning.predict(model, given, CPU)
    assert scores.shape == (150, 3)
    with torch.no_grad():
        alone = torch.cat([model(torch.tensor([ids])) for ids in given.tokens]).numpy()
    np.testing.assert_allclose(scores, alone, rtol=1e-5, atol=1e-6)
    assert len({row.tobytes() for row in alone}) > 100


@pytest.mark.parametrize("length", [16, 20])
def test_inputs_may_be_as_long_as_the_model(length):
    model = classifier(2, length=length)
    tokens = [[2, *range(10, 10 + length - 2), 3], [2, 7, 3]] * 8
    given = finetuning.Examples(tokens, np.array([0, 1] * 8))
    finetuning.finetune(model, given, QUICK, CPU, 0, lambda *_: None)
    scores = finetuning.predict(model, given, CPU)
    assert (scores[::2] == scores[0]).all()
    assert (scores[1::2] == scores[1]).all()


def test_inputs_are_padded_to_a_multiple_of_eight():
    given = finetuning.Examples([[2, 7, 3], [2, 7, 8, 9, 10, 11, 12, 13, 3]], np.array([0, 1]))
    batch = given.batch(np.array([1, 0]), 128, torch.device("cpu"))
    assert batch.tolist() == [[2, 7, 8, 9, 10, 11, 12, 13, 3, *[0] * 7], [2, 7, 3, *[0] * 13]]


def test_gradients_that_fp16_cannot_hold_are_not_lost(monkeypatch):
    means, step = {}, torch.optim.AdamW.step

    def recording(self, *args):
        step(self, *args)
        means.setdefault(dtype, [state["exp_avg"].clone() for state in self.state.values()])

    monkeypatch.setattr(torch.optim.AdamW, "step", recording)
    for dtype in (torch.float32, torch.float16):
        model = classifier(2)
        model.bert.set_dropout(0.0)
        model.dropout.p = 0.0
        with torch.no_grad():
            model.out.weight *= 1e-3
        here = Machine(torch.device("cpu"), dtype, False, 32)
        finetuning.finetune(model, examples(16, 0, classes=2), Finetuning(epochs=1), here, 0, lambda *_: None)
    for exact, ours in zip(means[torch.float32], means[torch.float16], strict=True):
        assert (exact - ours).norm() < 0.05 * exact.norm()
