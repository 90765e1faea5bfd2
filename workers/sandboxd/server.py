"""The unix socket that workers use: peer credentials checked, five verbs, a call's frames relayed both ways."""

import asyncio
import os
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import structlog

from contract.errors import ErrorCode, OperatorError, ToolFailure
from workers.sandboxd.frames import MAX_DOWN, Frame, FrameDecoder, FrameError, encode_frame
from workers.sandboxd.sandbox import RunningCall, Sandbox
from workers.sandboxd.sessions import Session, Sessions

log = structlog.get_logger(__name__)

_READ_BYTES = 256 * 1024
_MAX_TIMEOUT_S = 600.0
_OPS = frozenset({"exec", "read_lines", "read_file", "write_file", "ping"})


class Server:
    """Serves `open`, `call`, `cancel`, `close`, `status`. One request at a time on a connection; a closed connection cancels its call."""

    def __init__(
        self, sessions: Sessions, *, images: frozenset[str], default_image: str, uids: frozenset[int], facts: Mapping[str, Any]
    ) -> None:
        self._sessions = sessions
        self._images = images
        self._default_image = default_image
        self._uids = uids
        self._facts = dict(facts)
        self._connections: set[asyncio.Task[None]] = set()

    async def listen(self, path: Path, mode: int) -> asyncio.Server:
        """Listen at `path`. Raises OSError when another sandboxd already answers there."""
        if await _answers(path):
            raise OSError(f"another sandboxd already listens on {path}")
        _make_way(path)
        before = os.umask(0o777 & ~mode)
        try:
            return await asyncio.start_unix_server(self._accept, path=str(path), limit=_READ_BYTES)
        finally:
            os.umask(before)

    async def close_connections(self) -> None:
        """End what is still connected."""
        for task in list(self._connections):
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            uid = _peer_uid(writer)
            if uid not in self._uids:
                log.warning("peer_refused", uid=uid)
                return
            await _Connection(self, reader, writer).serve()
        except (FrameError, ConnectionError) as error:
            log.warning("connection_dropped", error=str(error))
        except asyncio.CancelledError:
            log.debug("connection_closed_at_shutdown")
        finally:
            self._connections.discard(task)
            writer.close()

    async def answer(self, header: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to every verb but `call`."""
        verb = header.get("verb")
        if verb == "open":
            image = str(header.get("image") or self._default_image)
            if image not in self._images:
                raise ToolFailure(
                    ErrorCode.INVALID_ARGUMENTS, f"image '{image}' is not allowed on this host; allowed: {', '.join(sorted(self._images))}"
                )
            started = time.monotonic()
            session = await self._sessions.open(_text(header, "sandbox"), image, float(header.get("ttl_s", 1800)))
            return {"sandbox": describe_sandbox(session), "image": image, "start_s": time.monotonic() - started}
        if verb == "close":
            return {"closed": await self._sessions.close(_text(header, "sandbox"))}
        if verb == "cancel":
            return {"cancelled": self._cancel(_text(header, "sandbox"), _text(header, "call"))}
        if verb == "status":
            return {**self._facts, "sandboxes": self._sessions.describe()}
        raise ToolFailure(ErrorCode.INVALID_ARGUMENTS, f"unknown verb {str(verb)[:40]!r}")

    async def session(self, name: str) -> Session:
        """A session ready for a call."""
        return await self._sessions.use(name)

    def _cancel(self, name: str, call_id: str) -> bool:
        session = self._sessions.find(name)
        if session is None:
            return False
        for call in list(session.sandbox.calls.values()):
            if call.call_id == call_id:
                session.sandbox.cancel(call)
                return True
        return False


class _Connection:
    """One worker's connection."""

    def __init__(self, server: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._server = server
        self._reader = reader
        self._writer = writer
        self._decoder = FrameDecoder(MAX_DOWN)
        self._waiting: list[Frame] = []

    async def serve(self) -> None:
        while (frame := await self._next()) is not None:
            try:
                if frame.header.get("verb") == "call":
                    await self._call(frame)
                else:
                    self._send({"ok": True, **await self._server.answer(frame.header)})
            except ToolFailure as failure:
                self._send({"ok": False, "code": failure.code.value, "message": failure.message})
            except OperatorError as error:
                self._send({"ok": False, "code": error.code.value, "message": str(error)})
            await self._writer.drain()

    async def _call(self, frame: Frame) -> None:
        request = _checked_request(frame.header.get("request"))
        size = request.get("body_bytes", 0)
        try:
            session = await self._server.session(_text(frame.header, "sandbox"))
        except (ToolFailure, OperatorError):
            await self._skip_body(size - len(frame.body))
            raise
        sandbox = session.sandbox
        call = sandbox.begin(str(frame.header.get("call", "")), request, _budget(request), lambda event: self._relay(sandbox, event))
        started = time.monotonic()
        await self._send_body(sandbox, call, request, size, frame.body)
        sandbox.start_clock(call)
        done = await self._await_done(sandbox, call)
        session.used_at = time.monotonic()
        if done.get("sandbox_lost") is not None:
            session.loss_told = True
        run_s = time.monotonic() - started
        self._send({**done, "ok": True, "ev": "done", "sandbox": describe_sandbox(session, sandbox), "sandbox_s": run_s})

    async def _send_body(self, sandbox: Sandbox, call: RunningCall, request: dict[str, Any], size: int, body: bytes) -> None:
        sandbox.feed(call, request, body)
        left = size - len(body)
        while left > 0:
            await sandbox.drain()
            frame = await self._next()
            if frame is None:
                sandbox.cancel(call)
                raise ConnectionError("the worker left in the middle of a body")
            left -= len(frame.body)
            sandbox.feed(call, {"op": "data"}, frame.body)
        if left < 0:
            sandbox.cancel(call)
            raise FrameError("more body than was declared")

    async def _skip_body(self, left: int) -> None:
        while left > 0 and (frame := await self._next()) is not None:
            left -= len(frame.body)

    async def _await_done(self, sandbox: Sandbox, call: RunningCall) -> dict[str, Any]:
        """The call's end. A worker that leaves meanwhile cancels it: nobody could take the result."""
        gone = asyncio.ensure_future(self._reader.read(1))
        try:
            waiting: set[asyncio.Future[Any]] = {call.done, gone}
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if not call.done.done():
                sandbox.cancel(call)
                await call.done
                raise ConnectionError("the worker left during a call")
        finally:
            gone.cancel()
            await asyncio.gather(gone, return_exceptions=True)
        return call.done.result()

    def _relay(self, sandbox: Sandbox, frame: Frame) -> None:
        self._send({"ev": "data", "stream": str(frame.header.get("stream"))}, frame.body)
        transport = self._writer.transport
        if transport.get_write_buffer_size() > 1024 * 1024:
            sandbox.pause()
            task = asyncio.ensure_future(self._writer.drain())
            task.add_done_callback(lambda _: sandbox.resume())

    def _send(self, header: Mapping[str, object], body: bytes = b"") -> None:
        self._writer.write(encode_frame(header, body, max_total=MAX_DOWN))

    async def _next(self) -> Frame | None:
        while not self._waiting:
            data = await self._reader.read(_READ_BYTES)
            if not data:
                return None
            self._waiting.extend(self._decoder.feed(data))
        return self._waiting.pop(0)


def describe_sandbox(session: Session, sandbox: Sandbox | None = None) -> dict[str, Any]:
    """What a result tells of its sandbox."""
    which = sandbox or session.sandbox
    return {"id": which.container[:12], "generation": which.generation, "rebuilt": which.generation > 1}


def _checked_request(request: object) -> dict[str, Any]:
    if not isinstance(request, dict) or request.get("op") not in _OPS:
        raise ToolFailure(ErrorCode.INVALID_ARGUMENTS, f"a call needs a request whose op is one of {', '.join(sorted(_OPS))}")
    timeout = request.get("timeout_s", 30.0)
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout <= _MAX_TIMEOUT_S:
        raise ToolFailure(ErrorCode.INVALID_ARGUMENTS, f"timeout_s must be a number above 0 and at most {_MAX_TIMEOUT_S:g}")
    size = request.get("body_bytes", 0)
    if isinstance(size, bool) or not isinstance(size, int) or size < 0:
        raise ToolFailure(ErrorCode.INVALID_ARGUMENTS, "body_bytes must be a whole number of at least 0")
    return {**request, "timeout_s": timeout, "body_bytes": size}


def _budget(request: Mapping[str, Any]) -> int:
    """Bytes of data frames that this request may cause."""
    capture = request.get("capture")
    total = int(request.get("max_bytes", 0))
    if isinstance(capture, dict):
        total += sum(int(value) for value in capture.values() if isinstance(value, int)) + (65536 if "stream" in capture else 0)
    return total


def _text(header: Mapping[str, Any], name: str) -> str:
    value = header.get(name)
    if not isinstance(value, str) or not value:
        raise ToolFailure(ErrorCode.INVALID_ARGUMENTS, f"'{name}' is missing")
    return value


def _peer_uid(writer: asyncio.StreamWriter) -> int:
    sock = writer.get_extra_info("socket")
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, uid, _ = struct.unpack("3i", credentials)
    return int(uid)


def _make_way(path: Path) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.unlink(missing_ok=True)


async def _answers(path: Path) -> bool:
    try:
        _, writer = await asyncio.open_unix_connection(str(path))
    except OSError:
        return False
    writer.close()
    return True
