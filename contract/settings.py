"""Settings of all processes, one frozen object per process. Only this module reads the environment.

A field is the environment variable `TOOLCREW_<NAME>`, unless it has an alias. Its docstring is its row in
docs/settings.md.
"""

import difflib
import hashlib
import json
import os
import re
import secrets
import sys
from collections.abc import Iterable, Mapping
from ipaddress import IPv6Network
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from pydantic import (
    AfterValidator,
    AliasChoices,
    BeforeValidator,
    Field,
    IPvAnyNetwork,
    JsonValue,
    SecretStr,
    ValidationError,
)
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails
from pydantic_settings import BaseSettings, SettingsConfigDict, SettingsError

from toolcrew.contract.broker import DEPLOYMENT, BrokerSettings
from toolcrew.contract.errors import ConfigError
from toolcrew.contract.image_names import ImageNameText, ImagePatternText
from toolcrew.contract.invalid_input import explain_error
from toolcrew.contract.masking import SECRET_NAME, Masker, secrets_of_settings
from toolcrew.contract.run_spec import DialectName
from toolcrew.contract.tenant_classes import TenantClass

PREFIX = "TOOLCREW_"
MIB = 1024 * 1024
DEFAULT_IMAGE = "toolcrew-sandbox:dev"
PROTOCOL = "http/protobuf"
DEFAULT_ENDPOINT = "http://localhost:4318"
"""Default endpoint of OpenTelemetry's exporter."""
MAX_SHOWN = 5
"""Limit of the unknown variables that an error names."""
OTHERS = frozenset(
    {
        "API_BIND",
        "API_PORT",
        "CGROUP_NAMESPACE",
        "MEMLOCK",
        "CHAOS_SEED",
        "DOCKERD_ARGS",
        "ENGINE_SOCKET",
        "FLOWER_BIND",
        "FLOWER_PASSWORD",
        "FLOWER_PORT",
        "FLOWER_USER",
        "GUEST_PYTHON",
        "HEALTH_INTERVAL",
        "PYTHON",
        "REDIS_ADMIN_PASSWORD",
        "REDIS_FLOWER_PASSWORD",
        "REDIS_ORCHESTRATOR_PASSWORD",
        "REDIS_STREAMS_PASSWORD",
        "REDIS_WEB_PASSWORD",
        "REDIS_WORKER_PASSWORD",
        "SERVICE_BASE",
        "TEST_MARK",
        "TEST_REQUIRE",
        "TEST_RIPGREP",
        "WEB_CONCURRENCY",
        "WEB_MEMORY",
        "WORKER_MEMORY",
    }
)
"""Names, without TOOLCREW_, of the variables that the deployment files, scripts and tests read."""
# Kubernetes sets these for every service of the namespace, also for one that is called toolcrew-...
_SERVICE_LINK = re.compile(r".+_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_[0-9]+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)")
_FIELD = re.compile(r'field "(\w+)"')
_WEB_URL = r"^https?://[A-Za-z0-9._~\[\]:-]+(/[A-Za-z0-9._~/-]*)?$"
_PARSERS_NEED = ("PATH", "LANG", "LC_ALL", "PYTHONPATH", "VIRTUAL_ENV")

S = TypeVar("S", bound=BaseSettings)

LogLevel = Annotated[
    Literal["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"],
    BeforeValidator(lambda value: value.upper() if isinstance(value, str) else value),
]


def _check_nat64(prefix: IPv6Network) -> IPv6Network:
    if prefix.prefixlen != 96:
        raise ValueError("must be a /96, such as 64:ff9b::/96")
    return prefix


Nat64Prefix = Annotated[IPv6Network, AfterValidator(_check_nat64)]


def default_socket() -> Path:
    """Return the default socket path of sandboxd: in the user's runtime folder, otherwise in the user's folder below
    the temp folder.
    """
    if runtime := os.environ.get("XDG_RUNTIME_DIR"):
        return Path(runtime) / "sandboxd.sock"
    temp = next((os.environ[name] for name in ("TMPDIR", "TEMP", "TMP") if os.environ.get(name)), "/tmp")
    return Path(temp).absolute() / f"toolcrew-{os.getuid()}" / "sandboxd.sock"


PULLED_IMAGES = "pulled-images"
"""Folder in the state folder of a sandboxd with the records of the images that it pulled."""


def default_state(name: str) -> Path:
    """Return the default state folder of the sandboxd with that name: below /var/lib for root without XDG_STATE_HOME,
    otherwise in the user's state folder.
    """
    if os.geteuid() == 0 and "XDG_STATE_HOME" not in os.environ:
        return Path("/var/lib/toolcrew") / name
    return _find_state_home() / "toolcrew" / name


def default_image_records() -> Path:
    """Return the folder with the records of images that embedded stacks pulled with the engine of DOCKER_HOST."""
    engine = hashlib.sha256(os.environ.get("DOCKER_HOST", "").encode()).hexdigest()[:8]
    return default_state("embedded-stacks") / engine


def default_leases() -> Path:
    """Return the folder of the lock files that show which sandboxds of one user run on this host."""
    if os.geteuid() == 0:
        return Path("/run/toolcrew/leases")
    return default_socket().parent / "leases"


def _find_state_home() -> Path:
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")


def _default_slots(fields: dict[str, Any]) -> int:
    return 16 if fields.get("worker_kind") == "sandbox" else 4


class _Settings(BaseSettings):
    # Each process loads the classes of all processes and builds only its own.
    model_config = SettingsConfigDict(
        env_prefix=PREFIX,
        frozen=True,
        extra="ignore",
        populate_by_name=True,
        env_ignore_empty=True,
        hide_input_in_errors=True,
        defer_build=True,
    )


class SharedSettings(_Settings):
    """Settings that orchestrators and workers read alike."""

    redis_url: SecretStr | None = None
    """The URL of the deployment's Redis: `redis://user:password@host:port/db`, `rediss://` for TLS, or `sentinel://`
    (docs/deploy.md). The operator sets it in every process and changes it when Redis moves.
    """
    deployment: str = Field(default="default", pattern=DEPLOYMENT)
    """The name of the deployment, the same in all of its processes. The operator changes it when two deployments share
    one Redis.
    """
    secret: SecretStr | None = None
    """The secret that signs calls, results and orders, the same in all processes. Default: the password of Redis
    (docs/security.md). The operator sets it before the first start and whenever it may have leaked.
    """
    secrets_previous: list[SecretStr] = Field(default=[])
    """Older secrets that are still accepted, as a JSON list (docs/security.md). The operator sets it during a
    change of TOOLCREW_SECRET.
    """
    redis_sentinel_master: str | None = None
    """The name of the Redis master in the configuration of the sentinels of a `sentinel://` URL. The operator sets it
    with such a URL.
    """
    redis_sentinel_password: SecretStr | None = None
    """The password of the sentinels themselves. The operator sets it if they ask for one."""


class LogSettings(_Settings):
    """The log level, which every service reads."""

    log_level: LogLevel = "INFO"
    """The least urgent log level that a service writes (docs/observe.md). An operator sets `DEBUG` while looking for a
    fault.
    """


class TracingSettings(_Settings):
    """Settings of tracing. `TOOLCREW_TRACING` turns it on. OpenTelemetry's own variables say where spans go and which
    spans are sent (docs/observe.md).
    """

    tracing: Literal["off", "otlp", "otlp-content"] = "off"
    """`otlp` sends spans of runs, calls and sessions to a collector (extra `ops`). `otlp-content` adds arguments,
    results and the texts of runs, masked as in trace files (docs/observe.md). An operator turns tracing on to find slow
    calls.
    """
    protocol: str = Field(
        default=PROTOCOL,
        validation_alias=AliasChoices("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"),
    )
    """The protocol of the exporter. Only `http/protobuf` is supported: the operator unsets another value."""
    endpoint: str | None = Field(
        default=None, validation_alias=AliasChoices("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
    )
    """The URL of the collector. `toolcrew doctor` checks it. The operator sets it together with TOOLCREW_TRACING."""
    is_disabled: bool = Field(default=False, validation_alias="OTEL_SDK_DISABLED")
    """`true` disables tracing. An operator sets it to stop all spans for a while."""

    @property
    def is_on(self) -> bool:
        """True if spans are recorded."""
        return self.tracing != "off" and not self.is_disabled

    @property
    def has_content(self) -> bool:
        """True if spans contain arguments, results and texts of runs."""
        return self.tracing == "otlp-content"


class ClientSettings(_Settings):
    """The settings of programs that use a deployment as one of its tenants."""

    url: str | None = None
    """The address of the HTTP API for `toolcrew.Client` (docs/api.md). A tenant sets it in a shell."""
    api_key: SecretStr | None = None
    """An API key of a tenant: clients and commands act for that tenant (docs/tenants.md). A tenant sets it in a
    shell.
    """


class OrchestratorSettings(SharedSettings, LogSettings, ClientSettings):
    """The settings of `toolcrew`, the SDK, the API and Flower. The model's own variables keep their usual names."""

    model: str | None = None
    """The name of the model at `OPENAI_BASE_URL`, or of a model endpoint (docs/agents.md). Without that URL, `local`
    and `scripted` name models that toolcrew ships. A batch team changes it for each experiment.
    """
    dialect: DialectName | None = None
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

    def with_secret(self) -> "OrchestratorSettings":
        """Return these settings with a random secret if an embedded stack has neither a secret nor a Redis password."""
        if self.redis_url is None or self.secret is not None or self.broker().has_password():
            return self
        return self.model_copy(update={"secret": SecretStr(secrets.token_urlsafe(32))})

    def needs_egress(self) -> bool:
        """Return whether an embedded stack must start its own egress proxy."""
        return self.egress_socket is None and any(
            tenant_class.get("network") == "egress" for tenant_class in self.tenant_classes.values()
        )

    def for_children(self) -> dict[str, str]:
        """Return the environment variables that all processes of an embedded stack must share with this process."""
        previous = [secret.get_secret_value() for secret in self.secrets_previous]
        shared = {"TOOLCREW_DEPLOYMENT": self.deployment, "TOOLCREW_SECRETS_PREVIOUS": json.dumps(previous)}
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


class WorkerSettings(SharedSettings, LogSettings):
    """The settings of a Celery worker."""

    redis_url: SecretStr
    sandboxd_socket: Path = Field(default_factory=default_socket)
    """The Unix socket of sandboxd. An operator changes it when two sandboxds run on one host."""
    host: str = Field(
        default_factory=lambda: re.sub("[^A-Za-z0-9-]", "-", os.uname().nodename)[:40] or "host",
        pattern=r"^[A-Za-z0-9_-]{1,40}$",
    )
    """The name of this host in queues and reports, unique in the deployment. The operator sets it when host names
    change or repeat, as in containers.
    """
    checkpoint_every_s: float | None = Field(default=None, ge=0, le=86_400)
    """Minimum time in seconds between two checkpoints of a session whose files change; 0: no checkpoints. Default: 60
    with a shared TOOLCREW_WORKSPACE_STORE. An operator raises it when the store is slow.
    """
    drain_s: float = Field(default=600.0, gt=0, le=86_400)
    """Seconds that a drain waits for busy sessions; then they move from their last checkpoint. The operator keeps
    it below the time that the scheduler (such as Kubernetes or systemd) gives a process to stop.
    """
    worker_kind: Literal["sandbox", "web"] = "sandbox"
    """`sandbox` runs next to sandboxd. `web` has the network and no sandboxes, for web tools and operators' tools. The
    operator sets it for each worker.
    """
    concurrency: int = Field(default_factory=_default_slots, ge=1, le=512)
    """Calls at a time. An operator raises it when calls wait and the host has processors left."""
    worker_queues: list[Literal["pool.web", "pool.tools"]] | None = Field(default=None, min_length=1)
    """The queues of a web worker. Default: those that it has tools for. The operator sets it to run operators' tools on
    separate hosts.
    """
    tool_modules: list[str] = Field(default=[])
    """Python modules with operators' tools, in addition to installed packages (docs/add-a-tool.md). The operator
    changes it with a new tool.
    """
    tool_config: dict[str, JsonValue] = Field(default={})
    """A JSON object that operators' tools read as `CallContext.config`; no secrets. The operator changes it with the
    tools.
    """
    skills: str | None = None
    """Folders of skills, separated as in PATH; the first of two skills with one name is used. Default: the skills that
    toolcrew ships (docs/add-a-tool.md). The operator sets it to add skills for all tenants.
    """
    mcp_servers: Path | None = None
    """A JSON file with MCP servers whose tools are offered (docs/add-a-tool.md). The operator edits it."""
    mcp_refresh_s: float = Field(default=600.0, ge=1, le=86_400)
    """Seconds between two requests for the tools of an MCP server. The operator lowers it while developing one."""

    def broker(self) -> BrokerSettings:
        """Return the settings of Redis and Celery that workers and orchestrators must share."""
        return BrokerSettings.model_validate({name: getattr(self, name) for name in BrokerSettings.model_fields})


class StreamGatewaySettings(SharedSettings, LogSettings):
    """The settings of the stream gateway, which runs next to sandboxd and its worker."""

    redis_url: SecretStr
    sandboxd_socket: Path = Field(default_factory=default_socket)
    """The Unix socket of sandboxd. An operator changes it when two sandboxds run on one host."""
    host: str = Field(
        default_factory=lambda: re.sub("[^A-Za-z0-9-]", "-", os.uname().nodename)[:40] or "host",
        pattern=r"^[A-Za-z0-9_-]{1,40}$",
    )
    """The name of this host in queues and reports, unique in the deployment. The operator sets it when host names
    change or repeat, as in containers.
    """
    stream_address: str = Field(default="127.0.0.1", pattern=r"^[A-Za-z0-9._:-]{1,255}$")
    """The address at which API processes reach the stream gateway of this host: a name or an IP address. With an
    address of loopback, the gateway serves this host only. The operator sets it on every host of a deployment.
    """
    stream_port: int = Field(default=0, ge=0, le=65_535)
    """The port of the stream gateway; 0: any free port. The operator sets it when a firewall is between the API and the
    hosts.
    """

    def broker(self) -> BrokerSettings:
        """Return the settings of Redis and Celery that workers and orchestrators must share."""
        return BrokerSettings.model_validate({name: getattr(self, name) for name in BrokerSettings.model_fields})


class SandboxdSettings(LogSettings):
    """The settings of sandboxd. Sizes in bytes, durations in seconds."""

    sandboxd_socket: Path = Field(default_factory=default_socket)
    """The Unix socket of sandboxd. An operator changes it when two sandboxds run on one host."""
    sandboxd_allow_uids: list[int] = Field(default=[])
    """Uids that may connect, in addition to sandboxd's own. The operator sets it when the worker runs as another user.
    """
    sandboxd_gateway_uids: list[int] = Field(default=[])
    """Uids that may only use stream channels. The operator sets it when the stream gateway runs as another user."""
    deployment: str = Field(default="default", pattern=DEPLOYMENT)
    """The name of the deployment, as in the workers. The operator sets it when two deployments share one Docker engine.
    """
    sandboxd_name: str = Field(default="default", pattern=DEPLOYMENT)
    """The name of this sandboxd. At its start it removes containers of earlier processes with the same name. The
    operator sets it when two sandboxds share one Docker engine.
    """
    sandboxd_state: Path | None = None
    """The folder of workspaces, records and checkpoints. Default: below /var/lib/toolcrew, or in the user's state
    folder. The operator changes it for a larger disk.
    """
    sandboxd_leases: Path = Field(default_factory=default_leases)
    """The folder of the lock files with which the sandboxds of one host detect each other. The operator sets it to a
    shared folder when they run in containers.
    """
    sandbox_image: ImageNameText = DEFAULT_IMAGE
    """The image of a sandbox. The operator changes it to give all tenants more programs."""
    sandbox_images_allowed: list[ImagePatternText] = Field(default=[])
    """Other images that sessions may ask for: names, or patterns such as `ghcr.io/team/*` (docs/images.md). sandboxd
    pulls images whose entry begins with a registry. The operator adds an image when a batch team needs it.
    """
    image_cache_bytes: int = Field(default=64 * 1024 * MIB, ge=0)
    """Disk space for pulled images; above it the least recently used images that no session uses are removed. The
    operator changes it with the size of the engine's disk.
    """
    sandbox_start: Literal["auto", "oci", "engine"] = "auto"
    """The starter of sandboxes: `oci` is sandboxd itself with crun or runc, which is faster and needs root on the
    engine's host; `engine` is the Docker engine. The operator changes it when `auto` chooses the wrong one.
    """
    containerd_socket: Path | None = None
    """The socket of a containerd whose images sandboxd uses in place of a Docker engine's (docs/images.md). Default:
    the Docker engine; or /run/containerd/containerd.sock, if no Docker engine answers and DOCKER_HOST is not set. The
    operator sets it on nodes of Kubernetes whose socket has another path.
    """
    sandbox_runtime: str = "runc"
    """The runtime of the Docker engine; `runsc` is gVisor. The operator changes it for stronger isolation."""
    sandbox_memory_reserve_bytes: int = Field(default=256 * MIB, ge=64 * MIB)
    """Memory for the processes of a sandbox. The operator raises it when programs of tenants run out of memory."""
    sandbox_workspace: Literal["auto", "image", "tmpfs", "folder"] = "auto"
    """The kind of workspaces: `image` is a file system with a hard quota and needs root, `tmpfs` is memory, `folder` is
    only measured. The operator changes it when `auto` chooses the wrong kind.
    """
    sandbox_workspace_bytes: int = Field(default=256 * MIB, ge=MIB)
    """The size of a workspace, which can hold at most one file per 4 KiB of this size. The operator raises it for large
    repositories.
    """
    max_sandboxes: int = Field(default=200, ge=1)
    """Containers at a time; an idle session gives its container to another one. The operator sets it by the memory of
    the host.
    """
    max_sessions: int = Field(default=1000, ge=1)
    """Open sessions at a time. The operator sets it by the disk of the host."""
    pool_size: int = Field(default=2, ge=0, le=1000)
    """Unused sandboxes of the default image that are kept ready. The operator raises it when many sessions open at
    once.
    """
    idle_pause_s: float = Field(default=30.0, gt=0)
    """Seconds without a call after which a session is frozen until its next call. The operator lowers it to save
    processor time.
    """
    idle_evict_s: float = Field(default=300.0, gt=0)
    """Seconds without a call after which a session gives up its container; files and shell state are kept. The operator
    lowers it to save memory.
    """
    host_free_bytes: int = Field(default=1024 * MIB, ge=0)
    """Free disk space below which no workspace is made. Below half of it, sandboxes that can write are ended. The
    operator changes it with the size of the disk.
    """
    workspace_store: str | None = None
    """The store of checkpoints, uploads and artifacts: a folder, or a URL of fsspec such as s3://bucket/prefix (extra
    `store`). Default: checkpoints go to the state folder. The operator sets it so that sessions survive their host.
    """
    egress_socket: Path | None = None
    """The socket of the egress proxy (docs/images.md). The operator sets it when a tenant class gets the network."""
    egress_uids: list[int] = Field(default=[])
    """Uids that the egress proxy may run as, in addition to root and sandboxd's own. The operator sets it when the
    proxy runs as another user.
    """
    tenant_classes: dict[str, TenantClass] = Field(default={})
    """A JSON object: for the name of each class, the settings of its tenants' sandboxes, which replace the settings
    above. The operator adds a class when a tenant needs more.
    """

    def allowed_uids(self) -> tuple[frozenset[int], frozenset[int]]:
        """Return the uids that may make every request, and those of stream gateways."""
        return frozenset({os.geteuid(), *self.sandboxd_allow_uids}), frozenset(self.sandboxd_gateway_uids)

    def proxy_uids(self) -> frozenset[int]:
        """Return the uids that an egress proxy may have: the process's own uid, root and the configured uids."""
        return frozenset({os.geteuid(), 0, *self.egress_uids})

    def state(self) -> Path:
        """Return the folder of workspaces, records and checkpoints."""
        return self.sandboxd_state or default_state(self.sandboxd_name)


class WebSettings(_Settings):
    """The settings of the web tools. Hosts are in ASCII; international names are written as `xn--`."""

    webfetch_allow_hosts: list[str] = Field(default=[])
    """Hosts that may have a private address. `host` opens every port of the host, `host:port` only that port. The
    operator adds an internal site that a batch team needs.
    """
    webfetch_only_hosts: list[str] = Field(default=[])
    """The only hosts that pages are fetched from; `*.example.org` stands for the names below example.org. The operator
    sets it when a tenant may not read the whole web.
    """
    webfetch_per_minute: int = Field(default=120, ge=1)
    """Pages a minute that one tenant may fetch. The operator raises it for a batch team that reads many pages."""
    refuse_ranges: list[IPvAnyNetwork] = Field(default=[])
    """Networks such as `192.0.2.0/24` that no page may come from, in addition to private ones. The operator adds public
    networks of the company.
    """
    nat64_prefix: Nat64Prefix | None = None
    """The /96 prefix of the NAT64 gateway, so that embedded IPv4 addresses are checked. The operator sets it on hosts
    without IPv4.
    """
    searxng_url: SecretStr | None = None
    """The URL of a SearXNG instance, which websearch_tool tries first. The operator sets it to search without a paid
    service.
    """
    tavily_api_key: SecretStr | None = None
    """The API key of Tavily, which websearch_tool tries second. The operator sets it to enable the service."""
    brave_api_key: SecretStr | None = None
    """The API key of Brave Search, which websearch_tool tries third. The operator sets it to enable the service."""
    exa_api_key: SecretStr | None = None
    """The API key of Exa, which websearch_tool tries last. The operator sets it to enable the service."""


class EgressSettings(LogSettings):
    """The settings of the egress proxy. sandboxd decides what a session may reach."""

    egress_socket: Path = Field(default_factory=lambda: default_socket().parent / "egress.sock")
    """The Unix socket of the proxy. The operator sets it to the path that sandboxd has."""
    egress_allow_uids: list[int] = Field(default=[])
    """Uids that may connect, in addition to the proxy's own. The operator sets it when sandboxd runs as another user.
    """
    refuse_ranges: list[IPvAnyNetwork] = Field(default=[])
    """Networks such as `192.0.2.0/24` that no sandbox may reach, in addition to private ones. The operator adds public
    networks of the company.
    """
    nat64_prefix: Nat64Prefix | None = None
    """The /96 prefix of the NAT64 gateway, so that embedded IPv4 addresses are checked. The operator sets it on hosts
    without IPv4.
    """

    def allowed_uids(self) -> frozenset[int]:
        """Return the uids that may connect: the process's own uid and the configured uids."""
        return frozenset({os.geteuid(), *self.egress_allow_uids})


def variable_names(name: str, field: FieldInfo) -> tuple[str, ...]:
    """Return the variables of a field. The first variable that is set applies."""
    alias = field.validation_alias
    if isinstance(alias, AliasChoices):
        return tuple(str(choice) for choice in alias.choices)
    return (alias if isinstance(alias, str) else PREFIX + name.upper(),)


CLASSES: tuple[type[BaseSettings], ...] = (
    OrchestratorSettings,
    TracingSettings,
    WorkerSettings,
    SandboxdSettings,
    WebSettings,
    EgressSettings,
    StreamGatewaySettings,
)
"""The settings of every process."""
SETTINGS = frozenset(
    variable.removeprefix(PREFIX)
    for settings in CLASSES
    for name, field in settings.model_fields.items()
    for variable in variable_names(name, field)
    if variable.startswith(PREFIX)
)
"""Names of all settings, without TOOLCREW_."""


def check_names(environment: Iterable[str]) -> None:
    """Raise ConfigError for variables that begin with TOOLCREW_ but that nothing reads. The message suggests the
    nearest valid names.
    """
    valid = SETTINGS | OTHERS
    names = (name.upper().removeprefix(PREFIX) for name in environment if name.upper().startswith(PREFIX))
    unknown = sorted(name for name in names if name not in valid and not _SERVICE_LINK.fullmatch(name))
    if unknown:
        descriptions = "; ".join(_describe(name, valid) for name in unknown[:MAX_SHOWN])
        more = f"; and {len(unknown) - MAX_SHOWN} more" if len(unknown) > MAX_SHOWN else ""
        raise ConfigError(
            f"{descriptions}{more}. Correct the name or unset the variable (docs/settings.md lists all of them)"
        )


def _describe(name: str, valid: Iterable[str]) -> str:
    close = difflib.get_close_matches(name[:100], sorted(valid), n=1, cutoff=0.6)
    return f"{PREFIX}{name[:100]} is not a setting" + (f" (did you mean {PREFIX}{close[0]}?)" if close else "")


def check_environment() -> None:
    """Raise ConfigError for a variable of this process that begins with TOOLCREW_ but that no process reads."""
    check_names(os.environ)


def read_environment(settings: type[S]) -> S:
    """Return the settings of this process.

    Raises ConfigError for a variable that is missing or wrong, and for one that begins with TOOLCREW_ and that no
    process reads.
    """
    check_environment()
    try:
        return settings()
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise ConfigError(_describe_error(settings, first)) from error
    except SettingsError as error:
        # Drop the cause of the error, because its message contains the value.
        match = _FIELD.search(str(error))
        if match is None:
            raise ConfigError(
                "a variable is not valid JSON: write lists and objects as JSON (docs/settings.md)"
            ) from None
        raise ConfigError(_describe_json(settings, match[1])) from None


def _describe_error(settings: type[BaseSettings], details: ErrorDetails) -> str:
    """Return the error of a setting as a sentence."""
    part, kind = explain_error(details), details["type"]
    # The field, or the variable that set it.
    field_name, *below = map(str, part.path)
    is_field = field_name in settings.model_fields
    name = variable_names(field_name, settings.model_fields[field_name])[0] if is_field else field_name.upper()
    if kind == "missing":
        return f"{name} is not set: set it in the environment, or start everything at once with `toolcrew up`"
    if kind in ("list_type", "dict_type") and is_field and not below:
        return _describe_json(settings, field_name)
    return f"{'.'.join([name, *below])}: {part.reason}"


def _describe_json(settings: type[BaseSettings], field_name: str) -> str:
    field = settings.model_fields[field_name]
    name, annotation = variable_names(field_name, field)[0], field.annotation
    if get_origin(annotation) in (Union, UnionType):
        annotation = next(one for one in get_args(annotation) if one is not type(None))
    if get_origin(annotation) is list:
        kind, example = "list", "[1000, 1001]" if get_args(annotation)[0] is int else '["first", "second"]'
    else:
        kind, example = "object", '{"name": {"option": "value"}}'
    return f"{name} is not a JSON {kind}: write for example {name}='{example}' (docs/settings.md)"


def load_settings() -> OrchestratorSettings:
    """Return the settings of this orchestrator. Raises ConfigError with the name of an invalid variable."""
    return read_environment(OrchestratorSettings)


def load_tracing_settings() -> TracingSettings:
    """Return the settings of this process. Raises ConfigError with the name of an invalid variable."""
    settings = read_environment(TracingSettings)
    if settings.is_on and settings.protocol != PROTOCOL:
        raise ConfigError(
            f"OTEL_EXPORTER_OTLP_PROTOCOL is '{settings.protocol[:40]}', but only {PROTOCOL} is supported: set it to "
            "that value or unset it, and use the collector's HTTP port (4318) in OTEL_EXPORTER_OTLP_ENDPOINT"
        )
    return settings


def copy_environment() -> dict[str, str]:
    """Return this process's environment, for files that name variables."""
    return dict(os.environ)


def child_environment(overrides: Mapping[str, str]) -> dict[str, str]:
    """Return this process's environment with `overrides`, for the processes of an embedded stack."""
    return {**os.environ, "PYTHONUNBUFFERED": "1", **overrides}


def parser_environment() -> dict[str, str]:
    """Return the environment of a process that parses untrusted files of a tenant, without secrets and addresses."""
    return {name: os.environ[name] for name in _PARSERS_NEED if name in os.environ}


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


if __name__ == "__main__":
    try:
        check_environment()
    except ConfigError as error:
        sys.exit(str(error))
