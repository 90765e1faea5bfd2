"""Shows the calls of a deployment: a list, and the state of one call across all processes. The state includes its
record, its queue, its worker, its session and its result.

Invariant: this module only reads, and shows one tenant's call to that tenant alone. A call of another tenant looks like
a call that never existed. The scripts that change a call are in store/call_scripts.py.

Admission, which divides the workers' slots among the tenants, lists the calls that wait for a slot and the calls that
have one (store/slots.py). An index lists the calls that have ended. The publish script writes the index, with the
newest CALLS_LISTED calls of each tenant.

The parts are read one after another, not in one step. A call can therefore end between two reads. A reader gets a state
that the call has had, and never a result without a valid signature.
"""

import json
import re
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from typing import Annotated, Any

from pydantic import PlainSerializer, ValidationError, field_serializer

from toolcrew.contract.calls import Record, ToolResult
from toolcrew.contract.clock import Instant, format_instant
from toolcrew.contract.envelope import decode_result, find_encoded_result, find_result_key, join_result
from toolcrew.contract.errors import BrokerUnavailable, EnvelopeRefused, ErrorCode, ToolFailure
from toolcrew.contract.hosts import HOST_TTL_S, parse_holder
from toolcrew.contract.names import (
    active_tenants_key,
    admission_prefix,
    call_key,
    flower_task_url,
    host_key,
    host_of,
    is_blob_of,
    location_key,
    result_key,
    run_key,
    tenant_calls_key,
    tenants_key,
)
from toolcrew.contract.session_locations import SessionLocation, show_checkpoint
from toolcrew.contract.signing import ResultSeal, SigningKeys
from toolcrew.contract.tenancy import DEFAULT_TENANT, VERSION_FIELD
from toolcrew.store.call_records import CALLS_LISTED, CallRecord, CallState, parse_record
from toolcrew.store.calls import CallStore
from toolcrew.store.connection import RedisClient, broker_errors
from toolcrew.store.scripts import Script
from toolcrew.store.sessions import parse_session_location
from toolcrew.store.slots import WaitReason, find_reasons

MAX_SEARCHED = 200_000
"""Maximum number of waiting calls that a search for one call reads. Waiting calls are stored by the id of their slot
request, so a search by call id must read all of them.
"""
MAX_LISTED = 20_000
"""Maximum number of entries of admission that are read for one list."""
_SCAN_COUNT = 1000
SESSION_COMMANDS = "session."
WAITING = "waiting"
"""State of a call that waits for a slot and therefore has no record yet."""
_ORDER = (WAITING, *(state.value for state in CallState if not state.has_ended))
_TASK = re.compile(r"[0-9a-f]{12}-([A-Za-z0-9_-]{1,64})\.([1-9][0-9]{0,8})\.([A-Za-z0-9_-]{1,64})")
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_POSITION_TEXT = re.compile(r"([0-9])\|(-?[0-9.]{1,20}(?:e[+-]?[0-9]{1,3})?)\|([A-Za-z0-9_-]{1,64})\|(.{1,128})")
_OWN_RUN = re.compile(r"([0-9a-f]{16})-[0-9]+-[0-9]+")
"""Pattern of the ids of calls that belong to a run in a program's own process."""

# Returns the number of messages before the call (-1 if the call is not among the first 5,000), and the length of the
# queue. `text`: a text that only the message of the call contains.
_POSITION = Script(
    """
local length, at = redis.call('LLEN', queue), 0
-- A limited number of messages: a long queue must not block Redis because a user looks at one call.
while at < length and at < 5000 do
  local some = redis.call('LRANGE', queue, -at - 100, -at - 1)
  for index = #some, 1, -1 do
    if string.find(some[index], text, 1, true) then return {at + #some - index, length} end
  end
  at = at + 100
end
return {-1, length}
""",
    keys=("queue",),
    args=("text",),
)


Moment = Annotated[float, PlainSerializer(lambda at: format_instant(at, "milliseconds"), when_used="json-unless-none")]
"""Field type for a time in Unix seconds that is written as ISO 8601 in UTC, with milliseconds, in JSON."""


class ShownCall(Record):
    """The fields that a list and the state of one call have in common."""

    id: str
    tenant: str
    tool: str | None
    state: str

    @property
    def has_ended(self) -> bool:
        """Return whether the call neither waits nor runs."""
        return self.state not in _ORDER


class ListedCall(ShownCall):
    """A call in a list. `state`: waiting (for a slot), queued, running, or the final state. `reason`: why the call
    waits for a slot (paused, in_flight, rate, slots). `since`: the start of the state, in ISO 8601. Unknown values are
    null.
    """

    reason: WaitReason | None = None
    session: str | None = None
    host: str | None = None
    error_code: str | None = None
    since: Instant | None = None


class CallPage(Record):
    """A page of calls: first the calls that wait, then the calls in a queue, the running calls, and the calls that
    have ended, the latest first. `has_more`: other calls are not listed. `next_position`: where the next page begins;
    None after the last page.
    """

    data: tuple[ListedCall, ...]
    has_more: bool
    next_position: str | None = None


class CallLife(ShownCall):
    """The state of a call. Unknown values are None.

    - `noticed_by`, `reason`: for a lost call, as in its record. For a call that waits for a slot, `reason` is why:
      paused, in_flight, rate or slots.
    - `tenant_in_flight`, `tenant_limit`: for such a call, how many calls of its tenant have a slot, and how many may.
    - `is_held`: whether the worker that runs the call is alive.
    - `run_s`: None for a lost call, because `ended_at` is then the time at which the loss was noticed.
    - `waits_in`: `admission` (for a slot) or `queue`. `ahead`: how many of the `waiting` calls are before this call.
    - `location`: the location of its session; None if the session is closed or has expired.
    - `result`: None if Redis no longer stores the result. Its JSON omits the output, because only the caller may read
      it.
    """

    error_code: str | None = None
    killed: str | None = None
    noticed_by: str | None = None
    reason: str | None = None
    advice: str | None = None
    attempt: int = 1
    session: str | None = None
    run: str | None = None
    batch: str | None = None
    queue: str | None = None
    host: str | None = None
    worker: str | None = None
    holder: str | None = None
    is_held: bool | None = None
    sandbox: str | None = None
    task: str | None = None
    flower_url: str | None = None
    queued_at: Moment | None = None
    started_at: Moment | None = None
    ended_at: Moment | None = None
    queued_s: float | None = None
    run_s: float | None = None
    waits_in: str | None = None
    ahead: int | None = None
    waiting: int | None = None
    tenant_in_flight: int | None = None
    tenant_limit: int | None = None
    location: SessionLocation | None = None
    result: ToolResult | None = None

    @field_serializer("location", when_used="json-unless-none")
    def _show_location(self, location: SessionLocation) -> dict[str, Any]:
        return {
            "state": location.state.value,
            "host": host_of(location.queue) if location.queue else None,
            "queue": location.queue or None,
            "generation": location.fence,
            "opened_at": format_instant(location.opened_at, "milliseconds") if location.opened_at else None,
            "checkpoint": show_checkpoint(location.checkpoint),
            "checkpoint_at": format_instant(location.checkpoint_at, "milliseconds") if location.checkpoint_at else None,
        }

    @field_serializer("result", when_used="json-unless-none")
    def _show_result(self, result: ToolResult) -> dict[str, Any]:
        shown = {"success", "error", "error_code", "truncated", "clocks", "kill", "sandbox"}
        fields = result.model_dump(mode="json", include=shown)
        if isinstance(fields["sandbox"], dict):
            fields["sandbox"].pop("news")
        return fields


class CallReader:
    """Reads the calls of a deployment. `flower_url`: the address of Flower that users open, or None. Every method
    raises BrokerUnavailable when Redis does not answer.
    """

    def __init__(self, client: RedisClient, deployment: str, keys: SigningKeys, flower_url: str | None = None) -> None:
        self._client = client
        self._deployment = deployment
        self._keys = keys
        self._flower_url = flower_url
        self._records = CallStore(client, deployment)

    # --- The list --------------------------------------------------------------------------------------------------

    async def read_page(self, tenants: Sequence[str], limit: int = 100, position: str | None = None) -> CallPage:
        """Return at most `limit` calls of these tenants. `position`: `next_position` of the previous page. Pages after
        the first one are complete for a single tenant only. Raises ToolFailure(INVALID_ARGUMENTS): invalid position.

        A call whose state changes between two pages may be in both of them, but never in none.
        """
        after = _parse_position(position)
        tickets, is_cut = await self._scan("waiting", MAX_LISTED)
        # The waiting calls are read first: a call that gets its slot in between is then found twice, but never missed.
        slots, is_also_cut = await self._scan("held", MAX_LISTED)
        waiting, granted = _select(tickets, tenants), _select(slots, tenants)
        reasons = await find_reasons(self._client, self._deployment, {_pair_of(entry) for entry in waiting.values()})
        # The order of the index is not the order of the ends, so pages need all of its entries.
        recent = await self._recent(tenants, CALLS_LISTED if len(tenants) == 1 else limit + 1)
        names = sorted((granted.keys() | recent) - waiting.keys())
        listed = [_build_waiting(entry, reasons[_pair_of(entry)]) for entry in waiting.values()]
        for (tenant, call), record in zip(names, await self._records.find_all(names), strict=True):
            if record is not None:
                listed.append(_build_listed(tenant, call, record))
        listed = sorted((call for call in listed if after is None or _rank(call) > after), key=_rank)
        page, has_next = listed[:limit], len(listed) > limit
        return CallPage(
            data=tuple(page),
            has_more=is_cut or is_also_cut or has_next,
            next_position=_format_position(page[-1]) if has_next else None,
        )

    async def _scan(self, name: str, limit: int, part: bytes = b"") -> tuple[list[tuple[str, dict[str, Any]]], bool]:
        """Return the entries of one of admission's hashes whose text contains `part`, as pairs of request id and
        fields. Also return whether entries were left out because there are more than `limit`.
        """
        found: list[tuple[str, dict[str, Any]]] = []
        cursor, rows_read = 0, 0
        while rows_read < limit:
            reply: Any = await _ask(
                self._client.hscan(admission_prefix(self._deployment) + name, cursor, count=_SCAN_COUNT)
            )
            cursor, rows = reply
            # Most texts belong to other calls. A search for the bytes is much faster than parsing each text.
            found += [(ticket.decode(), json.loads(text)) for ticket, text in rows.items() if part in text]
            rows_read += len(rows)
            if not cursor:
                return found, False
        return found, True

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

    # --- One call --------------------------------------------------------------------------------------------------

    async def read(self, tenant: str, call_id: str) -> CallLife | None:
        """Return the state of a tenant's call; None for an unknown call."""
        # The id becomes a part of keys, and of a text that is searched for. A `:` could name a key of another kind.
        if not _NAME.fullmatch(call_id):
            return None
        record = await self._record(tenant, call_id)
        if record is None:
            return await self._read_waiting(tenant, call_id)
        fields: dict[str, Any] = {}
        if record.state is CallState.QUEUED:
            ahead, length = await _ask(_POSITION.run(self._client, queue=record.queue, text=f'"id": "{record.task}"'))
            fields = {"waits_in": "queue", "ahead": ahead if ahead >= 0 else None, "waiting": length}
        elif record.state is CallState.RUNNING:
            # The record of a killed worker stays `running` until its sender marks the loss. Only the report shows it.
            report = host_key(self._deployment, parse_holder(record.holder)[0])
            fields = {"is_held": bool(await _ask(self._client.exists(report)))}
        run, batch = await self._run(tenant, call_id)
        return CallLife(
            **_describe(tenant, call_id, record),
            **fields,
            killed=record.killed or None,
            noticed_by=record.noticed_by or None,
            reason=record.reason or None,
            advice=_advise(record, fields.get("is_held")),
            attempt=record.attempt,
            run=run,
            batch=batch,
            queue=record.queue or None,
            worker=parse_holder(record.holder)[1] or None,
            holder=record.holder or None,
            sandbox=record.sandbox or None,
            task=record.task or None,
            flower_url=flower_task_url(self._flower_url, record.task) if self._flower_url and record.task else None,
            queued_at=record.queued_at or None,
            started_at=record.started_at or None,
            ended_at=record.ended_at or None,
            queued_s=_seconds(record.queued_at, record.started_at),
            run_s=_seconds(record.started_at, record.ended_at) if not record.noticed_by else None,
            location=await self._read_location(tenant, record.session),
            result=await self._result(tenant, call_id, record),
        )

    async def find(self, text: str, tenant: str | None) -> CallLife:
        """Return the state of a call. `text`: a call id, or a Celery task id as Flower shows it. `tenant` None: search
        all tenants.

        Raises ToolFailure(INVALID_ARGUMENTS): no call matches, or several tenants have a call with that id.
        """
        owner, call_id = await self.resolve(text, tenant)
        call = await self.read(owner, call_id)
        if call is None:
            raise unknown_call(text, owner)
        return call

    async def resolve(self, text: str, tenant: str | None) -> tuple[str, str]:
        """Return the tenant and the id of a call, as in `find`. With a given tenant, the call need not exist."""
        task = parse_task_id(text)
        if task is not None and tenant in (None, task[0]):
            return task
        if tenant is not None:
            return tenant, text
        owners = await self._owners(text)
        if len(owners) > 1:
            raise ToolFailure(
                ErrorCode.INVALID_ARGUMENTS,
                f"several tenants have a call {text}: select one with --tenant: {', '.join(owners[:20])}",
            )
        if not owners:
            raise unknown_call(text, None)
        return owners[0], text

    async def tenants(self) -> list[str]:
        """Return the tenants that are registered or have opened a session."""
        registered: Any = await _ask(self._client.hkeys(tenants_key(self._deployment)))
        active: Any = await _ask(self._client.zrange(active_tenants_key(self._deployment), 0, -1))
        return sorted({DEFAULT_TENANT, *(name.decode() for name in (*registered, *active))} - {VERSION_FIELD})

    async def _owners(self, call_id: str) -> list[str]:
        """Return the tenants that have a call with that id. Searches tenants that are registered, have opened a
        session, or wait for a slot with such a call.
        """
        if not _NAME.fullmatch(call_id):
            return []
        names = await self.tenants()
        pipe = self._client.pipeline(transaction=False)
        for name in names:
            pipe.exists(call_key(self._deployment, name, call_id))
        owners = {name for name, is_there in zip(names, await _ask(pipe.execute()), strict=True) if is_there}
        return sorted(owners | {str(fields["tenant"]) for _, fields in await self._tickets(call_id)})

    async def _record(self, tenant: str, call_id: str) -> CallRecord | None:
        fields: Any = await _ask(self._client.hgetall(call_key(self._deployment, tenant, call_id)))
        try:
            return parse_record(fields)
        except ValidationError as error:
            # Not "unknown call": the caller could take that for a call that did not run, and send it again.
            raise BrokerUnavailable(
                f"the record of call {call_id} in Redis cannot be read: run the same release everywhere, or use a "
                "later release"
            ) from error

    async def _read_waiting(self, tenant: str, call_id: str) -> CallLife | None:
        """Return the state of a call that waits for its first slot."""
        # One hash has the waiting calls of all tenants, and two tenants may use the same call id.
        tickets = [(ticket, fields) for ticket, fields in await self._tickets(call_id) if fields["tenant"] == tenant]
        if not tickets:
            return None
        ticket, fields = tickets[0]
        lane = f"{admission_prefix(self._deployment)}lane:{fields['queue']}|{tenant}:{fields.get('lane')}"
        run, batch = await self._run(tenant, call_id)
        limits: Any = await _ask(self._client.hgetall(f"{admission_prefix(self._deployment)}tenant:{tenant}"))
        [reason] = (await find_reasons(self._client, self._deployment, [_pair_of(fields)])).values()
        return CallLife(
            id=call_id,
            tenant=tenant,
            tool=str(fields.get("tool", "")) or None,
            state=WAITING,
            reason=reason.value,
            queued_at=float(fields.get("since", 0.0)) or None,
            tenant_in_flight=int(limits.get(b"held", b"0")),
            tenant_limit=int(limits[b"in_flight"]) if b"in_flight" in limits else None,
            run=run,
            batch=batch,
            queue=str(fields["queue"]),
            waits_in="admission",
            ahead=await _ask(self._client.zrank(lane, ticket)),
            waiting=await _ask(self._client.zcard(lane)),
        )

    async def _tickets(self, call_id: str) -> list[tuple[str, dict[str, Any]]]:
        return (await self._scan("waiting", MAX_SEARCHED, f'"call":"{call_id}"'.encode()))[0]

    async def _read_location(self, tenant: str, session: str) -> SessionLocation | None:
        if not session:
            return None
        fields: Any = await _ask(self._client.hgetall(location_key(self._deployment, tenant, session)))
        try:
            return parse_session_location(fields)
        except ValidationError:
            return None  # A later release wrote the location. This release cannot show its fields correctly.

    async def _result(self, tenant: str, call_id: str, record: CallRecord) -> ToolResult | None:
        """Return the call's result; None if the result has expired or its signature is wrong."""
        text = await _ask(self._client.get(result_key(record.task))) if record.task else None
        try:
            stored: Any = json.loads(text or b"null")
            encoded: Any = find_encoded_result(stored) if isinstance(stored, dict) else None
            key = find_result_key(encoded)
            # The signature is verified only after this read. `is_blob_of` prevents a forged key from reading data of
            # another tenant.
            if key is not None and is_blob_of(key, self._deployment, tenant):
                encoded = join_result(encoded, await _ask(self._client.get(key)) or b"")
            result = decode_result(encoded, ResultSeal(self._keys, tenant, record.attempt)) if encoded else None
        except (ValueError, KeyError, EnvelopeRefused):
            return None
        # Check the call id too: a genuine result of another call, copied to this key, has a valid signature.
        return result if result is not None and result.call_id == call_id else None

    async def _run(self, tenant: str, call_id: str) -> tuple[str | None, str | None]:
        """Return the run that makes the call and the batch of the run. The id of such a call begins with the id of its
        run.
        """
        parts = call_id.split("-")
        # A call id is the id of the run and up to three more parts. The id of a run may contain `-` itself, so try each
        # length.
        names = ["-".join(parts[:count]) for count in range(len(parts), max(0, len(parts) - 4), -1)]
        pipe = self._client.pipeline(transaction=False)
        for name in names:
            pipe.hget(run_key(self._deployment, tenant, name), "batch")
        for name, batch in zip(names, await _ask(pipe.execute()), strict=True):
            if batch is not None:
                return name, batch.decode(errors="replace") or None
        own = _OWN_RUN.fullmatch(call_id)
        return (own[1] if own is not None else None), None


def unknown_call(text: str, tenant: str | None) -> ToolFailure:
    """Return the same failure for a call that never existed, has expired, or belongs to another tenant. A caller
    therefore cannot discover the calls of another tenant.
    """
    whose = f" of tenant {tenant}" if tenant is not None else ""
    return ToolFailure(
        ErrorCode.INVALID_ARGUMENTS,
        f"call {text[:128]}{whose} was not found: check the id and --tenant. Calls are stored for a day",
    )


def parse_task_id(text: str) -> tuple[str, str] | None:
    """Return the tenant and the call id in a Celery task id, as Flower shows it; None for another task."""
    match = _TASK.fullmatch(text)
    return (match[3], match[1]) if match is not None else None


def _describe(tenant: str, call: str, record: CallRecord) -> dict[str, Any]:
    """Return the fields that a list and the state of one call have in common."""
    queue = parse_holder(record.holder)[0] or record.queue
    return {
        "id": call,
        "tenant": tenant,
        "tool": record.tool or None,
        "state": record.state.value,
        "session": record.session or None,
        "host": host_of(queue) if queue else None,
        "error_code": record.code or None,
    }


def _build_listed(tenant: str, call: str, record: CallRecord) -> ListedCall:
    since = {CallState.QUEUED: record.queued_at, CallState.RUNNING: record.started_at}.get(record.state)
    return ListedCall(**_describe(tenant, call, record), since=(record.ended_at if since is None else since) or None)


def _select(
    entries: Iterable[tuple[str, dict[str, Any]]], tenants: Sequence[str]
) -> dict[tuple[str, str], dict[str, Any]]:
    """Return the entries of admission that belong to calls of these tenants, by tenant and call id."""
    # Commands to sessions take slots too, but are not calls of a user.
    names = set(tenants)
    return {
        (str(entry["tenant"]), str(entry["call"])): entry
        for _, entry in entries
        if entry["tenant"] in names and not str(entry["tool"]).startswith(SESSION_COMMANDS)
    }


def _pair_of(entry: Mapping[str, Any]) -> tuple[str, str]:
    return str(entry["tenant"]), str(entry["queue"])


def _build_waiting(entry: Mapping[str, Any], reason: WaitReason) -> ListedCall:
    return ListedCall(
        id=str(entry["call"]),
        tenant=str(entry["tenant"]),
        tool=str(entry.get("tool", "")) or None,
        state="waiting",
        since=float(entry.get("since", 0.0)) or None,
        reason=reason,
        host=host_of(str(entry["queue"])),
    )


def _rank(call: ListedCall) -> tuple[int, float, str, str]:
    """Return a sort key that no other call has. Calls that have not ended come first, with the oldest at the top. Then
    follow calls that have ended, with the latest at the top.
    """
    since = call.since or 0.0
    state, at = (len(_ORDER), -since) if call.has_ended else (_ORDER.index(call.state), since)
    return state, at, call.tenant, call.id


def _format_position(call: ListedCall) -> str:
    state, at, tenant, name = _rank(call)
    return f"{state}|{at!r}|{tenant}|{name}"


def _parse_position(text: str | None) -> tuple[int, float, str, str] | None:
    if text is None:
        return None
    match = _POSITION_TEXT.fullmatch(text)
    if match is None:
        raise ToolFailure(
            ErrorCode.INVALID_ARGUMENTS,
            "the cursor does not belong to the list of calls: use the cursor of the previous page, or omit it",
        )
    return int(match[1]), float(match[2]), match[3], match[4]


def _advise(record: CallRecord, is_held: bool | None) -> str | None:
    """Return advice on a lost call; None for any other call."""
    if is_held is False:
        return (
            f"Its worker stopped reporting. The program that sent the call marks it as lost within {HOST_TTL_S} s. "
            "If that program ended too, no result will come: check whether the call has acted before you send it "
            "again."
        )
    if record.state is CallState.UNKNOWN or record.code == ErrorCode.OUTCOME_UNKNOWN:
        return (
            "The call may have acted. Check that before you send it again. `toolcrew hosts list` shows which hosts "
            "report."
        )
    if record.state is CallState.LOST:
        return "The call was not run. It is safe to send it again. `toolcrew hosts list` shows which hosts report."
    return None


def _seconds(first: float, last: float) -> float | None:
    return round(last - first, 6) if first and last >= first else None


async def _ask(command: Awaitable[Any]) -> Any:
    with broker_errors("the state of the calls was not read"):
        return await command
