"""Talks to sandboxd: blocking, one connection, one request at a time. Not to be shared between threads or over a fork.

Also checks a guest's answer: its `done` is hostile until it has the shape of docs/guest-protocol.md.
"""

import contextlib
import io
import json
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from contract.calls import KillReport, SandboxInfo
from contract.errors import ErrorCode, SandboxUnavailable, ToolFailure
from contract.tenancy import SandboxTerms
from workers.sandboxd.frames import MAX_DOWN, Frame, FrameDecoder, FrameError, encode_frame

OPEN_TIMEOUT_S = 60.0
ARCHIVE_TIMEOUT_S = 540.0
"""How long sandboxd may take over a checkpoint: packing or unpacking it, and its store."""
CALL_GRACE_S = 15.0
"""How long after a call's limit sandboxd may still answer: it removes the container 2 s after the limit, bounded by the
engine.
"""
_BODY_CHUNK = 512 * 1024


def sandbox_id(tenant: str, session: str) -> str:
    """The id under which sandboxd keeps a session's sandbox. Tenant and session come from a signed context."""
    return f"{tenant}:{session}"


class SandboxdUnreachable(SandboxUnavailable):
    """sandboxd cannot be reached, or went away. `was_sent`: the request may have been carried out."""

    def __init__(self, message: str, *, was_sent: bool) -> None:
        super().__init__(message)
        self.was_sent = was_sent


@dataclass(frozen=True)
class GuestResponse:
    """What a request to the guest gave: its `done` fields and the bytes of each stream."""

    done: Mapping[str, Any]
    streams: Mapping[str, bytes] = field(default_factory=dict)


class SandboxClient:
    """A worker's way to sandboxd. Every failure of sandboxd itself is SandboxUnavailable; the model's are
    ToolFailure.
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
        image: str | None = None,
        *,
        ttl_s: float = 1800.0,
        restore: str | None = None,
        network: str | None = None,
        terms: SandboxTerms | None = None,
        moved: Mapping[str, Any] | None = None,
    ) -> str:
        """A sandbox for the session; gives its id. Opening an open session gives the same."""
        name = sandbox_id(tenant, session)
        self.describe_open(name, image, ttl_s, restore=restore, network=network, terms=terms, moved=moved)
        return name

    def describe_open(
        self,
        name: str,
        image: str | None,
        ttl_s: float,
        *,
        restore: str | None = None,
        workspace: str | None = None,
        network: str | None = None,
        terms: SandboxTerms | None = None,
        moved: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Open by id and tell of the sandbox: container id, generation, image, network, kind of workspace, seconds it
        took.

        `restore`: a checkpoint of the tenant's, unpacked into a new session; an open one is given as it is.
        `workspace`: a file of the store instead, by its id or location. `terms`: of
        the tenant; None: what the class `default` has, and of an open session those that it has. `moved`: another host
        had the session: `generation`, the fence of its new place; `checkpoint_at`, when what is restored was kept, ISO
        8601 or None; `is_planned`, that host was drained and not lost. Its first call is told what is gone; without
        `restore` it is refused with that. What this host still has of it of an older generation is closed first.
        """
        wanted: dict[str, Any] = {"image": image, "ttl_s": ttl_s, "restore": restore, "workspace": workspace}
        wanted |= {"network": network, "moved": moved}
        asked = {field: value for field, value in wanted.items() if value is not None} | _told(terms)
        return self._ask(
            {"verb": "open", "sandbox": name, **asked},
            OPEN_TIMEOUT_S if restore is None and workspace is None else ARCHIVE_TIMEOUT_S,
        )

    def checkpoint(self, name: str, *, automatic: bool = False) -> dict[str, Any]:
        """Keep the session's files and shell state; gives the checkpoint's id, size and sha256.

        `automatic`: nobody asked for it. It neither counts as one of the tenant's nor as a use of the session, and is
        deleted after a week.
        """
        return self._ask({"verb": "checkpoint", "sandbox": name, "automatic": automatic}, ARCHIVE_TIMEOUT_S)

    def save_files(self, name: str, file: str, names: str) -> dict[str, Any]:
        """Store files of the workspace as one archive. `file`: its id; `names`: a file in the sandbox with the names of
        these files, each with a NUL at its end. Return the size and sha256 of the archive.
        """
        return self._ask({"verb": "save_files", "sandbox": name, "file": file, "names": names}, ARCHIVE_TIMEOUT_S)

    def delete_checkpoint(self, name: str, checkpoint: str) -> bool:
        """Delete a checkpoint of the tenant whose sandbox `name` is or could be. False when there is none of that
        id.
        """
        return bool(
            self._ask({"verb": "delete_checkpoint", "sandbox": name, "checkpoint": checkpoint}, OPEN_TIMEOUT_S)[
                "deleted"
            ]
        )

    def call(
        self,
        name: str,
        request: Mapping[str, Any],
        body: bytes = b"",
        *,
        call_id: str = "",
        on_data: Callable[[str, bytes], None] | None = None,
        terms: SandboxTerms | None = None,
    ) -> GuestResponse:
        """Run one request of docs/guest-protocol.md in the sandbox. `on_data` gets stream pieces as they come, else
        they are gathered. `terms`: of the tenant now; None: as they were.

        Raises ToolFailure with the guest's code, SandboxUnavailable when the sandbox or sandboxd is gone.
        """
        timeout_s = float(request.get("timeout_s", 30.0)) + CALL_GRACE_S
        header = {
            "verb": "call",
            "sandbox": name,
            "call": call_id,
            "request": {**request, "body_bytes": len(body)},
            **_told(terms),
        }
        gathered: dict[str, bytearray] = {}
        first = _encoded(header, body[:_BODY_CHUNK])
        with self._errors():
            sock = self._connected()
            sock.settimeout(timeout_s)
            self._was_sent = True
            sock.sendall(first)
            for at in range(_BODY_CHUNK, len(body), _BODY_CHUNK):
                sock.sendall(_encoded({"verb": "data"}, body[at : at + _BODY_CHUNK]))
            deadline = time.monotonic() + timeout_s
            while (frame := self._next(deadline)).header.get("ev") == "data":
                stream = str(frame.header.get("stream"))
                if on_data is not None:
                    on_data(stream, frame.body)
                else:
                    gathered.setdefault(stream, bytearray()).extend(frame.body)
        return GuestResponse(_checked(frame.header), {stream: bytes(data) for stream, data in gathered.items()})

    def find_skill(self, name: str, digest: str, *, shared: bool) -> str | None:
        """The folder of a skill's bundle in every sandbox; None when it has to be placed first. `shared`: everybody's,
        else that session's tenant's.
        """
        place = self._ask({"verb": "skill", "sandbox": name, "digest": digest, "shared": shared}, 10.0)["place"]
        return None if place is None else str(place)

    def place_skill(self, name: str, digest: str, archive: IO[bytes], *, shared: bool) -> str:
        """Place the bundle of that digest, a tar archive of its files in the order of their paths; gives its folder in
        every sandbox.
        """
        size = archive.seek(0, io.SEEK_END)
        archive.seek(0)
        header = {"verb": "skill", "sandbox": name, "digest": digest, "shared": shared, "body_bytes": size}
        with self._errors():
            sock = self._connected()
            sock.settimeout(OPEN_TIMEOUT_S)
            self._was_sent = True
            sock.sendall(_encoded(header, archive.read(_BODY_CHUNK)))
            while data := archive.read(_BODY_CHUNK):
                sock.sendall(_encoded({"verb": "data"}, data))
            answer = self._next(time.monotonic() + OPEN_TIMEOUT_S)
        return str(_checked(answer.header)["place"])

    def cancel(self, name: str, call_id: str) -> bool:
        """Kill what a call runs. False when it is not running."""
        return bool(self._ask({"verb": "cancel", "sandbox": name, "call": call_id}, 10.0)["cancelled"])

    def close(self, name: str, *, fence: int | None = None) -> bool:
        """Remove the sandbox; returns when its container is gone. False when there was none. `fence`: only what was
        opened under that one.
        """
        only = {"fence": fence} if fence is not None else {}
        return bool(self._ask({"verb": "close", "sandbox": name, **only}, OPEN_TIMEOUT_S)["closed"])

    def send_terms(self, tenant: str, terms: SandboxTerms) -> int:
        """The terms of a tenant have changed, for all of its sessions here; gives how many there are."""
        return int(self._ask({"verb": "terms", "tenant": tenant, **_told(terms)}, 10.0)["sessions"])

    def status(self) -> dict[str, Any]:
        """Facts of sandboxd: `boot`, `classes`, `images`, `sessions` and `sandboxes` with the most of each (`max_`),
        `memory_free_bytes`, `disk_free_bytes`, `store` (local or shared), engine, runtime, pool."""
        return self._ask({"verb": "status"}, 10.0)

    def sessions(self) -> list[dict[str, Any]]:
        """A row for each session: `name` (`<tenant>:<session>`), `generation`, `fence`, `calls` that run, `jobs` in the
        background, `idle_s`, `ttl_s`, `changed` (files may differ from the last checkpoint), `checkpoint` (the last one
        made here), `image`, `container`, `state`, `lost`."""
        rows: list[dict[str, Any]] = []
        after: str | None = ""
        while after is not None:
            page = self._exchange({"verb": "sessions", "after": after}, 10.0)
            after = _checked(page.header)["next"]
            rows += json.loads(page.body)
        return rows

    def disconnect(self) -> None:
        """Close the connection; the next request opens a new one."""
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

    def _ask(self, header: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        return _checked(self._exchange(header, timeout_s).header)

    def _exchange(self, header: Mapping[str, Any], timeout_s: float) -> Frame:
        with self._errors():
            sock = self._connected()
            sock.settimeout(timeout_s)
            self._was_sent = True
            sock.sendall(_encoded(header, b""))
            return self._next(time.monotonic() + timeout_s)

    def _connected(self) -> socket.socket:
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
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError("no answer in time")
            self._sock.settimeout(left)
            data = self._sock.recv(256 * 1024)
            if not data:
                raise ConnectionError("sandboxd closed the connection")
            self._waiting.extend(self._decoder.feed(data))
        return self._waiting.pop(0)

    @contextlib.contextmanager
    def _errors(self) -> Any:
        """A connection that failed in the middle is of no more use: drop it, and say what to check."""
        self._was_sent = False
        try:
            yield
        except TimeoutError as error:
            self.disconnect()
            raise SandboxdUnreachable(
                f"sandboxd at {self._path} gave no answer in time: the host is busy, or the session is still being "
                "brought back; try again, and see sandboxd's log when it stays so",
                was_sent=self._was_sent,
            ) from error
        except (OSError, FrameError) as error:
            self.disconnect()
            raise SandboxdUnreachable(
                f"sandboxd does not answer at {self._path} ({error}): is it running on this host?",
                was_sent=self._was_sent,
            ) from error
        except BaseException:
            self.disconnect()
            raise


def _told(terms: SandboxTerms | None) -> dict[str, Any]:
    """The field of a request that tells them."""
    return {"terms": terms.model_dump(mode="json", exclude_none=True)} if terms is not None else {}


def _is_quiet(sock: socket.socket) -> bool:
    """Whether a kept connection still stands with nothing to read. Its end, as after a restart of sandboxd, is seen
    before anything is sent.
    """
    try:
        sock.settimeout(0.0)
        sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False  # the end, or an answer to nothing that was asked


def _encoded(header: Mapping[str, Any], body: bytes) -> bytes:
    """One frame. Raises ToolFailure when the request is too large for one: arguments, environment or a path."""
    try:
        return encode_frame(header, body, max_total=MAX_DOWN)
    except FrameError as error:
        message = f"the call's arguments are too large ({error}): put them into a file and give its name"
        raise ToolFailure(ErrorCode.INVALID_ARGUMENTS, message) from error


def _checked(header: Mapping[str, Any]) -> dict[str, Any]:
    """The answer, or the failure it tells as an exception."""
    if header.get("ok") is not True:
        code, message = str(header.get("code")), str(header.get("message"))
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


# --- A guest's answer -------------------------------------------------------------------------------------------------

_Count = Annotated[int, Field(ge=0, le=2**63)]
_Code = Annotated[int, Field(ge=0, le=255)]
_PathText = Annotated[str, Field(max_length=8192)]
MAX_MESSAGE_CHARS = 4000

_CODES = {
    **{
        code.value: code
        for code in (
            ErrorCode.INVALID_ARGUMENTS,
            ErrorCode.FILE_NOT_FOUND,
            ErrorCode.FILE_EXISTS,
            ErrorCode.IS_DIRECTORY,
            ErrorCode.NOT_A_DIRECTORY,
            ErrorCode.PATH_NOT_ALLOWED,
            ErrorCode.FILE_TOO_LARGE,
            ErrorCode.INVALID_PATTERN,
            ErrorCode.BINARY_FILE,
            ErrorCode.OFFSET_OUT_OF_RANGE,
            ErrorCode.PERMISSION_DENIED,
            ErrorCode.NO_MATCH,
            ErrorCode.AMBIGUOUS_MATCH,
            ErrorCode.NO_CHANGE,
            ErrorCode.STALE_FILE,
            ErrorCode.NO_SPACE,
            ErrorCode.TIMEOUT,
            ErrorCode.CANCELLED,
        )
    },
    "NOT_A_REGULAR_FILE": ErrorCode.PATH_NOT_ALLOWED,
    "SPAWN_FAILED": ErrorCode.FILE_NOT_FOUND,
}


_FIGURES = {"size": "size_bytes", "lines": "lines"}
"""The figures that an error may report -> their names in a success."""


class InvalidGuestAnswer(Exception):
    """No guest of ours sends this `done`. The message names the field, never its value."""


class _Shape(BaseModel):
    """Fields that are not named here are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True, allow_inf_nan=False)


class GuestAnswer(_Shape):
    """The end of any request. sandboxd itself adds `sandbox`, `sandbox_s`, `sandbox_lost` and `workspace_kept`."""

    run_s: float = 0.0
    kill: KillReport | None = None
    sandbox: SandboxInfo | None = None
    sandbox_s: Annotated[float, Field(ge=0)] = 0.0
    sandbox_lost: str | None = None
    workspace_kept: bool = False
    error: dict[str, Any] | None = None


class _Counts(_Shape):
    total: _Count
    head: _Count
    tail: _Count


class _State(_Shape):
    outcome: Literal["none", "kept", "replaced", "too_large", "no_room"]
    folder: _PathText
    moved: bool
    stray: _PathText | None
    lost: _PathText | None


class _Spill(_Shape):
    path: _PathText
    bytes: _Count
    lines: _Count | None
    whole: bool


class _Live(_Shape):
    sent: _Count
    dropped: _Count


class _Job(_Shape):
    job: Annotated[str, Field(pattern=r"\Ajob-[0-9]{1,9}\z")]
    label: Annotated[str, Field(max_length=400)]
    state: Literal["running", "exited", "killed", "lost"]
    exit_code: _Code | None
    signal: _Code | None
    age_s: Annotated[float, Field(ge=0)]
    unread: _Count
    oom: bool = False
    log: _PathText = ""
    dropped: _Count = 0


class _JobOutput(_Shape):
    job: _Job
    streams: dict[Literal["merged"], _Counts]


class _JobInput(_Shape):
    job: _Job
    pending: _Count


class _JobList(_Shape):
    jobs: Annotated[list[_Job], Field(max_length=64)]


class _Exec(_Shape):
    exit_code: _Code | None
    signal: _Code | None
    pipe_status: Annotated[list[_Code], Field(max_length=64)] | None = None
    state: _State | None = None
    spill: _Spill | None = None
    spill_failed: bool = False
    live: _Live | None = None
    timed_out: bool
    cancelled: bool
    oom: bool
    streams: dict[Literal["stdout", "stderr", "merged"], _Counts]


class _ReadText(_Shape):
    kind: Literal["text", "image", "document", "directory"]
    size: _Count
    lines: _Count
    is_counted: bool
    count: _Count
    is_out_of_room: bool
    cuts: Annotated[list[Annotated[list[_Count], Field(min_length=3, max_length=3)]], Field(max_length=100)]
    encoding: Annotated[str, Field(pattern=r"\A[A-Za-z0-9_-]{1,40}\z")]
    has_bom: bool
    is_guess: bool
    is_damaged: bool
    newline: Literal["none", "lf", "crlf", "cr", "mixed"]
    final_newline: bool
    type: Annotated[str, Field(pattern=r"\A[A-Za-z0-9 -]{0,60}\z")]
    width: _Count
    height: _Count
    entries: _Count


class _ReadFile(_Shape):
    size: _Count


class _WriteFile(_Shape):
    created: bool
    size: _Count


class _WriteText(_WriteFile):
    written: _Count
    lines: _Count
    encoding: Annotated[str, Field(pattern=r"\A[A-Za-z0-9_-]{1,40}\z")]


class _EditText(_WriteFile):
    replaced: _Count
    encoding: Annotated[str, Field(pattern=r"\A[A-Za-z0-9_-]{1,40}\z")]


_Names = Annotated[list[Annotated[str, Field(max_length=400)]], Field(max_length=10)]


class _Glob(_Shape):
    total: _Count
    shown: _Count
    cut: bool
    ignored: _Count
    unreadable: _Count
    partial: bool
    bad_rules: _Names


class _Grep(_Shape):
    engine: Literal["ripgrep", "python"]
    is_file: bool
    matches: _Count
    files: _Count
    shown: _Count
    shown_files: _Count
    cut: bool
    cut_lines: _Count
    searched: _Count
    ignored: _Count
    large: _Count
    large_names: _Names
    binary: _Count
    binary_names: _Names
    unreadable: _Count
    unreadable_names: _Names
    bad_rules: _Names
    partial: bool


_SHAPES: dict[str, type[_Shape]] = {
    "exec": _Exec,
    "job_start": _JobOutput,
    "job_poll": _JobOutput,
    "job_kill": _JobOutput,
    "job_input": _JobInput,
    "job_list": _JobList,
    "read_text": _ReadText,
    "read_file": _ReadFile,
    "write_file": _WriteFile,
    "write_text": _WriteText,
    "edit_text": _EditText,
    "glob": _Glob,
    "grep": _Grep,
}


def parse_guest_answer(request: Mapping[str, Any], done: Mapping[str, Any]) -> GuestAnswer:
    """Return the common part of `done`, the end of `request`. The fields of the request's own op are checked too.
    Raises InvalidGuestAnswer.
    """
    try:
        answer = GuestAnswer.model_validate(done)
        if answer.error is None:
            _SHAPES[str(request["op"])].model_validate(done)
    except ValidationError as error:
        raise InvalidGuestAnswer(_describe(error)) from None
    if answer.error is None:
        _check_streams(request, done)
    return answer


def parse_error(answer: GuestAnswer) -> tuple[ErrorCode, str, dict[str, int]]:
    """Return code, message and figures of a request that failed. A guest may blame its caller or itself, never the
    operator: any other code is INTERNAL.
    """
    assert answer.error is not None
    code, message = str(answer.error.get("code")), str(answer.error.get("message"))[:MAX_MESSAGE_CHARS]
    if code == ErrorCode.SANDBOX_UNAVAILABLE.value and answer.sandbox_lost is not None:
        # Only sandboxd reports that a sandbox was lost.
        return ErrorCode.SANDBOX_UNAVAILABLE, _clean(message), {}
    figures = {ours: answer.error[name] for name, ours in _FIGURES.items() if _is_count(answer.error.get(name))}
    return _CODES.get(code, ErrorCode.INTERNAL), _clean(message), figures


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= 2**63


def _check_streams(request: Mapping[str, Any], done: Mapping[str, Any]) -> None:
    """Check that every stream of the request is counted."""
    expected = {"stdout", "stderr"} if "stream" in request.get("capture", {}) else set(request.get("capture", {}))
    missing = expected - set(done.get("streams", {}))
    if missing:
        raise InvalidGuestAnswer(f"streams: {', '.join(sorted(missing))} missing")


def _describe(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_input=False)[0]
    # The first part is a field of ours; what follows may be a key of the guest's.
    return f"{first['loc'][0]}: {first['type']}"


def _clean(text: str) -> str:
    """Return the text without half surrogate pairs, which no UTF-8 of ours can carry."""
    return text.encode("utf-8", "replace").decode()
