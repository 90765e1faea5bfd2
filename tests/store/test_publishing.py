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

from tests.conftest import RedisProcess
from tests.support.records.builders import build_attempt, publish_arguments
from tests.support.stack.waiting import SOON_S
from toolcrew.contract.calls import LONGEST_TIMEOUT_S, MAX_TIMEOUT_S
from toolcrew.contract.errors import BrokerUnavailable
from toolcrew.contract.names import call_key, host_key, location_key, tenant_sessions_key
from toolcrew.contract.session_locations import LOCATION_MARGIN_S
from toolcrew.orchestrator.dispatch.request import Attempt
from toolcrew.store import call_messages as publishing
from toolcrew.store.call_messages import NotSent, Publisher
from toolcrew.store.call_records import CALL_TTL_S, CallState, parse_record
from toolcrew.store.calls import CallStore, FinishedCalls
from toolcrew.store.clock import SharedClock
from toolcrew.store.scripts import ReplyMissing, ScriptConnection, Value
from toolcrew.store.usage import CallEnding, UsageStore, sum_rows

QUEUE = "host.a.b00t"
LOCATION = location_key("d", "acme", "s1")
HOST = host_key("d", QUEUE)
SESSION_FIELDS = {"session": "s1", "fence": 3}


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
    client.hset(LOCATION, mapping={"state": "open", "queue": QUEUE, "fence": 3, "ttl_s": "900.5"})
    client.expire(LOCATION, 60)
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
        await publisher.publish(*publish_arguments(call, "hub-task"))
    except NotSent as refused:
        return refused.reason
    return None


async def test_publish_writes_the_message_and_the_call_record(publisher: Publisher, server: "redis.Redis") -> None:
    await publisher.publish(*publish_arguments(attempt(**SESSION_FIELDS), "hub-task"))
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


async def test_a_call_that_is_sent_again_after_its_end_is_in_the_usage_once(
    publisher: Publisher, server: "redis.Redis", redis_server: RedisProcess
) -> None:
    ended = FinishedCalls(server)
    async with redis.asyncio.Redis.from_url(redis_server.url) as client:
        for number in (1, 2):
            await publisher.publish(*publish_arguments(attempt(number=number), f"hub-{number}"))
            assert ended.store(
                f"hub-{number}", "{}", 60, CallEnding(deployment="d", tenant="acme", call="c1", attempt=number)
            )
            assert await CallStore(client, "d").renew("acme", "c1", number)
        rows = await UsageStore(client, "d").read("acme", time.time() - 3600, time.time() + 3600)
    assert sum_rows(rows)["calls"] == 1


async def test_session_location_outlives_the_longest_call(publisher: Publisher, server: "redis.Redis") -> None:
    location_s = 901 + LOCATION_MARGIN_S
    longest_s = location_s + LONGEST_TIMEOUT_S - MAX_TIMEOUT_S
    for call_id, timeout_s, expected_s in (
        ("a", 5, location_s),
        ("b", LONGEST_TIMEOUT_S, longest_s),
        ("c", 5, longest_s),
    ):
        call = attempt(call_id, timeout_s=timeout_s, **SESSION_FIELDS)
        await publisher.publish(*publish_arguments(call, f"hub-{call_id}"))
        assert expected_s - 30 < server.ttl(LOCATION) <= expected_s
        assert server.ttl(tenant_sessions_key("d", "acme")) in (-2, server.ttl(LOCATION))


@pytest.mark.parametrize(("before", "after"), [(60, 901 + LOCATION_MARGIN_S), (50_000, 50_000)])
async def test_each_call_extends_the_session_list_ttl(
    publisher: Publisher, server: "redis.Redis", before: int, after: int
) -> None:
    names = tenant_sessions_key("d", "acme")
    server.sadd(names, "s1")
    server.expire(names, before)
    await publisher.publish(*publish_arguments(attempt(**SESSION_FIELDS), "hub-task"))
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
        (LOCATION, "moved"),
        (HOST, "host_lost"),
    ],
    ids=str,
)
async def test_session_call_is_sent_only_to_the_current_host(
    publisher: Publisher, server: "redis.Redis", change: dict[str, Any] | str, reason: str | None
) -> None:
    """A key instead of a change is deleted."""
    if isinstance(change, str):
        server.delete(change)
    else:
        server.hset(LOCATION, mapping=change)
    assert await reason_of(publisher, attempt(**SESSION_FIELDS)) == reason
    assert server.llen(QUEUE) == (0 if reason else 1)
    assert (record(server) is None) is bool(reason)


@pytest.mark.parametrize("state", list(CallState))
async def test_used_call_id_is_refused_as_duplicate(
    publisher: Publisher, server: "redis.Redis", state: CallState
) -> None:
    await publisher.publish(*publish_arguments(attempt(queue="pool.web"), "hub-task"))
    assert record(server).session == ""
    server.hset(call_key("d", "acme", "c1"), "state", state.value)
    assert await reason_of(publisher, attempt(queue="pool.web")) == "duplicate"
    # Another tenant may use the same id.
    assert await reason_of(publisher, attempt(queue="pool.web", tenant="other")) is None
    assert server.llen("pool.web") == 2


async def test_new_attempt_of_a_call_is_sent_once(publisher: Publisher, server: "redis.Redis") -> None:
    await publisher.publish(*publish_arguments(attempt(), "hub-task"))
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
async def test_unexpected_attempt_number_is_refused(
    publisher: Publisher, server: "redis.Redis", fields: dict[str, Any]
) -> None:
    server.hset(call_key("d", "acme", "c1"), mapping=fields)
    assert await reason_of(publisher, attempt(number=2)) == "duplicate"
    assert server.llen(QUEUE) == 0


async def test_flushed_scripts_are_loaded_again(publisher: Publisher, server: "redis.Redis") -> None:
    await publisher.publish(*publish_arguments(attempt("c1"), "hub-1"))
    server.script_flush()
    await asyncio.gather(
        *(publisher.publish(*publish_arguments(attempt(f"d{number}"), f"hub-{number}")) for number in range(3))
    )
    assert server.llen(QUEUE) == 4


async def test_publish_updates_the_shared_clock_from_redis(redis_server: RedisProcess) -> None:
    client = redis.asyncio.Redis.from_url(redis_server.url)
    clock = SharedClock(lambda: time.time() - 60)
    scripts = ScriptConnection(client)
    await Publisher(scripts, "d", clock).publish(*publish_arguments(attempt(), "hub-task"))
    await scripts.aclose()
    await client.aclose()
    assert 55 < clock.offset_s < 65


@pytest.mark.parametrize("is_connected", [False, True])
async def test_publish_to_a_stopped_redis_reports_not_sent(
    publisher: Publisher, redis_server: RedisProcess, monkeypatch: pytest.MonkeyPatch, is_connected: bool
) -> None:
    monkeypatch.setattr(publishing, "SEND_WAIT_S", 0.1)
    if is_connected:
        await publisher.publish(*publish_arguments(attempt("c1"), "hub-1"))
    await asyncio.to_thread(redis_server.stop)
    try:
        with pytest.raises(BrokerUnavailable, match="was not sent"):
            await asyncio.wait_for(publisher.publish(*publish_arguments(attempt("c2"), "hub-2")), SOON_S)
    finally:
        await asyncio.to_thread(redis_server.start)


async def test_publish_to_a_full_or_read_only_redis_reports_not_sent(
    publisher: Publisher, server: "redis.Redis"
) -> None:
    server.config_set("maxmemory", 1024)
    try:
        with pytest.raises(BrokerUnavailable, match="was not sent"):
            await publisher.publish(*publish_arguments(attempt(), "hub-task"))
    finally:
        server.config_set("maxmemory", 0)
    server.replicaof("127.0.0.1", "1")
    try:
        with pytest.raises(BrokerUnavailable, match="was not sent"):
            await publisher.publish(*publish_arguments(attempt(), "hub-task"))
    finally:
        server.replicaof("NO", "ONE")
    assert server.llen(QUEUE) == 0
    assert record(server) is None


class ReplyCuttingProxy:
    """A proxy between a publisher and Redis: forwards requests, and closes the connection instead of returning the
    first replies.
    """

    def __init__(self, server: RedisProcess, cuts: int) -> None:
        self._server = server
        self._cuts = cuts
        self.url = ""

    async def __aenter__(self) -> "ReplyCuttingProxy":
        self._relay = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        port = self._relay.sockets[0].getsockname()[1]
        self.url = f"redis://:{self._server.password}@127.0.0.1:{port}/0"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._relay.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        redis_reader, redis_writer = await asyncio.open_connection("127.0.0.1", self._server.port)
        has_published = False
        while data := await reader.read(65536):
            has_published = has_published or b"EVAL" in data
            redis_writer.write(data)
            answer = await redis_reader.read(65536)
            if has_published and b"sent" in answer and self._cuts:
                self._cuts -= 1
                break
            writer.write(answer)
        writer.close()
        redis_writer.close()


@pytest.mark.parametrize("cuts", [1, 3])
async def test_publish_with_a_lost_reply_is_repeated_and_sent_once(redis_server: RedisProcess, cuts: int) -> None:
    """The danger of a lost reply: a call that runs twice, or a running call that was reported as not sent."""
    async with ReplyCuttingProxy(redis_server, cuts) as relay:
        client = redis.asyncio.Redis.from_url(relay.url, socket_timeout=5)
        scripts = ScriptConnection(client)
        await Publisher(scripts, "d", SharedClock()).publish(*publish_arguments(attempt(), "hub-task"))
        await scripts.aclose()
        await client.aclose()
    with redis_server.client() as server:
        assert server.llen(QUEUE) == 1


async def test_repeated_publish_of_an_ended_call_is_recognized(
    publisher: Publisher, server: "redis.Redis", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publishing.random, "getrandbits", lambda _: 5)
    await publisher.publish(*publish_arguments(attempt(), "hub-task"))
    server.hset(call_key("d", "acme", "c1"), "state", "done")
    server.delete(HOST)
    assert await reason_of(publisher, attempt(**SESSION_FIELDS)) is None
    assert server.llen(QUEUE) == 1


@pytest.mark.parametrize("has_run", [True, False])
async def test_uncertain_publish_is_repeated_and_not_reported_as_unsent(
    publisher: Publisher, server: "redis.Redis", monkeypatch: pytest.MonkeyPatch, has_run: bool
) -> None:
    """A caller that reads "not sent" makes the call again while the first call runs."""
    post = publisher._post
    errors: list[RedisError] = [
        ReplyMissing("cut", may_have_run=True),
        ResponseError("BUSY Redis is busy running a script"),
    ]

    async def lose_a_reply(values: dict[str, Value]) -> str:
        verdict = await post(values) if not errors or (has_run and len(errors) == 2) else ""
        if errors:
            raise errors.pop(0)
        return verdict

    monkeypatch.setattr(publisher, "_post", lose_a_reply)
    await asyncio.wait_for(publisher.publish(*publish_arguments(attempt(), "hub-task")), SOON_S)
    assert server.llen(QUEUE) == 1


async def test_close_ends_a_publish_that_waits_for_redis(redis_server: RedisProcess) -> None:
    connected = asyncio.Event()
    silent = await asyncio.start_server(lambda reader, writer: connected.set(), "127.0.0.1", 0)
    port = silent.sockets[0].getsockname()[1]
    client = redis.asyncio.Redis(port=port)
    scripts = ScriptConnection(client)
    publisher = Publisher(scripts, "d", SharedClock())
    sending = asyncio.create_task(publisher.publish(*publish_arguments(attempt(), "hub-task")))
    await asyncio.wait_for(connected.wait(), SOON_S)
    await scripts.aclose()
    with pytest.raises(BrokerUnavailable, match="closed"):
        await asyncio.wait_for(sending, SOON_S)
    await client.aclose()
    silent.close()


@pytest.mark.parametrize(
    ("before", "attempt_number", "expected", "after"),
    [
        (None, 1, "queued", ("forbidden", 1)),
        (("queued", 1), 1, "queued", ("forbidden", 1)),
        (("forbidden", 1), 1, "forbidden", ("forbidden", 1)),
        (("running", 1), 1, "running", ("running", 1)),
        (("done", 1), 1, "done", ("done", 1)),
        (("lost", 1), 1, "lost", ("lost", 1)),
        (("unknown", 1), 1, "unknown", ("unknown", 1)),
        # A renewal has begun: the attempt before it forbids nothing.
        (("queued", 2), 1, "superseded", ("queued", 2)),
        # The renewal of a call was lost.
        (("queued", 1), 2, "queued", ("forbidden", 2)),
        (("lost", 1), 2, "queued", ("forbidden", 2)),
        (("running", 1), 2, "superseded", ("running", 1)),
        (("done", 1), 2, "superseded", ("done", 1)),
    ],
    ids=str,
)
async def test_forbid_applies_only_to_calls_that_have_not_started(
    server: "redis.Redis", before: tuple[str, int] | None, attempt_number: int, expected: str, after: tuple[str, int]
) -> None:
    if before is not None:
        server.hset(call_key("d", "acme", "c1"), mapping={"state": before[0], "attempt": before[1]})
    assert await forbid(server, attempt_number) == expected
    stored = record(server)
    assert (stored.state.value, stored.attempt) == after
    if before is None:
        assert server.ttl(call_key("d", "acme", "c1")) > 0
