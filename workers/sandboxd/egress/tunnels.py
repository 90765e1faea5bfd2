"""The connections that one sandbox opens: checks the guest's frames and passes them to a relay per connection.

Invariant: a guest can harm only its own sandbox. Every frame is checked before any work is done for it: its fields, the
state of its connection, and its window. The rate of frames is limited, because one event loop serves all sandboxes. Any
violation ends the sandbox.
"""

import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from toolcrew.workers.sandboxd.egress.relay import GRANT, WINDOW, ProxyStreams, RelayContext, TunnelRelay
from toolcrew.workers.sandboxd.frames import Frame

MAX_TUNNELS = 64
_FRAMES_PER_S = 4000.0
"""Maximum rate of frames per second: twice the rate of a correct guest."""
_FRAMES_AT_ONCE = 32_000.0
"""Maximum burst of frames. It is above the number of frames that can wait between a guest and sandboxd while sandboxd
does not read.
"""
_OPEN_COST = 20.0
_FIELDS: Mapping[str, frozenset[str]] = {
    "net_open": frozenset({"ev", "conn"}),
    "net_data": frozenset({"ev", "conn"}),
    "net_end": frozenset({"ev", "conn"}),
    "net_close": frozenset({"ev", "conn"}),
    "net_room": frozenset({"ev", "conn", "bytes"}),
}


class _Violation(Exception):
    """Violation of the protocol by the guest."""


class Tunnels:
    """All connections of one sandbox that are open on at least one side.

    `send` takes a frame for the guest; `drain` waits until the guest has read most of what was sent. `connect` opens a
    connection to the proxy, or raises OSError. `on_violation` is called at most once, with a description; nothing is
    relayed afterwards.
    """

    def __init__(
        self,
        send: Callable[[dict[str, Any], bytes], None],
        drain: Callable[[], Awaitable[None]],
        connect: Callable[[], Awaitable[ProxyStreams]],
        on_violation: Callable[[str], None],
    ) -> None:
        self._context = RelayContext(send, drain, connect)
        self._on_violation = on_violation
        self._relays: dict[int, TunnelRelay] = {}
        self._last = 0
        self._is_closed = False
        self._tokens = _FRAMES_AT_ONCE
        self._counted_at = time.monotonic()

    def take(self, frame: Frame) -> None:
        """Accept a frame whose `ev` begins with `net_`, in order of arrival. Never waits."""
        if self._is_closed:
            return
        try:
            self._take(frame)
        except _Violation as violation:
            self.close()
            self._on_violation(str(violation))

    def close(self) -> None:
        """Cut all connections, because the sandbox has ended."""
        self._is_closed = True
        for relay in self._relays.values():
            relay.abort()
        self._relays.clear()

    def cut(self) -> None:
        """Cut the open connections. The guest is notified and may open new ones."""
        for relay in list(self._relays.values()):
            relay.cut()

    def _take(self, frame: Frame) -> None:
        event, number = frame.header.get("ev"), frame.header.get("conn")
        if not isinstance(event, str) or frame.header.keys() != _FIELDS.get(event):
            raise _Violation("a frame of a connection has invalid fields")
        if frame.body and event != "net_data":
            raise _Violation("a frame has a body that it must not have")
        if type(number) is not int:
            raise _Violation("a connection has no number")
        self._count(event)
        if event == "net_open":
            self._open(number)
        elif number not in self._relays or self._relays[number].guest_closed:
            raise _Violation("a frame belongs to a connection that is not open")
        else:
            self._pass_event(self._relays[number], event, frame)

    def _open(self, number: int) -> None:
        if not self._last < number < 2**53:
            raise _Violation("a connection number was used twice")
        if len(self._relays) >= MAX_TUNNELS:
            raise _Violation(f"there are more than {MAX_TUNNELS} connections")
        self._last = number
        self._relays[number] = TunnelRelay(number, self._context, self._forget)

    def _pass_event(self, relay: TunnelRelay, event: str, frame: Frame) -> None:
        if event == "net_data":
            if relay.guest_ended or not 0 < len(frame.body) <= relay.guest_room:
                raise _Violation("data is empty, exceeds the window, or belongs to an ended connection")
            relay.take_data(frame.body)
        elif event == "net_room":
            count = frame.header["bytes"]
            # Window steps must be large, or a guest could send a frame for every byte.
            if type(count) is not int or count < GRANT or relay.room + count > WINDOW:
                raise _Violation("a window update is too large or too small")
            relay.take_room(count)
        elif event == "net_end":
            if relay.guest_ended:
                raise _Violation("a connection was ended twice")
            relay.take_end()
        else:
            relay.take_close()

    def _forget(self, relay: TunnelRelay) -> None:
        self._relays.pop(relay.number, None)

    def _count(self, event: str) -> None:
        """Raise _Violation when frames arrive faster than a correct guest sends them. One event loop serves all
        sandboxes, so a flood would delay the other sandboxes.
        """
        now = time.monotonic()
        self._tokens = min(_FRAMES_AT_ONCE, self._tokens + (now - self._counted_at) * _FRAMES_PER_S)
        self._counted_at = now
        self._tokens -= {"net_open": _OPEN_COST, "net_data": 1.0}.get(event, 0.0)
        if self._tokens < 0:
            raise _Violation("too many connections, or too much data in them")
