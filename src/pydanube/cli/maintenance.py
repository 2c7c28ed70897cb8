"""`danube admin brokers maintenance`: a broker is drained, its machine is worked on, it gets topics again.

danube admin brokers maintenance 4711                                      works on it until you press Enter
danube admin brokers maintenance 4711 --command 'ssh b2 apt upgrade -y'    runs that meanwhile
danube admin brokers maintenance 4711 --command 'ssh b2 reboot' --wait     and waits until it was gone and is back

    drain ─► no topic is left ─► the work ─► it is registered (again) ─► activate ─► it is active

Whatever ends it early leaves the broker drained, which is safe, and says so with the command that activates it: only
an operator ends what an operator ordered.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Annotated, Final, TypeVar

import typer
from google.protobuf.message import Message

from pydanube.admin import calls, values
from pydanube.cli.admin import ENDPOINT, brokers
from pydanube.cli.completion import broker_ids
from pydanube.cli.output import Output, OutputOption, print_fields
from pydanube.client.grpc.connection import CALL_SECONDS, BrokerRefused, GrpcCall, GrpcConnection
from pydanube.core.cluster.conditions import count
from pydanube.errors import ConfigError, DanubeError, Unreachable

M = TypeVar("M", bound=Message)

LOOK_SECONDS: Final = 0.5
STDERR: Final = 2
REASON: Final = "maintenance"


class MaintenanceEnded(DanubeError):
    """It does not go on: `why`. The broker is left as it is then, which is safe."""

    def __init__(self, broker_id: str, why: str) -> None:
        super().__init__(f"{why}. Nobody gives it topics until `danube admin brokers activate {broker_id}`")
        self.broker_id = broker_id
        self.why = why


class Operator:
    """Asks whichever broker answers: the one that is worked on may be the one that was named."""

    def __init__(self, broker_id: str, endpoint: str) -> None:
        self.broker_id = broker_id
        self._endpoints = [endpoint]

    async def drain(self, parallel_max: int, seconds: float) -> int:
        """How many topics left it. Raises MaintenanceEnded if some are still there."""
        await self.status()  # also learns whom else to ask
        deadline = time.monotonic() + seconds
        request = values.UnloadBrokerRequest(
            broker_id=self.broker_id, max_parallel=parallel_max, timeout_seconds=max(1, round(seconds))
        )
        found = await self._ask(calls.drain_broker(request), seconds + CALL_SECONDS)
        await self._until(
            lambda status: status == "drained",
            max(deadline - time.monotonic(), LOOK_SECONDS),
            lambda status: (
                f"broker {self.broker_id} is {status or 'not registered'} after {seconds:g} s and not empty: "
                + "; ".join(found.failed_topics or [f"{count(found.pending, 'topic')} still to be moved"])
                + ". It goes on moving them; run this again, or end it"
            ),
        )
        return found.total

    async def until_gone(self, seconds: float) -> None:
        await self._until(
            lambda status: status is None,
            seconds,
            lambda status: f"broker {self.broker_id} was not restarted within {seconds:g} s: it is still registered",
        )

    async def until_here(self, seconds: float) -> None:
        await self._until(
            lambda status: status is not None,
            seconds,
            lambda status: f"broker {self.broker_id} did not come back within {seconds:g} s",
        )

    async def activate(self) -> None:
        await self._ask(calls.activate_broker(self.broker_id, REASON))
        await self._until(
            lambda status: status == "active",
            CALL_SECONDS,
            lambda status: f"broker {self.broker_id} was activated and is {status or 'not registered'}",
        )

    async def status(self) -> str | None:
        """active, draining or drained; None if it is not registered."""
        listed = await self._ask(calls.list_brokers())
        others = [each.admin_addr for each in listed.brokers if each.broker_id != self.broker_id and each.admin_addr]
        self._endpoints = [*dict.fromkeys([*self._endpoints, *others])]
        return next((each.broker_status for each in listed.brokers if each.broker_id == self.broker_id), None)

    async def _until(
        self, true: Callable[[str | None], bool], seconds: float, otherwise: Callable[[str | None], str]
    ) -> None:
        """Raises MaintenanceEnded. A cluster that does not answer for a moment is asked again."""
        deadline = time.monotonic() + seconds
        status: str | None = None
        while True:
            try:
                status = await self.status()
                if true(status):
                    return
                why = otherwise(status)
            except (Unreachable, BrokerRefused) as error:
                why = str(error)
            if time.monotonic() >= deadline:
                raise MaintenanceEnded(self.broker_id, why)
            await asyncio.sleep(LOOK_SECONDS)

    async def _ask(self, call: GrpcCall[M], seconds: float = CALL_SECONDS) -> M:
        """Raises BrokerRefused, or Unreachable if no broker answers."""
        failure: DanubeError | None = None
        for endpoint in list(self._endpoints):
            try:
                async with GrpcConnection(endpoint, "--endpoint") as broker:
                    found = await broker.ask(call, seconds=seconds)
            except (Unreachable, BrokerRefused) as error:
                if isinstance(error, BrokerRefused) and error.code != "UNAVAILABLE":
                    raise
                failure = failure or error
                continue
            # Who answered is asked first the next time.
            self._endpoints = [endpoint, *(each for each in self._endpoints if each != endpoint)]
            return found
        assert failure is not None
        raise failure


@brokers.command("maintenance")
def maintenance(
    broker: Annotated[
        str,
        typer.Argument(metavar="BROKER", help="Its id: `brokers list` shows it.", autocompletion=broker_ids),
    ],
    command: Annotated[
        str | None,
        typer.Option(metavar="SHELL", help="Run this while the broker is empty, instead of waiting for Enter."),
    ] = None,
    wait: Annotated[
        bool,
        typer.Option("--wait", help="Wait until the broker was stopped and is back, instead of for Enter."),
    ] = False,
    max_parallel: Annotated[int, typer.Option(min=1, help="So many topics move at once.")] = 4,
    timeout_seconds: Annotated[
        int, typer.Option(min=1, help="How long each may take: to move the topics away, to stop, and to come back.")
    ] = 600,
    output: OutputOption = Output.table,
) -> None:
    """Drain a broker, wait while its machine is worked on, and activate it afterwards."""
    if command is None and not wait and not sys.stdin.isatty():
        raise ConfigError("--command", None, "a command, or --wait: here is no terminal on which to press Enter")
    operator = Operator(broker, ENDPOINT.get())
    say: Callable[[str], None] = print if output is Output.table else lambda text: None
    began = time.monotonic()
    try:
        topics = asyncio.run(operator.drain(max_parallel, float(timeout_seconds)))
        say(f"Broker {broker} is drained: {count(topics, 'topic')} moved to others.")
        _work(operator, command, say, wait=wait, seconds=float(timeout_seconds))
        asyncio.run(operator.until_here(float(timeout_seconds)))
        asyncio.run(operator.activate())
    except (KeyboardInterrupt, typer.Abort):
        print(f"danube: {MaintenanceEnded(broker, 'interrupted')}", file=sys.stderr)
        raise
    if output is Output.json:
        seconds = round(time.monotonic() - began, 3)
        print_fields({"broker_id": broker, "topics_moved": topics, "seconds": seconds, "state": "active"}, output)
        return
    print(f"Broker {broker} is active again. `danube admin brokers rebalance` brings topics back to it.")


def _work(operator: Operator, command: str | None, say: Callable[[str], None], *, wait: bool, seconds: float) -> None:
    """Returns when the machine may serve again. Raises MaintenanceEnded."""
    if command is not None:
        say(f"Running: {command}")
        # What it prints is for people: JSON on our stdout stays JSON.
        code = subprocess.run(command, shell=True, stdout=STDERR, check=False).returncode
        if code:
            raise MaintenanceEnded(operator.broker_id, f"the command ended with {code}")
    if wait:
        say("Waiting until it was stopped and is back.")
        asyncio.run(operator.until_gone(seconds))
    elif command is None:
        typer.prompt("Work on it now. Then press Enter", default="", show_default=False, prompt_suffix=" ", err=True)
