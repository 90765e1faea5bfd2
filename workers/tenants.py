"""Which calls of which tenants a worker runs."""

from collections.abc import Callable, Mapping
from typing import Any

from contract.errors import RefusalReason, ToolFailure
from contract.policy_checks import RELEASING, check_call
from contract.specs import ToolSpec
from contract.tenancy import SandboxTerms
from store.tenants import WorkerTenants


class TenantGate:
    """Lets the calls of tenants through as far as their policies go. `count` is told of calls for tenants that are none."""

    def __init__(self, tenants: WorkerTenants, count: Callable[[RefusalReason], None]) -> None:
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
