"""The verbs of an SDK session: open, close, exec, whole files, copying a folder in and out. Never shown to a model.

`session.cancel` is none of these tasks: it would wait behind the calls that it is to end, see workers/control.py.
"""

from typing import Any

from contract.calls import MAX_BLOB_BYTES, MAX_TIMEOUT_S
from contract.errors import ErrorCode, ToolFailure
from contract.specs import ToolSpec
from workers.tools.base import Outcome, Workbench, WorkerTool

EXEC_CAPTURE_BYTES = 4 * 1024 * 1024
_PATH = {"type": "string", "minLength": 1, "maxLength": 4096}


def _spec(name: str, description: str, properties: dict[str, Any], required: list[str], **flags: Any) -> ToolSpec:
    parameters = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    return ToolSpec(name=f"session.{name}", description=description, parameters=parameters, audience="session", **flags)


def _open(arguments: dict[str, Any], bench: Workbench) -> Outcome:
    answer = bench.open_sandbox(arguments.get("image"), arguments["ttl_s"])
    return Outcome(metadata={**answer, **bench.host_facts()})


def _close(_: dict[str, Any], bench: Workbench) -> Outcome:
    return Outcome(metadata={"closed": bench.close_sandbox()})


def _exec(arguments: dict[str, Any], bench: Workbench) -> Outcome:
    request = _exec_request(arguments["argv"], bench, cwd=arguments.get("cwd"), env=arguments["env"])
    response = bench.run({**request, "capture": {"stdout": EXEC_CAPTURE_BYTES, "stderr": EXEC_CAPTURE_BYTES}}, bench.content)
    done = response.done
    stdout, stderr = response.streams.get("stdout", b""), response.streams.get("stderr", b"")
    total = sum(int(counts["total"]) for counts in done["streams"].values())
    returncode = done["exit_code"] if done["exit_code"] is not None else -(done["signal"] or 9)
    metadata = {
        "returncode": returncode,
        "timed_out": done["timed_out"],
        "cancelled": done["cancelled"],
        "oom": done["oom"],
        "stdout_bytes": len(stdout),
    }
    return Outcome(metadata=metadata, truncated=total > len(stdout) + len(stderr), blob=stdout + stderr)


def _write_file(arguments: dict[str, Any], bench: Workbench) -> Outcome:
    request = {"op": "write_file", "path": arguments["path"], "mode": "overwrite", "timeout_s": bench.context.timeout_s}
    done = bench.run(request, bench.content).done
    return Outcome(metadata={"size_bytes": done["size"], "created": done["created"]})


def _read_file(arguments: dict[str, Any], bench: Workbench) -> Outcome:
    request = {"op": "read_file", "path": arguments["path"], "max_bytes": MAX_BLOB_BYTES, "timeout_s": bench.context.timeout_s}
    response = bench.run(request)
    return Outcome(metadata={"size_bytes": response.done["size"]}, blob=response.streams.get("file", b""))


def _import(arguments: dict[str, Any], bench: Workbench) -> Outcome:
    argv = ["tar", "-x", "-f", "-", "-C", arguments["path"], "--no-same-owner", "--no-same-permissions", "--delay-directory-restore"]
    _tar(bench, argv, bench.content, {"stdout": 4096, "stderr": 4096})
    return Outcome()


def _export(arguments: dict[str, Any], bench: Workbench) -> Outcome:
    data = _tar(bench, ["tar", "-c", "-f", "-", "-C", arguments["path"], "."], b"", {"stream": MAX_BLOB_BYTES})
    return Outcome(metadata={"size_bytes": len(data)}, blob=data)


def _tar(bench: Workbench, argv: list[str], body: bytes, capture: dict[str, int]) -> bytes:
    response = bench.run({**_exec_request(argv, bench), "capture": capture}, body)
    done, data = response.done, response.streams.get("stdout", b"")
    if done["timed_out"]:
        raise ToolFailure(ErrorCode.TIMEOUT, f"copying did not end within {bench.context.timeout_s:g} s")
    if done["exit_code"] != 0:
        words = response.streams.get("stderr", b"").decode("utf-8", "replace").strip()[-500:]
        full = "No space left" in words or "File too large" in words
        raise ToolFailure(ErrorCode.NO_SPACE if full else ErrorCode.INTERNAL, f"tar failed in the sandbox: {words or done['exit_code']}")
    if int(done["streams"]["stdout"]["total"]) > len(data):
        raise ToolFailure(ErrorCode.FILE_TOO_LARGE, f"the folder is larger than {MAX_BLOB_BYTES} bytes: export a smaller one")
    return data


def _exec_request(argv: list[str], bench: Workbench, *, cwd: str | None = None, env: dict[str, str] | None = None) -> dict[str, Any]:
    return {
        "op": "exec",
        "argv": argv,
        "script_bytes": 0,
        "cwd": cwd or bench.context.cwd,
        "env": env or {},
        "timeout_s": bench.context.timeout_s,
    }


SESSION_VERBS = (
    WorkerTool(
        _spec(
            "open",
            "Give the session a sandbox.",
            {
                "image": {"type": "string", "minLength": 1},
                "ttl_s": {"type": "number", "exclusiveMinimum": 0, "maximum": 86400, "default": 1800},
            },
            [],
            idempotent=True,
            timeout_s=60,
        ),
        _open,
    ),
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
        ),
        _exec,
    ),
    WorkerTool(_spec("write_file", "Write the call's content to a file.", {"path": _PATH}, ["path"]), _write_file),
    WorkerTool(_spec("read_file", "Read a whole file.", {"path": _PATH}, ["path"], read_only=True, idempotent=True), _read_file),
    WorkerTool(
        _spec(
            "import",
            "Unpack the call's content, a tar archive, into a folder.",
            {"path": {**_PATH, "default": "/workspace"}},
            [],
            timeout_s=120,
        ),
        _import,
    ),
    WorkerTool(
        _spec(
            "export",
            "Pack a folder as a tar archive.",
            {"path": {**_PATH, "default": "/workspace"}},
            [],
            read_only=True,
            idempotent=True,
            timeout_s=120,
        ),
        _export,
    ),
)
