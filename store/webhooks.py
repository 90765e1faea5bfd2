"""Webhooks of runs and batches.

Invariant: no notice is lost when a process dies. The script step that ends a run or batch (runs.lua) also adds its
notice to the list of notices to send. The notice stays in the list until it is delivered or has failed too often.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Literal

from contract.signing import SigningKeys
from contract.webhooks import Webhook

Kind = Literal["run", "batch"]


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


class DueNotices:
    """The due notices of a deployment. Every method raises BrokerUnavailable when Redis does not answer."""

    def __init__(self, step: Callable[..., Awaitable[Any]]) -> None:
        """Create the list. `step`: the method RunQueue.step."""
        self._step = step

    async def claim(self, limit: int, lease_s: float) -> list[DueNotice]:
        """Return due notices. Other processes do not get them until `lease_s` seconds have passed."""
        rows = await self._step("claim_webhooks", limit, lease_s)
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

    async def settle(self, notice: DueNotice, again_s: float | None) -> None:
        """Remove a notice (`again_s` None), or send it again after `again_s` seconds."""
        after = "" if again_s is None else again_s
        await self._step("settle_webhook", notice.tenant, notice.kind, notice.name, notice.ended, after)
