"""Checks the tool names of a tenant's policy against the tools that the deployment has."""

import difflib
import json
from typing import Any

import redis.asyncio
from redis.exceptions import RedisError

from contract.errors import BrokerUnavailable, ErrorCode, ToolFailure
from contract.names import BUILTIN_TOOLS, CATALOG_POOLS, catalog_names_key, installed_skills_key
from contract.tenancy import TenantPolicy


async def check_tools(client: "redis.asyncio.Redis", deployment: str, tenant: str, policy: TenantPolicy) -> list[str]:
    """Return warnings about patterns that match no tool. Tools whose workers are stopped count, if a worker has published them before.

    Raises ToolFailure(INVALID_ARGUMENTS) with the nearest names for a name that no tool has, BrokerUnavailable.
    """
    if policy.tools is None:
        return []
    try:
        texts: Any = await client.mget([catalog_names_key(deployment, pool) for pool in CATALOG_POOLS])
        skills: Any = await client.hkeys(installed_skills_key(deployment, tenant))
    except (RedisError, OSError) as error:
        raise BrokerUnavailable(f"the tools of the policy were not checked: Redis does not answer ({error}); see that it is up") from error
    published = {name for text in texts if text is not None for name in json.loads(text)}
    known = sorted({*BUILTIN_TOOLS, *published, *(skill.decode(errors="replace") for skill in skills)})
    warnings = list[str]()
    for pattern in policy.tools:
        if pattern in known or pattern.startswith("session."):
            continue
        if pattern.endswith("*"):
            if not any(name.startswith(pattern[:-1]) for name in known):
                warnings.append(f"--tools: no tool that has been published matches {pattern}")
        elif published:
            raise ToolFailure(
                ErrorCode.INVALID_ARGUMENTS,
                f"--tools: there is no tool {pattern}: see `toolcrew tools ls`; start the workers of a new tool once before you allow it",
                nearest=difflib.get_close_matches(pattern, known, n=3),
            )
        else:
            warnings.append(f"--tools: {pattern} was not checked: no worker has published its tools yet")
    return warnings
