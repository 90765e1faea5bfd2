"""Publishing of a call to its queue by one script, on a real Redis: the checks, the stored records, and the guarantee
that nothing is sent twice.
"""

import asyncio
import base64
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
import redis
import redis.asyncio
from redis.exceptions import RedisError, ResponseError

from contract.calls import LONGEST_TIMEOUT_S, MAX_TIMEOUT_S
from contract.errors import BrokerUnavailable
from contract.names import call_key, host_key, place_key, tenant_sessions_key
from contract.session_locations import LOCATION_MARGIN_S
from orchestrator.dispatch.celery_transport import build_call_message
from orchestrator.dispatch.request import Attempt
from store import call_messages as publishing
from store.call_messages import NotSent, Publisher
from store.calls import CALL_TTL_S, CallState, CallStore, parse_record
from store.connection import ScriptConnection, SharedClock, Unanswered
from tests.builders import build_attempt
from tests.conftest import RedisProcess

QUEUE = "host.a.b00t"
PLACE = place_key("d", "acme", "s1")
HOST = host_key("d", QUEUE)
IN_SESSION = {"session": "s1", "fence": 3}


@pytest.fixture
async def publisher(redis_server: RedisProcess) -> AsyncIterator[Publisher]:
    client = redis.asyncio.Redis.from_url(redis_server.url, socket_timeout=5)
    scripts = ScriptConnection(client)
    yield Publisher(scripts, "d", SharedClock())
    await scripts.aclose()
    await client.aclose()


@pytest.fixture
def server(redis_server: RedisProcess) -> "redis.Redis":
    """Redis in the state where session s1 of acme is on the live host of QUEUE, with fence 3."""
    client = redis_server.client()
    client.hset(PLACE, mapping={"state": "open", "queue": QUEUE, "fence": 3, "ttl_s": "900.5"})
    client.expire(PLACE, 60)
    client.set(HOST, "{}", ex=10)
    return client


def attempt(call_id: str = "c1", **fields: Any) -> Attempt:
    return build_attempt("read_tool", **{"call_id": call_id, "queue": QUEUE, "envelope": '{"v":2}', **fields})


def record(server: "redis.Redis", call_id: str = "c1") -> Any:
    fields: Any = server.hgetall(call_key("d", "acme", call_id))
    return parse_record(fields)


async def forbid(server: "redis.Redis", attempt: int = 1) -> str:
    options = server.get_connection_kwargs()
    client = redis.asyncio.Redis(host=options["host"], port=options["port"], password=options["password"])
    try:
        return await CallStore(client, "d").forbid("acme", "c1", attempt)
    finally:
        await client.aclose()


async def reason_of(publisher: Publisher, call: Attempt) -> str | None:
    try:
        await publisher.publish(build_call_message(call, "hub-task", "d"))
    except NotSent as refused:
        return refused.reason
    return None


async def test_a_call_is_in_its_queue_and_in_the_ledger(publisher: Publisher, server: "redis.Redis") -> None:
    await publisher.publish(build_call_message(attempt(**IN_SESSION), "hub-task", "d"))
    [message] = [json.loads(item) for item in server.lrange(QUEUE, 0, -1)]
    assert (message["headers"]["id"], message["headers"]["task"]) == ("hub-task", "tool.read_tool")
    assert json.loads(base64.b64decode(message["body"]))[1] == {"envelope": '{"v":2}'}
    stored = record(server)
    assert stored.state == CallState.QUEUED
    assert stored.attempt == 1
    assert stored.tool == "read_tool"
    assert stored.session == "s1"
    assert stored.queue == QUEUE
    assert abs(stored.queued_at - time.time()) < 30
    assert 0 < server.ttl(call_key("d", "acme", "c1")) <= CALL_TTL_S


async def test_a_call_of_a_pool_needs_neither_host_nor_place(publisher: Publisher, redis_server: RedisProcess) -> None:
    await publisher.publish(build_call_message(attempt(queue="pool.web"), "hub-task", "d"))
    with redis_server.client() as client:
        assert client.llen("pool.web") == 1
        assert record(client).session == ""


async def test_each_call_renews_the_location_of_its_session(publisher: Publisher, server: "redis.Redis") -> None:
    await publisher.publish(build_call_message(attempt(**IN_SESSION), "hub-task", "d"))
    assert 901 + LOCATION_MARGIN_S - 30 < server.ttl(PLACE) <= 901 + LOCATION_MARGIN_S


async def test_a_location_lives_as_long_as_the_longest_call_of_its_session(
    publisher: Publisher, server: "redis.Redis"
) -> None:
    kept_s = 901 + LOCATION_MARGIN_S + LONGEST_TIMEOUT_S - MAX_TIMEOUT_S
    for call_id, timeout_s in (("long", LONGEST_TIMEOUT_S), ("short", 5)):
        call = attempt(call_id, timeout_s=timeout_s, **IN_SESSION)
        await publisher.publish(build_call_message(call, f"hub-{call_id}", "d"))
        assert kept_s - 30 < server.ttl(PLACE) <= kept_s
        assert server.ttl(tenant_sessions_key("d", "acme")) in (-2, server.ttl(PLACE))


@pytest.mark.parametrize(("before", "after"), [(60, 901 + LOCATION_MARGIN_S), (50_000, 50_000)])
async def test_each_call_renews_the_list(publisher: Publisher, server: "redis.Redis", before: int, after: int) -> None:
    names = tenant_sessions_key("d", "acme")
    server.sadd(names, "s1")
    server.expire(names, before)
    await publisher.publish(build_call_message(attempt(**IN_SESSION), "hub-task", "d"))
    assert after - 30 < server.ttl(names) <= after


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"state": "open"}, None),
        ({"state": "moving"}, None),
        ({"state": "closed"}, "moved"),
        ({"fence": 4}, "moved"),
        ({"queue": "host.b.b00t"}, "moved"),
        ({"queue": ""}, "moved"),
        (None, "moved"),
    ],
    ids=str,
)
async def test_a_sessions_call_goes_only_where_the_session_is(
    publisher: Publisher, server: "redis.Redis", change: dict[str, Any] | None, reason: str | None
) -> None:
    if change is None:
        server.delete(PLACE)
    else:
        server.hset(PLACE, mapping=change)
    assert await reason_of(publisher, attempt(**IN_SESSION)) == reason
    assert server.llen(QUEUE) == (0 if reason else 1)
    assert (record(server) is None) is bool(reason)


async def test_nothing_is_sent_to_a_host_that_does_not_report(publisher: Publisher, server: "redis.Redis") -> None:
    server.delete(HOST)
    assert await reason_of(publisher, attempt(**IN_SESSION)) == "host_lost"
    assert server.llen(QUEUE) == 0
    assert record(server) is None


@pytest.mark.parametrize("state", list(CallState))
async def test_a_used_call_id_is_not_sent(publisher: Publisher, server: "redis.Redis", state: CallState) -> None:
    await publisher.publish(build_call_message(attempt(), "hub-task", "d"))
    server.hset(call_key("d", "acme", "c1"), "state", state.value)
    assert await reason_of(publisher, attempt()) == "duplicate"
    assert server.llen(QUEUE) == 1


async def test_two_tenants_may_use_one_call_id(publisher: Publisher, server: "redis.Redis") -> None:
    await publisher.publish(build_call_message(attempt(), "hub-task", "d"))
    await publisher.publish(build_call_message(attempt(tenant="other"), "hub-task-2", "d"))
    assert server.llen(QUEUE) == 2


async def test_a_renewed_call_is_sent_once_as_a_new_attempt(publisher: Publisher, server: "redis.Redis") -> None:
    await publisher.publish(build_call_message(attempt(), "hub-task", "d"))
    server.hset(
        call_key("d", "acme", "c1"),
        mapping={"state": "queued", "attempt": 2, "holder": "host.a.b00t/w1", "started_at": "5"},
    )
    second = attempt(number=2)
    assert [await reason_of(publisher, second), await reason_of(publisher, second)] == [None, "duplicate"]
    assert server.llen(QUEUE) == 2
    stored = record(server)
    assert (stored.attempt, stored.state, stored.holder, stored.started_at) == (2, CallState.QUEUED, "", 0.0)


@pytest.mark.parametrize(
    "fields", [{"state": "running", "attempt": 2}, {"state": "queued", "attempt": 3}, {"state": "queued", "attempt": 1}]
)
async def test_an_unexpected_attempt_fails(publisher: Publisher, server: "redis.Redis", fields: dict[str, Any]) -> None:
    server.hset(call_key("d", "acme", "c1"), mapping=fields)
    assert await reason_of(publisher, attempt(number=2)) == "duplicate"
    assert server.llen(QUEUE) == 0


async def test_concurrent_calls_keep_their_order(publisher: Publisher, server: "redis.Redis") -> None:
    server.config_resetstat()
    await asyncio.gather(
        *(publisher.publish(build_call_message(attempt(f"c{number}"), f"hub-{number}", "d")) for number in range(500))
    )
    sent = [json.loads(item)["headers"]["id"] for item in server.lrange(QUEUE, 0, -1)]
    assert sent == [f"hub-{number}" for number in reversed(range(500))]


async def test_lost_scripts_are_loaded_again(publisher: Publisher, server: "redis.Redis") -> None:
    await publisher.publish(build_call_message(attempt("c1"), "hub-1", "d"))
    server.script_flush()
    await asyncio.gather(
        *(publisher.publish(build_call_message(attempt(f"d{number}"), f"hub-{number}", "d")) for number in range(3))
    )
    assert server.llen(QUEUE) == 4


async def test_the_shared_clock_learns_the_time_of_redis(redis_server: RedisProcess) -> None:
    client = redis.asyncio.Redis.from_url(redis_server.url)
    clock = SharedClock(lambda: time.time() - 60)
    scripts = ScriptConnection(client)
    await Publisher(scripts, "d", clock).publish(build_call_message(attempt(), "hub-task", "d"))
    await scripts.aclose()
    await client.aclose()
    assert 55 < clock.offset_s < 65


async def test_a_cancelled_call_is_not_sent(publisher: Publisher, server: "redis.Redis") -> None:
    sending = asyncio.create_task(publisher.publish(build_call_message(attempt("c1"), "hub-1", "d")))
    cancelled = asyncio.create_task(publisher.publish(build_call_message(attempt("c2"), "hub-2", "d")))
    await asyncio.sleep(0)
    cancelled.cancel()
    await asyncio.gather(sending, cancelled, return_exceptions=True)
    await publisher.publish(build_call_message(attempt("c3"), "hub-3", "d"))
    assert [json.loads(item)["headers"]["id"] for item in server.lrange(QUEUE, 0, -1)] == ["hub-3", "hub-1"]


async def test_after_a_restart_of_redis_the_next_call_is_sent(publisher: Publisher, redis_server: RedisProcess) -> None:
    await publisher.publish(build_call_message(attempt("c1"), "hub-1", "d"))
    await asyncio.to_thread(redis_server.stop)
    await asyncio.to_thread(redis_server.start)
    await publisher.publish(build_call_message(attempt("c2"), "hub-2", "d"))
    with redis_server.client() as client:
        assert client.llen(QUEUE) == 2


@pytest.mark.parametrize("is_connected", [False, True])
async def test_a_stopped_redis_is_reported_as_not_sent(
    publisher: Publisher, redis_server: RedisProcess, monkeypatch: pytest.MonkeyPatch, is_connected: bool
) -> None:
    monkeypatch.setattr(publishing, "SEND_WAIT_S", 0.1)
    if is_connected:
        await publisher.publish(build_call_message(attempt("c1"), "hub-1", "d"))
    await asyncio.to_thread(redis_server.stop)
    try:
        with pytest.raises(BrokerUnavailable, match="was not sent"):
            await asyncio.wait_for(publisher.publish(build_call_message(attempt("c2"), "hub-2", "d")), 20)
    finally:
        await asyncio.to_thread(redis_server.start)


async def test_a_full_redis_refuses_the_call(publisher: Publisher, server: "redis.Redis") -> None:
    server.config_set("maxmemory", 1024)
    try:
        with pytest.raises(BrokerUnavailable, match="was not sent"):
            await publisher.publish(build_call_message(attempt(), "hub-task", "d"))
    finally:
        server.config_set("maxmemory", 0)
    assert server.llen(QUEUE) == 0
    assert record(server) is None


async def test_a_read_only_redis_refuses_the_call(publisher: Publisher, server: "redis.Redis") -> None:
    server.replicaof("127.0.0.1", "1")
    try:
        with pytest.raises(BrokerUnavailable, match="was not sent"):
            await publisher.publish(build_call_message(attempt(), "hub-task", "d"))
    finally:
        server.replicaof("NO", "ONE")


class Cutting:
    """A proxy between a publisher and Redis: forwards requests, and closes the connection instead of returning the
    first replies.
    """

    def __init__(self, server: RedisProcess, cuts: int) -> None:
        self._server = server
        self._cuts = cuts
        self.url = ""

    async def __aenter__(self) -> "Cutting":
        self._relay = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        port = self._relay.sockets[0].getsockname()[1]
        self.url = f"redis://:{self._server.password}@127.0.0.1:{port}/0"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._relay.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        theirs, ours = await asyncio.open_connection("127.0.0.1", self._server.port)
        has_published = False
        while data := await reader.read(65536):
            has_published = has_published or b"EVAL" in data
            ours.write(data)
            answer = await theirs.read(65536)
            if has_published and b"sent" in answer and self._cuts:
                self._cuts -= 1
                break
            writer.write(answer)
        writer.close()
        ours.close()


@pytest.mark.parametrize("cuts", [1, 3])
async def test_a_publish_whose_answer_was_lost_is_repeated_and_sent_once(redis_server: RedisProcess, cuts: int) -> None:
    """The danger of a lost reply: a call that runs twice, or a running call that was reported as not sent."""
    async with Cutting(redis_server, cuts) as relay:
        client = redis.asyncio.Redis.from_url(relay.url, socket_timeout=5)
        scripts = ScriptConnection(client)
        await Publisher(scripts, "d", SharedClock()).publish(build_call_message(attempt(), "hub-task", "d"))
        await scripts.aclose()
        await client.aclose()
    with redis_server.client() as server:
        assert server.llen(QUEUE) == 1


async def test_a_publish_whose_answer_was_lost_is_seen_even_when_the_call_has_ended_by_then(
    publisher: Publisher, server: "redis.Redis", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publishing.random, "getrandbits", lambda _: 5)
    await publisher.publish(build_call_message(attempt(), "hub-task", "d"))
    server.hset(call_key("d", "acme", "c1"), "state", "done")
    server.delete(HOST)
    assert await reason_of(publisher, attempt(**IN_SESSION)) is None
    assert server.llen(QUEUE) == 1


@pytest.mark.parametrize("has_run", [True, False])
async def test_an_uncertain_send_is_repeated_and_not_reported_as_unsent(
    publisher: Publisher, server: "redis.Redis", monkeypatch: pytest.MonkeyPatch, has_run: bool
) -> None:
    """A caller that reads "not sent" makes the call again while the first call runs."""
    post = publisher._post
    errors: list[RedisError] = [
        Unanswered("cut", may_have_run=True),
        ResponseError("BUSY Redis is busy running a script"),
    ]

    async def lose_an_answer(keys: list[str], arguments: list[str | int]) -> str:
        verdict = await post(keys, arguments) if not errors or (has_run and len(errors) == 2) else ""
        if errors:
            raise errors.pop(0)
        return verdict

    monkeypatch.setattr(publisher, "_post", lose_an_answer)
    await asyncio.wait_for(publisher.publish(build_call_message(attempt(), "hub-task", "d")), 20)
    assert server.llen(QUEUE) == 1


async def test_closing_ends_who_waits_for_a_redis_that_is_silent(redis_server: RedisProcess) -> None:
    connected = asyncio.Event()
    silent = await asyncio.start_server(lambda reader, writer: connected.set(), "127.0.0.1", 0)
    port = silent.sockets[0].getsockname()[1]
    client = redis.asyncio.Redis(port=port)
    scripts = ScriptConnection(client)
    publisher = Publisher(scripts, "d", SharedClock())
    sending = asyncio.create_task(publisher.publish(build_call_message(attempt(), "hub-task", "d")))
    await asyncio.wait_for(connected.wait(), 10)
    await scripts.aclose()
    with pytest.raises(BrokerUnavailable, match="closed"):
        await asyncio.wait_for(sending, 10)
    await client.aclose()
    silent.close()


# Forbidding


async def test_a_waiting_call_is_forbidden_and_says_that_it_waited(publisher: Publisher, server: "redis.Redis") -> None:
    await publisher.publish(build_call_message(attempt(), "hub-task", "d"))
    assert [await forbid(server), await forbid(server)] == ["queued", "forbidden"]
    assert record(server).state is CallState.FORBIDDEN


async def test_an_unknown_call_is_forbidden(publisher: Publisher, server: "redis.Redis") -> None:
    assert await forbid(server) == "queued"
    assert record(server).state is CallState.FORBIDDEN
    assert server.ttl(call_key("d", "acme", "c1")) > 0


@pytest.mark.parametrize("state", ["running", "done", "lost", "unknown"])
async def test_a_call_that_has_started_stays_as_it_is(publisher: Publisher, server: "redis.Redis", state: str) -> None:
    server.hset(call_key("d", "acme", "c1"), mapping={"state": state, "attempt": 1})
    assert await forbid(server) == state
    assert record(server).state == state


async def test_another_attempt_is_not_forbidden_by_the_one_before(publisher: Publisher, server: "redis.Redis") -> None:
    server.hset(call_key("d", "acme", "c1"), mapping={"state": "queued", "attempt": 2})
    assert await forbid(server, attempt=1) == "superseded"
    assert record(server).state is CallState.QUEUED


@pytest.mark.parametrize(
    ("state", "expected"), [("queued", "queued"), ("lost", "queued"), ("running", "superseded"), ("done", "superseded")]
)
async def test_a_lost_renewal_is_forbidden(
    publisher: Publisher, server: "redis.Redis", state: str, expected: str
) -> None:
    server.hset(call_key("d", "acme", "c1"), mapping={"state": state, "attempt": 1})
    assert await forbid(server, attempt=2) == expected
    stored = record(server)
    assert (stored.state, stored.attempt) == (
        (CallState.FORBIDDEN, 2) if expected == "queued" else (CallState(state), 1)
    )
