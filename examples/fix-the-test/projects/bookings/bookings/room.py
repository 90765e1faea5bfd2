"""Booked and free times of a day."""

from collections.abc import Iterable

from bookings.slots import Slot


def merge(slots: Iterable[Slot]) -> list[Slot]:
    """The same minutes in as few slots as possible, in order; slots that touch become one."""
    merged: list[Slot] = []
    for slot in sorted(slots):
        if merged and slot.start <= merged[-1].end:
            merged[-1] = Slot(merged[-1].start, slot.end)
        else:
            merged.append(slot)
    return merged


def find_free(booked: Iterable[Slot], day: Slot, minutes: int = 1) -> list[Slot]:
    """The gaps of the day that are at least so long."""
    gaps, at = [], day.start
    for slot in merge(booked):
        if slot.start > at:
            gaps.append(Slot(at, min(slot.start, day.end)))
        at = max(at, slot.end)
    if at < day.end:
        gaps.append(Slot(at, day.end))
    return [gap for gap in gaps if gap.minutes >= minutes]
