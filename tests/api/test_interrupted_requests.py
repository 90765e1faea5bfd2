"""Requests that fail because Redis is lost during the request, requests for missing things, and requests without a
key.
"""

import asyncio
import json
import time
from typing import Any

import pytest

from tests.conftest import RedisProcess
from tests.support.api.api_harness import READY_S, ApiHarness
from tests.support.api.outage_requests import ApiRequest, send, send_until_stored
from tests.support.stack.waiting import wait_until_async
from toolcrew.contract.names import call_key
from toolcrew.store.batch_store import BatchStore

LINES = 1000


async def test_a_kill_request_that_failed_in_a_redis_outage_can_be_repeated(
    api: ApiHarness, redis_server: RedisProcess
) -> None:
    key = call_key("default", "acme", "c1")
    with redis_server.client() as store:
        # No worker ends the call, so a kill has to wait.
        store.hset(
            key,
            mapping={
                "state": "running",
                "attempt": 1,
                "holder": "host.h1.b1/w1",
                "queue": "host.h1.b1",
                "task": "t1",
                "session": "s1",
            },
        )
        kill = ApiRequest("kill", "POST", "/v1/calls/c1/kill", content={})
        killing = asyncio.create_task(send(api["acme"], kill, {}))
        await wait_until_async(lambda: store.hexists(key, "killed"), READY_S, "the order was given")
        same = await send(api["acme"], kill, {})
        assert (same.status, same.code) == (409, "IDEMPOTENCY_IN_PROGRESS")
    redis_server.stop()
    try:
        broken = await killing
        assert (broken.status, broken.code) == (503, "BROKER_UNAVAILABLE")
    finally:
        redis_server.start()
    with redis_server.client() as store:
        store.hset(key, mapping={"state": "done", "code": "CANCELLED"})
    again = await send_until_stored(api["acme"], kill, {})
    assert (again.status, json.loads(again.text)["state"]) == (200, "done"), again


async def test_a_batch_submission_cut_off_by_a_redis_outage_continues_when_it_is_repeated(
    api: ApiHarness, redis_server: RedisProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    work, added = BatchStore.step, []

    async def step(store: BatchStore, operation: str, *rest: Any, **arguments: Any) -> Any:
        if operation == "add":
            added.append(rest)
            if len(added) == 2:
                await asyncio.to_thread(redis_server.stop)
        return await work(store, operation, *rest, **arguments)

    monkeypatch.setattr(BatchStore, "step", step)
    lines = "".join(json.dumps({"id": f"line-{number}", "instruction": "x"}) + "\n" for number in range(LINES))
    submit = ApiRequest("submit", "POST", "/v1/batches", content=lines, kind="application/jsonl")
    try:
        broken = await send(api["acme"], submit, {})
        assert (broken.status, broken.code) == (503, "BROKER_UNAVAILABLE")
    finally:
        redis_server.start()
    again = await send_until_stored(api["acme"], submit, {})
    assert added[0], "some were queued before it broke off"
    assert (again.status, json.loads(again.text)["request_counts"]["waiting"]) == (201, LINES), again
    found = (await api["acme"].get("/v1/batches")).json()["data"]
    assert [batch["id"] for batch in found] == [json.loads(again.text)["id"]]


async def test_killing_an_unknown_call_is_answered_404_at_once(api: ApiHarness) -> None:
    reply = await send(
        api["acme"], ApiRequest("kill", "POST", "/v1/calls/never-was/kill", content={"reason": "why not"}), {}
    )
    assert (reply.status, reply.code) == (404, "NOT_FOUND")
    # A search for a waiting call takes five seconds.
    assert reply.took_s < 4
    assert (await api["operator"].get("/v1/audit", params={"action": "call.kill"})).json()["data"] == []


async def test_readiness_probes_are_cached(api: ApiHarness, redis_server: RedisProcess) -> None:
    with redis_server.client() as store:

        def sets() -> int:
            return int(store.info("commandstats").get("cmdstat_set", {}).get("calls", 0))  # type: ignore[union-attr]

        before, began, looks = sets(), time.monotonic(), 200
        answers = [(await api.anonymous.get("/readyz")).json() for _ in range(looks)]
        took_s = time.monotonic() - began
        assert sets() - before <= took_s + 2 < looks
    assert {answer["checks"]["redis"] for answer in answers} == {"ok"}


async def test_an_operator_retry_of_a_tenants_batch_is_audited_only_if_it_changes_items(api: ApiHarness) -> None:
    lines = '{"id": "a", "instruction": "x"}\n{"id": "b", "instruction": "x"}\n'
    batch = (
        await api["acme"].post("/v1/batches", content=lines, headers={"Content-Type": "application/jsonl"})
    ).json()["id"]

    async def retried(key: str) -> int:
        assert (await api["acme"].post(f"/v1/batches/{batch}/cancel")).status_code == 200
        answer = await api[key].post(
            f"/v1/batches/{batch}/retry", params={"tenant": "acme"}, json={"kinds": ["cancelled"]}
        )
        assert answer.status_code == 200, answer.text
        return int(answer.json()["items"])

    assert [await retried("acme"), await retried("operator")] == [2, 2]
    nothing = await api["operator"].post(
        f"/v1/batches/{batch}/retry", params={"tenant": "acme"}, json={"kinds": ["cancelled"]}
    )
    assert nothing.json()["items"] == 0
    entries = (await api["operator"].get("/v1/audit", params={"action": "batch.retry"})).json()["data"]
    assert [(entry["target"], entry["tenant"], entry["actor"]["name"]) for entry in entries] == [
        (batch, "acme", "operator")
    ]


async def test_an_ended_batch_can_be_deleted(api: ApiHarness) -> None:
    lines = '{"id": "a", "instruction": "x"}\n'
    posted = await api["acme"].post("/v1/batches", content=lines, headers={"Content-Type": "application/jsonl"})
    path, operator = f"/v1/batches/{posted.json()['id']}", {"tenant": "acme"}
    assert (await api["acme"].delete(path)).status_code == 422
    assert (await api["acme"].post(f"{path}/cancel")).status_code == 200
    assert [(await api["operator"].delete(path, params=operator)).status_code for _ in range(2)] == [204, 404]
    assert (await api["acme"].get("/v1/batches")).json()["data"] == []
    entries = (await api["operator"].get("/v1/audit", params={"action": "batch.delete"})).json()["data"]
    assert [entry["target"] for entry in entries] == [posted.json()["id"]]
