"""Format of a log event as one line: ordered fields, masked secrets and limited length. No field can forge a line or
control a terminal.
"""

import contextlib
import json
import logging
import math
import os
import re
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, MutableMapping
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any

from structlog.processors import JSONRenderer, LogfmtRenderer

from toolcrew.contract.masking import MARK, SECRET_NAME, Masker

FIELDS = ("service", "host", "tenant", "batch", "run", "session", "call", "tool", "queue")
"""Common fields of all processes, in their order on a line. Other fields follow."""
MAX_LINE_BYTES = 4000
"""Limit of a line. Several processes write to one pipe, and the kernel may interleave writes above 4096 bytes."""
MAX_VALUE_CHARS = 2000
MAX_LISTED = 64
MAX_CHAIN = 8
MAX_FRAMES = 16
"""Limit of the stack frames of one exception that a line shows. The innermost frames are shown."""
_MESSAGE_CHARS = 500
_SHRUNK = (MAX_VALUE_CHARS, 500, 100)
_LAST_RESORT = 40
_MAX_READ_CHARS = 64 * 1024
FOREIGN_EVENT = "library_message"
_KEY = re.compile(r"[^A-Za-z0-9_.-]")
_JSON = JSONRenderer(ensure_ascii=False, separators=(",", ":"))
_LOGFMT = LogfmtRenderer(bool_as_flag=False)
_COLORS = {"debug": "2", "info": "32", "warning": "33", "error": "31", "critical": "1;31"}


class LogLines:
    """Builds lines: JSON, or colored text for a terminal. `fixed`: fields of every line."""

    def __init__(self, masker: Masker, fixed: Mapping[str, str] | None = None, *, is_console: bool = False) -> None:
        self._masker = masker
        self._fixed = dict(fixed or {})
        self._is_console = is_console

    def build(self, level: str, event: str, at: float, fields: Mapping[str, Any]) -> str:
        """Return the line without its line end. `at`: Unix seconds. A field `exc_info` adds an exception to the line,
        as in the logging module.
        """
        all_fields = {**self._fixed, **fields}
        error = _find_exception(all_fields.pop("exc_info", None))
        common = {name: all_fields.pop(name, None) for name in FIELDS}
        ordered = {name: value for name, value in common.items() if value is not None} | all_fields
        if error is not None:
            ordered["exception"], ordered["traceback"] = describe_exception(error)
        for limit in _SHRUNK:
            line = self._line(level, event, at, self._clean_all(ordered, limit))
            if len(line.encode(errors="replace")) <= MAX_LINE_BYTES:
                return line
        shortened = {name: ordered[name] for name in FIELDS if name in ordered} | {
            "fields_left_out": len(set(ordered) - set(FIELDS))
        }
        return self._line(level, event, at, self._clean_all(shortened, _LAST_RESORT))

    def process(self, _: object, method: str, fields: MutableMapping[str, Any]) -> str:
        """Return the line of an event of structlog, as its last processor."""
        if method == "exception":
            fields.setdefault("exc_info", True)
        return self.build("error" if method == "exception" else method, str(fields.pop("event")), time.time(), fields)

    def text(self, event: str, fields: Mapping[str, Any]) -> str:
        """Return event and fields as key=value, for a program that adds time and level itself."""
        shown = dict(fields)
        error = _find_exception(shown.pop("exc_info", None))
        if error is not None:
            shown["exception"], shown["traceback"] = describe_exception(error)
        return _to_logfmt({"event": escape_line(event)} | self._clean_all(shown, MAX_VALUE_CHARS))

    def _clean_all(self, fields: Mapping[str, Any], limit: int) -> dict[str, Any]:
        cleaned = {}
        for name, value in fields.items():
            shown, is_secret = _clean_name(str(name))
            cleaned[shown] = f"{MARK}{shown}]" if is_secret and value else self._clean(value, limit)
        return cleaned

    def _clean(self, value: object, limit: int) -> Any:
        if isinstance(value, str):
            return self._clean_text(value, limit)
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, int) and abs(value) < 1 << 63:
            return int(value)
        if isinstance(value, float) and math.isfinite(value):
            return float(value)
        if isinstance(value, list | tuple | set | frozenset):
            listed = [self._clean(item, limit // 4) for item in list(value)[:MAX_LISTED]]
            return listed if len(value) <= MAX_LISTED else [*listed, f"... {len(value) - MAX_LISTED} more"]
        return self._clean_text(_show(value), limit)

    def _clean_text(self, text: str, limit: int) -> str:
        # Mask before cutting: half of a secret would not be recognized.
        shown = escape_line(self._masker.mask(text[:_MAX_READ_CHARS]))
        if len(shown) <= limit and len(text) <= _MAX_READ_CHARS:
            return shown
        return f"{shown[:limit]}... ({len(text)} characters)"

    def _line(self, level: str, event: str, at: float, fields: dict[str, Any]) -> str:
        instant = datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        event = escape_line(event)[:64]
        if not self._is_console:
            return str(_JSON(None, "", {"timestamp": instant, "level": level, "event": event} | fields))
        clock = instant[11:23]
        pairs = " ".join(
            "\x1b[2m{}=\x1b[0m{}".format(*_to_logfmt({name: value}).split("=", 1)) for name, value in fields.items()
        )
        return (
            f"\x1b[2m{clock}\x1b[0m \x1b[{_COLORS.get(level, '0')}m{level:<8}\x1b[0m \x1b[1m{event:<24}\x1b[0m {pairs}"
        )


class StderrLogger:
    """Receives finished lines from structlog."""

    def msg(self, line: str) -> None:
        """Write a finished line to stderr."""
        write_line(line)

    debug = info = warning = error = critical = exception = msg


def write_line(line: str) -> None:
    """Write the line to stderr at once and without a lock. A lock could deadlock a forked child: the thread that held
    the lock does not exist in the child.
    """
    data = f"{line}\n".encode(errors="backslashreplace")
    with contextlib.suppress(OSError):  # ignore errors: calls must not fail because no process reads the log
        while data:
            data = data[os.write(2, data) :]


@lru_cache(maxsize=512)
def _clean_name(name: str) -> tuple[str, bool]:
    """Return the name of a field for a line, and whether its value is a secret."""
    return _KEY.sub("_", name)[:64], SECRET_NAME.search(name) is not None


def escape_line(text: str) -> str:
    """Return the text on one line. Line ends, control characters, terminal escapes, direction marks and all other
    non-printable characters are escaped.
    """
    if text.isprintable():
        return text
    return "".join(character if character.isprintable() else _escape(character) for character in text)


def _escape(character: str) -> str:
    code = ord(character)
    if character in "\n\t\r":
        return {"\n": "\\n", "\t": "\\t", "\r": "\\r"}[character]
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def _show(value: object) -> str:
    try:
        if isinstance(value, Mapping):
            return json.dumps(_without_secrets(value), ensure_ascii=False, default=str)
        return hex(value) if isinstance(value, int) else str(value)
    except Exception:  # noqa: BLE001  # any exception: a log line about a failure must not fail itself
        return f"a {type(value).__name__} that cannot be shown"


def _without_secrets(value: Any) -> Any:
    """Return the value. Nested values whose names say that they are secret are masked."""
    if isinstance(value, Mapping):
        return {
            name: f"{MARK}{name}]" if inner and _clean_name(str(name))[1] else _without_secrets(inner)
            for name, inner in value.items()
        }
    return [_without_secrets(inner) for inner in value] if isinstance(value, list | tuple) else value


def _to_logfmt(fields: Mapping[str, Any]) -> str:
    joined = {name: ",".join(map(str, value)) if isinstance(value, list) else value for name, value in fields.items()}
    return _LOGFMT(None, "", joined)


def _find_exception(exc_info: object) -> BaseException | None:
    """Return the exception of `exc_info`, which is an exception, its triple, or true for the active exception."""
    if isinstance(exc_info, BaseException):
        return exc_info
    if isinstance(exc_info, tuple):
        return exc_info[1] if len(exc_info) == 3 and isinstance(exc_info[1], BaseException) else None
    return sys.exc_info()[1] if exc_info else None


def describe_exception(error: BaseException) -> tuple[str, str]:
    """Return texts of an exception and its location: `ValueError: x; caused by KeyError: 'y'` and `workers/a.py:12
    run > workers/b.py:3 read; ...`.
    """
    chain = list(_exception_chain(error))
    return "; ".join(f"{link}{_exception_text(exception)}" for link, exception in chain), "; ".join(
        f"{link}{_exception_place(exception)}" for link, exception in chain
    )


def _exception_chain(error: BaseException) -> Iterator[tuple[str, BaseException]]:
    """Yield the exception and its causes, nearest first."""
    visited: set[int] = set()
    waiting: list[tuple[str, BaseException]] = [("", error)]
    while waiting and len(visited) < MAX_CHAIN:
        link, exception = waiting.pop(0)
        if id(exception) in visited:
            continue
        visited.add(id(exception))
        yield link, exception
        if isinstance(exception, BaseExceptionGroup):
            waiting += [("of which ", inner) for inner in exception.exceptions]
        if exception.__cause__ is not None:
            waiting.append(("caused by ", exception.__cause__))
        elif exception.__context__ is not None and not exception.__suppress_context__:
            waiting.append(("while handling ", exception.__context__))


def _exception_text(error: BaseException) -> str:
    name = type(error).__name__
    try:
        message = str(error)
    except Exception:  # noqa: BLE001  # any exception: a log line about a failure must not fail itself
        message = "the message cannot be shown"
    message = (
        message if len(message) <= _MESSAGE_CHARS else f"{message[:_MESSAGE_CHARS]}... ({len(message)} characters)"
    )
    return f"{name}: {message}" if message else name


def _exception_place(error: BaseException) -> str:
    frames = [
        (frame.f_code.co_filename, line, frame.f_code.co_name) for frame, line in traceback.walk_tb(error.__traceback__)
    ]
    shown = " > ".join(f"{'/'.join(file.split('/')[-3:])}:{line} {name}" for file, line, name in frames[-MAX_FRAMES:])
    return f"... > {shown}" if len(frames) > MAX_FRAMES else shown or "nowhere"


_PLAIN = LogLines(Masker())


class LogEvent:
    """An event as the message of a logging record. A program that formats records itself shows it as key=value."""

    def __init__(self, event: str, fields: Mapping[str, Any]) -> None:
        self.event = event
        self.fields = fields

    def __str__(self) -> str:
        return _PLAIN.text(self.event, self.fields)


class RecordLines(logging.Formatter):
    """Formats logging records as lines: events of toolcrew, and each message of a library as one event."""

    def __init__(self, lines: LogLines) -> None:
        super().__init__()
        self._lines = lines

    def format(self, record: logging.LogRecord) -> str:
        message = record.msg
        if isinstance(message, LogEvent):
            event, fields = message.event, dict(message.fields)
        else:
            event, fields = FOREIGN_EVENT, _quote(record)
        if record.exc_info:
            fields.setdefault("exc_info", record.exc_info)
        return self._lines.build(record.levelname.lower(), event, record.created, fields)


def _quote(record: logging.LogRecord) -> dict[str, Any]:
    try:
        message = record.getMessage()
    except Exception:  # noqa: BLE001
        # A library passed arguments that do not fit its message: show both as they are.
        message = f"{record.msg} {record.args!r}"
    return {"logger": record.name, "message": message}
