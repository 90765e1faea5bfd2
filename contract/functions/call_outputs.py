"""Conversion of a function's return value or exception to the ToolResult of its call."""

import dataclasses
import json
from collections.abc import Mapping, Set
from enum import Enum
from typing import Any

from pydantic import BaseModel, JsonValue, TypeAdapter, ValidationError

from toolcrew.contract.calls import MAX_OUTPUT_CHARS, ToolCall, ToolResult
from toolcrew.contract.errors import ErrorCode, ToolFailure

_METADATA: TypeAdapter[dict[str, JsonValue]] = TypeAdapter(dict[str, JsonValue])


def build_result(call: ToolCall, value: Any) -> ToolResult:
    """Return the result for the value that the function of a call returned.

    A ToolResult, a LangChain-style message and an object with `success` keep their status. Any other value becomes
    the text of a successful result. Exceptions of the value's own methods propagate.
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
    """Return the result for the error that the function of a call raised.

    The result has the type and the text of the exception, or the code and the sentence of a ToolFailure.
    """
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        # The message of a TaskGroup's exception is generic; the exception of its one task has the cause.
        error = error.exceptions[0]
    if isinstance(error, ToolFailure):
        return ToolResult.failed(call, error.code, error.message, metadata=_plain_metadata(error.metadata))
    try:
        message = str(error)
    except Exception:  # noqa: BLE001  # __str__ of a user's exception may raise
        message = ""
    name = type(error).__name__
    return ToolResult.failed(call, ErrorCode.INTERNAL, f"{name}: {message}" if message else name)


def value_text(value: Any) -> str:
    """Return text unchanged, and any other value as JSON. Values that have no JSON form are converted with `str`."""
    if isinstance(value, str):
        return str(value)
    if isinstance(value, bytes | bytearray):
        return bytes(value).decode("utf-8", "replace")
    try:
        return json.dumps(value, ensure_ascii=False, default=_jsonable)
    except (TypeError, ValueError, RecursionError):
        return str(value)


def _reports_success(value: Any) -> bool:
    """Return whether the value has the shape of a ToolResult. A dict or a pydantic model with such fields is data."""
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
    is_error = getattr(message, "status", "success") == "error"
    text, artifact = value_text(message.content), _extra(message, "artifact")
    return _from_parts(call, not is_error, None if is_error else text, text if is_error else None, artifact)


def _from_parts(call: ToolCall, success: bool, output: Any, error: Any, metadata: dict[str, JsonValue]) -> ToolResult:
    text = None if output is None else value_text(output)
    if success:
        return _success(call, text or "", metadata)
    fitted, is_cut = _fit(text or "")
    message = value_text(error) if error else "the tool reported a failure"
    return ToolResult.failed(
        call, ErrorCode.INTERNAL, message, output=fitted or None, truncated=is_cut, metadata=metadata
    )


def _extra(value: Any, name: str) -> dict[str, JsonValue]:
    extra = getattr(value, name, None)
    return _plain_metadata(extra) if isinstance(extra, Mapping) else {}


def _plain_metadata(metadata: Mapping[str, Any]) -> dict[str, JsonValue]:
    try:
        return _METADATA.validate_python(dict(metadata))
    except ValidationError:
        return {str(key): value_text(value) for key, value in metadata.items()}


def _fit(text: str) -> tuple[str, bool]:
    """Return at most MAX_OUTPUT_CHARS characters of the text as valid UTF-8, and whether the text was cut."""
    if not text.isascii():
        text = text.encode("utf-8", "replace").decode()
    return text[:MAX_OUTPUT_CHARS], len(text) > MAX_OUTPUT_CHARS
