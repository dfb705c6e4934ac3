"""`cram gc`, `cram pin`, `cram verify` and `cram lineage`: what the store keeps, and whether it is intact."""

from collections import Counter
from typing import TYPE_CHECKING, Annotated

import typer
from rich.filesize import decimal
from rich.markup import escape
from rich.text import Text
from rich.tree import Tree

from flows.cli.artifacts import MOST_ROWS, total
from flows.cli.common import all_stage_names, console, find_artifact, print_listing, say, stage_names
from flows.summary import counts, relative
from model.wording import age, brief_duration, counted, printable
from tasks.store.home import STATE

if TYPE_CHECKING:
    from flows.cli.old_runs import OldRuns
    from tasks.store.artifacts import Artifact
    from tasks.store.gc import Garbage
    from tasks.store.verify import Damage

MODELS_SHOWN = 8  # of the models that stay


# What `cram gc` keeps and frees


def gc(
    yes: Annotated[bool, typer.Option("--yes", help="Discard them. Without it, they are only listed.")] = False,
    keep: Annotated[int, typer.Option(min=0, metavar="N", help="Keep the newest N reports and N studies.")] = 5,
    hollow: Annotated[
        bool, typer.Option("--hollow", help="Also drop text and sequences of artifacts that stay.")
    ] = False,
    models: Annotated[bool, typer.Option("--models", help="Also discard other models, and drafts of models.")] = False,
    older: Annotated[
        str | None,
        typer.Option("--runs-older-than", metavar="AGE", help="Also clear runs in Prefect's database: 12h, 30d, 8w."),
    ] = None,
) -> None:
    """Show which artifacts are no longer needed; with --yes, discard them.

    These artifacts stay, each with everything that it was made from:
    - the newest N reports and the newest N studies
    - artifacts that were made or pulled since the newest of these
    - pinned artifacts (`cram pin`), and those that running commands need

    Other pretrained models stay without their text, and so do drafts of models; --models discards both.
    Other drafts are discarded if they are older than the newest report or study.
    With --keep 0, only models, pinned artifacts and those that running commands need stay.

    --hollow also drops the parts, measures and sequences of an artifact, if another that stays was made from it.
    Its statistics, tables and pictures remain. Pinned artifacts and models keep all their files.
    A hollow artifact still counts as cached. If a stage has to read the dropped data, it is first rebuilt.

    --runs-older-than asks the Prefect server for runs that ended that long ago. No artifact depends on them.
    """
    from flows.cli import old_runs
    from tasks.store.gc import collect, sizes, survey

    runs = None
    if older is not None:
        runs = old_runs.OldRuns(old_runs.moment(older), old_runs.server_with_runs())
    if yes:
        found, freed = collect(keep, hollow, models)
    else:
        found = survey(keep, hollow, models)
        freed = sizes(found.paths())
        print_going(found)
    print_freed(found, freed)
    print_kept(found)
    print_other_models(found, discarded=yes, models=models)
    number = print_runs(runs, yes)
    if not yes and (found.goes or found.hollow or found.drafts or number):
        say("Nothing was deleted. Run the same command with --yes to delete what is listed.")


def print_going(found: "Garbage") -> None:
    """List the artifacts and drafts to discard."""
    rows = []
    for name, about in found.goes.items():
        rows.append((name, age(about["finished"]), total(about), counts(about["stats"])))
    for draft in found.drafts:
        rows.append((f"draft {draft.name}", age(draft.written), decimal(draft.bytes), "unfinished"))
    if not rows:
        return
    shown = rows[-MOST_ROWS:]
    print_listing(("to discard", "age", "size", "result"), shown)
    say(f"… and {len(rows) - len(shown):,} older ones\n" if len(rows) > len(shown) else "")


def print_freed(found: "Garbage", freed: dict[str, int]) -> None:
    """Print, by stage, how many artifacts are discarded or become hollow, and the bytes that this frees."""
    gone = Counter(name.partition("/")[0] for name in found.goes)
    gone["drafts"] = len(found.drafts)
    emptied = Counter(name.partition("/")[0] for name in found.hollow)
    rows = []
    for stage in dict.fromkeys([*all_stage_names(), *freed]):
        if gone[stage] or emptied[stage]:
            rows.append((stage, f"{gone[stage]:,}", f"{emptied[stage]:,}", decimal(freed[stage])))
    if not rows:
        say("There is nothing to free.")
        return
    rows.append(("all", f"{gone.total():,}", f"{emptied.total():,}", decimal(sum(freed.values()))))
    print_listing(("stage", "discarded", "made hollow", "bytes freed"), rows)
    say("Files that an artifact shares with one that stays free nothing.\n")


def print_kept(found: "Garbage") -> None:
    """Print how much stays, and why."""
    from tasks.store import home
    from tasks.store.gc import OTHER_MODELS

    numbers = {why: f"{why} {len(names):,}" for why, names in found.kept.items() if names}
    models = numbers.pop(OTHER_MODELS, "")
    sources = found.stays.keys() - set().union(*found.kept.values())
    origin = f"{len(sources):,} that these were made from" if numbers and sources else ""
    reasons = "; ".join(filter(None, (", ".join(numbers.values()), origin, models)))
    why = f" ({reasons})" if reasons else ""
    say(f"Kept in {relative(home.root())}: {counted(len(found.stays), 'artifact')}, {decimal(found.left())}{why}.")


def print_other_models(found: "Garbage", discarded: bool, models: bool) -> None:
    """Print the models that no report and no study needs, which `models` discards."""
    names = [f"{name} ({brief_duration(about.get('seconds', 0))})" for name, about in found.models.items()]
    if not names:
        return
    shown = names if models else names[-MODELS_SHOWN:]
    if not models:
        what = "Models kept without what they were made from (--models discards them)"
    else:
        what = "Models discarded" if discarded else "Models to discard"
    more = f" and {len(names) - len(shown):,} older ones" if len(shown) < len(names) else ""
    say(f"{what}: {', '.join(shown)}{more}.")


def print_runs(runs: "OldRuns | None", yes: bool) -> int:
    """Print the size of Prefect's database, and the old runs if they are asked for; with `yes`, clear these.

    Returns the number of old runs.
    """
    from flows.cli.old_runs import database_bytes

    number = 0
    if runs:
        number = runs.report()
        if number and yes:
            runs.clear(number)
    size = database_bytes()
    if size:
        advice = "" if runs else "; --runs-older-than 30d lists old runs in it"
        say(f"Prefect's database in {relative(STATE)}: {decimal(size)}{advice}.")
    return number


# Pins


def pin(
    key: Annotated[
        str | None, typer.Argument(metavar="KEY", help="Artifact: STAGE/KEY or KEY, which may be shortened.")
    ] = None,
    remove: Annotated[bool, typer.Option("--remove", help="Remove the pin.")] = False,
) -> None:
    """Protect an artifact, and what it was made from, from `cram gc`; without KEY, list the pins.

    `cram gc --hollow` keeps all files of the artifact itself, but not of what it was made from.
    """
    from tasks.store import gc

    if key is None:
        print_pins()
    elif remove:
        say(f"{gc.unpin(key)} is no longer pinned.")
    else:
        artifact = find_artifact(key)
        gc.pin(artifact)
        console.print(f"Pinned: [bold]{escape(printable(artifact.name))}[/]", highlight=False)


def print_pins() -> None:
    """List the pinned artifacts."""
    from tasks.store import gc
    from tasks.store.artifacts import artifact_named, read_manifest

    rows = []
    for name in gc.read_pins():
        about = read_manifest(artifact_named(name))
        if about:
            rows.append((name, age(about["finished"]), counts(about["stats"])))
        else:
            rows.append((name, "", "not a complete artifact"))
    if rows:
        print_listing(("pinned", "age", "result"), rows)
    else:
        say("Nothing is pinned. `cram pin STAGE/KEY` makes `cram gc` keep an artifact.")


# Verifying, and lineage

NAMES = "STAGE/KEY, STAGE, KEY, or the start of a key"


def whole_store() -> "list[Artifact]":
    """All artifacts of the store, also damaged ones, by stage; the newest of a stage is the last."""
    from tasks.store.artifacts import inspect_all

    artifacts: list[Artifact] = []
    for stage in all_stage_names():
        artifacts.extend(inspect_all(stage))
    return artifacts


def verify(
    artifact: Annotated[
        str | None,
        typer.Argument(metavar="STAGE/KEY", help=f"{NAMES}. Default: all artifacts.", autocompletion=stage_names),
    ] = None,
) -> None:
    """Compare files with their digests; list damage, and which artifacts will be rebuilt. Exit status 1: damage."""
    from tasks.store.artifacts import load_manifest
    from tasks.store.verify import find_damage

    every = whole_store()
    chosen = every if artifact is None else choose(artifact, every)
    damages, busy = find_damage(chosen)
    for damage in damages:
        say(printable(f"{damage.artifact.name}: {damage.file} {damage.problem}"))
    manifests = {one.name: load_manifest(one) for one in every}
    print_verified([manifests[one.name] for one in chosen if one.name not in busy], len(damages))
    for name in busy:
        say(f"{name} was left out, since a run is making it.")
    if damages:
        say("\n" + "\n".join(consequences(damages, manifests)))
        raise typer.Exit(1)


def choose(name: str, every: "list[Artifact]") -> "list[Artifact]":
    """The artifacts whose names begin with this stage or STAGE/KEY, or else the one with this key."""
    start = name if "/" in name else f"{name}/"
    matching = [artifact for artifact in every if artifact.name.startswith(start)]
    return matching or [find_artifact(name, damaged=True)]


def print_verified(manifests: list[dict], damaged: int) -> None:
    """Print how many files were compared, and how many of them are damaged."""
    from tasks.store import home
    from tasks.store.manifests import kept_files

    sizes = [file["bytes"] for about in manifests for file in kept_files(about)]
    what = f"{counted(len(sizes), 'file')} of {counted(len(manifests), 'artifact')} in {home.root()}"
    verdict = f"{counted(damaged, 'file')} damaged" if damaged else "intact"
    say(printable(f"{what}, {decimal(sum(sizes))}: {verdict}."))
    hollow = sum(1 for about in manifests if about.get("hollow"))
    if hollow:
        say(f"{counted(hollow, 'artifact')} hollow; only their remaining files were compared.")


def consequences(damages: "list[Damage]", manifests: dict[str, dict]) -> list[str]:
    """What follows from damage, in sentences."""
    from tasks.store.artifacts import read_manifest
    from tasks.store.verify import reruns

    broken = {}
    for damage in damages:
        if not damage.stray and not damage.is_for_readers:
            broken[damage.artifact.name] = damage.artifact
    rebuilt: dict[str, list[str]] = {}  # names, by when that happens
    for name, reason in reruns(broken, manifests).items():
        if not reason and read_manifest(broken[name]) is not None:
            reason = f"after you delete {relative(broken[name].path)}; until then, a run that reads it stops"
        rebuilt.setdefault(reason or "by the next run that reaches it", []).append(name)
    sentences = [printable(f"Rebuilt {when}: {', '.join(names)}") for when, names in rebuilt.items()]
    if any(damage.is_for_readers for damage in damages):
        sentences.append("No stage reads cards (README.md) and pictures, so nothing is rebuilt for them.")
    if any(damage.stray for damage in damages):
        sentences.append("No stage reads files that are not in stage.json; delete them.")
    sentences.append("Nothing else is rebuilt, not even artifacts made from the damaged ones.")
    return sentences


def lineage(
    artifact: Annotated[
        str, typer.Argument(metavar="KEY", help=f"{NAMES}; of a stage, the newest.", autocompletion=stage_names)
    ],
    as_mermaid: Annotated[bool, typer.Option("--mermaid", help="Print a flowchart in Mermaid's language.")] = False,
) -> None:
    """Print what an artifact was made from, and what was made from it, as a tree."""
    from tasks.reports.trees import grow, mermaid
    from tasks.store.lineage import backwards, histories, origins

    name = find_artifact(artifact, damaged=True).name
    every = whole_store()
    manifests = histories(every)
    artifacts = {one.name: one for one in every}

    def label(name: str) -> str:
        return f"{name}  {facts(manifests.get(name, {}), artifacts.get(name))}".rstrip()

    made_from = origins(manifests)
    tree = Tree(Text(printable(label(name)), style="bold"))
    related = {name}
    for title, links in (("made from", made_from), ("used for", backwards(made_from))):
        if links.get(name):
            seen: set[str] = set()
            grow(tree.add(title), links[name], links, seen, label)
            related |= seen
    if as_mermaid:
        arrows = {one: [other for other in made_from[one] if other in related] for one in made_from if one in related}
        say(mermaid(arrows))
    else:
        console.print(tree)


def facts(about: dict, artifact: "Artifact | None") -> str:
    """The main result of an artifact, its age, and whether it lacks something."""
    from tasks.store.artifacts import read_manifest

    if artifact is None:
        state = "not in this store"
    elif read_manifest(artifact) is None:
        state = "damaged"
    else:
        state = "hollow" if about.get("hollow") else ""
    result = counts(about.get("stats", {}))
    since = age(about.get("finished", ""))
    return ", ".join(fact for fact in (result, since, state) if fact)
