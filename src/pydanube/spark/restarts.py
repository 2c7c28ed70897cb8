"""Runs again what failed only because a Python worker of Spark did not start in time.

Spark gives a worker ten seconds to call back, and fails the query when it does not: on a host that is busy for a
moment a stream ends for nothing. What has a checkpoint goes on from there: to start it again loses and repeats nothing.
Other failures are not ours to judge and are raised at once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from time import monotonic, sleep
from typing import TYPE_CHECKING, Final, TypeVar

from pyspark.errors import PySparkException

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery

log = logging.getLogger(__name__)

T = TypeVar("T")

RESTARTS_MAX: Final = 5  # one after the other
PAUSE_FIRST_SECONDS: Final = 2.0
PAUSE_MAX_SECONDS: Final = 60.0
LONG_SECONDS: Final = 600.0  # a run of that length has recovered from what was before
START_FAILED: Final = ("Python worker failed to connect back", "waiting for the Python worker to connect back")


def is_failed_start(error: BaseException) -> bool:
    return any(text in str(error) for text in START_FAILED)


def run_again(
    run: Callable[[], T],
    *,
    what: str,
    restarts_max: int = RESTARTS_MAX,
    pause: Callable[[float], None] = sleep,
    now: Callable[[], float] = monotonic,
) -> T:
    """What `run` returns, in the end. Raises what it raises, unless a worker's start has failed, and then too if it
    fails `restarts_max` times more without having run for long.
    """
    restarts = 0
    while True:
        began = now()
        try:
            return run()
        except PySparkException as error:
            if not is_failed_start(error):
                raise
            restarts = 1 if now() - began >= LONG_SECONDS else restarts + 1
            if restarts > restarts_max:
                raise
            seconds = min(PAUSE_FIRST_SECONDS * 2 ** (restarts - 1), PAUSE_MAX_SECONDS)
        log.warning(
            "a Python worker of Spark did not start in time: starting again from the checkpoint",
            extra={"what": what, "restart": restarts, "of": restarts_max, "seconds": seconds},
        )
        pause(seconds)


def keep_running(start: Callable[[], StreamingQuery], *, restarts_max: int = RESTARTS_MAX) -> None:
    """See `pydanube.spark.keep_running`."""

    def until_it_ends() -> None:
        start().awaitTermination()

    run_again(until_it_ends, what="stream", restarts_max=restarts_max)
