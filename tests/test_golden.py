"""Golden values: keys of recipes and content of the data stages' files, which must not change unnoticed."""

import hashlib
import json
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from conftest import document, store_of_its_own, write_jsonl

from flows.cram import checked_plan, pipeline
from flows.execute import carry_out
from flows.plan import Plan
from flows.recipes.recipe import resolve
from tasks.corpus import pydocs
from tasks.glue import data as glue
from tasks.glue import pairs
from tasks.glue import table as glue_tasks

ON_PURPOSE = (
    "If this change is intended: raise the `version` of the first stage that differs and put the new values here."
)
SENTENCE = "The committee of the old harbour described every broken lamp twice before the rain, and forgot it by noon."
# Keys by stage and recipe; those of all finetuning runs are hashed as one. The hub gives GLUE to crammed-bert alone.
RECIPES = ("demo", "pocket", "crammed-bert")
KEYS: dict[str, tuple[str, ...]] = {
    "download": ("3d68525c3e2e", "5a0ea3324f85", "0b3aed6d432b"),
    "deduplicate": ("f7cad4c2f7f9", "4bbbf86c88ee", "6459c968b99c"),
    "decontaminate": ("6a8524c7a443", "3ffc29e1e11f", "f4fe9e673a93"),
    "measure": ("30c2caaa35a5", "d5cb9176714a", "38d528a1de20"),
    "filter": ("33973f598c4c", "602b33cfa45f", "46330c021e82"),
    "vocabulary": ("d48835b35f1b", "af439b33188f", "2febdec4612e"),
    "tokenize": ("7c7a7e607218", "17269e3ac872", "00a6877a6567"),
    "pretrain": ("03edd3055ad7", "1eef5d4a94d4", "e6f04acfe6f5"),
    "minimal_pairs": ("", "677b467639c9", "809cb58318c3"),
    "finetune": ("87af0b749ec4", "efad39271d04", "b5a062057d8f"),
    "report": ("319d605a2ddb", "d23d7bbe8fee", "a2c66acf48aa"),
}
# Stage and file, all parts as one: digest of rows, array or bytes
CONTENT: dict[str, str] = {
    "download/part": "726161a34e49",
    "deduplicate/part": "9f37b5d6a678",
    "decontaminate/part": "2214487d1af3",
    "measure/measured": "e85192f676b2",
    "measure/tokenizer": "c5db01b2ba71",
    "filter/measured": "f5d3fb7d9253",
    "filter/part": "4c283a2a1cfd",
    "filter/sources": "6745eb13d7bd",
    "vocabulary/entries": "da9457f8aacd",
    "vocabulary/tokenizer": "8fedac3b6020",
    "tokenize/heldout": "4e76667eb31f",
    "tokenize/sequences": "da9242345aaf",
    "tokenize/tokenizer": "8fedac3b6020",
}


def short(data: bytes) -> str:
    """The first 12 hex digits of the SHA-256."""
    return hashlib.sha256(data).hexdigest()[:12]


def keys(recipe: str) -> dict[str, str]:
    """The key of each stage of a recipe; of the finetuning runs, a digest of all their keys."""
    plan = Plan("report", {}, [])
    found = {}
    plan.trace(pipeline, resolve(recipe, {}))
    for step in plan.steps:
        found.setdefault(step.stage, []).append(step.artifact.key)
    return {stage: made[0] if len(made) == 1 else short(" ".join(made).encode()) for stage, made in found.items()}


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_keys_of_a_recipe_stay(recipe: str, store: Path, monkeypatch: pytest.MonkeyPatch):
    splits = [(task, split) for task in glue_tasks.TASKS for split in glue_tasks.evaluation_splits(task)]
    at_hand = {one: [Path("of the hub")] for one in splits} if recipe == "crammed-bert" else {}
    monkeypatch.setattr(glue, "hub_evaluation", lambda: at_hand)  # these two differ between machines
    monkeypatch.setattr(pairs, "at_hand", lambda _: recipe == "crammed-bert")
    monkeypatch.setattr(pydocs, "packages_digest", lambda: "whatever is installed")
    expected = {stage: row[RECIPES.index(recipe)] for stage, row in KEYS.items() if row[RECIPES.index(recipe)]}
    assert keys(recipe) == expected, ON_PURPOSE


def texts() -> Iterator[str]:
    """Documents of which some are copies, near-copies, repeat a passage, quote GLUE or are no prose."""
    rng = random.Random(5)
    passage = document(rng, 6)
    for number in range(200):
        text = document(rng, rng.randint(5, 12))
        yield text
        match number % 10:
            case 1:
                yield text
            case 3:
                yield text + " Or so it seemed to a naïve reader in the café."
            case 5:
                yield f"{document(rng, 2)} {passage} {document(rng, 2)}"
            case 7:
                yield f"{document(rng, 3)} {SENTENCE}"
            case 9:
                yield " ".join(f"{rng.getrandbits(64):x}|{rng.getrandbits(32)}" for _ in range(20))


def content(path: Path) -> bytes:
    """What a file says: no compression, and no ratios of zstd, whose versions compress differently."""
    if path.suffix in (".npy", ".npz"):
        loaded = np.load(path)
        arrays = [loaded] if path.suffix == ".npy" else [loaded[name] for name in loaded.files]
        return b"".join(f"{array.dtype} {array.shape} ".encode() + array.tobytes() for array in arrays)
    if path.suffix == ".parquet":
        table = pq.read_table(path)
        rows = table.select([name for name in table.column_names if "zstd" not in name]).to_pylist()
        return "\n".join(map(json.dumps, rows)).encode()
    return path.read_bytes()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The folders that the data stages of recipe demo write, of several parts and with every way to deduplicate."""
    folder = tmp_path_factory.mktemp("golden")
    shard = write_jsonl(folder / "toy.jsonl", list(texts()))
    (folder / "cola").mkdir()
    (folder / "cola" / "validation.tsv").write_text(f"sentence\tlabel\n{SENTENCE}\t1\n")
    override = {
        "download": {"source": "files", "files": [str(shard)], "part_megabytes": 0.04},
        "deduplicate": {"methods": ["exact", "minhash", "substring"]},
        "decontaminate": {"data": str(folder)},
        "measure": {"vocabulary_entries": 400},
        "vocabulary": {"entries": 400},
    }
    plan = checked_plan("demo", override, "tokenize", {}, [])
    with store_of_its_own(folder / "artifacts"):
        return {step.stage: carry_out(step).path for step in plan.steps}


def test_the_data_stages_write_the_same_rows_vocabulary_and_sequences(made: dict[str, Path]):
    found: dict[str, list[bytes]] = {}
    for stage, folder in made.items():
        for path in sorted(folder.iterdir()):  # without samples for people, and tokenizer_config.json, which may grow
            if path.suffix in (".parquet", ".npy", ".npz") or path.name == "tokenizer.json":
                found.setdefault(f"{stage}/{path.stem.split('-')[0]}", []).append(content(path))
    assert {name: short(b"\n\n".join(files)) for name, files in found.items()} == CONTENT, ON_PURPOSE
