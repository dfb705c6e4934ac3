"""The store as a whole: what is damaged, and what runs again because of it."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from tasks.store import home
from tasks.store.artifacts import WORK, Artifact, draft_of, load_manifest
from tasks.store.lineage import origins
from tasks.store.locks import is_locked, lock_for_reading
from tasks.store.manifests import FOR_READERS, MANIFEST, kept_files, problem_of
from tasks.workers.progress import Progress


class Damage(NamedTuple):
    """A file that is not as the manifest says. `stray`: the manifest doesn't list it, so that no stage reads it."""

    artifact: Artifact
    file: str
    problem: str
    stray: bool = False

    @property
    def is_for_readers(self) -> bool:
        """Whether it is a card or a picture of an artifact."""
        return not self.stray and FOR_READERS.fullmatch(self.file) is not None


def find_damage(artifacts: list[Artifact]) -> tuple[list[Damage], list[str]]:
    """The damaged files of these artifacts, and the names of those that a run is making, which are left out."""
    damages: list[Damage] = []
    busy = []
    size = sum(file["bytes"] for artifact in artifacts for file in kept_files(load_manifest(artifact)))
    with Progress("verify", size, "B") as bar:
        for artifact in artifacts:
            if is_locked(home.root() / ".locks" / draft_of(artifact).name):  # maybe for a day
                busy.append(artifact.name)
                continue
            with lock_for_reading(artifact):
                found = list(damage_of(artifact, bar))
            if artifact.path.exists():  # or it was deleted meanwhile
                damages += found
    return damages, busy


def damage_of(artifact: Artifact, bar: Progress) -> Iterator[Damage]:
    """The damaged files of an artifact."""
    about = load_manifest(artifact)
    if not about:
        yield Damage(artifact, MANIFEST, "is missing or can't be read")
        return
    for file in kept_files(about):
        bar.update(0, f"{artifact.name} {file['path']}")
        problem = problem_of(artifact.path / file["path"], file)
        if problem:
            yield Damage(artifact, file["path"], problem)
        bar.update(file["bytes"])
    yield from strays_of(artifact, about)


def strays_of(artifact: Artifact, about: dict) -> Iterator[Damage]:
    """The files in an artifact's directory that its manifest doesn't list."""
    listed = {file["path"] for file in about["files"]}
    left_by_kills = {WORK, f".{MANIFEST}"}  # nothing reads these
    known = {MANIFEST, *left_by_kills, *listed}
    for path in sorted(artifact.path.rglob("*")):
        name = path.relative_to(artifact.path)
        if not path.is_dir() and str(name) not in known and name.parts[0] not in known:
            yield Damage(artifact, str(name), f"is not in {MANIFEST}", stray=True)


def reruns(broken: Iterable[str], manifests: dict[str, dict]) -> dict[str, str]:
    """Why artifacts are rebuilt once the `broken` ones are, as the end of a sentence; empty for these.

    Hollow inputs come first. What was made from an artifact whose contents can differ, such as a model, follows.
    """
    reasons = dict.fromkeys(broken, "")
    inputs = origins(manifests)
    waiting = list(reasons)
    while waiting:
        name = waiting.pop(0)
        for given in inputs.get(name, []):
            if manifests.get(given, {}).get("hollow") and given not in reasons:
                reasons[given] = f"first, for {name}"
                waiting.append(given)
        for made, about in manifests.items():
            if name in about.get("made_from", ()) and made not in reasons:
                reasons[made] = f"if {name} comes out different"
                waiting.append(made)
    return reasons
