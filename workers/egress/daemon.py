"""The egress proxy as a process: listens, serves peers with an allowed uid, and ends open connections at shutdown."""

import asyncio
import contextlib
import resource
import signal
import socket

import structlog

from toolcrew.contract.errors import ConfigError
from toolcrew.contract.settings import EgressSettings
from toolcrew.workers.egress.allowances import ConnectionQuotas
from toolcrew.workers.egress.authority import Authority
from toolcrew.workers.egress.destinations import LOOKUPS_PER_TENANT, Destinations, ResolverPool
from toolcrew.workers.egress.interception import SecretProxy, build_upstream_context
from toolcrew.workers.egress.limits import ProxyLimits
from toolcrew.workers.egress.secrets import SecretUses
from toolcrew.workers.egress.serving import Proxy
from toolcrew.workers.lifeline import hold_lifeline
from toolcrew.workers.unix_listening import find_peer_uid, open_listener, socket_mode, unlink_own
from toolcrew.workers.web.addresses import AddressRules
from toolcrew.workers.web.resolver import SystemResolver

log = structlog.get_logger(__name__)

ORPHAN_GRACE_S = 5.0
"""Seconds that the proxy runs after the process of an embedded stack has died. The proxy has nothing to save."""
MAX_CONNECTIONS = 2048
"""Maximum number of connections of all sessions. One tenant may have half of them."""
_SPARE_FILES = 256
_ACCEPT_PAUSE_S = 0.1


async def run(settings: EgressSettings) -> None:
    """Serve until SIGTERM or SIGINT. Raises OSError when the socket cannot be opened, and ConfigError when the process
    may open too few files.
    """
    hold_lifeline(ORPHAN_GRACE_S)
    _allow_files(MAX_CONNECTIONS)
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    resolver_pool = ResolverPool(lambda: SystemResolver(LOOKUPS_PER_TENANT))
    addresses = AddressRules(settings.refuse_ranges, settings.nat64_prefix)
    limits = ProxyLimits()
    # One tenant alone cannot use up all connections.
    quotas = ConnectionQuotas(max_tenant_connections=MAX_CONNECTIONS // 2)
    secrets = SecretProxy(Authority(), SecretUses(), build_upstream_context())
    proxy = Proxy(Destinations(resolver_pool, addresses, limits), quotas, limits, secrets)
    try:
        await serve(settings, proxy, stop)
    finally:
        resolver_pool.close()
    log.info("egress_stopped")


async def serve(
    settings: EgressSettings, proxy: Proxy, stop: asyncio.Event, max_connections: int = MAX_CONNECTIONS
) -> None:
    """Listen until `stop`, then end every connection. Raises OSError when the socket cannot be opened."""
    path = settings.egress_socket
    uids = settings.allowed_uids()
    listener = open_listener(path, socket_mode(uids), owner="egress proxy", variable="TOOLCREW_EGRESS_SOCKET")
    inode = path.stat().st_ino
    connections = _Listener(proxy, uids, max_connections)
    accepting = asyncio.ensure_future(connections.accept(listener))
    stopping = asyncio.ensure_future(stop.wait())
    log.info("egress_ready", socket=str(path))
    try:
        await asyncio.wait({accepting, stopping}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        unlink_own(path, inode)
        for task in (accepting, stopping):
            task.cancel()
        ends = await asyncio.gather(accepting, stopping, return_exceptions=True)
        listener.close()
        await connections.close()
    if isinstance(ends[0], Exception):
        raise ends[0]


class _Listener:
    """Accepts connections and serves each in a task."""

    def __init__(self, proxy: Proxy, uids: frozenset[int], max_connections: int) -> None:
        self._proxy = proxy
        self._uids = uids
        self._max_connections = max_connections
        self._connections: set[asyncio.Task[None]] = set()

    async def accept(self, listener: socket.socket) -> None:
        """Accept connections until the task is cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(listener)
            except OSError as error:
                # The process has no free descriptor, or the client left at once. Neither may end the proxy for other
                # clients.
                log.warning("egress_accept_failed", error=str(error))
                await asyncio.sleep(_ACCEPT_PAUSE_S)
                continue
            self._start_connection(sock)

    async def close(self) -> None:
        for task in list(self._connections):
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    def _start_connection(self, sock: socket.socket) -> None:
        uid = find_peer_uid(sock)
        if uid not in self._uids:
            log.warning("peer_refused", uid=uid)
            sock.close()
            return
        is_full = len(self._connections) >= self._max_connections
        task = asyncio.get_running_loop().create_task(
            self._proxy.refuse_connection(sock) if is_full else _serve(self._proxy, sock)
        )
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)


async def _serve(proxy: Proxy, sock: socket.socket) -> None:
    try:
        await proxy.serve(sock)
    except Exception:  # the outermost handler: a bug must end only this connection
        log.exception("egress_bug")


def _allow_files(max_connections: int) -> None:
    """Raise the limit of open files: each connection has two sockets. Raises ConfigError when the host does not allow
    it.
    """
    needed_files = 2 * max_connections + _SPARE_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < needed_files:
        with contextlib.suppress(ValueError, OSError):  # the check below reports it
            resource.setrlimit(resource.RLIMIT_NOFILE, (needed_files, hard))
        if resource.getrlimit(resource.RLIMIT_NOFILE)[0] < needed_files:
            raise ConfigError(
                f"{max_connections} connections need {needed_files} open files, and the limit of this process is "
                f"{hard}: "
                "raise the limit (ulimit -n)"
            )
