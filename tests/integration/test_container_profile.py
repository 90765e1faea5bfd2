"""The profile on a real engine. The engine reports the profile, the kernel enforces it, and a probe tests every
system call.
"""

import base64
import gzip
import io
import re
import subprocess
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import docker.errors
import pytest
from docker import APIClient

from tests.support.sandboxd.containers import (
    IMAGE,
    LABELS,
    Box,
    build_config,
    create,
    open_box,
    open_container,
    open_engine,
)
from toolcrew.workers.sandboxd.runtime.hardening import SandboxLimits, find_drift

pytestmark = pytest.mark.stack

PROBE_SOURCE = Path(__file__).with_name("syscall_probe.c")


@dataclass(frozen=True)
class Expected:
    """A line of syscall_golden.txt."""

    answers: frozenset[str]
    marks: frozenset[str]


def load_golden() -> dict[str, Expected]:
    lines = PROBE_SOURCE.with_name("syscall_golden.txt").read_text().splitlines()
    rows = [line.split() for line in lines if line and not line.startswith("#")]
    return {name: Expected(frozenset(answers.split("|")), frozenset(marks)) for name, answers, *marks in rows}


GOLDEN = load_golden()
HALF_KIB = SandboxLimits().half_bytes // 1024


@pytest.fixture(scope="module")
def engine() -> APIClient:
    return open_engine()


@pytest.fixture(scope="module")
def box(engine: APIClient) -> Iterator[Box]:
    with open_box(engine) as opened:
        yield opened


@pytest.fixture(scope="module")
def probe(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return shell lines that unpack the probe into the workspace and run it. Programs can run only from there."""
    binary = tmp_path_factory.mktemp("probe") / "probe"
    flags = ["-O1", "-Wall", "-Wextra", "-Werror", "-static", "-no-pie", "-pthread", "-s"]
    subprocess.run(["gcc", *flags, "-o", str(binary), str(PROBE_SOURCE)], check=True)
    packed = base64.encodebytes(gzip.compress(binary.read_bytes())).decode()
    unpack = f"base64 -d <<'END' | gunzip >/workspace/probe\n{packed}END\n"
    return f"{unpack}chmod 700 /workspace/probe && /workspace/probe"


def ask(box: Box, probe: str) -> dict[str, str]:
    answer = box.run(probe)
    assert answer.status == 0, answer.output
    return dict(line.split() for line in answer.output.splitlines() if line)


@pytest.fixture(scope="module")
def answers(box: Box, probe: str) -> dict[str, str]:
    return ask(box, probe)


def test_a_new_container_has_no_drift_from_the_profile(engine: APIClient) -> None:
    config = build_config(engine)
    with open_container(engine, config) as container:
        assert find_drift(config, engine.inspect_container(container)) == []


def test_a_running_container_has_no_drift_from_the_profile(engine: APIClient, box: Box) -> None:
    assert find_drift(build_config(engine) | {"Entrypoint": ["/bin/sh"]}, box.inspect()) == []


def test_the_engine_returns_no_warning_for_the_profile(engine: APIClient) -> None:
    created = create(engine, build_config(engine))
    engine.remove_container(created["Id"], force=True)

    assert created["Warnings"] in ([], None)


def test_an_image_with_a_volume_and_extra_variables_is_reported_as_drift(engine: APIClient) -> None:
    name = "toolcrew-test-smuggler"
    empty = io.BytesIO()
    tarfile.open(fileobj=empty, mode="w").close()
    engine.import_image_from_data(
        empty.getvalue(), repository=name, changes=["VOLUME /data", "ENV LD_PRELOAD=/data/x.so SMUGGLED=1"]
    )
    try:
        config = build_config(engine, image=name)
        with open_container(engine, config) as container:
            inspected = engine.inspect_container(container)
            drift = " ".join(find_drift(config, inspected))
    finally:
        engine.remove_image(name, force=True)

    assert "Mounts has /data (volume)" in drift
    assert "SMUGGLED=1" in drift
    assert "Config.Volumes" in drift


def test_the_kernel_reports_no_privileges(box: Box) -> None:
    status = box.status_of()

    assert status["Uid"].split() == status["Gid"].split() == ["1000"] * 4
    assert {int(status[name], 16) for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")} == {0}
    assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")


@pytest.mark.parametrize("namespace", ["mnt", "net", "pid", "ipc", "uts"])
def test_the_container_has_its_own_namespace(box: Box, namespace: str) -> None:
    assert Path(f"/proc/{box.pid}/ns/{namespace}").readlink() != Path(f"/proc/self/ns/{namespace}").readlink()


def test_the_kernel_enforces_the_limits(box: Box) -> None:
    limits = SandboxLimits()
    memory = box.cgroup_file("memory", "memory.limit_in_bytes", "memory.max").read_text()
    pids = box.cgroup_file("pids", "pids.max", "pids.max").read_text()
    shown = Path(f"/proc/{box.pid}/limits").read_text()

    assert int(memory) == limits.memory_bytes()
    assert int(pids) == limits.pids
    assert f"Max file size             {limits.workspace_bytes}            {limits.workspace_bytes} " in shown
    assert re.search(rf"Max open files +{limits.nofile} +{limits.nofile} ", shown)
    assert "Max core file size        0                    0 " in shown


def test_the_kernel_allows_no_swap_in_addition_to_memory(box: Box) -> None:
    swap = int(box.cgroup_file("memory", "memory.memsw.limit_in_bytes", "memory.swap.max").read_text())

    assert swap in (0, SandboxLimits().memory_bytes())  # version 2 counts swap alone, version 1 both


def test_the_kernel_limits_the_cpu(box: Box) -> None:
    quota = box.cgroup_file("cpu", "cpu.cfs_quota_us", "cpu.max").read_text().split()
    period = quota[1:] or box.cgroup_file("cpu", "cpu.cfs_period_us", "cpu.max").read_text().split()

    assert int(quota[0]) == int(period[0]) * SandboxLimits().cpus


@pytest.mark.parametrize(
    ("place", "options", "size"),
    [
        ("/", {"ro"}, None),
        (
            "/workspace",
            {"rw", "nosuid", "nodev", "size=262144k", "nr_inodes=65536", "uid=1000", "gid=1000"},
            "mode=755",
        ),
        ("/tmp", {"rw", "nosuid", "nodev", f"size={HALF_KIB}k", "nr_inodes=16384"}, None),
        ("/home/sandbox", {"rw", "nosuid", "nodev", f"size={HALF_KIB}k", "nr_inodes=16384"}, None),
        ("/dev/shm", {"rw", "nosuid", "nodev", "noexec", f"size={HALF_KIB}k"}, None),
    ],
)
def test_a_mount_has_the_requested_options(box: Box, place: str, options: set[str], size: str | None) -> None:
    rows = [line.split() for line in box.mounts().splitlines()]
    row = next(row for row in reversed(rows) if row[4] == place)
    found = {*row[5].split(","), *row[-1].split(",")}

    assert options | ({size} if size else set()) <= found
    assert place != "/workspace" or "noexec" not in found


def test_every_writable_folder_is_a_mount_with_a_limit(box: Box) -> None:
    """A sandbox can fill everything that it can write to, so every such folder needs a limit."""
    found = box.run("find / -xdev -writable ! -type l 2>/dev/null; find /dev -type d -writable 2>/dev/null")

    assert set(found.output.split()) == {"/workspace", "/tmp", "/home/sandbox", "/output", "/dev/shm", "/dev/mqueue"}


def test_the_probe_and_the_golden_table_list_the_same_system_calls(answers: dict[str, str]) -> None:
    assert set(answers) == set(GOLDEN)


@pytest.mark.parametrize("name", GOLDEN)
def test_the_kernel_answers_a_system_call_as_designed(answers: dict[str, str], name: str) -> None:
    if answers[name] == "absent":
        assert "x86_64" in GOLDEN[name].marks
        pytest.skip("a call of x86-64 only")
    if name.startswith("i386_") and answers["i386_getpid"] == "SIG11":
        pytest.skip("this kernel has no 32-bit calls")
    assert answers[name] in GOLDEN[name].answers


def test_without_the_profile_the_probe_succeeds(engine: APIClient, probe: str) -> None:
    """The probe can fail: it distinguishes a refusal of the filter from a refusal of the kernel."""
    with open_box(engine, changes={"SecurityOpt": ["no-new-privileges", "seccomp=unconfined"]}) as unfiltered:
        answers = ask(unfiltered, probe)

    proofs = [name for name, expected in GOLDEN.items() if "profile" in expected.marks and answers[name] != "absent"]
    assert len(proofs) >= 20
    assert [name for name in proofs if answers[name] in GOLDEN[name].answers] == []


@pytest.mark.parametrize(
    "script",
    [
        (
            "cd /workspace && git init -q r && cd r && git -c user.name=a -c user.email=a@b commit -q --allow-empty -m "
            "x && git log --oneline"
        ),
        "rg -q root /etc/passwd",
        "timeout 5 bash -c 'true | true; coproc true; wait'",
        "getent passwd sandbox",
        "mkfifo /workspace/f && rm /workspace/f",
        "printf 'import os; os.replace' >/workspace/m.py && python3 -m py_compile /workspace/m.py",
        """python3 - <<'END'
import concurrent.futures, multiprocessing, subprocess, threading
with concurrent.futures.ThreadPoolExecutor(4) as pool: assert sum(pool.map(int, '1234')) == 10
with multiprocessing.Pool(2) as pool: assert pool.map(abs, [-1]) == [1]
subprocess.run(['true'], check=True)
END""",
        """python3 - <<'END'
import socket
for family, place in ((socket.AF_INET, '127.0.0.1'), (socket.AF_INET6, '::1')):
    server = socket.create_server((place, 0), family=family)
    client = socket.create_connection(server.getsockname()[:2])
    server.accept()[0].sendall(b'x')
    assert client.recv(1) == b'x'
END""",
    ],
    ids=["git", "ripgrep", "bash", "getent", "mkfifo", "compile", "python processes", "loopback servers"],
)
def test_common_programs_work_under_the_profile(box: Box, script: str) -> None:
    answer = box.run(script)

    assert answer.status == 0, answer.output


def test_the_test_harness_leaves_no_container(engine: APIClient) -> None:
    with open_container(engine, build_config(engine)) as container:
        assert engine.inspect_container(container)["Config"]["Labels"].items() >= LABELS.items()
        assert engine.inspect_container(container)["Config"]["Image"] == IMAGE

    with pytest.raises(docker.errors.NotFound):
        engine.inspect_container(container)
