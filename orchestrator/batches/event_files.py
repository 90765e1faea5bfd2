"""File of the events of a batch, next to the row files. The file has one event per line. The report reads this
file.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import IO

from contract.errors import ConfigError
from contract.run_events import RunEvent
from store.batches import parse_batch_event
from telemetry.logs import get_logger

log = get_logger(__name__)


class BatchEventFile:
    """Appends events to a file. A context manager. An event that the disk does not accept is counted, and the batch
    continues.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lost_events = 0
        self._file: IO[str] | None = None

    def __enter__(self) -> "BatchEventFile":
        """Open the file. Raises ConfigError: the path cannot be written."""
        try:
            self._file = self.path.open("a", encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"{self.path} cannot be written ({error.strerror or error}): choose another path"
            ) from error
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the file. An error is logged and not raised."""
        if self._file is not None:
            try:
                self._file.close()
            except OSError as failure:
                log.warning("batch_events_not_kept", path=str(self.path), lost=self.lost_events, error=str(failure))

    def add(self, event: RunEvent) -> None:
        """Append an event."""
        assert self._file is not None
        try:
            self._file.write(json.dumps(event.to_json(), separators=(",", ":")) + "\n")
            self._file.flush()
        except OSError as error:
            self.lost_events += 1
            if self.lost_events == 1:
                log.warning("batch_events_not_kept", path=str(self.path), error=str(error))


def read_batch_events(path: Path) -> Iterator[RunEvent]:
    """Yield the events of a file. Lines that a crash left incomplete are skipped. Raises ConfigError: the file cannot
    be read.
    """
    try:
        with path.open("rb") as lines:
            for line in lines:
                try:
                    yield parse_batch_event(line)
                except ValueError:
                    log.debug("batch_event_skipped", path=str(path))
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read ({error.strerror or error}): give the file that `toolcrew batches submit "
            "FILE` wrote"
        ) from error
