"""Producers in a history: clients in other processes, which outlive every boot of the log.

They know only what a client knows: what they sent, what was acknowledged, and that the process went away. What
was not acknowledged is sent again, unchanged and in order, until it is. A client says at once when the log breaks a
promise that is visible from outside: a batch refused that was next, accepted over a hole, or given two offsets.
"""

from __future__ import annotations

import asyncio
from collections import deque
from random import Random
from typing import TYPE_CHECKING, Final

from pydanube.errors import DanubeError, DiskFull, LogClosed, LogStopped, ProducerFenced, Refused
from pydanube.log.committer import Receipt
from pydanube.log.wal import TopicLog
from pydanube.testing.log_model import Broken, Sent, TopicModel
from pydanube.testing.loop import ProcessDied

if TYPE_CHECKING:
    from pydanube.testing.log_history import Boot, History

IN_FLIGHT_MAX: Final = 8


class IdempotentProducer:
    """Keeps up to eight batches in flight; sends what was refused again, unchanged and in order."""

    def __init__(self, history: History, model: TopicModel, producer_id: int, dice: Random) -> None:
        self._history = history
        self._model = model
        self._producer_id = producer_id
        self._dice = dice
        self._session: int | None = None
        self._next_sequence = 0
        self._unacked: dict[int, Sent] = {}  # by number, in order
        # Batch, answer, and whether nothing was before it: then there is no excuse for refusing it.
        self._in_flight: deque[tuple[Sent, asyncio.Future[Receipt], bool]] = deque()
        self._limit = dice.randint(1, IN_FLIGHT_MAX)
        self._left = dice.choice((5, 20, 60))

    async def run(self) -> None:
        history = self._history
        while self._left > 0 or self._unacked:
            if history.quiet and not self._unacked:
                return
            boot = await history.running()
            log = boot.logs[self._model.topic]
            self._in_flight.clear()
            try:
                await self._work(boot, log)
            except (ProcessDied, LogClosed):
                # A close takes a moment; then there is another log or another boot.
                await asyncio.sleep(0.001)
            except LogStopped:
                history.stopped(boot)
                await boot.ended.wait()
                await asyncio.sleep(0.001)
            if self._model.durability == "os":
                # What was acknowledged may be gone, so the old session may have a hole.
                self._session = None
                self._unacked.clear()

    async def _work(self, boot: Boot, log: TopicLog) -> None:
        dice = self._dice
        if self._session is None or (dice.random() < 0.05 and not self._history.quiet):
            await self._open(boot, log)
        self._send_again(boot, log)
        while self._in_flight or self._left > 0:
            if not self._history.quiet:
                while self._left > 0 and len(self._unacked) < self._limit and dice.random() < 0.8:
                    self._send_new(boot, log)
            if not self._in_flight:
                if self._history.quiet:
                    return
                await asyncio.sleep(dice.random() * self._history.pace_seconds)
                if log.closed:
                    raise LogClosed(log.topic)
                continue
            sent, answer, first = self._in_flight.popleft()
            try:
                self._acknowledged(sent, await boot.process.wait(answer))
            except DiskFull:
                await self._settle(boot)
                await asyncio.sleep(dice.random() * 0.2)
                self._send_again(boot, log)
            except Refused as refusal:
                if sent.number not in self._unacked:
                    raise Broken(f"{self._model._name(sent.number)} is acknowledged and refused: {refusal}") from None
                if first:
                    raise Broken(f"{self._model._name(sent.number)} is next and is refused: {refusal}") from None
                if dice.random() < 0.7:
                    await self._settle(boot)
                if not self._in_flight or dice.random() < 0.5:
                    self._send_again(boot, log)

    async def _open(self, boot: Boot, log: TopicLog) -> None:
        """A new session. What the old one left unacknowledged may be stored or not; it is not sent again."""
        old, old_sequence = self._session, self._next_sequence
        self._session = None  # from here on the old one may be fenced, whatever the answer
        self._unacked.clear()
        try:
            self._session = await boot.process.call(log.open_session(self._producer_id))
        except DiskFull:
            await asyncio.sleep(self._dice.random() * 0.2)
            raise LogClosed(log.topic) from None  # try again from the start
        self._next_sequence = 0
        self._history.say(f"session {self._model.topic} {self._producer_id}")
        if old is not None and self._dice.random() < 0.3:
            await self._try_fenced(boot, log, old, old_sequence)

    async def _try_fenced(self, boot: Boot, log: TopicLog, session: int, sequence: int) -> None:
        """An older self that does not know it was replaced must never get anything in."""
        number = self._history.next_number()
        sent = self._model.make(self._dice, number, self._producer_id, session, sequence)
        self._model.forbidden.add(number)
        try:
            await boot.process.wait(_submit(boot, log, sent))
        except (ProducerFenced, DiskFull):
            return
        raise Broken(f"{self._model._name(number)} was accepted in a session that was replaced")

    def _send_new(self, boot: Boot, log: TopicLog) -> None:
        assert self._session is not None
        sent = self._model.make(
            self._dice, self._history.next_number(), self._producer_id, self._session, self._next_sequence
        )
        self._next_sequence += sent.rows
        self._left -= 1
        self._unacked[sent.number] = sent
        self._send(boot, log, sent)
        if self._dice.random() < 0.05:  # somebody on the way sends it twice
            self._send(boot, log, sent)

    def _send_again(self, boot: Boot, log: TopicLog) -> None:
        for sent in self._unacked.values():
            self._send(boot, log, sent)

    def _send(self, boot: Boot, log: TopicLog, sent: Sent) -> None:
        first = not self._in_flight and next(iter(self._unacked)) == sent.number
        answer = _submit(boot, log, sent)
        self._in_flight.append((sent, answer, first))

    async def _settle(self, boot: Boot) -> None:
        """Waits for every answer. Behind a refused batch none may be accepted that was sent before it again."""
        while self._in_flight:
            sent, answer, _ = self._in_flight.popleft()
            try:
                receipt = await boot.process.wait(answer)
            except (DiskFull, Refused):
                continue
            self._acknowledged(sent, receipt)

    def _acknowledged(self, sent: Sent, receipt: Receipt) -> None:
        self._model.receipt(sent, receipt.offset, receipt.epoch)
        if self._unacked.pop(sent.number, None) is not None:
            self._history.outcome.counts["acknowledged"] += 1
        if any(number < sent.number for number in self._unacked):
            raise Broken(f"{self._model._name(sent.number)} is acknowledged over a hole")
        self._history.say(f"ack {self._model.topic} {sent.number} at {receipt.offset}")


class PlainProducer:
    """Producer 0: what fails is not sent again. Sends one after the other, or several at once."""

    def __init__(self, history: History, model: TopicModel, dice: Random) -> None:
        self._history = history
        self._model = model
        self._dice = dice
        self._left = dice.choice((3, 10, 40))

    async def run(self) -> None:
        history, dice = self._history, self._dice
        while self._left > 0 and not history.quiet:
            boot = await history.running()
            log = boot.logs[self._model.topic]
            try:
                if dice.random() < 0.5:
                    sent = self._make()
                    self._acknowledged(sent, await boot.process.call(log.append(sent.batch)))
                else:
                    await self._burst(boot, log)
            except (DiskFull, LogClosed, ProcessDied):
                await asyncio.sleep(dice.random() * 0.01)
            except LogStopped:
                history.stopped(boot)
                await boot.ended.wait()
                await asyncio.sleep(0.001)
            if dice.random() < 0.3:
                await asyncio.sleep(dice.random() * history.pace_seconds)

    async def _burst(self, boot: Boot, log: TopicLog) -> None:
        dice = self._dice
        answers = []
        for _ in range(dice.randint(1, 6)):
            sent = self._make()
            answers.append((sent, _submit(boot, log, sent)))
        failure: DanubeError | None = None
        for sent, answer in answers:
            if dice.random() < 0.03:
                answer.cancel()  # the caller leaves; its batch may be stored or not
                continue
            try:
                self._acknowledged(sent, await boot.process.wait(answer))
            except (DiskFull, LogClosed, LogStopped) as error:
                failure = error
        if failure is not None:
            raise failure

    def _make(self) -> Sent:
        self._left -= 1
        return self._model.make(self._dice, self._history.next_number(), 0, 0, 0)

    def _acknowledged(self, sent: Sent, receipt: Receipt) -> None:
        self._model.receipt(sent, receipt.offset, receipt.epoch)
        self._history.outcome.counts["acknowledged"] += 1
        self._history.say(f"ack {self._model.topic} {sent.number} at {receipt.offset}")


def _submit(boot: Boot, log: TopicLog, sent: Sent) -> asyncio.Future[Receipt]:
    answer = boot.process.run(log.submit, sent.batch)
    answer.add_done_callback(_look_at)
    return answer


def _look_at(answer: asyncio.Future[Receipt]) -> None:
    """A client that has gone over to another boot does not wait for the answers of the old one."""
    if not answer.cancelled():
        answer.exception()
