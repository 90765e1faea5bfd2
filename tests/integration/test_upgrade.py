"""A deployment during an upgrade. Hosts and orchestrators of the previous release and of this release serve the same
pool.
"""

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from docker import APIClient
from pydantic import SecretStr

from tests.support.stack.earlier_release import COMMIT, unpack_release
from tests.support.stack.host_harness import Harness, open_harness
from tests.support.stack.stack import ROOT, TOOLCREW, UP_S, end_process
from tests.support.stack.waiting import wait_until, wait_until_async
from toolcrew.contract.settings import OrchestratorSettings
from toolcrew.orchestrator.sdk.client import ToolClient
from toolcrew.orchestrator.sessions.session import Session
from toolcrew.store.batches import batch_key

SESSIONS, ITEMS = 4, 3
COMMAND = (sys.executable, "-m", "toolcrew.orchestrator")
"""toolcrew, of the release in whose tree the command starts."""

pytestmark = pytest.mark.stack


@pytest.fixture(scope="module")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpack_release(COMMIT, tmp_path_factory.mktemp("earlier"))


@pytest.fixture(scope="module")
def harness(engine: APIClient, earlier: Path) -> Iterator[Harness]:
    with open_harness(engine, "new") as opened:
        opened.start_host("old", earlier)
        opened.wait_ready()
        folders = [Path(f"/proc/{opened.process(role).pid}/cwd").resolve() for role in ("old.worker", "new.worker")]
        assert folders == [earlier.resolve(), ROOT.resolve()]
        yield opened


def settings_of(harness: Harness) -> OrchestratorSettings:
    return OrchestratorSettings(redis_url=SecretStr(harness.redis_url), deployment=harness.deployment)


async def open_on_both(client: ToolClient) -> dict[str, list[Session]]:
    """Return sessions by host: at least SESSIONS in total, and one on each host."""
    found: dict[str, list[Session]] = {"old": [], "new": []}
    while not all(found.values()) or sum(map(len, found.values())) < SESSIONS:
        session = await client.open_session()
        found[(await session.info()).host].append(session)
    return found


def run_batch_of(harness: Harness, tree: Path, *arguments: str) -> str:
    """Return the output of a batch command of that tree's release."""
    done = subprocess.run(
        [*COMMAND, "batches", *arguments],
        cwd=tree,
        env=harness.environment(),
        capture_output=True,
        text=True,
        timeout=UP_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_batch_of_an_earlier_orchestrator_runs_on_hosts_of_both_releases(
    harness: Harness, earlier: Path, tmp_path: Path
) -> None:
    work = {"name": "bash_tool", "arguments": {"command": "echo done"}}
    lines = [
        {"custom_id": f"i{number}", "method": "POST", "url": "/v1/tools/execute", "body": work}
        for number in range(ITEMS)
    ]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    environment = harness.environment({"TOOLCREW_APPROVALS": "auto"})
    batch = "upgrade"
    service = [sys.executable, "-m", "toolcrew.orchestrator", "serve", "batches", "--no-traces"]
    with (tmp_path / "service.log").open("wb") as log:
        serving = subprocess.Popen(service, cwd=ROOT, env=environment, stdout=log, stderr=log)
    try:
        run_batch_of(harness, earlier, "submit", str(tmp_path / "in.jsonl"), "--id", batch, "--detach")
        with harness.open_redis() as store:
            key = batch_key(harness.deployment, "default", batch)
            wait_until(lambda: store.hget(key, "state") == b"completed", UP_S, (tmp_path / "service.log").read_text)
    finally:
        end_process(serving, UP_S)
    rows = [json.loads(line) for line in run_batch_of(harness, ROOT, "export", batch).splitlines()]
    assert sorted((row["custom_id"], row["response"]["body"]["output"]) for row in rows) == [
        (f"i{number}", "done\n") for number in range(ITEMS)
    ]


async def test_sessions_of_an_earlier_host_move_to_a_new_host_when_it_is_drained_under_load(harness: Harness) -> None:
    async with ToolClient.connect(settings=settings_of(harness)) as client:
        homes = await open_on_both(client)
        sessions = [session for held in homes.values() for session in held]
        written: dict[str, list[int]] = {session.id: [] for session in sessions}
        is_over = asyncio.Event()

        async def write(session: Session) -> None:
            number = 0
            while not is_over.is_set():
                result = await session.call("bash_tool", {"command": f"echo {number} >> numbers"})
                assert result.success, result.text()
                written[session.id].append(number)
                number += 1

        writing = [asyncio.create_task(write(session)) for session in sessions]
        try:
            await wait_until_async(
                lambda: all(len(numbers) > 2 for numbers in written.values()), UP_S, harness.log_tails
            )
            drain = [TOOLCREW, "hosts", "drain", "old", "--wait", "--json"]
            done = await asyncio.to_thread(
                subprocess.run,
                drain,
                env=harness.environment(),
                capture_output=True,
                text=True,
                timeout=UP_S,
                check=False,
            )
            assert done.returncode == 0, done.stdout + done.stderr
            reached = {name: len(numbers) for name, numbers in written.items()}
            await wait_until_async(
                lambda: all(len(written[name]) > was + 2 for name, was in reached.items()), UP_S, harness.log_tails
            )
        finally:
            is_over.set()
            ends = await asyncio.gather(*writing, return_exceptions=True)
        assert ends == [None] * len(sessions)
        for session in sessions:
            assert (await session.info()).host == "new"
            assert [int(line) for line in (await session.read_file("numbers")).decode().split()] == written[session.id]
            await session.close()
        await wait_until_async(lambda: harness.process("old.worker").ends[-1:] == [0], UP_S, harness.log_tails)
