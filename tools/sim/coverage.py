"""Which public operations a simulation met: no fault can hit what is never called.

    counts: Counter[str] = Counter()
    with counting(counts, Wal, TopicLog):
        ...                                       # counts["TopicLog.prepare"] is how often it was called
    unmet(counts, Wal, TopicLog)                  # names of operations that were not called

An operation is a method whose name has no underscore in front, defined by the class itself; properties are not. A call
counts when it begins, however it ends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from inspect import isfunction
from typing import Any


def operations(*classes: type) -> list[str]:
    """`Class.method` of every operation, in the order in which they are defined."""
    return [f"{each.__name__}.{name}" for each in classes for name in _methods(each)]


def unmet(counts: Mapping[str, int], *classes: type, but: Collection[str] = ()) -> list[str]:
    """The operations that were never called, except those named in `but`."""
    return [name for name in operations(*classes) if not counts.get(name) and name not in but]


@contextmanager
def counting(counts: Counter[str], *classes: type) -> Iterator[None]:
    """Counts calls of the classes' operations, by name, until it ends. One run at a time."""
    saved = [(each, name, vars(each)[name]) for each in classes for name in _methods(each)]
    for each, name, method in saved:
        setattr(each, name, _counted(method, f"{each.__name__}.{name}", counts))
    try:
        yield
    finally:
        for each, name, method in saved:
            setattr(each, name, method)


def _methods(of: type) -> list[str]:
    return [
        name
        for name, value in vars(of).items()
        if not name.startswith("_") and (isfunction(value) or isinstance(value, classmethod | staticmethod))
    ]


def _counted(method: Any, label: str, counts: Counter[str]) -> Any:
    if isinstance(method, classmethod):
        return classmethod(_counting_call(method.__func__, label, counts))
    if isinstance(method, staticmethod):
        return staticmethod(_counting_call(method.__func__, label, counts))
    return _counting_call(method, label, counts)


def _counting_call(function: Callable[..., Any], label: str, counts: Counter[str]) -> Callable[..., Any]:
    @wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        counts[label] += 1
        return function(*arguments, **named)

    return call
