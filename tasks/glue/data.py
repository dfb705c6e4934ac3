"""GLUE's data: finding the files of a task's splits, which are then read as those of one's own tasks are.

They come from the hub (nyu-mll/glue at a fixed commit, in the cache that `load_dataset` uses too) or from a folder with
the same columns (Parquet or TSV). Probes are made from the held-out documents of a pretrained artifact.
"""

import functools
import logging
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from model import InputError
from tasks.corpus import hub, local
from tasks.glue import probes
from tasks.glue.own import Definition
from tasks.glue.own_data import Data, Piece, compared, piece_of, whole
from tasks.glue.tasks import GLUE, HUB_GLUE, TASKS, evaluation_splits, training_splits
from tasks.store import Artifact

HUB_SECONDS = 10  # to wait for an answer of the hub
log = logging.getLogger(__name__)


def read(data: str, task: str, pretrained: Artifact | None = None) -> Data:
    """Fetch, read and check a task's data. Probes are made from `pretrained`.

    Raises InputError for data that can't be trained on or scored.
    """
    if data == "probes":
        return compared(task, TASKS[task], probes.make(task, pretrained), [], {})
    files = find_splits(data, task)
    return whole(task, TASKS[task], [piece for split in files for piece in pieces_of(files[split], task, split)], [])


def pieces_of(paths: list[Path], task: str, split: str) -> Iterator[Piece]:
    """The files of a split, read. `split` "": without labels."""
    own = Definition.model_construct(name=task, kind=TASKS[task].kind)  # a task of the table is read as one's own
    return (piece_of(own, split, path, {}) for path in paths)


def sentences(paths: list[Path], task: str) -> Iterator[tuple[str, int, list[str]]]:
    """The sentences of a split, which decontamination looks for, by file: column, row of the first, texts.

    Raises InputError if a file lacks a column of the task, or if a column isn't text.
    """
    row = 0
    for piece in pieces_of(paths, task, ""):
        for name in TASKS[task].columns:
            yield name, row, piece.table[name].fillna("").tolist()
        row += len(piece.table)


def identity(data: str, task: str) -> dict:
    """What identifies the data in a key, wherever it lies: digests of local files, or the hub's revision."""
    if data == "probes":
        return {"probes": probes.VERSION}
    if data == HUB_GLUE.repository:
        return {"repository": HUB_GLUE.repository, "revision": HUB_GLUE.revision}
    return {split: [local.file_digest(path) for path in paths] for split, paths in find_splits(data, task).items()}


# Finding the files


def split_files(folder: Path, task: str, split: str) -> list[Path]:
    """The files of one split in a local GLUE folder: one file, Parquet shards, or none.

    Raises InputError for missing shards, for a split that is there twice, and for folders that can't be read.
    """
    try:
        own = [path for name in (f"{split}.parquet", f"{split}.tsv") if (path := folder / task / name).is_file()]
        shards = sorted(path for path in (folder / task).glob(f"{split}-*.parquet") if path.is_file())
    except OSError as error:
        raise local.unreadable(folder / task, error) from error
    if len(own) + bool(shards) > 1:
        raise InputError(
            f"{folder / task} has {' and '.join(path.name for path in (*own, *shards[:1]))}. "
            f"Expected {split} once, as one file or as Parquet shards; remove the others."
        )
    expected = {int(match[1]) for path in shards if (match := re.search(r"-of-(\d+)$", path.stem))}
    if expected and expected != {len(shards)}:
        raise InputError(
            f"{folder / task} has {len(shards)} of {max(expected)} shards of {split}, from {shards[0].name} to "
            f"{shards[-1].name}. Expected as many as their names say; get the missing ones, or remove others."
        )
    return own or shards


def find_splits(data: str, task: str) -> dict[str, list[Path]]:
    """The files of each split of a task, fetched if they are on the hub. Raises InputError if a split is missing."""
    splits, folder = training_splits(task), Path(data).expanduser()
    if data == HUB_GLUE.repository:
        return {split: [hub_file(task, split)] for split in splits}
    files = {split: split_files(folder, task, split) for split in splits}
    if missing := next((split for split, paths in files.items() if not paths), None):
        try:
            present = ", ".join(sorted(p.name for p in folder.iterdir() if p.is_dir())) if folder.is_dir() else ""
        except OSError as error:
            raise local.unreadable(folder, error) from error
        raise InputError(
            f"{folder} has no {task}/{missing}.parquet, {task}/{missing}-*.parquet or {task}/{missing}.tsv (folders "
            f"there: {present or 'none'}). Expected the data of {HUB_GLUE.repository}; correct finetune.data, "
            f"or leave {task} out of finetune.tasks."
        )
    return files


@functools.cache
def hub_problem() -> str:
    """Why the hub can't be reached, or an empty string: one quick request, where its client would retry for 30 s."""
    from huggingface_hub import HfApi

    try:
        HfApi().dataset_info(HUB_GLUE.repository, revision=HUB_GLUE.revision, timeout=HUB_SECONDS)
    except Exception as problem:  # the hub's client raises its own, httpx's and the socket's errors
        return str(hub.error(HUB_GLUE.repository, problem, HUB_GLUE.instead))
    return ""


# Not load_dataset(repository, task): without a network it takes the revision that it prepared last, whichever it is.
@functools.cache  # asked once before the model is trained, and not again by the runs a day later
def hub_file(task: str, split: str) -> Path:
    """A split's file from the cache of the hub's client, which names a file by its digest, or from the hub."""
    from huggingface_hub import hf_hub_download, try_to_load_from_cache

    name, about = f"{task}/{split}-00000-of-00001.parquet", {"repo_type": "dataset", "revision": HUB_GLUE.revision}
    for again in (False, True):
        known = try_to_load_from_cache(HUB_GLUE.repository, name, **about)
        if (again or not isinstance(known, str)) and (problem := hub_problem()):
            raise InputError(problem)
        try:
            path = Path(hf_hub_download(HUB_GLUE.repository, name, force_download=again, **about))
        except Exception as problem:  # the hub's client raises its own, httpx's and the socket's errors
            raise InputError(f"{name}: {hub.error(HUB_GLUE.repository, problem, HUB_GLUE.instead)}") from problem
        digest = path.resolve().name
        if not path.is_symlink() or hub.digest(path, digest) == digest:
            return path
        log.warning("%s does not have the hub's digest; it is downloaded again.", path)
    raise InputError(
        f"{name} of {HUB_GLUE.repository} arrived damaged. Check HF_ENDPOINT and any proxy, and run again."
    )


@functools.cache  # the answer enters a key, so it must stay the same throughout a run
def hub_evaluation() -> dict[tuple[str, str], list[Path]]:
    """All validation and test splits from the hub; with only some of them the next run would have another key.

    Empty, with a warning, if one is not available. If the hub can't be reached at all, the stages that need it say so.
    """
    try:
        return {(task, split): [hub_file(task, split)] for task in (*GLUE, "wnli") for split in evaluation_splits(task)}
    except InputError as error:
        if not hub_problem():
            log.warning("%s Decontamination is skipped: it takes all validation and test splits, or none.", error)
        return {}


def evaluation_files(data: str, tasks: Iterable[str]) -> dict[str, dict[str, list[Path]]]:
    """The available files of the validation and test splits of GLUE tasks, by task and split.

    From the hub: all or none. From a folder: those in it, where test splits and whole tasks may be missing.
    Raises InputError for a folder that has none.
    """
    folder, files = Path(data).expanduser(), {}
    for task in (name for name in TASKS if name in tasks):
        if data == HUB_GLUE.repository:
            splits = {split: hub_evaluation().get((task, split)) for split in evaluation_splits(task)}
        else:
            splits = {split: split_files(folder, task, split) for split in evaluation_splits(task)}
        if available := {split: paths for split, paths in splits.items() if paths}:
            files[task] = available
    if not files and data != HUB_GLUE.repository:
        raise InputError(
            f"{folder} {'has no' if folder.is_dir() else 'is no directory with'} <task>/validation.parquet or "
            f"<task>/test.parquet (or .tsv) of {', '.join(tasks)}. Expected the files of {HUB_GLUE.repository}; "
            "correct finetune.data (or decontaminate.data)."
        )
    return files
