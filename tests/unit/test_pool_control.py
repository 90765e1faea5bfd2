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

from contract.calls import ToolCall
from contract.envelope import encode_call
from contract.names import POOL_WEB, call_key, control_queue, pool_worker
from contract.signing import SigningKeys
from store.calls import CallClaim, WorkerCallStore
from store.connection import SharedClock
from store.hosts import WorkerControlStore
from tests.builders import KEY, build_context
from tests.conftest import RedisProcess
from tests.waiting import wait_until
from workers.control import ControlListener, PoolOrders, _interrupt_child, process_holder
from workers.interrupts import CancelBoard

HERE, THERE = pool_worker("h1", "aaaa"), pool_worker("h2", "bbbb")


class Worker:
    """A listener of one worker, whose processes are numbers in a list."""

    def __init__(self, server: RedisProcess, name: str, *pools: str) -> None:
        self._client = redis.Redis.from_url(server.url, socket_timeout=5)
        self.board = CancelBoard()
        self.ended: list[int] = []
        self.is_asked = threading.Semaphore(0)
        orders = WorkerControlStore(self._client)
        self.listener = ControlListener(
            orders,
            (name, *pools),
            KEY,
            PoolOrders(orders, WorkerCallStore(server.client(), "d", SharedClock()), self.board, name, self._end),
            lambda lossy: False,
        )
        self.listener.start()

    def _end(self, pid: int) -> bool:
        self.ended.append(pid)
        self.is_asked.release()
        return True

    def was_asked(self) -> bool:
        return self.is_asked.acquire(timeout=10)

    def close(self) -> None:
        self.listener.stop()
        self._client.close()


class Floor:
    """Two workers on one Redis. Only the first reads the pool's list, and the test writes to the list."""

    def __init__(self, server: RedisProcess) -> None:
        self.store = server.client()
        self.here, self.there = Worker(server, HERE, POOL_WEB), Worker(server, THERE)

    def hold(self, call_id: str, holder: str, tenant: str = "acme") -> None:
        self.store.hset(call_key("d", tenant, call_id), mapping={"state": "running", "attempt": 1, "holder": holder})

    def order(
        self, call_id: str, queue: str = POOL_WEB, *, name: str = "session.cancel", key: SigningKeys = KEY
    ) -> None:
        call = ToolCall(id="order", name=name, arguments={"call_id": call_id})
        self.store.lpush(control_queue(queue), encode_call(call, build_context(session=None), key))

    def close(self) -> None:
        self.here.close()
        self.there.close()
        self.store.close()


@pytest.fixture
def floor(redis_server: RedisProcess) -> Iterator[Floor]:
    with capture_logs():
        opened = Floor(redis_server)
        yield opened
        opened.close()


@pytest.mark.parametrize("is_here", [True, False])
def test_a_call_is_ended_where_it_runs_and_marked_before(floor: Floor, is_here: bool) -> None:
    worker, other = (floor.here, floor.there) if is_here else (floor.there, floor.here)
    floor.hold("c1", process_holder(HERE if is_here else THERE, 41))
    floor.order("c1")
    assert worker.was_asked()
    assert (worker.ended, other.ended) == ([41], [])
    assert (worker.board.is_marked("acme", "c1"), other.board.is_marked("acme", "c1")) == (True, False)


def test_an_order_for_a_stopped_worker_is_dropped(floor: Floor) -> None:
    ended_worker = pool_worker("h3", "cccc")
    floor.hold("c1", process_holder(ended_worker, 43))
    floor.order("c1")
    wait_until(lambda: floor.store.exists(control_queue(ended_worker)), 10, "the order is passed on")
    assert 0 < floor.store.ttl(control_queue(ended_worker)) <= 60


def test_a_call_that_has_not_started_never_will(floor: Floor) -> None:
    floor.order("c1")
    # Every order is obeyed in a thread of its own: that a later one has been says nothing of this one.
    wait_until(lambda: floor.store.exists(call_key("d", "acme", "c1")), 10, "the order is obeyed")
    late = WorkerCallStore(floor.store, "d", SharedClock()).claim(
        ToolCall(id="c1", name="echo"), build_context(session=None), "late"
    )
    assert late is CallClaim.STARTED


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
def test_a_marker_without_a_process_of_the_pool_ends_nothing(floor: Floor, holder: str) -> None:
    """The attacker's aim: a forged marker makes a worker write to a list, or end a process, of the attacker's choice."""
    before = set(floor.store.keys("*"))
    floor.hold("c1", holder)
    floor.order("c1")
    floor.hold("after", process_holder(HERE, 7))
    floor.order("after")
    assert floor.here.was_asked()
    assert floor.here.ended == [7]
    markers = {call_key("d", "acme", name).encode() for name in ("c1", "after")}
    assert set(floor.store.keys("*")) - before - markers == set()


@pytest.mark.parametrize("wrong", [{"name": "session.close"}, {"key": SigningKeys.of("j" * 32)}])
def test_an_unsigned_cancel_is_dropped(floor: Floor, wrong: dict[str, str]) -> None:
    floor.hold("c1", process_holder(HERE, 41))
    floor.order("c1", **wrong)  # type: ignore[arg-type]
    floor.hold("after", process_holder(HERE, 7))
    floor.order("after")
    assert floor.here.was_asked()
    assert floor.here.ended == [7]


def test_a_listener_stops_at_once_and_leaves_nothing_on_its_list(floor: Floor) -> None:
    started = time.monotonic()
    floor.here.listener.stop()
    assert time.monotonic() - started < 0.5
    assert floor.store.llen(control_queue(HERE)) == 0


def test_only_a_child_of_ones_own_gets_the_signal() -> None:
    assert not _interrupt_child(os.getppid())
    assert not _interrupt_child(os.getpid())
    assert not _interrupt_child(2**30)
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(30)"]) as child:
        assert _interrupt_child(child.pid)
        child.kill()
