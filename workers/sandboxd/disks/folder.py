"""Workspaces as plain folders of the host. The files outlive the container on every host, but their size is only
measured at intervals.
"""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Mapping, Set
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from toolcrew.contract.errors import SandboxUnavailable
from toolcrew.workers.sandboxd.disks.base import FILES, Kind, Workspace, WorkspaceMount, WorkspaceSize, make_folders
from toolcrew.workers.sandboxd.disks.trees import TreeCount
from toolcrew.workers.sandboxd.disks.workspace_store import WorkspaceStore, refused

WATCH_S = 0.2
"""Maximum duration in seconds of one check of all workspaces."""
_SLICE_S = 0.05


@dataclass(frozen=True)
class FolderWorkspace:
    """A workspace in `<folder>/<name>/files`, inside a folder that only sandboxd's user may enter."""

    name: str
    size: WorkspaceSize
    owner: "FolderWorkspaces" = field(compare=False, repr=False)

    @property
    def kind(self) -> Kind:
        return "folder"

    @property
    def layers(self) -> tuple[str, ...]:
        return ()

    @property
    def outlives_container(self) -> bool:
        return True

    @asynccontextmanager
    async def mounted(self) -> AsyncIterator[WorkspaceMount]:
        yield WorkspaceMount(self.owner.open_for(self))

    async def remove(self) -> None:
        await self.owner.remove(self)


class FolderWorkspaces:
    """Workspaces below `folder`. No workspace is created while its disk has less than `host_free_bytes` free. The
    user of sandboxd must be root or the sandboxes' uid.
    """

    def __init__(self, folder: Path, host_free_bytes: int) -> None:
        self._store = WorkspaceStore(folder, host_free_bytes)
        self._watched: dict[str, FolderWorkspace] = {}
        self._counts: dict[str, TreeCount] = {}
        self._counted_at: dict[str, float] = {}
        self._watching = asyncio.Lock()

    @property
    def kind(self) -> Kind:
        return "folder"

    @property
    def is_hard(self) -> bool:
        return False

    def stack(self, name: str, below: Workspace) -> None:
        """Return None: only disks can be stacked."""

    async def make(self, name: str, size: WorkspaceSize) -> FolderWorkspace:
        await self._store.make(name, _fill)
        return FolderWorkspace(name, size, self)

    def find(self, name: str, size: WorkspaceSize, layers: tuple[str, ...] = ()) -> FolderWorkspace | None:
        files = self._store.of(name) / FILES
        return FolderWorkspace(name, size, self) if files.is_dir() and not files.is_symlink() else None

    async def sweep(self, keep: Set[str]) -> int:
        return await self._store.sweep(keep)

    async def find_overfull(self) -> Mapping[str, int]:
        """Return the overfull workspaces that a container has used since this sandboxd started. The time of one check
        is limited; the workspaces that it could not count come first in the next check.

        Raises SandboxUnavailable when a workspace cannot be read and no workspace is overfull.
        """
        async with self._watching:
            watched = dict(self._watched)
            return await asyncio.to_thread(self._watch, watched)

    def open_for(self, workspace: FolderWorkspace) -> str:
        """Return the path that a container mounts. From now on `find_overfull` measures the workspace."""
        self._watched[workspace.name] = workspace
        return str(self._store.of(workspace.name))

    async def remove(self, workspace: FolderWorkspace) -> None:
        """Delete a workspace and stop measuring it. Raises SandboxUnavailable; then try again later."""
        await self._store.remove(workspace.name)
        self._watched.pop(workspace.name, None)

    def _watch(self, watched: Mapping[str, FolderWorkspace]) -> dict[str, int]:
        self._counted_at = {name: self._counted_at.get(name, 0.0) for name in watched}
        self._counts = {name: count for name, count in self._counts.items() if name in watched}
        overfull: dict[str, int] = {}
        failed: SandboxUnavailable | None = None
        waiting = deque(sorted(watched, key=self._counted_at.__getitem__))
        until = time.monotonic() + WATCH_S
        while waiting and (now := time.monotonic()) < until:
            name = waiting.popleft()
            count = self._counts.pop(name, None) or TreeCount(self._store.of(name) / FILES, watched[name].size)
            self._counted_at[name] = now
            try:
                is_complete = count.advance(min(until, now + _SLICE_S))
            except OSError as error:
                failed = refused(f"workspace {name} cannot be counted", error)
                continue
            if not is_complete:
                self._counts[name] = count
                waiting.append(name)
            elif count.is_over:
                overfull[name] = count.counted_bytes
        if failed is not None and not overfull:
            raise failed
        return overfull


def _fill(place: Path) -> None:
    make_folders(place)
