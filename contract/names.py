"""Queues, task names and Redis keys that both sides read."""

import re
from collections.abc import Iterable
from typing import Literal, get_args
from urllib.parse import quote

POOL_WEB = "pool.web"
POOL_TOOLS = "pool.tools"
POOL_QUEUES = {"web": POOL_WEB, "tools": POOL_TOOLS}
"""Pool of a ToolSpec -> queue, for the pools whose calls any of their workers may run. All others run where their
session lives.
"""
CATALOG_POOLS = ("sandbox", "web", "tools")
"""The pools that publish a catalog; of two tools of one name that of the first is taken."""

BUILTIN_TOOLS = frozenset(
    {
        "bash_tool",
        "edit_tool",
        "glob_tool",
        "grep_tool",
        "read_tool",
        "skill_tool",
        "webfetch_tool",
        "websearch_tool",
        "write_tool",
    }
)
"""Names that no tool of an operator may have."""


def deployment_key(deployment: str, name: str) -> str:
    """Return the Redis key `name` of the deployment. Every key that toolcrew names is built here or by tenant_key."""
    return f"toolcrew:{deployment}:{name}"


def tenant_key(deployment: str, tenant: str, name: str) -> str:
    """Return the Redis key `name` of one tenant: a kind, or `<kind>.<id>`, and fixed words after a colon, as in
    `call.c1:events`.

    Two builders never build equal keys, and a pattern of a Redis user (`t:*:call.*`) matches the keys of one kind only,
    whatever tenants, sessions and calls are called: the name of a deployment's key never begins with `t:`, names and
    ids contain no colon and no dot, and the words after the last colon contain no dot."""
    return deployment_key(deployment, f"t:{tenant}:{name}")


def host_queue(host: str, boot: str) -> str:
    """The queue of one incarnation of a host: a rebooted host never eats calls meant for sandboxes it no longer has."""
    return f"host.{host}.{boot}"


def host_prefix(host: str) -> str:
    """What the queues of all incarnations of a host begin with; a host's name has no dot."""
    return f"host.{host}."


def host_of(queue: str) -> str:
    """The host whose queue it is."""
    return queue.split(".")[1] if queue.count(".") >= 2 else queue


def task_name(tool: str) -> str:
    """One Celery task name per tool, so that Flower's charts are per tool. Session verbs keep their own name."""
    return tool if tool.startswith("session.") else f"tool.{tool}"


def catalog_key(deployment: str, pool: str) -> str:
    """What a pool serves; it vanishes with the pool's last worker."""
    return deployment_key(deployment, f"catalog:{pool}")


def catalog_names_key(deployment: str, pool: str) -> str:
    """The names of what a pool served last; they outlive its workers, so that a call can be told whom it misses."""
    return deployment_key(deployment, f"catalog:{pool}:names")


def pool_worker(host: str, boot: str) -> str:
    """One incarnation of a worker without sandboxes: the queue of its control list, and the beginning of its names as a
    holder of calls.
    """
    return f"pool.{host}.{boot}"


def call_key(deployment: str, tenant: str, call_id: str) -> str:
    """The hash of what is known of a call (store/calls.py)."""
    return tenant_key(deployment, tenant, f"call.{call_id}")


def tenant_calls_key(deployment: str, tenant: str) -> str:
    """The sorted set of the tenant's newest calls by the time at which they were published."""
    return tenant_key(deployment, tenant, "calls")


def place_key(deployment: str, tenant: str, session: str) -> str:
    """The hash of where a session lives (contract/session_locations.py)."""
    return tenant_key(deployment, tenant, f"session.{session}:place")


def tenant_sessions_key(deployment: str, tenant: str) -> str:
    """The set of a tenant's open sessions; one whose place has expired is none any more."""
    return tenant_key(deployment, tenant, "places")


def seen_tenants_key(deployment: str) -> str:
    """The sorted set of the tenants that have opened sessions, registered or not, by the Unix time of the last one."""
    return deployment_key(deployment, "seen-tenants")


def kills_key(deployment: str) -> str:
    """The sorted set of the orders of the last minute to end calls, by the Unix time at which each was given
    (orchestrator/dispatch/call_monitor.py).
    """
    return deployment_key(deployment, "kills")


def host_key(deployment: str, queue: str) -> str:
    """The report of one living worker incarnation (contract/hosts.py); gone when the worker is."""
    return deployment_key(deployment, f"host:{queue}")


def hosts_key(deployment: str) -> str:
    """The sorted set of all worker incarnations, by the Unix time of their last report: what the reaper goes
    through.
    """
    return deployment_key(deployment, "hosts")


def tombstone_key(deployment: str, queue: str) -> str:
    """There once an incarnation was given up for lost: whoever finds its own stops under that name."""
    return deployment_key(deployment, f"tombstone:{queue}")


def slots_key(deployment: str, queue: str) -> str:
    """How many calls at a time the living workers of a queue serve together; gone when none lives."""
    return deployment_key(deployment, f"slots:{queue}")


def tenants_key(deployment: str) -> str:
    """The hash of the registered tenants, name to TenantPolicy, and their version under VERSION_FIELD
    (contract/tenancy.py).
    """
    return deployment_key(deployment, "tenants")


def api_keys_key(deployment: str) -> str:
    """The hash of the API keys, key id to its record; never a key itself."""
    return deployment_key(deployment, "api-keys")


def refusals_key(deployment: str) -> str:
    """The hash of how often what was refused at the queue, by reason."""
    return deployment_key(deployment, "refusals")


def runs_prefix(deployment: str) -> str:
    """Return the prefix of the keys of the queue of runs (store/runs.py): `leases` (sorted set, by when they end),
    `delayed` (by when they are due), `batches` (those that have work, by when one was last claimed from), `cancels`."""
    return deployment_key(deployment, "runs:")


def admission_prefix(deployment: str) -> str:
    """What the keys of admission begin with."""
    return deployment_key(deployment, "admission:")


BlobPool = Literal["sandbox", "web"]
"""The workers that read and write a blob: those next to a sandboxd, or those of the kind web. Redis refuses the other
ones.
"""
BLOB_POOLS: tuple[BlobPool, ...] = get_args(BlobPool)


def blob_key(deployment: str, tenant: str, pool: BlobPool, name: str) -> str:
    """Return the key of bytes that are too large or too raw for an envelope; they expire. store/blobs.py builds
    `name`.
    """
    return tenant_key(deployment, tenant, f"blob-{pool}.{name}")


def is_blob_of(key: str, deployment: str, tenant: str, pools: Iterable[BlobPool] = BLOB_POOLS) -> bool:
    """Return True if `key` is a blob key of that tenant and one of these pools: a key from the queue is not trusted."""
    return any(key.startswith(blob_key(deployment, tenant, pool, "")) for pool in pools)


HUB_SHARDS = tuple(f"{shard:02x}" for shard in range(256))
"""What the random id of a hub begins with."""


def result_channel_pattern(hub: str) -> str:
    """The one pub/sub pattern on which a hub hears its results, and those of the few others whose id begins with the
    same two hex digits.

    Not the hub's whole id: Redis's users may subscribe only to patterns that are written out in their rules, so there
    is a fixed number of them.
    """
    return f"celery-task-meta-{hub[:2]}*"


def result_key(task_id: str) -> str:
    return f"celery-task-meta-{task_id}"


def control_queue(queue: str) -> str:
    """The list a host's worker reads at once, however busy its pool is: cancels and closes."""
    return f"{queue}.control"


def switches_key(deployment: str) -> str:
    """The hash of the tools that are turned off, name to Switch; one that is not in it is on."""
    return deployment_key(deployment, "switches")


def installed_skills_key(deployment: str, tenant: str) -> str:
    """The hash of the skills that are installed for a tenant, name to InstalledSkill."""
    return tenant_key(deployment, tenant, "skills")


def skill_bundle_key(deployment: str, tenant: str, digest: str) -> str:
    """The files of a skill that is installed for a tenant, compressed (workers/skills/archives.py)."""
    return tenant_key(deployment, tenant, f"skill-bundle.{digest}")


def skill_uses_key(deployment: str, tenant: str) -> str:
    """The hash of how often a tenant's runs have used each skill; it expires when they have used none for long."""
    return tenant_key(deployment, tenant, "skill-uses")


def session_state_key(deployment: str, tenant: str, session: str) -> str:
    """The hash of what a session's tools remember between calls; it expires when none of them has used it for a day."""
    return tenant_key(deployment, tenant, f"session.{session}:state")


def audit_key(deployment: str) -> str:
    """The stream of what operators and administrators changed (store/audit.py)."""
    return deployment_key(deployment, "audit")


def tenant_audit_key(deployment: str, tenant: str) -> str:
    """The stream of what the holders of a tenant's keys changed."""
    return tenant_key(deployment, tenant, "audit")


_SHOWN_CALL = re.compile(r"call ([A-Za-z0-9_-]{1,64})(?:, (?:tenant|session|run) [A-Za-z0-9_-]{1,64}){0,3}")


def flower_task_url(base: str, task_id: str) -> str:
    """Flower's page of a task. `base`: TOOLCREW_FLOWER_URL."""
    return f"{base.rstrip('/')}/task/{quote(task_id, safe='')}"


def call_page_url(base: str, call_id: str) -> str:
    """The page of a call. `base`: TOOLCREW_PAGE_URL."""
    return f"{base.rstrip('/')}/calls/{quote(call_id, safe='')}"


def show_call(call_id: str, tenant: str, session: str | None, run: str | None) -> str:
    """Return the text that Flower shows in place of a task's arguments."""
    parts = {"call": call_id, "tenant": tenant, "session": session, "run": run}
    return ", ".join(f"{name} {value}" for name, value in parts.items() if value)


def parse_shown_call(shown: object) -> str | None:
    """Return the id of the call from the text of `show_call`; None for any other text. Every process that may send
    events can write any text there.
    """
    found = _SHOWN_CALL.fullmatch(shown) if isinstance(shown, str) else None
    return found[1] if found else None
