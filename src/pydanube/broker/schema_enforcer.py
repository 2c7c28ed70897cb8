"""What a topic asks of messages, carried out: `core/schemas/enforcing.py` decides.

    batch ─► lets: never waits ─── fits, or nothing is asked ──────────────────────────► appended
                │  not known here, or payloads are to be checked
                └─► admit: reads the subject, has payloads checked ── fits, or warn ──► appended
                                                                   └─ enforce ────────► SchemaRefused

A batch that takes the second way holds up those of its own producer that come behind it, and no other. Under `warn`
nothing is ever refused: a registry that cannot be asked is no reason either. Under `enforce` it is: Unreachable, so
that the producer sends the batch again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from pydanube.broker.schemas import SchemaRegistry
from pydanube.core.names import TopicName
from pydanube.core.schemas.enforcing import Doubt, Pair, Reason, TopicSchema, doubts, sentence_of
from pydanube.core.schemas.refusals import SchemaRefused
from pydanube.core.schemas.subjects import SubjectRecord
from pydanube.errors import DanubeError, InvalidObject
from pydanube.formats.batch import Batch, Envelope, payloads_of, schema_pairs
from pydanube.ports import Clock, Item
from pydanube.telemetry import TopicMetrics

log = logging.getLogger(__name__)

# Under `warn` a pair that does not fit is not looked up for each batch that has it.
DOUBTED_SECONDS: Final = 5.0
DOUBTED_MAX: Final = 1_000
PATH_MAX: Final = 200


def topic_schema(name: TopicName, chosen: Item | None, label: Item | None) -> TopicSchema:
    """As it is stored. Raises InvalidObject for what is none of ours."""
    try:
        return TopicSchema.from_bytes(chosen.value if chosen else None, label.value if label else None)
    except (ValueError, TypeError, AttributeError) as error:
        raise InvalidObject(f"the schema of {name} in the metadata store", str(error)) from error


class SchemaEnforcer:
    """One topic's."""

    def __init__(
        self, topic: TopicName, config: TopicSchema, registry: SchemaRegistry, clock: Clock, metrics: TopicMetrics
    ) -> None:
        self.config = config
        self._topic = topic
        self._registry = registry
        self._clock = clock
        self._metrics = metrics
        self._doubted: dict[Pair, tuple[Reason, float]] = {}

    @property
    def is_open(self) -> bool:
        """Messages need not be looked at."""
        return self.config.is_open

    def change(self, config: TopicSchema) -> None:
        """Holds from the next batch on, also of producers that are open."""
        self.config = config
        self._doubted.clear()

    # --- a message of its own, and a batch ------------------------------------------------------------

    def lets_one(self, message: Envelope) -> bool:
        """As `lets`."""
        return self.lets({(message.schema_id, message.schema_version): 1})

    async def admit_one(self, message: Envelope) -> None:
        """As `admit`."""
        await self.admit({(message.schema_id, message.schema_version): 1}, lambda _: [(0, message.payload)])

    def lets_batch(self, batch: Batch) -> bool:
        """As `lets`. The batch was parsed."""
        return self.config.is_open or self.lets(schema_pairs(batch))

    async def admit_batch(self, batch: Batch) -> None:
        """As `admit`."""
        await self.admit(schema_pairs(batch), lambda pair: payloads_of(batch, pair))

    # --- deciding -----------------------------------------------------------------------------------

    def lets(self, pairs: Mapping[Pair, int]) -> bool:
        """Whether a batch of so many messages of each pair may be appended now. False: `admit` has to say."""
        config = self.config
        if config.is_open:
            return True
        assert config.subject is not None
        found = doubts(pairs, self._registry.known(config.subject), is_fresh=False)
        if config.checks_payloads or (found and config.refuses):
            return False
        reasons = [each.reason or self._recent(each.pair) for each in found]
        if None in reasons:
            return False
        self._count(pairs, [each._replace(reason=reason) for each, reason in zip(found, reasons, strict=True)])
        return True

    async def admit(self, pairs: Mapping[Pair, int], rows_of: Callable[[Pair], Sequence[tuple[int, bytes]]]) -> None:
        """Returns if the batch may be appended. `rows_of`: number and payload of each message of a pair.

        Raises SchemaRefused, and Unavailable if the registry cannot be asked; nothing under `warn`.
        """
        while True:
            config = self.config
            try:
                await self._admit(config, pairs, rows_of)
            except DanubeError as error:
                if self.config is not config:
                    continue
                if config.refuses:
                    raise
                log.warning("messages accepted unchecked", extra={"topic": self._topic, "why": str(error)})
            if self.config is config:
                return
            # It was changed meanwhile, and who changed it was told that it holds: it holds for this batch, too.

    async def _admit(
        self, config: TopicSchema, pairs: Mapping[Pair, int], rows_of: Callable[[Pair], Sequence[tuple[int, bytes]]]
    ) -> None:
        if config.is_open or config.subject is None:
            return
        record = self._registry.known(config.subject)
        found = doubts(pairs, record, is_fresh=False)
        if any(each.reason is None for each in found):
            record = await self._registry.find(config.subject)
            found = doubts(pairs, record, is_fresh=True)
        self._judge(config, pairs, found, record)
        if config.checks_payloads and record is not None:
            doubted = {each.pair for each in found}
            for pair in pairs:
                if pair not in doubted:
                    await self._check_payloads(config, record, pair, rows_of(pair))

    def _judge(
        self, config: TopicSchema, pairs: Mapping[Pair, int], found: Sequence[Doubt], record: SubjectRecord | None
    ) -> None:
        self._count(pairs, found)
        for each in found:
            assert each.reason is not None and config.subject is not None
            if config.refuses:
                why = sentence_of(each, config.subject, record.latest if record is not None else 0)
                raise SchemaRefused(self._topic, each.reason, why)
            if each.reason is not Reason.MISSING:
                if len(self._doubted) >= DOUBTED_MAX:
                    self._doubted.clear()
                self._doubted[each.pair] = each.reason, self._clock.elapsed() + DOUBTED_SECONDS

    async def _check_payloads(
        self, config: TopicSchema, record: SubjectRecord, pair: Pair, rows: Sequence[tuple[int, bytes]]
    ) -> None:
        version = pair[1]
        assert version is not None
        wrong = await self._registry.misfit(record, version, [payload for _, payload in rows])
        if wrong is None:
            return
        row, path, why = wrong
        self._metrics.schema_failures[Reason.PAYLOAD] += 1
        if config.refuses:
            where = f"row {rows[row][0]}" + (f", {path[:PATH_MAX]}" if path else "")
            said = f"{where} does not fit version {version} of schema subject {config.subject}: {why}"
            raise SchemaRefused(self._topic, Reason.PAYLOAD, said)

    # --- counting -----------------------------------------------------------------------------------

    def _count(self, pairs: Mapping[Pair, int], found: Sequence[Doubt]) -> None:
        self._metrics.schema_checks[self.config.policy] += sum(pairs.values())
        for each in found:
            assert each.reason is not None
            self._metrics.schema_failures[each.reason] += pairs[each.pair]

    def _recent(self, pair: Pair) -> Reason | None:
        found = self._doubted.get(pair)
        return found[0] if found is not None and self._clock.elapsed() < found[1] else None
