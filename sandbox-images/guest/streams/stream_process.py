"""A process of a stream, from its start to 300 s after its end: its output, its input, its signals, and its end."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time

from guest.failures import INVALID_ARGUMENTS, OFFSET_OUT_OF_RANGE, TIMEOUT, RequestFailure
from guest.processes import (
    KILL_WINDOW_S,
    QUIET_SCANS,
    TERM_GRACE_S,
    KillReport,
    Process,
    find_below,
    kill_processes,
    offer_to_oom_killer,
    read_oom_kills,
    read_processes,
)
from guest.streams.frames import STDERR
from guest.streams.handlers import StreamHandler
from guest.streams.process_input import ProcessInput
from guest.streams.programs import Program, open_terminal, set_terminal_size
from guest.streams.rings import OutputRing

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from guest.streams.handlers import CallReply, Poller, StreamContext
    from guest.users import User

_READ_BYTES = 32_768
PACE_BYTES = 131_072
"""A process waits while a reader with `pace` has so many bytes of its output before it."""
_LAST_OUTPUT_S = 0.3
# More than a pipe holds. A process that survived the exit may write without end.
_LAST_READS = 40
_REAP_S = 5.0
_KILL_PACE_S = 0.005


class ProcessStart:
    """What a client asks for: a program, and how it runs. `size`: columns and rows of its terminal, or None."""

    __slots__ = ("argv", "cwd", "has_input", "key", "size", "tag", "timeout_s", "user", "user_name")

    def __init__(
        self, argv: list[str], cwd: str, size: tuple[int, int] | None, has_input: bool, timeout_s: float | None
    ) -> None:
        self.argv = argv
        self.cwd = cwd
        self.size = size
        self.has_input = has_input
        self.timeout_s = timeout_s
        self.tag: str | None = None
        self.key: str | None = None
        self.user_name: str | None = None
        self.user: User | None = None


class StreamProcess:
    """A process of a stream. `status`: its wait status, or None. `is_finished`: all of its output is in the ring."""

    def __init__(self, number: int, start: ProcessStart, on_input: Callable[[], None]) -> None:
        """Create the record of a process. `on_input` is called after each input, to let clients send more."""
        self.number = number
        self.on_input = on_input
        self.start = start
        self.size = start.size
        self.started_at = time.time()
        self.ring = OutputRing()
        self.pid = 0
        self.status: int | None = None
        self.is_finished = False
        self.ended_at = 0.0
        self.readers: list[ProcessReader] = []
        self._outputs: dict[int, bool] = {}
        self._terminal = -1
        self._timed_out = False
        self._is_oom = False
        self._oom_kills = read_oom_kills()
        self._waits: list[tuple[CallReply, float]] = []
        self._kills: list[tuple[CallReply, float]] = []
        self._limit_at: float | None = None
        self._kill_tree_at: float | None = None
        self._kill_tree_until = 0.0
        self._quiet_scans = 0

    def run(self, program: Program, further: list[int]) -> None:
        """Start the program. Raises RequestFailure and OSError."""
        with contextlib.ExitStack() as on_failure, contextlib.ExitStack() as of_program:
            for fd in further:
                of_program.callback(os.close, fd)
            stdio = self._open_terminal(on_failure) if self.size is not None else self._open_pipes(on_failure)
            for fd in set(stdio):
                of_program.callback(os.close, fd)
            self.pid = program.start(stdio, further, self.size is not None)
            on_failure.pop_all()
        offer_to_oom_killer(self.pid)
        if self.start.timeout_s is not None:
            self._limit_at = time.monotonic() + self.start.timeout_s

    def _open_terminal(self, on_failure: contextlib.ExitStack) -> tuple[int, int, int]:
        cols, rows = self.size or (0, 0)
        master, slave = open_terminal(cols, rows, self.start.user)
        on_failure.callback(os.close, master)
        self._terminal = master
        self._outputs = {master: False}
        self.input = ProcessInput(master, is_terminal=True)
        return slave, slave, slave

    def _open_pipes(self, on_failure: contextlib.ExitStack) -> tuple[int, int, int]:
        own, programs = [], []
        for is_input in (True, False, False):
            if is_input and not self.start.has_input:
                programs.append(os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC))
                own.append(-1)
                continue
            read, write = os.pipe()
            own.append(write if is_input else read)
            programs.append(read if is_input else write)
            on_failure.callback(os.close, own[-1])
            os.set_blocking(own[-1], False)
        self.input = ProcessInput(own[0], is_terminal=False)
        self._outputs = {own[1]: False, own[2]: True}
        return programs[0], programs[1], programs[2]

    @property
    def is_unused(self) -> bool:
        """Return whether the process has ended and no stream reads it."""
        return self.is_finished and not self.readers

    @property
    def is_running(self) -> bool:
        """Return whether the process has not ended."""
        return self.status is None

    def find_wake_at(self) -> float | None:
        """Return the time of the next duty, or None."""
        times = [at for _, at in (*self._waits, *self._kills)]
        times += [at for at in (self._limit_at, self._kill_tree_at) if at is not None]
        if self.status is not None and not self.is_finished:
            times.append(self.ended_at + _LAST_OUTPUT_S)
        return min(times) if times else None

    def register(self, poller: Poller) -> list[int]:
        """Register the descriptors of the process. Return them."""
        events = dict.fromkeys(self._outputs, 0 if self._must_wait() else select.POLLIN)
        if self.input.pending:
            events[self.input.fd] = events.get(self.input.fd, 0) | select.POLLOUT
        registered = [fd for fd, wanted in events.items() if wanted]
        for fd in registered:
            poller.register(fd, events[fd])
        return registered

    def serve(self, fd: int, events: int) -> None:
        """Read output and write input."""
        if fd == self.input.fd and events & (select.POLLOUT | select.POLLERR) and self.input.pending:
            self.input.flush()
        if fd in self._outputs and events & (select.POLLIN | select.POLLHUP | select.POLLERR):
            self._read(fd)
            for reader in list(self.readers):
                reader.resume()

    def wake(self, now: float) -> None:
        """Do what is due."""
        for reply, _ in [entry for entry in self._waits if entry[1] <= now]:
            reply.send({"running": True})
        for reply, _ in [entry for entry in self._kills if entry[1] <= now]:
            reply.fail(RequestFailure(TIMEOUT, "the process was killed and has not ended yet: try again later"))
        self._waits = [entry for entry in self._waits if entry[1] > now]
        self._kills = [entry for entry in self._kills if entry[1] > now]
        if self._limit_at is not None and self._limit_at <= now:
            self._limit_at = None
            self._end_at_limit(now)
        if self._kill_tree_at is not None and self._kill_tree_at <= now:
            self._kill_tree(now)

    def note_exit(self, status: int) -> None:
        """Record the exit of the process. What is still in its pipes is its last output."""
        self.status = status
        self.ended_at = time.monotonic()
        self._limit_at = None
        self._is_oom = read_oom_kills() != self._oom_kills
        self.input.close()
        for reply, _ in self._kills:
            reply.send({})
        self._kills = []
        for fd in list(self._outputs):
            for _ in range(_LAST_READS):
                if not self._read(fd):
                    break
        for reader in list(self.readers):
            reader.resume()

    def is_over(self, now: float) -> bool:
        """Return whether to finish: the process has ended, and no more of its output is to be expected."""
        if self.status is None or self.is_finished:
            return False
        return not self._outputs or self.ended_at + _LAST_OUTPUT_S <= now

    def finish(self) -> list[int]:
        """Record that no more output counts. Return the pipes that surviving processes still hold."""
        self.is_finished = True
        pipes = [fd for fd in self._outputs if fd != self._terminal]
        if self._terminal in self._outputs:
            os.close(self._terminal)  # the programs of the terminal get SIGHUP
        self._outputs = {}
        for reply, _ in self._waits:
            reply.send(self.build_end())
        self._waits = []
        for reader in list(self.readers):
            reader.resume()
        return pipes

    def build_end(self, lost_bytes: int = 0) -> dict[str, object]:
        """Return the end of the process."""
        code = os.waitstatus_to_exitcode(self.status or 0)
        return {
            "exit_code": code if code >= 0 else None,
            "signal": -code if code < 0 else None,
            "oom": self._is_oom,
            "timed_out": self._timed_out,
            "lost_bytes": lost_bytes,
        }

    def wait(self, reply: CallReply, timeout_s: float) -> None:
        """Answer with the end of the process, or after the time limit."""
        if self.is_finished:
            reply.send(self.build_end())
        else:
            self._waits = [entry for entry in self._waits if not entry[0].is_closed]
            self._waits.append((reply, time.monotonic() + timeout_s))

    def resize(self, cols: int, rows: int) -> None:
        """Set the size of the terminal. Raises RequestFailure and OSError."""
        if self.size is None:
            raise RequestFailure(INVALID_ARGUMENTS, "the process has no terminal: start it with 'pty'")
        self._check_running()
        set_terminal_size(self._terminal, cols, rows)
        self.size = (cols, rows)

    def send_signal(self, number: int, is_tree: bool, reply: CallReply) -> None:
        """Send a signal to the process, or to its tree too. After SIGKILL, answer when the process was reaped.

        Raises RequestFailure when the process has ended.
        """
        self._check_running()
        if is_tree:
            targets = self._find_tree()
            if number == signal.SIGKILL:
                self._begin_tree_kill(time.monotonic())
        else:
            targets = []
        for pid in {self.pid, *(process.pid for process in targets)}:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)
        if number == signal.SIGKILL:
            self._kills = [entry for entry in self._kills if not entry[0].is_closed]
            self._kills.append((reply, time.monotonic() + _REAP_S))
        else:
            reply.send({})

    def kill(self) -> None:
        """Kill the process and its tree, at the end of the server."""
        with contextlib.suppress(OSError):
            kill_processes(self._find_tree(), KillReport())

    def _check_running(self) -> None:
        if not self.is_running:
            raise RequestFailure(INVALID_ARGUMENTS, f"process {self.number} has ended")

    def _must_wait(self) -> bool:
        """Return whether a reader with `pace` is behind. Output after the end of the process is always read."""
        if self.status is not None:
            return False
        positions = [reader.position for reader in self.readers if reader.has_pace]
        return bool(positions) and self.ring.end - min(positions) >= PACE_BYTES

    def _read(self, fd: int) -> bool:
        """Read one piece of output into the ring. Return False when there is none now."""
        try:
            data = os.read(fd, _READ_BYTES)
        except BlockingIOError:
            return False
        except OSError:
            data = b""  # EIO: no process has the terminal open
        if data:
            self.ring.add(data, self._outputs[fd])
            return True
        is_stderr = self._outputs.pop(fd)
        os.close(fd)
        if fd == self._terminal and not is_stderr:
            self._terminal = -1
            self.input.close()
        return False

    def _find_tree(self) -> list[Process]:
        """Return the process, its descendants, and the rest of its session. Raises OSError."""
        table = read_processes()
        members = [process for process in table.values() if self.pid in (process.pid, process.session)]
        below = find_below([process.pid for process in members], table)
        return list({process.pid: process for process in (*members, *below)}.values())

    def _end_at_limit(self, now: float) -> None:
        self._timed_out = True
        # A stopped program handles SIGTERM only after SIGCONT.
        for number in (signal.SIGTERM, signal.SIGCONT):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, number)
        self._begin_tree_kill(now + TERM_GRACE_S)

    def _begin_tree_kill(self, at: float) -> None:
        self._kill_tree_at = at
        self._kill_tree_until = at + KILL_WINDOW_S
        self._quiet_scans = 0

    def _kill_tree(self, now: float) -> None:
        """Kill what is left of the tree. Repeat this until several scans find nothing: a scan is not atomic."""
        try:
            alive = kill_processes(self._find_tree(), KillReport())
        except OSError:
            alive = 1
        self._quiet_scans = 0 if alive else self._quiet_scans + 1
        is_over = self._quiet_scans >= QUIET_SCANS or now >= self._kill_tree_until
        self._kill_tree_at = None if is_over else now + _KILL_PACE_S


class ProcessReader(StreamHandler):
    """A stream that gets the output of a process from a position on, and may send its input."""

    def __init__(
        self, process: StreamProcess, context: StreamContext, position: int, has_pace: bool, writer: str | None
    ) -> None:
        """Join the process. Raises RequestFailure when there is no such position or no place for the writer."""
        if position > process.ring.end:
            raise RequestFailure(
                OFFSET_OUT_OF_RANGE, f"the output ends at {process.ring.end}, before the position {position}"
            )
        self.has_pace = has_pace
        self.lost_bytes = max(0, process.ring.start - position)
        self.position = max(position, process.ring.start)
        self._process = process
        self._context = context
        self._stream = process.input.open_stream(context, process.input.find_writer(writer))
        process.readers.append(self)
        context.opened(
            {
                "process": process.number,
                "pid": process.pid,
                "pty": process.size is not None,
                "from": self.position,
                "lost_bytes": self.lost_bytes,
                "input_offset": self._stream.begin,
            }
        )
        process.on_input()

    def take(self, data: bytes, is_last: bool) -> None:
        """Pass input on to the process."""
        self._process.input.take(self._stream.take(data), is_last)
        self._process.on_input()

    def resume(self) -> None:
        """Send the output that the ring has."""
        ring = self._process.ring
        if self.position < ring.start:
            self.lost_bytes += ring.start - self.position
            self.position = ring.start
        while self.position < ring.end and (room := self._context.room) > 0:
            data, is_stderr = ring.read(self.position, room)
            self.position += len(data)
            self._context.send(data, STDERR if is_stderr else 0)
        if self._process.is_finished and self.position >= ring.end:
            self._context.end(self._process.build_end(self.lost_bytes))
            self.leave()

    def leave(self) -> None:
        """Leave the process, which goes on."""
        if self in self._process.readers:
            self._process.readers.remove(self)
        self._process.input.close_stream(self._stream)
