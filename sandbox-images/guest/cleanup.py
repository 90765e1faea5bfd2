"""The kill of processes that remain after their supervisor has exited. Only PID 1 performs it."""

from __future__ import annotations

import os
import time

from guest.processes import (
    KILL_WINDOW_S,
    QUIET_SCANS,
    KillReport,
    Process,
    find_below,
    find_entered,
    kill_everything,
    kill_processes,
    read_processes,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Set

    from guest.calls import Call


def _kill_orphans(spared: Set[int], table: dict[int, Process], report: KillReport) -> int:
    """Send SIGKILL once to the children of PID 1 that are not spared, and to all of their descendants.

    Return the number of targets that were alive.
    """
    own_pid = os.getpid()
    roots = [process for process in table.values() if process.parent == own_pid and process.pid not in spared]
    return kill_processes(roots + find_below([process.pid for process in roots], table), report)


class Cleanup:
    """The kill of processes that remain after their supervisor has exited. The done events of their calls are held
    until the kill has finished.

    Each `step` is short (one scan and one round of signals), so that PID 1 can serve other calls between two steps.
    """

    def __init__(self) -> None:
        # The calls that wait for the kill of orphans, each with its report.
        self.held: list[tuple[Call | None, KillReport]] = []
        self._quiet = 0
        self._give_up_at = 0.0

    def hold(self, call: Call | None) -> None:
        """Hold the done event of a call until the orphans are killed.

        `call` is None when no call waits for the kill, for example after a background job.
        """
        self.held.append((call, KillReport()))
        self._give_up_at = time.monotonic() + KILL_WINDOW_S
        self._quiet = 0

    def step(self, spared: Set[int], others_run: bool) -> None:
        """Run one round against every process below PID 1 that is not below one of its children `spared`."""
        round_report = KillReport()
        try:
            table = read_processes()
            alive = _kill_orphans(spared, table, round_report)
            others_run = others_run or bool(find_entered(table))
        except OSError:
            # A failed scan proves nothing, so at least one process counts as alive.
            alive = 1
        method = "tree"
        # Processes that fork in a loop can escape single kills. When no other call runs, one kill of all processes ends
        # the loop. Supervisors that serve no call are killed too, which loses nothing.
        if alive and not others_run:
            kill_everything()
            method = "all"
        self._quiet = 0 if alive else self._quiet + 1
        for _, report in self.held:
            # It is unknown to which call an orphan belonged, so every held call reports the round.
            report.pids |= round_report.pids
            report.survivors = alive
            report.method = "all" if "all" in (method, report.method) else "tree"

    def take_finished(self, no_child_left: bool) -> list[tuple[Call | None, KillReport]]:
        """When no orphan is left or KILL_WINDOW_S has passed, remove and return the held calls with their reports.

        Otherwise return an empty list.
        """
        if no_child_left:
            for _, report in self.held:
                report.survivors = 0
        if not (no_child_left or self._quiet >= QUIET_SCANS or time.monotonic() >= self._give_up_at):
            return []
        finished, self.held = self.held, []
        return finished


def merge_kills(reported: object, report: KillReport) -> dict[str, object]:
    """Return one kill report from the supervisor's report and that of PID 1, which killed the rest."""
    merged = report.as_field()
    if isinstance(reported, dict):
        merged["signalled"] = reported["signalled"] + len(report.pids)
        merged["ms"] = reported["ms"] + merged["ms"]
    return merged
