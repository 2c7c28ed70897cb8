"""What a schema can be, what is asked of a new version, and what a topic asks of messages: words of the registry.

type           bytes, string, number, avro, json_schema, protobuf
compatibility  which of two versions must read what the other wrote; of all versions, if it is transitive
policy         what becomes of a message that does not fit: none (not looked at), warn (counted), enforce (refused)
"""

from __future__ import annotations

import enum
import re
from typing import Final, NamedTuple

from pydanube.errors import ConfigError, InvalidName

SUBJECT_SIZE_MAX: Final = 200
DEFINITION_SIZE_MAX: Final = 256 * 1024
TAGS_MAX: Final = 64
TEXT_MAX: Final = 4096  # bytes of a description, of a name, of a tag
_SUBJECT: Final = re.compile(r"[A-Za-z0-9.:-][A-Za-z0-9_.:-]*")


class SchemaType(enum.StrEnum):
    BYTES = "bytes"
    STRING = "string"
    NUMBER = "number"
    AVRO = "avro"
    JSON_SCHEMA = "json_schema"
    PROTOBUF = "protobuf"

    @property
    def is_plain(self) -> bool:
        """It has no definition, so there is nothing to parse."""
        return self in PLAIN


PLAIN: Final = frozenset({SchemaType.BYTES, SchemaType.STRING, SchemaType.NUMBER})
_ALIASES: Final = {
    "json": SchemaType.JSON_SCHEMA,
    "proto": SchemaType.PROTOBUF,
    **dict.fromkeys(("int64", "int", "float", "double"), SchemaType.NUMBER),
    **{each.value: each for each in SchemaType},
}


class Direction(enum.StrEnum):
    """Who reads whose messages."""

    BACKWARD = "backward"  # the new version reads what the old one wrote
    FORWARD = "forward"  # the old version reads what the new one wrote


class CompatibilityMode(enum.StrEnum):
    NONE = "none"
    BACKWARD = "backward"
    FORWARD = "forward"
    FULL = "full"
    BACKWARD_TRANSITIVE = "backward_transitive"
    FORWARD_TRANSITIVE = "forward_transitive"
    FULL_TRANSITIVE = "full_transitive"

    @property
    def directions(self) -> tuple[Direction, ...]:
        match self.value.partition("_")[0]:
            case "none":
                return ()
            case "full":
                return (Direction.BACKWARD, Direction.FORWARD)
            case one:
                return (Direction(one),)

    @property
    def is_transitive(self) -> bool:
        """Every version counts, not the newest alone."""
        return self.value.endswith("_transitive")


class Compatibility(NamedTuple):
    """What a new version must satisfy. `strict` matters to JSON Schema alone."""

    mode: CompatibilityMode = CompatibilityMode.BACKWARD
    strict: bool = False

    def __str__(self) -> str:
        return f"{self.mode.value}{STRICT if self.strict else ''}"


STRICT: Final = ":strict"
MODES: Final = f"one of {', '.join(CompatibilityMode)}, and for JSON Schema {STRICT} behind it, as backward:strict"


class SchemaPolicy(enum.StrEnum):
    NONE = "none"
    WARN = "warn"
    ENFORCE = "enforce"


class Difference(NamedTuple):
    """Why two versions do not go together. The sentence is for people and begins with the direction."""

    rule: str
    path: str
    old: str
    new: str
    sentence: str
    version: int = 0  # the older one; 0: not said

    def __str__(self) -> str:
        return f"{self.sentence} (version {self.version})" if self.version else self.sentence


def schema_type(text: str) -> SchemaType:
    """Raises ConfigError."""
    found = _ALIASES.get(text.strip().lower())
    if found is None:
        raise ConfigError("schema_type", text[:80], f"one of {', '.join(SchemaType)}")
    return found


def compatibility(text: str) -> Compatibility:
    """Raises ConfigError."""
    word = text.strip().lower()
    try:
        return Compatibility(CompatibilityMode(word.removesuffix(STRICT)), word.endswith(STRICT))
    except ValueError:
        raise ConfigError("compatibility_mode", text[:80], MODES) from None


def policy(text: str) -> SchemaPolicy:
    """Raises ConfigError."""
    try:
        return SchemaPolicy(text.strip().lower())
    except ValueError:
        raise ConfigError("validation_policy", text[:80], f"one of {', '.join(SchemaPolicy)}") from None


def subject_name(text: str) -> str:
    """The text, if it may be a subject's name: it becomes part of a key. Raises InvalidName."""
    if len(text) > SUBJECT_SIZE_MAX or not _SUBJECT.fullmatch(text) or text in (".", ".."):
        rule = f"1 to {SUBJECT_SIZE_MAX} letters of A-Z and a-z, digits, '_', '-', '.' and ':', not '_' in front"
        raise InvalidName("schema subject", text, rule)
    return text
