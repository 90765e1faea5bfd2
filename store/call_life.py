"""The state of one call across all processes: its record, its queue, its worker, its session and its result.

Invariant: this module only reads, and shows one tenant's call to that tenant alone. A call of another tenant looks like
a call that never existed. The scripts that change a call are in store/calls.py.

The parts are read one after another, not in one step. A call can therefore end between two reads. A reader gets a state
that the call has had, and never a result without a valid signature.
"""

import json
import re
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Any

import redis.asyncio
from pydantic import ValidationError

from contract.calls import ToolResult
from contract.clock import format_instant
from contract.envelope import decode_result, join_result, kept_result_key, stored_answer
from contract.errors import BrokerUnavailable, EnvelopeRefused, ErrorCode, ToolFailure
from contract.hosts import HOST_TTL_S, parse_holder
from contract.names import (
    admission_prefix,
    call_key,
    flower_task_url,
    host_key,
    host_of,
    is_blob_of,
    place_key,
    result_key,
    seen_tenants_key,
    tenants_key,
)
from contract.session_locations import SessionLocation, show_checkpoint
from contract.signing import ResultSeal, SigningKeys
from contract.tenancy import DEFAULT_TENANT, VERSION_FIELD
from store.calls import CallRecord, CallState, parse_record
from store.connection import broker_errors
from store.run_log import run_key
from store.sessions import parse_session_location

MAX_TICKETS_READ = 200_000
"""Maximum number of waiting calls that a search for one call reads. Calls wait by ticket, so a search by call id reads
all of them.
"""
_TASK = re.compile(r"[0-9a-f]{12}-([A-Za-z0-9_-]{1,64})\.([1-9][0-9]{0,8})\.([A-Za-z0-9_-]{1,64})")
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_OWN_RUN = re.compile(r"([0-9a-f]{16})-[0-9]+-[0-9]+")
"""Pattern of a call id of a run in a program's own process."""

# KEYS: queue. ARGV: a text that only the message of the call contains. Returns the number of messages before the call
# (-1 if the call is not among the first 5,000), and the length of the queue.
_POSITION = """
local length, at = redis.call('LLEN', KEYS[1]), 0
-- A limited number of messages: a long queue must not block Redis because a user looks at one call.
while at < length and at < 5000 do
  local some = redis.call('LRANGE', KEYS[1], -at - 100, -at - 1)
  for index = #some, 1, -1 do
    if string.find(some[index], ARGV[1], 1, true) then return {at + #some - index, length} end
  end
  at = at + 100
end
return {-1, length}
"""


@dataclass(frozen=True)
class Waiting:
    """The place where a call waits: `admission` (for a slot) or the queue of the broker. `ahead`: how many of the
    `waiting` calls are before this call; None if unknown.
    """

    where: str
    queue: str
    ahead: int | None
    waiting: int


@dataclass(frozen=True)
class CallLife:
    """The state of a call. `record` None: the call waits for its first slot. `is_held`: whether the worker that runs
    the call still reports. `result`: None if Redis no longer stores the result. `place`: the location of its session;
    None if the session is closed or has expired.
    """

    call: str
    tenant: str
    record: CallRecord | None
    tool: str
    waiting: Waiting | None = None
    is_held: bool | None = None
    place: SessionLocation | None = None
    result: ToolResult | None = None
    run: str | None = None
    batch: str | None = None
    flower_url: str | None = None

    @property
    def state(self) -> str:
        """Return the state in the record, or `waiting` for a call without a record."""
        return self.record.state.value if self.record is not None else "waiting"

    @property
    def advice(self) -> str | None:
        """Return advice on a lost call; None for any other call."""
        if self.state == CallState.RUNNING and self.is_held is False:
            return (
                f"Its worker stopped reporting. The program that sent the call marks it as lost within {HOST_TTL_S} s. "
                "If that program ended too, no result will come: check whether the call has acted before you send it "
                "again."
            )
        code = self.record.code if self.record is not None else ""
        if self.state == CallState.UNKNOWN or code == ErrorCode.OUTCOME_UNKNOWN:
            return (
                "The call may have acted. Check that before you send it again. `toolcrew hosts list` shows which hosts "
                "report."
            )
        if self.state == CallState.LOST:
            return "The call was not run. It is safe to send it again. `toolcrew hosts list` shows which hosts report."
        return None

    def to_json(self) -> dict[str, Any]:
        """Return the state as JSON, with times in ISO 8601 UTC and None for unknown values."""
        record = self.record or CallRecord(state=CallState.QUEUED)
        queue, worker = parse_holder(record.holder)
        fields: dict[str, Any] = {
            "call": self.call,
            "tenant": self.tenant,
            "tool": self.tool or None,
            "state": self.state,
            "error_code": record.code or None,
            "killed": record.killed or None,
            "noticed_by": record.noticed_by or None,
            "reason": record.reason or None,
            "advice": self.advice,
            "attempt": record.attempt,
            "session": record.session or None,
            "run": self.run,
            "batch": self.batch,
            "queue": record.queue or (self.waiting.queue if self.waiting is not None else None),
            "host": host_of(queue) if queue else None,
            "worker": worker or None,
            "holder": record.holder or None,
            "is_held": self.is_held,
            "sandbox": record.sandbox or None,
            "task": record.task or None,
            "flower_url": self.flower_url,
            "queued_at": _instant(record.queued_at),
            "started_at": _instant(record.started_at),
            "ended_at": _instant(record.ended_at),
            "queued_s": _seconds(record.queued_at, record.started_at),
            # A lost call has no known duration: `ended_at` is the time at which the loss was noticed.
            "run_s": _seconds(record.started_at, record.ended_at) if not record.noticed_by else None,
        }
        waits, location, result = self.waiting, self.place, self.result
        fields["waits_in"] = waits.where if waits is not None else None
        fields["ahead"] = waits.ahead if waits is not None else None
        fields["waiting"] = waits.waiting if waits is not None else None
        fields["place"] = _place_json(location) if location is not None else None
        fields["result"] = _result_json(result) if result is not None else None
        return fields


class CallLives:
    """Reads the states of the calls of a deployment. `flower_url`: the address of Flower that users open, or None.
    Every method raises BrokerUnavailable when Redis does not answer.
    """

    def __init__(
        self, client: "redis.asyncio.Redis", deployment: str, keys: SigningKeys, flower_url: str | None = None
    ) -> None:
        self._client = client
        self._deployment = deployment
        self._keys = keys
        self._flower_url = flower_url
        self._position = client.register_script(_POSITION)

    async def read(self, tenant: str, call_id: str) -> CallLife | None:
        """Return the state of a tenant's call; None for an unknown call. A call that waits because its tenant is
        paused is known only to the program that sent it.
        """
        # The id becomes a part of keys, and of a text that is searched for. A `:` could name a key of another kind.
        if not _NAME.fullmatch(call_id):
            return None
        record = await self._record(tenant, call_id)
        if record is None:
            return await self._waiting_life(tenant, call_id)
        run, batch = await self._run(tenant, call_id)
        waiting, is_held = None, None
        if record.state is CallState.QUEUED:
            waiting = await self._in_queue(record)
        elif record.state is CallState.RUNNING:
            # The record of a killed worker stays `running` until its sender marks the loss. Only the report shows it.
            is_held = bool(await _ask(self._client.exists(host_key(self._deployment, parse_holder(record.holder)[0]))))
        return CallLife(
            call=call_id,
            tenant=tenant,
            record=record,
            tool=record.tool,
            waiting=waiting,
            is_held=is_held,
            place=await self._place(tenant, record.session),
            result=await self._result(tenant, call_id, record),
            run=run,
            batch=batch,
            flower_url=flower_task_url(self._flower_url, record.task) if self._flower_url and record.task else None,
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
        owners = await self.owners(text)
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
        active: Any = await _ask(self._client.zrange(seen_tenants_key(self._deployment), 0, -1))
        return sorted({DEFAULT_TENANT, *(name.decode() for name in (*registered, *active))} - {VERSION_FIELD})

    async def owners(self, call_id: str) -> list[str]:
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

    async def _waiting_life(self, tenant: str, call_id: str) -> CallLife | None:
        """Return the state of a call that waits for its first slot."""
        # One hash has the waiting calls of all tenants, and two tenants may use the same call id.
        tickets = [(ticket, fields) for ticket, fields in await self._tickets(call_id) if fields["tenant"] == tenant]
        if not tickets:
            return None
        ticket, fields = tickets[0]
        lane = f"{admission_prefix(self._deployment)}lane:{fields['queue']}|{tenant}:{fields.get('lane')}"
        ahead = await _ask(self._client.zrank(lane, ticket))
        waiting = Waiting("admission", str(fields["queue"]), ahead, int(await _ask(self._client.zcard(lane))))
        run, batch = await self._run(tenant, call_id)
        return CallLife(call_id, tenant, None, str(fields.get("tool", "")), waiting=waiting, run=run, batch=batch)

    async def _tickets(self, call_id: str) -> list[tuple[str, dict[str, Any]]]:
        """Return the entries for a call id in the queue of admission, as pairs of ticket and fields."""
        key, id_field = f"{admission_prefix(self._deployment)}waiting", f'"call":"{call_id}"'.encode()
        tickets: list[tuple[str, dict[str, Any]]] = []
        cursor, rows_read = 0, 0
        while rows_read < MAX_TICKETS_READ:
            reply: Any = await _ask(self._client.hscan(key, cursor, count=1000))
            cursor, rows = reply
            # Most texts belong to other calls. A search for the bytes is much faster than parsing each text.
            tickets += [(ticket.decode(), json.loads(text)) for ticket, text in rows.items() if id_field in text]
            rows_read += len(rows)
            if not cursor:
                break
        return tickets

    async def _in_queue(self, record: CallRecord) -> Waiting:
        ahead, length = await _ask(self._position(keys=[record.queue], args=[f'"id": "{record.task}"']))
        return Waiting("queue", record.queue, int(ahead) if int(ahead) >= 0 else None, int(length))

    async def _place(self, tenant: str, session: str) -> SessionLocation | None:
        if not session:
            return None
        fields: Any = await _ask(self._client.hgetall(place_key(self._deployment, tenant, session)))
        try:
            return parse_session_location(fields)
        except ValidationError:
            return None  # A later release wrote the location. This release cannot show its fields correctly.

    async def _result(self, tenant: str, call_id: str, record: CallRecord) -> ToolResult | None:
        """Return the call's result; None if the result has expired or its signature is wrong."""
        text = await _ask(self._client.get(result_key(record.task))) if record.task else None
        try:
            stored: Any = json.loads(text or b"null")
            encoded: Any = stored_answer(stored) if isinstance(stored, dict) else None
            key = kept_result_key(encoded)
            # The signature is verified only after this read. `is_blob_of` prevents a forged key from reading data of
            # another tenant.
            if key is not None and is_blob_of(key, self._deployment, tenant):
                encoded = join_result(encoded, await _ask(self._client.get(key)) or b"")
            result = decode_result(encoded, ResultSeal(self._keys, tenant, record.attempt)) if encoded else None
        except (ValueError, KeyError, EnvelopeRefused):
            return None
        # A genuine result of another call under this key would pass the signature of its own call.
        return result if result is not None and result.call_id == call_id else None

    async def _run(self, tenant: str, call_id: str) -> tuple[str | None, str | None]:
        """Return the run that makes the call and the batch of the run. The id of such a call begins with the id of its
        run.
        """
        parts = call_id.split("-")
        # An id of a later attempt or of a step has up to three parts more than the run, and a run's id may contain `-`.
        names = ["-".join(parts[:count]) for count in range(len(parts), max(0, len(parts) - 4), -1)]
        pipe = self._client.pipeline(transaction=False)
        for name in names:
            pipe.hget(run_key(self._deployment, tenant, name), "batch")
        for name, batch in zip(names, await _ask(pipe.execute()), strict=True):
            if batch is not None:
                return name, None if batch.startswith(b"@") else batch.decode(errors="replace")
        own = _OWN_RUN.fullmatch(call_id)
        return (own[1] if own is not None else None), None


def unknown_call(text: str, tenant: str | None) -> ToolFailure:
    """Return the same failure for a call that never existed, has expired, or belongs to another tenant. A caller
    therefore cannot discover the calls of another tenant.
    """
    whose = f" of tenant {tenant}" if tenant is not None else ""
    return ToolFailure(
        ErrorCode.INVALID_ARGUMENTS,
        f"call {text[:128]}{whose} was not found: check the id and --tenant. Calls are stored for a day. While a "
        "tenant is paused, only the program that sent a waiting call can show it",
    )


def parse_task_id(text: str) -> tuple[str, str] | None:
    """Return the tenant and the call id in a Celery task id, as Flower shows it; None for another task."""
    match = _TASK.fullmatch(text)
    return (match[3], match[1]) if match is not None else None


def _place_json(location: SessionLocation) -> dict[str, Any]:
    return {
        "state": location.state.value,
        "host": host_of(location.queue) if location.queue else None,
        "queue": location.queue or None,
        "generation": location.fence,
        "opened_at": _instant(location.opened_at),
        "checkpoint": show_checkpoint(location.checkpoint),
        "checkpoint_at": _instant(location.checkpoint_at),
    }


def _result_json(result: ToolResult) -> dict[str, Any]:
    """Return the fields of a result that describe the call. The output is omitted, because only the caller may read
    it.
    """
    fields = result.model_dump(
        mode="json", include={"success", "error", "error_code", "truncated", "clocks", "kill", "sandbox"}
    )
    if isinstance(fields["sandbox"], dict):
        fields["sandbox"].pop("news")
    return fields


def _instant(at: float) -> str | None:
    return format_instant(at, "milliseconds") if at else None


def _seconds(first: float, last: float) -> float | None:
    return round(last - first, 6) if first and last >= first else None


async def _ask(command: Awaitable[Any]) -> Any:
    with broker_errors("the state of the call was not read"):
        return await command
