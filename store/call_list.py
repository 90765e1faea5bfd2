"""Lists the calls that wait, run, or have ended recently. This module only reads. The scripts that change a call are
in store/calls.py.

Admission lists the calls that wait for a slot, and the calls that hold a slot (store/slots.py). An index lists the
calls that have ended. The publish script writes the index, with the newest CALLS_LISTED calls of each tenant.
"""

import json
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from contract.calls import Record
from contract.clock import Instant
from contract.hosts import parse_holder
from contract.names import admission_prefix, call_key, host_of, tenant_calls_key
from store.calls import CallRecord, CallState, parse_record
from store.connection import RedisClient, broker_errors
from store.slots import WaitReason

MAX_SCANNED = 20_000
"""Maximum number of entries of admission that are read for one list."""
_SCAN_COUNT = 1000
SESSION_COMMANDS = "session."
_ORDER = ("waiting", CallState.QUEUED.value, CallState.RUNNING.value)


class ListedCall(Record):
    """A call in a list. `state`: waiting (for a slot), queued, running, or the final state. `reason`: why the call
    waits for a slot (paused, in_flight, rate, slots). `since`: the start of the state, in ISO 8601. Unknown values are
    null.
    """

    call: str
    tenant: str
    tool: str | None
    state: str
    reason: WaitReason | None = None
    session: str | None = None
    host: str | None = None
    error_code: str | None = None
    since: Instant | None = None


class CallPage(Record):
    """A page of calls: first the calls that wait, then the calls in a queue, the running calls, and the calls that
    have ended, the latest first. `has_more`: other calls are not listed.
    """

    data: tuple[ListedCall, ...]
    has_more: bool


class CallList:
    """Lists the calls of one deployment."""

    def __init__(self, client: RedisClient, deployment: str) -> None:
        self._client = client
        self._deployment = deployment

    async def read(self, tenants: Sequence[str], limit: int = 100) -> CallPage:
        """Return at most `limit` calls of these tenants. Raises BrokerUnavailable when Redis does not answer."""
        waiting, is_cut = await self._scan("waiting", tenants)
        # The waiting calls are read first: a call that gets its slot in between is then found twice, but never missed.
        running, is_also_cut = await self._scan("held", tenants)
        limits = await self._limits(tenants)
        listed = [_build_waiting(entry, limits[entry["tenant"]]) for entry in waiting]
        names = {(str(entry["tenant"]), str(entry["call"])) for entry in running}
        names |= await self._recent(tenants, limit + 1)
        listed += await self._read_records(sorted(names), {(call.tenant, call.call) for call in listed})
        listed.sort(key=_rank)
        return CallPage(data=tuple(listed[:limit]), has_more=is_cut or is_also_cut or len(listed) > limit)

    async def _scan(self, name: str, tenants: Sequence[str]) -> tuple[list[dict[str, Any]], bool]:
        """Return the entries of a hash of admission that are calls of these tenants. Also return whether some entries
        were not read.
        """
        key, tenant_names = admission_prefix(self._deployment) + name, set(tenants)
        calls: list[dict[str, Any]] = []
        cursor, scanned = 0, 0
        while scanned < MAX_SCANNED:
            cursor, rows = await _ask(self._client.hscan(key, cursor, count=_SCAN_COUNT))
            entries = [json.loads(text) for text in rows.values()]
            # Commands to sessions take slots too, but are not calls of a user.
            calls += [
                entry
                for entry in entries
                if entry["tenant"] in tenant_names and not str(entry["tool"]).startswith(SESSION_COMMANDS)
            ]
            scanned += len(rows)
            if not cursor:
                return calls, False
        return calls, True

    async def _limits(self, tenants: Sequence[str]) -> dict[str, Mapping[bytes, bytes]]:
        """Return admission's hash of each tenant: its limits and their use."""
        pipe = self._client.pipeline(transaction=False)
        for tenant in tenants:
            pipe.hgetall(f"{admission_prefix(self._deployment)}tenant:{tenant}")
        return dict(zip(tenants, await _ask(pipe.execute()), strict=True))

    async def _recent(self, tenants: Sequence[str], limit: int) -> set[tuple[str, str]]:
        pipe = self._client.pipeline(transaction=False)
        for tenant in tenants:
            pipe.zrevrange(tenant_calls_key(self._deployment, tenant), 0, limit - 1)
        pages: list[list[bytes]] = await _ask(pipe.execute())
        return {
            (tenant, call.decode(errors="replace"))
            for tenant, calls in zip(tenants, pages, strict=True)
            for call in calls
        }

    async def _read_records(self, names: Sequence[tuple[str, str]], waiting: set[tuple[str, str]]) -> list[ListedCall]:
        pipe = self._client.pipeline(transaction=False)
        for tenant, call in names:
            pipe.hgetall(call_key(self._deployment, tenant, call))
        listed = []
        for (tenant, call), fields in zip(names, await _ask(pipe.execute()), strict=True):
            if (tenant, call) in waiting:
                continue
            try:
                record = parse_record(fields)
            except ValidationError:
                continue  # written by a later release
            if record is not None:
                listed.append(_build_listed(tenant, call, record))
        return listed


def _build_waiting(entry: Mapping[str, Any], limits: Mapping[bytes, bytes]) -> ListedCall:
    return ListedCall(
        call=str(entry["call"]),
        tenant=str(entry["tenant"]),
        tool=str(entry.get("tool", "")) or None,
        state="waiting",
        since=float(entry.get("since", 0.0)) or None,
        reason=_find_reason(entry, limits),
        host=host_of(str(entry["queue"])),
    )


def _find_reason(entry: Mapping[str, Any], limits: Mapping[bytes, bytes]) -> WaitReason:
    """Return the reason as `waiting_reason` in slots_operations.lua determines it."""

    def number(name: bytes) -> float:
        return float(limits.get(name, b"0"))

    if entry.get("lane") == "paused":
        return WaitReason.PAUSED
    if number(b"held") >= number(b"in_flight"):
        return WaitReason.IN_FLIGHT
    return WaitReason.RATE if number(b"blocked") else WaitReason.SLOTS


def _build_listed(tenant: str, call: str, record: CallRecord) -> ListedCall:
    since = {CallState.QUEUED: record.queued_at, CallState.RUNNING: record.started_at}.get(record.state)
    queue, _ = parse_holder(record.holder)
    return ListedCall(
        call=call,
        tenant=tenant,
        tool=record.tool or None,
        state=record.state.value,
        since=(record.ended_at if since is None else since) or None,
        session=record.session or None,
        host=host_of(queue or record.queue) if queue or record.queue else None,
        error_code=record.code or None,
    )


def _rank(call: ListedCall) -> tuple[int, float]:
    """Return a sort key. Calls that have not ended come first, with the oldest at the top. Then follow calls that have
    ended, with the latest at the top.
    """
    if call.state in _ORDER:
        return _ORDER.index(call.state), call.since or 0.0
    return len(_ORDER), -(call.since or 0.0)


async def _ask(command: Awaitable[Any]) -> Any:
    with broker_errors("the calls were not listed"):
        return await command
