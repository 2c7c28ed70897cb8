"""What a topic asks of the messages that come: decided per batch, by the distinct (id, version) in it.

    policy none, or no subject                accept
    no id                                     missing_schema_id
    another subject's id                      subject_mismatch
    a version that is unknown or deleted      unknown_schema
    payloads checked, and one does not fit    payload_invalid

Each of the reasons is counted under `warn`, where nothing is ever refused, and refuses the batch under `enforce`. What
is not known here is looked up in the registry first: a version may be younger than what this broker knows.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeAlias

from pydanube.core.schemas.kinds import SchemaPolicy
from pydanube.core.schemas.subjects import ACTIVE, SubjectRecord
from pydanube.core.units import MIB

Pair: TypeAlias = tuple[int | None, int | None]  # schema_id and schema_version of a message, as it says

CHECKED_BYTES_MAX: Final = 64 * MIB  # of payloads in one question


class Reason(enum.StrEnum):
    MISSING = "missing_schema_id"
    UNKNOWN = "unknown_schema"
    SUBJECT = "subject_mismatch"
    PAYLOAD = "payload_invalid"


@dataclass(frozen=True, slots=True)
class TopicSchema:
    """`/topics/<ns>/<topic>/schema_config`."""

    subject: str | None = None
    policy: SchemaPolicy = SchemaPolicy.WARN
    checks_payloads: bool = False

    @property
    def is_open(self) -> bool:
        """Messages need not be looked at."""
        return self.subject is None or self.policy is SchemaPolicy.NONE

    @property
    def refuses(self) -> bool:
        return self.policy is SchemaPolicy.ENFORCE

    def to_bytes(self) -> bytes:
        stored = {
            "subject": self.subject,
            "validation_policy": self.policy.value,
            "enable_payload_validation": self.checks_payloads,
        }
        return json.dumps(stored).encode()

    @classmethod
    def from_bytes(cls, value: bytes | None, label: bytes | None = None) -> TopicSchema:
        """`label` is what earlier versions stored: a subject's name and nothing else. Raises ValueError, TypeError."""
        if value is None:
            return cls(json.loads(label)) if label is not None else cls()
        stored: dict[str, Any] = json.loads(value)
        return cls(
            stored.get("subject"),
            SchemaPolicy(stored.get("validation_policy", SchemaPolicy.WARN.value)),
            bool(stored.get("enable_payload_validation", False)),
        )


class Doubt(NamedTuple):
    """A batch does not fit, by this pair of it. `reason` None: what is known here does not say."""

    pair: Pair
    reason: Reason | None


def doubts(pairs: Iterable[Pair], known: SubjectRecord | None, *, is_fresh: bool) -> list[Doubt]:
    """What speaks against a batch with these pairs. `is_fresh`: the record was read after the batch came."""
    found = []
    for pair in pairs:
        reason = _reason(pair, known)
        if reason is not None:
            certain = is_fresh or reason is Reason.MISSING
            found.append(Doubt(pair, reason if certain else None))
    return found


def _reason(pair: Pair, known: SubjectRecord | None) -> Reason | None:
    schema_id, version = pair
    if not schema_id or version is None:
        return Reason.MISSING
    if known is None:
        return Reason.UNKNOWN
    if schema_id != known.schema_id:
        return Reason.SUBJECT
    mark = known.mark(version)
    return None if mark is not None and mark.state == ACTIVE else Reason.UNKNOWN


def sentence_of(doubt: Doubt, subject: str, latest: int) -> str:
    """Why a batch is refused, and what to do."""
    schema_id, version = doubt.pair
    if doubt.reason is Reason.MISSING:
        return (
            f"a message carries no schema id, and the topic takes schema subject {subject}: open the producer with it"
        )
    if doubt.reason is Reason.SUBJECT:
        return f"a message is of schema id {schema_id}, which is not that of schema subject {subject}"
    newest = f"its latest is {latest}" if latest else "it has none"
    return (
        f"schema subject {subject} has no version {version} in use ({newest}): register it, or open the producer anew"
    )
