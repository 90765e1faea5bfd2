"""The time limit of a search. When it is reached, the search returns a result that is marked as partial."""

from __future__ import annotations

import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from guest.request_context import Watch

SEARCH_S = 20.0
_SHARE_OF_LIMIT = 0.9
_SHARE_TO_FIND = 0.8


class Clock:
    """Time limit of one search.

    It is a little shorter than the time limit of the request, which would end the search without any result.
    """

    def __init__(self, watch: Watch, timeout_s: float) -> None:
        self._watch = watch
        self._total_s = min(SEARCH_S, _SHARE_OF_LIMIT * timeout_s)
        self._started_at = time.monotonic()

    @property
    def is_over(self) -> bool:
        """Return whether the search must stop. Raises RequestFailure if the call is cancelled."""
        self._watch.check()
        return time.monotonic() >= self._started_at + self._total_s

    @property
    def is_too_late_to_find(self) -> bool:
        """Return whether the search for files must stop, because the remaining time is needed to report the matches so
        far.

        Raises RequestFailure if the call is cancelled.
        """
        self._watch.check()
        return time.monotonic() >= self._started_at + _SHARE_TO_FIND * self._total_s

    @property
    def seconds(self) -> float:
        return self._total_s
