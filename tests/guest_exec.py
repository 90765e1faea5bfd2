"""An exec as the guest makes it, by this machine's Python and without a sandbox around: for programs that the worker sends into sandboxes."""

import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from tests.builders import build_exec_response
from workers.sandbox_client import GuestResponse


def run_here(request: Mapping[str, Any], body: bytes) -> GuestResponse:
    """What the program gave."""
    argv = [sys.executable, *request["argv"][1:]]
    done = subprocess.run(argv, input=body, capture_output=True, timeout=60, check=False, env={"PATH": "/usr/bin:/bin"})
    return build_printed(done.stdout, done.stderr)


def build_printed(stdout: bytes, stderr: bytes = b"", **fields: Any) -> GuestResponse:
    """The answer of an exec that printed this, all of it kept."""
    response = build_exec_response(stdout, stderr, **fields)
    return GuestResponse({**response.done, "streams": {"stdout": {"total": len(stdout)}}}, {"stdout": stdout, "stderr": stderr})
