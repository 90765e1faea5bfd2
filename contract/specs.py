"""Specs of tools and skills, and the catalog that workers publish."""

from typing import Annotated, Literal

from pydantic import Field, JsonValue

from toolcrew.contract.calls import LONGEST_TIMEOUT_S, MAX_TIMEOUT_S, Record, ToolName
from toolcrew.contract.signing import SigningKeys

NO_NETWORK = "without network"
"""Default network access of a sandbox, in the words of tool descriptions."""
TIMEOUT_DESCRIPTION = "seconds, at most {:g}"
"""Description of the parameter `timeout` of a tool. It contains the limit of the tool."""
MAX_SKILLS = 1000
MAX_SKILL_DESCRIPTION = 4096
MAX_TOOL_TENANTS = 1000
TenantName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
MAX_ALLOWED_TOOLS = 50
"""Limit of the calls that one skill can request to make without approval."""


class ToolSpec(Record):
    """Spec of a tool: name, description, JSON Schema of the parameters, limits and flags. `audience`: "model" for a
    tool that models may call; "session" for a call that only the SDK makes, such as `session.open`.
    """

    name: ToolName
    description: str = Field(min_length=1, max_length=8192)
    parameters: dict[str, JsonValue]
    timeout_s: float | None = Field(default=None, gt=0, le=LONGEST_TIMEOUT_S)
    """Default timeout of the tool; None: the default of the dispatcher."""
    max_timeout_s: float = Field(default=MAX_TIMEOUT_S, gt=0, le=LONGEST_TIMEOUT_S)
    requires_permission: bool = False
    dangerous: bool = False
    read_only: bool = False
    idempotent: bool = False
    pool: Literal["sandbox", "web", "tools", "local"] = "sandbox"
    """Where the tool runs: on the host of the session's sandbox (`sandbox`), in the workers with network access
    (`web`), in the workers with the operators' tools (`tools`), or in the program itself (`local`).
    """
    audience: Literal["model", "session"] = "model"
    aliases: dict[str, str] = Field(default_factory=dict)
    """Aliases that a model may use for a parameter -> canonical name of the parameter."""
    command_parameter: str | None = None
    """Canonical name of the parameter with a shell command. Danger and command rules are then checked per command."""
    input_parameter: str | None = None
    """Name of the parameter with text for the standard input of that command, or of a program that already runs. The
    text is checked too if a shell may read it.
    """
    network: str = NO_NETWORK
    """Network access of the sandbox, as the description of the tool states it."""
    tells_network: bool = Field(default=True, exclude_if=lambda tells: tells)
    """True if toolcrew has added the text of `network` to the description."""
    is_installed_skill: bool = Field(default=False, exclude_if=lambda is_skill: not is_skill)
    """True for a skill that was installed for a tenant. Its calls are sent as runs of skill_tool and checked as such.
    No worker publishes the skill.
    """
    tenants: tuple[TenantName, ...] | None = Field(
        default=None, max_length=MAX_TOOL_TENANTS, exclude_if=lambda tenants: tenants is None
    )
    """Tenants that the tool exists for; None: all tenants. JSON omits the field if it is None, so that earlier releases
    can read the spec.
    """

    def is_for(self, tenant: str) -> bool:
        """Return whether the tool exists for that tenant."""
        return self.tenants is None or tenant in self.tenants

    def with_network(self, network_text: str) -> "ToolSpec":
        """Return the tool for a sandbox with other network access. Tools of other pools do not change."""
        if self.pool != "sandbox":
            return self
        if not self.tells_network:
            return self.model_copy(update={"network": network_text})
        # toolcrew adds its text at the end. Earlier occurrences of the same text are from the author of the tool and
        # stay.
        before, separator, after = self.description.rpartition(self.network)
        return self.model_copy(
            update={
                "network": network_text,
                "description": f"{before}{network_text}{after}" if separator else self.description,
            }
        )

    def with_limit(self, limit_s: float) -> "ToolSpec":
        """Return the tool with another `max_timeout_s`, also in the text of its parameter `timeout`."""
        if limit_s == self.max_timeout_s:
            return self
        parameters, properties = self.parameters, self.parameters.get("properties")
        if isinstance(properties, dict) and isinstance(timeout := properties.get("timeout"), dict):
            before, after = TIMEOUT_DESCRIPTION.format(self.max_timeout_s), TIMEOUT_DESCRIPTION.format(limit_s)
            timeout = {**timeout, "description": str(timeout.get("description", "")).replace(before, after)}
            parameters = {**parameters, "properties": {**properties, "timeout": timeout}}
        return self.model_copy(update={"max_timeout_s": limit_s, "parameters": parameters})


class AllowedTool(Record):
    """Calls of a tool that a skill requests to make without approval. For a tool that runs commands: only commands that
    begin with `argv_prefix`.
    """

    tool: ToolName
    argv_prefix: Annotated[tuple[Annotated[str, Field(min_length=1, max_length=200)], ...], Field(max_length=20)] = ()


class SkillSummary(Record):
    """Description and content of a skill. `digest`: SHA-256 of its files. `warnings`: problems that the author of the
    skill should fix.
    """

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")
    description: str = Field(min_length=1, max_length=MAX_SKILL_DESCRIPTION)
    license: str | None = Field(default=None, max_length=500)
    compatibility: str | None = Field(default=None, max_length=1000)
    digest: str = Field(pattern=r"^[0-9a-f]{64}$")
    files: int = Field(ge=1)
    bytes: int = Field(ge=0)
    has_scripts: bool = False
    warnings: tuple[Annotated[str, Field(max_length=400)], ...] = Field(default=(), max_length=20)
    allowed_tools: tuple[AllowedTool, ...] = Field(
        default=(), max_length=MAX_ALLOWED_TOOLS, exclude_if=lambda tools: not tools
    )


class Catalog(Record):
    """Tools and skills that the workers of a pool publish."""

    tools: tuple[ToolSpec, ...] = ()
    skills: tuple[SkillSummary, ...] = Field(default=(), max_length=MAX_SKILLS, exclude_if=lambda skills: not skills)


def seal_catalog(keys: SigningKeys, pool: str, catalog: Catalog) -> str:
    """Return the signed catalog of that pool. The signature protects the catalog, because the catalog decides which
    calls need approval and which calls can be repeated.
    """
    return keys.seal(f"catalog {pool}", catalog.model_dump_json())


def open_catalog(keys: SigningKeys, pool: str, sealed: str | bytes) -> Catalog:
    """Return the catalog. Raises EnvelopeRefused if it is not signed for that pool, and ValidationError for a catalog
    of another release.
    """
    return Catalog.model_validate_json(keys.unseal(f"catalog {pool}", sealed))
