"""How PID 1 hands a call to a supervisor that waits: its header in one packet, and the descriptor of its body."""

from __future__ import annotations

# Not `socket`, which imports more than all of the guest: PID 1 should stay small.
import _socket
import json
import sys

from guest.requests import parse_call

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from guest.requests import CallRequest

_MAX_PACKET = 65_536
_FD_BYTES = 4
_CANCEL_PACKET = b"c"
CANCEL = "cancel"


class Assignment:
    """One call, as its supervisor gets it. `oom_kills` is the cgroup's counter at the start."""

    __slots__ = ("body", "oom_kills", "request")

    def __init__(self, request: CallRequest, body: int | None, oom_kills: int | None) -> None:
        self.request = request
        self.body = body
        self.oom_kills = oom_kills


def open_channel() -> tuple[_socket.socket, _socket.socket]:
    """PID 1's end, which never waits, and the supervisor's. Raises OSError."""
    ours, theirs = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    return ours, theirs


def give(channel: _socket.socket, header: Mapping[str, object], body: int | None, oom_kills: int | None) -> bool:
    """Whether the call could be handed over: not when its header is long, or when nobody listens any more."""
    packet = json.dumps((header, oom_kills)).encode()
    if len(packet) > _MAX_PACKET:
        return False
    rights = [] if body is None else [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, body.to_bytes(_FD_BYTES, sys.byteorder))]
    try:
        channel.sendmsg((packet,), rights)
    except OSError:
        return False
    return True


def take(channel: _socket.socket) -> Assignment | None:
    """Wait for the next call; None when PID 1 has closed its end, or a body could not be taken for want of descriptors."""
    heard = hear(channel)
    return heard if isinstance(heard, Assignment) else None


def hear(channel: _socket.socket) -> Assignment | str | None:
    """As `take`, for who may also be told CANCEL."""
    # Close-on-exec: the body is the supervisor's, programs are given their stdin only.
    packet, rights, flags, _ = channel.recvmsg(_MAX_PACKET, _socket.CMSG_LEN(_FD_BYTES), _socket.MSG_CMSG_CLOEXEC)
    if packet == _CANCEL_PACKET:
        return CANCEL
    if not packet or flags & _socket.MSG_CTRUNC:
        return None
    header, oom_kills = json.loads(packet)
    body = int.from_bytes(rights[0][2], sys.byteorder) if rights else None
    return Assignment(parse_call(header), body, oom_kills)


def say_cancel(channel: _socket.socket) -> None:
    try:
        channel.send(_CANCEL_PACKET)
    except OSError:
        # The supervisor has ended, which PID 1's loop is about to learn.
        return


def hears_cancel(channel: _socket.socket) -> bool:
    """Whether PID 1 has said something while a call is served: only a cancel comes then."""
    try:
        channel.recv(1, _socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    return True
