"""Shared parts of glob_tool and grep_tool: lines that are shown as they arrive, and notes about omitted results."""

from toolcrew.contract.guest_protocol import SearchAnswer
from toolcrew.contract.plurals import count
from toolcrew.workers.tools.base import ToolEnvironment
from toolcrew.workers.tools.text import MAX_OUTPUT_BYTES, decode


class FoundLines:
    """Collects the lines of a search. Shows each complete line to a caller that watches, once.

    A sorted result comes at the end; its stream `found` has the first lines before that, unsorted. `take` waits when
    the caller is slow.
    """

    def __init__(self, environment: ToolEnvironment) -> None:
        self._environment = environment
        self._data = bytearray()
        self._found = bytearray()
        self._shown = self._early_bytes = 0
        self._early: set[bytes] = set()

    def take(self, stream: str, data: bytes) -> None:
        # Limit the output: a program that has replaced the guest may send more than the request allows.
        if stream == "found":
            data = data[: MAX_OUTPUT_BYTES - self._early_bytes]
            self._early_bytes += len(data)
            self._found += data
            *whole, rest = bytes(self._found).split(b"\n")
            self._found = bytearray(rest)
            self._early.update(whole)
            self._show(whole)
            return
        self._data += data[: MAX_OUTPUT_BYTES - len(self._data)]
        whole_bytes = self._data.rfind(b"\n") + 1
        if self._environment.is_watched and whole_bytes > self._shown:
            lines = bytes(self._data[self._shown : whole_bytes]).split(b"\n")[:-1]
            self._shown = whole_bytes
            self._show([line for line in lines if line not in self._early] if self._early else lines)

    def _show(self, lines: list[bytes]) -> None:
        if lines:
            self._environment.show("stdout", decode(b"\n".join(lines) + b"\n"))

    def text(self) -> str:
        return decode(bytes(self._data))


def name_some(total: int, names: list[str]) -> str:
    """Return the names and the number of further ones, such as `a, b and 3 more`."""
    more = total - len(names)
    return ", ".join(names) + (f" and {more} more" if more > 0 else "")


def build_common_notes(answer: SearchAnswer, arguments: str) -> list[str]:
    """Return notes on paths that ignore rules hide, on an incomplete search, and the guest's hints.

    `arguments`: the names of the arguments with which a caller can limit a search.
    """
    notes = []
    if answer.ignored:
        notes.append(f"[{count(answer.ignored, 'path')} hidden by ignore rules; include_ignored=true searches them]")
    if answer.partial:
        notes.append(
            f"[partial: the search reached its limit of time or memory, and there may be more; narrow {arguments}]"
        )
    return notes + [f"[{hint}]" for hint in answer.hints]
