"""Tenant classes: what sessions of which tenants may have on this host."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

NetworkPolicy = Literal["none", "egress"]
HostPattern = Annotated[str, Field(pattern=r"^(\*\.)?[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?$")]
"""A host name in ASCII; `*.example.org` is every name below example.org and not itself."""

DEFAULT = "default"
MAX_ENTRIES = 1000
"""Of a list of rules: all of them go before each connection."""


class EgressRules(BaseModel):
    """What the filtering proxy lets a session reach. Rates in bytes a second, sizes in bytes of a session's whole life."""

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

    tenants: tuple[str, ...] = ()
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


class TenantClasses:
    """Finds a tenant's class. Raises ValueError for a tenant that two classes name."""

    def __init__(self, classes: Mapping[str, TenantClass], default: TenantClass) -> None:
        self._default = default
        self._by_tenant: dict[str, TenantClass] = {}
        self.all = {DEFAULT: default, **classes}
        for name, terms in classes.items():
            for tenant in terms.tenants:
                if tenant in self._by_tenant:
                    raise ValueError(f"tenant '{tenant}' is in class '{name}' and in another: a tenant has one class")
                self._by_tenant[tenant] = terms

    def of(self, tenant: str) -> TenantClass:
        """The tenant's class, else the default."""
        return self._by_tenant.get(tenant, self._default)
