"""Every error PyDanube raises, in one tree.

    DanubeError
    ├── Refused              the caller must change something; trying again as it is cannot help
    │   ├── ProtocolViolation    bytes that are no frame, or a frame that cannot come now
    │   ├── InvalidName          a topic, namespace or subscription name that cannot be
    │   ├── InvalidBatch         bytes that are not a batch: checksum, length, count, schema
    │   ├── ConfigError          a setting with a value that is not allowed
    │   ├── OffsetOutOfRange     an offset below what is kept, or beyond the head
    │   ├── OffsetTaken          an offset or epoch that was already given
    │   ├── OutOfSequence        an idempotent producer skipped or repeated a batch
    │   ├── ProducerFenced       a newer session of the same producer took over
    │   ├── SessionUnknown       the session was never opened here, or has ended; open one
    │   ├── TopicUnknown         no such topic
    │   ├── TopicExists          the name is taken, as a topic or as the base of partitions
    │   ├── NamespaceUnknown     no such namespace
    │   ├── NamespaceExists      the namespace is there already
    │   ├── NamespaceNotEmpty    it still has topics
    │   ├── DeliveryMismatch     reliable where the topic is not, or the other way round
    │   ├── SchemaMismatch       the topic is bound to another schema subject
    │   ├── SubscriptionUnknown  no such subscription of the topic
    │   ├── SubscriptionBusy     an exclusive subscription that somebody uses
    │   ├── AckOutdated          an ack of what was delivered before the subscription was moved
    │   ├── ProducerExists       an exclusive producer holds the topic
    │   ├── LimitReached         a policy allows no more of these
    │   ├── MessageTooLarge      over the policy's limit
    │   ├── BrokerUnknown        no such broker in the cluster
    │   ├── MoveRefused          the topic or broker cannot be unloaded as the cluster stands
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
    │   ├── Conflict             somebody changed a key or object between read and write
    │   ├── Unreachable          a peer or a store did not answer
    │   │   ├── ProcessEnded         the process that stores large objects
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
        ├── TailUnproven         nobody can say where this log ends; give a start offset
        ├── DirectoryInUse       a live process holds the data directory
        ├── NodeIdInUse          a live broker has the same id: this directory is a copy
        ├── MoveFailed           a topic could not be moved away and is served where it was
        └── FormatTooNew         the data directory was written by a newer version

The three families answer one question, who acts: the caller, time, or the operator. Fields travel with every
error (and through pickling, to a Spark worker); the sentence is made from them. `errors.py` imports nothing.
"""

from __future__ import annotations

from typing import ClassVar


class DanubeError(Exception):
    """The root. `retryable` says whether the same call, unchanged, may succeed later."""

    retryable: ClassVar[bool] = False


class Refused(DanubeError):
    """The caller must change something."""


class Unavailable(DanubeError):
    """Time may help."""

    retryable: ClassVar[bool] = True


class DataDamaged(DanubeError):
    """An operator must act."""


# --- the caller acts ------------------------------------------------------------------------------


class ProtocolViolation(Refused):
    """`what` says what the peer sent that the native protocol does not allow. The connection is closed."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what = what

    def __str__(self) -> str:
        return f"the protocol is violated: {self.what}"


class InvalidName(Refused):
    """`kind` is what was being named, `name` the text as given, `rule` what is allowed."""

    def __init__(self, kind: str, name: str, rule: str) -> None:
        super().__init__(kind, name, rule)
        self.kind = kind
        self.name = name
        self.rule = rule

    def __str__(self) -> str:
        shown = self.name if len(self.name) <= 80 else self.name[:77] + "..."
        return f"{shown!r} is not a {self.kind}: {self.rule}"


class InvalidBatch(Refused):
    """`what` names the field or check that failed and what was found."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what = what

    def __str__(self) -> str:
        return f"not a valid batch: {self.what}"


class ConfigError(Refused):
    """`key` is the setting, `value` what was given, `allowed` what may be given."""

    def __init__(self, key: str, value: object, allowed: str) -> None:
        super().__init__(key, value, allowed)
        self.key = key
        self.value = value
        self.allowed = allowed

    def __str__(self) -> str:
        return f"{self.key} = {self.value!r} is not allowed: {self.allowed}"


class OffsetOutOfRange(Refused):
    """The log holds [first, end); `offset` lies outside."""

    def __init__(self, topic: str, offset: int, first: int, end: int) -> None:
        super().__init__(topic, offset, first, end)
        self.topic = topic
        self.offset = offset
        self.first = first
        self.end = end

    def __str__(self) -> str:
        return f"offset {self.offset} of {self.topic} is not kept: offsets {self.first} up to {self.end} are"


class OffsetTaken(Refused):
    """`kind` ("offset" or "epoch") number `number` was already used by this topic; `next_free` was not."""

    def __init__(self, topic: str, number: int, next_free: int, kind: str) -> None:
        super().__init__(topic, number, next_free, kind)
        self.topic = topic
        self.number = number
        self.next_free = next_free
        self.kind = kind

    def __str__(self) -> str:
        return f"{self.kind} {self.number} of {self.topic} was given before: the next free one is {self.next_free}"


class OutOfSequence(Refused):
    """An idempotent producer's batch neither continues its sequence nor repeats a recent batch."""

    def __init__(self, producer_id: int, sequence: int, expected: int) -> None:
        super().__init__(producer_id, sequence, expected)
        self.producer_id = producer_id
        self.sequence = sequence
        self.expected = expected

    def __str__(self) -> str:
        return (
            f"producer {self.producer_id} sent sequence {self.sequence} where {self.expected} is next: "
            "send the unacknowledged batches again, unchanged and in order"
        )


class ProducerFenced(Refused):
    """A newer session of the same producer exists; this one may never write again."""

    def __init__(self, producer_id: int, session: int, current: int) -> None:
        super().__init__(producer_id, session, current)
        self.producer_id = producer_id
        self.session = session
        self.current = current

    def __str__(self) -> str:
        return (
            f"session {self.session} of producer {self.producer_id} was replaced by session {self.current}: "
            "another producer opened the same name"
        )


class SessionUnknown(Refused):
    """The session was never opened with this topic's owner, or has ended.

    A client that gets this for a message does not know whether an earlier try of it was stored.
    """

    def __init__(self, producer_id: int, session: int) -> None:
        super().__init__(producer_id, session)
        self.producer_id = producer_id
        self.session = session

    def __str__(self) -> str:
        return (
            f"session {self.session} of producer {self.producer_id} is not known here: open a session first. "
            "It may have ended, because nobody used it for long; what was sent under it without an answer may be stored"
        )


class TopicUnknown(Refused):
    """There is no topic of this name."""

    def __init__(self, topic: str) -> None:
        super().__init__(topic)
        self.topic = topic

    def __str__(self) -> str:
        return f"unable to find the topic {self.topic}: create it, or check the name"


class TopicExists(Refused):
    """The name is taken; `why` says by what."""

    def __init__(self, topic: str, why: str) -> None:
        super().__init__(topic, why)
        self.topic = topic
        self.why = why

    def __str__(self) -> str:
        return f"topic {self.topic} cannot be created: {self.why}"


class NamespaceUnknown(Refused):
    """There is no namespace of this name."""

    def __init__(self, namespace: str) -> None:
        super().__init__(namespace)
        self.namespace = namespace

    def __str__(self) -> str:
        return f"namespace {self.namespace} does not exist: create it first"


class NamespaceExists(Refused):
    """The namespace is there already."""

    def __init__(self, namespace: str) -> None:
        super().__init__(namespace)
        self.namespace = namespace

    def __str__(self) -> str:
        return f"unable to create the namespace {self.namespace} due to: it already exists"


class NamespaceNotEmpty(Refused):
    """A namespace is deleted only when it has no topics."""

    def __init__(self, namespace: str, topics: int) -> None:
        super().__init__(namespace, topics)
        self.namespace = namespace
        self.topics = topics

    def __str__(self) -> str:
        return f"namespace {self.namespace} still has {self.topics} topics: delete them first"


class DeliveryMismatch(Refused):
    """The topic was created with another dispatch strategy."""

    def __init__(self, topic: str, asked: str, found: str) -> None:
        super().__init__(topic, asked, found)
        self.topic = topic
        self.asked = asked
        self.found = found

    def __str__(self) -> str:
        return (
            f"requested dispatch strategy does not match topic strategy: {self.topic} is {self.found}, "
            f"asked for was {self.asked}"
        )


class SchemaMismatch(Refused):
    """A topic is bound to one schema subject."""

    def __init__(self, topic: str, bound: str, asked: str) -> None:
        super().__init__(topic, bound, asked)
        self.topic = topic
        self.bound = bound
        self.asked = asked

    def __str__(self) -> str:
        return f"topic {self.topic} is bound to schema subject {self.bound} and cannot use {self.asked}"


class SubscriptionUnknown(Refused):
    """The topic has no subscription of this name."""

    def __init__(self, topic: str, subscription: str) -> None:
        super().__init__(topic, subscription)
        self.topic = topic
        self.subscription = subscription

    def __str__(self) -> str:
        return f"topic {self.topic} has no subscription {self.subscription}"


class SubscriptionBusy(Refused):
    """Somebody uses the subscription; `holder` is one of its consumers."""

    def __init__(self, topic: str, subscription: str, holder: str) -> None:
        super().__init__(topic, subscription, holder)
        self.topic = topic
        self.subscription = subscription
        self.holder = holder

    def __str__(self) -> str:
        return (
            f"subscription {self.subscription} of {self.topic} can't be shared or removed: "
            f"consumer {self.holder} is connected"
        )


class AckOutdated(Refused):
    """`offset` was delivered before a seek moved the subscription, and not since: it comes again, or is behind it."""

    def __init__(self, topic: str, subscription: str, offset: int) -> None:
        super().__init__(topic, subscription, offset)
        self.topic = topic
        self.subscription = subscription
        self.offset = offset

    def __str__(self) -> str:
        return (
            f"offset {self.offset} of {self.topic} was delivered before subscription {self.subscription} was moved by "
            "a seek: acknowledge it when it is delivered again"
        )


class ProducerExists(Refused):
    """An exclusive producer holds the topic."""

    def __init__(self, topic: str, holder: str) -> None:
        super().__init__(topic, holder)
        self.topic = topic
        self.holder = holder

    def __str__(self) -> str:
        return f"topic {self.topic} has an exclusive producer: {self.holder}"


class LimitReached(Refused):
    """A policy allows at most `limit` of `what`."""

    def __init__(self, what: str, limit: int) -> None:
        super().__init__(what, limit)
        self.what = what
        self.limit = limit

    def __str__(self) -> str:
        return f"the policy allows at most {self.limit} {self.what}"


class MessageTooLarge(Refused):
    """A message is larger than the policy, or the wire, allows."""

    def __init__(self, size_bytes: int, limit_bytes: int) -> None:
        super().__init__(size_bytes, limit_bytes)
        self.size_bytes = size_bytes
        self.limit_bytes = limit_bytes

    def __str__(self) -> str:
        return f"a message of {self.size_bytes} bytes is over the limit of {self.limit_bytes}"


class BrokerUnknown(Refused):
    """The cluster never had a broker of this id."""

    def __init__(self, broker: str) -> None:
        super().__init__(broker)
        self.broker = broker

    def __str__(self) -> str:
        return f"there is no broker {self.broker} in this cluster: `brokers list` shows those that are"


class MoveRefused(Refused):
    """`what` (a topic, or a broker with its topics) cannot be moved away as the cluster stands. `why` is a sentence."""

    def __init__(self, what: str, why: str) -> None:
        super().__init__(what, why)
        self.what = what
        self.why = why

    def __str__(self) -> str:
        return self.why


class ClientClosed(Refused):
    """`what` was closed, by the application itself."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what = what

    def __str__(self) -> str:
        return f"{self.what} is closed"


class NeverOpened(ClientClosed):
    """`what` was made, and used before it was opened."""

    def __str__(self) -> str:
        return f"{self.what} was never opened: use async with (with, for the blocking client), or await its open()"


class ConsumerStopped(ClientClosed):
    """`what` receives no more, because the application said so; its acks still travel."""

    def __str__(self) -> str:
        return f"{self.what} was stopped: it receives no more messages"


# --- time acts ------------------------------------------------------------------------------------


class DiskFull(Unavailable):
    """There is no room at `path`; nothing of the request was kept."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.path = path

    def __str__(self) -> str:
        return f"no room left on the disk of {self.path}: free some space, publishing then resumes by itself"


class ResourcesShort(DiskFull):
    """The system gave this process no descriptor or no memory for `path`; nothing of the request was kept.

    Says nothing of the disk: what is open, and other files, can be used.
    """

    def __init__(self, path: str, why: str) -> None:
        Unavailable.__init__(self, path, why)
        self.path = path
        self.why = why

    def __str__(self) -> str:
        return (
            f"{self.path} could not be used: {self.why.lower()}; nothing was written, so try again. If it happens "
            "often: the broker needs a higher limit of open files (ulimit -n), or more memory"
        )


class LogFull(Unavailable):
    """The segments of all topics of a broker have `size_bytes`; nothing of the request was kept.

    `why` says what keeps them from being uploaded and freed.
    """

    def __init__(self, size_bytes: int, limit_bytes: int, why: str) -> None:
        super().__init__(size_bytes, limit_bytes, why)
        self.size_bytes = size_bytes
        self.limit_bytes = limit_bytes
        self.why = why

    def __str__(self) -> str:
        return (
            f"the log of this broker is full: {self.size_bytes / 2**20:.1f} MB, and storage.wal.max_mb allows "
            f"{self.limit_bytes / 2**20:.0f}. {self.why}. See to the object store, or allow more; publishing then "
            "resumes by itself"
        )


class LogBusy(Unavailable):
    """`pending_bytes` have come and are not on disk yet, more than `limit_bytes`; nothing of the request was kept."""

    def __init__(self, pending_bytes: int, limit_bytes: int) -> None:
        super().__init__(pending_bytes, limit_bytes)
        self.pending_bytes = pending_bytes
        self.limit_bytes = limit_bytes

    def __str__(self) -> str:
        return (
            f"{self.pending_bytes / 2**20:.1f} MB wait for this broker's disk, and storage.wal.pending_mb allows "
            f"{self.limit_bytes / 2**20:.1f}: try again in a moment"
        )


class LogClosed(Unavailable):
    """The topic's log is closed or closing here; another owner may have it."""

    def __init__(self, topic: str) -> None:
        super().__init__(topic)
        self.topic = topic

    def __str__(self) -> str:
        return f"the log of {self.topic} is closed here"


class LeaseLost(Unavailable):
    """The lease is not known to the store any more: it ran out or was revoked."""

    def __init__(self, lease: int) -> None:
        super().__init__(lease)
        self.lease = lease

    def __str__(self) -> str:
        return f"lease {self.lease} has run out"


class Conflict(Unavailable):
    """Somebody else changed `key` first; read it again and decide anew."""

    def __init__(self, key: str) -> None:
        super().__init__(key)
        self.key = key

    def __str__(self) -> str:
        return f"{self.key} was changed by somebody else"


class Unreachable(Unavailable):
    """`peer` did not answer: `why`."""

    def __init__(self, peer: str, why: str) -> None:
        super().__init__(peer, why)
        self.peer = peer
        self.why = why

    def __str__(self) -> str:
        return f"{self.peer} cannot be reached: {self.why}"


class ProcessEnded(Unreachable):
    """The process beside the broker that stores large objects ended: `why`. What it did is not known."""

    def __init__(self, why: str) -> None:
        super().__init__("the process for large objects", why)
        self.args = (why,)


class StoreRefused(Unreachable):
    """`peer`, an object store, answered and refused: `why`. Trying again helps once somebody has changed something.

    At the start this becomes a ConfigError. Later, when a password was changed, say, it is as good as no answer.
    """


class NotServed(Unavailable):
    """The topic cannot be used here just now: `why`. `moved_to`: the native URL of the broker that has it, if known."""

    def __init__(self, topic: str, why: str, moved_to: str = "") -> None:
        super().__init__(topic, why, moved_to)
        self.topic = topic
        self.why = why
        self.moved_to = moved_to

    def __str__(self) -> str:
        return f"topic {self.topic} is not served here: {self.why}"


class OwnershipLost(Unavailable):
    """The owner key changed: nothing was written."""

    def __init__(self, topic: str) -> None:
        super().__init__(topic)
        self.topic = topic

    def __str__(self) -> str:
        return f"this broker no longer owns {self.topic}: look it up again"


class ProducerUnknown(Unavailable):
    """The id is not that of a producer of this broker."""

    def __init__(self, producer_id: int) -> None:
        super().__init__(producer_id)
        self.producer_id = producer_id

    def __str__(self) -> str:
        return f"producer {self.producer_id} is not known here: look up the topic and create the producer again"


class ConsumerUnknown(Unavailable):
    """The id is not that of a consumer of this broker."""

    def __init__(self, consumer_id: int) -> None:
        super().__init__(consumer_id)
        self.consumer_id = consumer_id

    def __str__(self) -> str:
        return f"consumer {self.consumer_id} is not known here: look up the topic and subscribe again"


class RateLimited(Unavailable):
    """Faster than the policy allows; slow down and try again."""

    def __init__(self, topic: str, per_second: int) -> None:
        super().__init__(topic, per_second)
        self.topic = topic
        self.per_second = per_second

    def __str__(self) -> str:
        return f"topic {self.topic} takes at most {self.per_second} messages per second: try again later"


class TooManyConnections(Unavailable):
    """A door of this broker takes at most `limit` connections, for the process may have `open_files` open files."""

    def __init__(self, limit: int, open_files: int) -> None:
        super().__init__(limit, open_files)
        self.limit = limit
        self.open_files = open_files

    def __str__(self) -> str:
        return (
            f"this broker takes at most {self.limit} connections here, because its limit of open files is "
            f"{self.open_files}: try again when others have left, or raise the limit (ulimit -n) and restart it"
        )


class DeadlineExceeded(Unavailable):
    """`what` was not done within `seconds`. Whether it is done later, or was and the answer is lost, is not known."""

    def __init__(self, what: str, seconds: float, why: str = "") -> None:
        super().__init__(what, seconds, why)
        self.what = what
        self.seconds = seconds
        self.why = why

    def __str__(self) -> str:
        return f"{self.what} took longer than {self.seconds:g} s" + (f": {self.why}" if self.why else "")


class BufferFull(Unavailable):
    """A producer has `limit_bytes` without a receipt. `send` waits for room, `send_nowait` does not."""

    def __init__(self, topic: str, limit_bytes: int) -> None:
        super().__init__(topic, limit_bytes)
        self.topic = topic
        self.limit_bytes = limit_bytes

    def __str__(self) -> str:
        return f"{self.limit_bytes} bytes to {self.topic} wait for their receipts: send slower, or use send()"


# --- an operator acts -----------------------------------------------------------------------------


class DiskFailed(DataDamaged):
    """The disk refused `operation` on `path`; what it holds of that write is unknown."""

    def __init__(self, path: str, operation: str, why: str) -> None:
        super().__init__(path, operation, why)
        self.path = path
        self.operation = operation
        self.why = why

    def __str__(self) -> str:
        return f"{self.operation} of {self.path} failed: {self.why}"


class LogStopped(DataDamaged):
    """The disk failed twice in a row; nothing is acknowledged by this process any more."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why

    def __str__(self) -> str:
        return f"the log stopped because the disk failed: {self.why}; replace the disk and restart"


class LogDamaged(DataDamaged):
    """Stored bytes are not what was written. Offsets [first, end) of the topic cannot be read from here.

    `end` is None when the damage hides how far the range goes.
    """

    def __init__(self, topic: str, path: str, position: int, first: int, end: int | None, why: str) -> None:
        super().__init__(topic, path, position, first, end, why)
        self.topic = topic
        self.path = path
        self.position = position
        self.first = first
        self.end = end
        self.why = why

    def __str__(self) -> str:
        until = "an unknown end" if self.end is None else str(self.end)
        return (
            f"{self.path} is damaged at position {self.position} ({self.why}): "
            f"offsets {self.first} up to {until} of {self.topic} cannot be read"
        )


class InvalidObject(DataDamaged):
    """`part` of an object's bytes is not what it must be: `why`."""

    def __init__(self, part: str, why: str) -> None:
        super().__init__(part, why)
        self.part = part
        self.why = why

    def __str__(self) -> str:
        return f"{self.part}: {self.why}"


class ObjectDamaged(DataDamaged):
    """Offsets [first, end) of the topic cannot be read from the object store: `why`. It is asked again now and then."""

    def __init__(self, topic: str, key: str, first: int, end: int, why: str) -> None:
        super().__init__(topic, key, first, end, why)
        self.topic = topic
        self.key = key
        self.first = first
        self.end = end
        self.why = why

    def __str__(self) -> str:
        return (
            f"object {self.key} with offsets {self.first} up to {self.end} of {self.topic} cannot be read "
            f"({self.why}): "
            "bring it back from a backup; reading then goes on by itself"
        )


class TailUnproven(DataDamaged):
    """The log's end cannot be known, so an offset might be given twice. `head` is the last good guess."""

    def __init__(self, topic: str, head: int, why: str) -> None:
        super().__init__(topic, head, why)
        self.topic = topic
        self.head = head
        self.why = why

    def __str__(self) -> str:
        return (
            f"the log of {self.topic} cannot prove that it ends at offset {self.head} ({self.why}): "
            "open it with a start offset that was certainly never used"
        )


class DirectoryInUse(DataDamaged):
    """A live process holds the data directory."""

    def __init__(self, path: str, pid: int | None) -> None:
        super().__init__(path, pid)
        self.path = path
        self.pid = pid

    def __str__(self) -> str:
        holder = "another process" if self.pid is None else f"process {self.pid}"
        return f"{self.path} is in use by {holder}: stop it first, or choose another data directory"


class NodeIdInUse(DataDamaged):
    """Another process, at `where`, is registered under this broker's id and alive."""

    def __init__(self, broker: str, where: str) -> None:
        super().__init__(broker, where)
        self.broker = broker
        self.where = where

    def __str__(self) -> str:
        return (
            f"broker {self.broker} is running already, at {self.where}: this data directory is a copy of its; "
            "stop that broker first, or start this one with an empty data directory"
        )


class MoveFailed(DataDamaged):
    """The topic could not be moved away: `why`. It is served where it was."""

    def __init__(self, topic: str, why: str) -> None:
        super().__init__(topic, why)
        self.topic = topic
        self.why = why

    def __str__(self) -> str:
        return f"topic {self.topic} was not moved and is served where it was: {self.why}"


class FormatTooNew(DataDamaged):
    """The data directory was written by a newer version of PyDanube."""

    def __init__(self, path: str, found: int, supported: int) -> None:
        super().__init__(path, found, supported)
        self.path = path
        self.found = found
        self.supported = supported

    def __str__(self) -> str:
        return (
            f"{self.path} has format {self.found} and this version reads formats up to {self.supported}: "
            "upgrade PyDanube, or choose another data directory"
        )
