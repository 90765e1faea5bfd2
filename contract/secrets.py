"""Secrets of tenants: programs in a sandbox use them without reading them (docs/tenants.md)."""

import hashlib
import re
from collections.abc import Collection
from typing import Annotated

from pydantic import AfterValidator, Field

from toolcrew.contract.calls import Record

MIN_VALUE_CHARS, MAX_VALUE_CHARS = 8, 4096
MAX_SECRETS = 100
"""Limit of the number of secrets of one tenant."""
MAX_SESSION_CHARS = 32 * 1024
"""Limit of the characters of all secrets of one session. The egress proxy compares each answer with all of them."""
MAX_HOSTS = 32
# No secret may be written into these headers: its value could change where the request goes or where its body ends.
_ROUTING = frozenset(
    {
        "accept-encoding",
        "connection",
        "content-length",
        "expect",
        "host",
        "keep-alive",
        "range",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
_RESERVED = frozenset(
    {"HOME", "LANG", "PATH", "TERM", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "BASH_ENV", "ENV", "IFS", "SHELLOPTS"}
)
_VALUE = re.compile(r"[\x21-\x7e](?:[\x20-\x7e]*[\x21-\x7e])?")
_LABEL = r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?"
_PLACEHOLDER_CHARS = 32


def _check_name(name: str) -> str:
    if name in _RESERVED or name.startswith(("LD_", "PYTHON", "TOOLCREW_")):
        raise ValueError(f"{name} cannot be the variable of a secret, because programs use it: choose another name")
    return name


def _check_place(place: str) -> str:
    kind, _, name = place.partition(":")
    if kind == "header" and (name.lower() in _ROUTING or name.lower().startswith("proxy-")):
        raise ValueError(f"the header {name} cannot carry a secret, because HTTP itself uses it: choose another header")
    return place


SecretName = Annotated[str, Field(pattern=r"^[A-Z][A-Z0-9_]{0,63}$"), AfterValidator(_check_name)]
"""Name of a secret and of the variable with its placeholder."""
SecretHost = Annotated[
    str, Field(max_length=259, pattern=rf"^(?:{_LABEL}\.)*[a-z](?:[a-z0-9-]{{0,61}}[a-z0-9])?(?::[1-9][0-9]{{0,4}})?$")
]
"""A host name, or a host name with a port. The default port is 443. Patterns and addresses are not accepted."""
SecretPlace = Annotated[
    str,
    Field(pattern=r"^(?:header:[A-Za-z0-9-]{1,64}|query:[A-Za-z0-9._~-]{1,64}|basic)$"),
    AfterValidator(_check_place),
]
"""Part of an HTTP request that may contain the secret: a header, a query parameter, or the password of basic
authentication.
"""


class SecretInfo(Record):
    """A stored secret without its value. `hosts`: hosts to which sandboxes may send it; empty: no sandbox may use it.
    `revision` grows with every change. Times are Unix seconds.
    """

    name: SecretName
    hosts: Annotated[tuple[SecretHost, ...], Field(max_length=MAX_HOSTS)] = ()
    place: SecretPlace = "header:Authorization"
    revision: int = Field(default=1, ge=1)
    created_at: float = Field(ge=0)
    changed_at: float = Field(ge=0)


def check_value(value: str) -> None:
    """Raise ValueError unless a header can carry the value. The text of the error does not contain the value."""
    if not MIN_VALUE_CHARS <= len(value) <= MAX_VALUE_CHARS:
        raise ValueError(
            f"the value has {len(value)} characters: use {MIN_VALUE_CHARS} to {MAX_VALUE_CHARS}, because a "
            "shorter one cannot be masked"
        )
    if not _VALUE.fullmatch(value):
        raise ValueError("the value is not one line of printable ASCII without spaces around it: encode it first")


def check_session_values(values: Collection[str]) -> None:
    """Raise ValueError if the secrets of one session are too long together."""
    if (chars := sum(map(len, values))) > MAX_SESSION_CHARS:
        raise ValueError(
            f"the secrets of the session have {chars} characters, and the limit is {MAX_SESSION_CHARS}: name fewer "
            "secrets, or use shorter ones"
        )


def build_placeholder(tenant: str, session: str, name: str) -> str:
    """Return the placeholder that a session's programs have in place of the secret. The placeholder is not secret: the
    egress proxy replaces it with the secret only on connections of this session.
    """
    digest = hashlib.sha256(f"{tenant}\0{session}\0{name}".encode()).hexdigest()
    return f"tcs_placeholder_{digest[:_PLACEHOLDER_CHARS]}"
