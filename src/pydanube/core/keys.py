"""Every key in the metadata store, on one page. Values are JSON unless noted.

    /cluster/name/<cluster>                                      null
    /cluster/id                                                  text: which store belongs to which cluster
    /cluster/store                                               text: the object store that all brokers share
    /cluster/leader                                              broker id, leased
    /cluster/register/<broker>                                   addresses, leased: this broker is alive
    /cluster/brokers/<broker>/state                              {mode, reason}
    /cluster/brokers/<broker>/<ns>/<topic>                       null: this broker serves the topic
    /cluster/unassigned/<ns>/<topic>                             null | {reason, from_broker, to}
    /cluster/lost/<broker>                                       {session} that the leader declared dead
    /cluster/seen/<broker>                                       who was there in the last day (presence.py)
    /cluster/rescues/<ns>/<topic>/<epoch, 20 digits>              {wanted}: bring this lost epoch, broker; then
                                                                 {broker, objects, end, damaged}: brought
    /cluster/load/<broker>                                       load report, leased
    /cluster/load/<broker>/quiet                                 of its topics that are as they were, leased
    /cluster/rebalancing_history/<timestamp>                     one move

    /events/<time in microseconds, 20 digits>/<broker>           what happened, and who did it (presence.py)

    /namespaces/<ns>/policy                                      the seven limits
    /namespaces/<ns>/topics/<ns>/<topic>                         null
    /namespaces/<ns>/partitioned/<ns>/<topic>                    {partitions}: so many were asked for

    /topics/<ns>/<topic>                                         null: the topic exists
    /topics/<ns>/<topic>/delivery                                "Reliable" | "NonReliable"
    /topics/<ns>/<topic>/on_crash                                "wait": only the broker that has its log may serve it
    /topics/<ns>/<topic>/dispatch_config                         {heartbeat} of its subscriptions that have none
    /topics/<ns>/<topic>/policy
    /topics/<ns>/<topic>/schema_config                           (core/schemas/enforcing.py)
    /topics/<ns>/<topic>/schema                                  subject, as versions before schema_config stored it
    /topics/<ns>/<topic>/subscriptions/<sub>                     {subscription_name, subscription_type, ...}
    /topics/<ns>/<topic>/subscriptions/<sub>/cursor              last acknowledged offset, -1 for none
    /topics/<ns>/<topic>/subscriptions/<sub>/ack_holes           bytes (core/dispatch/window.py)
    /topics/<ns>/<topic>/subscriptions/<sub>/seeks               how often it was moved by a seek; no key: never
    /topics/<ns>/<topic>/subscriptions/<sub>/failure_policy      (core/dispatch/delivery.py)
    /topics/<ns>/<topic>/subscriptions/<sub>/dispatch_config     {max_unacked_messages, heartbeat}
    /topics/<ns>/<topic>/subscriptions/<sub>/consumers/<consumer> {consumer_name, key_filters}

    /storage/topics/<ns>/<topic>/owner                           {epoch, session, broker_id, start_offset, since, …}
    /storage/topics/<ns>/<topic>/reserve                         {end}
    /storage/topics/<ns>/<topic>/state                           the seal
    /storage/topics/<ns>/<topic>/history                         {first_offset, history_version, manifest, …}
    /storage/topics/<ns>/<topic>/sessions                        bytes (core/commit/sessions.py): of what objects hold
    /storage/topics/<ns>/<topic>/objects/<start, 20 digits>      descriptor
    /storage/topics/<ns>/<topic>/orphans/<start, 20 digits>      {end, broker, epoch}
    /storage/topics/<ns>/<topic>/voids/<start, 20 digits>        {end}

    /pipelines/<name>/declaration                                (core/pipelines/declaration.py), without secrets
    /pipelines/<name>/status                                     as its supervisor wrote it (core/pipelines/status.py)
    /pipelines/<name>/claim                                      {supervisor, lease}, leased: who runs it

    /schemas/<subject>/metadata                                  (core/schemas/subjects.py), without texts of schemas
    /schemas/<subject>/versions/<n, 10 digits>                   one text, written once
    /schemas/_index/by_id/<schema id>                            text: the subject
    /schemas/_global/next_schema_id                              counter
    /auth/roles/<name>
    /auth/bindings/<scope path>/<id>

A builder's inverse returns None for a key of another kind, so that it can sort what a list or a watch brings;
a key under our prefix that no builder makes is of another kind too.
Prefixes end with a slash: /topics/default/foo/ never finds /topics/default/foobar.
"""

from __future__ import annotations

from typing import Final, NewType

from pydanube.core.names import (
    BrokerId,
    ConsumerId,
    NamespaceName,
    SubscriptionName,
    TopicName,
    parse_broker_id,
)
from pydanube.errors import InvalidName

Key = NewType("Key", str)
Prefix = NewType("Prefix", str)  # to list or to watch

OFFSET_DIGITS: Final = 20  # so that keys sort as offsets do
VERSION_DIGITS: Final = 10

LEADER: Final = Key("/cluster/leader")
CLUSTER_ID: Final = Key("/cluster/id")
STORE_STAMP: Final = Key("/cluster/store")
NEXT_SCHEMA_ID: Final = Key("/schemas/_global/next_schema_id")

CLUSTER: Final = Prefix("/cluster/")  # everything that brokers agree on; no cursor and no descriptor is below it
REGISTRATIONS: Final = Prefix("/cluster/register/")
BROKERS: Final = Prefix("/cluster/brokers/")
UNASSIGNED: Final = Prefix("/cluster/unassigned/")
LOST: Final = Prefix("/cluster/lost/")
SEEN: Final = Prefix("/cluster/seen/")
EVENTS: Final = Prefix("/events/")
RESCUES: Final = Prefix("/cluster/rescues/")
LOADS: Final = Prefix("/cluster/load/")
REBALANCING_HISTORY: Final = Prefix("/cluster/rebalancing_history/")
NAMESPACES: Final = Prefix("/namespaces/")
TOPICS: Final = Prefix("/topics/")
STORAGE: Final = Prefix("/storage/topics/")
PIPELINES: Final = Prefix("/pipelines/")
SCHEMAS: Final = Prefix("/schemas/")
SCHEMA_IDS: Final = Prefix("/schemas/_index/by_id/")
ROLES: Final = Prefix("/auth/roles/")
BINDINGS: Final = Prefix("/auth/bindings/")


# --- the cluster --------------------------------------------------------------------------------------


def cluster(name: str) -> Key:
    return Key(f"/cluster/name/{name}")


def registration(broker: BrokerId) -> Key:
    return Key(f"{REGISTRATIONS}{broker}")


def broker_of_registration(key: str) -> BrokerId | None:
    return _broker(_tail(key, REGISTRATIONS, 1))


def broker_state(broker: BrokerId) -> Key:
    return Key(f"{BROKERS}{broker}/state")


def broker_of_state(key: str) -> BrokerId | None:
    tail = _tail(key, BROKERS, 2)
    return _broker(tail[:1]) if tail and tail[1] == "state" else None


def assignment(broker: BrokerId, topic: TopicName) -> Key:
    return Key(f"{BROKERS}{broker}{topic}")


def assignments(broker: BrokerId) -> Prefix:
    """Also finds the broker's state; `assignment_of` tells them apart."""
    return Prefix(f"{BROKERS}{broker}/")


def assignment_of(key: str) -> tuple[BrokerId, TopicName] | None:
    tail = _tail(key, BROKERS, 3)
    broker, name = _broker(tail[:1]), _topic(tail[1:])
    return (broker, name) if broker and name else None


def unassigned(topic: TopicName) -> Key:
    return Key(f"{UNASSIGNED}{topic[1:]}")


def topic_of_unassigned(key: str) -> TopicName | None:
    return _topic(_tail(key, UNASSIGNED, 2))


def lost(broker: BrokerId) -> Key:
    return Key(f"{LOST}{broker}")


def broker_of_lost(key: str) -> BrokerId | None:
    return _broker(_tail(key, LOST, 1))


def seen(broker: BrokerId) -> Key:
    return Key(f"{SEEN}{broker}")


def broker_of_seen(key: str) -> BrokerId | None:
    return _broker(_tail(key, SEEN, 1))


def event(time_us: int, broker: BrokerId) -> Key:
    return Key(f"{EVENTS}{time_us:0{OFFSET_DIGITS}}/{broker}")


def time_of_event(key: str) -> int | None:
    """Microseconds since 1970."""
    tail = _tail(key, EVENTS, 2)
    return int(tail[0]) if tail and len(tail[0]) == OFFSET_DIGITS and tail[0].isdecimal() else None


def rescue(topic: TopicName, epoch: int) -> Key:
    return Key(f"{RESCUES}{topic[1:]}/{epoch:0{OFFSET_DIGITS}}")


def rescue_of(key: str) -> tuple[TopicName, int] | None:
    tail = _tail(key, RESCUES, 3)
    name = _topic(tail[:2])
    return (name, int(tail[2])) if name and len(tail[2]) == OFFSET_DIGITS and tail[2].isdecimal() else None


def load(broker: BrokerId) -> Key:
    return Key(f"{LOADS}{broker}")


def broker_of_load(key: str) -> BrokerId | None:
    return _broker(_tail(key, LOADS, 1))


def quiet_load(broker: BrokerId) -> Key:
    return Key(f"{LOADS}{broker}/quiet")


def broker_of_quiet_load(key: str) -> BrokerId | None:
    tail = _tail(key, LOADS, 2)
    return _broker(tail[:1]) if tail and tail[1] == "quiet" else None


def rebalancing(timestamp_ms: int) -> Key:
    return Key(f"{REBALANCING_HISTORY}{timestamp_ms:0{OFFSET_DIGITS}}")


def time_of_rebalancing(key: str) -> int | None:
    tail = _tail(key, REBALANCING_HISTORY, 1)
    return int(tail[0]) if tail and len(tail[0]) == OFFSET_DIGITS and tail[0].isdecimal() else None


# --- namespaces ---------------------------------------------------------------------------------------


def namespace_policy(namespace: NamespaceName) -> Key:
    return Key(f"{NAMESPACES}{namespace}/policy")


def namespace_of_policy(key: str) -> NamespaceName | None:
    """Every namespace has a policy: listing NAMESPACES through this gives each of them once."""
    tail = _tail(key, NAMESPACES, 2)
    if not tail or tail[1] != "policy":
        return None
    try:
        return NamespaceName(tail[0])
    except InvalidName:
        return None


def namespace_topic(topic: TopicName) -> Key:
    return Key(f"{NAMESPACES}{topic.namespace}/topics{topic}")


def namespace_topics(namespace: NamespaceName) -> Prefix:
    return Prefix(f"{NAMESPACES}{namespace}/topics/")


def topic_of_namespace(key: str) -> TopicName | None:
    tail = _tail(key, NAMESPACES, 4)
    return _topic(tail[2:]) if tail and tail[1] == "topics" else None


def partitioned(base: TopicName) -> Key:
    return Key(f"{NAMESPACES}{base.namespace}/partitioned{base}")


def base_of_partitioned(key: str) -> TopicName | None:
    tail = _tail(key, NAMESPACES, 4)
    return _topic(tail[2:]) if tail and tail[1] == "partitioned" else None


# --- topics -------------------------------------------------------------------------------------------


def topic(name: TopicName) -> Key:
    return Key(f"/topics{name}")


def below_topic(name: TopicName) -> Prefix:
    """Everything about the topic except the topic's own key."""
    return Prefix(f"/topics{name}/")


def topic_of(key: str) -> TopicName | None:
    return _topic(_tail(key, TOPICS, 2))


def delivery(name: TopicName) -> Key:
    return Key(f"/topics{name}/delivery")


def on_crash(name: TopicName) -> Key:
    return Key(f"/topics{name}/on_crash")


def topic_policy(name: TopicName) -> Key:
    return Key(f"/topics{name}/policy")


def topic_dispatch_config(name: TopicName) -> Key:
    return Key(f"/topics{name}/dispatch_config")


def schema(name: TopicName) -> Key:
    return Key(f"/topics{name}/schema")


def schema_config(name: TopicName) -> Key:
    return Key(f"/topics{name}/schema_config")


def subscription(name: TopicName, sub: SubscriptionName) -> Key:
    return Key(f"/topics{name}/subscriptions/{sub}")


def subscriptions(name: TopicName) -> Prefix:
    """Also finds cursors and policies; `subscription_of` picks the subscriptions themselves."""
    return Prefix(f"/topics{name}/subscriptions/")


def below_subscription(name: TopicName, sub: SubscriptionName) -> Prefix:
    return Prefix(f"/topics{name}/subscriptions/{sub}/")


def subscription_of(key: str) -> tuple[TopicName, SubscriptionName] | None:
    tail = _tail(key, TOPICS, 4)
    return _subscription(tail) if tail and tail[2] == "subscriptions" else None


def cursor(name: TopicName, sub: SubscriptionName) -> Key:
    return Key(f"/topics{name}/subscriptions/{sub}/cursor")


def subscription_of_cursor(key: str) -> tuple[TopicName, SubscriptionName] | None:
    return subscription_of(key.removesuffix("/cursor")) if key.endswith("/cursor") else None


def ack_holes(name: TopicName, sub: SubscriptionName) -> Key:
    return Key(f"/topics{name}/subscriptions/{sub}/ack_holes")


def seeks(name: TopicName, sub: SubscriptionName) -> Key:
    return Key(f"/topics{name}/subscriptions/{sub}/seeks")


def failure_policy(name: TopicName, sub: SubscriptionName) -> Key:
    return Key(f"/topics{name}/subscriptions/{sub}/failure_policy")


def dispatch_config(name: TopicName, sub: SubscriptionName) -> Key:
    return Key(f"/topics{name}/subscriptions/{sub}/dispatch_config")


def consumer(name: TopicName, sub: SubscriptionName, identity: ConsumerId) -> Key:
    return Key(f"/topics{name}/subscriptions/{sub}/consumers/{identity}")


def consumers(name: TopicName, sub: SubscriptionName) -> Prefix:
    return Prefix(f"/topics{name}/subscriptions/{sub}/consumers/")


def consumer_of(key: str) -> tuple[TopicName, SubscriptionName, ConsumerId] | None:
    tail = _tail(key, TOPICS, 6)
    if not tail or (tail[2], tail[4]) != ("subscriptions", "consumers") or not tail[5].isdecimal():
        return None
    found = _subscription(tail[:4])
    return (*found, ConsumerId(int(tail[5]))) if found else None


# --- storage: written by the topic's owner only ---------------------------------------------------------


def below_storage(name: TopicName) -> Prefix:
    return Prefix(f"/storage/topics{name}/")


def topic_above(key: str) -> TopicName | None:
    """Whose any key below `below_storage` is."""
    ours, _, tail = key.partition(STORAGE)
    return _topic(tail.split("/")[:2]) if not ours and tail.count("/") >= 2 else None


def owner(name: TopicName) -> Key:
    return Key(f"/storage/topics{name}/owner")


def topic_of_owner(key: str) -> TopicName | None:
    tail = _tail(key, STORAGE, 3)
    return _topic(tail[:2]) if tail and tail[2] == "owner" else None


def reserve(name: TopicName) -> Key:
    return Key(f"/storage/topics{name}/reserve")


def seal(name: TopicName) -> Key:
    return Key(f"/storage/topics{name}/state")


def sessions(name: TopicName) -> Key:
    return Key(f"/storage/topics{name}/sessions")


def history(name: TopicName) -> Key:
    return Key(f"/storage/topics{name}/history")


def storage_object(name: TopicName, start: int) -> Key:
    return Key(f"/storage/topics{name}/objects/{start:0{OFFSET_DIGITS}}")


def storage_objects(name: TopicName) -> Prefix:
    return Prefix(f"/storage/topics{name}/objects/")


def orphan(name: TopicName, start: int) -> Key:
    return Key(f"/storage/topics{name}/orphans/{start:0{OFFSET_DIGITS}}")


def orphans(name: TopicName) -> Prefix:
    return Prefix(f"/storage/topics{name}/orphans/")


def void(name: TopicName, start: int) -> Key:
    return Key(f"/storage/topics{name}/voids/{start:0{OFFSET_DIGITS}}")


def voids(name: TopicName) -> Prefix:
    return Prefix(f"/storage/topics{name}/voids/")


def start_of(key: str) -> int | None:
    """The start offset in the key of an object, an orphan or a void."""
    tail = _tail(key, STORAGE, 4)
    if not tail or tail[2] not in ("objects", "orphans", "voids"):
        return None
    return int(tail[3]) if len(tail[3]) == OFFSET_DIGITS and tail[3].isdecimal() else None


# --- pipelines ----------------------------------------------------------------------------------------


def pipeline_declaration(name: str) -> Key:
    return Key(f"{PIPELINES}{name}/declaration")


def pipeline_status(name: str) -> Key:
    return Key(f"{PIPELINES}{name}/status")


def pipeline_claim(name: str) -> Key:
    return Key(f"{PIPELINES}{name}/claim")


def below_pipeline(name: str) -> Prefix:
    return Prefix(f"{PIPELINES}{name}/")


def pipeline_of(key: str) -> tuple[str, str] | None:
    """The name, and which of the three it is."""
    tail = _tail(key, PIPELINES, 2)
    return (tail[0], tail[1]) if tail and tail[0] and tail[1] in ("declaration", "status", "claim") else None


# --- schemas and access ---------------------------------------------------------------------------------


def schema_metadata(subject: str) -> Key:
    return Key(f"{SCHEMAS}{subject}/metadata")


def subject_of_metadata(key: str) -> str | None:
    tail = _tail(key, SCHEMAS, 2)
    return tail[0] if tail and tail[1] == "metadata" and not tail[0].startswith("_") else None


def schema_version(subject: str, version: int) -> Key:
    return Key(f"{SCHEMAS}{subject}/versions/{version:0{VERSION_DIGITS}}")


def schema_versions(subject: str) -> Prefix:
    return Prefix(f"{SCHEMAS}{subject}/versions/")


def version_of_schema(key: str) -> int | None:
    tail = _tail(key, SCHEMAS, 3)
    if not tail or tail[1] != "versions" or len(tail[2]) != VERSION_DIGITS or not tail[2].isdecimal():
        return None
    return int(tail[2])


def schema_by_id(schema_id: int) -> Key:
    return Key(f"{SCHEMA_IDS}{schema_id}")


def role(name: str) -> Key:
    return Key(f"{ROLES}{name}")


def binding(scope_path: str, identity: str) -> Key:
    """`scope_path` is `cluster`, `namespace/<ns>` or `topic/<ns>/<topic>`."""
    return Key(f"{BINDINGS}{scope_path}/{identity}")


# --- helpers --------------------------------------------------------------------------------------------


def _tail(key: str, prefix: Prefix, parts: int) -> list[str]:
    """What stands after `prefix`, if it is exactly this many parts; else nothing."""
    tail = key.removeprefix(prefix).split("/") if key.startswith(prefix) else []
    return tail if len(tail) == parts else []


def _broker(tail: list[str]) -> BrokerId | None:
    try:
        return parse_broker_id(tail[0]) if tail else None
    except InvalidName:
        return None


def _topic(tail: list[str]) -> TopicName | None:
    try:
        return TopicName.of(*tail) if tail else None
    except InvalidName:
        return None


def _subscription(tail: list[str]) -> tuple[TopicName, SubscriptionName] | None:
    name = _topic(tail[:2])
    try:
        return (name, SubscriptionName(tail[3])) if name else None
    except InvalidName:
        return None
