"""Attacks on stored data and on identities: secrets in Redis, logins, streams of revoked keys, and the audit log."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest

from tests.api.test_hostile import ask_for_approval
from tests.conftest import RedisProcess
from tests.support.api.api_harness import ApiHarness, open_api
from tests.support.records.builders import build_spec
from tests.support.sandboxd.fake_hosts import build_report
from tests.support.stack.waiting import SOON_S
from toolcrew.contract.names import call_key, host_key, hosts_key
from toolcrew.contract.specs import Catalog
from toolcrew.orchestrator.api.pages import approval_pages
from toolcrew.orchestrator.operations import drains
from toolcrew.store import api_keys

IDEMPOTENCY = {"Idempotency-Key": "make-a-key"}
LONG_COMMAND = "echo " + "\u202e" * 100


@asynccontextmanager
async def open_login(api: ApiHarness, name: str) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(verify=False, base_url=api.url, timeout=60, headers={"Origin": api.url}) as client:
        assert (await client.post("/login", data={"key": api.keys[name]})).status_code == 303
        yield client


async def test_the_stored_response_of_a_key_creation_does_not_contain_the_key(
    api: ApiHarness, redis_server: RedisProcess
) -> None:
    first = await api["admin"].post("/v1/tenants/acme/keys", json={}, headers=IDEMPOTENCY)
    again = await api["admin"].post("/v1/tenants/acme/keys", json={}, headers=IDEMPOTENCY)
    assert (first.status_code, again.status_code, again.json()["code"]) == (201, 409, "CONFLICT")
    assert len((await api["admin"].get("/v1/tenants/acme/keys")).json()["data"]) == 2
    with redis_server.client() as client:
        records = [client.get(key) for key in client.scan_iter("*:api:once:*")]
    assert len(records) == 1
    assert b"told_once" in records[0]
    assert b"body" not in records[0]


async def test_a_key_that_asks_for_itself_does_not_make_the_service_read_all_keys(
    api: ApiHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(api_keys.ApiKeys, "all")
    own = await api["acme"].get("/v1/key")
    assert (own.status_code, own.json()["tenant"]) == (200, "acme")


async def test_failed_logins_of_one_client_do_not_lock_out_a_valid_key_from_the_same_address(
    redis_server: RedisProcess, five_at_once: None
) -> None:
    async with open_api(redis_server.url, api_rate=0.01) as api:
        async with httpx.AsyncClient(verify=False, base_url=api.url, headers={"Origin": api.url}) as client:
            wrong = [
                (await client.post("/login", data={"key": f"tc_{'0' * 16}_{'x' * 43}"})).status_code for _ in range(7)
            ]
        assert wrong == [401] * 5 + [429] * 2
        async with open_login(api, "acme") as client:
            assert (await client.get("/runs")).status_code == 200


async def test_operator_actions_are_audited_with_their_key(
    api: ApiHarness, redis_server: RedisProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drains, "ACCEPTED_WITHIN_S", 0.0)
    report = build_report("h1", started_at=time.time(), reported_at=time.time(), store="shared")
    with redis_server.client() as client:
        redis_server.publish_catalog(Catalog(tools=(build_spec("bash_tool"),)))
        client.zadd(hosts_key("default"), {report.queue: time.time()})
        client.set(host_key("default", report.queue), report.model_dump_json())
    # No worker exists that could receive the order.
    assert (await api["operator"].post("/v1/hosts/h1/drain", json={})).status_code == 500
    for_acme = {"tenant": "acme"}
    shown = (await api["operator"].patch("/v1/tools/bash_tool", json={"enabled": False}, params=for_acme)).json()
    assert shown["off"]["by"] == "operator"
    entries = (await api["operator"].get("/v1/audit")).json()["data"]
    assert [(one["action"], one["actor"]["name"], one["actor"]["role"]) for one in entries][:2] == [
        ("tool.disable", "operator", "operator"),
        ("host.drain", "operator", "operator"),
    ]


async def test_draining_an_unknown_host_is_answered_404(api: ApiHarness) -> None:
    answer = await api["operator"].post("/v1/hosts/unknown/drain", json={})
    assert (answer.status_code, answer.json()["code"]) == (404, "NOT_FOUND")


async def test_only_operators_see_the_flower_link(redis_server: RedisProcess) -> None:
    with redis_server.client() as client:
        fields: dict[str, str | int] = {
            "state": "done",
            "tool": "bash_tool",
            "attempt": 1,
            "task": "0123456789ab-c1.1.acme",
        }
        client.hset(call_key("default", "acme", "c1"), mapping=fields)
    async with open_api(redis_server.url, flower_url="https://flower.test") as api:
        async with open_login(api, "acme") as person, open_login(api, "operator") as operator:
            pages = [(await one.get("/calls/c1")).text for one in (person, operator)]
        assert ["https://flower.test" in page for page in pages] == [False, True]
        assert "flower_url" not in (await api["acme"].get("/v1/calls/c1")).json()


async def test_an_event_stream_ends_when_its_key_is_revoked(api: ApiHarness) -> None:
    made = (await api["admin"].post("/v1/tenants/acme/keys", json={})).json()
    run = (await api["acme"].post("/v1/runs", json={"instruction": "x"})).json()["id"]
    async with api.client(made["key"]) as client, client.stream("GET", f"/v1/runs/{run}/events") as stream:
        lines = stream.aiter_lines()
        assert await anext(lines) == "retry: 2000"
        assert (await api["admin"].delete(f"/v1/tenants/acme/keys/{made['id']}")).status_code == 204
        assert (await api["acme"].post(f"/v1/runs/{run}/cancel")).json()["state"] == "cancelled"
        assert [line async for line in lines if line.startswith("event: RunEnded")] == []


async def test_the_oldest_login_of_a_key_ends_at_the_login_limit(
    api: ApiHarness, redis_server: RedisProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api_keys, "LOGINS_PER_KEY", 2)
    async with open_login(api, "acme") as first, open_login(api, "acme") as second, open_login(api, "acme") as third:
        assert [(await client.get("/tools")).status_code for client in (first, second, third)] == [303, 200, 200]
    with redis_server.client() as client:
        assert len(list(client.scan_iter("*:page:login:*"))) == 2


@pytest.mark.parametrize("path", ["/approvals/x", "/tenants/acme/pause", "/logout"])
async def test_a_form_without_a_login_is_redirected_to_the_login_page(api: ApiHarness, path: str) -> None:
    answer = await open_running_batch(api, path, 500_000)
    assert answer.startswith(b"HTTP/1.1 303")
    assert b"location: /login" in answer


@pytest.mark.parametrize(
    ("path", "length"), [("/login", 20_000), ("/v1/batches/b/retry", 3_000_000), ("/v1/batches/b/cancel", 3_000_000)]
)
async def test_each_route_has_its_own_body_limit(api: ApiHarness, path: str, length: int) -> None:
    assert (await open_running_batch(api, path, length)).startswith(b"HTTP/1.1 413")


async def open_running_batch(api: ApiHarness, path: str, length: int) -> bytes:
    """Return the head of the response to a form whose body has only begun."""
    host, port = api.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {api.keys['acme']}\r\nOrigin: http://x\r\n"
    writer.write(f"{head}Content-Type: application/x-www-form-urlencoded\r\nContent-Length: {length}\r\n\r\na".encode())
    try:
        return await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), SOON_S)
    finally:
        writer.close()


async def test_a_long_approval_is_shown_and_decided_on_its_own_page(
    api: ApiHarness, redis_server: RedisProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(approval_pages, "MAX_CHARS", 200)
    short = await ask_for_approval(redis_server, "rm -rf /data")
    long = await ask_for_approval(redis_server, LONG_COMMAND)
    longer = await ask_for_approval(redis_server, LONG_COMMAND + "x")
    async with open_login(api, "acme") as client:
        listed = (await client.get("/approvals")).text
        alone = (await client.get(f"/approvals/{longer}")).text
    assert [f'action="/approvals/{one}"' in listed for one in (short, long, longer)] == [True, True, False]
    assert f'<a href="/approvals/{longer}">Read them and decide</a>' in listed
    assert f'action="/approvals/{longer}"' in alone
    assert alone.count("\\u202e") >= 100
