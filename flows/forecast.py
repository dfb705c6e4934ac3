"""What a run would do (`--plan`), without doing it: what is there, and how long and how much disk the rest would take.

Times are those of the most similar artifacts in the store that this machine made, scaled by the work that there is.
"""

import functools
import math
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

PRETRAIN, IMPOSSIBLE = "pretrain", "not possible"


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
        there, disk = (decimal(int(size)) if size else "" for size in (self.there, self.disk))
        time = "unknown" if self.seconds is None else brief_duration(self.seconds) if self.seconds else ""
        return {"stage": self.stage, "key": self.key, "state": self.state, "on disk": there, "time": time, "disk": disk}


class Forecast:
    """What the steps of a plan would do. `refusal`: the error with which the run would end before it starts."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.refusal = plan, next(iter(plan.problems.values()), None)
        self.notes: list[str] = []
        self.manifest, self.written = functools.cache(read_manifest), functools.cache(self._written)
        self.drafts = {draft.name: draft for draft in drafts("")}
        given = [artifact for artifacts in plan.given.values() for artifact in artifacts]
        self.rows = [self.found(artifact.stage, artifact, True)._replace(state="given") for artifact in given]
        self.rows += [self.row(step) for step in plan.steps]

    def _written(self, stage: str) -> list[dict]:
        """The manifests of a stage that this machine wrote, whatever became of their files, the newest last."""
        here, paths = environment()["machine"], (home.root() / stage).glob(f"*/{MANIFEST}")
        every = (load_manifest(Artifact(stage=stage, key=path.parent.name)) for path in paths)
        own = [about for about in every if about and about["environment"].get("machine") == here and about["seconds"]]
        return sorted(own, key=lambda about: about["finished"])

    def found(self, title: str, artifact: Artifact, made: bool, resumes: bool = False) -> Row:
        """The row of an artifact, or of its draft, without what it would take."""
        about, draft = self.manifest(artifact) or {}, self.drafts.get(draft_of(artifact).name)
        row = Row(title, artifact.key, "cached", sum(file["bytes"] for file in kept_files(about)))
        if made:
            return row
        if draft and (resumes or draft.running):
            return row._replace(state="in progress" if draft.running else "resumable", there=draft.bytes)
        return row._replace(state="to do again" if about else "to do")

    def row(self, step: Step) -> Row:
        """The row of a step."""
        if step.error:
            return Row(step.title, step.key, IMPOSSIBLE)
        made, resumes = step.is_made, step.task.resumes and not step.is_anew
        row = self.found(step.title, step.artifact, made, resumes)
        if made:
            return row
        seconds, (size, scratch) = self.seconds(step), disk.need(step)
        if row.state in ("resumable", "in progress") and seconds:
            seconds = max(0, seconds - self.spent(step, seconds, row.there / (size + scratch or math.inf)))
        return row._replace(seconds=seconds, disk=size)

    def spent(self, step: Step, seconds: float, share: float) -> float:
        """The seconds of a step that its draft saves. `share`: that of the step's disk which the draft takes."""
        if step.stage != PRETRAIN:
            return seconds * share
        from model import checkpoint  # loads torch

        with suppress(OSError, ValueError, KeyError):  # which the run would tell
            last = checkpoint.last_row(draft_of(step.artifact) / WORK)
            return last["seconds"] if last else 0
        return 0

    def seconds(self, step: Step) -> float | None:
        """About how long a step takes from its start; None if nothing tells."""
        work, identity = self.work(step), step.params.identity()
        known = [(one, about) for about in self.written(step.stage) if (one := self.worked(step, about, identity))]
        if not known or not work:
            return 3600 * work if step.stage == PRETRAIN and step.params.budget_unit == "hours" else None

        def likeness(earlier: tuple[float, dict]) -> tuple[int, float]:
            same = sum(earlier[1]["params"].get(name) == value for name, value in identity.items())
            return same, -abs(math.log(earlier[0] / work))

        one, about = max(reversed(known), key=likeness)
        seconds = about["seconds"] - about["stats"].get("stopped_seconds", 0)
        clock = about["stats"].get("seconds_on_the_clock", seconds)
        return clock * work / one + max(0, seconds - clock)  # held-out text is measured off the clock

    def work(self, step: Step) -> float:
        """What a step has to do: a budget, passes over a task's data, or bytes of text; 0: unknown."""
        if step.stage == PRETRAIN:
            return step.params.budget
        if step.stage == SEVERAL:
            return step.params.epochs * step.params.share
        reads_text = not step.inputs or "corpus" in step.task.signature.parameters
        return disk.text_for(step) if reads_text else 1

    def worked(self, step: Step, about: dict, identity: dict) -> float:
        """The same of an earlier artifact of its stage; 0 if that tells nothing of the step."""
        with suppress(AttributeError, KeyError, TypeError, ValueError):  # its input is gone, or from another version
            stats, params, inputs = about["stats"], about["params"], about["inputs"]
            if step.stage == PRETRAIN:
                same = params["architecture"] == identity["architecture"]
                hours, flops = stats["seconds_on_the_clock"] / 3600, 1e18 * stats["exaflops"]
                return {"hours": hours, "tokens": same * stats["tokens"], "flops": flops}[step.params.budget_unit]
            if step.stage == SEVERAL:
                if (params["task"], params["data"]) != (identity["task"], identity["data"]):
                    return 0
                start, before = (self.manifest(one) for one in (step.arguments[1], artifact_named(inputs["start"])))
                model = start["params"] if start else step.find_upstream(PRETRAIN).params.model_dump(mode="json")
                return (model["architecture"] == before["params"]["architecture"]) * params["epochs"] * params["share"]
            if not step.inputs:
                return float(stats["bytes"])
            return disk.text_in(self.manifest(artifact_named(inputs["corpus"]))) if "corpus" in inputs else 1
        return 0

    def would_run(self) -> list[Row]:
        """The rows of what is neither there nor impossible."""
        return [row for row in self.rows if row.state not in ("cached", "given", IMPOSSIBLE)]

    def sentences(self) -> list[str]:
        """The sum of the rows; why some are not possible, but for the refusal. Finds out whether the disk suffices."""
        rows, problems, sizes = self.would_run(), self.plan.problems, ""
        try:
            peak = int(disk.check(self.plan))
            sizes = f"; at most {decimal(peak)} of disk at a time" if peak > 0 else ""
        except InputError as error:
            self.refusal = self.refusal or error
        first = {str(step.problem): step for step in problems if step.problem}
        why = [f"{step.title} is not possible: {text}" for text, step in first.items() if text != str(self.refusal)]
        why += self.notes
        if not rows:
            return ["Nothing would run.", *why]
        several = [step for step in self.plan.possible if step.stage == SEVERAL and not step.is_made]
        at_once = {SEVERAL: count_at_once(several)}
        known = [row.seconds / at_once.get(row.stage.split()[0], 1) for row in rows if row.seconds is not None]
        times = [f"about {duration(sum(known), 2)}"] * bool(known)
        times += [f"{counted(len(rows) - len(known), 'stage')} of unknown time"] * (len(known) < len(rows))
        head = f"{len(rows)} of {counted(len(self.rows), 'stage')} would run"
        return [f"{head}: {' and '.join(times)}{sizes}.", *why]

    def add_later(self, step: Step) -> Artifact:
        """The artifact of a step that runs after the plan; it gets a row."""
        row = self.found(step.title, step.artifact, step.is_made)
        if not step.is_made:
            earlier = self.written(step.stage)
            row = row._replace(seconds=earlier[-1]["seconds"] if earlier else None)
        self.rows.append(row)
        return step.artifact


def of_run(**asked: Any) -> Forecast:
    """The forecast of a run of a recipe."""
    plan = cram.plan_run(**asked)
    plan.check(thoroughly=False)
    return Forecast(plan)


def of_study(**asked: Any) -> Forecast:
    """The forecast of a study."""
    from flows import study  # here, as a flow takes 0.1 s to define

    of = study.plan_study(**asked)
    of.plan.check(thoroughly=False)
    found = Forecast(of.plan)
    for run in of.runs:
        if not run.recipe:
            member = run.member
            found.rows.append(Row(f"[{member.run}, seed {member.seed}]", "", IMPOSSIBLE))
            if member.seed == 0:
                found.notes.append(f"{member.run} is not possible here: {member.problem}")
    models = [page.find_upstream(PRETRAIN) for page in of.pages if page]
    if any(model and not model.error for model in models):
        found.refusal = None  # the others go on
    if not found.would_run() and not found.refusal:
        study.compare_runs(of, found.add_later)
    elif not found.refusal:
        found.rows.append(Row("compare", "", "to do", seconds=None))
    return found
