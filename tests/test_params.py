"""`cram params` lists what the classes of the parameters define."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from chain import cram, refusal_of
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import to_jsonable_python

from flows.cli.run import parameters_in
from flows.recipes.recipe import RECIPES, STAGES
from model.wording import parse_budget
from tasks.glue.pairs import PairSet

PAIRS_OF_BLIMP = json.dumps([PairSet(data="nyu-mll/blimp").model_dump()])


def leaves(params: BaseModel, path: str = "") -> Iterator[tuple[str, FieldInfo, object]]:
    """The fields of a model that hold values, with their dotted names and values."""
    for name, field in type(params).model_fields.items():
        value = getattr(params, name)
        if isinstance(value, BaseModel):
            yield from leaves(value, f"{path}{name}.")
        else:
            yield path + name, field, value


def first_words(text: str) -> list[str]:
    """The first word of each line."""
    return [line.split()[0] for line in text.splitlines() if line.strip()]


@pytest.mark.parametrize("stage", STAGES)
def test_every_field_of_a_stage_is_listed_with_its_description_and_its_value_in_the_recipe(stage: str):
    params = getattr(RECIPES["pocket-frontier"], stage)
    starts = first_words(cram("params", stage, "--recipe", "pocket-frontier"))
    assert [word for word in starts if word in STAGES] == [stage]
    rows = parameters_in("pocket-frontier", stage)
    for (listed, _, shown, description), (name, field, value) in zip(rows, leaves(params), strict=True):
        assert listed == name
        assert description == field.description
        assert description, f"{stage}.{name} has no description"
        said = shown.replace(",", "") if type(value) is int else shown
        if name == "budget":
            said = str(parse_budget(shown)[0])
        assert said == value or json.loads(said) == to_jsonable_python(value), f"{stage}.{name}"
        assert name in starts


@pytest.mark.parametrize(
    ("stage", "name", "takes", "value"),
    [
        ("filter", "max_tokens_per_char", "number above 0, at most 100, or one of by-script, or null", "0.3"),
        ("filter", "max_characters", "integer above 0, or null", "null"),
        ("tokenize", "length", "integer 16 to 2,048", "128"),
        ("download", "files", "list of text", "[]"),
        (
            "pretrain",
            "budget",
            "number at least 0, or text, such as 20 minutes, 1.5 hours, 10 million tokens, 10 epochs, 1e18 flops",
            "24 hours",
        ),
        ("decontaminate", "data", "text", "nyu-mll/glue"),
        ("decontaminate", "pairs", 'list of object such as {"data": "FILE"}', PAIRS_OF_BLIMP),
        ("deduplicate", "methods", "list, each one of exact, minhash, substring", '["exact"]'),
        ("deduplicate", "minhash.bands", "integer 1 to 128", "14"),
    ],
)
def test_the_values_that_a_field_takes_are_in_words(stage: str, name: str, takes: str, value: str):
    [row] = (row for row in parameters_in("crammed-bert", stage) if row[0] == name)
    assert row[1:3] == (takes, value)


def test_without_names_all_stages_are_listed_with_the_values_of_the_papers_recipe():
    every = cram("params")
    assert [word for word in first_words(every) if word in STAGES] == list(STAGES)
    assert every == cram("params", "--recipe", "crammed-bert") != cram("params", "--recipe", "modern")
    assert "pocket-modern" in refusal_of("params", "--recipe", "pocket-modrn")
    assert "tokenize" in refusal_of("params", "tokenise")


def test_values_that_follow_from_other_fields_are_those_of_a_run():
    shown = {row.name: row.value for row in parameters_in("pocket-unicode", "filter")}
    assert shown["max_tokens_per_char"] == RECIPES["pocket-unicode"].filter.max_tokens_per_char == "by-script"


def test_a_recipe_file_has_its_own_values(tmp_path: Path):
    file = tmp_path / "my.toml"
    file.write_text('recipe = "pocket-mini"\n[pretrain]\nbudget = "90 seconds"\nbatch_size = 7\n', encoding="utf-8")
    here = {row.name: row.value for row in parameters_in(str(file), "pretrain")}
    there = {row.name: row.value for row in parameters_in("pocket-mini", "pretrain")}
    assert here == there | {"budget": "1.5 minutes", "batch_size": "7"}
    assert "my.toml" in cram("params", "pretrain", "--recipe", str(file))
    assert "gone.toml" in refusal_of("params", "--recipe", "gone.toml")
