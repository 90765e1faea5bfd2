"""read_tool: read a text file of the session's sandbox, in numbered lines."""

from collections.abc import Mapping
from typing import Any

from pydantic import JsonValue

from toolcrew.contract.errors import ErrorCode, ToolFailure
from toolcrew.contract.guest_protocol import ReadTextAnswer, ReadTextRequest
from toolcrew.contract.plurals import count
from toolcrew.contract.specs import ToolSpec
from toolcrew.workers.tools.base import Outcome, ToolEnvironment, WorkerTool
from toolcrew.workers.tools.text import MAX_OUTPUT_BYTES, decode, show_name

DEFAULT_LINES = 2000
MAX_LINES = 10_000
PATH_ALIASES = {"filePath": "file_path", "path": "file_path", "filename": "file_path"}
FOOTER_BYTES = 2048
"""Bytes of the output that are reserved for the notes below the lines."""

_READ = ToolSpec(
    name="read_tool",
    description=(
        "Read a text file. Returns numbered lines (number, tab, text) and how to continue when there are more."
    ),
    parameters={
        "type": "object",
        "properties": {
            "file_path": {"type": "string", "minLength": 1},
            "offset": {"type": "integer", "minimum": 1, "default": 1, "description": "first line"},
            "limit": {
                "type": "integer",
                "minimum": 1,
                "maximum": MAX_LINES,
                "default": DEFAULT_LINES,
                "description": "number of lines",
            },
            "column": {
                "type": "integer",
                "minimum": 1,
                "default": 1,
                "description": "first character of the first line, to continue in a long one",
                "x-hidden": True,
            },
            "encoding": {
                "type": "string",
                "minLength": 1,
                "maxLength": 40,
                "default": "auto",
                "description": "auto, or a codec such as gb18030",
                "x-hidden": True,
            },
        },
        "required": ["file_path"],
        "additionalProperties": False,
    },
    read_only=True,
    idempotent=True,
    aliases=PATH_ALIASES,
)

_NEXT_MOVE = {
    ErrorCode.BINARY_FILE: (
        "look at it with bash_tool (file, xxd | head), or read it all the same with encoding=utf-16 or latin-1"
    ),
    ErrorCode.FILE_TOO_LARGE: "use bash_tool with tail, sed -n or cut -c to reach it",
    ErrorCode.FILE_NOT_FOUND: "glob_tool finds files by pattern",
    ErrorCode.PERMISSION_DENIED: "if it is meant to be read, chmod it with bash_tool",
}


def _read(arguments: dict[str, Any], environment: ToolEnvironment) -> Outcome:
    request = ReadTextRequest(
        path=arguments["file_path"],
        offset=arguments["offset"],
        limit=arguments["limit"],
        column=arguments["column"],
        encoding=arguments["encoding"],
        max_bytes=MAX_OUTPUT_BYTES - FOOTER_BYTES,
        timeout_s=environment.context.timeout_s,
    )
    try:
        reply = environment.run(request)
    except ToolFailure as failure:
        if failure.code not in _NEXT_MOVE:
            raise
        raise ToolFailure(failure.code, f"{failure.message}; {_NEXT_MOVE[failure.code]}", **failure.metadata) from None
    answer = reply.answer
    raw = reply.streams.get("file", b"")
    if answer.kind == "directory":
        return _directory(arguments["file_path"], answer, raw)
    if answer.kind != "text":
        return _picture(answer)
    return _page(arguments, answer, raw)


def _page(arguments: Mapping[str, Any], answer: ReadTextAnswer, raw: bytes) -> Outcome:
    lines = raw.decode("utf-8", "replace").split("\n")[:-1]
    first, last = arguments["offset"], arguments["offset"] + len(lines) - 1
    is_end = answer.is_counted and last >= answer.lines
    metadata: dict[str, JsonValue] = {
        "size_bytes": answer.size,
        "lines": answer.lines,
        "encoding": answer.encoding,
        "newline": answer.newline,
    }
    if not answer.is_counted:
        metadata["lines_counted"] = False
    if answer.has_bom:
        metadata["bom"] = True
    if not lines:
        return Outcome("[empty file]", metadata)
    text = "\n".join([f"{number}\t{line}" for number, line in enumerate(lines, start=first)]).replace("\0", "\ufffd")
    notes = _notes(answer, is_end=is_end, has_nul=b"\0" in raw)
    footer = [*([f"[note: {'; '.join(notes)}]"] if notes else []), *_footer(first, last, answer, is_end=is_end)]
    # Lines beyond a limit that the caller has set do not count as truncated; lines beyond the default limit do.
    is_cut = bool(answer.cuts) or answer.is_out_of_room or (not is_end and arguments["limit"] == DEFAULT_LINES)
    return Outcome("\n".join([text, *footer]), metadata, truncated=is_cut)


def _notes(answer: ReadTextAnswer, *, is_end: bool, has_nul: bool) -> list[str]:
    """Return notes on properties of the file that the lines do not show."""
    codec = answer.encoding
    notes = []
    if codec != "utf-8":
        notes.append(
            f"not UTF-8 but {codec}"
            + (", which is a guess: pass encoding if it reads wrong" if answer.is_guess else "")
        )
    if answer.is_damaged:
        notes.append(f"bytes that are no {codec} are shown as U+FFFD")
    elif codec == "utf-8" and answer.is_guess:
        notes.append("bytes elsewhere in the file are no UTF-8")
    if has_nul:
        notes.append("NUL characters are shown as U+FFFD")
    if answer.has_bom:
        notes.append("byte order mark at the start")
    if answer.newline in _NEWLINES:
        notes.append(_NEWLINES[answer.newline])
    if is_end and not answer.final_newline:
        notes.append("no newline at the end of the file")
    return notes


_NEWLINES = {
    "crlf": "CRLF line ends",
    "mixed": "some line ends are CRLF, some LF",
    "cr": "CR line ends only, so that all is one line",
}


def _footer(first: int, last: int, answer: ReadTextAnswer, *, is_end: bool) -> list[str]:
    """Return the lines that say how to continue.

    The last line says how to read the next page, unless the page is a single line that was cut.
    """
    total = answer.lines
    is_counted = answer.is_counted
    footer = []
    for line, shown, length in answer.cuts:
        at_least = "" if is_counted or line < total else "at least "
        footer.append(
            f"[line {line} cut at {shown} of {at_least}{length} characters; continue with offset={line} limit=1 "
            f"column={shown + 1}]"
        )
    if footer and first == last:
        return footer
    if is_end:
        return [*footer, f"[end of file: {count(total, 'line')}]"]
    return [
        *footer,
        f"[lines {first}-{last} of {'' if is_counted else 'at least '}{total}; continue with offset={last + 1}]",
    ]


def _picture(answer: ReadTextAnswer) -> Outcome:
    return Outcome(
        f"[{answer.type}, {answer.size} bytes: it cannot be shown as text]",
        {"size_bytes": answer.size, "type": answer.type},
    )


def _directory(path: str, answer: ReadTextAnswer, raw: bytes) -> Outcome:
    """Return a failure ("is a directory") that lists the names in the directory, so that the call is still useful."""
    shown = raw.count(b"\n")
    entries = answer.entries
    below = (
        f"its {count(entries, 'entry is', 'entries are')} below"
        if shown == entries
        else f"the first {shown} of {entries} entries are below"
    )
    contents = below if entries else "which is empty"
    error = f"{show_name(path)} is a directory, {contents}; read one of its files, or list more with glob_tool"
    return Outcome(
        decode(raw) or None,
        {"entries": entries},
        truncated=shown < entries,
        error=error,
        error_code=ErrorCode.IS_DIRECTORY,
    )


READ_TOOL = WorkerTool(_READ, _read)
