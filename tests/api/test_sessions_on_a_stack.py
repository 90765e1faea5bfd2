"""Sessions, calls and files over HTTP, on real workers and sandboxes."""

import asyncio
import secrets
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from tests.support.stack.api_stack import ApiStack, read_events
from tests.support.stack.stack import commands_in
from tests.support.stack.waiting import SOON_S, wait_until_async
from toolcrew.orchestrator.api.idempotency import MAX_ANSWER_BYTES

pytestmark = pytest.mark.stack

BINARY = bytes(range(256)) * 300
NAMES = [
    "data/plain.bin",
    "été/名前 \U0001f600.bin",
    "a%2Fb&c=d?e#f;g",
    'quo"te\tand; filename=evil',
    "-rf",
    "/tmp/absolute.bin",
    "dots/.../..x",
]


@pytest.fixture
async def client(api_stack: ApiStack) -> AsyncIterator[httpx.AsyncClient]:
    async with api_stack.client() as opened:
        yield opened


@pytest.fixture
async def session(client: httpx.AsyncClient) -> AsyncIterator[str]:
    opened = await client.post("/v1/sessions", json={"ttl_s": 600})
    assert opened.status_code == 201, opened.text
    yield opened.json()["id"]
    await client.delete(f"/v1/sessions/{opened.json()['id']}")


async def run(client: httpx.AsyncClient, session: str, command: str, **options: Any) -> dict[str, Any]:
    answer = await client.post(
        f"/v1/sessions/{session}/calls", json={"name": "bash_tool", "arguments": {"command": command}}, **options
    )
    assert answer.status_code == 200, answer.text
    reply: dict[str, Any] = answer.json()
    return reply


async def test_a_session_can_be_used_and_closed_on_any_replica(
    api_stack: ApiStack, client: httpx.AsyncClient, session: str
) -> None:
    assert (await run(client, session, "echo one >/tmp/x; echo hello"))["output"] == "hello\n"
    async with api_stack.client(replica=1) as other:
        read = await run(other, session, "cat /tmp/x")
        assert read["output"] == "one\n"
        assert session in [one["id"] for one in (await other.get("/v1/sessions")).json()["data"]]
        assert (await other.get(f"/v1/sessions/{session}")).status_code == 200
        container = read["sandbox"]["id"]
        assert api_stack.stack.has_container(container)
        assert (await other.delete(f"/v1/sessions/{session}")).status_code == 204
        assert not api_stack.stack.has_container(container)
        # Both replicas have made calls in the session a moment ago.
        for one in (client, other):
            missing = await one.post(
                f"/v1/sessions/{session}/calls", json={"name": "bash_tool", "arguments": {"command": "true"}}
            )
            assert (missing.status_code, missing.json()["code"]) == (404, "SESSION_NOT_FOUND")
    assert (await client.get(f"/v1/sessions/{session}")).status_code == 404


async def test_output_is_streamed_while_the_tool_runs(client: httpx.AsyncClient, session: str) -> None:
    # The tool continues only after its first output has been received.
    call = {
        "name": "bash_tool",
        "arguments": {"command": "echo first; until test -e /workspace/go; do sleep 0.1; done; echo second"},
    }
    path = f"/v1/sessions/{session}"
    async with client.stream("POST", f"{path}/calls", json=call, headers={"Accept": "text/event-stream"}) as stream:
        lines = [line async for line in wait_for_first(stream, client, path)]
    assert [line for line in lines if line.startswith("event: ")][-1] == "event: result"
    assert '"success":true' in lines[-2] or '"success":true' in lines[-1]


async def wait_for_first(stream: httpx.Response, client: httpx.AsyncClient, path: str) -> AsyncIterator[str]:
    async for line in stream.aiter_lines():
        yield line
        if '"first' in line and line.startswith("data: "):
            assert (await client.put(f"{path}/files/go", content=b"")).status_code == 200


async def test_a_client_disconnect_ends_the_call_with_all_its_processes(
    api_stack: ApiStack, client: httpx.AsyncClient, session: str
) -> None:
    sandbox = (await client.get(f"/v1/sessions/{session}")).json()["sandbox"] or await sandbox_of(client, session)
    container = api_stack.stack.full_id(sandbox)
    call = {"name": "bash_tool", "arguments": {"command": "echo begun; setsid sleep 4711 & sleep 4711"}}
    server_events = await read_events(client, f"/v1/sessions/{session}/calls", method="POST", json=call, most=1)
    assert server_events[0]["data"]["text"] == "begun\n"

    def are_gone() -> bool:
        return not [command for command in commands_in(container).values() if "sleep 4711" in command]

    await wait_until_async(are_gone, SOON_S, lambda: str(commands_in(container)))
    assert (await run(client, session, "echo still here"))["output"] == "still here\n"


async def sandbox_of(client: httpx.AsyncClient, session: str) -> str:
    """Return the session's sandbox, which is known after the first call."""
    return str((await run(client, session, "true"))["sandbox"]["id"])


async def test_a_repeated_call_runs_once_on_whichever_replica_receives_it(
    api_stack: ApiStack, client: httpx.AsyncClient, session: str
) -> None:
    headers = {"Idempotency-Key": f"once-{session}"}
    async with api_stack.client(replica=1) as other:
        answers = await asyncio.gather(
            *(
                one.post(
                    f"/v1/sessions/{session}/calls",
                    json={
                        "name": "bash_tool",
                        "arguments": {"command": "echo x >>/tmp/ran; sleep 0.3; wc -l </tmp/ran"},
                    },
                    headers=headers,
                )
                for one in (client, other, client)
            )
        )
        assert {answer.status_code for answer in answers} <= {200, 409}
        again = await run(other, session, "echo x >>/tmp/ran; sleep 0.3; wc -l </tmp/ran", headers=headers)
    assert again["output"] == "1\n"
    assert (await run(client, session, "wc -l </tmp/ran"))["output"] == "1\n"


async def test_a_rate_limited_call_runs_when_it_is_repeated_with_its_idempotency_key(
    api_stack: ApiStack, client: httpx.AsyncClient, session: str
) -> None:
    async def send(word: str) -> tuple[str, dict[str, Any]]:
        return word, await run(
            client, session, f"echo x >>/tmp/{word}; sleep 0.5; wc -l </tmp/{word}", headers={"Idempotency-Key": word}
        )

    async def send_too_many() -> list[str]:
        """Return the messages of the refused requests."""
        reply = await asyncio.gather(*(send(secrets.token_hex(8)) for _ in range(3)))
        return [word for word, result in reply if result["error_code"] == "RATE_LIMITED"]

    async with api_stack.client("admin") as admin:
        before = (await admin.get("/v1/tenants/acme")).json()["policy"]
        assert (await admin.put("/v1/tenants/acme", json={**before, "in_flight": 1, "queued": 1})).status_code == 200
        try:
            async with asyncio.timeout(SOON_S):
                while not (refused := await send_too_many()):
                    pass  # the service learns of the policy within two seconds
            results = [await send(refused[0]) for _ in range(2)]
        finally:
            assert (await admin.put("/v1/tenants/acme", json=before)).status_code == 200
    assert [result["output"] for _, result in results] == ["1\n", "1\n"]


async def test_programs_and_archives_obey_the_policy_of_their_tenant(
    api_stack: ApiStack, client: httpx.AsyncClient, session: str
) -> None:
    async def refuse(code: str, method: str, path: str, **body: Any) -> None:
        """Send a request until it is refused: the service learns of the policy within two seconds."""
        async with asyncio.timeout(SOON_S):
            while (answer := await client.request(method, f"/v1/sessions/{session}/{path}", **body)).is_success:
                pass
        assert (answer.status_code, answer.json()["code"]) == (403, code)

    rule = {"action": "deny", "tool": "bash_tool", "argv_prefix": ["rm", "-f"]}
    async with api_stack.client("admin") as admin:
        before = (await admin.get("/v1/tenants/acme")).json()["policy"]
        try:
            assert (await admin.put("/v1/tenants/acme", json={**before, "commands": [rule]})).status_code == 200
            for argv in (["rm", "-f", "x"], ["sh", "-c", "true; rm -f x"]):
                await refuse("SECURITY_REFUSED", "POST", "exec", json={"argv": argv})
            assert (await admin.put("/v1/tenants/acme", json={**before, "tools": ["web*"]})).status_code == 200
            await refuse("PERMISSION_DENIED", "POST", "exec", json={"argv": ["true"]})
            await refuse("PERMISSION_DENIED", "PUT", "archive", content=bytes(10_240))
        finally:
            assert (await admin.put("/v1/tenants/acme", json=before)).status_code == 200


async def test_a_repeated_streamed_call_runs_once_and_its_state_is_found_by_its_id(
    client: httpx.AsyncClient, session: str
) -> None:
    call = {"name": "bash_tool", "arguments": {"command": "echo x >>/tmp/streamed; wc -l </tmp/streamed"}}
    results = []
    for _ in range(2):
        headers = {"Idempotency-Key": f"streamed-{session}"}
        events = await read_events(
            client, f"/v1/sessions/{session}/calls", method="POST", json=call, more_headers=headers
        )
        results.append(events[-1]["data"])
    assert [result["output"] for result in results] == ["1\n", "1\n"]
    call_record = await client.get(f"/v1/calls/{results[1]['call_id']}")
    assert call_record.json()["state"] == "done"
    listed = (await client.get("/v1/calls?limit=200")).json()["data"]
    assert {"id": results[1]["call_id"], "tool": "bash_tool", "state": "done"}.items() <= next(
        one for one in listed if one["id"] == results[1]["call_id"]
    ).items()


@pytest.mark.parametrize("size", [10, MAX_ANSWER_BYTES])
async def test_a_repeated_exec_with_a_key_runs_its_program_once(
    client: httpx.AsyncClient, session: str, size: int
) -> None:
    path, headers = f"/v1/sessions/{session}/exec", {"Idempotency-Key": f"exec-{session}-{size}"}
    program = {"argv": ["sh", "-c", f"echo x >>/tmp/ran; head -c {size} /dev/zero"]}
    first, again = [await client.post(path, json=program, headers=headers) for _ in range(2)]
    assert first.status_code == 200, first.text
    # The clocks of the answer are those of each request.
    shown = [{name: value for name, value in one.json().items() if name != "clocks"} for one in (first, again)]
    assert (again.status_code, shown[1]) == (200, shown[0])
    assert (await run(client, session, "cat /tmp/ran"))["output"] == "x\n"


@pytest.mark.parametrize("name", NAMES)
async def test_uploaded_files_are_downloaded_unchanged(client: httpx.AsyncClient, session: str, name: str) -> None:
    path = f"/v1/sessions/{session}/files/{quote(name, safe='/')}"
    for content in (BINARY, b""):
        put = await client.put(path, content=content)
        assert (put.status_code, put.json()) == (200, {"path": name, "bytes": len(content)})
        got = await client.get(path)
        assert (got.status_code, got.content, got.headers["content-type"]) == (200, content, "application/octet-stream")
    assert got.headers["content-disposition"].startswith("attachment; filename*=UTF-8''")
    assert set(got.headers["content-disposition"]).isdisjoint('"\\\r\n')


async def test_a_file_name_with_a_line_break_adds_no_response_header(client: httpx.AsyncClient, session: str) -> None:
    answer = await client.get(f"/v1/sessions/{session}/files/x%0d%0aSet-Cookie:%20a=b")
    assert (answer.status_code, answer.headers.get("set-cookie")) == (404, None)


@pytest.mark.parametrize(
    "name",
    [
        "..%2f..%2fetc%2fpasswd",
        "%2e%2e/%2e%2e/etc/shadow",
        ".%2f..%2f..%2fproc/1/environ",
        "%2fproc/1/mem",
        "%2fdev/zero",
    ],
)
async def test_a_file_path_outside_the_allowed_folders_is_refused(
    client: httpx.AsyncClient, session: str, name: str
) -> None:
    url = httpx.URL(str(client.base_url)).copy_with(raw_path=f"/v1/sessions/{session}/files/{name}".encode())
    for answer in (await client.get(url), await client.put(url, content=b"x")):
        assert (answer.status_code, answer.json()["code"]) == (403, "PATH_NOT_ALLOWED"), answer.text


async def test_a_missing_file_is_reported(client: httpx.AsyncClient, session: str) -> None:
    assert (await client.get(f"/v1/sessions/{session}/files/nothing-here")).json()["code"] == "FILE_NOT_FOUND"


async def test_a_session_of_another_tenant_looks_like_an_unknown_session(api_stack: ApiStack, session: str) -> None:
    async with api_stack.client("rival") as rival:
        requests: list[tuple[str, str, Any]] = [
            ("GET", "", None),
            ("DELETE", "", None),
            ("GET", "/files/x", None),
            ("PUT", "/files/x", None),
            ("POST", "/checkpoints", None),
            ("POST", "/calls", {"name": "bash_tool", "arguments": {"command": "true"}}),
        ]
        for method, rest, body in requests:
            answers = [
                await rival.request(method, f"/v1/sessions/{id_}{rest}", json=body)
                for id_ in (session, "0" * len(session))
            ]
            assert [answer.status_code for answer in answers] == [404, 404], (method, rest)
            assert answers[0].text == answers[1].text


async def test_closing_a_session_is_audited_only_for_an_operator(
    api_stack: ApiStack, client: httpx.AsyncClient
) -> None:
    closed, own = [(await client.post("/v1/sessions", json={"ttl_s": 600})).json()["id"] for _ in range(2)]
    async with api_stack.client("operator") as operator:
        for_acme = {"tenant": "acme"}
        assert (await operator.delete(f"/v1/sessions/{closed}", params=for_acme)).status_code == 204
        assert (await operator.delete(f"/v1/sessions/{closed}", params=for_acme)).status_code == 404
        assert (await client.delete(f"/v1/sessions/{own}")).status_code == 204
        found = (await operator.get("/v1/audit", params={"action": "session.close"})).json()["data"]
    mine = [
        (entry["target"], entry["tenant"], entry["actor"]["name"])
        for entry in found
        if entry["target"] in (closed, own)
    ]
    assert mine == [(closed, "acme", "operator")]


async def test_arguments_that_cannot_be_encoded_are_an_error_of_the_call(
    client: httpx.AsyncClient, session: str
) -> None:
    for arguments in (
        '{"command": "echo \\ud800"}',
        '{"command": "echo \\u0000"}',
        '{"command": ' + "[" * 200 + "]" * 200 + "}",
        '{"command": NaN}',
    ):
        body = b'{"name": "bash_tool", "arguments": ' + arguments.encode() + b"}"
        answer = await client.post(
            f"/v1/sessions/{session}/calls", content=body, headers={"Content-Type": "application/json"}
        )
        assert answer.status_code in (200, 422), answer.text
        assert answer.status_code == 422 or answer.json()["error_code"] == "INVALID_ARGUMENTS", answer.text


async def test_a_change_of_folder_moves_no_file_of_a_program(client: httpx.AsyncClient, session: str) -> None:
    await run(client, session, "mkdir -p /tmp/elsewhere; cd /tmp/elsewhere")
    written = await client.put(f"/v1/sessions/{session}/files/here.txt", content=b"x")
    assert written.json() == {"path": "here.txt", "bytes": 1}
    assert (await client.get(f"/v1/sessions/{session}/files//workspace/here.txt")).content == b"x"


async def test_what_an_operator_does_in_the_session_of_a_tenant_is_audited(
    api_stack: ApiStack, client: httpx.AsyncClient, session: str
) -> None:
    path, call = f"/v1/sessions/{session}", {"name": "bash_tool", "arguments": {"command": "true"}}
    async with api_stack.client("operator") as operator:

        async def read_audit() -> list[str]:
            found = await operator.get("/v1/audit", params={"action": "session.use", "target": session})
            return [entry["actor"]["role"] for entry in found.json()["data"]]

        await run(client, session, "echo secret >mine")
        assert (await client.get(f"{path}/files/mine")).content == b"secret\n"
        assert await read_audit() == []
        for number, request in enumerate(
            (
                operator.post(f"{path}/calls?tenant=acme", json=call),
                operator.post(f"{path}/calls?tenant=acme", json=call, headers={"Accept": "text/event-stream"}),
                operator.post(f"{path}/exec?tenant=acme", json={"argv": ["true"]}),
                operator.get(f"{path}/files/mine?tenant=acme"),
                operator.put(f"{path}/files/mine?tenant=acme", content=b"x"),
                operator.get(f"{path}/archive?tenant=acme"),
                operator.post(f"{path}/checkpoints?tenant=acme"),
            ),
            start=1,
        ):
            answer = await request
            assert answer.is_success, answer.text
            assert await read_audit() == ["operator"] * number
