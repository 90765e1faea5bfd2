"""Attacks on neighbours. Programs of another session can neither see nor change anything of a session, whether the
tenant is the same or another.
"""

from collections.abc import Iterator

import pytest
from docker import APIClient

from tests.support.sandboxd.attack_sandboxd import HostileSession, OwnSandboxd
from tests.support.sandboxd.containers import Box, open_box, python
from toolcrew.contract.errors import ErrorCode, ToolFailure
from toolcrew.workers.sandbox_client import SandboxClient

pytestmark = pytest.mark.stack

VICTIM_WORD = "first-tenants-own"
KEY = 0x70C0


@pytest.fixture(scope="module")
def victim(sandboxd: OwnSandboxd) -> Iterator[HostileSession]:
    """Yield the first tenant's session, with an example of everything that processes can share."""
    with sandboxd.session("first", "s1") as session:
        session.bash(
            f"for place in /workspace /tmp /output /dev/shm; do echo {VICTIM_WORD} >$place/{VICTIM_WORD}; chmod 777 $place/{VICTIM_WORD}; "
            "done"
        )
        session.start_job(
            f"perl -e 'shmget({KEY}, 4096, 01777); msgget({KEY}, 01777); semget({KEY}, 1, 01777); sleep 500' & "
            + python(f"""
import socket, time
server = socket.socket(socket.AF_UNIX); server.bind('\\0{VICTIM_WORD}'); server.listen()
inside = socket.create_server(('127.0.0.1', 4455))
open('/workspace/ready', 'w').write('x')
time.sleep(500)
""")
        )
        session.bash("until [ -e /workspace/ready ] && [ $(wc -l </proc/sysvipc/sem) = 2 ]; do sleep 0.02; done")
        yield session


@pytest.fixture(scope="module", params=["second", "first"])
def neighbour(
    sandboxd: OwnSandboxd, victim: HostileSession, request: pytest.FixtureRequest
) -> Iterator[HostileSession]:
    """Yield a session of another tenant, and another session of the same tenant."""
    assert victim.programs()
    with sandboxd.session(request.param, "neighbour") as session:
        yield session


def test_files_processes_and_sockets_of_another_session_are_not_visible(neighbour: HostileSession) -> None:
    """Aim: read the files or processes of another session: folders, guessed paths, /proc, System V keys, abstract
    names and loopback.
    """
    found = neighbour.bash(
        f"ls -AR /workspace /tmp /dev/shm /dev/mqueue | grep {VICTIM_WORD[:-1]}[{VICTIM_WORD[-1]}]; cat /proc/[0-9]*/cmdline | tr "
        f"'\\0' ' ' | grep -e 'sleep [5]00' -e 'shmge[t]'; cat /proc/sysvipc/* | grep -c ' {KEY} '; grep -c {VICTIM_WORD} "
        "/proc/net/unix; grep -c :1167 /proc/net/tcp; cat /proc/keys"
    )

    lines = [line for line in found.streams["merged"].decode().splitlines() if "Permission denied" not in line]
    assert lines == ["0", "0", "0"]


def test_shared_objects_of_another_session_cannot_be_opened_by_key_or_name(neighbour: HostileSession) -> None:
    """Aim: guess a key. Namespaces must make the same key a different object."""
    answer = neighbour.bash(
        (
            f"perl -e 'print defined(shmget({KEY}, 0, 0)) || defined(msgget({KEY}, 0)) || defined(semget({KEY}, 0, 0)) "
            "? "
            '"found" : "none"\'\n'
        )
        + python(f"""
import socket
for family, address in ((socket.AF_UNIX, '\\0{VICTIM_WORD}'), (socket.AF_INET, ('127.0.0.1', 4455))):
    try: socket.socket(family).connect(address); print('found')
    except ConnectionRefusedError: print('none')
""")
    )

    assert answer.streams["merged"].decode().split() == ["nonenone", "none"]


def test_file_tools_cannot_read_a_path_of_another_session(neighbour: HostileSession, victim: HostileSession) -> None:
    """Aim: read the exact path through the tools, or through the container's pid."""
    paths = [f"/{place}/{VICTIM_WORD}" for place in ("workspace", "tmp", "output")]
    paths += [
        f"/proc/{victim.watched.pid}/root/workspace/{VICTIM_WORD}",
        f"/proc/1/root/workspace/{VICTIM_WORD}",
        f"/../{victim.watched.id}/{VICTIM_WORD}",
    ]
    answers = [neighbour.ask({"op": "read_file", "path": path, "max_bytes": 99, "timeout_s": 5}) for path in paths]

    assert {answer.done["error"]["code"] for answer in answers} <= {"FILE_NOT_FOUND", "PATH_NOT_ALLOWED"}
    assert [answer.streams for answer in answers] == [{}] * len(paths)


@pytest.mark.parametrize(
    "name", ["first:s2", "second:s1", "s1", "first", ":s1", "first:", "first:s1:", "first:s1/", "FIRST:s1", " first:s1"]
)
def test_a_guessed_session_id_reaches_no_session(sandboxd: OwnSandboxd, victim: HostileSession, name: str) -> None:
    """Aim: reach another session with an id that is similar to its id. The ids of a worker come from a signed
    context.
    """
    assert victim.name == "first:s1"
    with SandboxClient(sandboxd.path) as client, pytest.raises(ToolFailure) as caught:
        client.call(name, {"op": "ping", "timeout_s": 2})

    assert caught.value.code is ErrorCode.SESSION_NOT_FOUND


def test_processes_of_another_session_cannot_be_signalled_by_host_pid(
    neighbour: HostileSession, victim: HostileSession
) -> None:
    """Aim: signal processes of other sandboxes. All sandboxes of a host have the same uid, but their pids must be
    separate.
    """
    before = victim.programs()
    numbers = " ".join(str(pid) for pid in [victim.watched.pid, *victim.watched.processes()])
    answer = neighbour.bash(
        f"for pid in {numbers}; do kill -9 $pid; renice 19 $pid; taskset -p 1 $pid; prlimit --pid $pid --nofile=1; "
        "done; true"
    )

    assert answer.streams["merged"].decode().lower().count("no such process") >= len(numbers.split())
    assert victim.programs() == before


def test_writable_folders_are_not_shared_between_containers(engine: APIClient, box: Box) -> None:
    """Aim: find files of another container in a writable folder."""
    with open_box(engine) as neighbour:
        box.run("echo mine >/workspace/f; echo mine >/tmp/f; echo mine >/output/f; echo mine >/dev/shm/f")
        found = neighbour.run("ls -A /workspace /tmp /output /dev/shm; tail -n +2 /proc/sysvipc/shm")

    assert found.output.split() == ["/dev/shm:", "/output:", "/tmp:", "/workspace:"]


def test_processes_of_the_host_are_not_visible(shared_box: Box) -> None:
    """Aim: find the engine, sandboxd or a worker among the visible processes."""
    answer = shared_box.run("ls -d /proc/[0-9]* | wc -l; cat /proc/[0-9]*/cmdline | tr '\\0' ' '")
    count = int(answer.output.split()[0])

    assert count <= 6
    assert "dockerd" not in answer.output


def test_a_new_session_never_gets_a_used_container(sandboxd: OwnSandboxd) -> None:
    """Aim: find data of the previous session in a reused container."""
    with sandboxd.session("first", "before") as before:
        before.bash(
            f"echo {VICTIM_WORD} | tee /workspace/f /tmp/f /output/f /dev/shm/f; cd /tmp; export LEFT={VICTIM_WORD}"
        )
        container = before.watched.id
    with sandboxd.session("second", "after") as after:
        found = after.bash(f"echo in $LEFT $PWD; grep -rs {VICTIM_WORD} /workspace /tmp /dev/shm /output --include=f")

        assert found.streams["merged"] == b"in /workspace\n"
        assert after.watched.id != container
