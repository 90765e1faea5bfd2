"""One MCP server over stdio, run inside a sandbox by a driver of ours; what comes back is the sandbox's word and read
as hostile.
"""

import json
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import structlog

from contract.errors import ErrorCode, ToolFailure
from workers.mcp.messages import Reply, broken, parse_json, parse_reply
from workers.mcp.pages import MAX_PAGES, ToolPages
from workers.mcp.sandbox_programs import build_keep_script, name_keeper, read_driver, read_visit
from workers.mcp.settings import StdioEntry
from workers.sandbox_client import GuestResponse
from workers.tools.text import encode
from workers.web.fences import one_line
from workers.web.limits import MIB

log = structlog.get_logger(__name__)

ANSWER_BYTES = 4 * MIB
PYTHON = "/usr/bin/python3"
"""In every sandbox: the guest runs on it."""
FOLDER = "/workspace"
FIRST_NUMBER = 3
"""Of the driver's requests, the first that is ours."""
MAX_TOLD_CHARS = 500
_SPARE_S = 1.0
"""Before the call's limit the driver gives up by itself, and can say on what."""
_LEAST_S = 0.1
_NOT_KEPT = "not_kept"
"""The trouble of one who found no keeper: nothing was asked yet."""
_KEEPER_S = 10.0
"""At most, for a keeper to listen that was just started."""

Run = Callable[[Mapping[str, Any], bytes], GuestResponse]
"""An exec of docs/guest-protocol.md in the sandbox that is meant."""


@dataclass
class SandboxServer:
    """Kept in a session's sandbox from the first call of one of its tools on, or started anew for each where the entry
    says so. `stands_alone`: as the HTTP server's; None: it has not been asked."""

    name: str
    entry: StdioEntry
    stands_alone: bool | None = None

    def list_tools(self, run: Run, timeout_s: float) -> list[Any]:
        """What it lists, unchecked; it is then known how it is spoken to. Raises ToolFailure, SandboxUnavailable."""
        answer = self._use_once(run, "tools/list", {}, FOLDER, timeout_s)
        pages = ToolPages(self.name)
        for page in self._replies(answer, "tools/list"):
            pages.add(page)
        self.stands_alone = answer.get("stands_alone") is True
        return pages.listed

    def call_tool(
        self, run: Run, tool: str, arguments: Mapping[str, Any], cwd: str, timeout_s: float
    ) -> dict[str, Any]:
        """The result, unchecked but for being an object. `cwd`: where the session is. Raises as `list_tools`."""
        params = {"name": tool, "arguments": dict(arguments)}
        use = self._use_kept if self.entry.idle_s > 0 else self._use_once
        return self._replies(use(run, "tools/call", params, cwd, timeout_s), "tools/call")[0]

    def _use_kept(self, run: Run, method: str, params: Mapping[str, Any], cwd: str, timeout_s: float) -> dict[str, Any]:
        """By the server that the session has, else by one that is started now and stays."""
        until = time.monotonic() + timeout_s
        answer = self._visit(run, method, params, cwd, timeout_s, 0.0)
        if (
            answer.get("trouble") == _NOT_KEPT
            and (left_s := until - time.monotonic()) > 0
            and self._start_keeper(run, left_s)
        ):
            left_s = max(until - time.monotonic(), _LEAST_S)
            answer = self._visit(run, method, params, cwd, left_s, min(_KEEPER_S, left_s / 2))
        if answer.get("trouble") == _NOT_KEPT:
            return self._use_once(run, method, params, cwd, max(until - time.monotonic(), _LEAST_S))
        return answer

    def _visit(
        self, run: Run, method: str, params: Mapping[str, Any], cwd: str, timeout_s: float, wait_s: float
    ) -> dict[str, Any]:
        job = self._build_job(method, params, timeout_s)
        argv = [PYTHON, "-I", "-S", "-c", read_visit(), name_keeper(self.entry), job["mark"], str(wait_s)]
        return self._run(run, argv, job, cwd, timeout_s)

    def _use_once(self, run: Run, method: str, params: Mapping[str, Any], cwd: str, timeout_s: float) -> dict[str, Any]:
        return self._run(
            run, [PYTHON, "-I", "-c", read_driver()], self._build_job(method, params, timeout_s), cwd, timeout_s
        )

    def _start_keeper(self, run: Run, timeout_s: float) -> bool:
        """As a background job, which no end of a call meets. False where there can be none: without bash, or beside too
        many others.
        """
        script = encode(build_keep_script(PYTHON, self.entry), "script")
        label = f"the MCP server {self.name} ({name_keeper(self.entry)[-8:]})"
        request = {
            "op": "job_start",
            "script_bytes": len(script),
            "cwd": FOLDER,
            "label": label,
            "wait_ms": 0,
            "max_bytes": 0,
            "timeout_s": timeout_s,
        }
        try:
            self._end_orphans(run, label, timeout_s)
            run(request, script)
        except ToolFailure as failure:
            if failure.code is ErrorCode.CANCELLED:
                raise
            log.warning("mcp_server_not_kept", server=self.name, error=failure.message)
            return False
        return True

    def _end_orphans(self, run: Run, label: str, timeout_s: float) -> None:
        """What a server left that killed its keeper: the job lives, and nobody listens. One that is young may be
        another call's that begins.
        """
        listed = run({"op": "job_list", "timeout_s": timeout_s}, b"").done["jobs"]
        for job in listed:
            if (job["label"], job["state"]) == (label, "running") and job["age_s"] > _KEEPER_S:
                run({"op": "job_kill", "job": job["job"], "max_bytes": 0, "timeout_s": timeout_s}, b"")

    def _build_job(self, method: str, params: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        return {
            "mark": secrets.token_hex(16),
            "command": self.entry.command,
            "args": list(self.entry.args),
            "env": {name: value.get_secret_value() for name, value in self.entry.env.items()},
            "cwd": self.entry.cwd,
            "network": self.entry.network,
            "stands_alone": self.stands_alone,
            "method": method,
            "params": params,
            "max_pages": MAX_PAGES,
            "max_bytes": ANSWER_BYTES,
            "timeout_s": max(timeout_s - _SPARE_S, timeout_s / 2),
        }

    def _run(self, run: Run, argv: list[str], job: Mapping[str, Any], cwd: str, timeout_s: float) -> dict[str, Any]:
        request = {
            "op": "exec",
            "argv": argv,
            "script_bytes": 0,
            "cwd": cwd,
            "env": {},
            "timeout_s": timeout_s,
            # Escaped as JSON an answer can be several times as long.
            "capture": {"stdout": 2 * ANSWER_BYTES, "stderr": 4096},
        }
        return self._read(run(request, encode(json.dumps(job), "arguments")), str(job["mark"]), timeout_s)

    def _read(self, response: GuestResponse, mark: str, timeout_s: float) -> dict[str, Any]:
        """The driver's answer. Raises ToolFailure for none, and for what it says went wrong."""
        done, data = response.done, response.streams.get("stdout", b"")
        if done["timed_out"]:
            raise self._hangs(timeout_s)
        if done["cancelled"]:
            raise ToolFailure(ErrorCode.CANCELLED, f"the call of the MCP server {self.name} was cancelled")
        if int(done["streams"]["stdout"]["total"]) > len(data):
            raise self._floods()
        _, found, line = data.rpartition(f"\n{mark} ".encode())
        if not found:
            words = one_line(response.streams.get("stderr", b"").decode("utf-8", "replace"), MAX_TOLD_CHARS)
            raise broken(self.name, f"it was ended, or ended its driver ({words or 'no reason given'})")
        answer = parse_json(line, self.name)
        if not isinstance(answer, dict):
            raise broken(self.name, "its driver's answer is none")
        if "trouble" in answer and answer["trouble"] != _NOT_KEPT:
            raise self._explain(
                str(answer["trouble"]), one_line(str(answer.get("told", "")), MAX_TOLD_CHARS), timeout_s
            )
        return answer

    def _explain(self, trouble: str, told: str, timeout_s: float) -> ToolFailure:
        if trouble == "network":
            return ToolFailure(
                ErrorCode.SECURITY_REFUSED,
                f"the MCP server {self.name} is not run in a session with network: call its tools in one without, or "
                "use another tool",
            )
        if trouble == "not_started":
            return ToolFailure(
                ErrorCode.CONFIG_MISSING,
                f"the MCP server {self.name} cannot be started in this sandbox ({told}): use another tool, or have the "
                "operator put it into the image",
            )
        if trouble == "hangs":
            return self._hangs(timeout_s)
        if trouble == "flood":
            return self._floods()
        return broken(
            self.name, f"it ended before it answered ({told})" if trouble == "died" else f"it refused to begin ({told})"
        )

    def _hangs(self, timeout_s: float) -> ToolFailure:
        return ToolFailure(
            ErrorCode.TIMEOUT,
            f"the MCP server {self.name} did not answer within {timeout_s:g} s and was ended; what it did until then "
            "stays done: look before you repeat it",
        )

    def _floods(self) -> ToolFailure:
        return ToolFailure(
            ErrorCode.FILE_TOO_LARGE,
            f"the MCP server {self.name} sent more than {ANSWER_BYTES} bytes and was ended: ask it for less at a time",
        )

    def _replies(self, answer: Mapping[str, Any], method: str) -> list[dict[str, Any]]:
        """The results of what was asked, at least one. Raises ToolFailure."""
        messages = answer.get("replies")
        if not isinstance(messages, list) or not 0 < len(messages) <= MAX_PAGES:
            raise broken(self.name, "its driver's answer is none")
        return [self._result(method, parse_reply(message, FIRST_NUMBER + at)) for at, message in enumerate(messages)]

    def _result(self, method: str, reply: Reply | None) -> dict[str, Any]:
        if reply is None:
            raise broken(self.name, "its answer is none to what was asked")
        if reply.result is None:
            raise ToolFailure(
                ErrorCode.HTTP_ERROR, f"the MCP server {self.name} refused {method}: {reply.error}", mcp_code=reply.code
            )
        return reply.result
