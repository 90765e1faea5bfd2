"""Plots of a report as inline SVG: lines over time, strips of how long things took, bars, and the items as they ran."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from orchestrator.batches.figures import format_count, format_rate, format_seconds, one_line
from orchestrator.batches.histogram import LogHistogram, bucket_of, middle_of, place_of
from orchestrator.batches.markup import Markup, element, text
from orchestrator.batches.report_series import FAILED, MAX_NAMED, RUNNING, Spans
from orchestrator.batches.snapshot import Spread

WIDTH, LEFT, RIGHT, TOP, BOTTOM = 720, 150, 16, 10, 28
GROUPS = 200
MAX_COLUMNS = 80
MAX_LABEL_CHARS = 20
_CLASSES = "done", "failed", "retried", "running"
_WORDS = "succeeded", "failed", "tried again", "still running"
_STEPS = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 28800, 86400)


@dataclass(frozen=True)
class Line:
    """`style`: a class of the page, which also gives its dashes. `points`: (Unix seconds, value), by time."""

    label: str
    style: str
    points: Sequence[tuple[float, float]]


def plot_lines(
    name: str, title: str, lines: Sequence[Line], low: float, high: float, *, is_stepped: bool = True
) -> Markup:
    """Lines over the time from `low` to `high`; stepped ones hold their value until the next."""
    height, most = 200, max((value for line in lines for _, value in line.points), default=0.0)
    x, y = _across(low, high), _upwards(most, height)
    parts = [*_time_axis(low, high, height), *_value_axis(most, y)]
    for line in lines:
        points = [(max(low, min(high, time)), value) for time, value in line.points]
        if is_stepped:
            points = _stepped(points, low, high)
        path = " ".join(f"{x(time):.1f},{y(value):.1f}" for time, value in points)
        parts.append(element("polyline", points=path, class_=f"line {line.style}") if points else Markup(""))
    told = "; ".join(
        f"{line.label}: {_number(max((value for _, value in line.points), default=0))} at most" for line in lines
    )
    legend = _legend([(line.label, line.style) for line in lines], height + TOP + BOTTOM + 4)
    return _svg(name, title, told, height + TOP + BOTTOM + 22, [*parts, *legend])


def plot_strips(name: str, title: str, rows: Sequence[tuple[str, LogHistogram]]) -> Markup:
    """How often which time, a row each, on one logarithmic axis; with the median, p95 and maximum."""
    row_height, height = 36, 36 * len(rows)
    buckets = [bucket for _, times in rows for bucket in times.buckets]
    most = max((bucket_of(times.max_s) for _, times in rows), default=1)
    low, high = min(buckets, default=0), max(buckets, default=0) + 1
    high = max(high, most + 1, low + 10)
    step = math.ceil((high - low) / MAX_COLUMNS)

    def x(bucket: float) -> float:
        return LEFT + (bucket - low) / (high - low) * (WIDTH - LEFT - RIGHT)

    parts = _log_axis(low, high, height, x)
    told = []
    for number, (label, times) in enumerate(rows):
        base, spread = TOP + (number + 1) * row_height - 4.0, Spread.of(times)
        told.append(f"{_short(label)}: median {format_seconds(spread.p50_s)}, p95 {format_seconds(spread.p95_s)}")
        parts += [_label(label, base - 8), *_columns(times.buckets, low, step, base, row_height - 14.0, x)]
        for seconds, style in ((spread.p50_s, "mark"), (spread.p95_s, "mark dashed")):
            at = x(place_of(seconds))
            parts.append(element("line", x1=at, x2=at, y1=base - row_height + 8, y2=base, class_=style))
        parts.append(element("circle", cx=x(place_of(times.max_s)), cy=base - 4, r=3, class_="mark"))
    return _svg(name, title, "; ".join(told), height + TOP + BOTTOM, parts)


def plot_bars(name: str, title: str, rows: Sequence[tuple[str, int]]) -> Markup:
    """A bar each, with its count."""
    most, parts = max((count for _, count in rows), default=1) or 1, list[Markup]()
    for number, (label, count) in enumerate(rows):
        y, length = TOP + number * 24.0, count / most * (WIDTH - LEFT - 90)
        parts += [
            _label(label, y + 14),
            element("rect", x=LEFT, y=y, width=max(1.0, length), height=18, class_="fill failed"),
            element("text", text(f"{count:,}"), x=LEFT + length + 6, y=y + 14, class_="tick"),
        ]
    return _svg(
        name,
        title,
        "; ".join(f"{one_line(label, 40)}: {count:,}" for label, count in rows),
        TOP * 2 + 24 * len(rows),
        parts,
    )


def plot_spans(name: str, title: str, spans: Spans, low: float, high: float) -> Markup:
    """When items ran, in the order in which they began: a row each, or one for many."""
    order = spans.in_order()
    size = 1 if len(order) <= MAX_NAMED else math.ceil(len(order) / GROUPS)
    groups = [order[first : first + size] for first in range(0, len(order), size)]
    row = min(12.0, max(2.0, 360 / max(1, len(groups))))
    height, x = row * len(groups), _across(low, high)
    parts = _time_axis(low, high, height)
    for number, group in enumerate(groups):
        y = TOP + number * row
        parts += [_one_span(spans, group[0], y, row, x)] if size == 1 else _many_spans(spans, group, y, row, x)
    told = f"{len(order):,} attempts, " + ("a row each" if size == 1 else f"{size:,} in a row")
    styles = [(word, f"fill {style}") for word, style in zip(_WORDS, _CLASSES, strict=True)]
    parts += _legend(
        styles
        if size == 1
        else [("first to last", "fill pale"), ("middle", "fill done"), ("failed, share", "fill failed")],
        height + TOP + BOTTOM + 4,
    )
    return _svg(name, title, told, height + TOP + BOTTOM + 22, parts)


def _one_span(spans: Spans, number: int, y: float, row: float, x: "_Scale") -> Markup:
    begin, end, outcome = spans.begins[number], spans.ends[number], spans.outcomes[number]
    told = f"{one_line(spans.names[number], 80)}: {format_seconds(end - begin)}, {_WORDS[outcome]}"
    style = f"fill {_CLASSES[outcome]}"
    return element(
        "rect",
        element("title", text(told)),
        x=x(begin),
        y=y,
        width=max(1.0, x(end) - x(begin)),
        height=row * 0.8,
        class_=style,
    )


def _many_spans(spans: Spans, group: Sequence[int], y: float, row: float, x: "_Scale") -> list[Markup]:
    begins, ends = [spans.begins[number] for number in group], [spans.ends[number] for number in group]
    failed = sum(spans.outcomes[number] == FAILED for number in group)
    running = sum(spans.outcomes[number] == RUNNING for number in group)
    low, high, begin, end = min(begins), max(ends), median(begins), median(ends)
    told = f"{len(group):,} attempts, {failed:,} failed" + (f", {running:,} still running" if running else "")
    width = max(1.0, x(end) - x(begin))
    parts = [
        element(
            "rect",
            element("title", text(told)),
            x=x(low),
            y=y,
            width=max(1.0, x(high) - x(low)),
            height=row * 0.8,
            class_="fill pale",
        ),
        element("rect", x=x(begin), y=y, width=width, height=row * 0.8, class_="fill done"),
    ]
    if failed:
        share = width * failed / len(group)
        parts.append(
            element(
                "rect", x=x(begin) + width - share, y=y, width=max(1.0, share), height=row * 0.8, class_="fill failed"
            )
        )
    return parts


class _Scale:
    """Values of one axis as places on the page."""

    def __init__(self, low: float, high: float, first: float, last: float) -> None:
        self._low, self._first = low, first
        # Halved first: the span of hostile times may be more than a float holds.
        self._share = (last - first) / 2 / span if (span := high / 2 - low / 2) > 0 else 0.0

    def __call__(self, value: float) -> float:
        return self._first + 2 * (value / 2 - self._low / 2) * self._share


def _across(low: float, high: float) -> _Scale:
    return _Scale(low, high, LEFT, WIDTH - RIGHT)


def _upwards(most: float, height: float) -> _Scale:
    return _Scale(0.0, most, TOP + height, TOP)


def _stepped(points: Sequence[tuple[float, float]], low: float, high: float) -> list[tuple[float, float]]:
    made, before = [(low, 0.0)], 0.0
    for time, value in points:
        made += [(time, before), (time, value)]
        before = value
    return [*made, (high, before)]


def _columns(
    buckets: Mapping[int, int], low: int, step: int, base: float, height: float, x: Callable[[float], float]
) -> list[Markup]:
    sums: dict[int, int] = {}
    for bucket, count in buckets.items():
        sums[(bucket - low) // step] = sums.get((bucket - low) // step, 0) + count
    most = max(sums.values(), default=1)
    parts = []
    for column, count in sorted(sums.items()):
        left, right = x(low + column * step), x(low + (column + 1) * step)
        tall = max(1.0, height * count / most)
        parts.append(
            element(
                "rect", x=left, y=base - tall, width=max(0.5, right - left - 0.5), height=tall, class_="fill column"
            )
        )
    return parts


def _time_axis(low: float, high: float, height: float) -> list[Markup]:
    """Time since the begin."""
    span, x = high - low, _across(low, high)
    step = next(
        (float(step) for step in _STEPS if span / step <= 6), 86400.0 * max(1, math.ceil(min(span, 1e300) / 86400 / 6))
    )
    parts = [element("line", x1=LEFT, x2=WIDTH - RIGHT, y1=TOP + height, y2=TOP + height, class_="axis")]
    for number in range(int(min(6.0, span / step)) + 1):
        at = x(low + number * step)
        parts.append(element("line", x1=at, x2=at, y1=TOP, y2=TOP + height, class_="grid"))
        parts.append(element("text", text(_since(number * step)), x=at, y=TOP + height + 16, class_="tick middle"))
    return parts


def _since(seconds: float) -> str:
    return (
        "0"
        if seconds == 0
        else format_seconds(seconds)
        .replace(" 00 s", "")
        .replace(" 00 min", "")
        .replace(".0 s", " s")
        .replace(" 0 h", "")
    )


def _value_axis(most: float, y: _Scale) -> list[Markup]:
    parts = []
    for value in (0.0, most / 2, most) if most > 0 else (0.0,):
        parts.append(element("line", x1=LEFT, x2=WIDTH - RIGHT, y1=y(value), y2=y(value), class_="grid"))
        parts.append(element("text", text(_number(value)), x=LEFT - 6, y=y(value) + 4, class_="tick end"))
    return parts


def _log_axis(low: int, high: int, height: float, x: Callable[[float], float]) -> list[Markup]:
    parts = [element("line", x1=LEFT, x2=WIDTH - RIGHT, y1=TOP + height, y2=TOP + height, class_="axis")]
    first, last = math.floor(math.log10(middle_of(max(1, low)))), math.floor(math.log10(middle_of(high)))
    step, multiples = math.ceil((last - first + 1) / 12), (1, 2, 5) if last - first <= 2 else (1,)
    for seconds in (multiple * 10.0**power for power in range(first, last + 1, step) for multiple in multiples):
        if low <= place_of(seconds) <= high:
            at = x(place_of(seconds))
            parts.append(element("line", x1=at, x2=at, y1=TOP, y2=TOP + height, class_="grid"))
            parts.append(element("text", text(_since(seconds)), x=at, y=TOP + height + 16, class_="tick middle"))
    return parts


def _legend(entries: Sequence[tuple[str, str]], y: float) -> list[Markup]:
    parts, x = list[Markup](), float(LEFT)
    for label, style in entries:
        if style.startswith("fill"):
            parts.append(element("rect", x=x, y=y, width=18, height=10, class_=style))
        else:
            parts.append(
                element("polyline", points=f"{x:.0f},{y + 5:.0f} {x + 18:.0f},{y + 5:.0f}", class_=f"line {style}")
            )
        parts.append(element("text", text(label), x=x + 24, y=y + 10, class_="tick"))
        x += 44 + 7.5 * len(label)
    return parts


def _label(label: str, y: float) -> Markup:
    return element("text", element("title", text(label)), text(_short(label)), x=LEFT - 8, y=y, class_="tick end")


def _short(label: str) -> str:
    shown = one_line(label)
    return shown if len(shown) <= MAX_LABEL_CHARS else shown[: MAX_LABEL_CHARS - 1] + "…"


def _number(value: float) -> str:
    return format_count(round(value)) if value >= 10 or value == int(value) else format_rate(value)


def _svg(name: str, title: str, told: str, height: float, parts: Sequence[Markup]) -> Markup:
    """`told`: the plot in words."""
    head = element("title", text(title), id=f"{name}-title"), element("desc", text(told, 2000), id=f"{name}-desc")
    box, labels = f"0 0 {WIDTH} {height:.0f}", f"{name}-title {name}-desc"
    return element("svg", *head, *parts, viewBox=box, role="img", aria_labelledby=labels)
