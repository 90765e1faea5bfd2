"""Cache of the skills that are installed for tenants.

Each call reads a skill's record from Redis. The skill's files (its bundle) are loaded once and kept in memory.
"""

import hashlib
import threading
from collections import OrderedDict

import structlog

from toolcrew.contract.errors import ErrorCode, ToolFailure
from toolcrew.contract.signing import SigningKeys
from toolcrew.contract.skills import SkillBroken
from toolcrew.store.connection import SyncRedis
from toolcrew.store.skills import InstalledSkill, WorkerSkillStore
from toolcrew.workers.skills.archives import expand_bundle, load_members
from toolcrew.workers.skills.loader import Skill

log = structlog.get_logger(__name__)

MAX_CACHED_BYTES = 64 * 1024 * 1024
"""Limit of the skills' files in the memory of this process, in bytes. The last used skill is always kept."""


class InstalledSkillCache:
    """Keeps loaded skills in memory, for all tenants of a deployment. The tenant comes from the signed context."""

    def __init__(self, client: SyncRedis, deployment: str, keys: SigningKeys) -> None:
        self._store = WorkerSkillStore(client, deployment, keys)
        self._cache: OrderedDict[tuple[str, str], Skill] = OrderedDict()
        # A lock is needed, because calls of a worker may run in threads.
        self._cache_lock = threading.Lock()
        self._loading = threading.Lock()

    def all(self, tenant: str) -> dict[str, InstalledSkill]:
        """Return the records of a tenant's skills by name, from WorkerSkillStore.all."""
        return self._store.all(tenant)

    def find(self, tenant: str, name: str) -> Skill | None:
        """Return the skill with that name, or None if the tenant has no such skill.

        Raises BrokerUnavailable. Raises ToolFailure: the record cannot be verified, or the files do not match the
        record.
        """
        record = self._store.find(tenant, name)
        if record is None:
            return None
        key = tenant, record.skill.digest
        skill = self._cache.get(key)
        if skill is None:
            # Load one skill at a time, even for many calls: each load needs a few times the skill's size in memory.
            with self._loading:
                skill = self._cache.get(key) or self._load(tenant, record)
        self._add_to_cache(key, skill)
        return skill

    def _add_to_cache(self, key: tuple[str, str], skill: Skill) -> None:
        with self._cache_lock:
            self._cache[key] = skill
            self._cache.move_to_end(key)
            while (
                len(self._cache) > 1 and sum(entry.summary.bytes for entry in self._cache.values()) > MAX_CACHED_BYTES
            ):
                self._cache.popitem(last=False)

    def _load(self, tenant: str, record: InstalledSkill) -> Skill:
        name, data = record.skill.name, self._store.bundle(tenant, record)
        try:
            if data is None:
                raise SkillBroken("its files are no longer in Redis")
            # Check the digest before the files are parsed: another program may have written them.
            if hashlib.sha256(data).hexdigest() != record.bundle_sha256:
                raise SkillBroken("its files differ from the installed ones")
            skill = load_members(f"installed skill of tenant {tenant}", name, expand_bundle(data), owner=tenant)
        except SkillBroken as broken:
            log.error("installed_skill_broken", tenant=tenant, skill=name, error=str(broken))
            raise ToolFailure(
                ErrorCode.STALE_FILE,
                f"the skill {name} cannot be used ({broken}): install it again",
            ) from broken
        return skill
