"""Records which functions of the project run in this process while a switch is on (scripts/call_path.py).

The standard library alone: it is `sitecustomize` of the processes of a stack, and the guest imports it under any Python
from 3.9 on.
"""

from __future__ import annotations

import mmap
import os
import sys
import threading
from types import FrameType

FOLDER = "CALL_PATH_FOLDER"
"""The variable that names the folder of the recording. There: `root`, the project's folder; `switch`, one byte, the
number of the window that is recorded, 0 for none; `seen`, a line for each window, process and function: with the
function's first line and its file."""


def install(role: str) -> None:
    """Record from now on, in this thread, in those it starts and in processes it forks."""
    folder = os.environ[FOLDER]
    with open(os.path.join(folder, "root"), encoding="utf-8") as root_file:
        root = root_file.read()
    with open(os.path.join(folder, "switch"), "rb") as switch_file:
        # Shared memory: each process sees the switch at once, also one that was forked and has closed its files.
        switch = mmap.mmap(switch_file.fileno(), 1, prot=mmap.PROT_READ)
    seen = set()

    def record(frame: FrameType, event: str, argument: object) -> None:
        window = switch[0]
        code = frame.f_code
        if not window or (window, code) in seen:
            return
        seen.add((window, code))
        path = code.co_filename
        if path.startswith(root):
            # Opened for each line: the guest's supervisor closes every file that it did not open.
            fd = os.open(os.path.join(folder, "seen"), os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
            os.write(fd, f"{window} {role} {code.co_firstlineno} {path[len(root) :]}\n".encode())
            os.close(fd)

    threading.setprofile(record)
    sys.setprofile(record)


def _find_role() -> str | None:
    """Return the role of a child process of the stack, or None for a process that serves no call of a sandbox."""
    command = getattr(sys, "orig_argv", [])
    if "workers.sandboxd" in command:
        return "sandboxd"
    if "workers" in command and os.environ.get("TOOLCREW_WORKER_KIND") == "sandbox":
        return "worker"
    return None


if __name__ == "sitecustomize":
    role = _find_role()
    if role is not None:
        install(role)
