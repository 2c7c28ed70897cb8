"""Errors that declare their fields, and the sentence that is made from them.

    @says("topic {topic} has no subscription {subscription}")
    class SubscriptionUnknown(Refused):
        topic: str
        subscription: str

The constructor takes the fields in order or by name, `args` has them all (so pickling keeps them), and the text of the
error is the sentence with their values. Not a dataclass: making one takes half a millisecond, and every command would
pay for fifty errors that it hardly raises.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, TypeVar, dataclass_transform


class Declared(Exception):
    """The base of all that `says` decorates."""

    _fields: ClassVar[tuple[str, ...]] = ()
    _sentence: ClassVar[str] = ""

    def __str__(self) -> str:
        return self._sentence.format_map(vars(self)) if self._sentence else super().__str__()


E = TypeVar("E", bound=Declared)


@dataclass_transform(eq_default=False)
def says(sentence: str = "") -> Callable[[type[E]], type[E]]:
    """Declares an error; fields of its base come first. Without a sentence the class has a `__str__` of its own."""

    def declare(made: type[E]) -> type[E]:
        made._fields = (*made._fields, *vars(made).get("__annotations__", ()))
        made._sentence = sentence
        made.__init__ = _take_fields  # type: ignore[assignment]
        return made

    return declare


def fields_of(kind: type[Declared]) -> tuple[str, ...]:
    """What `says` declared, in the order of the constructor; none of a class that takes any words."""
    return kind._fields


def have_same_fields(one: type[Declared], other: type[Declared]) -> bool:
    """Whether errors of both classes with the same fields have the same text."""
    return one.__str__ is other.__str__ and one._sentence == other._sentence


def _take_fields(self: Declared, *values: Any, **named: Any) -> None:
    fields, kind = self._fields, type(self)
    given = {**dict(zip(fields, values, strict=False)), **named}
    absent = [name for name in fields if name not in given and not hasattr(kind, name)]
    if absent or len(given) != len(values) + len(named) or not given.keys() <= set(fields):
        raise TypeError(f"{kind.__name__} takes {', '.join(fields)}")
    for name in fields:
        setattr(self, name, given[name] if name in given else getattr(kind, name))
    self.args = tuple(getattr(self, name) for name in fields)
