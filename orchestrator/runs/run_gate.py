"""Makes runs wait while the model endpoint does not answer or a tenant's quota is used up. Waiting costs an item no
attempt.

All runs of a process ask one endpoint. While it answers any of them, it is up, and a request that fails is a problem of
its run. While it answers none, one run at a time tries it and the others are not started.
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
"""Pauses between the runs that try an endpoint which is down. The last one repeats."""
MAX_DEFERRALS = 20
"""Deferrals of one run while the endpoint answers no run. Beyond, its own request may be what the model fails at."""
MAX_LONE_DEFERRALS = 2
"""Deferrals of one run while the endpoint answers others."""
QUOTA_RETRY_S = 2.0
"""After a quota was reached, one more run may start each time this has passed."""
MAX_UNKNOWN = 1000
"""Remembered names of models that the endpoint does not know. Beyond, all are forgotten and asked for again."""

_QUOTA_CODES = frozenset({ErrorCode.QUOTA_EXCEEDED, ErrorCode.RATE_LIMITED})


class RunDeferred(Exception):
    """A run has to wait. It keeps its log and its session, and continues later. `cause`: the endpoint answers no run;
    it does not answer this run's request; the tenant's quota is used up.
    """

    def __init__(self, reason: str, cause: Literal["endpoint", "request", "quota"]) -> None:
        super().__init__(reason)
        self.cause = cause


class EndpointDown(ModelUnavailable):
    """The endpoint did not answer a request, and its run may wait. `is_lone`: it answered other runs."""

    def __init__(self, reason: str, *, is_lone: bool) -> None:
        super().__init__(reason)
        self.is_lone = is_lone


_NEVER_DEFERRED = (ContextWindowExceeded, EndpointDown, ModelDenied, ModelInterrupted, ModelRefused)


class RunGate:
    """Decides how many runs of this process may start now, and which failures make a run wait."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._answered_at = -math.inf
        self._down_since: float | None = None
        self._try_at = 0.0
        self._tries = 0
        self._deferrals: Counter[str] = Counter()
        self._lone_deferrals: Counter[str] = Counter()
        self._quota_limit: int | None = None
        self._raise_limit_at = 0.0
        self._unknown: dict[str, str] = {}

    def now(self) -> float:
        """Return the time of the gate's clock, in seconds."""
        return self._clock()

    @property
    def down_s(self) -> float | None:
        """Return how long the endpoint has answered no run; None: it answers, or was never asked."""
        return None if self._down_since is None else self._clock() - self._down_since

    @contextmanager
    def request(self, run: str) -> Iterator[None]:
        """Wrap a request of a run. Raises EndpointDown for a failure after which the run may wait."""
        asked_at = self._clock()
        try:
            yield
        except ModelUnavailable as error:
            if isinstance(error, _NEVER_DEFERRED):
                raise
            is_lone = self.has_answered_since(asked_at)
            deferrals, limit = (
                (self._lone_deferrals, MAX_LONE_DEFERRALS) if is_lone else (self._deferrals, MAX_DEFERRALS)
            )
            deferrals[run] += 1
            if deferrals[run] > limit:
                del deferrals[run]
                raise
            raise EndpointDown(str(error), is_lone=is_lone) from error

    def has_answered_since(self, asked_at: float) -> bool:
        """Return whether the endpoint has answered any run since then. If not, it counts as down until it answers."""
        if self._answered_at < asked_at and self._down_since is None:
            self._down_since, self._tries, self._try_at = asked_at, 0, self._clock() + PAUSES_S[0]
        return self._answered_at >= asked_at

    def note_answer(self, run: str) -> None:
        """Note that a reply has begun to arrive."""
        self._answered_at = self._clock()
        self._down_since = None
        self._deferrals.clear()
        self._lone_deferrals.pop(run, None)

    def check_model(self, own_model: str | None) -> None:
        """Raise ModelDenied for a line's model that the endpoint does not know, before anything is set up for it."""
        if own_model in self._unknown:
            raise ModelDenied(self._unknown[own_model], is_unknown_model=True)

    def note_quota(self, running: int) -> None:
        """Note that one run more than these exceeded the quota."""
        self._quota_limit, self._raise_limit_at = max(0, running), self._clock() + QUOTA_RETRY_S

    def admit(self, free: int, running: int) -> int:
        """Return how many of `free` runs may start next to the running ones. A result above 0 counts as started."""
        return min(self._admit_by_quota(free, running), self._admit_by_endpoint(free))

    def _admit_by_quota(self, free: int, running: int) -> int:
        if self._quota_limit is None:
            return free
        if self._clock() >= self._raise_limit_at:
            self._quota_limit, self._raise_limit_at = self._quota_limit + 1, self._clock() + QUOTA_RETRY_S
        if self._quota_limit >= running + free:
            self._quota_limit = None
            return free
        return max(0, self._quota_limit - running)

    def _admit_by_endpoint(self, free: int) -> int:
        if self._down_since is None:
            return free
        if free < 1 or self._clock() < self._try_at:
            return 0
        self._tries += 1
        self._try_at = self._clock() + PAUSES_S[min(self._tries, len(PAUSES_S) - 1)]
        return 1

    def classify(self, error: Exception, own_model: str | None) -> RunDeferred | ModelDenied | None:
        """Return RunDeferred for an error after which the run waits, ModelDenied for one that stops every run of this
        process, None for one that ends the run. `own_model`: the one that its line names.
        """
        match error:
            case EndpointDown():
                return RunDeferred(str(error), "request" if error.is_lone else "endpoint")
            case ToolFailure() if error.code in _QUOTA_CODES:
                return RunDeferred(error.message, "quota")
            case ModelDenied() if error.is_unknown_model and own_model is not None:
                if len(self._unknown) >= MAX_UNKNOWN:
                    self._unknown.clear()
                self._unknown[own_model] = str(error)
                return None
            case ModelDenied():
                return error
            case _:
                return None


class GatedModel:
    """A model of one run that reports to the gate whether the endpoint answers."""

    def __init__(self, model: Model, gate: RunGate, run: str) -> None:
        self._model, self._gate, self._run = model, gate, run
        self._asked_at: float | None = None

    @property
    def name(self) -> str:
        return self._model.name

    async def stream(self, request: ModelRequest) -> AsyncIterator[Chunk]:
        """Yield the chunks of the reply. Raises as the model does, and EndpointDown."""
        self._asked_at = self._gate.now()
        with self._gate.request(self._run):
            async for chunk in self._model.stream(request):
                if self._asked_at is not None:
                    self._gate.note_answer(self._run)
                    self._asked_at = None
                yield chunk

    def check_answered(self) -> None:
        """Raise ModelUnavailable for a run whose time was up while the endpoint answered neither it nor other runs."""
        if self._asked_at is not None and not self._gate.has_answered_since(self._asked_at):
            raise ModelUnavailable(
                "the model had not begun to answer when the run's time was up (max_wall_s): check that it is up, or "
                "allow more time"
            )

    async def aclose(self) -> None:
        """Do nothing: the opener closes the model."""
