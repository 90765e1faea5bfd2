"""read_tool: a text file of the session's sandbox, in numbered lines."""

from typing import Any

from contract.errors import ErrorCode, ToolFailure
from contract.specs import ToolSpec
from workers.tools.base import Outcome, Workbench, WorkerTool
from workers.tools.text import MAX_OUTPUT_BYTES

DEFAULT_LINES = 2000
MAX_LINE_CHARS = 2000
PATH_ALIASES = {"filePath": "file_path", "path": "file_path", "filename": "file_path"}

_READ = ToolSpec(
    name="read_tool",
    description=(
        "Read a text file of the sandbox. Gives numbered lines (number, tab, text) and a last line that says whether the file ended or where to go on. "
        "Relative paths start at /workspace."
    ),
    parameters={
        "type": "object",
        "properties": {
            "file_path": {"type": "string", "minLength": 1, "description": "the file"},
            "offset": {"type": "integer", "minimum": 1, "default": 1, "description": "first line, from 1"},
            "limit": {"type": "integer", "minimum": 1, "maximum": 10000, "default": DEFAULT_LINES, "description": "how many lines"},
        },
        "required": ["file_path"],
        "additionalProperties": False,
    },
    read_only=True,
    idempotent=True,
    aliases=PATH_ALIASES,
)


def _read(arguments: dict[str, Any], bench: Workbench) -> Outcome:
    path, offset, limit = arguments["file_path"], arguments["offset"], arguments["limit"]
    request = {"op": "read_lines", "path": path, "offset": offset, "limit": limit, "max_bytes": MAX_OUTPUT_BYTES}
    response = bench.run({**request, "timeout_s": bench.context.timeout_s})
    done, raw = response.done, response.streams.get("file", b"")
    if b"\0" in raw:
        raise ToolFailure(
            ErrorCode.BINARY_FILE,
            f"{path} is not text ({done['size']} bytes): look at it with bash_tool, e.g. file or xxd",
            size=done["size"],
        )
    metadata = {"size_bytes": done["size"], "lines": done["lines"]}
    if done["size"] == 0:
        return Outcome("[empty file]", metadata)
    lines = _whole_lines(raw, done)
    numbered, cut = _number(lines, offset)
    last = offset + len(lines) - 1
    more = last < done["lines"]
    return Outcome("\n".join([*numbered, _footer(offset, last, done, cut)]), metadata, truncated=bool(cut) or (more and done["cut"]))


def _whole_lines(raw: bytes, done: Any) -> list[str]:
    """The lines to show. One that the byte limit cut short is left for the next call, unless it is all there is: then it is too long anyway."""
    lines = raw.decode("utf-8", "replace").split("\n")
    last = lines.pop()
    is_part = done["cut"] and not raw.endswith(b"\n")
    if last and not (is_part and lines):
        lines.append(last)
    return lines


def _number(lines: list[str], offset: int) -> tuple[list[str], list[int]]:
    """Numbered lines, and the numbers of those that were cut."""
    numbered, cut = [], []
    for number, line in enumerate(lines, start=offset):
        text = line.removesuffix("\r")
        if len(text) > MAX_LINE_CHARS:
            cut.append(number)
            text = text[:MAX_LINE_CHARS]
        numbered.append(f"{number}\t{text}")
    return numbered, cut


def _footer(offset: int, last: int, done: Any, cut: list[int]) -> str:
    total = done["lines"]
    where = f"lines {offset}-{last} of {total}; continue with offset={last + 1}" if last < total else f"end of file: {total} lines"
    notes = [where]
    if cut:
        notes.append(f"lines cut at {MAX_LINE_CHARS} characters: {', '.join(map(str, cut[:10]))}; see the rest with bash_tool and cut -c")
    if last >= total and not done["final_newline"]:
        notes.append("no newline at the end")
    return f"[{'; '.join(notes)}]"


READ_TOOL = WorkerTool(_READ, _read)
