"""`cram study` and `cram evaluate`: comparing recipes, and measuring a model's loss on another text."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from flows.cli.common import console, print_rows, recipe_names, say, shorten, study_names
from flows.cli.execution import Planned, execute, print_plan
from flows.cli.fields import Override, Settings
from flows.cli.server import find_server
from flows.summary import check_name
from model.errors import InputError

if TYPE_CHECKING:
    from tasks.compare import Member
    from tasks.store.artifacts import Artifact

LAST_STAGES = ("pretrain", "minimal_pairs", "report")  # with which the runs of a study may end


def study(
    name: Annotated[
        str | None, typer.Argument(help="Name of a study, or path of a .json file.", autocompletion=study_names)
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option(help="Recipe that the runs change. Default: the study's own.", autocompletion=recipe_names),
    ] = None,
    settings: Settings = None,
    override: Override = None,
    seeds: Annotated[int, typer.Option(min=1, help="Number of seeds of each run.")] = 1,
    scale: Annotated[
        str,
        typer.Option(help="A size (pocket, day, 'pocket x 0.5'), a budget ('3e6 tokens'), or both. Default: pocket."),
    ] = "",
    until: Annotated[
        str, typer.Option(help="pretrain: compare losses; minimal_pairs: scores on pairs too; report: all scores.")
    ] = "pretrain",
    listed: Annotated[
        bool, typer.Option("--list", help="Only list the runs of each study, and about how long it takes here.")
    ] = False,
    plan: Planned = False,
) -> None:
    """Run recipes that differ in one respect, and compare them on one page. Shared stages run once.

    Exit status 1: a run failed; the page says why, and has the others.
    """
    if until not in LAST_STAGES:
        raise InputError(f"--until is {until!r}; a study ends with {' or '.join(LAST_STAGES)}.")
    from flows.logs import log_to_terminal
    from flows.recipes.typed import changes_of

    log_to_terminal()
    changes = changes_of(override or [], settings or [], tables_only=True)
    if listed:
        names = [name] if name else study_names()
        list_studies(names, recipe, changes, seeds, scale, until)
        return
    if name is None:
        raise InputError(f"Name a study: {', '.join(study_names())}. `cram study --list` describes them.")
    asked = {"study": name, "recipe": recipe, "override": changes, "seeds": seeds, "scale": scale, "until": until}
    if plan:
        print_plan("study", **asked)
    from flows.recipes.deltas import DELTAS
    from flows.recipes.study_runs import resolve_study
    from flows.study import study as study_flow

    if recipe is not None:
        check_name("recipe", recipe, DELTAS)
    _, runs = resolve_study(name, recipe, changes, seeds, scale, until)
    impossible = sum(run.recipe is None for run in runs)  # at this scale or with these changes, as the log says
    server = find_server()
    page = execute(study_flow, server, **asked)
    print_page(page)
    if page.stats["failed"] > impossible:
        raise typer.Exit(1)


def print_page(page: "Artifact") -> None:
    """Print the table of a study, and where its page is."""
    say("")
    print_rows(page.stats["table"])
    console.print(f"\nFull page: {shorten(page.path / 'study.html')}", soft_wrap=True, highlight=False)


def list_studies(names: list[str], recipe: str | None, override: dict, seeds: int, scale: str, until: str) -> None:
    """Print the runs of each study, and about how long their pretraining takes on this machine."""
    from flows.recipes.study_runs import resolve_study
    from flows.study import estimate, usual_rate

    rate = usual_rate()
    for name in names:
        try:
            about, runs = resolve_study(name, recipe, override, seeds, scale, until)
        except InputError as problem:
            if len(names) == 1:
                raise
            console.print(f"[bold]{escape(name)}[/]  not possible: {escape(str(problem))}\n", soft_wrap=True)
            continue
        size = f", scale {about.scale}" if about.scale else ""
        title = f"[bold]{escape(name)}[/]  {estimate(runs, rate)} of pretraining here; recipe {about.recipe}{size}"
        console.print(title, soft_wrap=True, highlight=False)
        source = f"({about.paper})" if about.paper else ""
        description = [part for part in (about.about, source) if part]
        if description:
            say(f"  {' '.join(description)}")
        print_members([run.member for run in runs if run.member.seed == 0])


def print_members(members: "list[Member]") -> None:
    """Print the names of a study's runs, and why some are not possible."""
    possible = [" = ".join([one.run, *one.also]) for one in members if not one.problem]
    say(f"  Runs: {'; '.join(possible)}")
    for one in members:
        if one.problem:
            say(f"  Not possible: {one.run}: {one.problem}")
    say("")


def evaluate(
    model: Annotated[
        str, typer.Argument(help="Pretrained model: pretrain/KEY, a key, `latest`, a folder, or OWNER/NAME of the hub.")
    ],
    text: Annotated[
        str, typer.Argument(help="Text: STAGE/KEY (its held-out text, or a corpus), or a file or directory.")
    ],
    characters: Annotated[
        int, typer.Option(min=1, help="Of a longer text, measure a fixed sample of about this many characters.")
    ] = 1_000_000,
) -> None:
    """Measure the loss of a pretrained model on a text, in nats per word, character and byte.

    Choose text that the model was not trained on, such as tokenize/KEY; cram doesn't check that.
    """
    from model.layouts import HEADS
    from tasks.adopt import find_model
    from tasks.evaluate import Evaluate
    from tasks.evaluate import evaluate as stage
    from tasks.reports.losses import nats

    params = Evaluate(characters=characters)
    losses = stage.fn(params, find_model(model, heads=HEADS), find_text(text), [])
    print_rows(losses.stats["table"])
    documents = losses.stats["documents"]
    say(f"\n{documents:,} documents with {losses.stats['characters']:,} characters were measured.")
    units = ("word", "character", "byte")
    print_rows([{"nats per": unit, "value ± error over documents": nats(losses.stats, unit)} for unit in units])
    console.print(f"\nevaluate: [bold]{shorten(losses.path)}[/]", soft_wrap=True, highlight=False)


def find_text(name: str) -> "Artifact":
    """The artifact with the text that an argument names; the download stage reads files into one."""
    from flows.recipes.recipe import STAGES
    from tasks.download import Download, download
    from tasks.store.artifacts import find

    stage, _, key = name.partition("/")
    if stage in STAGES and not Path(name).exists():
        return find(stage, key or "latest")
    params = Download(source="files", files=[name], documents=0)
    params.check()
    return download.fn(params)
