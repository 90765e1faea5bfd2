"""Attacks of a session whose programs are root inside. Nothing of it may be root, or have an effect, outside."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from docker import APIClient

from tests.support.sandboxd.attack_sandboxd import HostileSession, OwnSandboxd, open_own_sandboxd
from tests.support.sandboxd.containers import python
from tests.support.stack.processes import read_proc

pytestmark = pytest.mark.stack

DISK_BYTES = 64 * 1024 * 1024
CLASSES = {"default": {"user": "root", "workspace_bytes": DISK_BYTES}, "plain": {}}


@pytest.fixture(scope="module")
def rooted(engine: APIClient) -> Iterator[OwnSandboxd]:
    settings = {"TOOLCREW_TENANT_CLASSES": json.dumps(CLASSES), "TOOLCREW_SANDBOX_START": "oci"}
    with open_own_sandboxd(engine, settings) as opened:
        yield opened


@pytest.fixture(scope="module")
def session(rooted: OwnSandboxd) -> Iterator[HostileSession]:
    with rooted.session() as opened:
        yield opened


def output(session: HostileSession, script: str) -> str:
    return session.bash(script).streams.get("merged", b"").decode(errors="replace")


def test_root_in_the_sandbox_is_another_user_on_the_host(session: HostileSession) -> None:
    assert output(session, "id -u; touch /etc/mine && stat -c %u /etc/mine").split() == ["0", "0"]

    own = session.watched.host_id(0)
    assert own >= 0x4000_0000
    assert (session.watched.root / "etc/mine").stat().st_uid == own
    for pid in session.watched.processes():
        assert set(session.watched.status_of(pid)["Uid"].split()) == {str(own)}


@pytest.mark.parametrize(
    "script",
    [
        "mount -t tmpfs none /mnt",
        "mount -o remount,rw /opt/toolcrew",
        "mount -o remount,rw /sys",
        "mount --bind / /mnt",
        "umount /proc/kcore || umount /proc/keys",
        "unshare --mount true",
        "unshare --user --map-root-user true",
        "nsenter --target 1 --mount true",
        "mknod /tmp/disk b 254 0",
        "chmod 666 /dev/null",
        "chown 1000 /dev/null",
        "echo 1 >/proc/sys/kernel/core_pattern",
        "echo b >/proc/sysrq-trigger",
        "echo 0 >/sys/fs/cgroup/memory/cgroup.procs",
        "echo 1 >/sys/fs/cgroup/memory/release_agent",
        "echo -1 >/sys/fs/cgroup/memory/memory.limit_in_bytes",
        "mkdir /sys/fs/cgroup/memory/more",
        "echo x >/opt/toolcrew/bin/bash",
        "touch /opt/toolcrew/mine",
        "ip link add name dummy0 type dummy",
        "hostname other",
        "date -s 2001-01-01",
        "dmesg",
    ],
)
def test_root_in_the_sandbox_has_no_power_over_the_host(session: HostileSession, script: str) -> None:
    """Aim: mounts, devices, namespaces, control groups, kernel settings, the guest's own files."""
    assert session.bash(script).done["exit_code"] != 0


def test_root_in_the_sandbox_reaches_no_netlink_but_the_lists_of_its_network(session: HostileSession) -> None:
    """Aim: reach the audit log, the packet filter or generic netlink, or change the network."""
    attempts = python(
        """
import errno, socket, struct
for protocol in range(1, 32):
    try: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, protocol); print('opened')
    except OSError as error: print(errno.errorcode[error.errno])
link = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)
link.send(struct.pack('=IHHIIBxHiII', 32, 16, 5, 1, 0, 0, 0, 1, 0, 1))
print(errno.errorcode[-struct.unpack_from('=i', link.recv(4096), 16)[0]], len(socket.if_nameindex()))
"""
    )
    assert output(session, attempts).split() == ["EAFNOSUPPORT"] * 31 + ["EPERM", "1"]


def test_root_in_the_sandbox_has_only_the_capabilities_of_the_profile(session: HostileSession) -> None:
    """Aim: keep a capability that a package manager does not need."""
    allowed = sum(1 << number for number in (0, 1, 3, 4, 5, 6, 7, 8, 10, 18, 31))
    for pid in session.watched.processes():
        status = session.watched.status_of(pid)
        assert [int(status[name], 16) & ~allowed for name in ("CapPrm", "CapEff", "CapBnd")] == [0, 0, 0]
        assert [int(status[name], 16) for name in ("CapInh", "CapAmb")] == [0, 0]
        assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")


def test_root_in_the_sandbox_cannot_access_the_memory_of_the_guest(session: HostileSession) -> None:
    """Aim: take over PID 1, which has the same user."""
    attempts = python(
        """
import ctypes, os
for attempt in (lambda: open('/proc/1/mem', 'r+b'), lambda: os.readlink('/proc/1/fd/0'), lambda: open('/proc/1/environ').read()):
    try: attempt(); print('done')
    except OSError: print('refused')
print('refused' if ctypes.CDLL(None).ptrace(16, 1, 0, 0) == -1 else 'done')
"""
    )
    assert output(session, attempts).split() == ["refused"] * 4
    assert session.is_usable()


def test_root_in_the_sandbox_cannot_let_the_kernel_kill_or_delay_the_guest(session: HostileSession) -> None:
    """Aim: end the sandbox at a chosen moment, as if its host had failed."""
    files = ("oom_score_adj", "task/1/oom_score_adj", "autogroup")
    writes = "; ".join(f"(echo 19 >/proc/1/{file}) 2>/dev/null || echo refused" for file in files)
    tries = "; ".join(
        f"{attempt} >/dev/null 2>&1 || echo refused" for attempt in ("taskset -p 1 1", "ionice -c 3 -p 1")
    )
    assert output(session, f"{writes}; {tries}").split() == ["refused"] * 5
    assert output(session, "cat /proc/1/oom_score_adj; echo 19 >/proc/self/oom_score_adj && echo own").split() == [
        "0",
        "own",
    ]


def test_root_in_the_sandbox_cannot_kill_or_stop_the_guest(session: HostileSession) -> None:
    """Aim: end the supervision of calls."""
    output(session, "for s in TERM INT HUP KILL STOP QUIT USR1 SEGV; do kill -$s 1; done")
    assert session.is_usable()


def test_setuid_files_of_the_sandbox_have_no_effect_on_the_host(session: HostileSession) -> None:
    """Aim: have a file of root with the setuid bit on the disk of the host."""
    output(
        session, "cp /bin/sh /workspace/sh; cp /bin/sh /usr/local/bin/sh2; chmod 6755 /workspace/sh /usr/local/bin/sh2"
    )
    own = session.watched.host_id(0)
    for place in ("workspace/sh", "usr/local/bin/sh2"):
        assert (session.watched.root / place).stat().st_uid == own
    for line in session.watched.mounts().splitlines():
        fields = line.split(" ")
        if fields[4] in ("/", "/workspace", "/opt/toolcrew", "/skills", "/output", "/dev/shm"):
            assert {"nosuid", "nodev"} <= set(fields[5].split(",")), line


@pytest.mark.parametrize("place", ["/workspace/big", "/tmp/big", "/var/big", "/root/big"])
def test_root_in_the_sandbox_cannot_exceed_the_disk_quota(session: HostileSession, place: str) -> None:
    """Aim: use up the disk of the host. One quota counts everything that is written."""
    # head writes its error in parts, so the shell prints error and size at once.
    fill = f"error=$(head -c {4 * DISK_BYTES} /dev/zero 2>&1 >{place}); echo $error $(stat -c %s {place}); rm {place}"
    answer = session.bash(fill, timeout_s=60)

    written = int(answer.streams["merged"].split()[-1])
    assert 0 < written < DISK_BYTES * 1.1
    assert b"No space left" in answer.streams["merged"] or b"File too large" in answer.streams["merged"]
    assert session.is_usable()


def test_root_in_the_sandbox_cannot_exceed_the_inode_quota(session: HostileSession) -> None:
    """Aim: use up the inodes of the host."""
    count = python(
        f"""
import os
os.mkdir('/var/many')
try:
    for number in range({DISK_BYTES // 1024}): open(f'/var/many/{{number}}', 'w').close()
except OSError as error: print(error.errno)
print(len(os.listdir('/var/many')))
"""
    )
    code, made = map(int, session.bash(count, timeout_s=60).streams["merged"].split())
    session.bash("rm -rf /var/many", timeout_s=60)
    assert code == 28
    assert made < DISK_BYTES // 4096 * 1.1
    assert session.is_usable()


def test_changes_to_the_image_are_not_visible_in_other_sessions(rooted: OwnSandboxd, session: HostileSession) -> None:
    """Aim: change a program of the image for another session of the same image."""
    output(session, "echo 'echo evil' >/usr/bin/ls.new && mv /usr/bin/ls.new /usr/bin/true; chmod 755 /usr/bin/true")
    with rooted.session(tenant="other", session="s2") as other:
        assert output(other, "cat /usr/bin/true | head -c 4 | tail -c 3") == "ELF"
        assert "mine" not in output(other, "ls /etc")


def test_root_in_the_sandbox_cannot_signal_processes_outside(rooted: OwnSandboxd, session: HostileSession) -> None:
    """Aim: see or signal processes outside, by numbers of processes and users."""
    with rooted.session(tenant="other", session="s3") as other:
        assert other.watched.host_id(0) != session.watched.host_id(0)
        numbers = [other.watched.pid, rooted.process.pid, os.getpid()]
        output(session, "".join(f"kill -9 {number}; " for number in numbers))
        assert other.is_usable()
    assert b"sandboxd" in read_proc(rooted.process.pid, "cmdline")


def test_a_closed_session_leaves_no_process_mount_or_control_group(rooted: OwnSandboxd) -> None:
    """Aim: outlive the session, as a process, a mount, a loop device or a control group."""
    with rooted.session(session="short") as short:
        short.start_job("trap '' TERM HUP; setsid sleep 1000 & while :; do :; done")
        watched, folder = short.watched, short.watched.host_folder()
    watched.wait_until_removed()

    assert not folder.exists()
    assert not list(Path("/sys/fs/cgroup").glob(f"*/toolcrew/{watched.id}"))
    assert watched.id not in Path("/proc/self/mountinfo").read_text()


def test_package_installation_and_user_commands_work_as_root(session: HostileSession) -> None:
    """The attacks above are refused, and yet the usual work of root succeeds."""
    script = """
set -e
mkdir -p /tmp/p/DEBIAN /tmp/p/usr/bin
printf 'Package: hi\\nVersion: 1\\nArchitecture: all\\nMaintainer: a <a@b>\\nDescription: x\\n' >/tmp/p/DEBIAN/control
printf '#!/bin/sh\\necho hello\\n' >/tmp/p/usr/bin/hi
chmod 755 /tmp/p/usr/bin/hi
dpkg-deb --build /tmp/p /tmp/hi.deb >/dev/null
dpkg --install /tmp/hi.deb >/dev/null
hi
useradd --create-home bob
chown bob /home/bob
su bob -c id
setpriv --reuid bob --regid bob --clear-groups -- id -un
"""
    lines = output(session, script).splitlines()
    assert lines[0] == "hello"
    assert lines[1].startswith("uid=1001(bob)")
    assert lines[2] == "bob"
