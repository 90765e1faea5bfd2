"""Random JSON decisions. Any model output is either a decision or a ValueError with a usable message. Well-formed
output is parsed back unchanged.
"""

import contextlib
import json
from random import Random
from typing import Any

from toolcrew.orchestrator.dialects.decisions import ToolDecisionOutput, find_tool_decision, parse_tool_decision

_PIECES = (
    '{"tool": ', '"t"', "null", ', "arguments": ', "{}", "{", "}", ', "reply": ', '"hi"', '"', "\\", "\\ud83d", "\ud83d", "[", "]", ",", "1e999",
    "NaN", "```json\n", "\n```", "<think>", "</think>", "\0", " ", "x", "ü",
)  # fmt: skip


def check_decision(random: Random) -> None:
    """Check pieces in any order, and a decision surrounded by text."""
    text = "".join(random.choices(_PIECES, k=random.randrange(24)))
    with contextlib.suppress(ValueError):
        _check_encodable(parse_tool_decision(text))
    try:
        parse_tool_decision(text)
    except ValueError as error:
        str(error).encode()
    before, decision, behind = find_tool_decision(text)
    assert decision is not None or (before, behind) == (text, "")
    written = ToolDecisionOutput(
        "t", {"".join(random.choices('ab"\\ü', k=3)): random.choice((1, None, "x", [True], {"y": "}"}))}
    )
    raw = json.dumps({"tool": written.tool, "arguments": written.arguments}, ensure_ascii=random.random() < 0.5)
    assert parse_tool_decision(raw) == written
    assert find_tool_decision(f"a {raw} b") == ("a ", written, " b")


def _check_encodable(decision: ToolDecisionOutput) -> None:
    value: Any = [decision.tool, decision.arguments, decision.reply]
    json.dumps(value, ensure_ascii=False).encode()
