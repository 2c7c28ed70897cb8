"""`pydanube.admin.v1.Pipelines`: declared pipelines, and what their supervisors ask. Any broker answers."""

from __future__ import annotations

import json

from pydanube.api.grpc.adapter import RpcRefusal
from pydanube.broker.pipelines import TTL_SECONDS, PipelineDesk
from pydanube.core.pipelines.conditions import KnownPipeline
from pydanube.core.pipelines.declaration import pipeline_name
from pydanube.core.pipelines.status import PipelineStatus
from pydanube.ports import Clock
from pydanube.wire._pb.pydanube import pipelines_pb2 as pb
from pydanube.wire.status import Code


class PipelineCalls:
    def __init__(self, desk: PipelineDesk, clock: Clock) -> None:
        self._desk = desk
        self._clock = clock

    async def ApplyPipeline(self, request: pb.ApplyPipelineRequest) -> pb.ApplyPipelineResponse:
        try:
            values = json.loads(request.declaration)
        except ValueError:
            raise RpcRefusal(Code.INVALID_ARGUMENT, "the declaration is no JSON") from None
        if not isinstance(values, dict) or values.get("name") != request.name:
            raise RpcRefusal(Code.INVALID_ARGUMENT, "the declaration is names and values, `name` as in the request")
        found = await self._desk.apply(values)
        return pb.ApplyPipelineResponse(outcome=found.outcome, paused=found.declaration.paused)

    async def ListPipelines(self, request: pb.ListPipelinesRequest) -> pb.ListPipelinesResponse:
        found = await self._desk.list(request.name)
        if request.name and not found.pipelines and not found.unreadable:
            raise _unknown(request.name)
        now_us = self._clock.time_us()
        return pb.ListPipelinesResponse(
            pipelines=[state_message(each, now_us) for each in found.pipelines], unreadable=found.unreadable
        )

    async def DeletePipeline(self, request: pb.DeletePipelineRequest) -> pb.DeletePipelineResponse:
        if not await self._desk.delete(request.name):
            raise _unknown(request.name)
        return pb.DeletePipelineResponse()

    async def PausePipeline(self, request: pb.PausePipelineRequest) -> pb.PausePipelineResponse:
        changed = await self._desk.pause(request.name, request.paused)
        if changed is None:
            raise _unknown(request.name)
        return pb.PausePipelineResponse(changed=changed)

    # --- for supervisors ------------------------------------------------------------------------------------

    async def JoinSupervisor(self, request: pb.JoinSupervisorRequest) -> pb.JoinSupervisorResponse:
        return pb.JoinSupervisorResponse(lease=await self._desk.join(), ttl_seconds=TTL_SECONDS)

    async def RenewSupervisor(self, request: pb.RenewSupervisorRequest) -> pb.RenewSupervisorResponse:
        return pb.RenewSupervisorResponse(lasts=await self._desk.renew(request.lease))

    async def LeaveSupervisor(self, request: pb.LeaveSupervisorRequest) -> pb.LeaveSupervisorResponse:
        await self._desk.leave(request.lease)
        return pb.LeaveSupervisorResponse()

    async def ClaimPipeline(self, request: pb.ClaimPipelineRequest) -> pb.ClaimPipelineResponse:
        found = await self._desk.claim(request.lease, request.name, request.supervisor)
        return pb.ClaimPipelineResponse(
            granted=found.granted, holder=found.holder, status=(found.status or b"").decode("utf-8", "replace")
        )

    async def ReleasePipeline(self, request: pb.ReleasePipelineRequest) -> pb.ReleasePipelineResponse:
        await self._desk.release(request.lease, request.name)
        return pb.ReleasePipelineResponse()

    async def ReportPipeline(self, request: pb.ReportPipelineRequest) -> pb.ReportPipelineResponse:
        held = await self._desk.report(request.lease, request.name, request.status.encode())
        return pb.ReportPipelineResponse(is_held=held)


def _unknown(name: str) -> RpcRefusal:
    return RpcRefusal(Code.NOT_FOUND, f"there is no pipeline {pipeline_name(name)}: `danube pipeline list` shows all")


def state_message(known: KnownPipeline, now_us: int) -> pb.PipelineState:
    declaration, status, found = known.declaration, known.status or PipelineStatus(), known.verdict(now_us)
    return pb.PipelineState(
        name=known.name,
        job=declaration.job,
        when=declaration.when,
        health=found.health.value,
        sentence=found.sentence,
        state=status.state.value if known.status is not None else "",
        supervisor=known.holder,
        fresh_seconds=found.fresh_seconds,
        freshness_goal_seconds=declaration.freshness_seconds,
        behind_messages=status.behind_messages,
        messages=status.messages,
        quarantined=status.quarantined,
        quarantined_total=status.quarantined_total,
        failures=status.failures,
        restarts=status.restarts,
        runs=status.runs,
        started_us=status.started_us,
        ended_us=status.ended_us,
        good_us=status.good_us,
        next_us=status.next_us,
        outcome=status.outcome.value if status.outcome is not None else "",
        error=status.error,
        declaration=json.dumps(declaration.to_json(), ensure_ascii=False),
        revision=known.revision,
    )
