"""The usage of a tenant over HTTP: calls, CPU time, tokens and cost by hour or day."""

import time
from datetime import UTC, datetime
from typing import Annotated

from fastapi import APIRouter, Path, Query

from toolcrew.contract.errors import ErrorCode
from toolcrew.contract.session_views import By, UsageReport
from toolcrew.orchestrator.api.access import AnyCaller
from toolcrew.orchestrator.api.problem_handlers import responses
from toolcrew.orchestrator.http.problems import ApiProblem
from toolcrew.store.usage import DAY_S

router = APIRouter(prefix="/v1/tenants", tags=["tenants"], responses=responses())
DEFAULT_DAYS = 30


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
    since = _seconds(start) if start is not None else until - DEFAULT_DAYS * DAY_S
    return await caller.client.usage_report(since, until, by=by, tenant=name)


def _seconds(at: datetime) -> float:
    return (at if at.tzinfo is not None else at.replace(tzinfo=UTC)).timestamp()
