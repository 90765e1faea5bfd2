"""Uploads: streamed into the store, bounded, of known kinds, and of their tenant alone."""

import gzip
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import redis.asyncio

from contract.errors import BrokerUnavailable, ErrorCode, ToolFailure
from orchestrator.batches import stored_files
from orchestrator.batches.stored_files import StoredFiles
from store.archives.files import SHARED, file_created_at, parse_location
from store.archives.folder import FolderStore
from store.usage import DAY_S, UsageStore, sum_rows
from tests.conftest import RedisProcess

TAR_GZ = gzip.compress(b"x")


@pytest.fixture
def usage(redis_server: RedisProcess) -> UsageStore:
    return UsageStore(redis.asyncio.Redis.from_url(redis_server.url), "d")


@pytest.fixture
def files(tmp_path: Path) -> StoredFiles:
    return StoredFiles(FolderStore(tmp_path), max_bytes=100_000)


async def chunks(*parts: bytes) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


async def test_upload_is_read_back_only_by_its_tenant(files: StoredFiles, usage: UsageStore) -> None:
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


async def test_upload_counts_until_it_is_deleted(files: StoredFiles, usage: UsageStore) -> None:
    async def stored_bytes() -> int:
        now = time.time()
        return sum_rows(await usage.read("acme", now - DAY_S, now + DAY_S))["stored_bytes"]

    first = await files.upload("acme", chunks(TAR_GZ), usage)
    await files.upload("acme", chunks(TAR_GZ), usage)
    assert await stored_bytes() == 2 * len(TAR_GZ)
    await files.delete("acme", first.id, usage)
    with pytest.raises(ToolFailure):
        await files.delete("acme", first.id, usage)
    assert await stored_bytes() == len(TAR_GZ)


async def test_upload_that_cannot_be_counted_is_not_stored(
    files: StoredFiles, usage: UsageStore, redis_server: RedisProcess
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
    files: StoredFiles, usage: UsageStore, parts: tuple[bytes, ...], code: ErrorCode, tmp_path: Path
) -> None:
    with pytest.raises(ToolFailure) as refused:
        await files.upload("acme", chunks(*parts), usage)
    assert refused.value.code is code
    assert [name for _, _, names in os.walk(tmp_path) for name in names] == []


async def test_number_of_uploads_per_tenant_is_limited(
    files: StoredFiles, usage: UsageStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_files, "MAX_UPLOADS", 1)
    await files.upload("acme", chunks(TAR_GZ), usage)
    await files.upload("rival", chunks(TAR_GZ), usage)
    with pytest.raises(ToolFailure) as refused:
        await files.upload("acme", chunks(TAR_GZ), usage)
    assert refused.value.code is ErrorCode.QUOTA_EXCEEDED


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
