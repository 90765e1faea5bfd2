"""The sources of other releases, unpacked from this repository's history."""

import io
import subprocess
import tarfile
from pathlib import Path

from tests.stack import ROOT, missing

COMMIT = "5902ea5304483701da729531894a15db8f5a4d18"
"""A commit of the previous release. Its processes can serve one deployment together with processes of this release."""
INCOMPATIBLE_COMMIT = "b6024ba1e6f63dd2f2fd5d4bbf5c16f8b57d10f9"
"""A commit of the last incompatible release: its calls have version 2, and its records in Redis are not signed."""
_GIT_S = 60.0


def unpack_release(commit: str, folder: Path) -> Path:
    """Unpack the tree of `commit` into `folder`. Skips the test if the history is missing; fails the test where every
    requirement must be present.
    """
    archived = subprocess.run(["git", "archive", commit], cwd=ROOT, capture_output=True, timeout=_GIT_S, check=False)
    if archived.returncode != 0:
        missing(f"commit {commit} is not in this clone: fetch the whole history (git fetch --unshallow)")
    with tarfile.open(fileobj=io.BytesIO(archived.stdout)) as archive:
        archive.extractall(folder, filter="data")
    return folder
