"""`cram push`: what goes to the Hugging Face hub, of which a double serves here, and what opens from there."""

import base64
import errno
import hashlib
import importlib.util
import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from unittest.mock import Mock
from urllib.parse import unquote, urlsplit

import numpy as np
import pytest
import torch
from conftest import bytes_of, store_of_its_own, toy_model, toy_tokens
from huggingface_hub import ModelCard, constants
from test_cli_export import CODE, LAYOUT, MODEL, MODERN
from typer.testing import CliRunner

from flows.cli.main import app
from model import export as model_export
from model.bert import Bert
from model.errors import InputError
from model.files import TENTHS
from tasks.finetune import Finetune, finetune
from tasks.glue.own import Definition
from tasks.pretrain import Pretrain
from tasks.report import Report, report
from tasks.store import home
from tasks.store.artifacts import Artifact, artifact_named, digests_of_contents
from tasks.store.publish import refresh

HOME, TOKEN, INVALID = Path(__file__).parents[1], "hf_writes", "Invalid credentials in Authorization header"
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
        self.branches, self.private, self.blobs, self.sent = {}, {}, {}, []
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
        hub, path = self.server, unquote(urlsplit(self.path).path)
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
        hub, path = self.server, unquote(urlsplit(self.path).path)
        rows = list(map(json.loads, self.rfile.read(int(self.headers["Content-Length"])).splitlines()))
        if self.headers["Authorization"] != f"Bearer {TOKEN}" or hub.refuses:
            return self.answer({}, *(hub.refuses or (401, {"X-Error-Message": INVALID})))
        if path == "/api/validate-yaml":
            wrong = "license: nonsense" in rows[0]["content"]
            return self.answer({"errors": [{"message": "no such licence"}] * wrong}, 400 if wrong else 200)
        if path == "/api/repos/create":
            name = f"{rows[0]['organization']}/{rows[0]['name']}"
            if is_new := name not in hub.branches:
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
            about, place = row["value"], row["value"].get("path")
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


@pytest.fixture(scope="module", autouse=True)
def made(tmp_path_factory, toy_texts: list[str]) -> Iterator[dict[str, Artifact]]:
    """Models of a layout of cram's own, with those of its tenths, and of transformers'; one finetuned; its report."""
    root = tmp_path_factory.mktemp("store")
    rows = [f"the {word} {number},{word}" for number in range(120) for word in ("river", "clock")]
    (root / "topics.csv").write_text("\n".join(["text,label", *rows]) + "\n")
    with store_of_its_own(root / "artifacts"), pytest.MonkeyPatch.context() as patch:
        tokens = toy_tokens(root, toy_texts)["tokens"]
        modern = toy_model(tokens, MODERN)
        patch.setenv("CRAM_KEEP_TENTHS", "1")
        own = toy_model(tokens, LAYOUT)
        task = Definition(name="topics", data=str(root / "topics.csv"))
        tuned = finetune.fn(Finetune(tasks=[task], seeds=1, epochs=1, batch_size=16, max_tokens=32).runs()[0], own)
        yield {"own": own, "modern": modern, "tuned": tuned, "report": report.fn(Report(), [tuned])}


def pushed(*arguments: object) -> str:
    """What the command prints."""
    done = CliRunner().invoke(app, ["push", *map(str, arguments)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def examples(hub: Hub, *cards: str) -> list[str]:
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
    listed = pushed(made["own"].name, "me/own", "--checkpoints", "--license", "mit")
    pushed(made["modern"].name, "me/modern", "--public")
    pushed(made["tuned"].name, "me/tuned")
    assert hub.private == {"me/own": True, "me/modern": False, "me/tuned": True}
    sizes = {name: int(size.replace(",", "")) for size, name in re.findall(r"^ +([\d,]+)  (.+)$", listed, re.MULTILINE)}
    tenths = [f"budget-{percent}" for percent in range(10, 100, 10)]
    assert sizes.keys() == MODEL | {f"{branch}: {name}" for branch in tenths for name in MODEL}
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
    assert "transformers has no class for its layout or head" in listed
    cards = [
        own["main"],
        own["budget-30"],
        *(hub.branches[f"me/{n}"]["main"]["README.md"].decode() for n in ("modern", "tuned")),
    ]
    first, tenth, modern, tuned = examples(hub, *cards)
    assert first != tenth
    assert all("token_str" in line for line in (first, tenth, modern))
    assert "label" in tuned


def test_a_second_push_uploads_what_differs_and_deletes_only_files_of_a_former_push(made, hub: Hub):
    name = made["own"].name
    pushed(name, "me/own", "--with-code")
    assert {path.partition(":")[2] for path in hub.sent} == MODEL | CODE
    hub.sent.clear()
    assert "main: unchanged" in pushed(name, "me/own", "--with-code")
    assert not hub.sent
    hub.branches["me/own"]["main"] |= PARTS | {"notes.txt": b"mine"}
    said = pushed(name, "me/own", "--public")
    assert "private, as it was before" in said
    assert set(hub.sent) == {"main:README.md", "main:config.json"}
    assert hub.branches["me/own"]["main"].keys() == MODEL | {"notes.txt", ".gitattributes"}


def test_a_dry_run_needs_no_network_and_no_token(made, monkeypatch):
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    said = pushed(made["tuned"].name, "me/tuned", "--dry-run")
    assert "Nothing was pushed" in said
    with pytest.raises(InputError, match="no token"):
        pushed(made["tuned"].name, "me/tuned")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with pytest.raises(InputError, match="can't be reached"):
        pushed(made["tuned"].name, "me/tuned")


def test_what_is_pushed_is_copied_where_temporary_files_can_be_no_links(made, monkeypatch):
    listed = pushed(made["tuned"].name, "me/tuned", "--dry-run")
    refused = Mock(side_effect=OSError(errno.EPERM, "Operation not permitted"))
    monkeypatch.setattr(Path, "symlink_to", refused)
    assert pushed(made["tuned"].name, "me/tuned", "--dry-run") == listed
    assert refused.called


@pytest.mark.parametrize(
    ("status", "headers", "said"),
    [
        (401, {"X-Error-Message": INVALID}, f"me/own: {INVALID}.*token"),
        (403, {"X-Error-Message": "You don't have the rights"}, "the rights.*me/own"),
        (500, {}, "me/own"),
    ],
)
def test_a_hub_that_refuses_is_told_of_in_a_sentence(made, hub: Hub, status: int, headers: dict, said: str):
    hub.refuses = status, headers
    with pytest.raises(InputError, match=said) as raised:
        pushed(made["own"].name, "me/own")
    assert "\n" not in str(raised.value)


def test_a_public_model_of_that_name_is_not_written_to_unless_that_is_asked_for(made, hub: Hub):
    hub.branches["me/own"], hub.private["me/own"] = {"main": {}}, False
    with pytest.raises(InputError, match=r"me/own .*public"):
        pushed(made["own"].name, "me/own")
    assert not hub.sent
    with pytest.raises(InputError, match="no such licence"):
        pushed(made["own"].name, "me/own", "--public", "--license", "nonsense")
    for wrong in ("own", "me/own/too", "me/ö"):
        with pytest.raises(InputError, match="OWNER/NAME"):
            pushed(made["own"].name, wrong)
    with pytest.raises(InputError, match="CRAM_KEEP_TENTHS=1"):
        pushed(made["modern"].name, "me/own", "--checkpoints")


def test_models_at_tenths_change_nothing_else_and_are_whole_after_a_kill(made, monkeypatch):
    own, save, calls = made["own"], model_export.save, []
    files, read = bytes_of(own), digests_of_contents({"start": own})
    tokens = artifact_named(own.manifest["inputs"]["tokens"])
    assert {path.split("/")[1] for path in files if path.startswith(TENTHS)} == set(map(str, range(10, 100, 10)))

    def killed(bert: Bert, folder: Path) -> None:
        save(bert, folder)
        calls.append((folder / "model.safetensors").write_bytes(b"half"))
        if len(calls) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(model_export, "save", killed)
    monkeypatch.setenv("CRAM_KEEP_TENTHS", "1")
    refresh(own)
    with pytest.raises(KeyboardInterrupt):
        toy_model(tokens, LAYOUT)
    monkeypatch.setattr(model_export, "save", save)
    assert toy_model(tokens, LAYOUT) == own
    models = {path for path in files if path.endswith(".safetensors")}
    assert {path: bytes_of(own)[path] for path in models} == {path: files[path] for path in models}
    monkeypatch.delenv("CRAM_KEEP_TENTHS")
    refresh(own)
    assert toy_model(tokens, LAYOUT) == own
    assert digests_of_contents({"start": own}) == read
    assert not (own.path / TENTHS).exists()
    monkeypatch.setenv("CRAM_KEEP_TENTHS", "yes")
    with pytest.raises(InputError, match="CRAM_KEEP_TENTHS is 'yes'"):
        Pretrain(architecture=LAYOUT).check()


@pytest.mark.parametrize("name", ["own", "modern", "tuned"])
@pytest.mark.filterwarnings("ignore")  # the exporter's
def test_an_export_is_for_sentence_transformers_and_onnxruntime_too(made, name: str, tmp_path: Path, transformers):
    out, sentences = tmp_path / "out", ["the river", "an old clock in the morning"]
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
