"""What glob_tool and grep_tool have in common: lines that are shown as they come, and the words for what was left
out.
"""

from collections.abc import Mapping
from typing import Any

from workers.tools.base import ToolEnvironment
from workers.tools.text import MAX_OUTPUT_BYTES, decode


class FoundLines:
    """Gathers the lines a search sends, and shows each as soon as it is whole to whoever watches. `take` returns late
    when they are slow.
    """

    def __init__(self, environment: ToolEnvironment) -> None:
        self._environment = environment
        self._data = bytearray()
        self._shown = 0

    def take(self, _: str, data: bytes) -> None:
        # Who has taken the guest's place may send more than was asked for.
        self._data += data[: MAX_OUTPUT_BYTES - len(self._data)]
        whole = self._data.rfind(b"\n") + 1
        if self._environment.is_watched and whole > self._shown:
            self._environment.show("stdout", decode(bytes(self._data[self._shown : whole])))
            self._shown = whole

    def text(self) -> str:
        return decode(bytes(self._data))


def count(number: int, noun: str) -> str:
    """`1 file`, `2 files`, `3 matches`."""
    ending = "" if number == 1 else "es" if noun.endswith("ch") else "s"
    return f"{number} {noun}{ending}"


def name_some(total: int, names: list[str]) -> str:
    """Names that were told of, and how many there are besides: `a, b and 3 more`."""
    more = total - len(names)
    return ", ".join(names) + (f" and {more} more" if more > 0 else "")


def build_common_notes(done: Mapping[str, Any], what: str) -> list[str]:
    """Notes on rules that hold in part and on a search that was not done in time. `what` makes a search smaller."""
    notes = [f"[ignore rules: {'; '.join(done['bad_rules'])}]"] if done["bad_rules"] else []
    if done["partial"]:
        notes.append(f"[partial: time or memory was up before all was searched, and there may be more; narrow {what}]")
    return notes
