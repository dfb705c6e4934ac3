"""Reading sources: paths and their names, other files beside them, changes while they are read, installed packages."""

import errno
import glob
import os
import re
from importlib import metadata
from pathlib import Path

import pytest
from conftest import asked_for, documents_of, downloaded, losses_of, refusal, texts_of, write_jsonl
from files_table import json_lines, write

from model.errors import InputError
from tasks import download as download_stage
from tasks.corpus import local, pydocs
from tasks.download import download


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A directory for the files to read, beside the store."""
    (tmp_path / "data").mkdir()
    return tmp_path / "data"


def plant(folder: Path, *names: str, **links: str) -> None:
    """Files that each hold their name, and links to other paths."""
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        write_jsonl(folder / name, [name])
    for link, to in links.items():
        (folder / link).symlink_to(to)


def test_too_many_lost_records_are_refused_with_file_and_reason(store: Path, data: Path):
    write_jsonl(data / "good.jsonl", [f"text {i}" for i in range(96)])
    bad = write_jsonl(data / "bad.jsonl", [None, None, None, "one"])
    said = refusal(data, max_lost=0.02)
    assert re.match(r"3 of 100 .*NoneType.*bad\.jsonl, line 1.*max_lost", said)
    listed = Path(said.split("listed in ")[1].removesuffix("."))
    assert len(listed.read_text(encoding="utf-8").splitlines()) == 3, "the list can be read after the failure"
    assert len(texts_of(downloaded(data, max_lost=0.03))) == 97
    write_jsonl(bad, ["", None])
    with pytest.raises(InputError, match="1 x empty text; 1 x text is not a string"):
        downloaded(bad, max_lost=1)


def test_globs_directories_and_links_give_files_in_order_each_once(store: Path, data: Path, monkeypatch):
    monkeypatch.setenv("HOME", str(data))
    b1 = "b-1.jsonl"
    b2 = "b-2.jsonl"
    b3 = "b-3.jsonl"
    c = "a.jsonl/c.jsonl"
    z = "a.jsonl/deep/z.jsonl"
    plant(data, b2, b1, z, c)  # a directory may have the name of a shard
    (data / b3).symlink_to(write_jsonl(data.parent / "0a1b2c3d", [b3]))  # as in the cache of the hub
    for patterns, names in (
        ([b2, b1], [b2, b1]),
        (["a.jsonl"], [c, z]),
        (["**/*.jsonl"], [c, z, b1, b2, b3]),
        ([b2, ".", "a.jsonl/../b-?.jsonl"], [b2, c, z, b1, b3]),
    ):
        assert texts_of(downloaded(*(data / pattern for pattern in patterns))) == names, patterns
    assert texts_of(downloaded("~/b-*.jsonl")) == [b1, b2, b3]
    monkeypatch.chdir(data)
    relative = [data / path for path in local.expand("**/*.jsonl")]
    assert relative == local.expand(f"{data}/**/*.jsonl"), "in the same order"


def test_a_path_that_cannot_be_read_is_named(data: Path):
    plant(data, "a.jsonl", "hollow/table.bin", "hollow.parquet/.txt.bak")
    (data / "hollow/table.bin").write_bytes(bytes(99))
    plant(data, "alike/a\nb.jsonl", "alike/a\\u000ab.jsonl")
    plant(data, **{"broken.jsonl": "gone", "circle.jsonl": "circle.jsonl"})
    os.mkfifo(data / "pipe.jsonl")
    for pattern, words in {
        "gone.jsonl": "gone.jsonl' matches nothing",
        "gone-*.parquet": "gone-*.parquet' matches nothing",
        "hollow": "hollow' holds no file",
        "hollow.parquet": "hollow.parquet' holds no file",
        "hollow/table.bin": "table.bin is a kind of file",
        "broken.jsonl": "broken.jsonl is not a regular file",
        "circle.jsonl": "circle.jsonl is not a regular file",
        "pipe.jsonl": "pipe.jsonl is not a regular file",
        "alike": "names that differ only in characters that can't be printed",
    }.items():
        with pytest.raises(InputError, match=re.escape(words)):
            local.local_files([f"{data}/a.jsonl", f"{data}/{pattern}"])


MODULE = '''
"""A module of the toy package. Its docstring is long enough to be taken for prose, as it has a few sentences."""

def short():
    """Too short."""

class Thing:
    """A thing.

    It has a docstring of more than one paragraph, with lines that are indented as the class is.
    """

    async def wait(self):
        """Wait for the thing, which may take quite a while, depending on the thing; see \\ud800 for half a character."""
'''  # noqa: E501
THING = "A thing.\n\nIt has a docstring of more than one paragraph, with lines that are indented as the class is."
WAIT = "Wait for the thing, which may take quite a while, depending on the thing; see ? for half a character."


PACKAGE = {
    "toy/__init__.py": MODULE.encode(),
    "toy/broken.py": b"print 'Python 2'\n",
    "toy/latin.py": b"# \xe9\n",
    "toy/guide.md": b"# Guide\n\nHow to use the toy.",
    "toy/empty.txt": b"\n",
    "toy/stopwords.txt": "# Words\nund\nкоторый\n\nby and large\nover\n".encode(),
    "toy/data.bin": b"\x00",
    "toy/tests/test_toy.py": MODULE.encode(),
    "toy-1.0.dist-info/METADATA": b"Metadata-Version: 2.1\nName: toy\nVersion: 1.0\n\nA toy for tests.\n",
    "toy-1.0.dist-info/licenses/LICENSE": b"Do what you like.",
    "toy-1.0.dist-info/top_level.txt": b"toy\n",
}


def test_a_package_gives_its_description_licences_texts_and_docstrings(store: Path, tmp_path: Path, monkeypatch):
    info = tmp_path / "toy-1.0.dist-info"
    write(tmp_path, PACKAGE)
    (info / "RECORD").write_text("".join(f"{name},,\n" for name in [*PACKAGE, "toy/gone.py", f"{info.name}/RECORD"]))
    monkeypatch.setattr(pydocs, "installed", lambda: {"toy": metadata.Distribution.at(info)})
    asked = asked_for(source="python-docs", max_lost=0.5)
    made = download.fn(asked)
    assert list(documents_of(made)) == [
        ("toy/METADATA", "readmes", "A toy for tests.\n"),
        ("toy/toy-1.0.dist-info/licenses/LICENSE", "licences", "Do what you like."),
        ("toy/toy/__init__.py:1", "docstrings", MODULE.split('"""')[1]),
        ("toy/toy/__init__.py:7", "docstrings", THING),
        ("toy/toy/__init__.py:13", "docstrings", WAIT),
        ("toy/toy/guide.md", "texts", "# Guide\n\nHow to use the toy."),
    ]
    lost = {(loss["file"], loss["reason"]) for loss in losses_of(made)}
    assert lost == {("toy/toy/broken.py", "not Python of this version"), ("toy/toy/latin.py", "not UTF-8")}
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toy\nVersion: 1.1\n\nA toy for tests.\n")
    assert download.target(asked) != made, "the key has its version"


CHANGES = {
    "in place": lambda path: path.write_bytes(path.read_bytes().replace(b"old", b"new")),
    "at its end": lambda path: path.open("ab").write(json_lines(["more"])),
    "replaced": lambda path: write_jsonl(path.with_name("b"), ["other"]).replace(path),
    "gone": lambda path: path.unlink(),
}


@pytest.mark.parametrize(
    ("change", "at"), [*((change, 1) for change in CHANGES), ("gone", 0), ("in place", 0), ("in place", 2999)]
)
def test_a_file_that_changes_before_or_while_it_is_read_is_not_published(
    store, data, monkeypatch, change: str, at: int
):
    path = write_jsonl(data / "a.jsonl", [f"old {i}" for i in range(3000)])
    whole = path.read_bytes()
    calls = []
    name = "add" if at else "__init__"
    function = getattr(download_stage.Counts, name)

    def changing(*given) -> None:
        function(*given)
        calls.append(1)
        if len(calls) == max(at, 1):
            CHANGES[change](path)

    with monkeypatch.context() as patch:
        patch.setattr(download_stage.Counts, name, changing)
        refusal(data, part_megabytes=0.005)
    path.write_bytes(whole)
    assert texts_of(downloaded(data, part_megabytes=0.005)) == [f"old {i}" for i in range(3000)]


def test_a_file_whose_rights_change_while_it_is_read_is_read(store: Path, data: Path, monkeypatch):
    path = write_jsonl(data / "a.jsonl", ["old", "older"])
    add = download_stage.Counts.add
    monkeypatch.setattr(download_stage.Counts, "add", lambda *given: (add(*given), path.chmod(0o600)))
    assert texts_of(downloaded(data)) == ["old", "older"]


ODD_NAMES = [
    "with spaces.jsonl",
    "ünï \N{GRINNING FACE}.jsonl",
    "two\nlines.jsonl",
    "-rf.jsonl",
    "[a-z]*?.jsonl",
    "text[1].jsonl",
    "'quoted\".jsonl",
    "back\\slash.jsonl",
    "%41#?&.jsonl",
    os.fsdecode(b"latin-\xe9.jsonl"),
]


def test_a_file_may_have_any_name(store: Path, data: Path):
    for i, name in enumerate(sorted(ODD_NAMES)):
        write_jsonl(data / name, [f"text {i}", None])
    made = downloaded(data, max_lost=0.5)
    found = zip(sorted(ODD_NAMES), documents_of(made), losses_of(made), strict=True)
    for i, (name, document, lost) in enumerate(found):
        assert texts_of(downloaded(data / name, max_lost=0.5)) == [document.text] == [f"text {i}"]
        assert document.id == lost["file"] + ":1"
        assert document.id.isprintable()
        assert name.isprintable() <= (document.id == f"{name}:1")


def test_a_folder_or_file_that_may_not_be_read_is_named(data: Path, monkeypatch: pytest.MonkeyPatch):
    plant(data, "locked/a.jsonl", "open/a.jsonl", "b.jsonl")

    def guarded(call):
        def guard(path: Path | str, *given, **named):
            if (Path(path) == data / "locked" and call is os.listdir) or Path(path).parent == data / "locked":
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
            return call(path, *given, **named)

        return guard

    for name in ("listdir", "lstat", "stat"):  # root may read every folder
        monkeypatch.setattr(os, name, guarded(getattr(os, name)))
    for pattern in (".", "*", "**/*.jsonl", "*/*.jsonl", "*/a.jsonl", "locked", "locked/a.jsonl"):
        with pytest.raises(InputError, match=rf"download .*Permission denied: {data}/locked(/a\.jsonl)?\."):
            downloaded(f"{data}/{pattern}")

    def forbidden(path: Path, *_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, "open", forbidden)
    with pytest.raises(InputError, match=rf"download .*Permission denied: {data}/b\.jsonl\."):
        downloaded(data / "b.jsonl")


def test_links_to_folders_are_followed_and_each_folder_is_read_once(data: Path):
    plant(data, "z/a.jsonl", "z/deep/b.jsonl", "../outside/c.jsonl", "../outside/more/d.jsonl")
    plant(data, **{"again": "z", "elsewhere": "../outside", "z/up": "..", "z/round": "../again"})
    (data.parent / "outside/back").symlink_to(data)
    expected = ["elsewhere/c.jsonl", "elsewhere/more/d.jsonl", "z/a.jsonl", "z/deep/b.jsonl"]
    for pattern in ("", "/**", "/**/*.jsonl", "/**/*"):
        found = local.local_files([f"{data}{pattern}"])[0].values()
        assert sorted(str(p.relative_to(data)) for p in found) == expected, pattern


def test_globs_match_what_those_of_python_match(data: Path, monkeypatch: pytest.MonkeyPatch):
    names = "a-1.jsonl a-2.jsonl b[1].jsonl .hidden.jsonl x/a.jsonl x/y/a.jsonl .git/a.jsonl x/.a.jsonl"
    plant(data, *names.split())
    monkeypatch.chdir(data)
    patterns = "* *.jsonl a-[!1].jsonl b[[]1].jsonl ?-?.jsonl */a.jsonl */* **/*.jsonl **/a.jsonl x/**/*.jsonl **/y/*"
    patterns += " .* .*/* */.a* **/.* */ **/**/*.jsonl ./* x/../a-* *//a*"
    for pattern in [*patterns.split(), *(f"{data}/{p}" for p in patterns.split())]:
        found = [os.path.normpath(p) for p in local.expand(pattern)]
        assert sorted(found) == sorted(os.path.normpath(p) for p in set(glob.glob(pattern, recursive=True))), pattern


def test_other_files_of_a_directory_are_warned_of_once(data: Path, caplog: pytest.LogCaptureFixture):
    plant(data, "a.jsonl")
    local.local_files([str(data)])
    assert not caplog.messages
    plant(data, "b.py", "c.jsonl.bak", ".d.jsonl", unmounted="/gone")
    for _ in range(2):
        assert list(local.local_files([str(data), f"{data}/../data/*.jsonl"])[0]) == ["a.jsonl"]
    [warning] = caplog.messages
    assert all(
        part in warning for part in ("4 files", "1 hidden, 1 .py, 1 .bak, 1 no regular file", f"({data}/.d.jsonl")
    )
