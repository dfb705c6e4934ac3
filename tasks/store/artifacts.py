"""The artifact store: artifacts/<stage>/<key>/, complete directories that a stage wrote and nobody changes again.

The directory is the only record of a result: Prefect keeps none of its own, so nothing in a copied artifact is ever
executed, and deleting the directory makes the stage run again.
"""

import hashlib
import json
import logging
import os
import re
from contextlib import suppress
from pathlib import Path
from stat import S_ISREG

from model.errors import InputError
from model.files import KEPT
from tasks.store import home, opening
from tasks.store.manifests import MANIFEST, decisive_files, parse

# files that several stages read: the tokens, and the manifests of all inputs of a model
SEQUENCES = "sequences.npy"
HELDOUT_TEXT = "heldout.parquet"
FREQUENCIES = "frequencies.npy"
LINEAGE = "lineage.json"
STATS = "stats.json"
# suffixes of files that describe the run, such as its date or speed, and not the result
TELLING = (".md", ".html", ".svg", ".png", STATS, LINEAGE, "metrics.parquet")
KEY = re.compile(r"[0-9a-f]*")  # or its beginning, which no stage is called
LATEST = "latest"  # in a stage's directory: the link to its newest artifact
WORK = "work"  # in a draft: what a rerun resumes from; never published
log = logging.getLogger(__name__)


class Artifact:
    """A directory that a stage wrote: complete, and never changed again. It is not one of Prefect's artifacts.

    A plain class, and not a model of pydantic: Prefect links task runs by the identity of their results and of the
    fields of these, and artifacts of one stage share its name.
    """

    def __init__(self, stage: str, key: str) -> None:
        self.stage = stage
        self.key = key

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Artifact) and self.name == other.name

    def __hash__(self) -> int:
        return hash(self.name)

    def __repr__(self) -> str:
        return f"Artifact({self.name})"

    @property
    def path(self) -> Path:
        """The directory."""
        return home.root() / self.stage / self.key

    @property
    def name(self) -> str:
        """Its stage and key, as in `filter/0123456789ab`."""
        return f"{self.stage}/{self.key}"

    @property
    def manifest(self) -> dict:
        """The contents of stage.json. Raises InputError if the artifact is absent or incomplete."""
        manifest, problem = inspect(self)
        if manifest is None:
            raise InputError(describe_incomplete(self, problem))
        return manifest

    @property
    def stats(self) -> dict:
        """What the stage counted."""
        return self.manifest["stats"]

    frame = opening.frame
    dataset = opening.dataset
    model = opening.model


def artifact_named(name: str) -> Artifact:
    """The artifact of this name, which need not exist."""
    stage, _, key = name.partition("/")
    return Artifact(stage=stage, key=key)


def describe_incomplete(artifact: Artifact, problem: str) -> str:
    """The sentence about an artifact that `inspect` finds incomplete."""
    return f"No complete artifact {artifact.name} in {home.root()}: {problem}. Run the stage again, or copy it here."


def inspect(artifact: Artifact) -> tuple[dict | None, str]:
    """The manifest of a complete artifact and an empty string; or None and what is missing.

    A hollow artifact counts as complete: the data of the files in `hollow` was dropped, all else is there. So does one
    whose card or pictures were changed.
    """
    manifest = load_manifest(artifact)
    if not manifest:
        return None, f"its {MANIFEST} is missing or can't be read"
    folder = artifact.path
    for file in decisive_files(manifest):
        if size_of(os.path.join(folder, file["path"])) != file["bytes"]:
            return None, f"{file['path']} is missing, or its size is not the {file['bytes']:,} bytes in {MANIFEST}"
    return manifest, ""


def load_manifest(artifact: Artifact) -> dict:
    """The contents of stage.json, also of an artifact with damaged files; empty if it can't be read."""
    with suppress(OSError, ValueError):
        return parse((artifact.path / MANIFEST).read_bytes())
    return {}


def size_of(path: str) -> int:
    """The bytes of a file; -1 if there is none."""
    with suppress(OSError, ValueError):
        about = os.stat(path)
        return about.st_size if S_ISREG(about.st_mode) else -1
    return -1


def warn_of_damage(artifact: Artifact) -> None:
    """Log a warning if the artifact is there, but not complete."""
    manifest, problem = inspect(artifact)
    if manifest is None and artifact.path.exists():
        log.warning("%s is damaged, so its stage runs again: %s.", artifact.name, problem)


def read_manifest(artifact: Artifact) -> dict | None:
    """The manifest of a complete artifact; None if it is absent or a file does not have its recorded size."""
    return inspect(artifact)[0]


def is_hollow(artifact: Artifact) -> bool:
    """Whether `cram gc --hollow` dropped its data. It counts as made until a stage needs the data."""
    manifest = read_manifest(artifact) or {}
    return bool(manifest.get("hollow"))


def input_artifacts(inputs: dict) -> list[Artifact]:
    """A stage's input artifacts, each once; an argument can be a list of them."""
    found: list[Artifact] = []
    for given in inputs.values():
        found.extend(given if isinstance(given, list) else [given])
    return list(dict.fromkeys(found))


def digests_of_contents(inputs: dict) -> dict[str, str]:
    """Digests of the contents of a stage's inputs, by name: only of those that can differ when they are rebuilt.

    These vary themselves, or were made from others that do, as the report of finetuning runs.
    """
    digests = {}
    for artifact in input_artifacts(inputs):
        manifest = read_manifest(artifact) or {}
        if manifest.get("varies") or manifest.get("made_from"):
            files = json.dumps(sorted(result_files(manifest)))
            digests[artifact.name] = hashlib.sha256(files.encode()).hexdigest()
    return digests


def result_files(manifest: dict) -> set[tuple[str, str]]:
    """The files that hold an artifact's result, with their digests."""
    found = set()
    for file in manifest["files"]:
        path = file["path"]
        if not path.endswith(TELLING) and not path.startswith(tuple(f"{kind}/" for kind in KEPT)):
            found.add((path, file["sha256"]))
    return found


def is_made(artifact: Artifact, inputs: dict, refill: bool = False) -> bool:
    """Whether the artifact is complete and was made from the present contents of these inputs.

    `refill`: whether one that is hollow counts as incomplete.
    """
    manifest = read_manifest(artifact)
    if manifest is None or manifest.get("made_from") != digests_of_contents(inputs):
        return False
    return not (refill and manifest.get("hollow"))


def artifacts_of(stage: str) -> list[Artifact]:
    """The complete artifacts of a stage, or of all (empty), the newest last."""
    return [artifact for artifact, (manifest, _) in inspect_all(stage).items() if manifest]


def inspect_all(stage: str) -> dict[Artifact, tuple[dict | None, str]]:
    """What `inspect` finds of each artifact of a stage, or of all (empty): first of damaged ones; the newest last."""
    paths = (home.root() / stage).glob("[!.]*") if stage else home.root().glob("[!.]*/[!.]*")
    found = {}
    for path in paths:
        if path.is_symlink() or not path.is_dir() or path.name == LATEST:  # a directory of that name comes of `cp -L`
            continue
        artifact = Artifact(stage=path.parent.name, key=path.name)
        found[artifact] = inspect(artifact)

    def age(entry: tuple[Artifact, tuple[dict | None, str]]) -> tuple[str, str]:
        artifact, (manifest, _) = entry
        finished = manifest.get("finished", "") if manifest else ""
        return str(finished), artifact.key

    return dict(sorted(found.items(), key=age))


def find(stage: str, name: str = LATEST, damaged: bool = False) -> Artifact:
    """The artifact named by `latest`, a key, or the beginning of one, of one stage or of all (empty).

    Raises InputError if there is not exactly one. `damaged`: find those too.
    """
    known = list(inspect_all(stage)) if damaged else artifacts_of(stage)
    of_stage = f" of {stage}" if stage else ""
    if not known:
        until = f" --until {stage}" if stage else ""
        raise InputError(
            f"There are no artifacts{of_stage} in {home.root()} yet. Make one with `cram run RECIPE{until}`, copy one "
            "there, or set CRAM_ARTIFACTS to a directory that has some."
        )
    if name == LATEST:  # from the manifests: the link may not have been copied with the directory
        return known[-1]
    matches = [artifact for artifact in known if name and artifact.key.startswith(name)]
    exact = [artifact for artifact in matches if artifact.key == name]
    matches = exact or matches
    if len(matches) == 1:
        return matches[0]
    shown = (matches or known)[-8:]
    names = ", ".join(artifact.key if stage else artifact.name for artifact in shown)
    if matches:
        problem = f"{len(matches)} artifacts{of_stage} begin with {name!r}"
    else:
        problem = f"No complete artifact{of_stage} is named {name!r}"
    raise InputError(f"{problem}. Those in {home.root()}: {names}. Name one of these, or `latest`.")


def find_by_name(name: str, damaged: bool = False) -> Artifact:
    """The artifact STAGE/KEY, STAGE (the newest), or KEY of any stage; a prefix of a key is enough.

    Raises InputError as `find` does.
    """
    if KEY.fullmatch(name):
        return find("", name, damaged)
    stage, slash, key = name.partition("/")
    return find(stage, key if slash else LATEST, damaged)


def draft_of(artifact: Artifact) -> Path:
    """The directory in which the artifact is made. Its name is stable, so that a rerun finds what a crash left."""
    return home.root() / ".partial" / f"{artifact.stage}-{artifact.key}"
