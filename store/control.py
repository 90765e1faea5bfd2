"""Control lists: orders that a worker reads at once, however busy its pool is. An order is a signed envelope (workers/control.py)."""

from collections.abc import Sequence
from typing import Any

from contract.names import control_queue
from store.connection import RedisClient, SyncRedis, broker_errors

ORDER_TTL_S = 60
"""How long an order waits for its worker."""
_WAKE = b"stop"


async def send_order(client: RedisClient, queue: str, envelope: str) -> None:
    """Put an order on a worker's control list. Raises BrokerUnavailable."""
    with broker_errors(f"the order was not sent to {queue}"):
        async with client.pipeline(transaction=True) as pipe:
            pipe.lpush(control_queue(queue), envelope)
            pipe.expire(control_queue(queue), ORDER_TTL_S)
            await pipe.execute()


class WorkerControlStore:
    """The lists of some queues, for workers. Every method raises BrokerUnavailable when Redis does not answer."""

    def __init__(self, client: SyncRedis) -> None:
        self._client = client

    def take(self, queues: Sequence[str], wait_s: int) -> bytes | None:
        """Return the next order for one of these queues; None if none comes within that time, or `wake` was called."""
        with broker_errors("the control list was not read"):
            item: Any = self._client.brpop([control_queue(queue) for queue in queues], timeout=wait_s)
        if item is None:
            return None
        order = item[1] if isinstance(item[1], bytes) else item[1].encode()
        return order if order != _WAKE else None

    def wake(self, queue: str, ttl_s: int) -> None:
        """End a `take` that waits for orders of this queue."""
        self._push(queue, _WAKE, ttl_s)

    def push(self, queue: str, order: bytes) -> None:
        """Send an order to another worker. It expires if that worker has ended."""
        self._push(queue, order, ORDER_TTL_S)

    def _push(self, queue: str, order: bytes, ttl_s: int) -> None:
        key = control_queue(queue)
        with broker_errors(f"the order was not sent to {queue}"), self._client.pipeline(transaction=True) as pipe:
            pipe.lpush(key, order)
            pipe.expire(key, ttl_s)
            pipe.execute()
