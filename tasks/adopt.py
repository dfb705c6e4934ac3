"""Models to start from (`pretrain.start`) or to use (`--use pretrain=`): artifacts, or folders, which are adopted.

Reads   a folder with a model of cram's layouts, as cram or transformers saved it.
Writes  as an artifact of the stage pretrain: its config.json, weights, tokenizer, and lineage.json if it has one
"""

import hashlib
import json
import os
import shutil
from pathlib import Path

from model.errors import InputError
from model.settings import Architecture
from tasks.stage import Params, stage
from tasks.store.artifacts import LATEST, LINEAGE, Artifact, find
from tasks.store.manifests import known_digest
from tasks.text.tokenizer import FILES, SPECIALS, load_tokenizer, normaliser_of, save_tokenizer

WEIGHTS = "model*.safetensors"  # one file, or several
START_LINEAGE = f"start-{LINEAGE}"  # of the model that another began from


class Adopt(Params):
    """A model that another program saved. `folder` is where it is; all else identifies it."""

    folder: Path
    architecture: Architecture
    parameters: int
    files: dict[str, str]  # with digests

    def identity(self) -> dict:
        """All but the place."""
        return self.model_dump(mode="json", exclude={"folder"})


@stage(version=1, name="pretrain")
def adopt(params: Adopt, out: Path) -> dict:
    """Copy a model into the store."""
    (out / LINEAGE).write_text("{}\n", encoding="utf-8")
    save_tokenizer(load_tokenizer(params.folder), out)
    for name in params.files:  # in place of these two, where the folder has them
        shutil.copyfile(params.folder / name, out / name)
    how = normaliser_of(load_tokenizer(out)).model_dump()
    return {"adopted": True, "parameters": params.parameters, "normaliser": how}


def find_model(name: str, stage: str = "pretrain", masked: bool = False) -> Artifact:
    """The artifact of that name (`artifacts.find`); a model also by STAGE/KEY, and by a folder, which is adopted.

    Raises InputError for a folder without a model of cram's layouts and a tokenizer of cram's; `masked`: without a
    vocabulary head too, before anything is adopted.
    """
    if stage != "pretrain":
        return find(stage, name)
    is_folder = name != LATEST and os.path.isdir(name)  # unlike Path.is_dir, False for names that are too long
    if is_folder:
        return find_or_adopt(Path(name).resolve(), masked)
    before, _, key = name.rpartition("/")
    if before not in ("", "pretrain"):
        raise InputError(
            f"{name} is not a pretrained model; expected pretrain/KEY or a folder. `cram ls pretrain` lists them."
        )
    return find("pretrain", key)


def find_or_adopt(folder: Path, masked: bool) -> Artifact:
    """The artifact of that folder, or the one into which a folder elsewhere is copied."""
    own = Artifact(stage="pretrain", key=folder.name)
    if own.path == folder:
        return own
    from model import export  # loads torch

    bert = export.load(folder, masked)
    check_tokenizer(folder, bert.vocabulary)
    files = {}
    for pattern in ("config.json", *FILES, f"{WEIGHTS}*", LINEAGE):
        for path in folder.glob(pattern):
            files[path.name] = known_digest(path)
    parameters = sum(p.numel() for p in bert.parameters())
    return adopt.fn(Adopt(folder=folder, architecture=bert.architecture, parameters=parameters, files=files))


def check_tokenizer(folder: Path, vocabulary: int) -> None:
    """Raise InputError unless the tokenizer in a folder is one of cram's, with as many entries as the model has."""
    tokenizer = load_tokenizer(folder)
    normaliser_of(tokenizer)
    ids = [tokenizer.token_to_id(special) for special in SPECIALS]
    entries = tokenizer.get_vocab_size()
    if ids != list(range(len(SPECIALS))) or entries != vocabulary:
        raise InputError(
            f"The tokenizer in {folder} has {entries:,} entries, and ids {ids} for {', '.join(SPECIALS)}; the model "
            f"expects {vocabulary:,} entries that begin with these."
        )


def digest_of_files(name: str, files: str) -> str:
    """The digest of a model's files of this pattern."""
    found = sorted(find_model(name).path.glob(files))
    if not found:
        raise InputError(f"{name} is hollow: it has no {files} here. Fetch it with `cram pull`, or name another model.")
    return hashlib.sha256("".join(map(known_digest, found)).encode()).hexdigest()


def has_weights(folder: Path) -> bool:
    """Whether a folder has a model, and not only what a hollow artifact keeps of one."""
    return (folder / "config.json").exists() and any(folder.glob(WEIGHTS))


def weight_bytes(model: Artifact) -> int:
    """The bytes of a model's weights on disk; 0 if it isn't there."""
    return sum(file.stat().st_size for file in model.path.glob(WEIGHTS))


def check_start(name: str, architecture: Architecture, length: int) -> None:
    """Raise InputError unless a model of this architecture and length can start from the one of that name."""
    from model import export  # loads torch

    bert = export.load(find_model(name).path, masked=True)
    its = bert.architecture.model_dump()
    wrong = []
    for axis, value in architecture.model_dump().items():
        if axis != "zero_outputs" and value != its[axis]:  # that axis only says how weights begin
            wrong.append(
                f"pretrain.architecture.{axis} is {json.dumps(value)}, but the model has {json.dumps(its[axis])}"
            )
    if length > bert.length:
        wrong.append(
            f"tokenize.length is {length}, but the model takes {bert.length} tokens; further positions were never "
            "trained"
        )
    if wrong:
        raise InputError(f"Training can't start from {name} (pretrain.start): {'; '.join(wrong)}.")
