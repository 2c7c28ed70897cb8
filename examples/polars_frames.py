"""Polars on both sides: a DataFrame's rows become messages, and messages a DataFrame, batch by batch or as a whole.

python examples/polars_frames.py danube://127.0.0.1:6651
"""

from __future__ import annotations

import asyncio
import sys

import polars as pl
import pyarrow as pa

import pydanube

TOPIC = "/default/measures.raw"
SHAPE = pl.Struct({"sensor": pl.String, "celsius": pl.Float64})


async def write(client: pydanube.Client, frame: pl.DataFrame) -> None:
    """One message per row, as JSON, keyed by sensor."""
    async with client.producer(TOPIC, compression="zstd") as producer:
        rows = frame.select(payload=pl.struct(pl.all()).struct.json_encode(), key="sensor")
        await producer.send_many(rows)


def rows_of(batch: pydanube.MessageBatch | pa.Table) -> pl.DataFrame:
    """Columns of the payloads, beside when they were published."""
    return (
        pl.DataFrame(batch)
        .select("publish_time", pl.col("payload").cast(pl.String).str.json_decode(SHAPE).alias("row"))
        .unnest("row")
    )


async def mean_by_sensor(client: pydanube.Client, count: int) -> dict[str, float]:
    """As messages come, without a Python object for each of them."""
    seen: list[pl.DataFrame] = []
    async with client.consumer(TOPIC, subscription="means", start="earliest") as consumer:
        async for batch in consumer.batches():
            seen.append(rows_of(batch))
            await batch.ack()
            if sum(map(len, seen)) >= count:
                break
    means = pl.concat(seen).group_by("sensor").agg(pl.col("celsius").mean()).sort("sensor")
    return dict(means.iter_rows())


async def warmest(client: pydanube.Client) -> tuple[str, float]:
    """From the whole history, from whatever tier it is in, and without a subscription."""
    history = rows_of(await client.fetch(TOPIC).table())
    row = history.sort("celsius").row(-1, named=True)
    return row["sensor"], row["celsius"]


async def main(url: str) -> tuple[dict[str, float], tuple[str, float]]:
    frame = pl.DataFrame({"sensor": ["attic", "cellar"] * 50, "celsius": [20.0 + n % 10 for n in range(100)]})
    async with pydanube.connect(url) as client:
        await write(client, frame)
        means = await mean_by_sensor(client, len(frame))
        hottest = await warmest(client)
    print(means, hottest)
    return means, hottest


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:2] or ["danube://127.0.0.1:6651"]))
