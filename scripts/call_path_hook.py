"""Records which functions of the project run in this process while a switch is on (scripts/call_path.py).

The module uses the standard library alone. The processes of a stack import it as `sitecustomize`, and the guest
imports it under any Python from 3.9 on.
"""

from __future__ import annotations

import mmap
import os
import sys
import threading
from types import FrameType

FOLDER = "CALL_PATH_FOLDER"
"""Environment variable with the folder of the recording.

The folder has three files. `root` contains the project's folder. `switch` is one byte: the number of the recorded
window, or 0 for none. `seen` has a line for each window, process and function, with the function's first line and its
file.
"""


def install(role: str) -> None:
    """Start recording in this thread, in the threads that it starts, and in the processes that it forks."""
    folder = os.environ[FOLDER]
    with open(os.path.join(folder, "root"), encoding="utf-8") as root_file:
        root = root_file.read()
    with open(os.path.join(folder, "switch"), "rb") as switch_file:
        # The switch is in shared memory: each process sees a change at once, even a forked process that has closed
        # its files.
        switch = mmap.mmap(switch_file.fileno(), 1, prot=mmap.PROT_READ)
    lines = set()

    def record(frame: FrameType, _event: str, _argument: object) -> None:
        window = switch[0]
        code = frame.f_code
        if not window or (window, code) in lines:
            return
        lines.add((window, code))
        path = code.co_filename
        if path.startswith(root):
            # Open the file for each line: the guest's supervisor closes every file that it did not open.
            fd = os.open(os.path.join(folder, "seen"), os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
            os.write(fd, f"{window} {role} {code.co_firstlineno} {path[len(root) :]}\n".encode())
            os.close(fd)

    threading.setprofile(record)
    sys.setprofile(record)


def _find_role() -> str | None:
    """Return the role of a child process of the stack, or None for a process that serves no call of a sandbox."""
    command = getattr(sys, "orig_argv", [])
    if "toolcrew.workers.sandboxd" in command:
        return "sandboxd"
    if "toolcrew.workers" in command and os.environ.get("TOOLCREW_WORKER_KIND") == "sandbox":
        return "worker"
    return None


if __name__ == "sitecustomize":
    role = _find_role()
    if role is not None:
        install(role)
