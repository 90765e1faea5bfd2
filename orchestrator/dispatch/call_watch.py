"""Sees when whoever has a call is gone, so that nobody waits for a result that cannot come."""

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from contract.errors import BrokerUnavailable
from contract.hosts import HOST_TTL_S, HostReport, parse_holder
from contract.ledger import CallRecord, CallState
from orchestrator.dispatch.task_messages import FAILED_EVENTS, build_failed_event
from orchestrator.dispatch.transport import CallLost, Delivery
from store.calls import CallStore
from store.hosts import HostStore
from store.tasks import cancel_all
from telemetry.logs import get_logger

log = get_logger(__name__)

WATCH_EVERY_S = 2.0
ANSWER_S = 2.0
"""Redis answers sooner, or something stood still."""
LOOK_AFTER_S = 3.0
"""Most calls have ended by then, and are never looked at."""
RESULT_LATE_S = 15.0
"""How long after the ledger says that a call has ended its result may still be on its way."""
BATCH = 500
MAX_LOOKS = 2000
"""Calls looked at in one round; the others follow in the next ones."""


@dataclass
class _Watched:
    delivery: Delivery
    since: float
    ended_since: float | None = None


class CallWatch:
    """Watches over the calls in flight of this process, and over the hosts of the deployment.

    `fail(task_id, error)`: hand an error to who awaits that task.
    """

    def __init__(
        self,
        store: CallStore,
        hosts: HostStore,
        fail: Callable[[str, Exception], None],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._hosts = hosts
        self._fail = fail
        self._clock = clock
        self._calls: dict[str, _Watched] = {}
        self._task: asyncio.Task[None] | None = None
        self._answered_at = self._steady_since = float("-inf")

    async def start(self) -> None:
        """Begin to watch."""
        self._task = asyncio.create_task(self._run(), name="call-watch")

    async def close(self) -> None:
        """Stop watching."""
        if self._task is not None:
            await cancel_all((self._task,))

    @contextmanager
    def over(self, task_id: str, delivery: Delivery) -> Iterator[None]:
        """While the block runs: when whoever has the call is gone, who awaits `task_id` gets CallLost."""
        self._calls[task_id] = _Watched(delivery, self._clock())
        try:
            yield
        finally:
            self._calls.pop(task_id, None)

    async def look(self) -> None:
        """One round. Raises BrokerUnavailable."""
        now = await self._steady_time()
        if now is None:
            return
        await self._store.reap_all(now)
        self._note_answer()
        until = self._clock() - LOOK_AFTER_S
        old = [(task_id, watched) for task_id, watched in self._calls.items() if watched.since <= until][:MAX_LOOKS]
        records = await self._records([watched.delivery for _, watched in old])
        reports = await self._reports(
            {queue for (_, watched), record in zip(old, records, strict=True) for queue in _queues(watched, record)}
        )
        if not self._is_steady():
            # Redis stood still meanwhile, and every report has expired.
            return
        for (task_id, watched), record in zip(old, records, strict=True):
            # Those that were looked at go behind the others.
            if self._calls.pop(task_id, None) is watched:
                self._calls[task_id] = watched
            if record is not None:
                await self._judge(task_id, watched, record, reports)

    async def _steady_time(self) -> int | None:
        """Redis's time, when it has answered for so long that whoever has not reported is gone: after an outage, or
        when this program or Redis was stopped for a while, every report has expired."""
        now = await self._hosts.now()
        self._note_answer()
        return int(now) if self._is_steady() else None

    def _is_steady(self) -> bool:
        return self._answered_at - self._steady_since >= HOST_TTL_S

    def _note_answer(self) -> None:
        """Redis has answered. After a long silence steadiness begins anew."""
        now = self._clock()
        if now - self._answered_at > WATCH_EVERY_S + ANSWER_S:
            self._steady_since = now
        self._answered_at = now

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(WATCH_EVERY_S)
            try:
                await self.look()
            except BrokerUnavailable as error:
                log.warning("calls_not_watched", error=str(error))

    async def _records(self, deliveries: Sequence[Delivery]) -> list[CallRecord | None]:
        records: list[CallRecord | None] = []
        for at in range(0, len(deliveries), BATCH):
            names = [(delivery.tenant, delivery.call_id) for delivery in deliveries[at : at + BATCH]]
            records += await self._store.find_all(names)
            self._note_answer()
        return records

    async def _reports(self, queues: set[str]) -> Mapping[str, HostReport | None]:
        reports = await self._hosts.find_all(sorted(queues))
        if queues:
            self._note_answer()
        return reports

    async def _judge(
        self, task_id: str, watched: _Watched, record: CallRecord, reports: Mapping[str, HostReport | None]
    ) -> None:
        delivery = watched.delivery
        if record.attempt < delivery.attempt and record.state not in (CallState.QUEUED, CallState.LOST):
            # No worker starts this one (store/calls.py), and what the earlier one answers is for nobody.
            self._tell(
                task_id,
                CallLost("Redis has lost its last moments, and in them that the call was sent again", has_started=True),
            )
        if record.attempt != delivery.attempt:
            return
        if record.state is CallState.DONE:
            self._judge_ended(task_id, watched, record)
        elif record.state is CallState.RUNNING and not _is_held(record, reports):
            reason = f"the worker that ran the call stopped reporting before the call ended ({record.holder})"
            await self._lose(task_id, delivery, reason, record.node or record.holder, has_started=True)
        elif record.state is CallState.QUEUED and delivery.sticky is not None and reports.get(delivery.queue) is None:
            # The reaper answers what lay in the queue; a message that a worker had just taken went with it.
            reason = f"the host {delivery.queue} stopped reporting before it began the call"
            await self._lose(task_id, delivery, reason, delivery.queue, has_started=False)
        elif record.state is CallState.LOST:
            # Noted before, and Redis's answer did not come; or by the reaper.
            self._tell(task_id, CallLost(describe_loss(record), has_started=bool(record.holder)))

    def _judge_ended(self, task_id: str, watched: _Watched, record: CallRecord) -> None:
        if watched.ended_since is None:
            watched.ended_since = self._clock()
        elif self._clock() - watched.ended_since > RESULT_LATE_S:
            self._tell(
                task_id,
                CallLost(f"{record.holder} has run the call to its end, and its result was lost", has_started=True),
            )

    async def _lose(self, task_id: str, delivery: Delivery, reason: str, node: str, *, has_started: bool) -> None:
        """Mark the call as lost, unless it has moved on meanwhile: no worker can start or finish it after that. `node`:
        the Celery name of its worker.
        """
        expected = CallState.RUNNING if has_started else CallState.QUEUED
        is_lost = await self._store.lose(delivery.tenant, delivery.call_id, delivery.attempt, expected, reason)
        self._note_answer()
        if is_lost:
            self._tell(task_id, CallLost(reason, has_started=has_started))
            await self._announce(task_id, delivery, node, reason)

    async def _announce(self, task_id: str, delivery: Delivery, node: str, reason: str) -> None:
        """Publish Celery's task-failed event in place of the dead worker. Otherwise Flower would show the task as
        STARTED from then on.
        """
        event = build_failed_event(delivery, task_id, node, f"HostLost({reason!r})")
        try:
            await self._store.announce(FAILED_EVENTS, event)
        except BrokerUnavailable as error:
            # The caller has its result. Flower is only a view.
            log.warning("lost_task_not_announced", task=task_id, error=str(error))

    def _tell(self, task_id: str, lost: CallLost) -> None:
        """Once: there is nothing more to watch."""
        self._calls.pop(task_id, None)
        self._fail(task_id, lost)


def _queues(watched: _Watched, record: CallRecord | None) -> Iterator[str]:
    """Whose reports say whether the call still has somebody."""
    if watched.delivery.sticky is not None:
        yield watched.delivery.queue
    if record is not None and record.holder:
        yield parse_holder(record.holder)[0]


def _is_held(record: CallRecord, reports: Mapping[str, HostReport | None]) -> bool:
    """Whether the worker that runs the call lives: the very process, for a worker beside sandboxes, of which one
    follows another.
    """
    queue, worker = parse_holder(record.holder)
    report = reports.get(queue)
    if report is None:
        return False
    return report.kind != "sandbox" or report.worker == worker


def describe_loss(record: CallRecord) -> str:
    """Return what is known of a lost call, for its caller. Models read it, so it has none of the record's free text,
    which is not signed.
    """
    return (
        "the worker that ran the call was lost"
        if record.holder
        else "the host of the call was lost before it began the call"
    )
