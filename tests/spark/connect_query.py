"""A client of a Spark Connect server: copies a topic as a stream, replays it, or makes tables of it, and tells.

python connect_query.py copy|replay|lake REMOTE URL SOURCE TARGET DIRECTORY
"""

from __future__ import annotations

import json
import sys
from typing import Any

from pydanube.pipeline.run import run_job
from pydanube.spark.session import session


def copy(remote: str, url: str, source: str, target: str, directory: str) -> dict[str, Any]:
    spark = session("connect test", remote=remote)
    options = {"service.url": url, "topic": source, "startingOffsets": "earliest", "maxOffsetsPerTrigger": "25"}
    query = (
        spark.readStream.format("danube")
        .options(**options)
        .load()
        .select("payload")
        .writeStream.format("danube")
        .options(**{"service.url": url, "topic": target, "checkpointLocation": f"{directory}/checkpoint"})
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(300)
    batches = len([each for each in query.recentProgress if each.numInputRows])
    spark.stop()
    return {"batches": batches}


def main() -> None:
    what, remote, url, source, target, directory = sys.argv[1:]
    common = (f"service.url={url}", f"topic={source}")
    if what == "copy":
        told = copy(remote, url, source, target, directory)
    elif what == "replay":
        settings = (f"to_topic={target}", f"staging={directory}/staging", "filter=offset < 10")
        told = run_job("replay", remote=remote, changes=(*common, *settings)).values
    else:
        settings = ("schema=id string not null", f"target={directory}/lake", "name=orders")
        told = run_job("lake", remote=remote, changes=(*common, *settings)).values
    print(json.dumps(told))


if __name__ == "__main__":
    main()
