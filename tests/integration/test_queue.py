"""The queue is not trusted. Invalid calls never run, executed calls never run again, and late calls never start."""

import asyncio
import base64
import json
import os
import pickle
import signal
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import redis

from tests.support.records.builders import build_attempt
from tests.support.redis.raw_queue import make_envelope, open_dispatcher, publish, stored_result, stored_state
from tests.support.stack.stack import Stack, all_of, is_alive
from tests.support.stack.waiting import SOON_S, wait_until_async
from toolcrew.contract.calls import ToolCall
from toolcrew.contract.errors import ErrorCode
from toolcrew.contract.names import call_key, refusals_key
from toolcrew.contract.signing import SigningKeys
from toolcrew.orchestrator.dispatch.celery_transport import build_message
from toolcrew.orchestrator.dispatch.request import Request
from toolcrew.orchestrator.sdk.client import ToolClient
from toolcrew.orchestrator.sessions.session import Session
from toolcrew.store.call_records import CallState, parse_record

pytestmark = pytest.mark.stack


@pytest.fixture
def store(stack: Stack) -> Iterator["redis.Redis"]:
    with stack.open_redis() as opened:
        yield opened


def bash(command: str, call_id: str | None = None) -> ToolCall:
    return ToolCall(id=call_id or os.urandom(8).hex(), name="bash_tool", arguments={"command": command})


def refusals(store: "redis.Redis") -> Counter[str]:
    """Return the number of refusals so far, by reason."""
    result: Any = store.hgetall(refusals_key("default"))
    return Counter({name.decode(): int(count) for name, count in result.items()})


async def files_of(session: Session) -> str:
    return str((await session.call("bash_tool", {"command": "ls; cat log 2>/dev/null"})).metadata["stdout"])


async def wait_ended(store: "redis.Redis", task_id: str) -> dict[str, Any]:
    state: dict[str, Any] = await wait_until_async(
        lambda: stored_state(store, task_id), SOON_S, f"the worker has ended {task_id}"
    )
    return state


async def test_a_forged_envelope_never_runs_and_is_counted(
    stack: Stack, session: Session, store: "redis.Redis"
) -> None:
    queue = (await session.info()).queue
    where = {"tenant": session.tenant, "session": session.id}
    before = refusals(store)
    unsigned = make_envelope(stack.broker, bash("touch wrong-key"), **where, key=SigningKeys.of("a guess"))
    harmless = make_envelope(stack.broker, bash("touch harmless"), **where)
    version, key_id, signature, body = harmless.split(".", 3)
    late = make_envelope(stack.broker, bash("touch later"), **where, deadline_at=1000.5)
    forged = [
        ("tool.bash_tool", unsigned),
        ("tool.bash_tool", harmless.replace("harmless", "changed!")),
        ("tool.bash_tool", f"{version}.{key_id}.{'0' * len(signature)}.{body}"),
        ("tool.bash_tool", f"v1.{key_id}.{signature}.{body}"),
        ("tool.bash_tool", late.replace("1000.5", "9e9")),
        ("tool.read_tool", harmless),
        ("session.exec", harmless),
        ("tool.bash_tool", "not even JSON"),
        ("tool.bash_tool", {"call": "an object"}),
    ]

    states = [await wait_ended(store, publish(stack.broker, task, queue, envelope)) for task, envelope in forged]

    assert [state["status"] for state in states] == ["FAILURE"] * len(forged)
    assert {state["result"]["exc_type"] for state in states} == {"EnvelopeRefused"}
    assert await files_of(session) == ""
    assert refusals(store) - before == Counter({"signature": 4, "version": 1, "wrong_task": 2, "malformed": 2})


async def test_an_unknown_task_is_refused_and_the_worker_continues(
    stack: Stack, session: Session, store: "redis.Redis"
) -> None:
    """An orchestrator of another release may send such a task. The refusal is reported and counted, and the call is
    recorded as never started.
    """
    queue, before = (await session.info()).queue, refusals(store)
    call = ToolCall(id=os.urandom(8).hex(), name="future_tool", arguments={})
    envelope = make_envelope(stack.broker, call, tenant=session.tenant, session=session.id)

    state = await wait_ended(store, publish(stack.broker, "tool.future_tool", queue, envelope))

    assert (state["status"], state["result"]["exc_type"]) == ("FAILURE", "NotRegistered")

    def state_of_call() -> str:
        record: Any = parse_record(store.hgetall(call_key("default", session.tenant, call.id)))
        return record.state if record is not None else ""

    # A worker claims the call during its checks, and then withdraws the claim.
    await wait_until_async(
        lambda: state_of_call() == CallState.FORBIDDEN, SOON_S, "the record says that it will not start"
    )
    assert refusals(store) - before == Counter({"wrong_task": 1})
    assert (await session.call("bash_tool", {"command": "echo on"})).success


async def test_a_pickled_task_is_never_unpickled(stack: Stack, session: Session) -> None:
    """The attacker's aim: run Python code in the worker."""
    queue, proof = (await session.info()).queue, stack.footprint.folder / "unpickled"

    class Payload:
        def __reduce__(self) -> Any:
            return os.system, (f"touch {proof}",)

    message = {
        "body": base64.b64encode(pickle.dumps(((), {"envelope": Payload()}, {}))).decode(),
        "content-encoding": "binary",
        "content-type": "application/x-python-serialize",
        "headers": {"lang": "py", "task": "tool.bash_tool", "id": "pickled", "root_id": "pickled"},
        "properties": {
            "correlation_id": "pickled",
            "delivery_mode": 2,
            "delivery_info": {"exchange": "", "routing_key": queue},
            "priority": 0,
            "body_encoding": "base64",
            "delivery_tag": "pickled",
        },
    }
    with stack.open_redis() as store:
        before = refusals(store)
        store.lpush(queue, json.dumps(message))
        await wait_until_async(
            lambda: refusals(store) - before == Counter({"malformed": 1}), SOON_S, "the worker has refused the message"
        )

    assert (await session.call("bash_tool", {"command": "echo on"})).success
    assert not proof.exists()


def wrap_message(headers: dict[str, Any], body: str = "W10=") -> bytes:
    """Return a message in kombu's format, around content that Celery cannot use."""
    properties = {"delivery_tag": "g", "delivery_info": {"exchange": "", "routing_key": "g"}, "body_encoding": "base64"}
    plain = {
        "content-type": "application/json",
        "content-encoding": "utf-8",
        "headers": headers,
        "properties": properties,
    }
    return json.dumps({**plain, "body": body}).encode()


UNUSABLE_MESSAGES = (
    wrap_message({"task": "tool.bash_tool"}),
    wrap_message({"task": ["tool.bash_tool"], "id": "g"}),
    wrap_message({"task": "tool.bash_tool", "id": "g", "expires": [], "eta": {}}),
    wrap_message({"task": "tool.bash_tool", "id": "g", "timelimit": 5}),
    wrap_message({}),
    wrap_message({"task": "tool.bash_tool", "id": "g"}, body="not base64!"),
)
INVALID_MESSAGES = (
    *UNUSABLE_MESSAGES,
    b"{}",
    b'{"body": "eA==", "properties": {}}',
    b"garbage",
    b"[]",
    b"null",
    b"\xff\xfe\x00",
)


async def test_malformed_messages_in_the_queue_do_not_stop_the_worker(own_stack: Stack) -> None:
    async with ToolClient.connect(own_stack.redis_url) as client:
        session = await client.open_session()
        queue = (await session.info()).queue
        for garbage in INVALID_MESSAGES:
            with own_stack.open_redis() as store:
                store.lpush(queue, garbage)
                await wait_until_async(
                    lambda store=store: store.llen(queue) == 0, SOON_S, "the worker has taken the garbage"
                )
            ran = asyncio.create_task(session.call("bash_tool", {"command": "echo on"}))
            await wait_until_async(
                lambda ran=ran: ran.done() or not is_alive(own_stack.pid("worker")),
                SOON_S,
                "the worker serves again, or is dead",
            )
            assert is_alive(own_stack.pid("worker")), f"{garbage!r} has ended the worker"
            assert (await ran).success
        await session.close()


async def test_a_call_whose_id_was_used_by_another_client_has_an_unknown_outcome(
    stack: Stack, session: Session
) -> None:
    route = (session.tenant, session.id, (await session.info()).queue)
    first = await session.call("bash_tool", {"command": "echo ran >> log"}, call_id="twice-2")

    async with open_dispatcher(stack.broker) as other:
        second = await other.dispatch(Request(bash("echo ran >> log", "twice-2"), *route))

    assert first.success
    assert (second.success, second.error_code) == (False, ErrorCode.OUTCOME_UNKNOWN)
    assert await files_of(session) == "log\nran\n"


async def test_two_concurrent_calls_with_one_id_both_end_and_act_once(stack: Stack, session: Session) -> None:
    command = {"command": "echo ran >> log; sleep 1"}

    results = await all_of((session.call("bash_tool", command, call_id="twice-3", timeout_s=5) for _ in range(2)), 15)

    assert all(
        result.success or result.error_code in (ErrorCode.OUTCOME_UNKNOWN, ErrorCode.INVALID_ARGUMENTS)
        for result in results
    )
    assert await files_of(session) == "log\nran\n"


async def test_a_republished_envelope_acts_once_and_is_answered_once(
    stack: Stack, session: Session, store: "redis.Redis"
) -> None:
    """A genuine envelope is taken from the queue and published again."""
    queue, before = (await session.info()).queue, refusals(store)
    envelope = make_envelope(stack.broker, bash("echo ran >> log"), tenant=session.tenant, session=session.id)

    tasks = [publish(stack.broker, "tool.bash_tool", queue, envelope) for _ in range(3)]
    await wait_until_async(
        lambda: refusals(store) - before == Counter({"repeated": 2}), SOON_S, "the repetitions were dropped"
    )
    await wait_until_async(lambda: any(stored_state(store, task_id) for task_id in tasks), SOON_S, "the call has ended")

    [answer] = [result for task_id in tasks if (result := stored_result(store, task_id))]
    assert answer.success
    assert await files_of(session) == "log\nran\n"


async def test_a_message_that_redis_delivers_again_acts_once(
    stack: Stack, session: Session, store: "redis.Redis"
) -> None:
    """A Redis that comes back without its last second has forgotten, in queue and ledger, that the call runs."""
    queue, before = (await session.info()).queue, refusals(store)
    call = bash("echo ran >> log")
    envelope = make_envelope(stack.broker, call, tenant=session.tenant, session=session.id)
    message = build_message(
        build_attempt("bash_tool", queue=queue, tenant=session.tenant, call_id=call.id, envelope=envelope),
        "forged-again",
        "none",
    )

    for _ in range(2):
        store.delete(call_key("default", session.tenant, call.id))
        store.lpush(queue, message)
        await wait_ended(store, "forged-again")
    await wait_until_async(
        lambda: refusals(store) - before == Counter({"repeated": 1}), SOON_S, "the repetition was dropped"
    )

    assert await files_of(session) == "log\nran\n"


async def test_a_call_past_its_deadline_is_not_started(stack: Stack, session: Session, store: "redis.Redis") -> None:
    queue = (await session.info()).queue
    late = make_envelope(
        stack.broker, bash("touch late"), tenant=session.tenant, session=session.id, deadline_at=time.time() - 1
    )

    task_id = publish(stack.broker, "tool.bash_tool", queue, late)
    await wait_ended(store, task_id)

    result = stored_result(store, task_id)
    assert result is not None
    assert (result.success, result.error_code) == (False, ErrorCode.TIMEOUT)
    assert await files_of(session) == ""


async def test_a_call_that_waited_too_long_in_the_queue_times_out_and_does_not_run(
    stack: Stack, session: Session
) -> None:
    route = (session.tenant, session.id, (await session.info()).queue)
    worker = stack.pid("worker")
    async with open_dispatcher(stack.broker, queue_wait_s=1) as impatient:
        await session.call("bash_tool", {"command": "true"})
        os.kill(worker, signal.SIGSTOP)
        try:
            waiting = impatient.dispatch(Request(bash("touch late"), *route))
            result, _ = await all_of([waiting, _resume_after(worker, 2.5)], 30)
        finally:
            os.kill(worker, signal.SIGCONT)

    assert (result.success, result.error_code) == (False, ErrorCode.TIMEOUT)
    assert "was not run" in (result.error or "")
    assert await files_of(session) == ""


async def _resume_after(pid: int, after_s: float) -> None:
    await asyncio.sleep(after_s)
    os.kill(pid, signal.SIGCONT)


async def test_a_call_that_no_worker_takes_times_out_soon(stack: Stack) -> None:
    """The record shows that no worker took the call before its deadline. So the call did not run and never will."""
    started = time.monotonic()
    async with open_dispatcher(stack.broker, queue_wait_s=1) as impatient:
        result = await impatient.dispatch(Request(bash("true"), "default", "none", "host.unknown.0"))

    assert (result.success, result.error_code) == (False, ErrorCode.TIMEOUT), result.error
    assert time.monotonic() - started < 25
    with stack.open_redis() as store:
        store.delete("host.unknown.0")
