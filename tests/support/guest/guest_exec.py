"""Run an exec as the guest does, with the local Python and without a sandbox. For programs that the worker sends into
sandboxes.
"""

import contextlib
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from tests.support.records.builders import build_exec_response
from toolcrew.contract.errors import ErrorCode, ToolFailure
from toolcrew.workers.sandbox_client import GuestResponse

_ENVIRONMENT = {"PATH": "/usr/bin:/bin"}


def run_locally(request: Mapping[str, Any], body: bytes) -> GuestResponse:
    """Run the program of an exec request and return the response."""
    argv = [sys.executable, *request["argv"][1:]]
    done = subprocess.run(argv, input=body, capture_output=True, timeout=60, check=False, env=_ENVIRONMENT)
    return build_output_response(done.stdout, done.stderr)


def build_output_response(stdout: bytes, stderr: bytes = b"", **fields: Any) -> GuestResponse:
    """Return the response of an exec that printed this output without loss."""
    response = build_exec_response(stdout, stderr, **fields)
    return GuestResponse(
        {**response.done, "streams": {"stdout": {"total": len(stdout)}}}, {"stdout": stdout, "stderr": stderr}
    )


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

    def run(self, request: Mapping[str, Any], body: bytes = b"") -> GuestResponse:
        self.ops.append(request["op"])
        if request["op"] == "job_start":
            self.labels.append(request["label"])
            return self._start_job(body.decode())
        if request["op"] == "job_kill":
            self.jobs[int(request["job"])].kill()
            return GuestResponse({"ev": "done"}, {})
        if request["op"] == "job_list":
            messages = [
                {"job": str(at), "label": label, "state": self.state, "age_s": self.age_s}
                for at, label in enumerate(self.labels)
            ]
            return GuestResponse({"ev": "done", "jobs": messages}, {})
        argv = [sys.executable, *request["argv"][1:]]
        process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=self.environment
        )
        self.execs.append(process)
        stdout, stderr = process.communicate(body, timeout=60)
        response = build_output_response(
            stdout[: request["capture"]["stdout"]], stderr, cancelled=process.returncode < 0
        )
        return GuestResponse({**response.done, "streams": {"stdout": {"total": len(stdout)}}}, response.streams)

    def _start_job(self, script: str) -> GuestResponse:
        if not self.takes_jobs:
            raise ToolFailure(ErrorCode.INVALID_ARGUMENTS, "16 jobs run already")
        self.jobs.append(
            subprocess.Popen(
                ["/bin/bash", "-c", script.replace("/usr/bin/python3", sys.executable, 1)],
                env=self.environment,
                start_new_session=True,
            )
        )
        return GuestResponse({"ev": "done"}, {})

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
