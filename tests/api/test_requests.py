"""General behaviour of requests: problems as errors, limits of bodies and rates, idempotency keys, pages, and slow or
dead peers.
"""

import asyncio
import contextlib
import json
import re
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from tests.conftest import RedisProcess
from tests.support.api.api_harness import ApiHarness, api_settings, open_api, serving
from tests.support.records.wire_records import REPORT
from tests.support.stack.waiting import SOON_S
from toolcrew.contract.errors import BrokerUnavailable, ConfigError
from toolcrew.orchestrator.api import service
from toolcrew.orchestrator.api.idempotency import STORE_WAIT_S
from toolcrew.orchestrator.api.service import ApiService
from toolcrew.orchestrator.http import body_limits, server
from toolcrew.orchestrator.runs.runner import Runner
from toolcrew.store.clock import SharedClock
from toolcrew.store.hosts import WorkerHostStore
from toolcrew.store.idempotency import IdempotencyStore, SlotClaim


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/v1/nothing", 404, "NOT_FOUND"),
        ("DELETE", "/v1/tools", 405, "METHOD_NOT_ALLOWED"),
        ("GET", "/v1/batches/none-of-that-name", 404, "NOT_FOUND"),
        ("GET", "/v1/tenants/none-of-that-name", 404, "UNKNOWN_TENANT"),
        ("GET", "/v1/batches/%2e%2e%2f%2e%2e", 404, "NOT_FOUND"),
        ("GET", "/v1/batches?cursor=%00", 422, "INVALID_ARGUMENTS"),
        ("GET", "/v1/batches?limit=100000", 422, "INVALID_ARGUMENTS"),
        ("GET", f"/v1/runs/none/events?after={2**64}", 422, "INVALID_ARGUMENTS"),
        ("GET", f"/v1/runs/none/events?after={2**64 - 1}-{2**64 - 1}", 422, "INVALID_ARGUMENTS"),
    ],
)
async def test_a_failed_request_is_a_problem_with_status_and_code(
    api: ApiHarness, method: str, path: str, status: int, code: str
) -> None:
    response = await api["admin"].request(method, path)
    assert response.headers["content-type"] == "application/problem+json"
    assert (response.status_code, response.json()["code"]) == (status, code)


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", "/v1/runs/nope", None),
        ("GET", "/v1/tenants/nope", None),
        ("PUT", "/v1/tenants/nope", {}),
        ("DELETE", "/v1/tenants/nope", None),
        ("POST", "/v1/tenants/nope/pause", {}),
        ("POST", "/v1/tenants/nope/resume", None),
        ("POST", "/v1/tenants/nope/keys", {}),
        ("POST", "/v1/tenants", {"name": "acme"}),
        ("POST", "/v1/tenants", {"name": "default"}),
    ],
)
async def test_advice_names_addresses_and_no_commands(
    api: ApiHarness, method: str, path: str, body: dict[str, Any] | None
) -> None:
    response = await api["admin"].request(method, path, json=body)
    assert response.status_code >= 400
    detail = response.json()["detail"]
    assert ("/v1/" in detail, "toolcrew" in detail) == (True, False)


@pytest.mark.parametrize(
    ("method", "path", "nearest"),
    [
        ("GET", "/v1/calls?curser=x", "cursor"),
        ("GET", "/v1/sessions?limits=1", "limit"),
        ("GET", "/v1/runs/none/events?tenent=acme", "tenant"),
        ("GET", "/v1/sessions/s/files/a.txt?tenant=acme&tennant=acme", "tenant"),
        ("POST", "/v1/sessions/s/calls?tenent=acme", "tenant"),
        ("POST", "/v1/batches?nmae=docs", "name"),
        ("DELETE", f"/v1/sessions/s?{'x' * 5000}=1", "tenant"),
    ],
)
async def test_an_unknown_query_parameter_is_refused_with_the_nearest_name(
    api: ApiHarness, method: str, path: str, nearest: str
) -> None:
    body = {"json": {"name": "bash_tool"}} if path.endswith("tenent=acme") and method == "POST" else {}
    response = await api["operator"].request(method, path, **body)
    problem = response.json()
    assert (response.status_code, problem["code"]) == (422, "INVALID_ARGUMENTS")
    assert problem["nearest"][0] == nearest
    assert len(problem["detail"]) < 500


@pytest.mark.parametrize(
    ("path", "is_repeatable"), [("/v1/calls?limit=1&limit=2", False), ("/v1/batches?secrets=A&secrets=B", True)]
)
async def test_a_repeated_query_parameter_is_refused_unless_it_is_a_list(
    api: ApiHarness, path: str, is_repeatable: bool
) -> None:
    method = "POST" if is_repeatable else "GET"
    response = await api["operator"].request(method, path)
    assert response.status_code == 422
    assert ("was sent twice" in response.text) != is_repeatable


async def test_every_listed_parameter_is_accepted(api: ApiHarness) -> None:
    paths = (await api["admin"].get("/openapi.json")).json()["paths"]
    for path, methods in paths.items():
        names = [one["name"] for one in methods.get("get", {}).get("parameters", []) if one["in"] == "query"]
        if not path.startswith("/v1/") or not names:
            continue
        response = await api["admin"].get(path.replace("{", "").replace("}", ""), params=dict.fromkeys(names, "\0"))
        assert "has no query parameter" not in response.text, path


async def test_a_malformed_json_body_is_reported_without_its_content(api: ApiHarness) -> None:
    response = await api["admin"].post(
        "/v1/tenants", content=b'{"name": "a", secret-of-mine', headers={"content-type": "application/json"}
    )
    assert (response.status_code, response.json()["code"]) == (400, "MALFORMED_REQUEST")
    assert "secret-of-mine" not in response.text


async def test_an_unknown_field_is_named_and_nothing_is_changed(api: ApiHarness) -> None:
    response = await api["admin"].post("/v1/tenants", json={"name": "fresh", "wieght": 1})
    assert (response.status_code, response.json()["errors"][0]["loc"]) == (422, ["body", "wieght"])
    assert (await api["admin"].get("/v1/tenants/fresh")).status_code == 404


async def test_a_policy_with_an_invalid_field_is_refused(api: ApiHarness) -> None:
    made = await api["admin"].post("/v1/tenants", json={"name": "fresh", "policy": {"timeout_s": 9999}})
    assert (made.status_code, made.json()["errors"][0]["loc"]) == (422, ["body", "policy", "timeout_s"])
    assert (await api["admin"].get("/v1/tenants/fresh")).status_code == 404
    changed = await api["admin"].put("/v1/tenants/acme", json={"in_flight": 0})
    assert (changed.status_code, changed.json()["errors"][0]["loc"]) == (422, ["body", "in_flight"])


async def test_a_policy_with_a_class_that_no_host_has_is_refused(api: ApiHarness, redis_server: RedisProcess) -> None:
    with redis_server.client() as client:
        report = REPORT.model_copy(update={"classes": ("default", "large")})
        WorkerHostStore(client, "default", SharedClock()).report(report)
    policy = {"sandbox": {"tenant_class": "larg"}}
    refused = [
        await api["admin"].post("/v1/tenants", json={"name": "fresh", "policy": policy}),
        await api["admin"].put("/v1/tenants/acme", json=policy),
    ]
    assert [(answer.status_code, answer.json()["code"]) for answer in refused] == [(422, "INVALID_ARGUMENTS")] * 2
    assert "large" in refused[0].text
    accepted = await api["admin"].put("/v1/tenants/acme", json={"sandbox": {"tenant_class": "large"}})
    assert accepted.json()["policy"]["sandbox"]["tenant_class"] == "large"


async def test_a_call_timeout_above_the_limit_is_refused(api: ApiHarness) -> None:
    answer = await api["acme"].post("/v1/sessions/s1/calls", json={"name": "bash_tool", "timeout_s": 86_401})
    assert (answer.status_code, answer.json()["errors"][0]["loc"]) == (422, ["body", "timeout_s"])


async def test_a_declared_giant_body_is_refused_before_it_is_read(api: ApiHarness) -> None:
    answer = await send_raw(api, f"Content-Length: {10 * 1024**3}\r\n", b"{")
    assert b"413" in answer


async def test_a_giant_chunked_body_is_cut_off_at_the_limit(api: ApiHarness) -> None:
    async def endless() -> object:
        for _ in range(100):
            yield b"x" * 65536

    # A client that continues to send may not receive the response.
    with contextlib.suppress(httpx.TransportError):
        response = await api["admin"].post("/v1/tenants", content=endless())  # type: ignore[arg-type]
        assert (response.status_code, response.json()["code"]) == (413, "BODY_TOO_LARGE")
    assert (await api["admin"].get("/v1/tenants")).status_code == 200


async def test_a_client_that_sends_its_head_too_slowly_is_disconnected(
    api: ApiHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "HEAD_WITHIN_S", 0.3)
    host, port = api.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"GET /healthz HTTP/1.1\r\nHost: x\r\nX-Slow: ")
    await writer.drain()
    assert await asyncio.wait_for(reader.read(), SOON_S) == b""
    writer.close()


async def test_a_client_that_stops_in_the_middle_of_its_body_is_answered_408(
    api: ApiHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(body_limits, "CHUNK_WITHIN_S", 0.3)
    assert b"408" in await send_raw(api, "Content-Length: 100\r\n", b'{"na')


async def send_raw(api: ApiHarness, header: str, body: bytes) -> bytes:
    """Return the first line of the response to a request whose body ends too early."""
    host, port = api.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    head = (
        f"POST /v1/tenants HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {api.keys['admin']}\r\nContent-Type: "
        f"application/json\r\n{header}\r\n"
    )
    writer.write(head.encode() + body)
    await writer.drain()
    try:
        return await asyncio.wait_for(reader.readline(), SOON_S)
    finally:
        writer.close()


async def test_a_key_above_its_request_rate_is_answered_429(redis_server: RedisProcess, five_at_once: None) -> None:
    async with open_api(redis_server.url, api_rate=0.01) as harness:
        answers = [await harness["acme"].get("/v1/batches") for _ in range(6)]
        assert [answer.status_code for answer in answers] == [200] * 5 + [429]
        assert int(answers[-1].headers["retry-after"]) >= 1
        assert (await harness["rival"].get("/v1/batches")).status_code == 200


async def test_a_request_with_an_idempotency_key_is_executed_once(api: ApiHarness) -> None:
    headers = {"Idempotency-Key": "once"}
    answers = [await api["admin"].post("/v1/tenants", json={"name": "fresh"}, headers=headers) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [201, 201]
    assert answers[0].content == answers[1].content
    assert answers[1].headers["idempotent-replayed"] == "true"


async def test_an_idempotency_key_cannot_be_used_for_another_request(api: ApiHarness) -> None:
    headers = {"Idempotency-Key": "once"}
    await api["admin"].post("/v1/tenants", json={"name": "fresh"}, headers=headers)
    other = await api["admin"].post("/v1/tenants", json={"name": "other"}, headers=headers)
    assert (other.status_code, other.json()["code"]) == (422, "IDEMPOTENCY_MISMATCH")


async def test_the_same_idempotency_key_of_two_tenants_is_two_requests(api: ApiHarness) -> None:
    headers = {"Idempotency-Key": "once", "Content-Type": "application/jsonl"}
    line = json.dumps({"id": "a", "instruction": "x"})
    first, second = [await api[name].post("/v1/batches", content=line, headers=headers) for name in ("acme", "rival")]
    assert (first.status_code, second.status_code) == (201, 201)
    assert first.json()["id"] != second.json()["id"]


async def test_a_repeated_batch_submission_returns_the_existing_batch_for_a_day(
    api: ApiHarness, redis_server: RedisProcess
) -> None:
    headers = {"Idempotency-Key": "once", "Content-Type": "application/jsonl"}
    line = json.dumps({"id": "a", "instruction": "x"})

    async def sent(**options: Any) -> dict[str, Any]:
        with redis_server.client() as store:
            for slot in store.scan_iter("*:api:once:*"):
                store.delete(slot)
        answer = await api["acme"].post("/v1/batches", content=line, headers=headers, params=options)
        assert answer.status_code == 201, answer.text
        reply: dict[str, Any] = answer.json()
        return reply

    first = await sent()
    await api["acme"].post(f"/v1/batches/{first['id']}/cancel")
    again = await sent()
    assert (again["id"], again["status"]) == (first["id"], "cancelled")
    other = await sent(concurrency=3)
    assert (other["id"] != first["id"], other["concurrency"]) == (True, 3)
    with redis_server.client() as store:
        (record,) = store.keys(f"*:batch.{first['id']}")
        store.hset(record, "created_at", str(time.time() - 24 * 3600 - 1))
    tomorrow = await sent()
    assert (tomorrow["id"] not in (first["id"], other["id"]), tomorrow["status"]) == (True, "in_progress")
    assert (await sent())["id"] == tomorrow["id"]


async def test_a_request_whose_claim_reply_was_lost_succeeds_when_repeated(
    api: ApiHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    work, claims = IdempotencyStore.claim, 0

    async def claim(slots: IdempotencyStore, claimed: SlotClaim) -> Any:
        nonlocal claims
        claims += 1
        result = await work(slots, claimed)
        if claims == 1:
            raise BrokerUnavailable("the connection was lost with the answer")
        return result

    monkeypatch.setattr(IdempotencyStore, "claim", claim)
    headers = {"Idempotency-Key": "once"}
    unheard = await api["admin"].post("/v1/tenants", json={"name": "fresh"}, headers=headers)
    assert (unheard.status_code, unheard.json()["code"]) == (503, "BROKER_UNAVAILABLE")
    answer = await api["admin"].post("/v1/tenants", json={"name": "fresh"}, headers=headers)
    while answer.status_code == 409:
        assert claims < 100
        answer = await api["admin"].post("/v1/tenants", json={"name": "fresh"}, headers=headers)
    assert answer.status_code == 201, answer.text


async def test_a_stopping_service_stores_its_pending_responses_first(
    redis_server: RedisProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    work, goes_on, began = IdempotencyStore.keep, asyncio.Event(), asyncio.Event()

    async def keep(slots: IdempotencyStore, claimed: SlotClaim, record: str) -> None:
        began.set()
        await goes_on.wait()
        await work(slots, claimed, record)

    monkeypatch.setattr(IdempotencyStore, "keep", keep)
    headers = {"Idempotency-Key": "once"}
    async with open_api(redis_server.url) as api:
        assert (await api["admin"].post("/v1/tenants", json={"name": "fresh"}, headers=headers)).status_code == 201
        await began.wait()
        # Longer than the server's own limit for a request.
        asyncio.get_running_loop().call_later(STORE_WAIT_S + 1, goes_on.set)
    with redis_server.client() as store:
        (slot,) = store.keys("*:api:once:*")
        # A stored response is signed: the signature precedes the JSON. A pending claim is not signed.
        answer = str(store.get(slot), "utf-8").split(".", 2)[2]
    assert json.loads(answer)["status"] == 201


async def test_a_service_started_without_redis_answers_health_checks_and_503(redis_server: RedisProcess) -> None:
    redis_server.stop()
    try:
        async with (
            serving(api_settings(redis_server.url)) as url,
            httpx.AsyncClient(verify=False, base_url=url) as client,
        ):
            assert (await client.get("/healthz")).status_code == 200
            assert (await client.get("/readyz")).status_code == 503
            answer = await client.get("/v1/tools", headers={"Authorization": "Bearer x"})
            assert (answer.status_code, answer.json()["code"]) == (503, "NOT_READY")
            assert redis_server.url not in answer.text
    finally:
        redis_server.start()


async def test_invalid_tracing_settings_are_reported_at_construction(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TOOLCREW_TRACING", "otlp")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    with pytest.raises(ConfigError, match="OTEL_EXPORTER_OTLP_PROTOCOL"):
        ApiService(api_settings("redis://:word@127.0.0.1:1/0"), "127.0.0.1", 0, 0)


async def test_a_runner_that_failed_is_started_again(
    redis_server: RedisProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, is_again = 0, asyncio.Event()

    @contextlib.asynccontextmanager
    async def open_broken(*_: object, **__: object) -> AsyncIterator[Runner]:
        nonlocal begun
        begun += 1
        if begun == 2:
            is_again.set()
        raise RuntimeError("an unexpected error")
        yield

    monkeypatch.setattr(service, "RETRY_S", 0.01)
    monkeypatch.setattr(service, "open_runner", open_broken)
    async with open_api(redis_server.url, concurrency=1), asyncio.timeout(SOON_S):
        await is_again.wait()


async def test_operations_have_short_names_of_their_own(api: ApiHarness) -> None:
    """Generated clients name their functions after the operations."""
    paths = (await api["admin"].get("/openapi.json")).json()["paths"]
    names = [operation["operationId"] for methods in paths.values() for operation in methods.values()]
    assert len(names) == len(set(names))
    assert all(re.fullmatch(r"[a-z]+(_[a-z]+){0,3}", name) for name in names), names
    assert {"call_tool", "start_run", "read_session_file", "submit_batch"} <= set(names)
