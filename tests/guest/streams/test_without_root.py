"""A stream server of a sandbox without root inside has the rights of the sandbox's user, and no others."""

import os
from collections.abc import Iterator

import pytest

from tests.support.guest.stream_client import RunningServer, StreamError, running_stream_server

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")
_UID = 234_567
_DROP = f"import os; os.setgroups([]); os.setresgid({_UID}, {_UID}, {_UID}); os.setresuid({_UID}, {_UID}, {_UID})"


@pytest.fixture
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    base = tmp_path_factory.mktemp("sandbox")
    for folder in (base, base.parent, base.parent.parent):
        folder.chmod(0o755)
    for name in ("workspace", "tmp", "output"):
        (base / name).mkdir()
        os.chown(base / name, _UID, _UID)
    with running_stream_server(base, _DROP) as running:
        yield running


def error_of(server: RunningServer, what: str, **fields: object) -> str:
    with pytest.raises(StreamError) as caught:
        server.client.open(what, **fields).end()
    return str(caught.value.code)


def test_files_are_written_read_listed_and_watched(server: RunningServer) -> None:
    watch = server.client.open("watch", path=".", recursive=True)
    watch.opened()
    stream = server.client.open("write", path="a/f", metadata={"k": "v"}, mode=0o600)
    stream.opened()
    stream.write(b"data", is_last=True)
    assert stream.end() == {"bytes": 4, "created": True}
    assert (server.workspace / "a/f").stat().st_uid == _UID
    reading = server.client.open("read", path="a/f")
    assert reading.opened()["metadata"] == {"k": "v"}
    reading.end()
    assert reading.data == b"data"
    listing = server.client.open("list", path=".", depth=2)
    assert listing.end() == {"entries": 2}
    watch.read_until(b'"write"')


def test_what_the_user_may_read_is_read_and_nothing_else(server: RunningServer) -> None:
    (server.workspace / "secret").write_bytes(b"of root")
    (server.workspace / "secret").chmod(0o600)
    assert error_of(server, "read", path="secret") == "PERMISSION_DENIED"
    stream = server.client.open("read", path="/etc/passwd")
    assert stream.end() == {}
    assert b"root" in stream.data
    assert error_of(server, "write", path="/etc/toolcrew-test") == "PERMISSION_DENIED"
    assert error_of(server, "read", path=f"/proc/{server.process.pid}/environ") == "PATH_NOT_ALLOWED"


@pytest.mark.parametrize("user", ["root", "nobody"])
def test_the_user_cannot_be_another_user(server: RunningServer, user: str) -> None:
    assert error_of(server, "read", path="/etc/passwd", user=user) == "PERMISSION_DENIED"
    with pytest.raises(StreamError) as caught:
        server.client.call("stat", path=".", user=user)
    assert caught.value.code == "PERMISSION_DENIED"


def test_children_are_closed_to_programs_of_the_same_user(server: RunningServer) -> None:
    """A program of the user cannot read the memory or the descriptors of a child: their files belong to root."""
    server.client.open("watch", path=".").opened()
    children = f"/proc/{server.process.pid}/task/{server.process.pid}/children"
    with open(children) as file:
        [child] = file.read().split()
    assert os.stat(f"/proc/{child}/fd").st_uid == 0
    with open(f"/proc/{child}/status") as file:
        assert f"Uid:\t{_UID}" in file.read()
