"""A tenant's policy as the options of a command: read from them, told by their names."""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from contract.errors import ConfigError, ErrorCode, ToolFailure
from contract.tenancy import MAX_POLICY_BYTES, CommandRule, TenantPolicy

OPTIONS: dict[str, tuple[str, ...]] = {
    "tools": ("tools",),
    "weight": ("weight",),
    "in-flight": ("in_flight",),
    "queued": ("queued",),
    "rate": ("rate_per_s",),
    "burst": ("burst",),
    "sandboxes": ("sandboxes",),
    "command-rule": ("commands",),
    "trust-skill": ("trusted_skills",),
    "class": ("sandbox", "tenant_class"),
    "image": ("sandbox", "images"),
    "network": ("sandbox", "network"),
    "workspace-bytes": ("sandbox", "workspace_bytes"),
}
"""Option -> the field of the policy that it sets."""
_UNSET = {
    "tools": "all",
    "rate": "no limit",
    "image": "as the class says",
    "network": "as the class says",
    "workspace-bytes": "as the class says",
}


def apply_options(policy: TenantPolicy, given: Mapping[str, Any], unset: Sequence[str] = ()) -> TenantPolicy:
    """The policy with what is given by option instead of what it has, and `unset` as by default. A None is not given.

    Raises ToolFailure(INVALID_ARGUMENTS) that names the option.
    """
    values: dict[str, Any] = policy.model_dump(mode="json")
    values["sandbox"] = dict(values["sandbox"])
    named = {option: value for option, value in given.items() if value is not None}
    for option in unset:
        if option not in OPTIONS:
            raise _invalid("unset", f"there is no '{option}': name one of {', '.join(OPTIONS)}")
        if option in named:
            raise _invalid("unset", f"--{option} is given, too: leave one of them out")
        _place(values, option).pop(OPTIONS[option][-1])
    for option, value in named.items():
        _place(values, option)[OPTIONS[option][-1]] = _parse(option, value)
    try:
        return TenantPolicy.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise _invalid(_option(first["loc"]), first["msg"]) from error


def read_policy(path: Path) -> TenantPolicy:
    """The policy of a JSON file: an object with the fields of TenantPolicy; what it leaves out is as by default. Raises ConfigError."""
    try:
        with path.open("rb") as file:
            text = file.read(MAX_POLICY_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"--from: {path} cannot be read ({error.strerror}): mend the path") from error
    if len(text) > MAX_POLICY_BYTES:
        raise ConfigError(
            f"--from: {path} is larger than {MAX_POLICY_BYTES} bytes, more than a policy may have: name less, or use patterns"
        )
    try:
        return TenantPolicy.model_validate_json(text, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"--from: {path}: {where + ': ' if where else ''}{first['msg']}; mend the file") from error


def policy_lines(policy: TenantPolicy) -> list[str]:
    """For people: each option with what the policy has."""
    values = policy.model_dump(mode="json")
    width = max(map(len, OPTIONS))
    return [f"  {option.ljust(width)}  {_show(option, _place(values, option)[OPTIONS[option][-1]])}" for option in OPTIONS]


def _place(values: dict[str, Any], option: str) -> dict[str, Any]:
    """The dict in which the option's field stands."""
    for name in OPTIONS[option][:-1]:
        values = values[name]
    return values


def _parse(option: str, value: Any) -> Any:
    if option in ("tools", "image", "trust-skill"):
        return [name.strip() for text in value for name in text.split(",") if name.strip()]
    if option == "command-rule":
        return [_parse_rule(text) for text in value if text]
    return value


def _parse_rule(text: str) -> dict[str, Any]:
    """`action:tool:words`, such as `deny:bash_tool:git push`; tool and words may be left out."""
    action, _, rest = text.partition(":")
    tool, _, words = rest.partition(":")
    try:
        rule = CommandRule.model_validate({"action": action, "tool": tool or "*", "argv_prefix": shlex.split(words)})
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise _invalid(
            "command-rule", f"'{text[:100]}': {first['msg']}; write action:tool:words, such as deny:bash_tool:git push"
        ) from error
    except ValueError as error:
        raise _invalid("command-rule", f"'{text[:100]}': {error}; close what is quoted") from error
    return rule.model_dump(mode="json")


def _option(where: tuple[str | int, ...]) -> str:
    """The option that sets the field that is wrong."""
    return next((option for option, field in OPTIONS.items() if where[: len(field)] == field), "from")


def _show(option: str, value: Any) -> str:
    if option == "command-rule":
        rules = [f"{rule['action']}:{rule['tool']}:{shlex.join(rule['argv_prefix'])}" for rule in value]
        return ", ".join(rules) or "none"
    if isinstance(value, list):
        return ", ".join(value) or "none"
    return f"{value:g}" if isinstance(value, float) else _UNSET.get(option, "") if value is None else str(value)


def _invalid(option: str, message: str) -> ToolFailure:
    return ToolFailure(ErrorCode.INVALID_ARGUMENTS, f"--{option}: {message}")
