"""The gate for every call to the container engine. The gate limits the number and the duration of calls, and refuses
calls while the engine does not answer.

Invariant: the number of threads stays limited, even if the engine hangs. A blocked thread cannot be stopped. So a
call that exceeds its deadline gets an error, but keeps its slot until its thread ends. After a few calls without an
answer the breaker opens, and callers fail at once instead of waiting.
"""

import asyncio
import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum
from typing import Any, Final, Generic, TypeVar

import structlog

from toolcrew.concurrency.tasks import in_thread
from toolcrew.contract.errors import SandboxUnavailable

log = structlog.get_logger(__name__)

THRESHOLD: Final = 3
FIRST_PAUSE_S: Final = 1.0
LONGEST_PAUSE_S: Final = 30.0
T = TypeVar("T")


class BreakerDecision(Enum):
    """The breaker's decision for a caller. `PROBE`: the caller must first check whether the engine answers, and report
    the result. Only one caller at a time gets `PROBE`.
    """

    GO = "go"
    PROBE = "probe"
    REFUSE = "refuse"


class Breaker:
    """A circuit breaker. Closed: calls pass. Open: only a probe passes when the pause is over, and each failed probe
    doubles the pause.

    The class does no I/O and never waits. `clock` returns seconds.
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
        """Number of consecutive calls without an answer."""
        self.last_error = ""

    @property
    def silent_s(self) -> float:
        """Seconds since the engine stopped answering; 0 when its last call was answered."""
        return self._clock() - self._silent_since if self.failures else 0.0

    @property
    def next_try_s(self) -> float:
        """Seconds until the next probe; 0 when a probe may run now or is running."""
        return max(0.0, self._next_try_at - self._clock()) if self.is_open else 0.0

    def admit(self) -> BreakerDecision:
        """Decide about a call. After `PROBE` the caller must call `record_probe_failure`, `record_probe_answer` or
        `drop_probe`.
        """
        if not self.is_open:
            return BreakerDecision.GO
        if self._is_probing or self.next_try_s > 0:
            return BreakerDecision.REFUSE
        self._is_probing = True
        return BreakerDecision.PROBE

    def record_failure(self, error: str) -> bool:
        """Record a call without an answer. Return whether this opened the breaker. A call that began before the breaker
        opened does not lengthen the pause.
        """
        self._count(error)
        if self.is_open or self.failures < self._threshold:
            return False
        self.is_open = True
        self._next_try_at = self._clock() + self._pause_s
        return True

    def record_answer(self) -> bool:
        """Record an answer of the engine, even a refusal. Return whether this closed the breaker."""
        was_open = self.is_open
        self.is_open = self._is_probing = False
        self.failures = 0
        self._pause_s = self._first_pause_s
        return was_open

    def record_probe_failure(self, error: str) -> None:
        """Record that the engine did not answer the probe."""
        self._count(error)
        self._is_probing = False
        self._lengthen_pause()
        self._next_try_at = self._clock() + self._pause_s

    def record_probe_answer(self) -> bool:
        """Record that the engine answered the probe. Return whether this closed the breaker. The next call without an
        answer opens the breaker at once, with a longer pause.

        Only an answer to a call resets the pause, because an engine may answer probes and nothing else.
        """
        if not self.is_open:
            return False
        self.is_open = self._is_probing = False
        self.failures = self._threshold - 1
        self._lengthen_pause()
        return True

    def drop_probe(self) -> None:
        """Record that the probing caller was cancelled. The next caller probes."""
        self._is_probing = False

    def _count(self, error: str) -> None:
        if self.failures == 0:
            self._silent_since = self._clock()
        self.failures += 1
        self.last_error = error

    def _lengthen_pause(self) -> None:
        self._pause_s = min(2 * self._pause_s, self._longest_pause_s)


class EngineSilent(SandboxUnavailable):
    """Error: the engine gave no answer, or an invalid one. A few such failures in a row open the breaker."""


@dataclass(frozen=True)
class Lane:
    """A kind of engine call with its own slots. `name` is the kind's plural, for error messages. A caller waits at most
    `max_wait_s` seconds for a slot.
    """

    name: str
    at_once: int
    deadline_s: float
    max_waiting: int = 1000
    max_wait_s: float = 60.0


@dataclass(frozen=True)
class EngineCallKinds:
    """The lane of each kind of call to the engine. `probe_s`: time limit of a probe."""

    starts: Lane
    removals: Lane
    start_check: Lane
    freezes: Lane
    fills: Lane
    probe_s: float = 3.0


LANES: Final = EngineCallKinds(
    # Starts are most of the engine's work. Running more starts at once than the host has cores would only make each
    # start slower.
    starts=Lane("starts", at_once=max(2, min(os.cpu_count() or 1, 16)), deadline_s=45.0),
    removals=Lane("removals", at_once=4, deadline_s=45.0, max_wait_s=120.0),
    start_check=Lane("start checks", at_once=4, deadline_s=15.0, max_wait_s=30.0),
    freezes=Lane("freezes", at_once=4, deadline_s=15.0, max_wait_s=30.0),
    fills=Lane("volume fills", at_once=1, deadline_s=60.0),
)


class _LaneSlots:
    """The slots of a lane, given in order of arrival. A slot becomes free when its thread ends, not when its caller
    gives up.
    """

    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        self.running = 0
        self.overdue = 0
        """Number of running calls that passed their deadline; their callers have an error."""
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    async def take(self) -> None:
        """Wait for a slot, which the caller must give back. Raises SandboxUnavailable when too many callers wait, or
        when the wait is too long.
        """
        if self.running < self.lane.at_once:
            self.running += 1
            return
        if self.overdue >= self.lane.at_once:
            raise SandboxUnavailable(self._describe_stall())
        if self.waiting >= self.lane.max_waiting:
            raise self._busy()
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            async with asyncio.timeout(self.lane.max_wait_s):
                await turn
        except BaseException as error:
            self._leave(turn)
            if isinstance(error, TimeoutError):
                raise self._busy() from None
            raise

    def give_back(self) -> None:
        """Pass the slot to the next waiting caller."""
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():  # a future that is done belongs to a caller that is just being cancelled
                turn.set_result(None)
                return
        self.running -= 1

    def count_overdue(self) -> None:
        """Count one more overdue call. When the calls of all slots are overdue, refuse the waiting callers, because
        perhaps no slot becomes free.
        """
        self.overdue += 1
        if self.overdue >= self.lane.at_once:
            self.refuse_waiting(self._describe_stall())

    def refuse_waiting(self, message: str) -> None:
        """Raise SandboxUnavailable with this message in every waiting caller."""
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_exception(SandboxUnavailable(message))

    def _leave(self, turn: "asyncio.Future[None]") -> None:
        if turn in self._waiting:
            self._waiting.remove(turn)
        elif turn.done() and not turn.cancelled() and turn.exception() is None:
            self.give_back()  # the slot was assigned while the caller was being cancelled

    def _describe_stall(self) -> str:
        return f"the Docker engine does not finish any of {self.overdue} {self.lane.name}: check it, or restart it"

    def _busy(self) -> SandboxUnavailable:
        return SandboxUnavailable(
            f"the Docker engine is busy: {self.running} {self.lane.name} in progress, {self.waiting} waiting: try "
            "again later, or spread the sessions over more hosts"
        )


class EngineGate:
    """Runs blocking calls in their own threads. `probe`: the cheapest blocking call that shows that the
    engine answers.
    """

    def __init__(self, probe: Callable[[], object], breaker: Breaker | None = None, probe_s: float = 3.0) -> None:
        self._probe = probe
        self._probe_s = probe_s
        self._breaker = breaker or Breaker()
        self._slots: dict[str, _LaneSlots] = {}
        self._probing: asyncio.Future[object] | None = None

    async def run(self, lane: Lane, work: Callable[[], T], late: Callable[[T], None] | None = None) -> T:
        """Return the result of `work`, which may raise SandboxUnavailable (the engine refused) or EngineSilent.

        Raises SandboxUnavailable at once while the breaker is open or the lane is full, and EngineSilent at the lane's
        deadline. A thread cannot be stopped: after a deadline or a cancellation, it continues and keeps its slot, and
        `late` is called with its result.
        """
        await self._admit()
        slots = self._slots.setdefault(lane.name, _LaneSlots(lane))
        await slots.take()
        if self._breaker.is_open:
            slots.give_back()
            raise SandboxUnavailable(self._silence())
        try:
            call = _Call(self, slots, in_thread(work, f"engine-{lane.name}"), late)
        except SandboxUnavailable:
            slots.give_back()
            raise
        try:
            return await call.answer
        except asyncio.CancelledError:
            call.leave()
            raise

    def describe(self) -> dict[str, Any]:
        """Return the running and waiting calls by kind and the state of the breaker, for `status`."""
        breaker = self._breaker
        return {
            "running": {name: slots.running for name, slots in self._slots.items()},
            "waiting": {name: slots.waiting for name, slots in self._slots.items()},
            "breaker": "open" if breaker.is_open else "closed",
            "failures": breaker.failures,
            "silent_s": round(breaker.silent_s, 3),
            "next_try_s": round(breaker.next_try_s, 3),
            "last_error": breaker.last_error,
        }

    async def _admit(self) -> None:
        admission = self._breaker.admit()
        if admission is BreakerDecision.PROBE:
            await self._ask_probe()
        elif admission is BreakerDecision.REFUSE:
            raise SandboxUnavailable(self._silence())

    async def _ask_probe(self) -> None:
        # If the last probe still hangs, wait for it again and start no second one, so that probes block at most one
        # thread.
        try:
            if self._probing is None or self._probing.done():
                self._probing = in_thread(self._probe, "engine-probe")
                self._probing.add_done_callback(_retrieve_error)
            async with asyncio.timeout(self._probe_s):
                await asyncio.shield(self._probing)
        except (SandboxUnavailable, TimeoutError) as error:
            self._breaker.record_probe_failure(str(error) or f"no answer within {self._probe_s:g} s")
            raise SandboxUnavailable(self._silence()) from error
        except BaseException:
            self._breaker.drop_probe()
            raise
        if self._breaker.record_probe_answer():
            log.info("engine_breaker_closed")

    def record_end(self, error: BaseException | None) -> None:
        """Update the breaker after the end of a call."""
        if isinstance(error, EngineSilent):
            self._fail(error)
        elif (error is None or isinstance(error, SandboxUnavailable)) and self._breaker.record_answer():
            log.info("engine_breaker_closed")

    def _fail(self, error: EngineSilent) -> None:
        if self._breaker.record_failure(str(error)):
            log.warning("engine_breaker_opened", failures=self._breaker.failures, error=str(error))
            for slots in self._slots.values():
                slots.refuse_waiting(self._silence())

    def _silence(self) -> str:
        breaker = self._breaker
        since = datetime.fromtimestamp(time.time() - breaker.silent_s, UTC)
        when = f"in {breaker.next_try_s:.1f} s" if breaker.next_try_s else "now"
        return (
            f"the Docker engine has not answered since {since:%H:%M:%S} UTC ({breaker.failures} times in a row; last: "
            f"{breaker.last_error}); it is tried again {when}"
        )


class _Call(Generic[T]):
    """A call that runs in its own thread. A missed deadline counts as no answer of the engine. The slot is given back
    when the thread ends, even if the caller was cancelled before.
    """

    def __init__(
        self, gate: EngineGate, slots: _LaneSlots, running: "asyncio.Future[T]", late: Callable[[T], None] | None
    ) -> None:
        loop = asyncio.get_running_loop()
        self.answer: asyncio.Future[T] = loop.create_future()
        """The future of the caller; cancelled when the caller leaves."""
        self._gate = gate
        self._slots = slots
        self._late = late
        self._is_overdue = False
        self._timer = loop.call_later(slots.lane.deadline_s, self._give_up)
        running.add_done_callback(self._end)

    def leave(self) -> None:
        """Pass the result to `late`, now or when it arrives, because the caller was cancelled."""
        if not self.answer.cancelled() and self.answer.exception() is None:
            self._hand_over(self.answer.result())

    def _give_up(self) -> None:
        self._is_overdue = True
        silence = EngineSilent(
            f"the Docker engine did not answer within {self._slots.lane.deadline_s:g} s: check it, or restart it"
        )
        self._gate.record_end(silence)
        self._slots.count_overdue()
        if not self.answer.done():
            self.answer.set_exception(silence)

    def _end(self, running: "asyncio.Future[T]") -> None:
        self._timer.cancel()
        if self._is_overdue:
            self._slots.overdue -= 1
        self._slots.give_back()
        error = running.exception()
        if not (self._is_overdue and isinstance(error, EngineSilent)):
            self._gate.record_end(error)
        if not self.answer.done():
            _settle(self.answer, running)
        elif error is None:
            self._hand_over(running.result())

    def _hand_over(self, result: T) -> None:
        if self._late is not None:
            self._late(result)


def _settle(answer: "asyncio.Future[T]", running: "asyncio.Future[T]") -> None:
    error = running.exception()
    if error is not None:
        answer.set_exception(error)
    else:
        answer.set_result(running.result())


def _retrieve_error(running: "asyncio.Future[Any]") -> None:
    """Retrieve an exception that no caller waits for, so that asyncio does not report it."""
    if not running.cancelled():
        running.exception()
