"""Messages of the Model Context Protocol as JSON-RPC. The messages are untrusted and are read within limits."""

import json
import math
from dataclasses import dataclass
from typing import Any, NoReturn

from toolcrew.contract.errors import ErrorCode, ToolFailure
from toolcrew.contract.json_limits import has_more_values_in_text, is_deeper
from toolcrew.workers.web.fences import one_line

MAX_DEPTH = 64
MAX_VALUES = 200_000
MAX_ERROR_CHARS = 500
MAX_CODE = 2**31


@dataclass(frozen=True)
class ServerReply:
    """A reply of a server: the `result`, or the server's `error` as one printable line with its `code`."""

    result: dict[str, Any] | None = None
    error: str = ""
    code: int = 0


def parse_json(data: bytes | str, server: str) -> Any:
    """Parse JSON. Raises ToolFailure(HTTP_ERROR) for invalid JSON, more than MAX_VALUES values, or a depth over
    MAX_DEPTH.
    """
    try:
        text = data if isinstance(data, str) else data.decode()
        if has_more_values_in_text(text, MAX_VALUES):
            raise build_protocol_error(server, f"a message has more than {MAX_VALUES} values")
        parsed = json.loads(text, parse_constant=_refuse_constant, parse_float=_parse_float)
    except (ValueError, RecursionError):
        raise build_protocol_error(server, "a message is not valid JSON") from None
    if is_deeper(parsed, MAX_DEPTH):
        raise build_protocol_error(server, f"a message is nested deeper than {MAX_DEPTH} levels")
    return parsed


def parse_reply(message: Any, number: int) -> ServerReply | None:
    """Return the reply to request `number`; None for any other message, for example progress or logs. This function
    never raises: an invalid message counts as another message.
    """
    if not isinstance(message, dict) or message.get("jsonrpc") != "2.0" or "method" in message:
        return None
    reply_id = message.get("id")
    if isinstance(reply_id, bool) or reply_id != number:
        return None
    if isinstance(result := message.get("result"), dict) and "error" not in message:
        return ServerReply(result=result)
    error = message.get("error")
    if not isinstance(error, dict):
        return ServerReply(error="neither a result nor an error")
    code = error.get("code")
    text = one_line(str(error.get("message", "")), MAX_ERROR_CHARS)
    return ServerReply(error=text or "no reason given", code=code if type(code) is int and abs(code) < MAX_CODE else 0)


def build_protocol_error(server: str, problem: str) -> ToolFailure:
    """Return the failure for a server that violates the protocol."""
    return ToolFailure(
        ErrorCode.HTTP_ERROR,
        f"the MCP server {server} violates the protocol: {problem}; use another tool, or report this to its operator",
    )


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(name)


def _parse_float(text: str) -> float:
    """Parse a number. Raises ValueError when the number is too large. It would become infinite, which JSON cannot
    express.
    """
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(text)
    return value
