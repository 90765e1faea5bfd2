"""Counts what was refused at the queue, by reason, where the operator finds it (`refusals_key`)."""

import redis
import structlog

from contract.errors import RefusalReason
from contract.names import refusals_key

log = structlog.get_logger(__name__)


class Refusals:
    """The counts of the whole deployment, in one hash. `client`: one that sends every command once (`connect_once`)."""

    def __init__(self, client: "redis.Redis", deployment: str) -> None:
        self._client = client
        self._key = refusals_key(deployment)

    def count(self, reason: RefusalReason) -> None:
        """One more. When Redis does not take it the log alone has it."""
        try:
            self._client.hincrby(self._key, reason, 1)
        except redis.RedisError as error:
            log.warning("refusal_not_counted", reason=reason, error=str(error))
