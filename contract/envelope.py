"""Record <-> bytes: version, size cap, unknown fields are errors, HMAC signature over what must not change on the
way.
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import from_json

from contract.calls import Record, ToolCall, ToolContext, ToolResult
from contract.errors import EnvelopeRefused, ErrorCode, ToolFailure
from contract.json_limits import is_deeper
from contract.signing import ResultSeal, SigningKey, SigningKeys

VERSION = 3
PURPOSE = "call"
"""What a call's signature is for: no other signed text passes as a call."""
MAX_ENVELOPE_BYTES = 1024 * 1024
MAX_ARGUMENTS_BYTES = 16 * 1024 * 1024
"""Arguments of a call in a blob, as JSON."""
INLINE_BYTES = 64 * 1024
"""How large a result's record may be to travel with its message; a larger one lies beside, and the message names
where.
"""
_UTF8_BYTES = 4
"""A character has at most so many."""
MAX_DEPTH = 100
"""How deep arguments may nest; JSON readers of both sides give up somewhere beyond it."""

_OPTIONAL = ("trace", "arguments_blob")
"""Fields of a context that are not in the envelope when they are None, so that workers of earlier releases can read
it.
"""

_SHAPE = re.compile(r"(?P<version>v[0-9]{1,8})\.(?P<key_id>[0-9a-f]{12})\.(?P<signature>[0-9a-f]{64})\.")

AnyRecord = TypeVar("AnyRecord", bound=Record)


class EnvelopeTooLarge(ValueError):
    """The call is too large for an envelope. Its arguments can travel in a blob (`encode_arguments`)."""


def encode_call(call: ToolCall, context: ToolContext, keys: SigningKeys) -> str:
    """The signed envelope of a call: `v3.<key id>.<signature>.<JSON>`, signed over all but the signature itself.

    Raises ValueError, with what to do, when a worker would refuse it: too large (EnvelopeTooLarge), too deep, half a
    surrogate pair, NaN or Infinity.
    """
    if is_deeper(call.arguments, MAX_DEPTH) or is_deeper(context.config, MAX_DEPTH):
        raise ValueError(f"the call's arguments nest deeper than {MAX_DEPTH}: send a flatter value, or a file with it")
    payload = {
        # Taken as they are: dumping the record would change a key that is no text without a word.
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
    return _bounded(f"{head}.{_signature(keys.current, head, body)}.{body}")


def decode_call(text: str, keys: SigningKeys) -> tuple[ToolCall, ToolContext]:
    """The call and context of an envelope whose signature holds. Raises EnvelopeRefused, whatever is wrong with it.

    Nothing of the JSON is read before the signature was found good.
    """
    if len(text) > MAX_ENVELOPE_BYTES or len(text.encode(errors="surrogatepass")) > MAX_ENVELOPE_BYTES:
        raise EnvelopeRefused(f"envelope larger than {MAX_ENVELOPE_BYTES} bytes", "oversized")
    version, key_id, signature, body = _parts(text)
    if keys.find(key_id) is None:
        raise EnvelopeRefused(
            "signed by a key that is not known here: sender and worker do not share TOOLCREW_SECRET, or a changed one "
            "is missing from TOOLCREW_SECRETS_PREVIOUS",
            "signature",
        )
    if not keys.holds(key_id, PURPOSE, f"{version}.{key_id}.{body}".encode(errors="surrogatepass"), signature):
        raise EnvelopeRefused("signature does not match: the envelope was changed, or its key was guessed", "signature")
    try:
        signed = _SignedCall.model_validate(from_json(body, allow_inf_nan=False))
    except (ValidationError, ValueError) as error:
        raise EnvelopeRefused(f"not a valid call: {_first_complaint(error)}") from error
    return signed.call, signed.context


def encode_arguments(arguments: Mapping[str, Any]) -> bytes:
    """Return arguments as JSON for a blob. `encode_call` has checked their depth and text. Raises ValueError for more
    than MAX_ARGUMENTS_BYTES.
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
        raise ToolFailure(ErrorCode.ENVELOPE_REFUSED, f"the arguments of the call are not JSON: {error}") from error
    if not isinstance(arguments, dict) or len(data) > MAX_ARGUMENTS_BYTES or is_deeper(arguments, MAX_DEPTH):
        raise ToolFailure(
            ErrorCode.ENVELOPE_REFUSED, "the arguments of the call are not an object, too large or nested too deep"
        )
    return arguments


class _SignedCall(Record):
    """What lies in an envelope."""

    call: ToolCall
    context: ToolContext


def _parts(text: str) -> tuple[str, str, str, str]:
    """Version, key id, signature, body. Raises EnvelopeRefused."""
    found = _SHAPE.match(text)
    if found is None:
        if text.startswith("{"):
            raise EnvelopeRefused("envelope of another release: run the same release on both sides", "version")
        raise EnvelopeRefused("envelope is not of the form v<version>.<key id>.<signature>.<JSON>")
    if found["version"] != f"v{VERSION}":
        told = (
            f"envelope of version {found['version'][:8]}; this side speaks v{VERSION}: run the same release on both "
            "sides"
        )
        raise EnvelopeRefused(told, "version")
    return found["version"], found["key_id"], found["signature"], text[found.end() :]


def _signature(key: SigningKey, head: str, body: str) -> str:
    """Over tool, arguments, tenant, deadline and call id alike, and over which key it is."""
    return key.sign(PURPOSE, f"{head}.{body}".encode(errors="surrogatepass"))


def encode_result(
    result: ToolResult, keep: Callable[[bytes], str] | None = None, seal: ResultSeal | None = None
) -> dict[str, Any]:
    """A result as the plain data that Celery stores: a few harmless fields, then the record as text.

    `keep` puts what is larger than INLINE_BYTES elsewhere and gives the key under which it lies; without it everything
    travels inline. What it raises is raised here. `seal` signs the record, wherever it lies; without it only a receiver
    that asks for none takes it.

    Celery shows the beginning of what a task returned in its log and in its events. The record is nested deeper than
    that goes, so that neither output nor arguments show there, however short they are.
    """
    text = _record_text(result) if seal is None else seal.close(_record_text(result))
    if keep is not None and len(text) > INLINE_BYTES // _UTF8_BYTES:
        data = text.encode()
        if len(data) > INLINE_BYTES:
            return {**_head(result), "kept": [[[keep(data)]]]}
    return {**_head(result), "data": [[[text]]]}


def stored_answer(stored: Mapping[str, Any]) -> Any:
    """Return the encoded result in a stored Celery result; None when the task ended without one.

    A call that the infrastructure failed has the state FAILURE: there `result` is Celery's exception, and `answer` is
    the encoded result.
    """
    return stored.get("result") if stored.get("status") == "SUCCESS" else stored.get("answer")


def kept_result_key(data: Any) -> str | None:
    """Where the record of an encoded result lies when it does not travel with it. Whose key it is must be checked
    before it is read.
    """
    match data:
        case {"kept": [[[str() as key]]]}:
            return key
        case _:
            return None


def join_result(data: Mapping[str, Any], record: bytes) -> dict[str, Any]:
    """An encoded result whose record was kept elsewhere, with that record."""
    head = {name: value for name, value in data.items() if name != "kept"}
    return {**head, "data": [[[record.decode(errors="replace")]]]}


def decode_result(data: Any, seal: ResultSeal | None = None) -> ToolResult:
    """The result of a worker. Raises EnvelopeRefused when version, shape or fields are not ours, or `seal` does not
    hold.
    """
    if not isinstance(data, dict) or data.get("v") != VERSION:
        raise EnvelopeRefused(
            f"result of an unknown version; this side speaks {VERSION}: run the same release on both sides", "version"
        )
    match data.get("data"):
        case [[[str() as text]]]:
            result = _record(ToolResult, text if seal is None else seal.open(text))
        case _:
            raise EnvelopeRefused("result of another shape: its record is missing")
    if {name: value for name, value in data.items() if name != "data"} != _head(result):
        raise EnvelopeRefused("result whose head does not fit its record")
    return result


def _record_text(result: ToolResult) -> str:
    try:
        return result.model_dump_json()
    except ValueError:
        # Half a surrogate pair in its metadata, which no UTF-8 carries.
        return json.dumps(result.model_dump(mode="json"), ensure_ascii=False).encode(errors="replace").decode()


def _head(result: ToolResult) -> dict[str, Any]:
    code = result.error_code.value if result.error_code is not None else None
    return {"v": VERSION, "call_id": result.call_id, "name": result.name, "success": result.success, "error_code": code}


def _record(kind: type[AnyRecord], text: str) -> AnyRecord:
    try:
        return kind.model_validate_json(text)
    except (ValidationError, ValueError) as error:
        raise EnvelopeRefused(f"not a valid {kind.__name__}: {_first_complaint(error)}") from error


def _first_complaint(error: Exception) -> str:
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False, include_input=False)[0]
        return f"{'.'.join(str(part) for part in first['loc'])}: {first['msg']}"
    return str(error)


def _bounded(text: str) -> str:
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:
        raise ValueError("the call holds half of a surrogate pair, which is no text: send whole characters") from error
    if size > MAX_ENVELOPE_BYTES:
        raise EnvelopeTooLarge(
            f"the call is {size} bytes; at most {MAX_ENVELOPE_BYTES} fit an envelope: write large content in parts "
            "(write_tool with mode=append), or with Session.write_file"
        )
    return text
