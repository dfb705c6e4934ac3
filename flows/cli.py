"""The command line: cram run, ls, show, diff, compare, predict, fill, up, down."""

import errno
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from typer.core import TyperCommand

from flows.ask import fill, predict
from flows.compare import compare
from flows.services import HOME, SERVER, server_answers
from model import InputError

if TYPE_CHECKING:  # importing them imports Prefect, whose settings `main` makes first
    from prefect.server.api.server import SubprocessASGIServer

    from tasks.stage import Artifact

LINE = 120  # characters of JSON on one line
SERVER_SECONDS = 120  # for Prefect's temporary server to start on a busy machine
DRAIN_SECONDS = 10  # for it to take, at the end of a run, what has not reached it yet
SETTINGS = {  # for Prefect, which reads them when it is imported; whatever the user has set comes first
    "PREFECT_HOME": str(HOME / ".prefect"),
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_LOGGING_EXTRA_LOGGERS": "flows,tasks,model",
    "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",
    "DO_NOT_TRACK": "1",
}
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# What ls and show read of a manifest.
NEEDED = {"params": dict, "inputs": dict, "finished": str, "seconds": int | float, "environment": dict}
STAGES_THERE = "Stages, in order: {stages}."
app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__)
console = Console(width=None if sys.stdout and sys.stdout.isatty() else 160)  # a pipe has no width


class WithNames(TyperCommand):
    """A command whose help names the recipes and stages; what has them is slow to import, so for the help only."""

    def format_help(self, ctx: typer.Context, formatter: Any) -> None:
        """Put the names into the epilog."""
        from flows.recipes import RECIPES, STAGES

        self.epilog = self.epilog.format(recipes=", ".join(RECIPES), stages=", ".join(STAGES))
        super().format_help(ctx, formatter)


@contextmanager
def prefect_server() -> Iterator[None]:
    """Have Prefect use the running server, or else Prefect's own temporary one, for as long as the run takes."""
    url = os.environ.get("PREFECT_API_URL") or SERVER
    from prefect.settings import PREFECT_API_URL, temporary_settings

    if server_answers(url):
        with temporary_settings({PREFECT_API_URL: url}):
            yield
        return
    console.print(
        f"No Prefect server answers at {escape(url)}; this run uses one of its own.", style="dim", soft_wrap=True
    )
    from prefect.server.api.server import SubprocessASGIServer

    class Server(SubprocessASGIServer):
        """One that Ctrl-C, which a terminal sends to all of the run's processes, leaves to be ended by the run."""

        def _run_uvicorn_command(self) -> subprocess.Popen:
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # which the server inherits
            try:
                return super()._run_uvicorn_command()
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    os.environ.setdefault("PREFECT_SERVER_LOGGING_LEVEL", "CRITICAL")  # it complains of being stopped
    server = Server()
    before = signal.signal(signal.SIGTERM, leave)  # Prefect passes it on; unhandled, it would leave the server behind
    try:
        server.start(timeout=SERVER_SECONDS)
        with temporary_settings({PREFECT_API_URL: server.api_url}):
            yield
    finally:
        try:
            drain(server)
        finally:
            server.stop()
            signal.signal(signal.SIGTERM, before)


def drain(server: "SubprocessASGIServer") -> None:
    """Send the server what is left of events and logs, if it takes them; Ctrl-C ends this, and the server, at once."""
    from prefect.events.worker import EventsWorker

    process = server.server_process
    answers = process is not None and process.poll() is None
    services = tuple(EventsWorker._instances.values())  # of logs too: Prefect has one list for all kinds
    try:
        EventsWorker.drain_all(timeout=DRAIN_SECONDS if answers else 0)
    except KeyboardInterrupt:
        if process is not None:
            process.kill()
        raise
    finally:
        for service in services:  # Prefect would wait for them again, without limit, when the interpreter ends
            service._loop.call_soon_threadsafe(service._done_event.set)


def leave(number: int, frame: object) -> NoReturn:
    """End as this signal would, but by way of what has to be closed."""
    raise SystemExit(128 + number)


def parse_override(text: str) -> dict:
    """The JSON of an --override."""
    try:
        found = json.loads(text, object_pairs_hook=without_repeats)
    except json.JSONDecodeError as error:
        raise InputError(
            f'--override is no JSON: {error}. Expected e.g. \'{{"filter": {{"max_tokens_per_char": 0.25}}}}\'.'
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
        raise InputError(f"--override has {twice!r} twice in one object. Put what both say into one of them.")
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


def check_store() -> None:
    """Refuse a store that is no directory."""
    from tasks.stage import ROOT

    if ROOT.exists() and not ROOT.is_dir():
        raise InputError(f"{ROOT} is a file; artifacts need a directory. Set CRAM_ARTIFACTS to one.")


def check_stages(names: list[str]) -> None:
    """Refuse names that are no stages."""
    from flows.recipes import STAGES

    if wrong := [name for name in names if name not in STAGES]:
        raise InputError(f"There is no stage {wrong[0]!r}. Stages: {', '.join(STAGES)}.")


@app.command(cls=WithNames, epilog="Recipes: {recipes}.\n\n" + STAGES_THERE)
def run(
    recipe: Annotated[str, typer.Argument(help="A named set of all parameters; those there are stand below.")],
    override: Annotated[
        list[str] | None,
        typer.Option(metavar="JSON", help="What to change in the recipe. Several are merged; the later decides."),
    ] = None,
    until: Annotated[
        list[str] | None, typer.Option(metavar="STAGE", help="The last stage to run; without it, report.")
    ] = None,
    use: Annotated[
        list[str] | None, typer.Option(metavar="STAGE=KEY", help="Take this artifact; needs nothing before it.")
    ] = None,
    refresh: Annotated[
        list[str] | None, typer.Option(metavar="STAGE", help="Run this stage again though cached.")
    ] = None,
) -> None:
    """Run a recipe, from text to scores. What was done before with the same parameters is not done again."""
    changes = parse_overrides(override or [])
    if len(lasts := sorted(set(until or ["report"]))) > 1:
        raise InputError(f"--until names {' and '.join(lasts)}. A run has one last stage; give one.")
    [last] = lasts
    if wrong := [pair for pair in use or [] if "=" not in pair]:
        raise InputError(f"--use {wrong[0]} names no artifact; expected STAGE=KEY, as in --use pretrain=latest.")
    pairs = [pair.split("=", 1) for pair in use or []]
    given = dict(pairs)
    if len(given) < len(pairs):
        raise InputError(
            "--use names a stage twice. Give several finetune artifacts as finetune=KEY,KEY; others have one."
        )
    check_stages([last, *given, *(refresh or [])])
    check_store()
    from flows.cram import cram, planned

    planned(recipe, changes, last, given, refresh or []).check()  # what is wrong is told before a server is started
    leave_errors_to_main()
    with prefect_server():
        made = cram(recipe=recipe, override=changes, until=last, use=given, refresh=refresh or [])
    for artifact in made:
        tell(artifact)


def leave_errors_to_main() -> None:
    """Have Prefect's log on the terminal leave out what the user can mend: `main` tells it, once and last."""
    from prefect.logging.handlers import PrefectConsoleHandler

    for handler in logging.getLogger().handlers:
        if isinstance(handler, PrefectConsoleHandler):
            handler.addFilter(lambda record: not hasattr(record, "input_error"))


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
        console.print(f"The page with all of it: {shorten(artifact.path)}/report.html", soft_wrap=True, highlight=False)


def print_rows(rows: list[dict]) -> None:
    """Print rows as a table, or as several with the first column again where the terminal is too narrow for one."""
    if not rows:
        return
    cells = {name: [cell(row[name]) for row in rows] for name in rows[0]}
    widths = {name: max(map(len, [*found, *name.split()]), default=0) for name, found in cells.items()}
    first, *others = cells
    while True:
        chosen, room = [first], console.width - widths[first] - 2
        while others and (len(chosen) == 1 or widths[others[0]] + 2 <= room):
            room -= widths[others[0]] + 2
            chosen.append(others.pop(0))
        table = Table(box=None, header_style="bold")
        for name in chosen:
            justify = "right" if isinstance(rows[0][name], int | float) else "left"
            table.add_column(
                escape(name), justify=justify, width=min(widths[name], console.width // 2), overflow="fold"
            )
        for row in zip(*map(cells.get, chosen), strict=True):
            table.add_row(*map(escape, row))
        console.print(table)
        if not others:
            return
        console.print()


def cell(value: Any) -> str:
    """A value of a table."""
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def shorten(path: Path) -> str:
    """Relative to the working directory where that is shorter; for `console.print`, which takes brackets for markup."""
    with suppress(ValueError):
        path = path.relative_to(Path.cwd())
    return escape(str(path))


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


def laid_out(value: Any, indent: str = "") -> str:
    """JSON, with each value that is short enough on one line."""
    line = json.dumps(value)
    if len(indent) + len(line) <= LINE or not value or not isinstance(value, dict | list):
        return line
    inner = indent + "  "
    if isinstance(value, dict):
        lines = [f"{inner}{json.dumps(name)}: {laid_out(item, inner)}" for name, item in value.items()]
    else:
        lines = [f"{inner}{laid_out(item, inner)}" for item in value]
    return "\n".join(
        ["{" if isinstance(value, dict) else "[", ",\n".join(lines), indent + ("}" if isinstance(value, dict) else "]")]
    )


def without_rows(value: Any, rows: set[str]) -> Any:
    """Statistics without what they say of each row of a table; of the row `all` it stays."""
    if not isinstance(value, dict):
        return value
    told = {name for name, inner in value.items() if isinstance(inner, dict) and set(inner) <= rows}
    sums = {name: {"all": inner["all"]} for name, inner in value.items() if name in told and "all" in inner}
    return {
        name: sums.get(name) or without_rows(inner, rows)
        for name, inner in value.items()
        if name in sums or name not in told
    }


def brief(value: str) -> str:
    """A value short enough for a list."""
    return value if len(value) <= 24 else f"{value[:20]}…"


def differences(manifests: list[dict]) -> list[str]:
    """For each artifact of a stage, the params and inputs in which not all are the same."""
    found = [flat(m["params"]) | {f"from {k}": v for k, v in flat(m["inputs"]).items()} for m in manifests]
    names = [name for name in dict.fromkeys(n for f in found for n in f) if len({f.get(name) for f in found}) > 1]
    return [", ".join(f"{name}={brief(f[name])}" for name in names if name in f) for f in found]


@app.command(cls=WithNames, epilog=STAGES_THERE)
def ls(stage: Annotated[str | None, typer.Argument(help="Only this stage's.")] = None) -> None:
    """List artifacts: key, when made, size, seconds, and what differs in their parameters."""
    check_stages([stage] if stage else [])
    check_store()
    from flows.recipes import STAGES
    from tasks.stage import ROOT, artifacts

    damaged = []
    table = Table(box=None, header_style="bold")
    for column in ("stage", "key", "finished (UTC)", "size", "seconds"):
        table.add_column(column, no_wrap=True, justify="right" if column in ("size", "seconds") else "left")
    table.add_column("what differs")
    for name in [stage] if stage else STAGES:
        found = {}
        for artifact in artifacts(name):
            try:
                found[artifact.key] = read_about(artifact)
            except InputError as error:
                damaged.append(str(error))
        for (key, about), difference in zip(found.items(), differences([*found.values()]), strict=True):
            when = about["finished"][:19].replace("T", " ")
            row = (name, key, when, size(about), f"{about['seconds']:.1f}", difference)
            table.add_row(*map(escape, row))
    if table.row_count:
        console.print(table)
    elif not damaged:
        what, how = (f"artifacts of {stage}", f" --until {stage}") if stage else ("artifacts", "")
        console.print(
            f"No {what} in {escape(str(ROOT))} yet. Make some: cram run demo{how}", soft_wrap=True, highlight=False
        )
    for sentence in damaged:
        console.print(sentence, markup=False, soft_wrap=True, highlight=False)


def read_about(artifact: "Artifact") -> dict:
    """An artifact's manifest, with all that a stage writes there."""
    about = artifact.manifest
    if missing := [name for name, kind in NEEDED.items() if not isinstance(about.get(name), kind)]:
        raise InputError(
            f"{artifact.name} is damaged: its stage.json has no {missing[0]}. Run the stage again, or copy the whole "
            "directory here."
        )
    return about


@app.command(cls=WithNames, epilog=STAGES_THERE)
def show(
    artifact: Annotated[str, typer.Argument(metavar="STAGE[/KEY]", help="The newest, if no key is given.")],
) -> None:
    """Print an artifact's parameters, inputs and statistics."""
    stage, _, key = artifact.partition("/")
    check_stages([stage])
    check_store()
    from tasks.stage import find

    found = find(stage, key or "latest")
    about = read_about(found)
    commit = about["environment"].get("commit", "unknown")
    console.print(f"[bold]{escape(found.name)}[/]  {shorten(found.path)}", soft_wrap=True)
    console.print(
        f"finished {about['finished']}, {about['seconds']:.1f} s, {size(about)}, commit {commit}", markup=False
    )
    for title in ("params", "inputs"):
        console.print(f"\n[bold]{title}[/]")
        for name, value in flat(about[title]).items():
            console.print(f"  {name}: {value}", markup=False, highlight=False)
    stats = dict(about["stats"])
    rows = stats.pop("table", [])
    told = without_rows(stats, {str(next(iter(row.values()))) for row in rows}) if rows else stats
    console.print("\n[bold]stats[/]")
    console.print(laid_out(told), markup=False, highlight=False, soft_wrap=True)
    print_rows(rows)
    if told != stats:
        console.print(f"\nAll of it: {shorten(found.path)}/stats.json", soft_wrap=True, highlight=False)


@app.command(cls=WithNames, epilog=STAGES_THERE)
def diff(
    stage: Annotated[str, typer.Argument(help="Of which stage.")],
    a: Annotated[str, typer.Argument(metavar="A", help="A key, the beginning of one, or `latest`.")],
    b: Annotated[str, typer.Argument(metavar="B", help="Another.")],
    samples: Annotated[int, typer.Option(min=0, max=1000, help="Documents to show of each kind, for `filter`.")] = 5,
) -> None:
    """Print what differs between two artifacts of a stage; of two filters, also which documents only one of them keeps."""
    check_stages([stage])
    check_store()
    from tasks.stage import find

    found = {"A": find(stage, a), "B": find(stage, b)}
    if found["A"] == found["B"]:
        raise InputError(f"Both are {found['A'].name}. Give two different artifacts; `cram ls {stage}` lists them.")
    manifests = {name: artifact.manifest for name, artifact in found.items()}
    for name, artifact in found.items():
        finished = escape(manifests[name]["finished"])
        console.print(f"{name}: [bold]{escape(artifact.name)}[/]  finished {finished}", highlight=False)
    about = [flat({key: m[key] for key in ("version", "params", "inputs")}) for m in manifests.values()]
    console.print("\n[bold]what differs in parameters and inputs[/]")
    print_rows(differing(*about) or [{"": "nothing"}])
    if stage == "filter":
        print_filters(*found.values(), samples)
        return
    console.print("\n[bold]what differs in statistics[/]")
    stats = [flat({k: v for k, v in m["stats"].items() if k != "table"}) for m in manifests.values()]
    if stage == "report":  # the rows of other tables are sums of what else is there
        stats = [own | scores(m["stats"]["table"]) for own, m in zip(stats, manifests.values(), strict=True)]
    print_rows(differing(*stats) or [{"": "nothing"}])
    if stage == "report":
        console.print(f"\nWith spread and costs: cram compare {escape(a)} {escape(b)}", highlight=False, soft_wrap=True)


def scores(rows: list[dict]) -> dict[str, str]:
    """A report's scores, by what they are of. Reports of older versions have neither protocols nor shares."""
    found = {}
    for row in rows:
        what = [row["task"], row["metric"], row.get("protocol", "cramming")]
        what += [] if row["pretrained"] else ["not pretrained"]
        what += [] if row.get("share", 1) == 1 else [f"{100 * row['share']:g} % of the data"]
        found[", ".join(what)] = str(row["score"])
    return found


def differing(a: dict[str, str], b: dict[str, str]) -> list[dict]:
    """Rows of what is not the same in both."""
    names = [name for name in {**a, **b} if a.get(name) != b.get(name)]
    return [{"": name, "A": brief(a.get(name, "-")), "B": brief(b.get(name, "-"))} for name in names]


def print_filters(a: "Artifact", b: "Artifact", samples: int) -> None:
    """Print which documents two filters kept, and samples of those that only one did."""
    from tasks.diff import compare

    if a.manifest["inputs"] != b.manifest["inputs"]:
        console.print(
            "\nTheir inputs differ, so documents are compared by id, and either may have some that the other was not given."
        )
    found = compare(a, b, samples)
    console.print("\n[bold]documents[/]")
    print_rows(found["sources"])
    console.print("\n[bold]what only one of them keeps, by what each says[/]")
    print_rows(found["changes"] or [{"": "nothing"}])
    for name, what in (("dropped", "A keeps and B drops"), ("added", "B keeps and A drops")):
        if found[name]:
            console.print(f"\n[bold]samples of what {what}[/]")
        for sample in found[name]:
            verdicts = "; ".join(
                f"{x}: {sample[f'{x} tokens_per_char']} tokens a character, {sample[f'{x} verdict']}" for x in "AB"
            )
            console.print(
                f"{sample['id']} ({sample['source']})  {verdicts}", markup=False, highlight=False, soft_wrap=True
            )
            console.print(f"    {' '.join(sample['text'].split())}", markup=False, highlight=False, style="dim")


for command in (compare, predict, fill):
    app.command()(command)


def say(sentence: str) -> None:
    """Print what is no markup: addresses and paths may have brackets."""
    console.print(sentence, markup=False)


@app.command()
def up() -> None:
    """Start a Prefect server (if none answers) and a worker, and deploy cram/full."""
    from flows import services

    services.up(os.environ.get("PREFECT_API_URL") or SERVER, say)


@app.command()
def down() -> None:
    """End what `cram up` started."""
    from flows import services

    services.down(say)


@contextmanager
def output_checked() -> Iterator[None]:
    """Raise InputError where standard output takes nothing, also when that is only seen at its last flush."""
    if sys.stdout is None:
        raise InputError("Standard output is closed. Send it to a file or a pipe, or to /dev/null if it isn't wanted.")
    problem = None
    try:
        yield
    except OSError as error:
        if error.filename or error.errno not in FULL:  # not of what is open already
            raise
        problem = error
    finally:
        try:
            sys.stdout.flush()
        except OSError as error:
            problem = error
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the flush at the interpreter's end would fail too
        if isinstance(problem, BrokenPipeError):
            sys.exit(1)
        if problem:
            raise InputError(
                f"Standard output can't be written: {problem.strerror}. Make room there, or send it elsewhere; then run again."
            ) from problem


def main() -> None:
    """Run the command line; what the user can mend is told in a sentence."""
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    try:
        with output_checked():
            app()
    except InputError as error:
        Console(stderr=True).print(f"[red]cram:[/] {escape(str(error))}", soft_wrap=True, highlight=False)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
