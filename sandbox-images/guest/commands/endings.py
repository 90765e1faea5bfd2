"""How a program of a call is brought to its end: asked by SIGTERM, and then killed with all that it has started."""

from __future__ import annotations

import os

from guest.process_tree import KillReport, find_below, read_processes

TERM_GRACE_S = 0.25
"""How long a program may take to end by itself at its limit; what it prints then is still its output."""
_SIGTERM = 15
_SIGCONT = 18


def ask_to_end(group: int, report: KillReport) -> None:
    """SIGTERM to a program's process group; who lives below us then counts as signalled, however it ends."""
    report.pids.update(process.pid for process in find_below((os.getpid(),), read_processes()) if process.alive)
    for number in (_SIGTERM, _SIGCONT):
        try:
            os.killpg(group, number)
        except (ProcessLookupError, PermissionError):
            return
