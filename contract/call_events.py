"""Events of a running call, which its worker sends to the caller: JSON entries of one Redis stream per call, and their
limits.

The caller creates the stream, and writes the id of its listener (the process that reads the events) into the signed
context of the call. The worker adds entries only to an existing stream, and adds the call to the listener's set
(store/call_event_streams.py has the keys). A process therefore needs only one blocked connection for the events of all
its calls. The caller deletes delivered entries, so the length of the stream is the number of unread entries. The last
entry is END, with the number of all other entries. The worker writes END before the result, so a caller that has the
result can read all events of the call.
"""

import json
from collections.abc import Callable, Mapping
from typing import Annotated, Any

from pydantic import Field, JsonValue, ValidationError

from toolcrew.contract.calls import Record
from toolcrew.contract.errors import EnvelopeRefused

OUTPUT = "output"
"""Event with a piece of output: `stream` and `text`."""
MODEL = "model"
"""Event with a tool's request to the caller's model. The caller puts the reply into a separate Redis list. Request and
reply are signed.
"""
END = "end"
"""Last entry. `count`: number of entries before it. `hidden_chars`: characters of output that were not sent."""

HIDDEN = "output_not_shown_chars"
"""Field of a result's metadata: number of output characters that were not sent during the call, because the caller read
too slowly.
"""

MAX_PIECE_BYTES = 16 * 1024
"""Limit of an entry with output, in bytes."""
MAX_EVENT_BYTES = 256 * 1024
"""Limit of an entry of any other kind, in bytes."""
MAX_ANSWER_BYTES = 1024 * 1024
MAX_WAITING_EVENTS = 64
"""Number of unread entries from which on the worker waits before it sends more."""
MAX_WAITING_BYTES = 256 * 1024
STALL_S = 2.0
"""Seconds without any read by the caller, after which the worker sends no more output of this call."""
MAX_PAUSE_S = 10.0
"""Limit of the total time, in seconds, by which a slow caller can delay one call."""

_FIELD = b"event"


class CallEvent(Record):
    """Entry of the event stream: its kind, and the data of that kind."""

    kind: Annotated[str, Field(pattern=r"^[a-z_]{1,32}$")]
    payload: dict[str, JsonValue] = Field(default_factory=dict)


def encode_event(kind: str, payload: Mapping[str, Any]) -> bytes:
    """Return the bytes of an entry. Raises ValueError if they exceed MAX_EVENT_BYTES, or if the payload is not JSON."""
    data = _encode({"kind": kind, "payload": dict(payload)})
    if len(data) > MAX_EVENT_BYTES:
        raise ValueError(f"the event is {len(data)} bytes; the limit is {MAX_EVENT_BYTES}. Send less data.")
    return data


def decode_event(data: object) -> CallEvent:
    """Return the event in the bytes of an entry. Raises EnvelopeRefused for all invalid data."""
    if not isinstance(data, bytes) or len(data) > MAX_EVENT_BYTES:
        raise EnvelopeRefused("an event is not bytes, or is too large")
    try:
        return CallEvent.model_validate_json(data)
    except (ValidationError, ValueError) as error:
        raise EnvelopeRefused("an event has an invalid form") from error


def entry_fields(data: bytes) -> dict[bytes, bytes]:
    """Return the fields of the stream entry for an event."""
    return {_FIELD: data}


def entry_event(fields: Mapping[Any, Any], unseal: Callable[[bytes], str]) -> CallEvent:
    """Return the event in a stream entry. Raises EnvelopeRefused for invalid data.

    A request to the model must be signed, because the caller pays for the reply. Output is not signed.
    """
    data = fields.get(_FIELD)
    if isinstance(data, bytes) and not data.startswith(b"{"):
        return decode_event(unseal(data).encode())
    event = decode_event(data)
    if event.kind not in (OUTPUT, END):
        raise EnvelopeRefused("a request to the model is not signed", "signature")
    return event


def encode_answer(payload: Mapping[str, Any]) -> bytes:
    """Return the bytes of the model's reply to a request of the tool. Raises ValueError if they exceed
    MAX_ANSWER_BYTES, or if the reply is not JSON.
    """
    data = _encode(dict(payload))
    if len(data) > MAX_ANSWER_BYTES:
        raise ValueError(f"the answer is {len(data)} bytes; the limit is {MAX_ANSWER_BYTES}. Send less data.")
    return data


def decode_answer(data: object) -> dict[str, Any]:
    """Return the object in the bytes of a reply. Raises EnvelopeRefused for invalid data."""
    try:
        value = json.loads(data) if isinstance(data, bytes) and len(data) <= MAX_ANSWER_BYTES else None
    except (ValueError, RecursionError) as error:
        raise EnvelopeRefused("an answer is not JSON") from error
    if not isinstance(value, dict):
        raise EnvelopeRefused("an answer is not an object")
    return value


def encode_output(stream: str, text: str) -> list[tuple[int, bytes]]:
    """Split the text into entries of at most MAX_PIECE_BYTES, in order. Return (characters, bytes) for each entry.

    An empty text gives no entries. A lone surrogate becomes a question mark.
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
