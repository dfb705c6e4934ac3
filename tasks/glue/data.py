"""GLUE's data: finding the files of a task's splits, and reading them.

They come from the hub (nyu-mll/glue at a fixed commit, in the cache that `load_dataset` uses too) or from a folder with
the same columns (Parquet or TSV). Probes are made from the held-out documents of a pretrained artifact.
"""

import errno
import functools
import logging
import re
import tempfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from model import InputError
from model.quantities import counted
from tasks.corpus import hub, local
from tasks.glue import checks, probes
from tasks.glue.tasks import GLUE, HUB_GLUE, LABEL, PLACES, TASKS, evaluation_splits, splits_of
from tasks.store import Artifact

HUB_SECONDS = 10  # to wait for an answer of the hub
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Data:
    """A task's checked data, with warnings and counts."""

    tables: dict[str, pa.Table]  # by split, train first, then validation, then test; the task's texts and the label
    notes: list[str]  # warnings
    left_out: dict[str, dict[str, int]]  # rows that are not in the tables, by split and reason
    shared: dict[str, int]  # training rows whose texts occur in another split too (in either order, if SYMMETRIC)
    duplicates: int  # training rows whose texts occur in an earlier training row (likewise)


def read(data: str, task: str, test: bool = False, pretrained: Artifact | None = None) -> Data:
    """Fetch, read and check a task's data, with its test splits if `test`. Probes are made from `pretrained`.

    Raises InputError for data that can't be trained on or scored.
    """
    tables, notes, left_out = {}, [], {}
    if data == "probes" and test:
        raise InputError("Probes have no test data. Leave finetune.test false.")
    if data == "probes":
        tables = probes.make(task, pretrained)
    else:
        for split, paths in find_splits(data, task, test).items():
            tables[split], counts, warnings = read_split(paths, task, split)
            left_out |= {split: counts} if counts else {}
            notes += warnings
    duplicates, shared, warnings = checks.repeated(task, tables)
    return Data(tables, notes + warnings, left_out, shared, duplicates)


def identity(data: str, task: str, test: bool = False) -> dict:
    """What identifies the data in a key, wherever it lies: digests of local files, or the hub's revision."""
    if data == "probes":
        return {"probes": probes.VERSION}
    if data == HUB_GLUE.repository:
        return {"repository": HUB_GLUE.repository, "revision": HUB_GLUE.revision}
    files = local_splits(Path(data).expanduser(), task, test)
    return {split: [local.file_digest(path) for path in paths] for split, paths in files.items()}


# Finding the files


def find_splits(data: str, task: str, test: bool = False) -> dict[str, list[Path]]:
    """The files of each split of a task, fetched if they are on the hub."""
    if data == HUB_GLUE.repository:
        files = hub_files(tuple((task, split) for split in splits_of(task, test)))
        return {split: [path] for (_, split), path in files.items()}
    return local_splits(Path(data).expanduser(), task, test)


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


def local_splits(folder: Path, task: str, test: bool = False) -> dict[str, list[Path]]:
    """The files of each split of a task in a local GLUE folder. Raises InputError if a split is missing."""
    files = {split: split_files(folder, task, split) for split in splits_of(task, test)}
    if missing := next((split for split, paths in files.items() if not paths), None):
        try:
            present = ", ".join(sorted(p.name for p in folder.iterdir() if p.is_dir())) if folder.is_dir() else ""
        except OSError as error:
            raise local.unreadable(folder, error) from error
        advice = "leave finetune.test false" if missing in TASKS[task].test else f"leave {task} out of finetune.tasks"
        raise InputError(
            f"{folder} has no {task}/{missing}.parquet, {task}/{missing}-*.parquet or {task}/{missing}.tsv (folders "
            f"there: {present or 'none'}). Expected the data of {HUB_GLUE.repository}; correct finetune.data, "
            f"or {advice}."
        )
    return files


def hub_name(task: str, split: str) -> str:
    """The path of a split on the hub, where each is one file at that commit."""
    return f"{task}/{split}-00000-of-00001.parquet"


def cached(task: str, split: str) -> Path | None:
    """A split's file in the cache of the hub's client, if it is complete: the cache names a file by its digest."""
    from huggingface_hub import try_to_load_from_cache

    about = {"repo_type": "dataset", "revision": HUB_GLUE.revision}
    path = try_to_load_from_cache(HUB_GLUE.repository, hub_name(task, split), **about)
    digest = Path(path).resolve().name if isinstance(path, str) else None
    return Path(path) if digest and hub.digest(Path(path), digest) == digest else None


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
def hub_files(wanted: tuple[tuple[str, str], ...]) -> dict[tuple[str, str], Path]:
    """The files of splits (task, split): from the cache without a network, or fetched. Raises InputError."""
    files = {one: path for one in wanted if (path := cached(*one))}
    names = {hub_name(*one): one for one in wanted if one not in files}
    if names:
        if problem := hub_problem():
            raise InputError(problem)
        for file in hub.files(replace(HUB_GLUE, pattern="|".join(map(re.escape, names)))):
            files[names.pop(file.name)] = hub.bring(HUB_GLUE, file)
    if names:
        raise InputError(f"{HUB_GLUE.repository} on the hub lacks {', '.join(names)}. To continue, {HUB_GLUE.instead}.")
    return {one: files[one] for one in wanted}


@functools.cache  # the answer enters a key, so it must stay the same throughout a run
def hub_evaluation() -> dict[tuple[str, str], list[Path]]:
    """All validation and test splits from the hub; with only some of them the next run would have another key.

    Empty, with a warning, if one can't be had. If the hub can't be reached at all, the stages that need it report that.
    """
    wanted = tuple((task, split) for task in (*GLUE, "wnli") for split in evaluation_splits(task))
    try:
        files = hub_files(wanted)
    except InputError as error:
        if not hub_problem():
            missing = ", ".join(f"{task}/{split}" for task, split in wanted if not cached(task, split))
            log.warning("%s Decontamination is skipped, because these splits are unavailable: %s.", error, missing)
        return {}
    return {one: [path] for one, path in files.items()}


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


# Reading them


def read_file(path: Path, where: str, needed: Iterable[str] = (), optional: Iterable[str] = ()) -> pa.Table:
    """Read columns of a Parquet or TSV file, all text as large_string; optional columns only if they are there.

    `where` is the file's name in messages. Raises InputError for damaged files, naming the row or line where it can.
    """
    from datasets.exceptions import DatasetGenerationError

    try:
        if not path.stat().st_size:
            raise InputError(f"{where} is empty. Get it again.")
        return (read_tsv if path.suffix == ".tsv" else read_parquet)(path, where, [*needed], [*optional])
    except PermissionError as error:
        raise local.unreadable(path, error) from error
    except (pa.ArrowException, OSError, UnicodeDecodeError, DatasetGenerationError) as error:
        cause = error.__cause__ if isinstance(error, DatasetGenerationError) else error
        if getattr(cause, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
            raise InputError(
                f"{tempfile.gettempdir()} has no room for a copy of {where}. "
                "Free some space, or set TMPDIR to another directory."
            ) from error
        kind = "TSV" if path.suffix == ".tsv" else "Parquet"
        raise InputError(f"{where} is not a readable {kind} file: {str(cause).rstrip('.')}. Get it again.") from error


def read_parquet(path: Path, where: str, needed: list[str], optional: list[str]) -> pa.Table:
    """Read columns of a Parquet file with `datasets`, by way of an Arrow copy that is deleted again; see `read_file`.

    Columns have the types of the file: with its ClassLabel, `datasets` would refuse labels without naming a row.
    """
    from datasets import Dataset, Features, disable_progress_bars, logging

    with pq.ParquetFile(path) as file:
        fields, rows = list(file.schema_arrow), file.metadata.num_rows
    checks.check_columns([field.name for field in fields], needed, where)
    schema = pa.schema([(field.name, plain(field.type)) for field in fields if field.name in (*needed, *optional)])
    if not rows or not schema.names:
        return schema.empty_table()
    disable_progress_bars()
    logging.set_verbosity(logging.CRITICAL)  # its errors are raised too, and they name the link
    try:
        features = Features.from_arrow_schema(schema)
    except (NotImplementedError, TypeError, ValueError) as error:
        kinds = ", ".join(f"{field.name}: {field.type}" for field in schema)
        raise InputError(
            f"{where} has columns of a type that can't be read ({kinds}). Write text or numbers."
        ) from error
    with tempfile.TemporaryDirectory(prefix="cram-glue-") as scratch:
        link = Path(scratch) / "split.parquet"  # `datasets` takes names for patterns, and "::" for a chain of systems
        link.symlink_to(path.absolute())
        options = {"features": features, "columns": schema.names, "cache_dir": scratch, "keep_in_memory": True}
        dataset = Dataset.from_parquet(str(link), **options)  # load_dataset reports to a server, even of local files
    table = dataset.with_format("arrow")[:].replace_schema_metadata()
    if len(table) != rows:
        raise InputError(f"{where} has {counted(rows, 'row')}, of which {len(table):,} could be read. Get it again.")
    for field in table.schema:
        if pa.types.is_large_string(field.type):
            checks.check_utf8(table[field.name], field.name, where)
    return table


def plain(kind: pa.DataType) -> pa.DataType:
    """The type of a column; large_string for all kinds of text, dictionary-encoded or not."""
    value = kind.value_type if pa.types.is_dictionary(kind) else kind
    return pa.large_string() if value in (pa.string(), pa.large_string(), pa.string_view()) else kind


def read_tsv(path: Path, where: str, needed: list[str], optional: list[str]) -> pa.Table:
    """Read columns of a TSV file, all as text, named by the first line; quotes are characters. See `read_file`."""
    names, fields = checks.split_fields(checks.decoded(path.read_bytes(), where), where)
    checks.check_columns(names, needed, where)
    wanted = {name: number for number, name in enumerate(names) if name in (*needed, *optional)}
    return pa.table({name: fields[number :: len(names)] for name, number in wanted.items()})


def read_split(paths: list[Path], name: str, split: str) -> tuple[pa.Table, dict[str, int], list[str]]:
    """Read and check a split: the task's texts and the label; the rows left out, by reason; and warnings.

    Training rows without a sentence are left out. Raises InputError for data that can't be trained on or scored.
    """
    task, test, rows, tables, counts, notes = TASKS[name], split in TASKS[name].test, 0, [], Counter(), []
    needed, optional = (task.columns, PLACES) if test else ((*task.columns, LABEL), ())
    for path in paths:
        where = f"{name}/{path.name}"
        table = read_file(path, where, needed, optional)
        if test:
            checks.check_order(table, where, rows)
            labels = pa.repeat(-1, len(table))
        else:
            labels = checks.checked_labels(table[LABEL], task, where, path.suffix == ".tsv")
        kind = pa.int64() if task.labels else pa.float32()  # as on the hub
        table = table.select(task.columns).append_column(LABEL, labels.cast(kind))
        rows += len(table)
        kept, without, warnings = checks.checked_texts(table, where, split == "train")
        tables.append(kept)
        counts.update(without)
        notes += warnings
    if not rows:
        raise InputError(f"{name}/{paths[0].name} has no rows. Get it again, or leave {name} out of finetune.tasks.")
    checks.check_share(counts, rows, f"{name}/{split}", notes)
    whole = pa.concat_tables(tables)
    return whole, dict(counts) if split == "train" else {}, notes + checks.checked_classes(whole, name, split)
