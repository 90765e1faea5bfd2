"""The TypeScript client: generated from the current API, and used by a program of node on real workers and sandboxes."""

import json
import os
import subprocess

import pytest

from scripts import typescript_client
from tests.support.stack.api_stack import ApiStack
from tests.support.stack.stack import missing
from tests.support.stack.waiting import SOON_S


@pytest.fixture(scope="module", autouse=True)
def tools() -> None:
    try:
        typescript_client.install()
    except OSError as error:
        missing(f"npm cannot be started: {error}")


def test_the_generated_files_are_those_of_the_current_api() -> None:
    assert typescript_client.find_stale() == [], "run .venv/bin/python scripts/typescript_client.py"


@pytest.mark.stack
def test_a_program_of_node_uses_sessions_files_runs_and_batches(api_stack: ApiStack) -> None:
    typescript_client.run_tool("tsc")
    environment = {"TOOLCREW_URL": api_stack.apis[0].url, "TOOLCREW_API_KEY": api_stack.keys["acme"]}
    done = subprocess.run(
        ["node", "dist/test/tour.js"],
        cwd=typescript_client.PACKAGE,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=SOON_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout) == {
        "output": "42\n",
        "program": [3, "in"],
        "written": {"path": "data/été #1.bin", "bytes": 4},
        "read": [0, 1, 254, 255],
        "missing": [404, "FILE_NOT_FOUND"],
        "invalid": [422, "INVALID_ARGUMENTS"],
        "unknown": [401, "UNAUTHENTICATED"],
        "events": [True, "RunEnded"],
        "rows": ["a", "b"],
        "closed": 404,
    }
