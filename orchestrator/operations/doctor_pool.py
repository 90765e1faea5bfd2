"""Checks of `toolcrew doctor` for a deployment, from the data in Redis: workers, queues, tools, tenants, keys and
open questions.
"""

from collections.abc import Mapping, Sequence

from toolcrew.contract.errors import ConfigError
from toolcrew.contract.hosts import RELEASE, HostReport
from toolcrew.contract.image_names import may_share
from toolcrew.contract.names import CATALOG_POOLS
from toolcrew.contract.plurals import count, plural
from toolcrew.contract.signing import SigningKeys
from toolcrew.contract.tenancy import DEFAULT_TENANT, TenantPolicy
from toolcrew.orchestrator.dispatch.placement import LOW_MEMORY_BYTES
from toolcrew.orchestrator.operations.findings import Report
from toolcrew.store.api_keys import ApiKeyRecord, ApiKeys
from toolcrew.store.audit import Audit
from toolcrew.store.clock import read_clock
from toolcrew.store.connection import RedisClient
from toolcrew.store.hosts import HostStore
from toolcrew.store.overview import Overview, OverviewReader
from toolcrew.store.tenants import RedisTenants
from toolcrew.store.tools import STARTED_BY, RedisCatalog, RedisSwitches

LOW_DISK_BYTES = 1024 * 1024 * 1024
OLD_MESSAGE_S = 60.0
"""Age of a message in a queue, in seconds. The sender of an older message no longer waits for the call."""
KEY_DAYS = 14
_DAY_S = 86_400.0
_MIB = 1024 * 1024


async def examine_pool(client: RedisClient, deployment: str, keys: SigningKeys, report: Report) -> list[HostReport]:
    """Check all data of the deployment in Redis. Return the reports of the live workers. Raises BrokerUnavailable."""
    hosts, catalog = HostStore(client, deployment), RedisCatalog(client, deployment, keys)
    overview = OverviewReader(client, deployment, keys)
    snapshot = await overview.read()
    _judge_workers(snapshot.hosts, report)
    unreadable = await _examine_unreadable(hosts, report)
    await examine_workers(catalog, report)
    await _Tools(client, deployment, keys, report).examine(catalog)
    await _examine_queues(overview, hosts, snapshot, unreadable, report)
    await _examine_tenants(client, deployment, keys, snapshot, report)
    await _examine_keys(client, deployment, keys, report)
    _judge_questions(snapshot, report)
    changes = await Audit(client, deployment).count()
    report.add_passed(
        "audit",
        f"{count(changes, 'change by an operator is', 'changes by operators are')} stored (`toolcrew changes list`)",
    )
    return list(snapshot.hosts)


async def examine_workers(catalog: RedisCatalog, report: Report) -> None:
    """Check which workers serve calls now. A missing worker is no error, because it may start later."""
    try:
        pools = await catalog.pools()
    except ConfigError as error:
        report.add("workers", False, str(error))
        return
    for pool, start in STARTED_BY.items():
        served = [spec.name for spec in pools.get(pool, ()) if spec.audience == "model"]
        text = (
            f"{pool}: {', '.join(served) or 'no tools'}"
            if pool in pools
            else f"{pool}: no worker; start one with {start}"
        )
        report.add("workers", pool in pools, text, needed=False)


def _judge_workers(reports: Sequence[HostReport], report: Report) -> None:
    if not any(host.kind == "sandbox" and host.worker for host in reports):
        report.add_warning(
            "hosts", "no sandbox host reports, so no session can be opened", f"start one with {STARTED_BY['sandbox']}"
        )
    for host in reports:
        problem, remedy = _find_problem(host)
        name = f"{host.host} ({host.kind}, {host.state})"
        if not problem:
            report.add_passed("hosts", f"{name}: {_size_of(host)}")
        elif host.release != RELEASE or (not host.healthy and not host.draining):
            report.add_failure("hosts", f"{name}: {problem}", remedy)
        else:
            report.add_warning("hosts", f"{name}: {problem}", remedy)
    if len({host.images for host in reports if host.kind == "sandbox" and host.worker}) > 1:
        report.add_warning(
            "hosts",
            "sandbox hosts allow different images: a session with such an image can open on some hosts only",
            "set TOOLCREW_SANDBOX_IMAGE and TOOLCREW_SANDBOX_IMAGES_ALLOWED to the same values on all hosts",
        )


async def _examine_unreadable(hosts: HostStore, report: Report) -> set[str]:
    """Return the queues of workers whose reports this release cannot read."""
    unreadable = await hosts.find_unreadable()
    for queue in sorted(unreadable):
        report.add_failure(
            "hosts", f"the report of {queue} cannot be read", "run the same release everywhere (docs/deploy.md)"
        )
    return unreadable


def _find_problem(host: HostReport) -> tuple[str, str]:
    """Return the problem of a worker and its remedy; two empty strings if there is none."""
    if host.release != RELEASE:
        return (
            f"it runs release {host.release}, and this program runs {RELEASE}",
            "run the same release everywhere (docs/deploy.md)",
        )
    if not host.worker:
        return (
            "it has ended normally, and its next worker has not started yet",
            "start its worker again, or wait until the host counts as lost",
        )
    if not host.healthy:
        return (
            host.problem or "its sandboxd does not answer",
            f"check sandboxd and its log on {host.host}, and run `toolcrew doctor` there",
        )
    if host.draining:
        return "it takes no new sessions" + (
            f": {host.problem}" if host.problem else ""
        ), "wait until it has ended, or restart it"
    if 0 < host.memory_free_bytes < LOW_MEMORY_BYTES:
        return (
            f"{host.memory_free_bytes // _MIB} MiB of memory are left",
            "give it more, or lower TOOLCREW_MAX_SANDBOXES there",
        )
    if host.kind == "sandbox" and host.disk_free_bytes < LOW_DISK_BYTES:
        return (
            f"{host.disk_free_bytes // _MIB} MiB of disk are left for workspaces",
            "free space at TOOLCREW_SANDBOXD_STATE: below TOOLCREW_HOST_FREE_BYTES it takes no sessions",
        )
    if host.kind == "sandbox" and host.sessions >= host.max_sessions:
        return (
            f"{plural(host.max_sessions, 'its only session is', f'all {host.max_sessions} sessions are')} taken",
            "add a host, close sessions, or raise TOOLCREW_MAX_SESSIONS there",
        )
    return host.problem, f"see the worker's log on {host.host}" if host.problem else ""


def _size_of(host: HostReport) -> str:
    parts = [f"release {host.release}", f"{count(host.busy, 'call runs', 'calls run')}, at most {host.slots}"]
    if host.kind == "sandbox":
        parts += [
            count(host.sessions, "session"),
            f"disk {host.disk_free_bytes // _MIB} MiB free",
            f"images {', '.join(host.images) or 'none'}",
        ]
    return ", ".join([*parts, f"memory {host.memory_free_bytes // _MIB} MiB free"])


class _Tools:
    """Check of tools: published now, published before, switched off, and named in policies."""

    def __init__(self, client: RedisClient, deployment: str, keys: SigningKeys, report: Report) -> None:
        self._client = client
        self._deployment = deployment
        self._keys = keys
        self._report = report

    async def examine(self, catalog: RedisCatalog) -> None:
        try:
            pools = await catalog.pools()
        except ConfigError:
            return  # `examine_workers` reports it.
        published = {
            spec.name: pool
            for pool in reversed(CATALOG_POOLS)
            for spec in pools.get(pool, ())
            if spec.audience == "model"
        }
        for pool in CATALOG_POOLS:
            hidden = [spec.name for spec in pools.get(pool, ()) if published.get(spec.name, pool) != pool]
            if hidden:
                self._report.add_failure(
                    "tools",
                    f"{', '.join(hidden)} of the pool {pool} are hidden by tools of the same name",
                    "rename them",
                )
        # All specs count here, also those of tools that no model may call, such as webhook.send.
        lost = await self._served_before(catalog) - {spec.name for specs in pools.values() for spec in specs}
        if lost:
            self._report.add_warning(
                "tools",
                f"no longer served: {', '.join(sorted(lost))}",
                "start their workers, or ignore it if they were removed",
            )
        await self._examine_switches(published)

    async def _served_before(self, catalog: RedisCatalog) -> set[str]:
        """Return the names of the tools that each pool published last."""
        served: set[str] = set()
        for names in (await catalog.served_before()).values():
            if names is None:
                self._report.add_warning(
                    "tools", "a list of tools in Redis cannot be read", "restart the workers, which write it again"
                )
            else:
                served |= {name for name in names if not name.startswith("session.")}
        return served

    async def _examine_switches(self, published: Mapping[str, str]) -> None:
        switches = await RedisSwitches(self._client, self._deployment, self._keys).switches()
        off = sorted(switches)
        if off:
            self._report.add_warning(
                "tools", f"disabled: {', '.join(off)}", "if that is not intended: `toolcrew tools enable NAME`"
            )
        unknown = sorted(field for field in off if field.rpartition("/")[2] not in published)
        if unknown and published:
            self._report.add_warning(
                "tools",
                f"disabled, and no worker publishes them: {', '.join(unknown)}",
                "check the spelling: `toolcrew tools list`",
            )


async def _examine_queues(
    overview: OverviewReader, hosts: HostStore, snapshot: Overview, unreadable: set[str], report: Report
) -> None:
    total = 0
    for queue in snapshot.queues:
        total += queue.length
        age_s = await overview.oldest_message_s(queue.queue) if queue.length else None
        if queue.length and not queue.slots:
            report.add_failure(
                "queues",
                f"{queue.queue}: {count(queue.length, 'call')}, and no worker serves it",
                "start its workers (docs/deploy.md)",
            )
        elif age_s is not None and age_s > OLD_MESSAGE_S:
            report.add_failure(
                "queues",
                f"{queue.queue}: its oldest call has waited for {age_s:.0f} s",
                "check whether its workers hang: `toolcrew hosts list` and their logs",
            )
        elif queue.oldest_s is not None and queue.oldest_s > OLD_MESSAGE_S:
            report.add_warning(
                "queues",
                f"{queue.queue}: {count(queue.waiting, 'call waits', 'calls wait')} for a slot, the oldest for "
                f"{queue.oldest_s:.0f} s",
                "add workers, or see which tenant uses the slots: `toolcrew tenants list`",
            )
    dead = {
        queue: length for queue, length in (await hosts.dead_queues()).items() if length and queue not in unreadable
    }
    for lost, length in dead.items():
        report.add_failure(
            "queues",
            f"{lost}: {count(length, 'call')} of a host that no longer reports",
            "a running orchestrator answers them: start one, or see its log",
        )
    if not dead and all(finding.name != "queues" for finding in report.findings):
        report.add_passed(
            "queues",
            f"{count(total, 'call is', 'calls are')} in {count(len(snapshot.queues), 'queue')}, {snapshot.waiting} "
            f"{plural(snapshot.waiting, 'waits', 'wait')} for a slot",
        )


async def _examine_tenants(
    client: RedisClient, deployment: str, keys: SigningKeys, snapshot: Overview, report: Report
) -> None:
    policies = await RedisTenants(client, deployment, keys).all()
    sandboxes = [host for host in snapshot.hosts if host.kind == "sandbox" and host.worker]
    classes = {name for host in sandboxes for name in host.classes}
    before = len(report.findings)
    for name, policy in policies.items():
        if isinstance(policy, ConfigError):
            report.add("tenants", False, str(policy))
            continue
        if policy.is_paused:
            report.add_warning(
                "tenants",
                f"{name} is paused{f': {policy.pause_reason}' if policy.pause_reason else ''}",
                f"`toolcrew tenants resume {name}`",
            )
        is_used = name != DEFAULT_TENANT or policy != TenantPolicy()
        if sandboxes and is_used:
            _judge_policy(name, policy, classes, {image for host in sandboxes for image in host.images}, report)
    registered = [name for name in policies if name != DEFAULT_TENANT]
    if not registered:
        report.add_passed("tenants", "no tenant is registered: every name is served like the default tenant")
    elif len(report.findings) == before:
        report.add_passed("tenants", f"{len(registered)} registered")


def _judge_policy(name: str, policy: TenantPolicy, classes: set[str], images: set[str], report: Report) -> None:
    tenant_class = policy.sandbox.tenant_class
    if tenant_class not in classes:
        report.add_failure(
            "tenants",
            f"no host has the class '{tenant_class}' of {name}, so the tenant cannot open sessions",
            "add it to TOOLCREW_TENANT_CLASSES of a sandboxd",
        )
    if policy.sandbox.images and not any(
        may_share(image, entry) for image in policy.sandbox.images for entry in images
    ):
        report.add_failure(
            "tenants",
            f"no host allows an image that {name} may use",
            "add one to TOOLCREW_SANDBOX_IMAGES_ALLOWED, or to its policy",
        )


async def _examine_keys(client: RedisClient, deployment: str, signing: SigningKeys, report: Report) -> None:
    keys, now = await ApiKeys(client, deployment, signing).all(), await read_clock(client)
    before = len(report.findings)
    for key_id, record in keys.items():
        if isinstance(record, ConfigError):
            report.add("keys", False, str(record), needed=False)
        elif record.expires_at is not None and record.expires_at - now < KEY_DAYS * _DAY_S:
            _report_expiring(key_id, record, record.expires_at - now, report)
    if keys and len(report.findings) == before:
        report.add_passed("keys", f"{count(len(keys), 'API key')}, none expires within {KEY_DAYS} days")


def _report_expiring(key_id: str, record: ApiKeyRecord, remaining_s: float, report: Report) -> None:
    name = f"API key {key_id}{f' ({record.name})' if record.name else ''} of {record.tenant}"
    if remaining_s <= 0:
        report.add_warning(
            "keys",
            f"{name} has expired",
            f"create another key if it is needed, and remove this one: `toolcrew keys revoke {key_id}`",
        )
    else:
        report.add_warning(
            "keys",
            f"{name} expires in {remaining_s / _DAY_S:.1f} days",
            f"create another key in time: `toolcrew keys create {record.tenant}`",
        )


def _judge_questions(snapshot: Overview, report: Report) -> None:
    if snapshot.approvals:
        report.add_warning(
            "approvals",
            f"{count(snapshot.approvals, 'call waits', 'calls wait')} for a person",
            "`toolcrew approvals list`, or the page of approvals",
        )
