"""`cram gc`, `cram pin`, `cram verify`, `cram lineage`: what the store keeps, and whether it is sound."""

from collections import Counter
from typing import TYPE_CHECKING, Annotated

import typer
from rich.filesize import decimal
from rich.markup import escape
from rich.text import Text
from rich.tree import Tree

from flows.cli.artifacts import MOST_ROWS, total
from flows.cli.common import called, console, print_listing, say, stage_names
from flows.summary import OTHER_STAGES, counts, relative
from model.wording import age, brief_duration, counted, printable
from tasks.store.home import STATE

if TYPE_CHECKING:
    from flows.cli.old_runs import OldRuns
    from tasks.store.artifacts import Artifact
    from tasks.store.gc import Garbage
    from tasks.store.verify import Damage

MODELS_SHOWN = 8  # of those that stay


# What `cram gc` keeps and frees


def gc(
    yes: Annotated[bool, typer.Option("--yes", help="Discard them. Default: only list them.")] = False,
    keep: Annotated[int, typer.Option(min=0, metavar="N", help="Keep the newest N reports and N studies.")] = 5,
    hollow: Annotated[bool, typer.Option("--hollow", help="Also drop text and sequences of what stays.")] = False,
    models: Annotated[bool, typer.Option("--models", help="Also discard other models, and drafts of models.")] = False,
    older: Annotated[
        str | None,
        typer.Option("--runs-older-than", metavar="AGE", help="Also clear runs in Prefect's database: 12h, 30d, 8w."),
    ] = None,
) -> None:
    """Show which artifacts are no longer needed; with --yes, discard them.

    These stay, each with everything that it was made from:
    - the newest N reports and the newest N studies
    - what was made since the newest of them
    - pinned artifacts (`cram pin`), and what running commands need

    Other pretrained models stay without their text, and drafts of models too; --models discards both.
    Other drafts go if they are older than the newest report or study.
    With --keep 0, only pinned artifacts, models and what running commands need stay.

    --hollow also drops parts, measures and sequences of what stays, if something else that stays was made from it.
    Statistics, tables and pictures remain. Pinned artifacts and models stay whole.
    A hollow artifact counts as made. If a stage has to read its data, that is made again first, from the source.

    --runs-older-than asks the Prefect server for runs that ended so long ago. Artifacts of cram don't depend on them.
    """
    from flows.cli import old_runs
    from tasks.store.gc import collect, sizes, survey

    runs = None if older is None else old_runs.OldRuns(old_runs.moment(older), old_runs.server_with_runs())
    if yes:
        found, freed = collect(keep, hollow, models)
    else:
        found = survey(keep, hollow, models)
        freed = sizes(found.paths())
        print_going(found)
    print_freed(found, freed)
    print_kept(found, discarded=yes, models=models)
    number = say_runs(runs, yes)
    if not yes and (found.goes or found.hollow or found.drafts or number):
        say("Nothing was deleted. The same command with --yes does it.")


def print_kept(found: "Garbage", discarded: bool, models: bool) -> None:
    """Print what stays and why, and the other models, which go if `models` is set."""
    from tasks.store import home

    reasons = [f"{why} {len(names):,}" for why, names in found.kept.items() if names]
    why = f" ({', '.join(reasons)}; the rest is what these were made from)" if reasons else ""
    say(f"Kept in {relative(home.root())}: {counted(len(found.stays), 'artifact')}, {decimal(found.left())}{why}.")
    if told := [f"{name} ({brief_duration(about.get('seconds', 0))})" for name, about in found.models.items()]:
        gone = "Models discarded" if discarded else "Models that go"
        what = gone if models else "Kept, without what they were made from; --models discards them"
        shown = told if models else told[-MODELS_SHOWN:]
        more = f" and {len(told) - len(shown):,} older ones" if len(shown) < len(told) else ""
        say(f"{what}: {', '.join(shown)}{more}.")


def say_runs(runs: "OldRuns | None", yes: bool) -> int:
    """Print what Prefect's database holds, and the number of old runs if they are asked for; with `yes`, clear them.

    Returns the number of old runs.
    """
    from flows.cli.old_runs import database_bytes

    number = runs.report() if runs else 0
    if number and yes:
        runs.clear(number)
    if size := database_bytes():
        advice = "" if runs else "; --runs-older-than 30d lists the old runs in it"
        say(f"Prefect's database in {relative(STATE)}: {decimal(size)}{advice}.")
    return number


def print_going(found: "Garbage") -> None:
    """List the artifacts and drafts that would go."""
    rows = [(name, age(about["finished"]), total(about), counts(about["stats"])) for name, about in found.goes.items()]
    rows += [(f"draft {one.name}", age(one.written), decimal(one.bytes), "unfinished") for one in found.drafts]
    if rows:
        shown = rows[-MOST_ROWS:]
        print_listing(("goes", "age", "size", "result"), shown, [""] * len(shown))
        say(f"… and {len(rows) - len(shown):,} older ones\n" if len(rows) > len(shown) else "")


def print_freed(found: "Garbage", freed: dict[str, int]) -> None:
    """Print, by stage, how many artifacts go or become hollow, and the bytes that this frees."""
    gone, emptied = (Counter(name.partition("/")[0] for name in names) for names in (found.goes, found.hollow))
    gone["drafts"] = len(found.drafts)
    stages = [stage for stage in (*stage_names(), *OTHER_STAGES, *freed) if gone[stage] or emptied[stage]]
    numbers = [(stage, gone[stage], emptied[stage], freed[stage]) for stage in dict.fromkeys(stages)]
    if not numbers:
        say("There is nothing to free.")
        return
    numbers.append(("all", gone.total(), emptied.total(), sum(freed.values())))
    rows = [(stage, f"{a:,}", f"{b:,}", decimal(size)) for stage, a, b, size in numbers]
    print_listing(("stage", "discarded", "made hollow", "bytes freed"), rows, [""] * len(rows))
    say("A file that is also in an artifact that stays frees nothing.\n")


# Pins


def pin(
    key: Annotated[
        str | None, typer.Argument(metavar="KEY", help="Artifact: STAGE/KEY or KEY, which may be shortened.")
    ] = None,
    remove: Annotated[bool, typer.Option("--remove", help="Remove the pin.")] = False,
) -> None:
    """Protect an artifact, and what it was made from, from `cram gc`; without KEY, list the pins.

    `cram gc --hollow` leaves the artifact itself whole, but not what it was made from.
    """
    from tasks.store import gc
    from tasks.store.artifacts import artifact_named, read_manifest

    if key is None:
        pins = {name: read_manifest(artifact_named(name)) for name in gc.read_pins()}
        rows = [
            (name, age(about["finished"]), counts(about["stats"])) if about else (name, "", "no complete artifact")
            for name, about in pins.items()
        ]
        if rows:
            print_listing(("pinned", "age", "result"), rows, [""] * len(rows))
        else:
            say("Nothing is pinned. `cram pin STAGE/KEY` has `cram gc` keep an artifact.")
    elif remove:
        say(f"{gc.unpin(key)} is pinned no longer.")
    else:
        gc.pin(found := called(key))
        console.print(f"Pinned: [bold]{escape(printable(found.name))}[/]", highlight=False)


# Verifying, and lineage

NAMES = "STAGE/KEY, STAGE, KEY, or the start of a key"


def everything() -> "list[Artifact]":
    """All artifacts of the store, also damaged ones, by stage; the newest of a stage is the last."""
    from tasks.store.artifacts import inspect_all

    return [artifact for stage in (*stage_names(), *OTHER_STAGES) for artifact in inspect_all(stage)]


def verify(
    artifact: Annotated[
        str | None,
        typer.Argument(metavar="STAGE/KEY", help=f"{NAMES}. Default: all artifacts.", autocompletion=stage_names),
    ] = None,
) -> None:
    """Compare files with their digests; list damage, and which artifacts are made again. Exit status 1: damage."""
    from tasks.store import home
    from tasks.store.artifacts import load_manifest
    from tasks.store.manifests import kept_files
    from tasks.store.verify import find_damage

    every = everything()
    chosen = every
    if artifact is not None:
        start = artifact if "/" in artifact else f"{artifact}/"
        chosen = [one for one in every if one.name.startswith(start)] or [called(artifact, damaged=True)]
    damages, busy = find_damage(chosen)
    for damage in damages:
        say(printable(f"{damage.artifact.name}: {damage.file} {damage.problem}"))
    manifests = {one.name: load_manifest(one) for one in every}
    abouts = [manifests[one.name] for one in chosen if one.name not in busy]
    files = [file for about in abouts for file in kept_files(about)]
    what = f"{counted(len(files), 'file')} of {counted(len(abouts), 'artifact')} in {home.root()}"
    found = f"{counted(len(damages), 'file')} damaged" if damages else "sound"
    say(printable(f"{what}, {decimal(sum(file['bytes'] for file in files))}: {found}."))
    if hollow := sum(bool(about.get("hollow")) for about in abouts):
        say(f"{counted(hollow, 'artifact')} hollow, of which only what was kept was compared.")
    for name in busy:
        say(f"{name} was left out, since a run is making it.")
    if damages:
        say("\n" + "\n".join(consequences(damages, manifests)))
        raise typer.Exit(1)


def consequences(damages: "list[Damage]", manifests: dict[str, dict]) -> list[str]:
    """What follows from damage, in sentences."""
    from tasks.store.artifacts import read_manifest
    from tasks.store.verify import reruns

    broken = {each.artifact.name: each.artifact for each in damages if not (each.stray or each.is_for_readers)}
    again: dict[str, list[str]] = {}  # names by reason
    for name, reason in reruns(broken, manifests).items():
        if not reason and read_manifest(broken[name]) is not None:
            reason = f"after you delete {relative(broken[name].path)}; until then, a run that reads it stops"
        again.setdefault(reason or "by the next run that reaches it", []).append(name)
    lines = [f"Made again {reason}: {', '.join(names)}" for reason, names in again.items()]
    if any(damage.is_for_readers for damage in damages):
        lines.append("No stage reads cards (README.md) and pictures, so nothing is made again for them.")
    if any(damage.stray for damage in damages):
        lines.append("Files that are not in stage.json are read by no stage; delete them.")
    return [*map(printable, lines), "Everything else stays, also what was made from these."]


def lineage(
    artifact: Annotated[
        str, typer.Argument(metavar="KEY", help=f"{NAMES}; of a stage, the newest.", autocompletion=stage_names)
    ],
    as_mermaid: Annotated[bool, typer.Option("--mermaid", help="Print a flowchart in Mermaid's language.")] = False,
) -> None:
    """Print what an artifact was made from, and what was made from it, as a tree."""
    from tasks.reports.trees import grow, mermaid
    from tasks.store.lineage import backwards, histories, origins

    name, every = called(artifact, damaged=True).name, everything()
    manifests = histories(every)
    given, here, near = origins(manifests), {one.name: one for one in every}, {name}

    def label(name: str) -> str:
        return f"{name}  {facts(manifests.get(name, {}), here.get(name))}".rstrip()

    tree = Tree(Text(printable(label(name)), style="bold"))
    for title, links in (("came from", given), ("what came of it", backwards(given))):
        if links.get(name):
            grow(tree.add(title), links[name], links, seen := set(), label)
            near |= seen
    if as_mermaid:
        say(mermaid({one: [other for other in given[one] if other in near] for one in given if one in near}))
    else:
        console.print(tree)


def facts(about: dict, artifact: "Artifact | None") -> str:
    """What an artifact counted, its age, and whether it lacks something."""
    from tasks.store.artifacts import read_manifest

    state = "hollow" if about.get("hollow") else ""
    if artifact is None or read_manifest(artifact) is None:
        state = "damaged" if artifact else "not in this store"
    return ", ".join(filter(None, [counts(about.get("stats", {})), age(about.get("finished", "")), state]))
