"""Two replicas of the API on a real stack, with a model that follows a script."""

import asyncio
import contextlib
import json
import tempfile
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from docker import APIClient

from tests.model_server.running import ModelServer, running_model_server
from tests.support.api.api_harness import make_keys
from tests.support.stack.service_process import ApiProcess, open_api_process
from tests.support.stack.stack import Stack, open_stack
from tests.support.stack.waiting import SOON_S, wait_until_async
from toolcrew.orchestrator.operations.ports import reserve_port

STEPS = 4
"""Limit of steps; lower than the default of a run."""


def bash(command: str) -> dict[str, Any]:
    return {"name": "bash_tool", "arguments": {"command": command}}


def rule(conversation: str, step: int, **reply: Any) -> dict[str, Any]:
    return {"kind": "rule", "when": {"conversation": [conversation], "step": step}, "reply": reply}


SCRIPT: list[dict[str, Any]] = [
    {"kind": "server", "answers_probes": True},
    *(rule("steps", step, text=f"Step {step}.", calls=[bash(f"echo {step} >>/tmp/steps; sleep 0.3; wc -l </tmp/steps")]) for step in range(STEPS)),
    rule("steps", STEPS, text="{{observation|first_line}} steps"),
    rule("sleeps", 0, calls=[bash("sleep 300")]),
    rule("asks", 0, calls=[bash("rm -rf /srv/build")]),
    rule("asks", 1, text="observed: {{observation}}"),
    rule("globs", 0, calls=[{"name": "glob_tool", "arguments": {"pattern": "*"}}]),
    rule("globs", 1, calls=[bash("echo still here")]),
    rule("globs", 2, text="observed: {{observation}}"),
    rule("carries", 0, calls=[bash("cat src/a.txt; cp src/a.txt out.txt")]),
    rule("carries", 1, text="{{observation|first_line}}"),
    {"kind": "rule", "reply": {"text": "Hello."}},
]  # fmt: skip


@dataclass
class ApiStack:
    """Two API processes that serve the same stack.

    `keys`: by role, as in tests/support/api/api_harness.py. `store`: the folder of workspaces and artifacts. `hook_port`: a local
    port that may receive webhooks.
    """

    stack: Stack
    store: Path
    hook_port: int
    apis: tuple[ApiProcess, ApiProcess]
    model: ModelServer
    keys: dict[str, str]

    @contextlib.asynccontextmanager
    async def client(self, name: str = "acme", replica: int = 0) -> AsyncIterator[httpx.AsyncClient]:
        headers = {"Authorization": f"Bearer {self.keys[name]}"}
        async with httpx.AsyncClient(
            verify=False, base_url=self.apis[replica].url, headers=headers, timeout=SOON_S
        ) as client:
            yield client

    def open_api(self) -> "contextlib.AbstractContextManager[ApiProcess]":
        """Start one more API process, for a test that kills an API."""
        return open_orchestrator(self.stack, self.model, self.store)


def open_orchestrator(stack: Stack, model: ModelServer, store: Path) -> "contextlib.AbstractContextManager[ApiProcess]":
    environment = {**model.environment(), "TOOLCREW_APPROVALS": "queue", **store_settings(store)}
    return open_api_process(stack.footprint, stack.redis_url, concurrency=8, environment=environment)


def store_settings(store: Path) -> dict[str, str]:
    return {"TOOLCREW_WORKSPACE_STORE": str(store)}


def allow_hosts(port: int) -> dict[str, str]:
    return {"TOOLCREW_WEBFETCH_ALLOW_HOSTS": json.dumps([f"127.0.0.1:{port}"])}


@contextlib.contextmanager
def open_api_stack(
    engine: APIClient, redis_url: str | None = None, more_rules: Iterable[Mapping[str, Any]] = ()
) -> Iterator[ApiStack]:
    """Open the stack and remove everything of the stack on exit. `redis_url`: a Redis of the test. `more_rules`:
    rules of the model that come before SCRIPT.
    """
    environment = {"TOOLCREW_REDIS_URL": redis_url} if redis_url is not None else {}
    hook_port = reserve_port()
    with (
        tempfile.TemporaryDirectory() as folder,
        open_stack(engine, {**environment, **store_settings(Path(folder)), **allow_hosts(hook_port)}) as stack,
        running_model_server([*SCRIPT[:1], *more_rules, *SCRIPT[1:]]) as model,
    ):
        keys = asyncio.run(make_keys(stack.redis_url))
        store = Path(folder)
        with open_orchestrator(stack, model, store) as one, open_orchestrator(stack, model, store) as other:
            yield ApiStack(stack, store, hook_port, (one, other), model, keys)
            for api in (one, other):
                assert not api.has_logged("api_failed"), api.log()
        assert stack.end() == 0
        stack.footprint.assert_nothing_left()


async def read_events(
    client: httpx.AsyncClient, path: str, *, last: str = "", most: int = 10_000, **request: Any
) -> list[dict[str, Any]]:
    """Return the events of a stream after `last`, each as `id`, `event` and `data`. Reads until the stream ends, or
    until `most` events have arrived; then the connection is dropped.
    """
    found: list[dict[str, Any]] = []
    headers = {
        "Accept": "text/event-stream",
        **({"Last-Event-ID": last} if last else {}),
        **request.pop("more_headers", {}),
    }
    async with client.stream(request.pop("method", "GET"), path, headers=headers, **request) as stream:
        assert stream.status_code == 200, await stream.aread()
        fields: dict[str, str] = {}
        async for line in stream.aiter_lines():
            name, _, value = line.partition(": ")
            if line and name:
                fields[name] = value
            elif "event" in fields:
                found.append({**fields, "data": json.loads(fields["data"])})
                fields = {}
                if len(found) == most:
                    break
            else:
                fields = {}
    return found


async def read_until(client: httpx.AsyncClient, path: str, field: str, *values: str) -> dict[str, Any]:
    """Return the object at the path as soon as the field has one of the values."""

    async def read() -> dict[str, Any]:
        return dict((await client.get(path)).json())

    def accepts(reply: dict[str, Any]) -> bool:
        return reply[field] in values

    return dict(await wait_until_async(read, SOON_S, f"{path} has {field} {values}", accepts=accepts))


async def start_run(client: httpx.AsyncClient, item: str, **fields: Any) -> str:
    """Start a run of one of the script's conversations and return the run's id."""
    answer = await client.post("/v1/runs", json={"instruction": f"[item {item}] go", **fields})
    assert answer.status_code == 202, answer.text
    return str(answer.json()["id"])
