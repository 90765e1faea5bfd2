"""The stream gateway as a process: listens, publishes its record, and ends its streams at shutdown."""

import asyncio
import contextlib
import ipaddress
import os
import resource
import secrets
import signal
import socket
import time
from functools import partial

import structlog

from toolcrew.concurrency.tasks import cancel_all, in_thread
from toolcrew.contract.errors import BrokerUnavailable, ConfigError, SandboxUnavailable
from toolcrew.contract.names import host_queue
from toolcrew.contract.settings import StreamGatewaySettings
from toolcrew.contract.signing import SigningKeys
from toolcrew.contract.stream_gateways import RENEW_S, StreamGateway
from toolcrew.store.clock import SharedClock, read_clock
from toolcrew.store.connection import RedisClient, open_redis
from toolcrew.store.stream_gateways import StreamGatewayStore
from toolcrew.workers.lifeline import hold_lifeline
from toolcrew.workers.sandbox_client import SandboxClient
from toolcrew.workers.stream_channels import open_channel
from toolcrew.workers.stream_gateway.certificate import GatewayCertificate, make_certificate
from toolcrew.workers.stream_gateway.gateway import HANDSHAKE_S, MAX_UNPROVED, StreamGatewayServer
from toolcrew.workers.stream_gateway.limits import StreamLimits
from toolcrew.workers.stream_gateway.tickets import TicketGate

log = structlog.get_logger(__name__)

NICE = 5
"""Calls come before streams: the worker and sandboxd have the usual priority."""
ORPHAN_GRACE_S = 5.0
SANDBOXD_POLL_S = 0.2
_BACKLOG = 256
_SPARE_FILES = 512
_ACCEPT_PAUSE_S = 0.1


async def run(settings: StreamGatewaySettings) -> None:
    """Serve until SIGTERM or SIGINT. Raises OperatorError, and OSError when the port is taken."""
    hold_lifeline(ORPHAN_GRACE_S)
    os.nice(NICE)
    _allow_files(StreamLimits().host_streams)
    broker = settings.broker()
    keys, redis = broker.signing_keys(), open_redis(broker)
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    try:
        with _listen(settings) as listener:
            await GatewayDaemon(settings, keys, redis, listener).serve(stop)
    finally:
        await redis.aclose()
    log.info("stream_gateway_stopped")


class GatewayDaemon:
    """The gateway of a host. A restarted sandboxd has another queue, and gets a new gateway in the same process."""

    def __init__(
        self, settings: StreamGatewaySettings, keys: SigningKeys, redis: RedisClient, listener: socket.socket
    ) -> None:
        self._settings = settings
        self._keys = keys
        self._redis = redis
        self._listener = listener
        self._records = StreamGatewayStore(redis, settings.deployment, keys)
        self._certificate = make_certificate()
        self._clock = SharedClock()

    async def serve(self, stop: asyncio.Event) -> None:
        """Serve until `stop`."""
        stopping = asyncio.create_task(stop.wait())
        while not stop.is_set():
            serving = asyncio.create_task(self._serve_boot())
            await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if not serving.done():
                await cancel_all([serving])
            if not serving.cancelled():
                serving.result()
        stopping.cancel()

    async def _serve_boot(self) -> None:
        """Serve the sandboxd that runs now, until it is replaced."""
        boot = await self._await_boot()
        gateway = self._describe(host_queue(self._settings.host, boot))
        gate = TicketGate(self._keys, gateway.id, gateway.queue, self._clock)
        open_session = partial(open_channel, self._settings.sandboxd_socket)
        server = StreamGatewayServer(self._keys, self._certificate.digest, gate, open_session)
        accepting = asyncio.create_task(Listener(server, self._certificate).accept(self._listener))
        log.info("stream_gateway_ready", queue=gateway.queue, address=gateway.addresses[0], port=gateway.port)
        try:
            await self._keep_record(gateway, boot)
        finally:
            await cancel_all([accepting])
            with contextlib.suppress(BrokerUnavailable):  # then the record expires
                await self._records.withdraw(gateway)
            await server.close()

    def _describe(self, queue: str) -> StreamGateway:
        return StreamGateway(
            id=secrets.token_hex(16),
            queue=queue,
            addresses=(self._settings.stream_address,),
            port=self._listener.getsockname()[1],
            certificate=self._certificate.digest,
            started_at=time.time(),
        )

    async def _keep_record(self, gateway: StreamGateway, boot: str) -> None:
        """Renew the record of the gateway until another sandboxd runs."""
        while True:
            try:
                self._clock.learn(await read_clock(self._redis))
                await self._records.publish(gateway)
            except BrokerUnavailable as error:
                log.warning("stream_gateway_not_published", error=str(error))
            await asyncio.sleep(RENEW_S)
            if await self._read_boot() not in (boot, None):
                log.warning("stream_gateway_renamed", queue=gateway.queue)
                return

    async def _await_boot(self) -> str:
        while True:
            boot = await self._read_boot()
            if boot is not None:
                return boot
            await asyncio.sleep(SANDBOXD_POLL_S)

    async def _read_boot(self) -> str | None:
        """Return the id of the sandboxd that runs; None when it does not answer."""
        try:
            return await in_thread(self._ask_boot, "sandboxd-boot")
        except SandboxUnavailable:
            return None

    def _ask_boot(self) -> str:
        with SandboxClient(self._settings.sandboxd_socket) as sandboxd:
            return str(sandboxd.status()["boot"])


class Listener:
    """Accepts connections and encrypts them. Few connections at a time may be without a proof."""

    def __init__(self, server: StreamGatewayServer, certificate: GatewayCertificate) -> None:
        self._server = server
        self._context = certificate.context
        self._connecting: dict[asyncio.Task[None], None] = {}

    async def accept(self, listener: socket.socket) -> None:
        """Accept connections until the task is cancelled."""
        try:
            while True:
                task = asyncio.create_task(self._connect(await self._accept_one(listener)))
                self._connecting[task] = None
                task.add_done_callback(lambda ended: self._connecting.pop(ended, None))
                # The oldest one leaves, because connections that send nothing must not keep a real client waiting.
                if len(self._connecting) > MAX_UNPROVED:
                    oldest = next(iter(self._connecting))
                    del self._connecting[oldest]
                    oldest.cancel()
                await asyncio.sleep(0)  # the task begins, so that it closes its socket when it is cancelled
        finally:
            await cancel_all(self._connecting)

    async def _accept_one(self, listener: socket.socket) -> socket.socket:
        while True:
            try:
                return (await asyncio.get_running_loop().sock_accept(listener))[0]
            except OSError as error:
                # The process has no free descriptor, or the client left at once. Neither may end the gateway.
                log.warning("stream_client_not_accepted", error=str(error))
                await asyncio.sleep(_ACCEPT_PAUSE_S)

    async def _connect(self, sock: socket.socket) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                self._server.accept, sock, ssl=self._context, ssl_handshake_timeout=HANDSHAKE_S
            )
        except (OSError, TimeoutError) as error:
            log.debug("stream_client_refused", reason=str(error) or "no TLS handshake in time")


def _listen(settings: StreamGatewaySettings) -> socket.socket:
    """Return a listening socket: of loopback if the published address is there, else of all addresses."""
    port = settings.stream_port
    if settings.stream_address == "localhost" or _is_loopback(settings.stream_address):
        family = socket.AF_INET6 if ":" in settings.stream_address else socket.AF_INET
        listener = socket.create_server((settings.stream_address, port), family=family, backlog=_BACKLOG)
    elif socket.has_dualstack_ipv6():
        listener = socket.create_server(("", port), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True)
    else:
        listener = socket.create_server(("", port), backlog=_BACKLOG)
    listener.setblocking(False)
    return listener


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def _allow_files(streams: int) -> None:
    """Raise the limit of open files: each session with streams has two descriptors. Raises ConfigError when the host
    does not allow it.
    """
    needed_files = 2 * streams + _SPARE_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < needed_files:
        with contextlib.suppress(ValueError, OSError):  # the check below reports it
            resource.setrlimit(resource.RLIMIT_NOFILE, (needed_files, hard))
        if resource.getrlimit(resource.RLIMIT_NOFILE)[0] < needed_files:
            raise ConfigError(
                f"{streams} streams need {needed_files} open files, and the limit of this process is {hard}: raise the "
                "limit (ulimit -n)"
            )
