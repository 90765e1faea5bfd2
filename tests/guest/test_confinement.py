"""Paths of file requests stay inside the roots. One suite covers the kernel's openat2 and the walk."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.guest.guest_harness import GUEST_PARENT

assert GUEST_PARENT
from guest.confinement import find_entry, open_pinned, pin_file  # noqa: E402
from guest.failures import RequestFailure, describe_os_error  # noqa: E402
from guest.paths import GuestPaths  # noqa: E402

_RACE_TRIES = 3000


@pytest.fixture(params=[True, False], ids=["openat2", "walk"])
def paths(tmp_path: Path, request: pytest.FixtureRequest) -> GuestPaths:
    (tmp_path / "ws" / "sub" / "deep").mkdir(parents=True)
    (tmp_path / "tmp").mkdir()
    (tmp_path / "ws2").mkdir()
    (tmp_path / "ws2" / "f").write_text("outside")
    (tmp_path / "outside").write_text("outside")
    (tmp_path / "tmp" / "t").write_text("in tmp")
    (tmp_path / "ws" / "f").write_text("in f")
    (tmp_path / "ws" / "sub" / "g").write_text("in g")
    return GuestPaths((bytes(tmp_path / "ws"), bytes(tmp_path / "tmp")), use_openat2=request.param)


def read(path: str, paths: GuestPaths) -> str:
    """Return the content at a path. Raises RequestFailure."""
    entry = find_entry(path, paths)
    try:
        pinned = pin_file(entry)
    except OSError as error:
        raise describe_os_error(error, entry.shown) from None
    finally:
        entry.close()
    with os.fdopen(open_pinned(pinned, os.O_RDONLY)) as file:
        os.close(pinned)
        return file.read()


def root(paths: GuestPaths) -> Path:
    return Path(os.fsdecode(paths.workspace))


@pytest.mark.parametrize("path", ["~/f", "file://{root}/f", "f\n", "\r\n~/f\r\n", "file://{root}/sub/../f"])
def test_a_path_may_begin_at_the_home_or_be_a_file_url(paths: GuestPaths, path: str) -> None:
    paths.add_variables({"HOME": str(root(paths))})
    assert read(path.format(root=root(paths)), paths) == "in f"


def test_an_image_cannot_replace_the_variables_of_sandboxd(paths: GuestPaths) -> None:
    paths.add_image_variables(
        {"HOME": "/home/x", "LC_ALL": "C", "TOOLCREW_IMAGE_HOME": "/evil", "TOOLCREW_IMAGE_LC_ALL": "de"}
    )
    assert (paths.environment["HOME"], paths.environment["LC_ALL"]) == ("/home/x", "de")


@pytest.mark.parametrize("path", ["~", "~/f", "file:///etc/passwd"])
def test_a_home_outside_the_roots_is_refused(paths: GuestPaths, path: str) -> None:
    paths.add_variables({"HOME": "/etc"})
    with pytest.raises(RequestFailure) as caught:
        read(path, paths)
    assert caught.value.code == "PATH_NOT_ALLOWED"


@pytest.mark.parametrize(
    ("path", "content"),
    [
        ("f", "in f"),
        ("./f", "in f"),
        ("sub/../f", "in f"),
        ("sub/deep/../../sub/g", "in g"),
        ("sub//g", "in g"),
        ("link", "in f"),
        ("sub/up", "in f"),
        ("dir/g", "in g"),
        ("dir/up", "in f"),
        ("dir/deep/../g", "in g"),
        ("sub/deep/chain", "in f"),
        ("absolute", "in g"),
        ("absdir/g", "in g"),
        ("absdir/../f", "in f"),
        ("to-tmp", "in tmp"),
        ("\udcff", "bytes"),
    ],
)
def test_a_path_that_ends_inside_the_roots_is_followed(paths: GuestPaths, path: str, content: str) -> None:
    ws = root(paths)
    (ws / "link").symlink_to("f")
    (ws / "sub" / "up").symlink_to("../f")
    (ws / "dir").symlink_to("sub")
    (ws / "sub" / "deep" / "chain").symlink_to("../up")
    (ws / "absolute").symlink_to(ws / "sub" / "g")
    (ws / "absdir").symlink_to(ws / "sub")
    (ws / "to-tmp").symlink_to(ws.parent / "tmp" / "t")
    (ws / os.fsdecode(b"\xff")).write_text("bytes")
    assert read(path, paths) == content
    assert read(str(ws / path), paths) == content


@pytest.mark.parametrize(
    "path",
    [
        "../outside", "sub/../../outside", "/etc/passwd", "/", "../ws2/f", "{ws}2/f", "{ws}/../outside", "out",
        "absout", "dirout/outside", "sub/deep/far", "absdirout/passwd", "proc/self/environ", "loop",
    ],
)  # fmt: skip
def test_a_path_that_leaves_the_roots_is_refused(paths: GuestPaths, path: str) -> None:
    ws = root(paths)
    (ws / "out").symlink_to("../outside")
    (ws / "absout").symlink_to("/etc/passwd")
    (ws / "dirout").symlink_to("..")
    (ws / "absdirout").symlink_to("/etc")
    (ws / "sub" / "deep" / "far").symlink_to("../../../outside")
    (ws / "proc").symlink_to("/proc")
    (ws / "loop").symlink_to("loop")
    with pytest.raises(RequestFailure) as caught:
        read(path.format(ws=ws), paths)
    assert caught.value.code == "PATH_NOT_ALLOWED"


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("absent", "FILE_NOT_FOUND"),
        ("absent/f", "FILE_NOT_FOUND"),
        ("f/x", "NOT_A_DIRECTORY"),
        ("f/", "NOT_A_DIRECTORY"),
        ("sub", "IS_DIRECTORY"),
        ("sub/", "IS_DIRECTORY"),
        (".", "IS_DIRECTORY"),
        ("sub/..", "IS_DIRECTORY"),
        ("dangling", "FILE_NOT_FOUND"),
        ("fifo", "NOT_A_REGULAR_FILE"),
        ("socket", "NOT_A_REGULAR_FILE"),
        ("x" * 300, "INVALID_ARGUMENTS"),
        ("\ud800", "INVALID_ARGUMENTS"),
    ],
)
def test_a_path_that_is_not_a_regular_file_is_refused_with_its_code(paths: GuestPaths, path: str, code: str) -> None:
    ws = root(paths)
    (ws / "dangling").symlink_to("absent")
    os.mkfifo(ws / "fifo")
    os.mknod(ws / "socket", 0o140600)
    with pytest.raises(RequestFailure) as caught:
        read(path, paths)
    assert caught.value.code == code


@contextmanager
def exchange_names(one: Path, other: Path) -> Iterator[None]:
    """Run a process that exchanges two names as fast as possible."""
    code = (
        "import ctypes, os, sys\n"
        "libc = ctypes.CDLL(None)\n"
        "one, other = (os.fsencode(path) for path in sys.argv[1:])\n"
        "print('ready', flush=True)\n"
        "while True: libc.renameat2(-100, one, -100, other, 2)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(one), str(other)], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            yield
        finally:
            process.send_signal(signal.SIGKILL)


@pytest.mark.parametrize(
    ("name", "target", "path", "codes"),
    [("sub", "ws2", "sub/g", {"PATH_NOT_ALLOWED", "NOT_A_DIRECTORY"}), ("f", "outside", "f", {"PATH_NOT_ALLOWED"})],
    ids=["directory", "file"],
)
def test_a_path_exchanged_with_a_link_during_a_read_stays_inside(
    paths: GuestPaths, name: str, target: str, path: str, codes: set[str]
) -> None:
    ws = root(paths)
    (ws.parent / "ws2" / "g").write_text("outside")
    (ws / "trap").symlink_to(ws.parent / target)
    inside, outcomes = read(path, paths), set()
    with exchange_names(ws / name, ws / "trap"):
        for _ in range(_RACE_TRIES):
            try:
                outcomes.add(read(path, paths))
            except RequestFailure as failure:
                outcomes.add(failure.code)
    assert inside in outcomes
    assert outcomes <= {inside, *codes}


def test_folders_created_for_a_failed_write_are_removed(paths: GuestPaths) -> None:
    ws = root(paths)
    before = len(os.listdir("/proc/self/fd"))
    find_entry("sub/a/b/c/f", paths, make_parents=True).close()
    assert sorted(path.name for path in (ws / "sub").iterdir()) == ["deep", "g"]
    for path, code in (
        ("new/a/" + "x" * 300 + "/f", "INVALID_ARGUMENTS"),
        ("new/../../f", "PATH_NOT_ALLOWED"),
        ("f/g", "NOT_A_DIRECTORY"),
        ("a/" * 1500 + "f", "INVALID_ARGUMENTS"),
    ):
        with pytest.raises(RequestFailure) as caught:
            find_entry(path, paths, make_parents=True)
        assert caught.value.code == code
    read("sub/../sub/g", paths)
    for path in ("sub/absent", "sub/../..", "sub/deep"):
        with pytest.raises(RequestFailure):
            read(path, paths)
    assert sorted(path.name for path in ws.iterdir()) == ["f", "sub"]
    assert len(os.listdir("/proc/self/fd")) == before, "no descriptor stays open"


def test_created_folders_that_are_used_or_moved_stay(paths: GuestPaths) -> None:
    ws = root(paths)
    passed_entry = find_entry("new/deep/../../other/f", paths, make_parents=True)
    (ws / "other" / "f").touch()
    used, moved = (find_entry(f"{name}/a/f", paths, make_parents=True) for name in ("used", "moved"))
    (ws / "used" / "a" / "f").touch()
    (ws / "moved" / "a").rename(ws / "sub" / "b")
    (ws / "sub" / "a").mkdir()
    for entry in (passed_entry, used, moved):
        entry.close()
    assert (ws / "used" / "a" / "f").exists()
    assert (ws / "sub" / "a").exists()
    assert (ws / "sub" / "b").exists()
    assert (ws / "other" / "f").exists()
    assert not (ws / "new").exists(), "a folder on the way is removed"


def test_with_all_files_enabled_only_kernel_files_are_refused(paths: GuestPaths, tmp_path: Path) -> None:
    unconfined = GuestPaths(paths.roots, use_openat2=paths.use_openat2, has_all_files=True)
    for name, target in (("out", tmp_path / "outside"), ("proc", "/proc")):
        (root(paths) / name).symlink_to(target)
    for path in ("../outside", "out", str(tmp_path / "ws2" / "f"), f"/proc/..{tmp_path}/outside"):
        assert read(path, unconfined) == "outside"
        with pytest.raises(RequestFailure, match="outside of"):
            read(path, paths)
    for path in ("/proc/1/status", "proc/1/status", "/etc/../proc/1/status", "/proc", "/dev/null", "/sys/kernel/x"):
        with pytest.raises(RequestFailure) as refused:
            read(path, unconfined)
        assert refused.value.code in ("PATH_NOT_ALLOWED", "FILE_NOT_FOUND")
        assert "kernel" in str(refused.value) or path == "/sys/kernel/x"
