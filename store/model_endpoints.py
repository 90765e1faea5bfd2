"""The model endpoints of the deployment and of its tenants. Administrators change them; orchestrators read them for
each request to a model.

Invariant: a change takes effect everywhere within 2 seconds, because no process uses a copy that is older than
ENDPOINTS_FRESH_S.
"""

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from toolcrew.concurrency.tasks import SharedReads
from toolcrew.contract.errors import ConfigError, ErrorCode, ToolFailure
from toolcrew.contract.model_endpoints import (
    ENDPOINT_NAME,
    ENDPOINTS_FRESH_S,
    MAX_FALLBACKS,
    EndpointView,
    ModelEndpoint,
    endpoint_field,
    parse_endpoints,
    seal_endpoint,
)
from toolcrew.contract.names import audit_key, model_endpoints_key, tenants_key
from toolcrew.contract.signing import SigningKeys
from toolcrew.contract.tenancy import REGISTERED_LUA, TenantPolicy
from toolcrew.store.audit import AUDIT_LUA, AuditedStore
from toolcrew.store.connection import RedisClient, broker_errors
from toolcrew.store.model_limits import read_limits
from toolcrew.store.scripts import Script

_SET = Script(
    f"""
{AUDIT_LUA}
{REGISTERED_LUA}
-- `tenant` '': an endpoint of the deployment.
if tenant ~= '' and not is_served(tenants, tenant) then return -1 end
audit(audit_log, entry)
return redis.call('HSET', endpoints, field, record)
""",
    keys=("endpoints", "tenants", "audit_log"),
    args=("field", "record", "entry", "tenant"),
)
_REMOVE = Script(
    f"""
{AUDIT_LUA}
if redis.call('HEXISTS', endpoints, field) == 0 then return 0 end
audit(audit_log, entry)
return redis.call('HDEL', endpoints, field)
""",
    keys=("endpoints", "audit_log"),
    args=("field", "entry"),
)


@dataclass(frozen=True)
class StoredEndpoint:
    """An endpoint and its owner. `tenant` None: the deployment."""

    name: str
    tenant: str | None
    endpoint: ModelEndpoint

    @property
    def id(self) -> str:
        """Return the endpoint's id, which is unique in the deployment."""
        return endpoint_field(self.name, self.tenant)


class ModelEndpoints(AuditedStore):
    """The endpoints in Redis. They are read at most once every ENDPOINTS_FRESH_S seconds. Changes by this process are
    visible to it at once.
    """

    def __init__(self, client: RedisClient, deployment: str, keys: SigningKeys) -> None:
        self._client = client
        self._deployment = deployment
        self._keys = keys
        self._key = model_endpoints_key(deployment)
        self._tenants = tenants_key(deployment)
        self._audit = audit_key(deployment)
        self._cache = _Cache()

    async def all(self) -> Mapping[str, ModelEndpoint | ConfigError]:
        """Return the endpoints by their fields (`endpoint_field`). An unreadable endpoint is replaced by its error.
        Raises BrokerUnavailable when Redis does not answer.
        """
        cache = self._cache
        if time.monotonic() - cache.read_at >= ENDPOINTS_FRESH_S:
            await cache.reads.read("", self._read)
        return cache.endpoints

    async def of(self, tenant: str) -> dict[str, StoredEndpoint | ConfigError]:
        """Return the endpoints of a tenant by name: its own endpoints, and the endpoints of the deployment whose names
        its own endpoints do not use.
        """
        found: dict[str, StoredEndpoint | ConfigError] = {}
        for field, endpoint in (await self.all()).items():
            owner, _, name = field.rpartition("/")
            if owner == tenant or (not owner and endpoint_field(name, tenant) not in self._cache.endpoints):
                found[name] = (
                    endpoint if isinstance(endpoint, ConfigError) else StoredEndpoint(name, owner or None, endpoint)
                )
        return found

    async def find(self, tenant: str, name: str) -> StoredEndpoint | None:
        """Return the endpoint that a run of the tenant means by `name`, the tenant's own endpoint before one of the
        deployment; None if there is none.

        Raises ConfigError: the record cannot be read. Raises BrokerUnavailable when Redis does not answer.
        """
        endpoints = await self.all()
        for owner in (tenant, None):
            endpoint = endpoints.get(endpoint_field(name, owner))
            if isinstance(endpoint, ConfigError):
                raise endpoint
            if endpoint is not None:
                return StoredEndpoint(name, owner, endpoint)
        return None

    async def views(
        self, tenant: str | None = None, policy: TenantPolicy | None = None, *, shows_addresses: bool = True
    ) -> list[EndpointView]:
        """Return the endpoints that a tenant may use, by name. `tenant` None: all endpoints, of the deployment and of
        every tenant. `policy`: the tenant's policy, which may forbid endpoints; None: all are allowed.

        Raises BrokerUnavailable when Redis does not answer.
        """
        if tenant is None:
            found = {field: (field.rpartition("/"), endpoint) for field, endpoint in (await self.all()).items()}
            rows = [(name, owner or None, endpoint) for (owner, _, name), endpoint in found.values()]
        else:
            rows = [
                (name, None, stored) if isinstance(stored, ConfigError) else (name, stored.tenant, stored.endpoint)
                for name, stored in (await self.of(tenant)).items()
            ]
        rows = sorted((row for row in rows if policy is None or policy.allows_model(row[0])), key=lambda row: row[:1])
        limits = await read_limits(
            self._client, self._deployment, [endpoint_field(name, owner) for name, owner, _ in rows]
        )
        hidden = set[str]() if shows_addresses else {"base_url", "secret"}
        return [
            EndpointView(name=name, tenant=owner, state=str(endpoint))
            if isinstance(endpoint, ConfigError)
            else EndpointView(
                name=name, tenant=owner, running=running, blocked_s=remaining_s, **endpoint.model_dump(exclude=hidden)
            )
            for (name, owner, endpoint), (running, remaining_s) in zip(rows, limits, strict=True)
        ]

    async def set(self, name: str, endpoint: ModelEndpoint, tenant: str | None = None) -> None:
        """Add or replace an endpoint. Every orchestrator uses it within 2 seconds.

        Raises ToolFailure(INVALID_ARGUMENTS): the name is invalid, or its chain of fallbacks is a loop or too long.
        Raises ToolFailure(UNKNOWN_TENANT): the tenant is not registered. Raises BrokerUnavailable when Redis does not
        answer.
        """
        try:
            ENDPOINT_NAME.validate_python(name)
        except ValidationError:
            raise ToolFailure(
                ErrorCode.INVALID_ARGUMENTS,
                "the name of the endpoint is invalid: use 1 to 64 letters, digits, '-', '_' and '.'",
            ) from None
        await self._read()
        await self._check_fallbacks(name, endpoint, tenant)
        details = {
            field: value if isinstance(value, str) else json.dumps(value)
            for field, value in endpoint.model_dump(exclude_none=True).items()
        }
        entry = self._entry("model.set", name, tenant=tenant, details=details)
        field = endpoint_field(name, tenant)
        with broker_errors(f"the model endpoint {name} was not set"):
            reply = await _SET.run(
                self._client,
                endpoints=self._key,
                tenants=self._tenants,
                audit_log=self._audit,
                field=field,
                record=seal_endpoint(self._keys, field, endpoint),
                entry=entry,
                tenant=tenant or "",
            )
        self._cache.read_at = float("-inf")
        if reply == -1:
            raise ToolFailure(
                ErrorCode.UNKNOWN_TENANT,
                f"tenant {tenant} does not exist: register it first (toolcrew tenants add {tenant})",
            )

    async def remove(self, name: str, tenant: str | None = None) -> bool:
        """Remove an endpoint. Return whether it existed.

        Raises ToolFailure(INVALID_ARGUMENTS): it is the fallback of another endpoint. Raises BrokerUnavailable when
        Redis does not answer.
        """
        await self._read()
        for field, other in self._cache.endpoints.items():
            owner = field.rpartition("/")[0] or None
            if isinstance(other, ModelEndpoint) and other.fallback == name and tenant in (owner, None):
                raise ToolFailure(
                    ErrorCode.INVALID_ARGUMENTS,
                    f"{name} is the fallback of {field}: set another fallback there, or remove {field} first",
                )
        entry = self._entry("model.remove", name, tenant=tenant)
        with broker_errors(f"the model endpoint {name} was not removed"):
            removed = await _REMOVE.run(
                self._client,
                endpoints=self._key,
                audit_log=self._audit,
                field=endpoint_field(name, tenant),
                entry=entry,
            )
        self._cache.read_at = float("-inf")
        return bool(removed)

    async def _check_fallbacks(self, name: str, endpoint: ModelEndpoint, tenant: str | None) -> None:
        """Raise ToolFailure(INVALID_ARGUMENTS) unless the fallbacks exist and come to an end."""
        chain, step = [name], endpoint
        while step.fallback is not None:
            if step.fallback in chain or len(chain) > MAX_FALLBACKS:
                text = " -> ".join([*chain, step.fallback])
                raise ToolFailure(
                    ErrorCode.INVALID_ARGUMENTS,
                    f"the fallbacks {text} repeat, or are more than {MAX_FALLBACKS}: name another fallback",
                )
            chain.append(step.fallback)
            found = self._cache.endpoints.get(endpoint_field(step.fallback, tenant)) or self._cache.endpoints.get(
                step.fallback
            )
            if not isinstance(found, ModelEndpoint):
                raise ToolFailure(
                    ErrorCode.INVALID_ARGUMENTS,
                    f"the fallback {step.fallback} is not a model endpoint: set it first (toolcrew models set NAME)",
                )
            step = found

    async def _read(self) -> None:
        cache, requested_at = self._cache, time.monotonic()
        with broker_errors("the model endpoints were not read"):
            fields: Any = await self._client.hgetall(self._key)
        if fields != cache.fields:
            cache.fields, cache.endpoints = fields, parse_endpoints(self._keys, fields)
        # The age of the cache counts from the request and not from the reply, so that a slow reply does not delay a
        # change.
        cache.read_at = requested_at


class _Cache:
    """The last read endpoints, shared by all copies of the same ModelEndpoints."""

    def __init__(self) -> None:
        self.fields: Mapping[bytes, bytes] = {}
        self.endpoints: Mapping[str, ModelEndpoint | ConfigError] = {}
        self.read_at = float("-inf")
        self.reads = SharedReads[None]()
