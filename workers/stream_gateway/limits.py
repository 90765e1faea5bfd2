"""Limits of streams: how many are open, how often they are opened, and how many bytes they carry."""

import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

from toolcrew.contract.errors import ErrorCode, ToolFailure

MIB = 1024 * 1024
_MAX_IDLE_BUCKETS = 100_000


class TokenBucket:
    """Allows `per_s` units a second, and `burst` units at once. A taker may exceed the amount and then waits."""

    def __init__(self, per_s: float, burst: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_s = per_s
        self._burst = burst
        self._clock = clock
        self._tokens = burst
        self._at = clock()

    def take(self, count: float) -> float:
        """Take units, also more than there are. Return the seconds until the amount is no longer negative."""
        self._refill()
        self._tokens -= count
        return max(0.0, -self._tokens / self._per_s)

    def try_take(self) -> bool:
        """Take one unit if there is one."""
        self._refill()
        if self._tokens < 1.0:
            return False
        self._tokens -= 1.0
        return True

    def _refill(self) -> None:
        now = self._clock()
        self._tokens = min(self._burst, self._tokens + (now - self._at) * self._per_s)
        self._at = now


@dataclass(frozen=True)
class StreamLimits:
    """The limits of one gateway. Requests count as streams while they wait for their answer."""

    session_streams: int = 64
    tenant_streams: int = 1000
    host_streams: int = 4000
    opens_per_s: float = 20.0
    opens_burst: int = 100
    session_bytes_per_s: float = 32 * MIB
    tenant_bytes_per_s: float = 128 * MIB
    host_bytes_per_s: float = 512 * MIB
    frames_per_s: float = 4000.0
    """Frames of one sandbox, both directions. Above this rate, the gateway reads and sends more slowly."""
    tenant_frames_per_s: float = 12_000.0
    client_memory: int = 64 * MIB
    """Memory of the frames that wait for one client. A client that reads so slowly loses its connection."""
    channel_memory: int = 24 * MIB
    """Memory of the frames that wait for one sandbox. The channel of a sandbox that reads so slowly ends."""
    channels_memory: int = 256 * MIB
    """Memory of the frames that wait for all sandboxes. Beyond it, the channel with the most frames ends."""


@dataclass(frozen=True)
class TenantRates:
    """The rates of one tenant at a gateway."""

    bytes: TokenBucket
    frames: TokenBucket


@dataclass
class StreamUsage:
    """The open streams of one gateway, and its rates. Raises ToolFailure for a stream beyond a limit."""

    limits: StreamLimits = field(default_factory=StreamLimits)
    clock: Callable[[], float] = time.monotonic
    sessions: Counter[tuple[str, str]] = field(default_factory=Counter)
    tenants: Counter[str] = field(default_factory=Counter)
    total: int = 0

    def __post_init__(self) -> None:
        limits = self.limits
        self.host_bytes = self.bytes_bucket(limits.host_bytes_per_s)
        self._tenant_rates: WeakValueDictionary[str, TenantRates] = WeakValueDictionary()
        self._opens: OrderedDict[tuple[str, str], TokenBucket] = OrderedDict()

    def bytes_bucket(self, per_s: float) -> TokenBucket:
        """Return a limit of bytes with a burst of a quarter of a second."""
        return TokenBucket(per_s, per_s / 4, self.clock)

    def frames_bucket(self, per_s: float) -> TokenBucket:
        """Return a limit of frames with a burst of two seconds."""
        return TokenBucket(per_s, 2 * per_s, self.clock)

    def tenant_rates(self, tenant: str) -> TenantRates:
        """Return the rates that all channels of a tenant share. They last as long as a channel has them."""
        rates = self._tenant_rates.get(tenant)
        if rates is None:
            limits = self.limits
            rates = TenantRates(
                self.bytes_bucket(limits.tenant_bytes_per_s), self.frames_bucket(limits.tenant_frames_per_s)
            )
            self._tenant_rates[tenant] = rates
        return rates

    def open(self, tenant: str, session: str) -> None:
        """Count a stream. Raises ToolFailure: RATE_LIMITED, QUOTA_EXCEEDED."""
        limits, key = self.limits, (tenant, session)
        if not self._opens_of(key).try_take():
            raise ToolFailure(
                ErrorCode.RATE_LIMITED,
                f"the session opens more than {limits.opens_per_s:g} streams a second: try again in a second",
            )
        if self.sessions[key] >= limits.session_streams:
            raise _too_many(f"the session has {limits.session_streams} open streams")
        if self.tenants[tenant] >= limits.tenant_streams:
            raise _too_many(f"the tenant has {limits.tenant_streams} open streams on this host")
        if self.total >= limits.host_streams:
            raise ToolFailure(
                ErrorCode.RATE_LIMITED, f"the host has {limits.host_streams} open streams: try again later"
            )
        self.sessions[key] += 1
        self.tenants[tenant] += 1
        self.total += 1

    def close(self, tenant: str, session: str) -> None:
        """Count the end of a stream."""
        self.total -= 1
        self.sessions[tenant, session] -= 1
        self.tenants[tenant] -= 1
        if not self.sessions[tenant, session]:
            del self.sessions[tenant, session]
        if not self.tenants[tenant]:
            del self.tenants[tenant]

    def _opens_of(self, key: tuple[str, str]) -> TokenBucket:
        bucket = self._opens.pop(key, None) or TokenBucket(self.limits.opens_per_s, self.limits.opens_burst, self.clock)
        # In the order of the last use: the bucket that was used longest ago is full again, and is dropped first.
        self._opens[key] = bucket
        if len(self._opens) > _MAX_IDLE_BUCKETS:
            self._opens.popitem(last=False)
        return bucket


def _too_many(reason: str) -> ToolFailure:
    return ToolFailure(ErrorCode.QUOTA_EXCEEDED, f"{reason}, which is the limit: close streams that you do not use")
