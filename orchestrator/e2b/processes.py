"""The service `process.Process` of E2B's sandboxes."""

import asyncio
import base64
import binascii
import secrets
import signal
from collections.abc import AsyncIterator, Mapping
from typing import Any, Final

from starlette.requests import Request

from toolcrew.contract.errors import ErrorCode, ToolFailure
from toolcrew.orchestrator.e2b.connect_rpc import (
    ConnectError,
    MessageStream,
    SendMessage,
    read_envelopes,
    read_one,
)
from toolcrew.orchestrator.e2b.sandbox import EnvdSandbox
from toolcrew.orchestrator.streams.stream import Stream

INPUT_BYTES: Final = 24_576
"""Bytes of one piece of input. In base64 it fits into a frame."""
INPUT_S: Final = 30.0
"""Seconds that a program may leave its input unread."""
_INPUT_POLL_S: Final = 0.05
KEEPALIVE_S: Final = 90.0
LEAST_KEEPALIVE_S: Final = 5.0
MAX_TIMEOUT_S: Final = 24 * 3600.0
_SIGNALS: Final = {"SIGNAL_SIGTERM": 15, "SIGNAL_SIGKILL": 9, 15: 15, 9: 9}


class ProcessService:
    """Starts and controls the processes of one sandbox."""

    def __init__(self, sandbox: EnvdSandbox) -> None:
        self._sandbox = sandbox

    async def start(self, request: Request, user: str | None) -> MessageStream:
        """Start a program, and send its output until it ends. It goes on when the client leaves."""
        message = await read_one(request)
        timeout_s = _read_timeout(request)
        config = message.get("process")
        if not isinstance(config, dict) or not isinstance(config.get("cmd"), str):
            raise ConnectError("invalid_argument", "'process' needs 'cmd'")
        pty = _read_size(message)
        opening = {
            "argv": [config["cmd"], *config.get("args", [])],
            "env": config.get("envs", {}),
            "cwd": await self._sandbox.resolve(config.get("cwd") or "~", user),
            "user": user,
            "pty": pty,
            "stdin": bool(message.get("stdin", True)) and pty is None,
            "tag": message.get("tag"),
            "timeout_s": timeout_s,
        }

        async def produce(send: SendMessage) -> None:
            try:
                stream = await self._sandbox.open("process", **opening)
            except ToolFailure as failure:
                if failure.code in (ErrorCode.FILE_NOT_FOUND, ErrorCode.NOT_A_DIRECTORY, ErrorCode.PERMISSION_DENIED):
                    raise ConnectError("invalid_argument", failure.message) from None
                raise
            await _send_events(stream, send, _keepalive_s(request), is_pty=pty is not None)

        return MessageStream(produce)

    async def connect(self, request: Request) -> MessageStream:
        """Send the output of a running program from now on."""
        message = await read_one(request)

        async def produce(send: SendMessage) -> None:
            process = await self._find(message, must_run=False)
            stream = await self._sandbox.open("attach", process=process["process"], **{"from": "live"}, pace=True)
            await _send_events(stream, send, _keepalive_s(request), is_pty=bool(process["pty"]))

        return MessageStream(produce)

    async def list_running(self, _: Mapping[str, Any]) -> dict[str, Any]:
        """Return the running processes."""
        return {"processes": [_describe(row) for row in await self._rows() if row.get("end") is None]}

    async def send_input(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Write to the input of a program. The client learns of every byte that was not written."""
        process = await self._find(message)
        writer = _Writer(self._sandbox, process)
        await writer.write(message.get("input"))
        return {}

    async def stream_input(self, request: Request) -> dict[str, Any]:
        """Write a client's stream of messages to the input of a program, in their order."""
        writer: _Writer | None = None
        async for message in read_envelopes(request):
            if isinstance(message.get("start"), dict):
                writer = _Writer(self._sandbox, await self._find(message["start"]))
            elif isinstance(message.get("data"), dict):
                if writer is None:
                    raise ConnectError("invalid_argument", "the stream begins without 'start'")
                await writer.write(message["data"].get("input"))
        return {}

    async def close_stdin(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Close the input of a program. A terminal has no end of its input."""
        process = await self._find(message)
        if process["pty"]:
            raise ConnectError("unknown", "the process has a terminal: send Ctrl+D (\\x04) to it")
        await self._sandbox.call("close_stdin", process=process["process"])
        return {}

    async def send_signal(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Send SIGTERM or SIGKILL to a program. After SIGKILL it has ended when this returns."""
        number = _SIGNALS.get(message.get("signal"))
        if number is None:
            raise ConnectError("invalid_argument", "'signal' must be SIGNAL_SIGTERM or SIGNAL_SIGKILL")
        process = await self._find(message)
        await self._sandbox.call("signal", process=process["process"], signal=number)
        return {}

    async def update(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Change the size of a terminal."""
        process, size = await self._find(message), _read_size(message)
        if size is not None:
            await self._sandbox.call("resize", process=process["process"], **size)
        return {}

    async def _rows(self) -> list[dict[str, Any]]:
        rows = (await self._sandbox.call("processes"))["processes"]
        return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []

    async def _find(self, message: Mapping[str, Any], *, must_run: bool = True) -> dict[str, Any]:
        """Return the row of the selected process, a running one if there is one. Raises ConnectError(not_found)."""
        selector = message.get("process")
        if not isinstance(selector, dict):
            raise ConnectError("invalid_argument", "'process' needs 'pid' or 'tag'")
        name = "tag" if "tag" in selector else "pid"
        rows = [row for row in await self._rows() if row.get(name) == selector.get(name)]
        running = [row for row in rows if row.get("end") is None]
        found = running or ([] if must_run else rows)
        if not found:
            raise ConnectError("not_found", f"no process with {name} {str(selector.get(name))[:100]}")
        row: dict[str, Any] = found[-1]
        return row


class _Writer:
    """The input of one client to one process, with positions: no byte is written twice or left out."""

    def __init__(self, sandbox: EnvdSandbox, process: Mapping[str, Any]) -> None:
        self._sandbox = sandbox
        self._process = process
        self._name = secrets.token_hex(8)
        self._offset = 0

    async def write(self, given: object) -> None:
        """Write one `ProcessInput`. Raises ConnectError."""
        kind = "pty" if self._process["pty"] else "stdin"
        if not isinstance(given, dict) or not isinstance(given.get(kind), str):
            raise ConnectError("internal", f"the process takes input of the kind '{kind}' only")
        try:
            data = base64.b64decode(given[kind], validate=True)
        except (binascii.Error, ValueError):
            raise ConnectError("invalid_argument", "the input is not base64") from None
        for start in range(0, len(data), INPUT_BYTES):
            await self._write_piece(data[start : start + INPUT_BYTES])

    async def _write_piece(self, piece: bytes) -> None:
        until = asyncio.get_running_loop().time() + INPUT_S
        while piece:
            answer = await self._sandbox.call(
                "input",
                process=self._process["process"],
                data=base64.b64encode(piece).decode(),
                writer=self._name,
                offset=self._offset,
            )
            taken = int(answer["input_offset"]) - self._offset
            if not 0 <= taken <= len(piece):
                raise ConnectError("internal", "the sandbox counts its input wrongly")
            self._offset += taken
            piece = piece[taken:]
            if not taken:
                if asyncio.get_running_loop().time() > until:
                    raise ConnectError("resource_exhausted", "the process does not read its input: try again later")
                await asyncio.sleep(_INPUT_POLL_S)


async def _send_events(stream: Stream, send: SendMessage, keepalive_s: float, *, is_pty: bool) -> None:
    async with stream:
        await send({"event": {"start": {"pid": stream.opened["pid"]}}})
        async for piece in _with_silence(stream, keepalive_s):
            if piece is None:
                await send({"event": {"keepalive": {}}})
            elif piece.data:
                kind = "pty" if is_pty else "stderr" if piece.is_stderr else "stdout"
                await send({"event": {"data": {kind: base64.b64encode(piece.data).decode()}}})
        end = stream.end or {}
        if end.get("timed_out"):
            raise ConnectError("deadline_exceeded", "the process was killed at its limit")
        await send({"event": {"end": _describe_end(end)}})


async def _with_silence(stream: Stream, silence_s: float) -> AsyncIterator[Any]:
    """Yield the pieces of a stream, and None after each time without one."""
    reading = asyncio.ensure_future(stream.read())
    try:
        while True:
            done, _ = await asyncio.wait({reading}, timeout=silence_s)
            if not done:
                yield None
                continue
            piece = reading.result()
            if piece is None:
                return
            yield piece
            reading = asyncio.ensure_future(stream.read())
    finally:
        reading.cancel()


def _describe(row: Mapping[str, Any]) -> dict[str, Any]:
    argv = row.get("argv") or [""]
    config = {"cmd": argv[0], "args": argv[1:], "envs": row.get("env") or {}, "cwd": row.get("cwd")}
    tag = {"tag": row["tag"]} if row.get("tag") is not None else {}
    return {"pid": row["pid"], "config": config, **tag}


def _describe_end(end: Mapping[str, Any]) -> dict[str, Any]:
    code = end.get("exit_code")
    if code is not None:
        status = f"exit status {code}"
        return {"exitCode": code, "exited": True, "status": status, **({"error": status} if code else {})}
    name = signal.strsignal(int(end.get("signal") or 9)) or "unknown"
    status = f"signal: {name.lower()}"
    return {"exitCode": -1, "exited": False, "status": status, "error": status}


def _read_size(message: Mapping[str, Any]) -> dict[str, int] | None:
    pty = message.get("pty")
    if pty is None:
        return None
    size = pty.get("size") if isinstance(pty, dict) else None
    if not isinstance(size, dict):
        return {"cols": 80, "rows": 24}
    return {"cols": int(size.get("cols") or 80), "rows": int(size.get("rows") or 24)}


def _read_timeout(request: Request) -> float | None:
    text = request.headers.get("connect-timeout-ms")
    if text is None:
        return None
    if not text.isascii() or not text.isdigit() or len(text) > 12:
        raise ConnectError("invalid_argument", "Connect-Timeout-Ms is no number")
    return min(int(text) / 1000, MAX_TIMEOUT_S) or None


def _keepalive_s(request: Request) -> float:
    text = request.headers.get("keepalive-ping-interval", "")
    return max(float(text), LEAST_KEEPALIVE_S) if text.isascii() and text.isdigit() and len(text) < 6 else KEEPALIVE_S
