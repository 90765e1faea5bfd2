"""Volumes of sandboxd in folders: their content, and which process removes which."""

import io
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from toolcrew.contract.errors import SandboxUnavailable
from toolcrew.workers.sandboxd.runtime.folder_volumes import FolderVolumes

LEAVE = """
import os, sys
from pathlib import Path
from toolcrew.workers.sandboxd.runtime.folder_volumes import FolderVolumes
print(FolderVolumes(Path(sys.argv[1])).make("left"), flush=True)
os._exit(9)
"""


def pack(*entries: tuple[str, int, bytes | None]) -> io.BytesIO:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for name, mode, content in entries:
            member = tarfile.TarInfo(name)
            member.mode, member.size = mode, len(content or b"")
            member.type = tarfile.DIRTYPE if content is None else tarfile.REGTYPE
            archive.addfile(member, io.BytesIO(content or b""))
    packed.seek(0)
    return packed


def test_a_volume_has_the_files_and_modes_of_its_archives(tmp_path: Path) -> None:
    volumes = FolderVolumes(tmp_path / "volumes")
    folder = volumes.make("skills")
    volumes.unpack("skills", pack(("skills", 0o711, None), ("skills/a", 0o755, None), ("skills/a/run", 0o755, b"1")))
    volumes.unpack("skills", pack(("skills", 0o711, None), ("skills/a/run", 0o644, b"2")))
    assert volumes.path("skills") == folder
    modes = {str(path.relative_to(folder)): path.stat().st_mode & 0o777 for path in (folder, *folder.rglob("*"))}
    assert modes == {".": 0o711, "a": 0o755, "a/run": 0o644}
    assert (folder / "a" / "run").read_bytes() == b"2"
    volumes.remove("skills")
    with pytest.raises(SandboxUnavailable, match=r"the volume skills in .* was removed"):
        volumes.path("skills")
    volumes.close()
    assert list((tmp_path / "volumes").iterdir()) == []


def test_volumes_of_dead_processes_are_removed_and_those_of_living_ones_stay(tmp_path: Path) -> None:
    living = FolderVolumes(tmp_path)
    kept = living.make("kept")
    done = subprocess.run([sys.executable, "-c", LEAVE, tmp_path], capture_output=True, text=True, check=False)
    left = Path(done.stdout.strip())
    assert (done.returncode, left.is_dir()) == (9, True), done.stderr
    second = FolderVolumes(tmp_path)
    second.make("own")
    assert kept.is_dir()
    assert not left.parent.exists()
    for volumes in (living, second):
        volumes.close()


def test_a_folder_that_cannot_be_made_is_an_error_for_the_operator(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SandboxUnavailable, match="check the disk"):
        FolderVolumes(tmp_path / "file" / "volumes").make("x")
