"""Several processes that train one model. Each of them is: python -m model.distributed JOB.json FOLDER

The job names the corpus's files and says what to train. The first process leaves checkpoint and metrics in the job's
folder, from where the run that started them goes on. The processes find each other through a file in FOLDER, which only
their user may enter.
"""

import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from model import InputError, machine, processes
from model.checkpoint import last_row, line
from model.job import Job
from model.pretraining import Pretraining

PROBLEM = "problem.json"  # what ended the run, for the process that started it
MEETING = "meeting"  # the file through which the processes find each other
STOP_SECONDS = 300  # in which a stopped run writes its checkpoint
JOB, TOLD = "job.json", "processes.log"  # the input of the processes, and their output
POLL_SECONDS = 1.0  # between looks at the progress of several processes
LAST_WORDS_SECONDS = 10.0  # until the other processes are killed when one has ended with an error


def train(job: Job, count: int, report: Callable[[float, str], None]) -> None:
    """Train with `count` processes on this machine until the budget is spent; leaves their checkpoint in the job's folder."""
    work = job.folder
    (work / JOB).write_text(job.model_dump_json())
    with tempfile.TemporaryDirectory(prefix="cram-") as folder, (work / TOLD).open("w") as told:
        command = [sys.executable, "-m", "model.distributed", str(work / JOB), folder]
        started: list[subprocess.Popen] = []
        try:
            for rank in range(count):
                about = {"env": processes.environment(rank, count), "stdout": told, "stderr": told}
                # in a session of its own: Ctrl-C reaches this process alone, which stops all of them at the same step
                started.append(subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True, **about))
            while None in [process.poll() for process in started]:
                if any(process.returncode for process in started):  # the others would wait for it
                    end(started, LAST_WORDS_SECONDS)
                elif row := last_row(work):
                    report(row["fraction"], line(row))
                time.sleep(POLL_SECONDS)
        finally:
            end(started, STOP_SECONDS)
        if (problem := Path(folder, PROBLEM)).exists():
            raise InputError(json.loads(problem.read_text()))
    if any(process.returncode for process in started):
        raise RuntimeError(f"One of {count} processes ended with an error:\n{(work / TOLD).read_text()}")


def end(processes: list[subprocess.Popen], seconds: float) -> None:
    """Ask processes to stop, which they do with a checkpoint; kill those that are still there after so many seconds."""
    for process in processes:
        if process.poll() is None:
            process.terminate()
    deadline = time.monotonic() + seconds
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdin.close()


def stop_with_parent(runs: list[Pretraining]) -> None:
    """End this process when the one that started it, and holds its stdin open, is gone.

    A run in `runs` writes a checkpoint first. If `runs` is empty, training has not begun and nothing is lost.
    """
    while os.read(0, 1):
        pass
    if runs:
        runs[0].stopping = True
        time.sleep(STOP_SECONDS)
    os._exit(1)  # the main thread may be waiting for a process that is gone too


def main() -> None:
    """Train as one of several processes. SIGTERM, which their parent sends to all, ends the run with a checkpoint."""
    job, folder = Job.model_validate_json(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    runs: list[Pretraining] = []  # holds this process's run once its model is built
    threading.Thread(target=stop_with_parent, args=(runs,), daemon=True).start()
    here = machine.detect()
    among = processes.join(here.device, folder / MEETING)
    logging.basicConfig(level=logging.INFO if among.first else logging.ERROR, format="%(message)s")
    try:
        run = job.pretraining(here, among)

        def stop(*_: object) -> None:
            run.stopping = True

        signal.signal(signal.SIGTERM, stop)
        runs.append(run)
        run.run(lambda fraction, note: None)
        among.wait()  # or the first to end closes connections that others still read from
    except InputError as problem:
        own = folder / f"{PROBLEM}.{among.rank}"
        own.write_text(json.dumps(str(problem)))
        own.replace(folder / PROBLEM)
        raise SystemExit(2) from problem
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
    logging.shutdown()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads outlive its groups, and one that wants Python's lock while it ends aborts the process
