"""Hosts over HTTP: list live workers, and drain a host."""

from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict

from contract.clock import format_instant
from contract.errors import ConfigError
from contract.hosts import HostReport
from contract.sandboxes import LargestOptions
from orchestrator.api.access import OperatorCaller
from orchestrator.api.paging import Cursor, Limit, Page, page_of
from orchestrator.api.problem_handlers import responses
from orchestrator.http.problems import ApiCode, ApiProblem
from orchestrator.operations.drains import find_workers, order_drain
from store.hosts import HostStore

router = APIRouter(prefix="/v1/hosts", tags=["hosts"], responses=responses())


class HostView(BaseModel):
    """A live worker. Sizes are in bytes, times in ISO 8601.

    `largest`: the most that sessions of a class may ask for, without classes that allow no more than they give.
    `images`: names and patterns that sessions may use. `images_present`: images that the host may pull and already has.
    `waiting`: numbers of calls in the worker's queue and in the queues of the pools that it serves.
    """

    host: str
    kind: str
    state: str
    queue: str
    pools: list[str]
    slots: int
    busy: int
    sessions: int
    max_sessions: int
    sandboxes: int
    max_sandboxes: int
    memory_free_bytes: int
    disk_free_bytes: int
    classes: list[str]
    largest: dict[str, LargestOptions] = {}
    images: list[str]
    images_present: list[str] = []
    store: str
    trouble: str
    started_at: str
    reported_at: str
    waiting: dict[str, int]


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
    return page_of([_view(report, waiting) for report in reports], cursor, limit)


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
    return page_of([_view(report, {}) for report in find_workers(await hosts.read(), host)], None, 200)


def _view(report: HostReport, waiting: dict[str, int]) -> HostView:
    fields: dict[str, Any] = report.model_dump(include=set(HostView.model_fields))
    fields |= {
        "state": report.state,
        "started_at": format_instant(report.started_at),
        "reported_at": format_instant(report.reported_at),
        "waiting": {queue: waiting.get(queue, 0) for queue in (report.queue, *report.pools)},
    }
    return HostView.model_validate(fields)
