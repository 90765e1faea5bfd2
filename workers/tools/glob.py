"""glob_tool: find files in the session's sandbox by a name pattern, the newest first."""

from typing import Any

from toolcrew.contract.guest_protocol import GlobAnswer, GlobRequest
from toolcrew.contract.plurals import count
from toolcrew.contract.specs import ToolSpec
from toolcrew.workers.tools.base import Outcome, ToolEnvironment, WorkerTool
from toolcrew.workers.tools.search_notes import FoundLines, build_common_notes
from toolcrew.workers.tools.text import MAX_OUTPUT_BYTES, encode

DEFAULT_LIMIT = 100
MAX_LIMIT = 2000

_SPEC = ToolSpec(
    name="glob_tool",
    description=(
        "Find files by name, the newest first. *.py matches in every folder, src/*.py only in src; ** crosses folders."
    ),
    parameters={
        "type": "object",
        "properties": {
            "pattern": {"type": "string"},
            "path": {
                "type": "string",
                "minLength": 1,
                "default": ".",
                "description": "the folder to search",
            },
            "limit": {
                "type": "integer",
                "minimum": 1,
                "maximum": MAX_LIMIT,
                "default": DEFAULT_LIMIT,
            },
            "include_ignored": {
                "type": "boolean",
                "default": False,
                "description": "also files that .gitignore and other ignore files hide",
                "x-hidden": True,
            },
            "type": {
                "type": "string",
                "enum": ["file", "dir", "any"],
                "default": "file",
            },
        },
        "required": ["pattern"],
        "additionalProperties": False,
    },
    read_only=True,
    idempotent=True,
    aliases={"dir_path": "path", "directory": "path", "glob": "pattern", "max_results": "limit", "head_limit": "limit"},
)


def _glob(arguments: dict[str, Any], environment: ToolEnvironment) -> Outcome:
    encode(arguments["pattern"], "pattern")
    request = GlobRequest(
        pattern=arguments["pattern"],
        path=arguments["path"],
        kind=arguments["type"],
        limit=arguments["limit"],
        include_ignored=arguments["include_ignored"],
        max_bytes=MAX_OUTPUT_BYTES,
        live_bytes=MAX_OUTPUT_BYTES if environment.is_watched else 0,
        timeout_s=environment.context.timeout_s,
    )
    lines = FoundLines(environment)
    answer = environment.run(request, on_data=lines.take).answer
    metadata = {name: getattr(answer, name) for name in ("total", "shown", "ignored", "partial")}
    return Outcome(lines.text() + "\n".join(_notes(arguments, answer)), metadata, truncated=answer.cut)


def _notes(arguments: dict[str, Any], answer: GlobAnswer) -> list[str]:
    shown, total = answer.shown, answer.total
    head = f"{shown} of {total}; newest first"
    if answer.cut:
        head += f"; the output is full at {MAX_OUTPUT_BYTES // 1024} KiB: narrow pattern or path"
    elif shown < total:
        head += f"; {_next_step(arguments['limit'])}"
    notes = [f"[{head}]"]
    if answer.unreadable:
        notes.append(f"[{count(answer.unreadable, 'folder')} could not be read, or lie too deep]")
    if arguments["pattern"].startswith("/") and arguments["path"] != ".":
        notes.append("[path was not used: the pattern is absolute]")
    return notes + build_common_notes(answer, "pattern or path")


def _next_step(limit: int) -> str:
    return f"raise limit (at most {MAX_LIMIT}) or narrow the pattern" if limit < MAX_LIMIT else "narrow the pattern"


GLOB_TOOL = WorkerTool(_SPEC, _glob)
