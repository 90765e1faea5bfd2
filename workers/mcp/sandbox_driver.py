"""A program of its own, run by Python inside a sandbox: starts an MCP server, asks it over its stdio, ends it, and prints one line.

Standard input is a job as JSON, see `main`; standard output is the job's `mark`, a space and an answer as JSON. Nothing but the standard library, and what
Python 3.8 has: whichever Python an image brings. What it prints is read by the worker as anything else that comes out of a sandbox.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import time
from typing import Any

REVISION = "2026-07-28"
HANDSHAKE = "2025-11-25"
CLIENT = {"name": "toolcrew", "version": "1"}
PROBE_S = 5.0
END_S = 0.5
PIECE = 65536
STDERR_BYTES = 2000
NO_METHOD = -32601
Message = dict[str, Any]


class Trouble(Exception):
    """`kind` is one of those that the worker knows."""

    def __init__(self, kind: str, told: str = "") -> None:
        super().__init__(kind)
        self.kind = kind
        self.told = told


class Server:
    """The process. Nothing that it does is waited for past `until`, an instant of time.monotonic."""

    def __init__(self, job: Message, until: float) -> None:
        self.until = until
        self.most = int(job["max_bytes"])
        self.seen = 0
        self.errors = b""
        self.held = bytearray()
        self.lines: list[bytes] = []
        self.outbox = bytearray()
        self.is_over = False
        try:
            self.process = subprocess.Popen(
                [job["command"], *job["args"]],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                cwd=job["cwd"],
                env={**os.environ, **job["env"]},
                start_new_session=True,
            )
        except (OSError, ValueError) as error:
            raise Trouble("not_started", str(error)) from error
        self.pipes = selectors.DefaultSelector()
        for pipe in (self.process.stdout, self.process.stderr):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)
            self.pipes.register(pipe, selectors.EVENT_READ)
        assert self.process.stdin is not None
        os.set_blocking(self.process.stdin.fileno(), False)

    def send(self, message: Message) -> None:
        stdin = self.process.stdin
        if not self.outbox and stdin is not None:
            self.pipes.register(stdin, selectors.EVENT_WRITE)
        self.outbox += json.dumps(message).encode() + b"\n"

    def ask(self, number: int, method: str, params: Message, until: float | None = None) -> Message:
        """The message that answers. Raises Trouble."""
        self.send({"jsonrpc": "2.0", "id": number, "method": method, "params": params})
        while True:
            message = parse(self.line(until or self.until))
            if message is None:
                continue
            if "method" in message:
                self.refuse(message)
            elif type(message.get("id")) is int and message["id"] == number:
                return message

    def refuse(self, request: Message) -> None:
        """A server that asks us something is told at once that there is nothing, or it would wait."""
        if request.get("id") is None:
            return
        answer: Message = {"error": {"code": NO_METHOD, "message": "not offered"}}
        if request["method"] == "ping":
            answer = {"result": {}}
        self.send({"jsonrpc": "2.0", "id": request["id"], **answer})

    def line(self, until: float) -> bytes:
        """The next line of its output. Raises Trouble: hangs, died, flood."""
        while not self.lines:
            left = until - time.monotonic()
            if left <= 0:
                raise Trouble("hangs")
            if self.is_over:
                raise Trouble("died", self.last_words())
            for key, _ in self.pipes.select(left):
                self.turn(key.fileobj)
        return self.lines.pop(0)

    def turn(self, pipe: Any) -> None:
        if pipe is self.process.stdin:
            self.write(pipe)
            return
        try:
            data = os.read(pipe.fileno(), PIECE)
        except BlockingIOError:
            return
        if not data:
            self.pipes.unregister(pipe)
            self.is_over = self.is_over or pipe is self.process.stdout
        elif pipe is self.process.stderr:
            self.errors = (self.errors + data)[-STDERR_BYTES:]
        else:
            self.take(data)

    def write(self, pipe: Any) -> None:
        try:
            del self.outbox[: os.write(pipe.fileno(), self.outbox[:PIECE])]
        except BlockingIOError:
            return
        except OSError:
            # It has closed its input; whether it still answers is seen by its output.
            self.outbox.clear()
        if not self.outbox:
            self.pipes.unregister(pipe)

    def take(self, data: bytes) -> None:
        self.seen += len(data)
        if self.seen > self.most:
            raise Trouble("flood")
        if b"\n" not in data:
            self.held += data
            return
        *lines, rest = (bytes(self.held) + data).split(b"\n")
        self.held = bytearray(rest)
        self.lines += lines

    def last_words(self) -> str:
        try:
            code: Any = self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            code = "none"
        return "exit code {}: {}".format(code, self.errors.decode("utf-8", "replace").strip())

    def end(self) -> None:
        """By the end of its input, as the protocol has it, then by force, with all that it started in its own session."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.close()
            self.process.wait(END_S)
        except (OSError, subprocess.TimeoutExpired):
            self.process.poll()
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except OSError:
            return


def parse(line: bytes) -> Message | None:
    """None for what is no message: servers print all kinds of things."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return message if isinstance(message, dict) else None


def stamp(params: Message) -> Message:
    """As REVISION wants it of every request."""
    meta = {"protocolVersion": REVISION, "clientInfo": CLIENT, "clientCapabilities": {}}
    return {**params, "_meta": {"io.modelcontextprotocol/" + key: value for key, value in meta.items()}}


def stands_alone(server: Server) -> bool:
    """Whether it speaks REVISION; one that does not answer what it does not know is greeted as before."""
    try:
        reply = server.ask(1, "server/discover", stamp({}), min(server.until, time.monotonic() + PROBE_S))
    except Trouble as trouble:
        if trouble.kind != "hangs" or time.monotonic() >= server.until:
            raise
        return False
    result = reply.get("result")
    versions = result.get("supportedVersions") if isinstance(result, dict) else None
    return isinstance(versions, list) and REVISION in versions


def greet(server: Server) -> None:
    reply = server.ask(2, "initialize", {"protocolVersion": HANDSHAKE, "capabilities": {}, "clientInfo": CLIENT})
    if not isinstance(reply.get("result"), dict):
        raise Trouble("refused", json.dumps(reply.get("error"))[:500])
    server.send({"jsonrpc": "2.0", "method": "notifications/initialized"})


def work(job: Message, until: float) -> Message:
    """What is answered: `replies`, the messages that answered `method`, a list's pages each; and whether it `stands_alone`."""
    if job["network"] == "none" and any(os.environ.get(name) for name in ("http_proxy", "https_proxy")):
        raise Trouble("network")
    server = Server(job, until)
    try:
        alone = stands_alone(server) if job["stands_alone"] is None else bool(job["stands_alone"])
        if not alone:
            greet(server)
        replies: list[Message] = []
        params = dict(job["params"])
        for number in range(3, 3 + int(job["max_pages"])):
            replies.append(server.ask(number, job["method"], stamp(params) if alone else params))
            result = replies[-1].get("result")
            cursor = result.get("nextCursor") if isinstance(result, dict) else None
            if job["method"] != "tools/list" or not isinstance(cursor, str):
                break
            params = {"cursor": cursor}
        return {"replies": replies, "stands_alone": alone}
    finally:
        server.end()


def main() -> None:
    """Reads the job: `mark`, `command`, `args`, `env`, `cwd`, `network`, `stands_alone` (None: it is to be asked), `method`, `params`, `max_pages`,
    `max_bytes`, `timeout_s`."""
    job = json.loads(sys.stdin.buffer.read())
    try:
        answer = work(job, time.monotonic() + job["timeout_s"])
    except Trouble as trouble:
        answer = {"trouble": trouble.kind, "told": trouble.told}
    sys.stdout.write("\n{} {}\n".format(job["mark"], json.dumps(answer)))


if __name__ == "__main__":
    main()
