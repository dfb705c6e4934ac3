"""What holds for every stage from deduplicate to tokenize: counts add up, workers and interruptions change no byte."""

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import bytes_of, documents_of, interrupt, store_of_its_own, with_duplicates, write_jsonl
from prefect import Task

from tasks import decontaminate as decontaminate_stage
from tasks import deduplicate as deduplicate_stage
from tasks import filter as filter_stage
from tasks import measure as measure_stage
from tasks import tokenize as tokenize_stage
from tasks import vocabulary as vocabulary_stage
from tasks.corpus.parts import parts_of
from tasks.decontaminate import Decontaminate, decontaminate
from tasks.deduplicate import Deduplicate, deduplicate
from tasks.download import Download, download
from tasks.filter import Filter, filter
from tasks.measure import Measure, measure
from tasks.store.artifacts import Artifact, read_manifest
from tasks.store.publish import refresh
from tasks.text import minhash, sorted_files, substrings
from tasks.tokenize import Tokenize, tokenize
from tasks.vocabulary import Vocabulary, vocabulary

PLANTED = "Nobody at the harbour office could say when the second ferry to the outer islands was due."
JOBS = [  # stage, module and function of the job, keys in a range: so few that there are two jobs or more
    ("exact", deduplicate_stage, "digest_batch", 10**6),
    ("exact", deduplicate_stage, "match_digests", 100),
    ("exact", deduplicate_stage, "keep_rest", 10**6),
    ("minhash", minhash, "sign", 10**6),
    ("minhash", minhash, "pair_up", 200),
    ("minhash", minhash, "compare", 10**6),
    ("substring", substrings, "flatten", 10**6),
    ("substring", substrings, "match_anchors", 2000),
    ("substring", substrings, "extend", 10**6),
    ("substring", substrings, "hash_windows", 10**6),
    ("substring", substrings, "match_windows", 5000),
    ("substring", substrings, "cut_batch", 10**6),
    ("decontaminate", decontaminate_stage, "clean_part", 10**6),
    ("measure", measure_stage, "measure_part", 10**6),
    ("filter", filter_stage, "filter_part", 10**6),
    ("vocabulary", vocabulary_stage, "count_batch", 10**6),
    ("tokenize", tokenize_stage, "find_runs", 10**6),
    ("tokenize", tokenize_stage, "tokenize_part", 10**6),
]


class Made(NamedTuple):
    """A stage that was run, and the digests of what it wrote."""

    task: Task
    arguments: tuple
    digests: dict[str, str]

    def run(self) -> Artifact:
        return self.task.fn(*self.arguments)


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory, toy_texts: list[str]) -> Iterator[dict[str, Made]]:
    """All stages on text of two sources in many parts, with duplicates, and a sentence of CoLA in every ninth text."""
    folder = tmp_path_factory.mktemp("stages")
    (folder / "glue" / "cola").mkdir(parents=True)
    pq.write_table(pa.table({"sentence": [PLANTED], "label": [-1]}), folder / "glue" / "cola" / "validation.parquet")
    texts = [f"{text} {PLANTED}" if i % 9 == 0 else text for i, text in enumerate(with_duplicates(toy_texts))]
    for i in range(2):
        write_jsonl(folder / f"{i}.jsonl", texts[i * 400 : (i + 1) * 400], source=f"toy {i}")
    made: dict[str, Made] = {}

    def make(name: str, task: Task, *arguments: object) -> Artifact:
        artifact = task.fn(*arguments)
        made[name] = Made(task, arguments, bytes_of(artifact))
        return artifact

    with store_of_its_own(folder / "artifacts"):
        files = [str(folder / "?.jsonl")]
        corpus = download.fn(Download(source="files", files=files, documents=0, part_megabytes=0.045))
        for methods in (["minhash"], ["substring"], ["exact", "minhash", "substring"], ["exact"]):
            unique = make("+".join(methods), deduplicate, Deduplicate(methods=methods), corpus)
        asked = Decontaminate(data=str(folder / "glue"))
        clean = make("decontaminate", decontaminate, asked, unique)
        measures = make("measure", measure, Measure(vocabulary_entries=400), clean)
        kept = make("filter", filter, Filter(max_tokens_per_char=0.35), clean, measures)
        words = make("vocabulary", vocabulary, Vocabulary(entries=300), kept)
        make("tokenize", tokenize, Tokenize(length=16, heldout_fraction=0.1, max_sequences=100), kept, words)
        yield made


@pytest.mark.parametrize("name", ["exact", "exact+minhash+substring", "decontaminate", "filter"])
def test_kept_dropped_and_cut_are_all_that_was_seen(stages: dict[str, Made], name: str):
    made = stages[name].run()
    before = stages[name].arguments[1]
    stats = made.stats
    documents = list(documents_of(made))
    assert [part.name for part in parts_of(made)] == [part.name for part in parts_of(before)]
    assert stats["parts"] == before.stats["parts"] > 5
    assert {s: c["documents"] for s, c in stats["by_source"].items()} == Counter(d.source for d in documents)
    assert stats["characters"] == sum(len(d.text) for d in documents)
    outcomes = [stats, *stats["dropped"].values()]
    for source, counts in before.stats["by_source"].items():
        of_source = [outcome["by_source"].get(source, {}).get("documents", 0) for outcome in outcomes]
        assert sum(of_source) == counts["documents"]
    cut = stats.get("substring", {}).get("cut", {"characters": 0})
    assert cut["characters"] + sum(outcome["documents"] for outcome in outcomes[1:]) > 0
    assert sum(outcome["characters"] for outcome in [*outcomes, cut]) == before.stats["characters"]


@pytest.mark.parametrize("name", ["exact+minhash+substring", "measure", "tokenize"])
def test_one_and_two_workers_write_the_same_bytes(stages: dict[str, Made], monkeypatch, name: str):
    refresh(stages[name].run())
    monkeypatch.setenv("CRAM_WORKERS", "2")
    assert bytes_of(stages[name].run()) == stages[name].digests


@pytest.mark.parametrize(("name", "module", "job", "entries"), JOBS, ids=[job[2] for job in JOBS])
def test_an_interruption_changes_no_byte_and_repeats_no_finished_job(stages, monkeypatch, name, module, job, entries):
    monkeypatch.setattr(sorted_files, "ENTRIES", entries)
    artifact = stages[name].run()
    refresh(artifact)
    calls = interrupt(monkeypatch, module, job, artifact)
    with pytest.raises(KeyboardInterrupt):
        stages[name].run()
    assert read_manifest(artifact) is None
    assert bytes_of(stages[name].run()) == stages[name].digests
    assert calls[1] == calls[2]
    assert len(set(map(repr, calls))) == len(calls) - 1


def test_a_finished_method_and_a_trained_measuring_vocabulary_are_not_made_again(stages: dict[str, Made], monkeypatch):
    for name, module, job, done in (
        ("exact+minhash+substring", substrings, "flatten", JOBS[:6]),
        ("measure", measure_stage, "measure_part", [("", measure_stage, "train_wordpiece", 0)]),
    ):
        artifact = stages[name].run()
        refresh(artifact)
        with monkeypatch.context() as patch:
            interrupt(patch, module, job, artifact, at=1)
            with pytest.raises(KeyboardInterrupt):
                stages[name].run()
        for _, module, job, _ in done:
            monkeypatch.setattr(module, job, None)
        assert bytes_of(stages[name].run()) == stages[name].digests
