"""Where a tenant's own skills are looked at and changed: what is installed is examined first, by a program of its
own.
"""

import asyncio
import tempfile
from collections.abc import Mapping
from pathlib import Path

from orchestrator.sdk.skill_folders import examine_skill
from store.skills import InstalledSkill, SkillStore


class SkillDesk:
    """Of one tenant."""

    def __init__(self, skills: SkillStore, tenant: str) -> None:
        self._skills, self.tenant = skills, tenant

    async def all(self) -> Mapping[str, InstalledSkill]:
        """By name. Raises BrokerUnavailable."""
        return await self._skills.all(self.tenant)

    async def install(self, path: Path, *, replace: bool = False) -> InstalledSkill:
        """A folder or a .zip file; runs that begin from now on have it.

        Raises SkillBroken with what makes it none, ToolFailure as SkillStore.install, ConfigError, BrokerUnavailable.
        """
        with tempfile.TemporaryDirectory(prefix="toolcrew-skill-") as folder:
            kept = Path(folder) / "bundle"
            examined = await asyncio.to_thread(examine_skill, path, owner=self.tenant, as_bundle=kept)
            bundle = await asyncio.to_thread(kept.read_bytes)
            return await self._skills.install(self.tenant, examined.skill, bundle, examined.tool, replace=replace)

    async def remove(self, name: str) -> bool:
        """Whether there was such a skill; what runs with it goes on. Raises BrokerUnavailable."""
        return await self._skills.remove(self.tenant, name)
