"""Decontaminate: drop documents, or cut passages out of them, that share long runs of words with GLUE's evaluation data.

Reads   the parts of a corpus; the validation and test sentences of the tasks that the model will be scored on.
Writes  part-00000.parquet …  the same parts without them, in the same order
        contaminated.jsonl    a few of the documents found for each task: the words shared, and the sentence that has them too
"""

import json
import logging
import shutil
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import xxhash
from pydantic import Field

from model import InputError
from tasks.corpus import local
from tasks.corpus.parts import SCHEMA, Document, Tally, add_up, count, parts_of, tables, writer
from tasks.glue import data as glue
from tasks.glue.tasks import HUB_GLUE, TASKS, evaluation_splits
from tasks.stage import Params, stage
from tasks.store import WORK, Artifact
from tasks.text.ngrams import Index, Match, sentences, write_index
from tasks.workers.mapping import over_parts

SAMPLES, SAMPLE_CHARACTERS, CONTEXT = 5, 600, 100  # documents of each task; of what they share; on either side of it
ANY = "all"  # the row of all tasks together
EvaluationTask = Literal["cola", "sst2", "mrpc", "stsb", "qqp", "mnli", "qnli", "rte", "wnli"]
log = logging.getLogger(__name__)


class Decontaminate(Params):
    """What to do with text that stands in the downstream data too."""

    method: Literal["drop", "cut", "none"] = Field(
        "drop",
        description="drop: documents that share a run of words with a validation or test sentence; cut: only those words.",
    )
    words: int = Field(
        13, ge=5, le=50, description="Length of such a run, in words (13 as in appendix C of the GPT-3 paper)."
    )
    data: str = Field(
        "",
        description="The sentences: 'nyu-mll/glue', a directory, or 'probes' (none), as in finetune.data; '': the same.",
    )
    tasks: list[EvaluationTask] = Field(
        ["cola", "sst2", "mrpc", "stsb", "qqp", "mnli", "qnli", "rte", "wnli"],
        min_length=1,
        description="Tasks to look for, as far as data has them.",
    )

    def evaluation(self) -> tuple[dict[str, dict[str, list[Path]]], str]:
        """The files to look for, by task and split; and where there are none, why."""
        if self.method == "none":
            return {}, "decontaminate.method is 'none'"
        if self.data == "probes":
            return {}, "the probes are made of held-out documents of this corpus"
        if not self.data:
            raise InputError(
                "decontaminate.data is empty. Expected what finetune.data says: nyu-mll/glue, a directory or probes."
            )
        files = glue.evaluation_files(self.data, self.tasks)
        return files, "" if files else (
            f"{self.data} is not at hand: not all of it could be had from the hub or its cache on this machine"
        )

    @classmethod
    def usual(cls) -> dict:
        """The defaults of what is independent of the downstream data."""
        return cls().model_dump(mode="json", include={"method", "words"})

    def identity(self) -> dict:
        """Digests of local files, or the splits of the hub's revision; or why nothing is looked for."""
        files, why = self.evaluation()
        if why:
            return {"unchecked": why}
        if self.data == HUB_GLUE.repository:
            about = {"repository": self.data, "revision": HUB_GLUE.revision}
            about["splits"] = {task: list(splits) for task, splits in files.items()}
        else:
            about = {
                task: {split: [local.file_digest(p) for p in paths] for split, paths in splits.items()}
                for task, splits in files.items()
            }
        return {"method": self.method, "words": self.words, "tasks": in_order(self.tasks), "data": about}

    def check(self) -> None:
        """Read the sentences once, so that what is wrong with them is known before the corpus is read."""
        for task, splits in self.evaluation()[0].items():
            for paths in splits.values():
                for _ in sentences(paths, task):
                    pass


def merged(matches: list[Match]) -> list[tuple[int, int]]:
    """The passages that matches cover."""
    found: list[list[int]] = []
    for start, end, _ in sorted(matches):
        if found and start <= found[-1][1]:
            found[-1][1] = max(end, found[-1][1])
        else:
            found.append([start, end])
    return [(start, end) for start, end in found]


def without(text: str, matches: list[Match]) -> str:
    """The text but for the passages that matches cover."""
    borders = [0, *(border for passage in merged(matches) for border in passage), len(text)]
    return "".join(text[start:end] for start, end in list(pairwise(borders))[::2])


def cut(text: str, matches: list[Match], index: Index) -> str:
    """The text without what it shares, nor what it then shares since the words on both sides of a cut are neighbours now."""
    while matches:
        text = without(text, matches)
        matches = index.find([text]).get(0, [])
    return text


def sample(document: Document, matches: list[Match], index: Index, task: str) -> dict:
    """The first passage that a document shares with a task, for people to read."""
    of_task = [match for match in matches if task in index.tasks_of(match.gram)]
    start, end = merged(of_task)[0]
    owners = (index.sentence(owner) for owner in index.owners_of(min(of_task).gram).tolist())
    sentence = next(found for found in owners if found["task"] == task)
    return {
        **{name: sentence[name] for name in ("task", "split", "row", "column")},
        "sentence": sentence["text"][:SAMPLE_CHARACTERS],
        "id": document.id,
        "source": document.source,
        "before": document.text[max(0, start - CONTEXT) : start],
        "shared": document.text[start:end][:SAMPLE_CHARACTERS],
        "after": document.text[end : end + CONTEXT],
    }


class Found:
    """What stands in a part and in the sentences: documents by task, n-grams, and the samples whose digests are smallest."""

    def __init__(self, index: Index) -> None:
        self.index, self.documents, self.grams = index, Counter(), set()
        self.samples: dict[str, list[tuple[int, str, dict]]] = {task: [] for task in index.tasks}

    def add(self, document: Document, matches: list[Match]) -> None:
        """Count a document."""
        grams = {match.gram for match in matches}
        tasks = {task for gram in grams for task in self.index.tasks_of(gram)}
        self.grams |= grams
        self.documents.update([ANY, *tasks])
        order = xxhash.xxh3_64_intdigest(document.text.encode()), document.id
        for task in tasks:
            held = self.samples[task]
            if len(held) < SAMPLES or order < held[-1][:2]:
                held.append((*order, sample(document, matches, self.index, task)))
                self.samples[task] = sorted(held, key=lambda one: one[:2])[:SAMPLES]


def clean_part(part: Path, folder: Path, params: Decontaminate, tasks: list[str], out: Path) -> dict:
    """Write a part without what it shares with the sentences indexed in `folder`; return counts and samples."""
    index = Index(folder, params.words, tasks)
    found, kept, dropped, shortened = Found(index), Tally(), Tally(), Counter(documents=0, characters=0)
    with writer(out / part.name) as file:
        for table in tables(part):
            texts = table["text"].to_pylist()
            keep = np.ones(len(texts), dtype=bool)
            matched = index.find(texts)
            for row, matches in matched.items():
                found.add(Document(**table.slice(row, 1).to_pylist()[0]), matches)
                left = cut(texts[row], matches, index) if params.method == "cut" else ""
                keep[row] = any(map(str.isalnum, left))
                if keep[row]:
                    shortened.update(documents=1, characters=len(texts[row]) - len(left))
                    texts[row] = left
            count(dropped, table.filter(pa.array(~keep)))
            if matched and params.method == "cut":
                table = table.set_column(
                    table.column_names.index("text"), SCHEMA.field("text"), pa.array(texts, pa.large_string())
                )
            rest = table.filter(pa.array(keep))
            count(kept, rest)
            if len(rest):
                file.write_table(rest)
    owners = [index.owners_of(gram) for gram in found.grams]
    np.save(folder / f"{part.stem}.found.npy", np.unique(np.concatenate([np.zeros(0, np.int64), *owners])))
    return {
        "kept": kept.counts(),
        "dropped": dropped.counts(),
        "cut": dict(shortened),
        "documents": dict(found.documents),
        "samples": found.samples,
    }


def pass_on(params: Decontaminate, corpus: Artifact, why: str, out: Path) -> dict:
    """Give the corpus as it is, in copies: damage to one artifact must not be damage to another."""
    wanted = params.method != "none" and params.data != "probes"
    unreachable = glue.hub_problem() if wanted and params.data == HUB_GLUE.repository else ""
    level = logging.WARNING if wanted else logging.INFO
    log.log(level, "Skipping decontamination: %s. %s", why, unreachable)
    for part in parts_of(corpus):
        shutil.copyfile(part, out / part.name)
    counts = {name: corpus.stats[name] for name in ("parts", *Tally().counts())}
    about = {"checked": False, "why": why}
    return {**counts, "dropped": {"contaminated": Tally().counts()}, **about, "table": [about]}


@stage(version=1, resumes=True)
def decontaminate(params: Decontaminate, corpus: Artifact, out: Path) -> dict:
    """Drop or cut what stands in the evaluation data of the tasks too; count it by task, and keep samples."""
    files, why = params.evaluation()
    if why:
        return pass_on(params, corpus, why, out)
    work, found = out / WORK, parts_of(corpus)
    work.mkdir(exist_ok=True)
    counts, missing = write_index(files, params.words, work), not_at_hand(files, params.tasks)
    if missing:
        log.warning("Skipping tasks whose data is unavailable: %s.", ", ".join(missing))
    jobs = [(part, work, params, list(files), out) for part in found]
    results = over_parts(clean_part, jobs, work / "cleaned", "decontaminate")
    sentences_found = [np.load(work / f"{part.stem}.found.npy") for part in found]
    of_task = Index(work, params.words, list(files)).sentences_by_task(np.unique(np.concatenate(sentences_found)))
    documents = sum((Counter(result["documents"]) for result in results), Counter())
    for task, about in counts.items():
        about |= {"sentences_found": of_task[task], "documents": documents[task]}
    write_samples([result["samples"] for result in results], out / "contaminated.jsonl")
    stats = {"parts": len(found), **add_up([r["kept"] for r in results])}
    stats["dropped"] = {"contaminated": add_up([r["dropped"] for r in results])}
    if params.method == "cut":
        stats["cut"] = {what: sum(r["cut"][what] for r in results) for what in ("documents", "characters")}
    about = {"checked": True, "words": params.words, "documents_found": documents[ANY], "not_at_hand": missing}
    return {**stats, **about, "tasks": counts, "table": rows(counts, documents[ANY])}


def in_order(tasks: list[str]) -> list[str]:
    """Tasks in one order, each once."""
    return [task for task in TASKS if task in tasks]


def not_at_hand(files: dict[str, dict[str, list[Path]]], tasks: list[str]) -> list[str]:
    """The evaluation splits of the tasks that are not among the files, as task/split."""
    wanted = [(task, split) for task in in_order(tasks) for split in evaluation_splits(task)]
    return [f"{task}/{split}" for task, split in wanted if split not in files.get(task, {})]


def write_samples(of_parts: list[dict[str, list]], path: Path) -> None:
    """Write the few samples of each task whose digests are smallest."""
    with path.open("w", encoding="utf-8") as file:
        for task in of_parts[0] if of_parts else ():
            order = sorted((tuple(one) for samples in of_parts for one in samples[task]), key=lambda one: one[:2])
            for _, _, told in order[:SAMPLES]:
                file.write(json.dumps(told, ensure_ascii=False) + "\n")


def rows(counts: dict[str, dict], documents: int) -> list[dict]:
    """The counts as a table, a row a task, the sum first; a document can be found for several tasks."""
    summed = {"splits": [], "documents": documents}
    summed |= {
        what: sum(c[what] for c in counts.values()) for what in ("sentences", "too_short", "ngrams", "sentences_found")
    }
    return [
        {
            "task": task,
            "splits": ", ".join(about["splits"]),
            "sentences": about["sentences"],
            "too short": about["too_short"],
            "n-grams": about["ngrams"],
            "sentences found": about["sentences_found"],
            "in documents": about["documents"],
        }
        for task, about in {ANY: summed, **counts}.items()
    ]
