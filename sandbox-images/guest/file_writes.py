"""The file request that writes: a new version replaces the old one whole, or nothing changes."""

from __future__ import annotations

import os
import stat

from guest.confinement import find_place, open_pinned, pin_file
from guest.failures import FILE_EXISTS, Failure, describe_os_error

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from guest.bench import Bench
    from guest.confinement import Place
    from guest.file_requests import WriteFileRequest
    from guest.pipes import Watch

_BLOCK = 262_144
_NEW_MODE = 0o644


def write_file(request: WriteFileRequest, bench: Bench) -> dict[str, object]:
    """Write the body to a file. Raises Failure; then the old content is intact and no temporary file is left."""
    place = find_place(request.path, bench.places, make_parents=True)
    try:
        return _Write(place, bench.body, bench.watch).write(str(request.mode))
    except OSError as error:
        raise describe_os_error(error, place.shown) from None
    finally:
        place.close()


class _Write:
    def __init__(self, place: Place, body: int | None, watch: Watch) -> None:
        self._place = place
        self._body = body
        self._watch = watch

    def write(self, mode: str) -> dict[str, object]:
        old = self._pin_old()
        if mode == "create":
            if old is not None or self._place.is_link_target:
                raise self._exists()
            return self._replace(_NEW_MODE, self._link_new)
        if old is None:
            return self._replace(_NEW_MODE, self._rename)
        # Opened also where the content is replaced: a file that may not be written stays as it is.
        fd = open_pinned(old, os.O_WRONLY | (os.O_APPEND if mode == "append" else 0))
        status = os.fstat(fd)
        if mode == "append" or status.st_nlink > 1:
            return self._write_in_place(fd, status, append=mode == "append")
        os.close(fd)
        return {**self._replace(stat.S_IMODE(status.st_mode), self._rename), "created": False}

    def _pin_old(self) -> int | None:
        try:
            return pin_file(self._place)
        except FileNotFoundError:
            return None

    def _replace(self, mode: int, publish: Callable[[bytes], None]) -> dict[str, object]:
        """Write beside the old file, then take its place in one step."""
        temporary = b".toolcrew-" + os.urandom(12).hex().encode()
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(temporary, flags, 0o600, dir_fd=self._place.directory)
        try:
            self._copy_body(fd)
            os.fchmod(fd, mode)
            os.fsync(fd)
            status = os.fstat(fd)
            publish(temporary)
        except BaseException:
            os.unlink(temporary, dir_fd=self._place.directory)
            raise
        finally:
            os.close(fd)
        return {"created": True, "size": status.st_size, "mode_bits": stat.S_IMODE(status.st_mode)}

    def _rename(self, temporary: bytes) -> None:
        directory = self._place.directory
        os.rename(temporary, self._place.name, src_dir_fd=directory, dst_dir_fd=directory)

    def _link_new(self, temporary: bytes) -> None:
        # Unlike rename, link refuses a name that was taken meanwhile.
        directory = self._place.directory
        try:
            os.link(temporary, self._place.name, src_dir_fd=directory, dst_dir_fd=directory)
        except FileExistsError:
            raise self._exists() from None
        os.unlink(temporary, dir_fd=directory)

    def _write_in_place(self, fd: int, status: os.stat_result, append: bool) -> dict[str, object]:
        """Keep the inode: other names of it, or its beginning, are to stay."""
        old_size = status.st_size
        new_size = self._body_size()
        try:
            if append:
                self._copy_body(fd)
            else:
                if new_size > old_size:
                    # All space is taken before the first old byte is touched; from there on nothing interrupts.
                    os.posix_fallocate(fd, old_size, new_size - old_size)
                self._copy_body(fd, interruptible=False)
                os.ftruncate(fd, new_size)
            os.fsync(fd)
        except BaseException:
            os.ftruncate(fd, old_size)
            raise
        size = os.fstat(fd).st_size
        return {"created": False, "size": size, "mode_bits": stat.S_IMODE(status.st_mode)}

    def _body_size(self) -> int:
        return os.fstat(self._body).st_size if self._body is not None else 0

    def _copy_body(self, fd: int, interruptible: bool = True) -> None:
        at = 0
        while self._body is not None:
            if interruptible:
                self._watch.check()
            block = memoryview(os.pread(self._body, _BLOCK, at))
            if not block:
                return
            at += len(block)
            while block:
                block = block[os.write(fd, block) :]

    def _exists(self) -> Failure:
        return Failure(FILE_EXISTS, f"{self._place.shown}: exists already")
