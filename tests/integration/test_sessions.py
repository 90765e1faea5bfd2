"""Limits inside a session. All effects of a call end with the call, and the session continues."""

import asyncio
import os
import signal
import time

import pytest

from tests.support.redis.raw_queue import open_dispatcher
from tests.support.sandboxd.containers import watch
from tests.support.stack.stack import Stack, commands_in, is_alive
from tests.support.stack.waiting import SOON_S, wait_until_async
from toolcrew.contract.calls import ToolCall, ToolResult
from toolcrew.contract.errors import ErrorCode
from toolcrew.contract.names import slots_key
from toolcrew.orchestrator.dispatch.request import Request
from toolcrew.orchestrator.runs.file_list import MAX_FILES, MAX_LINE_CHARS, list_files
from toolcrew.orchestrator.sdk.client import ToolClient
from toolcrew.orchestrator.sessions.session import Session

pytestmark = pytest.mark.stack


async def assert_only_the_guest_runs(container: str) -> None:
    """Fail unless the host's control groups show PID 1 and no other process."""
    await wait_until_async(lambda: len(commands_in(container)) == 1, SOON_S, "only the guest is left in the container")


async def assert_usable(session: Session) -> ToolResult:
    result = await session.call("bash_tool", {"command": "echo still here"})
    assert result.metadata.get("stdout") == "still here\n", result
    return result


async def test_at_the_limit_all_child_processes_of_a_call_are_killed(stack: Stack, session: Session) -> None:
    """New sessions, double forks and nohup are included. The output until the limit is kept."""
    container = await stack.container_of(session)
    command = (
        "echo before; setsid sleep 300 & (setsid sh -c 'sleep 301 & sleep 302 & wait' &) ; nohup sleep 303 >/dev/null "
        "2>&1 & sleep 304"
    )
    started = time.monotonic()
    call = asyncio.create_task(session.call("bash_tool", {"command": command}, timeout_s=6))
    await wait_until_async(
        lambda: sum("sleep 30" in c for c in commands_in(container).values()) >= 5,
        SOON_S,
        "all of the call's processes run",
    )

    result = await call

    assert (result.success, result.error_code) == (False, ErrorCode.TIMEOUT)
    assert result.output == "before\n"
    assert result.kill is not None
    assert (result.kill.survivors, result.kill.signalled >= 5) == (0, True)
    assert 6 <= time.monotonic() - started < 60
    await assert_only_the_guest_runs(container)
    after = await assert_usable(session)
    assert after.sandbox is not None
    assert container.startswith(after.sandbox.id)


async def test_a_call_survives_the_kill_of_another_call_in_its_session(stack: Stack, session: Session) -> None:
    neighbour = asyncio.create_task(session.call("bash_tool", {"command": "setsid sleep 3 & wait; echo survived"}))

    killed = await session.call("bash_tool", {"command": "setsid sleep 60 & sleep 60"}, timeout_s=1)

    assert killed.error_code == ErrorCode.TIMEOUT
    assert (await neighbour).metadata["stdout"] == "survived\n"


async def test_leftover_processes_of_a_call_are_killed_and_reported(stack: Stack, session: Session) -> None:
    container = await stack.container_of(session)

    result = await session.call("bash_tool", {"command": "nohup setsid sleep 300 >/dev/null 2>&1 & echo started"})

    assert result.success
    assert result.kill is not None
    assert "left running" in (result.output or "")
    await assert_only_the_guest_runs(container)


async def test_a_fork_bomb_ends_at_its_limit_and_the_session_continues(stack: Stack, session: Session) -> None:
    container = await stack.container_of(session)

    result = await session.call("bash_tool", {"command": "bomb() { bomb | bomb & }; bomb; sleep 60"}, timeout_s=2)

    assert result.success is False or result.kill is not None
    if result.kill is not None and result.kill.method == "container":
        await wait_until_async(lambda: not stack.has_container(container), SOON_S, "the container is removed")
        await session.call("bash_tool", {"command": "true"})
    else:
        assert stack.has_container(container)
        await assert_only_the_guest_runs(container)
    await assert_usable(session)


async def test_a_command_that_exhausts_memory_reports_out_of_memory(stack: Stack, session: Session) -> None:
    container = await stack.container_of(session)
    hog = "python3 -c 'held = [bytearray(50_000_000) for _ in range(200)]'"

    result = await session.call("bash_tool", {"command": hog}, timeout_s=30)

    assert result.metadata.get("oom") is True, result
    assert "out of memory" in (result.output or "")
    await assert_usable(session)
    assert stack.has_container(container)


async def test_unlimited_output_is_truncated_with_a_notice(session: Session) -> None:
    result = await session.call("bash_tool", {"command": "yes flood"}, timeout_s=1.5)

    assert (result.error_code, result.truncated) == (ErrorCode.TIMEOUT, True)
    assert "omitted" in (result.output or "")
    assert len(result.model_dump_json()) < 300_000
    await assert_usable(session)


async def test_a_cancelled_call_is_killed_at_once(stack: Stack, session: Session) -> None:
    container = await stack.container_of(session)
    call = asyncio.create_task(session.call("bash_tool", {"command": "sleep 77"}))
    await wait_until_async(lambda: "sleep 77" in commands_in(container).values(), SOON_S, "the command runs")

    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call

    await assert_only_the_guest_runs(container)
    await assert_usable(session)


async def test_a_call_is_cancelled_at_once_even_if_every_slot_is_busy(stack: Stack, session: Session) -> None:
    """All calls except one bypass admission, because admission would leave a slot for others."""
    container = await stack.container_of(session)
    route = (session.tenant, session.id, (await session.info()).queue)
    with stack.open_redis() as redis:
        slots = int(redis.get(slots_key("default", str(route[2]))) or 0)

    def sleepers() -> list[int]:
        return [pid for pid, command in commands_in(container).items() if command == "sleep 42"]

    async with open_dispatcher(stack.broker) as unbounded:
        argv = ["sleep", "42"]
        verbs = [
            ToolCall(id=f"busy-{number}", name="session.exec", arguments={"argv": argv, "env": {}})
            for number in range(slots - 1)
        ]
        neighbours = [
            asyncio.create_task(unbounded.dispatch(Request(verb, *route, audience="session"))) for verb in verbs
        ]
        call = asyncio.create_task(session.exec(argv))
        try:
            await wait_until_async(lambda: len(sleepers()) == slots > 1, SOON_S, "a command runs in every slot")
            call.cancel()
            # Much earlier than any other call would end and free a slot.
            await wait_until_async(
                lambda: len(sleepers()) == slots - 1, SOON_S, "the cancelled command is gone, its neighbours run"
            )
        finally:
            for pid in sleepers():
                os.kill(pid, signal.SIGKILL)
            await asyncio.gather(call, *neighbours, return_exceptions=True)


async def keeps_files(session: Session) -> bool:
    """Return whether this host's workspaces outlive containers, which requires root."""
    return (await session.info()).workspace != "tmpfs"


async def describes_files(session: Session, result: ToolResult) -> bool:
    """Return whether the result of a call that destroyed the sandbox describes the remaining files."""
    expected = "the files in /workspace are kept" if await keeps_files(session) else "its files are lost"
    return expected in (result.error or "")


async def test_a_container_with_a_stopped_guest_is_removed_two_seconds_after_the_limit(
    stack: Stack, client: ToolClient
) -> None:
    """The second line of defence: the guest cannot answer, so sandboxd ends the container and reports the cause."""
    async with await client.open_session() as session:
        container = await stack.container_of(session)
        guest = watch(stack.api, container).pid
        started = time.monotonic()
        call = asyncio.create_task(session.call("bash_tool", {"command": "sleep 88"}, timeout_s=8))
        await wait_until_async(lambda: "sleep 88" in commands_in(container).values(), SOON_S, "the command runs")
        os.kill(guest, signal.SIGSTOP)

        result = await call

        assert 9.9 <= time.monotonic() - started < 60
        assert not stack.has_container(container), "the result came before the container was gone"
        assert not is_alive(guest)
        assert (result.success, result.error_code) == (False, ErrorCode.TIMEOUT)
        assert result.kill is not None
        assert (result.kill.method, result.kill.survivors) == ("container", 0)
        assert await describes_files(session, result)
        after = await assert_usable(session)
        assert after.sandbox is not None
        assert (after.sandbox.generation, after.sandbox.rebuilt) == (2, True)
        assert not container.startswith(after.sandbox.id)


async def test_a_killed_guest_is_reported_once_and_replaced(stack: Stack, client: ToolClient) -> None:
    async with await client.open_session() as session:
        container = await stack.container_of(session)
        await session.write_file("kept.txt", b"kept")
        guest = watch(stack.api, container).pid
        call = asyncio.create_task(session.call("bash_tool", {"command": "sleep 88"}))
        await wait_until_async(lambda: "sleep 88" in commands_in(container).values(), SOON_S, "the command runs")
        os.kill(guest, signal.SIGKILL)

        result = await call

        assert (result.success, result.error_code) == (False, ErrorCode.SANDBOX_UNAVAILABLE)
        assert await describes_files(session, result)
        after = await session.call("bash_tool", {"command": "ls"})
        assert (after.success, after.metadata["stdout"]) == (True, "kept.txt\n" if await keeps_files(session) else "")
        assert after.sandbox is not None
        assert (after.sandbox.generation, after.sandbox.rebuilt, after.sandbox.news) == (2, True, None)
        await wait_until_async(
            lambda: not stack.has_container(container), SOON_S, "the engine has removed the dead container"
        )


async def test_a_guest_that_died_between_two_calls_is_reported_by_the_next_call(
    stack: Stack, client: ToolClient
) -> None:
    async with await client.open_session() as session:
        container = await stack.container_of(session)
        os.kill(watch(stack.api, container).pid, signal.SIGKILL)
        await wait_until_async(
            lambda: not stack.has_container(container), SOON_S, "the engine has removed the dead container"
        )

        result = await session.call("bash_tool", {"command": "echo on"})

        if await keeps_files(session):
            assert (result.success, "rebuilt around its workspace" in (result.output or "")) == (True, True)
        else:
            assert (result.error_code, "files are lost" in (result.error or "")) == (
                ErrorCode.SANDBOX_UNAVAILABLE,
                True,
            )
        await assert_usable(session)


async def test_a_cancelled_session_open_leaves_no_container(stack: Stack, client: ToolClient) -> None:
    """The program ends while its session is being opened, so no client can close the session."""
    before = set(stack.footprint.containers())
    os.kill(stack.pid("sandboxd"), signal.SIGSTOP)
    try:
        opening = asyncio.create_task(client.open_session())
        # Long enough for a worker to have sent its request to the stopped sandboxd. Nothing outside shows this event.
        await asyncio.sleep(0.5)
        opening.cancel()
        await asyncio.gather(asyncio.wait_for(opening, 5), return_exceptions=True)
    finally:
        os.kill(stack.pid("sandboxd"), signal.SIGCONT)

    def left() -> set[str]:
        return set(stack.footprint.containers()) - before

    try:
        # The absence of a container gives no event. The unwanted container would exist before the next container
        # appears.
        async with await client.open_session():
            pass
        # A container that was created late is removed at once. An unclosed session would stay for its time to live.
        await wait_until_async(
            lambda: not left(), SOON_S, "nothing is left of the session that was not wanted any more"
        )
    finally:
        for container in left():
            stack.api.remove_container(container, force=True)


async def test_the_file_list_shows_the_text_of_short_files(session: Session) -> None:
    command = r"""
        printf 'def f(x):\n    return x.split("  ")\n%s' "$(seq 10)" > code.py; seq 13 > long.py; seq 5 > data.txt
        printf '%0401d\n' 0 > wide.txt
    """
    assert (await session.call("bash_tool", {"command": command})).success
    _, *lines = (await list_files(session)).splitlines()
    code = ["  def f(x):", '      return x.split("  ")', *(f"  {number}" for number in range(1, 11))]
    assert lines == ["code.py: 11 lines", *code, "data.txt: 5 lines", "long.py: 13 lines", "wide.txt: 1 lines"]


async def test_the_file_list_of_a_session_is_short(session: Session) -> None:
    assert await list_files(session) == ""
    command = r"""
        printf 'name,amount\na,1\n' > t.csv; printf 'one\ntwo\nthree\n' > 'a b.txt'; mkdir folder; touch folder/{1,2,3}
        ln -s nowhere broken; mkfifo pipe; touch .hidden; printf '\33[31m\0red' > '-escape'; printf 'x%.0s' {1..9000} > z.csv
    """
    assert (await session.call("bash_tool", {"command": command})).success
    heading, *lines = (await list_files(session)).splitlines()
    assert heading.startswith("Files")
    assert lines[:-1] == [
        "-escape: 0 lines",
        "  [31mred",
        "a b.txt: 3 lines",
        "  one",
        "  two",
        "  three",
        "folder/: 3 files: 1 2 3",
        "t.csv: 2 lines, columns: $1=name $2=amount",
    ]
    assert (lines[-1].startswith("z.csv: 0 lines, columns: $1=xxx"), len(lines[-1]) <= MAX_LINE_CHARS) == (True, True)

    assert (await session.call("bash_tool", {"command": "touch {10..99}"})).success
    _, *lines = [line for line in (await list_files(session)).splitlines() if not line.startswith(" ")]
    assert (len(lines), lines[-1]) == (MAX_FILES + 1, "...")
