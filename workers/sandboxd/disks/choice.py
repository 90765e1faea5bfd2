"""Selects the kind of workspace that this host supports."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from toolcrew.contract.errors import SandboxUnavailable
from toolcrew.workers.sandboxd.disks.base import UID, Workspaces, WorkspaceSize
from toolcrew.workers.sandboxd.disks.ext4 import clear_work, find_tool, make_image, open_work
from toolcrew.workers.sandboxd.disks.folder import FolderWorkspaces
from toolcrew.workers.sandboxd.disks.image import TEMPLATES, ImageWorkspaces
from toolcrew.workers.sandboxd.disks.tmpfs import TmpfsWorkspaces
from toolcrew.workers.sandboxd.disks.workspace_store import WorkspaceStore, refused

WantedKind = Literal["auto", "image", "tmpfs", "folder"]

LARGEST_TMPFS_BYTES: Final = 256 * 1024 * 1024
"""Maximum size of a workspace that is put into memory by default, in bytes."""
_PROBE_SIZE: Final = WorkspaceSize(1024 * 1024, 256)


@dataclass(frozen=True)
class Choice:
    """The chosen workspaces. `note`: the reason why they are weaker than the best kind; None for the best kind."""

    workspaces: Workspaces
    note: str | None = None


def choose_workspaces(requested: WantedKind, state: Path, workspace_bytes: int, host_free_bytes: int) -> Choice:
    """Choose the kind: images if this process may mount, otherwise tmpfs for small workspaces, otherwise a folder with
    a soft quota. A kind that the setting names is not replaced by another.

    Creates and mounts an image as a test, which blocks for some tens of milliseconds. Images and folders are below
    `state`/workspaces. Raises SandboxUnavailable when the requested kind is impossible; the text says what is missing.
    """
    folder = state / "workspaces"
    if requested == "tmpfs":
        return Choice(TmpfsWorkspaces(), "tmpfs was requested: files are lost with their container")
    if requested == "folder":
        _check_folder(folder, host_free_bytes)
        return Choice(FolderWorkspaces(folder, host_free_bytes), "a folder was requested: its size is only measured")
    missing = find_obstacle(folder, host_free_bytes)
    if missing is None:
        return Choice(ImageWorkspaces(folder, host_free_bytes))
    if requested == "image":
        raise SandboxUnavailable(f"this host cannot have workspaces of the kind image: {missing}")
    return choose_without_images(missing, state, workspace_bytes, host_free_bytes)


def choose_without_images(why: str, state: Path, workspace_bytes: int, host_free_bytes: int) -> Choice:
    """Return the next best kind for workspaces of that size. Raises SandboxUnavailable when there is none; the text
    says what is missing.
    """
    if workspace_bytes <= LARGEST_TMPFS_BYTES:
        return Choice(TmpfsWorkspaces(), f"no disk images for workspaces: {why}. Files are lost with their container")
    folder = state / "workspaces"
    _check_folder(folder, host_free_bytes)
    note = f"no disk images for workspaces: {why}. The size of a folder is only measured"
    return Choice(FolderWorkspaces(folder, host_free_bytes), note)


def find_obstacle(folder: Path, host_free_bytes: int) -> str | None:
    """Return why images cannot be made and mounted below `folder`, or None when a test succeeded."""
    if os.geteuid() != 0:
        return "sandboxd is not root, and only root may mount"
    if find_tool("mkfs.ext4") is None or find_tool("e2fsck") is None:
        return "mkfs.ext4 or e2fsck is missing: install e2fsprogs"
    if not Path("/dev/loop-control").exists():
        return "/dev/loop-control is missing: load the kernel's module `loop`, and make /dev visible to sandboxd"
    try:
        _try_image(folder, host_free_bytes)
    except SandboxUnavailable as error:
        return str(error)
    except OSError as error:
        return str(refused("an image could not be made and mounted", error))
    return None


def _try_image(folder: Path, host_free_bytes: int) -> None:
    WorkspaceStore(folder, host_free_bytes).prepare()
    for folder_with_work in (folder, folder / TEMPLATES):
        clear_work(folder_with_work)
    with open_work(folder) as work:
        make_image(work / "image", work / "mount", _PROBE_SIZE)


def _check_folder(folder: Path, host_free_bytes: int) -> None:
    if os.geteuid() not in (0, UID):
        raise SandboxUnavailable(
            f"sandboxd runs as user {os.geteuid()} and cannot delete files that sandboxes write as user {UID} "
            f"into a folder: run sandboxd as root or as {UID}, or use TOOLCREW_SANDBOX_WORKSPACE=tmpfs"
        )
    WorkspaceStore(folder, host_free_bytes).prepare()
