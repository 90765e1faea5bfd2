"""Makes options of commands from the fields of a record."""

from collections.abc import Callable, Sequence
from functools import wraps
from inspect import Parameter, Signature, signature
from typing import Annotated, Any, get_args, get_origin

import typer
from pydantic import BaseModel, ValidationError

from toolcrew.contract.invalid_input import find_invalid


def replace_parameter(
    name: str, options: Sequence[Parameter], build: Callable[[dict[str, Any]], object]
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that replaces the parameter `name` of a command by options. `build` makes its value from the
    values of the options that were given.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def run(**values: Any) -> None:
            fields = {option.name: values.pop(option.name) for option in options}
            value = build({field: value for field, value in fields.items() if value is not None})
            command(**values, **{name: value})

        own = [
            parameter.replace(kind=Parameter.KEYWORD_ONLY)
            for parameter in signature(command, eval_str=True).parameters.values()
        ]
        at = next(index for index, parameter in enumerate(own) if parameter.name == name)
        run.__signature__ = Signature([*own[:at], *options, *own[at + 1 :]])  # type: ignore[attr-defined]
        return run

    return decorate


def build_option(record: type[BaseModel], name: str, kind: Any = None, **settings: Any) -> Parameter:
    """Return the option for a field. `kind`: type of the option; None: the type of the field. `settings`: arguments of
    typer.Option that differ from the field.
    """
    field, flag = record.model_fields[name], flag_of(name)
    kind = kind or _plain_type(field.annotation)
    flags = f"{flag}/--no-{flag[2:]}" if kind is bool else flag
    option = typer.Option(flags, **{"help": field.description, **settings})
    return build_parameter(name, Annotated[kind | None, option])


def build_parameter(name: str, annotation: Any) -> Parameter:
    """Return a parameter of a command, whose default is None."""
    return Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def flag_of(name: str) -> str:
    """Return the flag for a field: `--max-wall` for `max_wall_s`."""
    return f"--{name.removesuffix('_s').replace('_', '-')}"


def refuse(error: ValidationError) -> typer.BadParameter:
    """Return the error for an option with an invalid value."""
    part = find_invalid(error)
    return typer.BadParameter(f"{flag_of(str(part.path[0]))} {part.reason}")


def _plain_type(annotation: Any) -> Any:
    """Return the type of an optional field without its rules."""
    kind = next(part for part in get_args(annotation) if part is not type(None))
    return kind.__origin__ if get_origin(kind) is Annotated else kind
