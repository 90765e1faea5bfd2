"""Skills that are installed for one tenant, as Redis keeps them: a record each, and beside it the bundle."""

from pydantic import Field, ValidationError

from contract.calls import Record
from contract.errors import ConfigError
from contract.specs import SkillSummary, ToolSpec

MAX_INSTALLED = 200
"""Of one tenant."""
MAX_INSTALLED_BYTES = 64 * 1024 * 1024
"""Of the bundles of one tenant, compressed: they lie in Redis, which is everybody's."""


class InstalledSkill(Record):
    """`tool`: what its sidecar makes of it; `bundle_bytes`: of its bundle as it is kept; `installed_at`: Unix seconds."""

    skill: SkillSummary
    tool: ToolSpec | None = None
    bundle_bytes: int = Field(ge=1, le=MAX_INSTALLED_BYTES)
    installed_at: float = Field(ge=0)


def parse_installed(text: str | bytes) -> InstalledSkill:
    """Raises ConfigError for what is none."""
    try:
        return InstalledSkill.model_validate_json(text)
    except ValidationError as error:
        raise ConfigError("a skill that is installed was kept by another release: install it again") from error
