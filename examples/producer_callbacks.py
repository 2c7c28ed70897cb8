"""A producer that goes on while messages are stored, and is called back for each of them.

python examples/producer_callbacks.py danube://127.0.0.1:6651
"""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from functools import partial

import pydanube


def told(counts: Counter[str], number: int, sent: asyncio.Future[pydanube.Receipt]) -> None:
    """Called on the event loop when a message is stored, or will not be. Must not wait."""
    if sent.cancelled():
        return
    error = sent.exception()
    if error is None:
        counts["stored"] += 1
    else:
        counts["failed"] += 1
        print(f"reading {number} is not stored: {error}", file=sys.stderr)


async def main(url: str, count: int = 1_000) -> Counter[str]:
    counts: Counter[str] = Counter()
    async with pydanube.connect(url) as client, client.producer("/default/readings") as readings:
        for number in range(count):
            await readings.room()  # returns at once, unless as much as `buffer_bytes` has no receipt yet
            sent = readings.send_soon(b"%d" % number, key=f"sensor-{number % 7}")
            sent.add_done_callback(partial(told, counts, number))
        await readings.flush()  # every callback has been called, or is about to be
    print(f"{counts['stored']} stored, {counts['failed']} failed")
    return counts


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if sys.argv[1:] else "danube://127.0.0.1:6651"))
