"""BrokerSettings: the Redis of a deployment and the secrets that sign its messages, the same in all processes."""

from typing import Annotated, Any
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from pydantic import BaseModel, ConfigDict, Field, SecretStr, model_validator

from toolcrew.contract.errors import ConfigError
from toolcrew.contract.signing import SigningKeys

SCHEMES = ("redis", "rediss", "sentinel")
TLS_FILES = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
DEPLOYMENT = r"^[A-Za-z0-9_-]{1,64}$"
REDIS_PORT, SENTINEL_PORT = 6379, 26379


class BrokerSettings(BaseModel):
    """Connection to Redis, name of the deployment, and the secrets that sign messages in the queue.

    `redis_url`: `redis://`, `rediss://` for TLS, or `sentinel://user:password@host:port/db;sentinel://host:port` with
    `redis_sentinel_master`. Paths of PEM files follow the first address as redis-py names them:
    `?ssl_ca_certs=...&ssl_certfile=...&ssl_keyfile=...`. Sentinels use TLS when there is `ssl_ca_certs`. Certificate
    and host name are always checked. `secrets_previous` are still accepted, and sign nothing.
    """

    model_config = ConfigDict(frozen=True)

    redis_url: SecretStr
    deployment: str = Field(default="default", pattern=DEPLOYMENT)
    secret: SecretStr | None = None
    secrets_previous: Annotated[tuple[SecretStr, ...], Field(max_length=8)] = ()
    redis_sentinel_master: str | None = None
    redis_sentinel_password: SecretStr | None = None

    @model_validator(mode="after")
    def _check(self) -> "BrokerSettings":
        """Raise ConfigError for a URL that is invalid or misleading."""
        first, *other_parts = self._parts()
        for part in (first, *other_parts):
            _check_address(part)
        for part in other_parts:
            _check_other(part, first)
        files = self._tls_files()
        if self.is_sentinel and not self.redis_sentinel_master:
            raise ConfigError(
                "TOOLCREW_REDIS_URL names sentinels: set TOOLCREW_REDIS_SENTINEL_MASTER to the master's name at the "
                "sentinels"
            )
        if not self.is_sentinel and self.redis_sentinel_master:
            raise ConfigError(
                "TOOLCREW_REDIS_SENTINEL_MASTER is set, but TOOLCREW_REDIS_URL does not begin with sentinel://: "
                "correct it, or unset the master"
            )
        if files and not self.is_tls:
            raise ConfigError(
                f"TOOLCREW_REDIS_URL has {next(iter(files))}, but nothing would be encrypted: write it as rediss://, "
                "or leave that out"
            )
        if ("ssl_certfile" in files) != ("ssl_keyfile" in files):
            raise ConfigError(
                "ssl_certfile and ssl_keyfile in TOOLCREW_REDIS_URL belong together: write both, or neither"
            )
        return self

    @property
    def is_sentinel(self) -> bool:
        """True if the URL names sentinels, which know the address of Redis."""
        return self._parts()[0].scheme == "sentinel"

    @property
    def is_tls(self) -> bool:
        """True if connections are encrypted."""
        return self._parts()[0].scheme == "rediss" or (self.is_sentinel and "ssl_ca_certs" in self._tls_files())

    @property
    def user(self) -> str | None:
        """Redis user; None for the default user."""
        name = self._parts()[0].username
        return unquote(name) if name and name != "default" else None

    @property
    def password(self) -> str | None:
        """Redis password, decoded, so that two spellings of the same URL give the same signing key."""
        password = self._parts()[0].password
        return unquote(password) if password else None

    @property
    def database(self) -> int:
        """Number of the database."""
        return int(self._parts()[0].path.strip("/") or 0)

    @property
    def addresses(self) -> tuple[tuple[str, int], ...]:
        """Host and port of Redis, or of each sentinel."""
        usual = SENTINEL_PORT if self.is_sentinel else REDIS_PORT
        return tuple((part.hostname or "", part.port or usual) for part in self._parts())

    def has_password(self) -> bool:
        """Return whether the Redis URL has a password."""
        return self.password is not None

    def signing_keys(self) -> SigningKeys:
        """Return the signing keys, derived from the secret, or else from the Redis password, which every caller has.

        Raises ConfigError if there is neither: a queue that anyone can write to must not run commands. Raises
        ConfigError also for a named Redis user without a secret, because other users have other passwords.
        """
        previous = [secret.get_secret_value() for secret in self.secrets_previous]
        if self.secret is not None and self.secret.get_secret_value():
            return SigningKeys.of(self.secret.get_secret_value(), previous, self.deployment)
        if self.user is not None:
            raise ConfigError(
                f"TOOLCREW_SECRET is not set, and processes with other Redis users than '{self.user}' have other "
                "passwords: set it to the same random text on both sides"
            )
        if self.password is None:
            raise ConfigError(
                "Redis has no password and TOOLCREW_SECRET is not set, so calls cannot be signed: set TOOLCREW_SECRET "
                "to the same random text on both sides"
            )
        return SigningKeys.of(self.password, previous, self.deployment)

    def redis_address(self) -> str:
        """Return the URL without user and password, for messages."""
        return ";".join(_address(part) for part in self._parts())

    def connection_advice(self, error: str) -> str:
        """Return what to check after a failed connection. `error`: the text of the exception."""
        if "CERTIFICATE_VERIFY_FAILED" in error:
            return (
                "its certificate must be valid, name the host of TOOLCREW_REDIS_URL, and come from an authority of "
                "this system or the one in its ssl_ca_certs"
            )
        if self.is_tls and "No such file" in error:
            return "ssl_ca_certs, ssl_certfile or ssl_keyfile in TOOLCREW_REDIS_URL names a file that does not exist"
        if self.is_tls:
            return (
                "check that it runs with TLS, and set ssl_certfile and ssl_keyfile in TOOLCREW_REDIS_URL if it "
                "requires a client certificate"
            )
        if self.is_sentinel:
            return (
                "check that the sentinels run, and that they watch a master with the name in "
                "TOOLCREW_REDIS_SENTINEL_MASTER"
            )
        return "check that Redis runs there, and that TOOLCREW_REDIS_URL is correct (rediss:// if it needs TLS)"

    def tls_options(self) -> dict[str, Any]:
        """Return redis-py's options for TLS; none without TLS. The system's authorities are trusted too."""
        if not self.is_tls:
            return {}
        return {"ssl_cert_reqs": "required", "ssl_check_hostname": True, **self._tls_files()}

    def sentinel_options(self) -> dict[str, Any]:
        """Return redis-py's options for the connections to the sentinels, without their addresses."""
        password = self.redis_sentinel_password
        options: dict[str, Any] = {"socket_timeout": 2.0, "socket_connect_timeout": 2.0}
        if password is not None and password.get_secret_value():
            options["password"] = password.get_secret_value()
        return {**options, "ssl": True, **self.tls_options()} if self.is_tls else options

    def celery_options(self) -> dict[str, Any]:
        """Return the settings of a Celery app for broker and results. Merge other transport options with these."""
        url = ";".join(part._replace(query="").geturl() for part in self._parts())
        options: dict[str, Any] = {"broker_url": url, "result_backend": url, "broker_transport_options": {}}
        if self.is_tls:
            options |= {"broker_use_ssl": self.tls_options(), "redis_backend_use_ssl": self.tls_options()}
        if self.is_sentinel:
            transport = {"master_name": self.redis_sentinel_master, "sentinel_kwargs": self.sentinel_options()}
            options |= {"broker_transport_options": transport, "result_backend_transport_options": transport}
        return options

    def _parts(self) -> list[SplitResult]:
        return [urlsplit(url) for url in self.redis_url.get_secret_value().split(";")]

    def _tls_files(self) -> dict[str, str]:
        return dict(parse_qsl(self._parts()[0].query))


def _check_address(part: SplitResult) -> None:
    if part.scheme not in SCHEMES:
        raise ConfigError(
            f"TOOLCREW_REDIS_URL begins with '{part.scheme}://': write redis://, rediss:// for TLS, or sentinel://"
        )
    if part.fragment or _has_other_options(part.query):
        raise ConfigError(
            f"TOOLCREW_REDIS_URL has an option that is not allowed: write only {', '.join(TLS_FILES)}. TLS always "
            "checks certificates"
        )
    try:
        port, database = part.port, int(part.path.strip("/") or 0)
    except ValueError:
        port, database = 0, -1
    if not part.hostname or port == 0 or database < 0:
        raise ConfigError(
            "TOOLCREW_REDIS_URL is not a valid URL: write it as redis://user:password@host:6379/0, with % for special "
            "characters of a password"
        )


def _has_other_options(query: str) -> bool:
    try:
        options = parse_qsl(query, keep_blank_values=True, strict_parsing=True) if query else []
    except ValueError:
        return True
    return any(name not in TLS_FILES or not path for name, path in options)


def _check_other(part: SplitResult, first: SplitResult) -> None:
    """Raise ConfigError if a later sentinel has options or Redis credentials that differ from those of the first. Only
    the first address is read for these.
    """
    if part.query:
        raise ConfigError("a later address in TOOLCREW_REDIS_URL has options: write them only after the first address")
    own, expected = [(address.username, address.password, address.path.strip("/")) for address in (part, first)]
    if any(value and value != other for value, other in zip(own, expected, strict=True)):
        raise ConfigError(
            "a later address in TOOLCREW_REDIS_URL has another user, password or database than the first: write them "
            "only in the first address"
        )


def _address(part: SplitResult) -> str:
    return f"{part.scheme}://{part.hostname or ''}{':' + str(part.port) if part.port else ''}{part.path}"
