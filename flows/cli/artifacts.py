"""`cram ls`, `cram show` and `cram diff`: what the store has, what led to it, and what two artifacts differ in."""

from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from flows.cli.arguments import check_stages, check_store, say_where_artifacts_go, stage_names
from flows.cli.tables import console, laid_out, print_listing, print_rows, print_scores, say, shorten
from flows.summary import age, brief_duration, counts, flat, relative, size
from model import InputError
from tasks.text.printable import printable

if TYPE_CHECKING:  # importing it imports Prefect, whose settings `main` makes first
    from tasks.store import Artifact

# What ls, show and diff read of a manifest.
NEEDED = {"params": dict, "inputs": dict, "finished": str, "seconds": int | float, "environment": dict}


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


def total(manifest: dict) -> str:
    """The size of an artifact's files."""
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
