"""Decontaminate: drop documents that share long runs of words with GLUE's evaluation data.

Reads   the parts of a corpus; the validation and test sentences of the tasks that the model will be scored on.
Writes  part-00000.parquet …  the same parts without those documents, in the same order
        contaminated.jsonl    a few of the documents found for each task: the shared words, and the sentence with them
"""

import json
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import pyarrow as pa
import xxhash
from pydantic import Field

from model.errors import InputError
from model.wording import counted
from tasks.corpus.parts import Document, Tally, add_up, count, link, parts_of, smallest_of_each, tables, writer
from tasks.glue import data as glue
from tasks.glue import pairs as sets
from tasks.glue import reading as labelled
from tasks.glue.own import Definition, by_name, definitions_in, name_or_definition
from tasks.glue.pairs import PairSet
from tasks.glue.table import HUB_GLUE, TASKS, evaluation_splits
from tasks.stage import Params, stage
from tasks.store.artifacts import WORK, Artifact
from tasks.store.manifests import known_digest
from tasks.text import matching
from tasks.text.ngrams import Index, SentenceBatch, passage, write_index
from tasks.workers.jobs import over_parts

SAMPLES = 5  # documents of each task
SAMPLE_CHARACTERS = 600  # shown of a sample
CONTEXT = 100  # characters shown on either side
AT_ONCE = 1 << 16  # sentences in memory in all their forms
PAIRS = "pairs"  # the split of minimal pairs
ANY = "all"  # the row of all tasks together
MUCH = 0.05  # of the characters, dropped, from which on a warning is logged
COLUMNS = {
    "sentences": "sentences", "too short": "too_short", "n-grams": "ngrams", "sentences found": "sentences_found",
}  # fmt: skip
EvaluationTask = Literal["cola", "sst2", "mrpc", "stsb", "qqp", "mnli", "qnli", "rte", "wnli"]
if TYPE_CHECKING:
    Task = EvaluationTask | Definition
else:
    Task = name_or_definition(EvaluationTask)
Splits = dict[str, dict[str, list[Path]]]  # files by task and split
log = logging.getLogger(__name__)


class Decontaminate(Params):
    """Which documents are dropped: those that share a run of words with a validation or test sentence."""

    check_is_slow = True
    words: int = Field(
        13,
        ge=5,
        le=50,
        description="Length of such a run in words (13 as in the GPT-3 paper); a Chinese character is half a word.",
    )
    data: str = Field(
        "",
        description="The sentences: 'nyu-mll/glue' or a directory; 'probes': no search; '': as finetune.data.",
    )
    tasks: list[Task] = Field(
        list(get_args(EvaluationTask)),
        min_length=1,
        description="Tasks whose sentences are searched for, if data has them; with those defined in finetune.tasks.",
    )

    pairs: list[PairSet] = Field(
        [], description="Minimal pairs whose sentences are searched for, with those of minimal_pairs.data."
    )
    later = ("pairs",)

    @property
    def pairs_at_hand(self) -> dict[str, PairSet]:
        """The sets of minimal pairs that can be read now, by name."""
        return {sets.name_of(one.data): one for one in self.pairs if sets.at_hand(one)}

    def evaluation(self) -> tuple[Splits, str]:
        """GLUE's files with the sentences; and if there are none, why, in words that enter the key.

        Raises InputError for a folder without any.
        """
        if self.data == "probes":
            return {}, "the probes are made of held-out documents of this corpus"
        names = [task for task in self.tasks if isinstance(task, str)]
        if not names or (not self.data and definitions_in(self.tasks)):
            return {}, "no task of GLUE is asked for"
        if not self.data:
            raise InputError(
                "decontaminate.data is empty. Set it to nyu-mll/glue, a directory or probes, as finetune.data."
            )
        files = glue.evaluation_files(self.data, names)
        if not files:
            return (
                {},
                f"{self.data} is not at hand: not all of it could be had from the hub or its cache on this machine",
            )
        return files, ""

    @classmethod
    def usual(cls) -> dict:
        """The defaults of the parameters that do not depend on the downstream data."""
        return cls().model_dump(mode="json", include={"words"})

    def identity(self) -> dict:
        """Digests of local files, or the splits of the hub's revision; or why there is nothing to search for."""
        files, why = self.evaluation()
        about: dict[str, Any] = {}
        if why:
            about["unchecked"] = why
        own = {task.name: labelled.texts_identity(task) for task in definitions_in(self.tasks)}
        pairs = {name: one.identity_of_sentences() for name, one in self.pairs_at_hand.items()}
        if own or pairs or not why:
            about["words"] = self.words
        if not why:
            about["version"] = matching.VERSION
            about["tasks"] = [task for task in TASKS if task in self.tasks]
            about["data"] = self.identity_of(files)
        if own:
            about["own"] = own
        if pairs:
            about["pairs"] = pairs
        return about

    def identity_of(self, files: Splits) -> dict:
        """What identifies the files with GLUE's sentences in a key."""
        if self.data == HUB_GLUE.repository:
            splits = {task: list(of_task) for task, of_task in files.items()}
            return {"repository": self.data, "revision": HUB_GLUE.revision, "splits": splits}
        digests: dict[str, dict[str, list[str]]] = {task: {} for task in files}
        for task, of_task in files.items():
            for split, paths in of_task.items():
                digests[task][split] = [known_digest(path) for path in paths]
        return digests

    def check(self) -> None:
        """Read the sentences once, so that errors in them are reported before the corpus is read."""
        for _ in evaluation_sentences(self.evaluation()[0], definitions_in(self.tasks), self.pairs_at_hand):
            pass


def evaluation_sentences(
    files: Splits, own: Iterable[Definition] = (), pairs: Mapping[str, PairSet] | None = None
) -> Iterator[SentenceBatch]:
    """The sentences in these files, of these tasks and of these minimal pairs, many at a time.

    Raises InputError for files without the texts of their task.
    """
    for task, of_task in files.items():
        for columns in labelled.sentences(by_name(task, ""), of_task):
            yield from sentence_batches(task, *columns)
    for definition in own:
        for columns in labelled.sentences(definition):
            yield from sentence_batches(definition.name, *columns)
    for name, one in (pairs or {}).items():
        table = sets.read(one)
        for side in sets.SIDES:
            yield from sentence_batches(name, PAIRS, side, 0, table[side].tolist())


def sentence_batches(task: str, split: str, column: str, row: int, texts: list[str]) -> Iterator[SentenceBatch]:
    """Sentences in successive rows of a column, as many at once as fit in memory in all their forms."""
    for start in range(0, len(texts), AT_ONCE):
        yield SentenceBatch(task, split, column, row + start, texts[start : start + AT_ONCE])


def sample(document: Document, found: list[tuple[int, int]], index: Index, task: str) -> dict:
    """The first passage that a document shares with a task, for people to read; `found`: as `Index.find` has them."""
    own = [(first, gram) for first, gram in found if task in index.tasks_of([gram])]
    firsts = [first for first, _ in own]
    start, end = passage(document.text, firsts, index.n)
    _, gram = own[0]
    sentence = next(row for row in index.sentences_of([gram]).to_pylist() if row["task"] == task)
    return {
        **{name: sentence[name] for name in ("task", "split", "row", "column")},
        "sentence": sentence["text"][:SAMPLE_CHARACTERS],
        "id": document.id,
        "source": document.source,
        "before": document.text[max(0, start - CONTEXT) : start],
        "shared": document.text[start:end][:SAMPLE_CHARACTERS],
        "after": document.text[end : end + CONTEXT],
    }


class Contaminated:
    """The documents of a part that share a run of words with a sentence: how many, their n-grams, samples of them."""

    def __init__(self, index: Index) -> None:
        self.index = index
        self.documents: Counter[str] = Counter()  # by task
        self.grams: set[int] = set()
        self.samples: list[Sequence] = []  # task, digest, id, the document and what was found

    def find(self, table: pa.Table) -> np.ndarray:
        """(documents,) bool: which documents of a table share nothing; the others are counted."""
        found = self.index.find(table["text"].to_pylist())
        for row, runs in found.items():
            document = Document(**table.slice(row, 1).to_pylist()[0])
            own = {gram for _, gram in runs}
            self.grams |= own
            tasks = self.index.tasks_of(own)
            self.documents.update([ANY, *tasks])
            digest = xxhash.xxh3_64_intdigest(document.text.encode())
            for task in tasks:
                self.samples.append((task, digest, document.id, (document, runs)))
        self.samples = smallest_of_each(self.samples, 1, SAMPLES)  # of each task
        is_clean = np.ones(len(table), dtype=bool)
        is_clean[list(found)] = False
        return is_clean

    def result(self) -> dict:
        """The documents by task, the n-grams and the samples, as JSON."""
        samples = []
        for task, digest, name, (document, runs) in self.samples:
            samples.append((task, digest, name, sample(document, runs, self.index, task)))
        return {"documents": dict(self.documents), "grams": sorted(self.grams), "samples": samples}


def clean_part(part: Path, folder: Path, words: int, out: Path) -> dict:
    """Write a part without the documents that share a run of words with a sentence in the index in `folder`.

    Returns counts, the n-grams found, and samples.
    """
    found = Contaminated(Index(folder, words))
    kept = Tally()
    dropped = Tally()
    clean = []
    for table in tables(part):
        is_clean = found.find(table)
        clean.append(pa.array(is_clean))
        count(kept, table.filter(clean[-1]))
        count(dropped, table.filter(pa.array(~is_clean)))
    if found.documents:
        with writer(out / part.name) as file:
            for table, is_clean in zip(tables(part), clean, strict=True):
                rest = table.filter(is_clean)
                if len(rest):
                    file.write_table(rest)
    else:
        link(part, out / part.name)
    return {"kept": kept.counts(), "dropped": dropped.counts(), **found.result()}


def pass_on(corpus: Artifact, why: str, probes: bool, out: Path) -> dict:
    """Pass on the corpus unchanged, since there is nothing to search for: a problem unless there are only `probes`."""
    if probes:
        log.info("Skipping decontamination: %s.", why)
    else:
        log.warning("Skipping decontamination: %s", f"{why}. {glue.hub_problem(HUB_GLUE)}".strip())
    for part in parts_of(corpus):
        link(part, out / part.name)
    counts = {name: corpus.stats[name] for name in ("parts", *Tally().counts())}
    about = {"checked": False, "why": why}
    return {**counts, "dropped": {"contaminated": Tally().counts()}, **about, "table": [about]}


def warn_of_much(kept: int, dropped: int, documents: Counter[str], words: int) -> None:
    """Log a warning if many characters are dropped. `documents`: those that were found, by task and of ANY."""
    every = kept + dropped
    if dropped <= MUCH * every:
        return
    log.warning(
        "Dropped %s, %.0f %% of the characters, for sharing %d words in a row with rows that the model will be scored "
        "on (%s).",
        counted(documents[ANY], "document"),
        100 * dropped / every,
        words,
        ", ".join(task for task in documents if task != ANY),
    )


def missing_splits(tasks: Iterable[object], files: Splits) -> list[str]:
    """The splits of GLUE's tasks among these that have no files, as task/split."""
    missing = []
    for task in TASKS:
        if task in tasks:
            absent = [split for split in evaluation_splits(task) if split not in files.get(task, {})]
            missing += [f"{task}/{split}" for split in absent]
    return missing


def log_unavailable(others: list[str], why: str, missing: list[str]) -> None:
    """Log whose sentences are not searched for: those of all tasks of GLUE for some reason, or of missing splits."""
    if why:
        log.info("Only the texts of %s are searched for: %s.", ", ".join(others), why)
    if missing:
        log.warning("These splits are not here, so their sentences are not searched for: %s.", ", ".join(missing))


def splits_of(files: Splits, own: Iterable[Definition]) -> dict[str, list[str]]:
    """The names of the splits with sentences, by task."""
    splits = {task: list(of_task) for task, of_task in files.items()}
    for task in own:
        names = [split for split, *_ in labelled.sentences(task)]
        splits[task.name] = list(dict.fromkeys(names))
    return splits


def sentences_found(results: list[dict], index: Index) -> Counter[str]:
    """How many sentences of each task were found in any part."""
    grams = set(chain.from_iterable(r["grams"] for r in results))
    return index.sentences_by_task(sorted(grams))


def documents_found(results: list[dict]) -> Counter[str]:
    """How many documents were found for each task, and for ANY."""
    documents: Counter[str] = Counter()
    for result in results:
        documents.update(result["documents"])
    return documents


def counts_by_task(
    results: list[dict], splits: dict[str, list[str]], index: Index, in_index: dict[str, dict]
) -> dict[str, dict]:
    """The splits of each task, counts of its sentences (`in_index`: as `write_index` returns), and what was found."""
    sentences = sentences_found(results, index)
    documents = documents_found(results)
    tasks = {}
    for task, names in splits.items():
        found = {"sentences_found": sentences[task], "documents": documents[task]}
        tasks[task] = {"splits": names, **in_index[task], **found}
    return tasks


def statistics(results: list[dict], tasks: dict[str, dict], params: Decontaminate, missing: list[str]) -> dict:
    """What the stage returns, and a warning if much is dropped. `tasks`: the counts of each task."""
    kept = add_up([r["kept"] for r in results])
    dropped = add_up([r["dropped"] for r in results])
    documents = documents_found(results)
    warn_of_much(kept["characters"], dropped["characters"], documents, params.words)
    return {
        "parts": len(results),
        **kept,
        "dropped": {"contaminated": dropped},
        "checked": True,
        "words": params.words,
        "documents_found": documents[ANY],
        "not_at_hand": missing,
        "tasks": tasks,
        "table": tasks_table(tasks, documents[ANY]),
    }


def write_samples(samples: Iterable[Sequence], tasks: list[str], out: Path) -> None:
    """Write a few of the documents found for each task, in the order of the tasks."""
    chosen = smallest_of_each(samples, 1, SAMPLES)
    with out.open("w", encoding="utf-8") as file:
        for _, _, _, shown in sorted(chosen, key=lambda sample: tasks.index(sample[0])):
            file.write(json.dumps(shown, ensure_ascii=False) + "\n")


@stage(version=1, resumes=True)
def decontaminate(params: Decontaminate, corpus: Artifact, out: Path) -> dict:
    """Drop documents with text that the tasks' evaluation data has too; count them by task, and keep samples."""
    files, why = params.evaluation()
    own = definitions_in(params.tasks)
    pairs = params.pairs_at_hand
    if why and not own and not pairs:
        return pass_on(corpus, why, params.data == "probes", out)
    missing = [] if why else missing_splits(params.tasks, files)
    log_unavailable([task.name for task in own] + list(pairs), why, missing)

    work = out / WORK
    work.mkdir(exist_ok=True)
    splits = splits_of(files, own) | {name: [PAIRS] for name in pairs}
    in_index = write_index(evaluation_sentences(files, own, pairs), list(splits), params.words, work)
    jobs = [(part, work, params.words, out) for part in parts_of(corpus)]
    results = over_parts(clean_part, jobs, work / "cleaned", "decontaminate")

    tasks = counts_by_task(results, splits, Index(work, params.words), in_index)
    write_samples(chain.from_iterable(r["samples"] for r in results), list(splits), out / "contaminated.jsonl")
    return statistics(results, tasks, params, missing)


def tasks_table(tasks: dict[str, dict], documents: int) -> list[dict]:
    """The counts as a table: the sum, then a row for each task; a document can be found for several tasks."""
    table = []
    for task, about in tasks.items():
        counts = {column: about[key] for column, key in COLUMNS.items()}
        splits = ", ".join(about["splits"])
        table.append({"task": task, "splits": splits, **counts, "in documents": about["documents"]})
    total = {column: sum(row[column] for row in table) for column in COLUMNS}
    return [{"task": ANY, "splits": "", **total, "in documents": documents}, *table]
