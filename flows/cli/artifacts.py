"""`cram ls`, `cram show` and `cram diff`: the artifacts of the store, and how two of them differ."""

import json
from collections import Counter
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.filesize import decimal
from rich.markup import escape

from flows.cli.common import (
    called,
    check_stages,
    console,
    print_listing,
    print_rows,
    say,
    shorten,
    stage_names,
)
from flows.summary import OTHER_STAGES, counts, flat, relative
from model.clock import about_stops
from model.wording import age, brief_duration, counted, printable
from tasks.store.manifests import kept_files

if TYPE_CHECKING:  # importing the store imports Prefect
    from tasks.store.artifacts import Artifact

MOST_ROWS = 40  # by name in statistics and their table; a folder of letters can have as many sources


def ls(
    stage: Annotated[
        str | None, typer.Argument(help="List only this stage's artifacts.", autocompletion=stage_names)
    ] = None,
) -> None:
    """List artifacts with their age, size, run time, main result and differing parameters; then unfinished drafts.

    Below them, the bytes on disk of each stage, and of all. A file of several artifacts counts for the first of them.
    """
    check_stages([stage] if stage else [], others=True)
    from tasks.store import home
    from tasks.store.artifacts import describe_incomplete, inspect_all
    from tasks.store.gc import files_of, read_pins, sizes
    from tasks.store.locks import drafts

    damaged, rows, details, files, pins = [], [], [], {}, read_pins()
    for name in [stage] if stage else (*stage_names(), *OTHER_STAGES):
        manifests = []
        for artifact, (about, problem) in inspect_all(name).items():
            if about is None:
                damaged.append(describe_incomplete(artifact, problem))
                continue
            manifests.append(about)
            took = brief_duration(about["seconds"])
            result = counts(about["stats"]).removesuffix(" kept")  # to fit into 80 columns
            marks = ["hollow"] * ("hollow" in about) + ["pinned"] * (artifact.name in pins)
            result = ", ".join(filter(None, [result, *marks]))
            rows.append((artifact.name, age(about["finished"]), total(about), took, result))
            files.setdefault(name, []).extend(files_of(artifact, about))
        details += differences(manifests)
    if rows:
        print_listing(("artifact", "age", "size", "time", "result"), rows, details)
        print_bytes(sizes(files, whole=True), Counter(row[0].partition("/")[0] for row in rows))
    elif not damaged:
        what, how = (f"artifacts of {stage}", f" --until {stage}") if stage else ("artifacts", "")
        say(f"No {what} in {home.root()} yet. Make some: cram run demo{how}")
    if left := drafts(stage or ""):
        say(f"\nUnfinished drafts in {relative(home.root() / '.partial')}; delete a directory there to discard it:")
        about = [(d.name, age(d.written), decimal(d.bytes), "in progress" * d.running) for d in left]
        print_listing(("draft", "age", "size", "state"), about, [""] * len(about))
    for sentence in damaged:
        say(sentence)


def print_bytes(by_stage: dict[str, int], numbers: Counter) -> None:
    """Print the bytes on disk and the number of artifacts of each stage, and of all."""
    rows = [(name, f"{numbers[name]:,}", decimal(size)) for name, size in by_stage.items()]
    rows += [("all", f"{numbers.total():,}", decimal(sum(by_stage.values())))] * (len(rows) > 1)
    say("")
    print_listing(("stage", "artifacts", "on disk"), rows, [""] * len(rows))


def total(manifest: dict) -> str:
    """The total size of an artifact's files, without those that were dropped."""
    return decimal(sum(file["bytes"] for file in kept_files(manifest)))


def show(
    artifact: Annotated[
        str,
        typer.Argument(
            metavar="STAGE[/KEY]",
            help="Artifact to print, also KEY alone; without a key, the newest of the stage.",
            autocompletion=stage_names,
        ),
    ],
) -> None:
    """Print an artifact's parameters, inputs and statistics."""
    found = called(artifact)
    about = found.manifest
    commit, when = about["environment"].get("commit", "unknown"), about["finished"]
    console.print(f"[bold]{escape(printable(found.name))}[/]  {shorten(found.path)}", soft_wrap=True)
    facts = [
        counts(about["stats"]),
        f"finished {when} ({age(when)} ago)",
        brief_duration(about["seconds"]),
        total(about),
    ]
    say(", ".join([*filter(None, facts), f"commit {commit}"]))
    if said := about_stops(about["stats"]):
        say(said)
    if dropped := about.get("hollow"):
        was = decimal(sum(file["bytes"] for file in about["files"] if file["path"] in set(dropped)))
        say(
            f"hollow: {counted(len(dropped), 'file')} with {was} were dropped; a stage that needs them makes them again"
        )
    for title in ("params", "inputs"):
        console.print(f"\n[bold]{title}[/]")
        for name, value in flat(about[title]).items():
            say(printable(f"  {name}: {value}"))
    stats = dict(about["stats"])
    rows = stats.pop("table", [])
    shown = shortened(stats, {str(next(iter(row.values()))) for row in rows})
    console.print("\n[bold]stats[/]")
    say(json.dumps(shown, indent=2))
    print_rows(rows[:MOST_ROWS])
    if len(rows) > MOST_ROWS:
        say(f"… and {counted(len(rows) - MOST_ROWS, 'row')} more")
    if shown != stats:
        console.print(f"\nAll statistics: {shorten(found.path)}/stats.json", soft_wrap=True, highlight=False)


def shortened(value: Any, rows: set[str]) -> Any:
    """Statistics without the numbers that the table shows by row, but for the row `all`; of many names, the first."""
    if not isinstance(value, dict):
        return value
    shown = {}
    for name, inner in list(value.items())[:MOST_ROWS]:
        if not isinstance(inner, dict) or not inner or not set(inner) <= rows:
            shown[name] = shortened(inner, rows)
        elif "all" in inner and name != "by_source":
            shown[name] = {"all": inner["all"]}
    left = len(value) - MOST_ROWS
    return shown | ({"…": f"{left:,} more"} if left > 0 else {})


def brief(value: str) -> str:
    """A value, shortened to fit into a list."""
    return value if len(value) <= 24 else f"{value[:20]}…"


def differences(manifests: list[dict]) -> list[str]:
    """For each artifact of a stage, the params and inputs that differ between them."""
    values = [flat(m["params"]) | {f"from {k}": v for k, v in flat(m["inputs"]).items()} for m in manifests]
    every = dict.fromkeys(name for own in values for name in own)
    names = [name for name in every if len({own.get(name) for own in values}) > 1]
    return [printable(", ".join(f"{name}={brief(own[name])}" for name in names if name in own)) for own in values]


def diff(
    stage: Annotated[str, typer.Argument(help="Stage to compare.", autocompletion=stage_names)],
    a: Annotated[str, typer.Argument(metavar="A", help="First artifact: a key, the start of one, or `latest`.")],
    b: Annotated[str, typer.Argument(metavar="B", help="Second artifact.")],
    samples: Annotated[
        int, typer.Option(min=0, max=1000, help="Documents to print per kind of change (stage filter only).")
    ] = 5,
) -> None:
    """Compare two artifacts of a stage: reports by scores, filters by the documents that only one of them keeps."""
    check_stages([stage], others=True)
    from tasks.store.artifacts import find
    from tasks.store.manifests import verify

    pair = [find(stage, a), find(stage, b)]
    manifests = [artifact.manifest for artifact in pair]
    for side, artifact, about in zip("AB", pair, manifests, strict=True):
        finished = escape(printable(about["finished"]))
        console.print(f"{side}: [bold]{escape(printable(artifact.name))}[/]  finished {finished}", highlight=False)
    if stage == "report":
        for artifact in pair:
            verify(artifact)
        reports = [json.loads((artifact.path / "report.json").read_text(encoding="utf-8")) for artifact in pair]
        print_differing("parameters", *(about["params"] | {"finetune": about["finetuning"]} for about in reports))
        print_scores(*reports)
        return
    names = ("version", "params", "inputs")
    print_differing("parameters and inputs", *({name: about.get(name) for name in names} for about in manifests))
    hollow = [artifact.name for artifact, about in zip(pair, manifests, strict=True) if "hollow" in about]
    if stage == "filter" and not hollow:
        print_filters(*pair, samples)
        return
    if stage == "filter":
        say(f"\nThe documents of {' and '.join(hollow)} aren't in this store (hollow), so only counts are compared.")
    every = [about["stats"] for about in manifests]  # a table repeats them
    print_differing("statistics", *({name: value for name, value in one.items() if name != "table"} for one in every))


def print_differing(what: str, a: dict, b: dict) -> None:
    """Print the fields whose values differ."""
    a, b = flat(a), flat(b)
    names = [name for name in {**a, **b} if a.get(name) != b.get(name)]
    console.print(f"\n[bold]differing {what}[/]")
    print_rows([{"": n, "A": brief(a.get(n, "-")), "B": brief(b.get(n, "-"))} for n in names] or [{"": "none"}])


def print_scores(a: dict, b: dict) -> None:
    """Print the scores of two reports. `a`, `b`: their report.json."""
    from tasks.reports.diff import compare_scores, have_other_vocabularies

    console.print("\n[bold]scores[/]")
    print_rows(compare_scores(a, b))
    say("In brackets: 95 % intervals over examples; after ±: standard errors over documents. Smaller differences than")
    say("these can be real, since both models were measured on the same examples.")
    if have_other_vocabularies(a, b):
        say("The vocabularies differ, so one loss is better only if it is also below the other's lower bound, which")
        say("leaves out what the numbers of pieces cost.")


def print_filters(a: "Artifact", b: "Artifact", most: int) -> None:
    """Print how many documents two filters keep, and samples of those that only one of them keeps."""
    from tasks.reports.diff import count_changed_verdicts, count_kept, join_measurements, sample_documents

    if a.manifest["inputs"]["corpus"] != b.manifest["inputs"]["corpus"]:
        console.print(
            "\nThe two filters read different inputs. Documents are matched by id and source, so some may exist in "
            "only one of the inputs."
        )
    both = join_measurements(a, b)
    console.print("\n[bold]documents[/]")
    print_rows(count_kept(both).to_dict("records"))
    console.print("\n[bold]documents that only one of them keeps, by both verdicts[/]")
    print_rows(count_changed_verdicts(both).to_dict("records") or [{"": "none"}])
    for filtered, keeps, drops in ((a, "A", "B"), (b, "B", "A")):
        shown = sample_documents(both, filtered, keeps, drops, most).to_dict("records")
        if shown:
            console.print(f"\n[bold]sample documents that {keeps} keeps and {drops} drops[/]")
        for row in shown:
            verdicts = (
                f"{x}: {row[f'{x} tokens_per_char']:.4g} tokens per character, {row[f'{x} verdict']}" for x in "AB"
            )
            say(printable(f"{row['id']} ({row['source']})  {'; '.join(verdicts)}"))
            text = printable(" ".join(row["text"].split()))
            console.print(f"    {text}", markup=False, highlight=False, style="dim")
