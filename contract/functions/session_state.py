"""State of a session that its tools share between calls: JSON values by key, versioned and limited in size."""

import json
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, NoReturn, Protocol

from toolcrew.contract.errors import ErrorCode, ToolFailure

MAX_KEY_CHARS = 256
MAX_VALUE_BYTES = 64 * 1024
"""Limit of one value as JSON, in bytes."""
MAX_STATE_BYTES = 1024 * 1024
"""Limit of all keys and values of one state, in bytes."""
MAX_ATTEMPTS = 1000
"""Limit of attempts of `update`, which repeats when another call changes the value at the same time."""

Change = Callable[[Any], Any | Awaitable[Any]]
"""Plain or async function from the old value to the new value. It must have no side effects, because `update` may call
it several times.
"""


class SessionStates(Protocol):
    """Interface that returns the state of each session."""

    def open(self, tenant: str, session: str) -> "SessionState": ...


class SessionState(Protocol):
    """Versioned values by key. `get` returns a copy, so a change of the copy takes effect only after `set`. All methods
    are async.
    """

    def get(self, key: str, default: Any = None) -> Coroutine[Any, Any, Any]:
        """Return the value of `key`, or `default`."""
        ...

    def set(self, key: str, value: Any) -> Coroutine[Any, Any, None]:
        """Set the value of `key`. Raises ToolFailure: INVALID_ARGUMENTS if the value is not JSON, NO_SPACE beyond the
        size limits. After an error the old value stays.
        """
        ...

    def update(self, key: str, fn: Change) -> Coroutine[Any, Any, Any]:
        """Set `key` to `fn(old value or None)` without losing concurrent changes. Return the new value. Raises the
        errors of `set`.
        """
        ...

    def items(self) -> Coroutine[Any, Any, dict[str, Any]]:
        """Return all keys and values from one consistent read."""
        ...


class NoState:
    """State of a call without a session. Every method raises ToolFailure(SESSION_NOT_FOUND)."""

    def get(self, key: str, default: Any = None) -> Coroutine[Any, Any, Any]:
        self._refuse()

    def set(self, key: str, value: Any) -> Coroutine[Any, Any, None]:
        self._refuse()

    def update(self, key: str, fn: Change) -> Coroutine[Any, Any, Any]:
        self._refuse()

    def items(self) -> Coroutine[Any, Any, dict[str, Any]]:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise ToolFailure(
            ErrorCode.SESSION_NOT_FOUND,
            "this call belongs to no session, so it has no state. Call the tool in a session.",
        )


def is_key(key: object) -> bool:
    """Return whether `key` is a valid key of the state."""
    return (
        isinstance(key, str)
        and 0 < len(key) <= MAX_KEY_CHARS
        and not any("\ud800" <= character <= "\udfff" for character in key)
    )


def encode_value(key: str, value: Any, max_value_bytes: int = MAX_VALUE_BYTES) -> str:
    """Return the value as JSON text. Raises the ToolFailure of `SessionState.set`."""
    if not is_key(key):
        raise ToolFailure(
            ErrorCode.INVALID_ARGUMENTS, f"the key of the state is invalid: use text of 1 to {MAX_KEY_CHARS} characters"
        )
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        size = len(text.encode())
    except (TypeError, ValueError, RecursionError) as error:
        sentence = f"a state stores JSON values only; the value for '{key}' is {type(value).__name__}: {error}"
        raise ToolFailure(ErrorCode.INVALID_ARGUMENTS, sentence) from error
    if size > max_value_bytes:
        sentence = (
            f"the value for '{key}' is {size} bytes; the limit is {max_value_bytes} bytes per value. Store large data "
            "in a file."
        )
        raise ToolFailure(ErrorCode.NO_SPACE, sentence)
    return text


def entry_size(key: str, text: str) -> int:
    """Return the bytes that a key and its value count towards MAX_STATE_BYTES."""
    return len(key.encode()) + len(text.encode())


def state_full_error(key: str, size: int, max_state_bytes: int) -> ToolFailure:
    """Return the error for a valid value that would make the whole state too large."""
    sentence = (
        f"with '{key}' the session's state would be {size} bytes; the limit is {max_state_bytes} bytes. Make other "
        "values smaller."
    )
    return ToolFailure(ErrorCode.NO_SPACE, sentence)


def contention_error(key: str) -> ToolFailure:
    """Return the error of an `update` that failed MAX_ATTEMPTS times because of concurrent changes."""
    return ToolFailure(
        ErrorCode.INTERNAL,
        f"other calls changed '{key}' of the state during each of {MAX_ATTEMPTS} attempts; try again",
    )
