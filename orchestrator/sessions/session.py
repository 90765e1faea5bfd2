"""Session of calls that share one sandbox and workspace, from opening to closing.

Invariant: a session that this process opened is closed by it, or expires. Every path out of an opening, an import, a
fork or a `with` block orders the close, also after an error or a cancellation. These orders run in `asyncio.shield`,
because a second cancellation must not leave a sandbox that no process closes before its time to live.
"""

import asyncio
import contextlib
import os
import secrets
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from toolcrew.archives.folders import pack_folder, unpack_archive
from toolcrew.concurrency.read_memory import Reservation, read_memory
from toolcrew.contract.call_events import OUTPUT
from toolcrew.contract.calls import MAX_TIMEOUT_S, ExecResult, Record, SandboxInfo, ToolCall, ToolResult
from toolcrew.contract.errors import (
    OPERATOR_CODES,
    BrokerFull,
    BrokerUnavailable,
    ErrorCode,
    OperatorError,
    SandboxUnavailable,
    ToolFailure,
)
from toolcrew.contract.file_ids import is_stored
from toolcrew.contract.invalid_input import find_invalid
from toolcrew.contract.names import host_of
from toolcrew.contract.own_programs import own_program
from toolcrew.contract.session_locations import MAX_FORKS
from toolcrew.contract.session_spec import DEFAULT_OPTIONS, MAX_TTL_S, PreviewAccess, SandboxOptions, SessionSpec
from toolcrew.contract.session_views import Checkpoint
from toolcrew.contract.specs import NO_NETWORK, ToolSpec
from toolcrew.contract.tenancy import largest_limit
from toolcrew.orchestrator.dispatch.call_event_listener import OnOutput, output_handler
from toolcrew.orchestrator.dispatch.dispatcher import ARCHIVE_TIMEOUT_S, OPEN_TIMEOUT_S, Dispatcher
from toolcrew.orchestrator.dispatch.request import Request, build_cancel, derive_call_id, with_digest
from toolcrew.orchestrator.dispatch.session_locator import new_session_name
from toolcrew.orchestrator.sessions.workspace_files import (
    WorkspaceListing,
    build_list_command,
    load_source,
    parse_listing,
)
from toolcrew.store.api_keys import Credential
from toolcrew.store.blobs import Blobs

COPY_TIMEOUT_S = 120.0
EXEC_COPIES = 5
"""Copies of a program's output that an answer in JSON takes: as Redis has it, the streams, in base64, as text and as
bytes of JSON.
"""
CANCEL_WAIT_S = 5.0


class SessionInfo(Record):
    """Location and properties of a session. `network`: none, or egress, which reaches only `hosts`. `previews`: who
    may use previews of its ports. `workspace`: the kind of its storage: image, tmpfs or folder (docs/sessions.md).
    `options`: sizes and user of the sandbox. `timeout_s`: the largest limit of a call.
    """

    session: str
    tenant: str
    host: str
    queue: str
    image: str
    sandbox: SandboxInfo | None
    start_s: float
    network: str = "none"
    hosts: tuple[str, ...] = ()
    previews: PreviewAccess = "none"
    workspace: str = ""
    options: SandboxOptions = DEFAULT_OPTIONS
    timeout_s: float = MAX_TIMEOUT_S

    def describe_network(self) -> str:
        """Return the description of this session's network for tool descriptions."""
        if self.network == "none":
            return NO_NETWORK
        return (
            "whose only network is HTTP and HTTPS through a proxy (already set up in the environment) to "
            f"{', '.join(self.hosts) or 'no host'}"
        )

    def describe_tool(self, spec: ToolSpec) -> ToolSpec:
        """Return the tool with the network and the largest limit of this session in its description."""
        return spec.with_network(self.describe_network()).with_limit(largest_limit(spec, self.timeout_s))


_PROGRAM_CODES = (ErrorCode.TIMEOUT, ErrorCode.INTERNAL)


class SandboxProgramFailed(ToolFailure):
    """Raised when a program that ran in a working sandbox has failed or has not ended in time. Programs of the session
    can cause this, for example by replacing `tar`.
    """


class Session:
    """Handle of an open session, which is a sandbox with its files. `call` never raises an exception when a tool fails.
    Methods that return or change files raise ToolFailure or SandboxUnavailable.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        blobs: Blobs,
        tenant: str,
        info: SessionInfo,
        credential: Credential | None = None,
        *,
        is_guest: bool = False,
    ) -> None:
        """Create a handle of an open session. `is_guest`: another process has opened the session, so the end of a
        `with` block leaves the session open.
        """
        self._credential = credential
        self._is_guest = is_guest
        self._dispatcher = dispatcher
        self._blobs = blobs
        self._info = info
        self.id = info.session
        self.tenant = tenant
        self._closed = False

    @classmethod
    async def open(
        cls,
        dispatcher: Dispatcher,
        blobs: Blobs,
        *,
        tenant: str,
        spec: SessionSpec,
        credential: Credential | None = None,
        name: str | None = None,
    ) -> "Session":
        """Open a session with a new sandbox. If `spec.workspace` is a path of this machine, its files are copied to
        /workspace. `name`: the session's id, from new_session_name.

        Raises ConfigError for a workspace that is not a supported source, SandboxUnavailable, ToolFailure.
        """
        if spec.fork is not None:
            parent = await cls.attach(dispatcher, blobs, tenant=tenant, session=spec.fork, credential=credential)
            return (await parent.fork_as([name or new_session_name()]))[0]
        source = None
        if spec.workspace is not None and not is_stored(spec.workspace):
            source = await asyncio.to_thread(load_source, Path(spec.workspace))
            spec = spec.model_copy(update={"workspace": None})
        name = name or new_session_name()
        # Open the session in a separate task. A cancellation of this task must not stop the opening after a host has
        # created the sandbox and before this process knows it.
        opening = asyncio.ensure_future(dispatcher.open_session(tenant, name, spec))
        try:
            result = _require_success(await asyncio.shield(opening))
        except asyncio.CancelledError:
            # A host may be creating the sandbox. Wait for it and close it, or it would live until it expires.
            await asyncio.shield(_close_when_open(dispatcher, tenant, name, opening))
            raise
        session = cls(dispatcher, blobs, tenant, _info(name, tenant, result.metadata, result.sandbox), credential)
        if source is not None:
            try:
                await session._call_verb(
                    "import", {"kind": source.kind}, content=source.content, timeout_s=COPY_TIMEOUT_S
                )
            except BaseException:
                # The caller gets the first error. A host that failed the import often fails the close too, and the
                # session then expires.
                with contextlib.suppress(OperatorError, ToolFailure):
                    await asyncio.shield(session.close())
                raise
        return session

    @classmethod
    async def attach(
        cls,
        dispatcher: Dispatcher,
        blobs: Blobs,
        *,
        tenant: str,
        session: str,
        credential: Credential | None = None,
        is_guest: bool = True,
    ) -> "Session":
        """Return a handle of an open session of the tenant, no matter which process opened the session. The end of a
        `with` block leaves the session open (`is_guest`); `close` closes it.

        Raises ToolFailure(SESSION_NOT_FOUND), BrokerUnavailable, SandboxUnavailable. The failure is the same for a
        session that never existed, is closed, or belongs to another tenant.
        """
        location = await dispatcher.locator.location(tenant, session)
        facts = await dispatcher.locator.facts(tenant, session)
        if facts is None:
            # The facts have expired. The host reports the same facts again.
            call = ToolCall(
                id=_call_id(),
                name="session.open",
                arguments=(await dispatcher.locator.start(tenant, session)).host_arguments(),
            )
            request = Request(call, tenant, session, timeout_s=OPEN_TIMEOUT_S, audience="session")
            facts = dict(_require_success(await dispatcher.dispatch(request)).metadata)
        location_fields = {"queue": location.queue, "host": host_of(location.queue)} if location.queue else {}
        info = _info(session, tenant, {**facts, **location_fields})
        return cls(dispatcher, blobs, tenant, info, credential, is_guest=is_guest)

    async def call(
        self,
        name: str,
        arguments: Mapping[str, Any],
        *,
        timeout_s: float | None = None,
        call_id: str | None = None,
        on_output: OnOutput | None = None,
    ) -> ToolResult:
        """Run a tool once and return its result, also when the call fails.

        A call with a `call_id` runs once. The same call with the same `call_id` waits for it or returns its result,
        which is stored for an hour (RESULT_EXPIRED after that); the id is free again after a day. Such a call goes on
        when its caller stops waiting; `ToolClient.kill_call` ends it.

        `on_output` gets pieces of output (stream, text) while the tool runs, if the tool streams output. The last
        piece comes before the result, which has the whole output. A slow `on_output` delays the call, for 10 s at
        most. The result's metadata counts the characters that `on_output` did not get.
        """
        call = build_call(name, arguments, call_id)
        if isinstance(call, ToolResult):
            # A model chose name and arguments. It gets a result that it can read, not an exception.
            return call
        request = Request(call, self.tenant, self.id, timeout_s=timeout_s)
        return await self.send(with_digest(request) if call_id is not None else request, on_output)

    async def send(self, request: Request, on_output: OnOutput | None = None) -> ToolResult:
        """Send a complete request of this session, and return its result as `call` does."""
        if on_output is not None:
            request = replace(request, handlers={**request.handlers, OUTPUT: output_handler(on_output)})
        try:
            await self._check_credential()
        except (ToolFailure, OperatorError) as error:
            return ToolResult.failed(request.call, error.code, str(error))
        try:
            result = await self._dispatcher.dispatch(request)
            if result.sandbox is not None:
                self._info = self._info.model_copy(update={"sandbox": result.sandbox})
            return result
        except asyncio.CancelledError:
            # With `keeps_result` another process continues the run and reads the result, so the call must go on.
            # Otherwise the order goes past the host's queue. For a call that is still on its way, it forbids the start.
            if not request.keeps_result:
                await asyncio.shield(self._send_order(build_cancel(request.call.id)))
            raise

    async def exec(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        timeout_s: float = 30,
        key: str | None = None,
        on_output: OnOutput | None = None,
    ) -> ExecResult:
        """Run a program without a shell. At the limit the program gets SIGTERM, and a moment later SIGKILL. Then `kill`
        is set, and `returncode` is -15, -9, or the exit code that the program chose after SIGTERM. `on_output` works as
        in `call`, but receives only the first 1 MiB; the result has all output.

        With a `key` the program runs once in this session, as a call with a `call_id` does. Its output is kept for 10
        minutes, and output of more than 1 MiB for 20 s.

        Raises ToolFailure when the program cannot be started, SandboxUnavailable when the sandbox was lost.
        """
        arguments = _build_exec_arguments(argv, env, cwd)
        call_id = derive_call_id("exec", self.id, key) if key is not None else None
        result = await self._call_verb(
            "exec", arguments, content=stdin, timeout_s=timeout_s, on_output=on_output, call_id=call_id
        )
        return _build_exec_result(result, await self._content(result, keeps=call_id is not None))

    @contextlib.asynccontextmanager
    async def hold_exec(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes,
        env: Mapping[str, str],
        cwd: str | None,
        timeout_s: float,
        call_id: str | None = None,
    ) -> AsyncIterator[tuple[ExecResult, Reservation]]:
        """Yield the result that `exec` returns, and memory of EXEC_COPIES times its output that is reserved during the
        block. The same `call_id` runs once, as in `call`. Raises ToolFailure(OUTCOME_UNKNOWN) when there is no memory.
        """
        arguments = _build_exec_arguments(argv, env, cwd)
        result = await self._call_verb("exec", arguments, content=stdin, timeout_s=timeout_s, call_id=call_id)
        async with contextlib.AsyncExitStack() as stack:
            try:
                held = self._hold(result, EXEC_COPIES, keeps=call_id is not None)
                pieces, memory = await stack.enter_async_context(held)
            except ToolFailure as failure:
                if failure.code is not ErrorCode.RATE_LIMITED:
                    raise
                # The code would tell the client that nothing has happened and that it can send the request again.
                raise ToolFailure(
                    ErrorCode.OUTCOME_UNKNOWN,
                    "the program has ended, but its output was lost, because other requests use the memory for "
                    "answers: check its effects before you repeat it",
                ) from failure
            yield _build_exec_result(result, _join(pieces)), memory

    async def write_file(self, path: str, data: bytes) -> None:
        """Write a whole file atomically, and create missing folders. Limit: 64 MiB."""
        await self._call_verb("write_file", {"path": path}, content=data, timeout_s=COPY_TIMEOUT_S)

    async def read_file(self, path: str) -> bytes:
        """Return the content of a file. Limit: 64 MiB. Raises ToolFailure(FILE_NOT_FOUND, FILE_TOO_LARGE, ...)."""
        return await self._content(await self._call_verb("read_file", {"path": path}, timeout_s=COPY_TIMEOUT_S))

    @contextlib.asynccontextmanager
    async def hold_file(self, path: str) -> AsyncIterator[tuple[deque[bytes], Reservation]]:
        """Yield the content of a file as `read_file` returns it, in pieces, and the memory that is reserved for it
        during the block. Raises also the errors of `ReadMemory.reserve`.
        """
        result = await self._call_verb("read_file", {"path": path}, timeout_s=COPY_TIMEOUT_S)
        async with self._hold(result) as held:
            yield held

    @contextlib.asynccontextmanager
    async def hold_archive(self, path: str) -> AsyncIterator[tuple[deque[bytes], Reservation]]:
        """Yield a tar archive of a folder of the sandbox, like `hold_file`. Its content is hostile."""
        result = await self._call_verb("export", {"path": path}, timeout_s=COPY_TIMEOUT_S)
        async with self._hold(result) as held:
            yield held

    @contextlib.asynccontextmanager
    async def _hold(
        self, result: ToolResult, copies: int = 1, *, keeps: bool = False
    ) -> AsyncIterator[tuple[deque[bytes], Reservation]]:
        async with contextlib.AsyncExitStack() as stack:
            if result.blob:
                yield await stack.enter_async_context(self._blobs.hold(self.tenant, result.blob, copies, keeps=keeps))
            else:
                yield deque(), await stack.enter_async_context(read_memory().reserve(self.tenant, 0))

    async def export(self, folder: Path | str, path: str = "/workspace") -> list[str]:
        """Copy a folder of the sandbox into a local folder, which is created. Return the names of entries that were
        skipped: links that leave the folder, and special files.
        """
        data = await self._content(await self._call_verb("export", {"path": path}, timeout_s=COPY_TIMEOUT_S))
        return await asyncio.to_thread(unpack_archive, data, Path(folder))

    async def export_files(self, paths: Sequence[str], folder: str = "/workspace") -> bytes:
        """Return a tar archive of files and links below a folder. The archive comes from the sandbox, so do not trust
        its content.

        Raises ToolFailure(FILE_NOT_FOUND) when a file cannot be packed, ToolFailure(FILE_TOO_LARGE) above 64 MiB.
        """
        names = b"".join(os.fsencode(path) + b"\0" for path in paths)
        return await self._content(
            await self._call_verb("export", {"path": folder}, content=names, timeout_s=COPY_TIMEOUT_S)
        )

    async def set_ttl(self, seconds: float) -> None:
        """Let the session live for `seconds` without a call from now on, at most MAX_TTL_S. Raises ToolFailure,
        SandboxUnavailable. After an error, the present host may still use the earlier value.
        """
        if not 0 < seconds <= MAX_TTL_S:
            message = f"a session lives up to {MAX_TTL_S:g} s without a call, not {seconds:g} s: give a time up to that"
            raise ToolFailure(ErrorCode.INVALID_ARGUMENTS, message)
        location = await self._dispatcher.locator.set_ttl(self.tenant, self.id, float(seconds))
        applied: tuple[float, int] | None = None
        # The location decides. The session may move, or another caller may change it, while the host applies it.
        while applied != (location.ttl_s, location.fence):
            applied = (location.ttl_s, location.fence)
            await self._call_verb("set_ttl", {"ttl_s": location.ttl_s}, timeout_s=OPEN_TIMEOUT_S)
            location = await self._dispatcher.locator.location(self.tenant, self.id)

    async def end_jobs(self) -> None:
        """End the background jobs. No process of earlier calls runs afterwards."""
        await self._call_verb("end_jobs", {}, timeout_s=COPY_TIMEOUT_S)

    async def import_archive(self, archive: bytes, path: str) -> None:
        """Unpack a tar archive into a folder of the sandbox, which is created. Raises ToolFailure when that fails."""
        # `--`: a path that begins with `-` is no option.
        created = await self.exec(own_program("mkdir", "-p", "--", path))
        if created.returncode != 0:
            error = created.stderr.decode(errors="replace").strip()[-500:]
            raise ToolFailure(
                ErrorCode.NOT_A_DIRECTORY, f"{path} cannot be created in the sandbox ({error}): use another folder"
            )
        await self._call_verb("import", {"kind": "tar", "path": path}, content=archive, timeout_s=COPY_TIMEOUT_S)

    async def import_folder(self, folder: Path | str, path: str = "/workspace") -> None:
        """Copy the content of a local folder into a folder of the sandbox, which is created. Limit: 64 MiB. Raises
        ConfigError when the path is not a folder or is too large. Raises ToolFailure when the sandbox folder cannot
        be created.
        """
        await self.import_archive(await asyncio.to_thread(pack_folder, Path(folder)), path)

    async def list_files(self, *, only_others: bool = False) -> WorkspaceListing:
        """List the files of /workspace, or (`only_others`) links to files and what is no file. Raises ToolFailure when
        there are too many for one result, or a folder cannot be read.
        """
        result = await self.exec(build_list_command("/workspace", only_others), cwd="/", timeout_s=COPY_TIMEOUT_S)
        if result.timed_out or result.truncated:
            raise ToolFailure(
                ErrorCode.FILE_TOO_LARGE,
                "the workspace has too many files for one list: delete files that you do not need",
            )
        if result.returncode != 0:
            error = result.stderr.decode(errors="replace").strip()[-500:]
            raise ToolFailure(
                ErrorCode.PERMISSION_DENIED,
                f"the files of the workspace cannot be listed: {error}; make its folders readable",
            )
        return parse_listing(result.stdout)

    async def save_files(self, file: str, paths: Sequence[str]) -> None:
        """Store files of /workspace in the store as the archive `file` of the session's tenant.

        Raises ToolFailure(FILE_TOO_LARGE) beyond the operator's limit, SandboxUnavailable.
        """
        # Pass the names in a file, because the list can be longer than the arguments of a call. The file is in /output,
        # so that it does not become an artifact itself.
        names = f"/output/.files-{secrets.token_hex(8)}"
        listed = b"".join(os.fsencode(path) + b"\0" for path in paths)
        program = own_program("bash", "-c", 'cat > "$1"', "list", names)
        written = await self.exec(program, stdin=listed, timeout_s=COPY_TIMEOUT_S)
        if written.returncode != 0:
            raise ToolFailure(
                ErrorCode.NO_SPACE,
                "the session has no space for the list of its artifacts: delete files that you do not need",
            )
        await self._call_verb("save_files", {"file": file, "names": names}, timeout_s=ARCHIVE_TIMEOUT_S)

    async def checkpoint(self) -> Checkpoint:
        """Store the current files, long outputs and shell state. Other calls may run at the same time. The checkpoint
        outlives the session.

        Raises ToolFailure(FILE_TOO_LARGE), ToolFailure(NO_SPACE) when the tenant has too many checkpoints,
        SandboxUnavailable.
        """
        metadata = (await self._call_verb("checkpoint", {}, timeout_s=ARCHIVE_TIMEOUT_S)).metadata
        return Checkpoint(
            id=str(metadata["checkpoint"]),
            bytes=int(str(metadata["bytes"])),
            sha256=str(metadata["sha256"]),
            skipped=int(str(metadata["skipped"])),
            files_changed=metadata["torn"] is True,
        )

    async def fork(self, n: int = 1, *, leave_jobs: bool = False) -> list["Session"]:
        """Return `n` new sessions with the files, the shell state and the limits of this one, which continues. A new
        session gets its sandbox at its first call. `leave_jobs`: background jobs continue in this session only.

        Raises ToolFailure: SESSION_BUSY while a call or a background job runs, QUOTA_EXCEEDED, NO_SPACE. Raises
        SandboxUnavailable. After an error no new session exists.
        """
        if not 1 <= n <= MAX_FORKS:
            message = f"one request makes 1 to {MAX_FORKS} forks, not {n}: request a number in this range"
            raise ToolFailure(ErrorCode.INVALID_ARGUMENTS, message)
        return await self.fork_as([new_session_name() for _ in range(n)], leave_jobs=leave_jobs)

    async def fork_as(self, names: Sequence[str], *, leave_jobs: bool = False) -> list["Session"]:
        """Fork the session like `fork`. `names`: the ids of the new sessions, from new_session_name."""
        try:
            facts = (
                await self._call_verb(
                    "fork", {"children": list(names), "leave_jobs": leave_jobs}, timeout_s=ARCHIVE_TIMEOUT_S
                )
            ).metadata
            await self._dispatcher.add_forks(self.tenant, self.id, names, facts)
        except BaseException:
            # The host may have made the forks although its reply was lost. It closes sessions without a location at its
            # next check.
            with contextlib.suppress(BrokerUnavailable):
                await asyncio.shield(self._dispatcher.forget_sessions(self.tenant, names))
            raise
        return [
            Session(self._dispatcher, self._blobs, self.tenant, _info(name, self.tenant, facts), self._credential)
            for name in names
        ]

    async def info(self) -> SessionInfo:
        """Return the session's location, as its last call found it."""
        queue = self._dispatcher.session_queue(self.tenant, self.id)
        if queue is not None and queue != self._info.queue:
            self._info = self._info.model_copy(update={"queue": queue, "host": host_of(queue)})
        return self._info

    async def close(self) -> None:
        """Remove the sandbox and return when its container is removed. A second call does nothing, unless the first
        failed.
        """
        if not self._closed:
            # Set this before the first await, so that a second close at the same time does not send a second order.
            self._closed = True
            try:
                _require_success(await self._dispatcher.close_session(self.tenant, self.id))
            except BaseException:
                self._closed = False
                raise

    async def __aenter__(self) -> "Session":
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._is_guest:
            return
        # The shield makes a cancelled program still remove its sandbox; the order to close it then does not wait in the
        # host's queue.
        urgent = kind is not None and issubclass(kind, asyncio.CancelledError)
        await asyncio.shield(self._abandon() if urgent else self.close())

    async def _abandon(self) -> None:
        """Order the removal of the sandbox without waiting in its host's queue. Then confirm the removal, if the host
        answers soon.
        """
        if self._closed:
            return
        # The order goes out first: the wait below may be too short for a busy host, and is then given up.
        await self._send_order(ToolCall(id=_call_id(), name="session.close"))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CANCEL_WAIT_S):
                await self.close()

    async def _check_credential(self) -> None:
        """Check the key again. A revoked key is refused in open sessions too."""
        if self._credential is not None:
            await self._credential.check(self.tenant)

    async def _send_order(self, order: ToolCall) -> None:
        """Send an order to the host. If Redis does not answer, the call runs until its limit, and the sandbox until
        it expires.
        """
        with contextlib.suppress(BrokerUnavailable):
            await self._dispatcher.send_order(order, self.tenant, self.id)

    async def _call_verb(
        self,
        name: str,
        arguments: dict[str, Any],
        *,
        content: bytes = b"",
        timeout_s: float,
        on_output: OnOutput | None = None,
        call_id: str | None = None,
    ) -> ToolResult:
        # An envelope carries 1 MiB, and the content may have 64 MiB.
        blob = await self._blobs.leave(self.tenant, content) if content else None
        call = ToolCall(id=call_id or _call_id(), name=f"session.{name}", arguments=arguments)
        request = Request(call, self.tenant, self.id, timeout_s=timeout_s, blob=blob, audience="session")
        try:
            result = await self.send(with_digest(request) if call_id is not None else request, on_output)
        except asyncio.CancelledError:
            if call_id is not None:
                blob = None  # the call goes on and reads its content, which expires by itself
            raise
        finally:
            # Deleted only after the last attempt, because a lost attempt is sent again with the same blob.
            if blob is not None:
                await self._blobs.drop(blob)
        return _require_success(result)

    async def _content(self, result: ToolResult, *, keeps: bool = False) -> bytes:
        return await self._blobs.take(self.tenant, result.blob, keeps=keeps) if result.blob else b""


async def delete_checkpoint(dispatcher: Dispatcher, tenant: str, checkpoint: str) -> bool:
    """Delete a tenant's checkpoint through any host. Return False when the tenant has no checkpoint of that id.
    Raises SandboxUnavailable, ToolFailure.
    """
    call = ToolCall(id=_call_id(), name="session.delete_checkpoint", arguments={"checkpoint": checkpoint})
    # The call must name a session, but the session need not exist. This one is never opened.
    session, queue = new_session_name(), await dispatcher.any_queue(tenant)
    request = Request(call, tenant, session, queue, timeout_s=OPEN_TIMEOUT_S, audience="session")
    return _require_success(await dispatcher.dispatch(request)).metadata["deleted"] is True


def _info(name: str, tenant: str, facts: Mapping[str, Any], sandbox: SandboxInfo | None = None) -> SessionInfo:
    """Return the properties of a session that its host reports in the metadata of a result."""
    fields = {field: facts[field] for field in SessionInfo.model_fields.keys() & facts.keys()}
    return SessionInfo.model_validate({**fields, "session": name, "tenant": tenant, "sandbox": sandbox})


async def _close_when_open(
    dispatcher: Dispatcher, tenant: str, name: str, opening: "asyncio.Future[ToolResult]"
) -> None:
    if (await opening).success:
        with contextlib.suppress(BrokerUnavailable):
            await dispatcher.abandon_session(tenant, name)


def _build_exec_arguments(argv: Sequence[str], env: Mapping[str, str] | None, cwd: str | None) -> dict[str, Any]:
    return {"argv": list(argv), "env": dict(env or {})} | ({"cwd": cwd} if cwd else {})


def _join(pieces: deque[bytes]) -> bytes:
    """Return the pieces as one, and remove them from memory."""
    data = b"".join(pieces)
    pieces.clear()
    return data


def _build_exec_result(result: ToolResult, data: bytes) -> ExecResult:
    # A result has only one blob, so the blob contains both streams, stdout first.
    cut = int(str(result.metadata["stdout_bytes"]))
    return ExecResult(
        returncode=int(str(result.metadata["returncode"])),
        stdout=data[:cut],
        stderr=data[cut:],
        truncated=result.truncated,
        timed_out=result.metadata.get("timed_out") is True,
        cancelled=result.metadata.get("cancelled") is True,
        clocks=result.clocks,
        kill=result.kill,
        usage=result.usage,
    )


def _require_success(result: ToolResult) -> ToolResult:
    """Return the result if the call has succeeded; otherwise raise ToolFailure or OperatorError with the code of the
    result.
    """
    if result.success:
        return result
    code, sentence = result.error_code or ErrorCode.INTERNAL, result.error or "failed"
    if code in _PROGRAM_CODES and result.sandbox is not None and result.clocks.run_s:
        raise SandboxProgramFailed(code, sentence)
    if code not in OPERATOR_CODES:
        raise ToolFailure(code, sentence)
    error = {
        ErrorCode.SANDBOX_UNAVAILABLE: SandboxUnavailable,
        ErrorCode.BROKER_UNAVAILABLE: BrokerUnavailable,
        ErrorCode.BROKER_FULL: BrokerFull,
    }.get(code, OperatorError)(sentence)
    error.code = code
    raise error


def build_call(name: str, arguments: Mapping[str, Any], call_id: str | None = None) -> ToolCall | ToolResult:
    """Return the call, or a result that refuses it: no tool can have this name, or the id or the arguments cannot be
    sent.
    """
    try:
        return ToolCall(id=call_id or _call_id(), name=name, arguments=dict(arguments))
    except ValidationError as error:
        part = find_invalid(error)
    # A result names its call, and the refused name may not be a valid one.
    stand_in = ToolCall(id=_call_id(), name=name[:128] or "unknown")
    if part.path[0] == "name":
        return ToolResult.failed(stand_in, ErrorCode.TOOL_NOT_FOUND, f"Tool not found: {name[:200]}")
    return ToolResult.failed(stand_in, ErrorCode.INVALID_ARGUMENTS, f"{part}; correct the call")


def _call_id() -> str:
    return secrets.token_hex(16)
