"""Tools as MCP lists them: our schemas word for word, and hints made of what each spec says of itself."""

from typing import Any

from mcp_types import Tool, ToolAnnotations

from contract.specs import NO_NETWORK, ToolSpec

OUTPUT_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "text": {"type": "string", "description": "What a model reads of the result: the same as the text content."},
        "success": {"type": "boolean"},
        "error_code": {
            "type": ["string", "null"],
            "description": "Of a call that failed: a closed code, such as TIMEOUT.",
        },
        "truncated": {"type": "boolean", "description": "Whether the text is not all of the output."},
        "spill": {
            "type": ["object", "null"],
            "description": "Where all of a truncated output lies in the session.",
            "properties": {
                "path": {"type": "string"},
                "bytes": {"type": "integer"},
                "lines": {"type": ["integer", "null"]},
            },
            "required": ["path", "bytes"],
        },
        "metadata": {
            "type": "object",
            "description": "What the tool tells beside its text; which, depends on the tool.",
        },
    },
    "required": ["text", "success", "error_code", "truncated", "spill", "metadata"],
}
"""Of every tool: the whole result as programs read it. The text is in it too, for some clients show a model the
structured content alone.
"""


def build_tool(spec: ToolSpec) -> Tool:
    """The tool as clients get it."""
    return Tool(
        name=spec.name,
        description=spec.description,
        input_schema=dict(spec.parameters),
        output_schema=OUTPUT_SCHEMA,
        annotations=build_hints(spec),
    )


def build_hints(spec: ToolSpec) -> ToolAnnotations:
    """What MCP's hints say of a tool. Of one that only reads it is left open what would be about its changes."""
    # Inside a sandbox only a command reaches what network there is.
    reaches_out = spec.pool != "sandbox" or (spec.command_parameter is not None and spec.network != NO_NETWORK)
    if spec.read_only:
        return ToolAnnotations(read_only_hint=True, open_world_hint=reaches_out)
    return ToolAnnotations(
        read_only_hint=False, destructive_hint=True, idempotent_hint=spec.idempotent, open_world_hint=reaches_out
    )
