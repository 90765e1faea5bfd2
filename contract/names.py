"""Names of queues, Celery tasks and Redis keys that orchestrators and workers share."""

import re
from collections.abc import Iterable
from typing import Literal, get_args
from urllib.parse import quote

POOL_WEB = "pool.web"
POOL_TOOLS = "pool.tools"
POOL_QUEUES = {"web": POOL_WEB, "tools": POOL_TOOLS}
"""Name of a pool -> its queue, for pools in which any worker may run any call. All other calls run on the host of their
session.
"""
CATALOG_POOLS = ("sandbox", "web", "tools")
"""Pools that publish a catalog. If two pools have a tool of the same name, the first pool in this order wins."""

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
"""Names that are reserved: a custom tool cannot have them."""


def deployment_key(deployment: str, name: str) -> str:
    """Return the Redis key `name` of the deployment. This function and tenant_key build every key of toolcrew."""
    return f"toolcrew:{deployment}:{name}"


def tenant_key(deployment: str, tenant: str, name: str) -> str:
    """Return the Redis key `name` of one tenant, such as `call.c1:events`. A name is a kind (`call`), then a dot and an
    id if there are several (`c1`), then fixed words after a colon if the record has several keys (`events`).

    Two functions of this module never return equal keys. A pattern of a Redis user (`t:*:call.*`) matches the keys of
    one kind only, for any names of tenants, sessions and calls. Three rules ensure this. The name of a deployment's key
    never begins with `t:`. Names and ids contain no colon and no dot. The words after the last colon contain no dot.
    """
    return deployment_key(deployment, f"t:{tenant}:{name}")


HOST_QUEUES = "host."
"""Prefix of the queues of all hosts with sandboxes."""


def host_queue(host: str, boot: str) -> str:
    """Return the queue of one incarnation of a host: its worker between two boots. A rebooted host gets a new queue, so
    it never receives calls for sandboxes that it has lost.
    """
    return f"{host_prefix(host)}{boot}"


def sandboxd_queue(queue: str) -> str:
    """Return the queue of the first worker at the same boot of sandboxd. The queue of the second worker ends with
    `.2`.
    """
    return ".".join(queue.split(".")[:3])


def stream_gateway_key(deployment: str, queue: str) -> str:
    """Return the key of the record of the stream gateway of a sandboxd (contract/stream_gateways.py). `queue`: of
    `sandboxd_queue`.
    """
    return deployment_key(deployment, f"stream-gateway:{queue}")


def host_prefix(host: str) -> str:
    """Return the prefix of the queues of all incarnations of a host. A host's name contains no dot."""
    return f"{HOST_QUEUES}{host}."


def host_of(queue: str) -> str:
    """Return the host that the queue belongs to."""
    return queue.split(".")[1] if queue.count(".") >= 2 else queue


def task_name(tool: str) -> str:
    """Return the Celery task name of a tool. Each tool has its own task name, so that Flower shows charts per tool. A
    session verb (a call of the SDK, such as `session.open`) is its own task name.
    """
    return tool if tool.startswith("session.") else f"tool.{tool}"


def catalog_key(deployment: str, pool: str) -> str:
    """Return the key of a pool's catalog: the tools that its workers serve. The key expires with the pool's last
    worker.
    """
    return deployment_key(deployment, f"catalog:{pool}")


def catalog_names_key(deployment: str, pool: str) -> str:
    """Return the key of the names of the tools that a pool offered most recently. The key remains after the last worker
    has stopped, so that an error message can name the pool that does not run.
    """
    return deployment_key(deployment, f"catalog:{pool}:names")


def pool_worker(host: str, boot: str) -> str:
    """Return the name of one incarnation of a worker without sandboxes. The worker's control list has the same name.
    The names under which the worker claims calls begin with it.
    """
    return f"pool.{host}.{boot}"


def call_key(deployment: str, tenant: str, call_id: str) -> str:
    """Return the key of the hash with a call's state (store/call_records.py)."""
    return tenant_key(deployment, tenant, f"call.{call_id}")


def run_key(deployment: str, tenant: str, run: str) -> str:
    """Return the key of the hash of a run (store/stored_runs.py)."""
    return tenant_key(deployment, tenant, f"run.{run}")


def tenant_calls_key(deployment: str, tenant: str) -> str:
    """Return the key of the sorted set of the tenant's newest calls, by time of publication."""
    return tenant_key(deployment, tenant, "calls")


def location_key(deployment: str, tenant: str, session: str) -> str:
    """Return the key of the hash with a session's location (contract/session_locations.py)."""
    return tenant_key(deployment, tenant, f"session.{session}:place")


def session_facts_key(deployment: str, tenant: str, session: str) -> str:
    """Return the key of a session's facts: the JSON that its host reported when it opened the session. A program that
    attaches to the session reads the facts.
    """
    return tenant_key(deployment, tenant, f"session.{session}:facts")


def open_sessions_key(deployment: str) -> str:
    """Return the key of the sorted set of open sessions of all tenants: `<tenant>|<session>` by the microsecond of the
    opening. Some of the sessions may have expired.
    """
    return deployment_key(deployment, "open-sessions")


def tenant_open_sessions_key(deployment: str, tenant: str) -> str:
    """Return the key of the sorted set of a tenant's open sessions: session names by the microsecond of the opening."""
    return tenant_key(deployment, tenant, "open-sessions")


def tenant_sessions_key(deployment: str, tenant: str) -> str:
    """Return the key of the set of a tenant's open sessions. A session whose location has expired is no longer open."""
    return tenant_key(deployment, tenant, "places")


def active_tenants_key(deployment: str) -> str:
    """Return the key of the sorted set of tenants that have opened sessions, by the Unix time of the last session. The
    set includes tenants that are not registered.
    """
    return deployment_key(deployment, "seen-tenants")


def kills_key(deployment: str) -> str:
    """Return the key of the sorted set of the orders of the last minute to kill calls, by the Unix time of each order
    (orchestrator/dispatch/call_monitor.py).
    """
    return deployment_key(deployment, "kills")


def host_key(deployment: str, queue: str) -> str:
    """Return the key of the report of one live worker incarnation (contract/hosts.py). The key expires after the worker
    stops.
    """
    return deployment_key(deployment, f"host:{queue}")


def hosts_key(deployment: str) -> str:
    """Return the key of the sorted set of all worker incarnations, by the Unix time of their last report. The reaper,
    which cleans up after lost workers, reads the set to find them.
    """
    return deployment_key(deployment, "hosts")


def tombstone_key(deployment: str, queue: str) -> str:
    """Return the key that marks an incarnation as lost. A worker that finds its own tombstone stops using that name."""
    return deployment_key(deployment, f"tombstone:{queue}")


def slots_key(deployment: str, queue: str) -> str:
    """Return the key of the number of concurrent calls that all live workers of a queue serve. The key expires with the
    last worker.
    """
    return deployment_key(deployment, f"slots:{queue}")


def tenants_key(deployment: str) -> str:
    """Return the key of the hash of the registered tenants: name -> TenantPolicy, and the version under VERSION_FIELD
    (contract/tenancy.py).
    """
    return deployment_key(deployment, "tenants")


def api_keys_key(deployment: str) -> str:
    """Return the key of the hash of the API keys: key id -> record. The hash never contains an API key itself."""
    return deployment_key(deployment, "api-keys")


def refusals_key(deployment: str) -> str:
    """Return the key of the hash of refused queue messages: reason -> count."""
    return deployment_key(deployment, "refusals")


def runs_prefix(deployment: str) -> str:
    """Return the prefix of the keys of the queue of runs (store/run_queue.py).

    The keys are: `leases` (sorted set of claimed runs, by the end of each lease), `delayed` (sorted set of runs, by the
    time at which each is due), `batches` (sorted set of batches with waiting runs, by the time of the last claim), and
    `cancels` (runs that must be cancelled).
    """
    return deployment_key(deployment, "runs:")


def admission_prefix(deployment: str) -> str:
    """Return the prefix of the keys of admission, the part of toolcrew that divides the workers' slots among the
    tenants (store/slots.py).
    """
    return deployment_key(deployment, "admission:")


BlobPool = Literal["sandbox", "web"]
"""Kind of worker that reads and writes a blob: workers next to a sandboxd, or web workers. Redis denies access to the
other kind.
"""
BLOB_POOLS: tuple[BlobPool, ...] = get_args(BlobPool)


def blob_key(deployment: str, tenant: str, pool: BlobPool, name: str) -> str:
    """Return the key of binary or large data that does not go into an envelope. The key expires. store/blobs.py builds
    `name`.
    """
    return tenant_key(deployment, tenant, f"blob-{pool}.{name}")


def is_blob_of(key: str, deployment: str, tenant: str, pools: Iterable[BlobPool] = BLOB_POOLS) -> bool:
    """Return whether `key` is a blob key of that tenant and one of these pools. Keys from a queue are not trusted."""
    return any(key.startswith(blob_key(deployment, tenant, pool, "")) for pool in pools)


HUB_SHARDS = tuple(f"{shard:02x}" for shard in range(256))
"""Possible first two characters of the random id of a ResultHub, which receives the results of calls
(store/call_messages.py).
"""


def result_channel_pattern(hub: str) -> str:
    """Return the pub/sub pattern on which a ResultHub receives the results of its calls.

    The pattern also matches the few hubs whose id begins with the same two hex digits. A Redis user can subscribe only
    to patterns that its rules list, so the number of patterns must be fixed.
    """
    return f"celery-task-meta-{hub[:2]}*"


def result_key(task_id: str) -> str:
    return f"celery-task-meta-{task_id}"


def control_queue(queue: str) -> str:
    """Return the key of the list of orders to cancel calls and close sessions. A host's worker reads the list even
    while its pool is busy.
    """
    return f"{queue}.control"


def switches_key(deployment: str) -> str:
    """Return the key of the hash of disabled tools: name -> Switch. A tool that is not in the hash is enabled."""
    return deployment_key(deployment, "switches")


def model_endpoints_key(deployment: str) -> str:
    """Return the key of the hash of the model endpoints (contract/model_endpoints.py)."""
    return deployment_key(deployment, "model-endpoints")


def model_limits_key(deployment: str, endpoint: str) -> str:
    """Return the prefix of the keys of the limits of one endpoint (store/model_limits.py)."""
    return deployment_key(deployment, f"model-limits:{endpoint}")


def installed_skills_key(deployment: str, tenant: str) -> str:
    """Return the key of the hash of a tenant's installed skills: name -> InstalledSkill."""
    return tenant_key(deployment, tenant, "skills")


def skill_bundle_key(deployment: str, tenant: str, digest: str) -> str:
    """Return the key of the compressed files of an installed skill (workers/skills/archives.py)."""
    return tenant_key(deployment, tenant, f"skill-bundle.{digest}")


def skill_uses_key(deployment: str, tenant: str) -> str:
    """Return the key of the hash of skill uses by a tenant's runs: skill -> count. The hash expires when no skill is
    used for a long time.
    """
    return tenant_key(deployment, tenant, "skill-uses")


def secrets_key(deployment: str, tenant: str | None) -> str:
    """Return the key of the hash of a tenant's encrypted secrets: name -> record, and the version under VERSION_FIELD.
    None: the secrets of the deployment itself.
    """
    return deployment_key(deployment, "secrets") if tenant is None else tenant_key(deployment, tenant, "secrets")


def server_sessions_key(deployment: str, tenant: str, session: str) -> str:
    """Return the key of the hash with the MCP sessions that the calls of a session share at servers over HTTP. The hash
    expires after a day without use.
    """
    return tenant_key(deployment, tenant, f"session.{session}:mcp")


def session_state_key(deployment: str, tenant: str, session: str) -> str:
    """Return the key of the hash of the state that a session's tools store between calls. The hash expires after a day
    without use.
    """
    return tenant_key(deployment, tenant, f"session.{session}:state")


def audit_key(deployment: str) -> str:
    """Return the key of the audit log of changes by operators and administrators, a stream (store/audit.py)."""
    return deployment_key(deployment, "audit")


def tenant_audit_key(deployment: str, tenant: str) -> str:
    """Return the key of the audit log of changes by the holders of a tenant's API keys, a stream."""
    return tenant_key(deployment, tenant, "audit")


_SHOWN_CALL = re.compile(r"call ([A-Za-z0-9_-]{1,64})(?:, (?:tenant|session|run) [A-Za-z0-9_-]{1,64}){0,3}")


def flower_task_url(base: str, task_id: str) -> str:
    """Return the URL of Flower's page of a task. `base`: TOOLCREW_FLOWER_URL."""
    return f"{base.rstrip('/')}/task/{quote(task_id, safe='')}"


def call_page_url(base: str, call_id: str) -> str:
    """Return the URL of the page of a call. `base`: TOOLCREW_PAGE_URL."""
    return f"{base.rstrip('/')}/calls/{quote(call_id, safe='')}"


def show_call(call_id: str, tenant: str, session: str | None, run: str | None) -> str:
    """Return the text that Flower shows in place of a task's arguments."""
    parts = {"call": call_id, "tenant": tenant, "session": session, "run": run}
    return ", ".join(f"{name} {value}" for name, value in parts.items() if value)


def parse_shown_call(shown: object) -> str | None:
    """Return the call id from a text of `show_call`; None for any other text. The text is untrusted: every process that
    can send Celery events can write any text there.
    """
    match = _SHOWN_CALL.fullmatch(shown) if isinstance(shown, str) else None
    return match[1] if match else None


def account_key(deployment: str, tenant: str) -> str:
    """Return the key of the hash with the memory that a tenant uses (store/memory.py)."""
    return tenant_key(deployment, tenant, "memory")
