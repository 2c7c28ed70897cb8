"""A failure policy as an application writes it: what becomes of messages that are nacked or not answered."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal, TypedDict

from pydanube.core.dispatch.delivery import BackoffStrategy, PoisonPolicy
from pydanube.errors import ConfigError
from pydanube.wire._pb.pydanube import stream_pb2 as pb


class FailurePolicy(TypedDict, total=False):
    """What is left out stays as it is. A `dead_letter_topic` without a `poison_policy` means "dead_letter"."""

    max_redelivery_count: int
    ack_timeout_ms: int
    base_redelivery_delay_ms: int
    max_redelivery_delay_ms: int
    backoff_strategy: Literal["fixed", "exponential"]
    poison_policy: Literal["block", "drop", "dead_letter"]
    dead_letter_topic: str


FIELDS: Final = tuple(FailurePolicy.__annotations__)
NUMBER_MAX: Final = 2**32 - 1
# As they are stored.
_BACKOFFS: Final = {each.name.lower(): each.value for each in BackoffStrategy}
_POISONS: Final = {each.name.lower(): each.value for each in PoisonPolicy}


def policy_change(policy: FailurePolicy) -> pb.ChangeFailurePolicy:
    """As the command has it. Raises ConfigError; what the numbers may be is the broker's to say."""
    untyped: object = policy
    if not isinstance(untyped, Mapping) or not untyped:
        raise ConfigError("failure_policy", policy, f"a dictionary with some of {', '.join(FIELDS)}")
    given: dict[str, object] = dict(untyped)
    if given.get("dead_letter_topic"):
        given.setdefault("poison_policy", "dead_letter")
    change = pb.ChangeFailurePolicy()
    for name, value in given.items():
        if name not in FIELDS:
            raise ConfigError(f"failure_policy.{name}", value, f"one of {', '.join(FIELDS)}")
        for field, words in (("backoff_strategy", _BACKOFFS), ("poison_policy", _POISONS)):
            if name == field:
                if value not in words:
                    raise ConfigError(f"failure_policy.{name}", value, f"one of {', '.join(words)}")
                value = words[str(value)]
        whole = isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= NUMBER_MAX
        if not (whole if name.endswith(("_ms", "_count")) else isinstance(value, str)):
            kind = f"a whole number from 0 to {NUMBER_MAX}" if name.endswith(("_ms", "_count")) else "text"
            raise ConfigError(f"failure_policy.{name}", value, kind)
        setattr(change, name, value)
    return change
