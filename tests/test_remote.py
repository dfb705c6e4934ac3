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
import numpy as np
import pytest
from conftest import bytes_of
from fsspec.implementations.local import LocalFileSystem

from flows.cli import main
from model.errors import InputError
from tasks.stage import Params, stage
from tasks.store import home
from tasks.store.artifacts import Artifact, artifacts_of, draft_of, find
from tasks.store.gc import collect
from tasks.store.locks import drafts
from tasks.store.manifests import verify
from tasks.store.remote import Remote

ROWS = 300_000


class Width(Params):
    """What differs between artifacts of one stage."""

    width: int = 1


@stage(version=1)
def corpus(params: Width, out: Path) -> dict:
    """Write two parts, samples and nothing in a third file."""
    for number in range(2):
        (out / f"part-{number}.parquet").write_bytes(os.urandom(1000) * params.width)
    (out / "samples.jsonl").write_text('{"text": "a"}\n')
    (out / "empty.txt").touch()
    return {"documents": 3}


@stage(version=1)
def copied(params: Width, given: Artifact, out: Path) -> dict:
    """Pass the parts on as links."""
    for part in given.path.glob("part-*"):
        os.link(part, out / part.name)
    return {"documents": 3}


@stage(version=1)
def sequences(params: Width, given: Artifact, others: list[Artifact], out: Path) -> dict:
    """Write data and a folder within the artifact."""
    np.save(out / "sequences.npy", np.arange(ROWS, dtype=np.uint16))
    (out / "more").mkdir()
    (out / "more" / "loss.png").write_bytes(b"picture")
    return {"sequences": ROWS}


@stage(version=1, varies=True)
def trained(params: Width, given: Artifact, out: Path) -> dict:
    """Write another result each time."""
    (out / "model.safetensors").write_bytes(os.urandom(500))
    return {"loss": 1.0}


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


def made() -> list[Artifact]:
    """The artifacts of a run."""
    text = corpus.fn(Width())
    links = copied.fn(Width(), text)
    return [text, links, sequences.fn(Width(), links, [text, corpus.fn(Width(width=2))])]


def push(artifact: Artifact, url: str, everything: bool = False) -> dict[str, int]:
    """Push; the number of files that were sent, by artifact."""
    return {each.name: len(files) for each, files in Remote(url).push(artifact, everything)}


def pull(name: str, url: str, everything: bool = False) -> dict[str, int]:
    """Pull; the number of files that were fetched, by artifact."""
    return {each.name: len(files) for each, files in Remote(url).pull(name, everything)}


def refusal(call: Callable[[], object]) -> str:
    """The one line with which a call is refused."""
    with pytest.raises(InputError) as refused:
        call()
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_a_pull_brings_the_artifact_whole_and_hollow_ones_that_count_as_made(machine, url: str):
    text, links, tokens = made()
    digests = {artifact: bytes_of(artifact) for artifact in (text, links, tokens)}
    sent = push(tokens, url)
    assert [next(iter(sent)), list(sent)[-1]] == [text.name, tokens.name]
    assert sent[text.name] == 3
    assert set(push(tokens, url).values()) == {0}, "all is there"
    second = machine("second")
    fetched = pull("sequences", url)
    assert fetched[tokens.name] == 3
    assert {artifact: bytes_of(artifact) for artifact in digests} == digests
    assert {p.name for p in text.path.iterdir()} == {"stage.json", "stats.json", "samples.jsonl", "empty.txt"}
    assert text.manifest["hollow"] == ["part-0.parquet", "part-1.parquet"]
    assert "hollow" not in tokens.manifest
    assert np.load(tokens.path / "sequences.npy", mmap_mode="r")[-1] == (ROWS - 1) % 65536
    assert made() == [text, links, tokens], "nothing runs again"
    assert text.manifest["hollow"]
    verify(tokens)
    assert (second / "sequences" / "latest").resolve() == tokens.path
    assert set(pull(tokens.name, url).values()) == {0}
    assert drafts("") == []


def test_all_brings_the_ancestors_whole_and_fills_what_is_hollow_here_and_there(machine, url: str):
    text, links, tokens = made()
    push(tokens, url)
    machine("second")
    pull(tokens.name, url)
    before = text.path.stat().st_ino
    assert text.name in refusal(lambda: pull(tokens.name, url, everything=True)), "its data is not at the remote"
    machine("first")
    assert push(tokens, url, everything=True)[text.name] == 2
    machine("second")
    fetched = pull(tokens.name, url, everything=True)
    assert fetched[text.name] == 2, "the others are here"
    assert fetched[links.name] == 0, "its parts are those of another"
    assert text.path.stat().st_ino != before
    for artifact in (text, links, tokens):
        assert "hollow" not in artifact.manifest
        verify(artifact)
    assert (links.path / "part-0.parquet").samefile(text.path / "part-0.parquet")
    assert not list(home.root().glob(".partial/*"))


@pytest.mark.parametrize("change", ["truncate", "flip", "delete"])
def test_a_file_that_is_damaged_at_the_remote_is_refused_by_name(machine, tmp_path: Path, change: str):
    *_, tokens = made()
    url = str(tmp_path / "remote")
    push(tokens, url)
    there = tmp_path / "remote" / tokens.name / "sequences.npy"
    data = bytearray(there.read_bytes())
    data[-1] ^= 1
    there.write_bytes(data if change == "flip" else data[:-1000])
    if change == "delete":
        there.unlink()
    machine("second")
    assert f"{url}/{tokens.name}/sequences.npy" in refusal(lambda: pull(tokens.name, url))
    assert artifacts_of("sequences") == []
    assert len(artifacts_of("corpus")) == 2, "what arrived before stays"
    machine("first")
    shutil.rmtree(tmp_path / "remote" / tokens.name)
    push(tokens, url)
    machine("second")
    pull(tokens.name, url)
    verify(tokens)


def test_a_pull_that_was_ended_fetches_only_what_is_not_here(machine, tmp_path: Path, monkeypatch):
    text, _, tokens = made()
    url = str(tmp_path / "remote")
    push(tokens, url, everything=True)
    machine("second")
    get, asked = LocalFileSystem.get_file, []

    def ended(self, source: str, target: str, **options: object) -> None:
        asked.append(Path(source).name)
        get(self, source, target, **options)
        if len(asked) == 3:
            os.truncate(target, 5)
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(LocalFileSystem, "get_file", ended)
        with pytest.raises(KeyboardInterrupt):
            pull(text.name, url)
    assert artifacts_of("corpus") == []
    assert [draft.name for draft in drafts("corpus")] == [f"corpus-{text.key}.pull"]
    assert pull(text.name, url)[text.name] == 3, "two of the five are here"
    verify(text)
    assert drafts("") == []


@pytest.mark.parametrize(("next_one", "sent"), [("first", 1), ("second", 2)])
def test_a_push_after_one_that_was_ended_sends_what_is_not_there_of_its_own(
    machine, tmp_path: Path, monkeypatch, next_one: str, sent: int
):
    text = corpus.fn(Width())
    url, put = str(tmp_path / "remote"), LocalFileSystem.put_file
    model = trained.fn(Width(), text)
    push(text, url)
    machine("second")
    pull("corpus", url)
    assert trained.fn(Width(), text) == model, "another training of the same key, with files of the same sizes"
    machine("first")

    def ended(self, source: str, target: str, **options: object) -> None:
        put(self, source, target, **options)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(LocalFileSystem, "put_file", ended)
        with pytest.raises(KeyboardInterrupt):
            push(model, url)
    assert "trained" in refusal(lambda: pull("trained", url)), "no manifest is there"
    machine(next_one)
    assert push(model, url)[model.name] == sent
    machine("third")
    pull("trained", url)
    verify(model)


def test_another_training_of_the_same_key_is_never_replaced(machine, tmp_path: Path):
    url = str(tmp_path / "remote")
    model = trained.fn(Width(), corpus.fn(Width()))
    push(model, url, everything=True)
    first = bytes_of(model)
    machine("second")
    pull("corpus", url, everything=True)
    model = trained.fn(Width(), corpus.fn(Width()))
    own = bytes_of(model)
    assert first != own
    for call in (lambda: push(model, url), lambda: pull(model.name, url)):
        assert model.name in refusal(call)
    assert bytes_of(model) == own


def test_an_artifact_is_found_by_the_beginning_of_its_key_and_the_newest_without_one(machine, tmp_path: Path):
    url = str(tmp_path / "remote")
    one, two = corpus.fn(Width()), corpus.fn(Width(width=3))
    for artifact in (two, one):
        push(artifact, url)
    machine("second")
    pull(f"corpus/{one.key[:6]}", url)
    assert artifacts_of("corpus") == [one]
    pull("corpus/latest", url)
    assert find("corpus", "latest") == two
    pull(one.name, url)
    assert (two.path.parent / "latest").resolve() == two.path, "the newest, not the last that came"
    assert one.key in refusal(lambda: pull("corpus/xyz", url))
    assert "none" in refusal(lambda: pull("filter", url))


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
def test_a_manifest_that_names_paths_elsewhere_or_is_junk_is_refused(machine, tmp_path: Path, change: Callable):
    text, url = corpus.fn(Width()), str(tmp_path / "remote")
    push(text, url)
    place = tmp_path / "remote" / text.name / "stage.json"
    about = json.loads(place.read_text())
    change(about)
    place.write_text(json.dumps(about))
    machine("second")
    assert f"{url}/{text.name}" in refusal(lambda: pull(text.name, url))
    assert not list(tmp_path.rglob("escaped*"))


def test_a_picture_that_was_changed_here_is_left_out_of_a_push_and_what_arrives_is_sound(machine, tmp_path, caplog):
    tokens = made()[-1]
    (tokens.path / "more" / "loss.png").write_bytes(b"another picture")
    url = f"{tmp_path}/remote"
    assert push(tokens, url)[tokens.name] == 2
    assert [f"more/loss.png of {tokens.name} " in caplog.text, set(push(tokens, url).values())] == [True, {0}]
    machine("second")
    pull(tokens.name, url)
    assert not (tokens.path / "more").exists()
    assert {file["path"] for file in tokens.manifest["files"]} == {"sequences.npy", "stats.json"}
    verify(tokens)
    machine("first")
    rows = tokens.path / "sequences.npy"
    rows.write_bytes(bytes(rows.stat().st_size))
    assert "sequences.npy" in refusal(lambda: push(tokens, f"{tmp_path}/other")), "no other file is left out"


def test_what_is_hollow_here_can_not_be_pushed_whole(machine, tmp_path: Path):
    text, _, tokens = made()
    push(tokens, str(tmp_path / "remote"))
    machine("second")
    pull(tokens.name, str(tmp_path / "remote"))
    assert text.name in refusal(lambda: push(text, str(tmp_path / "other")))
    assert push(tokens, str(tmp_path / "other"))[tokens.name] == 3


def test_a_pull_waits_for_a_run_that_makes_the_same_and_leaves_its_draft(machine, tmp_path: Path):
    text, url = corpus.fn(Width()), str(tmp_path / "remote")
    push(text, url)
    machine("second")
    draft = draft_of(text)
    (draft / "work").mkdir(parents=True)
    pull(text.name, url)
    assert (draft / "work").is_dir()


def test_a_full_disk_is_a_sentence_of_this_machine(machine, tmp_path: Path, monkeypatch):
    text, url = corpus.fn(Width()), str(tmp_path / "remote")
    push(text, url)
    machine("second")

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(LocalFileSystem, "get_file", full)
    assert "No space left" in refusal(lambda: pull(text.name, url))


def test_a_full_folder_of_a_remote_is_named(machine, tmp_path: Path, monkeypatch):
    text, url = corpus.fn(Width()), str(tmp_path / "remote")

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(LocalFileSystem, "pipe_file", full)
    with pytest.raises(OSError, match="No space left") as raised:
        push(text, url)
    assert raised.value.filename == url


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
    text = corpus.fn(Width())
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


def test_a_collection_between_two_artifacts_of_a_pull_leaves_the_first(machine, tmp_path: Path):
    *_, tokens = made()
    push(tokens, str(tmp_path / "remote"))
    machine("second")
    for _ in Remote(str(tmp_path / "remote")).pull(tokens.name, everything=False):
        collect(keep=0, hollow=True, models=True)
    assert len(artifacts_of("")) == 4


def test_a_store_that_can_only_be_read_is_pushed(machine, tmp_path: Path, monkeypatch):
    text = corpus.fn(Width())

    def refused(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr("tasks.store.locks.lock_artifact", refused)
    assert push(text, str(tmp_path / "remote"))[text.name] == 5
