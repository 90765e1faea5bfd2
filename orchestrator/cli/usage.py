"""`toolcrew tenants usage`: what a tenant used, and its budgets."""

import time
from datetime import UTC, datetime
from typing import Annotated, Any

import typer

from toolcrew.contract.session_views import By
from toolcrew.orchestrator.cli.clients import open_tenant_client
from toolcrew.orchestrator.cli.runner import Json, Output, Tenant, as_command
from toolcrew.orchestrator.terminal.figures import format_cost, format_count, format_seconds
from toolcrew.orchestrator.terminal.output import table_rows
from toolcrew.store.usage import DAY_S

DEFAULT_DAYS = {"day": 30, "hour": 1}
_TIME = ["%Y-%m-%d", "%Y-%m-%dT%H:%M:%S", "%Y-%m-%dT%H:%M:%SZ"]


@as_command
async def tenants_usage(
    by: Annotated[By, typer.Option("--by", help="Length of the periods, in UTC.")] = "day",
    start: Annotated[
        datetime | None,
        typer.Option(
            "--from",
            formats=_TIME,
            help="Start of the report, in UTC. Default: 30 days before --to; with --by hour, one day.",
        ),
    ] = None,
    end: Annotated[
        datetime | None,
        typer.Option("--to", formats=_TIME, help="End of the report, in UTC; this time is not included. Default: now."),
    ] = None,
    tenant: Tenant = None,
    as_json: Json = False,
) -> Output:
    """Show what a tenant used, by day or by hour, and its budgets."""
    until = _seconds(end) if end is not None else time.time()
    since = _seconds(start) if start is not None else until - DEFAULT_DAYS[by] * DAY_S
    async with open_tenant_client(tenant, needs_workers=False) as client:
        report = (await client.usage_report(since, until, by=by, tenant=tenant)).model_dump(mode="json")
    rows = [_row(period) for period in [*report["data"], {"start": "total", **report["total"]}]]
    lines = table_rows(rows, tuple(rows[0]))
    if report["budgets"]:
        shown = [_budget_row(budget) for budget in report["budgets"]]
        lines += ["", *table_rows(shown, tuple(shown[0]))]
    return Output(report, lines)


def _row(period: dict[str, Any]) -> dict[str, Any]:
    return {
        "from": period["start"],
        "calls": format_count(period["calls"]),
        "cpu": format_seconds(period["cpu_s"]),
        "sandbox": format_seconds(period["sandbox_s"]),
        "read": format_count(period["read_bytes"]),
        "written": format_count(period["written_bytes"]),
        "network": format_count(period["network_bytes"]),
        "streams": format_count(period["stream_bytes"]),
        "stored": format_count(period["stored_bytes"]),
        "tokens-in": format_count(period["prompt_tokens"]),
        "tokens-out": format_count(period["completion_tokens"]),
        "cost": format_cost(period["cost"]),
    }


def _budget_row(budget: dict[str, Any]) -> dict[str, Any]:
    share = f"{budget['used'] / budget['limit']:.0%}" if budget["limit"] else "-"
    amounts = {name: f"{budget[name]:,.6g}" for name in ("used", "limit")}
    return {"budget": budget["name"], **amounts, "share": share, "resets-at": budget["resets_at"]}


def _seconds(at: datetime) -> float:
    return at.replace(tzinfo=UTC).timestamp()
