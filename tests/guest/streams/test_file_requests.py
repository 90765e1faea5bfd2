"""Requests about files: entries, folders, moves, removals and metadata."""

import contextlib
import os
import signal
import stat
import threading
from pathlib import Path

import pytest

from tests.support.guest.disks import small_disk
from tests.support.guest.stream_client import RunningServer, StreamError

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


def error_of(server: RunningServer, op: str, **fields: object) -> str:
    with pytest.raises(StreamError) as caught:
        server.client.call(op, **fields)
    return str(caught.value.code)


def test_stat_describes_a_file(server: RunningServer) -> None:
    file = server.workspace / "f.txt"
    file.write_bytes(b"12345")
    file.chmod(0o4640)
    os.utime(file, (0, 1234.5))
    status = file.stat()
    entry = server.client.call("stat", path="f.txt")["entry"]
    names = {"owner": entry.pop("owner"), "group": entry.pop("group")}
    assert entry == {
        "name": "f.txt",
        "path": str(file),
        "type": "file",
        "size": 5,
        "mode": 0o4640,
        "uid": status.st_uid,
        "gid": status.st_gid,
        "modified_at": 1234.5,
        "target": None,
        "metadata": {},
    }
    assert names == {"owner": file.owner(), "group": file.group()}


@needs_root
def test_an_unknown_owner_is_a_number(server: RunningServer) -> None:
    (server.workspace / "f").write_bytes(b"")
    os.chown(server.workspace / "f", 54_321, 54_322)
    entry = server.client.call("stat", path="f")["entry"]
    assert (entry["owner"], entry["group"]) == ("54321", "54322")


def test_stat_describes_a_link_and_not_its_target(server: RunningServer) -> None:
    (server.workspace / "folder").mkdir()
    (server.workspace / "folder/link").symlink_to("../other")
    entry = server.client.call("stat", path="folder/link")["entry"]
    assert (entry["type"], entry["target"]) == ("symlink", str(server.workspace / "other"))
    os.mkfifo(server.workspace / "pipe")
    assert server.client.call("stat", path="pipe")["entry"]["type"] == "other"
    assert server.client.call("stat", path="folder/")["entry"]["type"] == "directory"
    assert server.client.call("stat", path="/")["entry"]["name"] == "/"
    assert server.client.call("stat", path=".")["entry"]["type"] == "directory"


def test_a_name_that_is_not_text_is_shown(server: RunningServer) -> None:
    (Path(os.fsdecode(bytes(server.workspace) + b"/a\xff\n"))).write_bytes(b"")
    listing = server.client.open("list", path=".")
    listing.end()
    assert b'"name": "a\\\\xff\\n"' in listing.data
    assert listing.data.count(b"\n") == 1


def test_stat_has_codes_for_errors(server: RunningServer) -> None:
    (server.workspace / "f").write_bytes(b"")
    assert error_of(server, "stat", path="missing/x") == "FILE_NOT_FOUND"
    assert error_of(server, "stat", path="f/x") == "NOT_A_DIRECTORY"
    assert error_of(server, "stat", path="/proc/self") == "PATH_NOT_ALLOWED"
    assert error_of(server, "stat", path="x" * 300) == "INVALID_ARGUMENTS"


def test_make_folder_creates_parents_and_says_whether_it_existed(server: RunningServer) -> None:
    made = server.client.call("make_folder", path="a/b/c/")
    assert (made["created"], made["entry"]["mode"], made["entry"]["path"]) == (
        True,
        0o755,
        str(server.workspace / "a/b/c"),
    )
    assert server.client.call("make_folder", path="a/b/c")["created"] is False
    assert server.client.call("make_folder", path="a/d", mode=0o1777)["entry"]["mode"] == 0o1777
    (server.workspace / "f").write_bytes(b"")
    assert error_of(server, "make_folder", path="f") == "FILE_EXISTS"
    assert error_of(server, "make_folder", path="f/g") == "NOT_A_DIRECTORY"
    (server.workspace / "link").symlink_to("a")
    assert server.client.call("make_folder", path="link")["created"] is False
    assert server.client.call("make_folder", path="link/e")["created"] is True
    assert (server.workspace / "a/e").is_dir()


@needs_root
def test_folders_of_another_user_belong_to_that_user(server: RunningServer) -> None:
    server.workspace.chmod(0o777)
    made = server.client.call("make_folder", path="a/b", user="nobody")
    assert made["entry"]["owner"] == "nobody"
    assert (server.workspace / "a").stat().st_uid == made["entry"]["uid"]
    assert error_of(server, "make_folder", path=str(server.tmp / "x"), user="nobody") == "PERMISSION_DENIED"


def test_move_replaces_a_file_and_creates_parents(server: RunningServer) -> None:
    (server.workspace / "f").write_bytes(b"1")
    (server.workspace / "g").write_bytes(b"2")
    (server.workspace / "link").symlink_to("f")
    assert server.client.call("move", source="f", target="x/y/f")["entry"]["path"] == str(server.workspace / "x/y/f")
    server.client.call("move", source="g", target="x/y/f")
    server.client.call("move", source="link", target="moved")
    assert (server.workspace / "x/y/f").read_bytes() == b"2"
    assert (server.workspace / "moved").is_symlink()
    assert error_of(server, "move", source="missing", target="p/q") == "FILE_NOT_FOUND"
    assert not (server.workspace / "p").exists()
    assert error_of(server, "move", source="x", target="x/y/z") == "INVALID_ARGUMENTS"
    assert error_of(server, "move", source=".", target="z") in ("INVALID_ARGUMENTS", "PERMISSION_DENIED")
    (server.workspace / "full").mkdir()
    (server.workspace / "full/f").write_bytes(b"")
    assert error_of(server, "move", source="x", target="full") == "FILE_EXISTS"


def test_move_to_another_file_system_keeps_everything(server: RunningServer) -> None:
    folder = server.workspace / "folder"
    (folder / "sub").mkdir(parents=True)
    (folder / "sub/f").write_bytes(b"data")
    (folder / "sub/f").chmod(0o751)
    os.utime(folder / "sub/f", (0, 1234.5))
    (folder / "sub/link").symlink_to("f")
    with small_disk() as disk:
        os.chown(folder / "sub/f", 1234, 1234)
        entry = server.client.call("move", source="folder", target=f"{disk}/new/folder")["entry"]
        assert (entry["type"], entry["path"]) == ("directory", f"{disk}/new/folder")
        status = (disk / "new/folder/sub/f").stat()
        assert (stat.S_IMODE(status.st_mode), status.st_uid, status.st_mtime) == (0o751, 1234, 1234.5)
        assert os.readlink(disk / "new/folder/sub/link") == "f"
        assert os.listdir(server.workspace) == []


def test_a_move_to_a_full_file_system_is_reported(server: RunningServer) -> None:
    (server.workspace / "f").write_bytes(bytes(4 << 20))
    with small_disk() as disk:
        assert error_of(server, "move", source="f", target=f"{disk}/f") == "NO_SPACE"
        assert error_of(server, "move", source="missing", target=f"{disk}/new/f") == "FILE_NOT_FOUND"
        assert not (disk / "new").exists()
        assert (server.workspace / "f").stat().st_size == 4 << 20


def test_a_write_to_a_read_only_file_system_is_denied(server: RunningServer) -> None:
    with small_disk("ro") as disk:
        for op, fields in (
            ("make_folder", {"path": f"{disk}/a"}),
            ("move", {"source": f"{disk}/f", "target": f"{disk}/g"}),
        ):
            assert error_of(server, op, **fields) in ("PERMISSION_DENIED", "FILE_NOT_FOUND")
        with pytest.raises(StreamError) as caught:
            server.client.open("write", path=f"{disk}/f").end()
        assert caught.value.code == "PERMISSION_DENIED"
        assert "read-only" in str(caught.value)


def test_remove_takes_everything_below_and_follows_no_link(server: RunningServer) -> None:
    outside = server.tmp / "outside"
    outside.mkdir()
    (outside / "f").write_bytes(b"")
    folder = server.workspace / "folder"
    deep = folder
    for _ in range(100):
        deep /= "d"
    deep.mkdir(parents=True)
    (deep / "f").write_bytes(b"")
    (folder / "link").symlink_to(outside)
    (server.workspace / "link").symlink_to(outside)
    assert server.client.call("remove", path="folder") == {"removed": 1}
    assert server.client.call("remove", path="link") == {"removed": 1}
    assert server.client.call("remove", path="link") == {"removed": 0}
    assert server.client.call("remove", path="no/such/folder") == {"removed": 0}
    assert os.listdir(server.workspace) == []
    assert (outside / "f").exists()
    assert error_of(server, "remove", path="/") == "INVALID_ARGUMENTS"
    assert error_of(server, "remove", path="/proc/self/environ") == "PATH_NOT_ALLOWED"


def test_a_folder_deeper_than_any_path_is_removed(server: RunningServer) -> None:
    here = os.open(server.workspace, os.O_RDONLY)
    for _ in range(700):
        os.mkdir("folder", dir_fd=here)
        below = os.open("folder", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)
    assert server.client.call("remove", path="folder") == {"removed": 1}
    assert os.listdir(server.workspace) == []


@needs_root
def test_what_a_user_may_not_remove_stays(server: RunningServer) -> None:
    (server.workspace / "folder").mkdir()
    (server.workspace / "folder/f").write_bytes(b"")
    (server.workspace / "f").write_bytes(b"")
    for path in ("f", "folder"):
        assert error_of(server, "remove", path=path, user="nobody") == "PERMISSION_DENIED"
    assert (server.workspace / "folder/f").exists()


def test_metadata_is_replaced_as_a_whole(server: RunningServer) -> None:
    (server.workspace / "f").write_bytes(b"")
    os.setxattr(server.workspace / "f", "user.of.a.program", b"\xff")
    assert server.client.call("stat", path="f")["entry"]["metadata"] == {"of.a.program": "\\xff"}
    for metadata in ({"a": "1", "b": "2"}, {"b": "3"}, {}):
        entry = server.client.call("set_metadata", path="f", metadata=metadata)["entry"]
        assert entry["metadata"] == metadata
    assert server.client.call("set_metadata", path=".", metadata={"x": "y"})["entry"]["metadata"] == {"x": "y"}
    assert error_of(server, "set_metadata", path="missing", metadata={}) == "FILE_NOT_FOUND"
    os.mkfifo(server.workspace / "pipe")
    assert error_of(server, "set_metadata", path="pipe", metadata={"a": "b"}) == "PATH_NOT_ALLOWED"


def test_metadata_that_does_not_fit_changes_nothing(server: RunningServer) -> None:
    (server.workspace / "f").write_bytes(b"")
    server.client.call("set_metadata", path="f", metadata={"a": "1"})
    large = {str(number): "x" * 4000 for number in range(4)}
    code = None
    try:
        server.client.call("set_metadata", path="f", metadata=large)
    except StreamError as error:
        code = error.code
    # ext4 has room for one block of them, other file systems for all.
    expected = {None: large, "NO_SPACE": {"a": "1"}}[code]
    assert server.client.call("stat", path="f")["entry"]["metadata"] == expected


@pytest.mark.parametrize(
    ("op", "fields"),
    [
        ("stat", {}),
        ("stat", {"path": None}),
        ("stat", {"path": ["f"]}),
        ("stat", {"path": "f", "follow": True}),
        ("make_folder", {"path": "f", "mode": "755"}),
        ("make_folder", {"path": "f", "mode": -1}),
        ("move", {"source": "f"}),
        ("move", {"source": "f", "target": ""}),
        ("move", {"path": "f", "source": "f", "target": "g"}),
        ("remove", {"path": {}}),
        ("remove", {"path": "f", "recursive": False}),
        ("set_metadata", {"path": "f"}),
        ("set_metadata", {"path": "f", "metadata": None}),
        ("set_metadata", {"path": "f", "metadata": {"a": None}}),
        ("stat", {"path": "f", "user": "x" * 40_000}),
    ],
)
def test_invalid_fields_are_refused(server: RunningServer, op: str, fields: dict[str, object]) -> None:
    assert error_of(server, op, **fields) == "INVALID_ARGUMENTS"


def test_answers_come_while_another_request_still_runs(server: RunningServer) -> None:
    (server.workspace / "many").mkdir()
    for number in range(2000):
        (server.workspace / f"many/{number}").write_bytes(b"")
    numbers = [server.client.ask("remove", path="many"), *(server.client.ask("stat", path=".") for _ in range(20))]
    replies = [server.client.finish(number) for number in numbers]
    assert replies[0] == {"removed": 1}
    assert all(stat.S_ISDIR(server.workspace.stat().st_mode) and "entry" in reply for reply in replies[1:])


def test_a_removal_follows_no_link_that_replaces_a_folder_meanwhile(server: RunningServer) -> None:
    """A program replaces the folder, and folders in it, by links to another place while the folder is removed."""
    outside = server.tmp / "outside"
    outside.mkdir()
    (outside / "f").write_bytes(b"")
    is_over = threading.Event()

    def swap() -> None:
        while not is_over.is_set():
            for folder in (server.workspace / "folder", server.workspace / "folder/sub"):
                with contextlib.suppress(OSError):
                    folder.rename(f"{folder}-moved")
                with contextlib.suppress(OSError):
                    folder.symlink_to(outside)
                with contextlib.suppress(OSError):
                    folder.unlink()
                with contextlib.suppress(OSError):
                    os.rename(f"{folder}-moved", folder)

    swapping = threading.Thread(target=swap)
    swapping.start()
    try:
        for _ in range(60):
            with contextlib.suppress(OSError):
                (server.workspace / "folder/sub").mkdir(parents=True)
                (server.workspace / "folder/sub/f").write_bytes(b"")
            with contextlib.suppress(StreamError):
                server.client.call("remove", path="folder")
    finally:
        is_over.set()
        swapping.join()
    assert (outside / "f").exists()


def test_a_child_that_waits_for_a_disk_delays_nothing_else(server: RunningServer) -> None:
    (server.workspace / "f").write_bytes(bytes(1 << 20))
    slow = server.client.open("read", path="f", window=0)
    slow.opened()
    children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children")
    [child] = children.read_text().split()
    os.kill(int(child), signal.SIGSTOP)
    assert server.client.call("stat", path="f")["entry"]["size"] == 1 << 20
    other = server.client.open("read", path="f")
    other.end()
    assert other.received == 1 << 20
    os.kill(int(child), signal.SIGCONT)
    slow.grant(65_536)
    slow.end()
    assert slow.received == 1 << 20


def test_a_killed_child_is_an_error_of_its_stream_only(server: RunningServer) -> None:
    (server.workspace / "f").write_bytes(bytes(1 << 20))
    stream = server.client.open("read", path="f", window=0)
    stream.opened()
    children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children")
    [child] = children.read_text().split()
    os.kill(int(child), signal.SIGKILL)
    stream.grant(1 << 20)
    with pytest.raises(StreamError) as caught:
        stream.end()
    assert caught.value.code == "INTERNAL"
    assert server.client.call("stat", path="f")["entry"]["size"] == 1 << 20


def test_attributes_that_a_program_has_set_never_exceed_a_frame(server: RunningServer) -> None:
    (server.workspace / "f").write_bytes(b"")
    with contextlib.suppress(OSError):  # ext4 has room for a few
        for number in range(100):
            os.setxattr(server.workspace / "f", f"user.{number:03}", bytes([number % 8]) * 3000)
    metadata = server.client.call("stat", path="f")["entry"]["metadata"]
    assert 0 < len(metadata) <= 16
    assert server.client.open("read", path="f").opened()["metadata"] == metadata


def test_a_description_that_exceeds_a_frame_is_an_error(server: RunningServer) -> None:
    (server.workspace / "x").mkdir()
    (server.workspace / "f").write_bytes(b"")
    # A long way to the file is shown as it was asked for. Each \\x01 has 6 bytes in JSON.
    folder = server.workspace / ("\1" * 200)
    folder.mkdir()
    path = f"{folder.name}/../" * 50 + "f"
    assert server.client.call("stat", path=path)["entry"]["size"] == 0
    os.setxattr(server.workspace / "f", "user.a", b"\1" * 3000)
    with pytest.raises(StreamError) as caught:
        server.client.call("stat", path=path)
    assert caught.value.code == "FILE_TOO_LARGE"
    assert server.client.call("stat", path="f")["entry"]["size"] == 0
