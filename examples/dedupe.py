"""Once each, from end to end: a producer that may send an order twice, and a consumer that books each one once.

An idempotent producer stores a message once, whatever happens to its connection. It cannot know that it sent the same
order before it crashed. So the order has an id of its own, and the consumer remembers the ids that it has booked, in
the same transaction as the booking. Then a lost ack, a restart of either side, or an order sent twice books nothing
twice.

python examples/dedupe.py danube://127.0.0.1:6651 bookings.sqlite
"""

from __future__ import annotations

import asyncio
import sqlite3
import sys
from collections.abc import Iterable

import pydanube

TOPIC = "/default/orders.paid"
TABLES = """
    create table if not exists booked (id text primary key);
    create table if not exists balance (customer text primary key, cents integer not null);
"""


async def send(client: pydanube.Client, orders: Iterable[tuple[str, str, int]]) -> None:
    """Orders are (id, customer, cents). The id comes from the order, so it is the same if it is sent again."""
    async with client.producer(TOPIC) as producer:
        for number, customer, cents in orders:
            producer.send_nowait(b"%d" % cents, key=customer, attributes={"id": number})


def book(database: sqlite3.Connection, message: pydanube.Message) -> bool:
    """False: it was booked before. One transaction: both rows are there afterwards, or neither."""
    with database:
        try:
            database.execute("insert into booked values (?)", [message.attributes["id"]])
        except sqlite3.IntegrityError:
            return False
        database.execute(
            "insert into balance values (?, ?) on conflict do update set cents = cents + excluded.cents",
            [message.key, int(message.payload)],
        )
        return True


async def consume(client: pydanube.Client, database: sqlite3.Connection, count: int) -> int:
    """Books `count` messages; returns how many of them were booked before."""
    again = 0
    async with client.consumer(TOPIC, subscription="accounting", start="earliest") as consumer:
        for _ in range(count):
            message = await consumer.receive()
            again += not book(database, message)
            await message.ack()  # after the booking: what is lost in between comes again, and is known
    return again


async def main(url: str, path: str = ":memory:") -> tuple[int, dict[str, int]]:
    database = sqlite3.connect(path)
    database.executescript(TABLES)
    orders = [("order-1", "ann", 250), ("order-2", "bob", 400), ("order-3", "ann", 100)]
    async with pydanube.connect(url) as client:
        await send(client, orders)
        await send(client, orders[1:])  # as after a crash, by a producer that does not know how far it came
        again = await consume(client, database, 5)
    balance = dict(database.execute("select customer, cents from balance order by customer"))
    database.close()
    print(f"{again} came twice; {balance}")
    return again, balance


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:3] or ["danube://127.0.0.1:6651"]))
