"""HTML and SVG for untrusted text: text becomes Markup in this module only, escaped."""

import html
import re
from typing import NewType

from orchestrator.batches.figures import one_line

Markup = NewType("Markup", str)
"""Text that is HTML. The type checker keeps other text out."""

NOTHING = Markup("")
_NAME = re.compile(r"[a-z][a-zA-Z0-9-]*")
_VOID = frozenset({"meta", "br"})
_MOST_CHARS = 1000
"""Of the value of an attribute; a longer one is cut and says its length. Points of a line are never cut."""


def text(value: str, most: int = 200) -> Markup:
    """Escape text: control and direction characters become visible, and markup has no effect."""
    return Markup(html.escape(one_line(value, most), quote=True))


def element(name: str, *children: Markup, **attributes: str | float) -> Markup:
    """Build an element. An underscore in the name of an attribute is a hyphen, one at its end is left out."""
    shown = "".join(
        f' {_attribute(key)}="{_value(value, 10**6 if key == "points" else _MOST_CHARS)}"'
        for key, value in attributes.items()
    )
    if not _NAME.fullmatch(name):
        raise ValueError(f"'{name}' is no name of an element: give one of letters, digits and hyphens")
    if name in _VOID:
        return Markup(f"<{name}{shown}>")
    return Markup(f"<{name}{shown}>{''.join(children)}</{name}>")


def join(parts: list[Markup], between: str = "") -> Markup:
    """`between`: text."""
    return Markup(html.escape(between).join(parts))


def _attribute(key: str) -> str:
    return key.rstrip("_").replace("_", "-")


def _value(value: str | float, most: int) -> str:
    if isinstance(value, str):
        return html.escape(one_line(value, most), quote=True)
    return f"{value:.1f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
