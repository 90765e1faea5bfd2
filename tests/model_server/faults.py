"""Choose the faults of a request: by probability, by count, or for a period."""

import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tests.model_server.asked import Asked
from tests.model_server.draws import draw, draw_span
from tests.model_server.script import Cut, Delay, FaultLine, NoEnd, Script, Shape, Status, When


def goes_for(when: When, asked: Asked) -> bool:
    """Return whether a line applies to this request."""
    if when.conversations is not None and asked.conversation not in when.conversations:
        return False
    if when.steps is not None and asked.step not in when.steps:
        return False
    if when.user is not None and re.search(when.user, asked.user) is None:
        return False
    return when.observation is None or (
        asked.observation is not None and re.search(when.observation, asked.observation) is not None
    )


@dataclass(frozen=True)
class Hit:
    """The faults of one request. `first_byte_s`, `chunk_s`: added to the reply's own delays, in seconds."""

    fault: Status | Cut | NoEnd | Shape | None = None
    first_byte_s: float = 0.0
    chunk_s: float = 0.0
    kinds: Sequence[str] = ()


NOTHING = Hit()


class Faults:
    """The faults of a script, and how often each fault was played."""

    def __init__(self, script: Script, now: Callable[[], float] = time.monotonic) -> None:
        self._lines = script.faults
        self._seed = script.server.seed
        self._now = now
        self._began: float | None = None
        self._played: Counter[tuple[int, str]] = Counter()

    def reset(self) -> None:
        self._played.clear()
        self._began = None

    def choose(self, asked: Asked, attempt: int) -> Hit:
        """Return the faults of a request. `attempt`: the number of requests for this step of the conversation,
        including this request.
        """
        if not self._lines:
            return NOTHING
        if self._began is None:
            self._began = self._now()
        fault: Status | Cut | NoEnd | Shape | None = None
        first_byte_s = chunk_s = 0.0
        kinds: list[str] = []
        for number, line in enumerate(self._lines):
            is_delay = isinstance(line.fault, Delay)
            if (
                (fault is not None and not is_delay)
                or not goes_for(line.when, asked)
                or not self._strikes(number, line, asked, attempt)
            ):
                continue
            kinds.append(line.fault.kind)
            if isinstance(line.fault, Delay):
                about = (f"delay{number}", asked.conversation, asked.step, attempt)
                first_byte_s += draw_span(line.fault.first_byte_s, self._seed, *about)
                chunk_s += draw_span(line.fault.chunk_s, self._seed, *about, "chunk")
            else:
                fault = line.fault
        return Hit(fault, first_byte_s, chunk_s, kinds) if kinds else NOTHING

    def _strikes(self, number: int, line: FaultLine, asked: Asked, attempt: int) -> bool:
        if line.probability is not None:
            return draw(self._seed, f"fault{number}", asked.conversation, asked.step, attempt) < line.probability
        if line.during_s is not None:
            since = self._now() - (self._began or 0.0)
            return line.during_s[0] <= since < line.during_s[1]
        if line.first is None:
            return True
        whose = {"conversation": asked.conversation, "step": f"{asked.conversation}\0{asked.step}", "server": ""}[
            line.per
        ]
        if self._played[number, whose] >= line.first:
            return False
        self._played[number, whose] += 1
        return True
