"""Sessions and calls from any process: taken over by other processes, paused, and ended. Leftovers are checked from
outside.
"""

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from tests.support.cli.command_server import run_toolcrew
from tests.support.stack.stack import Stack, commands_in
from tests.support.stack.waiting import SOON_S, wait_until_async
from toolcrew.contract.calls import ToolResult
from toolcrew.contract.errors import ErrorCode, ToolFailure
from toolcrew.contract.names import call_key, slots_key
from toolcrew.orchestrator.command import app
from toolcrew.orchestrator.sdk.client import ToolClient
from toolcrew.orchestrator.sessions.session import Session
from toolcrew.store.call_reader import CallLife

pytestmark = pytest.mark.stack


@pytest.fixture
async def other_client(stack: Stack) -> AsyncIterator[ToolClient]:
    """Yield a second program on the same pool."""
    async with ToolClient.connect(stack.redis_url) as connected:
        yield connected


async def toolcrew(stack: Stack, *arguments: str) -> Any:
    return await asyncio.to_thread(
        run_toolcrew, stack.footprint, *arguments, environment={"TOOLCREW_REDIS_URL": stack.redis_url}
    )


def state_of(stack: Stack, tenant: str, call_id: str) -> str:
    with stack.open_redis() as client:
        result: Any = client.hget(call_key("default", tenant, call_id), "state")
        return result.decode() if result else ""


async def read_lifetime(client: ToolClient, call_id: str) -> CallLife:
    """Return the life of a call that has just started, as soon as its record exists."""
    async with asyncio.timeout(SOON_S):
        while True:
            try:
                return await client.call_history(call_id)
            except ToolFailure:
                # The record of a call gives no event here, so the test polls.
                await asyncio.sleep(0.05)


def start(session: Session, command: str, call_id: str) -> "asyncio.Task[ToolResult]":
    return asyncio.create_task(session.call("bash_tool", {"command": command}, call_id=call_id, timeout_s=120))


def test_a_session_is_used_by_successive_commands_and_outlives_each(stack: Stack, tmp_path: Path) -> None:
    """A command opens the session. Other commands fill, use, read and close the session."""

    def run(*arguments: str, text: str = "") -> Result:
        return CliRunner().invoke(app, list(arguments), input=text, env={"TOOLCREW_REDIS_URL": stack.redis_url})

    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text("from here")
    made = run_toolcrew(
        stack.footprint, "sessions", "open", "--ttl", "600", environment={"TOOLCREW_REDIS_URL": stack.redis_url}
    )
    session = made.stdout.strip()
    assert (made.returncode, len(session) >= 20) == (0, True), made

    assert run("sessions", "copy", str(tmp_path / "in"), f"{session}:/workspace").exit_code == 0
    script = "cat in/a.txt - >b.txt; cat b.txt; echo bad >&2; exit 7"
    ran = run("sessions", "exec", "-i", session, "--", "sh", "-c", script, text="!\x1b\n")
    assert (ran.exit_code, ran.stdout, ran.stderr) == (7, "from here!\x1b\n", "bad\n")
    called = run("call", "bash_tool", "command=cat b.txt", "--session", session, "--json")
    assert json.loads(called.stdout)["metadata"]["stdout"] == "from here!\x1b\n"
    assert run("sessions", "copy", f"{session}:/workspace/b.txt", str(tmp_path)).exit_code == 0
    assert run("sessions", "copy", f"{session}:/workspace/in", str(tmp_path / "out")).exit_code == 0
    assert ((tmp_path / "b.txt").read_text(), (tmp_path / "out" / "a.txt").read_text()) == (
        "from here!\x1b\n",
        "from here",
    )

    rows = json.loads(run("sessions", "list", "--json").stdout)["sessions"]
    assert next(row for row in rows if row["id"] == session)["ttl_s"] == 600.0
    removed = run("sessions", "close", session, "never-was")
    assert (removed.exit_code, removed.stdout.split(), "never-was: there is no such session" in removed.stderr) == (
        1,
        [session],
        True,
    )
    closed = run("sessions", "exec", session, "true")
    assert (closed.exit_code, "there is no such session" in closed.stderr) == (125, True)


async def test_output_of_a_program_is_shown_live_in_a_session_of_another_process(
    client: ToolClient, other_client: ToolClient
) -> None:
    async with await client.open_session() as session:
        attached, shown, first = await other_client.session(session.id), list[tuple[str, str]](), asyncio.Event()

        def show(stream: str, text: str) -> None:
            shown.append((stream, text))
            first.set()

        running = asyncio.create_task(
            attached.exec(
                ["sh", "-c", "echo one; echo two >&2; while [ ! -e go ]; do sleep 0.05; done; echo three"],
                on_output=show,
            )
        )
        await asyncio.wait_for(first.wait(), SOON_S)
        assert not running.done()
        await session.write_file("/workspace/go", b"")
        result = await running
    assert (result.returncode, result.stdout, result.stderr) == (0, b"one\nthree\n", b"two\n")
    assert "".join(text for stream, text in shown if stream == "stdout") == "one\nthree\n"
    assert "".join(text for stream, text in shown if stream == "stderr") == "two\n"


async def test_sessions_of_other_tenants_cannot_be_attached(stack: Stack, client: ToolClient) -> None:
    """The aim: enter another tenant's session by its id. A tenant that stops its work leaves the session open."""
    async with await client.open_session() as session, ToolClient.connect(stack.redis_url, tenant="mallory") as foreign:
        with pytest.raises(ToolFailure) as refused:
            await foreign.session(session.id)
        with pytest.raises(ToolFailure) as never:
            await foreign.session("never-was")
        assert (refused.value.code, refused.value.message) == (ErrorCode.SESSION_NOT_FOUND, never.value.message)
        assert session.id not in [one.id for one in (await foreign.sessions("mallory")).sessions]
        assert (await session.call("bash_tool", {"command": "true"})).success


async def test_another_process_kills_a_running_command_with_all_its_child_processes(
    stack: Stack, session: Session, other_client: ToolClient
) -> None:
    container, call_id = await stack.container_of(session), f"kill-{secrets.token_hex(4)}"
    call = start(session, "echo begun; setsid sleep 300 & (setsid sh -c 'sleep 301 & wait' &) ; sleep 302", call_id)
    await wait_until_async(
        lambda: sum("sleep 30" in one for one in commands_in(container).values()) >= 3,
        SOON_S,
        "all of the call's processes run",
    )

    killed = await toolcrew(stack, "calls", "kill", call_id, "--reason", "it runs away", "--json")

    assert json.loads(killed.stdout) == {
        "id": call_id,
        "state": "done",
        "error_code": "CANCELLED",
        "already_ended": False,
    }
    assert not any("sleep 30" in one for one in commands_in(container).values())
    result = await call
    assert (result.error_code, result.output) == (ErrorCode.CANCELLED, "begun\n")
    assert "was killed by" in str(result.error)
    assert "it runs away" in str(result.error)
    reply = (await other_client.call_history(call_id)).model_dump(mode="json")
    assert (reply["state"], reply["error_code"], reply["session"], reply["location"]["state"]) == (
        "done",
        "CANCELLED",
        session.id,
        "open",
    )
    assert "it runs away" in reply["killed"]
    assert (await session.call("bash_tool", {"command": "echo still here"})).metadata["stdout"] == "still here\n"


async def test_calls_of_a_paused_tenant_wait_and_a_waiting_call_can_be_killed(
    stack: Stack, other_client: ToolClient
) -> None:
    tenant = f"t{secrets.token_hex(4)}"
    tenants = other_client._pool.tenants
    async with ToolClient.connect(stack.redis_url, tenant=tenant) as client, await client.open_session() as session:
        await tenants.pause("default", "the bill is open")
        try:
            # An open pool serves every name as the default tenant.
            await asyncio.sleep(2)
            waiting = start(session, "echo after", "waits")
            doomed = start(session, "touch never", "doomed")
            await asyncio.sleep(0.2)
            assert [state_of(stack, tenant, call) for call in ("waits", "doomed")] == ["", ""]
            killed = await other_client.kill_call("doomed", tenant=tenant, reason="not now")
            assert (killed.record.state.value, (await doomed).error_code) == ("forbidden", ErrorCode.CANCELLED)
        finally:
            resumed = time.monotonic()
            await tenants.resume("default")
        result = await waiting
        assert (result.success, result.output) == (True, "after\n")
        # Two seconds are guaranteed; a busy machine gets more.
        assert time.monotonic() - resumed < SOON_S
        assert (await session.call("bash_tool", {"command": "ls"})).output in ("", None, "(no output)")


async def test_a_killed_call_that_its_host_has_not_started_never_runs(
    stack: Stack, session: Session, other_client: ToolClient
) -> None:
    """The host's slots are occupied. The call lies in the queue, or waits for a slot, and can still be ended."""
    queue = (await session.info()).queue
    with stack.open_redis() as store:
        slots = int(store.get(slots_key("default", queue)))  # type: ignore[arg-type]
    busy = [
        asyncio.create_task(
            session.call("bash_tool", {"command": "sleep 60"}, call_id=f"busy-{n}-{session.id[:8]}", timeout_s=120)
        )
        for n in range(2 * slots + 4)
    ]
    names = [f"busy-{number}-{session.id[:8]}" for number in range(len(busy))]
    try:
        for name in names:
            # Each of these calls comes before the call of this test.
            await read_lifetime(other_client, name)
        await wait_until_async(
            lambda: state_of(stack, "default", names[0]) == "running", SOON_S, f"the calls run in {queue}"
        )
        call = start(session, "touch never", f"late-{session.id[:8]}")
        life = await read_lifetime(other_client, f"late-{session.id[:8]}")
        assert (life.state in ("waiting", "queued"), life.waiting is not None) == (True, True)
        killed = await other_client.kill_call(f"late-{session.id[:8]}")
        assert (killed.record.state.value, (await call).error_code) == ("forbidden", ErrorCode.CANCELLED)
    finally:
        for task in busy:
            task.cancel()
        await asyncio.gather(*busy, return_exceptions=True)
    assert "never" not in str((await session.call("bash_tool", {"command": "ls"})).output)
