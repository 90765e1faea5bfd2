"""Fragments of native tool calls, and to which call each belongs: servers agree on little but the field names."""

from dataclasses import dataclass, field
from typing import Any

LONGEST_NAME = 256
"""No tool has a longer one: fragments beyond are dropped, since a name that grows without end would cost its square."""


@dataclass
class PartialCall:
    """A call in the making. Arguments stay a list of fragments until the reply has ended: joining at each delta would
    be quadratic.
    """

    index: int
    id: str = ""
    name: str = ""
    fragments: list[str] = field(default_factory=list)

    def is_phantom(self) -> bool:
        """Nothing of it but an index came."""
        return not (self.id or self.name or self.fragments)


@dataclass(frozen=True)
class Fragment:
    """One entry of a delta's `tool_calls`. None: not sent. Empty strings are not sent, too."""

    index: int | None
    id: str | None
    name: str | None
    arguments: Any


def parse_fragment(entry: Any) -> Fragment | None:
    """An entry as far as it makes sense, None when it is no object."""
    if not isinstance(entry, dict):
        return None
    function = entry.get("function")
    function = function if isinstance(function, dict) else {}
    return Fragment(
        _index(entry.get("index")), _text(entry.get("id")), _text(function.get("name")), function.get("arguments")
    )


def _index(value: Any) -> int | None:
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 10:
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _text(value: Any) -> str | None:
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    return value if isinstance(value, str) and value else None


class CallSlots:
    """The calls of one reply in the making, in order of index, then of arrival."""

    def __init__(self) -> None:
        self._calls: list[PartialCall] = []
        self._by_index: dict[int, PartialCall] = {}
        self._by_id: dict[str, PartialCall] = {}
        self._last: PartialCall | None = None
        self._next_index = 0

    def in_order(self) -> list[PartialCall]:
        return sorted((call for call in self._calls if not call.is_phantom()), key=lambda call: call.index)

    def place(self, fragment: Fragment) -> PartialCall:
        """The call that `fragment` belongs to, a new one if need be, with the fragment's id and name taken in."""
        call = self._without_index(fragment) if fragment.index is None else self._with_index(fragment, fragment.index)
        if fragment.id and not call.id:
            call.id = fragment.id
            self._by_id.setdefault(fragment.id, call)
        if fragment.name:
            _take_name(call, fragment.name)
        self._last = call
        return call

    def _with_index(self, fragment: Fragment, index: int) -> PartialCall:
        known = self._by_id.get(fragment.id) if fragment.id else None
        if known is not None and known.index == index:
            return known
        call = self._by_index.get(index)
        if call is None or _is_another(call, fragment):
            return self._open(index)
        return call

    def _without_index(self, fragment: Fragment) -> PartialCall:
        if fragment.id in self._by_id:
            return self._by_id[fragment.id]
        last = self._last
        if last is None or (fragment.id and last.id) or (fragment.name and last.name):
            return self._open(self._next_index)
        return last

    def _open(self, index: int) -> PartialCall:
        call = PartialCall(index)
        self._calls.append(call)
        self._by_index[index] = call
        self._next_index = max(self._next_index, index + 1)
        return call


def _is_another(call: PartialCall, fragment: Fragment) -> bool:
    """Whether a fragment at an occupied index starts another call there: some servers send index 0 for every call."""
    if not fragment.name:
        return False
    if fragment.id and call.id:
        return fragment.id != call.id
    if fragment.id:
        return bool(call.name and call.fragments)
    # Without an id to compare, only a name that cannot belong to the call any more tells.
    return bool(call.name and call.fragments) and fragment.name != call.name


def _take_name(call: PartialCall, name: str) -> None:
    """A name equal to what we have is a repetition; another fragment before the arguments continues it."""
    if not call.name:
        call.name = name
    elif name != call.name and not call.fragments and len(call.name) <= LONGEST_NAME:
        call.name += name
