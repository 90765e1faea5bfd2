"""The only reader of the environment on the worker side: one frozen settings object a process."""

import os
import re
import socket
import tempfile
from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator, Field, SecretStr, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

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
    """A Celery worker's settings; every field is `TOOLCREW_<NAME>`."""

    model_config = SettingsConfigDict(env_prefix="TOOLCREW_", frozen=True, extra="ignore")

    redis_url: SecretStr
    deployment: str = "default"
    secret: SecretStr | None = None
    sandboxd_socket: Path = Field(default_factory=default_socket)
    host: str = Field(default_factory=lambda: "".join(c if c.isalnum() else "-" for c in socket.gethostname())[:40] or "host")
    concurrency: int = Field(default=4, ge=1, le=512)
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


def load_worker_settings() -> WorkerSettings:
    """Settings of this worker. Raises ConfigError with the name of the variable that is missing or wrong."""
    try:
        return WorkerSettings()
    except ValidationError as error:
        raise ConfigError(_complaint(error)) from error


def load_sandboxd_settings() -> SandboxdSettings:
    """Settings of this sandboxd. Raises ConfigError with the name of the variable that is wrong."""
    try:
        return SandboxdSettings()
    except ValidationError as error:
        raise ConfigError(_complaint(error)) from error


def _complaint(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_input=False)[0]
    name = "TOOLCREW_" + "_".join(str(part) for part in first["loc"]).upper()
    if first["type"] == "missing":
        return f"{name} is not set: set it in the environment, or start everything at once with `toolcrew up`"
    return f"{name}: {first['msg']}"
