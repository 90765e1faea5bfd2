"""The usage of a tenant over HTTP: calls, CPU time, tokens and cost by hour or day."""

import time
from datetime import UTC, datetime
from typing import Annotated

from fastapi import APIRouter, Path, Query
from pydantic import BaseModel

from toolcrew.contract.errors import ErrorCode
from toolcrew.orchestrator.api.access import AnyCaller
from toolcrew.orchestrator.api.problem_handlers import responses
from toolcrew.orchestrator.http.problems import ApiProblem
from toolcrew.store.budgets import BudgetState
from toolcrew.store.usage import DAY_S, By, show_amounts, sum_rows

router = APIRouter(prefix="/v1/tenants", tags=["tenants"], responses=responses())
DEFAULT_DAYS = 30


class UsageAmounts(BaseModel):
    """Used resources. `calls`: number of calls with a result. `cpu_s`: CPU seconds of calls, background jobs and starts
    of sandboxes. `sandbox_s`: seconds in which sessions had a container. `read_bytes`, `written_bytes`: bytes from and
    to disks, without the kernel's cache and files in memory. `network_bytes`: bytes through the egress proxy, in both
    directions. `cost`: cost of model replies in the currency of the models' prices; replies without token counts do not
    count. `stored_bytes`: bytes of new checkpoints (including automatic ones), artifacts and uploads, minus the bytes
    of deleted ones. The number may be negative. Files that expire are not subtracted.
    """

    calls: int = 0
    cpu_s: float = 0.0
    read_bytes: int = 0
    written_bytes: int = 0
    network_bytes: int = 0
    sandbox_s: float = 0.0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    cost: float = 0.0
    stored_bytes: int = 0


class UsagePeriod(UsageAmounts):
    """Used resources of the hour or day that begins at `start`, in ISO 8601."""

    start: str


class UsageReport(BaseModel):
    """Usage of a tenant. `data`: periods with use, the oldest first. `total`: their sum. `budgets`: their current
    state.
    """

    tenant: str
    by: By
    data: list[UsagePeriod]
    total: UsageAmounts
    budgets: list[BudgetState]


@router.get("/{name}/usage")
async def get_usage(
    name: Annotated[str, Path(pattern=r"^[A-Za-z0-9_-]{1,64}$")],
    caller: AnyCaller,
    start: Annotated[datetime | None, Query(alias="from", description="Default: 30 days before `to`.")] = None,
    end: Annotated[datetime | None, Query(alias="to", description="Not included. Default: now.")] = None,
    by: By = "day",
) -> UsageReport:
    """Return what a tenant used by hour or day in UTC, and its budgets. Hours are kept for 400 days; a report by hour
    covers 31 days.

    Amounts are updated when a call ends and every 10 s. Nothing is counted twice, and a call with a lost result counts.
    Usage between calls counts for the session but for no call. If sandboxd is killed, the usage since its last report
    is lost. Programs can hide disk bytes, but not CPU time.
    """
    if not caller.identity.may_act_for(name):
        raise ApiProblem(
            ErrorCode.PERMISSION_DENIED,
            f"the API key belongs to tenant {caller.identity.tenant}: use the address of that tenant",
        )
    until = _seconds(end) if end is not None else time.time()
    rows = await caller.client.usage(
        _seconds(start) if start is not None else until - DEFAULT_DAYS * DAY_S, until, by=by, tenant=name
    )
    data = [UsagePeriod.model_validate(row.to_json()) for row in rows]
    budgets = await caller.client.budgets(name)
    return UsageReport(
        tenant=name, by=by, data=data, total=UsageAmounts(**show_amounts(sum_rows(rows))), budgets=budgets
    )


def _seconds(at: datetime) -> float:
    return (at if at.tzinfo is not None else at.replace(tzinfo=UTC)).timestamp()
