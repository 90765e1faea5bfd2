"""bash_tool: one bash command in the session's sandbox."""

from typing import Any

from pydantic import JsonValue

from contract.calls import DEFAULT_TIMEOUT_S, MAX_TIMEOUT_S
from contract.errors import ErrorCode
from contract.specs import ToolSpec
from workers.tools.base import Outcome, Workbench, WorkerTool
from workers.tools.text import MAX_OUTPUT_BYTES, cut_lines, join_capture

_SPEC = ToolSpec(
    name="bash_tool",
    description=(
        "Run one bash command and return its output. It runs in an isolated Linux sandbox without network; files live in /workspace and last "
        f"for the session. The command and everything it started is killed after `timeout` seconds (default {DEFAULT_TIMEOUT_S:g}); nothing keeps "
        "running when it returns. Every call is a fresh shell."
    ),
    parameters={
        "type": "object",
        "properties": {
            "command": {"type": "string", "minLength": 1, "maxLength": 131072, "description": "the bash command"},
            "timeout": {"type": "number", "exclusiveMinimum": 0, "description": f"seconds; more than {MAX_TIMEOUT_S:g} is clamped"},
            "cwd": {"type": "string", "minLength": 1, "description": "folder to run in; default /workspace"},
            "stdin": {"type": "string", "default": "", "description": "text for the command's standard input"},
            "description": {"type": "string", "description": "what the command is for, for people who watch"},
        },
        "required": ["command"],
        "additionalProperties": False,
    },
    aliases={"cmd": "command", "workdir": "cwd", "dir_path": "cwd"},
    command_parameter="command",
)


def _run(arguments: dict[str, Any], bench: Workbench) -> Outcome:
    script = arguments["command"].encode("utf-8", "surrogatepass")
    stdin = arguments["stdin"].encode("utf-8", "surrogatepass")
    request = {
        "op": "exec",
        "argv": None,
        "script_bytes": len(script),
        "cwd": arguments.get("cwd") or bench.context.cwd,
        "env": {},
        "timeout_s": bench.context.timeout_s,
        "capture": {"stdout": MAX_OUTPUT_BYTES, "stderr": MAX_OUTPUT_BYTES, "merged": MAX_OUTPUT_BYTES},
    }
    response = bench.run(request, script + stdin)
    return _outcome(arguments, response.done, response.streams, bench)


def _outcome(arguments: dict[str, Any], done: Any, streams: Any, bench: Workbench) -> Outcome:
    counts = done["streams"]
    texts = {name: join_capture(streams.get(name, b""), counts.get(name, {})) for name in ("stdout", "stderr", "merged")}
    merged, lines_cut = cut_lines(texts["merged"][0])
    notes = _notes(arguments, done, bench)
    metadata: dict[str, JsonValue] = {
        "stdout": texts["stdout"][0],
        "stderr": texts["stderr"][0],
        "exit_code": done["exit_code"],
        "cwd": arguments.get("cwd") or bench.context.cwd,
    }
    if done["signal"] is not None:
        metadata["signal"] = done["signal"]
    if done["oom"]:
        metadata["oom"] = True
    body = merged if merged else "(no output)"
    output = "\n".join([body.rstrip("\n") if notes else body, *notes])
    truncated = lines_cut or any(cut for _, cut in texts.values())
    if done["timed_out"]:
        error = f"the command was killed at its limit of {bench.context.timeout_s:g} s; give a longer timeout, or do less in one call"
        return Outcome(output, metadata, truncated, error, ErrorCode.TIMEOUT)
    if done["cancelled"]:
        return Outcome(output, metadata, truncated, "the call was cancelled and its processes were killed", ErrorCode.CANCELLED)
    return Outcome(output, metadata, truncated)


def _notes(arguments: dict[str, Any], done: Any, bench: Workbench) -> list[str]:
    notes = []
    if done["exit_code"] not in (0, None):
        notes.append(f"[exit code {done['exit_code']}]")
    if done["signal"] is not None and not done["timed_out"]:
        cause = ", out of memory" if done["oom"] else ""
        notes.append(f"[killed by signal {done['signal']}{cause}]")
    elif done["oom"]:
        notes.append("[a process was killed: out of memory]")
    kill = done.get("kill")
    if kill and not done["timed_out"] and not done["cancelled"]:
        notes.append(f"[processes that the command had left running were ended with it: {kill['signalled']}]")
    if arguments.get("timeout", 0) > bench.context.timeout_s:
        notes.append(f"[timeout was clamped to {bench.context.timeout_s:g} s]")
    return notes


BASH_TOOL = WorkerTool(_SPEC, _run)
