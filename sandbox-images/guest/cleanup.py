"""PID 1's part of a kill: what no supervisor stands over any more, and what outran its own."""

from __future__ import annotations

import os
import time

from guest.process_tree import KILL_WINDOW_S, KillReport, find_below, kill_processes, read_processes

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Set

    from guest.calls import Call

_SIGKILL = 9
_QUIET_SCANS = 2


def kill_everything() -> None:
    """SIGKILL to every process but PID 1, in one step of the kernel that no fork outruns."""
    if os.getpid() != 1:
        # Anywhere but in a pid namespace of its own this would end the machine's processes.
        raise RuntimeError("only PID 1 of a sandbox may kill everything")
    try:
        os.kill(-1, _SIGKILL)
    except ProcessLookupError:
        return


class Cleanup:
    """The orphans of calls whose process has ended; the calls' done events wait for it.

    One `step` is one scan and one round, so that PID 1 serves the other calls in between.
    """

    def __init__(self) -> None:
        self._held: list[tuple[Call | None, KillReport]] = []
        self._quiet = 0
        self._give_up_at = 0.0

    @property
    def is_active(self) -> bool:
        return bool(self._held)

    def hold(self, call: Call | None) -> None:
        """None: nobody waits for the end of it, as of what a background job has left."""
        self._held.append((call, KillReport()))
        self._give_up_at = time.monotonic() + KILL_WINDOW_S
        self._quiet = 0

    def step(self, supervisors: Set[int], others_run: bool) -> None:
        """One round against every process that is not below one of PID 1's living `supervisors`."""
        table = read_processes()
        me = os.getpid()
        roots = [process for process in table.values() if process.parent == me and process.pid not in supervisors]
        targets = roots + find_below([process.pid for process in roots], table)
        round_report = KillReport()
        alive = kill_processes(targets, round_report)
        method = "tree"
        if alive and not others_run:
            kill_everything()
            method = "all"
        self._quiet = 0 if alive else self._quiet + 1
        for _, report in self._held:
            report.pids |= round_report.pids
            report.survivors = alive
            report.method = "all" if "all" in (method, report.method) else "tree"

    def take_finished(self, no_child_left: bool) -> list[tuple[Call | None, KillReport]]:
        """The held calls, once nothing of theirs is left or the window is over."""
        if no_child_left:
            for _, report in self._held:
                report.survivors = 0
        if not (no_child_left or self._quiet >= _QUIET_SCANS or time.monotonic() >= self._give_up_at):
            return []
        finished, self._held = self._held, []
        return finished


def merge_kills(reported: object, report: KillReport) -> dict[str, object]:
    """A supervisor's kill report and what PID 1 added to it."""
    merged = report.as_field()
    if isinstance(reported, dict):
        merged["signalled"] = reported["signalled"] + len(report.pids)
        merged["ms"] = reported["ms"] + merged["ms"]
    return merged
