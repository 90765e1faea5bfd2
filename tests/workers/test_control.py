"""The control list of a host: signed cancels and closes are obeyed at once. Anything else is dropped and ends
nothing.
"""

import threading
import time
from collections.abc import Iterator

import pytest
import redis
from structlog.testing import capture_logs

from tests.conftest import RedisProcess
from tests.support.records.builders import KEY, build_context
from tests.support.records.fakes import FakeSandboxClient, MemoryLedger
from toolcrew.contract.calls import ToolCall
from toolcrew.contract.envelope import encode_call
from toolcrew.contract.errors import SandboxUnavailable
from toolcrew.contract.names import control_queue
from toolcrew.contract.signing import SigningKeys
from toolcrew.store.clock import SharedClock
from toolcrew.store.hosts import WorkerControlStore
from toolcrew.workers import control as control_module
from toolcrew.workers.control import ControlListener, SandboxOrders

QUEUE = "host.h1.b00t"


def order(
    name: str = "session.cancel",
    *,
    key: SigningKeys = KEY,
    deadline_s: float = 60,
    session: str | None = "s1",
    **arguments: object,
) -> str:
    call = ToolCall(id="order-1", name=name, arguments=arguments)  # type: ignore[arg-type]
    return encode_call(call, build_context(deadline_at=time.time() + deadline_s, session=session), key)


class WatchedClient(FakeSandboxClient):
    """A client that reports its requests. `gate` delays a close, as a slow engine does."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = threading.Semaphore(0)
        self.gate = threading.Event()
        self.gate.set()
        self.fails = False

    def cancel(self, name: str, call_id: str) -> bool:
        super().cancel(name, call_id)
        self.asked.release()
        if self.fails:
            raise SandboxUnavailable("sandboxd is gone")
        return True

    def close(self, name: str) -> bool:
        assert self.gate.wait(10)
        super().close(name)
        self.asked.release()
        return True

    def was_asked(self) -> bool:
        return self.asked.acquire(timeout=10)


class Harness:
    """A listener on a real Redis over a fake sandboxd."""

    def __init__(self, server: RedisProcess) -> None:
        self.sandboxd = WatchedClient()
        self.redis = server.client()
        self._own = redis.Redis.from_url(server.url, socket_timeout=5, socket_connect_timeout=1)
        # Running calls have been claimed by the process that runs them.
        self.ledger = MemoryLedger()
        self.ledger.claimed |= {("acme", name) for name in ("c9", "next", "one", "two", "after")}
        self.clock = SharedClock()
        self.refused: list[str] = []
        self.listener = ControlListener(
            WorkerControlStore(self._own),
            (QUEUE,),
            KEY,
            SandboxOrders(lambda: self.sandboxd, self.ledger),
            lambda lossy: False,
            self.clock,
            self.refused.append,
        )

    def send(self, *items: "str | bytes") -> None:
        for item in items:
            self.redis.lpush(control_queue(QUEUE), item)

    def end(self) -> None:
        self.sandboxd.gate.set()
        self.listener.stop()
        self.redis.close()
        self._own.close()


@pytest.fixture
def harness(redis_server: RedisProcess, monkeypatch: pytest.MonkeyPatch) -> Iterator[Harness]:
    monkeypatch.setattr(control_module, "RETRY_S", 0.05)
    harness = Harness(redis_server)
    harness.listener.start()
    yield harness
    harness.end()


def test_slow_close_does_not_delay_a_cancel(harness: Harness) -> None:
    harness.sandboxd.gate.clear()
    harness.send(order("session.close"), order(call_id="c9"))
    assert harness.sandboxd.was_asked()
    assert (harness.sandboxd.cancelled, harness.sandboxd.closed) == ([("acme:s1", "c9")], [])


REFUSED = {
    "empty": b"",
    "no text": b"\xff\xfe",
    "no JSON": b"{",
    "too deep": b"[" * 100_000,
    "null": b"null",
    "another key": order(call_id="c9", key=SigningKeys.of("j" * 32)),
    "another verb": order("bash_tool", command="ls"),
    "a verb of the queue": order("session.exec", argv=["ls"]),
    "no call named": order(),
    "no text for a call": order(call_id=["c9"]),
    "no session": order("session.close", session=None),
    "too late": order(call_id="c9", deadline_s=-1),
}


@pytest.mark.parametrize("item", REFUSED.values(), ids=REFUSED.keys())
def test_invalid_or_late_order_is_dropped_and_the_next_is_run(harness: Harness, item: "str | bytes") -> None:
    with capture_logs() as logs:
        harness.send(item, order(call_id="next"))
        assert harness.sandboxd.was_asked()
    assert (harness.sandboxd.cancelled, harness.sandboxd.closed) == ([("acme:s1", "next")], [])
    assert "order_refused" in [line["event"] for line in logs]
    assert len(harness.refused) == 1


def test_order_deadline_uses_the_shared_clock(harness: Harness) -> None:
    """A host whose clock is a minute slow must not take an old order for a new one."""
    harness.clock.learn(time.time() + 60)
    harness.send(order(call_id="c9", deadline_s=30), order(call_id="next", deadline_s=90))
    assert harness.sandboxd.was_asked()
    assert harness.sandboxd.cancelled == [("acme:s1", "next")]
    assert harness.refused == ["expired"]


def test_unreachable_sandboxd_does_not_stop_the_listener(harness: Harness) -> None:
    harness.sandboxd.fails = True
    harness.send(order(call_id="one"))
    assert harness.sandboxd.was_asked()
    harness.send(order(call_id="two"))
    assert harness.sandboxd.was_asked()
    assert [call for _, call in harness.sandboxd.cancelled] == ["one", "two"]


def test_listener_reconnects_after_a_redis_restart(harness: Harness, redis_server: RedisProcess) -> None:
    redis_server.stop()
    redis_server.start()
    harness.send(order(call_id="after"))
    assert harness.sandboxd.was_asked()
    assert harness.sandboxd.cancelled == [("acme:s1", "after")]


def test_cancelled_queued_call_never_starts(harness: Harness) -> None:
    harness.send(order(call_id="queued"), order(call_id="c9"))
    assert harness.sandboxd.was_asked()
    harness.end()
    assert harness.ledger.refused == {("acme", "queued")}
