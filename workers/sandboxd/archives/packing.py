"""Pack a session's files as a tar stream from one sandbox, and unpack the stream in another.

Invariant: the host never unpacks an archive, because its bytes are untrusted. Packing and unpacking run the toolkit's
tar inside a sandbox. An archive is unpacked only in sandboxes of the same tenant. The host limits its size and time.
"""

import asyncio
import contextlib
import secrets
import shlex
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from toolcrew.archives.base import ArchiveHash, in_pieces
from toolcrew.contract.errors import ErrorCode, SandboxUnavailable, ToolFailure
from toolcrew.contract.own_programs import OPEN_CLOSED, own_program
from toolcrew.workers.sandboxd.disks.base import find_folders
from toolcrew.workers.sandboxd.frames import Frame
from toolcrew.workers.sandboxd.sandbox import FRAME_COST_BYTES, quote_text

ROOTS = ("/workspace", "/output")
"""Folders that every archive has: the session's files; and the long outputs, job logs, shell state and file states of
the guest.
"""
PACKING_TIMEOUT_S = 480.0
PROGRESS_S = 20.0
"""Time limit in seconds for the next bytes of an archive: programs of the session may have stopped `tar`."""
LEAST_BYTES_PER_S = 512 * 1024
"""Lowest average rate of an archive after the first PROGRESS_S seconds."""
_PIECE_BYTES = 4 * 1024 * 1024
"""Size of the pieces of an archive that the guest holds in memory while it unpacks, in bytes."""
_FIFO_FOLDER = "/output"
_FRAME_BYTES = 512 * 1024
_WAITING_BYTES = 1024 * 1024
"""Maximum number of received bytes that wait for the caller. Above it, reading from the guest pauses."""
_STDERR_BYTES = 65_536
_LAST_ERROR_S = 5.0
_CHANGED = 1
"""Exit code of tar when a file changed or disappeared during the reading."""
_VANISHED = b"Warning: Cannot stat"
"""Message of tar, with --ignore-failed-read, when a file of a list disappeared."""
_FULL = (b"No space left", b"File too large", b"Disk quota exceeded", b"File size limit exceeded")

ATTRIBUTES = ("--xattrs", "--xattrs-include=user.*")
"""Options of tar: pack or unpack extended attributes too, but none that gives a program rights."""
_PACK = f"""{OPEN_CLOSED}
open_closed "$@"
tar -c -f - -b 128 --format=posix --sparse --one-file-system --numeric-owner {shlex.join(ATTRIBUTES)} -C / -- "${{@#/}}"
"""
_MAKE_FIFO = 'mkfifo -m 600 -- "$1"'
# Exclude the folder /tmp itself, not its content: tar would try to set its mode, which the user may not change.
_TAR = (
    *("tar", "-x", "-f", "-", "-p", "--delay-directory-restore", "--no-overwrite-dir", "--no-same-owner", *ATTRIBUTES),
    *("--anchored", "--no-wildcards", "--no-recursion", "--exclude=tmp", "--recursion", "-C", "/"),
)
# Open the FIFO for reading and writing; otherwise the reader would see an end after each chunk. `head` stops after the
# total size. The exit code is that of the program that reads the stream.
_READ_FIFO = """
trap 'rm -f -- "$1"' EXIT
head -c "$2" 0<>"$1" | "${@:3}"
exit "${PIPESTATUS[1]}"
"""
# Pack only the files of the list, without the folders above them. Links become the files that they lead to.
_PACK_LIST = f"""{OPEN_CLOSED}
open_closed "$2"
trap 'put_back; rm -f -- "$1"' EXIT
tar -c -f - -b 128 --format=posix --dereference --hard-dereference --no-recursion --numeric-owner -C "$2" \\
    --null --verbatim-files-from --files-from="$1"
"""
_FEED = 'cat > "$1"'
_APPEND = 'cat >> "$1"'
_WITH_FILE = """
trap 'rm -f -- "$1"' EXIT
"${@:2}" < "$1"
"""


class PackingGuest(Protocol):
    """Interface of a sandbox for packing: run requests in its guest."""

    async def ask(
        self,
        request: Mapping[str, Any],
        *,
        sink: Callable[[Frame], None] | None = None,
        body: AsyncIterator[bytes] | None = None,
        body_bytes: int = 0,
    ) -> dict[str, Any]:
        """Send one request and return the guest's last header. Raises SandboxUnavailable when the sandbox is lost."""
        ...

    def hold(self, holder: object) -> None: ...

    def release(self, holder: object) -> None: ...


@dataclass(frozen=True)
class ArchiveFacts:
    """Description of a packed archive: size in bytes and sha256 in hex. `skipped`: number of sockets, which cannot be
    packed. `files_changed`: files changed while they were read.
    """

    bytes: int
    sha256: str
    skipped: int = 0
    files_changed: bool = False


def count_max_bytes(workspace_bytes: int, inodes: int) -> int:
    """Return the largest size of an archive of such a workspace: its files, the outputs, /tmp, and tar's headers."""
    return workspace_bytes + 256 * 1024 * 1024 + 4096 * inodes


def pack_roots(roots: Sequence[str]) -> list[str]:
    """Return the program that packs all files below these folders."""
    return ["bash", "-c", _PACK, "pack", *roots]


def find_roots(*, is_root: bool) -> tuple[str, ...]:
    """Return the folders of a whole session. The changes of the root file system are packed with them."""
    return (*find_folders(is_root=is_root).values(), "/output")


def unpack_roots(roots: Sequence[str] = ()) -> list[str]:
    """Return the program that reads an archive from its standard input and unpacks all files below these folders, or
    all files of the archive if there are none.
    """
    return [*_TAR, "--", *(root.removeprefix("/") for root in roots)]


def pack_list(names: str, folder: str) -> list[str]:
    """Return the program that packs selected files of a folder. The file `names` lists the names, each with a NUL at
    its end. The program deletes this list.
    """
    return ["bash", "-c", _PACK_LIST, "pack", names, folder]


class Packing:
    """Packs one archive. Read `chunks` once to the end; then `facts` describes the archive."""

    def __init__(
        self,
        guest: PackingGuest,
        argv: list[str],
        max_bytes: int,
        stdin: AsyncIterator[bytes] | None = None,
        stdin_bytes: int = 0,
    ) -> None:
        """Create the packing. `argv`: a program of `pack_roots`, `pack_list` or `pack_changes` (root_changes.py), which
        reads `stdin` of `stdin_bytes` bytes.
        """
        self._guest = guest
        self._argv = argv
        self._max_bytes = max_bytes
        self._stdin = stdin
        self._stdin_bytes = stdin_bytes
        self.facts: ArchiveFacts | None = None

    async def chunks(self) -> AsyncGenerator[bytes]:
        """Yield the tar stream in chunks of a few MiB at most. A slow reader delays the whole sandbox, so write the
        chunks to a disk.

        Raises ToolFailure(FILE_TOO_LARGE) beyond `max_bytes`, ToolFailure when tar fails, and SandboxUnavailable. After
        an exception, discard the chunks that were already read.
        """
        flow, tally, timer = _OutputQueue(self._guest), ArchiveHash(), _GuestTimer("packed")
        request = _exec(self._argv, {"stream": self._max_bytes + 1})
        packing = asyncio.ensure_future(
            self._guest.ask(request, sink=flow.take, body=self._stdin, body_bytes=self._stdin_bytes)
        )
        packing.add_done_callback(lambda _: flow.end())
        try:
            while (chunk := await _next_in_time(flow, timer)) is not None:
                tally.add(chunk)
                timer.bytes = tally.bytes
                if tally.bytes > self._max_bytes:
                    raise ToolFailure(
                        ErrorCode.FILE_TOO_LARGE,
                        f"the files of the session are more than {self._max_bytes} bytes: delete files that you do "
                        f"not need",
                    )
                yield chunk
            done = await packing
        finally:
            flow.close()
            await _cancel(packing)
        _check_done(done, flow.stderr, "packed", (0, _CHANGED))
        packed = tally.facts()
        files_changed = done["exit_code"] == _CHANGED or _VANISHED in flow.stderr
        self.facts = ArchiveFacts(packed.bytes, packed.sha256, flow.stderr.count(b"socket ignored"), files_changed)


async def unpack(guest: PackingGuest, argv: Sequence[str], read: AsyncIterator[bytes], total: int) -> None:
    """Unpack an archive of `total` bytes into a guest. `argv`: the program that reads the archive, for example from
    `unpack_roots`.

    Raises ToolFailure(NO_SPACE), ToolFailure when tar fails, SandboxUnavailable, and the errors of `read`. Some files
    may then be unpacked.
    """
    if total <= _PIECE_BYTES:  # as of most forks: one program in the guest instead of three
        data = b""
        async for chunk in read:
            data += chunk
            if len(data) > total:
                break
        _check_size(len(data), total)
        async with _GuestTimer("unpacked").waiting(total):
            await run_with_input(guest, argv, _split_frames(data), total)
    else:
        done, stderr = await _stream_in(guest, argv, read, total, _GuestTimer("unpacked"))
        _check_done(done, stderr, "unpacked")


async def run_with_input(guest: PackingGuest, argv: Sequence[str], read: AsyncIterator[bytes], total: int) -> None:
    """Run a program in the guest with `total` bytes on its standard input. The guest holds them in memory, but this
    process does not. Raises the errors of `unpack`.
    """
    stderr = bytearray()
    body = _split_pieces(read, total)
    done = await guest.ask(_exec(list(argv)), sink=_collect_stderr(stderr), body=body, body_bytes=total)
    _check_done(done, stderr, "unpacked")


async def stream_in(
    guest: PackingGuest, argv: Sequence[str], read: AsyncIterator[bytes], total: int
) -> tuple[dict[str, Any], str]:
    """Run a program in the guest that reads `total` bytes from a pipe as its standard input. Return the `done` header
    and the program's stderr. Raises the errors of `unpack`.
    """
    done, stderr = await _stream_in(guest, argv, read, total)
    return done, bytes(stderr).decode("utf-8", "replace")


async def run_with_file(
    guest: PackingGuest, argv: Sequence[str], read: AsyncIterator[bytes], total: int, path: str
) -> tuple[dict[str, Any], str]:
    """Run a program like `stream_in`, but with a seekable standard input. `path`: a temporary file in the sandbox,
    which stores the bytes.
    """
    sent = 0
    async for piece in in_pieces(read, _PIECE_BYTES):
        stderr = bytearray()
        done = await guest.ask(
            _exec(["bash", "-c", _APPEND, "append", path]),
            sink=_collect_stderr(stderr),
            body=_split_frames(piece),
            body_bytes=len(piece),
        )
        _check_done(done, stderr, "copied in")
        sent += len(piece)
    _check_size(sent, total)
    stderr = bytearray()
    done = await guest.ask(_exec(["bash", "-c", _WITH_FILE, "run", path, *argv]), sink=_collect_stderr(stderr))
    return done, bytes(stderr).decode("utf-8", "replace")


async def _stream_in(
    guest: PackingGuest, argv: Sequence[str], read: AsyncIterator[bytes], total: int, timer: "_GuestTimer | None" = None
) -> tuple[dict[str, Any], bytearray]:
    """Feed a program that reads a FIFO, a piece at a time: the guest holds a whole piece in memory. `timer`: for a
    program whose work is proportional to its input.
    """
    fifo, stderr = f"{_FIFO_FOLDER}/.archive-{secrets.token_hex(8)}", bytearray()
    done = await guest.ask(_exec(["bash", "-c", _MAKE_FIFO, "make", fifo]), sink=_collect_stderr(stderr))
    _check_done(done, stderr, "unpacked")
    reader = ["bash", "-c", _READ_FIFO, "read", fifo, str(total), *argv]
    unpacking = asyncio.ensure_future(guest.ask(_exec(reader), sink=_collect_stderr(stderr)))
    try:
        sent = 0
        async for piece in in_pieces(read, _PIECE_BYTES):
            sent += len(piece)
            async with _limited(timer, len(piece)):
                if sent > total or not await _feed(guest, fifo, piece, unpacking):
                    break
        if not unpacking.done():
            _check_size(sent, total)
        async with _limited(timer):
            return await unpacking, stderr
    finally:
        await _cancel(unpacking)


def _limited(timer: "_GuestTimer | None", size: int = 0) -> contextlib.AbstractAsyncContextManager[None]:
    return timer.waiting(size) if timer is not None else contextlib.nullcontext()


def _check_size(sent: int, total: int) -> None:
    if sent != total:
        raise SandboxUnavailable(
            f"the stored files are damaged: {sent} bytes were read instead of {total}. Restore another checkpoint"
        )


async def _feed(guest: PackingGuest, fifo: str, piece: bytes, unpacking: "asyncio.Future[dict[str, Any]]") -> bool:
    """Send one chunk to tar. Returns False when tar has ended. Raises like `unpack`."""
    stderr = bytearray()
    request = _exec(["bash", "-c", _FEED, "feed", fifo])
    feeding = asyncio.ensure_future(
        guest.ask(request, sink=_collect_stderr(stderr), body=_split_frames(piece), body_bytes=len(piece))
    )
    try:
        await asyncio.wait({feeding, unpacking}, return_when=asyncio.FIRST_COMPLETED)
        if unpacking.done():
            return False
        done = await feeding
    finally:
        await _cancel(feeding)
    if done.get("exit_code") != 0:
        # tar may have ended; wait for its error message.
        await asyncio.wait({unpacking}, timeout=_LAST_ERROR_S)
        if unpacking.done():
            return False
    _check_done(done, stderr, "unpacked")
    return True


class _OutputQueue:
    """Bytes of a guest's stream that the caller has not read yet. `stderr`: the beginning of its stderr."""

    def __init__(self, guest: PackingGuest) -> None:
        self._guest = guest
        self._waiting: list[bytes] = []
        self._waiting_bytes = 0
        self._changed = asyncio.Event()
        self._is_over = False
        self._is_closed = False
        self.stderr = bytearray()

    def take(self, frame: Frame) -> None:
        if self._is_closed:
            return
        if frame.header.get("stream") != "stdout":
            self.stderr += frame.body[: _STDERR_BYTES - len(self.stderr)]
            return
        self._waiting.append(frame.body)
        self._waiting_bytes += len(frame.body) + FRAME_COST_BYTES
        if self._waiting_bytes > _WAITING_BYTES:
            self._guest.hold(self)
        self._changed.set()

    def end(self) -> None:
        self._is_over = True
        self._changed.set()

    def close(self) -> None:
        """Drop later data. Without reading, the guest could not report its end and would count as blocked."""
        self._is_closed = True
        self._guest.release(self)

    async def next(self) -> bytes | None:
        """Return the waiting bytes, or None at the end."""
        while not self._waiting:
            if self._is_over:
                return None
            self._changed.clear()
            await self._changed.wait()
        # Return all bytes at once: each write of the caller costs a thread.
        chunk = b"".join(self._waiting)
        self._waiting.clear()
        self._waiting_bytes = 0
        self._guest.release(self)
        return chunk


async def _next_in_time(flow: _OutputQueue, timer: "_GuestTimer") -> bytes | None:
    async with timer.waiting():
        return await flow.next()


class _GuestTimer:
    """Limits the time that one archive waits for its guest, of which a program decides. The time in which the caller
    stores or reads a chunk does not count. `verb`: the work, for the error.
    """

    def __init__(self, verb: str) -> None:
        self._verb = verb
        self._waited_s = 0.0
        self.bytes = 0

    @contextlib.asynccontextmanager
    async def waiting(self, size: int = 0) -> AsyncIterator[None]:
        """Limit the block. `size`: bytes that the guest has taken at its end. Raises ToolFailure(TIMEOUT)."""
        self.bytes += size
        left_s = PROGRESS_S + self.bytes / LEAST_BYTES_PER_S - self._waited_s
        began_at = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(min(left_s, PROGRESS_S + size / LEAST_BYTES_PER_S)) as limit:
                yield
        except TimeoutError:
            if not limit.expired():
                raise
            raise ToolFailure(
                ErrorCode.TIMEOUT,
                f"the session's files were not {self._verb}: its programs made no progress for {PROGRESS_S:g} s, or "
                "too little. End programs of the session that stop others, and try again",
            ) from None
        self._waited_s += asyncio.get_running_loop().time() - began_at


def _exec(argv: list[str], capture: Mapping[str, int] | None = None) -> dict[str, Any]:
    capture_limits = capture or {"stdout": 0, "stderr": _STDERR_BYTES}
    return {
        "op": "exec",
        "argv": own_program(*argv),
        "cwd": "/",
        "env": {},
        "timeout_s": PACKING_TIMEOUT_S,
        "capture": capture_limits,
    }


def _collect_stderr(stderr: bytearray) -> Callable[[Frame], None]:
    return lambda frame: stderr.extend(frame.body[: _STDERR_BYTES - len(stderr)])


async def _split_frames(piece: bytes) -> AsyncIterator[bytes]:
    for at in range(0, len(piece), _FRAME_BYTES):
        yield piece[at : at + _FRAME_BYTES]


async def _split_pieces(read: AsyncIterator[bytes], total: int) -> AsyncIterator[bytes]:
    sent = 0
    async for piece in in_pieces(read, _FRAME_BYTES):
        sent += len(piece)
        if sent > total:
            break
        yield piece
    _check_size(sent, total)


async def _cancel(task: "asyncio.Future[Any]") -> None:
    """Cancel a request and wait for its end. The caller has its answer, or needs none."""
    task.cancel()
    await asyncio.wait({task})
    if not task.cancelled():
        task.exception()


def _check_done(
    done: Mapping[str, Any], stderr: bytes | bytearray, verb: str, accepted_codes: tuple[int, ...] = (0,)
) -> None:
    """Raise ToolFailure unless the exit code is one of `accepted_codes`."""
    error = done.get("error")
    if isinstance(error, Mapping):
        raise ToolFailure(
            ErrorCode.INTERNAL,
            f"the session's files could not be {verb}: {quote_text(error.get('message'))}; try again",
        )
    if done.get("timed_out") is True:
        raise ToolFailure(
            ErrorCode.TIMEOUT,
            f"the session's files were not {verb} within {PACKING_TIMEOUT_S:g} s: delete files that you do not need",
        )
    code = done.get("exit_code")
    if type(code) is int and code in accepted_codes:
        return
    if any(full in stderr for full in _FULL):
        raise ToolFailure(
            ErrorCode.NO_SPACE,
            f"the session's files could not be {verb}: its workspace is too small for them: use a larger "
            f"workspace_bytes",
        )
    raise ToolFailure(
        ErrorCode.INTERNAL,
        f"the session's files could not be {verb}; try again. The program ended with {quote_text(code)}: "
        f"{quote_text(bytes(stderr[-200:]).decode('utf-8', 'replace'))}",
    )
