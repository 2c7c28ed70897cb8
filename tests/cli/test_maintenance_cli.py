"""`danube admin brokers maintenance`: a broker is emptied, worked on, and gets topics again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import pytest

from pydanube.cli import maintenance
from pydanube.cli.maintenance import MaintenanceEnded, Operator
from pydanube.core.names import TopicName
from pydanube.errors import Unreachable
from tests.cli.test_cluster_cli import Admin
from tests.harness.server_cluster import ServerCluster, clustered

TOPIC = TopicName("/default/orders")


# --- in a cluster -------------------------------------------------------------------------------------------------


@pytest.mark.slow
@clustered(2)
async def test_a_broker_is_empty_while_the_command_runs_and_active_afterwards(cluster: ServerCluster) -> None:
    await cluster.create(TOPIC, on=1)
    broker = cluster.node(1).id
    seen: list[str] = []
    told = cluster.node(2).cluster

    async def look() -> None:
        """What the cluster looks like when the command begins."""
        while not seen:
            state = told.state_of(broker)
            if state is not None and state.mode.value == "drained":
                seen.append(f"{state.mode.value}, {len(told.view.assigned.get(broker, ()))} topics")  # type: ignore[call-overload]
            await asyncio.sleep(0.01)

    looking = asyncio.create_task(look())
    found = await Admin(cluster, 1).json("brokers", "maintenance", broker, "--command", "sleep 0.3")
    await looking
    assert seen == ["drained, 0 topics"]
    assert (found["topics_moved"], found["state"]) == (1, "active")
    await cluster.until(lambda: told.state_of(broker).mode.value == "active")  # type: ignore[union-attr]
    assert told.state_of(broker).reason == "maintenance"  # type: ignore[union-attr]
    assert cluster.host(TOPIC) is cluster.node(2), "it comes back when the load is evened out"


@pytest.mark.slow
@clustered(2)
async def test_a_command_that_fails_leaves_the_broker_drained_and_says_how_to_go_on(cluster: ServerCluster) -> None:
    broker = cluster.node(2).id
    line = await Admin(cluster, 1).run("brokers", "maintenance", broker, "--command", "exit 3")
    assert line[0] == 1
    assert f"the command ended with 3. Nobody gives it topics until `danube admin brokers activate {broker}`" in line[2]
    await cluster.until(lambda: cluster.node(2).cluster.state_of(broker).mode.value == "drained")  # type: ignore[union-attr]


@pytest.mark.slow
@clustered(1)
async def test_what_cannot_be_done_is_refused_before_anything_is(
    cluster: ServerCluster,
) -> None:
    admin = Admin(cluster, 1)
    broker = cluster.node(1).id
    assert "no terminal on which to press Enter" in await admin.refused("brokers", "maintenance", broker)
    line = await admin.refused("brokers", "maintenance", broker, "--command", "true")
    assert "single broker cluster" in line
    assert "4711" in await admin.refused("brokers", "maintenance", 4711, "--command", "true")
    assert cluster.node(1).cluster.state_of(broker).mode.value == "active"  # type: ignore[union-attr]


# --- the waiting, on a script -------------------------------------------------------------------------------------


class Scripted(Operator):
    """The broker is what the script says, look by look; an error is raised."""

    def __init__(self, *script: str | Exception | None) -> None:
        super().__init__("7", "http://nowhere:1")
        self.script = list(script)

    async def status(self) -> str | None:
        now = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        if isinstance(now, Exception):
            raise now
        return now


@pytest.mark.parametrize(
    ("script", "step"),
    [
        (("drained", "drained", None), "until_gone"),
        (("drained", Unreachable("the broker", "it restarts"), None), "until_gone"),
        ((None, None, "drained"), "until_here"),
        ((None, Unreachable("the broker", "it restarts"), "drained"), "until_here"),
    ],
)
def test_a_broker_is_waited_for_until_it_is_gone_and_until_it_is_here(
    script: Sequence[str | Exception | None], step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(maintenance, "LOOK_SECONDS", 0.0)
    operator = Scripted(*script)
    wait: Callable[[float], object] = getattr(operator, step)
    asyncio.run(wait(5.0))  # type: ignore[arg-type]
    assert len(operator.script) == 1


def test_a_broker_that_does_not_come_back_in_time_stays_drained_and_that_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(maintenance, "LOOK_SECONDS", 0.0)
    with pytest.raises(MaintenanceEnded, match=r"did not come back within 0 s\. Nobody gives it topics until"):
        asyncio.run(Scripted(None).until_here(0.0))
    with pytest.raises(MaintenanceEnded, match="was not restarted within 0 s: it is still registered"):
        asyncio.run(Scripted("drained").until_gone(0.0))
