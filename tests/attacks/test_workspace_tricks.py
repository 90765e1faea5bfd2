"""Attacks on a workspace with its own file system. Programs cannot reach its device, its file on the host, its quota
or its mount.
"""

import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.sandboxd.attack_sandboxd import HostileSession, OwnSandboxd
from tests.support.sandboxd.containers import python
from tests.support.stack.stack import missing
from toolcrew.workers.sandbox_client import SandboxClient

pytestmark = pytest.mark.stack


@pytest.fixture(scope="module")
def session(sandboxd: OwnSandboxd) -> Iterator[HostileSession]:
    with SandboxClient(sandboxd.path) as client:
        workspaces = client.status()["workspaces"]
    if workspaces["kind"] != "image":
        missing(f"workspaces are no file system images here: {workspaces['note']}")
    with sandboxd.session("another-tenant", "workspace-tricks") as opened:
        yield opened


def mount_of(session: HostileSession) -> tuple[set[str], str]:
    """Return options and optional fields of the mount of /workspace, as the kernel reports them."""
    row = next(
        line.split() for line in reversed(session.watched.mounts().splitlines()) if line.split()[4] == "/workspace"
    )
    return set(row[5].split(",")), " ".join(row[6 : row.index("-")])


def test_setuid_files_and_device_nodes_in_the_workspace_have_no_effect(session: HostileSession) -> None:
    """Aim: use a setuid file or a device node on a disk that root has mounted."""
    options, propagation = mount_of(session)
    answer = session.bash(
        "cp /bin/bash sh; chmod 6755 sh; ./sh -p -c 'id -u; id -g'; mknod disk b 7 0; mknod all b 8 0; ls disk all "
        "2>/dev/null; rm sh"
    )

    assert {"nosuid", "nodev", "rw"} <= options
    assert "shared" not in propagation
    assert answer.streams["stdout"].decode().split() == ["1000", "1000"]


def test_the_image_file_and_loop_device_of_the_workspace_are_not_reachable(
    sandboxd: OwnSandboxd, session: HostileSession
) -> None:
    """Aim: write below the file system. The attacker would then control its quota, its owners and the data that the
    host's kernel parses.
    """
    image = next((sandboxd.footprint.folder / "state").rglob("disk"))
    device = session.watched.root / "dev"
    answer = session.bash(
        f"ls {image} {image.parent} 2>/dev/null; for d in /dev/loop* /dev/block/* /dev/disk/* /dev/mapper/*; do head "
        "-c 1 $d && echo read; done; find /dev -type b -o -name 'loop*'"
    )

    assert answer.streams.get("stdout", b"") == b""
    assert not [path for path in device.iterdir() if stat.S_ISBLK(path.lstat().st_mode) or path.name.startswith("loop")]
    assert stat.S_IMODE(image.stat().st_mode) == 0o600
    assert stat.S_IMODE(image.parent.stat().st_mode) & 0o077 == 0


def test_loop_device_paths_reveal_no_tenant_or_session(session: HostileSession) -> None:
    """Aim: find other workspaces. /sys shows the file path of every loop device of the host, so these names must
    reveal nothing.
    """
    text = session.bash("cat /sys/block/loop*/loop/backing_file /proc/self/mountinfo; true").streams["stdout"].decode()

    assert "another-tenant" not in text
    assert "workspace-tricks" not in text


# Request numbers of linux/fs.h and ext4.h: name -> request, size of the argument in bytes. Each changes the whole
# file system.
IOCTLS = {
    "FIFREEZE": (0xC0045877, 4),
    "FITRIM": (0xC0185879, 24),
    "EXT4_IOC_RESIZE_FS": (0x40086610, 8),
    "EXT4_IOC_GROUP_EXTEND": (0x40086607, 8),
    "EXT4_IOC_SHUTDOWN": (0x8004587D, 4),
    "EXT4_IOC_SWAP_BOOT": (0x6611, 8),
}


def test_file_system_ioctls_are_refused(session: HostileSession) -> None:
    """Aim: freeze, grow, shut down or trim the file system, so that processes of the host wait."""
    answer = session.bash(
        python(f"""
import fcntl, os
open('file', 'w').write('x')
for name, (request, size) in {IOCTLS!r}.items():
    for path in ('.', 'file'):
        fd = os.open(path, os.O_RDONLY if path == '.' else os.O_RDWR)
        try: fcntl.ioctl(fd, request, bytearray(size)); print('did', name, path)
        except OSError: pass
""")
        + (
            "\nchattr +i file 2>/dev/null && echo did chattr; chattr +a . 2>/dev/null && echo did chattr; rm -f file; "
            "touch after && echo works"
        )
    )

    assert answer.streams["stdout"] == b"works\n"
    assert session.is_usable()


def test_the_workspace_mount_cannot_be_changed(session: HostileSession) -> None:
    """Aim: make later calls, or the host, use an unexpected folder."""
    before = mount_of(session), session.watched.mounts()
    answer = session.bash(
        "mkdir -p m; mount --bind / m; mount -o remount,suid,dev /workspace; umount -l /workspace; unshare -rm true; "
        "mv /workspace /tmp/w; rm -rf /workspace; ln -s / /workspace; rmdir m; echo done"
    )

    assert answer.streams["stdout"] == b"done\n"
    assert (mount_of(session), session.watched.mounts()) == before
    assert session.is_usable()


def test_a_workspace_cannot_exceed_its_quota_on_the_host(sandboxd: OwnSandboxd, session: HostileSession) -> None:
    """Aim: use more space than the quota for files, names, extended attributes and folders, or make the session
    unusable.
    """
    image = next((sandboxd.footprint.folder / "state").rglob("disk"))
    allowed = int(session.bash("stat -f -c '%b*%S' . | { read n; echo $((n)); }").streams["stdout"])
    session.bash(
        "dd if=/dev/zero of=fill bs=1M 2>/dev/null; dd if=/dev/zero of=fill2 bs=4k 2>/dev/null; fallocate -l 1G more; "
        "true",
        timeout_s=20.0,
    )
    held = image.stat().st_blocks * 512

    assert held < allowed * 1.1 + (8 << 20)
    assert Path(image).stat().st_size < allowed * 1.2 + (16 << 20)
    assert session.is_usable()
    assert session.bash("rm -f fill fill2 more; echo again >f && cat f").streams["stdout"] == b"again\n"
