"""Sandbox provider `sandbox="toolcrew"` for evaluations with Inspect: each sample gets a session of the pool
(docs/integrations.md).
"""

import asyncio
import errno
import posixpath
import shlex
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

from toolcrew.contract.calls import MAX_BLOB_BYTES
from toolcrew.contract.errors import ErrorCode, OperatorError, ToolcrewError, ToolFailure
from toolcrew.orchestrator.adapters.inspect_client import client_of_loop
from toolcrew.orchestrator.adapters.inspect_config import CONFIG_FILES, load_config, parse_config
from toolcrew.orchestrator.adapters.inspect_results import file_errors, judge, not_started, unavailable
from toolcrew.orchestrator.adapters.inspect_servers import (
    BROWSER_REQUEST,
    START_BROWSER,
    is_server_start,
    move_tools,
    start_server,
)
from toolcrew.orchestrator.adapters.inspect_users import OWN, give_workspace, read_as, run_as, write_as
from toolcrew.orchestrator.sessions.session import Session
from toolcrew.telemetry.logs import get_logger

log = get_logger(__name__)

WORKSPACE = "/workspace"


@sandboxenv(name="toolcrew")
class ToolcrewSandboxEnvironment(SandboxEnvironment):
    """Sandbox of one sample: a session of the pool that TOOLCREW_REDIS_URL names. Relative paths start at /workspace;
    processes run as uid 1000, or as any user if the configuration sets `user: root`.
    """

    def __init__(self, session: Session, default_user: str | None = None) -> None:
        """Use an open session. `default_user`: the user of programs and files for which the caller names no user."""
        super().__init__()
        self.session = session
        self._default_user = default_user
        self._has_browser = False

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
            chosen = load_config(config)
            environment = cls(await client_of_loop().open_session(chosen), chosen.default_user)
            if chosen.default_user is not None:
                await give_workspace(environment.session, await environment._user(None))
        except (ToolcrewError, SandboxUserUnsupportedError) as error:
            raise SandboxUnavailableError(f"toolcrew: no sandbox for this sample: {error}") from error
        return {"default": environment}

    @override
    @classmethod
    async def sample_cleanup(
        cls,
        task_name: str,
        config: SandboxEnvironmentConfigType | None,
        environments: dict[str, SandboxEnvironment],
        interrupted: bool,
    ) -> None:
        """Close the session, also after an interruption. Inspect would then normally keep the sandbox and print how to
        remove it, but the removal takes no longer than that.
        """
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
        ignored, because the pool limits the calls that run at the same time. The limit is what the session's class
        allows (600 s by default), even if no `timeout` is given.

        Raises the exceptions of SandboxEnvironment.exec, and OutputLimitExceededError above 4 MiB of a stream or
        Inspect's own limit if that is lower.
        """
        most_s = (await self.session.info()).timeout_s
        limit_s = min(timeout, most_s) if timeout is not None else most_s
        stdin = _as_bytes(input)
        if not await self._is_root():
            cmd, stdin = move_tools(cmd, stdin)
        own_user = await self._user(user)
        command = run_as(own_user, cmd)
        try:
            if is_server_start(cmd):
                return await start_server(self.session, own_user, cmd)
            if cmd == BROWSER_REQUEST and not self._has_browser:
                self._has_browser = (await start_server(self.session, own_user, START_BROWSER)).success
            done = await self.session.exec(
                command, stdin=stdin, env=env, cwd=_absolute_path(cwd or ""), timeout_s=limit_s
            )
        except ToolFailure as failure:
            return not_started(failure)
        except OperatorError as error:
            raise unavailable(error) from error
        if command != cmd and done.returncode == 126 and done.stderr == f"{cmd[0]}: Permission denied\n".encode():
            raise PermissionError(errno.EACCES, cmd[0])
        return judge(done, limit_s)

    async def _is_root(self) -> bool:
        return (await self.session.info()).options.user == "root"

    async def _user(self, user: str | None) -> str:
        """Return the user to change to. Raises SandboxUserUnsupportedError."""
        user = user or self._default_user
        if await self._is_root():
            return OWN if user in (None, "root", "0") else str(user)
        if user in (None, "1000"):
            return OWN
        raise SandboxUserUnsupportedError(
            f"this toolcrew sandbox runs all processes as uid 1000, not as {user!r}: omit the user, or set "
            "`user: root` in the sandbox's configuration"
        )

    @override
    async def write_file(self, file: str, contents: str | bytes) -> None:
        """Write a file and create its parent folders; atomically, unless the sandbox has root. Raises OSError(EFBIG)
        above 64 MiB.
        """
        path, content = _absolute_path(file), _as_bytes(contents)
        with file_errors(file):
            if await self._is_root():
                await write_as(self.session, await self._user(None), path, content)
            else:
                await self.session.write_file(path, content)

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
            with file_errors(file):
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
        if not await self._is_root():
            try:
                return await self.session.read_file(path)
            except ToolFailure as failure:
                if failure.code != ErrorCode.PATH_NOT_ALLOWED:
                    raise
        # The session's own calls read files only below /workspace, /tmp and /output, so a program in the sandbox reads
        # any other file.
        return await read_as(self.session, await self._user(None), path)

    @override
    async def connection(self, *, user: str | None = None) -> SandboxConnection:
        """Return a command that runs one program in the sandbox, which has no terminal. Raises ConnectionError when
        the session no longer exists.
        """
        listing = run_as(await self._user(user), ["ls", "-la", WORKSPACE])
        try:
            await (await client_of_loop().client()).session(self.session.id, tenant=self.session.tenant)
        except ToolcrewError as error:
            raise ConnectionError(
                f"the session {self.session.id} cannot be reached: {error}; see `toolcrew hosts list`"
            ) from error
        command = [
            "toolcrew",
            "sessions",
            "exec",
            "--tenant",
            self.session.tenant,
            self.session.id,
            *listing,
        ]
        return SandboxConnection(type="toolcrew", command=shlex.join(command))


def _absolute_path(path: str) -> str:
    return posixpath.join(WORKSPACE, path)


def _as_bytes(content: str | bytes | None) -> bytes:
    return content.encode() if isinstance(content, str) else content or b""
