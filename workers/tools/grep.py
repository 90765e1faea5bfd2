"""grep_tool: search the contents of files in the session's sandbox. The most recently changed file comes first."""

from typing import Any

from toolcrew.contract.guest_protocol import GrepAnswer, GrepRequest
from toolcrew.contract.plurals import count, plural
from toolcrew.contract.specs import ToolSpec
from toolcrew.workers.tools.base import Outcome, ToolEnvironment, WorkerTool
from toolcrew.workers.tools.search_notes import FoundLines, build_common_notes, name_some
from toolcrew.workers.tools.text import MAX_LINES, MAX_OUTPUT_BYTES, encode

DEFAULT_LIMIT = 100
MAX_LIMIT = 1000
MAX_CONTEXT = 20
_CONTEXT = {"type": "integer", "minimum": 0, "maximum": MAX_CONTEXT, "default": 0}
_GLOBS = {"type": "string", "minLength": 1}
_METADATA_FIELDS = ("matches", "files", "shown", "ignored", "large", "binary", "unreadable", "partial")

_SPEC = ToolSpec(
    name="grep_tool",
    description=(
        "Search the contents of files with a regular expression. Returns `path:line: text`, the newest files first. "
        "Set fixed_strings to search for plain text."
    ),
    parameters={
        "type": "object",
        "properties": {
            "pattern": {"type": "string", "maxLength": 131_000},
            "path": {
                "type": "string",
                "minLength": 1,
                "default": ".",
                "description": "file or folder",
            },
            "include": {
                **_GLOBS,
                "description": "files to search, like *.py,*.md",
            },
            "exclude": {**_GLOBS, "description": "files and folders to leave out"},
            "type": {**_GLOBS, "description": "type of files: py, js, go, md ...", "x-hidden": True},
            "ignore_case": {"type": "boolean", "default": False},
            "fixed_strings": {"type": "boolean", "default": False},
            "multiline": {
                "type": "boolean",
                "default": False,
                "description": "matches may span lines",
            },
            "before": {**_CONTEXT, "description": "lines to show before each match", "x-hidden": True},
            "after": {**_CONTEXT, "description": "lines to show after each match", "x-hidden": True},
            "context": {**_CONTEXT, "description": "lines around each match"},
            "output_mode": {
                "type": "string",
                "enum": ["content", "files", "count"],
                "default": "content",
            },
            "limit": {
                "type": "integer",
                "minimum": 1,
                "maximum": MAX_LIMIT,
                "default": DEFAULT_LIMIT,
            },
            "max_per_file": {
                "type": "integer",
                "minimum": 1,
                "description": "how many matches of one file",
                "x-hidden": True,
            },
            "include_ignored": {
                "type": "boolean",
                "default": False,
                "description": "also files that ignore files hide",
                "x-hidden": True,
            },
        },
        "required": ["pattern"],
        "additionalProperties": False,
    },
    read_only=True,
    idempotent=True,
    aliases={
        "glob": "include",
        "include_pattern": "include",
        "exclude_pattern": "exclude",
        "dir_path": "path",
        "directory": "path",
        "-A": "after",
        "-B": "before",
        "-C": "context",
        "-i": "ignore_case",
        "head_limit": "limit",
        "max_results": "limit",
    },
)


def _grep(arguments: dict[str, Any], environment: ToolEnvironment) -> Outcome:
    encode(arguments["pattern"], "pattern")
    lines = FoundLines(environment)
    answer = environment.run(_build_request(arguments, environment.context.timeout_s), on_data=lines.take).answer
    return Outcome(
        lines.text() + "\n".join(_notes(arguments, answer)),
        {name: getattr(answer, name) for name in _METADATA_FIELDS},
        truncated=answer.cut or answer.cut_lines > 0,
    )


def _build_request(arguments: dict[str, Any], timeout_s: float) -> GrepRequest:
    same: dict[str, Any] = {
        name: arguments[name]
        for name in ("pattern", "path", "ignore_case", "fixed_strings", "multiline", "limit", "include_ignored")
    }
    return GrepRequest(
        **same,
        include=arguments.get("include"),
        exclude=arguments.get("exclude"),
        type=arguments.get("type"),
        max_per_file=arguments.get("max_per_file"),
        before=max(arguments["before"], arguments["context"]),
        after=max(arguments["after"], arguments["context"]),
        mode=arguments["output_mode"],
        max_bytes=MAX_OUTPUT_BYTES,
        max_lines=MAX_LINES,
        timeout_s=timeout_s,
    )


def _notes(arguments: dict[str, Any], answer: GrepAnswer) -> list[str]:
    notes = [f"[{_head(arguments, answer)}]"]
    unused = [name for name in ("include", "exclude", "type") if name in arguments]
    if answer.is_file and unused:
        notes.append(f"[{' and '.join(unused)} not used: path is a file]")
    if answer.cut_lines:
        notes.append(
            f"[{count(answer.cut_lines, 'line')} cut to 500 characters around the match, at …; read_tool with offset "
            "and column shows more]"
        )
    if answer.binary:
        names = name_some(answer.binary, answer.binary_names)
        notes.append(f"[binary, not shown: {count(answer.binary, 'file')} that would match: {names}]")
    if answer.large:
        names = name_some(answer.large, answer.large_names)
        notes.append(
            f"[not searched: {count(answer.large, 'file')} over 10 MiB: {names}; give one as path to search it]"
        )
    if answer.unreadable:
        notes.append(f"[could not be read: {name_some(answer.unreadable, answer.unreadable_names)}]")
    return notes + build_common_notes(answer, "path or include, or simplify the pattern")


def _head(arguments: dict[str, Any], answer: GrepAnswer) -> str:
    matches, files, mode = answer.matches, answer.files, arguments["output_mode"]
    if not files:
        searched = answer.searched
        return "no matches" if searched is None else f"no matches in {count(searched, 'file')} searched"
    total = (
        f"{count(files, 'file')} with matches"
        if mode == "files"
        else f"{count(matches, 'match')} in {count(files, 'file')}"
    )
    shown, found = (answer.shown, matches) if mode == "content" else (answer.shown_files, files)
    if shown >= found:
        return total
    noun = "" if mode == "content" else f" {plural(shown, 'file')}"
    return f"{total}; showing first {shown}{noun}; {_next_step(arguments, answer, shown)}"


def _next_step(arguments: dict[str, Any], answer: GrepAnswer, shown: int) -> str:
    narrow = "narrow pattern, path or include"
    if answer.cut:
        return f"the output is full at {MAX_LINES} lines or {MAX_OUTPUT_BYTES // 1024} KiB: {narrow}"
    if shown >= arguments["limit"]:
        return f"raise limit (at most {MAX_LIMIT}) or {narrow}" if arguments["limit"] < MAX_LIMIT else narrow
    if arguments.get("max_per_file") is not None:
        return f"at most {arguments['max_per_file']} of a file (max_per_file)"
    return "files changed or were removed during the search: search again"


GREP_TOOL = WorkerTool(_SPEC, _grep)
