"""Choose the faults of a request: by probability, by count, or for a period."""

import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tests.model_server.chat_request import ChatRequest
from tests.model_server.draws import draw, draw_span
from tests.model_server.script import Cut, Delay, FaultLine, NoEnd, Script, Shape, Status, When


def goes_for(when: When, chat: ChatRequest) -> bool:
    """Return whether a line applies to this request."""
    if when.conversations is not None and chat.conversation not in when.conversations:
        return False
    if when.steps is not None and chat.step not in when.steps:
        return False
    if when.user is not None and re.search(when.user, chat.user) is None:
        return False
    return when.observation is None or (
        chat.observation is not None and re.search(when.observation, chat.observation) is not None
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

    def choose(self, chat: ChatRequest, attempt: int) -> Hit:
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
                or not goes_for(line.when, chat)
                or not self._strikes(number, line, chat, attempt)
            ):
                continue
            kinds.append(line.fault.kind)
            if isinstance(line.fault, Delay):
                about = (f"delay{number}", chat.conversation, chat.step, attempt)
                first_byte_s += draw_span(line.fault.first_byte_s, self._seed, *about)
                chunk_s += draw_span(line.fault.chunk_s, self._seed, *about, "chunk")
            else:
                fault = line.fault
        return Hit(fault, first_byte_s, chunk_s, kinds) if kinds else NOTHING

    def _strikes(self, number: int, line: FaultLine, chat: ChatRequest, attempt: int) -> bool:
        if line.probability is not None:
            return draw(self._seed, f"fault{number}", chat.conversation, chat.step, attempt) < line.probability
        if line.during_s is not None:
            since = self._now() - (self._began or 0.0)
            return line.during_s[0] <= since < line.during_s[1]
        if line.first is None:
            return True
        whose = {"conversation": chat.conversation, "step": f"{chat.conversation}\0{chat.step}", "server": ""}[line.per]
        if self._played[number, whose] >= line.first:
            return False
        self._played[number, whose] += 1
        return True
