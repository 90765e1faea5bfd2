"""Masking of secrets in text: the values of known secrets in all their encodings, and texts with the form of well-known
keys.
"""

import base64
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, quote_plus, unquote, urlsplit

from pydantic import BaseModel, SecretStr

MIN_SECRET_CHARS = 6
"""Minimum number of characters of a secret that is masked by its value. Shorter values would match in almost every
text.
"""
MIN_CORE_CHARS = 7
"""Minimum number of base64 characters by which an encoded secret is recognized: characters that are the same wherever
the secret is in the encoded text.
"""
MAX_REMEMBERED, MAX_REMEMBERED_CHARS = 4096, 64
"""Limits of the cache of short texts without secrets: entries, and characters of an entry."""
MARK = "[masked: "
SECRET_NAME = re.compile(r"(?:^|_)(?:API_?KEY|ACCESS_KEY|SECRET_KEY|TOKEN|SECRET|PASSWORD|PASSWD)$", re.IGNORECASE)
"""Names of variables and fields that contain a secret."""
_BASE64 = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/-_=")


@dataclass(frozen=True)
class _Shape:
    """Pattern of a kind of secret. `hints`: every match contains one of them. Searching for the hints is fast, and most
    texts have none.
    """

    kind: str
    hints: tuple[str, ...]
    pattern: re.Pattern[str]

    def replace(self, match: re.Match[str]) -> str:
        """Return the replacement of a match. A prefix that only names the kind of secret stays."""
        return f"{match.groupdict().get('kept') or ''}{MARK}{self.kind}]"


def _shape(kind: str, hints: str, pattern: str, flags: int = 0) -> _Shape:
    return _Shape(kind, tuple(hints.split("|")), re.compile(pattern, flags))


# Texts are untrusted. To keep the time linear, each pattern reads a bounded number of characters or begins only at the
# start of a word.
_SHAPES = (
    _shape(
        "private key",
        "PRIVATE KEY-----",
        r"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY-----.*?(?:-----END [A-Z0-9 ]{0,40}PRIVATE KEY-----|\Z)",
        re.DOTALL,
    ),
    _shape("password", "://", r"(?P<kept>://[^\s/@:\"'<>]{0,256}:)(?!\[masked: )[^\s/\"'<>]{1,256}(?=@)"),
    _shape("API key", "sk-", r"(?<![A-Za-z0-9])sk-(?=[A-Za-z0-9_-]{0,64}\d)[A-Za-z0-9_-]{16,}"),
    _shape("toolcrew key", "tc_", r"(?<![A-Za-z0-9])tc_[0-9a-f]{16}_[A-Za-z0-9_-]{20,}"),
    _shape("GitHub token", "ghp_|gho_|ghu_|ghs_|ghr_", r"(?<![A-Za-z0-9])gh[pousr]_[A-Za-z0-9]{20,}"),
    _shape("GitHub token", "github_pat_", r"github_pat_[A-Za-z0-9_]{20,}"),
    _shape("GitLab token", "glpat-", r"glpat-[A-Za-z0-9_-]{20,}"),
    _shape("AWS key", "AKIA|ASIA", r"(?<![A-Za-z0-9])(?:AKIA|ASIA)[A-Z0-9]{16}(?![A-Za-z0-9])"),
    _shape(
        "AWS key",
        "ecret_access_key|ECRET_ACCESS_KEY|ecretAccessKey",
        r"(?P<kept>(?i:secret_?access_?key)[\"']?[ \t]{0,4}[:=][ \t]{0,4}[\"']?)[A-Za-z0-9/+=]{40}",
    ),
    _shape("Google key", "AIza", r"(?<![A-Za-z0-9])AIza[0-9A-Za-z_-]{35}"),
    _shape("Slack token", "xox", r"(?<![A-Za-z0-9])xox[abeoprs]-[A-Za-z0-9-]{10,}"),
    _shape("Hugging Face token", "hf_", r"(?<![A-Za-z0-9])hf_[A-Za-z0-9]{30,}"),
    _shape("JWT", "eyJ", r"(?<![A-Za-z0-9_-])eyJ[A-Za-z0-9_-]{10,}\.eyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]*"),
    _shape(
        "bearer token", "earer|EARER", r"(?P<kept>(?i:bearer)[ \t:]{1,8})(?=[^\s\"']{0,200}\d)[A-Za-z0-9._~+/=-]{8,}"
    ),
    _shape(
        "credentials",
        "asic |ASIC ",
        r"(?P<kept>(?i:authorization)[\"']?[ \t]{0,4}[:=][ \t]{0,4}[\"']?(?i:basic)[ \t]{1,8})[A-Za-z0-9+/=_-]{4,}",
    ),
)
_HINTS = tuple((hint, shape) for shape in _SHAPES for hint in shape.hints)


class Masker:
    """Masks secrets in texts. `secrets`: kind -> value. A secret is replaced by `[masked: <kind>]`."""

    def __init__(self, secrets: Mapping[str, str] | None = None) -> None:
        plain: dict[str, str] = {}
        cores: dict[str, str] = {}
        for kind, value in (secrets or {}).items():
            if len(value) < MIN_SECRET_CHARS:
                continue
            for form in _forms(value):
                plain.setdefault(form, kind)
            for core in _cores(value):
                cores.setdefault(core.text, kind)
        # The longest first: if one secret contains another, no part of the longer one may remain.
        self._plain = sorted(plain.items(), key=lambda form: -len(form[0]))
        self._cores = sorted(cores.items(), key=lambda core: -len(core[0]))
        # Cache of texts without secrets, because the same names of fields, roles and tools are checked very often.
        self._clean: set[str] = set()

    def mask(self, text: str) -> str:
        """Return the text without known secrets and without texts that have the form of a key."""
        if len(text) < MIN_SECRET_CHARS or text in self._clean:
            return text
        masked = self._replace_secrets(text)
        if masked == text and len(text) <= MAX_REMEMBERED_CHARS and len(self._clean) < MAX_REMEMBERED:
            self._clean.add(text)
        return masked

    def _replace_secrets(self, text: str) -> str:
        for core, kind in self._cores:
            if core in text:
                text = _replace_base64(text, core, kind)
        for form, kind in self._plain:
            if form in text:
                text = text.replace(form, f"{MARK}{kind}]")
        for hint, shape in _HINTS:
            if hint in text:
                text = shape.pattern.sub(shape.replace, text)
        return text

    def mask_value(self, value: Any) -> Any:
        """Return plain JSON with every string masked, including keys."""
        match value:
            case str():
                return self.mask(value)
            case Mapping():
                return {self.mask(str(key)): self.mask_value(inner) for key, inner in value.items()}
            case list() | tuple():
                return [self.mask_value(inner) for inner in value]
        return value


def passwords_of(kind: str, urls: str) -> dict[str, str]:
    """Return the passwords in a URL, or in several URLs separated by `;`, by kind. Each password appears as written in
    the URL and decoded.
    """
    passwords: dict[str, str] = {}
    for at, url in enumerate(urls.split(";")):
        name = kind + (f" {at + 1}" if at else "")
        try:
            written = urlsplit(url).password
        except ValueError:
            continue
        if written:
            passwords[name] = unquote(written)
            if written != passwords[name]:
                passwords[f"{name} in its URL"] = written
    return passwords


def secrets_of_pool(redis_url: str, *, flower_url: str | None = None, api_key: str | None = None) -> dict[str, str]:
    """Return the secrets that a client of a pool knows in addition to its settings: the passwords in its URLs, and
    its key.
    """
    passwords = {**passwords_of("Redis password", redis_url), **passwords_of("Flower password", flower_url or "")}
    return {**passwords, **({"API key of the tenant": api_key} if api_key else {})}


def secrets_of_settings(settings: BaseModel) -> dict[str, str]:
    """Return the secrets of a settings object and the passwords in its URLs: name of the variable -> value."""
    return dict(_find_secrets(settings))


def _find_secrets(settings: BaseModel) -> Iterable[tuple[str, str]]:
    for name in type(settings).model_fields:
        value = getattr(settings, name)
        kind = name.upper() if name.startswith("openai") else f"TOOLCREW_{name.upper()}"
        for secret in value if isinstance(value, list) else [value]:
            text = secret.get_secret_value() if isinstance(secret, SecretStr) else secret
            if not isinstance(text, str):
                continue
            if "://" in text:
                yield from passwords_of(f"{kind} password", text).items()
            # In a setting that is a URL, only the password is secret.
            if isinstance(secret, SecretStr) and not name.endswith("_url"):
                yield kind, text


@dataclass(frozen=True)
class SecretForm:
    """A text that shows a secret. `before`, `after`: numbers of characters next to it that encode bits of the secret
    together with bits of the text around the secret.
    """

    text: str
    before: int = 0
    after: int = 0


def find_forms(value: str) -> set[SecretForm]:
    """Return the texts that show a secret: its encodings, and the base64 characters that it always produces."""
    encoded = base64.b64encode(value.encode(errors="surrogatepass")).decode().rstrip("=")
    whole = _forms(value) | {encoded, encoded.replace("+", "-").replace("/", "_")}
    return {SecretForm(text) for text in whole} | _cores(value)


def find_encodings(value: str) -> set[str]:
    """Return the texts of all forms of a secret."""
    return {form.text for form in find_forms(value)}


def _forms(value: str) -> set[str]:
    """Return the encodings of the value: plain, in a URL, in JSON, in hexadecimal."""
    raw = value.encode(errors="surrogatepass")
    quoted = {quote(raw, safe=""), quote(raw), quote_plus(raw)}
    lower = {re.sub(r"%[0-9A-F]{2}", lambda code: code[0].lower(), text) for text in quoted}
    escaped = {json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1]}
    return {value, *quoted, *lower, *escaped, raw.hex(), raw.hex().upper()}


def _cores(value: str) -> set[SecretForm]:
    """Return the base64 characters that every encoded text with the value contains. There are three variants, because
    the value can begin at three positions of a base64 group.
    """
    raw = value.encode(errors="surrogatepass")
    cores = set()
    for shift in range(3):
        text = base64.b64encode(b"\0" * shift + raw).decode().rstrip("=")
        # Keep only characters whose bits all belong to the value.
        core = text[(shift * 8 + 5) // 6 : (shift + len(raw)) * 8 // 6]
        if len(core) >= MIN_CORE_CHARS:
            before, after = int(shift > 0), int((shift + len(raw)) % 3 > 0)
            cores |= {SecretForm(one, before, after) for one in (core, core.replace("+", "-").replace("/", "_"))}
    return cores


def _replace_base64(text: str, core: str, kind: str) -> str:
    """Replace the whole base64 text around each core, because the adjacent characters encode the rest of the value."""
    pieces, at = [], 0
    while (found := text.find(core, at)) >= 0:
        start, end = found, found + len(core)
        while start > at and text[start - 1] in _BASE64:
            start -= 1
        while end < len(text) and text[end] in _BASE64:
            end += 1
        pieces += [text[at:start], f"{MARK}{kind}]"]
        at = end
    return "".join([*pieces, text[at:]])
