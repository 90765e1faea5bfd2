"""The skills that are installed for tenants, as a worker gets them: records from Redis with each call, bundles once while they are used."""

import hashlib
import threading
from collections import OrderedDict
from typing import Any

import structlog

from contract.errors import ConfigError, ErrorCode, ToolFailure
from contract.installed_skills import InstalledSkill, parse_installed
from contract.names import installed_skills_key, skill_bundle_key
from contract.signing import SigningKeys
from contract.skills import SkillBroken
from store.connection import SyncRedis, broker_errors
from workers.skills.archives import expand_bundle, load_members
from workers.skills.loader import Skill

log = structlog.get_logger(__name__)

MAX_KEPT_BYTES = 64 * 1024 * 1024
"""Of the files of skills that this process keeps in memory, beside the one that was used last."""


class InstalledSkills:
    """Of one deployment. Whose skills they are is the signed context's to say."""

    def __init__(self, client: SyncRedis, deployment: str, keys: SigningKeys) -> None:
        self._client, self._deployment, self._keys = client, deployment, keys
        self._kept: OrderedDict[tuple[str, str], Skill] = OrderedDict()
        # Calls of a worker may run in threads.
        self._keeping, self._loading = threading.Lock(), threading.Lock()

    def all(self, tenant: str) -> dict[str, InstalledSkill]:
        """Return them by name, in order. One that cannot be verified is logged and left out. Raises BrokerUnavailable."""
        told = self._ask(lambda: self._client.hgetall(installed_skills_key(self._deployment, tenant)))
        found = {name.decode(errors="replace"): text for name, text in sorted(told.items())}
        records = {name: self._parse(tenant, name, text) for name, text in found.items()}
        return {name: record for name, record in records.items() if record is not None}

    def find(self, tenant: str, name: str) -> Skill | None:
        """Return the skill of that name, or None if the tenant has none.

        Raises BrokerUnavailable; ToolFailure if its record cannot be verified or its files are not those of the record.
        """
        text = self._ask(lambda: self._client.hget(installed_skills_key(self._deployment, tenant), name))
        if text is None:
            return None
        try:
            record = parse_installed(self._keys, tenant, name, text)
        except ConfigError as error:
            log.error("installed_skill_unreadable", tenant=tenant, skill=name, error=str(error))
            raise ToolFailure(ErrorCode.STALE_FILE, str(error)) from error
        key = tenant, record.skill.digest
        skill = self._kept.get(key)
        if skill is None:
            # One at a time, however many calls want one: each takes a few times its size.
            with self._loading:
                skill = self._kept.get(key) or self._load(tenant, record)
        self._keep(key, skill)
        return skill

    def _keep(self, key: tuple[str, str], skill: Skill) -> None:
        with self._keeping:
            self._kept[key] = skill
            self._kept.move_to_end(key)
            while len(self._kept) > 1 and sum(kept.summary.bytes for kept in self._kept.values()) > MAX_KEPT_BYTES:
                self._kept.popitem(last=False)

    def _load(self, tenant: str, record: InstalledSkill) -> Skill:
        name, digest = record.skill.name, record.skill.digest
        data = self._ask(lambda: self._client.get(skill_bundle_key(self._deployment, tenant, digest)))
        try:
            if data is None:
                raise SkillBroken("its files are gone from Redis")
            # Before anything reads them: another program may have written them.
            if hashlib.sha256(data).hexdigest() != record.bundle_sha256:
                raise SkillBroken("its files are not those that were installed")
            skill = load_members(f"installed skill of tenant {tenant}", name, expand_bundle(data), owner=tenant)
        except SkillBroken as broken:
            log.error("installed_skill_broken", tenant=tenant, skill=name, error=str(broken))
            raise ToolFailure(
                ErrorCode.STALE_FILE, f"the skill {name} cannot be used ({broken}): whoever installed it has to do so again"
            ) from broken
        return skill

    def _parse(self, tenant: str, name: str, sealed: bytes) -> InstalledSkill | None:
        """Return the record, or None if it cannot be verified, which is logged."""
        try:
            return parse_installed(self._keys, tenant, name, sealed)
        except ConfigError as error:
            log.error("installed_skill_unreadable", tenant=tenant, skill=name, error=str(error))
            return None

    def _ask(self, question: Any) -> Any:
        with broker_errors("the tenant's skills were not read"):
            return question()
