"""A mapping that keeps what was used last."""

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Recent(Generic[K, V]):
    """At most `size` entries; a new one drops the one whose last use is longest ago. Reading and writing are uses."""

    def __init__(self, size: int) -> None:
        if size < 1:
            raise ValueError("size must be at least 1")
        self._size = size
        self._entries: OrderedDict[K, V] = OrderedDict()
        self.hits = self.misses = 0

    def get(self, key: K, default: V | None = None) -> V | None:
        if key not in self._entries:
            self.misses += 1
            return default
        self.hits += 1
        return self._entries[key]

    def put(self, key: K, value: V) -> None:
        self._entries[key] = value
        self._entries.move_to_end(key)
        while len(self._entries) > self._size:
            self._entries.popitem(last=False)

    def __contains__(self, key: K) -> bool:
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)
