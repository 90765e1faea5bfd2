"""Part of a program of its own (sandbox_driver.py): an MCP server's process, and how it is spoken to over its stdio.

Nothing of it waits: what is due, and what its pipes have, is served when the driver says so. Nothing but the standard
library, and what Python 3.9 has.
"""

from __future__ import annotations

import functools
import json
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from typing import Any

REVISION = "2026-07-28"
HANDSHAKE = "2025-11-25"
CLIENT = {"name": "toolcrew", "version": "1"}
FIRST_NUMBER = 3
"""Of the replies of an answer, whatever numbers the requests had."""
PROBE_S = 5.0
END_S = 0.5
PIECE = 65536
OUTBOX_BYTES = 67108864
STDERR_BYTES = 2000
NO_METHOD = -32601
Message = dict[str, Any]


class Trouble(Exception):
    """`kind` is one of those that the worker knows."""

    def __init__(self, kind: str, told: str = "") -> None:
        super().__init__(kind)
        self.kind = kind
        self.told = told


class Job:
    """`environment`: of who brought it; its PWD is where the server starts. `answer` is set once. `trouble`: why the
    server was asked to end it, which it has until `until` for.
    """

    def __init__(self, told: Message, environment: Message) -> None:
        self.told = told
        self.environment = environment
        self.until = time.monotonic() + told["timeout_s"]
        self.params = dict(told["params"])
        self.replies: list[Message] = []
        self.number = 0
        self.trouble = ""
        self.answer: Message | None = None

    def fail(self, kind: str, told: str = "") -> None:
        self.answer = {"trouble": kind, "told": told}


class Server:
    """The process, and the jobs that it has yet to answer. Whatever it does wrong is raised as Trouble, and is then its
    end.
    """

    def __init__(self, job: Job, events: selectors.BaseSelector) -> None:
        told = job.told
        self.events = events
        self.most = int(told["max_bytes"])
        self.alone: bool | None = told["stands_alone"]
        self.is_ready = False
        self.jobs: list[Job] = []
        self.asked: dict[int, Callable[[Message], None]] = {}
        self.count = 0
        self.probe_until = 0.0
        self.seen = 0
        self.errors = b""
        self.held = bytearray()
        self.outbox = bytearray()
        folder = os.path.join(job.environment["PWD"], told["cwd"] or ".")
        try:
            self.process = subprocess.Popen(
                [told["command"], *told["args"]],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                cwd=folder,
                env={**job.environment, "PWD": os.path.normpath(folder), **told["env"]},
                start_new_session=True,
            )
        except (OSError, ValueError) as error:
            raise Trouble("not_started", str(error)) from error
        self.stdin, self.stdout, self.stderr = (
            pipe.fileno() for pipe in (self.process.stdin, self.process.stdout, self.process.stderr) if pipe is not None
        )
        for fd in (self.stdin, self.stdout, self.stderr):
            os.set_blocking(fd, False)
        events.register(self.stdout, selectors.EVENT_READ, self.read)
        events.register(self.stderr, selectors.EVENT_READ, self.read_error)

    # Speaking

    def begin(self) -> None:
        """As far as it is not known how it is spoken to."""
        if self.alone is None:
            # One that does not answer what it does not know is greeted as before.
            self.probe_until = time.monotonic() + PROBE_S
            self.ask("server/discover", stamp({}), self.discovered)
        elif self.alone:
            self.ready()
        else:
            self.greet()

    def discovered(self, reply: Message) -> None:
        if not self.probe_until:
            return
        self.probe_until = 0.0
        result = reply.get("result")
        versions = result.get("supportedVersions") if isinstance(result, dict) else None
        self.alone = isinstance(versions, list) and REVISION in versions
        self.begin()

    def greet(self) -> None:
        self.probe_until, self.alone = 0.0, False
        self.ask("initialize", {"protocolVersion": HANDSHAKE, "capabilities": {}, "clientInfo": CLIENT}, self.greeted)

    def greeted(self, reply: Message) -> None:
        if not isinstance(reply.get("result"), dict):
            raise Trouble("refused", json.dumps(reply.get("error"))[:500])
        self.send({"jsonrpc": "2.0", "method": "notifications/initialized"})
        self.ready()

    def ready(self) -> None:
        self.is_ready = True
        for job in self.jobs:
            self.put(job)

    def take(self, job: Job) -> None:
        if not self.jobs:
            self.seen = 0
        self.jobs.append(job)
        if self.is_ready:
            self.put(job)

    def put(self, job: Job) -> None:
        params = stamp(job.params) if self.alone else job.params
        job.number = self.ask(job.told["method"], params, functools.partial(self.answered, job))

    def answered(self, job: Job, reply: Message) -> None:
        self.seen = 0
        result = reply.get("result")
        if job.trouble and not isinstance(result, dict):
            # It was asked to end this one, and has.
            job.fail(job.trouble)
            self.jobs.remove(job)
            return
        job.replies.append({**reply, "id": FIRST_NUMBER + len(job.replies)})
        cursor = result.get("nextCursor") if isinstance(result, dict) else None
        if job.told["method"] == "tools/list" and isinstance(cursor, str) and len(job.replies) < job.told["max_pages"]:
            job.params = {"cursor": cursor}
            self.put(job)
            return
        job.answer = {"replies": job.replies, "stands_alone": self.alone}
        self.jobs.remove(job)

    def drop(self, job: Job, why: str) -> None:
        """Nobody wants its answer any more: the server may end it by itself, and live on."""
        if not job.number:
            self.jobs.remove(job)
            return
        job.trouble, job.until = why, time.monotonic() + END_S
        self.send(
            {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": job.number, "reason": why}}
        )

    def look(self) -> None:
        """What is due."""
        now = time.monotonic()
        if self.probe_until and now >= self.probe_until:
            self.greet()
        for job in [job for job in self.jobs if now >= job.until]:
            if job.trouble or not job.number:
                job.fail(job.trouble or "hangs")
                raise Trouble("died", "another call of it did not end, so it was ended")
            self.drop(job, "hangs")

    def due(self) -> Iterator[float]:
        yield from (job.until for job in self.jobs)
        if self.probe_until:
            yield self.probe_until

    # Its pipes

    def ask(self, method: str, params: Message, then: Callable[[Message], None]) -> int:
        self.count += 1
        self.asked[self.count] = then
        self.send({"jsonrpc": "2.0", "id": self.count, "method": method, "params": params})
        return self.count

    def send(self, message: Message) -> None:
        if not self.outbox:
            self.events.register(self.stdin, selectors.EVENT_WRITE, self.write)
        self.outbox += json.dumps(message).encode() + b"\n"

    def write(self) -> None:
        try:
            del self.outbox[: os.write(self.stdin, self.outbox[:PIECE])]
        except BlockingIOError:
            return
        except OSError:
            # It has closed its input; whether it still answers is seen by its output.
            self.outbox.clear()
        if not self.outbox:
            self.events.unregister(self.stdin)

    def read(self) -> None:
        data = read_some(self.stdout)
        if data is None:
            return
        if not data:
            raise Trouble("died", self.last_words())
        self.seen += len(data)
        if self.seen > self.most:
            raise Trouble("flood")
        if b"\n" not in data:
            self.held += data
            return
        *lines, rest = (bytes(self.held) + data).split(b"\n")
        self.held = bytearray(rest)
        for line in lines:
            self.hear(parse(line))

    def hear(self, message: Message | None) -> None:
        if message is None:
            return
        if "method" in message:
            self.refuse(message)
        elif type(message.get("id")) is int and message["id"] in self.asked:
            self.asked.pop(message["id"])(message)

    def refuse(self, request: Message) -> None:
        """A server that asks us something is told at once that there is nothing, or it would wait."""
        if request.get("id") is None:
            return
        if len(self.outbox) > OUTBOX_BYTES:
            raise Trouble("flood")
        answer: Message = {"error": {"code": NO_METHOD, "message": "not offered"}}
        if request["method"] == "ping":
            answer = {"result": {}}
        self.send({"jsonrpc": "2.0", "id": request["id"], **answer})

    def read_error(self) -> None:
        data = read_some(self.stderr)
        if data:
            self.errors = (self.errors + data)[-STDERR_BYTES:]
        elif data is not None:
            self.events.unregister(self.stderr)

    def last_words(self) -> str:
        try:
            code: Any = self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            code = "none"
        while data := read_some(self.stderr):
            self.errors = (self.errors + data)[-STDERR_BYTES:]
        return "exit code {}: {}".format(code, self.errors.decode("utf-8", "replace").strip())

    def end(self, *, gently: bool) -> None:
        """`gently`: by the end of its input first, as the protocol has it. Then by force, with all that it started in
        its own session.
        """
        for fd in (self.stdin, self.stdout, self.stderr):
            if fd in self.events.get_map():
                self.events.unregister(fd)
        if gently:
            close(self.process.stdin)
            self.wait()
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except OSError:
            # Nobody of it is left.
            self.process.poll()
        self.wait()
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            close(pipe)

    def wait(self) -> None:
        try:
            self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            return


def close(pipe: Any) -> None:
    try:
        pipe.close()
    except OSError:
        return


def read_some(fd: int) -> bytes | None:
    """What has come; nothing at the end, None when there is no more now."""
    try:
        return os.read(fd, PIECE)
    except BlockingIOError:
        return None


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
