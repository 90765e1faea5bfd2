"""Events of the tag parser: text, calls, malformed calls. The texts and raw texts of all events, joined in order, equal
the input.
"""

from dataclasses import dataclass

# Not frozen: creating an unfrozen slotted record takes half the time, and every chunk of every reply creates one.


@dataclass(slots=True)
class Text:
    """Text outside of calls, byte for byte, in every dialect. The loop shows it at once."""

    text: str


@dataclass(slots=True)
class TagCall:
    """A complete call. Argument values are strings with entities decoded."""

    name: str
    arguments: dict[str, str]
    raw: str


@dataclass(slots=True)
class MalformedTag:
    """A tag that is not a valid call. `name` is None when no name was read."""

    reason: str
    name: str | None
    raw: str


TagEvent = Text | TagCall | MalformedTag
