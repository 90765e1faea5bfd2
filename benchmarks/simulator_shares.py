"""Fair shares of slots between tenants, and the deviation of measured shares from the fair shares."""

from collections.abc import Mapping
from typing import TypeVar

T = TypeVar("T")


def share_out(slots: float, wanted: Mapping[T, float], weights: Mapping[T, float]) -> dict[T, float]:
    """Share the slots by weight. No tenant gets more than it wants; the other tenants share the slots that remain."""
    given: dict[T, float] = {}
    remaining, rest = slots, dict(wanted)
    while rest:
        level = remaining / sum(weights[name] for name in rest)
        modest = [name for name in rest if rest[name] <= level * weights[name]]
        if not modest:
            return given | {name: level * weights[name] for name in rest}
        for name in modest:
            given[name] = rest.pop(name)
            remaining -= given[name]
    return given


def misgiven(used: Mapping[T, float], fair: Mapping[T, float]) -> float:
    """Return the part of the total use that went to the wrong tenants. Both mappings are first normalized to a sum of
    1.
    """
    all_used, all_fair = sum(used.values()), sum(fair.values())
    return (
        sum(abs(used.get(name, 0.0) / all_used - fair.get(name, 0.0) / all_fair) for name in used.keys() | fair.keys())
        / 2
    )
