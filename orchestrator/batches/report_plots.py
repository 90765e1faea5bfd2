"""Line plots over time for a report: the positions of lines and ticks. The template of the report draws them."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from toolcrew.orchestrator.terminal.figures import format_count, format_seconds

LEFT, RIGHT, TOP, BOTTOM = 70, 696, 10, 210
POINTS = 240
MAX_TICKS = 6
_STEPS = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 28800, 86400)
_LAST_TIME = 1e15


@dataclass(frozen=True)
class PlotLine:
    """A line of a plot. `style`: a CSS class of the page. `points`: the positions, as in SVG."""

    label: str
    style: str
    points: str


@dataclass(frozen=True)
class Plot:
    """A plot over time. `id`: prefix of the ids in the page. `times`, `values`: position and text of each tick.
    `summary`: a description, for screen readers.
    """

    id: str
    title: str
    caption: str
    summary: str
    lines: Sequence[PlotLine]
    times: Sequence[tuple[float, str]]
    values: Sequence[tuple[float, str]]
    left: int = LEFT
    right: int = RIGHT
    top: int = TOP
    bottom: int = BOTTOM


def limit_time(at: float) -> float:
    """Return the time, limited to a range that can be drawn: a wrong clock may have reported any time."""
    return max(-_LAST_TIME, min(_LAST_TIME, at))


def add_up(amounts: Iterable[tuple[float, float]], low: float, high: float) -> list[tuple[float, float]]:
    """Return the running total as (Unix seconds, total) at POINTS + 1 moments from `low` to `high`.

    `amounts`: (Unix seconds, amount), in any order. Without amounts the result is empty.
    """
    ordered = sorted(amounts)
    if not ordered:
        return []
    points, total, index = list[tuple[float, float]](), 0.0, 0
    for number in range(POINTS + 1):
        moment = low + (high - low) * number / POINTS
        # The last point includes all amounts, even if the division rounds down.
        while index < len(ordered) and (ordered[index][0] <= moment or number == POINTS):
            total += ordered[index][1]
            index += 1
        points.append((moment, total))
    return points


def build_plot(
    id_: str, title: str, caption: str, lines: Mapping[str, tuple[str, Sequence[tuple[float, float]]]], low: float,
    high: float,
) -> Plot:  # fmt: skip
    """Return a plot over the time from `low` to `high`. `lines`: style and (Unix seconds, value) by label."""
    maxima = {label: max(value for _, value in points) for label, (_, points) in lines.items()}
    highest, span = max(maxima.values()), high - low
    x, y = _scale(low, high, LEFT, RIGHT), _scale(0.0, highest, BOTTOM, TOP)
    days = max(1, math.ceil(span / 86400 / MAX_TICKS))
    step = next((float(step) for step in _STEPS if span / step <= MAX_TICKS), 86400.0 * days)
    return Plot(
        id_,
        title,
        caption,
        "; ".join(f"{label}: {_number(maximum)} at most" for label, maximum in maxima.items()),
        [
            PlotLine(label, style, " ".join(f"{x(at):.1f},{y(value):.1f}" for at, value in points))
            for label, (style, points) in lines.items()
        ],
        [(round(x(low + tick * step), 1), _duration(tick * step)) for tick in range(int(span / step) + 1)],
        [(round(y(value), 1), _number(value)) for value in ((0.0, highest / 2, highest) if highest > 0 else (0.0,))],
    )


def _scale(low: float, high: float, first: float, last: float) -> Callable[[float], float]:
    """Return the function that converts a value to a position on the page."""
    share = (last - first) / (high - low) if high > low else 0.0
    return lambda value: first + (value - low) * share


def _duration(seconds: float) -> str:
    """Return a duration without its zero parts: "2 h" and not "2 h 00 min"."""
    text = format_seconds(seconds) if seconds else "0"
    for zero, short in ((" 00 s", ""), (" 00 min", ""), (".0 s", " s"), (" 0 h", "")):
        text = text.replace(zero, short)
    return text


def _number(value: float) -> str:
    """Return a value as text for an axis: a whole number from 100 on, otherwise three significant digits."""
    return format_count(round(value)) if value >= 100 or value == int(value) else f"{value:.3g}"
