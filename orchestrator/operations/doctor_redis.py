"""Checks of `toolcrew doctor` for Redis itself: durability, memory and clock."""

import re
import time
from collections.abc import Mapping
from typing import Any

from toolcrew.contract.broker import BrokerSettings
from toolcrew.contract.errors import BrokerUnavailable, ConfigError
from toolcrew.contract.plurals import count
from toolcrew.orchestrator.operations.findings import Report
from toolcrew.store.clock import SKEW_WARNING_S, SharedClock, read_clock
from toolcrew.store.connection import RedisAccessDenied, RedisClient, check_redis, read_server_info
from toolcrew.store.metrics import MetricsStore

OLDEST_VERSION = (6, 2)
FULL_SHARE, CLOSE_SHARE = 0.95, 0.8
"""Shares of `maxmemory`: above the first, Redis is about to refuse writes; above the second, an operator should act."""
SLOW_S = 0.05
_SECTIONS = ("server", "memory", "persistence", "stats", "replication")
_USUAL = ("expired", "repeated")
"""Refusals that load and restarts cause. Other refusals point to a wrong configuration or an attack."""
_MIB = 1024 * 1024


async def examine_redis(client: RedisClient, broker: BrokerSettings, report: Report) -> bool:
    """Check Redis. Return whether the other checks can read the records: Redis answers, and there is a secret to verify
    them. Raises BrokerUnavailable.
    """
    try:
        await check_redis(client, broker)
    except BrokerUnavailable as error:
        report.add("redis", False, str(error))
        return False
    try:
        info = await read_server_info(client, *_SECTIONS)
    except RedisAccessDenied:
        report.add_passed("redis", f"{broker.redis_address()}, user {broker.user or 'default'}")
        report.add_warning(
            "redis",
            "its user may not read the state of memory and persistence",
            "create Redis's users again with `toolcrew config users`",
        )
    else:
        _judge_server(info, broker, report)
        _judge_memory(info, report)
        _judge_persistence(info, report)
    has_secret = _examine_secret(broker, report)
    await _examine_clock(client, report)
    await _examine_refusals(client, broker.deployment, report)
    return has_secret


def _judge_server(info: Mapping[str, Any], broker: BrokerSettings, report: Report) -> None:
    version = str(info.get("redis_version", "?"))
    parts = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if parts < OLDEST_VERSION:
        report.add_failure(
            "redis", f"its version is {version}", "run Redis 6.2 or newer: user rules and scripts need it"
        )
    elif info.get("role") == "slave":
        report.add_failure(
            "redis",
            f"{broker.redis_address()} is a replica, which takes no writes",
            "set TOOLCREW_REDIS_URL to the master or its sentinels",
        )
    else:
        tls = ", TLS" if broker.is_tls else ""
        report.add_passed("redis", f"{broker.redis_address()}, version {version}, user {broker.user or 'default'}{tls}")


def _judge_memory(info: Mapping[str, Any], report: Report) -> None:
    used, limit, policy = (
        int(info.get("used_memory", 0)),
        int(info.get("maxmemory", 0)),
        str(info.get("maxmemory_policy", "?")),
    )
    size = f"{used // _MIB} MiB" + (f" of {limit // _MIB} MiB" if limit else ", no maxmemory")
    if policy != "noeviction":
        report.add_failure(
            "memory",
            f"maxmemory-policy is {policy}: a full Redis would delete calls and results",
            "set maxmemory-policy noeviction",
        )
    elif limit and used >= FULL_SHARE * limit:
        report.add_failure(
            "memory",
            f"Redis has {size}: Redis is about to refuse calls",
            "raise maxmemory, or delete ended batches: they stay in Redis for 30 days (`toolcrew batches delete ID`)",
        )
    elif limit and used >= CLOSE_SHARE * limit:
        report.add_warning("memory", f"Redis has {size}", "raise maxmemory; a full Redis refuses calls")
    else:
        report.add_passed("memory", f"{size}, {policy}")
    if evicted := int(info.get("evicted_keys", 0)):
        report.add_warning(
            "memory",
            f"{count(evicted, 'key was', 'keys were')} evicted since Redis started",
            "calls and runs may be lost: check the failed ones (`toolcrew batches list`)",
        )


def _judge_persistence(info: Mapping[str, Any], report: Report) -> None:
    if info.get("loading"):
        report.add_warning(
            "persistence", "Redis is still loading its data", "wait: it answers no other request until then"
        )
    if info.get("aof_enabled") and info.get("aof_last_write_status", "ok") != "ok":
        report.add_failure(
            "persistence",
            "Redis could not write its append-only file (AOF)",
            "check the free space of its disk, and its log",
        )
    elif info.get("aof_enabled"):
        report.add_passed("persistence", "appendonly")
    else:
        report.add_warning(
            "persistence", "appendonly is off: runs and batches are lost when Redis ends", "set appendonly yes"
        )
    if info.get("rdb_last_bgsave_status", "ok") != "ok":
        report.add_failure(
            "persistence",
            "the last save of Redis failed",
            "check its free disk space and memory, and its log",
        )


def _examine_secret(broker: BrokerSettings, report: Report) -> bool:
    try:
        broker.signing_keys()
    except ConfigError as error:
        report.add("secret", False, str(error))
        return False
    source = "TOOLCREW_SECRET" if broker.secret is not None else "Redis's password"
    if broker.secrets_previous:
        report.add_warning(
            "secret",
            f"calls are signed with {source}; {len(broker.secrets_previous)} older secrets are still accepted",
            "unset TOOLCREW_SECRETS_PREVIOUS everywhere after every process has the new secret",
        )
    else:
        report.add_passed(
            "secret", f"calls are signed with {source}; --deep proves that every host has the same secret"
        )
    return True


async def _examine_clock(client: RedisClient, report: Report) -> None:
    began = time.monotonic()
    now = await read_clock(client)
    took_s = time.monotonic() - began
    behind_s = SharedClock().learn(now - took_s / 2)
    if abs(behind_s) >= SKEW_WARNING_S:
        direction = "behind" if behind_s > 0 else "ahead of"
        report.add_warning(
            "clock",
            f"this host's clock is {abs(behind_s):.1f} s {direction} Redis's",
            "correct it, or use NTP; calls use Redis's clock",
        )
    else:
        report.add_passed("clock", f"this host's clock differs from Redis's by {abs(behind_s):.1f} s")
    if took_s >= SLOW_S:
        report.add_warning(
            "redis",
            f"it answered after {took_s * 1000:.0f} ms",
            "move Redis closer, or give it its own processor: each call makes several requests",
        )


async def _examine_refusals(client: RedisClient, deployment: str, report: Report) -> None:
    counts = await MetricsStore(client, deployment).read_refusals()
    refusals = ", ".join(f"{reason}: {count}" for reason, count in sorted(counts.items()) if reason not in _USUAL)
    if refusals:
        report.add_warning(
            "secret",
            f"workers have refused messages ({refusals})",
            "use the same TOOLCREW_SECRET and release on both sides; otherwise another program writes to the queues "
            "(docs/security.md)",
        )
