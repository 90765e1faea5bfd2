"""The users and groups of the sandbox, as /etc/passwd and /etc/group name them.

The C library is not asked: it may load libraries of the image into this process.
"""

from __future__ import annotations

import contextlib
import os
import stat

from guest.failures import INVALID_ARGUMENTS, PERMISSION_DENIED, RequestFailure
from guest.fields import encode_text, printable
from guest.kernel import PR_SET_DUMPABLE, set_process_flag

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

_PASSWD = b"/etc/passwd"
_GROUP = b"/etc/group"
_MAX_BYTES = 1 << 20
_MAX_ID = (1 << 32) - 2


class User:
    """A user of /etc/passwd. `groups`: the numbers of all groups of the user, its own group first."""

    __slots__ = ("gid", "groups", "home", "name", "shell", "uid")

    def __init__(self, name: str, uid: int, gid: int, home: str, shell: str, groups: list[int]) -> None:
        self.name = name
        self.uid = uid
        self.gid = gid
        self.home = home
        self.shell = shell
        self.groups = groups


def find_user_name(uid: int) -> str | None:
    """Return the name of a user, or None."""
    return _read_names(_PASSWD).get(uid)


def choose_user(name: str | None) -> User | None:
    """Return the user whose rights an operation gets, or None for the user of this process.

    Raises RequestFailure: INVALID_ARGUMENTS for an unknown name, PERMISSION_DENIED when this process may not become
    that user.
    """
    if name is None:
        return None
    user = _find_user(encode_text(name, "'user'"))
    if user is None:
        raise RequestFailure(INVALID_ARGUMENTS, f"/etc/passwd has no user {name!a}; use a name from there, or no user")
    if user.uid == os.geteuid():
        return None
    if os.geteuid() != 0:
        raise RequestFailure(
            PERMISSION_DENIED, f"only root of the sandbox can be the user {name!a}; this sandbox has no root inside"
        )
    return user


def become(user: User) -> None:
    """Give this process the rights of a user, for good. Raises OSError.

    The process stays closed to other processes: the kernel decides anew about that when a process changes its user.
    """
    os.setgroups(user.groups)
    os.setresgid(user.gid, user.gid, user.gid)
    os.setresuid(user.uid, user.uid, user.uid)
    set_process_flag(PR_SET_DUMPABLE, 0)


class AccountNames:
    """The names of all users and groups by number. `refresh` reads a file again if it has changed."""

    __slots__ = ("_states", "groups", "users")

    def __init__(self) -> None:
        self.users: dict[int, str] = {}
        self.groups: dict[int, str] = {}
        self._states: dict[bytes, tuple[int, int, int] | None] = {}
        self.refresh()

    def refresh(self) -> None:
        """Read the names again from each file that has changed."""
        if self._has_changed(_PASSWD):
            self.users = _read_names(_PASSWD)
        if self._has_changed(_GROUP):
            self.groups = _read_names(_GROUP)

    def _has_changed(self, path: bytes) -> bool:
        state = None
        with contextlib.suppress(OSError):
            status = os.stat(path)
            state = (status.st_ino, status.st_size, status.st_mtime_ns)
        earlier = self._states.get(path)
        self._states[path] = state
        return state != earlier


def _find_user(name: bytes) -> User | None:
    for fields in _read_lines(_PASSWD):
        uid, gid = _parse_id(fields[2:3]), _parse_id(fields[3:4])
        if fields[0] == name and uid is not None and gid is not None:
            others = [number for number in _groups_of(name) if number != gid]
            home, shell = (printable(field) for field in (*fields[5:7], b"", b"")[:2])
            return User(printable(name), uid, gid, home or "/", shell or "/bin/sh", [gid, *others])
    return None


def _groups_of(user: bytes) -> Iterator[int]:
    for fields in _read_lines(_GROUP):
        number = _parse_id(fields[2:3])
        if number is not None and user in b"".join(fields[3:4]).split(b","):
            yield number


def _read_names(path: bytes) -> dict[int, str]:
    names: dict[int, str] = {}
    for fields in _read_lines(path):
        number = _parse_id(fields[2:3])
        if number is not None and fields[0]:
            names.setdefault(number, printable(fields[0]))
    return names


def _parse_id(field: list[bytes]) -> int | None:
    # int() alone also accepts signs and blanks. 4294967295 means "no change" for the kernel.
    digits = field[0] if field else b""
    return int(digits) if digits.isdigit() and len(digits) <= 10 and int(digits) <= _MAX_ID else None


def _read_lines(path: bytes) -> list[list[bytes]]:
    """Return the fields of each line of a regular file; nothing if there is no such file."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        return []
    try:
        text = os.read(fd, _MAX_BYTES) if stat.S_ISREG(os.fstat(fd).st_mode) else b""
    finally:
        os.close(fd)
    return [line.split(b":") for line in text.split(b"\n")]
