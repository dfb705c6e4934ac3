"""Cores and memory that a process may use, by its control groups. Folders stand for the kernel's file systems."""

import os
from pathlib import Path

import pytest
import torch

from model import distributed, limits, machine
from tasks.stage import environment
from tasks.workers.processes import library_threads, workers

V2 = "cgroup2 cgroup rw,nsdelegate"
V1 = "cgroup cgroup rw,cpu,cpuacct"
INNER = "user.slice/job"


class Kernel:
    """A machine of 16 cores and 9 GB whose files of control groups can be written."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.groups = folder / "sys"
        self.groups.mkdir()
        monkeypatch.setattr(limits, "PROCESS", folder)
        monkeypatch.setattr(limits, "MEMORY_INFO", folder / "meminfo")
        monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(16)))
        (folder / "meminfo").write_text("MemTotal: 16000000 kB\nMemAvailable:    9000000 kB\n")

    def put(self, membership: str, how: str, root: str = "/") -> None:
        """Mount the control groups below `root` in `groups`, and put the process into one of them."""
        mounts = f"22 1 0:5 / /proc rw - proc proc rw\n31 23 0:28 {root} {self.groups} rw,relatime shared:4 - {how}\n"
        (self.folder / "mountinfo").write_text(mounts)
        (self.folder / "cgroup").write_text(membership)

    def write(self, group: str, **files: str) -> None:
        """Files of a group; _ in a name stands for the first dot."""
        (self.groups / group).mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (self.groups / group / name.replace("_", ".", 1)).write_text(text)


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kernel:
    monkeypatch.delenv("CRAM_WORKERS", raising=False)
    return Kernel(tmp_path, monkeypatch)


@pytest.mark.parametrize(("quota", "cores"), [("max", 16), ("200000", 2), ("20000", 1), ("310000", 4), ("6400000", 16)])
@pytest.mark.parametrize("group", ["", "user.slice", INNER])
@pytest.mark.parametrize("version", [2, 1])
def test_cores_are_the_affinity_or_the_quota_of_any_group_above_rounded_up(
    kernel: Kernel, quota: str, cores: int, group: str, version: int
):
    (kernel.groups / INNER).mkdir(parents=True)
    if version == 2:
        kernel.put(f"0::/{INNER}\n", V2)
        kernel.write(group, cpu_max=f"{quota} 100000\n")
        kernel.write("user.slice/another", cpu_max="1000 100000\n")
    else:
        kernel.put(f"5:memory:/elsewhere\n4:cpu,cpuacct:/{INNER}\n0::/\n", V1)
        kernel.write(group, cpu_cfs_quota_us=quota.replace("max", "-1"), cpu_cfs_period_us="100000\n")
    assert limits.cores() == workers() == cores


def test_the_smallest_of_several_quotas_counts_and_the_affinity_if_it_is_smaller(kernel: Kernel, monkeypatch):
    kernel.put(f"0::/{INNER}\n", V2)
    for group, quota in (("", "800000"), ("user.slice", "300000"), (INNER, "500000")):
        kernel.write(group, cpu_max=f"{quota} 100000\n")
    assert limits.cores() == 3
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {4, 7})
    assert limits.cores() == 2


@pytest.mark.parametrize(
    ("membership", "root"),
    [
        ("0::/\n", "/"),  # a namespace of its own
        ("0::/docker/0a1b\n", "/docker/0a1b"),  # names of the host, and its group mounted alone
        ("0::/docker/0a1b\n", "/"),  # the same, without a trace of it
        ("0::/../../system.slice\n", "/"),  # moved out of its namespace
    ],
)
def test_in_a_container_the_group_that_is_mounted_counts(kernel: Kernel, membership: str, root: str):
    kernel.put(membership, V2, root)
    kernel.write("", cpu_max="250000 100000\n")
    assert limits.cores() == 3


def test_nothing_is_limited_where_the_kernel_says_nothing(kernel: Kernel):
    assert (limits.cores(), limits.available_memory()) == (16, 9_000_000 * 1024)
    kernel.put("0::/\n", V2)
    kernel.write("", cpu_max="damaged", memory_max="max\n", memory_current="5", memory_stat="")
    assert (limits.cores(), limits.available_memory()) == (16, 9_000_000 * 1024)
    (kernel.folder / "meminfo").unlink()
    assert limits.available_memory() == limits.UNKNOWN_MEMORY


def test_the_memory_that_can_be_had_is_what_the_kernel_and_any_group_above_say(kernel: Kernel):
    kernel.put(f"0::/{INNER}\n", V2)
    stat = "anon 999\nfile 600\nshmem 200\nactive_file 100\ninactive_file 300\nactive_anon 7\n"
    kernel.write(INNER, memory_max="max\n", memory_current="2000000\n", memory_stat=stat)
    kernel.write("user.slice", memory_max="5000000\n", memory_current="2000000\n", memory_stat=stat)
    assert limits.available_memory() == 3_000_400
    kernel.write(INNER, memory_max="2500000\n")
    assert limits.available_memory() == 500_400
    kernel.put(f"4:memory:/{INNER}\n", "cgroup cgroup rw,memory")
    stat += "total_active_file 1000\ntotal_inactive_file 3000\n"
    kernel.write("", memory_limit_in_bytes="4000000", memory_usage_in_bytes="1000000", memory_stat=stat)
    assert limits.available_memory() == 3_004_000, "with the files of groups below"


def test_this_machine_has_cores_and_memory():
    assert 1 <= limits.cores() <= len(os.sched_getaffinity(0))
    assert 1 << 26 < limits.available_memory() < limits.UNKNOWN_MEMORY


def test_threads_and_workers_are_as_many_as_the_quota_pays_for(kernel: Kernel, monkeypatch: pytest.MonkeyPatch):
    kernel.put("0::/\n", V2)
    kernel.write("", cpu_max="300000 100000\n")
    monkeypatch.setenv("CRAM_DEVICE", "cpu")
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "")
    monkeypatch.delenv("TORCHINDUCTOR_COMPILE_THREADS")
    threads = []
    monkeypatch.setattr(torch, "get_num_threads", lambda: 16)
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    machine.detect()
    assert threads == [], "the user says how many"
    monkeypatch.delenv("OMP_NUM_THREADS")
    machine.detect()
    assert threads == [3]
    assert os.environ["TORCHINDUCTOR_COMPILE_THREADS"] == "3"
    assert distributed.process_environment(0, 2)["OMP_NUM_THREADS"] == "1"
    assert environment.__wrapped__()["machine"]["cores"] == 3
    with library_threads():
        assert os.environ["RAYON_NUM_THREADS"] == "3"


def test_every_count_of_cores_is_that_of_limits():
    root = Path(limits.__file__).parents[1]
    counts = ("cpu_count(", "sched_getaffinity(")
    code = [path for folder in ("model", "tasks", "flows", "benchmarks") for path in (root / folder).rglob("*.py")]
    counting = {path.name for path in code if any(name in path.read_text(encoding="utf-8") for name in counts)}
    assert counting == {"limits.py", "machine.py"}
