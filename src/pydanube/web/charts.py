"""Pictures made of numbers: SVG without a script, a style or a label that could carry foreign text.

Colours come from the style sheet by class. Axes are text beside the picture, so that they stay readable on a phone.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Final, NamedTuple

from markupsafe import Markup

from pydanube.admin.series import Series

WIDTH: Final = 600
HEIGHT: Final = 140
SPARK_WIDTH: Final = 96
SPARK_HEIGHT: Final = 22
SPARK_POINTS: Final = 60  # five minutes
SPARK_POINTS_MIN: Final = 12
BAR_WIDTH: Final = 1000
POINTS_MIN: Final = 24


class Line(NamedTuple):
    """`colour` is 1 to 4, a class of the style sheet. `current` is what the legend says; None: the series' newest.

    Without `is_known` the legend says that it is not: the newest of the series is of the past. `known_part` is a sum
    without those parts of it that are not known; it is drawn with dashes where the series has a gap.
    """

    label: str
    colour: int
    series: Series
    current: float | None = None
    is_known: bool = True
    known_part: Sequence[tuple[float, float | None]] = ()

    @property
    def at_least(self) -> float | None:
        """What is known of it now, if it is a sum and not all of it is known."""
        if self.now is not None or not self.has_known_part:
            return None
        return self.current if self.current is not None else self.known_part[-1][1]

    @property
    def has_known_part(self) -> bool:
        return any(value is not None for _, value in self.known_part)

    @property
    def now(self) -> float | None:
        if not self.is_known:
            return None
        if self.current is not None:
            return self.current
        return next((value for _, value in reversed(self.series) if value is not None), None)

    def from_place(self, place: int) -> Line:
        """Without what was before."""
        return self._replace(series=self.series[place:], known_part=self.known_part[place:])


class Chart(NamedTuple):
    """A picture and the words around it."""

    title: str
    unit: str
    lines: Sequence[Line]
    svg: Markup
    top: float  # the upper end of the picture
    first: float  # time
    last: float
    is_empty: bool

    @property
    def points(self) -> str:
        """Its numbers as JSON, for the script that shows them under the pointer."""
        return json.dumps(
            [
                {
                    "label": line.label,
                    "colour": line.colour,
                    "values": _rounded(line.series),
                    "known": _rounded(line.known_part) if line.has_known_part else [],
                }
                for line in self.lines
            ],
            separators=(",", ":"),
        )

    @property
    def is_partial(self) -> bool:
        """Somewhere in it a part of a sum is not known."""
        return any(line.has_known_part for line in self.lines)

    @property
    def sentence(self) -> str:
        """The picture in words, for those who do not see it."""
        minutes = (self.last - self.first) / 60
        told = [
            f"{line.label}: {self._now(line)} now, "
            f"{max((value for _, value in line.series if value is not None), default=0):,.0f} at most"
            for line in self.lines
        ]
        partial = ". Where it is dashed not all brokers answered: at least so much" if self.is_partial else ""
        return f"{self.title}, the last {minutes:.0f} minutes. " + "; ".join(told) + partial

    def _now(self, line: Line) -> str:
        if line.now is not None:
            return f"{line.now:,.0f} {self.unit}"
        return "unknown" if line.at_least is None else f"unknown, at least {line.at_least:,.0f} {self.unit},"


def chart(title: str, unit: str, lines: Sequence[Line]) -> Chart:
    """Begins with the first sample: a quarter of an hour of nothing is no picture. Two minutes are the least."""
    drawn = [series for line in lines for series in (line.series, line.known_part)]
    places = [place for series in drawn for place, (_, value) in enumerate(series) if value is not None]
    first = max(min(min(places, default=0), len(lines[0].series) - POINTS_MIN), 0)
    lines = [line.from_place(first) for line in lines]
    values = [value for line in lines for _, value in (*line.series, *line.known_part) if value is not None]
    top = nice(max(values, default=0.0))
    paths = []
    for line in lines:
        for stroke, area in _paths(line.series, top, WIDTH, HEIGHT):
            paths.append(f'<path class="area c{line.colour}" d="{area}"/>')
            paths.append(f'<path class="line c{line.colour}" d="{stroke}"/>')
        for stroke, _ in _paths(line.known_part, top, WIDTH, HEIGHT):
            paths.append(f'<path class="line part c{line.colour}" d="{stroke}"/>')
    grid = "".join(
        f'<line class="grid" x1="0" x2="{WIDTH}" y1="{HEIGHT * part // 4}" y2="{HEIGHT * part // 4}"/>'
        for part in range(1, 4)
    )
    svg = Markup(
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none" aria-hidden="true" focusable="false">'
        f"{grid}{''.join(paths)}</svg>"
    )
    times = [time for line in lines for time, _ in line.series]
    return Chart(title, unit, lines, svg, top, min(times, default=0.0), max(times, default=0.0), not values)


def spark(series: Series, colour: int = 1) -> Markup:
    """A small one for a table's cell. Empty for what never moved."""
    known = next((place for place, (_, value) in enumerate(series) if value is not None), len(series))
    points = series[max(min(known, len(series) - SPARK_POINTS_MIN), len(series) - SPARK_POINTS) :]
    top = max((value for _, value in points if value is not None), default=0.0)
    if top <= 0:
        return Markup("")
    strokes = "".join(
        f'<path class="line c{colour}" d="{stroke}"/>'
        for stroke, _ in _paths(points, top * 1.1, SPARK_WIDTH, SPARK_HEIGHT)
    )
    return Markup(
        f'<svg class="spark" viewBox="0 0 {SPARK_WIDTH} {SPARK_HEIGHT}" width="{SPARK_WIDTH}" height="{SPARK_HEIGHT}" '
        f'preserveAspectRatio="none" aria-hidden="true" focusable="false">{strokes}</svg>'
    )


def _rounded(series: Sequence[tuple[float, float | None]]) -> list[float | None]:
    return [None if value is None else round(value, 1) for _, value in series]


def _paths(series: Sequence[tuple[float, float | None]], top: float, width: int, height: int) -> list[tuple[str, str]]:
    """A stroke and the area below it for every stretch without a gap. One look that came late is no gap."""
    step = width / max(len(series) - 1, 1)
    found, points, missing = [], [], 0
    for place, (_, value) in enumerate([*series, (0.0, None), (0.0, None)]):
        if value is not None:
            points.append((place * step, height - 1 - (height - 2) * min(value / top, 1.0)))
            missing = 0
            continue
        missing += 1
        if points and missing > 1:
            if len(points) == 1:  # one sample is a short dash
                points.append((min(points[0][0] + step, width), points[0][1]))
            stroke = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
            found.append((stroke, f"{stroke}L{points[-1][0]:.1f} {height}L{points[0][0]:.1f} {height}Z"))
            points = []
    return found


def nice(value: float) -> float:
    """The next round number above it, 10 at least, whose half is a whole number."""
    if value <= 10:
        return 10.0
    power: float = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 2, 3, 4, 5, 6, 8, 10) if value <= step * power)


# --- bars -------------------------------------------------------------------------------------------------


class ChartPart(NamedTuple):
    """Offsets [first, end) in one tier."""

    first: int
    end: int


class Tier(NamedTuple):
    name: str  # a class of the style sheet: cloud, disk, memory, orphan
    label: str
    parts: Sequence[ChartPart]
    note: str = ""

    @property
    def messages(self) -> int:
        return sum(part.end - part.first for part in self.parts)


def tier_bar(tier: Tier, first: int, head: int) -> Markup:
    """Where in [first, head) the tier has something. What is narrower than a point is still seen."""
    whole = max(head - first, 1)
    found = []
    for part in tier.parts:
        start = max(part.first, first) - first
        end = min(part.end, head) - first
        if end > start:
            x = BAR_WIDTH * start / whole
            width = max(BAR_WIDTH * (end - start) / whole, 4.0)
            found.append(
                f'<rect class="{tier.name}" x="{min(x, BAR_WIDTH - width):.1f}" y="0" width="{width:.1f}" height="16"/>'
            )
    return Markup(
        f'<svg class="tier" viewBox="0 0 {BAR_WIDTH} 16" preserveAspectRatio="none" aria-hidden="true" '
        f'focusable="false">{"".join(found)}</svg>'
    )


def meter(value: float, top: float, kind: str = "c1") -> Markup:
    """A bar as long as `value` is of `top`."""
    width = 100 * min(max(value / top if top else 0.0, 0.0), 1.0)
    return Markup(
        '<svg class="meter" viewBox="0 0 100 6" preserveAspectRatio="none" aria-hidden="true" focusable="false">'
        f'<rect class="track" x="0" y="0" width="100" height="6"/>'
        f'<rect class="{kind}" x="0" y="0" width="{width:.1f}" height="6"/></svg>'
    )


def stacked(parts: Sequence[tuple[str, float]]) -> Markup:
    """One bar of several parts, each as wide as its share; the classes of the parts are p1, p2, …"""
    whole = sum(value for _, value in parts) or 1.0
    x, found = 0.0, []
    for number, (_, value) in enumerate(parts, 1):
        width = BAR_WIDTH * value / whole
        found.append(f'<rect class="p{number}" x="{x:.1f}" y="0" width="{width:.1f}" height="12"/>')
        x += width
    return Markup(
        f'<svg class="stacked" viewBox="0 0 {BAR_WIDTH} 12" preserveAspectRatio="none" aria-hidden="true" '
        f'focusable="false">{"".join(found)}</svg>'
    )
