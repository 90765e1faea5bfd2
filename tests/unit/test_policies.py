"""Rules by tool, tenant and command: deny before ask before allow, and error messages for wrong files."""

from pathlib import Path
from typing import Any

import pytest

from contract.errors import ConfigError, ErrorCode
from contract.shell.command_rules import MAX_PLAIN_INPUT_CHARS
from orchestrator.approvals.policies import ApprovalPolicy, Rule, Verdict, load_policy
from tests.builders import build_spec

BASH = build_spec(
    "bash_tool", properties={"command": {"type": "string"}}, command_parameter="command", input_parameter="stdin"
)


def decide(command: str, *rules: Rule, tenant: str = "acme") -> Verdict:
    return ApprovalPolicy(rules).decide(tenant, BASH, {"command": command})


def allow(*prefix: str, **fields: Any) -> Rule:
    return Rule("allow", argv_prefix=prefix, **fields)


def deny(*prefix: str, **fields: Any) -> Rule:
    return Rule("deny", argv_prefix=prefix, **fields)


@pytest.mark.parametrize(
    ("flags", "action"), [({}, "allow"), ({"requires_permission": True}, "ask"), ({"dangerous": True}, "ask")]
)
def test_without_rules_the_spec_decides(flags: dict[str, bool], action: str) -> None:
    assert ApprovalPolicy().decide("acme", build_spec("t", **flags), {}).action == action


@pytest.mark.parametrize(
    ("command", "action"),
    [("ls", "allow"), ("rm -rf x", "allow"), ("rm -rf *", "ask"), ("eval x", "ask"), ("rm -rf /", "deny")],
)
def test_without_rules_a_command_is_judged_by_its_danger(command: str, action: str) -> None:
    assert decide(command).action == action


def test_a_dangerous_command_carries_a_warning_that_names_why() -> None:
    verdict = decide("git push --force")
    assert (verdict.is_dangerous, verdict.warning) == (True, "this command overwrites what others pushed")


def test_a_catastrophic_command_is_a_security_refusal_that_no_rule_lifts() -> None:
    verdict = decide("rm -rf /", Rule("allow"), allow("rm"))
    assert (verdict.action, verdict.code) == ("deny", ErrorCode.SECURITY_REFUSED)


def test_a_forbidden_command_is_a_security_refusal_and_a_forbidden_tool_is_not() -> None:
    assert decide("git push", deny("git", "push")).code is ErrorCode.SECURITY_REFUSED
    assert decide("git push", Rule("deny", tool="bash_*")).code is ErrorCode.PERMISSION_DENIED


def test_deny_goes_before_ask_and_ask_before_allow() -> None:
    rules = [Rule("allow"), Rule("ask"), Rule("deny")]
    assert [decide("ls", *rules).action, decide("ls", *rules[:2]).action, decide("ls", rules[0]).action] == [
        "deny",
        "ask",
        "allow",
    ]


def test_rules_are_about_tools_and_tenants_that_match() -> None:
    policy = ApprovalPolicy((Rule("deny", tool="write_*", tenant="team-?"),))
    write = build_spec("write_tool")
    assert policy.decide("team-a", write, {}).action == "deny"
    assert policy.decide("Team-a", write, {}).action == "allow"
    assert policy.decide("team-a", build_spec("read_tool"), {}).action == "allow"


def test_a_rule_about_commands_is_not_about_tools_without_one() -> None:
    assert ApprovalPolicy((deny("git"),)).decide("acme", build_spec("git"), {"text": "git push"}).action == "allow"


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
def test_a_denied_prefix_is_found_in_any_part_of_a_command(action: str, command: str) -> None:
    assert decide(command, deny("git", "push")).action == action


def test_an_ask_rule_asks_about_a_harmless_command() -> None:
    verdict = decide("make && git push", Rule("ask", argv_prefix=("git",)))
    assert (verdict.action, verdict.is_dangerous) == ("ask", False)


@pytest.mark.parametrize(
    "command",
    [
        "rm -rf /srv/build",
        "timeout 9 rm -rf /srv/build",
        "rm -rf /srv/build && rm -f /srv/x > /dev/null 2>&1",
        "ls | rm -f /srv/x",
    ],
)
def test_an_allowed_prefix_needs_no_approval(command: str) -> None:
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
def test_an_allowed_prefix_does_not_let_other_things_ride_along(command: str) -> None:
    assert decide(command, allow("rm")).action == "ask"


def test_every_word_of_an_allowed_prefix_must_stand_as_written() -> None:
    assert decide("git push --force", allow("git", "push")).action == "allow"
    assert decide("git -C x push --force", allow("git", "push")).action == "ask"
    assert decide("git $X --force; rm -f /srv/a", allow("git", "push"), allow("rm")).action == "ask"
    assert decide("set -- x; git pu$@sh --force", allow("git", "push"), allow("set")).action == "ask"


def test_a_rule_without_prefix_allows_what_cannot_be_read_too() -> None:
    assert decide("eval $X > out", Rule("allow", tool="bash_tool")).action == "allow"


def test_arguments_that_are_no_text_are_judged() -> None:
    assert ApprovalPolicy().decide("acme", BASH, {"command": 5}).action == "ask"
    assert ApprovalPolicy().decide("acme", BASH, {"command": ["rm", "-rf", "/"]}).action == "deny"
    assert ApprovalPolicy().decide("acme", BASH, {"command": ["echo", "; rm -rf /"]}).action == "allow"
    assert ApprovalPolicy().decide("acme", BASH, {}).action == "allow"


def test_a_command_parameter_that_a_tool_does_not_have_turns_nothing_off() -> None:
    spec = build_spec("bash_tool", properties={"script": {"type": "string"}}, command_parameter="command")
    assert ApprovalPolicy().decide("acme", spec, {"script": "ls"}).action == "ask"


def test_the_folder_of_a_call_counts() -> None:
    assert ApprovalPolicy().decide("acme", BASH, {"command": "rm -rf *", "cwd": "/"}).action == "deny"
    for folder, action in [
        ("src", "allow"),
        ("/tmp/x", "allow"),
        ("/srv", "ask"),
        ("../srv", "ask"),
        ("/workspace/../srv", "ask"),
    ]:
        assert ApprovalPolicy().decide("acme", BASH, {"command": "rm -rf build", "cwd": folder}).action == action


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("rm -rf /\n", "deny"),
        ("ls\ngit push --force\n", "ask"),
        ("git push", "allow"),
        ("y\n", "allow"),
        ("print(f\"{x['a']}\")\n", "allow"),
        ("def f(a, b):\n    return a if a > b else 'it\n", "allow"),
        ("SELECT * FROM t WHERE name = 'x';\n", "allow"),
        ("eval('1 + 1')", "allow"),
        ("x = '" + "a" * MAX_PLAIN_INPUT_CHARS, "ask"),
    ],
)
def test_text_for_a_job_is_judged_where_it_reads_as_a_command(text: str, action: str) -> None:
    assert ApprovalPolicy().decide("acme", BASH, {"action": "input", "command": "", "stdin": text}).action == action


def test_the_input_of_a_command_is_judged_when_it_is_a_shell() -> None:
    for command, action in [("bash", "ask"), ("env sh -s", "ask"), ("cat > notes", "allow")]:
        assert ApprovalPolicy().decide("acme", BASH, {"command": command, "stdin": "git push --force"}).action == action
    assert ApprovalPolicy().decide("acme", BASH, {"command": "bash", "stdin": "if then"}).action == "ask"


def test_rules_about_commands_are_about_those_sent_to_a_job() -> None:
    sent = {"action": "input", "command": "", "stdin": "git push origin\n"}
    assert ApprovalPolicy((deny("git", "push"),)).decide("acme", BASH, sent).code is ErrorCode.SECURITY_REFUSED
    assert ApprovalPolicy((allow("rm"),)).decide("acme", BASH, {**sent, "stdin": "rm -rf /srv/a\n"}).action == "allow"


def test_a_tool_without_a_sandbox_has_no_folder_of_its_own() -> None:
    spec = BASH.model_copy(update={"pool": "local"})
    assert ApprovalPolicy().decide("acme", spec, {"command": "rm -rf build"}).action == "ask"


TOML = (
    '[[rules]]\naction = "deny"\ntool = "bash_tool"\nargv_prefix = ["git", "push"]\n[[rules]]\naction = "allow"\n'
    'tenant = "a*"\n'
)
JSON = (
    '{"rules": [{"action": "deny", "tool": "bash_tool", "argv_prefix": ["git", "push"]}, {"action": "allow", "tenant": '
    '"a*"}]}'
)


@pytest.mark.parametrize(("name", "text"), [("p.toml", TOML), ("p.json", JSON)])
def test_a_policy_is_read_from_toml_and_json(tmp_path: Path, name: str, text: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    assert load_policy(path) == ApprovalPolicy((deny("git", "push", tool="bash_tool"), Rule("allow", tenant="a*")))


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("p.yaml", "", "a .toml or .json file"),
        ("p.toml", "rules = [", "the file is not TOML"),
        ("p.json", "[]", "an object with a list"),
        ("p.json", '{"rules": {}}', "the list of rules is missing"),
        ("p.json", '{"rules": [], "default": "allow"}', "unknown field 'default'"),
        (
            "p.json",
            '{"rules": [{"action": "ask"}, {"action": "permit"}]}',
            "rule 2: action is 'permit': use deny, ask or allow",
        ),
        ("p.json", '{"rules": [{"tool": "x"}]}', "rule 1: the action is missing"),
        ("p.json", '{"rules": [{"action": "ask", "argv": ["x"]}]}', "rule 1: unknown field 'argv'"),
        (
            "p.json",
            '{"rules": [{"action": "ask", "argv_prefix": "git push"}]}',
            "rule 1: argv_prefix must be a list of words",
        ),
        (
            "p.json",
            '{"rules": [{"action": "ask", "argv_prefix": ["git", ""]}]}',
            "rule 1: argv_prefix must be a list of words",
        ),
        ("p.json", '{"rules": [{"action": ["ask"]}]}', "rule 1: action is"),
        ("p.json", '{"rules": [{"action": "ask", "tenant": 5}]}', "rule 1: tenant is 5"),
        ("p.json", '{"rules": ["ask"]}', "rule 1: a rule must be a table"),
        ("p.json", "[" * 100_000, "the file is not JSON"),
    ],
)
def test_a_wrong_policy_says_where_and_what_to_do(tmp_path: Path, name: str, text: str, expected: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ConfigError) as refused:
        load_policy(path)
    assert str(path) in str(refused.value)
    assert expected in str(refused.value)


def test_a_policy_that_is_not_there_is_an_error_and_not_an_empty_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load_policy(tmp_path / "p.toml")
    (tmp_path / "latin.toml").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="the file is not TOML"):
        load_policy(tmp_path / "latin.toml")
