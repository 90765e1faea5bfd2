"""Skills that are installed for one tenant, as Redis keeps them: a signed record each, and the bundle, whose digest the record has."""

from pydantic import Field, ValidationError

from contract.calls import Record
from contract.errors import ConfigError, EnvelopeRefused, RecordRefused
from contract.signing import SigningKeys
from contract.specs import SkillSummary, ToolSpec

MAX_INSTALLED = 200
"""Of one tenant."""
MAX_INSTALLED_BYTES = 64 * 1024 * 1024
"""Of the bundles of one tenant, compressed: they lie in Redis, which is everybody's."""


class InstalledSkill(Record):
    """`tool`: the tool that its sidecar describes; `bundle_bytes`, `bundle_sha256`: of its compressed files in Redis; `installed_at`: Unix seconds."""

    skill: SkillSummary
    tool: ToolSpec | None = None
    bundle_bytes: int = Field(ge=1, le=MAX_INSTALLED_BYTES)
    bundle_sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    installed_at: float = Field(ge=0)


def seal_installed(keys: SigningKeys, tenant: str, record: InstalledSkill) -> str:
    """Return the signed record. It is valid for this tenant and this name only."""
    return keys.seal(skill_purpose(tenant, record.skill.name), record.model_dump_json())


def parse_installed(keys: SigningKeys, tenant: str, name: str, sealed: bytes) -> InstalledSkill:
    """Return the record of a tenant's skill. Raises ConfigError with what is wrong and what to do."""
    advice = f"install it again (toolcrew skills install SOURCE --replace --tenant {tenant})"
    try:
        record = InstalledSkill.model_validate_json(keys.unseal(skill_purpose(tenant, name), sealed))
    except EnvelopeRefused as error:
        raise RecordRefused(f"the skill {name} of tenant {tenant} cannot be verified, so it is not used: {advice}. {error}") from error
    except ValidationError as error:
        raise ConfigError(f"the skill {name} of tenant {tenant} was installed by another release: {advice}") from error
    if record.skill.name != name:
        raise ConfigError(f"the skill {name} of tenant {tenant} has the record of {record.skill.name}, so it is not used: {advice}")
    return record


def skill_purpose(tenant: str, name: str) -> str:
    """Return what the signature of a tenant's skill is for."""
    return f"skill {tenant} {name}"
