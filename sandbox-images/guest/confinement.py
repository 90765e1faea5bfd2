"""Paths of file requests, resolved so that no link, `..` or swap of a directory leads out of the roots."""

from __future__ import annotations

import contextlib
import errno
import os
import stat

from guest.commands.shell_state import read_folder
from guest.failures import (
    INVALID_ARGUMENTS,
    NOT_A_REGULAR_FILE,
    PATH_NOT_ALLOWED,
    Failure,
    describe_os_error,
    encode_text,
    printable,
)
from guest.kernel import open_beneath

TYPE_CHECKING = False
if TYPE_CHECKING:
    from guest.paths import GuestPaths

_MAX_LINKS = 40
# Each is open while the next is looked for, and a process may open so many files only.
_MAX_DEPTH = 500
_DIRECTORY = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NO_OPENAT2 = (errno.ENOSYS, errno.EPERM, errno.EINVAL)


class Place:
    """A name in an open directory below a root, whose descriptor it owns.

    The name was no link when it was found, and may not exist.
    """

    __slots__ = ("_made", "directory", "is_link_target", "name", "shown")

    def __init__(
        self, directory: int, name: bytes, shown: str, is_link_target: bool, made: list[bytes] | None = None
    ) -> None:
        """`made`: the last names of the directory's path, as far as they were made for this."""
        self.directory = directory
        self.name = name
        self.shown = shown
        self.is_link_target = is_link_target
        self._made = made or []

    def close(self) -> None:
        """Let go of the directory. What was made for it and is still empty goes away."""
        _remove_empty(self.directory, self._made)
        os.close(self.directory)


def find_place(path: str, paths: GuestPaths, make_parents: bool = False, to_read: bool = False) -> Place:
    """Resolve a path to where its file is or would be; links are followed while they stay inside. Raises Failure.

    `to_read`: the folder of long outputs is inside, too.
    """
    raw = encode_text(path, "'path'")
    shown = printable(raw)
    resolver = _Resolver(paths, shown, make_parents, paths.readable if to_read else paths.roots)
    try:
        return resolver.resolve(raw)
    except OSError as error:
        resolver.undo()
        raise describe_os_error(error, shown) from None
    except Failure:
        resolver.undo()
        raise
    finally:
        resolver.close()


def pin_file(place: Place) -> int:
    """An O_PATH descriptor of the regular file at a place: nothing is opened yet, nothing can be swapped any more.

    Raises Failure for what is missing or no regular file, OSError else.
    """
    fd = os.open(place.name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=place.directory)
    try:
        mode = os.fstat(fd).st_mode
        if stat.S_ISDIR(mode):
            raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))
        if stat.S_ISLNK(mode):
            raise Failure(PATH_NOT_ALLOWED, f"{place.shown}: replaced by a link while it was opened")
        if not stat.S_ISREG(mode):
            raise Failure(NOT_A_REGULAR_FILE, f"{place.shown}: not a regular file")
    except BaseException:
        os.close(fd)
        raise
    return fd


def open_pinned(pinned: int, flags: int) -> int:
    """Open the very file that a descriptor of pin_file stands for. Raises OSError."""
    return os.open(f"/proc/self/fd/{pinned}", flags | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)


class _Resolver:
    """One resolution. Directories are opened one after the other and never left upwards beyond their root."""

    def __init__(self, paths: GuestPaths, shown: str, make_parents: bool, roots: tuple[bytes, ...]) -> None:
        self._paths = paths
        self._shown = shown
        self._make_parents = make_parents
        self._roots = roots
        self._links = 0
        self._final_link = False
        self._trail: list[int] = []
        # The parts the kernel resolved in one step: above the last directory of the trail lies then not its parent.
        self._skipped: list[bytes] = []
        self._on_foot = not paths.use_openat2
        # Names of the last directories of the trail, as far as they are new.
        self._made: list[bytes] = []

    def resolve(self, path: bytes) -> Place:
        parts = self._enter_root(os.path.join(read_folder(self._paths), path))
        while True:
            if len(parts) > 1:
                parts = self._skip_parents(parts)
            name = parts.pop(0) if parts else b"."
            if not parts and name not in (b".", b".."):
                target = self._read_link(name)
                if target is None:
                    return Place(self._trail.pop(), name, self._shown, self._final_link, self._made)
                self._final_link = True
                parts = self._follow(target, parts)
            elif not parts and name == b".":
                return Place(self._trail.pop(), name, self._shown, self._final_link, self._made)
            else:
                parts = self._step(name, parts)

    def undo(self) -> None:
        """Remove what was made for nothing."""
        if self._trail:
            _remove_empty(self._trail[-1], self._made)

    def close(self) -> None:
        for fd in self._trail:
            os.close(fd)
        self._trail = []

    def _step(self, name: bytes, parts: list[bytes]) -> list[bytes]:
        """Go one directory further; returns what is left to go."""
        if name == b".":
            return parts
        if name == b"..":
            if len(self._trail) == 1:
                raise self._outside()
            # What is left upwards was not needed.
            _remove_empty(self._trail[-1], self._made[-1:])
            self._made = self._made[:-1]
            os.close(self._trail.pop())
            return parts or [b"."]
        if len(self._trail) > _MAX_DEPTH:
            raise Failure(INVALID_ARGUMENTS, f"{self._shown}: more than {_MAX_DEPTH} directories deep")
        try:
            self._trail.append(os.open(name, _DIRECTORY, dir_fd=self._trail[-1]))
        except FileNotFoundError:
            if not self._make_parents:
                raise
            self._make_directory(name)
        except NotADirectoryError:
            target = self._read_link(name)
            if target is None:
                raise
            return self._follow(target, parts)
        return parts

    def _skip_parents(self, parts: list[bytes]) -> list[bytes]:
        """Let the kernel resolve all but the last part at once; where it will not, the walk decides."""
        if len(self._trail) > 1 or self._on_foot or b".." in parts:
            return parts
        try:
            self._trail.append(open_beneath(self._trail[-1], b"/".join(parts[:-1]), os.O_PATH | os.O_DIRECTORY))
        except OSError as error:
            if error.errno in (errno.EXDEV, errno.ENOENT, errno.EAGAIN, *_NO_OPENAT2):
                return parts
            raise
        self._skipped = parts[:-1]
        return parts[-1:]

    def _make_directory(self, name: bytes) -> None:
        try:
            os.mkdir(name, 0o755, dir_fd=self._trail[-1])
            made = [*self._made, name]
        except FileExistsError:
            # Another process was faster, with a directory or with something that the next open refuses.
            made = []
        self._trail.append(os.open(name, _DIRECTORY, dir_fd=self._trail[-1]))
        self._made = made

    def _read_link(self, name: bytes) -> bytes | None:
        try:
            return os.readlink(name, dir_fd=self._trail[-1])
        except OSError as error:
            if error.errno in (errno.EINVAL, errno.ENOENT):
                return None
            raise

    def _follow(self, target: bytes, rest: list[bytes]) -> list[bytes]:
        self._links += 1
        if self._links > _MAX_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
        if target.startswith(b"/"):
            return self._enter_root(target) + rest
        if self._skipped:
            # The link's own `..` need every parent on the trail: back to the root, and on foot.
            parts, self._skipped, self._on_foot = self._skipped, [], True
            os.close(self._trail.pop())
            return parts + _split(target) + rest
        return _split(target) + rest

    def _enter_root(self, path: bytes) -> list[bytes]:
        """Start over at the root that an absolute path begins with; returns what is left to go."""
        for root in self._roots:
            if path == root or path.startswith(root + b"/"):
                self.close()
                self._skipped, self._made = [], []
                self._trail = [os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)]
                return _split(path[len(root) :])
        raise self._outside()

    def _outside(self) -> Failure:
        roots = " and ".join(printable(root) for root in self._roots)
        return Failure(PATH_NOT_ALLOWED, f"{self._shown}: outside of {roots}")


def _remove_empty(directory: int, names: list[bytes]) -> None:
    """Remove a directory whose path ends with these names, and those above it that have one, as far as they are empty
    and where they were.
    """
    # What is in use stays, and what another process took away is gone.
    with contextlib.suppress(OSError), contextlib.ExitStack() as opened:
        for name in reversed(names):
            known = os.fstat(directory)
            above = os.open(b"..", _DIRECTORY, dir_fd=directory)
            opened.close()
            opened.callback(os.close, above)
            if os.path.samestat(known, os.stat(name, dir_fd=above, follow_symlinks=False)):
                os.rmdir(name, dir_fd=above)
            directory = above


def _split(path: bytes) -> list[bytes]:
    parts = [part for part in path.split(b"/") if part]
    # A slash at the end asks for a directory.
    return [*parts, b"."] if path.endswith(b"/") and parts else parts
