"""Options of the commands that open a session: `run`, `call` and `sessions open`."""

import json
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from pydantic import ByteSize, TypeAdapter, ValidationError

from toolcrew.contract.errors import ConfigError
from toolcrew.contract.invalid_input import find_invalid
from toolcrew.contract.session_spec import SandboxOptions
from toolcrew.contract.tool_configs import parse_tool_config


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
                _OPTION_FIELDS[name]: _SIZE.validate_python(value) if name in ("memory", "workspace") else value
                for name, _, value in pairs
            }
            | {"secrets": secrets}
        )
    except ValidationError as error:
        part = find_invalid(error)
        names = {field: name for name, field in _OPTION_FIELDS.items()}
        option = names.get(str(part.path[0]), "the option") if part.path else "memory or workspace"
        raise typer.BadParameter(f"'{text[:100]}': {option} {part.reason}; {_OPTIONS_HELP}") from None


_OPTION_FIELDS = {
    "cpus": "cpus",
    "memory": "memory_bytes",
    "workspace": "workspace_bytes",
    "pids": "pids",
    "user": "user",
    "secret": "secrets",
}
_SIZE: TypeAdapter[int] = TypeAdapter(ByteSize)
_OPTIONS_HELP = "write some of cpus=2,memory=4GiB and workspace=20GiB, pids=1000, user=root, secret=NAME"
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


@dataclass(frozen=True)
class NewSession:
    """The options of a session that the command opens, with the names of the parameters of ToolClient.open_session."""

    workspace: Annotated[
        Path | None,
        typer.Option(
            "--workspace", help="Start with these files: a folder, an archive (tar, tar.gz, ..., zip) or a git bundle."
        ),
    ] = None
    restore: Annotated[str | None, typer.Option("--restore", help="Start with the files of this checkpoint id.")] = None
    image: Annotated[
        str | None, typer.Option("--image", help="An image that the tenant may use. Default: the image of its class.")
    ] = None
    network: Annotated[
        Literal["none", "egress"] | None,
        typer.Option(
            "--network",
            help="egress: reach the hosts that the operator allows. Default: the network of the tenant's class.",
        ),
    ] = None
    options: Options = None
    tool_config: Annotated[
        dict[str, Any] | None,
        typer.Option(
            "--tool-config",
            parser=read_config,
            metavar="JSON|@FILE",
            help=f"What tools read as their configuration: {_CONFIG_HELP}.",
        ),
    ] = None

    def to_arguments(self) -> dict[str, Any]:
        """Return the arguments of ToolClient.open_session."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


OPTION_NAMES = "--workspace, --restore, --image, --network, --sandbox and --tool-config"


def with_session_options(command: Callable[..., None]) -> Callable[..., None]:
    """Replace the parameter `new_session` of a command by one option for each field of NewSession."""

    @wraps(command)
    def run(**values: Any) -> None:
        chosen = {field.name: values.pop(field.name) for field in fields(NewSession)}
        command(**values, new_session=NewSession(**chosen))

    options = [
        parameter.replace(kind=Parameter.KEYWORD_ONLY)
        for parameter in signature(NewSession, eval_str=True).parameters.values()
    ]
    own = [
        parameter.replace(kind=Parameter.KEYWORD_ONLY)
        for parameter in signature(command, eval_str=True).parameters.values()
    ]
    at = next(index for index, parameter in enumerate(own) if parameter.name == "new_session")
    run.__signature__ = Signature([*own[:at], *options, *own[at + 1 :]])  # type: ignore[attr-defined]
    return run
