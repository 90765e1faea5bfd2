"""Workspaces in the container's own memory. They need no storage of the host, and their files are lost with the
container.
"""

from collections.abc import AsyncIterator, Mapping, Set
from contextlib import asynccontextmanager
from dataclasses import dataclass

from toolcrew.workers.sandboxd.disks.base import Kind, Workspace, WorkspaceMount, WorkspaceSize


@dataclass(frozen=True)
class TmpfsWorkspace:
    """A workspace of which sandboxd knows only the size. The engine mounts the tmpfs for the container, and the files
    count as the container's memory.
    """

    name: str
    size: WorkspaceSize

    @property
    def kind(self) -> Kind:
        return "tmpfs"

    @property
    def layers(self) -> tuple[str, ...]:
        return ()

    @property
    def outlives_container(self) -> bool:
        return False

    @asynccontextmanager
    async def mounted(self) -> AsyncIterator[WorkspaceMount]:
        yield WorkspaceMount()

    async def remove(self) -> None:
        """Do nothing: the files end with the container."""


class TmpfsWorkspaces:
    """Workspaces in memory. The kernel enforces bytes and inodes."""

    @property
    def kind(self) -> Kind:
        return "tmpfs"

    @property
    def is_hard(self) -> bool:
        return True

    def stack(self, name: str, below: Workspace) -> None:
        """Return None: only disks can be stacked."""

    async def make(self, name: str, size: WorkspaceSize) -> TmpfsWorkspace:
        return TmpfsWorkspace(name, size)

    def find(self, name: str, size: WorkspaceSize, layers: tuple[str, ...] = ()) -> TmpfsWorkspace:
        """Return a new workspace with that name. Its earlier files can only come from an archive."""
        return TmpfsWorkspace(name, size)

    async def sweep(self, keep: Set[str]) -> int:  # part of the interface
        return 0

    async def find_overfull(self) -> Mapping[str, int]:
        return {}
