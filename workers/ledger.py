"""What is known of every call id: a call that has started anywhere is never started again."""

import redis

from contract.errors import BrokerUnavailable
from contract.names import run_marker_key

MARKER_TTL_S = 24 * 3600


class Ledger:
    """Run markers in Redis, one a call id, set once."""

    def __init__(self, client: "redis.Redis", deployment: str) -> None:
        self._client = client
        self._deployment = deployment

    def claim(self, tenant: str, call_id: str, host: str) -> bool:
        """True for the first to claim the call; False when it has started before, here or elsewhere. Raises BrokerUnavailable."""
        key = run_marker_key(self._deployment, tenant, call_id)
        try:
            return bool(self._client.set(key, host, nx=True, ex=MARKER_TTL_S))
        except redis.RedisError as error:
            raise BrokerUnavailable(f"the call was not run: Redis did not take its run marker ({error}); see that Redis is up") from error

    def holder(self, tenant: str, call_id: str) -> str | None:
        """Who has claimed the call, as it called itself; None when nobody has. Raises BrokerUnavailable."""
        try:
            value = self._client.get(run_marker_key(self._deployment, tenant, call_id))
        except redis.RedisError as error:
            raise BrokerUnavailable(f"Redis did not give the call's run marker ({error})") from error
        return value.decode(errors="replace") if isinstance(value, bytes) else None
