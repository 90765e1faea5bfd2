"""Processes as the kernel tells of them."""

from pathlib import Path


def read_proc(pid: int, name: str) -> bytes:
    """A file of /proc/<pid>; empty when the process is gone."""
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""
