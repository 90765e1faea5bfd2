"""Holds runs back for what is no fault of theirs: a model that answers nobody, a tenant's quota that is used up.
Waiting costs an item no attempt.
"""

import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Literal

from contract.errors import (
    ContextWindowExceeded,
    ErrorCode,
    ModelDenied,
    ModelInterrupted,
    ModelRefused,
    ModelUnavailable,
    ToolFailure,
)
from orchestrator.dialects.model import Chunk, Model, ModelRequest

PAUSES_S = (2.0, 5.0, 10.0, 20.0, 30.0)
"""Between one run that finds out whether the model is back and the next; the last one again and again."""
MAX_HOLDS = 20
"""So often a run is held while nobody gets an answer: beyond, it may be its own request that the model fails at."""
MAX_LONE_HOLDS = 2
"""The same while others do get answers."""
ROOM_AGAIN_S = 2.0
"""After a quota was reached, so long until one run more is begun."""

MAX_UNKNOWN = 1000
"""Names of models that the endpoint does not know, beyond which it is asked for them again."""

_QUOTA_CODES = frozenset({ErrorCode.QUOTA_EXCEEDED, ErrorCode.RATE_LIMITED})


class NotNow(Exception):
    """A run cannot go on at present, through no fault of its own: it keeps its log and its session, and is gone on with
    later. `cause`: the model answers nobody; it does not answer this run; the tenant has what it may have."""

    def __init__(self, reason: str, cause: Literal["endpoint", "request", "quota"]) -> None:
        super().__init__(reason)
        self.cause = cause


class EndpointAway(ModelUnavailable):
    """The model does not answer a run, or nobody of this process."""

    def __init__(self, reason: str, *, is_lone: bool) -> None:
        super().__init__(reason)
        self.is_lone = is_lone


_NEVER_HELD = (ContextWindowExceeded, EndpointAway, ModelDenied, ModelInterrupted, ModelRefused)


class Brake:
    """One process's. Its runs are taken to ask one endpoint: while that answers any of them, it is there, and a request
    that fails is a run's own trouble.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._answered_at = -math.inf
        self._away_since: float | None = None
        self._look_at = 0.0
        self._looks = 0
        self._holds: Counter[str] = Counter()
        self._lone_holds: Counter[str] = Counter()
        self._most: int | None = None
        self._more_at = 0.0
        self._unknown: dict[str, str] = {}

    def now(self) -> float:
        """By its clock."""
        return self._clock()

    @property
    def away_s(self) -> float | None:
        """How long the model has answered nobody; None: it answers, or has not been asked."""
        return None if self._away_since is None else self._clock() - self._away_since

    @contextmanager
    def asking(self, run: str) -> Iterator[None]:
        """Around a request of a run. Raises EndpointAway for what ended it, as long as the run may be held for that."""
        asked_at = self._clock()
        try:
            yield
        except ModelUnavailable as error:
            if isinstance(error, _NEVER_HELD):
                raise
            is_lone = self.has_heard_since(asked_at)
            holds, most = (self._lone_holds, MAX_LONE_HOLDS) if is_lone else (self._holds, MAX_HOLDS)
            holds[run] += 1
            if holds[run] > most:
                del holds[run]
                raise
            raise EndpointAway(str(error), is_lone=is_lone) from error

    def has_heard_since(self, asked_at: float) -> bool:
        """Whether the model has said something to anybody; where it has not, nothing is begun until it does."""
        if self._answered_at < asked_at and self._away_since is None:
            self._away_since, self._looks, self._look_at = asked_at, 0, self._clock() + PAUSES_S[0]
        return self._answered_at >= asked_at

    def note_answer(self, run: str) -> None:
        """A reply has begun to come."""
        self._answered_at = self._clock()
        self._away_since = None
        self._holds.clear()
        self._lone_holds.pop(run, None)

    def check_model(self, own_model: str | None) -> None:
        """Raises ModelDenied for a line's model that the endpoint has said not to know: nothing is set up for it."""
        if own_model in self._unknown:
            raise ModelDenied(self._unknown[own_model], is_unknown_model=True)

    def note_quota(self, running: int) -> None:
        """One run more than these was too many."""
        self._most, self._more_at = max(0, running), self._clock() + ROOM_AGAIN_S

    def room(self, free: int, running: int) -> int:
        """How many of `free` runs may be begun beside those that are running. Each answer above 0 is taken for
        begun.
        """
        return min(self._room_of_quota(free, running), self._room_of_endpoint(free))

    def _room_of_quota(self, free: int, running: int) -> int:
        if self._most is None:
            return free
        if self._clock() >= self._more_at:
            self._most, self._more_at = self._most + 1, self._clock() + ROOM_AGAIN_S
        if self._most >= running + free:
            self._most = None
            return free
        return max(0, self._most - running)

    def _room_of_endpoint(self, free: int) -> int:
        """One run finds out for all of them."""
        if self._away_since is None:
            return free
        if free < 1 or self._clock() < self._look_at:
            return 0
        self._looks += 1
        self._look_at = self._clock() + PAUSES_S[min(self._looks, len(PAUSES_S) - 1)]
        return 1

    def judge(self, error: Exception, own_model: str | None) -> NotNow | ModelDenied | None:
        """What ended a run's work, where that is no end of the run: it waits, or no run of this process can go on.
        None: it is the run's own end. `own_model`: the one that its line names."""
        match error:
            case EndpointAway():
                return NotNow(str(error), "request" if error.is_lone else "endpoint")
            case ToolFailure() if error.code in _QUOTA_CODES:
                return NotNow(error.message, "quota")
            case ModelDenied() if error.is_unknown_model and own_model is not None:
                if len(self._unknown) >= MAX_UNKNOWN:
                    self._unknown.clear()
                self._unknown[own_model] = str(error)
                return None
            case ModelDenied():
                return error
            case _:
                return None


class HeldModel:
    """A model as the runs of one process ask it, which learn from each other's requests whether it is there."""

    def __init__(self, model: Model, brake: Brake, run: str) -> None:
        self._model, self._brake, self._run = model, brake, run
        self._asked_at: float | None = None

    @property
    def name(self) -> str:
        return self._model.name

    async def stream(self, request: ModelRequest) -> AsyncIterator[Chunk]:
        """Raises as the model does, and EndpointAway."""
        self._asked_at = self._brake.now()
        with self._brake.asking(self._run):
            async for chunk in self._model.stream(request):
                if self._asked_at is not None:
                    self._brake.note_answer(self._run)
                    self._asked_at = None
                yield chunk

    def check_heard(self) -> None:
        """Raises ModelUnavailable for a run whose time was up while a model that answers nobody did not answer it,
        either.
        """
        if self._asked_at is not None and not self._brake.has_heard_since(self._asked_at):
            raise ModelUnavailable(
                "the model had not begun to answer when the run's time was up (max_wall_s): check that it is up, or "
                "allow more time"
            )

    async def aclose(self) -> None:
        """The model is its opener's to close."""
