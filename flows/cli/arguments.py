"""Shared parts of the commands: names of recipes and stages, in help and completion, and checks of arguments.

Completion doesn't import the recipes, since that takes seconds.
"""

import ast
import os
from pathlib import Path
from typing import Any

import typer
from rich.markup import escape
from typer.core import TyperCommand

from flows.cli.tables import console
from model import InputError
from tasks.home import HOME, IN_CHECKOUT

RECIPES_THERE = "Recipes: {recipes}."
STAGES_THERE = "Stages, in order: {stages}."


class WithNames(TyperCommand):
    """A command whose help lists the recipes and stages. They are slow to import, so only the help does it."""

    def format_help(self, ctx: typer.Context, formatter: Any) -> None:
        """Insert the names into the epilog."""
        from flows.recipes import RECIPES, STAGES

        self.epilog = self.epilog.format(recipes=", ".join(RECIPES), stages=", ".join(STAGES))
        super().format_help(ctx, formatter)


def recipe_names() -> list[str]:
    """The recipes, for completion."""
    from flows.deltas import DELTAS

    return list(DELTAS)


def stage_names() -> list[str]:
    """The stages, for completion: the fields of Recipe, read from its source."""
    module = ast.parse(Path(__file__).parents[1].joinpath("recipes.py").read_text())
    recipe = next(node for node in module.body if isinstance(node, ast.ClassDef) and node.name == "Recipe")
    return [node.target.id for node in recipe.body if isinstance(node, ast.AnnAssign)]


def study_names() -> list[str]:
    """The studies, for completion."""
    from flows.studies import STUDIES

    return list(STUDIES)


def check_stages(names: list[str], others: bool = False) -> None:
    """Raise InputError if one of these names no stage; `others`: those that are no part of a recipe count too."""
    from flows.recipes import OTHER_STAGES, STAGES, did_you_mean

    stages = STAGES + (OTHER_STAGES if others else ())
    if wrong := [name for name in names if name not in stages]:
        raise InputError(
            f"There is no stage {wrong[0]!r}. {did_you_mean(wrong[0], stages)}Stages: {', '.join(stages)}."
        )


def check_store() -> None:
    """Raise InputError if the store is not a directory."""
    from tasks.store import ROOT

    if ROOT.exists() and not ROOT.is_dir():
        raise InputError(f"The artifact store {ROOT} is a file; expected a directory. Set CRAM_ARTIFACTS to one.")


def say_where_artifacts_go() -> None:
    """Print the store's path if it depends on the working directory, because cram is not installed from a checkout."""
    if not IN_CHECKOUT and not os.environ.get("CRAM_ARTIFACTS"):
        console.print(
            f"Artifacts are stored in {escape(str(HOME / 'artifacts'))}, in the working directory, because cram is not "
            "installed from a checkout. Set CRAM_ARTIFACTS to store them elsewhere.",
            style="dim", soft_wrap=True, highlight=False,
        )  # fmt: skip
