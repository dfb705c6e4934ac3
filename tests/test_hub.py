"""The hub: what is fetched, and what interruptions and faults lead to. A double of the hub serves here."""

import contextlib
import hashlib
import io
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import get_args
from urllib.parse import unquote, urlsplit

import pyarrow as pa
import pytest
from conftest import asked_for, documents_of, downloaded, refusal
from files_table import gz as gzipped
from files_table import json_lines, jsonl_of, noise, packed, parquet_of

from model.errors import InputError
from tasks import download as download_stage
from tasks.corpus import documents as reading
from tasks.corpus import hub
from tasks.corpus.documents import Options
from tasks.corpus.hub import SOURCES
from tasks.corpus.parts import Document
from tasks.download import SourceName, download
from tasks.store import home
from tasks.store.artifacts import WORK, draft_of

HOME = Path(__file__).parents[1]
TOKEN = "hf_good"
ROUTE = "(?:/api|/cdn)?/datasets/([^/]+/[^/]+)(?:/(tree|revision|resolve)/([^/]+)(?:/(.*))?)?"  # of a request


class Hub(ThreadingHTTPServer):
    """A double of the Hugging Face hub: listings, revisions, files with ranges; and its faults by file name.

    `breaks`: number of responses that are cut off in the middle. `wrong`: number of responses with a changed byte.
    `fails`: statuses that are answered first, by the end of the path. `holds`: bytes after which a response stalls.
    `log` lists requests as (method, path, range), `got` files as (name, range); `sent` counts bytes by file.
    """

    daemon_threads = True

    def __init__(self, files: dict[tuple[str, str], dict[str, bytes]]) -> None:
        super().__init__(("127.0.0.1", 0), HubHandler)
        self.files = files
        self.reset()

    def reset(self) -> None:
        self.log = []
        self.got = []
        self.sent = Counter()
        self.gated = set()
        self.breaks = Counter()
        self.wrong = Counter()
        self.holds = {}
        self.fails = defaultdict(list)

    def names(self) -> set[str]:
        return {name for name, _ in self.got}


class HubHandler(BaseHTTPRequestHandler):
    """Answers one request."""

    server: Hub

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        server = self.server
        token = self.headers.get("Authorization")
        server.log.append((self.command, path, self.headers.get("Range", "")))
        for ending, statuses in server.fails.items():
            if path.endswith(ending) and statuses:
                self.answer(statuses.pop(0))
                return
        repository, action, revision, inner = re.fullmatch(ROUTE, path).groups("")
        revisions = [known for about, known in server.files if about == repository]
        if not action and revisions:
            self.answer(200, {"id": repository, "sha": revisions[-1]})
        elif revision not in revisions:
            self.answer(404, X_Error_Code="RevisionNotFound", X_Error_Message=f"Invalid rev id: {revision}")
        elif action == "revision":
            self.answer(200, {"id": repository, "sha": revision})
        elif action == "tree":
            self.list_files(server.files[repository, revision], inner)
        elif inner not in server.files[repository, revision]:
            self.answer(
                404, X_Error_Code="EntryNotFound", X_Error_Message=f"There is no {inner}.", X_Repo_Commit=revision
            )
        elif repository in server.gated and token != f"Bearer {TOKEN}":
            message = f"Access to dataset {repository} is restricted."
            self.answer(403 if token else 401, X_Error_Code="GatedRepo", X_Error_Message=message)
        elif self.command == "GET" and not path.startswith("/cdn"):  # the hub redirects to its storage
            self.answer(302, Location=f"/cdn{path}")
        else:
            self.send_file(inner, server.files[repository, revision][inner], revision)

    do_HEAD = do_GET

    def answer(self, status: int, value: object = None, **headers: str) -> None:
        body = b"" if value is None else json.dumps(value).encode()
        self.send_response(status)
        for name, value in ({"Content_Length": str(len(body))} | headers).items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def list_files(self, files: dict[str, bytes], folder: str) -> None:
        """The files in a folder; those of a kilobyte or less are plain git files."""
        rows = [{"type": "directory", "path": p, "oid": "0" * 40} for p in {n.split("/")[0] for n in files if "/" in n}]
        for name, data in files.items():
            if name.startswith(f"{folder}/") or not folder:
                git = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
                row = {"type": "file", "path": name, "size": len(data), "oid": git}
                if len(data) > 1024:
                    row["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134}
                rows.append(row)
        self.answer(200, rows)

    def send_file(self, name: str, data: bytes, revision: str) -> None:
        server = self.server
        span = self.headers.get("Range", "")
        status = 200
        headers = {"X_Repo_Commit": revision, "ETag": f'"{hashlib.sha256(data).hexdigest()}"', "Accept_Ranges": "bytes"}
        if self.command == "GET" and server.wrong[name]:
            server.wrong[name] -= 1
            data = data[:-1] + bytes([data[-1] ^ 1])
        body = data
        if asked := re.fullmatch(r"bytes=(\d+)-(\d*)", span):
            start = int(asked[1])
            status = 206
            if start >= len(data):
                self.answer(416, Content_Range=f"bytes */{len(data)}")
                return
            body = data[start : int(asked[2]) + 1 if asked[2] else None]
            headers["Content_Range"] = f"bytes {start}-{start + len(body) - 1}/{len(data)}"
        headers["Content_Length"] = str(len(body))
        if self.command == "HEAD":
            self.answer(status, **headers)
            return
        server.got.append((name, span))
        if server.breaks[name]:
            server.breaks[name] -= 1
            body = body[: len(body) // 2]
            self.close_connection = True
        with contextlib.suppress(ConnectionError):  # a client that needs only a prefix hangs up
            self.answer(status, **headers)
            for at in range(0, len(body), 1 << 16):
                if name in server.holds and at >= server.holds[name]:
                    self.connection.settimeout(600)
                    self.connection.recv(1)  # returns when the client is gone
                    break
                server.sent[name] += self.wfile.write(body[at : at + (1 << 16)])

    def log_message(self, *_: object) -> None:
        """Print nothing."""


def address_of(server: ThreadingHTTPServer) -> str:
    return f"http://127.0.0.1:{server.server_address[1]}"


@contextlib.contextmanager
def serving(files: dict[tuple[str, str], dict[str, bytes]]) -> Iterator[Hub]:
    """A double of the hub with these files, while the block lasts."""
    server = Hub(files)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def zst(texts: list[str], field: str = "text") -> bytes:
    return packed(json_lines(texts, field), ".zst")


def gz(texts: list[str]) -> bytes:
    """Lines that name no source."""
    return gzipped(jsonl_of([{"text": text} for text in texts]))


def articles(seed: int) -> bytes:
    return parquet_of(pa.table({"text": noise(20_000, seed)}), row_group_size=50, compression="zstd")


def at(name: str) -> tuple[str, str]:
    return SOURCES[name].repository, SOURCES[name].revision or "a" * 40


PILE = {f"train/0{i}.jsonl.zst": noise(1500, seed=i) for i in range(6)}
FIRST = "train/00.jsonl.zst"
SECOND = "train/01.jsonl.zst"
LAST = "train/05.jsonl.zst"
C4 = {f"en/c4-train.0000{i}-of-01024.json.gz": noise(50, seed=10 + i) for i in range(2)}
ARTICLES = "20231101.en/train-00000-of-00041.parquet"
# A frame that decoders skip: only the digest shows a change in it
NOTE = bytes.fromhex("502a4d18 05000000") + b"notes"


@pytest.fixture(scope="module")
def server() -> Iterator[Hub]:
    pile = {name: zst(texts) + NOTE for name, texts in PILE.items()}
    files = {
        at("pile"): {"README.md": b"#", **dict(reversed(pile.items())), "val.jsonl.zst": zst(["never read"])},
        at("c4"): {name: gz(texts) for name, texts in C4.items()}
        | {"en/c4-validation.00000-of-00008.json.gz": b"", "realnewslike/c4-train.00000-of-00512.json.gz": b""},
        at("oscar"): {f"en_meta/en_meta_part_{i}.jsonl.zst": zst([f"page {i}"], field="content") for i in (1, 2)},
        at("wikipedia"): {ARTICLES.replace("00000", f"0000{i}", 1): articles(seed=20 + i) for i in range(2)},
        at("common-pile"): {
            f"{name}/{name}.chunk.0{i}.jsonl.gz": gz([f"{name} {i} {k}" for k in range(3)])
            for name in ("news", "uspto", "wikimedia")
            for i in range(2)
        },
    }
    with serving(files) as found:
        yield found


def use_double(server: Hub, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make this process take the double for the hub, with a cache of the hub's client in that folder."""
    from huggingface_hub import constants
    from huggingface_hub.utils import close_session

    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    for name, value in {
        "HF_HUB_OFFLINE": False,
        "ENDPOINT": address_of(server),
        "HUGGINGFACE_CO_URL_TEMPLATE": address_of(server) + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_HUB_CACHE": str(cache),
    }.items():
        monkeypatch.setattr(constants, name, value)
    close_session()


@pytest.fixture
def online(server: Hub, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """This process takes the double for the hub, and does not wait between attempts."""
    from huggingface_hub import constants, file_download
    from huggingface_hub.utils import _http, close_session

    server.reset()
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1 << 14)
    for module in (_http, file_download):
        monkeypatch.setattr(module, "time", SimpleNamespace(**vars(time) | {"sleep": lambda seconds: None}))
    monkeypatch.setattr(hub, "CHUNK", 1 << 14)
    monkeypatch.setattr(hub, "BLOCK", 1 << 16)
    use_double(server, tmp_path / "hf", monkeypatch)
    yield server
    close_session()
    server.reset()


def expected_of(shards: dict[str, list[str]], source: str, documents: int | None = None) -> list[tuple[str, str, str]]:
    return [(f"{name}:{i}", source, t) for name, texts in shards.items() for i, t in enumerate(texts, 1)][:documents]


def documents(**settings) -> list[Document]:
    """The documents that `download` writes."""
    return list(documents_of(downloaded(**settings)))


OTHERS = {  # a shard of each source that the double of the hub hasn't, and a file that must not be read
    "pile-deduplicated": ("data/train-00000-of-01650-f70471ee3deb09c0.parquet", "dataset_infos.json"),
    "books": ("data/train-00000-of-00023-5263dc4323e881d2.parquet", "data/test-00000-of-00001-29a5.parquet"),
    "fineweb-edu": ("sample/10BT/000_00000.parquet", "data/CC-MAIN-2013-20/train-00000-of-00014.parquet"),
    "climbmix": ("shard_00000.parquet", "README.md"),
}


def test_every_source_is_pinned_licensed_and_reads_its_shards_only():
    assert set(get_args(SourceName)) == {*SOURCES, "python-docs", "hub", "files"}
    for name, source in SOURCES.items():
        assert re.fullmatch("[0-9a-f]{40}", source.revision) or name == "oscar", name
        assert source.licence, name
    for name, (own, other) in OTHERS.items():
        assert re.fullmatch(SOURCES[name].pattern, own), name
        assert own.startswith(SOURCES[name].folder), name
        assert not re.fullmatch(SOURCES[name].pattern, other), name


def test_shards_are_read_in_the_order_of_their_names_and_progress_counts_text(online: Hub, monkeypatch):
    bars = []
    progress = download_stage.Progress

    def recorded(*given: object, **more: object) -> download_stage.Progress:
        bars.append(progress(*given, **more))
        return bars[-1]

    monkeypatch.setattr(download_stage, "Progress", recorded)
    made = downloaded(source="pile", part_megabytes=1)
    assert list(documents_of(made)) == expected_of(PILE, "toy")
    assert made.stats["shards"] == 6
    assert online.names() == set(PILE)
    assert not (made.path / WORK).exists()
    documents(source="pile", megabytes=0.1)
    documents(source="pile", documents=77)
    assert [(bar.total, bar.unit) for bar in bars] == [(None, "B"), (100_000, "B"), (77, "doc")]
    size = sum(len(document.text.encode()) for document in documents_of(made))
    assert all(bar.count >= (bar.total or size) for bar in bars)


def test_of_a_subset_only_the_beginning_is_fetched(online: Hub):
    pile = documents(source="pile", documents=1600)
    assert pile == expected_of(PILE, "toy", 1600)
    assert online.names() == {FIRST, SECOND}
    short = documents(source="pile", megabytes=0.01)
    size = sum(len(document.text) for document in short)
    assert size >= 10_000 > size - len(short[-1].text)
    assert short == pile[: len(short)]
    assert documents(source="c4", documents=60) == expected_of(C4, "c4", 60)


def test_of_a_large_shard_only_the_beginning_is_fetched(online: Hub, monkeypatch: pytest.MonkeyPatch):
    data = random.Random(5).randbytes(30_000_000)
    monkeypatch.setitem(online.files, ("big/big", "b" * 40), {"big.jsonl.zst": data})
    source = hub.Source("big/big", "b" * 40, ".*zst")
    with hub.open_file(source, hub.files(source)[0]) as file:
        assert file.read(1000) == data[:1000]
    assert online.sent["big.jsonl.zst"] < len(data) / 2


def test_of_a_parquet_shard_only_the_row_groups_that_are_read_are_fetched(online: Hub):
    expected = expected_of({ARTICLES: noise(20_000, seed=20)}, "wikipedia", 120)
    assert documents(source="wikipedia", documents=120) == expected
    assert online.names() == {ARTICLES}
    ranges = [tuple(map(int, r.removeprefix("bytes=").split("-"))) for _, r in online.got]
    size = len(online.files[at("wikipedia")][ARTICLES])
    assert all(end < size / 10 or start > size * 3 / 4 for start, end in ranges), "its beginning and its footer"


def test_a_dropped_connection_continues_where_it_broke(online: Hub):
    online.breaks.update({FIRST: 1, "train/03.jsonl.zst": 1, ARTICLES: 2})
    assert documents(source="pile") == expected_of(PILE, "toy")
    size = len(online.files[at("pile")][FIRST])
    starts = [int(r.removeprefix("bytes=")[:-1] or 0) for n, r in online.got if n == FIRST]
    assert min(starts) == 0
    assert size / 4 < max(starts) <= size / 2
    assert len(documents(source="wikipedia", documents=1500)) == 1500
    assert online.breaks.total() == 0


BAD = {  # what the hub has of a shard, and what is said of it
    "a byte that changes on its way": (bytes, r".*checksum"),
    "garbage at its end": (lambda data: data + b"garbage", " is corrupt"),
    "its end missing": (lambda data: data[:-20], " is truncated"),
}


@pytest.mark.parametrize("what", BAD)
def test_nothing_is_kept_of_a_bad_shard_that_is_read_during_the_download(online: Hub, monkeypatch, what: str):
    files = online.files[at("pile")]
    settings = {"source": "pile", "documents": 4000, "part_megabytes": 0.05}
    harm, said = BAD[what]
    online.wrong[FIRST] = int(harm is bytes)
    with monkeypatch.context() as patch:
        patch.setitem(files, FIRST, harm(files[FIRST]))
        assert re.search(f"{FIRST}{said}", refusal(**settings))
    parts = list(draft_of(download.target(asked_for(**settings))).glob("part-*"))
    assert parts
    for part in parts:
        part.write_text("not to be trusted")
    assert documents(**settings) == expected_of(PILE, "toy", 4000)


@pytest.mark.parametrize(
    "faults", [{"fails": {"train": [503] * 99}}, {"fails": {SECOND: [503] * 99}}, {"breaks": {SECOND: 10**6}}]
)
def test_a_hub_that_stays_broken_gives_one_sentence(online: Hub, faults: dict):
    for name, fault in faults.items():
        getattr(online, name).update(fault)
    assert re.match("monology/pile-uncopyrighted could not be read .*HF_ENDPOINT", refusal(source="pile"))
    assert len(online.log) < 150, "it gives up"


def test_errors_that_may_pass_are_told_from_others():
    passing = {None: True, 429: True, 503: True, 401: False, 403: False, 404: False}
    for status, expected in passing.items():
        problem = OSError("no answer")
        problem.response = SimpleNamespace(status_code=status)
        assert isinstance(hub.error("toy/toy", problem), hub.Unreachable) == expected, status


def test_a_file_that_ends_early_is_a_lost_connection_and_not_damage():
    file = hub.File("a.jsonl.zst", bytes=9)
    with pytest.raises(hub.Unreachable, match=r"toy/toy .*a\.jsonl\.zst ended after 3 bytes"):
        list(hub.read_checked(hub.Source("toy/toy", "", ""), file, io.BytesIO(b"abc")))


def test_a_parquet_shard_that_the_hub_stops_sending_is_not_damaged(online: Hub):
    source = SOURCES["wikipedia"]
    records = reading.read_file(hub.open_file(source, hub.files(source)[0]), ARTICLES, "wikipedia", Options())
    next(records)
    online.fails.update({ARTICLES: [503] * 99})
    with pytest.raises(InputError, match=r"wikimedia/wikipedia could not be read .*503"):
        list(records)


def test_what_the_hub_does_not_have_gives_one_sentence(online: Hub, monkeypatch: pytest.MonkeyPatch):
    from huggingface_hub import constants

    pile = SOURCES["pile"]
    monkeypatch.setitem(SOURCES, "pile", replace(pile, revision="0" * 40))
    assert "RevisionNotFound" in refusal(source="pile")
    monkeypatch.setitem(SOURCES, "pile", replace(pile, pattern="train/[a-z]+"))
    assert "no file that matches train/" in refusal(source="pile")
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as closed:
        monkeypatch.setattr(constants, "ENDPOINT", address_of(closed))
    assert re.match("monology/pile-uncopyrighted could not be read .*ConnectError.*HF_ENDPOINT", refusal(source="pile"))


def test_a_gated_data_set_says_how_to_get_access(online: Hub, monkeypatch: pytest.MonkeyPatch):
    online.gated.add(SOURCES["oscar"].repository)
    for token, status in (("", 401), ("hf_other", 403)):
        monkeypatch.setenv("HF_TOKEN", token)
        said = refusal(source="oscar")
        assert re.search(rf"{status}.*https://huggingface\.co/datasets/oscar-corpus/OSCAR-2301.*HF_TOKEN", said)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert [document.text for document in documents(source="oscar")] == ["page 1", "page 2"]


def test_the_commit_of_a_source_without_one_is_the_newest_at_first_use(online: Hub, monkeypatch: pytest.MonkeyPatch):
    repository = SOURCES["oscar"].repository
    first = downloaded(source="oscar")
    assert first.manifest["params"]["sources"]["oscar"]["revision"] == "a" * 40
    assert json.loads((home.root() / ".revisions.json").read_text()) == {repository: "a" * 40}
    newer = {"en_meta/en_meta_part_1.jsonl.zst": zst(["new"], field="content")}
    monkeypatch.setitem(online.files, (repository, "b" * 40), newer)
    assert downloaded(source="oscar") == first
    (home.root() / ".revisions.json").unlink()
    with home.read_only():  # a plan keeps no note of the commit that it found
        assert hub.commit(SOURCES["oscar"]) == "b" * 40
    assert not (home.root() / ".revisions.json").exists()
    assert [document.text for document in documents(source="oscar")] == ["new"]


def test_sets_that_paths_name_are_chosen_before_anything_is_fetched_and_are_not_read_in_a_row(online: Hub):
    found = documents(source="common-pile", sets=["wikimedia", "news"])
    assert Counter(document.source for document in found) == {"wikimedia": 6, "news": 6}
    assert {name.split("/")[0] for name in online.names()} == {"wikimedia", "news"}
    for sets in (["wikipedia"], ["news", "wikipedia"]):
        with pytest.raises(InputError, match=r"no set wikipedia\..* news, uspto, wikimedia.*download\.sets"):
            documents(source="common-pile", sets=sets)
    of_a_mixture = hub.files(SOURCES["common-pile"], ("news", "of another source"), some=True)
    assert {file.set for file in of_a_mixture} == {"news"}
    [names, again] = [[file.name for file in hub.files(SOURCES["common-pile"])] for _ in range(2)]
    assert sorted(names) == sorted(online.files[at("common-pile")]) != names == again


def test_shards_in_the_cache_of_the_hubs_client_are_used_if_whole(online: Hub):
    from huggingface_hub import hf_hub_download

    for name in (FIRST, SECOND):
        path = Path(hf_hub_download(at("pile")[0], name, repo_type="dataset", revision=at("pile")[1]))
    path.resolve().write_bytes(path.read_bytes()[:-1] + b"x")  # the second is damaged
    online.reset()
    assert documents(source="pile", documents=2000) == expected_of(PILE, "toy", 2000)
    assert documents(source="pile", documents=3) == expected_of(PILE, "toy", 3)
    assert online.names() == {SECOND}
    assert path.exists(), "it is not ours to delete"


SCRIPT = """
import json, sys
from tasks.download import Download, download
download.fn(Download(**json.loads(sys.argv[1])))
"""


def start(server: Hub, home: Path, settings: dict) -> subprocess.Popen:
    """`download` in a process of its own, which takes the double for the hub, with a store in `home`."""
    own = {"HF_ENDPOINT": address_of(server), "HF_HOME": str(home / "hf"), "NO_PROXY": "127.0.0.1"}
    own |= {"CRAM_ARTIFACTS": str(home / "artifacts"), "HF_HUB_DOWNLOAD_TIMEOUT": "1000"}
    kept = {k: v for k, v in os.environ.items() if not k.startswith("HF_") and not k.lower().endswith("_proxy")}
    command = [sys.executable, "-c", SCRIPT, json.dumps(settings)]
    return subprocess.Popen(command, env=kept | own, cwd=HOME, stderr=subprocess.PIPE, text=True)


def shards_saved(states: Iterable[Path]) -> int:
    """How many shards need not be read again."""
    return max((json.loads(state.read_text())["at"]["pile"][0] for state in states), default=0)


def test_an_interrupted_download_ends_at_once_and_resumes_at_its_last_part(online: Hub, tmp_path: Path):
    online.holds[LAST] = 1 << 15
    settings = {"source": "pile", "part_megabytes": 0.2, "documents": 8500}
    drafts = "artifacts/.partial/download-*"
    deadline = time.monotonic() + 300
    process = start(online, tmp_path, settings)
    while not (online.sent[LAST] and shards_saved(tmp_path.glob(f"{drafts}/work/state.json")) >= 4):
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=300)  # although the hub holds its answer
    assert process.returncode != 0
    assert not (tmp_path / "artifacts" / "download").exists()
    parts = {p.name: p.stat().st_mtime_ns for p in tmp_path.glob(f"{drafts}/part-0000[0-4].parquet")}
    assert len(parts) == 5
    online.reset()
    made = downloaded(**settings)
    assert list(documents_of(made)) == expected_of(PILE, "toy", 8500)
    assert LAST in online.names() <= {LAST, "train/04.jsonl.zst"}, "shards that were read are not fetched again"
    assert {name: (made.path / name).stat().st_mtime_ns for name in parts} == parts, "finished parts are not rewritten"
