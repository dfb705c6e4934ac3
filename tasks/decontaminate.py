"""Decontaminate: drop documents that share long runs of words with GLUE's evaluation data.

Reads   the parts of a corpus; the validation and test sentences of the tasks that the model will be scored on.
Writes  part-00000.parquet …  the same parts without those documents, in the same order
        contaminated.jsonl    a few of the documents found for each task: the shared words, and the sentence with them
"""

import json
import logging
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import pyarrow as pa
import xxhash
from pydantic import Field

from model.errors import InputError
from model.wording import counted
from tasks.corpus.parts import Document, Tally, add_up, count, link, parts_of, smallest_of_each, tables, writer
from tasks.glue import data as glue
from tasks.glue import reading as labelled
from tasks.glue.own import Definition, by_name, definitions_in, name_or_definition
from tasks.glue.table import HUB_GLUE, TASKS, evaluation_splits
from tasks.stage import Params, stage
from tasks.store.artifacts import WORK, Artifact
from tasks.store.manifests import known_digest
from tasks.text import matching
from tasks.text.ngrams import Index, passage, write_index
from tasks.workers.jobs import over_parts

SAMPLES, SAMPLE_CHARACTERS, CONTEXT = 5, 600, 100  # documents of each task; characters shown, and on either side
AT_ONCE = 1 << 16  # sentences in memory in all their forms
ANY = "all"  # the row of all tasks together
MUCH = 0.05  # of the characters, before what is dropped is warned of
COLUMNS = {
    "sentences": "sentences", "too short": "too_short", "n-grams": "ngrams", "sentences found": "sentences_found",
}  # fmt: skip
EvaluationTask = Literal["cola", "sst2", "mrpc", "stsb", "qqp", "mnli", "qnli", "rte", "wnli"]
Splits = dict[str, dict[str, list[Path]]]  # files by task and split
log = logging.getLogger(__name__)


class Decontaminate(Params):
    """Which documents are dropped: those that share a run of words with a validation or test sentence."""

    words: int = Field(
        13,
        ge=5,
        le=50,
        description="Words of such a run (13 as in the GPT-3 paper); a Chinese character is half a word.",
    )
    data: str = Field(
        "",
        description="The sentences: 'nyu-mll/glue' or a directory; 'probes': no search; '': as finetune.data.",
    )
    tasks: list[name_or_definition(EvaluationTask)] = Field(
        list(get_args(EvaluationTask)),
        min_length=1,
        description="Tasks whose sentences are searched for, if data has them; with those defined in finetune.tasks.",
    )

    def evaluation(self) -> tuple[Splits, str]:
        """GLUE's files with the sentences; and if there are none, why. Raises InputError for a folder without any."""
        if self.data == "probes":
            return {}, "the probes are made of held-out documents of this corpus"
        names = [task for task in self.tasks if isinstance(task, str)]
        if not names or (not self.data and definitions_in(self.tasks)):
            return {}, "no task of GLUE is asked for"
        if not self.data:
            raise InputError(
                "decontaminate.data is empty. Set it, as finetune.data, to nyu-mll/glue, a directory or probes."
            )
        files = glue.evaluation_files(self.data, names)
        return files, "" if files else (
            f"{self.data} is not at hand: not all of it could be had from the hub or its cache on this machine"
        )

    @classmethod
    def usual(cls) -> dict:
        """The defaults of the parameters that do not depend on the downstream data."""
        return cls().model_dump(mode="json", include={"words"})

    def identity(self) -> dict:
        """Digests of local files, or the splits of the hub's revision; or why there is nothing to search for."""
        files, why = self.evaluation()
        own = {task.name: labelled.texts_identity(task) for task in definitions_in(self.tasks)}
        of_own = {"own": own} if own else {}
        if why:
            return {"unchecked": why} | ({"words": self.words} | of_own if own else {})
        if self.data == HUB_GLUE.repository:
            about = {"repository": self.data, "revision": HUB_GLUE.revision}
            about["splits"] = {task: list(splits) for task, splits in files.items()}
        else:
            about = {
                task: {split: [known_digest(p) for p in paths] for split, paths in splits.items()}
                for task, splits in files.items()
            }
        tasks = [task for task in TASKS if task in self.tasks]
        return {"words": self.words, "version": matching.VERSION, "tasks": tasks, "data": about} | of_own

    def check(self) -> None:
        """Read the sentences once, so that errors in them are reported before the corpus is read."""
        for _ in evaluation_sentences(self.evaluation()[0], definitions_in(self.tasks)):
            pass


def evaluation_sentences(
    files: Splits, own: Iterable[Definition] = ()
) -> Iterator[tuple[str, str, str, int, list[str]]]:
    """The sentences in these files and of these tasks, many at a time: task, split, column, row of the first, texts.

    Raises InputError for files without the texts of their task.
    """
    of_glue = ((task, *batch) for task in files for batch in labelled.sentences(by_name(task, ""), files[task]))
    of_own = ((task.name, *batch) for task in own for batch in labelled.sentences(task))
    for task, split, column, row, texts in chain(of_glue, of_own):
        for start in range(0, len(texts), AT_ONCE):
            yield task, split, column, row + start, texts[start : start + AT_ONCE]


def sample(document: Document, found: list[tuple[int, int]], index: Index, task: str) -> dict:
    """The first passage that a document shares with a task, for people to read; `found`: as `Index.find` has them."""
    own = [run for run in found if task in index.sentences_of([run[1]])["task"].to_pylist()]
    start, end = passage(document.text, [first for first, _ in own], index.n)
    sentence = next(row for row in index.sentences_of([own[0][1]]).to_pylist() if row["task"] == task)
    return {
        **{name: sentence[name] for name in ("task", "split", "row", "column")},
        "sentence": sentence["text"][:SAMPLE_CHARACTERS],
        "id": document.id,
        "source": document.source,
        "before": document.text[max(0, start - CONTEXT) : start],
        "shared": document.text[start:end][:SAMPLE_CHARACTERS],
        "after": document.text[end : end + CONTEXT],
    }


def clean_part(part: Path, folder: Path, words: int, out: Path) -> dict:
    """Write a part without the documents that share a run of words with a sentence in the index in `folder`.

    Returns counts, the n-grams found, and samples.
    """
    index, kept, dropped = Index(folder, words), Tally(), Tally()
    documents, grams, samples, clean = Counter(), set(), [], []
    for table in tables(part):
        found = index.find(table["text"].to_pylist())
        for row, runs in found.items():
            document = Document(**table.slice(row, 1).to_pylist()[0])
            own = {gram for _, gram in runs}
            tasks = set(index.sentences_of(own)["task"].to_pylist())
            grams |= own
            documents.update([ANY, *tasks])
            digest = xxhash.xxh3_64_intdigest(document.text.encode())
            samples += [(task, digest, document.id, (document, runs)) for task in tasks]
        samples = smallest_of_each(samples, 1, SAMPLES)  # of each task
        keep = np.ones(len(table), dtype=bool)
        keep[list(found)] = False
        clean.append(pa.array(keep))
        count(kept, table.filter(clean[-1]))
        count(dropped, table.filter(pa.array(~keep)))
    if not documents:
        link(part, out / part.name)
    else:
        with writer(out / part.name) as file:
            for table, rows in zip(tables(part), clean, strict=True):
                if len(rest := table.filter(rows)):
                    file.write_table(rest)
    counts = {"kept": kept.counts(), "dropped": dropped.counts(), "documents": dict(documents)}
    shown = [(task, *rest, sample(*about, index, task)) for task, *rest, about in samples]
    return counts | {"grams": sorted(grams), "samples": shown}


def pass_on(corpus: Artifact, why: str, probes: bool, out: Path) -> dict:
    """Pass on the corpus unchanged, since there is nothing to search for: a problem unless there are only `probes`."""
    problem, level = ("", logging.INFO) if probes else (glue.hub_problem(HUB_GLUE), logging.WARNING)
    log.log(level, "Skipping decontamination: %s", f"{why}. {problem}".strip())
    for part in parts_of(corpus):
        link(part, out / part.name)
    counts = {name: corpus.stats[name] for name in ("parts", *Tally().counts())}
    about = {"checked": False, "why": why}
    return {**counts, "dropped": {"contaminated": Tally().counts()}, **about, "table": [about]}


def warn_of_much(kept: int, dropped: int, documents: Counter, words: int) -> None:
    """Log a warning if many characters are dropped. `documents`: those that were found, by task and of ANY."""
    if dropped > MUCH * (kept + dropped):
        share, tasks = 100 * dropped / (kept + dropped), ", ".join(task for task in documents if task != ANY)
        log.warning(
            "%s with %.0f %% of the characters are dropped: they share %d words in a row with rows that the model will "
            "be scored on (%s).",
            counted(documents[ANY], "document"), share, words, tasks,
        )  # fmt: skip


@stage(version=1, resumes=True)
def decontaminate(params: Decontaminate, corpus: Artifact, out: Path) -> dict:
    """Drop documents with text that the tasks' evaluation data has too; count them by task, and keep samples."""
    files, why = params.evaluation()
    own = definitions_in(params.tasks)
    if why and not own:
        return pass_on(corpus, why, params.data == "probes", out)
    if why:
        log.info("Only the texts of %s are searched for: %s.", ", ".join(task.name for task in own), why)
    asked = [] if why else params.tasks
    wanted = [(task, split) for task in TASKS if task in asked for split in evaluation_splits(task)]
    if missing := [f"{task}/{split}" for task, split in wanted if split not in files.get(task, {})]:
        log.warning("Skipping tasks whose data is unavailable: %s.", ", ".join(missing))
    work, parts = out / WORK, parts_of(corpus)
    work.mkdir(exist_ok=True)
    splits = {task: list(paths) for task, paths in files.items()}
    splits |= {task.name: list(dict.fromkeys(split for split, *_ in labelled.sentences(task))) for task in own}
    counts = write_index(evaluation_sentences(files, own), list(splits), params.words, work)
    jobs = [(part, work, params.words, out) for part in parts]
    results = over_parts(clean_part, jobs, work / "cleaned", "decontaminate")
    grams = sorted(set().union(*(result["grams"] for result in results)))
    sentences_found = Index(work, params.words).sentences_by_task(grams)
    documents = sum((Counter(result["documents"]) for result in results), Counter())
    tasks = {task: {"splits": of_task, **counts[task]} for task, of_task in splits.items()}
    for task, about in tasks.items():
        about |= {"sentences_found": sentences_found[task], "documents": documents[task]}
    samples = smallest_of_each((sample for result in results for sample in result["samples"]), 1, SAMPLES)
    with (out / "contaminated.jsonl").open("w", encoding="utf-8") as file:
        for _, _, _, shown in sorted(samples, key=lambda sample: list(splits).index(sample[0])):
            file.write(json.dumps(shown, ensure_ascii=False) + "\n")
    kept, dropped = (add_up([r[name] for r in results]) for name in ("kept", "dropped"))
    warn_of_much(kept["characters"], dropped["characters"], documents, params.words)
    return {
        "parts": len(parts),
        **kept,
        "dropped": {"contaminated": dropped},
        "checked": True,
        "words": params.words,
        "documents_found": documents[ANY],
        "not_at_hand": missing,
        "tasks": tasks,
        "table": tasks_table(tasks, documents[ANY]),
    }


def tasks_table(tasks: dict[str, dict], documents: int) -> list[dict]:
    """The counts as a table: the sum, then a row for each task; a document can be found for several tasks."""
    table = [
        {"task": task, "splits": ", ".join(about["splits"])}
        | {column: about[key] for column, key in COLUMNS.items()}
        | {"in documents": about["documents"]}
        for task, about in tasks.items()
    ]
    total = {column: sum(row[column] for row in table) for column in COLUMNS}
    return [{"task": ANY, "splits": "", **total, "in documents": documents}, *table]
