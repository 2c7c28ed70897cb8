"""TLS on the native port: who gets in, who does not, and what each of them is told. Nobody waits for a timeout."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import uvloop

import pydanube
from pydanube.api.tls import server_context
from pydanube.config.stream import StreamConfig, StreamLimits
from pydanube.errors import ConfigError, DanubeError, DeadlineExceeded, ProtocolViolation
from pydanube.testing.brokers import TestBroker
from tests.harness.certificates import Authority
from tests.support import run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(60)]

TOPIC = "/default/orders"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tls")


@pytest.fixture(scope="module")
def authority(place: Path) -> Authority:
    return Authority(place)


@pytest.fixture(scope="module")
def stranger(place: Path) -> Authority:
    """Another authority, whom nobody trusts."""
    return Authority(place, "stranger")


def config_of(authority: Authority, **more: Any) -> StreamConfig:
    signed = authority.sign("broker")
    return StreamConfig(cert_file=signed.cert_file, key_file=signed.key_file, **more)


async def sends_and_receives(client: pydanube.Client) -> bool:
    async with client.producer(TOPIC) as producer:
        sent = await producer.send(b"hello")
    async with client.consumer(TOPIC, subscription="s", start=sent.offset) as consumer:
        message = await consumer.receive(timeout=10)
        await message.ack()
        await consumer.flush()
    await client.unsubscribe(TOPIC, "s")
    return (message.payload, message.offset) == (b"hello", sent.offset)


async def refusal(url: str, **options: Any) -> DanubeError:
    """What connecting fails with. Five seconds are much more than it takes."""
    async with asyncio.timeout(5):
        with pytest.raises(DanubeError) as caught:
            async with pydanube.connect(url, timeout=1, **options):
                pass
    return caught.value


Body = Callable[[TestBroker], Awaitable[None]]


def served(config: StreamConfig, body: Body, *, loop: str = "asyncio") -> None:
    """Runs `body` beside a broker with this server."""

    async def inside() -> None:
        async with TestBroker(memory=True, stream=config) as broker:
            await body(broker)

    if loop == "uvloop":
        uvloop.run(inside())
    else:
        run(inside())


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_a_client_that_trusts_the_authority_works_as_on_a_plain_port(authority: Authority, loop: str) -> None:
    async def body(broker: TestBroker) -> None:
        assert broker.url.startswith("danube+tls://127.0.0.1:")
        async with pydanube.connect(broker.url, tls=authority.trusted()) as client:
            assert await sends_and_receives(client)
            assert (await client.lookup(TOPIC)).stream_url == broker.url, "others are sent to the same server"

    served(config_of(authority), body, loop=loop)


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_large_batches_pass_through_tls(authority: Authority, loop: str) -> None:
    async def body(broker: TestBroker) -> None:
        async with pydanube.connect(broker.url, tls=authority.trusted()) as client:
            async with client.producer(TOPIC) as producer:
                for number in range(40):
                    producer.send_nowait(bytes([number]) * 300_000)
                await producer.flush()
            table = await client.fetch(TOPIC).table()
            assert [payload[0] for payload in table.column("payload").to_pylist()] == list(range(40))

    served(config_of(authority), body, loop=loop)


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_whoever_does_not_fit_is_told_why_and_the_others_do_not_notice(
    authority: Authority, stranger: Authority, loop: str
) -> None:
    async def body(broker: TestBroker) -> None:
        async with pydanube.connect(broker.url, tls=authority.trusted()) as good:
            assert await sends_and_receives(good)
            untrusted = await refusal(broker.url, tls=stranger.trusted())
            assert isinstance(untrusted, ConfigError) and "certificate we trust" in str(untrusted)
            assert not untrusted.retryable
            plain = await refusal(broker.url.replace("danube+tls", "danube"))
            assert isinstance(plain, ProtocolViolation | DeadlineExceeded) and "TLS" in str(plain), plain
            reader, writer = await asyncio.open_connection("127.0.0.1", int(broker.url.rpartition(":")[2]))
            writer.write(b"\x00" * 100)
            assert b"DNST" not in await reader.read(1000)
            writer.close()
            assert await sends_and_receives(good)

    served(config_of(authority), body, loop=loop)


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_a_tls_client_at_a_plain_port_is_told_so(authority: Authority, loop: str) -> None:
    async def body(broker: TestBroker) -> None:
        async with pydanube.connect(broker.url) as good:
            error = await refusal(broker.url.replace("danube", "danube+tls"), tls=authority.trusted())
            assert isinstance(error, ConfigError) and "does not speak TLS" in str(error), repr(error)
            assert await sends_and_receives(good)

    served(StreamConfig(), body, loop=loop)


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_clients_need_a_certificate_where_the_broker_has_an_authority_for_them(
    authority: Authority, stranger: Authority, loop: str
) -> None:
    async def body(broker: TestBroker) -> None:
        async with pydanube.connect(broker.url, tls=authority.trusted(authority.sign("client"))) as known:
            assert await sends_and_receives(known)
            nameless = await refusal(broker.url, tls=authority.trusted())
            assert isinstance(nameless, ConfigError | DeadlineExceeded) and "certificate of ours" in str(nameless)
            unknown = await refusal(broker.url, tls=authority.trusted(stranger.sign("impostor")))
            assert isinstance(unknown, ConfigError | DeadlineExceeded) and "certificate of ours" in str(unknown)
            assert await sends_and_receives(known)

    served(config_of(authority, ca_file=authority.file), body, loop=loop)


def test_a_peer_that_never_finishes_the_tls_handshake_is_dropped(authority: Authority) -> None:
    async def body(broker: TestBroker) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(broker.url.rpartition(":")[2]))
        writer.write(b"\x16\x03\x01")
        async with asyncio.timeout(10):
            assert await reader.read() == b"", "the broker has hung up"
        writer.close()
        async with pydanube.connect(broker.url, tls=authority.trusted()) as good:
            assert await sends_and_receives(good)

    served(config_of(authority, limits=StreamLimits(handshake_seconds=1)), body)


# --- files that cannot be used ------------------------------------------------------------------------


def test_a_server_without_tls_has_no_context() -> None:
    assert server_context(StreamConfig()) is None


def test_old_versions_of_tls_are_not_spoken(authority: Authority) -> None:
    context = server_context(config_of(authority))
    assert context is not None and context.minimum_version == ssl.TLSVersion.TLSv1_2


@pytest.mark.parametrize(
    ("change", "key", "sentence"),
    [
        ({"cert_file": "missing"}, "stream.tls.cert_file", "No such file"),
        ({"key_file": "missing"}, "stream.tls.key_file", "No such file"),
        ({"ca_file": "missing"}, "stream.tls.ca_file", "No such file"),
        ({"cert_file": "text"}, "stream.tls.cert_file", "a certificate in PEM"),
        ({"key_file": "other"}, "stream.tls.key_file", "the key of the certificate"),
        ({"key_file": "locked"}, "stream.tls.cert_file", "without a password"),
        ({"ca_file": "text"}, "stream.tls.ca_file", "certificates in PEM"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(
    authority: Authority, place: Path, change: dict[str, str], key: str, sentence: str
) -> None:
    (place / "text").write_text("no certificate")
    files = {
        "missing": place / "missing",
        "text": place / "text",
        "other": authority.sign("other").key_file,
        "locked": authority.sign("locked", password=b"hush").key_file,
    }
    if change.get("key_file") == "locked":
        change = {**change, "cert_file": "locked_cert"}
        files["locked_cert"] = place / "locked.pem"
    signed = authority.sign("broker")
    settings: dict[str, Any] = {"cert_file": signed.cert_file, "key_file": signed.key_file}
    settings |= {name: files[file] for name, file in change.items()}
    with pytest.raises(ConfigError) as caught:
        server_context(StreamConfig(**settings))
    assert caught.value.key == key and sentence in str(caught.value)
