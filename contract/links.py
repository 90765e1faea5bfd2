"""Addresses by which Flower and the API's pages name each other's: a task there, a call here."""

import re
from urllib.parse import quote

_SHOWN_CALL = re.compile(r"call ([A-Za-z0-9_-]{1,64})(?:, (?:tenant|session|run) [A-Za-z0-9_-]{1,64}){0,3}")


def flower_task_url(base: str, task_id: str) -> str:
    """Flower's page of a task. `base`: TOOLCREW_FLOWER_URL."""
    return f"{base.rstrip('/')}/task/{quote(task_id, safe='')}"


def call_page_url(base: str, call_id: str) -> str:
    """The page of a call. `base`: TOOLCREW_PAGE_URL."""
    return f"{base.rstrip('/')}/calls/{quote(call_id, safe='')}"


def show_call(call_id: str, tenant: str, session: str | None, run: str | None) -> str:
    """Return the text that Flower shows in place of a task's arguments."""
    parts = {"call": call_id, "tenant": tenant, "session": session, "run": run}
    return ", ".join(f"{name} {value}" for name, value in parts.items() if value)


def parse_shown_call(shown: object) -> str | None:
    """Return the id of the call from the text of `show_call`; None for any other text. Every process that may send
    events can write any text there.
    """
    found = _SHOWN_CALL.fullmatch(shown) if isinstance(shown, str) else None
    return found[1] if found else None
