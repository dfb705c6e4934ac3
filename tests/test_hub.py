"""The hub: what is fetched, how it goes on after an interruption, and what its faults get. A double of it serves here."""

import contextlib
import errno
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
from collections.abc import Iterator
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
from tasks.corpus import fetch, formats, hub
from tasks.corpus.hub import SOURCES
from tasks.corpus.parts import documents_of
from tasks.corpus.records import Layout
from tasks.download import Download, SourceName, download
from tasks.store import WORK, artifacts, draft_of

HOME = Path(__file__).parents[1]
TOKEN = "hf_good"


class Hub(ThreadingHTTPServer):
    """A double of the Hugging Face hub: its listing, its revisions, its files with ranges.

    `log` has the requests: (method, path, range). Files in `breaks` are cut off in the middle, so many times; those in
    `wrong` come with a changed byte, so many times; paths that end as one in `fails` get these answers first; a file in
    `holds` stops after so many bytes until the client is gone. `sent` counts bytes by file.
    """

    daemon_threads = True
    page = 1000  # entries of a listing given at once

    def __init__(self, files: dict[tuple[str, str], dict[str, bytes]]) -> None:
        super().__init__(("127.0.0.1", 0), HubHandler)
        self.files, self.gated, self.ranges = files, set(), True
        self.reset()

    def reset(self) -> None:
        """Forget the requests and mend all faults."""
        self.log, self.sent, self.most_at_once, self.under_way = [], Counter(), 0, 0
        self.breaks, self.wrong, self.holds, self.fails = Counter(), Counter(), {}, defaultdict(list)
        self.gated, self.ranges, self.meet = set(), True, None

    def asked_for(self) -> list[tuple[str, str]]:
        """(name, range) of the files that were asked for."""
        return [(path.split("/resolve/")[1].split("/", 1)[1], r) for _, path, r in self.log if "/resolve/" in path]


class HubHandler(BaseHTTPRequestHandler):
    """Answers one request."""

    server: Hub

    def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in ({"Content_Length": str(len(body))} | headers).items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            with contextlib.suppress(ConnectionError):  # who reads a prefix hangs up
                self.wfile.write(body)

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        path = unquote(url.path)
        self.server.log.append((self.command, path, self.headers.get("Range", "")))
        for ending, statuses in self.server.fails.items():
            if path.endswith(ending) and statuses:
                self.answer(statuses.pop(0))
                return
        owner, _, rest = re.sub("^/(api|cdn)", "", path).removeprefix("/datasets/").partition("/")
        name, action, revision, *inner = [*rest.split("/", 3), "", ""][: max(3, len(rest.split("/", 3)))]
        repository, inner = f"{owner}/{name}", (inner or [""])[0]
        revisions = [found for about, found in self.server.files if about == repository]
        if not action and revisions:
            self.answer_json(self.about(repository, revisions[-1]))
        elif revision not in revisions:
            self.answer(404, X_Error_Code="RevisionNotFound", X_Error_Message=f"Invalid rev id: {revision}")
        elif action == "tree":
            self.list_files(self.server.files[repository, revision], inner, url)
        elif action == "revision":
            self.answer_json(self.about(repository, revision))
        elif repository in self.server.gated and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            message = f"Access to dataset {repository} is restricted."
            status = 403 if self.headers.get("Authorization") else 401
            self.answer(status, X_Error_Code="GatedRepo", X_Error_Message=message)
        elif self.command == "GET" and not path.startswith("/cdn"):  # the hub sends on to where files are stored
            self.answer(302, Location=f"/cdn{url.path}")
        else:
            self.send_file(inner, self.server.files[repository, revision][inner], revision)

    do_HEAD = do_GET

    def about(self, repository: str, revision: str) -> dict:
        return {"id": repository, "sha": revision, "siblings": [], "private": False, "tags": []}

    def answer_json(self, found: object, **headers: str) -> None:
        self.answer(200, json.dumps(found).encode(), Content_Type="application/json", **headers)

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
        about = {"X_Repo_Commit": revision, "ETag": f'"{hashlib.sha256(data).hexdigest()}"', "Accept_Ranges": "bytes"}
        asked = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        if asked and server.ranges:
            start, status = int(asked[1]), 206
            if start >= len(data):
                self.answer(416, Content_Range=f"bytes */{len(data)}")
                return
            about["Content_Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        if self.command == "GET" and server.wrong[name]:
            server.wrong[name] -= 1
            data = data[:-1] + bytes([data[-1] ^ 1])
        body, about["Content_Length"] = data[start:], str(len(data) - start)
        if self.command == "GET" and server.breaks[name]:
            server.breaks[name] -= 1
            body, self.close_connection = body[: len(body) // 2], True
        if self.command == "HEAD":
            self.answer(status, **about)
            return
        server.under_way += 1
        server.most_at_once = max(server.most_at_once, server.under_way)
        if server.meet:
            with contextlib.suppress(threading.BrokenBarrierError):
                server.meet.wait(10)  # until others are asked for
        self.answer(status, **about)
        with contextlib.suppress(ConnectionError):
            for at in range(0, len(body), 1 << 16):
                if name in server.holds and at >= server.holds[name]:
                    self.connection.settimeout(60)
                    self.connection.recv(1)  # returns when the client is gone
                    break
                server.sent[name] += self.wfile.write(body[at : at + (1 << 16)])
        server.under_way -= 1

    def log_message(self, *_: object) -> None:
        """Say nothing on the terminal."""


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


def zst(texts: list[str], source: str = "toy", field: str = "text") -> bytes:
    rows = [json.dumps({field: text, "meta": {"pile_set_name": source}}) for text in texts]
    return zstandard.ZstdCompressor().compress("".join(f"{row}\n" for row in rows).encode())


def gz(rows: list[dict]) -> bytes:
    import gzip

    return gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode(), mtime=0)


def parquet(rows: int, seed: int, **columns: list) -> bytes:
    sink = pa.BufferOutputStream()
    table = pa.table({"id": [str(i) for i in range(rows)], "text": noise(rows, seed), **columns})
    pq.write_table(table, sink, row_group_size=50, compression="zstd")
    return sink.getvalue().to_pybytes()


def at(name: str) -> tuple[str, str]:
    return SOURCES[name].repository, SOURCES[name].revision or "a" * 40


PILE = {f"train/0{i}.jsonl.zst": noise(1500, seed=i) for i in range(6)}
C4 = {f"en/c4-train.0000{i}-of-01024.json.gz": noise(50, seed=10 + i) for i in range(2)}
OTHER = zst(["never read"])
NOTE = (
    bytes.fromhex("502a4d18 05000000") + b"notes"
)  # a frame that is skipped: a change in it is seen by its digest alone


@pytest.fixture(scope="module")
def server() -> Iterator[Hub]:
    pile = {name: zst(texts) + NOTE for name, texts in PILE.items()}
    files = {
        at("pile"): {
            "README.md": b"#",
            "test.jsonl.zst": OTHER,
            **dict(reversed(pile.items())),
            "val.jsonl.zst": OTHER,
        },
        at("c4"): {name: gz([{"text": t, "url": "x"} for t in texts]) for name, texts in C4.items()}
        | {"en/c4-validation.00000-of-00008.json.gz": b"", "realnewslike/c4-train.00000-of-00512.json.gz": b""},
        at("oscar"): {f"en_meta/en_meta_part_{i}.jsonl.zst": zst([f"page {i}"], field="content") for i in (1, 2)},
        at("wikipedia"): {
            f"20231101.en/train-0000{i}-of-00041.parquet": parquet(20_000, seed=20 + i) for i in range(2)
        },
        at("common-pile"): {
            f"{name}/{name}.chunk.0{i}.jsonl.gz": gz([{"text": f"{name} {i} {k}"} for k in range(3)])
            for name in ("news", "uspto", "wikimedia")
            for i in range(2)
        },
    }
    with serving(files) as found:
        yield found


@pytest.fixture
def online(server: Hub, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    """This process takes the double for the hub, and does not wait between attempts."""
    from huggingface_hub import constants, file_download
    from huggingface_hub.utils import _http, close_session

    server.reset()
    for name in [name for name in os.environ if name.lower().endswith("_proxy") or name == "HF_TOKEN"]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(constants, "ENDPOINT", address_of(server))
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", address_of(server) + "/{repo_id}/resolve/{revision}/{filename}"
    )
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    for module in (fetch, _http, file_download):
        monkeypatch.setattr(module, "time", SimpleNamespace(**vars(time) | {"sleep": lambda seconds: None}))
    close_session()
    yield server
    close_session()
    server.reset()


def expected_of(shards: dict[str, list[str]], source: str, documents: int | None = None) -> list[tuple[str, str, str]]:
    return [(f"{name}:{i}", source, t) for name, texts in shards.items() for i, t in enumerate(texts, 1)][:documents]


def read(**settings) -> list[tuple[str, str, str]]:
    """What `download` makes of it."""
    return [tuple(d) for d in documents_of(download.fn(Download(**{"documents": 0} | settings)))]


def refusal(**settings) -> str:
    """The one sentence that it gets."""
    with pytest.raises(InputError) as refused:
        read(**settings)
    assert "\n" not in str(refused.value)
    assert artifacts("download") == []
    return str(refused.value)


NAMES = {  # of one shard of each source as it lies on the hub, and of what must not be read
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


def test_every_source_that_a_recipe_can_name_says_what_it_is():
    assert set(get_args(SourceName)) == {*SOURCES, "python-docs", "files"} == {*NAMES, "python-docs", "files"}
    for name, source in SOURCES.items():
        assert re.fullmatch("[0-9a-f]{40}", source.revision) or name == "oscar", name
        assert source.licence, name
        assert source.about, name
        own, other = NAMES[name]
        assert re.fullmatch(source.pattern, own), name
        assert own.startswith(source.folder), name
        assert not re.fullmatch(source.pattern, other), name


def test_whole_shards_come_in_the_order_of_their_names_and_no_other_file(online: Hub):
    online.page = 3  # the listing has several pages
    made = download.fn(Download(source="pile", documents=0))
    online.page = 1000
    assert [tuple(d) for d in documents_of(made)] == expected_of(PILE, "toy")
    assert made.stats["shards"] == 6
    assert sorted(set(online.asked_for())) == [(name, "bytes=0-") for name in PILE]
    about = made.manifest["params"]["sources"]["pile"]
    assert (about["repository"], about["revision"]) == at("pile")
    assert not (made.path / WORK).exists()


def test_several_files_come_at_once_but_no_more_than_asked_for(online: Hub, monkeypatch: pytest.MonkeyPatch):
    for count in (3, 1):
        monkeypatch.setenv("CRAM_DOWNLOADS", str(count))
        online.reset()
        online.meet = threading.Barrier(count)  # the first ones are answered when all of them are there
        assert read(source="pile", part_megabytes=count) == expected_of(PILE, "toy")
        assert online.most_at_once == count
        assert not online.meet.broken


def test_the_disk_holds_few_shards_at_once(online: Hub, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CRAM_DOWNLOADS", "2")
    held = []
    end = download_stage.Writer._end

    def count(writer: download_stage.Writer, *given: object) -> None:
        end(writer, *given)
        held.append(len([p for p in writer.state.parent.rglob("*.zst*") if p.is_file()]))

    monkeypatch.setattr(download_stage.Writer, "_end", count)
    assert read(source="pile", part_megabytes=0.02) == expected_of(PILE, "toy")
    assert len(held) > 60
    assert 1 <= max(held) <= 3  # one that is read, two that come
    assert held[-1] == 0


@pytest.mark.parametrize("asked", ["0", "-1", "many"])
def test_a_wrong_number_of_downloads_is_told(asked: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CRAM_DOWNLOADS", asked)
    with pytest.raises(InputError, match=r"CRAM_DOWNLOADS is '.*'; expected a positive whole number"):
        fetch.downloads()


def test_an_empty_number_of_downloads_is_none_set(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CRAM_DOWNLOADS", "")
    assert fetch.downloads() == 4


def test_of_a_subset_only_the_beginning_comes(online: Hub):
    pile = read(source="pile", documents=1600)
    assert pile == expected_of(PILE, "toy", 1600)
    assert {name for name, _ in online.asked_for()} == {"train/00.jsonl.zst", "train/01.jsonl.zst"}
    short = read(source="pile", megabytes=0.01)
    size = sum(len(text) for _, _, text in short)
    assert size >= 10_000 > size - len(short[-1][2])
    assert short == pile[: len(short)]
    assert read(source="c4", documents=60) == expected_of(C4, "c4", 60)


def test_of_a_large_shard_only_its_beginning_comes(online: Hub):
    online.files["big/big", "b" * 40] = {
        "big.jsonl.zst": zst([random.Random(1).randbytes(40_000_000).hex()] * 1 + ["end"])
    }
    data = zst(noise(300_000, seed=5))
    online.files["big/big", "b" * 40] = {"big.jsonl.zst": data}
    assert len(data) > 30_000_000
    source = hub.Source("big/big", "b" * 40, ".*zst")
    [file] = hub.files(source)
    with fetch.Kept(source, file, store_module.ROOT / "kept") as kept:
        assert kept.read(1000) == data[:1000]
    assert online.sent["big.jsonl.zst"] < len(data) / 2  # what was on its way is lost
    del online.files["big/big", "b" * 40]


def test_of_a_parquet_shard_only_the_row_groups_that_are_read_come(online: Hub):
    name = "20231101.en/train-00000-of-00041.parquet"
    expected = [(f"{name}:{i}", "wikipedia", text) for i, text in enumerate(noise(20_000, seed=20), 1)]
    assert read(source="wikipedia", documents=120) == expected[:120]
    assert {asked for asked, _ in online.asked_for()} == {name}
    starts = [int(asked.removeprefix("bytes=").removesuffix("-")) for _, asked in online.asked_for()]
    size = len(online.files[at("wikipedia")][name])
    assert all(start < size / 10 or start > size * 3 / 4 for start in starts), "its head and its footer"


def test_a_dropped_connection_is_taken_up_where_it_broke(online: Hub):
    online.breaks.update({"train/00.jsonl.zst": 3, "train/03.jsonl.zst": 1})
    assert read(source="pile") == expected_of(PILE, "toy")
    size = len(online.files[at("pile")]["train/00.jsonl.zst"])
    starts = [int(r.removeprefix("bytes=")[:-1]) for n, r in online.asked_for() if n == "train/00.jsonl.zst"]
    assert sorted(set(starts)) == [0, size // 2, size // 2 + -(-size // 2) // 2, starts[-1]]
    online.reset()
    online.breaks.update({"train/00.jsonl.zst": 2, "20231101.en/train-00000-of-00041.parquet": 2})
    assert read(source="pile", documents=1600) == expected_of(PILE, "toy", 1600)
    assert len(read(source="wikipedia", documents=1500)) == 1500
    assert online.breaks.total() == 0


def test_a_hub_without_ranges_is_read_all_the_same(online: Hub):
    online.ranges = False
    online.breaks.update({"train/00.jsonl.zst": 1})
    assert read(source="pile", shards=2) == expected_of(PILE, "toy", 3000)
    online.breaks.update({"train/00.jsonl.zst": 1})
    assert read(source="pile", documents=1400) == expected_of(PILE, "toy", 1400)


def test_a_file_with_a_wrong_digest_is_fetched_once_more(online: Hub):
    online.wrong.update({"train/01.jsonl.zst": 1})
    assert read(source="pile") == expected_of(PILE, "toy")
    asked = Counter(name for name, _ in online.asked_for())
    assert asked["train/01.jsonl.zst"] == 2 * asked["train/00.jsonl.zst"]


def test_a_file_whose_digest_stays_wrong_is_refused(online: Hub):
    online.wrong.update({"train/01.jsonl.zst": 9})
    said = refusal(source="pile")
    assert re.match(r"train/01.jsonl.zst of monology/pile-uncopyrighted came 2 times with a digest .*HF_ENDPOINT", said)
    assert not list(store_module.ROOT.rglob("01.jsonl.zst*")), "it is not taken for a good one later"
    online.reset()
    assert read(source="pile") == expected_of(PILE, "toy")


def test_a_shard_that_was_read_as_it_came_is_checked_at_its_end(online: Hub):
    settings = {"source": "pile", "documents": 2000, "part_megabytes": 0.05}
    online.wrong.update({"train/00.jsonl.zst": 1})
    assert re.match("train/00.jsonl.zst of .* checksum mismatch.* Run again", refusal(**settings))
    draft = draft_of(download.target(Download(**settings)))
    assert list(draft.glob("part-*"))
    assert not list(draft.rglob("00.jsonl.zst*"))
    for part in draft.glob("part-*"):
        part.write_text("not to be trusted")
    assert read(**settings) == expected_of(PILE, "toy", 2000)


def test_what_came_of_a_damaged_shard_is_not_kept(online: Hub):
    name = "train/00.jsonl.zst"
    whole = online.files[at("pile")][name]
    online.files[at("pile")][name] = whole[:-20]  # the hub's own digest is right
    assert f"{name} is truncated" in refusal(source="pile", documents=2000)
    assert not list(store_module.ROOT.rglob("00.jsonl.zst*"))
    online.files[at("pile")][name] = whole
    assert read(source="pile", documents=2000) == expected_of(PILE, "toy", 2000)


def test_nothing_is_kept_of_a_corrupt_shard_that_is_read_as_it_comes(online: Hub):
    name = "train/00.jsonl.zst"
    whole = online.files[at("pile")][name]
    online.files[at("pile")][name] = whole + b"garbage"
    settings = {"source": "pile", "documents": 4000, "damaged": "keep"}
    assert f"{name} is corrupt" in refusal(**settings)
    online.files[at("pile")][name] = whole
    assert read(**settings) == expected_of(PILE, "toy", 4000)


def test_a_busy_hub_is_asked_again(online: Hub):
    online.fails.update({"train": [503, 500], "00.jsonl.zst": [502, 504], "01.jsonl.zst": [429]})
    assert read(source="pile") == expected_of(PILE, "toy")
    online.fails.update({"train": [503], "00.jsonl.zst": [503, 503]})
    assert read(source="pile", documents=7) == expected_of(PILE, "toy", 7)
    assert not any(online.fails.values())


@pytest.mark.parametrize("limits", [{}, {"documents": 3990}])
def test_a_hub_that_stays_broken_gives_one_sentence(online: Hub, limits: dict):
    for faults in ({"fails": {"train": [503] * 99}}, {"fails": {"01.jsonl.zst": [503] * 99}}):
        online.reset()
        online.fails.update(faults["fails"])
        said = refusal(source="pile", **limits)
        assert said.startswith(
            "monology/pile-uncopyrighted could not be read from the Hugging Face hub: HfHubHTTPError: "
        )
        assert "503" in said
        assert 3 < sum(r[1].endswith(tuple(faults["fails"])) for r in online.log) < 20, "not for ever"


def test_a_parquet_shard_that_can_be_read_no_further_is_a_fault_of_the_hub_and_no_damage(online: Hub, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.2)
    name = "20231101.en/train-00000-of-00041.parquet"
    online.holds[name] = len(online.files[at("wikipedia")][name]) // 2
    file = io.BufferedReader(fetch.Remote(SOURCES["wikipedia"], hub.files(SOURCES["wikipedia"])[0]))
    records = formats.read_file(file, name, Layout("wikipedia", 10**8))
    found = [next(records)]
    online.fails.update({name: [503] * 99})
    with pytest.raises(InputError, match=r"wikimedia/wikipedia could not be read .*503"):
        found.extend(records)
    assert 1 < len(found) < 19_000


def test_a_connection_that_always_drops_gives_one_sentence(online: Hub):
    name = "train/01.jsonl.zst"
    online.breaks.update({name: 10**6})  # each time half of what is left comes, until that is a byte or none
    said = refusal(source="pile", documents=3990)
    assert said.startswith("monology/pile-uncopyrighted could not be read")
    assert "HF_ENDPOINT" in said
    assert len([n for n, _ in online.asked_for() if n == name]) < 100


def test_what_the_hub_does_not_have_gives_one_sentence(online: Hub, monkeypatch: pytest.MonkeyPatch):
    pile = SOURCES["pile"]
    monkeypatch.setitem(SOURCES, "pile", hub.Source(pile.repository, "0" * 40, pile.pattern))
    assert "RevisionNotFound" in refusal(source="pile")
    monkeypatch.setitem(SOURCES, "pile", hub.Source(pile.repository, pile.revision, "train/[a-z]+", "train"))
    assert "no file like train/[a-z]+, but train/00.jsonl.zst, " in refusal(source="pile")


def test_a_hub_that_is_not_there_gives_one_sentence(online: Hub, monkeypatch: pytest.MonkeyPatch):
    from huggingface_hub import constants

    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as closed:
        nobody = address_of(closed)
    monkeypatch.setattr(constants, "ENDPOINT", nobody)
    said = refusal(source="pile")
    assert re.match("monology/pile-uncopyrighted could not be read .*ConnectError.*HF_ENDPOINT and HF_TOKEN", said)


def test_a_data_set_that_is_not_open_says_how_to_get_in(online: Hub, monkeypatch: pytest.MonkeyPatch):
    online.gated.add(SOURCES["oscar"].repository)
    for token, status, limits in (("", 401, {}), ("hf_other", 403, {"documents": 1})):
        monkeypatch.setenv("HF_TOKEN", token)
        said = refusal(source="oscar", **limits)
        assert said.startswith(f"oscar-corpus/OSCAR-2301 is not open to all on the Hugging Face hub ({status}).")
        for word in ("https://huggingface.co/datasets/oscar-corpus/OSCAR-2301", "HF_TOKEN"):
            assert word in said
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert [text for _, _, text in read(source="oscar")] == ["page 1", "page 2"]


def test_the_commit_of_a_source_without_one_is_the_newest_when_first_used(online: Hub):
    oscar = SOURCES["oscar"]
    assert oscar.revision == ""
    key = download.target(Download(source="oscar")).key
    made = download.fn(Download(source="oscar"))
    assert made.key == key
    assert made.manifest["params"]["sources"]["oscar"]["revision"] == "a" * 40
    assert json.loads((store_module.ROOT / ".revisions.json").read_text()) == {oscar.repository: "a" * 40}
    online.files[oscar.repository, "b" * 40] = {"en_meta/en_meta_part_1.jsonl.zst": zst(["new"], field="content")}
    try:
        assert download.target(Download(source="oscar")).key == key
        (store_module.ROOT / ".revisions.json").unlink()
        assert download.target(Download(source="oscar")).key != key
        assert [text for _, _, text in read(source="oscar")] == ["new"]
    finally:
        del online.files[oscar.repository, "b" * 40]


def test_sets_that_are_told_by_path_are_chosen_before_anything_comes(online: Hub):
    found = read(source="common-pile", sets=["wikimedia", "news"])
    assert {source for _, source, _ in found} == {"wikimedia", "news"}
    assert len(found) == 12
    assert {name.split("/")[0] for name, _ in online.asked_for()} == {"wikimedia", "news"}
    with pytest.raises(InputError) as refused:
        read(source="common-pile", sets=["wikipedia"])
    assert str(refused.value).endswith("has no set wikipedia. Those it has: news, uspto, wikimedia.")


def test_shards_of_one_set_are_not_read_in_a_row_where_a_source_is_mixed(online: Hub):
    names = [file.name for file in hub.files(SOURCES["common-pile"])]
    assert sorted(names) == sorted(online.files[at("common-pile")])
    assert names != sorted(names)
    assert names == [file.name for file in hub.files(SOURCES["common-pile"])]


def test_a_file_in_the_cache_of_the_hubs_client_is_used(online: Hub):
    from huggingface_hub import hf_hub_download

    for name in ("train/00.jsonl.zst", "train/01.jsonl.zst"):
        path = Path(hf_hub_download(at("pile")[0], name, repo_type="dataset", revision=at("pile")[1]))
    path.resolve().write_bytes(path.read_bytes()[:-1] + b"x")  # the second has been damaged
    online.reset()
    assert read(source="pile", shards=2) == expected_of(PILE, "toy", 3000)
    assert read(source="pile", documents=3) == expected_of(PILE, "toy", 3)
    assert {name for name, _ in online.asked_for()} == {"train/01.jsonl.zst"}
    assert path.exists(), "it is not ours to delete"


def test_a_small_file_is_brought_to_the_cache_of_the_hubs_client_and_checked(online: Hub):
    repository, commit = at("pile")
    online.wrong.update({"README.md": 1})
    source = hub.Source(repository, commit, "README.md")
    [file] = hub.files(source)
    assert len(file.digest) == 40
    assert hub.bring(source, file).read_bytes() == b"#"
    online.reset()
    assert hub.bring(source, file).read_bytes() == b"#"
    assert online.log == []
    source = hub.Source(repository, commit, "val.*")
    [file] = hub.files(source)
    with pytest.raises(InputError, match=r"val.jsonl.zst of .* came 2 times with a digest"):
        hub.bring(source, file._replace(digest="0" * 40))


def test_what_is_there_of_a_file_is_not_fetched_again(online: Hub):
    name, params = "train/00.jsonl.zst", Download(source="pile", documents=0)
    data = online.files[at("pile")][name]
    folder = draft_of(download.target(params)) / WORK / "hub" / "pile"
    (folder / "train").mkdir(parents=True)
    for there, first in ((data[:1000], 1000), (data, None), (data + b"x", 0), (b"x" * 1000, 1000)):
        (folder / f"{name}.partial").write_bytes(there)
        online.reset()
        with fetch.Fetcher(SOURCES["pile"], hub.files(SOURCES["pile"])[:1], folder) as fetcher:
            assert fetcher[0].result().read_bytes() == data
        asked = [int(r.removeprefix("bytes=")[:-1]) for n, r in online.asked_for() if n == name]
        assert asked[:1] == ([] if first is None else [first])
        fetch.forget(folder / name)
    assert not [p for p in folder.rglob("*") if p.is_file()]


def test_a_fetch_ends_when_it_is_no_longer_wanted(online: Hub, monkeypatch: pytest.MonkeyPatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.2)
    name = "train/00.jsonl.zst"
    online.holds[name] = 1 << 16
    folder = store_module.ROOT / "fetched"
    with fetch.Fetcher(SOURCES["pile"], hub.files(SOURCES["pile"])[:1], folder) as fetcher:
        future = fetcher[0]
        while not fetcher.come:
            time.sleep(0.01)
    assert future.done()
    with pytest.raises(InputError, match="no longer wanted"):
        future.result()
    assert 0 < (folder / f"{name}.partial").stat().st_size < len(online.files[at("pile")][name]), "but it is kept"


@pytest.mark.parametrize("limits", [{}, {"documents": 10}])
def test_a_full_disk_is_told_and_not_taken_for_a_fault_of_the_hub(online: Hub, monkeypatch, limits: dict):
    begin = fetch._begin

    class Full(io.BytesIO):
        def write(self, data: bytes) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(fetch, "_begin", lambda partial, file: Full())
    for source in ("pile", "c4"):
        said = refusal(source=source, **limits)
        assert re.match("download can't continue: No space left on device: .*CRAM_ARTIFACTS", said)
    monkeypatch.setattr(fetch, "_begin", begin)
    assert read(source="pile", shards=1) == expected_of(PILE, "toy", 1500)


def test_progress_is_told_in_bytes(online: Hub, monkeypatch: pytest.MonkeyPatch):
    bars = []

    class Recorder(download_stage.Progress):
        def __init__(self, label: str, total: float, unit: str) -> None:
            super().__init__(label, total, unit)
            bars.append(self)

    monkeypatch.setattr(download_stage, "Progress", Recorder)
    read(source="pile", part_megabytes=1)
    sizes = [len(data) for name, data in online.files[at("pile")].items() if name in PILE]
    read(source="pile", megabytes=0.1)
    read(source="pile", documents=77)
    assert [(bar.total, bar.unit) for bar in bars] == [(sum(sizes), "B"), (100_000, "B"), (77, "doc")]
    assert [bar.count >= bar.total for bar in bars] == [True] * 3
    assert bars[0].count == sum(sizes)


SCRIPT = """
import json, sys, time
time.sleep = lambda seconds: None
from model import InputError
from tasks.corpus.parts import documents_of
from tasks.download import Download, download
try:
    made = download.fn(Download(**json.loads(sys.argv[1])))
    print(json.dumps([tuple(d) for d in documents_of(made)]))
except InputError as error:
    print(json.dumps(str(error)))
"""


def start(server: Hub, home: Path, **settings) -> subprocess.Popen:
    """`download` in a process of its own, which takes the double for the hub."""
    own = {"HF_ENDPOINT": address_of(server), "HF_HOME": str(home / "hf"), "NO_PROXY": "127.0.0.1"}
    own |= {"CRAM_ARTIFACTS": str(home / "artifacts"), "CRAM_DOWNLOADS": "2"}
    kept = {k: v for k, v in os.environ.items() if not k.startswith("HF_") and not k.lower().endswith("_proxy")}
    command = [sys.executable, "-c", SCRIPT, json.dumps({"documents": 0} | settings)]
    return subprocess.Popen(
        command, env=kept | own, cwd=HOME, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.parametrize("limits", [{}, {"documents": 8500}])
def test_a_killed_download_goes_on_with_the_bytes_it_has(server: Hub, tmp_path: Path, limits: dict):
    server.reset()
    name = "train/05.jsonl.zst"
    server.holds[name] = 1 << 16
    settings = {"source": "pile", "part_megabytes": 0.2, **limits}
    process = start(server, tmp_path, **settings)
    partial = f"artifacts/.partial/download-*/{WORK}/hub/pile/{name}.partial"
    deadline = time.monotonic() + 60
    while not [p for p in tmp_path.glob(partial) if p.stat().st_size >= 1 << 15]:
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    while not list(tmp_path.glob("artifacts/.partial/download-*/part-00006.parquet")):  # all before it was read
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert not (tmp_path / "artifacts" / "download").exists()
    [size] = [p.stat().st_size for p in tmp_path.glob(partial)]
    parts = {
        p.name: p.stat().st_mtime_ns for p in tmp_path.glob("artifacts/.partial/download-*/part-0000[0-4].parquet")
    }
    assert len(parts) == 5
    server.reset()
    out, err = start(server, tmp_path, **settings).communicate(timeout=60)
    assert [tuple(row) for row in json.loads(out)] == expected_of(PILE, "toy", limits.get("documents")), err
    assert set(server.asked_for()) == {(name, f"bytes={size}-")}
    [made] = [p for p in (tmp_path / "artifacts" / "download").iterdir() if not p.is_symlink()]
    assert {name: (made / name).stat().st_mtime_ns for name in parts} == parts, "finished parts are not written again"
