"""Order of calls in the guest: which calls wait for each other, and what happens to waiting calls."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.guest_harness import GUEST_PARENT, Guest, needs_namespace

assert GUEST_PARENT
from guest.calls import Call, CallLanes  # noqa: E402


def start(guest: Guest, script: str, **fields: object) -> str:
    return guest.start_script(script, **{"cwd": None, "state": "keep", "timeout_s": 20, **fields})


@needs_namespace
def test_commands_of_a_session_run_one_after_the_other_in_the_order_of_their_arrival(guest: Guest) -> None:
    calls = [start(guest, f"export N={n}:$N; sleep 0.02; echo $N") for n in range(6)]
    assert [guest.finish(call).bytes_of("stdout").decode() for call in calls][-1] == "5:4:3:2:1:0:\n"


@needs_namespace
def test_calls_of_no_lane_run_beside_them(guest: Guest) -> None:
    held = start(guest, "mkfifo gate; echo up > up; read line < gate; echo held")
    guest.wait_for_file("up")
    waiting = start(guest, "echo waited")
    assert guest.run("echo beside").bytes_of("stdout") == b"beside\n"
    assert guest.run("echo used", cwd=None, state="use").bytes_of("stdout") == b"used\n"
    guest.run("echo go > gate")
    assert guest.finish(held).bytes_of("stdout") == b"held\n"
    assert guest.finish(waiting).bytes_of("stdout") == b"waited\n"


@needs_namespace
def test_what_was_waited_is_part_of_the_limit_and_who_waits_can_be_cancelled(guest: Guest) -> None:
    held = start(guest, "mkfifo gate; echo up > up; read line < gate; sleep 0.4")
    guest.wait_for_file("up")
    late = guest.finish(start(guest, "echo never > never", timeout_s=0.2))
    assert (late.code, "waited 0.2 s for its turn" in late["error"]["message"]) == ("TIMEOUT", True)
    given_up = start(guest, "echo never > never")
    guest.send({"id": given_up, "op": "cancel"})
    done = guest.finish(given_up)
    assert (done["cancelled"], done["exit_code"], done["streams"]["stdout"]["total"]) == (True, None, 0)
    waiting = start(guest, "sleep 1000", timeout_s=0.6)
    guest.run("echo go > gate")
    assert guest.finish(held)["exit_code"] == 0
    done = guest.finish(waiting)
    assert (done["timed_out"], done["run_s"] < 0.5) == (True, True)
    assert guest.finish(start(guest, "echo kept")).bytes_of("stdout") == b"kept\n"
    assert not (guest.workspace / "never").exists()


@needs_namespace
@pytest.mark.parametrize("end", ["kill -9 $PPID; sleep 1000", "kill -9 $$", "exec false"])
def test_however_a_command_ends_the_next_one_runs(guest: Guest, end: str) -> None:
    calls = [start(guest, end), start(guest, "echo next")]
    assert guest.finish(calls[0]) is not None
    assert guest.finish(calls[1]).bytes_of("stdout") == b"next\n"


@needs_namespace
def test_many_that_wait_and_cannot_run_are_all_answered(guest: Guest) -> None:
    held = start(guest, "echo up > up; sleep 0.3")
    guest.wait_for_file("up")
    calls = [start(guest, "true", cwd="nowhere") for _ in range(100)]
    assert {guest.finish(call).code for call in calls} == {"FILE_NOT_FOUND"}
    assert guest.finish(held)["exit_code"] == 0


def build_call(lane: str | None) -> Call:
    call = Call({"id": "0" * 32, "op": "exec", "body_bytes": 0})
    call.lane = lane
    return call


@given(steps=st.lists(st.tuples(st.sampled_from(["a", "b", None]), st.integers(0, 9)), max_size=40))
def test_in_a_lane_one_runs_and_the_others_follow_in_order(steps: list[tuple[str | None, int]]) -> None:
    lanes, running, waiting = CallLanes(), dict[str, Call](), list[Call]()
    for lane, choice in steps:
        call = build_call(lane)
        may_run = lanes.enter(call)
        assert may_run == (lane is None or lane not in running)
        if lane is not None and may_run:
            running[lane] = call
        elif lane is not None:
            waiting.append(call)
        live = [*running.values(), *waiting]
        if choice < len(live):
            removed = live[choice]
            following = lanes.leave(removed)
            if removed in waiting:
                assert following is None
                waiting.remove(removed)
            else:
                assert following is next((other for other in waiting if other.lane == removed.lane), None)
                del running[str(removed.lane)]
                if following is not None:
                    waiting.remove(following)
                    running[str(removed.lane)] = following
        assert sorted(map(id, lanes.waiting)) == sorted(map(id, waiting))
