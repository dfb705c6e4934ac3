"""Finetuning on one task: the encoder with a head on each sequence, or on each token; its examples; the loop.

Shapes: B sequences, S tokens each, D hidden.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW

from model import optimizer, schedules
from model.bert import Bert, Dropout, initialize
from model.clock import Clock
from model.errors import InputError
from model.graphs import Graphs
from model.layers import ClassifierHead, compare_texts, in_second_text, mean
from model.layouts import transformers_classifier, transformers_model
from model.machine import Machine, keep_heap, to_device
from model.settings import CLASSIFIER_WIDTH, Finetuning, HeadName, Kind, Pooling, Texts
from model.wording import counted

HEAD_STREAM = 2**31  # beyond all seeds of encoders, so that a head does not start with the same numbers
BETAS = (0.9, 0.98)  # AdamW's, as GLUE_sane
EPS = 1e-6
POOL = 64  # batches whose examples are sorted by length together
PREDICTED = 64  # examples at a time
REPORTED = 20  # steps between two reports
LENGTHS = 16  # tokens: where steps are recorded, inputs are padded to a multiple of it, as each length is recorded
UNLABELLED = -100  # at tokens without a label, as in torch and transformers
LASTING = 3  # copies of the weights in fp32: the weights and AdamW's two moments; gradients last for a step
# kept for the backward pass, for each value of the states, by its bytes; measured on a CPU, 16 x 768: 70 to 81, and 137
BYTES_A_VALUE = {2: 90, 4: 150}


def width_factor(pooling: Pooling, texts: Texts) -> int:
    """The width of a pooled state, in multiples of the encoder's."""
    return 4 if pooling == "compare" and texts == 2 else 1


def pool(bert: Bert, tokens_BS: Tensor, padded: bool, pooling: Pooling, texts: Texts) -> Tensor:
    """The state of each sequence of one or two texts, (B, D), or (B, 4 D) to compare two texts.

    [CLS] is the first token; means are over all tokens but [PAD]; the first text ends with the first [SEP].
    """
    ends_BS = tokens_BS == bert.specials.sep
    tells_texts = bert.embedding.second is not None
    second_BS = in_second_text(ends_BS) if tells_texts else None
    if pooling == "cls":
        first_B1 = tokens_BS.new_zeros(len(tokens_BS), 1, dtype=torch.int64)
        return bert.encode(tokens_BS, padded, first_B1, second_BS)[:, 0]
    states_BSD = bert.encode(tokens_BS, padded, second_BS=second_BS)
    seen_BS = tokens_BS != bert.specials.pad
    if width_factor(pooling, texts) == 1:
        return mean(states_BSD, seen_BS)
    return compare_texts(states_BSD, seen_BS, ends_BS)


class Classifier(nn.Module):
    """The encoder with a head on the pooled state of each sequence, or for `kind` "tokens" on the state of each token.

    The head "tanh" is the reference implementation's for GLUE, 1024 wide. "native" is the head of transformers' model
    of the layout, as wide as the encoder: ModernBERT's begins with the pretrained transform, BERT's for tokens is only
    the last layer. Raises InputError if transformers has no such model. `texts`: how many texts an input has; None:
    unknown. The kind "classes" with one class is a regression.
    """

    def __init__(
        self,
        bert: Bert,
        classes: int,
        dropout: float,
        seed: int,
        head: HeadName = "tanh",
        pooling: Pooling = "cls",
        texts: Texts = None,
        kind: Kind = "classes",
    ) -> None:
        super().__init__()
        _, why_not = transformers_classifier(bert.architecture, head, pooling, kind)
        if head == "native" and why_not:
            raise InputError(f"{why_not} Set finetune.head to 'tanh'.")
        self.kind: Kind = "regression" if kind == "classes" and classes == 1 else kind
        self.bert = bert
        self.classes = classes
        self.head = head
        self.texts = texts
        self.pooling: Pooling = "cls" if kind == "tokens" else pooling  # of tokens nothing is pooled
        self.family = transformers_model(bert.architecture)[0] if head == "native" else None
        bert.set_dropout(dropout)
        inputs = bert.architecture.hidden * width_factor(self.pooling, texts)
        if self.family is None:
            width: int | None = CLASSIFIER_WIDTH
        elif self.family == "Bert" and kind != "tokens":
            width = inputs
        else:
            width = None
        self.classifier = ClassifierHead(inputs, classes, Dropout(dropout), width)
        initialize(self.classifier, torch.Generator().manual_seed(HEAD_STREAM + seed))

    @torch.no_grad()
    def rescale(self, scale: float, shift: float) -> None:
        """Multiply all later scores by `scale` and add `shift`: a regression then predicts in the labels' own units."""
        self.classifier.out.weight.mul_(scale)
        self.classifier.out.bias.mul_(scale).add_(shift)

    def scores(self, states: Tensor) -> Tensor:
        """(..., inputs) states, pooled or of tokens, to (..., classes) scores."""
        if self.family == "ModernBert":
            states = self.bert.head(states)
        return self.classifier(states)

    def forward(self, tokens_BS: Tensor, padded: bool = True) -> Tensor:
        """(B, S) token ids to (B, classes) scores, or of tokens to (B, S, classes). `padded`: mask [PAD]."""
        if self.kind == "tokens":
            states = self.bert.encode(tokens_BS, padded)
        else:
            states = pool(self.bert, tokens_BS, padded, self.pooling, self.texts)
        if self.training:
            return self.scores(states)
        # not in bf16, where one prediction in a hundred is a tie of classes
        with torch.autocast(states.device.type, enabled=False):
            return self.scores(states.float())


@dataclass(frozen=True)
class Examples:
    """The encoded inputs of a split and their labels."""

    tokens: np.ndarray  # ids of all inputs with [CLS] and [SEP], one input after the other
    ends: np.ndarray  # of each input in `tokens`
    # (n,) class numbers, or floats for regression; (n, classes) 0 or 1, with several labels an input; or as many as
    # `tokens`: the class number of each, UNLABELLED where it has none
    labels: np.ndarray

    @classmethod
    def of(cls, inputs: list[list[int]], labels: np.ndarray) -> "Examples":
        """Examples from the ids of each input."""
        ends = np.cumsum([len(ids) for ids in inputs], dtype=np.int64)
        tokens = np.concatenate([np.empty(0, np.int64), *inputs])
        return cls(tokens.astype(np.int32), ends, labels)

    def __len__(self) -> int:
        return len(self.ends)

    @cached_property
    def lengths(self) -> np.ndarray:
        """Tokens of each input."""
        return np.diff(self.ends, prepend=0)

    @property
    def labels_are_of_inputs(self) -> bool:
        """Whether each input has a label, or several; if not, each token has one."""
        return len(self.labels) == len(self)

    def input(self, row: int) -> np.ndarray:
        """The ids of one input."""
        return self.of_input(self.tokens, row)

    def of_input(self, values: np.ndarray, row: int) -> np.ndarray:
        """The values, one for each of `tokens`, of one input."""
        end = self.ends[row]
        return values[end - self.lengths[row] : end]

    def of_inputs(self, values: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """The values, one for each of `tokens`, of the inputs `rows`, one input after the other."""
        parts = [self.of_input(values, row) for row in rows]
        return np.concatenate([values[:0], *parts])

    def take(self, rows: np.ndarray) -> "Examples":
        """The examples `rows`, in that order."""
        labels = self.labels[rows] if self.labels_are_of_inputs else self.of_inputs(self.labels, rows)
        return Examples(self.of_inputs(self.tokens, rows), np.cumsum(self.lengths[rows]), labels)

    def pad(self, values: np.ndarray, rows: np.ndarray, fill: int, length: int | None = None) -> np.ndarray:
        """(B, S): the values of the inputs `rows`, one for each of `tokens`, filled up.

        `length`: S; None: that of the longest input.
        """
        longest = self.lengths[rows].max()
        rows_BS = np.full((len(rows), length or longest), fill, dtype=np.int64)
        for line, row in zip(rows_BS, rows, strict=True):
            line[: self.lengths[row]] = self.of_input(values, row)
        return rows_BS

    def batch(self, rows: np.ndarray, device: torch.device, pad: int, length: int | None = None) -> tuple[Tensor, bool]:
        """The inputs `rows` as (B, S), padded with the id `pad`; and whether any is padded. `length`: as in `pad`."""
        tokens_BS = self.pad(self.tokens, rows, pad, length)
        is_padded = bool(self.lengths[rows].min() < tokens_BS.shape[1])
        return to_device(tokens_BS, device), is_padded

    def labels_of(self, rows: np.ndarray, device: torch.device, length: int | None = None) -> Tensor:
        """The labels of the inputs `rows`: int64 or fp32 (B,), (B, classes), or of tokens (B, S) as in `batch`."""
        labels = self.labels[rows] if self.labels_are_of_inputs else self.pad(self.labels, rows, UNLABELLED, length)
        kind = np.float32 if labels.dtype.kind == "f" else np.int64
        return to_device(labels.astype(kind), device)


def memory(weights: int, tokens: int, values: int, machine: Machine) -> int:
    """Bytes that training takes.

    `weights`: bytes of the model's weights; `tokens`: most tokens in a batch; `values`: of its states, layers x hidden.
    """
    steps = 2 if machine.records else 1  # recordings keep memory of their own, for the longest batch and for gradients
    of_batch = weights + tokens * values * BYTES_A_VALUE[machine.dtype.itemsize]
    return LASTING * weights + steps * of_batch


def keep_used(bert: Bert, splits: dict[str, Examples]) -> dict[str, Examples]:
    """Drop the embeddings of tokens that are in none of these splits. Returns the splits with the new token numbers."""
    used = np.zeros(bert.vocabulary, dtype=bool)
    *kept, _ = bert.specials  # all but [MASK]
    used[kept] = True
    for examples in splits.values():
        used[examples.tokens] = True
    bert.keep_tokens(torch.from_numpy(np.flatnonzero(used)))
    places = (np.cumsum(used) - 1).astype(np.int32)
    return {name: Examples(places[e.tokens], e.ends, e.labels) for name, e in splits.items()}


def batches(lengths: np.ndarray, size: int, shuffle: np.random.Generator) -> np.ndarray:
    """The rows of each batch (batches, size) of an epoch, each row in one batch at most, in random order.

    The inputs of a batch have similar lengths, which need little padding.
    """
    used = len(lengths) // size * size
    order = shuffle.permutation(len(lengths))[:used]
    for start in range(0, used, POOL * size):
        pool = order[start : start + POOL * size]
        by_length = np.argsort(lengths[pool], kind="stable")
        order[start : start + POOL * size] = pool[by_length]
    return shuffle.permutation(order.reshape(-1, size))


def steps_of(count: int, settings: Finetuning) -> int:
    """The number of steps on `count` training examples. Raises InputError if there are too few for one step."""
    if count < settings.batch_size:
        raise InputError(
            f"The task has {counted(count, 'training example')}, fewer than one batch of {settings.batch_size}. "
            "Add examples, or lower finetune.batch_size."
        )
    return settings.epochs * (count // settings.batch_size)


@dataclass(frozen=True)
class Outcome:
    """How training went."""

    steps: int
    seconds: float  # without those in which the process stood still
    stopped_seconds: float  # in which it stood still
    examples_per_second: float
    epochs: list[dict]  # each with epoch and mean loss


def loss_of(scores: Tensor, labels: Tensor, kind: Kind) -> Tensor:
    """The mean loss of a batch, over tokens that have labels: cross-entropy in nats, or the squared error."""
    if kind == "regression":
        return F.mse_loss(scores[:, 0], labels.float())
    if kind == "multilabel":
        return F.binary_cross_entropy_with_logits(scores, labels.float())
    if kind == "classes":
        return F.cross_entropy(scores, labels)
    # not torch's mean, which is nan where no token of a batch has a label
    total = F.cross_entropy(scores.flatten(0, 1), labels.flatten(), ignore_index=UNLABELLED, reduction="sum")
    return total / (labels != UNLABELLED).sum().clamp(min=1)


def no_cudnn_attention() -> None:
    """Keep torch from choosing cuDNN's attention, its default on some GPUs, in this process from now on.

    It plans again for every shape, which takes up to half a second (on a B200, modelscope/FunASR#3704), and inputs have
    many lengths. It is not switched on again: the setting is the process's, and other threads may be training.
    """
    torch.backends.cuda.enable_cudnn_sdp(False)


def finetune(
    classifier: Classifier,
    train: Examples,
    settings: Finetuning,
    machine: Machine,
    seed: int,
    report: Callable[[int, str], None],
) -> Outcome:
    """Train encoder and head on one task, in place.

    `report` gets the number of examples done and a note. Raises InputError for too few examples and for a loss that is
    not finite.
    """
    steps = steps_of(len(train), settings)
    no_cudnn_attention()
    if machine.device.type == "cpu":
        keep_heap()
    classifier.to(machine.device).train()
    torch.manual_seed(seed)  # dropout
    loop = Loop(classifier, train, settings, machine, steps, report)
    shuffle = np.random.default_rng(seed)
    epochs = []
    with Clock() as clock:
        for epoch in range(1, settings.epochs + 1):
            loss = loop.train(batches(train.lengths, settings.batch_size, shuffle))
            epochs.append({"epoch": epoch, "loss": loss})
        seconds = clock.seconds()
    return Outcome(steps, seconds, clock.stopped, steps * settings.batch_size / seconds, epochs)


class Update:
    """A step on a batch: loss, gradients, AdamW. All that changes between steps is in tensors, if it is recorded."""

    def __init__(self, classifier: Classifier, settings: Finetuning, machine: Machine) -> None:
        self.classifier = classifier
        self.machine = machine
        groups = optimizer.groups(classifier.named_parameters(), settings.learning_rate, settings.weight_decay)
        rate: float | Tensor = settings.learning_rate
        if machine.records:
            rate = torch.full((), settings.learning_rate, device=machine.device)
        self.adamw = AdamW(groups, lr=rate, betas=BETAS, eps=EPS, fused=True, capturable=machine.records)
        self.scaler = torch.amp.GradScaler(machine.device.type, enabled=machine.dtype is torch.float16)

    def __call__(self, tokens_BS: Tensor, labels: Tensor, padded: bool = True) -> Tensor:
        """Train on a batch; its loss. A call that ends with an error leaves no gradients."""
        try:
            with self.machine.autocast():
                scores = self.classifier(tokens_BS, padded)
            loss = loss_of(scores.float(), labels, self.classifier.kind)
            self.scaler.scale(loss).backward()
            self.scaler.step(self.adamw)
            self.scaler.update()
        finally:
            self.adamw.zero_grad()
            for name in ("grad_scale", "found_inf"):  # the scaler would multiply with what is left of a failed step
                vars(self.adamw).pop(name, None)
        return loss.detach()


class Loop:
    """The steps of a finetuning, and how many of them are done."""

    def __init__(
        self,
        classifier: Classifier,
        train: Examples,
        settings: Finetuning,
        machine: Machine,
        steps: int,
        report: Callable[[int, str], None],
    ) -> None:
        self.most_tokens = classifier.bert.length
        self.pad = classifier.bert.specials.pad
        self.examples = train
        self.settings = settings
        self.machine = machine
        self.steps = steps
        self.done = 0
        self.report = report
        self.update = Update(classifier, settings, machine)
        self.graphs = Graphs(self.update, machine.device) if machine.records else None

    def train(self, rows_NB: np.ndarray) -> float:
        """Take a step on each batch of an epoch; the mean loss."""
        total = torch.zeros((), device=self.machine.device)
        for rows in rows_NB:
            loss = self.step(rows)
            total += loss
            if self.done % REPORTED == 0 or self.done == self.steps:
                self.report(self.done * self.settings.batch_size, f"loss {self.finite(loss):.3f}")
        return total.item() * self.settings.epochs / self.steps

    def step(self, rows: np.ndarray) -> Tensor:
        """Train on the examples `rows`; their loss."""
        self.done += 1
        rate = schedules.warm_cosine(self.done / self.steps, self.settings.warmup)
        optimizer.set_rates([self.update.adamw], rate)
        length = self.length_of(rows)
        tokens_BS, is_padded = self.examples.batch(rows, self.machine.device, self.pad, length)
        labels = self.examples.labels_of(rows, self.machine.device, length)
        if self.graphs is None:
            return self.update(tokens_BS, labels, is_padded)
        return self.graphs(tokens_BS, labels)

    def length_of(self, rows: np.ndarray) -> int:
        """The number of tokens, with padding, of each input of a batch."""
        longest = int(self.examples.lengths[rows].max())
        if self.graphs is None:
            return longest
        rounded = math.ceil(longest / LENGTHS) * LENGTHS
        return min(rounded, self.most_tokens)

    def finite(self, loss: Tensor) -> float:
        """The value of the last step's loss. Raises InputError if it is not finite."""
        value = loss.item()
        if not math.isfinite(value):
            raise InputError(f"The loss is {value} at step {self.done} of {self.steps}. Lower finetune.learning_rate.")
        return value


def predictions(scores: np.ndarray, kind: Kind) -> np.ndarray:
    """The answers of scores (n, classes): class numbers (n,); scores (n,) for regression; 0 or 1 for multilabel."""
    if kind == "regression":
        return scores[:, 0]
    if kind == "multilabel":
        return (scores > 0).astype(np.int64)
    return scores.argmax(axis=1)


def predict(classifier: Classifier, examples: Examples, machine: Machine) -> np.ndarray:
    """The scores (n, classes), fp32, of all examples, or of all tokens that have labels, in their order.

    Batches are of similar lengths, so that little is padded.
    """
    order = np.argsort(examples.lengths, kind="stable")
    no_cudnn_attention()
    classifier.to(machine.device).eval()
    outputs = [torch.empty(0, classifier.classes, device=machine.device)]
    with torch.inference_mode(), machine.autocast():
        for start in range(0, len(order), PREDICTED):
            rows = order[start : start + PREDICTED]
            scores = classifier(*examples.batch(rows, machine.device, classifier.bert.specials.pad)).float()
            if classifier.kind == "tokens":
                scores = scores[examples.labels_of(rows, machine.device) != UNLABELLED]
            outputs.append(scores)
    places = labelled_tokens(examples, order) if classifier.kind == "tokens" else order
    in_order = np.empty((len(places), classifier.classes), dtype=np.float32)
    in_order[places] = torch.cat(outputs).cpu().numpy()
    return in_order


def labelled_tokens(examples: Examples, rows: np.ndarray) -> np.ndarray:
    """The numbers of the tokens that have labels, counted through all examples, in the order of the inputs `rows`."""
    has_label = examples.labels != UNLABELLED
    numbers = np.cumsum(has_label) - 1
    return examples.of_inputs(numbers, rows)[examples.of_inputs(has_label, rows)]
