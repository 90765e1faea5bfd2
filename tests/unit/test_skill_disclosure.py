"""The skills in a model's prompt: all skills while there is room, otherwise the most used skills."""

import pytest
import redis.asyncio
from hypothesis import given
from hypothesis import strategies as st

from contract.names import skill_uses_key
from contract.specs import SkillSummary
from orchestrator.runs.run_parts import MAX_CHARS, disclose
from store.skills import USES_TTL_S, SkillUses
from tests.builders import build_spec
from tests.conftest import RedisProcess

SKILL_TOOL = build_spec("skill_tool", description="Use a skill.")


def build_skill(name: str, description: str = "Does it.") -> SkillSummary:
    return SkillSummary(name=name, description=description, digest="0" * 64, files=1, bytes=1)


def describe(skills: list[SkillSummary], uses: dict[str, int] | None = None, window: int | None = None) -> str:
    other, spec = disclose([build_spec("echo"), SKILL_TOOL], skills, uses or {}, window)
    assert other == build_spec("echo")
    return spec.description


def test_those_that_are_used_least_are_left_out_and_it_says_so() -> None:
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
def test_the_list_of_skills_is_bounded(sizes: list[tuple[int, int]], window: int) -> None:
    skills = [build_skill(f"s{number}", "x" * size) for number, size in sizes]
    description = describe(skills, {}, window)
    notes = len("Skills, those that are used most:\n") + len("\n[99 more: use action list to see them]")
    assert len(description) <= min(MAX_CHARS, len(SKILL_TOOL.description) + window * 0.08) + notes
    named = description.count("- s")
    assert named == len(skills) or f"[{len(skills) - named} more" in description


async def test_uses_are_counted_by_tenant_and_forgotten_in_the_end(redis_server: RedisProcess) -> None:
    async with redis.asyncio.Redis.from_url(redis_server.url) as client:
        uses = SkillUses(client, "d")
        for name in ("alpha", "beta", "alpha"):
            await uses.note("acme", name)
        assert (await uses.of("acme"), await uses.of("rival")) == ({"alpha": 2, "beta": 1}, {})
        assert 0 < await client.ttl(skill_uses_key("d", "acme")) <= USES_TTL_S


@pytest.mark.parametrize("junk", [b"x", b"-1"])
async def test_counts_that_cannot_be_had_are_none(redis_server: RedisProcess, junk: bytes) -> None:
    async with redis.asyncio.Redis.from_url(redis_server.url) as client:
        await client.hset(skill_uses_key("d", "acme"), "alpha", junk)
        assert await SkillUses(client, "d").of("acme") == {}
        redis_server.stop()
        assert await SkillUses(client, "d").of("acme") == {}
        await SkillUses(client, "d").note("acme", "alpha")
