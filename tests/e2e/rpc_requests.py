"""Random requests for every call of a broker, each drawn from its message's own descriptor.

Names are good, nearly good and absurd; ids exist or never did; enum values are out of range, offsets were never sent,
payloads are over every limit; and now and then the bytes are no message at all. A seed repeats them.
"""

from __future__ import annotations

import string
from random import Random
from typing import Any

from google.protobuf.descriptor import FieldDescriptor, MethodDescriptor, ServiceDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from pydanube.wire._pb.danube import DanubeAdmin_pb2, SchemaRegistry_pb2
from pydanube.wire._pb.danube import DanubeApi_pb2 as api
from pydanube.wire._pb.pydanube import admin_pb2, peers_pb2

BIG = bytes(5 * 1024 * 1024)

GOOD = [f"/default/t{n}" for n in range(12)] + [f"/fuzz/t{n}" for n in range(4)] + ["/default/base", "/fuzz/base"]
GOOD += [f"/default/base-part-{n}" for n in range(3)]
BAD = [
    "",
    "/",
    "//",
    "t",
    "/default",
    "/default/",
    "default/t",
    "/default/t/t",
    "/default/a.b",
    "/default/a b",
    "/a#/b",
]
BAD += [
    "/default/" + "x" * 300,
    "/default/\0",
    "/defäult/tøpic",
    "/../etc",
    "/default/..",
    "/default/e\u0301",
    "/nowhere/t",
]
SUBSCRIPTIONS = ["s1", "s2", "s3"] * 5 + ["a sub", "süb", "", ".", "..", "a/b", "\n", "x" * 500]
NAMESPACES = ["default", "fuzz", "other"] * 2 + ["other", "nowhere", "system", "", "a/b", "x" * 300, "ä"]
PEOPLE = [f"name{n}" for n in range(6)] * 3 + ["", "x" * 2000, "\0", "naïve"]
HEARTBEATS = ["high_priority", "off", "observe", "debug", "50ms", "1000ms", "49ms", "1001ms", "-1ms", "ms", "", "1e9ms"]
NUMBERS = [
    0,
    0,
    1,
    1,
    2,
    3,
    5,
    10,
    50,
    100,
    1_000,
    10_000,
    10_001,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**53,
    2**63,
    2**64 - 1,
]


def services() -> list[tuple[str, ServiceDescriptor]]:
    """Which server each is behind, and the service."""
    client = [("client", service) for service in api.DESCRIPTOR.services_by_name.values()]
    admin = [("admin", service) for service in DanubeAdmin_pb2.DESCRIPTOR.services_by_name.values()]
    ours = [
        ("admin", service) for file in (admin_pb2, peers_pb2) for service in file.DESCRIPTOR.services_by_name.values()
    ]
    registry = SchemaRegistry_pb2.DESCRIPTOR.services_by_name["SchemaRegistry"]
    return [*client, *admin, *ours, ("client", registry), ("admin", registry)]


# Calls that change the most come most often; those that are refused altogether need not.
WEIGHTS = {"SendMessage": 30, "Ack": 12, "Nack": 12, "CreateProducer": 10, "Subscribe": 12, "ReceiveMessages": 6}
DULL = ("SchemaRegistry", "ClusterAdmin", "SecurityAdmin", "StorageService")


class Requests:
    """Random messages. `producers` and `consumers` are ids that the broker once gave."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.producers: list[tuple[str, int]] = []
        self.consumers: list[int] = []
        self.methods: list[tuple[str, MethodDescriptor]] = []
        self.weights: list[float] = []
        self.count = 0
        for server, service in services():
            for method in service.methods:
                self.methods.append((server, method))
                self.weights.append(0.2 if service.name in DULL else WEIGHTS.get(method.name, 2))

    def draw(self) -> tuple[str, MethodDescriptor, bytes]:
        """A server, a method, and the bytes to send there. First each method once: chance may forget a rare one."""
        if self.count < len(self.methods):
            server, method = self.methods[self.count]
        else:
            [(server, method)] = self.random.choices(self.methods, self.weights)
        self.count += 1
        if self.random.random() < 0.02:
            return server, method, self.random.randbytes(self.random.choice([1, 7, 50, 2000]))
        request = self.message(GetMessageClass(method.input_type))
        self.make_sense(request)
        return server, method, request.SerializeToString()

    def make_sense(self, request: Message) -> None:
        """Most of the messages that could work do, or nothing would ever be behind the first check."""
        if self.random.random() < 0.3:
            return
        if isinstance(request, api.StreamMessage) and self.producers:
            topic, identity = self.random.choice(self.producers)
            request.msg_id.topic_name, request.msg_id.producer_id = topic, identity
            if len(request.payload) > 4_000_000:
                request.payload = b"small after all"
        elif isinstance(request, api.ReceiveRequest) and self.consumers:
            request.consumer_id = self.random.choice(self.consumers)
        elif isinstance(request, api.AckRequest | api.NackRequest):
            request.msg_id.topic_name = self.random.choice(GOOD)
            request.msg_id.topic_offset = self.random.choice([0, 1, 2, 3, 5, 8, 13, 2**63, 2**64 - 1])
            request.subscription_name = self.random.choice(SUBSCRIPTIONS[:3])

    def message(self, kind: type[Message]) -> Message:
        request = kind()
        chosen = {oneof.name: self.random.choice([None, *oneof.fields]) for oneof in request.DESCRIPTOR.oneofs}
        for each in request.DESCRIPTOR.fields:
            oneof = each.containing_oneof
            if oneof is not None and chosen[oneof.name] is not each:
                continue
            if oneof is None and self.random.random() < 0.1:
                continue  # left out
            self.fill(request, each)
        return request

    def fill(self, request: Message, each: FieldDescriptor) -> None:
        if each.message_type is not None and each.message_type.GetOptions().map_entry:
            for _ in range(self.random.choice([0, 1, 3])):
                getattr(request, each.name)[self.text("attribute")] = self.text("attribute")
        elif each.is_repeated:
            count = self.random.choice([0, 1, 2, 300 if self.random.random() < 0.05 else 3])
            if each.message_type is not None:
                getattr(request, each.name).extend(
                    self.message(GetMessageClass(each.message_type)) for _ in range(count)
                )
            else:
                getattr(request, each.name).extend(self.value(each) for _ in range(count))
        elif each.message_type is not None:
            getattr(request, each.name).CopyFrom(self.message(GetMessageClass(each.message_type)))
        else:
            setattr(request, each.name, self.value(each))

    def value(self, each: FieldDescriptor) -> Any:
        kinds = FieldDescriptor
        match each.type:
            case kinds.TYPE_STRING:
                return self.text(each.name)
            case kinds.TYPE_BYTES:
                return self.payload()
            case kinds.TYPE_BOOL:
                return self.random.random() < 0.5
            case kinds.TYPE_ENUM:
                return self.random.choice([0, 1, 2, 3] * 5 + [4, 99, -1, 2**31 - 1])
            case kinds.TYPE_UINT32:
                return self.number(each.name) % 2**32
            case kinds.TYPE_UINT64:
                return self.identity(each.name)
            case kinds.TYPE_INT32:
                return self.number(each.name) % 2**31
            case kinds.TYPE_INT64:
                return self.random.choice([-(2**63), -1, 0, 1, 1_700_000_000_000_000, 2**63 - 1])
        return self.random.random() * 100

    def text(self, name: str) -> str:
        if "namespace" in name:
            return self.random.choice(NAMESPACES)
        if "subscription" in name:
            return self.random.choice(SUBSCRIPTIONS)
        if name == "heartbeat":
            return self.random.choice(HEARTBEATS)
        if name in ("producer_name", "consumer_name"):
            return self.random.choice(PEOPLE)
        if "topic" in name or name == "base_name":
            return self.random.choice(GOOD if self.random.random() < 0.85 else BAD)
        if name == "name":  # a topic's, a namespace's or a role's
            return self.random.choice([*GOOD, *GOOD, *BAD, *NAMESPACES])
        if name == "routing_key":
            return f"key{self.random.randrange(5)}"
        if name == "key_filters":
            return self.random.choice(["*", "key?", "key1", "[", "", "*" * 100, "x" * 2000])
        if self.random.random() < 0.3:
            return self.random.choice(BAD)
        return "".join(self.random.choices(string.printable + "äß€😀\u202e", k=self.random.choice([0, 1, 8, 40])))

    def number(self, name: str) -> int:
        if name == "partitions":  # thousands of topics are allowed, and would only make the run slow
            return self.random.choice([0, 1, 2, 3, 10_001, 2**32 - 1])
        return self.random.choice(NUMBERS)

    def identity(self, name: str) -> int:
        if name == "producer_id" and self.producers and self.random.random() < 0.5:
            return self.random.choice(self.producers)[1]
        if name in ("consumer_id", "id") and self.consumers and self.random.random() < 0.5:
            return self.random.choice(self.consumers)
        return self.random.choice(NUMBERS) if self.random.random() < 0.8 else self.random.getrandbits(64)

    def payload(self) -> bytes:
        chance = self.random.random()
        if chance < 0.001:
            return BIG
        if chance < 0.002:
            return BIG[: 4 * 1024 * 1024 - self.random.choice([0, 1, 500, 1500, 100_000])]
        return self.random.randbytes(self.random.choice([0, 1, 10, 100, 1000, 20_000]))
