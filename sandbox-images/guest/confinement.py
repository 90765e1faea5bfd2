"""Path resolution of file requests.

Invariant: no link, no `..` and no replacement of a directory during the resolution leads out of the roots (the allowed
folders). Every step opens a directory relative to the descriptor of its parent. The text of a path is resolved only
once.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat

from guest.commands.shell_state import read_folder
from guest.failures import INVALID_ARGUMENTS, NOT_A_REGULAR_FILE, PATH_NOT_ALLOWED, RequestFailure, describe_os_error
from guest.fields import encode_text, printable
from guest.kernel import open_beneath
from guest.paths import KERNEL_FOLDERS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from guest.paths import GuestPaths

_MAX_LINKS = 40
# Limit the depth: every directory of the path stays open during the resolution, and a process may open a limited number
# of files.
_MAX_DEPTH = 500
_DIRECTORY = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NO_OPENAT2 = (errno.ENOSYS, errno.EPERM, errno.EINVAL)


class DirectoryEntry:
    """A name in an open directory below a root. The object owns the descriptor of the directory.

    The name was not a link at the time of the resolution. A file of that name may not exist.
    """

    __slots__ = ("_created_names", "directory", "is_link_target", "name", "shown")

    def __init__(
        self, directory: int, name: bytes, shown: str, is_link_target: bool, created_names: list[bytes] | None = None
    ) -> None:
        """Store the entry. `created_names`: the last names of the directory's path that the resolution has created."""
        self.directory = directory
        self.name = name
        self.shown = shown
        self.is_link_target = is_link_target
        self._created_names = created_names or []

    def close(self) -> None:
        """Close the directory. Remove the directories that the resolution has created and that are still empty."""
        _remove_empty(self.directory, self._created_names)
        os.close(self.directory)


def find_entry(
    path: str,
    paths: GuestPaths,
    make_parents: bool = False,
    to_read: bool = False,
    is_exact: bool = False,
    follow_last: bool = True,
) -> DirectoryEntry:
    """Resolve a path to the entry of its file, which may not exist yet. Raises RequestFailure.

    Links that stay inside the roots are followed. `to_read`: the path is only read, so it may also be in the folder of
    long outputs. `is_exact`: a program chose the path, and means these bytes. `follow_last`: a link as the last part of
    the path is followed; without it, the entry is that of the link.
    """
    raw = encode_text(path, "'path'")
    shown = printable(raw)
    # The root b"" (the whole file system) contains all others, and `..` may lead anywhere.
    roots = (b"",) if b"" in paths.roots else paths.readable if to_read else paths.roots
    resolver = _Resolver(paths, shown, make_parents, roots, follow_last)
    try:
        folder = read_folder(paths)
        entry = resolver.resolve(os.path.join(folder, raw) if is_exact else paths.absolute(raw, folder))
        if b"" in roots:
            _check_kernel_folders(entry)
        return entry
    except OSError as error:
        resolver.undo()
        raise describe_os_error(error, shown) from None
    except RequestFailure:
        resolver.undo()
        raise
    finally:
        resolver.close()


def pin_file(entry: DirectoryEntry) -> int:
    """Return an O_PATH descriptor of the regular file of an entry.

    The descriptor refers to the file itself, so it has no effect if the name later leads to another file. Raises
    RequestFailure when the file is a link or not a regular file, and OSError for other errors.
    """
    # Use O_PATH, which does not open the content: opening a pipe or a device for reading could block or have an effect.
    fd = os.open(entry.name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=entry.directory)
    try:
        mode = os.fstat(fd).st_mode
        if stat.S_ISDIR(mode):
            raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))
        if stat.S_ISLNK(mode):
            raise RequestFailure(PATH_NOT_ALLOWED, f"{entry.shown}: replaced by a link while it was opened; try again")
        if not stat.S_ISREG(mode):
            raise RequestFailure(NOT_A_REGULAR_FILE, f"{entry.shown}: not a regular file")
    except BaseException:
        os.close(fd)
        raise
    return fd


def open_pinned(pinned: int, flags: int) -> int:
    """Open the file that a descriptor of `pin_file` refers to. Raises OSError."""
    return os.open(f"/proc/self/fd/{pinned}", flags | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)


def _check_kernel_folders(entry: DirectoryEntry) -> None:
    real = os.path.normpath(os.path.join(os.readlink(f"/proc/self/fd/{entry.directory}".encode()), entry.name))
    if any(real == folder or real.startswith(folder + b"/") for folder in KERNEL_FOLDERS):
        entry.close()
        raise RequestFailure(PATH_NOT_ALLOWED, f"{entry.shown}: a file of the kernel; use bash_tool")


class _Resolver:
    """The resolution of one path. It opens one directory after the other and never goes above the root. The open
    directories are the trail.
    """

    def __init__(
        self, paths: GuestPaths, shown: str, make_parents: bool, roots: tuple[bytes, ...], follow_last: bool
    ) -> None:
        self._paths = paths
        self._shown = shown
        self._make_parents = make_parents
        self._roots = roots
        self._follow_last = follow_last
        self._links = 0
        self._final_link = False
        self._trail: list[int] = []
        # Parts that the kernel resolved in one step (openat2). The trail then lacks the parents of its last directory.
        self._skipped: list[bytes] = []
        self._on_foot = not paths.use_openat2
        # Names of the directories at the end of the trail that this resolution has created.
        self._created_names: list[bytes] = []

    def resolve(self, path: bytes) -> DirectoryEntry:
        """Return the entry of an absolute path. Raises RequestFailure and OSError."""
        parts = self._enter_root(path)
        while True:
            if len(parts) > 1:
                parts = self._skip_parents(parts)
            name = parts.pop(0) if parts else b"."
            if not parts and name not in (b".", b".."):
                target = self._read_link(name) if self._follow_last else None
                if target is None:
                    return DirectoryEntry(self._trail.pop(), name, self._shown, self._final_link, self._created_names)
                self._final_link = True
                parts = self._follow(target, parts)
            elif not parts and name == b".":
                return DirectoryEntry(self._trail.pop(), name, self._shown, self._final_link, self._created_names)
            else:
                parts = self._step(name, parts)

    def undo(self) -> None:
        """Remove the directories that a failed resolution has created."""
        if self._trail:
            _remove_empty(self._trail[-1], self._created_names)

    def close(self) -> None:
        """Close every directory of the trail."""
        for fd in self._trail:
            os.close(fd)
        self._trail = []

    def _step(self, name: bytes, parts: list[bytes]) -> list[bytes]:
        """Go to the next directory. Return the remaining parts."""
        if name == b".":
            return parts
        if name == b"..":
            if len(self._trail) == 1:
                raise self._outside()
            # `..` leaves this directory. If the resolution has created it, remove it: it was not needed.
            _remove_empty(self._trail[-1], self._created_names[-1:])
            self._created_names = self._created_names[:-1]
            os.close(self._trail.pop())
            return parts or [b"."]
        if len(self._trail) > _MAX_DEPTH:
            raise RequestFailure(
                INVALID_ARGUMENTS, f"{self._shown}: more than {_MAX_DEPTH} directories deep; move it higher"
            )
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
        """Let the kernel resolve all parts except the last in one step. Return the remaining parts.

        When the kernel refuses, return all parts, which are then resolved one by one.
        """
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
            created_names = [*self._created_names, name]
        except FileExistsError:
            # Another process has created the name. If it is not a directory, the next open fails.
            created_names = []
        self._trail.append(os.open(name, _DIRECTORY, dir_fd=self._trail[-1]))
        self._created_names = created_names

    def _read_link(self, name: bytes) -> bytes | None:
        """Return the target of a link, or None when the name is missing or not a link."""
        try:
            return os.readlink(name, dir_fd=self._trail[-1])
        except OSError as error:
            if error.errno in (errno.EINVAL, errno.ENOENT):
                return None
            raise

    def _follow(self, target: bytes, rest: list[bytes]) -> list[bytes]:
        """Return the parts of a link's target, followed by the remaining parts."""
        self._links += 1
        if self._links > _MAX_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
        if target.startswith(b"/"):
            return self._enter_root(target) + rest
        if self._skipped:
            # A `..` in the link's target needs all parents in the trail. Start again at the root, and resolve the parts
            # one by one.
            parts, self._skipped, self._on_foot = self._skipped, [], True
            os.close(self._trail.pop())
            return parts + _split(target) + rest
        return _split(target) + rest

    def _enter_root(self, path: bytes) -> list[bytes]:
        """Start again at the root of an absolute path. Return the remaining parts. Raises RequestFailure outside of the
        roots.
        """
        for root in self._roots:
            if path == root or path.startswith(root + b"/"):
                self.close()
                self._skipped, self._created_names = [], []
                self._trail = [os.open(root or b"/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)]
                return _split(path[len(root) :])
        raise self._outside()

    def _outside(self) -> RequestFailure:
        roots = " and ".join(printable(root or b"/") for root in self._roots)
        return RequestFailure(PATH_NOT_ALLOWED, f"{self._shown}: outside of {roots}")


def _remove_empty(directory: int, names: list[bytes]) -> None:
    """Remove the empty directories at the end of a path.

    `names` are the last names of the path. A directory that was moved is not removed.
    """
    # A directory that is not empty stays. A directory that another process has removed needs no removal.
    with contextlib.suppress(OSError), contextlib.ExitStack() as opened:
        for name in reversed(names):
            status = os.fstat(directory)
            parent = os.open(b"..", _DIRECTORY, dir_fd=directory)
            opened.close()
            opened.callback(os.close, parent)
            # rmdir works by name, so first check that the name still refers to the directory that was created here.
            if os.path.samestat(status, os.stat(name, dir_fd=parent, follow_symlinks=False)):
                os.rmdir(name, dir_fd=parent)
            directory = parent


def _split(path: bytes) -> list[bytes]:
    """Return the parts of a path. A slash at the end adds the part `.`."""
    parts = [part for part in path.split(b"/") if part]
    # A slash at the end requires a directory.
    return [*parts, b"."] if path.endswith(b"/") and parts else parts
