"""The session verbs: tools that only toolcrew's SDK and API call, to open, close, checkpoint and fork sessions, run
programs, and copy files.

Models never see these verbs. `session.cancel` is no task, because a task would wait in the queue behind the call that
it should end. See workers/control.py.
"""

import json
import posixpath
from dataclasses import replace
from typing import Any

from pydantic import JsonValue

from toolcrew.contract.calls import MAX_BLOB_BYTES, MAX_TIMEOUT_S
from toolcrew.contract.errors import ErrorCode, ToolFailure
from toolcrew.contract.guest_protocol import (
    ExecAnswer,
    ExecRequest,
    GuestReply,
    JobKillRequest,
    JobListRequest,
    ReadFileRequest,
    WriteFileRequest,
)
from toolcrew.contract.own_programs import own_program
from toolcrew.contract.session_locations import MAX_FORKS
from toolcrew.contract.session_spec import CHECKPOINT_PATTERN, HOST_FIELDS, MAX_TTL_S, SessionMove, SessionSpec
from toolcrew.contract.specs import ToolSpec
from toolcrew.workers.sandbox_client import ARCHIVE_TIMEOUT_S
from toolcrew.workers.sandboxd.archives.imports import KINDS, build_import, check_import
from toolcrew.workers.tools.base import Outcome, ToolEnvironment, WorkerTool
from toolcrew.workers.tools.shown_output import LIVE_BYTES, ShownOutput
from toolcrew.workers.tools.text import encode

EXEC_CAPTURE_BYTES = 4 * 1024 * 1024
MAX_HEADER_ARGV_BYTES = 128 * 1024
"""Bytes of a program's arguments, as JSON, that fit in the header of a request. The header has at most 256 KiB.

Larger arguments travel in the body.
"""
_CHECKPOINT = {"type": "string", "pattern": CHECKPOINT_PATTERN}
_PATH = {"type": "string", "minLength": 1, "maxLength": 4096}
_OPEN_FIELDS = {
    # Without defaults: a call names only the fields that are set.
    name: {key: value for key, value in schema.items() if key != "default"}
    for name, schema in SessionSpec.model_json_schema()["properties"].items()
    if name in HOST_FIELDS
}


def _spec(name: str, description: str, properties: dict[str, Any], required: list[str], **flags: Any) -> ToolSpec:
    parameters = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    return ToolSpec(name=f"session.{name}", description=description, parameters=parameters, audience="session", **flags)


def _open(arguments: dict[str, Any], environment: ToolEnvironment) -> Outcome:
    spec = SessionSpec(**{name: value for name, value in arguments.items() if name != "moved"})
    answer = environment.open_sandbox(spec, moved=arguments.get("moved"))
    return Outcome(metadata={**answer, **environment.host_facts()})


def _close(_: dict[str, Any], environment: ToolEnvironment) -> Outcome:
    return Outcome(metadata={"closed": environment.close_sandbox()})


def _checkpoint(_: dict[str, Any], environment: ToolEnvironment) -> Outcome:
    return Outcome(metadata=dict(environment.checkpoint()))


def _fork(arguments: dict[str, Any], environment: ToolEnvironment) -> Outcome:
    facts = environment.fork(arguments["children"], leave_jobs=arguments["leave_jobs"])
    return Outcome(metadata={**facts, **environment.host_facts()})


def _set_ttl(arguments: dict[str, Any], environment: ToolEnvironment) -> Outcome:
    environment.set_ttl(arguments["ttl_s"])
    return Outcome()


def _save_files(arguments: dict[str, Any], environment: ToolEnvironment) -> Outcome:
    return Outcome(metadata=dict(environment.save_files(arguments["file"], arguments["names"])))


def _delete_checkpoint(arguments: dict[str, Any], environment: ToolEnvironment) -> Outcome:
    return Outcome(metadata=dict(environment.delete_checkpoint(arguments["checkpoint"])))


def _exec(arguments: dict[str, Any], environment: ToolEnvironment) -> Outcome:
    context = environment.context
    request = ExecRequest(
        argv=arguments["argv"],
        cwd=arguments.get("cwd") or context.cwd,
        env=arguments["env"],
        capture={"stdout": EXEC_CAPTURE_BYTES, "stderr": EXEC_CAPTURE_BYTES},
        timeout_s=context.timeout_s,
    )
    body = environment.content
    if len(json.dumps(arguments["argv"])) > MAX_HEADER_ARGV_BYTES:
        script, body = _build_large_exec(arguments["argv"], body)
        request = replace(request, argv=None, script_bytes=len(script))
        body = script + body
    shown = ShownOutput(environment)
    if environment.is_watched:
        reply = environment.run(replace(request, live=True, max_bytes=LIVE_BYTES), body, on_data=shown.take)
    else:
        reply = environment.run(request, body)
    answer = reply.answer
    streams = {**reply.streams, **shown.streams}
    stdout, stderr = streams.get("stdout", b""), streams.get("stderr", b"")
    total = sum(counts.total for counts in answer.streams.values())
    metadata: dict[str, JsonValue] = {
        "returncode": answer.exit_code if answer.exit_code is not None else -(answer.signal or 9),
        "timed_out": answer.timed_out,
        "cancelled": answer.cancelled,
        "oom": answer.oom,
        "stdout_bytes": len(stdout),
    }
    return Outcome(metadata=metadata, truncated=total > len(stdout) + len(stderr), blob=stdout + stderr)


def _build_large_exec(argv: list[str], stdin: bytes) -> tuple[bytes, bytes]:
    """Return a script that starts the program, and the script's input.

    The input contains the arguments, each with a NUL byte at its end, and then the program's own input.
    """
    if any("\0" in part for part in argv):
        raise ToolFailure(
            ErrorCode.INVALID_ARGUMENTS,
            "an argument contains a NUL byte, which no program accepts as an argument: send it as stdin",
        )
    script = f"mapfile -d '' -t -n {len(argv)} argv && exec -- \"${{argv[@]}}\"".encode()
    return script, b"".join(encode(part, "argv") + b"\0" for part in argv) + stdin


def _write_file(arguments: dict[str, Any], environment: ToolEnvironment) -> Outcome:
    request = WriteFileRequest(path=_place(arguments), mode="overwrite", timeout_s=environment.context.timeout_s)
    answer = environment.run(request, environment.content).answer
    return Outcome(metadata={"size_bytes": answer.size, "created": answer.created})


def _place(arguments: dict[str, Any]) -> str:
    """Return the path of a file. A `cd` of a command changes what a path of a tool means, but not that of a program."""
    return posixpath.join("/workspace", arguments["path"])


def _read_file(arguments: dict[str, Any], environment: ToolEnvironment) -> Outcome:
    timeout_s = environment.context.timeout_s
    reply = environment.run(ReadFileRequest(path=_place(arguments), max_bytes=MAX_BLOB_BYTES, timeout_s=timeout_s))
    return Outcome(metadata={"size_bytes": reply.answer.size}, blob=reply.streams.get("file", b""))


def _import(arguments: dict[str, Any], environment: ToolEnvironment) -> Outcome:
    kind = arguments["kind"]
    reply = _run(
        environment, build_import(kind, arguments["path"]), environment.content, {"stdout": 4096, "stderr": 16_384}
    )
    check_import(
        kind,
        reply.answer.exit_code,
        _stderr_text(reply),
        timed_out=reply.answer.timed_out,
        timeout_s=environment.context.timeout_s,
    )
    return Outcome()


def _end_jobs(_: dict[str, Any], environment: ToolEnvironment) -> Outcome:
    timeout_s = environment.context.timeout_s
    jobs = environment.run(JobListRequest(timeout_s=timeout_s)).answer.jobs
    running = [job.job for job in jobs if job.state == "running"]
    for job in running:
        environment.run(JobKillRequest(job=job, max_bytes=0, timeout_s=timeout_s))
    return Outcome(metadata={"ended": len(running)})


def _export(arguments: dict[str, Any], environment: ToolEnvironment) -> Outcome:
    names = environment.content
    selected = ["--hard-dereference", "--no-recursion", "--null", "--verbatim-files-from", "--files-from=-"]
    argv = ["tar", "-c", "-f", "-", "-C", arguments["path"], *(selected if names else ["."])]
    reply = _run(environment, argv, names, {"stream": MAX_BLOB_BYTES})
    answer = reply.answer
    data = reply.streams.get("stdout", b"")
    if answer.timed_out:
        raise ToolFailure(
            ErrorCode.TIMEOUT, f"copying did not end within {environment.context.timeout_s:g} s: copy fewer files"
        )
    if answer.exit_code != 0:
        raise ToolFailure(
            ErrorCode.FILE_NOT_FOUND if names else ErrorCode.INTERNAL,
            f"the files were not copied, because tar failed in the sandbox: "
            f"{_stderr_text(reply)[-500:] or answer.exit_code}",
        )
    if answer.streams["stdout"].total > len(data):
        raise ToolFailure(
            ErrorCode.FILE_TOO_LARGE,
            f"the folder is larger than the {MAX_BLOB_BYTES} bytes that can be copied out: delete files that you do "
            f"not need, read single files, or make a checkpoint",
        )
    return Outcome(metadata={"size_bytes": len(data)}, blob=data)


def _run(environment: ToolEnvironment, argv: list[str], body: bytes, capture: dict[str, int]) -> GuestReply[ExecAnswer]:
    context = environment.context
    """Run a program of toolcrew in the sandbox."""
    request = ExecRequest(argv=own_program(*argv), cwd=context.cwd, capture=capture, timeout_s=context.timeout_s)
    reply = environment.run(request, body)
    if reply.answer.cancelled:
        raise ToolFailure(ErrorCode.CANCELLED, "copying was cancelled; files that were copied before remain")
    return reply


def _stderr_text(reply: GuestReply[ExecAnswer]) -> str:
    return reply.streams.get("stderr", b"").decode("utf-8", "replace").strip()


SESSION_VERBS = (
    WorkerTool(
        _spec(
            "open",
            "Give the session a sandbox.",
            {**_OPEN_FIELDS, "moved": SessionMove.model_json_schema()},
            [],
            idempotent=True,
            timeout_s=60,
            max_timeout_s=ARCHIVE_TIMEOUT_S,
        ),
        _open,
    ),
    WorkerTool(
        _spec(
            "checkpoint",
            "Keep the session's files, and the state of its shell, for sessions to come.",
            {},
            [],
            timeout_s=ARCHIVE_TIMEOUT_S,
        ),
        _checkpoint,
    ),
    WorkerTool(
        _spec(
            "fork",
            "Make sessions with the files and the shell of this one.",
            {
                "children": {"type": "array", "items": _CHECKPOINT, "minItems": 1, "maxItems": MAX_FORKS},
                "leave_jobs": {"type": "boolean", "default": False},
            },
            ["children"],
            timeout_s=ARCHIVE_TIMEOUT_S,
        ),
        _fork,
    ),
    WorkerTool(
        _spec(
            "save_files",
            "Store files of the workspace, whose names are in the file `names`, as one archive.",
            {"file": _CHECKPOINT, "names": _PATH},
            ["file", "names"],
            timeout_s=ARCHIVE_TIMEOUT_S,
        ),
        _save_files,
    ),
    WorkerTool(
        _spec(
            "delete_checkpoint",
            "Delete a checkpoint.",
            {"checkpoint": _CHECKPOINT},
            ["checkpoint"],
            idempotent=True,
            timeout_s=60,
        ),
        _delete_checkpoint,
    ),
    WorkerTool(
        _spec(
            "set_ttl",
            "Change the seconds without a call after which the session is closed.",
            {"ttl_s": {"type": "number", "exclusiveMinimum": 0, "maximum": MAX_TTL_S}},
            ["ttl_s"],
            idempotent=True,
            timeout_s=60,
        ),
        _set_ttl,
    ),
    WorkerTool(_spec("end_jobs", "End all background jobs.", {}, [], idempotent=True, timeout_s=60), _end_jobs),
    WorkerTool(_spec("close", "Remove the session's sandbox.", {}, [], idempotent=True, timeout_s=60), _close),
    WorkerTool(
        _spec(
            "exec",
            "Run a program; the call's content is its standard input.",
            {
                "argv": {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 4096},
                "env": {"type": "object", "additionalProperties": {"type": "string"}, "default": {}},
                "cwd": _PATH,
            },
            ["argv"],
            max_timeout_s=MAX_TIMEOUT_S,
            command_parameter="argv",
        ),
        _exec,
    ),
    WorkerTool(_spec("write_file", "Write the call's content to a file.", {"path": _PATH}, ["path"]), _write_file),
    WorkerTool(
        _spec("read_file", "Read a whole file.", {"path": _PATH}, ["path"], read_only=True, idempotent=True), _read_file
    ),
    WorkerTool(
        _spec(
            "import",
            "Unpack the call's content, an archive, or clone it, a git bundle, into a folder.",
            {"path": {**_PATH, "default": "/workspace"}, "kind": {"enum": list(KINDS), "default": "tar"}},
            [],
            timeout_s=120,
        ),
        _import,
    ),
    WorkerTool(
        _spec(
            "export",
            "Pack a folder, or those of its files that the call's content names, each with a NUL at its end, as a tar "
            "archive.",
            {"path": {**_PATH, "default": "/workspace"}},
            [],
            read_only=True,
            idempotent=True,
            timeout_s=120,
        ),
        _export,
    ),
)
