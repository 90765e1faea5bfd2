"""The demand of the pools over HTTP: numbers that an autoscaler reads."""

from fastapi import APIRouter

from toolcrew.contract.names import POOL_QUEUES
from toolcrew.orchestrator.api.access import OperatorCaller
from toolcrew.orchestrator.api.problem_handlers import responses
from toolcrew.store.pressure import PoolPressure, Pressure

router = APIRouter(prefix="/v1/pressure", tags=["hosts"], responses=responses())


@router.get("")
async def show_pressure(caller: OperatorCaller) -> PoolPressure:
    """Return how many calls wait for workers, and how full the sandbox hosts are. The values are at most 3 s old."""
    app_state = caller.app_state

    async def read() -> PoolPressure:
        pressure = Pressure(app_state.parts.pool.redis, app_state.settings.deployment)
        queues = {pool: await pressure.queue(queue) for pool, queue in POOL_QUEUES.items()}
        return PoolPressure(queues=queues, hosts=await pressure.hosts())

    return await app_state.pressure.get(read)
