"""Figures over many traces: tools with their errors and times, tokens, cost, how runs ended."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from orchestrator.traces.reading import Trace, load_trace


@dataclass
class ToolStats:
    """One tool. `seconds`: of each call that was run."""

    count: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Plain data; times of no call are None."""
        return {
            "count": self.count,
            "errors": sum(self.errors.values()),
            "error_codes": dict(sorted(self.errors.items())),
            "p50_s": percentile(self.seconds, 0.5),
            "p95_s": percentile(self.seconds, 0.95),
        }


@dataclass
class TraceStats:
    """All of them. `unfinished`: traces without an end; `faulty`: traces of which something is missing."""

    runs: int = 0
    unfinished: int = 0
    faulty: int = 0
    steps: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost: float | None = None
    stop_reasons: Counter[str] = field(default_factory=Counter)
    tools: dict[str, ToolStats] = field(default_factory=dict)

    def add(self, trace: Trace) -> None:
        """Count one."""
        self.runs += 1
        self.steps += len(trace.steps)
        end = trace.end
        self.unfinished += end is None
        self.faulty += bool(trace.torn or trace.damaged or trace.later or trace.gaps)
        if end is not None:
            self.stop_reasons[trace.finished.stop_reason if trace.finished else "aborted"] += 1
        self.prompt_tokens += trace.usage.prompt_tokens
        self.completion_tokens += trace.usage.completion_tokens
        if trace.finished is not None and trace.finished.cost is not None:
            self.cost = (self.cost or 0.0) + trace.finished.cost
        for call in trace.calls:
            tool = self.tools.setdefault(call.tool, ToolStats())
            tool.count += 1
            if call.seconds is not None:
                tool.seconds.append(call.seconds)
            if call.result is not None and not call.result.success:
                tool.errors[call.result.error_code or "unknown"] += 1

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "runs": self.runs,
            "unfinished": self.unfinished,
            "faulty": self.faulty,
            "steps": self.steps,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "cost": self.cost,
            "stop_reasons": dict(self.stop_reasons.most_common()),
            "tools": {name: self.tools[name].to_json() for name in sorted(self.tools)},
        }


def gather_stats(paths: Iterable[Path]) -> TraceStats:
    """Read them one after another, without their large parts. Raises ConfigError for one that cannot be read."""
    stats = TraceStats()
    for path in paths:
        stats.add(load_trace(path, with_blobs=False))
    return stats


def percentile(values: Sequence[float], share: float) -> float | None:
    """The smallest value that so many are not above; None of none."""
    if not values:
        return None
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]
