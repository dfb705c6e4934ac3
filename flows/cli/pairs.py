"""`cram pairs`: how often a pretrained model prefers the good sentence of two."""

from typing import Annotated, Literal

import typer
from pydantic import ValidationError

from flows.cli.common import console, print_rows, say, shorten
from model.errors import InputError
from model.wording import counted

EXAMPLE = "nyu-mll/blimp"
COLUMNS = ("good", "bad", "group", "field")


def pairs(
    model: Annotated[
        str, typer.Argument(help="Pretrained model: pretrain/KEY, a key, `latest`, a folder, or OWNER/NAME of the hub.")
    ],
    data: Annotated[
        str,
        typer.Argument(
            help="File or folder with minimal pairs, or a data set of the hub, OWNER/NAME or OWNER/NAME/FOLDER."
        ),
    ] = EXAMPLE,
    per_group: Annotated[int, typer.Option(min=0, help="Pairs of each group, drawn at random. 0: all.")] = 0,
    before: Annotated[
        Literal["trained", "cls", "sep"], typer.Option(help="Special token before a sentence (minimal_pairs.before).")
    ] = "trained",
    good: Annotated[str, typer.Option(help="Column of the good sentence.")] = "",
    bad: Annotated[str, typer.Option(help="Column of the bad sentence.")] = "",
    group: Annotated[str, typer.Option(help="Column of the group.")] = "",
    field: Annotated[str, typer.Option(help="Column of the field that a group belongs to.")] = "",
    encoding: Annotated[str, typer.Option(help="Of files that aren't UTF-8, such as windows-1252.")] = "",
) -> None:
    """Measure without finetuning how often a model gives the good sentence of a minimal pair the higher probability."""
    from flows.logs import log_to_terminal
    from model.layouts import HEADS
    from tasks.adopt import find_model
    from tasks.minimal_pairs import PairsRun, minimal_pairs

    log_to_terminal()
    columns = dict(zip(COLUMNS, (good, bad, group, field), strict=True))
    try:
        params = PairsRun(data=data, per_group=per_group, before=before, encoding=encoding, **columns)
    except ValidationError as error:  # typer has checked all the others
        reason = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise InputError(f"--encoding: {reason}.") from error
    try:
        scored = minimal_pairs.fn(params, find_model(model, heads=HEADS))
    except InputError as error:
        raise type(error)(with_options(str(error))) from error
    stats = scored.stats
    print_rows(stats["table"])
    say("Accuracy in percent, the mean over groups ± its standard error over pairs. Guessing scores 50.")
    if stats["ties"]["original"]:
        say(f"{counted(stats['ties']['original'], 'pair')} tied by the original score, which counts half.")
    say(f"Each sentence stood between [{stats['before'].upper()}] and [SEP].")
    console.print(f"\nminimal_pairs: [bold]{shorten(scored.path)}[/]", soft_wrap=True, highlight=False)


def with_options(problem: str) -> str:
    """A problem with this command's options in place of the fields of a recipe."""
    from tasks.glue.pairs import FIELDS

    for option in (*COLUMNS, "encoding"):
        problem = problem.replace(f"minimal_pairs.{option}", f"--{option}")
    return problem.replace(FIELDS, "DATA").replace("minimal_pairs.data", "DATA")
