"""What a hostile program tries against the walls of its container. The verdict comes from outside it wherever it can."""

import contextlib
import os
import re
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import docker.errors
import pytest
from docker import APIClient

from tests.containers import Box, assert_still_works, open_box, python
from workers.sandboxd.hardening import SandboxLimits

pytestmark = pytest.mark.stack

LIMITS = SandboxLimits()
ENGINE_SOCKETS = ("run/docker.sock", "run/containerd/containerd.sock", "run/podman/podman.sock")


# --- power ---------------------------------------------------------------------------------------------------------


def test_become_root_by_programs_and_calls(box: Box) -> None:
    box.run("cp /bin/sh /workspace/sh && chmod 6755 /workspace/sh")
    answer = box.run(
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
    assert (box.root / "workspace/sh").stat().st_uid == 1000
    # What the kernel holds against every process of the container, not what a program said.
    assert {box.status_of(pid)["Uid"] for pid in box.processes()} == {"1000\t1000\t1000\t1000"}


def test_find_a_setuid_file_or_a_file_capability_in_the_image(box: Box) -> None:
    answer = box.run("find / -xdev -perm /6000 -type f 2>/dev/null")

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
def test_change_what_is_mounted(box: Box, attempt: str) -> None:
    before = box.mounts()
    answer = box.run(f"mkdir -p /workspace/m; {attempt}")

    assert answer.status != 0
    assert box.mounts() == before


@pytest.mark.parametrize("place", ["/workspace", "/tmp", "/output", "/dev/shm"])
def test_make_a_device_node_of_the_hosts_disk(box: Box, place: str) -> None:
    answer = box.run(f"mknod {place}/sda b 8 0; mknod {place}/mem c 1 1; mkfifo {place}/fifo")
    made = [path for path in (box.root / place.lstrip("/")).iterdir() if not path.is_dir()]

    assert answer.status == 0, answer.output  # a fifo is no device
    assert [path.name for path in made] == ["fifo"]


def test_open_a_device_of_the_host(box: Box) -> None:
    devices = [path.name for path in (box.root / "dev").iterdir() if stat.S_ISBLK(path.lstat().st_mode)]
    answer = box.run("for d in /dev/mem /dev/kmsg /dev/sda /dev/vda /dev/kvm /dev/fuse /dev/vsock; do cat <$d && echo got $d; done")

    assert devices == []
    assert "got" not in answer.output


@pytest.mark.parametrize(
    "place",
    ["/x", "/etc/passwd", "/etc/ld.so.preload", "/usr/bin/python3", "/usr/lib/x", "/opt/toolcrew/__main__.py", "/opt/toolcrew/x", "/var/x"],
)
def test_write_to_the_image(engine: APIClient, box: Box, place: str) -> None:
    answer = box.run(f"echo evil >>{place}")

    assert answer.status != 0
    assert changed_files(engine, box) == set()


def changed_files(engine: APIClient, box: Box) -> set[str]:
    """What differs from the image, but for the mount points the engine itself makes."""
    engine_made = {"/dev", "/etc", "/proc", "/sys", "/run", "/tmp", "/workspace", "/output"}
    return {change["Path"] for change in engine.diff(box.id) or []} - engine_made


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
def test_change_the_host_through_proc_and_sys(box: Box, place: str) -> None:
    before = read_if_any(Path(place))
    box.run(f"echo -1000 >{place}; echo '|/workspace/x' >{place}")

    assert read_if_any(Path(place)) == before


def read_if_any(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:
        return None


def test_leave_the_limits_through_the_cgroup_tree(box: Box) -> None:
    box.run(
        "for f in $(find /sys/fs/cgroup -name cgroup.procs 2>/dev/null); do echo $$ >$f; done; "
        "for f in $(find /sys/fs/cgroup -name release_agent -o -name pids.max -o -name memory.limit_in_bytes 2>/dev/null); do echo 1 >$f; done"
    )

    assert box.pid in box.processes()
    assert int(box.cgroup_file("pids", "pids.max", "pids.max").read_text()) == LIMITS.pids
    assert int(box.cgroup_file("memory", "memory.limit_in_bytes", "memory.max").read_text()) == LIMITS.memory_bytes


# --- reach ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    """A server on every address of the host: what an attacker would love to reach."""
    with socket.create_server(("", 0)) as server:
        server.setblocking(False)
        yield server


def host_addresses() -> list[str]:
    found = re.findall(r"/32 host LOCAL|(\d+\.\d+\.\d+\.\d+)", Path("/proc/net/fib_trie").read_text())
    return sorted({address for address in found if address and not address.startswith("0.")})


def test_reach_the_host_over_the_network(box: Box, listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    answer = box.run(
        python(f"""
import socket
for address in {host_addresses()!r} + ['127.0.0.1']:
    try: socket.create_connection((address, {port}), 2); print('reached', address)
    except OSError as error: print(error)
""")
    )

    assert "127.0.0.1" in host_addresses()
    assert "reached" not in answer.output
    with pytest.raises(BlockingIOError):
        listener.accept()


@pytest.mark.parametrize("target", ["169.254.169.254", "8.8.8.8", "172.17.0.1", "fd00:ec2::254", "2001:4860:4860::8888"])
def test_reach_the_internet_or_the_metadata_service(box: Box, target: str) -> None:
    answer = box.run(
        python(f"""
import errno, socket
try: socket.create_connection(({target!r}, 80), 2)
except OSError as error: print(errno.errorcode[error.errno])
""")
    )

    assert answer.output.strip() in ("ENETUNREACH", "EADDRNOTAVAIL")


def test_find_an_interface_besides_loopback(box: Box) -> None:
    lines = Path(f"/proc/{box.pid}/net/dev").read_text().splitlines()[2:]

    assert [line.split(":")[0].strip() for line in lines] == ["lo"]


def test_resolve_a_name_to_carry_data_out(box: Box) -> None:
    assert box.run("getent hosts secret.example.com").status != 0


@pytest.mark.parametrize("family", ["AF_VSOCK", "AF_NETLINK", "AF_PACKET", "AF_ALG", "AF_TIPC", "AF_BLUETOOTH"])
def test_reach_the_hypervisor_or_the_kernel_by_an_odd_socket(box: Box, family: str) -> None:
    """vsock belongs to no network namespace: nothing but the filter stands before it."""
    answer = box.run(
        python(f"""
import socket
for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_RAW, socket.SOCK_SEQPACKET):
    try: socket.socket(socket.{family}, kind); print('opened')
    except PermissionError: print('refused')
""")
    )

    assert answer.output.split() == ["refused"] * 4


def test_reach_a_listener_of_the_host_by_an_abstract_name(box: Box) -> None:
    name = f"\0toolcrew-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(name)
        server.listen()
        server.setblocking(False)
        answer = box.run(python(f"import socket; socket.socket(socket.AF_UNIX).connect({name!r}); print('reached')"))

        assert "reached" not in answer.output
        with pytest.raises(BlockingIOError):
            server.accept()


def test_find_the_engines_socket(box: Box) -> None:
    answer = box.run("find / -xdev -type s 2>/dev/null; find /dev /tmp /workspace /run -type s 2>/dev/null")

    assert answer.output.strip() == ""
    assert (box.root / "run").is_dir()
    assert not (box.root / "run").is_symlink()
    assert not [place for place in ENGINE_SOCKETS if (box.root / place).exists()]
    assert "docker.sock" not in box.mounts()


def test_see_or_signal_a_process_of_the_host(box: Box) -> None:
    answer = box.run("ls -d /proc/[0-9]* | wc -l; cat /proc/[0-9]*/cmdline | tr '\\0' ' '")
    seen = int(answer.output.split()[0])

    assert seen <= 6
    assert "dockerd" not in answer.output


def test_read_a_secret_of_whoever_started_it(box: Box) -> None:
    answer = box.run("cat /proc/1/environ | tr '\\0' '\\n' | cut -d= -f1")

    assert set(answer.output.split()) <= {"PATH", "HOME", "LANG", "TERM", "HOSTNAME"}


# --- staying -------------------------------------------------------------------------------------------------------


def test_outlive_the_end_of_input(engine: APIClient, box: Box) -> None:
    box.feed("trap '' TERM HUP INT; setsid sh -c 'trap \"\" TERM HUP; while :; do read x </dev/zero; done' >/dev/null 2>&1 &\n")
    assert_still_works(box)
    assert len(box.processes()) >= 2
    box.close_stdin()
    box.wait_until_removed()

    with pytest.raises(docker.errors.NotFound):
        engine.inspect_container(box.id)
    with contextlib.suppress(FileNotFoundError):
        assert box.processes() == []


def test_end_pid_1_from_inside(box: Box) -> None:
    box.run("for s in TERM INT HUP KILL STOP QUIT USR1 SEGV; do kill -$s 1; done")

    assert_still_works(box)
    assert box.inspect()["State"]["Running"] is True


def test_find_what_a_neighbour_left(engine: APIClient, box: Box) -> None:
    """What one sandbox writes no other sees."""
    with open_box(engine) as neighbour:
        box.run("echo mine >/workspace/f; echo mine >/tmp/f; echo mine >/output/f; echo mine >/dev/shm/f")
        found = neighbour.run("ls -A /workspace /tmp /output /dev/shm; tail -n +2 /proc/sysvipc/shm")

    assert found.output.split() == ["/dev/shm:", "/output:", "/tmp:", "/workspace:"]
