"""What reading `<tool_action>` tags gives: text, calls, malformed calls. Text + raw of calls + raw of errors = the
input.
"""

from dataclasses import dataclass

# Not frozen: a plain slotted record is made in half the time, and one is made for every chunk of every reply.


@dataclass(slots=True)
class Text:
    """Text outside of calls, byte for byte; the loop shows it at once. Every dialect's."""

    text: str


@dataclass(slots=True)
class Call:
    """A complete call. Argument values are strings, entities decoded."""

    name: str
    arguments: dict[str, str]
    raw: str


@dataclass(slots=True)
class Malformed:
    """A tag that is no call. `name` is None when none was read."""

    reason: str
    name: str | None
    raw: str


TagEvent = Text | Call | Malformed
