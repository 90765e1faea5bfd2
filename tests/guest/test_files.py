"""File requests of a running guest: reading, writing, and the state after a failed write."""

import json

import pytest

from tests.support.guest.guest_harness import Done, Guest, needs_namespace

pytestmark = needs_namespace


@pytest.fixture
def guest(shared_guest: Guest) -> Guest:
    shared_guest.run("chmod -R u+rwx .; rm -rf ./* ./.[!.]*")
    return shared_guest


def write(guest: Guest, path: str, content: bytes, mode: str = "overwrite", timeout_s: float = 10) -> Done:
    return guest.request("write_file", content, path=path, mode=mode, timeout_s=timeout_s)


def read(guest: Guest, path: str, max_bytes: int = 1 << 20) -> Done:
    return guest.request("read_file", path=path, max_bytes=max_bytes, timeout_s=10)


def list_names(guest: Guest) -> list[str]:
    return sorted(path.name for path in guest.workspace.iterdir())


def test_written_content_is_read_unchanged(guest: Guest) -> None:
    content = bytes(range(256)) * 5000
    done = write(guest, "new/er/file", content)
    assert (done["created"], done["size"], done["mode_bits"]) == (True, len(content), 0o644)
    answer = read(guest, "new/er/file", 2 << 20)
    assert (answer["size"], answer.bytes_of("file")) == (len(content), content)
    assert (guest.workspace / "new" / "er" / "file").read_bytes() == content


@pytest.mark.parametrize("name", ["f\n", "\nf", "f\r", "~", "file:///workspace/f"])
def test_a_program_gets_the_file_of_exactly_its_name(guest: Guest, name: str) -> None:
    write(guest, "f", b"other")
    path = f"{guest.workspace}/{name}" if ":" not in name else name
    write(guest, path, b"own")
    assert read(guest, path).bytes_of("file") == b"own"
    assert read(guest, "f").bytes_of("file") == b"other"


def test_an_overwrite_does_not_change_an_open_file(guest: Guest) -> None:
    write(guest, "f", b"old")
    with (guest.workspace / "f").open("rb") as old:
        write(guest, "f", b"new")
        assert old.read() == b"old"


def test_append_writes_in_place_or_creates_the_file(guest: Guest) -> None:
    assert write(guest, "log", b"one\n", "append")["created"] is True
    inode = (guest.workspace / "log").stat().st_ino
    done = write(guest, "log", b"two\n", "append")
    assert (done["created"], done["size"]) == (False, 8)
    assert (guest.workspace / "log").read_bytes() == b"one\ntwo\n"
    assert (guest.workspace / "log").stat().st_ino == inode


def test_create_refuses_existing_files_and_dangling_links(guest: Guest) -> None:
    assert write(guest, "c", b"1", "create")["created"] is True
    guest.run("ln -s nowhere dangling")
    assert write(guest, "c", b"2", "create").code == "FILE_EXISTS"
    assert write(guest, "dangling", b"2", "create").code == "FILE_EXISTS"
    assert (guest.workspace / "c").read_bytes() == b"1"
    assert list_names(guest) == ["c", "dangling"]


def test_a_write_through_a_link_keeps_the_link(guest: Guest) -> None:
    guest.run("mkdir d; echo old > d/target; ln -s d/target link; ln -s d/fresh to-be")
    write(guest, "link", b"new")
    write(guest, "to-be", b"made")
    assert (guest.workspace / "link").is_symlink()
    assert (guest.workspace / "d" / "target").read_bytes() == b"new"
    assert (guest.workspace / "d" / "fresh").read_bytes() == b"made"


def test_a_write_changes_every_hard_link_of_a_file(guest: Guest) -> None:
    guest.run("echo long old content > a; ln a b")
    done = write(guest, "a", b"new")
    assert (done["created"], done["size"]) == (False, 3)
    assert (guest.workspace / "b").read_bytes() == b"new"
    write(guest, "b", b"longer than it was before")
    assert (guest.workspace / "a").read_bytes() == b"longer than it was before"


def test_a_read_above_the_limit_is_refused_with_the_size(guest: Guest) -> None:
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


def send_request(guest: Guest, op: str, path: str) -> Done:
    """Send a file request of any kind for this path."""
    name, _, mode = op.partition(" ")
    if name == "edit_text":
        body = json.dumps([{"old_string": "f", "new_string": "g"}]).encode()
        return guest.request(name, body, path=path, max_bytes=8192, timeout_s=10)
    if name == "write_text":
        return guest.request(name, b"content", path=path, mode=mode, max_bytes=8192, timeout_s=10)
    if name == "write_file":
        return write(guest, path, b"content", mode)
    if name == "read_text":
        return guest.request(name, path=path, offset=1, limit=9, max_bytes=8192, timeout_s=10)
    return read(guest, path)


READS = ("read_file", "read_text")
CHANGES = ("write_file overwrite", "write_file append", "write_text overwrite", "write_text append", "edit_text")
OPERATIONS = (*READS, *CHANGES)


@pytest.mark.parametrize(
    ("path", "ops", "code"),
    [
        ("d", ("read_file", *CHANGES), "IS_DIRECTORY"),
        (".", CHANGES[:4], "IS_DIRECTORY"),
        ("f/x", OPERATIONS, "NOT_A_DIRECTORY"),
        ("fifo", OPERATIONS, "NOT_A_REGULAR_FILE"),
        ("sock", OPERATIONS, "NOT_A_REGULAR_FILE"),
        ("/etc/hostname", OPERATIONS, "PATH_NOT_ALLOWED"),
        ("out", OPERATIONS, "PATH_NOT_ALLOWED"),
        ("dev", OPERATIONS, "PATH_NOT_ALLOWED"),
        ("loop", OPERATIONS, "PATH_NOT_ALLOWED"),
        ("d/../../x", OPERATIONS, "PATH_NOT_ALLOWED"),
        ("up/escaped", OPERATIONS, "PATH_NOT_ALLOWED"),
        ("locked/x", CHANGES[:4], "PERMISSION_DENIED"),
        ("readonly", CHANGES, "PERMISSION_DENIED"),
        ("absent", ("read_file", "read_text", "edit_text"), "FILE_NOT_FOUND"),
        ("no/such/folder", ("read_file", "read_text", "edit_text"), "FILE_NOT_FOUND"),
        ("zeros", ("read_text", "write_text append", "edit_text"), "BINARY_FILE"),
        ("sparse", ("read_file", "edit_text"), "FILE_TOO_LARGE"),
        ("n" * 256, OPERATIONS, "INVALID_ARGUMENTS"),
        ("n" * 5000, OPERATIONS, "INVALID_ARGUMENTS"),
        ("nul\0", OPERATIONS, "INVALID_ARGUMENTS"),
        ("\ud800", OPERATIONS, "INVALID_ARGUMENTS"),
        ("", OPERATIONS, "INVALID_ARGUMENTS"),
    ],
)
def test_an_unusable_path_has_the_same_code_in_every_request(
    guest: Guest, path: str, ops: tuple[str, ...], code: str
) -> None:
    guest.run(
        "mkdir d locked; echo f > f; mkfifo fifo; echo r > readonly; chmod 444 readonly; chmod 555 locked; "
        "ln -s /etc/hostname out; ln -s .. up; ln -s loop loop; ln -s /dev/zero dev; truncate -s 1T sparse; "
        "head -c 99 /dev/zero > zeros; python3 -c 'import socket; socket.socket(socket.AF_UNIX).bind(\"sock\")'"
    )
    before = list_names(guest)
    replies = {op: send_request(guest, op, path) for op in ops}
    assert {op: done.code for op, done in replies.items()} == dict.fromkeys(ops, code)
    assert list_names(guest) == before
    assert not (guest.workspace.parent / "escaped").exists()
    if path == "readonly":
        assert "use chmod in bash_tool" in replies["write_text overwrite"]["error"]["message"]
        assert (guest.workspace / path).read_bytes() == b"r\n"


@pytest.mark.parametrize(
    ("op", "fields"),
    [("read_file", {"max_bytes": 1 << 62}), ("read_text", {"offset": 10**9, "limit": 1, "max_bytes": 8192})],
)
def test_a_read_has_a_time_limit_and_can_be_cancelled(guest: Guest, op: str, fields: dict[str, int]) -> None:
    guest.run("yes | head -c 10000 > text; truncate -s 1T text")
    assert guest.request(op, path="text", timeout_s=0.1, **fields).code == "TIMEOUT"
    call = guest.start(op, path="text", timeout_s=60, **fields)
    guest.send({"id": call, "op": "cancel"})
    assert guest.finish(call).code == "CANCELLED"
    assert guest.wait_alone()
