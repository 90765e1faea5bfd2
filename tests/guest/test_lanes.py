"""Order of calls in the guest: which calls wait for each other, and what happens to waiting calls."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.guest.guest_harness import GUEST_PARENT, Guest, needs_namespace

assert GUEST_PARENT
from guest.calls import Call, CallLanes  # noqa: E402


def start(guest: Guest, script: str, **fields: object) -> str:
    return guest.start_script(script, **{"cwd": None, "state": "keep", "timeout_s": 20, **fields})


@needs_namespace
def test_commands_of_a_session_run_in_the_order_of_arrival(guest: Guest) -> None:
    calls = [start(guest, f"export N={n}:$N; sleep 0.02; echo $N") for n in range(6)]
    assert [guest.finish(call).bytes_of("stdout").decode() for call in calls][-1] == "5:4:3:2:1:0:\n"


@needs_namespace
def test_calls_without_a_lane_run_concurrently(guest: Guest) -> None:
    running_call = start(guest, "mkfifo gate; echo up > up; read line < gate; echo held")
    guest.wait_for_file("up")
    waiting = start(guest, "echo waited")
    assert guest.run("echo beside").bytes_of("stdout") == b"beside\n"
    assert guest.run("echo used", cwd=None, state="use").bytes_of("stdout") == b"used\n"
    guest.run("echo go > gate")
    assert guest.finish(running_call).bytes_of("stdout") == b"held\n"
    assert guest.finish(waiting).bytes_of("stdout") == b"waited\n"


@needs_namespace
def test_waiting_time_counts_toward_the_timeout_and_waiting_calls_can_be_cancelled(guest: Guest) -> None:
    running_call = start(guest, "mkfifo gate; echo up > up; read line < gate; sleep 2")
    guest.wait_for_file("up")
    timed_out = guest.finish(start(guest, "echo never > never", timeout_s=0.2))
    assert (timed_out.code, "waited 0.2 s for its turn" in timed_out["error"]["message"]) == ("TIMEOUT", True)
    cancelled_call = start(guest, "echo never > never")
    guest.send({"id": cancelled_call, "op": "cancel"})
    done = guest.finish(cancelled_call)
    assert (done["cancelled"], done["exit_code"], done["streams"]["stdout"]["total"]) == (True, None, 0)
    waiting = start(guest, "sleep 1000", timeout_s=5)
    guest.run("echo go > gate")
    assert guest.finish(running_call)["exit_code"] == 0
    done = guest.finish(waiting)
    assert (done["timed_out"], done["run_s"] < 4) == (True, True)
    assert guest.finish(start(guest, "echo kept")).bytes_of("stdout") == b"kept\n"
    assert not (guest.workspace / "never").exists()


@needs_namespace
@pytest.mark.parametrize("end", ["kill -9 $PPID; sleep 1000", "kill -9 $$", "exec false"])
def test_the_next_command_runs_after_any_end_of_a_command(guest: Guest, end: str) -> None:
    calls = [start(guest, end), start(guest, "echo next")]
    assert guest.finish(calls[0]) is not None
    assert guest.finish(calls[1]).bytes_of("stdout") == b"next\n"


@needs_namespace
def test_waiting_commands_that_cannot_start_are_all_answered(guest: Guest) -> None:
    running_call = start(guest, "echo up > up; sleep 0.3")
    guest.wait_for_file("up")
    calls = [start(guest, "true", cwd="nowhere") for _ in range(100)]
    assert {guest.finish(call).code for call in calls} == {"FILE_NOT_FOUND"}
    assert guest.finish(running_call)["exit_code"] == 0


def build_call(lane: str | None) -> Call:
    call = Call({"id": "0" * 32, "op": "exec", "body_bytes": 0})
    call.lane = lane
    return call


@given(steps=st.lists(st.tuples(st.sampled_from(["a", "b", None]), st.integers(0, 9)), max_size=40))
def test_a_lane_runs_one_call_at_a_time_in_order(steps: list[tuple[str | None, int]]) -> None:
    lanes, running, waiting_calls = CallLanes(), dict[str, Call](), list[Call]()
    for lane, choice in steps:
        call = build_call(lane)
        may_run = lanes.enter(call)
        assert may_run == (lane is None or lane not in running)
        if lane is not None and may_run:
            running[lane] = call
        elif lane is not None:
            waiting_calls.append(call)
        live = [*running.values(), *waiting_calls]
        if choice < len(live):
            removed = live[choice]
            next_call = lanes.leave(removed)
            if removed in waiting_calls:
                assert next_call is None
                waiting_calls.remove(removed)
            else:
                assert next_call is next((other for other in waiting_calls if other.lane == removed.lane), None)
                del running[str(removed.lane)]
                if next_call is not None:
                    waiting_calls.remove(next_call)
                    running[str(removed.lane)] = next_call
        assert sorted(map(id, lanes.waiting)) == sorted(map(id, waiting_calls))
