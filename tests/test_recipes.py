"""Recipes: deltas from the paper's, overrides, and what bad ones get."""

from typing import get_args

import pytest
from pydantic import TypeAdapter, ValidationError

from flows.recipes import DELTAS, RECIPES, STAGES, Override, RecipeName, StageName, resolve
from model import InputError
from tasks.glue import GLUE


def test_the_default_recipe_is_the_papers_final_one():
    recipe = RECIPES["crammed-bert"]
    architecture = recipe.pretrain.architecture
    assert (architecture.layers, architecture.hidden, architecture.heads, architecture.intermediate) == (
        16,
        768,
        12,
        3072,
    )
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
    assert set(get_args(RecipeName)) == set(RECIPES) == set(DELTAS)


def test_pocket_and_demo_differ_from_the_paper_only_where_they_say_so():
    paper = RECIPES["crammed-bert"].model_dump()
    for name, delta in DELTAS.items():
        found = RECIPES[name].model_dump()
        for stage, fields in found.items():
            if stage == "decontaminate":
                assert fields.pop("data") == found["finetune"]["data"]
            changed = {field for field in fields if fields[field] != paper[stage][field]}
            assert changed <= set(delta.get(stage, {})), (name, stage)


def test_an_override_changes_one_field_and_keeps_the_recipes_others():
    found = resolve("demo", {"pretrain": {"architecture": {"layers": 3}}, "filter": {"max_tokens_per_char": 0.2}})
    demo = RECIPES["demo"]
    assert found.pretrain.architecture.layers == 3
    assert found.pretrain.architecture.hidden == demo.pretrain.architecture.hidden
    assert found.filter.vocabulary_entries == demo.filter.vocabulary_entries
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
        ({"filtr": {}}, ["filtr", "Did you mean filter"]),
        ({"pretrain": {"architecture": {"lairs": 2}}}, ["pretrain.architecture.lairs", "Did you mean layers"]),
        ({"pretrain": {"batch_size": 0}}, ["pretrain.batch_size", "greater than or equal to 1", "found 0"]),
        ({"pretrain": {"architecture": {"heads": 5}}}, ["hidden 768", "heads 5"]),
        ({"tokenize": {"sort": "length"}}, ["tokenize.sort", "sentence-length", "unigram", "'length'"]),
        ({"finetune": {"tasks": ["colla"]}}, ["finetune.tasks.0", "cola", "'colla'"]),
        ({"finetune": {"tasks": []}}, ["finetune.tasks"]),
        ({"finetune": {"epochs": 6}}, ["finetune.epochs", "less than or equal to 5"]),
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


def test_an_unknown_recipe_is_refused_with_those_there_are():
    with pytest.raises(InputError, match=r"'crammed'.*crammed-bert, pocket, demo"):
        resolve("crammed", {})


def test_the_submitted_override_is_partial_and_strict():
    partial = TypeAdapter(Override)
    assert partial.validate_python({"filter": {}}) == {"filter": {}}
    for wrong in ({"filter": {"x": 1}}, {"nothing": {}}, {"pretrain": {"architecture": {"layers": 0}}}):
        with pytest.raises(ValidationError):
            partial.validate_python(wrong)


def test_machine_settings_are_no_parameters():
    fields = {field for stage in RECIPES["demo"].model_dump().values() for field in stage}
    assert not fields & {"workers", "device", "dtype", "compile", "micro_batch", "out", "cache"}


def test_every_parameter_says_what_it_is():
    for stage in STAGES:
        for name, field in type(getattr(RECIPES["demo"], stage)).model_fields.items():
            assert field.description, f"{stage}.{name}"


def test_finetuning_runs_are_one_a_task_seed_and_start():
    runs = list(
        resolve("pocket", {"finetune": {"seeds": 2, "tasks": ["cola", "rte"], "baseline": True}}).finetune.runs()
    )
    assert len(runs) == len({(r.task, r.seed, r.pretrained) for r in runs}) == 8
    fewer = list(resolve("pocket", {"finetune": {"seeds": 1, "tasks": ["cola"]}}).finetune.runs())
    assert fewer[0] in runs, "a run's params, so its key, don't depend on which other runs there are"
