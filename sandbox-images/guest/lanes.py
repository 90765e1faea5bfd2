"""Calls that may not run beside each other: of one lane the first to come runs, the others wait in the order of their arrival."""

from __future__ import annotations

from collections import deque

TYPE_CHECKING = False
if TYPE_CHECKING:
    from guest.calls import Call


class Lanes:
    """Who runs in each lane, and who waits. A call without a lane never waits."""

    __slots__ = ("_running", "_waiting")

    def __init__(self) -> None:
        self._running: dict[str, Call] = {}
        self._waiting: dict[str, deque[Call]] = {}

    @property
    def waiting(self) -> list[Call]:
        return [call for queue in self._waiting.values() for call in queue]

    def enter(self, call: Call) -> bool:
        """Whether the call may run now. Otherwise it waits, until `leave` of another gives it."""
        lane = call.lane
        if lane is None:
            return True
        if self._running.setdefault(lane, call) is call:
            return True
        self._waiting.setdefault(lane, deque()).append(call)
        return False

    def leave(self, call: Call) -> Call | None:
        """The call has its answer, whether it ran or still waited; gives the one that may run now in its place."""
        lane = call.lane
        if lane is None:
            return None
        queue = self._waiting.get(lane)
        if self._running.get(lane) is not call:
            if queue is not None and call in queue:
                queue.remove(call)
            return None
        del self._running[lane]
        if not queue:
            self._waiting.pop(lane, None)
            return None
        following = queue.popleft()
        self._running[lane] = following
        return following
