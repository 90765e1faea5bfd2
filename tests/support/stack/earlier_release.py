"""The sources of other releases, unpacked from this repository's history."""

import io
import subprocess
import tarfile
from pathlib import Path

from tests.support.stack.stack import ROOT, missing
from toolcrew.contract.envelope import VERSION
from toolcrew.contract.hosts import RELEASE

COMMIT = "6d9496d0ad409a79fff28d03566771225824b223"
"""A commit of the previous release. Its processes can serve one deployment together with processes of this release."""
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


def unpack_incompatible_release(folder: Path) -> Path:
    """Unpack the previous release as one whose calls and hosts have other versions."""
    unpack_release(COMMIT, folder)
    for name, line, other in (
        ("envelope", f"VERSION = {VERSION}\n", f"VERSION = {VERSION - 1}\n"),
        ("hosts", f'RELEASE = "{RELEASE}"\n', 'RELEASE = "0"\n'),
    ):
        source = folder / "contract" / f"{name}.py"
        text = source.read_text()
        assert line in text
        source.write_text(text.replace(line, other))
    return folder
