"""Configuration that the caller of a session gives to tools. A tool reads its part in `CallContext.config`."""

import json
from collections.abc import Mapping
from typing import Annotated

from pydantic import AfterValidator, Field, JsonValue, TypeAdapter

from toolcrew.contract.calls import ToolName
from toolcrew.contract.errors import ConfigError
from toolcrew.contract.invalid_input import describe_invalid
from toolcrew.contract.json_limits import is_deeper

MAX_BYTES = 64 * 1024
"""Limit of the configuration of all tools of a session, in bytes of JSON."""
MAX_DEPTH = 20


def check_tool_config(config: Mapping[str, Mapping[str, JsonValue]]) -> Mapping[str, Mapping[str, JsonValue]]:
    """Return `config`. Raises ValueError when it is too large, nested too deep, or no JSON."""
    if is_deeper(config, MAX_DEPTH):
        raise ValueError(f"the configuration is nested deeper than {MAX_DEPTH}: reduce the nesting")
    try:
        size = len(json.dumps(config, ensure_ascii=False, allow_nan=False).encode())
    except ValueError as error:
        raise ValueError(
            "the configuration has a lone surrogate, NaN or Infinity, which JSON cannot encode: remove it"
        ) from error
    if size > MAX_BYTES:
        raise ValueError(
            f"the configuration has {size} bytes of JSON, more than {MAX_BYTES}: put large values into files of the "
            "session"
        )
    return config


ToolConfig = Annotated[dict[ToolName, dict[str, JsonValue]], Field(max_length=200), AfterValidator(check_tool_config)]
"""Name of a tool -> the JSON object that it reads."""

_PARSER: TypeAdapter[dict[str, dict[str, JsonValue]]] = TypeAdapter(ToolConfig)


def parse_tool_config(value: object) -> dict[str, dict[str, JsonValue]]:
    """Return a checked copy of a configuration. Raises ConfigError."""
    try:
        return _PARSER.validate_python(value)
    except (ValueError, RecursionError) as error:
        reason = describe_invalid(error) if isinstance(error, ValueError) else "it is nested too deep"
        raise ConfigError(
            f"tool_config: {reason}. Pass a JSON object for each tool, by the name of the tool"
        ) from error
