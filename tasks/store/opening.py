"""Artifacts in Python: tables in pandas and datasets, models in torch. The last three are methods of Artifact.

Each first compares the files that it opens with their digests, and writes nothing into the artifact.
"""

import glob
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from model.errors import InputError
from tasks.store.manifests import verify

if TYPE_CHECKING:
    import pandas as pd
    from datasets import Dataset
    from transformers import PreTrainedModel

TABLE = re.compile(r"(.+?)(-\d+)?\.parquet")


def verified_paths(artifact: Any, names: list[str]) -> list[Path]:
    """The paths of these files, in order. Raises InputError for one that was dropped or changed."""
    verify(artifact, names)
    return [artifact.path / name for name in sorted(names)]


def tables(artifact: Any, name: str) -> list[Path]:
    """The Parquet files of a table: NAME.parquet, or its parts NAME-00000.parquet and so on, in order."""
    found: dict[str, list[str]] = {}
    for file in artifact.manifest["files"]:
        match = TABLE.fullmatch(file["path"])
        if match:
            found.setdefault(match[1], []).append(file["path"])
    if name not in found:
        has = f"expected {', '.join(sorted(found))}" if found else "it has no tables"
        raise InputError(f"{artifact.name} has no table {name!r}; {has}.")
    return verified_paths(artifact, found[name])


def frame(self: Any, name: str = "part") -> "pd.DataFrame":
    """A table of the artifact with all its parts, such as `measured` of filter, in memory."""
    import pyarrow.parquet as pq

    return pq.read_table(tables(self, name), partitioning=None).to_pandas()  # a folder k=v isn't a column


def dataset(self: Any, name: str = "part") -> "Dataset":
    """The same in `datasets`, which copies it into its own cache once, and maps that into memory."""
    from datasets import Dataset

    return Dataset.from_parquet([glob.escape(str(path)) for path in tables(self, name)])


def model(self: Any) -> "PreTrainedModel":
    """The artifact's model as a torch module with its head, in fp32: of transformers, or of model.hf."""
    names = [file["path"] for file in self.manifest["files"]]
    if "config.json" not in names:
        refuse_without_model(self)
    config, *_ = verified_paths(self, [name for name in names if re.fullmatch(r"config\.json|model.*", name)])
    import torch
    import transformers

    from model import hf, layouts  # noqa: F401, transformers has cram's layouts once hf is loaded

    head = layouts.head_of(json.loads(config.read_text(encoding="utf-8")))
    opener = getattr(transformers, f"AutoModelFor{head}" if head else "AutoModel")
    return opener.from_pretrained(self.path, dtype=torch.float32, local_files_only=True)


def refuse_without_model(artifact: Any) -> NoReturn:
    """Raise InputError for an artifact without a model; it names those of its stage that have one."""
    siblings = artifact.path.parent.glob("*/config.json")
    keys = sorted({path.parent.resolve().name for path in siblings})
    which = f"These of {artifact.stage} have: {', '.join(keys) or 'none'}"
    raise InputError(f"{artifact.name} has no model. {which} (in a recipe, finetune.keep decides).")
