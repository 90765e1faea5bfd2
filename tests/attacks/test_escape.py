"""Escape attacks: power over the kernel, the image or the limits, or a life longer than the sandbox. The results are
checked from outside.
"""

import contextlib
import stat
from pathlib import Path

import pytest

from tests.support.sandboxd.containers import Box, assert_still_works, python
from tests.support.stack.stack import is_alive
from toolcrew.workers.sandboxd.runtime.hardening import SandboxLimits

pytestmark = pytest.mark.stack

LIMITS = SandboxLimits()


def test_a_program_cannot_become_root(shared_box: Box) -> None:
    """Aim: become root through setuid programs, own files or system calls."""
    shared_box.run("cp /bin/sh /workspace/sh && chmod 6755 /workspace/sh")
    answer = shared_box.run(
        python("""
import os
for attempt in (lambda: os.setuid(0), lambda: os.setresuid(0, 0, 0), lambda: os.setgid(0), lambda: os.setgroups([0]),
                lambda: os.chown('/workspace/sh', 0, 0)):
    try: attempt()
    except PermissionError: print('refused')
""")
        + "\nsu -c id; sudo id; newgrp root </dev/null; /workspace/sh -p -c id"
    )

    assert answer.output.count("refused") == 5
    assert "uid=0" not in answer.output
    assert "gid=0" not in answer.output
    own = shared_box.host_id(1000)
    assert (shared_box.root / "workspace/sh").stat().st_uid == own
    # The kernel's data of every process of the container is checked, not the output of a program.
    assert {shared_box.status_of(pid)["Uid"] for pid in shared_box.processes()} == {"\t".join([str(own)] * 4)}


def test_the_image_has_no_setuid_files_or_file_capabilities(shared_box: Box) -> None:
    """Aim: find a file in the image that gives extra rights."""
    answer = shared_box.run("find / -xdev -perm /6000 -type f 2>/dev/null")

    assert answer.output.strip() == ""


@pytest.mark.parametrize(
    "attempt",
    [
        "mount -t tmpfs none /workspace",
        "mount -t proc proc /workspace",
        "mount --bind / /workspace",
        "mount -o remount,rw /",
        "mount -o remount,exec,size=1g /tmp",
        "umount /proc/kcore",
        "umount -l /tmp",
        "unshare --user --map-root-user --mount mount -t tmpfs none /tmp",
        "nsenter --target 1 --mount --uts --net true",
    ],
)
def test_mounts_cannot_be_changed(shared_box: Box, attempt: str) -> None:
    """Aim: see or write more through another mount."""
    before = shared_box.mounts()
    answer = shared_box.run(f"mkdir -p /workspace/m; {attempt}")

    assert answer.status != 0
    assert shared_box.mounts() == before


@pytest.mark.parametrize("place", ["/workspace", "/tmp", "/output", "/dev/shm"])
def test_device_nodes_cannot_be_created(shared_box: Box, place: str) -> None:
    """Aim: reach the host's disk or memory through a new device node."""
    answer = shared_box.run(f"mkdir {place}/made && cd {place}/made; mknod sda b 8 0; mknod mem c 1 1; mkfifo fifo")
    made = [path for path in (shared_box.root / place.lstrip("/") / "made").iterdir()]

    assert answer.status == 0, answer.output  # a FIFO is not a device
    assert [path.name for path in made] == ["fifo"]


def test_devices_of_the_host_cannot_be_opened(shared_box: Box) -> None:
    """Aim: reach the host's disk, memory or kernel through an existing device."""
    devices = [path.name for path in (shared_box.root / "dev").iterdir() if stat.S_ISBLK(path.lstat().st_mode)]
    answer = shared_box.run(
        "for d in /dev/mem /dev/kmsg /dev/sda /dev/vda /dev/kvm /dev/fuse /dev/vsock; do cat <$d && echo got $d; done"
    )

    assert devices == []
    assert "got" not in answer.output


IMAGE_PLACES = (
    "/x",
    "/etc/passwd",
    "/etc/ld.so.preload",
    "/usr/bin/python3",
    "/usr/lib/x",
    "/opt/toolcrew/__main__.py",
    "/opt/toolcrew/x",
    "/var/x",
)


def test_the_image_cannot_be_written(shared_box: Box) -> None:
    """Aim: run code in the guest, or in every later command."""
    answer = shared_box.run("\n".join(f"echo evil >>{place} && echo written" for place in IMAGE_PLACES))

    assert "written" not in answer.output
    assert answer.output.count("cannot create") == len(IMAGE_PLACES)
    assert shared_box.changed_files() == set()


@pytest.mark.parametrize(
    "place",
    [
        "/proc/sys/kernel/core_pattern",
        "/proc/sys/vm/overcommit_memory",
        "/proc/sysrq-trigger",
        "/sys/kernel/uevent_helper",
        "/proc/1/oom_score_adj",
    ],
)
def test_proc_and_sys_files_of_the_host_cannot_be_written(shared_box: Box, place: str) -> None:
    """Aim: make the kernel run a program on the host, or weaken the kernel."""
    before = read_if_any(Path(place))
    shared_box.run(f"echo -1000 >{place}; echo '|/workspace/x' >{place}")

    assert read_if_any(Path(place)) == before


def read_if_any(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:
        return None


def test_the_cgroup_limits_cannot_be_changed_or_left(shared_box: Box) -> None:
    """Aim: raise or leave the sandbox's own limits."""
    shared_box.run(
        "for f in $(find /sys/fs/cgroup -name cgroup.procs 2>/dev/null); do echo $$ >$f; done; for f in $(find "
        "/sys/fs/cgroup -name release_agent -o -name pids.max -o -name memory.limit_in_bytes 2>/dev/null); do echo 1 "
        ">$f; done"
    )

    assert shared_box.pid in shared_box.processes()
    assert int(shared_box.cgroup_file("pids", "pids.max", "pids.max").read_text()) == LIMITS.pids
    assert (
        int(shared_box.cgroup_file("memory", "memory.limit_in_bytes", "memory.max").read_text())
        == LIMITS.memory_bytes()
    )


def test_a_sandbox_ends_when_its_stdin_is_closed(box: Box) -> None:
    """Aim: stay alive after the process that feeds the sandbox has ended."""
    box.feed(
        "trap '' TERM HUP INT; setsid sh -c 'trap \"\" TERM HUP; while :; do read x </dev/zero; done' >/dev/null 2>&1 "
        "&\n"
    )
    assert_still_works(box)
    assert len(box.processes()) >= 2
    box.close_stdin()
    box.wait_until_removed()

    with contextlib.suppress(FileNotFoundError):
        assert box.processes() == []


def test_pid_1_cannot_be_killed_from_inside(shared_box: Box) -> None:
    """Aim: end or stop the guest, and with it the supervision of the call."""
    shared_box.run("for s in TERM INT HUP KILL STOP QUIT USR1 SEGV; do kill -$s 1; done")

    assert_still_works(shared_box)
    assert is_alive(shared_box.pid)
