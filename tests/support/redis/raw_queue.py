"""The queue without a client. Any holder of the Redis URL can create and read these envelopes, tasks and stored
results.
"""

import contextlib
import json
import secrets
import time
from typing import Any

import redis
from celery import Celery

from toolcrew.contract.broker import BrokerSettings
from toolcrew.contract.calls import ToolCall, ToolContext, ToolResult
from toolcrew.contract.envelope import decode_result, encode_call
from toolcrew.contract.names import result_key
from toolcrew.contract.signing import SigningKeys
from toolcrew.orchestrator.dispatch.celery_transport import CeleryTransport
from toolcrew.orchestrator.dispatch.dispatcher import Dispatcher
from toolcrew.orchestrator.dispatch.tenant_catalog import TenantCatalog
from toolcrew.store.call_messages import ResultHub
from toolcrew.store.connection import open_redis
from toolcrew.store.tools import RedisCatalog


def make_envelope(
    broker: BrokerSettings, call: ToolCall, *, tenant: str, session: str, key: SigningKeys | None = None, **fields: Any
) -> str:
    """Return a signed envelope as the dispatcher creates it. `fields` replace fields of the context."""
    now = time.time()
    report: dict[str, Any] = {"tenant": tenant, "session": session, "sent_at": now, "deadline_at": now + 60, **fields}
    return encode_call(call, ToolContext(**report), key or broker.signing_keys())


def publish(broker: BrokerSettings, task: str, queue: str, envelope: object, **options: Any) -> str:
    """Put a task into a queue as any holder of the Redis URL can. Returns the task's id."""
    app = Celery("forger", broker=broker.redis_url.get_secret_value(), backend=None, set_as_current=False)
    app.conf.broker_transport_options = {"priority_steps": [0]}
    task_id = f"forged-{secrets.token_hex(8)}"
    try:
        app.send_task(task, kwargs={"envelope": envelope}, queue=queue, task_id=task_id, **options)
    finally:
        app.close()
    return task_id


def stored_state(client: "redis.Redis", task_id: str) -> dict[str, Any] | None:
    """Return the state of a task that Celery has stored, or None."""
    text = client.get(result_key(task_id))
    return dict(json.loads(text)) if text else None


def stored_result(client: "redis.Redis", task_id: str) -> ToolResult | None:
    """Return the result in the state of a task, including a failed task; None if there is no result. The signature is
    not checked.
    """
    state = stored_state(client, task_id) or {}
    encoded = state.get("answer") or (state.get("result") if state.get("status") == "SUCCESS" else None)
    if encoded is None:
        return None
    sealed = encoded["data"][0][0][0]
    return decode_result({**encoded, "data": [[[sealed.split(".", 2)[2]]]]})


@contextlib.asynccontextmanager
async def open_dispatcher(broker: BrokerSettings, *, queue_wait_s: float = 60.0, key: SigningKeys | None = None) -> Any:
    """Yield a dispatcher to the workers without a client, for routes that a test builds."""
    client = open_redis(broker)
    hub = ResultHub(client)
    await hub.start()
    transport = CeleryTransport(broker, hub)
    try:
        yield Dispatcher(
            transport,
            TenantCatalog(RedisCatalog(client, broker.deployment, broker.signing_keys())),
            key or broker.signing_keys(),
            queue_wait_s=queue_wait_s,
        )
    finally:
        await transport.aclose()
        await hub.close()
        await client.aclose()
