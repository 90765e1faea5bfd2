"""Runs the calls of a trace again, in order, and says what differs."""

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from contract.calls import ToolResult
from orchestrator.traces.masking import Masker
from orchestrator.traces.recorded_calls import RecordedCall, Told, exit_code_of

MAX_DIFF_LINES = 200
"""Of one call; more is counted."""
MAX_COMPARED_LINES = 2000
"""Longer texts are not aligned, which takes the square of their length: from the first difference on, a few lines of both are shown."""
IGNORED = "<ignored>"


class Calls(Protocol):
    """Where calls are run again: a session of a pool has this method, and so has a fake."""

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult: ...


@dataclass(frozen=True)
class Replayed:
    """One call. `state`: same, different, unfit (it cannot be run as it was), unrun (it was not run then either). `why`: in one line; `diff`: of what
    a model reads of both results."""

    call: RecordedCall
    state: Literal["same", "different", "unfit", "unrun"]
    why: str = ""
    diff: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        told = {"call_id": self.call.call_id, "tool": self.call.tool, "arguments": self.call.arguments}
        return {**told, "state": self.state, "why": self.why, "diff": list(self.diff)}


@dataclass
class ReplayReport:
    """All of them."""

    calls: list[Replayed] = field(default_factory=list)

    @property
    def is_same(self) -> bool:
        """Whether every call that was run then gave the same."""
        return all(one.state in ("same", "unrun") for one in self.calls)

    def counts(self) -> dict[str, int]:
        """State -> how many."""
        return {state: sum(one.state == state for one in self.calls) for state in ("same", "different", "unfit", "unrun")}

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {"is_same": self.is_same, **self.counts(), "calls": [one.to_json() for one in self.calls]}


async def replay(
    calls: Sequence[RecordedCall],
    session: Calls,
    *,
    ignore: Sequence[re.Pattern[str]] = (),
    masker: Masker | None = None,
    on_call: Callable[[Replayed], None] = lambda _: None,
) -> ReplayReport:
    """Run the calls one after another and compare success, error code, exit code and text; clocks are not compared.

    `ignore`: what matches counts as the same on both sides. `masker`: the recorded texts are masked, so the new ones are, too, before they are compared.
    """
    report = ReplayReport()
    for call in calls:
        if call.unrun or call.unfit:
            one = Replayed(call, "unrun" if call.unrun else "unfit", call.unrun or call.unfit)
        else:
            result = await session.call(call.tool, call.arguments)
            one = compare(call, result, ignore, masker)
        report.calls.append(one)
        on_call(one)
    return report


def compare(call: RecordedCall, result: ToolResult, ignore: Sequence[re.Pattern[str]] = (), masker: Masker | None = None) -> Replayed:
    """What differs between a recorded call and its new result."""
    then = call.told or Told("")
    text = result.text()
    now = Told(
        masker.mask(text) if masker is not None else text,
        result.success,
        result.error_code.value if result.error_code else None,
        exit_code_of(result.metadata),
    )
    whys = []
    if then.success is not None:
        for name in ("success", "error_code", "exit_code"):
            old, new = getattr(then, name), getattr(now, name)
            if old != new:
                whys.append(f"{name} was {_shown(old)} and is {_shown(new)}")
    old_text, new_text = (_without(side.text, ignore) for side in (then, now))
    if old_text != new_text:
        whys.append("the text differs")
    diff = tuple(_diff(old_text, new_text)) if old_text != new_text else ()
    return Replayed(call, "different" if whys else "same", "; ".join(whys), diff)


def _without(text: str, ignore: Sequence[re.Pattern[str]]) -> str:
    for pattern in ignore:
        text = pattern.sub(IGNORED, text)
    return text


def _shown(value: Any) -> str:
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _diff(old: str, new: str) -> list[str]:
    before, after = old.split("\n"), new.split("\n")
    if max(len(before), len(after)) > MAX_COMPARED_LINES:
        return _first_difference(before, after)
    lines = [line.rstrip("\n") for line in difflib.unified_diff(before, after, "recorded", "now", n=2, lineterm="")]
    if len(lines) > MAX_DIFF_LINES:
        return [*lines[:MAX_DIFF_LINES], f"... {len(lines) - MAX_DIFF_LINES} lines of the difference are not shown"]
    return lines


def _first_difference(before: list[str], after: list[str]) -> list[str]:
    at = next((at for at, (old, new) in enumerate(zip(before, after, strict=False)) if old != new), min(len(before), len(after)))
    shown = [*(f"-{line}" for line in before[at : at + 5]), *(f"+{line}" for line in after[at : at + 5])]
    return [
        f"the first difference is in line {at + 1} (of {len(before)} recorded and {len(after)} now); what follows it is not compared",
        *shown,
    ]
