"""Secrets of tenants and of the deployment itself, encrypted in Redis.

Invariant: a value is readable only with the secret of the deployment, and only as the secret of its tenant and name. No
listing, audit entry or error contains a value. A change takes effect everywhere within 2 seconds.
"""

import os
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import redis.asyncio
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from pydantic import Field, ValidationError

from toolcrew.contract.calls import Record
from toolcrew.contract.errors import BrokerUnavailable, ConfigError, ErrorCode, ToolFailure
from toolcrew.contract.invalid_input import find_invalid
from toolcrew.contract.names import audit_key, secrets_key, tenants_key
from toolcrew.contract.secrets import MAX_SECRETS, SecretInfo, check_value
from toolcrew.contract.signing import SigningKey, SigningKeys, readable
from toolcrew.contract.tenancy import REGISTERED_LUA, VERSION_FIELD
from toolcrew.store.audit import AUDIT_LUA, AuditedStore
from toolcrew.store.connection import SyncRedis, broker_errors
from toolcrew.store.scripts import Script
from toolcrew.telemetry.logs import get_logger

log = get_logger(__name__)

MAX_CHANGES = 20
"""Maximum number of attempts at a change while other processes change the same secret."""
MAX_CACHED_TENANTS = 1000
_NONCE_BYTES = 12
_SET = Script(
    f"""
{AUDIT_LUA}
{REGISTERED_LUA}
-- `read_record`: the record that was read, '' for none. `version`: a new one. `tenant` '': the deployment.
if tenant ~= '' and not is_served(tenants, tenant) then return 'tenant' end
local present = redis.call('HGET', secrets, name) or ''
if present ~= read_record then return 'changed' end
local count = redis.call('HLEN', secrets) - redis.call('HEXISTS', secrets, '{VERSION_FIELD}')
if present == '' and count >= tonumber(max_secrets) then return 'many' end
audit(audit_log, entry)
redis.call('HSET', secrets, name, record, '{VERSION_FIELD}', version)
return 'done'
""",
    keys=("secrets", "audit_log", "tenants"),
    args=("name", "read_record", "record", "version", "entry", "tenant", "max_secrets"),
)
_REMOVE = Script(
    f"""
{AUDIT_LUA}
if redis.call('HEXISTS', secrets, name) == 0 then return 0 end
audit(audit_log, entry)
redis.call('HDEL', secrets, name)
redis.call('HSET', secrets, '{VERSION_FIELD}', version)
return 1
""",
    keys=("secrets", "audit_log"),
    args=("name", "version", "entry"),
)


class StoredSecret(Record):
    """The record in Redis: `encrypted` is the nonce and the AES-GCM ciphertext of the value."""

    info: SecretInfo
    encrypted: bytes = Field(max_length=8192)


@dataclass(frozen=True)
class Secret:
    """A secret with its value."""

    info: SecretInfo
    value: str = field(repr=False)


class SecretStore(AuditedStore):
    """The secrets of one deployment. `tenant`: the owner; None: the deployment itself.

    Every method raises BrokerUnavailable when Redis does not answer.
    """

    def __init__(self, client: "redis.asyncio.Redis", deployment: str, keys: SigningKeys) -> None:
        self._client = client
        self._deployment = deployment
        self._keys = keys

    async def all(self, tenant: str | None) -> Mapping[str, SecretInfo | ConfigError]:
        """Return the secrets without their values, by name. A record that cannot be verified is replaced by its
        error.
        """
        with broker_errors("the secrets were not read"):
            fields: Any = await self._client.hgetall(secrets_key(self._deployment, tenant))
        infos: dict[str, SecretInfo | ConfigError] = {}
        for raw, sealed in sorted(fields.items()):
            name = raw.decode(errors="replace")
            if name == VERSION_FIELD:
                continue
            try:
                infos[name] = _parse(self._keys, tenant, name, sealed).info
            except ConfigError as error:
                infos[name] = error
        return infos

    async def get(self, tenant: str | None, name: str) -> Secret | None:
        """Return a secret with its value, as it is in Redis now; None if there is none. Raises ConfigError: the record
        cannot be verified or read.
        """
        with broker_errors("the secret was not read"):
            sealed: Any = await self._client.hget(secrets_key(self._deployment, tenant), name)
        return open_secret(self._keys, tenant, name, sealed) if sealed is not None else None

    async def set(
        self,
        tenant: str | None,
        name: str,
        value: str,
        *,
        hosts: tuple[str, ...] = (),
        place: str = "header:Authorization",
    ) -> SecretInfo:
        """Store a secret, or replace it. Return its record without the value.

        Raises ToolFailure(INVALID_ARGUMENTS): an invalid name, value, host or place. Raises
        ToolFailure(QUOTA_EXCEEDED): too many secrets. Raises ToolFailure(UNKNOWN_TENANT): no such tenant.
        """
        try:
            check_value(value)
        except ValueError as error:
            raise ToolFailure(ErrorCode.INVALID_ARGUMENTS, str(error)) from None
        now = time.time()
        info = _build_info({"name": name, "hosts": hosts, "place": place, "created_at": now, "changed_at": now})
        details = {"hosts": ", ".join(info.hosts), "place": info.place}
        entry = self._entry("secret.set", info.name, tenant=tenant, details=details)
        key = secrets_key(self._deployment, tenant)
        for _ in range(MAX_CHANGES):
            with broker_errors("the secret was not stored"):
                sealed: Any = await self._client.hget(key, info.name)
                info = self._follow(tenant, info, sealed)
                verdict = await _SET.run(
                    self._client,
                    secrets=key,
                    audit_log=audit_key(self._deployment),
                    tenants=tenants_key(self._deployment),
                    name=info.name,
                    read_record=sealed or b"",
                    record=seal_secret(self._keys, tenant, Secret(info, value)),
                    version=secrets.token_hex(8),
                    entry=entry,
                    tenant=tenant or "",
                    max_secrets=MAX_SECRETS,
                )
            if verdict == b"done":
                return info
            if verdict != b"changed":
                raise _refused(verdict, tenant)
        raise BrokerUnavailable(
            f"the secret {info.name} was not stored, because other processes changed it at the same time: try again"
        )

    async def revoke(self, tenant: str | None, name: str) -> bool:
        """Remove a secret. Return whether it existed. A revoked secret stops working everywhere within 2 seconds."""
        entry = self._entry("secret.remove", name, tenant=tenant)
        with broker_errors("the secret was not revoked"):
            was_there = await _REMOVE.run(
                self._client,
                secrets=secrets_key(self._deployment, tenant),
                audit_log=audit_key(self._deployment),
                name=name,
                version=secrets.token_hex(8),
                entry=entry,
            )
        return bool(was_there)

    def _follow(self, tenant: str | None, info: SecretInfo, sealed: bytes | None) -> SecretInfo:
        """Return the record with the revision after the stored one."""
        if sealed is None:
            return info
        try:
            present = _parse(self._keys, tenant, info.name, sealed).info
        except ConfigError:
            return info  # The stored record cannot be verified. The new record replaces it.
        return info.model_copy(update={"revision": present.revision + 1, "created_at": present.created_at})


class TenantSecrets(dict[str, Secret]):
    """The readable secrets of a tenant by name. `unreadable`: names of records that cannot be verified or read."""

    def __init__(self) -> None:
        super().__init__()
        self.unreadable: set[str] = set()


class WorkerSecrets:
    """The secrets of tenants, for workers. Thread-safe."""

    def __init__(self, client: SyncRedis, deployment: str, keys: SigningKeys) -> None:
        self._client = client
        self._deployment = deployment
        self._keys = keys
        self._cached: dict[str, tuple[Any, TenantSecrets]] = {}

    def all(self, tenant: str) -> TenantSecrets:
        """Return the tenant's secrets by name, as they are in Redis now. A secret that cannot be verified is logged and
        is only in `unreadable`. Raises BrokerUnavailable when Redis does not answer.
        """
        key, (version, found) = secrets_key(self._deployment, tenant), self._cached.get(tenant, (None, TenantSecrets()))
        with broker_errors("the secrets were not read"):
            current: Any = self._client.hget(key, VERSION_FIELD)
            if current is not None and current == version:
                return found
            fields: Any = self._client.hgetall(key)
        found = self._open_all(tenant, fields)
        while len(self._cached) >= MAX_CACHED_TENANTS:
            del self._cached[next(iter(self._cached))]
        self._cached[tenant] = (fields.get(VERSION_FIELD.encode()), found)
        return found

    def _open_all(self, tenant: str, fields: Mapping[bytes, bytes]) -> TenantSecrets:
        found = TenantSecrets()
        for raw, sealed in fields.items():
            name = raw.decode(errors="replace")
            if name == VERSION_FIELD:
                continue
            try:
                found[name] = open_secret(self._keys, tenant, name, sealed)
            except ConfigError as error:
                found.unreadable.add(name)
                log.error("secret_unreadable", tenant=tenant, secret=name, error=str(error))
        return found


def secret_purpose(tenant: str | None, name: str) -> str:
    """Return the purpose of the signature and the encryption of a secret."""
    return f"secret {tenant or ''} {name}"


def seal_secret(keys: SigningKeys, tenant: str | None, secret: Secret) -> str:
    """Return the encrypted and signed record of a secret. The record is valid only for this tenant and this name."""
    purpose, nonce = secret_purpose(tenant, secret.info.name), os.urandom(_NONCE_BYTES)
    encrypted = nonce + _build_cipher(keys.current).encrypt(nonce, secret.value.encode(), purpose.encode())
    return keys.seal(purpose, StoredSecret(info=secret.info, encrypted=encrypted).model_dump_json())


def open_secret(keys: SigningKeys, tenant: str | None, name: str, sealed: bytes) -> Secret:
    """Return a secret with its value. Raises ConfigError with a cause and advice: the record cannot be verified or
    read.
    """
    record = _parse(keys, tenant, name, sealed)
    key = keys.find(sealed.partition(b".")[0].decode())
    assert key is not None  # `key` exists, because the signature was verified with this key
    nonce, text = record.encrypted[:_NONCE_BYTES], record.encrypted[_NONCE_BYTES:]
    try:
        value = _build_cipher(key).decrypt(nonce, text, secret_purpose(tenant, name).encode())
    except (InvalidTag, ValueError) as error:
        raise ConfigError(f"the secret {name} cannot be decrypted: {advise_setting(tenant, name)}") from error
    return Secret(record.info, value.decode())


def reseal_secret(keys: SigningKeys, tenant: str | None, name: str, sealed: bytes) -> bytes:
    """Return the record, encrypted with the present secret of the deployment. Raises ConfigError like open_secret."""
    secret = open_secret(keys, tenant, name, sealed)
    is_present = sealed.startswith(f"{keys.current.id}.".encode())
    return sealed if is_present else seal_secret(keys, tenant, secret).encode()


def _parse(keys: SigningKeys, tenant: str | None, name: str, sealed: bytes) -> StoredSecret:
    with readable(f"the secret {name}", advise_setting(tenant, name)):
        return StoredSecret.model_validate_json(keys.unseal(secret_purpose(tenant, name), sealed))


def _build_cipher(key: SigningKey) -> AESGCM:
    return AESGCM(HKDF(SHA256(), length=32, salt=None, info=b"toolcrew secrets v1").derive(key.key))


def _build_info(fields: Mapping[str, Any]) -> SecretInfo:
    try:
        return SecretInfo.model_validate(fields)
    except ValidationError as error:
        part = find_invalid(error)
        advice = {
            "name": "use 1 to 64 capital letters, digits and '_', such as GITHUB_TOKEN",
            "hosts": "give names such as api.github.com or git.example.com:8443, without patterns and addresses",
            "place": "use header:NAME, query:NAME or basic",
        }[str(part.path[0])]
        raise ToolFailure(
            ErrorCode.INVALID_ARGUMENTS, f"the {part.path[0]} of the secret is invalid ({part.reason}): {advice}"
        ) from None


def advise_setting(tenant: str | None, name: str) -> str:
    """Return the advice to set a secret."""
    if tenant is None:
        return f"set it (toolcrew secrets set {name} --deployment)"
    return f"set it (toolcrew secrets set {name} --tenant {tenant})"


def _refused(verdict: bytes, tenant: str | None) -> ToolFailure:
    if verdict == b"tenant":
        return ToolFailure(
            ErrorCode.UNKNOWN_TENANT,
            f"tenant {tenant} does not exist: register it first (toolcrew tenants add {tenant})",
        )
    return ToolFailure(
        ErrorCode.QUOTA_EXCEEDED, f"there are {MAX_SECRETS} secrets already, the maximum: revoke one first"
    )
