"""`cram gc --runs-older-than`: which runs Prefect's database loses, and with what."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest
from chain import chain, cram, refusal_of
from prefect import Flow
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import ArtifactCreate
from prefect.client.schemas.objects import FlowRun, State
from prefect.settings import PREFECT_API_URL
from prefect.states import Cancelled, Completed, Crashed, Failed, Running

from flows.cli import old_runs
from flows.cli.old_runs import OldRuns
from flows.cram import cram as run_flow
from flows.study import study
from model.errors import InputError
from tasks.store.artifacts import artifacts_of

ENDS = (Completed, Failed, Crashed, Cancelled)


@pytest.fixture
def client(prefect_server: None) -> Iterator[SyncPrefectClient]:
    with get_client(sync_client=True) as made:
        for run in made.read_flow_runs():
            made.delete_flow_run(run.id)
        yield made


def begun(client: SyncPrefectClient, name: str, *states: State) -> FlowRun:
    """A flow run, with an artifact, that went through these states."""
    run = client.create_flow_run(Flow(lambda: None, name=name), state=Running())
    for state in states:
        client.set_flow_run_state(run.id, state, force=True)
    client.create_artifact(ArtifactCreate(key="filter-table", type="markdown", data="text", flow_run_id=run.id))
    return run


def left(client: SyncPrefectClient) -> tuple[set, set]:
    """The runs that are there, and the runs that artifacts belong to."""
    return {run.id for run in client.read_flow_runs()}, {each.flow_run_id for each in client.read_artifacts()}


def test_ended_runs_of_cram_go_with_their_artifacts_if_yes_is_said_and_others_stay(client, store, monkeypatch):
    monkeypatch.setattr(old_runs, "PAGE", 3)
    stay = {begun(client, "other", Completed()).id, begun(client, "cram").id}
    ended = {begun(client, "cram", kind()).id for kind in ENDS}
    young = OldRuns(datetime.now(UTC) - timedelta(hours=1), PREFECT_API_URL.value())
    assert young.report() == 0
    young.clear(0)
    shown = cram("gc", "--runs-older-than", "0h")
    assert all(f"1 {kind().name}" in shown for kind in ENDS)
    assert "haven't ended: 1." in shown
    assert left(client)[0] >= stay | ended
    assert f"{len(ENDS)} runs cleared." in cram("gc", "--runs-older-than", "0h", "--yes")
    runs, owners = left(client)
    assert runs == stay
    assert owners >= stay, "others of this server may be there too"
    assert not owners & ended


def test_both_flows_are_found_by_their_name():
    assert {run_flow.name, study.name} == {old_runs.FLOW}


@pytest.mark.parametrize("age", ["", "30", "d", "-1d", "1.5d", "30 days", "30m", "999999w"])
def test_an_age_is_a_number_with_a_unit(age: str):
    with pytest.raises(InputError, match="--runs-older-than"):
        old_runs.moment(age)


def test_an_age_is_counted_back_from_now():
    for age, hours in (("12h", 12), ("30d", 720), ("8w", 1344)):
        assert abs(datetime.now(UTC) - old_runs.moment(age) - timedelta(hours=hours)) < timedelta(minutes=1)


def test_without_a_server_nothing_is_discarded(store, monkeypatch: pytest.MonkeyPatch):
    made = chain(1)
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    assert "make up" in refusal_of("gc", "--keep", "0", "--yes", "--runs-older-than", "30d")
    assert set(artifacts_of("")) == set(made)


def test_no_advice_starts_a_server_where_another_checkouts_has_the_port(store, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(old_runs, "look_for_server", lambda: (None, "Another checkout's server answers."))
    with pytest.raises(InputError, match="Another checkout's") as refused:
        old_runs.server_with_runs()
    assert "make up" not in str(refused.value)
