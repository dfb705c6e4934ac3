"""`cram run`: a recipe, from raw text to scores."""

import json
from typing import Annotated

import typer

from flows.cli.arguments import check_stages, check_store, recipe_names, say_where_artifacts_go, stage_names
from flows.server import prefect_server
from flows.services import SERVER
from model import InputError

EXAMPLE = '\'{"filter": {"max_tokens_per_char": 0.25}}\''  # of an --override


def parse_override(text: str) -> dict:
    """The changes in the JSON of an --override."""
    from flows.recipes import parse_json

    try:
        changes = parse_json(text)
    except json.JSONDecodeError as error:
        raise InputError(f"--override is not valid JSON: {error}. Expected an object, as in {EXAMPLE}.") from error
    except ValueError as error:
        raise InputError(f"--override: {error}.") from error
    except RecursionError as error:
        raise InputError(
            f"--override is nested too deeply; expected {{stage: {{field: value}}}}, as in {EXAMPLE}."
        ) from error
    if not isinstance(changes, dict):
        raise InputError(f"--override is {changes!r}; expected a JSON object.")
    return changes


def parse_overrides(texts: list[str]) -> dict:
    """The changes of several --override; later values win."""
    from flows.recipes import check_changes, merge

    changes = {}
    for given in map(parse_override, texts):
        if len(texts) > 1:  # only an object can be merged with an object
            check_changes(given)
        changes = merge(changes, given)
    return changes


def parse_use(pairs: list[str]) -> dict[str, str]:
    """The keys by stage of several --use."""
    if wrong := [pair for pair in pairs if "=" not in pair]:
        raise InputError(f"--use is {wrong[0]!r}; expected STAGE=KEY, for example --use pretrain=latest.")
    use = dict(pair.split("=", 1) for pair in pairs)
    if len(use) < len(pairs):
        raise InputError(
            "--use names the same stage twice. Only finetune takes several artifacts; separate their keys by commas: "
            "--use finetune=KEY,KEY."
        )
    return use


def run(
    recipe: Annotated[str, typer.Argument(help="Recipe name; see the list below.", autocompletion=recipe_names)],
    override: Annotated[
        list[str] | None,
        typer.Option(
            metavar="JSON", help="Recipe fields to change, as a JSON object. May be repeated; later values win."
        ),
    ] = None,
    until: Annotated[
        list[str] | None,
        typer.Option(metavar="STAGE", help="Last stage to run. Default: report.", autocompletion=stage_names),
    ] = None,
    use: Annotated[
        list[str] | None,
        typer.Option(metavar="STAGE=KEY", help="Use an existing artifact instead of running STAGE. May be repeated."),
    ] = None,
    refresh: Annotated[
        list[str] | None,
        typer.Option(
            metavar="STAGE", help="Run STAGE again even if it is cached. May be repeated.", autocompletion=stage_names
        ),
    ] = None,
) -> None:
    """Run a recipe, from raw text to scores. Stages that already ran with the same parameters are cached."""
    changes, used, again = parse_overrides(override or []), parse_use(use or []), refresh or []
    if len(lasts := sorted(set(until or ["report"]))) > 1:
        raise InputError(f"--until names {' and '.join(lasts)}; a run has only one last stage. Choose one.")
    check_stages([*lasts, *used, *again])
    check_store()
    from flows.cli.results import print_results
    from flows.cram import cram, planned
    from flows.logs import log_to_terminal

    say_where_artifacts_go()
    planned(recipe, changes, lasts[0], used, again).check()  # report user errors before a server starts
    log_to_terminal()
    with prefect_server(SERVER):
        made = cram(recipe=recipe, override=changes, until=lasts[0], use=used, refresh=again)
    for artifact in made:
        print_results(artifact)
