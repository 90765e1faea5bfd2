"""Budgets of tenants: the amounts used on this day and in this month, and the notices that a budget is nearly or
completely used up. This module only checks; store/usage.py counts what is used.

Each process reads the usage of a tenant at most once every POLICY_FRESH_S seconds, and only if the tenant has budgets.
So calls need no extra read, and a budget is in force everywhere within 2 seconds.
"""

import time
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta

import redis.asyncio

from toolcrew.concurrency.tasks import SharedReads
from toolcrew.contract.clock import format_instant
from toolcrew.contract.errors import ErrorCode, ToolFailure
from toolcrew.contract.names import audit_key
from toolcrew.contract.session_views import BudgetState
from toolcrew.contract.tenancy import POLICY_FRESH_S, Budgets
from toolcrew.store.audit import AUDIT_LUA, Actor, AuditAction, build_entry, entry_text
from toolcrew.store.connection import broker_errors
from toolcrew.store.scripts import Script
from toolcrew.store.usage import DAY_S, UNITS, UsageStore, usage_prefix
from toolcrew.telemetry.logs import get_logger

log = get_logger(__name__)

NOTICES_TTL_S = 62 * DAY_S
_METRICS = {
    "tokens": ("prompt_tokens", "completion_tokens"),
    "cost": ("cost_millionths",),
    "cpu_s": ("cpu_us",),
    "stored_bytes": ("stored_bytes",),
}
"""Name of a budget -> names of the used amounts whose sum counts for the budget."""
_ACTOR = Actor(key="local", role="operator", name="toolcrew")

# Returns 1 for the first notice of its text.
_ADD_NOTICE = Script(
    AUDIT_LUA
    + """
if redis.call('HEXISTS', notices, notice) == 1 then return 0 end
audit(audit_log, entry)
redis.call('HSET', notices, notice, 1)
redis.call('EXPIRE', notices, ttl_s)
return 1
""",
    keys=("notices", "audit_log"),
    args=("notice", "ttl_s", "entry"),
)


class BudgetStore:
    """Reads what tenants have used of their budgets. Every method raises BrokerUnavailable when Redis does not
    answer.
    """

    def __init__(self, client: "redis.asyncio.Redis", deployment: str) -> None:
        self._client = client
        self._deployment = deployment
        self._usage = UsageStore(client, deployment)
        self._reads = SharedReads[list[BudgetState]]()
        self._read: dict[str, tuple[float, Budgets, list[BudgetState]]] = {}

    async def check(self, tenant: str, budgets: Budgets) -> None:
        """Raise ToolFailure(BUDGET_EXCEEDED) with the time of the reset if a budget is used up. The metadata has
        `budget`, `resets_at` in ISO 8601, and `retry_after_s`. Also writes the notices about budgets, each one once per
        day or month.
        """
        read_at, checked, states = self._read.get(tenant, (float("-inf"), None, []))
        if checked != budgets or time.monotonic() - read_at >= POLICY_FRESH_S:
            states = await self._reads.read(tenant, lambda: self._refresh(tenant, budgets))
        used_up = max((state for state in states if state.is_used_up), key=lambda state: state.resets_at, default=None)
        if used_up is not None:
            raise ToolFailure(
                ErrorCode.BUDGET_EXCEEDED,
                f"tenant {tenant} has used up its budget {used_up.name} ({used_up.used:,.6g} of {used_up.limit:,.6g}): "
                f"wait for its reset at {format_instant(used_up.resets_at)}, or ask the operator for a higher limit",
                budget=used_up.name,
                resets_at=format_instant(used_up.resets_at),
                retry_after_s=max(1, round(used_up.resets_at - time.time())),
            )

    async def read(self, tenant: str, budgets: Budgets) -> list[BudgetState]:
        """Return the state of each budget for which the tenant has a limit."""
        limits = {name: float(limit) for name, limit in budgets if limit is not None}
        if not limits:
            return []
        with broker_errors("the budgets were not read"):
            seconds, _ = await self._client.time()
        today = datetime.fromtimestamp(seconds, UTC).replace(hour=0, minute=0, second=0)
        starts = {"day": today, "month": today.replace(day=1)}
        next_month = (starts["month"] + timedelta(days=32)).replace(day=1)
        resets = {"day": today + timedelta(days=1), "month": next_month}
        first = min(starts[name.rpartition("_per_")[2]] for name in limits)
        rows = await self._usage.read(tenant, first.timestamp(), resets["day"].timestamp())
        states = []
        for name, limit in limits.items():
            metric, _, period = name.rpartition("_per_")
            used = sum(_sum(row.amounts, metric) for row in rows if row.start >= starts[period].timestamp())
            states.append(
                BudgetState(
                    name=name,
                    limit=limit,
                    used=used,
                    is_used_up=used >= limit,
                    resets_at=resets[period].timestamp(),
                )
            )
        return states

    async def _refresh(self, tenant: str, budgets: Budgets) -> list[BudgetState]:
        states = await self.read(tenant, budgets)
        for state in states:
            if state.is_used_up:
                await self._notify(tenant, "budget.exceed", state)
            elif state.is_nearly_used_up:
                await self._notify(tenant, "budget.warn", state)
        if len(self._read) >= _MAX_TENANTS:
            self._read.clear()
        self._read[tenant] = time.monotonic(), budgets, states
        return states

    async def _notify(self, tenant: str, action: AuditAction, state: BudgetState) -> None:
        """Write a notice to the log and the audit, once in its period for each limit."""
        details = {name: str(value) for name, value in state.model_dump(mode="json").items() if name != "is_used_up"}
        entry = entry_text(build_entry(_ACTOR, action, state.name, tenant=tenant, details=details))
        notice = f"{action} {state.name} {state.limit:g} {state.resets_at:.0f}"
        with broker_errors("a notice about a budget was not written"):
            is_first = await _ADD_NOTICE.run(
                self._client,
                notices=f"{usage_prefix(self._deployment, tenant)}notices",
                audit_log=audit_key(self._deployment),
                notice=notice,
                ttl_s=NOTICES_TTL_S,
                entry=entry,
            )
        if is_first and action == "budget.exceed":
            log.error("budget_used_up", tenant=tenant, **details)
        elif is_first:
            log.warning("budget_nearly_used_up", tenant=tenant, **details)


_MAX_TENANTS = 10_000


def _sum(amounts: Mapping[str, int], metric: str) -> float:
    return sum(amounts.get(name, 0) / UNITS.get(name, 1) for name in _METRICS[metric])
