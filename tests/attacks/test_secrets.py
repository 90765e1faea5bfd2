"""Secrets of the operator of sandboxd, of the engine, and of other sessions. The tests search for a canary in the
sandbox, in the engine's answers, and in the log.
"""

import secrets
from collections.abc import Iterator

import pytest
from docker import APIClient

from tests.attack_sandboxd import HostileSession, OwnSandboxd, open_own_sandboxd
from tests.containers import Box
from tests.processes import read_proc

pytestmark = pytest.mark.stack

CANARY = f"canary-{secrets.token_hex(8)}"
NAMES = ("TOOLCREW_SECRET", "TOOLCREW_REDIS_URL", "OPENAI_API_KEY", "AWS_SECRET_ACCESS_KEY", "GITHUB_TOKEN")


@pytest.fixture(scope="module")
def rich(start: str, engine: APIClient) -> Iterator[OwnSandboxd]:
    """Return a sandboxd whose environment contains many secrets."""
    settings = {name: f"{name}-{CANARY}" for name in NAMES}
    with open_own_sandboxd(engine, {**settings, "TOOLCREW_SANDBOX_START": start}) as opened:
        yield opened


@pytest.fixture(scope="module")
def session(rich: OwnSandboxd) -> Iterator[HostileSession]:
    with rich.session("tenant-with-a-name", "session-with-a-name") as opened:
        yield opened


def test_read_a_secret_of_the_parent_process(shared_box: Box) -> None:
    """Aim: find a credential in the environment of PID 1."""
    answer = shared_box.run("cat /proc/1/environ | tr '\\0' '\\n' | cut -d= -f1")

    assert set(answer.output.split()) <= {"PATH", "HOME", "LANG", "TERM", "HOSTNAME"}


def test_find_a_secret_of_sandboxd_in_the_sandbox(session: HostileSession) -> None:
    """Aim: find a secret in a readable environment, command line or file."""
    places = "/proc/[0-9]*/environ /proc/[0-9]*/cmdline /etc /opt /run /var /home /tmp /workspace /output /dev/shm"
    answer = session.bash(
        f"env; grep -rsal --devices=skip {CANARY[:12]}'{CANARY[12:]}' {places} | grep -v '^/output'; echo done"
    )

    assert answer.streams["merged"].endswith(b"done\n")
    assert CANARY.encode() not in answer.streams["merged"]
    assert b"TOOLCREW" not in answer.streams["merged"]


def test_have_the_engine_or_proc_report_a_secret_or_a_tenant(rich: OwnSandboxd, session: HostileSession) -> None:
    """Aim of a user of the engine: find out which tenants are active, and their keys. So labels and environments must
    contain no secret.
    """
    result = session.watched.described()
    environments = b"".join(read_proc(pid, "environ") for pid in session.watched.processes())

    assert [word for word in (CANARY, "tenant-with-a-name", "session-with-a-name") if word in result] == []
    assert CANARY.encode() not in environments
    assert CANARY.encode() in read_proc(rich.process.pid, "environ")  # sandboxd has the canary


def test_have_a_command_or_its_output_written_into_the_log(rich: OwnSandboxd, session: HostileSession) -> None:
    """Aim of a reader of the log: find out what tenants do, also from failures."""
    session.bash(f"echo {CANARY}-typed; exit 3")
    session.bash(f"sleep 60 # {CANARY}", timeout_s=0.2)
    session.ask({"op": "read_file", "path": f"/workspace/{CANARY}", "max_bytes": 9, "timeout_s": 5})

    assert CANARY not in rich.log()


@pytest.mark.parametrize("of", ["1", "$PPID"])
@pytest.mark.parametrize("what", ["mem", "environ", "maps", "fd/0", "cwd/x", "stack", "syscall"])
def test_read_what_the_guest_has_in_its_memory(session: HostileSession, of: str, what: str) -> None:
    """Aim: read ids and bodies of other calls, and all other data of PID 1 and of a supervisor."""
    answer = session.bash(f"head -c 1 /proc/{of}/{what} && echo read")

    assert b"read\n" not in answer.streams["merged"]
    assert b"Permission denied" in answer.streams["merged"]
