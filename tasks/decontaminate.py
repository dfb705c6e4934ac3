"""Decontaminate: drop documents that share long runs of words with GLUE's evaluation data, or cut those passages.

Reads   the parts of a corpus; the validation and test sentences of the tasks that the model will be scored on.
Writes  part-00000.parquet …  the same parts without those documents or passages, in the same order
        contaminated.jsonl    a few of the documents found for each task: the shared words, and the sentence with them
"""

import json
import logging
import shutil
from collections import Counter
from collections.abc import Iterator
from itertools import chain, pairwise
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import xxhash
from pydantic import Field

from model import InputError
from tasks.corpus import local
from tasks.corpus.parts import SCHEMA, Document, Tally, add_up, count, parts_of, smallest_of_each, tables, writer
from tasks.glue import data as glue
from tasks.glue.sentences import sentences
from tasks.glue.tasks import HUB_GLUE, TASKS, evaluation_splits
from tasks.stage import Params, stage
from tasks.store import WORK, Artifact
from tasks.text.ngrams import Index, Match, Sentences, write_index
from tasks.workers.mapping import over_parts

SAMPLES, SAMPLE_CHARACTERS, CONTEXT = 5, 600, 100  # documents of each task; characters shown, and on either side
ANY = "all"  # the row of all tasks together
COLUMNS = {
    "sentences": "sentences", "too short": "too_short", "n-grams": "ngrams", "sentences found": "sentences_found",
}  # fmt: skip
EvaluationTask = Literal["cola", "sst2", "mrpc", "stsb", "qqp", "mnli", "qnli", "rte", "wnli"]
Splits = dict[str, dict[str, list[Path]]]  # files by task and split
log = logging.getLogger(__name__)


class Decontaminate(Params):
    """What to do with documents that contain text of the evaluation data."""

    method: Literal["drop", "cut", "none"] = Field(
        "drop",
        description="drop: documents that share a run of words with a validation or test sentence; "
        "cut: only those words.",
    )
    words: int = Field(
        13, ge=5, le=50, description="Length of such a run, in words (13 as in appendix C of the GPT-3 paper)."
    )
    data: str = Field(
        "",
        description="The sentences: 'nyu-mll/glue' or a directory; 'probes': no search; '': as finetune.data.",
    )
    tasks: list[EvaluationTask] = Field(
        ["cola", "sst2", "mrpc", "stsb", "qqp", "mnli", "qnli", "rte", "wnli"],
        min_length=1,
        description="Tasks whose sentences are searched for, if data has them.",
    )

    def evaluation(self) -> tuple[Splits, str]:
        """The files with the sentences; and if there are none, why. Raises InputError for a folder without any."""
        if self.method == "none":
            return {}, "decontaminate.method is 'none'"
        if self.data == "probes":
            return {}, "the probes are made of held-out documents of this corpus"
        if not self.data:
            raise InputError(
                "decontaminate.data is empty. Set it, as finetune.data, to nyu-mll/glue, a directory or probes."
            )
        files = glue.evaluation_files(self.data, self.tasks)
        return files, "" if files else (
            f"{self.data} is not at hand: not all of it could be had from the hub or its cache on this machine"
        )

    @classmethod
    def usual(cls) -> dict:
        """The defaults of the parameters that do not depend on the downstream data."""
        return cls().model_dump(mode="json", include={"method", "words"})

    def identity(self) -> dict:
        """Digests of local files, or the splits of the hub's revision; or why there is nothing to search for."""
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
        """Read the sentences once, so that errors in them are reported before the corpus is read."""
        for _ in evaluation_sentences(self.evaluation()[0]):
            pass


def evaluation_sentences(files: Splits) -> Iterator[Sentences]:
    """The sentences in these files. Raises InputError for files without the texts of their task."""
    for task, splits in files.items():
        for split, paths in splits.items():
            for column, row, texts in sentences(paths, task):
                yield Sentences(task, split, column, row, texts)


def merged(matches: list[Match]) -> list[tuple[int, int]]:
    """The passages that matches cover, as the places of their first characters and the ends."""
    passages: list[tuple[int, int]] = []
    for start, end, _ in sorted(matches):
        if passages and start <= passages[-1][1]:
            first, last = passages.pop()
            start, end = first, max(end, last)
        passages.append((start, end))
    return passages


def without(text: str, matches: list[Match]) -> str:
    """The text without the passages that matches cover."""
    borders = [0, *chain.from_iterable(merged(matches)), len(text)]
    return "".join(text[start:end] for start, end in list(pairwise(borders))[::2])


def cut(text: str, matches: list[Match], index: Index) -> str:
    """The text without the words it shares, again until none are left: a cut makes the words around it neighbours."""
    while matches:
        text = without(text, matches)
        matches = index.find([text]).get(0, [])
    return text


def sample(document: Document, matches: list[Match], index: Index, task: str) -> dict:
    """The first passage that a document shares with a task, for people to read."""
    of_task = [match for match in matches if task in index.tasks_of(match.gram)]
    start, end = merged(of_task)[0]
    owners = (index.sentence(owner) for owner in index.owners_of(min(of_task).gram).tolist())
    sentence = next(owner for owner in owners if owner["task"] == task)
    return {
        **{name: sentence[name] for name in ("task", "split", "row", "column")},
        "sentence": sentence["text"][:SAMPLE_CHARACTERS],
        "id": document.id,
        "source": document.source,
        "before": document.text[max(0, start - CONTEXT) : start],
        "shared": document.text[start:end][:SAMPLE_CHARACTERS],
        "after": document.text[end : end + CONTEXT],
    }


def clean_part(part: Path, folder: Path, method: str, out: Path) -> dict:
    """Write a part without what it shares with the sentences indexed in `folder`; return counts and samples."""
    index, kept, dropped, shortened = Index(folder), Tally(), Tally(), Counter(documents=0, characters=0)
    documents, grams, samples = Counter(), set(), []
    with writer(out / part.name) as file:
        for table in tables(part):
            texts = table["text"].to_pylist()
            keep = np.ones(len(texts), dtype=bool)
            matched = index.find(texts)
            for row, matches in matched.items():
                document = Document(**table.slice(row, 1).to_pylist()[0])
                own = {match.gram for match in matches}
                tasks = {task for gram in own for task in index.tasks_of(gram)}
                grams |= own
                documents.update([ANY, *tasks])
                digest = xxhash.xxh3_64_intdigest(document.text.encode())
                samples += [(task, digest, document.id, sample(document, matches, index, task)) for task in tasks]
                left = cut(document.text, matches, index) if method == "cut" else ""
                keep[row] = any(map(str.isalnum, left))
                if keep[row]:
                    shortened.update(documents=1, characters=len(document.text) - len(left))
                    texts[row] = left
            samples = smallest_of_each(samples, 1, SAMPLES)  # of each task
            count(dropped, table.filter(pa.array(~keep)))
            if matched and method == "cut":
                column = table.column_names.index("text")
                table = table.set_column(column, SCHEMA.field("text"), pa.array(texts, pa.large_string()))
            rest = table.filter(pa.array(keep))
            count(kept, rest)
            if len(rest):
                file.write_table(rest)
    owners = [index.owners_of(gram) for gram in grams]
    np.save(folder / f"{part.stem}.found.npy", np.unique(np.concatenate([np.zeros(0, np.int64), *owners])))
    return {
        "kept": kept.counts(),
        "dropped": dropped.counts(),
        "cut": dict(shortened),
        "documents": dict(documents),
        "samples": samples,
    }


def pass_on(corpus: Artifact, why: str, wanted: bool, out: Path) -> dict:
    """Copy the corpus unchanged, since there is nothing to search for. `wanted`: the user asked for a search."""
    problem, level = (glue.hub_problem(), logging.WARNING) if wanted else ("", logging.INFO)
    log.log(level, "Skipping decontamination: %s", f"{why}. {problem}".strip())
    for part in parts_of(corpus):  # not linked: damage to one artifact must not damage the other
        shutil.copyfile(part, out / part.name)
    counts = {name: corpus.stats[name] for name in ("parts", *Tally().counts())}
    about = {"checked": False, "why": why}
    return {**counts, "dropped": {"contaminated": Tally().counts()}, **about, "table": [about]}


@stage(version=1, resumes=True)
def decontaminate(params: Decontaminate, corpus: Artifact, out: Path) -> dict:
    """Drop or cut text that the tasks' evaluation data has too; count it by task, and keep samples."""
    files, why = params.evaluation()
    if why:
        return pass_on(corpus, why, params.method != "none" and params.data != "probes", out)
    if missing := not_at_hand(files, params.tasks):
        log.warning("Skipping tasks whose data is unavailable: %s.", ", ".join(missing))
    work, parts = out / WORK, parts_of(corpus)
    work.mkdir(exist_ok=True)
    counts = write_index(evaluation_sentences(files), list(files), params.words, work)
    jobs = [(part, work, params.method, out) for part in parts]
    # cleaned-2: drafts of earlier versions have samples of another form in `cleaned`
    results = over_parts(clean_part, jobs, work / "cleaned-2", "decontaminate")
    owners = [np.load(work / f"{part.stem}.found.npy") for part in parts]
    sentences_found = Index(work).sentences_by_task(np.unique(np.concatenate(owners)))
    documents = sum((Counter(result["documents"]) for result in results), Counter())
    tasks = {task: {"splits": list(splits), **counts[task]} for task, splits in files.items()}
    for task, about in tasks.items():
        about |= {"sentences_found": sentences_found[task], "documents": documents[task]}
    samples = smallest_of_each((sample for result in results for sample in result["samples"]), 1, SAMPLES)
    write_samples(samples, out / "contaminated.jsonl")
    stats = {"parts": len(parts), **add_up([r["kept"] for r in results])}
    stats["dropped"] = {"contaminated": add_up([r["dropped"] for r in results])}
    if params.method == "cut":
        stats["cut"] = {what: sum(r["cut"][what] for r in results) for what in ("documents", "characters")}
    about = {"checked": True, "words": params.words, "documents_found": documents[ANY], "not_at_hand": missing}
    return {**stats, **about, "tasks": tasks, "table": rows(tasks, documents[ANY])}


def in_order(tasks: list[str]) -> list[str]:
    """The tasks in the order of TASKS, each once."""
    return [task for task in TASKS if task in tasks]


def not_at_hand(files: Splits, tasks: list[str]) -> list[str]:
    """The evaluation splits of the tasks that are not among the files, as task/split."""
    wanted = [(task, split) for task in in_order(tasks) for split in evaluation_splits(task)]
    return [f"{task}/{split}" for task, split in wanted if split not in files.get(task, {})]


def write_samples(samples: list[tuple], path: Path) -> None:
    """Write samples, the tasks in the order of TASKS."""
    with path.open("w", encoding="utf-8") as file:
        for _, _, _, shown in sorted(samples, key=lambda sample: list(TASKS).index(sample[0])):
            file.write(json.dumps(shown, ensure_ascii=False) + "\n")


def rows(tasks: dict[str, dict], documents: int) -> list[dict]:
    """The counts as a table: the sum, then a row for each task; a document can be found for several tasks."""
    table = []
    for name in (ANY, *tasks):
        every = name == ANY
        of = list(tasks.values()) if every else [tasks[name]]
        row = {"task": name, "splits": "" if every else ", ".join(tasks[name]["splits"])}
        row |= {column: sum(about[key] for about in of) for column, key in COLUMNS.items()}
        table.append(row | {"in documents": documents if every else tasks[name]["documents"]})
    return table
