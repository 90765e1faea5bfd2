"""Secrets and API keys as the API and the CLI show them."""

import time

from pydantic import BaseModel, Field

from contract.clock import Instant
from contract.errors import ConfigError
from contract.secrets import SecretInfo
from store.api_keys import ApiKeyRecord


class SecretView(BaseModel):
    """A secret without its value. `hosts`: hosts that sandboxes may send it to. `place`: where a request carries it.
    `state`: `valid`, or why it is not used. Times are in ISO 8601.
    """

    name: str
    hosts: list[str] = Field(default_factory=list)
    place: str = ""
    revision: int = 0
    created_at: Instant | None = None
    changed_at: Instant | None = None
    state: str


class KeyView(BaseModel):
    """Information about an API key, without the key itself. Times are in ISO 8601."""

    id: str
    tenant: str = ""
    role: str = ""
    name: str = ""
    tail: str = ""
    created_at: Instant | None = None
    expires_at: Instant | None = None
    state: str


def view_secret(name: str, info: SecretInfo | ConfigError) -> SecretView:
    """Return the view of a secret, or of a record that cannot be read."""
    if isinstance(info, ConfigError):
        return SecretView(name=name, state=str(info))
    return SecretView.model_validate({**info.model_dump(include=set(SecretView.model_fields)), "state": "valid"})


def view_key(key_id: str, key: ApiKeyRecord | ConfigError) -> KeyView:
    """Return the view of an API key, or of a record that cannot be read."""
    if isinstance(key, ConfigError):
        return KeyView(id=key_id, state=str(key))
    is_over = key.expires_at is not None and key.expires_at <= time.time()
    fields = key.model_dump(include=set(KeyView.model_fields))
    return KeyView(id=key_id, **fields, state="expired" if is_over else "valid")
