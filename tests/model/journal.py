"""An explicit-state model of the shared journal: every interleaving of a few brokers, messages and failures.

One topic whose messages are acknowledged by the object store, two brokers, a store whose puts are answered, arrive late
or stay unanswered, sessions that are declared dead while their processes live on, crashes, restarts, moves, deletions.
ADR 0013 has the rules; each is a name in `RULES`, and without it the model finds a promise broken
(`tests/model/test_journal.py`).

A state is a value. `successors` yields what may happen next; `explore` visits all states, breadth first, so the first
violation that it finds is one of the shortest. What an action needs that the real system would read in several steps is
split where something may come between, and one step where a transaction or a single object makes it one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Final, NamedTuple

RULES: Final = {
    "ack_when_known": "a receipt waits until the put is known to have succeeded",
    "show_committed": "consumers see only what is committed",
    "same_number": "what is unknown is repeated under its number",
    "end_before_claim": "a claim waits for the END of the lost owner's journal",
    "floor_before_removal": "the floor is raised before objects are removed",
    "end_stays": "the END that counts is never removed",
    "end_above_floor": "an END below the floor is nothing",
    "compare_history": "a claim compares the history that it read",
    "prune_described": "an entry goes only when everything below the next one's start is described",
    "seal_waits": "a seal waits until no put of the topic is open",
    "pieces_by_epoch": "pieces are chosen by epoch, not by offset alone",
    "claim_waits": "a claim waits until no put that carries an earlier epoch of the topic is open in its journal",
    "repeat_waits": "a repetition is acknowledged no earlier than its original",
    "disk_is_cache": "a restart does not trust the local disk",
    "known_is_read": "a conflict counts as success only if our own object was read",
    "end_conflict_read": "who meets an object while ending goes on behind it",
    "compare_owner": "a claim compares the owner that it read",
    "describe_compares": "descriptors are written only by who the owner key names",
}


class Piece(NamedTuple):
    """A batch in a journal object."""

    epoch: int
    offset: int
    message: int


class Data(NamedTuple):
    """An object's content. `session` is its token: no other process makes the same one."""

    session: int
    pieces: tuple[Piece, ...]


END: Final = "END"
Content = Data | str


class Put(NamedTuple):
    """A create on its way: it may take effect at any later time, or never."""

    journal: int
    number: int
    content: Content
    by: int  # the session that asked; it may have given up waiting


class Key(NamedTuple):
    """`/storage/journals/{broker}/{journal}`."""

    broker: int
    floor: int = 1
    end: int | None = None


class Owner(NamedTuple):
    epoch: int = 0
    session: int | None = None  # None: released by a seal


class Entry(NamedTuple):
    """One line of `/storage/topics/…/journals`."""

    journal: int
    epoch: int
    start: int
    through: int | None = None


class Serving(NamedTuple):
    epoch: int
    log: tuple[int, ...]  # messages from offset 0 on, as far as they are numbered
    committed: int


class Taking(NamedTuple):
    """A claim under way. `put` says that the create of END at `number` is waited for."""

    journal: int | None  # to be ended; None: that is done, or not necessary
    number: int = 1
    put: bool = False
    seen: tuple[Owner, tuple[Entry, ...], tuple[int, ...]] | None = None
    log: tuple[int, ...] | None = None  # what was read


class Process(NamedTuple):
    session: int
    journal: int
    number: int = 1  # of the next object
    over: bool = False
    put: Put | None = None
    unknown: bool = False  # the put was given up waiting for
    waiting: tuple[Piece, ...] = ()
    serving: Serving | None = None
    taking: Taking | None = None


class Budget(NamedTuple):
    """How much may still go wrong, or happen."""

    messages: int = 2
    deaths: int = 1  # sessions declared dead whose process lives on
    crashes: int = 1
    losses: int = 1  # answers that do not come
    moves: int = 1
    deletions: int = 0
    journals: int = 3


class State(NamedTuple):
    objects: frozenset[tuple[int, int, Content]] = frozenset()
    flying: frozenset[Put] = frozenset()
    keys: tuple[Key, ...] = ()
    owner: Owner = Owner()
    entries: tuple[Entry, ...] = ()
    history: tuple[int, ...] = ()  # what is described, from offset 0 on
    created: int = 1  # the first epoch of the topic as it is: older ones are a deleted one's
    registered: frozenset[int] = frozenset()
    processes: tuple[Process | None, ...] = (None, None)
    disks: tuple[tuple[int, ...], ...] = ((), ())
    sessions: int = 0
    sent: int = 0
    shown: tuple[int, ...] = ()  # the longest log that a consumer was shown
    acked: frozenset[tuple[int, int]] = frozenset()  # offset and message of every receipt
    left: Budget = Budget()


class Violation(Exception):
    """A promise is broken."""


@dataclass(frozen=True, slots=True)
class Found:
    """What an exploration came to."""

    states: int
    depth: int
    violation: str = ""
    trace: tuple[str, ...] = field(default=())


def empty(budget: Budget) -> State:
    """Nobody has ever been there."""
    return State(left=budget)


def served(budget: Budget) -> State:
    """Broker 0 serves the topic in its first epoch, and broker 1 is there."""
    state = empty(budget)
    for name in ("0 starts", "1 starts", *["0 begins to take"], *["0 goes on taking"] * 3):
        [state] = [after for step, after, _ in _steps(state, ()) if step == name]
    return state


def explore(start: State, *, without: Collection[str] = (), depth_max: int, states_max: int = 10**9) -> Found:
    """Visits every state that `depth_max` steps lead to, with the rules `without` taken out, until a promise breaks."""
    assert set(without) <= set(RULES), without
    seen: dict[State, tuple[State, str] | None] = {start: None}
    layer = [start]
    for depth in range(depth_max):
        following: list[State] = []
        for state in layer:
            for step in _steps(state, without):
                name, after, broken = step
                if broken:
                    return Found(len(seen), depth + 1, broken, (*_trace(seen, state), name))
                if after not in seen:
                    seen[after] = (state, name)
                    following.append(after)
            if len(seen) > states_max:
                return Found(len(seen), depth)
        if not following:
            return Found(len(seen), depth)
        layer = following
    return Found(len(seen), depth_max)


def _trace(seen: dict[State, tuple[State, str] | None], state: State) -> tuple[str, ...]:
    names: list[str] = []
    while (before := seen[state]) is not None:
        state, name = before
        names.append(name)
    return tuple(reversed(names))


def _steps(state: State, without: Collection[str]) -> Iterator[tuple[str, State, str]]:
    model = _Model(state, without)
    for name, action in model.actions():
        try:
            after = action()
        except Violation as error:
            yield name, state, str(error)
        else:
            if after is not None:
                yield name, after, ""


class _Model:
    """What may happen next in one state."""

    def __init__(self, state: State, without: Collection[str]) -> None:
        self.state = state
        self.without = without

    def actions(self) -> Iterator[tuple[str, Callable[[], State | None]]]:
        state = self.state
        for put in state.flying:
            yield f"put {put.journal}/{put.number} takes effect, answered", partial(self.applied, put, True)
            if state.left.losses:
                yield f"put {put.journal}/{put.number} takes effect, unanswered", partial(self.applied, put, False)
        for number, process in enumerate(state.processes):
            if process is None:
                if len(state.keys) < state.left.journals:
                    yield f"{number} starts", partial(self.start, number)
                continue
            for name, action in self._of(number, process):
                yield f"{number} {name}", action
        for journal in range(len(state.keys)):
            yield f"the floor of {journal} is raised", partial(self.raise_floor, journal)
            yield f"{journal} is swept", partial(self.sweep, journal)
        if state.left.deletions and state.entries and state.owner.session is not None:
            yield "the topic is deleted and made anew", partial(self.delete, True)
            yield "the same, and its owner does not know", partial(self.delete, False)

    def _of(self, number: int, process: Process) -> Iterator[tuple[str, Callable[[], State | None]]]:
        state = self.state
        serving, taking = process.serving, process.taking
        if process.session in state.registered and state.left.deaths:
            yield "is declared dead", partial(self.declare_dead, number)
        if state.left.crashes:
            yield "crashes", partial(self.crash, number)
        if process.over and process.session in state.registered and len(state.keys) < state.left.journals:
            yield "begins a journal", partial(self.begin_journal, number)
        if process.put is not None:
            if process.unknown:
                yield "repeats its put", partial(self.repeat, number)
            elif state.left.losses:
                yield "gives up waiting", partial(self.give_up, number)
        elif process.waiting and not process.over:
            yield "forms an object", partial(self.form, number)
        if serving is not None:
            if state.sent < state.left.messages:
                yield "is sent a message", partial(self.publish, number, state.sent)
            for message in range(state.sent):
                yield f"is sent {message} again", partial(self.publish, number, message)
            yield "describes", partial(self.describe, number)
            yield "prunes", partial(self.prune, number)
            if state.left.moves:
                yield "seals", partial(self.seal, number)
        elif not process.over and taking is None:
            yield "begins to take", partial(self.take, number)
        if taking is not None:
            yield "goes on taking", partial(self.go_on, number)

    # --- processes ------------------------------------------------------------------------------------

    def start(self, number: int) -> State:
        state = self.state
        session, journal = state.sessions, len(state.keys)
        return self._with(number, Process(session, journal))._replace(
            sessions=session + 1, keys=(*state.keys, Key(number)), registered=state.registered | {session}
        )

    def begin_journal(self, number: int) -> State:
        process = self._process(number)
        after = process._replace(journal=len(self.state.keys), number=1, over=False)
        return self._with(number, after)._replace(keys=(*self.state.keys, Key(number)))

    def crash(self, number: int) -> State:
        process = self._process(number)
        after = self._with(number, None)
        return after._replace(registered=after.registered - {process.session}, left=_less(after.left, crashes=1))

    def declare_dead(self, number: int) -> State:
        state = self.state
        session = self._process(number).session
        return state._replace(registered=state.registered - {session}, left=_less(state.left, deaths=1))

    # --- the owner ------------------------------------------------------------------------------------

    def publish(self, number: int, message: int) -> State | None:
        """A message, new or sent again by a producer whose session the owner knows from the log."""
        state = self.state
        process, serving = self._process(number), self._serving(number)
        if message in serving.log:
            offset = serving.log.index(message)
            if serving.epoch >= state.created and (offset < serving.committed or "repeat_waits" in self.without):
                return self._acknowledged(state, [(offset, message)])
            return None  # its receipt comes with the original's
        offset = len(serving.log)
        log = (*serving.log, message)
        piece = Piece(serving.epoch, offset, message)
        after = process._replace(waiting=(*process.waiting, piece), serving=serving._replace(log=log))
        result = self._with(number, after)._replace(sent=max(state.sent, message + 1))
        return self._shown(result, log) if "show_committed" in self.without else result

    def form(self, number: int) -> State:
        process = self._process(number)
        content = Data(process.session, process.waiting)
        put = Put(process.journal, process.number, content, process.session)
        after = self._with(number, process._replace(put=put, waiting=()))
        after = after._replace(flying=after.flying | {put})
        if "ack_when_known" in self.without:
            after = self._acknowledged(after, [(piece.offset, piece.message) for piece in process.waiting])
        return after

    def give_up(self, number: int) -> State:
        process = self._process(number)
        after = self._with(number, process._replace(unknown=True))
        return after._replace(left=_less(after.left, losses=1))

    def repeat(self, number: int) -> State:
        process = self._process(number)
        put = process.put
        assert put is not None
        if "same_number" in self.without:
            put = put._replace(number=put.number + 1)
            process = process._replace(number=put.number)
        after = self._with(number, process._replace(put=put, unknown=False))
        return after._replace(flying=after.flying | {put})

    def describe(self, number: int) -> State | None:
        """One transaction: objects of history with everything that is committed."""
        state = self.state
        process, serving = self._process(number), self._serving(number)
        is_owner = state.owner == Owner(serving.epoch, process.session)
        if not is_owner and "describe_compares" not in self.without:
            return None
        described = serving.log[: serving.committed]
        if len(described) <= len(state.history):
            return None
        if described[: len(state.history)] != state.history:
            raise Violation("history is overwritten")
        return state._replace(history=described)

    def prune(self, number: int) -> State | None:
        state = self.state
        process, serving = self._process(number), self._serving(number)
        if state.owner != Owner(serving.epoch, process.session) or len(state.entries) < 2:
            return None
        if state.entries[1].start > len(state.history) and "prune_described" not in self.without:
            return None
        return state._replace(entries=state.entries[1:])

    def seal(self, number: int) -> State | None:
        state = self.state
        process, serving = self._process(number), self._serving(number)
        if state.owner != Owner(serving.epoch, process.session):
            return None
        is_open = process.put is not None or bool(process.waiting)
        if is_open and "seal_waits" not in self.without:
            return None
        through = process.put.number if process.put is not None else process.number - 1
        last = state.entries[-1]._replace(through=through)
        after = self._with(number, process._replace(serving=None, waiting=()))
        return after._replace(
            owner=Owner(serving.epoch), entries=(*state.entries[:-1], last), left=_less(state.left, moves=1)
        )

    # --- the store ------------------------------------------------------------------------------------

    def applied(self, put: Put, answered: bool) -> State:
        """A create takes effect: exactly one of several for the same name succeeds."""
        state = self.state
        there = _content(state.objects, put.journal, put.number)
        objects = state.objects if there else state.objects | {(put.journal, put.number, put.content)}
        after = state._replace(objects=objects, flying=state.flying - {put})
        if not answered:
            return after._replace(left=_less(after.left, losses=1))
        for number, process in enumerate(state.processes):
            if process is not None and process.session == put.by:
                return self._answered(after, number, process, put, there)
        return after

    def _answered(self, state: State, number: int, process: Process, put: Put, there: Content | None) -> State:
        taking = process.taking
        if put.content == END:
            if taking is None or not taking.put or (taking.journal, taking.number) != (put.journal, put.number):
                return state
            if isinstance(there, Data):
                following = taking._replace(number=taking.number + 1, put=False)
                if "end_conflict_read" in self.without:
                    return self._write_end(state, number, process, taking)
                return self._with(number, process._replace(taking=following), state)
            return self._write_end(state, number, process, taking)
        if process.put != put:
            return state
        if there is None or there == put.content or "known_is_read" in self.without:
            return self._known(state, number, process, put)
        lost = process._replace(put=None, unknown=False, over=True, waiting=(), serving=None, taking=None)
        return self._with(number, lost, state)

    def _known(self, state: State, number: int, process: Process, put: Put) -> State:
        """The put succeeded: what it carried of the epoch that is served is committed."""
        process = process._replace(put=None, unknown=False, number=put.number + 1)
        serving = process.serving
        assert isinstance(put.content, Data)
        if serving is None:
            return self._with(number, process, state)
        mine = [piece for piece in put.content.pieces if piece.epoch == serving.epoch]
        if not mine:
            return self._with(number, process, state)
        serving = serving._replace(committed=mine[-1].offset + 1)
        after = self._with(number, process._replace(serving=serving), state)
        if serving.epoch < state.created:  # the topic that is deleted: nobody minds
            return after
        after = self._shown(after, serving.log[: serving.committed])
        return self._acknowledged(after, [(piece.offset, piece.message) for piece in mine])

    def raise_floor(self, journal: int) -> State | None:
        """By the journal's broker, or by the leader for one that is gone: everything in the object is described."""
        state = self.state
        key = state.keys[journal]
        if not self._is_described(journal, key.floor):
            return None
        keys = (*state.keys[:journal], key._replace(floor=key.floor + 1), *state.keys[journal + 1 :])
        return state._replace(keys=keys)

    def _is_described(self, journal: int, number: int) -> bool:
        state = self.state
        content = _content(state.objects, journal, number)
        if content is None:
            return False
        if content == END:
            return "end_stays" in self.without and state.keys[journal].end == number
        assert isinstance(content, Data)
        return all(piece.epoch < state.created or piece.offset < len(state.history) for piece in content.pieces)

    def sweep(self, journal: int) -> State | None:
        """Removes what is below the floor."""
        state = self.state
        floor = state.keys[journal].floor
        if "floor_before_removal" in self.without:
            floor += self._is_described(journal, floor)
        objects = frozenset(each for each in state.objects if each[0] != journal or each[1] >= floor)
        return state._replace(objects=objects) if objects != state.objects else None

    def delete(self, is_told: bool) -> State:
        """The epochs go on, and what is older counts as described. The owner may not hear of it for a while."""
        state = self.state
        epoch = state.owner.epoch
        processes = state.processes
        if is_told:
            closed = [each and each._replace(serving=None, waiting=()) for each in processes]
            processes = tuple(closed)
        return state._replace(
            processes=processes,
            owner=Owner(epoch),
            entries=(),
            history=(),
            created=epoch + 1,
            shown=(),
            acked=frozenset(),
            left=_less(state.left, deletions=1),
        )

    # --- whoever takes the topic ----------------------------------------------------------------------

    def take(self, number: int) -> State | None:
        """Ends the journal of an unsealed last entry, if its owner is gone, or it is the taker's own."""
        state = self.state
        process = self._process(number)
        if state.owner.session in state.registered and state.owner.session != process.session:
            return None
        if process.session not in state.registered or (process.put is not None and "claim_waits" not in self.without):
            return None
        last = state.entries[-1] if state.entries else None
        if last is None or last.through is not None or "end_before_claim" in self.without:
            return self._with(number, process._replace(taking=Taking(None)))
        if last.journal == process.journal:  # its topic went without a seal: the journal is over, whoever ends it
            return self._with(number, process._replace(over=True, waiting=(), put=None, unknown=False))
        return self._with(number, process._replace(taking=Taking(last.journal, state.keys[last.journal].floor)))

    def go_on(self, number: int) -> State | None:
        state = self.state
        process = self._process(number)
        taking = process.taking
        assert taking is not None
        if taking.journal is not None:
            if taking.put and not state.left.losses:
                return None
            if state.keys[taking.journal].end is not None:
                return self._with(number, self._ended(process, taking))
            if taking.put:  # given up waiting: the same again
                return None
            put = Put(taking.journal, taking.number, END, process.session)
            after = self._with(number, process._replace(taking=taking._replace(put=True)))
            return after._replace(flying=after.flying | {put})
        if taking.seen is None:
            if not self._may_be_read(process):
                return self._with(number, process._replace(taking=None))
            seen = (state.owner, state.entries, state.history)
            return self._with(number, process._replace(taking=taking._replace(seen=seen)))
        if taking.log is None:
            return self._read(number, process, taking)
        return self._claim(number, process, taking)

    def _may_be_read(self, process: Process) -> bool:
        """Nobody has taken the topic meanwhile, and the journal of the last entry (another now?) is ended."""
        state = self.state
        if state.owner.session in state.registered and state.owner.session != process.session:
            return False
        last = state.entries[-1] if state.entries else None
        is_fixed = last is None or last.through is not None or state.keys[last.journal].end is not None
        return is_fixed or "end_before_claim" in self.without

    @staticmethod
    def _ended(process: Process, taking: Taking) -> Process:
        return process._replace(taking=taking._replace(journal=None, put=False))

    def _write_end(self, state: State, number: int, process: Process, taking: Taking) -> State:
        """END is there: the key is read again, and `end` is written in a transaction that compares it. Below the floor
        it is nothing, and the taker goes on from there."""
        assert taking.journal is not None
        key = state.keys[taking.journal]
        if key.end is None:
            if taking.number < key.floor and "end_above_floor" not in self.without:
                following = taking._replace(number=key.floor, put=False)
                return self._with(number, process._replace(taking=following), state)
            keys = list(state.keys)
            keys[taking.journal] = key._replace(end=taking.number)
            state = state._replace(keys=tuple(keys))
        return self._with(number, self._ended(process, taking), state)

    def _read(self, number: int, process: Process, taking: Taking) -> State:
        """The pieces of the listed epochs beyond the described end, in order."""
        state = self.state
        assert taking.seen is not None
        owner, entries, history = taking.seen
        log = list(history)
        for entry in entries:
            key = state.keys[entry.journal]
            end = key.end if entry.through is None else entry.through + 1
            pieces = [
                piece
                for journal, at, content in sorted(state.objects, key=lambda each: each[:2])
                if journal == entry.journal and at >= key.floor and (end is None or at < end)
                if isinstance(content, Data)
                for piece in content.pieces
                if piece.epoch == entry.epoch or "pieces_by_epoch" in self.without
            ]
            for piece in pieces:
                if piece.offset == len(log):
                    log.append(piece.message)
        whole = not entries or len(log) >= entries[-1].start
        if not whole:
            if (owner, entries, history) == (state.owner, state.entries, state.history):
                raise Violation(f"a hole: pieces reach {len(log)}, the last epoch began at {entries[-1].start}")
            return self._with(number, process._replace(taking=None))  # look again
        if "disk_is_cache" in self.without and entries and state.keys[entries[-1].journal].broker == number:
            log = list(max(state.disks[number], tuple(log), key=len))
        return self._with(number, process._replace(taking=taking._replace(log=tuple(log))))

    def _claim(self, number: int, process: Process, taking: Taking) -> State:
        """One transaction that compares the owner key, `journals`, `history` and the taker's registration."""
        state = self.state
        assert taking.seen is not None and taking.log is not None
        owner, entries, history = taking.seen
        compared = (
            (owner == state.owner or "compare_owner" in self.without)
            and (entries == state.entries or "compare_owner" in self.without)
            and (history == state.history or "compare_history" in self.without)
        )
        if not compared or process.session not in state.registered:
            return self._with(number, process._replace(taking=None))
        log = taking.log
        if log[: len(state.shown)] != state.shown:
            raise Violation(f"shown was {state.shown}, the next owner has {log}")
        for offset, message in sorted(state.acked):
            if offset >= len(log) or log[offset] != message:
                raise Violation(f"acknowledged {message} at {offset}, the next owner has {log}")
        epoch = max(owner.epoch, state.owner.epoch) + 1
        serving = Serving(epoch, log, len(log))
        after = self._with(number, process._replace(taking=None, serving=serving))
        entry = Entry(process.journal, epoch, len(log))
        return self._shown(after._replace(owner=Owner(epoch, process.session), entries=(*state.entries, entry)), log)

    # --- judges ---------------------------------------------------------------------------------------

    @staticmethod
    def _shown(state: State, log: tuple[int, ...]) -> State:
        common = min(len(log), len(state.shown))
        if log[:common] != state.shown[:common]:
            raise Violation(f"shown was {state.shown}, and now {log}")
        if len(set(log)) < len(log):
            raise Violation(f"a message twice: {log}")
        return state._replace(shown=max(log, state.shown, key=len))

    @staticmethod
    def _acknowledged(state: State, receipts: list[tuple[int, int]]) -> State:
        acked = state.acked | frozenset(receipts)
        for offset, message in receipts:
            if any(offset == other and message != its for other, its in acked):
                raise Violation(f"offset {offset} was given twice")
            if any(message == its and offset != other for other, its in acked):
                raise Violation(f"message {message} was acknowledged at two offsets")
        return state._replace(acked=acked)

    # --- helpers --------------------------------------------------------------------------------------

    def _process(self, number: int) -> Process:
        process = self.state.processes[number]
        assert process is not None
        return process

    def _serving(self, number: int) -> Serving:
        serving = self._process(number).serving
        assert serving is not None
        return serving

    def _with(self, number: int, process: Process | None, state: State | None = None) -> State:
        state = self.state if state is None else state
        processes = (*state.processes[:number], process, *state.processes[number + 1 :])
        after = state._replace(processes=processes)
        if "disk_is_cache" in self.without and process is not None and process.serving is not None:
            disks = (*state.disks[:number], process.serving.log, *state.disks[number + 1 :])
            after = after._replace(disks=disks)
        return after


def _content(objects: frozenset[tuple[int, int, Content]], journal: int, number: int) -> Content | None:
    return next((content for at, which, content in objects if (at, which) == (journal, number)), None)


def _less(left: Budget, **spent: int) -> Budget:
    return left._replace(**{name: getattr(left, name) - count for name, count in spent.items()})
