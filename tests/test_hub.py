"""The hub: what is fetched, what happens after interruptions, and what its faults lead to. A double of the hub serves here."""

import contextlib
import errno
import gzip
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
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import get_args
from urllib.parse import parse_qs, unquote, urlsplit

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from model import InputError
from tasks import download as download_stage
from tasks import store as store_module
from tasks.corpus import fetch, formats, hub, part_writer
from tasks.corpus.hub import SOURCES
from tasks.corpus.parts import documents_of
from tasks.corpus.records import Layout
from tasks.download import Download, SourceName, download
from tasks.store import WORK, artifacts, draft_of

HOME = Path(__file__).parents[1]
TOKEN = "hf_good"


class Hub(ThreadingHTTPServer):
    """A double of the Hugging Face hub: listings, revisions, files with ranges; and its faults by file name.

    `breaks`: number of responses that are cut off in the middle. `wrong`: number of responses with a changed byte.
    `fails`: statuses that are answered first, by the end of the path. `holds`: bytes after which a response stalls.
    `log` lists requests as (method, path, range); `sent` counts bytes by file.
    """

    daemon_threads = True
    page = 1000  # entries of a page of a listing

    def __init__(self, files: dict[tuple[str, str], dict[str, bytes]]) -> None:
        super().__init__(("127.0.0.1", 0), HubHandler)
        self.files = files
        self.reset()

    def reset(self) -> None:
        self.log, self.sent, self.most_at_once, self.under_way = [], Counter(), 0, 0
        self.breaks, self.wrong, self.holds, self.fails = Counter(), Counter(), {}, defaultdict(list)
        self.gated, self.meet = set(), None

    def requested(self) -> list[tuple[str, str]]:
        """(name, range) of the files that were requested."""
        return [
            (p.split("/resolve/")[1].split("/", 1)[1], r) for m, p, r in self.log if "/resolve/" in p and m == "GET"
        ]

    def names(self) -> set[str]:
        return {name for name, _ in self.requested()}


class HubHandler(BaseHTTPRequestHandler):
    """Answers one request."""

    server: Hub

    def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in ({"Content_Length": str(len(body))} | headers).items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            with contextlib.suppress(ConnectionError):  # a client that needs only a prefix hangs up
                self.wfile.write(body)

    def do_GET(self) -> None:
        url, server, token = urlsplit(self.path), self.server, self.headers.get("Authorization")
        path = unquote(url.path)
        server.log.append((self.command, path, self.headers.get("Range", "")))
        for ending, statuses in server.fails.items():
            if path.endswith(ending) and statuses:
                self.answer(statuses.pop(0))
                return
        owner, name, action, revision, inner = [
            *re.sub("^/(api/|cdn/)?datasets/|^/cdn/", "", path).lstrip("/").split("/", 4), "", "", "",
        ][:5]  # fmt: skip
        repository = f"{owner}/{name}"
        revisions = [known for about, known in server.files if about == repository]
        if not action and revisions:
            self.answer_json({"id": repository, "sha": revisions[-1]})
        elif revision not in revisions:
            self.answer(404, X_Error_Code="RevisionNotFound", X_Error_Message=f"Invalid rev id: {revision}")
        elif action == "revision":
            self.answer_json({"id": repository, "sha": revision})
        elif action == "tree":
            self.list_files(server.files[repository, revision], inner, url)
        elif repository in server.gated and token != f"Bearer {TOKEN}":
            message = f"Access to dataset {repository} is restricted."
            self.answer(403 if token else 401, X_Error_Code="GatedRepo", X_Error_Message=message)
        elif self.command == "GET" and not path.startswith("/cdn"):  # the hub redirects to its storage
            self.answer(302, Location=f"/cdn{url.path}")
        else:
            self.send_file(inner, server.files[repository, revision][inner], revision)

    do_HEAD = do_GET

    def answer_json(self, value: object, **headers: str) -> None:
        self.answer(200, json.dumps(value).encode(), Content_Type="application/json", **headers)

    def list_files(self, files: dict[str, bytes], folder: str, url) -> None:
        """The files in a folder, page by page; those of a kilobyte or less are plain git files."""
        rows = [{"type": "directory", "path": p, "oid": "0" * 40} for p in {n.split("/")[0] for n in files if "/" in n}]
        for name, data in files.items():
            if name.startswith(f"{folder}/") or not folder:
                git = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
                row = {"type": "file", "path": name, "size": len(data), "oid": git}
                if len(data) > 1024:
                    row["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134}
                rows.append(row)
        start = int(parse_qs(url.query).get("cursor", ["0"])[0])
        end, more = start + self.server.page, {}
        if end < len(rows):
            more["Link"] = f'<{address_of(self.server)}{url.path}?recursive=True&cursor={end}>; rel="next"'
        self.answer_json(rows[start:end], **more)

    def send_file(self, name: str, data: bytes, revision: str) -> None:
        server, start, status = self.server, 0, 200
        headers = {"X_Repo_Commit": revision, "ETag": f'"{hashlib.sha256(data).hexdigest()}"', "Accept_Ranges": "bytes"}
        if self.command == "GET" and server.wrong[name]:
            server.wrong[name] -= 1
            data = data[:-1] + bytes([data[-1] ^ 1])
        body = data
        if asked := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            start, status = int(asked[1]), 206
            if start >= len(data):
                self.answer(416, Content_Range=f"bytes */{len(data)}")
                return
            body = data[start : int(asked[2]) + 1 if asked[2] else None]
            headers["Content_Range"] = f"bytes {start}-{start + len(body) - 1}/{len(data)}"
        headers["Content_Length"] = str(len(body))
        if self.command == "HEAD":
            self.answer(status, **headers)
            return
        if server.breaks[name]:
            server.breaks[name] -= 1
            body, self.close_connection = body[: len(body) // 2], True
        server.under_way += 1
        server.most_at_once = max(server.most_at_once, server.under_way)
        if server.meet:
            with contextlib.suppress(threading.BrokenBarrierError):
                server.meet.wait(60)  # until others are requested
        self.answer(status, **headers)
        with contextlib.suppress(ConnectionError):
            for at in range(0, len(body), 1 << 16):
                if name in server.holds and at >= server.holds[name]:
                    self.connection.settimeout(600)
                    self.connection.recv(1)  # returns when the client is gone
                    break
                server.sent[name] += self.wfile.write(body[at : at + (1 << 16)])
        server.under_way -= 1

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


def noise(documents: int, seed: int) -> list[str]:
    """Texts that compress little."""
    rng = random.Random(seed)
    return [f"{i} {rng.randbytes(100).hex()}" for i in range(documents)]


def zst(texts: list[str], field: str = "text") -> bytes:
    rows = [json.dumps({field: text, "meta": {"pile_set_name": "toy"}}) for text in texts]
    return zstandard.ZstdCompressor().compress("".join(f"{row}\n" for row in rows).encode())


def gz(rows: list[dict]) -> bytes:
    return gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode(), mtime=0)


def parquet(rows: int, seed: int) -> bytes:
    sink = io.BytesIO()
    table = pa.table({"id": [str(i) for i in range(rows)], "text": noise(rows, seed)})
    pq.write_table(table, sink, row_group_size=50, compression="zstd")
    return sink.getvalue()


def at(name: str) -> tuple[str, str]:
    return SOURCES[name].repository, SOURCES[name].revision or "a" * 40


PILE = {f"train/0{i}.jsonl.zst": noise(1500, seed=i) for i in range(6)}
FIRST, SECOND, LAST = "train/00.jsonl.zst", "train/01.jsonl.zst", "train/05.jsonl.zst"
C4 = {f"en/c4-train.0000{i}-of-01024.json.gz": noise(50, seed=10 + i) for i in range(2)}
ARTICLES = "20231101.en/train-00000-of-00041.parquet"
# A frame that decoders skip: only the digest shows a change in it
NOTE = bytes.fromhex("502a4d18 05000000") + b"notes"


@pytest.fixture(scope="module")
def server() -> Iterator[Hub]:
    pile = {name: zst(texts) + NOTE for name, texts in PILE.items()}
    other = zst(["never read"])
    files = {
        at("pile"): {
            "README.md": b"#",
            "test.jsonl.zst": other,
            **dict(reversed(pile.items())),
            "val.jsonl.zst": other,
        },
        at("c4"): {name: gz([{"text": t, "url": "x"} for t in texts]) for name, texts in C4.items()}
        | {"en/c4-validation.00000-of-00008.json.gz": b"", "realnewslike/c4-train.00000-of-00512.json.gz": b""},
        at("oscar"): {f"en_meta/en_meta_part_{i}.jsonl.zst": zst([f"page {i}"], field="content") for i in (1, 2)},
        at("wikipedia"): {ARTICLES.replace("00000", f"0000{i}", 1): parquet(20_000, seed=20 + i) for i in range(2)},
        at("common-pile"): {
            f"{name}/{name}.chunk.0{i}.jsonl.gz": gz([{"text": f"{name} {i} {k}"} for k in range(3)])
            for name in ("news", "uspto", "wikimedia")
            for i in range(2)
        },
    }
    with serving(files) as found:
        yield found


@pytest.fixture
def online(server: Hub, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """This process takes the double for the hub, and does not wait between attempts."""
    from huggingface_hub import constants, file_download
    from huggingface_hub.utils import _http, close_session

    server.reset()
    for name in [name for name in os.environ if name.lower().endswith("_proxy") or name == "HF_TOKEN"]:
        monkeypatch.delenv(name)
    for name, value in {
        "ENDPOINT": address_of(server),
        "HUGGINGFACE_CO_URL_TEMPLATE": address_of(server) + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_HUB_CACHE": str(tmp_path / "hf"),
        "HF_TOKEN_PATH": str(tmp_path / "token"),
        "DOWNLOAD_CHUNK_SIZE": 1 << 14,
    }.items():
        monkeypatch.setattr(constants, name, value)
    for module in (_http, file_download):
        monkeypatch.setattr(module, "time", SimpleNamespace(**vars(time) | {"sleep": lambda seconds: None}))
    monkeypatch.setattr(fetch, "CHUNK", 1 << 14)
    monkeypatch.setattr(fetch, "BLOCK", 1 << 16)
    close_session()
    yield server
    close_session()
    server.reset()


def expected_of(shards: dict[str, list[str]], source: str, documents: int | None = None) -> list[tuple[str, str, str]]:
    return [(f"{name}:{i}", source, t) for name, texts in shards.items() for i, t in enumerate(texts, 1)][:documents]


def read(**settings) -> list[tuple[str, str, str]]:
    """The documents that `download` writes."""
    return [tuple(d) for d in documents_of(download.fn(Download(**{"documents": 0} | settings)))]


def refusal(**settings) -> str:
    """The sentence with which `download` refuses."""
    with pytest.raises(InputError) as refused:
        read(**settings)
    assert "\n" not in str(refused.value)
    assert artifacts("download") == []
    return str(refused.value)


NAMES = {  # a shard of each source on the hub, and a file that must not be read
    "pile": ("train/00.jsonl.zst", "val.jsonl.zst"),
    "pile-deduplicated": ("data/train-00000-of-01650-f70471ee3deb09c0.parquet", "dataset_infos.json"),
    "pile-natural": ("train/29.jsonl.zst", "test.jsonl.zst"),
    "c4": ("en/c4-train.00000-of-01024.json.gz", "en/c4-validation.00000-of-00008.json.gz"),
    "oscar": ("en_meta/en_meta_part_1.jsonl.zst", "en_meta/en_sha256.txt"),
    "wikipedia": ("20231101.en/train-00000-of-00041.parquet", "20231101.simple/train-00000-of-00001.parquet"),
    "books": (
        "data/train-00000-of-00023-5263dc4323e881d2.parquet",
        "data/test-00000-of-00001-29a571947c0b5ccc.parquet",
    ),
    "fineweb-edu": ("sample/10BT/000_00000.parquet", "data/CC-MAIN-2013-20/train-00000-of-00014.parquet"),
    "climbmix": ("shard_00000.parquet", "README.md"),
    "common-pile": ("project_gutenberg/project_gutenberg.chunk.43.jsonl.gz", "README.md"),
}


def test_every_source_is_pinned_licensed_and_reads_its_shards_only():
    assert set(get_args(SourceName)) == {*SOURCES, "python-docs", "files"} == {*NAMES, "python-docs", "files"}
    for name, source in SOURCES.items():
        assert re.fullmatch("[0-9a-f]{40}", source.revision) or name == "oscar", name
        assert source.licence, name
        own, other = NAMES[name]
        assert re.fullmatch(source.pattern, own), name
        assert own.startswith(source.folder), name
        assert not re.fullmatch(source.pattern, other), name


def test_whole_shards_are_read_in_the_order_of_their_names_and_progress_counts_bytes(online: Hub, monkeypatch):
    bars = []

    class Recorder(download_stage.Progress):
        def __init__(self, *arguments) -> None:
            super().__init__(*arguments)
            bars.append(self)

    monkeypatch.setattr(download_stage, "Progress", Recorder)
    monkeypatch.setattr(Hub, "page", 3)  # so that the listing has several pages
    made = download.fn(Download(source="pile", documents=0, part_megabytes=1))
    assert [tuple(d) for d in documents_of(made)] == expected_of(PILE, "toy")
    assert made.stats["shards"] == 6
    assert online.names() == set(PILE)
    identity = made.manifest["params"]["sources"]["pile"]
    assert (identity["repository"], identity["revision"]) == at("pile")
    assert not (made.path / WORK).exists()
    read(source="pile", megabytes=0.1)
    read(source="pile", documents=77)
    size = sum(len(data) for name, data in online.files[at("pile")].items() if name in PILE)
    assert [(bar.total, bar.unit) for bar in bars] == [(size, "B"), (100_000, "B"), (77, "doc")]
    assert all(bar.count >= bar.total for bar in bars)


def test_several_shards_are_downloaded_at_once_but_no_more_than_set(online: Hub, monkeypatch: pytest.MonkeyPatch):
    for count in (3, 1):
        monkeypatch.setenv("CRAM_DOWNLOADS", str(count))
        online.reset()
        online.meet = threading.Barrier(count)  # the first ones are answered when all of them are requested
        assert read(source="pile", part_megabytes=count) == expected_of(PILE, "toy")
        assert online.most_at_once == count
        assert not online.meet.broken


def test_the_number_of_downloads_is_a_positive_number_or_unset(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CRAM_DOWNLOADS", "")
    assert fetch.downloads() == 4
    for wrong in ("0", "-1", "many"):
        monkeypatch.setenv("CRAM_DOWNLOADS", wrong)
        with pytest.raises(InputError, match="CRAM_DOWNLOADS"):
            fetch.downloads()


def test_the_disk_holds_few_shards_at_once(online: Hub, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CRAM_DOWNLOADS", "2")
    held = []
    end = part_writer.PartWriter._end

    def count(writer: part_writer.PartWriter, *given: object) -> None:
        end(writer, *given)
        held.append(len(list(writer.state.parent.rglob("*.zst"))))

    monkeypatch.setattr(part_writer.PartWriter, "_end", count)
    assert read(source="pile", part_megabytes=0.02) == expected_of(PILE, "toy")
    assert len(held) > 60
    assert 1 <= max(held) <= 3  # one that is read, two that are downloaded
    assert held[-1] == 0


def test_of_a_subset_only_the_beginning_is_fetched(online: Hub):
    pile = read(source="pile", documents=1600)
    assert pile == expected_of(PILE, "toy", 1600)
    assert online.names() == {FIRST, SECOND}
    short = read(source="pile", megabytes=0.01)
    size = sum(len(text) for _, _, text in short)
    assert size >= 10_000 > size - len(short[-1][2])
    assert short == pile[: len(short)]
    assert read(source="c4", documents=60) == expected_of(C4, "c4", 60)


def test_of_a_large_shard_only_the_beginning_is_fetched(online: Hub, monkeypatch: pytest.MonkeyPatch):
    data = random.Random(5).randbytes(30_000_000)
    monkeypatch.setitem(online.files, ("big/big", "b" * 40), {"big.jsonl.zst": data})
    source = hub.Source("big/big", "b" * 40, ".*zst")
    with fetch.opened(source, hub.files(source)[0]) as file:
        assert file.read(1000) == data[:1000]
    assert online.sent["big.jsonl.zst"] < len(data) / 2


def test_of_a_parquet_shard_only_the_row_groups_that_are_read_are_fetched(online: Hub):
    expected = [(f"{ARTICLES}:{i}", "wikipedia", text) for i, text in enumerate(noise(20_000, seed=20), 1)]
    assert read(source="wikipedia", documents=120) == expected[:120]
    assert online.names() == {ARTICLES}
    ranges = [tuple(map(int, r.removeprefix("bytes=").split("-"))) for _, r in online.requested()]
    size = len(online.files[at("wikipedia")][ARTICLES])
    assert all(end < size / 10 or start > size * 3 / 4 for start, end in ranges), "its beginning and its footer"


@pytest.mark.parametrize("limits", [{}, {"documents": 5000}])
def test_a_dropped_connection_continues_where_it_broke(online: Hub, limits: dict):
    online.breaks.update({FIRST: 1, "train/03.jsonl.zst": 1})
    assert read(source="pile", **limits) == expected_of(PILE, "toy", limits.get("documents"))
    size = len(online.files[at("pile")][FIRST])
    starts = [int(r.removeprefix("bytes=")[:-1] or 0) for n, r in online.requested() if n == FIRST]
    assert sorted(set(starts))[:1] == [0]
    assert size / 4 < max(starts) <= size / 2
    online.breaks.update({ARTICLES: 2})
    assert len(read(source="wikipedia", documents=1500)) == 1500
    assert online.breaks.total() == 0


def test_a_shard_with_a_wrong_digest_is_downloaded_once_more_and_then_refused(online: Hub):
    online.wrong.update({SECOND: 1})
    assert read(source="pile") == expected_of(PILE, "toy")
    requests = Counter(name for name, _ in online.requested())
    assert requests[SECOND] == 2 * requests[FIRST]
    online.wrong.update({SECOND: 9})
    with pytest.raises(InputError, match=r"train/01\.jsonl\.zst of monology/pile-uncopyrighted .*HF_ENDPOINT"):
        read(source="pile", part_megabytes=1)
    online.reset()
    assert read(source="pile", part_megabytes=1) == expected_of(PILE, "toy"), "it is not taken for a good one later"


def test_a_shard_that_is_read_during_the_download_is_checked_at_its_end(online: Hub):
    settings = {"source": "pile", "documents": 2000, "part_megabytes": 0.05}
    online.wrong.update({FIRST: 1})
    assert FIRST in refusal(**settings)
    draft = draft_of(download.target(Download(**settings)))
    assert list(draft.glob("part-*"))
    for part in draft.glob("part-*"):
        part.write_text("not to be trusted")
    assert read(**settings) == expected_of(PILE, "toy", 2000)


@pytest.mark.parametrize("damaged", ["keep", "refuse"])
def test_nothing_is_kept_of_a_corrupt_shard_that_is_read_during_the_download(online: Hub, damaged: str, monkeypatch):
    files = online.files[at("pile")]
    settings = {"source": "pile", "documents": 4000, "damaged": damaged, "part_megabytes": 0.05}
    with monkeypatch.context() as patch:
        patch.setitem(files, FIRST, files[FIRST] + b"garbage")
        assert f"{FIRST} is corrupt" in refusal(**settings)
    for part in draft_of(download.target(Download(**settings))).glob("part-*"):
        part.write_text("not to be trusted")
    assert read(**settings) == expected_of(PILE, "toy", 4000)


def test_a_shard_that_is_truncated_on_the_hub_is_refused(online: Hub, monkeypatch: pytest.MonkeyPatch):
    files = online.files[at("pile")]
    monkeypatch.setitem(files, FIRST, files[FIRST][:-20])
    for limits in ({}, {"documents": 2000}):
        assert f"{FIRST} is truncated" in refusal(source="pile", **limits)


@pytest.mark.parametrize("limits", [{}, {"documents": 3990}])
@pytest.mark.parametrize(
    "faults", [{"fails": {"train": [503] * 99}}, {"fails": {SECOND: [503] * 99}}, {"breaks": {SECOND: 10**6}}]
)
def test_a_hub_that_stays_broken_gives_one_sentence(online: Hub, limits: dict, faults: dict):
    for name, fault in faults.items():
        getattr(online, name).update(fault)
    said = refusal(source="pile", **limits)
    assert said.startswith("monology/pile-uncopyrighted could not be read")
    assert "HF_ENDPOINT" in said
    assert len(online.log) < 150, "it gives up"


def test_a_parquet_shard_that_the_hub_stops_sending_is_not_damaged(online: Hub):
    file = fetch.opened(SOURCES["wikipedia"], hub.files(SOURCES["wikipedia"])[0])
    records = formats.read_file(file, ARTICLES, Layout("wikipedia", 10**8))
    found = [next(records)]
    online.fails.update({ARTICLES: [503] * 99})
    with pytest.raises(InputError, match=r"wikimedia/wikipedia could not be read .*503"):
        found.extend(records)
    assert 1 <= len(found) < 19_000


def test_what_the_hub_does_not_have_gives_one_sentence(online: Hub, monkeypatch: pytest.MonkeyPatch):
    from huggingface_hub import constants

    pile = SOURCES["pile"]
    monkeypatch.setitem(SOURCES, "pile", replace(pile, revision="0" * 40))
    assert "RevisionNotFound" in refusal(source="pile")
    monkeypatch.setitem(SOURCES, "pile", replace(pile, pattern="train/[a-z]+"))
    assert "train/00.jsonl.zst" in refusal(source="pile")
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as closed:
        monkeypatch.setattr(constants, "ENDPOINT", address_of(closed))
    assert re.match("monology/pile-uncopyrighted could not be read .*ConnectError.*HF_ENDPOINT", refusal(source="pile"))


def test_a_gated_data_set_says_how_to_get_access(online: Hub, monkeypatch: pytest.MonkeyPatch):
    online.gated.add(SOURCES["oscar"].repository)
    for token, status, limits in (("", 401, {}), ("hf_other", 403, {"documents": 1})):
        monkeypatch.setenv("HF_TOKEN", token)
        said = refusal(source="oscar", **limits)
        for word in (str(status), "https://huggingface.co/datasets/oscar-corpus/OSCAR-2301", "HF_TOKEN"):
            assert word in said
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert [text for _, _, text in read(source="oscar")] == ["page 1", "page 2"]


def test_the_commit_of_a_source_without_one_is_the_newest_at_first_use(online: Hub, monkeypatch: pytest.MonkeyPatch):
    oscar = SOURCES["oscar"]
    made = download.fn(Download(source="oscar"))
    assert made.manifest["params"]["sources"]["oscar"]["revision"] == "a" * 40
    assert json.loads((store_module.ROOT / ".revisions.json").read_text()) == {oscar.repository: "a" * 40}
    newer = {"en_meta/en_meta_part_1.jsonl.zst": zst(["new"], field="content")}
    monkeypatch.setitem(online.files, (oscar.repository, "b" * 40), newer)
    assert download.target(Download(source="oscar")).key == made.key
    (store_module.ROOT / ".revisions.json").unlink()
    assert download.target(Download(source="oscar")).key != made.key
    assert [text for _, _, text in read(source="oscar")] == ["new"]


def test_sets_that_paths_name_are_chosen_before_anything_is_fetched(online: Hub):
    found = read(source="common-pile", sets=["wikimedia", "news"])
    assert {source for _, source, _ in found} == {"wikimedia", "news"}
    assert len(found) == 12
    assert {name.split("/")[0] for name in online.names()} == {"wikimedia", "news"}
    with pytest.raises(InputError, match=r"wikipedia.* news, uspto, wikimedia"):
        read(source="common-pile", sets=["wikipedia"])


def test_shards_of_one_set_are_not_read_in_a_row_where_a_source_is_mixed(online: Hub):
    names = [file.name for file in hub.files(SOURCES["common-pile"])]
    assert sorted(names) == sorted(online.files[at("common-pile")])
    assert names != sorted(names)
    assert names == [file.name for file in hub.files(SOURCES["common-pile"])]


def test_shards_in_the_cache_of_the_hubs_client_are_used_if_whole(online: Hub):
    from huggingface_hub import hf_hub_download

    for name in (FIRST, SECOND):
        path = Path(hf_hub_download(at("pile")[0], name, repo_type="dataset", revision=at("pile")[1]))
    path.resolve().write_bytes(path.read_bytes()[:-1] + b"x")  # the second is damaged
    online.reset()
    assert read(source="pile", shards=2) == expected_of(PILE, "toy", 3000)
    assert read(source="pile", documents=3) == expected_of(PILE, "toy", 3)
    assert online.names() == {SECOND}
    assert path.exists(), "it is not ours to delete"


def test_a_small_file_is_brought_to_the_cache_of_the_hubs_client_and_checked(online: Hub):
    source = hub.Source(*at("pile"), "README.md")
    [file] = hub.files(source)
    assert len(file.digest) == 40
    online.wrong.update({"README.md": 1})
    assert hub.bring(source, file).read_bytes() == b"#"
    online.reset()
    assert hub.bring(source, file).read_bytes() == b"#"
    assert online.log == []
    with pytest.raises(InputError, match=r"README.md of .* digest"):
        hub.bring(source, file._replace(digest="0" * 40))


def test_a_download_ends_when_it_is_no_longer_needed(online: Hub, monkeypatch: pytest.MonkeyPatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.2)
    online.holds[FIRST] = 1 << 16
    folder = store_module.ROOT / "fetched"
    with fetch.Fetcher(SOURCES["pile"], hub.files(SOURCES["pile"])[:1], folder) as fetcher:
        future = fetcher[0]
        while not fetcher.received:
            time.sleep(0.01)
    with pytest.raises(InputError, match="no longer needed"):
        future.result(timeout=300)
    assert not [path for path in folder.rglob("*") if path.name.endswith(("zst", "incomplete"))]


def test_a_full_disk_is_not_taken_for_a_fault_of_the_hub(online: Hub, monkeypatch: pytest.MonkeyPatch):
    from huggingface_hub import file_download

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(file_download, "http_get", full)
        assert re.match("download can't continue: No space left on device: .*CRAM_ARTIFACTS", refusal(source="pile"))
    assert read(source="pile", shards=1) == expected_of(PILE, "toy", 1500)


SCRIPT = """
import json, sys
from tasks.corpus.parts import documents_of
from tasks.download import Download, download
made = download.fn(Download(**json.loads(sys.argv[1])))
print(json.dumps([tuple(d) for d in documents_of(made)]))
"""


def start(server: Hub, home: Path, settings: dict) -> subprocess.Popen:
    """`download` in a process of its own, which takes the double for the hub."""
    own = {"HF_ENDPOINT": address_of(server), "HF_HOME": str(home / "hf"), "NO_PROXY": "127.0.0.1"}
    own |= {"CRAM_ARTIFACTS": str(home / "artifacts"), "CRAM_DOWNLOADS": "2", "HF_HUB_DOWNLOAD_TIMEOUT": "1000"}
    kept = {k: v for k, v in os.environ.items() if not k.startswith("HF_") and not k.lower().endswith("_proxy")}
    command = [sys.executable, "-c", SCRIPT, json.dumps(settings)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env=kept | own, cwd=HOME, **pipes)


def wait_until(condition: Callable[[], object], process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)


def resumes_from(states: Iterable[Path]) -> int:
    """The number of the shard in which the last part ends that is on disk."""
    return max((json.loads(state.read_text())["at"]["pile"][0] for state in states), default=0)


@pytest.mark.parametrize("documents", [0, 8500])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_an_interrupted_download_ends_at_once_and_resumes_at_its_last_part(
    server: Hub, tmp_path: Path, documents: int, number: int
):
    server.reset()
    server.holds[LAST] = 1 << 15
    settings = {"source": "pile", "part_megabytes": 0.2, "documents": documents}
    process = start(server, tmp_path, settings)
    drafts = "artifacts/.partial/download-*"
    wait_until(lambda: server.sent[LAST] and resumes_from(tmp_path.glob(f"{drafts}/work/state.json")) >= 4, process)
    process.send_signal(number)
    process.communicate(timeout=300)  # although the hub holds its answer
    assert process.returncode != 0
    assert not (tmp_path / "artifacts" / "download").exists()
    parts = {p.name: p.stat().st_mtime_ns for p in tmp_path.glob(f"{drafts}/part-0000[0-4].parquet")}
    assert len(parts) == 5
    server.reset()
    out, err = start(server, tmp_path, settings).communicate(timeout=300)
    assert [tuple(row) for row in json.loads(out)] == expected_of(PILE, "toy", documents or None), err
    again = {LAST} if not documents else {LAST, "train/04.jsonl.zst"}  # a subset resumes within a shard
    assert LAST in server.names() <= again, "shards that were read are not fetched again"
    [made] = [p for p in (tmp_path / "artifacts" / "download").iterdir() if not p.is_symlink()]
    assert {name: (made / name).stat().st_mtime_ns for name in parts} == parts, "finished parts are not written again"
