"""An outage of Redis during all operations of HTTP API clients, and the results that the clients saw."""

import asyncio
import json
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
import redis

from store import api_keys
from tests.api_harness import READY_S, api_settings, serving
from tests.api_stack import SOON_S, ApiStack, bash, read_events, rule, started
from tests.outage_requests import REQUESTS, ApiRequest, Seen, send, send_again
from tests.stack import RedisServer, all_of
from tests.waiting import until, wait_until_async

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

    `shallow`: by sender, from a service with the usual key cache. `deep`: by sender, from a service that caches keys
    for longer than the outage, so that requests pass authentication. `after`: once Redis is back. `again`: POST
    requests sent again then, to another service.
    """

    shallow: dict[str, Seen] = field(default_factory=dict)
    deep: dict[str, Seen] = field(default_factory=dict)
    after: dict[str, Seen] = field(default_factory=dict)
    again: dict[str, Seen] = field(default_factory=dict)
    pages: dict[str, Seen] = field(default_factory=dict)
    pages_after: dict[str, Seen] = field(default_factory=dict)
    strangers: dict[str, Seen] = field(default_factory=dict)
    calls: dict[str, dict[str, Any]] = field(default_factory=dict)
    repeated: Seen | None = None
    sent_into: Seen | None = None
    acted: dict[str, int] = field(default_factory=dict)
    """Number of executions of each of `calls`, of the call of `sent_into`, and of the call of the requests."""
    followed: list[list[dict[str, Any]]] = field(default_factory=list)
    """The events of a run, grouped by the connections that delivered the events."""
    whole: list[dict[str, Any]] = field(default_factory=list)
    run: dict[str, Any] = field(default_factory=dict)
    owned: dict[str, list[str]] = field(default_factory=dict)
    """The existing resources of each kind that must be created only once."""
    logs: str = ""


class _Teller:
    """Runs the outage step by step."""

    def __init__(self, stack: ApiStack, server: RedisServer, clients: AsyncExitStack) -> None:
        self._stack, self._redis, self._clients = stack, server, clients
        self.seen = Outage()
        self._words: dict[str, str] = {}
        self._sessions: dict[str, str] = {}

    async def play(self) -> Outage:
        with redis.Redis.from_url(self._redis.url) as store:
            # The result of an answered request is stored, whenever Redis is killed.
            store.config_set("appendfsync", "always")
        deep_url = await self._clients.enter_async_context(serving(api_settings(self._redis.url)))
        shallow, deep, second = (
            self._people(self._stack.apis[0].url),
            self._people(deep_url),
            self._people(self._stack.apis[1].url),
        )
        acme, visitor = shallow["acme"], await self._log_in(shallow["operator"])
        await self._furnish(acme, shallow["admin"])
        for client in deep.values():
            await self._until_known(client)
        running = await self._begin_calls(acme)
        run = await started(acme, "outage")
        following = asyncio.create_task(self._follow(acme, run))
        await until(
            lambda: bool(any(event["event"] == "CallStarted" for part in self.seen.followed for event in part)), READY_S
        )

        await asyncio.to_thread(self._redis.kill)
        down_at = time.monotonic()
        sent_into = asyncio.create_task(self._call_into(acme))
        # Wait until the usual key caches have expired. The cache of the deep service lasts longer.
        await asyncio.sleep(1.5)
        asking = [
            asyncio.create_task(self._ask_all(shallow, self.seen.shallow)),
            asyncio.create_task(self._ask_all(deep, self.seen.deep)),
        ]
        asking += [
            asyncio.create_task(self._look(visitor, self.seen.pages)),
            asyncio.create_task(self._ask_as_strangers()),
        ]
        await asyncio.wait(asking, timeout=SOON_S)
        await asyncio.sleep(down_at + OUTAGE_S - time.monotonic())
        await asyncio.to_thread(self._redis.start)

        await all_of([*asking, sent_into, *running, following], SOON_S)
        await self._go_on(deep, second)
        await self._look(visitor, self.seen.pages_after)
        self.seen.whole = await read_events(second["acme"], f"/v1/runs/{run}/events")
        self.seen.run = (await acme.get(f"/v1/runs/{run}")).json()
        await self._count(acme, shallow["admin"])
        self.seen.logs = "".join(api.log() for api in self._stack.apis)
        return self.seen

    def _people(self, url: str) -> dict[str, httpx.AsyncClient]:
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
        visitor = self._client(url, "")
        answer = await visitor.post("/login", data={"key": self._stack.keys["operator"]}, headers={"Origin": url})
        assert answer.status_code == 303
        return visitor

    async def _furnish(self, acme: httpx.AsyncClient, admin: httpx.AsyncClient) -> None:
        session, closing = [(await acme.post("/v1/sessions", json={"ttl_s": 600})).json()["id"] for _ in range(2)]
        done = await acme.post(
            f"/v1/sessions/{session}/calls", json={"name": "bash_tool", "arguments": {"command": "echo there >there"}}
        )
        line = '{"id": "one", "instruction": "[item hello] one"}\n'
        batch = (await acme.post("/v1/batches", content=line, headers={"Content-Type": "text/plain"})).json()["id"]
        finished, sleeping, asking = [await started(acme, item) for item in ("hello", "sleeps", "asks")]
        await read_events(acme, f"/v1/runs/{finished}/events")
        asked = await wait_until_async(lambda: acme.get("/v1/approvals"), SOON_S, "asked", accepts=_has_data)
        questions = asked.json()["data"]
        assert questions[0]["run"] == asking
        key = (await admin.post("/v1/tenants/rival/keys", json={"name": "to go"})).json()["id"]
        self._words = {
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

    async def _until_known(self, client: httpx.AsyncClient) -> None:
        await wait_until_async(
            lambda: client.get("/v1/tools"), READY_S, "served", accepts=lambda answer: answer.status_code == 200
        )

    async def _begin_calls(self, acme: httpx.AsyncClient) -> "list[asyncio.Task[None]]":
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
        return f"/v1/sessions/{self._sessions.get(name, self._words['session'])}/calls", call

    async def _call(self, acme: httpx.AsyncClient, name: str, command: str) -> None:
        path, call = self._new_call(name, command)
        api_request = ApiRequest(name, "POST", path, content=call)
        reply = await send(acme, api_request, self._words)
        self.seen.calls[name] = {"status": reply.status, **json.loads(reply.text)}
        if name == "plain-after":
            self.seen.repeated = await send_again(acme, api_request, self._words)

    async def _call_streamed(self, acme: httpx.AsyncClient, name: str, command: str) -> None:
        path, call = self._new_call(name, command)
        events = await read_events(acme, path, method="POST", json=call)
        assert [event["event"] for event in events].count("result") == 1
        self.seen.calls[name] = {"status": 200, **events[-1]["data"]}

    async def _call_into(self, acme: httpx.AsyncClient) -> None:
        path, call = self._new_call("into", "echo x >>ran")
        began = time.monotonic()
        answer = await acme.post(path, json=call)
        self.seen.sent_into = Seen(answer.status_code, answer.text, time.monotonic() - began, dict(answer.headers))

    async def _follow(self, acme: httpx.AsyncClient, run: str) -> None:
        """Follow a run as a browser does: reconnect from the last event whenever the stream ends before the run."""
        last = ""
        async with asyncio.timeout(SOON_S):
            while not (last and self.seen.followed[-1] and self.seen.followed[-1][-1]["event"] == "RunEnded"):
                part: list[dict[str, Any]] = []
                self.seen.followed.append(part)
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

    async def _ask_all(self, clients: Mapping[str, httpx.AsyncClient], replies_by_name: dict[str, Seen]) -> None:
        replies = await asyncio.gather(
            *(send(clients[api_request.who], api_request, self._words) for api_request in REQUESTS)
        )
        replies_by_name |= {api_request.name: one for api_request, one in zip(REQUESTS, replies, strict=True)}

    async def _look(self, visitor: httpx.AsyncClient, replies_by_name: dict[str, Seen]) -> None:
        for page in PAGES:
            began = time.monotonic()
            answer = await visitor.get(page)
            replies_by_name[page] = Seen(
                answer.status_code, answer.text, time.monotonic() - began, dict(answer.headers)
            )

    async def _ask_as_strangers(self) -> None:
        for name, key in {**BAD_KEYS, "good": self._stack.keys["rival"]}.items():
            client = self._client(self._stack.apis[1].url, key)
            answer = await client.get("/v1/runs")
            self.seen.strangers[name] = Seen(answer.status_code, answer.text, 0.0)

    async def _go_on(self, deep: Mapping[str, httpx.AsyncClient], second: Mapping[str, httpx.AsyncClient]) -> None:
        """Send the same requests again, one after the other. Requests that run once are also sent to another service."""
        for api_request in REQUESTS:
            self.seen.after[api_request.name] = await send(deep[api_request.who], api_request, self._words)
            if api_request.method == "POST":
                self.seen.again[api_request.name] = await send_again(second[api_request.who], api_request, self._words)

    async def _count(self, acme: httpx.AsyncClient, admin: httpx.AsyncClient) -> None:
        async def listed(client: httpx.AsyncClient, path: str) -> list[dict[str, Any]]:
            return list((await client.get(path)).json()["data"])

        for name in (*CALLS, "into"):
            path, call = self._new_call(name, "touch ran; wc -l <ran", f"{name}-counted")
            self.seen.acted[name] = int((await acme.post(path, json=call)).json()["output"])
        path, call = self._new_call("counted", "wc -l </tmp/outage")
        self.seen.acted["call a tool"] = int((await acme.post(path, json=call)).json()["output"])
        self.seen.owned = {
            "runs": [
                run["id"]
                for run in await listed(acme, "/v1/runs")
                if run["instruction"].endswith("the one of the outage")
            ],
            "batches": [batch["id"] for batch in await listed(acme, "/v1/batches") if batch["name"] == "outage"],
            "sessions": [one["id"] for one in await listed(acme, "/v1/sessions") if one["ttl_s"] == 607],
            "keys": [
                key["id"] for key in await listed(admin, "/v1/tenants/rival/keys") if key["name"] == "of the outage"
            ],
        }
        for session in (self._words["session"], *self._sessions.values(), *self.seen.owned["sessions"]):
            assert (await acme.delete(f"/v1/sessions/{session}")).status_code == 204


async def play_outage(stack: ApiStack, server: RedisServer) -> Outage:
    """Run the outage. Takes about 20 s."""
    with pytest.MonkeyPatch.context() as patched:
        # Events of the service in this process only.
        patched.setattr(api_keys, "KEY_FRESH_S", 3600.0)
        async with AsyncExitStack() as clients:
            return await _Teller(stack, server, clients).play()
