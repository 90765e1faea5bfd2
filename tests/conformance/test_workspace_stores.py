"""The contract of every workspace store. A save is complete or has no effect, a load is unchanged or fails, and a
name never reaches another tenant's data.
"""

import asyncio
import itertools
import json
import os
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.stack.waiting import SOON_S
from toolcrew.archives.base import ArchiveStore, NotStored, StoreThreads
from toolcrew.archives.choice import open_own_store, open_store
from toolcrew.archives.folder import FolderStore
from toolcrew.archives.fsspec_store import FsspecStore
from toolcrew.contract.errors import ConfigError, ErrorCode, SandboxUnavailable, ToolFailure

KINDS = ("folder", "memory", "file")
_counter = itertools.count()


@pytest.fixture(params=[*KINDS, "direct"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ArchiveStore:
    if request.param == "folder":
        return FolderStore(tmp_path / "store")
    pytest.importorskip("fsspec")
    root = f"file://{tmp_path}/store" if request.param == "file" else f"memory://{next(_counter)}"
    return FsspecStore(root, None if request.param == "direct" else tmp_path / "spool")


def files_of(store: Any) -> dict[str, Callable[[bytes | None], bytes]]:
    """Return every file of a store by the end of its name. Call an entry with bytes to write the file, and with None
    to read the file.
    """
    if isinstance(store, FolderStore):
        return {path.name: _access(path) for path in store._folder.rglob("*") if path.is_file()}
    found = store._fs.find(store._root) if store._fs.exists(store._root) else []

    def access(path: str) -> Callable[[bytes | None], bytes]:
        return lambda data: store._fs.cat_file(path) if data is None else store._fs.pipe_file(path, data)

    return {path.rpartition("/")[2]: access(path) for path in found}


def _access(path: Path) -> Callable[[bytes | None], Any]:
    return lambda data: path.read_bytes() if data is None else path.write_bytes(data)


async def chunks(*parts: bytes | Exception) -> AsyncIterator[bytes]:
    for part in parts:
        if isinstance(part, Exception):
            raise part
        yield part


async def read(store: ArchiveStore, name: str) -> bytes:
    return b"".join([chunk async for chunk in store.get(name)])


async def test_a_stored_archive_is_returned_unchanged(store: ArchiveStore) -> None:
    facts = await store.put("acme/one", chunks(b"abc", b"", b"d" * 3_000_000))
    assert facts.bytes == 3_000_003
    assert await store.describe("acme/one") == facts
    assert await read(store, "acme/one") == b"abc" + b"d" * 3_000_000


async def test_an_empty_archive_can_be_stored(store: ArchiveStore) -> None:
    facts = await store.put("acme/empty", chunks())
    assert (facts.bytes, await read(store, "acme/empty")) == (0, b"")


async def test_a_second_archive_with_the_same_name_replaces_the_first(store: ArchiveStore) -> None:
    await store.put("acme/one", chunks(b"a long first one"))
    await store.put("acme/one", chunks(b"second"))
    assert await read(store, "acme/one") == b"second"
    assert await store.list() == ["acme/one"]


async def test_an_unknown_name_is_not_stored(store: ArchiveStore) -> None:
    with pytest.raises(NotStored):
        await store.describe("acme/none")
    with pytest.raises(NotStored):
        await read(store, "acme/none")
    assert (await store.delete("acme/none"), await store.list("acme/")) == (False, [])


async def test_names_are_listed_by_prefix(store: ArchiveStore) -> None:
    for name in ("acme/b", "acme/a", "acmes/c"):
        await store.put(name, chunks(b"x"))
    assert await store.list("acme/") == ["acme/a", "acme/b"]
    assert await store.list() == ["acme/a", "acme/b", "acmes/c"]


async def test_deleting_an_archive_removes_all_its_files(store: ArchiveStore) -> None:
    await store.put("acme/one", chunks(b"x"))
    assert await store.delete("acme/one") is True
    with pytest.raises(NotStored):
        await store.describe("acme/one")
    assert (files_of(store), await store.delete("acme/one")) == ({}, False)


async def test_a_failed_write_leaves_nothing_and_raises_its_error(store: ArchiveStore) -> None:
    with pytest.raises(ToolFailure, match="too large"):
        await store.put("acme/one", chunks(b"half", ToolFailure(ErrorCode.FILE_TOO_LARGE, "too large")))
    assert (files_of(store), await store.list()) == ({}, [])


async def test_a_cancelled_write_leaves_nothing(store: ArchiveStore) -> None:
    started = asyncio.Event()

    async def stalling() -> AsyncIterator[bytes]:
        yield b"half"
        started.set()
        await asyncio.Event().wait()

    writing = asyncio.create_task(store.put("acme/one", stalling()))
    await asyncio.wait_for(started.wait(), SOON_S)
    writing.cancel()
    await asyncio.wait({writing}, timeout=5)
    assert (writing.cancelled(), files_of(store)) == (True, {})


@pytest.mark.parametrize("damage", [b"another one", b"a lon", b"a long onE", b"a long one and more", b""])
async def test_damaged_content_is_reported_before_the_end(store: ArchiveStore, damage: bytes) -> None:
    await store.put("acme/one", chunks(b"a long one"))
    files_of(store)["one.tar"](damage)
    with pytest.raises(SandboxUnavailable, match="damaged"):
        await read(store, "acme/one")


@pytest.mark.parametrize(
    "facts",
    [b"", b"[]", b"{}", b'{"bytes": -1, "sha256": ""}', b"\xff", b'{"bytes": true, "sha256": 1}', b"[" * 100_000],
)
async def test_damaged_metadata_is_reported(store: ArchiveStore, facts: bytes) -> None:
    await store.put("acme/one", chunks(b"x"))
    files_of(store)["one.json"](facts)
    with pytest.raises(SandboxUnavailable, match="damaged"):
        await store.describe("acme/one")


async def test_metadata_of_an_unknown_layout_is_refused(store: ArchiveStore) -> None:
    await store.put("acme/one", chunks(b"x"))
    facts = files_of(store)["one.json"]
    facts(json.dumps(json.loads(facts(None)) | {"layout": 2}).encode())
    with pytest.raises(SandboxUnavailable, match="layout 2, and this version supports only 1"):
        await read(store, "acme/one")


async def test_a_missing_content_file_is_an_error(store: ArchiveStore) -> None:
    await store.put("acme/one", chunks(b"x"))
    facts = files_of(store)["one.json"](None)
    await store.delete("acme/one")
    await store.put("acme/two", chunks(b"x"))
    assert json.loads(facts)["bytes"] == 1
    if isinstance(store, FolderStore):
        (store._folder / "acme" / "two.tar").unlink()
    else:
        store._fs.rm_file(f"{store._root}/acme/two.tar")  # type: ignore[attr-defined]
    with pytest.raises(SandboxUnavailable):
        await read(store, "acme/two")


@pytest.mark.parametrize(
    "name",
    [
        "one",
        "acme/../x",
        "../one",
        "/etc/passwd",
        "acme/",
        "/one",
        "acme/a/b",
        "acme/a.json",
        "acme/o\n",
        "a" * 65 + "/x",
        "",
    ],
)
async def test_a_name_that_leads_outside_the_store_is_refused(store: ArchiveStore, name: str) -> None:
    with pytest.raises(ValueError, match="not a name of an archive"):
        await store.put(name, chunks(b"x"))
    with pytest.raises(ValueError, match="not a name of an archive"):
        await read(store, name)
    with pytest.raises(ValueError, match="not a name of an archive"):
        await store.delete(name)


async def test_files_of_a_folder_store_are_readable_by_their_owner_only(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        await FolderStore(tmp_path / "store").put("acme/one", chunks(b"x"))
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in [tmp_path / "store", *(tmp_path / "store").rglob("*")]}
    assert modes == {"store": 0o700, "acme": 0o700, "one.tar": 0o600, "one.json": 0o600}


async def test_a_write_that_would_fill_the_disk_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SandboxUnavailable, match="free space"):
        await FolderStore(tmp_path / "store", free_bytes=2**62).put("acme/one", chunks(b"x"))
    assert files_of(FolderStore(tmp_path / "store")) == {}


async def test_a_write_to_a_url_store_that_would_fill_the_disk_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("fsspec")
    store = FsspecStore(f"file://{tmp_path}/store", tmp_path / "spool", free_bytes=2**62)
    with pytest.raises(SandboxUnavailable, match="free space"):
        await store.put("acme/one", chunks(b"x"))
    assert (files_of(store), list((tmp_path / "spool").iterdir())) == ({}, [])


async def test_a_folder_that_hangs_fails_its_callers_in_time_and_blocks_no_other_work(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    store._threads = StoreThreads(answer_s=0.3)
    (tmp_path / "acme").mkdir()
    # Opening the FIFO blocks until a writer opens it, as with an unreachable file server.
    os.mkfifo(tmp_path / "acme" / "one.json")
    reads = [asyncio.ensure_future(store.describe("acme/one")) for _ in range(50)]
    await asyncio.sleep(0)
    try:
        assert await asyncio.wait_for(asyncio.to_thread(lambda: "free"), SOON_S) == "free"
        answers = await asyncio.wait_for(asyncio.gather(*reads, return_exceptions=True), SOON_S)
        assert (
            len(
                [
                    answer
                    for answer in answers
                    if isinstance(answer, SandboxUnavailable) and "within 0.3 s" in str(answer)
                ]
            )
            == 50
        )
    finally:
        os.close(os.open(tmp_path / "acme" / "one.json", os.O_RDWR))
        await asyncio.to_thread(join_threads)


def join_threads() -> None:
    for thread in [thread for thread in threading.enumerate() if thread.name == "store"]:
        thread.join(5)


class Outage:
    """A file system that runs `between` after the write of an archive's data and before the write of its metadata."""

    def __init__(self, fs: Any, between: Callable[[], None]) -> None:
        self._fs = fs
        self._between = between

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fs, name)

    def put_file(self, *arguments: Any) -> None:
        self._fs.put_file(*arguments)
        self._between()


async def test_a_failure_between_content_and_metadata_leaves_nothing(tmp_path: Path) -> None:
    pytest.importorskip("fsspec")
    store = FsspecStore(f"file://{tmp_path}/store", tmp_path / "spool")

    def fail() -> None:
        raise ConnectionResetError("gone")

    store._fs = Outage(store._fs, fail)
    with pytest.raises(SandboxUnavailable, match="ConnectionResetError"):
        await store.put("acme/one", chunks(b"x"))
    assert files_of(store) == {}


async def test_an_archive_whose_writer_was_cancelled_during_the_upload_is_removed(tmp_path: Path) -> None:
    pytest.importorskip("fsspec")
    store, sent, go_on = (
        FsspecStore(f"file://{tmp_path}/store", tmp_path / "spool"),
        threading.Event(),
        threading.Event(),
    )

    def stall() -> None:
        sent.set()
        go_on.wait(5)

    plain, store._fs = store._fs, Outage(store._fs, stall)
    sending = asyncio.ensure_future(store.put("acme/one", chunks(b"x")))
    assert await asyncio.to_thread(sent.wait, 5)
    sending.cancel()
    await asyncio.wait({sending}, timeout=5)
    go_on.set()
    await asyncio.to_thread(join_threads)
    assert (sending.cancelled(), plain.find(f"{tmp_path}/store")) == (True, [])


async def test_the_error_for_a_folder_that_cannot_be_created_names_its_setting(tmp_path: Path) -> None:
    (tmp_path / "store").write_text("a file")
    with pytest.raises(SandboxUnavailable, match="TOOLCREW_WORKSPACE_STORE"):
        await FolderStore(tmp_path / "store").put("acme/one", chunks(b"x"))


async def test_old_unfinished_files_are_removed_when_the_store_is_opened(tmp_path: Path) -> None:
    store = FolderStore(tmp_path / "checkpoints")
    await store.put("acme/whole", chunks(b"x"))
    long_ago = time.time() - 100_000
    for name in (".begun.0.part", "no-facts.tar", "whole.tar", ".new.0.part"):
        path = tmp_path / "checkpoints" / "acme" / name
        path.touch()
        os.utime(path, (long_ago, long_ago)) if "new" not in name else None
    open_store(None, tmp_path)
    assert sorted(files_of(store)) == [".new.0.part", "whole.json", "whole.tar"]


async def test_all_unfinished_files_are_removed_when_there_are_no_other_writers(tmp_path: Path) -> None:
    await FolderStore(tmp_path).put("acme/whole", chunks(b"x"))
    for name in (".begun.0.part", "no-facts.tar"):
        (tmp_path / "acme" / name).touch()
    assert sorted(files_of(open_own_store(tmp_path))) == ["whole.json", "whole.tar"]


async def test_the_error_for_a_full_disk_names_the_setting_of_that_disk(tmp_path: Path) -> None:
    for store, setting in (
        (FolderStore(tmp_path / "a", 2**62), "TOOLCREW_WORKSPACE_STORE"),
        (open_own_store(tmp_path / "b", 2**62), "TOOLCREW_SANDBOXD_STATE"),
    ):
        with pytest.raises(SandboxUnavailable, match=f"set {setting} to another folder"):
            await store.put("acme/one", chunks(b"x"))


def test_leftovers_of_a_killed_process_in_the_spool_are_removed(tmp_path: Path) -> None:
    pytest.importorskip("fsspec")
    (tmp_path / "spool").mkdir()
    (tmp_path / "spool" / "archive-abc").write_bytes(b"half")
    open_store("memory://x", tmp_path)
    assert list((tmp_path / "spool").iterdir()) == []


def test_the_setting_selects_the_store(tmp_path: Path) -> None:
    pytest.importorskip("fsspec")
    kinds = [
        type(open_store(setting, tmp_path))
        for setting in (None, str(tmp_path / "x"), "memory://x", f"file://{tmp_path}")
    ]
    assert kinds == [FolderStore, FolderStore, FsspecStore, FolderStore]


@pytest.mark.parametrize("url", ["nosuch://bucket", "nosuch::memory://x"])
def test_an_unknown_url_scheme_is_a_configuration_error(url: str, tmp_path: Path) -> None:
    pytest.importorskip("fsspec")
    with pytest.raises(ConfigError, match="TOOLCREW_WORKSPACE_STORE"):
        open_store(url, tmp_path)


def test_the_error_for_a_url_without_fsspec_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "fsspec.core", None)
    with pytest.raises(ConfigError, match=r"toolcrew\[store\]"):
        open_store("s3://bucket", tmp_path)


async def test_the_error_of_a_url_store_does_not_contain_the_url(tmp_path: Path) -> None:
    pytest.importorskip("fsspec")
    store = FsspecStore("memory://secret-key", tmp_path / "spool")
    store._fs = None
    with pytest.raises(SandboxUnavailable) as failed:
        await store.describe("acme/one")
    assert "secret-key" not in str(failed.value)
