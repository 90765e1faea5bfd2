"""Conversion of a session's results and exceptions to those that Inspect expects."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from inspect_ai.util import ExecResult, OutputLimitExceededError, SandboxEnvironmentLimits
from inspect_ai.util._sandbox.environment import SandboxUnavailableError

from toolcrew.contract.calls import ExecResult as Done
from toolcrew.contract.errors import ErrorCode, OperatorError, ToolFailure

_STREAM_LIMIT = "4 MiB"
"""Limit of the output that a worker reads from each stream."""
_UNCERTAIN = frozenset({ErrorCode.OUTCOME_UNKNOWN, ErrorCode.CANCELLED, ErrorCode.INTERNAL, ErrorCode.ENVELOPE_REFUSED})
"""Error codes after which the program may have started."""
_NOT_BEGUN = frozenset(
    {ErrorCode.TIMEOUT, ErrorCode.SESSION_NOT_FOUND, ErrorCode.RATE_LIMITED, ErrorCode.QUOTA_EXCEEDED}
)
_FILE_ERRORS: dict[ErrorCode, tuple[type[OSError], int]] = {
    ErrorCode.FILE_NOT_FOUND: (FileNotFoundError, errno.ENOENT),
    ErrorCode.NOT_A_DIRECTORY: (NotADirectoryError, errno.ENOTDIR),
    ErrorCode.IS_DIRECTORY: (IsADirectoryError, errno.EISDIR),
    ErrorCode.PERMISSION_DENIED: (PermissionError, errno.EACCES),
    ErrorCode.PATH_NOT_ALLOWED: (PermissionError, errno.EACCES),
    ErrorCode.SECURITY_REFUSED: (PermissionError, errno.EACCES),
    ErrorCode.NO_SPACE: (OSError, errno.ENOSPC),
    ErrorCode.FILE_TOO_LARGE: (OSError, errno.EFBIG),
}


def unavailable(error: ToolFailure | OperatorError) -> RuntimeError:
    """Return the exception for a failure. Inspect tells the model for a SandboxUnavailableError that its command did
    not run. If the command may have run, the exception is therefore a RuntimeError.
    """
    message = f"toolcrew [{error.code}]: {error}"
    return RuntimeError(message) if error.code in _UNCERTAIN else SandboxUnavailableError(message)


def not_started(failure: ToolFailure) -> ExecResult[str]:
    """Return the result of a program that could not start. A missing program or folder is an error of the command,
    reported as a shell reports it. Other failures are raised.
    """
    message = str(failure)
    if failure.code in (
        ErrorCode.PERMISSION_DENIED,
        ErrorCode.SECURITY_REFUSED,
        ErrorCode.PATH_NOT_ALLOWED,
    ) or message.endswith("could not be started: permission denied"):
        raise PermissionError(errno.EACCES, message)
    if failure.code in _NOT_BEGUN or failure.code in _UNCERTAIN:
        raise unavailable(failure) from failure
    return ExecResult(success=False, returncode=127, stdout="", stderr=f"{message}\n")


def judge(done: Done, limit_s: float) -> ExecResult[str]:
    stdout, stderr = done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace")
    if done.timed_out:
        error = TimeoutError(f"Command timed out after {limit_s:g} seconds and was killed")
        # Inspect's own provider attaches the output too, and Inspect's tools show it to the model.
        error.truncated_output = stdout + stderr  # type: ignore[attr-defined]
        raise error
    limit = SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE
    if max(len(done.stdout), len(done.stderr)) > limit:
        longest = max(done.stdout, done.stderr, key=len)
        raise OutputLimitExceededError(
            SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE_STR, longest[-limit:].decode(errors="replace")
        )
    if done.truncated:
        raise OutputLimitExceededError(_STREAM_LIMIT, stdout + stderr)
    code = done.returncode if done.returncode >= 0 else 128 - done.returncode
    return ExecResult(success=code == 0, returncode=code, stdout=stdout, stderr=stderr)


@contextmanager
def file_errors(file: str) -> Iterator[None]:
    try:
        yield
    except ToolFailure as failure:
        kind, number = _FILE_ERRORS.get(failure.code, (None, 0))
        if kind is None:
            raise unavailable(failure) from failure
        reason = f"{'Is a directory' if kind is IsADirectoryError else failure}"
        raise kind(number, reason, file) from failure
    except OperatorError as error:
        raise unavailable(error) from error
