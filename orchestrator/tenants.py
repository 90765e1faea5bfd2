"""Who the tenants are and what each may have: asked before a call is sent."""

from typing import Protocol

from contract.tenancy import TenantPolicy


class TenantSource(Protocol):
    """Where policies come from."""

    async def policy(self, tenant: str) -> TenantPolicy:
        """What the tenant may have now. Raises ToolFailure(UNKNOWN_TENANT), BrokerUnavailable."""
        ...


class OpenTenants:
    """For programs without a pool: every tenant has the default policy."""

    async def policy(self, tenant: str) -> TenantPolicy:
        return TenantPolicy()
