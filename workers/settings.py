"""The only reader of the environment on the worker side: one frozen settings object a process."""

import os
import re
import socket
import tempfile
from ipaddress import IPv6Network
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, IPvAnyNetwork, JsonValue, SecretStr, ValidationError, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict, SettingsError

from contract.errors import ConfigError
from contract.settings import BrokerSettings

DEFAULT_IMAGE = "toolcrew-sandbox:dev"
MIB = 1024 * 1024


def default_socket() -> Path:
    """Where sandboxd listens unless told otherwise: the user's runtime folder, else a folder of the user's own below the temp folder."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    base = Path(runtime) if runtime else Path(tempfile.gettempdir()) / f"toolcrew-{os.getuid()}"
    return base / "sandboxd.sock"


def _parse_mode(value: object) -> object:
    """A mode's text is octal; one without the leading 0 might be meant as either, and is refused."""
    if not isinstance(value, str):
        return value
    if not re.fullmatch("0o?[0-7]+", value):
        raise ValueError("must be a mode in octal with a leading 0, such as 0660")
    return int(value, 8)


class WorkerSettings(BaseSettings):
    """A Celery worker's settings; every field is `TOOLCREW_<NAME>`, lists and objects in JSON. One that is empty is not set."""

    model_config = SettingsConfigDict(env_prefix="TOOLCREW_", frozen=True, extra="ignore", env_ignore_empty=True)

    redis_url: SecretStr
    deployment: str = "default"
    secret: SecretStr | None = None
    sandboxd_socket: Path = Field(default_factory=default_socket)
    host: str = Field(default_factory=lambda: "".join(c if c.isalnum() else "-" for c in socket.gethostname())[:40] or "host")
    concurrency: int = Field(default=4, ge=1, le=512)
    worker_kind: Literal["sandbox", "web"] = "sandbox"
    """sandbox: beside a sandboxd. web: with the network and without sandboxes, for web tools and operators' tools."""
    worker_queues: list[Literal["pool.web", "pool.tools"]] | None = Field(default=None, min_length=1)
    """What a web worker serves; None: pool.web, and pool.tools where there are operators' tools."""
    tool_modules: list[str] = []
    """Modules with operators' tools, beside the installed packages that name theirs (docs/custom-tools.md)."""
    tool_config: dict[str, JsonValue] = {}
    """What operators' tools find in `CallContext.config`. No place for secrets."""
    log_level: str = "INFO"

    def broker(self) -> BrokerSettings:
        """What both sides must agree on."""
        return BrokerSettings(redis_url=self.redis_url, deployment=self.deployment, secret=self.secret)


class SandboxdSettings(BaseSettings):
    """sandboxd's settings; every field is `TOOLCREW_<NAME>`. Sizes in bytes, durations in seconds."""

    model_config = SettingsConfigDict(env_prefix="TOOLCREW_", frozen=True, extra="ignore")

    sandboxd_socket: Path = Field(default_factory=default_socket)
    sandboxd_socket_mode: Annotated[int, BeforeValidator(_parse_mode), Field(ge=0, le=0o777)] = 0o600
    """As a text in octal with its leading 0, as everywhere: `0660`."""
    sandboxd_allow_uids: list[int] = []
    sandboxd_name: str = Field(default="default", pattern=r"^[A-Za-z0-9_-]{1,64}$")
    """Labels this sandboxd's containers; two on one engine need two names, or one sweeps the other's sandboxes."""
    sandbox_image: str = DEFAULT_IMAGE
    sandbox_images_allowed: list[str] = []
    sandbox_runtime: str = "runc"
    sandbox_memory_reserve_bytes: int = Field(default=256 * MIB, ge=64 * MIB)
    sandbox_workspace_bytes: int = Field(default=256 * MIB, ge=MIB)
    sandbox_cpus: float = Field(default=1.0, gt=0)
    sandbox_pids: int = Field(default=128, ge=16)
    max_sandboxes: int = Field(default=200, ge=1)
    log_level: str = "INFO"

    def allowed_uids(self) -> frozenset[int]:
        """Uids that may connect: our own, and those listed."""
        return frozenset({os.geteuid(), *self.sandboxd_allow_uids})

    def allowed_images(self) -> frozenset[str]:
        """Images a session may ask for."""
        return frozenset({self.sandbox_image, *self.sandbox_images_allowed})


class WebSettings(BaseSettings):
    """Settings of the web tools; every field is `TOOLCREW_<NAME>`, lists in JSON. Hosts in ASCII, international names as `xn--`."""

    model_config = SettingsConfigDict(env_prefix="TOOLCREW_", frozen=True, extra="ignore", hide_input_in_errors=True, env_ignore_empty=True)

    webfetch_allow_hosts: list[str] = []
    """`host` or `host:port`: hosts that the name and address rules let pass, and with a port the port rule too."""
    webfetch_only_hosts: list[str] = []
    """When there are any, no other host is fetched from; `*.example.org` stands for the names below example.org."""
    webfetch_ports: list[Annotated[int, Field(ge=1, le=65535)]] = [80, 443]
    webfetch_per_minute: int = Field(default=120, ge=1)
    """Pages that one tenant may fetch from the network in a minute."""
    webfetch_refuse_ranges: list[IPvAnyNetwork] = []
    """Networks of the operator's own, as `192.0.2.0/24`, that are refused beside the private ones."""
    webfetch_nat64_prefix: IPv6Network | None = None
    """The /96 behind which a host without IPv4 finds IPv4: what is embedded in it is judged."""
    websearch_order: list[Literal["searxng", "tavily", "brave", "exa"]] = ["searxng", "tavily", "brave", "exa"]
    """Of the configured services, the next is asked when one fails; one that is not listed is not asked."""
    searxng_url: SecretStr | None = None
    tavily_api_key: SecretStr | None = None
    brave_api_key: SecretStr | None = None
    exa_api_key: SecretStr | None = None
    tavily_url: str = "https://api.tavily.com"
    brave_url: str = "https://api.search.brave.com"
    exa_url: str = "https://api.exa.ai"

    @field_validator("webfetch_nat64_prefix")
    @classmethod
    def _is_96(cls, prefix: IPv6Network | None) -> IPv6Network | None:
        if prefix is not None and prefix.prefixlen != 96:
            raise ValueError("must be a /96, such as 64:ff9b::/96")
        return prefix


def load_worker_settings() -> WorkerSettings:
    """Settings of this worker. Raises ConfigError with the name of the variable that is missing or wrong."""
    try:
        return WorkerSettings()
    except ValidationError as error:
        raise ConfigError(_complaint(error)) from error
    except SettingsError as error:
        raise ConfigError(f"a TOOLCREW_ variable is not the JSON it must be: {error}") from None


def load_sandboxd_settings() -> SandboxdSettings:
    """Settings of this sandboxd. Raises ConfigError with the name of the variable that is wrong."""
    try:
        return SandboxdSettings()
    except ValidationError as error:
        raise ConfigError(_complaint(error)) from error


def load_web_settings() -> WebSettings:
    """Settings of the web tools. Raises ConfigError with the name of the variable that is wrong."""
    try:
        return WebSettings()
    except ValidationError as error:
        raise ConfigError(_complaint(error)) from None
    except SettingsError as error:
        raise ConfigError(f"a TOOLCREW_ variable is not the JSON it must be: {error}") from None


def _complaint(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_input=False)[0]
    name = "TOOLCREW_" + "_".join(str(part) for part in first["loc"]).upper()
    if first["type"] == "missing":
        return f"{name} is not set: set it in the environment, or start everything at once with `toolcrew up`"
    return f"{name}: {first['msg']}"
