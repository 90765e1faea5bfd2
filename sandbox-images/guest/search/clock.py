"""How long a search may take: when the time is up, what was found until then is given, and said to be a part."""

from __future__ import annotations

import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from guest.supervisors import Watch

SEARCH_S = 20.0
ENTRIES_A_CHECK = 512
"""Of one folder, so many entries may be looked at between two questions."""
_SHARE_OF_LIMIT = 0.9
_SHARE_TO_FIND = 0.8


class Clock:
    """Asked between two pieces of work. The request's own limit ends it with nothing, so the search stops a little
    before.
    """

    def __init__(self, watch: Watch, timeout_s: float) -> None:
        self._watch = watch
        self._total_s = min(SEARCH_S, _SHARE_OF_LIMIT * timeout_s)
        self._started_at = time.monotonic()

    @property
    def is_over(self) -> bool:
        """Whether the search must stop. Raises Failure when the call is cancelled."""
        self._watch.check()
        return time.monotonic() >= self._started_at + self._total_s

    @property
    def is_too_late_to_find(self) -> bool:
        """Whether what is left is needed to tell of what was found. Raises Failure when the call is cancelled."""
        self._watch.check()
        return time.monotonic() >= self._started_at + _SHARE_TO_FIND * self._total_s

    @property
    def seconds(self) -> float:
        return self._total_s
