"""`cram study` and `cram evaluate`: recipes compared with each other, and a model's loss on another text."""

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from flows.cli.common import console, print_rows, recipe_names, say, shorten, study_names
from flows.cli.execution import Planned, execute, print_plan
from flows.cli.run import parse_overrides
from flows.cli.server import find_server
from flows.summary import check_name
from model.errors import InputError

LASTS = ("pretrain", "report")


def study(
    name: Annotated[
        str | None, typer.Argument(help="Name of a study, or path of a .json file.", autocompletion=study_names)
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option(help="Recipe that the runs change. Default: the study's own.", autocompletion=recipe_names),
    ] = None,
    override: Annotated[
        list[str] | None,
        typer.Option(metavar="JSON", help="Recipe fields to change in all runs. May be repeated; later values win."),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Number of seeds of each run.")] = 1,
    scale: Annotated[
        str,
        typer.Option(help="A size (pocket, day, 'pocket x 0.5'), a budget ('3e6 tokens'), or both. Default: pocket."),
    ] = "",
    until: Annotated[str, typer.Option(help="pretrain: compare losses; report: scores too.")] = "pretrain",
    listed: Annotated[
        bool, typer.Option("--list", help="Only say what each study holds, and about how long it takes here.")
    ] = False,
    plan: Planned = False,
) -> None:
    """Run recipes that differ in one respect, and compare them on one page. Shared stages run once."""
    changes = parse_overrides(override or [])
    if until not in LASTS:
        raise InputError(f"--until is {until!r}; a study ends with {' or '.join(LASTS)}.")
    if listed:
        list_studies([name] if name else study_names(), recipe, changes, seeds, scale, until)
        return
    if name is None:
        raise InputError(f"Give the name of a study: {', '.join(study_names())}. `cram study --list` describes them.")
    asked = {"study": name, "recipe": recipe, "override": changes, "seeds": seeds, "scale": scale, "until": until}
    if plan:
        print_plan("study", **asked)
    from flows.recipes.deltas import DELTAS
    from flows.study import study as study_flow

    if recipe is not None:
        check_name("recipe", recipe, DELTAS)
    server = find_server()
    page = execute(study_flow, server, **asked)
    say("")
    print_rows(page.stats["table"])
    console.print(f"\nFull page: {shorten(page.path / 'study.html')}", soft_wrap=True, highlight=False)


def list_studies(names: list[str], recipe: str | None, override: dict, seeds: int, scale: str, until: str) -> None:
    """Print what each study holds, how many runs, and about how long their pretraining takes on this machine."""
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
        if said := " ".join(filter(None, (about.about, f"({about.paper})" if about.paper else ""))):
            say(f"  {said}")
        members = [run.member for run in runs if run.member.seed == 0]
        say(f"  Runs: {'; '.join(' = '.join([one.run, *one.also]) for one in members if not one.problem)}")
        for one in members:
            if one.problem:
                say(f"  Not possible: {one.run}: {one.problem}")
        say("")


def evaluate(
    model: Annotated[str, typer.Argument(help="Pretrained model: pretrain/KEY, a key, `latest`, or a folder.")],
    text: Annotated[
        str, typer.Argument(help="Text: STAGE/KEY (its held-out text, or a corpus), or a file or directory.")
    ],
    characters: Annotated[
        int, typer.Option(min=1, help="Of a longer text, measure a fixed sample of about so many characters.")
    ] = 1_000_000,
) -> None:
    """Measure the loss of a pretrained model on a text, in nats per word, character and byte.

    Give text that the model was not trained on, such as tokenize/KEY; this is not checked.
    """
    from tasks.adopt import find_model
    from tasks.evaluate import Evaluate
    from tasks.evaluate import evaluate as measure
    from tasks.reports.losses import nats

    found = measure.fn(Evaluate(characters=characters), find_model(model, masked=True), text_called(text), [])
    print_rows(found.stats["table"])
    measured, given = found.stats["documents"], found.stats["characters"]
    say(f"\n{measured:,} documents with {given:,} characters were measured.")
    units = ("word", "character", "byte")
    print_rows([{"nats per": unit, "value ± error over documents": nats(found.stats, unit)} for unit in units])
    console.print(f"\nevaluate: [bold]{shorten(found.path)}[/]", soft_wrap=True, highlight=False)


def text_called(name: str):
    """The artifact with the text that an argument names; files are read by the download stage."""
    from flows.recipes.recipe import STAGES
    from tasks.download import Download, download
    from tasks.store.artifacts import find

    stage, _, key = name.partition("/")
    if stage in STAGES and not Path(name).exists():
        return find(stage, key or "latest")
    params = Download(source="files", files=[name], documents=0)
    params.check()
    return download.fn(params)
