"""One MCP server over stdio, run inside a sandbox by a driver of ours; what comes back is the sandbox's word and read
as hostile.
"""

import json
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import anyio
import mcp_types as types
import structlog
from mcp.shared.dispatcher import CallOptions
from mcp.shared.exceptions import MCPError
from mcp_types.version import LATEST_HANDSHAKE_VERSION

from contract.errors import ErrorCode, ToolFailure
from workers.mcp.messages import Reply, broken, parse_json, parse_reply
from workers.mcp.sandbox_programs import build_keep_script, name_keeper, read_driver, read_visit
from workers.mcp.session import CLIENT, REFUSED, STANDS_ALONE, RawSession
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
PROBE_S = 5.0
"""For a server to say which revisions it speaks."""
MAX_DETAIL_CHARS = 500
_SPARE_S = 1.0
"""Before the call's limit the driver gives up by itself, and can say on what."""
_LEAST_S = 0.1
_NOT_KEPT = "not_kept"
"""The failure where no server is kept: nothing was asked yet."""
_KEEPER_S = 10.0
"""At most, for a keeper to listen that was just started."""

_NUMBER = 1
"""Of every request: the driver numbers those of a kept server."""
_HELLO = [
    {
        "jsonrpc": "2.0",
        "method": "initialize",
        "params": types.InitializeRequestParams(
            protocol_version=LATEST_HANDSHAKE_VERSION, capabilities=types.ClientCapabilities(), client_info=CLIENT
        ).model_dump(by_alias=True, mode="json", exclude_none=True),
    },
    {"jsonrpc": "2.0", "method": "notifications/initialized"},
]
_GREETED = types.InitializeResult(
    protocol_version=LATEST_HANDSHAKE_VERSION, capabilities=types.ServerCapabilities(), server_info=CLIENT
)
T = TypeVar("T")
_Message = dict[str, Any]
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
        until = time.monotonic() + timeout_s

        def send(message: _Message) -> Reply:
            left_s = max(until - time.monotonic(), _LEAST_S)
            probe = message["method"] == "server/discover"
            return self._use_once(run, message, FOLDER, min(left_s, PROBE_S) if probe else left_s)

        return self._talk(RawSession.gather_tools, send)

    def call_tool(
        self, run: Run, tool: str, arguments: Mapping[str, Any], cwd: str, timeout_s: float
    ) -> dict[str, Any]:
        """The result, unchecked but for being an object. `cwd`: where the session is. Raises as `list_tools`."""
        use = self._use_kept if self.entry.idle_s > 0 else self._use_once
        return self._talk(
            lambda session: session.use_tool(tool, arguments), lambda message: use(run, message, cwd, timeout_s)
        )

    def _talk(self, work: Callable[[RawSession], Awaitable[T]], send: Callable[[_Message], Reply]) -> T:
        async def converse() -> T:
            # Not entered: that is for what comes unasked.
            session = RawSession(self.name, _Dispatcher(send))
            try:
                await self._greet(session)
                return await work(session)
            except REFUSED as error:
                raise session.explain(error) from None

        return anyio.run(converse)

    async def _greet(self, session: RawSession) -> None:
        if self.stands_alone is None:
            try:
                self.stands_alone = await session.adopt_alone()
            except ToolFailure as failure:
                # One that does not answer what it does not know is greeted as before.
                if failure.code is not ErrorCode.TIMEOUT:
                    raise
                self.stands_alone = False
        # The driver greets each process that it starts.
        session.adopt(STANDS_ALONE if self.stands_alone else _GREETED)

    def _use_kept(self, run: Run, message: _Message, cwd: str, timeout_s: float) -> Reply:
        """By the server that the session has, else by one that is started now and stays."""
        until = time.monotonic() + timeout_s
        reply = self._visit(run, message, cwd, timeout_s, 0.0)
        if reply is None and (left_s := until - time.monotonic()) > 0 and self._start_keeper(run, left_s):
            left_s = max(until - time.monotonic(), _LEAST_S)
            reply = self._visit(run, message, cwd, left_s, min(_KEEPER_S, left_s / 2))
        if reply is None:
            return self._use_once(run, message, cwd, max(until - time.monotonic(), _LEAST_S))
        return reply

    def _visit(self, run: Run, message: _Message, cwd: str, timeout_s: float, wait_s: float) -> Reply | None:
        """None: no server is kept."""
        job = self._build_job(message, timeout_s)
        argv = [PYTHON, "-I", "-S", "-c", read_visit(), name_keeper(self.entry), job["mark"], str(wait_s)]
        answer = self._run(run, argv, job, cwd, timeout_s)
        return None if answer.get("failure") == _NOT_KEPT else self._find_reply(answer)

    def _use_once(self, run: Run, message: _Message, cwd: str, timeout_s: float) -> Reply:
        job = self._build_job(message, timeout_s)
        return self._find_reply(self._run(run, [PYTHON, "-I", "-c", read_driver()], job, cwd, timeout_s))

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

    def _build_job(self, message: _Message, timeout_s: float) -> dict[str, Any]:
        return {
            "mark": secrets.token_hex(16),
            "command": self.entry.command,
            "args": list(self.entry.args),
            "env": {name: value.get_secret_value() for name, value in self.entry.env.items()},
            "cwd": self.entry.cwd,
            "network": self.entry.network,
            "hello": _HELLO if self.stands_alone is False else [],
            "message": message,
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
            words = one_line(response.streams.get("stderr", b"").decode("utf-8", "replace"), MAX_DETAIL_CHARS)
            raise broken(self.name, f"it was ended, or ended its driver ({words or 'no reason given'})")
        answer = parse_json(line, self.name)
        if not isinstance(answer, dict):
            raise broken(self.name, "its driver's answer is none")
        if "failure" in answer and answer["failure"] != _NOT_KEPT:
            raise self._explain(
                str(answer["failure"]), one_line(str(answer.get("detail", "")), MAX_DETAIL_CHARS), timeout_s
            )
        return answer

    def _explain(self, failure: str, detail: str, timeout_s: float) -> ToolFailure:
        if failure == "network":
            return ToolFailure(
                ErrorCode.SECURITY_REFUSED,
                f"the MCP server {self.name} is not run in a session with network: call its tools in one without, or "
                "use another tool",
            )
        if failure == "not_started":
            return ToolFailure(
                ErrorCode.CONFIG_MISSING,
                f"the MCP server {self.name} cannot be started in this sandbox ({detail}): use another tool, or have "
                "the operator put it into the image",
            )
        if failure == "hangs":
            return self._hangs(timeout_s)
        if failure == "flood":
            return self._floods()
        return broken(
            self.name,
            f"it ended before it answered ({detail})" if failure == "died" else f"it refused to begin ({detail})",
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

    def _find_reply(self, answer: Mapping[str, Any]) -> Reply:
        reply = parse_reply(answer.get("reply"), _NUMBER)
        if reply is None:
            raise broken(self.name, "its answer is none to what was asked")
        return reply


class _Dispatcher:
    """The SDK's way to a server: every request is an exec in its sandbox, and nothing comes unasked."""

    method = ""
    result: dict[str, Any]

    def __init__(self, send: Callable[[_Message], Reply]) -> None:
        self._send = send

    async def send_raw_request(
        self, method: str, params: Mapping[str, Any] | None, opts: CallOptions | None = None
    ) -> dict[str, Any]:
        self.method = method
        reply = self._send({"jsonrpc": "2.0", "id": _NUMBER, "method": method, "params": dict(params or {})})
        if reply.result is None:
            raise MCPError(reply.code, reply.error)
        self.result = reply.result
        return reply.result

    async def notify(self, method: str, params: Mapping[str, Any] | None, opts: CallOptions | None = None) -> None:
        raise NotImplementedError("the driver sends the only notifications")

    async def run(
        self, on_request: Any, on_notify: Any, on_notify_intercept: Any = None, *, task_status: Any = None
    ) -> None:
        raise NotImplementedError("nothing comes unasked")
