"""A standalone program that Python runs inside a sandbox. It passes requests to an MCP server over stdio and returns
the replies.

Without arguments the program reads one job from standard input, runs it, and ends. With the name of an abstract socket
and a number of seconds as arguments, the program is a daemon that keeps the server running. Each connection (from
sandbox_visit.py) then sends one job. The program ends after that many seconds without a connection, or when the server
has ended and no connection is open.

The program uses only the standard library of Python 3.9, because it runs on any Python of an image. The worker treats
its output as untrusted, like all output of a sandbox.

A job: `mark`, `command`, `args`, `env`, `cwd`, `network`, `hello` (the request and the notification that open a session
with a new server, or nothing), `message` (the request), `max_bytes`, `timeout_s`. The answer is one line: `mark`, a
space and a JSON object. The object has `reply`, or `failure` and its `detail`.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
from typing import Any

START_S = 30.0
"""Time limit for the first connection, in seconds."""
TRANSFER_S = 30.0
"""Time limit to receive a job, and to deliver an answer, in seconds."""
END_S = 0.5
HEAD_BYTES = 64
ENVIRONMENT_BYTES = 1048576
JOB_BYTES = 67108864
OUTBOX_BYTES = 67108864
STDERR_BYTES = 2000
PIECE = 65536
MAX_CONNECTIONS = 32
"""Maximum number of connections at a time. Further connections wait."""
PR_SET_CHILD_SUBREAPER = 36
NO_METHOD = -32601
Message = dict[str, Any]
_BROKEN = (
    ValueError,
    KeyError,
    TypeError,
    RecursionError,
    OSError,
    EOFError,
    asyncio.TimeoutError,
    asyncio.LimitOverrunError,
)


class ServerFailure(Exception):
    """A failure of the server. `kind`: one of the kinds of failure in workers/mcp/sandbox_server.py."""

    def __init__(self, kind: str, detail: str = "") -> None:
        super().__init__(kind)
        self.kind = kind
        self.detail = detail


class ServerProcess:
    """The server process and its pending requests. `failure`: the reason why the server was ended; None while it runs.
    `changed` is set when the server ends.
    """

    def __init__(self, job: Message, environment: Message, changed: asyncio.Event) -> None:
        self.changed = changed
        self.max_bytes = int(job["max_bytes"])
        self.waiting: dict[int, asyncio.Future[Message]] = {}
        self.count = 0
        self.received_bytes = 0
        self.stderr_tail = b""
        self.failure: ServerFailure | None = None
        folder = os.path.join(environment["PWD"], job["cwd"] or ".")
        try:
            self.process = subprocess.Popen(
                [job["command"], *job["args"]],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                cwd=folder,
                env={**environment, "PWD": os.path.normpath(folder), **job["env"]},
                start_new_session=True,
            )
        except (OSError, ValueError) as error:
            raise ServerFailure("not_started", str(error)) from error
        self.ready = asyncio.ensure_future(self.greet(job["hello"]))

    async def greet(self, hello: list[Message]) -> None:
        """Connect the pipes and send the greeting. This method does not raise; a failure is stored in `failure`."""
        loop = asyncio.get_running_loop()
        self.stdin, _ = await loop.connect_write_pipe(asyncio.Protocol, self.process.stdin)
        stdout = await open_reader(self.process.stdout)
        self.reading_errors = asyncio.ensure_future(self.read_errors(await open_reader(self.process.stderr)))
        self.reading = asyncio.ensure_future(self.read(stdout))
        if hello:
            with contextlib.suppress(ServerFailure):
                reply = await self.ask(hello[0])[1]
                if not isinstance(reply.get("result"), dict):
                    self.end_with(ServerFailure("refused", json.dumps(reply.get("error"))[:500]))
                self.send(hello[1])

    async def answer(self, job: Message, disconnected: asyncio.Future[Any]) -> Message:
        """Return the reply to a job. `disconnected`: done when the caller has disconnected. Raises ServerFailure."""
        until = time.monotonic() + job["timeout_s"]
        await asyncio.wait({self.ready, disconnected}, timeout=job["timeout_s"], return_when=asyncio.FIRST_COMPLETED)
        # A server that does not finish its greeting would block every later call, so end the server. But do not end it
        # only because the caller disconnected early.
        if not self.ready.done() and not disconnected.done():
            self.give_up()
        if not self.ready.done():
            raise ServerFailure("gone" if disconnected.done() else "hangs")
        if self.failure is not None:
            raise self.failure
        number, reply = self.ask(job["message"])
        limit_s = max(0.0, until - time.monotonic())
        await asyncio.wait({reply, disconnected}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        reason = ""
        if not reply.done():
            # The server gets the chance to cancel the request, so that it can continue to serve other calls.
            reason = "gone" if disconnected.done() else "hangs"
            cancelled = {"requestId": number, "reason": reason}
            self.send({"jsonrpc": "2.0", "method": "notifications/cancelled", "params": cancelled})
            await asyncio.wait({reply}, timeout=END_S)
        if not reply.done():
            del self.waiting[number]
            self.give_up()
            raise ServerFailure(reason)
        message = {**reply.result(), "id": job["message"]["id"]}
        # A result that arrives during the cancellation is delivered. An error at this point is only the server's
        # reaction to the cancellation.
        if reason and not isinstance(message.get("result"), dict):
            raise ServerFailure(reason)
        return message

    def give_up(self) -> None:
        self.end_with(ServerFailure("died", "another call did not end, so the server was ended"))

    def ask(self, request: Message) -> tuple[int, asyncio.Future[Message]]:
        if not self.waiting:
            self.received_bytes = 0
        self.count += 1
        reply = self.waiting[self.count] = asyncio.get_running_loop().create_future()
        self.send({**request, "id": self.count})
        return self.count, reply

    def send(self, message: Message) -> None:
        self.stdin.write(json.dumps(message).encode() + b"\n")

    async def read(self, stdout: asyncio.StreamReader) -> None:
        unread = bytearray()
        while self.failure is None:
            data = await stdout.read(PIECE)
            self.received_bytes += len(data)
            if not data:
                detail = await self.describe_exit()
                self.end_with(ServerFailure("died", detail))
            elif self.received_bytes > self.max_bytes:
                self.end_with(ServerFailure("flood"))
            elif b"\n" not in data:
                unread += data
            else:
                *lines, rest = (bytes(unread) + data).split(b"\n")
                unread = bytearray(rest)
                for line in lines:
                    self.take(line)

    def take(self, line: bytes) -> None:
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            # Many servers print other text on standard output.
            return
        if not isinstance(message, dict):
            return
        number = message.get("id")
        if "method" in message:
            if number is not None:
                self.refuse(number, message["method"])
        elif type(number) is int and number in self.waiting:
            self.received_bytes = 0
            self.waiting.pop(number).set_result(message)

    def refuse(self, number: Any, method: Any) -> None:
        """Reply to a request of the server at once. Without a reply the server would wait."""
        answer: Message = {"error": {"code": NO_METHOD, "message": "not offered"}}
        if method == "ping":
            answer = {"result": {}}
        self.send({"jsonrpc": "2.0", "id": number, **answer})
        if self.stdin.get_write_buffer_size() > OUTBOX_BYTES:
            self.end_with(ServerFailure("flood"))

    async def read_errors(self, stderr: asyncio.StreamReader) -> None:
        while True:
            data = await stderr.read(PIECE)
            if not data:
                return
            self.stderr_tail = (self.stderr_tail + data)[-STDERR_BYTES:]

    async def describe_exit(self) -> str:
        await asyncio.wait({self.reading_errors}, timeout=END_S)
        self.wait()
        code = self.process.returncode
        return "exit code {}: {}".format(
            "none" if code is None else code, self.stderr_tail.decode("utf-8", "replace").strip()
        )

    def end_with(self, failure: ServerFailure) -> None:
        """End the server. Every pending request fails."""
        if self.failure is not None:
            return
        self.failure = failure
        # The daemon looks at `failure` when a signal reports the end of the process, which may be before this step.
        self.changed.set()
        for reply in self.waiting.values():
            if not reply.done():
                reply.set_exception(failure)
        self.kill()

    async def end(self) -> None:
        """End the server: first by closing its input, as the protocol requires, then by force."""
        if self.failure is None:
            self.failure = ServerFailure("died")
            self.stdin.abort()
            # The event loop closes the pipe in its next iteration.
            await asyncio.sleep(0)
            self.wait()
            self.kill()

    def kill(self) -> None:
        """Kill the server and all processes that it started."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except OSError:
            # The process group no longer exists.
            self.process.poll()
        self.wait()
        sweep()

    def wait(self) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(END_S)


class DriverDaemon:
    """Keeps at most one server running, and serves the connections that use it."""

    def __init__(self) -> None:
        self.server: ServerProcess | None = None
        self.present = 0
        self.was_used = False
        self.changed = asyncio.Event()
        self.connections = asyncio.Semaphore(MAX_CONNECTIONS)

    async def run_job(self, job: Message, environment: Message, disconnected: asyncio.Future[Any]) -> Message:
        """Run a job and return its answer."""
        if job["network"] == "none" and any(environment.get(name) for name in ("http_proxy", "https_proxy")):
            return {"failure": "network"}
        try:
            if self.server is None or self.server.failure is not None:
                self.server = None
                self.server = ServerProcess(job, environment, self.changed)
            return {"reply": await self.server.answer(job, disconnected)}
        except ServerFailure as failure:
            return {"failure": failure.kind, "detail": failure.detail}

    async def serve_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve a connection: send `+`, read the environment and the job, and send the answer. The first line of the
        client contains both sizes.
        """
        self.present += 1
        # With a write limit of 0, `drain` waits until the client has read the complete answer.
        writer.transport.set_write_buffer_limits(0)
        try:
            async with self.connections:
                writer.write(b"+")
                job, environment = await asyncio.wait_for(read_job(reader), TRANSFER_S)
                disconnected = asyncio.ensure_future(reader.read(1))
                writer.write(build_answer(job, await self.run_job(job, environment, disconnected)))
                disconnected.cancel()
                await asyncio.wait_for(writer.drain(), TRANSFER_S)
        except _BROKEN:
            # The client sent no job, or does not read the answer.
            pass
        finally:
            writer.transport.abort()
            self.present -= 1
            self.was_used = True
            self.changed.set()

    async def keep(self, listener: socket.socket, idle_s: float) -> None:
        """Serve until no connection has arrived for `idle_s`, or until the server has ended and no connection is
        open.
        """
        # Adopt before the first server starts: orphans of the server must already belong to this process.
        adopt(self)
        until = time.monotonic() + min(idle_s, START_S)
        async with await asyncio.start_unix_server(self.serve_connection, sock=listener, limit=PIECE):
            while self.present or (time.monotonic() < until and not (self.was_used and self.is_ended())):
                self.changed.clear()
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self.changed.wait(), max(0.01, until - time.monotonic()))
                if self.present or self.changed.is_set():
                    until = time.monotonic() + idle_s
        await self.close()

    def is_ended(self) -> bool:
        return self.server is None or self.server.failure is not None

    def reap(self) -> None:
        """Collect dead processes that servers left behind. Popen collects the server itself."""
        while True:
            try:
                # WNOWAIT leaves the process in place: Popen must collect the server itself, or its exit code is lost.
                process = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                if process is None:
                    return
                if self.server is not None and process.si_pid == self.server.process.pid:
                    self.server.process.poll()
                    self.changed.set()
                else:
                    os.waitpid(process.si_pid, os.WNOHANG)
            except ChildProcessError:
                return

    async def close(self) -> None:
        if self.server is not None:
            await self.server.end()


def adopt(daemon: DriverDaemon) -> None:
    """Become the parent of all orphans of the server, so that they end with the server. Where prctl fails, orphans
    belong to PID 1 of the sandbox.
    """
    try:
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    except (OSError, AttributeError):
        return
    asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, daemon.reap)


async def open_reader(pipe: Any) -> asyncio.StreamReader:
    reader = asyncio.StreamReader(PIECE)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
    return reader


async def read_job(reader: asyncio.StreamReader) -> tuple[Message, Message]:
    """Read a job and the environment variables of its sender. Raises one of the exceptions in _BROKEN."""
    head = await reader.readuntil(b"\n")
    size, job_size = (int(part) for part in head[:HEAD_BYTES].split())
    if not (0 <= size <= ENVIRONMENT_BYTES and 0 < job_size <= JOB_BYTES):
        raise ValueError
    pairs = (os.fsdecode(pair).partition("=") for pair in (await reader.readexactly(size)).split(b"\0") if pair)
    environment = {name: value for name, _, value in pairs}
    return json.loads(await reader.readexactly(job_size)), environment


def build_answer(job: Message, answer: Message) -> bytes:
    try:
        text = json.dumps(answer)
    except (ValueError, RecursionError):
        text = json.dumps({"failure": "died", "detail": "its response cannot be encoded"})
    return "\n{} {}\n".format(job["mark"], text).encode("utf-8", "replace")


def sweep() -> None:
    """Kill every child, including orphans that become children during the sweep, for a bounded time."""
    until = time.monotonic() + END_S
    while time.monotonic() < until:
        try:
            if os.waitpid(-1, os.WNOHANG)[0]:
                continue
        except ChildProcessError:
            return
        for child in children():
            with contextlib.suppress(OSError):
                os.kill(child, signal.SIGKILL)
        time.sleep(0.002)


def children() -> list[int]:
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                # The second field is the program's name in parentheses, and may contain any character.
                fields = file.read().rpartition(b")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == os.getpid():
            found.append(int(name))
    return found


async def serve_one() -> None:
    job = json.loads(sys.stdin.buffer.read())
    daemon = DriverDaemon()
    answer = await daemon.run_job(job, {**os.environ, "PWD": os.getcwd()}, asyncio.get_running_loop().create_future())
    await daemon.close()
    sys.stdout.buffer.write(build_answer(job, answer))
    sys.stdout.flush()


async def keep(name: str, idle_s: float) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        try:
            listener.bind("\0" + name)
        except OSError:
            # Another daemon already listens on this name.
            return
        await DriverDaemon().keep(listener, idle_s)


def main() -> None:
    asyncio.run(keep(sys.argv[1], float(sys.argv[2])) if len(sys.argv) > 1 else serve_one())
