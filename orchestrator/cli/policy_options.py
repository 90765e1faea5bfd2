"""Options of the commands that set a tenant's policy. They are built from the fields of TenantPolicy."""

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import typer
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from toolcrew.contract.calls import Record
from toolcrew.contract.errors import ConfigError, ErrorCode, ToolFailure
from toolcrew.contract.invalid_input import describe_invalid, find_invalid
from toolcrew.contract.tenancy import MAX_POLICY_BYTES, CommandRule, TenantPolicy

_NAMES = {
    "rate_per_s": "rate",
    "commands": "command-rule",
    "trusted_skills": "trust-skill",
    "tenant_class": "class",
    "images": "image",
    "secrets": "secret",
}
"""Field -> option, for options that are not named after their field."""


def _find_options(record: type[Record], path: tuple[str, ...] = ()) -> Iterator[tuple[str, tuple[str, ...], FieldInfo]]:
    for name, field in record.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Record):
            yield from _find_options(field.annotation, (*path, name))
        elif field.description is not None:
            yield _NAMES.get(name, name.replace("_", "-")), (*path, name), field


_FIELDS = {option: (path, field) for option, path, field in _find_options(TenantPolicy)}
OPTIONS = {option: path for option, (path, _) in _FIELDS.items()}
"""Option -> the field of the policy that it sets."""
_UNSET = {"tools": "all", "models": "all", "rate": "no limit", "secret": "all", "streams": "allow, by rules"}
"""Option -> text that is shown if the policy does not set the option. An option that is not listed here has the value
of the tenant class then.
"""


def with_policy_options(command: Callable[..., None]) -> Callable[..., None]:
    """Replace the parameter `policy_values` of a command by one option for each field of the policy. The command
    receives a mapping of option -> value as `policy_values`.
    """

    @wraps(command)
    def run(**values: Any) -> None:
        values_by_option = {option: values.pop(path[-1]) for option, path in OPTIONS.items()}
        command(**values, policy_values=values_by_option)

    options = [_build_parameter(option, path[-1], field) for option, (path, field) in _FIELDS.items()]
    own = [
        one.replace(kind=Parameter.KEYWORD_ONLY)
        for one in signature(command, eval_str=True).parameters.values()
        if one.name != "policy_values"
    ]
    run.__signature__ = Signature([*own[:-1], *options, own[-1]])  # type: ignore[attr-defined]
    return run


def _build_parameter(option: str, name: str, field: FieldInfo) -> Parameter:
    kind: Any = next((one for one in get_args(field.annotation) if one is not type(None)), field.annotation)
    while get_origin(kind) is Annotated:
        kind = get_args(kind)[0]
    is_list = tuple in (get_origin(kind), get_origin(field.annotation))
    text = (
        f"{str(field.description).removesuffix('.')}; separate values with commas, or repeat the option."
        if is_list and option != "command-rule"
        else field.description
    )
    value: Any = list[str] if is_list else kind
    annotation = Annotated[value | None, typer.Option(f"--{option}", help=text)]
    return Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def apply_options(policy: TenantPolicy, policy_values: Mapping[str, Any], unset: Sequence[str] = ()) -> TenantPolicy:
    """Return the policy with the values of `policy_values`, and with the options in `unset` at their defaults. None
    changes nothing.

    Raises ToolFailure(INVALID_ARGUMENTS) that names the option.
    """
    values: dict[str, Any] = policy.model_dump(mode="json")
    values |= {name: dict(values[name]) for name in ("sandbox", "budgets")}
    named = {option: value for option, value in policy_values.items() if value is not None}
    for option in unset:
        if option not in OPTIONS:
            raise _invalid("unset", f"there is no option '{option}': name one of {', '.join(OPTIONS)}")
        if option in named:
            raise _invalid("unset", f"--{option} sets the same option: leave one of the two out")
        _find_parent(values, option).pop(OPTIONS[option][-1])
    for option, value in named.items():
        _find_parent(values, option)[OPTIONS[option][-1]] = _parse(option, value)
    try:
        return TenantPolicy.model_validate(values)
    except ValidationError as error:
        part = find_invalid(error)
        raise _invalid(_option(part.path), part.reason) from error


def read_policy(path: Path) -> TenantPolicy:
    """Read a policy from a JSON file: an object with fields of TenantPolicy. A field that is absent has its default.
    Raises ConfigError.
    """
    try:
        with path.open("rb") as file:
            text = file.read(MAX_POLICY_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"--from: {path} cannot be read ({error.strerror}): correct the path") from error
    if len(text) > MAX_POLICY_BYTES:
        raise ConfigError(
            f"--from: {path} is larger than {MAX_POLICY_BYTES} bytes, the limit of a policy: name fewer tools, or "
            "use patterns"
        )
    try:
        return TenantPolicy.model_validate_json(text, strict=True)
    except ValidationError as error:
        raise ConfigError(f"--from: {path}: {describe_invalid(error, TenantPolicy)}; fix the file") from error


def policy_lines(policy: TenantPolicy) -> list[str]:
    """Return one line for each option with the value of the policy."""
    values = policy.model_dump(mode="json")
    width = max(map(len, OPTIONS))
    return [
        f"  {option.ljust(width)}  {_show(option, _find_parent(values, option)[OPTIONS[option][-1]])}"
        for option in OPTIONS
    ]


def _find_parent(values: dict[str, Any], option: str) -> dict[str, Any]:
    """Return the dict that contains the field of the option."""
    for name in OPTIONS[option][:-1]:
        values = values[name]
    return values


def _parse(option: str, value: Any) -> Any:
    if option in ("tools", "models", "image", "secret", "trust-skill"):
        return [name.strip() for text in value for name in text.split(",") if name.strip()]
    if option == "command-rule":
        return [_parse_rule(text) for text in value if text]
    return value


def _parse_rule(text: str) -> dict[str, Any]:
    """Parse `action:tool:words`, such as `deny:bash_tool:git push`. Tool and words are optional."""
    action, _, rest = text.partition(":")
    tool, _, prefix = rest.partition(":")
    try:
        rule = CommandRule.model_validate({"action": action, "tool": tool or "*", "argv_prefix": shlex.split(prefix)})
    except ValidationError as error:
        problem = describe_invalid(error)
        raise _invalid(
            "command-rule", f"'{text[:100]}': {problem}; write action:tool:words, such as deny:bash_tool:git push"
        ) from error
    except ValueError as error:
        raise _invalid("command-rule", f"'{text[:100]}': {error}; close the quotation mark") from error
    return rule.model_dump(mode="json")


def _option(field_path: tuple[str | int, ...]) -> str:
    """Return the option that sets the field at `field_path`."""
    return next((option for option, field in OPTIONS.items() if field_path[: len(field)] == field), "from")


def _show(option: str, value: Any) -> str:
    if option == "command-rule":
        rules = [f"{rule['action']}:{rule['tool']}:{shlex.join(rule['argv_prefix'])}" for rule in value]
        return ", ".join(rules) or "none"
    if isinstance(value, list):
        return ", ".join(value) or "none"
    if value is None:
        return "no limit" if OPTIONS[option][0] == "budgets" else _UNSET.get(option, "as the class says")
    return f"{value:g}" if isinstance(value, float) else str(value)


def _invalid(option: str, message: str) -> ToolFailure:
    return ToolFailure(ErrorCode.INVALID_ARGUMENTS, f"--{option}: {message}")
