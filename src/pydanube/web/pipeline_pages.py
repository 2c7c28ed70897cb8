"""The page of declared pipelines: how each is doing, how fresh its result is, what went wrong last."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from starlette.requests import Request
from starlette.responses import Response

from pydanube.admin import calls, values
from pydanube.core.pipelines.status import Health
from pydanube.web.site import Site, form_of
from pydanube.web.views import Chip

KINDS: Final[Mapping[str, str]] = {
    Health.OK: "ok",
    Health.STALE: "warn",
    Health.FAILING: "bad",
    Health.UNSUPERVISED: "bad",
    Health.PAUSED: "idle",
    Health.UNKNOWN: "idle",
}


class PipelineLine(NamedTuple):
    """A row of the table. None: not known."""

    state: values.PipelineState
    chip: Chip
    fresh_seconds: float | None
    goal_seconds: int | None
    behind: int | None
    started_us: int | None
    ended_us: int | None
    next_us: int | None

    @classmethod
    def of(cls, state: values.PipelineState) -> PipelineLine:
        return cls(
            state,
            Chip(KINDS.get(state.health, "idle"), state.health),
            state.fresh_seconds if state.HasField("fresh_seconds") else None,
            state.freshness_goal_seconds if state.HasField("freshness_goal_seconds") else None,
            state.behind_messages if state.HasField("behind_messages") else None,
            state.started_us if state.HasField("started_us") else None,
            state.ended_us if state.HasField("ended_us") else None,
            state.next_us if state.HasField("next_us") else None,
        )

    @property
    def is_paused(self) -> bool:
        return self.state.health == Health.PAUSED


async def pipelines(site: Site, request: Request) -> Response:
    found = await site.gateway.ask(calls.list_pipelines())
    return site.show(
        request,
        "pipelines.html",
        active="pipelines",
        lines=[PipelineLine.of(each) for each in found.pipelines],
        unreadable=found.unreadable,
    )


async def pause(site: Site, request: Request) -> Response:
    form = await form_of(request)
    name, paused = request.path_params["name"], form.get("paused") == "yes"
    await site.gateway.ask(calls.pause_pipeline(name, paused))
    return site.back("/pipelines", f"{name} is {'paused' if paused else 'resumed'}")
