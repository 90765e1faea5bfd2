"""Lists, installs and removes a tenant's own skills. A separate process examines a skill before it is installed."""

import asyncio
import tempfile
from collections.abc import Mapping
from pathlib import Path

from toolcrew.orchestrator.sdk.skill_folders import examine_skill
from toolcrew.store.skills import InstalledSkill, SkillStore


class SkillInstaller:
    """Installer of one tenant's skills."""

    def __init__(self, skills: SkillStore, tenant: str) -> None:
        self._skills = skills
        self.tenant = tenant

    async def all(self) -> Mapping[str, InstalledSkill]:
        """Return the installed skills by name. Raises BrokerUnavailable."""
        return await self._skills.all(self.tenant)

    async def install(self, path: Path, *, replace: bool = False) -> InstalledSkill:
        """Install a skill from a folder or a .zip file; runs that begin later have it.

        Raises SkillBroken with the error of the skill, ConfigError, BrokerUnavailable, and ToolFailure like
        SkillStore.install.
        """
        with tempfile.TemporaryDirectory(prefix="toolcrew-skill-") as folder:
            bundle_path = Path(folder) / "bundle"
            examined = await asyncio.to_thread(examine_skill, path, owner=self.tenant, as_bundle=bundle_path)
            bundle = await asyncio.to_thread(bundle_path.read_bytes)
            return await self._skills.install(self.tenant, examined.skill, bundle, examined.tool, replace=replace)

    async def remove(self, name: str) -> bool:
        """Remove a skill; running calls of it continue. Return whether the skill was installed. Raises
        BrokerUnavailable.
        """
        return await self._skills.remove(self.tenant, name)
