"""Pretrain: masked language modelling from scratch, within a budget.

Reads   sequences, held-out sequences and tokenizer of a tokenize artifact.
Writes  model.safetensors, config.json, tokenizer.json, tokenizer_config.json   the model, complete in itself
        metrics.parquet (a row a step), loss.png
        heldout.npy, heldout.parquet   what the held-out loss was measured on, so that it can be measured again
        lineage.json                   the manifests of all that led here
"""

import json
import logging
import shutil

import numpy as np
import pyarrow.json
import pyarrow.parquet as pq
from pydantic import Field

from model.settings import Architecture, Training
from tasks import plots, vocabulary
from tasks.progress import Progress
from tasks.stage import WORK, Artifact, Params, read_manifest, stage
from tasks.tokens import HELDOUT, HELDOUT_TEXT, SEQUENCES

log = logging.getLogger(__name__)
HELDOUT_SEQUENCES = 512  # the first so many are evaluated: 9,728 predictions at 128 tokens
LINEAGE = "lineage.json"


class Pretrain(Params, Training, frozen=True, extra="forbid", allow_inf_nan=False):
    """The model, and how it is trained."""

    architecture: Architecture = Field(Architecture(), description="Sizes of the encoder.")


def lineage(artifact: Artifact) -> dict[str, dict]:
    """The manifests of the artifact and of all its inputs, first to last; those not on this machine are left out."""
    found: dict[str, dict] = {}
    about = read_manifest(artifact)
    if about is None:
        log.warning("%s is not on this machine; the report will miss it.", artifact.name)
        return found
    for given in about["inputs"].values():
        for name in given if isinstance(given, list) else [given]:
            stage_name, key = name.split("/")
            found |= lineage(Artifact(stage=stage_name, key=key))
    return found | {artifact.name: {k: v for k, v in about.items() if k != "files"}}


@stage(version=1, resumes=True)
def pretrain(params: Pretrain, tokens: Artifact, out) -> dict:
    """Train until the budget is spent, going on from the checkpoint of a killed attempt where there is one."""
    from model import bert, checkpoint, machine, training  # torch: not for every command line

    entries = tokens.stats["entries"]
    sequences = np.load(tokens.path / SEQUENCES, mmap_mode="r")
    corpus = training.Corpus(
        sequences=sequences,
        heldout=np.load(tokens.path / HELDOUT)[:HELDOUT_SEQUENCES],
        vocabulary=entries,
        mask_id=vocabulary.MASK,
        specials=len(vocabulary.SPECIALS),
    )
    here = machine.detect()
    model = bert.Bert(params.architecture, entries, corpus.length, seed=params.seed)
    settings = training.Training(**params.model_dump(exclude={"architecture"}))
    work = out / WORK  # checkpoint and metrics, kept until all is published
    work.mkdir(exist_ok=True)
    run = training.Pretraining(model, settings, corpus, here, work)
    with Progress("pretrain", total=1.0, unit="of the budget") as bar:
        bar.update(
            shown := min(1.0, run.spent.seconds / (3600 * params.budget)) if params.budget_unit == "hours" else 0.0
        )

        def report(fraction: float, note: str) -> None:
            nonlocal shown
            bar.update(min(1.0, fraction) - shown, note)
            shown = min(1.0, fraction)

        spent = run.run(report)
    bert.save(model, out)
    np.save(out / HELDOUT, corpus.heldout)
    for file in (*vocabulary.FILES, HELDOUT_TEXT):
        shutil.copyfile(tokens.path / file, out / file)
    (out / LINEAGE).write_text(json.dumps(lineage(tokens), indent=2) + "\n")
    metrics = pyarrow.json.read_json(work / checkpoint.METRICS)
    pq.write_table(metrics, out / "metrics.parquet")
    rows = {name: metrics[name].to_numpy() for name in metrics.column_names}
    plots.loss_curve(rows, spent.evaluations, out / "loss.png")
    heldout, characters = spent.evaluations[-1]["heldout_loss"], tokens.stats["heldout"]
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "steps": spent.step,
        "tokens": spent.tokens,
        "epochs": round(spent.tokens / sequences.size, 4),
        "seconds_on_the_clock": round(spent.seconds, 3),
        "tokens_per_second": round(spent.tokens / spent.seconds, 1),
        "training_loss": round(float(rows["loss"][-max(1, len(rows["loss"]) // 20) :].mean()), 4),
        "heldout_loss": round(heldout, 6),
        "heldout_nats_per_character": round(heldout * characters["tokens"] / max(1, characters["characters"]), 6),
        "heldout_predictions": len(corpus.heldout) * round(training.HELDOUT_MASKS * corpus.length),
        "evaluations": spent.evaluations,
        "machine": {**here.describe(), "compiled": run.forward is not model},
    }


def measure_heldout(pretrained: Artifact) -> float:
    """The held-out loss of a pretrained artifact, measured again from the files in it alone."""
    from model import bert, machine, training

    model, here = bert.load(pretrained.path), machine.detect()
    heldout = np.load(pretrained.path / HELDOUT)
    tokenizer = vocabulary.load(pretrained.path)
    corpus = training.Corpus(
        heldout, heldout, tokenizer.get_vocab_size(), tokenizer.token_to_id("[MASK]"), len(vocabulary.SPECIALS)
    )
    return training.heldout_loss(model.to(here.device), corpus, here)
