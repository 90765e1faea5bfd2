"""Serves an application over HTTP/1.1 until it is stopped. Only this file depends on the server library."""

import asyncio
import socket
from collections.abc import Callable, Sequence

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from toolcrew.contract.errors import ConfigError
from toolcrew.orchestrator.http.body_limits import LEAST_BYTES_PER_S
from toolcrew.orchestrator.http.problems import ApiCode, build_response
from toolcrew.orchestrator.http.web_sockets import (
    MAX_MESSAGE_BYTES,
    PING_INTERVAL_S,
    PONG_WITHIN_S,
    WebSocketProtocol,
)
from toolcrew.telemetry.logs import get_logger

log = get_logger(__name__)

HEAD_WITHIN_S = 10.0
"""Limit, in seconds, of the time to receive the head of a request, from the connection or from the first byte of the
head.
"""
KEEP_ALIVE_S = 30
MAX_HEAD_BYTES = 32 * 1024
MAX_CONNECTIONS = 4000
"""Limit of open connections. Beyond the limit, the connection that was idle longest is closed.

So a client that only holds connections open cannot block other clients.
"""
SLOW_CLIENT_S = 30.0
"""Seconds after which a client that receives its response slower than LEAST_BYTES_PER_S is disconnected.

The unsent part of the response occupies memory of the service.
"""
GRACE_S = 10
"""Time in seconds that running requests have to end after the stop signal. Event streams end at once."""


class _JoinedAnswers(h11.Connection):
    """Sends the head of a response together with the first part of its body.

    Each write is a system call and wakes the client, so one write is faster than two.
    """

    _head: Sequence[bytes] = ()

    def send_with_data_passthrough(self, event: h11.Event) -> list[bytes] | None:
        written = super().send_with_data_passthrough(event)
        if written is None:
            return None
        if isinstance(event, h11.Response):
            self._head = written
            return []
        head, self._head = self._head, ()
        return [*head, *written]


class HeadTimeoutProtocol(H11Protocol):
    """HTTP connection that is closed when the head of a request does not arrive within HEAD_WITHIN_S."""

    _waiting: asyncio.TimerHandle | None = None
    _stall_timer: asyncio.TimerHandle | None = None
    _remaining_bytes = 0
    _idle_since = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.conn = _JoinedAnswers(h11.SERVER, MAX_HEAD_BYTES)
        self._idle_since = self.loop.time()
        self._wait()
        if len(self.connections) > MAX_CONNECTIONS:
            self._make_room()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        # Unparsed data in the idle state is the beginning of a head. The timer runs on until the head is complete, so
        # that a client cannot extend the time by sending single bytes.
        is_in_head = self.conn.their_state is h11.IDLE and bool(self.conn.trailing_data[0])
        if not is_in_head:
            self._stop_waiting()
        elif self._waiting is None:
            self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        if self._stall_timer is not None:
            self._stall_timer.cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        self._idle_since = self.loop.time()
        super().on_response_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_taking()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None

    def send_400_response(self, msg: str) -> None:
        """Send a problem as the response, like every other error, and close the connection."""
        problem = build_response(
            ApiCode.MALFORMED_REQUEST, "the request is not valid HTTP/1.1: check its head, its length and its chunks"
        )
        head = h11.Response(
            status_code=400, reason=b"Bad Request", headers=[*problem.raw_headers, (b"connection", b"close")]
        )
        # A response that has started cannot be followed by another response.
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            for event in (head, h11.Data(data=bytes(problem.body)), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _watch_taking(self) -> None:
        self._remaining_bytes = self.transport.get_write_buffer_size()
        self._stall_timer = self.loop.call_later(SLOW_CLIENT_S, self._judge_taking)

    def _judge_taking(self) -> None:
        if self._remaining_bytes - self.transport.get_write_buffer_size() < SLOW_CLIENT_S * LEAST_BYTES_PER_S:
            self.transport.abort()
        else:
            # The client receives a large response over a slow connection, so the check is repeated.
            self._watch_taking()

    @property
    def _is_idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _make_room(self) -> None:
        # Only connections without a running request are closed. If all others are busy, the new connection is closed.
        idle = [
            connection
            for connection in self.connections
            if isinstance(connection, HeadTimeoutProtocol) and connection._is_idle
        ]
        min(idle, key=lambda connection: connection._idle_since, default=self).transport.abort()

    def _wait(self) -> None:
        self._waiting = self.loop.call_later(HEAD_WITHIN_S, self.transport.abort)

    def _stop_waiting(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None


class _Server(uvicorn.Server):
    """Server that calls `on_started` when it accepts requests."""

    def __init__(self, config: uvicorn.Config, on_started: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_started = on_started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_started()


class UvicornServer:
    """HTTP server with one listening socket. `announce`: called with the address when the server accepts requests.
    `has_sockets`: the application also serves WebSockets.
    """

    def __init__(
        self, app: ASGIApp, host: str, port: int, announce: Callable[[str], None], *, has_sockets: bool = False
    ) -> None:
        config = uvicorn.Config(
            app,
            http=HeadTimeoutProtocol,
            ws=WebSocketProtocol if has_sockets else "none",
            ws_max_size=MAX_MESSAGE_BYTES,
            ws_per_message_deflate=False,
            ws_ping_interval=PING_INTERVAL_S,
            ws_ping_timeout=PONG_WITHIN_S,
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            # Ignore headers such as X-Forwarded-For, because any client can send them.
            proxy_headers=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=GRACE_S,
        )
        self._server = _Server(config, lambda: announce(self._address))
        self._host = host
        self._port = port
        self._address = ""

    def stop(self) -> None:
        """Stop: accept no new requests, and end."""
        self._server.should_exit = True

    async def run(self) -> None:
        """Serve until stopped. Raises ConfigError when the address cannot be used.

        An application that fails to start ends the process, so the caller checks the application first.
        """
        with self._listening() as listening:
            host, port = listening.getsockname()[:2]
            self._address = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
            # Not `serve`, which installs its own signal handlers.
            await self._server._serve([listening])

    def _listening(self) -> socket.socket:
        try:
            family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
            # IPPROTO_TCP is explicit, because asyncio sets TCP_NODELAY only on such sockets. Otherwise small responses
            # wait 40 ms for an acknowledgement.
            listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind((self._host, self._port))
            listening.listen(2048)
        except OSError as error:
            raise ConfigError(
                f"the service cannot listen on {self._host}:{self._port} ({error.strerror}): set --host to an address "
                "of this machine and --port to a free port that this user may open"
            ) from error
        return listening
