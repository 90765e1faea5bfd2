"""Settings of the worker side, one frozen object per process. Only this module reads the environment."""

import os
import re
import socket
import tempfile
from ipaddress import IPv6Network
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    IPvAnyNetwork,
    JsonValue,
    SecretStr,
)
from pydantic_settings import BaseSettings, SettingsConfigDict

from toolcrew.contract.image_names import ImageNameText, ImagePatternText, RegistryText
from toolcrew.contract.masking import SECRET_NAME
from toolcrew.contract.session_spec import Cpus, LargestOptions, Pids, SandboxUser, WorkspaceBytes
from toolcrew.contract.settings import DEPLOYMENT, BrokerSettings, SharedSettings, read_environment
from toolcrew.contract.tenancy import NetworkPolicy
from toolcrew.telemetry.settings import LogSettings

DEFAULT_IMAGE = "toolcrew-sandbox:dev"
MIB = 1024 * 1024
HostPattern = Annotated[str, Field(pattern=r"^(\*\.)?[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?$")]
"""A host name in ASCII. `*.example.org` matches every name below example.org, and not example.org itself."""
MAX_ENTRIES = 1000
"""Limit of a list of rules. Each connection checks all rules."""


def default_socket() -> Path:
    """Return the default socket path of sandboxd: in the user's runtime folder, otherwise in the user's folder below
    the temp folder.
    """
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    base = Path(runtime) if runtime else Path(tempfile.gettempdir()) / f"toolcrew-{os.getuid()}"
    return base / "sandboxd.sock"


def default_state(name: str) -> Path:
    """Return the default state folder of the sandboxd with that name: below /var/lib for root, otherwise in the
    user's state folder.
    """
    if os.geteuid() == 0:
        return Path("/var/lib/toolcrew") / name
    base = os.environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local/state") / "toolcrew" / name


def default_leases() -> Path:
    """Return the folder of the lock files that show which sandboxds of one user run on this host."""
    if os.geteuid() == 0:
        return Path("/run/toolcrew/leases")
    return default_socket().parent / "leases"


def _check_nat64(prefix: IPv6Network) -> IPv6Network:
    if prefix.prefixlen != 96:
        raise ValueError("must be a /96, such as 64:ff9b::/96")
    return prefix


Nat64Prefix = Annotated[IPv6Network, AfterValidator(_check_nat64)]


def _default_slots(fields: dict[str, Any]) -> int:
    return 16 if fields.get("worker_kind") == "sandbox" else 4


def _find_shipped_skills() -> tuple[Path, ...]:
    package = Path(__file__).parent
    # In an installed package the skills are inside the package. In a source checkout, where toolcrew/workers is a
    # link, they are next to the linked folder.
    folders = (package / "shipped_skills", package.resolve().parent / "skills")
    return tuple(folder for folder in folders if folder.is_dir())[:1]


class WorkerSettings(SharedSettings, LogSettings):
    """The settings of a Celery worker."""

    redis_url: SecretStr
    sandboxd_socket: Path = Field(default_factory=default_socket)
    """The Unix socket of sandboxd. An operator changes it when two sandboxds run on one host."""
    host: str = Field(
        default_factory=lambda: re.sub("[^A-Za-z0-9-]", "-", socket.gethostname())[:40] or "host",
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

    def skill_roots(self) -> tuple[Path, ...]:
        """Return the folders that contain skills."""
        if self.skills is None:
            return _find_shipped_skills()
        return tuple(Path(root) for root in self.skills.split(os.pathsep) if root)

    def broker(self) -> BrokerSettings:
        """Return the settings of Redis and Celery that workers and orchestrators must share."""
        return BrokerSettings.model_validate({name: getattr(self, name) for name in BrokerSettings.model_fields})


class EgressRules(BaseModel):
    """Limits of the egress proxy for a session. Rates are in bytes per second. Sizes are totals over the session's
    whole lifetime, in bytes.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    hosts: Annotated[tuple[HostPattern, ...], Field(max_length=MAX_ENTRIES)] = ()
    """The only hosts that a session may reach. An empty list allows no host."""
    ports: Annotated[tuple[Annotated[int, Field(ge=1, le=65535)], ...], Field(max_length=MAX_ENTRIES)] = (80, 443)
    private_hosts: Annotated[tuple[HostPattern, ...], Field(max_length=MAX_ENTRIES)] = ()
    """The entries of `hosts` that may have a private address, such as the company's own package mirror."""
    max_bytes: int = Field(default=2 * 1024**3, ge=1)
    bytes_per_second: int = Field(default=50 * 1024**2, ge=1024)
    max_connections: int = Field(default=32, ge=1, le=256)


class RegistryLogin(BaseModel):
    """Account at a registry. `password_file`: a file that contains the password or an access token; sandboxd reads it
    for each pull.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    user: str = Field(min_length=1, max_length=256)
    password_file: Path


class TenantClass(BaseModel):
    """Limits of the sessions of a tenant class on this host. None: the setting of the host applies. The policy of a
    tenant names the tenant's class.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    runtime: str | None = Field(default=None, min_length=1)
    user: SandboxUser = "sandbox"
    """The user of programs. `root` is root of the sandbox only, and may change the image's files for this session."""
    image: ImageNameText | None = None
    images: tuple[ImagePatternText, ...] | None = None
    network: NetworkPolicy = "none"
    egress: EgressRules = EgressRules()
    workspace_bytes: WorkspaceBytes | None = None
    memory_reserve_bytes: int | None = Field(default=None, ge=64 * 1024 * 1024)
    cpus: Cpus | None = None
    pids: Pids | None = None
    largest: LargestOptions = LargestOptions()
    pool: dict[ImageNameText, Annotated[int, Field(ge=0, le=1000)]] = Field(default={})
    """Image -> number of unused sandboxes of the image that are kept ready for the class."""
    registries: dict[RegistryText, RegistryLogin] = Field(default={})
    """Registry -> login for the pulls of the class."""


class SandboxdSettings(LogSettings):
    """The settings of sandboxd. Sizes in bytes, durations in seconds."""

    sandboxd_socket: Path = Field(default_factory=default_socket)
    """The Unix socket of sandboxd. An operator changes it when two sandboxds run on one host."""
    sandboxd_allow_uids: list[int] = Field(default=[])
    """Uids that may connect, in addition to sandboxd's own. The operator sets it when the worker runs as another user.
    """
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

    def allowed_uids(self) -> frozenset[int]:
        """Return the uids that may connect: the process's own uid and the configured uids."""
        return frozenset({os.geteuid(), *self.sandboxd_allow_uids})

    def proxy_uids(self) -> frozenset[int]:
        """Return the uids that an egress proxy may have: the process's own uid, root and the configured uids."""
        return frozenset({os.geteuid(), 0, *self.egress_uids})

    def state(self) -> Path:
        """Return the folder of workspaces, records and checkpoints."""
        return self.sandboxd_state or default_state(self.sandboxd_name)


class WebSettings(BaseSettings):
    """The settings of the web tools. Hosts are in ASCII; international names are written as `xn--`."""

    model_config = SettingsConfigDict(
        env_prefix="TOOLCREW_", frozen=True, extra="ignore", hide_input_in_errors=True, env_ignore_empty=True
    )

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


def load_worker_settings() -> WorkerSettings:
    """Return the settings of this worker. Raises ConfigError with the name of a missing or invalid variable."""
    return read_environment(WorkerSettings, os.environ)


def load_sandboxd_settings() -> SandboxdSettings:
    """Return the settings of this sandboxd. Raises ConfigError with the name of an invalid variable."""
    return read_environment(SandboxdSettings, os.environ)


def load_web_settings() -> WebSettings:
    """Return the settings of the web tools. Raises ConfigError with the name of an invalid variable."""
    return read_environment(WebSettings, os.environ)


def load_egress_settings() -> EgressSettings:
    """Return the settings of the egress proxy. Raises ConfigError with the name of an invalid variable."""
    return read_environment(EgressSettings, os.environ)


def secrets_of_environment() -> dict[str, str]:
    """Return the environment variables with names of secrets and their values. The log masks these values."""
    return {name: value for name, value in os.environ.items() if value and SECRET_NAME.search(name)}
