"""Declared pipelines over the admin port: kept, listed with how they are doing, and claimed by one supervisor each."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from grpc import StatusCode

from pydanube.broker import pipelines
from pydanube.broker.pipelines import PipelineDesk
from pydanube.core import keys
from pydanube.core.pipelines.status import PipelineState, PipelineStatus, RunOutcome
from pydanube.ports import Compare, Put
from pydanube.stores.metadata.memory import MemoryMetadataStore
from pydanube.stores.work.memory_clock import LoopClock
from pydanube.wire._pb.pydanube import pipelines_pb2 as pb
from pydanube.wire._pb.pydanube import status_pb2
from tests.harness.brokers import BrokerFixture, simulated
from tests.harness.servers import Calls, refused, served

ORDERS: dict[str, Any] = {
    "name": "orders",
    "job": "lake",
    "follow": "30s",
    "freshness": "1m",
    "settings": {"topic": "/default/orders", "target": "/lake"},
}


async def apply(calls: Calls, **change: Any) -> pb.ApplyPipelineResponse:
    values = {**ORDERS, **change}
    request = pb.ApplyPipelineRequest(name=values["name"], declaration=json.dumps(values))
    found: pb.ApplyPipelineResponse = await calls.pipelines.ApplyPipeline(request)
    return found


async def one(calls: Calls, name: str = "orders") -> pb.PipelineState:
    [found] = (await calls.pipelines.ListPipelines(pb.ListPipelinesRequest(name=name))).pipelines
    state: pb.PipelineState = found
    return state


async def join(calls: Calls) -> int:
    return int((await calls.pipelines.JoinSupervisor(pb.JoinSupervisorRequest(supervisor="a"))).lease)


async def claim(calls: Calls, lease: int, name: str = "orders") -> pb.ClaimPipelineResponse:
    request = pb.ClaimPipelineRequest(lease=lease, name=name, supervisor=f"supervisor {lease}")
    found: pb.ClaimPipelineResponse = await calls.pipelines.ClaimPipeline(request)
    return found


async def report(calls: Calls, lease: int, status: PipelineStatus) -> bool:
    request = pb.ReportPipelineRequest(lease=lease, name="orders", status=status.to_bytes().decode())
    return bool((await calls.pipelines.ReportPipeline(request)).is_held)


@served()
async def test_a_pipeline_is_declared_listed_paused_and_deleted(calls: Calls) -> None:
    assert (await apply(calls)).outcome == "created"
    assert (await apply(calls)).outcome == "unchanged"
    revision = (await one(calls)).revision
    assert (await apply(calls, freshness="2m")).outcome == "changed"
    state = await one(calls)
    assert state.revision > revision and state.freshness_goal_seconds == 120 and state.when == "follows, every 30s"
    assert json.loads(state.declaration)["settings"] == ORDERS["settings"] and not state.HasField("started_us")
    pause = pb.PausePipelineRequest(name="orders", paused=True)
    assert (await calls.pipelines.PausePipeline(pause)).changed
    assert not (await calls.pipelines.PausePipeline(pause)).changed
    assert (await one(calls)).health == "paused"
    assert (await apply(calls)).paused, "to apply a file that does not say so resumes nothing"
    assert not (await apply(calls, paused=False)).paused
    await calls.pipelines.DeletePipeline(pb.DeletePipelineRequest(name="orders"))
    assert not (await calls.pipelines.ListPipelines(pb.ListPipelinesRequest())).pipelines
    events = (await calls.status.ListEvents(status_pb2.ListEventsRequest())).events
    told = [each.sentence for each in events]
    assert "DeletePipeline name=orders" in told or not told  # written behind the answers


@served()
async def test_what_is_wrong_with_a_declaration_is_said_and_nothing_is_stored(calls: Calls) -> None:
    for change, said in (
        ({"freshnes": "1m"}, "did you mean freshness?"),
        ({"settings": {"token": "s3cr3t"}}, "from_env"),
        ({"cron": "x", "follow": None}, "five fields"),
        ({"name": "no/slash"}, "small letters"),
    ):
        values = {**ORDERS, **change}
        request = pb.ApplyPipelineRequest(name=values["name"], declaration=json.dumps(values))
        code, sentence = await refused(calls.pipelines.ApplyPipeline(request))
        assert code is StatusCode.INVALID_ARGUMENT and said in sentence and "s3cr3t" not in sentence
    for text in ("{", "[]", '"x"', "{}"):
        found = await refused(calls.pipelines.ApplyPipeline(pb.ApplyPipelineRequest(name="x", declaration=text)))
        assert found.code is StatusCode.INVALID_ARGUMENT
    assert not (await calls.pipelines.ListPipelines(pb.ListPipelinesRequest())).pipelines


@served()
async def test_a_pipeline_that_is_not_there_is_said(calls: Calls) -> None:
    for call in (
        calls.pipelines.DeletePipeline(pb.DeletePipelineRequest(name="x")),
        calls.pipelines.PausePipeline(pb.PausePipelineRequest(name="x", paused=True)),
        calls.pipelines.ListPipelines(pb.ListPipelinesRequest(name="x")),
    ):
        assert await refused(call) == (
            StatusCode.NOT_FOUND,
            "there is no pipeline x: `danube pipeline list` shows all",
        )


@served()
async def test_of_two_supervisors_one_has_a_pipeline_and_only_that_one_may_report(calls: Calls) -> None:
    await apply(calls)
    mine, other = await join(calls), await join(calls)
    assert (await claim(calls, mine)).granted
    assert (await claim(calls, mine)).granted, "an answer that was lost may be asked for again"
    refusal = await claim(calls, other)
    assert not refusal.granted and refusal.holder == f"supervisor {mine}"
    running = PipelineStatus(state=PipelineState.RUNNING, supervisor="a", started_us=5, runs=1)
    assert await report(calls, mine, running) and not await report(calls, other, running)
    state = await one(calls)
    assert (state.state, state.supervisor, state.started_us) == ("running", f"supervisor {mine}", 5)
    await calls.pipelines.ReleasePipeline(pb.ReleasePipelineRequest(lease=other, name="orders"))
    assert not (await claim(calls, other)).granted, "who has it not cannot give it back"
    await calls.pipelines.ReleasePipeline(pb.ReleasePipelineRequest(lease=mine, name="orders"))
    granted = await claim(calls, other)
    assert granted.granted and PipelineStatus.from_bytes(granted.status.encode()) == running
    assert not await report(calls, mine, running), "and who had it before writes nothing any more"


@served()
async def test_a_status_that_no_list_could_carry_is_refused_and_pipelines_stay_listed(calls: Calls) -> None:
    await apply(calls)
    mine = await join(calls)
    await claim(calls, mine)
    good = PipelineStatus(state=PipelineState.RUNNING, runs=1)
    assert await report(calls, mine, good)
    wrong: list[dict[str, Any]] = [
        {"runs": 10**30},
        {"failures": 2**32},
        {"messages": -1},
        {"restarts": None},
        {"started_us": 2**63},
        {"error": "\ud800"},
    ]
    for each in wrong:
        status = json.dumps({**json.loads(good.to_bytes()), **each})
        request = pb.ReportPipelineRequest(lease=mine, name="orders", status=status)
        assert (await refused(calls.pipelines.ReportPipeline(request))).code is StatusCode.INVALID_ARGUMENT, each
        assert (await one(calls)).state == "running"
    key = keys.pipeline_status("orders")
    await calls.broker.pipelines._metadata.transact([], [Put(key, status.encode())])
    assert (await one(calls)).health == "unknown", "nor does one that is stored break the list"


@served()
async def test_nothing_is_claimed_without_a_lease_that_ends(calls: Calls) -> None:
    await apply(calls)
    assert (await refused(claim(calls, 0))).code is StatusCode.INVALID_ARGUMENT
    assert (await claim(calls, await join(calls))).granted


@served()
async def test_when_a_supervisor_leaves_or_dies_its_pipelines_are_free(calls: Calls) -> None:
    await apply(calls)
    mine, other = await join(calls), await join(calls)
    await claim(calls, mine)
    assert (await calls.pipelines.RenewSupervisor(pb.RenewSupervisorRequest(lease=mine))).lasts
    await calls.pipelines.LeaveSupervisor(pb.LeaveSupervisorRequest(lease=mine))
    assert not (await calls.pipelines.RenewSupervisor(pb.RenewSupervisorRequest(lease=mine))).lasts
    assert not (await claim(calls, mine)).granted, "under a lease that has ended nothing is claimed"
    assert (await claim(calls, other)).granted


@served()
async def test_a_report_after_the_deletion_brings_nothing_back(calls: Calls) -> None:
    await apply(calls)
    mine = await join(calls)
    await claim(calls, mine)
    await calls.pipelines.DeletePipeline(pb.DeletePipelineRequest(name="orders"))
    assert await report(calls, mine, PipelineStatus(failures=3))
    await apply(calls)
    assert (await one(calls)).failures == 0 and (await one(calls)).supervisor, "its child may still be there"
    found = await refused(
        calls.pipelines.ReportPipeline(pb.ReportPipelineRequest(lease=mine, name="orders", status='{"runs":"x"}'))
    )
    assert found.code is StatusCode.INVALID_ARGUMENT


@served()
async def test_what_is_wrong_with_pipelines_stands_in_the_status_and_in_metrics(calls: Calls) -> None:
    await apply(calls)
    mine = await join(calls)
    await claim(calls, mine)
    await report(
        calls,
        mine,
        PipelineStatus(
            state=PipelineState.RUNNING, fresh_us=calls.broker.clock.time_us() - 90_000_000, quarantined_total=7
        ),
    )
    await calls.servers._observer.look()
    found = (await calls.status.ClusterStatus(status_pb2.ClusterStatusRequest())).conditions
    [stale] = found
    assert stale.name == "DanubePipelineStale" and stale.subject == "orders"
    assert "90 s old" in stale.sentence and "60 s" in stale.sentence
    text = calls.broker.telemetry.snapshot().text().decode()
    assert 'danube_pipeline_health{pipeline="orders",health="stale"' in text
    assert 'danube_pipeline_quarantined_total{pipeline="orders"' in text
    assert "danube_pipeline_behind_messages{" not in text, "what is not known has no number"


@simulated
async def test_declarations_outlast_the_broker_and_claims_of_a_silent_supervisor_do_not() -> None:
    host = BrokerFixture()
    broker = await host.boot()
    await broker.pipelines.apply(ORDERS)
    lease = await broker.pipelines.join()
    assert (await broker.pipelines.claim(lease, "orders", "a")).granted
    host.kill()
    broker = await host.boot()
    [known] = (await broker.pipelines.list()).pipelines
    assert known.holder == "a"
    await asyncio.sleep(pipelines.TTL_SECONDS + 1)
    [known] = (await broker.pipelines.list()).pipelines
    assert known.holder == "" and not await broker.pipelines.renew(lease)
    await broker.stop()


@simulated
async def test_a_declaration_of_a_newer_version_is_counted_and_left_alone() -> None:
    desk = PipelineDesk(MemoryMetadataStore(clock := LoopClock()), clock)
    await desk.apply(ORDERS)
    await desk._metadata.transact([], [Put(keys.pipeline_declaration("new"), b'{"name":"new","shards":3}')])
    found = await desk.list()
    assert [each.name for each in found.pipelines] == ["orders"] and found.unreadable == 1


@simulated
async def test_two_operators_at_the_same_moment_lose_no_change() -> None:
    desk = PipelineDesk(MemoryMetadataStore(clock := LoopClock()), clock)
    outcomes = await asyncio.gather(*(desk.apply({**ORDERS, "freshness": f"{n}m"}) for n in range(1, 4)))
    assert [each.outcome for each in outcomes].count("created") == 1
    await asyncio.gather(desk.pause("orders", True), desk.apply({**ORDERS, "job": "stats"}))
    [known] = (await desk.list()).pipelines
    assert known.declaration.paused and known.declaration.job == "stats"


def test_planted_a_claim_that_compares_nothing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipelines, "Compare", lambda key, _: Compare("/nothing", 0))
    with pytest.raises(AssertionError):
        test_of_two_supervisors_one_has_a_pipeline_and_only_that_one_may_report()


def test_outcomes_have_the_words_that_the_protocol_names() -> None:
    assert {each.value for each in RunOutcome} == {"good", "not_good", "failed", "refused", "stopped", "lost"}
