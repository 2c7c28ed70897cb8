"""How tight things are in the run of a seed: limits that are generous in a real broker are met in most runs.

    pressure = Pressure.of(seed)
    with under(pressure):
        ...

A reservation of two minutes of traffic is extended a few times in a run of two hundred messages, and hardly anything
that goes wrong there is ever seen. Here it has four to forty offsets, a topic that is idle for half a second gives it
back, moves are given up after a second, transactions take two keys. Limits whose being met is allowed to cost something
(how many producers' sessions are kept over a crash) stay as they are.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator, Sequence
from random import Random
from typing import Any, Final, NamedTuple

from pydanube.core.dispatch.window import SubscriptionProgress
from pydanube.core.history.tiers import Retention, TierConfig
from pydanube.history import side_by_side
from pydanube.log.wal import WalConfig

MANY_SHARE: Final = 0.03  # of the seeds have a hundred topics and more
MANY_TOPICS: Final = (100, 150, 200, 300)

# Where it is, its name, and what it may be. The first module defines it, the others have it by name.
LIMITS: Final[Sequence[tuple[Sequence[str], str, Sequence[float]]]] = (
    (("core.history.ownership",), "RESERVE_OFFSETS_MIN", (4, 7, 12, 40)),
    (("core.history.ownership",), "RESERVE_SECONDS", (0.0, 2.0)),
    (("broker.topic_upkeep",), "REST_SECONDS", (0.5, 0.5, 2.0, 10.0)),
    (("broker.hand_over",), "REST_BYTES", (300, 64 * 1024)),
    (("broker.hand_over",), "REST_SECONDS", (1.0, 1.0, 30.0)),
    (("broker.hand_over",), "SEAL_SECONDS", (0.5, 3.0, 30.0)),
    (("history.rescue",), "RUNS_MAX", (1, 2, 30)),
    (("history.rescue",), "READ_BETWEEN_GROUPS", (1, 4, 1000)),
    (("history.rescue",), "OBJECT_BYTES", (300, 32 << 20)),
    (("history.rescue",), "RESCUE_READ_BYTES", (300, 4 << 20)),
    (("broker.registrations",), "OPERATIONS_PER_WRITE", (2, 10, 100)),
    (("broker.registrations",), "CONSUMER_SILENT_SECONDS", (15.0, 3600.0)),
    (("broker.topic_upkeep",), "REAP_SECONDS", (10.0, 300.0)),
    (("broker.cursors",), "PER_TRANSACTION", (1, 2, 60)),
    (("broker.cursors",), "ACKS_MAX", (3, 1000)),
    (("broker.outbox",), "CONSUMER_BYTES_MAX", (1_500, 16 << 20)),  # two messages, of those that there are
    (("broker.topic_reader",), "_READ_BYTES", (300, 256 * 1024)),
    (("broker.gather",), "ROWS_MAX", (1, 2, 2000)),
    (("broker.volatile_topic",), "QUEUE_MAX", (2, 1000)),
    (("broker.hand_over",), "SEALS_AT_ONCE", (1, 4)),
    (("core.dispatch.key_shared",), "KEYS_READ_MAX", (2, 1000)),
    (("core.dispatch.key_shared",), "QUEUED_MAX", (3, 100_000)),
    (("core.policies",), "RETENTION_UNIT_BYTES", (600, 2000)),  # what an operator calls a megabyte of history
    (("core.cluster.leader",), "CLAIM_SECONDS", (1.0, 3.0)),
    (("cluster.assignment_reconciler",), "CLAIMS_MAX", (1, 2, 32)),
    (("cluster.view",), "RELIST_SECONDS", (5.0, 30.0)),
    (("cluster.load_manager",), "BATCH", (1, 2, 50)),
    (("history.object_maker",), "WORKER_BYTES_MIN", (0, 0, 1 << 20)),
    (("history.object_maker",), "HERE_SECONDS", (5.0, 300.0)),
    (("history.uploads",), "UPLOAD_READ_BYTES", (300, 256 * 1024)),
    (("history.uploads",), "FEW_BATCHES", (1, 256)),
    (("history.maintenance",), "DELETED_AT_ONCE", (1, 2, 100)),
    (("log.wal",), "MANY_TOPICS", (1, 8)),
)
# What a fault may change for the rest of a run (cluster_faults.py).
CHANGED: Final = (("broker.hand_over", "UPLOAD_SECONDS"),)


class Pressure(NamedTuple):
    """What a seed has of everything."""

    limits: tuple[float, ...]  # one for each of LIMITS
    holes_bytes: int  # of a subscription's scattered acks that are saved now and then; when it leaves, all are
    at_once: int  # topics that are opened or closed side by side
    unacked_max: int
    disk_seconds: float  # a call of a disk that is well takes up to so long
    store_seconds: float  # and one of the metadata store
    hurry: float  # of a producer's pauses, this part is short
    tier: TierConfig
    wal: WalConfig
    keeps_mb: int  # of the third topic; 0: everything
    topics: int  # without clients, next to the others; 0 in nearly all seeds

    @classmethod
    def of(cls, seed: int) -> Pressure:
        rng = Random(seed ^ 0x9E55)
        topics = rng.choice(MANY_TOPICS) if rng.random() < MANY_SHARE else 0
        limits = tuple(rng.choice(values) for _, _, values in LIMITS)
        if topics:  # a start, and a takeover, take longer than a lease; but not without end
            limits = tuple(
                8 if name == "CLAIMS_MAX" else each for (_, name, _), each in zip(LIMITS, limits, strict=True)
            )
        quick = rng.random() < 0.3  # what is sent is uploaded immediately, and garbage goes as soon
        tier = TierConfig(
            upload_seconds=10.0 if quick else 60.0,
            object_bytes=rng.choice((1500, 64 * 1024, 64 * 1024)),
            merge_count_min=3,
            descriptors_max=4,
            descriptors_moved=2,
            garbage_seconds=1.0 if quick else 40.0,
            local=Retention(seconds=rng.choice((5.0, 60.0))),
            retention_check_seconds=rng.choice((10.0, 30.0)),
            sweep_seconds=3.0 if quick else 100.0,
        )
        wal = WalConfig(
            segment_bytes=rng.choice((1024, 2048)),
            segment_seconds=60.0,
            journal_bytes=rng.choice((2048, 8192)),
            copy_bytes=rng.choice((1024, 4096)),
            ballast_bytes=512,
            cache_bytes=rng.choice((1024, 4096)),
        )
        return cls(
            limits,
            rng.choice((16, 40, 4096)),
            2 if topics else rng.choice((1, 2, 32)),
            rng.choice((2, 10, 1000)),
            0.0 if topics else rng.choice((0.0, 0.01, 0.1)),
            0.3 if topics else rng.choice((0.0, 0.03, 0.3)),
            rng.choice((0.0, 0.2, 0.5)),
            tier,
            wal,
            rng.choice((0, 0, 1, 3)),
            topics,
        )

    @property
    def worker_processes(self) -> bool:
        """Whether every object is made and stored by the worker process."""
        return self.limits[_APART] == 0


_APART: Final = next(place for place, (_, name, _) in enumerate(LIMITS) if name == "WORKER_BYTES_MIN")


def _module(name: str) -> Any:
    return importlib.import_module(f"pydanube.{name}")


@contextlib.contextmanager
def under(pressure: Pressure) -> Iterator[None]:
    """The limits are those of `pressure` until it ends. One run at a time."""
    places = [(_module(name), constant) for names, constant, _ in LIMITS for name in names]
    values = [value for (names, _, _), value in zip(LIMITS, pressure.limits, strict=True) for _ in names]
    changed = [*places, *((_module(name), constant) for name, constant in CHANGED)]
    saved = [getattr(module, constant) for module, constant in changed]
    at_once, holes = side_by_side.gather_bounded.__defaults__, SubscriptionProgress.saved.__defaults__
    try:
        for (module, constant), value in zip(places, values, strict=True):
            setattr(module, constant, value)
        side_by_side.gather_bounded.__defaults__ = (pressure.at_once,)
        SubscriptionProgress.saved.__defaults__ = (pressure.holes_bytes,)
        yield
    finally:
        side_by_side.gather_bounded.__defaults__, SubscriptionProgress.saved.__defaults__ = at_once, holes
        for (module, constant), value in zip(changed, saved, strict=True):
            setattr(module, constant, value)
