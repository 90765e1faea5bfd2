"""PID 1 and the stream server: its start at the first byte, its death, and what kills of calls leave alone."""

import contextlib
import os
import secrets
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.guest.guest_harness import DEADLINE_S, GUEST_PARENT, PYTHON, Guest, needs_namespace, running_guest
from tests.support.guest.stream_client import ClientStream, StreamClient
from tests.support.stack.waiting import wait_until

pytestmark = needs_namespace


@pytest.fixture
def guest() -> Iterator[Guest]:
    with running_guest(idle_s=0.05, has_streams=True) as running:
        yield running


@contextlib.contextmanager
def entered_server(guest: Guest) -> Iterator[StreamClient]:
    """Start a stream server in a running sandbox, as runtimes without a channel of PID 1 do."""
    code = (
        f"import sys; sys.path.insert(0, {str(GUEST_PARENT)!r}); from guest.streams.entry import serve_streams;"
        "from guest.loop import read_options_of_pid_1; from guest.paths import GuestPaths; import os;"
        f"read_options_of_pid_1(); serve_streams(0, 1, GuestPaths(({str(guest.workspace)!r}.encode(),)))"
    )
    uid = os.stat(f"/proc/{guest.pid}").st_uid or os.stat(guest.workspace).st_uid
    enter = ["nsenter", "--pid", "--mount", "-t", str(guest.pid), "setpriv", f"--reuid={uid}", "--clear-groups"]
    own, servers = socket.socketpair()
    with own:
        process = subprocess.Popen(
            [*enter, PYTHON, "-I", "-S", "-c", code], stdin=servers.fileno(), stdout=servers.fileno()
        )
        servers.close()
        client = StreamClient(own)
        client.begin_epoch()
        yield client
        own.close()
        assert process.wait(DEADLINE_S) == 0


def client_of(guest: Guest) -> StreamClient:
    client = StreamClient(guest.streams)
    client.begin_epoch()
    return client


def start_sleep(client: StreamClient) -> ClientStream:
    stream = client.open("process", argv=["bash", "-c", "setsid sleep 1000 & echo started; exec sleep 1000"])
    stream.read_until(b"started\n")
    return stream


def jobs_of(guest: Guest) -> int:
    request = secrets.token_hex(16)
    guest.send({"id": request, "op": "attest", "timeout_s": 5})
    return int(guest.finish(request)["jobs"])


def processor_ticks(guest: Guest) -> int:
    fields = Path(f"/proc/{guest.pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def test_a_guest_without_a_byte_of_streams_has_no_server(guest: Guest) -> None:
    guest.run("true")
    assert guest.wait_alone()
    assert client_of(guest).call("processes") == {"processes": []}
    assert len(guest.others()) == 1


def test_a_guest_without_a_channel_runs_calls() -> None:
    with running_guest() as guest:
        assert guest.run("echo x").bytes_of("stdout") == b"x\n"


def test_programs_do_not_inherit_the_channel(guest: Guest) -> None:
    assert guest.run("ls /proc/self/fd").bytes_of("stdout").split() == [b"0", b"1", b"2", b"3"]  # 3: the folder
    stream = client_of(guest).open("process", argv=["ls", "/proc/self/fd"])
    stream.end()
    assert stream.data.split() == [b"0", b"1", b"2", b"3"]


def test_processes_have_the_variables_of_the_session(guest: Guest) -> None:
    request = secrets.token_hex(16)
    guest.send({"id": request, "op": "set_variables", "timeout_s": 5, "variables": {"OF_SESSION": "x y"}})
    guest.finish(request)
    stream = client_of(guest).open("process", argv=["bash", "-c", "echo $OF_SESSION; pwd"])
    stream.end()
    assert stream.data.decode() == f"x y\n{guest.workspace}\n"


@pytest.mark.parametrize("kind", ["forked", "entered"])
def test_kills_of_calls_spare_processes_of_streams(guest: Guest, kind: str) -> None:
    with contextlib.nullcontext(client_of(guest)) if kind == "forked" else entered_server(guest) as client:
        stream = start_sleep(client)
        assert jobs_of(guest) == 1
        assert guest.run("setsid sleep 1000 & sleep 1000", timeout_s=0.2)["kill"]["survivors"] == 0
        # The supervisor is killed: PID 1 kills what it left, with one kill of all processes if it may.
        done = guest.run("setsid sleep 1000 & kill -9 $PPID; sleep 1000", timeout_s=10)
        assert done["supervisor_killed"]
        assert done["kill"]["survivors"] == 0
        assert client.call("wait", process=stream.opened()["process"], timeout_s=0) == {"running": True}
        wait_until(lambda: len(guest.others()) == 3, DEADLINE_S, "only the server and its two processes are left")
        client.call("signal", process=stream.opened()["process"], signal=9, tree=True)
        stream.end()


def test_a_killed_server_is_replaced_and_its_processes_are_killed(guest: Guest) -> None:
    client = client_of(guest)
    old = start_sleep(client).opened()["process"]
    assert len(guest.others()) == 3
    # A program of the sandbox kills the server, which has the same user.
    guest.run("for one in /proc/[0-9]*; do [ $(cat $one/comm) = streams ] && kill -9 ${one#/proc/}; done")
    client.frames.clear()
    client.await_restart()
    wait_until(lambda: len(guest.others()) == 1, DEADLINE_S, "only the new server is left")
    client.begin_epoch()
    new = start_sleep(client).opened()["process"]
    assert new > old
    assert [entry["process"] for entry in client.call("processes")["processes"]] == [new]
    assert guest.run("echo well").bytes_of("stdout") == b"well\n"


def test_the_end_of_the_channel_ends_the_processes_and_not_the_guest(guest: Guest) -> None:
    client = client_of(guest)
    start_sleep(client)
    client.channel.close()
    assert guest.wait_alone(), guest.others()
    assert guest.run("echo well").bytes_of("stdout") == b"well\n"


def test_the_end_of_an_unused_channel_costs_nothing(guest: Guest) -> None:
    guest.streams.close()
    assert guest.run("echo well").bytes_of("stdout") == b"well\n"
    assert guest.wait_alone()
    used = processor_ticks(guest)
    guest.run("sleep 0.3")
    assert processor_ticks(guest) - used < 10


def test_the_guest_ends_with_processes_of_streams(guest: Guest) -> None:
    start_sleep(client_of(guest))
    guest.close_stdin()
    assert guest.wait_exit() == 0
