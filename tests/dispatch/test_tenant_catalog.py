"""The tools and skills of a tenant, and the precedence between equal names."""

from collections.abc import AsyncIterator, Mapping

import pytest
import redis.asyncio

from tests.conftest import RedisProcess
from tests.support.records.builders import KEY, build_spec
from toolcrew.contract.errors import ConfigError, ToolFailure
from toolcrew.contract.specs import SkillSummary, ToolSpec
from toolcrew.orchestrator.dispatch.tenant_catalog import Offer, TenantCatalog
from toolcrew.store.skills import SkillStore


class Workers:
    """The tools that workers publish. `lost`: names of tools whose workers are away."""

    def __init__(self, *specs: ToolSpec, skills: tuple[str, ...] = (), lost: tuple[str, ...] = ()) -> None:
        self._specs = specs
        self._skills = tuple(summary(name) for name in skills)
        self._lost = lost

    async def specs(self) -> tuple[ToolSpec, ...]:
        return self._specs

    async def skills(self) -> tuple[SkillSummary, ...]:
        return self._skills

    def explain_missing(self, name: str) -> str | None:
        return "start one" if name in self._lost else None


def summary(name: str) -> SkillSummary:
    return SkillSummary(name=name, description=f"Does {name}.", digest="0" * 64, files=1, bytes=1)


def spec(name: str, **fields: object) -> ToolSpec:
    return build_spec(name).model_copy(update=fields)


WORKERS = Workers(
    spec("skill_tool"),
    spec("read_tool"),
    spec("mcp__git__log"),
    spec("late", description="the workers' skill"),
    spec("ours", pool="tools"),
    spec("rivals", pool="tools", tenants=("rival",)),
    spec("session.close", audience="session"),
    skills=("late", "mcp__git__log", "plain"),
    lost=("away",),
)
NAMES = ("new", "late", "plain", "read_tool", "mcp__git__log", "mcp__new", "ours", "rivals", "away")


@pytest.fixture
async def installed(redis_server: RedisProcess) -> AsyncIterator[SkillStore]:
    async with redis.asyncio.Redis.from_url(redis_server.url, socket_timeout=2) as client:
        yield SkillStore(client, "d", KEY)


async def install(installed: SkillStore, names: Mapping[str, bool]) -> None:
    """`names`: with whether they are tools, by their sidecars."""
    for name, is_tool in names.items():
        await installed.install(
            "acme", summary(name), b"bundle", spec(name, description="the tenant's") if is_tool else None
        )


async def find(catalog: TenantCatalog, name: str, tenant: str) -> ToolSpec | None:
    try:
        return await catalog.find(name, tenant)
    except (ToolFailure, ConfigError):
        return None


def describe_offer(offer: Offer, name: str) -> tuple[str | bool, ...]:
    return tuple(offer.describe(name).values())


async def test_installed_skill_becomes_a_tool_if_no_other_tool_has_its_name(installed: SkillStore) -> None:
    await install(installed, dict.fromkeys(NAMES, True))
    catalog = TenantCatalog(WORKERS, installed)
    offer = await catalog.of("acme")
    installed_tools = {tool.name for tool in offer.tools if tool.is_installed_skill}
    assert installed_tools == {"new", "late", "plain", "rivals"}
    for name in NAMES:
        found_spec = await find(catalog, name, "acme")
        assert found_spec == next((tool for tool in offer.tools if tool.name == name), None), name
    assert [describe_offer(offer, name) for name in ("new", "late", "ours", "away")] == [
        ("tenant", "yes", False),
        ("tenant", "yes", True),
        ("tenant", "name taken", False),
        ("tenant", "name taken", False),
    ]
    rival_offer = await catalog.of("rival")
    assert not any(tool.is_installed_skill for tool in rival_offer.tools)
    assert describe_offer(rival_offer, "late") == ("system", "yes", False)
    assert describe_offer(rival_offer, "plain") == ("system", "no", False)
    assert [skill.name for skill in rival_offer.skills] == ["late", "mcp__git__log", "plain"]


async def test_installed_skill_without_a_tool_hides_the_worker_skill_tool(installed: SkillStore) -> None:
    await install(installed, {"late": False, "ours": False})
    catalog = TenantCatalog(WORKERS, installed)
    offer = await catalog.of("acme")
    assert {"late", "ours"} & {tool.name for tool in offer.tools} == {"ours"}
    assert (await find(catalog, "late", "acme"), describe_offer(offer, "late")) == (None, ("tenant", "no", True))
    assert await find(catalog, "ours", "acme") is not None
    assert await find(catalog, "late", "rival") is not None


async def test_installed_skills_are_no_tools_without_skill_tool(installed: SkillStore) -> None:
    await install(installed, {"new": True})
    catalog = TenantCatalog(Workers(spec("read_tool")), installed)
    assert [tool.name for tool in (await catalog.of("acme")).tools] == ["read_tool"]
    assert await find(catalog, "new", "acme") is None
