"""Whatever a function gives or raises, as the one ToolResult of its call."""

import dataclasses
import json
from collections.abc import Mapping, Set
from enum import Enum
from typing import Any

from pydantic import BaseModel, JsonValue, TypeAdapter, ValidationError

from contract.calls import MAX_OUTPUT_CHARS, ToolCall, ToolResult
from contract.errors import ErrorCode, ToolFailure

_METADATA: TypeAdapter[dict[str, JsonValue]] = TypeAdapter(dict[str, JsonValue])


def build_result(call: ToolCall, value: Any) -> ToolResult:
    """A success with `value` as text; results of ours and of look-alikes keep what they say. Raises what `value`'s own
    methods raise.
    """
    if isinstance(value, ToolResult):
        return value.model_copy(update={"call_id": call.id, "name": call.name})
    if hasattr(value, "tool_call_id") and hasattr(value, "content"):
        return _from_message(call, value)
    if _reports_success(value):
        return _from_parts(
            call,
            value.success,
            getattr(value, "output", None),
            getattr(value, "error", None),
            _extra(value, "metadata"),
        )
    return _success(call, value_text(value))


def build_failure(call: ToolCall, error: BaseException) -> ToolResult:
    """What the model is told of an exception: its type and text, or the code and sentence of a ToolFailure."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        # What a TaskGroup raises says nothing; its one task does.
        error = error.exceptions[0]
    if isinstance(error, ToolFailure):
        return ToolResult.failed(call, error.code, error.message, metadata=_plain_metadata(error.metadata))
    try:
        told = str(error)
    except Exception:  # noqa: BLE001  # a user's exception may fail even at saying what it is
        told = ""
    name = type(error).__name__
    return ToolResult.failed(call, ErrorCode.INTERNAL, f"{name}: {told}" if told else name)


def value_text(value: Any) -> str:
    """Text as it is; everything else as JSON, and what JSON cannot carry as `str` writes it."""
    if isinstance(value, str):
        return str(value)
    if isinstance(value, bytes | bytearray):
        return bytes(value).decode("utf-8", "replace")
    try:
        return json.dumps(value, ensure_ascii=False, default=_jsonable)
    except (TypeError, ValueError, RecursionError):
        return str(value)


def _reports_success(value: Any) -> bool:
    """True for results in the shape of ours. Data that merely has such fields, a dict or a model, stays data."""
    if isinstance(value, Mapping | BaseModel):
        return False
    return isinstance(getattr(value, "success", None), bool) and (hasattr(value, "output") or hasattr(value, "error"))


def _jsonable(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {part.name: getattr(value, part.name) for part in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Set):
        return list(value)
    if isinstance(value, Enum):
        return value.value
    return str(value)


def _success(call: ToolCall, text: str, metadata: dict[str, JsonValue] | None = None) -> ToolResult:
    text, is_cut = _fit(text)
    return ToolResult(
        call_id=call.id, name=call.name, success=True, output=text, truncated=is_cut, metadata=metadata or {}
    )


def _from_message(call: ToolCall, message: Any) -> ToolResult:
    """A ToolMessage's content, status and artifact."""
    is_error = getattr(message, "status", "success") == "error"
    text, artifact = value_text(message.content), _extra(message, "artifact")
    return _from_parts(call, not is_error, None if is_error else text, text if is_error else None, artifact)


def _from_parts(call: ToolCall, success: bool, output: Any, error: Any, metadata: dict[str, JsonValue]) -> ToolResult:
    text = None if output is None else value_text(output)
    if success:
        return _success(call, text or "", metadata)
    fitted, is_cut = _fit(text or "")
    told = value_text(error) if error else "the tool reported a failure"
    return ToolResult.failed(call, ErrorCode.INTERNAL, told, output=fitted or None, truncated=is_cut, metadata=metadata)


def _extra(value: Any, name: str) -> dict[str, JsonValue]:
    found = getattr(value, name, None)
    return _plain_metadata(found) if isinstance(found, Mapping) else {}


def _plain_metadata(metadata: Mapping[str, Any]) -> dict[str, JsonValue]:
    try:
        return _METADATA.validate_python(dict(metadata))
    except ValidationError:
        return {str(key): value_text(value) for key, value in metadata.items()}


def _fit(text: str) -> tuple[str, bool]:
    """At most MAX_OUTPUT_CHARS characters that UTF-8 can carry, and whether that cut something."""
    if not text.isascii():
        text = text.encode("utf-8", "replace").decode()
    return text[:MAX_OUTPUT_CHARS], len(text) > MAX_OUTPUT_CHARS
