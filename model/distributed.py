"""Several processes that train one model. Each of them is started as: python -m model.distributed JOB.json FOLDER

The job says what to train on which files. The first process writes checkpoint and metrics to the job's folder, from
where the run that started the processes continues. They find each other through a file in FOLDER, which only their user
may enter.
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

PROBLEM = "problem.json"  # the user error that ended the run, for the process that started it
MEETING = "meeting"  # the file through which the processes find each other
JOB, OUTPUT = "job.json", "processes.log"  # of all processes
STOP_SECONDS = 300  # for a stopped run to write its checkpoint
POLL_SECONDS = 1.0  # between two looks at the progress
ERROR_SECONDS = 10.0  # until the other processes are killed when one has ended with an error


def train(job: Job, count: int, report: Callable[[float, str], None]) -> None:
    """Train with `count` processes on this machine until the budget is spent, with a checkpoint in the job's folder."""
    work = job.folder
    (work / JOB).write_text(job.model_dump_json())
    with tempfile.TemporaryDirectory(prefix="cram-") as folder, (work / OUTPUT).open("w") as output:
        command = [sys.executable, "-m", "model.distributed", str(work / JOB), folder]
        started: list[subprocess.Popen] = []
        try:
            for rank in range(count):
                settings = {"env": processes.environment(rank, count), "stdout": output, "stderr": output}
                # a new session: Ctrl-C reaches this process only, which stops all of them at the same step
                started.append(subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True, **settings))
            while None in [process.poll() for process in started]:
                if any(process.returncode for process in started):  # the others would wait for it
                    end(started, ERROR_SECONDS)
                elif row := last_row(work):
                    report(row["fraction"], line(row))
                time.sleep(POLL_SECONDS)
        finally:
            end(started, STOP_SECONDS)
        if (problem := Path(folder, PROBLEM)).exists():
            raise InputError(json.loads(problem.read_text()))
    if any(process.returncode for process in started):
        raise RuntimeError(f"One of {count} processes ended with an error:\n{(work / OUTPUT).read_text()}")


def end(processes: list[subprocess.Popen], seconds: float) -> None:
    """Stop processes, which write a checkpoint; kill those that still run after so many seconds."""
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
    """End this process when its parent, which holds its stdin open, is gone.

    A run in `runs` writes a checkpoint first. If `runs` is empty, training has not begun.
    """
    while os.read(0, 1):
        pass
    if runs:
        runs[0].stopping = True
        time.sleep(STOP_SECONDS)
    os._exit(1)  # the main thread may wait for a process that is gone too


def main() -> None:
    """Train as one of several processes. SIGTERM, which the parent sends to all, ends the run with a checkpoint."""
    job, folder = Job.model_validate_json(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    runs: list[Pretraining] = []  # this process's run, once its model is built
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
        among.wait()  # the first to end would close connections that others still read from
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
    os._exit(0)  # gloo's threads outlive its groups; one that takes Python's lock during a normal exit aborts
