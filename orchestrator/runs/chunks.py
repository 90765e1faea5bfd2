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
    last_frame: Any = None
    for chunk in chunks:
        piece = _find_piece(chunk)
        frame = (piece[1], _get_other_fields(chunk)) if piece is not None else None
        if piece is not None and frame == last_frame:
            pieces.append(piece[0][piece[1][-1]])
            continue
        _fill(joined, pieces)
        joined.append(copy.deepcopy(chunk))
        pieces, last_frame = [piece[0][piece[1][-1]]] if piece is not None else [], frame
    _fill(joined, pieces)
    return joined


def _fill(joined: list[Chunk], pieces: list[str]) -> None:
    """Store the joined pieces in the last chunk."""
    if len(pieces) > 1 and (piece := _find_piece(joined[-1])) is not None:
        piece[0][piece[1][-1]] = "".join(pieces)


def _find_piece(chunk: Chunk) -> tuple[dict[str, Any], tuple[Any, ...]] | None:
    """Return the dictionary with the chunk's single piece of text, and the piece's position, which ends with its key.
    None for a chunk that contains anything else.
    """
    match chunk:
        case {"choices": [{"delta": dict(delta)} as choice]} if chunk.get("usage") is None:
            more = {name for name, value in choice.items() if value is not None} - {"index", "delta"}
        case _:
            return None
    fields = [name for name, value in delta.items() if value is not None]
    if more or len(fields) != 1:
        return None
    match fields[0], delta[fields[0]]:
        case "tool_calls", [{"index": int(index), "function": {"arguments": str()} as function, **rest}] if not rest:
            return (function, (index, "arguments")) if len(function) == 1 else None
        case name, str() if name in _TEXTS:
            return delta, (name,)
    return None


def _get_other_fields(chunk: Chunk) -> Any:
    """Return everything in a chunk except its piece of text and its creation time. Only chunks with equal surroundings
    can be joined.
    """
    around = {name: value for name, value in chunk.items() if name not in ("choices", "created")}
    return around, chunk["choices"][0].get("index")
