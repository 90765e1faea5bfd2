"""Sandbox provider `sandbox="toolcrew"` for evaluations with Inspect: each sample gets a session of the pool
(docs/integrations.md).
"""

import asyncio
import errno
import posixpath
import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, overload

from inspect_ai._util.error import PrerequisiteError
from inspect_ai.util import (
    ExecResult,
    OutputLimitExceededError,
    SandboxConnection,
    SandboxEnvironment,
    SandboxEnvironmentConfigType,
    SandboxEnvironmentLimits,
    SandboxUserUnsupportedError,
    sandboxenv,
)
from inspect_ai.util._sandbox.environment import SandboxUnavailableError
from pydantic import BaseModel
from typing_extensions import override

from contract.calls import MAX_BLOB_BYTES, MAX_TIMEOUT_S
from contract.calls import ExecResult as Done
from contract.errors import ErrorCode, OperatorError, ToolcrewError, ToolFailure
from orchestrator.adapters.inspect_config import CONFIG_FILES, load_config, parse_config
from orchestrator.adapters.inspect_crew import client_of_loop
from orchestrator.dispatch.sessions import Session
from telemetry.logs import get_logger

log = get_logger(__name__)

WORKSPACE = "/workspace"
USER = "1000"
"""User id of all processes in a sandbox. There is no other user."""
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


_SETUP_FILE = re.compile(r"/tmp/[0-9A-Za-z]{22}")
"""Path of a sample's setup script, which Inspect writes and then runs."""
_RUN_A_COPY = [
    "/bin/sh",
    "-c",
    'at=$1; shift; own=/workspace/.setup-${at##*/}; trap \'rm -f "$own"\' EXIT; cp -p "$at" "$own" || exit; '
    'n=$#; while [ "$n" -gt 1 ]; do set -- "$@" "$1"; shift; n=$((n - 1)); done; shift; "$@" "$own"',
    "sh",
]
"""Command that runs a script of /tmp, which is mounted noexec. It copies the script into the workspace, runs the
copy, and removes it.
"""
_CAT_TIMEOUT_S = 60.0
_CAT_ERRORS = {
    "No such file or directory": ErrorCode.FILE_NOT_FOUND,
    "Not a directory": ErrorCode.NOT_A_DIRECTORY,
    "Is a directory": ErrorCode.IS_DIRECTORY,
    "Permission denied": ErrorCode.PERMISSION_DENIED,
}


@sandboxenv(name="toolcrew")
class ToolcrewSandboxEnvironment(SandboxEnvironment):
    """Sandbox of one sample: a session of the pool that TOOLCREW_REDIS_URL names. Relative paths start at /workspace;
    all processes run as uid 1000.
    """

    def __init__(self, session: Session) -> None:
        super().__init__()
        self.session = session

    @override
    @classmethod
    async def task_init(cls, task_name: str, config: SandboxEnvironmentConfigType | None) -> None:
        """Check the configuration and the pool. Raises PrerequisiteError before any sample begins if one of them does
        not work.
        """
        try:
            load_config(config)
            await client_of_loop().client()
        except ToolcrewError as error:
            raise PrerequisiteError(f"toolcrew: {error}") from error

    @override
    @classmethod
    async def sample_init(
        cls, task_name: str, config: SandboxEnvironmentConfigType | None, metadata: dict[str, str]
    ) -> dict[str, SandboxEnvironment]:
        try:
            session = await client_of_loop().open_session(load_config(config))
        except ToolcrewError as error:
            raise SandboxUnavailableError(f"toolcrew: no sandbox for this sample: {error}") from error
        return {"default": cls(session)}

    @override
    @classmethod
    async def sample_cleanup(
        cls,
        task_name: str,
        config: SandboxEnvironmentConfigType | None,
        environments: dict[str, SandboxEnvironment],
        interrupted: bool,
    ) -> None:
        """Close the session, also after an interruption: removing a sandbox is as fast as reporting that it remains."""
        for environment in environments.values():
            session = environment.as_type(ToolcrewSandboxEnvironment).session
            try:
                await asyncio.shield(client_of_loop().close_session(session))
            except ToolcrewError as error:
                log.warning("inspect_sandbox_not_closed", session=session.id, error=str(error))

    @override
    @classmethod
    async def task_cleanup(cls, task_name: str, config: SandboxEnvironmentConfigType | None, cleanup: bool) -> None:
        for error in await client_of_loop().end(closes_sessions=cleanup):
            log.warning("inspect_sandbox_left", error=error)

    @override
    @classmethod
    async def cli_cleanup(cls, id: str | None) -> None:
        """Close one session. Closing all sessions is refused, because other programs may have sessions in the pool.
        Raises PrerequisiteError.
        """
        if id is None:
            raise PrerequisiteError(
                "toolcrew: specify the session to remove: `toolcrew sessions list` lists the sessions, `inspect "
                "sandbox cleanup toolcrew ID` removes one. The command does not remove all sessions, because other "
                "programs may use them"
            )
        shared = client_of_loop()
        try:
            await (await (await shared.client()).session(id)).close()
        except ToolcrewError as error:
            raise PrerequisiteError(f"toolcrew: {error}") from error
        finally:
            await shared.end(closes_sessions=False)

    @override
    @classmethod
    def config_files(cls) -> list[str]:
        return CONFIG_FILES

    @override
    @classmethod
    def config_deserialize(cls, config: dict[str, Any]) -> BaseModel:
        return parse_config(config)

    @override
    async def exec(
        self,
        cmd: list[str],
        input: str | bytes | None = None,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        user: str | None = None,
        timeout: int | None = None,
        timeout_retry: bool = True,
        concurrency: bool = True,
    ) -> ExecResult[str]:
        """Run a program once. `timeout_retry` is ignored, because a killed program may have acted. `concurrency` is
        ignored, because the pool assigns its slots. The limit is 600 s, the pool's maximum, also without `timeout`.

        Raises the exceptions of SandboxEnvironment.exec, and OutputLimitExceededError above 4 MiB of a stream or
        Inspect's own limit if that is lower.
        """
        if user is not None and user != USER:
            raise SandboxUserUnsupportedError(
                f"a toolcrew sandbox runs all processes as uid {USER}, not as {user!r}: omit the user"
            )
        limit_s = min(timeout, MAX_TIMEOUT_S) if timeout is not None else MAX_TIMEOUT_S
        if _starts_setup(cmd):
            cmd = [*_RUN_A_COPY, cmd[-1], *cmd]
        try:
            done = await self.session.exec(
                cmd, stdin=_as_bytes(input), env=env, cwd=_absolute_path(cwd or ""), timeout_s=limit_s
            )
        except ToolFailure as failure:
            return _not_started(failure)
        except OperatorError as error:
            raise _unavailable(error) from error
        return _judge(done, limit_s)

    @override
    async def write_file(self, file: str, contents: str | bytes) -> None:
        """Write a file atomically and create its parent folders. Raises OSError(EFBIG) above 64 MiB."""
        with _file_errors(file):
            await self.session.write_file(_absolute_path(file), _as_bytes(contents))

    @overload
    async def read_file(self, file: str, text: Literal[True] = True) -> str: ...

    @overload
    async def read_file(self, file: str, text: Literal[False]) -> bytes: ...

    @override
    async def read_file(self, file: str, text: bool = True) -> str | bytes:
        """Return the content of a file. Raises OutputLimitExceededError above 64 MiB, or Inspect's own limit if that
        is lower.
        """
        try:
            with _file_errors(file):
                data = await self._read(file)
        except OSError as error:
            if error.errno != errno.EFBIG:
                raise
            raise OutputLimitExceededError(f"{MAX_BLOB_BYTES >> 20} MiB", None) from error
        if len(data) > SandboxEnvironmentLimits.MAX_READ_FILE_SIZE:
            raise OutputLimitExceededError(SandboxEnvironmentLimits.MAX_READ_FILE_SIZE_STR, None)
        return data.decode() if text else data

    async def _read(self, file: str) -> bytes:
        path = _absolute_path(file)
        try:
            return await self.session.read_file(path)
        except ToolFailure as failure:
            if failure.code != ErrorCode.PATH_NOT_ALLOWED:
                raise
        # The file verbs are limited to /workspace, /tmp and /output. Programs can also read the files of the image.
        done = await self.session.exec(["/bin/cat", "--", path], env={"LC_ALL": "C"}, timeout_s=_CAT_TIMEOUT_S)
        if done.truncated:
            raise OutputLimitExceededError(_STREAM_LIMIT, None)
        if done.returncode != 0:
            raise _read_failure(path, done)
        return done.stdout

    @override
    async def connection(self, *, user: str | None = None) -> SandboxConnection:
        """Return a command that runs one program in the sandbox, which has no terminal. Raises ConnectionError when
        the session no longer exists.
        """
        if user is not None and user != USER:
            raise SandboxUserUnsupportedError(f"a toolcrew sandbox runs all processes as uid {USER}, not as {user!r}")
        try:
            await (await client_of_loop().client()).session(self.session.id, tenant=self.session.tenant)
        except ToolcrewError as error:
            raise ConnectionError(f"the session {self.session.id} cannot be reached: {error}") from error
        command = [
            "toolcrew",
            "sessions",
            "exec",
            "--tenant",
            self.session.tenant,
            self.session.id,
            "ls",
            "-la",
            WORKSPACE,
        ]
        return SandboxConnection(type="toolcrew", command=shlex.join(command))


def _starts_setup(cmd: list[str]) -> bool:
    """Return whether the command runs the setup script. The chmod before it and the rm after it name the same file."""
    return len(cmd) > 3 and cmd[0] == "/bin/sh" and "exec env " in cmd[2] and _SETUP_FILE.fullmatch(cmd[-1]) is not None


def _absolute_path(path: str) -> str:
    return posixpath.join(WORKSPACE, path)


def _as_bytes(content: str | bytes | None) -> bytes:
    return content.encode() if isinstance(content, str) else content or b""


def _unavailable(error: ToolFailure | OperatorError) -> RuntimeError:
    """Return the exception for a failure. Inspect presents SandboxUnavailableError to a model as a failure before its
    command. So an uncertain failure, where the command may have acted, is a RuntimeError.
    """
    message = f"toolcrew [{error.code}]: {error}"
    return RuntimeError(message) if error.code in _UNCERTAIN else SandboxUnavailableError(message)


def _not_started(failure: ToolFailure) -> ExecResult[str]:
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
        raise _unavailable(failure) from failure
    return ExecResult(success=False, returncode=127, stdout="", stderr=f"{message}\n")


def _read_failure(path: str, done: Done) -> ToolFailure:
    if done.timed_out:
        return ToolFailure(ErrorCode.TIMEOUT, f"{path} could not be read within {_CAT_TIMEOUT_S:g} s")
    message = done.stderr.decode(errors="replace").strip()
    return ToolFailure(
        next((code for ending, code in _CAT_ERRORS.items() if message.endswith(ending)), ErrorCode.INTERNAL), message
    )


def _judge(done: Done, limit_s: float) -> ExecResult[str]:
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
def _file_errors(file: str) -> Iterator[None]:
    try:
        yield
    except ToolFailure as failure:
        kind, number = _FILE_ERRORS.get(failure.code, (None, 0))
        if kind is None:
            raise _unavailable(failure) from failure
        reason = f"{'Is a directory' if kind is IsADirectoryError else failure}"
        raise kind(number, reason, file) from failure
    except OperatorError as error:
        raise _unavailable(error) from error
