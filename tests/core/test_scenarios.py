"""Runs `tests/scenarios/*.txt`: what happens, a line of dashes, what the machine answers.

    machine shared [unacked_max=10] [head=0] [cursor=-1] [missing=2..4] [rate=5] [policy fields=...]
    at 1.5                      from now on it is 1.5 s        (alone: a tick)
    join a [permits=5,1000] [filters=x*,y?]    leave a    forget a    grant a 5,1000
    commit 3                    everything below offset 3 is committed
    ack 0 4..6                  nack 3 [delay=2] [reason=bad]
    shipped a 100 [unsent=1..3]
    withhold 2..4    rescue 2..4    void 2..4    trim 4    seek 0
    keys 0=x 1=y                dead-lettered 3    dead-letter-failed 3
    policy poison_policy=Drop   window 5
    explain                     prints the sentence

Ranges are half-open. With UPDATE_SCENARIOS=1 in the environment the answers are rewritten; review the diff.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import assert_never

import pytest

from pydanube.core.dispatch import events as e
from pydanube.core.dispatch.consumer_window import DispatchLimits, Permits
from pydanube.core.dispatch.delivery import FailurePolicy
from pydanube.core.dispatch.key_shared import KeySharedDispatch, Unaccepted
from pydanube.core.dispatch.lag import explain
from pydanube.core.dispatch.limits import TokenBucket
from pydanube.core.dispatch.machine import DispatchMachine
from pydanube.core.dispatch.range_dispatch import ExclusiveDispatch, FailoverDispatch, SharedDispatch
from pydanube.core.dispatch.ranges import OffsetRange
from pydanube.core.dispatch.window import SubscriptionProgress
from pydanube.core.names import ConsumerId

FOLDER = Path(__file__).parent.parent / "scenarios"
KINDS = {
    "exclusive": ExclusiveDispatch,
    "failover": FailoverDispatch,
    "shared": SharedDispatch,
    "key_shared": KeySharedDispatch,
}
DASHES = "----"


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.txt")), ids=lambda path: path.stem)
def test_scenario(path: Path) -> None:
    expected = path.read_text()
    found = replay(expected)
    if os.environ.get("UPDATE_SCENARIOS"):
        path.write_text(found)
    else:
        assert found == expected


def replay(script: str) -> str:
    """The same script with the answers the machine gives."""
    runner = Runner()
    blocks = []
    for block in script.strip().split("\n\n"):
        lines = block.split("\n")
        commands = lines[: lines.index(DASHES)] if DASHES in lines else lines
        answers = [answer for command in commands for answer in runner.run(command)]
        is_prose = all(line.startswith("#") for line in lines)
        blocks.append(commands if is_prose else [*commands, DASHES, *answers])
    return "\n\n".join("\n".join(block) for block in blocks) + "\n"


class Runner:
    def __init__(self) -> None:
        self.machine: DispatchMachine = ExclusiveDispatch(SubscriptionProgress())
        self.now = 0.0

    def run(self, line: str) -> list[str]:
        if line.startswith("#") or not line.strip():
            return []
        command, *words = line.split()
        options = dict(word.split("=", 1) for word in words if "=" in word)
        plain = [word for word in words if "=" not in word]
        if command == "machine":
            self.machine = machine(plain[0], options)
            return []
        if command == "explain":
            return [explain(self.machine.standing(), self.now)]
        if command == "at":
            self.now = float(plain[0])
        progress = self.machine.progress
        cursor = progress.next_unacked
        answers = [text(effect) for effect in self.machine.step(event(command, plain, options), self.now)]
        moved = [f"cursor {progress.next_unacked - 1}"] if progress.next_unacked != cursor else []
        return answers + moved


def machine(kind: str, options: dict[str, str]) -> DispatchMachine:
    limits = DispatchLimits(unacked_max=int(options.pop("unacked_max", "10")))
    cursor, head = int(options.pop("cursor", "-1")), int(options.pop("head", "0"))
    missing = parts(options.pop("missing", "").split(",") if "missing" in options else [])
    rate = TokenBucket(float(options.pop("rate"))) if "rate" in options else None
    progress = SubscriptionProgress(cursor + 1, head=head, missing=missing)
    if options.pop("unaccepted", "skip") == "keep":
        return KeySharedDispatch(progress, policy=policy(options), limits=limits, unaccepted=Unaccepted.KEEP)
    return KINDS[kind](progress, policy=policy(options), limits=limits, rate=rate)


def policy(options: dict[str, str]) -> FailurePolicy:
    return FailurePolicy.from_json({k: int(v) if v.isdecimal() else v for k, v in options.items()})


def event(command: str, words: list[str], options: dict[str, str]) -> e.Event:
    match command:
        case "at":
            return e.Ticked()
        case "join":
            filters = tuple(options["filters"].split(",")) if "filters" in options else ()
            granted = permits(options["permits"]) if "permits" in options else None
            return e.Joined(consumer(words[0]), granted, filters)
        case "leave":
            return e.Left(consumer(words[0]))
        case "forget":
            return e.Forgotten(consumer(words[0]))
        case "grant":
            return e.Granted(consumer(words[0]), permits(words[1]))
        case "commit":
            return e.Available(int(words[0]))
        case "ack":
            return e.AckReceived(parts(words))
        case "nack":
            return e.NackReceived(parts(words), float(options.get("delay", "0")), options.get("reason", ""))
        case "shipped":
            unsent = parts(options["unsent"].split(",")) if "unsent" in options else ()
            return e.Shipped(consumer(words[0]), int(words[1]), unsent)
        case "withhold":
            return e.Withheld(parts(words))
        case "rescue":
            return e.HistoryAvailable(parts(words))
        case "void":
            return e.Voided(parts(words))
        case "trim":
            return e.LogTrimmed(int(words[0]))
        case "seek":
            return e.CursorReset(int(words[0]))
        case "keys":
            return e.Keyed(tuple((int(offset), key) for offset, key in options.items()))
        case "dead-lettered":
            return e.DeadLettered(parts(words))
        case "dead-letter-failed":
            return e.DeadLetterFailed(parts(words))
        case "policy":
            return e.PolicyChanged(policy=policy(options))
        case "window":
            return e.PolicyChanged(limits=DispatchLimits(unacked_max=int(words[0])))
        case _:
            raise AssertionError(f"no such command: {command}")


def text(effect: e.Effect) -> str:
    match effect:
        case e.SendRanges(to, sent, attempt, size_max):
            again = f" attempt {attempt}" if attempt > 1 else ""
            bound = "" if size_max is None else f" up to {size_max} bytes"
            return f"send {name(to)} {shown(sent)}{again}{bound}"
        case e.DeadLetter(part, tries, topic):
            return f"dead-letter {shown((part,))} to {topic} after {tries.deliveries}: {tries.reason or '-'}"
        case e.Blocked(offset, tries, key):
            of_key = "" if key is None else f" key {key}"
            return f"blocked at {offset}{of_key} after {tries.deliveries}: {tries.reason or '-'}"
        case e.PoisonDropped(part, tries):
            return f"drop {shown((part,))} after {tries.deliveries}: {tries.reason or '-'}"
        case e.Expired(gone):
            return f"expired {shown(gone)}"
        case e.Activated(who):
            return f"activate {name(who)}"
        case e.JoinRefused(who, active):
            return f"refuse {name(who)}: {name(active)} is connected"
        case e.AckRefused(refused):
            return f"not committed {shown(refused)}"
        case e.ReadKeys(part):
            return f"read keys {shown((part,))}"
        case e.WakeAt(time):
            return f"wake at {time:g}"
        case _:
            assert_never(effect)


def parts(words: list[str]) -> e.Ranges:
    pairs = [word.partition("..") for word in words]
    return tuple(OffsetRange(int(first), int(end) if end else int(first) + 1) for first, _, end in pairs)


def shown(some: e.Ranges) -> str:
    return " ".join(str(r.first) if r.size == 1 else f"{r.first}..{r.end}" for r in some)


def permits(word: str) -> Permits:
    messages, size_bytes = word.split(",")
    return Permits(int(messages), int(size_bytes))


def consumer(letter: str) -> ConsumerId:
    return ConsumerId(ord(letter) - ord("a") + 1)


def name(identity: ConsumerId) -> str:
    return chr(identity - 1 + ord("a"))
