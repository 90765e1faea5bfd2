"""Conversion of program output into text for a model.

Bytes are decoded, folded as a terminal would show them, and cut to a head and a tail, with a note at every cut. Facts
about the end of a command, such as its exit code, are lines in brackets.
"""

import codecs
import json
import re
import signal
from collections.abc import Mapping
from typing import Any, NamedTuple

from pydantic import JsonValue

from toolcrew.contract.calls import MAX_TIMEOUT_S, NO_OUTPUT, Spill, ToolContext
from toolcrew.contract.errors import ErrorCode, ToolFailure
from toolcrew.contract.guest_protocol import ExecAnswer, GuestReply, StreamCounts
from toolcrew.contract.plurals import count, plural
from toolcrew.workers.tools.base import Outcome
from toolcrew.workers.tools.screen import draw, has_cursor_moves

MAX_OUTPUT_BYTES = 32 * 1024
MAX_LINES = 2000
HEAD_LINES = MAX_LINES // 4
NARROWER = "narrow the command, or send its output to a file and read parts"
"""Advice when the rest of an output was not kept."""
_CONTINUATIONS = bytes(range(0x80, 0xC0))
"""Bytes that only continue a code point."""
_ESCAPE = re.compile(
    r"\x1b(?:\[[0-?]*[ -/]*[@-~]"  # CSI: colours, cursor
    r"|\][^\x07\x1b\n]*(?:\x07|\x1b\\)?"  # OSC: titles, links
    r"|[PX^_][^\x1b\n]*(?:\x1b\\)?"  # DCS and its like
    r"|[ -/]*[0-Z\\^-~])"  # all others
)

_STILL_ESCAPES = re.compile(rf"(?!\x1b\[[0-?]*[ -/]*[A-HJKdfsu]|\x1b[M78]){_ESCAPE.pattern}")
"""Escape sequences that do not move the cursor and erase nothing."""


def encode(text: str, name: str) -> bytes:
    """Return the UTF-8 bytes of an argument.

    Raises ToolFailure(INVALID_ARGUMENTS): the text has a lone surrogate, which a model's JSON may contain.
    """
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ToolFailure(
            ErrorCode.INVALID_ARGUMENTS,
            f"{name} contains a lone surrogate at character {error.start}; send whole characters",
        ) from error


def decode(data: bytes) -> str:
    """Decode UTF-8 with replacement. NUL becomes U+FFFD, because JSON readers and terminals do not accept it."""
    return data.decode("utf-8", "replace").replace("\0", "\ufffd")


def count_invalid(data: bytes) -> int:
    """Return the number of bytes that are not UTF-8. `decode` replaces them, and NUL, by U+FFFD."""
    return len(data) - len(data.decode("utf-8", "ignore").encode()) + data.count(b"\0")


def build_invalid_notes(replaced: int) -> list[str]:
    """Return a note about the bytes that `decode` has replaced; none when there are none."""
    if replaced == 0:
        return []
    bytes_are = count(replaced, "byte is", "bytes are")
    return [f"[{bytes_are} not UTF-8 text and shown as \ufffd: convert with iconv, or show with od or base64]"]


def fold(text: str) -> str:
    """Return the text that a terminal would show: no escape sequences, and only the last version of an overwritten
    line or frame.
    """
    if "\x1b" in text and has_cursor_moves(text):
        return draw(_STILL_ESCAPES.sub("", text))
    if "\x1b" in text:
        text = _ESCAPE.sub("", text)
    if "\b" in text:
        text = "\n".join(map(_fold_backspaces, text.split("\n")))
    if "\r" in text:
        text = "\n".join(line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n"))
    return text


def show_name(text: str) -> str:
    """Return a name or path from the guest for use within a line of the tool's own text.

    Characters that could end or fake the line are replaced.
    """
    return "".join(
        character if character.isprintable() else "\ufffd" for character in text.encode("utf-8", "replace").decode()
    )


class ShownText(NamedTuple):
    """A captured stream as text. `is_cut`: a part was omitted. `invalid`: number of bytes that `decode` replaced."""

    text: str
    is_cut: bool
    invalid: int


def show_output(data: bytes, counts: StreamCounts | None, rest: str = NARROWER) -> ShownText:
    """Return a captured stream as text of at most MAX_LINES lines.

    A note replaces the omitted part. `counts`: the numbers that the guest reports; None: nothing was dropped.
    `rest` is a text that says how to read the omitted part; `{offset}` in it is replaced by the number of the first
    omitted line.
    """
    total = len(data) if counts is None else counts.total
    head = len(data) if counts is None else counts.head
    if total <= len(data):
        first, last = data, b""
        lines = data.count(b"\n") + (not data.endswith(b"\n"))
        if lines <= MAX_LINES:
            return ShownText(fold(decode(data)), False, count_invalid(data))
        first, last = _first_lines(data, HEAD_LINES), _last_lines(data, MAX_LINES - HEAD_LINES)
    else:
        first = _first_lines(_to_edge(data[:head]), HEAD_LINES)
        last = _last_lines(_from_edge(data[head:]), MAX_LINES - HEAD_LINES)
    advice = rest.replace("{offset}", str(first.count(b"\n") + 1))
    note = f"[... {total - len(first) - len(last)} bytes omitted of {total}: {advice} ...]"
    above = fold(decode(first)).removesuffix("\n")
    text = "\n".join(part for part in (above, note, fold(decode(last))) if part)
    return ShownText(text, True, count_invalid(first) + count_invalid(last))


def _fold_backspaces(line: str) -> str:
    """Apply backspaces, as manual pages and progress displays use them."""
    if "\b" not in line:
        return line
    characters: list[str] = []
    for character in line:
        if character != "\b":
            characters.append(character)
        elif characters:
            characters.pop()
    return "".join(characters)


def _first_lines(data: bytes, max_lines: int) -> bytes:
    at = 0
    for _ in range(max_lines):
        at = data.find(b"\n", at) + 1
        if at == 0:
            return data
    return data[:at]


def _last_lines(data: bytes, max_lines: int) -> bytes:
    at = len(data) - data.endswith(b"\n")
    for _ in range(max_lines):
        at = data.rfind(b"\n", 0, at)
        if at < 0:
            return data
    return data[at + 1 :]


def _to_edge(data: bytes) -> bytes:
    """Cut the head at its last line end, unless this would remove most of the text. Always remove an incomplete code
    point.
    """
    whole = data.rfind(b"\n") + 1
    return data[:whole] if whole * 2 > len(data) else _without_broken_end(data)


def _from_edge(data: bytes) -> bytes:
    whole = data.find(b"\n") + 1
    return data[whole:] if 0 < whole * 2 < len(data) else _without_broken_start(data)


def _without_broken_end(data: bytes) -> bytes:
    """Remove an incomplete code point at the end. Bytes that are not UTF-8 stay."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(data[-3:])
    return data[: len(data) - len(decoder.getstate()[0])]


def _without_broken_start(data: bytes) -> bytes:
    """Remove the rest of a code point at the start. Bytes that are not UTF-8 stay."""
    rest = len(data[:4]) - len(data[:4].lstrip(_CONTINUATIONS))
    return data[rest:] if rest <= 3 else data


_STATE_LOSS_REASONS = {
    "replaced": "it replaced its shell (exec), the shell's EXIT trap, or a builtin that the trap needs",
    "too_large": "they are more than 256 KiB",
    "no_room": "there is no room left in /output",
}
_STATE_NOT_KEPT = "cwd, exported variables and functions of this command were not kept"


def build_outcome(
    arguments: Mapping[str, Any],
    reply: GuestReply[ExecAnswer],
    context: ToolContext,
    *,
    background: str = "background=true",
) -> Outcome:
    """Return the outcome of a command. `background` is the tool's argument that starts a background job, for a hint in
    the text.
    """
    answer = reply.answer
    streams = reply.streams
    body, is_cut, invalid = show_output(streams.get("merged", b""), answer.streams.get("merged"), _rest_hint(answer))
    stdout = show_output(streams.get("stdout", b""), answer.streams.get("stdout"))
    stderr = show_output(streams.get("stderr", b""), answer.streams.get("stderr"))
    notes = [
        *build_invalid_notes(invalid),
        *_place_notes(answer),
        *_end_notes(answer, background),
        *_line_end_notes(arguments, answer),
        *_limit_notes(arguments, context),
    ]
    body = body or NO_OUTPUT
    output = "\n".join([body.rstrip("\n") if notes else body, *notes])
    fields: dict[str, Any] = {
        "metadata": {
            "stdout": stdout.text,
            "stderr": stderr.text,
            **({"not_utf8_bytes": invalid} if invalid else {}),
            **_metadata(arguments, answer, context),
        },
        "truncated": is_cut or stdout.is_cut or stderr.is_cut,
        "spill": _spill(answer),
    }
    if answer.timed_out:
        error = (
            f"the command was ended at its limit of {context.timeout_s:g} s, with all that it had started; give a "
            f"longer timeout, start it with {background}, or do less in one call. Its cwd "
            "and variables were not kept"
        )
        return Outcome(output, error=error, error_code=ErrorCode.TIMEOUT, **fields)
    if answer.cancelled:
        return Outcome(
            output,
            error="the call was cancelled and its processes were killed",
            error_code=ErrorCode.CANCELLED,
            **fields,
        )
    return Outcome(output, **fields)


_BUS_ERROR = (
    "[SIGBUS is what a program gets when a file that it has mapped cannot grow: look with `df /dev/shm /tmp .`; "
    "/dev/shm has half of the session's memory]"
)


def name_signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def build_read_call(path: str, offset: str = "") -> str:
    """Return, as text for a model, the call of read_tool that shows a file from line `offset` on."""
    arguments = json.dumps({"file_path": show_name(path)}, ensure_ascii=False)
    return f'read_tool {arguments[:-1]}, "offset": {offset}}}' if offset else f"read_tool {arguments}"


def _metadata(arguments: Mapping[str, Any], answer: ExecAnswer, context: ToolContext) -> dict[str, JsonValue]:
    folder = answer.state.folder if answer.state is not None else ""
    metadata: dict[str, JsonValue] = {"exit_code": answer.exit_code}
    metadata["cwd"] = show_name(folder or arguments.get("cwd") or context.cwd)
    if answer.signal is not None:
        metadata["signal"] = answer.signal
    if answer.oom:
        metadata["oom"] = True
    if answer.pipe_status is not None and len(answer.pipe_status) > 1:
        metadata["pipe_status"] = list(answer.pipe_status)
    if answer.live is not None and answer.live.dropped:
        metadata["not_shown_live_bytes"] = answer.live.dropped
    return metadata


def _spill(answer: ExecAnswer) -> Spill | None:
    spill = answer.spill
    return Spill(path=show_name(spill.path), bytes=spill.bytes, lines=spill.lines) if spill is not None else None


def _rest_hint(answer: ExecAnswer) -> str:
    spill = answer.spill
    if spill is None:
        return f"there was no room in /output to keep them; {NARROWER}" if answer.spill_failed else NARROWER
    extent = "all of it" if spill.whole else f"its first {spill.bytes} bytes, the rest had no room,"
    size = f"{count(spill.lines, 'line')}" if spill.lines is not None else f"{spill.bytes} bytes"
    read_call = build_read_call(spill.path, "{offset}")
    return f"{extent} is in {show_name(spill.path)} ({size}); continue with {read_call}"


def _place_notes(answer: ExecAnswer) -> list[str]:
    state = answer.state
    if state is None:
        return []
    folder = show_name(state.folder)
    notes = []
    if state.moved:
        notes.append(f"[cwd is now {folder}]")
    if state.stray:
        notes.append(
            f"[the shell ended in {show_name(state.stray)}, outside of /workspace, /tmp and the home: "
            f"the next command starts in {folder}]"
        )
    elif state.stray == "":
        notes.append(f"[the folder in which the shell ended was removed: cwd is {folder}]")
    lost = state.lost
    if lost and lost == state.folder:
        notes.append(f"[{folder} cannot be entered: the command ran in /; run: chmod u+rwx {folder}]")
    elif lost:
        notes.append(
            f"[the session's folder {show_name(lost)} was removed or cannot be entered: the command ran in the "
            "workspace]"
        )
    return notes


def _line_end_notes(arguments: Mapping[str, Any], answer: ExecAnswer) -> list[str]:
    """Return a note on a failed command with Windows line ends. Bash takes each CR as a part of a word."""
    command = arguments.get("command")
    if answer.exit_code == 0 or not isinstance(command, str) or "\r\n" not in command:
        return []
    return ["[the command has Windows line ends (\\r\\n), and bash reads each \\r as text: send it with \\n alone]"]


def _end_notes(answer: ExecAnswer, background: str) -> list[str]:
    notes = [*_exit_notes(answer)]
    if answer.signal is not None and not answer.timed_out and not answer.cancelled:
        cause = ", likely out of memory" if answer.oom else ""
        notes.append(f"[killed by {name_signal(answer.signal)}{cause}]")
        if answer.signal == signal.SIGBUS:
            notes.append(_BUS_ERROR)
    elif answer.oom:
        notes.append("[a process was killed: out of memory]")
    if answer.supervisor_killed:
        notes.append(
            "[the command killed the process that runs it, so its output is lost, and its cwd and variables were not "
            "kept: kill single processes by name or pid]"
        )
    kill = answer.kill
    if kill is not None and kill.signalled and not answer.timed_out and not answer.cancelled:
        notes.append(
            f"[{count(kill.signalled, 'process', 'processes')} that the command left running "
            f"{plural(kill.signalled, 'was', 'were')} ended; start processes that must continue with {background}]"
        )
    reason = _STATE_LOSS_REASONS.get(answer.state.outcome) if answer.state is not None else None
    if reason is not None:
        notes.append(f"[{_STATE_NOT_KEPT}: {reason}]")
    return notes


def _exit_notes(answer: ExecAnswer) -> list[str]:
    code = answer.exit_code
    statuses = answer.pipe_status or []
    if code is None or answer.timed_out:
        return []
    parts = [f"exit code {code}"]
    if len(statuses) > 1 and any(statuses):
        parts.append(f"exit codes of the last pipeline: {' '.join(map(str, statuses))}")
    elif code == 0:
        return []
    if code > 128 and name_signal(code - 128).startswith("SIG"):
        parts[0] += f" (128 + {name_signal(code - 128)})"
    notes = [f"[{'; '.join(parts)}]"]
    return [*notes, _BUS_ERROR] if code == 128 + signal.SIGBUS else notes


def _limit_notes(arguments: Mapping[str, Any], context: ToolContext) -> list[str]:
    requested_s = arguments.get("timeout", 0)
    if requested_s <= context.timeout_s:
        return []
    unit = (
        ": it is given in seconds, not milliseconds"
        if requested_s >= 10_000 and context.timeout_s == MAX_TIMEOUT_S
        else ""
    )
    return [f"[timeout was clamped to {context.timeout_s:g} s{unit}]"]
