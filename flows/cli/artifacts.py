"""`cram ls`, `cram show` and `cram diff`: the artifacts of the store, their origin, and how two of them differ."""

from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from flows.cli.arguments import check_stages, check_store, say_where_artifacts_go, stage_names
from flows.cli.tables import console, laid_out, print_listing, print_rows, print_scores, say, shorten
from flows.summary import age, brief_duration, counts, flat, relative, size
from model import InputError
from tasks.text.printable import printable

if TYPE_CHECKING:  # importing it imports Prefect, and `main` has to set that up first
    from tasks.store import Artifact

# The parts of a manifest that ls, show and diff read.
NEEDED = {"params": dict, "inputs": dict, "finished": str, "seconds": int | float, "environment": dict}


def ls(
    stage: Annotated[
        str | None, typer.Argument(help="List only this stage's artifacts.", autocompletion=stage_names)
    ] = None,
) -> None:
    """List artifacts with their age, size, run time, main result and differing parameters; then unfinished drafts."""
    check_stages([stage] if stage else [], others=True)
    check_store()
    from flows.recipes import OTHER_STAGES, STAGES
    from tasks.store import ROOT, artifacts, drafts

    damaged, rows, details = [], [], []
    for name in [stage] if stage else STAGES + OTHER_STAGES:
        manifests = []
        for artifact in artifacts(name, damaged=True):
            try:
                about = read_about(artifact)
            except InputError as error:
                damaged.append(str(error))
                continue
            manifests.append(about)
            took = brief_duration(about["seconds"])
            result = counts(about["stats"]).removesuffix(" kept")  # to fit into 80 columns
            rows.append((artifact.name, age(about["finished"]), total(about), took, result))
        details += differences(manifests)
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
    """An artifact's manifest. Raises InputError if a part of it, or a file, is missing."""
    from tasks.store import inspect

    about, problem = inspect(artifact)
    missing = [name for name, kind in NEEDED.items() if about and not isinstance(about.get(name), kind)]
    if problem or missing:
        problem = problem or f"its stage.json has no {missing[0]}"
        raise InputError(
            f"{artifact.name} is damaged: {problem}. Run the stage again, or copy the whole directory here."
        )
    return about


def total(manifest: dict) -> str:
    """The total size of an artifact's files."""
    return size(sum(file["bytes"] for file in manifest["files"]))


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
    check_stages([stage], others=True)
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
    shown = without_rows(stats, {str(next(iter(row.values()))) for row in rows}) if rows else stats
    console.print("\n[bold]stats[/]")
    say(laid_out(shown))
    (print_scores if stage == "report" else print_rows)(rows)
    if shown != stats:
        console.print(f"\nAll statistics: {shorten(found.path)}/stats.json", soft_wrap=True, highlight=False)


def without_rows(value: Any, rows: set[str]) -> Any:
    """Statistics without the numbers that the table shows by row; those of the row `all` stay."""
    if not isinstance(value, dict):
        return value
    shown = {}
    for name, inner in value.items():
        if not isinstance(inner, dict) or not set(inner) <= rows:
            shown[name] = without_rows(inner, rows)
        elif "all" in inner and name != "by_source":
            shown[name] = {"all": inner["all"]}
    return shown


def brief(value: str) -> str:
    """A value, shortened to fit into a list."""
    return value if len(value) <= 24 else f"{value[:20]}…"


def differences(manifests: list[dict]) -> list[str]:
    """For each artifact of a stage, the params and inputs that are not the same for all."""
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
    """Compare two artifacts of a stage. For filter, also list which documents only one of them keeps."""
    check_stages([stage], others=True)
    check_store()
    from tasks.store import find

    pair = [find(stage, a), find(stage, b)]
    if pair[0] == pair[1]:
        raise InputError(
            f"A and B are both {pair[0].name}; expected two different artifacts. `cram ls {stage}` lists them."
        )
    manifests = [read_about(artifact) for artifact in pair]
    for side, artifact, about in zip("AB", pair, manifests, strict=True):
        finished = escape(printable(about["finished"]))
        console.print(f"{side}: [bold]{escape(printable(artifact.name))}[/]  finished {finished}", highlight=False)
    made_with = [flat({name: about.get(name) for name in ("version", "params", "inputs")}) for about in manifests]
    console.print("\n[bold]differing parameters and inputs[/]")
    print_rows(differing(*made_with) or [{"": "none"}])
    if stage == "filter":
        print_filters(*pair, samples)
        return
    console.print("\n[bold]differing statistics[/]")
    stats = [flat({name: value for name, value in about["stats"].items() if name != "table"}) for about in manifests]
    if stage == "report":  # the tables of other stages repeat their statistics
        stats = [own | scores(about["stats"]["table"]) for own, about in zip(stats, manifests, strict=True)]
    print_rows(differing(*stats) or [{"": "none"}])
    if stage == "report":
        say(f"\nFor spread and cost: cram compare {a} {b}")


def scores(rows: list[dict]) -> dict[str, str]:
    """A report's scores by task and setting. Reports of older versions have neither protocols nor shares."""
    by_setting = {}
    for row in rows:
        setting = [row["task"], row["metric"], row.get("protocol", "cramming")]
        setting += [] if row["pretrained"] else ["no pretraining"]
        setting += [] if row.get("share", 1) == 1 else [f"{100 * row['share']:g} % of the data"]
        by_setting[", ".join(setting)] = str(row["score"])
    return by_setting


def differing(a: dict[str, str], b: dict[str, str]) -> list[dict]:
    """Table rows of the names whose values differ."""
    names = [name for name in {**a, **b} if a.get(name) != b.get(name)]
    return [{"": name, "A": brief(a.get(name, "-")), "B": brief(b.get(name, "-"))} for name in names]


def print_filters(a: "Artifact", b: "Artifact", samples: int) -> None:
    """Print how many documents two filters keep, and samples of those that only one of them keeps."""
    from tasks.reports.filter_diff import compare

    if a.manifest["inputs"]["corpus"] != b.manifest["inputs"]["corpus"]:
        console.print(
            "\nThe two filters read different inputs. Documents are matched by id and source, so some may exist in "
            "only one of the inputs."
        )
    compared = compare(a, b, samples)
    console.print("\n[bold]documents[/]")
    print_rows(compared["sources"])
    console.print("\n[bold]documents that only one of them keeps, by both verdicts[/]")
    print_rows(compared["changes"] or [{"": "none"}])
    for name, which in (("dropped", "that A keeps and B drops"), ("added", "that B keeps and A drops")):
        if compared[name]:
            console.print(f"\n[bold]sample documents {which}[/]")
        for sample in compared[name]:
            verdicts = "; ".join(
                f"{x}: {sample[f'{x} tokens_per_char']} tokens per character, {sample[f'{x} verdict']}" for x in "AB"
            )
            say(printable(f"{sample['id']} ({sample['source']})  {verdicts}"))
            text = printable(" ".join(sample["text"].split()))
            console.print(f"    {text}", markup=False, highlight=False, style="dim")
