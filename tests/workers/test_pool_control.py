"""Cancels in pools that several workers share: the order reaches the worker that runs the call, or prevents the start
of the call.
"""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
import redis
from structlog.testing import capture_logs

from tests.conftest import RedisProcess
from tests.support.records.builders import KEY, build_context
from tests.support.stack.waiting import SOON_S, wait_until
from toolcrew.contract.calls import ToolCall
from toolcrew.contract.envelope import encode_call
from toolcrew.contract.names import POOL_WEB, call_key, control_queue, pool_worker
from toolcrew.contract.signing import SigningKeys
from toolcrew.store.call_records import CallClaim
from toolcrew.store.calls import WorkerCallStore
from toolcrew.store.clock import SharedClock
from toolcrew.store.hosts import WorkerControlStore
from toolcrew.workers.control import ControlListener, PoolOrders, _interrupt_child, process_holder
from toolcrew.workers.interrupts import CancelBoard

HERE, THERE = pool_worker("h1", "aaaa"), pool_worker("h2", "bbbb")


class Worker:
    """A listener of one worker, whose processes are numbers in a list."""

    def __init__(self, server: RedisProcess, name: str, *pools: str) -> None:
        self._client = redis.Redis.from_url(server.url, socket_timeout=5)
        self.board = CancelBoard()
        self.ended: list[int] = []
        self.is_asked = threading.Semaphore(0)
        self.closed: list[tuple[str, str]] = []
        orders = WorkerControlStore(self._client)
        self.listener = ControlListener(
            orders,
            (name, *pools),
            KEY,
            PoolOrders(
                orders,
                WorkerCallStore(server.client(), "d", SharedClock()),
                self.board,
                name,
                self._end,
                self._end_sessions,
            ),
            lambda lossy: False,
        )
        self.listener.start()

    def _end(self, pid: int) -> bool:
        self.ended.append(pid)
        self.is_asked.release()
        return True

    def _end_sessions(self, tenant: str, session: str) -> bool:
        self.closed.append((tenant, session))
        self.is_asked.release()
        return True

    def was_asked(self) -> bool:
        return self.is_asked.acquire(timeout=10)

    def close(self) -> None:
        self.listener.stop()
        self._client.close()


class TwoWorkers:
    """Two workers on one Redis. Only the first reads the pool's list, and the test writes to the list."""

    def __init__(self, server: RedisProcess) -> None:
        self.store = server.client()
        self.here = Worker(server, HERE, POOL_WEB)
        self.there = Worker(server, THERE)

    def hold(self, call_id: str, holder: str, tenant: str = "acme") -> None:
        self.store.hset(call_key("d", tenant, call_id), mapping={"state": "running", "attempt": 1, "holder": holder})

    def order(
        self,
        call_id: str,
        queue: str = POOL_WEB,
        *,
        name: str = "session.cancel",
        key: SigningKeys = KEY,
        session: str | None = None,
    ) -> None:
        call = ToolCall(id="order", name=name, arguments={"call_id": call_id})
        self.store.lpush(control_queue(queue), encode_call(call, build_context(session=session), key))

    def close(self) -> None:
        self.here.close()
        self.there.close()
        self.store.close()


@pytest.fixture
def workers(redis_server: RedisProcess) -> Iterator[TwoWorkers]:
    with capture_logs():
        opened = TwoWorkers(redis_server)
        yield opened
        opened.close()


@pytest.mark.parametrize("is_here", [True, False])
def test_cancel_ends_a_call_on_the_worker_that_runs_it(workers: TwoWorkers, is_here: bool) -> None:
    worker, other = (workers.here, workers.there) if is_here else (workers.there, workers.here)
    workers.hold("c1", process_holder(HERE if is_here else THERE, 41))
    workers.order("c1")
    assert worker.was_asked()
    assert (worker.ended, other.ended) == ([41], [])
    assert (worker.board.is_marked("acme", "c1"), other.board.is_marked("acme", "c1")) == (True, False)


def test_the_end_of_a_session_ends_its_sessions_at_mcp_servers(workers: TwoWorkers) -> None:
    workers.order("none", name="session.close", session="s1", key=SigningKeys.of("j" * 32))
    workers.order("none", name="session.close")
    workers.order("none", name="session.close", session="s1")
    assert workers.here.was_asked()
    assert workers.here.closed == [("acme", "s1")], "an order without a signature or a session has no effect"


def test_order_for_a_stopped_worker_expires(workers: TwoWorkers) -> None:
    ended_worker = pool_worker("h3", "cccc")
    workers.hold("c1", process_holder(ended_worker, 43))
    workers.order("c1")
    wait_until(lambda: workers.store.exists(control_queue(ended_worker)), SOON_S, "the order is passed on")
    assert 0 < workers.store.ttl(control_queue(ended_worker)) <= 60


def test_cancelled_call_in_a_queue_never_starts(workers: TwoWorkers) -> None:
    workers.order("c1")
    # Every order is obeyed in a thread of its own: that a later one has been says nothing of this one.
    wait_until(lambda: workers.store.exists(call_key("d", "acme", "c1")), SOON_S, "the order is obeyed")
    claim = WorkerCallStore(workers.store, "d", SharedClock()).claim(
        ToolCall(id="c1", name="echo"), build_context(session=None), "late"
    )
    assert claim is CallClaim.STARTED


@pytest.mark.parametrize(
    "holder",
    [
        "h1",
        "host.h1.b00t",
        "",
        f"{HERE}",
        f"{HERE}/",
        f"{HERE}/0",
        f"{HERE}/x",
        f"{HERE}/1/2",
        "pool.a b/1",
        "\xff",
        f"x{HERE}/1",
    ],
)
def test_forged_holder_of_a_call_ends_no_process(workers: TwoWorkers, holder: str) -> None:
    """The attacker's aim: a forged marker makes a worker write to a list, or end a process, of the attacker's choice."""
    before = set(workers.store.keys("*"))
    workers.hold("c1", holder)
    workers.order("c1")
    workers.hold("after", process_holder(HERE, 7))
    workers.order("after")
    assert workers.here.was_asked()
    assert workers.here.ended == [7]
    markers = {call_key("d", "acme", name).encode() for name in ("c1", "after")}
    assert set(workers.store.keys("*")) - before - markers == set()


@pytest.mark.parametrize("changes", [{"name": "session.close"}, {"key": SigningKeys.of("j" * 32)}])
def test_wrongly_signed_or_other_order_is_dropped(workers: TwoWorkers, changes: dict[str, str]) -> None:
    workers.hold("c1", process_holder(HERE, 41))
    workers.order("c1", **changes)  # type: ignore[arg-type]
    workers.hold("after", process_holder(HERE, 7))
    workers.order("after")
    assert workers.here.was_asked()
    assert workers.here.ended == [7]


def test_listener_stops_immediately_and_leaves_no_order(workers: TwoWorkers) -> None:
    started = time.monotonic()
    workers.here.listener.stop()
    assert time.monotonic() - started < 0.5
    assert workers.store.llen(control_queue(HERE)) == 0


def test_only_own_child_processes_are_signalled() -> None:
    assert not _interrupt_child(os.getppid())
    assert not _interrupt_child(os.getpid())
    assert not _interrupt_child(2**30)
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(30)"]) as child:
        assert _interrupt_child(child.pid)
        child.kill()
