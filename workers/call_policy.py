"""Decides which calls of which tenants a worker runs."""

from collections.abc import Callable, Mapping
from typing import Any

from contract.errors import RefusalReason, ToolFailure
from contract.policy_checks import RELEASING, check_call, check_switches
from contract.registry import Switch
from contract.specs import ToolSpec
from contract.tenancy import SandboxTerms
from store.switches import WorkerSwitches
from store.tenants import WorkerTenants
from workers.tools.base import WorkerRegistry


class CallPolicy:
    """Checks calls against this worker's registry, the deployment's switches and the tenants' policies.

    `switches`, `tenants` None: there are none. `count_refusal`: called for a call of an unknown tenant.
    """

    def __init__(
        self,
        registry: WorkerRegistry,
        switches: WorkerSwitches | None = None,
        tenants: WorkerTenants | None = None,
        count_refusal: Callable[[RefusalReason], None] = lambda reason: None,
    ) -> None:
        self._registry = registry
        self._switches = switches
        self._tenants = tenants
        self._count_refusal = count_refusal

    def check_switches(self, spec: ToolSpec, tenant: str, arguments: Mapping[str, Any] | None = None) -> None:
        """Raises ToolFailure for a tool that is turned off: here, for the whole deployment, or for that tenant."""

        def find(name: str) -> Switch | None:
            switch = self._registry.switch(name)
            return self._switches.find(name, tenant) if switch is None and self._switches is not None else switch

        check_switches(find, spec, arguments)

    def admit(self, tenant: str, spec: ToolSpec, arguments: Mapping[str, Any]) -> SandboxTerms | None:
        """Check a call with its prepared arguments. Return what the tenant's sandboxes may have now.

        Raises ToolFailure: TOOL_DISABLED, UNKNOWN_TENANT, PERMISSION_DENIED, SECURITY_REFUSED; ConfigError,
        BrokerUnavailable.
        """
        self.check_switches(spec, tenant, arguments)
        if self._tenants is None:
            return None
        if spec.name in RELEASING:
            return SandboxTerms()
        try:
            policy = self._tenants.policy(tenant)
        except ToolFailure:
            self._count_refusal("wrong_tenant")
            raise
        check_call(policy, tenant, spec, arguments)
        return policy.sandbox
