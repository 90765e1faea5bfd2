"""bash_tool: bash commands in the session's sandbox, in the foreground or as background jobs."""

import posixpath
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from toolcrew.contract.calls import DEFAULT_TIMEOUT_S, MAX_TIMEOUT_S
from toolcrew.contract.errors import ErrorCode, ToolFailure
from toolcrew.contract.guest_protocol import ExecAnswer, ExecRequest, GuestReply
from toolcrew.contract.shell.commands import SHELLS, ShellScript, parse_commands
from toolcrew.contract.shell.dangers import Level, classify
from toolcrew.contract.specs import NO_NETWORK, TIMEOUT_DESCRIPTION, ToolSpec
from toolcrew.workers.tools.base import Outcome, ToolEnvironment, WorkerTool
from toolcrew.workers.tools.jobs import feed_job, kill_job, list_jobs, poll_job, start_job
from toolcrew.workers.tools.shown_output import LIVE_BYTES, ShownOutput
from toolcrew.workers.tools.text import MAX_LINES, MAX_OUTPUT_BYTES, build_outcome, encode

_HOME = "/workspace"
_MAX_PATH_CHARS = 4096
"""Limit of `ToolContext.cwd`."""

_SPEC = ToolSpec(
    name="bash_tool",
    description=(
        "Run a bash command and return its output. It runs in an isolated Linux sandbox "
        f"{NO_NETWORK}; files are in /workspace. The folder (cd), exported variables and functions stay for the next "
        f"command. After `timeout` seconds (default {DEFAULT_TIMEOUT_S:g}) the command is killed with all processes "
        "that it started. Start servers and long builds with background=true; poll, input and kill are for such jobs."
    ),
    parameters={
        "type": "object",
        "properties": {
            "command": {
                "type": "string",
                "maxLength": 131072,
                "default": "",
                "description": "the bash command. Empty with other actions.",
            },
            "timeout": {
                "type": "number",
                "exclusiveMinimum": 0,
                "description": TIMEOUT_DESCRIPTION.format(MAX_TIMEOUT_S),
                "x-hidden": "small",
            },
            "cwd": {
                "type": "string",
                "minLength": 1,
                "description": "folder of this command",
                "x-hidden": "small",
            },
            "stdin": {
                "type": "string",
                "default": "",
                "description": "standard input, also of a job with action input",
                "x-hidden": "small",
            },
            "background": {
                "type": "boolean",
                "default": False,
                "description": "start a job and return after a second",
                "x-hidden": "small",
            },
            "action": {
                "type": "string",
                "enum": ["run", "poll", "input", "kill", "list"],
                "default": "run",
                "x-hidden": "small",
            },
            "job_id": {"type": "string", "minLength": 1, "x-hidden": "small"},
            "close_stdin": {
                "type": "boolean",
                "default": False,
                "description": "with action input: the job's standard input ends there",
                "x-hidden": True,
            },
            "reset_state": {
                "type": "boolean",
                "default": False,
                "description": "forget folder, variables and functions first",
                "x-hidden": True,
            },
            "description": {
                "type": "string",
                "description": "the purpose of the command, for people who watch",
                "x-hidden": True,
            },
        },
        # `command` is required although it has a default. Actions on jobs need no command. But if `command` were
        # optional, models would omit it even with action run.
        "required": ["command"],
        "additionalProperties": False,
    },
    aliases={
        "cmd": "command",
        "workdir": "cwd",
        "dir_path": "cwd",
        "run_in_background": "background",
        "is_background": "background",
    },
    command_parameter="command",
    input_parameter="stdin",
)


def _check_action(arguments: Mapping[str, Any]) -> str | None:
    """Return an error message for an argument that does not belong to the action, or a missing one.

    The schema has no such conditions, because model servers refuse or ignore them.
    """
    action, job_id = arguments["action"], arguments.get("job_id")
    if action == "run":
        if not arguments["command"].strip():
            return "parameter 'command' is required: the bash command to run"
        if job_id is not None:
            return "job_id goes with action poll, input or kill; a new command gets a job of its own"
        return None
    unused = [name for name in ("command", "background", "reset_state") if arguments[name]]
    if unused:
        return f"action {action} runs no command: leave '{unused[0]}' out, or use action run"
    if action != "input" and (arguments["stdin"] or arguments["close_stdin"]):
        return f"action {action} sends nothing to a job: leave 'stdin' and 'close_stdin' out, or use action input"
    if action != "list" and job_id is None:
        return f"parameter 'job_id' is required with action {action}: action list shows the jobs"
    return None


def _check_danger(arguments: Mapping[str, Any]) -> None:
    """Raise ToolFailure(SECURITY_REFUSED) for a catastrophic command, such as the deletion of all files, and for such
    text as input of a shell or a job.
    """
    folder, stdin = _HOME, arguments["stdin"]
    if arguments["action"] == "run":
        folder = posixpath.normpath(posixpath.join(_HOME, arguments.get("cwd") or ""))
        script = parse_commands(arguments["command"])
        _refuse(script, folder, "the command")
        if not any(part.program in SHELLS for part in script.commands):
            return
    if stdin:
        _refuse(parse_commands(stdin), folder, "the input for a shell")


def _run(arguments: dict[str, Any], environment: ToolEnvironment) -> Outcome:
    action = arguments["action"]
    if action == "run":
        return _run_command(arguments, environment)
    if action == "list":
        return list_jobs(environment)
    if action == "input":
        return feed_job(arguments["job_id"], arguments["stdin"], environment, close=arguments["close_stdin"])
    return (
        poll_job(arguments["job_id"], environment) if action == "poll" else kill_job(arguments["job_id"], environment)
    )


def _run_command(arguments: dict[str, Any], environment: ToolEnvironment) -> Outcome:
    if arguments["background"]:
        return start_job(arguments, environment)
    script, body = encode(arguments["command"], "command"), encode(arguments["stdin"], "stdin")
    request = ExecRequest(
        argv=None,
        script_bytes=len(script),
        cwd=arguments.get("cwd"),
        state="fresh" if arguments["reset_state"] else "keep",
        timeout_s=environment.context.timeout_s,
    )
    reply = run_shown(request, script + body, environment)
    folder = reply.answer.state.folder if reply.answer.state is not None else ""
    if len(folder) <= _MAX_PATH_CHARS and folder.isprintable():
        # Calls outside of the sandbox get the session's folder as their `cwd`.
        environment.folder = folder
    return build_outcome(arguments, reply, environment.context)


def run_shown(request: ExecRequest, body: bytes, environment: ToolEnvironment) -> GuestReply[ExecAnswer]:
    """Run a program in the sandbox. Limit its output to what a model can read, and send the output live to a caller
    that wants it.

    Raises the errors of `ToolEnvironment.run`.
    """
    request = replace(
        request,
        capture=dict.fromkeys(("stdout", "stderr", "merged"), MAX_OUTPUT_BYTES),
        spill={"bytes": MAX_OUTPUT_BYTES, "lines": MAX_LINES},
    )
    if not environment.is_watched:
        return environment.run(request, body)
    shown = ShownOutput(environment)
    reply = environment.run(replace(request, live=True, max_bytes=LIVE_BYTES), body, on_data=shown.take)
    return GuestReply(reply.answer, {**reply.streams, **shown.streams})


def _refuse(script: ShellScript, folder: str, subject: str) -> None:
    danger = classify(script, folder)
    if danger.level >= Level.CATASTROPHIC:
        raise ToolFailure(
            ErrorCode.SECURITY_REFUSED,
            f"{subject} was not run: it {danger.reason}; no approval permits it; use a narrower command",
            reason=danger.reason,
        )


BASH_TOOL = WorkerTool(_SPEC, _run, validators=(_check_action, _check_danger))
