"""Infrastructure failures in Flower, in a real browser on a real stack. Only these failures are shown in red."""

import asyncio
import contextlib
import os
import secrets
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from docker import APIClient
from playwright.async_api import Page, expect

from tests.support.api.page_harness import CHROMIUM, open_browser
from tests.support.stack.stack import UP_S, Stack, missing, open_stack
from tests.support.stack.waiting import SOON_S, wait_until_async
from toolcrew.contract.errors import ErrorCode, SandboxUnavailable
from toolcrew.orchestrator.sdk.client import ToolClient
from toolcrew.orchestrator.sessions.session import Session

pytestmark = pytest.mark.stack

expect.set_options(timeout=30_000)
SHOWN_S = 60.0
"""Limit for Flower to show a task, in seconds."""


@pytest.fixture(scope="module")
def stack(engine: APIClient) -> Iterator[Stack]:
    if not os.path.exists(CHROMIUM):
        missing(f"{CHROMIUM} is not installed: apt-get install chromium")
    with open_stack(engine, workers_only=False) as opened:
        yield opened


@asynccontextmanager
async def open_tasks(stack: Stack) -> AsyncIterator[Page]:
    """Yield the page with Flower's list of tasks."""
    url = str(stack.info.flower_url)

    def is_up() -> bool:
        with contextlib.suppress(httpx.HTTPError):
            return httpx.get(url).is_success
        return False

    await wait_until_async(is_up, UP_S, "Flower answers")
    async with open_browser() as browser:
        page = await browser.new_page(viewport={"width": 1400, "height": 900})
        await page.goto(f"{url.rstrip('/')}/tasks")
        yield page


async def find_rows(page: Page, state: str, call_id: str) -> None:
    """Wait until the tab of that state lists the call. Flower's list does not refresh itself, so each round loads the
    tab again.
    """

    async with asyncio.timeout(SHOWN_S):
        while not await count_rows(page, state, call_id):
            pass


async def count_rows(page: Page, state: str, call_id: str) -> int:
    await page.reload()
    await page.get_by_role("button", name=state, exact=True).click()
    await page.wait_for_load_state("networkidle")
    return await page.locator("#tasks-table tbody tr").filter(has_text=f"call {call_id}").count()


def make_id() -> str:
    return f"f{secrets.token_hex(3)}"


def count_host_queues(stack: Stack) -> int:
    """Return how many queues of hosts Flower's API lists."""
    listed = httpx.get(f"{str(stack.info.flower_url).rstrip('/')}/api/queues/length", timeout=20).json()
    return sum(queue["name"].startswith("host.") for queue in listed["active_queues"])


def is_dead(pid: int) -> bool:
    """Return whether the process has ended with all its threads, even if its parent has not waited for it. Its sockets
    are closed by the last thread.
    """
    process = Path(f"/proc/{pid}")
    try:
        state = (process / "stat").read_text().rpartition(")")[2].split()[0]
        return state == "Z" and len(list((process / "task").iterdir())) == 1
    except (FileNotFoundError, ProcessLookupError):
        return True


async def until_flower_listens(page: Page, session: Session) -> None:
    """Make calls until Flower lists one: workers serve before Flower listens to events."""
    async with asyncio.timeout(60):
        while True:
            call_id = make_id()
            await session.call("glob_tool", {"pattern": "*"}, call_id=call_id)
            if await count_rows(page, "Succeeded", call_id):
                return


async def until_sessions_open(client: ToolClient) -> None:
    """Wait until the host takes sessions: its next report says that sandboxd is back."""
    async with asyncio.timeout(UP_S):
        while True:
            try:
                async with await client.open_session():
                    return
            except SandboxUnavailable:
                await asyncio.sleep(0.2)


async def test_a_call_without_sandboxd_is_failed_and_a_failed_command_is_succeeded(
    stack: Stack, client: ToolClient, session: Session
) -> None:
    async with open_tasks(stack) as page:
        await until_flower_listens(page, session)
        green, red = make_id(), make_id()
        assert (await session.call("bash_tool", {"command": "exit 3"}, call_id=green)).metadata["exit_code"] == 3
        killed = stack.pid("sandboxd")
        # The supervisor would restart sandboxd at once.
        os.kill(stack.process.pid, signal.SIGSTOP)
        try:
            os.kill(killed, signal.SIGKILL)
            # A dying sandboxd could still accept the call, whose outcome would then be unknown.
            await wait_until_async(lambda: is_dead(killed), SOON_S, "sandboxd is dead")
            running = asyncio.create_task(session.call("bash_tool", {"command": "echo secret-argument"}, call_id=red))
            await find_rows(page, "Failed", red)
            row = page.locator("#tasks-table tbody tr").filter(has_text=f"call {red}").first
            await expect(row).to_contain_text("tool.bash_tool")
            await expect(row).to_contain_text(f"tenant default, session {session.id}")
            await row.get_by_role("link").last.click()
            await expect(page.locator("body")).to_contain_text("SANDBOX_UNAVAILABLE")
            assert "secret-argument" not in await page.content()
            await page.go_back()
            assert (await count_rows(page, "Succeeded", green), await count_rows(page, "Failed", green)) == (1, 0)
        finally:
            os.kill(stack.process.pid, signal.SIGCONT)
        # The caller's code is unchanged: either the call ran after the restart, or its result gives the reason.
        result = await running
        assert result.success or result.error_code is ErrorCode.SANDBOX_UNAVAILABLE
        await wait_until_async(lambda: stack.pid("sandboxd") != killed, SOON_S, "sandboxd runs again")
        await until_sessions_open(client)


async def test_the_call_of_a_killed_worker_is_failed_and_only_the_new_queue_is_listed(
    stack: Stack, client: ToolClient, session: Session
) -> None:
    async with open_tasks(stack) as page:
        await until_flower_listens(page, session)
        lost = make_id()
        running = asyncio.create_task(session.call("bash_tool", {"command": "touch begun; sleep 600"}, call_id=lost))
        await find_rows(page, "Started", lost)
        killed = stack.pid("worker")
        os.kill(killed, signal.SIGKILL)
        result = await running
        assert result.error_code is ErrorCode.OUTCOME_UNKNOWN
        # The pool noticed the loss before the caller received its result, and Flower learns of the loss at the same
        # time.
        await find_rows(page, "Failed", lost)
        row = page.locator("#tasks-table tbody tr").filter(has_text=f"call {lost}").first
        # The last column is the id. The column must be inside the window.
        box = await row.get_by_role("link").last.bounding_box()
        assert box is not None
        assert box["x"] + box["width"] <= 1400
        life = (await client.call_history(lost)).model_dump(mode="json")
        assert (life["state"], life["error_code"], life["ended_at"] is not None) == ("unknown", "OUTCOME_UNKNOWN", True)
        assert life["noticed_by"].startswith("toolcrew")
        assert "may have acted" in life["advice"]
        await asyncio.to_thread(stack.wait_for_another, "worker", killed)
        # The page Broker shows the queue of the new worker instead of the dead worker's queue.
        await wait_until_async(lambda: count_host_queues(stack) == 1, SHOWN_S, "one queue of a host")
        await page.goto(f"{str(stack.info.flower_url).rstrip('/')}/broker")
        await expect(page.locator("tbody tr").filter(has_text="host.")).to_have_count(1)
