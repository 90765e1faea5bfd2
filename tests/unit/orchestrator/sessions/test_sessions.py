"""A session of the SDK: its requests and errors. A program that stops closes its sandbox and its calls."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.records.builders import KEY, build_spec
from tests.support.records.fakes import AnsweringTransport, MemoryAsyncBlobs, StaticCatalog
from tests.support.sandboxd.fake_hosts import build_pool
from tests.support.stack.waiting import SOON_S
from toolcrew.contract.calls import ToolCall, ToolContext, ToolResult
from toolcrew.contract.errors import BrokerUnavailable, ErrorCode, ToolFailure
from toolcrew.contract.session_spec import SessionSpec
from toolcrew.orchestrator.dispatch.dispatcher import Dispatcher
from toolcrew.orchestrator.dispatch.tenant_catalog import TenantCatalog
from toolcrew.orchestrator.sessions.session import Session
from toolcrew.workers.tools.builtin import build_registry

SPECS = tuple(build_registry().specs())


class Pool:
    """A pool with one scripted worker: the fields of a ToolResult, or a function, for each verb or tool."""

    def __init__(self, **answers: Any) -> None:
        self.blobs = MemoryAsyncBlobs()
        self.transport = AnsweringTransport(self._answer)
        specs = (*SPECS, build_spec("wait"))
        parts = build_pool()
        self.sessions: Any = parts.sessions
        self._dispatcher = Dispatcher(
            self.transport, TenantCatalog(StaticCatalog(*specs)), KEY, queue_wait_s=60, pool=parts
        )
        place = {"host": "h1", "queue": "host.h1.b00t", "image": "default", "start_s": 0.5}
        opened = {"metadata": {**place, "network": "none", "hosts": [], "workspace": "image"}}
        self._answers = {"open": opened, **answers}

    async def open(self, workspace: Path | None = None, **start: Any) -> Session:
        spec = SessionSpec(ttl_s=60, workspace=str(workspace) if workspace else None, **start)
        return await Session.open(self._dispatcher, self.blobs, tenant="acme", spec=spec)  # type: ignore[arg-type]

    def sent(self) -> list[str]:
        return [call.name.removeprefix("session.") for call in self.transport.calls]

    async def _answer(self, call: ToolCall, context: ToolContext) -> ToolResult:
        answer = self._answers.get(call.name.removeprefix("session."), {})
        if callable(answer):
            answer = await answer(call, context)
        return ToolResult(**{"call_id": call.id, "name": call.name, "success": "error_code" not in answer, **answer})


@pytest.mark.parametrize("close", [{}, {"error_code": ErrorCode.SANDBOX_UNAVAILABLE, "error": "the host is lost"}])
async def test_failed_workspace_copy_closes_the_sandbox(tmp_path: Path, close: dict[str, Any]) -> None:
    pool = Pool(**{"import": {"error_code": ErrorCode.NO_SPACE, "error": "full"}, "close": close})
    with pytest.raises(ToolFailure, match="full") as raised:
        await pool.open(tmp_path)
    assert raised.value.code is ErrorCode.NO_SPACE
    assert pool.sent() == ["open", "import", "close"]


@pytest.mark.parametrize("has_server_sessions", [True, False])
async def test_the_end_of_a_session_orders_the_end_of_its_sessions_at_mcp_servers(has_server_sessions: bool) -> None:
    pool = Pool()
    session = await pool.open()
    if has_server_sessions:
        pool.sessions.with_server_sessions.add(("acme", session.id))
    await session.close()
    orders = [(queue, order.name) for queue, order in pool.transport.commands]
    assert orders == ([("pool.tools", "session.close")] if has_server_sessions else [])
    assert pool.transport.contexts[-1].session == session.id


class FullMemoryBlobs(MemoryAsyncBlobs):
    """Blobs of a process whose memory for reads is in use."""

    @contextlib.asynccontextmanager
    async def hold(self, tenant: str, key: str, copies: int, *, keeps: bool) -> AsyncIterator[None]:
        raise ToolFailure(ErrorCode.RATE_LIMITED, "no memory")
        yield


async def test_a_program_that_ran_is_not_reported_as_a_request_without_effect() -> None:
    pool = Pool(exec={"blob": "acme:0", "metadata": {"returncode": 0, "stdout_bytes": 1}})
    pool.blobs = FullMemoryBlobs()
    session = await pool.open()
    with pytest.raises(ToolFailure) as raised:
        async with session.hold_exec(["rm", "x"], stdin=b"", env={}, cwd=None, timeout_s=5):
            pass
    assert raised.value.code is ErrorCode.OUTCOME_UNKNOWN
    assert pool.sent() == ["open", "exec"]


@pytest.mark.parametrize(("name", "call_id"), [("x" * 200, None), ("", None), ("bash_tool", "not an id")])
async def test_invalid_call_name_or_id_is_a_failed_result(name: str, call_id: str | None) -> None:
    session = await Pool().open()
    assert (await session.call(name, {}, call_id=call_id)).success is False


@pytest.mark.parametrize("answer", [{}, {"error_code": ErrorCode.NO_SPACE, "error": "full"}])
async def test_attached_content_is_deleted_after_its_call(answer: dict[str, Any]) -> None:
    pool = Pool(write_file=answer)
    session = await pool.open()
    with contextlib.suppress(ToolFailure):
        await session.write_file("/tmp/a", b"x")
    assert pool.blobs.dropped == [pool.transport.contexts[-1].blob]


async def test_failed_close_can_be_repeated() -> None:
    outages = iter([True])

    async def close(call: ToolCall, context: ToolContext) -> dict[str, Any]:
        if next(outages, False):
            raise BrokerUnavailable("away")
        return {}

    pool = Pool(close=close)
    session = await pool.open()
    with pytest.raises(BrokerUnavailable):
        await session.close()
    await session.close()
    assert pool.sent() == ["open", "close", "close"]


async def test_cancelled_program_cancels_its_call_and_closes_its_session() -> None:
    calling = asyncio.Event()

    async def wait(*_: Any) -> dict[str, Any]:
        calling.set()
        await asyncio.Event().wait()
        return {}

    pool = Pool(wait=wait)

    async def program() -> None:
        async with await pool.open() as session:
            await session.call("wait", {})

    running = asyncio.create_task(program())
    await calling.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(running, SOON_S)
    assert pool.sent()[:4] == ["open", "wait", "cancel", "close"]
    assert [call.name for _, call in pool.transport.commands] == ["session.cancel", "session.close"]


async def test_session_cancelled_while_opening_is_closed() -> None:
    opening, go_on = asyncio.Event(), asyncio.Event()

    async def slow(*_: Any) -> dict[str, Any]:
        opening.set()
        await go_on.wait()
        return {"metadata": {"host": "h1", "queue": "host.h1.b00t", "image": "default", "start_s": 0.5}}

    pool = Pool(open=slow)
    running = asyncio.create_task(pool.open())
    await opening.wait()
    running.cancel()
    await asyncio.sleep(0)
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(running, SOON_S)
    assert (pool.sent(), pool.transport.commands[-1][0]) == (["open", "close"], "host.h1.b00t")
