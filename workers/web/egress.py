"""Where the web tools may go: names, ports and addresses, judged before each connection."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from workers.web.addresses import AddressRules
from workers.web.urls import Address, Target, refused

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
class EgressRules:
    """The operator's rules. Every host is lower case ASCII, as Target has it.

    `allowed_hosts`: `host`, or `host:port` for that port alone; the rules of names, addresses and ports let it pass.
    `only_hosts`: when there are any, all others are refused; `*.example.org` stands for the names below example.org.
    """

    addresses: AddressRules = field(default_factory=AddressRules)
    ports: frozenset[int] = frozenset({80, 443})
    allowed_hosts: frozenset[str] = frozenset()
    only_hosts: frozenset[str] = frozenset()

    def check_target(self, target: Target) -> None:
        """Judge all that is known before a name lookup. Raises ToolFailure(SECURITY_REFUSED)."""
        if self.only_hosts and not any(matches(pattern, target.host) for pattern in self.only_hosts):
            raise refused(f"{target.host} is not among the hosts that the operator lets be fetched")
        if target.port not in self.ports and not self._is_allowed(target):
            raise refused(f"port {target.port} is not fetched from, only {', '.join(map(str, sorted(self.ports)))}")
        if target.literal is not None:
            self.check_addresses(target, [target.literal])
        elif not self._is_allowed(target) and is_private_name(target.host):
            raise refused(f"{target.host} is a name of a private network, not of the internet")

    def check_addresses(self, target: Target, addresses: Sequence[Address]) -> None:
        """Judge every answer for the host: one bad one refuses the URL. Raises ToolFailure(SECURITY_REFUSED)."""
        if self._is_allowed(target):
            return
        for address in addresses:
            why = self.addresses.refusal(address)
            if why is not None:
                raise refused(f"{target.host} leads to an address that is not public ({why})")

    def _is_allowed(self, target: Target) -> bool:
        # A host allowed at one port is not thereby allowed at another.
        host = f"[{target.host}]" if ":" in target.host else target.host
        return target.host in self.allowed_hosts or f"{host}:{target.port}" in self.allowed_hosts


def is_private_name(host: str) -> bool:
    """Whether a name, lower case ASCII, is one of a private network or of a cloud's metadata, wherever it leads."""
    return host == "localhost" or host.endswith(_CLOSED_SUFFIXES) or host in _METADATA_NAMES or "." not in host


def matches(pattern: str, host: str) -> bool:
    """Whether `pattern`, a name or `*.` before one, stands for `host`."""
    return host.endswith(pattern[1:]) if pattern.startswith("*.") else host == pattern
