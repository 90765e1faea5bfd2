"""Uploads: streamed into the store, bounded, of known kinds, and of their tenant alone."""

import asyncio
import gzip
import os
import shutil
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import redis.asyncio

from tests.conftest import RedisProcess
from tests.support.stack.waiting import SOON_S, wait_until_async
from toolcrew.archives.folder import FolderStore
from toolcrew.contract.errors import BrokerUnavailable, ErrorCode, SandboxUnavailable, ToolFailure
from toolcrew.contract.file_ids import SHARED, file_created_at, new_file_id, parse_location
from toolcrew.contract.settings import OrchestratorSettings
from toolcrew.orchestrator.batches import stored_files
from toolcrew.orchestrator.batches.stored_files import StoredFiles
from toolcrew.store import stored_bytes
from toolcrew.store.stored_bytes import StoredBytes
from toolcrew.store.usage import DAY_S, StoredChange, UsageStore, sum_rows

TAR_GZ = gzip.compress(b"x")


class Counts(StoredBytes):
    """The counts of one deployment, with a limit that a test can change."""

    limit = 10**12

    def __init__(self, server: RedisProcess) -> None:
        self.redis = redis.asyncio.Redis.from_url(server.url)
        self.usage = UsageStore(self.redis, "d")
        super().__init__(self.redis, "d", self._limit_of)

    async def _limit_of(self, tenant: str) -> int:
        return self.limit

    async def stored_bytes(self, tenant: str = "acme") -> int:
        now = time.time()
        return sum_rows(await self.usage.read(tenant, now - DAY_S, now + DAY_S))["stored_bytes"]


class SlowDeletes(FolderStore):
    """A store that, like an object store, answers every concurrent deletion of a file with success."""

    def __init__(self, folder: Path, count: int) -> None:
        super().__init__(folder)
        self._arrived = asyncio.Barrier(count)

    async def delete(self, name: str) -> bool:
        await self.describe(name)
        await self._arrived.wait()
        await super().delete(name)
        return True


@pytest.fixture
def usage(redis_server: RedisProcess) -> Counts:
    return Counts(redis_server)


@pytest.fixture
def files(tmp_path: Path) -> StoredFiles:
    return StoredFiles(FolderStore(tmp_path), max_bytes=100_000)


async def chunks(*parts: bytes) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


async def test_upload_is_read_back_only_by_its_tenant(files: StoredFiles, usage: Counts) -> None:
    stored = await files.upload("acme", chunks(TAR_GZ[:3], TAR_GZ[3:]), usage)
    assert stored.bytes == len(TAR_GZ)
    assert b"".join([chunk async for chunk in files.read("acme", stored.id)]) == TAR_GZ
    assert [file.id for file in (await files.list_page("acme"))[0]] == [stored.id]
    assert (await files.list_page("rival"))[0] == []
    for attempt in (files.get("rival", stored.id), files.delete("rival", stored.id, usage)):
        with pytest.raises(ToolFailure) as refused:
            await attempt
        assert refused.value.code is ErrorCode.FILE_NOT_FOUND
    assert await files.find_missing("rival", [stored.id]) == [stored.id]
    await files.delete("acme", stored.id, usage)
    assert await files.find_missing("acme", [stored.id]) == [stored.id]


async def test_upload_counts_until_it_is_deleted(files: StoredFiles, usage: Counts) -> None:
    first = await files.upload("acme", chunks(TAR_GZ), usage)
    await files.upload("acme", chunks(TAR_GZ), usage)
    assert await usage.stored_bytes() == 2 * len(TAR_GZ)
    await files.delete("acme", first.id, usage)
    with pytest.raises(ToolFailure):
        await files.delete("acme", first.id, usage)
    assert await usage.stored_bytes() == len(TAR_GZ)


async def test_upload_that_cannot_be_counted_is_not_stored(
    files: StoredFiles, usage: Counts, redis_server: RedisProcess
) -> None:
    redis_server.stop()
    with pytest.raises(BrokerUnavailable):
        await files.upload("acme", chunks(TAR_GZ), usage)
    assert (await files.list_page("acme"))[0] == []


@pytest.mark.parametrize(
    ("parts", "code"),
    [
        ((b"plain text",), ErrorCode.INVALID_ARGUMENTS),
        ((), ErrorCode.INVALID_ARGUMENTS),
        ((TAR_GZ, bytes(100_000)), ErrorCode.FILE_TOO_LARGE),
    ],
)
async def test_refused_upload_leaves_no_file(
    files: StoredFiles, usage: Counts, parts: tuple[bytes, ...], code: ErrorCode, tmp_path: Path
) -> None:
    with pytest.raises(ToolFailure) as refused:
        await files.upload("acme", chunks(*parts), usage)
    assert refused.value.code is code
    assert [name for _, _, names in os.walk(tmp_path) for name in names] == []


async def test_number_of_uploads_per_tenant_is_limited(
    files: StoredFiles, usage: Counts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_files, "MAX_UPLOADS", 1)
    await files.upload("acme", chunks(TAR_GZ), usage)
    await files.upload("rival", chunks(TAR_GZ), usage)
    with pytest.raises(ToolFailure) as refused:
        await files.upload("acme", chunks(TAR_GZ), usage)
    assert refused.value.code is ErrorCode.QUOTA_EXCEEDED


async def test_concurrent_deletes_subtract_a_file_once(usage: Counts, tmp_path: Path) -> None:
    files = StoredFiles(SlowDeletes(tmp_path, 10))
    stored = await files.upload("acme", chunks(TAR_GZ), usage)
    await asyncio.gather(*(files.delete("acme", stored.id, usage) for _ in range(10)))
    assert await usage.stored_bytes() == 0


async def test_delete_after_a_crash_between_deletion_and_count_subtracts_the_file(
    files: StoredFiles, usage: Counts, tmp_path: Path
) -> None:
    stored = await files.upload("acme", chunks(TAR_GZ), usage)
    await FolderStore(tmp_path).delete(f"acme/{stored.id}")
    await files.delete("acme", stored.id, usage)
    assert await usage.stored_bytes() == 0


async def test_next_upload_repairs_the_counts_that_crashes_left(
    files: StoredFiles, usage: Counts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_files, "REPAIR_AGE_S", -10.0)
    lost, uncounted = new_file_id("file"), new_file_id("artifacts")
    await usage.change("acme", StoredChange(lost, 1000))
    await FolderStore(tmp_path).put(f"acme/{uncounted}", chunks(b"x" * 100))
    stored = await files.upload("acme", chunks(TAR_GZ), usage)
    assert await usage.stored_bytes() == stored.bytes + 100
    assert await usage.list_recorded("acme") == {uncounted, stored.id}


async def test_concurrent_uploads_never_exceed_the_limit_of_stored_bytes(usage: Counts, tmp_path: Path) -> None:
    files, usage.limit, piece = StoredFiles(FolderStore(tmp_path)), 20 * 1024 * 1024, 1024 * 1024

    async def content() -> AsyncIterator[bytes]:
        yield TAR_GZ.ljust(piece)
        for _ in range(4):
            yield bytes(piece)

    ends = await asyncio.gather(*(files.upload("acme", content(), usage) for _ in range(8)), return_exceptions=True)
    refused = [end for end in ends if isinstance(end, ToolFailure)]
    assert refused
    assert {end.code for end in refused} == {ErrorCode.QUOTA_EXCEEDED}
    assert await usage.stored_bytes() == 5 * piece * (8 - len(refused)) <= usage.limit
    assert len((await files.list_page("acme"))[0]) == 8 - len(refused)
    assert await usage.redis.hlen(usage._reservations("acme")) == 0
    await files.upload("rival", content(), usage)


async def test_artifacts_and_uploads_share_the_limit(files: StoredFiles, usage: Counts) -> None:
    usage.limit = 1000
    await usage.change("acme", StoredChange(new_file_id("artifacts"), 999))
    await usage.check("acme")
    with pytest.raises(ToolFailure) as refused:
        await files.upload("acme", chunks(TAR_GZ), usage)
    assert refused.value.code is ErrorCode.QUOTA_EXCEEDED
    await usage.change("acme", StoredChange(new_file_id("artifacts"), 1))
    with pytest.raises(ToolFailure):
        await usage.check("acme")


async def test_reservation_of_a_dead_process_expires(usage: Counts) -> None:
    usage.limit = 1000
    await usage.reserve("acme", new_file_id("file"), 1000)
    with pytest.raises(ToolFailure):
        await usage.check("acme")
    await usage.redis.delete(usage._reservations("acme"))
    # The time of expiry of this reservation, in Unix seconds, is over.
    await usage.redis.hset(usage._reservations("acme"), "file-of-a-dead-process", "1 1000")
    await usage.check("acme")


async def test_slow_upload_keeps_its_reservation(
    usage: Counts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_bytes, "RESERVED_S", 1)
    renewed, reservations = asyncio.Event(), usage._reservations("acme")

    async def slow_chunks() -> AsyncIterator[bytes]:
        yield TAR_GZ + bytes(stored_files._PIECE_BYTES)
        first = await usage.redis.hgetall(reservations)

        async def is_renewed() -> bool:
            return await usage.redis.hgetall(reservations) not in (first, {})

        await wait_until_async(is_renewed, SOON_S, "the reservation was not renewed")
        renewed.set()

    await StoredFiles(FolderStore(tmp_path)).upload("acme", slow_chunks(), usage)
    assert renewed.is_set()


async def test_upload_whose_reservation_was_lost_is_counted_against_the_limit_again(
    usage: Counts, tmp_path: Path
) -> None:
    async def interrupted_chunks() -> AsyncIterator[bytes]:
        yield TAR_GZ.ljust(stored_files._PIECE_BYTES)
        # The first piece is reserved when the next one is read. Redis loses the reservation, and another upload takes
        # the bytes.
        yield b"x"
        await usage.release("acme", next(iter(await usage.redis.hgetall(usage._reservations("acme")))).decode())
        await usage.reserve("acme", new_file_id("file"), usage.limit)

    usage.limit = 20 * 1024 * 1024
    with pytest.raises(ToolFailure) as refused:
        await StoredFiles(FolderStore(tmp_path)).upload("acme", interrupted_chunks(), usage)
    assert refused.value.code is ErrorCode.QUOTA_EXCEEDED
    assert [name for _, _, names in os.walk(tmp_path) for name in names] == []
    assert await usage.stored_bytes() == 0


async def test_uploads_leave_free_space_for_checkpoints(usage: Counts, tmp_path: Path) -> None:
    free = shutil.disk_usage(tmp_path).free
    settings = OrchestratorSettings(workspace_store=str(tmp_path), host_free_bytes=free)
    with pytest.raises(SandboxUnavailable, match="bytes free"):
        await StoredFiles.of(settings).upload("acme", chunks(TAR_GZ), usage)
    assert await usage.stored_bytes() == 0


@pytest.mark.parametrize("file", ["../rival/x", "auto-00000000-aaaaaaaaaaaaaaaaaaaaaaaa", "file-", "file-00000000-zz"])
async def test_invalid_file_ids_are_refused(files: StoredFiles, file: str) -> None:
    assert file_created_at(file) is None
    with pytest.raises(ToolFailure):
        await files.get("acme", file)


@pytest.mark.parametrize(
    "path",
    [
        "rival/a.tar",
        "acme/../rival/a",
        "acme/./a",
        "acme//a",
        "acme/",
        "acme",
        "../a",
        "acme/a\0b",
        "acme/a\nb",
        f"{SHARED}x/a",
    ],
)
@pytest.mark.parametrize("root", ["s3://bucket/prefix", "/srv/store"])
def test_locations_outside_the_tenant_folder_are_refused(path: str, root: str) -> None:
    url = root if "://" in root else f"file://{root}"
    with pytest.raises(ValueError, match=r"the file (is not in the store|does not belong to tenant)"):
        parse_location(f"{url}/{path}", root, "acme")
    assert parse_location(f"{url}/acme/a b/c.tar", root, "acme") == "acme/a b/c.tar"
    assert parse_location(f"{url}/{SHARED}/c.tar", root, "acme") == f"{SHARED}/c.tar"
