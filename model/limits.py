"""What this process may use of the machine: cores and memory, within the limits of its control groups. Needs no torch.

Containers, systemd and Slurm limit a process by control groups (cgroups), which form a tree: a limit may be that of the
process's own group or of any group above it.
"""

import math
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

PROCESS = Path("/proc/self")
MEMORY_INFO = Path("/proc/meminfo")
UNKNOWN_MEMORY = 1 << 50  # bytes: 1 PiB
# names of files in a group's folder, by the kind of its file system, which is that of version 2 or 1
QUOTA = {"cgroup2": ("cpu.max",), "cgroup": ("cpu.cfs_quota_us", "cpu.cfs_period_us")}
MEMORY = {  # limit, use, and what it is used for
    "cgroup2": ("memory.max", "memory.current", "memory.stat"),
    "cgroup": ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat"),
}


def cores() -> int:
    """The cores that this process can keep busy: those that it may run on, or as many as its CPU quota pays for.

    A quota of 1.5 cores counts as 2: one worker would leave a third of it unused, and of two each waits for a quarter
    of the time, so that together they use it all.
    """
    counts = [math.ceil(quota) for quota in quotas()]
    return min([len(os.sched_getaffinity(0)), *counts])


def quotas() -> Iterator[float]:
    """The CPU time per second, in cores, that the process and each group above it may use; only where it is limited."""
    for kind, folder in groups("cpu"):
        with suppress(OSError, ValueError):  # absent, or "max"
            texts = [read(folder / name) for name in QUOTA[kind]]
            quota, period = map(int, " ".join(texts).split())
            if min(quota, period) > 0:  # version 1 has -1 for no limit
                yield quota / period


def available_memory() -> int:
    """Bytes of memory that can still be allocated, within the limits of cgroups; 1 PiB if unknown."""
    left = [UNKNOWN_MEMORY]
    with suppress(OSError):
        match = re.search(r"MemAvailable: +(\d+) kB", read(MEMORY_INFO))
        if match:
            left.append(int(match[1]) * 1024)
    for kind, folder in groups("memory"):
        with suppress(OSError, ValueError):  # absent, or "max"
            limit, used, stat = (read(folder / name) for name in MEMORY[kind])
            # cached files, which the kernel drops when memory is needed; those of the groups below are in `total_`
            files = dict(re.findall(r"^(?:total_)?((?:in)?active_file) (\d+)$", stat, flags=re.M))
            left.append(int(limit) - int(used) + sum(map(int, files.values())))
    return max(0, min(left))


def groups(controller: str) -> Iterator[tuple[str, Path]]:
    """The folders of this process's control group and of all above it that are visible here, with the kind of each."""
    try:
        memberships = [line.split(":", 2) for line in read(PROCESS / "cgroup").splitlines()]
        mounts = [line.split(" ") for line in read(PROCESS / "mountinfo").splitlines()]
    except OSError:  # another kernel
        return
    for mount in mounts:
        root = mount[3]
        top = Path(mount[4])
        separator = mount.index("-")
        kind, _, options = mount[separator + 1 : separator + 4]
        if kind not in QUOTA or (kind == "cgroup" and controller not in options.split(",")):
            continue
        named = controller if kind == "cgroup" else ""
        for _, controllers, path in memberships:
            if named in controllers.split(","):
                for folder in upwards(top, root, path):
                    yield kind, folder


def upwards(top: Path, root: str, path: str) -> Iterator[Path]:
    """The folder of the control group `path`, and those above it, up to `top`, where the group `root` is mounted.

    Where that group isn't below `root`, as in a container that sees the names of its host, it is `root` itself.
    """
    inner = Path()
    if Path(path).is_relative_to(root):
        inner = Path(path).relative_to(root)
    if ".." in inner.parts or not (top / inner).is_dir():
        inner = Path()
    for part in (inner, *inner.parents):
        yield top / part


def read(path: Path) -> str:
    """The text of a file."""
    return path.read_text(encoding="utf-8")
