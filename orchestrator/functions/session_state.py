"""State of a session in the memory of this process."""

import copy
import inspect
import json
import threading
from dataclasses import dataclass
from typing import Any

from toolcrew.contract.functions.session_state import (
    MAX_ATTEMPTS,
    MAX_STATE_BYTES,
    MAX_VALUE_BYTES,
    Change,
    contention_error,
    encode_value,
    entry_size,
    state_full_error,
)


@dataclass(frozen=True)
class _Entry:
    version: int
    text: str


_ABSENT = _Entry(0, "null")


class MemoryState:
    """State of a session in this process. Lost when the process ends.

    Tasks, threads and event loops can use one state concurrently. `update` compares versions and retries, so that `fn`
    runs without a lock and no update is lost.
    """

    def __init__(self, *, max_value_bytes: int = MAX_VALUE_BYTES, max_state_bytes: int = MAX_STATE_BYTES) -> None:
        self._max_value_bytes = max_value_bytes
        self._max_state_bytes = max_state_bytes
        self._lock = threading.Lock()
        self._entries: dict[str, _Entry] = {}
        self._size = 0

    async def get(self, key: str, default: Any = None) -> Any:
        """Return a copy of the value of `key`, or of `default`."""
        with self._lock:
            entry = self._entries.get(key)
        return copy.copy(default) if entry is None else json.loads(entry.text)

    async def set(self, key: str, value: Any) -> None:
        """Store a value. Raises ToolFailure when the value or the state exceeds its size limit."""
        text = encode_value(key, value, self._max_value_bytes)
        with self._lock:
            self._store(key, text)

    async def update(self, key: str, fn: Change) -> Any:
        """Replace a value with `fn(value)` and return the new value. Repeats `fn` after a concurrent change."""
        for _ in range(MAX_ATTEMPTS):
            with self._lock:
                before = self._entries.get(key, _ABSENT)
            # `fn` runs without the lock, because it may be slow or async. The version check below detects a concurrent
            # change.
            value = fn(json.loads(before.text))
            if inspect.isawaitable(value):
                value = await value
            text = encode_value(key, value, self._max_value_bytes)
            with self._lock:
                if self._entries.get(key, _ABSENT).version == before.version:
                    self._store(key, text)
                    return json.loads(text)
        raise contention_error(key)

    async def items(self) -> dict[str, Any]:
        """Return copies of all values."""
        with self._lock:
            entries = dict(self._entries)
        return {key: json.loads(entry.text) for key, entry in entries.items()}

    def _store(self, key: str, text: str) -> None:
        """Store a value. The caller holds the lock."""
        before = self._entries.get(key)
        size = self._size + entry_size(key, text) - (entry_size(key, before.text) if before is not None else 0)
        if size > self._max_state_bytes:
            raise state_full_error(key, size, self._max_state_bytes)
        self._entries[key] = _Entry((before or _ABSENT).version + 1, text)
        self._size = size
