"""Options of the commands that open a session: `run`, `call` and `sessions open`. They are made from the fields of
SessionSpec.
"""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ByteSize, TypeAdapter, ValidationError

from toolcrew.contract.errors import ConfigError
from toolcrew.contract.invalid_input import find_invalid
from toolcrew.contract.session_spec import DEFAULT_OPTIONS, SandboxOptions, SessionOptions, SessionSpec
from toolcrew.contract.tool_configs import parse_tool_config
from toolcrew.orchestrator.cli.field_options import build_option, build_parameter, flag_of, refuse, replace_parameter
from toolcrew.orchestrator.sessions.workspace_files import name_path


def parse_options(text: str) -> SandboxOptions:
    """Return the options in `name=value,...`. Raises BadParameter."""
    pairs = [part.partition("=") for part in text.split(",")]
    if unknown := [name for name, _, _ in pairs if name not in _OPTION_FIELDS]:
        own = f"; the option --{unknown[0]} sets it" if unknown[0] in ("image", "network", "restore") else ""
        raise typer.BadParameter(f"'{unknown[0][:40]}' is unknown: use {', '.join(_OPTION_FIELDS)}{own}")
    secrets = [value for name, _, value in pairs if name == "secret"]
    try:
        return SandboxOptions.model_validate(
            {
                _OPTION_FIELDS[name]: _SIZE.validate_python(value) if _OPTION_FIELDS[name].endswith("_bytes") else value
                for name, _, value in pairs
            }
            | {"secrets": secrets}
        )
    except ValidationError as error:
        part = find_invalid(error)
        names = {field: name for name, field in _OPTION_FIELDS.items()}
        option = names.get(str(part.path[0]), "the option") if part.path else "memory or workspace"
        raise typer.BadParameter(f"'{text[:100]}': {option} {part.reason}; {_OPTIONS_HELP}") from None


def _name_option(field: str) -> str:
    return "secret" if field == "secrets" else field.removesuffix("_bytes")


_OPTION_FIELDS = {_name_option(field): field for field in SandboxOptions.model_fields}
_SIZE: TypeAdapter[int] = TypeAdapter(ByteSize)
_OPTIONS_HELP = f"write some of {', '.join(_OPTION_FIELDS)}, such as cpus=2,memory=4GiB,user=root,secret=NAME"
Options = Annotated[
    SandboxOptions | None,
    typer.Option(
        "--sandbox",
        parser=parse_options,
        metavar="NAME=VALUE,...",
        help=f"Sizes, user and secrets of the sandbox: {_OPTIONS_HELP}. Default: those of the tenant's class.",
    ),
]


def read_config(text: str) -> dict[str, dict[str, Any]]:
    """Return the configuration of tools in JSON, or in the file `@PATH`. Raises BadParameter."""
    try:
        return parse_tool_config(json.loads(Path(text[1:]).read_bytes() if text.startswith("@") else text))
    except (ConfigError, OSError, RecursionError, ValueError) as error:
        raise typer.BadParameter(f"{error}; {_CONFIG_HELP}") from None


_CONFIG_HELP = 'write {"TOOL": {...}} as JSON, or @FILE'


_FIELDS = ("workspace", *(name for name in SessionOptions.model_fields if name not in SandboxOptions.model_fields))


def _list_flags() -> str:
    *flags, last = map(flag_of, (*_FIELDS[:-1], "sandbox", _FIELDS[-1]))
    return f"{', '.join(flags)} and {last}"


OPTION_NAMES = _list_flags()


def _build_spec(fields: dict[str, Any]) -> SessionSpec:
    """Return the session that the options describe. Raises BadParameter."""
    options = fields.pop("options", DEFAULT_OPTIONS)
    if "workspace" in fields:
        fields["workspace"] = name_path(fields["workspace"])
    try:
        return SessionSpec(**fields).with_defaults(options)
    except ValidationError as error:
        raise refuse(error) from None


_SETTINGS: dict[str, dict[str, Any]] = {
    "workspace": {"kind": Path},
    "tool_config": {
        "kind": dict,
        "parser": read_config,
        "metavar": "JSON|@FILE",
        "help": f"What tools read as their configuration: {_CONFIG_HELP}.",
    },
}
"""Settings of an option that differ from those of its field."""
with_session_options = replace_parameter(
    "spec",
    [
        *(build_option(SessionSpec, name, **_SETTINGS.get(name, {})) for name in _FIELDS),
        build_parameter("options", Options),
    ],
    _build_spec,
)
"""Replace the parameter `spec` of a command, a SessionSpec, by one option for each field that a user may set."""
