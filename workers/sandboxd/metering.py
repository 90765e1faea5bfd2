"""Measures the resources that the processes of a sandbox use, divides them among its calls, and adds them up for its
session.

Invariant: each microsecond and each byte counts once for the session and at most once for a call. Calls that run at the
same time share the usage of this time equally. Usage while no call runs counts for the session only.

CPU time and memory come from the control group. Disk bytes come from /proc/<pid>/io of each process (its account),
because control groups are wrong here: version 1 misses writes that the kernel delays, and version 2 counts writes to a
workspace on a loop device twice. When a process ends, the kernel adds its account to that of the parent, finally to
that of PID 1. A program that ignores SIGCHLD can hide the bytes of its children.
"""

import contextlib
import os
import secrets
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from operator import add, sub
from pathlib import Path
from typing import Any, NamedTuple

from toolcrew.contract.calls import CallUsage
from toolcrew.workers.sandboxd.cgroups import ROOT

_MAX_PROCESSES = 64
"""Maximum number of processes whose accounts are read at a time, because one event loop serves all sandboxes."""
_MAX_OPEN_ACCOUNTS = 8
"""Maximum number of processes whose accounts stay open between readings. A sandbox at rest has one process, and between
two calls two.
"""
_READ_BYTES = 4096


class UsageReading(NamedTuple):
    """The totals of a sandbox since its start."""

    cpu_us: int = 0
    read_bytes: int = 0
    written_bytes: int = 0


class UsageReader:
    """Reads the totals of a sandbox until `close`."""

    def __init__(self, container: str, process: int, proc: Path = Path("/proc"), root: Path = ROOT) -> None:
        """`process`: PID 1 of the sandbox. Raises OSError and LookupError: this process cannot see the sandbox or its
        control group.
        """
        self._proc = str(proc)
        paths = _parse_groups((proc / str(process) / "cgroup").read_text(encoding="ascii"))
        self._is_v2 = "cpuacct" not in paths
        if self._is_v2:
            group = root / paths[""].lstrip("/")
            cpu = group / "cpu.stat"
            memory = group / "memory.peak"
            tasks = group / "pids.current"
        else:
            group = root / "cpuacct" / paths["cpuacct"].lstrip("/")
            cpu = group / "cpuacct.usage"
            memory = root / "memory" / paths["memory"].lstrip("/") / _PEAK_OF_V1
            tasks = root / "pids" / paths["pids"].lstrip("/") / "pids.current"
        if container not in group.name:
            # If sandboxd has its own PID namespace, the pid from the engine belongs to another process here.
            raise LookupError(f"process {process} is not in a control group of sandbox {container[:12]}")
        self._processes = str(group / "cgroup.procs")
        self._files = contextlib.ExitStack()
        with contextlib.ExitStack() as failure:
            failure.callback(self._files.close)
            self._cpu = self._open(cpu, os.O_RDONLY)
            self._memory = self._open(memory, os.O_RDWR if os.access(memory, os.W_OK) else os.O_RDONLY)
            self._tasks = self._open(tasks, os.O_RDONLY)
            failure.pop_all()
        self._accounts = contextlib.ExitStack()
        self._files.callback(lambda: self._accounts.close())
        self._open_accounts: list[int] = []
        self._last_tasks = b""
        self._last = UsageReading()

    def read(self, *, has_disks: bool = True) -> UsageReading:
        """Return the totals, which never decrease. For an ended sandbox these are the last totals that were read.
        Reading the disk bytes takes most of the time. Without `has_disks`, return the disk bytes of the last reading.
        """
        last = self._last
        try:
            cpu = os.pread(self._cpu, _READ_BYTES, 0)
            read_bytes, written_bytes = self._read_disks() if has_disks else last[1:]
        except OSError:
            return last
        cpu_us = int(cpu.split()[1]) if self._is_v2 else int(cpu) // 1000
        self._last = UsageReading(
            max(cpu_us, last.cpu_us), max(read_bytes, last.read_bytes), max(written_bytes, last.written_bytes)
        )
        return self._last

    def reset_peak(self) -> None:
        """Start a new measurement of the peak of memory. Control groups of version 2 cannot do this before Linux 6.12:
        the peak is then the highest memory since the start.
        """
        with contextlib.suppress(OSError):
            os.pwrite(self._memory, b"0", 0)

    def read_peak(self) -> int:
        """Return the highest memory since the last reset, in bytes; 0 when the sandbox has ended."""
        try:
            return int(os.pread(self._memory, _READ_BYTES, 0))
        except OSError:
            return 0

    def close(self) -> None:
        self._files.close()
        self._cpu = self._memory = self._tasks = -1  # forget the descriptors, because their numbers may be reused soon

    def _read_disks(self) -> tuple[int, int]:
        # Read the list of processes only when it may have changed: the kernel builds it at a high cost, and in version
        # 1 an open list may be a second old. A process that has ended is noticed when its account is read. A new
        # process may be missed at first; its bytes are counted later, in its parent's account.
        tasks = os.pread(self._tasks, _READ_BYTES, 0)
        if tasks == self._last_tasks:
            with contextlib.suppress(OSError):
                return _sum_accounts([os.pread(account, _READ_BYTES, 0) for account in self._open_accounts])
        self._accounts.close()
        self._open_accounts, self._last_tasks = [], b""
        processes = _read(self._processes).split()[:_MAX_PROCESSES]
        texts = []
        for process in processes:
            # A process may end before its account is read. The kernel has then added its bytes to the parent's account.
            with contextlib.suppress(OSError):
                file = os.open(f"{self._proc}/{process.decode('ascii')}/io", os.O_RDONLY | os.O_CLOEXEC)
                self._accounts.callback(os.close, file)
                texts.append(os.pread(file, _READ_BYTES, 0))
                self._open_accounts.append(file)
        if len(processes) <= _MAX_OPEN_ACCOUNTS:
            self._last_tasks = tasks
        else:
            self._accounts.close()
        return _sum_accounts(texts)

    def _open(self, path: Path, flags: int) -> int:
        file = os.open(path, flags | os.O_CLOEXEC)
        self._files.callback(os.close, file)
        return file


_PEAK_OF_V1 = "memory.max_usage_in_bytes"


def _sum_accounts(texts: Iterable[bytes]) -> tuple[int, int]:
    """Return the sums of `read_bytes` and `write_bytes` in texts of /proc/<pid>/io."""
    rows = [text.split() for text in texts]
    return sum(int(row[9]) for row in rows), sum(int(row[11]) for row in rows)


def _read(path: str) -> bytes:
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(file, _READ_BYTES)
    finally:
        os.close(file)


def _parse_groups(text: str) -> Mapping[str, str]:
    """Return controller -> path of its control group (version 1); the key "" has the path in version 2."""
    rows = (line.split(":", 2) for line in text.splitlines())
    return {controller: path for _, controllers, path in rows for controller in controllers.split(",")}


@dataclass(eq=False)
class UsageTotals:
    """Totals of a session in this process (contract/calls.py: SessionUsage)."""

    meter: str = field(default_factory=lambda: secrets.token_hex(6))
    amounts: list[int] = field(default_factory=lambda: [0] * 5)
    """CPU microseconds, bytes read, written, over the network, and of streams."""
    sandbox_s: float = 0.0

    def describe(self) -> dict[str, Any]:
        """Return the fields of a SessionUsage."""
        # A worker of the release before streams refuses the field.
        streams = {"stream_bytes": self.amounts[4]} if self.amounts[4] else {}
        return {"meter": self.meter, **_fields(self.amounts), **streams, "sandbox_s": round(self.sandbox_s, 6)}


@dataclass(eq=False)
class RequestMeter:
    """The usage of one request so far."""

    amounts: list[int] = field(default_factory=lambda: [0] * 5)


class SandboxMeter:
    """Measures one sandbox from its start to its removal. `network_bytes`, `stream_bytes`: the caller counts them
    here.
    """

    def __init__(self, reader: UsageReader | None) -> None:
        """`reader` None: this process cannot see the control group, so only time and network are measured."""
        self.network_bytes = self.stream_bytes = 0
        self._reader = reader
        self._last = [0] * 5
        self._calls: list[RequestMeter] = []
        self._totals: UsageTotals | None = None
        self._counted_at = 0.0

    def bill(self, totals: UsageTotals) -> None:
        """Add the usage of the sandbox to `totals` from now on. Earlier usage since the start of the sandbox is added
        too, except its time in a pool.
        """
        self._totals, self._counted_at = totals, time.monotonic()

    def begin(self) -> RequestMeter:
        """Begin to measure a request. Disk bytes since the end of the last request count for this one."""
        self.update(has_disks=False)
        if not self._calls and self._reader is not None:
            self._reader.reset_peak()
        call = RequestMeter()
        self._calls.append(call)
        return call

    def end(self, call: RequestMeter) -> CallUsage | None:
        """Return the usage of the request; None without a reader."""
        self.update()
        self._calls.remove(call)
        if self._reader is None:
            return None
        return CallUsage(memory_peak_bytes=self._reader.read_peak(), **_fields(call.amounts))

    def update(self, *, has_disks: bool = True) -> None:
        """Read the counters, and count the usage since the last reading."""
        if self._totals is None:
            return
        reading = self._reader.read(has_disks=has_disks) if self._reader is not None else UsageReading()
        amounts, now = [*reading, self.network_bytes, self.stream_bytes], time.monotonic()
        used = list(map(sub, amounts, self._last))
        self._last = amounts
        self._totals.amounts = list(map(add, self._totals.amounts, used))
        self._totals.sandbox_s += now - self._counted_at
        self._counted_at = now
        for remaining, call in zip(range(len(self._calls), 0, -1), self._calls, strict=True):
            shares = [amount // remaining for amount in used]
            call.amounts = list(map(add, call.amounts, shares))
            used = list(map(sub, used, shares))

    def close(self) -> None:
        """Count the usage for the last time, and close the reader."""
        self.update()
        self._totals = None
        if self._reader is not None:
            self._reader.close()


def _fields(amounts: list[int]) -> dict[str, Any]:
    cpu_us, read_bytes, written_bytes, network_bytes, _ = amounts
    return {
        "cpu_s": cpu_us / 1e6,
        "read_bytes": read_bytes,
        "written_bytes": written_bytes,
        "network_bytes": network_bytes,
    }
