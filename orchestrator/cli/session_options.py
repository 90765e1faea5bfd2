"""Options of the commands that open a session: `run`, `call` and `sessions open`. They are made from the fields of
SessionSpec.
"""

import json
from collections.abc import Callable, Mapping
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import typer
from pydantic import ByteSize, TypeAdapter, ValidationError

from toolcrew.contract.errors import ConfigError
from toolcrew.contract.invalid_input import find_invalid
from toolcrew.contract.session_spec import DEFAULT_OPTIONS, SandboxOptions, SessionOptions, SessionSpec
from toolcrew.contract.tool_configs import parse_tool_config
from toolcrew.orchestrator.dispatch.workspace_sources import name_path


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
_KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "workspace": (Path, {}),
    "tool_config": (dict, {"parser": read_config, "metavar": "JSON|@FILE"}),
}
"""Type and settings of an option that differ from those of its field."""


def _list_flags() -> str:
    *flags, last = (f"--{name.replace('_', '-')}" for name in (*_FIELDS[:-1], "sandbox", _FIELDS[-1]))
    return f"{', '.join(flags)} and {last}"


OPTION_NAMES = _list_flags()


def with_session_options(command: Callable[..., None]) -> Callable[..., None]:
    """Replace the parameter `spec` of a command, a SessionSpec, by one option for each field that a user may set."""

    @wraps(command)
    def run(**values: Any) -> None:
        spec = _build_spec({name: values.pop(name) for name in _FIELDS}, values.pop("options"))
        command(**values, spec=spec)

    own = [
        parameter.replace(kind=Parameter.KEYWORD_ONLY)
        for parameter in signature(command, eval_str=True).parameters.values()
    ]
    at = next(index for index, parameter in enumerate(own) if parameter.name == "spec")
    options = [*map(_build_parameter, _FIELDS), _keyword("options", Options)]
    run.__signature__ = Signature([*own[:at], *options, *own[at + 1 :]])  # type: ignore[attr-defined]
    return run


def _build_parameter(name: str) -> Parameter:
    """Return the parameter of a command for a field of SessionSpec."""
    field = SessionSpec.model_fields[name]
    kind, settings = _KINDS.get(name, (_plain_type(field.annotation), {}))
    text = f"{field.description}"
    if name == "tool_config":
        text = f"{text.rstrip('.')}: {_CONFIG_HELP}."
    return _keyword(name, Annotated[kind | None, typer.Option(f"--{name.replace('_', '-')}", help=text, **settings)])


def _keyword(name: str, annotation: Any) -> Parameter:
    return Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _plain_type(annotation: Any) -> Any:
    """Return the type of an optional field without its rules, which `_build_spec` checks."""
    kind = next(part for part in get_args(annotation) if part is not type(None))
    return kind.__origin__ if get_origin(kind) is Annotated else kind


def _build_spec(fields: Mapping[str, Any], options: SandboxOptions | None) -> SessionSpec:
    """Return the session that the options describe. Raises BadParameter."""
    given = {name: value for name, value in fields.items() if value is not None}
    if "workspace" in given:
        given["workspace"] = name_path(given["workspace"])
    try:
        spec = SessionSpec(**given)
    except ValidationError as error:
        part = find_invalid(error)
        raise typer.BadParameter(f"--{str(part.path[0]).replace('_', '-')} {part.reason}") from None
    return spec.with_defaults(options or DEFAULT_OPTIONS)
