"""Workspaces in the container's own memory: made at once, everywhere, and gone with the container."""

from collections.abc import AsyncIterator, Mapping, Set
from contextlib import asynccontextmanager
from dataclasses import dataclass

from workers.sandboxd.disks.base import Kind, WorkspaceMount, WorkspaceSize


@dataclass(frozen=True)
class TmpfsWorkspace:
    """Only a size: the engine mounts it with the container, and the container's memory pays for it."""

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
        """Nothing is left of it when its container is gone."""


class TmpfsWorkspaces:
    """Hard limits of bytes and inodes by the kernel."""

    @property
    def kind(self) -> Kind:
        return "tmpfs"

    @property
    def is_hard(self) -> bool:
        return True

    async def make(self, name: str, size: WorkspaceSize) -> TmpfsWorkspace:
        return TmpfsWorkspace(name, size)

    def find(self, name: str, size: WorkspaceSize) -> TmpfsWorkspace:
        """There is nothing to find: what it held comes from an archive, or is gone."""
        return TmpfsWorkspace(name, size)

    async def sweep(self, keep: Set[str]) -> int:  # the protocol's
        return 0

    async def find_overfull(self) -> Mapping[str, int]:
        return {}
