"""Control groups of sandboxes, of version 1 and 2: freeze, kill and remove them.

Every sandbox is in the group `/toolcrew/<id>` of each hierarchy.
"""

import contextlib
import errno
import os
import signal
import time
from pathlib import Path
from typing import Final

ROOT: Final = Path("/sys/fs/cgroup")
PARENT: Final = "toolcrew"
HELPERS: Final = "helpers"
"""Group of processes of sandboxd that read the disks of sandboxes."""
HELPERS_BYTES: Final = 1024 * 1024 * 1024
_FIRST_PAUSE_S = 0.001
_LONGEST_PAUSE_S = 0.05


class Cgroups:
    """The control groups of this host's sandboxes. `root`: the mount point of the hierarchies."""

    def __init__(self, root: Path = ROOT) -> None:
        self.version = 2 if (root / "cgroup.controllers").exists() else 1
        self._hierarchies = [root] if self.version == 2 else sorted(path for path in root.iterdir() if path.is_dir())

    def exists(self, sandbox: str) -> bool:
        """Return whether the sandbox still has a group."""
        return any(folder.exists() for folder in self._folders(sandbox))

    def file(self, sandbox: str, controller: str, name: str) -> Path:
        """Return the path of a controller's file. Example arguments: "memory", "memory.limit_in_bytes"."""
        hierarchy = self._hierarchies[0] if self.version == 2 else self._hierarchies[0].parent / controller
        return hierarchy / PARENT / sandbox / name

    def freeze(self, sandbox: str, give_up_s: float) -> None:
        """Freeze all processes of a sandbox, and return when all are frozen. Raises OSError: FileNotFoundError without
        a group, TimeoutError after `give_up_s` seconds.
        """
        until = time.monotonic() + give_up_s
        self._freezer(sandbox).write_text("1" if self.version == 2 else "FROZEN", encoding="ascii")
        while not self._is_frozen(sandbox):
            if time.monotonic() > until:
                raise TimeoutError(f"the processes of sandbox {sandbox} do not freeze")
            time.sleep(_FIRST_PAUSE_S)

    def thaw(self, sandbox: str) -> None:
        """Thaw all processes of a sandbox. This is necessary before a kill: in version 1 a frozen process does not
        react to SIGKILL. Raises OSError.
        """
        self._freezer(sandbox).write_text("0" if self.version == 2 else "THAWED", encoding="ascii")

    def open_process(self, sandbox: str, process: int) -> int | None:
        """Return a descriptor of a process that is certainly in the sandbox; None when it has ended."""
        try:
            fd = os.pidfd_open(process)
        except ProcessLookupError:
            return None
        # Check the process again: the kernel may have reused the pid before it was opened.
        if process in self._processes(sandbox):
            return fd
        os.close(fd)
        return None

    def kill(self, sandbox: str, give_up_s: float) -> None:
        """Kill all processes of a thawed sandbox, and return when none exists. Raises TimeoutError after `give_up_s`
        seconds.
        """
        until, pause = time.monotonic() + give_up_s, _FIRST_PAUSE_S
        while processes := self._processes(sandbox):
            for process in processes:
                self._kill_process(sandbox, process)
            if time.monotonic() > until:
                raise TimeoutError(f"{len(processes)} processes of sandbox {sandbox} do not end")
            time.sleep(pause)
            pause = min(pause * 1.5, _LONGEST_PAUSE_S)

    def remove(self, sandbox: str, give_up_s: float) -> None:
        """Remove the empty groups of a sandbox. Waits up to `give_up_s` seconds for ended processes to leave them.
        Raises OSError.
        """
        until = time.monotonic() + give_up_s
        for folder in self._folders(sandbox):
            while True:
                try:
                    folder.rmdir()
                except FileNotFoundError:
                    break
                except OSError as error:
                    # A process that has just ended stays in its groups for a moment.
                    if error.errno != errno.EBUSY or time.monotonic() > until:
                        raise
                    time.sleep(_FIRST_PAUSE_S)

    def add_helper(self, process: int) -> None:
        """Move a process of sandboxd to the group of helpers, whose memory is limited and is not that of sandboxd's own
        group. Where the host does not allow this, the process stays in its group.
        """
        folder = self.file(HELPERS, "memory", "cgroup.procs").parent
        with contextlib.suppress(OSError):
            if self.version == 2:
                for above in (folder.parent.parent, folder.parent):
                    above.mkdir(exist_ok=True)
                    (above / "cgroup.subtree_control").write_text("+memory", encoding="ascii")
            folder.mkdir(parents=True, exist_ok=True)
            limit = "memory.max" if self.version == 2 else "memory.limit_in_bytes"
            (folder / limit).write_text(str(HELPERS_BYTES), encoding="ascii")
            (folder / "cgroup.procs").write_text(str(process), encoding="ascii")

    def remove_parent(self) -> None:
        """Remove the group of helpers and the parent group `/toolcrew`, unless a process or a sandbox is in them."""
        for folder in (*self._folders(HELPERS), *(hierarchy / PARENT for hierarchy in self._hierarchies)):
            with contextlib.suppress(OSError):
                folder.rmdir()

    def _freezer(self, sandbox: str) -> Path:
        return self.file(sandbox, "freezer", "cgroup.freeze" if self.version == 2 else "freezer.state")

    def _is_frozen(self, sandbox: str) -> bool:
        if self.version == 1:
            return self._freezer(sandbox).read_text(encoding="ascii").strip() == "FROZEN"
        return "frozen 1" in self.file(sandbox, "", "cgroup.events").read_text(encoding="ascii")

    def _folders(self, sandbox: str) -> list[Path]:
        return [hierarchy / PARENT / sandbox for hierarchy in self._hierarchies]

    def _processes(self, sandbox: str) -> set[int]:
        found: set[int] = set()
        for folder in self._folders(sandbox):
            with contextlib.suppress(FileNotFoundError, OSError):
                found.update(map(int, (folder / "cgroup.procs").read_text(encoding="ascii").split()))
        return found

    def _kill_process(self, sandbox: str, process: int) -> None:
        fd = self.open_process(sandbox, process)
        if fd is None:
            return
        try:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(fd, signal.SIGKILL)
        finally:
            os.close(fd)
