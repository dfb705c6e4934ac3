"""GLUE's data: finding the files of a task's splits, and reading them with `datasets`.

They come from the hub (nyu-mll/glue at a fixed commit, through the cache that `load_dataset` uses too) or from a folder
with the same columns (Parquet or TSV); probes are made of a pretrained artifact's held-out documents.
"""

import csv
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

HUB_SECONDS = 10  # for the hub to say that it is there
TSV = {  # pandas' options: a tab parts two fields and \n two lines, all else is text, "NA" and blank lines too
    "sep": "\t",
    "header": 0,
    "quoting": csv.QUOTE_NONE,
    "na_filter": False,
    "skip_blank_lines": False,
    "lineterminator": "\n",
}
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Data:
    """A task's checked data, with warnings and counts."""

    tables: dict[str, pa.Table]  # by split, train first, then validation, then test; the task's texts and the label
    notes: list[str]  # warnings
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
            tables[split], counts, warnings = read_split(paths, task, split)
            left_out |= {split: counts} if counts else {}
            notes += warnings
    duplicates, shared, warnings = checks.repeated(task, tables)
    return Data(tables, notes + warnings, left_out, shared, duplicates)


def identity(data: str, task: str, test: bool = False) -> dict:
    """What the data is, for a key: digests of local files, or the hub's revision, in place of where it is."""
    if data == "probes":
        return {"probes": probes.VERSION}
    if data == HUB_GLUE.repository:
        return {"repository": HUB_GLUE.repository, "revision": HUB_GLUE.revision}
    files = local_splits(Path(data).expanduser(), task, test)
    return {split: [local.file_digest(path) for path in paths] for split, paths in files.items()}


# Where the files are


def find_splits(data: str, task: str, test: bool = False) -> dict[str, list[Path]]:
    """The files of each split of a task, brought from the hub if that is where they are."""
    if data == HUB_GLUE.repository:
        return hub_splits(task, test)
    return local_splits(Path(data).expanduser(), task, test)


def split_files(folder: Path, task: str, split: str) -> list[Path]:
    """The files of one split in a local GLUE folder: one, or Parquet shards. None where there are none.

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
            f"Expected {split} once, as one "
            "file or in Parquet shards; take the others away."
        )
    expected = {int(found[1]) for path in shards if (found := re.search(r"-of-(\d+)$", path.stem))}
    if expected and expected != {len(shards)}:
        raise InputError(
            f"{folder / task} has {len(shards)} of {max(expected)} shards of {split}, "
            f"from {shards[0].name} to {shards[-1].name}. "
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
            raise local.unreadable(folder, error) from error
        mend = "leave finetune.test false" if missing in TASKS[task].test else f"leave {task} out of finetune.tasks"
        raise InputError(
            f"{folder} has no {task}/{missing}.parquet, {task}/{missing}-*.parquet or "
            f"{task}/{missing}.tsv (folders there: "
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
    """Why the hub can't be reached, or an empty string: one quick request, where its client would retry for 30 s."""
    from huggingface_hub import HfApi

    try:
        HfApi().dataset_info(HUB_GLUE.repository, revision=HUB_GLUE.revision, timeout=HUB_SECONDS)
    except Exception as problem:  # the hub's client raises its own, httpx's and the socket's errors
        return str(hub.error(HUB_GLUE.repository, problem, HUB_GLUE.instead))
    return ""


# Not by load_dataset(repository, task): without a network it takes the revision that it prepared last, whichever it is.
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
            f"{folder} {'holds no' if folder.is_dir() else 'is no directory with'} <task>/validation.parquet "
            f"or <task>/test.parquet "
            f"(or .tsv) of {', '.join(tasks)}. Expected the files of {HUB_GLUE.repository}; "
            "correct finetune.data (or decontaminate.data)."
        )
    return found


@functools.cache  # the answer enters a key, so it must stay the same while a run lasts
def hub_evaluation() -> dict[tuple[str, str], list[Path]]:
    """All validation and test splits from the hub, brought here if need be; none if not all can be, with a warning.

    Only some of them would give another key the next time. Where the hub can't be reached, the stages that need it
    report that (`hub_problem`).
    """
    wanted = [(task, split) for task in (*GLUE, "wnli") for split in evaluation_splits(task)]
    found = {about: [path] for about in wanted if (path := cached(*about))}
    if len(found) == len(wanted):
        return found
    if hub_problem():
        return {}
    names = {hub_name(*about): about for about in wanted}
    reason = f"{HUB_GLUE.repository} on the hub lacks files."
    try:
        for file in hub.files(replace(HUB_GLUE, pattern="|".join(map(re.escape, names)))):
            found[names[file.name]] = [hub.bring(HUB_GLUE, file)]
    except InputError as problem:
        reason = problem
    if len(found) == len(wanted):
        return found
    missing = [f"{task}/{split}" for task, split in wanted if (task, split) not in found] if found else ["all of it"]
    log.warning(
        "%s Not at hand, so that no sentence of GLUE is looked for in the text: %s.", reason, ", ".join(missing)
    )
    return {}


# Reading them


def read_file(path: Path, where: str, needed: Iterable[str] = (), optional: Iterable[str] = ()) -> pa.Table:
    """Read columns of a Parquet or TSV file, all text as large_string; optional columns only if they are there.

    `where` is the file's name in messages. Raises InputError, naming the row or line, for what can't be read.
    """
    from datasets.exceptions import DatasetGenerationError

    try:
        if not path.stat().st_size:
            raise InputError(f"{where} is empty. Get it again.")
        with tempfile.TemporaryDirectory(prefix="cram-glue-") as scratch:
            read = read_tsv if path.suffix == ".tsv" else read_parquet
            return read(path, where, list(needed), list(optional), Path(scratch))
    except PermissionError as error:
        raise local.unreadable(path, error) from error
    except (pa.ArrowException, OSError, UnicodeDecodeError, DatasetGenerationError) as error:
        cause = error.__cause__ if isinstance(error, DatasetGenerationError) else error
        if getattr(cause, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
            raise InputError(
                f"{tempfile.gettempdir()} has no room for a copy of {where}. "
                "Make some, or set TMPDIR to another directory."
            ) from error
        kind = "TSV" if path.suffix == ".tsv" else "Parquet"
        raise InputError(f"{where} is no {kind} file that can be read: {cause}. Get it again.") from error


def read_parquet(path: Path, where: str, needed: list[str], optional: list[str], scratch: Path) -> pa.Table:
    """Read columns of a Parquet file, as `read_file` says; all text is checked to be UTF-8."""
    with pq.ParquetFile(path) as file:
        fields, rows = list(file.schema_arrow), file.metadata.num_rows
    checks.check_columns([field.name for field in fields], needed, where)
    schema = pa.schema([(field.name, plain(field.type)) for field in fields if field.name in (*needed, *optional)])
    link = scratch / "split.parquet"  # `datasets` takes names for patterns, and "::" for a chain of file systems
    link.symlink_to(path.absolute())
    table = load("from_parquet", link, where, schema, rows, columns=schema.names)
    for field in table.schema:
        if pa.types.is_large_string(field.type):
            checks.check_utf8(table[field.name], field.name, where)
    return table


def read_tsv(path: Path, where: str, needed: list[str], optional: list[str], scratch: Path) -> pa.Table:
    """Read columns of a TSV file, as `read_file` says: all are text, named by the first line; quotes mean nothing."""
    text = checks.decoded(path.read_bytes(), where)
    names, rows = checks.check_fields(text, where)
    checks.check_columns(names, needed, where)
    schema = pa.schema([(name, pa.large_string()) for name in names if name in (*needed, *optional)])
    copy = scratch / "split.tsv"
    copy.write_text(text, encoding="utf-8", newline="")
    return load("from_csv", copy, where, schema, rows, names=names, usecols=schema.names, **TSV)


def plain(kind: pa.DataType) -> pa.DataType:
    """The type of a column; large_string for all kinds of text, encoded by dictionary or not."""
    value = kind.value_type if pa.types.is_dictionary(kind) else kind
    text = pa.types.is_string(value) or pa.types.is_large_string(value) or pa.types.is_string_view(value)
    return pa.large_string() if text else kind


def load(reader: str, path: Path, where: str, schema: pa.Schema, rows: int, **options: object) -> pa.Table:
    """Read the columns of a file with Dataset.from_parquet or Dataset.from_csv, by way of an Arrow copy beside it.

    `schema` has the types: a file's own (ClassLabel) refuse labels without naming a row; of TSV pandas guesses them.
    Raises InputError for types that `datasets` does not have, and where fewer rows are read than the file has.
    """
    from datasets import Dataset, Features, disable_progress_bars, logging

    if not rows or not schema.names:
        return schema.empty_table()
    disable_progress_bars()
    logging.set_verbosity(logging.CRITICAL)  # its errors are raised too, and the path in them is that of the copy
    features = Features()
    for field in schema:
        try:
            features.update(Features.from_arrow_schema(pa.schema([field])))
        except (NotImplementedError, TypeError, ValueError) as error:
            raise InputError(f"{where} has {field.type} in the column {field.name}. Write text or numbers.") from error
    own = {"features": features, "cache_dir": str(path.parent), "keep_in_memory": True}
    # not load_dataset, which counts its calls at a server, those for local files too
    table = getattr(Dataset, reader)(str(path), **own, **options).with_format("arrow")[:]
    if len(table) != rows:
        raise InputError(f"{where} has {counted(rows, 'row')}, of which {len(table):,} could be read. Get it again.")
    return table.replace_schema_metadata()


def read_split(paths: list[Path], name: str, split: str) -> tuple[pa.Table, dict[str, int], list[str]]:
    """Read and check a split: the task's texts and the label; the rows left out, by reason; and warnings.

    In training data, rows without a sentence are left out. Raises InputError for what can't be trained on or scored.
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
