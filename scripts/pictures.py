"""Make the pictures of docs/ with an embedded stack, typical calls of two tenants, and Chromium.

To add a picture, add a line to PICTURES. Arguments name the pictures to make; the default is all.
"""

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import httpx
from playwright.async_api import Browser, async_playwright

from toolcrew.contract.calls import ToolCall
from toolcrew.orchestrator.operations.local_stack import StackInfo
from toolcrew.orchestrator.sdk.client import ToolClient
from toolcrew.orchestrator.sessions.session import Session

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "pictures"
CHROMIUM = os.environ.get("CHROMIUM", "/usr/bin/chromium")
FLAGS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip
MAX_BYTES = 100_000
TENANTS = ("acme", "bolt")


@dataclass(frozen=True)
class Picture:
    """Picture of a page in a window of a given size.

    `of`: "flower" or "api". `path`: the path of the page, with `{task}` for the task of a call that timed out.
    `awaits`: a CSS selector of an element that the page must contain.
    """

    name: str
    of: str
    path: str
    awaits: str
    height: int = 520
    width: int = 1180


PICTURES = (
    Picture("flower-workers", "flower", "/", "#workers-table tbody tr td", height=520),
    Picture("flower-tasks", "flower", "/tasks", "#tasks-table tbody tr td a", height=500, width=1500),
    Picture("flower-task", "flower", "/task/{task}", "#toolcrew-call", height=720),
)


async def main(names: list[str]) -> int:
    selected = [picture for picture in PICTURES if not names or picture.name in names]
    if unknown := set(names) - {picture.name for picture in PICTURES}:
        sys.stderr.write(
            f"pictures: unknown picture {', '.join(sorted(unknown))}: use a name of PICTURES, or add it there\n"
        )
        return 2
    FOLDER.mkdir(exist_ok=True)
    too_large = []
    async with open_world() as (stack, task), async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        for picture in selected:
            file = FOLDER / f"{picture.name}.png"
            await take(browser, stack, picture, file, task)
            sys.stdout.write(f"{file}  {file.stat().st_size} bytes\n")
            too_large += [picture.name] if file.stat().st_size > MAX_BYTES else []
        await browser.close()
    if too_large:
        sys.stderr.write(f"pictures: more than {MAX_BYTES} bytes: {', '.join(too_large)}; use smaller windows\n")
    return 1 if too_large else 0


async def take(browser: Browser, stack: StackInfo, picture: Picture, file: Path, task: str) -> None:
    """Take one picture when the page contains the element `awaits`."""
    base = urlsplit(str(stack.flower_url if picture.of == "flower" else stack.api_url))
    credentials = {"username": base.username, "password": base.password or ""} if base.username else None
    context = await browser.new_context(
        viewport={"width": picture.width, "height": picture.height},
        http_credentials=credentials,  # type: ignore[arg-type]
        timezone_id="UTC",
        color_scheme="light",
    )
    page = await context.new_page()
    await page.goto(f"http://{base.hostname}:{base.port}{picture.path.format(task=task)}")
    await page.wait_for_selector(picture.awaits)
    await page.wait_for_load_state("networkidle")
    await page.screenshot(path=file)
    await context.close()


@asynccontextmanager
async def open_world() -> AsyncIterator[tuple[StackInfo, str]]:
    """Start a stack with completed and running calls. Yield the stack and the task id of a call that timed out."""
    async with ToolClient.embedded() as client:
        stack = client.stack
        assert stack is not None
        sessions = [await client.open_session(tenant=tenant) for tenant in TENANTS]
        await wait_for_flower(stack, sessions[0])
        late = await work(sessions)
        running = [
            asyncio.create_task(session.call("bash_tool", {"command": "sleep 600"}, timeout_s=600))
            for session in sessions
        ]
        await until_flower_shows(stack, late)
        yield stack, await task_of(stack, late)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def work(sessions: list[Session]) -> str:
    """Run calls like those of agents, and return the id of the call that timed out."""
    for session in sessions:
        await session.call("write_tool", {"file_path": "report.py", "content": "print(sum(range(100)))\n"})
        await session.call("bash_tool", {"command": "python3 report.py && sleep 0.4"})
        await session.call("grep_tool", {"pattern": "print"})
        await session.call("read_tool", {"file_path": "nothing-there.txt"})
        await session.call("edit_tool", {"file_path": "report.py", "old_string": "100", "new_string": "1000"})
        await session.call("glob_tool", {"pattern": "**/*.py"})
    late = ToolCall(id="report-7f3a", name="bash_tool", arguments={"command": "sleep 30"})
    await sessions[0].call(late.name, late.arguments, timeout_s=1.0, call_id=late.id)
    return late.id


async def wait_for_flower(stack: StackInfo, session: Session) -> None:
    """Wait until Flower receives events. The pool serves calls before Flower is connected."""
    async with asyncio.timeout(90):
        while not await asyncio.to_thread(tasks_of, stack):
            await session.call("glob_tool", {"pattern": "*"})


async def until_flower_shows(stack: StackInfo, call_id: str) -> None:
    async with asyncio.timeout(90):
        while await asyncio.to_thread(state_of, stack, call_id) != "SUCCESS":  # noqa: ASYNC110  # of another process
            await asyncio.sleep(0.1)


def state_of(stack: StackInfo, call_id: str) -> str | None:
    return next((fields["state"] for task, fields in tasks_of(stack).items() if f"-{call_id}." in task), None)


async def task_of(stack: StackInfo, call_id: str) -> str:
    return next(task for task in await asyncio.to_thread(tasks_of, stack) if f"-{call_id}." in task)


def tasks_of(stack: StackInfo) -> dict[str, dict[str, str]]:
    """Return the tasks that Flower lists, as task id -> fields; empty while Flower does not answer."""
    try:
        answer = httpx.get(f"{stack.flower_url}api/tasks", timeout=20)
    except httpx.TransportError:
        return {}
    return dict(answer.json())


if __name__ == "__main__":
    sys.exit(asyncio.run(main(sys.argv[1:])))
