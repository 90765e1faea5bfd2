"""Checkpoints: the contents of a sandbox are restored in another sandbox, for the same tenant only."""

import asyncio
import time
from pathlib import Path

import pytest

from tests.support.guest.local_guest import LocalGuest
from tests.support.stack.waiting import SOON_S
from toolcrew.archives.folder import FolderStore
from toolcrew.contract.errors import ErrorCode, SandboxUnavailable, ToolFailure
from toolcrew.workers.sandboxd.archives.checkpoints import Checkpoints, StoredCheckpoint


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "workspace").mkdir()
    (tmp_path / "workspace" / "f").write_text("kept")
    return tmp_path / "workspace"


@pytest.fixture
def checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Checkpoints:
    monkeypatch.setattr("toolcrew.workers.sandboxd.archives.packing._FIFO_FOLDER", str(tmp_path))
    return Checkpoints(FolderStore(tmp_path / "store"), max_checkpoints=2)


async def save(checkpoints: Checkpoints, root: Path, tenant: str = "acme") -> StoredCheckpoint:
    return await checkpoints.save(tenant, LocalGuest(), roots=(str(root),))


async def test_checkpoint_of_another_tenant_is_not_found(checkpoints: Checkpoints, root: Path) -> None:
    saved = await save(checkpoints, root)
    for tenant, name in (
        ("umbrella", saved.id),
        ("acme", "unknown"),
        ("umbrella", f"../acme/{saved.id}"),
        ("acme", ""),
    ):
        with pytest.raises(ToolFailure, match="no such checkpoint") as refused:
            await checkpoints.load(tenant, name, LocalGuest())
        assert refused.value.code is ErrorCode.FILE_NOT_FOUND
    assert await checkpoints.forget("umbrella", saved.id) is False


async def test_forgotten_checkpoint_cannot_be_loaded(checkpoints: Checkpoints, root: Path, tmp_path: Path) -> None:
    saved = await save(checkpoints, root)
    assert (tmp_path / "store" / "acme" / f"{saved.id}.tar").stat().st_size == saved.bytes
    assert await checkpoints.forget("acme", saved.id) is True
    with pytest.raises(ToolFailure, match="no such checkpoint"):
        await checkpoints.load("acme", saved.id, LocalGuest())


async def test_damaged_checkpoint_is_not_restored(checkpoints: Checkpoints, root: Path, tmp_path: Path) -> None:
    saved = await save(checkpoints, root)
    path = tmp_path / "store" / "acme" / f"{saved.id}.tar"
    path.write_bytes(path.read_bytes().replace(b"kept", b"kepT"))
    with pytest.raises(SandboxUnavailable, match="damaged"):
        await checkpoints.load("acme", saved.id, LocalGuest())


async def test_checkpoint_above_the_size_limit_is_not_stored(
    checkpoints: Checkpoints, root: Path, tmp_path: Path
) -> None:
    with pytest.raises(ToolFailure) as refused:
        await checkpoints.save("acme", LocalGuest(), roots=(str(root),), max_bytes=100)
    assert refused.value.code is ErrorCode.FILE_TOO_LARGE
    assert list((tmp_path / "store" / "acme").iterdir()) == []


async def test_save_of_a_checkpoint_times_out_with_a_silent_guest(root: Path, tmp_path: Path) -> None:
    guest = LocalGuest()
    slow = Checkpoints(FolderStore(tmp_path / "store"), save_s=0.2)
    guest.hold(slow)  # as a store whose answers do not arrive
    with pytest.raises(ToolFailure) as refused:
        await asyncio.wait_for(slow.save("acme", guest, roots=(str(root),)), SOON_S)
    assert (refused.value.code, list((tmp_path / "store" / "acme").iterdir())) == (ErrorCode.TIMEOUT, [])


async def test_number_of_checkpoints_per_tenant_is_limited(checkpoints: Checkpoints, root: Path) -> None:
    first = await save(checkpoints, root)
    await save(checkpoints, root)
    with pytest.raises(ToolFailure) as refused:
        await save(checkpoints, root)
    assert refused.value.code is ErrorCode.NO_SPACE
    await save(checkpoints, root, "umbrella")
    await checkpoints.forget("acme", first.id)
    await save(checkpoints, root)


async def test_automatic_checkpoints_do_not_count_and_expire_by_age(
    checkpoints: Checkpoints, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requested = [(await save(checkpoints, root)).id for _ in range(2)]
    old = [(await checkpoints.save("acme", LocalGuest(), roots=(str(root),), is_automatic=True)).id for _ in range(3)]
    now = time.time() + 1000
    monkeypatch.setattr(time, "time", lambda: now)
    new = (await checkpoints.save("acme", LocalGuest(), roots=(str(root),), is_automatic=True)).id
    assert await checkpoints.forget_old(max_age_s=500) == 3
    deleted = [await checkpoints.forget("acme", name) for name in (*requested, *old, new)]
    assert deleted == [True, True, False, False, False, True]


async def test_two_daemons_with_one_folder_share_checkpoints(
    root: Path, tmp_path: Path, checkpoints: Checkpoints
) -> None:
    saved = await save(checkpoints, root)
    (root / "f").unlink()
    other = Checkpoints(FolderStore(tmp_path / "store"), max_checkpoints=2)
    await other.load("acme", saved.id, LocalGuest())
    assert (
        (root / "f").read_text(),
        await other.forget("acme", saved.id),
        await checkpoints.forget("acme", saved.id),
    ) == ("kept", True, False)


async def test_forget_all_but_deletes_unlisted_checkpoints(checkpoints: Checkpoints, root: Path) -> None:
    listed, unlisted = await save(checkpoints, root), await save(checkpoints, root)
    assert await checkpoints.forget_all_but({("acme", listed.id), ("umbrella", unlisted.id)}) == 1
    assert (await checkpoints.forget("acme", unlisted.id), await checkpoints.forget("acme", listed.id)) == (
        False,
        True,
    )
