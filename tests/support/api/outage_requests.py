"""Requests of every kind that the HTTP API answers. Tests send the requests while Redis is unavailable, and again when Redis
is back.
"""

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.support.stack.waiting import wait_until_async

AGAIN_S = 20.0


@dataclass(frozen=True)
class ApiRequest:
    """A request. `$word` in path and content stands for a value that the test created before. `status_when_up`: the status
    when Redis is available.
    """

    name: str
    method: str
    path: str
    role: str = "acme"
    status_when_up: int = 200
    content: Any = None
    kind: str = "application/json"

    def fill(self, values: Mapping[str, str]) -> tuple[str, bytes]:
        """Return path and content with the values filled in."""
        text = (
            self.content
            if isinstance(self.content, str)
            else json.dumps(self.content)
            if self.content is not None
            else ""
        )
        path = self.path
        for name, value in values.items():
            path, text = path.replace(f"${name}", value), text.replace(f"${name}", value)
        return path, text.encode()


REQUESTS = (
    ApiRequest("start a run", "POST", "/v1/runs", status_when_up=202, content={"instruction": "[item hello] the one of the outage"}),
    ApiRequest("cancel a run", "POST", "/v1/runs/$sleeping/cancel"),
    ApiRequest("list runs", "GET", "/v1/runs"),
    ApiRequest("read a run", "GET", "/v1/runs/$finished"),
    ApiRequest("read a transcript", "GET", "/v1/runs/$finished/transcript"),
    ApiRequest("follow a run", "GET", "/v1/runs/$finished/events"),
    ApiRequest("submit a batch", "POST", "/v1/batches?name=outage", status_when_up=201, content='{"id": "a", "instruction": "[item hello] a"}\n', kind="text/plain"),
    ApiRequest("list batches", "GET", "/v1/batches"),
    ApiRequest("read a batch", "GET", "/v1/batches/$batch"),
    ApiRequest("read rows", "GET", "/v1/batches/$batch/results"),
    ApiRequest("retry a batch", "POST", "/v1/batches/$batch/retry", content={"kinds": ["model"]}),
    ApiRequest("cancel a batch", "POST", "/v1/batches/$batch/cancel"),
    ApiRequest("call a tool", "POST", "/v1/sessions/$session/calls", content={"name": "bash_tool", "arguments": {"command": "echo x >>/tmp/outage"}}),
    ApiRequest("read a call", "GET", "/v1/calls/$call"),
    ApiRequest("kill a call", "POST", "/v1/calls/$call/kill", content={}),
    ApiRequest("write a file", "PUT", "/v1/sessions/$session/files/put", content="put", kind="application/octet-stream"),
    ApiRequest("read a file", "GET", "/v1/sessions/$session/files/there"),
    ApiRequest("open a session", "POST", "/v1/sessions", status_when_up=201, content={"ttl_s": 607}),
    ApiRequest("list sessions", "GET", "/v1/sessions"),
    ApiRequest("read a session", "GET", "/v1/sessions/$session"),
    ApiRequest("create a checkpoint", "POST", "/v1/sessions/$session/checkpoints", status_when_up=201, content={}),
    ApiRequest("close a session", "DELETE", "/v1/sessions/$closing", status_when_up=204),
    ApiRequest("list approvals", "GET", "/v1/approvals"),
    ApiRequest("read an approval", "GET", "/v1/approvals/$question"),
    ApiRequest("decide an approval", "POST", "/v1/approvals/$question", content={"decision": "reject", "digest": "$digest"}),
    ApiRequest("list tools", "GET", "/v1/tools"),
    ApiRequest("disable a tool", "PATCH", "/v1/tools/glob_tool", "operator", content={"enabled": False, "tenant": "rival"}),
    ApiRequest("list tenants", "GET", "/v1/tenants", "operator"),
    ApiRequest("create a tenant", "POST", "/v1/tenants", "admin", 201, content={"name": "fresh"}),
    ApiRequest("change a tenant", "PUT", "/v1/tenants/rival", "admin", content={"in_flight": 7}),
    ApiRequest("pause a tenant", "POST", "/v1/tenants/rival/pause", "operator", content={}),
    ApiRequest("resume a tenant", "POST", "/v1/tenants/rival/resume", "operator", content={}),
    ApiRequest("create a key", "POST", "/v1/tenants/rival/keys", "admin", 201, content={"name": "of the outage"}),
    ApiRequest("list keys", "GET", "/v1/tenants/rival/keys", "admin"),
    ApiRequest("revoke a key", "DELETE", "/v1/tenants/rival/keys/$key", "admin", 204),
    ApiRequest("list hosts", "GET", "/v1/hosts", "operator"),
    ApiRequest("read pressure", "GET", "/v1/pressure", "operator"),
    ApiRequest("drain a host", "POST", "/v1/hosts/no-such-host/drain", "operator", 404, content={}),
    ApiRequest("read the audit", "GET", "/v1/audit", "operator"),
    ApiRequest("scrape metrics", "GET", "/metrics", "operator"),
)  # fmt: skip


@dataclass(frozen=True)
class ApiReply:
    """A response as the client received the response."""

    status: int
    text: str
    took_s: float
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def code(self) -> str:
        """Return the code of a problem, or "" for other responses."""
        is_problem = self.headers.get("content-type") == "application/problem+json"
        return str(json.loads(self.text)["code"]) if is_problem else ""


async def send_until_stored(client: httpx.AsyncClient, api_request: ApiRequest, values: Mapping[str, str]) -> ApiReply:
    """Send a request until its idempotency key is no longer in progress. A recent response may not be stored yet."""
    reply: ApiReply = await wait_until_async(
        lambda: send(client, api_request, values),
        AGAIN_S,
        "the key is no longer in progress",
        accepts=lambda reply: reply.code != "IDEMPOTENCY_IN_PROGRESS",
    )
    return reply


async def send(client: httpx.AsyncClient, api_request: ApiRequest, values: Mapping[str, str]) -> ApiReply:
    """Send a request with an idempotency key, so that repeated requests run once."""
    path, content = api_request.fill(values)
    headers = {"Content-Type": api_request.kind} if content else {}
    if api_request.method == "POST":
        headers["Idempotency-Key"] = api_request.name.replace(" ", "-")
    started_at = time.monotonic()
    answer = await client.request(api_request.method, path, content=content or None, headers=headers)
    return read_reply(answer, started_at)


def read_reply(answer: httpx.Response, started_at: float) -> ApiReply:
    return ApiReply(answer.status_code, answer.text, time.monotonic() - started_at, dict(answer.headers))
