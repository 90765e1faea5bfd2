"""The sources of the release before, unpacked from this repository's history."""

import io
import subprocess
import tarfile
from pathlib import Path

import pytest

from tests.stack import ROOT

COMMIT = "b6024ba1e6f63dd2f2fd5d4bbf5c16f8b57d10f9"
"""The last commit before the HTTP API: what a deployment that is upgraded to this release runs."""
_GIT_S = 60.0


def unpack_earlier_release(folder: Path) -> Path:
    """The tree below `folder`. Where the history is not there it skips: nothing on the machine can bring it (tests/unit/test_wire_fixtures.py holds what
    that release puts on the wire)."""
    archived = subprocess.run(["git", "archive", COMMIT], cwd=ROOT, capture_output=True, timeout=_GIT_S, check=False)
    if archived.returncode != 0:
        pytest.skip(f"commit {COMMIT} is not in this clone: fetch the whole history (git fetch --unshallow)")
    with tarfile.open(fileobj=io.BytesIO(archived.stdout)) as archive:
        archive.extractall(folder, filter="data")
    return folder
