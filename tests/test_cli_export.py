"""`cram export` and `cram push`: all that a user of the model needs, and nothing of the text or the files it came from.

A double of the Hugging Face hub serves here.
"""

import base64
import errno
import hashlib
import importlib.util
import json
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from unittest.mock import Mock
from urllib.parse import unquote, urlsplit

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from conftest import bytes_of, store_of_its_own, toy_model, toy_tokens, write_pairs
from huggingface_hub import ModelCard, constants
from toys import MODERN
from typer.testing import CliRunner

from flows.cli import export as commands
from flows.cli.main import app
from flows.cli.run import print_blanks
from model import export
from model import files as model_files
from model.bert import Bert
from model.errors import InputError
from model.files import KEPT
from tasks import adopt
from tasks.finetune import Finetune, finetune
from tasks.glue.own import Definition
from tasks.minimal_pairs import PairsRun, minimal_pairs
from tasks.pretrain import Pretrain
from tasks.report import Report, report
from tasks.reports.model_folder import auto_map
from tasks.store import home
from tasks.store.artifacts import HELDOUT_TEXT, Artifact, artifact_named, artifacts_of, digests_of_contents
from tasks.store.publish import refresh

HOME = Path(__file__).parents[1]
LAYOUT = {"layers": 2, "hidden": 32, "heads": 2, "intermediate": 96}  # transformers doesn't have it
FOLDER = "harvey-v-doe"  # of the text
FILE = "confidential-train.csv"  # of a task's data
ON_ITS_WAY = [f"budget-{percent}" for percent in range(10, 100, 10)]  # branches
ON_ITS_WAY += ["step0", "tokens-1M", "tokens-2M", "tokens-4M", "tokens-8M"]
MODEL = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "README.md"}
CODE = {"hf.py", "layers.py"}


@pytest.fixture(scope="module", autouse=True)
def made(tmp_path_factory, toy_texts: list[str]) -> Iterator[dict[str, Artifact]]:
    """Models of a layout of transformers' and of cram's own, with those kept on its way; one finetuned; its report."""
    root = tmp_path_factory.mktemp("store") / FOLDER
    root.mkdir()
    rows = [f"the {word} {number},{word}" for number in range(120) for word in ("river", "clock")]
    (root / FILE).write_text("\n".join(["text,label", *rows, ",clock"]) + "\n")
    with store_of_its_own(root / "artifacts"), pytest.MonkeyPatch.context() as patch:
        tokens = toy_tokens(root, toy_texts)["tokens"]
        modern = toy_model(tokens, LAYOUT | MODERN)
        patch.setenv("CRAM_KEEP_TENTHS", "1")
        patch.setenv("CRAM_KEEP_TOKENS", "1")
        patch.setattr(model_files, "MILLION", 1000)  # of the 10,000 tokens of a toy model
        own = toy_model(tokens, LAYOUT)
        task = Definition(name="topics", data=str(root / FILE))
        run = Finetune(tasks=[task], seeds=1, epochs=1, batch_size=16, max_tokens=32).runs()[0]
        tuned = finetune.fn(run, own)
        pairs = PairsRun(data=str(write_pairs(root / "confidential-pairs.csv")))
        judged = minimal_pairs.fn(pairs, own)
        yield {"own": own, "modern": modern, "tuned": tuned, "report": report.fn(Report(), [tuned], [judged])}


def ran(*arguments: object) -> str:
    """What the command prints."""
    done = CliRunner().invoke(app, list(map(str, arguments)), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def assert_refused(named: str, *arguments: object) -> None:
    with pytest.raises(InputError, match=named) as raised:
        ran(*arguments)
    assert "\n" not in str(raised.value)


# What a folder has


@pytest.mark.parametrize(("name", "options"), [("own", []), ("tuned", ["--without-code"])])
def test_nothing_of_the_text_the_files_or_the_paths_is_in_an_export(made, name: str, options: list, tmp_path: Path):
    ran("export", made[name].name, tmp_path / "out", *options)
    files = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert set(files) == (MODEL if options else MODEL | CODE)
    assert files["model.safetensors"] == (made[name].path / "model.safetensors").read_bytes()
    held_out = pq.read_table(made["own"].path / HELDOUT_TEXT)["text"].to_pylist()
    telling = [FOLDER, FILE, "toy.jsonl", "confidential", str(tmp_path), *held_out]
    telling += [text.split(". ")[0] for text in held_out]  # a word of its own in each
    before = b"".join(path.read_bytes() for path in made[name].path.iterdir() if path.suffix == ".json")
    assert b"toy.jsonl" in before
    assert b"confidential" in before or name == "own"
    content = b"\n".join(files.values()).lower()
    assert [word for word in telling if word.lower().encode() in content] == []
    card = files["README.md"].decode()
    assert "local files (1)" in card or name == "tuned"
    assert "cram export" not in card


@pytest.mark.parametrize("command", ["export", "push"])
def test_a_tasks_name_is_its_newest_kept_model(made, command: str, tmp_path: Path):
    place = [tmp_path / "out"] if command == "export" else ["some/body", "--dry-run"]
    assert f"{made['tuned'].name}, task topics" in ran(command, "topics", *place)
    with pytest.raises(InputError, match="'topic'"):
        ran(command, "topic", *place)


def test_the_card_has_the_scores_of_the_newest_report_of_this_very_model(made, tmp_path: Path, monkeypatch):
    assert made["report"].name in ran("export", "latest", tmp_path / "a")
    card = ModelCard((tmp_path / "a" / "README.md").read_text())
    expected = made["tuned"].stats["validation"]["validation"]["metrics"]
    assert [score.metric_value for score in card.data.eval_results] == [round(each, 2) for each in expected.values()]
    assert "topics: left out line 242, without text" in card.text  # of the file, without its name
    assert "own pairs 1, all" in card.text
    assert "no report of this model" in ran("export", made["modern"].name, tmp_path / "other")
    monkeypatch.setattr(
        "tasks.store.artifacts.digests_of_contents", lambda inputs: dict.fromkeys(("x", *inputs), "other")
    )
    assert "no report of this model" in ran("export", made["own"].name, tmp_path / "b")
    assert ModelCard((tmp_path / "b" / "README.md").read_text()).data.eval_results is None


def opened_without_cram(home: Path, lines: list[str]) -> list[list | str]:
    """The answers of the models that these lines of Python open, or the errors, in a process that can't import cram."""
    env = {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-c", WITHOUT_CRAM % IDS, json.dumps(lines)]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, env=env, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


IDS = [[2, 40, 41, 4, 42, 3], [2, 50, 4, 3, 0, 0]]
WITHOUT_CRAM = """
import json, sys
class Nowhere:
    def find_spec(self, name, *_):
        if name.split(".")[0] in ("model", "tasks", "flows"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Nowhere())
import torch, transformers
answers = []
for line in json.loads(sys.argv[1]):
    try:
        exec(line)
        ids = torch.tensor(%s)
        with torch.no_grad():
            answers.append(model(input_ids=ids, attention_mask=(ids != 0).long())[0].tolist())
    except Exception as error:
        answers.append(f"{type(error).__name__}: {error}")
print()
print(json.dumps(answers))
"""


def test_the_last_line_of_an_export_opens_the_model_without_cram_if_its_code_is_trusted(
    made, tmp_path: Path, transformers
):
    def last_line(name: str, *options: str) -> str:
        folder = tmp_path / "".join([name, *options])
        done = CliRunner().invoke(app, ["export", made[name].name, str(folder), *options])
        return done.stdout.splitlines()[-1]

    masked, classifier, modern = map(last_line, ("own", "tuned", "modern"))
    untrusted = masked.replace(", trust_remote_code=True", "")
    plain = last_line("own", "--without-code")
    lacking = plain.removeprefix("import model.hf; ")
    # the first two before any code is trusted
    answers = opened_without_cram(tmp_path / "cache", [untrusted, lacking, plain, classifier, masked, modern])
    refused, unknown, not_installed, classes, tokens, modern_tokens = answers
    ids = torch.tensor(IDS)
    with torch.no_grad():
        for name, scores in (("own", tokens), ("modern", modern_tokens)):
            bert = export.load(tmp_path / name).eval()
            np.testing.assert_allclose(scores[0], bert.logits(bert.encode(ids, padded=True))[0], rtol=1e-5, atol=2e-5)
        ours = transformers.AutoModelForSequenceClassification.from_pretrained(made["tuned"].path).eval()
        expected = ours(input_ids=ids, attention_mask=(ids != 0).long()).logits
        np.testing.assert_allclose(classes, expected, rtol=1e-5, atol=2e-5)
    assert "trust_remote_code=True" in refused
    assert unknown.startswith("ValueError")
    assert "`cram`" in unknown
    assert not_installed.startswith("ModuleNotFoundError")
    opened: dict = {}
    exec(plain, opened)
    assert type(opened["model"]).__name__ == "CramForMaskedLM"


def test_a_card_says_what_trust_remote_code_runs(made, tmp_path: Path):
    cards = {}
    for name, option in (("own", ""), ("plain", "--without-code"), ("modern", "--with-code")):
        model = made["modern" if name == "modern" else "own"]
        said = ran("export", model.name, tmp_path / name, *filter(None, [option]))
        cards[name] = (tmp_path / name / "README.md").read_text()
        assert ("no code to add" in said) == (name == "modern")
    assert 'model="FOLDER", trust_remote_code=True' in cards["own"]
    assert re.search("trust_remote_code=True` lets transformers run.*`hf.py` and `layers.py`", cards["own"])
    assert "import model.hf" not in cards["own"]
    assert "import model.hf" in cards["plain"]
    assert "auto_map" not in (tmp_path / "plain" / "config.json").read_text()
    assert "trust_remote_code" not in cards["plain"] + cards["modern"]
    assert {path.name for path in (tmp_path / "modern").iterdir()} == MODEL


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
    folder = tmp_path / FOLDER
    out = tmp_path / "out"
    transformers.AutoTokenizer.from_pretrained(made["own"].path).save_pretrained(folder)
    bert = transformers.AutoModelForMaskedLM.from_pretrained(made["own"].path)
    bert.save_pretrained(folder, max_shard_size="20KB")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"_name_or_path": str(folder)}))
    with store_of_its_own(tmp_path / "artifacts"):
        ran("export", adopt.find_model(str(folder)).key, out)
    assert len(list(out.glob("model-*.safetensors"))) > 1
    own = export.load(made["own"].path).state_dict()
    assert all(torch.equal(tensor, own[name]) for name, tensor in export.load(out).state_dict().items())
    assert not [path.name for path in out.iterdir() if FOLDER.encode() in path.read_bytes()]


@pytest.mark.parametrize("name", ["own", "tuned"])
@pytest.mark.filterwarnings("ignore")  # the exporter's
def test_an_export_is_for_sentence_transformers_and_onnxruntime_too(made, name: str, tmp_path: Path, transformers):
    out = tmp_path / "out"
    sentences = ["the river", "an old clock in the morning"]
    command = ["export", made[name].name]
    assert CliRunner().invoke(app, [*command, str(out), "--sentence-transformers"]).exit_code == 0
    modules = json.loads((out / "modules.json").read_text())
    assert [(out / module["path"] / "config.json").is_file() for module in modules] == [True, True]
    assert "SentenceTransformer" in (out / "README.md").read_text()
    if not importlib.util.find_spec("onnxscript"):
        with pytest.raises(InputError, match=r"onnxscript is not installed.*cram\[onnx\]"):
            CliRunner().invoke(app, [*command, str(tmp_path / "onnx"), "--onnx"], catch_exceptions=False)
        assert [path.name for path in tmp_path.iterdir()] == ["out"]
        return
    assert CliRunner().invoke(app, [*command, str(tmp_path / "onnx"), "--onnx"]).exit_code == 0
    inputs = transformers.AutoTokenizer.from_pretrained(out)(sentences, padding=True, return_tensors="np")
    feeds = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    head = "MaskedLM" if name != "tuned" else "SequenceClassification"
    model = getattr(transformers, f"AutoModelFor{head}").from_pretrained(out).eval()
    with torch.no_grad():
        expected = model(**{name: torch.from_numpy(value) for name, value in feeds.items()}).logits.numpy()
    runtime = pytest.importorskip("onnxruntime").InferenceSession(tmp_path / "onnx" / "onnx" / "model.onnx")
    (logits,) = runtime.run(["logits"], feeds)
    real = feeds["attention_mask"] > 0 if head == "MaskedLM" else slice(None)
    np.testing.assert_allclose(logits[real], expected[real], atol=1e-5)


# What is refused


def test_a_model_is_named_by_its_key_or_the_start_of_one(made, tmp_path: Path):
    for name in ("own", "tuned"):
        ran("export", made[name].key[:6], tmp_path / name, "--without-code")
        assert (tmp_path / name / "config.json").read_bytes() == (made[name].path / "config.json").read_bytes()
    other = tmp_path / "other"
    shutil.copytree(made["own"].path, other)
    (other / "stage.json").unlink()
    out = tmp_path / "out"
    assert_refused("stage report", "export", "report/latest", out)
    assert_refused("No complete", "export", made["report"].key, out)
    assert_refused("two stages", "export", "", out)
    assert_refused("stage.json", "export", other, out)
    assert not out.exists()


@pytest.mark.parametrize("name", ["own", "tuned"])
def test_a_hollow_model_is_refused_in_a_sentence(made, name: str, tmp_path: Path):
    model = made[name]
    out = tmp_path / "out"
    root = tmp_path / "artifacts"
    shutil.copytree(model.path.parents[1], root, symlinks=True)
    manifest = root / model.name / "stage.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"hollow": ["model.safetensors"]}))
    (manifest.parent / "model.safetensors").unlink()
    if name == "own":
        others = [("fill", "[MASK]", "--model", model.name), ("evaluate", model.name, "tokenize/latest")]
    else:
        others = [("predict", model.key, root / "tokenize"), ("export", "finetune/latest", out)]
    with store_of_its_own(root):
        print_blanks(Artifact(stage="pretrain", key=made["own"].key))  # of a run that is cached, at its end
        for command in (("export", model.name, out), ("push", model.name, "me/own", "--dry-run"), *others):
            assert_refused("hollow", *command)
        assert not out.exists()


def test_a_folder_that_lacks_a_file_of_its_manifest_is_refused_and_what_is_beside_them_stays(made, tmp_path: Path):
    there = tmp_path / "there"
    shutil.copytree(made["own"].path, there)
    (there / "model.safetensors.bak").write_text("mine")
    (there / "model-mine.safetensors").symlink_to("/etc/passwd")
    ran("export", there, tmp_path / "out")
    assert {path.name for path in (tmp_path / "out").iterdir()} == MODEL | CODE
    (there / "tokenizer.json").unlink()
    assert_refused("has no tokenizer.json", "export", there, tmp_path / "new")
    assert_refused("has no tokenizer.json", "push", there, "me/own", "--dry-run")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()], ids=repr)
def test_an_export_that_fails_leaves_nothing(made, tmp_path: Path, monkeypatch, error: BaseException):
    copy = shutil.copyfile
    copies = []
    out = tmp_path / "new" / "out"
    is_there = isinstance(error, OSError)
    if is_there:
        out.mkdir(parents=True)

    def fails(source: Path, target: Path) -> None:
        copies.append(copy(source, target))
        if len(copies) == 2:
            raise error

    monkeypatch.setattr(shutil, "copyfile", fails)
    with pytest.raises((InputError, KeyboardInterrupt), match="No space left" if is_there else "^$"):
        commands.export(made["own"].name, out)
    assert len(copies) == 2
    assert [path.name for path in out.parent.rglob("*")] == (["out"] if is_there else [])
    monkeypatch.undo()
    ran("export", made["own"].name, out)
    assert {path.name for path in out.iterdir()} == MODEL | CODE


def test_a_folder_with_anything_in_it_stays_as_it_is(made, tmp_path: Path):
    (tmp_path / "mine").write_text("mine")
    for taken in (tmp_path, tmp_path / "mine"):
        assert_refused(r"Not a directory|Directory not empty", "export", made["own"].name, taken)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("mine", "mine")]
    assert made["own"] in artifacts_of("pretrain")


# The hub

TOKEN = "hf_writes"
INVALID = "Invalid credentials in Authorization header"
LFS = (".safetensors", ".onnx")
ACTIONS = "resolve|preupload|commit|branch|tree|revision|info"
ROUTE = rf"(?:/api/models)?/(\w+/[\w.-]+?)(?:\.git)?/({ACTIONS})/([^/]+)(?:/(.*))?"  # of a request
PARTS = {"README.md": b"by hand", "model-00001-of-00002.safetensors": b"of before", "hf.py": b"of before"}


def oid(path: str, content: bytes) -> str:
    """The name of a file's content on the hub: git's, or for LFS its SHA-256."""
    if path.endswith(LFS):
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


class Hub(ThreadingHTTPServer):
    """A double of the hub: repositories with branches of files. `sent`: the files that commits brought, by branch."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.branches = {}
        self.private = {}
        self.blobs = {}
        self.sent = []
        self.refuses: tuple[int, dict] | None = None  # status and headers of every answer

    def sha(self, name: str, branch: str) -> str:
        """The commit: one for the same files."""
        files = self.branches[name][branch]
        return hashlib.sha1(json.dumps({path: oid(path, files[path]) for path in sorted(files)}).encode()).hexdigest()


class Handler(BaseHTTPRequestHandler):
    """Answers one request."""

    server: Hub

    def log_message(self, *_: object) -> None: ...

    def answer(self, about: object = None, status: int = 200, headers: dict | None = None) -> None:
        body = about if isinstance(about, bytes) else json.dumps(about).encode()
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(body))} | (headers or {})).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(b"" if self.command == "HEAD" else body)

    def do_PUT(self) -> None:
        content = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.blobs[hashlib.sha256(content).hexdigest()] = content
        self.answer()

    def do_GET(self) -> None:
        hub = self.server
        path = unquote(urlsplit(self.path).path)
        found = re.fullmatch(ROUTE, path)
        name, action, branch, inner = found.groups() if found else (path.removeprefix("/api/models/"), "", "main", "")
        branches = hub.branches.get(name, {})
        branch = next((each for each in branches if hub.sha(name, each) == branch), branch)
        if hub.refuses or branch not in branches:
            problem = {"X-Error-Code": "RevisionNotFound" if branches else "RepoNotFound"}
            return self.answer({}, *(hub.refuses or (404, problem)))
        files = branches[branch]
        if action == "resolve":
            if inner not in files:
                return self.answer({}, 404, {"X-Error-Code": "EntryNotFound"})
            about = {"X-Repo-Commit": hub.sha(name, branch), "ETag": f'"{oid(inner, files[inner])}"'}
            return self.answer(files[inner], headers=about)
        if action == "tree":
            rows = [{"type": "file", "path": p, "size": len(c), "oid": oid(p, c)} for p, c in files.items()]
            return self.answer(rows)
        about = {"id": name, "sha": hub.sha(name, branch), "private": hub.private[name]}
        return self.answer(about | {"siblings": [{"rfilename": path} for path in files]})

    do_HEAD = do_GET

    def do_POST(self) -> None:
        hub = self.server
        path = unquote(urlsplit(self.path).path)
        rows = list(map(json.loads, self.rfile.read(int(self.headers["Content-Length"])).splitlines()))
        if self.headers["Authorization"] != f"Bearer {TOKEN}" or hub.refuses:
            return self.answer({}, *(hub.refuses or (401, {"X-Error-Message": INVALID})))
        if path == "/api/validate-yaml":
            wrong = "license: nonsense" in rows[0]["content"]
            return self.answer({"errors": [{"message": "no such licence"}] * wrong}, 400 if wrong else 200)
        if path == "/api/repos/create":
            name = f"{rows[0]['organization']}/{rows[0]['name']}"
            is_new = name not in hub.branches
            if is_new:
                hub.branches[name] = {"main": {".gitattributes": b"x"}}
                hub.private[name] = rows[0].get("visibility") == "private" or rows[0].get("private", False)
            return self.answer({"url": f"{hub.url}/{name}"}, 200 if is_new else 409)
        name, action, branch, _ = re.fullmatch(ROUTE, path).groups()
        if action == "info":
            there = [each["oid"] in hub.blobs for each in rows[0]["objects"]]
            places = [{} if known else {"actions": {"upload": {"href": f"{hub.url}/lfs"}}} for known in there]
            objects = [each | place for each, place in zip(rows[0]["objects"], places, strict=True)]
            return self.answer({"transfer": "basic", "objects": objects})
        files = hub.branches[name].setdefault(branch, dict(hub.branches[name]["main"]))
        if action == "preupload":
            modes = {file["path"]: "lfs" if file["path"].endswith(LFS) else "regular" for file in rows[0]["files"]}
            known = {p: {"oid": oid(p, files[p])} if p in files else {} for p in modes}
            about = [{"path": p, "uploadMode": mode, "shouldIgnore": False} | known[p] for p, mode in modes.items()]
            return self.answer({"files": about})
        for row in rows if action == "commit" else ():
            about = row["value"]
            place = row["value"].get("path")
            if row["key"] == "deletedFile":
                del files[place]
            elif place:
                files[place] = base64.b64decode(about["content"]) if "content" in about else hub.blobs[about["oid"]]
                hub.sent.append(f"{branch}:{place}")
        return self.answer({"commitOid": hub.sha(name, branch), "commitUrl": f"{hub.url}/{name}/commit/x"})


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """The double, to which the client of this process is pointed, with a token that may write."""
    server = Hub()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)  # whose protocol the double lacks
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    yield server
    server.shutdown()
    server.server_close()


def examples(*cards: str) -> list[str]:
    """What the code of these cards prints in a process that pasted it, which fetches the models from the double."""
    codes = [code for card in cards for code in re.findall(r"```python\n(.*?)```", card, flags=re.DOTALL)]
    own = {"HF_ENDPOINT": constants.ENDPOINT, "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", "\n".join(f"exec({code!r}, {{}})" for code in codes)],
        cwd=HOME, env=own | {"HF_HOME": str(home.root() / "hf")}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert len(codes) == len(cards)
    return done.stdout.splitlines()


def test_a_push_is_private_and_has_the_listed_files_whose_cards_code_runs_as_it_stands(made, hub: Hub):
    listed = ran("push", made["own"].name, "me/own", "--checkpoints", "--license", "mit")
    ran("push", made["modern"].name, "me/modern", "--public")
    said = ran("push", made["tuned"].name, "me/tuned", "--without-code")
    assert "\nimport model.hf; from transformers import AutoModelForSequenceClassification; model" in said
    assert '.from_pretrained("me/tuned")' in said
    assert hub.private == {"me/own": True, "me/modern": False, "me/tuned": True}
    sizes = {name: int(size.replace(",", "")) for size, name in re.findall(r"^ +([\d,]+)  (.+)$", listed, re.MULTILINE)}
    assert sizes.keys() == MODEL | CODE | {f"{branch}: {name}" for branch in ON_ITS_WAY for name in MODEL | CODE}
    for branch, files in hub.branches["me/own"].items():
        prefix = "" if branch == "main" else f"{branch}: "
        assert {prefix + name: len(content) for name, content in files.items() if name != ".gitattributes"} == {
            name: size for name, size in sizes.items() if name.startswith(prefix) and (prefix or ": " not in name)
        }
    own = {branch: files["README.md"].decode() for branch, files in hub.branches["me/own"].items()}
    data = {branch: ModelCard(card).data for branch, card in own.items()}
    assert (data["main"].license, data["budget-30"].license) == ("mit", "mit")
    assert data["main"].eval_results
    assert data["budget-30"].eval_results is None
    assert "after 30 % of the budget" in own["budget-30"]
    assert re.search(r"weights after 2,[\d]{3} tokens \(\d steps\)", own["tokens-2M"])
    assert "weights before the first step" in own["step0"]
    assert "`budget-10` to `budget-90`" in own["main"]
    assert "`step0`, `tokens-1M`, `tokens-2M`, `tokens-4M`, `tokens-8M`" in own["main"]
    assert "transformers has no class for its layout or head" in listed
    others = [hub.branches[name]["main"]["README.md"].decode() for name in ("me/modern", "me/tuned")]
    first, tenth, untrained, modern, tuned = examples(own["main"], own["budget-30"], own["step0"], *others)
    assert len({first, tenth, untrained}) == 3
    assert all("token_str" in line for line in (first, tenth, untrained, modern))
    assert "label" in tuned


def test_a_second_push_uploads_what_differs_and_deletes_only_files_of_a_former_push(made, hub: Hub):
    name = made["own"].name
    ran("push", name, "me/own")
    assert {path.partition(":")[2] for path in hub.sent} == MODEL | CODE
    hub.sent.clear()
    assert "main: unchanged" in ran("push", name, "me/own")
    assert not hub.sent
    hub.branches["me/own"]["main"] |= PARTS | {"notes.txt": b"mine"}
    said = ran("push", name, "me/own", "--public", "--without-code")
    assert "private, as it was before" in said
    assert set(hub.sent) == {"main:README.md", "main:config.json"}
    assert hub.branches["me/own"]["main"].keys() == MODEL | {"notes.txt", ".gitattributes"}


def test_a_dry_run_needs_no_network_and_no_token(made, monkeypatch):
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    command = ("push", made["tuned"].name, "me/tuned")
    assert "Nothing was pushed" in ran(*command, "--dry-run")
    assert_refused("no token", *command)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert_refused("can't be reached", *command)


def test_what_is_pushed_is_copied_where_temporary_files_can_be_no_links(made, monkeypatch):
    listed = ran("push", made["tuned"].name, "me/tuned", "--dry-run")
    refused = Mock(side_effect=OSError(errno.EPERM, "Operation not permitted"))
    monkeypatch.setattr(Path, "symlink_to", refused)
    assert ran("push", made["tuned"].name, "me/tuned", "--dry-run") == listed
    assert refused.called


@pytest.mark.parametrize(
    ("status", "headers", "named"),
    [
        (401, {"X-Error-Message": INVALID}, f"me/own: {INVALID}.*token"),
        (403, {"X-Error-Message": "You don't have the rights"}, "the rights.*me/own"),
        (500, {}, "me/own"),
    ],
)
def test_a_hub_that_refuses_is_told_of_in_a_sentence(made, hub: Hub, status: int, headers: dict, named: str):
    hub.refuses = status, headers
    assert_refused(named, "push", made["own"].name, "me/own")


def test_a_public_model_of_that_name_is_not_written_to_unless_that_is_asked_for(made, hub: Hub):
    own = made["own"].name
    hub.branches["me/own"] = {"main": {}}
    hub.private["me/own"] = False
    assert_refused(r"me/own .*public", "push", own, "me/own")
    assert not hub.sent
    assert_refused("no such licence", "push", own, "me/own", "--public", "--license", "nonsense")
    for wrong in ("own", "me/own/too", "me/ö"):
        assert_refused("OWNER/NAME", "push", own, wrong)
    assert_refused("CRAM_KEEP_TOKENS=1", "push", made["modern"].name, "me/own", "--checkpoints")


def test_models_kept_on_the_way_change_nothing_else_and_are_whole_after_a_kill(made, monkeypatch):
    own = made["own"]
    save = export.save
    calls = []
    files = bytes_of(own)
    read = digests_of_contents({"start": own})
    tokens = artifact_named(own.manifest["inputs"]["tokens"])
    there = {Path(path).parent for path in files if path.startswith(KEPT)}
    numbers = {"tenths": range(10, 100, 10), "tokens": [0, 1, 2, 4, 8]}
    assert there == {Path(kind, str(number)) for kind in KEPT for number in numbers[kind]}

    def killed(bert: Bert, folder: Path) -> None:
        save(bert, folder)
        calls.append((folder / "model.safetensors").write_bytes(b"half"))
        if len(calls) == 4:
            raise KeyboardInterrupt

    monkeypatch.setattr(export, "save", killed)
    for name in ("CRAM_KEEP_TENTHS", "CRAM_KEEP_TOKENS"):
        monkeypatch.setenv(name, "1")
    refresh(own)
    with pytest.raises(KeyboardInterrupt):
        toy_model(tokens, LAYOUT)
    monkeypatch.setattr(export, "save", save)
    assert toy_model(tokens, LAYOUT) == own
    models = {path for path in files if path.endswith(".safetensors")}
    assert {path: bytes_of(own)[path] for path in models} == {path: files[path] for path in models}
    for name in ("CRAM_KEEP_TENTHS", "CRAM_KEEP_TOKENS"):
        monkeypatch.delenv(name)
    refresh(own)
    assert toy_model(tokens, LAYOUT) == own
    assert digests_of_contents({"start": own}) == read
    assert not any((own.path / kind).exists() for kind in KEPT)
    for name in ("CRAM_KEEP_TOKENS", "CRAM_KEEP_TENTHS"):
        monkeypatch.setenv(name, "yes")
        with pytest.raises(InputError, match=f"{name} is 'yes'"):
            Pretrain(architecture=LAYOUT).check()
