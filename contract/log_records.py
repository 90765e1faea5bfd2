"""Lines of what is said through the standard library's logging: our own events, and what libraries say, as one event of
ours.
"""

import logging
from collections.abc import Mapping
from typing import Any

from contract.log_lines import LogLines
from contract.masking import Masker

FOREIGN_EVENT = "library_said"
_PLAIN = LogLines("logfmt", Masker())


class Said:
    """An event of ours as the message of a record: who formats records by itself sees key=value."""

    def __init__(self, event: str, fields: Mapping[str, Any]) -> None:
        self.event = event
        self.fields = fields

    def __str__(self) -> str:
        return _PLAIN.text(self.event, self.fields)


class RecordLines(logging.Formatter):
    """Records as lines of `lines`."""

    def __init__(self, lines: LogLines) -> None:
        super().__init__()
        self._lines = lines

    def format(self, record: logging.LogRecord) -> str:
        said = record.msg
        event, fields = (said.event, dict(said.fields)) if isinstance(said, Said) else (FOREIGN_EVENT, _quote(record))
        if record.exc_info:
            fields.setdefault("exc_info", record.exc_info)
        return self._lines.build(record.levelname.lower(), event, record.created, fields)


def _quote(record: logging.LogRecord) -> dict[str, Any]:
    try:
        message = record.getMessage()
    except Exception:  # noqa: BLE001
        # a library's mistake, of whatever kind: what it meant to say is shown as it stands
        message = f"{record.msg} {record.args!r}"
    return {"logger": record.name, "message": message}
