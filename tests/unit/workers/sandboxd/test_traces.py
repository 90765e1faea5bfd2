"""Session reports of sandboxd to workers: changes, jobs, idle times, and checkpoints that workers request."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.sandboxd.fake_sandboxd import (
    PLAN,
    MemorySuspensionStore,
    MemoryWorkspaces,
    Sandboxd,
    build_host,
    open_host,
    running_sandboxd,
)
from tests.support.sandboxd.sandboxd_calls import call
from tests.support.stack.waiting import SOON_S
from toolcrew.contract.errors import SandboxUnavailable, ToolFailure
from toolcrew.workers.sandboxd.archives.checkpoints import StoredCheckpoint
from toolcrew.workers.sandboxd.session import SessionActivity
from toolcrew.workers.sandboxd.sessions import SessionParameters

RUNNING, ENDED = {"job": "job-1", "state": "running"}, {"job": "job-1", "state": "exited"}


class Store:
    """Saves when the test allows it, or fails."""

    def __init__(self) -> None:
        self.automatic: list[bool] = []
        self.fails = False
        self.saving = asyncio.Event()
        self.go = asyncio.Event()
        self.go.set()

    async def save(self, *_: object, is_automatic: bool, **__: object) -> StoredCheckpoint:
        self.automatic.append(is_automatic)
        self.saving.set()
        await self.go.wait()
        if self.fails:
            raise SandboxUnavailable("the store's disk is full")
        return StoredCheckpoint(f"c{len(self.automatic)}", 1, "0" * 64)


async def row(daemon: Sandboxd) -> dict[str, Any]:
    [summary] = await asyncio.to_thread(daemon.client().sessions)
    return dict(summary)


# Traces


@pytest.mark.parametrize("changes", [False, True])
def test_every_operation_except_reads_counts_as_a_change(changes: bool) -> None:
    reading = ("read_text", "read_file", "glob", "grep", "ping", "job_list", "job_poll")
    writing = ("exec", "write_file", "write_text", "edit_text", "job_start", "job_input", "job_kill", "to_come")
    for op in writing if changes else reading:
        activity = SessionActivity()
        activity.record(op, {"kind": "text"})
        assert activity.changed is changes, op


def test_running_or_just_ended_job_counts_as_a_change() -> None:
    activity = SessionActivity()
    activity.record("job_start", {"job": RUNNING})
    activity.has_written = False
    assert activity.changed
    activity.record("job_poll", {"job": ENDED})
    assert (activity.jobs, activity.changed) == (set(), True)


def test_attestation_without_jobs_clears_ended_jobs() -> None:
    activity = SessionActivity()
    activity.record("job_list", {"jobs": [RUNNING, {"job": "job-2", "state": "running"}]})
    activity.record_jobs(1)
    assert activity.jobs == {"job-1", "job-2"}
    activity.record_jobs(0)
    assert (activity.jobs, activity.changed) == (set(), True)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=80),
    lambda inner: (
        st.lists(inner, max_size=5) | st.dictionaries(st.sampled_from(["job", "state", "jobs", "x"]), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(st.lists(st.tuples(st.sampled_from(["job_list", "job_start", "job_poll"]), json_values), max_size=8))
def test_job_names_from_a_hostile_guest_are_bounded(events: list[tuple[str, Any]]) -> None:
    activity = SessionActivity()
    for op, value in events:
        activity.record(op, {"job": value, "jobs": value})
        activity.record(op, value if isinstance(value, dict) else {})
    for number in range(100):
        activity.record("job_start", {"job": {"job": f"j{number}", "state": "running"}})
    assert len(activity.jobs) <= 16
    assert all(len(name) <= 64 for name in activity.jobs)


# Rows


async def test_session_row_has_the_fields_that_workers_use(tmp_path: Path) -> None:
    async with running_sandboxd(tmp_path) as daemon:
        await daemon.open(ttl_s=77.0)
        fields = await row(daemon)
        expected = {"name": "acme:s1", "generation": 1, "fence": 1, "calls": 0, "jobs": 0, "changed": False}
        assert fields.items() >= {**expected, "checkpoint": None, "ttl_s": 77.0, "image": "default"}.items()
        assert 0 <= fields["idle_s"] < SOON_S


async def test_many_sessions_are_listed_in_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("sessions", "control"):
        monkeypatch.setattr(f"toolcrew.workers.sandboxd.{module}.MAX_ROWS", 2)
    async with running_sandboxd(tmp_path) as daemon:
        for session in ("d", "b", "a", "c"):
            client, _ = await daemon.open(session)
        names = [listed["name"] for listed in await asyncio.to_thread(client.sessions)]
        assert names == ["acme:a", "acme:b", "acme:c", "acme:d"]


# Checkpoints


async def test_checkpoint_covers_only_calls_that_ended_before_it(tmp_path: Path) -> None:
    store = Store()
    async with running_sandboxd(tmp_path, checkpoints=store) as daemon:
        client, name = await daemon.open()
        await call(client, name)
        await asyncio.to_thread(client.checkpoint, name)
        fields = await row(daemon)
        assert (fields["changed"], fields["checkpoint"]) == (False, "c1")
        store.go.clear()
        store.saving.clear()
        other = daemon.client()
        checkpointing = asyncio.create_task(asyncio.to_thread(other.checkpoint, name))
        await asyncio.wait_for(store.saving.wait(), SOON_S)
        await call(client, name)
        store.go.set()
        await checkpointing
        assert (await row(daemon))["changed"] is True


async def test_failed_checkpoint_leaves_the_session_changed(tmp_path: Path) -> None:
    store = Store()
    store.fails = True
    async with running_sandboxd(tmp_path, checkpoints=store) as daemon:
        client, name = await daemon.open()
        await call(client, name)
        with pytest.raises(SandboxUnavailable, match="disk is full"):
            await asyncio.to_thread(client.checkpoint, name)
        fields = await row(daemon)
        assert (fields["changed"], fields["checkpoint"]) == (True, None)


async def test_old_automatic_checkpoint_makes_the_session_changed(tmp_path: Path) -> None:
    async with running_sandboxd(tmp_path, checkpoints=Store()) as daemon:
        client, name = await daemon.open()
        await asyncio.to_thread(client.checkpoint, name, automatic=True)
        assert (await row(daemon))["changed"] is False
        entry = daemon.session(name)
        assert entry.automatic_at is not None
        entry.automatic_at -= 2 * 86_400
        assert (await row(daemon))["changed"] is True


@pytest.mark.parametrize("is_packed", [True, False])
async def test_after_a_restart_only_packed_sessions_are_unchanged(tmp_path: Path, is_packed: bool) -> None:
    workspaces, suspension_store = MemoryWorkspaces(), MemorySuspensionStore()
    first = build_host(tmp_path, workspaces=workspaces, suspension_store=suspension_store)
    await first.sessions.open("acme:s", SessionParameters(PLAN, 60))
    if is_packed:
        await first.sessions.suspend_all(5)
    first.lease.give_back()
    await first.engine.end()
    async with open_host(tmp_path, workspaces=workspaces, suspension_store=suspension_store) as second:
        second.sessions.adopt()
        assert second.sessions.describe()[0]["changed"] is not is_packed


async def test_job_ends_with_its_container(tmp_path: Path) -> None:
    async with open_host(tmp_path) as host:
        entry = await host.sessions.open("acme:s", SessionParameters(PLAN, 60))
        entry.activity.record("job_start", {"job": RUNNING})
        entry.activity.has_written = False
        assert await host.sessions.suspender.give_up(entry, must_be_idle=False)
        await host.sessions.use("acme:s", "c")
        assert (entry.activity.jobs, entry.activity.changed) == (set(), True)


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


async def test_checkpoints_of_one_session_are_saved_one_at_a_time(tmp_path: Path) -> None:
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


async def test_session_is_in_use_until_its_checkpoint_is_stored(tmp_path: Path) -> None:
    checkpoints = GatedCheckpoints()
    async with running_sandboxd(tmp_path, checkpoints=checkpoints) as daemon:
        client, name = await daemon.open()
        entry = daemon.session(name)
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


async def test_client_timeout_does_not_report_a_lost_sandboxd(tmp_path: Path) -> None:
    checkpoints = GatedCheckpoints()
    async with running_sandboxd(tmp_path, checkpoints=checkpoints) as daemon:
        client, name = await daemon.open()
        with pytest.raises(SandboxUnavailable, match="did not answer in time: the host is busy"):
            await asyncio.to_thread(client._request, {"verb": "checkpoint", "sandbox": name}, 0.1)
        checkpoints.go.set()


async def test_invalid_session_name_deletes_no_checkpoint(tmp_path: Path) -> None:
    async with running_sandboxd(tmp_path, checkpoints=GatedCheckpoints()) as daemon:
        with pytest.raises(ToolFailure, match="the name of a session"):
            await asyncio.to_thread(daemon.client().delete_checkpoint, "../acme:s", "c1")
