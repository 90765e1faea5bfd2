"""Line plots over time for a report, as inline SVG."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from orchestrator.batches.figures import format_count, format_seconds
from orchestrator.batches.markup import Markup, element, text

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 720, 200, 70, 24, 10, 28
POINTS = 240
MAX_TICKS = 6
_STEPS = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 28800, 86400)
_LAST_TIME = 1e15


@dataclass(frozen=True)
class Line:
    """A line of a plot. `style`: a CSS class of the page. `points`: (Unix seconds, value), in order of time."""

    label: str
    style: str
    points: Sequence[tuple[float, float]]


def limit_time(at: float) -> float:
    """Return Unix seconds that can be drawn, even if a clock was wrong."""
    return max(-_LAST_TIME, min(_LAST_TIME, at))


def add_up(amounts: Iterable[tuple[float, float]], low: float, high: float) -> list[tuple[float, float]]:
    """Return the running total at POINTS + 1 moments from `low` to `high`.

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


def plot_lines(name: str, title: str, lines: Sequence[Line], low: float, high: float) -> Markup:
    """Return a plot of the lines over the time from `low` to `high`. `name`: prefix of the ids in the page."""
    highest = [max((value for _, value in line.points), default=0.0) for line in lines]
    x = _scale(low, high, LEFT, WIDTH - RIGHT)
    y = _scale(0.0, max(highest, default=0.0), TOP + HEIGHT, TOP)
    parts = [*_time_axis(high - low, low, x), *_value_axis(max(highest, default=0.0), y)]
    for line in lines:
        points = " ".join(f"{x(at):.1f},{y(value):.1f}" for at, value in line.points)
        parts.append(element("polyline", points=points, class_=f"line {line.style}"))
    height = TOP + HEIGHT + BOTTOM
    parts += _legend(lines, height + 4)
    # A text description of the plot, for screen readers.
    summary = "; ".join(
        f"{line.label}: {_number(maximum)} at most" for line, maximum in zip(lines, highest, strict=True)
    )
    head = element("title", text(title), id=f"{name}-title"), element("desc", text(summary, 2000), id=f"{name}-desc")
    labels = f"{name}-title {name}-desc"
    return element("svg", *head, *parts, viewBox=f"0 0 {WIDTH} {height + 22}", role="img", aria_labelledby=labels)


def _scale(low: float, high: float, first: float, last: float) -> Callable[[float], float]:
    """Return the function that converts a value to a position on the page."""
    share = (last - first) / (high - low) if high > low else 0.0
    return lambda value: first + (value - low) * share


def _time_axis(span: float, low: float, x: Callable[[float], float]) -> list[Markup]:
    """Return the time axis, with ticks that show the time since `low`."""
    bottom, days = TOP + HEIGHT, max(1, math.ceil(span / 86400 / MAX_TICKS))
    step = next((float(step) for step in _STEPS if span / step <= MAX_TICKS), 86400.0 * days)
    parts = [element("line", x1=LEFT, x2=WIDTH - RIGHT, y1=bottom, y2=bottom, class_="axis")]
    for number in range(int(span / step) + 1):
        at = x(low + number * step)
        parts.append(element("line", x1=at, x2=at, y1=TOP, y2=bottom, class_="grid"))
        parts.append(element("text", text(_duration(number * step)), x=at, y=bottom + 16, class_="tick middle"))
    return parts


def _value_axis(maximum: float, y: Callable[[float], float]) -> list[Markup]:
    """Return the value axis, with ticks at zero, half and the maximum."""
    parts = []
    for value in (0.0, maximum / 2, maximum) if maximum > 0 else (0.0,):
        parts.append(element("line", x1=LEFT, x2=WIDTH - RIGHT, y1=y(value), y2=y(value), class_="grid"))
        parts.append(element("text", text(_number(value)), x=LEFT - 6, y=y(value) + 4, class_="tick end"))
    return parts


def _legend(lines: Sequence[Line], y: float) -> list[Markup]:
    """Return the legend below the plot."""
    parts, x = list[Markup](), float(LEFT)
    for line in lines:
        points = f"{x:.0f},{y + 5:.0f} {x + 18:.0f},{y + 5:.0f}"
        parts.append(element("polyline", points=points, class_=f"line {line.style}"))
        parts.append(element("text", text(line.label), x=x + 24, y=y + 10, class_="tick"))
        x += 44 + 7.5 * len(line.label)
    return parts


def _duration(seconds: float) -> str:
    """Return a duration without its zero parts: "2 h" and not "2 h 00 min"."""
    text_ = format_seconds(seconds) if seconds else "0"
    for zero, short in ((" 00 s", ""), (" 00 min", ""), (".0 s", " s"), (" 0 h", "")):
        text_ = text_.replace(zero, short)
    return text_


def _number(value: float) -> str:
    """Return a value for an axis: rounded from 100, otherwise three digits."""
    return format_count(round(value)) if value >= 100 or value == int(value) else f"{value:.3g}"
