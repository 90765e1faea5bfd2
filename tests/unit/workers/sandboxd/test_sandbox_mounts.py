"""The mounts of a sandbox's root file system, whose tree the programs of the sandbox may have changed."""

import contextlib
import errno
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.stack.stack import missing
from toolcrew.workers.sandboxd.runtime.id_ranges import FIRST_ID, IdRanges
from toolcrew.workers.sandboxd.runtime.mounts import (
    ROOTS,
    attach_below,
    attached,
    clone_tree,
    enter_private_namespace,
    mount_overlay,
    set_attributes,
)

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


def in_private_namespace(work: Callable[[], None], needed: Path) -> None:
    """Run `work` in a thread with a mount namespace of its own, as sandboxd does, and raise its error."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            enter_private_namespace([needed])
            work()
        except BaseException as error:  # noqa: BLE001  # raised again below
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


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
        root = mount_overlay([folder / "lower"], namespace, (fds[0], fds[1]))
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

    in_private_namespace(work, tmp_path)


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

    in_private_namespace(work, tmp_path)


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

    in_private_namespace(work, tmp_path)
