"""Reader of skill.tool.json, a file next to SKILL.md that offers the skill as a tool of the same name. The file is not
part of the skills standard; other programs ignore it.
"""

import json
from collections.abc import Collection, Mapping
from typing import Literal

from jsonschema.exceptions import SchemaError
from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from contract.calls import LONGEST_TIMEOUT_S, MAX_TIMEOUT_S
from contract.invalid_input import describe_invalid, find_invalid
from contract.schema import check_schema
from contract.specs import NO_NETWORK, SkillSummary, ToolSpec

SIDECAR_FILE = "skill.tool.json"
MAX_SIDECAR_BYTES = 65_536
_NAME_CHARS = 64
_MAX_DESCRIPTION = 8192


class SidecarBroken(ValueError):
    """Raised when the sidecar is invalid. The message says why. The skill itself stays usable."""


class Sidecar(BaseModel):
    """Content of the file.

    `entrypoint`: a file of the skill. `interpreter`: the program that runs the entrypoint; None: the first line or the
    suffix of the file decides. `args` json-stdin: arguments as one JSON object on standard input. `args` argv:
    arguments as `--name=value`; true values as `--name`; lists once for each value. `timeout`: seconds. `network`: the
    tool needs network access.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    entrypoint: str = Field(min_length=1, max_length=1024)
    parameters: dict[str, JsonValue] = {"type": "object", "properties": {}}
    interpreter: str | None = Field(default=None, pattern=r"^[A-Za-z0-9_./+-]{1,128}$")
    args: Literal["json-stdin", "argv"] = "json-stdin"
    timeout: float | None = Field(default=None, gt=0, le=LONGEST_TIMEOUT_S)
    network: bool = False
    requires_permission: bool = False
    dangerous: bool = False


def parse_sidecar(text: bytes, files: Collection[str]) -> Sidecar:
    """Parse a sidecar. `files`: the paths of the skill's files. Raises SidecarBroken for an invalid sidecar."""
    if len(text) > MAX_SIDECAR_BYTES:
        raise SidecarBroken(f"it is larger than {MAX_SIDECAR_BYTES} bytes")
    try:
        sidecar = Sidecar.model_validate_json(text)
    except ValidationError as error:
        raise SidecarBroken(describe_invalid(error, Sidecar)) from None
    if sidecar.entrypoint not in files:
        raise SidecarBroken(f"entrypoint: the skill has no file {sidecar.entrypoint[:200]!r}")
    try:
        check_schema(sidecar.parameters)
    except (SchemaError, RecursionError) as error:
        raise SidecarBroken(f"parameters: {getattr(error, 'message', 'it is nested too deeply')}") from None
    return sidecar


def describe_broken_sidecar(error: SidecarBroken) -> str:
    """Return the warning for a skill that has an invalid sidecar."""
    return f"its {SIDECAR_FILE} is not used, so that it is no tool of its own: {error}"[:400]


def build_skill_spec(skill: SkillSummary, sidecar: Sidecar) -> ToolSpec:
    """Return the spec of the skill as a tool. Raises SidecarBroken for a name that no tool can have."""
    if not skill.name.replace("-", "").replace("_", "").isalnum() or len(skill.name) > _NAME_CHARS:
        raise SidecarBroken(
            f"a tool's name has letters, digits, - and _, at most {_NAME_CHARS}: the skill's name cannot be one"
        )
    about = f"It runs in the session's sandbox, {NO_NETWORK}" + ("; it needs network." if sidecar.network else ".")
    try:
        return ToolSpec(
            name=skill.name,
            description=f"{skill.description[: _MAX_DESCRIPTION - len(about) - 1]} {about}",
            parameters=sidecar.parameters,
            timeout_s=sidecar.timeout,
            max_timeout_s=sidecar.timeout or MAX_TIMEOUT_S,
            requires_permission=sidecar.requires_permission,
            dangerous=sidecar.dangerous,
        )
    except ValidationError as error:
        # Numbers that JSON does not have, such as NaN.
        raise SidecarBroken(f"parameters: {find_invalid(error).reason}") from None


def build_argv(arguments: Mapping[str, JsonValue]) -> list[str]:
    """Return the arguments in the form of command-line arguments, in their order."""
    argv: list[str] = []
    for name, value in arguments.items():
        for one in value if isinstance(value, list) else [value]:
            if one is True:
                argv.append(f"--{name}")
            elif one is not False and one is not None:
                argv.append(f"--{name}={one if isinstance(one, str) else json.dumps(one, ensure_ascii=False)}")
    return argv
