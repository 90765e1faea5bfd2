"""Hosts over HTTP: list live workers, and drain a host."""

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict

from toolcrew.contract.access_views import Page
from toolcrew.contract.errors import ConfigError
from toolcrew.orchestrator.api.access import OperatorCaller
from toolcrew.orchestrator.api.paging import Cursor, Limit, page_of
from toolcrew.orchestrator.api.problem_handlers import responses
from toolcrew.orchestrator.http.problems import ApiCode, ApiProblem
from toolcrew.orchestrator.operations.drains import find_workers, order_drain
from toolcrew.orchestrator.operations.views import HostView, view_host
from toolcrew.store.hosts import HostStore

router = APIRouter(prefix="/v1/hosts", tags=["hosts"], responses=responses())


class Drain(BaseModel):
    """Options of a drain. `lossy`: drain the host even if its checkpoints are stored only on the host.

    The sessions of such a host lose their files.
    """

    model_config = ConfigDict(extra="forbid")

    lossy: bool = False


@router.get("")
async def list_hosts(caller: OperatorCaller, cursor: Cursor = None, limit: Limit = 100) -> Page[HostView]:
    """List every live worker with its load."""
    hosts = HostStore(caller.app_state.parts.pool.redis, caller.app_state.settings.deployment)
    reports = await hosts.read()
    waiting = await hosts.queued(sorted({queue for report in reports for queue in (report.queue, *report.pools)}))
    return page_of([view_host(report, waiting) for report in reports], cursor, limit)


@router.post("/{host}/drain", status_code=202, responses=responses(404))
async def drain_host(host: str, drain: Drain, caller: OperatorCaller) -> Page[HostView]:
    """Drain a host: its sessions move to other hosts, then its workers stop. Returns after the workers confirm the
    drain.
    """
    app_state = caller.app_state
    hosts = HostStore(app_state.parts.pool.redis, app_state.settings.deployment)
    try:
        reports = [report for report in find_workers(await hosts.read(), host) if report.worker]
    except ConfigError as error:
        raise ApiProblem(ApiCode.NOT_FOUND, str(error)) from error
    for report in reports:
        await order_drain(
            hosts, report, app_state.settings.broker().signing_keys(), lossy=drain.lossy, actor=caller.identity.actor()
        )
    return page_of([view_host(report, {}) for report in find_workers(await hosts.read(), host)], None, 200)
