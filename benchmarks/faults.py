"""Real faults on a small run of the demo: what is left, what is reported, and whether a rerun makes the same files.

kill      kill -9 of the whole process group, at random moments of every stage
parent    kill -9 of the command alone, whose workers must notice
disk      something else fills the disk (a tmpfs) when a stage begins
readonly  a store that can't be written, complete or without a stage
several   two and four runs at once on overlapping keys; then four, of which one is killed
copy      a store that was copied or moved, and lacks a stage; a copy of what a killed run left
flip      a flipped byte in an artifact of every stage, and then what the message says is done
cut       a file of an artifact of every stage lacks its end
server    the Prefect server is killed, or hangs, while a run trains
hosted    runs of `make up` are cancelled or killed, or lose server and worker; `make down` ends one
gc        `cram gc --yes` is killed at random moments

After each: every artifact in the store has all its files with their digests, and none is lost; no process is left; the
last line says what happened, without a traceback; a rerun ends with the files of an undisturbed run.
Prints a table in Markdown. The exit status is 1 if a row fails.
"""

import argparse
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import UUID

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # cram of this checkout
from trials import (
    ENV,
    HOME,
    LAST,
    MANIFEST,
    OTHER,
    OVERRIDE,
    STAGES,
    Bench,
    Row,
    Run,
    Store,
    before,
    mounted,
    processes,
    wait,
)

from flows.cli.main import app
from model import limits
from tasks.store.manifests import FOR_READERS

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient

MOUNTS = "CRAM_FAULTS_MOUNTS"  # in the environment where this script may mount
DELETE = re.compile(r"delete (\S+) and run its stage again")  # in messages about damaged artifacts


# What is possible here


def is_possible(fault: str, condition: bool, lacking: str) -> bool:
    """The condition; if it isn't met, a row says so."""
    if not condition:
        Row(fault, "–", 0).print(f"skipped: {lacking}")
    return condition


def may_mount(fault: str) -> bool:
    """Whether this script may mount file systems."""
    return is_possible(fault, MOUNTS in os.environ, "no right to mount")


def exists(fault: str, command: str) -> bool:
    """Whether cram has this command."""
    commands = [each.callback.__name__ for each in app.registered_commands if each.callback]
    return is_possible(fault, command in commands, f"there is no `cram {command}`")


# Runs that are killed, or that the system refuses something


def kill(bench: Bench, group: bool = True) -> None:
    """At a random moment after the stage has begun; some come when it has just ended."""

    def strike(row: Row, store: Store, stage: str) -> None:
        run = Run(store).until(store.has_begun, stage)
        bench.moment(stage)
        run.kill(group)
        row.within += any(store.folder.glob(f".partial/{stage}-*"))

    if group:
        bench.chain("kill -9 of the process group", strike, bench.rounds)
    else:
        bench.chain("kill -9 of the command alone", strike, 1)


def disk(bench: Bench) -> None:
    """When the stage takes its lock, less is left than its artifact needs."""

    def has_lock(store: Store, stage: str) -> bool:
        return any(store.folder.glob(f".locks/{stage}-*"))

    def strike(row: Row, store: Store, stage: str) -> None:
        left = bench.random.randrange(own_bytes(bench.reference, stage))
        previous = [*before(stage), stage][-2:][0]
        run = Run(store, "--until", stage).until(store.has_begun, previous)
        while run.pause(0.005) and not has_lock(store, stage):
            pass
        ballast = store.folder / ".ballast"
        fill_disk(ballast, left)
        run.signal(signal.SIGCONT)
        row.hear(run.end())
        ballast.unlink()

    if may_mount("full disk"):
        bench.chain("full disk", strike, 1, mount=True)


def own_bytes(store: Store, stage: str) -> int:
    """The bytes of a stage's files that no other artifact shares."""
    total = 0
    for path in store.artifacts(stage).values():
        for file in path.iterdir():
            about = file.stat()
            if about.st_nlink == 1:
                total += about.st_size
    return total


def fill_disk(ballast: Path, left: int) -> None:
    """Write a file that leaves so many bytes of its file system."""
    about = os.statvfs(ballast.parent)
    with ballast.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, about.f_bavail * about.f_frsize - left)


def readonly(bench: Bench) -> None:
    """The store's file system is mounted read-only."""
    if not may_mount("read-only store"):
        return
    for stage in dict.fromkeys([None, *bench.stages[:1], *bench.stages[-3:]]):
        kept = before(stage) if stage else STAGES
        until = stage or LAST
        with bench.case("read-only store", f"without {stage}" if stage else "complete", *kept) as (row, store):
            with mounted("--bind", store.folder, store.folder):
                subprocess.run(["mount", "-o", "remount,bind,ro", store.folder], check=True)
                row.hear(Run(store, "--until", until).end(), code=1 if stage else 0)
            bench.rerun(row, store, until)


def several(bench: Bench) -> None:
    """Of four, two have another seed, and the first may be killed at a random moment."""
    for count, is_killed in ((2, False), (4, False), (4, True)):
        fault = f"{count} runs at once" + (", one killed" if is_killed else "")
        with bench.case(fault, "all") as (row, store):
            runs = []
            for number in range(count):
                is_other = count > 2 and number % 2 == 1
                runs.append(Run(store, *(OTHER if is_other else ())))
            if is_killed:
                time.sleep(bench.random.uniform(3, 3 + sum(bench.seconds.values())))
                runs.pop(0).kill()
            for run in runs:
                row.hear(run.end(), code=0)
            bench.rerun(row, store)
            if count > 2 and store.contents() != bench.all:
                row.problems.append("an artifact is missing")


# Stores that are copied or damaged


def copy(bench: Bench) -> None:
    """Of a copy without a random stage, only this stage is rebuilt."""
    for command in ("cp -r", "cp -a", "cp -rL", "mv"):
        gone = bench.random.choice(STAGES)
        with bench.case(f"`{command}` of a store", f"without {gone}", *STAGES) as (row, old):
            new = copy_store(bench, old, *command.split())
            row.problems += new.problems()
            if new.seen != old.seen:
                row.problems.append("not all was copied")
            shutil.rmtree(new.folder / gone)
            left = inodes(new)
            new.seen = set(left)
            bench.rerun(row, new)
            now = inodes(new)
            if any(now.get(name) != inode for name, inode in left.items()):
                row.problems.append("another artifact was rebuilt")
    copy_killed(bench)


def copy_killed(bench: Bench) -> None:
    """A run on a copy of what a killed one left makes the same."""
    with bench.case("`cp -r` of what kill -9 left", "pretrain", *before("pretrain")) as (row, old):
        run = Run(old).until(old.has_begun, "pretrain")
        bench.moment("pretrain")
        run.kill()
        new = copy_store(bench, old, "cp", "-r")
        shutil.rmtree(old.folder)
        bench.rerun(row, new)


def copy_store(bench: Bench, store: Store, *command: str) -> Store:
    """Copy or move a store by a command of the system."""
    copied = Store(bench.store().folder / "store")
    subprocess.run([*command, store.folder, copied.folder], check=True)
    return copied


def inodes(store: Store) -> dict[str, int]:
    """The inodes of the artifacts, which change when these are rebuilt."""
    return {name: path.stat().st_ino for name, path in store.artifacts().items()}


def some_file(bench: Bench, store: Store, stage: str) -> Path:
    """A random file of a stage's artifacts, not empty, not the manifest, and not one that no stage reads."""
    files = []
    for path in store.artifacts(stage).values():
        for file in sorted(path.iterdir()):
            if file.name != MANIFEST and not FOR_READERS.fullmatch(file.name) and file.stat().st_size:
                files.append(file)
    return bench.random.choice(files)


def flip(bench: Bench) -> None:
    """The next stage must refuse to read it, or `cram verify` the last; a rerun works when what is named is deleted."""
    for stage in bench.stages:
        if stage == LAST and not exists("flipped byte", "verify"):
            continue
        with bench.case("flipped byte", stage, *before(stage), stage) as (row, store):
            path = some_file(bench, store, stage)
            flip_bit(bench.random, path)
            after = [*STAGES, LAST][STAGES.index(stage) + 1]
            if stage == LAST:
                verify_finds(row, store, path)
                shutil.rmtree(path.parent)
                run = Run(store).end()
            else:
                run = Run(store, "--until", after).end()
                row.hear(run)
            deleted = DELETE.search(run.text)
            while deleted:
                shutil.rmtree(deleted[1])
                run = Run(store, "--until", after).end()
                deleted = DELETE.search(run.text)
            bench.compare(row, store, run, after)


def flip_bit(chance: random.Random, path: Path) -> None:
    """Flip a random bit of a file."""
    content = bytearray(path.read_bytes())
    content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    path.write_bytes(content)


def verify_finds(row: Row, store: Store, path: Path) -> None:
    """Note whether `cram verify` names a file."""
    run = Run(store, command=("verify", path.parent.parent.name)).end()
    lines = [line for line in run.text.splitlines() if path.name in line]
    row.said = lines[0] if lines else "nothing"
    if run.code != 1 or not lines:
        row.problems.append(f"not found: {run.text}")


def cut(bench: Bench) -> None:
    """The artifact is rebuilt, with a warning."""
    for stage in bench.stages:
        with bench.case("truncated file", stage, *before(stage), stage) as (row, store):
            path = some_file(bench, store, stage)
            os.truncate(path, bench.random.randrange(path.stat().st_size))
            run = Run(store, "--until", stage).end()
            row.hear(run, code=0)
            name = f"{stage}/{path.parent.name}"
            warnings = [line for line in run.text.splitlines() if f"{name} is damaged" in line]
            if warnings:
                row.said = warnings[0][9:]  # without the time
            else:
                row.said = ""
                row.problems.append("no warning")
            bench.compare(row, store, run, stage)


# Prefect's server and worker


@contextmanager
def served(home: Path, **settings: str) -> Iterator[tuple[int, str]]:
    """What `make up` starts: the server's process group, and its address."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"http://127.0.0.1:{free.getsockname()[1]}/api"
    env = ENV | settings | {"PREFECT_HOME": str(home), "PREFECT_API_URL": url, "CRAM_PYTHON": sys.executable}
    try:
        prefect_script(env, "up")
        yield pid_of(home, "server"), url
    finally:
        prefect_script(env, "down")


def prefect_script(env: dict[str, str], command: str) -> str:
    """What `make up` or `make down` prints."""
    script = HOME / "flows" / "prefect.sh"
    return subprocess.run([script, command], env=env, stdout=subprocess.PIPE, check=True, text=True).stdout


def pid_of(home: Path, service: str) -> int:
    """The process of the server or the worker that `make up` started."""
    return int((home / f"{service}.pid").read_text(encoding="utf-8"))


def server(bench: Bench) -> None:
    """The stage that trains must end and be published; then Prefect may give up."""
    for number, fault in ((signal.SIGKILL, "server killed"), (signal.SIGSTOP, "server hangs")):
        with bench.case(fault, "pretrain", *before("pretrain")) as (row, store):
            with served(bench.store().folder) as (group, url):
                run = Run(store, PREFECT_API_URL=url).until(store.has_begun, "pretrain")
                bench.moment("pretrain")
                os.killpg(group, number)
                row.hear(run.end(), code=min(run.code, 1))
            if not store.artifacts("pretrain"):
                row.problems.append("pretrain was not published")
            bench.rerun(row, store)


class Hosted:
    """The deployment of `make up` with its own store, and the training of the run that is in progress."""

    def __init__(self, client: "SyncPrefectClient", home: Path, store: Store, url: str) -> None:
        self.client = client
        self.home = home
        self.store = store
        self.env = ENV | {"PREFECT_HOME": str(home), "PREFECT_API_URL": url, "CRAM_PYTHON": sys.executable}
        self.env |= {"CRAM_ARTIFACTS": str(store.folder)}

    def begin(self) -> UUID:
        """Submit a run that pretrains for an hour."""
        override = json.loads(json.dumps(OVERRIDE))
        override["pretrain"] |= {"budget": 1, "budget_unit": "hours"}
        deployment = self.client.read_deployment_by_name("cram/full").id
        parameters = {"recipe": "demo", "override": override, "until": "pretrain"}
        return self.client.create_flow_run_from_deployment(deployment, parameters=parameters).id

    def state(self, run: UUID) -> str:
        """The state of a run, such as `Running`."""
        state = self.client.read_flow_run(run).state
        return state.type.value if state else ""

    def wait_for(self, run: UUID, state: str) -> None:
        """Wait until a run is in this state."""
        wait(lambda: self.state(run) == state, f"a run that is {state}", pause=0.1)

    def work(self) -> Path | None:
        """The folder of a training that has written steps."""
        for metrics in self.store.folder.glob(".partial/pretrain-*/work/metrics.jsonl"):
            if metrics.stat().st_size:
                return metrics.parent
        return None

    def steps(self) -> list[int]:
        """The numbers of the training's steps in its metrics."""
        work = self.work()
        lines = (work / "metrics.jsonl").read_text(encoding="utf-8").splitlines(keepends=True) if work else []
        return [json.loads(line)["step"] for line in lines if line.endswith("\n")]

    def trains_on(self) -> None:
        """Wait for further steps."""
        done = len(self.steps())
        wait(lambda: len(self.steps()) > done, "further steps", pause=0.1)

    def checkpoint(self) -> float:
        """When the training's checkpoint was written; 0 if there is none."""
        work = self.work()
        path = work / "checkpoint.safetensors" if work else None
        return path.stat().st_mtime if path and path.exists() else 0.0


def hosted(bench: Bench) -> None:
    """Each of these runs pretrains for an hour; the next one continues where it stopped."""
    for fault, strike in (
        ("a deployed run is cancelled", cancel),
        ("deployed runs are killed", kill_deployed),
        ("server and worker of a run are killed", lose_services),
    ):
        with bench.case(fault, "pretrain", *before("pretrain")) as (row, store):
            home = bench.store().folder
            with served(home, CRAM_ARTIFACTS=str(store.folder)) as (_, url):
                from prefect.client.orchestration import SyncPrefectClient

                with SyncPrefectClient(api=url) as client:
                    strike(row, Hosted(client, home, store, url))
            if store.artifacts("pretrain"):
                row.problems.append("an unfinished stage was published")
            row.check(store)


def cancel(row: Row, at: Hosted) -> None:
    """The run must write its checkpoint; meanwhile, another run waits, and then continues."""
    from prefect.states import Cancelling

    run = at.begin()
    at.trains_on()
    waiting = at.begin()
    at.trains_on()
    if at.state(waiting) not in ("SCHEDULED", "PENDING"):
        row.problems.append("two runs train at once")
    at.client.set_flow_run_state(run, Cancelling())
    at.wait_for(run, "CANCELLED")
    if not at.checkpoint():
        row.problems.append("no checkpoint")
    at.wait_for(waiting, "RUNNING")
    at.trains_on()
    check_steps(row, at)


def kill_deployed(row: Row, at: Hosted) -> None:
    """The worker must notice, and the next run continue."""
    for _ in range(2):
        run = at.begin()
        at.wait_for(run, "RUNNING")
        at.trains_on()
        check_steps(row, at)
        pid = at.client.read_flow_run(run).infrastructure_pid or ""
        os.kill(int(pid), signal.SIGKILL)
        at.wait_for(run, "CRASHED")


def lose_services(row: Row, at: Hosted) -> None:
    """The run must train on; `make down` must end it with a checkpoint, and after `make up` the next one continue."""
    at.begin()
    at.trains_on()
    for service in ("server", "worker"):
        os.kill(pid_of(at.home, service), signal.SIGKILL)
        at.trains_on()
    start = time.time()
    if "Run: stopped" not in prefect_script(at.env, "down"):
        row.problems.append("`make down` left the run")
    if at.checkpoint() < start:
        row.problems.append("no checkpoint by `make down`")
    prefect_script(at.env, "up")
    run = at.begin()
    at.trains_on()
    check_steps(row, at)
    at.wait_for(run, "RUNNING")


def check_steps(row: Row, at: Hosted) -> None:
    """Note if the steps in the metrics aren't those of one training that went on."""
    steps = at.steps()
    if steps != list(range(1, len(steps) + 1)):
        row.problems.append("the steps are not consecutive")


# Garbage collection


def gc(bench: Bench) -> None:
    """At random moments of the command, and right after the first change. Another one and reruns follow some kills."""
    if not exists("`cram gc` killed", "gc"):
        return
    for options in ("--keep 1 --models", "--keep 1 --models --hollow"):
        command = ("gc", *options.split(), "--yes")
        with bench.case(f"kill -9 of `cram {' '.join(command)}`", "all") as (row, _):
            seconds = 0.0  # of an undisturbed command
            for row.times in range(2 * bench.rounds + 1):
                store = bench.store()
                start = time.monotonic()
                subprocess.run(["cp", "-a", f"{bench.both.folder}/.", store.folder], check=True)
                run = Run(store, command=command)
                if row.times == 0:
                    row.hear(run.end(), code=0)
                    seconds = time.monotonic() - start
                elif row.times % 2:
                    time.sleep(bench.random.uniform(0, seconds))
                else:
                    run.until(has_changed, store, files_in(store))
                    time.sleep(bench.random.uniform(0, 0.02))
                run.kill()
                row.within += not run.text
                row.check(store)
                if row.times % 4 == 0:
                    collect_again(bench, row, store, command)


def files_in(store: Store) -> list[Path]:
    """The files of artifacts, and of drafts, in which a manifest is replaced."""
    return [*store.folder.glob("[!.]*/*/*"), *store.folder.glob(".partial/*/*")]


def has_changed(store: Store, files: list[Path]) -> bool:
    """Whether a store has other files than these."""
    return files_in(store) != files


def collect_again(bench: Bench, row: Row, store: Store, command: tuple[str, ...]) -> None:
    """Run the command to its end, and then both runs, of which one needs what is gone."""
    store.seen = set()
    row.hear(Run(store, command=command).end(), code=0)
    bench.rerun(row, store)
    bench.rerun(row, store, LAST, *OTHER)


# The command


def own_mounts() -> None:
    """Start this script again where it may mount, if the system allows that; nobody else sees these mounts."""
    if MOUNTS in os.environ or not shutil.which("unshare"):
        return
    command = ["unshare", "--mount"]
    if os.geteuid() != 0:
        command.append("--map-root-user")
    trial = ["mount", "-t", "tmpfs", "none", "/mnt"]
    os.environ[MOUNTS] = "1"
    if subprocess.run([*command, *trial], stderr=subprocess.DEVNULL).returncode == 0:
        os.execvp("unshare", [*command, sys.executable, *sys.argv])
    del os.environ[MOUNTS]


FAULTS: dict[str, Callable[[Bench], None]] = {
    "kill": kill,
    "parent": partial(kill, group=False),
    "disk": disk,
    "readonly": readonly,
    "several": several,
    "copy": copy,
    "flip": flip,
    "cut": cut,
    "server": server,
    "hosted": hosted,
    "gc": gc,
}
QUICK = ["kill", "disk", "readonly", "flip", "cut"]


def main() -> None:
    """Print a table; exit status 1 if a row fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6), help="of the random moments")
    parser.add_argument("--quick", action="store_true", help="some faults, some in two stages only: four minutes")
    parser.add_argument("--only", nargs="+", choices=list(FAULTS), help="these faults")
    given = parser.parse_args()
    names = given.only or (QUICK if given.quick else list(FAULTS))
    own_mounts()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("Stopped"))
    start = time.monotonic()
    failed = run_faults(names, given.seed, given.quick)
    print(f"\n{failed} rows failed, {(time.monotonic() - start) / 60:.0f} minutes")
    sys.exit(failed > 0)


def run_faults(names: list[str], seed: int, quick: bool) -> int:
    """Print a row for each fault; the number of rows that failed."""
    print(f"Seed {seed}, {limits.cores()} cores\n", flush=True)
    with tempfile.TemporaryDirectory(prefix="cram-faults-") as folder:
        try:
            bench = Bench(Path(folder), quick)
            print("| fault | stage | times | rerun | what was said | verdict |\n|---|---|---|---|---|---|", flush=True)
            for name in names:
                bench.random.seed(f"{seed} {name}")  # so that --only has the same moments
                FAULTS[name](bench)
        finally:  # also if this script fails
            for pid in processes():
                with suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
    return bench.failed


if __name__ == "__main__":
    main()
