"""Watches of folders: which events a change gives, also in folders made a moment ago, and what a full queue gives."""

import json
import os
import select
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.support.guest.stream_client import ClientStream, RunningServer, StreamError


class Events:
    """The events of one watch."""

    def __init__(self, server: RunningServer, path: str = ".", **fields: Any) -> None:
        self._server = server
        self._marks = 0
        self.stream: ClientStream = server.client.open("watch", path=path, window=1 << 20, **fields)
        self.stream.opened()
        self._at = 0

    def take(self, folder: Path) -> list[dict[str, Any]]:
        """Return the events up to now. A file of this function marks the end."""
        self._marks += 1
        mark = f"mark-{self._marks}"
        (folder / mark).mkdir()
        return self.take_until(mark)

    def take_until(self, name: str) -> list[dict[str, Any]]:
        while True:
            text = self.stream.data[self._at :]
            events = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith(b"\n")]
            if any(event.get("name") == name for event in events):
                self._at += text.rindex(b"\n") + 1
                return [event for event in events if not str(event.get("name")).startswith("mark-")]
            self.stream.step()


def pairs(events: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(event["event"], event["name"]) for event in events]


def write(server: RunningServer, path: str, data: bytes, **fields: object) -> None:
    stream = server.client.open("write", path=path, **fields)
    stream.opened()
    stream.write(data, is_last=True)
    stream.end()


def test_a_file_written_by_a_stream_gives_create_chmod_and_write(server: RunningServer) -> None:
    events = Events(server)
    write(server, "f", b"1")
    assert pairs(events.take(server.workspace)) == [("create", "f"), ("chmod", "f"), ("write", "f")]
    write(server, "f", b"22")
    [event] = events.take(server.workspace)
    assert (event["event"], event["name"]) == ("write", "f")
    assert event["entry"] == server.client.call("stat", path="f")["entry"]


def test_programs_give_events_of_their_own_changes(server: RunningServer) -> None:
    events = Events(server)
    (server.workspace / "f").write_bytes(b"1")
    (server.workspace / "f").chmod(0o600)
    (server.workspace / "f").rename(server.workspace / "g")
    (server.workspace / "g").unlink()
    (server.workspace / "folder").mkdir()
    (server.workspace / "folder/below").write_bytes(b"1")
    found = events.take(server.workspace)
    assert pairs(found) == [
        ("create", "f"),
        ("write", "f"),
        ("chmod", "f"),
        ("rename", "f"),
        ("create", "g"),
        ("remove", "g"),
        ("create", "folder"),
    ]
    assert found[-1]["entry"]["type"] == "directory"
    assert [event["entry"] for event in found if event["event"] in ("rename", "remove")] == [None, None]


def test_a_recursive_watch_reports_files_in_folders_made_a_moment_ago(server: RunningServer) -> None:
    (server.workspace / "old/folder").mkdir(parents=True)
    events = Events(server, recursive=True)
    (server.workspace / "old/folder/f").write_bytes(b"1")
    assert pairs(events.take(server.workspace)) == [("create", "old/folder/f"), ("write", "old/folder/f")]
    for number in range(50):
        folder = server.workspace / f"new{number}/a/b"
        folder.mkdir(parents=True)
        (folder / "f").write_bytes(b"1")
        (folder.parent / "g").write_bytes(b"")
    found = pairs(events.take(server.workspace))
    for number in range(50):
        for name in ("", "/a", "/a/b", "/a/b/f", "/a/g"):
            assert found.count(("create", f"new{number}{name}")) == 1
        assert ("write", f"new{number}/a/b/f") in found


def test_a_file_in_a_new_folder_that_is_removed_and_made_again_is_reported_again(server: RunningServer) -> None:
    events = Events(server, recursive=True)
    (server.workspace / "new").mkdir()
    for _ in range(20):
        (server.workspace / "new/f").write_bytes(b"1")
        (server.workspace / "new/f").unlink()
    (server.workspace / "new/f").write_bytes(b"1")
    found = pairs(events.take(server.workspace))
    assert found[0] == ("create", "new")
    assert found[-1] in (("write", "new/f"), ("create", "new/f"))
    assert events.take(server.workspace) == []


def test_renamed_folders_have_their_new_names_and_folders_outside_none(server: RunningServer) -> None:
    (server.workspace / "a/b").mkdir(parents=True)
    events = Events(server, recursive=True)
    (server.workspace / "a").rename(server.workspace / "c")
    (server.workspace / "c/b/f").write_bytes(b"")
    assert pairs(events.take(server.workspace)) == [("rename", "a"), ("create", "c"), ("create", "c/b/f")]
    (server.workspace / "c").rename(server.tmp / "outside")
    (server.tmp / "outside/b/g").write_bytes(b"")
    assert pairs(events.take(server.workspace)) == [("rename", "c")]
    (server.tmp / "outside").rename(server.workspace / "d")
    assert pairs(events.take(server.workspace)) == [("create", "d")]
    (server.workspace / "d/b/h").write_bytes(b"")
    assert pairs(events.take(server.workspace)) == [("create", "d/b/h")]


def test_without_recursion_folders_below_are_not_watched(server: RunningServer) -> None:
    (server.workspace / "a").mkdir()
    events = Events(server)
    (server.workspace / "a/f").write_bytes(b"")
    assert events.take(server.workspace) == []


def test_a_removed_folder_ends_the_watch(server: RunningServer) -> None:
    (server.workspace / "a/b").mkdir(parents=True)
    events = Events(server, "a", recursive=True)
    shutil.rmtree(server.workspace / "a")
    assert events.stream.end() == {}
    assert pairs([json.loads(line) for line in events.stream.data.splitlines()]) == [("remove", "b"), ("remove", ".")]


def test_a_client_that_reads_nothing_loses_events_and_is_told(server: RunningServer) -> None:
    limit = int(Path("/proc/sys/fs/inotify/max_queued_events").read_text())
    stream = server.client.open("watch", path=".", window=0)
    stream.opened()
    before = server.memory_bytes
    for number in range(limit // 2 + 2000):
        os.mknod(server.workspace / "f")
        os.unlink(server.workspace / "f")
        if number % 4000 == 0:
            server.client.call("stat", path=".")
    assert server.memory_bytes - before < 1 << 20
    stream.grant(1 << 20)
    while b'"overflow"' not in stream.data:
        stream.step()
        if stream.granted - stream.received < 1 << 19:
            stream.grant(1 << 20)


def test_folders_made_while_events_were_lost_are_watched(server: RunningServer) -> None:
    limit = int(Path("/proc/sys/fs/inotify/max_queued_events").read_text())
    stream = server.client.open("watch", path=".", window=0, recursive=True)
    stream.opened()
    for _ in range(limit // 2 + 2000):
        os.mknod(server.workspace / "f")
        os.unlink(server.workspace / "f")
    (server.workspace / "late").mkdir()
    stream.grant(1 << 24)
    while b'"overflow"' not in stream.data:
        stream.step()
    server.client.call("stat", path=".")
    (server.workspace / "late/mark").mkdir()
    while b'"late/mark"' not in stream.data:
        stream.step()


def test_more_folders_than_the_limit_are_refused(server: RunningServer) -> None:
    for number in range(200):
        (server.workspace / f"{number}/a").mkdir(parents=True)
    for number in range(45):
        for below in range(200):
            os.mkdir(server.workspace / f"{below}/a/{number}")
    with pytest.raises(StreamError) as caught:
        server.client.open("watch", path=".", recursive=True).opened()
    assert caught.value.code == "INVALID_ARGUMENTS"
    assert server.client.open("watch", path="1", recursive=True).opened() == {}


@pytest.mark.parametrize(
    ("path", "code"), [("missing", "FILE_NOT_FOUND"), ("f", "NOT_A_DIRECTORY"), ("/proc/sys", "PATH_NOT_ALLOWED")]
)
def test_errors_have_codes(server: RunningServer, path: str, code: str) -> None:
    (server.workspace / "f").write_bytes(b"")
    with pytest.raises(StreamError) as caught:
        server.client.open("watch", path=path).opened()
    assert caught.value.code == code


def test_a_client_that_leaves_ends_the_process_of_its_watch(server: RunningServer) -> None:
    children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children")
    events = Events(server)
    [child] = children.read_text().split()
    watched = os.pidfd_open(int(child))
    events.stream.close()
    assert select.select([watched], [], [], 60)[0]
    os.close(watched)
