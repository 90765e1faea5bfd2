"""Rules by tool, tenant and command: deny before ask before allow, and error messages for wrong files."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.records.builders import build_spec
from toolcrew.contract.errors import ConfigError, ErrorCode
from toolcrew.contract.shell.command_rules import MAX_PLAIN_INPUT_CHARS
from toolcrew.contract.specs import ToolSpec
from toolcrew.orchestrator.approvals.policies import ApprovalPolicy, PolicyDecision, Rule, load_policy

BASH = build_spec(
    "bash_tool", properties={"command": {"type": "string"}}, command_parameter="command", input_parameter="stdin"
)


def decide(command: str, *rules: Rule) -> PolicyDecision:
    return ApprovalPolicy(rules).decide("acme", BASH, {"command": command})


def allow(*prefix: str, **fields: Any) -> Rule:
    return Rule("allow", argv_prefix=prefix, **fields)


def deny(*prefix: str, **fields: Any) -> Rule:
    return Rule("deny", argv_prefix=prefix, **fields)


@pytest.mark.parametrize(
    ("spec", "arguments", "action"),
    [
        (build_spec("t"), {}, "allow"),
        (build_spec("t", requires_permission=True), {}, "ask"),
        (build_spec("t", dangerous=True), {}, "ask"),
        # A command parameter that the tool does not have turns nothing off.
        (
            build_spec("bash_tool", properties={"script": {"type": "string"}}, command_parameter="command"),
            {"script": "ls"},
            "ask",
        ),
        # A tool without a sandbox has no folder of its own.
        (BASH.model_copy(update={"pool": "local"}), {"command": "rm -rf build"}, "ask"),
    ],
    ids=["plain", "permission", "dangerous", "no such parameter", "no sandbox"],
)
def test_without_rules_the_tool_spec_decides(spec: ToolSpec, arguments: dict[str, Any], action: str) -> None:
    assert ApprovalPolicy().decide("acme", spec, arguments).action == action


JOB = {"action": "input", "command": ""}


@pytest.mark.parametrize(
    ("arguments", "action"),
    [
        ({"command": "ls"}, "allow"),
        ({"command": "rm -rf x"}, "allow"),
        ({"command": "rm -rf *"}, "ask"),
        ({"command": "eval x"}, "ask"),
        ({"command": "rm -rf /"}, "deny"),
        ({"command": 5}, "ask"),
        ({"command": ["rm", "-rf", "/"]}, "deny"),
        ({"command": ["echo", "; rm -rf /"]}, "allow"),
        ({}, "allow"),
        # The folder of the call
        ({"command": "rm -rf *", "cwd": "/"}, "deny"),
        ({"command": "rm -rf build", "cwd": "src"}, "allow"),
        ({"command": "rm -rf build", "cwd": "/tmp/x"}, "allow"),
        ({"command": "rm -rf build", "cwd": "/srv"}, "ask"),
        ({"command": "rm -rf build", "cwd": "../srv"}, "ask"),
        ({"command": "rm -rf build", "cwd": "/workspace/../srv"}, "ask"),
        # Text for a job, which counts where it reads as a command
        ({**JOB, "stdin": "rm -rf /\n"}, "deny"),
        ({**JOB, "stdin": "ls\ngit push --force\n"}, "ask"),
        ({**JOB, "stdin": "git push"}, "allow"),
        ({**JOB, "stdin": "y\n"}, "allow"),
        ({**JOB, "stdin": "print(f\"{x['a']}\")\n"}, "allow"),
        ({**JOB, "stdin": "def f(a, b):\n    return a if a > b else 'it\n"}, "allow"),
        ({**JOB, "stdin": "SELECT * FROM t WHERE name = 'x';\n"}, "allow"),
        ({**JOB, "stdin": "eval('1 + 1')"}, "allow"),
        ({**JOB, "stdin": "x = '" + "a" * MAX_PLAIN_INPUT_CHARS}, "ask"),
        # The input of a command, which counts when the command is a shell
        ({"command": "bash", "stdin": "git push --force"}, "ask"),
        ({"command": "env sh -s", "stdin": "git push --force"}, "ask"),
        ({"command": "cat > notes", "stdin": "git push --force"}, "allow"),
        ({"command": "bash", "stdin": "if then"}, "ask"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_without_rules_a_command_is_judged_by_its_danger_level(arguments: dict[str, Any], action: str) -> None:
    assert ApprovalPolicy().decide("acme", BASH, arguments).action == action


@pytest.mark.parametrize(
    ("command", "rules", "action", "code", "warning"),
    [
        ("rm -rf /", (Rule("allow"), allow("rm")), "deny", ErrorCode.SECURITY_REFUSED, None),
        ("git push", (deny("git", "push"),), "deny", ErrorCode.SECURITY_REFUSED, None),
        ("git push", (Rule("deny", tool="bash_*"),), "deny", ErrorCode.PERMISSION_DENIED, None),
        ("git push --force", (), "ask", None, "this command overwrites what others pushed"),
        ("make && git push", (Rule("ask", argv_prefix=("git",)),), "ask", None, None),
        ("eval $X > out", (Rule("allow", tool="bash_tool"),), "allow", None, None),
    ],
    ids=str,
)
def test_denied_command_has_a_code_and_dangerous_command_a_warning(
    command: str, rules: tuple[Rule, ...], action: str, code: ErrorCode | None, warning: str | None
) -> None:
    decision = decide(command, *rules)
    assert decision.action == action
    assert code is None or decision.code is code
    if action == "ask":
        assert (decision.is_dangerous, decision.warning or None) == (warning is not None, warning)


@pytest.mark.parametrize(
    ("rules", "tool", "tenant", "action"),
    [
        ((Rule("allow"), Rule("ask"), Rule("deny")), "echo", "acme", "deny"),
        ((Rule("allow"), Rule("ask")), "echo", "acme", "ask"),
        ((Rule("allow"),), "echo", "acme", "allow"),
        ((Rule("deny", tool="write_*", tenant="team-?"),), "write_tool", "team-a", "deny"),
        ((Rule("deny", tool="write_*", tenant="team-?"),), "write_tool", "Team-a", "allow"),
        ((Rule("deny", tool="write_*", tenant="team-?"),), "read_tool", "team-a", "allow"),
        # A rule about commands is not about tools without one.
        ((deny("git"),), "git", "acme", "allow"),
    ],
    ids=str,
)
def test_strictest_matching_rule_decides(rules: tuple[Rule, ...], tool: str, tenant: str, action: str) -> None:
    assert ApprovalPolicy(rules).decide(tenant, build_spec(tool), {"text": "git push"}).action == action


@pytest.mark.parametrize(
    ("action", "command"),
    [
        ("deny", "git push"),
        ("deny", "ls; git push origin"),
        ("deny", "/usr/bin/git push"),
        ("deny", "git -C dir -c a=b push"),
        ("deny", "git --no-pager push"),
        ("deny", "'git' \"push\""),
        ("deny", "bash -c 'git push'"),
        ("deny", "timeout 5 git push"),
        ("deny", "git $SUB"),
        ("deny", "echo $(git push)"),
        ("deny", "alias g=git; g push"),
        ("deny", "$GIT git push"),
        ("allow", "git status"),
        ("allow", "git commit -m push"),
        ("allow", "echo git push"),
        ("allow", "echo 'git push'"),
        ("allow", "gitk push"),
    ],
)
def test_denied_prefix_is_found_in_any_part_of_a_command(action: str, command: str) -> None:
    assert decide(command, deny("git", "push")).action == action


@pytest.mark.parametrize(
    "command",
    [
        "rm -rf /srv/build",
        "timeout 9 rm -rf /srv/build",
        "rm -rf /srv/build && rm -f /srv/x > /dev/null 2>&1",
        "ls | rm -f /srv/x",
    ],
)
def test_command_with_an_allowed_prefix_needs_no_approval(command: str) -> None:
    assert decide(command, allow("rm"), allow("ls")).action == "allow"


@pytest.mark.parametrize(
    "command",
    [
        "rm -rf /srv/build; git push --force",
        "rm -rf /srv/build > log",
        "PATH=. rm -rf /srv/build",
        "A=b; rm -rf /srv/build",
        "env A=b rm -rf /srv/build",
        "./rm -rf /srv/build",
        "/tmp/rm -rf /srv/build",
        "sudo rm -rf /srv/build",
        "$X; rm -rf /srv/build",
        "rm -rf /srv/build $(git push -f)",
        "rm() { ls; }; rm -rf /srv/build",
        "bash -c 'rm -rf /srv/build'",
        "xargs rm -rf",
        'rm -rf "/srv/build',
    ],
)
def test_allowed_prefix_does_not_allow_other_commands_in_the_line(command: str) -> None:
    assert decide(command, allow("rm")).action == "ask"


def test_allowed_prefix_must_match_literally() -> None:
    assert decide("git push --force", allow("git", "push")).action == "allow"
    assert decide("git -C x push --force", allow("git", "push")).action == "ask"
    assert decide("git $X --force; rm -f /srv/a", allow("git", "push"), allow("rm")).action == "ask"
    assert decide("set -- x; git pu$@sh --force", allow("git", "push"), allow("set")).action == "ask"


def test_command_rules_apply_to_input_of_a_job() -> None:
    job_input = {"action": "input", "command": "", "stdin": "git push origin\n"}
    assert ApprovalPolicy((deny("git", "push"),)).decide("acme", BASH, job_input).code is ErrorCode.SECURITY_REFUSED
    assert (
        ApprovalPolicy((allow("rm"),)).decide("acme", BASH, {**job_input, "stdin": "rm -rf /srv/a\n"}).action == "allow"
    )


TOML = (
    '[[rules]]\naction = "deny"\ntool = "bash_tool"\nargv_prefix = ["git", "push"]\n[[rules]]\naction = "allow"\n'
    'tenant = "a*"\n'
)
JSON = (
    '{"rules": [{"action": "deny", "tool": "bash_tool", "argv_prefix": ["git", "push"]}, {"action": "allow", "tenant": '
    '"a*"}]}'
)


@pytest.mark.parametrize(("name", "text"), [("p.toml", TOML), ("p.json", JSON)])
def test_policy_is_read_from_toml_and_json(tmp_path: Path, name: str, text: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    assert load_policy(path) == ApprovalPolicy((deny("git", "push", tool="bash_tool"), Rule("allow", tenant="a*")))


def rules(*texts: str) -> str:
    return f'{{"rules": [{", ".join(texts)}]}}'


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("p.yaml", "", "a .toml or .json file"),
        ("p.toml", "rules = [", "the file is not valid TOML"),
        ("p.toml", "\xff", "the file is not valid TOML"),
        ("p.json", "[]", "an object with a list"),
        ("p.json", '{"rules": {}}', "the list of rules is missing"),
        ("p.json", '{"rules": [], "default": "allow"}', "unknown field 'default'"),
        ("p.json", rules('{"action": "ask"}', '{"action": "permit"}'), "rule 2: action is 'permit': use deny, ask"),
        ("p.json", rules('{"tool": "x"}'), "rule 1: the action is missing"),
        ("p.json", rules('{"action": "ask", "argv": ["x"]}'), "rule 1: unknown field 'argv'"),
        ("p.json", rules('{"action": "ask", "argv_prefix": "git push"}'), "argv_prefix is not a list of words"),
        ("p.json", rules('{"action": "ask", "argv_prefix": ["git", ""]}'), "argv_prefix is not a list of words"),
        ("p.json", rules('{"action": ["ask"]}'), "rule 1: action is"),
        ("p.json", rules('{"action": "ask", "tenant": 5}'), "rule 1: tenant is 5"),
        ("p.json", rules('"ask"'), "rule 1: the rule is not a table"),
        ("p.json", "[" * 100_000, "the file is not valid JSON"),
        ("missing.toml", None, "cannot be read"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_invalid_policy_file_is_refused_with_path_and_reason(
    tmp_path: Path, name: str, text: str | None, expected: str
) -> None:
    path = tmp_path / name
    if text is not None:
        path.write_text(text, encoding="latin-1")
    with pytest.raises(ConfigError) as refused:
        load_policy(path)
    assert str(path) in str(refused.value)
    assert expected in str(refused.value)
