"""Webhooks of runs and batches.

Invariant: no notice is lost when a process dies. The script step that ends a run or batch (runs.lua) also adds its
notice to the list of notices to send. The notice stays in the list until it is delivered or has failed too often.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from toolcrew.contract.signing import SigningKeys
from toolcrew.contract.webhooks import Webhook, WebhookDelivery

Kind = Literal["run", "batch"]
DELIVERY_FIELDS = ("webhook_state", "webhook_tries", "webhook_error")
MAX_ERROR_CHARS = 500


@dataclass(frozen=True)
class DueNotice:
    """A notice that this process must send now. `sealed`: its signed webhook. `tries`: number of attempts, including
    this one. `ended`: the time at which the run or batch ended, as the script wrote it.
    """

    tenant: str
    kind: Kind
    name: str
    sealed: str
    tries: int
    ended: str


def seal_webhook(keys: SigningKeys, tenant: str, kind: Kind, name: str, webhook: Webhook | None) -> str:
    """Return the signed webhook of a run or batch; "" for none."""
    if webhook is None:
        return ""
    return keys.seal(f"webhook {tenant} {kind} {name}", webhook.model_dump_json())


def open_webhook(keys: SigningKeys, notice: DueNotice) -> Webhook:
    """Return the webhook of a notice. Raises EnvelopeRefused: the webhook is not signed for that run or batch. Raises
    ValidationError: the webhook is invalid.
    """
    purpose = f"webhook {notice.tenant} {notice.kind} {notice.name}"
    return Webhook.model_validate_json(keys.unseal(purpose, notice.sealed))


def parse_delivery(fields: Mapping[str, str]) -> WebhookDelivery | None:
    """Return the delivery that DELIVERY_FIELDS of a run's or batch's hash describe; None without a webhook."""
    state, tries, error = (fields.get(name) or None for name in DELIVERY_FIELDS)
    if state is None:
        return None
    return WebhookDelivery.model_validate({"state": state, "tries": int(tries or 0), "error": error})


class DueNotices:
    """The due notices of a deployment. Every method raises BrokerUnavailable when Redis does not answer."""

    def __init__(self, step: Callable[..., Awaitable[Any]]) -> None:
        """Create the list. `step`: the method RunQueue.step."""
        self._step = step

    async def claim(
        self, limit: int, lease_s: float, tenant_limit: int | None = None, busy: Mapping[str, int] | None = None
    ) -> list[DueNotice]:
        """Return due notices. Other processes do not get them until `lease_s` seconds have passed. `tenant_limit`:
        limit of the notices of one tenant, including the `busy` ones that this process is sending.
        """
        counts = [part for item in (busy or {}).items() for part in item]
        rows = await self._step(
            "claim_webhooks", *counts, max_claims=limit, lease_s=lease_s, max_of_tenant=tenant_limit or limit
        )
        return [
            DueNotice(
                tenant.decode(),
                "run" if kind == b"run" else "batch",
                name.decode(),
                sealed.decode(),
                tries,
                ended.decode(),
            )
            for tenant, kind, name, sealed, tries, ended in rows
        ]

    async def settle(self, notice: DueNotice, error: str | None = None, again_s: float | None = None) -> None:
        """Remove a notice, or send it again after `again_s` seconds. `error`: why this attempt failed."""
        state = "pending" if again_s is not None else "failed" if error is not None else "delivered"
        await self._step(
            "settle_webhook",
            tenant=notice.tenant,
            kind=notice.kind,
            name=notice.name,
            ended=notice.ended,
            retry_s="" if again_s is None else again_s,
            state=state,
            failure=(error or "")[:MAX_ERROR_CHARS],
        )
