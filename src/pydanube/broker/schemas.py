"""The registry: subjects, their versions, and what may follow what. In the metadata store, so any broker answers.

    register ─► subject read ─► judged (another process) ─► one transaction: if the subject is as it was read,
                     ▲                                       version, record, id of a new subject and the counter
                     └───────────────── it changed in the meantime ──────────────┘

Definitions are never changed, so what was read once is kept. A subject's record is read anew wherever it decides; what
is kept of it (`known`) only spares a batch of messages that question, and is learned from every read and from a watch.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Final, NamedTuple
from weakref import WeakValueDictionary

from pydanube.core import keys
from pydanube.core.schemas.kinds import (
    DEFINITION_SIZE_MAX,
    TAGS_MAX,
    TEXT_MAX,
    Compatibility,
    Difference,
    SchemaType,
    compatibility,
    schema_type,
    subject_name,
)
from pydanube.core.schemas.plain import misfit
from pydanube.core.schemas.refusals import (
    ParserMissing,
    SchemaIncompatible,
    SchemaInvalid,
    SchemaTooCostly,
    SchemaUnknown,
)
from pydanube.core.schemas.subjects import (
    ACTIVE,
    MESSAGE_TAG,
    SchemaVersion,
    SubjectRecord,
    deleted,
    registered,
    with_compatibility,
)
from pydanube.errors import ConfigError, Conflict, DanubeError, DataDamaged, Unreachable
from pydanube.ports import Clock, Compare, Item, MetadataStore, Put, SchemaLane, SchemaParsers

log = logging.getLogger(__name__)

TRIES: Final = 30  # of a registration: each that fails means that another one succeeded
PAUSE_SECONDS: Final = 0.005  # longer with every try
KEPT_MAX: Final = 1_000  # definitions, and records of subjects
QUESTION_SIZE_MAX: Final = 512 * 1024  # bytes of older definitions in one question: it is written on the loop
READ_TOGETHER: Final = 50
WATCH_RETRY_SECONDS: Final = 1.0
LOOK_AGAIN_SECONDS: Final = 60.0
SENTENCE_DIFFERENCES_MAX: Final = 5


class Registration(NamedTuple):
    """`version` is in use from now on; `is_new` is false for one that was there before."""

    record: SubjectRecord
    version: int
    is_new: bool
    fingerprint: str


class _Judged(NamedTuple):
    fingerprint: str
    differences: list[Difference]


class SchemaRegistry:
    def __init__(self, metadata: MetadataStore, clock: Clock, parsers: SchemaParsers) -> None:
        self._metadata = metadata
        self._clock = clock
        self._parsers = parsers
        self._known: OrderedDict[str, tuple[SubjectRecord, int]] = OrderedDict()  # with the store's revision
        self._versions: OrderedDict[tuple[str, int], SchemaVersion] = OrderedDict()
        self._changing: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    # --- reading ------------------------------------------------------------------------------------

    def known(self, subject: str) -> SubjectRecord | None:
        """What was last read of it; never waits."""
        found = self._known.get(subject)
        return found[0] if found is not None else None

    async def find(self, subject: str) -> SubjectRecord | None:
        """As it is stored now."""
        found = await self._read(subject)
        return found[0] if found is not None else None

    async def record(self, subject: str) -> SubjectRecord:
        """Raises SchemaUnknown, InvalidName."""
        found = await self.find(subject_name(subject))
        if found is None:
            raise SchemaUnknown(f"schema subject {subject}")
        return found

    async def of_id(self, schema_id: int) -> SubjectRecord:
        """Raises SchemaUnknown."""
        item = await self._metadata.get(keys.schema_by_id(schema_id))
        found = await self.find(item.value.decode()) if item is not None else None
        if found is None:
            raise SchemaUnknown(f"schema id {schema_id}")
        return found

    async def version(self, record: SubjectRecord, number: int | None = None) -> SchemaVersion:
        """A deleted one too, if it is asked for by its number; without one the latest. Raises SchemaUnknown."""
        if number is None:
            number = record.latest
            if not number:
                raise SchemaUnknown(f"a version of schema subject {record.subject} that is in use")
        if record.mark(number) is None:
            raise SchemaUnknown(f"version {number} of schema subject {record.subject}")
        return await self._definition(record.subject, number)

    async def versions(self, record: SubjectRecord) -> list[SchemaVersion]:
        """Those in use."""
        return await self._definitions(record.subject, [each.number for each in record.active()])

    async def subjects(self) -> list[SubjectRecord]:
        names = sorted(item.value.decode() for item in await self._metadata.list(keys.SCHEMA_IDS))
        found: list[SubjectRecord] = []
        for first in range(0, len(names), READ_TOGETHER):
            read = await asyncio.gather(*map(self.find, names[first : first + READ_TOGETHER]))
            found += [each for each in read if each is not None]
        return found

    async def _read(self, subject: str) -> tuple[SubjectRecord, int] | None:
        item = await self._metadata.get(keys.schema_metadata(subject))
        if item is None:
            return None
        found = _record(item)
        self._learn(found, item.revision)
        return found, item.revision

    async def _definition(self, subject: str, number: int) -> SchemaVersion:
        kept = self._versions.get((subject, number))
        if kept is not None:
            self._versions.move_to_end((subject, number))
            return kept
        item = await self._metadata.get(keys.schema_version(subject, number))
        if item is None:
            raise SchemaUnknown(f"version {number} of schema subject {subject}")
        try:
            found = SchemaVersion.from_bytes(number, item.value)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise _foreign(item) from error
        self._versions[subject, number] = found
        while len(self._versions) > KEPT_MAX:
            self._versions.popitem(last=False)
        return found

    async def _definitions(self, subject: str, numbers: Sequence[int]) -> list[SchemaVersion]:
        found: list[SchemaVersion] = []
        for first in range(0, len(numbers), READ_TOGETHER):
            together = numbers[first : first + READ_TOGETHER]
            found += await asyncio.gather(*(self._definition(subject, number) for number in together))
        return found

    def _learn(self, record: SubjectRecord, revision: int) -> None:
        kept = self._known.get(record.subject)
        if kept is None or kept[1] <= revision:
            self._known[record.subject] = record, revision
            self._known.move_to_end(record.subject)
            while len(self._known) > KEPT_MAX:
                self._known.popitem(last=False)

    # --- changing -----------------------------------------------------------------------------------

    async def register(
        self,
        subject: str,
        kind: str,
        definition: bytes,
        *,
        description: str = "",
        created_by: str = "",
        tags: Sequence[str] = (),
    ) -> Registration:
        """Raises SchemaInvalid, SchemaIncompatible, ParserMissing, InvalidName, ConfigError, LimitReached.

        The same text again, under the same subject, is the version that it was.
        """
        subject_name(subject)
        found_type = schema_type(kind)
        text = _text(found_type, definition)
        _check_texts(description=description, created_by=created_by, tags=tags)
        message = _message(tags)
        async with self._lock(subject):
            for tried in range(TRIES):
                seen = await self._read(subject)
                before, revision = seen if seen is not None else (None, 0)
                asked = before.compatibility if before is not None else Compatibility()
                judged = await self._judge(subject, before, asked, found_type, text, message)
                counter = await self._metadata.get(keys.NEXT_SCHEMA_ID) if before is None else None
                now = self._clock.time_us() // 1_000_000
                outcome = registered(
                    before,
                    subject,
                    found_type,
                    judged.fingerprint,
                    schema_id=int(counter.value) if counter is not None else 1,
                    tags=tags,
                    by=created_by,
                    now=now,
                )
                done = Registration(outcome.record, outcome.number, outcome.is_new, judged.fingerprint)
                if not outcome.changes:
                    return done
                if outcome.is_new and judged.differences:
                    raise SchemaIncompatible(subject, str(asked), _joined(judged.differences))
                if not outcome.is_new and before is not None:
                    await self._check_again(before, outcome.number, asked)
                version = SchemaVersion(
                    outcome.number,
                    found_type,
                    definition,
                    judged.fingerprint,
                    description,
                    tuple(tags),
                    now,
                    created_by,
                )
                if await self._write(outcome.record, revision, version if outcome.is_new else None, counter):
                    log.info("schema registered", extra={"subject": subject, "version": outcome.number})
                    return done
                await self._clock.sleep(PAUSE_SECONDS * tried)
        raise Conflict(keys.schema_metadata(subject))

    async def _write(
        self, record: SubjectRecord, revision: int, version: SchemaVersion | None, counter: Item | None
    ) -> bool:
        """All of it, if the subject is as it was read."""
        subject = record.subject
        compares = [Compare(keys.schema_metadata(subject), revision)]
        operations = [Put(keys.schema_metadata(subject), record.to_bytes())]
        if version is not None:
            compares.append(Compare(keys.schema_version(subject, version.number), 0))
            operations.append(Put(keys.schema_version(subject, version.number), version.to_bytes()))
        if not revision:
            compares.append(Compare(keys.NEXT_SCHEMA_ID, counter.revision if counter is not None else 0))
            operations.append(Put(keys.NEXT_SCHEMA_ID, str(record.schema_id + 1).encode()))
            operations.append(Put(keys.schema_by_id(record.schema_id), subject.encode()))
        written = await self._metadata.transact(compares, operations)
        if written is not None:
            self._learn(record, written)
        return written is not None

    async def delete_version(self, subject: str, number: int) -> bool:
        """Marks it; messages that refer to it can be read as before. False: it was deleted already.

        Raises SchemaUnknown, Refused for the only one left.
        """
        return await self._change(subject, lambda record, now: deleted(record, number, now))

    async def set_compatibility(self, subject: str, mode: str) -> Compatibility:
        """For versions from now on. Raises ConfigError, SchemaUnknown."""
        asked = compatibility(mode)
        await self._change(subject, lambda record, now: with_compatibility(record, asked, now))
        return asked

    async def _change(self, subject: str, change: Any) -> bool:
        subject_name(subject)
        async with self._lock(subject):
            for tried in range(TRIES):
                seen = await self._read(subject)
                if seen is None:
                    raise SchemaUnknown(f"schema subject {subject}")
                before, revision = seen
                after: SubjectRecord = change(before, self._clock.time_us() // 1_000_000)
                if after is before:
                    return False
                if await self._write(after, revision, None, None):
                    return True
                await self._clock.sleep(PAUSE_SECONDS * tried)
        raise Conflict(keys.schema_metadata(subject))

    def _lock(self, subject: str) -> asyncio.Lock:
        """Of this broker's changes of a subject, which would only make each other try again."""
        found = self._changing.get(subject)
        if found is None:
            found = self._changing[subject] = asyncio.Lock()
        return found

    # --- judging ------------------------------------------------------------------------------------

    async def check(self, subject: str, kind: str, definition: bytes, mode: str | None = None) -> list[Difference]:
        """Why this text may not be registered now; nothing if it may. Changes nothing. Raises as `register`."""
        record = await self.record(subject)
        found_type = schema_type(kind)
        asked = compatibility(mode) if mode else record.compatibility
        judged = await self._judge(subject, record, asked, found_type, _text(found_type, definition), "")
        same = record.same(judged.fingerprint)
        return [] if same is not None and same.state == ACTIVE else judged.differences

    async def _judge(
        self,
        subject: str,
        before: SubjectRecord | None,
        asked: Compatibility,
        kind: SchemaType,
        text: str,
        message: str,
    ) -> _Judged:
        compared = await self._definitions(subject, before.compared(asked)) if before is not None else []
        same = [each for each in compared if each.type is kind]
        found = [_other_type(kind, each) for each in compared if each.type is not kind]
        if kind.is_plain:
            return _Judged(kind.value, found)
        fingerprint = ""
        for together in _in_questions(same) or [[]]:
            history: list[list[object]] = [
                [each.number, each.type.value, each.definition.decode(), each.message] for each in together
            ]
            answer = await self._ask_judge(kind, text, message, asked, history)
            fingerprint = answer["fingerprint"]
            found += [Difference(*each) for each in answer["differences"]]
        known = before.same(fingerprint) if before is not None else None
        if known is not None and (await self._definition(subject, known.number)).type is not kind:
            fingerprint = f"{fingerprint}:{kind}"  # one text, two types: `{"type": "string"}` is Avro and JSON Schema
        return _Judged(fingerprint, found)

    async def _check_again(self, before: SubjectRecord, number: int, asked: Compatibility) -> None:
        """A deleted version comes back: it must still be allowed to follow those before it, and those after it, it."""
        if not asked.mode.directions:
            return
        version = await self._definition(before.subject, number)
        newer = sorted(each.number for each in before.active() if each.number > number)
        older = sorted((each.number for each in before.active() if each.number < number), reverse=True)
        if not asked.mode.is_transitive:
            newer, older = newer[:1], older[:1]
        pairs = [(version, each) for each in await self._definitions(before.subject, older)]
        pairs += [(each, version) for each in await self._definitions(before.subject, newer)]
        for later, earlier in pairs:
            if later.type is not earlier.type:
                raise SchemaIncompatible(before.subject, str(asked), str(_other_type(later.type, earlier)))
            if later.type.is_plain:
                continue
            history: list[list[object]] = [
                [earlier.number, earlier.type.value, earlier.definition.decode(), earlier.message]
            ]
            answer = await self._ask_judge(later.type, later.definition.decode(), later.message, asked, history)
            if answer["differences"]:
                differences = [Difference(*one) for one in answer["differences"]]
                raise SchemaIncompatible(before.subject, str(asked), _joined(differences))

    async def _ask_judge(
        self, kind: SchemaType, text: str, message: str, asked: Compatibility, history: list[list[object]]
    ) -> dict[str, Any]:
        question = {
            "do": "judge",
            "type": kind.value,
            "definition": text,
            "message": message,
            "asked": str(asked),
            "history": history,
        }
        try:
            answer = await self._parsers.ask(SchemaLane.DEFINITIONS, question)
        except SchemaTooCostly as error:
            raise SchemaInvalid(kind.value, str(error)) from error
        if "missing" in answer:
            raise ParserMissing(kind.value)
        if "invalid" in answer:
            raise SchemaInvalid(kind.value, str(answer["invalid"]))
        return answer

    # --- payloads -----------------------------------------------------------------------------------

    async def misfit(
        self, record: SubjectRecord, number: int, payloads: Sequence[bytes]
    ) -> tuple[int, str, str] | None:
        """Row, path and why of the first payload that is none of this version; None: all are.

        Raises Unreachable, ParserMissing.
        """
        version = await self.version(record, number)
        if version.type.is_plain:
            return misfit(version.type, payloads)
        question: dict[str, Any] = {
            "do": "check",
            "key": f"{record.schema_id}.{number}",
            "type": version.type.value,
            "definition": None,
            "message": version.message,
            "sizes": [len(each) for each in payloads],
        }
        try:
            answer = await self._parsers.ask(SchemaLane.PAYLOADS, question, payloads)
            if "unknown" in answer:
                question["definition"] = version.definition.decode()
                answer = await self._parsers.ask(SchemaLane.PAYLOADS, question, payloads)
        except SchemaTooCostly as error:
            return 0, "", f"one of {len(payloads)} payloads could not be checked: {error}"
        if "missing" in answer:
            raise ParserMissing(version.type.value)
        if "invalid" in answer:
            raise Unreachable("the process for schemas", str(answer["invalid"]))
        bad = answer["bad"]
        return None if bad is None else (int(bad[0]), str(bad[1]), str(bad[2]))

    # --- following ----------------------------------------------------------------------------------

    async def follow(self) -> None:
        """Keeps what is known of subjects fresh, as other brokers change them, until cancelled."""
        while True:
            begun = self._clock.elapsed()
            try:
                after = await self._metadata.transact([], [])
                assert after is not None, "nothing was compared"
                for subject in list(self._known):
                    await self._read(subject)
                await self._watch(after)
            except DanubeError as error:
                log.warning("what is known of schemas may be old", extra={"why": str(error)})
            if self._clock.elapsed() - begun < WATCH_RETRY_SECONDS:
                await self._clock.sleep(WATCH_RETRY_SECONDS)  # no busy loop over a watch that ends immediately

    async def _watch(self, after: int) -> None:
        try:
            async with asyncio.timeout(LOOK_AGAIN_SECONDS):
                async for events in self._metadata.watch(keys.SCHEMAS, after):
                    for event in events:
                        if keys.subject_of_metadata(event.key) in self._known and event.value is not None:
                            item = Item(event.key, event.value, event.revision)
                            self._learn(_record(item), item.revision)
        except TimeoutError:
            pass  # time to look again


def _record(item: Item) -> SubjectRecord:
    try:
        return SubjectRecord.from_bytes(item.value)
    except (ValueError, KeyError, TypeError, AttributeError, ConfigError) as error:
        raise _foreign(item) from error


def _foreign(item: Item) -> DataDamaged:
    return DataDamaged(
        f"{item.key} in the metadata store has a value that is none of ours: bring it back from a backup"
    )


def _text(kind: SchemaType, definition: bytes) -> str:
    if len(definition) > DEFINITION_SIZE_MAX:
        raise SchemaInvalid(kind.value, f"it has {len(definition)} bytes, and {DEFINITION_SIZE_MAX} may be")
    try:
        return definition.decode()
    except UnicodeDecodeError as error:
        raise SchemaInvalid(kind.value, f"it is not UTF-8 at byte {error.start}") from None


def _in_questions(versions: Sequence[SchemaVersion]) -> list[list[SchemaVersion]]:
    found: list[list[SchemaVersion]] = []
    size = QUESTION_SIZE_MAX
    for each in versions:
        size += len(each.definition)
        if size > QUESTION_SIZE_MAX:
            found.append([])
            size = len(each.definition)
        found[-1].append(each)
    return found


def _check_texts(*, description: str, created_by: str, tags: Sequence[str]) -> None:
    if len(tags) > TAGS_MAX:
        raise ConfigError("tags", len(tags), f"at most {TAGS_MAX}")
    for name, text in (("description", description), ("created_by", created_by), *(("tags", each) for each in tags)):
        size_bytes = len(text.encode("utf-8", "surrogatepass"))
        if size_bytes > TEXT_MAX:
            raise ConfigError(name, f"{text[:40]}…", f"at most {TEXT_MAX} bytes")


def _message(tags: Sequence[str]) -> str:
    return next((each.removeprefix(MESSAGE_TAG) for each in tags if each.startswith(MESSAGE_TAG)), "")


def _other_type(kind: SchemaType, old: SchemaVersion) -> Difference:
    text = f"Incompatible: changed the schema's type from {old.type} to {kind}"
    return Difference("schema_type", "/", old.type.value, kind.value, text, old.number)


def _joined(differences: Sequence[Difference]) -> str:
    shown = "; ".join(map(str, differences[:SENTENCE_DIFFERENCES_MAX]))
    more = len(differences) - SENTENCE_DIFFERENCES_MAX
    return f"{shown}; and {more} more" if more > 0 else shown
