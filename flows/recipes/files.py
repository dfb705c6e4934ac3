"""Files of settings in TOML, YAML or JSON: recipe files, and files with changes to a recipe.

A path in such a file counts from the folder that the file is in.
"""

import json
import logging
import os
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import TypeAdapter, ValidationError

from flows.recipes.deltas import DELTAS
from flows.recipes.recipe import STAGES, Recipe, check_changes, parse_json
from flows.summary import check_name, did_you_mean
from model.errors import InputError
from tasks.glue.own import FILE
from tasks.store.artifacts import LATEST

log = logging.getLogger(__name__)
RECIPE = "recipe"
ABOUT_THE_RUN = (RECIPE, "until", "use")  # in a recipe file, beside the tables of the stages
EXAMPLE = 'recipe = "pocket-frontier"'
EXAMPLE_OF_CHANGES = '{"filter": {"max_tokens_per_char": 0.25}}'
LONGEST_SHOWN = 40  # characters of what was found
QUOTES = 'In TOML, text stands in quotes, as in source = "files".'
PATHS = (("download", "files"),)  # fields that hold paths only
TASKS = ("finetune", "tasks")  # names, and definitions whose data may be paths
PAIRS = ("minimal_pairs", "data")  # files, folders and names on the hub
SEARCHED_PAIRS = ("decontaminate", "pairs")  # sets, each with such data
MODELS = (("pretrain", "start"), ("vocabulary", "start"))  # a folder, or another name of a model
DATA = (("download", "dataset"), ("finetune", "data"), ("decontaminate", "data"))  # a folder, or a name on the hub


class RecipeFile(NamedTuple):
    """What a recipe file asks for: the parameters of the flow `cram`, of which all but the first may be absent."""

    recipe: str
    override: dict[str, Any]
    until: str | None
    use: dict[str, str]


# Reading


def parse_yaml(text: str) -> Any:
    """The value of a YAML text. Raises ValueError if it isn't valid, or has a name twice in the same mapping."""
    import yaml  # here, since few runs have such files

    class Unique(yaml.SafeLoader):
        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
            names = [self.construct_object(name, deep=True) for name, _ in node.value]
            for name in names:
                if names.count(name) > 1:
                    line = node.start_mark.line + 1
                    raise ValueError(f"{name!r} occurs twice in the mapping at line {line}; merge the two")
            return super().construct_mapping(node, deep)

    try:
        return yaml.load(text, Unique)  # Unique is a SafeLoader
    except yaml.MarkedYAMLError as error:
        place = f" (at line {error.problem_mark.line + 1})" if error.problem_mark else ""
        raise ValueError(f"{error.problem}{place}") from error
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from error


PARSERS: dict[str, Callable[[str], Any]] = {
    ".toml": tomllib.loads,
    ".yaml": parse_yaml,
    ".yml": parse_yaml,
    ".json": parse_json,
}
SUFFIXES = ", ".join(PARSERS)
FORMATS = {".toml": "TOML", ".yaml": "YAML", ".yml": "YAML", ".json": "JSON"}


def is_settings_file(name: str) -> bool:
    """Whether this is the name of a file of settings, by its suffix."""
    return suffix_of(name) in PARSERS


def suffix_of(name: str) -> str:
    """The suffix of a file's name, in lower case."""
    return os.path.splitext(name)[1].lower()


def parse(text: str, suffix: str, name: str) -> dict[str, Any]:
    """The tables in a text of this format. Raises InputError, which begins with `name`, if it has none."""
    try:
        found = PARSERS[suffix](text)
    except (ValueError, RecursionError) as error:
        advice = f" {QUOTES}" if suffix == ".toml" and "Invalid value" in str(error) else ""
        raise InputError(f"{name} is not valid {FORMATS[suffix]}: {error}.{advice}") from error
    if found is None:  # an empty YAML file
        return {}
    if not isinstance(found, dict):
        shown = json.dumps(found, default=str)[:LONGEST_SHOWN]
        raise InputError(f"{name} holds {shown}; expected fields by stage, as in {EXAMPLE_OF_CHANGES}.")
    return found


def read_tables(path: Path) -> dict[str, Any]:
    """The content of a file of settings, by its suffix. Raises InputError if the file is absent or not valid."""
    suffix = suffix_of(path.name)
    if suffix not in PARSERS:
        raise InputError(f"{path} has the suffix {suffix!r}; expected one of {SUFFIXES}.")
    try:
        text = path.expanduser().read_text(encoding="utf-8-sig")
    except FileNotFoundError as error:
        raise InputError(f"There is no file {path}.{other_file(path)}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 (byte {error.start:,}). Save it as UTF-8.") from error
    except OSError as error:
        raise InputError(f"{path} can't be read: {error.strerror}.") from error
    return parse(text, suffix, str(path))


def other_file(path: Path) -> str:
    """A question with the file of settings beside an absent one that has the most similar name; empty if none has."""
    folder = path.expanduser().parent
    names = [name for name in os.listdir(folder) if is_settings_file(name)] if folder.is_dir() else []
    return f" {did_you_mean(path.name, names)}".rstrip()


def read_changes(path: Path, tables_only: bool = False) -> dict[str, Any]:
    """The changes to a recipe in a file, by stage. Raises InputError for unknown fields and values of wrong types.

    `tables_only`: of a recipe file, take the tables of its stages, instead of refusing it.
    """
    changes = read_tables(path)
    if tables_only:
        changes = tables_of_stages(changes, str(path))
    check_no_recipe(changes, str(path))
    return checked(changes, path)


def tables_of_stages(tables: dict[str, Any], name: str) -> dict[str, Any]:
    """What a recipe file says of stages; its recipe, `until` and `use` are left out, as the log says. `name`: its own.

    Other changes stay as they are.
    """
    if RECIPE not in tables:
        return tables
    left_out = [field for field in ABOUT_THE_RUN if field in tables]
    log.warning("%s is a recipe file: its tables of stages count here, but not its %s.", name, ", ".join(left_out))
    return {field: value for field, value in tables.items() if field not in left_out}


def check_no_recipe(changes: dict[str, Any], name: str) -> None:
    """Raise InputError if changes to a recipe are a recipe file. `name`: that of the file."""
    if RECIPE in changes:
        raise InputError(
            f"{name} is a recipe file, since it has {RECIPE}, and --override takes changes to another recipe. Run the "
            "file, as in `cram run my.toml`, or remove that line."
        )


def read_recipe_file(path: Path) -> RecipeFile:
    """A recipe file: a recipe, the changes to it by stage, and how far to run. Raises InputError for mistakes in it."""
    tables = read_tables(path)
    until = tables.get("until")
    check_names(tables, until, path)
    changes = {stage: fields for stage, fields in tables.items() if stage in STAGES}
    use = use_of(tables.get("use", {}), path)
    return RecipeFile(tables[RECIPE], checked(changes, path), until, use)


def check_names(tables: dict[str, Any], until: Any, path: Path) -> None:
    """Raise InputError for unknown fields, recipes and stages in a recipe file, and if it names no recipe."""
    fields = [*ABOUT_THE_RUN, *STAGES]
    for name in tables:
        if name not in fields:
            raise InputError(f"{path}: there is no field {name}. {did_you_mean(name, fields)}{expected(fields)}")
    if RECIPE not in tables:
        raise InputError(f"{path} names no recipe. Begin it with a line such as {EXAMPLE}.")
    try:
        check_name("recipe", tables[RECIPE], list(DELTAS))
        if until is not None:
            check_name("stage", until, STAGES)
    except InputError as error:
        raise InputError(f"{path}: {error}") from error


def expected(fields: list[str]) -> str:
    """The fields of a recipe file, as a sentence."""
    return f"A recipe file has {', '.join(fields)}."


def use_of(given: Any, path: Path) -> dict[str, str]:
    """The artifacts by stage that a recipe file uses."""
    try:
        use = TypeAdapter(dict[str, str]).validate_python(given, strict=True)
    except ValidationError as error:
        raise InputError(
            f'{path}: use is {json.dumps(given, default=str)}; expected artifacts by stage, as in pretrain = "latest".'
        ) from error
    try:
        for stage in use:
            check_name("stage", stage, STAGES)
    except InputError as error:
        raise InputError(f"{path}: use: {error}") from error
    return {stage: folder_or_name(name, path.parent) for stage, name in use.items()}


def checked(changes: dict[str, Any], path: Path) -> dict[str, Any]:
    """The changes in a file with paths that count from its folder. Raises InputError for wrong fields and values."""
    for stage, fields in changes.items():
        if stage in STAGES and isinstance(fields, dict):
            known = Recipe.model_fields[stage].annotation.model_fields  # type: ignore[union-attr]
            late = [name for name in ABOUT_THE_RUN if name in fields and name not in known]
            if late:
                raise InputError(f"{path}: {late[0]} stands in the table {stage}. Move it up, before the first table.")
    try:
        check_changes(changes)
    except InputError as error:
        raise InputError(f"{path}: {error}") from error
    return from_folder(changes, path.parent)


# Paths


def from_folder(changes: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Changes whose paths count from a folder, as changes whose paths count from the working directory."""
    return {stage: moved_stage(stage, fields, folder) for stage, fields in changes.items()}


def moved_stage(stage: str, fields: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The changes to a stage, as in `from_folder`."""
    moved: dict[str, Any] = {}
    for name, value in fields.items():
        if (stage, name) in PATHS:
            moved[name] = [within(path, folder) for path in value]
        elif (stage, name) in (*MODELS, *DATA):
            moved[name] = folder_or_name(value, folder)
        elif (stage, name) == TASKS:
            moved[name] = [moved_task(task, folder) for task in value]
        elif (stage, name) == PAIRS and value:
            moved[name] = [file_or_name(data, folder) for data in value]
        elif (stage, name) == SEARCHED_PAIRS:
            moved[name] = [one | {"data": file_or_name(one["data"], folder)} for one in value]
        else:
            moved[name] = value
    return moved


def within(path: str, folder: Path) -> str:
    """A path that counts from a folder, or an absolute one."""
    if folder == Path() or os.path.isabs(os.path.expanduser(path)):
        return path
    return os.path.join(folder, path)  # unlike Path, keeps a "./" at the head of what counts from here


def folder_or_name(name: str, folder: Path) -> str:
    """The path of what has this name in the folder, or the name itself, as of an artifact or on the hub."""
    path = within(name, folder)
    return path if name not in ("", LATEST) and os.path.exists(path) else name


def moved_task(task: Any, folder: Path) -> Any:
    """A task, which is a name or a definition, whose data count from a folder."""
    if not isinstance(task, dict):
        return task
    data = task["data"]
    moved = within(data, folder) if data.count("/") > 1 else file_or_name(data, folder)
    return task | {"data": moved}


def file_or_name(data: str, folder: Path) -> str:
    """The path of data whose name is a file's, whether or not it is there; of other names, as `folder_or_name`."""
    return within(data, folder) if FILE.fullmatch(data) else folder_or_name(data, folder)
