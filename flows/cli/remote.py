"""`cram push-artifact` and `cram pull`: artifacts between machines that share no disk."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

import typer
from rich.filesize import decimal

from flows.cli.common import check_stages, find_artifact, say, stage_names
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
        metavar="URL", envvar="CRAM_REMOTE", help="Remote: s3://BUCKET/FOLDER, a folder, or any URL that fsspec opens."
    ),
]
All = Annotated[bool, typer.Option("--all", help="Also copy the data of the artifacts that it was made from.")]


def push_artifact(artifact: Name, url: Url = "", everything: All = False) -> None:
    """Copy an artifact to a folder, S3 or another remote, for `cram pull` on another machine.

    Of the artifacts that it was made from, only manifests and statistics are copied; --all adds their data.
    """
    from tasks.store.remote import Remote

    print_copied(Remote(url).push(find_artifact(artifact), everything), "send", "sent")


def pull(artifact: Name, url: Url = "", everything: All = False) -> None:
    """Copy an artifact that `cram push-artifact` put on a remote into this store.

    Of the artifacts that it was made from, only manifests and statistics are copied; --all adds their data.
    """
    check_stages([artifact.partition("/")[0]], others=True)
    from tasks.store.remote import Remote

    pulled = print_copied(Remote(url).pull(artifact, everything), "fetch", "fetched")[-1]
    if pulled.stage in stage_names()[:-1]:  # the last stage has none after it
        say(f"`--use {pulled.stage}={pulled.key}` takes it. `latest` is what was made last, here or elsewhere.")


def print_copied(copied: Iterable[tuple["Artifact", list[dict]]], verb: str, done: str) -> list["Artifact"]:
    """Print a line for each artifact with the number and size of its files that were copied. Returns the artifacts."""
    from flows.logs import log_to_terminal

    log_to_terminal()
    artifacts = []
    for artifact, files in copied:
        artifacts.append(artifact)
        size = decimal(sum(file["bytes"] for file in files))
        what = f"{counted(len(files), 'file')} {done}, {size}" if files else f"nothing to {verb}"
        say(f"{artifact.name}: {what}")
    return artifacts
