"""Where cram keeps artifacts and Prefect's data: in its checkout, or in the working directory if there is none."""

import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

CODE = Path(__file__).resolve().parents[2]  # the directory with flows/, tasks/ and model/
IN_CHECKOUT = (CODE / "prefect.yaml").is_file()  # not after `pip install DIR`: then it is site-packages
HOME = CODE if IN_CHECKOUT else Path.cwd()
STATE = Path(os.environ.get("PREFECT_HOME") or HOME / ".prefect").expanduser().absolute()  # Prefect's data
_read_only: ContextVar[bool] = ContextVar("read_only", default=False)


def root() -> Path:
    """The directory of the artifacts: that of CRAM_ARTIFACTS, or artifacts/ in `HOME`."""
    return _resolve(os.environ.get("CRAM_ARTIFACTS") or str(HOME / "artifacts"))


@functools.cache  # a relative path stays the same if the process changes its directory
def _resolve(path: str) -> Path:
    return Path(path).expanduser().resolve()


@contextmanager
def read_only() -> Iterator[None]:
    """Change nothing in the store for a while: what would have to be made raises InputError."""
    token = _read_only.set(True)
    try:
        yield
    finally:
        _read_only.reset(token)


def is_read_only() -> bool:
    """Whether this is part of a `with read_only()`."""
    return _read_only.get()
