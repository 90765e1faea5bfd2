"""Conversion of the result of an MCP tool to the outcome of a call. Text is put between marks that show it as
untrusted, other content is only described, and all sizes are limited.
"""

import json
from collections.abc import Iterable
from typing import Any

from pydantic import JsonValue

from toolcrew.contract.errors import ErrorCode
from toolcrew.workers.custom.outcomes import MAX_METADATA_BYTES, cut_output
from toolcrew.workers.mcp.messages import build_protocol_error
from toolcrew.workers.tools.base import Outcome
from toolcrew.workers.web.fences import fence, one_line, printable

MAX_BLOCKS = 200
_WORD_CHARS = 200


def build_outcome(server: str, tool: str, result: dict[str, Any]) -> Outcome:
    """Return the outcome of a call. `tool`: the name of the tool in this deployment. `result`: the unchecked result
    of tools/call. Raises ToolFailure(HTTP_ERROR) when the result is invalid.
    """
    if result.get("resultType") not in (None, "complete"):
        raise build_protocol_error(server, "it requests more input, which a tool call cannot give")
    blocks = result.get("content")
    blocks = [] if blocks is None else [blocks] if isinstance(blocks, str | dict) else blocks
    if not isinstance(blocks, list):
        raise build_protocol_error(server, "its response has no content")
    # The first version of the protocol had only `toolResult`.
    structured = result.get("structuredContent", result.get("toolResult"))
    text = "\n".join(_describe_blocks(blocks)) or (
        json.dumps(structured, ensure_ascii=False, indent=1) if structured is not None else ""
    )
    output, is_cut = _fence(server, tool, printable(text))
    metadata: dict[str, JsonValue] = {"mcp_server": server, **_limit_structured(structured)}
    if result.get("isError") not in (True, "true", "True"):
        return Outcome(output, metadata, truncated=is_cut)
    error = f"the MCP server {server} says that {tool} failed; its message is in the output"
    return Outcome(output, metadata, truncated=is_cut, error=error, error_code=ErrorCode.HTTP_ERROR)


def _fence(server: str, tool: str, text: str) -> tuple[str, bool]:
    if not text.strip():
        return "[the tool gave no text]", False
    visible, is_cut = cut_output(tool, text)
    note = ""
    if is_cut:
        visible, _, last = visible.rpartition("\n")
        note = f"\n{last}"
    return fence(visible, source=f"the MCP server {server}", mark="mcp") + note, is_cut


def _describe_blocks(blocks: list[Any]) -> Iterable[str]:
    for block in blocks[:MAX_BLOCKS]:
        if isinstance(block, str):
            yield block
        else:
            yield _describe_block(block) if isinstance(block, dict) else "[a part with an invalid form: not shown]"
    if len(blocks) > MAX_BLOCKS:
        yield f"[{len(blocks) - MAX_BLOCKS} more parts were left out]"


def _describe_block(block: dict[str, Any]) -> str:
    block_type = block.get("type")
    if block_type == "text" and isinstance(block.get("text"), str):
        return str(block["text"])
    if block_type in ("image", "audio"):
        return f"[{block_type}, {_line(block.get('mimeType'))}, {_size(block.get('data'))}: not attached]"
    if block_type == "resource_link":
        return f"[a link to a resource: {_line(block.get('name'))}, {_line(block.get('uri'))}]"
    if block_type == "resource" and isinstance(resource := block.get("resource"), dict):
        head = f"[a resource: {_line(resource.get('uri'))}, {_line(resource.get('mimeType'))}"
        if isinstance(resource.get("text"), str):
            return f"{head}]\n{resource['text']}"
        return f"{head}, {_size(resource.get('blob'))}: not attached]"
    return f"[a part of the kind {_line(block_type)}: not shown]"


def _line(value: Any) -> str:
    return one_line(value, _WORD_CHARS) if isinstance(value, str) and value.strip() else "unknown"


def _size(data: Any) -> str:
    return f"about {len(data) * 3 // 4} bytes" if isinstance(data, str) else "unknown size"


def _limit_structured(structured: Any) -> dict[str, JsonValue]:
    if structured is None:
        return {}
    # JSON can contain a lone surrogate, which UTF-8 cannot encode.
    data = json.dumps(structured, ensure_ascii=False).encode("utf-8", "replace")
    return (
        {"structured": json.loads(data)}
        if len(data) <= MAX_METADATA_BYTES // 2
        else {"structured_dropped_bytes": len(data)}
    )
