"""Users and groups of the sandbox are read from its files, and a process can become one of them."""

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.guest import guest_harness

assert guest_harness.GUEST_PARENT

from guest import users  # noqa: E402
from guest.failures import RequestFailure  # noqa: E402

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
_PASSWD = """root:x:0:0:root:/root:/bin/bash
user:x:1000:1001:,,,:/home/user:/bin/zsh
bad:x:-1:0::/:/bin/sh
half:x:77
no_change:x:4294967295:0::/:/bin/sh
second:x:1000:1001::/:/bin/sh
"""
_GROUP = "root:x:0:\nuser:x:1001:\nsudo:x:27:user\nvideo:x:44:other,user\nbroken:x:zz:user\n"


@pytest.fixture(autouse=True)
def accounts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)  # the folder of a test is closed to other users
        (folder / "passwd").write_text(_PASSWD)
        (folder / "group").write_text(_GROUP)
        monkeypatch.setattr(users, "_PASSWD", bytes(folder / "passwd"))
        monkeypatch.setattr(users, "_GROUP", bytes(folder / "group"))
        yield folder


def test_the_first_user_of_a_number_has_its_name() -> None:
    assert users.find_user_name(1000) == "user"
    assert users.find_user_name(4711) is None


@needs_root
def test_a_user_has_its_folder_its_shell_and_all_its_groups() -> None:
    user = users.choose_user("user")
    assert user is not None
    assert (user.uid, user.gid, user.home, user.shell) == (1000, 1001, "/home/user", "/bin/zsh")
    assert user.groups == [1001, 27, 44]


def test_no_user_and_the_own_user_change_nothing() -> None:
    assert users.choose_user(None) is None
    if os.geteuid() == 0:
        assert users.choose_user("root") is None


@pytest.mark.parametrize("name", ["nobody-here", "bad", "half", "no_change", "user:x", ""])
def test_an_unknown_user_and_an_invalid_line_are_refused(name: str) -> None:
    with pytest.raises(RequestFailure) as caught:
        users.choose_user(name)
    assert caught.value.code == "INVALID_ARGUMENTS"


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo])
def test_a_folder_or_a_pipe_in_place_of_the_file_has_no_users(accounts: Path, make: Callable[[Path], None]) -> None:
    (accounts / "passwd").unlink()
    make(accounts / "passwd")
    assert users.find_user_name(0) is None


def test_names_are_read_again_after_a_change(accounts: Path) -> None:
    names = users.AccountNames()
    assert (names.users[1000], names.groups[27]) == ("user", "sudo")
    (accounts / "passwd").write_text("renamed:x:1000:1001::/:/bin/sh\n")
    names.refresh()
    assert names.users == {1000: "renamed"}


@needs_root
def test_a_process_becomes_the_user_and_stays_closed_to_others() -> None:
    user = users.choose_user("user")
    assert user is not None
    reading, writing = os.pipe()
    if (pid := os.fork()) == 0:
        users.become(user)
        # The kernel gives the files in /proc of a process that is not dumpable to root.
        facts = (*os.getresuid(), *os.getresgid(), *sorted(os.getgroups()), os.stat("/proc/self/stat").st_uid)
        os.write(writing, repr(facts).encode())
        os._exit(0)
    os.waitpid(pid, 0)
    assert os.read(reading, 1000) == repr((1000, 1000, 1000, 1001, 1001, 1001, 27, 44, 1001, 0)).encode()
    os.close(reading)
    os.close(writing)


@needs_root
def test_a_sandbox_without_root_inside_has_one_user_only() -> None:
    reading, writing = os.pipe()
    if (pid := os.fork()) == 0:
        os.setuid(1000)
        try:
            users.choose_user("root")
        except RequestFailure as failure:
            os.write(writing, failure.code.encode())
        os.write(writing, b" " + repr(users.choose_user("user")).encode())
        os._exit(0)
    os.waitpid(pid, 0)
    assert os.read(reading, 1000) == b"PERMISSION_DENIED None"
    os.close(reading)
    os.close(writing)
