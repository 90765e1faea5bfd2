"""Conversion of the return value or exception of an operator's tool into an Outcome.

Sizes are limited, and every cut is reported.
"""

import json
from typing import Any

from pydantic import JsonValue

from toolcrew.contract.calls import MAX_OUTPUT_CHARS, ToolCall, ToolResult
from toolcrew.contract.errors import ErrorCode
from toolcrew.contract.functions.call_outputs import build_failure, build_result
from toolcrew.workers.tools.base import Outcome
from toolcrew.workers.tools.text import MAX_LINES, MAX_OUTPUT_BYTES

MAX_METADATA_BYTES = 64 * 1024
NEWLINE = "\n"


def build_outcome(call: ToolCall, value: Any) -> Outcome:
    """Return the outcome for the return value `value`. Raises any error from methods of `value`."""
    return _limit_outcome(build_result(call, value))


def build_error_outcome(call: ToolCall, error: BaseException) -> Outcome:
    """Return the outcome for an exception. The model sees its type and text, or the code and message of a
    ToolFailure.
    """
    return _limit_outcome(build_failure(call, error))


def _limit_outcome(result: ToolResult) -> Outcome:
    output, is_cut = (None, False) if result.output is None else cut_output(result.name, result.output)
    return Outcome(
        output=output,
        metadata=_bounded_metadata(result.metadata),
        truncated=result.truncated or is_cut,
        error=None if result.success else result.error or "the tool reported a failure",
        error_code=None if result.success else result.error_code or ErrorCode.INTERNAL,
    )


def cut_output(name: str, text: str) -> tuple[str, bool]:
    """Return the start of `text` and whether it was cut. The limits are MAX_LINES lines and MAX_OUTPUT_BYTES bytes.

    A last line says what is missing.
    """
    size, lines = len(text.encode()), _count_lines(text)
    if size <= MAX_OUTPUT_BYTES and lines <= MAX_LINES:
        return text, False
    head = _head(text)
    # A text of exactly this length was already cut by an earlier step, so its full length is unknown.
    at_least = "at least " if len(text) >= MAX_OUTPUT_CHARS else ""
    shown_part = f"{_count_lines(head)} of {at_least}{lines} lines, {len(head.encode())} of {at_least}{size} bytes"
    return f"{head.removesuffix(NEWLINE)}\n[Cut: {shown_part}; to see the rest call {name} for less at a time]", True


def _head(text: str) -> str:
    """Return the whole lines at the start that fit. If the first line is too long, return as many whole characters as
    fit.
    """
    fitting = text.encode()[:MAX_OUTPUT_BYTES].decode("utf-8", "ignore")
    lines = fitting.split(NEWLINE, MAX_LINES)
    if len(lines) > MAX_LINES:
        return NEWLINE.join(lines[:MAX_LINES]) + NEWLINE
    complete_text, _, _ = fitting.rpartition(NEWLINE)
    return complete_text + NEWLINE if complete_text else fitting


def _count_lines(text: str) -> int:
    return text.count(NEWLINE) + (not text.endswith(NEWLINE))


def _bounded_metadata(metadata: dict[str, JsonValue]) -> dict[str, JsonValue]:
    size = len(json.dumps(metadata, ensure_ascii=False).encode("utf-8", "replace"))
    return metadata if size <= MAX_METADATA_BYTES else {"metadata_dropped_bytes": size}
