"""`cram export`: a folder with all a user of the model needs, and nothing of the text or the files it came from."""

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from conftest import roughen, store_of_its_own, toy_model, toy_tokens
from huggingface_hub import ModelCard
from typer.testing import CliRunner

from flows.cli import export as commands
from flows.cli.main import app
from flows.cli.run import print_blanks
from model import export
from model.bert import Bert
from model.errors import InputError
from model.finetuning import Classifier
from model.settings import Architecture
from tasks import adopt
from tasks.finetune import Finetune, finetune
from tasks.glue.own import Definition
from tasks.report import Report, report
from tasks.reports.model_folder import auto_map
from tasks.store.artifacts import HELDOUT_TEXT, Artifact, artifacts_of

LAYOUT = {"layers": 2, "hidden": 32, "heads": 2, "intermediate": 96}  # transformers doesn't have it
MODERN = LAYOUT | {"positions": "rotary", "norm_bias": False, "first_norm": False, "head_transform": True}
MODEL = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "README.md"}
CODE = {"hf.py", "layers.py"}
FOLDER, FILE = "harvey-v-doe", "confidential-train.csv"  # of the text, and of a task's data
IDS = [[2, 40, 41, 4, 42, 3], [2, 50, 4, 3, 0, 0]]
WITHOUT_CRAM = """
import json, sys
class Nowhere:
    def find_spec(self, name, *_):
        if name.split(".")[0] in ("model", "tasks", "flows"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Nowhere())
import torch, transformers
torch.set_num_threads(1)
answers = []
for folder, name, trust in json.loads(sys.argv[1]):
    try:
        model = getattr(transformers, name).from_pretrained(folder, **({"trust_remote_code": True} if trust else {}))
        shape = (1, 2, -1) if name.endswith("MultipleChoice") else (2, -1)
        ids = torch.tensor(%s).view(shape)
        with torch.no_grad():
            answers.append(model(input_ids=ids, attention_mask=(ids != 0).long())[0].tolist())
    except Exception as error:
        answers.append(f"{type(error).__name__}: {error}")
print()
print(json.dumps(answers))
"""


@pytest.fixture(scope="module", autouse=True)
def made(tmp_path_factory, toy_texts: list[str]) -> Iterator[dict[str, Artifact]]:
    """A pretrained and a finetuned model and their report, of text and labels in files of telling names."""
    root = tmp_path_factory.mktemp("store") / FOLDER
    root.mkdir()
    rows = [f"the {word} {number},{word}" for number in range(120) for word in ("river", "clock")]
    (root / FILE).write_text("\n".join(["text,label", *rows, ",clock"]) + "\n")
    with store_of_its_own(root / "artifacts"):
        tokens = toy_tokens(root, toy_texts)["tokens"]
        start = toy_model(tokens, LAYOUT)
        task = Definition(name="topics", data=str(root / FILE))
        run = Finetune(tasks=[task], seeds=1, epochs=1, batch_size=16, max_tokens=32).runs()[0]
        tuned = finetune.fn(run, start)
        yield {"pretrain": start, "finetune": tuned, "report": report.fn(Report(), [tuned])}


def exported(*arguments: object) -> str:
    """What the command prints."""
    done = CliRunner().invoke(app, ["export", *map(str, arguments)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def opened_without_cram(home: Path, asked: list[tuple[Path, str, bool]]) -> list[list | str]:
    """The answers of transformers' classes, or the errors, in a process that can't import cram.

    `asked`: folders, names of classes, and whether code of the folder is trusted.
    """
    env = {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    models = json.dumps([(str(folder), name, trust) for folder, name, trust in asked])
    command = [sys.executable, "-W", "ignore", "-c", WITHOUT_CRAM % IDS, models]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, env=env, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("stage", ["pretrain", "finetune"])
@pytest.mark.parametrize("code", [(), ("--with-code",)])
def test_nothing_of_the_text_the_files_or_the_paths_is_in_an_export(made, stage: str, code: tuple, tmp_path: Path):
    exported(made[stage].name, tmp_path / "out", *code)
    files = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert set(files) == MODEL | (CODE if code else set())
    assert files["model.safetensors"] == (made[stage].path / "model.safetensors").read_bytes()
    held_out = pq.read_table(made["pretrain"].path / HELDOUT_TEXT)["text"].to_pylist()
    telling = [FOLDER, FILE, "toy.jsonl", "confidential", str(tmp_path), *held_out]
    telling += [text.split(". ")[0] for text in held_out]  # a word of its own in each
    before = b"".join(path.read_bytes() for path in made[stage].path.iterdir() if path.suffix == ".json")
    assert b"toy.jsonl" in before
    assert b"confidential" in before or stage == "pretrain"
    content = b"\n".join(files.values()).lower()
    assert [word for word in telling if word.lower().encode() in content] == []
    card = files["README.md"].decode()
    assert "local files (1)" in card or stage == "finetune"
    assert "cram export" not in card


def test_the_card_has_the_scores_of_the_newest_report_of_this_very_model(made, tmp_path: Path, monkeypatch):
    assert made["report"].name in exported("latest", tmp_path / "a")
    card = ModelCard((tmp_path / "a" / "README.md").read_text())
    expected = made["finetune"].stats["validation"]["validation"]["metrics"]
    assert [score.metric_value for score in card.data.eval_results] == [round(each, 2) for each in expected.values()]
    assert "topics: left out line 242, without text" in card.text  # of the file, without its name
    monkeypatch.setattr(
        "tasks.store.artifacts.digests_of_contents", lambda inputs: dict.fromkeys(("x", *inputs), "other")
    )
    assert "no report of this model" in exported("latest", tmp_path / "b")
    assert ModelCard((tmp_path / "b" / "README.md").read_text()).data.eval_results is None


def test_a_model_is_named_by_its_key_or_the_start_of_one(made, tmp_path: Path):
    for number, stage in enumerate(("pretrain", "finetune")):
        exported(made[stage].key[:6], tmp_path / str(number))
        assert (tmp_path / str(number) / "config.json").read_bytes() == (made[stage].path / "config.json").read_bytes()
    shutil.copytree(made["pretrain"].path, other := tmp_path / "other")
    (other / "stage.json").unlink()
    for wrong, said in {"report/latest": "stage report", made["report"].key: "No complete", "": "two stages",
                        str(other): "stage.json"}.items():  # fmt: skip
        with pytest.raises(InputError, match=said):
            exported(wrong, tmp_path / "c")


@pytest.mark.parametrize("stage", ["pretrain", "finetune"])
def test_a_hollow_model_is_refused_in_a_sentence(made, stage: str, tmp_path: Path):
    shutil.copytree(made[stage].path.parents[1], root := tmp_path / "artifacts", symlinks=True)
    path = root / made[stage].name / "stage.json"
    about = json.loads(path.read_text()) | {"hollow": ["model.safetensors"]}
    path.write_text(json.dumps(about))
    (path.parent / "model.safetensors").unlink()
    commands = [["export", made[stage].name, str(tmp_path / "out")], ["push", made[stage].name, "me/own", "--dry-run"]]
    if stage == "pretrain":
        commands += [["fill", "[MASK]", "--model", made[stage].name], ["evaluate", made[stage].name, "tokenize/latest"]]
    else:
        commands += [["predict", made[stage].key, str(root / "tokenize")]]
    with store_of_its_own(root):
        print_blanks(Artifact(stage="pretrain", key=made["pretrain"].key))  # of a run that is cached, at its end
        for command in commands:
            done = CliRunner().invoke(app, command)
            assert isinstance(done.exception, InputError), command
            assert "hollow" in str(done.exception), command
        with pytest.raises(InputError, match="latest is hollow"):
            exported(f"{stage}/latest", tmp_path / "out")
        assert not (tmp_path / "out").exists()


def test_a_folder_that_lacks_a_file_of_its_manifest_is_refused_and_what_is_beside_them_stays(made, tmp_path: Path):
    shutil.copytree(made["pretrain"].path, there := tmp_path / "there")
    (there / "model.safetensors.bak").write_text("mine")
    (there / "model-mine.safetensors").symlink_to("/etc/passwd")
    exported(there, tmp_path / "out")
    assert {path.name for path in (tmp_path / "out").iterdir()} == MODEL
    (there / "tokenizer.json").unlink()
    for command in (["export", str(there), str(tmp_path / "new")], ["push", str(there), "me/own", "--dry-run"]):
        assert "has no tokenizer.json" in str(CliRunner().invoke(app, command).exception)
    assert not (tmp_path / "new").exists()


def test_without_cram_transformers_opens_models_with_their_code_if_it_is_trusted(made, tmp_path: Path):
    masked, tuned, plain = (tmp_path / name for name in ("masked", "tuned", "plain"))
    exported(made["pretrain"].name, masked, "--with-code")
    exported(made["finetune"].name, tuned, "--with-code")
    exported(made["pretrain"].name, plain)
    heads = ("TokenClassification", "QuestionAnswering", "MultipleChoice", "SequenceClassification")
    masked_lm = "AutoModelForMaskedLM"
    asked = [(masked, masked_lm, False), (plain, masked_lm, True)]  # before any code is trusted
    asked += [(masked, "AutoModel", True), *((masked, f"AutoModelFor{head}", True) for head in heads)]
    asked += [(tuned, "AutoModelForSequenceClassification", True), (masked, masked_lm, True)]
    untrusted, lacking, *answers = opened_without_cram(tmp_path / "cache", asked)
    *_, classes, tokens = answers
    assert not [answer for answer in answers if isinstance(answer, str)]
    import transformers

    import model.hf  # noqa: F401

    ids = torch.tensor(IDS)
    seen = (ids != 0).long()
    with torch.no_grad():
        bert = export.load(masked).eval()
        ours = transformers.AutoModelForSequenceClassification.from_pretrained(made["finetune"].path).eval()
        expected = ours(input_ids=ids, attention_mask=seen).logits
        np.testing.assert_allclose(tokens[0], bert.logits(bert.encode(ids, padded=True))[0], rtol=1e-5, atol=2e-5)
    np.testing.assert_allclose(classes, expected, rtol=1e-5, atol=2e-5)
    assert "trust_remote_code=True" in untrusted
    assert lacking.startswith("ValueError")
    assert "`cram`" in lacking
    card = (masked / "README.md").read_text()
    assert 'model="FOLDER", trust_remote_code=True' in card
    assert "import model.hf" not in card
    assert "import model.hf" in (plain / "README.md").read_text()
    assert "auto_map" not in (plain / "config.json").read_text()


def test_the_code_that_travels_has_a_class_for_every_auto_class_that_knows_one(transformers):
    from model import hf

    found = auto_map()["auto_map"]
    for name in [name for name in dir(transformers) if name.startswith(("AutoModel", "AutoConfig"))]:
        mapping = getattr(getattr(transformers, name), "_model_mapping", {})
        known = mapping[hf.CramConfig].__name__ if hf.CramConfig in mapping else None
        if name != "AutoConfig":
            assert found.get(name, "hf.None") == f"hf.{known}"
    assert getattr(hf, found["AutoConfig"].removeprefix("hf.")) is hf.CramConfig


def test_an_adopted_model_is_exported_with_all_its_shards_and_without_the_place_it_came_from(
    made, tmp_path: Path, transformers
):
    folder, out = tmp_path / FOLDER, tmp_path / "out"
    transformers.AutoTokenizer.from_pretrained(made["pretrain"].path).save_pretrained(folder)
    bert = transformers.AutoModelForMaskedLM.from_pretrained(made["pretrain"].path)
    bert.save_pretrained(folder, max_shard_size="20KB")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"_name_or_path": str(folder)}))
    with store_of_its_own(tmp_path / "artifacts"):
        exported(adopt.find_model(str(folder)).key, out)
    assert len(list(out.glob("model-*.safetensors"))) > 1
    own = export.load(made["pretrain"].path).state_dict()
    assert all(torch.equal(tensor, own[name]) for name, tensor in export.load(out).state_dict().items())
    assert not [path.name for path in out.iterdir() if FOLDER.encode() in path.read_bytes()]


@pytest.mark.parametrize("stage", ["pretrain", "finetune"])
def test_a_layout_of_transformers_needs_no_code(made, tmp_path: Path, stage: str):
    shutil.copytree(made[stage].path, there := tmp_path / "artifacts" / stage / made[stage].key)
    bert = roughen(Bert(Architecture(**MODERN), 400, 32))
    if stage == "finetune":
        export.save_classifier(Classifier(bert, 2, 0.0, seed=0, head="native"), there, ("a", "b"))
    else:
        export.save(bert, there)
    about = json.loads((there / "stage.json").read_text())
    (there / "stage.json").write_text(json.dumps(about | {"files": []}))
    with store_of_its_own(tmp_path / "artifacts"), pytest.raises(InputError, match=r"modernbert.*Omit --with-code"):
        exported(made[stage].name, tmp_path / "out", "--with-code")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
@pytest.mark.parametrize("empty", [False, True])
def test_an_export_that_fails_leaves_nothing(made, tmp_path: Path, monkeypatch, error: BaseException, empty: bool):
    copy, copies, out = shutil.copyfile, [], tmp_path / "new" / "out"
    if empty:
        out.mkdir(parents=True)

    def fails(source: Path, target: Path) -> None:
        copies.append(copy(source, target))
        if len(copies) == 2:
            raise error

    monkeypatch.setattr(shutil, "copyfile", fails)
    with pytest.raises(InputError if isinstance(error, OSError) else KeyboardInterrupt) as raised:
        commands.export(made["pretrain"].name, out)
    assert "No space left" in str(raised.value) or not isinstance(error, OSError)
    assert len(copies) == 2
    assert os.listdir(out.parent) == (["out"] if empty else [])
    assert not empty or os.listdir(out) == []
    monkeypatch.undo()
    exported(made["pretrain"].name, out)
    assert {path.name for path in out.iterdir()} == MODEL


def test_a_folder_with_anything_in_it_stays_as_it_is(made, tmp_path: Path):
    (tmp_path / "mine").write_text("mine")
    for taken in (tmp_path, tmp_path / "mine"):
        with pytest.raises(InputError, match=r"Not a directory|Directory not empty"):
            exported(made["pretrain"].name, taken)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("mine", "mine")]
    assert artifacts_of("pretrain") == [made["pretrain"]]
