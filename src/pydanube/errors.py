"""Every error PyDanube raises, in one tree.

    DanubeError
    ├── Refused              the caller must change something; trying again as it is cannot help
    │   ├── ProtocolViolation    bytes that are no frame, or a frame that cannot come now; the connection is closed
    │   ├── InvalidName          a topic, namespace or subscription name that cannot be
    │   ├── InvalidBatch         bytes that are not a batch: checksum, length, count, schema
    │   ├── ConfigError          a setting with a value that is not allowed
    │   ├── OffsetOutOfRange     an offset below what is kept, or beyond the head
    │   ├── OffsetTaken          an offset or epoch that was already given
    │   ├── OutOfSequence        an idempotent producer skipped or repeated a batch
    │   ├── ProducerFenced       a newer session of the same producer took over
    │   ├── SessionUnknown       the session was never opened here, or has ended; open one
    │   ├── TopicUnknown         no such topic
    │   ├── NotATable            the topic keeps nothing, or its broker has no object store
    │   ├── TopicExists          the name is taken, as a topic or as the base of partitions
    │   ├── NamespaceUnknown     no such namespace
    │   ├── NamespaceExists      the namespace is there already
    │   ├── NamespaceNotEmpty    it still has topics
    │   ├── DeliveryMismatch     reliable where the topic is not, or the other way round
    │   ├── SchemaMismatch       the topic is bound to another schema subject
    │   ├── SubscriptionUnknown  no such subscription of the topic
    │   ├── SubscriptionBusy     an exclusive subscription that is in use
    │   ├── AckOutdated          an ack of what was delivered before the subscription was moved
    │   ├── ProducerExists       an exclusive producer holds the topic
    │   ├── LimitReached         a policy allows no more of these
    │   ├── MessageTooLarge      over the policy's limit
    │   ├── BrokerUnknown        no such broker in the cluster
    │   ├── MoveRefused          the topic or broker cannot be unloaded as the cluster stands
    │   ├── RequestFailed        the server of a request raised an error
    │   └── ClientClosed         the client, producer or consumer was closed before
    │       ├── NeverOpened          it was not opened yet: `async with` is missing
    │       └── ConsumerStopped      it was told to receive no more
    ├── Unavailable          time may help; the same call can be tried again (`retryable`)
    │   ├── LogBusy              more has come than the disk takes; try again in a moment
    │   ├── DiskFull             no room; reads go on and publishes resume when there is room
    │   │   └── ResourcesShort       the system gave no open file, or no memory: nothing was written
    │   ├── LogFull              the log is as large as it may be; publishes resume when something was uploaded
    │   ├── LogClosed            the topic's log is closed or closing here
    │   ├── LeaseLost            a lease ran out in the metadata store
    │   ├── Conflict             a key or object changed between read and write
    │   ├── Unreachable          a peer or a store did not answer
    │   │   ├── ProcessEnded         the process that stores large objects; what it did is not known
    │   │   └── StoreRefused         a store answered, but does not let us: credentials, bucket, another cluster's
    │   ├── NotServed            the topic is not served here just now
    │   ├── OwnershipLost        another owner took the topic
    │   ├── ProducerUnknown      this broker does not know the producer; look up and create it again
    │   ├── ConsumerUnknown      this broker does not know the consumer; look up and subscribe again
    │   ├── RateLimited          faster than the policy allows
    │   ├── TooManyConnections   the broker has as many as its limit of open files lets it have
    │   ├── DeadlineExceeded     a call did not end in the time it was given
    │   └── BufferFull           a producer holds as many unacknowledged bytes as it may
    └── DataDamaged          an operator must act
        ├── DiskFailed           the disk refused a write or a sync
        ├── LogStopped           the disk failed twice: this process stops acknowledging
        ├── LogDamaged           stored bytes are not what was written: file, position, offsets
        ├── InvalidObject        bytes that are not the object of history they should be
        ├── ObjectDamaged        an object of the cloud tier is missing or is not what was written
        ├── TailUnproven         it cannot be known where this log ends; give a start offset
        ├── DirectoryInUse       a live process holds the data directory
        ├── NodeIdInUse          a live broker has the same id: this directory is a copy
        ├── MoveFailed           a topic could not be moved away and is served where it was
        └── FormatTooNew         the data directory was written by a newer version

The three families answer one question, who acts: the caller, time, or the operator. An error declares its fields and
one sentence that is made from them (`core/declared.py`); fields travel with every error, also through pickling, to a
Spark worker. What this page says of an error is not said again below.
"""

from __future__ import annotations

import re
from typing import ClassVar, Final

from pydanube.core.declared import Declared, says

_PASSWORD: Final = re.compile(r"(?<=//)[^/@\s'\"]+@|[^\s'\"/@]+:[^\s'\"/@]*@")  # of a URL


class DanubeError(Declared):
    """The root. `retryable` says whether the same call, unchanged, may succeed later."""

    retryable: ClassVar[bool] = False


class Refused(DanubeError):
    """The caller must change something."""


class Unavailable(DanubeError):
    retryable: ClassVar[bool] = True


class DataDamaged(DanubeError):
    """An operator must act."""


# --- the caller acts ------------------------------------------------------------------------------


@says("the protocol is violated: {what}")
class ProtocolViolation(Refused):
    what: str


@says()
class InvalidName(Refused):
    """`kind` is what was being named, `name` the text as given, `rule` what is allowed."""

    kind: str
    name: str
    rule: str

    def __str__(self) -> str:
        shown = self.name if len(self.name) <= 80 else self.name[:77] + "..."
        return f"{shown!r} is not a {self.kind}: {self.rule}"


@says("not a valid batch: {what}")
class InvalidBatch(Refused):
    what: str


@says()
class ConfigError(Refused):
    """`key` is the setting, `value` what was given or None, `allowed` what may be given."""

    key: str
    value: object
    allowed: str

    def __str__(self) -> str:
        shown = _PASSWORD.sub("(hidden)@", repr(self.value))
        given = "is not given" if self.value is None else f"= {shown} is not allowed"
        return f"{self.key} {given}: {self.allowed}"


@says("offset {offset} of {topic} is not kept: offsets {first} up to {end} are")
class OffsetOutOfRange(Refused):
    """The log holds [first, end); `offset` lies outside."""

    topic: str
    offset: int
    first: int
    end: int


@says("{kind} {number} of {topic} was given before: the next free one is {next_free}")
class OffsetTaken(Refused):
    """`kind` ("offset" or "epoch") number `number` was already used by this topic; `next_free` was not."""

    topic: str
    number: int
    next_free: int
    kind: str


@says(
    "producer {producer_id} sent sequence {sequence} where {expected} is next: send the unacknowledged batches "
    "again, unchanged and in order"
)
class OutOfSequence(Refused):
    producer_id: int
    sequence: int
    expected: int


@says(
    "session {session} of producer {producer_id} was replaced by session {current}: another producer opened the "
    "same name"
)
class ProducerFenced(Refused):
    producer_id: int
    session: int
    current: int


@says(
    "session {session} of producer {producer_id} is not known here: open a session first. It may have ended, "
    "because nobody used it for long; what was sent under it without an answer may be stored"
)
class SessionUnknown(Refused):
    """The session was never opened with this topic's owner, or has ended.

    A client that gets this for a message does not know whether an earlier try of it was stored.
    """

    producer_id: int
    session: int


@says("unable to find the topic {topic}: create it, or check the name")
class TopicUnknown(Refused):
    topic: str


@says("topic {topic} is no table: {why}")
class NotATable(Refused):
    topic: str
    why: str


@says("topic {topic} cannot be created: {why}")
class TopicExists(Refused):
    topic: str
    why: str


@says("namespace {namespace} does not exist: create it first")
class NamespaceUnknown(Refused):
    namespace: str


@says("unable to create the namespace {namespace} due to: it already exists")
class NamespaceExists(Refused):
    namespace: str


@says("namespace {namespace} still has {topics} topics: delete them first")
class NamespaceNotEmpty(Refused):
    namespace: str
    topics: int


@says("requested dispatch strategy does not match topic strategy: {topic} is {found}, asked for was {asked}")
class DeliveryMismatch(Refused):
    topic: str
    asked: str
    found: str


@says("topic {topic} is bound to schema subject {bound} and cannot use {asked}")
class SchemaMismatch(Refused):
    topic: str
    bound: str
    asked: str


@says("topic {topic} has no subscription {subscription}")
class SubscriptionUnknown(Refused):
    topic: str
    subscription: str


@says("subscription {subscription} of {topic} can't be shared or removed: consumer {holder} is connected")
class SubscriptionBusy(Refused):
    topic: str
    subscription: str
    holder: str


@says(
    "offset {offset} of {topic} was delivered before subscription {subscription} was moved by a seek: acknowledge "
    "it when it is delivered again"
)
class AckOutdated(Refused):
    """`offset` was delivered before a seek moved the subscription, and not since: it comes again, or is behind it."""

    topic: str
    subscription: str
    offset: int


@says("topic {topic} has an exclusive producer: {holder}")
class ProducerExists(Refused):
    topic: str
    holder: str


@says("the policy allows at most {limit} {what}")
class LimitReached(Refused):
    what: str
    limit: int


@says("a message of {size_bytes} bytes is over the limit of {limit_bytes}")
class MessageTooLarge(Refused):
    size_bytes: int
    limit_bytes: int


@says("there is no broker {broker} in this cluster: `brokers list` shows those that are")
class BrokerUnknown(Refused):
    broker: str


@says("{why}")
class MoveRefused(Refused):
    """`what` (a topic, or a broker with its topics) cannot be moved away as the cluster stands. `why` is a sentence."""

    what: str
    why: str


@says("{topic} could not answer: {why}")
class RequestFailed(Refused):
    """The server of a request to `topic` raised an error."""

    topic: str
    why: str


@says("{what} is closed")
class ClientClosed(Refused):
    what: str


@says("{what} was never opened: use async with (with, for the blocking client), or await its open()")
class NeverOpened(ClientClosed):
    """`what` was made, and used before it was opened."""


@says("{what} was stopped: it receives no more messages")
class ConsumerStopped(ClientClosed):
    """`what` receives no more, because the application said so; its acks still travel."""


# --- time acts ------------------------------------------------------------------------------------


@says("no room left on the disk of {path}: free some space, publishing then resumes by itself")
class DiskFull(Unavailable):
    path: str


@says()
class ResourcesShort(DiskFull):
    """The system gave this process no descriptor or no memory for `path`; nothing of the request was kept.

    Says nothing of the disk: what is open, and other files, can be used.
    """

    why: str

    def __str__(self) -> str:
        return (
            f"{self.path} could not be used: {self.why.lower()}; nothing was written, so try again. If it happens "
            "often: the broker needs a higher limit of open files (ulimit -n), or more memory"
        )


@says()
class LogFull(Unavailable):
    """The segments of all topics of a broker have `size_bytes`; nothing of the request was kept.

    `why` says what keeps them from being uploaded and freed.
    """

    size_bytes: int
    limit_bytes: int
    why: str

    def __str__(self) -> str:
        return (
            f"the log of this broker is full: {self.size_bytes / 2**20:.1f} MB, and storage.wal.max_mb allows "
            f"{self.limit_bytes / 2**20:.0f}. {self.why}. See to the object store, or allow more; publishing then "
            "resumes by itself"
        )


@says()
class LogBusy(Unavailable):
    pending_bytes: int
    limit_bytes: int

    def __str__(self) -> str:
        return (
            f"{self.pending_bytes / 2**20:.1f} MB wait for this broker's disk, and storage.wal.pending_mb allows "
            f"{self.limit_bytes / 2**20:.1f}: try again in a moment"
        )


@says("the log of {topic} is closed here")
class LogClosed(Unavailable):
    topic: str


@says("lease {lease} has run out")
class LeaseLost(Unavailable):
    lease: int


@says("{key} was changed by somebody else")
class Conflict(Unavailable):
    key: str


@says("{peer} cannot be reached: {why}")
class Unreachable(Unavailable):
    peer: str
    why: str


class ProcessEnded(Unreachable):
    def __init__(self, why: str) -> None:
        super().__init__("the process for large objects", why)
        self.args = (why,)


class StoreRefused(Unreachable):
    """`peer`, an object store, answered and refused: `why`. Trying again helps once an operator has changed something.

    At the start this becomes a ConfigError. Later, when a password was changed, say, it is as good as no answer.
    """


@says("topic {topic} is not served here: {why}")
class NotServed(Unavailable):
    """The topic cannot be used here just now: `why`. `moved_to`: the native URL of the broker that has it, if known."""

    topic: str
    why: str
    moved_to: str = ""


@says("this broker no longer owns {topic}: look it up again")
class OwnershipLost(Unavailable):
    topic: str


@says("producer {producer_id} is not known here: look up the topic and create the producer again")
class ProducerUnknown(Unavailable):
    producer_id: int


@says("consumer {consumer_id} is not known here: look up the topic and subscribe again")
class ConsumerUnknown(Unavailable):
    consumer_id: int


@says("topic {topic} takes at most {per_second} messages per second: try again later")
class RateLimited(Unavailable):
    topic: str
    per_second: int


@says(
    "this broker takes at most {limit} connections here, because its limit of open files is {open_files}: try "
    "again when others have left, or raise the limit (ulimit -n) and restart it"
)
class TooManyConnections(Unavailable):
    limit: int
    open_files: int


@says()
class DeadlineExceeded(Unavailable):
    """`what` was not done within `seconds`. Whether it is done later, or was and the answer is lost, is not known."""

    what: str
    seconds: float
    why: str = ""

    def __str__(self) -> str:
        return f"{self.what} took longer than {self.seconds:g} s" + (f": {self.why}" if self.why else "")


@says("{limit_bytes} bytes to {topic} wait for their receipts: send slower, or use send()")
class BufferFull(Unavailable):
    topic: str
    limit_bytes: int


# --- an operator acts -----------------------------------------------------------------------------


@says("{operation} of {path} failed: {why}")
class DiskFailed(DataDamaged):
    """The disk refused `operation` on `path`; what it holds of that write is unknown."""

    path: str
    operation: str
    why: str


@says("the log stopped because the disk failed: {why}; replace the disk and restart")
class LogStopped(DataDamaged):
    why: str


@says()
class LogDamaged(DataDamaged):
    """Stored bytes are not what was written. Offsets [first, end) of the topic cannot be read from here.

    `end` is None when the damage hides how far the range goes.
    """

    topic: str
    path: str
    position: int
    first: int
    end: int | None
    why: str

    def __str__(self) -> str:
        until = "an unknown end" if self.end is None else str(self.end)
        return (
            f"{self.path} is damaged at position {self.position} ({self.why}): "
            f"offsets {self.first} up to {until} of {self.topic} cannot be read"
        )


@says("{part}: {why}")
class InvalidObject(DataDamaged):
    part: str
    why: str


@says(
    "object {key} with offsets {first} up to {end} of {topic} cannot be read ({why}): bring it back from a "
    "backup; reading then goes on by itself"
)
class ObjectDamaged(DataDamaged):
    """Offsets [first, end) of the topic cannot be read from the object store: `why`. It is asked again now and then."""

    topic: str
    key: str
    first: int
    end: int
    why: str


@says(
    "the log of {topic} cannot prove that it ends at offset {head} ({why}): open it with a start offset that was "
    "certainly never used"
)
class TailUnproven(DataDamaged):
    topic: str
    head: int
    why: str


@says()
class DirectoryInUse(DataDamaged):
    path: str
    pid: int | None

    def __str__(self) -> str:
        holder = "another process" if self.pid is None else f"process {self.pid}"
        return f"{self.path} is in use by {holder}: stop it first, or choose another data directory"


@says(
    "broker {broker} is running already, at {where}: this data directory is a copy of its; stop that broker "
    "first, or start this one with an empty data directory"
)
class NodeIdInUse(DataDamaged):
    broker: str
    where: str


@says("topic {topic} was not moved and is served where it was: {why}")
class MoveFailed(DataDamaged):
    topic: str
    why: str


@says(
    "{path} has format {found} and this version reads formats up to {supported}: upgrade PyDanube, or choose "
    "another data directory"
)
class FormatTooNew(DataDamaged):
    path: str
    found: int
    supported: int
