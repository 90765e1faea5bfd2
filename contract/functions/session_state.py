"""What a session remembers between calls, as its tools see it: JSON values by key, versioned and bounded."""

import json
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, NoReturn, Protocol

from contract.errors import ErrorCode, ToolFailure

MAX_KEY_CHARS = 256
MAX_VALUE_BYTES = 64 * 1024
"""One value as JSON."""
MAX_STATE_BYTES = 1024 * 1024
"""All keys and values of one state."""
MAX_ATTEMPTS = 1000
"""How often `update` computes anew because somebody else was faster."""

Change = Callable[[Any], Any | Awaitable[Any]]
"""Old value -> new value, plain or async. May be called several times: it must do nothing else."""


class SessionStates(Protocol):
    """The states of all sessions."""

    def open(self, tenant: str, session: str) -> "SessionState": ...


class SessionState(Protocol):
    """Values by key, versioned. What is got is a copy: changing it changes nothing until it is set. All four are
    awaited.
    """

    def get(self, key: str, default: Any = None) -> Coroutine[Any, Any, Any]:
        """The value of `key`, or `default`."""
        ...

    def set(self, key: str, value: Any) -> Coroutine[Any, Any, None]:
        """Raises ToolFailure: INVALID_ARGUMENTS for what is no JSON, NO_SPACE beyond the size limits. The old value
        then stays.
        """
        ...

    def update(self, key: str, fn: Change) -> Coroutine[Any, Any, Any]:
        """Set `key` to `fn(its value, or None)` so that no other change is lost, and give the new value. Raises as
        `set` does.
        """
        ...

    def items(self) -> Coroutine[Any, Any, dict[str, Any]]:
        """Everything, as of one moment."""
        ...


class NoState:
    """The state of a call that belongs to no session. Raises ToolFailure(SESSION_NOT_FOUND), whatever is asked."""

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
            "this call belongs to no session, so there is no state: call the tool within a session",
        )


def is_key(key: object) -> bool:
    """Whether something may lie under `key`."""
    return (
        isinstance(key, str)
        and 0 < len(key) <= MAX_KEY_CHARS
        and not any("\ud800" <= character <= "\udfff" for character in key)
    )


def encode_value(key: str, value: Any, max_value_bytes: int = MAX_VALUE_BYTES) -> str:
    """`value` as JSON text. Raises ToolFailure as `SessionState.set` does."""
    if not is_key(key):
        raise ToolFailure(ErrorCode.INVALID_ARGUMENTS, f"a key of the state is text of 1 to {MAX_KEY_CHARS} characters")
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        size = len(text.encode())
    except (TypeError, ValueError, RecursionError) as error:
        sentence = f"the state takes JSON values only; '{key}' got {type(value).__name__}: {error}"
        raise ToolFailure(ErrorCode.INVALID_ARGUMENTS, sentence) from error
    if size > max_value_bytes:
        sentence = (
            f"the value for '{key}' is {size} bytes; the state takes at most {max_value_bytes} a value: keep large "
            "data in a file"
        )
        raise ToolFailure(ErrorCode.NO_SPACE, sentence)
    return text


def entry_size(key: str, text: str) -> int:
    """Bytes that a key and its value count for."""
    return len(key.encode()) + len(text.encode())


def full(key: str, size: int, max_state_bytes: int) -> ToolFailure:
    """What is raised for a value that fits by itself, and no more beside the others."""
    sentence = (
        f"with '{key}' the session's state would be {size} bytes; at most {max_state_bytes} fit: make other values "
        "smaller"
    )
    return ToolFailure(ErrorCode.NO_SPACE, sentence)


def contended(key: str) -> ToolFailure:
    """What is raised when others were faster MAX_ATTEMPTS times."""
    return ToolFailure(
        ErrorCode.INTERNAL, f"the state's '{key}' was changed by others {MAX_ATTEMPTS} times in a row; try again"
    )
