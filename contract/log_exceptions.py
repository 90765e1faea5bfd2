"""An exception as two short texts for a log line: what it says, with its causes, and where it was raised. No source line, no value of a variable."""

import sys
import traceback
from collections.abc import Iterator

MAX_CHAIN = 8
MAX_FRAMES = 16
"""Of one exception; those nearest to the fault."""
_SAID_CHARS = 500


def find_exception(exc_info: object) -> BaseException | None:
    """The exception that `exc_info` names, as logging has it: the exception, its triple, or true for the one being handled."""
    if isinstance(exc_info, BaseException):
        return exc_info
    if isinstance(exc_info, tuple):
        return exc_info[1] if len(exc_info) == 3 and isinstance(exc_info[1], BaseException) else None
    return sys.exc_info()[1] if exc_info else None


def describe_exception(error: BaseException) -> tuple[str, str]:
    """What was raised, and where: `ValueError: x; caused by KeyError: 'y'` and `workers/a.py:12 run > workers/b.py:3 read; ...`."""
    chain = list(_chain(error))
    return "; ".join(f"{link}{_say(one)}" for link, one in chain), "; ".join(f"{link}{_place(one)}" for link, one in chain)


def _chain(error: BaseException) -> Iterator[tuple[str, BaseException]]:
    """The exception and what led to it, nearest first."""
    seen: set[int] = set()
    waiting: list[tuple[str, BaseException]] = [("", error)]
    while waiting and len(seen) < MAX_CHAIN:
        link, one = waiting.pop(0)
        if id(one) in seen:
            continue
        seen.add(id(one))
        yield link, one
        if isinstance(one, BaseExceptionGroup):
            waiting += [("of which ", inner) for inner in one.exceptions]
        if one.__cause__ is not None:
            waiting.append(("caused by ", one.__cause__))
        elif one.__context__ is not None and not one.__suppress_context__:
            waiting.append(("while handling ", one.__context__))


def _say(error: BaseException) -> str:
    name = type(error).__name__
    try:
        words = str(error)
    except Exception:  # noqa: BLE001  # of whatever kind: a line about a failure must not be the next one
        words = "it cannot be shown"
    words = words if len(words) <= _SAID_CHARS else f"{words[:_SAID_CHARS]}... ({len(words)} characters)"
    return f"{name}: {words}" if words else name


def _place(error: BaseException) -> str:
    frames = [(frame.f_code.co_filename, line, frame.f_code.co_name) for frame, line in traceback.walk_tb(error.__traceback__)]
    shown = " > ".join(f"{'/'.join(file.split('/')[-3:])}:{line} {name}" for file, line, name in frames[-MAX_FRAMES:])
    return f"... > {shown}" if len(frames) > MAX_FRAMES else shown or "nowhere"
