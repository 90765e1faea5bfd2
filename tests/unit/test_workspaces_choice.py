"""The choice of the workspace kind in each environment, and the message about the choice."""

import os
from pathlib import Path

import pytest

from contract.errors import SandboxUnavailable
from tests.workspace_harness import MIB, require_images
from workers.sandboxd.disks import choice, ext4
from workers.sandboxd.disks.choice import LARGEST_TMPFS_BYTES, WantedKind, choose_workspaces


@pytest.fixture
def without_mkfs(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (choice, ext4):
        monkeypatch.setattr(module, "find_tool", lambda _name: None)


@pytest.fixture
def as_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 4711)


def test_where_images_can_be_mounted_they_are_chosen_and_nothing_is_left_of_the_trial(tmp_path: Path) -> None:
    require_images()

    chosen = choose_workspaces("auto", tmp_path / "state", 1 << 40, 0)

    assert (chosen.workspaces.kind, chosen.note) == ("image", None)
    assert list((tmp_path / "state" / "workspaces").iterdir()) == []


@pytest.mark.usefixtures("without_mkfs")
@pytest.mark.parametrize(
    ("size", "kind"), [(MIB, "tmpfs"), (LARGEST_TMPFS_BYTES, "tmpfs"), (LARGEST_TMPFS_BYTES + 1, "folder")]
)
def test_without_images_small_ones_are_tmpfs_and_large_ones_folders(tmp_path: Path, size: int, kind: str) -> None:
    chosen = choose_workspaces("auto", tmp_path, size, 0)

    assert chosen.workspaces.kind == kind
    assert chosen.note is not None
    assert chosen.note.startswith("no images: ")


@pytest.mark.usefixtures("as_user")
def test_images_that_were_asked_for_are_not_replaced(tmp_path: Path) -> None:
    with pytest.raises(SandboxUnavailable, match="sandboxd is not root"):
        choose_workspaces("image", tmp_path, MIB, 0)


@pytest.mark.usefixtures("as_user")
@pytest.mark.parametrize("wanted", ["auto", "folder"])
def test_a_user_who_could_not_count_the_sandboxes_files_gets_no_folders(tmp_path: Path, wanted: WantedKind) -> None:
    with pytest.raises(SandboxUnavailable, match="neither count nor delete"):
        choose_workspaces(wanted, tmp_path, LARGEST_TMPFS_BYTES + 1, 0)


@pytest.mark.parametrize("wanted", ["tmpfs", "folder"])
def test_a_weaker_kind_that_was_asked_for_is_taken_and_its_weakness_said(tmp_path: Path, wanted: WantedKind) -> None:
    chosen = choose_workspaces(wanted, tmp_path, MIB, 0)

    assert chosen.workspaces.kind == wanted
    assert chosen.note is not None


@pytest.mark.usefixtures("without_mkfs")
def test_a_missing_program_is_named(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("another obstacle comes first where sandboxd is not root")
    with pytest.raises(SandboxUnavailable, match="install e2fsprogs"):
        choose_workspaces("image", tmp_path, MIB, 0)


def test_a_state_folder_that_is_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "workspaces").symlink_to(tmp_path / "elsewhere")

    with pytest.raises(SandboxUnavailable, match="must be a folder"):
        choose_workspaces("folder", tmp_path, MIB, 0)
