"""Record <-> bytes: version, size cap, unknown fields are errors, HMAC signature over what must not change on the way."""

import hashlib
import hmac
import json
from collections.abc import Iterable
from typing import Any, TypeVar

from pydantic import ValidationError

from contract.calls import Record, ToolCall, ToolContext, ToolResult
from contract.errors import EnvelopeRefused

VERSION = 1
MAX_ENVELOPE_BYTES = 1024 * 1024
MAX_DEPTH = 100
"""How deep arguments may nest; JSON readers of both sides give up somewhere beyond it."""

AnyRecord = TypeVar("AnyRecord", bound=Record)


def encode_call(call: ToolCall, context: ToolContext, key: bytes) -> str:
    """The signed envelope of a call, as JSON text.

    Raises ValueError, with what to do, when a worker would refuse it: too large, too deep, half a surrogate pair, NaN or Infinity.
    """
    if _is_deeper(call.arguments, MAX_DEPTH) or _is_deeper(context.config, MAX_DEPTH):
        raise ValueError(f"the call's arguments nest deeper than {MAX_DEPTH}: send a flatter value, or a file with it")
    payload = {
        "v": VERSION,
        # Taken as they are: dumping the record would change a key that is no text without a word.
        "call": {**call.model_dump(mode="json", exclude={"arguments"}), "arguments": call.arguments},
        "context": {**context.model_dump(mode="json", exclude={"config"}), "config": context.config},
    }
    payload["sig"] = _signature(payload, key)
    return _bounded(json.dumps(payload, ensure_ascii=False, allow_nan=False, separators=(",", ":")))


def decode_call(text: str, key: bytes) -> tuple[ToolCall, ToolContext]:
    """The call and context of an envelope whose signature holds. Raises EnvelopeRefused, whatever is wrong with it."""
    payload = _open(text, {"v", "call", "context", "sig"})
    claimed = payload.pop("sig")
    if not isinstance(claimed, str) or not hmac.compare_digest(claimed.encode(errors="surrogatepass"), _signature(payload, key).encode()):
        raise EnvelopeRefused("signature does not match: sender and worker do not share TOOLCREW_SECRET, or the envelope was changed")
    return _record(ToolCall, payload["call"]), _record(ToolContext, payload["context"])


def encode_result(result: ToolResult) -> dict[str, Any]:
    """A result as the plain data that Celery stores: a few harmless fields, then the record.

    Celery shows the beginning of what a task returned in its log and in its events. The record is nested deeper than that goes, so that
    neither output nor arguments show there, however short they are.
    """
    record = result.model_dump(mode="json")
    return {**_head(result), "data": [[record]]}


def decode_result(data: Any) -> ToolResult:
    """The result of a worker. Raises EnvelopeRefused when version, shape or fields are not ours."""
    if not isinstance(data, dict) or data.get("v") != VERSION:
        raise EnvelopeRefused(f"result of an unknown version; this side speaks {VERSION}: run the same release on both sides")
    match data.get("data"):
        case [[dict() as record]]:
            result = _record(ToolResult, record)
        case _:
            raise EnvelopeRefused("result of another shape: its record is missing")
    if {name: value for name, value in data.items() if name != "data"} != _head(result):
        raise EnvelopeRefused("result whose head does not fit its record")
    return result


def _head(result: ToolResult) -> dict[str, Any]:
    code = result.error_code.value if result.error_code is not None else None
    return {"v": VERSION, "call_id": result.call_id, "name": result.name, "success": result.success, "error_code": code}


def derive_key(secret: str) -> bytes:
    """The signing key of a secret text."""
    return hashlib.sha256(b"toolcrew envelope v1\0" + secret.encode()).digest()


def _open(text: str, fields: set[str]) -> dict[str, Any]:
    if len(text.encode(errors="surrogatepass")) > MAX_ENVELOPE_BYTES:
        raise EnvelopeRefused(f"envelope larger than {MAX_ENVELOPE_BYTES} bytes")
    try:
        payload = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise EnvelopeRefused("envelope is not JSON") from error
    if not isinstance(payload, dict) or payload.get("v") != VERSION:
        raise EnvelopeRefused(f"envelope of an unknown version; this side speaks {VERSION}: run the same release on both sides")
    if set(payload) != fields:
        raise EnvelopeRefused(f"envelope has unknown or missing fields: {sorted(set(payload) ^ fields)}")
    return payload


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")


def _record(kind: type[AnyRecord], data: Any) -> AnyRecord:
    try:
        return kind.model_validate_json(json.dumps(data))
    except (ValidationError, ValueError) as error:
        raise EnvelopeRefused(f"not a valid {kind.__name__}: {_first_complaint(error)}") from error


def _first_complaint(error: Exception) -> str:
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False, include_input=False)[0]
        return f"{'.'.join(str(part) for part in first['loc'])}: {first['msg']}"
    return str(error)


def _signature(payload: dict[str, Any], key: bytes) -> str:
    """HMAC over the canonical form of the whole payload: tool, arguments, tenant, deadline and call id are all inside."""
    canonical = json.dumps(payload, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return hmac.new(key, canonical.encode(), hashlib.sha256).hexdigest()


def _bounded(text: str) -> str:
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:
        raise ValueError("the call holds half of a surrogate pair, which is no text: send whole characters") from error
    if size > MAX_ENVELOPE_BYTES:
        raise ValueError(
            f"the call is {size} bytes; at most {MAX_ENVELOPE_BYTES} fit an envelope: write large content in parts (write_tool with "
            "mode=append), or with Session.write_file"
        )
    return text


def _is_deeper(value: Any, limit: int) -> bool:
    """Whether lists and objects nest deeper than `limit`, without recursion of our own."""
    level = [value]
    for _ in range(limit):
        level = [inner for outer in level for inner in _inner(outer)]
        if not level:
            return False
    return True


def _inner(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()
