"""Approval policy: rules by tool, tenant and command that deny calls, ask about calls, or allow calls.

Rules come from a file or from code. Invariant: no rule can allow a catastrophic command, and a command that cannot be
parsed completely never matches an allow rule with a prefix.
"""

import json
import posixpath
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal, get_args

from toolcrew.contract.errors import ConfigError, ErrorCode
from toolcrew.contract.shell.command_rules import matches_command, read_command
from toolcrew.contract.shell.commands import Command, ShellScript
from toolcrew.contract.shell.danger_tables import HARMLESS_DEVICES
from toolcrew.contract.shell.dangers import Level, classify
from toolcrew.contract.shell.shell_reader import Word
from toolcrew.contract.specs import ToolSpec
from toolcrew.contract.tenancy import build_refusal_subject, tools_of

Action = Literal["deny", "ask", "allow"]
MAX_POLICY_BYTES = 1024 * 1024
WORKSPACE = "/workspace"


@dataclass(frozen=True)
class Rule:
    """Rule for calls with a matching tool and tenant: deny, ask or allow without a question.

    With `argv_prefix` the rule applies to commands, and only to tools with a `command_parameter` in their spec:

    - deny and ask match when ANY command of the line begins with these words. A folder before the program (`/bin/rm`)
      and options before later words (`git -C x push`) do not prevent a match. An argument that is known only at run
      time (`$x`) counts as a match. A line that cannot be parsed completely matches when it contains all the words
      anywhere.
    - allow matches when EVERY command of the line begins exactly with the words of an allow rule, including the folder
      of the program. An allow rule with a prefix never matches a line that cannot be parsed completely, sets
      variables, or redirects output into a file. /dev/null does not count as a file. (The reason: the prefix does not
      say which file a redirection overwrites.) An allow rule without a prefix matches these lines too.

    No rule allows a catastrophic command. Raises ConfigError when a field has an invalid value.
    """

    action: Action
    tool: str = "*"
    tenant: str = "*"
    argv_prefix: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.action not in get_args(Action):
            raise ConfigError(f"action is {self.action!r}: use deny, ask or allow")
        for name in ("tool", "tenant"):
            if not isinstance(value := getattr(self, name), str) or not value:
                raise ConfigError(f'{name} is {value!r}: use a name, or a pattern such as "*"')
        prefix = self.argv_prefix
        if not isinstance(prefix, tuple) or not all(isinstance(part, str) and part for part in prefix):
            raise ConfigError('argv_prefix is not a list of words: write it as ["git", "push"]')

    def is_about(self, tenant: str, tool: str) -> bool:
        """Return whether the globs for the tool and for the tenant match. The comparison is case-sensitive."""
        return fnmatchcase(tool, self.tool) and fnmatchcase(tenant, self.tenant)


@dataclass(frozen=True)
class PolicyDecision:
    """Result of a policy for one call.

    `code`: the error code of a denied call. `warning`: why the call is dangerous, "" for other calls.
    """

    action: Action
    reason: str = ""
    warning: str = ""
    code: ErrorCode | None = None

    @property
    def is_dangerous(self) -> bool:
        """Return whether the call is dangerous."""
        return bool(self.warning)


@dataclass(frozen=True)
class ApprovalPolicy:
    """Rules in any order. Among the matching rules, deny wins over ask, and ask wins over allow.

    Without a matching rule, the policy asks about a dangerous command and about a tool that requires permission. All
    other calls are allowed.
    """

    rules: tuple[Rule, ...] = field(default=())

    def decide(self, tenant: str, spec: ToolSpec, arguments: Mapping[str, Any]) -> PolicyDecision:
        """Decide about one call, from arguments that `prepare_arguments` returned.

        Prepared arguments have no aliases, so that an alias cannot hide the command.
        """
        script = read_command(spec, arguments)
        danger = classify(script, _folder(spec, arguments)) if script is not None else None
        # Catastrophic commands are denied before the rules are read, so that no rule can allow them.
        if danger is not None and danger.level is Level.CATASTROPHIC:
            return PolicyDecision("deny", f"it {danger.reason}", danger.reason, ErrorCode.SECURITY_REFUSED)
        warning = _warning(spec, danger.reason if danger is not None else "")
        rules = [
            (rule, used) for rule in self.rules for used in tools_of(spec, arguments) if rule.is_about(tenant, used)
        ]
        touching = [
            (rule, used) for rule, used in rules if rule.action != "allow" and matches_command(rule.argv_prefix, script)
        ]
        denying = next(((rule, used) for rule, used in touching if rule.action == "deny"), None)
        if denying is not None:
            return _deny(denying[0], build_refusal_subject(spec.name, denying[1]), warning)
        if touching:
            return PolicyDecision("ask", _explain_ask(spec.name, touching[0][1]), warning)
        # Only allow rules for the called tool count. A rule for a tool that the call uses indirectly does not allow the
        # call.
        if _is_allowed([rule for rule, used in rules if rule.action == "allow" and used == spec.name], script):
            return PolicyDecision("allow", "a rule of the policy allows it", warning)
        if warning:
            return PolicyDecision("ask", "the call is dangerous", warning)
        if spec.requires_permission:
            return PolicyDecision("ask", "its tool requires permission")
        return PolicyDecision("allow")


def load_policy(path: Path | str) -> ApprovalPolicy:
    """Load the policy of a .toml or .json file: `rules`, a list of tables with the fields of Rule.

    Raises ConfigError with the file, the number of the rule (from 1) and what to do.
    """
    path = Path(path)
    data = _load(path)
    unknown = sorted(set(data) - {"rules"})
    if unknown:
        raise ConfigError(f"{path}: unknown field '{unknown[0]}': a policy contains only rules")
    rules = data.get("rules")
    if not isinstance(rules, list):
        raise ConfigError(
            f"{path}: the list of rules is missing: write [[rules]] tables in TOML, or an object with a list "
            "'rules' in JSON"
        )
    return ApprovalPolicy(tuple(_parse_rule(path, number, rule) for number, rule in enumerate(rules, start=1)))


def _load(path: Path) -> dict[str, Any]:
    readers = {".toml": tomllib.loads, ".json": json.loads}
    if path.suffix not in readers:
        raise ConfigError(f"{path}: an approval policy must be a .toml or .json file: rename it")
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_POLICY_BYTES + 1)
    except OSError as error:
        raise ConfigError(
            f"{path}: the approval policy cannot be read: {error.strerror}. Correct the path or omit it"
        ) from error
    if len(raw) > MAX_POLICY_BYTES:
        raise ConfigError(f"{path}: the approval policy is larger than {MAX_POLICY_BYTES} bytes: use fewer rules")
    try:
        data = readers[path.suffix](raw.decode())
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: the file is not valid {path.suffix[1:].upper()} ({error}): correct it") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: the file is not an object with a list 'rules': correct it")
    return data


def _parse_rule(path: Path, number: int, data: Any) -> Rule:
    position = f"{path}: rule {number}"
    if not isinstance(data, dict):
        raise ConfigError(f"{position}: the rule is not a table: write a table with an action")
    fields = ("action", "tool", "tenant", "argv_prefix")
    unknown = sorted(set(data) - set(fields))
    if unknown:
        raise ConfigError(f"{position}: unknown field '{unknown[0]}'; a rule has {', '.join(fields)}")
    if "action" not in data:
        raise ConfigError(f"{position}: the action is missing: use deny, ask or allow")
    prefix = data.get("argv_prefix", [])
    try:
        return Rule(**{**data, "argv_prefix": tuple(prefix) if isinstance(prefix, list) else prefix})
    except (ConfigError, TypeError) as error:
        raise ConfigError(f"{position}: {error}") from error


def _warning(spec: ToolSpec, reason: str) -> str:
    if reason:
        return f"this command {reason}"
    return "this tool is marked dangerous" if spec.dangerous else ""


def _deny(rule: Rule, subject: str, warning: str) -> PolicyDecision:
    if rule.argv_prefix:
        reason = f"commands with '{' '.join(rule.argv_prefix)}' are forbidden by the policy"
        return PolicyDecision("deny", reason, warning, ErrorCode.SECURITY_REFUSED)
    forbidden = "this tool is" if subject == "it" else f"{subject} is"
    return PolicyDecision("deny", f"{forbidden} forbidden by the policy", warning, ErrorCode.PERMISSION_DENIED)


def _explain_ask(name: str, used: str) -> str:
    reason = "a rule of the policy requires approval"
    return reason if used == name else f"{reason}: it would run a program as {used} does"


def _folder(spec: ToolSpec, arguments: Mapping[str, Any]) -> str:
    """Return the folder in which a command starts: its `cwd` argument, otherwise the workspace.

    Without a sandbox the workspace is unknown, and the result is the `cwd` argument or "".
    """
    folder = arguments.get("cwd")
    start = WORKSPACE if spec.pool == "sandbox" else ""
    return posixpath.normpath(posixpath.join(start, folder)) if isinstance(folder, str) else start


def _is_allowed(rules: list[Rule], script: ShellScript | None) -> bool:
    if any(not rule.argv_prefix for rule in rules):
        return True
    # A command that cannot be parsed completely could hide another command, so no prefix allows it.
    if script is None or script.is_opaque:
        return False
    prefixes = [rule.argv_prefix for rule in rules]
    commands = [
        command for command in script.commands if not command.is_wrapper or command.outputs or command.assignments
    ]
    return bool(prefixes) and bool(commands) and all(_is_within(command, prefixes) for command in commands)


def _is_within(command: Command, prefixes: list[tuple[str, ...]]) -> bool:
    if command.assignments or any(target.text not in HARMLESS_DEVICES for target in command.outputs):
        return False
    if not command.words:
        # A redirected input such as `done < file` runs nothing and writes nothing.
        return True
    return any(_begins(command.words, prefix) for prefix in prefixes)


def _begins(argv: Sequence[Word], prefix: tuple[str, ...]) -> bool:
    plain = [word.text for word in argv[: len(prefix)] if not (word.is_expanded or word.is_pattern)]
    return tuple(plain) == prefix
