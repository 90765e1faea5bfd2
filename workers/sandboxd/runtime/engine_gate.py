"""Every call to the container engine passes one gate: bounded in number and time, and refused while the engine does not
answer.
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

from contract.errors import SandboxUnavailable
from store.tasks import in_thread

log = structlog.get_logger(__name__)

THRESHOLD: Final = 3
FIRST_PAUSE_S: Final = 1.0
LONGEST_PAUSE_S: Final = 30.0
T = TypeVar("T")


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
        """What a caller may do now. After `PROBE` one of `probe_failed`, `probe_answered` and `probe_dropped` must
        follow.
        """
        if not self.is_open:
            return Admission.GO
        if self._is_probing or self.next_try_s > 0:
            return Admission.REFUSE
        self._is_probing = True
        return Admission.PROBE

    def failed(self, error: str) -> bool:
        """A call got no answer. True when this opened the breaker. Calls that were under way when it opened add nothing
        to its pause.
        """
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
        """The engine answers again; a call that gets no answer opens the breaker at once, for longer. True when this
        closed it.

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


class EngineSilent(SandboxUnavailable):
    """The engine gave no answer, or none that an engine gives. A few of these in a row open the breaker."""


@dataclass(frozen=True)
class Lane:
    """One kind of call. `name` is its plural, for sentences. A caller waits for its turn no longer than
    `max_wait_s`.
    """

    name: str
    at_once: int
    deadline_s: float
    max_waiting: int = 1000
    max_wait_s: float = 60.0


@dataclass(frozen=True)
class Lanes:
    """Every kind of call to the engine. `probe_s`: how long a silent one may take to show that it is back."""

    starts: Lane
    removals: Lane
    start_check: Lane
    freezes: Lane
    fills: Lane
    probe_s: float = 3.0


LANES: Final = Lanes(
    # Nearly all work of the engine's on this host: more at a time than it has cores end no sooner, and each waits
    # longer.
    starts=Lane("starts", at_once=max(2, min(os.cpu_count() or 1, 16)), deadline_s=45.0),
    removals=Lane("removals", at_once=4, deadline_s=45.0, max_wait_s=120.0),
    start_check=Lane("looks", at_once=4, deadline_s=15.0, max_wait_s=30.0),
    freezes=Lane("freezes", at_once=4, deadline_s=15.0, max_wait_s=30.0),
    fills=Lane("volume fills", at_once=1, deadline_s=60.0),
)


class _Turns:
    """Who may use a lane: first come, first served. A turn ends with the thread that used it, not with its caller's
    patience.
    """

    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        self.running = 0
        self.overdue = 0
        """Of those that run: given up by their callers at the deadline, and still in the engine's hands."""
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    async def take(self) -> None:
        """Returns with a turn that must be given back. Raises SandboxUnavailable when too many wait, or for too
        long.
        """
        if self.running < self.lane.at_once:
            self.running += 1
            return
        if self.overdue >= self.lane.at_once:
            raise SandboxUnavailable(self._stuck())
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
        """The next that waits has the turn."""
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():  # else its caller is leaving in this very moment
                turn.set_result(None)
                return
        self.running -= 1

    def count_overdue(self) -> None:
        """One more is overdue; nobody waits for turns of which none may ever come back."""
        self.overdue += 1
        if self.overdue >= self.lane.at_once:
            self.refuse_waiting(self._stuck())

    def refuse_waiting(self, words: str) -> None:
        """Everybody who waits gets a SandboxUnavailable of these words."""
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_exception(SandboxUnavailable(words))

    def _leave(self, turn: "asyncio.Future[None]") -> None:
        if turn in self._waiting:
            self._waiting.remove(turn)
        elif turn.done() and not turn.cancelled() and turn.exception() is None:
            self.give_back()  # it came as the caller left

    def _stuck(self) -> str:
        return (
            f"the Docker engine does not get done with any of {self.overdue} {self.lane.name}: look after it, or "
            "restart it"
        )

    def _busy(self) -> SandboxUnavailable:
        return SandboxUnavailable(
            f"the Docker engine is busy: {self.running} {self.lane.name} under way, {self.waiting} waiting: try again "
            "later, or spread the sessions over more hosts"
        )


class EngineGate:
    """Runs blocking calls in threads of their own. `probe`: the cheapest blocking call that shows an engine alive."""

    def __init__(self, probe: Callable[[], object], breaker: Breaker | None = None, probe_s: float = 3.0) -> None:
        self._probe = probe
        self._probe_s = probe_s
        self._breaker = breaker or Breaker()
        self._turns: dict[str, _Turns] = {}
        self._probing: asyncio.Future[object] | None = None

    async def run(self, lane: Lane, work: Callable[[], T], late: Callable[[T], None] | None = None) -> T:
        """The result of `work`, which may raise SandboxUnavailable (the engine refused) or EngineSilent.

        Raises SandboxUnavailable at once while the breaker is open, when the lane is full, and EngineSilent at the
        lane's deadline. A thread cannot be stopped: after a deadline or a cancelled wait it goes on, holds its turn,
        and its result goes to `late`.
        """
        await self._admit()
        turns = self._turns.setdefault(lane.name, _Turns(lane))
        await turns.take()
        if self._breaker.is_open:
            turns.give_back()
            raise SandboxUnavailable(self._silence())
        try:
            call = _Call(self, turns, in_thread(work, f"engine-{lane.name}"), late)
        except SandboxUnavailable:
            turns.give_back()
            raise
        try:
            return await call.answer
        except asyncio.CancelledError:
            call.leave()
            raise

    def describe(self) -> dict[str, Any]:
        """For `status`: what runs and waits by kind, and whether the engine is asked at all."""
        breaker = self._breaker
        return {
            "running": {name: turns.running for name, turns in self._turns.items()},
            "waiting": {name: turns.waiting for name, turns in self._turns.items()},
            "breaker": "open" if breaker.is_open else "closed",
            "failures": breaker.failures,
            "silent_s": round(breaker.silent_s, 3),
            "next_try_s": round(breaker.next_try_s, 3),
            "last_error": breaker.last_error,
        }

    async def _admit(self) -> None:
        admission = self._breaker.admit()
        if admission is Admission.PROBE:
            await self._ask_probe()
        elif admission is Admission.REFUSE:
            raise SandboxUnavailable(self._silence())

    async def _ask_probe(self) -> None:
        # One that hangs is asked again for its answer: no two threads are in the hands of a silent engine for this.
        try:
            if self._probing is None or self._probing.done():
                self._probing = in_thread(self._probe, "engine-probe")
                self._probing.add_done_callback(_look_at)
            async with asyncio.timeout(self._probe_s):
                await asyncio.shield(self._probing)
        except (SandboxUnavailable, TimeoutError) as error:
            self._breaker.probe_failed(str(error) or f"no answer within {self._probe_s:g} s")
            raise SandboxUnavailable(self._silence()) from error
        except BaseException:
            self._breaker.probe_dropped()
            raise
        if self._breaker.probe_answered():
            log.info("engine_breaker_closed")

    def learn(self, error: BaseException | None) -> None:
        """What the end of a call shows of the engine."""
        if isinstance(error, EngineSilent):
            self._fail(error)
        elif (error is None or isinstance(error, SandboxUnavailable)) and self._breaker.answered():
            log.info("engine_breaker_closed")

    def _fail(self, error: EngineSilent) -> None:
        if self._breaker.failed(str(error)):
            log.warning("engine_breaker_opened", failures=self._breaker.failures, error=str(error))
            for turns in self._turns.values():
                turns.refuse_waiting(self._silence())

    def _silence(self) -> str:
        breaker = self._breaker
        since = datetime.fromtimestamp(time.time() - breaker.silent_s, UTC)
        when = f"in {breaker.next_try_s:.1f} s" if breaker.next_try_s else "now"
        return (
            f"the Docker engine has not answered since {since:%H:%M:%S} UTC ({breaker.failures} times in a row; last: "
            f"{breaker.last_error}); it is tried again {when}"
        )


class _Call(Generic[T]):
    """A call in its thread. Whether its caller waits or has left: at the deadline it is silence, and its end gives the
    turn back.
    """

    def __init__(
        self, gate: EngineGate, turns: _Turns, running: "asyncio.Future[T]", late: Callable[[T], None] | None
    ) -> None:
        loop = asyncio.get_running_loop()
        self.answer: asyncio.Future[T] = loop.create_future()
        """What the caller waits for; cancelled when he leaves."""
        self._gate = gate
        self._turns = turns
        self._late = late
        self._is_overdue = False
        self._timer = loop.call_later(turns.lane.deadline_s, self._give_up)
        running.add_done_callback(self._end)

    def leave(self) -> None:
        """The caller was cancelled, be it that the answer was there already."""
        if not self.answer.cancelled() and self.answer.exception() is None:
            self._hand_over(self.answer.result())

    def _give_up(self) -> None:
        self._is_overdue = True
        silence = EngineSilent(
            f"the Docker engine did not answer within {self._turns.lane.deadline_s:g} s: look after it, or restart it"
        )
        self._gate.learn(silence)
        self._turns.count_overdue()
        if not self.answer.done():
            self.answer.set_exception(silence)

    def _end(self, running: "asyncio.Future[T]") -> None:
        self._timer.cancel()
        if self._is_overdue:
            self._turns.overdue -= 1
        self._turns.give_back()
        error = running.exception()
        if not (self._is_overdue and isinstance(error, EngineSilent)):
            self._gate.learn(error)
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


def _look_at(running: "asyncio.Future[Any]") -> None:
    """An exception that nobody waits for any more is no bug of ours."""
    if not running.cancelled():
        running.exception()
