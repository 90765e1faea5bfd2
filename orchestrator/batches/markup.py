"""HTML and SVG for untrusted text.

Security: only this module converts text to Markup, and it escapes all text. The type checker rejects plain text in
place of Markup.
"""

import html
import re
from typing import NewType

from orchestrator.batches.figures import one_line

Markup = NewType("Markup", str)
"""Text that is HTML. The type checker rejects any other text."""

NOTHING = Markup("")
_NAME = re.compile(r"[a-z][a-zA-Z0-9-]*")
_VOID = frozenset({"meta", "br"})
_MOST_CHARS = 1000
"""Limit of the value of an attribute, in characters. A longer value is cut and ends with its length. Points of a line
are never cut.
"""


def text(value: str, max_chars: int = 200) -> Markup:
    """Return the text, escaped. Control and direction characters become visible, and markup has no effect."""
    return Markup(html.escape(one_line(value, max_chars), quote=True))


def element(name: str, *children: Markup, **attributes: str | float) -> Markup:
    """Return an element. An underscore in the name of an attribute becomes a hyphen; an underscore at the end is
    removed.
    """
    rendered = "".join(
        f' {_attribute(key)}="{_value(value, 10**6 if key == "points" else _MOST_CHARS)}"'
        for key, value in attributes.items()
    )
    if not _NAME.fullmatch(name):
        raise ValueError(f"'{name}' is not an element name: use letters, digits and hyphens")
    if name in _VOID:
        return Markup(f"<{name}{rendered}>")
    return Markup(f"<{name}{rendered}>{''.join(children)}</{name}>")


def join(parts: list[Markup], between: str = "") -> Markup:
    """Return the joined parts. `between`: text that is escaped."""
    return Markup(html.escape(between).join(parts))


def _attribute(key: str) -> str:
    """Return the HTML name of an attribute."""
    return key.rstrip("_").replace("_", "-")


def _value(value: str | float, max_chars: int) -> str:
    """Return the value of an attribute, escaped."""
    if isinstance(value, str):
        return html.escape(one_line(value, max_chars), quote=True)
    return f"{value:.1f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
