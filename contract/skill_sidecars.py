"""Reader of skill.tool.json, a file next to SKILL.md that offers the skill as a tool of the same name. The file is not
part of the skills standard; other programs ignore it.
"""

import json
from collections.abc import Collection, Mapping
from typing import Literal

from jsonschema.exceptions import SchemaError
from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from toolcrew.contract.calls import LONGEST_TIMEOUT_S, MAX_TIMEOUT_S
from toolcrew.contract.invalid_input import explain_errors, find_invalid
from toolcrew.contract.schema import check_schema
from toolcrew.contract.specs import NO_NETWORK, SkillSummary, ToolSpec

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
    """Parse a sidecar. `files`: the paths of the skill's files. Raises SidecarBroken with all problems of the file."""
    if len(text) > MAX_SIDECAR_BYTES:
        raise SidecarBroken(f"it is larger than {MAX_SIDECAR_BYTES} bytes")
    try:
        sidecar = Sidecar.model_validate_json(text)
    except ValidationError as error:
        parts = explain_errors(error.errors(include_url=False), Sidecar)
        reported = {part.path[0] for part in parts if part.path}
        problems = [*map(str, parts), *_check_values(_read_values(text, reported), files)]
        raise SidecarBroken("; ".join(problems)) from None
    values: dict[str, JsonValue] = {"entrypoint": sidecar.entrypoint, "parameters": sidecar.parameters}
    if problems := _check_values(values, files):
        raise SidecarBroken("; ".join(problems))
    return sidecar


def _read_values(text: bytes, reported: Collection[str | int]) -> dict[str, JsonValue]:
    """Return the values of a broken file that have no problem so far; none if it is no JSON object."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return {name: value for name, value in values.items() if name not in reported} if isinstance(values, dict) else {}


def _check_values(values: Mapping[str, JsonValue], files: Collection[str]) -> list[str]:
    """Return what is wrong with the entrypoint and the parameters, beyond their types."""
    problems = []
    entrypoint, parameters = values.get("entrypoint"), values.get("parameters")
    if isinstance(entrypoint, str) and entrypoint not in files:
        problems.append(f"entrypoint: the skill has no file {entrypoint[:200]!r}")
    if isinstance(parameters, dict):
        try:
            check_schema(parameters)
        except (SchemaError, RecursionError) as error:
            problems.append(f"parameters: {getattr(error, 'message', 'it is nested too deeply')}")
    return problems


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
