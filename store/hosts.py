"""Which workers live, as they report themselves, and the order that takes one out of service."""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any, Literal

import redis.asyncio
from pydantic import ValidationError
from redis.exceptions import RedisError

from contract.calls import ToolCall, ToolContext
from contract.envelope import encode_call
from contract.errors import BrokerUnavailable, ConfigError, OperatorError
from contract.hosts import DRAIN_ORDER, HostReport
from contract.names import control_queue, host_key, hosts_key
from contract.signing import SigningKeys
from contract.tenancy import DEFAULT_TENANT
from store.actors import Actor, local_actor
from store.audit import build_entry, note_entry
from telemetry.logs import get_logger

log = get_logger(__name__)

FRESH_S = 1.0
ORDER_TTL_S = 60
TAKEN_S = 12.0
"""How long an order to drain may take to show: the worker reads it at once and reports it at once, unless Redis or the worker is busy."""
POLL_S = 0.25

DrainState = Literal["draining", "drained", "lost"]


class RedisHosts:
    """The reports of workers in Redis, read again at most every FRESH_S seconds. Every method raises BrokerUnavailable when Redis does not answer."""

    def __init__(self, client: "redis.asyncio.Redis", deployment: str) -> None:
        self._client = client
        self._deployment = deployment
        self._known: list[HostReport] = []
        self._read_at = float("-inf")
        self._turn = asyncio.Lock()
        self._unreadable: set[str] = set()

    async def reports(self) -> list[HostReport]:
        """The last report of each living worker, by queue."""
        async with self._turn:
            if time.monotonic() - self._read_at >= FRESH_S:
                self._known, self._read_at = await self.read(), time.monotonic()
        return self._known

    async def read(self) -> list[HostReport]:
        """The same as of now."""
        try:
            names: Any = await self._client.zrange(hosts_key(self._deployment), 0, -1)
            queues = sorted(name.decode(errors="replace") for name in names)
            texts: Any = await self._client.mget([host_key(self._deployment, queue) for queue in queues]) if queues else []
        except (RedisError, OSError) as error:
            raise _unavailable(error) from error
        found = [self._parsed(queue, text) for queue, text in zip(queues, texts, strict=True) if text is not None]
        return [report for report in found if report is not None]

    async def queued(self, queues: Sequence[str]) -> dict[str, int]:
        """How many calls wait in each queue."""
        try:
            async with self._client.pipeline(transaction=False) as pipe:
                for queue in queues:
                    pipe.llen(queue)
                return dict(zip(queues, await pipe.execute(), strict=True))
        except (RedisError, OSError) as error:
            raise _unavailable(error) from error

    async def dead_queues(self) -> dict[str, int]:
        """Queues of workers that are listed and do not report any more, each with how many calls lie in it."""
        try:
            names: Any = await self._client.zrange(hosts_key(self._deployment), 0, -1)
        except (RedisError, OSError) as error:
            raise _unavailable(error) from error
        living = {report.queue for report in await self.read()}
        return await self.queued(sorted({name.decode(errors="replace") for name in names} - living))

    async def order_drain(self, report: HostReport, keys: SigningKeys, *, lossy: bool = False, actor: Actor | None = None) -> None:
        """Tell a worker to go out of service; returns when it says that it does. `actor` None: whoever runs this program.

        Raises ConfigError when its sessions would lose their files, and `lossy` does not allow it; OperatorError when it does not take the order.
        """
        if report.kind == "sandbox" and report.store == "local" and not lossy:
            raise ConfigError(
                f"the checkpoints of {report.host} do not leave it, so its sessions would lose their files: set TOOLCREW_WORKSPACE_STORE of every sandboxd "
                "to one store that all hosts share, or give --lossy"
            )
        now = await self._now()
        call = ToolCall(id=secrets.token_hex(16), name=DRAIN_ORDER, arguments={"queue": report.queue, "lossy": lossy})
        envelope = encode_call(call, ToolContext(tenant=DEFAULT_TENANT, sent_at=now, deadline_at=now + ORDER_TTL_S), keys)
        details = {"lossy": "yes" if lossy else None, "host": report.host}
        entry = build_entry(actor or local_actor(), "host.drain", report.queue, details=details)
        try:
            async with self._client.pipeline(transaction=True) as pipe:
                note_entry(pipe, self._deployment, entry)
                pipe.lpush(control_queue(report.queue), envelope)
                pipe.expire(control_queue(report.queue), ORDER_TTL_S)
                await pipe.execute()
        except (RedisError, OSError) as error:
            raise _unavailable(error) from error
        until = time.monotonic() + TAKEN_S
        while not await self._has_begun(report):
            if time.monotonic() > until:
                raise OperatorError(f"{report.queue} was told to drain and does not say that it does: see the log of its worker")
            await asyncio.sleep(POLL_S)

    async def follow_drain(self, report: HostReport) -> AsyncIterator[tuple[DrainState, HostReport]]:
        """How a drain goes on, until the worker has ended: its last report, each time that one says something new."""
        last = report
        while True:
            now = next((one for one in await self.read() if one.queue == report.queue), None)
            if now is None or now.worker != report.worker:
                yield ("lost" if await self._is_listed(report.queue) else "drained"), last
                return
            if (now.sessions, now.busy, now.trouble) != (last.sessions, last.busy, last.trouble) or now.draining != last.draining:
                yield "draining", now
            last = now
            await asyncio.sleep(POLL_S)

    async def _has_begun(self, report: HostReport) -> bool:
        now = next((one for one in await self.read() if one.queue == report.queue), None)
        return now is None or now.draining

    async def _is_listed(self, queue: str) -> bool:
        """A worker that ends in order takes its name from the list; one that is lost leaves it there, for whoever looks after its queue."""
        try:
            return await self._client.zscore(hosts_key(self._deployment), queue) is not None
        except (RedisError, OSError) as error:
            raise _unavailable(error) from error

    async def _now(self) -> float:
        """Redis's clock, by which workers go."""
        try:
            seconds, micros = await self._client.time()
        except (RedisError, OSError) as error:
            raise _unavailable(error) from error
        return float(seconds) + float(micros) / 1_000_000

    def _parsed(self, queue: str, text: bytes) -> HostReport | None:
        try:
            return HostReport.model_validate_json(text)
        except ValidationError as error:
            if queue not in self._unreadable:
                self._unreadable.add(queue)
                log.error("host_report_unreadable", queue=queue, error=str(error.errors(include_url=False, include_input=False)[0]["msg"]))
            return None


def find_workers(reports: Sequence[HostReport], name: str) -> list[HostReport]:
    """The workers of a host, or the one of a queue. Raises ConfigError with those that there are."""
    found = [report for report in reports if name in (report.host, report.queue)]
    if not found:
        known = ", ".join(sorted({report.host for report in reports}))
        raise ConfigError(
            f"no worker of a host '{name[:100]}' reports; there are: {known}"
            if known
            else "no worker reports: start one (toolcrew worker start)"
        )
    return found


def _unavailable(error: Exception) -> BrokerUnavailable:
    return BrokerUnavailable(f"Redis does not say which hosts live ({error}): see that it is up")
