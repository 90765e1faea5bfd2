"""Read process data from the kernel."""

from pathlib import Path


def read_proc(pid: int, name: str) -> bytes:
    """Return a file of /proc/<pid>, or empty bytes if the process has exited."""
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""
