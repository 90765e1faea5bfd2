"""Joins adjacent chunks of a reply. A log then stores one reply and not each token separately."""

import copy
import itertools
from collections.abc import Iterable
from typing import Any

from toolcrew.orchestrator.dialects.model import Chunk
from toolcrew.orchestrator.dialects.reply_fields import MESSAGE_FIELDS, FieldCollector

_TEXTS = ("content", "refusal")


def join_chunks(chunks: Iterable[Chunk]) -> list[Chunk]:
    """Return the same reply in fewer chunks.

    Adjacent pieces of one text, adjacent pieces of one call's arguments, and adjacent deltas of other fields (such as
    reasoning) become one chunk. All other chunks stay unchanged.
    """
    joined: list[Chunk] = []
    for frame, adjacent in itertools.groupby(chunks, _find_frame):
        if frame is None or frame[0] != _FIELDS:
            joined += _join_pieces(adjacent)
        else:
            joined += _join_fields(list(adjacent))
    return joined


_FIELDS = ("other fields",)


def _find_frame(chunk: Chunk) -> tuple[Any, Any] | None:
    """Return what a chunk contains a piece of, and everything around it. None for a chunk that is not joined."""
    if (delta := _find_field_delta(chunk)) is not None:
        return _FIELDS, (delta.get("role"), _get_other_fields(chunk))
    return None


def _find_field_delta(chunk: Chunk) -> dict[str, Any] | None:
    """Return the delta of a chunk that contains only other fields; None for any other chunk."""
    match chunk:
        case {"choices": [{"delta": dict(delta)} as choice]} if chunk.get("usage") is None:
            more = {name for name, value in choice.items() if value is not None} - {"index", "delta"}
        case _:
            return None
    has_message = any(delta.get(name) for name in MESSAGE_FIELDS - {"role"})
    has_fields = any(value is not None for name, value in delta.items() if name not in MESSAGE_FIELDS)
    return delta if has_fields and not has_message and not more else None


def _join_fields(chunks: list[Chunk]) -> list[Chunk]:
    """Return adjacent deltas of other fields as one chunk; unchanged if they exceed a limit."""
    collector = FieldCollector()
    for chunk in chunks:
        collector.add(chunk["choices"][0]["delta"], MESSAGE_FIELDS)
    if collector.is_too_large or len(chunks) == 1:
        return copy.deepcopy(chunks)
    joined = copy.deepcopy(chunks[0])
    joined["choices"][0]["delta"] |= collector.build()
    return [joined]


def _join_pieces(chunks: Iterable[Chunk]) -> list[Chunk]:
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
