"""Rules and quotas of a session. sandboxd sends the rules in the first line of a connection.

A quota belongs to the session, not to a connection, so a client cannot get more by opening several connections. Only
sandboxd says which session a connection belongs to; the client's bytes come after that line.
"""

import asyncio
import contextlib
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator
from typing import Annotated, Literal

import structlog
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from toolcrew.contract.invalid_input import describe_invalid
from toolcrew.contract.secrets import MAX_SECRETS
from toolcrew.contract.tenant_classes import EgressRules
from toolcrew.workers.egress.outcomes import EgressOutcome, Refusal, refuse_bad_gateway, refuse_exhausted
from toolcrew.workers.egress.processor_share import ProcessorShare
from toolcrew.workers.egress.secrets import BoundSecret

OpeningName = Annotated[str, Field(min_length=1, max_length=256)]
MAX_STORED_SESSIONS = 100_000
"""Maximum number of sessions with a byte count. Beyond it, the count of the least recently used session restarts at
zero.
"""
MAX_MASKED_ANSWERS, MASKED_ANSWERS_S = 100, 60.0
"""Limit of the answers of one session in which a secret is masked, and the seconds for which it counts."""
_BURST_S = 0.1
_MIN_BURST_BYTES = 1024


class EgressOpening(BaseModel):
    """First line of a connection (JSON). There are no default rules: a session without rules reaches no host."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    v: Literal[1]
    tenant: OpeningName
    session: OpeningName
    rules: EgressRules
    run: OpeningName | None = None
    secrets: Annotated[tuple[BoundSecret, ...], Field(max_length=MAX_SECRETS)] = ()


class EgressQuestion(BaseModel):
    """A question of sandboxd to the proxy, as the first line in place of an opening. The proxy answers and closes the
    connection.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    v: Literal[1]
    ask: Literal["authority", "uses"]


def parse_opening(line: bytes) -> EgressOpening | EgressQuestion:
    """Parse sandboxd's first line. Raises Refusal for a line that is not an opening or a question of this version."""
    with contextlib.suppress(ValidationError):
        return EgressQuestion.model_validate_json(line)
    try:
        return EgressOpening.model_validate_json(line)
    except ValidationError as error:
        raise refuse_bad_gateway(
            EgressOutcome.BAD_OPENING,
            f"sandboxd did not send what this session may reach ({describe_invalid(error)}), so nothing can be "
            "reached: report it to the operator",
        ) from None


log = structlog.get_logger(__name__)


class ByteRateLimiter:
    """Limits the rate of many connections together. They wait in order of arrival. A burst has at most the bytes of a
    tenth of a second.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = asyncio.Lock()
        self._tokens = 0.0
        self._filled_at = clock()
        self._rate = 0

    def set_rate(self, bytes_per_second: int) -> None:
        if not self._rate:
            self._tokens = self._burst(bytes_per_second)
        self._rate = bytes_per_second

    async def take(self, max_bytes: int) -> int:
        """Wait until the rate allows more bytes. Return the allowed number, between 1 and `max_bytes`."""
        if self._lock.locked() or self._fill() < min(max_bytes, self._min_take()):
            async with self._lock:
                while (missing := min(max_bytes, self._min_take()) - self._fill()) > 0:  # noqa: ASYNC110
                    # The refill depends only on time, so there is no event to wait for.
                    await asyncio.sleep(missing / self._rate)
        granted = min(max_bytes, int(self._tokens))
        self._tokens -= granted
        return granted

    def give_back(self, count: int) -> None:
        """Give unused bytes back to the limit."""
        self._tokens += count

    def _fill(self) -> float:
        now = self._clock()
        self._tokens = min(self._burst(self._rate), self._tokens + (now - self._filled_at) * self._rate)
        self._filled_at = now
        return self._tokens

    def _min_take(self) -> int:
        # Count chunks, not bytes: a chunk of any size costs the same work.
        return self._burst(self._rate) // 4

    @staticmethod
    def _burst(rate: int) -> int:
        return max(_MIN_BURST_BYTES, int(rate * _BURST_S))


class ConnectionQuota:
    """The quota of one session, shared by all of its connections. Bytes of both directions count."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.connections = 0
        self._clock = clock
        self._masked_at: deque[float] = deque(maxlen=MAX_MASKED_ANSWERS)
        self._used = 0
        self._max_bytes = 0
        self._rate_limiter = ByteRateLimiter(clock)

    def set_rules(self, opening: EgressOpening) -> None:
        """Apply the rules of the session's newest opening line to all of its connections."""
        self._max_bytes = opening.rules.max_bytes
        self._rate_limiter.set_rate(opening.rules.bytes_per_second)

    async def take(self, max_bytes: int) -> int:
        """Return how many bytes, up to `max_bytes`, may be read now. Returns 0 when the session has used its quota."""
        available = await self._rate_limiter.take(max_bytes)
        granted = max(0, min(available, self._max_bytes - self._used))
        self._rate_limiter.give_back(available - granted)
        self._used += granted
        return granted

    async def charge(self, count: int) -> None:
        """Charge the quota for `count` bytes that the proxy itself produced (decompressed data). Wait for the session's
        rate. Raises Refusal when the quota is used up.
        """
        while count:
            granted = await self.take(count)
            if not granted:
                raise self.build_spent_refusal()
            count -= granted

    def give_back(self, count: int) -> None:
        """Give bytes back to the quota that were taken and not read."""
        self._used -= count
        self._rate_limiter.give_back(count)

    def count_masked_answer(self) -> None:
        """Count an answer in which a secret was masked."""
        self._masked_at.append(self._clock())

    def check_masked_answers(self) -> None:
        """Raise Refusal if so many answers contained a secret that the session seems to search for it."""
        if len(self._masked_at) == MAX_MASKED_ANSWERS and self._clock() - self._masked_at[0] < MASKED_ANSWERS_S:
            raise refuse_exhausted(
                EgressOutcome.SECRET_RETURNED,
                f"{MAX_MASKED_ANSWERS} responses of the last {MASKED_ANSWERS_S:g} s contained a secret of the session: "
                "wait, and make requests whose responses do not repeat the secret",
            )

    @property
    def is_used_up(self) -> bool:
        return self._used >= self._max_bytes

    def build_spent_refusal(self) -> Refusal:
        return refuse_exhausted(
            EgressOutcome.BYTES_SPENT,
            f"this session has sent and received the {self._max_bytes} bytes of its network quota: continue without "
            f"the network",
        )


class ConnectionQuotas:
    """The quotas of all sessions. `max_tenant_connections`: maximum number of open connections of one tenant, over all
    of its sessions.
    """

    def __init__(
        self,
        max_tenant_connections: int,
        max_sessions: int = MAX_STORED_SESSIONS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_tenant_connections = max_tenant_connections
        self._max_sessions = max_sessions
        self._clock = clock
        self._sessions: OrderedDict[tuple[str, str], ConnectionQuota] = OrderedDict()
        self._shares: dict[str, ProcessorShare] = {}
        self._tenants: Counter[str] = Counter()

    @contextlib.contextmanager
    def enter(self, opening: EgressOpening) -> Iterator[ConnectionQuota]:
        """Yield the session's quota for one more connection. Raises Refusal when no more connection is allowed."""
        quota = self._find(opening)
        self._check(opening, quota)
        quota.connections += 1
        self._tenants[opening.tenant] += 1
        try:
            yield quota
        finally:
            quota.connections -= 1
            self._tenants[opening.tenant] -= 1
            if not self._tenants[opening.tenant]:
                del self._tenants[opening.tenant]

    def find_share(self, tenant: str) -> ProcessorShare:
        """Return the tenant's share of the processor. It outlives the connections: operators name the tenants."""
        return self._shares.setdefault(tenant, ProcessorShare())

    def _check(self, opening: EgressOpening, quota: ConnectionQuota) -> None:
        if quota.is_used_up:
            raise quota.build_spent_refusal()
        max_connections = opening.rules.max_connections
        if quota.connections >= max_connections:
            raise refuse_exhausted(
                EgressOutcome.TOO_MANY_CONNECTIONS,
                f"this session has {quota.connections} open connections, and the limit is {max_connections}: wait "
                f"until one ends, or use fewer connections",
            )
        if self._tenants[opening.tenant] >= self._max_tenant_connections:
            raise refuse_exhausted(
                EgressOutcome.TOO_MANY_CONNECTIONS,
                f"this tenant's sessions have {self._max_tenant_connections} open connections, which is the limit: "
                f"try again later",
            )

    def _find(self, opening: EgressOpening) -> ConnectionQuota:
        key = (opening.tenant, opening.session)
        quota = self._sessions.setdefault(key, ConnectionQuota(self._clock))
        self._sessions.move_to_end(key)
        quota.set_rules(opening)
        self._forget_oldest()
        return quota

    def _forget_oldest(self) -> None:
        while len(self._sessions) > self._max_sessions:
            key, oldest = next(iter(self._sessions.items()))
            if oldest.connections:
                return  # the entries are in order of last use: all after this one are more recent
            del self._sessions[key]
            log.warning("egress_session_forgotten", tenant=key[0], session=key[1], remembered=self._max_sessions)
