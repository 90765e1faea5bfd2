"""What a session remembers between calls: JSON values by key, read and changed by its tools."""

import copy
import inspect
import json
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol

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


class SessionState(Protocol):
    """Values by key, versioned. What is got is a copy: changing it changes nothing until it is set."""

    async def get(self, key: str, default: Any = None) -> Any:
        """The value of `key`, or `default`."""
        ...

    async def set(self, key: str, value: Any) -> None:
        """Raises ToolFailure: INVALID_ARGUMENTS for what is no JSON, NO_SPACE beyond the size limits. The old value then stays."""
        ...

    async def update(self, key: str, fn: Change) -> Any:
        """Set `key` to `fn(its value, or None)` so that no other change is lost, and give the new value. Raises as `set` does."""
        ...

    async def items(self) -> dict[str, Any]:
        """Everything, as of one moment."""
        ...


@dataclass(frozen=True)
class _Entry:
    version: int
    text: str


_ABSENT = _Entry(0, "null")


class MemoryState:
    """A state in this process. Safe under concurrent use by tasks, threads and loops; gone with the process."""

    def __init__(self, *, max_value_bytes: int = MAX_VALUE_BYTES, max_state_bytes: int = MAX_STATE_BYTES) -> None:
        self._max_value_bytes = max_value_bytes
        self._max_state_bytes = max_state_bytes
        self._lock = threading.Lock()
        self._entries: dict[str, _Entry] = {}
        self._size = 0

    async def get(self, key: str, default: Any = None) -> Any:
        with self._lock:
            entry = self._entries.get(key)
        return copy.copy(default) if entry is None else json.loads(entry.text)

    async def set(self, key: str, value: Any) -> None:
        text = self._encode(key, value)
        with self._lock:
            self._store(key, text)

    async def update(self, key: str, fn: Change) -> Any:
        for _ in range(MAX_ATTEMPTS):
            with self._lock:
                before = self._entries.get(key, _ABSENT)
            value = fn(json.loads(before.text))
            if inspect.isawaitable(value):
                value = await value
            text = self._encode(key, value)
            with self._lock:
                if self._entries.get(key, _ABSENT).version == before.version:
                    self._store(key, text)
                    return json.loads(text)
        raise ToolFailure(ErrorCode.INTERNAL, f"the state's '{key}' was changed by others {MAX_ATTEMPTS} times in a row; try again")

    async def items(self) -> dict[str, Any]:
        with self._lock:
            entries = dict(self._entries)
        return {key: json.loads(entry.text) for key, entry in entries.items()}

    def _encode(self, key: str, value: Any) -> str:
        if not isinstance(key, str) or not 0 < len(key) <= MAX_KEY_CHARS:
            raise ToolFailure(ErrorCode.INVALID_ARGUMENTS, f"a key of the state is text of 1 to {MAX_KEY_CHARS} characters")
        try:
            text = json.dumps(value, ensure_ascii=False, allow_nan=False)
            size = len(text.encode())
        except (TypeError, ValueError, RecursionError) as error:
            sentence = f"the state takes JSON values only; '{key}' got {type(value).__name__}: {error}"
            raise ToolFailure(ErrorCode.INVALID_ARGUMENTS, sentence) from error
        if size > self._max_value_bytes:
            sentence = (
                f"the value for '{key}' is {size} bytes; the state takes at most {self._max_value_bytes} a value: keep large data in a file"
            )
            raise ToolFailure(ErrorCode.NO_SPACE, sentence)
        return text

    def _store(self, key: str, text: str) -> None:
        """Called with the lock held."""
        before = self._entries.get(key)
        size = self._size + _size(key, text) - (_size(key, before.text) if before is not None else 0)
        if size > self._max_state_bytes:
            sentence = (
                f"with '{key}' the session's state would be {size} bytes; at most {self._max_state_bytes} fit: make other values smaller"
            )
            raise ToolFailure(ErrorCode.NO_SPACE, sentence)
        self._entries[key] = _Entry((before or _ABSENT).version + 1, text)
        self._size = size


def _size(key: str, text: str) -> int:
    return len(key.encode(errors="replace")) + len(text.encode())
