"""Children of sandboxd that read trees of tenants: their memory together, their control group, and their turns."""

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.sandboxd.fake_sandboxd import PLAN, MemoryWorkspaces, open_host
from tests.support.stack.waiting import SOON_S
from toolcrew.workers.sandboxd.cgroups import HELPERS, HELPERS_BYTES, PARENT, Cgroups
from toolcrew.workers.sandboxd.disks import children
from toolcrew.workers.sandboxd.disks.base import WorkspaceSize
from toolcrew.workers.sandboxd.disks.image import ImageWorkspace, ImageWorkspaces
from toolcrew.workers.sandboxd.factory import SandboxFactory
from toolcrew.workers.sandboxd.forks import MERGED_LAYERS, SessionForker
from toolcrew.workers.sandboxd.session import HostSession
from toolcrew.workers.sandboxd.sessions import SessionParameters, Sessions

SIZE = WorkspaceSize(1024 * 1024, 100)


@pytest.mark.parametrize("version", [1, 2])
def test_a_child_is_in_a_group_with_a_memory_limit(tmp_path: Path, version: int) -> None:
    root = tmp_path / "memory" if version == 1 else tmp_path
    root.mkdir(exist_ok=True)
    if version == 2:
        (tmp_path / "cgroup.controllers").touch()
    Cgroups(tmp_path).add_helper(1234)
    group = root / PARENT / HELPERS
    limit = "memory.limit_in_bytes" if version == 1 else "memory.max"
    assert (group / limit).read_text() == str(HELPERS_BYTES)
    assert (group / "cgroup.procs").read_text() == "1234"


async def test_children_together_fit_their_group_and_leave_a_part_for_other_tenants(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    running, go_on = list[str](), asyncio.Event()

    async def run(module: str, descriptors: object, within_s: float) -> int:
        running.append(module)
        await go_on.wait()
        return 0

    monkeypatch.setattr(children, "_run_child", run)
    greedy = [asyncio.create_task(children.run_child("greedy", "greedy", (), 1.0)) for _ in range(10)]
    await asyncio.sleep(0)
    others = [asyncio.create_task(children.run_child(name, name, (), 1.0)) for name in "abcd"]
    for _ in range(5):
        await asyncio.sleep(0)
    assert len(running) * children.MEMORY_BYTES <= HELPERS_BYTES
    assert set(running) > {"greedy", "a"}
    go_on.set()
    await asyncio.gather(*greedy, *others)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, which may make control groups")
async def test_a_child_of_a_real_host_has_limits() -> None:
    read, write = os.pipe()
    try:
        assert await children.run_child("acme", "tests.support.sandboxd.print_limits", (write,), SOON_S) == 0
        address_bytes, oom = os.read(read, 100).split()
    finally:
        os.close(read)
        os.close(write)
    assert int(address_bytes) == children.MEMORY_BYTES
    assert int(oom) == 1000


class PausedForker(SessionForker):
    """Forks nothing, and merges layers when the test says so."""

    def __init__(self, sessions: Sessions, factory: SandboxFactory) -> None:
        super().__init__(sessions, factory)
        self.merges: list[str] = []
        self.go_on = asyncio.Event()

    async def _fork(self, entry: HostSession, children: Sequence[str], *, leaves_jobs: bool) -> None:
        pass

    async def _merge(self, layers: tuple[str, ...], entry: HostSession) -> None:
        self.merges.append(entry.id)
        await self.go_on.wait()


async def test_a_tenant_has_one_merge_at_a_time(tmp_path: Path) -> None:
    layers = tuple(str(number) for number in range(MERGED_LAYERS))
    async with open_host(tmp_path, workspaces=MemoryWorkspaces()) as host:
        forker, names = PausedForker(host.sessions, host.factory), ["acme:a", "acme:b", "rival:a"]
        workspaces = {}
        for name in names:
            entry = await host.sessions.open(name, SessionParameters(PLAN, 60))
            workspaces[name], entry.workspace = entry.workspace, ImageWorkspace(name, SIZE, None, layers)  # type: ignore[arg-type]
        for name in [*names, *names]:
            await forker.fork(name, ["child"], leaves_jobs=False)
        await asyncio.sleep(0)
        assert forker.merges == ["acme:a", "rival:a"]
        forker.go_on.set()
        await asyncio.gather(*forker._running)
        await asyncio.sleep(0)
        await forker.fork("acme:b", ["child"], leaves_jobs=False)
        await asyncio.sleep(0)
        assert forker.merges[2:] == ["acme:b"]
        await asyncio.gather(*forker._running)
        for entry in host.sessions.all():
            entry.workspace = workspaces[entry.id]


class ReadyImages(ImageWorkspaces):
    """Disks whose merges are done at once."""

    async def merge(self, name: str, layers: Sequence[str], size: WorkspaceSize, **options: Any) -> None:
        pass


async def test_a_merge_waits_for_no_session_without_its_layers(tmp_path: Path) -> None:
    """A program of another tenant decides how long the lock of its session is held."""
    async with open_host(tmp_path, workspaces=MemoryWorkspaces()) as host:
        merged, other = [await host.sessions.open(name, SessionParameters(PLAN, 60)) for name in ("acme:a", "slow:a")]
        workspace, images = merged.workspace, ReadyImages(tmp_path / "images", 0)
        merged.workspace, host.factory.workspaces = ImageWorkspace("top", SIZE, images, ("upper", "lower")), images
        async with other.lock, asyncio.timeout(SOON_S):
            await SessionForker(host.sessions, host.factory)._merge(("upper", "lower"), merged)
        assert len(merged.workspace.layers) == 1
        merged.workspace, host.factory.workspaces = workspace, host.workspaces
