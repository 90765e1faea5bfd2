"""Disk use of the skills of a host: no tenant uses the room of another tenant."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from contract.errors import ErrorCode, SandboxUnavailable, ToolFailure
from tests.fake_engine import FakeEngine
from tests.skill_harness import write_skill
from workers.sandboxd import skill_store
from workers.sandboxd.skill_store import SkillStore
from workers.skills.loader import load_skill, pack_skill


async def put(store: SkillStore, root: Path, scope: str, name: str) -> str:
    skill = load_skill(write_skill(root, name, files={"big": bytes(40_000)}))

    async def chunks() -> AsyncIterator[bytes]:
        with pack_skill(skill) as packed:
            yield packed.read()

    return await store.place(scope, skill.summary.digest, chunks())


async def test_a_tenant_evicts_only_its_own_skills(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(skill_store, "MAX_TENANT_BYTES", 100_000)
    monkeypatch.setattr(skill_store, "MAX_TOTAL_BYTES", 200_000)
    store = SkillStore(FakeEngine(), "default", {})  # type: ignore[arg-type]
    first = await put(store, tmp_path / "1", "acme", "a")
    with pytest.raises(ToolFailure, match="skills that tenant acme has used") as refused:
        await put(store, tmp_path / "2", "acme", "b")
    assert refused.value.code is ErrorCode.QUOTA_EXCEEDED
    assert store.find("acme", load_skill(tmp_path / "1" / "a").summary.digest) == first
    await put(store, tmp_path / "3", "rival", "c")
    await put(store, tmp_path / "4", "", "d")
    with pytest.raises(SandboxUnavailable, match="restart sandboxd"):
        await put(store, tmp_path / "5", "", "e")
