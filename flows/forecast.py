"""What a run would do (`--plan`), without doing it: what is there, and how long and how much disk the rest would take.

The time of a stage is that of its last comparable run on this machine, scaled by the work that there is.
"""

import functools
from contextlib import suppress
from typing import NamedTuple

from rich.filesize import decimal

from flows import disk
from flows.execute import count_at_once
from flows.plan import SEVERAL, Plan, Step
from model.errors import InputError
from model.settings import Training
from model.wording import brief_duration, budget, counted, duration
from tasks.stage import environment
from tasks.store import home
from tasks.store.artifacts import WORK, Artifact, artifact_named, draft_of, load_manifest, read_manifest
from tasks.store.locks import drafts
from tasks.store.manifests import MANIFEST, kept_files

PRETRAIN = "pretrain"
IMPOSSIBLE = "not possible"
UNFINISHED = ("resumable", "in progress")
OFF_THE_CLOCK = 0.1  # of a short budget, besides it, where there is no earlier run to go by


class Device(NamedTuple):
    """What a training runs on."""

    kind: str  # cpu or cuda
    name: str
    gpus: int


class Row(NamedTuple):
    """A stage of a run: bytes that are `there`; seconds (None: unknown) and bytes that it would leave on the disk."""

    stage: str
    key: str
    state: str
    there: int = 0
    seconds: float | None = 0
    disk: float = 0

    def cells(self) -> dict[str, str]:
        """The row as texts."""
        time = "unknown"
        if self.seconds is not None:
            time = brief_duration(self.seconds) if self.seconds else ""
        return {
            "stage": self.stage,
            "key": self.key,
            "state": self.state,
            "on disk": decimal(self.there) if self.there else "",
            "time": time,
            "disk": decimal(int(self.disk)) if self.disk else "",
        }


class Work(NamedTuple):
    """What a stage has to do, or did. Only runs of the same kind are compared."""

    amount: float  # a budget, passes over a task's data, or bytes of text
    kind: object = None


class Forecast:
    """What the steps of a plan would do. `refusal`: the error with which the run would end before it starts."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.refusal = next(iter(plan.problems.values()), None)
        self.notes: list[str] = []
        self.earlier = functools.cache(self._earlier)
        self.drafts = {draft.name: draft for draft in drafts("")}
        self.rows: list[Row] = []
        for artifacts in plan.given.values():
            for artifact in artifacts:
                row = self.describe(artifact.stage, artifact, is_made=True)
                self.rows.append(row._replace(state="given"))
        self.rows_of = {step: self.row(step) for step in plan.steps}
        self.rows += self.rows_of.values()

    def _earlier(self, stage: str) -> list[dict]:
        """The manifests of a stage that this machine wrote, whatever became of their files, the newest first.

        Without those that tell only the time of a last attempt: pretraining alone has a clock that goes on.
        """
        here = environment()["machine"]
        found = []
        for path in (home.root() / stage).glob(f"*/{MANIFEST}"):
            about = load_manifest(Artifact(stage=stage, key=path.parent.name))
            is_whole = stage == PRETRAIN or not about.get("resumed")
            if about and is_whole and about["environment"].get("machine") == here and about["seconds"]:
                found.append(about)
        return sorted(found, key=lambda about: about["finished"], reverse=True)

    def describe(self, title: str, artifact: Artifact, is_made: bool, resumes: bool = False) -> Row:
        """The row of an artifact, or of its draft, without what it would take."""
        about = read_manifest(artifact) or {}
        row = Row(title, artifact.key, "cached", sum(file["bytes"] for file in kept_files(about)))
        if is_made:
            return row
        draft = self.drafts.get(draft_of(artifact).name)
        if draft and draft.running:
            return row._replace(state="in progress", there=draft.bytes)
        if draft and resumes:
            return row._replace(state="resumable", there=draft.bytes)
        return row._replace(state="to do again" if about else "to do")

    def row(self, step: Step) -> Row:
        """The row of a step."""
        if step.error:
            return Row(step.title, step.key, IMPOSSIBLE)
        resumes = step.task.resumes and not step.is_anew
        row = self.describe(step.title, step.artifact, step.is_made, resumes)
        if step.is_made:
            return row
        seconds = self.seconds(step)
        if seconds and step.stage == PRETRAIN and row.state in UNFINISHED:
            seconds = max(0, seconds - seconds_in_draft(step))
        left_on_disk, _ = disk.need(step)
        return row._replace(seconds=seconds, disk=left_on_disk)

    def seconds(self, step: Step) -> float | None:
        """About how long a step takes from its start; None if no earlier run is comparable."""
        if step.stage == PRETRAIN and step.params.budget_unit == "hours":
            return self.seconds_of_budget(step)
        work = find_work(step)
        for about in self.earlier(step.stage):
            with suppress(AttributeError, KeyError, TypeError, ValueError):  # its input is gone, or of another version
                done = find_done(step, about)
                is_alike = done.kind == work.kind and done.amount and work.amount
                if is_alike and self.ran_on_this_device(about):
                    return about["stats"].get("seconds_on_the_clock", about["seconds"]) * work.amount / done.amount
        return None

    @functools.cached_property
    def device(self) -> "Device":
        """What trainings of this process would run on."""
        from model import machine  # loads torch

        here = machine.detect()
        return Device(here.device.type, here.device_name(), machine.gpus(here))

    def ran_on_this_device(self, about: dict) -> bool:
        """Whether a stage that trained did so on such a device as this process would, and on as many GPUs."""
        its = about["stats"].get("machine")
        if not its:  # it computed on the CPU
            return True
        if self.device.kind == "cpu":
            return its["device"].startswith("CPU")
        return its["device"] == self.device.name and its.get("gpus", self.device.gpus) == self.device.gpus

    def seconds_of_budget(self, step: Step) -> float:
        """About how long pretraining takes whose budget is in hours, with what is off the clock.

        That is mainly measuring held-out losses. An earlier run with this budget and architecture shows how long it
        takes here; otherwise it is assumed to take a tenth of the budget, up to that from which on all is measured.
        """
        from model import heldout  # loads torch

        params = step.params
        architecture = params.architecture.model_dump(mode="json")
        for about in self.earlier(PRETRAIN):
            with suppress(AttributeError, KeyError, TypeError):  # of another version
                its = about["params"]
                is_same = (its["budget"], its["budget_unit"]) == (params.budget, params.budget_unit)
                is_whole = about["seconds"] >= about["stats"]["seconds_on_the_clock"]  # it was not interrupted
                if is_same and is_whole and its["architecture"] == architecture:
                    return about["seconds"]
        return 3600 * (params.budget + OFF_THE_CLOCK * min(params.budget, heldout.ALL_FROM_HOURS))

    def would_run(self) -> list[Row]:
        """The rows of what is neither there nor impossible."""
        return [row for row in self.rows if not is_over(row)]

    def sentences(self) -> list[str]:
        """The sum of the rows; why some are not possible, but for the refusal. Finds out whether the disk suffices."""
        sizes = ""
        try:
            peak = int(disk.check(self.plan))
            if peak > 0:
                sizes = f"; at most {decimal(peak)} of disk at a time"
        except InputError as error:
            self.refusal = self.refusal or error
        rows = self.would_run()
        if rows:
            head = f"{len(rows)} of {counted(len(self.rows), 'stage')} would run: {self.sum_times(rows)}{sizes}."
        else:
            head = "Nothing would run."
        return [head, *self.reasons(), *self.notes]

    def announcement(self, name: str) -> str:
        """What the run is about to do, and how long it takes, in a line. `name`: of the recipe or study."""
        rows = [row for row in self.rows if row.state not in ("given", IMPOSSIBLE)]
        left = self.would_run()
        stages = counted(len(rows), "stage")
        if not left:
            return f"{name}: {stages}, all cached."
        to_do = "all" if len(left) == len(rows) else f"{len(left):,}"
        known = [row for row in left if row.seconds is not None]
        if len(known) == len(left):
            time = f"{self.sum_times(left)} in all"
        elif known:
            time = f"{self.sum_times(left)} (nothing comparable has run here before)"
        else:
            time = "for an unknown time, as nothing comparable has run here before"
        parts = [f"{name}: {stages}, {to_do} to do", self.pretraining(), time]
        return f"{'; '.join(filter(None, parts))}."

    def pretraining(self) -> str:
        """Which budget pretraining has, in words; empty if there is nothing to pretrain."""
        steps = [step for step, row in self.rows_of.items() if step.stage == PRETRAIN and not is_over(row)]
        budgets = list(dict.fromkeys(budget(step.params.budget, step.params.budget_unit) for step in steps))
        if not steps:
            return ""
        if len(steps) > 1:
            each = f" for {budgets[0]} each" if len(budgets) == 1 else ""
            return f"pretraining {counted(len(steps), 'model')}{each}"
        [row] = (self.rows_of[step] for step in steps)
        if row.state in UNFINISHED:
            return f"pretraining continues, with a budget of {budgets[0]}"
        return f"pretraining for {budgets[0]}" if steps[0].params.budget else ""

    def sum_times(self, rows: list[Row]) -> str:
        """The time that these rows take together, in words; finetuning runs go side by side."""
        several = [step for step in self.plan.possible if step.stage == SEVERAL and not step.is_made]
        count = count_at_once(several)
        known = 0.0
        unknown = 0
        for row in rows:
            if row.seconds is None:
                unknown += 1
            else:
                known += row.seconds / (count if row.stage.split()[0] == SEVERAL else 1)
        times = []
        if unknown < len(rows):
            times.append("less than a second" if known < 1 else f"about {duration(known, 2)}")
        if unknown:
            times.append(f"{counted(unknown, 'stage')} of unknown time")
        return " and ".join(times)

    def reasons(self) -> list[str]:
        """Why steps are not possible, each reason once, but for the refusal."""
        first = {str(step.problem): step for step in self.plan.steps if step.problem}
        first.pop(str(self.refusal), None)
        return [f"{step.title} is not possible: {text}" for text, step in first.items()]

    def add_later(self, step: Step) -> Artifact:
        """The artifact of a step that runs after the plan; adds a row for it."""
        row = self.describe(step.title, step.artifact, step.is_made)
        if not step.is_made:
            earlier = self.earlier(step.stage)
            row = row._replace(seconds=earlier[0]["seconds"] if earlier else None)
        self.rows.append(row)
        return step.artifact


def is_over(row: Row) -> bool:
    """Whether nothing of a stage is to be done, or can be."""
    return row.state in ("cached", "given", IMPOSSIBLE)


def seconds_in_draft(step: Step) -> float:
    """The seconds of its budget that an interrupted pretraining has spent, by its last checkpoint."""
    from model import checkpoint  # loads torch

    with suppress(OSError, ValueError, KeyError):  # an error of the run, not of its forecast
        last = checkpoint.last_row(draft_of(step.artifact) / WORK)
        return last["seconds"] if last else 0
    return 0


def find_work(step: Step) -> Work:
    """What a step has to do."""
    params = step.params
    if step.stage == PRETRAIN:
        training = in_tokens(step)
        architecture = params.architecture.model_dump(mode="json") if training.budget_unit == "tokens" else None
        return Work(training.budget, architecture)
    if step.stage == SEVERAL:
        identity = params.identity()
        kind = (identity["task"], identity["data"], architecture_of(step))
        return Work(params.epochs * params.share, kind)
    reads_text = not step.inputs or "corpus" in step.task.signature.parameters
    return Work(disk.text_for(step) if reads_text else 1)


def in_tokens(pretrain: Step) -> Training:
    """The settings of a step that trains, with a budget in epochs as one in tokens, which may be an estimate."""
    tokens, words = map(pretrain.find_upstream, ("tokenize", "vocabulary"))
    epoch = disk.tokens_of_epoch(tokens, words) if tokens and words else 0.0
    return pretrain.params.in_tokens(epoch)


def architecture_of(run: Step) -> dict | None:
    """The architecture of the model that a finetuning run begins from, as in a manifest; None if it isn't known."""
    start = read_manifest(run.arguments[1])
    if start:
        return start["params"].get("architecture")
    bert = run.find_upstream(PRETRAIN)
    return bert.params.architecture.model_dump(mode="json") if bert else None


def find_done(step: Step, about: dict) -> Work:
    """What an earlier run of the step's stage did, by its manifest. Raises KeyError and others for an odd one."""
    params = about["params"]
    stats = about["stats"]
    inputs = about["inputs"]
    if step.stage == PRETRAIN:
        if step.params.budget_unit in ("tokens", "epochs"):
            return Work(stats["tokens"], params["architecture"])
        return Work(1e18 * stats["exaflops"])
    if step.stage == SEVERAL:
        start = load_manifest(artifact_named(inputs["start"]))
        kind = (params["task"], params["data"], start["params"]["architecture"])
        return Work(params["epochs"] * params["share"], kind)
    if not inputs:
        return Work(float(stats["bytes"]))
    if "corpus" in inputs:
        return Work(disk.text_in(load_manifest(artifact_named(inputs["corpus"]))))
    return Work(1)
