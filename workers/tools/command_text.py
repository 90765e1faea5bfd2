"""Formats the end of a command for a model: its output, then one line in brackets for each fact."""

import json
import signal
from collections.abc import Mapping
from typing import Any

from pydantic import JsonValue

from contract.calls import MAX_TIMEOUT_S, Spill, ToolContext
from contract.errors import ErrorCode
from workers.sandbox_client import GuestResponse
from workers.tools.base import Outcome
from workers.tools.text import NARROWER, show_name, show_output

_NOT_KEPT = {
    "replaced": "it replaced its shell (exec), the shell's EXIT trap, or a builtin that the trap needs",
    "too_large": "they are more than 256 KiB",
    "no_room": "there is no room left in /output",
}
_FACTS = "cwd, exported variables and functions of this command were not kept"


def build_outcome(
    arguments: Mapping[str, Any], response: GuestResponse, context: ToolContext, *, background: str = "background=true"
) -> Outcome:
    """Return the outcome of an exec. `background`: the argument with which a model starts a job."""
    done, streams = response.done, response.streams
    counts, spill = done["streams"], _spill(done)
    body, is_cut = show_output(streams.get("merged", b""), counts.get("merged", {}), _rest_hint(done))
    shown = {name: show_output(streams.get(name, b""), counts.get(name, {})) for name in ("stdout", "stderr")}
    notes = [*_place_notes(done), *_end_notes(done, background), *_limit_notes(arguments, done, context)]
    body = body or "(no output)"
    output = "\n".join([body.rstrip("\n") if notes else body, *notes])
    fields: dict[str, Any] = {
        "metadata": {"stdout": shown["stdout"][0], "stderr": shown["stderr"][0], **_metadata(arguments, done, context)},
        "truncated": is_cut or shown["stdout"][1] or shown["stderr"][1],
        "spill": spill,
    }
    if done["timed_out"]:
        error = (
            f"the command was ended at its limit of {context.timeout_s:g} s, with all that it had started; give a "
            f"longer timeout (at most {MAX_TIMEOUT_S:g}), start it with {background}, or do less in one call. Its cwd "
            "and variables were not kept"
        )
        return Outcome(output, error=error, error_code=ErrorCode.TIMEOUT, **fields)
    if done["cancelled"]:
        return Outcome(
            output,
            error="the call was cancelled and its processes were killed",
            error_code=ErrorCode.CANCELLED,
            **fields,
        )
    return Outcome(output, **fields)


def name_signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def build_read_call(path: str, offset: str = "") -> str:
    """Return the call of read_tool that shows a file, from line `offset` on."""
    arguments = json.dumps({"file_path": show_name(path)}, ensure_ascii=False)
    return f'read_tool {arguments[:-1]}, "offset": {offset}}}' if offset else f"read_tool {arguments}"


def _metadata(arguments: Mapping[str, Any], done: Mapping[str, Any], context: ToolContext) -> dict[str, JsonValue]:
    state = done.get("state") or {}
    metadata: dict[str, JsonValue] = {"exit_code": done["exit_code"]}
    metadata["cwd"] = show_name(state.get("folder") or arguments.get("cwd") or context.cwd)
    if done["signal"] is not None:
        metadata["signal"] = done["signal"]
    if done["oom"]:
        metadata["oom"] = True
    if len(done.get("pipe_status") or ()) > 1:
        metadata["pipe_status"] = list(done["pipe_status"])
    if (done.get("live") or {}).get("dropped"):
        metadata["not_shown_live_bytes"] = done["live"]["dropped"]
    return metadata


def _spill(done: Mapping[str, Any]) -> Spill | None:
    spill = done.get("spill")
    return Spill(path=show_name(spill["path"]), bytes=spill["bytes"], lines=spill["lines"]) if spill else None


def _rest_hint(done: Mapping[str, Any]) -> str:
    spill = done.get("spill")
    if spill is None:
        return f"there was no room in /output to keep them; {NARROWER}" if done.get("spill_failed") else NARROWER
    what = "all of it" if spill["whole"] else f"its first {spill['bytes']} bytes, for more there was no room,"
    size = f"{spill['lines']} lines" if spill["lines"] is not None else f"{spill['bytes']} bytes"
    return f"{what} is in {show_name(spill['path'])} ({size}); go on with {build_read_call(spill['path'], '{offset}')}"


def _place_notes(done: Mapping[str, Any]) -> list[str]:
    state = done.get("state") or {}
    folder = show_name(state.get("folder") or "")
    notes = []
    if state.get("moved"):
        notes.append(f"[cwd is now {folder}]")
    if state.get("stray"):
        notes.append(
            f"[the shell ended in {show_name(state['stray'])}, outside of /workspace and /tmp: the next command starts "
            f"in {folder}]"
        )
    elif state.get("stray") == "":
        notes.append(f"[the folder in which the shell ended is gone: cwd was not kept, it is {folder}]")
    if state.get("lost"):
        notes.append(f"[the session's folder {show_name(state['lost'])} is gone: the command was run in the workspace]")
    return notes


def _end_notes(done: Mapping[str, Any], background: str) -> list[str]:
    notes = [*_exit_notes(done)]
    if done["signal"] is not None and not done["timed_out"] and not done["cancelled"]:
        cause = ", likely out of memory" if done["oom"] else ""
        notes.append(f"[killed by {name_signal(done['signal'])}{cause}]")
    elif done["oom"]:
        notes.append("[a process was killed: out of memory]")
    kill = done.get("kill")
    if kill and not done["timed_out"] and not done["cancelled"]:
        notes.append(
            f"[processes that the command had left running were ended with it: {kill['signalled']}; start what is to "
            f"stay with {background}]"
        )
    reason = _NOT_KEPT.get((done.get("state") or {}).get("outcome", ""))
    if reason is not None:
        notes.append(f"[{_FACTS}: {reason}]")
    return notes


def _exit_notes(done: Mapping[str, Any]) -> list[str]:
    code, statuses = done["exit_code"], done.get("pipe_status") or []
    if code is None or done["timed_out"]:
        return []
    parts = [f"exit code {code}"]
    if len(statuses) > 1 and any(statuses):
        parts.append(f"of its last pipeline's members: {' '.join(map(str, statuses))}")
    elif code == 0:
        return []
    if code > 128 and name_signal(code - 128).startswith("SIG"):
        parts[0] += f" (128 + {name_signal(code - 128)})"
    return [f"[{'; '.join(parts)}]"]


def _limit_notes(arguments: Mapping[str, Any], done: Mapping[str, Any], context: ToolContext) -> list[str]:
    asked = arguments.get("timeout", 0)
    if asked <= context.timeout_s:
        return []
    unit = (
        ": it is given in seconds, not milliseconds" if asked >= 10_000 and context.timeout_s == MAX_TIMEOUT_S else ""
    )
    return [f"[timeout was clamped to {context.timeout_s:g} s{unit}]"]
