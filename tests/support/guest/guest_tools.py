"""The worker's tools over a real guest, without Docker. The request and response checks of sandboxd apply in between."""

import shutil
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from tests.support.guest.guest_harness import Guest, running_guest
from tests.support.records.builders import build_context
from tests.support.records.fakes import FakeSandboxClient, MemoryBlobs, MemoryLedger, build_executor
from toolcrew.contract.calls import ToolCall, ToolContext, ToolResult
from toolcrew.workers.sandbox_client import GuestResponse
from toolcrew.workers.sandboxd.connection import check_request
from toolcrew.workers.sandboxd.sandbox import build_done, count_budget, has_stream
from toolcrew.workers.tools.builtin import build_registry

_REGISTRY = build_registry()


class GuestClient(FakeSandboxClient):
    """A client that sends every request to the guest."""

    def __init__(self, guest: Guest) -> None:
        super().__init__()
        self._guest = guest

    def call(
        self,
        name: str,
        request: Mapping[str, Any],
        body: bytes = b"",
        *,
        on_data: Callable[[str, bytes], None] | None = None,
        **_: Any,
    ) -> GuestResponse:
        checked = check_request({**request, "body_bytes": len(body)})
        fields = {key: value for key, value in checked.items() if key not in ("op", "body_bytes")}
        done = self._guest.request(checked["op"], body, **fields)
        streams = {stream: data for stream in done.streams if (data := done.bytes_of(stream))}
        assert all(has_stream(checked["op"], stream) for stream in streams)
        assert sum(map(len, streams.values())) <= count_budget(checked)
        if on_data is not None:
            for stream, data in streams.items():
                on_data(stream, data)
            streams = {}
        answer = build_done(done.header)
        return GuestResponse(
            {**answer, "sandbox": {"id": "c0ffee", "generation": 1, "rebuilt": False}, "sandbox_s": 0.1}, streams
        )


class GuestTools:
    """A session of the built-in tools."""

    def __init__(self, guest: Guest) -> None:
        facts = {"host": "h1", "queue": "host.h1.b00t"}
        self._executor = build_executor(_REGISTRY, GuestClient(guest), MemoryLedger(), MemoryBlobs(), facts)
        self._calls = 0

    def run(self, tool: str, context: ToolContext | None = None, /, **arguments: Any) -> ToolResult:
        self._calls += 1
        call = ToolCall(id=f"call-{self._calls}", name=tool, arguments=arguments)
        return self._executor.execute(call, context or build_context())


@pytest.fixture(scope="module")
def shared_guest() -> Iterator[Guest]:
    with running_guest() as guest:
        yield guest


@pytest.fixture
def guest(shared_guest: Guest) -> Guest:
    """Return the guest of the module, with an empty workspace."""
    for entry in shared_guest.workspace.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()
    return shared_guest


@pytest.fixture
def tools(guest: Guest) -> GuestTools:
    return GuestTools(guest)
