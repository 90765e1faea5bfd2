"""Run single admission steps at instants that a test sets, and read the state that the steps leave in Redis."""

import itertools
import json
from typing import Any

import redis

from toolcrew.contract.names import admission_prefix, slots_key
from toolcrew.contract.tenancy import TenantPolicy
from toolcrew.store.slots import (
    Operation,
    SlotReply,
    SlotRequest,
    enqueue,
    grants_channel,
    load_script,
    parse_reply,
    release,
    script_arguments,
)

DEPLOYMENT = "d"
QUEUE = "host.a.1"


def build_request(
    tenant: str = "acme",
    *,
    queue: str = QUEUE,
    tool: str = "bash_tool",
    policy: TenantPolicy | None = None,
    **fields: Any,
) -> SlotRequest:
    terms: dict[str, Any] = {"call_id": "c", "priority": "interactive", "wait_s": 30.0, "limit_s": 30.0, **fields}
    return SlotRequest(tenant=tenant, policy=policy or TenantPolicy(), queue=queue, tool=tool, **terms)


def set_slots(client: "redis.Redis", slots: int | None, queue: str = QUEUE) -> None:
    """Write the number of slots that the heartbeats of the queue's workers would write."""
    if slots is None:
        client.delete(slots_key(DEPLOYMENT, queue))
    else:
        client.set(slots_key(DEPLOYMENT, queue), slots)


class Harness:
    """Named orchestrators that send the requests of a test."""

    def __init__(self, client: "redis.Redis", *, now: float = 1000.0) -> None:
        self.client = client
        self.now = now
        self.held: list[str] = []
        """The ids of held calls, in the order of their grants."""
        self._script = load_script()
        self._numbers = itertools.count(1)

    def step(self, *operations: Operation, by: str = "o1", lease_s: float = 20.0) -> SlotReply:
        arguments = script_arguments(DEPLOYMENT, by, operations, lease_s=lease_s, now=self.now)
        answer = parse_reply(self._script.run_blocking(self.client, **arguments))
        self.held += answer.granted
        return answer

    def ask(self, tenant: str = "acme", *, by: str = "o1", **fields: Any) -> str:
        """Request a slot for a call and return the call's id. The call then waits or holds a slot."""
        call = f"{by}.{next(self._numbers)}"
        self.step(enqueue(call, build_request(tenant, **fields)), by=by)
        return call

    def end(self, call: str, used_s: float = 0.01) -> SlotReply:
        """End a call: the call gives back its slot or stops waiting."""
        if call in self.held:
            self.held.remove(call)
        return self.step(release(call, used_s))

    def record_duration(self, tenant: str, used_s: float, *, tool: str = "bash_tool", queue: str = "elsewhere") -> None:
        """Record that the tenant's calls of this tool take `used_s` seconds."""
        call = self.ask(tenant, tool=tool, queue=queue)
        self.now += used_s
        self.end(call, used_s)

    def kept(self, kind: str) -> dict[str, Any]:
        """Return the calls that are `held` or `waiting` in Redis, as call id to record."""
        stored: Any = self.client.hgetall(admission_prefix(DEPLOYMENT) + kind)
        return {call.decode(): json.loads(text) for call, text in stored.items()}

    def subscribe(self, orchestrator: str) -> "redis.client.PubSub":
        """Subscribe to the messages that this orchestrator receives from now on."""
        listener = self.client.pubsub()
        listener.subscribe(grants_channel(DEPLOYMENT, orchestrator))
        listener.get_message(timeout=5)
        return listener

    def numbers(self) -> dict[str, dict[str, float]]:
        """Return the hashes of numbers, keyed by the part after the prefix."""
        prefix = admission_prefix(DEPLOYMENT)
        found = {}
        for kind in ("queue", "tenant", "pair"):
            for key in self.client.scan_iter(f"{prefix}{kind}:*"):
                stored: Any = self.client.hgetall(key)
                found[key.decode().removeprefix(prefix)] = {
                    name.decode(): float(value) for name, value in stored.items()
                }
        return found
