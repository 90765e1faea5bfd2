"""Reasoning in the text of a reply: blocks between marks, which models write in their own ways. It is not part of the
answer, and calls in it do not run.

Some models write only the end of their block, because the prompt already contains its beginning. Everything before the
last such end is reasoning.
"""

import re

from toolcrew.orchestrator.dialects.model import Chunk

THINK = "<think>"
THINK_END = "</think>"
REASONING = "toolcrew_reasoning"
"""The key of the first chunk of a reply that may begin with reasoning: the number of its characters, or True if only
its end mark will show where it ends. The client of the endpoint sets it.
"""
_PAIRS = {
    THINK: THINK_END,
    "<thinking>": "</thinking>",
    "<seed:think>": "</seed:think>",
    "<mm:think>": "</mm:think>",
    "[THINK]": "[/THINK]",
    "◁think▷": "◁/think▷",
    "<|START_THINKING|>": "<|END_THINKING|>",
    "<|begin_of_thought|>": "<|end_of_thought|>",
    "<|channel|>analysis<|message|>": "<|channel|>final<|message|>",
    "<reasoning>": "</reasoning>",
    "<thought>": "</thought>",
}
_ALSO_IN_ANSWERS = ("</reasoning>", "</thought>")
"""Ends that mean nothing without their beginning: documents have such elements."""
_LONE = {end: begin for begin, end in _PAIRS.items() if end not in _ALSO_IN_ANSWERS}
# A mark in quotes or backticks is mentioned, not used.
_LONE_END = re.compile(rf"(?<![`'\"])(?:{'|'.join(map(re.escape, _LONE))})(?![`'\"])")
LONGEST_MARK = max(map(len, [*_PAIRS, *_PAIRS.values()]))


def strip_thinking(text: str) -> str:
    """Return `text` after its reasoning, or "" when a block at its start never ends."""
    if end := find_lone_end(text):
        return text[end:].lstrip()
    opened = find_opened(text)
    return text if opened is None else text.partition(_PAIRS[opened])[2].lstrip()


def take_thinking(text: str) -> str:
    """Return the reasoning of a text without the marks around it; "" if there is none."""
    reasoning = text[: len(text) - len(strip_thinking(text))].strip()
    opened = find_opened(reasoning)
    ends = [end for end in _PAIRS.values() if reasoning.endswith(end)]
    return reasoning.removeprefix(opened or "").removesuffix(ends[0] if ends else "").strip()


def find_opened(text: str) -> str | None:
    """Return the mark with which the text opens a block of reasoning; None if it opens none."""
    start = text[: 4 * LONGEST_MARK].lstrip()
    return next((begin for begin in _PAIRS if start.startswith(begin)), None)


def may_open(text: str) -> bool:
    """Return whether a text that is still growing may turn out to begin with such a mark."""
    start = text.lstrip()
    return len(text) < 4 * LONGEST_MARK and any(begin.startswith(start) for begin in _PAIRS)


def find_end(text: str, opened: str) -> int:
    """Return the position after the end of the block that begins with `opened`; 0 if it does not end."""
    position = text.find(_PAIRS[opened])
    return position + len(_PAIRS[opened]) if position >= 0 else 0


def find_lone_end(text: str) -> int:
    """Return the position after the last end of reasoning that has no beginning in the text; 0 if there is none."""
    ends: dict[str, list[int]] = {}
    for match in _LONE_END.finditer(text):
        ends.setdefault(match[0], []).append(match.end())
    return max((found[-1] for end, found in ends.items() if len(found) > text.count(_LONE[end])), default=0)


def find_first_end(text: str, position: int = 0) -> int:
    """Return the position after the first end mark from `position` on; 0 if there is none."""
    match = _LONE_END.search(text, position)
    return match.end() if match is not None else 0


class LoneEndFinder:
    """Finds out whether a text that arrives in pieces has an end of reasoning without a beginning."""

    def __init__(self) -> None:
        self._tail = self._start = ""
        self.is_found = False

    def feed(self, text: str) -> None:
        """Read the next piece."""
        if text and not self.is_found:
            if len(self._start) < LONGEST_MARK:
                # A mark may arrive in several pieces.
                self._start = (self._start + text).lstrip()[:LONGEST_MARK]
            recent = self._tail + text
            self._tail = recent[-LONGEST_MARK:]
            self.is_found = find_opened(self._start) is None and find_lone_end(recent) > 0


def mark_reasoning(chunks: list[Chunk], text: str) -> None:
    """Write into the chunks of a whole reply with this text how many of its characters are reasoning."""
    if chunks and (end := find_lone_end(text)):
        chunks[0][REASONING] = end
