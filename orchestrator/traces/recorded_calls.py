"""The calls of a trace as something to run again: read from native traces and from ATIF."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from contract.errors import ConfigError
from orchestrator.traces.atif_schema import AtifObservationResult, AtifToolCall, AtifTrajectory
from orchestrator.traces.masking import is_masked
from orchestrator.traces.reading import Trace, TraceCall, load_trace

MISSING = "bytes are missing: blob "


@dataclass(frozen=True)
class Told:
    """What a result says, as far as it can be compared. `success` None: its trace does not say; then `text` is all
    there is. `streams`: a command's stdout and stderr, each for itself."""

    text: str
    success: bool | None = None
    error_code: str | None = None
    exit_code: int | None = None
    streams: tuple[str, str] | None = None


@dataclass(frozen=True)
class RecordedCall:
    """`told` None: it had no result. `unfit`: why it cannot be run again as it was; `unrun`: why it was never run, so
    that it is not now.
    """

    call_id: str
    tool: str
    arguments: dict[str, Any]
    told: Told | None
    unfit: str = ""
    unrun: str = ""

    @property
    def is_of_job(self) -> bool:
        """Whether it starts a job in the background, or asks about one."""
        return bool(self.arguments.get("background")) or self.arguments.get("action") in (
            "poll",
            "input",
            "kill",
            "list",
        )


def load_calls(path: Path) -> tuple[list[RecordedCall], list[str]]:
    """The calls of a file, native or ATIF, in order; and what of it is not whole. Raises ConfigError for what is
    neither.
    """
    document = _read_document(path)
    if document is not None:
        return list(_of_atif(document)), []
    trace = load_trace(path)
    if not trace.records:
        raise ConfigError(f"{path} has no line of a trace: give the file of a run, or an ATIF trajectory")
    return calls_of_trace(trace), trace.faults()


def calls_of_trace(trace: Trace) -> list[RecordedCall]:
    """Those of a native trace."""
    return [_of_trace(call, trace.why_unrun(call)) for call in trace.calls]


def exit_code_of(metadata: dict[str, Any]) -> int | None:
    """What a command's result says of its end."""
    code = metadata.get("exit_code")
    return code if isinstance(code, int) and not isinstance(code, bool) else None


def streams_of(metadata: dict[str, Any]) -> tuple[str, str] | None:
    """A command's stdout and stderr, where its result has both."""
    out, err = metadata.get("stdout"), metadata.get("stderr")
    return (out, err) if isinstance(out, str) and isinstance(err, str) else None


def _of_trace(call: TraceCall, unrun: str) -> RecordedCall:
    result, told = call.result, None
    if result is not None:
        told = Told(
            result.text(), result.success, result.error_code, exit_code_of(result.metadata), streams_of(result.metadata)
        )
    return RecordedCall(
        call.call_id, call.tool, call.arguments, told, "" if unrun else _unfit(call.arguments, told), unrun
    )


def _unfit(arguments: dict[str, Any], told: Told | None) -> str:
    if is_masked(arguments):
        return "secrets in its arguments are masked"
    if MISSING in json.dumps(arguments, ensure_ascii=False):
        return "a large part of its arguments is missing"
    if told is None:
        return "the trace has no result of it"
    return "a large part of its result is missing" if MISSING in told.text[:200] else ""


def _read_document(path: Path) -> AtifTrajectory | None:
    """The file as ATIF; None when it is not one JSON object of that kind."""
    try:
        with path.open("rb") as file:
            # A native trace may be long: its first line says what it is.
            head = file.readline()
            first = _object(head)
            if first is not None and "seq" in first:
                return None
            value = _object(head + file.read())
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read ({error.strerror}): give the path of a trace, or a run's id"
        ) from error
    if value is None or "schema_version" not in value:
        return None
    try:
        return AtifTrajectory.model_validate(value)
    except ValidationError as error:
        fault = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in fault["loc"])
        raise ConfigError(
            f"{path} is no ATIF trajectory: {place}: {fault['msg']}; export it again, or give a native trace"
        ) from error


def _object(data: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _of_atif(document: AtifTrajectory) -> Iterator[RecordedCall]:
    for step in document.steps:
        if step.is_copied_context:
            continue
        results = {result.source_call_id: result for result in (step.observation.results if step.observation else ())}
        for call in step.tool_calls or ():
            yield _of_atif_call(call, results.get(call.tool_call_id))


def _of_atif_call(call: AtifToolCall, result: AtifObservationResult | None) -> RecordedCall:
    told, unrun = None, str((call.extra or {}).get("unrun") or "")
    if result is not None:
        extra = result.extra or {}
        success, code, metadata = extra.get("success"), extra.get("error_code"), extra.get("metadata")
        metadata = metadata if isinstance(metadata, dict) else {}
        told = Told(
            _text(result),
            success if isinstance(success, bool) else None,
            code if isinstance(code, str) else None,
            exit_code_of(metadata),
            streams_of(metadata),
        )
    unfit = "" if unrun else _unfit(call.arguments, told)
    return RecordedCall(call.tool_call_id, call.function_name, call.arguments, told, unfit, unrun)


def _text(result: AtifObservationResult) -> str:
    if isinstance(result.content, list):
        return "".join(part.text or "" for part in result.content)
    return result.content or ""
