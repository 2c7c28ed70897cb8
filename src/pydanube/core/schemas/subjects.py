"""A subject: the versions of one schema, what a new version must satisfy, and the id that messages carry.

    register ─► 1 active ─► delete ─► 1 deleted ─► register the same text again ─► 1 active
             ─► 2 active

A version's number and text never change and are never given to another. Deleting marks: messages that refer to the
version can still be read. What is stored of a subject holds no text of a schema, so it stays small.

`registered`, `deleted` and `with_compatibility` take a record and return the next one.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple

from pydanube.core.schemas.kinds import Compatibility, SchemaType, compatibility
from pydanube.core.schemas.refusals import SchemaUnknown
from pydanube.errors import LimitReached, Refused

VERSIONS_MAX: Final = 5_000  # of one subject: what is stored of all its versions together is a value of 500 KB
COMPARED_MAX: Final = 1_000  # by a transitive mode, newest first

DEFAULT: Final = Compatibility()
MESSAGE_TAG: Final = "message:"
ACTIVE: Final = "active"
DELETED: Final = "deleted"


class VersionMark(NamedTuple):
    """A version as the subject's record has it."""

    number: int
    fingerprint: str
    state: str = ACTIVE


@dataclass(frozen=True, slots=True)
class SubjectRecord:
    """`/schemas/<subject>/metadata`."""

    schema_id: int
    subject: str
    type: SchemaType
    compatibility: Compatibility = DEFAULT
    versions: tuple[VersionMark, ...] = ()  # by number
    tags: tuple[str, ...] = ()  # of the newest registration that had some
    created_at: int = 0  # seconds since 1970
    created_by: str = ""
    updated_at: int = 0

    def active(self) -> list[VersionMark]:
        return [each for each in self.versions if each.state == ACTIVE]

    @property
    def latest(self) -> int:
        """The newest active version; 0: all are deleted."""
        return max((each.number for each in self.versions if each.state == ACTIVE), default=0)

    def mark(self, number: int) -> VersionMark | None:
        """Deleted ones too."""
        return next((each for each in self.versions if each.number == number), None)

    def chosen(self, exactly: int = 0, at_least: int = 0) -> int:
        """The version that a producer writes: the latest, unless it says. Raises SchemaUnknown."""
        number = exactly or self.latest
        mark = self.mark(number)
        if mark is None or mark.state != ACTIVE or number < at_least:
            wanted = (
                f"version {exactly}" if exactly else f"version {at_least} or a later one" if at_least else "a version"
            )
            raise SchemaUnknown(f"{wanted} of schema subject {self.subject} that is in use")
        return number

    def same(self, fingerprint: str) -> VersionMark | None:
        return next((each for each in self.versions if each.fingerprint == fingerprint), None)

    def compared(self, asked: Compatibility) -> list[int]:
        """Whose texts a new version is compared with, newest first."""
        if not asked.mode.directions:
            return []
        numbers = sorted((each.number for each in self.active()), reverse=True)
        return numbers[: COMPARED_MAX if asked.mode.is_transitive else 1]

    def to_bytes(self) -> bytes:
        stored = {
            "id": self.schema_id,
            "subject": self.subject,
            "type": self.type.value,
            "latest": self.latest,
            "compatibility": str(self.compatibility),
            "versions": [{"n": n, "fingerprint": print_, "state": state} for n, print_, state in self.versions],
            "tags": list(self.tags),
            "created_at": self.created_at,
            "created_by": self.created_by,
            "updated_at": self.updated_at,
        }
        return json.dumps(stored, separators=(",", ":")).encode()

    @classmethod
    def from_bytes(cls, value: bytes) -> SubjectRecord:
        """Raises ValueError, KeyError and TypeError for what is none of ours."""
        stored: dict[str, Any] = json.loads(value)
        return cls(
            int(stored["id"]),
            str(stored["subject"]),
            SchemaType(stored["type"]),
            compatibility(stored["compatibility"]),
            tuple(VersionMark(int(each["n"]), each["fingerprint"], each["state"]) for each in stored["versions"]),
            tuple(stored.get("tags", ())),
            int(stored.get("created_at", 0)),
            str(stored.get("created_by", "")),
            int(stored.get("updated_at", 0)),
        )


@dataclass(frozen=True, slots=True)
class SchemaVersion:
    """`/schemas/<subject>/versions/<n>`: written once. Whether it is deleted, the subject's record says."""

    number: int
    type: SchemaType
    definition: bytes
    fingerprint: str
    description: str = ""
    tags: tuple[str, ...] = ()
    created_at: int = 0
    created_by: str = ""
    references: tuple[str, ...] = field(default=())  # always empty: see docs/adr/0017

    @property
    def message(self) -> str:
        """The Protobuf message that payloads are, if a tag says so; empty: the first of the file."""
        return next((each.removeprefix(MESSAGE_TAG) for each in self.tags if each.startswith(MESSAGE_TAG)), "")

    def to_bytes(self) -> bytes:
        stored = {
            "type": self.type.value,
            "definition": self.definition.decode(),  # what registers it has made sure that it is UTF-8
            "fingerprint": self.fingerprint,
            "description": self.description,
            "tags": list(self.tags),
            "created_at": self.created_at,
            "created_by": self.created_by,
            "references": list(self.references),
        }
        return json.dumps(stored, separators=(",", ":"), ensure_ascii=False).encode()

    @classmethod
    def from_bytes(cls, number: int, value: bytes) -> SchemaVersion:
        """Raises ValueError, KeyError and TypeError for what is none of ours."""
        stored: dict[str, Any] = json.loads(value)
        return cls(
            number,
            SchemaType(stored["type"]),
            stored["definition"].encode(),
            stored["fingerprint"],
            stored.get("description", ""),
            tuple(stored.get("tags", ())),
            int(stored.get("created_at", 0)),
            stored.get("created_by", ""),
            tuple(stored.get("references", ())),
        )


class Registered(NamedTuple):
    """What a registration does: the record as it is then, the version's number, and whether its text is new."""

    record: SubjectRecord
    number: int
    is_new: bool
    changes: bool  # the record is to be written


def registered(
    before: SubjectRecord | None,
    subject: str,
    kind: SchemaType,
    fingerprint: str,
    *,
    schema_id: int,
    tags: Sequence[str] = (),
    by: str = "",
    now: int = 0,
) -> Registered:
    """`schema_id` is the next free one; it is used if the subject is new. Raises LimitReached."""
    if before is None:
        first = SubjectRecord(
            schema_id,
            subject,
            kind,
            versions=(VersionMark(1, fingerprint),),
            tags=tuple(tags),
            created_at=now,
            created_by=by,
            updated_at=now,
        )
        return Registered(first, 1, True, True)
    known = before.same(fingerprint)
    if known is not None and known.state == ACTIVE:
        return Registered(before, known.number, False, False)
    if known is not None:
        return Registered(_marked(before, known._replace(state=ACTIVE), now), known.number, False, True)
    if len(before.versions) >= VERSIONS_MAX:
        raise LimitReached(f"versions of schema subject {subject}", VERSIONS_MAX)
    number = 1 + max((each.number for each in before.versions), default=0)
    after = replace(
        before,
        type=kind,
        versions=(*before.versions, VersionMark(number, fingerprint)),
        tags=tuple(tags) or before.tags,
        updated_at=now,
    )
    return Registered(after, number, True, True)


def deleted(before: SubjectRecord, number: int, now: int = 0) -> SubjectRecord:
    """The record without this version among the active ones. Raises SchemaUnknown, Refused for the only one left."""
    mark = before.mark(number)
    if mark is None:
        raise SchemaUnknown(f"version {number} of schema subject {before.subject}")
    if mark.state == DELETED:
        return before
    if before.active() == [mark]:
        raise Refused(
            f"version {number} is the only one that is left of schema subject {before.subject}: "
            "register another one first"
        )
    return _marked(before, mark._replace(state=DELETED), now)


def with_compatibility(before: SubjectRecord, asked: Compatibility, now: int = 0) -> SubjectRecord:
    return before if before.compatibility == asked else replace(before, compatibility=asked, updated_at=now)


def _marked(before: SubjectRecord, mark: VersionMark, now: int) -> SubjectRecord:
    versions = tuple(mark if each.number == mark.number else each for each in before.versions)
    return replace(before, versions=versions, updated_at=now)
