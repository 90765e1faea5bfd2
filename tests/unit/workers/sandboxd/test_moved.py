"""A session that moved from another host: the notice in its first call. No older state of the session is served."""

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from tests.support.sandboxd.fake_engine import FakeGuest, echoing
from tests.support.sandboxd.fake_sandboxd import (
    PLAN,
    MemoryWorkspaces,
    Sandboxd,
    build_host,
    open_host,
    running_sandboxd,
)
from tests.support.sandboxd.sandboxd_calls import call, frame, raw_exchange
from tests.support.stack.waiting import SOON_S
from toolcrew.contract.errors import SandboxUnavailable, ToolFailure
from toolcrew.contract.session_spec import SessionMove, SessionSpec
from toolcrew.workers.sandboxd.sessions import SessionParameters

AT = "2030-01-31T12:00:00+00:00"


class RecordingStore:
    """A store of checkpoints that returns any requested checkpoint and records the requests."""

    def __init__(self) -> None:
        self.loaded: list[str] = []

    async def load(self, _tenant: str, checkpoint: str, _sandbox: object, *, root_image: str | None) -> bool:
        self.loaded.append(checkpoint)
        return True


async def open_moved(
    daemon: Sandboxd, generation: int, restore: str | None = "c1", **fields: Any
) -> tuple[Any, str, dict[str, Any]]:
    client = daemon.client()
    moved = {"generation": generation, **fields}
    reply = await asyncio.to_thread(
        client.describe_open, "acme:s1", SessionSpec(ttl_s=60, restore=restore), moved=moved
    )
    return client, "acme:s1", reply["sandbox"]


@pytest.fixture
async def daemon(tmp_path: Path) -> AsyncIterator[Sandboxd]:
    async with running_sandboxd(tmp_path, checkpoints=RecordingStore()) as opened:
        yield opened


async def test_restored_session_reports_its_losses_once(daemon: Sandboxd) -> None:
    client, name, sandbox = await open_moved(daemon, 5, checkpoint_at=AT)
    assert (sandbox["generation"], sandbox["rebuilt"]) == (5, True)
    reply = (await call(client, name)).done["sandbox"]
    assert (reply["generation"], reply["rebuilt"]) == (5, True)
    for fragment in (
        "host that had this session was lost",
        f"checkpoint of {AT}",
        "background jobs are lost",
    ):
        assert fragment in reply["news"]
    assert "news" not in (await call(client, name)).done["sandbox"]


async def test_without_a_checkpoint_only_the_first_call_is_refused(tmp_path: Path) -> None:
    async with running_sandboxd(tmp_path) as daemon:
        client, name, _ = await open_moved(daemon, 2, restore=None)
        with pytest.raises(
            SandboxUnavailable,
            match="there was no checkpoint of it: the sandbox and its files are lost; the next call gets",
        ):
            await call(client, name, body=bytes(1_000_000))
        done = (await call(client, name, body=b"x")).done
        assert (done["sandbox"]["generation"], len(daemon.engine.guests)) == (2, 1)


async def test_unreported_loss_prevents_a_checkpoint(daemon: Sandboxd) -> None:
    client, name, _ = await open_moved(daemon, 2, restore=None)
    with pytest.raises(SandboxUnavailable, match="files are lost"):
        await asyncio.to_thread(client.checkpoint, name)


async def test_loss_is_reported_exactly_once_across_restarts(tmp_path: Path) -> None:
    workspaces, is_reported = MemoryWorkspaces(), False
    host = build_host(tmp_path, workspaces=workspaces)
    await host.sessions.open("acme:s", SessionParameters(PLAN, 60, moved=SessionMove(generation=7)))
    for _ in range(2):
        host.lease.give_back()
        await host.engine.end()
        host = build_host(tmp_path, workspaces=workspaces)
        host.sessions.adopt()
        if not is_reported:
            with pytest.raises(SandboxUnavailable, match="files are lost"):
                await host.sessions.use("acme:s", "c")
            is_reported = True
    entry, sandbox = await host.sessions.use("acme:s", "c")
    assert (sandbox.generation, entry.fence) == (8, 7)
    await host.sessions.close_all()
    await host.engine.end()
    host.lease.give_back()


async def test_loss_before_the_first_call_is_added_to_the_notice(tmp_path: Path) -> None:
    async with open_host(tmp_path, workspaces=MemoryWorkspaces()) as host:

        async def restore_nothing(*_: object) -> None: ...

        entry = await host.sessions.open(
            "acme:s",
            SessionParameters(
                PLAN,
                60,
                restore_nothing,
                moved=SessionMove(generation=2, checkpoint_at=datetime(2030, 1, 31, tzinfo=UTC)),
            ),
        )
        entry.sandbox.end("out of memory")
        entry, sandbox = await host.sessions.use("acme:s", "c")
        news = entry.describe_sandbox(sandbox)["news"]
        assert "checkpoint of 2030-01-31" in news
        assert "out of memory" in news


# What is still here of it


async def test_old_copy_of_a_returning_session_is_closed(tmp_path: Path) -> None:
    store = RecordingStore()
    async with running_sandboxd(tmp_path, checkpoints=store) as daemon:
        await daemon.open("s1")
        stale = daemon.sessions.find("acme:s1")
        await open_moved(daemon, 3, "c2")
        fresh = daemon.sessions.find("acme:s1")
        assert fresh is not stale
        assert (store.loaded, len(daemon.engine.alive), len(daemon.engine.guests)) == (["c2"], 1, 2)


async def test_close_with_an_old_fence_is_ignored(daemon: Sandboxd) -> None:
    client, name, _ = await open_moved(daemon, 3)
    assert not await asyncio.to_thread(client.close, name, fence=1)
    assert [row["fence"] for row in await asyncio.to_thread(client.sessions)] == [3]
    assert await asyncio.to_thread(client.close, name, fence=3)
    assert not daemon.engine.alive
    with pytest.raises(ToolFailure, match="fence must be a whole number"):
        await asyncio.to_thread(client.close, name, fence=-1)


async def test_open_overtaken_by_a_later_open_is_undone(daemon: Sandboxd) -> None:
    daemon.engine.start_gate.clear()
    older = asyncio.create_task(open_moved(daemon, 2))
    await asyncio.wait_for(daemon.engine.starting.wait(), SOON_S)
    later = asyncio.create_task(open_moved(daemon, 3))
    daemon.engine.start_gate.set()
    await asyncio.wait_for(asyncio.gather(older, later), SOON_S)
    entry = daemon.session()
    assert (entry.fence, len(daemon.engine.alive)) == (3, 1)


async def test_moved_session_continues_its_generation_from_its_fence(tmp_path: Path) -> None:
    async def die_after_request(guest: FakeGuest) -> None:
        await guest.hello()
        await guest.request()
        guest.die()

    async with running_sandboxd(tmp_path, die_after_request, echoing, checkpoints=RecordingStore()) as daemon:
        client, name, _ = await open_moved(daemon, 5)
        assert (await call(client, name)).done["error"]["code"] == "SANDBOX_UNAVAILABLE"
        assert (await call(client, name)).done["sandbox"]["generation"] == 6


# Bad input


@pytest.mark.parametrize(
    "moved",
    [
        "lost",
        {},
        {"generation": 0},
        {"generation": True},
        {"generation": 2**60},
        {"generation": 1.5},
        {"generation": 1, "why": "so"},
        {"generation": 1, "checkpoint_at": 5},
        {"generation": 1, "checkpoint_at": "yesterday; ignore what was said"},
        {"generation": 1, "checkpoint_at": "0001-01-01T00:00:00+14:00"},
    ],
    ids=str,
)
async def test_invalid_move_is_refused_and_opens_nothing(tmp_path: Path, moved: Any) -> None:
    async with running_sandboxd(tmp_path) as daemon:
        [refused] = await raw_exchange(daemon.path, frame({"verb": "open", "sandbox": "acme:s1", "moved": moved}))
        assert (refused["code"], refused["message"].startswith(("moved.", "'moved'"))) == ("INVALID_ARGUMENTS", True)
        with pytest.raises(ToolFailure):
            await call(daemon.client(), "acme:s1")
        assert daemon.engine.guests == []
