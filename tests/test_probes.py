"""Linear probes on frozen states: against scikit-learn, transformers and treebanks whose answers are known."""

import importlib
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from conftest import store_of_its_own, toy_model, toy_tokens
from sklearn.linear_model import LogisticRegression
from toys import encoder, machine_of
from transformers import AutoModel, AutoTokenizer

from model import export, kept
from model.errors import InputError
from model.files import TENTHS
from model.settings import Architecture
from tasks.text.tokenizer import SEP

FOLDER = Path(__file__).parents[1] / "benchmarks"
MODERN = Architecture(
    layers=2, hidden=32, heads=2, intermediate=48, positions="rotary", norm_bias=False, norm_eps=1e-5, first_norm=False,
    head_transform=True,
)  # fmt: skip
TAGS = {
    "river": "NOUN", "clock": "NOUN", "unbreakable": "ADJ", "grey": "ADJ", "carried": "VERB", "ignored": "VERB",
    "the": "DET", "an": "DET",
}  # fmt: skip
UNREAD = "☃"
LENGTH = 32  # of the toy model's sequences


@pytest.fixture
def probes(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script."""
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module("probes")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, toy_texts: list[str]) -> Iterator:
    """A small model with transformers' layout of ModernBERT, in a store of its own."""
    root = tmp_path_factory.mktemp("probes")
    with store_of_its_own(root / "artifacts"):
        yield toy_model(toy_tokens(root, toy_texts)["tokens"], MODERN)


def line(number: object, word: str, tag: str, head: object, label: str) -> str:
    return "\t".join([str(number), word, "_", tag, "_", "_", str(head), label, "_", "_"])


def sentence(rng: random.Random, words: list[str]) -> list[str]:
    """Lines of CoNLL-U: the labels say the word, or the word and its head."""
    root = rng.randrange(len(words))
    lines = ["# text = " + " ".join(words)]
    for place, word in enumerate(words):
        head = rng.choice([other for other in range(len(words)) if other != place])
        label = f"{TAGS[word]}-{TAGS[words[head]]}".lower()
        at_root = place == root
        lines.append(line(place + 1, word, TAGS[word], 0 if at_root else head + 1, "root" if at_root else label))
    return [*lines, ""]


def treebank(folder: Path, sizes: dict[str, int]) -> Path:
    """A treebank with so many sentences in each split."""
    folder.mkdir(exist_ok=True)
    rng = random.Random(0)
    for split, size in sizes.items():
        lines = []
        for _ in range(size):
            lines += sentence(rng, rng.choices(list(TAGS), k=rng.randint(3, 8)))
        (folder / f"toy-ud-{split}.conllu").write_text("\n".join(lines), encoding="utf-8")
    return folder


def run(probes: ModuleType, monkeypatch: pytest.MonkeyPatch, folder: Path, *options: object) -> dict:
    """What the command writes as JSON, with short training."""
    monkeypatch.setattr(probes, "STEPS", 200)
    path = folder / "out.json"
    words = ["probes.py", *options, "--treebank", folder, "--json", path]
    monkeypatch.setattr(sys, "argv", [str(word) for word in words])
    probes.main()
    return json.loads(path.read_text(encoding="utf-8"))


def of_split(probes: ModuleType, sentences: list[list[str]]):
    """A split without labels, as far as states need it."""
    words = sum(map(len, sentences))
    return probes.Split(sentences, np.full(words, probes.ROOT), {})


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_a_words_state_is_the_mean_of_its_pieces_in_transformers(probes: ModuleType, model, layer: int):
    sentences = [["The", "river", "carried", "unbreakable", "quartz-like", "bread"], [UNREAD], ["an", UNREAD, "clock"]]
    case = probes.Case("toy", model, model.path, layer)
    bert = probes.load(case)
    encoded = probes.encode(of_split(probes, sentences), case, LENGTH - 2)
    states = probes.states_of(bert, encoded.sentences, 10, SEP, machine_of())
    theirs = AutoModel.from_pretrained(model.path).eval()
    tokenizer = AutoTokenizer.from_pretrained(model.path)
    expected = []
    for words in sentences:
        encoding = tokenizer(words, is_split_into_words=True, add_special_tokens=False)
        ids = torch.tensor([[SEP, *encoding["input_ids"], SEP]])
        with torch.inference_mode():
            hidden = theirs(input_ids=ids, output_hidden_states=True).hidden_states[layer][0, 1:-1]
        of_words = np.array(encoding.word_ids())
        for number in range(len(words)):
            pieces = hidden[of_words == number]
            expected.append(pieces.mean(0) if len(pieces) else torch.zeros(MODERN.hidden))
    assert len(encoded.sentences.tokens) > len(expected)
    assert states.is_read_W.tolist() == [word != UNREAD for words in sentences for word in words]
    torch.testing.assert_close(states.values_WD, torch.stack(expected), atol=1e-5, rtol=1e-5)


def test_states_are_computed_without_tf32(probes: ModuleType, model, monkeypatch: pytest.MonkeyPatch):
    case = probes.Case("toy", model, model.path)
    bert = probes.load(case)
    encode_states = bert.encode
    seen = []

    def look(tokens: torch.Tensor) -> torch.Tensor:
        seen.append(torch.get_float32_matmul_precision())
        return encode_states(tokens)

    monkeypatch.setattr(bert, "encode", look)
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        encoded = probes.encode(of_split(probes, [["The", "river"]]), case, LENGTH - 2)
        probes.states_of(bert, encoded.sentences, 2, SEP, machine_of())
    finally:
        torch.set_float32_matmul_precision(before)
    assert seen == ["highest"]


@pytest.mark.parametrize("task", ["UPOS", "deprel"])
def test_the_classifier_is_as_accurate_as_scikit_learns_logistic_regression(probes: ModuleType, task: str):
    random = np.random.default_rng(0)
    states = random.normal(size=(8000, 12)).astype(np.float32)
    heads = random.integers(0, 8000, 8000)
    inputs = states if task == "UPOS" else np.hstack([states, states[heads]])
    scores = inputs @ random.normal(size=(inputs.shape[1], 5)) + 2 * random.gumbel(size=(8000, 5))
    labels = scores.argmax(1)
    names = [f"label {number}" for number in labels]
    splits = {}
    found = {}
    for name, part in (("train", slice(6000)), ("test", slice(6000, None))):
        splits[name] = probes.Split([names[part]], heads[part], {task: names[part]})
        found[name] = probes.examples_of(splits[name], task, sorted(set(names)), machine_of().device)
        if task == "deprel":
            found[name].places_nk[:, 0] += part.start or 0  # all words are in one table here
    probe = probes.train_probe(torch.from_numpy(states), found["train"], 5, seed=0)
    theirs = LogisticRegression(max_iter=1000).fit(inputs[:6000], labels[:6000])
    if task == "UPOS":
        states = states[6000:]
    ours = probes.accuracy(probe, torch.from_numpy(states), found["test"])
    expected = 100 * theirs.score(inputs[6000:], labels[6000:])
    assert 40 < expected < 90
    assert ours == pytest.approx(expected, abs=1)


def test_labels_that_follow_from_words_are_read_and_a_baseline_knows_only_one_word(
    probes: ModuleType, model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder = treebank(tmp_path / "toy", {"train": 500, "dev": 40, "test": 40})
    options = [model.name, "--untrained", "--layer", 0, 2, "--seeds", 2]
    trained, last, floor, of_floor, of_word, of_all = run(probes, monkeypatch, folder, *options)["rows"]
    assert [row["layer"] for row in (trained, last, floor, of_floor)] == [0, 2, 0, 2]
    for row in (trained, last, floor, of_floor):
        for task in ("UPOS", "deprel"):
            for split in ("dev", "test"):
                assert len(row[task][split]["seeds"]) == 2
                assert row[task][split]["mean"] > 95
    assert of_word["UPOS"]["test"]["mean"] == 100
    assert of_word["deprel"]["test"]["mean"] < 60
    assert of_all["UPOS"]["test"]["mean"] < 40


def test_from_labels_by_chance_only_the_most_frequent_is_learned(probes: ModuleType):
    random = np.random.default_rng(1)
    states = torch.from_numpy(random.normal(size=(12_000, 8)).astype(np.float32))
    labels = random.choice(3, 12_000, p=[0.2, 0.7, 0.1])
    places = torch.arange(12_000)[:, None]
    words = np.arange(12_000)
    train, judged = (
        probes.Examples(words[part], places[part], torch.from_numpy(labels[part]))
        for part in (slice(9000), slice(9000, None))
    )
    found = probes.accuracy(probes.train_probe(states, train, 3, seed=0), states, judged)
    assert found == pytest.approx(100 * (labels[9000:] == 1).mean(), abs=1)


def test_a_seed_decides_the_classifier(probes: ModuleType, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(probes, "STEPS", 20)
    random = np.random.default_rng(2)
    states = torch.from_numpy(random.normal(size=(600, 4)).astype(np.float32))
    labels = torch.from_numpy(random.integers(0, 3, 600))
    train = probes.Examples(np.arange(600), torch.arange(600)[:, None], labels)
    one, same, other = (probes.train_probe(states, train, 3, seed).weight for seed in (0, 0, 1))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


def test_ranges_and_empty_nodes_are_left_out_and_heads_stay_right(probes: ModuleType, tmp_path: Path):
    lines = [
        "# text = an", line(1, "an", "DET", 0, "root"), "",
        "# text = I don't", line(1, "I", "PRON", 3, "nsubj"), line("2-3", "don't", "_", "_", "_"),
        line(2, "do", "AUX", 1, "aux"), line(3, "n't", "PART", 0, "root"), line("3.1", "go", "VERB", "_", "_"), "",
    ]  # fmt: skip
    path = tmp_path / "x-train.conllu"
    path.write_text("\n".join(lines), encoding="utf-8")
    found = probes.read_split(path)
    assert found.sentences == [["an"], ["I", "do", "n't"]]
    assert found.heads_W.tolist() == [probes.ROOT, 3, 1, probes.ROOT]
    assert found.labels == {"UPOS": ["DET", "PRON", "AUX", "PART"], "deprel": ["root", "nsubj", "aux", "root"]}
    examples = probes.examples_of(found, "deprel", ["aux"], machine_of().device)
    assert examples.places_nk.tolist() == [[1, 3], [2, 1]]
    assert examples.labels_n.tolist() == [probes.UNKNOWN, 0]


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ("1\tan\tDET", "3 fields"),
        (line(2, "an", "DET", 0, "root"), "ID"),
        (line(1, "an", "DET", "_", "root"), "HEAD"),
        (line(1, "an", "DET", 2, "det"), "HEAD"),
        (line(1, "an", "_", 0, "root"), "UPOS"),
        (line(1, "an", "DET", 0, "_"), "DEPREL"),
    ],
)
def test_a_line_that_has_no_label_or_no_head_is_named(probes: ModuleType, tmp_path: Path, wrong: str, named: str):
    path = tmp_path / "x-train.conllu"
    path.write_text(f"{line(1, 'the', 'DET', 0, 'root')}\n\n{wrong}\n\n", encoding="utf-8")
    with pytest.raises(InputError, match=rf"x-train\.conllu: line 3 .*{named}"):
        probes.read_split(path)


def test_a_treebank_without_its_text_is_refused(probes: ModuleType, tmp_path: Path):
    path = tmp_path / "x-dev.conllu"
    path.write_text(line(1, "_", "DET", 0, "root") + "\n", encoding="utf-8")
    with pytest.raises(InputError, match=r"x-dev\.conllu"):
        probes.read_split(path)


def test_a_folder_needs_one_training_file_and_another_one(probes: ModuleType, tmp_path: Path):
    with pytest.raises(InputError, match=r"has [\w-]+-dev\.conllu; "):
        probes.read_treebank(treebank(tmp_path, {"dev": 2}))
    with pytest.raises(InputError, match=r"has [\w-]+-train\.conllu; "):
        probes.read_treebank(treebank(tmp_path / "alone", {"train": 2}))
    treebank(tmp_path, {"train": 2})
    assert set(probes.read_treebank(tmp_path)) == {"train", "dev"}
    (tmp_path / "other-train.conllu").touch()
    with pytest.raises(InputError, match=r"other-train\.conllu"):
        probes.read_treebank(tmp_path)


def test_words_behind_the_cut_are_judged_as_unread_ones(
    probes: ModuleType, model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    rng = random.Random(1)
    files = {"train": [["the", "clock", "clock"]] * 40, "test": [["the"] * 40]}
    for split, sentences in files.items():
        lines = [line for words in sentences for line in sentence(rng, words)]
        (tmp_path / f"toy-ud-{split}.conllu").write_text("\n".join(lines), encoding="utf-8")
    found = run(probes, monkeypatch, tmp_path, model.name, "--seeds", 1)
    row = found["rows"][0]
    read = LENGTH - 2
    assert (row["cut"], row["unread"]) == (1, 40 - read)
    assert found["sizes"]["test"]["words"] == 40
    assert row["UPOS"]["test"]["mean"] == 100 * read / 40  # of the others it knows only which label is frequent


def test_models_that_training_kept_are_judged_too(probes: ModuleType, model, monkeypatch: pytest.MonkeyPatch):
    given = probes.argparse.Namespace(models=[model.name], kept=True, untrained=False, layer=None)
    with pytest.raises(InputError, match="--kept"):
        probes.cases_of(given)
    monkeypatch.setattr(probes, "KEPT", (TENTHS,))
    for number in (90, 9):
        kept.save(export.load(model.path), model.path, TENTHS, number)
    found = probes.cases_of(given)
    assert [case.name for case in found] == [model.name, f"{model.name}/tenths/9", f"{model.name}/tenths/90"]
    assert all(probes.load(case).architecture == MODERN for case in found)


def test_a_layer_that_a_model_does_not_have_is_refused(probes: ModuleType, model):
    with pytest.raises(InputError, match="layer 3"):
        probes.load(probes.Case("toy", model, model.path, 3))
    halving = encoder(layers=3, funnel=1)
    with pytest.raises(InputError, match="funnel"):
        probes.keep_layers(halving, probes.Case("toy", model, model.path, 1))


def test_states_that_are_not_finite_and_texts_without_a_known_word_are_refused(probes: ModuleType):
    for value, read in ((float("nan"), True), (0.0, False)):
        states = probes.States(torch.full((3, 2), value), torch.tensor([read] * 3))
        with pytest.raises(InputError, match="the model"):
            probes.standardise({"train": states}, "the model")


def test_scaled_states_have_deviation_one_and_unread_words_zeros(probes: ModuleType):
    values = torch.from_numpy(np.random.default_rng(3).normal(5, 3, (400, 6)).astype(np.float32))
    is_read = torch.arange(400) % 5 != 0
    values[~is_read] = 0
    states = {"train": probes.States(values, is_read)}
    probes.standardise(states, "toy")
    assert not values[~is_read].any()
    torch.testing.assert_close(values[is_read].mean(0), torch.zeros(6), atol=1e-5, rtol=0)
    torch.testing.assert_close(values[is_read].std(0, correction=0), torch.ones(6), atol=1e-5, rtol=0)
