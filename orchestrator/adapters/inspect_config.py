"""What an evaluation may say of its sandboxes: a model, a mapping, or a file `toolcrew.yaml` beside the task."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from contract.errors import ConfigError
from contract.session_locations import MAX_TTL_S

CONFIG_FILES = ["toolcrew.yaml", "toolcrew.yml"]


class ToolcrewSandboxConfig(BaseModel):
    """What a sample's session is opened with; what is left out is as the tenant's class says. The size of a workspace
    is the class's alone.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    image: str | None = Field(default=None, min_length=1)
    network: Literal["none", "egress"] | None = None
    tenant: str | None = Field(default=None, min_length=1)
    """None: the tenant of TOOLCREW_API_KEY, or default."""
    ttl_s: float = Field(default=7200.0, gt=0, le=MAX_TTL_S)
    """Seconds without a call after which the sandbox goes by itself: longer than a model thinks, short enough for what
    a killed evaluation leaves.
    """


def parse_config(told: Mapping[str, Any], source: str = "the sandbox's configuration") -> ToolcrewSandboxConfig:
    """Raises ConfigError with the first field that is wrong and the fields there are."""
    try:
        return ToolcrewSandboxConfig.model_validate(dict(told))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        field = ".".join(str(part) for part in first["loc"])
        raise ConfigError(
            f"{source}: {field}: {first['msg']}; there are {', '.join(ToolcrewSandboxConfig.model_fields)}"
        ) from None


def load_config(config: BaseModel | str | None) -> ToolcrewSandboxConfig:
    """Of what Inspect hands over: nothing, a model, or the path of a YAML file. Raises ConfigError."""
    if config is None:
        return ToolcrewSandboxConfig()
    if isinstance(config, ToolcrewSandboxConfig):
        return config
    if not isinstance(config, str):
        raise ConfigError(
            f"a {type(config).__name__} configures no toolcrew sandbox: give a ToolcrewSandboxConfig or a YAML file"
        )
    try:
        told = yaml.safe_load(Path(config).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(
            f"{config} cannot be read as YAML ({error}): give a file with "
            f"{', '.join(ToolcrewSandboxConfig.model_fields)}"
        ) from None
    if told is None:
        return ToolcrewSandboxConfig()
    if not isinstance(told, dict):
        raise ConfigError(f"{config} must hold a mapping with {', '.join(ToolcrewSandboxConfig.model_fields)}")
    return parse_config(told, config)
