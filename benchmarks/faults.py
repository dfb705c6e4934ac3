"""Faults, for real, on a small run of the demo: what is left, what is said, and whether a rerun makes the same files.

kill      kill -9 of the whole process group, at random moments of every stage
parent    kill -9 of the command alone, whose workers must notice
disk      something else fills the disk (a tmpfs) when a stage begins
readonly  a store that can't be written, complete or without a stage
several   two and four runs at once on overlapping keys; then four, of which one is killed
copy      a store that was copied or moved, and lacks a stage; a copy of what a killed run left
flip      a flipped byte in an artifact of every stage, and then what the message says is done
cut       a file of an artifact of every stage lacks its end
server    the Prefect server is killed, or hangs, while a run trains
gc        `cram gc --yes` is killed at random moments

After each: every artifact in the store has all its files with their digests, and none is lost; no process is left; the
last line says what happened, without a traceback; a rerun ends with the files of an undisturbed run.
Prints a table in Markdown. The exit status is 1 if a row fails.
"""

import argparse
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
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # cram of this checkout
from trials import ENV, HOME, LAST, MANIFEST, OTHER, STAGES, Bench, Row, Run, Store, before, mounted, processes

from flows.cli.main import app
from model import limits
from tasks.store.manifests import FOR_READERS

MOUNTS = "CRAM_FAULTS_MOUNTS"  # in the environment where this script may mount


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


def kill(bench: Bench, group: bool = True) -> None:
    """At a random moment after the stage has begun; some come when it has just ended."""

    def strike(row: Row, store: Store, stage: str) -> None:
        run = Run(store).until(store.has_begun, stage)
        bench.moment(stage)
        run.kill(group)
        row.within += any(store.folder.glob(f".partial/{stage}-*"))

    whose, rounds = ("the process group", bench.rounds) if group else ("the command alone", 1)
    bench.chain(f"kill -9 of {whose}", strike, rounds)


def disk(bench: Bench) -> None:
    """When the stage takes its lock, less is left than its artifact needs."""

    def has_lock(store: Store, stage: str) -> bool:
        return any(store.folder.glob(f".locks/{stage}-*"))

    def strike(row: Row, store: Store, stage: str) -> None:
        files = [file.stat() for path in bench.reference.artifacts(stage).values() for file in path.iterdir()]
        left = bench.random.randrange(sum(about.st_size for about in files if about.st_nlink == 1))
        run = Run(store, "--until", stage).until(store.has_begun, [*before(stage), stage][-2:][0])
        while run.pause(0.005) and not has_lock(store, stage):
            pass
        about = os.statvfs(store.folder)
        with (ballast := store.folder / ".ballast").open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, about.f_bavail * about.f_frsize - left)
        run.signal(signal.SIGCONT)
        row.hear(run.end())
        ballast.unlink()

    if may_mount("full disk"):
        bench.chain("full disk", strike, 1, mount=True)


def readonly(bench: Bench) -> None:
    """The store's file system is mounted read-only."""
    for stage in dict.fromkeys([None, *bench.stages[:1], *bench.stages[-3:]]) if may_mount("read-only store") else ():
        has, until = before(stage) if stage else STAGES, stage or LAST
        with bench.case("read-only store", f"without {stage}" if stage else "complete", *has) as (row, store):
            with mounted("--bind", store.folder, store.folder):
                subprocess.run(["mount", "-o", "remount,bind,ro", store.folder], check=True)
                row.hear(Run(store, "--until", until).end(), code=1 if stage else 0)
            bench.rerun(row, store, until)


def several(bench: Bench) -> None:
    """Of four, two have another seed, and the first may be killed at a random moment."""
    for count, is_killed in ((2, False), (4, False), (4, True)):
        with bench.case(f"{count} runs at once{', one killed' * is_killed}", "all") as (row, store):
            runs = [Run(store, *OTHER * (i % 2 if count > 2 else 0)) for i in range(count)]
            if is_killed:
                time.sleep(bench.random.uniform(3, 3 + sum(bench.seconds.values())))
                runs.pop(0).kill()
            for run in runs:
                row.hear(run.end(), code=0)
            bench.rerun(row, store)
            row.problems += ["an artifact is missing"] * (count > 2 and store.contents() != bench.all)


def copy(bench: Bench) -> None:
    """Of a copy without a random stage, only this stage is made again."""
    for command in ("cp -r", "cp -a", "cp -rL", "mv"):
        gone = bench.random.choice(STAGES)
        with bench.case(f"`{command}` of a store", f"without {gone}", *STAGES) as (row, old):
            new = Store(bench.store().folder / "store")
            subprocess.run([*command.split(), old.folder, new.folder], check=True)
            row.problems += new.problems() + ["not all was copied"] * (new.seen != old.seen)
            shutil.rmtree(new.folder / gone)
            made = {name: path.stat().st_ino for name, path in new.artifacts().items()}
            new.seen = set(made)
            bench.rerun(row, new)
            now = {name: path.stat().st_ino for name, path in new.artifacts().items() if name in made}
            row.problems += ["another was made again"] * (now != made)
    with bench.case("`cp -r` of what kill -9 left", "pretrain", *before("pretrain")) as (row, old):
        run = Run(old).until(old.has_begun, "pretrain")
        bench.moment("pretrain")
        run.kill()
        new = Store(bench.store().folder / "store")
        subprocess.run(["cp", "-r", old.folder, new.folder], check=True)
        shutil.rmtree(old.folder)
        bench.rerun(row, new)


def some_file(bench: Bench, store: Store, stage: str) -> Path:
    """A random file of a stage's artifacts, not empty, not the manifest, and not one that no stage reads."""
    files = [file for path in store.artifacts(stage).values() for file in sorted(path.iterdir())]
    files = [file for file in files if file.name != MANIFEST and not FOR_READERS.fullmatch(file.name)]
    return bench.random.choice([file for file in files if file.stat().st_size])


def flip(bench: Bench) -> None:
    """The next stage must refuse to read it, or `cram verify` the last; a rerun works when what is named is deleted."""
    for stage in bench.stages:
        if stage == LAST and not exists("flipped byte", "verify"):
            continue
        with bench.case("flipped byte", stage, *before(stage), stage) as (row, store):
            path, after = some_file(bench, store, stage), [*STAGES, LAST][STAGES.index(stage) + 1]
            content = bytearray(path.read_bytes())
            content[bench.random.randrange(len(content))] ^= 1 << bench.random.randrange(8)
            path.write_bytes(content)
            if stage == LAST:
                run = Run(store, command=("verify", stage)).end()
                row.said = next((line for line in run.text.splitlines() if path.name in line), "nothing")
                row.problems += [f"not found: {run.text}"] * (run.code != 1 or row.said == "nothing")
                shutil.rmtree(path.parent)
                run = Run(store).end()
            else:
                row.hear(run := Run(store, "--until", after).end())
            while deleted := re.search(r"delete (\S+) and run its stage again", run.text):
                shutil.rmtree(deleted[1])
                run = Run(store, "--until", after).end()
            bench.compare(row, store, run, after)


def cut(bench: Bench) -> None:
    """The artifact is made again, with a warning."""
    for stage in bench.stages:
        with bench.case("truncated file", stage, *before(stage), stage) as (row, store):
            path = some_file(bench, store, stage)
            os.truncate(path, bench.random.randrange(path.stat().st_size))
            row.hear(run := Run(store, "--until", stage).end(), code=0)
            warned = [line for line in run.text.splitlines() if f"{stage}/{path.parent.name} is damaged" in line]
            row.said = "".join(warned[:1])[9:]  # without the time
            row.problems += ["no warning"] * (not warned)
            bench.compare(row, store, run, stage)


@contextmanager
def served(home: Path) -> Iterator[tuple[int, str]]:
    """What `make up` starts: the server's process group, and its address."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"http://127.0.0.1:{free.getsockname()[1]}/api"
    env = ENV | {"PREFECT_HOME": str(home), "PREFECT_API_URL": url, "CRAM_PYTHON": sys.executable}
    script = partial(subprocess.run, env=env, stdout=subprocess.DEVNULL, check=True)
    try:
        script([HOME / "flows" / "prefect.sh", "up"])
        yield int((home / "server.pid").read_text(encoding="utf-8")), url
    finally:
        script([HOME / "flows" / "prefect.sh", "down"])


def server(bench: Bench) -> None:
    """The stage that trains must end and be published; then Prefect may give up."""
    for number, fault in ((signal.SIGKILL, "server killed"), (signal.SIGSTOP, "server hangs")):
        with bench.case(fault, "pretrain", *before("pretrain")) as (row, store):
            with served(bench.store().folder) as (group, url):
                run = Run(store, PREFECT_API_URL=url).until(store.has_begun, "pretrain")
                bench.moment("pretrain")
                os.killpg(group, number)
                row.hear(run.end(), code=min(run.code, 1))
            row.problems += ["pretrain was not published"] * (not store.artifacts("pretrain"))
            bench.rerun(row, store)


def gc(bench: Bench) -> None:
    """At random moments of the command, and right after the first change. Another one and reruns follow some kills."""

    def state(store: Store) -> list[Path]:
        files = list(store.folder.glob("[!.]*/*/*"))
        return files + list(store.folder.glob(".partial/*/*"))  # in which a manifest is replaced

    options = ("--keep 1 --models", "--keep 1 --models --hollow") if exists("`cram gc` killed", "gc") else ()
    for command in (("gc", *each.split(), "--yes") for each in options):
        seconds = 0.0
        with bench.case(f"kill -9 of `cram {' '.join(command)}`", "all") as (row, _):
            for row.times in range(2 * bench.rounds + 1):
                store, start = bench.store(), time.monotonic()
                subprocess.run(["cp", "-a", f"{bench.both.folder}/.", store.folder], check=True)
                run, whole = Run(store, command=command), state(store)
                if row.times == 0:  # undisturbed
                    row.hear(run.end(), code=0)
                    seconds = time.monotonic() - start
                elif row.times % 2:
                    time.sleep(bench.random.uniform(0, seconds))
                else:
                    run.until(lambda store, whole: state(store) != whole, store, whole)
                    time.sleep(bench.random.uniform(0, 0.02))
                run.kill()
                row.within += not run.text
                row.check(store)
                if row.times % 4 == 0:
                    store.seen = set()
                    row.hear(Run(store, command=command).end(), code=0)
                    bench.rerun(row, store)
                    bench.rerun(row, store, LAST, *OTHER)


def own_mounts() -> None:
    """Start this script again where it may mount, if the system allows that; nobody else sees these mounts."""
    command = ["unshare", "--mount", *["--map-root-user"] * (os.geteuid() != 0)]
    trial = ["mount", "-t", "tmpfs", "none", "/mnt"]
    if MOUNTS not in os.environ and shutil.which("unshare"):
        os.environ[MOUNTS] = "1"
        if subprocess.run([*command, *trial], stderr=subprocess.DEVNULL).returncode == 0:
            os.execvp("unshare", [*command, sys.executable, *sys.argv])
        del os.environ[MOUNTS]


FAULTS = {
    "kill": kill, "parent": partial(kill, group=False), "disk": disk, "readonly": readonly, "several": several,
    "copy": copy, "flip": flip, "cut": cut, "server": server, "gc": gc,
}  # fmt: skip
QUICK = ("kill", "disk", "readonly", "flip", "cut")


def main() -> None:
    """Print a table; exit status 1 if a row fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6), help="of the random moments")
    parser.add_argument("--quick", action="store_true", help="some faults, some in two stages only: four minutes")
    parser.add_argument("--only", nargs="+", choices=list(FAULTS), help="these faults")
    given = parser.parse_args()
    own_mounts()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("Stopped"))
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="cram-faults-") as folder:
        try:
            print(f"Seed {given.seed}, {limits.cores()} cores\n", flush=True)
            bench = Bench(Path(folder), given.quick)
            print("| fault | stage | times | rerun | what was said | verdict |\n|---|---|---|---|---|---|", flush=True)
            for name in given.only or (QUICK if given.quick else FAULTS):
                bench.random.seed(f"{given.seed} {name}")  # so that --only has the same moments
                FAULTS[name](bench)
        finally:  # also if this script fails
            for pid in processes():
                with suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
    print(f"\n{bench.failed} rows failed, {(time.monotonic() - start) / 60:.0f} minutes")
    sys.exit(bool(bench.failed))


if __name__ == "__main__":
    main()
