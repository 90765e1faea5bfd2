"""Runs the calls of a trace again, in order, and says what differs."""

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from contract.calls import ToolResult
from orchestrator.traces.masking import Masker
from orchestrator.traces.recorded_calls import RecordedCall, Told, exit_code_of, streams_of

MAX_DIFF_LINES = 200
"""Of one call; more is counted."""
MAX_COMPARED_LINES = 2000
"""Longer texts are not aligned, which takes the square of their length: from the first difference on, a few lines of
both are shown.
"""
MAX_LINE_CHARS = 400
"""A longer line of a difference is shown in part, with its length."""
IGNORED = "<ignored>"
BUT_FOR = "but for times, numbers of processes, names made by chance, or which of stdout and stderr came first"
OF_A_JOB = "it is of a job in the background, and what that has done by then depends on time"


class Calls(Protocol):
    """Where calls are run again: a session of a pool has this method, and so has a fake."""

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult: ...


@dataclass(frozen=True)
class Replayed:
    """One call. `state`: same, different, unfit (it cannot be run as it was), unrun (it was not run then either),
    outside (it acts outside of the sandbox, and was left alone). `why`: in one line; `diff`: of what a model reads of
    both results."""

    call: RecordedCall
    state: Literal["same", "different", "unfit", "unrun", "outside"]
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
        """Whether every call that was run in the sandbox then gave the same."""
        return all(one.state in ("same", "unrun", "outside") for one in self.calls)

    def counts(self) -> dict[str, int]:
        """State -> how many."""
        return {
            state: sum(one.state == state for one in self.calls)
            for state in ("same", "different", "unfit", "unrun", "outside")
        }

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {"is_same": self.is_same, **self.counts(), "calls": [one.to_json() for one in self.calls]}


@dataclass(frozen=True)
class Comparing:
    """How results are compared. `ignore`: what matches counts as the same on both sides. `is_exact`: so does nothing
    else; otherwise what differs each time does, too. `masker`: recorded texts are masked, so the new ones
    are before they are compared."""

    ignore: Sequence[re.Pattern[str]] = ()
    is_exact: bool = False
    masker: Masker | None = None

    def compare(self, call: RecordedCall, result: ToolResult) -> Replayed:
        """What differs between a recorded call and its new result; clocks are not compared."""
        then, now = call.told or Told(""), self._tell(result)
        whys = []
        if then.success is not None:
            for name in ("success", "error_code", "exit_code"):
                old, new = getattr(then, name), getattr(now, name)
                if old != new:
                    whys.append(f"{name} was {_shown(old)} and is {_shown(new)}")
        old_text, new_text = self._plain(then.text), self._plain(now.text)
        is_loose = not self.is_exact and self._without_ignored(then.text) != self._without_ignored(now.text)
        if is_loose and old_text != new_text and self._has_another_order(then, now):
            old_text = new_text
        if old_text != new_text:
            whys.append("the text differs")
        if not whys:
            return Replayed(call, "same", BUT_FOR if is_loose else "")
        if call.is_of_job:
            whys.append(OF_A_JOB)
        return Replayed(
            call, "different", "; ".join(whys), tuple(_diff(old_text, new_text)) if old_text != new_text else ()
        )

    def _tell(self, result: ToolResult) -> Told:
        text = result.text()
        return Told(
            self.masker.mask(text) if self.masker is not None else text,
            result.success,
            result.error_code.value if result.error_code else None,
            exit_code_of(result.metadata),
            self._mask_streams(streams_of(result.metadata)),
        )

    def _mask_streams(self, streams: tuple[str, str] | None) -> tuple[str, str] | None:
        if streams is None or self.masker is None:
            return streams
        return self.masker.mask(streams[0]), self.masker.mask(streams[1])

    def _has_another_order(self, then: Told, now: Told) -> bool:
        """Whether the lines are those they were, and stdout and stderr each in their order: which of both comes first
        is chance.
        """
        if then.streams is None or now.streams is None:
            return False
        is_same = all(self._plain(old) == self._plain(new) for old, new in zip(then.streams, now.streams, strict=True))
        return is_same and sorted(self._plain(then.text).split("\n")) == sorted(self._plain(now.text).split("\n"))

    def _plain(self, text: str) -> str:
        """What of a text counts."""
        text = self._without_ignored(text)
        return text if self.is_exact else without_volatile(text)

    def _without_ignored(self, text: str) -> str:
        for pattern in self.ignore:
            text = pattern.sub(IGNORED, text)
        return text


async def replay(
    calls: Sequence[RecordedCall],
    session: Calls,
    comparing: Comparing | None = None,
    *,
    pools: Mapping[str, str] | None = None,
    runs_outside: bool = False,
    on_call: Callable[[Replayed], None] = lambda _: None,
) -> ReplayReport:
    """Run the calls one after another and compare success, error code, exit code and text.

    `pools`: where each tool that there is runs (`ToolSpec.pool`), None for all in the sandbox; what runs elsewhere acts
    on the world for a second time, so that is left alone unless `runs_outside`.
    """
    comparing, report, names = comparing or Comparing(), ReplayReport(), dict[str, str]()
    for call in calls:
        one = _left_alone(call, pools, runs_outside=runs_outside)
        if one is None:
            result = await session.call(call.tool, _rename(call.arguments, names))
            names |= _pair_names(call.told.text if call.told is not None else "", result.text())
            one = comparing.compare(call, result)
        report.calls.append(one)
        on_call(one)
    return report


def _left_alone(call: RecordedCall, pools: Mapping[str, str] | None, *, runs_outside: bool) -> Replayed | None:
    """What is told of a call that is not run; None for one that is."""
    if call.unrun or call.unfit:
        return Replayed(call, "unrun" if call.unrun else "unfit", call.unrun or call.unfit)
    if pools is None:
        return None
    pool = pools.get(call.tool)
    if pool is None:
        return Replayed(call, "unfit", "no worker of this pool serves it: start one that does, or replay where one is")
    if pool != "sandbox" and not runs_outside:
        return Replayed(
            call,
            "outside",
            "it acts outside of the sandbox, where nothing is as it was then; --outside runs it all the same",
        )
    return None


def _shown(value: Any) -> str:
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _diff(old: str, new: str) -> list[str]:
    before, after = old.split("\n"), new.split("\n")
    if max(len(before), len(after)) > MAX_COMPARED_LINES:
        return _first_difference(before, after)
    before, after = _narrow(before, after)
    lines = [_shorten(line) for line in difflib.unified_diff(before, after, "recorded", "now", n=2, lineterm="")]
    if len(lines) > MAX_DIFF_LINES:
        return [*lines[:MAX_DIFF_LINES], f"... {len(lines) - MAX_DIFF_LINES} lines of the difference are not shown"]
    return lines


def _first_difference(before: list[str], after: list[str]) -> list[str]:
    at = next(
        (at for at, (old, new) in enumerate(zip(before, after, strict=False)) if old != new),
        min(len(before), len(after)),
    )
    old, new = _narrow(before[at : at + 5], after[at : at + 5])
    shown = [*(_shorten(f"-{line}") for line in old), *(_shorten(f"+{line}") for line in new)]
    return [
        (
            f"the first difference is in line {at + 1} (of {len(before)} recorded and {len(after)} now); what follows "
            "it is not compared"
        ),
        *shown,
    ]


def _narrow(before: list[str], after: list[str]) -> tuple[list[str], list[str]]:
    """Of long lines that face each other what stands around their first difference."""
    if len(before) != len(after):
        return before, after
    pairs = [
        _around(old, new) if old != new and max(len(old), len(new)) > MAX_LINE_CHARS else (old, new)
        for old, new in zip(before, after, strict=True)
    ]
    return [old for old, _ in pairs], [new for _, new in pairs]


def _around(old: str, new: str) -> tuple[str, str]:
    at = next(
        (at for at, (one, other) in enumerate(zip(old, new, strict=False)) if one != other), min(len(old), len(new))
    )
    start = max(0, at - MAX_LINE_CHARS // 4)
    return _part(old, start), _part(new, start)


def _part(line: str, start: int) -> str:
    end = start + MAX_LINE_CHARS // 2
    told = f"{'...' if start else ''}{line[start:end]}{'...' if end < len(line) else ''}"
    return told if told == line else f"{told} ({len(line)} characters)"


def _shorten(line: str) -> str:
    return line if len(line) <= MAX_LINE_CHARS else f"{line[: MAX_LINE_CHARS // 2]}... ({len(line) - 1} characters)"


# --- Volatile parts of a text -----------------------------------------------------------------------------------------

# What differs whenever the same call runs again, and says nothing: random names, durations, process ids.
_NAMES = re.compile(
    # A long output's file, as bash_tool names it; what mktemp and Python's tempfile make.
    r"/output/command-[0-9a-f]{8}\.txt|/tmp/tmp(?:\.[A-Za-z0-9]{10}|[a-z0-9_]{8})(?![A-Za-z0-9_])"
)
# Each begins where a number or a word does and reads a bounded number of characters: texts are hostile.
_PARTS = (
    # 0.003s, 1.5 seconds, 12 ms; what bash's time prints; how old a job is.
    (re.compile(r"(?<![\w.])\d{1,12}\.\d{1,12} ?(?:s|secs?|seconds)\b"), "<time>"),
    (re.compile(r"(?<![\w.])\d{1,12}(?:\.\d{1,12})? ?(?:ms|us|µs|ns)\b"), "<time>"),
    (re.compile(r"(?<![\w.])\d{1,9}m\d{1,2}\.\d{1,6}s\b"), "<time>"),
    (re.compile(r"(?<![\w.])\d{1,9} s ago\b"), "<time> ago"),
    # pid 12, PID: 12, process 12; a job that a shell put into the background; whom it saw killed.
    (re.compile(r"(?i)\b(?P<kept>(?:p?pid|process(?: id)?)(?: ?[=:#] ?| ))\d{1,9}\b"), r"\g<kept><process>"),
    (re.compile(r"(?m)^(?P<kept>\[\d{1,4}\][+-]? )\d{1,9}$"), r"\g<kept><process>"),
    (
        re.compile(
            r"(?P<kept>line \d{1,9}:) {1,8}\d{1,9}(?= (?:Killed|Terminated|Aborted|Hangup|Segmentation fault)\b)"
        ),
        r"\g<kept><process>",
    ),
    # When a file was changed, in a long listing.
    (
        re.compile(
            r"(?m)^(?P<kept>[bcdlps-][rwxsStT-]{9}[.+@]? {1,8}\d{1,9} \S{1,64} {1,64}\S{1,64}"
            r" {1,64}[\d,.]{1,20}[KMGT]? )[A-Z][a-z]{2} [ \d]\d {1,2}[\d:]{4,5}(?= )"
        ),
        r"\g<kept><changed>",
    ),
)


def without_volatile(text: str) -> str:
    """Return the text with a placeholder for each volatile part."""
    text = _NAMES.sub("<temporary>", text)
    for pattern, stand_in in _PARTS:
        text = pattern.sub(stand_in, text)
    return text


def _pair_names(old: str, new: str) -> dict[str, str]:
    """Return the random names of a recorded text with those in the same places of the new text; nothing if their
    numbers differ.
    """
    then, now = _NAMES.findall(old), _NAMES.findall(new)
    return dict(zip(then, now, strict=True)) if len(then) == len(now) else {}


def _rename(value: Any, names: Mapping[str, str]) -> Any:
    """Return arguments with the new names: a call may read a file that an earlier call has written."""
    match value:
        case str():
            return _NAMES.sub(lambda found: names.get(found[0], found[0]), value)
        case Mapping():
            return {key: _rename(inner, names) for key, inner in value.items()}
        case list():
            return [_rename(inner, names) for inner in value]
    return value
