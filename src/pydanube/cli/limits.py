"""`danube admin namespaces set-policies`: limits of a namespace, while brokers run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

import typer

from pydanube.admin import calls, values
from pydanube.cli.admin import NamespaceArgument, ask, namespaces
from pydanube.cli.output import Output, OutputOption, print_json
from pydanube.core.policies import LIMITS, U32_MAX


def limit(flag: str, meaning: str) -> typer.models.OptionInfo:
    option: typer.models.OptionInfo = typer.Option(flag, min=0, max=U32_MAX, help=f"{meaning}; 0: no limit.")
    return option


def limit_names(incomplete: str) -> list[str]:
    return [name for name in LIMITS if name.startswith(incomplete)]


@namespaces.command("set-policies", no_args_is_help=True)
def set_policies(
    namespace: NamespaceArgument,
    max_producers_per_topic: Annotated[int | None, limit("--max-producers-per-topic", "Producers of one topic")] = None,
    max_subscriptions_per_topic: Annotated[
        int | None, limit("--max-subscriptions-per-topic", "Subscriptions of one topic")
    ] = None,
    max_consumers_per_topic: Annotated[
        int | None, limit("--max-consumers-per-topic", "Consumers of one topic, in all subscriptions")
    ] = None,
    max_consumers_per_subscription: Annotated[
        int | None, limit("--max-consumers-per-subscription", "Consumers of one subscription")
    ] = None,
    max_publish_rate: Annotated[int | None, limit("--max-publish-rate", "Messages per second into one topic")] = None,
    max_subscription_dispatch_rate: Annotated[
        int | None, limit("--max-subscription-dispatch-rate", "Messages per second out of one subscription")
    ] = None,
    max_message_size: Annotated[int | None, limit("--max-message-size", "Bytes of one payload")] = None,
    reset: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Give this limit (a name of `namespaces policies`) back to the configuration. May be repeated.",
            autocompletion=limit_names,
        ),
    ] = None,
    output: OutputOption = Output.table,
) -> None:
    """Set limits of a namespace: those that are given, the others stay. Says what changed.

    They hold at once for topics that are open, on other brokers within seconds, and after a restart whatever the
    configuration says. Nobody who is connected is sent away. A native producer that is open learns of a larger
    --max-message-size when it connects again. How long history is kept is `namespaces retention`.
    """
    limits = values.NamespaceLimits(
        max_producers_per_topic=max_producers_per_topic,
        max_subscriptions_per_topic=max_subscriptions_per_topic,
        max_consumers_per_topic=max_consumers_per_topic,
        max_consumers_per_subscription=max_consumers_per_subscription,
        max_publish_rate=max_publish_rate,
        max_subscription_dispatch_rate=max_subscription_dispatch_rate,
        max_message_size=max_message_size,
    )
    request = values.SetNamespaceLimitsRequest(namespace=namespace, limits=limits, reset=reset or [])
    found = ask(calls.set_namespace_limits(request))
    print_changes(found.changes, output, namespace=namespace, topics=found.topics, set_by_operator=list(found.set_here))


def print_changes(changes: Iterable[values.SettingChange], output: Output, **fields: object) -> None:
    """What an order changed, one line each; that nothing did is said, too."""
    changed = list(changes)
    if output is Output.json:
        told = {each.name: {"before": each.before or None, "after": each.after or None} for each in changed}
        print_json({"success": True, **fields, "changed": told})
        return
    for each in changed:
        print(f"{each.name}: {each.before or 'none'} -> {each.after or 'none'}")
    if not changed:
        print("nothing changed: it was so already")
