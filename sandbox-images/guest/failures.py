"""Failures of a request: all error codes, and the conversion of the kernel's errors."""

from __future__ import annotations

import errno
import os

INVALID_ARGUMENTS = "INVALID_ARGUMENTS"
FILE_NOT_FOUND = "FILE_NOT_FOUND"
FILE_EXISTS = "FILE_EXISTS"
IS_DIRECTORY = "IS_DIRECTORY"
NOT_A_DIRECTORY = "NOT_A_DIRECTORY"
PATH_NOT_ALLOWED = "PATH_NOT_ALLOWED"
NOT_A_REGULAR_FILE = "NOT_A_REGULAR_FILE"
FILE_TOO_LARGE = "FILE_TOO_LARGE"
INVALID_PATTERN = "INVALID_PATTERN"
BINARY_FILE = "BINARY_FILE"
OFFSET_OUT_OF_RANGE = "OFFSET_OUT_OF_RANGE"
NO_MATCH = "NO_MATCH"
AMBIGUOUS_MATCH = "AMBIGUOUS_MATCH"
NO_CHANGE = "NO_CHANGE"
STALE_FILE = "STALE_FILE"
PERMISSION_DENIED = "PERMISSION_DENIED"
NO_SPACE = "NO_SPACE"
SPAWN_FAILED = "SPAWN_FAILED"
TIMEOUT = "TIMEOUT"
CANCELLED = "CANCELLED"
NETWORK_ERROR = "NETWORK_ERROR"
RATE_LIMITED = "RATE_LIMITED"
INTERNAL = "INTERNAL"

_CODE_OF_ERRNO = {
    errno.ENOENT: FILE_NOT_FOUND,
    errno.EEXIST: FILE_EXISTS,
    errno.EISDIR: IS_DIRECTORY,
    errno.ENOTDIR: NOT_A_DIRECTORY,
    errno.EACCES: PERMISSION_DENIED,
    errno.EPERM: PERMISSION_DENIED,
    errno.EROFS: PERMISSION_DENIED,
    errno.ETXTBSY: PERMISSION_DENIED,
    errno.EBUSY: PERMISSION_DENIED,
    errno.ENOTEMPTY: FILE_EXISTS,
    errno.ELOOP: PATH_NOT_ALLOWED,
    errno.EXDEV: PATH_NOT_ALLOWED,
    errno.ENAMETOOLONG: INVALID_ARGUMENTS,
    errno.ENOSPC: NO_SPACE,
    errno.EDQUOT: NO_SPACE,
    errno.EFBIG: NO_SPACE,
}
MESSAGE_CHARS = 4000
MAX_BODY = 67_108_864


class RequestFailure(Exception):
    """A request that ends with an error. `details` are additional fields of the error object."""

    def __init__(self, code: str, message: str, **details: int) -> None:
        super().__init__(message)
        self.code = code
        # Shorten the message: names from the request may be as long as a header, and the message must fit into a
        # header.
        self.message = message[:MESSAGE_CHARS]
        self.details = details

    def as_error(self) -> dict[str, object]:
        """Return the error object of the done event."""
        return {"code": self.code, "message": self.message, **self.details}


def describe_os_error(error: OSError, subject: str) -> RequestFailure:
    """Return the failure for an error of the kernel.

    `subject` is the path or the program in the message. `subject` must already be printable.
    """
    number = error.errno or 0
    code = _CODE_OF_ERRNO.get(number, INTERNAL)
    return RequestFailure(code, f"{subject}: {os.strerror(number).lower() if number else error}")
