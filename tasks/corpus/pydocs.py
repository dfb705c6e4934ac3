"""The documentation of the installed Python packages, as documents."""

import ast
import functools
import hashlib
import re
import sysconfig
import warnings
from collections.abc import Iterator
from email import message_from_string
from importlib import metadata
from pathlib import Path
from statistics import median

from tasks.corpus.documents import Found, Layout, Records
from tasks.corpus.losses import Loss

VERSION = 2  # raise it when the same packages yield other documents: it enters the key
SHORTEST_DOCSTRING = 80  # characters; shorter ones are seldom prose


TEXTS = (".md", ".rst", ".txt")  # suffixes of files that may be prose
ABOUT = re.compile("(LICEN[CS]E|COPYING|NOTICE|AUTHORS)", re.IGNORECASE)  # names of files without a suffix that are
LICENCE = re.compile("LICEN|COPYING|NOTICE", re.IGNORECASE)
LAYOUT = Layout("packages", "")
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@functools.cache
def installed() -> dict[str, metadata.Distribution]:
    """The packages of this environment by normalised name, except for cram itself."""
    packages = {}
    for distribution in metadata.distributions():
        name = distribution.metadata["Name"]
        if name:
            packages[re.sub(r"[-_.]+", "-", name).lower()] = distribution
    return {name: packages[name] for name in sorted(packages) if name != "cram"}


def packages_digest() -> str:
    """What identifies the content of `python-docs` in a key: the versions of all packages, of Python and of this."""
    about = [f"{name}=={distribution.version}" for name, distribution in installed().items()]
    about += [sysconfig.get_python_version(), f"documents {VERSION}"]
    return hashlib.sha256("\n".join(about).encode()).hexdigest()


def package_documents(name: str) -> Records:
    """Description, licences, text files and docstrings of one installed package."""
    distribution = installed()[name]
    # Parsed here, because `distribution.metadata` drops the description once importlib_metadata has been imported
    about = distribution.read_text("METADATA") or distribution.read_text("PKG-INFO") or ""
    description = str(message_from_string(about).get_payload() or "")
    if description.strip():
        yield Found(f"{name}/METADATA", "readmes", description, LAYOUT)
    for file in sorted(distribution.files or [], key=str):
        path = Path(str(distribution.locate_file(file)))
        if may_be_prose(file) and path.is_file():
            yield from file_documents(path, f"{name}/{file}")


def may_be_prose(file: metadata.PackagePath) -> bool:
    """Whether a file of a package is code, which has docstrings, or text, by its path."""
    if "tests" in file.parts:
        return False
    if not file.suffix:
        return ABOUT.match(file.name) is not None
    return file.suffix == ".py" or file.suffix in TEXTS


def file_documents(path: Path, label: str) -> Iterator[Found | Loss]:
    """The docstrings of a module, or the text of another file. `label`: the package with the file's path in it."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        yield Loss(label, 1, "not UTF-8")
        return
    if path.suffix == ".py":
        yield from docstrings(text, label)
    elif text.strip() and not is_list(text) and path.name != "entry_points.txt":
        _, _, file = label.partition("/")
        yield Found(label, "licences" if LICENCE.search(file) else "texts", text, LAYOUT)


def is_list(text: str) -> bool:
    """Whether most lines are a single word, as in lists of stop words, domains, requirements or files."""
    return median(len(line.split()) for line in text.splitlines() if line.strip()) < 2


def docstrings(code: str, label: str) -> Iterator[Found | Loss]:
    """The docstrings of a module, its classes and functions, one document each."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in other people's code
            tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError):
        yield Loss(label, 1, "not Python of this version")
        return
    for node in ast.walk(tree):
        if isinstance(node, DOCUMENTED):
            text = ast.get_docstring(node) or ""
            if len(text) >= SHORTEST_DOCSTRING:
                whole = text.encode(errors="replace").decode()  # "\ud800" in code is half a character
                yield Found(f"{label}:{getattr(node, 'lineno', 1)}", "docstrings", whole, LAYOUT)
