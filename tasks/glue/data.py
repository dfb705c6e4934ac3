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
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq

from model import InputError
from tasks.corpus import hub, local
from tasks.glue import probes
from tasks.glue.tasks import GLUE, HUB_GLUE, LABEL, TASKS, evaluation_splits, training_splits
from tasks.store import Artifact

if TYPE_CHECKING:  # here and below imported where it is needed: every command line imports this module
    import pandas as pd

HUB_SECONDS = 10  # to wait for an answer of the hub
SENTENCES_AT_ONCE = 1 << 16
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Data:
    """A task's checked data, with warnings and counts."""

    tables: "dict[str, pd.DataFrame]"  # by split, train first, then validation; the task's texts and the label
    notes: list[str]  # warnings
    left_out: dict[str, dict[str, int]]  # rows that are not in the tables, by split and reason
    shared: dict[str, int]  # training rows whose texts occur in another split too (in either order, if symmetric)
    duplicates: int  # training rows whose texts occur in an earlier training row (likewise)


def read(data: str, task: str, pretrained: Artifact | None = None) -> Data:
    """Fetch, read and check a task's data. Probes are made from `pretrained`.

    Raises InputError for data that can't be trained on or scored.
    """
    from tasks.glue import checks

    tables, notes, left_out = {}, [], {}
    if data == "probes":
        tables = probes.make(task, pretrained)
    else:
        for split, paths in find_splits(data, task).items():
            tables[split], without, warnings = read_split(paths, task, split)
            left_out |= {split: without} if without else {}
            notes += warnings
    duplicates, shared, warnings = checks.repeated(task, tables)
    return Data(tables, notes + warnings, left_out, shared, duplicates)


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


# Reading them


def read_file(path: Path, where: str, columns: Iterable[str]) -> "pd.DataFrame":
    """Read columns of a Parquet or TSV file; those of a TSV file are text.

    `where` is the file's name in messages. Raises InputError for damaged files and missing columns, naming the row or
    line where it can.
    """
    from datasets.exceptions import DatasetGenerationError

    try:
        if not path.stat().st_size:
            raise InputError(f"{where} is empty. Get it again.")
        return (read_tsv if path.suffix == ".tsv" else read_parquet)(path, where, list(columns))
    except PermissionError as error:
        raise local.unreadable(path, error) from error
    except (pa.ArrowException, OSError, DatasetGenerationError) as error:
        cause = error.__cause__ if isinstance(error, DatasetGenerationError) else error
        if getattr(cause, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
            raise InputError(
                f"{tempfile.gettempdir()} has no room for a copy of {where}. "
                "Free some space, or set TMPDIR to another directory."
            ) from error
        kind = "TSV" if path.suffix == ".tsv" else "Parquet"
        raise InputError(f"{where} is not a readable {kind} file: {str(cause).rstrip('.')}. Get it again.") from error


def check_columns(names: list[str], needed: list[str], where: str) -> None:
    """Raise InputError unless a file has the needed columns, and each name once."""
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise InputError(f"{where} has the column {twice[0]} twice. Remove one of them.")
    if missing := [name for name in needed if name not in names]:
        raise InputError(
            f"{where} has no column {', '.join(missing)}; its columns are {', '.join(names)}. "
            f"Expected {', '.join(needed)}, as in {HUB_GLUE.repository}; correct it."
        )


def read_parquet(path: Path, where: str, columns: list[str]) -> "pd.DataFrame":
    """Read columns of a Parquet file with `datasets`, by way of an Arrow copy that is deleted again; see `read_file`.

    Columns have the types of the file: with its ClassLabel, `datasets` would refuse labels without naming a row.
    """
    from datasets import Dataset, Features, disable_progress_bars, logging

    with pq.ParquetFile(path) as file:
        fields, rows = file.schema_arrow, file.metadata.num_rows
    check_columns(fields.names, columns, where)
    schema = pa.schema([(name, plain(fields.field(name).type)) for name in columns])
    if not rows:  # `datasets` refuses it
        return schema.empty_table().to_pandas()
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
        options = {"features": features, "columns": columns, "cache_dir": scratch, "keep_in_memory": True}
        dataset = Dataset.from_parquet(str(link), **options)  # load_dataset reports to a server, even of local files
    table = dataset.with_format("arrow")[:]
    for field in table.schema:
        if pa.types.is_large_string(field.type):
            check_utf8(table[field.name], field.name, where)
    return table.to_pandas()


def plain(kind: pa.DataType) -> pa.DataType:
    """The type of a column; large_string for all kinds of text, dictionary-encoded or not."""
    value = kind.value_type if pa.types.is_dictionary(kind) else kind
    return pa.large_string() if value in (pa.string(), pa.large_string(), pa.string_view()) else kind


def check_utf8(text: pa.ChunkedArray, name: str, where: str) -> None:
    """Raise InputError if a column is not UTF-8, which Arrow doesn't check when it reads."""
    try:
        text.validate(full=True)
    except pa.ArrowInvalid:  # it doesn't name the row
        for row, value in enumerate(text.cast(pa.large_binary()).to_pylist(), 1):
            try:
                (value or b"").decode()
            except UnicodeDecodeError as error:
                raise InputError(
                    f"{where}: {name} of row {row:,} is not UTF-8 ({error.reason}). Correct it."
                ) from error
        raise


def read_tsv(path: Path, where: str, columns: list[str]) -> "pd.DataFrame":
    """Read columns of a TSV file, all as text, named by the first line; quotes are characters. See `read_file`.

    Not with pandas, which takes a line with too few fields for one whose last fields are empty.
    """
    import pandas as pd

    data = path.read_bytes()
    try:
        header, *lines = data.decode("utf-8-sig").replace("\r\n", "\n").removesuffix("\n").split("\n")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise InputError(f"{where} is not UTF-8 (line {line}: {error.reason}). Write it as UTF-8.") from error
    names = [name.strip() for name in header.split("\t")]
    check_columns(names, columns, where)
    rows = [line.split("\t") for line in lines]
    for number, fields in enumerate(rows, 2):
        if len(fields) != len(names):
            raise InputError(
                f"{where}: line {number:,} should have {len(names)} fields, as the first line ({', '.join(names)}), "
                f"but has {len(fields)}. Correct it; a sentence can't have tabs or line ends."
            )
    return pd.DataFrame(rows, columns=names, dtype=str)[columns]


def read_split(paths: list[Path], name: str, split: str) -> "tuple[pd.DataFrame, dict[str, int], list[str]]":
    """Read and check a split: the task's texts and the label; the rows left out, by reason; and warnings.

    Training rows without a sentence are left out. Raises InputError for data that can't be trained on or scored.
    """
    import pandas as pd

    from tasks.glue import checks

    task, train, tables, reasons, notes = TASKS[name], split == "train", [], [], []
    for path in paths:
        where = f"{name}/{path.name}"
        table = read_file(path, where, (*task.columns, LABEL))
        checks.check_text(table, task.columns, where)
        table[LABEL] = checks.checked_labels(table[LABEL], task, where, path.suffix == ".tsv")
        why, warning = checks.without_text(table, list(task.columns), where, train)
        tables.append(table[why == ""] if train else table)
        reasons.append(why)
        notes += [warning] if warning else []
    whole, why = pd.concat(tables, ignore_index=True), pd.concat(reasons)
    checks.check_split(why, notes, f"{name}/{paths[0].name}" if why.empty else f"{name}/{split}")
    counts = {reason: int((why == reason).sum()) for reason in ("null", "empty") if train and (why == reason).any()}
    return whole, counts, notes + checks.missing_classes(whole[LABEL], task, f"{name}/{split}")


def sentences(paths: list[Path], task: str) -> Iterator[tuple[str, int, list[str]]]:
    """The sentences of a split, which decontamination looks for, many at a time: column, row of the first, texts.

    Raises InputError if a file lacks a column of the task, or if a column isn't text.
    """
    from tasks.glue import checks

    row, columns = 0, TASKS[task].columns
    for path in paths:
        where = f"{task}/{path.name}"
        table = read_file(path, where, columns)
        checks.check_text(table, columns, where)
        table = table.fillna("")
        for start in range(0, len(table), SENTENCES_AT_ONCE):
            for name in columns:
                yield name, row + start, table[name].iloc[start : start + SENTENCES_AT_ONCE].tolist()
        row += len(table)
