"""Streams that read and write files: every byte, any range, and a file that is whole or unchanged."""

import os
import socket
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.guest.disks import small_disk
from tests.support.guest.stream_client import RunningServer, StreamError
from tests.support.stack.waiting import SOON_S, wait_until

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root inside can be another user")


def write(server: RunningServer, path: str, data: bytes, **fields: object) -> dict[str, object]:
    stream = server.client.open("write", path=path, **fields)
    stream.opened()
    stream.write(data, is_last=True)
    return stream.end()


def read(server: RunningServer, path: str, **fields: object) -> bytes:
    stream = server.client.open("read", path=path, **fields)
    stream.end()
    return stream.data


def error_of(server: RunningServer, what: str, **fields: object) -> str:
    with pytest.raises(StreamError) as caught:
        server.client.open(what, **fields).end()
    return str(caught.value.code)


def names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_a_relative_path_is_below_the_workspace_and_folders_are_created(server: RunningServer) -> None:
    assert write(server, "a/b/c.txt", b"hello") == {"bytes": 5, "created": True}
    assert (server.workspace / "a/b/c.txt").read_bytes() == b"hello"
    assert names(server.workspace) == ["a", "a/b", "a/b/c.txt"]
    assert read(server, str(server.workspace / "a/b/c.txt")) == b"hello"


def test_opened_says_what_the_file_is(server: RunningServer) -> None:
    file = server.workspace / "f"
    file.write_bytes(b"0123456789")
    file.chmod(0o640)
    os.utime(file, (5, 1000.5))
    stream = server.client.open("read", path="f", offset=2, bytes=3)
    assert stream.opened() == {"size": 10, "mode": 0o640, "modified_at": 1000.5, "metadata": {}}
    assert stream.end() == {}
    assert stream.data == b"234"


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    size=st.integers(0, 400_000),
    window=st.integers(700, 100_000),
    offset=st.integers(0, 400_000),
    count=st.none() | st.integers(0, 400_000),
)
def test_a_range_of_what_was_written_is_read_back(
    server: RunningServer, size: int, window: int, offset: int, count: int | None
) -> None:
    data = os.urandom(size)
    offset = min(offset, size)
    assert write(server, "f", data)["bytes"] == size
    stream = server.client.open("read", path="f", offset=offset, bytes=count, window=0)
    while stream.end_fields is None:
        if stream.granted == stream.received:
            stream.grant(window)
        stream.step()
    assert stream.end_fields == {}
    assert stream.data == data[offset:][:count]


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.tuples(st.integers(0, 60_000), st.integers(0, 60_000)), min_size=1, max_size=4),
    st.integers(0, 50_000),
)
def test_writes_at_offsets_act_like_writes_into_a_buffer(
    server: RunningServer, pieces: list[tuple[int, int]], size: int
) -> None:
    expected = bytearray(os.urandom(size))
    (server.workspace / "f").write_bytes(expected)
    for offset, count in pieces:
        data = os.urandom(count)
        assert write(server, "f", data, offset=offset) == {"bytes": count, "created": False}
        if count:
            expected += bytes(max(0, offset - len(expected)))
            expected[offset : offset + count] = data
    assert (server.workspace / "f").read_bytes() == expected


def test_a_large_file_passes_in_constant_memory(server: RunningServer) -> None:
    block = os.urandom(1 << 20)
    stream = server.client.open("write", path="big")
    stream.opened()
    before = server.memory_bytes
    for _ in range(64):
        stream.write(block)
    stream.write(b"", is_last=True)
    assert stream.end()["bytes"] == 64 << 20
    with open(server.workspace / "big", "rb") as file:
        assert all(file.read(1 << 20) == block for _ in range(64))
    stream = server.client.open("read", path="big")
    stream.end()
    assert stream.received == 64 << 20
    assert server.memory_bytes - before < 2 << 20


def test_without_credit_nothing_is_sent_and_other_streams_go_on(server: RunningServer) -> None:
    (server.workspace / "f").write_bytes(bytes(1 << 20))
    slow = server.client.open("read", path="f", window=0)
    slow.opened()
    assert read(server, "f", bytes=100) == bytes(100)
    assert slow.received == 0
    slow.grant(65_536)
    slow.end()
    assert slow.received == 1 << 20


def test_the_file_is_replaced_only_when_the_last_byte_has_arrived(server: RunningServer) -> None:
    file = server.workspace / "f"
    file.write_bytes(b"old")
    file.chmod(0o751)
    stream = server.client.open("write", path="f")
    stream.opened()
    stream.write(b"new ")
    assert read(server, "f") == b"old"
    stream.write(b"content", is_last=True)
    assert stream.end() == {"bytes": 11, "created": False}
    assert (file.read_bytes(), file.stat().st_mode & 0o7777) == (b"new content", 0o751)
    assert names(server.workspace) == ["f"]


@pytest.mark.parametrize("has_old", [False, True])
def test_a_client_that_leaves_changes_nothing(server: RunningServer, has_old: bool) -> None:
    if has_old:
        (server.workspace / "f").write_bytes(b"old")
    stream = server.client.open("write", path="sub/f" if not has_old else "f")
    stream.opened()
    stream.write(bytes(100_000))
    stream.close()
    expected = ["f"] if has_old else []
    wait_until(lambda: names(server.workspace) == expected, SOON_S, "the write ends")
    assert not has_old or (server.workspace / "f").read_bytes() == b"old"


def test_a_client_that_leaves_keeps_what_was_written_at_an_offset(server: RunningServer) -> None:
    stream = server.client.open("write", path="f", offset=0)
    stream.opened()
    stream.write(b"first")
    wait_until(lambda: (server.workspace / "f").read_bytes() == b"first", SOON_S, "the write ends")
    stream.close()
    assert write(server, "f", b" second", offset=5) == {"bytes": 7, "created": False}
    assert (server.workspace / "f").read_bytes() == b"first second"


def test_the_end_of_the_channel_leaves_no_part_of_a_file(server: RunningServer) -> None:
    stream = server.client.open("write", path="sub/f")
    stream.opened()
    stream.write(bytes(100_000))
    server.client.channel.shutdown(socket.SHUT_RDWR)
    server.process.wait(SOON_S)
    assert not [path for path in server.workspace.rglob("*") if path.is_file()]


def test_hard_links_and_the_owner_stay_and_an_unfinished_upload_changes_nothing(server: RunningServer) -> None:
    (server.workspace / "f").write_bytes(b"old content")
    os.link(server.workspace / "f", server.workspace / "g")
    stream = server.client.open("write", path="f")
    stream.opened()
    stream.write(b"new")
    assert (server.workspace / "g").read_bytes() == b"old content"
    stream.write(b"", is_last=True)
    stream.end()
    assert (server.workspace / "g").read_bytes() == b"new"
    assert names(server.workspace) == ["f", "g"]


@needs_root
def test_root_keeps_the_owner_of_a_file(server: RunningServer) -> None:
    file = server.workspace / "f"
    file.write_bytes(b"old")
    os.chown(file, 1234, 2345)
    write(server, "f", b"new", mode=0o600)
    status = file.stat()
    assert (file.read_bytes(), status.st_uid, status.st_gid) == (b"new", 1234, 2345)
    assert status.st_mode & 0o7777 == 0o600


@needs_root
def test_a_file_of_another_user_belongs_to_the_user_and_its_rights_apply(server: RunningServer) -> None:
    (server.workspace / "open").mkdir()
    (server.workspace / "open").chmod(0o777)
    (server.workspace / "secret").write_bytes(b"x")
    (server.workspace / "secret").chmod(0o600)
    write(server, "open/f", b"data", user="nobody")
    status = (server.workspace / "open/f").stat()
    assert (status.st_uid, status.st_gid) == (65534, 65534)
    assert error_of(server, "read", path="secret", user="nobody") == "PERMISSION_DENIED"
    assert error_of(server, "write", path="new", user="nobody") == "PERMISSION_DENIED"
    assert error_of(server, "write", path="secret", user="nobody") == "PERMISSION_DENIED"
    assert read(server, "secret") == b"x"
    assert error_of(server, "read", path="secret", user="no-such-user") == "INVALID_ARGUMENTS"


def test_metadata_is_kept_replaced_and_removed(server: RunningServer) -> None:
    def metadata() -> dict[str, str]:
        return server.client.open("read", path="f").opened()["metadata"]

    write(server, "f", b"1", metadata={"kind": "x", "e2b.ünicode": "wörld"})
    assert metadata() == {"kind": "x", "e2b.ünicode": "wörld"}
    write(server, "f", b"2")
    assert metadata() == {"kind": "x", "e2b.ünicode": "wörld"}
    write(server, "f", b"3", offset=0, metadata={"other": ""})
    assert metadata() == {"other": ""}
    write(server, "f", b"4", metadata={})
    assert metadata() == {}


def test_a_full_disk_is_reported_and_leaves_nothing(server: RunningServer) -> None:
    with small_disk() as disk:
        (disk / "f").write_bytes(b"old")
        for fields in ({}, {"metadata": {"a": "b"}}):
            stream = server.client.open("write", path=str(disk / "f"), **fields)
            stream.opened()
            stream.write(bytes(8 << 20), is_last=True)
            with pytest.raises(StreamError) as caught:
                stream.end()
            assert caught.value.code == "NO_SPACE"
            assert names(disk) == ["f"]
            assert (disk / "f").read_bytes() == b"old"


def test_errors_have_codes(server: RunningServer) -> None:
    (server.workspace / "folder").mkdir()
    (server.workspace / "f").write_bytes(b"123")
    os.mkfifo(server.workspace / "pipe")
    os.symlink("/proc/self/environ", server.workspace / "environ")
    os.symlink("loop", server.workspace / "loop")
    assert error_of(server, "read", path="missing") == "FILE_NOT_FOUND"
    assert error_of(server, "read", path="folder") == "IS_DIRECTORY"
    assert error_of(server, "write", path="folder") == "IS_DIRECTORY"
    assert error_of(server, "read", path="f/x") == "NOT_A_DIRECTORY"
    assert error_of(server, "write", path="f/x") == "NOT_A_DIRECTORY"
    assert error_of(server, "read", path="f", offset=4) == "OFFSET_OUT_OF_RANGE"
    for path in ("pipe", "/dev/zero"):
        assert error_of(server, "read", path=path) == "PATH_NOT_ALLOWED"
        assert error_of(server, "write", path=path) == "PATH_NOT_ALLOWED"
    for path in ("environ", "/proc/self/environ", "/sys/kernel/notes", "loop", "/etc/../proc/1/environ"):
        assert error_of(server, "read", path=path) == "PATH_NOT_ALLOWED"
    assert read(server, "f", offset=3) == b""


def test_a_file_that_becomes_shorter_is_an_error(server: RunningServer) -> None:
    (server.workspace / "f").write_bytes(bytes(4 << 20))
    stream = server.client.open("read", path="f")
    stream.opened()
    os.truncate(server.workspace / "f", 1000)
    with pytest.raises(StreamError) as caught:
        stream.end()
    assert caught.value.code == "STALE_FILE"


@pytest.mark.parametrize(
    ("what", "fields"),
    [
        ("read", {}),
        ("read", {"path": ""}),
        ("read", {"path": 5}),
        ("read", {"path": "a\0b"}),
        ("read", {"path": "\ud800"}),
        ("read", {"path": "f", "offset": -1}),
        ("read", {"path": "f", "offset": True}),
        ("read", {"path": "f", "offset": 1.5}),
        ("read", {"path": "f", "bytes": 1 << 63}),
        ("read", {"path": "f", "user": 0}),
        ("read", {"path": "f", "mode": 1}),
        ("read", {"path": "f", "timeout_s": 1}),
        ("read", {"path": "f", "x" * 50_000: 1}),
        ("read", {"path": "x" * 50_000}),
        ("write", {"path": "f", "mode": 0o10000}),
        ("write", {"path": "f", "metadata": []}),
        ("write", {"path": "f", "metadata": {"a": 1}}),
        ("write", {"path": "f", "metadata": {"": "x"}}),
        ("write", {"path": "f", "metadata": {"a\0": "x"}}),
        ("write", {"path": "f", "metadata": {"a" * 201: "x"}}),
        ("write", {"path": "f", "metadata": {"a": "x" * 4097}}),
        ("write", {"path": "f", "metadata": {str(number): "" for number in range(65)}}),
        ("write", {"path": "f", "metadata": {str(number): "x" * 4000 for number in range(5)}}),
        ("list", {"path": ".", "depth": 0}),
        ("list", {"path": ".", "depth": 257}),
        ("list", {"path": ".", "depth": None}),
        ("watch", {"path": ".", "recursive": 1}),
        ("port", {"port": 0}),
        ("port", {"port": 65_536}),
        ("port", {"port": "80"}),
        ("port", {"port": 80, "host": "10.0.0.1"}),
    ],
)
def test_invalid_fields_are_refused(server: RunningServer, what: str, fields: dict[str, object]) -> None:
    (server.workspace / "f").write_bytes(b"")
    assert error_of(server, what, **fields) == "INVALID_ARGUMENTS"
    assert read(server, "f") == b""


def test_a_swapped_parent_never_leads_a_write_out_of_its_folder(server: RunningServer) -> None:
    """The folder is replaced by a link after it was found: the file appears in the folder that was found."""
    outside = server.tmp / "outside"
    outside.mkdir()
    (server.workspace / "folder").mkdir()
    stream = server.client.open("write", path="folder/f")
    stream.opened()
    (server.workspace / "folder").rename(server.workspace / "moved")
    (server.workspace / "folder").symlink_to(outside)
    stream.write(b"data", is_last=True)
    stream.end()
    assert names(outside) == []
    assert (server.workspace / "moved/f").read_bytes() == b"data"
