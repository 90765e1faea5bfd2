"""Output of a real command while it runs: from the sandbox through worker and Redis to the program and to a terminal."""

import asyncio

import pytest
from typer.testing import CliRunner

from tests.support.stack.stack import Stack
from tests.support.stack.waiting import SOON_S, wait_until_async
from toolcrew.contract.call_events import MAX_WAITING_BYTES
from toolcrew.contract.names import call_key
from toolcrew.contract.run_events import CallFinished, OutputArrived, RunEvent
from toolcrew.orchestrator.command import app
from toolcrew.orchestrator.models.scripted import Calls, ScriptedModel
from toolcrew.orchestrator.sdk.client import ToolClient
from toolcrew.orchestrator.sessions.session import Session

pytestmark = pytest.mark.stack


async def test_a_line_arrives_before_its_command_ends(session: Session) -> None:
    arrived, pieces = asyncio.Event(), list[str]()

    def on_output(_: str, text: str) -> None:
        pieces.append(text)
        arrived.set()

    # The command ends only after the line was received.
    waits = "echo begun; while [ ! -e seen ]; do sleep 0.02; done; echo ended"
    call = asyncio.create_task(session.call("bash_tool", {"command": waits}, on_output=on_output))
    async with asyncio.timeout(SOON_S):
        await arrived.wait()
        assert not call.done()
        await session.write_file("/workspace/seen", b"")
        result = await call
    assert (result.output, "".join(pieces)) == ("begun\nended\n", "begun\nended\n")


async def test_matches_of_a_glob_arrive_as_they_are_found(session: Session) -> None:
    """Requirement S4-29. The result has the newest first. If everything came at the end, it would come in this order."""
    await session.call(
        "bash_tool", {"command": "mkdir -p a/b/c; touch -d @100 a; touch -d @200 a/b; touch -d @300 a/b/c"}
    )
    pieces = list[str]()
    result = await session.call(
        "glob_tool", {"pattern": "**", "type": "dir"}, on_output=lambda _, text: pieces.append(text)
    )
    assert result.success, result.error
    assert [line for line in str(result.output).splitlines() if not line.startswith("[")] == ["a/b/c", "a/b", "a"]
    assert pieces[0] == "a\n"
    assert sorted("".join(pieces).splitlines()) == ["a", "a/b", "a/b/c"], "each match is sent once"


async def test_a_watched_call_leaves_no_output_in_redis(stack: Stack, client: ToolClient, session: Session) -> None:
    """Only the record of the call's outcome remains. The record contains no output and expires by itself."""
    await session.call("bash_tool", {"command": "echo seen"}, call_id="watched-1", on_output=lambda *_: None)
    record = call_key("default", "default", "watched-1")
    with stack.open_redis() as redis:
        await wait_until_async(
            lambda: redis.keys("*:call.watched-1*") == [record.encode()], SOON_S, "its keys are deleted"
        )
        assert b"seen" not in b"".join(redis.hgetall(record).values())
        assert redis.ttl(record) > 0


async def test_a_slow_output_listener_costs_bounded_memory_and_time(stack: Stack, session: Session) -> None:
    async def slow(_: str, text: str) -> None:
        await asyncio.sleep(0.01)

    async with asyncio.timeout(SOON_S):
        result = await session.call("bash_tool", {"command": "head -c 20000000 /dev/zero | tr '\\0' x"}, on_output=slow)
    assert result.success
    with stack.open_redis() as redis:
        assert int(str(redis.info("memory")["used_memory"])) < 64 * 1024 * 1024 + MAX_WAITING_BYTES


async def test_a_run_reports_the_output_of_its_calls(client: ToolClient, session: Session) -> None:
    events: list[RunEvent] = []
    model = ScriptedModel([Calls([("bash_tool", {"command": "echo one; echo two"})]), "ok"])
    await client.run("go", session=session, model=model, on_event=events.append)
    pieces = [event for event in events if isinstance(event, OutputArrived)]
    assert "".join(piece.text for piece in pieces) == "one\ntwo\n"
    assert max(events.index(piece) for piece in pieces) < next(
        at for at, event in enumerate(events) if isinstance(event, CallFinished)
    )


def test_call_live_shows_output_on_stderr_and_the_result_once_on_stdout(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOOLCREW_REDIS_URL", stack.redis_url)
    command = r"command=echo one; printf '\007two\n'"
    live = CliRunner().invoke(app, ["call", "bash_tool", command, "--live"])
    quiet = CliRunner().invoke(app, ["call", "bash_tool", command])
    assert live.exit_code == 0
    assert live.stderr.splitlines()[:2] == ["one", "\\x07two"]
    assert live.stdout == quiet.stdout
    # stdout is not a terminal here, so a program that reads stdout gets every byte.
    assert live.stdout.splitlines()[:2] == ["one", "\x07two"]
    assert "two" not in quiet.stderr


async def test_the_lines_of_a_search_arrive_while_it_still_searches(session: Session) -> None:
    """An older file takes the search longer than its time limit, so only early lines can arrive."""
    slow = "printf '%040d!' 0 | tr 0 a > slow.txt; head -c 5000000 /dev/zero | tr '\\0' z > large.txt"
    await session.call("bash_tool", {"command": f"{slow}; sleep 0.01; echo hit > new.txt"})
    arrived, pieces = asyncio.Event(), list[str]()

    def on_output(_: str, text: str) -> None:
        pieces.append(text)
        arrived.set()

    pattern = {"pattern": "(?=h)hit|(?=a)(a+)+$"}
    call = asyncio.create_task(session.call("grep_tool", pattern, on_output=on_output))
    async with asyncio.timeout(20):
        await arrived.wait()
        running = "cat /proc/[0-9]*/comm 2>/dev/null | grep -cx rg"
        searching = await session.call("bash_tool", {"command": running})
    assert (call.done(), str(searching.output).split()[0]) == (False, "1")
    assert "".join(pieces) == "new.txt:1: hit\n"
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
