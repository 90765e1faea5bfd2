"""Webhooks about the end of a run or batch, and their signature (Standard Webhooks)."""

import base64
import binascii
import hashlib
import hmac
from typing import Literal

from pydantic import Field, field_validator

from toolcrew.contract.calls import Record

SEND_TOOL = "webhook.send"
MAX_URL_CHARS = 2048
_PREFIX = "whsec_"
_MIN_BYTES, _MAX_BYTES = 24, 64


class Webhook(Record):
    """Receiver of a webhook. `secret`: `whsec_` and 24 to 64 bytes in base64, with which receivers verify webhooks."""

    url: str = Field(min_length=1, max_length=MAX_URL_CHARS, pattern=r"^https?://[^\s]+$")
    secret: str = Field(max_length=256, repr=False)

    @field_validator("secret")
    @classmethod
    def _is_secret(cls, secret: str) -> str:
        _key(secret)
        return secret


class WebhookDelivery(Record):
    """The delivery of a webhook. `pending`: the run or batch has not ended, or the next attempt is due later. `error`:
    why the last attempt failed.
    """

    state: Literal["pending", "delivered", "failed"]
    tries: int = 0
    error: str | None = None


def sign(secret: str, notice: str, timestamp: int, body: str) -> str:
    """Return the value of the header `webhook-signature`. `notice`: the id of the sent message."""
    signed = hmac.new(_key(secret), f"{notice}.{timestamp}.{body}".encode(), hashlib.sha256).digest()
    return f"v1,{base64.b64encode(signed).decode()}"


def _key(secret: str) -> bytes:
    try:
        key = base64.b64decode(secret.removeprefix(_PREFIX), validate=True)
    except (binascii.Error, ValueError):
        key = b""
    if not secret.startswith(_PREFIX) or not _MIN_BYTES <= len(key) <= _MAX_BYTES:
        raise ValueError(
            f"the secret is invalid: write {_PREFIX} and then {_MIN_BYTES} to {_MAX_BYTES} bytes in base64"
        )
    return key
