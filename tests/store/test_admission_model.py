"""The admission script in Redis grants the same slots as a model in plain Python. No slot is lost."""

from collections.abc import Iterator
from typing import Any

import pytest
import redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.conftest import RedisProcess
from tests.support.redis.admission_harness import Harness, build_request, set_slots
from tests.support.redis.admission_model import Model, Queue
from toolcrew.contract.tenancy import TenantPolicy
from toolcrew.store.slots import enqueue, release, tick

POLICIES = (
    TenantPolicy(),
    TenantPolicy(weight=4, in_flight=2),
    TenantPolicy(weight=0.5, queued=3, rate_per_s=2, burst=2),
)
TENANTS = ("ada", "bob", "cyd")
QUEUES = ("host.a.1", "host.b.1")
ASK = st.tuples(
    st.just("ask"),
    st.sampled_from(TENANTS),
    st.sampled_from(QUEUES),
    st.sampled_from(("read", "bash")),
    st.sampled_from(("interactive", "batch")),
)
END = st.tuples(st.just("end"), st.integers(0, 1000), st.sampled_from((0.0, 0.25, 0.5, 2.0, 30.0)))
PASS = st.tuples(st.just("pass"), st.sampled_from((0.125, 0.5, 1.5)))
SLOTS = st.tuples(st.just("slots"), st.sampled_from(QUEUES), st.sampled_from((1, 2, 4)))
STEPS = st.lists(st.one_of(ASK, ASK, ASK, END, END, PASS, SLOTS), max_size=60)


class Pair:
    """The script and the model, with the same input for both."""

    def __init__(self, client: "redis.Redis") -> None:
        client.flushall()
        self.harness = Harness(client, now=1000.0)
        self.model = Model()
        self.client = client
        self.open: list[str] = []
        self.call_count = 0

    def ask(self, tenant: str, queue: str, tool: str, priority: Any) -> None:
        self.call_count += 1
        call = f"o1.{self.call_count}"
        policy = POLICIES[TENANTS.index(tenant)]
        request = build_request(
            tenant, queue=queue, tool=tool, priority=priority, policy=policy, limit_s=0.5 if tool == "read" else 30.0
        )
        self.model.begin(self.harness.now)
        may_wait = self.model.ask(call, request)
        answer = self.harness.step(enqueue(call, request))
        assert (call not in answer.refused) == may_wait
        if may_wait:
            self.open.append(call)

    def end(self, at: int, used_s: float) -> None:
        if self.open:
            call = self.open.pop(at % len(self.open))
            self.model.begin(self.harness.now)
            self.model.end(call, used_s)
            self.harness.step(release(call, used_s))

    def slots(self, queue: str, slots: int) -> None:
        set_slots(self.client, slots, queue)
        # Set this before the step: a call that wakes up must see the new policy.
        self.model.queues.setdefault(queue, Queue(queue, None)).slots = slots
        self.model.begin(self.harness.now)
        self.model.look(queue, slots)
        self.harness.step(tick([queue]))

    def apply(self, step: tuple[Any, ...]) -> None:
        if step[0] == "pass":
            self.harness.now += step[1]
        else:
            getattr(self, step[0])(*step[1:])

    def check(self) -> None:
        """Check that the same calls got slots in the same order, and that every number in Redis is the sum of its
        lists.
        """
        assert self.harness.held == self.model.granted
        held, waiting, numbers = self.harness.kept("held"), self.harness.kept("waiting"), self.harness.numbers()
        assert sorted(held) == sorted(call.id for queue in self.model.queues.values() for call in queue.held)
        assert sorted(waiting) == sorted(call.id for queue in self.model.queues.values() for call in queue.waiting)
        for name, fields in numbers.items():
            kind, _, suffix = name.partition(":")
            parts = dict(
                zip(
                    {"queue": ("queue",), "tenant": ("tenant",), "pair": ("queue", "tenant")}[kind],
                    suffix.split("|"),
                    strict=True,
                )
            )
            held_here = [call for call in held.values() if all(call[part] == value for part, value in parts.items())]
            assert fields.get("held", 0) == len(held_here)
            assert fields.get("waiting", 0) == sum(
                all(call[part] == value for part, value in parts.items()) for call in waiting.values()
            )
            if kind != "tenant":
                assert fields.get("long", 0) == sum(call["long"] for call in held_here)


@pytest.fixture
def client(redis_server: RedisProcess) -> Iterator["redis.Redis"]:
    with redis_server.client() as opened:
        yield opened


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=STEPS)
def test_the_admission_script_grants_the_same_slots_as_the_model(
    client: "redis.Redis", steps: list[tuple[Any, ...]]
) -> None:
    pair = Pair(client)
    for step in steps:
        pair.apply(step)
        pair.check()
    for call in list(pair.open):
        pair.end(pair.open.index(call), 0.25)
    pair.check()
