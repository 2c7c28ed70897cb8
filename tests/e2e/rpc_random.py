"""Random requests against every call of a real broker: `make fuzz-rpc`, and a smaller run in `make test`.

The broker may answer OK or a status with a sentence, whatever `rpc_requests.py` comes up with, and nothing else:

    never INTERNAL, UNKNOWN or DATA_LOSS, never a traceback, never a connection that breaks, never silence

At the end it is alive, a fresh topic works, and a topic that nobody touched has exactly its messages; also after a
restart. A seed repeats the requests; how they interleave is the machine's.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.message import Message

from pydanube.wire._pb.danube import DanubeApi_pb2 as api
from tests.e2e.processes import BrokerProcess
from tests.e2e.rpc_requests import Requests

CALL_SECONDS = 30.0
STREAM_SECONDS = 0.2
CONTROL_MESSAGES = 50
CONTROL = "/control/steady"
FORBIDDEN = ("INTERNAL", "UNKNOWN", "DATA_LOSS", "DEADLINE_EXCEEDED", "CANCELLED")
TRANSPORT = ("failed to connect", "socket closed", "connection reset", "stream removed", "broken pipe", "recvmsg")
EXPECTED_ERRORS = ("subscription blocked by poison",)  # what a policy asks for is no fault of the broker


@dataclass
class Report:
    count: int = 0
    codes: Counter[str] = field(default_factory=Counter)
    by_call: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)

    def note(self, call: str, code: str, sentence: str, *, stream: bool = False) -> None:
        self.count += 1
        self.codes[code] += 1
        self.by_call[call] += 1
        if code == "OK" or (stream and code in ("DEADLINE_EXCEEDED", "CANCELLED")):  # we are who leaves a stream
            return
        lowered = sentence.lower()
        why = None
        if code in FORBIDDEN:
            why = "is never an answer"
        elif "traceback" in lowered:
            why = "has a traceback"
        elif any(words in lowered for words in TRANSPORT):
            why = "is a broken connection"
        elif len(sentence) < 10:
            why = "has no sentence"
        if why is not None:
            self.violations.append(f"{call}: {code} {why}: {sentence[:300]!r}")


class Run:
    """Sends `count` random requests, `in_flight` at a time."""

    def __init__(self, broker: BrokerProcess, seed: int) -> None:
        self._servers = {"client": broker.client_port, "admin": broker.admin_port}
        self._requests = Requests(seed)
        self.report = Report()
        self._channels: dict[str, Any] = {}
        self._stalled_seconds = 0.0  # for so long nothing ran on this machine, we not either

    async def go(self, count: int, in_flight: int) -> Report:
        for server, port in self._servers.items():
            options = (("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1))
            self._channels[server] = grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options)
        remaining = iter(range(count))
        started = time.monotonic()

        async def work() -> None:
            for number in remaining:
                await self._one()
                if number and number % 20_000 == 0:
                    rate = number / (time.monotonic() - started)
                    print(f"{number:,} requests, {rate:,.0f}/s, {dict(self.report.codes)}", file=sys.stderr, flush=True)
                if len(self.report.violations) > 20:
                    return

        pulse = asyncio.create_task(self._feel_the_pulse())
        try:
            await asyncio.gather(*(work() for _ in range(in_flight)))
        finally:
            pulse.cancel()
            for channel in self._channels.values():
                await channel.close()
        return self.report

    async def _feel_the_pulse(self) -> None:
        while True:
            before = time.monotonic()
            await asyncio.sleep(0.1)
            self._stalled_seconds += max(0.0, time.monotonic() - before - 1.0)

    async def _one(self) -> None:
        server, method, data = self._requests.draw()
        path = f"/{method.containing_service.full_name}/{method.name}"
        if method.server_streaming:
            await self._stream(server, path, data)
            return
        call = self._channels[server].unary_unary(path, request_serializer=bytes, response_deserializer=bytes)
        stalled_before = self._stalled_seconds
        try:
            answer = await call(data, timeout=CALL_SECONDS)
        except grpc.aio.AioRpcError as error:
            code = error.code().name
            if code == "DEADLINE_EXCEEDED" and self._stalled_seconds > stalled_before:
                code = "OK"  # a virtual machine that was paused says nothing about the broker
            self.report.note(path, code, error.details() or "")
            return
        self.report.note(path, "OK", "")
        if method.name == "CreateProducer":
            topic = api.ProducerRequest.FromString(data).topic_name
            self._remember(self._requests.producers, (topic, api.ProducerResponse.FromString(answer).producer_id))
        elif method.name == "Subscribe":
            self._remember(self._requests.consumers, api.ConsumerResponse.FromString(answer).consumer_id)

    def _remember(self, ids: list[Any], given: Any) -> None:
        ids.append(given)
        if len(ids) > 200:
            del ids[0]

    async def _stream(self, server: str, path: str, data: bytes) -> None:
        call = self._channels[server].unary_stream(path, request_serializer=bytes, response_deserializer=bytes)
        stream = call(data, timeout=STREAM_SECONDS * (1 + self._requests.random.random()))
        try:
            async for _ in stream:
                if self._requests.random.random() < 0.2:
                    stream.cancel()
        except grpc.aio.AioRpcError as error:
            self.report.note(path, error.code().name, error.details() or "", stream=True)
        except asyncio.CancelledError:
            if not stream.cancelled():
                raise
            self.report.note(path, "CANCELLED", "", stream=True)
        else:
            self.report.note(path, "OK", "", stream=True)


# --- what must be true before and after ---------------------------------------------------------------


class Honest:
    """A client that does everything right."""

    def __init__(self, broker: BrokerProcess) -> None:
        self._channel = grpc.insecure_channel(f"127.0.0.1:{broker.client_port}")

    def __enter__(self) -> Honest:
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()

    def call(self, method: str, request: Message, answer: type[Message]) -> Any:
        path = f"/danube.{method}"
        call = self._channel.unary_unary(
            path, request_serializer=type(request).SerializeToString, response_deserializer=answer.FromString
        )
        return call(request, timeout=CALL_SECONDS)

    def subscribe(self, topic: str) -> int:
        request = api.ConsumerRequest(topic_name=topic, consumer_name="honest", subscription="honest")
        return int(self.call("ConsumerService/Subscribe", request, api.ConsumerResponse).consumer_id)

    def publish(self, topic: str, payloads: list[bytes]) -> None:
        created = self.call(
            "ProducerService/CreateProducer",
            api.ProducerRequest(producer_name="honest", topic_name=topic, dispatch_strategy=api.Reliable),
            api.ProducerResponse,
        )
        for payload in payloads:
            place = api.MsgID(producer_id=created.producer_id, topic_name=topic)
            message = api.StreamMessage(msg_id=place, payload=payload, producer_name="honest")
            self.call("ProducerService/SendMessage", message, api.MessageResponse)

    def receive(self, topic: str, consumer: int, count: int) -> list[tuple[int, bytes]]:
        """Offsets and payloads of `count` messages, each acknowledged."""
        stream = self._channel.unary_stream(
            "/danube.ConsumerService/ReceiveMessages",
            request_serializer=api.ReceiveRequest.SerializeToString,
            response_deserializer=api.StreamMessage.FromString,
        )(api.ReceiveRequest(consumer_id=consumer), timeout=CALL_SECONDS)
        received = []
        for message in stream:
            received.append((message.msg_id.topic_offset, message.payload))
            ack = api.AckRequest(msg_id=message.msg_id, subscription_name="honest")
            self.call("ConsumerService/Ack", ack, api.AckResponse)
            if len(received) == count:
                stream.cancel()
                break
        return received


def expected() -> list[tuple[int, bytes]]:
    return [(offset, f"control {offset}".encode()) for offset in range(CONTROL_MESSAGES)]


def prepare(broker: BrokerProcess) -> None:
    for namespace in ("control", "fuzz"):
        broker.admin("namespaces", "create", namespace)
    broker.admin("topics", "create", CONTROL, "--dispatch-strategy", "reliable")
    with Honest(broker) as client:
        client.subscribe(CONTROL)
        client.publish(CONTROL, [payload for _, payload in expected()])


def check_control(broker: BrokerProcess) -> None:
    """Everything from the beginning, as often as one likes."""
    assert broker.admin("subscriptions", "seek", CONTROL, "honest", "earliest") == "Goes on at offset 0\n"
    with Honest(broker) as client:
        assert client.receive(CONTROL, client.subscribe(CONTROL), CONTROL_MESSAGES) == expected()
    assert '"lag_messages": 0' in broker.admin("subscriptions", "lag", CONTROL, "honest", "-o", "json")


def check_fresh(broker: BrokerProcess, topic: str) -> None:
    broker.admin("topics", "create", topic, "--dispatch-strategy", "reliable")
    with Honest(broker) as client:
        consumer = client.subscribe(topic)
        client.publish(topic, [b"first", b"second"])
        assert client.receive(topic, consumer, 2) == [(0, b"first"), (1, b"second")]


def fuzz(broker: BrokerProcess, seed: int, count: int, in_flight: int) -> Report:
    """Raises if the broker did anything but answer."""
    prepare(broker)
    report = asyncio.run(Run(broker, seed).go(count, in_flight))
    what = f"seed {seed}: after {report.count} requests"
    if report.codes["DEADLINE_EXCEEDED"] and any("DEADLINE" in each for each in report.violations):
        what += f" the broker hangs here:\n{where_it_hangs(broker)}"
    assert not report.violations, f"{what}\n" + "\n".join([*report.violations, *complaints_of(broker)[:3]])
    assert broker.process is not None and broker.process.exit_code is None, f"{what} the broker is gone"
    check_control(broker)
    check_fresh(broker, "/control/fresh")
    assert broker.stop() == 0, what
    broker.start()
    banner = broker.output.read_text()
    assert "NOT open" not in banner, banner
    check_control(broker)
    check_fresh(broker, "/control/fresh-again")
    complaints = complaints_of(broker)
    assert not complaints, f"{what}, {len(complaints)} complaints, the first:\n" + "\n".join(complaints[:3])
    return report


def where_it_hangs(broker: BrokerProcess) -> str:
    """Ends the broker; Python says where it was."""
    assert broker.process is not None
    broker.process.send_signal(signal.SIGABRT)
    broker.process.wait()
    return broker.process.text().rpartition("Fatal Python error")[2]


def complaints_of(broker: BrokerProcess) -> list[str]:
    return [each for each in broker.errors() if not any(known in each for known in EXPECTED_ERRORS)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=500_000)
    parser.add_argument("--in-flight", type=int, default=32)
    options = parser.parse_args()
    print(f"seed {options.seed}, {options.count:,} requests, {options.in_flight} in flight", flush=True)
    with tempfile.TemporaryDirectory(prefix="danube-fuzz-") as directory, BrokerProcess(Path(directory)) as broker:
        report = fuzz(broker, options.seed, options.count, options.in_flight)
    print(f"{report.count:,} requests answered: {dict(report.codes.most_common())}")


if __name__ == "__main__":
    main()
