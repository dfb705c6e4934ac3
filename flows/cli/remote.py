"""`cram push-artifact` and `cram pull`: artifacts between machines that share no disk."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

import typer
from rich.filesize import decimal

from flows.cli.common import called, check_stages, say, stage_names
from model.wording import counted

if TYPE_CHECKING:  # importing the store imports Prefect
    from tasks.store.artifacts import Artifact

Name = Annotated[
    str,
    typer.Argument(
        metavar="STAGE[/KEY]", help="Artifact; without a key, the newest of the stage.", autocompletion=stage_names
    ),
]
Url = Annotated[
    str,
    typer.Argument(
        metavar="URL", envvar="CRAM_REMOTE", help="Remote: s3://BUCKET/FOLDER, a folder, or any URL of fsspec."
    ),
]
All = Annotated[bool, typer.Option("--all", help="Also move the data of what it was made from.")]


def push_artifact(artifact: Name, url: Url = "", everything: All = False) -> None:
    """Copy an artifact to a folder, S3 or another remote, for `cram pull` on another machine.

    Of what it was made from, only manifests and statistics are copied; --all adds the data.
    """
    from tasks.store.remote import Remote

    print_moved(Remote(url).push(called(artifact), everything), "send", "sent")


def pull(artifact: Name, url: Url = "", everything: All = False) -> None:
    """Copy an artifact from a remote into this store, as `cram push-artifact` put it there.

    Of what it was made from, only manifests and statistics are copied; --all adds the data.
    """
    check_stages([artifact.partition("/")[0]], others=True)
    from tasks.store.remote import Remote

    print_moved(Remote(url).pull(artifact, everything), "fetch", "fetched")


def print_moved(moved: Iterable[tuple["Artifact", list[dict]]], verb: str, done: str) -> None:
    """Print a line for each artifact with what was moved of it."""
    from flows.logs import log_to_terminal

    log_to_terminal()
    for artifact, files in moved:
        size = decimal(sum(file["bytes"] for file in files))
        say(f"{artifact.name}: " + (f"{counted(len(files), 'file')} {done}, {size}" if files else f"nothing to {verb}"))
