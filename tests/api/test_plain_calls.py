"""Calls that take the short path to their tool. The responses are the same as on the long path, and arrive in one
piece.
"""

import asyncio
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from tests.support.api.api_harness import ApiHarness
from toolcrew.orchestrator.http.server import HeadTimeoutProtocol

SHORT, LONG = "application/json", "application/json; charset=utf-8"
UNKNOWN_KEY = "Bearer tc_0123456789abcdef_" + "a" * 43
BODIES = {
    "valid": b'{"name": "bash_tool", "arguments": {"command": "true"}}',
    "unknown field": b'{"name": "bash_tool", "wieght": 1}',
    "wrong type": b'{"name": "bash_tool", "arguments": "true"}',
    "missing name": b"{}",
    "NaN as timeout": b'{"name": "bash_tool", "timeout_s": NaN}',
    "list instead of an object": b"[]",
    "truncated JSON": b'{"name": ',
    "invalid UTF-8": b'{"name": "\xff"}',
    "deeply nested": b"[" * 200_000,
    "a number of 5,000 digits": b'{"name": "bash_tool", "timeout_s": ' + b"9" * 5000 + b"}",
    "empty body": b"",
}


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES.keys())
@pytest.mark.parametrize("session", ["none-of-that-name", "no%20name", "a" * 65, "none%0A"])
async def test_the_short_path_returns_the_same_errors_as_the_long_path(
    api: ApiHarness, session: str, body: bytes
) -> None:
    async def ask(kind: str, more: dict[str, str]) -> tuple[int, Any, str | None]:
        answer = await api["acme"].post(
            f"/v1/sessions/{session}/calls", content=body, headers={"Content-Type": kind, **more}
        )
        assert answer.status_code >= 400
        return answer.status_code, answer.json(), answer.headers.get("www-authenticate")

    for more in ({}, {"Authorization": UNKNOWN_KEY}, {"Authorization": "Basic YTpi"}):
        assert await ask(SHORT, more) == await ask(LONG, more)


async def test_a_call_on_the_short_path_for_another_tenant_is_refused(api: ApiHarness) -> None:
    answer = await api["acme"].post("/v1/sessions/s/calls?tenant=rival", json={"name": "bash_tool"})
    assert (answer.status_code, answer.json()["code"]) == (403, "PERMISSION_DENIED")


class RecordingTransport(asyncio.Transport):
    """A connection that keeps all written data."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[bytes] = []

    def write(self, data: Any) -> None:
        if data:
            self.written.append(bytes(data))

    def is_closing(self) -> bool:
        return False


async def test_a_response_is_sent_in_one_write() -> None:
    async def answer(_scope: Any, _receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"4")]})
        await send({"type": "http.response.body", "body": b"done"})

    state, line = ServerState(), RecordingTransport()
    connection = HeadTimeoutProtocol(uvicorn.Config(answer, log_config=None), state, {})
    connection.connection_made(line)
    for _ in range(2):
        connection.data_received(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        await asyncio.gather(*state.tasks)
    connection.connection_lost(OSError())
    assert line.written == [b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\ndone"] * 2
