"""A store, a Prefect home and a toy corpus of their own for the tests; nothing is read from or sent to a network."""

import atexit
import json
import os
import random
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:  # which must not be imported before the environment below is set
    from model.settings import Architecture
    from tasks.corpus.parts import Document
    from tasks.store.artifacts import Artifact

# A shell's background job ignores Ctrl-C, and one under nohup the end of its terminal; so would every process that a
# test starts.
for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, usual)

SCRATCH = tempfile.mkdtemp(prefix="cram-tests-")
atexit.register(shutil.rmtree, SCRATCH, ignore_errors=True)
for name in ("CRAM_DASK", "CRAM_TRACK"):
    os.environ.pop(name, None)
os.environ.update(  # before Prefect and torch are imported, which read some of these then
    CRAM_ARTIFACTS=f"{SCRATCH}/artifacts",
    PREFECT_HOME=f"{SCRATCH}/prefect",
    PREFECT_SERVER_ANALYTICS_ENABLED="false",
    PREFECT_LOGGING_TO_API_ENABLED="false",
    PREFECT_LOGGING_LEVEL="ERROR",
    DO_NOT_TRACK="1",
    HF_HUB_DISABLE_TELEMETRY="1",
    HF_HUB_DISABLE_PROGRESS_BARS="1",
    CRAM_WORKERS="1",
    CRAM_COMPILE="0",
    CRAM_DEVICE="cpu",
    CRAM_DTYPE="fp32",
    OMP_NUM_THREADS="1",  # tiny models: more threads wait for each other, on a busy machine most of the time
    MPLBACKEND="Agg",
)

SUBJECTS = ("the river", "an old clock", "her brother", "the committee", "a grey cat", "the model", "my neighbour")
VERBS = ("carried", "ignored", "measured", "described", "forgot", "followed", "repaired", "counted")
OBJECTS = ("the bridge", "a long letter", "every sentence", "the broken lamp", "some bread", "the last train", "a map")
ENDS = ("before the rain", "in the morning", "without a word", "for many years", "near the harbour", "by mistake")


def sentence(rng: random.Random) -> str:
    """A plain English sentence."""
    words = f"{rng.choice(SUBJECTS)} {rng.choice(VERBS)} {rng.choice(OBJECTS)} {rng.choice(ENDS)}"
    return words.capitalize() + "."


def document(rng: random.Random, sentences: int) -> str:
    """A document of so many sentences, with a word of its own, so that no two are the same."""
    own = "".join(rng.choice("abcdefghijklmnop") for _ in range(8))
    return f"This text is about {own}. " + " ".join(sentence(rng) for _ in range(sentences))


def write_jsonl(path: Path, texts: list, source: str = "toy") -> Path:
    """Write texts in the Pile's format."""
    rows = [json.dumps({"text": text, "meta": {"pile_set_name": source}}) for text in texts]
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")
    return path


def documents_in(part: Path) -> "Iterator[Document]":
    """The documents of a part, in order. Raises InputError as `tables` does."""
    from tasks.corpus.parts import Document, tables

    for rows in tables(part):
        yield from map(Document, *rows.to_pydict().values())


def documents_of(corpus: "Artifact") -> "Iterator[Document]":
    """All documents of a corpus, in order."""
    from tasks.corpus.parts import parts_of

    for part in parts_of(corpus):
        yield from documents_in(part)


def tiny_override(shard: Path, heldout_fraction: float = 0.3, **pretrain: object) -> dict:
    """An override that makes the demo recipe a matter of seconds, on one shard's text; `pretrain`: budget and unit."""
    layout = {"layers": 1, "hidden": 32, "heads": 2, "intermediate": 96}
    return {
        "download": {"source": "files", "files": [str(shard)], "megabytes": 0},
        "measure": {"vocabulary_entries": 400},
        "filter": {"max_tokens_per_char": 0.5},
        "vocabulary": {"entries": 400},
        "tokenize": {"length": 32, "heldout_fraction": heldout_fraction},
        "pretrain": {"architecture": layout, "batch_size": 8, **pretrain},
        "finetune": {"tasks": ["neighbours"], "epochs": 1, "max_tokens": 32, "baseline": False},
    }


def write_pairs(path: Path, number: int = 12) -> Path:
    """Write minimal pairs of two groups: a sentence, and its words in another order."""
    rng = random.Random(5)
    lines = ["good,bad,group"]
    for i in range(number):
        good = sentence(rng)
        bad = " ".join(reversed(good.split()))
        lines.append(f"{good},{bad},{'ab'[i % 2]}")
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def with_duplicates(texts: list[str]) -> list[str]:
    """The texts in some order, many of them more than once, and some that differ in one character."""
    rng = random.Random(5)
    near = [text + " " for text in texts[:40]] + [text.upper() for text in texts[40:60]] + ["x", "X", " x", "x\n"]
    drawn = rng.choices(texts, k=2 * len(texts)) + near + rng.choices(near, k=20)
    rng.shuffle(drawn)
    return drawn


def asked_for(*files: Path | str, **settings: object):
    """The parameters of a download of local files, or else of the source in `settings`; without a limit of its own."""
    from tasks.download import Download

    local = {"source": "files", "files": [str(file) for file in files]} if files else {}
    return Download(**{"documents": 0} | local | settings)


def downloaded(*files: Path | str, **settings: object):
    """The artifact of such a download."""
    from tasks.download import download

    return download.fn(asked_for(*files, **settings))


def refusal(*files: Path | str, **settings: object) -> str:
    """The one line with which such a download is refused; nothing is published."""
    from model.errors import InputError
    from tasks.store.artifacts import artifacts_of

    with pytest.raises(InputError) as refused:
        downloaded(*files, **settings)
    assert "\n" not in str(refused.value)
    assert artifacts_of("download") == []
    return str(refused.value)


def corpus_of(folder: Path, texts: list[str], part_megabytes: float = 0.008, source: str = "toy", words: int = 0):
    """The artifact of a download of these texts, in many small parts; of at most so many words, 0: of all."""
    shard = write_jsonl(folder / f"{source}.jsonl", texts, source)
    return downloaded(shard, part_megabytes=part_megabytes, max_lost=1, words=words)


def roughen(module):
    """Give no parameter of a module a value, like 0 or 1, that could hide a mistake; returns the module."""
    import torch

    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
    return module


def texts_of(corpus) -> list[str]:
    """The texts of a corpus, in order."""
    return [document.text for document in documents_of(corpus)]


def losses_of(corpus: "Artifact") -> list[dict]:
    """The records and files of a corpus that could not be read."""
    return [json.loads(line) for line in (corpus.path / "lost.jsonl").read_text(encoding="utf-8").splitlines()]


@contextmanager
def store_of_its_own(folder: Path) -> Iterator[None]:
    """For the fixtures of a module: `store` is that of a test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CRAM_ARTIFACTS", str(folder))
        yield


def check_golden(name: str, text: str) -> None:
    """Compare a text with that of golden/. `CRAM_UPDATE_GOLDEN=1` writes it there instead; then read git's diff."""
    path = Path(__file__).with_name("golden") / name
    if os.environ.get("CRAM_UPDATE_GOLDEN"):
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8"), f"Is the change of {name} intended? See check_golden."


def bytes_of(made) -> dict[str, str]:
    """The digests of an artifact's files."""
    return {file["path"]: file["sha256"] for file in made.manifest["files"]}


def interrupt(monkeypatch: pytest.MonkeyPatch, module, work: str, target, at: int = 2) -> list[tuple]:
    """Have a stage's job raise KeyboardInterrupt in its call number `at`, with its files cut in half.

    `target`: the artifact that the stage makes. Returns the calls' arguments.
    """
    from tasks.store.artifacts import draft_of

    calls = []
    job = getattr(module, work)
    draft = draft_of(target)

    def interrupted(*arguments) -> dict:
        calls.append(arguments)
        before = set(draft.rglob("*"))
        result = job(*arguments)
        if len(calls) == at:
            for file in filter(Path.is_file, set(draft.rglob("*")) - before):
                if file.stat().st_nlink == 1:  # or it is a file of another artifact, which nothing writes any more
                    os.truncate(file, file.stat().st_size // 2)
            raise KeyboardInterrupt
        return result

    monkeypatch.setattr(module, work, interrupted)
    return calls


def filtered(corpus, entries: int = 400, **settings):
    """The artifact of a filter, of documents measured with a vocabulary of so many entries."""
    from tasks.filter import Filter, filter
    from tasks.measure import Measure, measure

    return filter.fn(Filter(**settings), corpus, measure.fn(Measure(vocabulary_entries=entries), corpus))


def toy_tokens(root: Path, texts: list[str]) -> dict:
    """The artifacts of the stages from download to tokenize, of texts, one of them twice."""
    from tasks.decontaminate import Decontaminate, decontaminate
    from tasks.deduplicate import Deduplicate, deduplicate
    from tasks.tokenize import Tokenize, tokenize
    from tasks.vocabulary import Vocabulary, vocabulary

    corpus = corpus_of(root, [*texts, texts[0]], part_megabytes=1024, words=1_000_000)
    clean = decontaminate.fn(Decontaminate(data="probes"), deduplicate.fn(Deduplicate(), corpus))
    kept = filtered(clean, max_tokens_per_char=0.5)
    words = vocabulary.fn(Vocabulary(entries=400), kept)
    tokens = tokenize.fn(Tokenize(length=32, heldout_fraction=0.3, sort="random"), kept, words)
    return {"download": corpus, "filter": kept, "vocabulary": words, "tokens": tokens}


def toy_model(tokens: "Artifact", architecture: "Architecture") -> "Artifact":
    """A model of that architecture, pretrained on 10,000 tokens."""
    from tasks.pretrain import Pretrain, pretrain

    settings = {"budget": 10_000, "budget_unit": "tokens", "batch_size": 8, "learning_rate": 5e-3}
    return pretrain.fn(Pretrain(architecture=architecture, **settings), tokens)


@pytest.fixture(autouse=True)
def _several_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let toy parts be several batches, some of several parts."""
    from tasks.corpus import parts

    monkeypatch.setattr(parts, "BATCH", 8000)


@pytest.fixture(scope="session", autouse=True)
def _toy_runs_measure_all_their_text() -> Iterator[None]:
    """As a long run does; so short as they are, they would measure a part."""
    from model import heldout

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(heldout, "LEAST_CHARACTERS", 1_000_000)
        patch.setattr(heldout, "LEAST_OF_CURVE", 1)
        yield


@pytest.fixture(scope="session", autouse=True)
def _no_waiting_for_the_disk() -> Iterator[None]:
    """Let the system write when it likes: no test cuts the power, and they would wait thousands of times."""
    from tasks.workers import jobs

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda handle: None)
        patch.setattr(jobs.libc, "syncfs", lambda handle: 0)
        yield


@pytest.fixture
def rng() -> random.Random:
    """A random generator that starts the same for every test."""
    return random.Random(7)


@pytest.fixture(scope="session")
def toy_texts() -> list[str]:
    """300 short documents, no two the same."""
    rng = random.Random(11)
    return [document(rng, rng.randint(3, 12)) for _ in range(300)]


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty store for plain calls (`stage.fn`); runs through Prefect use the session's own."""
    monkeypatch.setenv("CRAM_ARTIFACTS", str(tmp_path / "artifacts"))
    return tmp_path / "artifacts"


@pytest.fixture
def transformers(monkeypatch: pytest.MonkeyPatch):
    """The package, which knows cram's models and looks nothing up on a network."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)  # it reads the environment at import only
    import transformers

    import model.hf  # noqa: F401

    return transformers


@pytest.fixture(scope="session")
def prefect_server() -> Iterator[None]:
    """A Prefect server of the tests, which flows of this process use."""
    from prefect.testing.utilities import prefect_test_harness

    with prefect_test_harness(server_startup_timeout=600):
        yield


@pytest.fixture(scope="session")
def real_data() -> Path:
    """Real text and GLUE data, where CRAM_REAL_DATA says they are."""
    if not os.environ.get("CRAM_REAL_DATA"):
        pytest.skip("CRAM_REAL_DATA is not set")
    return Path(os.environ["CRAM_REAL_DATA"])
