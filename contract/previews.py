"""Previews: addresses at which browsers and programs reach the ports of sandboxes."""

import base64
import re
import secrets
from typing import Final
from urllib.parse import urlsplit

from pydantic import Field, ValidationError

from toolcrew.contract.calls import Record
from toolcrew.contract.errors import ConfigError, EnvelopeRefused
from toolcrew.contract.signing import SigningKeys

DEFAULT_PREVIEW_S: Final = 3600.0
MAX_PREVIEW_S: Final = 86_400.0
TICKET_PARAMETER: Final = "toolcrew_ticket"
_PURPOSE: Final = "preview-ticket"
_LABEL: Final = re.compile(r"([1-9][0-9]{0,4})-([a-z2-7]{20})")
_DOMAIN: Final = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*")


class PreviewTicket(Record):
    """Permission to use one port of a preview. `expires_at`: Unix seconds."""

    preview: str
    port: int
    expires_at: float = Field(ge=0)


def new_preview_id() -> str:
    """Return 96 random bits, in letters and digits that names of hosts may have."""
    return base64.b32encode(secrets.token_bytes(12)).decode().rstrip("=").lower()


def seal_preview_ticket(keys: SigningKeys, ticket: PreviewTicket) -> str:
    """Return the signed ticket, in characters that a query and a cookie may have."""
    return base64.urlsafe_b64encode(keys.seal(_PURPOSE, ticket.model_dump_json()).encode()).decode().rstrip("=")


def open_preview_ticket(keys: SigningKeys, sealed: str) -> PreviewTicket:
    """Return a ticket after a check of its signature. The caller checks its fields. Raises EnvelopeRefused."""
    try:
        text = base64.urlsafe_b64decode(sealed.encode() + b"=" * (-len(sealed) % 4))
        return PreviewTicket.model_validate_json(keys.unseal(_PURPOSE, text))
    except (ValueError, ValidationError):
        raise EnvelopeRefused("this is no ticket of a preview", "signature") from None


class PreviewSite:
    """The domain of the previews of a deployment. `url`: its address, such as https://previews.example.org."""

    def __init__(self, url: str) -> None:
        """Parse the address. Raises ConfigError."""
        parts = urlsplit(url)
        if (
            parts.scheme not in ("http", "https")
            or _DOMAIN.fullmatch(parts.hostname or "") is None
            or url.rstrip("/") != f"{parts.scheme}://{parts.netloc}"
            or "@" in parts.netloc
        ):
            raise ConfigError(
                f"the address of previews {url!r} is invalid: use a domain that has only previews, such as "
                "https://previews.example.org"
            )
        self.url, self.scheme, self._netloc = url, parts.scheme, parts.netloc.lower()

    def build_address(self, preview: str, port: int) -> str:
        """Return the address of a port, without a path."""
        return f"{self.scheme}://{port}-{preview}.{self._netloc}"

    def find(self, host: str) -> tuple[str, int] | None:
        """Return preview and port of the value of a Host header. None: it is no host of this domain."""
        label, _, rest = host.partition(".")
        found = _LABEL.fullmatch(label)
        if found is None or rest != self._netloc or int(found[1]) > 65_535:
            return None
        return found[2], int(found[1])
