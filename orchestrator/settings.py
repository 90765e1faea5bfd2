"""The only reader of the environment on the orchestrator side: one frozen settings object a process."""

import json
import os
import secrets
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pydantic import Field, JsonValue, SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict

from contract.errors import ConfigError
from contract.masking import SECRET_NAME
from contract.settings import BrokerSettings, read_environment
from telemetry.log_lines import LogLevel

_WEB_URL = r"^https?://[A-Za-z0-9._~\[\]:-]+(/[A-Za-z0-9._~/-]*)?$"


class OrchestratorSettings(BaseSettings):
    """Every field is `TOOLCREW_<NAME>`; the model's own variables keep their usual names."""

    model_config = SettingsConfigDict(
        env_prefix="TOOLCREW_", frozen=True, extra="ignore", populate_by_name=True, env_ignore_empty=True
    )

    redis_url: SecretStr | None = None
    deployment: str = Field(default="default", pattern=r"^[A-Za-z0-9_-]{1,64}$")
    api_key: SecretStr | None = None
    """A tenant's, for whom commands then call (docs/tenants.md)."""
    secret: SecretStr | None = None
    secrets_previous: list[SecretStr] = []
    """Secrets that are still accepted while one is changed (docs/wire-security.md); a JSON list."""
    redis_sentinel_master: str | None = None
    """The name under which sentinels watch Redis, when `redis_url` names sentinels."""
    redis_sentinel_password: SecretStr | None = None
    model: str | None = None
    dialect: Literal["native", "tags", "json", "auto"] = "native"
    approvals: Literal["auto", "ask", "never", "queue"] = "ask"
    approvers: Literal["tenant", "operator"] = "tenant"
    """Who answers what waits in the queue of questions: also the tenant whose call it is, or operators alone
    (docs/approvals.md).
    """
    approval_wait_s: float = Field(default=300.0, gt=0, le=7 * 86_400)
    """How long a call waits for its answer."""
    approval_policy: Path | None = None
    """A file of rules: who may call what unasked, and what nobody may."""
    model_file: Path | None = None
    model_timeout_s: float = Field(default=120.0, gt=0)
    model_streaming: bool = True
    """False: a reply comes whole, and `model_timeout_s` bounds the wait for all of it."""
    model_retries: int = Field(default=5, ge=0)
    """How often a request that failed before its reply began is sent again."""
    model_context_tokens: int | None = Field(default=None, gt=0)
    """What fits into the model's context window, when it is known better than the server says."""
    openai_base_url: str | None = Field(default=None, validation_alias="OPENAI_BASE_URL")
    openai_api_key: SecretStr | None = Field(default=None, validation_alias="OPENAI_API_KEY")
    queue_wait_s: float = Field(default=60.0, gt=0)
    """How long a call may wait for a free worker before it is given up unrun."""
    tenant_classes: dict[str, dict[str, JsonValue]] = {}
    """sandboxd's, which judges them; here they only say whether an embedded stack needs an egress proxy."""
    egress_socket: Path | None = None
    """Of an egress proxy that runs already."""
    traces: Path = Field(default_factory=lambda: _state_home() / "toolcrew" / "traces")
    """The folder of the runs' traces (docs/traces.md)."""
    api_rate: float = Field(default=200.0, gt=0)
    """Requests a second that one API key may make of one process of the API, on the average."""
    workspace_store: str | None = None
    """sandboxd's; here it only says whether a checkpoint would outlive an embedded stack."""
    log_level: LogLevel = "INFO"
    """Of the services; commands and the SDK say what their own caller configures (docs/logs.md)."""
    flower_url: str | None = Field(default=None, pattern=_WEB_URL)
    """Where people reach Flower, without a password in it: pages link to it (docs/operations.md)."""
    page_url: str | None = Field(default=None, pattern=_WEB_URL)
    """Where people reach the API's pages: Flower links to the page of a call."""
    trace_url: str | None = Field(default=None, pattern=r"^https?://[^\s\"'<>]*\{trace_id\}[^\s\"'<>]*$")
    """Where people look at a trace, with {trace_id} in place of its id: pages of runs link to it while tracing is
    on.
    """

    @property
    def model_folder(self) -> Path:
        """The folder of downloaded weights."""
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "toolcrew" / "models"

    @property
    def capability_folder(self) -> Path:
        """The folder that records what each model can do."""
        return self.model_folder / "capabilities"

    def broker(self, url: str | None = None) -> BrokerSettings:
        """What both sides must agree on. Raises ConfigError when no Redis is named."""
        chosen = SecretStr(url) if url else self.redis_url
        if chosen is None:
            raise ConfigError(
                "TOOLCREW_REDIS_URL is not set: set it to the pool's Redis, or use ToolClient.embedded() or `toolcrew "
                "up`"
            )
        return BrokerSettings.model_validate(
            {name: getattr(self, name) for name in BrokerSettings.model_fields} | {"redis_url": chosen}
        )

    def needs_egress(self) -> bool:
        """Whether an embedded stack has to have an egress proxy of its own."""
        return self.egress_socket is None and any(
            terms.get("network") == "egress" for terms in self.tenant_classes.values()
        )

    def for_children(self) -> dict[str, str]:
        """What the processes of an embedded stack must share with this one, as environment variables."""
        secrets = [secret.get_secret_value() for secret in self.secrets_previous]
        shared = {"TOOLCREW_DEPLOYMENT": self.deployment, "TOOLCREW_SECRETS_PREVIOUS": json.dumps(secrets)}
        for name in (
            "page_url",
            "flower_url",
            "redis_url",
            "secret",
            "redis_sentinel_master",
            "redis_sentinel_password",
        ):
            value = getattr(self, name)
            if value is not None:
                shared[f"TOOLCREW_{name.upper()}"] = value.get_secret_value() if isinstance(value, SecretStr) else value
        return shared


def load_settings() -> OrchestratorSettings:
    """Settings of this process. Raises ConfigError with the name of the variable that is wrong."""
    return read_environment(OrchestratorSettings, os.environ)


def child_environment(overrides: Mapping[str, str]) -> dict[str, str]:
    """This process's environment with `overrides`, for the processes of an embedded stack."""
    return {**os.environ, "PYTHONUNBUFFERED": "1", **overrides}


def is_interactive() -> bool:
    """Whether a person can be asked at this process's terminal."""
    return sys.stdin.isatty() and sys.stderr.isatty()


def program(module: str, *arguments: str) -> tuple[str, ...]:
    """The command of a program of ours. -P: in the folder where it is started there may be anything, also a package of
    a name that it imports.
    """
    return (sys.executable, "-P", "-m", module, *arguments)


def secrets_of_environment() -> dict[str, str]:
    """What this process's environment holds under names of secrets (..._API_KEY, ..._TOKEN, ..._SECRET, ..._PASSWORD),
    for masking it.
    """
    return {name: value for name, value in os.environ.items() if value and SECRET_NAME.search(name)}


def _state_home() -> Path:
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")


def with_secret(settings: OrchestratorSettings) -> OrchestratorSettings:
    """An embedded stack on a Redis without a password signs with a secret of its own."""
    if settings.redis_url is None or settings.secret is not None or settings.broker().has_password():
        return settings
    return settings.model_copy(update={"secret": SecretStr(secrets.token_urlsafe(32))})
