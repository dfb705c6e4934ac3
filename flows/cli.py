"""The command line: cram run, ls, show, diff, params, compare, predict, fill, up, down."""

import ast
import errno
import json
import logging
import os
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from typer.core import TyperCommand

from flows.ask import fill, predict
from flows.compare import compare
from flows.params import parameters
from flows.server import prefect_server
from flows.services import SERVER
from flows.summary import age, brief_duration, counts, flat, relative, size, telling
from model import InputError
from tasks.home import HOME, IN_CHECKOUT, STATE
from tasks.reports.markdown import printable

if TYPE_CHECKING:  # importing them imports Prefect, whose settings `main` makes first
    from tasks.store import Artifact

LONGEST_DEFAULT = 30  # characters of a line, in a table of parameters
LINE = 120  # characters of JSON on one line
SETTINGS = {  # for Prefect, which reads them when it is imported; whatever the user has set comes first
    "PREFECT_HOME": str(HOME / ".prefect"),
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_LOGGING_EXTRA_LOGGERS": "flows,tasks,model",
    "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",
    "PREFECT_LOGGING_INTERNAL_LEVEL": "CRITICAL",  # else each event that an absent server does not take is printed whole
    "DO_NOT_TRACK": "1",
}
EXAMPLE = '\'{"filter": {"max_tokens_per_char": 0.25}}\''  # of an --override
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
VERSIONS = ("cram", "torch", "prefect")  # packages
ROOM = 40  # characters that ls needs for what differs beside the other columns; with fewer it stands below them
# What ls, show and diff read of a manifest.
NEEDED = {"params": dict, "inputs": dict, "finished": str, "seconds": int | float, "environment": dict}
STAGES_THERE = "Stages, in order: {stages}."
ABOUT = "Pretrain a BERT-class encoder from scratch within a budget, from raw text to GLUE scores."
app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, help=ABOUT)
console = Console(width=None if sys.stdout and sys.stdout.isatty() else 160)  # a pipe has no width


class WithNames(TyperCommand):
    """A command whose help lists the recipes and stages, which are slow to import and so for the help only."""

    def format_help(self, ctx: typer.Context, formatter: Any) -> None:
        """Fill the names into the epilog."""
        from flows.recipes import RECIPES, STAGES

        self.epilog = self.epilog.format(recipes=", ".join(RECIPES), stages=", ".join(STAGES))
        super().format_help(ctx, formatter)


def recipe_names() -> list[str]:
    """For completion."""
    from flows.deltas import DELTAS

    return list(DELTAS)


def stage_names() -> list[str]:
    """For completion: the fields of Recipe from its source, since importing it takes seconds."""
    module = ast.parse(Path(__file__).with_name("recipes.py").read_text())
    recipe = next(node for node in module.body if isinstance(node, ast.ClassDef) and node.name == "Recipe")
    return [node.target.id for node in recipe.body if isinstance(node, ast.AnnAssign)]


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


def check_store() -> None:
    """Raise InputError if the store is not a directory."""
    from tasks.store import ROOT

    if ROOT.exists() and not ROOT.is_dir():
        raise InputError(f"The artifact store {ROOT} is a file; expected a directory. Set CRAM_ARTIFACTS to one.")


def say_where_artifacts_go() -> None:
    """Name the store where it depends on the working directory: cram was installed elsewhere than in a checkout."""
    if not IN_CHECKOUT and not os.environ.get("CRAM_ARTIFACTS"):
        console.print(
            f"Artifacts are kept in {escape(str(HOME / 'artifacts'))}, in the working directory, because cram is not "
            "installed from a checkout. CRAM_ARTIFACTS names another place.",
            style="dim", soft_wrap=True, highlight=False,
        )  # fmt: skip


def check_stages(names: list[str]) -> None:
    """Raise InputError if one of these is not the name of a stage."""
    from flows.recipes import STAGES, did_you_mean

    if wrong := [name for name in names if name not in STAGES]:
        raise InputError(
            f"There is no stage {wrong[0]!r}. {did_you_mean(wrong[0], STAGES)}Stages: {', '.join(STAGES)}."
        )


@app.command(cls=WithNames, epilog="Recipes: {recipes}.\n\n" + STAGES_THERE)
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
    if wrong := [pair for pair in use or [] if "=" not in pair]:
        raise InputError(f"--use is {wrong[0]!r}; expected STAGE=KEY, for example --use pretrain=latest.")
    pairs = [pair.split("=", 1) for pair in use or []]
    given = dict(pairs)
    if len(given) < len(pairs):
        raise InputError(
            "--use names the same stage twice. Only finetune takes several artifacts; separate their keys by commas: "
            "--use finetune=KEY,KEY."
        )
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


def print_rows(rows: list[dict]) -> None:
    """Print rows as a table, or as several that repeat the first column if the terminal is too narrow for one."""
    if not rows:
        return
    rows = [{printable(name): value for name, value in row.items()} for row in rows]
    cells = {name: [cell(row[name]) for row in rows] for name in rows[0] if any(row[name] != "" for row in rows)}
    most = 2 * console.width // 5  # of a column: a sentence beside the numbers that it is about is folded to this
    widths = {name: min(most, max(map(len, [*found, *name.split()]), default=0)) for name, found in cells.items()}
    first, *others = cells
    while True:
        chosen, room = [first], console.width - widths[first] - 2
        while others and (len(chosen) == 1 or widths[others[0]] + 2 <= room):
            room -= widths[others[0]] + 2
            chosen.append(others.pop(0))
        table = Table(box=None, header_style="bold")
        for name in chosen:
            justify = "right" if isinstance(rows[0][name], int | float) else "left"
            table.add_column(escape(name), justify=justify, width=widths[name], overflow="fold")
        for row in zip(*map(cells.get, chosen), strict=True):
            table.add_row(*map(escape, row))
        console.print(table)
        if not others:
            return
        console.print()


def print_scores(rows: list[dict]) -> None:
    """Print the scores of a report, without the columns that say the usual, and with verdicts below."""
    names = telling(rows) if rows else []
    if "verdict" in names:
        rows = [row | {"verdict": "†" if row["verdict"] else "", "": row["verdict"]} for row in rows]
    print_rows([{name: row[name] for name in names} for row in rows])
    for verdict in dict.fromkeys(row[""] for row in rows if row.get("")):
        say(f"† {verdict}")


def cell(value: Any) -> str:
    """The text of a value in a table."""
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else printable(value)


def shorten(path: Path) -> str:
    """The path, relative if it is below the working directory, for `console.print`, which reads brackets as markup."""
    return escape(printable(relative(path)))


def total(manifest: dict) -> str:
    """The size of an artifact's files."""
    return size(sum(file["bytes"] for file in manifest["files"]))


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
    """Statistics without those of single rows of the table; those of the row `all` stay."""
    if not isinstance(value, dict):
        return value
    told = {name for name, inner in value.items() if isinstance(inner, dict) and set(inner) <= rows}
    sums = {
        name: {"all": inner["all"]} for name, inner in value.items() if name in told - {"by_source"} and "all" in inner
    }
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
    return [printable(", ".join(f"{name}={brief(f[name])}" for name in names if name in f)) for f in found]


def print_listing(header: tuple[str, ...], rows: list[tuple[str, ...]], details: list[str]) -> None:
    """Print aligned rows no wider than the console, their details in a last column or, if there is no room, below each.

    All columns but the first and the last of a row hold numbers.
    """
    rows = [tuple(map(printable, row)) for row in rows]
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    beside = console.width - sum(widths) - 2 * len(widths) >= ROOM
    title = "what differs" if beside and any(details) else ""
    for row, detail, style in [(header, title, "bold"), *((*pair, "") for pair in zip(rows, details, strict=True))]:
        start = row[0].ljust(widths[0]) + "".join(
            f"  {cell.rjust(width)}" for cell, width in zip(row[1:-1], widths[1:-1], strict=True)
        )
        if beside and detail:
            print_hanging(f"{start}  {row[-1].ljust(widths[-1])}  ", detail, style)
        else:
            print_hanging(f"{start}  ", row[-1], style)
            print_hanging("    ", detail, "dim")


def print_hanging(start: str, text: str, style: str) -> None:
    """Print text after `start`, its further lines below its first; nothing if both are blank."""
    width, indent = max(console.width, len(start) + 20), " " * len(start)
    wrapped = textwrap.wrap(text, width, initial_indent=start, subsequent_indent=indent, break_on_hyphens=False)
    for line in wrapped or filter(str.strip, [start]):
        console.print(line, markup=False, highlight=False, soft_wrap=True, style=style)


@app.command(cls=WithNames, epilog=STAGES_THERE)
def ls(
    stage: Annotated[
        str | None, typer.Argument(help="List only this stage's artifacts.", autocompletion=stage_names)
    ] = None,
) -> None:
    """List artifacts with their age, size, run time, main result and differing parameters; then unfinished drafts."""
    check_stages([stage] if stage else [])
    check_store()
    from flows.recipes import STAGES
    from tasks.store import ROOT, artifacts, drafts

    damaged, rows, details = [], [], []
    for name in [stage] if stage else STAGES:
        found = {}
        for artifact in artifacts(name):
            try:
                found[artifact.name] = read_about(artifact)
            except InputError as error:
                damaged.append(str(error))
        for title, about in found.items():
            took = brief_duration(about["seconds"])
            result = counts(about["stats"]).removesuffix(" kept")  # to fit into 80 columns
            rows.append((title, age(about["finished"]), total(about), took, result))
        details += differences([*found.values()])
    if rows:
        print_listing(("artifact", "age", "size", "time", "result"), rows, details)
    elif not damaged:
        what, how = (f"artifacts of {stage}", f" --until {stage}") if stage else ("artifacts", "")
        say(f"No {what} in {ROOT} yet. Make some: cram run demo{how}")
        say_where_artifacts_go()
    if left := drafts(stage or ""):
        say(f"\nUnfinished drafts in {relative(ROOT / '.partial')}; delete a directory there to discard it:")
        about = [(d.artifact.name.lstrip("/"), age(d.written), size(d.bytes), d.fate) for d in left]
        print_listing(("draft", "age", "size", "state"), about, [""] * len(about))
    for sentence in damaged:
        say(sentence)


def read_about(artifact: "Artifact") -> dict:
    """An artifact's manifest. Raises InputError if it lacks anything that a stage writes there."""
    about = artifact.manifest
    if missing := [name for name, kind in NEEDED.items() if not isinstance(about.get(name), kind)]:
        raise InputError(
            f"{artifact.name} is damaged: its stage.json has no {missing[0]}. Run the stage again, or copy the whole "
            "directory here."
        )
    return about


@app.command(cls=WithNames, epilog=STAGES_THERE)
def show(
    artifact: Annotated[
        str,
        typer.Argument(
            metavar="STAGE[/KEY]",
            help="Artifact to print; without a key, the newest of the stage.",
            autocompletion=stage_names,
        ),
    ],
) -> None:
    """Print an artifact's parameters, inputs and statistics."""
    stage, _, key = artifact.partition("/")
    check_stages([stage])
    check_store()
    from tasks.store import find

    found = find(stage, key or "latest")
    about = read_about(found)
    commit, when = about["environment"].get("commit", "unknown"), about["finished"]
    console.print(f"[bold]{escape(printable(found.name))}[/]  {shorten(found.path)}", soft_wrap=True)
    facts = [
        counts(about["stats"]),
        f"finished {when} ({age(when)} ago)",
        brief_duration(about["seconds"]),
        total(about),
    ]
    say(", ".join([*filter(None, facts), f"commit {commit}"]))
    for title in ("params", "inputs"):
        console.print(f"\n[bold]{title}[/]")
        for name, value in flat(about[title]).items():
            say(printable(f"  {name}: {value}"))
    stats = dict(about["stats"])
    rows = stats.pop("table", [])
    told = without_rows(stats, {str(next(iter(row.values()))) for row in rows}) if rows else stats
    console.print("\n[bold]stats[/]")
    say(laid_out(told))
    (print_scores if stage == "report" else print_rows)(rows)
    if told != stats:
        console.print(f"\nAll statistics: {shorten(found.path)}/stats.json", soft_wrap=True, highlight=False)


@app.command(cls=WithNames, epilog=STAGES_THERE)
def diff(
    stage: Annotated[str, typer.Argument(help="Stage to compare.", autocompletion=stage_names)],
    a: Annotated[str, typer.Argument(metavar="A", help="First artifact: a key, the start of one, or `latest`.")],
    b: Annotated[str, typer.Argument(metavar="B", help="Second artifact.")],
    samples: Annotated[
        int, typer.Option(min=0, max=1000, help="Documents to print per kind of change (stage filter only).")
    ] = 5,
) -> None:
    """Compare two artifacts of a stage. For filter, also list which documents only one of them keeps."""
    check_stages([stage])
    check_store()
    from tasks.store import find

    found = {"A": find(stage, a), "B": find(stage, b)}
    if found["A"] == found["B"]:
        raise InputError(
            f"A and B are both {found['A'].name}; expected two different artifacts. `cram ls {stage}` lists them."
        )
    manifests = {name: read_about(artifact) for name, artifact in found.items()}
    for name, artifact in found.items():
        finished = escape(printable(manifests[name]["finished"]))
        console.print(f"{name}: [bold]{escape(printable(artifact.name))}[/]  finished {finished}", highlight=False)
    about = [flat({key: m.get(key) for key in ("version", "params", "inputs")}) for m in manifests.values()]
    console.print("\n[bold]differing parameters and inputs[/]")
    print_rows(differing(*about) or [{"": "none"}])
    if stage == "filter":
        print_filters(*found.values(), samples)
        return
    console.print("\n[bold]differing statistics[/]")
    stats = [flat({k: v for k, v in m["stats"].items() if k != "table"}) for m in manifests.values()]
    if stage == "report":  # the tables of other stages repeat their statistics
        stats = [own | scores(m["stats"]["table"]) for own, m in zip(stats, manifests.values(), strict=True)]
    print_rows(differing(*stats) or [{"": "none"}])
    if stage == "report":
        say(f"\nFor spread and cost: cram compare {a} {b}")


def scores(rows: list[dict]) -> dict[str, str]:
    """A report's scores by task and setting. Reports of older versions have neither protocols nor shares."""
    found = {}
    for row in rows:
        what = [row["task"], row["metric"], row.get("protocol", "cramming")]
        what += [] if row["pretrained"] else ["not pretrained"]
        what += [] if row.get("share", 1) == 1 else [f"{100 * row['share']:g} % of the data"]
        found[", ".join(what)] = str(row["score"])
    return found


def differing(a: dict[str, str], b: dict[str, str]) -> list[dict]:
    """Table rows of the names whose values differ."""
    names = [name for name in {**a, **b} if a.get(name) != b.get(name)]
    return [{"": name, "A": brief(a.get(name, "-")), "B": brief(b.get(name, "-"))} for name in names]


def print_filters(a: "Artifact", b: "Artifact", samples: int) -> None:
    """Print how many documents two filters keep, and samples of those that only one of them keeps."""
    from tasks.reports.filter_diff import compare

    if a.manifest["inputs"]["corpus"] != b.manifest["inputs"]["corpus"]:
        console.print(
            "\nThe two filters read different inputs. Documents are matched by id, so some may exist in only one of the inputs."
        )
    found = compare(a, b, samples)
    console.print("\n[bold]documents[/]")
    print_rows(found["sources"])
    console.print("\n[bold]documents that only one of them keeps, by both verdicts[/]")
    print_rows(found["changes"] or [{"": "none"}])
    for name, what in (("dropped", "that A keeps and B drops"), ("added", "that B keeps and A drops")):
        if found[name]:
            console.print(f"\n[bold]sample documents {what}[/]")
        for sample in found[name]:
            verdicts = "; ".join(
                f"{x}: {sample[f'{x} tokens_per_char']} tokens per character, {sample[f'{x} verdict']}" for x in "AB"
            )
            say(printable(f"{sample['id']} ({sample['source']})  {verdicts}"))
            text = printable(" ".join(sample["text"].split()))
            console.print(f"    {text}", markup=False, highlight=False, style="dim")


@app.command(cls=WithNames, epilog=STAGES_THERE)
def params(
    stage: Annotated[
        str | None, typer.Argument(help="Print only this stage's parameters.", autocompletion=stage_names)
    ] = None,
) -> None:
    """List the parameters of every stage: values they take, default, description. `cram run --override` sets them."""
    check_stages([stage] if stage else [])
    from flows.recipes import STAGES, Recipe

    for name in [stage] if stage else STAGES:
        about = (Recipe.model_fields[name].annotation.__doc__ or "").split("\n")[0]
        console.print(f"\n[bold]{name}[/]  {escape(about)}", highlight=False)
        table = Table("parameter", "takes", "default", "description", box=None, header_style="bold")
        table.columns[0].no_wrap = True
        table.columns[2].max_width = LONGEST_DEFAULT
        for row in parameters(name):
            table.add_row(*map(escape, row))
        console.print(table)


for command in (compare, predict, fill):
    app.command()(command)


def say(text: str) -> None:
    """Print text that may have brackets, which are not markup, as one paragraph a line."""
    console.print(printable(text, lines=True), markup=False, highlight=False, soft_wrap=True)


@app.command()
def up() -> None:
    """Start a Prefect server (unless one is running) and a worker, and deploy the flow as cram/full."""
    from flows import services

    services.up(os.environ.get("PREFECT_API_URL") or SERVER, say)


@app.command()
def down() -> None:
    """Stop the server and the worker that `cram up` started."""
    from flows import services

    services.down(say)


def print_versions(wanted: bool) -> None:
    """Print the versions of cram and what it computes with, then exit."""
    if not wanted:
        return
    from importlib.metadata import PackageNotFoundError, version

    from tasks.stage import environment

    for name in VERSIONS:
        with suppress(PackageNotFoundError):
            say(f"{name} {version(name)}")
    say(f"commit {environment()['commit']}")
    raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Print versions and exit.", is_eager=True, callback=print_versions)
    ] = False,
) -> None:
    """Options of the program itself; `print_versions` handles the only one."""


@contextmanager
def output_checked() -> Iterator[None]:
    """Raise InputError if standard output can't be written, even if only its last flush fails."""
    if sys.stdout is None:
        raise InputError("Standard output is closed. Redirect it to a file or a pipe, or to /dev/null to discard it.")
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
                f"Standard output can't be written: {problem.strerror}. Free space or redirect it, then run again."
            ) from problem


def main() -> None:
    """Run the command line; user errors are printed as one sentence."""
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    os.environ["PREFECT_HOME"] = str(STATE)  # absolute: the worker runs in another directory
    try:
        with output_checked():
            app()
    except InputError as error:
        Console(stderr=True).print(
            f"[red]cram:[/] {escape(printable(error, lines=True))}", soft_wrap=True, highlight=False
        )
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
