"""Listings of folders: sorted, depth-first, of any size, at the speed of the client."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.support.guest.stream_client import ClientStream, RunningServer, StreamError


def entries_of(stream: ClientStream) -> list[dict[str, Any]]:
    count = stream.end()["entries"]
    entries = [json.loads(line) for line in stream.data.splitlines()]
    assert len(entries) == count
    return entries


def paths_below(server: RunningServer, **fields: Any) -> list[str]:
    return [
        os.path.relpath(entry["path"], server.workspace) for entry in entries_of(server.client.open("list", **fields))
    ]


def make_tree(folder: Path) -> None:
    for name in ("b/x/deep", "b/y", "a", "c.d"):
        (folder / name).mkdir(parents=True)
    for name in ("b/x/f", "b/f", "z", "a b"):
        (folder / name).write_bytes(b"1")


def test_entries_are_sorted_and_depth_first(server: RunningServer) -> None:
    make_tree(server.workspace)
    assert paths_below(server, path=".") == ["a", "a b", "b", "c.d", "z"]
    assert paths_below(server, path=".", depth=2) == ["a", "a b", "b", "b/f", "b/x", "b/y", "c.d", "z"]
    assert paths_below(server, path="b", depth=256) == ["b/f", "b/x", "b/x/deep", "b/x/f", "b/y"]


def test_an_entry_of_a_listing_is_that_of_stat(server: RunningServer) -> None:
    make_tree(server.workspace)
    os.setxattr(server.workspace / "b/f", "user.a", b"b")
    (server.workspace / "b/link").symlink_to("f")
    for entry in entries_of(server.client.open("list", path="b", depth=3)):
        assert entry == server.client.call("stat", path=entry["path"])["entry"]


def test_the_folder_may_be_a_link_and_links_below_are_not_followed(server: RunningServer) -> None:
    make_tree(server.workspace)
    (server.workspace / "link").symlink_to("b")
    (server.workspace / "b/loop").symlink_to("..")
    assert paths_below(server, path="link", depth=9) == [
        "link/f",
        "link/loop",
        "link/x",
        "link/x/deep",
        "link/x/f",
        "link/y",
    ]


def test_folders_of_the_kernel_are_listed_without_their_content(server: RunningServer) -> None:
    stream = server.client.open("list", path="/")
    shown = [entry["path"] for entry in entries_of(stream)]
    assert "/proc" in shown
    with pytest.raises(StreamError) as caught:
        server.client.open("list", path="/proc").end()
    assert caught.value.code == "PATH_NOT_ALLOWED"


@pytest.mark.parametrize(("path", "code"), [("missing", "FILE_NOT_FOUND"), ("z", "NOT_A_DIRECTORY")])
def test_errors_have_codes(server: RunningServer, path: str, code: str) -> None:
    make_tree(server.workspace)
    with pytest.raises(StreamError) as caught:
        server.client.open("list", path=path).opened()
    assert caught.value.code == code


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_a_folder_that_the_user_may_not_read_is_listed_without_its_content(server: RunningServer) -> None:
    make_tree(server.workspace)
    (server.workspace / "b").chmod(0o700)
    below = [entry["path"] for entry in entries_of(server.client.open("list", path=".", depth=3, user="nobody"))]
    assert str(server.workspace / "b") in below
    assert str(server.workspace / "b/f") not in below
    with pytest.raises(StreamError) as caught:
        server.client.open("list", path="b", user="nobody").end()
    assert caught.value.code == "PERMISSION_DENIED"


def test_a_listing_stops_without_credit_and_goes_on_later(server: RunningServer) -> None:
    for number in range(1000):
        (server.workspace / f"{number:04}").write_bytes(b"")
    stream = server.client.open("list", path=".", window=0)
    stream.opened()
    while stream.end_fields is None:
        if stream.granted == stream.received:
            stream.grant(777)
        stream.step()
    assert [json.loads(line)["name"] for line in stream.data.splitlines()] == [f"{n:04}" for n in range(1000)]


def test_a_large_folder_takes_no_memory_of_the_server(server: RunningServer) -> None:
    folder = os.open(server.workspace, os.O_RDONLY)
    for number in range(20_000):
        os.mknod(f"{number}", dir_fd=folder)
    os.close(folder)
    stream = server.client.open("list", path=".", window=1 << 18)
    stream.opened()
    before = server.memory_bytes
    assert stream.end() == {"entries": 20_000}
    assert server.memory_bytes - before < 1 << 20
