"""Row files of a batch.

Invariants: only one process at a time writes a row file. Rows are only appended, and a row is complete or absent.
After a crash, the next process finds every row that was confirmed as written. After `settle`, the output file and the
errors file together contain one row for each item.
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

from toolcrew.contract.errors import ConfigError, ErrorCode, OperatorError
from toolcrew.contract.run_events import Failure, FailureKind
from toolcrew.orchestrator.batches.row_scan import RowCheck, Scan, read_rows, scan_rows
from toolcrew.orchestrator.batches.rows import Row, build_row, build_row_line, parse_outcome, parse_row
from toolcrew.store.batches import ItemOutcome

MAX_HELD_BYTES = 64 * 1024 * 1024
"""Limit of newer failures in memory, in bytes. These failures replace older failures when the files are settled. Above
the limit, the files are settled at once.
"""
_PROBE_BYTES = 4096
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class RowsNotWritten(OperatorError):
    """Rows could not be added. The file contains none of these rows, and the caller may repeat the call. No existing
    row is lost.
    """

    code = ErrorCode.NO_SPACE


class RowFile:
    """An open row file. All methods block and can be called from any thread.

    A file is opened before its batch starts, so that a file that cannot be written is found early.
    """

    def __init__(self, path: Path, descriptor: int, scan: Scan) -> None:
        self.path = path
        self.dropped_bytes = scan.dropped_bytes
        """Number of removed bytes of an incomplete row. A process that died had started the row at the end of the
        file.
        """
        self._descriptor = descriptor
        self._end = scan.end
        self._ids = scan.ids
        self._lock = threading.Lock()
        self._has_partial_row = False

    @classmethod
    def open(cls, path: Path, belongs: RowCheck) -> "RowFile":
        """Open the file for rows of one batch. The file is created if it does not exist.

        Raises ConfigError: the path cannot be written, the disk is full, or the file is not a row file. Raises
        ConfigError: the file has rows of another batch, or another process has the file open. The rows in the file do
        not change in these cases.
        """
        try:
            return cls._open(path, belongs)
        except OSError as error:
            raise _build_open_error(path, error) from error

    @classmethod
    def _open(cls, path: Path, belongs: RowCheck) -> "RowFile":
        """Open, lock, scan and repair the file."""
        real, descriptor = _open_locked(path)
        try:
            file = cls(real, descriptor, scan := scan_rows(descriptor, path, belongs))
        except BaseException:
            os.close(descriptor)
            raise
        try:
            file._repair(scan)
        except BaseException:
            file.close()
            raise
        return file

    @property
    def ids(self) -> Collection[str]:
        """Return the ids of all rows that are in the file permanently."""
        return self._ids

    def append(self, lines: Mapping[str, bytes]) -> list[str]:
        """Append rows, all or none. Returns when the rows are on the disk. Rows of one call share one wait for the
        disk.

        `lines`: line of each row, by id. Returns the added ids; an id that already has a row is skipped. Raises
        RowsNotWritten.
        """
        with self._lock:
            new_lines = {custom_id: line for custom_id, line in lines.items() if custom_id not in self._ids}
            if new_lines:
                self._write(new_lines.values())
                self._ids.update(new_lines)
            return list(new_lines)

    def rows(self) -> Iterator[Row]:
        """Yield all rows of the file, in their order."""
        with os.fdopen(os.dup(self._descriptor), "rb") as source:
            for _, line in read_rows(source, self._end):
                yield parse_row(line)

    def rewrite(self, leave_out: Collection[str], newer: Mapping[str, bytes]) -> None:
        """Replace the file atomically. The new file lacks the rows of the ids in `leave_out`, and has the lines of
        `newer` in place of older lines. Raises RowsNotWritten.
        """
        with self._lock:
            self._check_file()
            try:
                self._replace(leave_out, newer)
                _sync_folder(self.path.parent)
            except OSError as error:
                raise self._build_write_error(error) from error
            except ValueError as error:
                raise self._build_changed_error() from error

    def close(self) -> None:
        """Close the file, so that another process can open it. A second call does nothing."""
        with self._lock:
            if self._descriptor >= 0:
                os.close(self._descriptor)
                self._descriptor = -1

    def __enter__(self) -> "RowFile":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _repair(self, scan: Scan) -> None:
        """Remove the remains of a crash, and check that the disk has room for more rows."""
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
        """Cut the file after its last complete row."""
        os.ftruncate(self._descriptor, self._end)

    def _write(self, lines: Iterable[bytes]) -> None:
        """Append lines and wait until they are on the disk. Lines that cannot be written are removed again."""
        try:
            # A previous call could not remove its incomplete lines. Remove them before anything is appended.
            if self._has_partial_row:
                self._set_end()
                self._has_partial_row = False
            self._check_file()
            self._has_partial_row, end = True, self._end
            for line in lines:
                end += _write_fully(self._descriptor, line, end)
            # After a failed fsync, the kernel may count lost data as written. Remove the rows, so that the next call
            # writes them again.
            os.fsync(self._descriptor)
        except OSError as error:
            # If this fails too, the next call removes the incomplete rows before it writes. A process that opens the
            # file does the same.
            with contextlib.suppress(OSError):
                self._set_end()
                self._has_partial_row = False
            raise self._build_write_error(error) from error
        self._has_partial_row = False
        self._end = end

    def _check_file(self) -> None:
        """Raise RowsNotWritten if the file was moved, replaced or changed. Rows would be lost in that file, or would
        overwrite other data.
        """
        if self._descriptor < 0:
            raise RowsNotWritten(f"the file {self.path} is closed: open it again")
        opened = os.fstat(self._descriptor)
        try:
            current = self.path.stat()
        except OSError:
            current = None
        if current is None or not os.path.samestat(opened, current):
            raise RowsNotWritten(
                f"{self.path} was moved or deleted while rows were written to it: restore it, then resume"
            )
        if opened.st_size != self._end and not self._has_partial_row:
            raise self._build_changed_error()

    def _replace(self, leave_out: Collection[str], newer: Mapping[str, bytes]) -> None:
        """Write a new file next to the old file, then rename the new file to the name of the old file."""
        # The temporary name has a fixed length: the name of the row file may already have the maximum length.
        temporary = self.path.with_name(
            f".rows-{hashlib.sha256(os.fsencode(self.path.name)).hexdigest()[:16]}.unfinished"
        )
        new_file = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            # Lock the new file before another process can find the file by its final name.
            fcntl.flock(new_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            ids, end = self._copy(new_file, leave_out, newer)
            os.fsync(new_file)
            os.replace(temporary, self.path)
        except BaseException:
            os.close(new_file)
            temporary.unlink(missing_ok=True)
            raise
        os.close(self._descriptor)
        self._descriptor, self._ids, self._end, self._has_partial_row = new_file, ids, end, False

    def _copy(self, new_file: int, leave_out: Collection[str], newer: Mapping[str, bytes]) -> tuple[set[str], int]:
        """Copy the rows to the new file. Return the ids of the rows and the end of the file. Owner and permissions
        are copied too.
        """
        old = os.fstat(self._descriptor)
        os.fchmod(new_file, stat.S_IMODE(old.st_mode))
        if (old.st_uid, old.st_gid) != (os.geteuid(), os.getegid()):
            with contextlib.suppress(PermissionError):
                os.fchown(new_file, old.st_uid, old.st_gid)
        ids: set[str] = set()
        end = 0
        with os.fdopen(os.dup(self._descriptor), "rb") as source:
            for custom_id, line in read_rows(source, self._end):
                if custom_id not in leave_out:
                    end += _write_fully(new_file, newer.get(custom_id, line), end)
                    ids.add(custom_id)
        return ids, end

    def _build_changed_error(self) -> RowsNotWritten:
        """Return the error for a file that another program has changed."""
        return RowsNotWritten(
            f"another program changed {self.path} while rows were written to it: undo the change, then resume"
        )

    def _build_write_error(self, error: OSError) -> RowsNotWritten:
        """Return the error for rows that the disk does not accept."""
        return RowsNotWritten(
            f"rows cannot be written to {self.path} ({error.strerror}): {_advice(error)}, then resume. No row is lost"
        )


class RowFiles:
    """Two files of a batch: rows of successful items and rows of failed items. Used by one thread at a time."""

    def __init__(self, output: RowFile, errors: RowFile) -> None:
        self._output = output
        self._errors = errors
        self._newer: dict[str, bytes] = {}

    @classmethod
    def open(cls, output: Path, errors: Path, belongs: RowCheck) -> "RowFiles":
        """Open both files. Raises ConfigError as RowFile.open does. Raises ConfigError: both names lead to the same
        file.
        """
        if os.path.realpath(output) == os.path.realpath(errors) or (
            output.exists() and errors.exists() and os.path.samefile(output, errors)
        ):
            raise ConfigError(f"{output} and {errors} are the same file: use a separate file for the rows of failures")
        first = RowFile.open(output, belongs)
        try:
            return cls(first, RowFile.open(errors, belongs))
        except BaseException:
            first.close()
            raise

    @property
    def succeeded(self) -> Collection[str]:
        """Return the ids of items that have succeeded."""
        return self._output.ids

    @property
    def failed(self) -> set[str]:
        """Return the ids of items that have failed and have not succeeded since then."""
        return {custom_id for custom_id in self._errors.ids if custom_id not in self._output.ids}

    @property
    def dropped_bytes(self) -> int:
        """Return the number of bytes of incomplete rows that were removed from both files."""
        return self._output.dropped_bytes + self._errors.dropped_bytes

    def append(self, outcomes: Iterable[ItemOutcome]) -> list[str]:
        """Append the rows of ended items to their files. Return the ids that are new in a file.

        A successful item stays successful. A newer failure replaces an older failure when the files are settled.
        Raises RowsNotWritten: the caller must repeat the call with the same outcomes.
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

    def outcomes(self) -> Iterator[ItemOutcome]:
        """Yield the outcomes of items that need no new attempt: first the successes, then the failures of other
        items.
        """
        for row in self._output.rows():
            yield from parse_outcome(row)
        for row in self._errors.rows():
            if row.custom_id not in self._output.ids:
                yield from parse_outcome(row)

    def settle(self) -> None:
        """Leave one row for each item. The errors file loses the rows of items that have succeeded since, and
        receives the newest row of other items.

        Raises RowsNotWritten: both files are unchanged.
        """
        over = {custom_id for custom_id in self._errors.ids if custom_id in self._output.ids}
        if over or self._newer:
            self._errors.rewrite(over, self._newer)
            self._newer = {}

    def close(self) -> None:
        """Close both files."""
        self._output.close()
        self._errors.close()

    def __enter__(self) -> "RowFiles":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _build_line(outcome: ItemOutcome) -> tuple[bytes, bool]:
    """Return the row's line, and whether the row is a success.

    If the row cannot be written as JSON, return a failure that reports this problem, so that one item does not block
    other items.
    """
    try:
        return build_row_line(build_row(outcome)), outcome.failure is None
    except ValueError as error:
        message = (
            f"the item ended, but its row cannot be stored: {error}. Ask for a shorter answer or fewer artifacts, and "
            "retry the item"
        )
        failure = Failure(kind=FailureKind.MODEL, code=ErrorCode.INTERNAL, message=message)
        return build_row_line(build_row(outcome.model_copy(update={"body": None, "failure": failure}))), False


def _open_locked(path: Path) -> tuple[Path, int]:
    """Return the real path of the file, with links resolved, and a descriptor with an exclusive lock. Raises
    ConfigError.
    """
    while True:
        real, descriptor = _open_file(path)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Another process may have replaced the file between opening and locking. Then open the new file.
            if real.exists() and os.path.samestat(os.fstat(descriptor), real.stat()):
                return real, descriptor
        except BlockingIOError:
            os.close(descriptor)
            raise ConfigError(
                f"another process is writing rows to {path}: wait until it ends, or use another file"
            ) from None
        except OSError as error:
            os.close(descriptor)
            raise ConfigError(
                f"{path} cannot be locked ({error.strerror}): use a file on a disk that supports locks"
            ) from error
        os.close(descriptor)


def _open_file(path: Path) -> tuple[Path, int]:
    """Open the file and return its real path and descriptor. Raises ConfigError."""
    try:
        real = Path(os.path.realpath(path))
        # Check the type before opening: opening a pipe waits for its reader.
        if path.exists() and not path.is_file():
            raise ConfigError(
                f"{path} is not a regular file, and rows must be stored: use a regular file (`toolcrew batches export "
                "ID` prints the rows)"
            )
        if real.parent.is_dir() and not os.access(real.parent, os.W_OK | os.X_OK):
            raise ConfigError(
                f"rows cannot be written to {path}: no file can be created in its folder. Fix the permissions of the "
                "folder, or use another folder"
            )
        return real, os.open(real, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o666)
    except ValueError as error:
        raise ConfigError(f"rows cannot be written to {str(path)!r} ({error}): use another name") from error
    except OSError as error:
        raise _build_open_error(path, error) from error


def _build_open_error(path: Path, error: OSError) -> ConfigError:
    """Return the error for a path that cannot be used."""
    return ConfigError(f"rows cannot be written to {path} ({error.strerror}): {_advice(error)}")


def _write_fully(descriptor: int, line: bytes, at: int) -> int:
    """Write the whole line at the position. On a disk that is nearly full, the kernel may write a part and report the
    error at the next write.
    """
    written = 0
    while written < len(line):
        written += os.pwrite(descriptor, memoryview(line)[written:], at + written)
    return len(line)


def _sync_folder(folder: Path) -> None:
    """Write the folder to the disk, so that the name of the file survives a crash."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _advice(error: OSError) -> str:
    """Return advice for an error of the disk."""
    if error.errno in _FULL:
        return "free space on its disk"
    if error.errno == errno.ENOENT:
        return "create its folder"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return "fix its permissions, or use another file"
    return "fix its disk, or use another file"
