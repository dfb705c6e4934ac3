"""Files that must reach the disk, and names in a model's folder."""

import errno
import os
from pathlib import Path

# in a model's folder, the models that training kept on its way
TENTHS = "tenths"  # at tenths of its budget, in folders named 10 to 90
TOKENS = "tokens"  # before its first step and at 1, 2, 4 … million tokens, in folders named 0, 1, 2, 4 …
KEPT = (TENTHS, TOKENS)
PICKLED = "pytorch_model.bin"  # the weights, as transformers wrote them before safetensors
MILLION = 1_000_000  # tokens
UNSUPPORTED = (
    errno.EINVAL,
    errno.ENOSYS,
    errno.EOPNOTSUPP,
)  # errors of a file system that can't do what it is asked to


def fsync(path: Path) -> None:
    """Force a file, or the names in a directory, to disk. Some file systems can't do that for a directory."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            error.filename = str(path)
            raise
    finally:
        os.close(handle)
