"""Writes the trace of one run from its events: masked, with large parts by their hash. Whatever befalls it, the run
goes on.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from contract.calls import ToolResult
from contract.errors import ConfigError
from contract.traceparent import call_span_id, derive_id, run_span_id, trace_id_of
from orchestrator.dialects.model import Message, Usage
from orchestrator.loop import events
from orchestrator.traces import records
from orchestrator.traces.blobs import LITERAL, MAX_INLINE_BYTES, REFERENCE, BlobFolder, Kind, build_reference
from orchestrator.traces.masking import Masker
from orchestrator.traces.writer import TraceWriter, read_last_lines
from telemetry.logs import get_logger

log = get_logger(__name__)

MAX_DEPTH = 200
"""What nests deeper is left out, and a note stands for it."""
_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False)
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


def trace_path(folder: Path, tenant: str, run: str) -> Path:
    """Where a run's trace lies. Raises ConfigError for names that are none."""
    for kind, name in (("tenant", tenant), ("run", run)):
        if not _NAME.fullmatch(name):
            raise ConfigError(f"'{name[:80]}' is no name of a {kind}: give one of at most 64 letters, digits, _ and -")
    return folder / tenant / f"{run}.jsonl"


@contextmanager
def open_trace(
    folder: Path,
    tenant: str,
    run: str,
    *,
    masker: Masker,
    session: str | None = None,
    on_warning: Callable[[str], None] = lambda _: None,
    has_pieces: bool = False,
) -> "Iterator[TraceRecorder]":
    """The recorder of a run, whose `on_event` is what the run tells its events to; all is written when it is left.

    A trace that is there is continued. `on_warning` gets one sentence when something cannot be written. `has_pieces`:
    lines for each piece of text and output, too, with their sizes alone. Raises ConfigError for names that are none,
    and nothing else.
    """
    path = trace_path(folder, tenant, run)
    recorder = TraceRecorder(path, tenant, run, masker, session=session, on_warning=on_warning, has_pieces=has_pieces)
    try:
        yield recorder
    finally:
        recorder.close()


class TraceRecorder:
    """One run's events as lines. Events of other runs are passed over. `warnings`: what could not be written, in
    sentences.
    """

    def __init__(
        self,
        path: Path,
        tenant: str,
        run: str,
        masker: Masker,
        *,
        session: str | None = None,
        on_warning: Callable[[str], None] = lambda _: None,
        has_pieces: bool = False,
    ) -> None:
        self.path = path
        self.warnings: list[str] = []
        self._on_warning = on_warning
        self._masker = masker
        self._blobs = BlobFolder(path.parent / "blobs")
        self._writer = TraceWriter(path, self._warn)
        self._has_pieces = has_pieces
        self._who = {"tenant": tenant, "run": run}
        self._session = session
        self._trace_id = trace_id_of(tenant, run)
        self._root = run_span_id(tenant, run)
        self._seq, self._is_continued = _continue(path)
        self._lost_lines = self._lost_blobs = 0
        self._has_begun = False
        # What comes before the run's start is written behind it: a start is what a reader looks for.
        self._early: list[dict[str, Any]] = []
        self._step = 0
        self._asked: list[Message] = []
        self._told_tools: set[str] = set()
        self._tools: list[dict[str, Any]] = []
        self._tools_hash = ""
        self._request_span = self._root
        self._called_at: dict[str, float] = {}
        self._arguments: dict[str, dict[str, Any]] = {}
        self._sandbox = ""
        self._spent = Usage()

    @property
    def lost_lines(self) -> int:
        """Events that are not in the file."""
        return self._lost_lines + self._writer.lost

    def on_event(self, event: events.RunEvent) -> None:
        """Take one event. Never raises."""
        if event.run != self._who["run"]:
            return
        try:
            self._take(event)
        except Exception:  # the edge: a trace must never end the run that it tells of
            self._lost_lines += 1
            log.exception("trace_line_lost", run=self._who["run"], kind=type(event).__name__)

    __call__ = on_event

    def close(self) -> None:
        """Write what is gathered. Nothing is recorded by that: a run whose trace has no `run.end` broke off."""
        for line in self._early:
            self._write(line)
        self._early.clear()
        self._writer.flush()

    def _take(self, event: events.RunEvent) -> None:
        match event:
            case events.StepStarted():
                self._step = event.step
            case events.CallStarted():
                self._called_at[event.call.id] = event.at
                self._arguments[event.call.id] = event.call.arguments
                told = {
                    "call_id": event.call.id,
                    "tool": event.call.name,
                    "arguments": event.call.arguments,
                    "step": self._step,
                }
                self._tell("tool.call", event, call_span_id(event.call.id), **told)
            case events.CallSent():
                is_same = event.call.arguments == self._arguments.pop(event.call.id, None)
                told = {"tool": event.call.name, "arguments": None if is_same else event.call.arguments}
                self._tell_of_call("tool.start", event, event.call.id, **told)
            case events.CallFinished():
                self._tell_result(event)
            case events.ModelAsked() | events.ModelAnswered():
                self._tell_of_model(event)
            case events.ApprovalAsked():
                told = {
                    "tool": event.call.name,
                    "digest": event.digest,
                    "reason": event.reason,
                    "warning": event.warning,
                }
                self._tell_of_call("approval.request", event, event.call.id, **told, expires_at=event.expires_at)
            case events.ApprovalDecided():
                told = {
                    "digest": event.digest,
                    "is_allowed": event.is_allowed,
                    "reason": event.reason,
                    "is_changed": event.is_changed,
                }
                self._tell_of_call("approval.decision", event, event.call_id, **told)
            case events.TextArrived() if self._has_pieces:
                self._tell("llm.delta", event, self._request_span, step=self._step, chars=len(event.text))
            case events.OutputArrived() if self._has_pieces:
                self._tell_of_call("tool.output", event, event.call_id, stream=event.stream, chars=len(event.text))
            case _:
                self._tell_of_run(event)

    def _tell_of_run(self, event: events.RunEvent) -> None:
        match event:
            case events.RunStarted():
                self._begin(event)
            case events.Warned():
                self._tell("warning", event, self._root, message=event.message)
            case events.SandboxReady():
                self._session, self._sandbox = event.session, event.sandbox
                told = {
                    name: getattr(event, name)
                    for name in ("sandbox", "generation", "host", "image", "network", "start_s")
                }
                self._tell("sandbox.start", event, self._root, **told)
            case events.SandboxClosed():
                self._tell("sandbox.stop", event, self._root, sandbox=self._sandbox)
            case events.RunFinished():
                usage = {"prompt_tokens": event.usage.prompt_tokens, "completion_tokens": event.usage.completion_tokens}
                ended = {
                    "stop_reason": event.stop_reason,
                    "answer": event.answer,
                    "cost": event.cost,
                    "clocks": event.clocks.model_dump(),
                }
                self._end(event, **ended, **usage)
            case events.RunAborted():
                usage = {"prompt_tokens": self._spent.prompt_tokens, "completion_tokens": self._spent.completion_tokens}
                self._end(event, error=event.reason, **usage)

    def _begin(self, event: events.RunStarted) -> None:
        told = {"instruction": event.instruction, "model": event.model, "dialect": event.dialect, "release": _release()}
        self._has_begun = True
        self._asked, self._told_tools, self._spent = [], set(), Usage()
        self._tell("run.start", event, self._root, **told, is_continued=self._is_continued)
        self._is_continued = True
        early, self._early = self._early, []
        for line in early:
            self._write(line)

    def _end(self, event: events.RunEvent, **told: Any) -> None:
        # Written first, so that what is lost until here is known.
        self._writer.flush()
        self._tell(
            "run.end",
            event,
            self._root,
            steps=self._step,
            lost_lines=self.lost_lines,
            lost_blobs=self._lost_blobs,
            **told,
        )
        self._writer.flush()

    def _tell_of_model(self, event: events.ModelAsked | events.ModelAnswered) -> None:
        if isinstance(event, events.ModelAnswered):
            self._spent += event.usage
            usage = {"prompt_tokens": event.usage.prompt_tokens, "completion_tokens": event.usage.completion_tokens}
            answer: dict[str, Any] = {
                "message": event.message,
                "finish_reason": event.finish_reason,
                "model_s": event.model_s,
                "step": event.step,
            }
            self._tell("llm.response", event, self._request_span, **answer, **usage)
            return
        self._request_span = derive_id("request", self._root, str(self._seq))[:16]
        messages, tools = event.request.messages, event.request.tools
        kept = next((at for at, (old, new) in enumerate(zip(self._asked, messages, strict=False)) if old != new), None)
        kept = min(len(self._asked), len(messages)) if kept is None else kept
        self._asked = list(messages)
        told: dict[str, Any] = {
            "step": event.step,
            "kept": kept,
            "messages": messages[kept:],
            "total": len(messages),
            "extra": event.request.extra,
        }
        if tools:
            if tools != self._tools:
                self._tools, self._tools_hash = list(tools), _hash_json(tools)
            told |= {
                "tools": self._tools_hash,
                "tool_definitions": None if self._tools_hash in self._told_tools else tools,
            }
            self._told_tools.add(self._tools_hash)
        self._tell("llm.request", event, self._request_span, **told)

    def _tell_result(self, event: events.CallFinished) -> None:
        result = event.result
        called_at = self._called_at.pop(result.call_id, None)
        self._arguments.pop(result.call_id, None)
        self._note_sandbox(event, result)
        told = result.model_dump(mode="json", exclude={"call_id", "name", "blob"})
        # A result that was known already, as a run was taken up again, comes at once: its own clocks say what it took.
        seconds = max(result.clocks.total_s, event.at - called_at) if called_at is not None else None
        self._tell_of_call(
            "tool.result", event, result.call_id, tool=result.name, step=self._step, seconds=seconds, **told
        )

    def _note_sandbox(self, event: events.CallFinished, result: ToolResult) -> None:
        now = result.sandbox
        if now is None or now.id == self._sandbox:
            return
        if self._sandbox:
            self._tell("sandbox.stop", event, self._root, sandbox=self._sandbox, why="replaced")
            self._tell("sandbox.start", event, self._root, sandbox=now.id, generation=now.generation, why="replaced")
        self._sandbox = now.id

    def _tell_of_call(self, kind: str, event: events.RunEvent, call_id: str, **told: Any) -> None:
        self._tell(kind, event, call_span_id(call_id), call_id=call_id, **told)

    def _tell(self, kind: str, event: events.RunEvent, span: str, **told: Any) -> None:
        line = {
            "v": records.VERSION,
            "ts": _instant(event.at),
            "seq": 0,
            "type": kind,
            "trace_id": self._trace_id,
            "span_id": span,
        }
        line |= {"parent": None if span == self._root else self._root, **self._who, "session": self._session, **told}
        if self._has_begun:
            self._write(line)
        else:
            self._early.append(line)

    def _write(self, line: dict[str, Any]) -> None:
        whole = {
            name: value if name in records.IDENTIFIERS or isinstance(value, int) else self._keep(value)
            for name, value in line.items()
            if value is not None
        }
        self._writer.add(_dump({**whole, "seq": self._seq}))
        self._seq += 1

    def _keep(self, value: Any) -> Any:
        """One field: masked, and by its hash when it is large."""
        kept = self._keep_part(value, 0)
        if not isinstance(kept, dict | list) or (isinstance(kept, dict) and REFERENCE in kept):
            return kept
        data = _dump(kept)
        return (
            self._apart(data, "object" if isinstance(kept, dict) else "list") if len(data) > MAX_INLINE_BYTES else kept
        )

    def _keep_part(self, value: Any, depth: int) -> Any:
        if isinstance(value, str):
            return self._keep_text(value)
        if isinstance(value, float):
            return value if value - value == 0.0 else str(value)
        if value is None or isinstance(value, bool | int):
            return value
        if depth >= MAX_DEPTH:
            return "[left out: it nests too deep]"
        if isinstance(value, Mapping):
            inner = {self._masker.mask(_whole(str(key))): self._keep_part(one, depth + 1) for key, one in value.items()}
            return {LITERAL: inner} if REFERENCE in inner or LITERAL in inner else inner
        if isinstance(value, list | tuple):
            return [self._keep_part(one, depth + 1) for one in value]
        return self._keep_text(str(value))

    def _keep_text(self, text: str) -> Any:
        masked = self._masker.mask(_whole(text))
        # A character takes at most four bytes, so most texts need not be counted.
        if len(masked) * 4 <= MAX_INLINE_BYTES or len(data := masked.encode()) <= MAX_INLINE_BYTES:
            return masked
        return self._apart(data, "text")

    def _apart(self, data: bytes, kind: Kind) -> dict[str, Any]:
        reference = build_reference(data, kind)
        try:
            self._blobs.put(data, reference[REFERENCE])
        except OSError as error:
            self._lost_blobs += 1
            self._writer.tell_failure(error)
            return build_reference(data, kind, is_lost=True)
        return reference

    def _warn(self, sentence: str) -> None:
        self.warnings.append(sentence)
        log.warning("trace_not_written", run=self._who["run"], message=sentence)
        self._on_warning(sentence)


def _continue(path: Path) -> tuple[int, bool]:
    """The next line's number, and whether there are lines already."""
    for line in reversed(read_last_lines(path)):
        try:
            seq = json.loads(line)["seq"]
        except (ValueError, TypeError, KeyError, RecursionError):
            continue
        if isinstance(seq, int) and seq >= 0:
            return seq + 1, True
    return 0, False


def _instant(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def _dump(value: Any) -> bytes:
    return _ENCODER.encode(value).encode()


def _hash_json(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _whole(text: str) -> str:
    """Without half surrogate pairs, which no UTF-8 carries."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-8", "replace").decode()
    return text


@cache
def _release() -> str:
    try:
        return version("toolcrew")
    except PackageNotFoundError:
        return ""
