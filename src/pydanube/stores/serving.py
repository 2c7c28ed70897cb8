"""What every Network does with a connection that a listener took."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from pydanube.errors import Unreachable
from pydanube.ports import Connection


async def serve_and_close(serve: Callable[[Connection], Awaitable[None]], connection: Connection) -> None:
    """Runs `serve`, then closes the connection, whatever happened.

    A peer that went away is no news. Any other error is a bug in `serve`: it ends this connection alone, and
    the loop's exception handler tells of it.
    """
    try:
        await serve(connection)
    except Unreachable:
        pass
    except Exception as error:
        context = {"message": f"serving {connection.peer} failed", "exception": error}
        asyncio.get_running_loop().call_exception_handler(context)
    finally:
        await connection.close()


def split_address(address: str) -> tuple[str, int]:
    """Splits host:port. The host of [::1]:80 is ::1."""
    host, colon, port = address.rpartition(":")
    assert colon and port.isdecimal(), f"not host:port: {address!r}"
    return host.removeprefix("[").removesuffix("]"), int(port)
