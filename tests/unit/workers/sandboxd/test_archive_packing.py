"""Archives: files come back as they were, streamed. A guest that lies or stops affects only its own session."""

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support.guest.local_guest import LocalGuest
from tests.support.stack.waiting import SOON_S
from toolcrew.contract.errors import ErrorCode, SandboxUnavailable, ToolFailure
from toolcrew.workers.sandboxd.archives import packing as packing_module
from toolcrew.workers.sandboxd.archives.packing import (
    ArchiveFacts,
    Packing,
    PackingGuest,
    count_max_bytes,
    pack_roots,
    unpack,
    unpack_roots,
)
from toolcrew.workers.sandboxd.frames import Frame

MIB = 1024 * 1024


async def pack(
    guest: PackingGuest, roots: tuple[str, ...], write: Callable[[bytes], Awaitable[None]], max_bytes: int
) -> ArchiveFacts:
    """Pack the roots into one archive with `write`."""
    packing = Packing(guest, pack_roots(roots), max_bytes)
    async with contextlib.aclosing(packing.chunks()) as chunks:
        async for chunk in chunks:
            await write(chunk)
    assert packing.facts is not None
    return packing.facts


class ScriptedGuest(LocalGuest):
    """Answers each request with the next function of (request, sink)."""

    def __init__(self, *answers: Callable[[Mapping[str, Any], Callable[[Frame], None]], Any]) -> None:
        super().__init__()
        self._answers = list(answers)
        self.cancelled = 0

    async def ask(
        self, request: Mapping[str, Any], *, sink: Any = None, body: Any = None, body_bytes: int = 0
    ) -> dict[str, Any]:
        try:
            return dict(await self._answers.pop(0)(request, sink))
        except asyncio.CancelledError:
            self.cancelled += 1
            raise


async def reply(
    request: Mapping[str, Any], sink: Callable[[Frame], None], *, stdout: bytes = b"", stderr: bytes = b"", **done: Any
) -> dict[str, Any]:
    sink(Frame({"ev": "data", "stream": "stdout"}, stdout))
    sink(Frame({"ev": "data", "stream": "stderr"}, stderr))
    return {"ev": "done", "exit_code": 0, **done}


async def never_reply(*_: Any) -> dict[str, Any]:
    await asyncio.Event().wait()
    return {}


async def pack_to_memory(guest: Any, *roots: Path, max_bytes: int = 64 * MIB) -> tuple[bytes, ArchiveFacts]:
    data = bytearray()

    async def write(chunk: bytes) -> None:
        data.extend(chunk)

    facts = await pack(guest, tuple(map(str, roots)), write, max_bytes)
    return bytes(data), facts


async def read_chunks(data: bytes, step: int = 100_000) -> AsyncIterator[bytes]:
    for at in range(0, len(data), step):
        yield data[at : at + step]


async def pack_and_unpack(root: Path) -> LocalGuest:
    """Pack the folder, empty it, and unpack it."""
    guest = LocalGuest()
    data, _ = await pack_to_memory(guest, root)
    os.rename(root, f"{root}-before")
    os.mkdir(root)
    await unpack(guest, unpack_roots((str(root),)), read_chunks(data), len(data))
    return guest


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "workspace").mkdir()
    return tmp_path / "workspace"


@pytest.fixture(autouse=True)
def fifos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the FIFOs in a folder of the test. A guest may leave FIFOs behind when it is killed; the test host must
    not.
    """
    (tmp_path / "fifos").mkdir()
    monkeypatch.setattr(packing_module, "_FIFO_FOLDER", str(tmp_path / "fifos"))


async def test_extended_attributes_of_users_are_preserved_and_no_others(root: Path) -> None:
    for path in (root / "f", root / "folder"):
        path.mkdir() if path.name == "folder" else path.write_bytes(b"data")
        os.setxattr(path, "user.e2b.kind", b"\0\xffvalue")
        if os.geteuid() == 0:
            os.setxattr(path, "trusted.kind", b"x")
    await pack_and_unpack(root)
    for path in (root / "f", root / "folder"):
        assert os.getxattr(path, "user.e2b.kind") == b"\0\xffvalue"
        assert "trusted.kind" not in os.listxattr(path)


@pytest.mark.parametrize("piece_bytes", [packing_module._PIECE_BYTES, 16 * 1024], ids=["one piece", "small pieces"])
async def test_packing_and_unpacking_preserves_files_and_metadata(
    root: Path, monkeypatch: pytest.MonkeyPatch, piece_bytes: int
) -> None:
    monkeypatch.setattr(packing_module, "_PIECE_BYTES", piece_bytes)
    (root / "a dir" / "in\nner").mkdir(parents=True)
    (root / "a dir" / "in\nner" / os.fsdecode(b"\xff -rf")).write_bytes(b"\x00data")
    (root / "run").write_text("#!/bin/sh\n")
    (root / "run").chmod(0o751)
    os.utime(root / "run", ns=(1, 1_234_567_890_123_456_789))
    (root / "link").symlink_to("../../etc/passwd")
    os.link(root / "run", root / "same")
    os.mkfifo(root / "pipe")
    (root / "closed").mkdir()
    (root / "closed" / "f").write_text("x")
    (root / "closed").chmod(0o555)
    await pack_and_unpack(root)
    assert (root / "a dir" / "in\nner" / os.fsdecode(b"\xff -rf")).read_bytes() == b"\x00data"
    status = (root / "run").stat()
    assert (status.st_mode & 0o7777, status.st_mtime_ns, status.st_nlink) == (0o751, 1_234_567_890_123_456_789, 2)
    assert (root / "link").readlink() == Path("../../etc/passwd")
    assert (root / "same").samefile(root / "run")
    assert (root / "pipe").is_fifo()
    assert ((root / "closed").stat().st_mode & 0o777, (root / "closed" / "f").read_text()) == (0o555, "x")


async def test_a_sparse_file_is_packed_small_and_restored_sparse(root: Path) -> None:
    (root / "sparse").touch()
    os.truncate(root / "sparse", 512 * MIB)
    data, _ = await pack_to_memory(LocalGuest(), root)
    assert len(data) < MIB
    await pack_and_unpack(root)
    status = (root / "sparse").stat()
    assert (status.st_size, status.st_blocks * 512 < MIB) == (512 * MIB, True)


async def test_sockets_are_left_out_and_counted(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_UNIX) as one:
        monkeypatch.chdir(root)  # a socket's own path is short
        one.bind("s")
    (root / "f").write_text("x")
    _, facts = await pack_to_memory(LocalGuest(), root)
    assert facts.skipped == 1


async def test_a_large_workspace_is_packed_with_bounded_memory(root: Path) -> None:
    (root / "large").write_bytes(os.urandom(MIB) * 24)
    guest = await pack_and_unpack(root)
    assert (root / "large").stat().st_size == 24 * MIB
    assert guest.most_in_flight <= 4 * MIB


async def test_an_endless_archive_is_stopped_at_the_size_limit() -> None:
    async def flood(_: Any, sink: Callable[[Frame], None]) -> dict[str, Any]:
        while True:
            sink(Frame({"ev": "data", "stream": "stdout"}, bytes(65_536)))
            await asyncio.sleep(0)

    guest = ScriptedGuest(flood)
    with pytest.raises(ToolFailure, match="more than 1048576 bytes"):
        await pack_to_memory(guest, Path("/workspace"), max_bytes=MIB)
    assert guest.cancelled == 1


async def test_the_guest_stream_is_drained_after_the_store_fails() -> None:
    """Unread, it could not say that it has ended: its container would be removed, and a store's failure cost a session
    its files.
    """

    async def full_of_data(_: Any, sink: Callable[[Frame], None]) -> dict[str, Any]:
        try:
            for _ in range(100):
                sink(Frame({"ev": "data", "stream": "stdout"}, bytes(65_536)))
            await asyncio.Event().wait()
        finally:
            for _ in range(100):  # what was on its way
                sink(Frame({"ev": "data", "stream": "stdout"}, bytes(65_536)))
        return {}

    async def fail(_: bytes) -> None:
        raise SandboxUnavailable("the disk is full")

    guest = ScriptedGuest(full_of_data)
    with pytest.raises(SandboxUnavailable, match="disk is full"):
        await pack(guest, ("/workspace",), fail, 64 * MIB)
    assert (guest.cancelled, guest.was_held.is_set(), guest.is_held) == (1, True, False)


@pytest.mark.parametrize(
    ("done", "code"),
    [
        ({"exit_code": 2}, ErrorCode.INTERNAL),
        ({"exit_code": 2, "stderr": b"tar: f: No space left on device"}, ErrorCode.NO_SPACE),
        ({"exit_code": True}, ErrorCode.INTERNAL),
        ({"exit_code": "0"}, ErrorCode.INTERNAL),
        ({"exit_code": None, "timed_out": True}, ErrorCode.TIMEOUT),
        ({"error": {"code": "SPAWN_FAILED", "message": "no room\x1b[0m"}}, ErrorCode.INTERNAL),
        ({"error": {}}, ErrorCode.INTERNAL),
    ],
)
async def test_a_failed_tar_in_the_guest_is_an_error(done: dict[str, Any], code: ErrorCode) -> None:
    guest = ScriptedGuest(lambda request, sink: reply(request, sink, stdout=b"half", **done))
    with pytest.raises(ToolFailure) as failed:
        await pack_to_memory(guest, Path("/workspace"))
    assert (failed.value.code, "\x1b" in failed.value.message) == (code, False)


async def test_a_file_changed_during_packing_is_reported() -> None:
    guest = ScriptedGuest(lambda request, sink: reply(request, sink, stdout=b"tar", exit_code=1))
    _, facts = await pack_to_memory(guest, Path("/workspace"))
    assert facts.files_changed is True


async def test_cancelling_the_packing_cancels_it_in_the_guest() -> None:
    guest = ScriptedGuest(never_reply)
    packing = asyncio.ensure_future(pack_to_memory(guest, Path("/workspace")))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    packing.cancel()
    await asyncio.wait({packing}, timeout=5)
    assert (packing.cancelled(), guest.cancelled) == (True, 1)


async def test_a_truncated_archive_is_refused(root: Path) -> None:
    (root / "f").write_bytes(b"x" * MIB)
    guest = LocalGuest()
    data, _ = await pack_to_memory(guest, root)
    with pytest.raises(SandboxUnavailable, match="bytes were read instead of"):
        await unpack(guest, unpack_roots((str(root),)), read_chunks(data[: len(data) // 2]), len(data))


async def test_an_error_of_the_store_propagates_from_unpacking(root: Path) -> None:
    (root / "f").write_bytes(b"x" * MIB)
    data, _ = await pack_to_memory(LocalGuest(), root)

    async def read_damaged() -> AsyncIterator[bytes]:
        yield data
        raise SandboxUnavailable("damaged")

    with pytest.raises(SandboxUnavailable, match="damaged"):
        await unpack(LocalGuest(), unpack_roots((str(root),)), read_damaged(), len(data))


async def test_only_entries_below_the_roots_are_unpacked(root: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "f").write_text("x")
    (root / "f").write_text("x")
    guest = LocalGuest()
    data, _ = await pack_to_memory(guest, root, other)
    (other / "f").unlink()
    (root / "f").unlink()
    await unpack(guest, unpack_roots((str(root),)), read_chunks(data), len(data))
    assert ((root / "f").exists(), (other / "f").exists()) == (True, False)


async def test_unpacking_into_a_full_workspace_fails_with_no_space() -> None:
    full = b"tar: f: Cannot write: No space left on device"
    guest = ScriptedGuest(reply, lambda request, sink: reply(request, sink, stderr=full, exit_code=2), never_reply)
    with pytest.raises(ToolFailure) as refused:
        await unpack(guest, unpack_roots(("/workspace",)), read_chunks(bytes(5 * MIB)), 5 * MIB)
    assert (refused.value.code, guest.cancelled) == (ErrorCode.NO_SPACE, 1)


async def test_a_guest_that_reads_no_data_does_not_block_the_restore(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing_module, "_LAST_ERROR_S", 0.05)
    guest = ScriptedGuest(
        reply, never_reply, lambda request, sink: reply(request, sink, stderr=b"cat: no room", exit_code=1)
    )
    waiting = asyncio.ensure_future(unpack(guest, unpack_roots(("/workspace",)), read_chunks(bytes(5 * MIB)), 5 * MIB))
    with pytest.raises(ToolFailure, match="could not be unpacked"):
        await asyncio.wait_for(waiting, SOON_S)
    assert guest.cancelled == 1


async def test_a_stopped_tar_ends_the_packing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program of the session stops the `tar` of its own user."""
    monkeypatch.setattr(packing_module, "PROGRESS_S", 0.05)
    guest = ScriptedGuest(never_reply)
    with pytest.raises(ToolFailure) as stopped:
        await pack_to_memory(guest, Path("/workspace"))
    assert (stopped.value.code, guest.cancelled) == (ErrorCode.TIMEOUT, 1)


async def test_a_tar_that_sends_a_byte_now_and_then_ends_the_packing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing_module, "PROGRESS_S", 0.3)

    async def trickle(request: Mapping[str, Any], sink: Callable[[Frame], None]) -> Mapping[str, Any]:
        while True:
            sink(Frame({"stream": "stdout"}, b"x"))
            await asyncio.sleep(0.01)

    guest = ScriptedGuest(trickle)
    with pytest.raises(ToolFailure) as stopped:
        await asyncio.wait_for(pack_to_memory(guest, Path("/workspace")), SOON_S)
    assert (stopped.value.code, guest.cancelled) == (ErrorCode.TIMEOUT, 1)


async def test_only_the_wait_for_the_guest_counts_as_missing_progress(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store is slow, and `tar` is not."""
    monkeypatch.setattr(packing_module, "LEAST_BYTES_PER_S", MIB)
    timer = packing_module._GuestTimer("packed")
    monkeypatch.setattr(packing_module, "PROGRESS_S", SOON_S)
    async with timer.waiting():
        pass
    monkeypatch.setattr(packing_module, "PROGRESS_S", 0.2)
    for _ in range(3):
        await asyncio.sleep(0.15)
        async with timer.waiting():
            pass
    with pytest.raises(ToolFailure):
        async with timer.waiting():
            await asyncio.sleep(SOON_S)


@pytest.mark.parametrize("size", [MIB, 5 * MIB])
async def test_a_stopped_tar_ends_the_unpacking(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """The `tar` of the tenant's image reads nothing."""
    monkeypatch.setattr(packing_module, "PROGRESS_S", 0.05)
    monkeypatch.setattr(packing_module, "LEAST_BYTES_PER_S", 1024 * MIB)
    guest = ScriptedGuest(*([reply] if size > 4 * MIB else []), never_reply, never_reply)
    with pytest.raises(ToolFailure) as stopped:
        await asyncio.wait_for(unpack(guest, unpack_roots(("/workspace",)), read_chunks(bytes(size)), size), SOON_S)
    assert (stopped.value.code, guest.cancelled) == (ErrorCode.TIMEOUT, 2 if size > 4 * MIB else 1)


def test_the_archive_size_limit_includes_file_headers() -> None:
    assert count_max_bytes(MIB, 1000) > MIB + 1000 * 512


async def test_a_workspace_above_the_archive_limit_is_refused(root: Path) -> None:
    (root / "large").write_bytes(b"x" * 3 * MIB)
    guest = LocalGuest()
    with pytest.raises(ToolFailure) as refused:
        await pack_to_memory(guest, root, max_bytes=MIB)
    assert refused.value.code is ErrorCode.FILE_TOO_LARGE
