"""Makes runs wait while a model endpoint does not answer or a tenant's quota is used up. Waiting does not count as an
attempt of the item.

While an endpoint answers any run of this process, the endpoint counts as up, and a failed request counts as a problem
of its run. While the endpoint answers no run, one run at a time tries it. If it is the endpoint that the environment
variables set, which most runs use, no other run starts during this time. If it is a configured endpoint, the other runs
that use it return to the queue.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Literal

from toolcrew.contract.errors import (
    ContextWindowExceeded,
    ErrorCode,
    ModelDenied,
    ModelInterrupted,
    ModelRefused,
    ModelUnavailable,
    ToolFailure,
)

PAUSES_S = (2.0, 5.0, 10.0, 20.0, 30.0)
"""Pauses between the runs that try an endpoint that is down, in seconds. The last pause repeats."""
MAX_DEFERRALS = 20
"""Number of times that one run may be deferred while the endpoint answers no run. After that, the run's own request
may be the cause.
"""
MAX_LONE_DEFERRALS = 2
"""Number of times that one run may be deferred while the endpoint answers other runs."""
QUOTA_RETRY_S = 2.0
"""After a quota was reached, one more run may start after each period of this length, in seconds."""
MAX_UNKNOWN = 1000
"""Maximum number of cached names of models that the endpoint does not know. At the limit the cache is cleared, and the
names are tried again.
"""

QUOTA_CODES = frozenset({ErrorCode.QUOTA_EXCEEDED, ErrorCode.RATE_LIMITED})


class RunDeferred(Exception):
    """Signal that a run has to wait. The run keeps its log and its session, and continues later.

    `cause`: "endpoint": the endpoint answers no run. "request": the endpoint does not answer this run's request.
    "quota": the tenant's quota is used up. `after_s`: seconds until the run may try a configured endpoint again.
    """

    def __init__(self, reason: str, cause: Literal["endpoint", "request", "quota"], after_s: float = 0.0) -> None:
        super().__init__(reason)
        self.cause = cause
        self.after_s = after_s


class EndpointDown(ModelUnavailable):
    """The endpoint did not answer a request, and the run of the request may wait. `is_lone`: the endpoint answered
    other runs. `after_s`: seconds until the run may try a configured endpoint again.
    """

    def __init__(self, reason: str, *, is_lone: bool, after_s: float = 0.0) -> None:
        super().__init__(reason)
        self.is_lone = is_lone
        self.after_s = after_s


_NEVER_DEFERRED = (ContextWindowExceeded, EndpointDown, ModelDenied, ModelInterrupted, ModelRefused)


class EndpointGate:
    """Decides which failures of one model endpoint make a run wait. `is_configured`: the endpoint is a configured
    endpoint, not the one that the environment variables set.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, *, is_configured: bool = False) -> None:
        self._clock = clock
        self._is_configured = is_configured
        self._answered_at = -math.inf
        self._down_since: float | None = None
        self._try_at = 0.0
        self._tries = 0
        self._deferrals: Counter[str] = Counter()
        self._lone_deferrals: Counter[str] = Counter()

    def now(self) -> float:
        """Return the current time of the gate's monotonic clock, in seconds."""
        return self._clock()

    @property
    def down_s(self) -> float | None:
        """Return for how many seconds the endpoint has answered no run. None: the endpoint answers, or no run has
        asked it yet.
        """
        return None if self._down_since is None else self._clock() - self._down_since

    @contextmanager
    def request(self, run: str) -> Iterator[None]:
        """Context manager around a request of a run. Raises EndpointDown: the request failed and the run may wait."""
        requested_at = self._clock()
        try:
            yield
        except ModelUnavailable as error:
            if isinstance(error, _NEVER_DEFERRED):
                raise
            is_lone = self.has_answered_since(requested_at)
            deferrals, limit = (
                (self._lone_deferrals, MAX_LONE_DEFERRALS) if is_lone else (self._deferrals, MAX_DEFERRALS)
            )
            deferrals[run] += 1
            if deferrals[run] > limit:
                del deferrals[run]
                raise
            after_s = max(0.0, self._try_at - self._clock()) if self._is_configured and not is_lone else 0.0
            raise EndpointDown(str(error), is_lone=is_lone, after_s=after_s) from error

    def has_answered_since(self, requested_at: float) -> bool:
        """Return whether the endpoint has answered any run since that time. If not, the endpoint counts as down until
        it answers.
        """
        if self._answered_at < requested_at and self._down_since is None:
            self._down_since, self._tries, self._try_at = requested_at, 0, self._clock() + PAUSES_S[0]
        return self._answered_at >= requested_at

    def record_answer(self, run: str) -> None:
        """Note that a reply has started to arrive."""
        self._answered_at = self._clock()
        self._down_since = None
        self._deferrals.clear()
        self._lone_deferrals.pop(run, None)

    def admit_try(self) -> bool:
        """Return whether one more run may try the endpoint. If the endpoint is down, the result True is counted as a
        try, so the caller must then try.
        """
        if self._down_since is None:
            return True
        if self._clock() < self._try_at:
            return False
        self._tries += 1
        self._try_at = self._clock() + PAUSES_S[min(self._tries, len(PAUSES_S) - 1)]
        return True

    def hold(self) -> None:
        """Raise RunDeferred if this is the gate of a configured endpoint that is down, and this run may not try the
        endpoint now.
        """
        if self._is_configured and not self.admit_try():
            raise RunDeferred("the model endpoint does not answer", "endpoint", self._try_at - self._clock())


class RunGate(EndpointGate):
    """Decides how many runs of this process may start now, and which failures make a run wait. It is also the
    EndpointGate of the endpoint that the environment variables set.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(clock)
        self._configured: dict[str, EndpointGate] = {}
        self._quota_limit: int | None = None
        self._raise_limit_at = 0.0
        self._unknown: dict[str, str] = {}

    def of(self, endpoint: str | None) -> EndpointGate:
        """Return the gate of a configured endpoint by its id. None: return the gate of the endpoint that the
        environment variables set.
        """
        if endpoint is None:
            return self
        return self._configured.setdefault(endpoint, EndpointGate(self._clock, is_configured=True))

    @property
    def is_down(self) -> bool:
        """Return whether any endpoint that runs of this process use is down."""
        return any(gate.down_s is not None for gate in (self, *self._configured.values()))

    def check_model(self, own_model: str | None) -> None:
        """Raise ModelDenied if the endpoint does not know the model that the item's line names. Called before the
        item's setup.
        """
        if own_model in self._unknown:
            raise ModelDenied(self._unknown[own_model], is_unknown_model=True)

    def record_quota_limit(self, running: int) -> None:
        """Record that one more run than `running` runs exceeded the quota."""
        self._quota_limit, self._raise_limit_at = max(0, running), self._clock() + QUOTA_RETRY_S

    def admit(self, free: int, running: int) -> int:
        """Return how many of `free` runs may start in addition to the running ones. The caller must start that number
        of runs, because the gate counts them as started.
        """
        return min(self._admit_by_quota(free, running), self._admit_by_endpoint(free))

    def _admit_by_quota(self, free: int, running: int) -> int:
        """Return how many runs may start without exceeding the quota."""
        if self._quota_limit is None:
            return free
        if self._clock() >= self._raise_limit_at:
            # No event reports that the quota has room again, so the limit rises by one run at a time.
            self._quota_limit, self._raise_limit_at = self._quota_limit + 1, self._clock() + QUOTA_RETRY_S
        if self._quota_limit >= running + free:
            self._quota_limit = None
            return free
        return max(0, self._quota_limit - running)

    def _admit_by_endpoint(self, free: int) -> int:
        """Return how many runs may start: all while the endpoint answers, else one run after each pause."""
        if self._down_since is None:
            return free
        return 1 if free > 0 and self.admit_try() else 0

    def classify(self, error: Exception, own_model: str | None) -> RunDeferred | ModelDenied | None:
        """Return the effect of an error on the run. `own_model`: the model that the run's line names.

        RunDeferred: the run waits. ModelDenied: every run of this process stops. None: the error ends this run.
        """
        match error:
            case RunDeferred():
                return error
            case EndpointDown():
                return RunDeferred(str(error), "request" if error.is_lone else "endpoint", error.after_s)
            case ToolFailure() if error.code in QUOTA_CODES:
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


class GatedRun:
    """Reports the requests of one run to the gate of its endpoint."""

    def __init__(self, gate: EndpointGate, run: str) -> None:
        self._gate = gate
        self._run = run
        self._requested_at: float | None = None

    @contextmanager
    def request(self) -> Iterator[None]:
        """Context manager around a request. Raises EndpointDown: the request failed and the run may wait."""
        self._requested_at = self._gate.now()
        with self._gate.request(self._run):
            yield

    def prepare(self) -> AbstractContextManager[None]:
        """Return a context manager around the requests before the first one of the run, with the same errors."""
        return self._gate.request(self._run)

    def record_answer(self) -> None:
        """Note that a part of the reply has arrived."""
        if self._requested_at is not None:
            self._gate.record_answer(self._run)
            self._requested_at = None

    def check_answered(self) -> None:
        """Raise ModelUnavailable if the endpoint has answered neither this run nor other runs since the run's last
        request.

        Called for a run that has reached its time limit.
        """
        if self._requested_at is not None and not self._gate.has_answered_since(self._requested_at):
            raise ModelUnavailable(
                "the model had not begun to answer when the run reached its time limit (max_wall_s): check that the "
                "model server runs, or raise the limit"
            )


class UngatedRun:
    """Replacement of GatedRun for a run that never waits: each failed request raises its own error."""

    def request(self) -> AbstractContextManager[None]:
        return nullcontext()

    prepare = request

    def record_answer(self) -> None:
        """Do nothing."""
