"""write_tool: a text file of the session's sandbox, written whole."""

from typing import Any

from contract.errors import ErrorCode, ToolFailure
from contract.specs import ToolSpec
from workers.tools.base import Outcome, Workbench, WorkerTool
from workers.tools.read import PATH_ALIASES

_WRITE = ToolSpec(
    name="write_tool",
    description=(
        "Write a text file in the sandbox, whole and at once: it is replaced or it stays as it was. Missing folders are made. "
        "Relative paths start at /workspace."
    ),
    parameters={
        "type": "object",
        "properties": {
            "file_path": {"type": "string", "minLength": 1, "description": "the file"},
            "content": {"type": "string", "maxLength": 400_000, "description": "the text"},
            "mode": {
                "type": "string",
                "enum": ["overwrite", "append", "create"],
                "default": "overwrite",
                "description": "create fails when the file exists",
            },
        },
        "required": ["file_path", "content"],
        "additionalProperties": False,
    },
    requires_permission=True,
    aliases=PATH_ALIASES,
)


def _write(arguments: dict[str, Any], bench: Workbench) -> Outcome:
    path, mode = arguments["file_path"], arguments["mode"]
    try:
        content = arguments["content"].encode("utf-8")
    except UnicodeEncodeError as error:
        raise ToolFailure(
            ErrorCode.INVALID_ARGUMENTS, f"content holds half of a surrogate pair at character {error.start}; send whole characters"
        ) from error
    request = {"op": "write_file", "path": path, "mode": mode, "timeout_s": bench.context.timeout_s}
    done = bench.run(request, content).done
    verb = "created" if done["created"] else {"append": "appended to"}.get(mode, "overwrote")
    lines = content.count(b"\n") + (1 if content and not content.endswith(b"\n") else 0)
    return Outcome(f"{verb} {path} ({len(content)} bytes, {lines} lines)", {"size_bytes": done["size"], "created": done["created"]})


WRITE_TOOL = WorkerTool(_WRITE, _write)
