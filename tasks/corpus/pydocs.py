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

from tasks.corpus.parts import Document
from tasks.corpus.rows import Loss

VERSION = 2  # raise it when the same packages give other documents: it enters the key
SHORTEST_DOCSTRING = 80  # characters; shorter ones are seldom prose


@functools.cache
def installed() -> dict[str, metadata.Distribution]:
    """The packages of this environment by normalised name, except for cram itself."""
    named = {
        re.sub(r"[-_.]+", "-", d.metadata["Name"]).lower(): d for d in metadata.distributions() if d.metadata["Name"]
    }
    return {name: named[name] for name in sorted(named) if name != "cram"}


def packages_digest() -> str:
    """What identifies the content of `python-docs` in a key: the versions of all packages, of Python and of this."""
    about = [f"{name}=={d.version}" for name, d in installed().items()]
    about += [sysconfig.get_python_version(), f"documents {VERSION}"]
    return hashlib.sha256("\n".join(about).encode()).hexdigest()


def package_documents(name: str) -> Iterator[Document | Loss]:
    """Description, licences, text files and docstrings of one installed package."""
    distribution = installed()[name]
    # Parsed here, because `distribution.metadata` drops the description once importlib_metadata has been imported
    about = distribution.read_text("METADATA") or distribution.read_text("PKG-INFO") or ""
    if (description := str(message_from_string(about).get_payload() or "")).strip():
        yield Document(f"{name}/METADATA", "readmes", description)
    for file in sorted(distribution.files or [], key=str):
        label, path = f"{name}/{file}", Path(distribution.locate_file(file))
        if file.suffix not in (".py", ".md", ".rst", ".txt", "") or "tests" in file.parts or not path.is_file():
            continue
        if file.suffix == "" and not re.match("(LICEN[CS]E|COPYING|NOTICE|AUTHORS)", file.name, re.IGNORECASE):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            yield Loss(label, 1, "not UTF-8")
            continue
        if file.suffix == ".py":
            yield from docstrings(text, label)
        elif text.strip() and not is_list(text) and file.name != "entry_points.txt":
            kind = "licences" if re.search("LICEN|COPYING|NOTICE", str(file), re.IGNORECASE) else "texts"
            yield Document(label, kind, text)


def is_list(text: str) -> bool:
    """Whether most lines are a single word, as in lists of stop words, domains, requirements or files."""
    return median(len(line.split()) for line in text.splitlines() if line.strip()) < 2


def docstrings(code: str, label: str) -> Iterator[Document | Loss]:
    """The docstrings of a module, its classes and functions, one document each."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in other people's code
            tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError):
        yield Loss(label, 1, "not Python of this version")
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node) or ""
            if len(text) >= SHORTEST_DOCSTRING:
                whole = text.encode(errors="replace").decode()  # "\ud800" in code is half a character
                yield Document(f"{label}:{getattr(node, 'lineno', 1)}", "docstrings", whole)
