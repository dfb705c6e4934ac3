"""Remotes: pushes and pulls through a folder, fsspec's memory and an S3 server, also interrupted and with damage."""

import errno
import json
import logging
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import fsspec
import pytest
from chain import CALLS, MODEL, PARTS, TEXT, TOKENS, chain
from conftest import bytes_of
from fsspec.implementations.local import LocalFileSystem

from flows.cli import main
from model.errors import InputError
from tasks.store import home
from tasks.store.artifacts import Artifact, artifacts_of, draft_of, find
from tasks.store.gc import collect
from tasks.store.locks import drafts
from tasks.store.manifests import verify
from tasks.store.remote import Remote


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Go to the machine of this name, which has a store of its own."""

    def go(name: str) -> Path:
        monkeypatch.setenv("CRAM_ARTIFACTS", str(tmp_path / name))
        return tmp_path / name

    go("first")
    return go


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    """A bucket on an S3 server at the loopback address."""
    pytest.importorskip("s3fs")
    moto = pytest.importorskip("moto.server")
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    own = {"AWS_ENDPOINT_URL": f"http://{host}:{port}", "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
    own |= {"AWS_DEFAULT_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in own.items():
            patch.setenv(name, value)
        fsspec.filesystem("s3").mkdir("bucket")
        yield "s3://bucket/a/folder"
        fsspec.filesystem("s3").clear_instance_cache()
    server.stop()


@pytest.fixture(params=["folder", "file", "memory", "s3"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The address of an empty remote."""
    if request.param == "s3":
        return f"{request.getfixturevalue('s3')}/{tmp_path.name}"
    return {
        "folder": f"{tmp_path}/remote",
        "file": f"file://{tmp_path}/remote",
        "memory": f"memory://{tmp_path.name}/remote",
    }[request.param]


@pytest.fixture
def remote(machine, tmp_path: Path) -> str:
    """The address of a remote in a folder."""
    return str(tmp_path / "remote")


def push(artifact: Artifact, url: str, everything: bool = False) -> dict[str, list[str]]:
    """Push; the files that were sent, by artifact."""
    return {each.name: [file["path"] for file in files] for each, files in Remote(url).push(artifact, everything)}


def pull(name: str, url: str, everything: bool = False) -> dict[str, list[str]]:
    """Pull; the files that were fetched, by artifact."""
    return {each.name: [file["path"] for file in files] for each, files in Remote(url).pull(name, everything)}


def refusal(call: Callable[[], object]) -> str:
    """The one line with which a call is refused."""
    with pytest.raises(InputError) as refused:
        call()
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_a_pull_brings_hollow_ancestors_that_count_as_made_and_all_brings_them_whole(machine, url: str):
    text, links, tokens = run = chain(0, until=TOKENS)
    digests = [bytes_of(artifact) for artifact in run]
    sent = push(tokens, url)
    assert [(name, len(files)) for name, files in sent.items()] == [(text.name, 2), (links.name, 1), (tokens.name, 6)]
    assert not any(push(tokens, url).values()), "all is there"
    second = machine("second")
    fetched = pull("tokenize", url)
    assert fetched[text.name] == sent[text.name]
    assert fetched[tokens.name] == [file for file in sent[tokens.name] if file != "stats.json"], (
        "that of all is the same"
    )
    assert [bytes_of(artifact) for artifact in run] == digests
    assert {p.name for p in text.path.iterdir()} == {"stage.json", "stats.json", "lost.jsonl"}
    assert text.manifest["hollow"] == [*PARTS]
    CALLS.clear()
    assert chain(0, until=TOKENS) == run
    assert CALLS == [], "nothing runs again"
    verify(tokens)
    assert (second / "tokenize" / "latest").resolve() == tokens.path
    assert not any(pull(tokens.name, url).values())
    before = text.path.stat().st_ino
    assert text.name in refusal(lambda: pull(tokens.name, url, everything=True)), "its data is not at the remote"
    machine("first")
    assert push(tokens, url, everything=True)[text.name] == [*PARTS]
    machine("second")
    fetched = pull(tokens.name, url, everything=True)
    assert fetched[text.name] == [*PARTS], "the others are here"
    assert fetched[links.name] == [], "its parts are those of another"
    assert text.path.stat().st_ino != before
    for artifact in run:
        verify(artifact)
    assert (links.path / PARTS[0]).samefile(text.path / PARTS[0])
    assert not list(home.root().glob(".partial/*"))


@pytest.mark.parametrize("change", ["cut", "changed", "deleted"])
def test_a_file_that_is_damaged_at_the_remote_is_refused_by_name(machine, remote: str, change: str):
    *_, tokens = chain(0, until=TOKENS)
    push(tokens, remote)
    there = Path(remote, tokens.name, "sequences.npy")
    data = bytearray(there.read_bytes())
    data[-1] ^= 1
    there.write_bytes(data if change == "changed" else data[:-1000])
    if change == "deleted":
        there.unlink()
    machine("second")
    assert f"{remote}/{tokens.name}/sequences.npy" in refusal(lambda: pull(tokens.name, remote))
    assert artifacts_of("tokenize") == []
    assert len(artifacts_of("")) == 2, "what arrived before stays"
    machine("first")
    shutil.rmtree(there.parent)
    push(tokens, remote)
    machine("second")
    pull(tokens.name, remote)
    verify(tokens)


def test_a_pull_that_was_ended_fetches_only_what_is_not_here(machine, remote: str, monkeypatch):
    (text,) = chain(0, until=TEXT)
    push(text, remote)
    machine("second")
    get = LocalFileSystem.get_file
    asked = []
    stopped = draft_of(text) / "work"  # of a run that makes the same
    stopped.mkdir(parents=True)

    def ended(self, source: str, target: str, **options: object) -> None:
        asked.append(Path(source).name)
        get(self, source, target, **options)
        if len(asked) == 3:
            os.truncate(target, 5)
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(LocalFileSystem, "get_file", ended)
        with pytest.raises(KeyboardInterrupt):
            pull(text.name, remote)
    assert artifacts_of("download") == []
    assert pull(text.name, remote)[text.name] == [*PARTS[1:], "stats.json"], "the others are here"
    verify(text)
    assert stopped.is_dir()
    assert [draft.name for draft in drafts("")] == [stopped.parent.name]


@pytest.mark.parametrize("by", ["the same machine", "another one, whose model differs"])
def test_a_push_after_one_that_was_ended_sends_what_is_not_there_of_its_own(machine, remote: str, monkeypatch, by: str):
    model = chain(0, until=MODEL)[-1]
    put = LocalFileSystem.put_file
    own = [file["path"] for file in model.manifest["files"]]
    machine("second")
    assert chain(0, until=MODEL)[-1] == model, "another training of the same key"
    machine("first")

    def ended(self, source: str, target: str, **options: object) -> None:
        put(self, source, target, **options)
        if model.name in target:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(LocalFileSystem, "put_file", ended)
        with pytest.raises(KeyboardInterrupt):
            push(model, remote)
    assert "pretrain" in refusal(lambda: pull("pretrain", remote)), "no manifest is there"
    machine("first" if by == "the same machine" else "second")
    assert push(model, remote)[model.name] == (own[1:] if by == "the same machine" else own)
    digests = bytes_of(model)
    machine("third")
    pull("pretrain", remote)
    verify(model)
    assert bytes_of(model) == digests


def test_another_training_of_the_same_key_is_never_replaced(machine, remote: str):
    push(chain(0, until=MODEL)[-1], remote)
    machine("second")
    model = chain(0, until=MODEL)[-1]
    own = bytes_of(model)
    for call in (lambda: push(model, remote), lambda: pull(model.name, remote)):
        assert model.name in refusal(call)
    assert bytes_of(model) == own
    machine("third")
    pull(model.name, remote)
    assert bytes_of(model) != own


def test_an_artifact_is_found_by_the_beginning_of_its_key_and_the_newest_without_one(machine, remote: str):
    one, two = (chain(number, until=TEXT)[0] for number in range(2))
    for artifact in (two, one):
        push(artifact, remote)
    machine("second")
    pull(f"download/{one.key[:6]}", remote)
    assert artifacts_of("download") == [one]
    pull("download/latest", remote)
    assert find("download", "latest") == two
    pull(one.name, remote)
    assert (two.path.parent / "latest").resolve() == two.path, "the newest, not the last that came"
    assert "latest" not in refusal(lambda: pull("download/xyz", remote))
    assert one.key in refusal(lambda: pull("download/xyz", remote))
    assert "none" in refusal(lambda: pull("filter", remote))


def test_a_folder_that_holds_a_store_is_a_remote(machine):
    made = chain(0, until=TEXT)[0]
    first = str(home.root())
    machine("second")
    for name in ("download", "download/latest", f"download/{made.key[:6]}"):
        assert [*pull(name, first)] == [made.name]


EVIL = [
    lambda about: about["files"][0].update(path="../../escaped"),
    lambda about: about["files"][0].update(path="/etc/escaped"),
    lambda about: about["files"][0].update(path="stage.json/../.."),
    lambda about: about["inputs"].update(given="../../escaped/0123"),
    lambda about: about.update(key="0123456789ab"),
    lambda about: about.update(files=3),
    lambda about: about.clear(),
]


@pytest.mark.parametrize("change", EVIL)
def test_a_manifest_that_names_paths_elsewhere_or_is_junk_is_refused(machine, remote: str, tmp_path: Path, change):
    (text,) = chain(0, until=TEXT)
    push(text, remote)
    place = Path(remote, text.name, "stage.json")
    about = json.loads(place.read_text(encoding="utf-8"))
    change(about)
    place.write_text(json.dumps(about), encoding="utf-8")
    machine("second")
    assert f"{remote}/{text.name}" in refusal(lambda: pull(text.name, remote))
    assert not list(tmp_path.rglob("escaped*"))


def test_a_picture_that_was_changed_here_is_left_out_of_a_push_and_what_arrives_is_sound(machine, remote: str, caplog):
    *_, tokens = chain(0, until=TOKENS)
    (tokens.path / "more" / "loss.png").write_bytes(b"another picture")
    assert "more/loss.png" not in push(tokens, remote)[tokens.name]
    assert f"more/loss.png of {tokens.name} " in caplog.text
    assert not any(push(tokens, remote).values())
    machine("second")
    pull(tokens.name, remote)
    assert not (tokens.path / "more").exists()
    assert "more/loss.png" not in bytes_of(tokens)
    verify(tokens)
    machine("first")
    rows = tokens.path / "sequences.npy"
    rows.write_bytes(bytes(rows.stat().st_size))
    assert "sequences.npy" in refusal(lambda: push(tokens, f"{remote} two")), "no other file is left out"


def test_what_is_hollow_here_can_not_be_pushed_whole(machine, remote: str):
    text, _, tokens = chain(0, until=TOKENS)
    push(tokens, remote)
    machine("second")
    pull(tokens.name, remote)
    assert text.name in refusal(lambda: push(text, f"{remote} two"))
    assert push(tokens, f"{remote} two")[tokens.name] == [file["path"] for file in tokens.manifest["files"]]


def test_a_full_disk_is_a_sentence_of_this_machine_and_a_full_remote_is_named(machine, remote: str, monkeypatch):
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    (text,) = chain(0, until=TEXT)
    with monkeypatch.context() as patch:
        patch.setattr(LocalFileSystem, "pipe_file", full)
        with pytest.raises(OSError, match="No space left") as raised:
            push(text, remote)
    assert raised.value.filename == remote
    push(text, remote)
    here = machine("second")
    monkeypatch.setattr(LocalFileSystem, "get_file", full)
    assert str(here) in refusal(lambda: pull(text.name, remote))


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("", "CRAM_REMOTE"),
        ("nonsense://bucket", "nonsense"),
        ("/no/such/folder", "/no/such/folder"),
        ("gs://bucket/x", "gcsfs"),  # a package that isn't there
        ("s3://missing-bucket/x", "missing-bucket"),
        ("sftp://user:secret@127.0.0.1:1/x", "sftp://127.0.0.1:1/x"),
    ],
)
def test_an_address_that_does_not_answer_is_a_sentence_without_a_password(
    store: Path, request: pytest.FixtureRequest, monkeypatch, capsys, address: str, words: str
):
    if address.startswith("s3:"):
        request.getfixturevalue("s3")
    (text,) = chain(0, until=TEXT)
    monkeypatch.delenv("CRAM_REMOTE", raising=False)
    for module in ("common", "remote"):
        monkeypatch.setattr(f"flows.cli.{module}.check_stages", lambda *_, **__: None)
    monkeypatch.setattr(main, "SETTINGS", {})
    for command in ("push-artifact", "pull"):
        monkeypatch.setattr(sys, "argv", ["cram", command, text.name, *filter(None, [address])])
        with pytest.raises(SystemExit) as ended:
            main.main()
        out, err = capsys.readouterr()
        assert (ended.value.code, out, err.count("\n")) == (1, "", 1), err
        assert words in err
        assert "secret" not in err


def test_a_collection_between_two_artifacts_of_a_pull_leaves_the_first(machine, remote: str):
    *_, tokens = chain(0, until=TOKENS)
    push(tokens, remote)
    machine("second")
    for _ in Remote(remote).pull(tokens.name, everything=False):
        collect(keep=0, hollow=True, models=True)
    assert len(artifacts_of("")) == 3


def test_a_store_that_can_only_be_read_is_pushed(machine, remote: str, monkeypatch):
    def refused(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    (text,) = chain(0, until=TEXT)
    monkeypatch.setattr("tasks.store.locks.lock_artifact", refused)
    assert push(text, remote)[text.name] == [*bytes_of(text)]
