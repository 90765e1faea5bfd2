"""Files, watches and ports through the stream channel of a real sandbox: each with the rights of its user, no more."""

import asyncio
import contextlib
import json
from collections.abc import Iterator

import pytest
from docker import APIClient

from tests.support.guest.stream_client import StreamClient, StreamError
from tests.support.sandboxd.attack_sandboxd import HostileSession, open_own_sandboxd
from toolcrew.workers.stream_channels import open_channel

pytestmark = pytest.mark.stack


@contextlib.contextmanager
def opened_stream_client(engine: APIClient, user: str | None) -> Iterator[tuple[HostileSession, StreamClient]]:
    classes = {"default": {"user": user} if user else {}}
    settings = {"TOOLCREW_TENANT_CLASSES": json.dumps(classes), "TOOLCREW_SANDBOX_START": "oci"}
    with open_own_sandboxd(engine, settings) as sandboxd, sandboxd.session() as session:
        channel = asyncio.run(open_channel(sandboxd.path, "acme:s1", 1))
        channel.sock.setblocking(True)
        client = StreamClient(channel.sock)
        try:
            client.begin_epoch()
            yield session, client
        finally:
            channel.close()


@pytest.fixture(scope="module")
def plain(engine: APIClient) -> Iterator[tuple[HostileSession, StreamClient]]:
    with opened_stream_client(engine, None) as opened:
        yield opened


@pytest.fixture(scope="module")
def rooted(engine: APIClient) -> Iterator[tuple[HostileSession, StreamClient]]:
    with opened_stream_client(engine, "root") as opened:
        yield opened


def write(client: StreamClient, path: str, data: bytes, **fields: object) -> dict[str, object]:
    stream = client.open("write", path=path, **fields)
    stream.opened()
    stream.write(data, is_last=True)
    return stream.end()


def read(client: StreamClient, path: str, **fields: object) -> bytes:
    stream = client.open("read", path=path, **fields)
    stream.end()
    return stream.data


def error_of(client: StreamClient, what: str, **fields: object) -> str:
    with pytest.raises(StreamError) as caught:
        client.open(what, **fields).end()
    return str(caught.value.code)


def output(session: HostileSession, script: str) -> str:
    return session.bash(script).streams.get("merged", b"").decode(errors="replace")


@pytest.mark.parametrize("sandbox", ["plain", "rooted"])
def test_streams_and_programs_see_the_same_files(sandbox: str, request: pytest.FixtureRequest) -> None:
    session, client = request.getfixturevalue(sandbox)
    watch = client.open("watch", path=".", recursive=True)
    watch.opened()
    write(client, "a/f", b"of a stream", metadata={"kind": "x"})
    assert output(session, "cat a/f; echo of a program > a/g") == "of a stream"
    assert read(client, "a/g") == b"of a program\n"
    watch.read_until(b'"a/g"')
    watch.close()
    assert client.call("stat", path="a/f")["entry"]["metadata"] == {"kind": "x"}
    assert client.call("move", source="a", target="/tmp/moved/a")["entry"]["type"] == "directory"
    assert client.call("stat", path="/tmp/moved/a/f")["entry"]["metadata"] == {"kind": "x"}
    assert client.call("remove", path="/tmp/moved") == {"removed": 1}
    assert output(session, "ls /workspace /tmp") == "/tmp:\n\n/workspace:\n"


@pytest.mark.parametrize("sandbox", ["plain", "rooted"])
@pytest.mark.parametrize(
    "path", ["/proc/1/environ", "/proc/self/mem", "/sys/kernel/notes", "/dev/null", "/workspace/link"]
)
def test_files_of_the_kernel_are_closed(sandbox: str, path: str, request: pytest.FixtureRequest) -> None:
    session, client = request.getfixturevalue(sandbox)
    output(session, "ln -sfn /proc/1/environ /workspace/link")
    assert error_of(client, "read", path=path) == "PATH_NOT_ALLOWED"
    assert error_of(client, "write", path=path) == "PATH_NOT_ALLOWED"


@pytest.mark.parametrize("path", ["/etc/passwd", "/opt/toolcrew/bin/bash", "/usr/bin/new", "/new"])
def test_the_read_only_root_stays_as_it_is(plain: tuple[HostileSession, StreamClient], path: str) -> None:
    _, client = plain
    assert error_of(client, "write", path=path) == "PERMISSION_DENIED"
    assert error_of(client, "write", path="f", user="root") == "PERMISSION_DENIED"


def test_root_inside_cannot_change_the_guest(rooted: tuple[HostileSession, StreamClient]) -> None:
    session, client = rooted
    assert error_of(client, "write", path="/opt/toolcrew/bin/bash") == "PERMISSION_DENIED"
    with pytest.raises(StreamError):
        client.call("remove", path="/opt/toolcrew/guest")
    assert session.is_usable()
    write(client, "/etc/mine", b"1")
    assert output(session, "cat /etc/mine") == "1"


def test_root_inside_works_as_another_user_with_its_rights_only(rooted: tuple[HostileSession, StreamClient]) -> None:
    session, client = rooted
    output(session, "mkdir -m 777 /workspace/open; echo secret > /root/secret; chmod 600 /root/secret")
    write(client, "open/f", b"1", user="sandbox")
    assert output(session, "stat -c '%U %G' open/f") == "sandbox sandbox\n"
    assert error_of(client, "read", path="/root/secret", user="sandbox") == "PERMISSION_DENIED"
    assert error_of(client, "write", path="/etc/mine", user="sandbox") == "PERMISSION_DENIED"
    # The process of the operation has the user's rights, and stays closed to the programs of the user.
    client.open("watch", path="open", user="sandbox").opened()
    script = "for p in $(pgrep -u sandbox); do setpriv --reuid=1000 --clear-groups cat /proc/$p/environ 2>&1; done"
    assert "denied" in output(session, script)


@pytest.mark.parametrize("sandbox", ["plain", "rooted"])
def test_a_port_is_that_of_a_program_of_the_sandbox(sandbox: str, request: pytest.FixtureRequest) -> None:
    _, client = request.getfixturevalue(sandbox)
    # Programs of the host that listen at its loopback are another network.
    for port in (22, 80, 2375, 5432, 6379, 8000):
        assert error_of(client, "port", port=port) == "NETWORK_ERROR"
    assert error_of(client, "port", port=3128) == "INVALID_ARGUMENTS"
