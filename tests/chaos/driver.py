"""An orchestrator under load, in a separate process. Session ids and call ids are recorded before use, and every
result is recorded once.

`python -m tests.chaos.driver NAME OUT SESSIONS SEED [--tools]` runs until SIGTERM, then ends its calls, closes its
sessions and exits. The driver appends lines of JSON to OUT, each in one write, so that its records survive a kill.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

from toolcrew.contract.calls import ToolResult
from toolcrew.contract.errors import ErrorCode, OperatorError, ToolFailure
from toolcrew.orchestrator.sdk.client import ToolClient
from toolcrew.orchestrator.sessions.session import Session

KNOWN = "known words\n"
LIMIT_S = 10.0
LANES = 2
"""Concurrent calls in a session."""
TTL_S = 20.0
"""Time to live of sessions; the sessions of a killed orchestrator expire after this many seconds."""


class Driver:
    """A load driver. Its only output is the file of records."""

    def __init__(self, name: str, out: Path, client: ToolClient, chance: random.Random, *, has_tools: bool) -> None:
        self._name = name
        self._fd = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._client = client
        self._chance = chance
        self._has_tools = has_tools
        self._calls = 0
        self.stopping = asyncio.Event()

    def record(self, event: str, **facts: Any) -> None:
        os.write(
            self._fd, json.dumps({"at": time.time(), "driver": self._name, "event": event, **facts}).encode() + b"\n"
        )

    async def work(self) -> None:
        """Use one session after another, each until the session is reported as lost."""
        while not self.stopping.is_set():
            session = await self._open()
            if session is not None:
                async with asyncio.TaskGroup() as lanes:
                    lost = asyncio.Event()
                    for _ in range(LANES):
                        lanes.create_task(self._lane(session, lost))
                await self._close(session)

    async def _open(self) -> Session | None:
        try:
            session = await self._client.open_session(ttl_s=TTL_S)
        except (OperatorError, ToolFailure) as error:
            self.record("not_opened", code=error.code, error=str(error))
            await asyncio.sleep(0.5)
            return None
        self.record("opened", session=session.id)
        try:
            await session.write_file("known.txt", KNOWN.encode())
        except (OperatorError, ToolFailure) as error:
            # A file that is missing later was then really lost.
            self.record("not_written", session=session.id, code=error.code, error=str(error))
            await self._close(session)
            return None
        return session

    async def _close(self, session: Session) -> None:
        try:
            await session.close()
        except (OperatorError, ToolFailure) as error:
            self.record("not_closed", session=session.id, code=error.code, error=str(error))
        else:
            self.record("closed", session=session.id)

    async def _lane(self, session: Session, lost: asyncio.Event) -> None:
        while not (self.stopping.is_set() or lost.is_set()):
            result = await self._call(session)
            if result.error_code == ErrorCode.SESSION_NOT_FOUND:
                lost.set()
            if not result.success:
                await asyncio.sleep(0.2)

    async def _call(self, session: Session) -> ToolResult:
        self._calls += 1
        call = f"{self._name}-{self._calls}"
        seconds = round(self._chance.choice((0.0, 0.1, 0.3, 1.5)), 1)
        kinds = ["read_tool", "read_tool", "bash_tool", "bash_tool"] + ["tally_tool"] * self._has_tools
        tool = self._chance.choice(kinds)
        arguments: dict[str, Any] = {
            "read_tool": {"file_path": "known.txt"},
            "bash_tool": {"command": f"echo {call} >> /srv/{call}; sleep {seconds}; echo acted {call}"},
            "tally_tool": {"call": call, "seconds": seconds},
        }[tool]
        self.record("sent", call=call, tool=tool, session=session.id)
        started = time.monotonic()
        result = await session.call(tool, arguments, call_id=call, timeout_s=LIMIT_S)
        self.record(
            "result",
            call=call,
            success=result.success,
            code=result.error_code,
            error=result.error,
            output=(result.output or "")[:200],
            answers=result.call_id,
            took_s=round(time.monotonic() - started, 2),
            cpu_s=result.usage.cpu_s if result.usage is not None else 0.0,
        )
        return result


async def drive(arguments: argparse.Namespace) -> None:
    async with ToolClient.connect() as client:
        driver = Driver(arguments.name, arguments.out, client, random.Random(arguments.seed), has_tools=arguments.tools)
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, driver.stopping.set)
        driver.record("ready")
        async with asyncio.TaskGroup() as sessions:
            for _ in range(arguments.sessions):
                sessions.create_task(driver.work())
        driver.record("done")


def main() -> int:
    parser = argparse.ArgumentParser("python -m tests.chaos.driver")
    parser.add_argument("name")
    parser.add_argument("out", type=Path)
    parser.add_argument("sessions", type=int)
    parser.add_argument("seed")
    parser.add_argument("--tools", action="store_true")
    asyncio.run(drive(parser.parse_args()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
