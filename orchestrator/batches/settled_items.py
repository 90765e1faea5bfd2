"""Items of which nothing more is to come: 64 bits of the id and a small number each, for all of a batch in less than 2
MB.
"""

from array import array

_EMPTY = 0
_HASH_MASK = 2**64 - 1


class SettledItems:
    """A number by id. Ids are kept as hashes of 64 bits, keyed anew in each process; nothing is ever taken out."""

    def __init__(self) -> None:
        self._hashes = array("Q", bytes(8 * 1024))
        self._states = array("I", bytes(4 * 1024))
        self._used = 0

    def __len__(self) -> int:
        return self._used

    def get(self, item: str) -> int | None:
        """What was put under this id."""
        slot = self._slot(_hash(item))
        return None if self._hashes[slot] == _EMPTY else self._states[slot]

    def put(self, item: str, state: int) -> None:
        """Put or replace; `state`: at least 0, below 2**32."""
        if 3 * self._used > 2 * len(self._hashes):
            self._grow()
        hashed = _hash(item)
        slot = self._slot(hashed)
        self._used += self._hashes[slot] == _EMPTY
        self._hashes[slot], self._states[slot] = hashed, state

    def _slot(self, hashed: int) -> int:
        """Where it is, or where it would have to be."""
        mask = len(self._hashes) - 1
        slot = hashed & mask
        while self._hashes[slot] not in (_EMPTY, hashed):
            slot = (slot + 1) & mask
        return slot

    def _grow(self) -> None:
        hashes, states = self._hashes, self._states
        self._hashes = array("Q", bytes(16 * len(hashes)))
        self._states = array("I", bytes(8 * len(states)))
        for hashed, state in zip(hashes, states, strict=True):
            if hashed != _EMPTY:
                slot = self._slot(hashed)
                self._hashes[slot], self._states[slot] = hashed, state


def _hash(item: str) -> int:
    return hash(item) & _HASH_MASK or 1
