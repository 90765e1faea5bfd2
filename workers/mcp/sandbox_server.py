"""An MCP server over stdio that runs inside a sandbox under a driver. All output of the sandbox is untrusted."""

import json
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import anyio
import mcp_types as types
import structlog
from mcp.shared.dispatcher import CallOptions
from mcp.shared.exceptions import MCPError
from mcp_types.version import LATEST_HANDSHAKE_VERSION

from toolcrew.contract.errors import ErrorCode, ToolFailure
from toolcrew.contract.guest_protocol import (
    A,
    ExecAnswer,
    ExecRequest,
    GuestReply,
    GuestRequest,
    JobKillRequest,
    JobListRequest,
    JobStartRequest,
)
from toolcrew.workers.mcp.messages import ServerReply, build_protocol_error, parse_json, parse_reply
from toolcrew.workers.mcp.sandbox_programs import build_driver_script, name_driver_socket, read_driver, read_visit
from toolcrew.workers.mcp.session import CLIENT, REFUSED, SESSIONLESS, RawSession
from toolcrew.workers.mcp.settings import StdioEntry
from toolcrew.workers.tools.text import encode
from toolcrew.workers.web.fences import one_line
from toolcrew.workers.web.limits import MIB

log = structlog.get_logger(__name__)

ANSWER_BYTES = 4 * MIB
PYTHON = "/usr/bin/python3"
"""Path of Python in every sandbox. The guest needs it too."""
FOLDER = "/workspace"
PROBE_S = 5.0
"""Time limit for a server to report the protocol revisions that it speaks, in seconds."""
MAX_DETAIL_CHARS = 500
_SPARE_S = 1.0
"""Time in seconds by which the driver's limit is shorter than the call's limit, so the driver can report what it
waits for.
"""
_LEAST_S = 0.1
_NOT_KEPT = "not_kept"
"""Failure code of the driver when no server is running. In this case no request was sent."""
_DRIVER_S = 10.0
"""Maximum time for a new daemon to listen, in seconds."""

_NUMBER = 1
"""JSON-RPC id of every request. The driver gives the requests to a running server new ids."""
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


class Run(Protocol):
    """Runs a request of docs/guest-protocol.md in one sandbox."""

    def __call__(self, request: GuestRequest[A], body: bytes, /) -> GuestReply[A]: ...


@dataclass
class SandboxServer:
    """An MCP server that runs in sandboxes. The first call of a session starts the server in the session's sandbox,
    where it keeps running. With `idle_s` 0 in its entry, each call starts the server anew. `is_sessionless`: True if
    the server speaks a revision of the protocol without sessions; None: not yet known.
    """

    name: str
    entry: StdioEntry
    is_sessionless: bool | None = None

    def list_tools(self, run: Run, timeout_s: float) -> list[Any]:
        """Return the unchecked list of the server's tools, and store in `is_sessionless` which revision of the protocol
        it speaks. Raises ToolFailure, SandboxUnavailable.
        """
        until = time.monotonic() + timeout_s

        def send(message: _Message) -> ServerReply:
            remaining_s = max(until - time.monotonic(), _LEAST_S)
            probe = message["method"] == "server/discover"
            return self._use_once(run, message, FOLDER, min(remaining_s, PROBE_S) if probe else remaining_s)

        return self._exchange(RawSession.gather_tools, send)

    def call_tool(
        self, run: Run, tool: str, arguments: Mapping[str, Any], cwd: str, timeout_s: float
    ) -> dict[str, Any]:
        """Return the result of the call. Only its type is checked (an object). `cwd`: the session's folder. Raises
        the same exceptions as `list_tools`.
        """
        use = self._use_running_server if self.entry.idle_s > 0 else self._use_once
        return self._exchange(
            lambda session: session.use_tool(tool, arguments), lambda message: use(run, message, cwd, timeout_s)
        )

    def _exchange(self, work: Callable[[RawSession], Awaitable[T]], send: Callable[[_Message], ServerReply]) -> T:
        async def converse() -> T:
            # Do not use the SDK session as a context manager: that would start a reader for messages that no request
            # asked for.
            session = RawSession(self.name, _Dispatcher(send))
            try:
                await self._greet(session)
                return await work(session)
            except REFUSED as error:
                raise session.explain(error) from None

        return anyio.run(converse)

    async def _greet(self, session: RawSession) -> None:
        if self.is_sessionless is None:
            try:
                self.is_sessionless = await session.try_adopt_sessionless()
            except ToolFailure as failure:
                # If the server does not answer this newer request, open a session with the older greeting.
                if failure.code is not ErrorCode.TIMEOUT:
                    raise
                self.is_sessionless = False
        # The driver sends the greeting to each process that it starts, so the SDK session must not send it again.
        session.adopt(SESSIONLESS if self.is_sessionless else _GREETED)

    def _use_running_server(self, run: Run, message: _Message, cwd: str, timeout_s: float) -> ServerReply:
        """Send the request to the server that runs in the session's sandbox. Start a server that keeps running if there
        is none.
        """
        until = time.monotonic() + timeout_s
        reply = self._visit(run, message, cwd, timeout_s, 0.0)
        if reply is None and (remaining_s := until - time.monotonic()) > 0 and self._start_driver(run, remaining_s):
            remaining_s = max(until - time.monotonic(), _LEAST_S)
            reply = self._visit(run, message, cwd, remaining_s, min(_DRIVER_S, remaining_s / 2))
        if reply is None:
            return self._use_once(run, message, cwd, max(until - time.monotonic(), _LEAST_S))
        return reply

    def _visit(self, run: Run, message: _Message, cwd: str, timeout_s: float, wait_s: float) -> ServerReply | None:
        """Send the request through the daemon. Returns None if no daemon runs."""
        job = self._build_job(message, timeout_s)
        argv = [PYTHON, "-I", "-S", "-c", read_visit(), name_driver_socket(self.entry), job["mark"], str(wait_s)]
        answer = self._run(run, argv, job, cwd, timeout_s)
        return None if answer.get("failure") == _NOT_KEPT else self._find_reply(answer)

    def _use_once(self, run: Run, message: _Message, cwd: str, timeout_s: float) -> ServerReply:
        job = self._build_job(message, timeout_s)
        return self._find_reply(self._run(run, [PYTHON, "-I", "-c", read_driver()], job, cwd, timeout_s))

    def _start_driver(self, run: Run, timeout_s: float) -> bool:
        """Start the daemon as a background job, which survives the end of a call. Returns False if no job can run:
        the image has no bash, or too many jobs run.
        """
        script = encode(build_driver_script(PYTHON, self.entry), "script")
        label = f"the MCP server {self.name} ({name_driver_socket(self.entry)[-8:]})"
        request = JobStartRequest(
            script_bytes=len(script), cwd=FOLDER, label=label, wait_ms=0, max_bytes=0, timeout_s=timeout_s
        )
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
        """End the job of a server that killed its daemon: the job still runs, but nothing listens. A recent job is
        spared, because another call may be starting it.
        """
        for job in run(JobListRequest(timeout_s=timeout_s), b"").answer.jobs:
            if (job.label, job.state) == (label, "running") and job.age_s > _DRIVER_S:
                run(JobKillRequest(job=job.job, max_bytes=0, timeout_s=timeout_s), b"")

    def _build_job(self, message: _Message, timeout_s: float) -> dict[str, Any]:
        return {
            "mark": secrets.token_hex(16),
            "command": self.entry.command,
            "args": list(self.entry.args),
            "env": {name: value.get_secret_value() for name, value in self.entry.env.items()},
            "cwd": self.entry.cwd,
            "network": self.entry.network,
            "hello": _HELLO if self.is_sessionless is False else [],
            "message": message,
            "max_bytes": ANSWER_BYTES,
            "timeout_s": max(timeout_s - _SPARE_S, timeout_s / 2),
        }

    def _run(self, run: Run, argv: list[str], job: Mapping[str, Any], cwd: str, timeout_s: float) -> dict[str, Any]:
        request = ExecRequest(
            argv=argv,
            cwd=cwd,
            timeout_s=timeout_s,
            # JSON escapes can make an answer several times longer than its text.
            capture={"stdout": 2 * ANSWER_BYTES, "stderr": 4096},
        )
        return self._read(run(request, encode(json.dumps(job), "arguments")), str(job["mark"]), timeout_s)

    def _read(self, reply: GuestReply[ExecAnswer], mark: str, timeout_s: float) -> dict[str, Any]:
        """Return the driver's answer. Raises ToolFailure when there is no answer, or the answer
        reports a failure.
        """
        data = reply.streams.get("stdout", b"")
        if reply.answer.timed_out:
            raise self._hangs(timeout_s)
        if reply.answer.cancelled:
            raise ToolFailure(
                ErrorCode.CANCELLED,
                f"the call of the MCP server {self.name} was cancelled: call it again if you still need it",
            )
        if reply.answer.streams["stdout"].total > len(data):
            raise self._floods()
        _, separator, line = data.rpartition(f"\n{mark} ".encode())
        if not separator:
            detail = one_line(reply.streams.get("stderr", b"").decode("utf-8", "replace"), MAX_DETAIL_CHARS)
            raise build_protocol_error(self.name, f"the server or its driver ended ({detail or 'no reason given'})")
        answer = parse_json(line, self.name)
        if not isinstance(answer, dict):
            raise build_protocol_error(self.name, "the answer of its driver is not an object")
        if "failure" in answer and answer["failure"] != _NOT_KEPT:
            raise self._explain(
                str(answer["failure"]), one_line(str(answer.get("detail", "")), MAX_DETAIL_CHARS), timeout_s
            )
        return answer

    def _explain(self, failure: str, detail: str, timeout_s: float) -> ToolFailure:
        if failure == "network":
            return ToolFailure(
                ErrorCode.SECURITY_REFUSED,
                f"the MCP server {self.name} does not run in a session with network: use a session without network, "
                f"or another tool",
            )
        if failure == "not_started":
            return ToolFailure(
                ErrorCode.CONFIG_MISSING,
                f"the MCP server {self.name} cannot be started in this sandbox ({detail}): use another tool, or ask "
                f"the operator to add the server to the image",
            )
        if failure == "hangs":
            return self._hangs(timeout_s)
        if failure == "flood":
            return self._floods()
        return build_protocol_error(
            self.name,
            f"it ended before it answered ({detail})" if failure == "died" else f"it refused to begin ({detail})",
        )

    def _hangs(self, timeout_s: float) -> ToolFailure:
        return ToolFailure(
            ErrorCode.TIMEOUT,
            f"the MCP server {self.name} did not answer within {timeout_s:g} s and was ended. Its effects until then "
            f"remain: check them before you repeat the call",
        )

    def _floods(self) -> ToolFailure:
        return ToolFailure(
            ErrorCode.FILE_TOO_LARGE,
            f"the MCP server {self.name} sent more than {ANSWER_BYTES} bytes and was ended: request less data per call",
        )

    def _find_reply(self, answer: Mapping[str, Any]) -> ServerReply:
        reply = parse_reply(answer.get("reply"), _NUMBER)
        if reply is None:
            raise build_protocol_error(self.name, "its response does not match the request")
        return reply


class _Dispatcher:
    """Sends the SDK's requests: each request runs a program in the sandbox. There are no messages that no request asked
    for.
    """

    method = ""
    result: dict[str, Any]

    def __init__(self, send: Callable[[_Message], ServerReply]) -> None:
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
        raise NotImplementedError("only the driver sends notifications")

    async def run(
        self, on_request: Any, on_notify: Any, on_notify_intercept: Any = None, *, task_status: Any = None
    ) -> None:
        raise NotImplementedError("the driver sends no unrequested messages")
