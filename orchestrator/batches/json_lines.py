"""A batch for a program: every batch_event as one line of JSON, as it is, then one summary."""

import json
from types import TracebackType
from typing import IO

from contract.calls import Record
from orchestrator.batches.displays import Watched
from store.batches import BatchEvent


class JsonLines:
    """Also what comes twice is written twice: a program that reads a log sees the log."""

    def __init__(self, watched: Watched, out: IO[str]) -> None:
        self._watched = watched
        self._out = out

    def __enter__(self) -> "JsonLines":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not isinstance(error, BrokenPipeError):
            self._write(self._watched.summary())

    def show(self, batch_event: BatchEvent) -> None:
        """Write it; flushed, so that a reader has it at once."""
        self._watched.progress.add(batch_event)
        self._write(batch_event)

    def tick(self) -> None:
        """Nothing is shown for time alone."""

    def _write(self, record: Record) -> None:
        # In ASCII: no encoding of stdout fails on it, and no terminal is driven by it.
        self._out.write(json.dumps(record.model_dump(mode="json"), separators=(",", ":")) + "\n")
        self._out.flush()
