"""Sends signed notices about runs and batches that have ended. A web worker sends each notice, with retries until the
delivery succeeds.

Invariant: delivery is at least once. A notice that is sent again has the same id, so a receiver can detect
repetitions.
"""

import asyncio
import hashlib
import json
import random
import secrets
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

from pydantic import ValidationError

from toolcrew.concurrency.tasks import check_cancelled
from toolcrew.contract.calls import ToolCall
from toolcrew.contract.clock import format_instant
from toolcrew.contract.errors import BrokerUnavailable, ConfigError, EnvelopeRefused, ErrorCode, ToolFailure
from toolcrew.contract.webhooks import SEND_TOOL, Webhook, sign
from toolcrew.orchestrator.dispatch.dispatcher import Dispatcher
from toolcrew.orchestrator.dispatch.request import Request
from toolcrew.orchestrator.runs.batch_status import build_status
from toolcrew.store.run_queue import RunQueue
from toolcrew.store.webhooks import DueNotice, DueNotices, open_webhook
from toolcrew.telemetry.logs import get_logger

log = get_logger(__name__)

CHECK_INTERVAL_S = 1.0
CHECK_LIMIT_S = 5.0
"""Limit, in seconds, of the check of a new webhook by a web worker."""
LEASE_S = 120.0
"""Seconds for which a notice belongs to the process that sends it, longer than one delivery takes. If that process
dies, another one sends the notice after this time.
"""
AT_ONCE, TENANT_AT_ONCE = 16, 4
"""Notices that a process sends at the same time: of all tenants, and of one, whose receivers may be slow."""
PAUSES_S = (5.0, 30.0, 120.0, 600.0, 1800.0, 3600.0, 7200.0, 14_400.0, 28_800.0, 28_800.0)
"""Pauses after the first, second, ... failure, in seconds. After the last pause the notice is dropped, about a day
after the end.
"""


CheckWebhook = Callable[[str, Webhook], Awaitable[None]]
"""Checks the webhook of a tenant before a run or batch is queued. Raises ToolFailure(INVALID_ARGUMENTS)."""


def build_webhook_check(dispatcher: Dispatcher) -> CheckWebhook:
    """Return a check that asks a web worker, because only web workers know which hosts and ports the operator allows.

    A webhook is accepted if no web worker answers: the delivery is tried later anyway.
    """

    async def check(tenant: str, webhook: Webhook) -> None:
        arguments: dict[str, Any] = {"url": webhook.url, "check_only": True}
        call = ToolCall(id=secrets.token_hex(16), name=SEND_TOOL, arguments=arguments)
        result = await dispatcher.dispatch(Request(call, tenant, None, audience="session", timeout_s=CHECK_LIMIT_S))
        if result.error_code in (ErrorCode.SECURITY_REFUSED, ErrorCode.INVALID_ARGUMENTS):
            raise ToolFailure(
                ErrorCode.INVALID_ARGUMENTS, f"the webhook can never be delivered: {(result.error or '')[:500]}"
            )
        if not result.success:
            log.info("webhook_not_checked", tenant=tenant, error=(result.error or "")[:500])

    return check


async def accept_webhook(_tenant: str, _webhook: Webhook) -> None:
    """Accept every webhook: the default of parts that are used without a pool."""


class WebhookSender:
    """Sends notices of a deployment from one process. The senders of all processes share the list of notices."""

    def __init__(self, queue: RunQueue, dispatcher: Dispatcher) -> None:
        self._queue = queue
        self._notices = DueNotices(queue.step)
        self._dispatcher = dispatcher
        self._sending: dict[asyncio.Task[None], str] = {}

    async def run(self) -> None:
        """Send notices until cancelled."""
        try:
            while True:
                check_cancelled()
                # The random pause spreads the requests of the processes to Redis over time.
                pause_s = 0.0 if await self._start_due() else CHECK_INTERVAL_S * random.uniform(0.5, 1.5)
                if pause_s and not self._sending:
                    await asyncio.sleep(pause_s)
                elif pause_s or len(self._sending) >= AT_ONCE:
                    # A slow receiver holds one place only: others are served as soon as any place is free.
                    await asyncio.wait(self._sending, timeout=pause_s or None, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in self._sending:
                task.cancel()
            await asyncio.gather(*self._sending, return_exceptions=True)

    async def send_due(self) -> int:
        """Send all notices that are due now, once. Return the number of notices."""
        started = await self._start_due()
        await asyncio.gather(*self._sending)
        return started

    async def _start_due(self) -> int:
        """Start to send due notices, as far as places are free. Return the number of notices."""
        free = AT_ONCE - len(self._sending)
        if not free:
            return 0
        try:
            notices = await self._notices.claim(free, LEASE_S, TENANT_AT_ONCE, Counter(self._sending.values()))
        except BrokerUnavailable as error:
            log.warning("webhooks_not_read", error=str(error))
            return 0
        for notice in notices:
            task = asyncio.create_task(self._send(notice))
            self._sending[task] = notice.tenant
            task.add_done_callback(self._sending.pop)
        return len(notices)

    async def _send(self, notice: DueNotice) -> None:
        """Send one notice, then remove the notice or schedule the next attempt."""
        names = {"tenant": notice.tenant, "kind": notice.kind, "name": notice.name, "tries": notice.tries}
        try:
            problem = await self._deliver(notice)
        # These errors do not go away, so the notice is dropped without a retry.
        except (EnvelopeRefused, ValidationError, ConfigError, ToolFailure) as error:
            log.error("webhook_dropped", **names, error=str(error)[:500])
            await self._settle(notice, str(error))
            return
        except BrokerUnavailable as error:
            # The notice stays claimed. After the lease another process sends it again.
            log.warning("webhooks_not_read", error=str(error))
            return
        except Exception as error:  # an unexpected error delays one notice, not the notices of other tenants
            log.exception("webhook_delivery_interrupted", **names)
            problem = type(error).__name__
        if problem is None:
            log.info("webhook_sent", **names)
            await self._settle(notice, None)
        elif notice.tries > len(PAUSES_S):
            log.error("webhook_dropped", **names, error=problem)
            await self._settle(notice, problem)
        else:
            log.warning("webhook_failed", **names, error=problem)
            await self._settle(notice, problem, PAUSES_S[notice.tries - 1] * random.uniform(1.0, 1.2))

    async def _settle(self, notice: DueNotice, error: str | None, again_s: float | None = None) -> None:
        try:
            await self._notices.settle(notice, error, again_s)
        except BrokerUnavailable as unavailable:
            log.warning("webhooks_not_read", error=str(unavailable))

    async def _deliver(self, notice: DueNotice) -> str | None:
        """Return why a notice was not delivered; None if the delivery succeeded."""
        webhook = open_webhook(self._queue.keys, notice)
        data = await self._data(notice)
        body = json.dumps(
            {"type": f"{notice.kind}.ended", "timestamp": format_instant(float(notice.ended)), "data": data},
            separators=(",", ":"),
        )
        # The message id is the same for each attempt. Receivers use the id to detect repetitions.
        digest = hashlib.sha256(f"{notice.tenant}|{notice.kind}|{notice.name}|{notice.ended}".encode()).hexdigest()
        message, timestamp = f"msg_{digest[:32]}", int(time.time())
        headers = {
            "Content-Type": "application/json",
            "webhook-id": message,
            "webhook-timestamp": str(timestamp),
            "webhook-signature": sign(webhook.secret, message, timestamp, body),
        }
        arguments: dict[str, Any] = {"url": webhook.url, "headers": headers, "body": body}
        call = ToolCall(id=secrets.token_hex(16), name=SEND_TOOL, arguments=arguments)
        result = await self._dispatcher.dispatch(Request(call, notice.tenant, None, audience="session"))
        if not result.success:
            return result.error or "failed"
        status = result.metadata.get("status")
        return None if isinstance(status, int) and 200 <= status < 300 else f"the receiver answered {status}"

    async def _data(self, notice: DueNotice) -> dict[str, Any]:
        """Return the data of the notice: the state of the run or batch."""
        if notice.kind == "run":
            run = await self._queue.runs.get(notice.tenant, notice.name)
            failure = run.end.failure if run.end is not None else None
            return {
                "id": run.id,
                "state": run.state.value,
                "metadata": run.metadata,
                "failure": failure.code if failure is not None else None,
            }
        record = await self._queue.batches.get(notice.tenant, notice.name)
        status = build_status(notice.name, record, await self._queue.batches.counts(notice.tenant, notice.name))
        return status.model_dump(mode="json", include={"id", "status", "name", "request_counts", "failed"})
