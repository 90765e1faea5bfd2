"""Client of sandboxd: blocking, one connection, one request at a time.

Invariant: a request gets its own answer or an error, never the answer to another request. A connection that failed in
the middle of a request is therefore closed and never used again. An error says whether sandboxd may have executed the
request, because only a request that was certainly not executed may be repeated.

Threads and forked processes must not share a client.
"""

import contextlib
import io
import json
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from toolcrew.contract.errors import ErrorCode, SandboxUnavailable, ToolFailure
from toolcrew.contract.session_spec import EMPTY_SESSION, SessionSpec
from toolcrew.contract.tenancy import SandboxPolicy
from toolcrew.workers.sandboxd.frames import MAX_DOWN, Frame, FrameDecoder, FrameError, encode_frame

OPEN_TIMEOUT_S = 60.0
ARCHIVE_TIMEOUT_S = 540.0
"""Seconds that sandboxd may take for a checkpoint, including its packing and its store."""
CALL_GRACE_S = 15.0
"""Seconds after a call's limit in which sandboxd may still answer. sandboxd removes the container 2 s after the
limit; the engine may add time.
"""
_BODY_CHUNK = 512 * 1024


def sandbox_id(tenant: str, session: str) -> str:
    """Return the id under which sandboxd keeps a session's sandbox. Tenant and session come from a signed context."""
    return f"{tenant}:{session}"


class SandboxdUnreachable(SandboxUnavailable):
    """sandboxd cannot be reached, or the connection broke. `was_sent`: True if sandboxd may have executed the
    request.
    """

    def __init__(self, message: str, *, was_sent: bool) -> None:
        super().__init__(message)
        self.was_sent = was_sent


@dataclass(frozen=True)
class GuestResponse:
    """Unchecked response of the guest to a request: the `done` fields and the bytes of each stream."""

    done: Mapping[str, Any]
    streams: Mapping[str, bytes] = field(default_factory=dict)


class SandboxClient:
    """A connection of a worker to sandboxd.

    Methods raise SandboxUnavailable for failures of sandboxd, and ToolFailure for failures of the call.
    """

    def __init__(self, socket_path: Path | str) -> None:
        self._path = str(socket_path)
        self._sock: socket.socket | None = None
        self._decoder = FrameDecoder(MAX_DOWN)
        self._waiting: list[Frame] = []
        self._was_sent = False

    def open(
        self,
        tenant: str,
        session: str,
        spec: SessionSpec = EMPTY_SESSION,
        *,
        policy: SandboxPolicy | None = None,
        moved: Mapping[str, Any] | None = None,
    ) -> str:
        """Open a sandbox for the session. Return the sandbox's id. An open session keeps its sandbox and id."""
        name = sandbox_id(tenant, session)
        self.describe_open(name, spec, policy=policy, moved=moved)
        return name

    def describe_open(
        self,
        name: str,
        spec: SessionSpec,
        *,
        policy: SandboxPolicy | None = None,
        moved: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Open the sandbox with this id.

        Return its container id, generation, image, network, kind of workspace, options, and start time.

        - `spec`: the options of the session. An open session stays unchanged.
        - `policy`: the tenant's sandbox policy. None: the policy of the class `default`, or the present policy of an
          open session.
        - `moved`: a SessionMove as JSON, set when another host had the session.

        The first call of a moved session reports what was lost. Without `restore` the first call fails with this
        report. If this host still has the session under an older number, sandboxd closes it first.
        """
        fields = spec.host_arguments() | _build_policy_field(policy) | ({"moved": moved} if moved is not None else {})
        # sandboxd may have to pull the image first.
        is_short = spec.restore is None and spec.workspace is None and spec.image is None
        return self._request(
            {"verb": "open", "sandbox": name, **fields}, OPEN_TIMEOUT_S if is_short else ARCHIVE_TIMEOUT_S
        )

    def checkpoint(self, name: str, *, automatic: bool = False) -> dict[str, Any]:
        """Save the session's files and shell state. Return the checkpoint's id, size and sha256.

        `automatic`: no caller asked for the checkpoint. Such a checkpoint does not count towards the tenant's limit or
        as a use of the session, and is deleted after a week.
        """
        return self._request({"verb": "checkpoint", "sandbox": name, "automatic": automatic}, ARCHIVE_TIMEOUT_S)

    def save_files(self, name: str, file: str, names: str) -> dict[str, Any]:
        """Store files of the workspace as one archive. Return the size and sha256 of the archive.

        `file` is the id of the archive. `names` is a file in the sandbox with the names of the files, each with a NUL
        at its end.
        """
        return self._request({"verb": "save_files", "sandbox": name, "file": file, "names": names}, ARCHIVE_TIMEOUT_S)

    def fork(self, name: str, children: Sequence[str], *, leave_jobs: bool = False) -> dict[str, Any]:
        """Make sessions with the files and the shell of the session `name`. Return fields that describe their
        sandboxes: image, network, hosts, and the kind of workspace.

        With `leave_jobs`, background jobs continue in the session `name` only; otherwise the session must have none.
        """
        return self._request(
            {"verb": "fork", "sandbox": name, "children": list(children), "leave_jobs": leave_jobs}, ARCHIVE_TIMEOUT_S
        )

    def set_ttl(self, name: str, ttl_s: float) -> None:
        """Let the session of the sandbox `name` live for `ttl_s` seconds without a call from now on."""
        self._request({"verb": "ttl", "sandbox": name, "ttl_s": ttl_s}, OPEN_TIMEOUT_S)

    def delete_checkpoint(self, name: str, checkpoint: str) -> Mapping[str, Any]:
        """Delete a checkpoint of the tenant of the sandbox `name`. Return `deleted`, which is False when there is no
        checkpoint with that id.
        """
        answer = self._request({"verb": "delete_checkpoint", "sandbox": name, "checkpoint": checkpoint}, OPEN_TIMEOUT_S)
        return {"deleted": answer["deleted"]}

    def call(
        self,
        name: str,
        request: Mapping[str, Any],
        body: bytes = b"",
        *,
        call_id: str = "",
        on_data: Callable[[str, bytes], None] | None = None,
        policy: SandboxPolicy | None = None,
        run: str | None = None,
    ) -> GuestResponse:
        """Run one request of docs/guest-protocol.md in the sandbox.

        `on_data` receives pieces of streams as they arrive; without it the response contains them. `policy`: the
        tenant's present sandbox policy; None: unchanged. `run`: the run that the call belongs to.

        Raises ToolFailure with the guest's code, and SandboxUnavailable when the sandbox or sandboxd has ended.
        """
        timeout_s = float(request.get("timeout_s", 30.0)) + CALL_GRACE_S
        header = {
            "verb": "call",
            "sandbox": name,
            "call": call_id,
            "request": {**request, "body_bytes": len(body)},
            **_build_policy_field(policy),
            **({"run": run} if run is not None else {}),
        }
        # `streams` needs no limit here: sandboxd ends a sandbox that sends more than the request allows.
        gathered: dict[str, bytearray] = {}
        # Encode before the connection is used: arguments that are too large are a failure of the call, not of sandboxd.
        first = _encode_frame(header, body[:_BODY_CHUNK])
        with self._errors():
            sock = self._connect()
            sock.settimeout(timeout_s)
            # Set before the first byte: even a partial send may reach sandboxd.
            self._was_sent = True
            sock.sendall(first)
            for at in range(_BODY_CHUNK, len(body), _BODY_CHUNK):
                sock.sendall(_encode_frame({"verb": "data"}, body[at : at + _BODY_CHUNK]))
            # Start the time limit only now: sandboxd starts the limit of the call when it has the whole body.
            deadline = time.monotonic() + timeout_s
            while (frame := self._next(deadline)).header.get("ev") == "data":
                stream = str(frame.header.get("stream"))
                # While `on_data` waits, this connection is not read, and sandboxd stops reading from the guest.
                if on_data is not None:
                    on_data(stream, frame.body)
                else:
                    gathered.setdefault(stream, bytearray()).extend(frame.body)
        return GuestResponse(check_answer(frame.header), {stream: bytes(data) for stream, data in gathered.items()})

    def find_skill(self, name: str, digest: str, *, shared: bool) -> str | None:
        """Return the folder of a skill's bundle in every sandbox; None when sandboxd does not have the bundle yet
        (`place_skill`).

        With `shared` the bundle is for all tenants; otherwise it is only for the tenant of that session.
        """
        path = self._request({"verb": "skill", "sandbox": name, "digest": digest, "shared": shared}, 10.0)["place"]
        return None if path is None else str(path)

    def place_skill(self, name: str, digest: str, archive: IO[bytes], *, shared: bool) -> str:
        """Store the bundle with this digest so that sandboxes can read it. Return its folder in every sandbox.

        `archive` is a tar archive of the bundle's files, sorted by path.
        """
        header = {"verb": "skill", "sandbox": name, "digest": digest, "shared": shared}
        return str(check_answer(self._exchange(header, OPEN_TIMEOUT_S, archive).header)["place"])

    def cancel(self, name: str, call_id: str) -> bool:
        """Kill the processes of a call. Return False when the call is not running."""
        return bool(self._request({"verb": "cancel", "sandbox": name, "call": call_id}, 10.0)["cancelled"])

    def close(self, name: str, *, fence: int | None = None) -> bool:
        """Remove the sandbox, and wait until its container is removed. Return False when there was no sandbox.

        With `fence`, remove only a sandbox that was opened under this number of the session's opening.
        """
        only = {"fence": fence} if fence is not None else {}
        return bool(self._request({"verb": "close", "sandbox": name, **only}, OPEN_TIMEOUT_S)["closed"])

    def send_policy(self, tenant: str, policy: SandboxPolicy) -> int:
        """Replace the sandbox policy of a tenant for all of its sessions on this host. Return their number."""
        return int(self._request({"verb": "policy", "tenant": tenant, **_build_policy_field(policy)}, 10.0)["sessions"])

    def exchange_secrets(self, values: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        """Send the present secrets: tenant -> name -> value, hosts and place; None means that there is no such secret.
        They replace all earlier ones.

        Return `used`, the names that sessions may use, by tenant; and `uses`, the requests with secrets since the last
        exchange.
        """
        body = io.BytesIO(json.dumps(values).encode())
        answer = self._exchange({"verb": "secrets"}, 10.0, body)
        check_answer(answer.header)
        return dict(json.loads(answer.body))

    def status(self) -> dict[str, Any]:
        """Return the status of sandboxd.

        - `boot`, `store` (local or shared), engine, runtime and pool.
        - `sessions`, `sandboxes`: present numbers, with their limits in `max_sessions` and `max_sandboxes`.
        - `memory_free_bytes`, `disk_free_bytes`.
        - `classes`, `images`: the names that sessions may use. `largest`: the largest options that they may ask for.
        """
        return self._request({"verb": "status"}, 10.0)

    def sessions(self) -> list[dict[str, Any]]:
        """Return a row for each session.

        - `name`: `<tenant>:<session>`.
        - `generation`, `fence`, `image`, `container`, `state`, `lost`.
        - `calls`: number of running calls. `jobs`: number of background jobs.
        - `idle_s`, `ttl_s`: seconds without a call, and the session's time to live.
        - `changed`: the files may differ from the last checkpoint.
        - `checkpoint`: the last checkpoint that this sandboxd made.
        """
        return self._list("sessions")

    def usage(self) -> list[dict[str, Any]]:
        """Return the totals of each session, also of sessions that have ended in the last minute: the fields of a
        SessionUsage, and `name`, which is `<tenant>:<session>:<meter>`.
        """
        return self._list("usage")

    def _list(self, verb: str) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = []
        after: str | None = ""
        while after is not None:
            page = self._exchange({"verb": verb, "after": after}, 10.0)
            after = check_answer(page.header)["next"]
            rows += json.loads(page.body)
        return rows

    def disconnect(self) -> None:
        """Close the connection. The next request opens a new one."""
        # sandboxd cancels the call of a connection that ends. Half a frame of the old connection must not reach the new
        # one.
        if self._sock is not None:
            self._sock.close()
        self._sock = None
        self._decoder = FrameDecoder(MAX_DOWN)
        self._waiting = []

    def __enter__(self) -> "SandboxClient":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.disconnect()

    def _request(self, header: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        return check_answer(self._exchange(header, timeout_s).header)

    def _exchange(self, header: Mapping[str, Any], timeout_s: float, body: IO[bytes] | None = None) -> Frame:
        first = b""
        if body is not None:
            header = {**header, "body_bytes": body.seek(0, io.SEEK_END)}
            body.seek(0)
            first = body.read(_BODY_CHUNK)
        with self._errors():
            sock = self._connect()
            sock.settimeout(timeout_s)
            self._was_sent = True
            sock.sendall(_encode_frame(header, first))
            while body is not None and (data := body.read(_BODY_CHUNK)):
                sock.sendall(_encode_frame({"verb": "data"}, data))
            return self._next(time.monotonic() + timeout_s)

    def _connect(self) -> socket.socket:
        # An unread frame belongs to an earlier request. The next request would take the frame for its own answer.
        if self._sock is not None and (self._waiting or not _is_quiet(self._sock)):
            self.disconnect()
        if self._sock is None:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                sock.settimeout(5.0)
                sock.connect(self._path)
            except OSError:
                sock.close()
                raise
            self._sock = sock
        return self._sock

    def _next(self, deadline: float) -> Frame:
        assert self._sock is not None
        while not self._waiting:
            # One deadline for all frames together: with a limit for each frame, a guest that prints slowly could run
            # forever.
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                raise TimeoutError("no answer in time")
            self._sock.settimeout(remaining_s)
            data = self._sock.recv(256 * 1024)
            if not data:
                raise ConnectionError("sandboxd closed the connection")
            self._waiting.extend(self._decoder.feed(data))
        return self._waiting.pop(0)

    @contextlib.contextmanager
    def _errors(self) -> Any:
        """Turn errors of the connection into SandboxdUnreachable, and close a connection that failed in the middle of
        a request.
        """
        self._was_sent = False
        try:
            yield
        except TimeoutError as error:
            self.disconnect()
            raise SandboxdUnreachable(
                f"sandboxd at {self._path} did not answer in time: the host is busy, or the session is still being "
                f"restored. Try again, and check sandboxd's log if it repeats",
                was_sent=self._was_sent,
            ) from error
        except (OSError, FrameError) as error:
            self.disconnect()
            raise SandboxdUnreachable(
                f"sandboxd does not answer at {self._path} ({error}): start it, or read its log",
                was_sent=self._was_sent,
            ) from error
        except BaseException:
            # After an interrupt or an error in `on_data`, the rest of the answer would still arrive: close the
            # connection.
            self.disconnect()
            raise


def _build_policy_field(policy: SandboxPolicy | None) -> dict[str, Any]:
    """Return the request field that contains the policy."""
    return {"policy": policy.model_dump(mode="json", exclude_none=True)} if policy is not None else {}


def _is_quiet(sock: socket.socket) -> bool:
    """Return whether a kept connection is open and has nothing to read.

    After a restart of sandboxd this check finds the closed connection before a request is sent.
    """
    try:
        sock.settimeout(0.0)
        sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False  # The connection has ended, or has an answer that no request expects.


def _encode_frame(header: Mapping[str, Any], body: bytes) -> bytes:
    """Encode a request. Raises ToolFailure: the arguments, the environment or a path are too large for a frame."""
    try:
        return encode_frame(header, body, max_total=MAX_DOWN)
    except FrameError as error:
        message = f"the call's arguments are too large ({error}): put them into a file and give its name"
        raise ToolFailure(ErrorCode.INVALID_ARGUMENTS, message) from error


def check_answer(header: Mapping[str, Any]) -> dict[str, Any]:
    """Return the answer. Raises the failure that the answer contains."""
    if header.get("ok") is not True:
        code, message = str(header.get("code")), str(header.get("message"))
        # A sandboxd that is shutting down refuses a request before any work, so a retry is safe.
        if header.get("is_ending") is True:
            raise SandboxdUnreachable(message, was_sent=False)
        if code == ErrorCode.SANDBOX_UNAVAILABLE.value:
            raise SandboxUnavailable(message)
        raise ToolFailure(_code(code), message)
    return dict(header)


def _code(text: str) -> ErrorCode:
    try:
        return ErrorCode(text)
    except ValueError:
        return ErrorCode.INTERNAL
