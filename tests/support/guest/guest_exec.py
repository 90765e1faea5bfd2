"""Run an exec as the guest does, with the local Python and without a sandbox. For programs that the worker sends into
sandboxes.
"""

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from tests.support.records.builders import build_exec_done, build_reply
from toolcrew.contract.errors import ErrorCode, ToolFailure
from toolcrew.contract.guest_protocol import (
    A,
    ExecRequest,
    GuestReply,
    GuestRequest,
    JobKillRequest,
    JobListRequest,
    JobStartRequest,
)
from toolcrew.workers.sandbox_client import GuestResponse

_ENVIRONMENT = {"PATH": "/usr/bin:/bin"}


def run_locally(request: GuestRequest[A], body: bytes) -> GuestReply[A]:
    """Run the program of an exec request and return the reply."""
    arguments = request.argv if isinstance(request, ExecRequest) else None
    assert arguments is not None
    argv = [sys.executable, *arguments[1:]]
    done = subprocess.run(argv, input=body, capture_output=True, timeout=60, check=False, env=_ENVIRONMENT)
    return build_reply(request, build_output_response(done.stdout, done.stderr))


def build_output_response(
    stdout: bytes, stderr: bytes = b"", *, total: int | None = None, **fields: Any
) -> GuestResponse:
    """Return the response of an exec that printed this output. `total`: the bytes of stdout before its end was lost."""
    counts = {
        "stdout": {"total": len(stdout) if total is None else total, "head": len(stdout), "tail": 0},
        "stderr": {"total": len(stderr), "head": len(stderr), "tail": 0},
    }
    done = build_exec_done(streams=counts, **fields)
    return GuestResponse(done, {"stdout": stdout, "stderr": stderr})


class LocalSandbox:
    """Execs and background jobs of one session.

    `execs`: the running execs, for a test that cancels an exec. `takes_jobs`: False rejects a job, as with too many
    other jobs. `state`, `age_s`: reported for every job.
    """

    def __init__(self) -> None:
        self.ops: list[str] = []
        self.execs: list[subprocess.Popen[bytes]] = []
        self.jobs: list[subprocess.Popen[bytes]] = []
        self.labels: list[str] = []
        self.state = "running"
        self.age_s = 1.0
        self.takes_jobs = True
        self.environment = dict(_ENVIRONMENT)

    def run(self, request: GuestRequest[A], body: bytes = b"") -> GuestReply[A]:
        self.ops.append(request.OP)
        return build_reply(request, self._answer(request, body))

    def _answer(self, request: GuestRequest[Any], body: bytes) -> GuestResponse:
        if isinstance(request, JobStartRequest):
            self.labels.append(request.label)
            self._start_job(body.decode())
            return GuestResponse({"job": self._describe_job(len(self.labels) - 1), "streams": {}})
        if isinstance(request, JobKillRequest):
            number = int(request.job.removeprefix("job-"))
            self.jobs[number].kill()
            return GuestResponse({"job": self._describe_job(number), "streams": {}})
        if isinstance(request, JobListRequest):
            return GuestResponse({"jobs": [self._describe_job(number) for number in range(len(self.labels))]})
        assert isinstance(request, ExecRequest)
        assert request.argv is not None
        argv = [sys.executable, *request.argv[1:]]
        process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=self.environment
        )
        self.execs.append(process)
        stdout, stderr = process.communicate(body, timeout=60)
        return build_output_response(
            stdout[: request.capture["stdout"]], stderr, total=len(stdout), cancelled=process.returncode < 0
        )

    def _describe_job(self, number: int) -> dict[str, Any]:
        plain = {"exit_code": None, "signal": None, "unread": 0}
        named = {"job": f"job-{number}", "label": self.labels[number], "state": self.state, "age_s": self.age_s}
        return {**plain, **named}

    def _start_job(self, script: str) -> None:
        if not self.takes_jobs:
            raise ToolFailure(ErrorCode.INVALID_ARGUMENTS, "16 jobs run already")
        self.jobs.append(
            subprocess.Popen(
                ["/bin/bash", "-c", script.replace("/usr/bin/python3", sys.executable, 1)],
                env=self.environment,
                start_new_session=True,
            )
        )

    def close(self) -> None:
        for process in (*self.execs, *self.jobs):
            process.kill()
            process.wait()


@contextlib.contextmanager
def open_local_sandbox() -> Iterator[LocalSandbox]:
    """Yield a local sandbox. Nothing of the sandbox remains after the block, except servers that a killed keeper
    moved into their own sessions.
    """
    sandbox = LocalSandbox()
    try:
        yield sandbox
    finally:
        sandbox.close()
