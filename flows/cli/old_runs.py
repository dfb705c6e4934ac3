"""Old runs in the database of a Prefect server: for `cram gc`, which lists and clears them by Prefect's client."""

import re
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from tqdm import tqdm

from flows.cli.common import say
from flows.cli.server import sought
from model.errors import InputError
from model.wording import counted
from tasks.store.home import STATE

if TYPE_CHECKING:
    from uuid import UUID

    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.filters import FlowRunFilter
    from prefect.client.schemas.objects import FlowRun

FLOW = "cram"  # of runs and studies; other flows of a shared server are not cram's to clear
PAGE = 200  # the most that Prefect's server returns at once
AGE = re.compile(r"(\d{1,5})([hdw])")
UNITS = {"h": "hours", "d": "days", "w": "weeks"}


def moment(age: str) -> datetime:
    """The time that was so long ago: `30d`, `12h`, `8w`. Raises InputError for anything else."""
    if not (given := AGE.fullmatch(age.strip())):
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
    """The address of the Prefect server whose old runs are meant. Raises InputError if none answers."""
    url, why = sought()
    if url is None:
        none = (
            "No Prefect server answers. --runs-older-than asks it for its runs; start it by `make up`, then run again."
        )
        raise InputError(f"{why} Nothing was discarded." if why else none)
    return url


class OldRuns:
    """The runs of cram at a Prefect server that ended before some time."""

    def __init__(self, before: datetime, server: str):
        self.before = before
        self.server = server

    def report(self) -> int:
        """Print how many there are, and how many that began before then have not ended; returns the first number."""
        with self.client() as client:
            ended = Counter(state_of(run) for run in pages(client, self.ended()))
            unended = sum(1 for _ in pages(client, self.unended()))
        when = f"{self.before.astimezone():%Y-%m-%d %H:%M}"
        states = ", ".join(f"{number:,} {state}" for state, number in ended.most_common())
        say(f"Runs at {self.server} that ended before {when}: {ended.total():,}{f' ({states})' if states else ''}.")
        if unended:
            say(
                f"Not ended, though begun before then: {unended:,}. They stay; those whose machine stopped can be "
                "cancelled on their pages."
            )
        return ended.total()

    def clear(self, number: int) -> None:
        """Delete them, about so many, with their artifacts, task runs and logs; print how many."""
        bar = tqdm(total=number, unit="run", disable=not sys.stderr.isatty(), leave=False)
        with bar, self.client() as client:
            while runs := page(client, self.ended()):
                for run in runs:
                    clear_run(client, run.id)
                    bar.update()
        say(f"Cleared: {counted(number, 'run')}. The database's file stays as large; later runs fill its free space.")

    def ended(self) -> "FlowRunFilter":
        """What matches them."""
        from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterEndTime
        from prefect.client.schemas.objects import TERMINAL_STATES

        return FlowRunFilter(state=of_types(TERMINAL_STATES), end_time=FlowRunFilterEndTime(before_=self.before))

    def unended(self) -> "FlowRunFilter":
        """What matches runs that began as long ago, and have not ended."""
        from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterStartTime
        from prefect.client.schemas.objects import TERMINAL_STATES, StateType

        others = set(StateType) - TERMINAL_STATES
        return FlowRunFilter(state=of_types(others), start_time=FlowRunFilterStartTime(before_=self.before))

    @contextmanager
    def client(self) -> "Iterator[SyncPrefectClient]":
        """Prefect's client of the server. Raises InputError if the server is lost or refuses something."""
        import httpx
        from prefect.client.orchestration import get_client
        from prefect.settings import PREFECT_API_URL, temporary_settings

        try:
            with temporary_settings({PREFECT_API_URL: self.server}), get_client(sync_client=True) as client:
                yield client
        except httpx.HTTPError as error:
            raise InputError(
                f"The Prefect server at {self.server} did not answer as expected: {error or repr(error)}. What was "
                "cleared stays cleared; run the same command again."
            ) from error


def of_types(types: set) -> object:
    """The filter for runs in states of these types."""
    from prefect.client.schemas.filters import FlowRunFilterState, FlowRunFilterStateType

    return FlowRunFilterState(type=FlowRunFilterStateType(any_=sorted(types)))


def page(client: "SyncPrefectClient", chosen: "FlowRunFilter", offset: int = 0) -> "list[FlowRun]":
    """The runs of cram's flow that match, the oldest first, from the one at `offset` on; at most PAGE."""
    from prefect.client.schemas.filters import FlowFilter, FlowFilterName
    from prefect.client.schemas.sorting import FlowRunSort

    flow = FlowFilter(name=FlowFilterName(any_=[FLOW]))
    sort = FlowRunSort.START_TIME_ASC
    return client.read_flow_runs(flow_filter=flow, flow_run_filter=chosen, sort=sort, limit=PAGE, offset=offset)


def pages(client: "SyncPrefectClient", chosen: "FlowRunFilter") -> "Iterator[FlowRun]":
    """All runs of cram's flow that match."""
    offset = 0
    while runs := page(client, chosen, offset):
        yield from runs
        offset += len(runs)


def clear_run(client: "SyncPrefectClient", run: "UUID") -> None:
    """Delete a run; its artifacts first, which Prefect would leave, and which nobody finds without the run."""
    from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId
    from prefect.exceptions import ObjectNotFound

    chosen = ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[run]))
    while found := client.read_artifacts(artifact_filter=chosen, limit=PAGE):
        for artifact in found:
            with suppress(ObjectNotFound):  # someone else was faster
                client.delete_artifact(artifact.id)
    with suppress(ObjectNotFound):
        client.delete_flow_run(run)


def state_of(run: "FlowRun") -> str:
    """The name of a run's last state, such as `Completed`."""
    return run.state_name or "unknown"
