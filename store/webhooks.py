"""Webhooks of runs and batches. A notice is due from the step of the script that ends the run or batch (runs.lua) until
it was delivered, or has failed too often: a process that dies loses none.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Literal

from contract.signing import SigningKeys
from contract.webhooks import Webhook

Kind = Literal["run", "batch"]


@dataclass(frozen=True)
class DueNotice:
    """A notice that this process sends now. `sealed`: its signed webhook; `tries`: this one included; `ended`: the
    instant of the end, as the script wrote it.
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
    """Return the webhook. Raises EnvelopeRefused when it is not signed for that run or batch, ValidationError."""
    purpose = f"webhook {notice.tenant} {notice.kind} {notice.name}"
    return Webhook.model_validate_json(keys.unseal(purpose, notice.sealed))


class DueNotices:
    """The notices of a deployment that are due. Methods raise BrokerUnavailable."""

    def __init__(self, step: Callable[..., Awaitable[Any]]) -> None:
        """`step`: of the queue of runs."""
        self._step = step

    async def claim(self, most: int, lease_s: float) -> list[DueNotice]:
        """Return notices that are due. Until `lease_s` has passed, no other process gets them."""
        found = await self._step("claim_webhooks", most, lease_s)
        return [
            DueNotice(
                tenant.decode(),
                "run" if kind == b"run" else "batch",
                name.decode(),
                sealed.decode(),
                tries,
                ended.decode(),
            )
            for tenant, kind, name, sealed, tries, ended in found
        ]

    async def settle(self, notice: DueNotice, again_s: float | None) -> None:
        """Remove a notice, or let it be sent again after so many seconds."""
        after = "" if again_s is None else again_s
        await self._step("settle_webhook", notice.tenant, notice.kind, notice.name, notice.ended, after)
