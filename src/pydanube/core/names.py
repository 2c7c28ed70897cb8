"""Names and ids: topics, namespaces, subscriptions, brokers, producers, consumers.

    /default/orders           a topic: /{namespace}/{topic}
    /default/orders-part-3    partition 3 of a partitioned topic; the base itself is no topic

A name is checked when it is made, so holding a TopicName means holding a good one. Names are strings: they
print, compare, pickle and key dictionaries as such. They become metadata keys, directories and object names
unchanged, which is why slashes and overlong names are refused here, once. A dot stands between two other characters:
no name is `.` or `..`, is hidden, or ends as no file of some system may end.

Ids are numbers in [1, 2**63): the Java client reads them as signed and takes 0 for "none". Producer and
consumer ids are hashes of names, so that a client may come back with its old id after a restart or a move.
"""

from __future__ import annotations

import re
import unicodedata
from functools import lru_cache
from hashlib import blake2b
from typing import Final, NewType, Self

from pydanube.errors import InvalidName

BrokerId = NewType("BrokerId", int)
ProducerId = NewType("ProducerId", int)
ConsumerId = NewType("ConsumerId", int)

PART_SIZE_MAX_BYTES: Final = 200  # a file name holds 255; suffixes and temporary names need some of them
ID_END: Final = 1 << 63

# Objects at the root of an object store, where namespaces are directories: some stores cannot have both.
OBJECTS_AT_THE_ROOT: Final = frozenset({"danube-cluster.json", "danube-store.json"})

_PART: Final = re.compile(r"[\w-]+(?:\.[\w-]+)*")
# The base is a name itself: /ns/a.-part-0 is a plain topic, because /ns/a. is none.
_PARTITION: Final = re.compile(r"(?P<base>.*[^/.])-part-(?P<number>0|[1-9][0-9]{0,5})", re.DOTALL)

_PART_RULE: Final = (
    "letters, digits, '_' and '-', with single dots between them (no space or slash), "
    f"1 to {PART_SIZE_MAX_BYTES} bytes of UTF-8"
)


class NamespaceName(str):
    """The first part of a topic's name."""

    __slots__ = ()

    def __new__(cls, text: str) -> Self:
        if not _is_part(text):
            raise InvalidName("namespace name", text, f"use {_PART_RULE}")
        if text in OBJECTS_AT_THE_ROOT:
            raise InvalidName("namespace name", text, "an object of every object store is called so; choose another")
        return super().__new__(cls, text)


class TopicName(str):
    """/{namespace}/{topic}."""

    __slots__ = ()

    def __new__(cls, text: str) -> Self:
        parts = text.split("/")
        if len(parts) != 3 or parts[0] or not all(map(_is_part, parts[1:])):
            rule = f"it should be /namespace_name/topic_name, each of {_PART_RULE}"
            raise InvalidName("topic name", text, rule)
        if parts[1] in OBJECTS_AT_THE_ROOT:
            NamespaceName(parts[1])  # says why not
        return super().__new__(cls, text)

    @classmethod
    def of(cls, namespace: str, name: str) -> Self:
        return cls(f"/{namespace}/{name}")

    @property
    def namespace(self) -> NamespaceName:
        return NamespaceName(self.split("/")[1])

    @property
    def name(self) -> str:
        """The last part: what stands after the namespace."""
        return self.split("/")[2]

    @property
    def base(self) -> TopicName:
        """The name without its partition suffix; the name itself if it has none."""
        match = _PARTITION.fullmatch(self)
        return TopicName(match["base"]) if match else self

    @property
    def partition_number(self) -> int | None:
        """N of `-part-N`; None for a topic without the suffix."""
        match = _PARTITION.fullmatch(self)
        return int(match["number"]) if match else None

    def partition_name(self, number: int) -> TopicName:
        """The name of one partition of this base."""
        assert 0 <= number < 1_000_000, "a partition number has at most six digits"
        return TopicName(f"{self}-part-{number}")

    def partition_names(self, count: int) -> list[TopicName]:
        return [self.partition_name(number) for number in range(count)]

    def is_partition_of(self, base: str) -> bool:
        """True only for `{base}-part-N`: /default/foobar is no partition of /default/foo."""
        return self.partition_number is not None and self.base == base


class SubscriptionName(str):
    """Any printable text without a slash; official clients send what the application chose."""

    __slots__ = ()

    def __new__(cls, text: str) -> Self:
        size_bytes = len(text.encode("utf-8", "surrogatepass"))
        if not (1 <= size_bytes <= PART_SIZE_MAX_BYTES and text.isprintable() and "/" not in text):
            raise InvalidName(
                "subscription name",
                text,
                f"use printable characters without '/', 1 to {PART_SIZE_MAX_BYTES} bytes of UTF-8",
            )
        if text in (".", ".."):
            raise InvalidName("subscription name", text, "'.' and '..' mean directories")
        return super().__new__(cls, text)


def _is_part(text: str) -> bool:
    return len(text) <= PART_SIZE_MAX_BYTES and _is_good_part(text)


@lru_cache(maxsize=4096)  # the same few names are made from keys and requests again and again
def _is_good_part(text: str) -> bool:
    # NFC only: two spellings of one visible name would share a directory on some file systems.
    return (
        _PART.fullmatch(text) is not None
        and len(text.encode()) <= PART_SIZE_MAX_BYTES
        and unicodedata.is_normalized("NFC", text)
    )


# --- ids ----------------------------------------------------------------------------------------------


def parse_broker_id(text: str) -> BrokerId:
    """A broker id as admin messages, metadata keys and the `node_id` file show it: decimal."""
    number = int(text) if text.isascii() and text.isdecimal() and len(text) <= 20 else 0
    if not 0 < number < 1 << 64 or str(number) != text:
        raise InvalidName("broker id", text, "it should be a decimal number between 1 and 2**64 - 1")
    return BrokerId(number)


def producer_id(topic: TopicName, producer_name: str) -> ProducerId:
    """The same for the same names, in every process."""
    return ProducerId(_stable_id("producer", topic, producer_name))


def consumer_id(topic: TopicName, subscription: SubscriptionName, consumer_name: str) -> ConsumerId:
    """The same for the same names, in every process."""
    return ConsumerId(_stable_id("consumer", topic, subscription, consumer_name))


def _stable_id(*texts: str) -> int:
    pieces: list[bytes] = []
    for text in texts:
        data = text.encode("utf-8", "surrogatepass")
        pieces += (len(data).to_bytes(4, "little"), data)  # so that ("ab", "c") is not ("a", "bc")
    digest = blake2b(b"".join(pieces), digest_size=8).digest()
    return int.from_bytes(digest, "little") % (ID_END - 1) + 1


# --- routing ------------------------------------------------------------------------------------------


def fnv1a_64(data: bytes) -> int:
    """FNV-1a, 64 bits: what all official clients route keys with."""
    number = 0xCBF29CE484222325
    for byte in data:
        number = (number ^ byte) * 0x100000001B3 & 0xFFFF_FFFF_FFFF_FFFF
    return number


def partition_of_key(key: str, partitions: int) -> int:
    """The partition that every client sends a message with this key to."""
    return fnv1a_64(key.encode()) % partitions
