"""Tenants: what each may have, as data in Redis that both sides read. Adding one is no restart."""

from typing import Annotated, Literal

from pydantic import Field

from contract.calls import Record

DEFAULT_TENANT = "default"
"""Always known. While no other tenant is registered every name is served, by this one's policy; from the first on only registered ones are."""
POLICY_FRESH_S = 1.0
"""How old what a process knows of the tenants may be."""
NetworkPolicy = Literal["none", "egress"]


class CommandRule(Record):
    """As a rule of an approval policy (docs/approvals.md), for one tenant. `deny` holds whoever asks."""

    action: Literal["deny", "ask", "allow"]
    tool: str = Field(default="*", min_length=1, max_length=128)
    argv_prefix: tuple[Annotated[str, Field(min_length=1, max_length=256)], ...] = ()


class SandboxTerms(Record):
    """What of a tenant's policy decides about its sandboxes; goes with a session to sandboxd, which never gives more than its class has.

    `tenant_class`: of the host (TOOLCREW_TENANT_CLASSES), which decides runtime and sizes. None: what the class says.
    """

    tenant_class: str = Field(default="default", min_length=1, max_length=64)
    images: tuple[str, ...] | None = None
    network: NetworkPolicy | None = None
    workspace_bytes: int | None = Field(default=None, ge=1024 * 1024)


class TenantPolicy(Record):
    """What a tenant may have. None: no limit of the tenant's own.

    `weight`: its share of the slots while others want them, too. `in_flight`: calls at a time, `queued`: calls that may wait for it;
    `rate_per_s`: calls begun a second, `burst` at once. `sandboxes`: sessions open at a time, on all hosts together.
    """

    tools: tuple[str, ...] | None = None
    """Names, with `*` at the end standing for any rest."""
    weight: float = Field(default=1.0, gt=0, le=1000)
    in_flight: int = Field(default=1000, ge=1, le=1_000_000)
    queued: int = Field(default=10_000, ge=1, le=1_000_000)
    rate_per_s: float | None = Field(default=None, gt=0, le=1_000_000)
    burst: int = Field(default=100, ge=1, le=1_000_000)
    sandboxes: int = Field(default=1000, ge=0, le=1_000_000)
    commands: Annotated[tuple[CommandRule, ...], Field(max_length=1000)] = ()
    sandbox: SandboxTerms = SandboxTerms()

    def allows_tool(self, name: str) -> bool:
        """Whether calls of that tool are served at all."""
        if self.tools is None:
            return True
        return any(name.startswith(rule[:-1]) if rule.endswith("*") else name == rule for rule in self.tools)
