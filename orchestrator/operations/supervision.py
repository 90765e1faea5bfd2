"""Keeps the processes of an embedded stack running: one that ends by itself is started again, until that is seen not to
help.
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

from orchestrator.settings import child_environment

WINDOW_S = 60.0
MOST_ENDS = 5
"""Of one process within WINDOW_S: then it is not started again, and the stack goes down."""
PAUSES_S = (0.0, 0.5, 2.0, 5.0)
"""Before a process is started again that has ended once, twice ... within WINDOW_S."""
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class ChildPlan:
    """A process to be kept running.

    `orphan_signal`: what the kernel sends it when the keeper is killed outright. `stop_signal`: how the keeper ends it,
    which may take `stop_within_s`. `may_finish`: an exit code of 0 is an end in order, after which it is not started
    again.
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
    """How a process ended: `code` as of subprocess, negative for a signal; `at`: monotonic seconds."""

    code: int
    at: float

    def __str__(self) -> str:
        if self.code >= 0:
            return f"exit code {self.code}"
        with contextlib.suppress(ValueError):
            return signal.Signals(-self.code).name
        return f"signal {-self.code}"


def choose_pause(ends: Sequence[float], now: float) -> float | None:
    """Seconds to wait before a process is started again that ended at these monotonic instants, the last of them now;
    None: it has ended too often.
    """
    recent = sum(1 for at in ends if now - at < WINDOW_S)
    if recent >= MOST_ENDS:
        return None
    return PAUSES_S[min(max(recent, 1), len(PAUSES_S)) - 1]


class Supervisor:
    """Starts processes, starts those again that end by themselves, and ends them.

    Each is the leader of a session of its own and logs to `<role>.log` in `folder`. `tell` gets a sentence about each
    end; `changed` is called when a role has another process.
    """

    def __init__(self, folder: Path, *, tell: Callable[[str], None], changed: Callable[[], None]) -> None:
        self._folder = folder
        self._tell = tell
        self._changed = changed
        self._plans: dict[str, ChildPlan] = {}
        self._children: dict[str, asyncio.subprocess.Process] = {}
        self._ends: defaultdict[str, list[End]] = defaultdict(list)

    async def start(self, plan: ChildPlan) -> None:
        """Start a process for its role."""
        self._plans[plan.role] = plan
        with open(self._folder / f"{plan.role}.log", "ab") as logfile:  # noqa: ASYNC230  # once a process, and rarely
            self._children[plan.role] = await asyncio.create_subprocess_exec(
                *plan.argv,
                env=child_environment(plan.environment),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=logfile,
                stderr=logfile,
                start_new_session=True,
                preexec_fn=partial(die_with_keeper, os.getpid(), plan.orphan_signal),
            )

    def pids(self) -> dict[str, list[int]]:
        """Role -> the process that has it now; empty while there is none."""
        return {role: [child.pid] if child.returncode is None else [] for role, child in self._children.items()}

    def is_running(self, role: str) -> bool:
        child = self._children.get(role)
        return child is not None and child.returncode is None

    async def start_again(self, role: str) -> None:
        """Start it unless it runs."""
        if not self.is_running(role):
            await self.start(self._plans[role])

    def has_ended(self, role: str) -> bool:
        """Whether it has ended by itself at least once."""
        return bool(self._ends[role])

    async def watch(self) -> str:
        """Start again what ends by itself. Returns the role of the process that ended too often; cancel it before
        `stop`.
        """
        watches = {asyncio.create_task(self._watch(plan)) for plan in self._plans.values()}
        given_up: list[str] = []
        try:
            while watches and not given_up:
                done, watches = await asyncio.wait(watches, return_when=asyncio.FIRST_COMPLETED)
                given_up = [role for task in done if (role := task.result()) is not None]
            if not given_up:
                await asyncio.get_running_loop().create_future()
        finally:
            for task in watches:
                task.cancel()
            await asyncio.gather(*watches, return_exceptions=True)
        return given_up[0]

    async def stop(self, role: str) -> None:
        """End it, by force if need be, with whatever it has left of its session. One that was never started needs no
        end.
        """
        child = self._children.get(role)
        if child is None:
            return
        plan = self._plans[role]
        if child.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                # One that somebody has stopped would never hear it.
                child.send_signal(signal.SIGCONT)
                child.send_signal(plan.stop_signal)
            try:
                async with asyncio.timeout(plan.stop_within_s):
                    await child.wait()
            except TimeoutError:
                sys.stderr.write(f"toolcrew: {role} did not stop in {plan.stop_within_s:g} s and is killed\n")
        await _clear(child)

    async def _watch(self, plan: ChildPlan) -> str | None:
        """The role when it has ended too often; None when it has finished."""
        while True:
            child = self._children[plan.role]
            end = End(await child.wait(), time.monotonic())
            await _clear(child)
            self._changed()
            if plan.may_finish and end.code == 0:
                self._tell(f"{plan.role} has ended in order and is not started again")
                return None
            ends = self._ends[plan.role]
            ends.append(end)
            pause_s = choose_pause([one.at for one in ends], end.at)
            if pause_s is None:
                self._tell(
                    f"{plan.role} has ended {MOST_ENDS} times within {WINDOW_S:g} s ({end}) and is not started again"
                )
                return plan.role
            self._tell(
                f"{plan.role} has ended by itself ({end}) and is started again{f' in {pause_s:g} s' if pause_s else ''}"
            )
            await asyncio.sleep(pause_s)
            await self.start(plan)
            self._changed()


async def _clear(child: asyncio.subprocess.Process) -> None:
    # Its own session: what a killed parent left of its pool goes, too.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    await child.wait()


def die_with_keeper(keeper: int, number: int) -> None:
    """In the child, before it becomes its program: a keeper that is killed outright takes its children with it."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != keeper:
        # It died before the wish was made, and no signal will come.
        os._exit(1)
