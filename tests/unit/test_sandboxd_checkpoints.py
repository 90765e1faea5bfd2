"""Checkpoints requested by workers: one at a time per session, and the session stays in use during the checkpoint."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from contract.errors import SandboxUnavailable, ToolFailure
from tests.fake_sandboxd import running_sandboxd
from workers.sandboxd.archives.checkpoints import StoredCheckpoint

SOON_S = 10.0


class GatedCheckpoints:
    """Saves when the test allows it. Counts concurrent requests."""

    def __init__(self) -> None:
        self.saving = asyncio.Event()
        self.go = asyncio.Event()
        self.at_once = 0
        self.most_at_once = 0

    async def save(self, *_: object, **__: object) -> StoredCheckpoint:
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        self.saving.set()
        await self.go.wait()
        self.at_once -= 1
        return StoredCheckpoint("c1", 1, "0" * 64)


async def no_body(size: int) -> AsyncIterator[bytes]:
    return
    yield


async def test_two_checkpoints_of_a_session_are_made_one_after_the_other(tmp_path: Path) -> None:
    """Each opens files that their owner may not read and closes them again: at once, one would find closed what it
    counts on.
    """
    checkpoints = GatedCheckpoints()
    async with running_sandboxd(tmp_path, checkpoints=checkpoints) as daemon:
        _, name = await daemon.open()
        requests = [
            asyncio.create_task(daemon.control.answer({"verb": "checkpoint", "sandbox": name}, no_body))
            for _ in range(2)
        ]
        await asyncio.wait_for(checkpoints.saving.wait(), SOON_S)
        await asyncio.sleep(0)
        checkpoints.go.set()
        answers = await asyncio.wait_for(asyncio.gather(*requests), SOON_S)
        assert ([answer["checkpoint"] for answer, _ in answers], checkpoints.most_at_once) == (["c1", "c1"], 1)


async def test_a_session_is_in_use_until_its_checkpoint_is_stored(tmp_path: Path) -> None:
    checkpoints = GatedCheckpoints()
    async with running_sandboxd(tmp_path, checkpoints=checkpoints) as daemon:
        client, name = await daemon.open()
        entry = daemon.sessions.find(name)
        assert entry is not None
        checkpoint = asyncio.create_task(asyncio.to_thread(client.checkpoint, name))
        await asyncio.wait_for(checkpoints.saving.wait(), SOON_S)
        entry.used_at -= 2 * entry.ttl_s
        assert not await daemon.sessions.suspender.give_up(entry)
        await daemon.host.monitor.expire()
        checkpoints.go.set()
        await asyncio.wait_for(checkpoint, SOON_S)
        await daemon.host.monitor.expire()
        assert daemon.sessions.find(name) is entry
        assert entry.idle_s() < SOON_S


async def test_a_long_wait_does_not_report_a_lost_sandboxd(tmp_path: Path) -> None:
    checkpoints = GatedCheckpoints()
    async with running_sandboxd(tmp_path, checkpoints=checkpoints) as daemon:
        client, name = await daemon.open()
        with pytest.raises(SandboxUnavailable, match="did not answer in time: the host is busy"):
            await asyncio.to_thread(client._request, {"verb": "checkpoint", "sandbox": name}, 0.1)
        checkpoints.go.set()


async def test_a_tenant_that_is_none_deletes_nothing(tmp_path: Path) -> None:
    async with running_sandboxd(tmp_path, checkpoints=GatedCheckpoints()) as daemon:
        with pytest.raises(ToolFailure, match="the name of a session"):
            await asyncio.to_thread(daemon.client().delete_checkpoint, "../acme:s", "c1")
