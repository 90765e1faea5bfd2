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
    """One shared queue. `held`: calls that have a slot; `waiting`: calls that would run if there were more slots, the
    oldest for `oldest_s` seconds; `stopped`: calls that wait because of their own tenant, which no worker changes;
    `demand`: `held` and `waiting` together.
    """

    slots: int
    held: int
    waiting: int
    stopped: int
    oldest_s: float
    demand: int


class HostsDemand(BaseModel):
    """All sandbox hosts. `wanted`: how many of their mean size are enough."""

    hosts: int
    sessions: int
    max_sessions: int
    busy: int
    slots: int
    wanted: int


class PressureView(BaseModel):
    """The demand of each pool in relation to its workers. `queues`: by the name of the pool."""

    queues: dict[str, QueueDemand]
    hosts: HostsDemand


@router.get("")
async def show_pressure(caller: OperatorCaller) -> PressureView:
    """Show how many calls wait for workers, and how full the sandbox hosts are, at most 3 s old."""
    app_state = caller.app_state

    async def read() -> dict[str, Any]:
        pressure = Pressure(app_state.parts.pool.redis, app_state.settings.deployment)
        queues = {pool: (await pressure.queue(queue)).as_json() for pool, queue in POOL_QUEUES.items()}
        return {"queues": queues, "hosts": vars(await pressure.hosts())}

    return PressureView.model_validate(await app_state.pressure.get(read))
