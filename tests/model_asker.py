"""A process that sends requests to the configured endpoint `fast` of tenant acme, one after another.

python -m tests.model_asker REDIS_URL COUNT LEASE_S
"""

import asyncio
import sys
from types import SimpleNamespace
from typing import Any

import redis.asyncio

from orchestrator.dialects.model import ModelRequest
from orchestrator.runs.models import Models
from orchestrator.settings import OrchestratorSettings
from store import model_limits
from store.tenants import RedisTenants
from tests.builders import KEY


def build_models(client: "redis.asyncio.Redis", **fields: Any) -> Models:
    """Return the models of one process of deployment d."""
    settings = OrchestratorSettings.model_validate({"deployment": "d", "redis_url": None, **fields})
    pool: Any = SimpleNamespace(redis=client, keys=KEY, tenants=RedisTenants(client, "d", KEY))
    return Models(settings, pool)


async def ask(url: str, count: int, lease_s: float) -> None:
    model_limits.LEASE_S = lease_s
    async with redis.asyncio.Redis.from_url(url) as client, build_models(client) as models:
        for _ in range(count):
            chosen = await models.get("acme", "fast")
            async for _ in chosen.model.stream(ModelRequest([{"role": "user", "content": "hi"}])):
                pass
            sys.stdout.write("answered\n")
            sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(ask(sys.argv[1], int(sys.argv[2]), float(sys.argv[3])))
