"""What the people who watch Flower and read logs see: every tool by its name, and never what went in or came out."""

import asyncio
import contextlib
import secrets
from typing import Any

import httpx
import pytest

from orchestrator.sessions import Session
from tests.stack import Stack, eventually

pytestmark = pytest.mark.stack


def tasks_of(stack: Stack) -> dict[str, dict[str, Any]]:
    """Flower's tasks by id; those it knows by name."""
    answer = httpx.get(f"{stack.info.flower_url}api/tasks", timeout=20)
    answer.raise_for_status()
    return {name: task for name, task in answer.json().items() if task.get("name")}


async def until_it_hears(stack: Stack, session: Session) -> None:
    """Calls are served before Flower listens to events, and it never hears of those."""
    async with asyncio.timeout(60):
        while True:
            await session.call("glob_tool", {"pattern": "*"})
            with contextlib.suppress(httpx.TransportError):
                if await asyncio.to_thread(tasks_of, stack):
                    return


async def test_flower_lists_calls_by_tool_and_shows_neither_arguments_nor_output(stack: Stack, session: Session) -> None:
    await until_it_hears(stack, session)
    # The output differs from the argument, so that a find says which of the two got out.
    word = f"canary-{secrets.token_hex(6)}"
    call_ids = [f"f{secrets.token_hex(3)}" for _ in range(3)]
    ran = await session.call("bash_tool", {"command": f"x={word}; echo ${{x^^}}"}, call_id=call_ids[0])
    await session.call("write_tool", {"file_path": f"{word}.txt", "content": word}, call_id=call_ids[1])
    await session.call("read_tool", {"file_path": f"{word}.txt"}, call_id=call_ids[2])
    assert ran.metadata["stdout"] == f"{word.upper()}\n"

    def all_ended() -> dict[str, dict[str, Any]] | None:
        tasks = tasks_of(stack)
        ours = {name: task for name, task in tasks.items() if any(f"-{call_id}." in name for call_id in call_ids)}
        return tasks if len(ours) == 3 and all(task["state"] == "SUCCESS" for task in ours.values()) else None

    tasks = await eventually(all_ended, 20, "Flower shows the three calls as done")

    assert {"tool.bash_tool", "tool.write_tool", "tool.read_tool"} <= {task["name"] for task in tasks.values()}
    shown = repr(tasks)
    assert word not in shown, "an argument is shown in Flower"
    assert word.upper() not in shown, "output is shown in Flower"


async def test_the_workers_log_has_neither_arguments_nor_output(stack: Stack, session: Session) -> None:
    word = f"canary-{secrets.token_hex(6)}"

    await session.call("bash_tool", {"command": f"x={word}; echo ${{x^^}}"}, call_id=f"l{secrets.token_hex(3)}")
    await session.call("read_tool", {"file_path": f"{word}-missing"}, call_id=f"l{secrets.token_hex(3)}")

    log = stack.log("worker")
    assert "tool.bash_tool" in log
    assert word not in log, "an argument is in worker.log"
    assert word.upper() not in log, "output is in worker.log"


def test_flower_asks_for_a_password(stack: Stack) -> None:
    url = httpx.URL(str(stack.info.flower_url)).copy_with(username=None, password=None)

    answers = [httpx.get(url.join(path), timeout=20) for path in ("/", "/api/tasks", "/api/workers")]

    assert [answer.status_code for answer in answers] == [401, 401, 401]


def test_flower_lets_nobody_start_or_stop_anything(stack: Stack) -> None:
    worker = next(iter(httpx.get(f"{stack.info.flower_url}api/workers", timeout=20).json()), "none")

    for path in ("api/task/send-task/tool.bash_tool", f"api/worker/shutdown/{worker}", f"api/worker/pool/restart/{worker}"):
        assert httpx.post(f"{stack.info.flower_url}{path}", json={"args": []}, timeout=20).status_code in (401, 403, 404, 405), path


def test_the_password_of_redis_is_on_no_command_line_and_in_no_log(stack: Stack) -> None:
    password = stack.redis_url.partition("://:")[2].partition("@")[0]
    assert len(password) > 20

    assert not [command for command in stack.footprint.processes().values() if password in command]
    assert not [role for role in ("redis", "sandboxd", "worker", "flower") if password in stack.log(role)]
