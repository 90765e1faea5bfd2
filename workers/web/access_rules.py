"""Rules for the names, ports and addresses that the web tools may reach. Every connection is checked first."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from toolcrew.workers.web.addresses import AddressRules
from toolcrew.workers.web.urls import Address, Target, refused

_CLOSED_SUFFIXES = (".localhost", ".local", ".internal", ".home.arpa", ".onion")
_METADATA_NAMES = frozenset(
    {
        "metadata.tencentyun.com",
        "metadata.packet.net",
        "metadata.platformequinix.com",
        "metadata.azure.com",
        "metadata.oraclecloud.com",
    }
)


@dataclass(frozen=True)
class WebAccessRules:
    """The operator's rules. Every host is lower-case ASCII, as in Target.

    `allowed_hosts`: `host`, or `host:port` for that port only. A listed host passes the rules for names, addresses
    and ports. `only_hosts`: if not empty, all other hosts are refused. `*.example.org` matches every name below
    example.org.
    """

    addresses: AddressRules = field(default_factory=AddressRules)
    ports: frozenset[int] = frozenset({80, 443})
    allowed_hosts: frozenset[str] = frozenset()
    only_hosts: frozenset[str] = frozenset()

    def check_target(self, target: Target) -> None:
        """Check everything that is known before the name lookup. Raises ToolFailure(SECURITY_REFUSED)."""
        if self.only_hosts and not any(matches(pattern, target.host) for pattern in self.only_hosts):
            raise refused(f"{target.host} is not among the hosts that the operator allows; use another url")
        if target.port not in self.ports and not self._is_allowed(target):
            raise refused(
                f"port {target.port} is not allowed, only {', '.join(map(str, sorted(self.ports)))}; use another url"
            )
        if target.literal is not None:
            self.check_addresses(target, [target.literal])
        elif not self._is_allowed(target) and is_private_name(target.host):
            raise refused(f"{target.host} is a name of a private network, not of the internet; use another url")

    def check_addresses(self, target: Target, addresses: Sequence[Address]) -> None:
        """Check every address of the host. A single forbidden address refuses the URL. Raises
        ToolFailure(SECURITY_REFUSED).
        """
        if self._is_allowed(target):
            return
        for address in addresses:
            reason = self.addresses.refusal(address)
            if reason is not None:
                raise refused(f"{target.host} has an address that is not public ({reason}); use another url")

    def _is_allowed(self, target: Target) -> bool:
        # An entry with a port allows only that port of the host.
        host = f"[{target.host}]" if ":" in target.host else target.host
        return target.host in self.allowed_hosts or f"{host}:{target.port}" in self.allowed_hosts


def is_private_name(host: str) -> bool:
    """Return whether a lower-case ASCII name belongs to a private network or to a cloud's metadata service, whatever
    its address is.
    """
    return host == "localhost" or host.endswith(_CLOSED_SUFFIXES) or host in _METADATA_NAMES or "." not in host


def matches(pattern: str, host: str) -> bool:
    """Return whether `host` matches `pattern`: a name, or `*.` and a name."""
    return host.endswith(pattern[1:]) if pattern.startswith("*.") else host == pattern
