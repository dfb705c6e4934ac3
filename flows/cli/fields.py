"""The options that set fields of a recipe, and what completes them and the name of a recipe.

Importing flows.recipes.recipe takes seconds, so the names are read from the source of the classes of parameters.
"""

import ast
import functools
import glob
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from flows.cli.common import recipe_names

ROOT = Path(__file__).parents[2]
RECIPE = "flows.recipes.recipe"
FILES = (".toml", ".yaml", ".yml", ".json")  # the suffixes of recipe files


class Source:
    """The classes of a module, and the modules from which it imports names."""

    def __init__(self, module: str):
        path = ROOT.joinpath(*module.split(".")).with_suffix(".py")
        self.module = module
        self.classes: dict[str, ast.ClassDef] = {}
        self.origins: dict[str, str] = {}
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                self.classes[node.name] = node
            elif isinstance(node, ast.ImportFrom) and node.module:
                self.origins |= {alias.name: node.module for alias in node.names}


read = functools.cache(Source)


def fields_of(name: str, module: str, path: str = "") -> Iterator[str]:
    """The dotted names of the fields of a class of parameters that hold values, also of its bases and nested ones."""
    source = find(name, module)
    if source is None:
        return
    definition = source.classes[name]
    for base in definition.bases:
        if isinstance(base, ast.Name):
            yield from fields_of(base.id, source.module, path)
    for node in definition.body:
        if not isinstance(node, ast.AnnAssign) or "ClassVar" in ast.unparse(node.annotation):
            continue
        field = f"{path}{ast.unparse(node.target)}"
        kind = node.annotation
        if isinstance(kind, ast.Name) and find(kind.id, source.module):
            yield from fields_of(kind.id, source.module, f"{field}.")
        else:
            yield field


def find(name: str, module: str) -> Source | None:
    """The module in which a name that is used in `module` is a class of cram's; None for all other names."""
    source = read(module)
    if name in source.classes:
        return source
    origin = source.origins.get(name, "")
    return find(name, origin) if origin.startswith(("flows.", "tasks.", "model.")) else None


def field_names() -> list[str]:
    """All fields of a recipe: STAGE.FIELD, or STAGE.FIELD.FIELD."""
    return list(fields_of("Recipe", RECIPE))


def recipes_and_files(incomplete: str) -> list[str]:
    """The recipes, and the recipe files and folders whose paths begin so."""
    found = recipe_names()
    for path in sorted(glob.glob(f"{glob.escape(incomplete)}*")):
        if os.path.isdir(path) and incomplete:
            found.append(f"{path}/")
        elif path.lower().endswith(FILES):
            found.append(path)
    return found


def settings_to_complete() -> list[str]:
    """What a typed setting may begin with."""
    return [f"{name}=" for name in field_names()]


Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="STAGE.FIELD=VALUE",
        help="Field of the recipe to change, as in --set 'pretrain.budget=3 minutes'. May be repeated; later values "
        "win, and all win over --override. `cram params` lists the fields.",
        autocompletion=settings_to_complete,
    ),
]
Override = Annotated[
    list[str] | None,
    typer.Option(
        metavar="JSON|FILE",
        help="Fields of the recipe to change: a JSON object; a file (.toml, .yaml, .json) with tables by stage; or - "
        "for standard input. May be repeated; later values win.",
    ),
]
