"""Old runs in the database of a Prefect server, which `cram gc` lists and clears through Prefect's client."""

import re
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from tqdm import tqdm

from flows.cli.common import say
from flows.cli.server import look_for_server
from model.errors import InputError
from model.wording import counted
from tasks.store.home import STATE

if TYPE_CHECKING:
    from uuid import UUID

    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.filters import FlowRunFilter
    from prefect.client.schemas.objects import FlowRun

FLOW = "cram"  # the flow of runs; a shared server may have others, which aren't cram's to clear
PAGE = 200  # the most runs that Prefect's server returns at once
AGE = re.compile(r"(\d{1,5})([hdw])")
UNITS = {"h": "hours", "d": "days", "w": "weeks"}


def moment(age: str) -> datetime:
    """The time this long ago, for an age such as `30d`, `12h` or `8w`. Raises InputError for anything else."""
    given = AGE.fullmatch(age.strip())
    if not given:
        raise InputError(f"--runs-older-than is {age!r}; expected a number of hours, days or weeks: 12h, 30d, 8w.")
    number, unit = given.groups()
    return datetime.now(UTC) - timedelta(**{UNITS[unit]: int(number)})


def database_bytes() -> int:
    """The bytes of this checkout's own database of Prefect; 0 if there is none."""
    size = 0
    for path in STATE.glob("prefect.db*"):
        with suppress(FileNotFoundError):  # the server has just removed it
            size += path.stat().st_size
    return size


def server_with_runs() -> str:
    """The address of the Prefect server to ask for old runs. Raises InputError if none answers."""
    url, why_not = look_for_server()
    if url is not None:
        return url
    if why_not:
        raise InputError(f"{why_not} Nothing was discarded.")
    raise InputError(
        "No Prefect server answers, so --runs-older-than can't list its runs. Start it with `make up`, then run again."
    )


class OldRuns:
    """The runs of cram at a Prefect server that ended before a given time."""

    def __init__(self, before: datetime, server: str):
        self.before = before
        self.server = server

    def report(self) -> int:
        """Print how many ended before that time, and how many that began before it haven't ended.

        Returns the first number.
        """
        with self.client() as client:
            ended = Counter(state_of(run) for run in pages(client, self.ended()))
            unended = sum(1 for _ in pages(client, self.unended()))
        when = f"{self.before.astimezone():%Y-%m-%d %H:%M}"
        states = ", ".join(f"{number:,} {state}" for state, number in ended.most_common())
        by_state = f" ({states})" if states else ""
        say(f"Runs at {self.server} that ended before {when}: {ended.total():,}{by_state}.")
        if unended:
            say(
                f"Runs that began before then and haven't ended: {unended:,}. They stay. If the machine of one was "
                "stopped, you can cancel it on its page."
            )
        return ended.total()

    def clear(self, number: int) -> None:
        """Delete the runs that ended, about `number` of them, with their artifacts, task runs and logs."""
        bar = tqdm(total=number, unit="run", disable=not sys.stderr.isatty(), leave=False)
        with bar, self.client() as client:
            for run in deletable(client, self.ended()):
                clear_run(client, run.id)
                bar.update()
        say(
            f"{counted(number, 'run')} cleared. The database's file keeps its size; later runs will use the space that "
            "is free in it."
        )

    def ended(self) -> "FlowRunFilter":
        """The filter for runs that ended before that time."""
        from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterEndTime
        from prefect.client.schemas.objects import TERMINAL_STATES

        return FlowRunFilter(state=of_types(TERMINAL_STATES), end_time=FlowRunFilterEndTime(before_=self.before))

    def unended(self) -> "FlowRunFilter":
        """The filter for runs that began before that time and haven't ended."""
        from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterStartTime
        from prefect.client.schemas.objects import TERMINAL_STATES, StateType

        others = set(StateType) - TERMINAL_STATES
        return FlowRunFilter(state=of_types(others), start_time=FlowRunFilterStartTime(before_=self.before))

    @contextmanager
    def client(self) -> "Iterator[SyncPrefectClient]":
        """Prefect's client of the server. Raises InputError if the server is lost or refuses a request."""
        import httpx
        from prefect.client.orchestration import get_client
        from prefect.settings import PREFECT_API_URL, temporary_settings

        try:
            with temporary_settings({PREFECT_API_URL: self.server}), get_client(sync_client=True) as client:
                yield client
        except httpx.HTTPError as error:
            raise InputError(
                f"The Prefect server at {self.server} did not answer as expected: {error or repr(error)}. Runs that "
                "were cleared stay cleared; run the same command again for the rest."
            ) from error


def of_types(types: set) -> object:
    """The filter for runs in states of these types."""
    from prefect.client.schemas.filters import FlowRunFilterState, FlowRunFilterStateType

    return FlowRunFilterState(type=FlowRunFilterStateType(any_=sorted(types)))


def page(client: "SyncPrefectClient", chosen: "FlowRunFilter", offset: int = 0) -> "list[FlowRun]":
    """The runs of cram's flow that match, oldest first, from `offset` on; at most PAGE of them."""
    from prefect.client.schemas.filters import FlowFilter, FlowFilterName
    from prefect.client.schemas.sorting import FlowRunSort

    flow = FlowFilter(name=FlowFilterName(any_=[FLOW]))
    sort = FlowRunSort.START_TIME_ASC
    return client.read_flow_runs(flow_filter=flow, flow_run_filter=chosen, sort=sort, limit=PAGE, offset=offset)


def pages(client: "SyncPrefectClient", chosen: "FlowRunFilter") -> "Iterator[FlowRun]":
    """All runs of cram's flow that match."""
    offset = 0
    runs = page(client, chosen)
    while runs:
        yield from runs
        offset += len(runs)
        runs = page(client, chosen, offset)


def deletable(client: "SyncPrefectClient", chosen: "FlowRunFilter") -> "Iterator[FlowRun]":
    """All runs of cram's flow that match, if each is deleted before the next is asked for."""
    runs = page(client, chosen)
    while runs:
        yield from runs
        runs = page(client, chosen)


def clear_run(client: "SyncPrefectClient", run: "UUID") -> None:
    """Delete a run, and before it its artifacts, which Prefect would keep though nobody finds them without the run."""
    from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId
    from prefect.exceptions import ObjectNotFound

    chosen = ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[run]))
    artifacts = client.read_artifacts(artifact_filter=chosen, limit=PAGE)
    while artifacts:
        for artifact in artifacts:
            with suppress(ObjectNotFound):  # somebody else has deleted it
                client.delete_artifact(artifact.id)
        artifacts = client.read_artifacts(artifact_filter=chosen, limit=PAGE)
    with suppress(ObjectNotFound):
        client.delete_flow_run(run)


def state_of(run: "FlowRun") -> str:
    """The name of a run's last state, such as `Completed`."""
    return run.state_name or "unknown"
