"""The only reader of the environment on the worker side: one frozen settings object a process."""

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

from contract.masking import SECRET_NAME
from contract.settings import BrokerSettings, read_environment
from contract.tenancy import NetworkPolicy
from telemetry.log_lines import LogLevel

DEFAULT_IMAGE = "toolcrew-sandbox:dev"
MIB = 1024 * 1024
HostPattern = Annotated[str, Field(pattern=r"^(\*\.)?[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?$")]
"""A host name in ASCII; `*.example.org` is every name below example.org and not itself."""
MAX_ENTRIES = 1000
"""Of a list of rules: all of them go before each connection."""


def default_socket() -> Path:
    """Where sandboxd listens unless told otherwise: the user's runtime folder, else a folder of the user's own below
    the temp folder.
    """
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    base = Path(runtime) if runtime else Path(tempfile.gettempdir()) / f"toolcrew-{os.getuid()}"
    return base / "sandboxd.sock"


def default_state(name: str) -> Path:
    """Where a sandboxd of that name keeps workspaces and records unless told otherwise: for root below /var/lib, else
    the user's state folder.
    """
    if os.geteuid() == 0:
        return Path("/var/lib/toolcrew") / name
    base = os.environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local/state") / "toolcrew" / name


def default_leases() -> Path:
    """Where the sandboxds of one user on one host see which of them live."""
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
    # A wheel holds them inside the package, a checkout next to it.
    return tuple(folder for folder in (package / "shipped_skills", package.parent / "skills") if folder.is_dir())[:1]


class WorkerSettings(BaseSettings):
    """A Celery worker's settings; every field is `TOOLCREW_<NAME>`, lists and objects in JSON. One that is empty is not
    set.
    """

    model_config = SettingsConfigDict(env_prefix="TOOLCREW_", frozen=True, extra="ignore", env_ignore_empty=True)

    redis_url: SecretStr
    deployment: str = "default"
    secret: SecretStr | None = None
    secrets_previous: list[SecretStr] = []
    """Secrets that are still accepted while one is changed (docs/wire-security.md); a JSON list."""
    redis_sentinel_master: str | None = None
    """The name under which sentinels watch Redis, when `redis_url` names sentinels."""
    redis_sentinel_password: SecretStr | None = None
    sandboxd_socket: Path = Field(default_factory=default_socket)
    host: str = Field(
        default_factory=lambda: re.sub("[^A-Za-z0-9-]", "-", socket.gethostname())[:40] or "host",
        pattern=r"^[A-Za-z0-9_-]{1,40}$",
    )
    """Its name in queues, reports and orders; no two hosts of a deployment may have the same."""
    checkpoint_every_s: float | None = Field(default=None, ge=0, le=86_400)
    """The least time between two checkpoints that the worker takes of a session whose files change; 0: none. None: 60
    where TOOLCREW_WORKSPACE_STORE is shared.
    """
    drain_s: float = Field(default=600.0, gt=0, le=86_400)
    """How long a drain waits for sessions that are busy, or cannot be kept; then they move from their last
    checkpoint.
    """
    worker_kind: Literal["sandbox", "web"] = "sandbox"
    """sandbox: beside a sandboxd. web: with the network and without sandboxes, for web tools and operators' tools."""
    concurrency: int = Field(default_factory=_default_slots, ge=1, le=512)
    """Calls at a time: 16 in threads, which cost next to nothing; 4 in processes."""
    worker_queues: list[Literal["pool.web", "pool.tools"]] | None = Field(default=None, min_length=1)
    """What a web worker serves; None: pool.web, and pool.tools where there are operators' tools."""
    tool_modules: list[str] = []
    """Modules with operators' tools, beside the installed packages that name theirs (docs/custom-tools.md)."""
    tool_config: dict[str, JsonValue] = {}
    """What operators' tools find in `CallContext.config`. No place for secrets."""
    skills: str | None = None
    """Folders with skills, separated as in PATH; each skill is a folder in one of them. The first of two skills with
    one name is used. None: the skills that are shipped with toolcrew (docs/skills.md)."""
    mcp_servers: Path | None = None
    """A JSON file with the MCP servers whose tools are offered (docs/mcp.md)."""
    mcp_refresh_s: float = Field(default=600.0, ge=1, le=86_400)
    """How often they are asked for their tools again. One that does not answer is asked sooner, at first after 30 s."""
    log_level: LogLevel = "INFO"

    def skill_roots(self) -> tuple[Path, ...]:
        """The folders that skills are in."""
        if self.skills is None:
            return _find_shipped_skills()
        return tuple(Path(root) for root in self.skills.split(os.pathsep) if root)

    def broker(self) -> BrokerSettings:
        """What both sides must agree on."""
        return BrokerSettings.model_validate({name: getattr(self, name) for name in BrokerSettings.model_fields})


class EgressRules(BaseModel):
    """What the filtering proxy lets a session reach. Rates in bytes a second, sizes in bytes of a session's whole
    life.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    hosts: Annotated[tuple[HostPattern, ...], Field(max_length=MAX_ENTRIES)] = ()
    """The only hosts; none: nothing can be reached."""
    ports: Annotated[tuple[Annotated[int, Field(ge=1, le=65535)], ...], Field(max_length=MAX_ENTRIES)] = (80, 443)
    private_hosts: Annotated[tuple[HostPattern, ...], Field(max_length=MAX_ENTRIES)] = ()
    """Of the hosts, those that may lie on a private address: a package mirror of one's own."""
    max_bytes: int = Field(default=2 * 1024**3, ge=1)
    bytes_per_second: int = Field(default=50 * 1024**2, ge=1024)
    max_connections: int = Field(default=32, ge=1, le=256)


class TenantClass(BaseModel):
    """What sessions of a tenant class may have on this host at most, in place of its defaults; None: the default. The
    terms of a tenant name its class.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    runtime: str | None = Field(default=None, min_length=1)
    image: str | None = Field(default=None, min_length=1)
    images: tuple[str, ...] | None = None
    network: NetworkPolicy = "none"
    egress: EgressRules = EgressRules()
    workspace_bytes: int | None = Field(default=None, ge=1024 * 1024)
    memory_reserve_bytes: int | None = Field(default=None, ge=64 * 1024 * 1024)
    cpus: float | None = Field(default=None, gt=0)
    pids: int | None = Field(default=None, ge=16)
    pool: dict[str, Annotated[int, Field(ge=0, le=1000)]] = {}
    """Image -> how many never-used sandboxes of it are kept ready for the class."""


class SandboxdSettings(BaseSettings):
    """sandboxd's settings; every field is `TOOLCREW_<NAME>`. Sizes in bytes, durations in seconds."""

    model_config = SettingsConfigDict(
        env_prefix="TOOLCREW_", frozen=True, extra="ignore", env_ignore_empty=True, populate_by_name=True
    )

    sandboxd_socket: Path = Field(default_factory=default_socket)
    sandboxd_allow_uids: list[int] = []
    deployment: str = Field(default="default", pattern=r"^[A-Za-z0-9_-]{1,64}$")
    """Labels the containers beside the name: nothing of another deployment on the same engine is touched."""
    sandboxd_name: str = Field(default="default", pattern=r"^[A-Za-z0-9_-]{1,64}$")
    """Labels this sandboxd's containers; two on one engine need two names, or one sweeps the other's sandboxes."""
    sandboxd_state: Path | None = None
    """Workspaces, records and checkpoints; None: a folder of its name below /var/lib/toolcrew, or in the user's state
    folder.
    """
    sandboxd_leases: Path = Field(default_factory=default_leases)
    """A lock file for each living sandboxd of this host: what one that died has left is removed by the next that sees
    it.
    """
    sandbox_image: str = DEFAULT_IMAGE
    sandbox_images_allowed: list[str] = []
    sandbox_runtime: str = "runc"
    sandbox_memory_reserve_bytes: int = Field(default=256 * MIB, ge=64 * MIB)
    sandbox_workspace: Literal["auto", "image", "tmpfs", "folder"] = "auto"
    """image: a file system image with a hard quota, needs root; tmpfs: memory; folder: watched only. auto: the best
    that this host can have.
    """
    sandbox_workspace_bytes: int = Field(default=256 * MIB, ge=MIB)
    sandbox_cpus: float = Field(default=1.0, gt=0)
    sandbox_pids: int = Field(default=128, ge=16)
    max_sandboxes: int = Field(default=200, ge=1)
    """Containers at a time. Idle sessions give theirs up for others and get one again at their next call."""
    max_sessions: int = Field(default=1000, ge=1)
    pool_size: int = Field(default=2, ge=0, le=1000)
    """Never-used sandboxes kept ready of the default class's image; of other images: `pool` of a class."""
    idle_pause_s: float = Field(default=30.0, gt=0)
    """A session without a call and without a background job is frozen after this time, and thawed by its next call."""
    idle_evict_s: float = Field(default=300.0, gt=0)
    """And after this time its container is given up; its files and shell state are kept."""
    host_free_bytes: int = Field(default=1024 * MIB, ge=0)
    """No workspace is made on a disk with less free space than this; with less than half of it, what writes to one is
    ended, files kept.
    """
    workspace_store: str | None = None
    """Where checkpoints go: a folder, or a URL that fsspec knows (extra `store`), as s3://bucket/prefix. None: below
    the state folder.
    """
    egress_socket: Path | None = None
    """Of the egress proxy (`python -m workers.egress`); without one no class can have network: egress."""
    egress_uids: list[int] = []
    """Uids that the egress proxy may run under, beside sandboxd's own and root's: nobody else at that socket is told
    anything.
    """
    tenant_classes: dict[str, TenantClass] = {}
    """Class name -> what its tenants have instead of the settings above, in JSON."""
    log_level: LogLevel = "INFO"

    def allowed_uids(self) -> frozenset[int]:
        """Uids that may connect: our own, and those listed."""
        return frozenset({os.geteuid(), *self.sandboxd_allow_uids})

    def proxy_uids(self) -> frozenset[int]:
        """Uids that an egress proxy may have: our own, root, and those listed."""
        return frozenset({os.geteuid(), 0, *self.egress_uids})

    def state(self) -> Path:
        """The folder of workspaces, records and checkpoints."""
        return self.sandboxd_state or default_state(self.sandboxd_name)


class WebSettings(BaseSettings):
    """Settings of the web tools; every field is `TOOLCREW_<NAME>`, lists in JSON. Hosts in ASCII, international names
    as `xn--`.
    """

    model_config = SettingsConfigDict(
        env_prefix="TOOLCREW_", frozen=True, extra="ignore", hide_input_in_errors=True, env_ignore_empty=True
    )

    webfetch_allow_hosts: list[str] = []
    """`host` or `host:port`: hosts that the name and address rules let pass, and with a port the port rule too."""
    webfetch_only_hosts: list[str] = []
    """When there are any, no other host is fetched from; `*.example.org` stands for the names below example.org."""
    webfetch_per_minute: int = Field(default=120, ge=1)
    """Pages that one tenant may fetch from the network in a minute."""
    refuse_ranges: list[IPvAnyNetwork] = []
    nat64_prefix: Nat64Prefix | None = None
    searxng_url: SecretStr | None = None
    tavily_api_key: SecretStr | None = None
    brave_api_key: SecretStr | None = None
    exa_api_key: SecretStr | None = None


class EgressSettings(BaseSettings):
    """The egress proxy's settings; every field is `TOOLCREW_<NAME>`, lists in JSON. What a session may reach comes from
    sandboxd.
    """

    model_config = SettingsConfigDict(env_prefix="TOOLCREW_", frozen=True, extra="ignore", env_ignore_empty=True)

    egress_socket: Path = Field(default_factory=lambda: default_socket().parent / "egress.sock")
    egress_allow_uids: list[int] = []
    """Who may connect beside our own uid: sandboxd's."""
    refuse_ranges: list[IPvAnyNetwork] = []
    nat64_prefix: Nat64Prefix | None = None
    log_level: LogLevel = "INFO"

    def allowed_uids(self) -> frozenset[int]:
        """Uids that may connect: our own, and those listed."""
        return frozenset({os.geteuid(), *self.egress_allow_uids})


def load_worker_settings() -> WorkerSettings:
    """Settings of this worker. Raises ConfigError with the name of the variable that is missing or wrong."""
    return read_environment(WorkerSettings, os.environ)


def load_sandboxd_settings() -> SandboxdSettings:
    """Settings of this sandboxd. Raises ConfigError with the name of the variable that is wrong."""
    return read_environment(SandboxdSettings, os.environ)


def load_web_settings() -> WebSettings:
    """Settings of the web tools. Raises ConfigError with the name of the variable that is wrong."""
    return read_environment(WebSettings, os.environ)


def load_egress_settings() -> EgressSettings:
    """Settings of the egress proxy. Raises ConfigError with the name of the variable that is wrong."""
    return read_environment(EgressSettings, os.environ)


def secrets_of_environment() -> dict[str, str]:
    """What this process's environment holds under names of secrets, for masking it."""
    return {name: value for name, value in os.environ.items() if value and SECRET_NAME.search(name)}
