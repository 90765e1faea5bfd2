"""Small file systems of their own, for tests that fill or cross them."""

import contextlib
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def small_disk(options: str = "rw") -> Iterator[Path]:
    """Mount an empty file system of 1 MiB. Skips the test without the right to mount."""
    with tempfile.TemporaryDirectory() as name:
        command = ["mount", "-t", "tmpfs", "-o", f"size=1m,mode=755,{options}", "none", name]
        if subprocess.run(command, capture_output=True, check=False).returncode != 0:
            pytest.skip("needs the right to mount")
        try:
            yield Path(name)
        finally:
            subprocess.run(["umount", "-l", name], check=True)
