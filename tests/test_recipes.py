"""Recipes: deltas from the paper's, overrides, and Prefect's form for them."""

import functools
import re
from pathlib import Path
from typing import get_args

import pytest
import torch
from prefect.utilities.callables import parameter_schema
from prefect.utilities.schema_tools.validation import is_valid
from pydantic import BaseModel

from flows.cram import cram, planned
from flows.recipes import DELTAS, RECIPES, STAGES, RecipeName, StageName, resolve, without_empty
from model import InputError, bert, schedules
from model.settings import Training
from tasks.glue.tasks import GLUE

FULL = [name for name in DELTAS if name != "demo" and not name.startswith("pocket")]


def test_all_recipes_finetune_by_the_papers_rules():
    finetune = RECIPES["crammed-bert"].finetune
    assert (finetune.epochs, finetune.batch_size, finetune.learning_rate, finetune.warmup) == (5, 16, 4e-5, 0.1)
    assert (finetune.dropout, finetune.seeds, len(finetune.tasks)) == (0.1, 5, 8)


def test_names_of_stages_and_recipes_are_the_same_everywhere():
    assert get_args(StageName) == STAGES
    assert get_args(RecipeName) == tuple(RECIPES) == tuple(DELTAS)


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
    paper, found, delta = leaves(RECIPES["crammed-bert"]), leaves(RECIPES[name]), leaves(DELTAS[name])
    changed = {field for field in paper if found[field] != paper[field]}
    assert changed - {"decontaminate.data"} == set(delta) - ({"report.title"} if name == "crammed-bert" else set())
    assert {field: found[field] for field in delta} == delta
    assert found["report.title"] == name


# bert-o4, v1/bert-o3, bert-base (o0), bert-original and bert-izsak of the reference implementation, with the schedules
# of its ablations: optimizer, rate, betas, epsilon, decay; schedule, warm-up; batch, ramp; clip, dropout, masks
O4 = ("adamw", 1e-3, 0.9, 0.98, 1e-12, 0.01, "triangle", 0, 8192, 0.6, 0.5, 0, 0.25)
TRAINING = {
    "crammed-bert": O4,
    "crammed-bert-v1": ("adamw", 1e-3, 0.9, 0.98, 1e-12, 0.01, "triangle", 0, 4096, 1, 0.5, 0, 0.15625),
    "bert-base": ("adam", 1e-4, 0.9, 0.999, 1e-8, 0.01, "trapezoid", 0.31, 512, 0, None, 0.1, 0.15),
    "bert-base-annealed": ("adam", 1e-4, 0.9, 0.999, 1e-8, 0.01, "polynomial", 0.01, 512, 0, None, 0.1, 0.15),
    "bert-original": ("adam", 1e-4, 0.9, 0.999, 1e-8, 0.01, "polynomial", 0.01, 256, 0, None, 0.1, 0.15),
    "izsak": ("adamw", 2e-3, 0.9, 0.98, 1e-6, 0.01, "linear", 0.06, 4096, 0, None, 0.1, 0.15),
    "data-reverted": O4,
    "training-reverted": ("adam", 1e-4, 0.9, 0.999, 1e-8, 0.01, "cosine", 0.06, 512, 0, None, 0.1, 0.15),
    "minimal-training": ("adamw", 5e-4, 0.9, 0.98, 1e-12, 0.01, "cosine", 0.06, 1536, 0, None, 0, 0.15),
    "minimal-training-large-batch": ("adamw", 5e-4, 0.9, 0.98, 1e-12, 0.01, "cosine", 0.06, 8192, 0, None, 0, 0.15),
    "architecture-reverted": O4,
    "minimal-architecture": O4,
    "architecture-and-training-reverted": (
        *("adam", 1e-4, 0.9, 0.999, 1e-8, 0.01, "cosine", 0.06),
        *(512, 0, None, 0.1, 0.15),
    ),
    "modern": ("muon", 4e-3, 0.9, 0.95, 1e-8, 0.05, "trapezoid", 0.02, 16384, 0.6, None, 0, 0.3),
}


@pytest.mark.parametrize("name", FULL)
def test_a_recipe_trains_as_in_the_reference_implementation(name: str):
    t = RECIPES[name].pretrain
    assert TRAINING[name] == (
        *(t.optimizer, t.learning_rate, t.beta1, t.beta2, t.adam_eps, t.weight_decay, t.schedule, t.warmup),
        *(t.batch_size, t.batch_ramp, t.clip, t.dropout, t.mask_fraction),
    )
    budget = (1_000_000 * 256 * 512, "tokens") if name == "bert-original" else (24, "hours")
    assert (t.budget, t.budget_unit) == budget
    if name == "modern":
        assert (t.matrix_learning_rate, t.momentum, t.cooldown) == (5e-3, 0.95, 0.5)
    assert t.decay_norms == (name == "training-reverted")


def operations(name: str, masks: int | None = None) -> float:
    """Per token of a recipe; with `masks`, for so many masked positions."""
    recipe = RECIPES[name]
    length, training = recipe.tokenize.length, recipe.pretrain
    masks = masks or round(training.mask_fraction * length)
    return bert.operations(training.architecture, recipe.vocabulary.entries, length, masks)


def test_bert_base_has_the_rates_of_the_reference_in_a_day_of_an_a6000():
    day = 0.42 * 154.8e12 * 24 * 3600 / operations("bert-base", 128) / (256 * 128)  # micro-batches; the head everywhere
    for hundredth in range(100):
        step = hundredth / 100 * day
        theirs = min(step / 80_000, 1 - (step - 80_000) / (8_000_000 - 80_000))
        assert abs(schedules.rate(RECIPES["bert-base"].pretrain, hundredth / 100) - theirs) < 0.03, hundredth
    strong = {"schedule": "polynomial", "warmup": 0.01, "cooldown": Training().cooldown}
    assert RECIPES["bert-base-annealed"].pretrain == RECIPES["bert-base"].pretrain.model_copy(update=strong)


# layers, hidden, heads, width of feed-forward layers; activation, order of norms, positions, epsilon of norms
PAPERS = (16, 768, 12, 1536, "geglu", "pre", "scaled-sinusoidal", 1e-12)
BERTS = (12, 768, 12, 3072, "gelu", "post", "learned", 1e-12)
LAYOUTS = {
    "bert-base": BERTS,
    "bert-base-annealed": BERTS,
    "bert-original": BERTS,
    "izsak": (24, 1024, 16, 4096, "gelu", "pre", "learned", 1e-6),
    "architecture-reverted": BERTS,
    "minimal-architecture": (*BERTS[:5], "pre", *BERTS[6:]),
    "architecture-and-training-reverted": BERTS,
    "modern": (*PAPERS[:6], "rotary", 1e-5),
}


@pytest.mark.parametrize("name", FULL)
def test_a_recipe_has_the_layout_of_the_reference_implementation(name: str):
    a = RECIPES[name].pretrain.architecture
    assert LAYOUTS.get(name, PAPERS) == (
        *(a.layers, a.hidden, a.heads, a.inner),
        *(a.activation, a.norm_order, a.positions, a.norm_eps),
    )


# source, documents, megabytes; cuts repeated passages; tokens a character; order, tokens a sequence, most sequences; entries
PILE = ("pile", 8_000_000, 0, False, 0.3, "sentence-length", 128, 85_000_000, 32_768)
BOOKS = ({"wikipedia": 3, "books": 1}, 0, 20_000, False, None, "random", 128, 35_000_000, 32_768)
TEXT = {
    "crammed-bert-v1": ("c4", 25_000_000, 0, True, 0.25, "sentence-length", 128, 85_000_000, 32_768),
    "bert-base": BOOKS,
    "bert-base-annealed": BOOKS,
    "bert-original": (*BOOKS[:6], 512, *BOOKS[7:8], 30_522),
    "izsak": BOOKS,
    "data-reverted": BOOKS,
}


@pytest.mark.parametrize("name", FULL)
def test_a_recipe_reads_the_text_of_its_row_in_the_paper(name: str):
    r = RECIPES[name]
    assert TEXT.get(name, PILE) == (
        *(r.download.source, r.download.documents, r.download.megabytes),
        *(r.deduplicate.methods == ["substring"], r.filter.max_tokens_per_char),
        *(r.tokenize.sort, r.tokenize.length, r.tokenize.max_sequences, r.vocabulary.entries),
    )
    assert r.deduplicate.substring.bytes == 75
    assert r.finetune == RECIPES["crammed-bert"].finetune, "one protocol for all recipes"


@functools.cache
def parameters(name: str) -> int:
    """Of a recipe's model, which can compute a loss."""
    recipe = RECIPES[name]
    length, training = recipe.tokenize.length, recipe.pretrain
    with torch.device("meta"):  # shapes without values
        model = bert.Bert(training.architecture, recipe.vocabulary.entries, length)
        places = torch.zeros(2, max(1, round(training.mask_fraction * length)), dtype=torch.long)
        assert model(torch.zeros(2, length, dtype=torch.long), places, places).shape == ()
    return sum(p.numel() for p in model.parameters())


def bert_parameters(name: str) -> int:
    """Parameters of transformers' BERT without token types, at the sizes of a recipe."""
    from transformers import BertConfig, BertForMaskedLM

    recipe = RECIPES[name]
    config = BertConfig(vocab_size=recipe.vocabulary.entries, max_position_embeddings=recipe.tokenize.length)
    with torch.device("meta"):
        return BertForMaskedLM(config).num_parameters() - config.type_vocab_size * 768


def modernbert_parameters(name: str) -> int:
    """Parameters of transformers' ModernBERT, at the paper's sizes."""
    from transformers import ModernBertConfig, ModernBertForMaskedLM

    config = ModernBertConfig(
        vocab_size=32_768,
        hidden_size=768,
        intermediate_size=1536,
        num_hidden_layers=16,
        num_attention_heads=12,
        decoder_bias=False,
        layer_types=["full_attention"] * 16,
        **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 0),
    )
    with torch.device("meta"):
        return ModernBertForMaskedLM(config).num_parameters()


def pre_norm_parameters(name: str) -> int:
    """Parameters of a pre-norm BERT with biases, from its shapes."""
    layers, width, wide = {"izsak": (24, 1024, 4096), "minimal-architecture": (12, 768, 3072)}[name]
    layer = 4 * (width * width + width) + 2 * width * wide + wide + width + 2 * 2 * width
    embedding, head = 32_768 * width + 128 * width + 2 * width, width * width + width + 2 * width + 32_768
    return embedding + layers * layer + head


COUNTS = {
    **dict.fromkeys(("bert-base", "bert-base-annealed", "bert-original"), bert_parameters),
    **dict.fromkeys(("architecture-reverted", "architecture-and-training-reverted"), bert_parameters),
    **dict.fromkeys(("izsak", "minimal-architecture"), pre_norm_parameters),
    "modern": modernbert_parameters,
}


@pytest.mark.parametrize("name", FULL)
def test_a_model_has_as_many_parameters_as_its_model_in_the_literature(name: str):
    assert parameters(name) == COUNTS.get(name, lambda name: 119_589_889)(name)  # the paper's, by its shapes
    if name == "bert-original":
        assert parameters(name) == 109_514_298 - 2 * 768, "bert-base-uncased as BertForMaskedLM"


@pytest.mark.parametrize("name", [name for name in DELTAS if name not in FULL])
def test_the_model_of_every_small_recipe_can_be_built_and_trained(name: str):
    assert parameters(name) > 5e5


POCKET = {
    "tokenize.heldout_fraction": 0.005,
    "tokenize.max_sequences": 250_000,
    "tokenize.sort": "random",
    "pretrain.architecture.layers": 4,
    "pretrain.architecture.hidden": 256,
    "pretrain.architecture.heads": 4,
    "pretrain.architecture.intermediate": 768,
    "pretrain.budget": 1 / 3,
    "pretrain.batch_size": 64,
    "pretrain.learning_rate": 4e-3,
    "finetune.seeds": 1,
    "finetune.learning_rate": 2e-4,
    "report.title": "pocket",
}


def test_pocket_keeps_its_values():
    paper, small = leaves(RECIPES["crammed-bert"]), leaves(RECIPES["pocket"])
    assert {field: value for field, value in small.items() if value != paper[field]} == POCKET


@pytest.mark.parametrize("name", FULL)
def test_every_recipe_has_a_pocket_recipe_by_the_same_rule(name: str):
    full, small_name = RECIPES[name], "pocket" if name == "crammed-bert" else f"pocket-{name}"
    small = RECIPES[small_name]
    large, little = full.pretrain.architecture, small.pretrain.architecture
    assert little.layers >= 2
    assert abs(little.layers - large.layers / 4) <= 0.5
    assert little.hidden == 64 * little.heads
    assert abs(little.hidden - large.hidden / 3) <= 32
    assert little.intermediate % 6 == 0
    assert abs(little.intermediate - little.hidden * large.intermediate / large.hidden) <= 3
    assert small.pretrain.batch_size == max(16, full.pretrain.batch_size // 128)
    faster = 1 if full.pretrain.optimizer == "muon" else 4
    assert small.pretrain.learning_rate == faster * full.pretrain.learning_rate
    assert (small.pretrain.budget, small.pretrain.budget_unit) == (1 / 3, "hours")
    assert small.report.title == small_name
    before, after = leaves(full), leaves(small)
    assert all(after[field] == POCKET[field] for field in POCKET if not field.startswith(("pretrain", "report")))
    assert {field for field in after if after[field] != before[field]} <= {*POCKET, "pretrain.budget_unit"}


def cells(room: str, section: str) -> list[list[str]]:
    """The rows of the table in a section of a manual, without its head."""
    manual = Path(__file__).parents[1] / room / "README.md"
    text = manual.read_text().split(f"\n## {section}\n")[1].split("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return rows[1:]


@pytest.mark.parametrize("name", [*FULL, "demo"])
def test_the_manual_says_how_many_parameters_a_recipe_has(name: str):
    (row,) = [row for row in cells("flows", "Recipes") if row[0] == f"`{name}`"]
    assert re.findall(r"([\d.]+) M", row[1]) == [f"{parameters(name) / 1e6:.1f}"]


@pytest.mark.parametrize(("name", "column"), [("crammed-bert", 5), ("modern", 6)])
def test_the_manual_says_how_many_tokens_a_day_half_a_cards_peak_is(name: str, column: int):
    cards = cells("model", "GPUs")
    for row in cards:
        a_day = 0.5 * 24 * 3600 * float(row[2].removesuffix(" TFLOP/s")) * 1e12
        assert row[column] == f"{a_day / operations(name) / 1e9:.1f} billion", row[0]
    assert len(cards) == 6


@pytest.mark.parametrize(("name", "percent"), [("bert-base", 19), ("architecture-reverted", 17)])
def test_the_manual_says_how_many_operations_the_head_at_masked_positions_saves(name: str, percent: int):
    assert round(100 * (1 - operations(name) / operations(name, 128))) == percent
    (row,) = [row for row in cells("flows", "Recipes") if row[0] == f"`{name}`"]
    assert f"{percent} % fewer operations" in row[1]


def test_the_table_of_deviations_names_fields_and_recipes_that_exist():
    text = (Path(__file__).parents[1] / "flows" / "README.md").read_text().split("\n## Deviations from the paper\n")[1]
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    rows = [row for row in rows if row[0] != "what"]
    assert len(rows) > 40
    for row in rows:
        assert len(row) == 5, row
        value = RECIPES["crammed-bert"]
        for field in row[3].strip("`").split("."):
            assert field in type(value).model_fields, row
            value = getattr(value, field)
    for name in re.findall(r"`((?:bert|minimal|training|architecture|crammed)-[\w-]+)`", text):
        assert name in RECIPES or name == "bert-o4", name


def test_a_mixture_replaces_another_mixture():
    assert resolve("bert-base", {"download": {"source": {"c4": 1}}}).download.source == {"c4": 1}
    assert resolve("bert-base", {"download": {"source": "c4"}}).download.source == "c4"


def test_an_override_changes_its_fields_only():
    changed = leaves(resolve("demo", {"pretrain": {"architecture": {"layers": 3}}, "filter": {"min_characters": 7}}))
    expected = {"pretrain.architecture.layers": 3, "filter.min_characters": 7}
    assert changed == leaves(RECIPES["demo"]) | expected


@pytest.mark.parametrize("name", DELTAS)
def test_every_recipe_removes_the_data_that_scores_it_from_its_text(name: str):
    recipe = RECIPES[name]
    assert (recipe.decontaminate.method, recipe.decontaminate.words) == ("drop", 13)
    assert recipe.decontaminate.data == recipe.finetune.data
    assert set(recipe.decontaminate.tasks) == {*GLUE, "wnli"}
    assert resolve(name, {"finetune": {"data": "~/glue", "tasks": ["cola"]}}).decontaminate.data == "~/glue"
    other = resolve(name, {"decontaminate": {"data": "elsewhere", "words": 8}})
    assert (other.decontaminate.data, other.decontaminate.words) == ("elsewhere", 8)
    assert other.finetune == recipe.finetune


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ({"filter": {"max_tokens_per_chr": 1}}, "filter.max_tokens_per_chr max_tokens_per_char?"),
        ({"filter": {"vocabulary_entries": 9}}, "filter.vocabulary_entries measure.vocabulary_entries"),
        ({"filtr": {}}, "filtr filter?"),
        ({"pretrain": {"architecture": {"lairs": 2}}}, "pretrain.architecture.lairs layers?"),
        ({"pretrain": {"batch_size": 0}}, "pretrain.batch_size 1 0"),
        ({"pretrain": {"architecture": {"heads": 5}}}, "hidden 768 heads 5"),
        ({"tokenize": {"sort": "length"}}, "tokenize.sort 'sentence-length' 'unigram' 'length'"),
        ({"finetune": {"tasks": ["colla"]}}, "finetune.tasks.0 'cola' 'colla'"),
        ({"finetune": {"tasks": []}}, "finetune.tasks"),
        ({"finetune": {"epochs": 21}}, "finetune.epochs 20"),
        ({"finetune": {"modern": {"rte": {"epoch": 3}}}}, "finetune.modern.rte.epoch epochs?"),
        ({"finetune": {"epochs": 6}}, "finetune epochs 6 5"),
        ({"finetune": {"modern": {"mnli": {"start": "mnli"}}, "protocols": ["modern"]}}, "mnli.start"),
        ({"finetune": {"modern": {"warmup": 0.1}}}, "finetune.modern ['cramming'] 'modern'"),
        ({"finetune": {"protocols": ["modern"], "baseline": True}}, "finetune.baseline ['modern']"),
        ({"finetune": {"protocols": ["modern"], "learning_rate": 1e-3}}, "finetune.learning_rate"),
        ({"download": {"files": ["x.jsonl"]}}, "source 'pile' files"),
        ({"download": {"source": "files"}}, "source 'files' files"),
        ({"decontaminate": {"words": 4}}, "decontaminate.words 5 4"),
        ({"decontaminate": {"tasks": ["word-order"]}}, "decontaminate.tasks.0 'wnli' 'word-order'"),
        ({"filter": 3}, "filter 3"),
        ([1], "[1]"),
    ],
)
def test_a_bad_override_is_refused_with_the_field_and_what_it_takes(override, words: str):
    with pytest.raises(InputError) as refused:
        resolve("crammed-bert", override)
    for word in words.split():
        assert word in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "finetune",
    [
        {
            **{"protocols": ["modern"], "dropout": 0.0, "max_tokens": 64},
            **{"batches": "random", "keep": "none", "test": True},
        },
        {"protocols": ["cramming", "modern"], "seeds": 2, "modern": {"head": "tanh"}},
    ],
)
def test_fields_that_the_chosen_protocols_read_are_accepted(finetune: dict):
    assert resolve("pocket", {"finetune": finetune}).finetune.protocols == finetune["protocols"]


def test_an_unknown_recipe_is_refused_with_the_names_of_all_recipes():
    with pytest.raises(InputError, match=r"'crammed'.*crammed-bert, .*modern, pocket, .*demo"):
        resolve("crammed", {})


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


@pytest.mark.parametrize("name", ["demo", "crammed-bert", "bert-original", "pocket-modern"])
def test_an_untouched_form_runs_the_recipe_to_the_key(name: str):
    about = schema()
    sent = {field: form_sends(inner, about["definitions"]) for field, inner in about["properties"].items()}
    assert sent == {"recipe": "demo", "override": {}, "until": "report", "use": {}, "refresh": []}
    plans = [planned(name, override, "report", {}, []) for override in ({}, sent["override"])]
    assert len({str([(step.stage, step.params) for step in plan.steps]) for plan in plans}) == 1


def test_the_empty_levels_that_a_form_sends_for_cleared_fields_change_nothing():
    cleared = {"pretrain": {"architecture": {}}, "finetune": {"modern": {"rte": {}}}, "report": {}}  # recorded
    assert resolve("demo", cleared) == RECIPES["demo"]
    assert without_empty(cleared | {"filter": {"method": False}}) == {"filter": {"method": False}}


def test_the_form_describes_the_values_of_each_field_without_html():
    about = schema()["definitions"]
    for name, definition in about.items():
        for field, inner in definition["properties"].items():
            description = inner.get("description", "").lower()
            assert "<" not in description, f"{name}.{field}"
            kinds = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
            limits = [str(inner[kind]) for kind in kinds if kind in inner]
            for expected in (*limits, *(str(choice).lower() for choice in inner.get("enum", ()))):
                assert expected in description.replace(",", "") or expected in description, f"{name}.{field}"
    layers = about["ArchitectureOverride"]["properties"]["layers"]
    assert (layers["title"], "16" in layers["description"]) == ("layers", True)


@pytest.mark.parametrize(
    ("override", "good"),
    [
        ({"filter": {}}, True),
        ({"pretrain": {"architecture": {"tied": False}}}, True),
        ({"download": {"source": {"wikipedia": 3, "books": 1}}}, True),
        ({"pretrain": {"architecture": {"tied": "no"}}}, False),
        ({"pretrain": {"architecture": {"tide": True}}}, False),
        ({"pretrain": {"architecture": {"layers": 0}}}, False),
        ({"download": {"source": {"wikipedia": 0}}}, False),
        ({"filter": {"max_tokens": 1}}, False),
        ({"nothing": {}}, False),
    ],
)
def test_an_override_is_validated_at_submission(override: dict, good: bool):
    assert is_valid({"override": override}, schema()) is good


@pytest.mark.parametrize(
    ("override", "last", "field"),
    [
        ({"tokenize": {"length": 64}}, "pretrain", "finetune.max_tokens"),
        ({"pretrain": {"architecture": {"funnel": 1}}, "tokenize": {"length": 129}}, "tokenize", "tokenize.length"),
    ],
    ids=["shorter than inputs of finetuning", "odd for a model that halves it"],
)
def test_a_length_that_does_not_fit_is_refused_if_the_run_reaches_the_stage(override: dict, last: str, field: str):
    assert planned("crammed-bert", override, last, {}, []).steps
    following = STAGES[STAGES.index(last) + 1]
    with pytest.raises(InputError, match=re.escape(field)):
        planned("crammed-bert", override, following, {}, [])


def test_machine_settings_are_no_parameters():
    fields = {field for stage in RECIPES["demo"].model_dump().values() for field in stage}
    assert not fields & {"workers", "device", "dtype", "compile", "micro_batch", "out", "cache"}


def test_every_parameter_is_described():
    for stage in STAGES:
        for name, field in type(getattr(RECIPES["demo"], stage)).model_fields.items():
            assert field.description, f"{stage}.{name}"


def test_there_is_one_finetuning_run_per_task_seed_and_start():
    asked = {"finetune": {"seeds": 2, "tasks": ["cola", "rte"], "baseline": True}}
    runs = [run for run, _ in resolve("pocket", asked).finetune.runs()]
    assert len(runs) == len({(r.task, r.seed, r.pretrained) for r in runs}) == 8
    fewer = [run for run, _ in resolve("pocket", {"finetune": {"seeds": 1, "tasks": ["cola"]}}).finetune.runs()]
    assert fewer[0] in runs, "a run's params, so its key, don't depend on which other runs there are"
