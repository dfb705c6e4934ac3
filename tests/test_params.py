"""`cram params` lists what the classes of the parameters define."""

import json
from collections.abc import Iterator

import pytest
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from typer.testing import CliRunner

from flows.cli.main import app
from flows.cli.run import parameters_in
from flows.recipes.recipe import RECIPES, STAGES
from model.errors import InputError


def leaves(params: BaseModel, path: str = "") -> Iterator[tuple[str, FieldInfo, object]]:
    """The fields of a model that hold values, with their dotted names and values."""
    for name, field in type(params).model_fields.items():
        value = getattr(params, name)
        if isinstance(value, BaseModel):
            yield from leaves(value, f"{path}{name}.")
        else:
            yield path + name, field, value


def first_words(*arguments: str) -> list[str]:
    """The first word of each line that the command prints."""
    lines = CliRunner().invoke(app, arguments).stdout.splitlines()
    return [line.split()[0] for line in lines if line.strip()]


@pytest.mark.parametrize("recipe", ["crammed-bert", "pocket-frontier"])
@pytest.mark.parametrize("stage", STAGES)
def test_every_field_of_a_stage_is_listed_with_its_description_and_its_value_in_the_recipe(stage: str, recipe: str):
    params = getattr(RECIPES[recipe], stage)
    if stage == "decontaminate":
        params = params.model_copy(update={"data": ""})  # a recipe leaves it to finetune.data
    rows, fields = parameters_in(recipe, stage), list(leaves(params))
    starts = first_words("params", stage, "--recipe", recipe)
    assert [word for word in starts if word in STAGES] == [stage]
    for (listed, _, shown, description), (name, field, value) in zip(rows, fields, strict=True):
        assert listed == name
        assert description == field.description
        assert description, f"{stage}.{name} has no description"
        said = shown.replace(",", "") if type(value) is int else shown
        assert said == value or json.loads(said) == value, f"{stage}.{name}"
        assert name in starts


@pytest.mark.parametrize(
    ("stage", "name", "takes", "value"),
    [
        ("filter", "max_tokens_per_char", "number above 0, at most 100, or one of by-script, or null", "0.3"),
        ("filter", "max_characters", "integer above 0, or null", "null"),
        ("tokenize", "length", "integer 16 to 2,048", "128"),
        ("download", "files", "list of text", "[]"),
        ("decontaminate", "data", "text", '""'),
        ("deduplicate", "methods", "list, each one of exact, minhash, substring", '["exact"]'),
        ("deduplicate", "minhash.bands", "integer 1 to 128", "14"),
    ],
)
def test_the_values_that_a_field_takes_are_in_words(stage: str, name: str, takes: str, value: str):
    [row] = (row for row in parameters_in("crammed-bert", stage) if row[0] == name)
    assert row[1:3] == (takes, value)


def test_the_values_are_those_of_the_papers_recipe_unless_another_is_named():
    names = ([], ["--recipe", "crammed-bert"], ["--recipe", "modern"])
    usual, same, other = (CliRunner().invoke(app, ["params", "pretrain", *more]) for more in names)
    assert {result.exit_code for result in (usual, same, other)} == {0}
    assert usual.stdout == same.stdout != other.stdout
    with pytest.raises(InputError, match="pocket-modern"):
        CliRunner().invoke(app, ["params", "--recipe", "pocket-modrn"], catch_exceptions=False)


def test_all_stages_are_listed_unless_one_is_named():
    assert [word for word in first_words("params") if word in STAGES] == list(STAGES)
    error = CliRunner().invoke(app, ["params", "tokenise"]).exception
    assert isinstance(error, InputError)
    assert "'tokenise'. Did you mean tokenize?" in str(error)
