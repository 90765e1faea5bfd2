"""The choice of the next call that gets a slot: shares, caps, rates and long calls."""

from collections import Counter
from collections.abc import Iterator

import pytest

from contract.tenancy import TenantPolicy
from store.slots import enqueue, tick
from tests.admission_harness import QUEUE, Harness, build_request, set_slots
from tests.conftest import RedisProcess


@pytest.fixture
def harness(redis_server: RedisProcess) -> Iterator[Harness]:
    with redis_server.client() as client:
        set_slots(client, 4)
        yield Harness(client)


def tenants(harness: Harness) -> Counter[str]:
    return Counter(call["tenant"] for call in harness.kept("held").values())


def play(
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
    taken: set[str] = set()
    until = harness.now + for_s
    while harness.now < until:
        for call in [call for call in harness.held if call not in taken][: 4 - len(running)]:
            taken.add(call)
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
def test_a_queue_has_more_short_calls_ready(harness: Harness, slots: int, seconds: float, held: int) -> None:
    set_slots(harness.client, slots)
    harness.record_duration("acme", seconds)
    for _ in range(40):
        harness.ask()
    assert len(harness.kept("held")) == held


def test_very_short_calls_take_no_share_from_other_tenants(harness: Harness) -> None:
    used = play(
        harness,
        {"quick": TenantPolicy(), "slow": TenantPolicy()},
        {"quick": 0.02, "slow": 0.4},
        for_s=15,
        callers={"quick": 40},
    )
    assert share(used, "slow") == pytest.approx(0.5, rel=0.1)


def test_seconds_are_shared_out_by_weight(harness: Harness) -> None:
    used = play(
        harness, {"heavy": TenantPolicy(weight=3), "light": TenantPolicy()}, {"heavy": 0.5, "light": 0.5}, for_s=40
    )
    assert share(used, "heavy") == pytest.approx(0.75, rel=0.05)


def test_a_tenant_that_was_away_has_saved_nothing_up(harness: Harness) -> None:
    seconds = {"stayed": 0.25, "came": 0.25}
    play(harness, {"stayed": TenantPolicy()}, seconds, for_s=15)
    used = play(harness, {"stayed": TenantPolicy(), "came": TenantPolicy()}, seconds, for_s=10)
    assert share(used, "came") == pytest.approx(0.5, rel=0.1)


def test_a_tenant_that_comes_and_goes_with_every_call_gets_no_more_than_its_share(harness: Harness) -> None:
    """The tenant rarely has a waiting call when one of its calls ends. The script must still remember the tenant's
    use.
    """
    policies = {"heavy": TenantPolicy(weight=9), "fleeting": TenantPolicy()}
    used = play(harness, policies, {"heavy": 0.4, "fleeting": 0.4}, for_s=30, callers={"heavy": 24, "fleeting": 2})
    assert share(used, "fleeting") == pytest.approx(0.1, abs=0.03)


def test_long_calls_of_one_tenant_leave_a_slot_to_others(harness: Harness) -> None:
    for _ in range(20):
        harness.ask("hog", limit_s=60.0)
    assert tenants(harness) == {"hog": 3}
    harness.ask("other")
    assert tenants(harness) == {"hog": 3, "other": 1}


def test_long_calls_of_all_tenants_leave_the_broker_s_queue_to_short_ones(harness: Harness) -> None:
    harness.record_duration("quick", 0.01)
    for _ in range(5):
        harness.ask("hog")
        harness.ask("bear")
    assert sum(tenants(harness).values()) == 4
    harness.ask("quick")
    assert tenants(harness)["quick"] == 1


def test_a_tenant_whose_calls_turn_out_long_gets_no_more_of_them(harness: Harness) -> None:
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


def test_a_cap_holds_over_all_queues_and_wakes_what_waits_in_another(harness: Harness) -> None:
    policy = TenantPolicy(in_flight=2)
    set_slots(harness.client, 4, "host.b.1")
    here = [harness.ask(policy=policy) for _ in range(2)]
    there = harness.ask(policy=policy, queue="host.b.1")
    assert there not in harness.held
    harness.end(here[0])
    assert there in harness.held


def test_calls_begin_no_faster_than_the_tenants_rate(harness: Harness) -> None:
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


def test_sums_stay_while_calls_run_and_until_the_rate_limit_allows_a_full_burst(harness: Harness) -> None:
    key, policy = "toolcrew:d:admission:tenant:acme", TenantPolicy(rate_per_s=0.01, burst=20)
    harness.end(harness.ask(policy=policy))
    assert harness.client.ttl(key) > 1900
    harness.ask(policy=policy)
    assert harness.client.ttl(key) == -1


def test_nothing_is_left_of_who_has_gone(harness: Harness) -> None:
    """Only sums remain, and they expire by themselves."""
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
    lasting = [key for key in harness.client.scan_iter("toolcrew:d:admission:*") if harness.client.ttl(key) == -1]
    assert lasting == [b"toolcrew:d:admission:clock"]


def test_interactive_calls_go_before_a_batch_which_is_not_starved(harness: Harness) -> None:
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


def test_short_calls_pass_the_long_ones_of_their_own_tenant_that_may_not_go(harness: Harness) -> None:
    harness.record_duration("acme", 0.01, tool="read_tool")
    for _ in range(10):
        harness.ask(tool="bash_tool")
    harness.ask(tool="read_tool")
    assert Counter(call["tool"] for call in harness.kept("held").values()) == {"bash_tool": 3, "read_tool": 1}


def test_who_has_too_many_calls_waiting_is_refused_and_reported_when_to_try_again(harness: Harness) -> None:
    policy = TenantPolicy(queued=2)
    for _ in range(5):
        harness.ask(policy=policy)
    answer = harness.step(enqueue("o1.more", build_request(policy=policy)))
    assert list(answer.refused) == ["o1.more"]
    assert 0.1 <= answer.refused["o1.more"] <= 60
    assert len(harness.kept("waiting")) == 2


def test_an_urgent_call_passes_everything_and_counts(harness: Harness) -> None:
    policy = TenantPolicy(in_flight=1, queued=1)
    harness.ask(policy=policy)
    harness.ask(policy=policy)
    urgent = harness.ask(policy=policy, is_urgent=True)
    assert urgent in harness.held
    assert harness.numbers()[f"queue:{QUEUE}"]["held"] == 2


def test_a_call_that_did_not_run_costs_nothing_and_teaches_nothing(harness: Harness) -> None:
    call = harness.ask()
    harness.now += 20
    harness.end(call, 0.0)
    assert harness.numbers()[f"pair:{QUEUE}|acme"]["used"] == 0
    assert not harness.client.exists("toolcrew:d:admission:estimates:acme")
