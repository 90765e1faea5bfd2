"""What a fair hand would have given everybody, and how far from it what they got is."""

from collections.abc import Mapping
from typing import TypeVar

T = TypeVar("T")


def share_out(slots: float, wanted: Mapping[T, float], weights: Mapping[T, float]) -> dict[T, float]:
    """Slots by weight, nobody more than wanted; what one leaves is the others'."""
    given: dict[T, float] = {}
    left, rest = slots, dict(wanted)
    while rest:
        level = left / sum(weights[name] for name in rest)
        modest = [name for name in rest if rest[name] <= level * weights[name]]
        if not modest:
            return given | {name: level * weights[name] for name in rest}
        for name in modest:
            given[name] = rest.pop(name)
            left -= given[name]
    return given


def misgiven(used: Mapping[T, float], fair: Mapping[T, float]) -> float:
    """Which part of all that was used went to somebody else than it should have. Both are made shares of their sums
    first.
    """
    all_used, all_fair = sum(used.values()), sum(fair.values())
    return (
        sum(abs(used.get(name, 0.0) / all_used - fair.get(name, 0.0) / all_fair) for name in used.keys() | fair.keys())
        / 2
    )
