"""`cram ls`, `cram show` and `cram diff`: the artifacts of the store, and how two of them differ."""

import json
import re
from collections import Counter
from collections.abc import Collection
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.filesize import decimal
from rich.markup import escape

from flows.cli.common import (
    all_stage_names,
    check_stages,
    console,
    find_artifact,
    print_listing,
    print_rows,
    say,
    shorten,
    stage_names,
)
from flows.summary import counts, flat, relative
from model.clock import about_stops
from model.wording import age, brief_duration, counted, printable
from tasks.store.manifests import kept_files

if TYPE_CHECKING:  # importing the store imports Prefect
    from tasks.store.artifacts import Artifact

DIGEST = re.compile(r"\b[0-9a-f]{64}\b")  # SHA-256
MOST_ROWS = 40  # by name in statistics and their table; a folder of letters can have as many sources


def ls(
    stage: Annotated[
        str | None, typer.Argument(help="List only this stage's artifacts.", autocompletion=stage_names)
    ] = None,
) -> None:
    """List artifacts with their age, size, run time, main result and differing parameters; then unfinished drafts.

    Below them are the bytes on disk of each stage and of all. A file of several artifacts counts for the first of them.
    """
    check_stages([stage] if stage else [], others=True)
    from tasks.store import home
    from tasks.store.artifacts import describe_incomplete, inspect_all
    from tasks.store.gc import files_of, read_pins, sizes

    listing = Listing(read_pins())
    files: dict[str, list] = {}  # by stage
    damaged = []
    for name in [stage] if stage else all_stage_names():
        manifests = {}
        for artifact, (about, problem) in inspect_all(name).items():
            if about is None:
                damaged.append(describe_incomplete(artifact, problem))
            else:
                manifests[artifact.name] = about
                files.setdefault(name, []).extend(files_of(artifact, about))
        listing.add(manifests)
    if listing.rows:
        print_listing(("artifact", "age", "size", "time", "result"), listing.rows, listing.details)
        numbers = Counter(name.partition("/")[0] for name, *_ in listing.rows)
        print_bytes(sizes(files, whole=True), numbers)
    elif not damaged:
        what = f"artifacts of {stage}" if stage else "artifacts"
        until = f" --until {stage}" if stage else ""
        say(f"No {what} in {home.root()} yet. Make some: cram run demo{until}")
    print_drafts(stage)
    for sentence in damaged:
        say(sentence)


class Listing:
    """The rows of `cram ls`, and what to print below each of them."""

    def __init__(self, pins: Collection[str]):
        self.pins = pins
        self.rows: list[tuple[str, ...]] = []
        self.details: list[str] = []

    def add(self, manifests: dict[str, dict]) -> None:
        """Add the artifacts of a stage, with the params and inputs in which they differ."""
        for name, about in manifests.items():
            facts = [counts(about["stats"]).removesuffix(" kept")]  # to fit into 80 columns
            if "hollow" in about:
                facts.append("hollow")
            if name in self.pins:
                facts.append("pinned")
            result = ", ".join(fact for fact in facts if fact)
            self.rows.append((name, age(about["finished"]), total(about), brief_duration(about["seconds"]), result))
        self.details += differences(list(manifests.values()))


def print_drafts(stage: str | None) -> None:
    """List the unfinished drafts, of one stage or of all."""
    from tasks.store import home
    from tasks.store.locks import drafts

    left = drafts(stage or "")
    if not left:
        return
    say(f"\nUnfinished drafts in {relative(home.root() / '.partial')}; delete a directory there to discard it:")
    rows = []
    for draft in left:
        state = "in progress" if draft.running else ""
        rows.append((draft.name, age(draft.written), decimal(draft.bytes), state))
    print_listing(("draft", "age", "size", "state"), rows)


def print_bytes(by_stage: dict[str, int], numbers: Counter) -> None:
    """Print the bytes on disk and the number of artifacts of each stage, and of all."""
    rows = [(name, f"{numbers[name]:,}", decimal(size)) for name, size in by_stage.items()]
    if len(rows) > 1:
        rows.append(("all", f"{numbers.total():,}", decimal(sum(by_stage.values()))))
    say("")
    print_listing(("stage", "artifacts", "on disk"), rows)


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
    found = find_artifact(artifact)
    about = found.manifest
    console.print(f"[bold]{escape(printable(found.name))}[/]  {shorten(found.path)}", soft_wrap=True)
    print_facts(about)
    for title in ("params", "inputs"):
        console.print(f"\n[bold]{title}[/]")
        for name, value in flat(about[title]).items():
            say(printable(f"  {name}: {value}"))
    stats = dict(about["stats"])
    rows = stats.pop("table", [])
    row_names = {str(next(iter(row.values()))) for row in rows}
    shown = abridge(stats, row_names)
    console.print("\n[bold]stats[/]")
    say(json.dumps(shown, indent=2))
    print_rows(rows[:MOST_ROWS])
    if len(rows) > MOST_ROWS:
        say(f"… and {counted(len(rows) - MOST_ROWS, 'row')} more")
    if shown != stats:
        console.print(f"\nAll statistics: {shorten(found.path)}/stats.json", soft_wrap=True, highlight=False)


def print_facts(about: dict) -> None:
    """Print the main result of an artifact, when and how it was made, and whether something is missing."""
    when = about["finished"]
    facts = [
        counts(about["stats"]),
        f"finished {when} ({age(when)} ago)",
        brief_duration(about["seconds"]),
        total(about),
        f"commit {about['environment'].get('commit', 'unknown')}",
    ]
    say(", ".join(fact for fact in facts if fact))
    stops = about_stops(about["stats"])
    if stops:
        say(stops)
    dropped = about.get("hollow", ())
    if dropped:
        size = decimal(sum(file["bytes"] for file in about["files"] if file["path"] in dropped))
        say(
            f"hollow: {counted(len(dropped), 'file')} with {size} were dropped; they are rebuilt when a stage needs "
            "them"
        )


def abridge(value: Any, rows: set[str]) -> Any:
    """Statistics without the numbers that the table shows by row, except those of the row `all`.

    Of many names, only the first are left.
    """
    if not isinstance(value, dict):
        return value
    shown = {}
    for name, inner in list(value.items())[:MOST_ROWS]:
        is_in_table = isinstance(inner, dict) and inner and set(inner) <= rows
        if not is_in_table:
            shown[name] = abridge(inner, rows)
        elif "all" in inner and name != "by_source":
            shown[name] = {"all": inner["all"]}
    left = len(value) - MOST_ROWS
    if left > 0:
        shown["…"] = f"{left:,} more"
    return shown


def brief(value: str) -> str:
    """A value, shortened to fit into a list."""
    return value if len(value) <= 24 else f"{value[:20]}…"


def differences(manifests: list[dict]) -> list[str]:
    """For each artifact of a stage, the params and inputs in which they differ, without digests of files."""
    every = []
    for manifest in manifests:
        inputs = flat(manifest["inputs"])
        every.append(flat(manifest["params"]) | {f"from {name}": value for name, value in inputs.items()})
    names = dict.fromkeys(name for values in every for name in values)
    differing = [name for name in names if len({values.get(name) for values in every}) > 1]
    texts = []
    for values in every:
        shown = [name for name in differing if name in values and not DIGEST.search(values[name])]
        own = [f"{name}={brief(values[name])}" for name in shown]
        texts.append(printable(", ".join(own)))
    return texts


def diff(
    stage: Annotated[str, typer.Argument(help="Stage to compare.", autocompletion=stage_names)],
    a: Annotated[str, typer.Argument(metavar="A", help="First artifact: a key, the start of one, or `latest`.")],
    b: Annotated[str, typer.Argument(metavar="B", help="Second artifact.")],
    samples: Annotated[
        int, typer.Option(min=0, max=1000, help="Documents to print per kind of change (stage filter only).")
    ] = 5,
) -> None:
    """Compare two artifacts of a stage: reports by scores, filters by documents, minimal pairs pair by pair."""
    check_stages([stage], others=True)
    from tasks.store.artifacts import find

    pair = (find(stage, a), find(stage, b))
    for side, artifact in zip("AB", pair, strict=True):
        finished = escape(printable(artifact.manifest["finished"]))
        console.print(f"{side}: [bold]{escape(printable(artifact.name))}[/]  finished {finished}", highlight=False)
    if stage == "report":
        print_reports(*pair)
        return
    first, second = (artifact.manifest for artifact in pair)
    names = ("version", "params", "inputs")
    print_differing("parameters and inputs", pick(first, names), pick(second, names))
    hollow = [artifact.name for artifact in pair if "hollow" in artifact.manifest]
    if stage == "filter" and not hollow:
        print_filters(*pair, samples)
        return
    if stage == "minimal_pairs":
        print_pairs(*pair)
        return
    if stage == "filter":
        say(f"\nThe documents of {' and '.join(hollow)} aren't in this store (hollow), so only counts are compared.")
    print_differing("statistics", without_table(first["stats"]), without_table(second["stats"]))


def pick(about: dict, names: Collection[str]) -> dict:
    """Some fields of a manifest; None for those that it lacks."""
    return {name: about.get(name) for name in names}


def without_table(stats: dict) -> dict:
    """Statistics without the table, which repeats them."""
    return {name: value for name, value in stats.items() if name != "table"}


def print_differing(what: str, a: dict, b: dict) -> None:
    """Print the fields whose values differ."""
    console.print(f"\n[bold]differing {what}[/]")
    of_a = flat(a)
    of_b = flat(b)
    rows = []
    for name in {**of_a, **of_b}:
        if of_a.get(name) != of_b.get(name):
            rows.append({"": name, "A": brief(of_a.get(name, "-")), "B": brief(of_b.get(name, "-"))})
    print_rows(rows or [{"": "none"}])


def print_reports(a: "Artifact", b: "Artifact") -> None:
    """Print in which parameters and scores two reports differ."""
    from tasks.store.manifests import verify

    contents = []
    params = []
    for artifact in (a, b):
        verify(artifact)
        about = json.loads((artifact.path / "report.json").read_text(encoding="utf-8"))
        contents.append(about)
        params.append(about["params"] | {"finetune": about["finetuning"]})
    print_differing("parameters", *params)
    print_scores(*contents)


def print_scores(a: dict, b: dict) -> None:
    """Print the scores of two reports. `a`, `b`: their report.json."""
    from tasks.reports.diff import compare_scores, have_other_vocabularies

    console.print("\n[bold]scores[/]")
    print_rows(compare_scores(a, b))
    say("In brackets: 95 % intervals over examples; after ±: standard errors over documents. Differences smaller than")
    say("these can be real, since both models were measured on the same examples.")
    if have_other_vocabularies(a, b):
        say("The vocabularies differ, so a loss is better only if it is also below the other's lower bound, which")
        say("leaves out the part of the loss that is for the numbers of pieces.")


def print_pairs(a: "Artifact", b: "Artifact") -> None:
    """Print how the accuracies of two models on the same minimal pairs differ."""
    from tasks.reports.diff import compare_pairs

    console.print("\n[bold]accuracies[/]")
    print_rows(compare_pairs(a, b))
    say("± is the standard error of the difference over the pairs, which both models scored. It says nothing of seeds.")


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
            print_document(row)


def print_document(row: dict) -> None:
    """Print a document with what both filters measured and decided, and the beginning of its text."""
    verdicts = []
    for side in "AB":
        ratio = f"{row[f'{side} tokens_per_char']:.4g} tokens per character"
        verdicts.append(f"{side}: {ratio}, {row[f'{side} verdict']}")
    say(printable(f"{row['id']} ({row['source']})  {'; '.join(verdicts)}"))
    text = printable(" ".join(row["text"].split()))
    console.print(f"    {text}", markup=False, highlight=False, style="dim")
