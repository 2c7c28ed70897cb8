"""The tables of the SQLite metadata store: many calls, one commit.

Knows neither the loop nor the time. A commit that fails fails all its calls and changes nothing; after any
failure but a full disk it is not known what the file holds, so every later commit is refused too.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from pydanube.errors import DanubeError, DirectoryInUse, DiskFailed, DiskFull, FormatTooNew, LeaseLost
from pydanube.ports import Compare, Delete, Event, Item, LeaseId, Put, Revision
from pydanube.stores.metadata.watch_log import Change

FORMAT: Final = 1  # PRAGMA user_version
SCHEMA: Final = f"""
    CREATE TABLE items (
        key TEXT PRIMARY KEY, value BLOB NOT NULL, revision INTEGER NOT NULL, lease INTEGER NOT NULL
    ) WITHOUT ROWID;
    CREATE INDEX items_by_lease ON items (lease) WHERE lease != 0;
    CREATE TABLE leases (id INTEGER PRIMARY KEY, ttl_seconds REAL NOT NULL);
    CREATE TABLE counters (revision INTEGER NOT NULL, leases_made INTEGER NOT NULL);
    INSERT INTO counters VALUES (0, 0);
    PRAGMA user_version = {FORMAT};
"""


@dataclass(slots=True, eq=False)
class Call:
    """Something for the thread to do. `outcome` None: no caller waits for it."""

    function: Callable[[Database], object]
    outcome: asyncio.Future[object] | None
    undo: Callable[[], None] | None = None  # on the loop, if it could not be done
    value: object = None
    error: BaseException | None = None


class Database:
    """The file. Made by the thread that opens the store, then used by the store's thread alone."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._broken: DanubeError | None = None
        self._changes: list[Change] = []  # of the commit in progress
        try:
            self._sql = sqlite3.connect(path, timeout=0, isolation_level=None, check_same_thread=False)
        except sqlite3.Error as error:
            raise self._ours(error) from error
        try:
            # Exclusive before the first access: no second process, and no shared-memory file next to ours.
            self._sql.execute("PRAGMA locking_mode = EXCLUSIVE")
            # What a savepoint may have to take back is kept in memory: a file that cannot be opened would end it all.
            self._sql.execute("PRAGMA temp_store = MEMORY")
            self._check_format()
            self._sql.execute("PRAGMA journal_mode = WAL")
            self._sql.execute("PRAGMA synchronous = FULL")
            counters: tuple[int, int] = self._sql.execute("SELECT * FROM counters").fetchone()
            self.revision, self._leases_made = counters
        except sqlite3.Error as error:
            self._sql.close()
            raise self._ours(error) from error
        except DanubeError:
            self._sql.close()
            raise

    def _check_format(self) -> None:
        """Makes the tables in an empty file; refuses one that is not ours to write."""
        self._sql.execute("BEGIN IMMEDIATE")
        [found] = self._sql.execute("PRAGMA user_version").fetchone()
        [tables] = self._sql.execute("SELECT count(*) FROM sqlite_master").fetchone()
        self._sql.execute("COMMIT")
        if found > FORMAT:
            raise FormatTooNew(self._path, found, FORMAT)
        if found == 0 and tables:
            raise DiskFailed(self._path, "opening", "it is another program's database")
        if found == 0:
            self._sql.executescript(f"BEGIN; {SCHEMA} COMMIT;")

    def close(self) -> None:
        with suppress(sqlite3.Error):  # what was committed is safe either way
            self._sql.close()

    def leases(self) -> list[tuple[LeaseId, float]]:
        return self._sql.execute("SELECT id, ttl_seconds FROM leases ORDER BY id").fetchall()

    # --- one commit ---

    def commit(self, calls: Sequence[Call]) -> list[Change]:
        """Does all calls in order and makes them durable together. Each has its value or its error after."""
        before = self.revision, self._leases_made
        self._changes = []
        try:
            if self._broken is not None:
                raise self._broken
            self._sql.execute("BEGIN")
            for call in calls:
                self._do(call)
            if before != (self.revision, self._leases_made):
                counters = self.revision, self._leases_made
                self._sql.execute("UPDATE counters SET revision = ?, leases_made = ?", counters)
            self._sql.execute("COMMIT")
        except (sqlite3.Error, DanubeError) as error:
            self.revision, self._leases_made = before
            self._changes = []
            self._fail(calls, error)
        return self._changes

    def _do(self, call: Call) -> None:
        """Everything a call may refuse it refuses before it changes anything, except a value SQLite cannot
        hold: a bug, which must not take the others' changes along."""
        self._sql.execute("SAVEPOINT call")
        changes, revision = len(self._changes), self.revision
        try:
            call.value = call.function(self)
        except Exception as error:
            if isinstance(error, sqlite3.Error) and not isinstance(error, sqlite3.ProgrammingError):
                raise
            self._sql.execute("ROLLBACK TO call")
            del self._changes[changes:]
            self.revision = revision
            call.error = error
        self._sql.execute("RELEASE call")

    def _fail(self, calls: Sequence[Call], error: sqlite3.Error | DanubeError) -> None:
        if isinstance(error, sqlite3.Error):
            ours = self._ours(error)
            if not isinstance(ours, DiskFull):
                self._broken = ours
            with suppress(sqlite3.Error):
                if self._sql.in_transaction:
                    self._sql.execute("ROLLBACK")
        else:
            ours = error
        for call in calls:
            call.error = type(ours)(*ours.args)  # one each: callers add their own tracebacks

    def _ours(self, error: sqlite3.Error) -> DanubeError:
        name = getattr(error, "sqlite_errorname", "")
        if name == "SQLITE_FULL":
            return DiskFull(self._path)
        if name.startswith("SQLITE_BUSY"):
            return DirectoryInUse(self._path, None)
        return DiskFailed(self._path, "access", str(error))

    # --- calls ---

    def get(self, key: str) -> Item | None:
        row = self._sql.execute("SELECT key, value, revision FROM items WHERE key = ?", (key,)).fetchone()
        return None if row is None else Item(*row)

    def list(self, prefix: str) -> list[Item]:
        # Keys that start with the prefix stand together, first of all that are not less than it.
        rows = self._sql.execute("SELECT key, value, revision FROM items WHERE key >= ? ORDER BY key", (prefix,))
        items = []
        for row in rows:
            if not row[0].startswith(prefix):
                break
            items.append(Item(*row))
        rows.close()
        return items

    def transact(self, compares: Sequence[Compare], operations: Sequence[Put | Delete]) -> Revision | None:
        if not all(self._holds(compare) for compare in compares):
            return None
        for operation in operations:
            if isinstance(operation, Put) and operation.lease and not self._has_lease(operation.lease):
                raise LeaseLost(operation.lease)
        self._change(operations)
        return self.revision

    def grant(self, ttl_seconds: float) -> LeaseId:
        self._leases_made += 1
        self._sql.execute("INSERT INTO leases VALUES (?, ?)", (self._leases_made, ttl_seconds))
        return self._leases_made

    def end_lease(self, id_: LeaseId) -> None:
        keys = self._sql.execute("SELECT key FROM items WHERE lease = ? AND lease != 0 ORDER BY key", (id_,))
        self._change([Delete(key) for (key,) in keys.fetchall()])
        self._sql.execute("DELETE FROM leases WHERE id = ?", (id_,))

    def _holds(self, compare: Compare) -> bool:
        row = self._sql.execute("SELECT revision FROM items WHERE key = ?", (compare.key,)).fetchone()
        return (row[0] if row else 0) == compare.revision

    def _has_lease(self, id_: LeaseId) -> bool:
        return self._sql.execute("SELECT 1 FROM leases WHERE id = ?", (id_,)).fetchone() is not None

    def _change(self, operations: Sequence[Put | Delete]) -> None:
        """Makes one revision of all operations that change something; none if none does."""
        revision = self.revision + 1
        events = []
        for operation in operations:
            key = operation.key
            if isinstance(operation, Put):
                row = key, operation.value, revision, operation.lease
                self._sql.execute("INSERT OR REPLACE INTO items VALUES (?, ?, ?, ?)", row)
                events.append(Event(key, operation.value, revision))
            elif self._sql.execute("DELETE FROM items WHERE key = ?", (key,)).rowcount:
                events.append(Event(key, None, revision))
        if events:
            self.revision = revision
            self._changes.append(tuple(events))
