"""Producers in a history: clients in other processes, which outlive every boot of the log.

They know only what a client knows: what they sent, what was acknowledged, and that the process went away. What
was not acknowledged is sent again, unchanged and in order, until it is. A client raises as soon as the log breaks a
promise that is visible from outside: a batch refused that was next, accepted over a hole, or given two offsets.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Final

from pydanube.core.commit.sessions import RECENT_MAX
from pydanube.core.commit.values import CommitReceipt
from pydanube.errors import (
    DanubeError,
    DiskFull,
    LimitReached,
    LogClosed,
    LogFull,
    LogStopped,
    NotServed,
    ProducerFenced,
    Refused,
    SessionUnknown,
)
from pydanube.log.wal import TopicLog
from pydanube.testing.loop import ProcessDied
from tools.sim.log_model import Broken, Sent, TopicModel

if TYPE_CHECKING:
    from tools.sim.log_history import Boot, History

IN_FLIGHT_MAX: Final = 8
# Nothing was stored, and nothing will be: there is no room.
NO_ROOM: Final = (DiskFull, LogFull)
# Later it may be another answer.
LATER: Final = (*NO_ROOM, NotServed)


class IdempotentProducer:
    """Keeps up to eight batches in flight; sends what was refused again, unchanged and in order."""

    def __init__(self, history: History, model: TopicModel, producer_id: int, rng: Random) -> None:
        self._history = history
        self._model = model
        self._producer_id = producer_id
        self._rng = rng
        self._session: int | None = None
        self._next_sequence = 0
        self._unacked: dict[int, Sent] = {}  # by number, in order
        # The newest of the session, acknowledged or not: a producer that lost the answers sends them all again.
        self._recent: deque[Sent] = deque(maxlen=RECENT_MAX)
        self._used_at = 0.0  # when what the session has for certain was sent, or the session asked for
        self._sent_at: dict[int, float] = {}  # by number
        self._unknown: set[int] = set()  # perhaps stored, by an owner that was not allowed to say so
        # Batch, answer, and whether nothing was before it: then there is no excuse for refusing it.
        self._in_flight: deque[tuple[Sent, asyncio.Future[CommitReceipt], bool]] = deque()
        self._limit = rng.choice((IN_FLIGHT_MAX, rng.randint(1, IN_FLIGHT_MAX)))
        self._left = 3 if history.crowded else rng.choice((5, 20, 60))
        self._twice = rng.choice((0.05, 0.05, 0.4))  # of the batches: duplicated on the way

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
                self._recent.clear()

    async def _work(self, boot: Boot, log: TopicLog) -> None:
        rng = self._rng
        if self._session is None or (rng.random() < 0.05 and not self._history.quiet):
            await self._open(boot, log)
        self._send_again(boot, log, answers_lost=rng.random() < 0.3)
        while self._in_flight or self._left > 0:
            if not self._history.quiet:
                if self._history.together and not self._in_flight and not self._unacked:
                    await self._history.rest(rng)
                while self._left > 0 and self._may_send() and rng.random() < 0.8:
                    self._send_new(boot, log)
            if not self._in_flight and self._unacked:
                self._send_again(boot, log)
            if not self._in_flight:
                if self._history.quiet:
                    return
                await self._history.rest(rng)
                if log.closed:
                    raise LogClosed(log.topic)
                continue
            sent, answer, first = self._in_flight.popleft()
            try:
                self._acknowledged(sent, await boot.process.wait(answer))
            except LATER as error:
                if isinstance(error, NotServed):
                    self._unknown.add(sent.number)
                await self._settle(boot)
                await asyncio.sleep(rng.random() * 0.2)
                self._send_again(boot, log)
            except SessionUnknown as refusal:
                await self._session_ended(boot, log, refusal)
            except Refused as refusal:
                if sent.number not in self._unacked:
                    raise Broken(f"{self._model._name(sent.number)} is acknowledged and refused: {refusal}") from None
                if first:
                    raise Broken(f"{self._model._name(sent.number)} is next and is refused: {refusal}") from None
                if rng.random() < 0.7:
                    await self._settle(boot)
                if not self._in_flight or rng.random() < 0.5:
                    self._send_again(boot, log)

    async def _session_ended(self, boot: Boot, log: TopicLog, refusal: SessionUnknown) -> None:
        """It was idle for so long that the log may forget it. What had no answer is not sent again."""
        history = self._history
        unused = asyncio.get_running_loop().time() - self._used_at
        if not history.sessions_end or unused < history.session_seconds:
            raise Broken(f"a session that was used {unused:.3f} s ago is unknown: {refusal}")
        self._in_flight.clear()
        await self._open(boot, log)

    def _may_send(self) -> bool:
        """Not while the oldest that the log remembers is unacknowledged: it must be possible to send that again."""
        remembered = len(self._recent) < RECENT_MAX or self._recent[0].number not in self._unacked
        return len(self._unacked) < self._limit and remembered

    async def _open(self, boot: Boot, log: TopicLog) -> None:
        """A new session. What the old one left unacknowledged may be stored or not; it is not sent again."""
        old, old_sequence = self._session, self._next_sequence
        asked_at = (
            asyncio.get_running_loop().time()
        )  # the record has its time from the log, somewhere before the answer
        self._session = None  # from here on the old one may be fenced, whatever the answer
        self._unacked.clear()
        self._recent.clear()
        try:
            self._session = await boot.process.call(log.open_session(self._producer_id))
        except LATER:
            await asyncio.sleep(self._rng.random() * 0.2)
            raise LogClosed(log.topic) from None  # try again from the start
        except LimitReached:
            if not self._history.sessions_end:
                raise Broken(f"{log.topic} refuses a session, and has room for it") from None
            self._history.outcome.counts["sessions refused"] += 1
            await asyncio.sleep(0.05)  # as long as one of them may live
            raise LogClosed(log.topic) from None
        self._next_sequence = 0
        self._used_at = asked_at
        self._history.say(f"session {self._model.topic} {self._producer_id}")
        if old is not None and self._rng.random() < 0.3:
            await self._try_fenced(boot, log, old, old_sequence)

    async def _try_fenced(self, boot: Boot, log: TopicLog, session: int, sequence: int) -> None:
        """An older self that does not know it was replaced must never get anything in."""
        number = self._history.next_number()
        sent = self._model.make(self._rng, number, self._producer_id, session, sequence)
        self._model.forbidden.add(number)
        try:
            await boot.process.wait(_submit(self._history, self._model, boot, log, sent))
        except (ProducerFenced, *LATER):
            return
        except SessionUnknown:
            if self._history.sessions_end:
                return
            raise
        raise Broken(f"{self._model._name(number)} was accepted in a session that was replaced")

    def _send_new(self, boot: Boot, log: TopicLog) -> None:
        assert self._session is not None
        sent = self._model.make(
            self._rng, self._history.next_number(), self._producer_id, self._session, self._next_sequence
        )
        self._next_sequence += sent.rows
        self._left -= 1
        self._unacked[sent.number] = sent
        self._recent.append(sent)
        self._send(boot, log, sent)
        if self._rng.random() < self._twice:
            self._send(boot, log, sent)

    def _send_again(self, boot: Boot, log: TopicLog, *, answers_lost: bool = False) -> None:
        for sent in list(self._recent if answers_lost else self._unacked.values()):
            self._send(boot, log, sent)

    def _send(self, boot: Boot, log: TopicLog, sent: Sent) -> None:
        first = not self._in_flight and next(iter(self._unacked), None) == sent.number
        self._sent_at.setdefault(sent.number, asyncio.get_running_loop().time())
        answer = _submit(self._history, self._model, boot, log, sent, told=self._rng.random() < 0.3)
        self._in_flight.append((sent, answer, first))

    async def _settle(self, boot: Boot) -> None:
        """Waits for every answer. Behind a refused batch none may be accepted that was sent before it again."""
        while self._in_flight:
            sent, answer, _ = self._in_flight.popleft()
            try:
                receipt = await boot.process.wait(answer)
            except LATER as error:
                if isinstance(error, NotServed):
                    self._unknown.add(sent.number)
                continue
            except SessionUnknown:
                continue  # the next one that is sent finds it out
            except Refused:
                if sent.number not in self._unacked:
                    raise Broken(f"{self._model._name(sent.number)} is acknowledged and refused") from None
                continue
            self._acknowledged(sent, receipt)

    def _acknowledged(self, sent: Sent, receipt: CommitReceipt) -> None:
        self._model.receipt(sent, receipt.offset, receipt.epoch)
        if not receipt.duplicate:  # else it is not used: it was stored long ago, perhaps
            self._used_at = max(self._used_at, self._sent_at[sent.number])
        if self._unacked.pop(sent.number, None) is not None:
            self._history.outcome.counts["acknowledged"] += 1
        if any(number < sent.number and number not in self._unknown for number in self._unacked):
            raise Broken(f"{self._model._name(sent.number)} is acknowledged over a hole")
        self._history.say(f"ack {self._model.topic} {sent.number} at {receipt.offset}")


class PlainProducer:
    """Producer 0: what fails is not sent again. Sends one after the other, or several concurrently."""

    def __init__(self, history: History, model: TopicModel, rng: Random) -> None:
        self._history = history
        self._model = model
        self._rng = rng
        self._left = rng.choice((3, 10, 40))

    async def run(self) -> None:
        history, rng = self._history, self._rng
        while self._left > 0 and not history.quiet:
            boot = await history.running()
            log = boot.logs[self._model.topic]
            try:
                if rng.random() < 0.5:
                    await self._append(boot, log)
                else:
                    await self._burst(boot, log)
            except (*LATER, LogClosed, ProcessDied):
                await asyncio.sleep(rng.random() * 0.01)
            except LogStopped:
                history.stopped(boot)
                await boot.ended.wait()
                await asyncio.sleep(0.001)
            if rng.random() < 0.3:
                await history.rest(rng)

    async def _append(self, boot: Boot, log: TopicLog) -> None:
        sent = self._make()
        since = len(self._model.reservations)
        try:
            receipt = await boot.process.call(log.append(sent.batch))
        except (*NO_ROOM, LogClosed):
            self._model.forbidden.add(sent.number)  # it was said not to be stored, and never will be
            raise
        self._model.check_reserved(sent, receipt.offset, since)
        self._model.receipt(sent, receipt.offset, receipt.epoch)
        self._acknowledged(sent, receipt)

    async def _burst(self, boot: Boot, log: TopicLog) -> None:
        rng = self._rng
        answers = []
        for _ in range(rng.randint(1, 6)):
            sent = self._make()
            told = rng.random() < 0.3
            answers.append((sent, _submit(self._history, self._model, boot, log, sent, told=told)))
        failure: DanubeError | None = None
        for sent, answer in answers:
            if rng.random() < 0.03:
                answer.cancel()  # the caller leaves; its batch may be stored or not
                continue
            try:
                self._acknowledged(sent, await boot.process.wait(answer))
            except (*NO_ROOM, LogClosed) as error:
                self._model.forbidden.add(sent.number)
                failure = error
            except (NotServed, LogStopped) as error:
                failure = error
        if failure is not None:
            raise failure

    def _make(self) -> Sent:
        self._left -= 1
        return self._model.make(self._rng, self._history.next_number(), 0, 0, 0)

    def _acknowledged(self, sent: Sent, receipt: CommitReceipt) -> None:
        self._model.receipt(sent, receipt.offset, receipt.epoch)
        self._history.outcome.counts["acknowledged"] += 1
        self._history.say(f"ack {self._model.topic} {sent.number} at {receipt.offset}")


def _submit(
    history: History, model: TopicModel, boot: Boot, log: TopicLog, sent: Sent, *, told: bool = False
) -> asyncio.Future[CommitReceipt]:
    """Sends it. The receipt counts from the moment it is given, also if the sender does not look any more."""
    answer: asyncio.Future[CommitReceipt] | None = None

    def tell() -> None:
        history.outcome.counts["receipts told"] += 1
        if answer is None or not answer.done():
            history.fail(f"Broken: {model._name(sent.number)} was told to be stored before there was a receipt")

    submit: Callable[..., asyncio.Future[CommitReceipt]] = log.submit
    answer = boot.process.run(submit, sent.batch, tell if told else None)
    answer.add_done_callback(partial(_answered, history, model, log, sent, len(model.reservations)))
    return answer


def _answered(
    history: History,
    model: TopicModel,
    log: TopicLog,
    sent: Sent,
    reservations: int,
    answer: asyncio.Future[CommitReceipt],
) -> None:
    if answer.cancelled() or answer.exception() is not None:
        return
    receipt = answer.result()
    try:
        if receipt.offset + sent.rows > log.head:
            raise Broken(
                f"{model._name(sent.number)} is acknowledged at offset {receipt.offset}, "
                f"and {model.topic} is committed up to {log.head}"
            )
        if not receipt.duplicate:  # else it was stored before, perhaps below a reservation that was given back since
            model.check_reserved(sent, receipt.offset, reservations)
        model.receipt(sent, receipt.offset, receipt.epoch)
    except Broken as broken:
        history.fail(broken)
