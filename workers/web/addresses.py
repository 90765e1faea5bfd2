"""Rules for the internet addresses to which the web tools may connect.

Invariant: a connection reaches only an address that passed these rules. This protects the operator's private networks
and the metadata services of clouds from a URL that a model or a redirect chooses (SSRF). The tables are fixed here,
because the tables of the standard library differ between Python versions.
"""

import ipaddress
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from toolcrew.contract.errors import ErrorCode, ToolFailure
from toolcrew.workers.web.urls import Address, Target

MAX_TRIED = 4
"""Maximum number of addresses of a name that a connection attempt tries."""

Network = ipaddress.IPv4Network | ipaddress.IPv6Network

_REFUSED_V4 = {
    "0.0.0.0/8": "this network",
    "10.0.0.0/8": "private",
    "100.64.0.0/10": "shared by a carrier",
    "127.0.0.0/8": "loopback",
    "169.254.0.0/16": "link-local, where cloud metadata is",
    "172.16.0.0/12": "private",
    "192.0.0.0/24": "protocol assignments",
    "192.0.2.0/24": "documentation",
    "192.31.196.0/24": "AS112",
    "192.52.193.0/24": "AMT",
    "192.88.99.0/24": "6to4 relay",
    "192.168.0.0/16": "private",
    "192.175.48.0/24": "AS112",
    "198.18.0.0/15": "benchmarking",
    "198.51.100.0/24": "documentation",
    "203.0.113.0/24": "documentation",
    "224.0.0.0/4": "multicast",
    "240.0.0.0/4": "reserved",
    "255.255.255.255/32": "broadcast",
    "168.63.129.16/32": "a cloud platform's own",
}
_REFUSED_V6 = {
    "2001::/23": "protocol assignments, Teredo among them",
    "2001:db8::/32": "documentation",
    "2002::/16": "6to4",
    "2620:4f:8000::/48": "AS112",
    "3fff::/20": "documentation",
}
_GLOBAL_V6 = ipaddress.IPv6Network("2000::/3")
_V4_BITS = 0xFFFFFFFF
_ISATAP = frozenset({0x00005EFE, 0x02005EFE})


@dataclass(frozen=True)
class Range:
    """A range of addresses of one IP version, as integers, with the reason why the range is refused."""

    version: int
    first: int
    last: int
    reason: str

    def holds(self, address: Address) -> bool:
        return address.version == self.version and self.first <= int(address) <= self.last


def _range(network: Network, reason: str) -> Range:
    return Range(network.version, int(network.network_address), int(network.broadcast_address), reason)


_REFUSED = tuple(_range(ipaddress.ip_network(text), reason) for text, reason in {**_REFUSED_V4, **_REFUSED_V6}.items())


class AddressRules:
    """The tables of this module, the operator's own ranges, and the prefix of a NAT64 gateway. The prefix is needed
    only if the host reaches IPv4 through a NAT64 gateway.
    """

    def __init__(self, own_ranges: Iterable[Network] = (), nat64_prefix: ipaddress.IPv6Network | None = None) -> None:
        """Create the rules. `nat64_prefix`: a /96 network. Raises ValueError when the prefix has another length."""
        if nat64_prefix is not None and nat64_prefix.prefixlen != 96:
            raise ValueError("the NAT64 prefix is not a /96: write it as 64:ff9b::/96")
        self._own = tuple(_range(network, "closed by the operator") for network in own_ranges)
        self._refused = (*_REFUSED, *self._own)
        self._nat64_prefix = nat64_prefix

    def is_closed_by_operator(self, address: Address) -> bool:
        """Return whether the address is in a range that the operator has refused. No rule can allow such an address."""
        return any(closed.holds(address) for closed in self._own)

    def refusal(self, address: Address) -> str | None:
        """Return why connections to the address are refused; None if they are allowed."""
        reason = next((refused.reason for refused in self._refused if refused.holds(address)), None)
        if reason is not None or isinstance(address, ipaddress.IPv4Address):
            return reason
        # An IPv6 address can carry an IPv4 address inside. Check the embedded address; otherwise a private IPv4 address
        # could pass in IPv6 form.
        if self._nat64_prefix is not None and address in self._nat64_prefix:
            return self.refusal(_embedded(address))
        if address not in _GLOBAL_V6 or address.scope_id is not None:
            return "not global"
        if (int(address) >> 32) & _V4_BITS in _ISATAP:
            return self.refusal(_embedded(address))
        return None


def _embedded(address: ipaddress.IPv6Address) -> ipaddress.IPv4Address:
    return ipaddress.IPv4Address(int(address) & _V4_BITS)


def one_of_each_first(addresses: Sequence[Address]) -> list[Address]:
    """Return the addresses in the same order, except that the first address of the other IP version comes second. This
    host may have no route for one of the two versions.
    """
    other = next((address for address in addresses if address.version != addresses[0].version), None)
    if other is None:
        return list(addresses)
    return [addresses[0], other, *(address for address in addresses[1:] if address is not other)]


def check_peer(sock: socket.socket, address: Address, target: Target) -> None:
    """Raise ToolFailure(SECURITY_REFUSED) unless the socket is connected to `address`. A kernel rule or a library may
    redirect a connection, so the address that was checked is compared with the actual peer.
    """
    peer = ipaddress.ip_address(str(sock.getpeername()[0]))
    if int(peer) != int(address) or peer.version != address.version:
        raise ToolFailure(
            ErrorCode.SECURITY_REFUSED,
            f"the connection to {target.host} was redirected to another address and was refused: check the "
            f"proxies and firewall rules of the worker",
        )
