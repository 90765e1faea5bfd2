"""The processes of the sandbox's streams: start, attach, list, signals, input, and the table of all processes."""

from __future__ import annotations

import base64
import binascii
import errno
import json
import os
import select
import time

from guest.commands.exec_request import read_argv
from guest.failures import FILE_NOT_FOUND, INVALID_ARGUMENTS, RequestFailure
from guest.fields import check_fields, optional, read_flag, read_text, read_timeout, read_variables, read_whole
from guest.processes import KillReport, kill_below, reap
from guest.streams.frames import MAX_DATA_BYTES
from guest.streams.handlers import StreamService
from guest.streams.programs import Program, build_start
from guest.streams.rings import ALL_RINGS_BYTES
from guest.streams.stream_process import ProcessReader, ProcessStart, StreamProcess
from guest.users import choose_user

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from guest.paths import GuestPaths
    from guest.streams.children import Children
    from guest.streams.handlers import CallReply, Poller, StreamContext

MAX_RUNNING = 32
"""Limit of processes that run."""
KEEP_S = 300.0
"""Time for which an ended process can be attached."""
_MAX_ENDED = 64
_MAX_DRAINS = 64
_MAX_ALL_PENDING_BYTES = 4_194_304
_ARGV_CHARS = 4096
_LIST_BYTES = 60_000
_MAX_WAIT_S = 3600.0
_MAX_TERMINAL = 4096
_MAX_NAME_CHARS = 128
_NUMBERS_PER_PID = 1000
_LEAVE_S = 0.3
_LEAVE_PAUSE_S = 0.005


_START_FIELDS = (
    "what", "argv", "env", "cwd", "user", "pty", "stdin", "tag", "key", "timeout_s", "pace", "writer",
)  # fmt: skip


class ProcessService(StreamService):
    """Serves the streams and requests of processes. `on_count`: called with the number of running processes when it
    changes.
    """

    def __init__(self, paths: GuestPaths, children: Children, on_count: Callable[[int], None]) -> None:
        super().__init__()
        self.openers = {"process": self._start, "attach": self._attach}
        self.calls = {
            "processes": self._list,
            "signal": self._signal,
            "resize": self._resize,
            "input": self._input,
            "close_stdin": self._close_stdin,
            "wait": self._wait,
        }
        self._paths = paths
        self._children = children
        self._on_count = on_count
        # A server that replaces another one has a higher pid. So its numbers are none of earlier processes.
        self._last_number = os.getpid() * _NUMBERS_PER_PID
        self._processes: dict[int, StreamProcess] = {}
        self._by_fd: dict[int, StreamProcess] = {}
        # Outputs of ended processes that other processes hold. They are read, so that those do not get SIGPIPE.
        self._drains: list[int] = []

    def register(self, poller: Poller) -> None:
        """Register the outputs and inputs of all processes, and set the time of the next duty."""
        self._by_fd = {}
        for process in self._processes.values():
            for fd in process.register(poller):
                self._by_fd[fd] = process
        for fd in self._drains:
            poller.register(fd, select.POLLIN)
        times = [at for process in self._processes.values() if (at := process.find_wake_at()) is not None]
        times += [process.ended_at + KEEP_S for process in self._processes.values() if process.is_unused]
        self.wake_at = min(times) if times else None

    def serve(self, fd: int, events: int) -> None:
        """Serve one descriptor of a process."""
        process = self._by_fd.get(fd)
        if process is not None:
            process.serve(fd, events)
            self._limit_output()
            self._pay()
            self._finish_ended()
        elif fd in self._drains and not _discard(fd):
            self._drains.remove(fd)
            os.close(fd)

    def wake(self) -> None:
        """Do what is due for each process. Forget those that ended long ago."""
        now = time.monotonic()
        for process in list(self._processes.values()):
            process.wake(now)
            if process.is_unused and process.ended_at + KEEP_S <= now:
                del self._processes[process.number]
        self._finish_ended()

    def leave(self) -> None:
        """Kill all processes: the sandbox or its session ends. Other children of the server may end by themselves."""
        for process in self._running:
            process.kill()
        give_up_at = time.monotonic() + _LEAVE_S
        while not reap() and time.monotonic() < give_up_at:
            time.sleep(_LEAVE_PAUSE_S)
        kill_below(KillReport())

    @property
    def _running(self) -> list[StreamProcess]:
        return [process for process in self._processes.values() if process.is_running]

    def _start(self, context: StreamContext, fields: dict[str, Any]) -> ProcessReader:
        check_fields(fields, *_START_FIELDS)
        start = self._read_start(fields)
        writer, has_pace = _read_name(fields, "writer"), fields.get("pace") is None or read_flag(fields, "pace")
        for known in self._processes.values():
            if start.key is not None and known.start.key == start.key:
                # The client has sent its request again, because it does not know whether the first one arrived.
                return ProcessReader(known, context, 0, has_pace, writer)
        if len(self._running) >= MAX_RUNNING:
            raise RequestFailure(INVALID_ARGUMENTS, f"{MAX_RUNNING} processes run, the limit: end one of them first")
        argv, env, further = build_start(
            start.argv, read_variables(fields, "env"), start.user, start.size is not None, self._paths
        )
        process = StreamProcess(self._last_number + 1, start, self._pay)
        process.run(Program(argv, env, start.cwd, start.user, self._paths), further)
        start.argv = _shorten(start.argv)
        self._last_number += 1
        self._processes[process.number] = process
        self._children.watch(process.pid, lambda status: self._note_exit(process, status))
        self._on_count(len(self._running))
        return ProcessReader(process, context, 0, has_pace, writer)

    def _read_start(self, fields: dict[str, Any]) -> ProcessStart:
        timeout_s = read_timeout(fields) if fields.get("timeout_s") is not None else None
        size = None
        if fields.get("pty") is not None:
            size = _read_size(fields["pty"])
        cwd = optional(read_text)(fields, "cwd") or os.fsdecode(self._paths.workspace)
        start = ProcessStart(read_argv(fields, "argv"), cwd, size, read_flag(fields, "stdin"), timeout_s)
        start.tag = _read_name(fields, "tag")
        start.key = _read_name(fields, "key")
        start.user_name = optional(read_text)(fields, "user")
        start.user = choose_user(start.user_name)
        return start

    def _attach(self, context: StreamContext, fields: dict[str, Any]) -> ProcessReader:
        check_fields(fields, "what", "process", "tag", "from", "pace", "writer")
        process = self._find(fields)
        begin = fields.get("from", "start")
        if begin in ("start", "live"):
            position = process.ring.start if begin == "start" else process.ring.end
        else:
            position = read_whole(fields, "from", 0, None)
        return ProcessReader(process, context, position, read_flag(fields, "pace"), _read_name(fields, "writer"))

    def _list(self, fields: dict[str, Any], reply: CallReply) -> None:
        check_fields(fields, "op")
        # Those that run come first. What does not fit into a frame is left out.
        entries: dict[int, dict[str, object]] = {}
        size = 0
        for process in sorted(self._processes.values(), key=lambda process: (process.status is None, process.number))[
            ::-1
        ]:
            entry = _build_entry(process)
            size += len(json.dumps(entry))
            if size > _LIST_BYTES:
                break
            entries[process.number] = entry
        reply.send({"processes": [entries[number] for number in sorted(entries)]})

    def _signal(self, fields: dict[str, Any], reply: CallReply) -> None:
        check_fields(fields, "op", "process", "signal", "tree")
        number = read_whole(fields, "signal", 1, 64)
        self._find(fields).send_signal(number, read_flag(fields, "tree"), reply)

    def _resize(self, fields: dict[str, Any], reply: CallReply) -> None:
        check_fields(fields, "op", "process", "cols", "rows")
        self._find(fields).resize(*_read_size({name: fields.get(name) for name in ("cols", "rows")}))
        reply.send({})

    def _input(self, fields: dict[str, Any], reply: CallReply) -> None:
        check_fields(fields, "op", "process", "data", "writer", "offset")
        process_input = self._find(fields).input
        writer = process_input.find_writer(_read_name(fields, "writer"))
        data, position = _read_data(fields), writer.accepted
        if fields.get("writer") is not None:
            position = read_whole(fields, "offset", 0, None)
        process_input.request(data, writer, position)
        self._pay()
        reply.send({"input_offset": writer.accepted})

    def _close_stdin(self, fields: dict[str, Any], reply: CallReply) -> None:
        check_fields(fields, "op", "process")
        self._find(fields).input.request_end()
        reply.send({})

    def _wait(self, fields: dict[str, Any], reply: CallReply) -> None:
        check_fields(fields, "op", "process", "timeout_s")
        timeout_s = fields.get("timeout_s")
        if isinstance(timeout_s, bool) or not isinstance(timeout_s, (int, float)) or not 0 <= timeout_s <= _MAX_WAIT_S:
            raise RequestFailure(INVALID_ARGUMENTS, f"'timeout_s' must be a number from 0 to {_MAX_WAIT_S:g}")
        self._find(fields).wait(reply, timeout_s)

    def _find(self, fields: dict[str, Any]) -> StreamProcess:
        """Return the process that `process` or `tag` names; of several, the last one that runs or has ended.

        Raises RequestFailure.
        """
        if fields.get("process") is None and fields.get("tag") is not None:
            tag = _read_name(fields, "tag")
            named = [process for process in self._processes.values() if process.start.tag == tag]
            if named:
                return max(named, key=lambda process: (process.is_running, process.number))
            raise RequestFailure(FILE_NOT_FOUND, f"no process has the tag {tag!a}: list the processes")
        number = read_whole(fields, "process", 0, None)
        if number not in self._processes:
            raise RequestFailure(
                FILE_NOT_FOUND, f"no process {number}: it never was, ended over {KEEP_S:g} s ago, or was lost"
            )
        return self._processes[number]

    def _note_exit(self, process: StreamProcess, status: int) -> None:
        process.note_exit(status)
        self._limit_output()
        self._finish_ended()
        self._on_count(len(self._running))

    def _finish_ended(self) -> None:
        now = time.monotonic()
        for process in [process for process in self._processes.values() if process.is_over(now)]:
            self._drains += process.finish()
        while len(self._drains) > _MAX_DRAINS:
            os.close(self._drains.pop(0))
        ended = [process for process in self._processes.values() if process.is_unused]
        for process in ended[: max(0, len(ended) - _MAX_ENDED)]:
            del self._processes[process.number]

    def _limit_output(self) -> None:
        """Drop output above ALL_RINGS_BYTES: first that of the processes that ended first, then of the largest ring."""
        excess = sum(process.ring.size for process in self._processes.values()) - ALL_RINGS_BYTES
        while excess > 0:
            ended = [process for process in self._processes.values() if process.is_finished and process.ring.size]
            rings = [process.ring for process in sorted(ended, key=lambda process: process.ended_at)]
            ring = rings[0] if rings else max((p.ring for p in self._processes.values()), key=lambda ring: ring.size)
            before = ring.size
            ring.shrink(max(0, before - excess))
            excess -= before - ring.size

    def _pay(self) -> None:
        """Let the clients send more input, unless the programs leave too much of it."""
        running = self._running
        if sum(len(process.input.pending) for process in running) < _MAX_ALL_PENDING_BYTES:
            for process in running:
                process.input.pay()


def _read_size(value: Any) -> tuple[int, int]:
    if not isinstance(value, dict) or set(value) != {"cols", "rows"}:
        raise RequestFailure(INVALID_ARGUMENTS, "the size of a terminal must be an object of 'cols' and 'rows'")
    return read_whole(value, "cols", 1, _MAX_TERMINAL), read_whole(value, "rows", 1, _MAX_TERMINAL)


def _read_name(fields: dict[str, Any], name: str) -> str | None:
    text = optional(read_text)(fields, name)
    if text is not None and len(text) > _MAX_NAME_CHARS:
        raise RequestFailure(INVALID_ARGUMENTS, f"{name!r} has more than {_MAX_NAME_CHARS} characters")
    return text if text is None else str(text)


def _read_data(fields: dict[str, Any]) -> bytes:
    try:
        data = base64.b64decode(str(fields.get("data")), validate=True)
    except (binascii.Error, ValueError):
        raise RequestFailure(INVALID_ARGUMENTS, "'data' must be base64") from None
    if len(data) > MAX_DATA_BYTES:
        raise RequestFailure(INVALID_ARGUMENTS, f"'data' has more than {MAX_DATA_BYTES} bytes: send it in parts")
    return data


def _build_entry(process: StreamProcess) -> dict[str, object]:
    start, size = process.start, process.size
    return {
        "process": process.number,
        "pid": process.pid,
        "argv": start.argv,
        "cwd": start.cwd,
        "tag": start.tag,
        "pty": {"cols": size[0], "rows": size[1]} if size is not None else None,
        "user": start.user_name,
        "started_at": process.started_at,
        "output_bytes": process.ring.end,
        "end": process.build_end() if process.status is not None else None,
    }


def _shorten(argv: list[str]) -> list[str]:
    """Return the begin of the arguments, for lists of processes."""
    shortened, room = [], _ARGV_CHARS
    for argument in argv:
        shortened.append(argument[:room])
        room -= len(argument) + 1
        if room <= 0:
            break
    return shortened


def _discard(fd: int) -> bool:
    """Read output and drop it. Return False at its end."""
    try:
        return bool(os.read(fd, 65_536))
    except OSError as error:
        return error.errno == errno.EAGAIN
