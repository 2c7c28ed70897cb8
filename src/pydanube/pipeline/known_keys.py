"""Which earlier batches may have a key of this one: a set of hashes in the driver's memory, made of the table.

    hash(key) ─► batches that have a key of that hash       12 bytes per key; runs, merged as they grow

A batch is compared, key by key, with those batches alone: with none at all, as a rule. So the table is read once per
run of a job, and not once per batch. The table stays the only truth. What is here is made of it when a job begins, and
again when another writer has written to it; a key whose row was deleted is looked for, not found, and may come again.

A table of more than `KEYS_MAX` keys does not fit: then every batch is compared with all of it.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from typing import Final, NamedTuple

import numpy as np
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from pydanube.pipeline.tables import BATCH, LakeTable

log = logging.getLogger(__name__)

KEYS_MAX: Final = 64_000_000
BATCHES_AT_ONCE: Final = 16  # what is collected in one piece, of batches that have about a million rows each


class Run(NamedTuple):
    """Hashes in order, and of each a batch that has it. A hash may be there several times."""

    hashes: np.ndarray
    batches: np.ndarray


class KnownKeys:
    """The keys of one table, for one run of a job."""

    def __init__(self, keys: Sequence[str], keys_max: int = KEYS_MAX) -> None:
        self._keys = keys
        self._keys_max = keys_max
        self._runs: list[Run] = []
        self._version: str | None = None
        self._all: list[int] | None = None  # the batches of a table that is too large
        self._asked = np.empty(0, np.int64)

    @property
    def asked(self) -> int | None:
        """How many different hashes the rows had that were asked for last; None if that is not known."""
        return len(self._asked) if self._all is None else None

    def batches_with(self, table: LakeTable, rows: DataFrame, batch: int) -> list[int]:
        """The batches other than `batch` that may have a key of these rows: all that do, and hardly another."""
        if self._version != table.version():
            self._read(table, batch)
        if self._all is not None:
            return [number for number in self._all if number != batch]
        hashed = rows.select(_hash(self._keys, table.schema()).alias("hash")).distinct().toArrow()
        self._asked = np.sort(hashed.column("hash").to_numpy())
        found: set[int] = set()
        for run in self._runs:
            first, end = (np.searchsorted(run.hashes, self._asked, side) for side in ("left", "right"))
            for place in np.flatnonzero(end > first):
                found.update(run.batches[first[place] : end[place]].tolist())
        return sorted(found - {batch})

    def added(self, table: LakeTable, batch: int) -> None:
        """The rows that were asked for last are in the table now, those with a new key."""
        if self._all is not None:
            self._all = sorted({*self._all, batch})
        else:
            self._add(Run(self._asked, np.full(len(self._asked), batch, np.int32)))
        version = table.version()
        if self._version in (version, table.version_before()):
            self._version = version
        # Else another writer has written to it since: rows may be of other batches now, and it is read again.

    def _read(self, table: LakeTable, batch: int) -> None:
        self._runs, self._all, self._version = [], None, table.version()
        numbers = [number for number in table.numbers() if number != batch]
        total = 0
        for first in range(0, len(numbers), BATCHES_AT_ONCE):
            some = table.among(numbers[first : first + BATCHES_AT_ONCE])
            found = some.select(_hash(self._keys, table.schema()).alias("hash"), BATCH).toArrow()
            hashes, batches = found.column("hash").to_numpy(), found.column(BATCH).to_numpy()
            order = np.argsort(hashes, kind="stable")
            self._add(Run(hashes[order], batches[order].astype(np.int32)))
            total += len(hashes)
            if total > self._keys_max:
                log.warning("every batch is compared with the whole table", extra={"table": table.path, "keys": total})
                self._runs, self._all = [], numbers
                return

    def _add(self, run: Run) -> None:
        """Merged with runs that are not much longer, so there are few, and each key is copied a few times in all."""
        while self._runs and len(self._runs[-1].hashes) <= 2 * len(run.hashes):
            other = self._runs.pop()
            hashes = np.concatenate([other.hashes, run.hashes])
            order = np.argsort(hashes, kind="stable")
            run = Run(hashes[order], np.concatenate([other.batches, run.batches])[order])
        if len(run.hashes):
            self._runs.append(run)


def _hash(keys: Collection[str], schema: StructType) -> Column:
    """Equal for equal keys, whatever narrower type a batch has them in."""
    return F.xxhash64(*(F.col(name).cast(schema[name].dataType) for name in keys))
