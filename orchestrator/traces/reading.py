"""Traces read back: all records of a file, and the run that they tell, step by step."""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from contract.errors import ConfigError, ErrorCode
from orchestrator.traces import records
from orchestrator.traces.blobs import BlobFolder, resolve
from orchestrator.traces.recorder import trace_path
from orchestrator.traces.records import TraceRecord, is_later, parse_record

_HALF_PAIR = b"\\ud"


@dataclass
class TraceCall:
    """One call of a step. `called` None: its request was malformed, so it has only a result; `result` None: it had none
    when the trace ended.
    """

    call_id: str
    called: records.ToolCalled | None = None
    asked: records.ApprovalRequested | None = None
    decided: records.ApprovalDecision | None = None
    started: records.ToolStart | None = None
    result: records.ToolResulted | None = None

    @property
    def tool(self) -> str:
        """Its name, as the model wrote it."""
        return self.called.tool if self.called else self.result.tool if self.result else "unknown"

    @property
    def arguments(self) -> dict[str, Any]:
        """Those it was run with; of one that was not run, those it was asked for with."""
        if self.started is not None and self.started.arguments is not None:
            return self.started.arguments
        return self.called.arguments if self.called else {}

    @property
    def has_run(self) -> bool:
        """Whether its result shows that it ran, though the line that says so may be lost."""
        return self.result is not None and (
            self.result.sandbox is not None or any(self.result.clocks.model_dump().values())
        )

    @property
    def was_refused(self) -> bool:
        """Whether a policy or a person refused it."""
        return self.result is not None and bool(self.result.metadata.get("was_refused"))


@dataclass
class TraceStep:
    """One request with its reply and calls. `messages`: all that was sent. `response` None: there was no reply to
    it.
    """

    number: int
    request: records.LlmRequest | None = None
    messages: list[dict[str, Any]] = field(default_factory=list)
    response: records.LlmResponse | None = None
    calls: list[TraceCall] = field(default_factory=list)

    def call(self, call_id: str) -> TraceCall:
        """The call of that id, new when there is none."""
        for call in self.calls:
            if call.call_id == call_id:
                return call
        self.calls.append(TraceCall(call_id))
        return self.calls[-1]


@dataclass
class Trace:
    """A file as it was read. `torn`: lines that broke off, and were dropped; `damaged`: lines that are none of ours;
    `later`: lines of a version or type that this release does not know; `gaps`: numbers of lines that are not there;
    `missing_blobs`: hashes."""

    path: Path
    records: list[TraceRecord]
    torn: int = 0
    damaged: int = 0
    later: int = 0
    gaps: int = 0
    missing_blobs: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        starts = [at for at, record in enumerate(self.records) if isinstance(record, records.RunStart)]
        self.attempts = max(1, len(starts))
        self.attempt = self.records[starts[-1] :] if starts else self.records
        """The records of the last attempt, which tells the whole run."""
        self.start = next((record for record in self.attempt if isinstance(record, records.RunStart)), None)
        self.end = next((record for record in reversed(self.attempt) if isinstance(record, records.RunEnd)), None)
        self.steps = _steps(self.attempt)
        if starts:
            _adopt(self.steps, self.records[: starts[-1]])
        self.tools = _tools(self.attempt)
        # Calls of functions of the program itself are not sent anywhere.
        self._sends = any(isinstance(record, records.ToolStart) for record in self.records)

    @property
    def run(self) -> str:
        """The run's id."""
        return self.records[0].run if self.records else self.path.stem

    @property
    def calls(self) -> list[TraceCall]:
        """Those of all steps, in order."""
        return [call for step in self.steps for call in step.calls]

    def why_unrun(self, call: TraceCall) -> str:
        """Why a call was never run, "" for one that was."""
        if call.called is None:
            is_malformed = call.result is not None and call.result.error_code == ErrorCode.INVALID_ARGUMENTS
            return "its request was malformed" if is_malformed else "the run ended before it"
        if call.was_refused:
            return "it was refused"
        return "it was not sent" if self._sends and call.started is None and not call.has_run else ""

    def faults(self) -> list[str]:
        """What is not whole, in sentences; none of a trace of a run that ended in order."""
        told = [
            (self.torn, "lines broke off when whoever wrote them died, and are left out"),
            (self.damaged, "lines are no lines of a trace, and are left out"),
            (self.later, "lines are of a later release, and are passed over: read them with that release"),
            (self.gaps, "lines are missing: they could not be written"),
            (
                len(self.missing_blobs),
                "large parts are missing or damaged in the folder blobs beside the trace: copy it along with the trace",
            ),
        ]
        lines = [f"{count} {sentence}" for count, sentence in told if count]
        if self.end is None:
            lines.append("the trace has no end: the run still goes on, or whoever ran it died")
        elif self.end.lost_blobs:
            lines.append(f"{self.end.lost_blobs} large parts could not be written")
        return lines


def load_trace(path: Path, *, with_blobs: bool = True) -> Trace:
    """Read a trace. `with_blobs` off: large parts are left out, and a note stands for each. Raises ConfigError when the
    file cannot be read.
    """
    blobs = BlobFolder(path.parent / "blobs") if with_blobs else None
    found: list[TraceRecord] = []
    missing: list[str] = []
    torn = damaged = later = 0
    try:
        for text, is_whole in _lines(path):
            line = _parse(text)
            if line is None:
                torn, damaged = torn + (not is_whole), damaged + is_whole
            elif is_later(line):
                later += 1
            elif (record := _record(line, blobs, missing)) is None:
                damaged += 1
            else:
                found.append(record)
    except OSError as error:
        raise ConfigError(
            f"the trace {path} cannot be read ({error.strerror}): give the path of one, or a run's id"
        ) from error
    return Trace(path, found, torn, damaged, later, _gaps(found) if not (later or damaged) else 0, sorted(set(missing)))


def find_trace(folder: Path, name: str, tenant: str | None = None) -> Path:
    """The trace of a run, by its id or by its path. Raises ConfigError when there is none, or when several tenants have
    one.
    """
    if "/" in name or name.endswith((".jsonl", ".json")):
        if not Path(name).is_file():
            raise ConfigError(f"there is no file {name}: give the path of a trace, or a run's id")
        return Path(name)
    if tenant is not None:
        found = [path for path in (trace_path(folder, tenant, name),) if path.is_file()]
    else:
        trace_path(folder, "default", name)
        found = sorted(folder.glob(f"*/{name}.jsonl"))
    if not found:
        raise ConfigError(
            f"there is no trace of the run {name} in {folder}: give another id or the path of a file, or set "
            "TOOLCREW_TRACES"
        )
    if len(found) > 1:
        raise ConfigError(
            f"{len(found)} tenants have a run {name}: say whose with --tenant "
            f"({', '.join(path.parent.name for path in found)})"
        )
    return found[0]


def list_traces(folder: Path, tenant: str | None = None) -> list[Path]:
    """All traces in the folder, or a tenant's, in the order of their names."""
    if tenant is not None:
        return sorted(trace_path(folder, tenant, "any").parent.glob("*.jsonl"))
    return sorted(folder.glob("*/*.jsonl"))


def seconds_of(ts: str) -> float:
    """Unix seconds of a line's `ts`. Raises ValueError."""
    return datetime.fromisoformat(ts).timestamp()


def _lines(path: Path) -> Iterator[tuple[bytes, bool]]:
    """Lines, and whether each can be expected to be whole: not the last one without an end, nor one behind which
    somebody began anew.
    """
    with path.open("rb") as file:
        for line in file:
            if line.strip():
                yield line.strip(), line.endswith(b"\n") and line.rstrip().endswith(b"}")


def _parse(text: bytes) -> dict[str, Any] | None:
    try:
        line = json.loads(text, parse_constant=str)
        if _HALF_PAIR in text.lower():
            # Half surrogate pairs, which a foreign writer may have escaped, fit into no text.
            line = json.loads(json.dumps(line, ensure_ascii=False).encode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return None
    return line if isinstance(line, dict) else None


def _record(line: dict[str, Any], blobs: BlobFolder | None, missing: list[str]) -> TraceRecord | None:
    try:
        record = parse_record(resolve(line, blobs, missing))
        seconds_of(record.ts)
    except (ValidationError, ValueError, RecursionError):
        return None
    return record


def _gaps(found: Sequence[TraceRecord]) -> int:
    numbers = {record.seq for record in found}
    return max(numbers) + 1 - len(numbers) if numbers else 0


def _tools(attempt: Sequence[TraceRecord]) -> list[dict[str, Any]]:
    """The tool definitions of the last request that carried any."""
    known: dict[str, list[dict[str, Any]]] = {}
    last: str | None = None
    for record in attempt:
        if isinstance(record, records.LlmRequest) and record.tools is not None:
            last = record.tools
            if record.tool_definitions is not None:
                known[last] = record.tool_definitions
    return known.get(last, []) if last is not None else []


def _steps(attempt: Sequence[TraceRecord]) -> list[TraceStep]:
    """Requests that were sent again belong to one step: its messages are those of the last."""
    steps: list[TraceStep] = []
    sent: list[dict[str, Any]] = []

    def step_of(number: int) -> TraceStep:
        if not steps or steps[-1].number != number:
            steps.append(TraceStep(number))
        return steps[-1]

    places: dict[str, TraceStep] = {}
    for record in attempt:
        match record:
            case records.LlmRequest():
                sent = [*sent[: record.kept], *record.messages]
                step = step_of(record.step)
                step.request, step.messages = record, sent
            case records.LlmResponse():
                step_of(record.step).response = record
            case records.ToolCalled():
                places[record.call_id] = step_of(record.step)
                places[record.call_id].call(record.call_id).called = record
            case records.ToolResulted():
                step = places.get(record.call_id) or step_of(record.step)
                step.call(record.call_id).result = record
            case records.ApprovalRequested() | records.ApprovalDecision() | records.ToolStart() if (
                record.call_id in places
            ):
                _note(places[record.call_id].call(record.call_id), record)
    return steps


def _adopt(steps: Sequence[TraceStep], before: Sequence[TraceRecord]) -> None:
    """What was asked and sent in earlier attempts: a run that is taken up again is answered out of its log, and does
    neither twice.
    """
    calls = {call.call_id: call for step in steps for call in step.calls}
    for record in before:
        if (
            isinstance(record, records.ApprovalRequested | records.ApprovalDecision | records.ToolStart)
            and record.call_id in calls
        ):
            call = calls[record.call_id]
            # What this attempt says itself stands.
            match record:
                case records.ApprovalRequested():
                    call.asked = call.asked or record
                case records.ApprovalDecision():
                    call.decided = call.decided or record
                case records.ToolStart():
                    call.started = call.started or record


def _note(call: TraceCall, record: records.ApprovalRequested | records.ApprovalDecision | records.ToolStart) -> None:
    match record:
        case records.ApprovalRequested():
            call.asked = record
        case records.ApprovalDecision():
            call.decided = record
        case records.ToolStart():
            call.started = record


# --- Attempts of an item ----------------------------------------------------------------------------------------------

# Each attempt of a batch item that was started again has its own trace: RUN, RUN-2, RUN-3 ...

_ITEM_RUN = re.compile(r"[0-9a-f]{24}")
"""The run of an item; other runs may be called anything."""


@dataclass(frozen=True)
class Attempts:
    """`path`: the trace that is meant by a name; `earlier`: those of attempts before it, in their order."""

    path: Path
    earlier: tuple[Path, ...] = ()

    def note(self) -> str | None:
        """That there are others, as a sentence."""
        if not self.earlier:
            return None
        told = ", ".join(str(path) for path in self.earlier)
        return f"this is the last of {len(self.earlier) + 1} attempts; give the path of another to see that: {told}"


def find_attempts(folder: Path, name: str, tenant: str | None = None) -> Attempts:
    """The last attempt of the run of an item, by its id; any other trace by its id or path. Raises ConfigError as
    `find_trace` does.
    """
    if not _ITEM_RUN.fullmatch(name):
        return Attempts(find_trace(folder, name, tenant))
    numbered = {
        number: path for path in folder.glob(f"{tenant or '*'}/{name}-*.jsonl") if (number := _number(path, name))
    }
    if not numbered:
        return Attempts(find_trace(folder, name, tenant))
    last = find_trace(folder, f"{name}-{max(numbered)}", tenant)
    beside = [
        last.with_name(f"{name}.jsonl"),
        *(last.with_name(f"{name}-{number}.jsonl") for number in sorted(numbered)),
    ]
    return Attempts(last, tuple(path for path in beside if path != last and path.is_file()))


def _number(path: Path, name: str) -> int:
    """Which attempt a file is of; 0 for none."""
    told = path.stem.removeprefix(f"{name}-")
    return int(told) if told.isascii() and told.isdigit() and not told.startswith("0") and len(told) < 9 else 0
