"""Writes the trace of one run: one line for each event. Secrets are masked.

Invariants: a failure of the trace never ends the run. Every text is masked before it reaches the disk, except for
identifiers that toolcrew creates.
"""

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

from toolcrew.contract.calls import MAX_ERROR_CHARS, MAX_NAME_CHARS, MAX_OUTPUT_CHARS, ToolResult
from toolcrew.contract.errors import ConfigError
from toolcrew.contract.masking import Masker
from toolcrew.contract.run_events import (
    OutputArrived,
    RunAborted,
    RunEvent,
    RunFinished,
    RunStarted,
    TextArrived,
    TextWithdrawn,
)
from toolcrew.contract.settings import OrchestratorSettings, build_masker
from toolcrew.orchestrator.traces.event_file import EventFile
from toolcrew.telemetry.logs import get_logger

log = get_logger(__name__)

VERSION = 2
TAIL_BYTES = 32 * 1024 * 1024
"""Number of bytes at the end of a file in which the last complete line is searched. It is large because a line with
long messages has megabytes.
"""
MAX_DEPTH = 200
"""Maximum nesting depth. A note replaces a value that is nested deeper."""
PIECES = TextArrived, TextWithdrawn, OutputArrived
"""Classes of the events with pieces of text, which traces omit: a secret that is split over two pieces could not be
masked. The reply or the result contains the whole text.
"""
IDENTIFIERS = frozenset({"type", "run", "session", "id", "call_id", "digest", "error_code", "method"})
"""Fields with values that toolcrew itself creates. These values are not masked."""
RECORDS = frozenset({"call", "result", *ToolResult.record_fields()})
"""Fields of an event that contain a call, a result or a record of a result. The field names of such a record are not
masked.
"""
_LIMITS = {"name": MAX_NAME_CHARS, "output": MAX_OUTPUT_CHARS, "error": MAX_ERROR_CHARS}
"""Limits of the fields of a record, in characters. A masked text can be longer than the original text."""
_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False)
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


def trace_path(folder: Path, tenant: str, run: str) -> Path:
    """Return the path of a run's trace. Raises ConfigError: a name is invalid."""
    for label, name in (("tenant", tenant), ("run", run)):
        if not _NAME.fullmatch(name):
            raise ConfigError(
                f"'{name[:80]}' is not a valid name of a {label}: use 1 to 64 letters, digits, '_' or '-'"
            )
    return folder / tenant / f"{run}.jsonl"


class Traces:
    """Traces of one program. `secrets`: masked in addition to the secrets of settings and environment (kind ->
    value).
    """

    def __init__(self, settings: OrchestratorSettings, secrets: Mapping[str, str]) -> None:
        self.folder: Path = settings.traces
        self.masker: Masker = build_masker(settings, secrets)

    def open(self, tenant: str, run: str) -> "AbstractContextManager[TraceRecorder]":
        """Open the trace of one run, as `open_trace` does."""
        return open_trace(self.folder, tenant, run, masker=self.masker)


@contextmanager
def open_trace(folder: Path, tenant: str, run: str, *, masker: Masker) -> "Iterator[TraceRecorder]":
    """Open the recorder of a run. If the run has a trace already, new events are appended to it. Raises ConfigError if
    a name is invalid, and no other exception.
    """
    recorder = TraceRecorder(trace_path(folder, tenant, run), tenant, run, masker)
    try:
        yield recorder
    finally:
        recorder.close()


class TraceRecorder:
    """Writes the events of one run to its trace file."""

    def __init__(self, path: Path, tenant: str, run: str, masker: Masker) -> None:
        self.path = path
        self._tenant = tenant
        self._run = run
        self._masker = masker
        self._seq, has_partial_line = _read_end(path)
        self._file = EventFile(path, has_partial_line=has_partial_line)
        self._has_started = False
        # Events before the start of the run. They are written after the start event, because readers find an attempt
        # by its start.
        self._early: list[RunEvent] = []

    def on_event(self, event: RunEvent) -> None:
        """Record one event. Never raises."""
        if event.run == self._run and not isinstance(event, PIECES):
            self._record(event)

    __call__ = on_event

    def close(self) -> None:
        """Write the collected lines. Adds no event for the end of the run: the trace of an interrupted run has none."""
        for event in self._early:
            self._write(event)
        self._early.clear()
        self._file.flush()

    def _record(self, event: RunEvent) -> None:
        """Record one event, or store the event until the run starts."""
        if isinstance(event, RunStarted):
            self._has_started = True
        elif not self._has_started:
            self._early.append(event)
            return
        self._write(event)
        early, self._early = self._early, []
        for early_event in early:
            self._write(early_event)
        if isinstance(event, RunFinished | RunAborted):
            self._file.flush()

    def _write(self, event: RunEvent) -> None:
        """Write the line of one event. A failure is logged."""
        line = {"v": VERSION, "seq": self._seq, "tenant": self._tenant}
        self._seq += 1
        try:
            self._file.add(_dump({**line, **self._mask_fields(event.to_trace())}))
        except Exception:  # no failure of the trace may end the run
            log.exception("trace_line_lost", run=self._run, kind=type(event).__name__)

    def _mask_fields(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Mask the fields of an event or of a nested record. Fields without a value are left out."""
        masked: dict[str, Any] = {}
        for name, value in fields.items():
            if name in RECORDS and isinstance(value, Mapping):
                masked[name] = self._mask_fields(value)
            elif isinstance(value, str) and name not in IDENTIFIERS:
                # Mask the complete text first: a cut before could hide a part of a secret from the masker.
                masked[name] = self._mask(value, 0)[: _LIMITS.get(name)]
            elif value is not None:
                masked[name] = value if name in IDENTIFIERS else self._mask(value, 0)
        return masked

    def _mask(self, value: Any, depth: int) -> Any:
        """Return the value with all texts masked and with values that JSON allows."""
        if isinstance(value, float):
            return value if value - value == 0.0 else str(value)
        if value is None or isinstance(value, bool | int):
            return value
        if isinstance(value, str) or not isinstance(value, Mapping | list | tuple):
            return self._masker.mask(_replace_surrogates(str(value)))
        if depth >= MAX_DEPTH:
            return "[omitted: nested too deeply]"
        if isinstance(value, Mapping):
            return {self._mask(str(key), depth): self._mask(item, depth + 1) for key, item in value.items()}
        return [self._mask(item, depth + 1) for item in value]


def _read_end(path: Path) -> tuple[int, bool]:
    """Return the number of the next line, and whether the file ends in the middle of a line."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            *lines, rest = file.read().split(b"\n")
    except OSError:
        return 0, False
    for line in reversed(lines):
        with suppress(ValueError, TypeError, KeyError, RecursionError):
            seq = json.loads(line)["seq"]
            if isinstance(seq, int) and seq >= 0:
                return seq + 1, bool(rest)
    return 0, bool(rest)


def _dump(value: Any) -> bytes:
    """Return the value as compact JSON."""
    return _ENCODER.encode(value).encode()


def _replace_surrogates(text: str) -> str:
    """Replace lone surrogates, which UTF-8 cannot encode."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-8", "replace").decode()
    return text
