"""What every Network does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from pydanube.errors import Unreachable
from pydanube.ports import Connection, Listener
from tests.contracts.adapters import NetworkCase

DEADLINE = 10.0  # seconds; only a broken adapter gets there


@asynccontextmanager
async def pair(case: NetworkCase) -> AsyncIterator[tuple[Connection, Connection]]:
    """The two ends of one connection. The serving task ends when the test does."""
    served: asyncio.Future[Connection] = asyncio.get_running_loop().create_future()
    finished = asyncio.Event()

    async def serve(connection: Connection) -> None:
        served.set_result(connection)
        await finished.wait()

    listener = await case.network.listen(f"{case.host}:0", serve)
    client = await case.network.connect(listener.address)
    server = await served
    try:
        async with asyncio.timeout(DEADLINE):
            yield client, server
    finally:
        finished.set()
        await client.close()
        await server.close()
        await listener.close()


@asynccontextmanager
async def listening(case: NetworkCase, serve: object, address: str = "") -> AsyncIterator[Listener]:
    listener = await case.network.listen(address or f"{case.host}:0", serve)  # type: ignore[arg-type]
    try:
        async with asyncio.timeout(DEADLINE):
            yield listener
    finally:
        await listener.close()


async def echo(connection: Connection) -> None:
    while data := await connection.read(100):
        await connection.write([data])


async def read_exactly(connection: Connection, length: int) -> bytes:
    data = b""
    while len(data) < length:
        more = await connection.read(length - len(data))
        assert more, "ended too early"
        data += more
    return data


async def write_until_broken(connection: Connection) -> None:
    """A peer's end is known only when the news has travelled."""
    with pytest.raises(Unreachable):
        while True:
            await connection.write([b"x"])
            await asyncio.sleep(0)


# --- bytes ------------------------------------------------------------------------------------------


async def test_bytes_arrive_in_order_in_both_directions(network_case: NetworkCase) -> None:
    async with pair(network_case) as (client, server):
        await client.write([b"one ", bytearray(b"two "), b"", memoryview(b"xthreex")[1:6]])
        await client.write([b" four"])
        await server.write([b"back"])
        assert await read_exactly(server, 18) == b"one two three four"
        assert await read_exactly(client, 4) == b"back"


async def test_a_read_returns_at_least_one_byte_and_at_most_what_was_asked_for(
    network_case: NetworkCase,
) -> None:
    async with pair(network_case) as (client, server):
        await client.write([b"0123456789"])
        data = b""
        while len(data) < 10:
            part = await server.read(3)
            assert 1 <= len(part) <= 3
            data += part
        assert data == b"0123456789"


async def test_a_read_waits_for_bytes(network_case: NetworkCase) -> None:
    async with pair(network_case) as (client, server):
        reading = asyncio.create_task(server.read(10))
        await asyncio.sleep(0)
        assert not reading.done()
        await client.write([b"x"])
        assert await reading == b"x"


async def test_a_cancelled_read_loses_nothing(network_case: NetworkCase) -> None:
    async with pair(network_case) as (client, server):
        reading = asyncio.create_task(server.read(10))
        await asyncio.sleep(0)
        reading.cancel()
        await asyncio.wait([reading])
        await client.write([b"x"])
        assert await server.read(10) == b"x"


async def test_a_write_waits_while_too_much_is_queued(network_case: NetworkCase) -> None:
    chunk = b"x" * 1_000_000
    async with pair(network_case) as (client, server):

        async def write_all() -> None:
            for _ in range(30):
                await client.write([chunk])

        writing = asyncio.create_task(write_all())
        for _ in range(200):
            await asyncio.sleep(0)
        assert not writing.done()
        assert await read_exactly(server, 30_000_000) == chunk * 30
        await writing


async def test_many_connections_are_apart(network_case: NetworkCase) -> None:
    async with listening(network_case, echo) as listener:

        async def one(i: int) -> bytes:
            connection = await network_case.network.connect(listener.address)
            await connection.write([b"%03d" % i])
            data = await read_exactly(connection, 3)
            await connection.close()
            return data

        assert await asyncio.gather(*(one(i) for i in range(20))) == [b"%03d" % i for i in range(20)]


# --- the end of a connection ------------------------------------------------------------------------


async def test_what_was_written_before_a_close_arrives_and_then_the_end(network_case: NetworkCase) -> None:
    async with pair(network_case) as (client, server):
        await client.write([b"last words"])
        await client.close()
        assert await read_exactly(server, 10) == b"last words"
        assert await server.read(10) == b""
        assert await server.read(10) == b""


async def test_a_waiting_read_sees_the_peer_close(network_case: NetworkCase) -> None:
    async with pair(network_case) as (client, server):
        reading = asyncio.create_task(server.read(10))
        await asyncio.sleep(0)
        await client.close()
        assert await reading == b""


async def test_writing_to_a_peer_that_has_closed_breaks_the_connection(network_case: NetworkCase) -> None:
    async with pair(network_case) as (client, server):
        await client.close()
        await write_until_broken(server)
        with pytest.raises(Unreachable):
            await server.read(10)
        with pytest.raises(Unreachable):
            await server.write([b"x"])


async def test_a_write_that_waits_for_room_ends_when_the_peer_closes(network_case: NetworkCase) -> None:
    async with pair(network_case) as (client, server):
        writing = asyncio.create_task(client.write([b"x" * 50_000_000]))
        await server.read(1)
        await server.close()
        with pytest.raises(Unreachable):
            await writing


async def test_every_call_after_the_own_close_raises_and_close_does_not(network_case: NetworkCase) -> None:
    async with pair(network_case) as (client, _):
        await client.close()
        with pytest.raises(Unreachable) as caught:
            await client.read(1)
        assert caught.value.peer == client.peer
        with pytest.raises(Unreachable):
            await client.write([b"x"])
        await client.close()


async def test_a_waiting_read_ends_with_the_own_close(network_case: NetworkCase) -> None:
    async with pair(network_case) as (client, _):
        reading = asyncio.create_task(client.read(1))
        await asyncio.sleep(0)
        await client.close()
        with pytest.raises(Unreachable):
            await reading


async def test_a_broken_connection_raises_from_every_call(network_case: NetworkCase) -> None:
    async with pair(network_case) as (client, server):
        reading = asyncio.create_task(client.read(1))
        await asyncio.sleep(0)
        network_case.cut(server)
        with pytest.raises(Unreachable):
            await reading
        for _ in range(2):
            with pytest.raises(Unreachable):
                await client.read(1)
            with pytest.raises(Unreachable):
                await client.write([b"x"])
        await client.close()


# --- listening --------------------------------------------------------------------------------------


async def test_port_0_becomes_a_port_that_can_be_connected_to(network_case: NetworkCase) -> None:
    async with listening(network_case, echo) as first, listening(network_case, echo) as second:
        assert first.address != second.address
        for listener in (first, second):
            host, _, port = listener.address.rpartition(":")
            assert host == network_case.host
            assert int(port) > 0
            connection = await network_case.network.connect(listener.address)
            assert connection.peer == listener.address
            await connection.close()


async def test_a_server_knows_its_peer_by_an_address_of_its_own(network_case: NetworkCase) -> None:
    async with pair(network_case) as (client, server):
        host, _, port = server.peer.rpartition(":")
        assert host and int(port) > 0
        assert server.peer != client.peer


async def test_a_connection_is_closed_when_serve_returns(network_case: NetworkCase) -> None:
    async def serve(connection: Connection) -> None:
        await connection.write([b"hello"])

    async with listening(network_case, serve) as listener:
        connection = await network_case.network.connect(listener.address)
        assert await read_exactly(connection, 5) == b"hello"
        assert await connection.read(1) == b""
        await connection.close()


async def test_an_error_in_serve_closes_its_connection_alone_and_is_told(network_case: NetworkCase) -> None:
    told: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: told.append(context["exception"]))
    error = ValueError("a bug")

    async def serve(connection: Connection) -> None:
        if await connection.read(1) == b"!":
            raise error
        await connection.write([b"fine"])

    async with listening(network_case, serve) as listener:
        bad = await network_case.network.connect(listener.address)
        good = await network_case.network.connect(listener.address)
        await bad.write([b"!"])
        assert await bad.read(1) == b""
        await good.write([b"?"])
        assert await read_exactly(good, 4) == b"fine"
        await bad.close()
        await good.close()
    assert told == [error]


async def test_a_peer_that_leaves_is_not_an_error_of_serve(network_case: NetworkCase) -> None:
    told: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: told.append(context))
    ended = asyncio.Event()

    async def serve(connection: Connection) -> None:
        try:
            await connection.read(1)
        finally:
            ended.set()

    async with listening(network_case, serve) as listener:
        connection = await network_case.network.connect(listener.address)
        await asyncio.sleep(0)
        network_case.cut(connection)
        await ended.wait()
        await connection.close()
    assert told == []


async def test_a_closed_listener_takes_nobody_and_its_connections_go_on(network_case: NetworkCase) -> None:
    async with listening(network_case, echo) as listener:
        connection = await network_case.network.connect(listener.address)
        await connection.write([b"before"])
        assert await read_exactly(connection, 6) == b"before"
        await listener.close()
        with pytest.raises(Unreachable) as caught:
            await network_case.network.connect(listener.address)
        assert caught.value.peer == listener.address
        await connection.write([b"after"])
        assert await read_exactly(connection, 5) == b"after"
        await connection.close()


async def test_an_address_can_be_taken_again_after_its_listener_closed(network_case: NetworkCase) -> None:
    async with listening(network_case, echo) as first:
        address = first.address
    async with listening(network_case, echo, address) as second:
        assert second.address == address
        connection = await network_case.network.connect(address)
        await connection.write([b"x"])
        assert await connection.read(1) == b"x"
        await connection.close()


async def test_an_address_is_taken_by_one_listener(network_case: NetworkCase) -> None:
    async with listening(network_case, echo) as listener:
        with pytest.raises(Unreachable):
            await network_case.network.listen(listener.address, echo)


async def test_connecting_where_nobody_listens_is_unreachable(network_case: NetworkCase) -> None:
    with pytest.raises(Unreachable) as caught:
        await network_case.network.connect(network_case.nobody)
    assert caught.value.peer == network_case.nobody
