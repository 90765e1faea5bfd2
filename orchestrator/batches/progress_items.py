"""What is remembered of an item that is not settled: where it stands, what its attempts spent, and which of its
batch_events have been counted.
"""

import math
from array import array
from collections.abc import Hashable
from enum import IntEnum, IntFlag

_HASH_MASK = 2**64 - 1
_MAX_LISTED = 256
"""Marks are looked for one after the other up to here, by hash beyond."""


class Stage(IntEnum):
    """Of one attempt; with the attempt before it, an order that an item goes through only upwards, however its
    batch_events arrive.
    """

    QUEUED = 0
    RUNNING = 1
    ENDED = 2


class Heard(IntFlag):
    """What has been counted of an item and may come again when it is settled."""

    STARTED = 1
    READY = 2
    RESUMED = 4


class Spent:
    """Of one attempt: what its steps and calls add up to, and what its end says of the whole; the larger figure
    counts.
    """

    __slots__ = ("attempt", "said", "seen")

    def __init__(self, attempt: int) -> None:
        self.attempt = attempt
        self.seen = (0, 0, 0, 0)
        """Steps, calls, prompt tokens, completion tokens."""
        self.said: tuple[int, int, int, int] | None = None

    def counted(self) -> tuple[int, int, int, int]:
        if self.said is None:
            return self.seen
        (a, b, c, d), (e, f, g, h) = self.seen, self.said
        return max(a, e), max(b, f), max(c, g), max(d, h)

    def is_whole(self) -> bool:
        """Every step and call that its end counts has been seen."""
        return self.said is not None and self.seen[:2] == self.said[:2]


class Working:
    """Of an item that runs: since when, and what it does."""

    __slots__ = ("begun_at", "first_at", "is_ready", "last_call", "run", "step")

    def __init__(self, at: float, run: str) -> None:
        self.begun_at: float | None = None
        """When it was begun, or gone on with, last."""
        self.first_at = at
        self.run = run
        self.is_ready = False
        self.step = 0
        self.last_call = (-math.inf, "")
        """When a call ended last, and of which tool."""

    def age(self, now: float) -> float:
        return max(0.0, now - (self.first_at if self.begun_at is None else self.begun_at))

    def does(self) -> str:
        tool = self.last_call[1]
        if not self.is_ready and not self.step and not tool:
            return "setting up"
        now = f"{self.step} {'step' if self.step == 1 else 'steps'}" if self.step else "at work"
        return f"{now}, last {tool}" if tool else now


class Item:
    """`reason`: of a failed end, its place in the table of reasons; 0: none. `is_settled`: nothing of its first attempt
    is to come.
    """

    __slots__ = ("attempt", "heard", "is_settled", "marks", "reason", "spent", "stage", "working")

    def __init__(self) -> None:
        self.attempt = 1
        self.stage = Stage.QUEUED
        self.reason = 0
        self.heard = 0
        self.is_settled = False
        self.marks: array[int] | set[int] = array("Q")
        self.spent: tuple[Spent, ...] = ()
        self.working: Working | None = None

    @classmethod
    def reopened(cls, state: int) -> "Item":
        """What `settled_state` was made of."""
        item = cls()
        item.stage, item.is_settled = Stage.ENDED, True
        item.heard, item.reason = state & 7, state >> 3
        return item

    def settled_state(self) -> int | None:
        """What is left to know when all of the first attempt has been counted; None: something may come yet."""
        if self.attempt != 1 or self.stage != Stage.ENDED:
            return None
        is_whole = self.is_settled or all(spent.is_whole() for spent in self.spent)
        return self.heard | self.reason << 3 if is_whole else None

    def of_attempt(self, attempt: int) -> Spent:
        for spent in self.spent:
            if spent.attempt == attempt:
                return spent
        spent = Spent(attempt)
        self.spent = (*self.spent, spent)
        return spent

    def is_first(self, key: Hashable) -> bool:
        """Whether this is heard of for the first time; by a hash of 64 bits."""
        mark = hash(key) & _HASH_MASK
        if mark in self.marks:
            return False
        if isinstance(self.marks, set):
            self.marks.add(mark)
        elif len(self.marks) < _MAX_LISTED:
            self.marks.append(mark)
        else:
            self.marks = {*self.marks, mark}
        return True

    def hears_first(self, what: Heard) -> bool:
        """The same for what is counted once an item."""
        is_first = not self.heard & what
        self.heard |= what
        return is_first
