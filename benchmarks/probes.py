"""How well can a linear classifier read parts of speech and dependencies from the states of a frozen encoder?

    python benchmarks/probes.py pretrain/KEY … --treebank FOLDER [--kept] [--untrained] [--layer 0 2 4] [--json FILE]

The folder is a treebank of Universal Dependencies, of any language: *-train.conllu, *-dev.conllu and *-test.conllu, or
one of the last two. A model is what find_model takes: a key, `latest`, a folder or a name of the hub; --kept adds the
models that its training kept on its way. There are two tasks (edge probing, Tenney et al. 2019, arXiv 1905.06316):

    UPOS     the part of speech of a word, from its state
    deprel   the label of its dependency, with its subtype, from its state and its head's side by side; roots, which
             have no head, are left out

A word's state is the mean of its pieces' states, in the last layer or those of --layer (0: the embedding; before the
last one, without the final norm). The encoder reads the treebank's words one sentence at a time, split into pieces as
in finetuning, in fp32, between the special tokens of its pretraining (tasks/minimal_pairs.py) and [SEP]. Sentences that
are too long are cut. Words behind the cut, and those in which the vocabulary reads no character, are judged too, as
`unread`, with zeros as their state; so all models are judged on the same words.

The classifier is a softmax of one matrix and a bias on states whose components are scaled to deviation 1 on the
training words. It is trained on the training file alone by AdamW, with the same settings for all models, tasks and
layers; nothing is chosen on the other files. Results are accuracies in percent, with the standard deviation over seeds
of the classifier (its first weights and the order of the words). A label that only the dev or test file has counts as
an error. Over the words of a file of 25,000, the standard error of 90 % is 0.2.

Below the models are the floors: --untrained adds each model's shape and vocabulary with random weights; the baselines
answer with a word's most frequent label in the training file (for unknown words, and for all, the most frequent one).
States take 4 bytes x words x width: 0.3 GB for 255,000 words at a width of 256.
"""

import argparse
import logging
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import common
import numpy as np
import torch
import torch.nn.functional as F
from common import aligned, cell, positive, spread
from torch import Tensor, nn

from model import export, likelihood, machine
from model.bert import Bert, initialize, untrained
from model.errors import InputError
from model.files import KEPT
from model.likelihood import Sentences
from model.wording import counted
from tasks.adopt import find_model
from tasks.glue import conll
from tasks.minimal_pairs import trained_before
from tasks.store.artifacts import Artifact
from tasks.text.tokenizer import load_tokenizer

UPOS = "UPOS"
DEPREL = "deprel"
ID, FORM, HEAD = (conll.UNIVERSAL.index(name) for name in ("id", "form", "head"))
PLACES = {UPOS: conll.UNIVERSAL.index("upos"), DEPREL: conll.UNIVERSAL.index("deprel")}  # of the labels' columns
EMPTY = "_"
TRAIN = "train"
JUDGED = ("dev", "test")
ROOT = -1  # in place of a head
UNKNOWN = -1  # the number of a label that the training file doesn't have
BATCH = 1024
STEPS = 2000  # ten passes over 200,000 words; more, or other rates, gain nothing (docs/log/)
RATE = 1e-2
LEAST = 1e-6  # deviation of a component, so that a constant one stays finite


class Split(NamedTuple):
    """A file of a treebank. W words, all sentences one after the other."""

    sentences: list[list[str]]  # the words of each
    heads_W: np.ndarray  # where each word's head is among all words; ROOT for none
    labels: dict[str, list[str]]  # by task, of each word

    @property
    def words(self) -> list[str]:
        """All words."""
        return [word for sentence in self.sentences for word in sentence]


class Case(NamedTuple):
    """A model to judge."""

    name: str
    model: Artifact
    folder: Path  # the model's weights
    layer: int | None = None  # None: the last one
    untrained: bool = False


class Encoded(NamedTuple):
    """The pieces of a split: `words` of `sentences` are numbers among all words."""

    sentences: Sentences
    cut: int  # sentences that were too long


class States(NamedTuple):
    """The states of the words of a split; zeros for a word that isn't read."""

    values_WD: Tensor
    is_read_W: Tensor


class Examples(NamedTuple):
    """The words of a split that have a label: n of them, each with k states side by side."""

    words_n: np.ndarray  # their numbers among all words
    places_nk: Tensor  # whose states the classifier reads
    labels_n: Tensor  # numbers of classes, or UNKNOWN


# The treebank


def read_treebank(folder: Path) -> dict[str, Split]:
    """The splits of a treebank. Raises InputError if there is no training file, or neither of the others."""
    splits = {}
    for name in (TRAIN, *JUDGED):
        found = sorted(folder.glob(f"*-{name}.conllu"))
        if len(found) > 1:
            names = ", ".join(path.name for path in found)
            raise InputError(f"{folder} has {names}; expected one *-{name}.conllu. Join them, or give another folder.")
        if found:
            splits[name] = read_split(found[0])
    if TRAIN not in splits or len(splits) == 1:
        has = ", ".join(sorted(path.name for path in folder.glob("*.conllu"))) or "no *.conllu"
        raise InputError(
            f"{folder} has {has}; expected *-train.conllu, and *-dev.conllu or *-test.conllu. Give the folder of a "
            "treebank of Universal Dependencies (--treebank)."
        )
    return splits


def read_split(path: Path) -> Split:
    """A file in CoNLL-U. Ranges (1-2) and empty nodes (1.1) are left out. Raises InputError for any other format."""
    sentences = []
    heads = []
    labels: dict[str, list[str]] = {task: [] for task in PLACES}
    for lines in conll.without_comments(list(conll.blocks(path, path.name, "")), path.name):
        check_sentence(lines, path.name)
        first = len(heads)
        sentences.append([line.fields[FORM] for line in lines])
        for line in lines:
            head = int(line.fields[HEAD])
            heads.append(first + head - 1 if head else ROOT)
            for task, place in PLACES.items():
                labels[task].append(line.fields[place])
    split = Split(sentences, np.array(heads, dtype=np.int64), labels)
    if set(split.words) <= {EMPTY}:
        has = "no words" if heads else "no sentences"
        raise InputError(f"{path.name} has {has}. Get the treebank's text, or give another one (--treebank).")
    return split


def check_sentence(lines: list[conll.Line], where: str) -> None:
    """Raise InputError for a line that isn't a word of CoNLL-U with its number, head and labels."""
    for number, line in enumerate(lines, 1):
        fields = line.fields
        problem = ""
        if len(fields) != len(conll.UNIVERSAL):
            problem = f"{counted(len(fields), 'field')}; expected the {len(conll.UNIVERSAL)} of CoNLL-U"
        elif fields[ID] != str(number):
            problem = f"ID {fields[ID]!r}; expected {number}"
        elif not conll.INDEX.fullmatch(fields[HEAD]) or int(fields[HEAD]) > len(lines):
            problem = f"HEAD {fields[HEAD]!r}; expected 0 to {len(lines)}, a word of the sentence"
        else:
            for task, place in PLACES.items():
                if fields[place] == EMPTY:
                    problem = f"no {task.upper()}"
        if problem:
            raise InputError(
                f"{where}: line {line.number:,} has {problem}. Correct it, or give another treebank (--treebank)."
            )


def words_of(split: Split, task: str) -> np.ndarray:
    """(n,): the numbers of the words that have a label in a task."""
    return np.flatnonzero(split.heads_W != ROOT) if task == DEPREL else np.arange(len(split.heads_W))


def examples_of(split: Split, task: str, classes: list[str], device: torch.device) -> Examples:
    """The examples of a task in a split."""
    words_n = words_of(split, task)
    places = [words_n]
    if task == DEPREL:
        places.append(split.heads_W[words_n])
    numbers = {name: number for number, name in enumerate(classes)}
    labels = split.labels[task]
    labels_n = [numbers.get(labels[word], UNKNOWN) for word in words_n]
    places_nk = torch.from_numpy(np.stack(places, axis=1))
    return Examples(words_n, places_nk.to(device), torch.tensor(labels_n).to(device))


def examples_by_task(treebank: dict[str, Split], device: torch.device) -> dict[str, dict[str, Examples]]:
    """The examples by task and split. The classes of a task are the labels of the training file."""
    found: dict[str, dict[str, Examples]] = {}
    train = treebank[TRAIN]
    for task in PLACES:
        classes = sorted({train.labels[task][word] for word in words_of(train, task)})
        found[task] = {name: examples_of(split, task, classes, device) for name, split in treebank.items()}
    return found


# States


def load(case: Case) -> Bert:
    """The encoder of a case. Raises InputError if it doesn't have the layer."""
    bert = export.load(case.folder)
    if case.untrained:
        bert = untrained(bert)
    keep_layers(bert, case)
    return bert


def keep_layers(bert: Bert, case: Case) -> None:
    """Drop the layers after the one whose states are judged, and the final norm with them."""
    layers = bert.architecture.layers
    if case.layer is None or case.layer == layers:
        return
    if case.layer > layers:
        raise InputError(f"{case.name} has no layer {case.layer}; expected 0 to {layers} (--layer).")
    if bert.architecture.funnel:
        raise InputError(
            f"{case.name} halves its sequences (funnel), so tokens have no states of their own in layer {case.layer}. "
            "Leave out --layer."
        )
    bert.architecture = bert.architecture.model_copy(update={"layers": case.layer})
    bert.norm = nn.Identity()


def encode(split: Split, case: Case, longest: int) -> Encoded:
    """The pieces of all words. Sentences are cut to `longest` pieces."""
    tokenizer = load_tokenizer(case.model.path)
    tokens = [np.zeros(0, np.int64)]
    words = [np.zeros(0, np.int64)]
    sizes = []
    cut = 0
    first = 0
    encodings = tokenizer.encode_batch(split.sentences, is_pretokenized=True, add_special_tokens=False)
    for sentence, encoding in zip(split.sentences, encodings, strict=True):
        ids = np.array(encoding.ids[:longest], dtype=np.int64)
        tokens.append(ids)
        words.append(first + np.array(encoding.word_ids[:longest], dtype=np.int64))
        sizes.append(len(ids))
        cut += len(encoding.ids) > longest
        first += len(sentence)
    return Encoded(Sentences(np.concatenate(tokens), np.concatenate(words), np.cumsum(sizes)), cut)


def states_of(bert: Bert, sentences: Sentences, words: int, before: int, here: machine.Machine) -> States:
    """The mean state of each word's pieces, in fp32. `before`: the id of the token before a sentence."""
    sums_WD = torch.zeros(words, bert.architecture.hidden, device=here.device)
    pieces_W = torch.zeros(words, device=here.device)
    bert.to(here.device).eval()
    with torch.no_grad(), machine.exact_products():
        most = likelihood.BATCH_TOKENS[here.device.type]
        for some_B in likelihood.batches(sentences.lengths, most):
            places_BS = sentences.starts[some_B][:, None] + np.arange(sentences.lengths[some_B[0]])
            frame = (before, bert.specials.sep)
            framed_BS = np.pad(sentences.tokens[places_BS], ((0, 0), (1, 1)), constant_values=frame)
            states_BSD = bert.encode(torch.from_numpy(framed_BS).to(here.device))[:, 1:-1]
            words_M = torch.from_numpy(sentences.words[places_BS].ravel()).to(here.device)
            sums_WD.index_add_(0, words_M, states_BSD.flatten(0, 1))
            pieces_W.index_add_(0, words_M, torch.ones_like(words_M, dtype=torch.float32))
    return States(sums_WD.div_(pieces_W.clamp(min=1)[:, None]), pieces_W > 0)


def standardise(states: dict[str, States], name: str) -> None:
    """Give all components mean 0 and deviation 1 over the training words that are read; all others stay zeros.

    Raises InputError for states that are not finite, and if no word is read.
    """
    train = states[TRAIN]
    read = int(train.is_read_W.sum())
    if not read:
        raise InputError(f"{name} can't read any word of the training file. Give it a treebank in its language.")
    mean_D = train.values_WD.sum(0) / read  # those that aren't read add nothing
    for split in states.values():
        split.values_WD.sub_(mean_D)
        split.values_WD[~split.is_read_W] = 0
    deviation_D = train.values_WD.norm(dim=0) / read**0.5
    if not torch.isfinite(deviation_D).all():
        raise InputError(f"{name} has states that are not finite, so it can't be judged. Train it again.")
    for split in states.values():
        split.values_WD.div_(deviation_D.clamp(min=LEAST))


# Probes


def train_probe(states_WD: Tensor, train: Examples, classes: int, seed: int) -> nn.Linear:
    """A classifier of the training words. The rate of learning falls on a line to zero."""
    generator = torch.Generator().manual_seed(seed)
    inputs = train.places_nk.shape[1] * states_WD.shape[1]
    probe = nn.Linear(inputs, classes)
    initialize(probe, generator)
    probe.to(states_WD.device)
    adamw = torch.optim.AdamW(probe.parameters(), lr=RATE, weight_decay=0.0)
    falling = torch.optim.lr_scheduler.LambdaLR(adamw, lambda step: 1 - step / STEPS)
    some = shuffled(len(train.labels_n), generator)
    for _ in range(STEPS):
        some_B = next(some).to(states_WD.device)
        scores_BC = probe(states_WD[train.places_nk[some_B]].flatten(1))
        adamw.zero_grad()
        F.cross_entropy(scores_BC, train.labels_n[some_B]).backward()
        adamw.step()
        falling.step()
    return probe


def shuffled(count: int, generator: torch.Generator) -> Iterator[Tensor]:
    """The numbers of the examples in batches of about the same size, pass after pass, each in another order."""
    parts = -(-count // BATCH)
    while True:
        yield from torch.randperm(count, generator=generator).tensor_split(parts)


def accuracy(probe: nn.Linear, states_WD: Tensor, judged: Examples) -> float:
    """The percentage of right answers. A label that training doesn't have is never right."""
    right = 0
    with torch.no_grad():
        for places_Bk, labels_B in zip(judged.places_nk.split(4096), judged.labels_n.split(4096), strict=True):
            answers_B = probe(states_WD[places_Bk].flatten(1)).argmax(1)
            right += int((answers_B == labels_B).sum())
    return 100 * right / len(judged.labels_n)


def measure(case: Case, treebank: dict[str, Split], tasks: dict, seeds: int, here: machine.Machine) -> dict:
    """The accuracies of a model by task and split: mean and deviation over seeds."""
    start = time.monotonic()
    bert = load(case)
    before = getattr(bert.specials, trained_before(case.model))
    row = {"name": case.name, "layer": bert.architecture.layers, "cut": 0, "unread": 0}
    states = {}
    for name, split in treebank.items():
        encoded = encode(split, case, bert.length - likelihood.FRAME)
        states[name] = states_of(bert, encoded.sentences, len(split.heads_W), before, here)
        row["cut"] += encoded.cut
        row["unread"] += int((~states[name].is_read_W).sum())
    standardise(states, case.name)
    row["encoding_seconds"] = time.monotonic() - start
    for task, examples in tasks.items():
        row[task] = judge(states, examples, seeds)
    return row | {"seconds": time.monotonic() - start}


def judge(states: dict[str, States], examples: dict[str, Examples], seeds: int) -> dict:
    """The accuracies of a task by split, over seeds of the classifier."""
    train = examples[TRAIN]
    classes = int(train.labels_n.max()) + 1
    found: dict[str, list[float]] = {name: [] for name in examples if name != TRAIN}
    for seed in range(seeds):
        probe = train_probe(states[TRAIN].values_WD, train, classes, seed)
        for name, values in found.items():
            values.append(accuracy(probe, states[name].values_WD, examples[name]))
    return {name: spread(values) | {"seeds": values} for name, values in found.items()}


# Floors


def baselines(treebank: dict[str, Split], tasks: dict[str, dict[str, Examples]]) -> list[dict]:
    """The accuracies of the most frequent label of each word, and of the most frequent one of all."""
    of_words: dict = {"name": "most frequent label of the word"}
    of_all: dict = {"name": "most frequent label"}
    for task, examples in tasks.items():
        counts: dict[str, Counter] = {}
        every: Counter = Counter()
        for word, label in words_and_labels(treebank[TRAIN], examples[TRAIN]):
            counts.setdefault(word, Counter())[label] += 1
            every[label] += 1
        usual = every.most_common(1)[0][0]
        answers = {word: labels.most_common(1)[0][0] for word, labels in counts.items()}
        for row, known in ((of_words, answers), (of_all, {})):
            row[task] = {}
            for name in [name for name in examples if name != TRAIN]:
                pairs = list(words_and_labels(treebank[name], examples[name]))
                right = sum(known.get(word, usual) == label for word, label in pairs)
                row[task][name] = spread([100 * right / len(pairs)])
    return [of_words, of_all]


def words_and_labels(split: Split, examples: Examples) -> Iterator[tuple[str, int]]:
    """The words of the examples, with the numbers of their labels."""
    words = split.words
    for word, label in zip(examples.words_n, examples.labels_n.tolist(), strict=True):
        yield words[word], label


# The command


def cases_of(given: argparse.Namespace) -> list[Case]:
    """The models to judge, in the order of the table."""
    found = []
    for named in given.models:
        model = find_model(named)
        folders = {model.name: model.path}
        if given.kept:
            folders |= kept_models(model)
        cases = [Case(name, model, folder) for name, folder in folders.items()]
        if given.untrained:
            cases.append(Case(f"{model.name}, untrained", model, model.path, untrained=True))
        for case in cases:
            found += [case._replace(layer=layer) for layer in given.layer or [None]]
    return found


def kept_models(model: Artifact) -> dict[str, Path]:
    """The models that training kept on its way, by name. Raises InputError if there are none."""
    found = {}
    for kind in KEPT:
        for folder in sorted((model.path / kind).glob("*"), key=lambda folder: int(folder.name)):
            found[f"{model.name}/{kind}/{folder.name}"] = folder
    if not found:
        raise InputError(
            f"{model.name} kept no weights on its way. Train it with CRAM_KEEP_TENTHS=1 or CRAM_KEEP_TOKENS=1, or "
            "leave out --kept."
        )
    return found


def table(rows: list[dict], judged: list[str]) -> str:
    """The rows as text."""
    lines = [["", "layer", *(f"{task} {name}" for task in PLACES for name in judged), "unread", "cut", "seconds"]]
    for row in rows:
        scores = [cell(row[task][name], 2) for task in PLACES for name in judged]
        rest = ["–"] * 3
        if "layer" in row:
            rest = [f"{row['unread']:,}", f"{row['cut']:,}", f"{row['seconds']:.0f}"]
        lines.append([row["name"], str(row.get("layer", "–")), *scores, *rest])
    return aligned(lines)


def not_negative(text: str) -> int:
    """A whole number, at least 0."""
    value = int(text)
    if value < 0:
        raise ValueError
    return value


def main() -> None:
    """Judge the models, print the table, and write it to the --json file."""
    parser = common.parser(
        __doc__,
        treebank={"type": Path, "required": True, "help": "the folder with the *.conllu"},
        kept={"action": "store_true", "help": "also the models that training kept on its way"},
        untrained={"action": "store_true", "help": "also each model's shape with random weights"},
        layer={"type": not_negative, "nargs": "+", "help": "whose states are judged; the last one without it"},
        seeds={"type": positive, "default": 3, "help": "of the classifier"},
        json=common.JSON_OPTION,
    )
    parser.add_argument("models", nargs="+", help="pretrain/KEY, a key, `latest`, a folder or a name of the hub")
    given = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    with common.input_errors(parser):
        here = machine.detect()
        cases = cases_of(given)
        treebank = read_treebank(given.treebank)
        judged = [name for name in treebank if name != TRAIN]
        tasks = examples_by_task(treebank, here.device)
        if here.device.type == "cpu":
            machine.keep_heap()
        rows = []
        for case in cases:
            rows.append(measure(case, treebank, tasks, given.seeds, here))
            print(table(rows[-1:], judged), file=sys.stderr)
    rows += baselines(treebank, tasks)
    sizes = {name: {"words": len(split.heads_W), "sentences": len(split.sentences)} for name, split in treebank.items()}
    about = common.about(here) | {"dtype": "float32"}
    counts = ", ".join(f"{name} {size['words']:,}" for name, size in sizes.items())
    print(f"{', '.join(about.values())}; words: {counts}; {counted(given.seeds, 'seed')}")
    print(table(rows, judged))
    common.write_json(given.json, about | {"treebank": str(given.treebank), "sizes": sizes, "rows": rows})


if __name__ == "__main__":
    main()
