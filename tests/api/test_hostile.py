"""Attacks through the content of requests: bodies, headers, ids and names that try to break the service or to reveal
data of other tenants.
"""

import asyncio
import time
from typing import Any

import httpx
import pytest

from tests.conftest import RedisProcess
from tests.support.api.api_harness import ApiHarness, api_settings
from tests.support.redis.approval_harness import build_question
from tests.support.stack.waiting import SOON_S
from toolcrew.store import idempotency as once_slots
from toolcrew.store.approvals import ApprovalQueue
from toolcrew.store.connection import open_redis

JSON = {"Content-Type": "application/json"}
LONE_SURROGATE = b"\\ud800"
TENANT_ROUTES = [
    ("GET", "/v1/runs/{run}"),
    ("POST", "/v1/runs/{run}/cancel"),
    ("GET", "/v1/runs/{run}/transcript"),
    ("GET", "/v1/runs/{run}/events"),
    ("GET", "/v1/batches/{batch}"),
    ("DELETE", "/v1/batches/{batch}"),
    ("POST", "/v1/batches/{batch}/cancel"),
    ("GET", "/v1/batches/{batch}/results"),
    ("POST", "/v1/batches/{batch}/retry"),
    ("GET", "/v1/approvals/{approval}"),
    ("POST", "/v1/approvals/{approval}"),
]
BODIES = {"/retry": {"kinds": ["model"]}, "/approvals/": {"decision": "allow", "digest": "x"}}
HOSTILE_BODIES = {
    "nested lists": b"[" * 200_000,
    "nested objects": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "deeply nested history": b'{"instruction": "x", "history": [' + b'{"a":' * 300 + b"1" + b"}" * 300 + b"]}",
    "NaN": (b'{"instruction": "x", "max_wall_s": NaN, "ttl_s": NaN, "timeout_s": NaN, "name": "a", "policy": {"weight": '
b'NaN}}'),
    "number above the float range": (b'{"instruction": "x", "max_wall_s": 1e999, "ttl_s": 1e999, "timeout_s": 1e999, "name": "a", "policy": '
b'{"weight": 1e999}}'),
    "number of 5,000 digits": b'{"instruction": "x", "priority": ' + b"9" * 5000 + b"}",
    "lone surrogate": b'{"instruction": "' + LONE_SURROGATE + b'", "name": "' + LONE_SURROGATE + b'", "reason": "' + LONE_SURROGATE + b'", "image": "' + LONE_SURROGATE + b'"}',
    "lone surrogate in a list": b'{"instruction": "x", "tools": ["' + LONE_SURROGATE + b'"], "policy": {"tools": ["' + LONE_SURROGATE + b'"]}, "kinds": ["' + LONE_SURROGATE + b'"]}',
    "lone surrogate as a key": b'{"instruction": "x", "metadata": {"' + LONE_SURROGATE + b'": "' + LONE_SURROGATE + b'"}}',
    "lone surrogate in the history": b'{"instruction": "x", "history": [{"role": "user", "content": "' + LONE_SURROGATE + b'"}]}',
    "invalid UTF-8": b'{"instruction": "\xff\xfe"}',
    "many lists": b'{"instruction": "x", "history": [' + b"[]," * 500_000 + b"0]}",
    "many unknown keys": b"{" + b",".join(b'"k%d": 1' % number for number in range(150_000)) + b"}",
    "list instead of an object": b"[]",
    "empty body": b"",
}  # fmt: skip
POST_PATHS = [
    "/v1/runs",
    "/v1/sessions",
    "/v1/tenants",
    "/v1/tenants/acme/keys",
    "/v1/sessions/s/calls",
    "/v1/batches/b/retry",
]
AMBIGUOUS_HEADS = {
    "two lengths": b"Content-Length: 2\r\nContent-Length: 50\r\n\r\n{}",
    "a length and chunks": b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    "unknown coding": b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
    "two codings": b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
    "a space before the colon": b"Content-Length : 2\r\n\r\n{}",
    "two hosts": b"Host: other\r\nContent-Length: 2\r\n\r\n{}",
    "oversized head": b"X: " + b"a" * 200_000,
    "invalid chunk size": b"Transfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n",
}


def read_problem(response: httpx.Response) -> dict[str, Any]:
    """Return the problem in the response."""
    assert response.headers["content-type"] == "application/problem+json", response.text
    problem: dict[str, Any] = response.json()
    return problem


@pytest.mark.parametrize("body", HOSTILE_BODIES.values(), ids=HOSTILE_BODIES.keys())
async def test_a_hostile_body_never_causes_an_internal_error(api: ApiHarness, body: bytes) -> None:
    for path in POST_PATHS:
        response = await api["admin"].post(path, content=body, headers=JSON)
        # The route may accept the remaining fields of the body, so success is allowed too.
        assert response.status_code in (200, 201, 202, 400, 404, 413, 422, 503), (path, response.text)
        if response.status_code >= 400:
            assert read_problem(response)["code"] != "INTERNAL", path


@pytest.mark.parametrize("media_type", ["application/json", "Application/JSON", "application/x+Json; charset=utf-8"])
async def test_a_body_of_many_values_is_refused_in_bounded_time(api: ApiHarness, media_type: str) -> None:
    began = time.process_time()
    for kind in ("many lists", "many unknown keys"):
        headers = {"Content-Type": media_type}
        response = await api["acme"].post("/v1/runs", content=HOSTILE_BODIES[kind], headers=headers)
        assert (response.status_code, read_problem(response)["code"]) == (413, "BODY_TOO_LARGE")
    # The service runs in this process. An error for each key would take seconds.
    assert time.process_time() - began < 0.5


async def test_runs_that_cannot_be_stored_as_json_are_refused(api: ApiHarness) -> None:
    for kind in (
        "deeply nested history",
        "lone surrogate in a list",
        "lone surrogate as a key",
        "lone surrogate in the history",
    ):
        assert (await api["acme"].post("/v1/runs", content=HOSTILE_BODIES[kind], headers=JSON)).status_code == 422
    assert (await api["acme"].get("/v1/runs")).json()["data"] == []


async def test_a_tenant_that_fills_its_queue_quota_does_not_fill_redis(
    api: ApiHarness, redis_server: RedisProcess
) -> None:
    """Calls and results have the rest of the memory, and another tenant still queues its runs."""
    with redis_server.client() as client:
        client.config_set("maxmemory", client.info("memory")["used_memory"] + 16 * 1024 * 1024)
        try:
            body, lines = {"instruction": "x" * 1_000_000}, b'{"id": "a", "instruction": "x"}\n'
            while (refused := await api["acme"].post("/v1/runs", json=body)).status_code == 202:
                pass
            memory = client.info("memory")
            assert memory["used_memory"] < 0.85 * memory["maxmemory"]
            assert (refused.status_code, read_problem(refused)["code"]) == (429, "QUOTA_EXCEEDED")
            assert (await api["rival"].post("/v1/runs", json={"instruction": "x"})).status_code == 202
            # The body of the refused run counted, too, and a small request may still have had room.
            client.config_set("maxmemory", int(client.info("memory")["used_memory"] / 0.95))
            refused = await api["acme"].post("/v1/batches", content=lines, headers={"Content-Type": "text/plain"})
            assert (refused.status_code, read_problem(refused)["code"]) == (429, "QUOTA_EXCEEDED")
            assert (await api["acme"].get("/v1/batches")).json()["data"] == []
        finally:
            client.config_set("maxmemory", 0)


@pytest.mark.parametrize("head", AMBIGUOUS_HEADS.values(), ids=AMBIGUOUS_HEADS.keys())
async def test_an_ambiguous_request_head_is_refused_and_its_connection_closed(api: ApiHarness, head: bytes) -> None:
    answer = await exchange(api, b"POST /v1/tenants HTTP/1.1\r\n", head)
    assert answer.startswith(b"HTTP/1.1 400 Bad Request")
    assert answer.count(b"\r\n\r\n") == 1
    assert b"application/problem+json" in answer


async def test_a_smuggled_second_request_is_not_answered(api: ApiHarness) -> None:
    hidden = b"GET /v1/tenants HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer " + api.keys["admin"].encode() + b"\r\n\r\n"
    head = b"Content-Length: %d\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" % (len(hidden) + 5)
    answer = await exchange(api, b"POST /v1/tenants HTTP/1.1\r\n", head + hidden)
    assert (answer.startswith(b"HTTP/1.1 400"), b'"data"' in answer) == (True, False)


async def exchange(api: ApiHarness, line: bytes, rest: bytes) -> bytes:
    """Return everything that arrives until the connection closes. The close must come soon."""
    host, port = api.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    head = f"Host: x\r\nAuthorization: Bearer {api.keys['admin']}\r\nContent-Type: application/json\r\n"
    writer.write(line + head.encode() + rest)
    answer = bytearray()
    try:
        async with asyncio.timeout(SOON_S):
            while piece := await reader.read(65536):
                answer += piece
    except ConnectionResetError:
        # The server has not read all data.
        assert answer
    finally:
        writer.close()
    return bytes(answer)


async def test_objects_of_another_tenant_look_like_unknown_objects(api: ApiHarness, redis_server: RedisProcess) -> None:
    run = (await api["acme"].post("/v1/runs", json={"instruction": "x"})).json()["id"]
    lines = {**JSON, "Content-Type": "application/jsonl"}
    batch = (await api["acme"].post("/v1/batches", content='{"id": "a", "instruction": "x"}', headers=lines)).json()[
        "id"
    ]
    approval = await ask_for_approval(redis_server)
    names = {"run": run, "batch": batch, "approval": approval}
    unknown = {name: id_[:-2] + ("00" if not id_.endswith("00") else "11") for name, id_ in names.items()}
    for method, path in TENANT_ROUTES:
        body = next((body for part, body in BODIES.items() if part in path), None)
        answers = [await api["rival"].request(method, path.format(**ids), json=body) for ids in (names, unknown)]
        kind = path.split("{")[1].split("}")[0]
        texts = [answer.text.replace(ids[kind], "ID") for answer, ids in zip(answers, (names, unknown), strict=True)]
        assert [answer.status_code for answer in answers] == [404, 404], path
        assert texts[0] == texts[1], path
        assert sorted(answers[0].headers) == sorted(answers[1].headers)
    assert (await api["acme"].get(f"/v1/runs/{run}")).json()["state"] == "queued"
    assert (await api["acme"].get(f"/v1/approvals/{approval}")).status_code == 200


async def ask_for_approval(redis_server: RedisProcess, command: str = "rm -rf /data") -> str:
    """Start a call of acme that waits for approval."""
    settings = api_settings(redis_server.url)
    client = open_redis(settings.broker())
    try:
        queue = ApprovalQueue(client, settings.deployment, settings.broker().signing_keys())
        question = build_question(command)
        await queue.ask(question, "asker", 600)
        return question.id
    finally:
        await client.aclose()


async def test_an_approval_shows_control_characters_and_lone_surrogates_exactly(
    api: ApiHarness, redis_server: RedisProcess
) -> None:
    approval = await ask_for_approval(redis_server, command="echo \ud800 \u202e é")
    shown = await api["acme"].get(f"/v1/approvals/{approval}")
    assert shown.status_code == 200
    assert shown.json()["arguments"]["command"] == "echo \ud800 \u202e é"
    assert [one["id"] for one in (await api["acme"].get("/v1/approvals")).json()["data"]] == [approval]


@pytest.mark.parametrize("method", ["OPTIONS", "HEAD", "TRACE", "CONNECT", "PROPFIND"])
async def test_an_unsupported_method_is_refused_with_the_allowed_methods(api: ApiHarness, method: str) -> None:
    answer = await api["acme"].request(method, "/v1/runs")
    assert (answer.status_code, answer.headers["allow"]) == (405, "GET, POST")


async def test_responses_contain_no_cors_headers(api: ApiHarness) -> None:
    headers = {"Origin": "https://evil.example", "Access-Control-Request-Method": "POST"}
    for answer in (
        await api["acme"].get("/v1/runs", headers=headers),
        await api["acme"].options("/v1/runs", headers=headers),
    ):
        assert not [name for name in answer.headers if name.startswith("access-control")]


async def test_a_forged_host_header_is_not_repeated_in_responses(api: ApiHarness) -> None:
    names = {"Host": "evil.example", "X-Forwarded-Host": "evil.example", "Forwarded": "host=evil.example"}
    for path in ("/v1/nothing", "/v1/runs/", "/openapi.json"):
        assert "evil.example" not in (await api["acme"].get(path, headers=names)).text
    started = await api["acme"].post("/v1/runs", json={"instruction": "x"}, headers=names)
    assert started.headers["location"].startswith("/v1/runs/")


async def test_wrong_keys_with_a_valid_id_get_the_same_refusal(api: ApiHarness) -> None:
    key = api.keys["acme"]
    guesses = [key[:-1] + ("A" if key[-1] != "A" else "B"), key[:20] + "A" * 43, key.upper(), key + "A"]
    answers = [await api.anonymous.get("/v1/runs", headers={"Authorization": f"Bearer {guess}"}) for guess in guesses]
    assert {(answer.status_code, answer.text) for answer in answers} == {(401, answers[0].text)}


async def test_stored_responses_of_idempotency_keys_are_limited_for_each_api_key(
    api: ApiHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(once_slots, "MAX_STORED_BYTES", 3000)
    codes = [
        (
            await api["acme"].post("/v1/runs", json={"instruction": "x"}, headers={"Idempotency-Key": f"k{number}"})
        ).status_code
        for number in range(10)
    ]
    assert (codes[0], codes[-1]) == (202, 429)
    again = await api["acme"].post("/v1/runs", json={"instruction": "x"}, headers={"Idempotency-Key": "k0"})
    assert (again.status_code, again.headers["idempotent-replayed"]) == (202, "true")
    assert (
        await api["rival"].post("/v1/runs", json={"instruction": "x"}, headers={"Idempotency-Key": "k"})
    ).status_code == 202


async def test_refused_requests_store_no_idempotency_record(api: ApiHarness, redis_server: RedisProcess) -> None:
    for number in range(20):
        await api["acme"].post("/v1/runs", json={"wrong": number}, headers={"Idempotency-Key": f"k{number}"})
    with redis_server.client() as client:
        assert client.keys("*:api:once:*") == []
