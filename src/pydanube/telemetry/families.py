"""Metrics as Prometheus knows them: families, their series, and the lines they are printed as."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, repeat
from typing import Final, NamedTuple, TypeAlias

from pydanube.telemetry.counts import Buckets

PIECE: Final = 100  # histograms

Labels: TypeAlias = tuple[str, ...]
Rows: TypeAlias = Sequence[tuple[Labels, float]]
Pairs: TypeAlias = tuple[tuple[str, str], ...]


class Series:
    """Label names, and the values of each series. Families of the same things share one."""

    __slots__ = ("_printed", "_whose", "names", "values")

    def __init__(self, names: Labels, values: Sequence[Labels]) -> None:
        self.names = names
        self.values = values
        self._whose: Pairs | None = None
        self._printed: list[str] = []

    def printed(self, whose: Pairs) -> list[str]:
        """The labels of each series as they stand in a line, with whose they are. Without any there are no braces."""
        if self._whose != whose:
            self._whose, self._printed = whose, self._print(whose)
        return self._printed

    def _print(self, whose: Pairs) -> list[str]:
        own = ",".join([f'{name}="%s"' for name in self.names])
        end = ",".join([f'{name}="{_escaped(value)}"' for name, value in whose])
        if not own:
            return [f"{{{end}}}" if end else ""] * len(self.values)
        end = f",{end}}}" if end else "}"
        everything = "".join(chain.from_iterable(self.values))
        if _escaped(everything) == everything:  # as names nearly always are
            return [f"{{{own % values}{end}" for values in self.values]
        return [f"{{{own % tuple(map(_escaped, values))}{end}" for values in self.values]


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


class Family(NamedTuple):
    """One metric: a number of each series, or in a histogram buckets."""

    name: str
    kind: str
    text: str
    series: Series
    numbers: Sequence[float] = ()
    buckets: Sequence[Buckets] = ()

    @property
    def full_name(self) -> str:
        return f"{self.name}_total" if self.kind == "counter" else self.name

    def samples(self) -> Iterator[tuple[str, dict[str, str], float]]:
        """Name, labels and number of each line."""
        labels = [dict(zip(self.series.names, values, strict=True)) for values in self.series.values]
        if self.kind != "histogram":
            for own, number in zip(labels, self.numbers, strict=True):
                yield self.full_name, own, number
            return
        for own, buckets in zip(labels, self.buckets, strict=True):
            for bound, count in buckets.cumulative():
                yield f"{self.name}_bucket", {**own, "le": bound}, count
            yield f"{self.name}_count", own, sum(buckets.counts)
            yield f"{self.name}_sum", own, buckets.total

    def lines(self, whose: Pairs) -> Iterator[str]:
        """The same as text, with its head, in pieces of some hundred kilobytes."""
        name, printed = self.full_name, self.series.printed(whose)
        yield f"# HELP {name} {self.text}\n# TYPE {name} {self.kind}\n"
        if self.kind != "histogram":
            yield "".join([f"{name}{own} {number}\n" for own, number in zip(printed, self.numbers, strict=True)])
            return
        for first in range(0, len(printed), PIECE):
            here = slice(first, first + PIECE)
            yield "".join(map(_histogram_lines, repeat(name), printed[here], self.buckets[here]))


def _histogram_lines(name: str, own: str, buckets: Buckets) -> str:
    start = f"\n{name}_bucket{own[:-1]}," if own else f"\n{name}_bucket{{"
    below = [f'le="{bound}"}} {count}' for bound, count in buckets.cumulative()]
    lines = start.join(["", *below])[1:]
    return f"{lines}\n{name}_count{own} {sum(buckets.counts)}\n{name}_sum{own} {buckets.total}\n"


def counter_family(name: str, text: str, labels: Labels, rows: Rows) -> Family:
    return family_of("counter", name, text, labels, rows)


def gauge_family(name: str, text: str, labels: Labels, rows: Rows) -> Family:
    return family_of("gauge", name, text, labels, rows)


def family_of(kind: str, name: str, text: str, labels: Labels, rows: Rows) -> Family:
    return Family(name, kind, text, Series(labels, [values for values, _ in rows]), [number for _, number in rows])


def histogram_family(name: str, text: str, labels: Labels, buckets: Sequence[tuple[Labels, Buckets]]) -> Family:
    series = Series(labels, [values for values, _ in buckets])
    return Family(name, "histogram", text, series, (), [each for _, each in buckets])


def by_word(words: Sequence[str], counts: dict[str, int]) -> Rows:
    """Every word that there is, at 0 if it never happened."""
    return [((word,), counts.get(word, 0)) for word in words]
