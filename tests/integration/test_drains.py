"""Two real hosts. One host is drained while its sessions are in use, and no session loses data."""

import asyncio
import json
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
from docker import APIClient
from pydantic import SecretStr

from tests.support.stack.host_harness import Harness, open_harness
from tests.support.stack.stack import TOOLCREW, UP_S
from tests.support.stack.waiting import wait_until, wait_until_async
from toolcrew.contract.hosts import HostReport
from toolcrew.contract.session_spec import SandboxOptions
from toolcrew.contract.settings import OrchestratorSettings
from toolcrew.orchestrator.sdk.client import ToolClient
from toolcrew.orchestrator.sessions.session import Session
from toolcrew.store.connection import open_redis
from toolcrew.store.hosts import HostStore

SESSIONS = 4


@pytest.fixture(scope="module")
def harness(engine: APIClient) -> Iterator[Harness]:
    with open_harness(engine, "a", "b") as opened:
        wait_until(lambda: all(report.healthy for report in reports(opened)), UP_S, opened.log_tails)
        yield opened


def settings_of(harness: Harness) -> OrchestratorSettings:
    return OrchestratorSettings(redis_url=SecretStr(harness.redis_url), deployment=harness.deployment)


def reports(harness: Harness) -> list[HostReport]:
    """Return the reports of all living workers."""

    async def read() -> list[HostReport]:
        client = open_redis(harness.broker)
        try:
            return await HostStore(client, harness.deployment).read()
        finally:
            await client.aclose()

    return asyncio.run(read())


def toolcrew(harness: Harness, *arguments: str) -> Any:
    """Return the object that a command prints."""
    done = subprocess.run(
        [TOOLCREW, *arguments, "--json"],
        env=harness.environment(),
        capture_output=True,
        text=True,
        timeout=UP_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


class Writer:
    """A session that appends a number per call, one call after another. `written`: the numbers of the successful
    calls.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self.written: list[int] = []
        self.failures: list[str] = []
        self._is_stopping = False

    async def run(self) -> None:
        for number in range(10_000):
            if self._is_stopping:
                return
            result = await self.session.call("bash_tool", {"command": f"echo {number} >> numbers"})
            if result.success:
                self.written.append(number)
            else:
                self.failures.append(result.text())

    def stop(self) -> None:
        self._is_stopping = True


async def test_sessions_of_a_killed_worker_continue_with_all_their_files(harness: Harness) -> None:
    async with ToolClient.connect(settings=settings_of(harness)) as client:
        session = await client.open_session()
        home = (await session.info()).host
        assert (await session.call("bash_tool", {"command": "echo kept > file; cd /tmp; export X=7"})).success
        before = await session.call("bash_tool", {"command": "echo again >> /workspace/file"})

        harness.process(f"{home}.worker").wait_for_another(harness.kill(f"{home}.worker"))

        # Also a call that arrives too early and lies in the dead worker's queue: it has not started, and is sent
        # again.
        after = await session.call("bash_tool", {"command": "cat /workspace/file; pwd; echo $X"})
        assert after.success, after.text()
        assert (after.output or "").split() == ["kept", "again", "/tmp", "7"]
        assert after.sandbox is not None
        assert before.sandbox is not None
        assert after.sandbox.id == before.sandbox.id, "not even its container was another"
        await session.close()


async def test_a_host_that_is_drained_under_load_loses_no_call_and_no_file(harness: Harness) -> None:
    async with ToolClient.connect(settings=settings_of(harness)) as client:
        small = SandboxOptions(workspace_bytes=16 * 1024**2)
        writers = [Writer(await client.open_session(options=small)) for _ in range(SESSIONS)]
        writing = [asyncio.create_task(writer.run()) for writer in writers]
        await wait_until_async(lambda: all(len(writer.written) > 3 for writer in writers), UP_S, "all write")

        drained = await asyncio.to_thread(toolcrew, harness, "hosts", "drain", "a", "--wait")

        reached = [len(writer.written) for writer in writers]
        await wait_until_async(
            lambda: all(len(one.written) > was + 2 for one, was in zip(writers, reached, strict=True)),
            UP_S,
            "all go on",
        )
        for writer in writers:
            writer.stop()
        await asyncio.gather(*writing)

        assert [worker["state"] for worker in drained["workers"]] == ["drained"]
        assert [writer.failures for writer in writers] == [[]] * SESSIONS
        for writer in writers:
            numbers = (await writer.session.read_file("numbers")).decode().split()
            assert numbers == [str(number) for number in writer.written]
            size = await writer.session.exec(["df", "-m", "--output=size", "/workspace"])
            assert int(size.stdout.split()[-1]) < 20
            await writer.session.close()
    assert [report.host for report in await asyncio.to_thread(reports, harness)] == ["b"]
    # A supervisor does not restart a process with exit code 0. The process ends a moment after it reports that it is
    # drained.
    await wait_until_async(lambda: harness.process("a.worker").ends[-1:] == [0], UP_S, harness.log_tails)
