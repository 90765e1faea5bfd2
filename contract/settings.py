"""BrokerSettings: only what must be equal on both sides of the queue. Values come from the settings files of each side."""

from urllib.parse import unquote, urlsplit

from pydantic import BaseModel, ConfigDict, Field, SecretStr

from contract.envelope import derive_key
from contract.errors import ConfigError


class BrokerSettings(BaseModel):
    """Where Redis is, which deployment this is, and the secret that signs envelopes."""

    model_config = ConfigDict(frozen=True)

    redis_url: SecretStr
    deployment: str = Field(default="default", pattern=r"^[A-Za-z0-9_-]{1,64}$")
    secret: SecretStr | None = None

    def has_password(self) -> bool:
        """Whether the Redis URL carries a password."""
        return bool(urlsplit(self.redis_url.get_secret_value()).password)

    def signing_key(self) -> bytes:
        """Key of the envelope signature: from the secret, else from the Redis password, which whoever may call already holds.

        Raises ConfigError when there is neither: a queue that anyone may write to must not run commands.
        """
        if self.secret is not None and self.secret.get_secret_value():
            return derive_key(self.secret.get_secret_value())
        password = urlsplit(self.redis_url.get_secret_value()).password
        if not password:
            raise ConfigError(
                "Redis has no password and TOOLCREW_SECRET is not set, so calls cannot be signed: set TOOLCREW_SECRET to the same random text on both sides"
            )
        # As Redis gets it: two spellings of one URL must sign alike.
        return derive_key(unquote(password))

    def redis_address(self) -> str:
        """The URL without its password, for messages."""
        parts = urlsplit(self.redis_url.get_secret_value())
        return f"{parts.scheme}://{parts.hostname or ''}{':' + str(parts.port) if parts.port else ''}{parts.path}"
