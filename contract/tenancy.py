"""Tenants: what each may have, as data in Redis that both sides read. Adding one is no restart."""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from contract.calls import Record
from contract.errors import ConfigError, EnvelopeRefused, RecordRefused
from contract.signing import UNSEAL_LUA, SigningKeys
from contract.specs import ToolSpec

DEFAULT_TENANT = "default"
"""Always known. Until the first tenant is registered, every name is served with this one's policy. From then on only
registered names are served, even after all tenants were removed."""
POLICY_FRESH_S = 1.0
"""How old what a process knows of the tenants may be."""
MAX_PAUSE_REASON_CHARS = 500
MAX_POLICY_BYTES = 256 * 1024
"""Of a signed policy. A longer one is neither written nor read."""
VERSION_FIELD = "#version"
"""Of the hash of tenants, no tenant's name: a new word with every change, so that one small read tells whether anything
has changed.
"""
VERB_TOOLS = {"session.exec": "bash_tool", "session.write_file": "write_tool", "session.read_file": "read_tool"}
"""Verbs of sessions that do what a tool does: what forbids the tool forbids them. All other verbs are every
tenant's.
"""
SKILL_TOOL, BASH_TOOL = "skill_tool", "bash_tool"
NetworkPolicy = Literal["none", "egress"]
SkillDigest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
ToolPattern = Annotated[str, Field(pattern=r"^[^*]{0,127}\*?$", min_length=1)]


class CommandRule(Record):
    """As a rule of an approval policy (docs/approvals.md), for one tenant. `deny` holds whoever asks."""

    action: Literal["deny", "ask", "allow"]
    tool: str = Field(default="*", min_length=1, max_length=128)
    argv_prefix: Annotated[tuple[Annotated[str, Field(min_length=1, max_length=256)], ...], Field(max_length=32)] = ()

    def is_about(self, name: str) -> bool:
        """Whether the tool, or the verb of sessions that does the same, is meant. Case counts."""
        return any(fnmatchcase(known, self.tool) for known in _names(name))


class SandboxTerms(Record):
    """The part of a tenant's policy that concerns its sandboxes. A session carries it to sandboxd, which never gives
    more than its class has.

    `tenant_class`: of the host (TOOLCREW_TENANT_CLASSES), which decides runtime and sizes. None: what the class says.
    """

    tenant_class: str = Field(
        default="default", min_length=1, max_length=64, description="The class of the hosts that its sandboxes have."
    )
    images: Annotated[tuple[Annotated[str, Field(min_length=1, max_length=256)], ...], Field(max_length=100)] | None = (
        Field(default=None, description="Images that its sandboxes may have.")
    )
    network: NetworkPolicy | None = Field(default=None, description="The most that its sandboxes have of the network.")
    workspace_bytes: int | None = Field(
        default=None, ge=1024 * 1024, le=2**50, description="The most that a workspace has."
    )


class TenantPolicy(Record):
    """What a tenant may have. None: no limit of the tenant's own."""

    # A field with a description is an option of `toolcrew tenants set`, too.
    tools: Annotated[tuple[ToolPattern, ...], Field(max_length=1000)] | None = Field(
        default=None, description="Tools it may call, a * at the end for any rest."
    )
    weight: float = Field(default=1.0, ge=0.001, le=1000, description="Its share while others want slots, too.")
    in_flight: int = Field(default=1000, ge=1, le=1_000_000, description="Calls at a time.")
    queued: int = Field(default=10_000, ge=1, le=1_000_000, description="Calls that may wait.")
    rate_per_s: float | None = Field(default=None, ge=0.001, le=1_000_000, description="Calls begun a second.")
    burst: int = Field(default=100, ge=1, le=1_000_000, description="Calls begun at once, beyond the rate.")
    sandboxes: int = Field(
        default=1000, ge=0, le=1_000_000, strict=True, description="Sessions open at a time, on all hosts together."
    )
    commands: Annotated[tuple[CommandRule, ...], Field(max_length=1000)] = Field(
        default=(), description="deny, ask or allow, as deny:bash_tool:git push; all of its rules."
    )
    sandbox: SandboxTerms = SandboxTerms()
    is_paused: bool = False
    """None of its calls and runs starts; `pause_reason` says why."""
    pause_reason: str = Field(default="", max_length=MAX_PAUSE_REASON_CHARS)
    is_removed: bool = False
    """The tenant was removed. Its name stays reserved, because its runs, files and checkpoints may still be stored
    under it.
    """
    trusted_skills: Annotated[tuple[SkillDigest, ...], Field(max_length=1000)] = Field(
        default=(), description="Digests of skills whose allowed-tools need no approval once a run has loaded them."
    )

    def allows_tool(self, name: str) -> bool:
        """Whether calls of that tool, or verb of sessions, are served at all."""
        if self.tools is None:
            return True
        names = _names(name)
        return not names or any(_fits(known, pattern) for known in names for pattern in self.tools)


def tools_of(spec: ToolSpec, arguments: Mapping[str, Any]) -> tuple[str, ...]:
    """The tools by which a call is judged, its own first: each must be allowed and on. By prepared arguments, those
    that the tool will get: there are no aliases in them, and defaults stand where nothing was given.

    A skill that runs does what bash does: what forbids that one, turns it off or asks about it does so with the
    call."""
    if spec.is_installed_skill:
        return (spec.name, SKILL_TOOL, BASH_TOOL)
    if spec.name != SKILL_TOOL or arguments.get("action") != "run":
        return (spec.name,)
    name = arguments.get("name")
    # Without a script it is the tool that the skill is.
    return (
        (SKILL_TOOL, BASH_TOOL) if "script" in arguments or not isinstance(name, str) else (SKILL_TOOL, BASH_TOOL, name)
    )


REGISTERED_LUA = (
    UNSEAL_LUA
    + """
-- Whether a tenant is registered, and was not removed (TenantPolicy.is_removed). `key`: of the hash of tenants.
local function is_registered(key, name)
  local policy = unsealed(redis.call('HGET', key, name) or nil)
  return policy ~= '' and policy ~= '{"is_removed":true}'
end
"""
)


def say_subject(name: str, used: str) -> str:
    """What a refusal of the call for the sake of `used`, one of its tools, is about: the words before "is
    forbidden".
    """
    return "it" if used == name else f"it would run a program as {used} does, which"


def seal_policy(keys: SigningKeys, tenant: str, policy: TenantPolicy) -> str:
    """Return the signed policy. It is valid for this tenant only."""
    # Only fields that differ from the default: a release with one more field can still be read by its neighbour until
    # the field is used.
    return keys.seal(f"policy {tenant}", policy.model_dump_json(exclude_defaults=True))


def parse_policy(keys: SigningKeys, tenant: str, sealed: bytes) -> TenantPolicy:
    """Return the tenant's policy. Raises ConfigError with what is wrong and what to do."""
    advice = f"run the same release everywhere, or set it again (toolcrew tenants set {tenant} --from FILE)"
    if len(sealed) > MAX_POLICY_BYTES:
        raise ConfigError(
            f"the policy of tenant {tenant} is larger than {MAX_POLICY_BYTES} bytes, so nothing is served for it: "
            f"{advice}"
        )
    try:
        return TenantPolicy.model_validate_json(keys.unseal(f"policy {tenant}", sealed), strict=True)
    except EnvelopeRefused as error:
        raise RecordRefused(
            f"the policy of tenant {tenant} cannot be verified, so nothing is served for it: {advice}. {error}"
        ) from error
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        told = f"{where}: {first['msg']}" if where else first["msg"]
        raise ConfigError(
            f"the policy of tenant {tenant} cannot be read ({told}), so nothing is served for it: {advice}"
        ) from error


def parse_tenants(keys: SigningKeys, told: Mapping[bytes, bytes]) -> dict[str, TenantPolicy | ConfigError]:
    """All registered tenants of the hash, by name; in place of a policy that cannot be read: why."""
    found: dict[str, TenantPolicy | ConfigError] = {}
    for field in sorted(told):
        name = field.decode(errors="replace")
        if name == VERSION_FIELD:
            continue
        try:
            policy = parse_policy(keys, name, told[field])
        except ConfigError as error:
            found[name] = error
        else:
            if not policy.is_removed:
                found[name] = policy
    return found


def _names(name: str) -> tuple[str, ...]:
    """By what a policy may mean a tool or verb; nothing for a verb that is every tenant's."""
    if not name.startswith("session."):
        return (name,)
    return (name, VERB_TOOLS[name]) if name in VERB_TOOLS else ()


def _fits(name: str, pattern: str) -> bool:
    return name.startswith(pattern[:-1]) if pattern.endswith("*") else name == pattern
