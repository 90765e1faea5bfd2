"""Whether the engine is to be asked at all: after it has stayed silent a few times in a row, for a growing while not."""

import time
from collections.abc import Callable
from enum import Enum
from typing import Final

THRESHOLD: Final = 3
FIRST_PAUSE_S: Final = 1.0
LONGEST_PAUSE_S: Final = 30.0


class Admission(Enum):
    """What a caller may do. `PROBE`: ask whether the engine is back, and report it; one caller at a time is told so."""

    GO = "go"
    PROBE = "probe"
    REFUSE = "refuse"


class Breaker:
    """Closed: calls go through. Open: none but a probe when the pause is over; each probe that fails doubles the pause.

    Pure: no waiting, no I/O; `clock` gives seconds.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        *,
        threshold: int = THRESHOLD,
        first_pause_s: float = FIRST_PAUSE_S,
        longest_pause_s: float = LONGEST_PAUSE_S,
    ) -> None:
        self._clock = clock
        self._threshold = threshold
        self._first_pause_s = first_pause_s
        self._longest_pause_s = longest_pause_s
        self._pause_s = first_pause_s
        self._next_try_at = 0.0
        self._is_probing = False
        self._silent_since = 0.0
        self.is_open = False
        self.failures = 0
        """Calls in a row that got no answer."""
        self.last_error = ""

    @property
    def silent_s(self) -> float:
        """How long the engine has been silent; 0 when its last call was answered."""
        return self._clock() - self._silent_since if self.failures else 0.0

    @property
    def next_try_s(self) -> float:
        """Seconds until a probe is let through; 0 when it would be now, or is under way."""
        return max(0.0, self._next_try_at - self._clock()) if self.is_open else 0.0

    def admit(self) -> Admission:
        """What a caller may do now. After `PROBE` one of `probe_failed`, `probe_answered` and `probe_dropped` must follow."""
        if not self.is_open:
            return Admission.GO
        if self._is_probing or self.next_try_s > 0:
            return Admission.REFUSE
        self._is_probing = True
        return Admission.PROBE

    def failed(self, error: str) -> bool:
        """A call got no answer. True when this opened the breaker. Calls that were under way when it opened add nothing to its pause."""
        self._count(error)
        if self.is_open or self.failures < self._threshold:
            return False
        self.is_open = True
        self._next_try_at = self._clock() + self._pause_s
        return True

    def answered(self) -> bool:
        """A call was answered, be it by a refusal. True when this closed the breaker."""
        was_open = self.is_open
        self.is_open = self._is_probing = False
        self.failures = 0
        self._pause_s = self._first_pause_s
        return was_open

    def probe_failed(self, error: str) -> None:
        """The engine is still silent."""
        self._count(error)
        self._is_probing = False
        self._lengthen_pause()
        self._next_try_at = self._clock() + self._pause_s

    def probe_answered(self) -> bool:
        """The engine answers again; a call that gets no answer opens the breaker at once, for longer. True when this closed it.

        An engine can answer a probe and nothing else: only a call's answer makes the pause short again.
        """
        if not self.is_open:
            return False
        self.is_open = self._is_probing = False
        self.failures = self._threshold - 1
        self._lengthen_pause()
        return True

    def probe_dropped(self) -> None:
        """Whoever was to probe has left: the next caller probes."""
        self._is_probing = False

    def _count(self, error: str) -> None:
        if self.failures == 0:
            self._silent_since = self._clock()
        self.failures += 1
        self.last_error = error

    def _lengthen_pause(self) -> None:
        self._pause_s = min(2 * self._pause_s, self._longest_pause_s)
