"""One replacement of text, as an edit request asks for it."""

from __future__ import annotations

from guest.failures import INVALID_ARGUMENTS, RequestFailure

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_KEYS = {"old_string", "new_string", "replace_all"}


class Edit:
    """One replacement that the call requests. `name` starts the error messages about this edit."""

    __slots__ = ("name", "new", "old", "replace_all")

    def __init__(self, fields: Any, number: int, count: int) -> None:
        self.name = "" if count == 1 else f"edit {number} of {count}: "
        if not isinstance(fields, dict) or not fields.keys() <= _KEYS:
            raise RequestFailure(INVALID_ARGUMENTS, f"{self.name}an edit is an object with {', '.join(sorted(_KEYS))}")
        old = fields.get("old_string")
        new = fields.get("new_string")
        replace_all = fields.get("replace_all", False)
        if not isinstance(old, str) or not isinstance(new, str) or not isinstance(replace_all, bool):
            raise RequestFailure(
                INVALID_ARGUMENTS, f"{self.name}old_string and new_string must be texts, replace_all a boolean"
            )
        self.old: str = old
        self.new: str = new
        self.replace_all = replace_all
