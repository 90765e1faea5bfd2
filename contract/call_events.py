"""What a call tells its caller while it runs: small JSON entries of one Redis stream a call, and the bounds both sides
keep.

The caller makes the stream and names its listener in the signed context; the worker only adds to a stream that is
there, and puts the call's name into the listener's set (store/call_events.py has the keys), so that one blocked
connection serves every call of a process. The caller deletes what it has delivered: the length of the stream is what
still waits. The last entry is END, which counts the others: it is written before the result is, so who has the result
can read every event of the call.
"""

import json
from collections.abc import Callable, Mapping
from typing import Annotated, Any

from pydantic import Field, JsonValue, ValidationError

from contract.calls import Record
from contract.errors import EnvelopeRefused

OUTPUT = "output"
"""A piece of output: `stream` and `text`."""
MODEL = "model"
"""A tool asks the caller's model; the answer comes back in a list of its own. Question and answer are signed."""
END = "end"
"""Nothing more comes: `count` entries were written before, `hidden_chars` characters of output were not."""

HIDDEN = "output_not_shown_chars"
"""In a result's metadata: so many characters of its output were not shown while it ran, because the caller was too
slow.
"""

MAX_PIECE_BYTES = 16 * 1024
"""One piece of output as an entry."""
MAX_EVENT_BYTES = 256 * 1024
"""Any other entry."""
MAX_ANSWER_BYTES = 1024 * 1024
MAX_WAITING_EVENTS = 64
"""So many pieces may lie unread before the worker waits."""
MAX_WAITING_BYTES = 256 * 1024
STALL_S = 2.0
"""A caller that takes nothing for so long is shown nothing more of this call."""
MAX_PAUSE_S = 10.0
"""So long a slow caller may hold up one call in all."""

_FIELD = b"event"


class CallEvent(Record):
    """One entry: its kind, and what that kind says."""

    kind: Annotated[str, Field(pattern=r"^[a-z_]{1,32}$")]
    payload: dict[str, JsonValue] = Field(default_factory=dict)


def encode_event(kind: str, payload: Mapping[str, Any]) -> bytes:
    """An entry's bytes. Raises ValueError when it is larger than MAX_EVENT_BYTES, or no JSON."""
    data = _encode({"kind": kind, "payload": dict(payload)})
    if len(data) > MAX_EVENT_BYTES:
        raise ValueError(f"the event is {len(data)} bytes; at most {MAX_EVENT_BYTES} can be sent")
    return data


def decode_event(data: object) -> CallEvent:
    """The event in an entry's bytes. Raises EnvelopeRefused, whatever is wrong with them."""
    if not isinstance(data, bytes) or len(data) > MAX_EVENT_BYTES:
        raise EnvelopeRefused("an event is no bytes, or too many")
    try:
        return CallEvent.model_validate_json(data)
    except (ValidationError, ValueError) as error:
        raise EnvelopeRefused("an event is not one of ours") from error


def entry_fields(data: bytes) -> dict[bytes, bytes]:
    """The fields of the stream's entry that carries an event."""
    return {_FIELD: data}


def entry_event(fields: Mapping[Any, Any], unseal: Callable[[bytes], str]) -> CallEvent:
    """Return the event that an entry carries. Raises EnvelopeRefused, also for a question that is not signed: it is
    answered at the caller's cost.
    """
    data = fields.get(_FIELD)
    if isinstance(data, bytes) and not data.startswith(b"{"):
        return decode_event(unseal(data).encode())
    event = decode_event(data)
    if event.kind not in (OUTPUT, END):
        raise EnvelopeRefused("a question of a call is not signed", "signature")
    return event


def encode_answer(payload: Mapping[str, Any]) -> bytes:
    """An answer's bytes. Raises ValueError when it is larger than MAX_ANSWER_BYTES, or no JSON."""
    data = _encode(dict(payload))
    if len(data) > MAX_ANSWER_BYTES:
        raise ValueError(f"the answer is {len(data)} bytes; at most {MAX_ANSWER_BYTES} can be sent")
    return data


def decode_answer(data: object) -> dict[str, Any]:
    """The object in an answer's bytes. Raises EnvelopeRefused."""
    try:
        value = json.loads(data) if isinstance(data, bytes) and len(data) <= MAX_ANSWER_BYTES else None
    except (ValueError, RecursionError) as error:
        raise EnvelopeRefused("an answer is not JSON") from error
    if not isinstance(value, dict):
        raise EnvelopeRefused("an answer is no object")
    return value


def encode_output(stream: str, text: str) -> list[tuple[int, bytes]]:
    """`text` in order as entries of at most MAX_PIECE_BYTES, each with how many characters it carries; none for no
    text.

    Half a surrogate pair becomes a question mark.
    """
    if not text:
        return []
    data = _encode({"kind": OUTPUT, "payload": {"stream": stream, "text": text}})
    if len(data) <= MAX_PIECE_BYTES or len(text) == 1:
        return [(len(text), data)]
    middle = len(text) // 2
    return [*encode_output(stream, text[:middle]), *encode_output(stream, text[middle:])]


def _encode(value: dict[str, Any]) -> bytes:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode("utf-8", "replace")
