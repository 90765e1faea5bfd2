"""Sessions' states in the memory of one process: what tests of tools have in place of Redis."""

import copy
import inspect
import json
from collections import defaultdict
from typing import Any

from contract.functions.session_state import MAX_STATE_BYTES, Change, encode_value, entry_size, full


class MemoryStates:
    """A state for each session of each tenant. For calls that are made one after the other."""

    def __init__(self) -> None:
        self._texts: dict[tuple[str, str], dict[str, str]] = defaultdict(dict)

    def open(self, tenant: str, session: str) -> "MemoryState":
        return MemoryState(self._texts[tenant, session])


class MemoryState:
    """One session's state, with the limits and errors of the one in Redis."""

    def __init__(self, texts: dict[str, str]) -> None:
        self._texts = texts

    async def get(self, key: str, default: Any = None) -> Any:
        text = self._texts.get(key)
        return copy.copy(default) if text is None else json.loads(text)

    async def set(self, key: str, value: Any) -> None:
        text = encode_value(key, value)
        size = sum(entry_size(*entry) for entry in {**self._texts, key: text}.items())
        if size > MAX_STATE_BYTES:
            raise full(key, size, MAX_STATE_BYTES)
        self._texts[key] = text

    async def update(self, key: str, fn: Change) -> Any:
        while True:
            before = self._texts.get(key)
            value = fn(json.loads(before or "null"))
            if inspect.isawaitable(value):
                value = await value
            # Tasks of one call may change it while the new value is awaited.
            if self._texts.get(key) == before:
                await self.set(key, value)
                return json.loads(self._texts[key])

    async def items(self) -> dict[str, Any]:
        return {key: json.loads(text) for key, text in self._texts.items()}
