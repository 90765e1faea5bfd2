"""Joins adjacent chunks of a reply. A log then stores one reply and not each token separately."""

import copy
from collections.abc import Iterable
from typing import Any

from orchestrator.dialects.model import Chunk

_TEXTS = ("content", "reasoning_content", "reasoning", "refusal")


def join_chunks(chunks: Iterable[Chunk]) -> list[Chunk]:
    """Return the same reply in fewer chunks.

    Adjacent pieces of one text, and adjacent pieces of one call's arguments, become one chunk. All other chunks stay
    unchanged.
    """
    joined: list[Chunk] = []
    pieces: list[str] = []
    for chunk in chunks:
        position = _find_position(chunk)
        if (
            position is not None
            and joined
            and _find_position(joined[-1]) == position
            and _frame(joined[-1]) == _frame(chunk)
        ):
            pieces.append(_piece(chunk, position))
            continue
        _fill(joined, pieces)
        joined.append(copy.deepcopy(chunk))
        pieces = [_piece(chunk, position)] if position is not None else []
    _fill(joined, pieces)
    return joined


def _fill(joined: list[Chunk], pieces: list[str]) -> None:
    """Store the joined pieces in the last chunk."""
    if len(pieces) < 2:
        return
    position = _find_position(joined[-1])
    delta = joined[-1]["choices"][0]["delta"]
    text = "".join(pieces)
    if isinstance(position, str):
        delta[position] = text
    else:
        delta["tool_calls"][0]["function"]["arguments"] = text


def _find_position(chunk: Chunk) -> str | int | None:
    """Return the position of the chunk's single piece of text: a field name of the delta, or the index of a call.

    Returns None for a chunk that contains anything else.
    """
    choices = chunk.get("choices")
    if (
        not isinstance(choices, list)
        or len(choices) != 1
        or not isinstance(choices[0], dict)
        or chunk.get("usage") is not None
    ):
        return None
    choice: dict[str, Any] = choices[0]
    delta = choice.get("delta")
    if (
        not isinstance(delta, dict)
        or choice.get("finish_reason") is not None
        or set(choice) - {"index", "delta", "finish_reason", "logprobs"}
    ):
        return None
    if choice.get("logprobs") is not None:
        return None
    fields = [name for name, value in delta.items() if value is not None]
    if len(fields) != 1:
        return None
    if fields[0] == "tool_calls":
        return _place_of_call(delta)
    return fields[0] if fields[0] in _TEXTS and isinstance(delta[fields[0]], str) else None


def _place_of_call(delta: dict[str, Any]) -> int | None:
    """Return the index of the single call that the delta continues; None for any other delta."""
    calls = delta["tool_calls"]
    if (
        not isinstance(calls, list)
        or len(calls) != 1
        or not isinstance(calls[0], dict)
        or set(calls[0]) != {"index", "function"}
    ):
        return None
    function = calls[0]["function"]
    is_piece = isinstance(function, dict) and set(function) == {"arguments"} and isinstance(function["arguments"], str)
    index = calls[0]["index"]
    return index if is_piece and type(index) is int else None


def _piece(chunk: Chunk, position: str | int) -> str:
    """Return the piece of text at the position."""
    delta = chunk["choices"][0]["delta"]
    piece = delta[position] if isinstance(position, str) else delta["tool_calls"][0]["function"]["arguments"]
    return str(piece)


def _frame(chunk: Chunk) -> Any:
    """Return everything in a chunk except its piece of text and its creation time. Only chunks with equal frames can
    be joined.
    """
    around = {name: value for name, value in chunk.items() if name not in ("choices", "created")}
    return around, chunk["choices"][0].get("index")
