"""The files of labelled data, by split: those of GLUE, and those of your own tasks.

GLUE's come from the hub (nyu-mll/glue at a fixed commit, in the cache of `load_dataset` too) or from a folder with
the same columns (Parquet or TSV); those of your own tasks from wherever `datasets` finds them, and from CoNLL files.
"""

import functools
import logging
import re
from collections.abc import Iterable
from pathlib import Path

from model.errors import InputError
from tasks.corpus import hub, streams
from tasks.corpus.kinds import ending
from tasks.glue import probes
from tasks.glue.own import Definition
from tasks.glue.table import GLUE, HUB_GLUE, TASKS, evaluation_splits, training_splits
from tasks.store.manifests import known_digest

VERSION = 4  # raise it when the same files give other tables: it enters the keys of the runs of your own tasks
CONLL = (  # endings of files with a token and its tag on each line
    ".conll", ".conllu", ".conllx", ".conll03", ".gold_conll", ".v4_gold_conll", ".iob", ".iob2", ".bio", ".bioes",
    ".txt",
)  # fmt: skip
SPLITS = {"train": "train", "validation": "validation|valid|val|dev", "test": "test|eval"}  # words in files' names
HUB_SECONDS = 10  # to wait for an answer of the hub
Files = dict[str, list[Path]]  # by split
log = logging.getLogger(__name__)


def identity(task: Definition) -> dict:
    """What identifies the data in a key, wherever it is: digests or a revision; and how a task of your own is read."""
    if task.data == "probes":
        return {"probes": probes.VERSION}
    fields = {"text", "pair", "label", "kind", "metric", "validation", "encoding"}
    about = {"own": VERSION} | task.model_dump(include=fields, exclude_defaults=True)
    repository = task.repository()
    if repository:
        place = {"repository": repository, "revision": hub.commit(task.source())}
        return place if task.named else about | place | {"config": task.config}
    files, features = splits_of(task)
    if task.named:
        return {split: [known_digest(path) for path in paths] for split, paths in files.items()}
    about["splits"] = {split: [known_digest(path) + path.suffix for path in paths] for split, paths in files.items()}
    if features:
        about["features"] = features
    return about


def splits_of(task: Definition) -> tuple[Files, dict]:
    """The files of each split, fetched if they are on the hub; and the features that the data set declares, if any.

    Raises InputError for a folder or data set without files that can be read.
    """
    if task.named:
        return find_splits(task.data, task.name), {}
    path = Path(task.data).expanduser()
    repository = task.repository()
    if repository:
        return files_of_dataset(task, repository, hub.commit(task.source()))
    if not path.is_dir():
        return {"train": [path]}, {}
    conll = [file for file in sorted(path.iterdir()) if ending(file.name) in CONLL[:-1]]
    if conll:  # which `datasets` doesn't know
        return by_split(conll), {}
    return files_of_dataset(task, str(path), None)


def by_split(paths: list[Path]) -> Files:
    """The files of each split, by the words in their names; without the splits that have none."""
    files = {}
    for split, words in SPLITS.items():
        name = re.compile(rf"(?<![a-z])({words})(?![a-z])")
        found = [path for path in paths if name.search(path.stem.lower())]
        if found:
            files[split] = found
    return files


def files_of_dataset(task: Definition, place: str, commit: str | None) -> tuple[Files, dict]:
    """The files of each split that `datasets` finds in a folder, or in a data set of the hub at a `commit`.

    Fetches those of the hub. Also returns the declared features, if any.
    """
    from datasets import load_dataset_builder

    try:
        builder = load_dataset_builder(place, task.config or None, revision=commit)
    except Exception as problem:  # of `datasets`, of the hub's client, of httpx and of sockets
        error = streams.Split(task.data, task.config, "", task.revision).refusal(problem, task.source().instead)
        raise type(error)(f"{task.name}: {error}") from problem
    start = f"hf://datasets/{place}@{commit}/"
    files: Files = {}
    for split, names in (builder.config.data_files or {}).items():
        paths = files[str(split)] = []
        for name in names:
            if commit is None:
                paths.append(Path(name))
            else:
                paths.append(fetch(task.source(), str(name).removeprefix(start)))
    features = builder.info.features
    return files, features.to_dict() if features else {}


# The hub


@functools.cache
def hub_problem(source: hub.Source) -> str:
    """Why the hub can't be reached, or an empty string: one quick request, where its client would retry for 30 s."""
    from huggingface_hub import HfApi

    try:
        HfApi().dataset_info(source.repository, revision=source.revision or None, timeout=HUB_SECONDS)
    except Exception as problem:  # the hub's client raises its own, httpx's and the socket's errors
        return str(hub.error(source.repository, problem, source.instead))
    return ""


# Not load_dataset(repository, task): without a network it takes the revision that it prepared last, whichever it is.
@functools.cache  # asked once before the model is trained, and not again by the runs a day later
def fetch(source: hub.Source, name: str) -> Path:
    """A file from the cache of the hub's client, or from the hub."""
    from huggingface_hub import hf_hub_download

    path = hub.find_cached(source, name)
    if path:
        return path
    problem = hub_problem(source)
    if problem:
        raise InputError(problem)
    try:
        hf_hub_download(source.repository, name, repo_type="dataset", revision=hub.commit(source), force_download=True)
    except Exception as error:  # the hub's client raises its own, httpx's and the socket's errors
        raise InputError(f"{name}: {hub.error(source.repository, error, source.instead)}") from error
    path = hub.find_cached(source, name)
    if not path:
        raise InputError(
            f"{name} of {source.repository} arrived damaged. Check HF_ENDPOINT and any proxy, and run again."
        )
    return path


# GLUE's files


def split_files(data: str, task: str, split: str) -> list[Path]:
    """The files of one split: fetched from the hub; or in a local folder one file, Parquet shards, or none.

    Raises InputError for a split that is there twice.
    """
    if data == HUB_GLUE.repository:
        return [fetch(HUB_GLUE, f"{task}/{split}-00000-of-00001.parquet")]
    folder = Path(data).expanduser() / task
    whole = [folder / f"{split}{suffix}" for suffix in (".parquet", ".tsv")]
    own = [path for path in whole if path.is_file()]
    shards = sorted(path for path in folder.glob(f"{split}-*.parquet") if path.is_file())
    if len(own) + bool(shards) > 1:
        found = " and ".join(path.name for path in (*own, *shards[:1]))
        raise InputError(
            f"{folder} has {found}. Expected {split} once, as one file or as Parquet shards; remove the others."
        )
    return own or shards


def absence_of(data: str, what: str) -> InputError:
    """The error for a folder without files of GLUE."""
    folder = Path(data).expanduser()
    present = []
    if folder.is_dir():
        present = sorted(path.name for path in folder.iterdir() if path.is_dir())
    return InputError(
        f"{folder} has no {what} (.parquet, -*.parquet or .tsv; folders there: {', '.join(present) or 'none'}). "
        f"Expected the data of {HUB_GLUE.repository}; correct finetune.data (or decontaminate.data), or remove tasks "
        "from finetune.tasks."
    )


def find_splits(data: str, task: str) -> Files:
    """The files of each split of a task, fetched if they are on the hub. Raises InputError if a split is missing."""
    files = {}
    for split in training_splits(task):
        files[split] = split_files(data, task, split)
    for split, paths in files.items():
        if not paths:
            raise absence_of(data, f"{task}/{split}")
    return files


@functools.cache  # the answer enters a key, so it must stay the same throughout a run
def hub_evaluation() -> dict[tuple[str, str], list[Path]]:
    """All validation and test splits from the hub; with only some of them the next run would have another key.

    Empty, with a warning, if one is not available. If the hub can't be reached at all, the stages that need it say so.
    """
    try:
        splits = [(task, split) for task in (*GLUE, "wnli") for split in evaluation_splits(task)]
        return {one: split_files(HUB_GLUE.repository, *one) for one in splits}
    except InputError as error:
        if not hub_problem(HUB_GLUE):
            log.warning("%s Decontamination is skipped: it takes all validation and test splits, or none.", error)
        return {}


def evaluation_files(data: str, tasks: Iterable[str]) -> dict[str, Files]:
    """The available files of the validation and test splits of GLUE tasks, by task and split.

    From the hub: all or none. From a folder: those in it, where test splits and whole tasks may be missing.
    Raises InputError for a folder that has none.
    """
    on_hub = data == HUB_GLUE.repository
    files: dict[str, Files] = {}
    for task in TASKS:
        if task not in tasks:
            continue
        for split in evaluation_splits(task):
            paths = hub_evaluation().get((task, split)) if on_hub else split_files(data, task, split)
            if paths:
                files.setdefault(task, {})[split] = paths
    if not files and not on_hub:
        raise absence_of(data, f"<task>/validation or <task>/test of {', '.join(tasks)}")
    return files
