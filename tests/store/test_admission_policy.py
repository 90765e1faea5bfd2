"""The choice of the next call that gets a slot: shares, caps, rates and long calls."""

from collections import Counter
from collections.abc import Iterator

import pytest

from tests.conftest import RedisProcess
from tests.support.redis.admission_harness import QUEUE, Harness, build_request, set_slots
from toolcrew.contract.tenancy import TenantPolicy
from toolcrew.store.slots import enqueue, tick


@pytest.fixture
def harness(redis_server: RedisProcess) -> Iterator[Harness]:
    with redis_server.client() as client:
        set_slots(client, 4)
        yield Harness(client)


def tenants(harness: Harness) -> Counter[str]:
    return Counter(call["tenant"] for call in harness.kept("held").values())


def simulate(
    harness: Harness,
    policies: dict[str, TenantPolicy],
    durations: dict[str, float],
    *,
    for_s: float,
    callers: dict[str, int] | None = None,
) -> Counter[str]:
    """Seconds of four workers that each tenant got in that time; each has so many callers, who ask anew when their call
    has ended.

    Workers take calls in the order in which they were granted. Afterwards all is given back.
    """
    owner = {
        harness.ask(tenant, policy=policy): tenant
        for tenant, policy in policies.items()
        for _ in range((callers or {}).get(tenant, 12))
    }
    used: Counter[str] = Counter()
    running: list[tuple[float, str]] = []
    started: set[str] = set()
    until = harness.now + for_s
    while harness.now < until:
        for call in [call for call in harness.held if call not in started][: 4 - len(running)]:
            started.add(call)
            running.append((harness.now + durations[owner[call]], call))
        running.sort()
        harness.now, call = running.pop(0)
        tenant = owner[call]
        used[tenant] += durations[tenant]
        harness.end(call, durations[tenant])
        owner[harness.ask(tenant, policy=policies[tenant])] = tenant
    for call in [*harness.kept("waiting"), *harness.held]:
        harness.end(call, 0.0)
    return used


def share(used: Counter[str], tenant: str) -> float:
    return used[tenant] / sum(used.values())


@pytest.mark.parametrize(
    ("slots", "seconds", "held"), [(4, 0.1, 6), (4, 0.01, 8), (1, 0.1, 2), (1, 0.01, 5), (16, 0.1, 24), (16, 0.01, 32)]
)
def test_a_queue_grants_more_calls_than_slots_when_calls_are_short(
    harness: Harness, slots: int, seconds: float, held: int
) -> None:
    set_slots(harness.client, slots)
    harness.record_duration("acme", seconds)
    for _ in range(40):
        harness.ask()
    assert len(harness.kept("held")) == held


def test_very_short_calls_do_not_reduce_the_share_of_another_tenant(harness: Harness) -> None:
    used = simulate(
        harness,
        {"quick": TenantPolicy(), "slow": TenantPolicy()},
        {"quick": 0.02, "slow": 0.4},
        for_s=15,
        callers={"quick": 40},
    )
    assert share(used, "slow") == pytest.approx(0.5, rel=0.1)


def test_run_time_is_divided_by_tenant_weight(harness: Harness) -> None:
    used = simulate(
        harness, {"heavy": TenantPolicy(weight=3), "light": TenantPolicy()}, {"heavy": 0.5, "light": 0.5}, for_s=40
    )
    assert share(used, "heavy") == pytest.approx(0.75, rel=0.05)


def test_an_idle_tenant_accumulates_no_share(harness: Harness) -> None:
    seconds = {"stayed": 0.25, "came": 0.25}
    simulate(harness, {"stayed": TenantPolicy()}, seconds, for_s=15)
    used = simulate(harness, {"stayed": TenantPolicy(), "came": TenantPolicy()}, seconds, for_s=10)
    assert share(used, "came") == pytest.approx(0.5, rel=0.1)


def test_a_tenant_with_short_idle_gaps_gets_no_more_than_its_share(harness: Harness) -> None:
    """The tenant rarely has a waiting call when one of its calls ends. The script must still remember the tenant's
    use.
    """
    policies = {"heavy": TenantPolicy(weight=9), "sparse": TenantPolicy()}
    used = simulate(harness, policies, {"heavy": 0.4, "sparse": 0.4}, for_s=30, callers={"heavy": 24, "sparse": 2})
    assert share(used, "sparse") == pytest.approx(0.1, abs=0.03)


def test_long_calls_of_one_tenant_leave_one_slot_free(harness: Harness) -> None:
    for _ in range(20):
        harness.ask("hog", limit_s=60.0)
    assert tenants(harness) == {"hog": 3}
    harness.ask("other")
    assert tenants(harness) == {"hog": 3, "other": 1}


def test_short_calls_are_granted_ahead_while_long_calls_fill_all_slots(harness: Harness) -> None:
    harness.record_duration("quick", 0.01)
    for _ in range(5):
        harness.ask("hog")
        harness.ask("bear")
    assert sum(tenants(harness).values()) == 4
    harness.ask("quick")
    assert tenants(harness)["quick"] == 1


def test_calls_that_run_longer_than_estimated_count_as_long(harness: Harness) -> None:
    harness.record_duration("hog", 0.01)
    first = harness.ask("hog")
    second = harness.ask("hog")
    harness.now += 1.5
    for _ in range(10):
        harness.ask("hog")
    assert tenants(harness) == {"hog": 3}
    harness.end(first, 1.5)
    harness.end(second, 1.5)
    assert tenants(harness) == {"hog": 3}


def test_an_in_flight_limit_covers_all_queues_and_wakes_calls_in_another_queue(harness: Harness) -> None:
    policy = TenantPolicy(in_flight=2)
    set_slots(harness.client, 4, "host.b.1")
    local_calls = [harness.ask(policy=policy) for _ in range(2)]
    other_call = harness.ask(policy=policy, queue="host.b.1")
    assert other_call not in harness.held
    harness.end(local_calls[0])
    assert other_call in harness.held


def test_calls_start_no_faster_than_the_tenant_rate_limit(harness: Harness) -> None:
    policy = TenantPolicy(rate_per_s=2, burst=2)
    set_slots(harness.client, 100)
    for _ in range(10):
        harness.ask(policy=policy)
    assert len(harness.held) == 2
    answer = harness.step(tick([]))
    assert answer.wake_s == pytest.approx(0.5)
    for seconds in range(1, 4):
        harness.now += 1
        harness.step(tick([]))
        assert len(harness.held) == 2 + 2 * seconds


def test_tenant_counters_do_not_expire_before_the_burst_is_full_again(harness: Harness) -> None:
    key, policy = "toolcrew:d:admission:tenant:acme", TenantPolicy(rate_per_s=0.01, burst=20)
    harness.end(harness.ask(policy=policy))
    assert harness.client.ttl(key) > 1900
    harness.ask(policy=policy)
    assert harness.client.ttl(key) == -1


def test_counters_of_idle_tenants_expire(harness: Harness) -> None:
    """Every key except the clock has a TTL after the last call ends."""
    policy = TenantPolicy(in_flight=2, rate_per_s=5, burst=1)
    calls = [
        harness.ask(tenant, queue=queue, policy=policy)
        for tenant in ("a", "b")
        for queue in (QUEUE, "host.b.1")
        for _ in range(5)
    ]
    for call in calls:
        harness.now += 0.3
        harness.end(call, 0.2)
    harness.now += 5
    harness.step(tick([]))
    keys_without_ttl = [
        key for key in harness.client.scan_iter("toolcrew:d:admission:*") if harness.client.ttl(key) == -1
    ]
    assert keys_without_ttl == [b"toolcrew:d:admission:clock"]


def test_interactive_calls_run_before_batch_calls_without_starving_them(harness: Harness) -> None:
    set_slots(harness.client, 1)
    harness.record_duration("acme", 0.1)
    batch = [harness.ask(priority="batch") for _ in range(4)]
    interactive = [harness.ask() for _ in range(20)]
    order = []
    while harness.held:
        order.append(harness.held[0])
        harness.end(harness.held[0])
    assert order[:2] == batch[:2]
    assert order[2:11] == [*interactive[:7], batch[2], interactive[7]]
    assert len(order) == 24


def test_a_short_call_overtakes_blocked_long_calls_of_its_tenant(harness: Harness) -> None:
    harness.record_duration("acme", 0.01, tool="read_tool")
    for _ in range(10):
        harness.ask(tool="bash_tool")
    harness.ask(tool="read_tool")
    assert Counter(call["tool"] for call in harness.kept("held").values()) == {"bash_tool": 3, "read_tool": 1}


def test_a_call_above_the_queue_limit_is_refused_with_a_retry_delay(harness: Harness) -> None:
    policy = TenantPolicy(queued=2)
    for _ in range(5):
        harness.ask(policy=policy)
    answer = harness.step(enqueue("o1.more", build_request(policy=policy)))
    assert list(answer.refused) == ["o1.more"]
    assert 0.1 <= answer.refused["o1.more"] <= 60
    assert len(harness.kept("waiting")) == 2


def test_an_urgent_call_ignores_limits_and_is_counted(harness: Harness) -> None:
    policy = TenantPolicy(in_flight=1, queued=1)
    harness.ask(policy=policy)
    harness.ask(policy=policy)
    urgent = harness.ask(policy=policy, is_urgent=True)
    assert urgent in harness.held
    assert harness.numbers()[f"queue:{QUEUE}"]["held"] == 2


def test_a_call_that_did_not_run_changes_neither_usage_nor_estimates(harness: Harness) -> None:
    call = harness.ask()
    harness.now += 20
    harness.end(call, 0.0)
    assert harness.numbers()[f"pair:{QUEUE}|acme"]["used"] == 0
    assert not harness.client.exists("toolcrew:d:admission:estimates:acme")
