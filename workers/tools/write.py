"""write_tool: write a whole text file of the session's sandbox."""

from typing import Any

from pydantic import JsonValue

from toolcrew.contract.guest_protocol import WriteTextRequest
from toolcrew.contract.plurals import count
from toolcrew.contract.specs import ToolSpec
from toolcrew.workers.tools.base import Outcome, ToolEnvironment, WorkerTool
from toolcrew.workers.tools.read import PATH_ALIASES
from toolcrew.workers.tools.text import MAX_OUTPUT_BYTES, decode, encode, show_name

MAX_CONTENT_CHARS = 10 * 1024 * 1024

_WRITE = ToolSpec(
    name="write_tool",
    description=(
        "Write a whole text file. Creates missing folders, and returns a diff of an overwritten file. For a small "
        "change use edit_tool."
    ),
    parameters={
        "type": "object",
        "properties": {
            "file_path": {"type": "string", "minLength": 1},
            "content": {
                "type": "string",
                "maxLength": MAX_CONTENT_CHARS,
            },
            "mode": {
                "type": "string",
                "enum": ["overwrite", "append", "create"],
                "default": "overwrite",
                "description": "create: fail when the file exists",
            },
            "encoding": {
                "type": "string",
                "minLength": 1,
                "maxLength": 40,
                "default": "auto",
                "description": "auto: an existing file's own, utf-8 for a new one",
                "x-hidden": True,
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
    request = WriteTextRequest(
        path=path,
        mode=mode,
        encoding=arguments["encoding"],
        max_bytes=MAX_OUTPUT_BYTES,
        timeout_s=environment.context.timeout_s,
    )
    reply = environment.run(request, body)
    answer = reply.answer
    excerpt = decode(reply.streams.get("file", b""))
    verb = "created" if answer.created else {"append": "appended to"}.get(mode, "overwrote")
    head = f"{verb} {show_name(path)} ({count(answer.written, 'byte')}, {count(answer.lines, 'line')})"
    metadata: dict[str, JsonValue] = {
        "size_bytes": answer.size,
        "created": answer.created,
        "encoding": answer.encoding,
    }
    return Outcome(f"{head}\n{excerpt}" if excerpt else head, metadata)


WRITE_TOOL = WorkerTool(_WRITE, _write)
