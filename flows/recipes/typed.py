"""Settings as somebody types them: STAGE.FIELD=VALUE, and changes in JSON or in a file."""

import sys
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from flows.recipes.files import (
    EXAMPLE_OF_CHANGES,
    SUFFIXES,
    check_no_recipe,
    is_settings_file,
    parse,
    read_changes,
    tables_of_stages,
)
from flows.recipes.recipe import (
    Recipe,
    check_changes,
    dotted,
    level,
    merge,
    parse_json,
    place_and_schema,
    unknown_field,
)
from model.errors import InputError

STANDARD_INPUT = "-"
EXAMPLE = "--set 'pretrain.budget=3 minutes'"


def changes_of(overrides: list[str], settings: list[str], tables_only: bool = False) -> dict[str, Any]:
    """The changes of several --override and then of several --set; later values win.

    `tables_only`: of a recipe file, take the tables of its stages, instead of refusing it.
    """
    changes: dict[str, Any] = {}
    for text in overrides:
        changes = merge(changes, changes_in(text, tables_only))
    typed: dict[str, Any] = {}
    for text in settings:
        typed = merge(typed, setting_in(text))
    return merge(changes, typed)


# Changes in JSON or in a file


def changes_in(text: str, tables_only: bool) -> dict[str, Any]:
    """The changes of an --override: a JSON object, the name of a file, or - for standard input."""
    if is_settings_file(text):
        return read_changes(Path(text), tables_only)
    if text == STANDARD_INPUT:
        content = sys.stdin.read()
        suffix = ".json" if content.lstrip().startswith("{") else ".toml"
        changes = parse(content, suffix, "Standard input")
        if tables_only:
            changes = tables_of_stages(changes, "Standard input")
        check_no_recipe(changes, "Standard input")
        check_changes(changes)
        return changes
    try:
        changes = parse_json(text)
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"--override is not valid JSON: {error}. Expected an object, as in '{EXAMPLE_OF_CHANGES}', a file "
            f"({SUFFIXES}), or - for standard input."
        ) from error
    if not isinstance(changes, dict):
        raise InputError(f"--override is {changes!r}; expected an object, as in '{EXAMPLE_OF_CHANGES}'.")
    check_changes(changes)
    return changes


# STAGE.FIELD=VALUE


def setting_in(text: str) -> dict[str, Any]:
    """The change of a --set, as nested fields. Raises InputError for unknown fields and values that they don't take."""
    name, equals, value = text.partition("=")
    path = name.strip().split(".")
    if not equals or not all(path):
        raise InputError(f"--set is {text!r}; expected STAGE.FIELD=VALUE, as in {EXAMPLE}.")
    check_path(path)
    is_list = place_and_schema([*path])[1].get("type") == "array"
    refusals = []
    for meaning in meanings(value.strip(), is_list):
        change = nested(path, meaning)
        try:
            check_changes(change)
        except InputError as error:
            refusals.append(error)
        else:
            return change
    raise refusals[-1 if is_list else 0]


def check_path(path: list[str]) -> None:
    """Raise InputError unless there is such a field."""
    model: type[BaseModel] | None = Recipe
    for place, name in enumerate(path):
        if model is None:
            whole = dotted([*path[:place]])
            raise InputError(f"{whole} holds one value and has no field {name}. Set it whole: --set '{whole}=…'.")
        if name not in model.model_fields:
            raise InputError(unknown_field([*path[: place + 1]]))
        model = level(model.model_fields[name])


def meanings(text: str, is_list: bool) -> list[Any]:
    """What a typed value may mean, the likeliest first: JSON, text or, for a field that is a list, a list of one."""
    found: list[Any] = []
    try:
        found.append(parse_json(text))
    except (ValueError, RecursionError) as error:
        if is_list and text.startswith("["):
            raise InputError(f'{text} is not valid JSON: {error}. Expected a list such as ["a", "b"].') from error
    if not any(isinstance(value, dict | list) for value in found):
        found.append(text)
        if is_list:
            found.append([text])
    return found


def nested(path: list[str], value: Any) -> dict[str, Any]:
    """A value as a field of a field."""
    for name in reversed(path):
        value = {name: value}
    return value
