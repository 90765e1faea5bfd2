"""Settings of orchestrator processes. Only this module reads the environment; each process has one frozen object."""

import json
import os
import secrets
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pydantic import Field, JsonValue, SecretStr

from toolcrew.contract.errors import ConfigError
from toolcrew.contract.masking import SECRET_NAME, Masker, secrets_of_settings
from toolcrew.contract.settings import BrokerSettings, SharedSettings, read_environment
from toolcrew.telemetry.settings import LogSettings

_WEB_URL = r"^https?://[A-Za-z0-9._~\[\]:-]+(/[A-Za-z0-9._~/-]*)?$"


class OrchestratorSettings(SharedSettings, LogSettings):
    """The settings of `toolcrew`, the SDK, the API and Flower. The model's own variables keep their usual names."""

    api_key: SecretStr | None = None
    """An API key of a tenant: commands act for that tenant (docs/tenants.md). A tenant sets it in a shell."""
    model: str | None = None
    """The name of the model at `OPENAI_BASE_URL`, or of a model endpoint (docs/agents.md). Without that URL, `local`
    and `scripted` name models that toolcrew ships. A batch team changes it for each experiment.
    """
    dialect: Literal["native", "tags", "json", "auto"] | None = None
    """The format in which the model writes tool calls; `auto`: the best format that the model can write
    (docs/agents.md). Without a value: `auto` for small models, `native` for others. A batch team changes it for a model
    without native tool calls.
    """
    approvals: Literal["auto", "ask", "never", "queue"] = "ask"
    """The treatment of a call that needs approval: `ask` asks at the terminal, `auto` allows the call, `never` denies
    it, `queue` waits for a decision on the pages, over the API or by `toolcrew approvals` (docs/approvals.md).
    A batch team sets it for runs without a terminal.
    """
    approvers: Literal["tenant", "operator"] = "tenant"
    """The people who may decide about waiting calls: `tenant` includes the tenant, `operator` means operators only
    (docs/approvals.md). The operator changes it for a tenant that must not approve its own calls.
    """
    approval_wait_s: float = Field(default=300.0, gt=0, le=7 * 86_400)
    """Seconds that a call waits for an answer. A batch team raises it if people answer only once a day."""
    approval_policy: Path | None = None
    """A file with rules that allow or deny calls without a question (docs/approvals.md). The operator adds rules when a
    question repeats.
    """
    model_file: Path | None = None
    """A GGUF file for the local model in place of the downloaded one (docs/agents.md). A batch team sets it on
    hosts without internet.
    """
    model_timeout_s: float = Field(default=120.0, gt=0)
    """Seconds until a reply begins, and between two parts of it. A batch team raises it for a slow model server."""
    model_streaming: bool = True
    """`false` requests each reply as a whole; TOOLCREW_MODEL_TIMEOUT_S then limits the whole reply. A batch team sets
    it for a model server that streams tool calls wrongly.
    """
    model_retries: int = Field(default=5, ge=0)
    """The number of retries of a request that failed before its reply began. A batch team raises it for a model server
    with strict rate limits.
    """
    model_context_tokens: int | None = Field(default=None, gt=0)
    """Tokens in the model's context window. A batch team sets it if the model server reports none or a wrong number."""
    openai_base_url: str | None = Field(default=None, validation_alias="OPENAI_BASE_URL")
    """The URL of the model server. A batch team changes it with the model."""
    openai_api_key: SecretStr | None = Field(default=None, validation_alias="OPENAI_API_KEY")
    """The API key of the model server. A batch team sets it with the URL."""
    queue_wait_s: float = Field(default=60.0, gt=0)
    """Seconds that a call waits for a free worker. After this time the call fails without having run. A batch team
    raises it on a crowded pool.
    """
    tenant_classes: dict[str, dict[str, JsonValue]] = Field(default={})
    """See sandboxd. An operator of an embedded stack sets it here too: the stack starts an egress proxy if a class
    needs one.
    """
    egress_socket: Path | None = None
    """The socket of an egress proxy that already runs. An operator of an embedded stack sets it to share that proxy."""
    traces: Path = Field(default_factory=lambda: _find_state_home() / "toolcrew" / "traces")
    """The folder of the traces of runs (docs/observe.md). An operator changes it when its disk gets full."""
    api_rate: float = Field(default=200.0, gt=0)
    """Requests per second of one API key in one API process; a burst may have twice as many. An operator raises it when
    a program gets status 429.
    """
    workspace_store: str | None = None
    """See sandboxd. The API writes uploads to it and reads artifacts from it. The operator sets it for batches with
    files.
    """
    host_free_bytes: int = Field(default=1024**3, ge=0)
    """See sandboxd. The API accepts no uploads while a store in a folder has less than twice this space free, so that
    checkpoints and sandboxes have the rest. The operator sets it as for sandboxd.
    """
    flower_url: str | None = Field(default=None, pattern=_WEB_URL)
    """The URL of Flower, without a password; pages of calls link to it (docs/observe.md). The operator sets it when
    people open Flower through a proxy.
    """
    page_url: str | None = Field(default=None, pattern=_WEB_URL)
    """The URL of the API's pages; Flower links to the pages of calls. The operator sets it when people open the pages
    through a proxy.
    """
    trace_url: str | None = Field(default=None, pattern=r"^https?://[^\s\"'<>]*\{trace_id\}[^\s\"'<>]*$")
    """The URL of a trace in Jaeger, Grafana or the like, with {trace_id}; pages of runs link to it. The operator sets
    it together with TOOLCREW_TRACING.
    """

    @property
    def model_folder(self) -> Path:
        """The folder of the downloaded weights of the embedded model."""
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "toolcrew" / "models"

    @property
    def capability_folder(self) -> Path:
        """The folder of the cached capabilities of models (CapabilityCache)."""
        return self.model_folder / "capabilities"

    def broker(self, url: str | None = None) -> BrokerSettings:
        """Return the settings that must be equal in all processes. Raises ConfigError if no Redis URL is set."""
        redis_url = SecretStr(url) if url else self.redis_url
        if redis_url is None:
            raise ConfigError(
                "TOOLCREW_REDIS_URL is not set: set it to the Redis of the pool (`toolcrew up` starts a pool and "
                "prints it), or use ToolClient.embedded()"
            )
        return BrokerSettings.model_validate(
            {name: getattr(self, name) for name in BrokerSettings.model_fields} | {"redis_url": redis_url}
        )

    def needs_egress(self) -> bool:
        """Return whether an embedded stack must start its own egress proxy."""
        return self.egress_socket is None and any(
            tenant_class.get("network") == "egress" for tenant_class in self.tenant_classes.values()
        )

    def for_children(self) -> dict[str, str]:
        """Return the environment variables that all processes of an embedded stack must share with this process."""
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
    """Return the settings of this process. Raises ConfigError with the name of an invalid variable."""
    return read_environment(OrchestratorSettings, os.environ)


def child_environment(overrides: Mapping[str, str]) -> dict[str, str]:
    """Return this process's environment with `overrides`, for the processes of an embedded stack."""
    return {**os.environ, "PYTHONUNBUFFERED": "1", **overrides}


def is_interactive() -> bool:
    """Return whether a person can answer questions at this process's terminal."""
    return sys.stdin.isatty() and sys.stderr.isatty()


def program(module: str, *arguments: str) -> tuple[str, ...]:
    """Return the command of a toolcrew program. The option -P of Python removes the current folder from the import
    path, because the folder may contain any package.
    """
    return (sys.executable, "-P", "-m", module, *arguments)


def secrets_of_environment() -> dict[str, str]:
    """Return the environment variables with names of secrets (..._API_KEY, ..._TOKEN, ..._SECRET, ..._PASSWORD), for
    masking their values.
    """
    return {name: value for name, value in os.environ.items() if value and SECRET_NAME.search(name)}


def build_masker(settings: OrchestratorSettings, more: Mapping[str, str] | None = None) -> Masker:
    """Return a masker for the secrets that this process knows: secrets of the settings and the environment, and
    `more` (kind -> value).
    """
    return Masker({**secrets_of_environment(), **secrets_of_settings(settings), **(more or {})})


def _find_state_home() -> Path:
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")


def with_secret(settings: OrchestratorSettings) -> OrchestratorSettings:
    """Return the settings with a random secret if an embedded stack has neither a secret nor a Redis password."""
    if settings.redis_url is None or settings.secret is not None or settings.broker().has_password():
        return settings
    return settings.model_copy(update={"secret": SecretStr(secrets.token_urlsafe(32))})
