"""A program of its own, run by Python inside a sandbox: has an MCP server asked over its stdio, and tells what it
answered.

Without arguments it does one job, from standard input, and ends. With the name of an abstract socket and a number of
seconds it keeps the server: each connection (sandbox_visit.py) brings a job, and all ends when none has come for so
long, or when the server has ended and nobody asks for it. Nothing but the standard library, and what Python 3.9 has:
whichever Python an image brings. What it says is read by the worker as all that comes out of a sandbox.

A job: `mark`, `command`, `args`, `env`, `cwd`, `network`, `stands_alone` (None: it is to be asked), `method`, `params`,
`max_pages`, `max_bytes`, `timeout_s`. Its answer: `mark`, a space and an object as JSON, on a line of their own.
"""

from __future__ import annotations

import ctypes
import json
import os
import selectors
import signal
import socket
import sys
import time
from typing import Callable

from workers.mcp.sandbox_peer import END_S, PIECE, Job, Message, Server, Trouble

START_S = 30.0
"""For the first connection to come."""
HEARING_S = 30.0
"""For a job to come, and for an answer to be taken."""
HEAD_BYTES = 64
ENVIRONMENT_BYTES = 1048576
JOB_BYTES = 67108864
MAX_LINES = 32
"""Connections at a time; further ones wait to be let in."""
PR_SET_CHILD_SUBREAPER = 36


class Line:
    """A connection: `+` to whoever has come, then its environment and job, each as long as the first line says, then
    the answer.
    """

    def __init__(self, keeper: Keeper, connection: socket.socket) -> None:
        self.keeper = keeper
        self.connection = connection
        self.until = time.monotonic() + HEARING_S
        self.sizes: tuple[int, int] | None = None
        self.held = bytearray()
        self.job: Job | None = None
        connection.setblocking(False)
        keeper.events.register(connection, selectors.EVENT_READ, self.read)

    def let_in(self) -> None:
        try:
            self.connection.send(b"+")
        except OSError:
            self.keeper.leave(self)

    def read(self) -> None:
        try:
            data = self.connection.recv(PIECE)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data or self.job is not None:
            self.keeper.leave(self)
            return
        self.held += data
        try:
            self.hear()
        except (ValueError, KeyError, TypeError, RecursionError):
            self.keeper.leave(self)

    def hear(self) -> None:
        """Raises what reading a job that is none may raise."""
        if self.sizes is None:
            head, found, _ = self.held[:HEAD_BYTES].partition(b"\n")
            if not found and len(self.held) < HEAD_BYTES:
                return
            environment, job = (int(part) for part in head.split())
            if not (0 <= environment <= ENVIRONMENT_BYTES and 0 < job <= JOB_BYTES):
                raise ValueError
            self.sizes = (environment, job)
            del self.held[: len(head) + 1]
        size = self.sizes[0]
        if len(self.held) >= sum(self.sizes):
            pairs = (os.fsdecode(pair).partition("=") for pair in bytes(self.held[:size]).split(b"\0") if pair)
            told = json.loads(self.held[size:])
            self.held.clear()
            self.job = Job(told, {name: value for name, _, value in pairs})
            self.keeper.take(self.job)

    def tell(self) -> None:
        """Once there is an answer, which is then on its way."""
        if self.job is not None and self.job.answer is not None and not self.held:
            self.held += build_answer(self.job)
            self.until = time.monotonic() + HEARING_S
            self.keeper.events.modify(self.connection, selectors.EVENT_WRITE, self.write)

    def write(self) -> None:
        try:
            del self.held[: self.connection.send(self.held[:PIECE])]
        except BlockingIOError:
            return
        except OSError:
            self.held.clear()
        if not self.held:
            self.keeper.leave(self)


class Keeper:
    """One server, while there is one, and whoever asks it."""

    def __init__(self) -> None:
        self.events = selectors.DefaultSelector()
        self.server: Server | None = None
        self.lines: list[Line] = []

    def take(self, job: Job) -> None:
        if job.told["network"] == "none" and any(job.environment.get(name) for name in ("http_proxy", "https_proxy")):
            job.fail("network")
            return
        try:
            if self.server is None:
                self.server = Server(job, self.events)
                self.server.take(job)
                self.server.begin()
            else:
                self.server.take(job)
        except Trouble as trouble:
            job.fail(trouble.kind, trouble.told)
            self.lose(trouble)

    def lose(self, trouble: Trouble) -> None:
        """The server has done wrong: it is ended, and whoever waits for it is told."""
        server, self.server = self.server, None
        if server is None:
            return
        for job in server.jobs:
            if job.answer is None:
                job.fail(trouble.kind, trouble.told)
        server.end(gently=False)
        sweep()

    def turn(self, until: float) -> None:
        """Wait for what happens next, at most until then, and do what it asks for."""
        due = [
            until,
            *(line.until for line in self.lines if line.job is None or line.held),
            *(self.server.due() if self.server else ()),
        ]
        for key, _ in self.events.select(max(0.0, min(due) - time.monotonic())):
            now = self.events.get_map().get(key.fd)
            # What came before it in this round may have closed it.
            if now is not None and now.data == key.data:
                self.guard(key.data)
        if self.server is not None:
            self.guard(self.server.look)
        for line in list(self.lines):
            line.tell()
            if (line.job is None or line.held) and time.monotonic() >= line.until:
                self.leave(line)

    def guard(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Trouble as trouble:
            self.lose(trouble)

    def leave(self, line: Line) -> None:
        """A connection is over; what was asked on it is not wanted any more."""
        if line not in self.lines:
            return
        self.lines.remove(line)
        self.events.unregister(line.connection)
        line.connection.close()
        job = line.job
        if job is not None and job.answer is None and self.server is not None and job in self.server.jobs:
            self.server.drop(job, "gone")

    def accept(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        line = Line(self, connection)
        self.lines.append(line)
        line.let_in()

    def serve(self, listener: socket.socket, idle_s: float) -> None:
        """Until nobody has come for so long, or the server has ended and nobody is there."""

        def accept() -> None:
            self.accept(listener)

        until, has_served = time.monotonic() + min(idle_s, START_S), False
        while self.lines or (time.monotonic() < until and not (has_served and self.server is None)):
            is_open = listener.fileno() in self.events.get_map()
            if is_open and len(self.lines) >= MAX_LINES:
                self.events.unregister(listener)
            elif not is_open and len(self.lines) < MAX_LINES:
                self.events.register(listener, selectors.EVENT_READ, accept)
            self.turn(until if not self.lines else time.monotonic() + START_S)
            if self.lines:
                until, has_served = time.monotonic() + idle_s, True

    def reap(self, told: int) -> None:
        """Collect who has died of what servers left; of the server itself its process is told."""
        try:
            while os.read(told, PIECE):
                pass
        except BlockingIOError:
            pass
        while True:
            try:
                seen = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                if seen is None:
                    return
                if self.server is not None and seen.si_pid == self.server.process.pid:
                    self.server.process.poll()
                else:
                    os.waitpid(seen.si_pid, os.WNOHANG)
            except ChildProcessError:
                return

    def adopt(self) -> None:
        """Be the parent of whatever the server leaves, so that all of it ends with the server. Without prctl it is the
        guest's.
        """
        try:
            ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        except (OSError, AttributeError):
            return
        told, tells = os.pipe()
        os.set_blocking(told, False)
        os.set_blocking(tells, False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(tells, warn_on_full_buffer=False)
        self.events.register(told, selectors.EVENT_READ, lambda: self.reap(told))

    def close(self) -> None:
        if self.server is not None:
            self.server.end(gently=True)
            sweep()


def sweep() -> None:
    """Kill every child, with those that become one because of it, for a bounded time."""
    until = time.monotonic() + END_S
    while time.monotonic() < until:
        try:
            if os.waitpid(-1, os.WNOHANG)[0]:
                continue
        except ChildProcessError:
            return
        for child in children():
            try:
                os.kill(child, signal.SIGKILL)
            except OSError:
                continue
        time.sleep(0.002)


def children() -> list[int]:
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                # The second field is the program's name, in brackets, and may hold anything.
                fields = file.read().rpartition(b")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == os.getpid():
            found.append(int(name))
    return found


def build_answer(job: Job) -> bytes:
    answer: Message = job.answer or {}
    try:
        text = json.dumps(answer)
    except (ValueError, RecursionError):
        text = json.dumps({"trouble": "died", "told": "its answer cannot be written"})
    return "\n{} {}\n".format(job.told["mark"], text).encode("utf-8", "replace")


def serve_one() -> None:
    job = Job(json.loads(sys.stdin.buffer.read()), {**os.environ, "PWD": os.getcwd()})
    keeper = Keeper()
    keeper.take(job)
    while job.answer is None:
        keeper.turn(job.until)
    keeper.close()
    sys.stdout.buffer.write(build_answer(job))
    sys.stdout.flush()


def keep(name: str, idle_s: float) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        try:
            listener.bind("\0" + name)
        except OSError:
            # Another keeps it already.
            return
        listener.listen(MAX_LINES)
        listener.setblocking(False)
        keeper = Keeper()
        keeper.adopt()
        keeper.serve(listener, idle_s)
    keeper.close()


def main() -> None:
    if len(sys.argv) > 1:
        keep(sys.argv[1], float(sys.argv[2]))
    else:
        serve_one()
