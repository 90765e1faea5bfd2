"""Addresses by which Flower and the API's pages name each other's: a task there, a call here."""

import re
from urllib.parse import quote

_SHOWN_CALL = re.compile(r"call ([A-Za-z0-9_-]{1,64})")


def flower_task_url(base: str, task_id: str) -> str:
    """Flower's page of a task. `base`: TOOLCREW_FLOWER_URL."""
    return f"{base.rstrip('/')}/task/{quote(task_id, safe='')}"


def call_page_url(base: str, call_id: str) -> str:
    """The page of a call. `base`: TOOLCREW_PAGE_URL."""
    return f"{base.rstrip('/')}/calls/{quote(call_id, safe='')}"


def parse_shown_call(shown: object) -> str | None:
    """The id of the call, from what Flower shows in place of a task's arguments (task_messages.py); None for what is not ours: whoever may send events
    may write anything there."""
    found = _SHOWN_CALL.fullmatch(shown) if isinstance(shown, str) else None
    return found[1] if found else None
