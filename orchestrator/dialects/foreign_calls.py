"""Calls in the text of a reply, in the notations that models learn in training. A server whose parser does not fit its
model returns them as text. They never run, but such a text is no answer.
"""

import json
import re
from collections.abc import Collection, Iterator
from typing import Any

from toolcrew.contract.json_limits import has_more_values_in_text
from toolcrew.contract.schema import MAX_VALUES
from toolcrew.orchestrator.dialects.fences import strip_fence

FOREIGN_CALL = (
    "this call was written as text in another notation, so it was not run. Call the tool in the way that the request "
    "describes. (If every reply is like this, the model server has no parser for the calls of its model.)"
)
_OPENINGS = (
    "<tool_call>",
    "<tool_calls>",
    "<|tool_call|>",
    "<|tool_call>",
    "<|tool_calls_section_begin|>",
    "<|tool_call_begin|>",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<|tool▁calls▁begin|>",
    "<｜DSML｜",
    "<minimax:tool_call>",
    "<seed:tool_call>",
    "<longcat_tool_call>",
    "<function_calls>",
    "<function_call>",
    "<function=",
    "<invoke name=",
    "<|python_tag|>",
    "<|channel|>commentary to=",
    "[TOOL_CALLS]",
    "<TOOLCALL>",
    "<|START_ACTION|>",
)
# In the middle of a line, and in a code block, an opening is mentioned and not used.
_OPENING = re.compile(rf"^[ \t]*(?:{'|'.join(map(re.escape, _OPENINGS))})", re.MULTILINE)
_FENCE = re.compile(r"^ {0,3}(?:```|~~~)", re.MULTILINE)
_NAME_CHARS = 300
"""Characters after an opening in which the name of the tool stands."""
_MAX_CHARS = 1024 * 1024
"""Longer texts are not parsed as JSON."""
_ARGUMENTS = ("arguments", "parameters")


def find_foreign_call(text: str, names: Collection[str]) -> str | None:
    """Return the name of the tool that a reply without calls tries to call; None if its text is no such call. `text`:
    the text without reasoning. `names`: the offered tools.
    """
    opening = _OPENING.search(text)
    if opening is not None and sum(1 for _ in _FENCE.finditer(text, 0, opening.start())) % 2 == 0:
        near = text[opening.start() : opening.end() + _NAME_CHARS]
        words = set(re.findall(r"[\w-]+", near))
        return next((name for name in names if name in words), None)
    return next((name for name in _read_names(text) if name in names), None)


def _read_names(text: str) -> Iterator[str]:
    """Yield the names of the calls in a text that is one JSON value, alone or in a code fence."""
    text = strip_fence(text.strip())
    if not text.startswith(("{", "[")) or len(text) > _MAX_CHARS or has_more_values_in_text(text, MAX_VALUES):
        return
    try:
        value = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return
    if isinstance(value, dict) and isinstance(value.get("tool_calls"), list):
        value = value["tool_calls"]
    for call in value if isinstance(value, list) else [value]:
        yield from _read_name(call)


def _read_name(call: Any) -> Iterator[str]:
    function = call.get("function", call) if isinstance(call, dict) else None
    if isinstance(function, dict) and any(isinstance(function.get(key), dict | str) for key in _ARGUMENTS):
        name = function.get("name")
        if isinstance(name, str):
            yield name
