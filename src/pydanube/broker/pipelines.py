"""Declared pipelines, as any broker keeps them in the metadata store, and who runs each: one supervisor, under a lease.

    apply, delete, pause     an operator's; compare the declaration as it was read
    join ─► renew ─► leave   a supervisor's lease; when it ends, so do its claims, as one change of the store
    claim, report, release   compare the claim: who has lost it writes nothing

Leases are the metadata store's, so any broker renews them, and a claim outlasts the broker that granted it. The leader
also looks at all of them now and then (`look`), for conditions and metrics.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final, NamedTuple

from pydanube.core import keys
from pydanube.core.pipelines.conditions import KnownPipeline, PipelineWatch
from pydanube.core.pipelines.declaration import Declaration, pipeline_name
from pydanube.core.pipelines.status import PipelineStatus
from pydanube.errors import ConfigError, Conflict, LeaseLost, LimitReached
from pydanube.ports import Clock, Compare, Delete, Item, MetadataStore, Put

TTL_SECONDS: Final = 30.0  # a broker may take so long to come back, less a quarter, before runs are ended
PIPELINES_MAX: Final = 1_000
TRIES: Final = 5
SUPERVISOR_MAX: Final = 200  # characters of its name


class Applied(NamedTuple):
    """`outcome` is created, changed or unchanged."""

    outcome: str
    declaration: Declaration


class PipelineClaim(NamedTuple):
    granted: bool
    holder: str
    status: bytes | None


class KnownPipelines(NamedTuple):
    """`unreadable`: declarations of a newer version."""

    pipelines: list[KnownPipeline]
    unreadable: int


class PipelineDesk:
    def __init__(self, metadata: MetadataStore, clock: Clock) -> None:
        self._metadata = metadata
        self._clock = clock
        self.watch = PipelineWatch()

    # --- for operators --------------------------------------------------------------------------------------

    async def apply(self, values: Mapping[str, Any]) -> Applied:
        """Raises ConfigError, InvalidName, LimitReached and Conflict."""
        wanted = Declaration.parse({**values, "changed_us": self._clock.time_us()})
        key = keys.pipeline_declaration(wanted.name)
        for _ in range(TRIES):
            item = await self._metadata.get(key)
            before = Declaration.from_bytes(item.value) if item is not None else None
            if before is not None and "paused" not in values:
                wanted = replace(wanted, paused=before.paused)
            if before is not None and before.says_the_same(wanted):
                return Applied("unchanged", before)
            if item is None and len((await self.list()).pipelines) >= PIPELINES_MAX:
                raise LimitReached("pipelines of a cluster", PIPELINES_MAX)
            if await self._put(item, key, wanted):
                return Applied("created" if item is None else "changed", wanted)
        raise Conflict(key)

    async def pause(self, name: str, paused: bool) -> bool | None:
        """Whether that changed something; None: there is no such pipeline. Raises Conflict."""
        key = keys.pipeline_declaration(pipeline_name(name))
        for _ in range(TRIES):
            item = await self._metadata.get(key)
            before = Declaration.from_bytes(item.value) if item is not None else None
            if before is None:
                return None
            if before.paused == paused:
                return False
            # When it was declared stays: to go on is no reason to begin anew.
            if await self._put(item, key, replace(before, paused=paused)):
                return True
        raise Conflict(key)

    async def delete(self, name: str) -> bool:
        """False: there is none. Its claim stays until the supervisor has stopped the run."""
        checked = pipeline_name(name)
        key = keys.pipeline_declaration(checked)
        for _ in range(TRIES):
            item = await self._metadata.get(key)
            if item is None:
                return False
            operations = [Delete(key), Delete(keys.pipeline_status(checked))]
            if await self._metadata.transact([Compare(key, item.revision)], operations) is not None:
                return True
        raise Conflict(key)

    async def list(self, name: str = "") -> KnownPipelines:
        """By name."""
        prefix = keys.below_pipeline(pipeline_name(name)) if name else keys.PIPELINES
        stored: dict[str, dict[str, Item]] = {}
        for item in await self._metadata.list(prefix):
            if (place := keys.pipeline_of(item.key)) is not None:
                stored.setdefault(place[0], {})[place[1]] = item
        found, unreadable = [], 0
        for items in stored.values():
            if "declaration" not in items:
                continue  # deleted, and not stopped yet
            declaration = Declaration.from_bytes(items["declaration"].value)
            if declaration is None:
                unreadable += 1
                continue
            status = PipelineStatus.from_bytes(items["status"].value) if "status" in items else None
            holder = _claim(items["claim"].value)[0] if "claim" in items else ""
            found.append(KnownPipeline(declaration, status, holder, items["declaration"].revision))
        return KnownPipelines(found, unreadable)

    async def _put(self, item: Item | None, key: str, declaration: Declaration) -> bool:
        compare = Compare(key, item.revision if item is not None else 0)
        return await self._metadata.transact([compare], [Put(key, declaration.to_bytes())]) is not None

    # --- for supervisors ------------------------------------------------------------------------------------

    async def join(self) -> int:
        """A lease of TTL_SECONDS."""
        return await self._metadata.grant(TTL_SECONDS)

    async def renew(self, lease: int) -> bool:
        """False: it has ended."""
        try:
            await self._metadata.renew(lease)
        except LeaseLost:
            return False
        return True

    async def leave(self, lease: int) -> None:
        await self._metadata.revoke(lease)

    async def claim(self, lease: int, name: str, supervisor: str) -> PipelineClaim:
        """Granted again to who has it already, so that a call without an answer may be repeated."""
        checked = pipeline_name(name)
        _check_lease(lease)
        key, declared = keys.pipeline_claim(checked), keys.pipeline_declaration(checked)
        declaration = await self._metadata.get(declared)
        if declaration is None:
            return PipelineClaim(False, "", None)
        value = json.dumps({"supervisor": supervisor[:SUPERVISOR_MAX], "lease": lease}).encode()
        compares = [Compare(key, 0), Compare(declared, declaration.revision)]
        try:
            done = await self._metadata.transact(compares, [Put(key, value, lease)])
        except LeaseLost:
            return PipelineClaim(False, "", None)
        item = await self._metadata.get(key)
        holder, whose = _claim(item.value) if item is not None else ("", 0)
        if done is None and whose != lease:
            return PipelineClaim(False, holder, None)
        status = await self._metadata.get(keys.pipeline_status(checked))
        return PipelineClaim(whose == lease, holder, status.value if status is not None else None)

    async def release(self, lease: int, name: str) -> None:
        """Nothing happens if another has it."""
        key = keys.pipeline_claim(pipeline_name(name))
        _check_lease(lease)
        item = await self._metadata.get(key)
        if item is not None and _claim(item.value)[1] == lease:
            await self._metadata.transact([Compare(key, item.revision)], [Delete(key)])

    async def report(self, lease: int, name: str, status: bytes) -> bool:
        """False: the claim is another's, or gone. A deleted pipeline has no status any more. Raises ConfigError."""
        checked = pipeline_name(name)
        _check_lease(lease)
        if PipelineStatus.from_bytes(status) is None:
            raise ConfigError("status", "(not shown)", "a status as supervisors write it")
        key, declared = keys.pipeline_claim(checked), keys.pipeline_declaration(checked)
        for _ in range(TRIES):
            claim, declaration = await self._metadata.get(key), await self._metadata.get(declared)
            if claim is None or _claim(claim.value)[1] != lease:
                return False
            if declaration is None:
                return True
            compares = [Compare(key, claim.revision), Compare(declared, declaration.revision)]
            if await self._metadata.transact(compares, [Put(keys.pipeline_status(checked), status)]) is not None:
                return True
        raise Conflict(key)

    # --- for the leader ---------------------------------------------------------------------------------------

    async def look(self, is_leader: bool) -> None:
        """Raises Unavailable; then what was known stays."""
        if not is_leader:
            self.watch.forget()
            return
        found = await self.list()
        self.watch.look(self._clock.elapsed(), self._clock.time_us(), found.pipelines)


def _check_lease(lease: int) -> None:
    """The store takes 0 for no lease at all: such a claim would never end."""
    if lease <= 0:
        raise ConfigError("lease", lease, "the lease that JoinSupervisor has answered with")


def _claim(value: bytes) -> tuple[str, int]:
    """The supervisor and its lease; one that cannot be read is another's."""
    try:
        found = json.loads(value)
        return str(found["supervisor"]) or "unknown", int(found["lease"])
    except (ValueError, TypeError, KeyError):
        return "unknown", 0
