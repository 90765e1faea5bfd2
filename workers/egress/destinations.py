"""Connects to the destination of a request: check the tenant's list of hosts, resolve the name once, check every
address, connect to a checked address.

Invariant: a sandbox reaches only hosts of its tenant's list. It reaches a private address only if an operator has
listed the host. The name is resolved once and the socket connects to exactly the checked addresses. A second lookup
could return another address (DNS rebinding). The peer of the connected socket is checked again.
"""

import asyncio
import errno
import ipaddress
import os
import socket
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from toolcrew.contract.errors import ToolFailure
from toolcrew.contract.tenant_classes import EgressRules
from toolcrew.workers.egress.limits import ProxyLimits
from toolcrew.workers.egress.outcomes import EgressOutcome, Refusal, refuse, refuse_bad_gateway
from toolcrew.workers.web.access_rules import is_private_name, matches
from toolcrew.workers.web.addresses import MAX_TRIED, AddressRules, check_peer, one_of_each_first
from toolcrew.workers.web.limits import Deadline
from toolcrew.workers.web.resolver import Resolver
from toolcrew.workers.web.urls import Address, Target

MAX_SHOWN = 20
LOOKUPS_PER_TENANT = 4
MAX_LOOKUP_THREADS = 64
MAX_TENANTS = 1000
"""Maximum number of tenants with a stored resolver."""
_PRIVATE = tuple(
    ipaddress.ip_network(text)
    for text in ("10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "fc00::/7", "::1/128")
)
_METADATA = frozenset(ipaddress.ip_address(text) for text in ("100.100.100.200", "fd00:ec2::254"))


class ResolverPool:
    """Looks up names in threads, a few at once per tenant. Slow name servers of one tenant delay no other tenant.

    `open_resolver` returns a tenant's resolver, which may block. The resolver is kept, because it counts lookups that
    still hang.
    """

    def __init__(self, open_resolver: Callable[[], Resolver]) -> None:
        self._open_resolver = open_resolver
        self._threads = ThreadPoolExecutor(MAX_LOOKUP_THREADS, thread_name_prefix="lookup")
        self._tenants: OrderedDict[str, tuple[Resolver, asyncio.Semaphore]] = OrderedDict()

    async def resolve(self, tenant: str, host: str, limit_s: float) -> tuple[Address, ...]:
        """Return the addresses of the name. Raises Refusal when it has none, or none in time."""
        # A name server of a tenant may never answer, and a thread cannot be stopped. So each tenant has only a few
        # threads.
        resolver, slots = self._find(tenant)
        async with slots:
            lookup = asyncio.get_running_loop().run_in_executor(
                self._threads, resolver.resolve, host, Deadline(limit_s), limit_s
            )
            try:
                return await lookup
            except ToolFailure as failure:
                raise refuse_bad_gateway(EgressOutcome.UNRESOLVED, failure.message) from None

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _find(self, tenant: str) -> tuple[Resolver, asyncio.Semaphore]:
        if tenant not in self._tenants:
            self._tenants[tenant] = (self._open_resolver(), asyncio.Semaphore(LOOKUPS_PER_TENANT))
        self._tenants.move_to_end(tenant)
        # A tenant whose resolver was dropped gets a new one. Until its old lookups end, the tenant has a few more
        # threads than allowed.
        if len(self._tenants) > MAX_TENANTS:
            self._tenants.popitem(last=False)
        return self._tenants[tenant]


class Destinations:
    """Opens connections to allowed destinations."""

    def __init__(self, resolver_pool: ResolverPool, addresses: AddressRules, limits: ProxyLimits) -> None:
        self._resolver_pool = resolver_pool
        self._addresses = addresses
        self._limits = limits

    async def connect(self, tenant: str, target: Target, rules: EgressRules) -> socket.socket:
        """Return a connected, non-blocking socket. Raises Refusal, whose text contains no address."""
        check_listed(target, rules)
        if target.literal is None:
            addresses = await self._resolver_pool.resolve(tenant, target.host, self._limits.resolve_s)
        else:
            addresses = (target.literal,)
        self._check_addresses(target, addresses, rules)
        return await self._connect_to_first(target, one_of_each_first(addresses)[:MAX_TRIED])

    def _check_addresses(self, target: Target, addresses: Sequence[Address], rules: EgressRules) -> None:
        """Raise Refusal if any address of the host is forbidden, so that the result does not depend on which address is
        tried.
        """
        may_be_private = _is_listed(target, rules.private_hosts)
        for address in addresses:
            is_exception = (
                may_be_private and _is_private(address) and not self._addresses.is_closed_by_operator(address)
            )
            if not is_exception and self._addresses.refusal(address) is not None:
                raise refuse(
                    EgressOutcome.ADDRESS_REFUSED,
                    f"{target.host} has no public address, and sandboxes may not use other addresses: use another "
                    f"host, or ask the operator to add it to private_hosts",
                )

    async def _connect_to_first(self, target: Target, addresses: Sequence[Address]) -> socket.socket:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._limits.connect_s
        failure: Refusal | None = None
        for index, address in enumerate(addresses):
            # Each address gets an equal share of the remaining time: a silent first address must not use up the time of
            # the others.
            share_s = max(0.05, (deadline - loop.time()) / (len(addresses) - index))
            try:
                async with asyncio.timeout(share_s):
                    return await _connect(target, address)
            except TimeoutError:
                failure = _unreachable(target, f"takes no connection within {self._limits.connect_s:g} s")
            except OSError as error:
                # Use the text of the error number: the error's own text contains the address.
                failure = _unreachable(
                    target, f"refused the connection ({os.strerror(error.errno or errno.ECONNREFUSED)})"
                )
            except ToolFailure as error:
                failure = refuse(EgressOutcome.ADDRESS_REFUSED, error.message)
        raise failure or _unreachable(target, "has no address")


def check_listed(target: Target, rules: EgressRules) -> None:
    """Check the host and the port before a lookup: a name that is not listed is not resolved. Raises Refusal."""
    # A lookup is a message to the outside: a program could put data into a name and ask the attacker's name server.
    if not _is_listed(target, rules.hosts):
        raise refuse(
            EgressOutcome.HOST_REFUSED,
            f"{target.host} is not on this tenant's list; allowed: {_format_hosts(rules.hosts)}",
        )
    if target.port not in rules.ports:
        ports = ", ".join(map(str, sorted(rules.ports))) or "none"
        raise refuse(
            EgressOutcome.PORT_REFUSED,
            f"port {target.port} of {target.host} is not allowed for this tenant; allowed ports: {ports}",
        )
    if target.literal is None and is_private_name(target.host) and not _is_listed(target, rules.private_hosts):
        raise refuse(
            EgressOutcome.HOST_REFUSED,
            f"{target.host} is a name of a private network: ask the operator to add it to private_hosts as well",
        )


def _is_listed(target: Target, patterns: Sequence[str]) -> bool:
    """Return whether the list contains the target. An IP address matches only itself, because `*.0.0.1` is a pattern
    for names.
    """
    if target.literal is not None:
        return target.host in patterns
    return any(matches(pattern, target.host) for pattern in patterns)


def _is_private(address: Address) -> bool:
    """Return whether the address is one of those that an operator may allow with `private_hosts`. Link-local, metadata
    and multicast addresses are never allowed.
    """
    # Metadata services answer with credentials of the machine. Their addresses lie in ranges that an operator may open.
    return address not in _METADATA and any(address in network for network in _PRIVATE)


def _format_hosts(hosts: Sequence[str]) -> str:
    if not hosts:
        return "none at all"
    more = f" and {len(hosts) - MAX_SHOWN} more" if len(hosts) > MAX_SHOWN else ""
    return ", ".join(hosts[:MAX_SHOWN]) + more


async def _connect(target: Target, address: Address) -> socket.socket:
    sock = socket.socket(socket.AF_INET if address.version == 4 else socket.AF_INET6, socket.SOCK_STREAM)
    try:
        # Connect to the address and not to the name: the name must not be resolved a second time.
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await asyncio.get_running_loop().sock_connect(sock, (str(address), target.port))
        check_peer(sock, address, target)
    except BaseException:
        sock.close()
        raise
    return sock


def _unreachable(target: Target, problem: str) -> Refusal:
    return refuse_bad_gateway(
        EgressOutcome.UNREACHABLE,
        f"{target.host} port {target.port} {problem}: check host and port, or try again later",
    )
