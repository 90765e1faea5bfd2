"""A second implementation of the admission policy, in plain lists and sums. The code is slow, but short enough to
check by reading. Leases and orchestrators are left out.
"""

import math
from collections import defaultdict
from dataclasses import dataclass, field

from toolcrew.contract.tenancy import TenantPolicy
from toolcrew.store.slots import SlotRequest


def shortened(value: float) -> float:
    """Return the number after a round trip through JSON in Redis, which shortens it."""
    return float(f"{value:.14g}")


TINY_S = 0.05


@dataclass
class Call:
    id: str
    request: SlotRequest
    number: int
    was_long: bool
    """The length class at the request. A call that came as long can be overtaken by short calls, and a call that came
    as short can overtake long calls.
    """
    granted_at: float = -1.0
    is_long: bool = False
    charge: float = 0.0


@dataclass
class Queue:
    name: str
    slots: int | None
    clock: float = 0.0
    number: int = 0
    waiting: list[Call] = field(default_factory=list)
    held: list[Call] = field(default_factory=list)
    used: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    run: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    ready: dict[str, tuple[bool, bool]] = field(default_factory=dict)
    """The readiness of each tenant at the last check: for a short call, and for a long call. Estimates change between
    checks.
    """

    def sizes(self) -> tuple[int, int, int]:
        """Return the number of slots, of calls that may hold a slot, and of long calls that one tenant may hold."""
        if self.slots is None:
            return 4, 4, 3
        return self.slots, max(self.slots + 1, self.slots * 3 // 2), max(1, self.slots * 9 // 10)

    def tiny_size(self) -> int:
        """Return the number of calls that may hold a slot when the next call is very short."""
        return 4 if self.slots is None else max(self.slots + 4, self.slots * 2)

    def long(self, tenant: str | None = None) -> int:
        return sum(call.is_long and tenant in (None, call.request.tenant) for call in self.held)


@dataclass
class Tenant:
    policy: TenantPolicy
    tokens: float = -1.0
    tokens_at: float = 0.0
    blocked: list[str] = field(default_factory=list)


class Model:
    """The admission state of all queues. `granted`: ids in the order of their grants."""

    def __init__(self) -> None:
        self.now = 0.0
        self.queues: dict[str, Queue] = {}
        self.tenants: dict[str, Tenant] = {}
        self.estimates: dict[tuple[str, str], float] = {}
        self.wake: dict[str, float] = {}
        self.granted: list[str] = []
        self._opened: set[str] = set()

    def begin(self, now: float) -> None:
        """Start a step at `now`."""
        self.now = now
        self._opened = set()
        for name in sorted(
            (name for name, at in self.wake.items() if at <= now), key=lambda name: (self.wake[name], name)
        ):
            del self.wake[name]
            self._unblock(name)

    def ask(self, id: str, request: SlotRequest) -> bool:
        """Return whether the call may wait."""
        queue = self._open(request.queue)
        tenant = self.tenants.setdefault(request.tenant, Tenant(request.policy))
        tenant.policy = request.policy
        if (
            sum(call.request.tenant == request.tenant for one in self.queues.values() for call in one.waiting)
            >= request.policy.queued
        ):
            return False
        queue.number += 1
        queue.waiting.append(Call(id, request, queue.number, self._is_long(request)))
        self._rank(queue, request.tenant)
        self._unblock(request.tenant)
        self._grant(queue)
        return True

    def end(self, id: str, used_s: float) -> None:
        for name in list(self.queues):
            for call in self.queues[name].waiting:
                if call.id == id:
                    return self._give_up(name, call)
            for call in self.queues[name].held:
                if call.id == id:
                    return self._give_back(name, call, used_s)
        return None

    def look(self, name: str, slots: int) -> None:
        """Set the current number of slots of the queue."""
        self.queues.setdefault(name, Queue(name, None)).slots = slots
        self._grant(self._open(name))

    def _give_up(self, name: str, call: Call) -> None:
        queue, tenant = self._open(name), call.request.tenant
        queue.waiting.remove(call)
        if not self._waiting(queue, tenant) and name in self.tenants[tenant].blocked:
            self.tenants[tenant].blocked.remove(name)
        self._rank(queue, tenant)
        self._grant(queue)

    def _give_back(self, name: str, call: Call, used_s: float) -> None:
        self.queues[name].held.remove(call)
        queue, tenant = self._open(name), call.request.tenant
        took = min(used_s, self.now - call.granted_at)
        queue.used[tenant] += took / self.tenants[tenant].policy.weight
        if used_s > 0:
            self._learn(call, took, is_over=True)
        self._rank(queue, tenant)
        self._unblock(tenant)
        self._grant(queue)

    def _open(self, name: str) -> Queue:
        queue = self.queues.setdefault(name, Queue(name, None))
        if name not in self._opened:
            self._opened.add(name)
            for call in queue.held:
                if not call.is_long and call.granted_at <= self.now - 1:
                    call.is_long = True
                    self._learn(call, self.now - call.granted_at, is_over=False)
            for tenant in {call.request.tenant for call in queue.waiting}:
                self._rank(queue, tenant)
        return queue

    def _estimate(self, request: SlotRequest) -> float:
        return min(self.estimates.get((request.tenant, request.tool), request.limit_s), request.limit_s)

    def _is_long(self, request: SlotRequest) -> bool:
        return self._estimate(request) >= 1

    def _learn(self, call: Call, used_s: float, *, is_over: bool) -> None:
        name = call.request.tenant, call.request.tool
        before = self.estimates.get(name, 0.0)
        self.estimates[name] = float(f"{max(used_s, before * 0.8 + used_s * (1 - 0.8) if is_over else before):.9g}")

    def _waiting(self, queue: Queue, tenant: str) -> list[Call]:
        return [call for call in queue.waiting if call.request.tenant == tenant]

    def _fitting(self, queue: Queue, tenant: str, *, has_long: bool) -> list[Call]:
        """Return the first call of each kind that may run under the tenant's limit of long calls. `has_long`: the
        queue's limit leaves room for long calls.
        """
        firsts: dict[tuple[str, bool], Call] = {}
        for call in self._waiting(queue, tenant):
            firsts.setdefault((call.request.priority, call.was_long), call)
        may_be_long = has_long and queue.long(tenant) < queue.sizes()[2]
        return [call for call in firsts.values() if may_be_long or not self._is_long(call.request)]

    def _rank(self, queue: Queue, tenant: str) -> None:
        """Update the rank of a tenant. A tenant that becomes ready gets no credit for the time before."""
        fitting = [] if queue.name in self.tenants[tenant].blocked else self._fitting(queue, tenant, has_long=True)
        if fitting and tenant not in queue.ready:
            queue.used[tenant] = max(queue.used[tenant], queue.clock)
        kinds = {self._is_long(call.request) for call in fitting}
        queue.ready.pop(tenant, None)
        if kinds:
            queue.ready[tenant] = (False in kinds, True in kinds)

    def _limit(self, name: str) -> float | None:
        tenant, policy = self.tenants[name], self.tenants[name].policy
        if (
            sum(call.request.tenant == name for queue in self.queues.values() for call in queue.held)
            >= policy.in_flight
        ):
            return math.inf
        if policy.rate_per_s is None:
            return None
        if tenant.tokens_at == 0:
            tenant.tokens, tenant.tokens_at = policy.burst, self.now
        tenant.tokens = min(policy.burst, tenant.tokens + (self.now - tenant.tokens_at) * policy.rate_per_s)
        tenant.tokens_at = self.now
        return None if tenant.tokens >= 0.999999 else self.now + (1 - tenant.tokens) / policy.rate_per_s

    def _unblock(self, name: str) -> None:
        tenant = self.tenants[name]
        while tenant.blocked:
            at = self._limit(name)
            if at is not None:
                self._note_wake(name, at)
                return
            queue = self._open(tenant.blocked.pop(0))
            self._rank(queue, name)
            self._grant(queue)

    def _note_wake(self, name: str, at: float) -> None:
        if at < math.inf:
            self.wake[name] = at

    def _score(self, queue: Queue, tenant: str) -> float:
        return queue.used[tenant] + sum(call.charge for call in queue.held if call.request.tenant == tenant)

    def _grant(self, queue: Queue) -> None:
        while len(queue.held) < queue.tiny_size():
            has_long = queue.long() < queue.sizes()[0]
            able = [tenant for tenant, (short, long) in queue.ready.items() if short or (long and has_long)]
            if not able:
                return
            name = min(able, key=lambda tenant: (self._score(queue, tenant), not queue.ready[tenant][0], tenant))
            if len(queue.held) >= queue.sizes()[1] and not self._is_tiny(queue, name, has_long=has_long):
                return
            at = self._limit(name)
            if at is not None:
                self.tenants[name].blocked.append(queue.name)
                self._note_wake(name, at)
                self._rank(queue, name)
                continue
            self._rank(queue, name)
            if fitting := self._fitting(queue, name, has_long=has_long):
                self._hold(queue, name, fitting)
            else:
                queue.ready.pop(name, None)
                self._rank(queue, name)

    def _is_tiny(self, queue: Queue, name: str, *, has_long: bool) -> bool:
        fitting = self._fitting(queue, name, has_long=has_long)
        return bool(fitting) and self._estimate(self._next(queue, name, fitting).request) < TINY_S

    def _next(self, queue: Queue, name: str, fitting: list[Call]) -> Call:
        is_turn_of_batch = queue.run[name] >= 7
        return min(fitting, key=lambda one: ((one.request.priority == "batch") != is_turn_of_batch, one.number))

    def _hold(self, queue: Queue, name: str, fitting: list[Call]) -> None:
        call = self._next(queue, name, fitting)
        has_batch = any(one.request.priority == "batch" for one in self._waiting(queue, name))
        queue.run[name] = queue.run[name] + 1 if call.request.priority != "batch" and has_batch else 0
        queue.waiting.remove(call)
        if self.tenants[name].policy.rate_per_s is not None:
            self.tenants[name].tokens -= 1
        queue.clock = max(queue.clock, queue.used[name])
        call.granted_at, call.is_long = self.now, self._is_long(call.request)
        call.charge = shortened(self._estimate(call.request) / self.tenants[name].policy.weight)
        queue.held.append(call)
        self.granted.append(call.id)
        self._rank(queue, name)
