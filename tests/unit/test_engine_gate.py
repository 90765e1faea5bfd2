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

from contract.errors import SandboxUnavailable
from tests.waiting import until
from workers.sandboxd.runtime.engine_gate import Breaker, BreakerDecision, EngineGate, EngineSilent, Lane

SOON_S = 10.0
LANE = Lane("starts", at_once=2, deadline_s=SOON_S)
HASTY = Lane("starts", at_once=2, deadline_s=0.05, max_wait_s=0.05)


class Work:
    """Blocking calls that wait for `go`. Records how many ran at the same time."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.running = 0
        self.most = 0
        self.begun = 0
        self._lock = threading.Lock()

    def __call__(self) -> str:
        with self._lock:
            self.running += 1
            self.begun += 1
            self.most = max(self.most, self.running)
        assert self.go.wait(SOON_S)
        with self._lock:
            self.running -= 1
        return "done"


def silent() -> str:
    raise EngineSilent("no reply")


def running_of(gate: EngineGate) -> int:
    return int(gate.describe()["running"]["starts"])


async def test_a_lane_runs_and_holds_so_many_calls_and_refuses_more_at_once() -> None:
    gate, work, lane = EngineGate(silent), Work(), replace(LANE, max_waiting=6)
    calls = [asyncio.create_task(gate.run(lane, work)) for _ in range(8)]
    await until(lambda: work.running == 2 and gate.describe()["waiting"]["starts"] == 6)

    with pytest.raises(SandboxUnavailable, match="6 waiting"):
        await gate.run(lane, work)
    work.go.set()

    assert await asyncio.gather(*calls) == ["done"] * 8
    assert work.most == 2
    assert running_of(gate) == 0


async def test_a_call_that_waits_too_long_learns_how_many_wait() -> None:
    gate, work, lane = EngineGate(silent), Work(), replace(LANE, max_wait_s=0.01)
    calls = [asyncio.create_task(gate.run(lane, work)) for _ in range(2)]
    await until(lambda: work.running == 2)

    with pytest.raises(SandboxUnavailable, match=r"busy: 2 starts in progress, .* try again later"):
        await gate.run(lane, work)
    assert gate.describe()["waiting"]["starts"] == 0

    work.go.set()
    await asyncio.gather(*calls)


async def test_a_hung_call_is_given_up_at_its_deadline_and_holds_its_turn_until_its_thread_ends() -> None:
    gate, work, late = EngineGate(silent), Work(), list[str]()

    with pytest.raises(EngineSilent, match=r"did not answer within 0.05 s"):
        await gate.run(HASTY, work, late.append)
    assert (running_of(gate), late) == (1, [])

    work.go.set()
    await until(lambda: bool(late))
    assert (running_of(gate), late) == (0, ["done"])


async def test_the_result_of_a_cancelled_call_is_handed_over_and_not_lost() -> None:
    gate, work, late = EngineGate(silent), Work(), list[str]()
    call = asyncio.create_task(gate.run(LANE, work, late.append))
    await until(lambda: work.running == 1)
    call.cancel()
    await asyncio.wait({call})

    work.go.set()
    await until(lambda: bool(late))

    assert late == ["done"]


async def test_silences_open_the_breaker_which_then_refuses_at_once_and_says_since_when() -> None:
    gate, probes = EngineGate(silent, Breaker(threshold=2)), list[int]()
    with capture_logs() as logs:
        for _ in range(2):
            with pytest.raises(EngineSilent):
                await gate.run(LANE, silent)
        for _ in range(3):
            with pytest.raises(
                SandboxUnavailable,
                match=r"not answered since \d\d:\d\d:\d\d UTC \(2 times in a row; last: no reply\); it is tried",
            ):
                await gate.run(LANE, lambda: probes.append(1))

    assert probes == []
    assert [entry["event"] for entry in logs] == ["engine_breaker_opened"]
    assert gate.describe()["breaker"] == "open"


async def test_a_caller_that_waits_when_the_breaker_opens_is_informed_at_once() -> None:
    gate, work = EngineGate(silent, Breaker(threshold=2)), Work()
    lane = replace(HASTY, max_wait_s=SOON_S)
    calls = [asyncio.create_task(gate.run(lane, work)) for _ in range(5)]

    results = await asyncio.gather(*calls, return_exceptions=True)

    assert [type(result) for result in results[:2]] == [EngineSilent, EngineSilent]
    assert all("2 times in a row" in str(result) for result in results[2:])
    assert work.begun == 2
    work.go.set()
    await until(lambda: running_of(gate) == 0)


async def test_a_probe_that_is_answered_closes_it_and_the_caller_that_probed_goes_on() -> None:
    is_back = threading.Event()
    gate = EngineGate(lambda: is_back.is_set() or silent(), Breaker(threshold=1, first_pause_s=0.0))
    with capture_logs() as logs:
        with pytest.raises(EngineSilent):
            await gate.run(LANE, silent)
        with pytest.raises(SandboxUnavailable, match="2 times in a row"):
            await gate.run(LANE, lambda: "done")
        is_back.set()
        assert await gate.run(LANE, lambda: "done") == "done"

    assert [entry["event"] for entry in logs] == ["engine_breaker_opened", "engine_breaker_closed"]


async def test_a_probe_that_hangs_is_a_probe_that_failed_and_no_second_thread_is_lost_to_it() -> None:
    work = Work()
    gate = EngineGate(work, Breaker(threshold=1, first_pause_s=0.0), probe_s=0.02)
    with pytest.raises(EngineSilent):
        await gate.run(LANE, silent)

    for _ in range(3):
        with pytest.raises(SandboxUnavailable, match=r"no answer within 0.02 s"):
            await gate.run(LANE, lambda: "done")
    assert work.begun == 1

    work.go.set()
    assert await gate.run(LANE, lambda: "done") == "done"


def end_threads(go: threading.Event) -> None:
    """End the threads. Afterwards, their results are the next events of the loop."""
    threads = [thread for thread in threading.enumerate() if thread.name == "engine-starts"]
    go.set()
    for thread in threads:
        thread.join(SOON_S)


async def test_a_turn_that_is_given_back_as_the_next_caller_leaves_is_not_lost() -> None:
    lane = replace(LANE, at_once=1)
    gate, work = EngineGate(silent), Work()
    first, leaving, last = (asyncio.create_task(gate.run(lane, work)) for _ in range(3))
    await until(lambda: work.running == 1 and gate.describe()["waiting"]["starts"] == 2)

    end_threads(work.go)
    asyncio.get_running_loop().call_soon(leaving.cancel)

    async with asyncio.timeout(SOON_S):
        assert (await first, await last) == ("done", "done")
    assert leaving.cancelled()
    assert (running_of(gate), gate.describe()["waiting"]["starts"]) == (0, 0)


async def test_the_breaker_opens_for_all_who_wait_though_one_of_them_leaves_in_that_moment() -> None:
    lane = replace(LANE, at_once=1, deadline_s=SOON_S)
    gate, go = EngineGate(silent, Breaker(threshold=1)), threading.Event()

    def silent_at_last() -> str:
        assert go.wait(SOON_S)
        return silent()

    first, leaving, last = (asyncio.create_task(gate.run(lane, silent_at_last)) for _ in range(3))
    await until(lambda: gate.describe()["waiting"].get("starts") == 2)
    end_threads(go)
    asyncio.get_running_loop().call_soon(leaving.cancel)

    async with asyncio.timeout(SOON_S):
        ends = await asyncio.gather(first, leaving, last, return_exceptions=True)
    assert [type(end) for end in ends] == [EngineSilent, asyncio.CancelledError, SandboxUnavailable]
    assert running_of(gate) == 0


@pytest.mark.parametrize("turns_later", range(4))
async def test_a_result_is_handed_over_once_though_it_comes_as_its_caller_leaves(turns_later: int) -> None:
    gate, work, late = EngineGate(silent), Work(), list[str]()
    call = asyncio.create_task(gate.run(LANE, work, late.append))
    await until(lambda: work.running == 1)
    end_threads(work.go)
    for _ in range(turns_later):
        await asyncio.sleep(0)
    is_left = call.cancel()
    await asyncio.wait({call})
    await until(lambda: running_of(gate) == 0)

    assert late == (["done"] if is_left and call.cancelled() else [])


@pytest.mark.parametrize("is_probe", [False, True], ids=["call", "probe"])
async def test_a_host_without_threads_is_said_and_costs_no_turn(
    monkeypatch: pytest.MonkeyPatch, is_probe: bool
) -> None:
    gate = EngineGate(lambda: "alive", Breaker(threshold=1, first_pause_s=0.0))
    if is_probe:
        with pytest.raises(EngineSilent):
            await gate.run(LANE, silent)

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


async def test_a_hung_call_that_its_caller_left_early_is_overdue_all_the_same() -> None:
    lane = replace(HASTY, at_once=1, max_wait_s=SOON_S)
    gate, work = EngineGate(silent), Work()
    abandoned = asyncio.create_task(gate.run(lane, work))
    await until(lambda: work.running == 1)
    abandoned.cancel()
    await asyncio.wait({abandoned})

    with pytest.raises(SandboxUnavailable, match="does not finish any of 1 starts"):
        await gate.run(lane, work)
    assert gate.describe()["failures"] == 1

    work.go.set()
    await until(lambda: running_of(gate) == 0)
    assert await gate.run(lane, lambda: "done") == "done"


# The breaker alone


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_a_few_silences_in_a_row_open_it_and_an_answer_between_does_not() -> None:
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
def test_whatever_happens_it_opens_only_after_silences_and_never_for_longer_than_its_longest_pause(
    moves: list[str | float],
) -> None:
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
        elif move.startswith("probe_") and is_probing:
            is_probing = False
            if move == "record_probe_failure":
                breaker.record_probe_failure("silent")
            else:
                getattr(breaker, move)()
        elif move == "failed":
            in_row += 1
            has_opened = breaker.record_failure("silent")
            assert has_opened == (breaker.is_open and not was_open)
            assert not (has_opened and in_row < 2)
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
