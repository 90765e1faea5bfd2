"""Sees when whoever has a call is gone, so that nobody waits for a result that cannot come."""

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import redis.asyncio
from pydantic import ValidationError
from redis.exceptions import RedisError

from contract.errors import BrokerUnavailable
from contract.hosts import HOST_TTL_S, HostReport, parse_holder
from contract.ledger import CallRecord, CallState, parse_record
from contract.names import call_key, host_key
from orchestrator.dispatch.call_ledger import CallLedger, describe_loss
from orchestrator.dispatch.reaper import Reaper
from orchestrator.dispatch.task_messages import build_failed_event, failed_events_channel
from orchestrator.dispatch.transport import CallLost, Delivery
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
        client: "redis.asyncio.Redis",
        deployment: str,
        fail: Callable[[str, Exception], None],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._deployment = deployment
        self._fail = fail
        self._clock = clock
        self._ledger = CallLedger(client, deployment)
        self._reaper = Reaper(client, deployment)
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
        """One round. Raises RedisError, OSError, BrokerUnavailable."""
        now = await self._steady_time()
        if now is None:
            return
        await self._reaper.sweep(now)
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
        """Redis's time, when it has answered for so long that whoever has not reported is gone: after an outage, or when this program or Redis was stopped
        for a while, every report has expired."""
        seconds, _ = await self._client.time()
        self._note_answer()
        return int(seconds) if self._is_steady() else None

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
            except (RedisError, OSError, BrokerUnavailable) as error:
                log.warning("calls_not_watched", error=str(error))

    async def _records(self, deliveries: Sequence[Delivery]) -> list[CallRecord | None]:
        keys = [call_key(self._deployment, delivery.tenant, delivery.call_id) for delivery in deliveries]
        records: list[CallRecord | None] = []
        for at in range(0, len(keys), BATCH):
            async with self._client.pipeline(transaction=False) as pipe:
                for key in keys[at : at + BATCH]:
                    pipe.hgetall(key)
                records += [_parse(fields) for fields in await pipe.execute()]
            self._note_answer()
        return records

    async def _reports(self, queues: set[str]) -> Mapping[str, HostReport | None]:
        names = sorted(queues)
        texts: list[Any] = await self._client.mget([host_key(self._deployment, queue) for queue in names]) if names else []
        if names:
            self._note_answer()
        return {queue: _report(text) for queue, text in zip(names, texts, strict=True)}

    async def _judge(self, task_id: str, watched: _Watched, record: CallRecord, reports: Mapping[str, HostReport | None]) -> None:
        delivery = watched.delivery
        if record.attempt < delivery.attempt and record.state not in (CallState.QUEUED, CallState.LOST):
            # No worker starts this one (workers/ledger.py), and what the earlier one answers is for nobody.
            self._tell(task_id, CallLost("Redis has lost its last moments, and in them that the call was sent again", has_started=True))
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
            self._tell(task_id, CallLost(f"{record.holder} has run the call to its end, and its result was lost", has_started=True))

    async def _lose(self, task_id: str, delivery: Delivery, reason: str, node: str, *, has_started: bool) -> None:
        """Mark the call as lost, unless it has moved on meanwhile: no worker can start or finish it after that. `node`: the Celery name of its worker."""
        expected = CallState.RUNNING if has_started else CallState.QUEUED
        is_lost = await self._ledger.lose(delivery.tenant, delivery.call_id, delivery.attempt, expected, reason)
        self._note_answer()
        if is_lost:
            self._tell(task_id, CallLost(reason, has_started=has_started))
            await self._announce(task_id, delivery, node, reason)

    async def _announce(self, task_id: str, delivery: Delivery, node: str, reason: str) -> None:
        """Publish Celery's task-failed event in place of the dead worker. Otherwise Flower would show the task as STARTED from then on."""
        database = self._client.connection_pool.connection_kwargs.get("db") or 0
        event = build_failed_event(delivery, task_id, node, f"HostLost({reason!r})")
        try:
            await self._client.publish(failed_events_channel(database), event)
        except (RedisError, OSError) as error:
            # The caller has its answer. Flower is only a view.
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
    """Whether the worker that runs the call lives: the very process, for a worker beside sandboxes, of which one follows another."""
    queue, worker = parse_holder(record.holder)
    report = reports.get(queue)
    if report is None:
        return False
    return report.kind != "sandbox" or report.worker == worker


def _report(text: bytes | str | None) -> HostReport | None:
    if text is None:
        return None
    try:
        return HostReport.model_validate_json(text)
    except ValidationError:
        log.error("host_report_unreadable")
        return None


def _parse(fields: Any) -> CallRecord | None:
    try:
        return parse_record(fields)
    except (ValidationError, UnicodeDecodeError):
        log.error("call_record_unreadable")
        return None
