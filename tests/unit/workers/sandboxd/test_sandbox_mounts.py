"""The mounts of a sandbox's root file system, whose tree the programs of the sandbox may have changed."""

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.stack.stack import missing
from toolcrew.workers.sandboxd.disks.mounts import (
    ROOTS,
    attach_below,
    attached,
    attached_together,
    clone_tree,
    list_mounts,
    mount_overlay,
    run_in_private_namespace,
    set_attributes,
)
from toolcrew.workers.sandboxd.runtime.id_ranges import FIRST_ID, IdRanges

REDIRECTS = Path("/sys/module/overlay/parameters/redirect_dir")


@pytest.fixture
def namespace(tmp_path: Path) -> Iterator[int]:
    if os.geteuid() != 0:
        missing("mounts are made by root: run the tests as root")
    ranges = IdRanges(tmp_path / "ids")
    try:
        yield ranges.namespace(FIRST_ID)
    finally:
        ranges.close()


@contextlib.contextmanager
def redirects_on_by_default() -> Iterator[None]:
    """Give the kernel the default of some distributions, only for the moment in which an overlay is mounted."""
    before = REDIRECTS.read_text().strip()
    REDIRECTS.write_text("Y")
    try:
        yield
    finally:
        REDIRECTS.write_text(before)


def make_overlay(folder: Path, namespace: int) -> int:
    """Mount an overlay over a lower folder with `opt/toolcrew`, as the skeleton of sandboxes has it."""
    (folder / "lower/opt/toolcrew").mkdir(parents=True)
    disk = folder / "disk"
    for part in ("changes", "work"):
        (disk / part).mkdir(parents=True)
    mount = clone_tree(disk)
    set_attributes(mount, 0, namespace)
    with attached(mount, ROOTS):
        fds = tuple(os.open(ROOTS / part, os.O_PATH | os.O_DIRECTORY) for part in ("changes", "work"))
        root = mount_overlay([str(folder / "lower")], namespace, (fds[0], fds[1]))
    for fd in (mount, *fds):
        os.close(fd)
    return root


def test_folders_of_an_image_cannot_be_renamed_where_the_kernel_allows_redirects(
    tmp_path: Path, namespace: int
) -> None:
    if not REDIRECTS.exists():
        missing("the kernel has no parameters of overlays")

    def work() -> None:
        with redirects_on_by_default():
            root = make_overlay(tmp_path, namespace)
        with attached(root, ROOTS):
            with pytest.raises(OSError, match="cross-device") as refused:
                os.rename(ROOTS / "opt", ROOTS / "other")
            assert refused.value.errno == errno.EXDEV
        os.close(root)

    run_in_private_namespace(work, [tmp_path])


@pytest.mark.parametrize("link", ["/run", "../../..", "/proc/self/root", "other"])
@pytest.mark.parametrize("folder", ["opt", "opt/toolcrew"])
def test_a_mount_point_behind_a_link_is_refused(tmp_path: Path, folder: str, link: str) -> None:
    if os.geteuid() != 0:
        missing("mounts are made by root: run the tests as root")
    source, tree = tmp_path / "source", tmp_path / "tree"
    source.mkdir()
    (tree / "opt/toolcrew").mkdir(parents=True)
    (tree / "other/toolcrew").mkdir(parents=True)
    shutil.rmtree(tree / folder)
    (tree / folder).symlink_to(link)

    def work() -> None:
        root, mount = clone_tree(tree), clone_tree(source)
        with attached(root, ROOTS):
            with pytest.raises(OSError, match="opt/toolcrew") as refused:
                attach_below(mount, root, "opt/toolcrew")
            assert refused.value.errno in (errno.ELOOP, errno.ENOTDIR)

    run_in_private_namespace(work, [tmp_path])


def test_a_mount_is_attached_to_the_folder_below_the_root(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        missing("mounts are made by root: run the tests as root")
    (tmp_path / "source/content").mkdir(parents=True)
    (tmp_path / "tree/opt/toolcrew").mkdir(parents=True)

    def work() -> None:
        root, mount = clone_tree(tmp_path / "tree"), clone_tree(tmp_path / "source")
        with attached(root, ROOTS):
            attach_below(mount, root, "opt/toolcrew")
            assert os.listdir(ROOTS / "opt/toolcrew") == ["content"]
        assert not (ROOTS / "opt").exists()

    run_in_private_namespace(work, [tmp_path])


def test_layers_can_have_any_name_and_only_the_overlay_remains(tmp_path: Path, namespace: int) -> None:
    layers = [tmp_path / name for name in ("a:b", "c,d=e", "f\\g")]
    for layer in layers:
        layer.mkdir()
        (layer / layer.name).touch()

    def work() -> int:
        before = list_mounts()
        overlay = mount_overlay([str(layer) for layer in layers], namespace)
        assert list_mounts() == before
        return overlay

    before, overlay = list_mounts(), run_in_private_namespace(work, [tmp_path])
    assert sorted(os.listdir(f"/proc/self/fd/{overlay}")) == sorted(layer.name for layer in layers)
    os.close(overlay)
    assert list_mounts() == before


def test_folders_of_detached_mounts_are_layers_after_they_are_attached(tmp_path: Path, namespace: int) -> None:
    mounts = []
    for name in ("upper", "lower"):
        (tmp_path / name / "files" / name).mkdir(parents=True)
        mounts.append(clone_tree(tmp_path / name, id_map=namespace))

    def work() -> int:
        with attached_together(mounts, "disks"):
            folders = [os.open("files", os.O_PATH | os.O_DIRECTORY, dir_fd=mount) for mount in mounts]
            overlay = mount_overlay(folders, None)
            for fd in folders:
                os.close(fd)
        return overlay

    overlay = run_in_private_namespace(work)
    assert sorted(os.listdir(f"/proc/self/fd/{overlay}")) == ["lower", "upper"]
    for fd in (overlay, *mounts):
        os.close(fd)


def test_more_layers_than_the_kernel_reads_are_refused_with_their_number(tmp_path: Path, namespace: int) -> None:
    def work() -> None:
        with pytest.raises(OSError, match=r"too many layers \(400\)") as refused:
            mount_overlay([str(tmp_path)] * 400, namespace)
        assert refused.value.errno == errno.E2BIG
        assert os.listdir(ROOTS) == []

    run_in_private_namespace(work, [tmp_path])


def test_as_many_layers_as_an_image_and_its_forks_have_are_mounted(tmp_path: Path, namespace: int) -> None:
    for number in range(240):
        (tmp_path / str(number) / f"in-{number}").mkdir(parents=True)

    def work() -> int:
        return mount_overlay([str(tmp_path / str(number)) for number in range(240)], namespace)

    overlay = run_in_private_namespace(work, [tmp_path])
    assert len(os.listdir(f"/proc/self/fd/{overlay}")) == 240
    os.close(overlay)
