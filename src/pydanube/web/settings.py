"""What can be set from the pages: failure policy, window and heartbeat of a subscription; retention of history.

A form changes what it names and leaves the rest as it is. A partition's form may be applied to all partitions of its
topic; they are set one after the other, and a failure says how far it came.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, NamedTuple

from starlette.requests import Request
from starlette.responses import Response

from pydanube.admin import calls, values
from pydanube.admin.values import BACKOFF, POISON
from pydanube.core.cluster.conditions import count as counted
from pydanube.core.dispatch.consumer_window import UNACKED_MAX_ALLOWED
from pydanube.core.dispatch.delivery import (
    DELAY_MAX_MS,
    REDELIVERY_COUNT_MAX,
    BackoffStrategy,
    FailurePolicy,
    PoisonPolicy,
)
from pydanube.core.dispatch.lag import OBSERVE, OFF, PROFILES
from pydanube.core.names import NamespaceName, TopicName
from pydanube.core.policies import U32_MAX, TopicPolicy
from pydanube.errors import ConfigError, DanubeError
from pydanube.web import formats
from pydanube.web.site import Site, form_of, sentence_of, subscription_of, subscription_url, topic_of, topic_url, whole

LIMITS: Final = tuple(TopicPolicy().limits())
BACKOFF_WORDS: Final = {number: word for word, number in BACKOFF.items()}
POISON_WORDS: Final = {number: word.replace("_", " ") for word, number in POISON.items()}
HEARTBEATS: Final = (*PROFILES, OFF, OBSERVE)
DEFAULTS: Final = FailurePolicy()
_BACKOFF_OF: Final = {BackoffStrategy.FIXED: BACKOFF["fixed"], BackoffStrategy.EXPONENTIAL: BACKOFF["exponential"]}
_POISON_OF: Final = {
    PoisonPolicy.DEAD_LETTER: POISON["dead_letter"],
    PoisonPolicy.BLOCK: POISON["block"],
    PoisonPolicy.DROP: POISON["drop"],
}


# --- failure policy -----------------------------------------------------------------------------------------------


def default_policy() -> values.SubscriptionFailurePolicy:
    """What a broker goes by when nothing is set."""
    return values.SubscriptionFailurePolicy(
        max_redelivery_count=DEFAULTS.max_redelivery_count,
        ack_timeout_ms=DEFAULTS.ack_timeout_ms,
        base_redelivery_delay_ms=DEFAULTS.base_redelivery_delay_ms,
        max_redelivery_delay_ms=DEFAULTS.max_redelivery_delay_ms,
        backoff_strategy=_BACKOFF_OF[DEFAULTS.backoff_strategy],
        poison_policy=_POISON_OF[DEFAULTS.poison_policy],
    )


def policy_rows(policy: values.SubscriptionFailurePolicy) -> list[tuple[str, str]]:
    return [
        ("Redeliveries at most", f"{policy.max_redelivery_count:,}"),
        ("Acknowledge within", formats.duration(policy.ack_timeout_ms / 1000) if policy.ack_timeout_ms else "any time"),
        ("First delay", formats.duration(policy.base_redelivery_delay_ms / 1000)),
        ("Longest delay", formats.duration(policy.max_redelivery_delay_ms / 1000)),
        ("Backoff", BACKOFF_WORDS.get(policy.backoff_strategy, "unknown")),
        ("Then", POISON_WORDS.get(policy.poison_policy, "unknown")),
    ]


def default_sentence() -> str:
    return "The broker's defaults: " + ", ".join(
        f"{name.lower()} {value}" for name, value in policy_rows(default_policy())
    )


def changed_policy(now: values.SubscriptionFailurePolicy, form: Mapping[str, str]) -> values.SubscriptionFailurePolicy:
    """`now`, with what the form names. Raises ConfigError."""
    policy = values.SubscriptionFailurePolicy()
    policy.CopyFrom(now)
    policy.max_redelivery_count = whole(form, "max_redelivery_count", now.max_redelivery_count, 0, REDELIVERY_COUNT_MAX)
    for name in ("ack_timeout_ms", "base_redelivery_delay_ms", "max_redelivery_delay_ms"):
        setattr(policy, name, whole(form, name, getattr(now, name), 0, DELAY_MAX_MS))
    if form.get("backoff_strategy"):
        policy.backoff_strategy = _choice(form, "backoff_strategy", BACKOFF)
    if form.get("poison_policy"):
        policy.poison_policy = _choice(form, "poison_policy", POISON)
    if "dead_letter_topic" in form:
        policy.ClearField("dead_letter_topic")
        if form["dead_letter_topic"].strip():
            policy.dead_letter_topic = TopicName(form["dead_letter_topic"].strip())
    return policy


def _choice(form: Mapping[str, str], key: str, choices: Mapping[str, Any]) -> Any:
    if form[key] not in choices:
        raise ConfigError(key, form[key][:50], f"one of {', '.join(choices)}")
    return choices[form[key]]


async def set_policy(site: Site, request: Request) -> Response:
    own = subscription_of(request)

    async def change(topic: str, form: Mapping[str, str]) -> str:
        found = await site.gateway.ask(calls.failure_policy(topic, own))
        now = found.failure_policy if found.HasField("failure_policy") else default_policy()
        policy = changed_policy(now, form)
        await site.gateway.ask(calls.set_failure_policy(topic, own, policy))
        return "Set. Now: " + ", ".join(f"{name.lower()} {value}" for name, value in policy_rows(policy)) + "."

    return await _of_subscription(site, request, change)


# --- window and heartbeat -------------------------------------------------------------------------------------------


async def set_window(site: Site, request: Request) -> Response:
    own = subscription_of(request)

    async def change(topic: str, form: Mapping[str, str]) -> str:
        number = whole(form, "max_unacked_messages", 0, 1, UNACKED_MAX_ALLOWED)
        if not number:
            raise ConfigError("max_unacked_messages", "", f"a whole number from 1 to {UNACKED_MAX_ALLOWED}")
        await site.gateway.ask(calls.set_dispatch_config(topic, own, number))
        return f"Set: {counted(number, 'message')} at most may be sent and not acknowledged."

    return await _of_subscription(site, request, change)


async def set_heartbeat(site: Site, request: Request) -> Response:
    own = subscription_of(request)

    async def change(topic: str, form: Mapping[str, str]) -> str:
        done = await site.gateway.ask(calls.set_heartbeat(topic, form.get("heartbeat", "").strip(), own))
        return f"Set: its heartbeat is {done.heartbeat}."

    return await _of_subscription(site, request, change)


async def _of_subscription(
    site: Site, request: Request, change: Callable[[str, Mapping[str, str]], Awaitable[str]]
) -> Response:
    name, own = topic_of(request), subscription_of(request)
    return await _everywhere(site, request, name, subscription_url(name, own), change)


async def _everywhere(
    site: Site, request: Request, name: TopicName, here: str, change: Callable[[str, Mapping[str, str]], Awaitable[str]]
) -> Response:
    """Here, or in all partitions if the form says so; back to `here` with a sentence."""
    form = await form_of(request)
    done, said = 0, ""
    try:
        targets = [name]
        if form.get("all_partitions") == "1" and name.partition_number is not None:
            targets = await site.gateway.parts(name.base)
        for target in targets:
            said = await change(target, form)
            done += 1
    except DanubeError as error:
        so_far = f"Set for {done} of {len(targets)} partitions, then: " if done else ""
        return site.back(here, failed=f"{so_far}{sentence_of(error)}")
    return site.back(here, said=f"{said} In all {done} partitions." if done > 1 else said)


# --- retention ------------------------------------------------------------------------------------------------------


class RetentionView(NamedTuple):
    minutes: int
    mb: int
    set_by: str
    sentence: str

    @classmethod
    def of(cls, found: values.RetentionRule) -> RetentionView:
        kept = []
        if found.minutes:
            kept.append(f"for {formats.duration(found.minutes * 60.0)}")
        if found.mb:
            kept.append(f"up to {found.mb:,} MB")
        sentence = f"History is kept {' and '.join(kept) or 'for ever'}"
        due = f"; {counted(found.due_objects, 'object')} to go at the next look" if found.due_objects else ""
        return cls(found.minutes, found.mb, found.set_by, f"{sentence}, as the {found.set_by} says{due}.")


def retention_request(
    form: Mapping[str, str], *, topic: str | None = None, namespace: str | None = None
) -> values.SetRetentionRequest:
    """Raises ConfigError."""
    request = values.SetRetentionRequest(topic=topic, namespace=namespace)
    if form.get("reset") == "1":
        request.reset = True
        return request
    for name in ("minutes", "mb"):
        if form.get(name, "").strip():
            setattr(request, name, whole(form, name, 0, 0, U32_MAX))
    if not (request.HasField("minutes") or request.HasField("mb")):
        raise ConfigError("minutes", "", "how many minutes or MB of history to keep; 0 keeps it for ever")
    return request


async def set_topic_retention(site: Site, request: Request) -> Response:
    name = topic_of(request)

    async def change(topic: str, form: Mapping[str, str]) -> str:
        done = await site.gateway.ask(calls.set_retention(retention_request(form, topic=topic)))
        return RetentionView.of(done).sentence

    return await _everywhere(site, request, name, topic_url(name), change)


async def set_namespace_retention(site: Site, request: Request) -> Response:
    form = await form_of(request)
    try:
        order = retention_request(form, namespace=NamespaceName(form.get("name", "").strip()))
        done = await site.gateway.ask(calls.set_retention(order))
    except DanubeError as error:
        return site.back("/namespaces", failed=sentence_of(error))
    return site.back("/namespaces", said=f"{order.namespace}: {RetentionView.of(done).sentence}")


# --- limits of a namespace --------------------------------------------------------------------------------------------


def limits_request(form: Mapping[str, str]) -> values.SetNamespaceLimitsRequest:
    """What the form names; the rest stays. Raises ConfigError."""
    request = values.SetNamespaceLimitsRequest(namespace=NamespaceName(form.get("name", "").strip()))
    if form.get("reset") == "1":
        request.reset.extend(LIMITS)
        return request
    for name in LIMITS:
        if form.get(name, "").strip():
            setattr(request.limits, name, whole(form, name, 0, 0, U32_MAX))
    if not request.HasField("limits"):
        raise ConfigError("limits", "", "at least one of them; 0 is no limit")
    return request


async def set_namespace_limits(site: Site, request: Request) -> Response:
    form = await form_of(request)
    try:
        order = limits_request(form)
        done = await site.gateway.ask(calls.set_namespace_limits(order))
    except DanubeError as error:
        return site.back("/namespaces", failed=sentence_of(error))
    changes = ", ".join(f"{each.name.replace('_', ' ')} {each.before} → {each.after}" for each in done.changes)
    return site.back("/namespaces", said=f"{order.namespace}: {changes or 'nothing changed; it was so already'}.")
