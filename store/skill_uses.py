"""How often each tenant's runs use which skill, in Redis: the models of later runs are told of what is used most."""

from collections.abc import Mapping
from typing import Any

import redis.asyncio
from redis.exceptions import RedisError

from contract.names import skill_uses_key
from telemetry.logs import get_logger

log = get_logger(__name__)

KEPT_S = 90 * 24 * 3600
"""After the last use."""


class SkillUses:
    """Of one deployment. What is not known is nothing lost: runs go on without."""

    def __init__(self, client: "redis.asyncio.Redis", deployment: str) -> None:
        self._client, self._deployment = client, deployment

    async def note(self, tenant: str, skill: str) -> None:
        """One more. `skill`: one that there is."""
        key = skill_uses_key(self._deployment, tenant)
        try:
            async with self._client.pipeline(transaction=False) as pipeline:
                pipeline.hincrby(key, skill, 1)
                pipeline.expire(key, KEPT_S)
                await pipeline.execute()
        except (RedisError, OSError) as error:
            log.warning("skill_use_not_counted", skill=skill, error=str(error))

    async def of(self, tenant: str) -> Mapping[str, int]:
        """Skill -> how often."""
        try:
            told: Any = await self._client.hgetall(skill_uses_key(self._deployment, tenant))
        except (RedisError, OSError) as error:
            log.warning("skill_uses_not_known", tenant=tenant, error=str(error))
            return {}
        return {name.decode(errors="replace"): int(count) for name, count in told.items() if count.isdigit()}
