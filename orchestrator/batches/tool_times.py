"""Calls by tool: how many, how many failed, how long they took and waited."""

from dataclasses import dataclass, field

from contract.calls import MAX_NAME_CHARS
from orchestrator.batches.histogram import LogHistogram
from orchestrator.batches.snapshot import Spread, ToolTimes
from store.batches import CallDone

MAX_TOOLS = 200
"""A model can ask for tools that do not exist, by any name."""
OTHER_TOOLS = "(other tools)"


@dataclass
class ToolRow:
    calls: int = 0
    errors: int = 0
    seconds: LogHistogram = field(default_factory=LogHistogram)
    queued: LogHistogram = field(default_factory=LogHistogram)


class ToolTable:
    """A row a tool; names beyond MAX_TOOLS share one."""

    def __init__(self) -> None:
        self.rows: dict[str, ToolRow] = {}

    def add(self, call: CallDone) -> None:
        """One more call."""
        name = call.tool[:MAX_NAME_CHARS]
        if name not in self.rows and len(self.rows) >= MAX_TOOLS:
            name = OTHER_TOOLS
        row = self.rows.setdefault(name, ToolRow())
        row.calls += 1
        row.errors += call.error_code is not None
        row.seconds.add(call.seconds)
        row.queued.add(call.clocks.queued_s)

    def times(self) -> tuple[ToolTimes, ...]:
        """The most used first."""
        ordered = sorted(self.rows.items(), key=lambda pair: (-pair[1].calls, pair[0]))
        return tuple(
            ToolTimes(
                tool=name,
                calls=row.calls,
                errors=row.errors,
                seconds=Spread.of(row.seconds),
                queued=Spread.of(row.queued),
            )
            for name, row in ordered
        )
