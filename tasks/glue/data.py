"""GLUE's data: finding the files of a task's splits, reading and checking them.

They come from the hub (nyu-mll/glue at a fixed commit) or from a folder with the same columns (Parquet or TSV); probes are
made of a pretrained artifact's held-out documents.
"""

import functools
import logging
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from model import InputError
from model.quantities import counted
from tasks.corpus import formats, hub
from tasks.glue import checks, probes
from tasks.glue.tasks import GLUE, HUB_GLUE, LABEL, TASKS, evaluation_splits, splits_of
from tasks.store import Artifact

HUB_SECONDS = 10  # for the hub to say that it is there
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Data:
    """A task's data, checked; and what is to be said of it."""

    tables: dict[str, pa.Table]  # by split, train first, then validation, then test; the task's texts and the label
    notes: list[str]
    left_out: dict[str, dict[str, int]]  # rows that are not in the tables, by split and reason
    shared: dict[str, int]  # by split, the training rows whose texts stand in it too (in either order, if SYMMETRIC)
    duplicates: int  # training rows whose texts stood in one before (likewise)


def read(data: str, task: str, test: bool = False, pretrained: Artifact | None = None) -> Data:
    """Fetch, read and check a task's data; the test splits too if asked for. `pretrained`: what probes are made of.

    Raises InputError for what can't be trained on or scored.
    """
    tables, notes, left_out = {}, [], {}
    if data == "probes" and test:
        raise InputError("Probes have no test data. Leave finetune.test false.")
    if data == "probes":
        tables = probes.make(task, pretrained)
    else:
        for split, paths in find_splits(data, task, test).items():
            tables[split], counts, told = read_split(paths, task, split)
            left_out |= {split: counts} if counts else {}
            notes += told
    duplicates, shared, told = checks.repeated(task, tables)
    return Data(tables, notes + told, left_out, shared, duplicates)


def identity(data: str, task: str, test: bool = False) -> dict:
    """What the data is, for a key: digests of local files, or the hub's revision, in place of where it is."""
    if data == "probes":
        return {"probes": probes.VERSION}
    if data == HUB_GLUE.repository:
        return {"repository": HUB_GLUE.repository, "revision": HUB_GLUE.revision}
    files = local_splits(Path(data).expanduser(), task, test)
    return {split: [formats.file_digest(path) for path in paths] for split, paths in files.items()}


# Where the files are


def find_splits(data: str, task: str, test: bool = False) -> dict[str, list[Path]]:
    """The files of each split of a task, brought from the hub if that is where they are."""
    if data == HUB_GLUE.repository:
        return hub_splits(task, test)
    return local_splits(Path(data).expanduser(), task, test)


def split_files(folder: Path, task: str, split: str) -> list[Path]:
    """The files of one split in a local GLUE folder: one, or Parquet shards. None where there are none.

    Raises InputError for shards that are not all there, where the split is there twice, and for what can't be looked into.
    """
    try:
        own = [path for name in (f"{split}.parquet", f"{split}.tsv") if (path := folder / task / name).is_file()]
        shards = sorted(path for path in (folder / task).glob(f"{split}-*.parquet") if path.is_file())
    except OSError as error:
        raise formats.unreadable(folder / task, error) from error
    if len(own) + bool(shards) > 1:
        raise InputError(
            f"{folder / task} has {' and '.join(path.name for path in (*own, *shards[:1]))}. Expected {split} once, as one "
            "file or in Parquet shards; take the others away."
        )
    told = {int(found[1]) for path in shards if (found := re.search(r"-of-(\d+)$", path.stem))}
    if told and told != {len(shards)}:
        raise InputError(
            f"{folder / task} has {len(shards)} of {max(told)} shards of {split}, from {shards[0].name} to {shards[-1].name}. "
            "Expected as many as their names say; get them all, and no others."
        )
    return own or shards


def local_splits(folder: Path, task: str, test: bool = False) -> dict[str, list[Path]]:
    """The files of each split of a task in a local GLUE folder. Raises InputError where one is missing."""
    found = {split: split_files(folder, task, split) for split in splits_of(task, test)}
    if missing := next((split for split, files in found.items() if not files), None):
        try:
            present = ", ".join(sorted(p.name for p in folder.iterdir() if p.is_dir())) if folder.is_dir() else ""
        except OSError as error:
            raise formats.unreadable(folder, error) from error
        mend = "leave finetune.test false" if missing in TASKS[task].test else f"leave {task} out of finetune.tasks"
        raise InputError(
            f"{folder} has no {task}/{missing}.parquet, {task}/{missing}-*.parquet or {task}/{missing}.tsv (folders there: "
            f"{present or 'none'}). Expected the data of {HUB_GLUE.repository}; correct finetune.data, or {mend}."
        )
    return found


def hub_name(task: str, split: str) -> str:
    """The path on the hub of a split, which is one file at that commit."""
    return f"{task}/{split}-00000-of-00001.parquet"


def cached(task: str, split: str) -> Path | None:
    """A split's file in the cache of the hub's client, if it is there and whole: it is named by its digest."""
    from huggingface_hub import try_to_load_from_cache

    about = {"repo_type": "dataset", "revision": HUB_GLUE.revision}
    path = try_to_load_from_cache(HUB_GLUE.repository, hub_name(task, split), **about)
    digest = Path(path).resolve().name if isinstance(path, str) else None
    return Path(path) if digest and hub.digest(Path(path), digest) == digest else None


@functools.cache
def hub_problem() -> str:
    """Why the hub can't be asked for GLUE, empty if it can: one quick request, where its client would retry for 30 s."""
    from huggingface_hub import HfApi

    try:
        HfApi().dataset_info(HUB_GLUE.repository, revision=HUB_GLUE.revision, timeout=HUB_SECONDS)
    except Exception as problem:  # the hub's client raises its own, httpx's and the socket's errors
        return str(hub.error(HUB_GLUE.repository, problem, HUB_GLUE.instead))
    return ""


@functools.cache  # asked once before the model is trained, and not again by the runs a day later
def hub_splits(task: str, test: bool = False) -> dict[str, list[Path]]:
    """The files of each split of a task from the hub, brought here; what is in the cache needs no network."""
    found = {split: [path] for split in splits_of(task, test) if (path := cached(task, split))}
    for split in splits_of(task, test):
        if split not in found:
            if problem := hub_problem():
                raise InputError(problem)
            source = replace(HUB_GLUE, pattern=rf"{task}/{split}-\d+-of-\d+\.parquet", folder=task)
            found[split] = [hub.bring(source, file) for file in hub.files(source)]
    return {split: found[split] for split in splits_of(task, test)}


def evaluation_files(data: str, tasks: Iterable[str]) -> dict[str, dict[str, list[Path]]]:
    """The files at hand of the validation and test splits of GLUE tasks, by task and split.

    From the hub: all, or none where not all can be had. From a folder: those in it, where test splits
    and whole tasks may be missing. Raises InputError for a folder that has none.
    """
    folder, found = Path(data).expanduser(), {}
    for task in (name for name in TASKS if name in tasks):
        files = {
            split: hub_evaluation().get((task, split), [])
            if data == HUB_GLUE.repository
            else split_files(folder, task, split)
            for split in evaluation_splits(task)
        }
        if at_hand := {split: paths for split, paths in files.items() if paths}:
            found[task] = at_hand
    if not found and data != HUB_GLUE.repository:
        raise InputError(
            f"{folder} {'holds no' if folder.is_dir() else 'is no directory with'} <task>/validation.parquet or <task>/test.parquet "
            f"(or .tsv) of {', '.join(tasks)}. Expected the files of {HUB_GLUE.repository}; correct finetune.data (or decontaminate.data)."
        )
    return found


@functools.cache  # the answer enters a key, so it must stay the same while a run lasts
def hub_evaluation() -> dict[tuple[str, str], list[Path]]:
    """All validation and test splits from the hub, brought here if need be; none if not all can be, with a warning.

    Some of them would be a key of their own, and another one the next time. Where the hub can't be asked at all, the stages
    that need it say so (`hub_problem`).
    """
    wanted = [(task, split) for task in (*GLUE, "wnli") for split in evaluation_splits(task)]
    found = {about: [path] for about in wanted if (path := cached(*about))}
    if len(found) == len(wanted):
        return found
    if hub_problem():
        return {}
    names = {hub_name(*about): about for about in wanted}
    told = f"{HUB_GLUE.repository} on the hub lacks files."
    try:
        for file in hub.files(replace(HUB_GLUE, pattern="|".join(map(re.escape, names)))):
            found[names[file.name]] = [hub.bring(HUB_GLUE, file)]
    except InputError as problem:
        told = problem
    if len(found) == len(wanted):
        return found
    missing = [f"{task}/{split}" for task, split in wanted if (task, split) not in found] if found else ["all of it"]
    log.warning("%s Not at hand, so that no sentence of GLUE is looked for in the text: %s.", told, ", ".join(missing))
    return {}


# Reading them


def read_file(path: Path, where: str) -> pa.Table:
    """The columns of a Parquet or TSV file. Raises InputError for what is none; `where` is its name for people."""
    try:
        if not path.stat().st_size:
            raise InputError(f"{where} is empty. Get it again.")
        if path.suffix == ".tsv":
            return checks.single(tsv_table(path.read_bytes(), where), where)
        with pq.ParquetFile(path) as file:
            table = file.read()
    except PermissionError as error:
        raise formats.unreadable(path, error) from error
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        kind = "TSV" if path.suffix == ".tsv" else "Parquet"
        raise InputError(f"{where} is no {kind} file that can be read: {error}. Get it again.") from error
    for i, field in enumerate(table.schema):
        kind = field.type.value_type if pa.types.is_dictionary(field.type) else field.type
        if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
            text = table.column(i).cast(pa.large_string())
            checks.check_utf8(text, field.name, where)
            table = table.set_column(i, field.name, text)
    return checks.single(table, where)


def tsv_table(data: bytes, where: str) -> pa.Table:
    """The columns of a TSV file, all of them text, named by its first line; quotes are characters like others.

    So an unbalanced quote eats no rows. Raises InputError for what is no such file, naming lines.
    """
    try:
        text = data.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise InputError(f"{where} is not UTF-8 (line {line}: {error.reason}). Write it as UTF-8.") from error
    header, _, body = text.partition("\n")
    names = [name.strip() for name in header.split("\t")]
    if not body:
        return pa.Table.from_arrays([pa.array([], pa.large_string())] * len(names), names)
    lines = pc.split_pattern(pa.array([body.removesuffix("\n")], pa.large_string()), "\n").flatten()
    fields = pc.add(pc.count_substring(lines, "\t"), 1)
    wrong = pc.not_equal(fields, len(names)).to_numpy(zero_copy_only=False)
    if wrong.any():
        raise InputError(
            f"{where}: {checks.named(wrong, 'line', 2)} should have {len(names)} fields, as the first line ({', '.join(names)}), but the "
            f"first of them has {fields[int(np.argmax(wrong))]}. Correct them; a sentence can't have tabs or line ends."
        )
    every = pc.split_pattern(lines, "\t").flatten()
    columns = [every.take(pa.array(np.arange(i, len(every), len(names)))) for i in range(len(names))]
    return pa.Table.from_arrays(columns, names)


def read_split(paths: list[Path], name: str, split: str) -> tuple[pa.Table, dict[str, int], list[str]]:
    """Read and check a split: the task's texts and the label; the rows left out, by reason; and what is to be said.

    In training data, rows without a sentence are left out. Raises InputError for what can't be trained on or scored.
    """
    task, test, rows, tables, counts, notes = TASKS[name], split in TASKS[name].test, 0, [], Counter(), []
    for path in paths:
        where = f"{name}/{path.name}"
        table = read_file(path, where)
        wanted = task.columns if test else (*task.columns, LABEL)
        if missing := [column for column in wanted if column not in table.column_names]:
            raise InputError(
                f"{where} has no column {', '.join(missing)}; its columns are {', '.join(table.column_names)}. Expected "
                f"{', '.join(wanted)}, as in {HUB_GLUE.repository}; correct it."
            )
        if test:
            checks.check_order(table, where, rows)
        labels = (
            pa.repeat(-1, len(table))
            if test
            else checks.checked_labels(table[LABEL], task, where, path.suffix == ".tsv")
        )
        kind = pa.int64() if task.labels else pa.float32()  # as on the hub
        table = table.select(task.columns).append_column(LABEL, labels.cast(kind))
        rows += len(table)
        kept, found, told = checks.checked_texts(table, where, split == "train")
        tables.append(kept)
        counts.update(found)
        notes += told
    if not rows:
        raise InputError(f"{name}/{paths[0].name} has no rows. Get it again, or leave {name} out of finetune.tasks.")
    if counts.total() > MOST_WITHOUT * rows:
        raise InputError(
            f"{name}/{split}: {counts.total():,} of {counted(rows, 'row')} without a sentence; expected at most "
            f"{MOST_WITHOUT:.0%}. "
            f"Correct the file or get it again. {' '.join(notes)}"
        )
    whole = pa.concat_tables(tables)
    return whole, dict(counts) if split == "train" else {}, notes + checks.checked_classes(whole, name, split)
