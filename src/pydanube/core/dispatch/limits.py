"""A token bucket that takes `now`.

    burst ─────────────╮            tokens refill at `rate` per second up to `burst`
                        ╲  ╱╲       an overdrawn bucket refills from below zero
    0 ───────────────────╲╱──

A caller that wants many tokens waits for one, like any other, and overdraws: else callers that take each token as it
comes would starve it. The debt is paid back before any caller gets more, so in the long run `rate` is kept exactly.

It limits, it never drops: a caller that is refused waits until `ready_at` and tries again. The defect it replaces
read a message first and threw it away when the bucket was empty.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

ROUNDING: Final = 1e-6  # who waited until `ready_at` is not sent away for the last bit of a float


@dataclass(slots=True)
class TokenBucket:
    """`rate` tokens per second. Starts full. Time that goes backwards counts as no time."""

    rate: float
    burst: float
    tokens: float
    refilled_at: float

    def __init__(self, rate: float, *, burst: float | None = None, now: float = 0.0) -> None:
        assert rate > 0, "no limit is no bucket, not a bucket without rate"
        self.rate = rate
        self.burst = max(1.0, rate if burst is None else burst)
        self.tokens = self.burst
        self.refilled_at = now

    def available(self, now: float) -> int:
        """Whole tokens that can be taken now."""
        self._refill(now)
        return max(0, int(self.tokens + ROUNDING))

    def take(self, count: float, now: float) -> bool:
        """Takes all or nothing. A bucket with a whole token gives more than it has, and is overdrawn."""
        self._refill(now)
        if self.tokens + ROUNDING < min(count, 1.0):
            return False
        self.tokens -= count
        return True

    def force(self, count: float, now: float) -> None:
        """Counts what has happened already; overdraws if it must."""
        self._refill(now)
        self.tokens -= count

    def ready_at(self, count: float, now: float) -> float:
        """When `take(count)` succeeds if no other caller takes before; `now` if it does already."""
        self._refill(now)
        missing = min(count, 1.0) - self.tokens
        return now if missing <= ROUNDING else max(now, self.refilled_at) + missing / self.rate

    def _refill(self, now: float) -> None:
        if now > self.refilled_at:
            self.tokens = min(self.burst, self.tokens + (now - self.refilled_at) * self.rate)
            self.refilled_at = now
