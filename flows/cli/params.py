"""`cram params`: the parameters of every stage, from the classes that hold them."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from rich.markup import escape
from rich.table import Table

from flows.cli.arguments import check_stages, recipe_names, stage_names
from flows.cli.tables import console

if TYPE_CHECKING:  # importing it takes a third of a second
    from pydantic import BaseModel

KINDS = {"string": "text", "boolean": "true or false"}  # other types keep their names in JSON Schema
LONGEST_VALUE = 30  # characters on a line


class Parameter(NamedTuple):
    """A parameter of a stage; nested ones have dotted names."""

    name: str
    takes: str
    value: str
    description: str


def takes(schema: dict) -> str:
    """The values that a field takes, in words, from its JSON schema: a type with its range, or choices."""
    from flows.recipes import limits

    if several := schema.get("anyOf") or schema.get("oneOf"):
        return ", or ".join(map(takes, several))
    kind = schema.get("type", "any value")
    if "items" in schema:
        each = takes(schema["items"])
        return f"list, each {each}" if "enum" in schema["items"] else f"list of {each}"
    if isinstance(values := schema.get("additionalProperties"), dict):
        return f"object with values: {takes(values)}"
    return limits(schema) if "enum" in schema else f"{KINDS.get(kind, kind)} {limits(schema)}".strip()


def described(model: "type[BaseModel]", values: dict[str, Any], path: str = "") -> Iterator[Parameter]:
    """The parameters of a model and of nested models, with these values."""
    from flows.recipes import in_words, level

    schemas = model.model_json_schema()["properties"]
    for name, field in model.model_fields.items():
        if inner := level(field):
            yield from described(inner, values[name], f"{path}{name}.")
        else:
            value = in_words(values[name]) or '""'
            yield Parameter(path + name, takes(schemas[name]), value, field.description or "")


def parameters(stage: str, recipe: str) -> list[Parameter]:
    """The parameters of a stage, with the values that a recipe gives them."""
    from flows.recipes import DELTAS, Recipe, merge

    params = getattr(Recipe.model_validate(merge(Recipe().model_dump(), DELTAS[recipe])), stage)
    return list(described(type(params), params.model_dump(mode="json")))


def is_cell(row: Parameter) -> bool:
    """Whether a parameter is a cell of a table, as `modern.rte.epochs` is."""
    return row.name.count(".") == 2


def without_cells(rows: list[Parameter]) -> list[Parameter]:
    """The parameters with each column of a table in place of its cells."""
    shown: dict[str, Parameter] = {}
    for row in rows:
        if is_cell(row):
            table, _, column = row.name.split(".")
            row = row._replace(name=f"{table}.TASK.{column}", value="see below")
        shown.setdefault(row.name, row)
    return list(shown.values())


def table_of(cells: list[Parameter]) -> Table:
    """The values of a table's cells."""
    lines: dict[str, dict[str, str]] = {}
    for row in cells:
        line, column = row.name.rsplit(".", 1)
        lines.setdefault(line, {})[column] = row.value
    table = Table("values", *next(iter(lines.values())), box=None, header_style="bold")
    for line, values in lines.items():
        table.add_row(line, *values.values())
    return table


def params(
    stage: Annotated[
        str | None, typer.Argument(help="Print only this stage's parameters.", autocompletion=stage_names)
    ] = None,
    recipe: Annotated[
        str, typer.Option(metavar="RECIPE", help="Print this recipe's values.", autocompletion=recipe_names)
    ] = "crammed-bert",
) -> None:
    """List parameters: allowed values, value in the recipe, description. Set them with `cram run --override`."""
    check_stages([stage] if stage else [])
    from flows.recipes import STAGES, Recipe, check_name

    check_name(recipe)

    for name in [stage] if stage else STAGES:
        about = (Recipe.model_fields[name].annotation.__doc__ or "").split("\n")[0]
        console.print(f"\n[bold]{name}[/]  {escape(about)}", highlight=False)
        table = Table("parameter", "takes", recipe, "description", box=None, header_style="bold")
        table.columns[0].no_wrap = True
        table.columns[2].max_width = LONGEST_VALUE
        rows = parameters(name, recipe)
        for row in without_cells(rows):
            table.add_row(*map(escape, row))
        console.print(table)
        if cells := [row for row in rows if is_cell(row)]:
            console.print(table_of(cells))
