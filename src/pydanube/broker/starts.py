"""How the lives of a broker that is alone began: after an orderly stop, or not. In a cluster its registration tells.

begin    the record of the life before says whether that ended in order; from now on it says that this one runs
end      it stops in order
"""

from __future__ import annotations

from dataclasses import replace

from pydanube.broker.events import Events
from pydanube.core import keys
from pydanube.core.cluster.presence import START_KEPT_MS, STARTS_MAX, Presence
from pydanube.core.names import BrokerId
from pydanube.ports import Clock, MetadataStore, Put


class Starts:
    def __init__(self, metadata: MetadataStore, clock: Clock, broker: BrokerId, events: Events) -> None:
        self._metadata = metadata
        self._clock = clock
        self._key = keys.seen(broker)
        self._events = events
        self._record: Presence | None = None

    def crashes(self) -> int:
        """Lives that followed no orderly stop, ever."""
        return self._record.crashes if self._record is not None else 0

    @property
    def unexpected_ms(self) -> tuple[int, ...]:
        """When the last of them began, in the last day."""
        return self._record.starts_ms if self._record is not None else ()

    async def begin(self, address: str) -> None:
        item = await self._metadata.get(self._key)
        before = Presence.from_bytes(item.value) if item is not None else None
        now_ms = self._clock.time_us() // 1000
        is_crash = before is not None and before.gone_ms is None
        recent = [each for each in (before.starts_ms if before is not None else ()) if now_ms - each < START_KEPT_MS]
        await self._write(
            Presence(
                address=address,
                session=0,
                since_ms=now_ms,
                starts_ms=tuple([*recent, *[now_ms] * is_crash][-STARTS_MAX:]),
                crashes=(before.crashes if before is not None else 0) + is_crash,
            )
        )
        if before is not None:
            how = "began anew, without an orderly stop before" if is_crash else "was restarted, in order"
            self._events.record("came", f"broker {address} {how}")

    async def end(self) -> None:
        if self._record is not None:
            now_ms = self._clock.time_us() // 1000
            await self._write(replace(self._record, gone_ms=now_ms, in_order=True))

    async def _write(self, record: Presence) -> None:
        await self._metadata.transact([], [Put(self._key, record.to_bytes())])
        self._record = record
