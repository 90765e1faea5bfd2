"""Monitor the calls that this process has sent. The monitor finds calls whose worker was lost, and stops calls that
an operator ended before they began.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from toolcrew.concurrency.tasks import begin_shared, cancel_all
from toolcrew.contract.calls import ToolResult
from toolcrew.contract.errors import BrokerUnavailable, ErrorCode, ToolFailure
from toolcrew.contract.hosts import HOST_TTL_S, HostReport, parse_holder
from toolcrew.orchestrator.dispatch.celery_transport import FAILED_EVENTS, build_failed_event
from toolcrew.orchestrator.dispatch.request import Attempt
from toolcrew.orchestrator.dispatch.transport import CallLost, CallSentAgain, DeliveryFailed
from toolcrew.store.call_records import CallRecord, CallState
from toolcrew.store.calls import CallStore
from toolcrew.store.hosts import HostStore
from toolcrew.telemetry.logs import get_logger

log = get_logger(__name__)

KILLS_EVERY_S = 0.5
LOSSES_EVERY_S = 2.0
ANSWER_S = 2.0
"""If Redis takes longer than this to answer, in seconds, Redis or this process must have been stopped for a while.
"""
FIRST_CHECK_AFTER_S = 3.0
"""Age in seconds at which a call is first checked. Most calls end earlier, and their records are never read."""
RESULT_LATE_S = 15.0
"""Longest normal time, in seconds, between the end of a call in its record and the arrival of its result."""
MAX_CHECKED_CALLS = 2000
"""Limit of the calls that one round checks. The next rounds check the remaining calls."""


@dataclass
class _SentAttempt:
    """An attempt at a call whose result a task of this process awaits."""

    attempt: Attempt
    since: float
    ended_since: float | None = None


@dataclass
class _CallTask:
    """A call that a task of this process makes. `kill`: the order that stopped the task; "": no order."""

    task: "asyncio.Task[Any]"
    cancelling: int
    kill: str = ""


class CallMonitor:
    """Monitors all calls of a process in one task. Twice a second the task reads the orders to kill calls. Every two
    seconds it reads the records of calls that take longer than usual, and the reports of their hosts.

    `fail(task_id, error)` raises the error in the caller that awaits that task.
    """

    def __init__(
        self,
        calls: CallStore,
        hosts: HostStore,
        fail: Callable[[str, Exception], None],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = calls
        self._hosts = hosts
        self._fail = fail
        self._clock = clock
        self._sent: dict[str, _SentAttempt] = {}
        self._making: dict[tuple[str, str], _CallTask] = {}
        self._task: asyncio.Task[None] | None = None
        self._answered_at = self._steady_since = float("-inf")
        self._kills_read_at = 0.0

    async def start(self) -> None:
        """Start the task that monitors the calls."""
        self._task = begin_shared(self._run(), "call-monitor")

    async def close(self) -> None:
        """Stop the task that monitors the calls."""
        if self._task is not None:
            await cancel_all((self._task,))

    async def _run(self) -> None:
        next_losses_at = self._clock() + LOSSES_EVERY_S
        while True:
            await asyncio.sleep(KILLS_EVERY_S)
            try:
                await self.find_kills()
                if self._clock() >= next_losses_at:
                    next_losses_at = self._clock() + LOSSES_EVERY_S
                    await self.find_losses()
            except BrokerUnavailable as error:
                log.warning("calls_not_monitored", error=str(error))

    # --- Calls that an operator ends -------------------------------------------------------------------------------

    async def watch(self, tenant: str, call_id: str, work: Awaitable[ToolResult]) -> ToolResult:
        """Return the result of the call that `work` makes. An order to kill the call stops `work` if the call has not
        begun. If the call has begun, its worker ends it, and the result says which actor ended it and why.

        Raises ToolFailure(CANCELLED) for a call that was stopped, and the exceptions of `work`.
        """
        try:
            with self._stoppable(tenant, call_id):
                result = await work
        except DeliveryFailed as failed:
            reason, has_never_begun = await self._find_reason(tenant, call_id)
            if reason and has_never_begun:
                raise _never_run(reason) from failed
            if reason:
                # The error code stays the same: the caller must know whether the call may have acted.
                raise DeliveryFailed(failed.code, f"{reason}; {failed.message}") from failed
            raise
        was_ended = result.metadata.get("cancelled") is True
        if result.error_code is not ErrorCode.CANCELLED and not was_ended:
            return result
        reason, _ = await self._find_reason(tenant, call_id)
        if not reason:
            return result
        error = f"{reason}; {result.error or 'its processes were ended'}"
        return result.model_copy(update={"success": False, "error_code": ErrorCode.CANCELLED, "error": error})

    @contextmanager
    def _stoppable(self, tenant: str, call_id: str) -> Iterator[None]:
        """Context manager: `find_kills` may stop the block, which makes the call."""
        task = asyncio.current_task()
        key = (tenant, call_id)
        if task is None or key in self._making:
            # Another call with the same id is running. Orders to kill are for the call that used the id first, so they
            # do not stop this one.
            yield
            return
        making = self._making[key] = _CallTask(task, task.cancelling())
        try:
            yield
        except asyncio.CancelledError:
            # The order caused the cancellation, unless the caller has cancelled the task as well.
            if making.kill and task.uncancel() <= making.cancelling:
                raise _never_run(making.kill) from None
            raise
        finally:
            del self._making[key]

    async def find_kills(self) -> None:
        """Stop those calls that have not begun and that an operator has ordered to kill. Raises BrokerUnavailable."""
        if not self._making:
            # Read all orders again, because an older order may be for this call: a process that continues the run of
            # another process makes the calls of that run again.
            self._kills_read_at = 0.0
            return
        for at, order in await self._store.recent_kills(self._kills_read_at):
            making = self._making.get((order.tenant, order.call))
            if making is not None and not making.kill:
                state = await self._store.kill(order, is_ours=True)
                if state is CallState.FORBIDDEN and self._making.get((order.tenant, order.call)) is making:
                    making.kill = order.describe()
                    making.task.cancel()
            self._kills_read_at = max(self._kills_read_at, at)

    async def _find_reason(self, tenant: str, call_id: str) -> tuple[str, bool]:
        """Return the text of the order that killed a call, and whether the call never began. The text is "" if no
        order killed the call, or if Redis does not answer.
        """
        try:
            return await self._store.kill_reason(tenant, call_id)
        except BrokerUnavailable as error:
            log.warning("kill_state_not_read", call=call_id, error=str(error))
            return "", False

    # --- Calls whose worker was lost -------------------------------------------------------------------------------

    @contextmanager
    def over(self, task_id: str, attempt: Attempt) -> Iterator[None]:
        """Context manager: `find_losses` checks the Celery task of the call while the block waits for its result. If
        the worker or its host is lost, `fail` raises CallLost in the caller.
        """
        self._sent[task_id] = _SentAttempt(attempt, self._clock())
        try:
            yield
        finally:
            self._sent.pop(task_id, None)

    async def find_losses(self) -> None:
        """Check the calls of one round. Raises BrokerUnavailable."""
        now = await self._steady_time()
        if now is None:
            return
        await self._store.reap_all(now)
        self._record_answer()
        until = self._clock() - FIRST_CHECK_AFTER_S
        old = [(task_id, sent) for task_id, sent in self._sent.items() if sent.since <= until][:MAX_CHECKED_CALLS]
        records = await self._store.find_all([(sent.attempt.tenant, sent.attempt.call_id) for _, sent in old])
        self._record_answer()
        queues = {queue for (_, sent), record in zip(old, records, strict=True) for queue in _list_queues(sent, record)}
        reports = await self._hosts.find_all(sorted(queues))
        self._record_answer()
        if not self._is_steady():
            # Redis was stopped during this round, so every report has expired.
            return
        for (task_id, sent), record in zip(old, records, strict=True):
            # Move each checked call behind the others.
            if self._sent.pop(task_id, None) is sent:
                self._sent[task_id] = sent
            if record is not None:
                await self._judge(task_id, sent, record, reports)

    async def _steady_time(self) -> int | None:
        """Return the time of Redis, or None while a missing report does not yet prove that its host is lost. After an
        outage, or after this process or Redis was stopped for a while, every report has expired. Hosts then need
        HOST_TTL_S to report again.
        """
        now = await self._hosts.now()
        self._record_answer()
        return int(now) if self._is_steady() else None

    def _is_steady(self) -> bool:
        return self._answered_at - self._steady_since >= HOST_TTL_S

    def _record_answer(self) -> None:
        """Record that Redis has answered. After a long time without an answer, the steady period starts again."""
        now = self._clock()
        if now - self._answered_at > LOSSES_EVERY_S + ANSWER_S:
            self._steady_since = now
        self._answered_at = now

    async def _judge(
        self, task_id: str, sent: _SentAttempt, record: CallRecord, reports: Mapping[str, HostReport | None]
    ) -> None:
        attempt = sent.attempt
        if record.attempt < attempt.number and record.state not in (CallState.QUEUED, CallState.LOST):
            # No worker starts this attempt (store/call_scripts.py), and no caller waits for the result of the earlier
            # attempt.
            reason = "Redis lost its most recent writes, and with them the record that the call was sent again"
            self._report(task_id, CallLost(reason, has_started=True))
        if record.attempt > attempt.number and attempt.request.digest:
            self._sent.pop(task_id, None)
            self._fail(task_id, CallSentAgain())
        if record.attempt != attempt.number:
            return
        if record.state is CallState.DONE:
            self._judge_ended(task_id, sent, record)
        elif record.state is CallState.RUNNING and not _is_worker_alive(record, reports):
            reason = f"the worker that ran the call stopped reporting before the call ended ({record.holder})"
            await self._lose(task_id, attempt, reason, record.node or record.holder, has_started=True)
        elif record.state is CallState.QUEUED and attempt.fence is not None and reports.get(attempt.queue) is None:
            # The reaper answers the messages in the queue. A message that a worker had just taken was lost with the
            # worker.
            reason = f"the host {attempt.queue} stopped reporting before it began the call"
            await self._lose(task_id, attempt, reason, attempt.queue, has_started=False)
        elif record.state is CallState.LOST:
            # The reaper marked the call as lost, or this process did, without receiving Redis's answer.
            self._report(task_id, CallLost(describe_loss(record), has_started=bool(record.holder)))

    def _judge_ended(self, task_id: str, sent: _SentAttempt, record: CallRecord) -> None:
        if sent.ended_since is None:
            sent.ended_since = self._clock()
        elif self._clock() - sent.ended_since > RESULT_LATE_S:
            reason = f"{record.holder} completed the call, and the result of the call was lost"
            self._report(task_id, CallLost(reason, has_started=True))

    async def _lose(self, task_id: str, attempt: Attempt, reason: str, node: str, *, has_started: bool) -> None:
        """Mark the call as lost, unless its state has changed. After that no worker can start or finish the call.
        `node`: the Celery name of its worker.
        """
        expected = CallState.RUNNING if has_started else CallState.QUEUED
        is_lost = await self._store.lose(attempt.tenant, attempt.call_id, attempt.number, expected, reason)
        self._record_answer()
        if not is_lost:
            return
        self._report(task_id, CallLost(reason, has_started=has_started))
        try:
            # Publishes Celery's task-failed event in place of the dead worker. Otherwise Flower would show the task
            # as STARTED permanently.
            await self._store.announce(
                FAILED_EVENTS, build_failed_event(attempt, task_id, node, f"HostLost({reason!r})")
            )
        except BrokerUnavailable as error:
            # The caller already has its result, so this failure only means that Flower shows a wrong state.
            log.warning("lost_task_not_announced", task=task_id, error=str(error))

    def _report(self, task_id: str, lost: CallLost) -> None:
        """Report the loss once, and stop checking the call."""
        self._sent.pop(task_id, None)
        self._fail(task_id, lost)


def _list_queues(sent: _SentAttempt, record: CallRecord | None) -> Iterator[str]:
    """Yield the queues whose reports show whether the call still has a worker."""
    if sent.attempt.fence is not None:
        yield sent.attempt.queue
    if record is not None and record.holder:
        yield parse_holder(record.holder)[0]


def _is_worker_alive(record: CallRecord, reports: Mapping[str, HostReport | None]) -> bool:
    """Return whether the worker that runs the call lives. On a host with sandboxes it must be the same process,
    because a new worker may have replaced the old one.
    """
    queue, worker = parse_holder(record.holder)
    report = reports.get(queue)
    if report is None:
        return False
    return report.kind != "sandbox" or report.worker == worker


def describe_loss(record: CallRecord) -> str:
    """Return the description of a lost call for its caller. Models read it, so it contains none of the record's free
    text, which is not signed.
    """
    return (
        "the worker that ran the call was lost"
        if record.holder
        else "the host of the call was lost before it began the call"
    )


def _never_run(reason: str) -> ToolFailure:
    return ToolFailure(ErrorCode.CANCELLED, f"{reason}; the call had not begun and was not run")
