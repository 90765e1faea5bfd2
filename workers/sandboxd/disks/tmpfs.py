"""Workspaces in the container's own memory. They need nothing from the host, and their files are lost with the
container.
"""

from collections.abc import AsyncIterator, Mapping, Set
from contextlib import asynccontextmanager
from dataclasses import dataclass

from workers.sandboxd.disks.base import Kind, WorkspaceMount, WorkspaceSize


@dataclass(frozen=True)
class TmpfsWorkspace:
    """Only a size. The engine mounts it with the container, and it counts as the container's memory."""

    name: str
    size: WorkspaceSize

    @property
    def kind(self) -> Kind:
        return "tmpfs"

    @property
    def outlives_container(self) -> bool:
        return False

    @asynccontextmanager
    async def mounted(self) -> AsyncIterator[WorkspaceMount]:
        yield WorkspaceMount()

    async def remove(self) -> None:
        """Do nothing: the files end with the container."""


class TmpfsWorkspaces:
    """The kernel enforces bytes and inodes."""

    @property
    def kind(self) -> Kind:
        return "tmpfs"

    @property
    def is_hard(self) -> bool:
        return True

    async def make(self, name: str, size: WorkspaceSize) -> TmpfsWorkspace:
        return TmpfsWorkspace(name, size)

    def find(self, name: str, size: WorkspaceSize) -> TmpfsWorkspace:
        """Return a workspace of that name. Its files come from an archive, or are lost."""
        return TmpfsWorkspace(name, size)

    async def sweep(self, keep: Set[str]) -> int:  # part of the protocol
        return 0

    async def find_overfull(self) -> Mapping[str, int]:
        return {}
