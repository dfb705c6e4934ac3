"""What artifacts were made from, first to last: from their manifests here, at a remote, or in a model's own files."""

import json
import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress

from tasks.store.artifacts import LINEAGE, Artifact, artifact_named, load_manifest, read_manifest
from tasks.store.manifests import inputs_of, validate

Links = Mapping[str, list[str]]  # from an artifact to others, by name
log = logging.getLogger(__name__)


def origins(manifests: Mapping[str, dict]) -> dict[str, list[str]]:
    """From each artifact to those that it was made from."""
    return {name: inputs_of(about) for name, about in manifests.items()}


def backwards(links: Links) -> Links:
    """The same links from what was read to what was made."""
    found: dict[str, list[str]] = {}
    for made, given in links.items():
        for name in given:
            found.setdefault(name, []).append(made)
    return found


def ancestry(names: Iterable[str], read: Callable[[str], dict | None], missing: str = "") -> dict[str, dict]:
    """The manifests of these artifacts, and of all that they were made from, first to last, as `read` returns them.

    Those that it doesn't know are left out. `missing`: a warning of that.
    """
    found: dict[str, dict] = {}

    def visit(name: str) -> None:
        if name in found:
            return
        found[name] = {}  # so that it ends if one names itself
        about = read(name) or {}
        for each in inputs_of(about):
            visit(each)
        found[name] = found.pop(name) or about  # after its inputs
        if missing and not about:
            log.warning(missing, name)

    for name in names:
        visit(name)
    return {name: about for name, about in found.items() if about}


def lineage(artifact: Artifact) -> dict[str, dict]:
    """The manifests of the artifact and of all its inputs, first to last; those not on this machine are left out."""
    missing = "%s is not on this machine, so it will be missing from the report."
    found = ancestry([artifact.name], lambda name: read_manifest(artifact_named(name)), missing)
    return {name: without_files(about) for name, about in found.items()}


def without_files(manifest: dict) -> dict:
    """A manifest without its list of files."""
    return {name: value for name, value in manifest.items() if name not in ("files", "hollow")}


def ancestors(artifact: Artifact, read: Callable[[Artifact], dict | None]) -> list[tuple[Artifact, dict]]:
    """An artifact and all that it was made from, first to last, with their manifests."""
    found = ancestry([artifact.name], lambda name: read(artifact_named(name)), "%s is not there, so it is left out.")
    return [(artifact_named(name), about) for name, about in found.items()]


def lineage_of(model: Artifact) -> dict[str, dict]:
    """The manifests of all that led to a model, and its own, from its files: its inputs need not be on this machine."""
    before = json.loads((model.path / LINEAGE).read_text(encoding="utf-8"))
    own = {name: value for name, value in model.manifest.items() if name != "files"}
    return before | {model.name: own}


def histories(artifacts: list[Artifact]) -> dict[str, dict]:
    """The manifests of these artifacts, and of those that led to them, by name; empty for damaged ones.

    Models carry the manifests of what led to them, so that these are known where only the model was copied.
    """
    manifests = {artifact.name: load_manifest(artifact) for artifact in artifacts}
    given = {name for inputs in origins(manifests).values() for name in inputs}
    if given <= set(manifests):
        return manifests
    for artifact in artifacts:
        for path in artifact.path.glob(f"*{LINEAGE}"):
            with suppress(OSError, ValueError, TypeError, AttributeError, RecursionError):
                before = json.loads(path.read_text(encoding="utf-8"))
                earlier = {name: validate({"files": []} | about) for name, about in before.items()}
                manifests = earlier | manifests
    return manifests
