"""The unix socket for workers. It checks the uid of the peer, serves one request at a time on each connection, and
relays the frames of a call in both directions.

A worker that disconnects must not leave a call running: the end of the connection cancels the call, and the cleanup
does not wait for the guest's answer.
"""

import asyncio
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import structlog
from pydantic import ValidationError

from toolcrew.contract.calls import LONGEST_TIMEOUT_S, Record
from toolcrew.contract.errors import ErrorCode, OperatorError, ToolFailure
from toolcrew.contract.guest_protocol import REQUESTS
from toolcrew.contract.invalid_input import find_invalid
from toolcrew.contract.tenancy import SandboxPolicy
from toolcrew.workers.sandboxd.factory import SandboxdEnding
from toolcrew.workers.sandboxd.frames import Frame, FrameError, WorkerLink
from toolcrew.workers.sandboxd.sandbox import SANDBOXD_FIELDS, RunningCall, Sandbox, count_budget
from toolcrew.workers.sandboxd.session import bound_to_session
from toolcrew.workers.sandboxd.sessions import Sessions
from toolcrew.workers.unix_listening import BACKLOG, find_peer_uid, open_listener

log = structlog.get_logger(__name__)

R = TypeVar("R", bound=Record)
OWNER = "sandboxd"
ReadBody = Callable[[int], AsyncIterator[bytes]]
"""Returns the chunks of a request's body of the given size."""
AnswerControl = Callable[[Mapping[str, Any], ReadBody], Awaitable[tuple[dict[str, Any], bytes]]]
"""Returns the header and the body of the answer to a request that is not a call."""
ServeStreams = Callable[[Sessions, WorkerLink, Mapping[str, Any]], Awaitable[None]]
"""Serves a connection that asks for the stream channel of a session, until its end."""
_MESSAGE_CHARS = 4096
MAX_BODY_BYTES = 67_108_864
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_OPS = (*REQUESTS, "ping")
_GATEWAY_VERBS = ("open_streams", "status")
"""Verbs of a stream gateway. It listens on the network, so it must not be able to do more."""


class RequestServer:
    """Listens for workers and serves one request at a time on each connection. A closed connection cancels its call."""

    def __init__(
        self,
        sessions: Sessions,
        answer_control: AnswerControl,
        serve_streams: ServeStreams,
        uids: frozenset[int],
        gateway_uids: frozenset[int] = frozenset(),
    ) -> None:
        """`uids`: may make every request. `gateway_uids`: may only use stream channels."""
        self._sessions = sessions
        self._serve_streams = serve_streams
        self._answer_control = answer_control
        self._uids = uids
        self._gateway_uids = gateway_uids
        self._connections: set[asyncio.Task[None]] = set()

    async def listen(self, path: Path, mode: int) -> asyncio.Server:
        """Listen at `path`. Raises OSError when another sandboxd already answers there, or when the path is not a
        socket.
        """
        listener = open_listener(path, mode, owner=OWNER, variable="TOOLCREW_SANDBOXD_SOCKET")
        return await asyncio.get_running_loop().create_unix_server(
            lambda: WorkerLink(self._accept), sock=listener, backlog=BACKLOG
        )

    async def close_connections(self) -> None:
        """Cancel every open connection and wait for its end."""
        for task in list(self._connections):
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    def _accept(self, link: WorkerLink) -> None:
        assert link.transport is not None
        uid = find_peer_uid(link.transport.get_extra_info("socket"))
        if uid not in self._uids | self._gateway_uids:
            log.warning("peer_refused", uid=uid)
            link.close()
            return
        task = asyncio.get_running_loop().create_task(self._serve(link, is_gateway=uid not in self._uids))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _serve(self, link: WorkerLink, *, is_gateway: bool) -> None:
        connection = Connection(link, self._sessions, self._answer_control, self._serve_streams)
        connection.is_gateway = is_gateway
        try:
            await connection.serve()
        except (FrameError, ConnectionError) as error:
            log.warning("connection_dropped", error=str(error))
        except asyncio.CancelledError:
            log.debug("connection_closed_at_shutdown")
        except Exception:  # outermost handler: a bug ends only this connection and is logged
            log.exception("connection_bug")
        finally:
            link.close()


class Connection:
    """Serves the requests of one worker or stream gateway. Calls are relayed to the guest; `serve_streams` and
    `answer_control` answer all other requests.
    """

    def __init__(
        self, link: WorkerLink, sessions: Sessions, answer_control: AnswerControl, serve_streams: ServeStreams
    ) -> None:
        self._link = link
        self._sessions = sessions
        self._answer_control = answer_control
        self._serve_streams = serve_streams
        self.is_gateway = False
        """Whether the other side may only use stream channels."""

    async def serve(self) -> None:
        """Serve requests until the worker leaves. Raises FrameError when the worker breaks the protocol, and
        ConnectionError when it leaves in the middle of a request.
        """
        while (frame := await self._link.next()) is not None:
            verb = frame.header.get("verb")
            if verb == "data":
                continue  # read and drop the rest of the body of a call that was already refused and answered
            try:
                with bound_to_session(frame.header.get("sandbox")):
                    await self._serve(verb, frame)
            except ToolFailure as failure:
                self._refuse(failure.code, failure.message)
            except OperatorError as error:
                self._refuse(error.code, str(error), is_ending=isinstance(error, SandboxdEnding))
            await self._link.drain()

    async def _serve(self, verb: object, frame: Frame) -> None:
        if self.is_gateway and verb not in _GATEWAY_VERBS:
            raise ToolFailure(ErrorCode.PERMISSION_DENIED, "a stream gateway may only use stream channels")
        if verb == "call":
            await self._call(frame)
        elif verb == "open_streams":
            await self._serve_streams(self._sessions, self._link, frame.header)
        else:
            answer, body = await self._answer_control(frame.header, lambda size: self._body(frame.body, size))
            self._link.send({"ok": True, **answer}, body)

    async def _body(self, first: bytes, size: int) -> AsyncIterator[bytes]:
        """Yield the declared body, of which the first frame already contained `first`."""
        remaining = size - len(first)
        if remaining < 0:
            raise FrameError("the body is larger than declared")
        yield first
        while remaining > 0:
            data = await self._next_data(remaining)
            remaining -= len(data)
            yield data

    async def _next_data(self, remaining: int) -> bytes:
        frame = await self._link.next()
        if frame is None:
            raise ConnectionError("the worker left in the middle of a body")
        if frame.header.get("verb") != "data" or len(frame.body) > remaining:
            raise FrameError("another frame came before the end of the body, or the body is larger than declared")
        return frame.body

    def _refuse(self, code: ErrorCode, message: str, *, is_ending: bool = False) -> None:
        ending = {"is_ending": True} if is_ending else {}
        self._link.send({"ok": False, "code": code.value, "message": message[:_MESSAGE_CHARS], **ending})

    async def _call(self, frame: Frame) -> None:
        request = check_request(frame.header.get("request"))
        if len(frame.body) > request["body_bytes"]:
            raise FrameError("the body is larger than declared")
        call_id = str(frame.header.get("call", ""))
        session, sandbox = await self._sessions.use(
            parse_text(frame.header, "sandbox"), call_id, parse_policy(frame.header), request["timeout_s"]
        )
        session.run = parse_run(frame.header)
        if self._link.is_disconnected:
            raise ConnectionError("the worker closed the connection before its call began")
        if call_id in session.cancelled_calls:
            raise ToolFailure(ErrorCode.CANCELLED, "the call was cancelled before it began")
        started, done = time.monotonic(), dict[str, Any]()
        call = sandbox.begin(call_id, request, count_budget(request), self._relay)
        self._announce(sandbox, call, request, frame.body)
        measured, usage = sandbox.meter.begin(), None
        self._link.watch(lambda: self._abandon(sandbox, call), lambda is_slow: self._set_pace(sandbox, is_slow))
        try:
            await self._send_body(sandbox, call, request["body_bytes"] - len(frame.body))
            sandbox.start_clock(call)
            done = await call.done
        finally:
            self._link.unwatch()
            sandbox.release(self._link)
            sandbox.cancel(call)
            session.activity.record(call.op, done)
            session.used_at = time.monotonic()
            usage = sandbox.meter.end(measured)
        if self._link.is_disconnected:
            # Check this before the session's news (facts for the next answer) is taken: it must not get lost in an
            # answer that no worker reads.
            raise ConnectionError("the worker left during a call")
        sandbox_fields: dict[str, Any] = {
            "ok": True,
            "sandbox": session.describe_sandbox(sandbox),
            "sandbox_s": time.monotonic() - started,
            "session_usage": session.usage.describe(),
        }
        if usage is not None:
            sandbox_fields["usage"] = usage.model_dump()
        if "sandbox_lost" in done:
            sandbox.is_loss_reported = True
            sandbox_fields["workspace_kept"] = session.workspace.outlives_container
        assert sandbox_fields.keys() <= SANDBOXD_FIELDS, "a guest could set a field that only sandboxd may set"
        self._send_done(done, sandbox_fields)
        # Write the log entry last, so that the worker does not wait for it.
        log.info(
            "sandbox_call_ended",
            call=call_id,
            op=call.op,
            sandbox=sandbox.container[:12],
            seconds=round(sandbox_fields["sandbox_s"], 4),
        )

    def _announce(self, sandbox: Sandbox, call: RunningCall, request: dict[str, Any], body: bytes) -> None:
        try:
            sandbox.feed(call, request, body)
        except FrameError as error:
            sandbox.forget(call)
            raise ToolFailure(
                ErrorCode.INVALID_ARGUMENTS, f"the request is too large ({error}): put large content into a file"
            ) from error

    async def _send_body(self, sandbox: Sandbox, call: RunningCall, remaining: int) -> None:
        while remaining > 0:
            await sandbox.drain()
            data = await self._next_data(remaining)
            remaining -= len(data)
            sandbox.feed(call, {"op": "data"}, data)

    def _relay(self, frame: Frame) -> None:
        self._link.send({"ev": "data", "stream": frame.header["stream"]}, frame.body)

    def _abandon(self, sandbox: Sandbox, call: RunningCall) -> None:
        # The guest sends the end of the call after output that the worker no longer reads. Resume reading from the
        # guest, or the end never arrives.
        sandbox.release(self._link)
        sandbox.cancel(call)

    def _set_pace(self, sandbox: Sandbox, is_slow: bool) -> None:
        if is_slow:
            sandbox.hold(self._link)
        else:
            sandbox.release(self._link)

    def _send_done(self, done: Mapping[str, Any], sandbox_fields: Mapping[str, Any]) -> None:
        try:
            self._link.send({**done, **sandbox_fields})
        except FrameError:
            error = {"code": ErrorCode.INTERNAL.value, "message": "the guest's answer is too large to be handed on"}
            loss = {name: done[name] for name in ("sandbox_lost", "removal_failed") if name in done}
            self._link.send({"ev": "done", "error": error, **loss, **sandbox_fields})


# --- Checks of a call, and of fields of several requests. A wrong field raises ToolFailure(INVALID_ARGUMENTS). --------


def check_request(request: object) -> dict[str, Any]:
    """Return a call's request with `timeout_s`, `body_bytes`, `max_bytes` and `live_bytes` as numbers within limits.
    The guest checks the other fields.
    """
    if not isinstance(request, dict) or request.get("op") not in _OPS:
        raise ToolFailure(ErrorCode.INVALID_ARGUMENTS, f"a call needs a request whose op is one of {', '.join(_OPS)}")
    timeout_s = parse_number(request, "timeout_s", 30.0, LONGEST_TIMEOUT_S)
    size = parse_count(request, "body_bytes")
    if size > MAX_BODY_BYTES:
        raise ToolFailure(ErrorCode.INVALID_ARGUMENTS, f"body_bytes must be at most {MAX_BODY_BYTES}")
    for name in ("max_bytes", "live_bytes"):
        if name in request:
            parse_count(request, name)
    return {**request, "timeout_s": timeout_s, "body_bytes": size}


def parse_text(header: Mapping[str, Any], name: str) -> str:
    value = header.get(name)
    if not isinstance(value, str) or not value:
        raise ToolFailure(ErrorCode.INVALID_ARGUMENTS, f"'{name}' is missing")
    return value


def parse_policy(header: Mapping[str, Any]) -> SandboxPolicy | None:
    """Return the sandbox policy of the tenant, or None when the request has none."""
    if header.get("policy") is None:
        return None
    try:
        return SandboxPolicy.model_validate(header["policy"])
    except ValidationError as error:
        part = find_invalid(error, SandboxPolicy)
        part = replace(part, path=("policy", *part.path))
        raise ToolFailure(ErrorCode.INVALID_ARGUMENTS, f"{part}; fix the tenant's policy") from None


def parse_run(header: Mapping[str, Any]) -> str | None:
    """Return the run that a call belongs to, or None."""
    run = header.get("run")
    return run if isinstance(run, str) and _NAME.fullmatch(run) else None


def parse_number(header: Mapping[str, Any], name: str, default: float, most: float) -> float:
    value = header.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= most:
        raise ToolFailure(ErrorCode.INVALID_ARGUMENTS, f"{name} must be a number above 0 and at most {most:g}")
    return value


def parse_count(header: Mapping[str, Any], name: str) -> int:
    value = header.get(name, 0)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ToolFailure(ErrorCode.INVALID_ARGUMENTS, f"{name} must be a whole number of at least 0")
    return value
