"""Signs long-lived records in Redis again with the present secret, so that an earlier secret can be removed."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import redis.asyncio

from toolcrew.contract.errors import ConfigError, EnvelopeRefused
from toolcrew.contract.model_endpoints import endpoint_purpose
from toolcrew.contract.names import (
    api_keys_key,
    installed_skills_key,
    model_endpoints_key,
    secrets_key,
    switches_key,
    tenants_key,
)
from toolcrew.contract.signing import SigningKeys
from toolcrew.contract.tenancy import DEFAULT_TENANT, VERSION_FIELD
from toolcrew.store.connection import broker_errors
from toolcrew.store.scripts import Script
from toolcrew.store.secrets import reseal_secret
from toolcrew.store.skills import skill_purpose

# A record that has changed since it was read already has a signature with the present secret.
_REPLACE = Script(
    """
if redis.call('HGET', hash, field) ~= present then return 0 end
redis.call('HSET', hash, field, resealed)
return 1
""",
    keys=("hash",),
    args=("field", "present", "resealed"),
)


@dataclass
class ResealResult:
    """The result of signing again. `signed`: number of records with a new signature. `refused`: names of records that
    cannot be verified; they are not changed.
    """

    signed: int = 0
    refused: list[str] = field(default_factory=list)


async def reseal(client: "redis.asyncio.Redis", deployment: str, keys: SigningKeys) -> ResealResult:
    """Sign API keys, policies, switches, model endpoints and installed skills with the present secret, and encrypt
    secrets with it. The function can be repeated safely. Raises BrokerUnavailable when Redis does not answer.
    """

    def sign(purpose: Callable[[str], str]) -> Callable[[str, bytes], bytes]:
        return lambda name, sealed: keys.seal(purpose(name), keys.unseal(purpose(name), sealed)).encode()

    hashes: dict[str, tuple[str, Callable[[str, bytes], bytes]]] = {
        api_keys_key(deployment): ("API key", sign(lambda name: f"api-key {name}")),
        tenants_key(deployment): ("policy", sign(lambda name: f"policy {name}")),
        switches_key(deployment): ("switch", sign(lambda name: f"switch {name}")),
        model_endpoints_key(deployment): ("model endpoint", sign(endpoint_purpose)),
        secrets_key(deployment, None): ("secret", partial(reseal_secret, keys, None)),
    }
    done = ResealResult()
    with broker_errors("some records were not signed again"):
        names: Any = await client.hkeys(tenants_key(deployment))
        for tenant in {DEFAULT_TENANT, *(raw.decode(errors="replace") for raw in names)} - {VERSION_FIELD}:
            hashes[installed_skills_key(deployment, tenant)] = (
                f"skill of tenant {tenant}",
                sign(partial(skill_purpose, tenant)),
            )
            hashes[secrets_key(deployment, tenant)] = (
                f"secret of tenant {tenant}",
                partial(reseal_secret, keys, tenant),
            )
        for key, (kind, reseal_record) in hashes.items():
            records: Any = await client.hgetall(key)
            for raw, sealed in records.items():
                name = raw.decode(errors="replace")
                if name == VERSION_FIELD:
                    continue
                try:
                    again = reseal_record(name, sealed)
                except (EnvelopeRefused, ConfigError):
                    done.refused.append(f"{kind} {name}")
                    continue
                if again != sealed:
                    done.signed += int(await _REPLACE.run(client, hash=key, field=raw, present=sealed, resealed=again))
    return done
