"""Pretraining speed as a fraction of what this machine's matrix multiplication does in the same run.

    python benchmarks/train.py [--layers 4 --hidden 256 --heads 4 --intermediate 1024] [--steps 20]

Needs torch, numpy, safetensors and pydantic only. Sequences are random: speed does not depend on what they say.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch

from model import machine
from model.bert import Bert
from model.checkpoint import METRICS
from model.settings import Architecture, Training
from model.training import Corpus, Pretraining

SIDE, REPEATS = 2048, 7  # of the matrices whose product is the machine's limit


def matrix_rate(here: machine.Machine) -> float:
    """Floating-point operations a second of a large matrix product, the median of several."""
    a, b = (torch.randn(SIDE, SIDE, device=here.device, dtype=here.dtype) for _ in range(2))
    seconds = []
    for _ in range(REPEATS):
        if here.device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        a @ b
        if here.device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return 2 * SIDE**3 / statistics.median(seconds)


def operations(architecture: Architecture, vocabulary: int, length: int, masks: float) -> float:
    """Floating-point operations a token, forward and backward: matrices, attention, and the head at masked tokens."""
    hidden, inner = architecture.hidden, architecture.intermediate
    block = 2 * (4 * hidden**2 + hidden * inner + hidden * inner // 2) + 4 * length * hidden
    return 3 * (architecture.layers * block + masks * 2 * hidden * vocabulary)


def main() -> None:
    """Run it and print one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("layers", 4), ("hidden", 256), ("heads", 4), ("intermediate", 1024)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--vocabulary", type=int, default=32_768)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=20)
    given = parser.parse_args()
    architecture = Architecture(**{k: getattr(given, k) for k in ("layers", "hidden", "heads", "intermediate")})
    here, random = machine.detect(), np.random.default_rng(0)
    rows = random.integers(5, given.vocabulary, (4 * given.batch + 64, given.length), dtype=np.uint16)
    corpus = Corpus(rows[:-64], rows[-64:], given.vocabulary, mask_id=4, specials=5)
    tokens = given.steps * given.batch * given.length
    training = Training(budget=tokens, budget_unit="tokens", batch_size=given.batch, batch_ramp=0)
    before = matrix_rate(here)
    with tempfile.TemporaryDirectory() as folder:
        run = Pretraining(Bert(architecture, given.vocabulary, given.length), training, corpus, here, Path(folder))
        run.run(lambda fraction, note: None, seconds_between_checkpoints=1e9)
        metrics = [json.loads(line) for line in (Path(folder) / METRICS).read_text().splitlines()]
    limit = statistics.median([before, matrix_rate(here)])
    speed = statistics.median(row["tokens_per_second"] for row in metrics[2:])
    needed = operations(architecture, given.vocabulary, given.length, run.masks / given.length)
    result = {
        "tokens_per_second": round(speed),
        "gflop_per_second": round(speed * needed / 1e9, 1),
        "matrix_gflop_per_second": round(limit / 1e9, 1),
        "fraction_of_limit": round(speed * needed / limit, 3),
        "parameters": sum(p.numel() for p in run.bert.parameters()),
        **here.describe(),
        "compiled": run.forward is not run.bert,
    }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
