"""For faults.py: a store and what is wrong in it, a command of cram in a process group of its own, a row of the table,
and the undisturbed runs that all is compared with."""

import hashlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # cram of this checkout
from flows.cli.common import stage_names
from tasks.store.artifacts import LATEST, TELLING
from tasks.store.manifests import MANIFEST

HOME = Path(__file__).resolve().parents[1]
LAYOUT = {"layers": 1, "hidden": 64, "heads": 1, "intermediate": 192}
OVERRIDE = {
    "download": {"megabytes": 2.5, "part_megabytes": 0.8},
    "deduplicate": {"methods": ["exact", "minhash", "substring"]},
    "measure": {"vocabulary_entries": 1024, "sample_megabytes": 1},
    "filter": {"max_tokens_per_char": 0.4},
    "vocabulary": {"entries": 1024},
    "tokenize": {"length": 64, "heldout_fraction": 0.1},
    "pretrain": {"architecture": LAYOUT, "budget": 400_000, "budget_unit": "tokens"},
    "finetune": {"tasks": ["word-order", "neighbours"], "epochs": 1, "max_tokens": 64, "baseline": False},
}
RUN = ("run", "demo", "--override", json.dumps(OVERRIDE))
OTHER = ("--override", '{"pretrain": {"seed": 1}}')  # another run, which shares the text
STAGES = stage_names()
LAST = STAGES[-1]
MARK = "CRAM_FAULTS"  # in the environment of every process that is started here
LONG = 900  # seconds, on a busy machine
ENV = {name: value for name, value in os.environ.items() if not name.startswith(("CRAM_", "PREFECT_"))} | {
    "CRAM_WORKERS": "2", "CRAM_DEVICE": "cpu", "CRAM_COMPILE": "0", "PYTHONPATH": str(HOME), "DO_NOT_TRACK": "1",
    "OMP_NUM_THREADS": "1",  # else a finetuning run that is alone has two threads, and rounds differently
    "PREFECT_API_URL": "http://127.0.0.1:9/api",  # where nothing answers
    MARK: f"{os.getpid()}-{time.time_ns()}",
}  # fmt: skip


def before(stage: str) -> list[str]:
    """The stages before one."""
    return STAGES[: STAGES.index(stage)]


def wait(happened: Callable[[], object], what: str, seconds: float = LONG, pause: float = 0.002) -> None:
    """Wait until something happens. Raises TimeoutError if it doesn't."""
    deadline = time.monotonic() + seconds
    while not happened():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {seconds} s for {what}")
        time.sleep(pause)


def digest(path: Path) -> str:
    """The SHA-256 of a file, read anew: stages remember those of unchanged files."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def processes() -> list[int]:
    """The living processes that were started here, and those that these have started."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if f"{MARK}={ENV[MARK]}\0".encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
    return found


class Store:
    """A directory of artifacts, and the names of those that have been in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.seen = set()

    def artifacts(self, stage: str = "[!.]*") -> dict[str, Path]:
        """The published directories by name."""
        found = [path for path in sorted(self.folder.glob(f"{stage}/*")) if path.is_dir() and not path.is_symlink()]
        return {f"{path.parent.name}/{path.name}": path for path in found if path.name != LATEST}  # left by cp -L

    def contents(self) -> dict[str, dict]:
        """The digests of the artifacts' files, but not of those that describe the run; and the reports' tables."""
        found = {}
        for name, path in self.artifacts().items():
            about = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
            told = (*TELLING, "report.json")
            files = {file["path"]: file["sha256"] for file in about["files"] if not file["path"].endswith(told)}
            found[name] = files | {"table": about["stats"].get("table") if about["stage"] == LAST else None}
        return found

    def problems(self) -> list[str]:
        """What is half-written, damaged or lost."""
        wrong = []
        found = self.artifacts()
        for name, path in found.items():
            try:
                about = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
                kept = [file for file in about["files"] if file["path"] not in about.get("hollow", [])]
                wrong += [f"{name}: {f['path']} is damaged" for f in kept if digest(path / f["path"]) != f["sha256"]]
            except (OSError, ValueError) as error:
                wrong.append(f"{name} is incomplete: {error}")
        wrong += [f"{name} is lost" for name in sorted(self.seen - found.keys())]
        self.seen |= found.keys()
        return wrong

    def has_begun(self, stage: str) -> bool:
        """Whether a stage has a draft or an artifact."""
        return any(self.folder.glob(f".partial/{stage}-*")) or bool(self.artifacts(stage))


class Run:
    """A command of cram, in a process group of its own."""

    def __init__(self, store: Store, *options: str, command: tuple = RUN, **env: str) -> None:
        self.file = store.folder.with_suffix(f".{time.time_ns()}.log").open("w+", encoding="utf-8")
        own = ENV | {"CRAM_ARTIFACTS": str(store.folder), "PREFECT_HOME": f"{store.folder}-prefect"} | env
        line = [sys.executable, "-m", "flows.cli.main", *command, *options]
        output = {"stdout": self.file, "stderr": subprocess.STDOUT}
        self.process = subprocess.Popen(line, env=own, cwd=HOME, start_new_session=True, **output)

    def until(self, happened: Callable[..., object], *arguments: object) -> "Run":
        """Wait until something happens, or the run has ended."""
        wait(lambda: happened(*arguments) or self.process.poll() is not None, f"{happened.__name__} {arguments}")
        return self

    def end(self) -> "Run":
        """Wait for its end."""
        self.code = self.process.wait(LONG)
        self.text = Path(self.file.name).read_text(encoding="utf-8")
        self.said = ([line for line in self.text.splitlines() if line.strip()] or [""])[-1]
        return self

    def signal(self, number: int, group: bool = True) -> None:
        """Send a signal to the group, or to the command alone."""
        with suppress(ProcessLookupError):
            (os.killpg if group else os.kill)(self.process.pid, number)

    def pause(self, seconds: float) -> bool:
        """Stop the group after this time; whether it is still there."""
        self.signal(signal.SIGCONT)
        time.sleep(seconds)
        self.signal(signal.SIGSTOP)
        return self.process.poll() is None

    def kill(self, group: bool = True) -> None:
        """Kill -9."""
        self.signal(signal.SIGKILL, group)
        self.end()


@dataclass
class Row:
    """A fault in a stage: how often, what a rerun made of it, what was said, and what was wrong."""

    fault: str
    stage: str
    times: int = 1
    within: int = 0  # how often the stage was running
    rerun: str = "–"
    said: str = "–"
    problems: list[str] = field(default_factory=list)

    def check(self, store: Store, seconds: float = 60) -> None:
        """Note what is wrong in the store, and processes that are left after some time."""
        self.problems += store.problems()
        with suppress(TimeoutError):
            wait(lambda: not processes(), "the end of all processes", seconds, 0.1)
        for pid in processes():
            with suppress(OSError):
                self.problems.append(
                    f"left: {Path(f'/proc/{pid}/cmdline').read_text(encoding='utf-8').replace(chr(0), ' ')}"
                )
                os.kill(pid, signal.SIGKILL)

    def hear(self, run: Run, code: int = 1) -> None:
        """Note what a run said, which must be one sentence if it failed."""
        self.said = run.said
        is_said = code == 0 or (run.said.startswith("cram: ") and run.said.endswith("."))
        if run.code != code or "Traceback" in run.text or not is_said:
            self.problems.append(f"exit status {run.code}, expected {code}: {run.text[-1500:]}")

    def print(self, verdict: str = "") -> None:
        """Print it as a line of the table."""
        verdict = verdict or ("FAILED: " + "; ".join(self.problems) if self.problems else "ok")
        times = f"{self.times}, {self.within} within it" if self.within else str(self.times)
        said = re.sub(r"/\S*cram-faults-\w+/\d+/?(store/)?", "STORE/", self.said)
        cells = [self.fault, self.stage, times, self.rerun, said, verdict]
        print("|", " | ".join(cell.replace("|", "/").replace("\n", " ¶ ") for cell in cells), "|", flush=True)


class Bench:
    """The undisturbed runs, and what the faults share."""

    def __init__(self, folder: Path, quick: bool) -> None:
        self.folder = folder
        self.made = 0
        self.failed = 0
        self.random = random.Random()
        self.rounds = 1 if quick else 5
        self.stages = ("decontaminate", "pretrain") if quick else STAGES
        self.reference = self.store()
        self.seconds = dict.fromkeys(STAGES, 0.0)
        self.first = self.undisturbed(self.reference)
        for path in self.reference.artifacts().values():
            about = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
            self.seconds[about["stage"]] = max(self.seconds[about["stage"]], about["seconds"])
        self.both = self.store(*STAGES)
        self.all = self.undisturbed(self.both, *OTHER)

    def undisturbed(self, store: Store, *options: str) -> dict[str, dict]:
        """Run to the end; the store's contents then. Raises RuntimeError if that fails."""
        run = Run(store, *options).end()
        if run.code or store.problems():
            raise RuntimeError(f"an undisturbed run failed: {run.text} {store.problems()}")
        return store.contents()

    def store(self, *stages: str) -> Store:
        """A new one with the first run's artifacts of these stages."""
        self.made += 1
        folder = self.folder / f"{self.made:03}"
        folder.mkdir()
        if stages:  # in one call, which keeps links between them
            subprocess.run(["cp", "-a", *(self.reference.folder / stage for stage in stages), folder], check=True)
        store = Store(folder)
        store.problems()
        return store

    def moment(self, stage: str) -> None:
        """Wait for a random part of what a stage takes."""
        time.sleep(self.random.uniform(0, 1.1 * self.seconds[stage] + 0.02))

    def compare(self, row: Row, store: Store, run: Run, until: str = LAST) -> None:
        """Note whether a run until this stage made what an undisturbed one makes."""
        row.check(store)
        wrong = [] if run.code == 0 and "Traceback" not in run.text else [f"the rerun failed: {run.text[-1500:]}"]
        if not row.problems and not wrong:
            found = store.contents()
            stages = (*before(until), until)
            wanted = found.keys() | {name for name in self.first if name.split("/")[0] in stages}
            wrong = [
                f"{name} is not as undisturbed" for name in sorted(wanted) if found.get(name) != self.all.get(name)
            ]
        row.rerun = "failed" if wrong else "same files"
        row.problems += wrong

    def rerun(self, row: Row, store: Store, until: str = LAST, *options: str) -> None:
        """Check the store, run again until this stage, and compare."""
        row.check(store)
        self.compare(row, store, Run(store, "--until", until, *options).end(), until)

    @contextmanager
    def case(self, fault: str, stage: str, *stages: str) -> Iterator[tuple[Row, Store]]:
        """A row and a store that has these stages. In the end the row is printed."""
        row = Row(fault, stage)
        store = self.store(*stages)
        try:
            yield row, store
        except Exception as error:
            row.problems.append(repr(error))
        self.done(row)

    def chain(self, fault: str, strike: Callable[[Row, Store, str], None], rounds: int, mount: bool = False) -> None:
        """In each round the runs on one store meet the fault once in every stage; then one goes on to the end."""
        rows = {stage: Row(fault, stage, times=0) for stage in STAGES}
        for _ in range(rounds):
            store = self.store()
            last = Row("", "")
            with mounted("-t", "tmpfs", "-o", "size=64m", "none", store.folder) if mount else nullcontext():
                for stage, row in rows.items():
                    try:
                        strike(row, store, stage)
                    except Exception as error:
                        row.problems.append(repr(error))
                    row.times += 1
                    row.check(store)
                self.rerun(last, store)
            for stage, row in rows.items():
                row.rerun = last.rerun
                row.problems += [p for p in last.problems if p.startswith(stage) or not p.startswith(tuple(rows))]
        for row in rows.values():
            self.done(row)

    def done(self, row: Row) -> None:
        """Print a row, and count it if it failed."""
        row.print()
        self.failed += bool(row.problems)


@contextmanager
def mounted(*arguments: str | Path) -> Iterator[None]:
    """A mount for a while; the last argument is its place."""
    subprocess.run(["mount", *arguments], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", arguments[-1]], check=True)
