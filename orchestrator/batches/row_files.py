"""The file of a batch's rows: only added to, row by whole row, by one process; and the pair of files that hold one row
for each item.
"""

import contextlib
import errno
import fcntl
import hashlib
import os
import stat
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path

from contract.errors import ConfigError, ErrorCode, OperatorError
from contract.run_events import Failure, FailureKind
from orchestrator.batches.row_scan import Belongs, Scan, read_rows, scan_rows
from orchestrator.batches.rows import Row, build_row, build_row_line, parse_outcome, parse_row
from store.batches import Outcome

MAX_HELD_BYTES = 64 * 1024 * 1024
"""Of newer failures, which take the place of older ones when the files are settled; with more, that is done at once."""
_PROBE_BYTES = 4096
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class RowsNotWritten(OperatorError):
    """Rows could not be added: none of them is in the file, and the same call may be made again. Nothing that was there
    is lost.
    """

    code = ErrorCode.NO_SPACE


class RowFile:
    """One open file. All methods block, and may be called from any thread.

    A file is opened before its batch begins, so that one that cannot be written is found then.
    """

    def __init__(self, path: Path, descriptor: int, scan: Scan) -> None:
        self.path = path
        self.dropped_bytes = scan.dropped_bytes
        """Of a torn row, which a process that died had begun at the end."""
        self._descriptor = descriptor
        self._end = scan.end
        self._ids = scan.ids
        self._lock = threading.Lock()
        self._is_torn = False

    @classmethod
    def open(cls, path: Path, belongs: Belongs) -> "RowFile":
        """The file for rows of one batch, made when it is not there. Raises ConfigError for a path that cannot be
        written, a full disk, what is no file of rows, rows of another batch, and a file that another process has open:
        its rows are then as they were."""
        try:
            return cls._open(path, belongs)
        except OSError as error:
            raise _unusable(path, error) from error

    @classmethod
    def _open(cls, path: Path, belongs: Belongs) -> "RowFile":
        real, descriptor = _open_locked(path)
        try:
            file = cls(real, descriptor, scan := scan_rows(descriptor, path, belongs))
        except BaseException:
            os.close(descriptor)
            raise
        try:
            file._mend(scan)
        except BaseException:
            file.close()
            raise
        return file

    @property
    def ids(self) -> Collection[str]:
        """Of all rows that are in it for good."""
        return self._ids

    def append(self, lines: Mapping[str, bytes]) -> list[str]:
        """Add rows, id to line, all of them or none, and return when the disk has them: rows that are ready together
        share the wait for it.

        Gives the ids that were added; one that is there already is left out. Raises RowsNotWritten.
        """
        with self._lock:
            fresh = {custom_id: line for custom_id, line in lines.items() if custom_id not in self._ids}
            if fresh:
                self._write(fresh.values())
                self._ids.update(fresh)
            return list(fresh)

    def rows(self) -> Iterator[Row]:
        """All that are in it, in their order."""
        with os.fdopen(os.dup(self._descriptor), "rb") as source:
            for _, line in read_rows(source, self._end):
                yield parse_row(line)

    def rewrite(self, leave_out: Collection[str], newer: Mapping[str, bytes]) -> None:
        """Put a file in its place, at once and whole, without the rows of some ids and with `newer` lines for others.
        Raises RowsNotWritten.
        """
        with self._lock:
            self._check_place()
            try:
                self._replace(leave_out, newer)
                _sync_folder(self.path.parent)
            except OSError as error:
                raise self._not_written(error) from error
            except ValueError as error:
                raise self._changed() from error

    def close(self) -> None:
        """Let others have it. Closing again does nothing."""
        with self._lock:
            if self._descriptor >= 0:
                os.close(self._descriptor)
                self._descriptor = -1

    def __enter__(self) -> "RowFile":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _mend(self, scan: Scan) -> None:
        """Take away what a crash left, and see that there is room for more."""
        self._set_end()
        try:
            os.posix_fallocate(self._descriptor, self._end, _PROBE_BYTES)
        finally:
            self._set_end()
        if scan.lacks_newline:
            self._write([b"\n"])
        if scan.has_holes:
            self.rewrite((), {})
        os.fsync(self._descriptor)
        _sync_folder(self.path.parent)

    def _set_end(self) -> None:
        os.ftruncate(self._descriptor, self._end)

    def _write(self, lines: Iterable[bytes]) -> None:
        """At the end, then to the disk. What of it cannot be written is taken away again."""
        try:
            if self._is_torn:
                self._set_end()
                self._is_torn = False
            self._check_place()
            self._is_torn, end = True, self._end
            for line in lines:
                end += _write_whole(self._descriptor, line, end)
            # After a failure the kernel may count as written what it has lost: the rows are taken away, and written
            # again by the next call.
            os.fsync(self._descriptor)
        except OSError as error:
            # Where that fails the next call tries it first, and whoever opens the file.
            with contextlib.suppress(OSError):
                self._set_end()
                self._is_torn = False
            raise self._not_written(error) from error
        self._is_torn = False
        self._end = end

    def _check_place(self) -> None:
        """Raises RowsNotWritten when the file is not what and where it was: rows would be lost in it, or lose
        others.
        """
        if self._descriptor < 0:
            raise RowsNotWritten(f"{self.path} is closed: open it again")
        mine = os.fstat(self._descriptor)
        try:
            there = self.path.stat()
        except OSError:
            there = None
        if there is None or not os.path.samestat(mine, there):
            raise RowsNotWritten(
                f"{self.path} has been moved or deleted while rows were written to it: put it back, then resume"
            )
        if mine.st_size != self._end and not self._is_torn:
            raise self._changed()

    def _replace(self, leave_out: Collection[str], newer: Mapping[str, bytes]) -> None:
        # A name of a length of its own: that of the file may be as long as names can be.
        beside = self.path.with_name(f".rows-{hashlib.sha256(os.fsencode(self.path.name)).hexdigest()[:16]}.unfinished")
        fresh = os.open(beside, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            # Locked before anybody can find it under the file's name.
            fcntl.flock(fresh, fcntl.LOCK_EX | fcntl.LOCK_NB)
            ids, end = self._copy(fresh, leave_out, newer)
            os.fsync(fresh)
            os.replace(beside, self.path)
        except BaseException:
            os.close(fresh)
            beside.unlink(missing_ok=True)
            raise
        os.close(self._descriptor)
        self._descriptor, self._ids, self._end, self._is_torn = fresh, ids, end, False

    def _copy(self, fresh: int, leave_out: Collection[str], newer: Mapping[str, bytes]) -> tuple[set[str], int]:
        old = os.fstat(self._descriptor)
        os.fchmod(fresh, stat.S_IMODE(old.st_mode))
        if (old.st_uid, old.st_gid) != (os.geteuid(), os.getegid()):
            with contextlib.suppress(PermissionError):
                os.fchown(fresh, old.st_uid, old.st_gid)
        ids: set[str] = set()
        end = 0
        with os.fdopen(os.dup(self._descriptor), "rb") as source:
            for custom_id, line in read_rows(source, self._end):
                if custom_id not in leave_out:
                    end += _write_whole(fresh, newer.get(custom_id, line), end)
                    ids.add(custom_id)
        return ids, end

    def _changed(self) -> RowsNotWritten:
        return RowsNotWritten(
            f"{self.path} has been changed by another program while rows were written to it: undo that, then resume"
        )

    def _not_written(self, error: OSError) -> RowsNotWritten:
        return RowsNotWritten(
            f"rows cannot be written to {self.path} ({error.strerror}): {_advice(error)}, then resume; no row is lost"
        )


class RowFiles:
    """The two files of a batch: rows of items that succeeded, and of those that failed. Used by one thread at a
    time.
    """

    def __init__(self, output: RowFile, errors: RowFile) -> None:
        self._output = output
        self._errors = errors
        self._newer: dict[str, bytes] = {}

    @classmethod
    def open(cls, output: Path, errors: Path, belongs: Belongs) -> "RowFiles":
        """Raises ConfigError as RowFile.open does, and for one file under two names."""
        if os.path.realpath(output) == os.path.realpath(errors) or (
            output.exists() and errors.exists() and os.path.samefile(output, errors)
        ):
            raise ConfigError(f"{output} and {errors} are one file: give the rows of failures a file of their own")
        first = RowFile.open(output, belongs)
        try:
            return cls(first, RowFile.open(errors, belongs))
        except BaseException:
            first.close()
            raise

    @property
    def succeeded(self) -> Collection[str]:
        return self._output.ids

    @property
    def failed(self) -> set[str]:
        """Items that failed and have not succeeded since."""
        return {custom_id for custom_id in self._errors.ids if custom_id not in self._output.ids}

    @property
    def dropped_bytes(self) -> int:
        return self._output.dropped_bytes + self._errors.dropped_bytes

    def append(self, outcomes: Iterable[Outcome]) -> list[str]:
        """Add the rows of items that ended, each to its file, and give the ids that are new to one. An item that has
        succeeded stays so; the newer of two failures takes the older one's place when the files are settled. Raises
        RowsNotWritten: call it again with the same.
        """
        successes: dict[str, bytes] = {}
        failures: dict[str, bytes] = {}
        for outcome in outcomes:
            line, is_success = _build_line(outcome)
            (successes if is_success else failures)[outcome.custom_id] = line
        added = self._output.append(successes)
        failures = {custom_id: line for custom_id, line in failures.items() if custom_id not in self._output.ids}
        new = self._errors.append(failures)
        self._newer |= {custom_id: line for custom_id, line in failures.items() if custom_id not in new}
        if sum(map(len, self._newer.values())) > MAX_HELD_BYTES:
            self.settle()
        return [*added, *new]

    def outcomes(self) -> Iterator[Outcome]:
        """How those items ended that are not worth the same attempt again: the successes, then the failures of other
        items.
        """
        for row in self._output.rows():
            yield from parse_outcome(row)
        for row in self._errors.rows():
            if row.custom_id not in self._output.ids:
                yield from parse_outcome(row)

    def settle(self) -> None:
        """One row for each item: the errors file loses those of items that have succeeded since, and has the newest of
        the others.

        Raises RowsNotWritten: both files are as they were.
        """
        over = {custom_id for custom_id in self._errors.ids if custom_id in self._output.ids}
        if over or self._newer:
            self._errors.rewrite(over, self._newer)
            self._newer = {}

    def close(self) -> None:
        self._output.close()
        self._errors.close()

    def __enter__(self) -> "RowFiles":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _build_line(outcome: Outcome) -> tuple[bytes, bool]:
    """The row's line, and whether it is of a success. What cannot be written down is a failure that says so: one item
    holds up no other.
    """
    try:
        return build_row_line(build_row(outcome)), outcome.failure is None
    except ValueError as error:
        message = (
            f"the item ended, and its row cannot be kept: {error}; ask for less of it, as without its transcript, and "
            "retry it"
        )
        failure = Failure(kind=FailureKind.MODEL, code=ErrorCode.INTERNAL, message=message)
        return build_row_line(build_row(outcome.model_copy(update={"body": None, "failure": failure}))), False


def _open_locked(path: Path) -> tuple[Path, int]:
    """The file's own path, through links, and an open descriptor of it that nobody else has. Raises ConfigError."""
    while True:
        real, descriptor = _open_file(path)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Between opening and locking another may have been put in its place.
            if real.exists() and os.path.samestat(os.fstat(descriptor), real.stat()):
                return real, descriptor
        except BlockingIOError:
            os.close(descriptor)
            raise ConfigError(
                f"another process is writing rows to {path}: wait until it has ended, or give another file"
            ) from None
        except OSError as error:
            os.close(descriptor)
            raise ConfigError(
                f"{path} cannot be locked ({error.strerror}): give a file on a disk that keeps locks"
            ) from error
        os.close(descriptor)


def _open_file(path: Path) -> tuple[Path, int]:
    try:
        real = Path(os.path.realpath(path))
        # Looked at first: opening a pipe would wait for somebody who reads it.
        if path.exists() and not path.is_file():
            raise ConfigError(
                f"{path} is no plain file, and rows are kept, not only printed: give a file (`toolcrew batches export "
                "ID` prints what is in it)"
            )
        if real.parent.is_dir() and not os.access(real.parent, os.W_OK | os.X_OK):
            raise ConfigError(
                f"rows cannot be written to {path}: no file can be made in its folder; mend the folder's rights, or "
                "give another"
            )
        return real, os.open(real, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o666)
    except ValueError as error:
        raise ConfigError(f"rows cannot be written to {str(path)!r} ({error}): give another name") from error
    except OSError as error:
        raise _unusable(path, error) from error


def _unusable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"rows cannot be written to {path} ({error.strerror}): {_advice(error)}")


def _write_whole(descriptor: int, line: bytes, at: int) -> int:
    """With one write; on a disk that is nearly full the kernel takes a part of it, and says why with the next."""
    done = 0
    while done < len(line):
        done += os.pwrite(descriptor, memoryview(line)[done:], at + done)
    return len(line)


def _sync_folder(folder: Path) -> None:
    """So that the name of the file outlives a crash, too."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _advice(error: OSError) -> str:
    if error.errno in _FULL:
        return "make room on its disk"
    if error.errno == errno.ENOENT:
        return "make its folder"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return "mend its rights, or give another file"
    return "mend its disk, or give another file"
