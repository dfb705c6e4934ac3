"""Minimal pairs: scores that equal a naive loop in transformers, accuracies, sets of pairs, and the stage."""

import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import corpus_of, document, store_of_its_own, toy_model, toy_tokens
from test_hub import Hub, serving, use_double
from transformers import AutoModelForMaskedLM, AutoTokenizer
from typer.testing import CliRunner

from flows.cli.main import app
from flows.recipes.recipe import resolve
from model import export, likelihood, machine
from model.errors import InputError, Unreachable
from model.settings import Architecture
from tasks import minimal_pairs as stage_module
from tasks.adopt import START_LINEAGE
from tasks.decontaminate import Decontaminate, decontaminate
from tasks.glue import pair_scores, pairs
from tasks.glue.data import hub_problem
from tasks.glue.pairs import PairSet
from tasks.minimal_pairs import MinimalPairs, PairsRun, encode, minimal_pairs
from tasks.reports.diff import compare_pairs
from tasks.reports.pairs import are_same_pairs, card_table, difference_of, lines_of, paired_halves, right_in, section_of
from tasks.reports.published import BABYLM_2025, PUBLISHED_BLIMP
from tasks.store.artifacts import WORK, Artifact, artifact_named, draft_of
from tasks.text.tokenizer import CLS, MASK, SEP

MODERN = Architecture(
    layers=2, hidden=32, heads=2, intermediate=48, positions="rotary", norm_bias=False, norm_eps=1e-5, first_norm=False,
    head_transform=True,
)  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory, toy_texts: list[str]):
    """A small model with transformers' layout of ModernBERT, trained on some text."""
    root = tmp_path_factory.mktemp("pairs")
    with store_of_its_own(root / "artifacts"):
        yield toy_model(toy_tokens(root, toy_texts)["tokens"], MODERN)


def sentences_from(seed: int, number: int) -> list[str]:
    """Sentences with words that a small vocabulary splits, of several lengths."""
    rng = random.Random(seed)
    found = []
    for _ in range(number):
        words = document(rng, 1).split()[: rng.randint(2, 9)]
        words.insert(rng.randrange(len(words)), rng.choice(["unbreakable", "quartz-like", "xylophonist", "re-read"]))
        found.append(" ".join(words))
    return found


def sequences_of(model: Artifact) -> Artifact:
    """What a model was trained on."""
    return artifact_named(model.manifest["inputs"]["tokens"])


def set_of(folder: Path, good: list[str], bad: list[str], **columns: list[str]) -> Path:
    """A file with pairs."""
    path = folder / "pairs.csv"
    pd.DataFrame({"good": good, "bad": bad, **columns}).to_csv(path, index=False)
    return path


def scores_of(groups: list[str], good: list[float]) -> pd.DataFrame:
    """Scored pairs of these groups, with these scores of the good sentences and 2 for the bad ones."""
    names = {"group": groups, "field": "", "good": [f"good {n}" for n in range(len(groups))], "bad": "bad"}
    scored = pd.DataFrame(names | {"permutation": False, "same_tokens": False})
    for metric in pair_scores.METRICS:
        scored[f"good_{metric}"] = good
        scored[f"bad_{metric}"] = 2.0
    return scored


def naive_scores(folder: Path, texts: list[str], before: int) -> dict[str, list[float]]:
    """The scores by transformers' model and tokenizer, one sentence and one mask at a time."""
    theirs = AutoModelForMaskedLM.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    found: dict[str, list[float]] = {"original": [], "within_word": []}
    for text in texts:
        encoding = tokenizer(text, add_special_tokens=False)
        ids = [before, *encoding["input_ids"], SEP]
        words = [None, *encoding.word_ids(), None]
        totals = dict.fromkeys(found, 0.0)
        for place in range(1, len(ids) - 1):
            later = [other for other in range(place, len(ids)) if words[other] == words[place]]
            for metric, hidden in (("original", [place]), ("within_word", later)):
                masked = [MASK if number in hidden else token for number, token in enumerate(ids)]
                with torch.inference_mode():
                    scores = theirs(input_ids=torch.tensor([masked])).logits[0, place].float()
                totals[metric] += float(scores.log_softmax(-1)[ids[place]])
        for metric, total in totals.items():
            found[metric].append(total)
    return found


@pytest.mark.parametrize("before", [CLS, SEP])
def test_scores_equal_a_naive_loop_in_transformers(model, before: int) -> None:
    texts = sentences_from(1, 12)
    bert = export.load(model.path)
    found = likelihood.score_sentences(bert, encode(texts, model.path), before, machine.detect(), lambda _: None)
    expected = naive_scores(model.path, texts, before)
    assert any(a != b for a, b in zip(found["original"], found["within_word"], strict=True))
    for metric in pair_scores.METRICS:
        assert found[metric] == pytest.approx(expected[metric], abs=1e-4)


def test_scores_do_not_depend_on_the_other_sentences(model) -> None:
    texts = sentences_from(2, 9)
    bert = export.load(model.path)
    here = machine.detect()
    together = likelihood.score_sentences(bert, encode(texts, model.path), SEP, here, lambda _: None)
    for number, text in enumerate(texts):
        alone = likelihood.score_sentences(bert, encode([text], model.path), SEP, here, lambda _: None)
        for metric in pair_scores.METRICS:
            assert alone[metric][0] == pytest.approx(together[metric][number], abs=1e-4)


def test_scores_are_computed_without_tf32_which_is_allowed_again_afterwards(model, monkeypatch) -> None:
    bert = export.load(model.path)
    encode_states = bert.encode
    seen = []

    def look(*inputs, **settings) -> torch.Tensor:
        seen.append(torch.get_float32_matmul_precision())
        return encode_states(*inputs, **settings)

    monkeypatch.setattr(bert, "encode", look)
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        likelihood.score_sentences(bert, encode(["the map"], model.path), SEP, machine.detect(), lambda _: None)
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)
    assert set(seen) == {"highest"}


def test_a_tie_counts_half_and_groups_count_equally() -> None:
    scored = pd.DataFrame(
        {
            "group": ["a", "a", "a", "a", "b"],
            "good_original": [1.0, 1.0, 2.0, 2.0, 2.0],
            "bad_original": [1.0, 2.0, 1.0, 1.0, 1.0],
        }
    )
    right = pair_scores.is_right(scored, "original")
    assert right.tolist() == [0.5, 0.0, 1.0, 1.0, 1.0]
    assert pair_scores.accuracy_of(right, scored["group"]).value == pytest.approx(100 * (2.5 / 4 + 1) / 2)


@pytest.mark.parametrize("lowest", [0.0, -1.0])
def test_the_standard_error_is_that_of_a_stratified_sample(rng: random.Random, lowest: float) -> None:
    groups = [group for group, size in (("a", 500), ("b", 800)) for _ in range(size)]
    right = np.array([rng.choice([lowest, 0.5, 1.0]) for _ in groups])
    errors = pd.Series(right).groupby(groups).sem()
    found = pair_scores.accuracy_of(right, groups, lowest)
    assert found.standard_error == pytest.approx(100 * math.hypot(*errors) / 2, rel=0.003)


@pytest.mark.parametrize("share", [0.5, 0.9, 1.0])
@pytest.mark.parametrize("pairs", [8, 30])
def test_intervals_of_small_sets_hold_the_true_accuracy(share: float, pairs: int) -> None:
    random = np.random.default_rng(4)
    held = 0
    for _ in range(400):
        right = (random.random(2 * pairs) < share).astype(float)
        found = pair_scores.accuracy_of(right, ["a"] * pairs + ["b"] * pairs)
        held += abs(found.value - 100 * share) <= found.half()
    assert held > 0.86 * 400


def test_a_few_pairs_that_are_all_right_are_not_certain() -> None:
    assert not pair_scores.accuracy_of(np.ones(2), ["a", "a"]).is_above(pair_scores.CHANCE)
    assert pair_scores.accuracy_of(np.ones(20), list("abcdefghijklmnopqrst")).is_above(pair_scores.CHANCE)
    assert pair_scores.accuracy_of(np.ones(8), ["a"] * 8).ends()[1] == 100, "an interval stays within the scale"
    same = pair_scores.accuracy_of(np.zeros(30), ["a"] * 30, lowest=-1.0)
    assert same.value == 0
    assert 1 < same.standard_error < 6


def test_groups_that_differ_in_their_last_character_alone_are_two() -> None:
    assert pair_scores.accuracy_of(np.array([1.0, 0.0, 0.0]), ["a", "a\0", "a\0"]).value == 50


def test_a_field_named_as_a_part_hides_no_part() -> None:
    scored = scores_of(["a", "b"], [1.0, 3.0]).assign(field=[pair_scores.EVERY, "other"])
    stats = pair_scores.statistics(scored, "own")
    assert [row["pairs"] for row in stats["table"]] == [2, 1, 1]
    assert [line.name for line in lines_of(stats)] == [pair_scores.EVERY, pair_scores.EVERY, "other"]


def test_models_are_compared_only_on_the_same_sentences() -> None:
    scored = scores_of(["a", "a"], [1.0, 3.0])
    other = scored.assign(good_original=[3.0, 3.0])
    mine = right_in(other, "original")
    theirs = right_in(scored, "original")
    assert are_same_pairs(mine, theirs)
    assert difference_of(mine, theirs).value == 50
    assert difference_of(theirs, mine).value == -50
    changed = right_in(other.assign(bad=["w", "changed"]), "original")
    regrouped = right_in(other.assign(group=["a", "b"]), "original")
    assert not are_same_pairs(changed, theirs)
    assert not are_same_pairs(regrouped, theirs)
    assert paired_halves("x", {"x": mine, "same": theirs, "changed": changed}).keys() == {"same"}


def test_two_models_are_compared_in_either_order_by_part_and_field(model, tmp_path: Path) -> None:
    good = sentences_from(6, 12)
    path = set_of(tmp_path, good, [" ".join(reversed(text.split())) for text in good], kind=["f", "g", "g"] * 4)
    plain = minimal_pairs.fn(PairsRun(data=str(path)), model)
    with_fields = minimal_pairs.fn(PairsRun(data=str(path), field="kind", before="cls"), model)
    forth = compare_pairs(plain, with_fields)
    back = compare_pairs(with_fields, plain)
    assert [row["pairs of"] for row in forth] == [row["pairs of"] for row in back] == ["all", "f", "g"]
    for one, other in zip(forth, back, strict=True):
        assert one["original A"] == other["original B"]
        assert one["original B - A"].lstrip("+-") == other["original B - A"].lstrip("+-")
    fewer = minimal_pairs.fn(PairsRun(data=str(path), per_group=3), model)
    with pytest.raises(InputError, match=r"minimal_pairs\.data"):
        compare_pairs(plain, fewer)


def test_groups_may_be_numbers(tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    path.write_text('{"good": "a b", "bad": "b a", "group": 7}\n', encoding="utf-8")
    assert pairs.read(PairSet(data=str(path)))["group"].tolist() == ["7"]


def test_the_command_scores_pairs_with_columns_and_an_encoding_of_their_own(model, tmp_path: Path) -> None:
    path = tmp_path / "own.csv"
    path.write_text("gut,schlecht\nthe café sleeps,sleeps the café\n" * 1, encoding="windows-1252")
    asked = ["pairs", model.path.name, str(path), "--good", "gut", "--bad", "schlecht", "--encoding", "windows-1252"]
    result = CliRunner().invoke(app, asked)
    assert result.exit_code == 0, result.output
    assert "minimal_pairs/" in result.output.replace("\n", "")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ([], "--good"),
        (["--good", "gut"], "--bad"),
        (["--good", "gut", "--bad", "no"], "--bad"),
        (["--good", "gut", "--bad", "schlecht", "--field", "no"], "--field"),
    ],
)
def test_the_command_names_its_own_options_in_what_it_refuses(model, tmp_path: Path, options: list[str], named: str):
    path = tmp_path / "own.csv"
    path.write_text("gut,schlecht\nthe cat,cat the\n", encoding="utf-8")
    result = CliRunner().invoke(app, ["pairs", model.path.name, str(path), *options])
    assert isinstance(result.exception, InputError)
    assert named in str(result.exception)
    assert "minimal_pairs." not in str(result.exception)


def test_permutations_are_found_by_their_words() -> None:
    table = pd.DataFrame(
        {
            "good": ["Who did he see?", "the cat sleeps", "same thing", "a b c", "Paris, big", "the cat, sleeps."],
            "bad": ["Did he see who.", "the cats sleep", "same thing", "a b c c", "paris big", "the cat sleeps"],
        }
    )
    assert pairs.are_permutations(table).tolist() == [True, False, False, False, False, False]


def test_the_stage_keeps_scores_from_which_its_accuracies_follow(model, tmp_path: Path) -> None:
    good = sentences_from(3, 30)
    bad = [" ".join(reversed(text.split())) for text in good]
    path = set_of(tmp_path, good, bad, uid=["x", "y", "z"] * 10, field=["f", "f", "g"] * 10)
    made = minimal_pairs.fn(PairsRun(data=str(path)), model)
    kept = pd.read_parquet(made.path / pair_scores.PAIRS)
    for metric in pair_scores.METRICS:
        right = np.sign(kept[f"good_{metric}"] - kept[f"bad_{metric}"]) / 2 + 0.5
        by_group = right.groupby(kept["group"]).mean()
        assert made.stats["parts"]["all"][metric]["value"] == pytest.approx(100 * by_group.mean(), abs=1e-3)
        assert made.stats["by_group"]["y"][metric]["value"] == pytest.approx(100 * by_group["y"], abs=1e-3)
        of_field = 100 * by_group[["x", "y"]].mean()
        assert made.stats["fields"]["f"][metric]["value"] == pytest.approx(of_field, abs=1e-3)
    assert kept["permutation"].all()


def test_a_pair_of_one_sentence_is_a_tie_wherever_it_was_computed(model, tmp_path: Path, monkeypatch) -> None:
    texts = sentences_from(8, 40)
    path = set_of(tmp_path, texts, texts)
    real = likelihood.Scorer.log_probabilities
    noise = np.random.default_rng(0)  # as that of other kernels for other sizes of batches

    def noisy(self, places, stops):
        return real(self, places, stops) + noise.normal(0, 1e-6, len(places)).astype(np.float32)

    monkeypatch.setattr(likelihood.Scorer, "log_probabilities", noisy)
    stats = minimal_pairs.fn(PairsRun(data=str(path)), model).stats
    assert stats["ties"] == dict.fromkeys(pair_scores.METRICS, 40)


def test_an_interrupted_attempt_goes_on_and_scores_the_same(model, tmp_path: Path, monkeypatch) -> None:
    good = sentences_from(4, 20)
    path = set_of(tmp_path, good, sentences_from(5, 20))
    whole = minimal_pairs.fn(PairsRun(data=str(path)), model)
    expected = pd.read_parquet(whole.path / pair_scores.PAIRS)
    other = PairsRun(data=str(path), before="sep")
    monkeypatch.setitem(likelihood.BATCH_TOKENS, "cpu", 40)
    sentences = encode([*good, *sentences_from(5, 20)], model.path)
    batches = sum(1 for _ in likelihood.batches(sentences.pass_lengths, 40))
    calls = []
    real = likelihood.Scorer.log_probabilities

    def dies(self, *places):
        calls.append(places)
        if len(calls) == 10:
            raise KeyboardInterrupt
        return real(self, *places)

    monkeypatch.setattr(likelihood.Scorer, "log_probabilities", dies)
    with pytest.raises(KeyboardInterrupt):
        minimal_pairs.fn(other, model)
    left = np.load(draft_of(minimal_pairs.target(other, model)) / WORK / stage_module.SCORES)
    assert 0 < np.isfinite(left).sum() < len(left)
    before = len(calls)
    monkeypatch.setattr(likelihood.Scorer, "log_probabilities", lambda self, *p: calls.append(p) or real(self, *p))
    made = minimal_pairs.fn(other, model)
    assert len(calls) - before == batches - 9  # what was done is not done again
    found = pd.read_parquet(made.path / pair_scores.PAIRS)
    for column in ("good_original", "bad_within_word"):
        assert found[column].tolist() == pytest.approx(expected[column].tolist(), abs=1e-4)


def test_a_model_trained_by_cram_has_sep_before_a_sentence(model, tmp_path: Path) -> None:
    path = set_of(tmp_path, sentences_from(6, 4), sentences_from(7, 4))
    assert minimal_pairs.fn(PairsRun(data=str(path)), model).stats["before"] == "sep"
    assert minimal_pairs.fn(PairsRun(data=str(path), before="cls"), model).stats["before"] == "cls"


@pytest.mark.parametrize(("first", "before"), [({"public": "x/y"}, "cls"), ({"adopted": True}, "sep")])
def test_a_model_that_began_from_a_public_one_has_cls_before_a_sentence(
    tmp_path: Path, first: dict, before: str
) -> None:
    name = "pretrain/0123456789ab"
    (tmp_path / START_LINEAGE).write_text(json.dumps({name: {"stats": first}}), encoding="utf-8")
    began = SimpleNamespace(path=tmp_path, stats={"start": {"name": name}})
    assert stage_module.trained_before(began) == before


MODEL_STATS = {  # of a model that was trained on limited words
    "parameters": 4.7e6, "words": 9_999_000, "epochs": 2.04, "tokens": 29.4e6, "seconds_on_the_clock": 2520,
    "machine": {"device": "a CPU"},
}  # fmt: skip


def blimp_section(model_stats: dict) -> dict:
    """What the page shows of a made-up sample of BLiMP."""
    scored = scores_of(["a"] * 4, [1.0, 1.0, 1.0, 3.0]).assign(filtered=True)
    return section_of(pair_scores.statistics(scored, "BLiMP"), 1, model_stats)


def cells_of(table: str) -> list[dict[str, str]]:
    """The rows of a Markdown table by column."""
    header, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    return [dict(zip(header, row, strict=True)) for row in rows]


def test_a_score_on_blimp_stands_beside_those_of_babylm_with_words_epochs_and_cost() -> None:
    section = blimp_section(MODEL_STATS)
    ours, *others = cells_of(section["babylm"].table)
    assert ours["accuracy"] == "25.0"
    assert ours["epochs at most"] == "2.04"
    assert ours["words at most"].startswith("10")
    assert "42 minutes" in ours["pretraining"]
    known = [row for row in PUBLISHED_BLIMP if row.scorer == BABYLM_2025]
    assert len(others) == len(known)
    assert len({tuple(row.values()) for row in others}) == len(others), "no two rows look the same"
    [gpt_bert] = [row for row in others if "GPT-BERT, mixed" in row["model"] and row["accuracy"] == "80.5"]
    assert gpt_bert["words at most"].startswith("100")
    assert gpt_bert["reads"] == "both sides"
    notes = " ".join(section["babylm"].footnotes)
    for row in known:
        assert row.source[1:] in notes
        assert row.note in notes


def test_a_model_that_began_from_another_one_has_no_words_and_epochs_beside_babylm() -> None:
    start = {"name": "pretrain/0123456789ab"}
    ours, *_ = cells_of(blimp_section(MODEL_STATS | {"start": start})["babylm"].table)
    assert (ours["words at most"], ours["epochs at most"]) == ("–", "–")
    assert start["name"] in ours["pretraining"]


def test_scores_by_other_rules_stand_in_other_columns_or_in_a_table_of_their_own() -> None:
    section = blimp_section({"parameters": 4.7e6})
    rows = {row["model"].split("*")[1]: row for row in cells_of(section["others"].table)[1:]}
    assert rows["GPT-2"]["left to right"] == "83.3"
    assert rows["GPT-2"]["original"] == "–"
    assert rows["people"]["people"] == "88.6"
    assert rows["RoBERTa-base"]["within word"] == "86.7"
    others = cells_of(section["other_rules"].table)
    assert "69.2" in [row["accuracy"] for row in others]
    assert all(row["rule"] for row in others)
    shown = [row["accuracy"] for row in cells_of(section["babylm"].table)]
    assert not {"81.2", "86.1", "69.2"} & set(shown)


def test_an_error_that_an_earlier_version_left_out_is_not_known() -> None:
    stats = pair_scores.statistics(scores_of(["a"], [1.0]), "own")
    for about in [*stats["parts"].values(), *stats["by_group"].values()]:
        for metric in pair_scores.METRICS:
            about[metric]["standard_error"] = None
    assert not pair_scores.main_accuracy(stats).is_above(0)
    [row] = cells_of(card_table([stats]) or "")
    assert row["± original"] == "–"


def test_a_set_that_is_not_blimp_stands_beside_no_published_scores() -> None:
    section = section_of(pair_scores.statistics(scores_of(["a"], [1.0]), "own"), 1, MODEL_STATS)
    assert not section["filtered"]
    assert "babylm" not in section


def test_a_model_card_has_the_accuracies_but_no_name_of_a_file_or_field() -> None:
    scored = scores_of(["a"] * 4, [1.0, 1.0, 1.0, 3.0]).assign(field="secret")
    table = card_table([pair_scores.statistics(scored, "confidential")])
    assert table is not None
    [row] = cells_of(table)
    assert row["original"] == "25.0"
    assert "secret" not in str(table)
    assert "confidential" not in str(table)
    assert card_table([]) is None


def test_a_sample_is_of_each_group_and_the_same_each_time() -> None:
    table = pd.DataFrame({"group": ["a"] * 50 + ["b"] * 3, "row": [*range(50), *range(3)]})
    drawn = pairs.draw(table, 7)
    assert drawn.groupby("group").size().to_dict() == {"a": 7, "b": 3}
    assert drawn.equals(pairs.draw(table, 7))
    assert drawn.loc[drawn["group"] == "a", "row"].tolist() != list(range(7))


# Sets of pairs


def test_files_of_a_folder_are_groups(tmp_path: Path) -> None:
    for name in ("binding", "agreement"):
        lines = '{"sentence_good": "he sleeps", "sentence_bad": "he sleep"}\n' * 3
        (tmp_path / f"{name}.jsonl").write_text(lines, encoding="utf-8")
    table = pairs.read(PairSet(data=str(tmp_path)))
    assert table["group"].tolist() == ["agreement"] * 3 + ["binding"] * 3
    assert table["row"].tolist() == [0, 1, 2] * 2


def test_a_group_is_the_path_of_the_folder_or_else_the_whole_name_of_the_file(tmp_path: Path) -> None:
    names = ("en.wiki.csv", "en.news.csv.gz", "en/x/part-0.csv", "en/x/part-1.csv", "de/x/part-0.csv")
    for name in names:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        pd.DataFrame({"good": ["he sleeps"], "bad": ["he sleep"]}).to_csv(path, index=False)
    table = pairs.read(PairSet(data=str(tmp_path)))
    assert table["group"].tolist() == ["de/x", "en.news", "en.wiki", "en/x", "en/x"]


def test_files_of_a_folder_that_are_hidden_or_about_the_data_are_no_pairs(tmp_path: Path) -> None:
    for name in ("own.csv", "._own.csv", "dataset_infos.json", "README.md"):
        (tmp_path / name).write_text("good,bad\nhe sleeps,he sleep\n", encoding="utf-8")
    assert list(pairs.files_of(str(tmp_path))) == ["own.csv"]


def test_a_row_is_refused_by_the_path_of_its_file(tmp_path: Path) -> None:
    (tmp_path / "de").mkdir()
    (tmp_path / "de" / "own.csv").write_text("good,bad\na,\n", encoding="utf-8")
    with pytest.raises(InputError, match=r"de/own\.csv"):
        pairs.read(PairSet(data=str(tmp_path)))


def test_one_column_for_both_sentences_is_refused(tmp_path: Path) -> None:
    path = set_of(tmp_path, ["he sleeps"], ["he sleep"])
    with pytest.raises(InputError, match="column bad"):
        pairs.read(PairSet(data=str(path), good="bad"))


def test_no_name_is_not_the_current_folder(tmp_path: Path, monkeypatch) -> None:
    set_of(tmp_path, ["he sleeps"], ["he sleep"])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="data"):
        pairs.read(PairSet(data=""))
    assert len(pairs.read(PairSet(data="."))) == 1


@pytest.mark.parametrize(
    ("data", "name"),
    [("nyu-mll/blimp", "BLiMP"), ("a/en.pairs.tsv.gz", "en.pairs"), ("a/v1.2/", "v1.2"), ("a/..", "here")],
)
def test_a_set_has_the_name_of_its_file_or_folder(tmp_path: Path, monkeypatch, data: str, name: str) -> None:
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    assert pairs.name_of(data) == name


def test_columns_can_be_named(tmp_path: Path) -> None:
    path = tmp_path / "own.tsv"
    path.write_text("richtig\tfalsch\tthema\ner schläft\ter schlafen\tVerb\n", encoding="utf-8")
    table = pairs.read(PairSet(data=str(path), good="richtig", bad="falsch", group="thema"))
    assert table[["group", "good", "bad"]].values.tolist() == [["Verb", "er schläft", "er schlafen"]]


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("good,worse\na,b\n", "minimal_pairs.bad"),
        ("good,bad\na,\n", "row 2"),
        ("good,bad\n", "pairs.csv"),
    ],
)
def test_a_file_without_pairs_is_refused_by_what_it_lacks(tmp_path: Path, content: str, named: str) -> None:
    path = tmp_path / "pairs.csv"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(InputError, match=named):
        pairs.read(PairSet(data=str(path)))


def test_a_missing_file_is_refused_by_its_name() -> None:
    with pytest.raises(InputError, match=r"nowhere\.csv"):
        PairsRun(data="nowhere.csv").check()


def test_two_sets_of_one_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="named pairs"):
        MinimalPairs(data=[str(tmp_path / "a" / "pairs.csv"), str(tmp_path / "b" / "pairs.tsv")]).runs()


@pytest.mark.parametrize(
    ("good", "bad", "named"),
    [
        (["the cat", "猫"], ["cat the", "犬"], "猫"),
        (["word " * 200], ["short"], "word word"),
    ],
)
def test_a_sentence_that_the_model_cannot_read_is_refused_also_before_its_training(
    model, tmp_path: Path, good: list[str], bad: list[str], named: str
) -> None:
    params = PairsRun(data=str(set_of(tmp_path, good, bad)))
    with pytest.raises(InputError, match=rf"{model.name}.*{named}"):
        minimal_pairs.fn(params, model)
    sequences = sequences_of(model)
    with pytest.raises(InputError, match=rf"{sequences.name}.*{named}"):
        params.check_sources([sequences])


def test_sentences_that_just_fit_are_accepted_before_training_and_after(model, tmp_path: Path) -> None:
    longest = export.load(model.path).length - likelihood.FRAME
    params = PairsRun(data=str(set_of(tmp_path, ["a " * longest], ["the cat"])))
    params.check_sources([sequences_of(model)])
    assert minimal_pairs.fn(params, model).stats["pairs"] == 1


def test_the_rows_that_babylm_leaves_out_are_7125_of_blimp() -> None:
    left_out = dict(pairs.rows_left_out())
    assert len(left_out) == 67
    assert sum(map(len, left_out.values())) == 67_000 - 59_875
    assert all(rows <= set(range(1000)) for rows in left_out.values())


def test_the_real_blimp_is_recognised_with_its_part_and_permutations(real_data: Path) -> None:
    table = pairs.read(PairSet(data=str(real_data / "blimp")))
    filtered = pairs.filtered_by_babylm(table)
    assert filtered is not None
    assert filtered.sum() == 59_875
    found = table.assign(permutation=pairs.are_permutations(table))
    assert len(pair_scores.permuted_groups(found)) == 13
    assert (table["good"] == table["bad"]).sum() == 7


def test_an_untrained_model_is_at_chance_on_blimp(model, real_data: Path) -> None:
    from model.bert import Bert
    from tasks.glue.pair_scores import accuracy_of

    table = pairs.draw(pairs.read(PairSet(data=str(real_data / "blimp"))), 20)
    trained = export.load(model.path)
    bert = Bert(trained.architecture, trained.vocabulary, length=128, seed=3)
    texts = [*table["good"], *table["bad"]]
    found = likelihood.score_sentences(bert, encode(texts, model.path), SEP, machine.detect(), lambda _: None)
    for scores in found.values():
        good, bad = np.split(scores, 2)
        accuracy = accuracy_of((np.sign(good - bad) + 1) / 2, table["group"])
        assert accuracy.value == pytest.approx(50, abs=5)


# The hub


def forget() -> None:
    """What this process knows of the hub."""
    for cache in (pairs.fetch, pairs.at_hand, pairs._read, hub_problem):
        cache.cache_clear()


@pytest.fixture
def hub(tmp_path: Path, store: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A double of the hub with a set of pairs in two languages, and an empty cache of the hub's client."""
    from huggingface_hub.utils import close_session

    files = {"README.md": b"# Pairs"}
    for folder, good, bad in (("de", "er schläft", "er schlafen"), ("nl", "hij slaapt", "hij slapen")):
        files[f"{folder}/agreement.tsv"] = f"sen\twrong_sen\n{good}\t{bad}\n".encode()
    forget()
    with serving({("someone/pairs", "1" * 40): files}) as server:
        use_double(server, tmp_path / "hf", monkeypatch)
        yield server
    close_session()
    forget()


def test_pairs_come_from_a_folder_of_a_data_set_on_the_hub_and_then_from_its_cache(hub: Hub):
    def rows(data: str) -> list[list[str]]:
        forget()
        return pairs.read(PairSet(data=data))[["group", "good", "bad"]].values.tolist()

    german = [["agreement", "er schläft", "er schlafen"]]
    assert rows("someone/pairs/de") == german
    assert PairSet(data="someone/pairs/de").identity()["data"]["revision"] == "1" * 40
    hub.fails[""] = [500] * 999
    assert rows("someone/pairs/de") == german


def test_without_the_hub_a_data_set_is_not_at_hand(hub: Hub):
    assert pairs.hub.commit(pairs.source_of("someone/pairs")) == "1" * 40  # which is known from then on
    hub.fails[""] = [500] * 999
    assert not pairs.at_hand(PairSet(data="someone/pairs"))
    with pytest.raises(Unreachable, match="someone/pairs"):
        pairs.read(PairSet(data="someone/pairs"))


def test_repeated_pairs_and_pairs_of_one_sentence_are_warned_of(tmp_path: Path, caplog) -> None:
    path = set_of(tmp_path, ["the cat", "the cat", "a dog"], ["cat the", "cat the", "a dog"])
    pairs.read(PairSet(data=str(path)))
    tie, again = (record.getMessage() for record in caplog.records)
    assert "1 of 3 pairs in pairs" in tie
    assert "1 of 3 pairs in pairs" in again


def test_white_space_around_a_group_makes_no_other_group(tmp_path: Path) -> None:
    path = set_of(tmp_path, ["a b", "c d"], ["b a", "d c"], group=["x", " x "])
    assert pairs.read(PairSet(data=str(path)))["group"].tolist() == ["x", "x"]


def test_pairs_that_decontaminate_names_are_searched_for_with_those_that_are_scored(tmp_path: Path) -> None:
    paths = {}
    for name in ("one", "two"):
        paths[name] = set_of(tmp_path, ["a b"], ["b a"], kind=["x"]).rename(tmp_path / f"{name}.csv")
    asked = {"decontaminate": {"pairs": [{"data": str(paths["one"])}]}, "minimal_pairs": {"data": [str(paths["two"])]}}
    searched = resolve("demo", asked).decontaminate.pairs
    assert [one.data for one in searched] == [str(paths["one"]), str(paths["two"])]
    (tmp_path / "other").mkdir()
    namesake = str(paths["two"].rename(tmp_path / "other" / "one.csv"))
    with pytest.raises(InputError, match=r"one\.csv.*other/one\.csv"):
        resolve("demo", asked | {"minimal_pairs": {"data": [namesake]}})
    twice = asked | {"minimal_pairs": {"data": [str(paths["one"])], "group": "kind"}}
    assert [one.group for one in resolve("demo", twice).decontaminate.pairs] == ["kind"]


def test_the_names_of_groups_and_fields_do_not_change_what_is_searched_for(tmp_path: Path) -> None:
    path = str(set_of(tmp_path, ["a b"], ["b a"], kind=["x"]))
    keys = set()
    for about in ({}, {"field": "kind"}, {"group": "kind"}):
        keys.add(json.dumps(Decontaminate(data="probes", pairs=[PairSet(data=path, **about)]).identity()))
    assert len(keys) == 1
    swapped = PairSet(data=path, good="bad", bad="good")
    assert json.dumps(Decontaminate(data="probes", pairs=[swapped]).identity()) not in keys


def test_one_file_may_be_named_in_two_ways_but_not_with_two_columns(tmp_path: Path, monkeypatch) -> None:
    path = set_of(tmp_path, ["a b"], ["b a"])
    monkeypatch.chdir(tmp_path)
    searched = {"pairs": [{"data": f"./{path.name}"}]}
    found = resolve("demo", {"minimal_pairs": {"data": [str(path)]}, "decontaminate": searched})
    assert [one.data for one in found.decontaminate.pairs] == [str(path)]
    searched["pairs"][0]["good"] = "bad"
    with pytest.raises(InputError, match=path.name):
        resolve("demo", {"minimal_pairs": {"data": [str(path)]}, "decontaminate": searched})


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"data": "x.csv", "god": "a"}, r"decontaminate\.pairs\.0\.god.*good"),
        ("x.csv", r"decontaminate\.pairs\.0 .*data"),
    ],
)
def test_a_wrong_set_of_decontaminate_is_named_with_the_fields_of_a_set(wrong: object, named: str) -> None:
    with pytest.raises(InputError, match=named) as raised:
        resolve("demo", {"decontaminate": {"pairs": [wrong]}})
    assert "max_unlabelled" not in str(raised.value)


@pytest.mark.parametrize("name", ["all", "cola", "own"])
def test_a_set_with_the_name_of_a_task_is_refused(tmp_path: Path, name: str) -> None:
    path = set_of(tmp_path, ["a b"], ["b a"]).rename(tmp_path / f"{name}.csv")
    task = {"name": "own", "data": str(path)}
    with pytest.raises(InputError, match=rf"{name}\.csv"):
        resolve("demo", {"minimal_pairs": {"data": [str(path)]}, "finetune": {"tasks": [task]}})


def test_a_sentence_of_a_pair_in_the_corpus_drops_its_document(tmp_path: Path, store: Path, rng: random.Random):
    long = " ".join(document(rng, 3).split()[:16])
    path = set_of(tmp_path, [long, "too short"], ["another sentence", "short too"])
    corpus = corpus_of(tmp_path, [document(rng, 4), f"{document(rng, 2)} {long} {document(rng, 1)}"])
    made = decontaminate.fn(Decontaminate(data="probes", pairs=[PairSet(data=str(path))]), corpus)
    assert made.stats["dropped"]["contaminated"]["documents"] == 1
    assert made.stats["tasks"]["pairs"]["sentences_found"] == 1
    assert made.stats["tasks"]["pairs"]["too_short"] == 3
