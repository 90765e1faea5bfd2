"""Line plots of a report over time, as inline SVG."""

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
    """`style`: a class of the page. `points`: (Unix seconds, value), by time."""

    label: str
    style: str
    points: Sequence[tuple[float, float]]


def limit_time(at: float) -> float:
    """Return Unix seconds that can be drawn, also for a wrong clock."""
    return max(-_LAST_TIME, min(_LAST_TIME, at))


def add_up(amounts: Iterable[tuple[float, float]], low: float, high: float) -> list[tuple[float, float]]:
    """Return the sum of the amounts up to each of POINTS moments between `low` and `high`. `amounts`: (Unix seconds,
    amount), in any order; without one there are no points.
    """
    ordered = sorted(amounts)
    if not ordered:
        return []
    points, total, index = list[tuple[float, float]](), 0.0, 0
    for number in range(POINTS + 1):
        moment = low + (high - low) * number / POINTS
        # The last point contains everything, whatever the division rounds.
        while index < len(ordered) and (ordered[index][0] <= moment or number == POINTS):
            total += ordered[index][1]
            index += 1
        points.append((moment, total))
    return points


def plot_lines(name: str, title: str, lines: Sequence[Line], low: float, high: float) -> Markup:
    """Plot lines over the time from `low` to `high`. `name`: the prefix of the ids in the page."""
    highest = [max((value for _, value in line.points), default=0.0) for line in lines]
    x = _scale(low, high, LEFT, WIDTH - RIGHT)
    y = _scale(0.0, max(highest, default=0.0), TOP + HEIGHT, TOP)
    parts = [*_time_axis(high - low, low, x), *_value_axis(max(highest, default=0.0), y)]
    for line in lines:
        points = " ".join(f"{x(at):.1f},{y(value):.1f}" for at, value in line.points)
        parts.append(element("polyline", points=points, class_=f"line {line.style}"))
    height = TOP + HEIGHT + BOTTOM
    parts += _legend(lines, height + 4)
    # The plot in words, for readers who do not see it.
    summary = "; ".join(f"{line.label}: {_number(most)} at most" for line, most in zip(lines, highest, strict=True))
    head = element("title", text(title), id=f"{name}-title"), element("desc", text(summary, 2000), id=f"{name}-desc")
    labels = f"{name}-title {name}-desc"
    return element("svg", *head, *parts, viewBox=f"0 0 {WIDTH} {height + 22}", role="img", aria_labelledby=labels)


def _scale(low: float, high: float, first: float, last: float) -> Callable[[float], float]:
    """Return the function that gives the place of a value on the page."""
    share = (last - first) / (high - low) if high > low else 0.0
    return lambda value: first + (value - low) * share


def _time_axis(span: float, low: float, x: Callable[[float], float]) -> list[Markup]:
    """Ticks of the time since `low`."""
    bottom, days = TOP + HEIGHT, max(1, math.ceil(span / 86400 / MAX_TICKS))
    step = next((float(step) for step in _STEPS if span / step <= MAX_TICKS), 86400.0 * days)
    parts = [element("line", x1=LEFT, x2=WIDTH - RIGHT, y1=bottom, y2=bottom, class_="axis")]
    for number in range(int(span / step) + 1):
        at = x(low + number * step)
        parts.append(element("line", x1=at, x2=at, y1=TOP, y2=bottom, class_="grid"))
        parts.append(element("text", text(_duration(number * step)), x=at, y=bottom + 16, class_="tick middle"))
    return parts


def _value_axis(most: float, y: Callable[[float], float]) -> list[Markup]:
    parts = []
    for value in (0.0, most / 2, most) if most > 0 else (0.0,):
        parts.append(element("line", x1=LEFT, x2=WIDTH - RIGHT, y1=y(value), y2=y(value), class_="grid"))
        parts.append(element("text", text(_number(value)), x=LEFT - 6, y=y(value) + 4, class_="tick end"))
    return parts


def _legend(lines: Sequence[Line], y: float) -> list[Markup]:
    parts, x = list[Markup](), float(LEFT)
    for line in lines:
        points = f"{x:.0f},{y + 5:.0f} {x + 18:.0f},{y + 5:.0f}"
        parts.append(element("polyline", points=points, class_=f"line {line.style}"))
        parts.append(element("text", text(line.label), x=x + 24, y=y + 10, class_="tick"))
        x += 44 + 7.5 * len(line.label)
    return parts


def _duration(seconds: float) -> str:
    """Return a round duration without its zero parts: 2 h, not 2 h 00 min."""
    shown = format_seconds(seconds) if seconds else "0"
    for zero, short in ((" 00 s", ""), (" 00 min", ""), (".0 s", " s"), (" 0 h", "")):
        shown = shown.replace(zero, short)
    return shown


def _number(value: float) -> str:
    return format_count(round(value)) if value >= 100 or value == int(value) else f"{value:.3g}"
