"""`danube admin subscriptions`: why one is quiet, how far behind it is, where it goes on, and how it treats failures.

The reference has the failure policy under `topics`, with `-s SUBSCRIPTION`; that spelling works too.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Final

import typer
from google.protobuf.message import Message

from pydanube.admin import calls, values
from pydanube.cli.admin import TopicArgument, ask, require_topic, tier_fields, topics
from pydanube.cli.completion import subscription_names
from pydanube.cli.exits import UsageError
from pydanube.cli.limits import print_changes
from pydanube.cli.output import Output, OutputOption, print_done, print_fields
from pydanube.cli.places import PLACES, parse_place, parse_time
from pydanube.client.grpc.connection import BrokerRefused

if TYPE_CHECKING:
    from pydanube.client.messages import Place

HELP: Final = "Subscriptions: list, explain, lag, seek, heartbeat, policies."

app = typer.Typer(no_args_is_help=True)

SubscriptionArgument = Annotated[
    str, typer.Argument(metavar="SUBSCRIPTION", help="Its name.", autocompletion=subscription_names)
]
SubscriptionOption = Annotated[
    str, typer.Option("--subscription", "-s", help="Its name.", autocompletion=subscription_names)
]
Redeliveries = Annotated[
    int | None,
    typer.Option(
        "--max-redelivery-count", min=0, help="A message that failed more often is given up: --poison-policy."
    ),
]
AckTimeout = Annotated[
    int | None, typer.Option("--ack-timeout-ms", min=0, help="Not acknowledged for so long: it failed. 0: never.")
]
BaseDelay = Annotated[
    int | None, typer.Option("--base-redelivery-delay-ms", min=0, help="How long the first redelivery waits.")
]
MaxDelay = Annotated[
    int | None, typer.Option("--max-redelivery-delay-ms", min=0, help="The longest that a redelivery waits.")
]
DeadLetterTopic = Annotated[
    str | None,
    typer.Option(
        "--dead-letter-topic", help="Where given-up messages go, with dead_letter; made if it is missing. '': none."
    ),
]


class BackoffChoice(StrEnum):
    fixed = "fixed"
    exponential = "exponential"


class PoisonChoice(StrEnum):
    dead_letter = "dead_letter"
    block = "block"
    drop = "drop"


BackoffOption = Annotated[
    BackoffChoice | None,
    typer.Option(
        "--backoff-strategy",
        help="fixed: every redelivery waits as long as the first. exponential: twice as long as the last one.",
    ),
]
PoisonOption = Annotated[
    PoisonChoice | None,
    typer.Option(
        "--poison-policy",
        help="A given-up message goes to --dead-letter-topic (dead_letter), stops delivery until it is "
        "acknowledged (block), or is lost (drop).",
    ),
]
STORED: Final[dict[BackoffChoice | PoisonChoice, str]] = {
    BackoffChoice.fixed: "Fixed",
    BackoffChoice.exponential: "Exponential",
    PoisonChoice.dead_letter: "DeadLetter",
    PoisonChoice.block: "Block",
    PoisonChoice.drop: "Drop",
}


# --- how it stands ------------------------------------------------------------------------------------


@app.command("explain")
def explain(topic: TopicArgument, subscription: SubscriptionArgument, output: OutputOption = Output.table) -> None:
    """Why a subscription is, or is not, receiving: one sentence."""
    found = ask(calls.explain(topic, subscription))
    if output is Output.table:
        print(found.sentence)
        return
    optional = ("unacked_max", "retry_in_ms", "blocked_offset", "blocked_key", "rate_limited_for_ms")
    plain = ("consumers", "unacked", "undispatched", "waiting", "blocked_keys", "dead_lettering", "first_offset")
    fields = {
        "sentence": found.sentence,
        **_lag(found.lag),
        **{name: getattr(found, name) for name in (*plain, "missing", "heartbeat")},
        **{name: _optional(found, name) for name in optional},
        "tiers": tier_fields(found.tiers),
    }
    print_fields(fields, output)


@app.command("lag")
def lag(topic: TopicArgument, subscription: SubscriptionArgument, output: OutputOption = Output.table) -> None:
    """How far a subscription is behind."""
    print_fields(_lag(ask(calls.lag(topic, subscription)).lag), output)


def _lag(found: values.SubscriptionLag) -> dict[str, object]:
    return {
        "cursor": _optional(found, "cursor"),
        "head": found.head,
        "lag_messages": found.lag_messages,
        "has_lag": found.has_lag,
        "lag_seconds": _optional(found, "lag_seconds"),
        "catch_up_seconds": _optional(found, "catch_up_seconds"),
        "course": found.course or None,
    }


def _word(words: Mapping[str, int], number: int) -> str:
    return next(word for word, each in words.items() if each == number)


def _optional(message: Message, name: str) -> object:
    return getattr(message, name) if message.HasField(name) else None


@app.command("seek")
def seek(
    topic: TopicArgument,
    subscription: SubscriptionArgument,
    to: Annotated[
        str | None,
        typer.Argument(metavar="[TO]", help=f"{PLACES}."),
    ] = None,
    earliest: Annotated[bool, typer.Option("--earliest", help="At the oldest message that is kept.")] = False,
    latest: Annotated[bool, typer.Option("--latest", help="Behind the newest message.")] = False,
    offset: Annotated[int | None, typer.Option("--offset", min=0, max=2**64 - 1, help="At this offset.")] = None,
    time: Annotated[
        str | None, typer.Option("--time", metavar="TIME", help="At the first message of that time or later.")
    ] = None,
    output: OutputOption = Output.table,
) -> None:
    """Go on at another place, whatever was acknowledged. TO and the options say the same; give one.

    danube admin subscriptions seek /default/orders billing --time 2026-11-15T09:00:00Z
    """
    if sum((to is not None, earliest, latest, offset is not None, time is not None)) != 1:
        given = "say where" if to is None and not (earliest or latest or offset is not None or time) else "one place"
        raise UsageError(f"{given}: TO ({PLACES}), --earliest, --latest, --offset or --time")
    place: Place = "earliest" if earliest else "latest"
    if offset is not None:
        place = offset
    elif time is not None:
        place = parse_time("--time", time)
    elif to is not None:
        place = parse_place("TO", to)
    found = ask(calls.seek(topic, subscription, place)).offset
    print_done(f"Goes on at offset {found}", output, offset=found)


# --- how it is set ------------------------------------------------------------------------------------


@app.command("set-heartbeat")
def set_heartbeat(
    topic: TopicArgument,
    subscription: SubscriptionArgument,
    heartbeat: Annotated[
        str,
        typer.Argument(
            metavar="HEARTBEAT",
            help="high_priority (100ms), normal (500ms), low_priority (1000ms), debug (50ms), off, observe (counts, "
            "polls nothing), or 50ms to 1000ms. default: the topic's, or else the broker's.",
        ),
    ],
    output: OutputOption = Output.table,
) -> None:
    """Set how often a subscription looks for messages of which no notification told it. At once, and kept."""
    wanted = "" if heartbeat == "default" else heartbeat
    now = ask(calls.set_heartbeat(topic, wanted, subscription)).heartbeat
    print_done(f"Heartbeat: {now}", output, heartbeat=now)


@app.command("set-dispatch-config")
def set_dispatch_config(
    topic: TopicArgument,
    subscription: SubscriptionArgument,
    max_unacked_messages: Annotated[int, typer.Option(help="Messages out at once, 1 to 10000.", min=0)],
    output: OutputOption = Output.table,
) -> None:
    """Set how many messages may be out unacknowledged. At once, and kept."""
    try:
        ask(calls.set_dispatch_config(topic, subscription, max_unacked_messages))
    except BrokerRefused:
        require_topic(topic)  # the reference's code for a topic that does not exist is that of any refusal
        raise
    print_done("Dispatch Config Set: true", output, max_unacked_messages=max_unacked_messages)


@app.command("get-dispatch-config")
def get_dispatch_config(
    topic: TopicArgument, subscription: SubscriptionArgument, output: OutputOption = Output.table
) -> None:
    """Show how many messages may be out unacknowledged; nothing if the broker's default applies."""
    found = ask(calls.dispatch_config(topic, subscription))
    is_set = found.HasField("dispatch_config")
    if not is_set:
        require_topic(topic)
    print_fields({"max_unacked_messages": found.dispatch_config.max_unacked_messages if is_set else None}, output)


@app.command("set-failure-policy")
def set_failure_policy(
    topic: TopicArgument,
    subscription: SubscriptionArgument,
    max_redelivery_count: Redeliveries = None,
    ack_timeout_ms: AckTimeout = None,
    base_redelivery_delay_ms: BaseDelay = None,
    max_redelivery_delay_ms: MaxDelay = None,
    backoff_strategy: BackoffOption = None,
    dead_letter_topic: DeadLetterTopic = None,
    poison_policy: PoisonOption = None,
    output: OutputOption = Output.table,
) -> None:
    """Change what becomes of messages that fail: a nack, or no ack in time. Says what changed.

    What is not given stays as it is. A subscription for which nothing was set redelivers 5 times, times out after
    30,000 ms, waits 1,000 to 60,000 ms, exponential, and blocks. It holds at once, and may be set before the
    subscription exists.
    """
    request = values.ChangeFailurePolicyRequest(
        topic=topic,
        subscription=subscription,
        max_redelivery_count=max_redelivery_count,
        ack_timeout_ms=ack_timeout_ms,
        base_redelivery_delay_ms=base_redelivery_delay_ms,
        max_redelivery_delay_ms=max_redelivery_delay_ms,
        backoff_strategy=None if backoff_strategy is None else STORED[backoff_strategy],
        dead_letter_topic=dead_letter_topic,
        poison_policy=None if poison_policy is None else STORED[poison_policy],
    )
    found = ask(calls.change_failure_policy(request))
    print_changes(map(_as_typed, found.changes), output, topic=topic, subscription=subscription)


def _as_typed(change: values.SettingChange) -> values.SettingChange:
    """In the words of the options."""
    words = {stored: word.value for word, stored in STORED.items()}
    before, after = (words.get(each, each) for each in (change.before, change.after))
    return values.SettingChange(name=change.name, before=before, after=after)


@app.command("get-failure-policy")
def get_failure_policy(
    topic: TopicArgument, subscription: SubscriptionArgument, output: OutputOption = Output.table
) -> None:
    """Show what becomes of messages that fail; nothing if the defaults apply."""
    found = ask(calls.failure_policy(topic, subscription))
    if not found.HasField("failure_policy"):
        require_topic(topic)
        if output is Output.json:
            print_fields({"failure_policy": None}, output)
        else:
            print("no failure policy is set: the defaults apply")
        return
    policy = found.failure_policy
    numbers = ("max_redelivery_count", "ack_timeout_ms", "base_redelivery_delay_ms", "max_redelivery_delay_ms")
    fields = {
        **{name: getattr(policy, name) for name in numbers},
        "backoff_strategy": _word(values.BACKOFF, policy.backoff_strategy),
        "poison_policy": _word(values.POISON, policy.poison_policy),
        "dead_letter_topic": _optional(policy, "dead_letter_topic"),
    }
    print_fields(fields, output)


# --- as the reference spells it -----------------------------------------------------------------------


@topics.command("set-failure-policy", hidden=True)
def set_failure_policy_of(
    topic: TopicArgument,
    subscription: SubscriptionOption,
    max_redelivery_count: Redeliveries,
    ack_timeout_ms: AckTimeout,
    base_redelivery_delay_ms: BaseDelay,
    max_redelivery_delay_ms: MaxDelay,
    poison_policy: PoisonOption,
    backoff_strategy: BackoffOption = BackoffChoice.fixed,
    dead_letter_topic: DeadLetterTopic = "",
    output: OutputOption = Output.table,
) -> None:
    """As `subscriptions set-failure-policy`, but the whole policy."""
    set_failure_policy(
        topic,
        subscription,
        max_redelivery_count,
        ack_timeout_ms,
        base_redelivery_delay_ms,
        max_redelivery_delay_ms,
        backoff_strategy,
        dead_letter_topic,
        poison_policy,
        output,
    )


@topics.command("get-failure-policy", hidden=True)
def get_failure_policy_of(
    topic: TopicArgument, subscription: SubscriptionOption, output: OutputOption = Output.table
) -> None:
    """As `subscriptions get-failure-policy`."""
    get_failure_policy(topic, subscription, output)
