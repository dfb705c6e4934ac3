"""The pretrain stage, as plain calls on a toy corpus."""

import json
import logging
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from conftest import store_of_its_own, toy_tokens
from test_tracking import curve, install_doubles, records

from model import distributed, export, machine, pretraining
from model import heldout as heldout_module
from model.distributed import Job
from model.errors import InputError
from model.heldout import Heldout
from model.settings import SPECIALS
from tasks import pretrain as pretrain_module
from tasks.finetune import Finetune, finetune
from tasks.pretrain import Pretrain, measure_heldout, pretrain, words_of
from tasks.reports.losses import FEWEST_WORDS
from tasks.store.artifacts import LINEAGE, Artifact
from tasks.text.holdout import digest_of, measured_texts
from tasks.text.tokenizer import CLS, MASK, PAD, SEP, UNK

TINY = Pretrain(
    architecture={"layers": 1, "hidden": 32, "heads": 2, "intermediate": 48},
    budget=30_000,
    budget_unit="tokens",
    batch_size=8,
    learning_rate=5e-3,
)


@pytest.fixture(scope="module")
def made(tmp_path_factory, toy_texts: list[str]):
    """Tokens and the model pretrained on them."""
    root = tmp_path_factory.mktemp("made")
    with store_of_its_own(root / "artifacts"):
        tokens = toy_tokens(root, toy_texts)["tokens"]
        yield {"root": root, "tokens": tokens, "pretrain": pretrain.fn(TINY, tokens)}


def assert_measured_again(bert: Artifact) -> None:
    """The files of an artifact alone give its held-out loss again."""
    found = measure_heldout(bert.path, export.load(bert.path), machine.detect(), math.inf)
    recorded = bert.stats["heldout"]
    assert found.keys() == recorded.keys()
    for name, value in recorded.items():
        assert found[name] == (pytest.approx(value, abs=1e-6) if name.startswith("nats_per_") else value)


def columns(bert: Artifact) -> dict[str, list]:
    return pq.read_table(bert.path / "metrics.parquet").to_pydict()


def test_the_model_learned_and_its_record_is_complete(made):
    bert = made["pretrain"]
    metrics = columns(made["pretrain"])
    assert metrics["step"] == list(range(1, bert.stats["steps"] + 1))
    assert metrics["tokens"][-1] == bert.stats["tokens"] >= 30_000
    first, *_, last = bert.stats["evaluations"]
    assert last["heldout_loss"] < first["heldout_loss"] - 0.5
    assert (bert.path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert not list(bert.path.rglob("checkpoint*"))
    assert json.loads((bert.path / "config.json").read_text())["vocab_size"] == 400


def test_a_model_knows_how_many_words_were_downloaded_for_it_if_they_were_counted(made, toy_texts: list[str]):
    downloaded = [*toy_texts, toy_texts[0]]
    assert made["pretrain"].stats["words"] == sum(len(text.split()) for text in downloaded)
    one = {"stage": "download", "stats": {"words": 3}}
    other = {"stage": "download", "stats": {}}
    assert words_of({"download/a": one, "download/b": one, "tokenize/c": {"stage": "tokenize"}}) == 6
    assert words_of({"download/a": one, "download/b": other}) is None
    assert words_of({}) is None


def test_pretraining_shows_losses_rate_speed_and_memory_and_its_artifact_has_none_of_it(
    made, tmp_path: Path, monkeypatch
):
    doubles = install_doubles(tmp_path, monkeypatch)
    monkeypatch.setenv("CRAM_TRACK", "wandb")
    bert = pretrain.fn(TINY.model_copy(update={"budget": 10_000}), made["tokens"])
    losses = curve(doubles, "heldout_loss")
    assert losses == [(each["step"], each["heldout_loss"]) for each in bert.stats["evaluations"]]
    assert [step for step, _ in curve(doubles)] == list(range(1, bert.stats["steps"] + 1))
    names = {name for each in records(doubles) for name in each.get("numbers", {})}
    assert names > {"loss", "heldout_loss", "lr", "tokens_per_second", "mfu", "fraction", "hours_left", "memory_gib"}
    assert curve(doubles, "memory_gib")[-1][1] > 0.05
    first = records(doubles)[0]
    assert (first["settings"]["name"], first["config"]["batch_size"]) == (f"pretrain-{bert.key}", 8)
    assert not [path for path in bert.path.rglob("*") if "wandb" in path.name or path.name == "heldout.jsonl"]


def test_the_loss_by_token_frequencies_stands_beside_the_models_and_is_computed_from_training_text(made, monkeypatch):
    held = made["pretrain"].stats["heldout"]
    sequences = np.load(made["tokens"].path / "sequences.npy")
    counts = np.bincount(sequences[~np.isin(sequences, [PAD, CLS, SEP, MASK])], minlength=400)
    assert np.array_equal(np.load(made["pretrain"].path / "frequencies.npy"), counts)
    assert held["by_frequencies"] == heldout_module.by_frequencies(Heldout.load(made["tokens"].path), counts)
    assert "token frequencies alone" in (made["pretrain"].path / "README.md").read_text()
    monkeypatch.setattr(pretrain_module, "SAMPLED_TOKENS", sequences.size // 3)
    assert pretrain_module.count_tokens(np.arange(7)[None], 7, SPECIALS).tolist() == [0, 0, 0, 0, 0, 1, 1]
    sampled = pretrain_module.count_tokens(sequences, 400, SPECIALS)
    assert np.array_equal(sampled[MASK + 1 :], np.bincount(sequences[::3].ravel(), minlength=400)[MASK + 1 :])


def test_the_held_out_loss_is_that_of_all_words_per_word_character_and_byte(made):
    stats = made["pretrain"].stats
    measured = made["tokens"].stats["heldout"]["measured"]
    held = stats["heldout"]
    last = stats["evaluations"][-1]
    for name in ("documents", "tokens", "words", "characters", "bytes", "unread_bytes", "digest"):
        assert held[name] == measured[name]
    assert last["heldout_loss"] == stats["heldout_loss"]
    total = held["nats_per_word"]["value"] * measured["words"]
    for unit in ("character", "byte"):
        assert held[f"nats_per_{unit}"]["value"] == pytest.approx(total / measured[f"{unit}s"], abs=1e-5)
        assert 0 < held[f"nats_per_{unit}"]["standard_error"] < 0.1
    assert last["heldout_nats_per_byte"] == pytest.approx(held["nats_per_byte"]["value"], rel=0.1), "of a seventh"
    assert 0 < held["length_nats_per_byte"] < held["nats_per_byte"]["value"]
    assert held["unread"] == pytest.approx(held["unread_bytes"] / held["bytes"], abs=1e-6)


def test_a_short_run_is_measured_on_beginnings_of_its_documents_and_every_page_says_so(made, monkeypatch, caplog):
    monkeypatch.setattr(heldout_module, "LEAST_CHARACTERS", 3000)
    with caplog.at_level(logging.WARNING):
        bert = pretrain.fn(TINY.model_copy(update={"budget": 5_000}), made["tokens"])
    held = bert.stats["heldout"]
    all_held = made["tokens"].stats["heldout"]["measured"]
    read = heldout_module.beginnings(measured_texts(bert.path), 3000)
    assert 2000 < held["characters"] == sum(map(len, read)) <= 3000 < all_held["characters"]
    assert (held["documents"], held["digest"]) == (len(read), digest_of(read))
    assert held["of_digest"] == all_held["digest"] != held["digest"]
    assert (held["of_documents"], held["of_characters"]) == (all_held["documents"], all_held["characters"])
    card = (bert.path / "README.md").read_text(encoding="utf-8")
    said = f"a part of the {all_held['characters']:,} characters in {all_held['documents']:,} documents"
    assert said in card
    few = f"rests on {held['words']:,} words"
    assert held["words"] < FEWEST_WORDS
    assert few in caplog.text
    assert few in card
    assert "a part of the" not in (made["pretrain"].path / "README.md").read_text(encoding="utf-8")
    assert "of_digest" not in made["pretrain"].stats["heldout"]


def test_the_pretrained_artifact_is_complete_in_itself(made, tmp_path: Path, monkeypatch):
    """Copied alone to another store, it can be measured and finetuned, with the same result."""
    bert = made["pretrain"]
    asked = Finetune(data="probes", tasks=["word-order"], seeds=1, epochs=1, max_tokens=32)
    (params,) = asked.runs()
    run = finetune.fn(params, bert)
    scores = run.stats["validation"]
    monkeypatch.setenv("CRAM_ARTIFACTS", str(tmp_path))
    shutil.copytree(made["root"] / "artifacts" / bert.name, tmp_path / bert.name)
    assert_measured_again(bert)
    again = finetune.fn(params, bert)
    assert again.stats["validation"] == scores
    assert list(json.loads((again.path / LINEAGE).read_text()))[-1] == bert.name


def test_a_failure_while_the_model_is_published_costs_no_training(made, monkeypatch):
    again = TINY.model_copy(update={"seed": 5, "budget": 3_000})
    with monkeypatch.context() as patch:
        patch.setattr("tasks.stage.publish", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            pretrain.fn(again, made["tokens"])
    monkeypatch.setattr(pretraining.Pretraining, "step", lambda *_: pytest.fail("it trains again"))
    bert = pretrain.fn(again, made["tokens"])
    assert bert.stats["tokens"] >= 3_000
    assert_measured_again(bert)


def test_two_processes_that_meet_in_a_folder_of_any_name_have_the_losses_of_one_with_the_same_batch(
    made, tmp_path: Path, monkeypatch
):
    meeting = tmp_path / "name with spaces, 100%20"
    meeting.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(meeting))
    monkeypatch.setattr(distributed, "POLL_SECONDS", 0.1)
    monkeypatch.setattr(heldout_module, "LEAST_OF_CURVE", 1 / 25)  # as in the other processes
    measure = pretraining.curve_losses
    evaluated = []
    runs = []
    monkeypatch.setattr(pretraining, "curve_losses", lambda *about: evaluated.append(1) or measure(*about))
    for gpus, most in ((1, 4), (2, 8)):  # two processes have 4 sequences each
        monkeypatch.setenv("CRAM_GPUS", str(gpus))
        monkeypatch.setenv("CRAM_MICRO_BATCH", str(most))
        bert = pretrain.fn(TINY.model_copy(update={"seed": 6, "budget": 12_000, "detection": 5.0}), made["tokens"])
        assert (bert.stats["machine"]["gpus"], bert.stats["machine"]["micro_batch"]) == (gpus, 4)
        heldout = [each["heldout_loss"] for each in bert.stats["evaluations"]]
        runs.append([heldout, *(columns(bert)[name] for name in ("loss", "detection_loss"))])
        shutil.rmtree(bert.path)
    assert len(evaluated) == len(runs[0][0]), "the two processes measure all their held-out losses themselves"
    assert len(runs[0][1]) > 40
    for one, two in zip(*runs, strict=True):
        np.testing.assert_allclose(two, one, rtol=1e-4)


def listening(pids: list[int]) -> set[str]:
    """The addresses at which they accept connections, in hexadecimal, as the kernel gives them."""
    sockets = {os.readlink(fd) for pid in pids for fd in Path(f"/proc/{pid}/fd").iterdir() if fd.is_symlink()}
    rows = [
        line.split()
        for name in ("tcp", "tcp6")
        for line in Path("/proc/net", name).read_text(encoding="utf-8").splitlines()[1:]
    ]
    return {row[1].split(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in sockets}


@pytest.fixture
def endless(tmp_path: Path) -> Job:
    """A job whose budget is never spent."""
    rows = np.random.default_rng(0).integers(5, 40, (60, 16)).astype(np.uint16)
    np.save(tmp_path / "rows.npy", rows)
    Heldout.of_rows(rows).save(tmp_path)
    return Job(
        architecture={"layers": 1, "hidden": 16, "heads": 2, "intermediate": 48},
        training={"budget": 1e12, "budget_unit": "tokens", "batch_size": 4},
        sequences=tmp_path / "rows.npy",
        heldout=tmp_path,
        vocabulary=40,
        folder=tmp_path,
    )


def test_a_process_that_waits_for_the_others_ends_when_its_parent_is_gone(tmp_path, endless):
    (tmp_path / "job.json").write_text(endless.model_dump_json())
    command = [sys.executable, "-m", "model.distributed", str(tmp_path / "job.json"), str(tmp_path)]
    environment = distributed.process_environment(0, 2) | {"PYTHONPATH": str(Path(__file__).parents[1])}
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE) as first:  # and no second
        try:
            first.stdin.close()  # as when the parent is killed
            assert first.wait(60) == -signal.SIGTERM
        finally:
            first.kill()


def test_what_several_processes_warn_of_is_said_here(monkeypatch, endless, caplog):
    monkeypatch.setenv("CRAM_MICRO_BATCH", "2")
    monkeypatch.setattr(distributed, "POLL_SECONDS", 0.1)
    hopeless = {"budget": 40 * 64, "learning_rate": 10.0, "optimizer": "sgd"}
    job = endless.model_copy(update={"training": endless.training.model_copy(update=hopeless)})
    with caplog.at_level(logging.INFO):
        distributed.launch(job, 2, lambda *_: None)
    said = [(record.levelname, record.getMessage()) for record in caplog.records if record.name == distributed.__name__]
    assert [level for level, _ in said] == ["WARNING"]
    assert said[0][1].startswith("After ")


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="there is no /proc")
def test_processes_that_train_together_listen_on_the_loopback_interface_only_and_stop_with_a_checkpoint(
    monkeypatch, endless
):
    monkeypatch.setenv("CRAM_MICRO_BATCH", "2")
    monkeypatch.setattr(distributed, "POLL_SECONDS", 0.1)
    started: list[int] = []

    def look_and_stop(fraction: float, note: str) -> None:
        children = [int(pid) for path in Path("/proc/self/task").glob("*/children") for pid in path.read_text().split()]
        started.extend(pid for pid in children if b"model.distributed" in Path(f"/proc/{pid}/cmdline").read_bytes())
        assert listening(started) == {"0100007F"}
        for pid in started:
            os.kill(pid, signal.SIGUSR1)  # as Slurm does; then `launch` sends a second one
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        distributed.launch(endless, 2, look_and_stop)
    assert len(started) == 2
    assert not any(Path(f"/proc/{pid}").exists() for pid in started)
    assert endless.pretraining(machine.detect()).spent.step > 0


def test_a_model_that_no_memory_holds_is_refused_before_anything_is_discarded():
    sizes = {"layers": 128, "hidden": 65_536, "heads": 1024, "intermediate": 196_608}
    with pytest.raises(InputError, match=r"pretrain\.architecture"):
        Pretrain(architecture=sizes).check()
    TINY.check()


def test_losses_over_a_run_predict_no_unknown_token(endless, tmp_path):
    rows = np.load(endless.sequences)
    rows[::2, 3] = UNK
    Heldout.of_rows(rows).save(tmp_path)
    held = endless.pretraining(machine.detect()).corpus.heldout
    assert ((held.words < 0) == (np.arange(16) == 15) | (rows == UNK)).all()


def test_an_input_error_in_several_processes_is_raised_here(made, monkeypatch):
    monkeypatch.setenv("CRAM_GPUS", "2")
    monkeypatch.setattr(distributed, "POLL_SECONDS", 0.1)
    with pytest.raises(InputError, match=r"batch_size 7 .* 2 processes"):
        pretrain.fn(TINY.model_copy(update={"seed": 7, "batch_size": 7}), made["tokens"])
