"""What a hostile program tries against the limits of its container: memory, disk, processes, descriptors. Seen from outside."""

import contextlib
import os
from pathlib import Path

import pytest
from docker import APIClient

from tests.containers import Box, assert_still_works, open_box, python
from workers.sandboxd.hardening import SandboxLimits

pytestmark = pytest.mark.stack

LIMITS = SandboxLimits()
ENGINE_SOCKETS = ("run/docker.sock", "run/containerd/containerd.sock", "run/podman/podman.sock")


# --- exhaustion ----------------------------------------------------------------------------------------------------


def usage(path: Path) -> tuple[int, int, int, int]:
    """Bytes in all, bytes free, inodes in all, inodes free."""
    found = os.statvfs(path)
    return found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize, found.f_files, found.f_favail


MOUNTS = [
    ("/workspace", LIMITS.workspace_bytes, LIMITS.workspace_inodes),
    ("/tmp", LIMITS.tmp_bytes, LIMITS.tmp_inodes),
    ("/output", LIMITS.output_bytes, LIMITS.output_inodes),
    ("/dev/shm", LIMITS.shm_bytes, LIMITS.shm_inodes),
]
FILL = "for i in 1 2 3; do dd if=/dev/zero of={place}/fill$i bs=1M 2>&1 | grep -v records; done"
MAKE_FILES = python("""
import itertools
try:
    for number in itertools.count(): open('{place}/f%d' % number, 'w').close()
except OSError as error: print(error.strerror)
""")


@pytest.mark.parametrize(("place", "size", "inodes"), MOUNTS)
def test_fill_a_writable_place_by_bytes(box: Box, place: str, size: int, inodes: int) -> None:
    answer = box.run(FILL.format(place=place))
    total, free, _, _ = usage(box.root / place.lstrip("/"))

    assert "No space left on device" in answer.output
    assert (total, free) == (size, 0)
    assert box.oom_kills() == 0
    assert_still_works(box)


@pytest.mark.parametrize(("place", "size", "inodes"), MOUNTS)
def test_fill_a_writable_place_by_empty_files(box: Box, place: str, size: int, inodes: int) -> None:
    answer = box.run(MAKE_FILES.format(place=place))
    _, _, total, free = usage(box.root / place.lstrip("/"))

    assert answer.output.strip() == "No space left on device"
    assert (total, free) == (inodes, 0)
    assert box.oom_kills() == 0
    assert_still_works(box)


def test_fill_everything_at_once_to_poison_the_session(box: Box) -> None:
    """All mounts full, by bytes and by files, must leave enough memory for the session to go on."""
    for place, _, inodes in MOUNTS:
        box.run(f"mkdir {place}/d; " + MAKE_FILES.format(place=f"{place}/d").replace("itertools.count()", f"range({inodes - 8})"))
        box.run(FILL.format(place=place))

    assert [usage(box.root / place.lstrip("/"))[1] for place, _, _ in MOUNTS] == [0] * len(MOUNTS)
    assert box.oom_kills() == 0
    assert_still_works(box)


def test_fill_memory_through_a_shm_mount_without_a_number_of_files(engine: APIClient) -> None:
    """Why /dev/shm is a row of its own: the engine's mount has no nr_inodes, and empty files end in the OOM killer."""
    limits = SandboxLimits(memory_reserve_bytes=48 << 20, workspace_bytes=1 << 20, tmp_bytes=1 << 20)
    with open_box(engine, limits=limits, changes={"Tmpfs": {"/tmp": "rw,size=1m"}}) as weaker:
        weaker.run(MAKE_FILES.format(place="/dev/shm"))

        assert weaker.oom_kills() >= 1


def test_write_one_huge_sparse_file(box: Box) -> None:
    answer = box.run(f"truncate -s {LIMITS.workspace_bytes} /workspace/most; truncate -s 1T /workspace/huge")
    sizes = {path.name: path.stat().st_size for path in (box.root / "workspace").iterdir()}

    assert answer.status != 0
    assert sizes == {"most": LIMITS.workspace_bytes, "huge": 0}
    assert_still_works(box)


def test_hide_a_huge_file_in_a_memfd(box: Box) -> None:
    answer = box.run(python(f"import os; os.truncate(os.memfd_create('x'), {LIMITS.workspace_bytes} + 1)"))

    assert answer.status != 0


def test_leave_a_core_file_of_the_whole_memory(box: Box) -> None:
    box.run("cd /workspace && python3 -c 'import os; os.abort()'")

    assert list((box.root / "workspace").iterdir()) == []


BOMB = python("""
import os
told = False
while True:
    try: os.fork()
    except OSError:
        if not told: told = bool(os.write(1, b'full\\n'))
""")


def test_fork_without_end(engine: APIClient, box: Box) -> None:
    with open_box(engine) as neighbour:
        box.feed(f"({BOMB}\n) 2>/dev/null &\n")
        box.read_until("full")
        counted = [len(box.processes()) for _ in range(200)]

        assert LIMITS.pids // 2 < max(counted) <= LIMITS.pids
        assert box.pids_refused() > 0
        assert_still_works(neighbour)
        assert neighbour.pids_refused() == 0

    engine.remove_container(box.id, force=True)
    box.wait_until_removed()
    with contextlib.suppress(FileNotFoundError):
        assert box.processes() == []


def test_take_all_memory(engine: APIClient, box: Box) -> None:
    hog = "import itertools\nkept = [bytearray(1 << 20) for _ in itertools.count()]"
    with open_box(engine) as neighbour:
        answer = box.run(python(hog))
        peak = box.cgroup_file("memory", "memory.max_usage_in_bytes", "memory.peak").read_text()

        assert answer.status == 137
        assert box.oom_kills() == 1
        assert int(peak) <= LIMITS.memory_bytes
        assert neighbour.oom_kills() == 0
        assert_still_works(neighbour)
    assert_still_works(box)


def perl_ipc(source: str) -> str:
    return f"perl <<'END'\n$| = 1;\n{source}\nEND"


def test_keep_memory_beyond_death_in_shared_segments(box: Box) -> None:
    """System V segments belong to no process and to no mount: left alone they stay when everything is killed."""
    answer = box.run(perl_ipc("for (1..8) { my $id = shmget(0, 1 << 20, 01600); shmwrite($id, 'x' x 1024, 0, 1024) }"))

    assert answer.status == 0, answer.output
    assert left_in_ipc(box, "shm") == 0


def left_in_ipc(box: Box, kind: str) -> int:
    return int(box.run(f"tail -n +2 /proc/sysvipc/{kind} | wc -l").output)


def test_keep_memory_beyond_death_in_message_queues_and_semaphores(box: Box) -> None:
    queues = "my $m = pack('l! a8000', 1, 'x'); while (defined(my $q = msgget(0, 01600))) { msgsnd($q, $m, 04000) for 1..2 }"
    box.run(perl_ipc(queues))
    box.run(perl_ipc("1 while defined(semget(0, 200, 01600))"))

    assert left_in_ipc(box, "msg") == 64
    assert left_in_ipc(box, "sem") <= 64
    assert box.oom_kills() == 0
    assert_still_works(box)


def test_take_the_hosts_slots_for_asynchronous_io(box: Box) -> None:
    """fs.aio-max-nr is one number for the whole host, whatever the namespace."""
    before = int(Path("/proc/sys/fs/aio-nr").read_text())
    number = {"x86_64": 206, "aarch64": 0}[os.uname().machine]
    answer = box.run(f'perl -e \'my $p = "\\0" x 8; print "got" if syscall({number}, 60000, $p) == 0; exec "cat"\'')

    assert "got" not in answer.output
    assert int(Path("/proc/sys/fs/aio-nr").read_text()) == before


def test_open_descriptors_without_end(box: Box) -> None:
    answer = box.run(
        python("""
import os
opened = [os.dup(0)]
try:
    while True: opened.append(os.dup(0))
except OSError as error: print(opened[-1], error.strerror)
""")
    )

    assert answer.output.strip() == f"{LIMITS.nofile - 1} Too many open files"


def test_fill_the_hosts_disk_through_output(engine: APIClient, box: Box) -> None:
    box.run("yes | head -c 20000000")
    where = Path(engine.info()["DockerRootDir"]) / "containers" / box.id

    assert where.is_dir()
    assert sum(path.stat().st_size for path in where.rglob("*") if path.is_file()) < 200_000
