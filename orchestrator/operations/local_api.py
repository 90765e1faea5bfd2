"""The API of an embedded stack: its address, its plan, and the administrator's key that is made for it and ends with
it.
"""

import contextlib
import signal
from collections.abc import Mapping
from dataclasses import dataclass

from contract.errors import BrokerUnavailable
from contract.settings import BrokerSettings
from contract.tenancy import DEFAULT_TENANT
from orchestrator.operations.supervision import ChildPlan
from orchestrator.settings import program
from store.api_keys import ApiKeys
from store.connection import open_redis

KEY_TTL_S = 30 * 86_400.0
"""Of the key, should nobody be left to revoke it: a stack may share a Redis that outlives it."""
ROLE = "api"
STOP_WITHIN_S = 5.0


@dataclass(frozen=True)
class LocalApi:
    """`key`: of an administrator of the deployment."""

    broker: BrokerSettings
    port: int
    key: str
    key_id: str

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def plan(self, environment: Mapping[str, str]) -> ChildPlan:
        """Its process. A key in the environment would be a tenant's, and commands' business."""
        argv = program("orchestrator", "serve", "api", "--port", str(self.port))
        return ChildPlan(
            ROLE, argv, {**environment, "TOOLCREW_API_KEY": ""}, signal.SIGKILL, stop_within_s=STOP_WITHIN_S
        )

    @classmethod
    async def prepare(cls, broker: BrokerSettings, port: int) -> "LocalApi":
        """With a key that is valid from now on. Raises BrokerUnavailable."""
        client = open_redis(broker)
        try:
            made = await ApiKeys(client, broker.deployment, broker.signing_keys()).add(
                DEFAULT_TENANT, "admin", name="embedded stack", ttl_s=KEY_TTL_S
            )
        finally:
            await client.aclose()
        return cls(broker, port, made.text, made.id)

    async def revoke(self) -> None:
        """Its key opens nothing any more. A Redis that has gone has it no more either."""
        client = open_redis(self.broker)
        try:
            with contextlib.suppress(BrokerUnavailable):
                await ApiKeys(client, self.broker.deployment, self.broker.signing_keys()).revoke(self.key_id)
        finally:
            await client.aclose()
