"""Stores of the records of calls, for orchestrators and for workers. call_scripts.py shows the states of a call."""

import json
import math
import secrets
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from pydantic import ValidationError

from toolcrew.contract.calls import MAX_TIMEOUT_S, ToolCall, ToolContext
from toolcrew.contract.errors import ErrorCode
from toolcrew.contract.hosts import HEARTBEAT_S, HOST_LOST_TYPE, HOST_TTL_S, TOMBSTONE_TTL_S
from toolcrew.contract.names import (
    account_key,
    audit_key,
    call_key,
    control_queue,
    host_key,
    hosts_key,
    kills_key,
    location_key,
    result_key,
    tombstone_key,
)
from toolcrew.store.call_records import (
    CALL_TTL_S,
    RESULT_TTL_S,
    CallClaim,
    CallRecord,
    CallState,
    KillOrder,
    parse_record,
)
from toolcrew.store.call_scripts import CANCEL, CHANGE, CLAIM, FINISH, KEEP_RESULT, LOSE, REAP, REFUSE, STORE
from toolcrew.store.clock import SharedClock, read_clock
from toolcrew.store.connection import RedisClient, SyncRedis, broker_errors
from toolcrew.store.scripts import WorkerScript
from toolcrew.store.usage import CallEnding, StoredChange, totals_of
from toolcrew.telemetry.logs import get_logger

log = get_logger(__name__)

REAP_BATCH = 500
TRUSTED_S = int(HOST_TTL_S - 2 * HEARTBEAT_S)
"""When it is certain that Redis received workers' reports at some time, a missing report proves, for this many seconds
after that time, that the host of the report is lost.
"""
FORGET_S = 600
"""Seconds after the last report of a lost host during which its queue is still checked, because another process may
still have sent a message to the queue.
"""
READ_BATCH = 500
_NO_DEADLINE = 1e12
_BY_CALLER: dict[str, Any] = {"kill_keys": [], "order": "", "message": "", "entry": "", "is_ours": 0}
"""Arguments of CANCEL for a call that its own caller cancels."""

# --- Orchestrators ----------------------------------------------------------------------------------------------------


class CallStore:
    """Records of calls, for orchestrators. Every method raises BrokerUnavailable when Redis does not answer.
    `process`: the name of this process.
    """

    def __init__(self, client: RedisClient, deployment: str, process: str = "") -> None:
        self._client = client
        self._deployment = deployment
        self._process = process

    async def find(self, tenant: str, call_id: str) -> CallRecord | None:
        """Return the record of a call; None if there is no record, or if this release cannot read the record."""
        return (await self.find_all([(tenant, call_id)]))[0]

    async def find_all(self, calls: Sequence[tuple[str, str]]) -> list[CallRecord | None]:
        """Return the records of calls in the given order. Each call is a pair of tenant and call id."""
        records: list[CallRecord | None] = []
        for at in range(0, len(calls), READ_BATCH):
            with broker_errors("the records of calls were not read"):
                async with self._client.pipeline(transaction=False) as pipe:
                    for tenant, call_id in calls[at : at + READ_BATCH]:
                        pipe.hgetall(call_key(self._deployment, tenant, call_id))
                    replies = await pipe.execute()
            records += [
                _parse_record(call_id, fields)
                for (_, call_id), fields in zip(calls[at : at + READ_BATCH], replies, strict=True)
            ]
        return records

    async def has_result(self, task_id: str) -> bool:
        """Return whether the result of a Celery task is stored."""
        with broker_errors("it is not known whether the result is stored"):
            return bool(await self._client.exists(result_key(task_id)))

    async def keep_result(self, tenant: str, task_id: str) -> None:
        """Count a result that stays in Redis until it expires for the memory of its tenant."""
        with broker_errors("the memory of a result was not counted"):
            await KEEP_RESULT.run(
                self._client, result=result_key(task_id), account=account_key(self._deployment, tenant)
            )

    async def now(self) -> float:
        """Return the time of Redis in Unix seconds. The records expire by this clock."""
        return await read_clock(self._client)

    async def forbid(self, tenant: str, call_id: str, attempt: int) -> str:
        """Forbid a call that no worker has claimed. Return the previous state: `queued` if the call waited and is now
        forbidden, `superseded` if the record belongs to another attempt.
        """
        with broker_errors("it is not known whether the call has started"):
            state = await CANCEL.run(
                self._client, call=call_key(self._deployment, tenant, call_id), **_BY_CALLER, given_attempt=attempt
            )
        return _text(state)

    async def lose(self, tenant: str, call_id: str, attempt: int, expected: CallState, reason: str) -> bool:
        """Mark the call as lost, with the time, this process and the reason. Return False if its state is not
        `expected`.
        """
        with broker_errors("the call was not marked as lost"):
            is_lost = await LOSE.run(
                self._client,
                call=call_key(self._deployment, tenant, call_id),
                attempt=attempt,
                expected=expected.value,
                state=CallState.LOST.value,
                noticed_by=self._process,
                reason=reason,
            )
        return bool(is_lost)

    async def renew(self, tenant: str, call_id: str, attempt: int) -> bool:
        """Prepare a lost call for its next attempt. The earlier worker can then neither start nor finish the call.
        Also works for a call that has ended and whose result was lost. Return False if the call is forbidden, or if
        another process has sent it again.
        """
        return await self._set(tenant, call_id, attempt, CallState.QUEUED, attempt + 1) == CallState.QUEUED

    async def give_up(
        self, tenant: str, call_id: str, attempt: int, state: CallState, code: ErrorCode
    ) -> CallState | None:
        """Mark the call as ended with `code`, because no process waits for it any longer. Return the resulting state:
        `done` if the call has ended normally.
        """
        record = await self._set(tenant, call_id, attempt, state, attempt, code.value)
        return CallState(record) if record else None

    async def kill(self, order: KillOrder, *, is_ours: bool = False) -> CallState | None:
        """Store an order to kill a call; repeatable. Return the resulting state of the call: FORBIDDEN if the call will
        never start. Return None for a call without a record: only the program that makes the call knows its state.
        `is_ours`: this process makes the call.
        """
        with broker_errors("the call was not killed"):
            state = await CANCEL.run(
                self._client,
                call=call_key(self._deployment, order.tenant, order.call),
                kill_keys=[kills_key(self._deployment), audit_key(self._deployment)],
                given_attempt="",
                order=order.model_dump_json(),
                message=order.describe(),
                entry=order.entry,
                is_ours=int(is_ours),
            )
        if not state:
            return None
        return CallState.FORBIDDEN if _text(state) == CallState.QUEUED else CallState(_text(state))

    async def recent_kills(self, after: float) -> list[tuple[float, KillOrder]]:
        """Return the orders of the last minute that were given after `after`, each with its time."""
        with broker_errors("it is not known which calls are to be ended"):
            rows: Any = await self._client.zrangebyscore(
                kills_key(self._deployment), f"({after!r}", "+inf", withscores=True
            )
        return [(float(at), order) for text, at in rows if (order := _parse_order(text)) is not None]

    async def kill_reason(self, tenant: str, call_id: str) -> tuple[str, bool]:
        """Return the message that says who killed a call and why ("" if the call was not killed), and whether the call
        never started.
        """
        with broker_errors("it is not known whether the call was killed"):
            fields: Any = await self._client.hmget(call_key(self._deployment, tenant, call_id), "killed", "state")
        reason, state = (field.decode(errors="replace") if isinstance(field, bytes) else "" for field in fields)
        return reason, state == CallState.FORBIDDEN

    async def reap(self, queue: str, now: int) -> bool:
        """Unless the host instance `queue` reports, declare it lost, and answer the calls in its queue with an error.
        Return whether the instance is lost. A lost instance can never continue under that name.

        Any orchestrator may call this method, because the script is atomic. `now`: a time of Redis at which reports
        certainly arrived, at most TRUSTED_S before the script runs.
        """
        deployment = self._deployment
        before, after = _lost_result(queue)
        reap = partial(
            REAP.run,
            self._client,
            report=host_key(deployment, queue),
            queue=queue,
            control=control_queue(queue),
            tombstone=tombstone_key(deployment, queue),
            hosts=hosts_key(deployment),
            tombstone_ttl_s=TOMBSTONE_TTL_S,
            batch=REAP_BATCH,
            before=before,
            after=after,
            result_ttl_s=RESULT_TTL_S,
            result_prefix=result_key(""),
            forget_s=FORGET_S,
            act_until=now + TRUSTED_S,
            noticed_by=self._process,
            reason=_describe_lost_queue(queue),
        )
        total = 0
        with broker_errors("the queue of a lost host was not read"):
            # Remove the messages in small batches, because a script blocks Redis while it runs.
            while (count := int(await reap())) > 0:
                total += count
        if total:
            log.warning("host_reaped", queue=queue, messages=total)
        return count == 0

    async def reap_all(self, now: int) -> list[str]:
        """Reap every host instance that has not reported for HOST_TTL_S. Return the queues of the lost instances."""
        with broker_errors("the hosts were not read"):
            names: Any = await self._client.zrangebyscore(hosts_key(self._deployment), "-inf", now - HOST_TTL_S)
        return [queue for queue in (name.decode() for name in names) if await self.reap(queue, now)]

    async def announce(self, channel: str, event: str) -> None:
        """Publish the Celery event that a dead worker can no longer send. `channel`: the name of the pub/sub channel,
        without the number of the Redis database that kombu puts before it.
        """
        database = self._client.connection_pool.connection_kwargs.get("db") or 0
        with broker_errors("the event was not published"):
            await self._client.publish(f"/{database}.{channel}", event)

    async def _set(
        self, tenant: str, call_id: str, attempt: int, state: CallState, new_attempt: int, code: str = ""
    ) -> str:
        with broker_errors("the state of the call was not changed"):
            reply = await CHANGE.run(
                self._client,
                call=call_key(self._deployment, tenant, call_id),
                attempt=attempt,
                state=state.value,
                new_attempt=new_attempt,
                code=code,
            )
        return _text(reply)


def _lost_result(queue: str) -> tuple[str, str]:
    """Return the error result for calls that are left in a dead host's queue, as two texts: what comes before and what
    comes after the task id.
    """
    error = {"exc_type": HOST_LOST_TYPE, "exc_message": [_describe_lost_queue(queue)], "exc_module": "toolcrew"}
    fields = json.dumps({"status": "FAILURE", "result": error, "traceback": None, "children": []})
    return '{"task_id": ', ", " + fields[1:]


def _describe_lost_queue(queue: str) -> str:
    return f"the host {queue} stopped reporting while the call waited in its queue"


def _parse_order(text: bytes) -> KillOrder | None:
    try:
        return KillOrder.model_validate_json(text)
    except ValidationError as error:
        log.error("kill_order_unreadable", error=type(error).__name__)
        return None


def _parse_record(call_id: str, fields: Any) -> CallRecord | None:
    try:
        return parse_record(fields)
    except (ValidationError, UnicodeDecodeError) as error:
        log.error("call_record_unreadable", call=call_id, error=type(error).__name__)
        return None


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


# --- Workers ----------------------------------------------------------------------------------------------------------


class WorkerCallStore:
    """Records of calls, for workers. A call is started once or refused once, however often a queue repeats its
    message.

    Every reply updates the shared clock with Redis's time. If Redis has lost a record completely,
    workers/celery_edge/broker.py detects the repetition before this class is used. `node`: the Celery name of the
    worker. Every method raises BrokerUnavailable when Redis does not answer.
    """

    def __init__(self, client: SyncRedis, deployment: str, clock: SharedClock, node: str = "") -> None:
        self._deployment = deployment
        self._node = node
        self._client = client
        self._clock = clock
        self._claim = WorkerScript(client, CLAIM)

    def claim(
        self, call: ToolCall, context: ToolContext, holder: str, meanwhile: Callable[[], object] = lambda: None
    ) -> CallClaim:
        """Decide whether the call may start now, on behalf of `holder`. After BrokerUnavailable, the call must not
        start.

        A claim after the deadline forbids the call: EXPIRED. A claim for a session that has moved changes nothing:
        MOVED. `meanwhile` runs while Redis decides (WorkerScript).
        """
        key = self._key(context.tenant, call.id)
        fence = context.fence if context.session is not None and context.fence is not None else ""
        location = location_key(self._deployment, context.tenant, context.session) if fence and context.session else key
        may_move = int(call.name == "session.open")
        return self._decide(
            partial(self._claim.run, meanwhile),
            context,
            call=key,
            location=location,
            holder=holder,
            deadline=repr(context.deadline_at),
            fence=fence,
            may_move=may_move,
            tool=call.name,
            session=context.session or "",
            node=self._node,
        )

    def confirm(self, call: ToolCall, context: ToolContext, holder: str) -> CallClaim:
        """Store again that a call runs, after this worker has claimed it. Return GRANTED if Redis had lost the claim,
        even if the session has moved.
        """
        # The call runs already, and the record must say so, whatever its deadline and its session's location are.
        return self.claim(call, context.model_copy(update={"deadline_at": _NO_DEADLINE, "fence": None}), holder)

    def refuse(self, call: ToolCall, context: ToolContext, holder: str) -> CallClaim:
        """Refuse a call. Return GRANTED if the refusal is the final result of the call; the call then never starts.
        `holder`: if this holder has claimed the call for this message, the refusal reverts the claim.
        """
        run = partial(REFUSE.run_blocking, self._client)
        return self._decide(run, context, call=self._key(context.tenant, call.id), holder=holder)

    def forbid(self, tenant: str, call_id: str) -> bool:
        """Forbid a call that may be on its way. Return False if the call has started."""
        with broker_errors("the call was not cancelled"):
            state = CANCEL.run_blocking(self._client, call=self._key(tenant, call_id), **_BY_CALLER, given_attempt="")
        return _text(state) in (CallState.QUEUED, CallState.FORBIDDEN)

    def holder(self, tenant: str, call_id: str) -> str | None:
        """Return the name under which a worker has claimed the running call; None if the call does not run."""
        with broker_errors("it is not known who runs the call"):
            state, holder = self._client.hmget(self._key(tenant, call_id), "state", "holder")
        is_running = state == CallState.RUNNING.encode()
        return holder.decode(errors="replace") if is_running and isinstance(holder, bytes) else None

    def _key(self, tenant: str, call_id: str) -> str:
        return call_key(self._deployment, tenant, call_id)

    def _decide(self, run: Callable[..., Any], context: ToolContext, **values: str | int) -> CallClaim:
        """Run a script with `_GATE`, and return its decision. `values`: its keys and its other arguments."""
        ttl_s = CALL_TTL_S + max(0, math.ceil(context.timeout_s - MAX_TIMEOUT_S))  # `finish` sets CALL_TTL_S again
        with broker_errors("the call was not run, because its claim was not recorded"):
            # A token for each decision: with one per call, a repeated message would pass as the first one.
            verdict, now = run(attempt=context.attempt, ttl_s=ttl_s, token=secrets.token_hex(8), **values)
        self._clock.learn(float(now))
        return CallClaim(verdict.decode())


class FinishedCalls:
    """Stores the results of calls. One script stores and publishes a result, marks its call as done, and counts what
    the call and its session used.

    Raises the errors of the Redis client: its caller, Celery's result backend, decides which errors to retry.
    """

    def __init__(self, client: SyncRedis) -> None:
        self._client = client
        self._finish = WorkerScript(client, FINISH)
        self._store = WorkerScript(client, STORE)

    def store(self, task_id: str, text: str, ttl_s: int, ending: CallEnding | None) -> bool:
        """Store a result. `ending` None: the call was not run, and its record does not change. Return False if the
        call was sent again: its caller waits for the result of that attempt.
        """
        key = result_key(task_id)
        if ending is None:
            return bool(self._store.run(result=key, text=text, result_ttl_s=ttl_s))
        is_stored = self._finish.run(
            result=key,
            text=text,
            result_ttl_s=ttl_s,
            call=call_key(ending.deployment, ending.tenant, ending.call),
            ttl_s=CALL_TTL_S,
            attempt=ending.attempt,
            code=ending.code,
            sandbox=ending.sandbox,
            session_usage=ending.session_key,
            meter=ending.usage.meter if ending.usage is not None else "",
            totals=totals_of(ending.usage) if ending.usage is not None else "",
            location=ending.location_key or key,
            folder=ending.folder,
            fence=ending.fence or "",
            **(ending.stored or StoredChange("", None)).arguments(ending.deployment, ending.tenant),
        )
        return bool(is_stored)

    def lose(self, call: str, attempt: int, node: str, reason: str) -> None:
        """Mark a running call as lost, because the process that ran it has died. `call`: the Redis key of its record.
        `node`: the Celery name of its worker.
        """
        LOSE.run_blocking(
            self._client,
            call=call,
            attempt=attempt,
            expected=CallState.RUNNING.value,
            state=CallState.LOST.value,
            noticed_by=node,
            reason=reason,
        )
