"""Recipes: deltas from the paper's, overrides, and Prefect's form for them."""

import functools
import math
import re
from pathlib import Path

import pytest
import torch
from prefect.utilities.callables import parameter_schema
from prefect.utilities.schema_tools.validation import is_valid
from pydantic import BaseModel

from flows.cram import checked_plan, cram
from flows.recipes.deltas import BABYLMS, DELTAS, NAMED
from flows.recipes.recipe import RECIPES, STAGES, merge, resolve, without_empty
from flows.recipes.rules import tuned
from flows.recipes.study_runs import operations_per_token
from model import bert, layers, optimizer, schedules
from model.errors import InputError
from model.heldout import POCKET_OPERATIONS, SLOW_TOKENS
from model.settings import Training
from tasks.glue.table import GLUE
from tasks.text.words import Normaliser

FULL = [*NAMED]


def leaves(value: BaseModel | dict, above: str = "") -> dict:
    """The fields of a recipe or of a delta, by dotted path. A mixture of sources is one value."""
    found = {}
    for name, inner in value.items() if isinstance(value, dict) else value:
        if isinstance(inner, BaseModel) or (isinstance(inner, dict) and name != "source"):
            found |= leaves(inner, f"{above}{name}.")
        else:
            found[f"{above}{name}"] = inner
    return found


@pytest.mark.parametrize("name", [*FULL, "demo"])
def test_a_recipe_differs_from_the_papers_exactly_in_the_fields_of_its_delta(name: str):
    paper = leaves(RECIPES["crammed-bert"])
    found = leaves(RECIPES[name])
    delta = leaves(DELTAS[name])
    follow = {"report.title": name, "decontaminate.data": found["finetune.data"]}
    follow |= {field: found[field] for field in ("minimal_pairs.data", "decontaminate.pairs")}
    assert found == paper | delta | follow
    assert name == "crammed-bert" or not [field for field in delta if delta[field] == paper[field]]


# bert-o4, v1/bert-o3, bert-base (o0), bert-original and bert-izsak of the reference implementation, with the schedules
# of its ablations: optimizer, rate, betas, epsilon, decay; schedule, warm-up; batch, ramp; clip, dropout, masks
O4 = ("adamw", 1e-3, 0.9, 0.98, 1e-12, 0.01, "triangle", 0, 8192, 0.6, 0.5, 0, 0.25)
O0 = ("adam", 1e-4, 0.9, 0.999, 1e-8, 0.01)
END = (0, None, 0.1, 0.15)
O0_COSINE = (*O0, "cosine", 0.06, 512, *END)
MINIMAL = ("adamw", 5e-4, 0.9, 0.98, 1e-12, 0.01, "cosine", 0.06)
MUON = (0.9, 0.95, 1e-8, 0.046, "trapezoid", 0.02, 4096, 0, None, 0, 0.3)
# layers, hidden, heads, width of feed-forward layers; activation, order of norms, positions, epsilon of norms
PAPERS = (16, 768, 12, 1536, "geglu", "pre", "scaled-sinusoidal", 1e-12)
BERTS = (12, 768, 12, 3072, "gelu", "post", "learned", 1e-12)
LARGE = (24, 1024, 16, 4096, "gelu", "pre", "learned", 1e-6)
# source, documents, megabytes; duplicates; tokens a character; order, tokens a sequence, most sequences; entries
PILE = ("pile", 8_000_000, 0, ["exact"], 0.3, "sentence-length", 128, 85_000_000, 32_768)
BOOKS = ({"wikipedia": 3, "books": 1}, 0, 20_000, ["exact"], None, "random", 128, 35_000_000, 32_768)
LONG = (*BOOKS[:6], 512, 35_000_000, 30_522)
C4 = ("c4", 25_000_000, 0, ["substring"], 0.25, *PILE[5:])
ROWS = {
    "crammed-bert": (O4, PAPERS, PILE),
    "crammed-bert-v1": ((*O4[:8], 4096, 1, 0.5, 0, 0.15625), PAPERS, C4),
    "bert-base": ((*O0, "trapezoid", 0.31, 512, *END), BERTS, BOOKS),
    "bert-base-annealed": ((*O0, "polynomial", 0.01, 512, *END), BERTS, BOOKS),
    "bert-original": ((*O0, "polynomial", 0.01, 256, *END), BERTS, LONG),
    "izsak": (("adamw", 2e-3, 0.9, 0.98, 1e-6, 0.01, "linear", 0.06, 4096, *END), LARGE, BOOKS),
    "data-reverted": (O4, PAPERS, BOOKS),
    "training-reverted": (O0_COSINE, PAPERS, PILE),
    "minimal-training": ((*MINIMAL, 1536, 0, None, 0, 0.15), PAPERS, PILE),
    "minimal-training-large-batch": ((*MINIMAL, 8192, 0, None, 0, 0.15), PAPERS, PILE),
    "architecture-reverted": (O4, BERTS, PILE),
    "minimal-architecture": (O4, (*BERTS[:5], "pre", *BERTS[6:]), PILE),
    "architecture-and-training-reverted": (O0_COSINE, BERTS, PILE),
    "modern": (("muon", 2.3e-3, *MUON), (*PAPERS[:6], "rotary", 1e-5), PILE),
    "frontier": (("muon", 5.8e-3, *MUON), (*PAPERS[:6], "rotary", 1e-5), PILE),
}


@pytest.mark.parametrize("name", FULL)
def test_a_recipe_has_the_training_layout_and_text_of_the_reference_implementation(name: str):
    r = RECIPES[name]
    t = RECIPES[name].pretrain
    a = RECIPES[name].pretrain.architecture
    rates = (t.optimizer, t.learning_rate, optimizer.BETA1, t.beta2, t.adam_eps, t.weight_decay, t.schedule, t.warmup)
    batches = (t.batch_size, t.batch_ramp, t.clip, t.dropout, t.mask_fraction)
    layout = (a.layers, a.hidden, a.heads, layers.inner(a), a.activation, a.norm_order, a.positions, a.norm_eps)
    text = (r.download.source, r.download.documents, r.download.megabytes, r.deduplicate.methods)
    text += (r.filter.max_tokens_per_char, r.tokenize.sort, r.tokenize.length, r.tokenize.max_sequences)
    assert ((*rates, *batches), layout, (*text, r.vocabulary.entries)) == ROWS[name]
    budget = (1_000_000 * 256 * 512, "tokens") if name == "bert-original" else (24, "hours")
    assert (t.budget, t.budget_unit) == budget
    assert t.decay_norms == (name == "training-reverted")
    assert r.deduplicate.substring.bytes == 75
    finetuned = RECIPES["crammed-bert"].finetune.model_copy(update={"pooling": r.finetune.pooling})
    assert r.finetune == finetuned, "one setting for all recipes"
    assert r.finetune.pooling == ("compare" if name == "frontier" else "cls")
    if name in {"modern", "frontier"}:
        assert (t.matrix_learning_rate, t.cooldown) == (2.1e-3, 0.5)
    assert t.detection == (5.0 if name == "frontier" else 0)
    assert a.convolution == (5 if name == "frontier" else 0)


@pytest.mark.parametrize("hidden", [128, 256, 768, 1024])
@pytest.mark.parametrize("tokens", [1e6, 2.5e6, 2e7, 1.1e10, 1e11])
def test_muons_rates_follow_from_width_and_its_batch_and_decay_from_tokens(hidden: int, tokens: float):
    one = tuned(hidden, tokens, 5)
    wider = tuned(4 * hidden, tokens, 5)
    longer = tuned(hidden, 100 * tokens, 5)
    for rate in ("learning_rate", "matrix_learning_rate"):
        assert wider[rate] == pytest.approx(one[rate] / 2, rel=0.05)
        assert longer[rate] == one[rate]
    assert wider["batch_size"] == one["batch_size"]
    growth = math.log2(longer["batch_size"] / one["batch_size"])
    assert growth == pytest.approx(0.571 * math.log2(100), abs=1), "batches are powers of two"
    forgotten = one["matrix_learning_rate"] * one["weight_decay"] * tokens / (128 * one["batch_size"])
    assert forgotten == pytest.approx(2, rel=0.1) or one["weight_decay"] == 1
    slower = tuned(hidden, tokens, 0)
    assert slower["learning_rate"] == pytest.approx(0.4 * one["learning_rate"], rel=0.05)
    assert slower | {"learning_rate": one["learning_rate"]} == one
    assert Training(optimizer="muon", **one).batch_size == one["batch_size"]


def operations(name: str, masks: int | None = None) -> float:
    """Per token of a recipe; with `masks`, for so many masked positions."""
    recipe = RECIPES[name]
    length = recipe.tokenize.length
    training = recipe.pretrain
    masks = masks or round(training.mask_fraction * length)
    return bert.operations_per_token(training.architecture, training, recipe.vocabulary.entries, length, masks)


def test_bert_base_has_the_rates_of_the_reference_in_a_day_of_an_a6000():
    day = 0.42 * 154.8e12 * 24 * 3600 / operations("bert-base", 128) / (256 * 128)  # micro-batches; the head everywhere
    for hundredth in range(100):
        step = hundredth / 100 * day
        theirs = min(step / 80_000, 1 - (step - 80_000) / (8_000_000 - 80_000))
        assert abs(schedules.rate(RECIPES["bert-base"].pretrain, hundredth / 100) - theirs) < 0.03, hundredth
    strong = {"schedule": "polynomial", "warmup": 0.01, "cooldown": Training().cooldown}
    assert RECIPES["bert-base-annealed"].pretrain == RECIPES["bert-base"].pretrain.model_copy(update=strong)


@functools.cache
def parameters(name: str) -> int:
    """Of a recipe's model, which can compute a loss."""
    recipe = RECIPES[name]
    length = recipe.tokenize.length
    training = recipe.pretrain
    with torch.device("meta"):  # shapes without values
        model = bert.Bert(training.architecture, recipe.vocabulary.entries, length)
        places = torch.zeros(2, max(1, round(training.mask_fraction * length)), dtype=torch.long)
        assert model(torch.zeros(2, length, dtype=torch.long), places, places).shape == ()
    return sum(p.numel() for p in model.parameters())


PARAMETERS = {PAPERS: 119_589_889, BERTS: 110_945_024}  # of the paper; of transformers' BERT without token types
PARAMETERS_OF = {
    "bert-original": 109_512_762,  # the same with its own vocabulary and length
    "izsak": 337_081_344,  # of a pre-norm BERT-large, by its shapes
    "minimal-architecture": 110_945_024,  # of a pre-norm BERT
    "modern": 120_153_600,  # of transformers' ModernBertForMaskedLM
    "frontier": 119_624_448,  # the same, less a dense layer and its norm, and with convolutions
}


@pytest.mark.parametrize("name", FULL)
def test_a_model_has_as_many_parameters_as_its_model_in_the_literature(name: str):
    assert parameters(name) == (PARAMETERS_OF.get(name) or PARAMETERS[ROWS[name][1]])


POCKET = {
    "tokenize.heldout_fraction": 0.005,
    "tokenize.max_sequences": 250_000,
    "tokenize.sort": "random",
    "pretrain.budget": 1 / 3,
    "pretrain.budget_unit": "hours",
    "finetune.seeds": 1,
    "finetune.learning_rate": 2e-4,
}
POCKET_EXTRA = {name: {"vocabulary.entries": 8192} for name in ("modern", "frontier")}
SCALED = ["batch_size", "learning_rate", "weight_decay", "architecture.layers", "architecture.hidden"]
SCALED += ["architecture.heads", "architecture.intermediate", "matrix_learning_rate"]


@pytest.mark.parametrize("name", FULL)
def test_every_recipe_has_a_pocket_recipe_by_the_same_rule(name: str):
    full = RECIPES[name]
    small_name = "pocket" if name == "crammed-bert" else f"pocket-{name}"
    small = RECIPES[small_name]
    large = full.pretrain.architecture
    little = small.pretrain.architecture
    assert little.layers >= 2
    assert abs(little.layers - large.layers / 4) <= 0.5
    assert little.hidden == 64 * little.heads
    assert abs(little.hidden - large.hidden / 3) <= 32
    assert little.intermediate % 6 == 0
    assert abs(little.intermediate - little.hidden * large.intermediate / large.hidden) <= 3
    t = small.pretrain
    if t.optimizer == "muon":
        assert (t.matrix_learning_rate, t.weight_decay, t.batch_size) == (3.6e-3, 0.23, 64)
        assert t.learning_rate == (0.01 if name == "frontier" else 0.004)
    else:
        assert t.learning_rate == 4 * full.pretrain.learning_rate
        assert (t.weight_decay, t.batch_size) == (full.pretrain.weight_decay, max(16, full.pretrain.batch_size // 128))
    found = leaves(small)
    scaled = {field: found[field] for field in (f"pretrain.{field}" for field in SCALED)}
    for limit in ("download.documents", "download.megabytes"):
        assert found[limit] == pytest.approx(leaves(full)[limit] / 128, abs=0.5 if "documents" in limit else 0)
        scaled[limit] = found[limit]
    assert found["download.documents"] or found["download.megabytes"], "not the whole source"
    assert found == leaves(full) | POCKET | scaled | POCKET_EXTRA.get(name, {}) | {"report.title": small_name}
    assert parameters(small_name) > 5e5, "it can be built"


TRACKS = {"babylm-small": 10_000_000, "babylm": 100_000_000}


@pytest.mark.parametrize("name", BABYLMS)
def test_a_recipe_of_babylm_keeps_the_words_and_epochs_of_its_track_whatever_text_it_reads(name: str):
    words = TRACKS[name.removeprefix("pocket-")]
    for source in ({}, {"source": "c4"}, {"source": "files", "files": ["own.jsonl"]}):
        recipe = resolve(name, {"download": source})
        limits = recipe.download
        assert (limits.words, limits.documents, limits.megabytes) == (words, 0, 0)
        assert (recipe.pretrain.budget, recipe.pretrain.budget_unit) == (10, "epochs")


@pytest.mark.parametrize(
    ("name", "like"),
    [("babylm", "frontier"), ("pocket-babylm", "pocket-frontier"), ("pocket-babylm-small", "pocket-frontier")],
)
def test_a_recipe_of_babylm_has_the_layout_of_frontier(name: str, like: str):
    assert RECIPES[name].pretrain.architecture == RECIPES[like].pretrain.architecture
    assert RECIPES[name].vocabulary == RECIPES[like].vocabulary
    assert RECIPES[name].finetune == RECIPES[like].finetune


@pytest.mark.parametrize("name", BABYLMS)
def test_the_rates_of_a_recipe_of_babylm_are_those_of_the_rule_for_what_it_reads(name: str):
    training = RECIPES[name].pretrain
    tokens = training.budget * 1.6 * RECIPES[name].download.words
    by_rule = tuned(training.architecture.hidden, tokens, training.architecture.convolution)
    assert {field: getattr(training, field) for field in by_rule} == by_rule


@pytest.mark.parametrize("name", ["pocket", "crammed-bert", "pocket-bert-base", "demo"])
def test_ones_own_files_are_read_whole_unless_the_override_limits_them(name: str):
    own = {"source": "files", "files": ["own.jsonl"]}
    for limits in ({}, {"documents": 5_000}, {"megabytes": 3.5}, {"documents": 7, "megabytes": 2}):
        found = resolve(name, {"download": own | limits}).download
        assert (found.documents, found.megabytes) == (limits.get("documents", 0), limits.get("megabytes", 0))
    found = resolve(name, {"download": {"source": "c4"}}).download
    assert (found.documents, found.megabytes) == (RECIPES[name].download.documents, RECIPES[name].download.megabytes)


def cells(room: str, section: str) -> list[list[str]]:
    """The rows of the table in a section of a manual, without its head."""
    manual = Path(__file__).parents[1] / room / "README.md"
    text = manual.read_text().split(f"\n## {section}\n")[1].split("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return rows[1:]


@pytest.mark.parametrize("name", [*FULL, *BABYLMS, "demo"])
def test_the_manual_says_how_many_parameters_a_recipe_has_and_operations_masked_positions_save(name: str):
    (row,) = [row for row in cells("flows", "Recipes") if row[0] == f"`{name}`"]
    assert re.findall(r"([\d.]+) M", row[1]) == [f"{parameters(name) / 1e6:.1f}"]
    for percent in re.findall(r"(\d+) % fewer operations", row[1]):
        assert round(100 * (1 - operations(name) / operations(name, 128))) == int(percent)


@pytest.mark.parametrize(("name", "column"), [("crammed-bert", 5), ("modern", 6)])
def test_the_manual_says_how_many_tokens_a_day_half_a_cards_peak_is(name: str, column: int):
    cards = [row for row in cells("model", "GPUs") if len(row) > column]
    for row in cards:
        a_day = 0.5 * 24 * 3600 * float(row[2].removesuffix(" TFLOP/s")) * 1e12
        assert row[column] == f"{a_day / operations(name) / 1e9:.1f} billion", row[0]
    assert len(cards) == 6


def test_an_override_changes_its_fields_only_and_replaces_a_mixture_by_another():
    given = {"pretrain": {"architecture": {"layers": 3}}, "download": {"source": {"c4": 1}}}
    expected = {"pretrain.architecture.layers": 3, "download.source": {"c4": 1}}
    assert leaves(resolve("bert-base", given)) == leaves(RECIPES["bert-base"]) | expected


def test_every_recipe_removes_the_data_that_scores_it_from_its_text():
    for recipe in RECIPES.values():
        assert recipe.decontaminate.words == 13
        assert recipe.decontaminate.data == recipe.finetune.data
        assert set(recipe.decontaminate.tasks) == {*GLUE, "wnli"}
    assert resolve("demo", {"finetune": {"data": "~/glue", "tasks": ["cola"]}}).decontaminate.data == "~/glue"
    other = resolve("demo", {"decontaminate": {"data": "elsewhere"}})
    assert (other.decontaminate.data, other.finetune) == ("elsewhere", RECIPES["demo"].finetune)


def test_pocket_unicode_differs_from_pocket_in_the_characters_that_it_reads_alone():
    changes = {"vocabulary.characters": "unicode", "measure.normaliser.characters": "unicode"}
    changes |= {"filter.max_tokens_per_char": "by-script", "report.title": "pocket-unicode"}
    assert leaves(RECIPES["pocket-unicode"]) == leaves(RECIPES["pocket"]) | changes


def test_documents_are_measured_with_the_characters_of_the_vocabulary_and_a_number_is_the_limit_for_all():
    given = {"characters": "unicode", "form": "NFC", "lowercase": False, "alphabet": 1000}
    recipe = resolve("demo", {"vocabulary": given, "filter": {"max_tokens_per_char": 0.3}})
    assert recipe.measure.normaliser == recipe.vocabulary.normaliser() == Normaliser(**given)
    assert recipe.filter.max_tokens_per_char == 0.3
    assert resolve("demo", {"vocabulary": given}).filter.max_tokens_per_char == "by-script"
    assert resolve("demo", {}).filter.max_tokens_per_char == 0.3
    own = {"characters": "unicode", "strip_accents": True}
    assert resolve("demo", {"measure": {"normaliser": own}}).measure.normaliser == Normaliser(**own)
    with pytest.raises(InputError, match=r"vocabulary.*form"):
        resolve("demo", {"vocabulary": {"form": "NFC"}})


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ({"filter": {"max_tokens_per_chr": 1}}, "filter.max_tokens_per_chr max_tokens_per_char?"),
        ({"filtr": {}}, "filtr filter?"),
        ({"pretrain": {"architecture": {"lairs": 2}}}, "pretrain.architecture.lairs layers?"),
        ({"pretrain": {"batch_size": 0}}, "pretrain.batch_size 1 0"),
        ({"pretrain": {"architecture": {"heads": 5}}}, "hidden 768 heads 5"),
        ({"tokenize": {"sort": "length"}}, 'tokenize.sort "length" sentence-length unigram'),
        ({"finetune": {"tasks": ["colla"]}}, 'finetune.tasks.0 "colla" cola?'),
        ({"finetune": {"tasks": []}}, "finetune.tasks"),
        ({"download": {"files": ["x.jsonl"]}}, "source 'pile' files"),
        ({"download": {"source": "files"}}, "source 'files' files"),
        ({"decontaminate": {"tasks": ["word-order"]}}, 'decontaminate.tasks.0 "word-order" wnli'),
        ({"filter": 3}, "filter 3"),
    ],
)
def test_a_bad_override_is_refused_with_the_field_and_what_it_takes(override, words: str):
    with pytest.raises(InputError) as refused:
        resolve("crammed-bert", override)
    for word in words.split():
        assert word in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_budget_in_words_has_the_key_of_the_number():
    number = {"budget": 0.05, "budget_unit": "hours"}
    for name in ("demo", "pocket-frontier", "bert-original"):
        found = resolve(name, {"pretrain": {"budget": "3 minutes"}})
        assert found == resolve(name, {"pretrain": number})
        assert found.pretrain.identity() == resolve(name, {"pretrain": number}).pretrain.identity()


@pytest.mark.parametrize(
    ("earlier", "later", "expected"),
    [
        ({"budget": 5e9, "budget_unit": "tokens"}, {"budget": "3 minutes"}, (0.05, "hours")),
        ({"budget": "3 minutes"}, {"budget": "3e6 tokens"}, (3e6, "tokens")),
        ({"budget": "3e6 tokens"}, {"budget": 5e6}, (5e6, "tokens")),
        ({"budget": "3e6 tokens"}, {"budget": "5e6"}, (5e6, "tokens")),
        ({"budget": "3e6 tokens"}, {"budget": 2, "budget_unit": "hours"}, (2, "hours")),
        ({"budget": "3e6 tokens"}, {"batch_size": 16}, (3e6, "tokens")),
        ({"budget": 3e6, "budget_unit": "tokens"}, {"budget": 5e6}, (5e6, "tokens")),
        ({}, {"budget": "1e15 flops", "budget_unit": "flops"}, (1e15, "flops")),
    ],
)
def test_of_two_budgets_the_later_one_counts_and_words_bring_their_unit(earlier: dict, later: dict, expected: tuple):
    merged = merge({"pretrain": earlier}, {"pretrain": later})
    found = resolve("demo", merged).pretrain
    assert (found.budget, found.budget_unit) == expected


def test_a_unit_that_contradicts_a_budget_in_words_is_refused():
    words = {"pretrain": {"budget": "3 hours"}}
    unit = {"pretrain": {"budget_unit": "tokens"}}
    for override in (merge(words, unit), {"pretrain": words["pretrain"] | unit["pretrain"]}):
        with pytest.raises(InputError, match=r"pretrain.*3 hours.*tokens"):
            resolve("demo", override)


def test_an_unknown_recipe_is_refused_with_the_names_of_all_recipes():
    with pytest.raises(InputError) as refused:
        resolve("crammed", {})
    assert [name for name in DELTAS if name not in str(refused.value)] == []


@functools.cache
def schema() -> dict:
    """The schema from which Prefect makes its form."""
    return parameter_schema(cram).model_dump_for_openapi()


def form_sends(field: dict, definitions: dict) -> object:
    """The value of an untouched field in Prefect 3.8.8's form, as read in its source and seen in a browser."""
    reference = field.get("$ref") or next((one["$ref"] for one in field.get("allOf", []) if "$ref" in one), None)
    field = definitions[reference.split("/")[-1]] | field if reference else field
    if field.get("type") == "boolean":
        return field.get("default", False)
    if "properties" in field:
        held = {name: form_sends(inner, definitions) for name, inner in field["properties"].items()}
        return {name: value for name, value in held.items() if value is not None} or field.get("default")
    return field.get("default")


def test_an_untouched_form_overrides_nothing():
    about = schema()
    sent = {field: form_sends(inner, about["definitions"]) for field, inner in about["properties"].items()}
    assert sent == {"recipe": "demo", "override": {}, "until": "report", "use": {}, "refresh": []}


def test_the_empty_levels_that_a_form_sends_for_cleared_fields_change_nothing():
    cleared = {"pretrain": {"architecture": {}}, "report": {}}
    assert resolve("demo", cleared) == RECIPES["demo"]
    assert without_empty(cleared | {"filter": {"method": False}}) == {"filter": {"method": False}}


def test_the_form_describes_the_values_of_each_field_without_html():
    about = schema()["definitions"]
    kinds = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
    for name, definition in about.items():
        for field, inner in definition["properties"].items():
            description = inner.get("description", "").lower()
            assert "<" not in description, f"{name}.{field}"
            limits = [str(inner[kind]) for kind in kinds if kind in inner]
            for expected in (*limits, *(str(choice).lower() for choice in inner.get("enum", ()))):
                assert expected in description.replace(",", "") or expected in description, f"{name}.{field}"
    layers = about["ArchitectureOverride"]["properties"]["layers"]
    assert (layers["title"], "16" in layers["description"]) == ("layers", True)


def test_an_override_is_validated_at_submission():
    for good in ({"architecture": {"tied": False}}, {"architecture": {}, "batch_size": 1}):
        assert is_valid({"override": {"pretrain": good}}, schema())
    for bad in ({"tied": "no"}, {"tide": True}, {"layers": 0}):
        assert not is_valid({"override": {"pretrain": {"architecture": bad}}}, schema())
    for weight, good in ((1, True), (0, False)):
        assert is_valid({"override": {"download": {"source": {"wikipedia": weight}}}}, schema()) is good
    assert not is_valid({"override": {"filter": {"max_tokens": 1}}}, schema())
    words = {"override": {"pretrain": {"budget": "3 minutes"}}}
    assert cram.validate_parameters(words)["override"] == words["override"], "they reach the flow as they are"
    for budget, good in (("3 minutes", True), (0.05, True), (-1, False), (None, False)):
        assert is_valid({"override": {"pretrain": {"budget": budget}}}, schema()) is good


@pytest.mark.parametrize(
    ("override", "last", "field"),
    [
        ({"tokenize": {"length": 64}}, "pretrain", "finetune.max_tokens"),
        ({"pretrain": {"architecture": {"funnel": 1}}, "tokenize": {"length": 129}}, "tokenize", "tokenize.length"),
    ],
    ids=["shorter than inputs of finetuning", "odd for a model that halves it"],
)
def test_a_length_that_does_not_fit_is_refused_if_the_run_reaches_the_stage(override: dict, last: str, field: str):
    override = override | {"minimal_pairs": {"data": []}}
    assert checked_plan("crammed-bert", override, last, {}, []).steps
    following = "finetune" if last == "pretrain" else STAGES[STAGES.index(last) + 1]
    with pytest.raises(InputError, match=re.escape(field)):
        checked_plan("crammed-bert", override, following, {}, [])


def test_the_recipe_for_three_minutes_is_the_demos_model_and_training_on_the_text_of_pocket_frontier():
    mini, demo, pocket_frontier = (RECIPES[name] for name in ("pocket-mini", "demo", "pocket-frontier"))
    assert mini.pretrain == demo.pretrain.model_copy(update={"budget": 0.05})
    assert mini.vocabulary.entries == demo.vocabulary.entries
    assert (mini.download, mini.finetune.data) == (pocket_frontier.download, pocket_frontier.finetune.data)


@pytest.mark.parametrize(("name", "fewest", "most"), [("pocket-mini", 700, 2000), ("pocket-frontier", 15, 25)])
def test_three_minutes_of_the_slow_machine_are_so_many_steps(name: str, fewest: int, most: int):
    recipe = RECIPES[name]
    tokens = 0.05 * SLOW_TOKENS * POCKET_OPERATIONS / operations_per_token(recipe)
    assert fewest < tokens / recipe.pretrain.batch_size / recipe.tokenize.length < most
