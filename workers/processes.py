"""By what a process is known to others on its machine, so that its successor sees at once that it is gone."""

import os
from pathlib import Path


def describe_process(pid: int | None = None) -> str:
    """The machine's boot, the namespace that the number is of, the number, and when the process began."""
    pid = os.getpid() if pid is None else pid
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}/{pid}/{_began_at(pid)}"


def is_elsewhere(process: str) -> bool:
    """True for a described process of another machine, or of this one before its last start."""
    parts = process.split("/")
    return len(parts) == 4 and parts[0] != describe_process().split("/")[0]


def is_surely_gone(process: str) -> bool:
    """True for a described process of this machine and namespace that does not live any more. Of any other nothing is known: False."""
    parts = process.split("/")
    if len(parts) != 4 or not parts[2].isdigit():
        return False
    try:
        mine = describe_process().split("/")
        return parts[:2] == mine[:2] and _began_at(int(parts[2])) != parts[3]
    except OSError:
        return False


def _began_at(pid: int) -> str:
    """Clock ticks since the machine's boot; empty for a process that has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    # The state is the first field behind the name: Z is a process that nobody has reaped yet.
    return "" if fields[0] in "ZX" else fields[19]
