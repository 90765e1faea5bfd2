"""File requests of a running guest: reading, writing, and the state after a failed write."""

import stat

import pytest

from tests.guest_harness import Done, Guest, needs_namespace, running_guest

pytestmark = needs_namespace


@pytest.fixture
def guest(shared_guest: Guest) -> Guest:
    shared_guest.run("rm -rf ./* ./.[!.]*")
    return shared_guest


def write(guest: Guest, path: str, content: bytes, mode: str = "overwrite", timeout_s: float = 10) -> Done:
    return guest.request("write_file", content, path=path, mode=mode, timeout_s=timeout_s)


def read(guest: Guest, path: str, max_bytes: int = 1 << 20) -> Done:
    return guest.request("read_file", path=path, max_bytes=max_bytes, timeout_s=10)


def names(guest: Guest) -> list[str]:
    return sorted(path.name for path in guest.workspace.iterdir())


def test_what_is_written_is_read(guest: Guest) -> None:
    content = bytes(range(256)) * 5000
    done = write(guest, "new/er/file", content)
    assert (done["created"], done["size"], done["mode_bits"]) == (True, len(content), 0o644)
    answer = read(guest, "new/er/file", 2 << 20)
    assert (answer["size"], answer.bytes_of("file")) == (len(content), content)
    assert (guest.workspace / "new" / "er" / "file").read_bytes() == content


def test_overwrite_keeps_mode_and_leaves_no_temporary_file(guest: Guest) -> None:
    write(guest, "f", b"old content")
    (guest.workspace / "f").chmod(0o751)
    done = write(guest, "f", b"new")
    assert (done["created"], done["mode_bits"]) == (False, 0o751)
    assert stat.S_IMODE((guest.workspace / "f").stat().st_mode) == 0o751
    assert (guest.workspace / "f").read_bytes() == b"new"
    assert names(guest) == ["f"]


def test_a_reader_of_the_old_file_keeps_the_old_file(guest: Guest) -> None:
    write(guest, "f", b"old")
    with (guest.workspace / "f").open("rb") as old:
        write(guest, "f", b"new")
        assert old.read() == b"old"


def test_append_adds_in_place_and_creates(guest: Guest) -> None:
    assert write(guest, "log", b"one\n", "append")["created"] is True
    inode = (guest.workspace / "log").stat().st_ino
    done = write(guest, "log", b"two\n", "append")
    assert (done["created"], done["size"]) == (False, 8)
    assert (guest.workspace / "log").read_bytes() == b"one\ntwo\n"
    assert (guest.workspace / "log").stat().st_ino == inode


def test_create_refuses_what_exists_dangling_links_included(guest: Guest) -> None:
    assert write(guest, "c", b"1", "create")["created"] is True
    guest.run("ln -s nowhere dangling")
    assert write(guest, "c", b"2", "create").code == "FILE_EXISTS"
    assert write(guest, "dangling", b"2", "create").code == "FILE_EXISTS"
    assert (guest.workspace / "c").read_bytes() == b"1"
    assert names(guest) == ["c", "dangling"]


def test_a_link_that_ends_inside_is_written_through_and_stays_a_link(guest: Guest) -> None:
    guest.run("mkdir d; echo old > d/target; ln -s d/target link; ln -s d/fresh to-be")
    write(guest, "link", b"new")
    write(guest, "to-be", b"made")
    assert (guest.workspace / "link").is_symlink()
    assert (guest.workspace / "d" / "target").read_bytes() == b"new"
    assert (guest.workspace / "d" / "fresh").read_bytes() == b"made"


def test_a_link_that_leads_out_is_not_written(guest: Guest) -> None:
    guest.run("ln -s /etc/hostname out; ln -s .. up")
    assert write(guest, "out", b"x").code == "PATH_NOT_ALLOWED"
    assert write(guest, "up/escaped", b"x").code == "PATH_NOT_ALLOWED"
    assert not (guest.workspace.parent / "escaped").exists()


def test_every_name_of_a_hard_linked_file_sees_the_write(guest: Guest) -> None:
    guest.run("echo long old content > a; ln a b")
    done = write(guest, "a", b"new")
    assert (done["created"], done["size"]) == (False, 3)
    assert (guest.workspace / "b").read_bytes() == b"new"
    write(guest, "b", b"longer than it was before")
    assert (guest.workspace / "a").read_bytes() == b"longer than it was before"


@pytest.mark.parametrize(
    ("path", "code"),
    [
        (".", "IS_DIRECTORY"),
        ("d", "IS_DIRECTORY"),
        ("f/x", "NOT_A_DIRECTORY"),
        ("fifo", "NOT_A_REGULAR_FILE"),
        ("/etc/hostname", "PATH_NOT_ALLOWED"),
        ("locked/x", "PERMISSION_DENIED"),
        ("readonly", "PERMISSION_DENIED"),
        ("n" * 256, "INVALID_ARGUMENTS"),
        ("nul\0", "INVALID_ARGUMENTS"),
        ("", "INVALID_ARGUMENTS"),
    ],
)
def test_what_cannot_be_written_has_its_code(guest: Guest, path: str, code: str) -> None:
    guest.run("mkdir d locked; echo f > f; mkfifo fifo; chmod 555 locked; echo r > readonly; chmod 444 readonly")
    before = names(guest)
    for mode in ("overwrite", "append"):
        assert write(guest, path, b"content", mode).code == code
    assert names(guest) == before
    guest.run("chmod 755 locked")


def test_beyond_the_file_size_limit_nothing_changes() -> None:
    with running_guest("ulimit -f 8;") as guest:
        guest.run("echo old > f; echo old > a; ln a b")
        for path, mode in (
            ("f", "overwrite"),
            ("f", "append"),
            ("a", "overwrite"),
            ("new", "overwrite"),
            ("n", "create"),
        ):
            assert write(guest, path, bytes(100_000), mode).code == "NO_SPACE"
        assert (guest.workspace / "f").read_bytes() == b"old\n"
        assert (guest.workspace / "b").read_bytes() == b"old\n"
        assert names(guest) == ["a", "b", "f"]


def test_a_file_over_the_limit_is_refused_with_its_size(guest: Guest) -> None:
    write(guest, "f", bytes(1001))
    done = read(guest, "f", 1000)
    assert done.code == "FILE_TOO_LARGE"
    assert done["error"]["size"] == 1001
    assert read(guest, "f", 1001)["size"] == 1001


def test_a_fifo_is_refused_and_not_opened(guest: Guest) -> None:
    guest.run("mkfifo fifo")
    writer = guest.start_script("echo started > started; echo x > fifo", timeout_s=60)
    guest.wait_for_file("started")
    assert read(guest, "fifo").code == "NOT_A_REGULAR_FILE"
    # If the FIFO had been opened, its writer would have continued.
    assert guest.run("read line < fifo; echo $line").bytes_of("stdout") == b"x\n"
    assert guest.finish(writer)["exit_code"] == 0


def test_a_read_that_takes_too_long_ends_with_timeout(guest: Guest) -> None:
    guest.run("truncate -s 1000G sparse")
    done = guest.request("read_file", path="sparse", max_bytes=1 << 62, timeout_s=0.2)
    assert done.code == "TIMEOUT"
    assert guest.wait_alone()


def test_a_read_can_be_cancelled(guest: Guest) -> None:
    guest.run("truncate -s 1000G sparse")
    call = guest.start("read_file", path="sparse", max_bytes=1 << 62, timeout_s=60)
    guest.send({"id": call, "op": "cancel"})
    assert guest.finish(call).code == "CANCELLED"
    assert guest.wait_alone()
