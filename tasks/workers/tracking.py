"""Metrics of pretraining in TensorBoard, Weights & Biases, MLflow or trackio: those that CRAM_TRACK names.

Each tracker is a process of its own, of low priority, that follows the files of metrics that training writes anyway. So
training never waits for one, nor shares Python's lock with it, and one that fails or is added later catches up. It ends
within seconds after training does, even if that was killed.
"""

import fcntl
import json
import logging
import os
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import copy_context
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import BinaryIO

from model.environment import print_anything
from model.errors import InputError
from tasks.store.home import CODE

FOLDER = ".tracking"  # in the store: files and logs of the trackers, which no stage reads
ROWS = 80  # of metrics at a time: MLflow takes 1,000 numbers
LOG_BYTES = 10_000_000  # of a tracker's log, which then begins anew
SECONDS, SECONDS_BEFORE_A_RETRY, SECONDS_TO_END = 5, 60, 15
Mark = tuple[int, int]  # a step, and 0 for its row of metrics or 1 for a held-out loss that was measured after it
Points = list[tuple[int, dict[str, float]]]  # steps, and what is shown of them
Tracker = tuple[Callable[[Points], object], Callable[[bool], object]]  # take them; end, with whether training finished
log = logging.getLogger(__name__)


class Run:
    """In a tracker's process: the training that it follows, and how much of it the tracker has taken."""

    def __init__(self, tracker: str, about: dict) -> None:
        self.name, self.params, self.store = about["name"], about["params"], Path(about["store"])
        self.metrics, self.heldout = Path(about["metrics"]), Path(about["heldout"])
        self.state = self.metrics.with_name(f"{tracker}.json")  # goes on with the draft; a refreshed run has a new id
        kept = {"id": f"{self.name}-{time.strftime('%Y%m%d-%H%M%S')}", "sent": (-1, 1)}
        with suppress(OSError, ValueError):
            kept |= json.loads(self.state.read_text(encoding="utf-8"))
        self.id, self.sent = kept["id"], tuple(kept["sent"])
        if tracker == "tensorboard":  # the only one that can replace steps that are done again
            self.sent = min(self.sent, (about["step"], 1))

    def new(self, file: BinaryIO) -> Iterator[list[tuple[Mark, dict[str, float]]]]:
        """What the tracker has yet to take, in lists. `file`: the metrics, of which each row is read once."""
        step, rows = max(0, self.sent[0]), [{}]
        while rows:
            rows = list(islice(complete_lines(file), ROWS))
            step = rows[-1]["step"] if rows else step
            found = {(row["step"], 0): shown(row) for row in rows}
            with self.heldout.open("rb") as evaluations:
                found |= {(each["step"], 1): each["shown"] for each in complete_lines(evaluations)}
            yield sorted(item for item in found.items() if self.sent < item[0] <= (step, 1))

    def keep(self, mark: Mark) -> None:
        """Write down what is taken, before it is: a kill may lose some steps of a curve, but draws none twice."""
        half = self.state.with_suffix(".half")
        half.write_text(json.dumps({"id": self.id, "sent": mark}), encoding="utf-8")
        half.replace(self.state)


def complete_lines(file: BinaryIO) -> Iterator[dict]:
    """The next complete lines of a file that another process is writing."""
    while (line := file.readline()).endswith(b"\n"):
        yield json.loads(line)
    file.seek(-len(line), os.SEEK_CUR)


def shown(row: dict) -> dict[str, float]:
    """What is shown of a step: its metrics, and the time left at the pace so far."""
    left = {"hours_left": row["seconds"] * (1 / row["fraction"] - 1) / 3600} if row["fraction"] > 0.01 else {}
    return {name: value for name, value in row.items() if name != "step"} | left


def tensorboard(run: Run) -> Tracker:
    """Event files in a folder of the run. Steps that are done again replace those of before."""
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    def take(points: Points) -> None:
        for step, numbers in points:
            summary = Summary(value=[Summary.Value(tag=n, simple_value=v) for n, v in numbers.items()])
            writer.add_event(Event(step=step, wall_time=time.time(), summary=summary))
        writer.flush()

    writer = EventFileWriter(str(run.store / "tensorboard" / run.name))
    restart = SessionLog(status=SessionLog.START)
    writer.add_event(Event(step=run.sent[0] + 1, wall_time=time.time(), session_log=restart))
    return take, lambda finished: writer.close()


def wandb(run: Run) -> Tracker:
    """A run of Weights & Biases, in its offline mode too."""
    import wandb

    quiet = wandb.Settings(console="off")
    its = wandb.init(id=run.id, name=run.name, config=run.params, resume="allow", settings=quiet)
    return lambda points: [its.log(numbers, step) for step, numbers in points], lambda ok: its.finish(int(not ok))


def mlflow(run: Run) -> Tracker:
    """A run of MLflow, found again by its tag `cram`."""
    import mlflow
    from mlflow.entities import Metric, Param

    def take(points: Points) -> None:
        now = int(1000 * time.time())
        metrics = [Metric(name, value, now, step) for step, numbers in points for name, value in numbers.items()]
        client.log_batch(own, metrics)

    client = mlflow.MlflowClient()
    experiment = mlflow.set_experiment(os.environ["MLFLOW_EXPERIMENT_NAME"]).experiment_id
    found = client.search_runs([experiment], f"tags.cram = '{run.id}'")
    found = found or [client.create_run(experiment, tags={"cram": run.id}, run_name=run.name)]
    own = found[0].info.run_id
    client.update_run(own, status="RUNNING")
    client.log_batch(own, params=[Param(name, str(value)) for name, value in run.params.items()])
    return take, lambda finished: client.set_terminated(own, "FINISHED" if finished else "KILLED")


def trackio(run: Run) -> Tracker:
    """A run of trackio."""
    import trackio

    its = trackio.init("cram", name=run.id, config=run.params, resume="allow", embed=False)
    return lambda points: [its.log(numbers, step) for step, numbers in points], lambda finished: its.finish()


TRACKERS = {  # by their packages; what to do about an error
    "tensorboard": (tensorboard, "Is there space, and may this user write there?"),
    "wandb": (wandb, "Run `wandb login`, or set WANDB_MODE=offline and use `wandb sync` later."),
    "mlflow": (mlflow, "Does MLFLOW_TRACKING_URI name a server that answers?"),
    "trackio": (trackio, "Do TRACKIO_DIR, TRACKIO_SPACE_ID or TRACKIO_SERVER_URL name a place that it may write to?"),
}


def names() -> list[str]:
    """The trackers that CRAM_TRACK names. Raises InputError for one that is unknown or not installed."""
    given = list(dict.fromkeys(filter(None, map(str.strip, os.environ.get("CRAM_TRACK", "").split(",")))))
    for name in given:
        if name not in TRACKERS:
            raise InputError(f"CRAM_TRACK is {name!r}; expected one or more of {', '.join(TRACKERS)}, with commas.")
        if not ((spec := find_spec(name)) and spec.origin):  # without an origin, it is a folder of that name
            raise InputError(
                f"CRAM_TRACK names {name}, but the package isn't installed. Run `pip install 'cram[{name}]'`, or in a "
                f"checkout `pip install -e '.[{name}]'`; or take it out of CRAM_TRACK."
            )
    return given


@contextmanager
def tracked(name: str, folder: Path, params: dict) -> Iterator[None]:
    """In this context, the trackers of CRAM_TRACK follow the metrics that training writes to `folder`."""
    from model import checkpoint
    from tasks.store import home

    if not (trackers := names()):
        yield
        return
    step, finished, started = checkpoint.saved_step(folder), "", []
    checkpoint.cut_metrics(folder, step)  # as training is about to do, before anyone reads what is done again
    about = {
        "name": name,
        "params": params,
        "store": str(home.root() / FOLDER),
        "step": step,
        "patience": SECONDS_TO_END,
    }
    about |= {"metrics": str(folder / checkpoint.METRICS), "heldout": str(folder / checkpoint.HELDOUT)}
    for tracker in trackers:
        try:
            started.append(start(tracker, home.root() / FOLDER, about))
        except OSError as error:
            log.warning("%s can't be started (%s). Training goes on without it.", tracker, error)
    try:
        yield
        finished = "finished"
    finally:
        for process, _ in started:
            with suppress(OSError), process.stdin as pipe:  # it may have ended
                pipe.write(finished)
        deadline = time.monotonic() + SECONDS_TO_END + 2
        for _, thread in started:
            thread.join(max(0.0, deadline - time.monotonic()))


def start(tracker: str, place: Path, about: dict) -> tuple[subprocess.Popen, threading.Thread]:
    """Start a tracker's process, and the thread that logs what it says and waits for its end."""
    place.mkdir(parents=True, exist_ok=True)
    usual = {"MLFLOW_TRACKING_URI": f"sqlite:///{place}/mlflow.db", "MLFLOW_EXPERIMENT_NAME": "cram"}
    usual |= {"WANDB_PROJECT": "cram", "WANDB_DIR": str(place)}
    searched = os.pathsep.join(filter(None, (str(CODE), os.environ.get("PYTHONPATH"))))
    own = {"PYTHONPATH": searched, "PYTHONSAFEPATH": "1"}  # not a folder `wandb` in the working directory
    with (place / f"{tracker}.log").open("a", encoding="utf-8") as output:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": output, "encoding": "utf-8"}
        # in a session of its own, since Ctrl-C is for training only, which then ends this process
        command = [sys.executable, "-m", "tasks.workers.tracking", tracker]
        process = subprocess.Popen(command, env=usual | os.environ | own, start_new_session=True, **pipes)
    with suppress(OSError):  # it has ended
        process.stdin.write(json.dumps(about, default=str) + "\n")
        process.stdin.flush()
    # in the context of this thread, which knows the Prefect run
    thread = threading.Thread(target=copy_context().run, args=(attend, tracker, process, output.name), daemon=True)
    thread.start()
    return process, thread


def attend(tracker: str, process: subprocess.Popen, output: str) -> None:
    """Log the first thing that a tracker's process says, or how it ended if that was an error; wait for its end."""
    problem = process.stdout.readline().strip()
    if not problem and process.wait():
        problem = f"its process ended with status {process.returncode}"
    if problem:
        what = tracker, problem.rstrip("."), TRACKERS[tracker][1], output
        log.warning("%s doesn't take the metrics: %s. Training goes on. %s Details: %s", *what)
    for _ in process.stdout:  # once is enough
        pass
    process.wait()


def follow(run: Run, take: Callable[[Points], object], ended: threading.Event) -> None:
    """Pass on what training writes until it has ended and all is passed on."""
    with run.metrics.open("rb") as file:
        while True:
            last = ended.is_set()  # before the look at the files
            for points in filter(None, run.new(file)):
                run.keep(points[-1][0])
                take([(step, numbers) for (step, _), numbers in points])
                run.sent = points[-1][0]
            if last:
                return
            if os.fstat(2).st_size > LOG_BYTES:
                os.truncate(2, 0)
            ended.wait(SECONDS)


def main() -> None:
    """Follow the training that is described on standard input, until that ends. What goes wrong is said there."""
    name, about = sys.argv[1], json.loads(sys.stdin.readline())
    os.nice(10)
    parent = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)  # what the libraries print goes to the log
    print_anything()
    ended, finished = threading.Event(), []

    def wait_for_end() -> None:
        finished.append(bool(sys.stdin.read()))
        ended.set()
        time.sleep(about["patience"])
        print(f"it was not done {about['patience']} s after training ended", file=parent)
        os._exit(1)

    threading.Thread(target=wait_for_end, daemon=True).start()
    with Path(about["metrics"]).with_name(f"{name}.lock").open("w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the process of a killed training may not have ended yet
        run = Run(name, about)
        last = False
        while not last:
            last = ended.is_set()
            try:
                take, end = TRACKERS[name][0](run)
                follow(run, take, ended)
                end(*finished)
                last = True
            except Exception as error:
                traceback.print_exc()
                print(" ".join(f"{type(error).__name__}: {error}".split()), file=parent)
                ended.wait(SECONDS_BEFORE_A_RETRY)


if __name__ == "__main__":
    main()
