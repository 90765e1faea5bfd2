"""HTML and SVG that strangers' text cannot break out of: text becomes Markup only here, escaped."""

import html
import re
from typing import NewType

from orchestrator.batches.figures import one_line

Markup = NewType("Markup", str)
"""Text that is HTML already. The type checker keeps other text out."""

NOTHING = Markup("")
_NAME = re.compile(r"[a-z][a-zA-Z0-9-]*")
_VOID = frozenset({"meta", "br"})
_MOST_CHARS = 1000
"""Of an attribute's value; what is longer is cut, and that is told. A line's points are ours, and cut they would be no
line.
"""


def text(value: str, most: int = 200) -> Markup:
    """Of a stranger or of ours: control and direction characters visible, markup without effect, what is cut told."""
    return Markup(html.escape(one_line(value, most), quote=True))


def element(name: str, *children: Markup, **attributes: str | float) -> Markup:
    """One element. An underscore in an attribute's name is a hyphen, one at its end is left out; values are escaped."""
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
    """One after the other; `between` is text."""
    return Markup(html.escape(between).join(parts))


def _attribute(key: str) -> str:
    return key.rstrip("_").replace("_", "-")


def _value(value: str | float, most: int) -> str:
    if isinstance(value, str):
        return html.escape(one_line(value, most), quote=True)
    return f"{value:.1f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
