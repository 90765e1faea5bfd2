"""Streams of files out of a guest and into another. Nothing is ever unpacked on the host.

Both ends run the image's own programs inside the sandbox. What a guest sends is stored as it is and only ever given to
a guest of the same tenant.
"""

import asyncio
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from contract.errors import ErrorCode, SandboxUnavailable, ToolFailure
from store.archives.base import ArchiveHash, in_pieces
from workers.sandboxd.frames import Frame
from workers.sandboxd.sandbox import FRAME_COST_BYTES, quote_text

ROOTS = ("/workspace", "/output")
"""The session's files; long outputs, logs of jobs, the carried shell state and what is remembered of files."""
PARCEL_TIMEOUT_S = 480.0
_PIECE_BYTES = 4 * 1024 * 1024
"""What the guest holds of an archive in memory while it is unpacked."""
_FIFO_FOLDER = "/tmp"
_FRAME_BYTES = 512 * 1024
_WAITING_BYTES = 1024 * 1024
"""Nothing more is read from the guest while this much has come that nobody has taken."""
_WORDS_BYTES = 65_536
_LAST_WORDS_S = 5.0
_CHANGED = 1
"""tar's exit code when a file changed, or went, while it was read."""
_FULL = (b"No space left", b"File too large", b"Disk quota exceeded")

# What its own user may not read is opened to him for as long as tar reads, the lowest folder last put back.
_PACK = """
mapfile -d '' -t closed < <(find "$@" -xdev -user "$UID" \\
    \\( -type d ! -perm -500 -printf '%m %p\\0' -exec chmod u+rx {} \\; \\) -o \\
    \\( -type f ! -perm -400 -printf '%m %p\\0' -exec chmod u+r {} + \\))
put_back() {
    for ((at = ${#closed[@]} - 1; at >= 0; at--)); do chmod "${closed[at]%% *}" "${closed[at]#* }"; done
}
trap put_back EXIT
tar -c -f - -b 128 --format=posix --sparse --one-file-system --numeric-owner -C / -- "${@#/}"
"""
_MAKE_FIFO = 'mkfifo -m 600 -- "$1"'
# Open for both, or each piece's end would be the stream's. Only head knows where that is. /tmp itself is the
# container's: its own user may fill it and not change its mode, and tar would try.
_UNPACK = """
trap 'rm -f -- "$1"' EXIT
head -c "$2" 0<>"$1" | tar -x -f - -p --delay-directory-restore --no-overwrite-dir --no-same-owner \\
    --anchored --no-wildcards --no-recursion --exclude=tmp --recursion -C / -- "${@:3}"
exit "${PIPESTATUS[1]}"
"""
# Ends with the exit code of the program that reads the stream.
_READ_FIFO = """
trap 'rm -f -- "$1"' EXIT
head -c "$2" 0<>"$1" | "${@:3}"
exit "${PIPESTATUS[1]}"
"""
# Only the files of the list, without folders above them; links become the files that they lead to.
_PACK_LIST = """
trap 'rm -f -- "$1"' EXIT
tar -c -f - -b 128 --format=posix --dereference --hard-dereference --no-recursion --numeric-owner -C "$2" \\
    --null --verbatim-files-from --files-from="$1"
"""
_FEED = 'cat > "$1"'
_APPEND = 'cat >> "$1"'
_WITH_FILE = """
trap 'rm -f -- "$1"' EXIT
"${@:2}" < "$1"
"""


class Guest(Protocol):
    """What an archive needs of a sandbox."""

    async def ask(
        self,
        request: Mapping[str, Any],
        *,
        sink: Callable[[Frame], None] | None = None,
        body: AsyncIterator[bytes] | None = None,
        body_bytes: int = 0,
    ) -> dict[str, Any]:
        """One request; gives the guest's last header. Raises SandboxUnavailable when the sandbox is lost."""
        ...

    def hold(self, holder: object) -> None: ...

    def release(self, holder: object) -> None: ...


@dataclass(frozen=True)
class ArchiveFacts:
    """What was packed, by size and sha256 in hex. `skipped`: sockets, which nobody can pack. `is_torn`: files changed
    while they were read.
    """

    bytes: int
    sha256: str
    skipped: int = 0
    is_torn: bool = False


def count_most_bytes(workspace_bytes: int, inodes: int) -> int:
    """The most an archive of such a workspace may have: its files, the outputs, /tmp, and what tar needs for each
    name.
    """
    return workspace_bytes + 256 * 1024 * 1024 + 4096 * inodes


def pack_roots(roots: Sequence[str]) -> list[str]:
    """Return the program that packs all that is below these folders."""
    return ["bash", "-c", _PACK, "pack", *roots]


def pack_list(names: str, folder: str) -> list[str]:
    """Return the program that packs the files of a folder whose names are in the file `names`, each with a NUL at its
    end; it deletes that file.
    """
    return ["bash", "-c", _PACK_LIST, "pack", names, folder]


class Packing:
    """One archive on its way out of a guest: `chunks` once, then `facts`."""

    def __init__(self, guest: Guest, argv: list[str], max_bytes: int) -> None:
        """`argv`: from `pack_roots` or `pack_list`."""
        self._guest = guest
        self._argv = argv
        self._max_bytes = max_bytes
        self.facts: ArchiveFacts | None = None

    async def chunks(self) -> AsyncGenerator[bytes]:
        """The tar stream, in pieces of a few MiB at most. Who takes them slowly holds the whole sandbox up: take them
        to a disk.

        Raises ToolFailure(FILE_TOO_LARGE) beyond `max_bytes`, ToolFailure when tar fails, SandboxUnavailable; what was
        given is then void.
        """
        flow, tally = _Outflow(self._guest), ArchiveHash()
        request = _exec(self._argv, {"stream": self._max_bytes + 1})
        packing = asyncio.ensure_future(self._guest.ask(request, sink=flow.take))
        packing.add_done_callback(lambda _: flow.end())
        try:
            while (chunk := await flow.next()) is not None:
                tally.add(chunk)
                if tally.bytes > self._max_bytes:
                    raise ToolFailure(
                        ErrorCode.FILE_TOO_LARGE,
                        f"the files of the session are more than {self._max_bytes} bytes: delete what is not needed",
                    )
                yield chunk
            done = await packing
        finally:
            flow.close()
            await _cancelled(packing)
        _check(done, flow.words, "packed", (0, _CHANGED))
        whole = tally.facts()
        self.facts = ArchiveFacts(
            whole.bytes, whole.sha256, flow.words.count(b"socket ignored"), done["exit_code"] == _CHANGED
        )


async def unpack(guest: Guest, roots: tuple[str, ...], read: AsyncIterator[bytes], total: int) -> None:
    """Unpack an archive of these roots, of `total` bytes, into the places that it was packed from.

    Raises ToolFailure(NO_SPACE), ToolFailure when tar fails, SandboxUnavailable, and what `read` raises; files may then
    lie there already.
    """
    names = [root.removeprefix("/") for root in roots]
    done, words = await _stream_in(
        guest, lambda fifo: ["bash", "-c", _UNPACK, "unpack", fifo, str(total), *names], read, total
    )
    _check(done, words, "unpacked")


async def stream_in(
    guest: Guest, argv: Sequence[str], read: AsyncIterator[bytes], total: int
) -> tuple[dict[str, Any], str]:
    """Run a program in the guest whose standard input are these bytes, a pipe. Return its end and its stderr. Raises as
    `unpack`.
    """
    done, words = await _stream_in(
        guest, lambda fifo: ["bash", "-c", _READ_FIFO, "read", fifo, str(total), *argv], read, total
    )
    return done, bytes(words).decode("utf-8", "replace")


async def run_with_file(
    guest: Guest, argv: Sequence[str], read: AsyncIterator[bytes], total: int, path: str
) -> tuple[dict[str, Any], str]:
    """As `stream_in` for a program that seeks in its standard input: the bytes are stored at `path` meanwhile."""
    sent = 0
    async for piece in in_pieces(read, _PIECE_BYTES):
        words = bytearray()
        done = await guest.ask(
            _exec(["bash", "-c", _APPEND, "append", path]),
            sink=_keep(words),
            body=_framed(piece),
            body_bytes=len(piece),
        )
        _check(done, words, "copied in")
        sent += len(piece)
    _check_size(sent, total)
    words = bytearray()
    done = await guest.ask(_exec(["bash", "-c", _WITH_FILE, "run", path, *argv]), sink=_keep(words))
    return done, bytes(words).decode("utf-8", "replace")


async def _stream_in(
    guest: Guest, build_argv: Callable[[str], list[str]], read: AsyncIterator[bytes], total: int
) -> tuple[dict[str, Any], bytearray]:
    """Feed a program that reads a FIFO, a piece at a time: the guest holds a whole piece in memory."""
    fifo, words = f"{_FIFO_FOLDER}/.archive-{secrets.token_hex(8)}", bytearray()
    _check(await guest.ask(_exec(["bash", "-c", _MAKE_FIFO, "make", fifo]), sink=_keep(words)), words, "unpacked")
    unpacking = asyncio.ensure_future(guest.ask(_exec(build_argv(fifo)), sink=_keep(words)))
    try:
        sent = 0
        async for piece in in_pieces(read, _PIECE_BYTES):
            sent += len(piece)
            if sent > total or not await _feed(guest, fifo, piece, unpacking):
                break
        if not unpacking.done():
            _check_size(sent, total)
        return await unpacking, words
    finally:
        await _cancelled(unpacking)


def _check_size(sent: int, total: int) -> None:
    if sent != total:
        raise SandboxUnavailable(f"the stored files have {sent} bytes and not {total}: use other ones")


async def _feed(guest: Guest, fifo: str, piece: bytes, unpacking: "asyncio.Future[dict[str, Any]]") -> bool:
    """Hand one piece on; False when tar has ended. Raises as `unpack`."""
    words = bytearray()
    request = _exec(["bash", "-c", _FEED, "feed", fifo])
    feeding = asyncio.ensure_future(guest.ask(request, sink=_keep(words), body=_framed(piece), body_bytes=len(piece)))
    try:
        await asyncio.wait({feeding, unpacking}, return_when=asyncio.FIRST_COMPLETED)
        if unpacking.done():
            return False
        done = await feeding
    finally:
        await _cancelled(feeding)
    if done.get("exit_code") != 0:
        # tar may have left, and is about to say why.
        await asyncio.wait({unpacking}, timeout=_LAST_WORDS_S)
        if unpacking.done():
            return False
    _check(done, words, "unpacked")
    return True


class _Outflow:
    """What has come of a stream from a guest and nobody has taken. `words`: what its stderr said, as far as it was
    kept.
    """

    def __init__(self, guest: Guest) -> None:
        self._guest = guest
        self._waiting: list[bytes] = []
        self._waiting_bytes = 0
        self._news = asyncio.Event()
        self._is_over = False
        self._is_closed = False
        self.words = bytearray()

    def take(self, frame: Frame) -> None:
        if self._is_closed:
            return
        if frame.header.get("stream") != "stdout":
            self.words += frame.body[: _WORDS_BYTES - len(self.words)]
            return
        self._waiting.append(frame.body)
        self._waiting_bytes += len(frame.body) + FRAME_COST_BYTES
        if self._waiting_bytes > _WAITING_BYTES:
            self._guest.hold(self)
        self._news.set()

    def end(self) -> None:
        self._is_over = True
        self._news.set()

    def close(self) -> None:
        """Drop what comes from now on: unread, the guest could not say that it has ended, and would pass for one that
        does not end.
        """
        self._is_closed = True
        self._guest.release(self)

    async def next(self) -> bytes | None:
        """None after the last."""
        while not self._waiting:
            if self._is_over:
                return None
            self._news.clear()
            await self._news.wait()
        # All of it at once: each write costs its taker a thread's turn.
        chunk = b"".join(self._waiting)
        self._waiting.clear()
        self._waiting_bytes = 0
        self._guest.release(self)
        return chunk


def _exec(argv: list[str], capture: Mapping[str, int] | None = None) -> dict[str, Any]:
    kept = capture or {"stdout": 0, "stderr": _WORDS_BYTES}
    return {
        "op": "exec",
        "argv": argv,
        "cwd": "/",
        "env": {"LC_ALL": "C"},
        "timeout_s": PARCEL_TIMEOUT_S,
        "capture": kept,
    }


def _keep(words: bytearray) -> Callable[[Frame], None]:
    return lambda frame: words.extend(frame.body[: _WORDS_BYTES - len(words)])


async def _framed(piece: bytes) -> AsyncIterator[bytes]:
    for at in range(0, len(piece), _FRAME_BYTES):
        yield piece[at : at + _FRAME_BYTES]


async def _cancelled(task: "asyncio.Future[Any]") -> None:
    """End what was asked; who asked has its answer, or wants none any more."""
    task.cancel()
    await asyncio.wait({task})
    if not task.cancelled():
        task.exception()


def _check(done: Mapping[str, Any], words: bytes | bytearray, what: str, well: tuple[int, ...] = (0,)) -> None:
    """Raises ToolFailure unless a request ended with one of the exit codes that are well."""
    error = done.get("error")
    if isinstance(error, Mapping):
        raise ToolFailure(
            ErrorCode.INTERNAL, f"the session's files could not be {what}: {quote_text(error.get('message'))}"
        )
    if done.get("timed_out") is True:
        raise ToolFailure(ErrorCode.TIMEOUT, f"the session's files were not {what} within {PARCEL_TIMEOUT_S:g} s")
    code = done.get("exit_code")
    if type(code) is int and code in well:
        return
    if any(full in words for full in _FULL):
        raise ToolFailure(
            ErrorCode.NO_SPACE, f"the session's files could not be {what}: its workspace is too small for them"
        )
    raise ToolFailure(
        ErrorCode.INTERNAL,
        f"the session's files could not be {what}: tar ended with {quote_text(code)}: "
        f"{quote_text(bytes(words[-200:]).decode('utf-8', 'replace'))}",
    )
