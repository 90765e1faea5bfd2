"""Policies of tenants, stored in Redis for orchestrators and workers; a change needs no restart."""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Annotated, Any, Literal

from pydantic import Field

from toolcrew.contract.calls import MAX_TIMEOUT_S, Record
from toolcrew.contract.errors import ConfigError
from toolcrew.contract.image_names import ImagePatternText
from toolcrew.contract.secrets import MAX_SECRETS, SecretName
from toolcrew.contract.session_spec import NetworkPolicy, WorkspaceBytes
from toolcrew.contract.signing import UNSEAL_LUA, SigningKeys, readable
from toolcrew.contract.specs import ToolSpec

DEFAULT_TENANT = "default"
"""Tenant that always exists. Until the first tenant is registered, calls of every tenant name are accepted, with the
policy of this tenant. Afterwards only registered names are accepted, even after all of them were removed.
"""
POLICY_FRESH_S = 1.0
"""Maximum age, in seconds, of the policies that a process has cached."""
MAX_PAUSE_REASON_CHARS = 500
MAX_POLICY_BYTES = 256 * 1024
"""Limit of a signed policy, in bytes. A larger policy is neither written nor read."""
VERSION_FIELD = "#version"
"""Field of the hash of tenants that contains a version instead of a tenant. The version changes with every change of a
policy, so that a process can detect a change with one small read.
"""
VERB_TOOLS = {"session.exec": "bash_tool", "session.write_file": "write_tool", "session.read_file": "read_tool"}
"""Session verbs (calls of the SDK) that do the same as a tool, with the tool. A rule that forbids the tool also forbids
the verb. All tenants may use all other verbs.
"""
SKILL_TOOL, BASH_TOOL = "skill_tool", "bash_tool"
LONG_TOOLS = (BASH_TOOL, SKILL_TOOL, "session.exec")
"""Tools whose calls may run longer than MAX_TIMEOUT_S if the tenant class allows it. Calls of installed skills may do
so, too.
"""
SkillDigest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
NamePattern = Annotated[str, Field(pattern=r"^[^*]{0,127}\*?$", min_length=1)]


class CommandRule(Record):
    """Rule of an approval policy (docs/approvals.md) for one tenant. No approval overrides `deny`.

    `action`: deny the call, ask a person, or allow it. `tool`: a name or pattern. `argv_prefix`: the first words of the
    command; empty: every command.
    """

    action: Literal["deny", "ask", "allow"]
    tool: str = Field(default="*", min_length=1, max_length=128)
    argv_prefix: Annotated[tuple[Annotated[str, Field(min_length=1, max_length=256)], ...], Field(max_length=32)] = ()

    def is_about(self, name: str) -> bool:
        """Return whether the rule matches the tool or the corresponding session verb. Matching is case-sensitive."""
        return any(fnmatchcase(candidate, self.tool) for candidate in _names(name))


class SandboxPolicy(Record):
    """The part of a tenant's policy that is about sandboxes. Each session sends this part to sandboxd, which never
    exceeds the limits of the tenant class.

    `tenant_class`: a class of the host (TOOLCREW_TENANT_CLASSES), which sets runtime and sizes. null in other fields:
    the value of the class.
    """

    tenant_class: str = Field(
        default="default", min_length=1, max_length=64, description="Tenant class of the tenant's sandboxes."
    )
    images: Annotated[tuple[ImagePatternText, ...], Field(max_length=100)] | None = Field(
        default=None,
        description="Images that the tenant's sandboxes may use: names, or patterns such as ghcr.io/team/*.",
    )
    network: NetworkPolicy | None = Field(default=None, description="Highest network access of the tenant's sandboxes.")
    workspace_bytes: WorkspaceBytes | None = Field(default=None, description="Limit of a workspace, in bytes.")
    secrets: Annotated[tuple[SecretName, ...], Field(max_length=MAX_SECRETS)] | None = Field(
        default=None, description="Secrets that the tenant's sandboxes may use."
    )


class Budgets(Record):
    """Limits of what a tenant uses in a day and in a month, in UTC. null: no limit.

    Tokens: prompt and completion tokens. Cost is in the currency of the models' prices.
    """

    tokens_per_day: int | None = Field(default=None, ge=0, description="Limit of the tokens of models per day, in UTC.")
    tokens_per_month: int | None = Field(default=None, ge=0, description="Limit of the tokens of models per month.")
    cost_per_day: float | None = Field(
        default=None, ge=0, description="Limit of the cost of models per day, in the currency of their prices."
    )
    cost_per_month: float | None = Field(
        default=None, ge=0, description="Limit of the cost of models per month, in the currency of their prices."
    )
    cpu_s_per_day: float | None = Field(
        default=None, ge=0, description="Limit of the CPU seconds of sandboxes per day."
    )
    cpu_s_per_month: float | None = Field(
        default=None, ge=0, description="Limit of the CPU seconds of sandboxes per month."
    )
    stored_bytes_per_day: int | None = Field(
        default=None,
        ge=0,
        description="Limit of the bytes that checkpoints, artifacts and uploads add per day, minus deleted bytes.",
    )
    stored_bytes_per_month: int | None = Field(
        default=None,
        ge=0,
        description="Limit of the bytes that checkpoints, artifacts and uploads add per month, minus deleted bytes.",
    )


class TenantPolicy(Record):
    """Limits and rights of a tenant. null: no limit for this tenant."""

    # A field with a description is also an option of `toolcrew tenants set`.
    tools: Annotated[tuple[NamePattern, ...], Field(max_length=1000)] | None = Field(
        default=None, description="Tools that the tenant may call; * at the end matches any suffix."
    )
    models: Annotated[tuple[NamePattern, ...], Field(max_length=1000)] | None = Field(
        default=None, description="Models that the tenant's runs may use; * at the end matches any suffix."
    )
    weight: float = Field(
        default=1.0, ge=0.001, le=1000, description="The tenant's share of slots relative to other tenants."
    )
    in_flight: int = Field(default=1000, ge=1, le=1_000_000, description="Limit of concurrent calls.")
    queued: int = Field(default=10_000, ge=1, le=1_000_000, description="Limit of waiting calls.")
    rate_per_s: float | None = Field(default=None, ge=0.001, le=1_000_000, description="Limit of calls per second.")
    burst: int = Field(default=100, ge=1, le=1_000_000, description="Limit of calls in a burst above the rate.")
    sandboxes: int = Field(
        default=1000, ge=0, le=1_000_000, strict=True, description="Limit of open sessions on all hosts together."
    )
    stored_bytes: int = Field(
        default=100_000_000_000,
        ge=0,
        le=10**15,
        description="Limit of the uploads and artifacts that are stored at a time, in bytes.",
    )
    commands: Annotated[tuple[CommandRule, ...], Field(max_length=1000)] = Field(
        default=(),
        description="A rule action:tool:words, as deny:bash_tool:git push; repeat it for more; replaces all rules.",
    )
    streams: Literal["allow", "refuse"] | None = Field(
        default=None,
        description="Streams to processes, files and ports: allow or refuse. Default: allow, but no processes for a "
        "tenant with deny or ask rules for bash_tool.",
    )
    sandbox: SandboxPolicy = SandboxPolicy()
    budgets: Budgets = Budgets()
    is_paused: bool = False
    """True while no call and no run of the tenant starts. `pause_reason` has the reason."""
    pause_reason: str = Field(default="", max_length=MAX_PAUSE_REASON_CHARS)
    is_removed: bool = False
    """True after the tenant was removed. The name stays reserved, because runs, files and checkpoints of the tenant
    may still be stored under it.
    """
    trusted_skills: Annotated[tuple[SkillDigest, ...], Field(max_length=1000)] = Field(
        default=(), description="Digests of skills whose allowed-tools need no approval once a run has loaded them."
    )

    def allows_tool(self, name: str) -> bool:
        """Return whether the tenant may call the tool, or use the session verb, of this name."""
        if self.tools is None:
            return True
        names = _names(name)
        return not names or any(_fits(candidate, pattern) for candidate in names for pattern in self.tools)

    def allows_model(self, name: str) -> bool:
        """Return whether a run of the tenant may use the model: a configured endpoint, or a model of that name at the
        endpoint of the orchestrator's environment.
        """
        return self.models is None or any(_fits(name, pattern) for pattern in self.models)


def tools_of(spec: ToolSpec, arguments: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the tools that a call uses, its own tool first. Each of them must be allowed and enabled.

    `arguments`: prepared arguments, without aliases and with defaults. The script of a skill can do the same as bash.
    Therefore rules and switches of bash also apply to the call.
    """
    if spec.is_installed_skill:
        return (spec.name, SKILL_TOOL, BASH_TOOL)
    if spec.name != SKILL_TOOL or arguments.get("action") != "run":
        return (spec.name,)
    name = arguments.get("name")
    # Without a script, the skill itself is the tool.
    return (
        (SKILL_TOOL, BASH_TOOL) if "script" in arguments or not isinstance(name, str) else (SKILL_TOOL, BASH_TOOL, name)
    )


def largest_limit(spec: ToolSpec, class_s: float) -> float:
    """Return the largest limit of the tool's calls, in seconds. `class_s`: the largest that the tenant class allows."""
    can_be_long = spec.name in LONG_TOOLS or spec.is_installed_skill
    return class_s if can_be_long and spec.max_timeout_s == MAX_TIMEOUT_S else spec.max_timeout_s


REGISTERED_LUA = (
    UNSEAL_LUA
    + """
-- Whether a tenant is registered, and was not removed (TenantPolicy.is_removed). `key`: of the hash of tenants.
local function is_registered(key, name)
  local policy = unsealed(redis.call('HGET', key, name) or nil)
  return policy ~= '' and policy ~= '{"is_removed":true}'
end
-- Whether calls of a tenant are served: it is registered, or no tenant is.
local function is_served(key, name)
  local others = redis.call('HLEN', key)
    - redis.call('HEXISTS', key, '#version') - redis.call('HEXISTS', key, 'default')
  return name == 'default' or is_registered(key, name) or others == 0
end
"""
)


def build_refusal_subject(name: str, used: str) -> str:
    """Return the subject of a refusal "... is forbidden". `name`: the tool that was called. `used`: the forbidden tool
    that the call would use.
    """
    return "it" if used == name else f"it would run a program as {used} does, which"


def seal_policy(keys: SigningKeys, tenant: str, policy: TenantPolicy) -> str:
    """Return the signed policy of a tenant. The signature is valid for this tenant only."""
    # Write only fields that differ from the default. An earlier release can then read a record of a later one until a
    # new field is used.
    return keys.seal(f"policy {tenant}", policy.model_dump_json(exclude_defaults=True))


def parse_policy(keys: SigningKeys, tenant: str, sealed: bytes) -> TenantPolicy:
    """Return the tenant's policy. Raises ConfigError with what is wrong and what to do."""
    advice = f"run the same release everywhere, or set it again (toolcrew tenants set {tenant} --from FILE)"
    if len(sealed) > MAX_POLICY_BYTES:
        raise ConfigError(
            f"the policy of tenant {tenant} is larger than {MAX_POLICY_BYTES} bytes, so its calls are refused: {advice}"
        )
    with readable(f"the policy of tenant {tenant}", advice, "its calls are refused"):
        return TenantPolicy.model_validate_json(keys.unseal(f"policy {tenant}", sealed), strict=True)


def parse_tenants(keys: SigningKeys, hash_fields: Mapping[bytes, bytes]) -> dict[str, TenantPolicy | ConfigError]:
    """Return the policies of all registered tenants by name. For a policy that cannot be read, the value is the
    error.
    """
    policies: dict[str, TenantPolicy | ConfigError] = {}
    for field in sorted(hash_fields):
        name = field.decode(errors="replace")
        if name == VERSION_FIELD:
            continue
        try:
            policy = parse_policy(keys, name, hash_fields[field])
        except ConfigError as error:
            policies[name] = error
        else:
            if not policy.is_removed:
                policies[name] = policy
    return policies


def _names(name: str) -> tuple[str, ...]:
    """Return the names by which a policy can match a tool or verb; none for a verb that every tenant may use."""
    if not name.startswith("session."):
        return (name,)
    return (name, VERB_TOOLS[name]) if name in VERB_TOOLS else ()


def _fits(name: str, pattern: str) -> bool:
    return name.startswith(pattern[:-1]) if pattern.endswith("*") else name == pattern
