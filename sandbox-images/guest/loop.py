"""PID 1's loop: reads requests of the host, relays the reports of supervisors, and monitors every process.

Invariant: PID 1 never waits for a program, a supervisor or the host. Every step either does not block or has a time
limit, so that no program of the sandbox can stop PID 1. The sandbox ends when the host closes the channel.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import signal
import sys
import time

from guest.attestation import attest
from guest.call_pipes import FACTS
from guest.calls import Call, CallLanes, SupervisorHandle
from guest.cleanup import Cleanup, merge_kills
from guest.commands.job_requests import JobInputRequest, JobKillRequest, JobListRequest, JobPollRequest, JobStartRequest
from guest.failures import INVALID_ARGUMENTS, RequestFailure, describe_os_error
from guest.fields import check_fields, is_request_id, read_variables
from guest.frames import Frame, FrameDecoder, FrameError, HostDisconnected, Outbox, encode_frame
from guest.jobs import Job, Jobs
from guest.kernel import PR_SET_DUMPABLE, set_process_flag, set_title
from guest.paths import GuestPaths
from guest.processes import KillReport, kill_everything, reap
from guest.requests import REQUESTS
from guest.stream_channel import StreamChannel
from guest.supervisors import Supervisors
from guest.tunnels.tunnels import NET_OPS, Tunnels

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import NoReturn


_STDIN, _STDOUT, _STDERR = 0, 1, 2
_MAX_NUMBER = 1e9
_READ_BYTES = 65_536
# While more bytes than this wait for the host, PID 1 does not read reports from their pipes.
_OUTBOX_BYTES = 262_144
_TICK_MS = 1
_LONGEST_WAIT_S = 3600.0
TITLE = b"init"
"""Title of PID 1 and of the supervisors. `pkill -f python3` must not end them."""


class Options:
    """Options of the guest.

    `arguments`: their text. `life_s`: time from the start until the sandbox ends by itself, in seconds, or None for no
    limit. `proxy_port`: the port of the proxy, or None without network. `cpus`: the sandbox's limit of processor time,
    as a number of CPUs.
    """

    __slots__ = ("arguments", "cpus", "life_s", "proxy_port")

    def __init__(self, life_s: float | None = None, proxy_port: int | None = None, cpus: float = 1.0) -> None:
        self.arguments = b""
        self.life_s = life_s
        self.proxy_port = proxy_port
        self.cpus = cpus


def parse_options(arguments: Sequence[str]) -> Options:
    """Parse `--life SECONDS` and `--cpus NUMBER`, above 0, and `--proxy PORT`. Raises ValueError for every other
    argument.

    The check is strict, because a limit that is parsed wrongly would be no limit.
    """
    options = Options()
    options.arguments = " ".join(arguments).encode()
    names = iter(arguments)
    for name in names:
        value = next(names, None)
        if value is None:
            raise ValueError(f"option {name} has no value")
        if name == "--life":
            options.life_s = _parse_number(name, value)
        elif name == "--cpus":
            options.cpus = _parse_number(name, value)
        elif name == "--proxy":
            options.proxy_port = _parse_port(value)
        else:
            raise ValueError(f"unknown option {name}")
    return options


def read_options_of_pid_1() -> Options:
    """Return the options with which PID 1 runs. Raises ValueError."""
    with open("/proc/1/cmdline", "rb") as file:
        words = file.read().replace(b"\0", b" ").decode().split()
    # The title of PID 1, or its whole command line where a process cannot change its title.
    begin = next((at for at, word in enumerate(words) if word.startswith("--")), len(words))
    return parse_options(words[begin:])


def _parse_number(name: str, value: str) -> float:
    number = float(value)
    # "nan" and "inf" are refused too: no clock ever reaches them.
    if not 0 < number < _MAX_NUMBER:
        raise ValueError(f"{name} {value} is not a number above 0")
    return number


def _parse_port(value: str) -> int:
    port = int(value)
    if not 0 < port < 65536:
        raise ValueError(f"--proxy {value} is not a port number")
    return port


class AgeLimitReached(Exception):
    """Error: the sandbox has reached its maximum age."""


class AgeLimit:
    """The age limit of the sandbox. `life_s` None: no limit.

    The clock starts when the object is created. The clock also runs while the sandbox is frozen or the host sleeps.
    """

    __slots__ = ("_ends_at", "_life_s")

    def __init__(self, life_s: float | None) -> None:
        self._life_s = life_s
        self._ends_at = None if life_s is None else _now() + life_s

    @property
    def remaining_s(self) -> float | None:
        """Return the seconds until the end, or None when there is no limit."""
        return None if self._ends_at is None else self._ends_at - _now()

    def check(self) -> None:
        """Raise AgeLimitReached when the limit is reached."""
        remaining_s = self.remaining_s
        if remaining_s is not None and remaining_s <= 0:
            raise AgeLimitReached(f"the sandbox reached its maximum life of {self._life_s:g} s")


def _now() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class ProtocolError(Exception):
    """The host sent a request that the protocol does not allow."""


class Loop:
    """The state of PID 1: the calls, the supervisors, the jobs, the tunnels, and the frames for the host."""

    def __init__(self, paths: GuestPaths, options: Options) -> None:
        self._paths = paths
        if options.proxy_port is not None:
            paths.offer_proxy(options.proxy_port)
        self._age_limit = AgeLimit(options.life_s)
        self._decoder = FrameDecoder()
        self._outbox = Outbox(_STDOUT)
        self._calls: dict[str, Call] = {}
        self._supervisors = Supervisors(paths)
        self._cleanup = Cleanup()
        self._lanes = CallLanes()
        self._jobs = Jobs(paths)
        self._streams = StreamChannel(paths)
        self._tunnels = Tunnels(self._outbox, options.proxy_port) if options.proxy_port is not None else None
        # Calls that may run now, because the call before them in their lane has ended.
        self._ready_calls: list[Call] = []
        os.set_blocking(_STDIN, False)

    def run(self) -> NoReturn:
        """Serve until the host closes the channel or the age limit is reached.

        A sandbox must not outlive the sandboxd that uses it.
        """
        last_event = self._serve()
        # Kill all processes first: the host may be slow to read the last event, or may have closed the channel.
        kill_everything()
        if last_event is not None:
            self._send_last_event(last_event)
        os._exit(0 if last_event is None else 1)

    def _serve(self) -> dict[str, object] | None:
        """Serve until the end. Return the last event for the host, or None when the host has closed the channel."""
        try:
            self._send({"ev": "hello", "v": 1})
            while True:
                self._serve_events()
                self._serve_processes()
                self._age_limit.check()
        except (HostDisconnected, EOFError):
            return None
        except (FrameError, ProtocolError) as error:
            return {"ev": "fatal", "message": str(error)}
        except AgeLimitReached as error:
            return {"ev": "fatal", "message": str(error), "reason": "life"}
        except (MemoryError, OSError) as error:
            # A request may be partly processed, so it is safer to end with a reason than to continue.
            return {"ev": "fatal", "message": f"the guest failed: {type(error).__name__}: {error}"}

    def _serve_events(self) -> None:
        """Wait for events on every descriptor and serve them."""
        poller = select.poll()
        poller.register(_STDIN, select.POLLIN)
        if self._outbox.size:
            poller.register(_STDOUT, select.POLLOUT)
        # When the host is slow, PID 1 stops reading reports. The pipes fill, the programs block, and PID 1's memory
        # stays small.
        # Requests are still read: a cancel must get through to a program whose output the host does not read.
        if self._outbox.size < _OUTBOX_BYTES:
            for fd in self._supervisors.by_reports:
                poller.register(fd, select.POLLIN)
        self._streams.register(poller)
        if self._tunnels is not None:
            self._tunnels.register(poller)
        for fd, events in poller.poll(self._wait_ms()):
            if fd == _STDIN:
                self._read_requests()
            elif fd == _STDOUT:
                self._outbox.flush()
            elif fd in self._supervisors.by_reports:
                self._read_reports(self._supervisors.by_reports[fd])
            elif self._streams.serve(fd):
                self._streams.start()
            elif self._tunnels is not None:
                self._tunnels.serve(fd, events)

    def _wait_ms(self) -> int | None:
        """Return the time until the next duty, in milliseconds, or None when there is none."""
        if self._ready_calls:
            return 0
        # PID 1 has no handler for SIGCHLD, so it looks for dead children at short intervals while some are expected.
        if self._supervisors.ending or self._cleanup.held or self._streams.is_ending:
            return _TICK_MS
        deadlines = [call.watch_at for call in self._supervisors.calls if not call.answered]
        deadlines += [call.limit_at for call in self._lanes.waiting]
        if self._supervisors.idle_until is not None:
            deadlines.append(self._supervisors.idle_until)
        tunnels_at = self._tunnels.find_wake_at() if self._tunnels is not None else None
        deadlines += [at for at in (tunnels_at, self._streams.find_wake_at()) if at is not None]
        now = time.monotonic()
        waits = [deadline - now for deadline in deadlines]
        if self._age_limit.remaining_s is not None:
            waits.append(self._age_limit.remaining_s)
        if not waits:
            return None
        return int(min(max(min(waits), 0.0), _LONGEST_WAIT_S) * 1000) + 1

    def _read_requests(self) -> None:
        try:
            data = os.read(_STDIN, _READ_BYTES)
        except BlockingIOError:
            return
        if not data:
            raise EOFError
        for frame in self._decoder.feed(data):
            self._process_request(frame)

    def _process_request(self, frame: Frame) -> None:
        """Process a frame of the host. Raises ProtocolError when the protocol does not allow the frame."""
        header = frame.header
        op, call_id = header.get("op"), header.get("id")
        if op in NET_OPS:
            if self._tunnels is None:
                raise ProtocolError("a frame for a connection arrived, but the sandbox has no network")
            self._tunnels.process(frame)
            return
        if not is_request_id(call_id):
            raise ProtocolError("a request has no valid id")
        if op == "ping":
            self._send({"id": call_id, "ev": "pong"})
        elif op == "data":
            self._add_body(self._calls.get(call_id), frame.body)
        elif op == "cancel":
            self._cancel(self._calls.get(call_id))
        elif op == "attest":
            self._attest(frame.header)
        elif op == "set_variables":
            self._set_variables(frame.header)
        elif op in REQUESTS:
            if call_id in self._calls:
                raise ProtocolError("a request uses the id of a running request")
            self._begin_call(frame)
        else:
            raise ProtocolError("a request has an unknown op")

    def _attest(self, header: dict[str, object]) -> None:
        try:
            fields = attest(header, self._paths, self._supervisors.idle_pids, self._jobs.running, self._streams.pids)
        except (RequestFailure, OSError) as error:
            fields = {"error": _to_failure(error).as_error()}
        self._send({"id": header["id"], "ev": "done", **fields})

    def _set_variables(self, header: dict[str, object]) -> None:
        """Add the session's variables to those of programs that start from now on."""
        try:
            check_fields(header, "variables")
            self._paths.add_variables(read_variables(header, "variables"))
        except RequestFailure as error:
            self._send({"id": header["id"], "ev": "done", "error": error.as_error()})
            return
        self._supervisors.retire_idle()  # the supervisor that waits for its next call has the old variables
        self._send({"id": header["id"], "ev": "done"})

    def _begin_call(self, frame: Frame) -> None:
        try:
            call = Call(frame.header)
        except (RequestFailure, OSError) as error:
            self._send({"id": frame.header["id"], "ev": "done", "error": _to_failure(error).as_error()})
            return
        self._calls[call.id] = call
        self._add_body(call, frame.body)

    def _add_body(self, call: Call | None, data: bytes) -> None:
        # The host may still send parts of the body of a call that was cancelled.
        if call is None or call.is_whole:
            return
        call.body.add(data)
        if call.body.missing == 0:
            self._start(call)

    def _start(self, call: Call) -> None:
        try:
            call.prepare()
        except RequestFailure as error:
            self._answer(call, {"error": error.as_error()})
            return
        if self._lanes.enter(call):
            self._ready_calls.append(call)
        else:
            call.has_waited = True

    def _run(self, call: Call) -> None:
        request = call.request
        try:
            if isinstance(request, JobStartRequest):
                self._start_job(call, request)
            elif isinstance(request, JobListRequest):
                self._answer(call, self._jobs.as_fields())
            elif isinstance(request, (JobPollRequest, JobInputRequest)):
                self._send_to_keeper(call, request)
            else:
                self._supervisors.entrust(call)
        except (RequestFailure, OSError) as error:
            self._answer(call, {"error": _to_failure(error).as_error()})

    def _start_job(self, call: Call, request: JobStartRequest) -> None:
        job = self._jobs.open(request)
        try:
            self._supervisors.entrust_to_new(call)
        except OSError:
            self._jobs.forget(job)
            raise
        job.keeper = call.supervisor

    def _send_to_keeper(self, call: Call, request: JobPollRequest | JobInputRequest) -> None:
        job = self._jobs.find(request.job)
        if job.keeper is None or not self._supervisors.entrust_to_keeper(call, job.keeper):
            self._answer(call, _build_job_end(job, request))

    def _retry(self, call: Call) -> None:
        try:
            self._supervisors.entrust_to_new(call)
        except OSError as error:
            self._answer(call, {"error": _to_failure(error).as_error()})

    def _cancel(self, call: Call | None) -> None:
        if call is None:
            return
        if call.supervisor is not None:
            call.cancel()
        else:
            self._answer(call, call.build_unstarted_end())

    def _read_reports(self, supervisor: SupervisorHandle) -> bool:
        """Read once from a supervisor's pipe, and relay the reports. Return False when nothing more can be read now."""
        records, more = supervisor.read_reports()
        for kind, payload in records:
            if kind == FACTS:
                self._jobs.update(supervisor, json.loads(payload))
        call = supervisor.call
        if call is not None:
            for frame in call.relay(records):
                self._outbox.put(frame)
            if call.done is not None and not call.answered:
                self._update_jobs(supervisor, call)
                # Do not answer yet if processes survived: PID 1 kills them first, when the supervisor has exited.
                if not _has_survivors(call.done):
                    self._answer(call, call.done)
                    self._supervisors.release(supervisor)
        if not more:
            self._supervisors.end_reports(supervisor)
        return more

    def _update_jobs(self, supervisor: SupervisorHandle, call: Call) -> None:
        """Record what the end of a call reports about a job."""
        done = call.done or {}
        if "job" in done:
            self._jobs.update(supervisor, done["job"])
        elif isinstance(call.request, JobStartRequest):
            self._jobs.drop(supervisor)

    def _serve_processes(self) -> None:
        """Start waiting calls, enforce limits, reap dead processes, and continue the kill of orphans."""
        supervisors = self._supervisors
        self._streams.start()
        if self._tunnels is not None:
            self._tunnels.abort_orphans()
        now = time.monotonic()
        for call in [call for call in self._lanes.waiting if now >= call.limit_at]:
            self._answer(call, call.build_queue_timeout())
        while self._ready_calls:
            call = self._ready_calls.pop(0)
            if not call.answered:
                call.end_wait()
                self._run(call)
        for call in [call for call in supervisors.calls if now >= call.watch_at and not call.answered]:
            self._check_delayed(call)
        if supervisors.idle_until is not None and now >= supervisors.idle_until:
            supervisors.retire_idle()
        if not (supervisors.ending or self._cleanup.held or self._streams.is_ending):
            return
        no_child_left = reap(self._on_exit)
        if self._cleanup.held:
            if not no_child_left:
                # Processes of other calls and jobs are children of living supervisors, and those of streams of their
                # server. Only when none of these runs may every process be killed.
                spared = supervisors.pids | self._streams.pids
                others_run = bool(supervisors.calls or self._streams.pids) or self._jobs.has_keepers
                self._cleanup.step(spared, others_run)
                no_child_left = reap(self._on_exit)
            for waiting_call, report in self._cleanup.take_finished(no_child_left):
                if waiting_call is not None:
                    self._answer(waiting_call, _build_held_end(waiting_call, report))

    def _check_delayed(self, call: Call) -> None:
        supervisor = call.supervisor
        if supervisor is not None and call.check_delay(supervisor):
            self._supervisors.kill(supervisor)

    def _on_exit(self, pid: int, status: int) -> None:
        """Process the exit of a child of PID 1: answer its call, start the call again, or kill what is left."""
        if self._streams.note_exit(pid):
            self._cleanup.hold(None)  # processes of streams may have survived their server
            return
        supervisor = self._supervisors.take_reaped(pid)
        if supervisor is None:
            return
        # This loop ends: the writer is dead, so the pipe holds no more than its capacity.
        while supervisor.reports in self._supervisors.by_reports and self._read_reports(supervisor):
            pass
        call = supervisor.call if supervisor.call is not None and not supervisor.call.answered else None
        # Decide only after the pipe is empty, because the last report may contain the end of the call.
        can_retry = call is not None and call.can_retry(supervisor)
        has_orphans, job = self._jobs.end_keeper(supervisor)
        self._supervisors.forget(supervisor)
        if call is not None and call.done is None and job is not None and not has_orphans:
            # The job had ended, so its keeper exited without reading this request.
            self._answer(call, _build_job_end(job, call.request))
        elif call is not None and job is None and can_retry:
            self._retry(call)
        elif call is not None or has_orphans:
            if call is not None and os.WIFSIGNALED(status):
                call.killed_by = os.WTERMSIG(status)
            self._cleanup.hold(call)
            # End the waiting supervisor too: it would hide that no child is left, and then all processes can be killed
            # at once.
            self._supervisors.retire_idle()

    def _answer(self, call: Call, fields: dict[str, object]) -> None:
        call.answered = True
        self._calls.pop(call.id, None)
        call.close()
        following = self._lanes.leave(call)
        if following is not None:
            self._ready_calls.append(following)
        self._send({"id": call.id, "ev": "done", **fields})

    def _send(self, header: dict[str, object]) -> None:
        self._outbox.put(encode_frame(header))

    def _send_last_event(self, header: dict[str, object]) -> None:
        with contextlib.suppress(OSError):
            os.set_blocking(_STDERR, False)
            os.write(_STDERR, f"{header['message']}\n".encode())
        try:
            self._send(header)
            self._outbox.flush_last()
        except HostDisconnected:
            return


def _build_job_end(job: Job, request: object) -> dict[str, object]:
    """Return the answer to a request about a job whose keeper has exited, from the keeper's last report."""
    if isinstance(request, JobInputRequest):
        return {
            "error": RequestFailure(
                INVALID_ARGUMENTS, f"{job.id} has ended and reads no more input: start another job"
            ).as_error()
        }
    stream = {"total": 0, "head": 0, "tail": 0}
    done: dict[str, object] = {"job": job.as_field(), "streams": {"merged": stream}}
    return {**done, "kill": None} if isinstance(request, JobKillRequest) else done


def _build_held_end(call: Call, report: KillReport) -> dict[str, object]:
    if call.done is None:
        return call.build_lost_end(report)
    return {**call.done, "kill": merge_kills(call.done.get("kill"), report)}


def _to_failure(error: RequestFailure | OSError) -> RequestFailure:
    if isinstance(error, RequestFailure):
        return error
    return describe_os_error(error, "the sandbox cannot accept another request")


def _has_survivors(done: dict[str, object]) -> bool:
    kill = done.get("kill")
    return isinstance(kill, dict) and bool(kill["survivors"])


def main(options: Options | None = None, paths: GuestPaths | None = None) -> NoReturn:
    """Run as PID 1."""
    if os.getpid() != 1:
        sys.exit("the guest runs as PID 1 of a sandbox and nowhere else")
    # Remove Python's handler of SIGINT, with which any program of the sandbox could interrupt PID 1. The kernel drops
    # signals to PID 1 that have no handler.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.umask(0o022)
    options = options or Options()
    # The options stay visible: sandboxd compares them with those of the specification.
    set_title(TITLE, options.arguments)
    loop = Loop(paths or GuestPaths(), options)
    gc.collect()
    gc.freeze()
    # This is the last step, because earlier steps may need /proc/self. From here on, no program can read, stop or
    # trace PID 1.
    set_process_flag(PR_SET_DUMPABLE, 0)
    loop.run()
