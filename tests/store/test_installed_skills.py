"""Skills that are installed for tenants: bounded, changed atomically, and read by workers only for their own tenant."""

import zlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import redis
import redis.asyncio

from tests.conftest import RedisProcess
from tests.support.records.builders import KEY
from tests.support.records.skill_harness import write_skill
from toolcrew.contract.errors import BrokerUnavailable, ErrorCode, ToolFailure
from toolcrew.contract.names import installed_skills_key, skill_bundle_key, tenant_audit_key
from toolcrew.contract.signing import SigningKeys
from toolcrew.contract.specs import SkillSummary
from toolcrew.contract.tenancy import TenantPolicy
from toolcrew.orchestrator.sdk.skill_installer import SkillInstaller
from toolcrew.store import skills as installed_skills
from toolcrew.store.audit import Actor
from toolcrew.store.skills import SkillStore
from toolcrew.store.tenants import RedisTenants
from toolcrew.workers.skills.installed import MAX_CACHED_BYTES
from toolcrew.workers.skills.installed import InstalledSkillCache as WorkersSkills

ACTOR = Actor(key="k1", role="tenant", name="ann", tenant="acme")


@dataclass
class Harness:
    server: RedisProcess
    client: "redis.asyncio.Redis"
    skills: SkillStore
    worker: WorkersSkills

    def installer(self, tenant: str = "acme") -> SkillInstaller:
        return SkillInstaller(self.skills.acting_as(ACTOR), tenant)

    async def bundles(self) -> int:
        return len([key async for key in self.client.scan_iter("toolcrew:d:t:*:skill-bundle.*")])


@pytest.fixture
async def harness(redis_server: RedisProcess) -> AsyncIterator[Harness]:
    async with redis.asyncio.Redis.from_url(redis_server.url, socket_timeout=2) as client:
        worker = WorkersSkills(redis.Redis.from_url(redis_server.url, socket_timeout=2), "d", KEY)
        yield Harness(redis_server, client, SkillStore(client, "d", KEY), worker)


def summary(name: str, digest: str = "0" * 64) -> SkillSummary:
    return SkillSummary(name=name, description="Does it.", digest=digest, files=1, bytes=1)


async def test_worker_finds_an_installed_skill_unchanged(harness: Harness, tmp_path: Path) -> None:
    folder = write_skill(tmp_path, "echo", files={"scripts/a.py": "#!/bin/sh\n", "data/x": b"\0"})
    installed = await harness.installer().install(folder)
    skill = harness.worker.find("acme", "echo")
    assert (skill.summary, skill.owner, skill.body) == (installed.skill, "acme", "Do it.")
    assert skill.source.read("data/x") == b"\0"
    assert harness.worker.find("acme", "echo") is skill, "it is kept while it is used"
    assert list(harness.worker.all("acme")) == list(await harness.installer().all()) == ["echo"]
    [(_, entry)] = await harness.client.xrange(tenant_audit_key("d", "acme"))
    assert b'"skill.install"' in entry[b"entry"]
    assert b'"ann"' in entry[b"entry"]


async def test_tenant_cannot_see_skills_of_another_tenant(harness: Harness, tmp_path: Path) -> None:
    await harness.installer("acme").install(write_skill(tmp_path, "echo"))
    for tenant in ("rival", "acm", "acme:", "acme:x", ""):
        assert harness.worker.find(tenant, "echo") is None
        assert harness.worker.all(tenant) == {}
        assert await harness.installer(tenant).all() == {}


async def test_replaced_or_removed_skill_leaves_no_bundle(harness: Harness, tmp_path: Path) -> None:
    first = await harness.installer().install(write_skill(tmp_path / "1", "echo"))
    with pytest.raises(ToolFailure, match="already has a skill echo"):
        await harness.installer().install(write_skill(tmp_path / "2", "echo", body="other"))
    second = await harness.installer().install(tmp_path / "2" / "echo", replace=True)
    assert first.skill.digest != second.skill.digest
    assert await harness.bundles() == 1
    found = harness.worker.find("acme", "echo")
    assert found.body == "other"
    await harness.installer().install(tmp_path / "2" / "echo", replace=True)
    assert await harness.bundles() == 1
    assert await harness.installer().remove("echo")
    assert not await harness.installer().remove("echo")
    assert (await harness.bundles(), harness.worker.find("acme", "echo")) == (0, None)


async def test_number_and_bytes_of_installed_skills_are_limited(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(installed_skills, "MAX_INSTALLED", 2)
    monkeypatch.setattr(installed_skills, "MAX_INSTALLED_BYTES", 100)
    await harness.skills.install("acme", summary("a", "a" * 64), b"x" * 50)
    for name, size in (("b", 51), ("b", 101)):
        with pytest.raises(ToolFailure, match="would take more than") as refused:
            await harness.skills.install("acme", summary(name, "b" * 64), b"x" * size)
        assert refused.value.code is ErrorCode.QUOTA_EXCEEDED
    await harness.skills.install("acme", summary("b", "b" * 64), b"x" * 50)
    with pytest.raises(ToolFailure, match="has reached its limit of"):
        await harness.skills.install("acme", summary("c", "c" * 64), b"x")
    await harness.skills.install("acme", summary("b", "c" * 64), b"x", replace=True)
    assert await harness.bundles() == 2
    await harness.skills.install("rival", summary("c", "c" * 64), b"x" * 100)


async def test_changed_skill_bundle_is_refused(harness: Harness, tmp_path: Path) -> None:
    installed = await harness.installer().install(write_skill(tmp_path, "echo"))
    other = await harness.installer().install(write_skill(tmp_path, "other", body="hostile"))
    key = skill_bundle_key("d", "acme", installed.skill.digest)
    for content in (
        await harness.client.get(skill_bundle_key("d", "acme", other.skill.digest)),
        zlib.compress(b"x"),
        b"junk",
        None,
    ):
        await (harness.client.set(key, content) if content is not None else harness.client.delete(key))
        with pytest.raises(ToolFailure, match="install it again") as refused:
            harness.worker.find("acme", "echo")
        assert refused.value.code is ErrorCode.STALE_FILE


async def test_forged_copied_or_changed_skill_record_is_refused(harness: Harness, tmp_path: Path) -> None:
    await harness.installer("rival").install(write_skill(tmp_path, "echo"))
    await harness.installer().install(write_skill(tmp_path, "good"))
    await harness.installer().install(write_skill(tmp_path, "big"))
    foreign_record = await harness.client.hget(installed_skills_key("d", "rival"), "echo")
    changed = (await harness.client.hget(installed_skills_key("d", "acme"), "big")).replace(b"Does", b"Did ")
    plain = foreign_record.split(b".", 2)[2]
    other_secret = SigningKeys.of("another-secret").seal("skill acme echo", plain.decode())
    own = await harness.client.hget(installed_skills_key("d", "acme"), "good")
    for name, forged in (
        ("echo", foreign_record),
        ("echo", plain),
        ("echo", other_secret),
        ("echo", own),
        ("big", changed),
        ("odd", b"{}"),
    ):
        await harness.client.hset(installed_skills_key("d", "acme"), name, forged)
        assert name not in harness.worker.all("acme")
        assert name not in await harness.installer().all()
        with pytest.raises(
            ToolFailure,
            match=f"the skill {name} of tenant acme cannot be verified, so it is not used: install it again",
        ) as refused:
            harness.worker.find("acme", name)
        assert refused.value.code is ErrorCode.STALE_FILE
    assert harness.worker.find("acme", "good") is not None


async def test_skill_cache_of_a_worker_is_bounded(harness: Harness, tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        await harness.installer().install(write_skill(tmp_path, name, files={"big": bytes(MAX_CACHED_BYTES // 2)}))
    first = harness.worker.find("acme", "a")
    harness.worker.find("acme", "b")
    harness.worker.find("acme", "c")
    reloaded = harness.worker.find("acme", "a")
    assert reloaded is not first
    assert reloaded is not None
    assert reloaded == harness.worker.find("acme", "a")


async def test_removing_a_tenant_removes_its_skills(harness: Harness, tmp_path: Path) -> None:
    tenants = RedisTenants(harness.client, "d", KEY)
    for name in ("acme", "rival"):
        await tenants.add(name, TenantPolicy())
        await harness.installer(name).install(write_skill(tmp_path / name, "echo"))
    await tenants.remove("acme")
    assert (
        await harness.installer("acme").all(),
        list(await harness.installer("rival").all()),
        await harness.bundles(),
    ) == ({}, ["echo"], 1)


async def test_skill_for_a_removed_tenant_is_not_installed(harness: Harness, tmp_path: Path) -> None:
    tenants = RedisTenants(harness.client, "d", KEY)
    for name in ("acme", "rival"):
        await tenants.add(name, TenantPolicy())
    await tenants.remove("acme")
    with pytest.raises(ToolFailure) as refused:
        await harness.installer("acme").install(write_skill(tmp_path, "echo"))
    assert refused.value.code is ErrorCode.UNKNOWN_TENANT
    assert (await harness.installer("acme").all(), await harness.bundles()) == ({}, 0)
    await harness.installer("rival").install(tmp_path / "echo")
    await harness.installer("default").install(tmp_path / "echo")


async def test_invalid_skill_record_does_not_block_install_list_or_remove(harness: Harness, tmp_path: Path) -> None:
    tenants = RedisTenants(harness.client, "d", KEY)
    await tenants.add("acme", TenantPolicy())
    for name, invalid in (("bad", b"x"), ("odd", b"[1]"), ("half", b'{"skill": 3}')):
        await harness.client.hset(installed_skills_key("d", "acme"), name, invalid)
    await harness.installer().install(write_skill(tmp_path, "echo"))
    await harness.installer().install(tmp_path / "echo", replace=True)
    assert list(await harness.installer().all()) == ["echo"]
    assert await harness.installer().remove("bad")
    await tenants.remove("acme")
    assert await harness.bundles() == 0


async def test_skill_operations_without_redis_raise_broker_unavailable(harness: Harness) -> None:
    harness.server.stop()
    for call in (
        harness.installer().all(),
        harness.installer().remove("a"),
        harness.skills.install("acme", summary("a"), b"x"),
    ):
        with pytest.raises(BrokerUnavailable):
            await call
    for ask in (lambda: harness.worker.all("acme"), lambda: harness.worker.find("acme", "a")):
        with pytest.raises(BrokerUnavailable):
            ask()
