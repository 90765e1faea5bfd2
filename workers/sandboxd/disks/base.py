"""What sandboxd asks of a workspace: room of a bounded size that is handed to one container at a time."""

from collections.abc import Mapping, Set
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Final, Literal, Protocol

Kind = Literal["image", "tmpfs", "folder"]
UID: Final = 1000
"""The user of all sandboxes, who owns the files of a workspace."""


@dataclass(frozen=True)
class WorkspaceSize:
    """Most bytes and files (inodes) a workspace may hold."""

    bytes: int
    inodes: int


@dataclass(frozen=True)
class WorkspaceMount:
    """How /workspace comes into a container: `bind` is a path of the host, None a tmpfs of the workspace's size inside
    the container.
    """

    bind: str | None = None


class Workspace(Protocol):
    """One session's files. At most one container has it at a time."""

    @property
    def kind(self) -> Kind: ...

    @property
    def name(self) -> str:
        """Unique on this host; what a record keeps to find it again."""
        ...

    @property
    def size(self) -> WorkspaceSize: ...

    @property
    def outlives_container(self) -> bool:
        """Whether its files are still there when the container is gone."""
        ...

    def mounted(self) -> AbstractAsyncContextManager[WorkspaceMount]:
        """Held from before the container is created until it runs; afterwards the container alone has the mount.

        Waits until a container before has let go of it. Raises SandboxUnavailable with what to do.
        """
        ...

    async def remove(self) -> None:
        """Delete the files, after the container is gone. Removing again is fine. Raises SandboxUnavailable; then try
        again later.
        """
        ...


class Workspaces(Protocol):
    """Makes workspaces of one kind on this host."""

    @property
    def kind(self) -> Kind: ...

    @property
    def is_hard(self) -> bool:
        """Whether the kernel enforces the size; False: it is only watched (a soft quota)."""
        ...

    async def make(self, name: str, size: WorkspaceSize) -> Workspace:
        """An empty workspace. Raises SandboxUnavailable: no space on the host, no right, with what to do."""
        ...

    def find(self, name: str, size: WorkspaceSize) -> Workspace | None:
        """The workspace of that name that an earlier sandboxd left here; None when its files are gone."""
        ...

    async def sweep(self, keep: Set[str]) -> int:
        """Delete what no name in `keep` owns; gives how many."""
        ...

    async def find_overfull(self) -> Mapping[str, int]:
        """Names of workspaces that hold more than their size, and how many bytes they hold, at least 1; always empty
        when `is_hard`.

        A file counts as at least its share of the size, so too many empty ones are bytes too. Raises
        SandboxUnavailable.
        """
        ...
