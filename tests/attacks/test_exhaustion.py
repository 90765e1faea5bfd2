"""Exhaustion attacks on disk, inodes, memory, processes, descriptors and processor: of the host, of neighbours, and
of the session itself. The results are checked from outside.
"""

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from docker import APIClient

from tests.support.sandboxd.attack_sandboxd import OwnSandboxd
from tests.support.sandboxd.containers import Box, assert_still_works, open_box, python
from tests.support.stack.waiting import SOON_S, wait_until
from toolcrew.workers.sandboxd.disks.base import HOME
from toolcrew.workers.sandboxd.runtime.hardening import SandboxLimits

pytestmark = pytest.mark.stack

LIMITS = SandboxLimits()


def usage(path: Path) -> tuple[int, int, int, int]:
    """Return total bytes, free bytes, total inodes and free inodes."""
    found = os.statvfs(path)
    return found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize, found.f_files, found.f_favail


MOUNTS = [
    ("/workspace", LIMITS.workspace_bytes, LIMITS.workspace_inodes),
    ("/tmp", LIMITS.half_bytes, LIMITS.tmp_inodes),
    (HOME, LIMITS.half_bytes, LIMITS.tmp_inodes),
    ("/output", LIMITS.output_bytes, LIMITS.output_inodes),
    ("/dev/shm", LIMITS.half_bytes, LIMITS.shm_inodes),
]
FILL = "for i in 1 2 3; do dd if=/dev/zero of={place}/fill$i bs=1M 2>&1 | grep -v records; done"
MAKE_FILES = python("""
import itertools
try:
    for number in itertools.count(): open('{place}/f%d' % number, 'w').close()
except OSError as error: print(error.strerror)
""")


@pytest.fixture
def cleaned_box(shared_box: Box) -> Iterator[Box]:
    """Yield a box. Afterwards every writable folder must be empty again, through `rm` in the session alone."""
    before = [usage(shared_box.root / place.lstrip("/")) for place, _, _ in MOUNTS]
    yield shared_box
    answer = shared_box.run("rm -rf /workspace/* /tmp/* /home/sandbox/* /output/* /dev/shm/*")
    assert answer.status == 0, answer.output
    assert [usage(shared_box.root / place.lstrip("/")) for place, _, _ in MOUNTS] == before


@pytest.mark.parametrize(("place", "size", "inodes"), MOUNTS)
def test_a_writable_folder_is_limited_in_bytes(cleaned_box: Box, place: str, size: int, inodes: int) -> None:
    """Aim: use up the host's memory or disk, or leave the session without free space permanently."""
    answer = cleaned_box.run(FILL.format(place=place))
    total, free, _, _ = usage(cleaned_box.root / place.lstrip("/"))

    assert "No space left on device" in answer.output
    assert (total, free) == (size, 0)
    assert cleaned_box.oom_kills() == 0
    assert_still_works(cleaned_box)


@pytest.mark.parametrize(("place", "size", "inodes"), MOUNTS)
def test_a_writable_folder_is_limited_in_inodes(cleaned_box: Box, place: str, size: int, inodes: int) -> None:
    """Aim: use up the kernel's memory or all inodes with empty files."""
    answer = cleaned_box.run(MAKE_FILES.format(place=place))
    _, _, total, free = usage(cleaned_box.root / place.lstrip("/"))

    assert answer.output.strip() == "No space left on device"
    assert (total, free) == (inodes, 0)
    assert cleaned_box.oom_kills() == 0
    assert_still_works(cleaned_box)


def test_a_session_still_works_with_all_writable_folders_full(cleaned_box: Box) -> None:
    """Aim: leave no memory for any later command. Even if all mounts are full of bytes and files, enough memory must
    remain.
    """
    for place, _, inodes in MOUNTS:
        cleaned_box.run(
            f"mkdir {place}/d; "
            + MAKE_FILES.format(place=f"{place}/d").replace("itertools.count()", f"range({inodes - 8})")
        )
        cleaned_box.run(FILL.format(place=place))

    assert [usage(cleaned_box.root / place.lstrip("/"))[1] for place, _, _ in MOUNTS] == [0] * len(MOUNTS)
    assert cleaned_box.oom_kills() == 0
    assert_still_works(cleaned_box)


def test_a_shm_mount_without_an_inode_limit_leads_to_an_oom_kill(engine: APIClient) -> None:
    """Show why the profile mounts /dev/shm with a limit. The engine's own /dev/shm has no nr_inodes, so empty files
    there lead to the OOM killer.
    """
    few = 1 << 20
    limits = SandboxLimits(memory_reserve_bytes=40 * few, workspace_bytes=few, output_bytes=few)
    with open_box(engine, limits=limits, changes={"Tmpfs": {"/tmp": "rw,size=1m"}}) as weaker:
        weaker.run(MAKE_FILES.format(place="/dev/shm"))

        assert weaker.oom_kills() >= 1


def test_a_sparse_file_cannot_exceed_the_workspace(cleaned_box: Box) -> None:
    """Aim: claim more disk space than exists."""
    answer = cleaned_box.run(f"truncate -s {LIMITS.workspace_bytes} /workspace/most; truncate -s 1T /workspace/huge")
    sizes = {path.name: path.stat().st_size for path in (cleaned_box.root / "workspace").iterdir()}

    assert answer.status != 0
    assert sizes == {"most": LIMITS.workspace_bytes, "huge": 0}
    assert_still_works(cleaned_box)


def test_a_memfd_cannot_exceed_the_file_size_limit(cleaned_box: Box) -> None:
    """Aim: keep more data in memory than any mount allows."""
    answer = cleaned_box.run(python(f"import os; os.truncate(os.memfd_create('x'), {LIMITS.workspace_bytes} + 1)"))

    assert answer.status != 0


def test_a_crash_leaves_no_core_file(cleaned_box: Box) -> None:
    """Aim: fill the workspace, or the host's folder for core files."""
    cleaned_box.run("cd /workspace && python3 -c 'import os; os.abort()'")

    assert list((cleaned_box.root / "workspace").iterdir()) == []


BOMB = python("""
import os
has_written = False
while True:
    try: os.fork()
    except OSError:
        if not has_written: has_written = bool(os.write(1, b'full\\n'))
""")


def test_a_fork_bomb_is_limited_to_its_own_sandbox(engine: APIClient, box: Box) -> None:
    """Aim: use up the processes of the host or of a neighbour."""
    with open_box(engine) as neighbour:
        box.feed(f"({BOMB}\n) 2>/dev/null &\n")
        box.read_until("full")
        counted = [len(box.processes()) for _ in range(200)]

        assert LIMITS.pids // 2 < max(counted) <= LIMITS.pids
        assert box.pids_refused() > 0
        assert_still_works(neighbour)
        assert neighbour.pids_refused() == 0

    box.end()
    box.wait_until_removed()
    with contextlib.suppress(FileNotFoundError):
        assert box.processes() == []


def test_memory_exhaustion_is_limited_to_its_own_sandbox(engine: APIClient, box: Box) -> None:
    """Aim: use up the host's memory, or get a neighbour killed."""
    hog = "import itertools\nkept = [bytearray(1 << 20) for _ in itertools.count()]"
    with open_box(engine) as neighbour:
        answer = box.run(python(hog))
        peak = box.cgroup_file("memory", "memory.max_usage_in_bytes", "memory.peak").read_text()

        assert answer.status == 137
        assert box.oom_kills() == 1
        assert int(peak) <= LIMITS.memory_bytes()
        assert neighbour.oom_kills() == 0
        assert_still_works(neighbour)
    assert_still_works(box)


def perl_ipc(source: str) -> str:
    return f"perl <<'END'\n$| = 1;\n{source}\nEND"


def test_shared_memory_segments_are_removed_with_their_processes(cleaned_box: Box) -> None:
    """Aim: keep memory in System V segments. The segments belong to no process and to no mount, and survive a kill of
    all processes.
    """
    answer = cleaned_box.run(
        perl_ipc("for (1..8) { my $id = shmget(0, 1 << 20, 01600); shmwrite($id, 'x' x 1024, 0, 1024) }")
    )

    assert answer.status == 0, answer.output
    assert left_in_ipc(cleaned_box, "shm") == 0


def left_in_ipc(box: Box, kind: str) -> int:
    return int(box.run(f"tail -n +2 /proc/sysvipc/{kind} | wc -l").output)


def test_message_queues_and_semaphores_are_limited(cleaned_box: Box) -> None:
    """Aim: keep memory in message queues and semaphores after a kill of all processes."""
    queues = (
        "my $m = pack('l! a8000', 1, 'x'); while (defined(my $q = msgget(0, 01600))) { msgsnd($q, $m, 04000) for 1..2 }"
    )
    cleaned_box.run(perl_ipc(queues))
    cleaned_box.run(perl_ipc("1 while defined(semget(0, 200, 01600))"))

    assert left_in_ipc(cleaned_box, "msg") == 64
    assert left_in_ipc(cleaned_box, "sem") <= 64
    assert cleaned_box.oom_kills() == 0
    assert_still_works(cleaned_box)


def test_asynchronous_io_slots_of_the_host_cannot_be_taken(cleaned_box: Box) -> None:
    """Aim: use up fs.aio-max-nr, a limit of the whole host that no namespace divides."""
    before = int(Path("/proc/sys/fs/aio-nr").read_text())
    number = {"x86_64": 206, "aarch64": 0}[os.uname().machine]
    answer = cleaned_box.run(
        f'perl -e \'my $p = "\\0" x 8; print "got" if syscall({number}, 60000, $p) == 0; exec "cat"\''
    )

    assert "got" not in answer.output
    assert int(Path("/proc/sys/fs/aio-nr").read_text()) == before


def test_open_descriptors_are_limited(cleaned_box: Box) -> None:
    """Aim: use up the host's open files."""
    answer = cleaned_box.run(
        python("""
import os
opened = [os.dup(0)]
try:
    while True: opened.append(os.dup(0))
except OSError as error: print(opened[-1], error.strerror)
""")
    )

    assert answer.output.strip() == f"{LIMITS.nofile - 1} Too many open files"


def test_output_does_not_fill_the_disk_of_the_host(cleaned_box: Box) -> None:
    """Aim: fill the host's disk through the engine's log."""
    cleaned_box.run("yes | head -c 8000000")
    where = cleaned_box.host_folder()

    assert where.is_dir()
    assert sum(path.stat().st_size for path in where.rglob("*") if path.is_file()) < 200_000


def test_cpu_use_stays_within_the_limit(cleaned_box: Box) -> None:
    """Aim: slow down everything else on the host."""
    counter = cleaned_box.cgroup_file("cpuacct", "cpuacct.usage", "cpu.stat")
    before, started = used_s(counter), time.monotonic()
    # Each loop is two processes. Their number stays well below the process limit, because the shell of the box must
    # be able to fork.
    cleaned_box.run("for i in $(seq 40); do timeout 1 sh -c 'while :; do :; done' & done; wait")

    assert used_s(counter) - before < (time.monotonic() - started) * LIMITS.cpus * 1.1 + 0.1


def used_s(counter: Path) -> float:
    numbers = counter.read_text().split()
    return int(numbers[0]) / 1e9 if len(numbers) == 1 else int(numbers[numbers.index("usage_usec") + 1]) / 1e6


MEMORY_HOGS = {
    "growing process": "python3 -c 'kept = [bytearray(1 << 20) for _ in range(9999)]'",
    "process with minimal oom score": (
        "echo 0 >/proc/self/oom_score_adj; exec python3 -c 'kept = [bytearray(1 << 20) for _ in range(9999)]'"
    ),
    "many small processes": (
        "for i in $(seq 20); do python3 -c 'kept = bytearray(60 << 20); input()' < <(sleep 60) & done; wait -n"
    ),
}


@pytest.mark.parametrize("hog", MEMORY_HOGS.values(), ids=MEMORY_HOGS.keys())
def test_the_oom_killer_ends_the_process_that_uses_the_memory(sandboxd: OwnSandboxd, hog: str) -> None:
    """Aim: let the guest, another call or a background job be killed instead of the hog, or leave the reason of a
    death unreported.
    """
    with sandboxd.session(session="hog") as session:
        session.start("exec sleep 777", state="use", timeout_s=500.0)
        session.start_job("exec sleep 888")
        session.wait_for("sleep 777")
        session.wait_for("sleep 888")
        done = session.bash(hog, timeout_s=20).done

        assert (done["oom"], session.watched.oom_kills() > 0) == (True, True)
        # On a busy host the last programs of the hog end a moment after its result.
        wait_until(
            lambda: sorted(session.programs().values()) == ["sleep 777", "sleep 888"],
            SOON_S,
            lambda: f"{sorted(session.programs().values())}\n{sandboxd.log()[-4000:]}",
        )
        assert session.is_usable()


LIMIT_NAMES = ["cpu=1:1", "nofile=0:0", "data=1:1", "as=1:1", "nproc=1:1", "fsize=0:0"]


def test_programs_cannot_change_the_limits_of_the_guest(sandboxd: OwnSandboxd) -> None:
    """Aim: end the sandbox at a chosen moment, as if its host had failed. PID 1 has the same user."""
    with sandboxd.session("first", "limits") as session:
        tries = "; ".join(f"prlimit --pid 1 --{limit} || echo refused" for limit in LIMIT_NAMES)
        answer = session.bash(f"{tries}; prlimit --pid 1 --nofile --noheadings | wc -l; ulimit -n 100 && ulimit -n")
        words = answer.streams["merged"].decode().split()
        assert words.count("refused") == len(LIMIT_NAMES), words
        assert words[-2:] == ["1", "100"], "a program may read the limits of others, and set its own"
        others = "sleep 9 & prlimit --pid $! --nofile=90:90 && prlimit --pid $$ --nofile=80:80 && ulimit -n"
        assert session.bash(others).streams["merged"].decode().split()[-1] == "80"
        assert session.bash("echo works").streams["merged"] == b"works\n"


def test_programs_cannot_take_the_processor_from_the_guest(sandboxd: OwnSandboxd) -> None:
    """Aim: make the sandbox unreachable with busy programs and a guest that the kernel runs last."""
    with sandboxd.session("first", "scheduling") as session:
        tries = ["chrt --idle -p 0 1", "chrt --batch -p 0 1", "renice 19 -p 1", "renice 19 -u 1000", "renice 19 -g 1"]
        tries += ["taskset -p 1 1", "ionice -c 3 -p 1", "ionice -c 3 -P 1", "ionice -c 3 -u 1000"]
        answer = session.bash("; ".join(f"{attempt} >/dev/null 2>&1 || echo refused" for attempt in tries))
        assert answer.streams["merged"].decode().split() == ["refused"] * len(tries)
        own = "sleep 9 & chrt --batch -p 0 $! && renice 5 -p $! && renice 5 -p $$ && chrt --idle -p 0 $$"
        own += " && taskset -p 1 $! && taskset -p 1 $$ && taskset 1 true && ionice -c 3 -p $! && ionice -c 3 true && echo own"
        assert session.bash(own).streams["merged"].decode().split()[-1] == "own"
