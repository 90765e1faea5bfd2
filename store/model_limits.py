"""The limits of model endpoints, shared by all orchestrators: rate limits that a server reports, concurrent requests,
and requests and tokens per minute.

One script per request checks all limits. A concurrent request is a lease. A process renews the leases of its requests;
the leases of a killed process expire after LEASE_S.
"""

import asyncio
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from toolcrew.concurrency.tasks import begin_shared, check_cancelled, retry_until_available
from toolcrew.contract.errors import BrokerUnavailable
from toolcrew.contract.model_endpoints import (
    BLOCK_CAUSES,
    WAIT_NOTICE_S,
    BlockReason,
    EndpointBlocked,
    ModelEndpoint,
    RequestLease,
)
from toolcrew.contract.names import model_limits_key
from toolcrew.store.clock import read_clock
from toolcrew.store.connection import RedisClient, broker_errors
from toolcrew.store.scripts import Script
from toolcrew.telemetry.logs import get_logger

log = get_logger(__name__)

LEASE_S = 20.0
RENEWALS_A_LEASE = 4
CHECK_INTERVAL_S = 0.2
"""Seconds between two checks whether a limit allows the next request."""
MAX_SPREAD_S = 2.0
"""After a block by the server, the waiting requests of all processes are sent at random moments within at most this
time, in seconds.
"""
MAX_BLOCK_S = 3600.0
"""Longest time for which a reply of a server can block its endpoint, in seconds."""
_CAUSES: Mapping[str, str] = {
    "concurrency": "concurrency limit {limit}",
    "requests_per_minute": "limit of {limit} requests per minute",
    "tokens_per_minute": "limit of {limit} tokens per minute",
    **BLOCK_CAUSES,
}

_CLOCK = """
local time = redis.call('TIME')
local now = tonumber(time[1]) + tonumber(time[2]) / 1e6
"""
# The window is a hash of seconds (`r<second>` requests, `t<second>` tokens), so its size does not grow with the rate.
_ACQUIRE = Script(
    _CLOCK
    + """
-- Returns a state, the seconds of the block or the second of this request, and the reason of the block or the limit
-- that is reached. A limit '': none.
local block = redis.call('HMGET', block_key, 'until', 'reason')
local blocked_s = tonumber(block[1] or 0) - now
if blocked_s > 0 then return {'blocked', tostring(blocked_s), block[2]} end
if concurrency ~= '' then
  redis.call('ZREMRANGEBYSCORE', leases, '-inf', now)
  if redis.call('ZCARD', leases) >= tonumber(concurrency) then return {'busy', '0', 'concurrency'} end
end
if requests_per_minute ~= '' or tokens_per_minute ~= '' then
  local rows, requests, tokens = redis.call('HGETALL', window), 0, 0
  for at = 1, #rows, 2 do
    local count = tonumber(rows[at + 1])
    if tonumber(string.sub(rows[at], 2)) <= time[1] - 60 then redis.call('HDEL', window, rows[at])
    elseif string.sub(rows[at], 1, 1) == 'r' then requests = requests + count
    else tokens = tokens + count end
  end
  -- A request with more tokens than the limit still starts when the window is empty.
  if requests >= (tonumber(requests_per_minute) or math.huge) then return {'busy', '0', 'requests_per_minute'} end
  if tokens > 0 and tokens + request_tokens > (tonumber(tokens_per_minute) or math.huge) then
    return {'busy', '0', 'tokens_per_minute'}
  end
  redis.call('HINCRBY', window, 'r' .. time[1], 1)
  redis.call('HINCRBY', window, 't' .. time[1], request_tokens)
  redis.call('EXPIRE', window, 120)
end
if concurrency ~= '' then
  redis.call('ZADD', leases, now + lease_s, lease)
  redis.call('EXPIRE', leases, 120)
end
return {'ok', time[1], ''}
""",
    keys=("block_key", "leases", "window"),
    args=("lease", "lease_s", "concurrency", "requests_per_minute", "tokens_per_minute", "request_tokens"),
)
_RELEASE = Script(
    """
-- `second`: of the request. `token_difference`: between its tokens and their estimate.
redis.call('ZREM', leases, lease)
local field = 't' .. second
if redis.call('HEXISTS', window, field) == 1 then redis.call('HINCRBY', window, field, token_difference) end
""",
    keys=("leases", "window"),
    args=("lease", "second", "token_difference"),
)
_RENEW = Script(
    _CLOCK
    + """
for _, lease in ipairs(lease_ids) do redis.call('ZADD', leases, now + lease_s, lease) end
redis.call('EXPIRE', leases, 120)
""",
    keys=("leases",),
    args=("lease_s", "lease_ids..."),
)
_BLOCK = Script(
    _CLOCK
    + """
-- A shorter block does not end a longer one.
if now + wait_s <= tonumber(redis.call('HGET', block_key, 'until') or 0) then return end
redis.call('HSET', block_key, 'until', string.format('%.6f', now + wait_s), 'reason', reason)
redis.call('EXPIRE', block_key, math.ceil(wait_s) + 60)
""",
    keys=("block_key",),
    args=("wait_s", "reason"),
)


async def read_limits(client: RedisClient, deployment: str, endpoints: Sequence[str]) -> list[tuple[int, float]]:
    """Return for each endpoint the number of running requests and the seconds for which it is blocked. Raises
    BrokerUnavailable when Redis does not answer.
    """
    prefixes = [model_limits_key(deployment, endpoint) for endpoint in endpoints]
    with broker_errors("the limits of the model endpoints were not read"):
        now = await read_clock(client)
        async with client.pipeline(transaction=False) as pipe:
            for prefix in prefixes:
                pipe.zcount(f"{prefix}:leases", now, "+inf")
                pipe.hget(f"{prefix}:block", "until")
            replies: Any = await pipe.execute()
    return [
        (int(running), max(0.0, float(until or 0) - now))
        for running, until in zip(replies[::2], replies[1::2], strict=True)
    ]


class SharedLimits:
    """The limits of one endpoint. Create one instance per process and endpoint: its requests wait in order.

    `endpoint`: the id of the endpoint in the deployment. `bounds`: the record of the endpoint, which has its limits;
    None: only blocks by the server's rate limit are shared.
    """

    def __init__(
        self,
        client: RedisClient,
        deployment: str,
        endpoint: str,
        bounds: ModelEndpoint | None = None,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        prefix = model_limits_key(deployment, endpoint)
        self._block, self._leases, self._window = (f"{prefix}:{part}" for part in ("block", "leases", "window"))
        self._client = client
        self._endpoint = endpoint
        self._bounds = bounds
        self._jitter = jitter
        self._turn = asyncio.Lock()
        self._released = asyncio.Event()
        self._waits_for = ""
        self._lease_ids: set[str] = set()
        self._renewing: asyncio.Task[None] | None = None

    async def acquire(
        self, estimate: Callable[[], int], max_wait_s: float, on_wait: Callable[[str], object] = lambda _: None
    ) -> RequestLease:
        """Wait until one more request may be sent. `estimate` returns the estimated tokens of the request; it is called
        only if tokens are limited. `on_wait` receives the cause of a wait that is longer than WAIT_NOTICE_S.

        Raises EndpointBlocked: the endpoint is blocked for longer than `max_wait_s`. Raises BrokerUnavailable: Redis
        does not answer for long.
        """
        counts_tokens = self._bounds is not None and self._bounds.tokens_per_minute is not None
        lease = RequestLease(tokens=estimate() if counts_tokens else 0)
        with self._noticing(on_wait):
            return await self._wait(lease, max_wait_s)

    async def _wait(self, lease: RequestLease, max_wait_s: float) -> RequestLease:
        # Only the request that has waited longest asks Redis, so the load on Redis does not grow with the number of
        # waiting requests.
        async with self._turn:
            while True:
                check_cancelled()
                self._released.clear()
                state, value, reason = await self._ask(lease)
                self._waits_for = reason
                if state == "ok":
                    self._hold(lease)
                    return RequestLease(value, lease.tokens, lease.id)
                if state == "blocked" and float(value) > max_wait_s:
                    raise EndpointBlocked(float(value), "down" if reason == "down" else "rate_limit")
                # Add a random time, so that the processes do not all send their requests at the end of the block.
                remaining_s, spread_s = float(value), min(MAX_SPREAD_S, 0.2 * float(value))
                wait_s = remaining_s + spread_s * self._jitter() + CHECK_INTERVAL_S * (0.5 + self._jitter())
                with suppress(TimeoutError):
                    async with asyncio.timeout(wait_s):
                        await (self._released.wait() if state == "busy" else asyncio.sleep(wait_s))

    @contextmanager
    def _noticing(self, on_wait: Callable[[str], object]) -> Iterator[None]:
        """Context manager that reports why the request in it waits. All waiting requests wait for the same cause as the
        first one.
        """

        def report() -> None:
            if self._waits_for in _CAUSES:
                on_wait(_CAUSES[self._waits_for].format(limit=getattr(self._bounds, self._waits_for, None)))

        timer = asyncio.get_running_loop().call_later(WAIT_NOTICE_S, report)
        try:
            yield
        finally:
            timer.cancel()

    async def release(self, lease: RequestLease, tokens: int) -> None:
        """End a request. `tokens`: the number of tokens that the server reported, or 0 if it reported none. A failure
        is only logged, because the lease expires later.
        """
        self._lease_ids.discard(lease.id)
        if self._bounds is not None:
            # In a task of its own: a cancelled request must end its lease, too.
            more = tokens - lease.tokens if tokens else 0
            await asyncio.shield(begin_shared(self._release(lease, more), "end-lease"))

    async def block(self, wait_s: float, reason: BlockReason) -> None:
        """Prevent all orchestrators from sending requests to the endpoint for `wait_s` seconds. Raises
        BrokerUnavailable: Redis does not answer for long.
        """
        log.warning("model_endpoint_blocked", endpoint=self._endpoint, wait_s=round(wait_s, 3), reason=reason)

        async def block() -> None:
            with broker_errors("the model endpoint was not blocked"):
                await _BLOCK.run(self._client, block_key=self._block, wait_s=min(wait_s, MAX_BLOCK_S), reason=reason)

        await retry_until_available(block)

    async def _ask(self, lease: RequestLease) -> tuple[str, str, str]:
        try:
            return await retry_until_available(lambda: self._run_acquire(lease))
        except asyncio.CancelledError:
            # The script may already have granted the lease.
            begin_shared(self._release(lease, 0), "end-lease")
            raise

    async def _run_acquire(self, lease: RequestLease) -> tuple[str, str, str]:
        limits = {
            name: value if (value := getattr(self._bounds, name, None)) is not None else ""
            for name in ("concurrency", "requests_per_minute", "tokens_per_minute")
        }
        with broker_errors("the limits of the model endpoint were not read"):
            reply = await _ACQUIRE.run(
                self._client,
                block_key=self._block,
                leases=self._leases,
                window=self._window,
                lease=lease.id,
                lease_s=LEASE_S,
                request_tokens=lease.tokens,
                **limits,
            )
        state, value, reason = (part.decode() if isinstance(part, bytes) else str(part or "") for part in reply)
        return state, value, reason

    async def _release(self, lease: RequestLease, tokens: int) -> None:
        try:
            with broker_errors("the lease of a request was not ended"):
                await _RELEASE.run(
                    self._client,
                    leases=self._leases,
                    window=self._window,
                    lease=lease.id,
                    second=lease.second,
                    token_difference=tokens,
                )
            self._released.set()
        except BrokerUnavailable as error:
            log.warning("model_lease_not_ended", endpoint=self._endpoint, error=str(error))

    def _hold(self, lease: RequestLease) -> None:
        if self._bounds is None or self._bounds.concurrency is None:
            return
        self._lease_ids.add(lease.id)
        if self._renewing is None or self._renewing.done():
            self._renewing = begin_shared(self._renew(), "renew-leases")

    async def _renew(self) -> None:
        """Renew the leases of this process while it has some."""
        while self._lease_ids:
            await asyncio.sleep(LEASE_S / RENEWALS_A_LEASE)
            if lease_ids := tuple(self._lease_ids):
                try:
                    with broker_errors("the leases of requests were not renewed"):
                        await _RENEW.run(self._client, leases=self._leases, lease_s=LEASE_S, lease_ids=lease_ids)
                except BrokerUnavailable as error:
                    log.warning("model_leases_not_renewed", endpoint=self._endpoint, error=str(error))
