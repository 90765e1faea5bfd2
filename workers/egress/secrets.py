"""Secrets of a session: put into requests to their hosts in place of placeholders, and masked in answers.

Invariant: a program in the sandbox sees a secret in none of its usual encodings (contract/masking.py), and a secret
goes only to the place of a request that its owner has named. One event loop serves all tenants of a host. So the time
to mask an answer must not depend on the content of a secret or of an answer.
"""

import base64
import binascii
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote, unquote

import structlog
from pydantic import BaseModel, ConfigDict, Field, SecretStr

from contract.masking import find_encodings
from contract.secrets import MAX_HOSTS, MAX_VALUE_CHARS, SecretHost, SecretName, SecretPlace, build_placeholder
from workers.egress.http_messages import Header
from workers.web.urls import Target

log = structlog.get_logger(__name__)

HTTPS_PORT = 443
MAX_USES = 10_000
"""Maximum number of kinds of uses that wait to be reported. A kind is a session, run, secret and host."""
REPORT_S = 60.0
"""Time between two reports of the same kind of use."""


class BoundSecret(BaseModel):
    """A secret with its value, as sandboxd sends it in the opening of a connection."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: SecretName
    value: SecretStr = Field(max_length=MAX_VALUE_CHARS)
    hosts: tuple[SecretHost, ...] = Field(max_length=MAX_HOSTS)
    place: SecretPlace

    def is_bound_to(self, target: Target) -> bool:
        """Return whether requests to the target may carry the secret."""
        # A target that is an IP address never matches: the secret belongs to a host name, which TLS proves.
        names = {f"{target.host}:{target.port}", *([target.host] if target.port == HTTPS_PORT else [])}
        return target.literal is None and not names.isdisjoint(self.hosts)


@dataclass(frozen=True)
class FilledRequest:
    """A request with its secrets. `used`: names of the secrets in it. `credentials`: texts that contain a secret in
    another encoding.
    """

    target: bytes
    headers: tuple[Header, ...]
    used: tuple[str, ...]
    credentials: tuple[bytes, ...]


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
        credentials: list[bytes] = []
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
                filled = [_fill_basic(header, placeholder, value, credentials) for header in filled]
            if (target, filled) != before:
                used[secret.name] = None
        return FilledRequest(target, tuple(filled), tuple(used), tuple(credentials))


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


def _fill_basic(header: Header, placeholder: bytes, value: bytes, credentials: list[bytes]) -> Header:
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
    credentials.append(base64.b64encode(user + colon + value))
    return Header(header.key, header.name, scheme + b" " + credentials[-1])


class SecretMasker:
    """Masks secrets in the answers of a host, in upper or lower case. The length of the text stays the same."""

    def __init__(self, forms: Iterable[bytes]) -> None:
        self._forms = sorted({form.lower() for form in forms})

    @classmethod
    def of(cls, secrets: Iterable[BoundSecret]) -> "SecretMasker":
        """Return a masker for all encodings of the secrets."""
        values = [secret.value.get_secret_value() for secret in secrets]
        return cls(form.encode() for value in values for form in find_encodings(value))

    def plus(self, forms: Iterable[bytes]) -> "SecretMasker":
        """Return a masker that also masks these texts."""
        more = tuple(forms)
        return SecretMasker([*self._forms, *more]) if more else self

    def mask(self, data: bytes) -> bytes:
        """Return the text with `*` in place of secrets. The time is linear in the length of the text."""
        lower, masked = data.lower(), bytearray(data)
        for form in self._forms:
            at = lower.find(form)
            while at >= 0:
                following = lower.find(form, at + 1)
                end = at + len(form)
                if 0 < following < end:
                    # Two occurrences overlap, such as those of `aaaa` in a long run of `a`. The text then repeats with
                    # the distance of the two as its period. So all occurrences up to the end of the run are known at
                    # once.
                    period = following - at
                    run = _find_end_of_run(lower, following + len(form), period) - at - len(form)
                    last = at + run - run % period
                    end = last + len(form)
                    following = lower.find(form, last + 1)
                masked[at:end] = b"*" * (end - at)
                at = following
        return bytes(masked)

    def count_withheld(self, data: bytes) -> int:
        """Return how many bytes at the end may be the start of a secret."""
        lower = data.lower()
        return max((_count_prefix(lower, form) for form in self._forms), default=0)


class MaskedStream:
    """Masks a body that arrives in pieces. Only bytes that may be the start of a secret are held back, so that event
    streams are not delayed.
    """

    def __init__(self, masker: SecretMasker) -> None:
        self._masker = masker
        self._raw = self._masked = b""

    def take(self, data: bytes) -> bytes:
        """Return the bytes that can be sent now."""
        raw = self._raw + data
        masked = bytearray(self._masker.mask(raw))
        # Keep the mask of the held bytes: they may contain the end of a secret whose start was already sent, which a
        # search in `raw` alone does not find.
        for at, byte in enumerate(self._masked):
            if byte != self._raw[at]:
                masked[at] = byte
        sent = len(raw) - self._masker.count_withheld(raw)
        self._raw, self._masked = raw[sent:], bytes(masked[sent:])
        return bytes(masked[:sent])

    def finish(self) -> bytes:
        """Return the held bytes at the end of the body."""
        return self._masked


def _find_end_of_run(data: bytes, end: int, period: int) -> int:
    """Return the first position from `end` on whose byte differs from the byte one period before it."""
    size = 4096
    while size and end < len(data):
        piece = data[end : end + size]
        if piece == data[end - period : end - period + len(piece)]:
            end += len(piece)
        else:
            size = min(size, len(piece)) // 2
    return end


def _count_prefix(data: bytes, form: bytes) -> int:
    """Return the length of the longest suffix of the data that is a proper prefix of the form."""
    at = data.find(form[:1], max(0, len(data) - len(form) + 1))
    while at >= 0:
        if form.startswith(data[at:]):
            return len(data) - at
        at = data.find(form[:1], at + 1)
    return 0


_USE_FIELDS = ("tenant", "session", "run", "secret", "host")


@dataclass
class _Use:
    count: int = 0
    reported_at: float = field(default=float("-inf"))


class SecretUses:
    """Counts uses of secrets until sandboxd asks for them. The first use of a kind (session, run, secret, host) is
    reported at once, later uses once per REPORT_S.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._uses: dict[tuple[str, str, str, str, str], _Use] = {}

    def count(self, tenant: str, session: str, run: str | None, secret: str, host: str) -> None:
        """Count one request with a secret."""
        key = (tenant, session, run or "", secret, host)
        # A program chooses the hosts of its requests, so the number of kinds needs a limit. Uses above the limit are
        # only logged.
        if key not in self._uses and len(self._uses) >= MAX_USES:
            log.error("secret_uses_not_reported", tenant=tenant, session=session, secret=secret, destination=host)
            return
        self._uses.setdefault(key, _Use()).count += 1

    def take(self) -> list[dict[str, Any]]:
        """Return the uses that are due for a report. Delete counters without recent uses."""
        now, uses = self._clock(), []
        for key, use in list(self._uses.items()):
            if now - use.reported_at < REPORT_S:
                continue
            if use.count:
                uses.append(dict(zip(_USE_FIELDS, key, strict=True)) | {"count": use.count})
                use.count, use.reported_at = 0, now
            else:
                del self._uses[key]
        return uses
