"""Files that must reach the disk, and names in a model's folder."""

import errno
import os
from pathlib import Path

TENTHS = "tenths"  # in a model's folder: models at tenths of its budget, in folders named 10 to 90
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
