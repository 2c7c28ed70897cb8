"""A supervisor at a real broker, over the wire: what its children come to is what `danube pipeline status` says."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from pydanube.admin import calls
from pydanube.admin.gateway import Gateway
from pydanube.cli.pipelines import BrokerDesk, fields_of
from pydanube.pipeline.supervisor import Supervisor
from pydanube.testing.brokers import TestBroker
from tests.pipeline.test_supervisor import FAKE

pytestmark = pytest.mark.slow


async def until(gateway: Gateway, **wanted: object) -> dict[str, object]:
    async with asyncio.timeout(20):
        while True:
            [state] = (await gateway.ask(calls.list_pipelines("orders"))).pipelines
            found = fields_of(state)
            if {name: found[name] for name in wanted} == wanted:
                return found
            await asyncio.sleep(0.02)


def test_a_pipeline_is_run_changed_failed_and_deleted_as_it_is_ordered(tmp_path: Path) -> None:
    def declared(do: str) -> str:
        alone = {"do": do, "alone": str(tmp_path / do)}
        return json.dumps({"name": "orders", "job": "lake", "follow": "30s", "freshness": "1m", "settings": alone})

    async def body() -> None:
        async with TestBroker(memory=True) as broker:
            gateway = Gateway(broker.admin_url, cache_seconds=0.0)
            stopping = asyncio.Event()
            desk = BrokerDesk(gateway, "here")
            running = Supervisor(desk, name="here", runs_max=2, command=FAKE, list_seconds=0.1, tick_seconds=0.05)
            task = asyncio.create_task(running.run(stopping))
            try:
                await gateway.ask(calls.apply_pipeline("orders", declared("hangs")))
                found = await until(gateway, state="running", behind_messages=1)
                assert (found["health"], found["supervisor"], found["quarantined"]) == ("ok", "here", 2)
                await gateway.ask(calls.apply_pipeline("orders", declared("refused")))
                found = await until(gateway, health="failing")
                assert "from_env" in str(found["error"]) and found["outcome"] == "refused"
                await gateway.ask(calls.pause_pipeline("orders", paused=True))
                await until(gateway, health="paused", state="paused")
                await gateway.ask(calls.delete_pipeline("orders"))
                assert not (await gateway.ask(calls.list_pipelines())).pipelines
            finally:
                stopping.set()
                await task
                await gateway.close()

    asyncio.run(body())
