"""The interface of a workspace: storage of limited size that one container at a time can use. A frozen workspace is
never written again; other workspaces may be stacked on it.
"""

import os
from collections.abc import Mapping, Set
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, Protocol

Kind = Literal["image", "tmpfs", "folder"]
UID: Final = 1000
"""Uid of all sandboxes and owner of the files of a workspace."""
HOME: Final = "/home/sandbox"
"""Home of the user of a sandbox. It is not /workspace: programs would write their caches into the user's repository."""
FILES: Final = "files"
"""Folder of a session's disk with the folders that a sandbox mounts."""
FOLDERS: Final[Mapping[str, str]] = {"workspace": "/workspace", "tmp": "/tmp", "home": HOME}
"""Folders below FILES, each with its path in a sandbox. Root of a sandbox mounts the workspace only: its /tmp and its
home are folders of its root file system, on the same disk.
"""


def find_folders(*, is_root: bool) -> dict[str, str]:
    """Return the part of FOLDERS that a sandbox mounts."""
    return {name: place for name, place in FOLDERS.items() if name == "workspace" or not is_root}


def make_folders(top: Path) -> None:
    """Make FILES and its folders on an empty disk. Only root can give them to the user of sandboxes. Raises OSError."""
    (top / FILES).mkdir(mode=0o755)
    for name, mode in (("workspace", 0o755), ("tmp", 0o1777), ("home", 0o700)):
        folder = top / FILES / name
        folder.mkdir()
        folder.chmod(mode)
        if os.geteuid() == 0 and name != "tmp":
            os.chown(folder, UID, UID)


@dataclass(frozen=True)
class WorkspaceSize:
    """Maximum bytes and files (inodes) of a workspace."""

    bytes: int
    inodes: int


@dataclass(frozen=True)
class WorkspaceMount:
    """How a container gets its FOLDERS. `bind` is the path on the host of the folder that contains FILES; None means a
    tmpfs for each in the container. `layers`: descriptors of read-only mounts of the disks below the one at `bind`, the
    top one first. They are closed at the end of `mounted`.
    """

    bind: str | None = None
    layers: tuple[int, ...] = ()


class Workspace(Protocol):
    """The files of one session, for at most one container at a time."""

    @property
    def kind(self) -> Kind: ...

    @property
    def name(self) -> str:
        """Return the name, which is unique on this host. Records use the name to find the workspace again."""
        ...

    @property
    def size(self) -> WorkspaceSize: ...

    @property
    def layers(self) -> tuple[str, ...]:
        """Return the names of the frozen workspaces below this one, the top one first. Usually there are none."""
        ...

    @property
    def outlives_container(self) -> bool:
        """Return whether the files still exist after the container was removed."""
        ...

    def mounted(self) -> AbstractAsyncContextManager[WorkspaceMount]:
        """Mount the workspace for a new container. Enter the block before the container is created and leave it when
        the container runs. Afterwards only the container has the mount.

        Waits until an earlier container has released the workspace. Raises SandboxUnavailable, with advice.
        """
        ...

    async def remove(self) -> None:
        """Delete the files. Call this after the container was removed; a second call is allowed. Raises
        SandboxUnavailable: try again later.
        """
        ...


class Workspaces(Protocol):
    """Creates workspaces of one kind on this host."""

    @property
    def kind(self) -> Kind: ...

    @property
    def is_hard(self) -> bool:
        """Return whether the kernel enforces the size. False: the size is only measured at intervals (a soft quota)."""
        ...

    def stack(self, name: str, below: Workspace) -> Workspace | None:
        """Return a new workspace that begins with the files of `below`, which must not be mounted again. Any number of
        workspaces may be stacked on it. None: this kind cannot be stacked.

        Raises ToolFailure (NO_SPACE) when the frozen workspaces hold too much, and SandboxUnavailable.
        """
        ...

    async def make(self, name: str, size: WorkspaceSize) -> Workspace:
        """Create an empty workspace. Raises SandboxUnavailable when the host has no space or no permission; the text
        says what to do.
        """
        ...

    def find(self, name: str, size: WorkspaceSize, layers: tuple[str, ...] = ()) -> Workspace | None:
        """Return the workspace of that name from an earlier sandboxd, or None when its files do not exist."""
        ...

    async def sweep(self, keep: Set[str]) -> int:
        """Delete every workspace whose name is not in `keep`. Return the number of deleted workspaces."""
        ...

    async def find_overfull(self) -> Mapping[str, int]:
        """Return the names of workspaces that exceed their size, with the bytes they hold (at least 1). Always empty
        when `is_hard`.

        A file counts as at least its share of the size, so too many empty files count as bytes too. Raises
        SandboxUnavailable.
        """
        ...
