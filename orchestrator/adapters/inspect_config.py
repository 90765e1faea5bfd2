"""Configuration of an evaluation's sandboxes: a model, a mapping, or a file `toolcrew.yaml` next to the task."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, Field, ValidationError

from toolcrew.contract.errors import ConfigError
from toolcrew.contract.image_names import ImageText
from toolcrew.contract.invalid_input import describe_invalid
from toolcrew.contract.session_spec import NetworkPolicy, SandboxOptions, TtlS

CONFIG_FILES = ["toolcrew.yaml", "toolcrew.yml"]


class ToolcrewSandboxConfig(SandboxOptions):
    """Options of a sample's session. A missing option has the default of the tenant's class."""

    image: ImageText | None = None
    network: NetworkPolicy | None = None
    tenant: str | None = Field(default=None, min_length=1)
    """Tenant of the session; None: the tenant of TOOLCREW_API_KEY, or `default`."""
    ttl_s: TtlS = 7200.0
    """Seconds without a call after which the sandbox is removed. It must be longer than the longest reply of the model
    takes, and short enough that the sandboxes of a killed evaluation are removed soon.
    """
    default_user: str | None = Field(default=None, min_length=1)
    """User of programs and files for which the evaluation names no user, such as the USER of the image. This user owns
    /workspace. The option needs `user: root`. None: the user of the sandbox.
    """


def parse_config(fields: Mapping[str, Any], source: str = "the sandbox's configuration") -> ToolcrewSandboxConfig:
    """Parse a configuration. Raises ConfigError with the first invalid field and the names of all fields."""
    try:
        return ToolcrewSandboxConfig.model_validate(dict(fields))
    except ValidationError as error:
        problem, names = describe_invalid(error, ToolcrewSandboxConfig), ", ".join(ToolcrewSandboxConfig.model_fields)
        raise ConfigError(f"{source}: {problem} (the fields are {names})") from None


def load_config(config: BaseModel | str | None) -> ToolcrewSandboxConfig:
    """Return the configuration that Inspect passes: none, a model, the path of a YAML file, or the name of an image.
    Raises ConfigError.
    """
    if config is None:
        return ToolcrewSandboxConfig()
    if isinstance(config, ToolcrewSandboxConfig):
        return config
    if not isinstance(config, str):
        raise ConfigError(
            f"a {type(config).__name__} does not configure a toolcrew sandbox: give a ToolcrewSandboxConfig, a YAML "
            "file or an image"
        )
    if not config.endswith((".yaml", ".yml")):
        return parse_config({"image": config})
    try:
        fields = yaml.safe_load(Path(config).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(
            f"{config} cannot be read as YAML ({error}): give a file with "
            f"{', '.join(ToolcrewSandboxConfig.model_fields)}"
        ) from None
    if fields is None:
        return ToolcrewSandboxConfig()
    if not isinstance(fields, dict):
        raise ConfigError(f"{config} is not a mapping: write one with {', '.join(ToolcrewSandboxConfig.model_fields)}")
    return parse_config(fields, config)
