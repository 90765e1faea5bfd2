"""Divides what a sandbox uses among its calls, and sums it for its session.

Invariant: every microsecond and byte of a reading counts once for the session and at most once for a call. Calls that
overlap share equally what is used while they run. What is used while no call runs counts for the session only.
"""

import secrets
import time
from dataclasses import dataclass, field
from operator import add, sub
from typing import Any

from contract.calls import CallUsage
from workers.sandboxd.runtime.usage import UsageReader, UsageReading


@dataclass(eq=False)
class UsageTotals:
    """Totals of a session in this process (contract/calls.py: SessionUsage)."""

    meter: str = field(default_factory=lambda: secrets.token_hex(6))
    amounts: list[int] = field(default_factory=lambda: [0] * 4)
    """CPU microseconds, bytes read, written, and over the network."""
    sandbox_s: float = 0.0

    def describe(self) -> dict[str, Any]:
        """Return the fields of a SessionUsage."""
        return {"meter": self.meter, **_fields(self.amounts), "sandbox_s": round(self.sandbox_s, 6)}


@dataclass(eq=False)
class CallMeter:
    """The usage of one request so far."""

    amounts: list[int] = field(default_factory=lambda: [0] * 4)


class SandboxMeter:
    """Measures one sandbox from its start to its removal. `network_bytes`: counted by its owner."""

    def __init__(self, reader: UsageReader | None) -> None:
        """`reader` None: this process does not see the control group, so only time and network are measured."""
        self.network_bytes = 0
        self._reader = reader
        self._last = [0] * 4
        self._calls: list[CallMeter] = []
        self._totals: UsageTotals | None = None
        self._counted_at = 0.0

    def bill(self, totals: UsageTotals) -> None:
        """Count for a session from now on. The start of the sandbox counts too, and its time in a pool does not."""
        self._totals, self._counted_at = totals, time.monotonic()

    def begin(self) -> CallMeter:
        """Begin to measure a request. Bytes of disks since the last request count for it."""
        self.update(has_disks=False)
        if not self._calls and self._reader is not None:
            self._reader.reset_peak()
        call = CallMeter()
        self._calls.append(call)
        return call

    def end(self, call: CallMeter) -> CallUsage | None:
        """Return what the request used; None without a reader."""
        self.update()
        self._calls.remove(call)
        if self._reader is None:
            return None
        return CallUsage(memory_peak_bytes=self._reader.read_peak(), **_fields(call.amounts))

    def update(self, *, has_disks: bool = True) -> None:
        """Read the counters, and count what was used since the last time."""
        if self._totals is None:
            return
        reading = self._reader.read(has_disks=has_disks) if self._reader is not None else UsageReading()
        amounts, now = [*reading, self.network_bytes], time.monotonic()
        used = list(map(sub, amounts, self._last))
        self._last = amounts
        self._totals.amounts = list(map(add, self._totals.amounts, used))
        self._totals.sandbox_s += now - self._counted_at
        self._counted_at = now
        for left, call in zip(range(len(self._calls), 0, -1), self._calls, strict=True):
            shares = [amount // left for amount in used]
            call.amounts = list(map(add, call.amounts, shares))
            used = list(map(sub, used, shares))

    def close(self) -> None:
        """Count for the last time."""
        self.update()
        self._totals = None
        if self._reader is not None:
            self._reader.close()


def _fields(amounts: list[int]) -> dict[str, Any]:
    cpu_us, read_bytes, written_bytes, network_bytes = amounts
    return {
        "cpu_s": cpu_us / 1e6,
        "read_bytes": read_bytes,
        "written_bytes": written_bytes,
        "network_bytes": network_bytes,
    }
