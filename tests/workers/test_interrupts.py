"""Ending a call inside its process: only the intended call ends, at any point of its work, and the next call is not
affected.
"""

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

import pytest

from tests.conftest import RedisProcess
from tests.support.records.builders import build_call, build_context
from toolcrew.contract.broker import BrokerSettings
from toolcrew.contract.errors import ToolFailure
from toolcrew.store.connection import connect, drop_connections
from toolcrew.workers.interrupts import END_SIGNAL, CallInterrupts, CancelBoard
from toolcrew.workers.tools.base import ToolEnvironment, WorkerResources

Outcomes = list[str]
FORK = multiprocessing.get_context("fork")


def in_process(work: Callable[[Outcomes], None]) -> Outcomes:
    """Run `work` in its own process and return its report. The test's timers and signals are not touched."""

    def run(connection: Connection) -> None:
        messages: Outcomes = []
        work(messages)
        connection.send(messages)

    receiver, sender = FORK.Pipe(duplex=False)
    process = FORK.Process(target=run, args=(sender,))
    process.start()
    sender.close()
    try:
        return list(receiver.recv()) if receiver.poll(20) else ["no outcome"]
    except EOFError:
        process.join(5)
        return [f"ended by signal {-(process.exitcode or 0)}"]
    finally:
        process.join(5)


def signal_self() -> None:
    os.kill(os.getpid(), END_SIGNAL)
    time.sleep(0.01)


class Harness:
    """Interrupts that record the outcomes of their calls."""

    def __init__(self, value: Outcomes) -> None:
        self.board = CancelBoard()
        self.outcomes = value
        self.interrupts = CallInterrupts(self.board, lambda: value.append("cleaned up"))

    def run(self, call_id: str, work: Callable[[], str], *, limit_s: float = 30.0) -> None:
        try:
            call, context = build_call(call_id=call_id), build_context(timeout_s=limit_s)
            self.outcomes.append(self.interrupts.run(ToolEnvironment(call, context, WorkerResources({})), work))
        except ToolFailure as interrupted:
            self.outcomes.append(f"{interrupted.code}: {interrupted}")


def test_signal_at_the_time_limit_ends_the_call_with_timeout() -> None:
    def work(value: Outcomes) -> None:
        def wait() -> str:
            time.sleep(0.1)
            signal_self()
            return "survived"

        Harness(value).run("c1", wait, limit_s=0.1)

    assert in_process(work) == ["cleaned up", "TIMEOUT: echo did not end within its limit of 0.1 s and was stopped"]


def test_signal_between_calls_or_for_an_earlier_call_has_no_effect() -> None:
    """Celery's signal may be under way when its call ends."""

    def work(value: Outcomes) -> None:
        def early() -> str:
            signal_self()
            return "went on"

        harness = Harness(value)
        harness.interrupts.listen()
        signal_self()
        harness.run("c1", lambda: "first")
        signal_self()
        harness.run("c2", early)

    assert in_process(work) == ["first", "went on"]


def test_cancel_ends_only_the_marked_call() -> None:
    def work(value: Outcomes) -> None:
        harness = Harness(value)

        def interrupted() -> str:
            signal_self()
            return "went on"

        harness.board.mark("acme", "c2")
        harness.board.mark("rival", "c1")
        harness.run("c1", interrupted)
        harness.board.mark("acme", "c3")
        harness.run("c3", interrupted)

    assert in_process(work) == ["went on", "cleaned up", "CANCELLED: echo was cancelled before it began"]


def test_cancel_is_not_caught_by_except_exception() -> None:
    def work(value: Outcomes) -> None:
        harness = Harness(value)

        def swallow() -> str:
            harness.board.mark("acme", "c1")
            try:
                signal_self()
            except Exception:  # noqa: BLE001  # as tools do
                return "swallowed"
            return "survived"

        harness.run("c1", swallow)

    assert in_process(work) == ["cleaned up", "CANCELLED: echo was cancelled and stopped"]


def test_cancelled_call_that_cleans_up_in_time_keeps_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("toolcrew.workers.interrupts.POOL_GRACE_S", 0.3)

    def work(value: Outcomes) -> None:
        harness = Harness(value)

        def clean() -> str:
            harness.board.mark("acme", "c1")
            try:
                signal_self()
            finally:
                time.sleep(0.1)
            return "survived"

        harness.run("c1", clean)
        time.sleep(0.4)
        value.append("alive")

    assert in_process(work)[-1] == "alive"


def test_cancelled_call_that_ignores_the_signal_is_killed_by_sigalrm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("toolcrew.workers.interrupts.POOL_GRACE_S", 0.1)

    def work(value: Outcomes) -> None:
        harness = Harness(value)

        def stay() -> str:
            harness.board.mark("acme", "c1")
            while True:
                try:
                    signal_self()
                    time.sleep(5)
                except BaseException:  # noqa: BLE001  # the worst of tools
                    value.append("not yet")

        harness.run("c1", stay)

    assert in_process(work) == [f"ended by signal {int(signal.SIGALRM)}"]


def test_timer_left_by_a_tool_does_not_end_the_next_call() -> None:
    def work(value: Outcomes) -> None:
        harness = Harness(value)

        def arm() -> str:
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            return "armed"

        harness.run("c1", arm)
        harness.run("c2", lambda: time.sleep(0.2) or "went on")

    assert in_process(work) == ["armed", "went on"]


def test_full_cancel_board_drops_the_oldest_mark_only() -> None:
    board = CancelBoard()
    for number in range(2000):
        board.mark("acme", f"c{number}")
    assert [board.is_marked("acme", f"c{number}") for number in (0, 1999, 2000)] == [False, True, False]
    assert not board.is_marked("rival", "c1999")


def test_cancel_board_is_shared_with_forked_processes() -> None:
    board, go, (receiver, sender) = CancelBoard(), FORK.Event(), FORK.Pipe(duplex=False)

    def look() -> None:
        go.wait(10)
        sender.send(board.is_marked("acme", "c1"))

    process = FORK.Process(target=look)
    process.start()
    board.mark("acme", "c1")
    go.set()
    assert receiver.poll(10)
    assert receiver.recv() is True
    process.join(5)


def test_connections_of_an_interrupted_call_are_dropped(redis_server: RedisProcess) -> None:
    """The attacker's aim: have the reply to an interrupted command read by the next tenant's."""
    client = connect(BrokerSettings.model_validate({"redis_url": redis_server.url}))
    before = client.client_id()
    assert client.client_id() == before
    drop_connections()
    assert client.client_id() != before
    client.close()
