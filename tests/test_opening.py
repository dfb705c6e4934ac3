"""Artifacts in Python: their tables in pandas and datasets, their models in torch, and the notebook that shows them."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import datasets
import pandas as pd
import pyarrow.parquet as pq
import pytest
import torch
from conftest import corpus_of, store_of_its_own, texts_of, toy_model, toy_tokens

from model import export
from model.errors import InputError
from tasks.finetune import Finetune, finetune
from tasks.store.artifacts import Artifact, find
from tasks.store.manifests import MANIFEST, verify

NOTEBOOK = Path(__file__).parents[1] / "docs" / "notebook.ipynb"
LAYOUT = {"layers": 1, "hidden": 32, "heads": 2, "intermediate": 96}  # transformers doesn't have it
IDS = torch.tensor([[2, 40, 41, 4, 42, 3], [2, 50, 4, 51, 7, 3]])


@pytest.fixture(scope="module", autouse=True)
def made(tmp_path_factory: pytest.TempPathFactory, toy_texts: list[str]) -> Iterator[dict[str, Artifact]]:
    """All stages of a run but the report, in a store whose path has characters that patterns and tables read."""
    root = tmp_path_factory.mktemp("store")
    with store_of_its_own(root / "a [red] pl*ce" / "k=v"):
        found = toy_tokens(root, toy_texts)
        found["pretrain"] = toy_model(found["tokens"], LAYOUT)
        task = Finetune(tasks=["neighbours"], data="probes", seeds=1, epochs=1, max_tokens=32, baseline=False)
        found["finetune"] = finetune.fn(task.runs()[0], found["pretrain"])
        yield found


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the test's own for `datasets`."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    return tmp_path / "cache"


def files_of(folder: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in sorted(folder.rglob("*"))}


def test_a_frame_has_all_parts_in_order_and_no_other_column(store: Path, tmp_path: Path, toy_texts: list[str]):
    corpus = corpus_of(tmp_path, toy_texts)
    assert len(list(corpus.path.glob("part-*"))) > 2
    frame = corpus.frame()
    assert [*frame.columns] == ["id", "source", "text"]
    assert [*frame.text] == texts_of(corpus) == [*corpus.dataset()["text"]]
    assert [*frame.index] == [*range(len(frame))]


def test_each_table_of_an_artifact_opens_by_its_name(made):
    filtered = find("filter")
    assert filtered == made["filter"]
    assert (filtered.frame("measured").verdict == "kept").sum() == len(filtered.frame()) == filtered.stats["documents"]
    assert "source" in filtered.frame("sources")
    assert "k" not in filtered.frame(), "of a folder k=v in the path"
    assert len(find("vocabulary").frame("entries")) == 400
    assert len(find("finetune").frame("predictions"))
    assert isinstance(find("pretrain").frame("metrics"), pd.DataFrame)


def test_a_dataset_is_mapped_from_the_cache_and_nothing_is_written_into_the_artifact(made, cache: Path):
    before = files_of(made["filter"].path)
    found = find("filter").dataset("measured")
    assert isinstance(found, datasets.Dataset)
    assert all(cache in Path(file["filename"]).parents for file in found.cache_files)
    assert found.cache_files
    assert len(found) == pq.read_metadata(made["filter"].path / "measured-00000.parquet").num_rows
    assert files_of(made["filter"].path) == before
    verify(made["filter"])


@pytest.mark.parametrize(("stage", "head"), [("pretrain", "MaskedLM"), ("finetune", "SequenceClassification")])
def test_a_model_is_a_module_with_its_head_whose_states_are_crams_own(stage: str, head: str, made, transformers):
    module = find(stage, made[stage].key[:8]).model()
    own = export.load(made[stage].path).eval()
    assert type(module).__name__ == f"CramFor{head}"
    assert isinstance(module, torch.nn.Module)
    assert not module.training
    with torch.no_grad():
        torch.testing.assert_close(module.bert(IDS).last_hidden_state, own.encode(IDS), atol=1e-5, rtol=1e-4)


def test_what_an_artifact_does_not_have_is_named_with_what_it_has(made):
    for call, named in (
        (lambda: made["filter"].frame("part-0"), "no table 'part-0'; expected measured, part, sources"),
        (lambda: made["tokens"].dataset("x"), "no table 'x'; expected heldout"),
        (lambda: made["filter"].model(), r"has no model\. These of filter have: none"),
    ):
        with pytest.raises(InputError, match=named):
            call()
    files = made["finetune"].manifest["files"]
    bare = Artifact(stage="finetune", key="bare")
    bare.path.mkdir()
    about = made["finetune"].manifest | {"files": [file for file in files if file["path"] == "scores.json"]}
    (bare.path / MANIFEST).write_text(json.dumps(about))
    (bare.path / "scores.json").write_bytes((made["finetune"].path / "scores.json").read_bytes())
    with pytest.raises(InputError, match=rf"has no model\. These of finetune have: {made['finetune'].key} "):
        bare.model()
    shutil.rmtree(bare.path)


@pytest.mark.parametrize("method", ["frame", "dataset"])
def test_a_changed_or_dropped_file_is_refused(method: str, store: Path, tmp_path: Path, toy_texts: list[str]):
    corpus = corpus_of(tmp_path, toy_texts)
    part = corpus.path / "part-00001.parquet"
    manifest = corpus.path / MANIFEST
    content = bytearray(part.read_bytes())
    about = json.loads(manifest.read_text())
    content[len(content) // 2] ^= 1
    part.write_bytes(content)
    with pytest.raises(InputError, match=r"part-00001\.parquet .* was changed"):
        getattr(corpus, method)()
    manifest.write_text(json.dumps(about | {"hollow": ["part-00001.parquet"]}))
    with pytest.raises(InputError, match=r"hollow: part-00001\.parquet was dropped"):
        getattr(corpus, method)()


def test_a_model_with_a_flipped_byte_is_refused(made, tmp_path: Path):
    shutil.copytree(made["pretrain"].path, tmp_path / "pretrain" / made["pretrain"].key)
    with store_of_its_own(tmp_path):
        weights = find("pretrain").path / "model.safetensors"
        content = bytearray(weights.read_bytes())
        content[-1] ^= 1
        weights.write_bytes(content)
        with pytest.raises(InputError, match=r"model\.safetensors .* was changed"):
            find("pretrain").model()


def test_the_notebook_runs_cell_by_cell(made, transformers):
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    names = {}
    assert len(code) >= 6
    assert all(not cell.get("outputs") for cell in cells)
    for cell in code:
        exec(compile(cell, str(NOTEBOOK), "exec"), names)
    assert len(names["measured"]) >= len(names["texts"]) > 0
    assert names["pretrained"] == made["pretrain"]
