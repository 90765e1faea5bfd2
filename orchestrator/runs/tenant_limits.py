"""Reads the limits of tenants from Redis, for checks before a run or batch is queued."""

from collections.abc import Awaitable, Callable, Collection

from toolcrew.contract.errors import ConfigError, ErrorCode, ToolFailure
from toolcrew.contract.hosts import RELEASE, HostReport
from toolcrew.orchestrator.batches.limit_check import TenantLimits
from toolcrew.orchestrator.batches.tool_check import find_unknown_tools
from toolcrew.orchestrator.dispatch.pool_connection import PoolConnection
from toolcrew.store.batches import BatchItem
from toolcrew.store.hosts import HostStore
from toolcrew.store.secrets import SecretStore
from toolcrew.store.sessions import SessionStore

MAX_CHECKED_SESSIONS = 1000
"""Limit of the sessions that one check looks up. Each lookup is a request to Redis."""


CheckLimits = Callable[[str, BatchItem], Awaitable[None]]
"""Checks a run of a tenant before the run is queued. Raises ToolFailure(INVALID_ARGUMENTS)."""


async def accept_item(_tenant: str, _item: BatchItem) -> None:
    """Accept every run: the check of parts that are used without a pool."""


class LimitReader:
    """Reads the limits of any tenant of a pool. Reports of hosts are up to a few seconds old."""

    def __init__(self, pool: PoolConnection, deployment: str) -> None:
        self._pool = pool
        self._hosts = HostStore(pool.redis, deployment)
        self._sessions = SessionStore(pool.redis, deployment)
        self._secrets = SecretStore(pool.redis, deployment, pool.keys)

    async def read(self, tenant: str, sessions: Collection[str] = ()) -> TenantLimits:
        """Return the limits of a tenant. `sessions`: the sessions that the items name.

        Raises BrokerUnavailable, ToolFailure(UNKNOWN_TENANT).
        """
        policy = await self._pool.tenants.policy(tenant)
        tenant_class = policy.sandbox.tenant_class
        hosts = [host for host in await self._hosts.reports() if _has_class(host, tenant_class)]
        try:
            tools = {spec.name: spec for spec in (await self._pool.offers.of(tenant)).tools}
        except ConfigError:
            tools = None
        secrets = frozenset(await self._secrets.all(tenant))
        return TenantLimits(policy, hosts, tools, secrets, await self._find_open(tenant, sorted(sessions)))

    async def check_run(self, tenant: str, item: BatchItem) -> None:
        """Raise ToolFailure(INVALID_ARGUMENTS) if a run asks for more than its tenant has, or for a tool that does not
        exist. A tool that no worker serves now exists.
        """
        forked = item.environment.fork
        limits = await self.read(tenant, () if forked is None else (forked,))
        problem = next(limits.find_errors(item), None)
        if problem is None and limits.tools is not None:
            names = {name for name, spec in limits.tools.items() if spec.audience == "model"}
            problem = next(find_unknown_tools(item, names, self._exists, tenant), None)
        if problem is not None:
            raise ToolFailure(ErrorCode.INVALID_ARGUMENTS, problem)

    def _exists(self, tool: str) -> bool:
        """Return whether a tool exists that no worker serves now."""
        return self._pool.offers.explain_missing(tool) is not None

    async def _find_open(self, tenant: str, sessions: list[str]) -> set[str]:
        """Return those of the sessions that are open, and all sessions above the limit of lookups."""
        checked = sessions[:MAX_CHECKED_SESSIONS]
        found = {session for session in checked if await self._sessions.find(tenant, session) is not None}
        return found | set(sessions[MAX_CHECKED_SESSIONS:])


def _has_class(host: HostReport, tenant_class: str) -> bool:
    return host.kind == "sandbox" and host.release == RELEASE and tenant_class in host.classes
