"""Tenant classes: what sessions may have on this host at most. Which class a session has say the terms of its
tenant.
"""

from dataclasses import dataclass
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from contract.tenancy import NetworkPolicy

HostPattern = Annotated[str, Field(pattern=r"^(\*\.)?[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?$")]
"""A host name in ASCII; `*.example.org` is every name below example.org and not itself."""

DEFAULT = "default"
MAX_NAME_CHARS = 64
"""Of a class, as terms name it."""
MAX_ENTRIES = 1000
"""Of a list of rules: all of them go before each connection."""


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
    """What a class has instead of the host's defaults; None: the default."""

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


@dataclass(frozen=True)
class SandboxPlan:
    """All that decides a container: sessions with equal plans may get the same never-used sandbox. Sizes in bytes."""

    image: str
    runtime: str
    network: NetworkPolicy
    workspace_bytes: int
    workspace_inodes: int
    memory_reserve_bytes: int
    cpus: float
    pids: int
