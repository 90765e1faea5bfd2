"""The page about what tenants used: a chart for each tenant and amount, and its budgets."""

import time
from dataclasses import dataclass

from fastapi import APIRouter, Response

from toolcrew.contract.session_views import BudgetState
from toolcrew.orchestrator.api.pages.people import PageViewer
from toolcrew.orchestrator.api.pages.rendering import render
from toolcrew.orchestrator.api.pages.route import PageRoute
from toolcrew.store.overview import OverviewReader
from toolcrew.store.usage import DAY_S, UsageRow, UsageStore, show_amounts, sum_rows

router = APIRouter(route_class=PageRoute, include_in_schema=False)

DAYS = 30
MAX_TENANTS = 10


@dataclass(frozen=True)
class Bar:
    """The bar of one day in a chart. `start`: the start of the day in Unix seconds. `share`: the amount as a share of
    the highest amount in the chart, from 0 to 1.
    """

    start: int
    amount: float
    share: float


@dataclass(frozen=True)
class Chart:
    """A chart of the amounts of DAYS days. `kind`: the name of the template filter that formats an amount."""

    title: str
    kind: str
    total: float
    bars: tuple[Bar, ...]


@dataclass(frozen=True)
class TenantUsage:
    """The part of the page about one tenant. Charts without use are left out."""

    tenant: str
    charts: tuple[Chart, ...]
    budgets: tuple[BudgetState, ...]


@router.get("/usage")
async def usage(person: PageViewer) -> Response:
    """Show the usage of the selected tenant, or of the first tenants."""
    parts, deployment = person.app_state.parts, person.app_state.settings.deployment
    viewer = await person.viewer()
    names = [viewer.tenant] if viewer.tenant else []
    if not names:
        overview = await OverviewReader(parts.pool.redis, deployment, parts.pool.keys).read()
        names = [tenant.tenant for tenant in overview.tenants]
    store, now = UsageStore(parts.pool.redis, deployment), time.time()
    first = int(now // DAY_S - DAYS + 1) * DAY_S
    tenants = []
    for name in names[:MAX_TENANTS]:
        rows = await store.read(name, first, now)
        tenants.append(TenantUsage(name, _build_charts(rows, first), tuple(await parts.pool.tenants.budgets(name))))
    hidden = max(0, len(names) - MAX_TENANTS)
    return render("usage.html", viewer, title="Usage", page="usage", tenants=tenants, left=hidden, days=DAYS)


def _build_charts(rows: list[UsageRow], first: int) -> tuple[Chart, ...]:
    amounts = {row.start: show_amounts(row.amounts) for row in rows}
    total = show_amounts(sum_rows(rows))
    for shown in (*amounts.values(), total):
        shown["tokens"] = shown["prompt_tokens"] + shown["completion_tokens"]
    charts = []
    for name, title, kind in _CHARTS:
        days = [(first + day * DAY_S, float(amounts.get(first + day * DAY_S, {}).get(name, 0))) for day in range(DAYS)]
        highest = max(amount for _, amount in days)
        if highest:
            bars = tuple(Bar(start, amount, amount / highest) for start, amount in days)
            charts.append(Chart(title, kind, float(total[name]), bars))
    return tuple(charts)


_CHARTS = (
    ("cpu_s", "Sandbox CPU time", "seconds"),
    ("sandbox_s", "Sandbox time", "seconds"),
    ("tokens", "Model tokens", "count"),
    ("cost", "Model cost", "cost"),
    ("calls", "Calls", "count"),
    ("written_bytes", "Bytes written", "bytes"),
    ("network_bytes", "Bytes over the network", "bytes"),
    ("stream_bytes", "Bytes of streams", "bytes"),
)
