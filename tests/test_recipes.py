"""Recipes: deltas from the paper's, overrides, and what bad ones get."""

import functools
import re
from pathlib import Path
from typing import get_args

import pytest
import torch
from prefect.utilities.callables import parameter_schema
from prefect.utilities.schema_tools.validation import is_valid
from pydantic import BaseModel, TypeAdapter, ValidationError

from flows.cram import cram, planned
from flows.recipes import DELTAS, RECIPES, STAGES, Override, RecipeName, StageName, resolve, without_empty
from model import InputError, bert, schedules
from model.settings import Architecture, Training
from tasks.glue.tasks import GLUE

FULL = [name for name in DELTAS if name != "demo" and not name.startswith("pocket")]


def test_the_default_recipe_is_the_papers_final_one():
    recipe = RECIPES["crammed-bert"]
    architecture = recipe.pretrain.architecture
    assert (architecture.layers, architecture.hidden, architecture.heads, architecture.inner) == (16, 768, 12, 1536)
    training = recipe.pretrain
    assert (training.budget, training.budget_unit, training.batch_size, training.batch_ramp) == (24, "hours", 8192, 0.6)
    assert (training.learning_rate, training.weight_decay, training.clip) == (1e-3, 0.01, 0.5)
    assert (training.beta1, training.beta2, training.adam_eps, training.mask_fraction) == (0.9, 0.98, 1e-12, 0.25)
    assert (recipe.vocabulary.entries, recipe.tokenize.length, recipe.tokenize.sort) == (32768, 128, "sentence-length")
    finetune = recipe.finetune
    assert (finetune.epochs, finetune.batch_size, finetune.learning_rate, finetune.warmup) == (5, 16, 4e-5, 0.1)
    assert (finetune.dropout, finetune.seeds, len(finetune.tasks)) == (0.1, 5, 8)


def test_stage_names_are_written_once_for_all_uses():
    assert get_args(StageName) == STAGES
    assert get_args(RecipeName) == tuple(RECIPES) == tuple(DELTAS)


def leaves(value: BaseModel | dict, above: str = "") -> dict:
    """All fields of a recipe, or of a delta from one, by their full names. A mixture of sources is one value."""
    found = {}
    for name, inner in value.items() if isinstance(value, dict) else value:
        if isinstance(inner, BaseModel) or (isinstance(inner, dict) and name != "source"):
            found |= leaves(inner, f"{above}{name}.")
        else:
            found[f"{above}{name}"] = inner
    return found


@pytest.mark.parametrize("name", [*FULL, "demo"])
def test_a_recipe_differs_from_the_papers_in_what_its_delta_names_and_in_nothing_else(name: str):
    paper, found, delta = leaves(RECIPES["crammed-bert"]), leaves(RECIPES[name]), leaves(DELTAS[name])
    changed = {field for field in paper if found[field] != paper[field]}
    assert changed - {"decontaminate.data"} == set(delta) - ({"report.title"} if name == "crammed-bert" else set())
    assert {field: found[field] for field in delta} == delta
    assert found["report.title"] == name


# of bert-o4, v1/bert-o3, bert-base (o0), bert-original and bert-izsak in the reference implementation, with the schedules of
# its ablations: optimizer, rate, betas, epsilon, decay; schedule, warm-up; batch, ramp; clip, dropout, masks
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
def test_a_recipe_trains_as_the_reference_implementation_does_under_that_name(name: str):
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
    """A token of the recipe's; as if there were so many masks."""
    recipe = RECIPES[name]
    length, training = recipe.tokenize.length, recipe.pretrain
    masks = masks or round(training.mask_fraction * length)
    return bert.operations(training.architecture, recipe.vocabulary.entries, length, masks)


def test_bert_base_has_the_rate_that_the_references_schedule_gives_a_day_of_an_a6000():
    day = 0.42 * 154.8e12 * 24 * 3600 / operations("bert-base", 128) / (256 * 128)  # micro-batches; the head everywhere
    for hundredth in range(100):
        step = hundredth / 100 * day
        theirs = min(step / 80_000, 1 - (step - 80_000) / (8_000_000 - 80_000))
        assert abs(schedules.rate(RECIPES["bert-base"].pretrain, hundredth / 100) - theirs) < 0.03, hundredth
    strong = {"schedule": "polynomial", "warmup": 0.01, "cooldown": Training().cooldown}
    assert RECIPES["bert-base-annealed"].pretrain == RECIPES["bert-base"].pretrain.model_copy(update=strong)


@pytest.mark.parametrize(("name", "percent"), [("bert-base", 19), ("architecture-reverted", 17)])
def test_the_head_at_masked_positions_only_saves_the_operations_that_the_manual_says(name: str, percent: int):
    assert round(100 * (1 - operations(name) / operations(name, 128))) == percent
    (row,) = [row for row in cells("flows", "Recipes") if row[0] == f"`{name}`"]
    assert f"{percent} % fewer operations" in row[1]


PAPERS = Architecture()
BERTS = Architecture(
    layers=12,
    intermediate=3072,
    activation="gelu",
    norm_order="post",
    final_norm=False,
    bias=True,
    qkv_bias=True,
    positions="learned",
    head_transform=True,
    decoder_bias=True,
)
PRE_NORM = BERTS.model_copy(update={"norm_order": "pre"})
ARCHITECTURES = {
    "bert-base": BERTS,
    "bert-base-annealed": BERTS,
    "bert-original": BERTS,
    "izsak": PRE_NORM.model_copy(
        update={"layers": 24, "hidden": 1024, "heads": 16, "intermediate": 4096, "norm_eps": 1e-6}
    ),
    "architecture-reverted": BERTS,
    "minimal-architecture": PRE_NORM,
    "architecture-and-training-reverted": BERTS,
    "modern": Architecture(
        norm_bias=False,
        norm_eps=1e-5,
        first_norm=False,
        positions="rotary",
        head_transform=True,
        zero_outputs=True,
    ),
}


@pytest.mark.parametrize("name", FULL)
def test_a_recipe_has_the_layout_of_the_reference_implementation_under_that_name(name: str):
    assert RECIPES[name].pretrain.architecture == ARCHITECTURES.get(name, PAPERS)


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
def test_a_recipe_reads_the_text_of_the_row_of_the_paper_that_it_stands_for(name: str):
    r = RECIPES[name]
    assert TEXT.get(name, PILE) == (
        *(r.download.source, r.download.documents, r.download.megabytes),
        *(r.deduplicate.methods == ["substring"], r.filter.max_tokens_per_char),
        *(r.tokenize.sort, r.tokenize.length, r.tokenize.max_sequences, r.vocabulary.entries),
    )
    assert r.deduplicate.substring.bytes == 75
    assert r.finetune == RECIPES["crammed-bert"].finetune, "one protocol for all that are compared"


@functools.cache
def parameters(name: str) -> int:
    """Of a recipe's model, at the sizes of its own vocabulary and sequences; a training step of it fits together."""
    recipe = RECIPES[name]
    length, training = recipe.tokenize.length, recipe.pretrain
    with torch.device("meta"):  # shapes without values
        model = bert.Bert(training.architecture, recipe.vocabulary.entries, length)
        places = torch.zeros(2, max(1, round(training.mask_fraction * length)), dtype=torch.long)
        assert model(torch.zeros(2, length, dtype=torch.long), places, places).shape == ()
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("name", DELTAS)
def test_the_model_of_every_recipe_can_be_built_and_trained(name: str):
    assert parameters(name) > 1e6


@pytest.mark.parametrize("name", ["crammed-bert", "crammed-bert-v1", "data-reverted", "training-reverted"])
def test_the_papers_model_has_as_many_parameters_as_the_papers(name: str):
    layer = 2 * 2 * 768 + 4 * 768 * 768 + 768 * 3072 + 1536 * 768  # two norms; attention; GEGLU's two, and out
    embedding = 32_768 * 768 + 1 + 2 * 768  # the scale of the positions; a norm
    assert parameters(name) == embedding + 16 * layer + 2 * 768 == 119_589_889  # and the last norm


def test_the_minimal_architecture_has_as_many_parameters_as_its_shapes_say():
    attention, ffn = 4 * (768 * 768 + 768), 768 * 3072 + 3072 + 3072 * 768 + 768
    embedding, head = 32_768 * 768 + 128 * 768 + 2 * 768, 768 * 768 + 768 + 2 * 768 + 32_768
    assert parameters("minimal-architecture") == embedding + 12 * (attention + ffn + 2 * 2 * 768) + head


def test_izsak_has_as_many_parameters_as_its_shapes_say():
    attention, ffn = 4 * (1024 * 1024 + 1024), 1024 * 4096 + 4096 + 4096 * 1024 + 1024
    embedding, head = 32_768 * 1024 + 128 * 1024 + 2 * 1024, 1024 * 1024 + 1024 + 2 * 1024 + 32_768
    assert parameters("izsak") == embedding + 24 * (attention + ffn + 2 * 2 * 1024) + head


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("bert-base", None),
        ("bert-base-annealed", None),
        ("bert-original", 109_514_298),  # bert-base-uncased, as BertForMaskedLM
        ("architecture-reverted", None),
        ("architecture-and-training-reverted", None),
    ],
)
def test_bert_has_as_many_parameters_as_transformers_but_for_token_types(name: str, published: int | None):
    from transformers import BertConfig, BertForMaskedLM

    recipe = RECIPES[name]
    config = BertConfig(vocab_size=recipe.vocabulary.entries, max_position_embeddings=recipe.tokenize.length)
    with torch.device("meta"):
        theirs = BertForMaskedLM(config).num_parameters()
    assert parameters(name) == theirs - config.type_vocab_size * 768
    assert published in (None, theirs)


def test_modern_has_as_many_parameters_as_transformers_modernbert():
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
        assert parameters("modern") == ModernBertForMaskedLM(config).num_parameters()


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


def test_pocket_stays_what_runs_were_made_with():
    changed = {name: value for name, value in leaves(RECIPES["pocket"]).items() if name in POCKET}
    assert changed == POCKET
    paper = leaves(RECIPES["crammed-bert"])
    assert {name for name, value in leaves(RECIPES["pocket"]).items() if value != paper[name]} == set(POCKET)


@pytest.mark.parametrize("name", FULL)
def test_every_recipe_has_a_pocket_one_by_one_rule(name: str):
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
    """The rows of the table in a section of a room's manual, but for its head."""
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


def test_a_mixture_is_put_in_place_of_another_not_into_it():
    assert resolve("bert-base", {"download": {"source": {"c4": 1}}}).download.source == {"c4": 1}
    assert resolve("bert-base", {"download": {"source": "c4"}}).download.source == "c4"


def test_an_override_changes_one_field_and_keeps_the_recipes_others():
    found = resolve("demo", {"pretrain": {"architecture": {"layers": 3}}, "filter": {"max_tokens_per_char": 0.2}})
    demo = RECIPES["demo"]
    assert found.pretrain.architecture.layers == 3
    assert found.pretrain.architecture.hidden == demo.pretrain.architecture.hidden
    assert found.measure == demo.measure
    assert found.tokenize == demo.tokenize


@pytest.mark.parametrize("name", DELTAS)
def test_every_recipe_looks_in_its_text_for_what_it_is_scored_on(name: str):
    recipe = RECIPES[name]
    assert (recipe.decontaminate.method, recipe.decontaminate.words) == ("drop", 13)
    assert recipe.decontaminate.data == recipe.finetune.data
    assert set(recipe.decontaminate.tasks) == {*GLUE, "wnli"}
    local = resolve(name, {"finetune": {"data": "~/glue", "tasks": ["cola"]}})
    assert local.decontaminate.data == "~/glue"
    other = resolve(name, {"decontaminate": {"data": "elsewhere", "words": 8}})
    assert (other.decontaminate.data, other.decontaminate.words) == ("elsewhere", 8)
    assert other.finetune == recipe.finetune


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ({"filter": {"max_tokens_per_chr": 1}}, ["filter.max_tokens_per_chr", "Did you mean max_tokens_per_char"]),
        ({"filter": {"vocabulary_entries": 9}}, ["filter.vocabulary_entries", "now measure.vocabulary_entries"]),
        ({"filter": {"sample_megabytes": 9}}, ["filter.sample_megabytes", "now measure.sample_megabytes"]),
        ({"filtr": {}}, ["filtr", "Did you mean filter"]),
        ({"pretrain": {"architecture": {"lairs": 2}}}, ["pretrain.architecture.lairs", "Did you mean layers"]),
        ({"pretrain": {"batch_size": 0}}, ["pretrain.batch_size", "greater than or equal to 1", "found 0"]),
        ({"pretrain": {"architecture": {"heads": 5}}}, ["hidden 768", "heads 5"]),
        ({"tokenize": {"sort": "length"}}, ["tokenize.sort", "sentence-length", "unigram", "'length'"]),
        ({"finetune": {"tasks": ["colla"]}}, ["finetune.tasks.0", "cola", "'colla'"]),
        ({"finetune": {"tasks": []}}, ["finetune.tasks"]),
        ({"finetune": {"epochs": 21}}, ["finetune.epochs", "less than or equal to 20"]),
        ({"finetune": {"modern": {"rte": {"epoch": 3}}}}, ["finetune.modern.rte.epoch", "Did you mean epochs"]),
        ({"finetune": {"epochs": 6}}, ["finetune: epochs is 6", "allow 5"]),
        (
            {"finetune": {"modern": {"mnli": {"start": "mnli"}}, "protocols": ["modern"]}},
            ["mnli.start", "its own model"],
        ),
        (
            {"finetune": {"modern": {"warmup": 0.1}}},
            ["finetune.modern has no effect", "['cramming']", "add 'modern'"],
        ),
        (
            {"finetune": {"protocols": ["modern"], "baseline": True}},
            ["finetune.baseline has no effect", "['modern']"],
        ),
        (
            {"finetune": {"protocols": ["modern"], "learning_rate": 1e-3}},
            ["finetune.learning_rate has no effect"],
        ),
        ({"download": {"files": ["x.jsonl"]}}, ["source is 'pile'", "files"]),
        ({"download": {"source": "files"}}, ["source is 'files'", "files"]),
        ({"decontaminate": {"words": 4}}, ["decontaminate.words", "greater than or equal to 5", "found 4"]),
        ({"decontaminate": {"tasks": ["word-order"]}}, ["decontaminate.tasks.0", "wnli", "'word-order'"]),
        ({"filter": 3}, ["filter", "found 3"]),
        ([1], ["[1]", "object"]),
    ],
)
def test_a_bad_override_is_refused_with_its_name_and_what_was_expected(override, words: list[str]):
    with pytest.raises(InputError) as refused:
        resolve("crammed-bert", override)
    for word in words:
        assert word in str(refused.value)
    assert "\n" not in str(refused.value)


def test_what_both_protocols_read_and_what_a_recipe_says_by_itself_is_never_refused():
    asked = {
        "protocols": ["modern"],
        "dropout": 0.0,
        "max_tokens": 64,
        "batches": "random",
        "keep": "none",
        "test": True,
    }
    assert resolve("pocket", {"finetune": asked}).finetune.dropout == 0.0
    both = {"protocols": ["cramming", "modern"], "seeds": 2, "modern": {"head": "tanh"}}
    assert resolve("pocket", {"finetune": both}).finetune.seeds == 2


def test_an_unknown_recipe_is_refused_with_those_there_are():
    with pytest.raises(InputError, match=r"'crammed'.*crammed-bert, .*modern, pocket, .*demo"):
        resolve("crammed", {})


def test_the_submitted_override_is_partial_and_strict():
    partial = TypeAdapter(Override)
    assert partial.validate_python({"filter": {}}) == {"filter": {}}
    for wrong in ({"filter": {"x": 1}}, {"nothing": {}}, {"pretrain": {"architecture": {"layers": 0}}}):
        with pytest.raises(ValidationError):
            partial.validate_python(wrong)


def schema() -> dict:
    """What Prefect makes its form of."""
    return parameter_schema(cram).model_dump_for_openapi()


def form_sends(field: dict, definitions: dict) -> object:
    """What Prefect 3.8.8's form holds of a field that nobody touches, as read in its source and seen in a browser."""
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


def test_what_a_form_sends_of_cleared_fields_changes_nothing():
    cleared = {"pretrain": {"architecture": {}}, "finetune": {"modern": {"rte": {}}}, "report": {}}  # recorded
    assert resolve("demo", cleared) == RECIPES["demo"]
    assert without_empty(cleared) == {}
    assert without_empty({"pretrain": {"architecture": {"tied": False}}, "download": {}}) == {
        "pretrain": {"architecture": {"tied": False}}
    }


def test_the_form_says_what_each_field_takes_and_nothing_of_it_is_taken_for_html():
    about = schema()["definitions"]
    for name, definition in about.items():
        for field, inner in definition["properties"].items():
            told = inner.get("description", "").lower()
            assert "<" not in told, f"{name}.{field}"
            limits = [
                str(inner[k]) for k in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum") if k in inner
            ]
            for expected in (*limits, *(str(choice).lower() for choice in inner.get("enum", ()))):
                assert expected in told.replace(",", "") or expected in told, f"{name}.{field}: {told}"
    layers = about["ArchitectureOverride"]["properties"]["layers"]
    assert (layers["title"], "16" in layers["description"]) == ("layers", True)


def test_a_field_of_the_form_is_validated_at_submission():
    about = schema()
    for override, good in (
        ({"pretrain": {"architecture": {"tied": False}}}, True),
        ({"pretrain": {"architecture": {"tied": "no"}}}, False),
        ({"pretrain": {"architecture": {"tide": True}}}, False),
        ({"download": {"source": {"wikipedia": 3, "books": 1}}}, True),
        ({"download": {"source": {"wikipedia": 0}}}, False),
        ({"filter": {"max_tokens": 1}}, False),
    ):
        assert is_valid({"override": override}, about) is good, override


def test_longer_inputs_than_the_model_is_trained_on_are_refused_before_it_is():
    override = {"tokenize": {"length": 64}}
    with pytest.raises(InputError, match=r"finetune\.max_tokens is 128, but the model takes at most 64 tokens"):
        planned("crammed-bert", override, "report", {}, [])
    assert planned("crammed-bert", override, "pretrain", {}, []).steps  # finetuning isn't reached


def test_sequences_that_can_not_be_halved_are_refused_before_a_model_is_to_halve_them():
    odd = {"pretrain": {"architecture": {"funnel": 1}}, "tokenize": {"length": 129}}
    with pytest.raises(InputError, match=r"tokenize.length is 129, which can't be halved 1 time .* a multiple of 2"):
        planned("crammed-bert", odd, "pretrain", {}, [])
    planned("crammed-bert", odd, "tokenize", {}, [])


def test_machine_settings_are_no_parameters():
    fields = {field for stage in RECIPES["demo"].model_dump().values() for field in stage}
    assert not fields & {"workers", "device", "dtype", "compile", "micro_batch", "out", "cache"}


def test_every_parameter_says_what_it_is():
    for stage in STAGES:
        for name, field in type(getattr(RECIPES["demo"], stage)).model_fields.items():
            assert field.description, f"{stage}.{name}"


def test_finetuning_runs_are_one_a_task_seed_and_start():
    asked = {"finetune": {"seeds": 2, "tasks": ["cola", "rte"], "baseline": True}}
    runs = [run for run, _ in resolve("pocket", asked).finetune.runs()]
    assert len(runs) == len({(r.task, r.seed, r.pretrained) for r in runs}) == 8
    fewer = [run for run, _ in resolve("pocket", {"finetune": {"seeds": 1, "tasks": ["cola"]}}).finetune.runs()]
    assert fewer[0] in runs, "a run's params, so its key, don't depend on which other runs there are"


def test_the_table_of_deviations_names_fields_and_recipes_that_exist():
    manual = (Path(__file__).parents[1] / "flows" / "README.md").read_text()
    text = manual.split("\n## Deviations from the paper\n")[1]
    tables = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    rows = [row for row in tables if row[0] != "what"]
    assert len(rows) > 40
    for row in rows:
        assert len(row) == 5, row
        value = RECIPES["crammed-bert"]
        for field in row[3].strip("`").split("."):
            assert field in type(value).model_fields, row
            value = getattr(value, field)
    for name in re.findall(r"`((?:bert|minimal|training|architecture|crammed)-[\w-]+)`", text):
        assert name in RECIPES or name == "bert-o4", name
