"""The demand of the pools over HTTP: numbers that an autoscaler reads."""

from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel

from contract.names import POOL_QUEUES
from orchestrator.api.access import OperatorCaller
from orchestrator.api.problem_handlers import responses
from store.pressure import Pressure

router = APIRouter(prefix="/v1/pressure", tags=["hosts"], responses=responses())


class QueueDemand(BaseModel):
    """Demand of one shared queue.

    `held`: calls that have a slot. `waiting`: calls that would run with more slots. `oldest_s`: the longest wait of
    these calls, in seconds. `stopped`: calls that wait because of a limit of their tenant, which more workers do not
    change. `demand`: `held` plus `waiting`.
    """

    slots: int
    held: int
    waiting: int
    stopped: int
    oldest_s: float
    demand: int


class HostsDemand(BaseModel):
    """All sandbox hosts. `wanted`: the number of hosts of average size that is sufficient."""

    hosts: int
    sessions: int
    max_sessions: int
    busy: int
    slots: int
    wanted: int


class PressureView(BaseModel):
    """Demand and capacity. `queues`: by the name of the pool."""

    queues: dict[str, QueueDemand]
    hosts: HostsDemand


@router.get("")
async def show_pressure(caller: OperatorCaller) -> PressureView:
    """Return how many calls wait for workers, and how full the sandbox hosts are. The values are at most 3 s old."""
    app_state = caller.app_state

    async def read() -> dict[str, Any]:
        pressure = Pressure(app_state.parts.pool.redis, app_state.settings.deployment)
        queues = {pool: (await pressure.queue(queue)).as_json() for pool, queue in POOL_QUEUES.items()}
        return {"queues": queues, "hosts": vars(await pressure.hosts())}

    return PressureView.model_validate(await app_state.pressure.get(read))
