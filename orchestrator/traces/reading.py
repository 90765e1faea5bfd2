"""Reads traces: the events of a file, and the steps of the run.

A writer may die at any byte, so the reader skips invalid lines and reports them in `Trace.faults`.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from toolcrew.contract.calls import Clocks
from toolcrew.contract.errors import ConfigError, ErrorCode
from toolcrew.contract.run_events import (
    ApprovalAsked,
    ApprovalDecided,
    CallFinished,
    CallSent,
    CallStarted,
    ModelAnswered,
    ModelAsked,
    RunAborted,
    RunEvent,
    RunFinished,
    RunStarted,
    SandboxClosed,
    SandboxReady,
    StepStarted,
    Warned,
    parse_event,
)
from toolcrew.orchestrator.dialects.model import TokenUsage
from toolcrew.orchestrator.traces.recorder import VERSION, trace_path
from toolcrew.orchestrator.traces.steps import RunCall, RunSteps, call_id_of

_HALF_PAIR = b"\\ud"
_ITEM_RUN = re.compile(r"[0-9a-f]{24}")
"""Pattern of the run ids of batch items. Other runs can have any id."""
_ATTEMPT = re.compile(r"[0-9a-f]{24}-([1-9][0-9]{0,7})")


@dataclass
class Trace:
    """Content of a trace file.

    `incomplete`: number of interrupted lines. `damaged`: number of lines that are not events. `later`: number of lines
    of a later release. `gaps`: number of missing lines.
    """

    path: Path
    tenant: str
    events: list[RunEvent]
    incomplete: int = 0
    damaged: int = 0
    later: int = 0
    gaps: int = 0

    def __post_init__(self) -> None:
        """Build the steps and the other values that are derived from the events."""
        starts = [at for at, event in enumerate(self.events) if isinstance(event, RunStarted)]
        self.attempts = max(1, len(starts))
        self.attempt = self.events[starts[-1] :] if starts else self.events
        """Events of the last attempt, which contains the whole run."""
        self.start = next((event for event in self.attempt if isinstance(event, RunStarted)), None)
        ends = [event for event in self.attempt if isinstance(event, RunFinished | RunAborted)]
        self.end = ends[-1] if ends else None
        self.finished = self.end if isinstance(self.end, RunFinished) else None
        self.error = self.end.reason if isinstance(self.end, RunAborted) else None
        self.session = next((event.session for event in self.attempt if isinstance(event, SandboxReady)), None)
        steps = RunSteps(self.attempt).steps.values()
        self.steps = [step for step in steps if step.request or step.reply or step.calls]
        calls = {call.call_id: call for call in self.calls}
        # A resumed run takes approvals and calls from its log without new events for them, so their events are in the
        # earlier part of the file.
        for event in self.events[: starts[-1]] if starts else ():
            if isinstance(event, ApprovalAsked | ApprovalDecided | CallSent) and call_id_of(event) in calls:
                calls[call_id_of(event)].add(event)
        requests = [event for event in self.attempt if isinstance(event, ModelAsked) and event.new_tools is not None]
        self.tools = requests[-1].new_tools or [] if requests else []
        # If no call was sent, the tools are functions of the program itself, which run without CallSent events.
        self._sends = any(isinstance(event, CallSent) for event in self.events)

    @property
    def run(self) -> str:
        """Return the id of the run."""
        return self.events[0].run if self.events else self.path.stem

    @property
    def calls(self) -> list[RunCall]:
        """Return the calls of all steps, in order."""
        return [call for step in self.steps for call in step.calls.values()]

    @property
    def usage(self) -> TokenUsage:
        """Return the tokens of the run. If the run did not finish, return the tokens of its replies."""
        if self.finished is not None:
            return self.finished.usage
        return sum((event.usage for event in self.attempt if isinstance(event, ModelAnswered)), TokenUsage())

    @property
    def clocks(self) -> Clocks:
        """Return the durations of the phases of the run's calls. If the run did not finish, return the sum over the
        calls.
        """
        if self.finished is not None:
            return self.finished.clocks
        return sum((call.result.clocks for call in self.calls if call.result), Clocks())

    @property
    def seconds(self) -> float:
        """Return the time from the first event of the attempt to its end, or to its last event, in seconds."""
        return max(0.0, (self.end or self.attempt[-1]).at - self.attempt[0].at)

    def in_order(self) -> Iterator[RunEvent]:
        """Yield the events of the last attempt for a reader: each reply before its calls, and each call with its
        approval and its result.
        """
        of_steps = ModelAsked | ModelAnswered | CallStarted | CallSent | ApprovalAsked | ApprovalDecided | CallFinished
        steps = {step.number: step for step in self.steps}
        for event in self.attempt:
            if not isinstance(event, of_steps):
                yield event
            if isinstance(event, StepStarted) and (step := steps.get(event.step)) is not None:
                found: list[RunEvent | None] = [step.request, step.reply]
                for call in step.calls.values():
                    found += [call.started, call.approval_request, call.approval_decision, call.finished]
                yield from (event for event in found if event is not None)

    def find_unrun_reason(self, call: RunCall) -> str:
        """Return why a call did not run; "" if the call ran."""
        if call.started is None and call.sent is None:
            is_malformed = call.result is not None and call.result.error_code == ErrorCode.INVALID_ARGUMENTS
            return "the request was malformed" if is_malformed else "the run ended before the call"
        if call.was_refused:
            return "the call was denied"
        return "the call was not sent" if self._sends and call.sent is None and not call.has_run else ""

    def notes(self) -> list[str]:
        """Return the warnings and the replacements of sandboxes, as sentences."""
        lines, sandbox = [], ""
        for event in self.attempt:
            match event:
                case Warned():
                    lines.append(f"warning: {event.message}")
                case SandboxReady():
                    sandbox = event.sandbox
                case SandboxClosed():
                    lines.append(f"sandbox {sandbox} is closed")
                case CallFinished() if (info := event.result.sandbox) is not None and info.id != sandbox:
                    lines += [f"sandbox {info.id} replaces {sandbox}"] if sandbox else []
                    sandbox = info.id
        return lines

    def faults(self) -> list[str]:
        """Return sentences about missing content; nothing for a run that ended normally."""
        counts = [
            (self.incomplete, "lines are incomplete, because the process that wrote them died, and are skipped"),
            (self.damaged, "lines are not lines of a trace and are skipped"),
            (self.later, "lines were written by a later release and are skipped: read them with that release"),
            (self.gaps, "lines are missing: they could not be written"),
        ]
        lines = [f"{count} {sentence}" for count, sentence in counts if count]
        if self.end is None:
            lines.append("the trace has no end: the run is still running, or its process died")
        return lines


def load_trace(path: Path) -> Trace:
    """Read a trace. Raises ConfigError: the file cannot be read, or has the format of an earlier release."""
    events: list[RunEvent] = []
    numbers: set[int] = set()
    tenant = ""
    incomplete = damaged = later = 0
    is_old = False
    try:
        for text, is_complete in _lines(path):
            line = _parse(text)
            if line is None or type(line.get("v")) is not int or line["v"] < VERSION:
                is_old |= line is not None and type(line.get("v")) is int
                incomplete, damaged = (
                    incomplete + (line is None and not is_complete),
                    damaged + (line is not None or is_complete),
                )
                continue
            try:
                event = _read_event(line) if line["v"] == VERSION else None
                numbers.add(int(line.get("seq", 0)))
            except (ValueError, TypeError, OverflowError, OSError, RecursionError):
                damaged += 1
                continue
            tenant = tenant or str(line.get("tenant", ""))
            if event is None:
                later += 1
            else:
                events.append(event)
    except OSError as error:
        raise ConfigError(
            f"the trace {path} cannot be read ({error.strerror}): use the path of a trace, or a run's id"
        ) from error
    if is_old and not events:
        raise ConfigError(
            f"the trace {path} has the format of an earlier release, and this release reads only version {VERSION}: "
            "read the trace with that release, or remove it"
        )
    gaps = max(numbers) + 1 - len(numbers) if numbers and not damaged else 0
    return Trace(path, tenant, events, incomplete, damaged, later, gaps)


def find_trace(folder: Path, name: str, tenant: str | None = None) -> Path:
    """Return the trace file of a run, by the run's id or by a path. Raises ConfigError: there is no trace, or several
    tenants have one.
    """
    if "/" in name or name.endswith((".jsonl", ".json")):
        if not Path(name).is_file():
            raise ConfigError(f"the file {name} does not exist: use the path of a trace, or a run's id")
        return Path(name)
    if tenant is not None:
        paths = [path for path in (trace_path(folder, tenant, name),) if path.is_file()]
    else:
        # This call only checks the name: an invalid name could match other files.
        trace_path(folder, "default", name)
        paths = sorted(folder.glob(f"*/{name}.jsonl"))
    if not paths:
        raise ConfigError(
            f"{folder} has no trace of the run {name}: use another id or the path of a file, or set TOOLCREW_TRACES"
        )
    if len(paths) > 1:
        raise ConfigError(
            f"{len(paths)} tenants have a run {name}: choose one with --tenant "
            f"({', '.join(path.parent.name for path in paths)})"
        )
    return paths[0]


def format_instant(at: float) -> str:
    """Return a time as ISO 8601, in UTC. Raises ValueError, OverflowError or OSError: the date does not exist."""
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def _lines(path: Path) -> Iterator[tuple[bytes, bool]]:
    """Yield each line of a file, and whether the line is complete.

    An incomplete line has no newline or no closing bracket: its writer may have died during the write.
    """
    with path.open("rb") as file:
        for line in file:
            if line.strip():
                yield line.strip(), line.endswith(b"\n") and line.rstrip().endswith(b"}")


def _parse(text: bytes) -> dict[str, Any] | None:
    """Return the JSON object of a line; None if the line is not a JSON object."""
    try:
        line = json.loads(text, parse_constant=str)
        if _HALF_PAIR in text.lower():
            # Another writer may have escaped lone surrogates, which UTF-8 cannot encode.
            line = json.loads(json.dumps(line, ensure_ascii=False).encode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return None
    return line if isinstance(line, dict) else None


def _read_event(line: dict[str, Any]) -> RunEvent | None:
    """Return the event of a line; None for a type that a later release added. Raises ValueError and others for an
    invalid line.
    """
    event = parse_event(line)
    if event is not None:
        format_instant(event.at)
    return event


def find_attempts(folder: Path, name: str, tenant: str | None = None) -> list[Path]:
    """Return the trace files of an item's run, one for each attempt (RUN, RUN-2, RUN-3 ...), the last attempt at the
    end.

    Any other name or path has one trace. Raises ConfigError as `find_trace` does.
    """
    paths = folder.glob(f"{tenant or '*'}/{name}-*.jsonl") if _ITEM_RUN.fullmatch(name) else ()
    numbers = sorted({int(match[1]) for path in paths if (match := _ATTEMPT.fullmatch(path.stem)) is not None})
    if not numbers:
        return [find_trace(folder, name, tenant)]
    last = find_trace(folder, f"{name}-{numbers[-1]}", tenant)
    earlier = [last.with_stem(stem) for stem in (name, *(f"{name}-{number}" for number in numbers[:-1]))]
    return [*(path for path in earlier if path.is_file()), last]
