"""How far a supervisor is with its call, in memory that it shares with PID 1."""

from __future__ import annotations

import mmap

_GIVEN, _TAKEN, _SETTLED = range(3)


class Progress:
    """Given, taken, settled. It reaches PID 1 even from a supervisor that was killed, or whose pipe is full of output nobody takes."""

    __slots__ = ("_memory",)

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 1)

    def reset(self) -> None:
        """PID 1 gives a call; nothing of it has begun."""
        self._memory[0] = _GIVEN

    def take(self) -> None:
        """From here on something of the call may have happened."""
        self._memory[0] = _TAKEN

    def settle(self) -> None:
        """Nothing of the call runs any more."""
        self._memory[0] = _SETTLED

    @property
    def is_taken(self) -> bool:
        return self._memory[0] != _GIVEN

    @property
    def is_settled(self) -> bool:
        return self._memory[0] == _SETTLED
