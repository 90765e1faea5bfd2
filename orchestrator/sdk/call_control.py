"""Kills a call from any process, and reports how the call ended. A waiting call never begins; a running call is killed
on its host.
"""

import asyncio
import time
from dataclasses import dataclass

from toolcrew.contract.errors import ErrorCode, OperatorError, ToolFailure
from toolcrew.contract.hosts import parse_holder
from toolcrew.orchestrator.dispatch.pool_connection import PoolConnection
from toolcrew.orchestrator.dispatch.request import build_cancel
from toolcrew.orchestrator.terminal.commands import build_command
from toolcrew.store.audit import Actor, build_entry, entry_text
from toolcrew.store.call_reader import unknown_call
from toolcrew.store.call_records import MAX_REASON_CHARS, CallRecord, CallState, KillOrder
from toolcrew.store.calls import CallStore

LOOKUP_S = 5.0
"""Seconds to search for a call that has no record yet, because its program has not sent it. Each program reads the
orders to kill calls twice a second.
"""
SHORT_LOOKUP_S = 0.75
"""Seconds to search for a call that has no record and waits for no slot. Such a call exists only in a program that is
about to request a slot.
"""
END_TIMEOUT_S = 30.0
"""Limit of the wait for the end of a call, in seconds. The limit is longer than the removal of a sandbox whose
processes do not end.
"""
REPEAT_ORDER_S = 1.0
"""Seconds before the order to kill a call is sent again. The first order may reach the host before the call does."""
POLL_S = 0.05


@dataclass(frozen=True)
class KilledCall:
    """A call that has ended after an order to kill it. `already_ended`: the call had already ended before the order."""

    record: CallRecord
    already_ended: bool


class CallControl:
    """Kills calls of one deployment on behalf of an actor."""

    def __init__(self, pool: PoolConnection, deployment: str) -> None:
        self._dispatcher = pool.dispatcher
        self._calls = CallStore(pool.redis, deployment)

    async def kill(
        self, tenant: str, call_id: str, actor: Actor, reason: str = "", *, lookup_s: float | None = None
    ) -> KilledCall:
        """Kill a call and return when it has ended. Its caller gets CANCELLED with the actor and `reason`, unless the
        call ended by itself at that moment. `lookup_s`: time to look for a call without a record; None: LOOKUP_S.

        Raises ToolFailure(INVALID_ARGUMENTS) for an unknown call or a reason that is too long, OperatorError when the
        call has not ended after half a minute, BrokerUnavailable.
        """
        lookup_s = LOOKUP_S if lookup_s is None else lookup_s
        order = _build_order(tenant, call_id, actor, reason)
        before = await self._calls.find(tenant, call_id)
        # A lost call may be sent again until it is killed.
        if before is not None and before.state.has_ended and before.state is not CallState.LOST and not before.killed:
            return KilledCall(before, already_ended=True)
        began = time.monotonic()
        while True:
            state = await self._calls.kill(order)
            record = await self._calls.find(tenant, call_id)
            if record is not None and record.state is CallState.RUNNING:
                await self._cancel_in_worker(tenant, call_id, record)
            record = await self._await_end(tenant, call_id, lookup_s if state is None else REPEAT_ORDER_S)
            if record is not None:
                return KilledCall(record, already_ended=False)
            waited_s = time.monotonic() - began
            if state is None and waited_s >= lookup_s:
                raise unknown_call(call_id, tenant)
            if waited_s > END_TIMEOUT_S:
                raise OperatorError(
                    f"call {call_id} was killed but still runs after {END_TIMEOUT_S:g} s: "
                    f"check `{build_command('calls', 'show', call_id, tenant=tenant)}` and `toolcrew hosts list`"
                )

    async def _cancel_in_worker(self, tenant: str, call_id: str, record: CallRecord) -> None:
        """Send the order to the worker that runs the call."""
        queue, _ = parse_holder(record.holder)
        await self._dispatcher.send_order(build_cancel(call_id), tenant, record.session or None, queue or record.queue)

    async def _await_end(self, tenant: str, call_id: str, within_s: float) -> CallRecord | None:
        """Return the record of the call if it ends within that time; None if not."""
        until = time.monotonic() + min(within_s, REPEAT_ORDER_S)
        while time.monotonic() < until:
            record = await self._calls.find(tenant, call_id)
            if record is not None and record.state.has_ended:
                return record
            await asyncio.sleep(POLL_S)
        return None


def _build_order(tenant: str, call_id: str, actor: Actor, reason: str) -> KillOrder:
    if len(reason) > MAX_REASON_CHARS:
        raise ToolFailure(
            ErrorCode.INVALID_ARGUMENTS, f"the reason has {len(reason)} characters: use at most {MAX_REASON_CHARS}"
        )
    entry = build_entry(actor, "call.kill", call_id, tenant=tenant, details={"reason": reason})
    try:
        return KillOrder(tenant=tenant, call=call_id, by=actor.label(), reason=reason, entry=entry_text(entry))
    except ValueError:
        raise unknown_call(call_id, tenant) from None
