"""File of the events of a batch, next to the row files. The file has one event per line. The report reads this
file.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from toolcrew.contract.errors import ConfigError
from toolcrew.contract.run_events import OnEvent, RunEvent
from toolcrew.orchestrator.traces.event_file import EventFile
from toolcrew.store.batches import parse_batch_event
from toolcrew.telemetry.logs import get_logger

log = get_logger(__name__)


@contextmanager
def write_batch_events(path: Path) -> Iterator[OnEvent]:
    """Open a file for the events of a batch. Yield a function that appends an event. Raises ConfigError: the path
    cannot be written.
    """
    try:
        path.open("a").close()
    except OSError as error:
        raise ConfigError(f"{path} cannot be written ({error.strerror or error}): choose another path") from error
    file = EventFile(path.resolve())
    try:
        yield lambda event: file.add(json.dumps(event.to_json(), separators=(",", ":")).encode())
    finally:
        file.flush()


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
