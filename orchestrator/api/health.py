"""Liveness, readiness and metrics of the service."""

from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel

from toolcrew.contract.errors import BrokerUnavailable, ConfigError
from toolcrew.orchestrator.api.access import OperatorCaller, depend_on_app_state
from toolcrew.orchestrator.api.api_state import ApiState
from toolcrew.orchestrator.api.problem_handlers import responses
from toolcrew.orchestrator.metrics.samples import OPEN_METRICS, TEXT, choose_format
from toolcrew.store.connection import check_writable

router = APIRouter(tags=["health"])

_UNCONNECTED: Mapping[str, str] = {
    "redis": "not connected yet: check that Redis is running, and read the log of the service"
}


class Health(BaseModel):
    """Liveness. `status`: always "ok"."""

    status: str = "ok"


class Readiness(BaseModel):
    """Readiness. `ready`: whether a new run would be processed.

    `checks`: "ok" for each part, or what is missing and what to do.
    """

    ready: bool
    checks: dict[str, str]


@router.get("/healthz")
async def healthz() -> Health:
    """Return ok when the process responds.

    Nothing else is checked, because a restart of the service does not repair an unavailable Redis.
    """
    return Health()


@router.get("/readyz", response_model=Readiness, responses={503: {"model": Readiness, "description": "Not ready"}})
async def readyz(app_state: Annotated[ApiState, Depends(depend_on_app_state)]) -> Response:
    """Check readiness: Redis accepts writes, and a sandbox worker publishes its tools. The result is at most 1 second
    old.
    """
    checks = await app_state.readiness.get(partial(_checks, app_state)) if app_state.is_connected else _UNCONNECTED
    check = Readiness(ready=all(check == "ok" for check in checks.values()), checks=dict(checks))
    return JSONResponse(check.model_dump(), status_code=200 if check.ready else 503)


@router.get(
    "/metrics",
    response_class=Response,
    responses={
        **responses(),
        200: {"description": "The Prometheus text format, or OpenMetrics with `Accept`", "content": {"text/plain": {}}},
    },
)
async def metrics(caller: OperatorCaller, request: Request) -> Response:
    """Return the metrics of the whole deployment, for operators. Every API replica returns the same metrics: scrape
    one.
    """
    is_open = choose_format(request.headers.get("accept", ""))
    page = await caller.app_state.parts.metrics.render(is_open=is_open)
    return Response(page, media_type=OPEN_METRICS if is_open else TEXT)


async def _checks(app_state: ApiState) -> Mapping[str, str]:
    pool = app_state.parts.pool
    try:
        # A read-only replica or a full disk: Redis answers but rejects writes.
        await check_writable(pool.redis, app_state.settings.deployment)
        pools: dict[str, Any] = dict(await pool.catalog.pools())
    except BrokerUnavailable:
        return {"redis": "does not answer, or refuses writes: check that Redis is running"}
    except ConfigError:
        return {"redis": "ok", "workers": "workers publish tools of another release: run the same release everywhere"}
    missing = "no worker serves tools: start one (toolcrew serve worker)"
    return {"redis": "ok", "sandbox workers": "ok" if "sandbox" in pools else missing}
