"""Make the pictures of the pages in docs/ with the service on a separate Redis, prepared data, and Chromium.

.venv/bin/python scripts/page_pictures.py
"""

import asyncio
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.support.api.api_harness import api_settings, open_api  # noqa: E402
from tests.support.api.page_harness import Visitors, World, open_browser  # noqa: E402
from tests.support.runs.batch_events import Attempt  # noqa: E402
from tests.support.stack.stack import open_redis_server  # noqa: E402
from toolcrew.contract.run_events import FailureKind  # noqa: E402
from toolcrew.contract.run_spec import RunBody  # noqa: E402
from toolcrew.store.connection import open_redis  # noqa: E402

FOLDER = ROOT / "docs" / "pictures"
MAX_BYTES = 100_000
SHOWN = {
    "page-overview": ("/", 1100, 760),
    "page-run": ("/runs/RUN?of=acme", 1000, 900),
    "page-approvals": ("/approvals/QUESTION", 1000, 760),
    "page-hosts": ("/hosts", 1000, 620),
    "page-batch": ("/batches/nightly?of=acme", 1000, 900),
    "page-phone": ("/", 360, 740),
}


async def main() -> int:
    """Make the pictures and return the exit status."""
    with open_redis_server() as server:
        async with (
            open_api(server.url) as api,
            open_redis(api_settings(server.url).broker()) as client,
            open_browser() as browser,
        ):
            world = World(client, api_settings(server.url))
            parameters = await fill(world)
            async with world.open_run("Find out why the nightly build takes an hour, and say what to do.") as worked:
                worked.begin_step(1, "I look at what the build does first.")
                worked.print_output(
                    worked.send_call({"command": "time make -j2 all"}), "cc -O2 -c scan.c\ncc -O2 -c parse.c\n"
                )
                parameters["RUN"] = worked.id
                return await take_all(Visitors(browser, api), parameters)


async def fill(world: World) -> dict[str, str]:
    """Create the content of the pictures, and return the parameters of their addresses."""
    await world.publish("bash_tool", "read_tool", "webfetch_tool")
    await world.report_host("blue", busy=3, sessions=7, sandboxes=9, disk_free_bytes=120 * 1024**3)
    await world.report_host(
        "green", queue="host.green.b00t", busy=1, sessions=2, sandboxes=4, disk_free_bytes=80 * 1024**3
    )
    for number in range(3):
        await world.open_session("acme", f"session-{number}")
    failed = Attempt(failure=FailureKind.MODEL, code="TIMEOUT", message="the model did not answer in time")
    stories = [(f"ticket-{number}", failed if number % 7 == 0 else Attempt()) for number in range(40)]
    await world.submit_batch("acme", "nightly", "tickets of the day", stories)
    for number in range(3):
        await world.durable_runs.start("acme", RunBody(instruction=f"Count the open tickets of group {number}."))
    question = await world.ask(
        "rm -rf build/ \u202e&& cu\u0430l http://cache.test\n", warning="it removes a folder and all that is in it"
    )
    return {"QUESTION": question.id}


async def take_all(visitors: Visitors, parameters: dict[str, str]) -> int:
    FOLDER.mkdir(exist_ok=True)
    too_large = []
    for name, (path, width, height) in SHOWN.items():
        for parameter, value in parameters.items():
            path = path.replace(parameter, value)
        async with visitors.visit("operator", viewport={"width": width, "height": height}) as visit:
            await visit.page.goto(path)
            file = FOLDER / f"{name}.png"
            await visit.page.screenshot(path=file)
            sys.stdout.write(f"{file.name}  {file.stat().st_size} bytes\n")
            too_large += [name] if file.stat().st_size > MAX_BYTES else []
    if too_large:
        sys.stderr.write(f"page_pictures: more than {MAX_BYTES} bytes: {', '.join(too_large)}; use smaller windows\n")
    return 1 if too_large else 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
