"""allowed-tools of skills, the approval questions that they save, and the skills that fit into a prompt."""

from typing import Any

import pytest
import redis.asyncio
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import RedisProcess
from tests.support.records.builders import build_spec
from toolcrew.contract.calls import ToolCall, ToolResult
from toolcrew.contract.errors import ErrorCode
from toolcrew.contract.names import skill_uses_key
from toolcrew.contract.skills import parse_allowed_tools, parse_skill
from toolcrew.contract.specs import MAX_ALLOWED_TOOLS, AllowedTool, SkillSummary
from toolcrew.orchestrator.approvals.policies import ApprovalPolicy, Rule
from toolcrew.orchestrator.runs.skill_disclosure import MAX_CHARS, ActiveSkills, disclose
from toolcrew.store.skills import USES_TTL_S, SkillUses
from toolcrew.workers.tools.builtin import build_registry

DIGEST, OTHER = "a" * 64, "b" * 64
BASH = next(spec for spec in build_registry().specs() if spec.name == "bash_tool")


def read(value: Any) -> tuple[list[tuple[str, tuple[str, ...]]], list[str]]:
    warnings: list[str] = []
    return [(allowed.tool, allowed.argv_prefix) for allowed in parse_allowed_tools(value, warnings)], warnings


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, []),
        ("", []),
        ("Read", [("read_tool", ())]),
        ("Bash(git:*) Read", [("bash_tool", ("git",)), ("read_tool", ())]),
        ("Bash(git log --oneline:*), WebFetch", [("bash_tool", ("git", "log", "--oneline")), ("webfetch_tool", ())]),
        ("Bash(npm run *)", [("bash_tool", ("npm", "run"))]),
        ("Bash Bash(*)", [("bash_tool", ()), ("bash_tool", ())]),
        (
            ["Bash(jq:*)", "bash_tool", "mcp__docs__search"],
            [("bash_tool", ("jq",)), ("bash_tool", ()), ("mcp__docs__search", ())],
        ),
    ],
)
def test_allowed_tools_are_read_from_text_or_list(value: Any, expected: list[tuple[str, tuple[str, ...]]]) -> None:
    assert read(value) == (expected, [])


@pytest.mark.parametrize(
    ("value", "expected", "warning"),
    [
        (7, [], "neither a text nor a list"),
        (["Read", 7], [], "neither a text nor a list"),
        ("Read(./src/**)", [], "the first words can be given"),
        ("Bash(git status)", [], "the first words can be given"),
        ("Bash(g*t:*)", [], "the first words can be given"),
        ("Read Bash(git", [("read_tool", ())], "'Bash(git' is ignored"),
        ("*", [], "'*' is ignored"),
        ("Read " * 60, [("read_tool", ())] * MAX_ALLOWED_TOOLS, "the rest is ignored"),
    ],
)
def test_invalid_allowed_tools_give_a_warning(
    value: Any, expected: list[tuple[str, tuple[str, ...]]], warning: str
) -> None:
    allowances, warnings = read(value)
    assert allowances == expected
    assert warning in warnings[0]


@given(st.one_of(st.text(), st.lists(st.text()), st.text(alphabet="Bash(git:*), ")))
def test_any_allowed_tools_value_is_accepted(value: Any) -> None:
    allowances, _ = read(value)
    assert len(allowances) <= MAX_ALLOWED_TOOLS


def test_parsed_skill_has_allowed_tools_and_warnings() -> None:
    text = parse_skill("---\nname: a\ndescription: Does a.\nallowed-tools: Bash(git:*) Read(x)\n---\n", "a")
    assert text.allowed_tools == (AllowedTool(tool="bash_tool", argv_prefix=("git",)),)
    assert "Read(x) is ignored" in text.warnings[0]


# Their use

SKILL = SkillSummary(
    name="keep-house",
    description="Tidies up.",
    digest=DIGEST,
    files=1,
    bytes=1,
    allowed_tools=(AllowedTool(tool="bash_tool", argv_prefix=("git", "clean")),),
)


def load(digest: str = DIGEST, **fields: Any) -> tuple[ToolCall, ToolResult]:
    call = ToolCall(id="c", name="skill_tool", arguments={"name": "keep-house", "action": "load"})
    return call, ToolResult(call_id="c", name="skill_tool", success=True, metadata={"digest": digest}, **fields)


def decide_action(
    active: ActiveSkills, command: str = "git clean -fd", trusted: tuple[str, ...] = (DIGEST,), *rules: Rule
) -> str:
    policy = ApprovalPolicy((*rules, *active.rules(trusted, "acme")))
    return policy.decide("acme", BASH, {"command": command}).action


def test_commands_of_a_loaded_trusted_skill_need_no_approval() -> None:
    active = ActiveSkills([SKILL])
    assert decide_action(active) == "ask"
    assert active.record_use(*load()) == "keep-house"
    assert decide_action(active) == "allow"


@pytest.mark.parametrize(
    "command",
    [
        "git push --force",
        "git clean -fd; git push --force",
        "$G clean -fd",
        "git clean -fd > /etc/x",
        "X=1 git clean -fd",
    ],
)
def test_other_commands_still_need_approval(command: str) -> None:
    active = ActiveSkills([SKILL])
    active.record_use(*load())
    assert decide_action(active, command) == "ask"


def test_allowed_tools_do_not_override_deny_or_ask_rules() -> None:
    active = ActiveSkills([SKILL.model_copy(update={"allowed_tools": (AllowedTool(tool="bash_tool"),)})])
    active.record_use(*load())
    assert decide_action(active) == "allow"
    assert decide_action(active, "rm -rf /") == "deny"
    assert decide_action(active, "git clean -fd", (DIGEST,), Rule("ask", "bash_tool")) == "ask"
    assert decide_action(active, "git clean -fd", (DIGEST,), Rule("deny", "bash_tool", argv_prefix=("git",))) == "deny"


def test_untrusted_changed_or_failed_skill_allows_nothing() -> None:
    active, changed, failed = ActiveSkills([SKILL]), ActiveSkills([SKILL]), ActiveSkills([SKILL])
    call, result = load()
    active.record_use(call, result)
    assert decide_action(active, trusted=(OTHER,)) == "ask"
    assert changed.record_use(*load(OTHER)) == "keep-house"
    assert decide_action(changed, trusted=(DIGEST, OTHER)) == "ask"
    assert (
        failed.record_use(call, ToolResult.failed(call, ErrorCode.TIMEOUT, "no", metadata={"digest": DIGEST})) is None
    )
    assert decide_action(failed) == "ask"


def test_other_calls_activate_no_skill() -> None:
    active = ActiveSkills([SKILL])
    for name, arguments in (
        ("bash_tool", {"name": "keep-house"}),
        ("skill_tool", {"name": ["keep-house"]}),
        ("skill_tool", {}),
    ):
        call = ToolCall(id="c", name=name, arguments=arguments)
        assert (
            active.record_use(call, ToolResult(call_id="c", name=name, success=True, metadata={"digest": DIGEST}))
            is None
        )
    named_call = ToolCall(id="c", name="keep-house", arguments={})
    assert (
        active.record_use(
            named_call, ToolResult(call_id="c", name="keep-house", success=True, metadata={"digest": DIGEST})
        )
        == "keep-house"
    )
    assert decide_action(active) == "ask"


SKILL_TOOL = build_spec("skill_tool", description="Use a skill.")


def build_skill(name: str, description: str = "Does it.") -> SkillSummary:
    return SkillSummary(name=name, description=description, digest="0" * 64, files=1, bytes=1)


def describe(skills: list[SkillSummary], uses: dict[str, int] | None = None, window: int | None = None) -> str:
    other, spec = disclose([build_spec("echo"), SKILL_TOOL], skills, uses or {}, window)
    assert other == build_spec("echo")
    return spec.description


def test_skill_list_omits_the_least_used_skills_with_a_notice() -> None:
    skills = [build_skill(f"s{number:02}", "x" * 900) for number in range(20)]
    description = describe(skills, {"s19": 3, "s05": 1})
    lines = description.splitlines()
    names = [line[2:5] for line in lines if line.startswith("- ")]
    assert names == ["s00", "s01", "s02", "s03", "s04", "s05", "s06", "s07", "s19"]
    assert lines[0].endswith("Skills, those that are used most:")
    assert lines[-1] == "[11 more: use action list to see them]"


@given(
    st.lists(st.tuples(st.integers(0, 99), st.integers(1, 4000)), max_size=60, unique_by=lambda pair: pair[0]),
    st.integers(0, 300_000),
)
def test_skill_list_is_bounded(sizes: list[tuple[int, int]], window: int) -> None:
    skills = [build_skill(f"s{number}", "x" * size) for number, size in sizes]
    description = describe(skills, {}, window)
    notes = len("Skills, those that are used most:\n") + len("\n[99 more: use action list to see them]")
    assert len(description) <= min(MAX_CHARS, len(SKILL_TOOL.description) + window * 0.08) + notes
    named = description.count("- s")
    assert named == len(skills) or f"[{len(skills) - named} more" in description


async def test_skill_uses_are_counted_per_tenant_and_expire(redis_server: RedisProcess) -> None:
    async with redis.asyncio.Redis.from_url(redis_server.url) as client:
        uses = SkillUses(client, "d")
        for name in ("alpha", "beta", "alpha"):
            await uses.count("acme", name)
        assert (await uses.of("acme"), await uses.of("rival")) == ({"alpha": 2, "beta": 1}, {})
        assert 0 < await client.ttl(skill_uses_key("d", "acme")) <= USES_TTL_S


@pytest.mark.parametrize("stored_value", [b"x", b"-1"])
async def test_unreadable_skill_uses_are_ignored(redis_server: RedisProcess, stored_value: bytes) -> None:
    async with redis.asyncio.Redis.from_url(redis_server.url) as client:
        await client.hset(skill_uses_key("d", "acme"), "alpha", stored_value)
        assert await SkillUses(client, "d").of("acme") == {}
        redis_server.stop()
        assert await SkillUses(client, "d").of("acme") == {}
        await SkillUses(client, "d").count("acme", "alpha")
