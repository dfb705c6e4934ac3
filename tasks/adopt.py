"""Models to start from (`pretrain.start`) or to use (`--use pretrain=`): artifacts, or others, which are adopted.

Reads   a folder with a model of one of cram's layouts, as cram or transformers saved it; or a public model of the hub.
Writes  as an artifact of the stage pretrain: its config.json, weights, tokenizer, and lineage.json if it has one
"""

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from tokenizers import Tokenizer

from model.errors import InputError
from model.files import PICKLED
from model.settings import Architecture, Specials
from tasks.corpus import hub
from tasks.stage import Params, stage
from tasks.store import home
from tasks.store.artifacts import KEY, LATEST, LINEAGE, Artifact, find
from tasks.store.manifests import known_digest
from tasks.text.tokenizer import (
    FILES,
    frame_inputs,
    is_trained_here,
    load_tokenizer,
    reading_of,
    save_tokenizer,
    specials_of,
)

if TYPE_CHECKING:
    from model.bert import Bert

WEIGHTS = "model*.safetensors"  # one file, or several
WORDS = "vocab.txt"  # instead of tokenizer.json, in older folders
UNUSED_ROWS = 128  # fewer entries of a public model may have no token: sizes are rounded up to a multiple of this
log = logging.getLogger(__name__)
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
    tokenizer = read_tokenizer(params.folder)
    stats: dict = {"adopted": True, "parameters": params.parameters, "normaliser": reading_of(tokenizer).model_dump()}
    if is_trained_here(tokenizer):
        save_tokenizer(tokenizer, out)
        for name in params.files:  # in place of these two, where the folder has them
            shutil.copyfile(params.folder / name, out / name)
        return stats
    return stats | adopt_public(params, tokenizer, out)


def adopt_public(params: Adopt, tokenizer: Tokenizer, out: Path) -> dict:
    """Write the model of another program as cram writes models. Returns its name, and whether its head is new."""
    from model import export  # loads torch

    bert = load_model(params.folder, tokenizer)
    export.save(bert, out)
    save_tokenizer(tokenizer, out, has_types=bert.embedding.second is not None)
    if LINEAGE in params.files:
        shutil.copyfile(params.folder / LINEAGE, out / LINEAGE)
    config = read_settings(params.folder)
    if bert.has_new_head:
        log.warning(
            "%s has no head that predicts masked words. It gets a new one, which only pretraining makes useful; "
            "finetuning doesn't need it.",
            params.folder,
        )
    return {"public": config.get("_name_or_path") or params.folder.name, "new_head": bert.has_new_head}


def find_model(name: str, stage: str = "pretrain", heads: Collection[str] | None = None) -> Artifact:
    """The artifact of that name (`artifacts.find`); a model also by STAGE/KEY, by a folder, or by its name on the hub.

    The last two are adopted. Raises InputError for a model of another layout or with another kind of tokenizer;
    `heads`: for one with another head than these too, before anything is adopted.
    """
    if stage != "pretrain":
        return find(stage, name)
    folder = os.path.expanduser(name)
    is_folder = name != LATEST and os.path.isdir(folder)  # unlike Path.is_dir, False for names that are too long
    if is_folder:
        return find_or_adopt(Path(folder).resolve(), heads)
    if name.startswith(("/", ".", "~")):
        raise InputError(f"There is no folder {name}. Name one with a model, or a model that `cram ls pretrain` lists.")
    before, _, key = name.rpartition("/")
    is_key = key == LATEST or KEY.fullmatch(key)
    if before in ("", "pretrain") and is_key:
        return find("pretrain", key)
    if before and (home.root() / before).is_dir():
        raise InputError(
            f"{name} is not a pretrained model; expected pretrain/KEY, a folder, or a model of the Hugging Face hub. "
            "`cram ls pretrain` lists the first."
        )
    return find_or_adopt(download(name), heads)


def download(name: str) -> Path:
    """The folder of a model of the hub, by its name there: OWNER/NAME, NAME, or either with @REVISION.

    Raises InputError if the hub has no such model, or if a plan is made and the model isn't in the hub's cache;
    Unreachable if the hub can't be reached and the model isn't in its cache.
    """
    repository, _, revision = name.partition("@")
    instead = (
        "name a folder that has config.json, the weights and the tokenizer, or a model that `cram ls pretrain` lists"
    )
    patterns = ["config.json", WEIGHTS, f"{WEIGHTS}.index.json", *FILES, WORDS, "special_tokens_map.json"]
    with hub.asking(repository, instead, room=""):
        folder = snapshot(repository, revision or None, patterns)
        if not any(folder.glob(WEIGHTS)):
            snapshot(repository, folder.name, [PICKLED])
    return folder


def snapshot(repository: str, revision: str | None, patterns: list[str]) -> Path:
    """The folder with these files of a model of the hub; while a plan is made, from the hub's cache alone."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    if not home.is_read_only():
        return Path(snapshot_download(repository, revision=revision, allow_patterns=patterns))
    with suppress(LocalEntryNotFoundError):
        folder = Path(snapshot_download(repository, revision=revision, local_files_only=True))
        if any(any(folder.glob(pattern)) for pattern in patterns):
            return folder
    raise InputError(f"{repository} would have to be downloaded first, and a plan fetches nothing. Run without --plan.")


def find_or_adopt(folder: Path, heads: Collection[str] | None) -> Artifact:
    """The artifact of that folder, or the one into which a folder elsewhere is copied."""
    own = Artifact(stage="pretrain", key=folder.name)
    if own.path == folder:
        return own
    tokenizer = read_tokenizer(folder)
    bert = load_model(folder, tokenizer, heads)
    files = {}
    patterns = ["config.json", *FILES, f"{WEIGHTS}*", LINEAGE]
    if not is_trained_here(tokenizer):
        patterns += [WORDS, PICKLED]
    for pattern in patterns:
        for path in folder.glob(pattern):
            files[path.name] = known_digest(path)
    parameters = sum(p.numel() for p in bert.parameters())
    return adopt.fn(Adopt(folder=folder, architecture=bert.architecture, parameters=parameters, files=files))


def read_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer in a folder. Raises InputError if there is none, or if it isn't WordPiece with BERT's tokens."""
    if (folder / FILES[0]).exists():
        tokenizer = load_tokenizer(folder)
    elif (folder / WORDS).exists():
        tokenizer = tokenizer_of_words(folder)
    else:
        raise InputError(
            f"{folder} has no tokenizer: neither {FILES[0]} nor {WORDS}. Copy those of the model that is in it."
        )
    specials = specials_of(tokenizer)
    if tokenizer.encode("").ids != [specials.cls, specials.sep]:
        frame_inputs(tokenizer, specials)
    return tokenizer


def tokenizer_of_words(folder: Path) -> Tokenizer:
    """The tokenizer of a vocab.txt and a tokenizer_config.json, which says whether it keeps capitals."""
    from transformers import AutoTokenizer  # takes seconds

    tokenizer = AutoTokenizer.from_pretrained(folder).backend_tokenizer
    tokenizer.encode_special_tokens = True
    return tokenizer


def load_model(folder: Path, tokenizer: Tokenizer, heads: Collection[str] | None = None) -> "Bert":
    """The model in a folder, without the entries that no token has. Raises InputError unless it fits the tokenizer."""
    from model import export  # loads torch

    specials = specials_of(tokenizer)
    bert = export.load(folder, heads, specials)
    check_specials(folder, specials)
    entries = tokenizer.get_vocab_size()
    ids = sorted(tokenizer.get_vocab().values())
    unused = bert.vocabulary - entries
    may_be_unused = 0 if is_trained_here(tokenizer) else UNUSED_ROWS
    if ids != list(range(entries)) or not 0 <= unused < max(1, may_be_unused):
        raise InputError(
            f"The tokenizer in {folder} has {entries:,} entries up to number {ids[-1]:,}, but the model has "
            f"{bert.vocabulary:,}. Pass the tokenizer that the model was trained with."
        )
    bert.drop_entries(entries)
    return bert


def read_settings(folder: Path) -> dict:
    """The config.json of the model in a folder."""
    return json.loads((folder / "config.json").read_text(encoding="utf-8"))


def check_specials(folder: Path, specials: Specials) -> None:
    """Raise InputError if the model's config.json has other ids of special tokens than its tokenizer."""
    config = read_settings(folder)
    for name, number in specials._asdict().items():
        its = config.get(f"{name}_token_id")
        if its not in (None, number):
            raise InputError(
                f"The tokenizer in {folder} has the id {number} for [{name.upper()}], but config.json says {its}. Pass "
                "the tokenizer that the model was trained with."
            )


def start_stats(model: Artifact) -> dict:
    """The statistics of the model that a pretrained one began from; empty if it began from none."""
    path = model.path / START_LINEAGE
    if not path.exists():
        return {}
    before = json.loads(path.read_text(encoding="utf-8"))
    return before.get(model.stats["start"]["name"], {}).get("stats", {})


def architecture_of(model: Artifact) -> Architecture:
    """The architecture of a model."""
    from model.layouts import read_config

    architecture, *_ = read_config(read_settings(model.path))
    return architecture


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
    from model.layouts import STARTS

    bert = export.load(find_model(name).path, STARTS)
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
