"""The gate in front of the engine: bounded concurrency, bounded time, and closed while the engine is silent. No
engine is used.
"""

import asyncio
import threading
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from tests.support.stack.waiting import SOON_S, until
from toolcrew.contract.errors import SandboxUnavailable
from toolcrew.workers.sandboxd.runtime.engine_gate import Breaker, BreakerDecision, EngineGate, EngineSilent, Lane

LANE = Lane("starts", at_once=2, deadline_s=SOON_S)
SHORT_LANE = Lane("starts", at_once=2, deadline_s=0.05, max_wait_s=0.05)


class BlockingCall:
    """Blocking calls that wait for `may_end`. Records how many ran at the same time."""

    def __init__(self) -> None:
        self.may_end = threading.Event()
        self.running = 0
        self.max_running = 0
        self.started_count = 0
        self._lock = threading.Lock()

    def __call__(self) -> str:
        with self._lock:
            self.running += 1
            self.started_count += 1
            self.max_running = max(self.max_running, self.running)
        assert self.may_end.wait(SOON_S)
        with self._lock:
            self.running -= 1
        return "done"


def raise_silent() -> str:
    raise EngineSilent("no reply")


def running_of(gate: EngineGate) -> int:
    return int(gate.describe()["running"]["starts"])


async def test_calls_above_the_limits_of_a_lane_are_refused() -> None:
    gate, work, lane = EngineGate(raise_silent), BlockingCall(), replace(LANE, max_waiting=6)
    calls = [asyncio.create_task(gate.run(lane, work)) for _ in range(8)]
    await until(lambda: work.running == 2 and gate.describe()["waiting"]["starts"] == 6)

    with pytest.raises(SandboxUnavailable, match="6 waiting"):
        await gate.run(lane, work)
    work.may_end.set()

    assert await asyncio.gather(*calls) == ["done"] * 8
    assert work.max_running == 2
    assert running_of(gate) == 0


async def test_a_call_that_waits_too_long_fails_with_the_queue_length() -> None:
    gate, work, lane = EngineGate(raise_silent), BlockingCall(), replace(LANE, max_wait_s=0.01)
    calls = [asyncio.create_task(gate.run(lane, work)) for _ in range(2)]
    await until(lambda: work.running == 2)

    with pytest.raises(SandboxUnavailable, match=r"busy: 2 starts in progress, .* try again later"):
        await gate.run(lane, work)
    assert gate.describe()["waiting"]["starts"] == 0

    work.may_end.set()
    await asyncio.gather(*calls)


async def test_a_hung_call_times_out_and_keeps_its_slot_until_its_thread_ends() -> None:
    gate, work, late_results = EngineGate(raise_silent), BlockingCall(), list[str]()

    with pytest.raises(EngineSilent, match=r"did not answer within 0.05 s"):
        await gate.run(SHORT_LANE, work, late_results.append)
    assert (running_of(gate), late_results) == (1, [])

    work.may_end.set()
    await until(lambda: bool(late_results))
    assert (running_of(gate), late_results) == (0, ["done"])


async def test_the_result_of_a_cancelled_call_is_passed_to_the_late_handler() -> None:
    gate, work, late_results = EngineGate(raise_silent), BlockingCall(), list[str]()
    call = asyncio.create_task(gate.run(LANE, work, late_results.append))
    await until(lambda: work.running == 1)
    call.cancel()
    await asyncio.wait({call})

    work.may_end.set()
    await until(lambda: bool(late_results))

    assert late_results == ["done"]


async def test_repeated_silence_opens_the_breaker() -> None:
    gate, probes = EngineGate(raise_silent, Breaker(threshold=2)), list[int]()
    with capture_logs() as logs:
        for _ in range(2):
            with pytest.raises(EngineSilent):
                await gate.run(LANE, raise_silent)
        for _ in range(3):
            with pytest.raises(
                SandboxUnavailable,
                match=r"not answered since \d\d:\d\d:\d\d UTC \(2 times in a row; last: no reply\); it is tried",
            ):
                await gate.run(LANE, lambda: probes.append(1))

    assert probes == []
    assert [entry["event"] for entry in logs] == ["engine_breaker_opened"]
    assert gate.describe()["breaker"] == "open"


async def test_waiting_callers_fail_when_the_breaker_opens() -> None:
    gate, work = EngineGate(raise_silent, Breaker(threshold=2)), BlockingCall()
    lane = replace(SHORT_LANE, max_wait_s=SOON_S)
    calls = [asyncio.create_task(gate.run(lane, work)) for _ in range(5)]

    results = await asyncio.gather(*calls, return_exceptions=True)

    assert [type(result) for result in results[:2]] == [EngineSilent, EngineSilent]
    assert all("2 times in a row" in str(result) for result in results[2:])
    assert work.started_count == 2
    work.may_end.set()
    await until(lambda: running_of(gate) == 0)


async def test_an_answered_probe_closes_the_breaker_and_runs_the_call() -> None:
    is_back = threading.Event()
    gate = EngineGate(lambda: is_back.is_set() or raise_silent(), Breaker(threshold=1, first_pause_s=0.0))
    with capture_logs() as logs:
        with pytest.raises(EngineSilent):
            await gate.run(LANE, raise_silent)
        with pytest.raises(SandboxUnavailable, match="2 times in a row"):
            await gate.run(LANE, lambda: "done")
        is_back.set()
        assert await gate.run(LANE, lambda: "done") == "done"

    assert [entry["event"] for entry in logs] == ["engine_breaker_opened", "engine_breaker_closed"]


async def test_a_hung_probe_fails_and_starts_no_second_thread() -> None:
    work = BlockingCall()
    gate = EngineGate(work, Breaker(threshold=1, first_pause_s=0.0), probe_s=0.02)
    with pytest.raises(EngineSilent):
        await gate.run(LANE, raise_silent)

    for _ in range(3):
        with pytest.raises(SandboxUnavailable, match=r"no answer within 0.02 s"):
            await gate.run(LANE, lambda: "done")
    assert work.started_count == 1

    work.may_end.set()
    assert await gate.run(LANE, lambda: "done") == "done"


def end_threads(may_end: threading.Event) -> None:
    """End the threads. Afterwards, their results are the next events of the loop."""
    threads = [thread for thread in threading.enumerate() if thread.name == "engine-starts"]
    may_end.set()
    for thread in threads:
        thread.join(SOON_S)


async def test_a_released_slot_is_not_lost_when_the_next_caller_is_cancelled() -> None:
    lane = replace(LANE, at_once=1)
    gate, work = EngineGate(raise_silent), BlockingCall()
    first, cancelled_call, last = (asyncio.create_task(gate.run(lane, work)) for _ in range(3))
    await until(lambda: work.running == 1 and gate.describe()["waiting"]["starts"] == 2)

    end_threads(work.may_end)
    asyncio.get_running_loop().call_soon(cancelled_call.cancel)

    async with asyncio.timeout(SOON_S):
        assert (await first, await last) == ("done", "done")
    assert cancelled_call.cancelled()
    assert (running_of(gate), gate.describe()["waiting"]["starts"]) == (0, 0)


async def test_the_breaker_opens_for_all_waiters_while_one_is_cancelled() -> None:
    lane = replace(LANE, at_once=1, deadline_s=SOON_S)
    gate, may_end = EngineGate(raise_silent, Breaker(threshold=1)), threading.Event()

    def raise_silent_later() -> str:
        assert may_end.wait(SOON_S)
        return raise_silent()

    first, cancelled_call, last = (asyncio.create_task(gate.run(lane, raise_silent_later)) for _ in range(3))
    await until(lambda: gate.describe()["waiting"].get("starts") == 2)
    end_threads(may_end)
    asyncio.get_running_loop().call_soon(cancelled_call.cancel)

    async with asyncio.timeout(SOON_S):
        outcomes = await asyncio.gather(first, cancelled_call, last, return_exceptions=True)
    assert [type(end) for end in outcomes] == [EngineSilent, asyncio.CancelledError, SandboxUnavailable]
    assert running_of(gate) == 0


@pytest.mark.parametrize("turns_later", range(4))
async def test_a_result_is_delivered_once_while_its_caller_is_cancelled(turns_later: int) -> None:
    gate, work, late_results = EngineGate(raise_silent), BlockingCall(), list[str]()
    call = asyncio.create_task(gate.run(LANE, work, late_results.append))
    await until(lambda: work.running == 1)
    end_threads(work.may_end)
    for _ in range(turns_later):
        await asyncio.sleep(0)
    is_left = call.cancel()
    await asyncio.wait({call})
    await until(lambda: running_of(gate) == 0)

    assert late_results == (["done"] if is_left and call.cancelled() else [])


@pytest.mark.parametrize("is_probe", [False, True], ids=["call", "probe"])
async def test_a_failed_thread_start_is_reported_and_frees_the_slot(
    monkeypatch: pytest.MonkeyPatch, is_probe: bool
) -> None:
    gate = EngineGate(lambda: "alive", Breaker(threshold=1, first_pause_s=0.0))
    if is_probe:
        with pytest.raises(EngineSilent):
            await gate.run(LANE, raise_silent)

    def no_more_threads(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", no_more_threads)
        with pytest.raises(SandboxUnavailable, match="cannot start another thread"):
            await gate.run(LANE, lambda: "done")
    assert running_of(gate) == 0
    with pytest.raises(ZeroDivisionError):
        await gate.run(LANE, lambda: 1 // 0)
    assert running_of(gate) == 0, "nor does a bug in a call"
    assert await gate.run(LANE, lambda: "done") == "done"


async def test_a_hung_call_of_a_cancelled_caller_counts_as_overdue() -> None:
    lane = replace(SHORT_LANE, at_once=1, max_wait_s=SOON_S)
    gate, work = EngineGate(raise_silent), BlockingCall()
    abandoned = asyncio.create_task(gate.run(lane, work))
    await until(lambda: work.running == 1)
    abandoned.cancel()
    await asyncio.wait({abandoned})

    with pytest.raises(SandboxUnavailable, match="does not finish any of 1 starts"):
        await gate.run(lane, work)
    assert gate.describe()["failures"] == 1

    work.may_end.set()
    await until(lambda: running_of(gate) == 0)
    assert await gate.run(lane, lambda: "done") == "done"


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_only_consecutive_failures_open_the_breaker() -> None:
    clock = Clock()
    breaker = Breaker(clock, threshold=3, first_pause_s=1.0)

    for outcome in ("failed", "failed", "answered", "failed", "failed"):
        breaker.record_failure("no answer") if outcome == "failed" else breaker.record_answer()

    assert not breaker.is_open
    assert breaker.record_failure("no answer") is True
    assert breaker.admit() is BreakerDecision.REFUSE
    clock.now += 1
    assert [breaker.admit() for _ in range(2)] == [BreakerDecision.PROBE, BreakerDecision.REFUSE]
    breaker.drop_probe()
    assert breaker.admit() is BreakerDecision.PROBE


MOVES = st.lists(
    st.one_of(
        st.sampled_from(["failed", "answered", "admit", "record_probe_failure", "record_probe_answer", "drop_probe"]),
        st.floats(0.0, 40.0),
    ),
    max_size=80,
)


@given(MOVES)
def test_any_event_order_keeps_the_breaker_within_its_limits(moves: list[str | float]) -> None:
    clock = Clock()
    breaker = Breaker(clock, threshold=3, first_pause_s=1.0, longest_pause_s=30.0)
    is_probing, in_row = False, 0
    for move in moves:
        was_open = breaker.is_open
        if isinstance(move, float):
            clock.now += move
        elif move == "admit":
            admission = breaker.admit()
            assert (admission is BreakerDecision.GO) == (not was_open)
            assert not (admission is BreakerDecision.PROBE and is_probing)
            is_probing = is_probing or admission is BreakerDecision.PROBE
        elif move.startswith("note_probe_") or move == "drop_probe":
            if not is_probing:
                continue
            is_probing = False
            if move == "record_probe_failure":
                breaker.record_probe_failure("silent")
            else:
                getattr(breaker, move)()
        elif move == "failed":
            in_row += 1
            has_opened = breaker.record_failure("silent")
            assert has_opened == (breaker.is_open and not was_open)
            assert not (has_opened and in_row < 3)
        elif move == "answered":
            in_row, is_probing = 0, False
            assert breaker.record_answer() == was_open
            assert breaker.admit() is BreakerDecision.GO
        if not breaker.is_open:
            is_probing = False
        assert 0 <= breaker.next_try_s <= 30.0
        assert breaker.is_open or breaker.next_try_s == 0
    clock.now += 31
    assert breaker.admit() in (
        {BreakerDecision.GO}
        if not breaker.is_open
        else {BreakerDecision.REFUSE}
        if is_probing
        else {BreakerDecision.PROBE}
    )
