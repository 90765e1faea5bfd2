"""What a process knows of the tenants' policies, and whether that is fresh enough. Safe between threads."""

import threading
import time
from collections.abc import Callable

from contract.errors import ConfigError
from contract.signing import SigningKeys
from contract.tenancy import POLICY_FRESH_S, TenantLook, TenantPolicy

MAX_KNOWN = 4096
"""Policies that are remembered; of more the one learned first is forgotten, and read again when it is needed."""


class KnownTenants:
    """Whoever uses it reads in Redis, and says when it asked: an answer that was overtaken by a later one changes nothing."""

    def __init__(self, keys: SigningKeys, clock: Callable[[], float] = time.monotonic) -> None:
        self._keys = keys
        self.clock = clock
        self._lock = threading.Lock()
        self._policies: dict[str, TenantPolicy] = {}
        self._version: bytes | None = None
        self._asked_at = float("-inf")
        self._had_tenants = False

    def is_stale(self) -> bool:
        """Whether the version has to be asked for before anything is believed."""
        return self.clock() - self._asked_at >= POLICY_FRESH_S

    def find(self, tenant: str) -> TenantPolicy | None:
        """The policy as far as it is known; None: look."""
        return self._policies.get(tenant)

    def confirm(self, version: bytes | None, asked_at: float) -> None:
        """This is the version now. Without one nothing says whether anything has changed, and all is looked at again."""
        with self._lock:
            if asked_at >= self._asked_at:
                self._turn_to(version, is_known_same=version is not None)
                self._asked_at = asked_at

    def learn(self, tenant: str, look: TenantLook, asked_at: float) -> TenantPolicy:
        """The tenant's policy, from a look into the hash. Raises as TenantLook.policy does, and ConfigError when Redis has lost
        the tenants that this process has seen: it serves no name with the default policy then."""
        if look.is_open and self._had_tenants:
            raise ConfigError(
                "Redis has lost the registered tenants, so nothing is served: restore its data, or register the tenants again "
                "(toolcrew tenants add NAME)"
            )
        self._had_tenants = self._had_tenants or not look.is_open
        with self._lock:
            if asked_at >= self._asked_at:
                self._turn_to(look.version, is_known_same=True)
        policy = look.policy(tenant, self._keys)
        with self._lock:
            if look.version == self._version:
                while len(self._policies) >= MAX_KNOWN:
                    del self._policies[next(iter(self._policies))]
                self._policies[tenant] = policy
        return policy

    def forget(self) -> None:
        """Believe nothing any more: this process has changed something."""
        with self._lock:
            self._policies.clear()
            self._asked_at = float("-inf")

    def _turn_to(self, version: bytes | None, *, is_known_same: bool) -> None:
        if version != self._version or not is_known_same:
            self._policies.clear()
        self._version = version
