"""Secrets of a session: put into requests to their hosts in place of placeholders.

Invariant: a secret goes only to the place of a request that its owner has named. In answers, a program in the sandbox
sees a secret in none of its usual encodings (workers/egress/masking.py).
"""

import base64
import binascii
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Annotated, Any, NamedTuple
from urllib.parse import quote, unquote

import structlog
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, SecretStr

from toolcrew.contract.secrets import MAX_HOSTS, MAX_VALUE_CHARS, SecretHost, SecretName, SecretPlace, build_placeholder
from toolcrew.workers.egress.http_messages import Header
from toolcrew.workers.web.urls import Target

log = structlog.get_logger(__name__)

HTTPS_PORT = 443
MAX_USES = 1_000
"""Maximum number of kinds of uses of one tenant that wait to be reported. A kind is a session, run, secret and host."""
MAX_REPORTED = 1_000
"""Maximum number of kinds in one report to sandboxd."""
REPORT_S = 60.0
"""Time between two reports of the same kind of use."""


def _check_value(value: SecretStr) -> SecretStr:
    # A value with a line end could leave its header, and could not be masked: pieces of answers end there.
    if not value.get_secret_value().isascii() or not value.get_secret_value().isprintable():
        raise ValueError("it is not one line of printable ASCII")
    return value


class BoundSecret(BaseModel):
    """A secret with its value, as sandboxd sends it in the opening of a connection."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: SecretName
    value: Annotated[SecretStr, Field(max_length=MAX_VALUE_CHARS), AfterValidator(_check_value)]
    hosts: tuple[SecretHost, ...] = Field(max_length=MAX_HOSTS)
    place: SecretPlace

    def is_bound_to(self, target: Target) -> bool:
        """Return whether requests to the target may carry the secret."""
        # A target that is an IP address never matches: the secret belongs to a host name, which TLS proves.
        names = {f"{target.host}:{target.port}", *([target.host] if target.port == HTTPS_PORT else [])}
        return target.literal is None and not names.isdisjoint(self.hosts)


@dataclass(frozen=True)
class FilledRequest:
    """A request with its secrets. `used`: names of the secrets in it."""

    target: bytes
    headers: tuple[Header, ...]
    used: tuple[str, ...]


class SecretFiller:
    """Replaces placeholders of one session by the secrets that are bound to one target."""

    def __init__(self, tenant: str, session: str, secrets: Iterable[BoundSecret]) -> None:
        self._secrets = [
            (secret, build_placeholder(tenant, session, secret.name).encode(), secret.value.get_secret_value().encode())
            for secret in secrets
        ]

    def fill(self, target: bytes, headers: Sequence[Header]) -> FilledRequest:
        """Return the request with secrets at their places. Placeholders at other places stay."""
        used: dict[str, None] = {}
        filled = list(headers)
        for secret, placeholder, value in self._secrets:
            # Replace the placeholder only at its place: a program could also put it where the host shows it to others,
            # such as a comment.
            kind, _, name = secret.place.partition(":")
            before = (target, list(filled))
            if kind == "header":
                key = name.lower().encode()
                filled = [_replace(header, placeholder, value) if header.key == key else header for header in filled]
            elif kind == "query":
                target = _fill_query(target, name, placeholder, value)
            else:
                filled = [_fill_basic(header, placeholder, value) for header in filled]
            if (target, filled) != before:
                used[secret.name] = None
        return FilledRequest(target, tuple(filled), tuple(used))


def _replace(header: Header, placeholder: bytes, value: bytes) -> Header:
    if placeholder not in header.value:
        return header
    return Header(header.key, header.name, header.value.replace(placeholder, value))


def _fill_query(target: bytes, name: str, placeholder: bytes, value: bytes) -> bytes:
    path, mark, query = target.partition(b"?")
    parts = query.split(b"&")
    for at, part in enumerate(parts):
        key, equals, text = part.partition(b"=")
        if equals and unquote(key.decode("ascii")) == name and placeholder in text:
            # Percent-encode the secret: a `&` in the secret would otherwise add a parameter.
            parts[at] = key + equals + text.replace(placeholder, quote(value, safe="").encode())
    return path + mark + b"&".join(parts)


def _fill_basic(header: Header, placeholder: bytes, value: bytes) -> Header:
    scheme, _, encoded = header.value.partition(b" ")
    if header.key != b"authorization" or scheme.lower() != b"basic":
        return header
    try:
        user, colon, password = base64.b64decode(encoded.strip(), validate=True).partition(b":")
    except binascii.Error:
        return header
    # Replace only a whole password: the secret's owner named the password as the place, not a part of it.
    if not colon or password != placeholder:
        return header
    return Header(header.key, header.name, scheme + b" " + base64.b64encode(user + colon + value))


class _UseKind(NamedTuple):
    """A kind of uses, with the field names of a report."""

    tenant: str
    session: str
    run: str
    secret: str
    host: str


@dataclass
class _Use:
    count: int = 0
    masked: int = 0
    reported_at: float = field(default=float("-inf"))


class SecretUses:
    """Counts requests with a secret, and answers in which it was masked, until sandboxd asks for them. The first use of
    a kind is reported at once, later uses once per REPORT_S.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._tenants: dict[str, dict[_UseKind, _Use]] = {}
        self._unreported: Counter[str] = Counter()

    def count(self, tenant: str, session: str, run: str | None, secret: str, host: str) -> None:
        """Count one request with a secret."""
        if use := self._find(_UseKind(tenant, session, run or "", secret, host)):
            use.count += 1

    def count_masked(self, tenant: str, session: str, run: str | None, secret: str, host: str) -> None:
        """Count one answer in which a secret was masked."""
        if use := self._find(_UseKind(tenant, session, run or "", secret, host)):
            use.masked += 1

    def _find(self, kind: _UseKind) -> _Use | None:
        uses = self._tenants.setdefault(kind.tenant, {})
        # A program chooses the hosts of its requests, so each tenant has a limit of kinds. Uses above the limit are
        # only logged.
        if kind not in uses and len(uses) >= MAX_USES:
            self._unreported[kind.tenant] += 1
            return None
        return uses.setdefault(kind, _Use())

    def take(self) -> list[dict[str, Any]]:
        """Return the uses that are due for a report: at most MAX_REPORTED, divided among the tenants. Delete counters
        without recent uses.
        """
        for tenant, count in self._unreported.items():
            log.error("secret_uses_not_reported", tenant=tenant, count=count)
        self._unreported.clear()
        due = [self._find_due(uses) for uses in self._tenants.values()]
        self._tenants = {tenant: uses for tenant, uses in self._tenants.items() if uses}
        # One use of each tenant in turn, because a report has a limit of bytes.
        rows = [row for turn in zip_longest(*due) for row in turn if row is not None][:MAX_REPORTED]
        return [self._report(kind, use) for kind, use in rows]

    def _find_due(self, uses: dict[_UseKind, _Use]) -> list[tuple[_UseKind, _Use]]:
        due = [(kind, use) for kind, use in uses.items() if self._clock() - use.reported_at >= REPORT_S]
        for kind, use in due:
            if not use.count + use.masked:
                del uses[kind]
        return [(kind, use) for kind, use in due if use.count + use.masked]

    def _report(self, kind: _UseKind, use: _Use) -> dict[str, Any]:
        report = kind._asdict() | {"count": use.count, "masked": use.masked}
        use.count, use.masked, use.reported_at = 0, 0, self._clock()
        return report
