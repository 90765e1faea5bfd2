"""Attacks on files of the host. A program reads the files through links and unusual paths, or changes the files
through the host's handling of a sandbox's files.
"""

import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.sandboxd.attack_sandboxd import HostileSession, OwnSandboxd
from tests.support.sandboxd.containers import Box

pytestmark = pytest.mark.stack


@pytest.fixture(scope="module")
def canary() -> Iterator[Path]:
    """A file of the host that every user can read and write, if the user can reach it."""
    place = Path(f"/tmp/toolcrew-canary-{secrets.token_hex(8)}")
    place.write_text("a secret of the host\n")
    place.chmod(0o666)
    yield place
    assert place.read_text() == "a secret of the host\n"
    place.unlink()


@pytest.fixture(scope="module")
def session(sandboxd: OwnSandboxd) -> Iterator[HostileSession]:
    with sandboxd.session(session="host-files") as opened:
        yield opened


PATH_PREFIXES = [
    "",
    "/..",
    "/../../..",
    "/proc/self/root",
    "/proc/self/root/../..",
    "/proc/1/root",
    "/proc/1/cwd/../..",
    "/proc/self/cwd/../..",
    "/proc/self/fd/0/../..",
]


def test_host_files_cannot_be_read_or_written_through_any_path(shared_box: Box, canary: Path) -> None:
    """Aim: leave the root through `..`, a magic link, or a link that another process follows."""
    answer = shared_box.run(
        "\n".join(
            (
                f"cat {road}{canary}; [ -w {road}{canary} ] && echo x >>{road}{canary}; ln -sfn {road}{canary.parent} "
                f"/workspace/l; cat /workspace/l/{canary.name}"
            )
            for road in PATH_PREFIXES
        )
    )

    assert "a secret of the host" not in answer.output
    assert answer.output.count("No such file") + answer.output.count("Permission denied") + answer.output.count(
        "Not a directory"
    ) >= 2 * len(PATH_PREFIXES)


def test_host_files_are_not_visible_under_any_name(shared_box: Box, canary: Path) -> None:
    """Aim: see the file under an unexpected name."""
    places = "/ /proc/[0-9]*/root/tmp/ /proc/[0-9]*/cwd/ /proc/[0-9]*/fd/ /dev/fd/ /sys/fs"
    answer = shared_box.run(f"find {places} -xdev -name '{canary.name}' 2>/dev/null")

    assert answer.output.strip() == ""


def test_file_tools_do_not_read_or_write_host_files(session: HostileSession, canary: Path) -> None:
    """Aim: make the host resolve a path of a tool call, or a link in the workspace."""
    session.bash(f"ln -s {canary} link; ln -s {canary.parent} folder; ln -s /proc/1/root root; ln -s /proc/self/fd fd")
    for path in (
        str(canary),
        "link",
        f"folder/{canary.name}",
        f"root/{canary}",
        f"../..{canary}",
        f"fd/../root/{canary}",
    ):
        read = session.ask({"op": "read_file", "path": path, "max_bytes": 99, "timeout_s": 5})
        write = session.ask({"op": "write_file", "path": path, "mode": "overwrite", "timeout_s": 5}, b"overwritten\n")

        assert b"secret" not in read.streams.get("file", b"")
        assert read.done["error"]["code"] in ("FILE_NOT_FOUND", "PATH_NOT_ALLOWED")
        # A path below /tmp is in the sandbox's own /tmp. The file is written there, not on the host.
        assert write.done.get("error", {}).get("code") in (None, "FILE_NOT_FOUND", "PATH_NOT_ALLOWED")
        session.bash(f"rm -f {canary}")
    assert canary.read_text() == "a secret of the host\n"


def test_the_guest_has_no_open_folder_of_the_host(session: HostileSession) -> None:
    """Aim: leave the root through a descriptor that the runtime left open, as in CVE-2024-21626."""
    held = [os.readlink(entry) for entry in Path(f"/proc/{session.watched.pid}/fd").iterdir()]
    folders = [
        entry for entry in Path(f"/proc/{session.watched.pid}/fd").iterdir() if stat.S_ISDIR(entry.stat().st_mode)
    ]

    assert folders == []
    assert {link for link in held if link.startswith("/")} <= {"/dev/null", "/memfd:body (deleted)"}
    assert os.readlink(f"/proc/{session.watched.pid}/cwd") in ("/", "/workspace")


def test_mount_and_host_information_reveals_no_host_name_or_path(shared_box: Box) -> None:
    """Aim: find out which other tenants use the host. Mounts may show only the engine's own storage, and nothing else
    of the host.
    """
    answer = shared_box.run(
        "cat /proc/self/mountinfo /proc/self/mounts /etc/hosts /etc/hostname /etc/resolv.conf "
        "/proc/sys/kernel/hostname 2>/dev/null"
    )

    assert os.uname().nodename not in answer.output.split()
    shown = answer.output.replace("/home/sandbox", "")  # the home inside is a mount
    assert not [word for word in ("/home/", "/root/", "/work/", os.getcwd()) if word in shown]
