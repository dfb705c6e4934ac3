"""What a run would do (`--plan`), without doing it: what is there, and how long and how much disk the rest would take.

The time of a stage is that of its last comparable run on this machine, scaled by the work that there is.
"""

import functools
from contextlib import suppress
from typing import Any, NamedTuple

from rich.filesize import decimal

from flows import cram, disk
from flows.execute import count_at_once
from flows.plan import SEVERAL, Plan, Step
from model.errors import InputError
from model.wording import brief_duration, counted, duration
from tasks.stage import environment
from tasks.store import home
from tasks.store.artifacts import WORK, Artifact, artifact_named, draft_of, load_manifest, read_manifest
from tasks.store.locks import drafts
from tasks.store.manifests import MANIFEST, kept_files

PRETRAIN = "pretrain"
IMPOSSIBLE = "not possible"
UNFINISHED = ("resumable", "in progress")


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
        self.rows += [self.row(step) for step in plan.steps]

    def _earlier(self, stage: str) -> list[dict]:
        """The manifests of a stage that this machine wrote, whatever became of their files, the newest first."""
        here = environment()["machine"]
        found = []
        for path in (home.root() / stage).glob(f"*/{MANIFEST}"):
            about = load_manifest(Artifact(stage=stage, key=path.parent.name))
            if about and about["environment"].get("machine") == here and about["seconds"]:
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
            return 3600 * step.params.budget
        work = find_work(step)
        for about in self.earlier(step.stage):
            with suppress(AttributeError, KeyError, TypeError, ValueError):  # its input is gone, or of another version
                done = find_done(step, about)
                if done.kind == work.kind and done.amount and work.amount:
                    return about["stats"].get("seconds_on_the_clock", about["seconds"]) * work.amount / done.amount
        return None

    def would_run(self) -> list[Row]:
        """The rows of what is neither there nor impossible."""
        return [row for row in self.rows if row.state not in ("cached", "given", IMPOSSIBLE)]

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
            times.append(f"about {duration(known, 2)}")
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
        architecture = params.architecture.model_dump(mode="json") if params.budget_unit == "tokens" else None
        return Work(params.budget, architecture)
    if step.stage == SEVERAL:
        identity = params.identity()
        kind = (identity["task"], identity["data"], architecture_of(step))
        return Work(params.epochs * params.share, kind)
    reads_text = not step.inputs or "corpus" in step.task.signature.parameters
    return Work(disk.text_for(step) if reads_text else 1)


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
        if step.params.budget_unit == "tokens":
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


def of_run(**asked: Any) -> Forecast:
    """The forecast of a run of a recipe."""
    plan = cram.plan_run(**asked)
    plan.check(thoroughly=False)
    return Forecast(plan)


def of_study(**asked: Any) -> Forecast:
    """The forecast of a study."""
    from flows import study  # here, as a flow takes 0.1 s to define

    asked_for = study.plan_study(**asked)
    asked_for.plan.check(thoroughly=False)
    found = Forecast(asked_for.plan)
    for run in asked_for.runs:
        if not run.recipe:
            member = run.member
            found.rows.append(Row(f"[{member.run}, seed {member.seed}]", "", IMPOSSIBLE))
            if member.seed == 0:
                found.notes.append(f"{member.run} is not possible here: {member.problem}")
    models = [page.find_upstream(PRETRAIN) for page in asked_for.pages if page]
    if any(model and not model.error for model in models):
        found.refusal = None  # the others are possible
    if not found.would_run() and not found.refusal:
        study.compare_runs(asked_for, found.add_later)
    elif not found.refusal:
        found.rows.append(Row("compare", "", "to do", seconds=None))
    return found
