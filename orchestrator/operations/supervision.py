"""Keep the processes of an embedded stack running. A process that ends by itself is started again, unless it ends too
often.
"""

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from toolcrew.contract.settings import child_environment

WINDOW_S = 60.0
MAX_ENDS = 5
"""Limit of ends of one process within WINDOW_S. At the limit the process is not started again, and the stack stops."""
PAUSES_S = (0.0, 0.5, 2.0, 5.0)
"""Pauses in seconds before a restart of a process that has ended once, twice and so on within WINDOW_S."""
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class ChildPlan:
    """How a process that must keep running is started and stopped.

    `orphan_signal`: the signal that the kernel sends when the supervisor is killed. `stop_signal`: the signal that
    ends the process, which may take `stop_within_s`. `may_finish`: exit code 0 is a normal end, after which the
    process is not started again.
    """

    role: str
    argv: tuple[str, ...]
    environment: Mapping[str, str]
    orphan_signal: int
    stop_signal: int = signal.SIGTERM
    stop_within_s: float = 15.0
    may_finish: bool = False


@dataclass(frozen=True)
class End:
    """End of a process. `code`: exit code, negative for a signal; `at`: monotonic seconds."""

    code: int
    at: float

    def __str__(self) -> str:
        if self.code >= 0:
            return f"exit code {self.code}"
        with contextlib.suppress(ValueError):
            return signal.Signals(-self.code).name
        return f"signal {-self.code}"


def choose_pause(ends: Sequence[float], now: float) -> float | None:
    """Return the pause before the next start of a process, in seconds; None if it has ended too often. `ends`:
    monotonic times of its ends; the last one is now.
    """
    recent = sum(1 for at in ends if now - at < WINDOW_S)
    if recent >= MAX_ENDS:
        return None
    return PAUSES_S[min(max(recent, 1), len(PAUSES_S)) - 1]


class ProcessSupervisor:
    """Starts processes, starts them again when they end by themselves, and stops them.

    Each process is the leader of a new POSIX session, and logs to `<role>.log` in `folder`. `report` gets a message
    about each end. `changed` is called when a role gets another process.
    """

    def __init__(self, folder: Path, *, report: Callable[[str], None], changed: Callable[[], None]) -> None:
        self._folder = folder
        self._report = report
        self._changed = changed
        self._plans: dict[str, ChildPlan] = {}
        self._children: dict[str, asyncio.subprocess.Process] = {}
        self._ends: defaultdict[str, list[End]] = defaultdict(list)

    async def start(self, plan: ChildPlan) -> None:
        """Start a process. No process with the same role may be running."""
        self._plans[plan.role] = plan
        with open(self._folder / f"{plan.role}.log", "ab") as logfile:  # noqa: ASYNC230  # once per process start
            self._children[plan.role] = await asyncio.create_subprocess_exec(
                *plan.argv,
                env=child_environment(plan.environment),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=logfile,
                stderr=logfile,
                start_new_session=True,
                preexec_fn=partial(die_with_supervisor, os.getpid(), plan.orphan_signal),
            )

    def pids(self) -> dict[str, list[int]]:
        """Return role -> process id of its current process; empty while there is none."""
        return {role: [child.pid] if child.returncode is None else [] for role, child in self._children.items()}

    def is_running(self, role: str) -> bool:
        child = self._children.get(role)
        return child is not None and child.returncode is None

    async def start_again(self, role: str) -> None:
        """Start the role's process again, unless it runs."""
        if not self.is_running(role):
            await self.start(self._plans[role])

    def has_ended(self, role: str) -> bool:
        """Return whether the process has ended by itself at least once."""
        return bool(self._ends[role])

    async def watch(self) -> str:
        """Start processes again that end by themselves. Return the role of a process that ended too often. Cancel this
        method before you call `stop`.
        """
        watches = {asyncio.create_task(self._watch(plan)) for plan in self._plans.values()}
        failed_roles: list[str] = []
        try:
            while watches and not failed_roles:
                done, watches = await asyncio.wait(watches, return_when=asyncio.FIRST_COMPLETED)
                failed_roles = [role for task in done if (role := task.result()) is not None]
            if not failed_roles:
                await asyncio.get_running_loop().create_future()
        finally:
            for task in watches:
                task.cancel()
            await asyncio.gather(*watches, return_exceptions=True)
        return failed_roles[0]

    async def stop(self, role: str) -> None:
        """Stop the process, with SIGKILL if necessary, and all processes of its session. Does nothing for a process
        that was never started.
        """
        child = self._children.get(role)
        if child is None:
            return
        plan = self._plans[role]
        if child.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                # A process that was stopped with SIGSTOP handles the signal only after SIGCONT.
                child.send_signal(signal.SIGCONT)
                child.send_signal(plan.stop_signal)
            try:
                async with asyncio.timeout(plan.stop_within_s):
                    await child.wait()
            except TimeoutError:
                sys.stderr.write(f"toolcrew: {role} did not stop in {plan.stop_within_s:g} s and is killed\n")
        await _clear(child)

    async def _watch(self, plan: ChildPlan) -> str | None:
        """Watch one process. Return its role when it has ended too often, None when it has finished."""
        while True:
            child = self._children[plan.role]
            end = End(await child.wait(), time.monotonic())
            await _clear(child)
            self._changed()
            if plan.may_finish and end.code == 0:
                self._report(f"{plan.role} has ended normally and is not started again")
                return None
            ends = self._ends[plan.role]
            ends.append(end)
            pause_s = choose_pause([past_end.at for past_end in ends], end.at)
            if pause_s is None:
                self._report(
                    f"{plan.role} has ended {MAX_ENDS} times within {WINDOW_S:g} s ({end}) and is not started again"
                )
                return plan.role
            self._report(
                f"{plan.role} ended unexpectedly ({end}) and is started again{f' in {pause_s:g} s' if pause_s else ''}"
            )
            await asyncio.sleep(pause_s)
            await self.start(plan)
            self._changed()


async def _clear(child: asyncio.subprocess.Process) -> None:
    # The process is the leader of its POSIX session, so this also kills the child processes that it has left.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    await child.wait()


def die_with_supervisor(supervisor: int, number: int) -> None:
    """Called in the child before exec: ask the kernel to send the child the signal `number` when the supervisor is
    killed.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != supervisor:
        # The supervisor died before the kernel had the request, so no signal will come.
        os._exit(1)
