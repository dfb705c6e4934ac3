"""The encoder and its training loops. Needs torch, numpy, safetensors and pydantic; `hf.py` needs transformers too."""

import os

# OpenMP's threads, which torch computes with, spin while they wait for each other. Beside other work on the machine
# they spin on the cores that the others need: a training of two threads then got a fifth of its share of two cores.
# Waiting in the kernel costs a sleep and a wake-up, up to a fifth of a step in virtual machines where those are slow.
# So they spin for a short while first (docs/log/2026-11-a.md, "threads that spin"). It has to be set before torch is
# loaded.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "5000")
