"""The report of one benchmark, as text and as JSON. Its figures are medians of interleaved runs and ratios."""

import inspect
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

UNITS: Mapping[str, str] = {"_ms": "ms", "_per_s": "/s", "_bytes": "MiB", "_ratio": "x", "_number": "", "_mean": ""}
"""Suffix of a figure's key -> the unit that people read."""

Case = Callable[[], float | Awaitable[float]]
"""One round of one case; returns its duration in seconds."""


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value below which the part `share` (0 to 1) of the values lies, interpolated between neighbours.
    Raises ValueError when there are no values.
    """
    if not values or not 0.0 <= share <= 1.0:
        raise ValueError("a percentile needs values and a share from 0 to 1")
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def median(values: Sequence[float]) -> float:
    return percentile(values, 0.5)


def timed(work: Callable[[], object], *, settle_s: float = 0.0) -> Callable[[], float]:
    """Return a case that times only `work`. Afterwards it pauses for `settle_s`, so that work which continues in the
    background does not slow the next case down.
    """

    def case() -> float:
        started = time.perf_counter()
        work()
        took = time.perf_counter() - started
        time.sleep(settle_s)
        return took

    return case


async def interleave(cases: Mapping[str, Case], rounds: int, warm_up: int) -> dict[str, list[float]]:
    """Run the cases in rounds of A B C, A B C, ... and return the seconds of each case. Interleaving spreads a slowdown
    of the machine over all cases. The first `warm_up` rounds are dropped.
    """
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for number in range(warm_up + rounds):
        for name, case in cases.items():
            value = case()
            took = await value if inspect.isawaitable(value) else value
            if number >= warm_up:
                seconds[name].append(took)
    return seconds


@dataclass(frozen=True)
class Figure:
    """One number of a report. `key`: its name in the JSON, which ends in one of UNITS. `what`: its label for people.
    `at_most` or `at_least`: its target.
    """

    key: str
    value: float
    what: str
    at_most: float | None = None
    at_least: float | None = None

    def __post_init__(self) -> None:
        if self._ending() is None:
            raise ValueError(f"the key {self.key} does not end in one of {', '.join(UNITS)}")

    @property
    def met(self) -> bool | None:
        """Return whether the target is met; None without a target."""
        if self.at_most is not None:
            return self.value <= self.at_most
        return None if self.at_least is None else self.value >= self.at_least

    def shown(self, value: float) -> str:
        ending = self._ending() or ""
        if ending == "_bytes":
            return f"{value / 2**20:.1f} MiB" if value >= 2**20 else f"{value / 2**10:.1f} KiB"
        if ending == "_number":
            return f"{value:.0f}"
        return f"{value:.{2 if value < 100 else 0}f} {UNITS[ending]}".rstrip()

    def verdict(self) -> str:
        """Return the target and whether it is met, such as `target: at most 2.50 x, met`; an empty string without a
        target.
        """
        if self.met is None:
            return ""
        bound = (
            f"at most {self.shown(self.at_most)}"
            if self.at_most is not None
            else f"at least {self.shown(self.at_least or 0.0)}"
        )
        return f"target: {bound}, {'met' if self.met else 'MISSED'}"

    def _ending(self) -> str | None:
        return next((ending for ending in UNITS if self.key.endswith(ending)), None)


@dataclass
class Report:
    """The figures of one benchmark, in the order of the report. `notes`: sentences about the measurement."""

    name: str
    figures: list[Figure] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(
        self, key: str, value: float, label: str, *, at_most: float | None = None, at_least: float | None = None
    ) -> None:
        self.figures.append(Figure(key, value, label, at_most, at_least))

    def add_ms(self, name: str, seconds: Sequence[float], label: str) -> None:
        """Add the median of a case as the figure `<name>_ms`."""
        self.add(f"{name}_ms", median(seconds) * 1000, label)

    def as_text(self) -> str:
        wide = max((len(figure.what) for figure in self.figures), default=0)
        lines = [
            f"{figure.what:<{wide}}  {figure.shown(figure.value):>12}  {figure.verdict()}".rstrip()
            for figure in self.figures
        ]
        return "\n".join([self.name, *(f"  {line}" for line in lines), *(f"  ({note})" for note in self.notes)])

    def as_json(self) -> dict[str, Any]:
        data: dict[str, Any] = {figure.key: round(figure.value, 6) for figure in self.figures}
        data["targets"] = {
            figure.key: {"at_most": figure.at_most, "at_least": figure.at_least, "met": figure.met}
            for figure in self.figures
            if figure.met is not None
        }
        data["notes"] = list(self.notes)
        return data
