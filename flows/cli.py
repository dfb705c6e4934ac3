"""The command line: cram run, ls, show, up, down."""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from flows.services import HOME, SERVER, server_answers
from model import InputError

if TYPE_CHECKING:  # importing it imports Prefect, whose settings `main` makes first
    from tasks.stage import Artifact

SERVER_SECONDS = 120  # for Prefect's temporary server to start on a busy machine
SETTINGS = {  # for Prefect, which reads them when it is imported; whatever the user has set comes first
    "PREFECT_HOME": str(HOME / ".prefect"),
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_LOGGING_EXTRA_LOGGERS": "flows,tasks,model",
    "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",
    "DO_NOT_TRACK": "1",
}
app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__)
console = Console(width=None if sys.stdout.isatty() else 160)  # a pipe has no width


@contextmanager
def prefect_server() -> Iterator[None]:
    """Have Prefect use the running server, or else Prefect's own temporary one, for as long as the run takes."""
    url = os.environ.get("PREFECT_API_URL") or SERVER
    from prefect.settings import PREFECT_API_URL, temporary_settings

    if server_answers(url):
        with temporary_settings({PREFECT_API_URL: url}):
            yield
        return
    console.print(f"No Prefect server answers at {url}; this run uses one of its own.", style="dim", soft_wrap=True)
    from prefect.events.worker import EventsWorker
    from prefect.logging.handlers import APILogWorker
    from prefect.server.api.server import SubprocessASGIServer

    os.environ.setdefault("PREFECT_SERVER_LOGGING_LEVEL", "CRITICAL")  # it complains of being stopped
    server = SubprocessASGIServer()
    server.start(timeout=SERVER_SECONDS)
    try:
        with temporary_settings({PREFECT_API_URL: server.api_url}):
            yield
    finally:
        with suppress(RuntimeError):  # raised where nothing was logged
            APILogWorker.instance().drain()
        EventsWorker.drain_all()
        server.stop()


def parse_override(text: str) -> dict:
    """The JSON of --override."""
    try:
        found = json.loads(text)
    except ValueError as error:
        raise InputError(
            f'--override is no JSON: {error}. Expected e.g. \'{{"filter": {{"max_tokens_per_char": 0.25}}}}\'.'
        ) from error
    if not isinstance(found, dict):
        raise InputError(f"--override is {found!r}; expected a JSON object.")
    return found


def check_stages(names: list[str]) -> None:
    """Refuse names that are no stages."""
    from flows.recipes import STAGES

    if wrong := [name for name in names if name not in STAGES]:
        raise InputError(f"There is no stage {wrong[0]!r}. Stages: {', '.join(STAGES)}.")


@app.command()
def run(
    recipe: Annotated[str, typer.Argument(help="crammed-bert, pocket or demo.")],
    override: Annotated[str, typer.Option(help="JSON of what to change in the recipe.")] = "{}",
    until: Annotated[str, typer.Option(help="The last stage to run.")] = "report",
    use: Annotated[
        list[str] | None, typer.Option(metavar="STAGE=KEY", help="Take this artifact; needs nothing before it.")
    ] = None,
    refresh: Annotated[
        list[str] | None, typer.Option(metavar="STAGE", help="Run this stage again though cached.")
    ] = None,
) -> None:
    """Run a recipe, from text to scores. What was done before with the same parameters is not done again."""
    changes = parse_override(override)
    if wrong := [pair for pair in use or [] if "=" not in pair]:
        raise InputError(f"--use {wrong[0]} names no artifact; expected STAGE=KEY, as in --use pretrain=latest.")
    pairs = [pair.split("=", 1) for pair in use or []]
    given = dict(pairs)
    if len(given) < len(pairs):
        raise InputError(
            "--use names a stage twice. Give several finetune artifacts as finetune=KEY,KEY; others have one."
        )
    check_stages([until, *given, *(refresh or [])])
    from flows.recipes import resolve

    resolve(recipe, changes)  # what is wrong is told before a server is started
    with prefect_server():
        from flows.cram import cram

        made = cram(recipe=recipe, override=changes, until=until, use=given, refresh=refresh or [])
    for artifact in made:
        tell(artifact)


def tell(artifact: "Artifact") -> None:
    """Print what came out, and where to look."""
    print_rows(artifact.stats.get("table", []))
    console.print(f"\n{artifact.stage}: [bold]{shorten(artifact.path)}[/]", soft_wrap=True, highlight=False)
    if artifact.stage == "report":
        about = json.loads((artifact.path / "report.json").read_text())
        for name, what in (("filter", "what was dropped"), ("pretrain", "model and loss curve")):
            if found := [n for n in about["artifacts"] if n.startswith(f"{name}/")]:
                place = shorten(artifact.path.parents[1] / found[0])
                console.print(f"{name}: {place} ({what})", soft_wrap=True, highlight=False)
        console.print(f"The page with all of it: {shorten(artifact.path)}/report.md", soft_wrap=True, highlight=False)


def print_rows(rows: list[dict]) -> None:
    """Print rows as a table."""
    if not rows:
        return
    table = Table(box=None, header_style="bold")
    for name, value in rows[0].items():
        table.add_column(name, justify="right" if isinstance(value, int | float) else "left")
    for row in rows:
        cells = (f"{v:,}" if isinstance(v, int) and not isinstance(v, bool) else str(v) for v in row.values())
        table.add_row(*map(escape, cells))
    console.print(table)


def shorten(path: Path) -> Path:
    """Relative to the working directory where that is shorter."""
    with suppress(ValueError):
        return path.relative_to(Path.cwd())
    return path


def size(manifest: dict) -> str:
    """The size of an artifact's files."""
    total = float(sum(file["bytes"] for file in manifest["files"]))
    for unit in ("B", "kB", "MB"):
        if total < 1000:
            return f"{total:.0f} {unit}"
        total /= 1000
    return f"{total:.1f} GB"


def flat(value: Any, path: str = "") -> dict[str, str]:
    """Nested dicts as {dotted path: text}."""
    if isinstance(value, dict):
        return {
            k: v for name, inner in value.items() for k, v in flat(inner, f"{path}.{name}" if path else name).items()
        }
    return {path: json.dumps(value) if not isinstance(value, str) else value}


def brief(value: str) -> str:
    """A value short enough for a list."""
    return value if len(value) <= 24 else f"{value[:20]}…"


def differences(manifests: list[dict]) -> list[str]:
    """For each artifact of a stage, the params and inputs in which not all are the same."""
    found = [flat(m["params"]) | {f"from {k}": v for k, v in flat(m["inputs"]).items()} for m in manifests]
    names = [name for name in dict.fromkeys(n for f in found for n in f) if len({f.get(name) for f in found}) > 1]
    return [", ".join(f"{name}={brief(f[name])}" for name in names if name in f) for f in found]


@app.command("ls")
def ls(stage: Annotated[str | None, typer.Argument(help="Only this stage's.")] = None) -> None:
    """List artifacts: key, when made, size, seconds, and what differs in their parameters."""
    check_stages([stage] if stage else [])
    from flows.recipes import STAGES
    from tasks.stage import ROOT, artifacts

    table = Table(box=None, header_style="bold")
    for column in ("stage", "key", "finished (UTC)", "size", "seconds"):
        table.add_column(column, no_wrap=True, justify="right" if column in ("size", "seconds") else "left")
    table.add_column("what differs")
    for name in [stage] if stage else STAGES:
        found = artifacts(name)
        manifests = [artifact.manifest for artifact in found]
        for artifact, about, difference in zip(found, manifests, differences(manifests), strict=True):
            when = about["finished"][:19].replace("T", " ")
            table.add_row(name, artifact.key, when, size(about), f"{about['seconds']:.1f}", escape(difference))
    if not table.row_count:
        console.print(f"No artifacts in {ROOT} yet. Make some: cram run demo")
        return
    console.print(table)


@app.command()
def show(
    artifact: Annotated[str, typer.Argument(metavar="STAGE[/KEY]", help="The newest, if no key is given.")],
) -> None:
    """Print an artifact's parameters, inputs and statistics."""
    stage, _, key = artifact.partition("/")
    check_stages([stage])
    from tasks.stage import find

    found = find(stage, key or "latest")
    about = found.manifest
    console.print(f"[bold]{found.name}[/]  {shorten(found.path)}")
    console.print(
        f"finished {about['finished']}, {about['seconds']:.1f} s, {size(about)}, commit {about['environment']['commit']}"
    )
    for title in ("params", "inputs"):
        console.print(f"\n[bold]{title}[/]")
        for name, value in flat(about[title]).items():
            console.print(f"  {name}: {value}", markup=False, highlight=False)
    stats = dict(about["stats"])
    rows = stats.pop("table", [])
    console.print("\n[bold]stats[/]")
    console.print(json.dumps(stats, indent=2), markup=False, highlight=False)
    print_rows(rows)


@app.command()
def up() -> None:
    """Start a Prefect server (if none answers) and a worker, and deploy cram/full."""
    from flows import services

    services.up(os.environ.get("PREFECT_API_URL") or SERVER, console.print)


@app.command()
def down() -> None:
    """End what `cram up` started."""
    from flows import services

    services.down(console.print)


def main() -> None:
    """Run the command line; what the user can mend is told in a sentence."""
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    try:
        app()
    except InputError as error:
        Console(stderr=True).print(f"[red]cram:[/] {escape(str(error))}", soft_wrap=True, highlight=False)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
