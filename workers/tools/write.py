"""write_tool: a text file of the session's sandbox, written whole."""

from typing import Any

from contract.specs import ToolSpec
from workers.tools.base import Outcome, ToolEnvironment, WorkerTool
from workers.tools.read import PATH_ALIASES
from workers.tools.text import MAX_OUTPUT_BYTES, decode, encode, show_name

MAX_CONTENT_CHARS = 10 * 1024 * 1024

_WRITE = ToolSpec(
    name="write_tool",
    description=(
        "Write a text file in the sandbox, whole and at once: it is replaced or it stays as it was. Missing folders "
        "are made. An existing file keeps its encoding, mode and links. Gives a diff of what was overwritten. A file "
        "that something else changed since you read or wrote it is not overwritten at once: you get the change, and "
        "the same call again goes through. For a small change use edit_tool. Relative paths start at the session's "
        "working directory, at first /workspace."
    ),
    parameters={
        "type": "object",
        "properties": {
            "file_path": {"type": "string", "minLength": 1, "description": "the file"},
            "content": {
                "type": "string",
                "maxLength": MAX_CONTENT_CHARS,
                "description": (
                    "the text, whole and as it is to stand in the file; more than about 500 KB in several calls with "
                    "mode append"
                ),
            },
            "mode": {
                "type": "string",
                "enum": ["overwrite", "append", "create"],
                "default": "overwrite",
                "description": "create fails when the file exists",
            },
            "encoding": {
                "type": "string",
                "minLength": 1,
                "maxLength": 40,
                "default": "auto",
                "description": "auto: an existing file's own, utf-8 for a new one",
            },
        },
        "required": ["file_path", "content"],
        "additionalProperties": False,
    },
    requires_permission=True,
    aliases=PATH_ALIASES,
)


def _write(arguments: dict[str, Any], environment: ToolEnvironment) -> Outcome:
    path, mode = arguments["file_path"], arguments["mode"]
    body = encode(arguments["content"], "content")
    request = {
        "op": "write_text",
        "path": path,
        "mode": mode,
        "encoding": arguments["encoding"],
        "max_bytes": MAX_OUTPUT_BYTES,
    }
    response = environment.run({**request, "timeout_s": environment.context.timeout_s}, body)
    done, told = response.done, decode(response.streams.get("file", b""))
    verb = "created" if done["created"] else {"append": "appended to"}.get(mode, "overwrote")
    head = f"{verb} {show_name(path)} ({done['written']} bytes, {done['lines']} lines)"
    metadata = {"size_bytes": done["size"], "created": done["created"], "encoding": done["encoding"]}
    return Outcome(f"{head}\n{told}" if told else head, metadata)


WRITE_TOOL = WorkerTool(_WRITE, _write)
