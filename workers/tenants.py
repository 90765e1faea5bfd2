"""What each tenant may have, as a worker knows it, and which calls it therefore runs."""

import time
from collections.abc import Callable, Mapping
from typing import Any

import redis

from contract.errors import BrokerUnavailable, RefusalReason, ToolFailure
from contract.known_tenants import KnownTenants
from contract.names import tenants_key
from contract.policy_checks import RELEASING, check_call
from contract.signing import SigningKeys
from contract.specs import ToolSpec
from contract.tenancy import DEFAULT_TENANT, VERSION_FIELD, SandboxTerms, TenantLook, TenantPolicy


class Tenants:
    """The tenants in Redis. Their version is read at most every POLICY_FRESH_S seconds, a policy when it is first needed or something has
    changed. Safe between threads."""

    def __init__(self, client: "redis.Redis", deployment: str, keys: SigningKeys, clock: Callable[[], float] = time.monotonic) -> None:
        self._client = client
        self._key = tenants_key(deployment)
        self._known = KnownTenants(keys, clock)

    def policy(self, tenant: str) -> TenantPolicy:
        """What the tenant may have now.

        Raises ToolFailure(UNKNOWN_TENANT), ConfigError for a policy that cannot be verified or read, BrokerUnavailable: the call is then not run.
        """
        try:
            if self._known.is_stale():
                asked_at = self._known.clock()
                version: Any = self._client.hget(self._key, VERSION_FIELD)
                self._known.confirm(version, asked_at)
            return self._known.find(tenant) or self._look(tenant)
        except redis.RedisError as error:
            raise BrokerUnavailable(
                f"the call was not run: Redis did not say what tenant {tenant} may have ({error}); see that Redis is up"
            ) from error

    def _look(self, tenant: str) -> TenantPolicy:
        asked_at = self._known.clock()
        pipe = self._client.pipeline(transaction=True)
        pipe.hmget(self._key, [VERSION_FIELD, tenant, DEFAULT_TENANT])
        pipe.hlen(self._key)
        (version, own, default), fields = pipe.execute()
        return self._known.learn(tenant, TenantLook(version, own, default, fields), asked_at)


class TenantGate:
    """Lets the calls of tenants through as far as their policies go. `count` is told of calls for tenants that are none."""

    def __init__(self, tenants: Tenants, count: Callable[[RefusalReason], None]) -> None:
        self._tenants = tenants
        self._count = count

    def admit(self, tenant: str, spec: ToolSpec, arguments: Mapping[str, Any]) -> SandboxTerms:
        """What the tenant's sandboxes may have now. By prepared arguments.

        Raises ToolFailure: UNKNOWN_TENANT, PERMISSION_DENIED, SECURITY_REFUSED; ConfigError, BrokerUnavailable.
        """
        if spec.name in RELEASING:
            return SandboxTerms()
        try:
            policy = self._tenants.policy(tenant)
        except ToolFailure:
            self._count("wrong_tenant")
            raise
        check_call(policy, tenant, spec, arguments)
        return policy.sandbox
