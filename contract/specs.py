"""What a tool says of itself: the spec a model, an operator and a validator read."""

from typing import Annotated, Literal

from pydantic import Field, JsonValue

from contract.calls import MAX_TIMEOUT_S, Record, ToolName
from contract.signing import SigningKeys

NO_NETWORK = "without network"
"""What a sandbox has of the network unless its session is told otherwise, as descriptions say it."""
MAX_SKILLS = 1000
MAX_SKILL_DESCRIPTION = 4096
MAX_TOOL_TENANTS = 1000
TenantName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
MAX_ALLOWED_TOOLS = 50
"""That one skill may ask for."""


class ToolSpec(Record):
    """Name, description, JSON Schema of the parameters, limits and flags. `audience` session: a verb of the SDK, never
    shown to a model.
    """

    name: ToolName
    description: str = Field(min_length=1, max_length=8192)
    parameters: dict[str, JsonValue]
    timeout_s: float | None = Field(default=None, gt=0, le=MAX_TIMEOUT_S)
    """The tool's own limit, shorter or longer; None: the dispatcher's default."""
    max_timeout_s: float = Field(default=MAX_TIMEOUT_S, gt=0, le=MAX_TIMEOUT_S)
    requires_permission: bool = False
    dangerous: bool = False
    read_only: bool = False
    idempotent: bool = False
    pool: Literal["sandbox", "web", "tools", "local"] = "sandbox"
    """Where it runs: beside the session's sandbox; in the pool with network; in the pool of operators' tools; in the
    program itself.
    """
    audience: Literal["model", "session"] = "model"
    aliases: dict[str, str] = Field(default_factory=dict)
    """Other names a model may use for a parameter -> its canonical name."""
    command_parameter: str | None = None
    """The parameter that holds a shell command, by its canonical name: then danger and command rules are decided per
    command.
    """
    input_parameter: str | None = None
    """The parameter with text for the standard input of that command or, without one, of a program that runs already:
    judged as well where a shell may read it."""
    network: str = NO_NETWORK
    """What its sandbox has of the network, in the words that its description has."""
    tells_network: bool = Field(default=True, exclude_if=lambda tells: tells)
    """Whether its description has these words from us."""
    is_installed_skill: bool = Field(default=False, exclude_if=lambda is_one: not is_one)
    """A skill that was installed for a tenant: its calls are sent as runs by skill_tool, and judged as these, too. No
    worker publishes it.
    """
    tenants: tuple[TenantName, ...] | None = Field(
        default=None, max_length=MAX_TOOL_TENANTS, exclude_if=lambda tenants: tenants is None
    )
    """Whose tool it is; None: everybody's. To all others it is not there at all. Left out where None, for workers and
    programs that do not know it yet.
    """

    def is_for(self, tenant: str) -> bool:
        """Whether the tool is there for that tenant."""
        return self.tenants is None or tenant in self.tenants

    def with_network(self, words: str) -> "ToolSpec":
        """The same tool in a sandbox that has more of the network. Of other pools' tools nothing changes."""
        if self.pool != "sandbox":
            return self
        if not self.tells_network:
            return self.model_copy(update={"network": words})
        # The last place is ours: what an author writes of the network stands before it.
        before, found, after = self.description.rpartition(self.network)
        return self.model_copy(
            update={"network": words, "description": f"{before}{words}{after}" if found else self.description}
        )


class AllowedTool(Record):
    """Calls that a skill asks to make unasked: of a tool; of one that runs commands, those that begin with
    `argv_prefix`.
    """

    tool: ToolName
    argv_prefix: Annotated[tuple[Annotated[str, Field(min_length=1, max_length=200)], ...], Field(max_length=20)] = ()


class SkillSummary(Record):
    """What a skill says of itself, and what its folder holds. `digest`: sha256 over its files; `warnings`: for whoever
    wrote it.
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
    """What the workers publish: the specs they can run, and the skills they have."""

    tools: tuple[ToolSpec, ...] = ()
    skills: tuple[SkillSummary, ...] = Field(default=(), max_length=MAX_SKILLS, exclude_if=lambda skills: not skills)


def seal_catalog(keys: SigningKeys, pool: str, catalog: Catalog) -> str:
    """Return the signed catalog of that pool. It decides what is asked about before a call, and what is called
    again.
    """
    return keys.seal(f"catalog {pool}", catalog.model_dump_json())


def open_catalog(keys: SigningKeys, pool: str, sealed: str | bytes) -> Catalog:
    """Return the catalog. Raises EnvelopeRefused when it is not signed for that pool, ValidationError for one of
    another release.
    """
    return Catalog.model_validate_json(keys.unseal(f"catalog {pool}", sealed))
