"""Which Protobuf schema reads what another one wrote: the wire's rules, on descriptors that a compiler has made.

Fields are known by their numbers, messages by what is in them: a name may change. `File` is what `schema/` makes of a
compiler's output, with the names of types complete. A message that is read is compared from its root on; what no root
reaches is never read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from pydanube.core.schemas.findings import Mismatch, shown

GROUPS: Final = (
    frozenset({"int32", "uint32", "int64", "uint64", "bool"}),
    frozenset({"sint32", "sint64"}),
    frozenset({"fixed32", "sfixed32"}),
    frozenset({"fixed64", "sfixed64"}),
)
LENGTHS: Final = frozenset({"string", "bytes", "message"})  # repeated without packing


@dataclass(frozen=True, slots=True)
class FieldDescriptor:
    number: int
    name: str
    type: str  # as in a .proto file: int32, string, message, enum, group
    type_name: str = ""  # of a message, an enum or a group
    repeated: bool = False
    required: bool = False
    oneof: str = ""  # which of its message's; one that only says `optional` is none


@dataclass(frozen=True, slots=True)
class MessageDescriptor:
    name: str
    fields: Mapping[int, FieldDescriptor]
    reserved: tuple[tuple[int, int], ...] = ()  # half-open

    def reserves(self, number: int) -> bool:
        return any(first <= number < end for first, end in self.reserved)


@dataclass(frozen=True, slots=True)
class Enum:
    name: str
    numbers: frozenset[int]
    closed: bool  # proto2: a number that is not its own is kept apart


@dataclass(frozen=True, slots=True)
class File:
    messages: Mapping[str, MessageDescriptor]
    enums: Mapping[str, Enum]
    root: str  # the message that payloads are

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> File:
        """From what travels between processes."""
        messages = {
            name: MessageDescriptor(
                name,
                {each["number"]: FieldDescriptor(**each) for each in one["fields"]},
                tuple((first, end) for first, end in one["reserved"]),
            )
            for name, one in plain["messages"].items()
        }
        enums = {name: Enum(name, frozenset(one["numbers"]), one["closed"]) for name, one in plain["enums"].items()}
        return cls(messages, enums, plain["root"])


def unreadable(reader: File, writer: File) -> list[Mismatch]:
    """What keeps `reader` from reading every message of `writer`, field by field."""
    comparison = _Comparison(reader, writer)
    comparison.compare(reader.messages[reader.root], writer.messages[writer.root], "")
    return comparison.found


def misused(old: File, new: File, *, must_reserve: bool) -> list[Mismatch]:
    """Numbers that were given up and are used again, in whichever direction one reads. `must_reserve`: a number that
    is given up must be reserved, so that this stays so.
    """
    found = []
    for name, before in old.messages.items():
        after = new.messages.get(name)
        if after is None:
            continue
        for number, each in sorted(after.fields.items()):
            if before.reserves(number):
                text = f"field '{each.name}' uses number {number} of message {name}, which was reserved"
                found.append(Mismatch("reserved_number", f"{name}/{number}", each.name, "reserved", text))
        for number, each in sorted(before.fields.items()):
            if must_reserve and number not in after.fields and not after.reserves(number):
                text = f"removed field '{each.name}' of message {name} without reserving its number {number}"
                found.append(Mismatch("not_reserved", f"{name}/{number}", "", each.name, text))
    return found


class _Comparison:
    def __init__(self, reader: File, writer: File) -> None:
        self.found: list[Mismatch] = []
        self._reader = reader
        self._writer = writer
        self._compared: set[tuple[str, str]] = set()

    def compare(self, reader: MessageDescriptor, writer: MessageDescriptor, path: str) -> None:
        if (reader.name, writer.name) in self._compared:
            return
        self._compared.add((reader.name, writer.name))
        for number, own in sorted(reader.fields.items()):
            other = writer.fields.get(number)
            where = f"{path}/{own.name}"
            if own.required and (other is None or not other.required):
                text = f"added required field '{own.name}'" if other is None else f"made field '{own.name}' required"
                forward = f"field '{own.name}', which the old version requires, is not required any more"
                self._find("required", where, "required", "" if other is None else "optional", text, forward)
            if other is not None:
                self._fields(own, other, where)
        self._oneofs(reader, writer, path)

    def _oneofs(self, reader: MessageDescriptor, writer: MessageDescriptor, path: str) -> None:
        """A writer may set two fields of which a reader keeps the last only."""
        first: dict[str, FieldDescriptor] = {}
        for number, own in sorted(reader.fields.items()):
            other = writer.fields.get(number)
            if not own.oneof or other is None:
                continue
            before = first.setdefault(own.oneof, own)
            theirs = writer.fields[before.number]
            if before is not own and (not other.oneof or theirs.oneof != other.oneof):
                text = f"moved fields '{before.name}' and '{own.name}' into one oneof"
                forward = f"moved fields '{before.name}' and '{own.name}' out of one oneof"
                self._find("oneof", f"{path}/{own.name}", own.oneof, other.oneof, text, forward)

    def _fields(self, own: FieldDescriptor, other: FieldDescriptor, path: str) -> None:
        if not self._types(own, other, path):
            return
        if own.repeated != other.repeated and own.type not in LENGTHS:
            words = ["repeated" if each.repeated else "singular" for each in (own, other)]
            self._changed("label", path, own.name, *words)

    def _types(self, own: FieldDescriptor, other: FieldDescriptor, path: str) -> bool:
        if own.type == other.type == "message" or own.type == other.type == "group":
            reader, writer = self._reader.messages.get(own.type_name), self._writer.messages.get(other.type_name)
            if reader is None or writer is None:  # a well-known type: by its name
                if own.type_name != other.type_name:
                    self._changed("type", path, own.name, own.type_name, other.type_name)
                    return False
                return True
            self.compare(reader, writer, path)
            return True
        if own.type == other.type == "enum":
            reader_enum, writer_enum = self._reader.enums.get(own.type_name), self._writer.enums.get(other.type_name)
            if reader_enum is not None and writer_enum is not None and reader_enum.closed:
                gone = sorted(writer_enum.numbers - reader_enum.numbers)
                if gone:
                    text = f"removed value {gone[0]} of enum {writer_enum.name}, which is closed (proto2)"
                    forward = f"added value {gone[0]} to enum {writer_enum.name}, which is closed (proto2)"
                    own_numbers, their_numbers = (shown(sorted(each.numbers)) for each in (reader_enum, writer_enum))
                    self._find("enum_value", path, own_numbers, their_numbers, text, forward)
            return True
        if own.type == other.type or any(own.type in each and other.type in each for each in GROUPS):
            return True
        if (own.type, other.type) in (("bytes", "string"), ("int32", "enum")):
            return True
        if (own.type, other.type) == ("enum", "int32"):
            enum = self._reader.enums.get(own.type_name)
            if enum is None or not enum.closed:
                return True
        self._changed("type", path, own.name, own.type, other.type)
        return False

    def _changed(self, rule: str, path: str, name: str, reader: str, writer: str) -> None:
        words = f"changed type of field '{name}'"
        self._find(
            rule, path, reader, writer, f"{words} from {writer} to {reader}", f"{words} from {reader} to {writer}"
        )

    def _find(self, rule: str, path: str, reader: str, writer: str, text: str, forward: str = "") -> None:
        self.found.append(Mismatch(rule, path or "/", reader, writer, text, forward))
