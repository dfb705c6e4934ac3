"""`cram run`: a recipe, from raw text to scores."""

import json
import logging
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flows.cli.arguments import check_stages, check_store, recipe_names, say_where_artifacts_go, stage_names
from flows.cli.tables import console, print_rows, print_scores, shorten
from flows.server import prefect_server
from flows.services import SERVER
from model import InputError

if TYPE_CHECKING:  # importing it imports Prefect, whose settings `main` makes first
    from tasks.store import Artifact

EXAMPLE = '\'{"filter": {"max_tokens_per_char": 0.25}}\''  # of an --override


def parse_override(text: str) -> dict:
    """The JSON of an --override."""
    try:
        found = json.loads(text, object_pairs_hook=without_repeats)
    except json.JSONDecodeError as error:
        raise InputError(f"--override is not valid JSON: {error}. Expected an object, as in {EXAMPLE}.") from error
    except RecursionError as error:
        raise InputError(
            f"--override is nested too deeply; expected {{stage: {{field: value}}}}, as in {EXAMPLE}."
        ) from error
    if not isinstance(found, dict):
        raise InputError(f"--override is {found!r}; expected a JSON object.")
    return found


def without_repeats(pairs: list[tuple[str, Any]]) -> dict:
    """A JSON object, which must not give a name twice: the first would be lost."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise InputError(f"--override has {twice!r} twice in one object. Merge the two.")
    return found


def parse_overrides(texts: list[str]) -> dict:
    """What several --override change together; of what two of them change, the later decides."""
    from pydantic import TypeAdapter, ValidationError

    from flows.recipes import Override, merge, sentence

    found, changes = [parse_override(text) for text in texts], {}
    for one in found:
        if len(found) > 1:  # a value that is no object, in place of one, would be lost or can't be merged
            try:
                TypeAdapter(Override).validate_python(one)
            except ValidationError as error:
                raise InputError(" ".join(sentence(problem) for problem in error.errors())) from error
        changes = merge(changes, one)
    return changes


def parse_use(pairs: list[str]) -> dict[str, str]:
    """The keys by stage that several --use name."""
    if wrong := [pair for pair in pairs if "=" not in pair]:
        raise InputError(f"--use is {wrong[0]!r}; expected STAGE=KEY, for example --use pretrain=latest.")
    given = dict(pair.split("=", 1) for pair in pairs)
    if len(given) < len(pairs):
        raise InputError(
            "--use names the same stage twice. Only finetune takes several artifacts; separate their keys by commas: "
            "--use finetune=KEY,KEY."
        )
    return given


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
    changes = parse_overrides(override or [])
    if len(lasts := sorted(set(until or ["report"]))) > 1:
        raise InputError(f"--until names {' and '.join(lasts)}; a run has only one last stage. Choose one.")
    [last] = lasts
    given = parse_use(use or [])
    check_stages([last, *given, *(refresh or [])])
    check_store()
    from flows.cram import cram, planned

    say_where_artifacts_go()
    planned(recipe, changes, last, given, refresh or []).check()  # report user errors before a server starts
    leave_errors_to_main()
    with prefect_server(SERVER, lambda sentence: console.print(sentence, style="dim", markup=False, soft_wrap=True)):
        made = cram(recipe=recipe, override=changes, until=last, use=given, refresh=refresh or [])
    for artifact in made:
        tell(artifact)


def leave_errors_to_main() -> None:
    """Keep out of Prefect's log on the terminal what is said once and last: user errors, and that a run was stopped."""
    from prefect.logging.handlers import PrefectConsoleHandler

    def is_shown(record: logging.LogRecord) -> bool:
        said = record.getMessage()
        return not (hasattr(record, "input_error") or said.startswith(("Crash detected!", "Finished in state Crashed")))

    for handler in logging.getLogger().handlers:
        if isinstance(handler, PrefectConsoleHandler):
            handler.addFilter(is_shown)


def tell(artifact: "Artifact") -> None:
    """Print the results, and where to find more."""
    (print_scores if artifact.stage == "report" else print_rows)(artifact.stats.get("table", []))
    console.print(f"\n{artifact.stage}: [bold]{shorten(artifact.path)}[/]", soft_wrap=True, highlight=False)
    if artifact.stage == "report":
        about = json.loads((artifact.path / "report.json").read_text())
        for name, what in (("filter", "dropped documents"), ("pretrain", "model and loss curve")):
            if found := [n for n in about["artifacts"] if n.startswith(f"{name}/")]:
                place = shorten(artifact.path.parents[1] / found[0])
                console.print(f"{name}: {place} ({what})", soft_wrap=True, highlight=False)
        console.print(f"Full report: {shorten(artifact.path)}/report.html", soft_wrap=True, highlight=False)
