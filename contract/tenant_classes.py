"""Limits of a tenant class on a host: its sandboxes, its egress rules and its registries."""

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from toolcrew.contract.image_names import ImageNameText, ImagePatternText, RegistryText
from toolcrew.contract.session_spec import (
    Cpus,
    LargestOptions,
    NetworkPolicy,
    Pids,
    PreviewAccess,
    SandboxUser,
    WorkspaceBytes,
)

HostPattern = Annotated[str, Field(pattern=r"^(\*\.)?[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?$")]
"""A host name in ASCII. `*.example.org` matches every name below example.org, and not example.org itself."""
MAX_ENTRIES = 1000
"""Limit of a list of rules. Each connection checks all rules."""


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
    ptrace: bool = False
    """Whether programs may trace each other, for debuggers and leak checks. None can trace PID 1."""
    image: ImageNameText | None = None
    images: tuple[ImagePatternText, ...] | None = None
    network: NetworkPolicy = "none"
    egress: EgressRules = EgressRules()
    previews: PreviewAccess = "none"
    """Who may use addresses of a session's ports: nobody, who has a ticket, or everybody who knows the address."""
    workspace_bytes: WorkspaceBytes | None = None
    memory_reserve_bytes: int | None = Field(default=None, ge=64 * 1024 * 1024)
    cpus: Cpus | None = None
    pids: Pids | None = None
    largest: LargestOptions = LargestOptions()
    pool: dict[ImageNameText, Annotated[int, Field(ge=0, le=1000)]] = Field(default={})
    """Image -> number of unused sandboxes of the image that are kept ready for the class."""
    registries: dict[RegistryText, RegistryLogin] = Field(default={})
    """Registry -> login for the pulls of the class."""
