"""Redis is killed during all operations of HTTP API clients, and comes back. Each client gets an error in time, and
nothing is done twice.
"""

import asyncio
import json
import time
from collections.abc import Iterator, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
import redis
from docker import APIClient

from tests.support.api.api_harness import READY_S, api_settings, serving
from tests.support.api.outage_requests import REQUESTS, ApiReply, ApiRequest, read_reply, send, send_until_stored
from tests.support.stack.api_stack import ApiStack, bash, open_api_stack, read_events, rule, start_run
from tests.support.stack.stack import RedisServer, all_of, open_redis_server
from tests.support.stack.waiting import SOON_S, until, wait_until_async
from toolcrew.store import api_keys

pytestmark = pytest.mark.stack

OUTAGE_S = 6.0
STEPS = 4
"""Limit of steps; lower than the default of a run."""
RULES = [
    *(
        rule("outage", step, calls=[bash(f"echo {step} >>/tmp/steps; sleep 2; wc -l </tmp/steps")])
        for step in range(STEPS)
    ),
    rule("outage", STEPS, text="{{observation|first_line}} steps"),
]
PAGES = ("/", "/runs", "/approvals", "/batches", "/tools")
CALLS = {"plain-during": 4, "streamed-during": 4, "plain-after": 11, "streamed-after": 11}
"""Duration of each call, in seconds."""
BAD_KEYS = {"none": "", "short": "tc_x", "unknown": f"tc_{'0' * 16}_{'A' * 43}"}


def _has_data(answer: httpx.Response) -> bool:
    return bool(answer.json()["data"])


def _is_running(answer: httpx.Response) -> bool:
    return answer.status_code == 200 and answer.json()["state"] == "running"


@dataclass
class Outage:
    """The observed results.

    `short_cache`: by sender, from a service with the usual key cache. `long_cache`: by sender, from a service that caches keys
    for longer than the outage, so that requests pass authentication. `after`: once Redis is back. `repeated_posts`: POST
    requests sent again then, to another service.
    """

    short_cache: dict[str, ApiReply] = field(default_factory=dict)
    long_cache: dict[str, ApiReply] = field(default_factory=dict)
    after: dict[str, ApiReply] = field(default_factory=dict)
    repeated_posts: dict[str, ApiReply] = field(default_factory=dict)
    pages: dict[str, ApiReply] = field(default_factory=dict)
    pages_after: dict[str, ApiReply] = field(default_factory=dict)
    invalid_key_replies: dict[str, ApiReply] = field(default_factory=dict)
    calls: dict[str, dict[str, Any]] = field(default_factory=dict)
    repeated_call: ApiReply | None = None
    sent_during_outage: ApiReply | None = None
    executions: dict[str, int] = field(default_factory=dict)
    """Number of executions of each of `calls`, of the call of `sent_during_outage`, and of the call of the requests."""
    followed_events: list[list[dict[str, Any]]] = field(default_factory=list)
    """The events of a run, grouped by the connections that delivered the events."""
    stored_events: list[dict[str, Any]] = field(default_factory=list)
    run: dict[str, Any] = field(default_factory=dict)
    created: dict[str, list[str]] = field(default_factory=dict)
    """The existing resources of each kind that must be created only once."""
    logs: str = ""


class _OutageRun:
    """Runs the outage step by step."""

    def __init__(self, stack: ApiStack, server: RedisServer, clients: AsyncExitStack) -> None:
        self._stack = stack
        self._redis = server
        self._clients = clients
        self.observed = Outage()
        self._values: dict[str, str] = {}
        self._sessions: dict[str, str] = {}

    async def run(self) -> Outage:
        with redis.Redis.from_url(self._redis.url) as store:
            # The result of an answered request is stored, whenever Redis is killed.
            store.config_set("appendfsync", "always")
        long_cache_url = await self._clients.enter_async_context(serving(api_settings(self._redis.url)))
        short_cache, long_cache, second = (
            self._open_clients(self._stack.apis[0].url),
            self._open_clients(long_cache_url),
            self._open_clients(self._stack.apis[1].url),
        )
        acme, browser = short_cache["acme"], await self._log_in(short_cache["operator"])
        await self._create_content(acme, short_cache["admin"])
        for client in long_cache.values():
            await self._wait_until_served(client)
        running = await self._start_calls(acme)
        run = await start_run(acme, "outage")
        following = asyncio.create_task(self._follow(acme, run))
        await until(
            lambda: bool(
                any(event["event"] == "CallStarted" for part in self.observed.followed_events for event in part)
            ),
            READY_S,
        )

        await asyncio.to_thread(self._redis.kill)
        down_at = time.monotonic()
        sent_during_outage = asyncio.create_task(self._call_during_outage(acme))
        # Wait until the usual key caches have expired. The cache of the deep service lasts longer.
        await asyncio.sleep(1.5)
        requests = [
            asyncio.create_task(self._send_all(short_cache, self.observed.short_cache)),
            asyncio.create_task(self._send_all(long_cache, self.observed.long_cache)),
        ]
        requests += [
            asyncio.create_task(self._read_pages(browser, self.observed.pages)),
            asyncio.create_task(self._send_with_invalid_keys()),
        ]
        await asyncio.wait(requests, timeout=SOON_S)
        await asyncio.sleep(down_at + OUTAGE_S - time.monotonic())
        await asyncio.to_thread(self._redis.start)

        await all_of([*requests, sent_during_outage, *running, following], SOON_S)
        await self._repeat_requests(long_cache, second)
        await self._read_pages(browser, self.observed.pages_after)
        self.observed.stored_events = await read_events(second["acme"], f"/v1/runs/{run}/events")
        self.observed.run = (await acme.get(f"/v1/runs/{run}")).json()
        await self._count_effects(acme, short_cache["admin"])
        self.observed.logs = "".join(api.log() for api in self._stack.apis)
        return self.observed

    def _open_clients(self, url: str) -> dict[str, httpx.AsyncClient]:
        return {name: self._client(url, key) for name, key in self._stack.keys.items()}

    def _client(self, url: str, key: str) -> httpx.AsyncClient:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        client = httpx.AsyncClient(
            base_url=url, headers=headers, timeout=SOON_S, limits=httpx.Limits(max_connections=None)
        )
        self._clients.push_async_callback(client.aclose)
        return client

    async def _log_in(self, client: httpx.AsyncClient) -> httpx.AsyncClient:
        url = str(client.base_url).rstrip("/")
        browser = self._client(url, "")
        answer = await browser.post("/login", data={"key": self._stack.keys["operator"]}, headers={"Origin": url})
        assert answer.status_code == 303
        return browser

    async def _create_content(self, acme: httpx.AsyncClient, admin: httpx.AsyncClient) -> None:
        session, closing = [(await acme.post("/v1/sessions", json={"ttl_s": 600})).json()["id"] for _ in range(2)]
        done = await acme.post(
            f"/v1/sessions/{session}/calls", json={"name": "bash_tool", "arguments": {"command": "echo there >there"}}
        )
        line = '{"id": "one", "instruction": "[item hello] one"}\n'
        batch = (await acme.post("/v1/batches", content=line, headers={"Content-Type": "text/plain"})).json()["id"]
        finished, sleeping, waiting = [await start_run(acme, item) for item in ("hello", "sleeps", "asks")]
        await read_events(acme, f"/v1/runs/{finished}/events")
        asked = await wait_until_async(lambda: acme.get("/v1/approvals"), SOON_S, "asked", accepts=_has_data)
        questions = asked.json()["data"]
        assert questions[0]["run"] == waiting
        key = (await admin.post("/v1/tenants/rival/keys", json={"name": "to go"})).json()["id"]
        self._values = {
            "session": session,
            "closing": closing,
            "call": done.json()["call_id"],
            "batch": batch,
            "finished": finished,
            "sleeping": sleeping,
            "question": questions[0]["id"],
            "digest": questions[0]["digest"],
            "key": key,
        }

    async def _wait_until_served(self, client: httpx.AsyncClient) -> None:
        await wait_until_async(
            lambda: client.get("/v1/tools"), READY_S, "served", accepts=lambda answer: answer.status_code == 200
        )

    async def _start_calls(self, acme: httpx.AsyncClient) -> "list[asyncio.Task[None]]":
        """Start calls that end while Redis is unavailable and calls that end after its return. Each call runs once as
        a plain request and once as a stream, in its own session with an idle shell.
        """
        running = []
        for name, seconds in CALLS.items():
            self._sessions[name] = (await acme.post("/v1/sessions", json={"ttl_s": 600})).json()["id"]
            work = self._call_streamed if name.startswith("streamed") else self._call
            running.append(
                asyncio.create_task(work(acme, name, f"echo x >>ran; echo begun; sleep {seconds}; echo ended"))
            )
        for name in CALLS:
            await wait_until_async(
                lambda name=name: acme.get(f"/v1/calls/{name}"), SOON_S, "the call runs", accepts=_is_running
            )
        return running

    def _new_call(self, name: str, command: str, call_id: str | None = None) -> tuple[str, dict[str, Any]]:
        call = {"name": "bash_tool", "arguments": {"command": command}, "call_id": call_id or name}
        return f"/v1/sessions/{self._sessions.get(name, self._values['session'])}/calls", call

    async def _call(self, acme: httpx.AsyncClient, name: str, command: str) -> None:
        path, call = self._new_call(name, command)
        api_request = ApiRequest(name, "POST", path, content=call)
        reply = await send(acme, api_request, self._values)
        self.observed.calls[name] = {"status": reply.status, **json.loads(reply.text)}
        if name == "plain-after":
            self.observed.repeated_call = await send_until_stored(acme, api_request, self._values)

    async def _call_streamed(self, acme: httpx.AsyncClient, name: str, command: str) -> None:
        path, call = self._new_call(name, command)
        events = await read_events(acme, path, method="POST", json=call)
        assert [event["event"] for event in events].count("result") == 1
        self.observed.calls[name] = {"status": 200, **events[-1]["data"]}

    async def _call_during_outage(self, acme: httpx.AsyncClient) -> None:
        path, call = self._new_call("in-outage", "echo x >>ran")
        started_at = time.monotonic()
        answer = await acme.post(path, json=call)
        self.observed.sent_during_outage = read_reply(answer, started_at)

    async def _follow(self, acme: httpx.AsyncClient, run: str) -> None:
        """Follow a run as a browser does: reconnect from the last event whenever the stream ends before the run."""
        last = ""
        async with asyncio.timeout(SOON_S):
            while not (
                last
                and self.observed.followed_events[-1]
                and self.observed.followed_events[-1][-1]["event"] == "RunEnded"
            ):
                part: list[dict[str, Any]] = []
                self.observed.followed_events.append(part)
                async with acme.stream(
                    "GET", f"/v1/runs/{run}/events", headers={"Last-Event-ID": last} if last else {}
                ) as stream:
                    fields: dict[str, str] = {}
                    async for line in stream.aiter_lines():
                        name, _, value = line.partition(": ")
                        if name in ("id", "event", "data"):
                            fields[name] = value
                        elif "event" in fields:
                            part.append({**fields, "data": json.loads(fields["data"])})
                            last, fields = fields["id"], {}
                if not part:
                    await asyncio.sleep(0.2)

    async def _send_all(self, clients: Mapping[str, httpx.AsyncClient], replies_by_name: dict[str, ApiReply]) -> None:
        replies = await asyncio.gather(
            *(send(clients[api_request.role], api_request, self._values) for api_request in REQUESTS)
        )
        replies_by_name |= {api_request.name: one for api_request, one in zip(REQUESTS, replies, strict=True)}

    async def _read_pages(self, browser: httpx.AsyncClient, replies_by_name: dict[str, ApiReply]) -> None:
        for page in PAGES:
            started_at = time.monotonic()
            answer = await browser.get(page)
            replies_by_name[page] = read_reply(answer, started_at)

    async def _send_with_invalid_keys(self) -> None:
        for name, key in {**BAD_KEYS, "good": self._stack.keys["rival"]}.items():
            client = self._client(self._stack.apis[1].url, key)
            answer = await client.get("/v1/runs")
            self.observed.invalid_key_replies[name] = ApiReply(answer.status_code, answer.text, 0.0)

    async def _repeat_requests(
        self, long_cache: Mapping[str, httpx.AsyncClient], second: Mapping[str, httpx.AsyncClient]
    ) -> None:
        """Send the same requests again, one after the other. Requests that run once are also sent to another service."""
        for api_request in REQUESTS:
            self.observed.after[api_request.name] = await send(long_cache[api_request.role], api_request, self._values)
            if api_request.method == "POST":
                self.observed.repeated_posts[api_request.name] = await send_until_stored(
                    second[api_request.role], api_request, self._values
                )

    async def _count_effects(self, acme: httpx.AsyncClient, admin: httpx.AsyncClient) -> None:
        async def read_list(client: httpx.AsyncClient, path: str) -> list[dict[str, Any]]:
            return list((await client.get(path)).json()["data"])

        for name in (*CALLS, "in-outage"):
            path, call = self._new_call(name, "touch ran; wc -l <ran", f"{name}-counted")
            self.observed.executions[name] = int((await acme.post(path, json=call)).json()["output"])
        path, call = self._new_call("counted", "wc -l </tmp/outage")
        self.observed.executions["call a tool"] = int((await acme.post(path, json=call)).json()["output"])
        self.observed.created = {
            "runs": [
                run["id"]
                for run in await read_list(acme, "/v1/runs")
                if run["instruction"].endswith("the one of the outage")
            ],
            "batches": [batch["id"] for batch in await read_list(acme, "/v1/batches") if batch["name"] == "outage"],
            "sessions": [one["id"] for one in await read_list(acme, "/v1/sessions") if one["ttl_s"] == 607],
            "keys": [
                key["id"] for key in await read_list(admin, "/v1/tenants/rival/keys") if key["name"] == "of the outage"
            ],
        }
        for session in (self._values["session"], *self._sessions.values(), *self.observed.created["sessions"]):
            assert (await acme.delete(f"/v1/sessions/{session}")).status_code == 204


async def play_outage(stack: ApiStack, server: RedisServer) -> Outage:
    """Run the outage. Takes about 20 s."""
    with pytest.MonkeyPatch.context() as patched:
        # Events of the service in this process only.
        patched.setattr(api_keys, "KEY_FRESH_S", 3600.0)
        async with AsyncExitStack() as clients:
            return await _OutageRun(stack, server, clients).run()


REPLY_LIMIT_S = 10.0
INTERNAL_TEXTS = ("127.0.0.1", "a-test-password", "Traceback", "redis.exceptions", "Connection refused", 'File "')
"""Texts that only a log may contain: the address of Redis, and internal errors."""
EACH_REQUEST = pytest.mark.parametrize("api_request", REQUESTS, ids=lambda api_request: api_request.name)
EACH_POST = pytest.mark.parametrize(
    "api_request",
    [api_request for api_request in REQUESTS if api_request.method == "POST"],
    ids=lambda api_request: api_request.name,
)


@pytest.fixture(scope="module")
def outage(engine: APIClient) -> Iterator[Outage]:
    with open_redis_server() as server, open_api_stack(engine, server.url, RULES) as stack:
        yield asyncio.run(play_outage(stack, server))


def assert_unavailable(reply: ApiReply) -> None:
    """Fail unless the response reported in time that Redis is unavailable, without further details."""
    assert (reply.status, reply.code) == (503, "BROKER_UNAVAILABLE"), reply
    assert reply.took_s < REPLY_LIMIT_S
    assert int(reply.headers["retry-after"]) >= 1
    assert not [word for word in INTERNAL_TEXTS if word in reply.text]


@EACH_REQUEST
def test_a_request_is_answered_503_while_redis_is_down(outage: Outage, api_request: ApiRequest) -> None:
    assert_unavailable(outage.short_cache[api_request.name])


@EACH_REQUEST
def test_a_request_that_passed_the_key_check_is_answered_503_while_redis_is_down(
    outage: Outage, api_request: ApiRequest
) -> None:
    assert_unavailable(outage.long_cache[api_request.name])


@EACH_REQUEST
def test_a_repeated_request_succeeds_after_redis_is_back(outage: Outage, api_request: ApiRequest) -> None:
    assert outage.after[api_request.name].status == api_request.status_when_up, outage.after[api_request.name]


@EACH_POST
def test_a_post_with_an_idempotency_key_is_executed_once(outage: Outage, api_request: ApiRequest) -> None:
    repeated_posts = outage.repeated_posts[api_request.name]
    if api_request.name == "create a key":
        # The API returns a secret only once.
        assert (repeated_posts.status, repeated_posts.code) == (409, "CONFLICT")
    elif api_request.name == "open a session":
        # The key names the session, whose present state is returned.
        opened = outage.after[api_request.name].text
        assert json.loads(repeated_posts.text)["id"] == json.loads(opened)["id"]
    elif api_request.status_when_up < 300:
        assert (repeated_posts.text, repeated_posts.headers["idempotent-replayed"]) == (
            outage.after[api_request.name].text,
            "true",
        )


def test_each_requested_object_is_created_once(outage: Outage) -> None:
    assert {kind: len(made) for kind, made in outage.created.items()} == {
        "runs": 1,
        "batches": 1,
        "sessions": 1,
        "keys": 1,
    }


@pytest.mark.parametrize("name", CALLS)
def test_a_call_in_flight_returns_its_result_once(outage: Outage, name: str) -> None:
    result = outage.calls[name]
    assert (result["status"], result["success"], result["output"]) == (200, True, "begun\nended\n"), result
    assert outage.executions[name] == 1


def test_a_repeated_call_is_answered_with_the_stored_response(outage: Outage) -> None:
    assert outage.repeated_call is not None
    assert (outage.repeated_call.status, outage.repeated_call.headers["idempotent-replayed"]) == (200, "true")
    assert json.loads(outage.repeated_call.text)["output"] == "begun\nended\n"


def test_a_call_sent_during_the_outage_is_refused_or_executed_once(outage: Outage) -> None:
    sent_reply = outage.sent_during_outage
    assert sent_reply is not None
    assert not [word for word in INTERNAL_TEXTS if word in sent_reply.text]
    executions = outage.executions["in-outage"]
    if sent_reply.status == 503:
        assert_unavailable(sent_reply)
        assert executions == 0
    else:
        reply = json.loads(sent_reply.text)
        assert (reply["success"], executions) == (True, 1) or (reply["error_code"], executions) == (
            "BROKER_UNAVAILABLE",
            0,
        ), reply


def test_a_call_sent_during_and_after_the_outage_is_executed_once(outage: Outage) -> None:
    assert outage.executions["call a tool"] == 1


def test_a_run_continues_to_its_answer_after_the_outage(outage: Outage) -> None:
    assert (outage.run["state"], outage.run["answer"]) == ("succeeded", f"{STEPS} steps"), outage.run


def test_a_run_event_stream_delivers_every_event_once(outage: Outage) -> None:
    got = [event for part in outage.followed_events for event in part]
    assert [event["id"] for event in got] == [event["id"] for event in outage.stored_events]
    assert got == outage.stored_events
    assert [event["event"] for event in got].count("RunEnded") == 1
    assert len([event for event in got if event["event"] == "CallFinished"]) == STEPS


@pytest.mark.parametrize("page", PAGES)
def test_a_page_reports_the_outage_in_plain_text(outage: Outage, page: str) -> None:
    reply = outage.pages[page]
    assert (reply.status, reply.headers["content-type"]) == (503, "text/html; charset=utf-8")
    assert "Redis does not answer" in reply.text
    assert reply.took_s < REPLY_LIMIT_S
    assert not [word for word in INTERNAL_TEXTS if word in reply.text]
    assert outage.pages_after[page].status == 200


@pytest.mark.parametrize("name", BAD_KEYS)
def test_a_request_with_an_invalid_key_gets_no_details_of_the_outage(outage: Outage, name: str) -> None:
    reply = outage.invalid_key_replies[name]
    if name == "unknown":
        assert (reply.status, reply.text) == (503, outage.invalid_key_replies["good"].text)
    else:
        assert reply.status == 401
    assert not [word for word in INTERNAL_TEXTS if word in reply.text]


def test_the_services_log_no_internal_error_during_the_outage(outage: Outage) -> None:
    assert "api_failed" not in outage.logs
    assert "Traceback" not in outage.logs
