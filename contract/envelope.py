"""Encoding of calls and results, with version, size limit, strict fields and an HMAC signature over all fields that a
third party must not change.
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from pydantic_core import from_json

from toolcrew.contract.calls import Record, ToolCall, ToolContext, ToolResult
from toolcrew.contract.errors import EnvelopeRefused, ErrorCode, ToolFailure
from toolcrew.contract.invalid_input import describe_invalid
from toolcrew.contract.json_limits import is_deeper
from toolcrew.contract.signing import ResultSeal, SigningKey, SigningKeys

VERSION = 3
PURPOSE = "call"
"""Purpose that the signature of a call includes, so that no other signed text is accepted as a call."""
MAX_ENVELOPE_BYTES = 1024 * 1024
MAX_ARGUMENTS_BYTES = 16 * 1024 * 1024
"""Limit of the arguments in a blob, in bytes of JSON."""
INLINE_BYTES = 64 * 1024
"""Limit, in bytes, of a result record that is sent inside its message. A larger record is stored elsewhere, and the
message has its key.
"""
_UTF8_BYTES = 4
"""Maximum bytes of one character."""
MAX_DEPTH = 100
"""Limit of the nesting of arguments. JSON parsers accept this depth; they fail only at some greater depth."""

_OPTIONAL = ("trace", "arguments_blob")
"""Fields of a context that the envelope omits if they are None, so that workers of earlier releases can read it."""

_SHAPE = re.compile(r"(?P<version>v[0-9]{1,8})\.(?P<key_id>[0-9a-f]{12})\.(?P<signature>[0-9a-f]{64})\.")

AnyRecord = TypeVar("AnyRecord", bound=Record)


class EnvelopeTooLarge(ValueError):
    """Raised when the call is too large for an envelope. Its arguments can be sent in a blob (`encode_arguments`)."""


def encode_call(call: ToolCall, context: ToolContext, keys: SigningKeys) -> str:
    """Return the signed envelope of a call: `v3.<key id>.<signature>.<JSON>`. The signature covers everything else.

    Raises ValueError for a call that a worker would refuse: too large (EnvelopeTooLarge), nested too deep, a lone
    surrogate, NaN or Infinity.
    """
    if is_deeper(call.arguments, MAX_DEPTH) or is_deeper(context.config, MAX_DEPTH):
        raise ValueError(f"the call's arguments nest deeper than {MAX_DEPTH}: send a flatter value, or use a file")
    payload = {
        # The arguments are not dumped by pydantic, which silently converts keys that are not text.
        "call": {**call.model_dump(mode="json", exclude={"arguments"}), "arguments": call.arguments},
        "context": {
            **context.model_dump(
                mode="json", exclude={"config", *(name for name in _OPTIONAL if getattr(context, name) is None)}
            ),
            "config": context.config,
        },
    }
    body = json.dumps(payload, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    head = f"v{VERSION}.{keys.current.id}"
    return _check_size(f"{head}.{_signature(keys.current, head, body)}.{body}")


def decode_call(text: str, keys: SigningKeys) -> tuple[ToolCall, ToolContext]:
    """Return the call and context of an envelope. Raises EnvelopeRefused for every invalid envelope.

    The signature is verified before any JSON is parsed, so that the parser never reads untrusted data.
    """
    if len(text) > MAX_ENVELOPE_BYTES or len(text.encode(errors="surrogatepass")) > MAX_ENVELOPE_BYTES:
        raise EnvelopeRefused(f"envelope larger than {MAX_ENVELOPE_BYTES} bytes", "oversized")
    version, key_id, signature, body = _parts(text)
    if keys.find(key_id) is None:
        raise EnvelopeRefused(
            "the envelope is signed with an unknown key: set the same TOOLCREW_SECRET for sender and worker, or add "
            "the previous secret to TOOLCREW_SECRETS_PREVIOUS",
            "signature",
        )
    if not keys.holds(key_id, PURPOSE, f"{version}.{key_id}.{body}".encode(errors="surrogatepass"), signature):
        raise EnvelopeRefused(
            "signature does not match: the envelope was changed. Find out which program writes to this Redis",
            "signature",
        )
    try:
        signed = _SignedCall.model_validate(from_json(body, allow_inf_nan=False))
    except ValueError as error:
        raise EnvelopeRefused(f"not a valid call: {describe_invalid(error)}") from error
    return signed.call, signed.context


def encode_arguments(arguments: Mapping[str, Any]) -> bytes:
    """Return arguments as JSON for a blob. `encode_call` has already checked their depth and text. Raises ValueError
    above MAX_ARGUMENTS_BYTES.
    """
    data = json.dumps(arguments, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
    if len(data) > MAX_ARGUMENTS_BYTES:
        raise ValueError(
            f"the arguments are {len(data)} bytes; a call may have at most {MAX_ARGUMENTS_BYTES}: write large content "
            "in parts (write_tool with mode=append), or with Session.write_file"
        )
    return data


def decode_arguments(data: bytes) -> dict[str, Any]:
    """Return the arguments in a blob that was checked against its signed key. Raises ToolFailure(ENVELOPE_REFUSED)."""
    try:
        arguments = from_json(data, allow_inf_nan=False)
    except ValueError as error:
        raise ToolFailure(
            ErrorCode.ENVELOPE_REFUSED, f"the arguments of the call are not JSON ({error}): send one JSON object"
        ) from error
    if not isinstance(arguments, dict) or len(data) > MAX_ARGUMENTS_BYTES or is_deeper(arguments, MAX_DEPTH):
        raise ToolFailure(
            ErrorCode.ENVELOPE_REFUSED,
            "the arguments of the call are not an object, are too large or are nested too deep: send less",
        )
    return arguments


class _SignedCall(Record):
    call: ToolCall
    context: ToolContext


def _parts(text: str) -> tuple[str, str, str, str]:
    """Return version, key id, signature and body. Raises EnvelopeRefused for another format or version."""
    match = _SHAPE.match(text)
    if match is None:
        if text.startswith("{"):
            raise EnvelopeRefused("envelope of another release: run the same release on both sides", "version")
        raise EnvelopeRefused("envelope is not of the form v<version>.<key id>.<signature>.<JSON>")
    if match["version"] != f"v{VERSION}":
        message = (
            f"envelope of version {match['version'][:8]}; this process supports v{VERSION}: run the same release on "
            "both sides"
        )
        raise EnvelopeRefused(message, "version")
    return match["version"], match["key_id"], match["signature"], text[match.end() :]


def _signature(key: SigningKey, head: str, body: str) -> str:
    # The head is signed too, so that version and key id cannot be changed.
    return key.sign(PURPOSE, f"{head}.{body}".encode(errors="surrogatepass"))


def encode_result(
    result: ToolResult, keep: Callable[[bytes], str] | None = None, seal: ResultSeal | None = None
) -> dict[str, Any]:
    """Return a result as the plain data that Celery stores: a few public fields, and the record as text.

    `keep` stores a record above INLINE_BYTES elsewhere and returns its key; without `keep` the record is always inline.
    Exceptions of `keep` propagate. `seal` signs the record; receivers with a seal refuse a record without signature.

    Celery shows the beginning of a task's return value in its log and events. The record is nested deeper than Celery
    prints, so that neither output nor arguments appear there.
    """
    text = _record_text(result) if seal is None else seal.close(_record_text(result))
    if keep is not None and len(text) > INLINE_BYTES // _UTF8_BYTES:
        data = text.encode()
        if len(data) > INLINE_BYTES:
            return {**_head(result), "kept": [[[keep(data)]]]}
    return {**_head(result), "data": [[[text]]]}


def find_encoded_result(stored: Mapping[str, Any]) -> Any:
    """Return the encoded result in a stored Celery result; None if the task ended without one.

    A call with an infrastructure failure has the state FAILURE. Its `result` is Celery's exception, and `answer` is the
    encoded result.
    """
    return stored.get("result") if stored.get("status") == "SUCCESS" else stored.get("answer")


def find_result_key(data: Any) -> str | None:
    """Return the key of a record that is stored outside the encoded result; None for an inline record. The key is
    untrusted: check its tenant before you read it.
    """
    match data:
        case {"kept": [[[str() as key]]]}:
            return key
        case _:
            return None


def join_result(data: Mapping[str, Any], record: bytes) -> dict[str, Any]:
    """Return the encoded result with `record` inline, for a record that was stored elsewhere."""
    head = {name: value for name, value in data.items() if name != "kept"}
    return {**head, "data": [[[record.decode(errors="replace")]]]}


def decode_result(data: Any, seal: ResultSeal | None = None) -> ToolResult:
    """Return the result in the data of a worker. Raises EnvelopeRefused for a wrong version, form or signature."""
    if not isinstance(data, dict) or data.get("v") != VERSION:
        raise EnvelopeRefused(
            f"result of an unknown version; this process supports {VERSION}: run the same release on both sides",
            "version",
        )
    match data.get("data"):
        case [[[str() as text]]]:
            result = _record(ToolResult, text if seal is None else seal.open(text))
        case _:
            raise EnvelopeRefused("the result has no record")
    if {name: value for name, value in data.items() if name != "data"} != _head(result):
        raise EnvelopeRefused("the public fields of the result differ from its record")
    return result


def _record_text(result: ToolResult) -> str:
    try:
        return result.model_dump_json()
    except ValueError:
        # The metadata has a lone surrogate, which UTF-8 cannot encode.
        return json.dumps(result.model_dump(mode="json"), ensure_ascii=False).encode(errors="replace").decode()


def _head(result: ToolResult) -> dict[str, Any]:
    code = result.error_code.value if result.error_code is not None else None
    return {"v": VERSION, "call_id": result.call_id, "name": result.name, "success": result.success, "error_code": code}


def _record(kind: type[AnyRecord], text: str) -> AnyRecord:
    try:
        return kind.model_validate_json(text)
    except ValueError as error:
        raise EnvelopeRefused(f"not a valid {kind.__name__}: {describe_invalid(error)}") from error


def _check_size(text: str) -> str:
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:
        raise ValueError("the call has a lone surrogate, which is not valid text. Send whole characters.") from error
    if size > MAX_ENVELOPE_BYTES:
        raise EnvelopeTooLarge(
            f"the call is {size} bytes; at most {MAX_ENVELOPE_BYTES} fit an envelope: write large content in parts "
            "(write_tool with mode=append), or with Session.write_file"
        )
    return text
