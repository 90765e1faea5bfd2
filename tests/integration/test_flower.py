"""The view of Flower's users: every tool by its name and the outcome of its calls, but no arguments and no outputs.
The users cannot change anything.
"""

import asyncio
import contextlib
import os
import re
import secrets
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from celery import Celery
from docker import APIClient
from flower.urls import handlers
from prometheus_client.parser import text_string_to_metric_families

from tests.support.redis.raw_queue import publish
from tests.support.stack.log_lines import read_events
from tests.support.stack.stack import UP_S, Stack, open_stack
from tests.support.stack.waiting import SOON_S, wait_until_async
from toolcrew.contract.errors import ErrorCode
from toolcrew.orchestrator.operations.flower import DEFAULTS
from toolcrew.orchestrator.sessions.session import Session

pytestmark = pytest.mark.stack

MAX_TASKS = 60
PAGES = "https://pages.test/ui"
PUBLIC_PATHS = ("/healthcheck", "/static/js/flower.js", "/login", "/logout", "/nonesuch")
"""Paths that need no password and reveal nothing about a deployment."""


@pytest.fixture(scope="module")
def stack(engine: APIClient) -> Iterator[Stack]:
    """Yield a stack with Flower; a restart of Redis loses at most a second of data."""
    environment = {"TOOLCREW_PAGE_URL": PAGES, "FLOWER_MAX_TASKS": str(MAX_TASKS)}
    with open_stack(engine, {**environment, "FLOWER_STATE_SAVE_INTERVAL": "300"}, workers_only=False) as opened:
        yield opened
        assert opened.end() == 0
        opened.footprint.assert_nothing_left()


def ask(stack: Stack, path: str) -> httpx.Response:
    """Send a request with the correct password."""
    return httpx.get(httpx.URL(str(stack.info.flower_url)).join(path), timeout=30)


def tasks_of(stack: Stack) -> dict[str, dict[str, Any]]:
    """Return Flower's tasks with a known name, by id."""
    answer = ask(stack, "/api/tasks")
    answer.raise_for_status()
    return {name: task for name, task in answer.json().items() if task.get("name")}


def tasks_of_calls(stack: Stack, call_ids: list[str], state: str = "SUCCESS") -> dict[str, dict[str, Any]] | None:
    """Return the tasks by call id, as soon as all have this state; otherwise None."""
    found = {
        call_id: task for task in tasks_of(stack).values() for call_id in call_ids if f"-{call_id}." in task["uuid"]
    }
    return found if len(found) == len(call_ids) and all(task["state"] == state for task in found.values()) else None


def samples(stack: Stack, name: str, **labels: str) -> list[tuple[dict[str, str], float]]:
    """Return the samples of one of Flower's metrics that have these labels."""
    families = text_string_to_metric_families(ask(stack, "/metrics").text)
    found = [sample for family in families for sample in family.samples if sample.name == name]
    return [(sample.labels, sample.value) for sample in found if labels.items() <= sample.labels.items()]


def make_ids(count: int) -> list[str]:
    return [f"f{secrets.token_hex(3)}" for _ in range(count)]


async def wait_until_listening(stack: Stack, session: Session) -> None:
    """Make calls until Flower lists one. Workers serve calls before Flower listens to events, and Flower never
    receives earlier events.
    """
    async with asyncio.timeout(UP_S):
        while True:
            call_id = make_ids(1)[0]
            await session.call("glob_tool", {"pattern": "*"}, call_id=call_id)
            for _ in range(4):
                with contextlib.suppress(httpx.HTTPError):
                    if await asyncio.to_thread(tasks_of_calls, stack, [call_id]):
                        return
                await asyncio.sleep(0.1)


async def test_flower_lists_calls_by_tool_without_arguments_and_output(stack: Stack, session: Session) -> None:
    await wait_until_listening(stack, session)
    # The output differs from the argument, so that a match shows which of the two leaked.
    word = f"canary-{secrets.token_hex(6)}"
    call_ids = make_ids(3)
    ran = await session.call("bash_tool", {"command": f"x={word}; echo ${{x^^}}"}, call_id=call_ids[0])
    await session.call("write_tool", {"file_path": f"{word}.txt", "content": word}, call_id=call_ids[1])
    await session.call("read_tool", {"file_path": f"{word}.txt"}, call_id=call_ids[2])
    assert ran.metadata["stdout"] == f"{word.upper()}\n"

    tasks = await wait_until_async(
        lambda: tasks_of_calls(stack, call_ids), SOON_S, "Flower shows the three calls as done"
    )

    assert [tasks[call_id]["name"] for call_id in call_ids] == ["tool.bash_tool", "tool.write_tool", "tool.read_tool"]
    task, worker = tasks[call_ids[0]]["uuid"], tasks[call_ids[0]]["worker"]
    table = "/tasks/datatable?draw=1&start=0&length=50&order[0][column]=0&columns[0][data]=name"
    places = (
        "/api/tasks",
        f"/api/task/info/{task}",
        f"/task/{task}",
        table,
        "/metrics",
        f"/worker/{worker}",
        "/api/workers?refresh=1",
    )
    shown = {place: (await asyncio.to_thread(ask, stack, place)).text for place in places}
    password = stack.redis_url.partition("://:")[2].partition("@")[0]
    assert len(shown[table]) > 200
    assert [place for place, text in shown.items() if word in text or word.upper() in text or password in text] == []


async def test_flower_has_times_states_and_counts_for_each_tool(stack: Stack, session: Session) -> None:
    await wait_until_listening(stack, session)
    call_ids = make_ids(2)
    await session.call("bash_tool", {"command": "sleep 0.6"}, call_id=call_ids[0])
    missing = await session.call("read_tool", {"file_path": "nothing"}, call_id=call_ids[1])
    assert missing.error_code is ErrorCode.FILE_NOT_FOUND

    tasks = await wait_until_async(lambda: tasks_of_calls(stack, call_ids), SOON_S, "Flower shows the calls as done")

    # A tool error that the model receives is a successful task.
    assert (tasks[call_ids[0]]["runtime"] >= 0.6, tasks[call_ids[1]]["state"]) == (True, "SUCCESS")
    assert {"tool.bash_tool", "tool.read_tool", "tool.glob_tool"} <= set(
        ask(stack, "/api/task/types").json()["task-types"]
    )
    worker = tasks[call_ids[0]]["worker"]
    bash = {"task": "tool.bash_tool", "worker": worker}
    below = {labels["le"]: value for labels, value in samples(stack, "flower_task_runtime_seconds_bucket", **bash)}
    assert [float(edge) for edge in below] == [*DEFAULTS["task_runtime_metric_buckets"], float("inf")]
    assert below["+Inf"] > below["0.5"]
    assert samples(stack, "flower_events_total", type="task-succeeded", **bash)[0][1] == below["+Inf"]
    assert [value >= 0 for _, value in samples(stack, "flower_task_prefetch_time_seconds", **bash)] == [True]
    assert samples(stack, "flower_worker_online", worker=worker)[0][1] == 1


async def test_flower_lists_both_workers_and_their_queues(stack: Stack, session: Session) -> None:
    def read_workers() -> Any:
        workers = ask(stack, "/api/workers?refresh=1").json()
        return workers if len(workers) == 2 and all("active_queues" in worker for worker in workers.values()) else None

    workers = await wait_until_async(read_workers, SOON_S, "both workers have answered Flower")

    queues = {queue["name"] for worker in workers.values() for queue in worker["active_queues"]}
    assert {"pool.web"} < queues
    lengths = ask(stack, "/api/queues/length").json()["active_queues"]
    assert {entry["name"]: entry["messages"] for entry in lengths} == dict.fromkeys(queues, 0)


async def test_a_call_refused_by_a_worker_is_a_failed_task(stack: Stack, session: Session) -> None:
    await wait_until_listening(stack, session)
    before = sum(
        value for _, value in samples(stack, "flower_events_total", type="task-failed", task="tool.webfetch_tool")
    )

    task = publish(stack.broker, "tool.webfetch_tool", "pool.web", "unsigned")

    def has_failed() -> bool:
        answer = ask(stack, f"/api/task/info/{task}")
        return answer.status_code == 200 and answer.json()["state"] == "FAILURE"

    await wait_until_async(has_failed, SOON_S, "Flower shows the forged task as failed")
    after = sum(
        value for _, value in samples(stack, "flower_events_total", type="task-failed", task="tool.webfetch_tool")
    )
    assert after == before + 1


async def test_a_task_page_names_its_call_and_links_to_its_page(stack: Stack, session: Session) -> None:
    await wait_until_listening(stack, session)
    call_id = make_ids(1)[0]
    await session.call("bash_tool", {"command": "true"}, call_id=call_id)
    tasks = await wait_until_async(lambda: tasks_of_calls(stack, [call_id]), SOON_S, "Flower shows the call")

    page = ask(stack, f"/task/{tasks[call_id]['uuid']}").text

    assert f'href="{PAGES}/calls/{call_id}"' in page
    assert "tool.bash_tool" in page


HOSTILE = ("call x' onclick=alert(1)", "call ../../v1/tenants", 'call x"><script>alert(1)</script>', "call a\nb")


async def test_forged_events_put_neither_script_nor_link_into_a_page(stack: Stack, session: Session) -> None:
    await wait_until_listening(stack, session)
    fields = {f"forged-{secrets.token_hex(4)}": shown for shown in HOSTILE}
    app = Celery("forger", broker=stack.redis_url, set_as_current=False)
    with (
        app.connection_for_write() as connection,
        app.events.Dispatcher(connection, hostname="<b>forger</b>") as events,
    ):
        for task, shown in fields.items():
            events.send("task-received", uuid=task, name="<script>alert(2)</script>", args="()", kwargs=shown)
    app.close()
    await wait_until_async(
        lambda: all(ask(stack, f"/task/{task}").status_code == 200 for task in fields), SOON_S, "Flower knows them"
    )

    pages = {shown: ask(stack, f"/task/{task}").text for task, shown in fields.items()}

    signs = ("<script>alert", "<b>forger", 'id="toolcrew-call"', PAGES)
    assert {(shown, sign) for shown, page in pages.items() for sign in signs if sign in page} == set()


def test_every_path_requires_the_password(stack: Stack) -> None:
    """Every path that Flower serves is refused, also as a websocket handshake."""
    bare = httpx.URL(str(stack.info.flower_url)).copy_with(username=None, password=None)
    upgrade = {
        "Connection": "Upgrade",
        "Upgrade": "websocket",
        "Sec-WebSocket-Version": "13",
        "Sec-WebSocket-Key": "eHh4eHh4eHh4eHh4eHh4eA==",
    }
    wrong = {"Authorization": "Basic dG9vbGNyZXc6d3Jvbmc="}
    reading = [path for path, handler in paths().items() if "get" in vars(handler) and path not in PUBLIC_PATHS]
    assert {"/", "/metrics", "/api/tasks", "/api/workers", "/task/x"} <= set(reading)
    with httpx.Client(base_url=bare, timeout=30) as browser:
        answers = {
            (path, name): browser.get(path, headers=headers)
            for path in reading
            for name, headers in (("none", {}), ("wrong", wrong), ("upgrade", upgrade))
        }
        open_to_all = [browser.get(path) for path in PUBLIC_PATHS]

    assert {place: answer.status_code for place, answer in answers.items() if answer.status_code != 401} == {}
    assert not [
        answer for answer in open_to_all if "tool." in answer.text or "access-control-allow-origin" in answer.headers
    ]


def paths() -> dict[str, type]:
    """Return a path for each of Flower's routes, with the route's handler."""
    found = {}
    for rule in handlers:
        pattern, handler = (rule.regex.pattern, rule.handler_class) if hasattr(rule, "regex") else rule[:2]
        found[re.sub(r"\(\.[+*]\)", "x", pattern).removesuffix("$").replace("/?", "")] = handler
    return {path: handler for path, handler in found.items() if path != ".*" and not path.startswith("/static/")}


async def test_the_password_does_not_allow_starting_stopping_or_changing_anything(
    stack: Stack, session: Session
) -> None:
    """The aim of a user with the password: end a call or a worker, or run a call."""
    await wait_until_listening(stack, session)
    call_id = make_ids(1)[0]
    running = asyncio.create_task(
        session.call("bash_tool", {"command": "until [ -e go ]; do sleep 0.1; done; echo survived"}, call_id=call_id)
    )
    tasks = await wait_until_async(lambda: tasks_of_calls(stack, [call_id], "STARTED"), SOON_S, "the call runs")
    task, worker = tasks[call_id]["uuid"], tasks[call_id]["worker"]
    before = stack.pid("worker")
    acting = [path for path, handler in paths().items() if "post" in vars(handler) and path != "/tasks/datatable"]
    assert len(acting) >= 14

    body = {
        "terminate": "true",
        "signal": "SIGKILL",
        "queue": "mine",
        "n": "1",
        "workername": worker,
        "hard": "1",
        "ratelimit": "1/h",
    }
    async with httpx.AsyncClient(base_url=str(stack.info.flower_url), timeout=30) as browser:
        for path in acting:
            target = worker if "/worker/" in path else "tool.bash_tool" if "apply" in path or "send" in path else task
            named = path.replace("/x", f"/{target}")
            answers = [await browser.post(named, data=body), await browser.post(named, json={"args": [], "kwargs": {}})]
            assert {answer.status_code for answer in answers} <= {403, 404}, named

    await session.call("write_tool", {"file_path": "go", "content": "go"})
    result = await running
    assert (result.success, result.metadata["stdout"]) == (True, "survived\n")
    assert stack.pid("worker") == before


async def test_the_worker_log_contains_neither_arguments_nor_output(stack: Stack, session: Session) -> None:
    word, call_ids = f"canary-{secrets.token_hex(6)}", make_ids(2)

    await session.call("bash_tool", {"command": f"x={word}; echo ${{x^^}}"}, call_id=call_ids[0])
    await session.call("read_tool", {"file_path": f"{word}-missing"}, call_id=call_ids[1])

    # The worker writes its log entry after it has stored the result.
    await wait_until_async(
        lambda: all(call_id in stack.log("worker") for call_id in call_ids), SOON_S, "the worker has logged both calls"
    )
    log = stack.log("worker")
    assert word not in log, "an argument is in worker.log"
    assert word.upper() not in log, "output is in worker.log"


async def test_a_killed_flower_restores_its_tasks(stack: Stack, session: Session) -> None:
    await wait_until_listening(stack, session)
    call_id = make_ids(1)[0]
    await session.call("bash_tool", {"command": "true"}, call_id=call_id)
    await wait_until_async(lambda: tasks_of_calls(stack, [call_id]), SOON_S, "Flower shows the call")
    saved = read_save_time(stack)
    await wait_until_async(lambda: read_save_time(stack) > saved, SOON_S, "Flower has written down what it knows")
    # The state that was being written when the call ended may lack the call; the next state contains the call.
    saved = read_save_time(stack)
    await wait_until_async(lambda: read_save_time(stack) > saved, SOON_S, "Flower has written it down again")

    killed = stack.pid("flower")
    os.kill(killed, signal.SIGKILL)
    await asyncio.to_thread(stack.wait_for_another, "flower", killed)

    await wait_until_async(
        lambda: has_answered(stack, call_id),
        UP_S,
        lambda: f"the new Flower knows the call: {stack.log('flower')[-2000:]}",
    )


async def test_a_flower_with_a_damaged_state_file_starts_empty_and_logs_it(stack: Stack, session: Session) -> None:
    killed = stack.pid("flower")
    os.kill(killed, signal.SIGSTOP)
    for file in files_of_state(stack):
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2] + b"\0torn")
    os.kill(killed, signal.SIGKILL)
    await asyncio.to_thread(stack.wait_for_another, "flower", killed)

    await wait_until_listening(stack, session)

    events = read_events(stack.log("flower"))
    assert {event["service"] for event in events} == {"flower"}
    assert [event for event in events if "Failed to load state" in event.get("message", "")]


async def test_flower_keeps_at_most_the_configured_number_of_tasks(stack: Stack, session: Session) -> None:
    await wait_until_listening(stack, session)
    call_ids = make_ids(MAX_TASKS + 10)
    await asyncio.gather(*(session.call("glob_tool", {"pattern": "*"}, call_id=call_id) for call_id in call_ids))

    def has_the_last() -> bool:
        return len(tasks_of_calls(stack, [call_id]) or {}) == 1

    call_id = make_ids(1)[0]
    await session.call("glob_tool", {"pattern": "*"}, call_id=call_id)
    await wait_until_async(has_the_last, SOON_S, "Flower shows the last call")
    assert len(ask(stack, "/api/tasks").json()) == MAX_TASKS


def files_of_state(stack: Stack) -> list[Path]:
    """Return the files of the state. Different kinds of dbm use one file or several."""
    return sorted(path for path in Path(stack.info.logs).glob("flower.db*") if ".tmp" not in path.name)


def read_save_time(stack: Stack) -> float:
    return max((path.stat().st_mtime_ns for path in files_of_state(stack)), default=0)


def has_answered(stack: Stack, call_id: str) -> bool:
    try:
        return tasks_of_calls(stack, [call_id]) is not None
    except httpx.HTTPError:
        return False
