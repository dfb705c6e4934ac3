"""Metrics of pretraining in TensorBoard, Weights & Biases, MLflow or trackio: those that CRAM_TRACK names.

Each tracker is a separate process, of low priority, that follows the files of metrics that training writes anyway, and
passes them on by accelerate. So training never waits for a tracker, nor shares Python's lock with it, and one that
fails or is added later catches up. It ends within seconds after training does, even if that was killed.
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
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import copy_context
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, BinaryIO

from model.environment import print_anything
from model.errors import InputError
from tasks.store.home import CODE

if TYPE_CHECKING:
    from accelerate import Accelerator

FOLDER = ".tracking"  # in the store: files and logs of the trackers, which no stage reads
ROWS = 80  # of metrics that are read at a time
LOG_BYTES = 10_000_000  # of a tracker's log, which then begins again
SECONDS = 5
SECONDS_BEFORE_A_RETRY = 60
SECONDS_TO_END = 15
TRACKERS = {  # the names of their packages, and of accelerate's trackers; what to do about an error
    "tensorboard": "Is there space, and may this user write there?",
    "wandb": "Run `wandb login`, or set WANDB_MODE=offline and use `wandb sync` later.",
    "mlflow": "Does MLFLOW_TRACKING_URI name a server that answers?",
    "trackio": "Do TRACKIO_DIR, TRACKIO_SPACE_ID or TRACKIO_SERVER_URL name a place that it may write to?",
}
Mark = tuple[int, int]  # a step, and 0 for its row of metrics or 1 for a held-out loss that was measured after it
Points = list[tuple[Mark, dict[str, float]]]  # what is shown of steps
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Training:
    """What the process of a tracker has to know about the training that it follows."""

    name: str
    params: dict[str, Any]
    metrics: str  # the path of the file
    heldout: str  # the same of the held-out losses
    place: str  # the folder of all trackers
    step: int  # of the checkpoint that training continues from
    patience: float  # seconds that the tracker has when training has ended


class Feed:
    """In a tracker's process: the metrics that training writes, and how much of them the tracker has taken."""

    def __init__(self, tracker: str, training: Training) -> None:
        self.metrics = Path(training.metrics)
        self.heldout = Path(training.heldout)
        self.state = self.metrics.with_name(f"{tracker}.json")  # stays with the draft; a refreshed run has a new id
        kept: dict[str, Any] = {}
        with suppress(OSError, ValueError):
            kept = json.loads(self.state.read_text(encoding="utf-8"))
        self.id: str = kept.get("id") or f"{training.name}-{time.strftime('%Y%m%d-%H%M%S')}"
        self.mlflow_run: str | None = kept.get("mlflow_run")  # the id that MLflow gave this run
        step, kind = kept.get("sent", (-1, 1))
        self.sent: Mark = (step, kind)
        if tracker == "tensorboard":  # the only one that can replace steps that are done again
            self.sent = min(self.sent, (training.step, 1))

    def new(self, file: BinaryIO) -> Iterator[Points]:
        """What the tracker has yet to take, in lists. `file`: the metrics, of which each row is read once."""
        step = max(0, self.sent[0])
        while True:
            rows = list(islice(complete_lines(file), ROWS))
            if rows:
                step = rows[-1]["step"]
            found = {(row["step"], 0): shown(row) for row in rows}
            with self.heldout.open("rb") as evaluations:
                for each in complete_lines(evaluations):
                    found[each["step"], 1] = each["shown"]
            yield sorted(item for item in found.items() if self.sent < item[0] <= (step, 1))
            if not rows:
                return

    def keep(self, mark: Mark) -> None:
        """Record the position before sending: after a kill, steps of a curve may be missing, but none is sent twice."""
        half = self.state.with_suffix(".half")
        kept = {"id": self.id, "mlflow_run": self.mlflow_run, "sent": mark}
        half.write_text(json.dumps(kept), encoding="utf-8")
        half.replace(self.state)


def complete_lines(file: BinaryIO) -> Iterator[dict[str, Any]]:
    """The next complete lines of a file that another process is writing."""
    line = file.readline()
    while line.endswith(b"\n"):
        yield json.loads(line)
        line = file.readline()
    file.seek(-len(line), os.SEEK_CUR)


def shown(row: dict[str, float]) -> dict[str, float]:
    """What is shown of a step: its metrics, and the time left at the pace so far."""
    metrics = {name: value for name, value in row.items() if name != "step"}
    if row["fraction"] > 0.01:
        metrics["hours_left"] = row["seconds"] * (1 / row["fraction"] - 1) / 3600
    return metrics


def settings_of(tracker: str, training: Training, feed: Feed) -> tuple[str, dict[str, Any]]:
    """A tracker's project, and the other settings with which accelerate begins its run or continues it."""
    match tracker:
        case "tensorboard":  # the project is a folder; steps from this one on are done again
            return training.name, {"purge_step": feed.sent[0] + 1}
        case "wandb":
            quiet = {"console": "off"}
            project = os.environ["WANDB_PROJECT"]
            return project, {"id": feed.id, "name": training.name, "resume": "allow", "settings": quiet}
        case "mlflow":
            return os.environ["MLFLOW_EXPERIMENT_NAME"], {"run_id": feed.mlflow_run, "run_name": training.name}
        case _:
            return "cram", {"name": feed.id, "resume": "allow", "embed": False}


def open_tracker(tracker: str, training: Training, feed: Feed) -> "Accelerator":
    """Begin the tracker's run, or continue it."""
    from accelerate import Accelerator

    project, settings = settings_of(tracker, training, feed)
    config = None if tracker == "tensorboard" else training.params  # which shows no nested ones
    folder = Path(training.place) / tracker
    accelerator = Accelerator(cpu=True, log_with=tracker, project_dir=folder)
    try:
        accelerator.init_trackers(project, config, {tracker: settings})
    except Exception:
        close(accelerator)
        raise
    if tracker == "mlflow":
        feed.mlflow_run = accelerator.get_tracker("mlflow", unwrap=True).info.run_id
    return accelerator


def close(accelerator: "Accelerator") -> None:
    """End the run of a tracker that has failed, so that it can be opened again."""
    for each in accelerator.trackers:
        with suppress(Exception):
            each.finish()


def finish(tracker: str, accelerator: "Accelerator", has_finished: bool) -> None:
    """End the tracker's run. W&B and MLflow show whether training was killed, for which accelerate has no word."""
    if has_finished or tracker not in ("wandb", "mlflow"):
        accelerator.end_training()
    elif tracker == "wandb":
        accelerator.get_tracker("wandb", unwrap=True).finish(exit_code=1)
    else:
        import mlflow

        mlflow.end_run("KILLED")


def names() -> list[str]:
    """The trackers that CRAM_TRACK names. Raises InputError for one that is unknown or not installed."""
    parts = os.environ.get("CRAM_TRACK", "").split(",")
    given = list(dict.fromkeys(part.strip() for part in parts if part.strip()))
    for name in given:
        if name not in TRACKERS:
            raise InputError(f"CRAM_TRACK is {name!r}; expected one or more of {', '.join(TRACKERS)}, with commas.")
        for package in (name, "accelerate"):
            if not is_installed(package):
                raise InputError(
                    f"CRAM_TRACK names {name}, but the package {package} isn't installed. Run `pip install "
                    f"'cram[{name}]'`, or in a checkout `pip install -e '.[{name}]'`; or remove {name} from CRAM_TRACK."
                )
    return given


def is_installed(package: str) -> bool:
    """Whether a package can be imported; a folder of that name in the working directory is not one."""
    spec = find_spec(package)
    return spec is not None and spec.origin is not None


@contextmanager
def trackers(name: str, folder: Path, params: dict[str, Any]) -> Iterator[None]:
    """In this context, the trackers of CRAM_TRACK follow the metrics that training writes to `folder`."""
    from model import checkpoint
    from tasks.store import home

    asked = names()
    if not asked:
        yield
        return
    step = checkpoint.saved_step(folder)
    checkpoint.cut_metrics(folder, step)  # as training is about to do, before anyone reads what is done again
    training = Training(
        name=name,
        params=params,
        metrics=str(folder / checkpoint.METRICS),
        heldout=str(folder / checkpoint.HELDOUT),
        place=str(home.root() / FOLDER),
        step=step,
        patience=SECONDS_TO_END,
    )
    started = []
    for tracker in asked:
        try:
            started.append(start(tracker, training))
        except OSError as error:
            log.warning("%s can't be started (%s). Training continues without it.", tracker, error)
    finished = ""
    try:
        yield
        finished = "finished"
    finally:
        for process, _ in started:
            with suppress(OSError), pipe_to(process) as pipe:  # the process may have ended
                pipe.write(finished)
        deadline = time.monotonic() + SECONDS_TO_END + 2
        for _, thread in started:
            thread.join(max(0.0, deadline - time.monotonic()))


def start(tracker: str, training: Training) -> tuple["subprocess.Popen[str]", threading.Thread]:
    """Start a tracker's process, and the thread that logs its errors and waits for its end."""
    place = Path(training.place)
    place.mkdir(parents=True, exist_ok=True)
    with (place / f"{tracker}.log").open("a", encoding="utf-8") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "tasks.workers.tracking", tracker],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=output,
            encoding="utf-8",
            env=environment_in(place),
            start_new_session=True,  # since Ctrl-C is for training only, which then ends this process
        )
    with suppress(OSError):  # the process has ended
        pipe = pipe_to(process)
        pipe.write(json.dumps(asdict(training), default=str) + "\n")
        pipe.flush()
    context = copy_context()  # which knows the Prefect run
    thread = threading.Thread(target=context.run, args=(attend, tracker, process, output.name), daemon=True)
    thread.start()
    return process, thread


def pipe_to(process: "subprocess.Popen[str]") -> IO[str]:
    """The standard input of a process that was started with one."""
    assert process.stdin
    return process.stdin


def environment_in(place: Path) -> dict[str, str]:
    """The environment of a tracker's process: its own variables as they are set, else files in the folder `place`."""
    usual = {
        "MLFLOW_TRACKING_URI": f"sqlite:///{place}/mlflow.db",
        "MLFLOW_EXPERIMENT_NAME": "cram",
        "WANDB_PROJECT": "cram",
        "WANDB_DIR": str(place),
    }
    searched = [str(CODE), os.environ.get("PYTHONPATH", "")]
    own = {
        "PYTHONPATH": os.pathsep.join(filter(None, searched)),
        "PYTHONSAFEPATH": "1",  # not a folder `wandb` in the working directory
    }
    return usual | dict(os.environ) | own


def attend(tracker: str, process: "subprocess.Popen[str]", output: str) -> None:
    """Log the first thing that a tracker's process reports, or how it ended if that was an error; wait for its end."""
    assert process.stdout
    problem = process.stdout.readline().strip()
    if not problem and process.wait():
        problem = f"its process ended with status {process.returncode}"
    if problem:
        log.warning(
            "%s doesn't take the metrics: %s. Training continues. %s Details: %s",
            tracker, problem.rstrip("."), TRACKERS[tracker], output,
        )  # fmt: skip
    for _ in process.stdout:  # once is enough
        pass
    process.wait()


def follow(feed: Feed, accelerator: "Accelerator", ended: threading.Event) -> None:
    """Pass on what training writes until it has ended and all is passed on."""
    with feed.metrics.open("rb") as file:
        while True:
            is_last = ended.is_set()  # before the look at the files
            for points in filter(None, feed.new(file)):
                feed.keep(points[-1][0])
                for mark, numbers in points:
                    accelerator.log(numbers, step=mark[0])
                    feed.sent = mark
            if is_last:
                return
            if os.fstat(2).st_size > LOG_BYTES:
                os.truncate(2, 0)
            ended.wait(SECONDS)


class End:
    """In a tracker's process: whether training has ended, which standard input shows; then little time is left."""

    def __init__(self, patience: float, parent: IO[str]) -> None:
        self.patience = patience
        self.parent = parent
        self.event = threading.Event()
        self.finished = False  # else training was killed or failed
        threading.Thread(target=self._wait, daemon=True).start()

    def _wait(self) -> None:
        self.finished = bool(sys.stdin.read())
        self.event.set()
        time.sleep(self.patience)
        print(f"it was not done {self.patience} s after training ended", file=self.parent)
        os._exit(1)


def main() -> None:
    """Follow the training that is described on standard input, until that ends. Report errors on standard output."""
    tracker = sys.argv[1]
    training = Training(**json.loads(sys.stdin.readline()))
    os.nice(10)
    parent = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)  # what the libraries print goes to the log
    print_anything()
    end = End(training.patience, parent)
    with Path(training.metrics).with_name(f"{tracker}.lock").open("w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the process of a killed training may not have ended yet
        feed = Feed(tracker, training)
        is_last = False
        while not is_last:
            is_last = end.event.is_set()
            accelerator = None
            try:
                accelerator = open_tracker(tracker, training, feed)
                follow(feed, accelerator, end.event)
                finish(tracker, accelerator, end.finished)
                return
            except Exception as error:
                traceback.print_exc()
                print(" ".join(f"{type(error).__name__}: {error}".split()), file=parent)
                if accelerator:
                    close(accelerator)
                end.event.wait(SECONDS_BEFORE_A_RETRY)


if __name__ == "__main__":
    main()
