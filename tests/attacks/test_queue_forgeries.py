"""An attacker with write access to Redis tries to execute a tool. A real worker executes nothing of this, and counts
the refusals.

Worker and sender are separate Redis users. The attacker has all rights on Redis but not the secret, or has an old
message.
"""

import asyncio
import json
import os
import secrets
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import redis
from celery import Celery

from tests.support.records.builders import build_attempt
from tests.support.redis.raw_queue import stored_result, stored_state
from tests.support.redis.redis_harness import SECRET, CountingPool, Server, broker_for, open_counting_pool, open_server
from tests.support.stack.waiting import SOON_S, wait_until, wait_until_async
from toolcrew.contract.calls import ToolCall, ToolContext, ToolResult
from toolcrew.contract.envelope import MAX_ENVELOPE_BYTES, encode_call
from toolcrew.contract.errors import ErrorCode
from toolcrew.contract.hosts import HOST_LOST_TYPE
from toolcrew.contract.names import (
    POOL_WEB,
    call_key,
    control_queue,
    location_key,
    refusals_key,
    result_key,
    tenants_key,
)
from toolcrew.contract.signing import SigningKeys
from toolcrew.contract.tenancy import TenantPolicy, seal_policy
from toolcrew.orchestrator.dispatch.celery_transport import build_message
from toolcrew.orchestrator.dispatch.pool_connection import open_pool
from toolcrew.orchestrator.dispatch.request import Request
from toolcrew.store.call_records import seal_ticket

KEYS = SigningKeys.of(SECRET, deployment="default")
WRONG_KEYS = SigningKeys.of("a guess")
ROUTE = ("acme", None, POOL_WEB)


class Attacker:
    """An attacker with all rights on Redis, who can also read the results."""

    def __init__(self, server: Server, pool: CountingPool) -> None:
        self.server = server
        self.pool = pool
        self.redis = server.client()

    def call(self) -> ToolCall:
        return ToolCall(id=f"c{secrets.token_hex(6)}", name="append_tool", arguments={"path": str(self.pool.marks)})

    def message(self, envelope: str, call_id: str, task: str = "tool.append_tool") -> str:
        return build_message(
            build_attempt(
                task.removeprefix("tool."),
                queue=POOL_WEB,
                call_id=call_id,
                envelope=envelope,
                start_by=0.0,
                limit_s=1.0,
            ),
            self.task_id(call_id),
            "none",
        )

    def task_id(self, call_id: str) -> str:
        return f"forged-{call_id}"

    def push(self, envelope: str, call: ToolCall, task: str = "tool.append_tool") -> None:
        self.redis.lpush(POOL_WEB, self.message(envelope, call.id, task))

    def count_refusals(self, reason: str) -> int:
        return int(self.redis.hget(refusals_key("default"), reason) or 0)

    def await_state(self, call: ToolCall) -> dict[str, Any]:
        """Return the state that Celery stored for a message of this attacker."""
        found = wait_until(lambda: stored_state(self.redis, self.task_id(call.id)), SOON_S, self.pool.log)
        return dict(found)

    def await_result(self, call: ToolCall) -> ToolResult:
        self.await_state(call)
        found = stored_result(self.redis, self.task_id(call.id))
        assert found is not None
        return found


@pytest.fixture(scope="module")
def attacker() -> Iterator[Attacker]:
    with (
        open_server(users=True) as server,
        server.client() as watch,
        open_counting_pool(broker_for(server.url("orchestrator")), server.url("web"), watch) as pool,
    ):
        opened = Attacker(server, pool)
        yield opened
        opened.redis.close()


def build_context(**fields: Any) -> ToolContext:
    now = time.time()
    return ToolContext(**{"tenant": "acme", "sent_at": now, "deadline_at": now + 60, **fields})


async def dispatch(attacker: Attacker, call: ToolCall) -> ToolResult:
    async with open_pool(attacker.pool.broker, queue_wait_s=5) as opened:
        return await opened.dispatcher.dispatch(Request(call, *ROUTE))


FORGERIES: dict[str, tuple[str, Callable[[ToolCall], str]]] = {
    "another secret": ("signature", lambda call: encode_call(call, build_context(), WRONG_KEYS)),
    "a changed argument": (
        "signature",
        lambda call: encode_call(call, build_context(), KEYS).replace("marks", "MARKS"),
    ),
    "another tenant": ("signature", lambda call: encode_call(call, build_context(), KEYS).replace('"acme"', '"evil"')),
    "a later deadline": (
        "signature",
        lambda call: encode_call(call, build_context(deadline_at=1.5), KEYS).replace("1.5", "9e9"),
    ),
    "no signature": ("malformed", lambda call: encode_call(call, build_context(), KEYS).split(".", 3)[3][1:]),
    "of the first version": ("version", lambda call: '{"v":1,"call":{},"context":{},"sig":"x"}'),
    "of a later version": ("version", lambda call: encode_call(call, build_context(), KEYS).replace("v3.", "v4.", 1)),
    "oversized": ("oversized", lambda call: encode_call(call, build_context(), KEYS) + " " * MAX_ENVELOPE_BYTES),
    "garbage": ("malformed", lambda call: "\x00" * 100),
    "for another tool": (
        "wrong_task",
        lambda call: encode_call(call.model_copy(update={"name": "bash_tool"}), build_context(), KEYS),
    ),
}


def publish_host_lost(attacker: Attacker, task: str) -> None:
    """Store and publish the record that a reaper writes about a call that waited in the queue of a lost host."""
    lost = {"exc_type": HOST_LOST_TYPE, "exc_message": ["the host is gone"], "exc_module": "toolcrew"}
    stored = json.dumps({"status": "FAILURE", "result": lost, "traceback": None, "children": [], "task_id": task})
    attacker.redis.set(result_key(task), stored, ex=60)
    attacker.redis.publish(result_key(task), stored)


HOST_LOST_FORGERIES: dict[str, Callable[[ToolCall], dict[str, str]]] = {
    "forged result": lambda _: {},
    "forged result and call record": lambda _: {"state": "lost", "holder": ""},
    "ticket with another secret": lambda call: {
        "state": "lost",
        "holder": "",
        "ticket": seal_ticket(WRONG_KEYS, "acme", call.id, 1),
    },
    "ticket of another call": lambda _: {
        "state": "lost",
        "holder": "",
        "ticket": seal_ticket(KEYS, "acme", "another", 1),
    },
    "ticket of another attempt": lambda call: {
        "state": "lost",
        "holder": "",
        "ticket": seal_ticket(KEYS, "acme", call.id, 2),
    },
}


@pytest.mark.parametrize("forgery", HOST_LOST_FORGERIES)
async def test_a_forged_host_loss_does_not_repeat_a_running_call(
    attacker: Attacker, tmp_path: Path, forgery: str
) -> None:
    call, gate, key = attacker.call(), tmp_path / "gate", ""
    os.mkfifo(gate)
    call = call.model_copy(update={"arguments": {**call.arguments, "gate": str(gate)}})
    sending = asyncio.create_task(dispatch(attacker, call))
    try:
        await wait_until_async(lambda: attacker.pool.acted(call.id), SOON_S, attacker.pool.log)
        key = call_key("default", "acme", call.id)
        if HOST_LOST_FORGERIES[forgery](call):
            attacker.redis.hset(key, mapping=HOST_LOST_FORGERIES[forgery](call))  # type: ignore[arg-type]
        publish_host_lost(attacker, (attacker.redis.hget(key, "task") or b"").decode())
        await wait_until_async(lambda: sending.done() or attacker.pool.acted(call.id) > 1, SOON_S, attacker.pool.log)
        assert attacker.pool.acted(call.id) == 1
        result = await sending
        assert result.error_code is ErrorCode.OUTCOME_UNKNOWN
        assert "may or may not have acted" in str(result.error)
    finally:
        sending.cancel()
        os.close(os.open(gate, os.O_RDWR | os.O_NONBLOCK))


@pytest.mark.parametrize("forgery", FORGERIES)
def test_a_message_without_a_valid_signature_is_refused_and_counted(attacker: Attacker, forgery: str) -> None:
    reason, forge = FORGERIES[forgery]
    call, before = attacker.call(), attacker.count_refusals(reason)
    attacker.push(forge(call), call)
    state = attacker.await_state(call)
    assert (state["status"], state["result"]["exc_type"]) == ("FAILURE", "EnvelopeRefused")
    assert attacker.count_refusals(reason) == before + 1
    assert attacker.pool.acted(call.id) == 0


def test_a_call_queued_twice_runs_once_and_keeps_its_result(attacker: Attacker) -> None:
    call, before = attacker.call(), attacker.count_refusals("repeated")
    message = attacker.message(encode_call(call, build_context(), KEYS), call.id)
    attacker.redis.lpush(POOL_WEB, message, message)
    assert attacker.await_result(call).success
    wait_until(lambda: attacker.count_refusals("repeated") == before + 1, SOON_S, attacker.pool.log)
    assert attacker.await_result(call).success
    assert attacker.pool.acted(call.id) == 1


async def test_a_copied_call_does_not_run_again_after_its_end(attacker: Attacker) -> None:
    call, before = attacker.call(), attacker.count_refusals("repeated")
    assert (await dispatch(attacker, call)).success
    attacker.push(encode_call(call, build_context(), KEYS), call)
    wait_until(lambda: attacker.count_refusals("repeated") == before + 1, SOON_S, attacker.pool.log)
    assert attacker.pool.acted(call.id) == 1
    assert stored_state(attacker.redis, attacker.task_id(call.id)) is None


def test_an_expired_call_is_answered_with_a_timeout_and_does_not_run(attacker: Attacker) -> None:
    call = attacker.call()
    attacker.push(encode_call(call, build_context(deadline_at=time.time() - 1), KEYS), call)
    result = attacker.await_result(call)
    assert (result.error_code, attacker.pool.acted(call.id)) == (ErrorCode.TIMEOUT, 0)


def test_a_call_for_a_session_on_another_host_or_of_another_tenant_does_not_run(attacker: Attacker) -> None:
    # A key that only a worker of a sandbox host may read. This worker has the role here.
    attacker.redis.acl_setuser("web", enabled=True, keys=["toolcrew:default:t:*:session.*:place"])
    place = {"state": "open", "queue": "host.b.1", "fence": "2"}
    attacker.redis.hset(location_key("default", "acme", "s1"), mapping=place)
    for fields in ({"session": "s1", "fence": 1}, {"session": "s1", "fence": 2, "tenant": "rival"}):
        call = attacker.call()
        attacker.push(encode_call(call, build_context(**fields), KEYS), call)
        result = attacker.await_result(call)
        assert (result.error_code, attacker.pool.acted(call.id)) == (ErrorCode.HOST_LOST, 0)


def test_a_call_of_an_unregistered_tenant_is_refused_and_counted(attacker: Attacker) -> None:

    def is_refused() -> bool:
        call = attacker.call()
        attacker.push(encode_call(call, build_context(tenant="stranger"), KEYS), call)
        return attacker.await_result(call).error_code is ErrorCode.UNKNOWN_TENANT

    # The tenant stays registered. A worker that has loaded tenants refuses every call when Redis has no tenants any
    # more.
    attacker.redis.hset(tenants_key("default"), "acme", seal_policy(KEYS, "acme", TenantPolicy()))
    # A process reads the tenants once a second.
    wait_until(is_refused, SOON_S, attacker.pool.log)
    call, before = attacker.call(), attacker.count_refusals("wrong_tenant")
    attacker.push(encode_call(call, build_context(tenant="stranger"), KEYS), call)
    result = attacker.await_result(call)
    assert (result.error_code, attacker.pool.acted(call.id)) == (ErrorCode.UNKNOWN_TENANT, 0)
    assert attacker.count_refusals("wrong_tenant") == before + 1


def test_a_forged_cancel_order_has_no_effect(attacker: Attacker) -> None:
    before = attacker.count_refusals("signature")
    order = ToolCall(id=secrets.token_hex(8), name="session.cancel", arguments={"call_id": "c1"})
    attacker.redis.lpush(control_queue(POOL_WEB), encode_call(order, build_context(), SigningKeys.of("a guess")))
    wait_until(lambda: attacker.count_refusals("signature") == before + 1, SOON_S, attacker.pool.log)
    assert not attacker.redis.exists(call_key("default", "acme", "c1"))


@pytest.fixture
def broken_redis(attacker: Attacker) -> Iterator[Callable[..., None]]:
    """Yield a function that makes Redis refuse commands that change it. Redis works normally again on exit."""
    yield lambda *command: attacker.redis.execute_command(*command)
    attacker.redis.config_set("maxmemory", 0)
    attacker.redis.execute_command("REPLICAOF", "NO", "ONE")


@pytest.mark.parametrize(
    ("cripple", "code"),
    [
        (("CONFIG", "SET", "maxmemory", "1"), ErrorCode.BROKER_FULL),
        (("REPLICAOF", "127.0.0.1", "1"), ErrorCode.BROKER_UNAVAILABLE),
    ],
    ids=["full", "read-only"],
)
async def test_a_redis_that_refuses_writes_is_reported_and_no_call_runs(
    attacker: Attacker, broken_redis: Callable[..., None], cripple: tuple[str, ...], code: ErrorCode
) -> None:
    call = attacker.call()
    async with open_pool(attacker.pool.broker, queue_wait_s=5) as opened:
        broken_redis(*cripple)
        result = await opened.dispatcher.dispatch(Request(call, *ROUTE))
        assert result.error_code is code, result
    assert attacker.pool.acted(call.id) == 0


@pytest.mark.parametrize(
    "command", ["shutdown", "pool_shrink", "add_consumer", "rate_limit", "revoke", "time_limit", "terminate"]
)
def test_celery_control_commands_have_no_effect(attacker: Attacker, command: str) -> None:
    app = Celery("attacker", broker=attacker.server.url("admin"), set_as_current=False)
    arguments = {
        "n": 5,
        "queue": "pool.other",
        "task_name": "tool.append_tool",
        "rate_limit": "1/h",
        "task_id": "x",
        "signal": "KILL",
        "soft": 1,
    }
    try:
        # A worker that is reconnecting at this moment receives no message.
        ask = partial(app.control.broadcast, command, arguments=arguments, reply=True, timeout=2, limit=1)
        assert "is not served here" in str(wait_until(ask, SOON_S, attacker.pool.log))
        assert attacker.pool.worker.poll() is None
    finally:
        app.close()


async def test_after_all_attacks_a_call_succeeds_and_no_redis_user_lacked_a_right(attacker: Attacker) -> None:
    call = attacker.call()
    assert (await dispatch(attacker, call)).success
    assert attacker.pool.acted(call.id) == 1
    denied = [(entry["username"], entry["reason"], entry["object"]) for entry in acl_log(attacker.redis)]
    assert denied == []


def acl_log(client: "redis.Redis") -> list[dict[str, str]]:
    """Return the commands that Redis refused its users."""
    return [
        {_text(name): _text(value) for name, value in entry.items()} for entry in client.execute_command("ACL", "LOG")
    ]


def _text(value: object) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
