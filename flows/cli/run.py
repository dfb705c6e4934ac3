"""`cram run` and `cram params`: a recipe, from raw text to scores, and the parameters of its stages."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from rich.markup import escape
from rich.table import Column

from flows.cli.common import check_stages, console, print_rows, print_table, say, shorten, stage_names
from flows.cli.execution import Planned, execute, print_plan
from flows.cli.fields import Override, Settings, recipes_and_files
from flows.cli.server import find_server
from flows.summary import check_name, relative
from model.errors import InputError

if TYPE_CHECKING:  # slow to import
    from pydantic import BaseModel

    from flows.recipes.files import RecipeFile
    from tasks.reports.blanks import Blank
    from tasks.store.artifacts import Artifact

LAST = "report"  # the stage with which a run ends, unless --until names an earlier one
CANDIDATES = 3  # tokens to print per blank
BLANKS = (  # a model knows the words of its text, which may be documentation only
    "See the documentation for more [MASK].",
    "If the argument is [MASK], the default value is used.",
    "Paris is the capital of [MASK].",
)
LONGEST_VALUE = 30  # characters of a value on a line


def parse_use(pairs: list[str]) -> dict[str, str]:
    """The keys by stage of several --use; those of one stage are separated by commas."""
    use: dict[str, str] = {}
    for pair in pairs:
        stage, equals, key = pair.partition("=")
        if not equals:
            raise InputError(f"--use is {pair!r}; expected STAGE=KEY, for example --use pretrain=latest.")
        use[stage] = f"{use[stage]},{key}" if stage in use else key
    return use


def begin(recipe: str) -> "RecipeFile":
    """What a recipe file asks for, or a recipe's name alone. Raises InputError if there is none."""
    from flows.recipes.deltas import DELTAS
    from flows.recipes.files import RecipeFile, is_settings_file, read_recipe_file

    if is_settings_file(recipe):
        return read_recipe_file(Path(recipe))
    check_name("recipe", recipe, DELTAS, rest="; or a recipe file (.toml, .yaml or .json)")
    return RecipeFile(recipe, {}, None, {})


def run(
    recipe: Annotated[
        str,
        typer.Argument(
            help="Recipe name, see the list below; or a recipe file (.toml, .yaml, .json).",
            autocompletion=recipes_and_files,
        ),
    ],
    settings: Settings = None,
    override: Override = None,
    until: Annotated[
        str | None,
        typer.Option(metavar="STAGE", help=f"Last stage to run. Default: {LAST}.", autocompletion=stage_names),
    ] = None,
    use: Annotated[
        list[str] | None,
        typer.Option(
            metavar="STAGE=KEY",
            help="Use an artifact for STAGE; for pretrain also a folder, or OWNER/NAME of the hub. May be repeated.",
        ),
    ] = None,
    refresh: Annotated[
        list[str] | None,
        typer.Option(
            metavar="STAGE", help="Run STAGE again even if it is cached. May be repeated.", autocompletion=stage_names
        ),
    ] = None,
    plan: Planned = False,
) -> None:
    """Run a recipe, from raw text to scores. Stages that already ran with the same parameters are cached."""
    given = parse_use(use or [])
    again = refresh or []
    check_stages([until or LAST, *given, *again])
    begun = begin(recipe)
    from flows.recipes.recipe import merge
    from flows.recipes.typed import changes_of

    changes = changes_of(override or [], settings or [])
    asked = {
        "recipe": begun.recipe,
        "override": merge(begun.override, changes),
        "until": until or begun.until or LAST,
        "use": begun.use | given,
        "refresh": again,
    }
    if plan:
        print_plan("run", **asked)
    from flows.cram import cram

    server = find_server()
    for artifact in execute(cram, server, **asked):
        print_results(artifact)


def print_results(artifact: "Artifact") -> None:
    """Print the results of a run, which are in its last artifact."""
    rows = artifact.stats.get("table", [])
    if rows:
        say("")
        print_rows(rows)
    if artifact.stage == "report":
        print_blanks_of_report(json.loads((artifact.path / "report.json").read_text(encoding="utf-8")))
        say(f"\nFull report: {relative(artifact.path / 'report.html')}")
        return
    if artifact.stage == "pretrain":
        print_blanks(artifact)
    console.print(f"\n{artifact.stage}: [bold]{shorten(artifact.path)}[/]", soft_wrap=True, highlight=False)


def print_blanks_of_report(about: dict) -> None:
    """Print the blanks of a report, `about`: its JSON; English ones for a model without held-out text."""
    if "heldout" in about["pretraining"]:
        why = about.get("no_blanks", "an earlier version wrote the report")
        print_held_out_blanks(about["pretrained"], about.get("blanks", []), why)
        return
    from tasks.store.artifacts import artifact_named

    print_english_blanks(artifact_named(about["pretrained"]))


def print_blanks(model: "Artifact") -> None:
    """Print blanks that a model fills in: held-out sentences; or English ones, if it came without held-out text."""
    from tasks.report import blanks_of

    if not model.stats.get("heldout"):
        print_english_blanks(model)
        return
    found, why = blanks_of(model)
    print_held_out_blanks(model.name, found, why)


def print_held_out_blanks(name: str, blanks: "list[Blank]", why: str) -> None:
    """Print blanks in held-out sentences, or why there are none. `name`: of the model."""
    from tasks.reports.markdown import percent

    if not blanks:
        say(f"\nNo words were filled in: {why}.")
        return
    say(f"\nWords filled in by {name}, in held-out text:")
    for blank in blanks:
        mark = "✓" if blank["right"] else "✗"
        guesses = [f"{guess['word']} {percent(guess['probability'])}" for guess in blank["guesses"][:CANDIDATES]]
        say(f"  {blank['before']}[{blank['word']}]{blank['after']}\n    {mark} {'   '.join(guesses)}")


def print_english_blanks(model: "Artifact") -> None:
    """Print English sentences with a blank and the model's most likely tokens, if it has weights and reads ASCII."""
    from tasks.adopt import has_weights

    if not has_weights(model.path):  # it is hollow
        return
    import torch  # here, since most commands don't need it

    from model import export
    from tasks.text.tokenizer import load_tokenizer, reading_of, specials_of

    tokenizer = load_tokenizer(model.path)
    if reading_of(tokenizer).characters != "ascii":
        return
    say(f"\nBlanks filled in by {model.name}:")
    bert = export.load(model.path).eval()  # not with transformers, whose import takes seconds
    mask = specials_of(tokenizer).mask
    tokenizer.encode_special_tokens = False  # so that [MASK] is a special token, not text
    for text in BLANKS:
        ids = torch.tensor([tokenizer.encode(text).ids])
        if ids.shape[1] > bert.length:
            say(f"  none: the model takes {bert.length} tokens")
            return
        with torch.inference_mode():
            states = bert.encode(ids)[ids == mask]
            [shares], [best] = bert.logits(states).softmax(dim=-1).topk(CANDIDATES)
        tokens = [tokenizer.id_to_token(number) for number in best.tolist()]
        candidates = [f"{token} {share:.0%}" for token, share in zip(tokens, shares.tolist(), strict=True)]
        say(f"  {text}\n      {'   '.join(candidates)}")


class Parameter(NamedTuple):
    """A row of `cram params`."""

    name: str  # dotted, if its model is within another
    takes: str  # allowed values
    value: str
    description: str


def parameters_of(model: "type[BaseModel]", values: dict[str, Any], path: str = "") -> Iterator[Parameter]:
    """The parameters of a model and of the models in it, with their `values`."""
    from flows.recipes.recipe import level, value_in_words
    from flows.recipes.values import describe_values

    schemas = model.model_json_schema()["properties"]
    for name, field in model.model_fields.items():
        inner = level(field)
        if inner:
            yield from parameters_of(inner, values[name], f"{path}{name}.")
        else:
            value = value_in_words(values, name) or '""'
            yield Parameter(path + name, describe_values(schemas[name]), value, field.description or "")


def parameters_in(recipe: str, stage: str) -> list[Parameter]:
    """The parameters of a stage, with their values in a recipe or a recipe file."""
    from flows.recipes.deltas import DELTAS
    from flows.recipes.recipe import changes_of, fill_in, validated

    begun = begin(recipe)
    changes = changes_of(DELTAS[begun.recipe], begun.override)
    params = getattr(fill_in(validated(changes), changes), stage)
    return list(parameters_of(type(params), params.model_dump(mode="json")))


def params(
    stage: Annotated[
        str | None, typer.Argument(help="Print only this stage's parameters.", autocompletion=stage_names)
    ] = None,
    recipe: Annotated[
        str,
        typer.Option(
            metavar="RECIPE", help="Print the values of this recipe or recipe file.", autocompletion=recipes_and_files
        ),
    ] = "crammed-bert",
) -> None:
    """List parameters: allowed values, value in the recipe, description. Set them with `cram run --set`."""
    check_stages([stage] if stage else [])
    from flows.recipes.recipe import STAGES, Recipe

    begin(recipe)  # which checks it
    stages = [stage] if stage else STAGES
    for name in stages:
        description = Recipe.model_fields[name].annotation.__doc__ or ""
        first_line = description.split("\n")[0]
        console.print(f"\n[bold]{name}[/]  {escape(first_line)}", highlight=False)
        columns = [
            Column("parameter", no_wrap=True),
            Column("takes"),
            Column(Path(recipe).name, max_width=LONGEST_VALUE),
            Column("description"),
        ]
        print_table(columns, parameters_in(recipe, name))
