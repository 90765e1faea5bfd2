"""Assigns fragments of native tool calls to calls. Servers differ in everything except the field names."""

import json
from dataclasses import dataclass, field
from typing import Any

from toolcrew.orchestrator.dialects.reply_fields import CALL_FIELDS, FUNCTION_FIELDS, FieldCollector

LONGEST_NAME = 256
"""Limit of the characters of a call's name, more than any tool name has. Further fragments are dropped: appending
without a limit would take quadratic time.
"""


@dataclass
class PartialCall:
    """A call that is being received.

    The arguments remain a list of fragments until the reply ends, because joining them at each delta would take
    quadratic time.
    """

    index: int
    id: str = ""
    name: str = ""
    fragments: list[str] = field(default_factory=list)
    begins_whole: bool | None = None
    """Whether the first fragment is one whole JSON object; None: not read yet."""
    fields: FieldCollector | None = None
    """Other fields of the call, such as a signature; those of its function are in `function`."""

    def is_phantom(self) -> bool:
        """Return whether the call has only an index, and neither id, name nor arguments."""
        return not (self.id or self.name or self.fragments)


@dataclass(frozen=True)
class Fragment:
    """One entry of a delta's `tool_calls`. A field that is None or an empty string was not sent."""

    index: int | None
    id: str | None
    name: str | None
    arguments: Any
    fields: dict[str, Any] = field(default_factory=dict)


def parse_fragment(entry: Any) -> Fragment | None:
    """Return the valid parts of an entry of `tool_calls`, or None when the entry is not an object."""
    if not isinstance(entry, dict):
        return None
    function = entry.get("function")
    if not isinstance(function, dict):
        # Some servers put the name and the arguments into the entry itself.
        function = {key: entry[key] for key in FUNCTION_FIELDS if key in entry}
        entry = {key: value for key, value in entry.items() if key not in FUNCTION_FIELDS}
    return Fragment(
        _parse_index(entry.get("index")),
        _parse_text(entry.get("id")),
        _parse_text(function.get("name")),
        function.get("arguments"),
        _find_fields(entry, function),
    )


def _find_fields(entry: dict[str, Any], function: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of the entry that the chat format does not define."""
    fields = {key: value for key, value in entry.items() if key not in CALL_FIELDS}
    of_function = {key: value for key, value in function.items() if key not in FUNCTION_FIELDS}
    return {**fields, "function": of_function} if of_function else fields


def _parse_index(value: Any) -> int | None:
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 10:
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _parse_text(value: Any) -> str | None:
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    return value if isinstance(value, str) and value else None


class CallSlots:
    """The partial calls of one reply, ordered by index, then by arrival."""

    def __init__(self) -> None:
        self._calls: list[PartialCall] = []
        self._by_index: dict[int, PartialCall] = {}
        self._by_id: dict[str, PartialCall] = {}
        self._last: PartialCall | None = None
        self._next_index = 0

    def in_order(self) -> list[PartialCall]:
        return sorted((call for call in self._calls if not call.is_phantom()), key=lambda call: call.index)

    def assign(self, fragment: Fragment) -> PartialCall:
        """Return the call that `fragment` belongs to. Adds the fragment's id and name to the call, and creates the call
        if it is new.
        """
        call = (
            self._find_without_index(fragment)
            if fragment.index is None
            else self._find_by_index(fragment, fragment.index)
        )
        if fragment.id and not call.id:
            call.id = fragment.id
            self._by_id.setdefault(fragment.id, call)
        if fragment.name:
            _add_name(call, fragment.name)
        self._last = call
        return call

    def _find_by_index(self, fragment: Fragment, index: int) -> PartialCall:
        same_id = self._by_id.get(fragment.id) if fragment.id else None
        # A continuation has no name. Some servers count its index up.
        call = same_id if same_id is not None and (same_id.index == index or not fragment.name) else None
        call = call or self._by_index.get(index)
        if call is None and self._last is not None and _continues(self._last, fragment):
            return self._last
        if call is None or _starts_new_call(call, fragment):
            return self._open(index)
        return call

    def _find_without_index(self, fragment: Fragment) -> PartialCall:
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


def _continues(call: PartialCall, fragment: Fragment) -> bool:
    """Return whether a fragment at an unused index continues the last call: it has only arguments, and the call does
    not have all of its own. Some servers count the index up at each fragment, or number later calls differently.
    """
    has_only_arguments = bool(fragment.arguments) and not fragment.id and not fragment.name
    return has_only_arguments and not (call.fragments and _begins_whole(call))


def _starts_new_call(call: PartialCall, fragment: Fragment) -> bool:
    """Return whether a fragment at an occupied index starts another call. Some servers send index 0 for every call."""
    if not fragment.name:
        return False
    if fragment.id == call.id or (not fragment.id and fragment.name == call.name):
        return _is_another_whole_call(call, fragment)
    if fragment.id and call.id:
        return True
    if fragment.id:
        return bool(call.name and call.fragments)
    # Without an id, only a name that cannot continue this call's name proves another call.
    return bool(call.name and call.fragments)


def _is_another_whole_call(call: PartialCall, fragment: Fragment) -> bool:
    """Return whether a fragment repeats the name of a whole call (or its id too) with another whole object as
    arguments. Only the first fragment of a call is read, and only once, so that the time is linear.
    """
    text = fragment.arguments if isinstance(fragment.arguments, str) else ""
    if len(call.fragments) != 1 or not text or (fragment.id and text == call.fragments[0]):
        return False
    return _begins_whole(call) and is_object(text)


def _begins_whole(call: PartialCall) -> bool:
    if call.begins_whole is None:
        call.begins_whole = is_object(call.fragments[0])
    return call.begins_whole


def is_object(text: str) -> bool:
    """Return whether a text is one whole JSON object."""
    try:
        return text.lstrip().startswith("{") and isinstance(json.loads(text, strict=False), dict)
    except (ValueError, RecursionError):
        return False


def _add_name(call: PartialCall, name: str) -> None:
    """Add a fragment of a name. An equal name is a repetition; any other fragment before the arguments is appended."""
    if not call.name:
        call.name = name
    elif name != call.name and not call.fragments and len(call.name) <= LONGEST_NAME:
        call.name += name
